//! The judge of versioned rows judged: hand-made histories, each with one violation or none.

use super::*;
use crate::checker::{check, steps};
use crate::history::Record;

/// One row; each record takes a second.
struct Story {
    facts: Facts,
    at: u64,
    op: i64,
}

impl Story {
    /// A row with version 10 and zero.
    fn begins() -> Self {
        let mut story = Self { facts: Facts::default(), at: 0, op: 0 };
        story.event(0, None, Some(10), Some(0));
        story
    }

    fn record(&mut self, process: i32, kind: Kind, phase: Phase) -> &mut Record {
        self.at += 1_000_000_000;
        let record = Record::new(process, self.op, kind, phase, "page");
        self.facts.records.push(Record { at: self.at, ..record });
        self.facts.records.last_mut().unwrap()
    }

    fn event(&mut self, process: i32, before: Option<i64>, after: Option<i64>, n: Option<i64>) {
        let (process, op) = (Some(process), Some(self.op));
        let maker = if after.is_some() { (process, op) } else { (None, None) };
        let event = Event { name: "page".to_owned(), before, after, n, process: maker.0, op: maker.1 };
        self.facts.versions.events.push(event);
    }

    fn load(&mut self, process: i32, version: Option<i64>, n: Option<i64>) {
        self.op += 1;
        let record = self.record(process, Kind::Load, Phase::Ok);
        (record.token, record.value, record.until) = (version, n, Some(record.at + 500_000_000));
    }

    /// Up to its COMMIT, which is sent.
    fn send(&mut self, process: i32, kind: Kind, base: Option<i64>) {
        self.op += 1;
        self.record(process, kind, Phase::Invoke).token = base;
        self.record(process, kind, Phase::Commit).token = base;
    }

    fn answer(&mut self, process: i32, kind: Kind, phase: Phase, value: Option<i64>) -> &mut Record {
        let record = self.record(process, kind, phase);
        record.value = value;
        record
    }

    /// With its answer, and in the database.
    fn update(&mut self, process: i32, base: i64, n: i64) {
        self.send(process, Kind::Update, Some(base));
        self.event(process, Some(base), Some(base + 1), Some(n));
        self.answer(process, Kind::Update, Phase::Ok, Some(base + 1));
    }

    fn broken(&mut self) -> usize {
        let last = self.facts.versions.events.last().unwrap();
        let row = |version| Row { name: "page".to_owned(), version, n: last.n.unwrap() };
        self.facts.versions.rows.extend(last.after.map(row));
        self.judged()
    }

    fn judged(&self) -> usize {
        let mut report = Report::default();
        judge(&self.facts, &steps(&self.facts.records), &mut report);
        // And the whole judge asks this one.
        assert_eq!(check(&self.facts).broken("I10").len(), report.broken("I10").len());
        report.broken("I10").len()
    }
}

#[test]
fn updates_conflicts_and_looks_in_their_order_break_nothing() {
    let mut story = Story::begins();
    story.load(1, Some(10), Some(0));
    story.load(2, Some(10), Some(0));
    story.update(1, 10, 1);
    story.send(2, Kind::Update, Some(10));
    story.answer(2, Kind::Update, Phase::Fail, Some(11)).why = Some(CONFLICT.to_owned());
    story.load(2, Some(11), Some(1));
    story.update(2, 11, 2);
    assert_eq!(story.broken(), 0);
}

#[test]
fn what_is_not_answered_may_have_happened_once_or_not() {
    for (times, broken) in [(0, 0), (1, 0), (2, 1)] {
        let mut story = Story::begins();
        story.send(1, Kind::Update, None);
        for before in 10..10 + times {
            story.event(1, Some(before), Some(before + 1), Some(before - 9));
        }
        story.answer(1, Kind::Update, Phase::Unknown, None);
        assert_eq!(story.broken(), broken, "{times} times");
    }
    let mut story = Story::begins();
    story.op += 1;
    story.record(1, Kind::Update, Phase::Invoke);
    story.event(1, Some(10), Some(11), Some(1));
    assert_eq!(story.broken(), 1, "its COMMIT was not sent");
}

#[test]
fn what_was_acknowledged_is_there_and_what_failed_is_not() {
    let mut story = Story::begins();
    story.send(1, Kind::Update, Some(10));
    story.answer(1, Kind::Update, Phase::Ok, Some(11));
    assert_eq!(story.broken(), 2, "not there, and never seen");
    let mut story = Story::begins();
    story.send(1, Kind::Update, Some(10));
    story.event(1, Some(10), Some(11), Some(1));
    story.answer(1, Kind::Update, Phase::Fail, None);
    assert_eq!(story.broken(), 1);
    let mut story = Story::begins();
    story.op += 1;
    story.event(1, Some(10), Some(11), Some(1));
    assert_eq!(story.broken(), 1, "nobody made it");
}

