//! The local clock, which only ever stops trusting.
//!
//! What is held is decided by the database's clock. A process measures with its own how long ago it was
//! told, with a clock that goes on while the machine sleeps: Linux's `CLOCK_MONOTONIC` (and so
//! `std::time::Instant`) stands still then, and a holder would wake up believing that no time has passed.

use std::time::Duration;

#[cfg(any(target_os = "linux", target_os = "android"))]
use crate::mistake::Mistake;

/// A point on the local clock. Not a date; not comparable between machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment(Duration);

impl Moment {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    pub(crate) fn now() -> Self {
        if Mistake::WallClock.is_made() {
            return Self::by_the_wall_clock();
        }
        let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
        let nanos = u32::try_from(time.tv_nsec).unwrap_or(0);
        Self(Duration::new(seconds, nanos))
    }

    /// A mistake: people set this clock.
    #[cfg(any(target_os = "linux", target_os = "android"))]
    fn by_the_wall_clock() -> Self {
        #[expect(clippy::disallowed_methods, reason = "it is the mistake")]
        let now = std::time::SystemTime::now();
        Self(now.duration_since(std::time::UNIX_EPOCH).unwrap_or_default())
    }

    /// Elsewhere: the monotonic clock, which on macOS and Windows may stand still in sleep.
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    pub(crate) fn now() -> Self {
        use std::sync::OnceLock;
        use std::time::Instant;
        static START: OnceLock<Instant> = OnceLock::new();
        #[expect(
            clippy::disallowed_methods,
            reason = "the one place that reads it, where nothing better is known"
        )]
        let now = Instant::now();
        Self(now.duration_since(*START.get_or_init(|| now)))
    }

    /// What is left until `self`; zero if it has passed.
    pub(crate) fn remaining(self) -> Duration {
        self.since(Self::now())
    }

    pub(crate) fn has_passed(self) -> bool {
        self <= Self::now()
    }

    /// From `earlier` to `self`; zero if that is the wrong way round.
    pub(crate) fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// How long ago `self` was.
    pub(crate) fn elapsed(self) -> Duration {
        Self::now().since(self)
    }

    pub(crate) fn after(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(duration))
    }

    pub(crate) fn before(self, duration: Duration) -> Self {
        Self(self.0.saturating_sub(duration))
    }

    /// For an atomic: nanoseconds since the clock's start, which last for 584 years.
    pub(crate) fn as_nanos(self) -> u64 {
        u64::try_from(self.0.as_nanos()).unwrap_or(u64::MAX)
    }

    pub(crate) fn from_nanos(nanos: u64) -> Self {
        Self(Duration::from_nanos(nanos))
    }

    /// Resolves when the moment has come; late if the machine sleeps, so look at the clock afterwards.
    pub(crate) async fn reached(self) {
        loop {
            let left = self.remaining();
            if left.is_zero() {
                return;
            }
            // A timer's clock may stand still in a suspended machine: look again now and then.
            tokio::time::sleep(left.min(Duration::from_secs(1))).await;
        }
    }
}
