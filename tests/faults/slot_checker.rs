//! The judge of slots: was each run once, when it was due, and one after the other where that was asked for?
//!
//! | I7 | judged | broken when |
//! |---|---|---|
//! | once | a slot that was due, from the first look at its schedule to the end of the faults | there is not one effect of it; or of a later one there are two |
//! | which | an effect | its slot is none by the rule, or was due before the schedule was known |
//! | when | an effect | it was there before its slot was due, by the database's clock |
//! | one at a time | a look at `is_held`, a COMMIT that is there | it was relied on, or sent, after the answer of a later attempt at whatever slot of the schedule |
//!
//! That a completion which was acknowledged is there and a refused one is not (I6), that nobody believes in an attempt
//! at a slot after a later one (I4) and knows of its loss in time (I5) is judged in `claim_checker` and `checker`: a
//! slot is a claim.

use std::collections::HashMap;

use crate::checker::{Facts, Report, Step};
use crate::history::{Kind, Phase};
use crate::slots::Times;

/// What the database has in the end.
#[derive(Clone, Debug, Default)]
pub(crate) struct Slotted {
    pub(crate) known: Vec<Known>,
    pub(crate) effects: Vec<Effect>,
    /// What was due by then, by the database's clock, is to be done.
    pub(crate) until: i64,
}

/// A schedule that somebody has looked at.
#[derive(Clone, Debug)]
pub(crate) struct Known {
    pub(crate) name: String,
    pub(crate) times: Times,
    /// What was due before counts only where slots are listed one by one.
    pub(crate) since: i64,
}

/// A row of the table that is written in the transactions that complete slots.
#[derive(Clone, Debug)]
pub(crate) struct Effect {
    pub(crate) name: String,
    pub(crate) slot: i64,
    pub(crate) process: i32,
    pub(crate) op: i64,
    /// By the database's clock.
    pub(crate) at: i64,
}

impl Known {
    pub(crate) fn new(name: String, since: i64) -> Self {
        let times = Times::of(&name).unwrap_or_else(|| panic!("{name:?} says no rule"));
        Self { name, times, since }
    }

    fn after(&self) -> i64 {
        if self.times.count.is_some() { i64::MIN / 2 } else { self.since }
    }
}

impl Slotted {
    /// How often each was done.
    fn done(&self) -> HashMap<(&str, i64), usize> {
        let mut done = HashMap::new();
        for effect in &self.effects {
            *done.entry((effect.name.as_str(), effect.slot)).or_default() += 1;
        }
        done
    }

    /// All that are to be done.
    fn due(&self) -> impl Iterator<Item = (&Known, i64)> {
        self.known
            .iter()
            .flat_map(|known| known.times.between(known.after(), self.until).map(move |slot| (known, slot)))
    }

    /// What is to be done, and is not.
    pub(crate) fn missing(&self) -> impl Iterator<Item = (&Known, i64)> {
        let done = self.done();
        self.due().filter(move |(known, slot)| !done.contains_key(&(known.name.as_str(), *slot)))
    }
}

pub(crate) fn judge(facts: &Facts, steps: &[Step], report: &mut Report) {
    let slotted = &facts.slotted;
    each_is_run_once(slotted, report);
    none_is_run_that_is_not_due(slotted, report);
    for known in slotted.known.iter().filter(|known| known.times.alone) {
        one_at_a_time(known, slotted, steps, report);
    }
}

fn each_is_run_once(slotted: &Slotted, report: &mut Report) {
    let mut done = slotted.done();
    for (known, slot) in slotted.due() {
        report.judged("I7");
        match done.remove(&(known.name.as_str(), slot)) {
            Some(1) if known.times.alone => report.tally("slots of one at a time"),
            Some(1) => report.tally("slots"),
            times => report
                .break_rule("I7", format!("{}: {slot} was run {} times", known.name, times.unwrap_or(0))),
        }
    }
    for ((name, slot), times) in done {
        report.judged("I7");
        if times > 1 {
            report.break_rule("I7", format!("{name}: {slot} was run {times} times"));
        }
    }
}

fn none_is_run_that_is_not_due(slotted: &Slotted, report: &mut Report) {
    for effect in &slotted.effects {
        report.judged("I7");
        let known = slotted.known.iter().find(|known| known.name == effect.name);
        if !known.is_some_and(|known| known.times.has(effect.slot) && effect.slot > known.after()) {
            report.break_rule("I7", format!("no slot of the schedule: {effect:?}"));
        }
        if effect.at < effect.slot {
            report.break_rule("I7", format!("{} µs too early: {effect:?}", effect.slot - effect.at));
        }
    }
}

/// By belief, and by what was committed. Tokens of all slots are of one sequence.
fn one_at_a_time(known: &Known, slotted: &Slotted, steps: &[Step], report: &mut Report) {
    let its_keys = format!("schedule/{}/", known.name);
    let its = || steps.iter().filter(|step| step.name.starts_with(&its_keys));
    let mut begun: Vec<(i64, u64)> = Vec::new();
    let mut ended: HashMap<(i32, Option<i64>), u64> = HashMap::new();
    for step in its() {
        let end = match (step.kind, step.ended, step.token) {
            (Kind::Acquire, Some((answered, Phase::Ok)), Some(token)) => {
                begun.push((token, answered));
                None
            }
            (Kind::End, ..) => Some(step.began),
            (Kind::Complete, ..) => step.commit,
            _ => None,
        };
        if let Some(end) = end {
            ended
                .entry((step.process, step.token))
                .and_modify(|first| *first = end.min(*first))
                .or_insert(end);
        }
    }
    let there: Vec<(i32, i64)> = slotted.effects.iter().map(|effect| (effect.process, effect.op)).collect();
    for step in its() {
        let until = match step.kind {
            Kind::Believe if step.is(Phase::Ok) => {
                let remaining = step.value.and_then(|value| u64::try_from(value).ok()).unwrap_or(0);
                let end = ended.get(&(step.process, step.token)).copied().unwrap_or(u64::MAX);
                step.began.max(end.min(step.began + remaining))
            }
            Kind::Complete if there.contains(&(step.process, step.op)) => step.commit.unwrap_or(0),
            _ => continue,
        };
        report.judged("I7");
        let later = begun.iter().find(|(token, answered)| Some(*token) > step.token && *answered < until);
        if let Some((token, answered)) = later {
            report.break_rule(
                "I7",
                format!("{step:?}, until {until}: attempt {token} of this schedule was begun at {answered}"),
            );
        }
    }
}

#[cfg(test)]
#[path = "slot_checker_tests.rs"]
mod tests;
