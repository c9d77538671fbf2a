//! When slots are due: arithmetic, without a clock and without a database.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};

use super::Missed;
use crate::error::{Error, Result};
#[cfg(feature = "cron")]
use crate::schedule::cron::Cron;

/// The most slots of one look.
const MOST: usize = 1_000;

/// Where a schedule's slots are. The same for everybody, whenever it is asked.
#[derive(Clone, Debug)]
pub(super) enum Rule {
    /// At `offset`, and a whole number of periods from there, in microseconds since 1970.
    Every { period: i64, offset: i64 },
    /// At these moments, in their order.
    At(Vec<DateTime<Utc>>),
    #[cfg(feature = "cron")]
    Cron(Box<Cron>),
}

/// What the database knows of a schedule.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look {
    /// Its clock.
    pub(super) now: DateTime<Utc>,
    /// When the schedule was first looked at.
    pub(super) since: DateTime<Utc>,
    /// The last slot up to which nothing is to be done any more.
    pub(super) settled: Option<DateTime<Utc>>,
}

impl Rule {
    /// The first slot after this moment.
    pub(super) fn next_after(&self, moment: DateTime<Utc>) -> Option<DateTime<Utc>> {
        match self {
            Self::Every { period, .. } => {
                let last = self.last_until(moment)?.timestamp_micros();
                DateTime::from_timestamp_micros(last.checked_add(*period)?)
            }
            Self::At(slots) => slots.get(slots.partition_point(|slot| *slot <= moment)).copied(),
            #[cfg(feature = "cron")]
            Self::Cron(cron) => cron.next_after(moment),
        }
    }

    /// The last slot that is due at this moment.
    pub(super) fn last_until(&self, moment: DateTime<Utc>) -> Option<DateTime<Utc>> {
        match self {
            Self::Every { period, offset } => {
                let since = moment.timestamp_micros().checked_sub(*offset)?.checked_rem_euclid(*period)?;
                DateTime::from_timestamp_micros(moment.timestamp_micros().checked_sub(since)?)
            }
            Self::At(slots) => {
                let later = slots.partition_point(|slot| *slot <= moment);
                slots.get(later.checked_sub(1)?).copied()
            }
            #[cfg(feature = "cron")]
            Self::Cron(cron) => cron.last_until(moment),
        }
    }

    /// The slots to be run, the earliest first: due by the database's clock, not settled, and not missed for good.
    pub(super) fn due(&self, look: Look, missed: Missed) -> Vec<DateTime<Utc>> {
        let closed = self.closed(look, missed);
        match missed {
            Missed::Skip | Missed::Last(_) => {
                self.last_until(look.now).filter(|slot| *slot > closed).into_iter().collect()
            }
            Missed::All(_) => std::iter::successors(self.next_after(closed), |slot| self.next_after(*slot))
                .take_while(|slot| *slot <= look.now)
                .take(MOST)
                .collect(),
        }
    }

    /// Slots until here are settled, missed for good, or of a time before the schedule.
    pub(super) fn closed(&self, look: Look, missed: Missed) -> DateTime<Utc> {
        let horizon =
            TimeDelta::from_std(missed.horizon()).ok().and_then(|back| look.now.checked_sub_signed(back));
        // Slots that are listed one by one are meant, whenever the list was first seen.
        let since = if matches!(self, Self::At(_)) { None } else { Some(look.since) };
        [horizon, since, look.settled].into_iter().flatten().max().unwrap_or(DateTime::<Utc>::MIN_UTC)
    }
}

