//! The semaphore: at most so many permits at once.
//!
//! ```text
//!            acquire                          release, drop, or the owner's end
//! waiting ──────────▶ permit (token, n slots) ──────────────────────────────────▶ free slots ──▶ the next in line
//!                         │                                                           ▲
//!                         └── paused, cut off: lost ── ttl over ──────────────────────┘
//!                             (by the local clock)
//! ```
//!
//! Each permit is a row of its own with the grant that holds it, so it is free as soon as its owner is dead; a counter
//! that a dead process has raised stays raised. It is held as a lease is: with a token, a fence, and a signal when it is
//! lost.
//!
//! | failure | the holder | the others |
//! |---|---|---|
//! | its process dies | – | may have its permits when its ttl is over |
//! | it is paused beyond the ttl | is lost on waking; its fence rejects | may have its permits when its ttl is over |
//! | it is paused in an open fenced write | its transaction is ended by the server after the ttl | those slots are not granted until then |
//! | the limit is lowered below what is held | goes on holding | wait until fewer than the limit are held |
//! | a caller has another limit in mind | – | [`Error::OtherLimit`], before anything is granted |

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::lease::{HeldLease, Lease};
use crate::name::LockName;
use crate::owner::Owner;
use crate::sql::{self, Arg, Call};
use crate::wait::Wait;

/// At most so many at once, across all processes; the definition: cheap, no connection, clone it as you like.
///
/// Use it to spare something that bears only so much: exports from one database, calls to a partner. For one at a time a
/// [`Lease`] is simpler. To bound the tasks of one process only, take a semaphore in memory.
///
/// # Guarantees
/// Never are more permits held than the limit allows, by what their holders believe
/// ([`is_held`](HeldLease::is_held)), under pauses, crashes and partitions. Whoever waits is served in order: one who
/// wants more than is free is waited for, and nobody passes by.
///
/// The limit is stored with the first use of the name, and every caller has to say the same one.
/// [`resize`](Self::resize) changes it; nobody is evicted by that.
///
/// # Examples
/// ```no_run
/// # async fn example(pool: sqlx::PgPool, owner: fencepost::Owner) -> fencepost::Result<()> {
/// use std::time::Duration;
/// use fencepost::{Semaphore, Wait};
///
/// let exports = Semaphore::named("exports", 5)?;
/// let permit = exports.acquire(&owner, Wait::at_most(Duration::from_secs(30))).await?;
/// let tx = permit.begin(&pool).await?;        // refused when the permit is lost
/// tx.commit().await?;
/// permit.release().await?;
///
/// // A heavy one, which counts for three.
/// let heavy = exports.taking(3)?.try_acquire(&owner).await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Semaphore {
    name: LockName,
    permits: u32,
    count: u32,
}

impl Semaphore {
    /// The largest limit.
    pub const MAX_PERMITS: u32 = 100_000;

    /// The semaphore of this name with so many permits. It is of its own kind: a lease of the same name has nothing to do
    /// with it.
    ///
    /// # Errors
    /// [`Error::Misuse`] for no permits or more than [`MAX_PERMITS`](Self::MAX_PERMITS), or for a name that is empty,
    /// longer than 235 bytes or has a control character.
    pub fn named(name: &str, permits: u32) -> Result<Self> {
        let name = LockName::of_kind("semaphore", name)?;
        if permits == 0 || permits > Self::MAX_PERMITS {
            return Err(Error::misuse(format!(
                "a semaphore has 1 to {} permits, not {permits}",
                Self::MAX_PERMITS
            )));
        }
        Ok(Self { name, permits, count: 1 })
    }

    /// The same semaphore, of which so many permits are acquired at once: all of them, or none.
    ///
    /// # Errors
    /// [`Error::Misuse`] for none, or more than there are.
    pub fn taking(self, count: u32) -> Result<Self> {
        if count == 0 || count > self.permits {
            return Err(Error::misuse(format!(
                "of {} permits 1 to all are acquired at once, not {count}",
                self.permits
            )));
        }
        Ok(Self { count, ..self })
    }

    /// Its name, as it was given.
    #[must_use]
    pub fn name(&self) -> &str {
        self.name.plain()
    }

    /// The name under which its permits are checked by [`fence::check`](crate::fence::check).
    #[must_use]
    pub fn lock_name(&self) -> &LockName {
        &self.name
    }

