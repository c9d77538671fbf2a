//! A worker that leads: it campaigns, does what a holder does while it leads, and resigns. The terms of an election are
//! grants of its lease, so they are recorded as such, under the lease's name.

use std::time::Duration;

use fencepost::{Election, Error, HeldLease, Leadership, Wait};

use super::{DEADLINE, Hold, Worker};
use crate::history::{CANCELLED, Kind, Phase, TIMED_OUT};

/// What the names of elections begin with.
pub(crate) const ELECTION: &str = "fencepost:election:";

pub(crate) fn is_election(name: &str) -> bool {
    name.starts_with(ELECTION)
}

pub(super) async fn work(worker: &Worker) {
    while !*worker.quitting.borrow() {
        let name = worker.dice.borrow_mut().pick(&worker.orders.names).clone();
        let most = worker.think(1, 400);
        if let Some(leadership) = worker.campaign(&name, most).await {
            worker.hold(&leadership).await;
            let drop_it = worker.percent(40);
            worker.give_back(leadership, drop_it).await;
        }
    }
}

/// Leads each once.
pub(super) async fn once(worker: &Worker) {
    for name in &worker.orders.names {
        let leadership =
            worker.campaign(name, DEADLINE).await.unwrap_or_else(|| panic!("{name} elects nobody"));
        worker.fenced_write(&leadership).await;
        worker.give_back(leadership, false).await;
    }
}

impl Worker {
    /// Gives the candidacy up after a while, in one of two ways.
    async fn campaign(&self, name: &str, most: Duration) -> Option<Leadership> {
        let election = Election::named(name.strip_prefix(ELECTION).unwrap()).unwrap();
        let election = election.priority(self.dice.borrow_mut().below(3).try_into().unwrap());
        let op = self.next_op();
        let record = |phase| self.record(op, Kind::Acquire, phase, name);
        self.history.write(&record(Phase::Invoke));
        let answer = if self.percent(30) {
            let campaign = election.campaign(&self.owner, Wait::forever());
            tokio::time::timeout(most, campaign).await.ok()
        } else {
            Some(election.campaign(&self.owner, Wait::at_most(most)).await)
        };
        match answer {
            Some(Ok(leadership)) => {
                self.history.write(&record(Phase::Ok).token(leadership.term().as_i64()));
                return Some(leadership);
            }
            None => self.history.write(&record(Phase::Fail).why(CANCELLED)),
            Some(Err(error @ (Error::Busy { .. } | Error::TimedOut { .. }))) => {
                self.history.write(&record(Phase::Fail).why(format!("{TIMED_OUT}: {error}")));
            }
            Some(Err(error)) => self.history.write(&record(Phase::Unknown).why(error.to_string())),
        }
        None
    }
}

impl Hold for Leadership {
    fn lease(&self) -> &HeldLease {
        self
    }

    async fn end(self) -> fencepost::Result<bool> {
        self.resign().await
    }
}
