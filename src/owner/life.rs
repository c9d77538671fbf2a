//! One life of an owner: from the start of its row in the database to its death, and what hangs on it.
//!
//! How long it is trusted: see `trust`.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use uuid::Uuid;

use super::trust::{Trust, set_once, told};
use crate::clock::Moment;
use crate::error::{Error, LossReason};
use crate::name::LockName;
use crate::token::{Grant, GrantId};

/// One row of `fencepost.owners`, as its process sees it.
#[derive(Debug)]
pub(crate) struct Life {
    id: Uuid,
    trust: Trust,
}

impl Life {
    pub(crate) fn new(id: Uuid, trusted_until: Moment, margin: Duration) -> Self {
        Self { id, trust: Trust::until(trusted_until, margin) }
    }

    pub(crate) fn id(&self) -> Uuid {
        self.id
    }
}

impl Deref for Life {
    type Target = Trust;

    fn deref(&self) -> &Trust {
        &self.trust
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
}
