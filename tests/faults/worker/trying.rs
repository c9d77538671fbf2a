//! A worker that tries: it takes what is free, holds it for a while, writes with the fence and without it.

use fencepost::HeldLease;
use sqlx::{AssertSqlSafe, Row as _};
use tokio::sync::Notify;
use tokio::time::sleep;

use super::{Place, Worker};
use crate::history::{Kind, Phase};

pub(super) async fn work(worker: &Worker) {
    while !*worker.quitting.borrow() {
        let name = worker.dice.borrow_mut().pick(&worker.orders.names).clone();
        if let Some(held) = worker.acquire(&name).await {
            worker.hold(&held).await;
            let drop_it = worker.percent(40);
            worker.give_back(held, drop_it).await;
        }
        sleep(worker.think(0, 6)).await;
    }
}

impl Worker {
    /// Holds for a while, and on after a loss: that is what a paused holder does.
    pub(super) async fn hold(&self, held: &HeldLease) {
        let done = Notify::new();
        let steps = async {
            let steps = self.dice.borrow_mut().between(1, 4);
            for _ in 0..steps {
                self.look(held);
                let step = self.dice.borrow_mut().below(100);
                match step {
                    _ if self.troubled() => self.trouble(held).await,
                    _ if self.orders.habits.dozes => {
                        self.ask_to_be_stopped(Place::Idle, held, 0).await;
                        self.fenced_write(held).await;
                        sleep(self.think(10, 40)).await;
                    }
                    0..55 => self.fenced_write(held).await,
                    55..85 => self.twin(held).await,
                    85..93 => {
                        let half = u64::try_from(self.orders.ttl.as_millis()).unwrap() / 2;
                        sleep(self.think(0, half)).await;
                    }
                    93..96 => self.ask_to_be_stopped(Place::Idle, held, 0).await,
                    _ => tokio::task::yield_now().await,
                }
                self.look(held);
            }
            // Some hold on for a while, so that a fault finds them at any moment of a ttl.
            if self.percent(30) {
                let ttl = u64::try_from(self.orders.ttl.as_millis()).unwrap();
                sleep(self.think(0, ttl)).await;
            }
            done.notify_one();
        };
        let steps_watched = async {
            tokio::select! {
                () = steps => {}
                () = self.look_on(held) => unreachable!("it looks for ever"),
            }
        };
        tokio::join!(self.watch_loss(held, &done), steps_watched);
    }

    /// Is it time for what this application does to itself?
    fn troubled(&self) -> bool {
        (self.orders.habits.starves || self.orders.habits.hogs) && self.percent(30)
    }

    /// For longer than the ttl, nothing of this application gets on but its owner.
    async fn trouble(&self, held: &HeldLease) {
        let long = self.orders.ttl * 3 / 2;
        if self.orders.habits.starves {
            std::thread::sleep(long);
        } else {
            let taken = self.pool.acquire().await;
            let busy = sleep(long);
            let others = async {
                for name in self.orders.names.iter().filter(|name| *name != held.name().as_str()) {
                    if let Some(other) = self.acquire(name).await {
                        self.give_back(other, false).await;
                    }
                }
            };
            tokio::join!(busy, others);
            drop(taken);
        }
        let record = self.record(self.next_op(), Kind::Trouble, Phase::Ok, held.name().as_str());
        self.history.write(&record.token(held.token().as_i64()));
    }

    /// Also while a step takes long.
    async fn look_on(&self, held: &HeldLease) {
        loop {
            sleep(self.think(3, 10)).await;
            self.look(held);
        }
    }

    /// The same without a fence, by a holder as careful as one can be without: it looks first.
    async fn twin(&self, held: &HeldLease) {
        if !self.look(held) {
            return;
        }
        let op = self.next_op();
        let (name, token) = (held.name().as_str(), held.token().as_i64());
        let record = |phase| self.record(op, Kind::Twin, phase, name).token(token);
        self.history.write(&record(Phase::Invoke));
        let read = format!("SELECT value FROM twin WHERE name = '{name}'");
        let read = match sqlx::raw_sql(AssertSqlSafe(read)).fetch_one(&self.pool).await {
            Ok(read) => read.get::<i64, _>(0),
            Err(error) => return self.history.write(&record(Phase::Fail).why(error.to_string())),
        };
        if self.percent(15) && held.is_held() {
            self.ask_to_be_stopped(Place::Twin, held, read).await;
        } else {
            sleep(self.think(0, 3)).await;
        }
        let write = format!("UPDATE twin SET value = {} WHERE name = '{name}'", read + 1);
        let (phase, why) = match sqlx::raw_sql(AssertSqlSafe(write)).execute(&self.pool).await {
            Ok(_) => (Phase::Ok, String::new()),
            Err(error) => (Phase::Unknown, error.to_string()),
        };
        self.history.write(&record(phase).value(read + 1).why(why));
    }
}
