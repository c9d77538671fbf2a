//! The lease: a named lock whose holder may die, pause or be cut off.
//!
//! ```text
//!          try_acquire                      release, drop, or the owner's end
//! free ─────────────────▶ held (token n) ──────────────────────────────────────▶ free
//!                            │                                                      ▲
//!                            └── paused, cut off, capped: lost ── ttl over ─────────┘
//!                                (signalled by the local clock)   (the next grant has a larger token)
//! ```
//!
//! | failure | the holder | the others |
//! |---|---|---|
//! | its process dies | – | may acquire when its ttl is over |
//! | it is paused beyond the ttl | is lost at once on waking; its fence rejects | may acquire when its ttl is over |
//! | the database is out of reach | is lost at the local deadline | may acquire when both are over |
//! | the answer to an acquire is lost | asks again with the same grant id | – |
//! | the answer to a release is lost | asks again | may acquire, at the latest when the owner looks up what it holds |

mod all;
mod attempt;
mod held;
mod line;

use std::fmt;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use serde::Serialize;
use tokio::sync::watch;

use crate::error::{Error, Result};
use crate::json;
use crate::name::LockName;
use crate::owner::Owner;
use crate::token::FencingToken;
use crate::wait::Wait;

pub use held::HeldLease;

/// A named lock with a fencing token; the definition: cheap, no connection, clone it as you like.
///
/// Use it for work that outlives a transaction: a nightly job, an exclusive worker, a long update. If what
/// you guard is one short transaction, lock its row (`SELECT … FOR UPDATE`) instead; if it must happen once,
/// a unique constraint needs no lock at all.
///
/// # Guarantees
/// At most one holder's *fenced* writes commit at any time, in token order, under pauses, crashes, partitions
/// and failover. Side effects that check no token are not excluded: a holder that is paused in the middle of
/// sending a mail will send it when it wakes up.
///
/// # Examples
/// ```no_run
/// # async fn example(pool: sqlx::PgPool) -> fencepost::Result<()> {
/// use fencepost::{Lease, Owner};
///
/// let owner = Owner::start(&pool).await?;
/// let report = Lease::named("nightly-report")?;
/// if let Some(held) = report.try_acquire(&owner).await? {
///     let mut tx = held.begin(&pool).await?;      // BEGIN and the fence
///     sqlx::query("UPDATE report SET day = day + 1").execute(&mut *tx).await?;
///     tx.commit().await?;
///     held.release().await?;
/// } // else: somebody else holds it
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Lease {
    name: LockName,
    at_most: Option<Duration>,
    metadata: Option<String>,
    grace: Option<Duration>,
    /// Of its ticket: smaller ranks are served before.
    rank: i32,
    kind: Kind,
}

/// What is asked for under the name. Waiting, holding, fencing and releasing are the same for both.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Lease,
    Permits { limit: u32, count: u32 },
}

/// What an attempt came to.
#[derive(Debug)]
#[expect(
    clippy::exhaustive_enums,
    reason = "there is no third outcome, and a match shall not need a dead arm"
)]
pub enum Attempt {
    /// It is ours.
    Held(HeldLease),
    /// Somebody else has it.
    Busy(Holder),
}

/// Who holds a lease, as the database said when it refused: a hint, not a proof.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// The holder's label; none while the first grant of the name is under way.
    pub label: Option<String>,
    /// The holder's token.
    pub token: Option<FencingToken>,
    /// What is left of its life if it does not beat again. Zero: its time is over and a fenced write of it is
    /// still open, or it is changing hands this moment.
    pub remaining: Duration,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label.as_deref().unwrap_or("somebody"))?;
        match self.token {
            Some(token) => write!(f, " with token {token}"),
            None => Ok(()),
        }
    }
}

impl Lease {
    /// The longest [`at_most`](Self::at_most): 366 days.
    pub const MAX_AT_MOST: Duration = Duration::from_hours(8784);

    /// The largest metadata, as JSON: 8 kB.
    pub const MAX_METADATA_BYTES: usize = 8_192;

    /// The lease of this name.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a name that [`LockName::new`] refuses.
    pub fn named(name: &str) -> Result<Self> {
        Ok(Self::of(LockName::new(name)?))
    }

    /// The lease of this name, one of our own too.
    pub(crate) fn of(name: LockName) -> Self {
        Self { name, at_most: None, metadata: None, grace: None, rank: 0, kind: Kind::Lease }
    }

    /// So many of the permits of a semaphore of this name, which is held as a lease is.
    pub(crate) fn of_permits(name: LockName, limit: u32, count: u32) -> Self {
        Self { kind: Kind::Permits { limit, count }, ..Self::of(name) }
    }

    /// Whoever waits with a smaller rank is served before; for all others it is zero.
    pub(crate) fn rank(self, rank: i32) -> Self {
        Self { rank, ..self }
    }

    /// Caps the hold: it ends after this long even if its owner goes on beating. From 1 ms to
    /// [`MAX_AT_MOST`](Self::MAX_AT_MOST), in whole microseconds.
    ///
    /// # Errors
    /// [`Error::Misuse`] outside of that.
    pub fn at_most(self, at_most: Duration) -> Result<Self> {
        let least = Duration::from_millis(1);
        if at_most < least || at_most > Self::MAX_AT_MOST {
            return Err(Error::misuse(format!(
                "a lease is held at most {least:?} to 366 days, not {at_most:?}"
            )));
        }
        Ok(Self { at_most: Some(at_most), ..self })
    }

