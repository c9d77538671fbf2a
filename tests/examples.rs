//! The examples print what the README says they print, word for word, and leave nothing behind.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a helper of a test fails the test")]

use std::{
    env, fs,
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

/// An environment variable that an example's processes inherit, and nobody else has.
const MARK: &str = "FENCEPOST_EXAMPLE_MARK";

const FENCING: &str = r#"WITH THE FENCE
   1  A         takes the lease: token 1
   2  A         reads the balance and computes 100 + 10 = 110
   3  A         looks at its own clock: the lease is held, so it goes on to write
   4  (system)  pauses A (SIGSTOP)
   5  database  has not heard from A for its ttl: the lease is free
   6  B         takes the lease: token 2
   7  B         reads the balance and computes 100 + 50 = 150
   8  B         writes 150 through the fence: committed
   9  (system)  wakes A (SIGCONT), which goes on where it was
  10  A         looks at its own clock: the lease is lost
  11  A         begins a fenced transaction: refused, this lease is lost
  12  A         asks the database itself: stale fence: "account" refused token 1; it has seen token 2
  13  database  the balance is still 150: nothing was lost
  14  B         releases the lease
  15  A         takes the lease: token 3
  16  A         reads the balance and computes 150 + 10 = 160
  17  A         writes 160 through the fence: committed
  18  A         releases the lease

WITHOUT THE FENCE
   1  A         takes the lease: token 4
   2  A         reads the balance and computes 100 + 10 = 110
   3  A         looks at its own clock: the lease is held, so it goes on to write
   4  (system)  pauses A (SIGSTOP)
   5  database  has not heard from A for its ttl: the lease is free
   6  B         takes the lease: token 5
   7  B         reads the balance and computes 100 + 50 = 150
   8  B         writes 150 with a plain UPDATE: committed
   9  (system)  wakes A (SIGCONT), which goes on where it was
  10  A         writes 110 with a plain UPDATE: committed
  11  database  the balance is 110: B's deposit is gone, and nobody was told
  12  B         releases the lease
  13  A         releases, and is told that the lease was lost

with fence:    100, then deposits of 50 and 10: 160. A's late write was rejected, nothing was lost.
without fence: 100, then deposits of 50 and 10: 110. A's late write went through, B's 50 are lost.
"#;

#[test]
fn fencing_tells_its_story() {
    prints("fencing", FENCING);
}

const LOCK_SERVER: &str = r#"alice  acquire                    -> acquired, token 1
bob    acquire                    -> refused: alice holds it with token 1
bob    release with a wrong token -> not released
bob    release with alice's token -> not released
alice  release                    -> released
bob    acquire                    -> acquired, token 2
bob    release                    -> released
carol  acquire for 300 ms         -> acquired, token 3; she is never heard of again
alice  acquire                    -> acquired after her expiry, token 4
carol  release with her old token -> not released
carol  write through the fence    -> rejected: stale fence: "printer" refused token 3; it has seen token 4
"#;

#[test]
fn lock_server_gives_its_answers() {
    prints("lock_server", LOCK_SERVER);
}

const WAITING_IN_LINE: &str = "   1  parent    holds the lease: token 1
   2  A         arrives and waits; in line: A
   3  B         arrives and waits; in line: A B
   4  C         arrives and waits; in line: A B C
   5  D         arrives and waits; in line: A B C D
   6  E         arrives and waits; in line: A B C D E
   7  (system)  kills B (SIGKILL) while it waits
   8  database  has not heard from B for its ttl; in line: A C D E
   9  parent    releases the lease, which goes to A
  10  A         is served: token 2; in line: C D E
  11  A         releases the lease, which goes to C
  12  C         is served: token 3; in line: D E
  13  (system)  kills C (SIGKILL) while it holds the lease
  14  D         is served: token 4; in line: E
  15  database  had kept the lease for C until its ttl was over, and no longer
  16  D         releases the lease, which goes to E
  17  E         is served: token 5; in line: nobody
  18  E         releases the lease, which is free

arrived:  A B C D E
killed:   B while it waited, C while it held the lease
served:   A C D E, the order of arrival without B
delayed:  whoever came after C, by its ttl (1s) and no more
";

#[test]
fn waiting_in_line_serves_in_the_order_of_arrival() {
    prints("waiting_in_line", WAITING_IN_LINE);
}

const NIGHTLY_REPORT_ADVISORY: &str = "   1  A         takes the lock and runs the report
   2  B         is refused, so it does not run; it stands by
   3  database  shows reports/nightly: A holds, B waits
   4  (system)  kills A (SIGKILL) in the middle of the report
   5  B         has the lock, which went with A's connection, and runs the report
   6  B         publishes it and releases the lock

started:    A and B
ran:        A, killed on the way; then B, and never both
published:  once
";

#[test]
fn nightly_report_advisory_runs_once() {
    prints("nightly_report_advisory", NIGHTLY_REPORT_ADVISORY);
}

const LEADER: &str = "   1  A         is elected: term 1
   2  parent    sees that A in term 1 leads
   3  B         campaigns; in line: B
   4  C         campaigns; in line: B C
   5  (system)  kills A (SIGKILL)
   6  B         is elected: term 2
   7  parent    sees that B in term 2 leads
   8  (system)  pauses B (SIGSTOP)
   9  C         is elected: term 3
  10  parent    sees that C in term 3 leads
  11  (system)  wakes B (SIGCONT), which goes on where it was
  12  B         looks at its own clock: its time ran out
  13  B         asks the database all the same: stale fence: \"fencepost:election:scheduler\" refused token 2; it has seen token 3
  14  B         campaigns; in line: B
  15  parent    asks the leader to resign
  16  C         hears of it, in term 3, and resigns
  17  B         is elected: term 4
  18  parent    sees that B in term 4 leads

led:  A 1, B 2, C 3, B 4
";

#[test]
fn leader_is_never_more_than_one() {
    prints("leader", LEADER);
}

const AT_MOST_THREE: &str = "   1  A         has a permit, token 1; held by: A
   2  B         has a permit, token 2; held by: A B
   3  C         has a permit, token 3; held by: A B C
   4  D         waits; in line: D
   5  E         waits; in line: D E
   6  F         waits; in line: D E F
   7  A         releases its permit, which goes to D
   8  D         has a permit, token 4; held by: B C D
   9  (system)  kills B (SIGKILL)
  10  E         has a permit, token 5; held by: C D E
  11  (system)  pauses C (SIGSTOP)
  12  F         has a permit, token 6; held by: D E F
  13  (system)  wakes C (SIGCONT), which goes on where it was
  14  C         looks at its own clock: its permit is lost
  15  C         begins a fenced transaction all the same: refused
  16  (parent)  there were never more than three

held at the end: D E F
";

#[test]
fn at_most_three_are_never_four() {
    prints("at_most_three", AT_MOST_THREE);
}

const STORAGE: &str = r#"A lock elsewhere gives the tokens; the storage remembers the largest one it has seen.
  token 33  accepted
  token 34  accepted
  token 33  rejected: stale fence: "file" refused token 33; it has seen token 34
  the file reads: written with 34

The lease is in the same database; the table is protected by it.
  without the fence  rejected: unfenced write: table public.file is protected by lease "file": pass its fence first in the same transaction
  through the fence  accepted
  the file reads: through the fence
"#;

#[test]
fn storage_rejects_the_late_write() {
    prints("storage", STORAGE);
}

const ROW_LOCK_TRANSFER: &str = "\
16 tasks move money between 8 accounts, 50 times each; both are locked by one call.
  800 transfers, 800 runs: no deadlock
  the sum was 8000 and is 8000

Two tasks lock two accounts one by one, in opposite orders.
  2 transfers, 3 runs: a deadlock, whose victim ran again
  the sum was 8000 and is 8000
";

#[test]
fn row_lock_transfer_loses_no_money() {
    prints("row_lock_transfer", ROW_LOCK_TRANSFER);
}

const IDEMPOTENT_CHARGE: &str = r#"THE SERVER IS KILLED
A         charges the card: receipt-order-7
(system)  kills A before it has written that down
B         is asked again: A is at it
database  has not heard from A for its ttl
B         is asked again: recovers the attempt of A
B         asks the card company: there is receipt-order-7
B         completes with receipt-order-7
C         is asked again: replays "receipt-order-7"
C         is asked for another amount under the same key: refused, a mismatch (order-7)
order-7: charged once, paid once

THE SERVER IS PAUSED
A2        charges the card: receipt-order-8
(system)  pauses A2 (SIGSTOP)
database  has not heard from A2 for its ttl
B2        is asked again: recovers the attempt of A2
B2        asks the card company: there is receipt-order-8
B2        completes with receipt-order-8
(system)  wakes A2 (SIGCONT), which goes on where it was
A2        is refused: stale fence: "charge/order-8" refused token 3; it has seen token 4
order-8: charged once, paid once
"#;

#[test]
fn idempotent_charge_charges_once() {
    prints("idempotent_charge", IDEMPOTENT_CHARGE);
}

const JOB_CLAIMS: &str = "\
60 jobs; workers take them by 5.
A         claims mail-01 mail-02 mail-03 mail-04 mail-05
B         claims mail-06 mail-07 mail-08 mail-09 mail-10
C         does 50 jobs, 0 of them recovered; A and B live, so theirs are not touched
(system)  kills A and pauses B
database  has heard from neither for a ttl
C         does 10 jobs, 10 of them recovered
B         wakes up and goes on: 5 of its 5 are refused
60 effects of 60 jobs: each once
";

#[test]
fn job_claims_are_done_once() {
    prints("job_claims", JOB_CLAIMS);
}

const SHARED_OUT_WORK: &str = "   1  A         joins
   2  database  A has 7
   3  B         joins
   4  database  A has 4, B has 3
   5  C         joins
   6  database  A has 3, B has 2, C has 2
   7  (system)  pauses B (SIGSTOP)
   8  database  A has 4, C has 3
   9  (system)  wakes B (SIGCONT), which goes on where it was
  10  B         writes for its two partitions: refused, they are others' by now
  11  database  A has 3, B has 2, C has 2
  12  (system)  kills C (SIGKILL)
  13  database  A has 4, B has 3
  14  A         finishes what it has begun, and leaves
  15  database  B has 7

Each partition had one writer after the other: no token in the register is smaller than one before it.
";

#[test]
fn shared_out_work_has_one_writer_a_partition() {
    prints("shared_out_work", SHARED_OUT_WORK);
}

const SERIAL_QUEUE: &str = "   1  A         claims apple-1: attempt 1
   2  B         claims pear-1: attempt 2
   3  C         finds nothing: every key is being worked on, or done
   4  (system)  pauses A (SIGSTOP) in the middle of apple-1
   5  database  has not heard from A for its ttl: the key is free
   6  C         claims apple-1: attempt 3
   7  (system)  wakes A (SIGCONT), which goes on where it was
   8  A         finishes apple-1: refused
   9  A         finds nothing: every key is being worked on, or done
  10  C         finishes apple-1: done
  11  (system)  kills B (SIGKILL) in the middle of pear-1
  12  A         claims apple-2: attempt 4
  13  C         claims pear-1: attempt 5
  14  C         finishes pear-1: done
  15  C         claims pear-2: attempt 6
  16  A         finishes apple-2: done
  17  A         claims apple-3: attempt 7
  18  A         finishes apple-3: done
  19  C         finishes pear-2: done
  20  A         finds nothing: every key is being worked on, or done

apple:  apple-1 apple-2 apple-3
pear:  pear-1 pear-2
";

#[test]
fn serial_queue_works_each_key_in_order() {
    prints("serial_queue", SERIAL_QUEUE);
}

const OPTIMISTIC_UPDATE: &str = r#"Without versions: two read, then both write what they have computed.
  A writes 110
  B writes 150
  100, then deposits of 10 and 50: 150

With versions: the second one is told, reads again and decides anew.
  A writes 110 over version 1: updated, version 2
  B writes 150 over version 1: conflict, it has version 2
  B writes 160 over version 2: updated, version 3
  100, then deposits of 10 and 50: 160

Over HTTP the version is an entity tag.
  GET                            -> 200, ETag: "3"
  PUT, If-Match: "3"             -> 200, ETag: "4"
  PUT, If-Match: "1"             -> 412 Precondition Failed
  PUT, If-Match: W/"3"           -> 400 misuse: If-Match takes strong entity tags, this one is weak (W/)
  PUT, If-Match: *               -> 200, ETag: "5"

Several rows in one statement, each by its version: the losers are listed.
  updated [3, 4], conflicts [2], gone [77]

16 tasks add 1 to one account, 20 times each, with update_with.
  100, then 320 deposits of 1: 420, version 321
"#;

#[test]
fn optimistic_update_loses_no_deposit() {
    prints("optimistic_update", OPTIMISTIC_UPDATE);
}

const ONE_ACTIVE_SUBSCRIPTION: &str = "\
64 sign-ups at once, each an INSERT … ON CONFLICT DO NOTHING:
  1 created, 63 were told that there is one; active: 1
  one more, later: created: false
  cancelled, then one more: created: true
  a plain INSERT by somebody who knows of no rule: refused by one_active_per_user
  active: 1

The same with a lock, and no constraint: look whether there is one, then insert.
  64 sign-ups, one after the other: active: 1
  A looks under the lock: 0 active; then it pauses, for longer than its lock lasts
  B takes the lock, looks: 0 active, and inserts
  A wakes up, and inserts: active: 2
  a script that knows of no lock inserts: active: 3
";

#[test]
fn one_active_subscription_is_one() {
    prints("one_active_subscription", ONE_ACTIVE_SUBSCRIPTION);
}

const NIGHTLY_ONCE: &str = "\
Two servers, A's clock is a day behind, B's a day ahead; 5 nights.

a timer in each server:   5 nights, 10 reports
a schedule in each:       5 nights, 5 reports, 0 of them early
";

#[test]
fn nightly_once_runs_each_night_once() {
    prints("nightly_once", NIGHTLY_ONCE);
}

// A paused worker can notice nothing; it has to go all the same.
#[test]
#[cfg(target_os = "linux")]
fn a_killed_story_leaves_no_paused_worker() {
    killed_at("fencing", "SIGSTOP", 1);
}

// Whoever waits hears nothing of its parent.
#[test]
#[cfg(target_os = "linux")]
fn a_killed_story_leaves_no_waiting_worker() {
    killed_at("waiting_in_line", "kills B", 4);
}

/// Kills the story when it tells this, and so many workers are there.
#[cfg(target_os = "linux")]
fn killed_at(name: &str, step: &str, workers: usize) {
    let mark = mark(&format!("{name}-killed"));
    let mut child = example(name, &mark).stdout(Stdio::piped()).spawn().unwrap();
    // Kept open, so that the story goes on until it is killed.
    let mut output = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let told = output.find(|line| line.contains(step));
    let marked = marked(&mark);
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(told.is_some(), "the story ended before {step}");
    assert!(marked > workers, "the look at the process table must see the story and its workers");
    leaves_nothing(&mark);
}

fn prints(name: &str, expected: &str) {
    let mark = mark(name);
    let output = example(name, &mark).output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}\n{stdout}\n{stderr}", output.status);
    assert_eq!(stdout, expected);
    // Where no server is installed, its download is announced.
    let complaints: Vec<&str> = stderr.lines().filter(|line| !line.starts_with("fencepost: ")).collect();
    assert!(complaints.is_empty(), "{stderr}");
    leaves_nothing(&mark);
}

