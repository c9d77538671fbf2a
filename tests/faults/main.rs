//! Worker processes under faults: their histories are judged, and the judge is.
//!
//! | variable | meaning |
//! |---|---|
//! | `FENCEPOST_SEED` | repeats the dice of a run: the same faults and steps are drawn, while the machine's scheduling is its own |
//! | `FENCEPOST_STRESS_SECONDS` | how long each cell runs: a soak |
//! | `FENCEPOST_FAULTS_REPORT` | `the_report` runs everything and writes `docs/faults.md`, instead of looking at whether it is complete |

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by panicking"
)]
#![allow(clippy::disallowed_methods, reason = "tests spawn tasks of their own")]

mod canary;
mod cell;
mod checker;
mod claim_checker;
mod claims;
mod controller;
mod dice;
mod fault;
mod fleet;
mod held_checker;
mod history;
mod line;
mod line_checker;
mod link;
mod lock_checker;
mod locks;
#[path = "../support/pgbouncer.rs"]
#[allow(dead_code, reason = "other suites use another part of it")]
mod pgbouncer;
#[path = "../support/proxy.rs"]
#[allow(dead_code, reason = "other suites use another part of it")]
mod proxy;
mod report;
mod sharing;
mod slot_checker;
mod slots;
mod stage;
mod timeline;
mod version_checker;
mod versions;
mod worker;

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::Command;
use std::time::Duration;

use tokio::sync::Mutex;

use crate::canary::Canary;
use crate::cell::Cell;
use crate::checker::Report;
use crate::controller::{Outcome, Plan};
use crate::report::Finding;
use crate::stage::Way;
use crate::worker::Mode;

/// One run at a time has the machine: their times are short.
static RUNNING: Mutex<()> = Mutex::const_new(());

/// How often a canary may go unnoticed before that is a failure; most are noticed in the first run.
const TRIES: u64 = 8;

/// How long a run that has to notice a canary takes.
const SHORT: Duration = Duration::from_secs(4);

/// A test for each cell, and the list of all.
macro_rules! cells {
    ($($test:ident: $cell:ident,)*) => {
        /// All cells, in the order of the report, with their tests.
        pub(crate) const CELLS: &[(&str, &Cell)] = &[$((stringify!($test), &cell::$cell)),*];
        $(#[tokio::test(flavor = "multi_thread")]
        async fn $test() {
            holds(stringify!($test), &cell::$cell).await;
        })*
    };
}

cells! {
    fenced_writes_survive_paused_killed_and_cut_off_holders: EVERYTHING,
    those_who_wait_are_served_in_order_under_faults: EVERYTHING_WAITING,
    members_may_come_and_go: SHARING,
    backends_may_be_killed: BACKEND_KILLED,
    clients_may_be_killed: CLIENT_KILLED,
    clients_may_be_paused: CLIENT_PAUSED,
    answers_may_be_cut: REPLY_CUT,
    the_network_may_be_a_black_hole: BLACK_HOLE,
    the_network_may_be_slow: SLOW_NETWORK,
    the_link_may_be_lost: LINK_LOST,
    the_server_may_crash: CRASH,
    the_server_may_crash_while_many_wait: CRASH_WAITING,
    the_role_may_be_careless_of_crashes: CARELESS_ROLE,
    the_server_may_stall: STALLED,
    a_synchronous_standby_may_take_over: FAILOVER,
    an_asynchronous_standby_may_take_over: FAILOVER_LOSSY,
    clocks_may_be_wrong: CLOCKS_STEPPED,
    the_application_may_starve: STARVED,
    its_pool_may_be_exhausted: POOL_EXHAUSTED,
    a_pooler_may_be_in_between: POOLER,
    the_role_may_be_serializable: ISOLATION,
    futures_may_be_cancelled: CANCELLED,
    the_role_may_be_impatient: ROLE_LIMITS,
    connections_may_run_out: CROWDED,
    it_may_be_migrated_under_load: MIGRATED,
    notifications_may_be_lost_and_forged: NOTIFICATIONS,
    claims_are_done_once_under_faults: EVERYTHING_CLAIMED,
    answers_about_claims_may_be_cut: REPLY_CUT_CLAIMED,
    slots_run_once_under_faults: EVERYTHING_SLOTS,
    slots_run_once_by_whatever_clocks: CLOCKS_STEPPED_SLOTS,
    the_server_may_crash_with_claims: CLAIMS_CRASH,
    a_synchronous_standby_may_take_over_claims: CLAIMS_FAILOVER,
    leaders_may_be_paused_killed_and_cut_off: LEADERS,
    permits_may_be_paused_killed_and_cut_off: PERMITS,
    the_server_may_crash_with_leaders: LEADERS_CRASH,
    the_server_may_crash_with_permits: PERMITS_CRASH,
    the_server_may_crash_with_members: SHARING_CRASH,
    versions_are_registers_under_faults: VERSIONS,
    session_locks_exclude_through_timeouts_and_cancels: LOCKS_CALM,
    sessions_that_hold_locks_may_be_ended: LOCKS_ENDED,
    the_server_may_crash_with_session_locks: LOCKS_CRASH,
}

