//! Only one at a time, on Postgres: leases with fencing tokens that are checked in the transaction of the write.
//!
//! ```no_run
//! # async fn example(pool: sqlx::PgPool) -> fencepost::Result<()> {
//! use fencepost::{Lease, Owner};
//!
//! fencepost::migrate(&pool).await?;                                   // once, or at every start
//! let owner = Owner::start(&pool).await?;                             // one per process
//! if let Some(held) = Lease::named("nightly-report")?.try_acquire(&owner).await? {
//!     let mut tx = held.begin(&pool).await?;                          // BEGIN and the fence, one round trip
//!     sqlx::query("UPDATE report SET day = day + 1").execute(&mut *tx).await?;
//!     tx.commit().await?;                                             // or rejected: somebody else has it by now
//! }
//! # Ok(()) }
//! ```
//!
//! A lock with an expiry cannot exclude by itself: its holder may pause past the expiry, wake up and write over
//! the next holder's data. The cure is a *fencing token*, a number that grows with every grant, and a storage
//! that rejects the smaller one. Here the lock and the data are in one database, so the check is part of the
//! transaction that writes: exact, not probable.
//!
//! # The parts
//! - [`Owner`]: the process, alive by one heartbeat whatever it holds.
//! - [`Lease`] and [`HeldLease`]: the lock. [`Lease::try_acquire`] or, waiting in line, [`Lease::acquire`];
//!   [`HeldLease::begin`] is the fence; [`HeldLease::lost`] the signal.
//! - [`Election`]: one leader among many candidates, and who it is.
//! - [`Semaphore`]: at most so many at once.
//! - [`fence`](mod@fence): the check for other cases: a worker that was handed a [`Grant`], another system's
//!   token, a table that must never be written without a fence.
//! - [`claim`]: do it once: once in a transaction, idempotency keys with a stored result, jobs.
//! - [`row`]: row locks on your own tables, and the next rows of a queue that nobody else has.
//! - [`Group`], [`Member`] and [`Partition`]: members share out partitions, and each has one writer.
//! - [`version`]: no lock at all: a row is changed only by who has read it as it is.
//! - [`schedule`]: once at each due time, whatever the number of servers and whatever their clocks say.
//! - [`transaction()`]: runs again what Postgres rolled back, and nothing that may have been committed.
//! - [`AdvisoryLock`]: the locks that Postgres itself has, without their traps: for a transaction, or
//!   ([`HeldAdvisory`]) many on one connection for work that outlives one. [`Key`]: what they lock.
//! - [`migrate()`] and [`mod@migrate`]: the schema. [`prune()`] forgets what is long over.
//! - [`Error`]: one type for all that can go wrong.
//! - `testing` (feature `test-util`): a Postgres that starts by itself, for your tests.
//!
//! # What it does not do
//! It does not exclude side effects that check no token. It is not a job framework and not a driver.
//!
//! Longer reading: [`docs::choosing`] (which lock for which problem), [`docs::fencing`], [`docs::failure`],
//! [`docs::pooling`].

pub mod claim;
mod error;
pub mod fence;
pub mod migrate;
pub mod row;
pub mod schedule;
#[cfg(all(feature = "test-util", unix))]
pub mod testing;
pub mod version;

mod advisory;
mod clock;
mod driver;
mod election;
mod identifier;
mod json;
mod key;
mod lease;
mod mistake;
mod name;
mod owner;
mod partition;
mod pooler;
mod prune;
mod retry;
mod savepoint;
mod semaphore;
mod sql;
mod statement;
mod token;
mod wait;

pub use advisory::{AdvisoryLock, HeldAdvisory};
pub use election::{Election, Leader, Leaders, Leadership};
pub use error::{Error, LossReason, Result};
pub use key::Key;
pub use lease::{Attempt, HeldLease, Holder, Lease};
pub use migrate::migrate;
pub use name::LockName;
pub use owner::{Owner, OwnerBuilder};
pub use partition::{Change, Group, Member, Partition};
pub use prune::{Pruned, prune};
pub use retry::{Isolation, Work, transaction};
pub use semaphore::{Permit, Semaphore};
pub use token::{FencingToken, Grant, GrantId, Version};
pub use wait::Wait;

/// Longer reading.
pub mod docs {
    #[doc = include_str!("../docs/choosing.md")]
    pub mod choosing {}
    #[doc = include_str!("../docs/failure.md")]
    pub mod failure {}
    #[doc = include_str!("../docs/fencing.md")]
    pub mod fencing {}
    #[doc = include_str!("../docs/pooling.md")]
    pub mod pooling {}
}

/// So that the code in it is checked.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
