//! The judge of the line: were those who waited served in the order in which they came, and did it go on?
//!
//! | rule | judged | broken when |
//! |---|---|---|
//! | I1 | a grant | its token is not larger than that of the grant before it |
//! | I12 | a grant, a release while others wait, an acquire that ended | a name was not granted anew within [`BLOCKED_FOR`]; most releases grant to nobody; it took longer than it may wait |
//! | I13 | a grant while others wait, a ticket | it overtook an older ticket that was served later; the ticket of the living was thrown away, or was drawn twice |
//!
//! **No false alarms of I13.** An older ticket may rightly be passed over: its owner is dead, or its waiter is giving
//! it back this moment (and that may yet be rolled back, by an ended session). Neither is guessed at from clocks and
//! locks. A ticket counts as overtaken only if *the caller that waited with it was given the lease under that
//! very ticket later*, as its history says: then its owner was alive at the instant of the overtaking, since dead is
//! final, and nobody was giving the ticket back, since only a caller that is gone does. That it stood in the line
//! at that instant, before the one that was served, is from the granting transaction itself. A ticket of the living
//! was thrown away only if its owner's heartbeat succeeded long after that, which no dead one's does.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use crate::checker::{Facts, Report};
use crate::controller::BLOCKED_FOR;
use crate::history::{Kind, Phase};
use crate::line::{Event, What};

/// How much longer than its bound an acquire may take while its process runs. Not a measurement.
const LATE: Duration = Duration::from_secs(3);

/// An owner that beats so long after an instant was alive at it, however long its transaction took.
const LONG_AFTER: i64 = 1_500_000;

pub(crate) fn judge(facts: &Facts, report: &mut Report) {
    if !facts.line.is_empty() {
        let line = Line::new(facts);
        line.tokens_rise(report);
        line.first_come_first_served(report);
        line.nobody_loses_its_place(report);
        line.goes_on(report);
        line.releases_hand_over(report);
        line.grants_are_heard(facts, report);
    }
    waits_end_in_time(facts, report);
    nothing_is_left_at_rest(facts, report);
}

struct Line<'a> {
    events: &'a [Event],
    /// By token, when the caller had it.
    received: HashMap<i64, u64>,
    /// The token that a grant id was granted, and the number of that event.
    granted: HashMap<&'a str, (i64, i64)>,
    /// The tickets that a grant id has drawn, in order.
    drawn: HashMap<&'a str, Vec<i64>>,
    /// Whose ticket it is.
    whose: HashMap<i64, &'a str>,
}

impl<'a> Line<'a> {
    fn new(facts: &'a Facts) -> Self {
        let got = facts.records.iter().filter(|r| r.kind == Kind::Acquire && r.phase == Phase::Ok);
        let received = got.filter_map(|record| Some((record.token?, record.at))).collect();
        let (mut granted, mut drawn, mut whose) = (HashMap::new(), HashMap::new(), HashMap::new());
        for event in &facts.line {
            match (event.what, event.ticket, event.token) {
                (What::Queued, Some(ticket), _) => {
                    drawn.entry(event.grant.as_str()).or_insert_with(Vec::new).push(ticket);
                    whose.insert(ticket, event.grant.as_str());
                }
                (What::Granted, _, Some(token)) => {
                    granted.insert(event.grant.as_str(), (token, event.seq));
                }
                _ => {}
            }
        }
        Self { events: &facts.line, received, granted, drawn, whose }
    }