    /// Something for people to see with the lease while it is held: any JSON, at most
    /// [`MAX_METADATA_BYTES`](Self::MAX_METADATA_BYTES).
    ///
    /// # Errors
    /// [`Error::Misuse`] if it does not serialise, is too large, or has a NUL character, which `jsonb` refuses.
    pub fn metadata(self, metadata: &impl Serialize) -> Result<Self> {
        let json = json::text(metadata, "metadata", Self::MAX_METADATA_BYTES)?;
        Ok(Self { metadata: Some(json), ..self })
    }

    /// How long [`HeldLease::run`] lets the work go on after a loss was signalled. Default: a tenth of the
    /// owner's ttl, about when the database may grant the lease to the next one.
    #[must_use]
    pub fn grace(self, grace: Duration) -> Self {
        Self { grace: Some(grace), ..self }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &LockName {
        &self.name
    }

    /// Acquires it if it is free and nobody waits for it; `None`: somebody else holds it.
    ///
    /// # Errors
    /// As for [`attempt`](Self::attempt).
    ///
    /// # Cancel safety
    /// Safe: it runs in the owner; what was granted to a dropped future is released.
    pub async fn try_acquire(&self, owner: &Owner) -> Result<Option<HeldLease>> {
        Ok(match self.attempt(owner).await? {
            Attempt::Held(held) => Some(held),
            Attempt::Busy(_) => None,
        })
    }

    /// Acquires it, waiting for its turn.
    ///
    /// Who waits queues, first come, first served, across processes: a release grants the lease to the head of
    /// the queue, and a new arrival never jumps it. Waiting holds no connection, and costs a statement every
    /// second or two.
    ///
    /// # Guarantees
    /// Served in the order in which waiting began. Whoever dies while waiting delays the others by no more than
    /// its owner's ttl. If this owner is lost meanwhile, it queues again under its next life, at the end.
    ///
    /// # Errors
    /// [`Error::Busy`] when the wait is over, with whoever held it up; [`Error::Stopped`] after the owner's
    /// shutdown. A database that is out of reach is waited for like a holder.
    ///
    /// # Cancel safety
    /// Safe: it runs in the owner; when the future is dropped its place in the line is given up, and what was
    /// granted at that moment is released.
    ///
    /// # Database
    /// One statement to queue (the first waiter of a process asks once more when it listens); none to be handed
    /// the lease (one for a lease with a cap), where notifications arrive. Behind a transaction-mode pooler they
    /// do not: there it asks four to eight times a second.
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example(owner: fencepost::Owner) -> fencepost::Result<()> {
    /// use std::time::Duration;
    /// use fencepost::{Lease, Wait};
    ///
    /// let held = Lease::named("report")?.acquire(&owner, Wait::at_most(Duration::from_secs(5))).await?;
    /// # Ok(()) }
    /// ```
    pub async fn acquire(&self, owner: &Owner, wait: Wait) -> Result<HeldLease> {
        let shared = owner.shared();
        let held_up_by = line::HeldUpBy::default();
        let busy = |holder: Option<Holder>, after| {
            let (label, token) = holder.map(|holder| (holder.label, holder.token)).unwrap_or_default();
            Error::Busy { name: self.name.to_string(), label, token, after }
        };
        if wait == Wait::no() {
            return match self.attempt(owner).await? {
                Attempt::Held(held) => Ok(held),
                Attempt::Busy(holder) => Err(busy(Some(holder), Duration::ZERO)),
            };
        }
        // Dropped with this future, also at the deadline: the task gives its place up then.
        let (_wanted, watching) = watch::channel(());
        let waiting =
            shared.run(line::acquire(owner.clone(), self.clone(), Arc::clone(&held_up_by), watching));
        match wait.bound() {
            None => waiting.await,
            Some(bound) => tokio::time::timeout(bound, waiting).await.unwrap_or_else(|_elapsed| {
                let holder = held_up_by.lock().unwrap_or_else(PoisonError::into_inner).take();
                Err(busy(holder, bound))
            }),
        }
    }

    /// Acquires several leases: all of them, or none. If one is lost while another is waited for, it begins again,
    /// while there is time.
    ///
    /// They are taken in the order of their names, whatever the order given, so that callers which do this never
    /// deadlock with each other; a name that is given twice is taken once (the first definition counts). The
    /// wait bounds the whole. They are returned in the order of their names.
    ///
    /// # Errors
    /// As for [`acquire`](Self::acquire); what had been taken is released before it returns.
    ///
    /// # Cancel safety
    /// Safe: what has been taken is released.
    pub async fn acquire_all(
        owner: &Owner,
        leases: impl IntoIterator<Item = Self>,
        wait: Wait,
    ) -> Result<Vec<HeldLease>> {
        all::acquire(owner, leases.into_iter().collect(), wait).await
    }

    /// Acquires it if it is free, or says who holds it. Never before those who wait for it.
    ///
    /// # Errors
    /// [`Error::TimedOut`] if the database cannot be reached for as long as the owner's ttl (at least 1 s, at
    /// most 10 s), [`Error::OutcomeUnknown`] if answers were lost meanwhile (the owner then frees what may
    /// have been granted), [`Error::Stopped`] after the owner's shutdown.
    ///
    /// # Cancel safety
    /// Safe: it runs in the owner; what was granted to a dropped future is released.
    ///
    /// # Database
    /// One statement on the owner's connections. A refused one writes nothing; a granted one is durable.
    pub async fn attempt(&self, owner: &Owner) -> Result<Attempt> {
        owner.shared().run(attempt::attempt(owner.clone(), self.clone())).await
    }
}
