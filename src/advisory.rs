//! Advisory locks: the locks that Postgres itself has, on numbers of one's own choice, without their traps.
//!
//! ```text
//! transaction level (the one to reach for)         session level (for work that outlives a transaction)
//!
//!        lock, try_lock, begin                            acquire, try_acquire
//! free ────────────────────────▶ held              free ───────────────────────▶ held
//!   ▲                             │                  ▲                            │ │
//!   └──── COMMIT or ROLLBACK ─────┘                  ├──── release, or drop ──────┘ │
//!                                                    └──── its session ends: lost ──┘
//! ```
//!
//! | failure | a lock of a transaction | a lock of the owner's session |
//! |---|---|---|
//! | the holder's process dies | freed with its connection | freed with its connection |
//! | it is paused | held for as long as it is | held for as long as it is; lost by its own clock |
//! | its connection is cut | the transaction fails, so it is not missed | lost, within ten seconds |
//! | an acquire times out or is cancelled | freed by the failure | never left behind (see `sql/advisory.rs`) |
//! | failover | the transaction fails | lost; the new server knows nothing of it |
//!
//! Neither has a fencing token: a session-level lock excludes as well as its connection does. What must not be
//! written by a holder that was cut off takes a [`Lease`](crate::Lease).

mod held;
mod line;
mod transaction;

use std::time::Duration;

use sqlx::PgConnection;
use tokio::sync::watch;

use crate::clock::Moment;
use crate::error::{Error, Result, is_transient};
use crate::key::{Key, Mode};
use crate::owner::locks::LockSession;
use crate::owner::registry::Place;
use crate::owner::{Owner, Shared};
use crate::sql::advisory;
use crate::wait::{Backoff, Wait};

pub use held::HeldAdvisory;

/// A lock of Postgres's own on a [`Key`], exclusive or shared; the definition: cheap, no connection.
///
/// The one to reach for is of a transaction: [`begin`](Self::begin), or [`lock`](Self::lock) in a transaction of
/// yours. It costs a round trip or none, is freed with the transaction whatever happens, and works behind every pooler.
///
/// For work that outlives a transaction there is the owner's session: [`acquire`](Self::acquire),
/// [`try_acquire`](Self::try_acquire). Both levels exclude each other, and everybody who takes the same key with
/// `pg_advisory_lock` and its like.
///
/// Do not use it where a late write does harm: a holder that is cut off does not know it at once, and its lock is
/// somebody else's by then. A [`Lease`](crate::Lease) has a token that rejects that write, waits in the order of
/// arrival, and tells who holds it. If what you guard is a row, lock the row.
///
/// # Guarantees
/// - At most one exclusive holder of a key in a database, or any number of shared ones; also among the tasks of one
///   process, though they share a session.
/// - An acquire that fails, times out or is cancelled leaves no lock behind.
///
/// # Examples
/// ```no_run
/// # async fn example(pool: sqlx::PgPool, owner: fencepost::Owner) -> fencepost::Result<()> {
/// use std::time::Duration;
/// use fencepost::{AdvisoryLock, Key, Wait};
///
/// let lock = AdvisoryLock::exclusive(Key::from_name("billing", "invoice-numbers")?);
///
/// // For a transaction: BEGIN and the lock in one round trip.
/// let mut tx = lock.begin(&pool, Wait::at_most(Duration::from_secs(2))).await?;
/// sqlx::query("INSERT INTO invoice SELECT max(number) + 1 FROM invoice").execute(&mut *tx).await?;
/// tx.commit().await?;
///
/// // For longer: on a connection of the owner's, which holds any number of them.
/// if let Some(held) = lock.try_acquire(&owner).await? {
///     // …
///     held.release().await?;
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AdvisoryLock {
    key: Key,
    mode: Mode,
}

/// What is being done, for errors.
const STEP: &str = "acquiring an advisory lock";

impl AdvisoryLock {
    /// Held by one at a time, and by nobody shared meanwhile.
    #[must_use]
    pub fn exclusive(key: Key) -> Self {
        Self { key, mode: Mode::Exclusive }
    }

    /// Held by any number at a time, and by nobody exclusively meanwhile.
    #[must_use]
    pub fn shared(key: Key) -> Self {
        Self { key, mode: Mode::Shared }
    }

