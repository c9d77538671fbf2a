//! Waiting for a lock of the owner's session, as it runs on the owner's thread.
//!
//! ```text
//!        refused, or
//!      somebody is in line         first in line, a session is free        granted there
//! try ───────────────▶ in line ──────────────────────────────────▶ waits ─────────────▶ held
//!                        │                                          │  ▲
//!                        │ all of those in use                      └──┘ half a second is over
//!                        └───────────────────────────▶ tries now and then ────────────▶ held
//! ```

use std::time::Duration;

use tokio::sync::watch;

use super::{AdvisoryLock, STEP, ask, stopped};
use crate::advisory::held::HeldAdvisory;
use crate::clock::Moment;
use crate::error::{Error, Result, is_transient};
use crate::owner::Owner;
use crate::owner::locks::Beside;
use crate::owner::registry::Slot;
use crate::wait::Backoff;

/// How long a statement waits at the server at a time.
///
/// While it waits it keeps a snapshot, for which `CREATE INDEX CONCURRENTLY` waits. If the holder of the lock is
/// what runs that, they wait for each other until this statement ends; it has to do so before Postgres looks for
/// deadlocks, after a second by default, and ends one of the two. (The next statement's snapshot is a later one, for
/// which nobody waits.) And it is how long a waiter whose client has died stays in the server's line. A try every few
/// milliseconds would keep no snapshot, but be as many statements, and never be in line.
const AT_A_TIME: Duration = Duration::from_millis(500);

/// Waits until it is granted, or nobody wants it any more: until the sender of `wanted` is gone.
pub(super) async fn acquire(
    owner: Owner,
    lock: AdvisoryLock,
    slot: Slot,
    deadline: Option<Moment>,
    mut wanted: watch::Receiver<()>,
) -> Result<HeldAdvisory> {
    let locks = &owner.shared().locks;
    let mut waiter = Waiter { owner: &owner, lock: &lock, slot: Some(slot), deadline };
    // Never before somebody who came earlier.
    if !locks.registry.has_line(lock.key.numbers()) {
        match waiter.try_once().await {
            Ok(Some(held)) => return Ok(held),
            Ok(None) => {}
            Err(error) => waiter.bear(error)?,
        }
    }
    // Of all here who wait for this key only the first one does so at the server, so that they hold one session.
    let line = locks.registry.join(lock.key.numbers());
    let _turn = tokio::select! {
        turn = line.turn() => turn,
        _gone = wanted.changed() => return Err(Error::Stopped),
    };
    let mut backoff = Backoff::new(Duration::from_millis(5), Duration::from_millis(250));
    let mut beside: Option<Beside> = None;
    // Looked at between two statements: one that is under way ends by itself, soon, and a session on which it was
    // cut off would have to be closed.
    while wanted.has_changed().is_ok() {
        let answer = match beside.take() {
            Some(own) => waiter.wait_on(own, &mut beside).await,
            None => match locks.beside(owner.shared().statements.source()).await {
                Ok(Some(own)) => waiter.wait_on(own, &mut beside).await,
                Ok(None) => waiter.try_once().await,
                Err(error) => Err(error),
            },
        };
        match answer {
            Ok(Some(held)) => return Ok(held),
            // Waited at the server already.
            Ok(None) if beside.is_some() => continue,
            Ok(None) => {}
            Err(error) => waiter.bear(error)?,
        }
        tokio::select! {
            () = tokio::time::sleep(backoff.pause()) => {}
            _gone = wanted.changed() => {}
        }
    }
    if let Some(own) = beside {
        locks.put_back(own);
    }
    Err(Error::Stopped)
}

struct Waiter<'a> {
    owner: &'a Owner,
    lock: &'a AdvisoryLock,
    /// None once it is part of what is held.
    slot: Option<Slot>,
    deadline: Option<Moment>,
}

impl Waiter<'_> {
    /// Asks on the main session.
    async fn try_once(&mut self) -> sqlx::Result<Option<HeldAdvisory>> {
        let Some(slot) = self.slot.take() else { return Ok(None) };
        let shared = self.owner.shared();
        let place = match shared.locks.registry.take(self.lock.key.numbers(), self.lock.mode, slot) {
            Ok(place) => place,
            Err(slot) => {
                self.slot = Some(slot);
                return Ok(None);
            }
        };
        match ask(shared, self.lock, &place).await {
            Ok(Some(session)) => {
                Ok(Some(HeldAdvisory::new(self.lock.clone(), self.owner.clone(), session, None, place)))
            }
            refused => {
                self.slot = place.give_up();
                refused.map(|_| None)
            }
        }
    }

    /// Waits at the server for a while. The session is put into `back` if nothing was granted and it is in order.
    async fn wait_on(
        &mut self,
        own: Beside,
        back: &mut Option<Beside>,
    ) -> sqlx::Result<Option<HeldAdvisory>> {
        let numbers = self.lock.key.numbers();
        let left = self.deadline.map_or(AT_A_TIME, |deadline| deadline.remaining().min(AT_A_TIME));
        if !own.session().wait_for(numbers, self.lock.mode, left).await? {
            *back = Some(own);
            return Ok(None);
        }
        let Some(slot) = self.slot.take() else { return Ok(None) };
        let place = self.owner.shared().locks.registry.granted(numbers, self.lock.mode, slot);
        let session = std::sync::Arc::clone(own.session());
        Ok(Some(HeldAdvisory::new(self.lock.clone(), self.owner.clone(), session, Some(own), place)))
    }

    /// What is out of reach for the moment is waited for: the deadline is the caller's.
    fn bear(&self, error: sqlx::Error) -> Result<()> {
        if self.owner.shared().locks.is_stopped() {
            return Err(stopped(&error));
        }
        if !is_transient(&error) {
            return Err(Error::database(STEP, error));
        }
        tracing::debug!(%error, "fencepost: waiting for an advisory lock, the database is out of reach");
        Ok(())
    }
}
