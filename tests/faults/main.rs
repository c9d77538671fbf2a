//! Worker processes under faults: their histories are judged, and the judge is.
//!
//! `FENCEPOST_STRESS_SECONDS` is the length of the two long runs (default 15; 60 before a release), `FENCEPOST_SEED`
//! repeats the dice of one: the same faults and steps are drawn, while the machine's scheduling is its own.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by panicking"
)]

mod canary;
mod checker;
mod controller;
mod dice;
mod fleet;
mod history;
mod line;
mod line_checker;
mod worker;

use std::fs;
use std::process::Command;
use std::time::Duration;

use tokio::sync::Mutex;

use crate::canary::{
    CACHED_TOKENS, Canary, EARLY_TOKEN, IDLE_HEARTBEAT, IGNORES_LIFE, JUMPS_QUEUE, KEEPS_TICKETS,
    NEWEST_FIRST, NO_FENCE, SILENT_RELEASE, WEAK_LOCK,
};
use crate::checker::Report;
use crate::controller::{Outcome, Plan};
use crate::worker::Mode;

/// One run at a time has the machine: their times are short.
static RUNNING: Mutex<()> = Mutex::const_new(());

/// The faults that a run must have had, or it has shown nothing.
const FAULTS: [&str; 8] = [
    "paused at random",
    "paused in a fenced transaction",
    "paused in an unfenced write",
    "paused holding",
    "killed",
    "heartbeat's session ended",
    "call's session ended",
    "fenced session ended",
];

/// The same for those who wait.
const FAULTS_OF_WAITING: [&str; 6] = [
    "paused at random",
    "killed",
    "heartbeat's session ended",
    "call's session ended",
    "listening session ended",
    "fenced session ended",
];

/// The entry point of worker processes. Started as a test, it checks that the controller would find it.
#[test]
fn worker_process() {
    if let Ok(orders) = std::env::var(worker::VARIABLE) {
        return worker::main(&orders);
    }
    let list =
        Command::new(std::env::current_exe().unwrap()).args(["--exact", fleet::ENTRY, "--list"]).output();
    let list = String::from_utf8(list.unwrap().stdout).unwrap();
    assert!(list.contains(&format!("{}: test", fleet::ENTRY)), "{list}");
}

#[tokio::test(flavor = "multi_thread")]
async fn fenced_writes_survive_paused_killed_and_cut_off_holders() {
    let _alone = RUNNING.lock().await;
    let plan = Plan { seed: seed(), length: length(), workers: 8, mode: Mode::Try, canary: None };
    let (outcome, mut report) = judge(plan).await;
    progress_and_hygiene(&outcome, &mut report);
    print(plan, &outcome, &report);
    had(&FAULTS, &outcome);
    for what in ["grants", "fenced writes", "twin writes", "rejected fences", "losses signalled"] {
        assert!(report.count(what) > 10, "only {} {what}", report.count(what));
    }
    assert!(report.twin_lost > 0, "blind: the unfenced twin has lost nothing");
    nothing_broken(plan, &outcome, &report);
}

#[tokio::test(flavor = "multi_thread")]
async fn those_who_wait_are_served_in_order_under_faults() {
    let _alone = RUNNING.lock().await;
    let plan = Plan { seed: seed(), length: length(), workers: 8, mode: Mode::Wait, canary: None };
    let (outcome, mut report) = judge(plan).await;
    progress_and_hygiene(&outcome, &mut report);
    print(plan, &outcome, &report);
    had(&FAULTS_OF_WAITING, &outcome);
    for what in [
        "grants",
        "tickets",
        "hand-overs by a release",
        "hand-overs by an asker",
        "cancelled acquires",
        "timed out acquires",
    ] {
        assert!(report.count(what) > 10, "only {} {what}", report.count(what));
    }
    nothing_broken(plan, &outcome, &report);
}

/// It was a run with all its faults, and no process ended badly.
fn had(faults: &[&str], outcome: &Outcome) {
    assert!(outcome.failed.is_empty(), "{:?}", outcome.failed);
    let missing: Vec<_> = faults.iter().filter(|fault| !outcome.faults.contains_key(*fault)).collect();
    assert!(missing.is_empty(), "faults that did not happen: {missing:?}");
}

