//! The judge of locks judged: hand-made histories, each with one violation or none.

use super::*;
use crate::checker::{Stop, check};
use crate::history::Record;

/// A lock; instants in milliseconds, and an answer is trusted for a second.
struct Story {
    facts: Facts,
    op: i64,
}

const MILLI: u64 = 1_000_000;
const RELEASED: &str = "Ok(true)";

impl Story {
    fn new() -> Self {
        let facts = Facts { trust: Some(Duration::from_secs(1)), ..Facts::default() };
        Self { facts, op: 0 }
    }

    fn calm(mut self) -> Self {
        self.facts.calm = true;
        self
    }

    fn record(&mut self, at: u64, process: i32, kind: Kind, phase: Phase, token: i64) -> &mut Record {
        let record = Record::new(process, self.op, kind, phase, "amber").token(token);
        self.facts.records.push(Record { at: at * MILLI, ..record });
        self.facts.records.last_mut().unwrap()
    }

    /// Asked for a millisecond before the answer. The process has the number of its hold.
    fn grant(&mut self, hold: i32, answered: u64) {
        self.op += 1;
        self.record(answered - 1, hold, Kind::Acquire, Phase::Invoke, 0).token = None;
        self.record(answered, hold, Kind::Acquire, Phase::Ok, hold.into());
    }

    fn grant_shared(&mut self, hold: i32, answered: u64) {
        self.grant(hold, answered);
        self.facts.records.last_mut().unwrap().why = Some(SHARED.to_owned());
    }

    fn look(&mut self, hold: i32, at: u64, yes: bool) {
        self.op += 1;
        let phase = if yes { Phase::Ok } else { Phase::Fail };
        self.record(at, hold, Kind::Believe, phase, hold.into());
    }

    fn lost(&mut self, hold: i32, at: u64) {
        self.op += 1;
        self.record(at, hold, Kind::Lost, Phase::Ok, hold.into());
    }

    fn release(&mut self, hold: i32, at: u64, answer: &str) {
        self.op += 1;
        self.record(at, hold, Kind::End, Phase::Invoke, hold.into());
        self.record(at + 1, hold, Kind::End, Phase::Ok, hold.into()).why = Some(answer.to_owned());
    }

    fn stop(&mut self, process: i32, stood: u64, woken: u64) {
        let (stood, woken, ttl, outage) =
            (stood * MILLI, woken * MILLI, Duration::from_secs(1), Outage::Stood);
        self.facts.stops.push(Stop { process, stood, woken, ttl, outage });
    }

    /// How often each rule is broken, as `[I4, I5, I12]`.
    fn judge(mut self) -> [usize; 3] {
        self.facts.records.sort_by_key(|record| record.at);
        let report = check(&self.facts);
        assert!(!report.verdicts.contains_key("I1"), "what has tokens is judged elsewhere");
        ["I4", "I5", "I12"].map(|rule| report.broken(rule).len())
    }
}

#[test]
fn one_after_the_other_breaks_nothing() {
    let mut story = Story::new().calm();
    for (hold, at) in [(1, 10), (2, 20), (3, 30)] {
        story.grant(hold, at);
        story.look(hold, at + 5, true);
        story.release(hold, at + 8, RELEASED);
    }
    assert_eq!(story.judge(), [0, 0, 0]);
}

#[test]
fn two_at_once_break_i4_unless_both_are_shared() {
    for (first, second, broken) in [(false, false, 1), (true, false, 1), (false, true, 1), (true, true, 0)] {
        for calm in [false, true] {
            let mut story = if calm { Story::new().calm() } else { Story::new() };
            for (hold, at, is_shared) in [(1, 10, first), (2, 20, second)] {
                if is_shared { story.grant_shared(hold, at) } else { story.grant(hold, at) }
            }
            story.release(1, 40, RELEASED);
            story.release(2, 50, RELEASED);
            assert_eq!(story.judge(), [broken, 0, 0], "{first} {second}");
        }
    }
}

// Also of one process: they share a session.
#[test]
fn two_tasks_of_one_process_at_once_break_i4() {
    let mut story = Story::new();
    story.grant(1, 10);
    story.grant(2, 20);
    story.release(1, 40, RELEASED);
    story.release(2, 50, RELEASED);
    for record in &mut story.facts.records {
        record.process = 1;
    }
    assert_eq!(story.judge(), [1, 0, 0]);
}

