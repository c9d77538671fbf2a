//! The worker that locks: several tasks of one process contend for session-level locks, of which a session holds
//! many; they try, wait, change their minds, hold for a moment and give back. There is no token, so that a hold is
//! known by the step that began it.

use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use fencepost::{AdvisoryLock, Error, HeldAdvisory, LossReason, Wait};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use super::waiting::{after_polls, in_tasks};
use super::{DEADLINE, Worker};
use crate::history::{CANCELLED, Kind, Phase, Record, SHARED, TIMED_OUT, now};
use crate::locks::key;

/// Tasks of one process.
const TASKS: usize = 6;

/// What the database has of the owner with this label.
const MINE: &str = "\
    SELECT 'an advisory lock, ' || l.mode || ', granted: ' || l.granted FROM pg_locks l \
      JOIN pg_stat_activity a ON a.pid = l.pid \
     WHERE l.locktype = 'advisory' AND a.application_name = 'fencepost ' || $1";

pub(super) async fn work(worker: Rc<Worker>) {
    in_tasks(worker, |worker| async move { worker.lock_again_and_again().await }, TASKS, MINE).await;
}

/// Each lock once.
pub(super) async fn once(worker: &Worker) {
    for name in &worker.orders.names {
        let lock = AdvisoryLock::exclusive(key(name));
        let held = lock.acquire(&worker.owner, Wait::at_most(DEADLINE)).await.unwrap();
        assert!(held.release().await.unwrap(), "{name}");
    }
}

/// A held lock.
struct Hold {
    held: HeldAdvisory,
    name: String,
    token: i64,
}

impl Worker {
    async fn lock_again_and_again(&self) {
        while !*self.quitting.borrow() {
            let name = self.dice.borrow_mut().pick(&self.orders.names).clone();
            if let Some(hold) = self.lock(&name).await {
                self.hold_lock(hold).await;
            }
            sleep(self.think(0, 3)).await;
        }
    }

    /// The value of the record is the longest wait in milliseconds, if there is one.
    async fn lock(&self, name: &str) -> Option<Hold> {
        let is_shared = self.percent(30);
        let lock =
            if is_shared { AdvisoryLock::shared(key(name)) } else { AdvisoryLock::exclusive(key(name)) };
        let [kind, patience] = std::array::from_fn(|_| self.dice.borrow_mut().below(20));
        let most = match kind {
            0..4 => Some(Duration::ZERO),
            4..9 => Some(Duration::from_millis(1)),
            9..13 => Some(Duration::from_micros(self.dice.borrow_mut().between(1, 5_000))),
            13..16 => Some(Duration::from_millis(50)),
            16..19 => Some(self.think(100, 2_000)),
            _ => None,
        };
        let wait = most.map_or(Wait::forever(), Wait::at_most);
        let op = self.next_op();
        let record = |phase| self.record(op, Kind::Acquire, phase, name);
        let mut invoke = record(Phase::Invoke);
        invoke.value = most.map(|most| i64::try_from(most.as_micros().div_ceil(1_000)).unwrap());
        self.history.write(&invoke);
        let acquire = async {
            if most.is_some_and(|most| most.is_zero()) {
                lock.try_acquire(&self.owner).await
            } else {
                lock.acquire(&self.owner, wait).await.map(Some)
            }
        };
        let answer = match patience {
            0..3 => timeout(self.think(0, 100), acquire).await.ok(),
            3..6 => {
                let polls = self.dice.borrow_mut().between(1, 3);
                after_polls(u32::try_from(polls).unwrap(), acquire).await
            }
            _ => Some(acquire.await),
        };
        match answer {
            Some(Ok(Some(held))) => {
                let token = i64::from(self.orders.process) * 1_000_000 + op;
                self.held.borrow_mut().insert(token, name.to_owned());
                let granted = record(Phase::Ok).token(token);
                self.history.write(&if is_shared { granted.why(SHARED) } else { granted });
                if self.stopping.get() {
                    self.is_stopped(token, name);
                }
                return Some(Hold { held, name: name.to_owned(), token });
            }
            Some(Ok(None)) => self.history.write(&record(Phase::Fail)),
            None => self.history.write(&record(Phase::Fail).why(CANCELLED)),
            Some(Err(error @ Error::Busy { .. })) => {
                self.history.write(&record(Phase::Fail).why(format!("{TIMED_OUT}: {error}")));
            }
            Some(Err(error @ Error::Stopped)) if *self.quitting.borrow() => {
                self.history.write(&record(Phase::Fail).why(error.to_string()));
            }
            Some(Err(error)) => self.history.write(&record(Phase::Unknown).why(error.to_string())),
        }
        None
    }

    /// For as long as it wants, also after a loss: looking all the time.
    async fn hold_lock(&self, hold: Hold) {
        let done = Notify::new();
        let share = self.dice.borrow_mut().below(100);
        let long = match share {
            0..12 if self.orders.habits.lingers => self.think(1_000, 2_500),
            0..85 => self.think(0, 2),
            _ => self.think(3, 30),
        };
        let steps = async {
            let mut over = pin!(sleep(long));
            loop {
                self.look_at_lock(&hold);
                tokio::select! {
                    () = &mut over => break,
                    () = sleep(self.think(1, 8)) => {}
                }
            }
            self.look_at_lock(&hold);
            done.notify_one();
        };
        tokio::join!(self.watch_lock(&hold, &done), steps);
        let drop_it = self.percent(30);
        self.unlock(hold, drop_it).await;
    }

    async fn watch_lock(&self, hold: &Hold, done: &Notify) {
        tokio::select! {
            reason = hold.held.lost() => {
                if !(self.stopping.get() && reason == LossReason::Stopped) {
                    let lost = self.record(self.next_op(), Kind::Lost, Phase::Ok, &hold.name);
                    self.history.write(&lost.token(hold.token).why(reason.to_string()));
                }
            }
            () = done.notified() => {}
        }
    }

    /// Does it believe that it holds? Asked between two instants.
    fn look_at_lock(&self, hold: &Hold) {
        let at = now();
        let phase = if hold.held.is_held() { Phase::Ok } else { Phase::Fail };
        let until = Some(now());
        let record = self.record(self.next_op(), Kind::Believe, phase, &hold.name).token(hold.token);
        self.history.write(&Record { at, until, ..record });
    }

    async fn unlock(&self, Hold { held, name, token }: Hold, drop_it: bool) {
        let op = self.next_op();
        self.held.borrow_mut().remove(&token);
        if self.stopping.get() {
            // It is given back already; that this changes nothing is what there is to see.
            return if drop_it { drop(held) } else { drop(held.release().await) };
        }
        let record = self.record(op, Kind::End, Phase::Invoke, &name).token(token).why("drop");
        if drop_it {
            self.history.write(&record);
            return drop(held);
        }
        self.history.write(&record.why("release"));
        let released = held.release().await;
        let end = self.record(op, Kind::End, Phase::Ok, &name);
        // Stopped meanwhile, it may be either.
        let why = if self.stopping.get() { "stop".to_owned() } else { format!("{released:?}") };
        self.history.write(&end.why(why));
    }
}
