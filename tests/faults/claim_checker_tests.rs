//! The judge of claims judged: hand-made histories, each with one violation or none.

use super::*;
use crate::checker::{check, steps};
use crate::history::Record;

/// One claim; each record takes a second.
#[derive(Default)]
struct Story {
    facts: Facts,
    at: u64,
    op: i64,
}

impl Story {
    fn record(&mut self, process: i32, kind: Kind, phase: Phase, token: i64) {
        self.at += 1_000_000_000;
        let record = Record::new(process, self.op, kind, phase, "charge").token(token);
        self.facts.records.push(Record { at: self.at, ..record });
    }

    fn begin(&mut self, process: i32, token: i64) {
        self.op += 1;
        self.record(process, Kind::Acquire, Phase::Invoke, token);
        self.record(process, Kind::Acquire, Phase::Ok, token);
    }

    /// Up to COMMIT, which is sent.
    fn complete(&mut self, process: i32, token: i64) {
        self.op += 1;
        self.record(process, Kind::Complete, Phase::Invoke, token);
        self.record(process, Kind::Complete, Phase::Commit, token);
    }

    fn answer(&mut self, process: i32, phase: Phase, token: i64) {
        self.record(process, Kind::Complete, phase, token);
    }

    fn effect(&mut self, process: i32, token: i64) {
        let (key, op) = ("charge".to_owned(), self.op);
        self.facts.claimed.effects.push(Effect { key, token, process, op });
    }

    fn row(&mut self, state: &str, token: i64) {
        let (key, state) = ("charge".to_owned(), state.to_owned());
        self.facts.claimed.rows.push(Row { key, state, token });
    }

    fn broken(&self) -> usize {
        let mut report = Report::default();
        judge(&self.facts, &steps(&self.facts.records), &mut report);
        // And the whole judge asks this one.
        assert_eq!(check(&self.facts).broken("I6").len(), report.broken("I6").len());
        report.broken("I6").len()
    }
}

/// A begins, is overtaken by B, which completes.
fn recovered() -> Story {
    let mut story = Story::default();
    story.begin(1, 10);
    story.begin(2, 11);
    story.complete(2, 11);
    story.answer(2, Phase::Ok, 11);
    story.effect(2, 11);
    story.row("done", 11);
    story
}

#[test]
fn one_effect_of_the_last_attempt_breaks_nothing() {
    assert_eq!(recovered().broken(), 0);
    let mut refused = recovered();
    refused.op += 1;
    refused.record(1, Kind::Complete, Phase::Invoke, 10);
    refused.answer(1, Phase::Fail, 10);
    assert_eq!(refused.broken(), 0);
}

#[test]
fn what_is_not_answered_may_have_happened_or_not() {
    for happened in [true, false] {
        let mut story = Story::default();
        story.begin(1, 10);
        story.complete(1, 10);
        if happened {
            story.effect(1, 10);
        }
        story.row(if happened { "done" } else { "ready" }, 10);
        assert_eq!(story.broken(), 0);
    }
}

#[test]
fn a_second_effect_is_one_too_many() {
    let mut story = recovered();
    story.complete(2, 11);
    story.answer(2, Phase::Ok, 11);
    story.effect(2, 11);
    assert_eq!(story.broken(), 1);
}

#[test]
fn done_without_an_effect_and_an_effect_without_done_are_seen() {
    let mut story = recovered();
    story.facts.claimed.effects.clear();
    assert_eq!(story.broken(), 2, "it is done, and was acknowledged");
    let mut story = recovered();
    story.facts.claimed.rows.clear();
    story.row("ready", 11);
    assert_eq!(story.broken(), 1);
    let mut story = recovered();
    story.facts.claimed.rows.clear();
    assert_eq!(story.broken(), 1, "pruned, or never there");
}

// C32: finished by the key alone.
#[test]
fn a_stale_finish_is_seen_by_its_token_and_by_its_time() {
    let mut story = Story::default();
    story.begin(1, 10);
    story.begin(2, 11);
    story.complete(1, 10);
    story.answer(1, Phase::Ok, 10);
    story.effect(1, 10);
    story.row("done", 11);
    assert_eq!(story.broken(), 2);
    // As if it had written its token over the other one's.
    story.facts.claimed.rows[0].token = 10;
    assert_eq!(story.broken(), 1);
}

#[test]
fn what_was_refused_is_not_there_and_what_is_there_somebody_made() {
    let mut story = recovered();
    story.answer(2, Phase::Fail, 11);
    assert_eq!(story.broken(), 1);
    let mut story = recovered();
    story.facts.claimed.effects[0].op = 99;
    assert_eq!(story.broken(), 2, "nobody made it, and what was made is not there");
    let mut story = recovered();
    story.facts.claimed.effects[0].token = 10;
    assert_eq!(story.broken(), 3, "of another attempt: not the claim's, not what was said, and too late");
}