#[test]
fn what_is_dropped_excludes_as_well_where_nothing_is_lost() {
    for (calm, broken) in [(true, 1), (false, 0)] {
        let mut story = if calm { Story::new().calm() } else { Story::new() };
        story.grant(1, 10);
        story.grant(2, 20);
        story.op += 1;
        story.record(40, 1, Kind::End, Phase::Invoke, 1).why = Some("drop".to_owned());
        story.release(2, 50, RELEASED);
        assert_eq!(story.judge(), [broken, 0, 0]);
    }
}

// It was lost, and another one was granted, before the first one was told.
#[test]
fn who_has_lost_it_may_believe_for_as_long_as_the_trust_and_no_longer() {
    for (last_yes, broken) in [(1_000, 0), (1_030, 1)] {
        let mut story = Story::new();
        story.grant(1, 10);
        story.grant(2, 20);
        story.look(1, last_yes, true);
        story.lost(1, 1_100);
        story.release(1, 1_110, "Ok(false)");
        story.release(2, 1_200, RELEASED);
        assert_eq!(story.judge(), [0, broken, 0], "{last_yes}");
    }
}

// Nobody can tell which of them was first: that one of the two was lost is enough.
#[test]
fn of_two_asked_for_at_once_either_may_be_the_one_that_was_lost() {
    for (second, broken) in [(RELEASED, 1), ("Ok(false)", 0)] {
        let mut story = Story::new();
        story.grant(1, 10);
        story.grant(2, 11);
        story.facts.records.iter_mut().filter(|r| r.phase == Phase::Invoke).for_each(|r| r.at = MILLI);
        story.look(2, 15, true);
        story.release(1, 40, RELEASED);
        story.release(2, 50, second);
        assert_eq!(story.judge(), [broken, 0, 0], "{second}");
    }
}

#[test]
fn a_yes_after_the_signal_breaks_i4() {
    let mut story = Story::new();
    story.grant(1, 10);
    story.lost(1, 20);
    story.look(1, 21, false);
    story.look(1, 22, true);
    assert_eq!(story.judge(), [1, 0, 0]);
}

#[test]
fn no_signal_of_a_loss_breaks_i5_unless_the_process_had_not_the_time() {
    for (signal, stopped, last, broken) in [
        (Some(1_500), None, 9_000, 0),
        (Some(3_100), None, 9_000, 1),
        (None, None, 9_000, 1),
        (None, None, 2_000, 0),
        (None, Some((1_500, 8_000)), 9_000, 0),
    ] {
        let mut story = Story::new();
        story.grant(1, 10);
        story.grant(2, 20);
        story.release(2, 25, RELEASED);
        story.look(1, last, false);
        if let Some(at) = signal {
            story.lost(1, at);
        }
        if let Some((stood, woken)) = stopped {
            story.stop(1, stood, woken);
            story.lost(1, woken + 100);
        }
        assert_eq!(story.judge(), [0, broken, 0], "{signal:?} {stopped:?} {last}");
    }
}

// The server keeps the lock of a process that stands still, so that nobody else need have it.
#[test]
fn who_stood_still_for_longer_than_the_trust_knows_at_once_and_is_told() {
    for (woken, yes, signal, broken) in [
        (2_000, None, Some(2_100), 0),
        (2_000, Some(2_001), Some(2_100), 1),
        (2_000, None, None, 1),
        (500, Some(501), None, 0),
    ] {
        let mut story = Story::new();
        story.grant(1, 10);
        story.look(1, 90, true);
        story.stop(1, 100, woken);
        if let Some(at) = yes {
            story.look(1, at, true);
        }
        if let Some(at) = signal {
            story.lost(1, at);
        }
        story.look(1, 9_000, false);
        assert_eq!(story.judge(), [0, broken, 0], "{woken} {yes:?} {signal:?}");
    }
}

#[test]
fn a_loss_where_nothing_can_be_lost_breaks_i12() {
    let mut story = Story::new().calm();
    story.grant(1, 10);
    story.release(1, 20, "Ok(false)");
    assert_eq!(story.judge(), [0, 0, 1]);
    let mut story = Story::new().calm();
    story.grant(1, 10);
    story.lost(1, 20);
    assert_eq!(story.judge(), [0, 0, 1]);
}
