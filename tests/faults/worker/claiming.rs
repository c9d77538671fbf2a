//! The worker that claims: takes jobs in batches or begins them by their keys, has an effect for each, and ends it in
//! the transaction of the effect; or fails it, gives it back, forgets it.

use std::rc::Rc;
use std::time::Duration;

use fencepost::Error;
use fencepost::claim::{Attempt, Claim, Jobs};
use sqlx::AssertSqlSafe;
use sqlx::postgres::PgTransaction;
use tokio::sync::Notify;
use tokio::time::sleep;

use super::{Ask, Place, Worker};
use crate::claims::{CLAIMS, KIND, key};
use crate::history::{Kind, Phase, RECOVERED, REJECTED, Record, now};

pub(super) async fn work(worker: Rc<Worker>) {
    let jobs = Jobs::of_kind(KIND).unwrap();
    while !*worker.quitting.borrow() {
        let attempts = if worker.percent(30) { worker.begin().await } else { worker.next(&jobs).await };
        for attempt in attempts {
            worker.attempt(attempt).await;
        }
        sleep(worker.think(0, 3)).await;
    }
}

impl Worker {
    async fn begin(&self) -> Vec<Attempt> {
        let key = key(self.dice.borrow_mut().below(CLAIMS));
        let op = self.next_op();
        let record = |phase| self.record(op, Kind::Acquire, phase, &key);
        self.history.write(&record(Phase::Invoke));
        match Claim::named(&key).unwrap().begin(&self.owner).await.map(fencepost::claim::Begun::into_attempt)
        {
            Ok(Some(attempt)) => {
                self.history.write(&granted(record(Phase::Ok), &attempt));
                vec![attempt]
            }
            Ok(None) => {
                self.history.write(&record(Phase::Fail));
                Vec::new()
            }
            Err(error) => {
                self.history.write(&record(Phase::Unknown).why(error.to_string()));
                Vec::new()
            }
        }
    }

    async fn next(&self, jobs: &Jobs) -> Vec<Attempt> {
        let limit = usize::try_from(self.dice.borrow_mut().between(1, 6)).unwrap();
        let before = now();
        let attempts = match jobs.claim_next(&self.owner, limit).await {
            Ok(attempts) => attempts,
            Err(_) => return Vec::new(),
        };
        if attempts.is_empty() {
            self.leave_more().await;
        }
        for attempt in &attempts {
            // Which they are is known only now.
            let op = self.next_op();
            let record = |phase| self.record(op, Kind::Acquire, phase, attempt.key().as_str());
            let ok = granted(record(Phase::Ok), attempt);
            self.history.write(&Record { at: before, ..record(Phase::Invoke) });
            self.history.write(&ok);
        }
        attempts
    }

    /// So that there is always something to do.
    async fn leave_more(&self) {
        let process = self.orders.process;
        let op = self.next_op();
        let more = format!(
            "SELECT count(fencepost.claim_enqueue('more-{process}-{op}-' || n, '{KIND}', p_max_failures => 1000000, \
             p_max_crashes => 1000000)) FROM generate_series(1, 40) n"
        );
        // What is not left is not missed.
        drop(sqlx::raw_sql(AssertSqlSafe(more)).execute(&self.pool).await);
    }

    async fn attempt(&self, attempt: Attempt) {
        let done = Notify::new();
        let key = attempt.key().to_string();
        let token = attempt.token().as_i64();
        let watch = async {
            tokio::select! {
                reason = attempt.lost() => {
                    let lost = self.record(self.next_op(), Kind::Lost, Phase::Ok, &key);
                    self.history.write(&lost.token(token).why(reason.to_string()));
                }
                () = done.notified() => {}
            }
        };
        let work = async {
            self.look_at(&attempt);
            if self.percent(5) {
                self.ask_to_be_stopped_with(Place::Claimed, &attempt).await;
            } else {
                let most = if self.percent(20) { 60 } else { 4 };
                sleep(self.think(0, most)).await;
            }
            self.look_at(&attempt);
            let end = self.dice.borrow_mut().below(100);
            match end {
                0..85 => self.complete(&attempt).await,
                85..92 => self.fail(&attempt).await,
                _ => {}
            }
            done.notify_one();
            end
        };
        let ((), end) = tokio::join!(watch, work);
        // That it has failed is said already, before it was committed.
        if !(85..92).contains(&end) {
            let ended = self.record(self.next_op(), Kind::End, Phase::Invoke, &key).token(token);
            self.history.write(&ended.why(if end >= 96 { "release" } else { "drop" }));
        }
        if end >= 96 { drop(attempt.release().await) } else { drop(attempt) }
    }

