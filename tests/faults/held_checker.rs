//! The judge of terms and permits: how many believed at one moment?
//!
//! | rule | judged | broken when |
//! |---|---|---|
//! | I8 | a term | it began, by its answer, while another term of that election was believed in |
//! | I14 | a grant of permits | it began, by its answer, while so many were in use that the limit was exceeded |
//!
//! A hold lasts from the answer that granted it until the last moment at which somebody relied on it: as long as the
//! last "yes" of `is_held` said that it would last, unless it was given back before; and until the COMMIT of the last
//! fenced transaction under it was sent, if that committed. A hold may have begun before its answer and have been
//! believed in longer than anybody looked, so what is counted here is the least: there are no false alarms. Nor is it
//! one if nobody relied on it after its answer: a process may stand still just before that, and know when it goes on.

use std::collections::{BTreeMap, HashMap};

use crate::checker::{Report, Step};
use crate::history::{Kind, Phase};
use crate::worker::{ELECTION, PERMITS, SEMAPHORE};

#[derive(Clone, Copy, Debug)]
struct Hold {
    #[expect(dead_code, reason = "read by whoever reads the report")]
    process: i32,
    token: i64,
    count: i64,
    from: u64,
    until: u64,
}

pub(crate) fn judge(steps: &[Step], report: &mut Report) {
    for (name, holds) in holds(steps) {
        let (rule, limit) = if name.starts_with(ELECTION) { ("I8", 1) } else { ("I14", i64::from(PERMITS)) };
        for hold in &holds {
            report.judged(rule);
            if hold.until <= hold.from {
                continue;
            }
            // Whoever else held at the moment of this answer.
            let beside: Vec<&Hold> = holds
                .iter()
                .filter(|other| {
                    (other.from, other.token) < (hold.from, hold.token) && other.until > hold.from
                })
                .collect();
            if beside.iter().map(|other| other.count).sum::<i64>() + hold.count > limit {
                report.break_rule(rule, format!("{name}: {hold:?} beside {beside:?}"));
            }
        }
    }
}

fn holds(steps: &[Step]) -> BTreeMap<&str, Vec<Hold>> {
    let key = |step: &Step| (step.process, step.token);
    let mut given_back: HashMap<(i32, Option<i64>), u64> = HashMap::new();
    let mut until: HashMap<(i32, Option<i64>), u64> = HashMap::new();
    for step in steps.iter().filter(|step| step.kind == Kind::End) {
        given_back.entry(key(step)).or_insert(step.began);
    }
    for step in steps {
        let relied = match step.kind {
            Kind::Believe if step.is(Phase::Ok) => {
                let remaining = step.value.and_then(|value| u64::try_from(value).ok()).unwrap_or(0);
                let end = given_back.get(&key(step)).copied().unwrap_or(u64::MAX);
                step.began.max(end.min(step.began + remaining))
            }
            Kind::Use | Kind::Write if step.is(Phase::Ok) => step.commit.unwrap_or(0),
            _ => continue,
        };
        let last = until.entry(key(step)).or_default();
        *last = relied.max(*last);
    }
    let mut holds: BTreeMap<&str, Vec<Hold>> = BTreeMap::new();
    for step in steps {
        let of_ours = match step.kind {
            Kind::Acquire => step.name.starts_with(ELECTION),
            Kind::Permit => step.name.starts_with(SEMAPHORE),
            _ => false,
        };
        if let (true, Some((from, Phase::Ok)), Some(token)) = (of_ours, step.ended, step.token) {
            let count = if step.kind == Kind::Permit { step.value.unwrap_or(1) } else { 1 };
            let until = until.get(&key(step)).copied().unwrap_or(from);
            holds.entry(&step.name).or_default().push(Hold {
                process: step.process,
                token,
                count,
                from,
                until,
            });
        }
    }
    for holds in holds.values_mut() {
        holds.sort_by_key(|hold| (hold.from, hold.token));
    }
    holds
}

#[cfg(test)]
#[path = "held_checker_tests.rs"]
mod tests;
