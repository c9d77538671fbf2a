//! Who holds which advisory lock within this process.
//!
//! Postgres lets one session take a lock again that it holds already. Many locks of a process share a session, so
//! whether two of its tasks exclude each other is decided here, before the server is asked.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::locks::LockSession;
use crate::clock::Moment;
use crate::error::{Error, Result};
use crate::key::{Key, Mode, Numbers};
use crate::mistake::Mistake;

#[derive(Debug)]
pub(crate) struct Registry {
    table: Mutex<HashMap<Numbers, Entry>>,
    next_id: AtomicU64,
    slots: Arc<Semaphore>,
    cap: usize,
    /// When the database was last told what a key is called.
    noted: Mutex<HashMap<Numbers, Moment>>,
}

/// What is known of a key that somebody here holds, tries or waits for.
#[derive(Debug, Default)]
struct Entry {
    occupants: Vec<Occupant>,
    in_line: usize,
    /// Those who wait for it, one after the other: only the first one waits at the server.
    line: Arc<tokio::sync::Mutex<()>>,
}

#[derive(Debug)]
struct Occupant {
    id: u64,
    mode: Mode,
    /// None while it is being tried.
    session: Option<Arc<LockSession>>,
}

impl Occupant {
    /// What was lost excludes nobody any more, though it has not been dropped yet.
    fn counts(&self) -> bool {
        self.session.as_ref().is_none_or(|session| session.trust().loss().is_none())
    }
}

impl Entry {
    fn is_busy(&self, mode: Mode) -> bool {
        let excludes = |other: Mode| mode == Mode::Exclusive || other == Mode::Exclusive;
        let busy = self.occupants.iter().any(|other| excludes(other.mode) && other.counts());
        busy && !Mistake::Reentrant.is_made()
    }
}

/// The right to hold one lock more.
#[derive(Debug)]
pub(crate) struct Slot(#[expect(dead_code, reason = "given back by being dropped")] OwnedSemaphorePermit);

/// Held, or being tried, until this is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    registry: Arc<Registry>,
    numbers: Numbers,
    id: u64,
    slot: Option<Slot>,
}

/// Waiting for it, until this is dropped.
#[derive(Debug)]
pub(crate) struct InLine {
    registry: Arc<Registry>,
    numbers: Numbers,
    line: Arc<tokio::sync::Mutex<()>>,
}

/// How many names are remembered as told, and for how long.
const NOTED: usize = 10_000;
const NOTED_FOR: Duration = Duration::from_hours(1);

impl Registry {
    pub(crate) fn new(cap: usize) -> Self {
        let slots = Arc::new(Semaphore::new(cap));
        Self { table: Mutex::default(), next_id: AtomicU64::new(0), slots, cap, noted: Mutex::default() }
    }

    pub(crate) fn slot(&self) -> Result<Slot> {
        let slot = Arc::clone(&self.slots).try_acquire_owned();
        slot.map(Slot).map_err(|_none_left| Error::LockTableFull { cap: Some(self.cap), source: None })
    }

    /// Whether somebody here holds or tries it in a way that excludes `mode`.
    pub(crate) fn is_busy(&self, numbers: Numbers, mode: Mode) -> bool {
        self.table().get(&numbers).is_some_and(|entry| entry.is_busy(mode))
    }

    /// Takes it, to ask the server next; gives the slot back if somebody here is in the way.
    pub(crate) fn take(self: &Arc<Self>, numbers: Numbers, mode: Mode, slot: Slot) -> Result<Place, Slot> {
        let mut table = self.table();
        let entry = table.entry(numbers).or_default();
        if entry.is_busy(mode) {
            return Err(slot);
        }
        Ok(self.enter(entry, numbers, mode, slot))
    }

    /// Takes what the server has granted to a session of its own: whoever held it here gives it up just now.
    pub(crate) fn granted(self: &Arc<Self>, numbers: Numbers, mode: Mode, slot: Slot) -> Place {
        let mut table = self.table();
        self.enter(table.entry(numbers).or_default(), numbers, mode, slot)
    }

    fn enter(self: &Arc<Self>, entry: &mut Entry, numbers: Numbers, mode: Mode, slot: Slot) -> Place {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        entry.occupants.push(Occupant { id, mode, session: None });
        Place { registry: Arc::clone(self), numbers, id, slot: Some(slot) }
    }

