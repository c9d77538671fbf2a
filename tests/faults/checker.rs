//! The judge: given what the processes say they did, what the controller did to them, and what the database
//! holds in the end, which promises were broken?
//!
//! Tokens rise, so no search is needed: everything is a comparison of instants and numbers. All instants are of
//! one clock. A step took effect somewhere between its first and its last record, so one step is *after*
//! another only if it began after the other's answer; each rule asks only that.
//!
//! | rule | judged | broken when |
//! |---|---|---|
//! | I1 | a grant | it began after another's answer and its token is not larger; or a token is there twice |
//! | I2 | a write, a row | acknowledged and not once in the log; in the log and known to have failed, or by nobody; values not 1 … n; tokens fall; COMMIT sent after the answer of a later grant, and there |
//! | I4 | a look at `is_held` | "yes", asked, or still to be relied on, after the answer of a later grant, or after being told of the loss by the signal or a fence |
//! | I5 | a stop or a cut longer than the trust | "yes" after it; or no signal within [`SIGNAL_WITHIN`]; or a dead owner lives again |
//! | I12 | where nothing may be lost, a grant | its loss is signalled |
//!
//! I6 of claims is judged in `claim_checker`, I7 of slots in `slot_checker`, I8 and I14, of terms and permits, in
//! `held_checker`, I10 of versions in `version_checker`.
//!
//! I12 and I13 of the line are judged in `line_checker`, I4 and I5 of locks in `lock_checker`.
//!
//! I3 (the twin loses updates), I11 (hygiene) and I12 (progress) are counted by the controller and by the tests.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use crate::claim_checker::{self, Claimed};
use crate::held_checker;
use crate::history::{CANCELLED, Kind, Phase, REJECTED, Record, TIMED_OUT};
use crate::line::Event;
use crate::line_checker;
use crate::lock_checker;
use crate::slot_checker::{self, Slotted};
use crate::version_checker::{self, Versions};

/// How late the signal of a loss may come after the process runs again. Not a measurement: one is reported.
pub(crate) const SIGNAL_WITHIN: Duration = Duration::from_secs(2);

/// A row of the table that only fenced transactions write.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) token: i64,
    pub(crate) value: i64,
    pub(crate) process: i32,
    pub(crate) op: i64,
}

/// A time in which a process did not run, from when it was seen to stand still to just before it was woken; or in
/// which it could not reach the server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stop {
    pub(crate) process: i32,
    pub(crate) stood: u64,
    pub(crate) woken: u64,
    pub(crate) ttl: Duration,
    pub(crate) outage: Outage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outage {
    /// It did not run.
    Stood,
    /// It ran, and reached nobody.
    CutOff,
}

impl Stop {
    /// From when on the process has to know that it has lost what it held, if the outage was long enough: when
    /// it runs again, or by its own clock while it is cut off.
    pub(crate) fn known_from(&self) -> Option<u64> {
        let margin = (self.ttl / 10).max(Duration::from_millis(5));
        let trust = match self.outage {
            Outage::Stood => self.ttl.saturating_sub(margin),
            Outage::CutOff => self.ttl,
        };
        if Duration::from_nanos(self.woken.saturating_sub(self.stood)) < trust {
            return None;
        }
        Some(match self.outage {
            Outage::Stood => self.woken,
            // A heartbeat may just have been answered; the margin is enough for that.
            Outage::CutOff => self.stood + u64::try_from(self.ttl.as_nanos()).unwrap_or(u64::MAX),
        })
    }
}

/// All that is judged.
#[derive(Clone, Debug, Default)]
pub(crate) struct Facts {
    /// In the order of their instants.
    pub(crate) records: Vec<Record>,
    pub(crate) stops: Vec<Stop>,
    pub(crate) log: Vec<Row>,
    pub(crate) counters: BTreeMap<String, i64>,
    pub(crate) twins: BTreeMap<String, i64>,
    /// What the database noted of the queues, where there were any: judged in `line_checker`.
    pub(crate) line: Vec<Event>,
    /// How many nanoseconds the clock of the records is ahead of the line's.
    pub(crate) clock: i64,
    /// What became of claims, where there were any: judged in `claim_checker`.
    pub(crate) claimed: Claimed,
    /// What became of slots, where there were any: judged in `slot_checker`.
    pub(crate) slotted: Slotted,
    /// What became of versioned rows, where there were any: judged in `version_checker`.
    pub(crate) versions: Versions,
    /// Owners that were found dead and lived on.
    pub(crate) revived: Vec<String>,
    /// When a primary was left with commits that its successor has not.
    pub(crate) failed_over: Option<u64>,
    /// Nothing happened of which anything could be lost.
    pub(crate) calm: bool,
    /// Where grants are session-level locks, for how long an answer of their session is trusted at most.
    pub(crate) trust: Option<Duration>,
}

