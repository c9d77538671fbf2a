//! The judge of slots judged: hand-made histories, each with one violation or none.

use super::*;
use crate::checker::{check, steps};
use crate::history::Record;

const ALONE: &str = "slots alone 1000 10 5";
const EVERY: &str = "slots together 0 1000 all";

/// A schedule with slots at 1000, 1010 … 1040; each record takes a second.
struct Story {
    facts: Facts,
    at: u64,
    op: i64,
}

impl Story {
    /// All that was due by 1020 is to be done.
    fn new() -> Self {
        let mut facts = Facts::default();
        facts.slotted.known.push(Known::new(ALONE.to_owned(), 1_005));
        facts.slotted.until = 1_020;
        Self { facts, at: 0, op: 0 }
    }

    fn record(&mut self, process: i32, kind: Kind, phase: Phase, slot: i64, token: i64) {
        self.at += 1_000_000_000;
        let record = Record::new(process, self.op, kind, phase, &format!("schedule/{ALONE}/{slot}"));
        self.facts.records.push(Record { at: self.at, ..record.token(token) });
    }

    fn begin(&mut self, process: i32, slot: i64, token: i64) {
        self.op += 1;
        self.record(process, Kind::Acquire, Phase::Invoke, slot, token);
        self.record(process, Kind::Acquire, Phase::Ok, slot, token);
    }

    fn complete(&mut self, process: i32, slot: i64, token: i64) {
        self.op += 1;
        self.record(process, Kind::Complete, Phase::Invoke, slot, token);
        self.record(process, Kind::Complete, Phase::Commit, slot, token);
        self.effect(ALONE, process, slot);
        self.record(process, Kind::Complete, Phase::Ok, slot, token);
    }

    fn effect(&mut self, name: &str, process: i32, slot: i64) {
        let (name, op, at) = (name.to_owned(), self.op, slot + 1);
        self.facts.slotted.effects.push(Effect { name, slot, process, op, at });
    }

    /// For so many seconds.
    fn believe(&mut self, process: i32, slot: i64, token: i64, seconds: i64) {
        self.op += 1;
        self.record(process, Kind::Believe, Phase::Ok, slot, token);
        let last = self.facts.records.last_mut().unwrap();
        last.value = Some(seconds * 1_000_000_000);
    }

    fn broken(&self) -> usize {
        let mut report = Report::default();
        judge(&self.facts, &steps(&self.facts.records), &mut report);
        // And the whole judge asks this one.
        assert_eq!(check(&self.facts).broken("I7").len(), report.broken("I7").len());
        report.broken("I7").len()
    }
}

/// The first three, one after the other.
fn in_order() -> Story {
    let mut story = Story::new();
    for (slot, token) in [(1_000, 1), (1_010, 2), (1_020, 3)] {
        let process = i32::try_from(token % 2).unwrap();
        story.begin(process, slot, token);
        // For longer than it takes: with the COMMIT it is over.
        story.believe(process, slot, token, 60);
        story.complete(process, slot, token);
    }
    story
}

#[test]
fn each_slot_run_once_in_order_breaks_nothing() {
    assert_eq!(in_order().broken(), 0);
    let mut more = in_order();
    more.begin(1, 1_030, 4);
    more.complete(1, 1_030, 4);
    assert_eq!(more.broken(), 0, "one that came to be due meanwhile may be done or not");
}

#[test]
fn a_slot_left_out_and_a_slot_run_twice_are_seen() {
    let mut story = in_order();
    story.facts.slotted.effects.remove(1);
    assert_eq!(story.broken(), 1);
    assert_eq!(story.facts.slotted.missing().map(|(_, slot)| slot).collect::<Vec<_>>(), [1_010]);
    for slot in [1_020, 1_030] {
        let mut story = in_order();
        for token in [4, 5] {
            story.begin(1, slot, token);
            story.complete(1, slot, token);
        }
        assert_eq!(story.broken(), 1, "{slot}");
    }
}

// C34: taken from now.
#[test]
fn what_is_no_slot_is_seen() {
    for slot in [990, 1_001, 1_050] {
        let mut story = in_order();
        story.effect(ALONE, 1, slot);
        assert_eq!(story.broken(), 1, "{slot}");
    }
    let mut story = in_order();
    story.effect(EVERY, 1, 1_000);
    assert_eq!(story.broken(), 1, "of a schedule that nobody has looked at");
}

#[test]
fn what_comes_every_so_often_counts_from_the_first_look() {
    let mut story = in_order();
    story.facts.slotted.known.push(Known::new(EVERY.to_owned(), 1_000));
    assert_eq!(story.broken(), 0, "that one was due when it was looked at");
    story.effect(EVERY, 1, 1_000);
    assert_eq!(story.broken(), 1);
    let mut story = in_order();
    story.facts.slotted.known.push(Known::new(EVERY.to_owned(), 999));
    assert_eq!(story.broken(), 1, "and here it is missing");
    story.effect(EVERY, 1, 1_000);
    assert_eq!(story.broken(), 0);
}

#[test]
fn what_is_done_before_it_is_due_is_seen() {
    let mut story = in_order();
    story.facts.slotted.effects[2].at = 1_020;
    assert_eq!(story.broken(), 0);
    story.facts.slotted.effects[2].at = 1_019;
    assert_eq!(story.broken(), 1);
}

#[test]
fn one_beside_another_is_seen_by_belief_and_by_what_is_committed() {
    // It relies on the first one when the other one has begun the second.
    let mut story = Story::new();
    story.facts.slotted.until = 0;
    story.begin(1, 1_000, 1);
    story.believe(1, 1_000, 1, 2);
    story.begin(2, 1_010, 2);
    assert_eq!(story.broken(), 0, "not for so long");
    story.facts.records[2].value = Some(3_000_000_000);
    assert_eq!(story.broken(), 1);
    // Given back before.
    let mut story = Story::new();
    story.facts.slotted.until = 0;
    story.begin(1, 1_000, 1);
    story.believe(1, 1_000, 1, 60);
    story.op += 1;
    story.record(1, Kind::End, Phase::Invoke, 1_000, 1);
    story.begin(2, 1_010, 2);
    assert_eq!(story.broken(), 0);
    // It believes nothing, and commits.
    story.complete(1, 1_000, 1);
    assert_eq!(story.broken(), 1);
    // Where nobody has asked for one at a time, both may.
    for record in &mut story.facts.records {
        record.name = record.name.replace("alone", "together");
    }
    for effect in &mut story.facts.slotted.effects {
        effect.name = effect.name.replace("alone", "together");
    }
    story.facts.slotted.known[0] = Known::new(ALONE.replace("alone", "together"), 0);
    assert_eq!(story.broken(), 0);
}