    /// Whether somebody here waits for it.
    pub(crate) fn has_line(&self, numbers: Numbers) -> bool {
        self.table().get(&numbers).is_some_and(|entry| entry.in_line > 0)
    }

    /// Joins those who wait for it.
    pub(crate) fn join(self: &Arc<Self>, numbers: Numbers) -> InLine {
        let mut table = self.table();
        let entry = table.entry(numbers).or_default();
        entry.in_line += 1;
        InLine { registry: Arc::clone(self), numbers, line: Arc::clone(&entry.line) }
    }

    /// Whether the database is to be told now what the key is called.
    pub(crate) fn is_news(&self, key: &Key) -> bool {
        if key.name().is_none() {
            return false;
        }
        let mut noted = self.noted.lock().unwrap_or_else(PoisonError::into_inner);
        if noted.get(&key.numbers()).is_some_and(|since| since.elapsed() < NOTED_FOR) {
            return false;
        }
        if noted.len() >= NOTED {
            noted.clear();
        }
        noted.insert(key.numbers(), Moment::now());
        true
    }

    fn leave(&self, numbers: Numbers, leave: impl FnOnce(&mut Entry)) {
        let mut table = self.table();
        if let Some(entry) = table.get_mut(&numbers) {
            leave(entry);
            if entry.occupants.is_empty() && entry.in_line == 0 {
                table.remove(&numbers);
            }
        }
    }

    fn table(&self) -> MutexGuard<'_, HashMap<Numbers, Entry>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    /// Held by this session from now on.
    pub(crate) fn held_by(&self, session: &Arc<LockSession>) {
        let mut table = self.registry.table();
        let occupants = table.get_mut(&self.numbers).map(|entry| entry.occupants.iter_mut());
        if let Some(occupant) = occupants.into_iter().flatten().find(|occupant| occupant.id == self.id) {
            occupant.session = Some(Arc::clone(session));
        }
    }

    /// Whether nobody else here holds or tries it.
    pub(crate) fn is_alone(&self) -> bool {
        let table = self.registry.table();
        let others = table.get(&self.numbers).map(|entry| entry.occupants.iter());
        !others.into_iter().flatten().any(|other| other.id != self.id && other.counts())
    }

    /// Not held after all; the slot is for the next attempt.
    pub(crate) fn give_up(mut self) -> Option<Slot> {
        self.slot.take()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.registry.leave(self.numbers, |entry| entry.occupants.retain(|occupant| occupant.id != self.id));
    }
}

impl InLine {
    /// Resolves when it is the first in line, and stays so until the guard is dropped.
    pub(crate) async fn turn(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.line.lock().await
    }
}

impl Drop for InLine {
    fn drop(&mut self) {
        self.registry.leave(self.numbers, |entry| entry.in_line = entry.in_line.saturating_sub(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: Numbers = Numbers::One(1);

    fn take(registry: &Arc<Registry>, mode: Mode) -> Option<Place> {
        registry.take(KEY, mode, registry.slot().unwrap()).ok()
    }

    // C03: within a process too, whatever session they share.
    #[test]
    fn shared_places_go_together_and_exclusive_ones_with_nothing() {
        let registry = Arc::new(Registry::new(9));
        let shared = take(&registry, Mode::Shared).unwrap();
        assert!(shared.is_alone());
        let another = take(&registry, Mode::Shared).unwrap();
        assert!(!shared.is_alone() && take(&registry, Mode::Exclusive).is_none());
        drop((shared, another));
        let exclusive = take(&registry, Mode::Exclusive).unwrap();
        for mode in [Mode::Shared, Mode::Exclusive] {
            assert!(take(&registry, mode).is_none() && registry.is_busy(KEY, mode));
        }
        drop(exclusive);
        assert!(registry.table().is_empty(), "nothing is remembered of what is over");
    }

    #[test]
    fn the_cap_is_an_error_of_its_own_and_nothing_held_is_lost() {
        let registry = Arc::new(Registry::new(1));
        let held = take(&registry, Mode::Exclusive).unwrap();
        assert!(matches!(registry.slot(), Err(Error::LockTableFull { cap: Some(1), source: None })));
        drop(held);
        assert!(take(&registry, Mode::Exclusive).is_some());
    }
}