/// What one rule came to.
#[derive(Clone, Debug, Default)]
pub(crate) struct Verdict {
    pub(crate) judged: u64,
    pub(crate) broken: Vec<String>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Report {
    pub(crate) verdicts: BTreeMap<&'static str, Verdict>,
    pub(crate) counts: BTreeMap<&'static str, u64>,
    /// Acknowledged increments of the twin that its final value lacks, by name.
    pub(crate) twin_lost: i64,
    pub(crate) slowest_signal: Duration,
    /// Between two grants of one name.
    pub(crate) slowest_turn: Duration,
    /// From each hand-over to its caller, sorted.
    pub(crate) heard: Vec<Duration>,
}

impl Report {
    pub(crate) fn broken(&self, rule: &str) -> &[String] {
        self.verdicts.get(rule).map_or(&[], |verdict| &verdict.broken)
    }

    pub(crate) fn count(&self, what: &str) -> u64 {
        self.counts.get(what).copied().unwrap_or(0)
    }

    pub(crate) fn judged(&mut self, rule: &'static str) {
        self.verdicts.entry(rule).or_default().judged += 1;
    }

    pub(crate) fn break_rule(&mut self, rule: &'static str, why: String) {
        self.verdicts.entry(rule).or_default().broken.push(why);
    }

    pub(crate) fn tally(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }
}

/// The records of one step, put together.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub(crate) process: i32,
    pub(crate) op: i64,
    pub(crate) kind: Kind,
    pub(crate) name: String,
    pub(crate) token: Option<i64>,
    pub(crate) value: Option<i64>,
    pub(crate) began: u64,
    pub(crate) commit: Option<u64>,
    pub(crate) ended: Option<(u64, Phase)>,
    pub(crate) why: String,
}

impl Step {
    /// By a fence, or because it is known to be lost.
    fn is_rejected(&self) -> bool {
        self.kind == Kind::Write && self.is(Phase::Fail) && self.why.starts_with(REJECTED)
    }

    pub(crate) fn is(&self, phase: Phase) -> bool {
        self.ended.is_some_and(|(_, ended)| ended == phase)
    }
}

pub(crate) fn check(facts: &Facts) -> Report {
    let mut report = Report::default();
    let steps = steps(&facts.records);
    let grants = grants(&steps);
    if let Some(trust) = facts.trust {
        lock_checker::judge(facts, &steps, trust, &mut report);
        nothing_is_lost_without_a_reason(facts, &grants, &mut report);
        line_checker::judge(facts, &mut report);
        for step in &steps {
            count(step, &mut report);
        }
        return report;
    }
    tokens_rise(&grants, &mut report);
    writes_are_there_once(facts, &steps, &mut report);
    log_is_in_order(facts, &mut report);
    nothing_after_a_later_grant(facts, &steps, &grants, &mut report);
    holders_know_in_time(facts, &grants, &mut report);
    dead_is_final(facts, &mut report);
    nothing_is_lost_without_a_reason(facts, &grants, &mut report);
    line_checker::judge(facts, &mut report);
    claim_checker::judge(facts, &steps, &mut report);
    slot_checker::judge(facts, &steps, &mut report);
    held_checker::judge(&steps, &mut report);
    version_checker::judge(facts, &steps, &mut report);
    for step in &steps {
        count(step, &mut report);
    }
    for (name, value) in &facts.twins {
        let acknowledged =
            steps.iter().filter(|s| s.kind == Kind::Twin && s.name == *name && s.is(Phase::Ok));
        report.twin_lost += (i64::try_from(acknowledged.count()).unwrap() - value).max(0);
    }
    report
}

