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
    /// A member gives up a partition whenever another one has fewer.
    LargerThanMine,
    /// A partition that is released at the end of its drain is believed in.
    KeepsRevoked,
    /// Durations are measured with the clock that people set.
    WallClock,
    /// A wait is for the session's lock itself, and its time-out is taken for a no.
    BelievesTimeouts,
    /// Whether tasks of one process exclude each other is left to the server.
    Reentrant,
    /// Whoever releases a lock gives its session back as it is.
    KeepsLocks,
    /// What a session holds is believed in, and nobody asks whether it is there.
    NeverProbes,
    /// A slot is the moment at which somebody found it due.
    SlotsFromNow,
    /// What is due says the clock of whoever looks.
    DueByOwnClock,
    /// One at a time is whoever has had the lease once.
    AsksForTheLeaseOnce,
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
            "larger-than-mine" => Some(Self::LargerThanMine),
            "keeps-revoked" => Some(Self::KeepsRevoked),
            "wall-clock" => Some(Self::WallClock),
            "believes-timeouts" => Some(Self::BelievesTimeouts),
            "reentrant" => Some(Self::Reentrant),
            "keeps-locks" => Some(Self::KeepsLocks),
            "never-probes" => Some(Self::NeverProbes),
            "slots-from-now" => Some(Self::SlotsFromNow),
            "due-by-own-clock" => Some(Self::DueByOwnClock),
            "asks-for-the-lease-once" => Some(Self::AsksForTheLeaseOnce),
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