/// The example as cargo has built it next to this test.
fn example(name: &str, mark: &str) -> Command {
    let test = env::current_exe().unwrap();
    let built: PathBuf = test.parent().and_then(|deps| deps.parent()).unwrap().join("examples").join(name);
    assert!(built.exists(), "{} is not there: build it with `cargo build --examples`", built.display());
    let mut command = Command::new(built);
    command.env(MARK, mark).stdin(Stdio::null());
    command
}

fn mark(test: &str) -> String {
    format!("{test}-{}", std::process::id())
}

/// No worker, and no watchdog of a server, which goes last.
fn leaves_nothing(mark: &str) {
    for _ in 0..3_000 {
        if marked(mark) == 0 {
            return;
        }
        thread::sleep(Duration::from_millis(10));
    }
    panic!("{} processes are left", marked(mark));
}

/// How many processes have the mark in their environment; none where there is no `/proc`.
fn marked(mark: &str) -> usize {
    let Ok(processes) = fs::read_dir("/proc") else { return 0 };
    let entry = format!("{MARK}={mark}");
    processes
        .filter_map(|process| fs::read(process.ok()?.path().join("environ")).ok())
        .filter(|environment| environment.split(|byte| *byte == 0).any(|other| other == entry.as_bytes()))
        .count()
}