// C41: both have read version 10.
#[test]
fn an_update_that_writes_over_another_one_is_seen() {
    let mut story = Story::begins();
    story.load(1, Some(10), Some(0));
    story.load(2, Some(10), Some(0));
    story.update(1, 10, 1);
    story.send(2, Kind::Update, Some(10));
    story.event(2, Some(11), Some(12), Some(1));
    story.answer(2, Kind::Update, Phase::Ok, Some(11));
    assert_eq!(story.broken(), 2, "one is lost, and the answer is not true");
}

#[test]
fn a_version_that_was_seen_replaced_is_not_seen_again() {
    let mut story = Story::begins();
    story.update(1, 10, 1);
    story.load(2, Some(10), Some(0));
    assert_eq!(story.broken(), 1, "after the answer");
    let mut story = Story::begins();
    story.send(1, Kind::Update, Some(10));
    story.event(1, Some(10), Some(11), Some(1));
    story.load(2, Some(11), Some(1));
    story.load(3, Some(10), Some(0));
    assert_eq!(story.broken(), 1, "after somebody has seen the next one");
    let mut story = Story::begins();
    story.send(1, Kind::Update, Some(10));
    story.event(1, Some(10), Some(11), Some(1));
    story.load(3, Some(10), Some(0));
    story.load(2, Some(11), Some(1));
    assert_eq!(story.broken(), 0, "before");
}

#[test]
fn nobody_sees_what_never_was_or_is_not_begun() {
    for (version, n) in [(9, 0), (11, 1), (10, 1)] {
        let mut story = Story::begins();
        story.load(1, Some(version), Some(n));
        assert_eq!(story.broken(), 1, "{version} with {n}");
    }
    let mut story = Story::begins();
    story.load(1, Some(11), Some(1));
    story.update(2, 10, 1);
    assert_eq!(story.broken(), 1, "it was not begun");
}

#[test]
fn a_conflict_is_with_a_later_version() {
    let mut story = Story::begins();
    story.send(1, Kind::Update, Some(10));
    story.answer(1, Kind::Update, Phase::Fail, Some(10)).why = Some(CONFLICT.to_owned());
    assert_eq!(story.broken(), 1);
    let mut story = Story::begins();
    story.send(1, Kind::Update, Some(10));
    story.answer(1, Kind::Update, Phase::Fail, Some(11)).why = Some(CONFLICT.to_owned());
    assert_eq!(story.broken(), 1, "there never was one");
}

// As it is where a version is used again: changed, and back, so that it seems that something else prevents the change.
#[test]
fn nothing_but_another_version_prevents_a_change() {
    let mut story = Story::begins();
    story.send(1, Kind::Update, Some(10));
    story.answer(1, Kind::Update, Phase::Fail, None).why = Some(SUPPRESSED.to_owned());
    assert_eq!(story.broken(), 1);
}

/// Deleted at 10, and another row in its place.
fn replaced(by: i64) -> Story {
    let mut story = Story::begins();
    story.load(1, Some(10), Some(0));
    story.send(1, Kind::Delete, Some(10));
    story.event(1, Some(10), None, None);
    story.answer(1, Kind::Delete, Phase::Ok, None);
    story.load(2, None, None);
    story.send(2, Kind::Insert, None);
    story.event(2, None, Some(by), Some(0));
    story.answer(2, Kind::Insert, Phase::Ok, Some(by));
    story
}

// C40
#[test]
fn a_version_is_not_used_again() {
    assert_eq!(replaced(100).broken(), 0);
    assert_eq!(replaced(9).broken(), 1);
    assert!(replaced(10).broken() >= 1);
}

#[test]
fn a_delete_is_made_once_and_by_who_says_so() {
    let mut story = replaced(100);
    story.send(3, Kind::Delete, Some(10));
    story.answer(3, Kind::Delete, Phase::Ok, None);
    assert_eq!(story.broken(), 2, "another one says so, who began when it was in place again");
    let mut story = Story::begins();
    story.send(1, Kind::Delete, Some(10));
    story.answer(1, Kind::Delete, Phase::Ok, None);
    assert_eq!(story.broken(), 2, "it is not there, and the row is not gone");
    let mut story = Story::begins();
    story.event(1, Some(10), None, None);
    assert_eq!(story.broken(), 1, "nobody did");
}

#[test]
fn a_row_is_gone_only_while_it_is() {
    let mut story = replaced(100);
    story.load(3, None, None);
    assert_eq!(story.broken(), 1, "it is there again, and that was acknowledged");
    let mut story = Story::begins();
    story.send(1, Kind::Update, Some(10));
    story.answer(1, Kind::Update, Phase::Fail, None).why = Some(GONE.to_owned());
    assert_eq!(story.broken(), 1, "it never was");
}

#[test]
fn the_rows_are_as_their_changes_have_left_them() {
    let mut story = Story::begins();
    story.update(1, 10, 1);
    assert_eq!(story.judged(), 1, "it is not there");
    story.facts.versions.rows.push(Row { name: "page".to_owned(), version: 11, n: 7 });
    assert_eq!(story.judged(), 1);
    story.facts.versions.rows[0].n = 1;
    assert_eq!(story.judged(), 0);
}
