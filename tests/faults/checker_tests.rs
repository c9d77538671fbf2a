//! The judge judged: hand-made histories, each with one violation or none.

use super::*;

/// A history in the making; one name unless told otherwise, instants as given.
#[derive(Default)]
struct Story {
    facts: Facts,
    op: i64,
}

impl Story {
    fn record(&mut self, at: u64, process: i32, kind: Kind, phase: Phase, token: i64) -> &mut Record {
        let record = Record::new(process, self.op, kind, phase, "amber").token(token);
        self.facts.records.push(Record { at, ..record });
        self.facts.records.last_mut().unwrap()
    }

    fn grant(&mut self, process: i32, token: i64, began: u64, answered: u64) {
        self.op += 1;
        self.record(began, process, Kind::Acquire, Phase::Invoke, token).token = None;
        self.record(answered, process, Kind::Acquire, Phase::Ok, token);
    }

    fn look(&mut self, process: i32, token: i64, at: u64, yes: bool) {
        self.op += 1;
        let phase = if yes { Phase::Ok } else { Phase::Fail };
        self.record(at, process, Kind::Believe, phase, token).until = Some(at + 1);
    }

    /// COMMIT is sent at `commit`; the row is there if `written`.
    fn write(
        &mut self,
        process: i32,
        token: i64,
        value: i64,
        commit: u64,
        end: Option<Phase>,
        written: bool,
    ) {
        self.op += 1;
        self.record(commit - 5, process, Kind::Write, Phase::Invoke, token);
        self.record(commit, process, Kind::Write, Phase::Commit, token).value = Some(value);
        if let Some(end) = end {
            self.record(commit + 5, process, Kind::Write, end, token).value = Some(value);
        }
        if written {
            self.row(process, token, value);
        }
    }

    fn row(&mut self, process: i32, token: i64, value: i64) {
        self.facts.log.push(Row { name: "amber".into(), token, value, process, op: self.op });
    }

    /// How often each rule is broken, as `[I1, I2, I4, I5]`.
    fn judge(mut self, counter: i64) -> [usize; 4] {
        self.facts.records.sort_by_key(|record| record.at);
        self.facts.counters.insert("amber".into(), counter);
        let report = check(&self.facts);
        ["I1", "I2", "I4", "I5"].map(|rule| report.broken(rule).len())
    }
}

fn handed_over() -> Story {
    let mut story = Story::default();
    story.grant(1, 10, 0, 10);
    story.look(1, 10, 20, true);
    story.write(1, 10, 1, 40, Some(Phase::Ok), true);
    story.grant(2, 11, 100, 110);
    story.look(1, 10, 120, false);
    story.write(2, 11, 2, 140, Some(Phase::Ok), true);
    story
}

#[test]
fn a_hand_over_in_order_breaks_nothing() {
    assert_eq!(handed_over().judge(2), [0; 4]);
}

#[test]
fn a_token_that_goes_backwards_or_comes_twice_breaks_i1() {
    let mut story = handed_over();
    story.grant(3, 9, 200, 210);
    assert_eq!(story.judge(2), [1, 0, 0, 0]);
    let mut story = handed_over();
    story.grant(3, 11, 105, 115);
    assert_eq!(story.judge(2), [1, 0, 0, 0]);
    // Beside each other, in any order.
    let mut story = handed_over();
    story.grant(3, 9, 105, 300);
    assert_eq!(story.judge(2)[0], 1, "the first was answered before");
    let mut story = Story::default();
    story.grant(1, 11, 0, 100);
    story.grant(2, 10, 50, 60);
    assert_eq!(story.judge(0), [0; 4]);
}

#[test]
fn an_acknowledged_write_that_is_not_there_or_twice_breaks_i2() {
    let mut story = handed_over();
    story.write(2, 11, 3, 160, Some(Phase::Ok), false);
    assert_eq!(story.judge(2)[1], 1);
    let mut story = handed_over();
    story.row(2, 11, 2);
    assert!(story.judge(2)[1] > 0);
}

#[test]
fn a_write_that_failed_or_that_nobody_made_and_is_there_breaks_i2() {
    let mut story = handed_over();
    story.write(2, 11, 3, 160, Some(Phase::Fail), true);
    assert_eq!(story.judge(3)[1], 1);
    let mut story = handed_over();
    story.op += 1;
    story.row(7, 11, 3);
    assert_eq!(story.judge(3)[1], 1);
}

#[test]
fn an_unknown_commit_may_be_there_or_not() {
    for written in [true, false] {
        for end in [Some(Phase::Unknown), None] {
            let mut story = handed_over();
            story.write(2, 11, 3, 160, end, written);
            assert_eq!(story.judge(if written { 3 } else { 2 }), [0; 4]);
        }
    }
}

