//! The judge judged: hand-made histories, each with one violation or none.

use super::judge;
use crate::checker::{Report, steps};
use crate::history::{Kind, Phase, Record};

/// A history in the making, of one election or one semaphore.
struct Story {
    name: &'static str,
    records: Vec<Record>,
    op: i64,
}

fn terms() -> Story {
    Story { name: "fencepost:election:amber", records: Vec::new(), op: 0 }
}

fn permits() -> Story {
    Story { name: "fencepost:semaphore:amber", records: Vec::new(), op: 0 }
}

impl Story {
    fn step(&mut self) {
        self.op += 1;
    }

    fn record(&mut self, at: u64, process: i32, kind: Kind, phase: Phase, token: i64) -> &mut Record {
        let record = Record::new(process, self.op, kind, phase, self.name).token(token);
        self.records.push(Record { at, ..record });
        self.records.last_mut().unwrap()
    }

    /// Asked for shortly before, answered at `at`.
    fn grant(&mut self, process: i32, token: i64, count: i64, at: u64) {
        self.step();
        let kind = if self.name.contains("election") { Kind::Acquire } else { Kind::Permit };
        self.record(at - 5, process, kind, Phase::Invoke, token).token = None;
        self.record(at, process, kind, Phase::Ok, token).value = Some(count);
    }

    /// "Yes", and so much longer.
    fn yes(&mut self, process: i32, token: i64, at: u64, remaining: i64) {
        self.step();
        self.record(at, process, Kind::Believe, Phase::Ok, token).value = Some(remaining);
    }

    fn end(&mut self, process: i32, token: i64, at: u64) {
        self.step();
        self.record(at, process, Kind::End, Phase::Invoke, token);
    }

    fn wrote(&mut self, process: i32, token: i64, commit: u64, end: Phase) {
        self.step();
        self.record(commit - 5, process, Kind::Use, Phase::Invoke, token);
        self.record(commit, process, Kind::Use, Phase::Commit, token);
        self.record(commit + 5, process, Kind::Use, end, token);
    }

    /// How often `[I8, I14]` are broken, and how often they were judged.
    fn judge(mut self) -> ([usize; 2], u64) {
        self.records.sort_by_key(|record| record.at);
        let mut report = Report::default();
        judge(&steps(&self.records), &mut report);
        let judged = report.verdicts.values().map(|verdict| verdict.judged).sum();
        (["I8", "I14"].map(|rule| report.broken(rule).len()), judged)
    }
}

#[test]
fn terms_one_after_the_other_break_nothing() {
    let mut story = terms();
    story.grant(1, 10, 1, 100);
    story.yes(1, 10, 150, 40);
    story.grant(2, 11, 1, 200);
    // It would have lasted longer, and was resigned.
    story.yes(2, 11, 250, 1_000);
    story.end(2, 11, 260);
    story.grant(1, 12, 1, 300);
    assert_eq!(story.judge(), ([0, 0], 3));
}

#[test]
fn a_term_that_begins_while_another_is_believed_in_breaks_i8() {
    let mut story = terms();
    story.grant(1, 10, 1, 100);
    story.yes(1, 10, 150, 60);
    story.grant(2, 11, 1, 200);
    story.yes(2, 11, 205, 60);
    assert_eq!(story.judge(), ([1, 0], 2));
    let mut story = terms();
    story.grant(1, 10, 1, 100);
    story.grant(2, 11, 1, 200);
    story.yes(1, 10, 201, 0);
    story.yes(2, 11, 205, 60);
    assert_eq!(story.judge(), ([1, 0], 2), "a stale yes");
    // In whatever order their numbers are.
    let mut story = terms();
    story.grant(1, 11, 1, 100);
    story.yes(1, 11, 190, 20);
    story.grant(2, 10, 1, 200);
    story.yes(2, 10, 205, 60);
    assert_eq!(story.judge(), ([1, 0], 2));
}

#[test]
fn an_answer_that_came_too_late_and_that_nobody_relied_on_breaks_nothing() {
    let mut story = terms();
    story.grant(2, 11, 1, 190);
    story.yes(2, 11, 195, 60);
    story.grant(1, 10, 1, 200);
    assert_eq!(story.judge(), ([0, 0], 2));
}

#[test]
fn a_term_nobody_looked_at_or_given_back_at_that_moment_was_over() {
    let mut story = terms();
    story.grant(1, 10, 1, 100);
    story.grant(2, 11, 1, 101);
    story.yes(2, 11, 150, 1_000);
    story.end(2, 11, 200);
    story.grant(1, 12, 1, 200);
    assert_eq!(story.judge(), ([0, 0], 3));
}

#[test]
fn as_many_as_there_are_break_nothing_and_one_more_breaks_i14() {
    for (last, broken) in [(1, 0), (2, 1)] {
        let mut story = permits();
        story.grant(1, 10, 2, 100);
        story.yes(1, 10, 110, 500);
        story.grant(2, 11, last, 200);
        story.yes(2, 11, 205, 60);
        assert_eq!(story.judge(), ([0, broken], 2), "{last}");
    }
    let mut story = permits();
    for (process, token) in [(1, 10), (2, 11), (3, 12)] {
        story.grant(process, token, 1, 100);
        story.yes(process, token, 110, 500);
    }
    story.end(1, 10, 150);
    story.grant(4, 13, 1, 160);
    story.yes(4, 13, 165, 60);
    assert_eq!(story.judge(), ([0, 0], 4), "one was given back");
}

#[test]
fn a_write_that_committed_was_in_use_until_its_commit() {
    for (end, broken) in [(Phase::Ok, 1), (Phase::Unknown, 0)] {
        let mut story = permits();
        story.grant(1, 10, 3, 100);
        story.yes(1, 10, 110, 20);
        story.wrote(1, 10, 220, end);
        story.grant(2, 11, 1, 200);
        story.yes(2, 11, 205, 60);
        assert_eq!(story.judge(), ([0, broken], 2));
    }
}