fn count(step: &Step, report: &mut Report) {
    let what = match (step.kind, step.ended.map(|(_, phase)| phase)) {
        (Kind::Acquire, Some(Phase::Ok)) => "grants",
        (Kind::Acquire, Some(Phase::Fail)) if step.why == CANCELLED => "cancelled acquires",
        (Kind::Acquire, Some(Phase::Fail)) if step.why.starts_with(TIMED_OUT) => "timed out acquires",
        (Kind::Acquire, Some(Phase::Fail)) => "refused tries",
        (Kind::Acquire, Some(_)) => "unknown acquires",
        (Kind::Acquire, None) => "acquires cut off",
        (Kind::Write, Some(Phase::Ok)) => "fenced writes",
        (Kind::Write, _) if step.is_rejected() => "rejected fences",
        (Kind::Write, Some(Phase::Fail)) if step.why == "rolled back" => "rollbacks",
        (Kind::Write, Some(Phase::Fail)) => "failed writes",
        (Kind::Write, _) if step.commit.is_some() => "unknown commits",
        (Kind::Write, _) => "writes cut off",
        (Kind::Twin, Some(Phase::Ok)) => "twin writes",
        (Kind::Permit, Some(Phase::Ok)) => "permits",
        (Kind::Use, Some(Phase::Ok)) => "writes under a permit",
        (Kind::Lost, _) => "losses signalled",
        (Kind::Trouble, _) => "troubles",
        _ => return,
    };
    report.tally(what);
}

pub(crate) fn steps(records: &[Record]) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    let mut known: HashMap<(i32, i64), usize> = HashMap::new();
    for record in records {
        let Record { at, process, op, kind, phase, .. } = *record;
        let index = *known.entry((process, op)).or_insert_with(|| {
            let name = record.name.clone();
            let (token, value, commit, ended, why) = (None, None, None, None, String::new());
            steps.push(Step { process, op, kind, name, token, value, began: at, commit, ended, why });
            steps.len() - 1
        });
        let step = &mut steps[index];
        step.token = record.token.or(step.token);
        step.value = record.value.or(step.value);
        match phase {
            Phase::Invoke => {}
            Phase::Commit => step.commit = Some(at),
            Phase::Ok | Phase::Fail | Phase::Unknown => {
                step.ended = Some((at, phase));
                step.why = record.why.clone().unwrap_or_default();
            }
        }
    }
    steps
}

#[derive(Clone, Copy, Debug)]
struct Grant {
    process: i32,
    token: i64,
    began: u64,
    answered: u64,
}

/// By name, in the order of their answers.
type Grants = HashMap<String, Vec<Grant>>;

fn grants(steps: &[Step]) -> Grants {
    let mut grants = Grants::new();
    for step in steps.iter().filter(|step| step.kind == Kind::Acquire) {
        if let (Some((answered, Phase::Ok)), Some(token)) = (step.ended, step.token) {
            let grant = Grant { process: step.process, token, began: step.began, answered };
            grants.entry(step.name.clone()).or_default().push(grant);
        }
    }
    for of_name in grants.values_mut() {
        of_name.sort_by_key(|grant| grant.answered);
    }
    grants
}

/// I1.
fn tokens_rise(grants: &Grants, report: &mut Report) {
    let mut seen = HashSet::new();
    for (name, answered) in grants {
        let mut began = answered.clone();
        began.sort_by_key(|grant| grant.began);
        let mut earlier = answered.iter().peekable();
        let mut largest: Option<Grant> = None;
        for grant in began {
            report.judged("I1");
            if !seen.insert(grant.token) {
                report.break_rule("I1", format!("{name}: token {} is there twice: {grant:?}", grant.token));
            }
            while let Some(before) = earlier.next_if(|before| before.answered < grant.began) {
                if largest.is_none_or(|largest| largest.token < before.token) {
                    largest = Some(*before);
                }
            }
            if let Some(largest) = largest.filter(|largest| largest.token >= grant.token) {
                report.break_rule("I1", format!("{name}: {grant:?} began after {largest:?} was answered"));
            }
        }
    }
}

/// I2: what was acknowledged is there, once; what failed is not; nothing is there that nobody wrote.
fn writes_are_there_once(facts: &Facts, steps: &[Step], report: &mut Report) {
    let mut rows: HashMap<(i32, i64), Vec<&Row>> = HashMap::new();
    for row in &facts.log {
        rows.entry((row.process, row.op)).or_default().push(row);
    }
    for step in steps.iter().filter(|step| step.kind == Kind::Write) {
        report.judged("I2");
        let found = rows.remove(&(step.process, step.op)).unwrap_or_default();
        let same = |row: &&Row| {
            row.name == step.name && Some(row.token) == step.token && Some(row.value) == step.value
        };
        let right = match step.ended {
            // What the old primary has said it kept, the new one may not have.
            Some((at, Phase::Ok)) if facts.failed_over.is_some_and(|failed| at <= failed) => found.len() <= 1,
            Some((_, Phase::Ok)) => found.len() == 1,
            Some((_, Phase::Fail)) => found.is_empty(),
            // Without a word of COMMIT it was not sent.
            _ => found.len() <= usize::from(step.commit.is_some()),
        };
        if !right || !found.iter().all(same) {
            report.break_rule("I2", format!("{step:?} has in the log {found:?}"));
        }
    }
    for row in rows.values().flatten() {
        report.break_rule("I2", format!("nobody wrote {row:?}"));
    }
}

