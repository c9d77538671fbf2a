//! The judge of session-level locks: did they exclude each other, and was each loss known in time?
//!
//! | rule | judged | broken when |
//! |---|---|---|
//! | I4 | a hold | another one that excludes it was granted before it was given back, and nothing was lost; or "yes" after being told of the loss |
//! | I5 | a hold beside which another was granted, or whose process stood still for longer than the trust | "yes" later than the trust after that; or no signal within [`SIGNAL_WITHIN`] of that |
//! | I12 | where nothing may be lost | a release answers that it was lost |
//!
//! There is no token that would tell who was granted a lock first, nor does anything reject who was not. But whose
//! release the server has answered with "it was held until now" has held it all the time: nobody else can have
//! had it. Whoever ends in another way may have lost its session before, and somebody else may then have the lock
//! while it is still believed in. For how long is bounded, whatever the machine does meanwhile: "yes" means that an answer
//! to a question is trusted that was asked less than the trust ago, and the session was there at that instant.
//!
//! I11 (at rest), and the ends of waits, are judged in `line_checker`.

use std::collections::HashMap;
use std::time::Duration;

use crate::checker::{Facts, Outage, Report, SIGNAL_WITHIN, Step};
use crate::history::{Kind, Phase, SHARED};

/// A lock that was granted, by what its process says.
#[derive(Clone, Debug)]
struct Hold {
    process: i32,
    is_shared: bool,
    /// When it was asked for.
    began: u64,
    answered: u64,
    /// The last "yes" before it was over.
    believed: u64,
    /// When its loss was signalled, or before it was given back: whichever came first.
    over: Option<u64>,
    /// Its release was answered: it was held until then.
    is_kept: bool,
}

pub(crate) fn judge(facts: &Facts, steps: &[Step], trust: Duration, report: &mut Report) {
    let mut judge = Judge { facts, trust: nanos(trust), last: HashMap::new() };
    for record in &facts.records {
        judge.last.insert(record.process, record.at);
    }
    let of_name = holds(steps, report);
    for holds in of_name.values() {
        judge.exclude_each_other(holds, report);
        judge.know_after_a_stop(holds, report);
    }
    if facts.calm {
        for step in steps.iter().filter(|step| step.kind == Kind::End && step.why == "Ok(false)") {
            report.break_rule("I12", format!("nothing has happened, and yet: {step:?}"));
        }
    }
}

/// By name, in the order of their answers.
fn holds<'a>(steps: &'a [Step], report: &mut Report) -> HashMap<&'a str, Vec<Hold>> {
    let mut all: HashMap<i64, (&str, Hold)> = HashMap::new();
    for step in steps.iter().filter(|step| step.kind == Kind::Acquire) {
        if let (Some((answered, Phase::Ok)), Some(token)) = (step.ended, step.token) {
            let (process, began, is_shared) = (step.process, step.began, step.why == SHARED);
            let (believed, over, is_kept) = (answered, None, false);
            let hold = Hold { process, is_shared, began, answered, believed, over, is_kept };
            all.insert(token, (&step.name, hold));
        }
    }
    let of = |step: &Step, kind| step.token.filter(|_| step.kind == kind);
    let mut told = HashMap::new();
    for step in steps {
        let Some(token) = of(step, Kind::End).or(of(step, Kind::Lost)) else { continue };
        let Some((_, hold)) = all.get_mut(&token) else { continue };
        hold.over = Some(hold.over.map_or(step.began, |over| over.min(step.began)));
        hold.is_kept |= step.kind == Kind::End && step.why == "Ok(true)";
        if step.kind == Kind::Lost {
            told.insert(token, step.began);
        }
    }
    for step in steps.iter().filter(|step| step.is(Phase::Ok)) {
        let Some(token) = of(step, Kind::Believe) else { continue };
        let Some((_, hold)) = all.get_mut(&token) else { continue };
        if hold.over.is_none_or(|over| step.began < over) {
            hold.believed = hold.believed.max(step.began);
        }
        if let Some(told) = told.get(&token).filter(|told| **told < step.began) {
            report.break_rule("I4", format!("{step:?}: told of its loss at {told}"));
        }
    }
    let mut of_name: HashMap<&str, Vec<Hold>> = HashMap::new();
    for (name, hold) in all.into_values() {
        of_name.entry(name).or_default().push(hold);
    }
    for holds in of_name.values_mut() {
        holds.sort_by_key(|hold| hold.answered);
    }
    of_name
}

