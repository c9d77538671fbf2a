//! The worker that waits: several tasks of one process queue, hold for a moment, and give back; some change their
//! minds, some run out of time.

use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use fencepost::{Error, HeldLease, Lease, Wait};
use tokio::sync::Notify;
use tokio::task::{JoinSet, LocalSet};
use tokio::time::{sleep, timeout};

use super::Worker;
use crate::history::{CANCELLED, Kind, Phase, TIMED_OUT};

/// Tasks of one process.
const TASKS: usize = 8;

/// How long the tasks may take to come to their ends: the longest wait and hold, and what waits forever is served
/// when the others are gone. Not a measurement.
const ENDS_WITHIN: Duration = Duration::from_secs(12);

/// How long a process at rest may take to have given everything back. Not a measurement.
const REST_WITHIN: Duration = Duration::from_secs(8);

/// How an acquire ends before its time.
enum Patience {
    AsLongAsItTakes,
    /// The future is dropped after this long.
    Time(Duration),
    /// The future is dropped after so many polls.
    Polls(u32),
}

pub(super) async fn work(worker: Rc<Worker>) {
    in_tasks(worker, |worker| async move { worker.queue_again_and_again().await }, TASKS, MINE).await;
}

/// What the database has of the living owner with this label.
const MINE: &str = "\
    WITH mine AS (SELECT id FROM fencepost.owners WHERE label = $1 AND expires_at > clock_timestamp()) \
    SELECT 'a ticket for ' || w.name FROM fencepost.waiters w JOIN mine ON mine.id = w.owner \
    UNION ALL SELECT 'a held ' || l.name || ', token ' || l.token FROM fencepost.leases l \
      JOIN mine ON mine.id = l.owner WHERE l.released_at IS NULL";

/// All tasks, until told to end. Every other process then stops its owner in the midst of it; the others let
/// their tasks come to their ends, look what the database still has of `mine`, and stop after that.
pub(super) async fn in_tasks<F: Future<Output = ()> + 'static>(
    worker: Rc<Worker>,
    task: impl Fn(Rc<Worker>) -> F,
    count: usize,
    mine: &'static str,
) {
    let mut tasks = JoinSet::new();
    let local = LocalSet::new();
    for _ in 0..count {
        tasks.spawn_local_on(task(Rc::clone(&worker)), &local);
    }
    let rest = async {
        let mut quitting = worker.quitting.clone();
        tokio::select! {
            _ = quitting.wait_for(|quit| *quit) => {}
            // Before that it can only have panicked.
            Some(ended) = tasks.join_next() => ended.unwrap(),
        }
        if worker.orders.process % 2 == 1 {
            worker.stop().await;
        }
        let ended = async { while tasks.join_next().await.map(Result::unwrap).is_some() {} };
        if timeout(ENDS_WITHIN, ended).await.is_err() {
            worker.at_rest(&["acquires that do not end".to_owned()]);
        } else if worker.orders.process % 2 == 0 {
            worker.rest(mine).await;
        }
    };
    local.run_until(rest).await;
}

impl Worker {
    async fn queue_again_and_again(&self) {
        while !*self.quitting.borrow() {
            let name = self.dice.borrow_mut().pick(&self.orders.names).clone();
            if let Some(held) = self.queue(&name).await {
                self.hold_for_a_moment(held).await;
            }
            sleep(self.think(0, 10)).await;
        }
    }

