//! At most three at once, with real processes: six want one of three permits. One is killed while it has one, one is
//! paused; their permits are free when their ttl is over, and whoever waits is served in order.
//!
//! ```text
//! cargo run --example at_most_three
//! ```
//!
//! This process starts the workers one after the other (it runs itself again), kills one, pauses one, and checks every
//! claim it prints: it fails if one is not true. Nothing depends on how long a step takes.

#[path = "support/worker.rs"]
#[expect(dead_code, reason = "other examples use other parts of it")]
mod worker;

use std::os::unix::process::ExitStatusExt as _;
use std::time::Duration;

use fencepost::testing::TestDatabase;
use fencepost::{FencingToken, Owner, Semaphore, Wait};
use rustix::process::{Pid, Signal, kill_process};
use sqlx::PgPool;
use worker::{DEADLINE, Result, Worker, end_with_parent, ensure, say, wait_for_a_line};

/// Short, so that the story does not take long. Leave it at its default in a service.
const TTL: Duration = Duration::from_secs(1);

#[tokio::main]
async fn main() -> Result {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => tell().await,
        ["worker", name] => work(name).await,
        _ => Err("usage: at_most_three".into()),
    }
}

// ---- A worker: a small service, like one that you might have. ---------------------------------------

/// Exports when it may. What it says on stdout is what the storyteller hears.
async fn work(name: &str) -> Result {
    end_with_parent()?;
    let pool = PgPool::connect(&std::env::var("DATABASE_URL")?).await?;
    let owner = Owner::builder(&pool).label(name).ttl(TTL).start().await?;

    // The whole of a semaphore, to a service.
    let permit = Semaphore::named("exports", 3)?.acquire(&owner, Wait::at_most(DEADLINE)).await?;
    say("exports", permit.token());

    wait_for_a_line()?;
    say("believes", permit.is_held());
    say("late", permit.begin(&pool).await.err().map_or("accepted".to_owned(), |refused| refused.to_string()));
    say("released", permit.release().await?);
    Ok(owner.shutdown().await?)
}

// ---- The storyteller: starts the workers, and interferes. -------------------------------------------

#[expect(clippy::many_single_char_names, reason = "the workers are called so")]
async fn tell() -> Result {
    let database = TestDatabase::create().await?;
    let pool = database.pool();
    let mut story = Story { step: 0, pool: &pool, last: None };
    let mut workers = Vec::new();
    for name in ["A", "B", "C"] {
        let mut worker = Worker::start(&database, name, &[])?;
        story.exports(&mut worker).await?;
        workers.push(worker);
    }
    for (name, in_line) in [("D", "D"), ("E", "D E"), ("F", "D E F")] {
        let worker = Worker::start(&database, name, &[])?;
        story.waits(&worker, in_line).await?;
        workers.push(worker);
    }
    let [a, b, c, d, e, f] = &mut workers[..] else { return Err("six workers".into()) };

    a.tell("release")?;
    for what in ["believes", "late", "released"] {
        a.hear(what)?;
    }
    story.line("A", "releases its permit, which goes to D");
    story.exports(d).await?;

    b.child.kill()?;
    ensure(b.child.wait()?.signal() == Some(9), "it was alive until it was killed")?;
    story.line("(system)", "kills B (SIGKILL)");
    story.exports(e).await?;

    kill_process(Pid::from_child(&c.child), Signal::STOP)?;
    story.line("(system)", "pauses C (SIGSTOP)");
    story.exports(f).await?;

    kill_process(Pid::from_child(&c.child), Signal::CONT)?;
    story.line("(system)", "wakes C (SIGCONT), which goes on where it was");
    c.tell("go on")?;
    ensure(c.hear("believes")? == "false", "it knows by its own clock")?;
    story.line("C", "looks at its own clock: its permit is lost");
    c.hear("late")?;
    story.line("C", "begins a fenced transaction all the same: refused");
    ensure(c.hear("released")? == "false", "it had been lost")?;
    story.at_most_three().await?;
    story.line("(parent)", "there were never more than three");

    println!();
    println!("held at the end: {}", holders(&pool).await?);
    drop(workers);
    Ok(database.close().await?)
}

/// The timeline: numbered lines of who did what.
struct Story<'a> {
    step: u32,
    pool: &'a PgPool,
    /// The token granted last.
    last: Option<FencingToken>,
}

impl Story<'_> {
    fn line(&mut self, who: &str, what: &str) {
        self.step += 1;
        println!("{:>4}  {who:<8}  {what}", self.step);
    }

    /// It says so.
    async fn exports(&mut self, worker: &mut Worker) -> Result {
        let token = FencingToken::new(worker.hear("exports")?.parse()?)?;
        ensure(self.last.is_none_or(|last| token > last), "tokens grow in the order of the grants")?;
        self.last = Some(token);
        self.at_most_three().await?;
        let holders = holders(self.pool).await?;
        self.line(worker.name, &format!("has a permit, token {token}; held by: {holders}"));
        Ok(())
    }

    async fn at_most_three(&self) -> Result {
        ensure(holders(self.pool).await?.split(' ').count() <= 3, "three at most")
    }

    /// Returns when the database shows its ticket, so that whoever is started next comes after it.
    async fn waits(&mut self, worker: &Worker, in_line: &str) -> Result {
        let line = "SELECT coalesce(string_agg(o.label, ' ' ORDER BY w.ticket), '')
                      FROM fencepost.waiters w JOIN fencepost.owners o ON o.id = w.owner";
        let arrived = async {
            while sqlx::query_scalar::<_, String>(line).fetch_one(self.pool).await? != in_line {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            Ok::<_, sqlx::Error>(())
        };
        tokio::time::timeout(DEADLINE, arrived).await??;
        self.line(worker.name, &format!("waits; in line: {in_line}"));
        Ok(())
    }
}

/// Those that hold a permit and live, as the database has it.
async fn holders(pool: &PgPool) -> Result<String> {
    Ok(sqlx::query_scalar(
        "SELECT coalesce(string_agg(p.label, ' ' ORDER BY p.token), 'nobody')
           FROM fencepost.permits p JOIN fencepost.owners o ON o.id = p.owner
          WHERE p.released_at IS NULL AND o.expires_at > 'epoch'",
    )
    .fetch_one(pool)
    .await?)
}