    /// What it locks.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// Whether it is a shared one.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.mode == Mode::Shared
    }

    /// Acquires it for the owner's session if it is free; `None`: somebody else holds it, or waits for it.
    ///
    /// # Errors
    /// [`Error::TransactionPooler`] behind one: the lock would stay with a session of the pooler's.
    /// [`Error::LockTableFull`] beyond the cap of [`OwnerBuilder::advisory_locks`](crate::OwnerBuilder::advisory_locks), or
    /// when the server has no room. [`Error::TimedOut`] if the database cannot be reached for as long as the owner's ttl
    /// (at least 1 s, at most 10 s), [`Error::Stopped`] after the owner's shutdown.
    ///
    /// # Cancel safety
    /// Safe: it runs in the owner; what was granted to a dropped future is released.
    ///
    /// # Database
    /// One statement on a connection of the owner's that is made for the first such lock and holds any number of them;
    /// none if somebody in this process holds it. At the end of each statement the server looks through all locks that the
    /// session holds: with thousands of them a try or a release takes some tenths of a millisecond more.
    pub async fn try_acquire(&self, owner: &Owner) -> Result<Option<HeldAdvisory>> {
        refuse_pooler(owner)?;
        let numbers = self.key.numbers();
        let registry = &owner.shared().locks.registry;
        if registry.is_busy(numbers, self.mode) {
            return Ok(None);
        }
        let Ok(place) = registry.take(numbers, self.mode, registry.slot()?) else { return Ok(None) };
        owner.shared().run(attempt(owner.clone(), self.clone(), place)).await
    }

    /// Acquires it for the owner's session, waiting for it.
    ///
    /// Who waits in one process is served in the order of arrival; across processes nearly so (see Database).
    /// Shared holders of one process can follow each other without end while an exclusive waiter of another process
    /// waits: if that matters, use a lease.
    ///
    /// Two processes that each hold what the other waits for wait for ever: Postgres sees no deadlock, since who holds
    /// and who waits are two sessions. Take several locks in the order of their keys, or wait for a bounded time.
    ///
    /// # Errors
    /// [`Error::Busy`] when the wait is over; otherwise as [`try_acquire`](Self::try_acquire), except that a database
    /// that is out of reach is waited for like a holder.
    ///
    /// # Cancel safety
    /// Safe: it runs in the owner, and what is granted to nobody is released. Whoever is cancelled keeps its place
    /// at the server for up to half a second.
    ///
    /// # Database
    /// First it tries. Then the first one in the process that waits for this key does so at the server, on a connection
    /// of its own: up to four of an owner wait like this, and hold what they get there; all others wait in the process, or
    /// ask now and then. It waits for half a second at a time: while a statement waits it keeps a snapshot, which
    /// `CREATE INDEX CONCURRENTLY` waits for, and if the holder is what runs that, they would wait for each other
    /// (and Postgres would end one after a second, the `deadlock_timeout`). With every new half second it is last in the
    /// server's line again.
    pub async fn acquire(&self, owner: &Owner, wait: Wait) -> Result<HeldAdvisory> {
        let busy = |after| Error::Busy { name: self.key.to_string(), label: None, token: None, after };
        if wait == Wait::no() {
            return self.try_acquire(owner).await?.ok_or_else(|| busy(Duration::ZERO));
        }
        refuse_pooler(owner)?;
        let slot = owner.shared().locks.registry.slot()?;
        // Dropped with this future, also at the deadline: the task gives up then.
        let (_wanted, watching) = watch::channel(());
        let deadline = wait.bound().map(|bound| Moment::now().after(bound));
        let waiting =
            owner.shared().run(line::acquire(owner.clone(), self.clone(), slot, deadline, watching));
        match wait.bound() {
            None => waiting.await,
            Some(bound) => {
                tokio::time::timeout(bound, waiting).await.unwrap_or_else(|_elapsed| Err(busy(bound)))
            }
        }
    }

    /// Tells the database what the key is called, so that `fencepost.advisory_locks()` shows the name. For locks of
    /// transactions, once at a service's start; what is acquired for an owner's session is told by itself.
    ///
    /// # Errors
    /// [`Error::SchemaMissing`], [`Error::NotAllowed`], [`Error::Database`].
    ///
    /// # Cancel safety
    /// It happens or not; repeating it is harmless.
    ///
    /// # Database
    /// One statement; none for a key without a name.
    pub async fn note_name(&self, conn: &mut PgConnection) -> Result<()> {
        if let Some(call) = advisory::note(&self.key) {
            call.written_out_on(conn).await.map_err(|source| Error::database("noting a name", source))?;
        }
        Ok(())
    }
}

fn refuse_pooler(owner: &Owner) -> Result<()> {
    if owner.is_pooled() {
        return Err(Error::TransactionPooler {
            what: "a session-level advisory lock",
            instead: "AdvisoryLock::begin or AdvisoryLock::lock for a transaction, or a Lease for longer",
        });
    }
    Ok(())
}

/// Asks once, on the owner's thread; again for as long as the database is out of reach.
async fn attempt(owner: Owner, lock: AdvisoryLock, place: Place) -> Result<Option<HeldAdvisory>> {
    let (start, bound) = (Moment::now(), owner.shared().statements.source().bound);
    let mut backoff = Backoff::new(Duration::from_millis(4), Duration::from_millis(250));
    loop {
        match ask(owner.shared(), &lock, &place).await {
            Ok(Some(session)) => return Ok(Some(HeldAdvisory::new(lock, owner, session, None, place))),
            Ok(None) => return Ok(None),
            Err(error) if owner.shared().locks.is_stopped() => return Err(stopped(&error)),
            Err(error) if !is_transient(&error) => return Err(Error::database(STEP, error)),
            Err(error) if start.elapsed() >= bound => {
                return Err(Error::TimedOut { step: STEP, after: start.elapsed(), source: Some(error) });
            }
            Err(error) => {
                tracing::debug!(%error, "fencepost: asking for an advisory lock again");
                tokio::time::sleep(backoff.pause()).await;
            }
        }
    }
}

/// One question on the main session, which is the one that holds it then.
async fn ask(
    shared: &Shared,
    lock: &AdvisoryLock,
    place: &Place,
) -> sqlx::Result<Option<std::sync::Arc<LockSession>>> {
    let session = shared.locks.main(shared.statements.source()).await?;
    let granted = session.try_lock(lock.key.numbers(), lock.mode, place.is_alone()).await?;
    Ok(granted.then_some(session))
}

fn stopped(error: &sqlx::Error) -> Error {
    tracing::debug!(%error, "fencepost: the owner was stopped while an advisory lock was asked for");
    Error::Stopped
}
