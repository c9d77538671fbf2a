//! The judge of versioned rows: are they compare-and-set registers?
//!
//! | I10 | judged | broken when |
//! |---|---|---|
//! | the chain | a change that the database has | an update does not raise the version by one, or does not add one to what was there: it has lost an update; a row begins with a version that was used before it; the last is not what the row is |
//! | answers | an update, an insert, a delete | acknowledged, and not there once, with its versions; known to have failed, and there; there twice, or without its COMMIT; nobody made it; or not made, and it has the version |
//! | sightings | a load, an acknowledgement, a conflict's current version, a row that is gone | there never was such a version, with that value; it was made by whoever began later; a later one was known before it was asked for; a conflict is with no later version |
//!
//! A version follows another, and none comes again, so no search is needed: a register is linearizable if its changes
//! make a chain and no sighting contradicts the order in time. What was not answered is there or not.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use crate::checker::{Facts, Report, Step};
use crate::history::{CONFLICT, GONE, Kind, Phase, SUPPRESSED};

/// What the database has noted, in its order, and the rows in the end.
#[derive(Clone, Debug, Default)]
pub(crate) struct Versions {
    pub(crate) events: Vec<Event>,
    pub(crate) rows: Vec<Row>,
}

/// A change of a row: without a version before, it is an insert; without one after, a delete.
#[derive(Clone, Debug)]
pub(crate) struct Event {
    pub(crate) name: String,
    pub(crate) before: Option<i64>,
    pub(crate) after: Option<i64>,
    pub(crate) n: Option<i64>,
    /// Whose, except of a delete: nothing is left that could say it.
    pub(crate) process: Option<i32>,
    pub(crate) op: Option<i64>,
}

#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) version: i64,
    pub(crate) n: i64,
}

/// One row as its changes have left it, one state after the other.
#[derive(Default)]
struct Register<'a> {
    states: Vec<State<'a>>,
    of_version: HashMap<i64, usize>,
}

struct State<'a> {
    event: &'a Event,
    /// When whoever made it began to, at the earliest.
    began: u64,
}

/// Somebody knows, at a moment between two, what the row is.
struct Sighting {
    from: u64,
    until: u64,
    /// None: one of those in which it is gone.
    state: Option<usize>,
    what: String,
}

type Registers<'a> = HashMap<&'a str, Register<'a>>;

pub(crate) fn judge(facts: &Facts, steps: &[Step], report: &mut Report) {
    if facts.versions.events.is_empty() {
        return;
    }
    let mut registers = chains(&facts.versions, report);
    answers_are_true(&facts.versions, steps, report);
    deletes_are_made_once(&mut registers, steps, report);
    let makers: HashMap<(i32, i64), u64> = steps.iter().map(|s| ((s.process, s.op), s.began)).collect();
    for state in registers.values_mut().flat_map(|register| &mut register.states) {
        if let Some(maker) = state.event.process.zip(state.event.op) {
            // Without one: from the beginning.
            state.began = makers.get(&maker).copied().unwrap_or(0);
        }
    }
    for (name, sightings) in sightings(facts, steps, &registers, report) {
        agree_with_time(&registers[name], sightings, report);
    }
}

fn chains<'a>(versions: &'a Versions, report: &mut Report) -> Registers<'a> {
    let mut registers = Registers::new();
    for event in &versions.events {
        let register = registers.entry(&event.name).or_default();
        report.judged("I10");
        let last = register.states.last().map(|state| state.event);
        let follows = match (event.before, event.after) {
            (Some(before), Some(after)) => {
                let one_more = last.and_then(|last| last.n).map(|n| n + 1);
                Some(before) == last.and_then(|last| last.after) && after == before + 1 && event.n == one_more
            }
            (None, Some(after)) => {
                last.is_none_or(|last| last.after.is_none())
                    && register.of_version.keys().all(|used| *used < after)
            }
            (before, None) => before.is_some() && before == last.and_then(|last| last.after),
        };
        if !follows {
            report.break_rule("I10", format!("{event:?} does not follow {last:?}"));
        }
        if let Some(after) = event.after {
            register.of_version.insert(after, register.states.len());
        }
        register.states.push(State { event, began: 0 });
    }
    for (name, register) in &registers {
        report.judged("I10");
        let last = register.states.last().map(|state| (state.event.after, state.event.n));
        let row = versions.rows.iter().find(|row| row.name == *name);
        let row = row.map_or((None, None), |row| (Some(row.version), Some(row.n)));
        if last != Some(row) {
            report.break_rule("I10", format!("{name}: {row:?} is there, {last:?} was made last"));
        }
    }
    registers
}

