//! A single writer per partition: the members of a group share out its partitions, and each partition is a fenced lease.
//!
//! ```text
//!          a member that is below its share takes it            released, dropped, or drained for too long
//! free ────────────────────────────────────────────▶ assigned ─────────────────────────────────────────────▶ free
//!                                                       │  └─ another member is below its share: revoked ─┘
//!                                                       └── its owner dies: lost, and free after the ttl
//! ```
//!
//! | event | what follows |
//! |---|---|
//! | a member joins | those that are over their shares give up what is over: they drain it first, with a deadline |
//! | a member leaves | it drains what it has; the others take it |
//! | a member dies, or is cut off | what it had is free after its ttl; the others take it |
//! | a member is paused beyond its ttl, wakes up and writes | its fence rejects; it is a member again with its owner's next life |
//! | a member never drains what was revoked | at the deadline it is released, and its fence rejects |
//! | somebody joins with another number of partitions | is refused: [`Error::GroupInUse`] |
//! | the server crashes, or fails over | nothing is lost beyond what happens to leases |

mod balance;
mod member;

use std::fmt;
use std::time::Duration;

use sha2::{Digest as _, Sha256};
use sqlx::{PgPool, postgres::PgTransaction};
use tokio::sync::{mpsc, oneshot, watch};

use crate::clock::Moment;
use crate::error::{Error, LossReason, Result};
use crate::lease::HeldLease;
use crate::mistake::Mistake;
use crate::name::LockName;
use crate::owner::Owner;
use crate::token::FencingToken;

/// A number of partitions that the members of a group share out: the definition, cheap, no connection.
///
/// Use it where each key must have one writer at a time and many processes share the work: keys are mapped to partitions
/// by [`partition_for`](Self::partition_for), partitions to members. If there is only one thing to be written, a
/// [`Lease`](crate::Lease) is enough; if items of one key only have to be worked one after the other, by
/// whoever is free, take a lease for the key (`examples/serial_queue.rs`).
///
/// # Guarantees
/// - *Single writer*: of a partition, at most one member's fenced writes commit at any time, in the order of its tokens,
///   whatever happens to the sharing.
/// - *Even*: when nothing happens for a few rounds, each partition is assigned, and no member has more than one
///   more than another. Then nothing moves until a member joins, leaves or dies.
/// - *Nobody is starved*: the members are those whose owners live, as the database counts them.
///
/// # Database
/// Each member sends one statement about every third of its owner's ttl, jittered: one look at the members, whatever the
/// number of partitions. While partitions move it looks at each lease of the group, four times as often.
/// The lease of a partition is named by the group, a tab and the number
/// (`fencepost.partition_lease('orders', 17)`): no name that people choose has a tab in it.
///
/// # Examples
/// ```no_run
/// # async fn example(pool: sqlx::PgPool, owner: fencepost::Owner) -> fencepost::Result<()> {
/// use fencepost::{Change, Group};
///
/// let mut member = Group::named("orders", 64)?.join(&owner).await?;
/// loop {
///     if let Change::Assigned(partition) = member.next().await? {
///         let pool = pool.clone();
///         tokio::spawn(async move {
///             loop {
///                 tokio::select! {
///                     _left = partition.revoked() => break,
///                     // … or work on the keys of this partition, and write through its fence:
///                     tx = partition.begin(&pool) => tx?.commit().await?,
///                 }
///             }
///             partition.release().await
///         });
///     }
/// }
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Group {
    name: LockName,
    partitions: u32,
    drain: Option<Duration>,
}

/// Membership in a [`Group`]: what is assigned and revoked, as it happens.
///
/// # Drop
/// Leaves in the background: what it had is revoked, and released when its [`Partition`]s are dropped or at the drain's
/// deadline. Use [`leave`](Self::leave) to know.
#[must_use = "dropping it leaves the group"]
pub struct Member {
    group: Group,
    changes: mpsc::UnboundedReceiver<Result<Change>>,
    /// Dropped to leave.
    wanted: watch::Sender<()>,
    left: oneshot::Receiver<Result<()>>,
}

/// What has changed for a member.
#[derive(Debug)]
#[non_exhaustive]
pub enum Change {
    /// It has this partition now.
    Assigned(Partition),
    /// Another member shall have it: finish what is begun, then release or drop the [`Partition`].
    #[non_exhaustive]
    Revoked {
        /// Its number.
        number: u32,
        /// After this long it is released in any case, and its fence rejects.
        within: Duration,
    },
    /// It is lost: the owner died, or an operator revoked its lease. Said soon after
    /// [`Partition::lost`] says it.
    #[non_exhaustive]
    Lost {
        /// Its number.
        number: u32,
        /// Why.
        reason: LossReason,
    },
}

