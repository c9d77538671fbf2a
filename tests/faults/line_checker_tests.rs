//! The judge of the line judged: hand-made lines, each with one violation or none.

use super::*;
use crate::history::Record;

/// One name; each event takes a millisecond, each grant is a transaction of its own.
#[derive(Default)]
struct Story {
    facts: Facts,
    seq: i64,
    line: Vec<i64>,
}

impl Story {
    fn event(&mut self, what: What, grant: &str) -> &mut Event {
        self.seq += 1;
        self.facts.line.push(Event {
            seq: self.seq,
            at: self.seq * 1_000,
            what,
            name: "amber".into(),
            grant: grant.into(),
            owner: format!("owner of {grant}"),
            ticket: None,
            token: None,
            xact: self.seq,
            via: "release".into(),
            to_head: false,
            line: Vec::new(),
        });
        self.facts.line.last_mut().unwrap()
    }

    fn queue(&mut self, grant: &str, ticket: i64) {
        self.event(What::Queued, grant).ticket = Some(ticket);
        self.line.push(ticket);
    }

    /// Served from the line; to a caller that is there.
    fn serve(&mut self, grant: &str, ticket: i64, token: i64) {
        self.line.retain(|other| *other != ticket);
        let line = self.line.clone();
        let left = self.event(What::Left, grant);
        (left.ticket, left.to_head) = (Some(ticket), true);
        let granted = self.event(What::Granted, grant);
        (granted.token, granted.to_head, granted.line) = (Some(token), true, line);
        granted.xact -= 1;
        self.receive(token);
    }

    fn receive(&mut self, token: i64) {
        let at = u64::try_from(self.seq * 1_000_000).unwrap();
        let record = Record::new(1, token, Kind::Acquire, Phase::Ok, "amber").token(token);
        self.facts.records.push(Record { at, ..record });
    }

    /// How often each rule is broken, as `[I1, I11, I12, I13]`.
    fn judge(&self) -> [usize; 4] {
        let mut report = Report::default();
        judge(&self.facts, &mut report);
        ["I1", "I11", "I12", "I13"].map(|rule| report.broken(rule).len())
    }
}

fn two_wait() -> Story {
    let mut story = Story::default();
    story.queue("a", 1);
    story.queue("b", 2);
    story
}

#[test]
fn a_line_in_order_breaks_nothing() {
    let mut story = two_wait();
    story.serve("a", 1, 10);
    story.serve("b", 2, 11);
    assert_eq!(story.judge(), [0; 4]);
}

#[test]
fn an_older_ticket_that_is_served_later_was_overtaken() {
    let mut story = two_wait();
    story.serve("b", 2, 10);
    story.serve("a", 1, 11);
    assert_eq!(story.judge(), [0, 0, 0, 1]);
    // By one that never queued.
    let mut story = two_wait();
    let line = story.line.clone();
    let granted = story.event(What::Granted, "c");
    (granted.token, granted.line) = (Some(9), line);
    story.serve("a", 1, 10);
    assert_eq!(story.judge(), [0, 0, 0, 1]);
}

#[test]
fn one_that_was_never_served_or_whose_caller_was_gone_was_not_overtaken() {
    let mut story = two_wait();
    story.serve("b", 2, 10);
    assert_eq!(story.judge(), [0; 4]);
    let mut story = two_wait();
    story.serve("b", 2, 10);
    story.serve("a", 1, 11);
    story.facts.records.retain(|record| record.token != Some(11));
    assert_eq!(story.judge(), [0; 4]);
}

#[test]
fn a_ticket_of_the_living_that_is_thrown_away_breaks_i13() {
    for (beats, broken) in [(true, 1), (false, 0)] {
        let mut story = two_wait();
        let left = story.event(What::Left, "a");
        (left.ticket, left.to_head) = (Some(1), true);
        story.line.remove(0);
        story.serve("b", 2, 10);
        story.seq += 2_000;
        if beats {
            story.event(What::Beat, "a");
        }
        assert_eq!(story.judge(), [0, 0, 0, broken]);
    }
}

#[test]
fn a_waiter_that_has_to_queue_again_breaks_i13() {
    let mut story = two_wait();
    let left = story.event(What::Left, "a");
    (left.ticket, left.to_head) = (Some(1), true);
    story.line.remove(0);
    story.queue("a", 3);
    story.serve("b", 2, 10);
    story.serve("a", 3, 11);
    assert_eq!(story.judge(), [0, 0, 0, 1]);
}

#[test]
fn a_token_that_falls_breaks_i1() {
    let mut story = two_wait();
    story.serve("a", 1, 11);
    story.serve("b", 2, 10);
    assert_eq!(story.judge(), [1, 0, 0, 0]);
}

#[test]
fn a_name_that_is_not_granted_for_long_breaks_i12_until_everybody_ends() {
    for (quit, broken) in [(false, 1), (true, 0)] {
        let mut story = two_wait();
        story.serve("a", 1, 10);
        if quit {
            story.event(What::Quit, "").name.clear();
        }
        story.seq += 10_000;
        story.serve("b", 2, 11);
        assert_eq!(story.judge(), [0, 0, broken, 0]);
    }
}

#[test]
fn releases_that_grant_to_nobody_break_i12() {
    for (handing, broken) in [(true, 0), (false, 1)] {
        let mut story = Story::default();
        for round in 0..30 {
            story.queue(&round.to_string(), round);
        }
        for round in 0..30 {
            let line = story.line.clone();
            story.event(What::Released, "x").line = line;
            let xact = story.seq;
            story.serve(&round.to_string(), round, 100 + round);
            if handing {
                story.facts.line.last_mut().unwrap().xact = xact;
            }
        }
        let mut report = Report::default();
        judge(&story.facts, &mut report);
        assert_eq!(report.broken("I12").len(), broken);
    }
}

#[test]
fn an_acquire_beyond_its_time_breaks_i12_unless_its_process_stood() {
    for (stood, broken) in [(false, 1), (true, 0)] {
        let mut story = two_wait();
        let record = Record::new(1, 1, Kind::Acquire, Phase::Invoke, "amber").value(100);
        story.facts.records.push(Record { at: 0, ..record });
        let record = Record::new(1, 1, Kind::Acquire, Phase::Fail, "amber");
        story.facts.records.push(Record { at: 5_000_000_000, ..record });
        if stood {
            let ttl = Duration::from_secs(1);
            let (stood, woken) = (1_000_000_000, 4_500_000_000);
            story.facts.stops.push(crate::checker::Stop {
                process: 1,
                stood,
                woken,
                ttl,
                outage: crate::checker::Outage::Stood,
            });
        }
        assert_eq!(story.judge(), [0, 0, broken, 0]);
    }
}

#[test]
fn what_is_left_at_rest_breaks_i11() {
    let mut story = two_wait();
    let record = Record::new(1, 1, Kind::Rest, Phase::Fail, "");
    story.facts.records.push(record.why("a ticket for amber"));
    assert_eq!(story.judge(), [0, 1, 0, 0]);
}