    /// Does the process believe that it is its own? Asked between two instants.
    fn look_at(&self, attempt: &Attempt) {
        let before = now();
        let answer = attempt.is_held();
        let remaining = i64::try_from(attempt.remaining().as_nanos()).unwrap();
        let until = Some(now());
        let phase = if answer { Phase::Ok } else { Phase::Fail };
        let record = self.record(self.next_op(), Kind::Believe, phase, attempt.key().as_str());
        let record = record.token(attempt.token().as_i64()).value(remaining);
        self.history.write(&Record { at: before, until, ..record });
    }

    /// Once, or a second time if the first transaction is rolled back.
    async fn complete(&self, attempt: &Attempt) {
        let rolls_back = self.percent(6);
        for rolls_back in [rolls_back, false] {
            let (op, token) = (self.next_op(), attempt.token().as_i64());
            let record = |phase| self.record(op, Kind::Complete, phase, attempt.key().as_str()).token(token);
            self.history.write(&record(Phase::Invoke));
            let tx = match self.effect(attempt, op).await {
                Ok(tx) => tx,
                Err(error) => {
                    let why = if error.is_lost() { REJECTED } else { "failed" };
                    return self.history.write(&record(Phase::Fail).why(format!("{why}: {error}")));
                }
            };
            if rolls_back {
                drop(tx.rollback().await);
                self.history.write(&record(Phase::Fail).why("rolled back"));
                continue;
            }
            self.history.write(&record(Phase::Commit));
            let (phase, why) = match tx.commit().await {
                Ok(()) => (Phase::Ok, String::new()),
                Err(error) => (Phase::Unknown, format!("{error:?}")),
            };
            return self.history.write(&record(phase).why(why));
        }
    }

    /// The effect and the end of the attempt, not yet committed.
    async fn effect(&self, attempt: &Attempt, op: i64) -> Result<PgTransaction<'static>, Error> {
        let mut tx = self.pool.begin().await?;
        let (process, key, token) = (self.orders.process, attempt.key(), attempt.token());
        let insert = format!(
            "INSERT INTO claim_effect (key, token, process, op) VALUES ('{key}', {token}, {process}, {op})"
        );
        sqlx::raw_sql(AssertSqlSafe(insert)).execute(&mut *tx).await?;
        if self.percent(5) {
            // Nobody is kept out yet.
            self.ask_to_be_stopped_with(Place::Claimed, attempt).await;
        }
        if self.percent(50) {
            // As from another language, or a process that was handed the grant: only the database says no.
            let grant = attempt.grant().id;
            let complete = format!("SELECT fencepost.claim_complete('{key}', {token}, '{grant}', '{op}')");
            sqlx::raw_sql(AssertSqlSafe(complete)).execute(&mut *tx).await?;
        } else {
            attempt.complete(&mut tx, &op).await?;
        }
        if self.percent(5) {
            self.ask_to_be_stopped_with(Place::Completing, attempt).await;
        }
        Ok(tx)
    }

    async fn fail(&self, attempt: &Attempt) {
        // From here on nobody relies on it.
        let end = self.record(self.next_op(), Kind::End, Phase::Invoke, attempt.key().as_str());
        self.history.write(&end.token(attempt.token().as_i64()).why("fail"));
        let failed = async {
            let mut tx = self.pool.begin().await?;
            attempt.fail(&mut tx, "by the dice", Duration::ZERO).await?;
            tx.commit().await?;
            Ok::<_, Error>(())
        };
        drop(failed.await);
    }

    async fn ask_to_be_stopped_with(&self, place: Place, attempt: &Attempt) {
        let (name, token) = (attempt.key().to_string(), attempt.token().as_i64());
        self.ask(&Ask { place, name, token, grant: attempt.grant().to_string(), value: 0 }).await;
    }
}

fn granted(record: Record, attempt: &Attempt) -> Record {
    let record = record.token(attempt.token().as_i64());
    if attempt.recovered().is_some() { record.why(RECOVERED) } else { record }
}