/// Of updates and inserts.
fn answers_are_true(versions: &Versions, steps: &[Step], report: &mut Report) {
    let mut made: HashMap<(i32, i64), Vec<&Event>> = HashMap::new();
    for event in &versions.events {
        if let Some(maker) = event.process.zip(event.op).filter(|(process, _)| *process != 0) {
            made.entry(maker).or_default().push(event);
        }
    }
    for step in steps.iter().filter(|step| matches!(step.kind, Kind::Update | Kind::Insert)) {
        report.judged("I10");
        report.tally(match (step.kind, step.ended) {
            (Kind::Insert, _) => "inserts",
            (_, Some((_, Phase::Ok))) => "updates",
            (_, Some((_, Phase::Fail))) if step.why == CONFLICT => "version conflicts",
            (_, Some((_, Phase::Fail))) => "failed updates",
            _ => "unknown updates",
        });
        let found = made.remove(&(step.process, step.op)).unwrap_or_default();
        let right = match step.ended {
            Some((_, Phase::Ok)) => found.len() == 1,
            Some((_, Phase::Fail)) => found.is_empty(),
            // Without a word of COMMIT it was not sent.
            _ => found.len() <= usize::from(step.commit.is_some()),
        };
        let same = |event: &&Event| {
            event.name == step.name
                && (step.token.is_none() || step.token == event.before)
                && (!step.is(Phase::Ok) || step.value == event.after)
        };
        if !right || !found.iter().all(same) {
            report.break_rule("I10", format!("{step:?} has made {found:?}"));
        }
        if step.why == SUPPRESSED {
            report.break_rule("I10", format!("nothing here suppresses a change: {step:?}"));
        }
    }
    for event in made.values().flatten() {
        report.break_rule("I10", format!("nobody made {event:?}"));
    }
}

/// A delete is known by the version that it ends. When it began is noted.
fn deletes_are_made_once(registers: &mut Registers<'_>, steps: &[Step], report: &mut Report) {
    let mut sent: HashMap<(&str, Option<i64>), Vec<&Step>> = HashMap::new();
    for step in steps.iter().filter(|step| step.kind == Kind::Delete) {
        report.judged("I10");
        if step.commit.is_some() && !step.is(Phase::Fail) {
            sent.entry((&step.name, step.token)).or_default().push(step);
        }
    }
    for (name, register) in registers {
        for state in register.states.iter_mut().filter(|state| state.event.after.is_none()) {
            let by = sent.remove(&(*name, state.event.before)).unwrap_or_default();
            let acknowledged = by.iter().filter(|step| step.is(Phase::Ok)).count();
            if by.is_empty() || acknowledged > 1 {
                report.break_rule("I10", format!("{:?} was made by {by:?}", state.event));
            }
            if acknowledged > 0 {
                report.tally("deletes");
            }
            state.began = by.iter().map(|step| step.began).min().unwrap_or(0);
        }
    }
    for step in sent.values().flatten().filter(|step| step.is(Phase::Ok)) {
        report.break_rule("I10", format!("{step:?} is not there"));
    }
}

fn sightings<'a>(
    facts: &'a Facts,
    steps: &'a [Step],
    registers: &Registers<'_>,
    report: &mut Report,
) -> HashMap<&'a str, Vec<Sighting>> {
    let mut all: HashMap<&str, Vec<Sighting>> = HashMap::new();
    let mut see = |name: &'a str, from, until, version: Option<(i64, Option<i64>)>, what: String| {
        let Some(register) = registers.get(name) else { return };
        let state = match version {
            None => None,
            Some((version, n)) => {
                let state = register.of_version.get(&version).copied();
                // With the value that this version has.
                let state = state.filter(|at| n.is_none_or(|n| register.states[*at].event.n == Some(n)));
                if state.is_none() {
                    return report.break_rule("I10", format!("it never was so: {what}"));
                }
                state
            }
        };
        all.entry(name).or_default().push(Sighting { from, until, state, what });
    };
    for record in facts.records.iter().filter(|record| record.kind == Kind::Load) {
        let version = record.token.map(|version| (version, record.value));
        see(&record.name, record.at, record.until.unwrap_or(record.at), version, format!("{record:?}"));
    }
    for step in steps.iter().filter(|s| matches!(s.kind, Kind::Update | Kind::Insert | Kind::Delete)) {
        let Some((ended, phase)) = step.ended else { continue };
        let version = match phase {
            Phase::Ok if step.kind == Kind::Delete => None,
            Phase::Ok => step.value,
            Phase::Fail if step.why == CONFLICT && step.value.is_some() => step.value,
            Phase::Fail if step.why == GONE => None,
            _ => continue,
        };
        see(&step.name, step.began, ended, version.map(|version| (version, None)), format!("{step:?}"));
    }
    let conflict = |step: &&Step| step.is(Phase::Fail) && step.why == CONFLICT;
    for step in steps.iter().filter(conflict) {
        report.judged("I10");
        if step.token.zip(step.value).is_some_and(|(base, current)| current <= base) {
            report.break_rule("I10", format!("no later version, and yet a conflict: {step:?}"));
        }
    }
    all
}

/// Nobody sees what was not begun yet, nor what somebody had seen replaced before.
fn agree_with_time(register: &Register<'_>, mut sightings: Vec<Sighting>, report: &mut Report) {
    sightings.sort_by_key(|sighting| sighting.from);
    let mut ended = BinaryHeap::new();
    let mut known = 0;
    for Sighting { from, until, state, what } in sightings {
        report.judged("I10");
        while let Some(Reverse((_, state))) =
            ended.peek().copied().filter(|Reverse((until, _))| *until < from)
        {
            known = known.max(state);
            ended.pop();
        }
        let gone = || (known..register.states.len()).find(|at| register.states[*at].event.after.is_none());
        let Some(state) = state.or_else(gone) else {
            report.break_rule("I10", format!("it was there: {what}"));
            continue;
        };
        if state < known {
            let later = register.states[known].event;
            report.break_rule("I10", format!("{later:?} was known before, and yet: {what}"));
        }
        if register.states[state].began > until {
            report.break_rule("I10", format!("seen before it was begun: {what}"));
        }
        ended.push(Reverse((until, state)));
    }
}

#[cfg(test)]
#[path = "version_checker_tests.rs"]
mod tests;