    /// The value of the record is the longest wait in milliseconds, if there is one.
    async fn queue(&self, name: &str) -> Option<HeldLease> {
        let most = self.think(20, 2_000);
        let [wait, patience] = std::array::from_fn(|_| self.dice.borrow_mut().below(20));
        let (wait, bound) = match wait {
            0..2 => (Wait::no(), Some(0)),
            2 => (Wait::forever(), None),
            _ => (Wait::at_most(most), Some(i64::try_from(most.as_millis()).unwrap())),
        };
        let patience = match patience {
            0..10 if self.orders.habits.impatient => Patience::Time(self.think(0, 300)),
            10..18 if self.orders.habits.impatient => {
                Patience::Polls(u32::try_from(self.dice.borrow_mut().between(1, 3)).unwrap())
            }
            0..4 => Patience::Time(self.think(0, 1_000)),
            4..6 => Patience::Polls(u32::try_from(self.dice.borrow_mut().between(1, 3)).unwrap()),
            _ => Patience::AsLongAsItTakes,
        };
        let op = self.next_op();
        let record = |phase| self.record(op, Kind::Acquire, phase, name);
        let mut invoke = record(Phase::Invoke);
        invoke.value = bound;
        self.history.write(&invoke);
        let lease = Lease::named(name).unwrap();
        let acquire = lease.acquire(&self.owner, wait);
        let answer = match patience {
            Patience::AsLongAsItTakes => Some(acquire.await),
            Patience::Time(time) => timeout(time, acquire).await.ok(),
            Patience::Polls(polls) => after_polls(polls, acquire).await,
        };
        match answer {
            Some(Ok(held)) => {
                let token = held.token().as_i64();
                self.held.borrow_mut().insert(token, name.to_owned());
                self.history.write(&record(Phase::Ok).token(token));
                if self.stopping.get() {
                    self.is_stopped(token, name);
                }
                return Some(held);
            }
            None => self.history.write(&record(Phase::Fail).why(CANCELLED)),
            Some(Err(error @ (Error::Busy { .. } | Error::TimedOut { .. }))) => {
                self.history.write(&record(Phase::Fail).why(format!("{TIMED_OUT}: {error}")));
            }
            Some(Err(error @ Error::Stopped)) if *self.quitting.borrow() => {
                self.history.write(&record(Phase::Fail).why(error.to_string()));
            }
            Some(Err(error)) => self.history.write(&record(Phase::Unknown).why(error.to_string())),
        }
        None
    }

    /// 20 to 50 ms, a part of them in a fenced transaction, which now and then outlives the hold.
    async fn hold_for_a_moment(&self, held: HeldLease) {
        let done = Notify::new();
        let steps = async {
            self.look(&held);
            let open = self.open_write(&held).await;
            self.look(&held);
            sleep(self.think(20, 40)).await;
            self.look(&held);
            let later = if self.percent(8) {
                open
            } else {
                if let Some(open) = open {
                    self.commit(open).await;
                }
                None
            };
            done.notify_one();
            later
        };
        let ((), later) = tokio::join!(self.watch_loss(&held, &done), steps);
        let drop_it = self.percent(40);
        self.give_back(held, drop_it).await;
        if let Some(open) = later {
            sleep(self.think(0, 15)).await;
            self.commit(open).await;
        }
    }

    /// Stops the owner while its tasks wait and hold; what is held is given back from before that on.
    async fn stop(&self) {
        self.stopping.set(true);
        for (token, name) in self.held.borrow().iter() {
            self.is_stopped(*token, name);
        }
        self.shut_down().await;
    }

    /// From here on nobody relies on it, though the owner may take a moment to say so.
    pub(super) fn is_stopped(&self, token: i64, name: &str) {
        let end = self.record(self.next_op(), Kind::End, Phase::Invoke, name);
        self.history.write(&end.token(token).why("stop"));
    }

    /// Nobody here waits or holds any more, and the owner beats on: the database shall soon have nothing of it.
    async fn rest(&self, mine: &'static str) {
        let label = self.owner.label().to_owned();
        let look = async || -> Vec<String> {
            sqlx::query_scalar(mine).bind(&label).fetch_all(&self.pool).await.unwrap()
        };
        let clean = async {
            while !look().await.is_empty() {
                sleep(Duration::from_millis(5)).await;
            }
        };
        let left = match timeout(REST_WITHIN, clean).await {
            Ok(()) => Vec::new(),
            Err(_) => look().await,
        };
        self.at_rest(&left);
    }

    fn at_rest(&self, left: &[String]) {
        let phase = if left.is_empty() { Phase::Ok } else { Phase::Fail };
        let record = self.record(self.next_op(), Kind::Rest, phase, "");
        self.history.write(&record.why(left.join(", ")));
    }
}

/// Polls the future at most so often, whenever it asks to be polled, and drops it then.
pub(super) async fn after_polls<T>(polls: u32, future: impl Future<Output = T>) -> Option<T> {
    let mut future = pin!(future);
    let mut left = polls;
    poll_fn(move |cx| {
        left = left.saturating_sub(1);
        match future.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}
