//! The held lease.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sqlx::postgres::PgTransaction;
use sqlx::{PgPool, Row as _};

use crate::error::{Error, LossReason, Result};
use crate::fence;
use crate::mistake::Mistake;
use crate::name::LockName;
use crate::owner::life::Held;
use crate::owner::{Owner, Shared};
use crate::retry::{self, Isolation};
use crate::sql::{self, Arg, Call};
use crate::token::{FencingToken, Grant};

/// A lease that is held, until it is released, dropped or lost.
///
/// It holds no connection. It is held as long as its owner lives (and no longer than
/// [`Lease::at_most`](crate::Lease::at_most)).
///
/// # Guarantees
/// While [`is_held`](Self::is_held) says yes, its time is not over and nobody else can have been granted the lease;
/// it says so by the local clock, without asking. (Unless an operator revoked it: then it says no after the
/// next heartbeat.) A fenced transaction ([`begin`](Self::begin)) that commits was the holder's.
///
/// # Drop
/// Releases in the background, soon; after the owner's ttl if the process ends before. Use
/// [`release`](Self::release) to know. Dropping it never waits and never fails.
#[must_use = "dropping it releases the lease"]
pub struct HeldLease {
    held: Arc<Held>,
    /// A clone: what is held keeps its owner going.
    owner: Owner,
    grace: Duration,
    released: AtomicBool,
}

impl HeldLease {
    pub(super) fn new(held: Arc<Held>, owner: Owner, grace: Option<Duration>) -> Self {
        let grace = grace.unwrap_or(owner.shared().margin);
        Self { held, owner, grace, released: AtomicBool::new(false) }
    }

    /// The lease's name.
    #[must_use]
    pub fn name(&self) -> &LockName {
        &self.held.name
    }

    /// The fencing token of this grant, for a storage to compare.
    #[must_use]
    pub fn token(&self) -> FencingToken {
        self.held.grant.token
    }

    /// Token and grant id: what a fence in this database checks, to be handed to a worker.
    #[must_use]
    pub fn grant(&self) -> Grant {
        self.held.grant
    }

