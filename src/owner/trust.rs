//! How long this process believes that something of its in the database is still there: an owner's life, a lock
//! session.
//!
//! It is trusted until a *local deadline*: the instant before the last question that was answered was sent, plus
//! the time for which the database keeps it then, less a margin. The database counts from a later instant, so it
//! can grant to nobody else before. Three states:
//!
//! ```text
//!            beat answered              beat fails
//! confirmed ───────────────▶ confirmed ───────────▶ unknown ── beat answered ──▶ confirmed
//!                                                      │
//!                      deadline, or "dead" answered    ▼
//!                                                    lost (final; what comes next is another one)
//! ```

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::watch;

use crate::clock::Moment;
use crate::error::LossReason;
use crate::mistake::Mistake;

#[derive(Debug)]
pub(crate) struct Trust {
    /// Until when, in nanoseconds of the local clock. Only ever raised.
    until: AtomicU64,
    /// How long before the database's end that is.
    margin: Duration,
    lost: watch::Sender<Option<LossReason>>,
    /// Changes with every answer.
    beaten: watch::Sender<()>,
}

impl Trust {
    pub(crate) fn until(deadline: Moment, margin: Duration) -> Self {
        let until = AtomicU64::new(deadline.as_nanos());
        Self { until, margin, lost: watch::Sender::new(None), beaten: watch::Sender::new(()) }
    }

    pub(crate) fn trusted_until(&self) -> Moment {
        if Mistake::NoDeadline.is_made() {
            return Moment::now().after(Duration::from_hours(1));
        }
        Moment::from_nanos(self.until.load(Ordering::Acquire))
    }

    pub(crate) fn trust_until(&self, deadline: Moment) {
        self.until.fetch_max(deadline.as_nanos(), Ordering::AcqRel);
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

    /// By the clock, whoever has or has not noticed yet that the deadline has passed.
    pub(crate) fn is_trusted(&self) -> bool {
        self.loss().is_none() && !self.trusted_until().has_passed()
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
    pub(crate) fn lose(&self, reason: LossReason) {
        set_once(&self.lost, reason);
    }
}

pub(super) fn set_once(lost: &watch::Sender<Option<LossReason>>, reason: LossReason) {
    lost.send_if_modified(|told| {
        let first = told.is_none();
        told.get_or_insert(reason);
        first
    });
}

/// The reason, once it is set. A sender that is gone without one was stopped.
pub(super) async fn told(lost: &mut watch::Receiver<Option<LossReason>>) -> LossReason {
    match lost.wait_for(Option::is_some).await {
        Ok(reason) => reason.unwrap_or(LossReason::Stopped),
        Err(_sender_gone) => LossReason::Stopped,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Whoever watches may find the deadline passed before the owner's thread does, which may have an answer in
    // hand that would have prolonged it: lost it is, all the same.
    #[tokio::test]
    async fn what_was_seen_lost_stays_lost() {
        let now = Moment::now();
        let trust = Trust::until(now, Duration::from_millis(1));
        assert_eq!(trust.lost().await, LossReason::Expired);
        trust.trust_until(now.after(Duration::from_mins(1)));
        trust.lose(LossReason::Unreachable);
        assert_eq!((trust.loss(), trust.lost().await), (Some(LossReason::Expired), LossReason::Expired));
        assert!(!trust.is_trusted());
    }

    #[test]
    fn trust_is_only_ever_prolonged() {
        let now = Moment::now();
        let trust = Trust::until(now.after(Duration::from_secs(2)), Duration::ZERO);
        trust.trust_until(now.after(Duration::from_secs(1)));
        assert_eq!(trust.trusted_until(), now.after(Duration::from_secs(2)));
    }
}
