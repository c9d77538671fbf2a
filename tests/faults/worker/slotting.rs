//! The worker that runs schedules: it looks at one now and then, runs the slots that are due, has an effect for each and
//! completes it in the transaction of the effect; or the work fails, or the look is cancelled in the middle of it.

use std::cell::Cell;

use fencepost::Error;
use fencepost::schedule::{Schedule, Slot};
use sqlx::AssertSqlSafe;
use sqlx::postgres::PgTransaction;
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use super::{Ask, DEADLINE, Place, Worker};
use crate::history::{Kind, Phase, RECOVERED, REJECTED, Record, now};
use crate::slots::Times;

pub(super) async fn work(worker: &Worker) {
    let schedules = schedules(worker);
    while !*worker.quitting.borrow() {
        let schedule = worker.dice.borrow_mut().pick(&schedules).clone();
        if worker.percent(5) {
            let most = worker.think(5, 60);
            drop(timeout(most, worker.look_for_slots(&schedule, true)).await);
        } else {
            worker.look_for_slots(&schedule, false).await;
        }
        // A timer, which is early or late.
        sleep(worker.think(0, 30)).await;
    }
}

/// One slot of each.
pub(super) async fn once(worker: &Worker) {
    for schedule in schedules(worker) {
        let run = async {
            while !worker.look_for_slots(&schedule, false).await {
                sleep(worker.think(1, 5)).await;
            }
        };
        let name = schedule.name();
        timeout(DEADLINE, run).await.unwrap_or_else(|_| panic!("no slot of {name} is run"));
    }
}

fn schedules(worker: &Worker) -> Vec<Schedule> {
    worker.orders.names.iter().map(|name| Times::of(name).unwrap().schedule()).collect()
}

/// A slot in hand. Whatever becomes of the work, in the end nobody here relies on it any more.
struct InHand<'a> {
    worker: &'a Worker,
    name: String,
    key: String,
    slot: Slot,
    is_alone: bool,
    /// Nobody asks to be stopped in a look that is cancelled.
    stays: bool,
}

impl Drop for InHand<'_> {
    fn drop(&mut self) {
        let end = self.worker.record(self.worker.next_op(), Kind::End, Phase::Invoke, &self.key);
        self.worker.history.write(&end.token(self.slot.token().as_i64()).why("the work has ended"));
    }
}

impl Worker {
    /// Whether it has completed one.
    async fn look_for_slots(&self, schedule: &Schedule, is_cancelled: bool) -> bool {
        // From when on the next one may have been begun.
        let free = Cell::new(now());
        let completed = Cell::new(false);
        let looked = schedule.run_due(&self.owner, &self.pool, |slot| {
            let name = schedule.name().to_string();
            let key = schedule.key(slot.at());
            let is_alone = Times::of(&name).is_some_and(|times| times.alone);
            let in_hand = InHand { worker: self, name, key, slot, is_alone, stays: !is_cancelled };
            let (free, completed) = (&free, &completed);
            async move {
                let op = self.next_op();
                let record = |phase| self.record(op, Kind::Acquire, phase, &in_hand.key);
                self.history.write(&Record { at: free.get(), ..record(Phase::Invoke) });
                let begun = record(Phase::Ok).token(in_hand.slot.token().as_i64());
                let recovered = in_hand.slot.recovered().is_some();
                self.history.write(&if recovered { begun.why(RECOVERED) } else { begun });
                let done = in_hand.run().await;
                drop(in_hand);
                free.set(now());
                completed.set(completed.get() || matches!(done, Ok(true)));
                done.map(drop)
            }
        });
        // Whoever fails, or loses it, looks again.
        drop(looked.await);
        completed.get()
    }
}

