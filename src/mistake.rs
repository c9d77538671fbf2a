//! Mistakes that the client makes on purpose, one a process, for a fault suite that has to notice them.
//!
//! Only with the feature `test-util`, and only where the environment asks for one.

/// Each has been made by somebody, in production.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mistake {
    /// What is held is held until somebody says otherwise.
    NoDeadline,
    /// Trust is counted from the answer to a heartbeat, not from its sending.
    CountsFromAnswer,
    /// Whoever notifies a hand-over is believed.
    BelievesNotifications,
    /// What the database holds for this process is never compared with what the process knows.
    NoReconcile,
    /// Durations are measured with the clock that people set.
    WallClock,
}

#[cfg(all(feature = "test-util", unix))]
impl Mistake {
    /// The environment's variable, with a mistake's name in it.
    pub(crate) const VARIABLE: &str = "FENCEPOST_MISTAKE";

    pub(crate) fn is_made(self) -> bool {
        use std::sync::OnceLock;
        static MADE: OnceLock<Option<Mistake>> = OnceLock::new();
        let made = MADE.get_or_init(|| match std::env::var(Self::VARIABLE).ok()?.as_str() {
            "no-deadline" => Some(Self::NoDeadline),
            "counts-from-answer" => Some(Self::CountsFromAnswer),
            "believes-notifications" => Some(Self::BelievesNotifications),
            "no-reconcile" => Some(Self::NoReconcile),
            "wall-clock" => Some(Self::WallClock),
            _ => None,
        });
        *made == Some(self)
    }
}

#[cfg(not(all(feature = "test-util", unix)))]
impl Mistake {
    #[expect(clippy::unused_self, reason = "here nobody makes one")]
    pub(crate) const fn is_made(self) -> bool {
        false
    }
}