/// I2: the log is a chain: values 1 … n, each read from the one before, tokens never falling.
fn log_is_in_order(facts: &Facts, report: &mut Report) {
    for (name, counter) in &facts.counters {
        let mut log: Vec<&Row> = facts.log.iter().filter(|row| row.name == *name).collect();
        log.sort_by_key(|row| (row.value, row.token));
        let mut expected = 1;
        for row in &log {
            report.judged("I2");
            if row.value != expected {
                report.break_rule("I2", format!("{name}: value {expected} was to come: {row:?}"));
            }
            expected = row.value + 1;
        }
        for pair in log.windows(2).filter(|pair| pair[0].token > pair[1].token) {
            report.break_rule("I2", format!("{name}: out of token order: {:?}, then {:?}", pair[0], pair[1]));
        }
        if i64::try_from(log.len()).unwrap() != *counter {
            report.break_rule("I2", format!("{name}: the counter is {counter}, the log has {}", log.len()));
        }
    }
}

/// I4, and the sharp half of I2: whoever relied on its hold, or sent COMMIT, after a later grant had been
/// *answered* was not the holder then.
///
/// A "yes" with some time remaining is relied on for that time, also by a process that dies: unless it gives
/// the lease back first, nobody else may have it before, and no signal and no fence may say otherwise.
fn nothing_after_a_later_grant(facts: &Facts, steps: &[Step], grants: &Grants, report: &mut Report) {
    let written: HashSet<(i32, i64)> = facts.log.iter().map(|row| (row.process, row.op)).collect();
    // An attempt at a claim ends with its completion as well: from COMMIT on nobody relies on it.
    let mut given_back: HashMap<(i32, Option<i64>), u64> = HashMap::new();
    for step in steps {
        let end = match step.kind {
            Kind::End => Some(step.began),
            Kind::Complete => step.commit,
            _ => None,
        };
        if let Some(end) = end {
            let first = given_back.entry((step.process, step.token)).or_insert(end);
            *first = end.min(*first);
        }
    }
    // The first in time stays.
    let mut told: HashMap<(i32, Option<i64>), u64> = HashMap::new();
    for step in steps.iter().filter(|step| step.kind == Kind::Lost || step.is_rejected()) {
        let (at, _) = step.ended.unwrap_or((u64::MAX, Phase::Unknown));
        told.entry((step.process, step.token)).and_modify(|first| *first = at.min(*first)).or_insert(at);
    }
    // Grants of a primary that was left may never have been.
    let lasting = |grant: &Grant| facts.failed_over.is_none_or(|failed| grant.answered > failed);
    let later = Later::new(grants, lasting);
    let before_failover: HashSet<(i32, i64)> = grants
        .values()
        .flatten()
        .filter(|grant| !lasting(grant))
        .map(|grant| (grant.process, grant.token))
        .collect();
    for step in steps {
        let (rule, until, stands) = match step.kind {
            Kind::Believe => {
                let remaining = step.value.and_then(|value| u64::try_from(value).ok()).unwrap_or(0);
                let end = given_back.get(&(step.process, step.token)).copied().unwrap_or(u64::MAX);
                ("I4", step.began.max(end.min(step.began + remaining)), step.is(Phase::Ok))
            }
            Kind::Write => match step.commit {
                Some(commit) => ("I2", commit, written.contains(&(step.process, step.op))),
                None => continue,
            },
            _ => continue,
        };
        report.judged(rule);
        let told = told.get(&(step.process, step.token)).filter(|told| **told < until);
        if let Some(told) = told.filter(|_| stands && rule == "I4") {
            report.break_rule(rule, format!("{step:?}, relied on until {until}: told of its loss at {told}"));
        }
        if let Some(token) = step.token.filter(|_| stands)
            && let Some(later) = if before_failover.contains(&(step.process, token)) {
                // Whatever its number: somebody else had it after that.
                later.first(&step.name)
            } else {
                later.than(&step.name, token)
            }
            && later.answered < until
        {
            report.break_rule(rule, format!("{step:?}, relied on until {until}: later was {later:?}"));
        }
    }
}

/// For a token, the grant of a larger one of its name that was answered first.
struct Later(HashMap<String, Vec<(i64, Grant)>>);