/// A test for each canary, and the list of all.
macro_rules! canaries {
    ($($test:ident: $canary:ident,)*) => {
        /// All canaries, in the order of the report.
        pub(crate) const CANARIES: &[Canary] = &[$(canary::$canary),*];
        $(#[tokio::test(flavor = "multi_thread")]
        async fn $test() {
            let _alone = RUNNING.lock().await;
            notices(canary::$canary).await;
        })*
    };
}

canaries! {
    a_fence_without_its_lock_is_noticed: NO_FENCE,
    a_fence_in_autocommit_is_noticed: AUTOCOMMIT,
    a_fence_by_number_only_is_noticed: NUMBER_ONLY,
    a_takeover_that_does_not_wait_for_a_fence_is_noticed: WEAK_LOCK,
    a_takeover_from_the_living_is_noticed: IGNORES_LIFE,
    a_takeover_without_a_mark_is_noticed: NO_MARK,
    a_heartbeat_that_does_not_renew_is_noticed: IDLE_HEARTBEAT,
    a_heartbeat_that_revives_is_noticed: REVIVES,
    a_token_drawn_too_early_is_noticed: EARLY_TOKEN,
    tokens_drawn_ahead_by_each_session_are_noticed: CACHED_TOKENS,
    a_release_by_name_is_noticed: RELEASE_BY_NAME,
    a_release_that_waits_for_fences_is_noticed: WAITS_FOR_FENCES,
    serving_the_newest_first_is_noticed: NEWEST_FIRST,
    jumping_the_queue_is_noticed: JUMPS_QUEUE,
    a_release_that_hands_over_to_nobody_is_noticed: SILENT_RELEASE,
    a_waiter_that_keeps_its_place_when_it_gives_up_is_noticed: KEEPS_TICKETS,
    moving_to_whoever_has_fewer_is_noticed: LARGER_THAN_MINE,
    counting_dead_members_is_noticed: COUNTS_THE_DEAD,
    a_member_that_keeps_what_was_revoked_is_noticed: KEEPS_REVOKED,
    a_client_without_a_deadline_is_noticed: NO_DEADLINE,
    a_client_that_counts_from_the_answer_is_noticed: COUNTS_FROM_ANSWER,
    a_client_with_a_wall_clock_is_noticed: WALL_CLOCK,
    a_client_that_never_looks_for_lost_grants_is_noticed: NO_RECONCILE,
    a_client_that_believes_any_notification_is_noticed: BELIEVES_NOTIFICATIONS,
    a_finish_by_the_key_alone_is_noticed: FINISH_BY_ID,
    a_rescue_by_run_time_is_noticed: RESCUE_BY_RUN_TIME,
    slots_taken_from_now_are_noticed: SLOTS_FROM_NOW,
    slots_one_at_a_time_by_a_lease_that_is_looked_at_once_are_noticed: ASKS_FOR_THE_LEASE_ONCE,
    slots_that_are_due_by_the_clients_clock_are_noticed: DUE_BY_OWN_CLOCK,
    a_past_leader_that_resigns_the_present_term_is_noticed: RESIGNS_BY_NAME,
    a_past_leader_that_is_told_it_goes_on_is_noticed: RENEWS_PAST_LEADERS,
    a_counter_that_the_dead_leave_raised_is_noticed: COUNTER,
    permits_taken_from_the_living_are_noticed: TAKES_FROM_THE_LIVING,
    a_permit_granted_under_an_open_write_is_noticed: PERMIT_UNDER_A_WRITE,
    a_bulk_update_that_compares_no_version_is_noticed: COMPARES_NO_VERSION,
    an_update_that_is_sent_again_when_its_answer_is_lost_is_noticed: REPEATS_UNKNOWN,
    a_version_that_is_used_again_is_noticed: BEGINS_AT_ONE,
    a_time_out_of_the_sessions_lock_that_is_believed_is_noticed: BELIEVES_TIMEOUTS,
    a_lock_that_excludes_sessions_and_not_tasks_is_noticed: REENTRANT,
    a_release_that_keeps_the_lock_is_noticed: KEEPS_LOCKS,
    a_lock_that_nobody_looks_after_is_noticed: NEVER_PROBES,
}

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

/// The report in `docs/` is of these cells and canaries; told so, it is written anew.
#[tokio::test(flavor = "multi_thread")]
async fn the_report() {
    if !report::is_wanted() {
        return report::is_of(CELLS, CANARIES);
    }
    let mut findings = Vec::new();
    for (test, cell) in CELLS {
        findings.push(holds(test, cell).await);
    }
    let _alone = RUNNING.lock().await;
    let mut noticed = Vec::new();
    for canary in CANARIES {
        noticed.push(notices(*canary).await);
    }
    report::write(&findings, &noticed);
}