    /// Whether it is certainly held now. Cheap: looks at the local clock. By the time you act on it the
    /// process may have been paused; a write that must not be late goes through [`begin`](Self::begin).
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.held.is_held()
    }

    /// How long it is certainly held if nothing more is heard from the database; zero if it is not. It grows
    /// again with each heartbeat.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        if self.held.loss().is_some() { Duration::ZERO } else { self.held.trusted_until().remaining() }
    }

    /// Resolves with the reason when the lease is lost, within the owner's ttl by this process's clock.
    ///
    /// # Cancel safety
    /// Safe: it only watches.
    pub async fn lost(&self) -> LossReason {
        self.held.lost().await
    }

    /// Passes the fence in the caller's transaction: afterwards nobody else is granted the lease until it
    /// ends. Call it first; inside a savepoint it holds only if the savepoint is not rolled back.
    ///
    /// # Errors
    /// [`Error::Lost`] or [`Error::StaleFence`]: roll back; the lease is lost from now on.
    /// [`Error::SerializationFailure`] under REPEATABLE READ and SERIALIZABLE: roll back and look again.
    ///
    /// # Cancel safety
    /// Drop the transaction together with the future.
    ///
    /// # Database
    /// One statement in the transaction; none if it is known to be lost.
    pub async fn fence(&self, tx: &mut PgTransaction<'_>) -> Result<()> {
        self.check_lost()?;
        let passed = fence::check(tx, self.name(), self.grant()).await;
        passed.inspect_err(|error| self.held.learn(error))
    }

    /// Begins a transaction that has passed the fence, at the session's default isolation level.
    ///
    /// # Errors
    /// As for [`begin_with`](Self::begin_with).
    ///
    /// # Cancel safety
    /// As for [`begin_with`](Self::begin_with).
    pub async fn begin(&self, pool: &PgPool) -> Result<PgTransaction<'static>> {
        self.begin_with(pool, Isolation::SessionDefault).await
    }

    /// Begins a transaction that has passed the fence: it can commit only as long as the lease was ours.
    ///
    /// # Errors
    /// [`Error::Lost`] or [`Error::StaleFence`] ([`Error::is_lost`] covers both: it depends on whether this process
    /// or the database noticed first): the lease is lost, and nothing was begun.
    /// [`Error::PoolExhausted`] if the pool has no connection in time.
    ///
    /// # Cancel safety
    /// Safe: it runs to its end in a task of its own, and a transaction that nobody takes is rolled back; the
    /// pool gets back a clean connection.
    ///
    /// # Database
    /// One message on a connection of the pool: BEGIN and the fence cost one round trip together.
    pub async fn begin_with(&self, pool: &PgPool, isolation: Isolation) -> Result<PgTransaction<'static>> {
        self.check_lost()?;
        // The fence comes *before* BEGIN, so that a refusal leaves no aborted transaction.
        let fence = sql::fence(self.name(), self.grant()) + "; ";
        retry::begin(pool, isolation, &fence)
            .await
            .map_err(|source| Error::database("beginning a fenced transaction", source))
            .inspect_err(|error| self.held.learn(error))
    }

    /// Works while holding it, and releases it when the work has ended.
    ///
    /// On a loss the work goes on for the grace period ([`Lease::grace`](crate::Lease::grace)), in which
    /// [`lost`](Self::lost) tells it; then it is dropped at its next await.
    ///
    /// # Errors
    /// [`Error::Lost`] if the work was dropped. Work that ends in time returns its value, whatever became of the
    /// lease: what it committed through a fence was the holder's. A release that fails is tried on in the
    /// background.
    ///
    /// # Cancel safety
    /// Dropping the future drops the work, then releases in the background. So does a panic of the work.
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example(held: fencepost::HeldLease, pool: sqlx::PgPool) -> fencepost::Result<()> {
    /// let days = held
    ///     .run(async |held| {
    ///         let mut tx = held.begin(&pool).await?;
    ///         sqlx::query("UPDATE report SET day = day + 1").execute(&mut *tx).await?;
    ///         tx.commit().await?;
    ///         Ok::<_, fencepost::Error>(1)
    ///     })
    ///     .await??;
    /// # Ok(()) }
    /// ```
    pub async fn run<T>(self, work: impl AsyncFnOnce(&Self) -> T) -> Result<T> {
        let ended = self.until_lost(work(&self)).await;
        // The work is gone now. Its outcome stands, whatever comes of the release.
        if let Err(error) = self.release().await {
            tracing::debug!(%error, "fencepost: a release after the work failed");
        }
        ended
    }

    /// Works until the work ends, or the grace period after a loss does; then it is gone.
    pub(crate) async fn until_lost<T>(&self, work: impl Future<Output = T>) -> Result<T> {
        let mut work = std::pin::pin!(work);
        tokio::select! {
            biased;
            value = &mut work => Ok(value),
            reason = self.lost() => {
                tokio::time::timeout(self.grace, work).await.map_err(|_too_long| self.lost_error(reason))
            }
        }
    }

    pub(crate) fn owner(&self) -> &Owner {
        &self.owner
    }

    /// Releases it. `true`: it was held until now. `false`: it had been lost before.
    ///
    /// Never waits for an open fenced transaction, of its own or others; the next grant does.
    ///
    /// # Errors
    /// [`Error::TimedOut`] or [`Error::OutcomeUnknown`] if the database cannot be reached: the owner frees it
    /// as soon as it can, and it is free after the ttl at the latest if the process ends.
    ///
    /// # Cancel safety
    /// Once polled it is released, also when the future is dropped.
    ///
    /// # Database
    /// One statement on the owner's connections. If somebody waits it grants the lease to the next one, durably,
    /// and a notification follows for another process; otherwise it is not durable by itself: if a crash takes it
    /// back, the owner releases it again.
    pub async fn release(self) -> Result<bool> {
        self.give_back().await
    }

    /// The same for one that others may still see: from now on they see that it is lost.
    pub(crate) async fn give_back(&self) -> Result<bool> {
        self.released.store(true, Ordering::Release);
        let lost = self.held.loss().is_some();
        self.held.lose(LossReason::Released);
        let release = release(Arc::clone(self.owner.shared()), Arc::clone(&self.held));
        if lost {
            // Not to keep the caller waiting for a database that may be out of reach.
            self.owner.shared().run_unattended(async { drop(release.await) });
            return Ok(false);
        }
        match self.owner.shared().run(release).await {
            Err(Error::Stopped) => Ok(false),
            answered => answered,
        }
    }

    /// The same in the background, if it has not been given back.
    pub(crate) fn give_back_soon(&self) {
        if !self.released.swap(true, Ordering::AcqRel) {
            let (shared, held) = (Arc::clone(self.owner.shared()), Arc::clone(&self.held));
            self.owner.shared().run_unattended(give_up(shared, held));
        }
    }

    /// What is held, for whoever may have to end it for its holder.
    pub(crate) fn handle(&self) -> Arc<Held> {
        Arc::clone(&self.held)
    }

    /// Says it if it is known to be lost.
    pub(super) fn check_lost(&self) -> Result<()> {
        match self.held.loss() {
            Some(reason) => Err(self.lost_error(reason)),
            None => Ok(()),
        }
    }

    fn lost_error(&self, reason: LossReason) -> Error {
        Error::Lost { name: self.name().to_string(), token: self.token(), reason }
    }
}

impl Drop for HeldLease {
    fn drop(&mut self) {
        self.give_back_soon();
    }
}

impl fmt::Debug for HeldLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not the grant id, which is a secret.
        f.debug_struct("HeldLease")
            .field("name", self.name())
            .field("token", &self.token())
            .field("remaining", &self.remaining())
            .finish_non_exhaustive()
    }
}

/// Ends the hold for whoever holds it; runs on the owner's thread.
pub(crate) async fn give_up(shared: Arc<Shared>, held: Arc<Held>) {
    if !Mistake::KeepsRevoked.is_made() {
        held.lose(LossReason::Released);
    }
    drop(release(shared, held).await);
}

/// Runs on the owner's thread.
async fn release(shared: Arc<Shared>, held: Arc<Held>) -> Result<bool> {
    const STEP: &str = "releasing a lease";
    let Held { name, grant, .. } = &*held;
    shared.grants.releasing(grant.id);
    let args = [
        Arg::Text(name.as_str().to_owned()),
        Arg::Number(grant.token.as_i64()),
        Arg::Uuid(grant.id.as_uuid()),
    ];
    let call = Call::new(sql::RELEASE, args);
    let answer = shared.statements.call_until_answered(STEP, &call, &call).await;
    // From here on, if the database still lists it, reconcile releases it.
    shared.grants.forget(grant.id);
    let answer = answer.and_then(|rows| {
        shared.freed(name, &rows);
        rows.first()
            .ok_or(sqlx::Error::RowNotFound)
            .and_then(|row| row.try_get("released"))
            .map_err(|source| Error::database(STEP, source))
    });
    match &answer {
        Ok(held) => tracing::debug!(%name, token = %grant.token, held, "fencepost: released"),
        Err(error) => {
            tracing::warn!(%name, token = %grant.token, %error, "fencepost: release failed; the owner will see to it");
            shared.statements.doubt();
        }
    }
    answer
}
