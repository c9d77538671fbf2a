//! How long to wait: for a lease, and before trying again.

use std::time::Duration;

use uuid::Uuid;

/// How long an acquire may wait for its turn.
///
/// It bounds the waiting only: neither how long the lease is held (see [`Lease::at_most`](crate::Lease::at_most))
/// nor the release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait(Option<Duration>);

impl Wait {
    /// Not at all: acquired at once or timed out.
    #[must_use]
    pub fn no() -> Self {
        Self(Some(Duration::ZERO))
    }

    /// At most this long. Zero is [`no`](Self::no).
    #[must_use]
    pub fn at_most(most: Duration) -> Self {
        Self(Some(most))
    }

    /// As long as it takes.
    #[must_use]
    pub fn forever() -> Self {
        Self(None)
    }

    /// The time, if there is a bound.
    pub(crate) fn bound(self) -> Option<Duration> {
        self.0
    }
}

/// A part of the full time between a half and all of it, at random: processes that failed or fell asleep
/// together do not come back together.
pub(crate) fn jittered(full: Duration) -> Duration {
    // The random bytes at hand: those of a fresh uuid.
    let [byte, ..] = Uuid::new_v4().into_bytes();
    full.saturating_sub(full.mul_f64(f64::from(byte) / 512.0))
}

/// Pauses that double from `first` up to `most`, each [`jittered`].
#[derive(Debug)]
pub(crate) struct Backoff {
    first: Duration,
    most: Duration,
    next: Duration,
}

impl Backoff {
    pub(crate) fn new(first: Duration, most: Duration) -> Self {
        Self { first, most, next: first }
    }

    pub(crate) fn pause(&mut self) -> Duration {
        let full = self.next.min(self.most);
        self.next = self.next.saturating_mul(2).min(self.most);
        jittered(full)
    }

    pub(crate) fn reset(&mut self) {
        self.next = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_most_and_are_cut_by_half_at_the_utmost() {
        let ms = Duration::from_millis;
        let mut backoff = Backoff::new(ms(10), ms(35));
        for full in [10, 20, 35, 35] {
            let pause = backoff.pause();
            assert!(ms(full) / 2 <= pause && pause <= ms(full), "{pause:?} of {full} ms");
        }
        backoff.reset();
        assert!(backoff.pause() <= ms(10));
    }
}