/// Every invariant that the cell promises holds, and it has shown something.
async fn holds(test: &str, cell: &'static Cell) -> Finding {
    let _alone = RUNNING.lock().await;
    if cell.setting.way == Way::Link && std::env::var_os(link::INSIDE).is_none() {
        let result = report::result_file();
        let variables = [(report::RESULT, result.to_str().unwrap().to_owned())];
        let ran = link::run_inside(test, &variables);
        return if ran {
            report::read_result(&result)
        } else {
            Finding::skipped(cell, "no network namespace")
        };
    }
    let plan = Plan { cell, seed: seed(), length: stress().unwrap_or(cell.length()), canary: None };
    let (outcome, mut report) = match judge(plan).await {
        Ok(judged) => judged,
        Err(why) => {
            eprintln!("SKIPPED: {}: {why}", cell.name);
            return Finding::skipped(cell, why);
        }
    };
    report.verdicts.retain(|invariant, _| cell.promises(invariant));
    print(plan, &outcome, &report);
    let finding = Finding::of(plan, &outcome, &report);
    let sound = catch_unwind(AssertUnwindSafe(|| {
        shown(cell, &outcome, &report);
        let broken = report.verdicts.values().any(|verdict| !verdict.broken.is_empty());
        assert!(!broken, "seed {}, histories in {}", plan.seed, outcome.folder.display());
        fs::remove_dir_all(&outcome.folder).unwrap();
    }));
    // A report says it, and goes on.
    if let Err(problem) = sound
        && !report::is_wanted()
    {
        resume_unwind(problem);
    }
    finding.write_result();
    finding
}

/// It was a run with all its faults, no process ended badly, and the twin was lost without its fence.
fn shown(cell: &Cell, outcome: &Outcome, report: &Report) {
    assert!(outcome.failed.is_empty(), "{:?}", outcome.failed);
    let missing = controller::wanted(cell, &outcome.faults);
    assert!(missing.is_empty(), "did not happen: {missing:?}");
    for what in cell.needs {
        assert!(report.count(what) >= 3, "only {} {what}", report.count(what));
    }
    if cell.pauses {
        assert!(report.twin_lost > 0, "blind: the unfenced twin has lost nothing");
    }
}

/// In one of a few short runs; most often in the first.
async fn notices(canary: Canary) -> Finding {
    let seed = seed();
    // A failover, and a crash, needs its time.
    let length = if canary.cell.forgets() { canary.cell.length() } else { SHORT };
    for round in 0..TRIES {
        let plan = Plan { cell: canary.cell, seed: seed.wrapping_add(round), length, canary: Some(canary) };
        let (outcome, report) = match judge(plan).await {
            Ok(judged) => judged,
            Err(why) => {
                eprintln!("SKIPPED: {}: {why}", canary.mistake);
                return Finding::skipped(canary.cell, why);
            }
        };
        print(plan, &outcome, &report);
        fs::remove_dir_all(&outcome.folder).unwrap();
        if !report.broken(canary.breaks).is_empty() {
            println!("  noticed in run {}", round + 1);
            return Finding::of(plan, &outcome, &report);
        }
    }
    // A report says it, and goes on.
    assert!(report::is_wanted(), "not noticed: {}; seed {seed}", canary.mistake);
    Finding::skipped(canary.cell, "not noticed")
}

async fn judge(plan: Plan) -> Result<(Outcome, Report), &'static str> {
    let mistake = plan.canary.map_or(String::new(), |canary| format!(", with {}", canary.mistake));
    println!("{}{mistake}: seed {}", plan.cell.name, plan.seed);
    let outcome = controller::run(plan).await?;
    let mut report = checker::check(&outcome.facts);
    progress_and_hygiene(&outcome, &mut report);
    if let Some(shared) = &outcome.shared {
        shared.judge(&mut report);
    }
    Ok((outcome, report))
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

/// One line an invariant, then what was done.
fn print(plan: Plan, outcome: &Outcome, report: &Report) {
    println!("  seed {}, {:?}, {} processes", plan.seed, plan.length, outcome.processes);
    for (rule, verdict) in &report.verdicts {
        println!("  {rule}: {} judged, {} broken", verdict.judged, verdict.broken.len());
        for broken in verdict.broken.iter().take(3) {
            println!("      {broken}");
        }
    }
    if matches!(plan.cell.mode, Mode::Try | Mode::Lead) {
        println!(
            "  I3: the unfenced twin lost {} of {} updates",
            report.twin_lost,
            report.count("twin writes")
        );
    } else if let Some(shared) = &outcome.shared {
        println!("  shared out in the end: {shared:?}");
    } else if plan.cell.mode == Mode::Wait {
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

fn stress() -> Option<Duration> {
    number("FENCEPOST_STRESS_SECONDS").map(|seconds| Duration::from_secs(seconds.max(5)))
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{variable}={text:?}")))
}

/// The run's seed: given, or of the moment.
fn seed() -> u64 {
    number("FENCEPOST_SEED").unwrap_or_else(history::now)
}