fn nothing_broken(plan: Plan, outcome: &Outcome, report: &Report) {
    let broken: Vec<_> = report.verdicts.iter().filter(|(_, verdict)| !verdict.broken.is_empty()).collect();
    assert!(broken.is_empty(), "seed {}, histories in {}", plan.seed, outcome.folder.display());
    fs::remove_dir_all(&outcome.folder).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fence_without_its_lock_is_noticed() {
    notices(NO_FENCE).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_takeover_that_does_not_wait_for_a_fence_is_noticed() {
    notices(WEAK_LOCK).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_takeover_from_the_living_is_noticed() {
    notices(IGNORES_LIFE).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_heartbeat_that_does_not_renew_is_noticed() {
    notices(IDLE_HEARTBEAT).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_drawn_too_early_is_noticed() {
    notices(EARLY_TOKEN).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_drawn_ahead_by_each_session_are_noticed() {
    notices(CACHED_TOKENS).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn serving_the_newest_first_is_noticed() {
    notices_waiting(NEWEST_FIRST).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn jumping_the_queue_is_noticed() {
    notices_waiting(JUMPS_QUEUE).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_that_hands_over_to_nobody_is_noticed() {
    notices_waiting(SILENT_RELEASE).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_that_keeps_its_place_when_it_gives_up_is_noticed() {
    notices_waiting(KEEPS_TICKETS).await;
}

async fn notices(canary: Canary) {
    notices_in(canary, Mode::Try).await;
}

async fn notices_waiting(canary: Canary) {
    notices_in(canary, Mode::Wait).await;
}

/// In one of a few short runs; most often in the first.
async fn notices_in(canary: Canary, mode: Mode) {
    let _alone = RUNNING.lock().await;
    let seed = seed();
    for round in 0..5 {
        let plan = Plan {
            seed: seed.wrapping_add(round),
            length: Duration::from_secs(4),
            workers: 8,
            mode,
            canary: Some(canary),
        };
        let (outcome, report) = judge(plan).await;
        print(plan, &outcome, &report);
        fs::remove_dir_all(&outcome.folder).unwrap();
        if !report.broken(canary.breaks).is_empty() {
            return;
        }
    }
    panic!("not noticed: {}; seed {seed}", canary.mistake);
}

async fn judge(plan: Plan) -> (Outcome, Report) {
    println!(
        "seed {}{}",
        plan.seed,
        plan.canary.map_or(String::new(), |canary| format!(": {}", canary.mistake))
    );
    let outcome = controller::run(plan).await;
    let report = checker::check(&outcome.facts);
    (outcome, report)
}

/// I11 and I12.
fn progress_and_hygiene(outcome: &Outcome, report: &mut Report) {
    report.judged("I11");
    for left in &outcome.left {
        report.break_rule("I11", left.clone());
    }
    for (fault, times) in &outcome.faults {
        for _ in 0..if fault.starts_with("paused") { *times } else { 0 } {
            report.judged("I12");
        }
    }
    if let Some(times) = outcome.faults.get(controller::BLOCKED) {
        report.break_rule(
            "I12",
            format!("a paused holder blocked for {:?}, {times} times", controller::BLOCKED_FOR),
        );
    }
    report.judged("I12");
    if outcome.healed.is_none() {
        report.break_rule("I12", format!("not every name was granted within {:?}", controller::DEADLINE));
    }
    report.judged("I12");
    if !outcome.taken_once_more {
        report.break_rule("I12", "a fresh process could not take each name".to_owned());
    }
}

/// One line a rule, then what was done.
fn print(plan: Plan, outcome: &Outcome, report: &Report) {
    println!("  seed {}, {:?}, {} processes", plan.seed, plan.length, outcome.processes);
    for (rule, verdict) in &report.verdicts {
        println!("  {rule}: {} judged, {} broken", verdict.judged, verdict.broken.len());
        for broken in verdict.broken.iter().take(3) {
            println!("      {broken}");
        }
    }
    if plan.mode == Mode::Try {
        println!(
            "  I3: the unfenced twin lost {} of {} updates",
            report.twin_lost,
            report.count("twin writes")
        );
    } else {
        let heard = |percent: usize| report.heard.get((report.heard.len() * percent / 100).saturating_sub(1));
        println!(
            "  from the hand-over to its caller: median {:?}, 90 % {:?}, longest {:?}; slowest turn {:?}",
            heard(50),
            heard(90),
            heard(100),
            report.slowest_turn
        );
    }
    println!("  done: {:?}", report.counts);
    println!("  faults: {:?}", outcome.faults);
    println!("  healed in {:?}, slowest signal of a loss {:?}", outcome.healed, report.slowest_signal);
}

fn length() -> Duration {
    Duration::from_secs(number("FENCEPOST_STRESS_SECONDS").unwrap_or(15).max(5))
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{variable}={text:?}")))
}

/// The run's seed: given, or of the moment.
fn seed() -> u64 {
    number("FENCEPOST_SEED").unwrap_or_else(history::now)
}
