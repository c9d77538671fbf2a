//! How long to wait before trying again.

use std::time::Duration;

use uuid::Uuid;

/// Pauses that double from `first` up to `most`, each shortened at random by up to half, so that processes
/// which failed together do not come back together.
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
        // The random bytes at hand: those of a fresh uuid.
        let [byte, ..] = Uuid::new_v4().into_bytes();
        full.saturating_sub(full.mul_f64(f64::from(byte) / 512.0))
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
