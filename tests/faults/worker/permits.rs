//! A worker that takes permits: one or two at once, by trying or in line; it writes through their fence, and gives them
//! back.

use std::time::Duration;

use fencepost::{Error, HeldLease, Permit, Semaphore, Wait};
use sqlx::AssertSqlSafe;
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use super::{DEADLINE, Hold, Place, Worker};
use crate::history::{CANCELLED, Kind, Phase, REJECTED, TIMED_OUT};

/// What the names of semaphores begin with.
pub(crate) const SEMAPHORE: &str = "fencepost:semaphore:";

/// How many permits each has.
pub(crate) const PERMITS: u32 = 3;

pub(crate) fn is_semaphore(name: &str) -> bool {
    name.starts_with(SEMAPHORE)
}

pub(super) async fn work(worker: &Worker) {
    while !*worker.quitting.borrow() {
        let name = worker.dice.borrow_mut().pick(&worker.orders.names).clone();
        let (count, most) = (if worker.percent(30) { 2 } else { 1 }, worker.think(1, 300));
        if let Some(permit) = worker.take(&name, count, most).await {
            worker.use_it(&permit).await;
            let drop_it = worker.percent(40);
            worker.give_back(permit, drop_it).await;
        }
    }
}

/// All permits of each, once.
pub(super) async fn once(worker: &Worker) {
    for name in &worker.orders.names {
        let permit = worker.take(name, PERMITS, DEADLINE).await;
        worker.give_back(permit.unwrap_or_else(|| panic!("{name} is never granted")), false).await;
    }
}

impl Worker {
    /// The value of the record is how many.
    async fn take(&self, name: &str, count: u32, most: Duration) -> Option<Permit> {
        let semaphore = Semaphore::named(name.strip_prefix(SEMAPHORE).unwrap(), PERMITS);
        let some = semaphore.unwrap().taking(count).unwrap();
        let op = self.next_op();
        let record = |phase| self.record(op, Kind::Permit, phase, name).value(count.into());
        self.history.write(&record(Phase::Invoke));
        let way = self.dice.borrow_mut().below(10);
        let answer = match way {
            0..3 if most < DEADLINE => timeout(most, some.acquire(&self.owner, Wait::forever())).await.ok(),
            3..6 if most < DEADLINE => some.try_acquire(&self.owner).await.transpose(),
            _ => Some(some.acquire(&self.owner, Wait::at_most(most)).await),
        };
        match answer {
            Some(Ok(permit)) => {
                self.history.write(&record(Phase::Ok).token(permit.token().as_i64()));
                return Some(permit);
            }
            None => self.history.write(&record(Phase::Fail).why(CANCELLED)),
            Some(Err(error @ (Error::Busy { .. } | Error::TimedOut { .. }))) => {
                self.history.write(&record(Phase::Fail).why(format!("{TIMED_OUT}: {error}")));
            }
            Some(Err(error)) => self.history.write(&record(Phase::Unknown).why(error.to_string())),
        }
        None
    }

    /// For a while, on after a loss: that is what a paused holder does.
    async fn use_it(&self, permit: &Permit) {
        let done = Notify::new();
        let steps = async {
            let steps = self.dice.borrow_mut().between(1, 4);
            for _ in 0..steps {
                self.look(permit);
                if self.percent(50) {
                    self.write_under(permit).await;
                } else {
                    sleep(self.think(0, 20)).await;
                }
                self.look(permit);
            }
            if self.percent(30) {
                sleep(self.think(0, u64::try_from(self.orders.ttl.as_millis()).unwrap())).await;
                self.look(permit);
            }
            done.notify_one();
        };
        tokio::join!(self.watch_loss(permit, &done), steps);
    }

    /// A fenced transaction that is open for a while: until its COMMIT is sent, a permit is in use.
    async fn write_under(&self, permit: &Permit) {
        let op = self.next_op();
        let (name, token) = (permit.name().as_str(), permit.token().as_i64());
        let record = |phase| self.record(op, Kind::Use, phase, name).token(token);
        self.history.write(&record(Phase::Invoke));
        let mut tx = match permit.begin(&self.pool).await {
            Ok(tx) => tx,
            Err(error) => {
                let why = if error.is_lost() { REJECTED } else { "not begun" };
                return self.history.write(&record(Phase::Fail).why(format!("{why}: {error}")));
            }
        };
        sleep(self.think(0, 40)).await;
        if self.percent(25) {
            // It is at work when its process stops, and for as long as that has not been noticed.
            let long = format!("SELECT pg_sleep({})", self.orders.ttl.as_secs_f64());
            let long = sqlx::raw_sql(AssertSqlSafe(long)).execute(&mut *tx);
            drop(tokio::join!(long, self.ask_to_be_stopped(Place::Permit, permit, 0)));
        }
        self.history.write(&record(Phase::Commit));
        let (phase, why) = match tx.commit().await {
            Ok(()) => (Phase::Ok, String::new()),
            Err(error) => (Phase::Unknown, error.to_string()),
        };
        self.history.write(&record(phase).why(why));
    }
}

impl Hold for Permit {
    fn lease(&self) -> &HeldLease {
        self
    }

    async fn end(self) -> fencepost::Result<bool> {
        self.release().await
    }
}
