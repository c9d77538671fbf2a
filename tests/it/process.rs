//! A process that is paused. The child is this test binary, executed again.

use std::io::{BufRead as _, BufReader, Lines, Write as _};
use std::process::{Child, ChildStdout, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use sqlx::PgPool;

use crate::support::{LONG, SHORT, database, hold, hold_when_free, owner, until, until_true, within};

const URL: &str = "FENCEPOST_TEST_CHILD_URL";

/// A child process that is gone with this value.
struct Holder {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Holder {
    fn start(url: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "process::the_childs_part", "--nocapture"])
            .env(URL, url)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    /// The rest of the next line that begins so.
    fn says(&mut self, start: &str) -> String {
        for line in &mut self.lines {
            if let Some(rest) = line.unwrap().strip_prefix(start) {
                return rest.to_owned();
            }
        }
        panic!("the child ended before it said {start:?}")
    }

    fn go_on(&mut self) {
        writeln!(self.child.stdin.as_mut().unwrap(), "go on").unwrap();
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Not a test by itself: what the child of the test below does. Without its variable it is nobody's child.
#[tokio::test(flavor = "multi_thread")]
async fn the_childs_part() {
    let Ok(url) = std::env::var(URL) else { return };
    let next_line = || drop(std::io::stdin().lines().next().unwrap().unwrap());
    let pool = PgPool::connect(&url).await.unwrap();
    let a = owner(&pool, "child", SHORT).await;
    let held = hold(&a, "report").await;
    println!("\nholds {}", held.token());
    // Paused here, for as long as the parent likes.
    tokio::task::block_in_place(next_line);
    println!("believes {}", held.is_held());
    println!("reason {:?}", held.lost().await);
    let mut tx = pool.begin().await.unwrap();
    // Past its own knowledge, as a worker that was only handed the grant.
    let fence = fencepost::fence::check(&mut tx, held.name(), held.grant()).await;
    println!("fence {}", fence.unwrap_err());
    drop(tx);
    let again = hold(&a, "other").await;
    println!("again {}", again.is_held());
}

// The story of the library: paused beyond the ttl, somebody else has it, the late write is refused.
#[tokio::test(flavor = "multi_thread")]
async fn a_paused_process_knows_at_once_and_its_fence_rejects() {
    let (database, pool) = database().await;
    let b = owner(&pool, "b", LONG).await;
    let url = database.url();
    let mut child = tokio::task::block_in_place(|| Holder::start(&url));
    let token: i64 = tokio::task::block_in_place(|| child.says("holds ")).parse().unwrap();
    child.signal(Signal::STOP);
    let next = hold_when_free(&b, "report").await;
    assert!(next.token().as_i64() > token);
    child.signal(Signal::CONT);
    child.go_on();
    let report = within(
        "the child's report",
        tokio::task::spawn_blocking(move || {
            ["believes ", "reason ", "fence ", "again "].map(|start| child.says(start))
        }),
    )
    .await
    .unwrap();
    let [believes, reason, fence, again] = report;
    assert_eq!((believes.as_str(), reason.as_str(), again.as_str()), ("false", "Expired", "true"));
    assert_eq!(
        fence,
        format!("stale fence: \"report\" refused token {token}; token {} came later", next.token())
    );
    assert!(next.is_held());
}

// A paused process with an open fenced transaction blocks the others no longer than its ttl.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_process_blocks_nobody_beyond_its_ttl() {
    let (database, pool) = database().await;
    let b = owner(&pool, "b", LONG).await;
    let url = database.url();
    let mut child = tokio::task::block_in_place(|| Holder::start(&url));
    tokio::task::block_in_place(|| child.says("holds "));
    child.signal(Signal::KILL);
    let next = hold_when_free(&b, "report").await;
    assert!(next.is_held());
    let gone = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'fencepost child')";
    until_true(&pool, "its sessions are gone", gone).await;
    until("it is gone", async || child.child.try_wait().unwrap().map(drop)).await;
}