impl InHand<'_> {
    /// Whether it is known to be done.
    async fn run(&self) -> Result<bool, Error> {
        let done = Notify::new();
        let watch = async {
            tokio::select! {
                reason = self.slot.lost() => {
                    let lost = self.record(self.worker.next_op(), Kind::Lost, Phase::Ok);
                    self.worker.history.write(&lost.why(reason.to_string()));
                }
                () = done.notified() => {}
            }
        };
        let work = async {
            self.look_at();
            if !self.is_stopped_in(8, Place::Claimed).await {
                // One at a time, some take longer than a period: the next ones are due before the look is over.
                let longest = if self.is_alone { 200 } else { 40 };
                let most = if self.worker.percent(20) { longest } else { 4 };
                sleep(self.worker.think(0, most)).await;
            }
            self.look_at();
            let ended = if self.worker.percent(7) {
                Err(Error::from(sqlx::Error::RowNotFound))
            } else {
                self.complete().await
            };
            done.notify_one();
            ended
        };
        let ((), ended) = tokio::join!(watch, work);
        ended
    }

    /// Does the process believe that it is its own? Asked between two instants.
    fn look_at(&self) {
        let before = now();
        let answer = self.slot.is_held();
        let remaining = i64::try_from(self.slot.remaining().as_nanos()).unwrap();
        let until = Some(now());
        let phase = if answer { Phase::Ok } else { Phase::Fail };
        let record = self.record(self.worker.next_op(), Kind::Believe, phase).value(remaining);
        self.worker.history.write(&Record { at: before, until, ..record });
    }

    /// Once, or a second time if the first transaction is rolled back.
    async fn complete(&self) -> Result<bool, Error> {
        let rolls_back = self.worker.percent(6);
        for rolls_back in [rolls_back, false] {
            let op = self.worker.next_op();
            let write = |record: Record| self.worker.history.write(&record);
            let record = |phase| self.record(op, Kind::Complete, phase);
            write(record(Phase::Invoke));
            let tx = match self.effect(op).await {
                Ok(tx) => tx,
                Err(error) => {
                    let why = if error.is_lost() { REJECTED } else { "failed" };
                    write(record(Phase::Fail).why(format!("{why}: {error}")));
                    return Err(error);
                }
            };
            if rolls_back {
                drop(tx.rollback().await);
                write(record(Phase::Fail).why("rolled back"));
                continue;
            }
            write(record(Phase::Commit));
            let (phase, why) = match tx.commit().await {
                Ok(()) => (Phase::Ok, String::new()),
                Err(error) => (Phase::Unknown, format!("{error:?}")),
            };
            write(record(phase).why(why));
            if phase == Phase::Ok && self.is_alone {
                self.is_stopped_in(15, Place::Between).await;
            }
            return Ok(phase == Phase::Ok);
        }
        Ok(false)
    }

    /// The effect and the end of the slot, not yet committed.
    async fn effect(&self, op: i64) -> Result<PgTransaction<'static>, Error> {
        let mut tx = self.worker.pool.begin().await?;
        let Self { name, key, .. } = self;
        let (process, slot) = (self.worker.orders.process, self.slot.at().timestamp_micros());
        let insert = format!(
            "INSERT INTO slot_effect (name, slot, key, token, process, op) \
             VALUES ('{name}', {slot}, '{key}', {}, {process}, {op})",
            self.slot.token()
        );
        sqlx::raw_sql(AssertSqlSafe(insert)).execute(&mut *tx).await?;
        // Nobody is kept out yet.
        self.is_stopped_in(5, Place::Claimed).await;
        self.slot.complete(&mut tx).await?;
        // One at a time, the others want the next one.
        let others = if self.is_alone { Place::Between } else { Place::Completing };
        if !self.is_stopped_in(15, others).await {
            self.is_stopped_in(5, Place::Completing).await;
        }
        Ok(tx)
    }

    /// With so much of a chance it asks for it.
    async fn is_stopped_in(&self, percent: u64, place: Place) -> bool {
        let asks = self.stays && self.worker.percent(percent);
        if asks {
            let (name, token, grant) = (self.key.clone(), self.slot.token().as_i64(), String::new());
            self.worker.ask(&Ask { place, name, token, grant, value: 0 }).await;
        }
        asks
    }

    fn record(&self, op: i64, kind: Kind, phase: Phase) -> Record {
        self.worker.record(op, kind, phase, &self.key).token(self.slot.token().as_i64())
    }
}