    /// Its limit, as this caller knows it.
    #[must_use]
    pub fn permits(&self) -> u32 {
        self.permits
    }

    /// Acquires if so many are free and nobody waits; `None`: not now.
    ///
    /// # Errors
    /// [`Error::OtherLimit`], and as for [`Lease::attempt`].
    ///
    /// # Cancel safety
    /// Safe: it runs in the owner; what was granted to a dropped future is released.
    ///
    /// # Database
    /// One statement on the owner's connections. A refused one writes nothing; a granted one is durable.
    pub async fn try_acquire(&self, owner: &Owner) -> Result<Option<Permit>> {
        Ok(self.lease().try_acquire(owner).await?.map(|lease| Permit { lease, count: self.count }))
    }

    /// Acquires, waiting for its turn.
    ///
    /// # Errors
    /// [`Error::OtherLimit`]; [`Error::Busy`] when the wait is over, with one of the holders; [`Error::Stopped`] after
    /// the owner's shutdown. A database that is out of reach is waited for like a holder.
    ///
    /// # Cancel safety
    /// Safe: it runs in the owner; when the future is dropped its place in the line is given up, and what was granted
    /// at that moment is released.
    ///
    /// # Database
    /// As for [`Lease::acquire`]: waiting holds no connection.
    pub async fn acquire(&self, owner: &Owner, wait: Wait) -> Result<Permit> {
        Ok(Permit { lease: self.lease().acquire(owner, wait).await?, count: self.count })
    }

    /// Stores this caller's limit as the semaphore's: from now on, for everybody.
    ///
    /// Nobody who holds or waits is disturbed. If more are held than allowed, nobody is granted any until they are fewer;
    /// if there are more now, those who wait are served at once. A definition with another limit is refused from here on.
    ///
    /// # Errors
    /// [`Error::TimedOut`] or [`Error::OutcomeUnknown`] if the database cannot be reached, [`Error::Stopped`].
    ///
    /// # Cancel safety
    /// Once polled it happens, also when the future is dropped; repeating it is harmless.
    ///
    /// # Database
    /// One statement on the owner's connections.
    pub async fn resize(&self, owner: &Owner) -> Result<()> {
        let (shared, name) = (Arc::clone(owner.shared()), self.name.clone());
        let args = [Arg::Text(self.name().to_owned()), Arg::Number(self.permits.into())];
        let call = Call::new(sql::SEMAPHORE_RESIZE, args);
        let resize = async move {
            let rows = shared.statements.call_until_answered("resizing a semaphore", &call, &call).await?;
            shared.freed(&name, &rows);
            Ok(())
        };
        owner.shared().run(resize).await
    }

    fn lease(&self) -> Lease {
        Lease::of_permits(self.name.clone(), self.permits, self.count)
    }
}

/// One permit, or several that were acquired at once, until released, dropped or lost.
///
/// It is a [`HeldLease`] in all but the ways to end it: [`is_held`](HeldLease::is_held), [`lost`](HeldLease::lost),
/// [`begin`](HeldLease::begin) and [`fence`](HeldLease::fence) are that one's. The fence is against its own slots:
/// what is written through it was written by a holder, beside at most so many others.
///
/// # Drop
/// Releases in the background, soon; after the owner's ttl if the process ends before. Use
/// [`release`](Self::release) to know.
#[must_use = "dropping it releases the permit"]
pub struct Permit {
    lease: HeldLease,
    count: u32,
}

impl Permit {
    /// How many it counts for.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Releases it, all of it. `true`: it was held until now. `false`: it had been lost before.
    ///
    /// # Errors
    /// As for [`HeldLease::release`].
    ///
    /// # Cancel safety
    /// Once polled it is released, also when the future is dropped.
    ///
    /// # Database
    /// One statement on the owner's connections, which grants what is free to those who wait.
    pub async fn release(self) -> Result<bool> {
        self.lease.release().await
    }
}

impl Deref for Permit {
    type Target = HeldLease;

    fn deref(&self) -> &HeldLease {
        &self.lease
    }
}

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permit")
            .field("semaphore", &self.lease.name().plain())
            .field("count", &self.count)
            .field("token", &self.lease.token())
            .field("remaining", &self.lease.remaining())
            .finish_non_exhaustive()
    }
}