impl Later {
    fn new(grants: &Grants, lasting: impl Fn(&Grant) -> bool) -> Self {
        let of_name = |grants: &Vec<Grant>| {
            let mut by_token: Vec<Grant> = grants.iter().copied().filter(|grant| lasting(grant)).collect();
            by_token.sort_by_key(|grant| std::cmp::Reverse(grant.token));
            let first = by_token.iter().scan(None::<Grant>, |first, grant| {
                let earlier = first.filter(|first| first.answered < grant.answered);
                *first = Some(earlier.unwrap_or(*grant));
                first.map(|first| (grant.token, first))
            });
            first.collect()
        };
        Self(grants.iter().map(|(name, grants)| (name.clone(), of_name(grants))).collect())
    }

    /// The grant of this name that was answered first.
    fn first(&self, name: &str) -> Option<Grant> {
        self.0.get(name)?.last().map(|(_, first)| *first)
    }

    fn than(&self, name: &str, token: i64) -> Option<Grant> {
        let by_token = self.0.get(name)?;
        let larger = by_token.partition_point(|(of, _)| *of > token);
        by_token.get(larger.checked_sub(1)?).map(|(_, first)| *first)
    }
}

/// I5: a process that was stopped or cut off for longer than it may trust its last heartbeat knows that it has lost
/// what it held before, at once by `is_held`, soon by the signal.
fn holders_know_in_time(facts: &Facts, grants: &Grants, report: &mut Report) {
    let mut of_process: HashMap<i32, Vec<&Record>> = HashMap::new();
    for record in &facts.records {
        of_process.entry(record.process).or_default().push(record);
    }
    for stop in &facts.stops {
        let Some((records, known)) = of_process.get(&stop.process).zip(stop.known_from()) else { continue };
        let bound = known + u64::try_from(SIGNAL_WITHIN.as_nanos()).unwrap();
        let stood = facts.stops.iter().filter(|s| s.process == stop.process && s.outage == Outage::Stood);
        let others = stood.filter(|s| s.stood != stop.stood && s.woken > stop.stood);
        let undisturbed = others.map(|other| other.stood).min();
        let undisturbed = undisturbed.unwrap_or(u64::MAX);
        let last = records.last().map_or(0, |record| record.at);
        for grant in
            grants.values().flatten().filter(|g| g.process == stop.process && g.answered < stop.stood)
        {
            let its = || records.iter().filter(|record| record.token == Some(grant.token));
            let over = |record: &&&Record| matches!(record.kind, Kind::Lost | Kind::End);
            let end = its().find(over).map(|record| record.at);
            if end.is_some_and(|end| end < stop.stood) {
                continue;
            }
            report.judged("I5");
            let yes = |r: &&&Record| r.kind == Kind::Believe && r.phase == Phase::Ok && r.at >= known;
            if let Some(look) = its().find(yes) {
                report.break_rule("I5", format!("{grant:?} is believed in after {stop:?}: {look:?}"));
            }
            // A process that was killed or stopped again meanwhile had not its time.
            match end {
                Some(end) if end <= bound && end < undisturbed => {
                    let took = Duration::from_nanos(end.saturating_sub(known));
                    report.slowest_signal = report.slowest_signal.max(took);
                }
                Some(end) if end <= bound => {}
                _ if undisturbed > bound && last > bound => {
                    report.break_rule("I5", format!("{grant:?} is not told of its loss after {stop:?}"));
                }
                _ => {}
            }
        }
    }
}

/// I5: what was told of its death stays dead.
fn dead_is_final(facts: &Facts, report: &mut Report) {
    for owner in &facts.revived {
        report.break_rule("I5", format!("the dead owner {owner} lives on"));
    }
}

/// I12: no false alarms.
fn nothing_is_lost_without_a_reason(facts: &Facts, grants: &Grants, report: &mut Report) {
    if !facts.calm {
        return;
    }
    for _ in grants.values().flatten() {
        report.judged("I12");
    }
    let alarm = |record: &&Record| match record.kind {
        Kind::Lost => true,
        Kind::Acquire | Kind::Write => record.phase == Phase::Unknown,
        Kind::End => record.why.as_ref().is_some_and(|why| why.starts_with("Err")),
        _ => false,
    };
    for record in facts.records.iter().filter(alarm) {
        report.break_rule("I12", format!("nothing has happened, and yet: {record:?}"));
    }
}

#[cfg(test)]
#[path = "checker_tests.rs"]
mod tests;
