//! A member's rounds, as they run on the owner's thread.
//!
//! ```text
//!        asks how things stand; takes, gives up        nobody wants it any more, or it cannot be one
//! join ─────────────────────────────────────── round ──────────────────────────────────────────────▶ drain ▶ left
//!  ▲                                            │ ▲ └─ time for the next round, or for the end of a drain
//!  └── the owner is lost: again with the next ──┘ │
//! ```

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use sqlx::Row as _;
use sqlx::postgres::PgRow;
use tokio::sync::{mpsc, oneshot, watch};

use super::balance::{View, plan};
use super::{Change, Group, Partition};
use crate::clock::Moment;
use crate::error::{Error, Result};
use crate::lease::{self, Attempt, Lease};
use crate::mistake::Mistake;
use crate::name::LockName;
use crate::owner::life::{Held, Life};
use crate::owner::{Enrolled, Owner};
use crate::sql::{self, Arg, Call};
use crate::wait::jittered;

/// The longest time between two rounds.
const SELDOM: Duration = Duration::from_secs(5);

/// Enters the group into the list of those that the owner is a member of. The first sender is the membership's, and is
/// dropped when nobody wants it any more, the second one when it is over. An earlier one that is ending is waited for.
pub(super) async fn enrol(owner: &Owner, name: &LockName) -> Result<(watch::Sender<()>, watch::Sender<()>)> {
    let is_there = |sender: &watch::Receiver<()>| sender.has_changed().is_ok();
    loop {
        let mut before = {
            let mut groups = owner.shared().groups.lock().unwrap_or_else(PoisonError::into_inner);
            match groups.get(name) {
                Some(before) if is_there(&before.over) => before.clone(),
                _ => {
                    let ((want, wanted), (end, over)) = (watch::channel(()), watch::channel(()));
                    groups.insert(name.clone(), Enrolled { wanted, over });
                    return Ok((want, end));
                }
            }
        };
        if is_there(&before.wanted) {
            return Err(Error::misuse(format!("this owner is a member of group \"{name}\" already")));
        }
        // Nothing is ever sent: until the sender is gone.
        _ = before.over.changed().await;
    }
}

/// From joining to having left. `join` hears of the first round, `leave` of the end, and so does whoever waits for
/// `over`.
pub(super) async fn serve(
    owner: Owner,
    group: Group,
    mut wanted: watch::Receiver<()>,
    tell: mpsc::UnboundedSender<Result<Change>>,
    join: oneshot::Sender<Result<()>>,
    leave: oneshot::Sender<Result<()>>,
    over: watch::Sender<()>,
) {
    let mut rounds = Rounds { owner, group, life: None, assigned: BTreeMap::new(), tell };
    let mut join = Some(join);
    let ended = rounds.go(&mut wanted, &mut join).await;
    if let Err(error) = ended {
        tracing::debug!(group = %rounds.group.name, %error, "fencepost: not a member any more");
        // Whoever is not there any more need not hear it.
        match join {
            Some(join) => drop(join.send(Err(error))),
            None => drop(rounds.tell.send(Err(error))),
        }
    }
    rounds.leave(leave).await;
    drop(over);
}

/// What a member has.
struct Assigned {
    held: Arc<Held>,
    /// Its [`Partition`] is there as long as this has a receiver.
    revoked: watch::Sender<Option<Moment>>,
}

impl Assigned {
    fn deadline(&self) -> Option<Moment> {
        *self.revoked.borrow()
    }

    /// Resolves when its holder has let go of it, or lost it, or has taken too long.
    async fn drained(&self, deadline: Moment) {
        tokio::select! {
            () = self.revoked.closed() => {}
            _reason = self.held.lost() => {}
            () = deadline.reached() => {}
        }
    }
}

struct Rounds {
    owner: Owner,
    group: Group,
    /// Under which it joined last.
    life: Option<Arc<Life>>,
    assigned: BTreeMap<u32, Assigned>,
    tell: mpsc::UnboundedSender<Result<Change>>,
}

