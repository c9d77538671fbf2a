//! The worker that is a member of a group: it writes for the partitions that it is assigned until they are revoked, and
//! now and then beyond that; it leaves and joins again.

use std::rc::Rc;
use std::time::Duration;

use fencepost::{Change, Group, Member, Partition};
use tokio::sync::Notify;
use tokio::task::{JoinSet, LocalSet};
use tokio::time::{sleep, timeout};

use super::{DEADLINE, Place, Worker};
use crate::history::{Kind, Phase, Record, now};

/// The group, and how many partitions it has.
pub(crate) const GROUP: &str = "parted";
pub(crate) const PARTITIONS: u32 = 7;

/// How often a process leaves and joins again.
const REJOINS: u32 = 2;

/// The names of the partitions' leases.
pub(crate) fn names() -> Vec<String> {
    (0..PARTITIONS).map(|number| format!("{GROUP}\t{number}")).collect()
}

pub(super) fn are_partitions(names: &[String]) -> bool {
    !names.is_empty() && names.iter().all(|name| name.contains('\t'))
}

/// Membership after membership, until told to end.
pub(super) async fn work(worker: Rc<Worker>) {
    let local = LocalSet::new();
    let memberships = async {
        for time in 0.. {
            if *worker.quitting.borrow() {
                return;
            }
            let began = now();
            let member = worker.join().await;
            let longest = if time < REJOINS { worker.think(200, 1_500) } else { Duration::MAX };
            worker.be_a_member(member, began, longest).await;
        }
    };
    local.run_until(memberships).await;
}

/// Takes each partition once, and ends.
pub(super) async fn once(worker: &Worker) {
    let mut member = worker.join().await;
    // Kept until the end: what is let go of would be assigned again.
    let mut all = Vec::new();
    for _ in 0..PARTITIONS {
        let change = timeout(DEADLINE, member.next()).await.expect("all are assigned to the only member");
        let Change::Assigned(partition) = change.unwrap() else { panic!("the only member loses one") };
        worker.fenced_write(partition.lease()).await;
        all.push(partition);
    }
}

impl Worker {
    async fn join(&self) -> Member {
        let group = Group::named(GROUP, PARTITIONS).unwrap();
        let join = async {
            loop {
                match group.join(&self.owner).await {
                    Ok(member) => return member,
                    Err(error @ fencepost::Error::Misuse { .. }) => panic!("{error:?}"),
                    // An ended session, or a life that was over.
                    Err(_) => sleep(Duration::from_millis(5)).await,
                }
            }
        };
        timeout(DEADLINE, join).await.expect("it joins")
    }

    async fn be_a_member(self: &Rc<Self>, mut member: Member, began: u64, longest: Duration) {
        let mut tasks = JoinSet::new();
        let mut quitting = self.quitting.clone();
        let changes = async {
            loop {
                match member.next().await {
                    Ok(Change::Assigned(partition)) => {
                        let op = self.next_op();
                        let record =
                            |phase| self.record(op, Kind::Acquire, phase, partition.lease().name().as_str());
                        // It was asked for at some time after that.
                        self.history.write(&Record { at: began, ..record(Phase::Invoke) });
                        self.history.write(&record(Phase::Ok).token(partition.token().as_i64()));
                        let worker = Rc::clone(self);
                        tasks.spawn_local(async move { worker.write_for(partition).await });
                    }
                    Ok(_) => {}
                    Err(_) => return,
                }
            }
        };
        tokio::select! {
            () = changes => {}
            () = sleep(longest) => {}
            _ = quitting.wait_for(|quit| *quit) => {}
        }
        let ended = async { while tasks.join_next().await.map(Result::unwrap).is_some() {} };
        // An error: the session was ended, say. It is tried on in the background.
        let (_left, ()) = tokio::join!(member.leave(), ended);
    }

    /// Until it is revoked, and now and then for as long as it goes.
    async fn write_for(&self, partition: Partition) {
        let never_lets_go = self.percent(15);
        let done = Notify::new();
        let look = || (partition.is_held(), partition.remaining());
        let steps = async {
            loop {
                self.look_as(partition.lease(), look);
                if self.percent(4) {
                    self.ask_to_be_stopped(Place::Idle, partition.lease(), 0).await;
                }
                self.fenced_write(partition.lease()).await;
                self.look_as(partition.lease(), look);
                let pause = self.think(5, 25);
                if never_lets_go {
                    if timeout(pause, partition.lost()).await.is_ok() {
                        break;
                    }
                } else if timeout(pause, partition.revoked()).await.is_ok() {
                    break;
                }
            }
            // Late, or just in time: the fence knows.
            self.fenced_write(partition.lease()).await;
            done.notify_one();
        };
        tokio::join!(self.watch_loss(partition.lease(), &done), steps);
        let name = partition.lease().name().to_string();
        let end = self.record(self.next_op(), Kind::End, Phase::Invoke, &name);
        self.history.write(&end.token(partition.token().as_i64()).why("release or drop"));
        if self.percent(50) {
            drop(partition.release().await);
        }
    }
}
