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
  12  A         asks the database itself: stale fence: "account" refused token 1; token 2 came later
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
carol  write through the fence    -> rejected: stale fence: "printer" refused token 3; token 4 came later
"#;

#[test]
fn lock_server_gives_its_answers() {
    prints("lock_server", LOCK_SERVER);
}

const STORAGE: &str = r#"A lock elsewhere gives the tokens; the storage remembers the largest one it has seen.
  token 33  accepted
  token 34  accepted
  token 33  rejected: stale fence: "file" refused token 33; token 34 came later
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

// A paused worker can notice nothing; it has to go all the same.
#[test]
#[cfg(target_os = "linux")]
fn a_killed_story_leaves_no_paused_worker() {
    let mark = mark("killed");
    let mut child = example("fencing", &mark).stdout(Stdio::piped()).spawn().unwrap();
    let output = BufReader::new(child.stdout.take().unwrap());
    let paused = output.lines().map_while(Result::ok).find(|line| line.contains("SIGSTOP"));
    let marked = marked(&mark);
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(paused.is_some(), "the story ended before the pause");
    assert!(marked >= 2, "the look at the process table must see the story and its worker");
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