/// A partition that is assigned to this process: a fenced lease.
///
/// # Drop
/// Releases it in the background; somebody takes it in a later round, maybe this member again.
#[must_use = "dropping it releases the partition"]
pub struct Partition {
    number: u32,
    held: HeldLease,
    /// When it will be released in any case, once it is revoked.
    revoked: watch::Receiver<Option<Moment>>,
}

impl Group {
    /// The most partitions of a group: 4,096.
    pub const MAX_PARTITIONS: u32 = 4_096;

    /// The longest name, in bytes: 250.
    pub const MAX_NAME_BYTES: usize = 250;

    /// The longest [`drain_within`](Self::drain_within): 24 h.
    pub const MAX_DRAIN: Duration = Duration::from_hours(24);

    /// The group of this name, with so many partitions. All members give the same number.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a name that [`LockName::new`] refuses or that is longer than
    /// [`MAX_NAME_BYTES`](Self::MAX_NAME_BYTES), and for no partitions or more than
    /// [`MAX_PARTITIONS`](Self::MAX_PARTITIONS).
    pub fn named(name: &str, partitions: u32) -> Result<Self> {
        let checked = LockName::new(name)?;
        if name.len() > Self::MAX_NAME_BYTES {
            let most = Self::MAX_NAME_BYTES;
            return Err(Error::misuse(format!(
                "a group's name is at most {most} bytes long, this one has {}",
                name.len()
            )));
        }
        if partitions == 0 || partitions > Self::MAX_PARTITIONS {
            let most = Self::MAX_PARTITIONS;
            return Err(Error::misuse(format!("a group has 1 to {most} partitions, not {partitions}")));
        }
        Ok(Self { name: checked, partitions, drain: None })
    }

    /// How long a member may go on with a partition that is revoked. Default: its owner's ttl. Zero: it is released at
    /// once, and the fence rejects what is late.
    ///
    /// # Errors
    /// [`Error::Misuse`] for more than [`MAX_DRAIN`](Self::MAX_DRAIN).
    pub fn drain_within(self, drain: Duration) -> Result<Self> {
        if drain > Self::MAX_DRAIN {
            return Err(Error::misuse(format!("a partition is drained within 24 h, not {drain:?}")));
        }
        Ok(Self { drain: Some(drain), ..self })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &LockName {
        &self.name
    }

    /// How many partitions it has.
    #[must_use]
    pub fn partitions(&self) -> u32 {
        self.partitions
    }

    /// The partition that a key belongs to, from 0. Frozen: the first four bytes of the key's SHA-256 (FIPS 180-4) as an
    /// unsigned number, the first byte first, modulo the number of partitions. In SQL
    /// `fencepost.partition_for(key, partitions)`.
    ///
    /// # Examples
    /// ```
    /// let orders = fencepost::Group::named("orders", 64)?;
    /// assert_eq!(orders.partition_for("customer-17"), 43);
    /// assert_eq!(orders.partition_for(""), 2);
    /// # Ok::<(), fencepost::Error>(())
    /// ```
    #[must_use]
    pub fn partition_for(&self, key: impl AsRef<[u8]>) -> u32 {
        let digest = Sha256::digest(key.as_ref());
        let first = digest.iter().take(4).fold(0, |number, byte| (number << 8) | u32::from(*byte));
        first % self.partitions
    }

    /// Becomes a member. Partitions come by [`Member::next`], in this and the next rounds.
    ///
    /// If the owner is lost it joins again under the owner's next life.
    ///
    /// # Errors
    /// [`Error::GroupInUse`] if the group has another number of partitions and is in use;
    /// [`Error::Misuse`] if this owner is a member already; [`Error::TimedOut`] or [`Error::OutcomeUnknown`] if the
    /// database cannot be reached; [`Error::Stopped`].
    ///
    /// # Cancel safety
    /// Safe: a member that nobody has leaves again.
    ///
    /// # Database
    /// One statement on the owner's connections.
    pub async fn join(&self, owner: &Owner) -> Result<Member> {
        let (wanted, over) = member::enrol(owner, &self.name).await?;
        let (tell, changes) = mpsc::unbounded_channel();
        let (join, joined) = oneshot::channel();
        let (leave, left) = oneshot::channel();
        let member = member::serve(owner.clone(), self.clone(), wanted.subscribe(), tell, join, leave, over);
        owner.shared().run_unattended(member);
        joined.await.unwrap_or(Err(Error::Stopped))?;
        Ok(Member { group: self.clone(), changes, wanted, left })
    }
}

impl Member {
    /// The group.
    #[must_use]
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// What changes next.
    ///
    /// # Errors
    /// [`Error::Stopped`] after the owner's shutdown. [`Error::GroupInUse`] if the owner was lost, and meanwhile the group
    /// was given another number of partitions; any other error if the database refuses for good. Then it is a member no
    /// more, and what it has is revoked.
    ///
    /// # Cancel safety
    /// Safe: nothing is lost; what was assigned is told the next time.
    pub async fn next(&mut self) -> Result<Change> {
        self.changes.recv().await.unwrap_or(Err(Error::Stopped))
    }

