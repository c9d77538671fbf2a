//! The judge of claims: was each done once, and by whoever had it?
//!
//! | I6 | judged | broken when |
//! |---|---|---|
//! | once | a claim | done, and not one effect of it is there; or not done, and one is |
//! | whose | an effect | its token is not that of the attempt that the claim ended with; COMMIT was sent after the answer of a later attempt |
//! | answers | a complete | acknowledged, and its effect is not there once; known to have failed, and it is there; it is there and nobody made it |
//!
//! That tokens rise (I1), that nobody believes in an attempt after a later one was begun (I4) and knows of its loss in
//! time (I5) is judged in `checker`: an attempt is a grant there.

use std::collections::HashMap;

use crate::checker::{Facts, Report, Step};
use crate::history::{Kind, Phase, RECOVERED, REJECTED};

/// What the database has in the end.
#[derive(Clone, Debug, Default)]
pub(crate) struct Claimed {
    pub(crate) rows: Vec<Row>,
    pub(crate) effects: Vec<Effect>,
}

/// A claim.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) key: String,
    pub(crate) state: String,
    pub(crate) token: i64,
}

/// A row of the table that is written in the transactions that complete.
#[derive(Clone, Debug)]
pub(crate) struct Effect {
    pub(crate) key: String,
    pub(crate) token: i64,
    pub(crate) process: i32,
    pub(crate) op: i64,
}

pub(crate) fn judge(facts: &Facts, steps: &[Step], report: &mut Report) {
    each_is_done_once(&facts.claimed, report);
    answers_are_true(&facts.claimed, steps, report);
    nobody_ends_what_another_one_has(&facts.claimed, steps, report);
    let recovered = |record: &&crate::history::Record| {
        record.kind == Kind::Acquire && record.why.as_deref() == Some(RECOVERED)
    };
    for _ in facts.records.iter().filter(recovered) {
        report.tally("recovered attempts");
    }
}

fn each_is_done_once(claimed: &Claimed, report: &mut Report) {
    let mut effects: HashMap<&str, Vec<&Effect>> = HashMap::new();
    for effect in &claimed.effects {
        effects.entry(&effect.key).or_default().push(effect);
    }
    for row in &claimed.rows {
        report.judged("I6");
        let found = effects.remove(row.key.as_str()).unwrap_or_default();
        if found.len() != usize::from(row.state == "done") {
            report.break_rule("I6", format!("{row:?} has the effects {found:?}"));
        }
        for effect in found.iter().filter(|effect| effect.token != row.token) {
            report.break_rule("I6", format!("{row:?} was ended by another attempt: {effect:?}"));
        }
    }
    for effect in effects.values().flatten() {
        report.break_rule("I6", format!("of no claim: {effect:?}"));
    }
}

fn answers_are_true(claimed: &Claimed, steps: &[Step], report: &mut Report) {
    let mut effects: HashMap<(i32, i64), Vec<&Effect>> = HashMap::new();
    for effect in &claimed.effects {
        effects.entry((effect.process, effect.op)).or_default().push(effect);
    }
    for step in steps.iter().filter(|step| step.kind == Kind::Complete) {
        report.judged("I6");
        report.tally(match step.ended {
            Some((_, Phase::Ok)) => "completions",
            Some((_, Phase::Fail)) if step.why.starts_with(REJECTED) => "refused completions",
            Some((_, Phase::Fail)) => "failed completions",
            _ => "unknown completions",
        });
        let found = effects.remove(&(step.process, step.op)).unwrap_or_default();
        let right = match step.ended {
            Some((_, Phase::Ok)) => found.len() == 1,
            Some((_, Phase::Fail)) => found.is_empty(),
            // Without a word of COMMIT it was not sent.
            _ => found.len() <= usize::from(step.commit.is_some()),
        };
        let same = |effect: &&Effect| effect.key == step.name && Some(effect.token) == step.token;
        if !right || !found.iter().all(same) {
            report.break_rule("I6", format!("{step:?} has the effects {found:?}"));
        }
    }
    for effect in effects.values().flatten() {
        report.break_rule("I6", format!("nobody made {effect:?}"));
    }
}

fn nobody_ends_what_another_one_has(claimed: &Claimed, steps: &[Step], report: &mut Report) {
    let mut begun: HashMap<&str, Vec<(i64, u64)>> = HashMap::new();
    for step in steps.iter().filter(|step| step.kind == Kind::Acquire) {
        if let (Some((answered, Phase::Ok)), Some(token)) = (step.ended, step.token) {
            begun.entry(step.name.as_str()).or_default().push((token, answered));
        }
    }
    let there: HashMap<(i32, i64), &Effect> =
        claimed.effects.iter().map(|effect| ((effect.process, effect.op), effect)).collect();
    for step in steps.iter().filter(|step| step.kind == Kind::Complete) {
        let (Some(commit), Some(effect)) = (step.commit, there.get(&(step.process, step.op))) else {
            continue;
        };
        report.judged("I6");
        let later = begun.get(step.name.as_str()).into_iter().flatten();
        for (token, answered) in later.filter(|(token, answered)| *token > effect.token && *answered < commit)
        {
            report.break_rule(
                "I6",
                format!("{effect:?}, sent at {commit}: attempt {token} was begun at {answered}"),
            );
        }
    }
}

#[cfg(test)]
#[path = "claim_checker_tests.rs"]
mod tests;