#[test]
fn a_lost_update_breaks_i2() {
    let mut story = handed_over();
    story.write(2, 11, 2, 160, Some(Phase::Ok), true);
    assert!(story.judge(2)[1] > 0);
    assert!(handed_over().judge(1)[1] > 0, "a counter that lacks one");
    let mut story = handed_over();
    story.write(2, 11, 4, 160, Some(Phase::Ok), true);
    assert!(story.judge(3)[1] > 0, "a gap");
}

#[test]
fn a_row_out_of_token_order_breaks_i2() {
    let mut story = handed_over();
    // Its COMMIT was sent before the later grant was answered, and came to be after the later holder's write.
    story.write(1, 10, 3, 105, Some(Phase::Ok), true);
    assert_eq!(story.judge(3)[1], 1);
}

#[test]
fn a_commit_sent_after_a_later_grant_breaks_i2_even_if_unanswered() {
    for end in [Some(Phase::Ok), None] {
        let mut story = Story::default();
        story.grant(1, 10, 0, 10);
        story.grant(2, 11, 100, 110);
        story.write(1, 10, 1, 150, end, true);
        assert_eq!(story.judge(1), [0, 1, 0, 0]);
    }
}

#[test]
fn belief_after_a_later_grant_breaks_i4() {
    let mut story = handed_over();
    story.look(1, 10, 115, true);
    assert_eq!(story.judge(2), [0, 0, 1, 0]);
    // To be relied on beyond it: the process need not look again.
    let mut story = handed_over();
    story.look(1, 10, 50, true);
    story.facts.records.last_mut().unwrap().value = Some(61);
    assert_eq!(story.judge(2), [0, 0, 1, 0]);
    // Unless it has given it back.
    let mut story = handed_over();
    story.look(1, 10, 50, true);
    story.facts.records.last_mut().unwrap().value = Some(61);
    story.op += 1;
    story.record(55, 1, Kind::End, Phase::Invoke, 10);
    assert_eq!(story.judge(2), [0; 4]);
    // While the later grant was on its way it may still have been so.
    let mut story = handed_over();
    story.look(1, 10, 105, true);
    assert_eq!(story.judge(2), [0; 4]);
}

#[test]
fn belief_beyond_the_signal_or_a_refused_fence_breaks_i4() {
    for remaining in [60, 5] {
        let broken = usize::from(remaining == 60);
        let mut story = handed_over();
        story.look(1, 10, 40, true);
        story.facts.records.last_mut().unwrap().value = Some(remaining);
        story.op += 1;
        story.record(90, 1, Kind::Lost, Phase::Ok, 10);
        assert_eq!(story.judge(2), [0, 0, broken, 0]);
        let mut story = handed_over();
        story.look(1, 10, 40, true);
        story.facts.records.last_mut().unwrap().value = Some(remaining);
        story.op += 1;
        story.record(80, 1, Kind::Write, Phase::Invoke, 10);
        story.record(90, 1, Kind::Write, Phase::Fail, 10).why = Some(format!("{REJECTED}: expired"));
        assert_eq!(story.judge(2), [0, 0, broken, 0]);
    }
}

/// Process 1 holds and is stopped from 1 to 2 s, with a ttl of 100 ms.
fn stopped() -> Story {
    let mut story = Story::default();
    story.grant(1, 10, 0, 10);
    let (stood, woken) = (1_000_000_000, 2_000_000_000);
    story.facts.stops.push(Stop {
        process: 1,
        stood,
        woken,
        ttl: Duration::from_millis(100),
        outage: Outage::Stood,
    });
    story.op += 1;
    story
}

#[test]
fn belief_after_a_long_stop_breaks_i5() {
    let mut story = stopped();
    story.record(2_000_100_000, 1, Kind::Lost, Phase::Ok, 10);
    assert_eq!(story.judge(0), [0; 4]);
    let mut story = stopped();
    story.record(2_000_100_000, 1, Kind::Lost, Phase::Ok, 10);
    story.look(1, 10, 2_000_050_000, true);
    assert_eq!(story.judge(0), [0, 0, 0, 1]);
}

#[test]
fn no_signal_after_a_long_stop_breaks_i5() {
    let mut story = stopped();
    story.look(1, 10, 9_000_000_000, false);
    assert_eq!(story.judge(0), [0, 0, 0, 1]);
    let mut story = stopped();
    story.record(9_000_000_000, 1, Kind::Lost, Phase::Ok, 10);
    assert_eq!(story.judge(0), [0, 0, 0, 1], "too late");
    // Killed soon after: it had no time.
    let mut story = stopped();
    story.look(1, 10, 2_000_000_100, false);
    assert_eq!(story.judge(0), [0; 4]);
}

#[test]
fn what_the_twin_lost_is_counted() {
    let mut story = handed_over();
    for value in [1, 2, 2] {
        story.op += 1;
        story.record(200, 1, Kind::Twin, Phase::Invoke, 10);
        story.record(201, 1, Kind::Twin, Phase::Ok, 10).value = Some(value);
    }
    story.facts.twins.insert("amber".into(), 2);
    assert_eq!(check(&story.facts).twin_lost, 1);
}