impl Rounds {
    /// Round after round, until nobody wants it any more.
    async fn go(
        &mut self,
        wanted: &mut watch::Receiver<()>,
        join: &mut Option<oneshot::Sender<Result<()>>>,
    ) -> Result<()> {
        let owner = self.owner.clone();
        let shared = owner.shared();
        let period = (shared.ttl / 3).min(SELDOM);
        loop {
            let life = tokio::select! {
                life = shared.alive() => match life {
                    // It starts again for as long as it takes.
                    Err(Error::TimedOut { .. }) if join.is_none() => continue,
                    life => life?,
                },
                _gone = wanted.changed() => return Ok(()),
            };
            self.life = Some(Arc::clone(&life));
            self.sweep().await;
            let pause = match self.round(&life).await {
                Ok(settled) => {
                    if let Some(join) = join.take() {
                        // Gone: then nobody wants it, as is noticed below.
                        drop(join.send(Ok(())));
                    }
                    if settled { period } else { period / 4 }
                }
                Err(error) if lease::is_owner_dead(&error) => {
                    shared.doubt(&life).await;
                    period / 4
                }
                Err(error) if join.is_some() => return Err(error),
                Err(error @ Error::OutcomeUnknown { .. }) => self.later(&error, period),
                Err(error) if error.is_retryable() => self.later(&error, period),
                Err(error) => return Err(error),
            };
            let due = self.assigned.values().filter_map(Assigned::deadline).min();
            let due = async {
                match due {
                    Some(due) => due.reached().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = tokio::time::sleep(jittered(pause)) => {}
                () = due => {}
                // The owner's thread, this one, is about to begin the next one.
                _reason = life.lost() => tokio::time::sleep(Duration::from_millis(1)).await,
                _gone = wanted.changed() => return Ok(()),
            }
        }
    }

    fn later(&self, error: &Error, period: Duration) -> Duration {
        tracing::debug!(group = %self.group.name, %error, "fencepost: a round of a member failed; trying again");
        period / 4
    }

    /// Forgets what is let go of or lost, and releases what was not drained in time.
    async fn sweep(&mut self) {
        let mut late = Vec::new();
        self.assigned.retain(|number, assigned| {
            if assigned.revoked.is_closed() {
                return false;
            }
            if let Some(reason) = assigned.held.loss() {
                // A member that is gone need not hear it.
                drop(self.tell.send(Ok(Change::Lost { number: *number, reason })));
                return false;
            }
            if assigned.deadline().is_some_and(Moment::has_passed) {
                late.push(Arc::clone(&assigned.held));
                return false;
            }
            true
        });
        for held in late {
            tracing::warn!(name = %held.name, "fencepost: a revoked partition was not drained in time; released");
            lease::give_up(Arc::clone(self.owner.shared()), held).await;
        }
    }

    /// Asks how things stand, and does its part. Whether everything was settled already.
    async fn round(&mut self, life: &Arc<Life>) -> Result<bool> {
        const STEP: &str = "a round of a group's member";
        let has = if Mistake::LargerThanMine.is_made() { -1 } else { count(self.assigned.len()) };
        let args = [
            Arg::Text(self.group.name.as_str().to_owned()),
            Arg::Number(self.group.partitions.into()),
            Arg::Uuid(life.id()),
            Arg::Number(has),
        ];
        let call = Call::new(sql::MEMBER_ROUND, args);
        let rows = self.owner.shared().statements.call_until_answered(STEP, &call, &call).await?;
        let row = rows.first().ok_or(sqlx::Error::RowNotFound).and_then(Standing::read);
        let Some(standing) = row.map_err(|source| Error::database(STEP, source))? else { return Ok(true) };
        let keeps = self.assigned.values().filter(|assigned| assigned.deadline().is_none()).count();
        let plan = plan(&View {
            partitions: self.group.partitions,
            held: &standing.held,
            position: standing.position,
            free: &standing.free,
            keeps: u32::try_from(keeps).unwrap_or(u32::MAX),
        });
        self.give(plan.give);
        for number in plan.take {
            self.take(number, life).await?;
        }
        Ok(false)
    }

    /// Revokes so many, those with the largest numbers.
    fn give(&mut self, many: u32) {
        let drain = self.group.drain.unwrap_or(self.owner.ttl());
        let kept = self.assigned.iter().rev().filter(|(_, assigned)| assigned.deadline().is_none());
        for (number, assigned) in kept.take(usize::try_from(many).unwrap_or(usize::MAX)) {
            tracing::debug!(name = %assigned.held.name, "fencepost: a partition is revoked");
            assigned.revoked.send_replace(Some(Moment::now().after(drain)));
            // A member that is gone need not hear it.
            drop(self.tell.send(Ok(Change::Revoked { number: *number, within: drain })));
        }
    }

    /// Takes it, if it is still free.
    async fn take(&mut self, number: u32, life: &Arc<Life>) -> Result<()> {
        if self.assigned.contains_key(&number) {
            return Ok(());
        }
        let lease = Lease::of(LockName::listed(&format!("{}\t{number}", self.group.name)));
        let Attempt::Held(held) = lease.attempt_under(&self.owner, life).await? else { return Ok(()) };
        let (revoked, watching) = watch::channel(None);
        self.assigned.insert(number, Assigned { held: held.handle(), revoked });
        // Dropped, and so released, if nobody is there to have it.
        drop(self.tell.send(Ok(Change::Assigned(Partition { number, held, revoked: watching }))));
        Ok(())
    }

    /// A member no more, all is drained and released; `told` hears how that went, and it is tried on after that.
    async fn leave(self, told: oneshot::Sender<Result<()>>) {
        let Some(life) = &self.life else { return drop(told.send(Ok(()))) };
        let drain = self.group.drain.unwrap_or(self.owner.ttl());
        let deadline = Moment::now().after(drain);
        for assigned in self.assigned.values().filter(|assigned| assigned.deadline().is_none()) {
            assigned.revoked.send_replace(Some(deadline));
        }
        let mut left = self.end_membership(life).await;
        for assigned in self.assigned.values() {
            assigned.drained(assigned.deadline().unwrap_or(deadline)).await;
            if life.loss().is_none() {
                // Also if its holder is releasing it: to know.
                lease::give_up(Arc::clone(self.owner.shared()), Arc::clone(&assigned.held)).await;
            }
        }
        let mut told = Some(told);
        while let Err(error) = left
            && life.loss().is_none()
        {
            tracing::warn!(group = %self.group.name, %error, "fencepost: cannot leave a group yet; trying again");
            if let Some(told) = told.take() {
                drop(told.send(Err(error)));
            }
            tokio::time::sleep(jittered(SELDOM.min(self.owner.ttl()))).await;
            left = self.end_membership(life).await;
        }
        if let Some(told) = told {
            drop(told.send(Ok(())));
        }
    }

    async fn end_membership(&self, life: &Life) -> Result<()> {
        let args = [Arg::Text(self.group.name.as_str().to_owned()), Arg::Uuid(life.id())];
        let call = Call::new(sql::MEMBER_LEAVE, args);
        self.owner.shared().statements.call_until_answered("leaving a group", &call, &call).await.map(drop)
    }
}

fn count(many: usize) -> i64 {
    i64::try_from(many).unwrap_or(i64::MAX)
}

/// The answer of `fencepost.member_round`.
struct Standing {
    held: Vec<u32>,
    position: usize,
    free: Vec<u32>,
}

impl Standing {
    /// None: settled.
    fn read(row: &PgRow) -> sqlx::Result<Option<Self>> {
        if row.try_get("settled")? {
            return Ok(None);
        }
        let numbers = |column| -> sqlx::Result<Vec<u32>> {
            let numbers: Vec<i32> = row.try_get(column)?;
            numbers.into_iter().map(|number| u32::try_from(number).map_err(undecodable)).collect()
        };
        let position: i32 = row.try_get("position")?;
        let position = usize::try_from(position).map_err(undecodable)?;
        Ok(Some(Self { held: numbers("held")?, position, free: numbers("free")? }))
    }
}

fn undecodable(error: std::num::TryFromIntError) -> sqlx::Error {
    sqlx::Error::Decode(error.into())
}
