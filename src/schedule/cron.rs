//! Slots by a cron pattern in a time zone (feature `cron`).

use std::fmt;

use chrono::{DateTime, Utc};
use chrono_tz::Tz;
use croner::parser::{CronParser, Seconds, Year};

use crate::error::{Error, Result};

#[derive(Clone)]
pub(super) struct Cron {
    pattern: croner::Cron,
    zone: Tz,
}

impl Cron {
    pub(super) fn new(pattern: &str, zone: Tz) -> Result<Self> {
        let parser = CronParser::builder().seconds(Seconds::Disallowed).year(Year::Disallowed).build();
        let parsed = parser.parse(pattern).map_err(|error| {
            Error::misuse(format!("{pattern:?} is no cron pattern of five fields: {error}"))
        })?;
        let cron = Self { pattern: parsed, zone };
        // The thirtieth of February.
        if cron.next_after(DateTime::UNIX_EPOCH).is_none() {
            return Err(Error::misuse(format!("{pattern:?} never comes")));
        }
        Ok(cron)
    }

    pub(super) fn next_after(&self, moment: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let next = self.pattern.find_next_occurrence(&moment.with_timezone(&self.zone), false);
        next.ok().map(|slot| slot.with_timezone(&Utc))
    }

    pub(super) fn last_until(&self, moment: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let last = self.pattern.find_previous_occurrence(&moment.with_timezone(&self.zone), true);
        last.ok().map(|slot| slot.with_timezone(&Utc))
    }
}

impl fmt::Debug for Cron {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.pattern.as_str(), self.zone)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use chrono::TimeDelta;
    use proptest::prelude::*;

    use super::*;
    use crate::schedule::Missed;
    use crate::schedule::rule::{Look, Rule};

    const BERLIN: Tz = chrono_tz::Europe::Berlin;

    fn utc(text: &str) -> DateTime<Utc> {
        text.parse().unwrap()
    }

    /// The slots of these days, as their UTC times.
    fn slots(pattern: &str, from: &str, to: &str) -> Vec<String> {
        let rule = Rule::Cron(Box::new(Cron::new(pattern, BERLIN).unwrap()));
        let look = Look { now: utc(to), since: utc(from), settled: None };
        let slots = rule.due(look, Missed::All(Duration::from_hours(31 * 24)));
        slots.iter().map(|slot| slot.format("%d %H:%M").to_string()).collect()
    }

    // I7. In Berlin 02:00 to 03:00 does not exist on 29 March 2026 (01:00 UTC).
    #[test]
    fn a_local_time_that_does_not_exist_comes_when_the_gap_is_over() {
        let days = |pattern| slots(pattern, "2026-03-28T00:00:00Z", "2026-03-30T12:00:00Z");
        assert_eq!(days("30 2 * * *"), ["28 01:30", "29 01:00", "30 00:30"]);
        assert_eq!(days("0 3 * * *"), ["28 02:00", "29 01:00", "30 01:00"]);
        // Several a day: what falls into the gap is left out.
        assert_eq!(
            days("30 1,2,3 * * *"),
            ["28 00:30", "28 01:30", "28 02:30", "29 00:30", "29 01:30", "29 23:30", "30 00:30", "30 01:30"]
        );
    }

    // … and exists twice on 25 October 2026 (00:00 and 01:00 UTC).
    #[test]
    fn a_local_time_that_exists_twice_comes_the_first_time() {
        let days = |pattern| slots(pattern, "2026-10-24T00:00:00Z", "2026-10-26T12:00:00Z");
        assert_eq!(days("30 2 * * *"), ["24 00:30", "25 00:30", "26 01:30"]);
        // Several a day: both times, as two slots.
        assert_eq!(
            days("30 2,3 * * *"),
            ["24 00:30", "24 01:30", "25 00:30", "25 01:30", "25 02:30", "26 01:30", "26 02:30"]
        );
        assert_eq!(
            slots("0 * * * *", "2026-10-24T22:00:00Z", "2026-10-25T23:00:00Z").len(),
            25,
            "a day of 25 hours"
        );
        assert_eq!(
            slots("0 * * * *", "2026-03-28T23:00:00Z", "2026-03-29T22:00:00Z").len(),
            23,
            "a day of 23 hours"
        );
    }

    // Everybody who looks, at whatever moment and after whatever restart, sees the same slots.
    #[test]
    fn the_slots_of_a_changing_day_are_the_same_from_every_moment() {
        for (from, to) in [
            ("2026-03-28T12:00:00Z", "2026-03-30T00:00:00Z"),
            ("2026-10-24T12:00:00Z", "2026-10-26T00:00:00Z"),
        ] {
            for pattern in ["30 2 * * *", "*/20 * * * *", "30 2,3 * * *", "*/20 2 * * *", "15 2 * * SUN"] {
                let cron = Cron::new(pattern, BERLIN).unwrap();
                let (from, to) = (utc(from), utc(to));
                let walk: Vec<_> =
                    std::iter::successors(cron.next_after(from), |slot| cron.next_after(*slot))
                        .take_while(|slot| *slot <= to + TimeDelta::days(8))
                        .collect();
                let mut moment = from;
                while moment < to {
                    assert_eq!(
                        cron.next_after(moment),
                        walk.iter().find(|slot| **slot > moment).copied(),
                        "{pattern} {moment}"
                    );
                    if let Some(last) = walk.iter().rfind(|slot| **slot <= moment) {
                        assert_eq!(cron.last_until(moment), Some(*last), "{pattern} {moment}");
                    }
                    moment += TimeDelta::seconds(47);
                }
            }
        }
    }

    #[test]
    fn what_is_no_pattern_or_never_comes_is_a_misuse() {
        for bad in
            ["", "* * * *", "* * * * * *", "60 * * * *", "@reboot", "0 0 30 2 *", "nightly", "* * * * 9"]
        {
            assert!(matches!(Cron::new(bad, BERLIN), Err(Error::Misuse { .. })), "{bad:?}");
        }
        assert!(Cron::new("@daily", BERLIN).is_ok());
    }

    proptest! {
        #[test]
        fn nothing_makes_it_panic(pattern in "[-0-9*/,@a-zA-Z# ]{0,24}", moment in -4_000_000_000_i64..40_000_000_000) {
            if let (Ok(cron), Some(moment)) = (Cron::new(&pattern, BERLIN), DateTime::from_timestamp(moment, 0)) {
                let (last, next) = (cron.last_until(moment), cron.next_after(moment));
                prop_assert!(last.is_none_or(|last| last <= moment) && next.is_none_or(|next| next > moment));
            }
        }
    }
}