    fn of(&self, what: What) -> impl Iterator<Item = &'a Event> {
        self.events.iter().filter(move |event| event.what == what)
    }

    /// The ticket under which a grant id was granted: the last that it drew; none if it never queued.
    fn served(&self, grant: &str) -> Option<i64> {
        self.drawn.get(grant)?.last().copied()
    }

    fn names(&self) -> HashMap<&'a str, Vec<&'a Event>> {
        let mut names: HashMap<_, Vec<_>> = HashMap::new();
        for event in self.of(What::Granted) {
            names.entry(event.name.as_str()).or_default().push(event);
        }
        names
    }

    fn tokens_rise(&self, report: &mut Report) {
        for grants in self.names().values() {
            for pair in grants.windows(2) {
                report.judged("I1");
                if pair[0].token >= pair[1].token {
                    report.break_rule("I1", format!("{:?}, then {:?}", pair[0], pair[1]));
                }
            }
        }
    }

    fn first_come_first_served(&self, report: &mut Report) {
        for event in self.of(What::Granted) {
            if event.line.is_empty() {
                continue;
            }
            report.judged("I13");
            let ticket = self.served(&event.grant);
            report.tally(match (event.to_head, event.via.as_str()) {
                (false, _) => "grants to the asker while others wait",
                (true, "acquire") => "hand-overs by an asker",
                (true, "release") => "hand-overs by a release",
                (true, "withdraw") => "hand-overs by a withdrawal",
                (true, "owner_stop") => "hand-overs by a stop",
                (true, _) => "hand-overs after an open fence",
            });
            // As it was drawn: a later ticket of the same grant id is another place in the line.
            let older = event.line.iter().filter(|older| ticket.is_none_or(|ticket| **older < ticket));
            for older in older {
                let Some(theirs) = self.whose.get(older) else { continue };
                let later = self.granted.get(theirs).filter(|(token, seq)| {
                    *seq > event.seq
                        && self.served(theirs) == Some(*older)
                        && self.received.contains_key(token)
                });
                if let Some((token, _)) = later {
                    report.break_rule(
                        "I13",
                        format!(
                            "{}: token {:?} went to ticket {ticket:?} (via {}) while the older {older} waited, served later with token {token}",
                            event.name, event.token, event.via
                        ),
                    );
                    break;
                }
            }
        }
    }

    fn nobody_loses_its_place(&self, report: &mut Report) {
        let mut last_beat: HashMap<&str, i64> = HashMap::new();
        for beat in self.of(What::Beat) {
            last_beat.insert(&beat.owner, beat.at);
        }
        let handed: HashSet<(i64, &str)> =
            self.of(What::Granted).map(|event| (event.xact, event.grant.as_str())).collect();
        for (grant, tickets) in &self.drawn {
            report.judged("I13");
            report.tally("tickets");
            let received =
                self.granted.get(grant).is_some_and(|(token, _)| self.received.contains_key(token));
            if tickets.len() > 1 && received {
                report.break_rule("I13", format!("a waiter had to queue again: tickets {tickets:?}"));
            }
        }
        let thrown =
            self.of(What::Left).filter(|e| e.to_head && !handed.contains(&(e.xact, e.grant.as_str())));
        for event in thrown {
            report.tally("tickets thrown away");
            if let Some(beat) = last_beat.get(event.owner.as_str())
                && *beat > event.at + LONG_AFTER
            {
                report.break_rule(
                    "I13",
                    format!(
                        "{}: ticket {:?} was thrown away (via {}) and its owner beat {:?} later",
                        event.name,
                        event.ticket,
                        event.via,
                        micros(beat - event.at)
                    ),
                );
            }
        }
    }

    /// Until everybody is told to end there is always somebody who wants each name.
    fn goes_on(&self, report: &mut Report) {
        let end = self.of(What::Quit).map(|event| event.seq).next().unwrap_or(i64::MAX);
        for grants in self.names().values() {
            for pair in grants.windows(2).filter(|pair| pair[1].seq < end) {
                report.judged("I12");
                let took = micros(pair[1].at - pair[0].at);
                report.slowest_turn = report.slowest_turn.max(took);
                if took > BLOCKED_FOR {
                    report.break_rule("I12", format!("{took:?} between {:?} and {:?}", pair[0], pair[1]));
                }
            }
        }
    }

    /// A release while others wait grants to one of them in the same transaction, unless all of them are dead or a
    /// fenced write is open: in four of five cases at least.
    fn releases_hand_over(&self, report: &mut Report) {
        let handed: HashSet<(i64, &str)> =
            self.of(What::Granted).map(|event| (event.xact, event.name.as_str())).collect();
        let released = self.of(What::Released).filter(|e| e.via == "release" && !e.line.is_empty());
        let (mut all, mut over) = (0_u64, 0_u64);
        for event in released {
            all += 1;
            over += u64::from(handed.contains(&(event.xact, event.name.as_str())));
        }
        report.judged("I12");
        if all >= 20 && over * 5 < all * 4 {
            report
                .break_rule("I12", format!("only {over} of {all} releases while others waited handed over"));
        }
    }

    /// A measurement: how long after a hand-over its waiter had it.
    fn grants_are_heard(&self, facts: &Facts, report: &mut Report) {
        for event in self.of(What::Granted).filter(|event| event.to_head) {
            let Some(received) = event.token.and_then(|token| self.received.get(&token)) else {
                report.tally("hand-overs to nobody any more");
                continue;
            };
            let granted = u64::try_from(event.at * 1_000 + facts.clock).unwrap_or(0);
            report.heard.push(Duration::from_nanos(received.saturating_sub(granted)));
        }
        report.heard.sort();
    }
}

/// An acquire ends when its time is over, give or take the time that its process stood still.
fn waits_end_in_time(facts: &Facts, report: &mut Report) {
    let mut began = HashMap::new();
    for record in facts.records.iter().filter(|record| record.kind == Kind::Acquire) {
        let key = (record.process, record.op);
        let bound = match record.phase {
            Phase::Invoke => record.value.map(|bound| began.insert(key, (record.at, bound))),
            _ => None,
        };
        let Some((from, bound)) = began.get(&key).copied().filter(|_| bound.is_none()) else { continue };
        // A try is bounded by the answer of the database.
        if record.phase == Phase::Invoke || bound == 0 {
            continue;
        }
        report.judged("I12");
        let stood = facts.stops.iter().filter(|stop| stop.process == record.process);
        let stood: u64 =
            stood.map(|stop| stop.woken.min(record.at).saturating_sub(stop.stood.max(from))).sum();
        let ran = Duration::from_nanos((record.at - from).saturating_sub(stood));
        let bound = Duration::from_millis(u64::try_from(bound).unwrap_or(0));
        if ran > bound + LATE {
            report.break_rule("I12", format!("waited {ran:?} instead of {bound:?}: {record:?}"));
        }
    }
}

/// I11: a process of which nobody waits or holds has no ticket and no grant, though its owner beats.
fn nothing_is_left_at_rest(facts: &Facts, report: &mut Report) {
    for record in facts.records.iter().filter(|record| record.kind == Kind::Rest) {
        report.judged("I11");
        if record.phase != Phase::Ok {
            let left = record.why.as_deref().unwrap_or_default();
            report.break_rule("I11", format!("left by process {}, at rest: {left}", record.process));
        }
    }
}

fn micros(micros: i64) -> Duration {
    Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}

#[cfg(test)]
#[path = "line_checker_tests.rs"]
mod tests;
