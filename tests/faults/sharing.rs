//! I9: when nothing happens any more, the partitions are shared out evenly, and nothing moves.
//!
//! (That a partition has one writer is I2, of its lease.)

use std::collections::BTreeMap;
use std::time::Duration;

use sqlx::{PgPool, Row as _};
use tokio::time::{sleep, timeout};

use crate::checker::Report;
use crate::history::now;
use crate::worker::sharing::{GROUP, PARTITIONS};

/// How long nothing may move: many rounds of every member. A wait for nothing has no event to wait for.
const QUIET: Duration = Duration::from_millis(1_500);

/// How the database had it at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Look {
    /// The living members, with how many partitions each has. One that has left and joined again is another one.
    pub(crate) members: BTreeMap<String, u32>,
    /// Of each partition that a living member has, the token.
    pub(crate) tokens: BTreeMap<String, i64>,
}

impl Look {
    fn is_even(&self) -> bool {
        let held = self.members.values();
        self.tokens.len() == usize::try_from(PARTITIONS).unwrap()
            && held.clone().max().zip(held.min()).is_some_and(|(most, least)| most - least <= 1)
    }
}

/// How it ended.
#[derive(Clone, Debug)]
pub(crate) struct Shared {
    /// How long after the last fault it was even.
    pub(crate) even: Option<Duration>,
    /// The first and the last look of a quiet time, in which no member came or went: the first one in which nothing moved,
    /// or the second one (when the first began, something may have been draining). None: they never stopped.
    pub(crate) quiet: Option<(Look, Look)>,
    /// The last look, for the report of what is broken.
    pub(crate) last: Option<Look>,
}

impl Shared {
    pub(crate) fn judge(&self, report: &mut Report) {
        report.judged("I9");
        if self.even.is_none() {
            return report.break_rule("I9", format!("not shared out evenly: {:?}", self.last));
        }
        report.judged("I9");
        match &self.quiet {
            None => report.break_rule("I9", format!("it does not come to rest: {:?}", self.last)),
            Some((first, last)) if first != last => {
                report.break_rule("I9", format!("it moves though it is even: {first:?}, then {last:?}"));
            }
            Some(_) => {}
        }
    }
}

/// Looks until it is even, and again after a quiet time, until nothing has moved.
pub(crate) async fn watch(pool: &PgPool, patience: Duration) -> Shared {
    let began = now();
    let (mut even, mut last) = (None, None);
    let looking = async {
        let mut moved = 0;
        loop {
            let first = look(pool).await;
            if first.is_even() {
                even.get_or_insert(Duration::from_nanos(now() - began));
                sleep(QUIET).await;
                let later = look(pool).await;
                if later.members.keys().eq(first.members.keys()) {
                    if later == first || moved == 1 {
                        return (first, later);
                    }
                    moved += 1;
                }
            }
            last = Some(first);
            sleep(Duration::from_millis(5)).await;
        }
    };
    let quiet = timeout(patience, looking).await.ok();
    Shared { even, quiet, last }
}

async fn look(pool: &PgPool) -> Look {
    const LOOK: &str = "\
        SELECT m.owner || '/' || m.joined AS owner, coalesce(l.names, '{}') AS names, coalesce(l.tokens, '{}') AS tokens \
          FROM fencepost.members m JOIN fencepost.owners o ON o.id = m.owner AND o.expires_at > clock_timestamp() \
          LEFT JOIN LATERAL (SELECT array_agg(l.name) AS names, array_agg(l.token) AS tokens FROM fencepost.leases l \
                              WHERE l.owner = m.owner AND l.released_at IS NULL AND l.name LIKE $1 || E'\\t%') l ON true \
         WHERE m.group_name = $1";
    let (mut members, mut tokens) = (BTreeMap::new(), BTreeMap::new());
    for row in sqlx::query(LOOK).bind(GROUP).fetch_all(pool).await.unwrap() {
        let names: Vec<String> = row.get("names");
        members.insert(row.get("owner"), u32::try_from(names.len()).unwrap());
        tokens.extend(names.into_iter().zip(row.get::<Vec<i64>, _>("tokens")));
    }
    Look { members, tokens }
}

mod tests {
    use super::*;

    fn look_of(held: &[u32], tokens: i64) -> Look {
        let members = (0..).map(|n: u32| n.to_string()).zip(held.iter().copied()).collect();
        let all = held.iter().sum::<u32>();
        Look { members, tokens: (0..all).map(|n| (n.to_string(), tokens + i64::from(n))).collect() }
    }

    fn broken(first: Option<Look>, last: Option<Look>) -> usize {
        let even = first.as_ref().map(|_| Duration::ZERO);
        let shared = Shared { even, quiet: first.zip(last), last: None };
        let mut report = Report::default();
        shared.judge(&mut report);
        report.broken("I9").len()
    }

    #[test]
    fn even_and_still_breaks_nothing() {
        let even = look_of(&[3, 2, 2], 1);
        assert!(even.is_even());
        assert_eq!(broken(Some(even.clone()), Some(even)), 0);
    }

    #[test]
    fn uneven_or_not_all_is_not_even() {
        assert!(!look_of(&[4, 2, 1], 1).is_even() && !look_of(&[2, 2, 2], 1).is_even());
        assert!(
            !look_of(&[7, 0, 0], 1).is_even() && look_of(&[7], 1).is_even() && !look_of(&[], 1).is_even()
        );
        assert_eq!(broken(None, None), 1);
    }

    #[test]
    fn a_move_without_a_cause_is_noticed() {
        assert_eq!(broken(Some(look_of(&[3, 2, 2], 1)), Some(look_of(&[3, 2, 2], 2))), 1);
        assert_eq!(broken(Some(look_of(&[3, 2, 2], 1)), Some(look_of(&[4, 2, 1], 1))), 1);
        assert_eq!(broken(Some(look_of(&[3, 2, 2], 1)), None), 1);
    }
}
