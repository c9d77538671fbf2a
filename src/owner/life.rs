//! One life of an owner: from the start of its row in the database to its death, and what hangs on it.
//!
//! A life is trusted until a *local deadline*: the instant before the last successful heartbeat was sent,
//! plus the ttl, less a margin. The database counts from a later instant, so it can grant to nobody else
//! before. Three states:
//!
//! ```text
//!            beat answered              beat fails
//! confirmed ───────────────▶ confirmed ───────────▶ unknown ── beat answered ──▶ confirmed
//!                                                      │
//!                      deadline, or "dead" answered    ▼
//!                                                    lost (final; the next life has another id)
//! ```

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use uuid::Uuid;

use crate::clock::Moment;
use crate::error::{Error, LossReason};
use crate::mistake::Mistake;
use crate::name::LockName;
use crate::token::{Grant, GrantId};

/// One row of `fencepost.owners`, as its process sees it.
#[derive(Debug)]
pub(crate) struct Life {
    id: Uuid,
    /// Until when it is trusted, in nanoseconds of the local clock. Only ever raised.
    trusted_until: AtomicU64,
    /// How long before the database's end that is.
    margin: Duration,
    lost: watch::Sender<Option<LossReason>>,
    /// Changes with every answered heartbeat.
    beaten: watch::Sender<()>,
}

impl Life {
    pub(crate) fn new(id: Uuid, trusted_until: Moment, margin: Duration) -> Self {
        let trusted_until = AtomicU64::new(trusted_until.as_nanos());
        Self { id, trusted_until, margin, lost: watch::Sender::new(None), beaten: watch::Sender::new(()) }
    }

    pub(crate) fn id(&self) -> Uuid {
        self.id
    }

    pub(crate) fn trusted_until(&self) -> Moment {
        if Mistake::NoDeadline.is_made() {
            return Moment::now().after(Duration::from_hours(1));
        }
        Moment::from_nanos(self.trusted_until.load(Ordering::Acquire))
    }

    pub(crate) fn trust_until(&self, deadline: Moment) {
        self.trusted_until.fetch_max(deadline.as_nanos(), Ordering::AcqRel);
        self.beaten.send_replace(());
    }

    /// Resolves with the next heartbeat that is answered.
    pub(crate) async fn beaten(&self) {
        // An error would mean that the sender is gone, which is in `self`.
        drop(self.beaten.subscribe().changed().await);
    }

    pub(crate) fn loss(&self) -> Option<LossReason> {
        *self.lost.borrow()
    }

    /// Resolves when it has been declared lost.
    pub(crate) async fn declared_lost(&self) -> LossReason {
        told(&mut self.lost.subscribe()).await
    }

    /// Resolves when it is lost. The owner's thread declares it at the local deadline; should that thread stand
    /// still, whoever watches here does, a margin later. Either is final.
    pub(crate) async fn lost(&self) -> LossReason {
        let silent = async {
            loop {
                let end = self.trusted_until().after(self.margin);
                end.reached().await;
                if self.trusted_until().after(self.margin) == end {
                    self.lose(LossReason::Expired);
                    return self.declared_lost().await;
                }
            }
        };
        tokio::select! {
            biased;
            reason = self.declared_lost() => reason,
            reason = silent => reason,
        }
    }

    /// Final: the first reason stays.
    fn lose(&self, reason: LossReason) {
        set_once(&self.lost, reason);
    }
}

/// A grant this process holds.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) name: LockName,
    pub(crate) grant: Grant,
    pub(crate) life: Arc<Life>,
    /// The local end of `at_most`.
    pub(crate) cap: Option<Moment>,
    lost: watch::Sender<Option<LossReason>>,
}

impl Held {
    pub(crate) fn new(name: LockName, grant: Grant, life: Arc<Life>, cap: Option<Moment>) -> Self {
        Self { name, grant, life, cap, lost: watch::Sender::new(None) }
    }

    pub(crate) fn loss(&self) -> Option<LossReason> {
        let told = *self.lost.borrow();
        told.or_else(|| self.life.loss()).or_else(|| self.cap?.has_passed().then_some(LossReason::Expired))
    }

    pub(crate) fn lose(&self, reason: LossReason) {
        set_once(&self.lost, reason);
    }

    /// A check in the database that refused this grant has told us that it is lost.
    pub(crate) fn learn(&self, error: &Error) {
        match error {
            Error::StaleFence { current: Some(by), .. } => self.lose(LossReason::TakenOver { by: *by }),
            Error::StaleFence { current: None, .. } => self.lose(LossReason::Released),
            Error::Lost { reason, .. } => self.lose(*reason),
            _ => {}
        }
    }

    /// By the clock, whoever has or has not noticed yet that the deadline has passed.
    pub(crate) fn is_held(&self) -> bool {
        self.loss().is_none() && !self.trusted_until().has_passed()
    }

    /// Until when it may be relied on, if nothing is heard.
    pub(crate) fn trusted_until(&self) -> Moment {
        let life = self.life.trusted_until();
        self.cap.map_or(life, |cap| cap.min(life))
    }