/// For Postgres, which counts in microseconds.
pub(super) fn micros(duration: Duration, least: Duration, most: Duration, what: &str) -> Result<i64> {
    if duration < least || duration > most || !duration.subsec_nanos().is_multiple_of(1_000) {
        return Err(Error::misuse(format!(
            "{what} is {least:?} to {most:?} in whole microseconds, not {duration:?}"
        )));
    }
    Ok(crate::sql::micros(duration))
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, HashSet};

    use proptest::prelude::*;

    use super::*;

    fn at(micros: i64) -> DateTime<Utc> {
        DateTime::from_timestamp_micros(micros).unwrap()
    }

    const HOUR: i64 = 3_600_000_000;
    const NIGHTLY: Rule = Rule::Every { period: 24 * HOUR, offset: 2 * HOUR };
    const DAY: Duration = Duration::from_hours(24);

    #[test]
    fn the_next_slot_is_computed_from_the_slot() {
        let slot = NIGHTLY.next_after(at(0)).unwrap();
        assert_eq!(slot, at(2 * HOUR));
        assert_eq!(NIGHTLY.next_after(slot), Some(at(26 * HOUR)));
        assert_eq!(NIGHTLY.last_until(slot), Some(slot), "due at its own moment");
        assert_eq!(
            NIGHTLY.last_until(at(2 * HOUR - 1)),
            Some(at(-22 * HOUR)),
            "and not a microsecond before"
        );
        let listed = Rule::At(vec![at(5), at(9)]);
        assert_eq!(
            (listed.next_after(at(4)), listed.next_after(at(5)), listed.next_after(at(9))),
            (Some(at(5)), Some(at(9)), None)
        );
        assert_eq!(
            (listed.last_until(at(4)), listed.last_until(at(5)), listed.last_until(at(99))),
            (None, Some(at(5)), Some(at(9)))
        );
    }

    #[test]
    fn missed_slots_are_run_by_policy() {
        let due = |now: i64, settled: Option<i64>, missed| {
            let look = Look { now: at(now), since: at(0), settled: settled.map(at) };
            NIGHTLY
                .due(look, missed)
                .into_iter()
                .map(|slot| slot.timestamp_micros() / HOUR)
                .collect::<Vec<_>>()
        };
        let late = 98 * HOUR + 5_000_000;
        assert_eq!(due(late, None, Missed::Last(DAY)), [98]);
        assert_eq!(due(late, None, Missed::All(Duration::from_hours(96))), [26, 50, 74, 98]);
        assert_eq!(due(late, None, Missed::All(Duration::from_hours(50))), [50, 74, 98]);
        assert_eq!(due(late, Some(74 * HOUR), Missed::All(Duration::from_hours(96))), [98]);
        assert_eq!(due(late, None, Missed::Skip), [98]);
        assert_eq!(due(late + HOUR, None, Missed::Skip), [0; 0]);
        assert_eq!(due(late + HOUR, None, Missed::Last(Duration::from_hours(2))), [98]);
        assert_eq!(due(late + 3 * HOUR, None, Missed::Last(Duration::from_hours(2))), [0; 0]);
        assert_eq!(due(late, Some(98 * HOUR), Missed::Last(DAY)), [0; 0]);
        // What was due before the schedule was known is nobody's; a list is meant as it stands.
        assert_eq!(due(HOUR, None, Missed::Last(DAY)), [0; 0]);
        let look = Look { now: at(HOUR), since: at(HOUR), settled: None };
        assert_eq!(Rule::At(vec![at(5), at(9)]).due(look, Missed::All(DAY)), [at(5), at(9)]);
        assert_eq!(Rule::At(vec![at(5), at(9)]).due(look, Missed::Last(DAY)), [at(9)]);
    }

    /// A fleet on a database of arithmetic: hosts whose timers fire early or late. How often each slot was run.
    fn fleet(
        rule: &Rule,
        missed: Missed,
        looks: &[i64],
        mut slot_of: impl FnMut(&Rule, DateTime<Utc>) -> Vec<DateTime<Utc>>,
        settles: bool,
    ) -> BTreeMap<i64, u32> {
        let (mut claims, mut ran, mut settled) = (HashSet::new(), BTreeMap::new(), None);
        for now in looks {
            let look = Look { now: at(*now), since: at(0), settled };
            let slots = if settles { rule.due(look, missed) } else { slot_of(rule, at(*now)) };
            for slot in slots {
                if claims.insert(slot) {
                    *ran.entry(slot.timestamp_micros()).or_insert(0) += 1;
                }
                if settles {
                    settled = settled.max(Some(slot));
                    // Somebody prunes at once: the mark is what remains.
                    claims.clear();
                }
            }
        }
        ran
    }

    /// Moments at which a timer that is set for every second fires: each up to 5 ms early or late, in some order of
    /// hosts.
    fn timers() -> impl Strategy<Value = Vec<i64>> {
        prop::collection::vec((-5_000..5_000_i64, 1..4_usize), 3..40).prop_map(|fires| {
            let mut looks: Vec<i64> = (1..)
                .zip(fires)
                .flat_map(|(second, (error, hosts))| vec![second * 1_000_000 + error; hosts])
                .collect();
            looks.sort_unstable();
            looks
        })
    }

    proptest! {
        #[test]
        fn slots_are_the_same_seen_from_everywhere(
            period in 1_000_000..400 * 24 * HOUR, offset in 0..400 * 24 * HOUR, moment in -4_000_000 * HOUR..4_000_000 * HOUR,
        ) {
            let rule = Rule::Every { period, offset: offset % period };
            let (last, next) = (rule.last_until(at(moment)).unwrap(), rule.next_after(at(moment)).unwrap());
            prop_assert!(last <= at(moment) && at(moment) < next);
            prop_assert_eq!(next - last, TimeDelta::microseconds(period));
            prop_assert_eq!(rule.last_until(next), Some(next));
            prop_assert_eq!(rule.next_after(last), Some(next));
            prop_assert_eq!(rule.last_until(next - TimeDelta::microseconds(1)), Some(last));
        }

        // C34. I7: whenever timers fire and whoever looks, each slot that was due at a look is run once, and none before
        // it is due.
        #[test]
        fn early_and_late_timers_run_each_slot_once(looks in timers(), all in any::<bool>()) {
            let every_second = Rule::Every { period: 1_000_000, offset: 0 };
            let missed = if all { Missed::All(DAY) } else { Missed::Last(DAY) };
            let ran = fleet(&every_second, missed, &looks, |_, _| Vec::new(), true);
            prop_assert!(ran.values().all(|times| *times == 1));
            let last = looks.last().unwrap() / 1_000_000;
            prop_assert!(ran.keys().all(|slot| slot % 1_000_000 == 0 && *slot <= last * 1_000_000));
            if all {
                prop_assert_eq!(ran.len(), usize::try_from(last).unwrap(), "none is left out");
            }
        }
    }

    // C34: the same fleet with slots taken from now, as two projects had it: some are skipped, or run twice.
    #[test]
    fn slots_taken_from_now_fail_under_the_same_timers() {
        let every_second = Rule::Every { period: 1_000_000, offset: 0 };
        // A millisecond early, a millisecond late, on time.
        let looks = [999_000, 2_001_000, 3_000_000, 3_999_000, 4_000_500];
        let truncated =
            |_: &Rule, now: DateTime<Utc>| vec![at(now.timestamp_micros() / 1_000_000 * 1_000_000)];
        let ran = fleet(&every_second, Missed::Last(DAY), &looks, truncated, false);
        assert!(
            ran.contains_key(&0) && !ran.contains_key(&1_000_000),
            "the early timer ran the slot before: {ran:?}"
        );
        let now_itself = |_: &Rule, now: DateTime<Utc>| vec![now];
        let ran = fleet(&every_second, Missed::Last(DAY), &looks, now_itself, false);
        assert_eq!(
            ran.keys().filter(|at| (3_900_000..4_100_000).contains(*at)).count(),
            2,
            "one slot, run twice"
        );
        let ran = fleet(&every_second, Missed::All(DAY), &looks, |_, _| Vec::new(), true);
        assert_eq!(
            ran.into_iter().collect::<Vec<_>>(),
            [(1_000_000, 1), (2_000_000, 1), (3_000_000, 1), (4_000_000, 1)]
        );
    }
}