struct Judge<'a> {
    facts: &'a Facts,
    trust: u64,
    /// The instant of each process's last word.
    last: HashMap<i32, u64>,
}

impl Judge<'_> {
    fn exclude_each_other(&self, holds: &[Hold], report: &mut Report) {
        for (index, hold) in holds.iter().enumerate() {
            report.judged("I4");
            let end = hold.over.unwrap_or_else(|| self.last_word(hold));
            let beside = holds[index + 1..].iter().take_while(|other| other.answered < end);
            for other in beside.filter(|other| !(hold.is_shared && other.is_shared)) {
                self.judge_beside(hold, other, report);
            }
        }
    }

    /// The other was answered later, and before this one was over.
    fn judge_beside(&self, hold: &Hold, other: &Hold, report: &mut Report) {
        // Of two whose questions overlap, the one that was answered later may have been granted earlier.
        let is_first = hold.answered < other.began;
        let may_be_lost = !hold.is_kept || !(is_first || other.is_kept);
        if self.facts.calm || !may_be_lost {
            report.break_rule("I4", format!("{hold:?} was not lost, and beside it: {other:?}"));
            return;
        }
        report.judged("I5");
        let is_late = |of: &Hold, beside: &Hold| of.believed > beside.answered + self.trust;
        let known = other.answered + self.trust;
        if is_late(hold, other) && (is_first || is_late(other, hold)) {
            report.break_rule("I5", format!("{hold:?} was believed in for too long beside {other:?}"));
        } else if is_first && !self.is_told(hold, other.answered, known) {
            report.break_rule("I5", format!("{hold:?} is not told of its loss to {other:?}"));
        } else if hold.believed > other.answered {
            let undisturbed = |over: &u64| is_first && !self.stood(hold, other.answered, *over);
            if let Some(over) = hold.over.filter(undisturbed) {
                let took = Duration::from_nanos(over - other.answered);
                report.slowest_signal = report.slowest_signal.max(took);
            }
            report.tally("holds told of their loss in time");
        }
    }

    /// Whoever stood still for longer than the trust has lost what it held.
    fn know_after_a_stop(&self, holds: &[Hold], report: &mut Report) {
        for stop in &self.facts.stops {
            let Some(known) = stop.known_from() else { continue };
            let held = holds.iter().filter(|hold| {
                hold.process == stop.process
                    && hold.answered < stop.stood
                    && hold.over.is_none_or(|over| over >= stop.stood)
            });
            for hold in held {
                report.judged("I5");
                if hold.believed >= known {
                    report.break_rule("I5", format!("{hold:?} is believed in after {stop:?}"));
                } else if !self.is_told(hold, stop.woken.max(known), known) {
                    report.break_rule("I5", format!("{hold:?} is not told of its loss after {stop:?}"));
                }
            }
        }
    }

    /// Soon after it has to be known; or the process had not the time to be told.
    fn is_told(&self, hold: &Hold, from: u64, known: u64) -> bool {
        let bound = known + nanos(SIGNAL_WITHIN);
        self.stood(hold, from, bound)
            || hold.over.is_some_and(|over| over <= bound)
            || self.last_word(hold) <= bound
    }

    /// Whether its process stood still in this time.
    fn stood(&self, hold: &Hold, from: u64, until: u64) -> bool {
        self.facts.stops.iter().any(|stop| {
            let its = stop.process == hold.process && stop.outage == Outage::Stood;
            its && stop.stood < until && stop.woken > from
        })
    }

    fn last_word(&self, hold: &Hold) -> u64 {
        self.last.get(&hold.process).copied().unwrap_or(0)
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap()
}

#[cfg(test)]
#[path = "lock_checker_tests.rs"]
mod tests;