    /// Resolves when it is lost.
    pub(crate) async fn lost(&self) -> LossReason {
        let mut own = self.lost.subscribe();
        let cap = async {
            match self.cap {
                Some(cap) => cap.reached().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            reason = told(&mut own) => reason,
            reason = self.life.lost() => reason,
            () = cap => LossReason::Expired,
        }
    }
}

fn set_once(lost: &watch::Sender<Option<LossReason>>, reason: LossReason) {
    lost.send_if_modified(|told| {
        let first = told.is_none();
        told.get_or_insert(reason);
        first
    });
}

/// The reason, once it is set. A sender that is gone without one was stopped.
async fn told(lost: &mut watch::Receiver<Option<LossReason>>) -> LossReason {
    match lost.wait_for(Option::is_some).await {
        Ok(reason) => reason.unwrap_or(LossReason::Stopped),
        Err(_sender_gone) => LossReason::Stopped,
    }
}

/// What this process knows of the grants of its lives. Every grant id is here *before* it is sent, so a
/// grant that the database lists and this table does not is one that nobody here will ever release.
#[derive(Debug, Default)]
pub(crate) struct Grants {
    known: Mutex<HashMap<GrantId, Known>>,
}

#[derive(Debug)]
enum Known {
    /// An acquire or a release of it is on its way: its own task answers for it.
    Busy,
    /// Held since then.
    Held(Arc<Held>, Moment),
}

impl Grants {
    /// A fresh id, known from now on.
    pub(crate) fn announce(&self) -> GrantId {
        let id = GrantId::fresh();
        self.known().insert(id, Known::Busy);
        id
    }

    pub(crate) fn hold(&self, held: &Arc<Held>) {
        self.known().insert(held.grant.id, Known::Held(Arc::clone(held), Moment::now()));
    }

    /// Its release begins.
    pub(crate) fn releasing(&self, id: GrantId) {
        self.known().insert(id, Known::Busy);
    }

    /// Nothing is held under it, or reconcile shall see to it.
    pub(crate) fn forget(&self, id: GrantId) {
        self.known().remove(&id);
    }

    pub(crate) fn is_known(&self, id: GrantId) -> bool {
        self.known().contains_key(&id)
    }

    /// Those of `life` held since before `moment`.
    pub(crate) fn held_before(&self, life: &Life, moment: Moment) -> Vec<Arc<Held>> {
        self.known()
            .values()
            .filter_map(|known| match known {
                Known::Held(held, since) if *since < moment && held.life.id == life.id => {
                    Some(Arc::clone(held))
                }
                _ => None,
            })
            .collect()
    }

    fn known(&self) -> MutexGuard<'_, HashMap<GrantId, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the owner is in the middle of.
#[derive(Clone, Debug)]
pub(crate) enum Stage {
    /// Between two lives: the last one was lost for this reason, the next one has not begun.
    Starting(LossReason),
    Alive(Arc<Life>),
    /// For ever; `told`: the database knows.
    Stopped {
        told: bool,
    },
}

/// Enters the next stage; a life that ends with it is lost for `reason`.
pub(crate) fn enter(stage: &watch::Sender<Stage>, next: Stage, reason: LossReason) {
    let before = stage.send_replace(next);
    if let Stage::Alive(life) = before {
        life.lose(reason);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Whoever watches may find the deadline passed before the owner's thread does, which may have an answer in
    // hand that would have prolonged it: lost it is, all the same.
    #[tokio::test]
    async fn a_life_that_was_seen_lost_stays_lost() {
        let now = Moment::now();
        let life = Life::new(Uuid::nil(), now, Duration::from_millis(1));
        assert_eq!(life.lost().await, LossReason::Expired);
        life.trust_until(now.after(Duration::from_mins(1)));
        life.lose(LossReason::Unreachable);
        assert_eq!((life.loss(), life.lost().await), (Some(LossReason::Expired), LossReason::Expired));
    }

    // C15: held means confirmed recently enough, not that nobody has said otherwise.
    #[test]
    fn past_its_deadline_nothing_is_held_though_nobody_has_declared_it_lost() {
        let now = Moment::now();
        let held = |trusted_until, cap| {
            let life = Arc::new(Life::new(Uuid::nil(), trusted_until, Duration::ZERO));
            let grant = Grant::new(crate::token::FencingToken::new(1).unwrap(), GrantId::fresh());
            Held::new(LockName::new("report").unwrap(), grant, life, cap)
        };
        let later = now.after(Duration::from_mins(1));
        assert!(held(later, None).is_held() && held(later, Some(later)).is_held());
        let over = held(now, None);
        assert!(!over.is_held() && over.loss().is_none());
        assert!(!held(later, Some(now)).is_held());
        let declared = held(later, None);
        declared.lose(LossReason::Released);
        assert!(!declared.is_held());
    }

    #[test]
    fn trust_is_only_ever_prolonged() {
        let now = Moment::now();
        let life = Life::new(Uuid::nil(), now.after(Duration::from_secs(2)), Duration::ZERO);
        life.trust_until(now.after(Duration::from_secs(1)));
        assert_eq!(life.trusted_until(), now.after(Duration::from_secs(2)));
    }
}
