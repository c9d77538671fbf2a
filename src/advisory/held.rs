//! The held lock of the owner's session.

use std::fmt;
use std::sync::Arc;

use super::AdvisoryLock;
use crate::error::{Error, LossReason, Result};
use crate::key::Key;
use crate::owner::locks::{Beside, LockSession};
use crate::owner::registry::Place;
use crate::owner::{Owner, Shared};
use crate::sql::advisory;

/// An advisory lock that a session of the owner's holds, until it is released, dropped or lost.
///
/// It hangs on that session alone, not on the owner's heartbeat: it stays held when the owner is lost and starts again.
///
/// # Guarantees
/// While [`is_held`](Self::is_held) says yes the session answered at most nine seconds ago (nine tenths of the owner's
/// ttl, if that is less than ten seconds; at least nine tenths of one), and the server gives up a client that is cut off
/// only after eleven. If somebody terminates the session, or its connection breaks, the server frees the lock at
/// once; this process is told within a second or so, as soon as it asks again. In between somebody else may hold it:
/// a write that must not be late needs a [`Lease`](crate::Lease).
///
/// # Drop
/// Releases in the background, soon; when its connection is closed if the process ends before. Use
/// [`release`](Self::release) to know. Dropping it never waits and never fails.
#[must_use = "dropping it releases the lock"]
pub struct HeldAdvisory {
    lock: AdvisoryLock,
    /// A clone: what is held keeps its owner going.
    owner: Owner,
    session: Arc<LockSession>,
    /// What is given back with it.
    rest: Option<Rest>,
}

struct Rest {
    /// The session, if it is one beside the main one.
    beside: Option<Beside>,
    place: Place,
}

impl HeldAdvisory {
    pub(super) fn new(
        lock: AdvisoryLock,
        owner: Owner,
        session: Arc<LockSession>,
        beside: Option<Beside>,
        place: Place,
    ) -> Self {
        place.held_by(&session);
        tracing::debug!(key = %lock.key, "fencepost: advisory lock acquired");
        if owner.shared().locks.registry.is_news(&lock.key)
            && let Some(note) = advisory::note(&lock.key)
        {
            let shared = Arc::clone(owner.shared());
            owner.shared().run_unattended(async move { shared.statements.call_once(&note).await });
        }
        Self { lock, owner, session, rest: Some(Rest { beside, place }) }
    }

    /// What is locked.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.lock.key
    }

    /// Whether it is held shared.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.lock.is_shared()
    }

    /// Whether it is held, as far as can be known without asking: see the type's Guarantees. Cheap: looks at the local
    /// clock.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.session.trust().is_trusted()
    }

    /// Resolves with the reason when it is lost: its session has ended, could not be reached, or this process was
    /// paused for too long to know. Every lock of that session is lost with it.
    ///
    /// # Cancel safety
    /// Safe: it only watches.
    pub async fn lost(&self) -> LossReason {
        self.session.trust().lost().await
    }

    /// Releases it. `true`: it was held until now, and the server said so. `false`: it had been lost before.
    ///
    /// # Errors
    /// [`Error::OutcomeUnknown`] if the answer was lost. The session is closed then, with all it held, so that
    /// this is free as soon as the server notices.
    ///
    /// # Cancel safety
    /// Once polled it is released, also when the future is dropped.
    ///
    /// # Database
    /// One statement on the session that holds it.
    pub async fn release(mut self) -> Result<bool> {
        let Some(rest) = self.rest.take() else { return Ok(false) };
        if self.session.trust().loss().is_some() {
            return Ok(false);
        }
        let release =
            release(Arc::clone(self.owner.shared()), self.lock.clone(), Arc::clone(&self.session), rest);
        match self.owner.shared().run(release).await {
            Err(Error::Stopped) => Ok(false),
            answered => answered,
        }
    }
}

impl Drop for HeldAdvisory {
    fn drop(&mut self) {
        if let Some(rest) = self.rest.take() {
            let shared = Arc::clone(self.owner.shared());
            let release = release(shared, self.lock.clone(), Arc::clone(&self.session), rest);
            self.owner.shared().run_unattended(async { drop(release.await) });
        }
    }
}

impl fmt::Debug for HeldAdvisory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeldAdvisory")
            .field("key", self.key())
            .field("shared", &self.is_shared())
            .field("held", &self.is_held())
            .finish_non_exhaustive()
    }
}

/// Runs on the owner's thread.
async fn release(
    shared: Arc<Shared>,
    lock: AdvisoryLock,
    session: Arc<LockSession>,
    Rest { beside, place }: Rest,
) -> Result<bool> {
    if session.trust().loss().is_some() {
        return Ok(false);
    }
    let unlocked = session.unlock(lock.key.numbers(), lock.mode, place.is_alone()).await;
    if let (Ok(true), Some(beside)) = (&unlocked, beside) {
        // Only now is it certain that nothing is held on it.
        shared.locks.put_back(beside);
    }
    drop(place);
    tracing::debug!(key = %lock.key, ?unlocked, "fencepost: advisory lock released");
    match unlocked {
        Err(_) if session.trust().loss() == Some(LossReason::Stopped) => Ok(false),
        unlocked => {
            unlocked.map_err(|source| Error::OutcomeUnknown { step: "releasing an advisory lock", source })
        }
    }
}