    /// Leaves: all it has is revoked, as [`Partition::revoked`] tells; returns when it is released.
    ///
    /// # Errors
    /// [`Error::TimedOut`] or [`Error::OutcomeUnknown`] if the database could not be told: that is tried on in the
    /// background, and its membership ends with its owner's life at the latest.
    ///
    /// # Cancel safety
    /// Once polled it leaves, also when the future is dropped.
    pub async fn leave(self) -> Result<()> {
        // Those it was not told of yet are dropped with the channel.
        let Self { changes, wanted, left, .. } = self;
        drop((changes, wanted));
        // The owner's end is one for the membership too.
        left.await.unwrap_or(Ok(()))
    }
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Member").field("group", &self.group).finish_non_exhaustive()
    }
}

impl Partition {
    /// Its number, from 0.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Its lease.
    pub fn lease(&self) -> &HeldLease {
        &self.held
    }

    /// Its fencing token, larger than that of every member that had it before.
    #[must_use]
    pub fn token(&self) -> FencingToken {
        self.held.token()
    }

    /// Whether it is certainly held now: as [`HeldLease::is_held`], and not beyond the end of a drain.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.held.is_held() && self.deadline().is_none_or(|deadline| !deadline.has_passed())
    }

    /// How long it is certainly held if nothing more is heard, nor revoked: as [`HeldLease::remaining`], and not beyond the
    /// end of a drain.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        let remaining = self.held.remaining();
        self.deadline().map_or(remaining, |deadline| remaining.min(deadline.remaining()))
    }

    /// Resolves when it is revoked (or lost), with what is left to finish in.
    ///
    /// # Cancel safety
    /// Safe: it only watches.
    pub async fn revoked(&self) -> Duration {
        let mut revoked = self.revoked.clone();
        tokio::select! {
            deadline = revoked.wait_for(Option::is_some) => {
                // The sender is gone with the membership, or the owner.
                deadline.ok().and_then(|deadline| *deadline).map_or(Duration::ZERO, Moment::remaining)
            }
            _reason = self.held.lost() => Duration::ZERO,
        }
    }

    /// Resolves with the reason when it is lost; as [`HeldLease::lost`]. After the drain's deadline that is
    /// [`LossReason::Released`].
    ///
    /// # Cancel safety
    /// Safe: it only watches.
    pub async fn lost(&self) -> LossReason {
        self.held.lost().await
    }

    /// Begins a transaction that has passed the fence; as [`HeldLease::begin`].
    ///
    /// # Errors
    /// As for [`HeldLease::begin_with`].
    ///
    /// # Cancel safety
    /// As for [`HeldLease::begin_with`].
    pub async fn begin(&self, pool: &PgPool) -> Result<PgTransaction<'static>> {
        self.held.begin(pool).await
    }

    /// Passes the fence in the caller's transaction; as [`HeldLease::fence`].
    ///
    /// # Errors
    /// As for [`HeldLease::fence`].
    ///
    /// # Cancel safety
    /// Drop the transaction together with the future.
    pub async fn fence(&self, tx: &mut PgTransaction<'_>) -> Result<()> {
        self.held.fence(tx).await
    }

    /// Releases it; as [`HeldLease::release`].
    ///
    /// # Errors
    /// As for [`HeldLease::release`].
    ///
    /// # Cancel safety
    /// Once polled it is released, also when the future is dropped.
    pub async fn release(self) -> Result<bool> {
        self.held.release().await
    }

    /// When it will be released in any case.
    fn deadline(&self) -> Option<Moment> {
        if Mistake::KeepsRevoked.is_made() { None } else { *self.revoked.borrow() }
    }
}

impl fmt::Debug for Partition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Partition")
            .field("number", &self.number)
            .field("held", &self.held)
            .finish_non_exhaustive()
    }
}
