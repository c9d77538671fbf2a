//! The reason for fencing tokens, with real processes: a holder is paused past the end of its lease, another
//! one takes over and writes, the first one wakes up and writes too.
//!
//! ```text
//! cargo run --example fencing
//! ```
//!
//! Two workers make a deposit to one account: read the balance, add, write. Only one may do so at a time, so
//! each takes a lease first. The story is told twice: the workers write *through the fence*, then without.
//! This process starts the workers (it runs itself again), pauses and wakes them, and checks every claim it
//! prints: it fails if one is not true.

#[path = "support/worker.rs"]
mod worker;

use std::time::Duration;

use fencepost::testing::TestDatabase;
use fencepost::{FencingToken, HeldLease, Lease, Owner, Wait, fence};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use sqlx::PgPool;
use worker::{DEADLINE, Result, Worker, end_with_parent, ensure, say, wait_for_a_line};

/// Short, so that the story does not take long. Leave it at its default in a service.
const TTL: Duration = Duration::from_secs(1);

#[tokio::main]
async fn main() -> Result {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => tell().await,
        ["worker", name, deposit, writes] => work(name, deposit.parse()?, writes == "fenced").await,
        _ => Err("usage: fencing".into()),
    }
}

// ---- A worker: a small service, like one that you might have. ---------------------------------------

/// Makes one deposit. What it says on stdout is what the storyteller hears.
async fn work(name: &str, deposit: i64, fenced: bool) -> Result {
    end_with_parent()?;
    let pool = PgPool::connect(&std::env::var("DATABASE_URL")?).await?;
    let owner = Owner::builder(&pool).label(name).ttl(TTL).start().await?;
    let lease = Lease::named("account")?;
    loop {
        let held = lease.acquire(&owner, Wait::at_most(DEADLINE)).await?;
        say("token", held.token());
        let before: i64 = sqlx::query_scalar("SELECT balance FROM account").fetch_one(&pool).await?;
        let after = before + deposit;
        say("sum", format!("{before} + {deposit} = {after}"));
        // A careful service asks once more whether it holds the lease. It helps little: the pause comes after.
        say("held", held.is_held());

        // A pause may come between any two instructions. Here the worker waits to be told to go on, so that
        // it always comes at the worst moment: everything is checked and computed, nothing is written.
        wait_for_a_line()?;

        let written =
            if fenced { write_fenced(&held, &pool, after).await } else { write_plain(&pool, after).await };
        match written {
            Ok(()) => {
                say("wrote", after);
                wait_for_a_line()?;
                say("released", held.release().await?);
                return Ok(owner.shutdown().await?);
            }
            Err(error) if error.is_lost() => {
                say_how_it_is_refused(&held, &pool).await?;
                // What was computed is worthless now. From the beginning, when the story wants it.
                wait_for_a_line()?;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// The whole of fencing, to a service: `begin` on the lease instead of on the pool.
async fn write_fenced(held: &HeldLease, pool: &PgPool, balance: i64) -> fencepost::Result<()> {
    let mut tx = held.begin(pool).await?;
    sqlx::query("UPDATE account SET balance = $1").bind(balance).execute(&mut *tx).await?;
    tx.commit().await?;
    Ok(())
}

/// The mistake: whoever held the lease when it last looked writes.
async fn write_plain(pool: &PgPool, balance: i64) -> fencepost::Result<()> {
    sqlx::query("UPDATE account SET balance = $1").bind(balance).execute(pool).await?;
    Ok(())
}

/// Only for the story. A refused `begin` is all that a service needs to see.
async fn say_how_it_is_refused(held: &HeldLease, pool: &PgPool) -> Result {
    // It is told. (The reason depends on who noticed first: its own clock, or the database that has just
    // refused it.)
    held.lost().await;
    say("held", held.is_held());
    match held.begin(pool).await {
        Err(error @ fencepost::Error::Lost { .. }) => say("begin", error),
        other => return Err(format!("begin on a lost lease gave {other:?}").into()),
    }
    // But the safety does not hang on any clock here: ask the database directly, with the grant alone, as a
    // process would whose clock stood still.
    let mut tx = pool.begin().await?;
    match fence::check(&mut tx, held.name(), held.grant()).await {
        Err(error @ fencepost::Error::StaleFence { .. }) => say("fence", error),
        other => return Err(format!("the fence said {other:?} to a stale grant").into()),
    }
    Ok(tx.rollback().await?)
}

// ---- The storyteller: starts the workers, pauses and wakes them. ------------------------------------

async fn tell() -> Result {
    let database = TestDatabase::create().await?;
    let pool = database.pool();
    sqlx::raw_sql("CREATE TABLE account (balance bigint); INSERT INTO account VALUES (100)")
        .execute(&pool)
        .await?;

    let fenced = with_the_fence(&database, &pool).await?;
    sqlx::query("UPDATE account SET balance = 100").execute(&pool).await?;
    let unfenced = without_the_fence(&database, &pool).await?;

    println!();
    println!(
        "with fence:    100, then deposits of 50 and 10: {fenced}. A's late write was rejected, nothing was lost."
    );
    println!(
        "without fence: 100, then deposits of 50 and 10: {unfenced}. A's late write went through, B's 50 are lost."
    );
    ensure(fenced == 160 && unfenced == 110, "the balances are what the summary says")?;
    Ok(database.close().await?)
}

async fn with_the_fence(database: &TestDatabase, pool: &PgPool) -> Result<i64> {
    let mut story = Story::begin("WITH THE FENCE");
    let mut a = Worker::start(database, "A", &["10", "fenced"])?;
    let first = story.takes_the_lease(&mut a)?;
    story.pauses(&a, pool).await?;
    let mut b = Worker::start(database, "B", &["50", "fenced"])?;
    let second = story.takes_the_lease(&mut b)?;
    ensure(second > first, "the later token is the larger one")?;
    story.writes(&mut b, "through the fence")?;

    story.wakes(&mut a)?;
    ensure(a.hear("held")? == "false", "A knows that it is lost")?;
    story.line("A", "looks at its own clock: the lease is lost");
    a.hear("begin")?;
    story.line("A", "begins a fenced transaction: refused, this lease is lost");
    let refusal = a.hear("fence")?;
    story.line("A", &format!("asks the database itself: {refusal}"));
    ensure(balance(pool).await? == 150, "the late write changed nothing")?;
    story.line("database", "the balance is still 150: nothing was lost");

    story.releases(&mut b, true)?;
    a.tell("your turn")?;
    let third = story.takes_the_lease(&mut a)?;
    ensure(third > second, "tokens only grow")?;
    story.writes(&mut a, "through the fence")?;
    story.releases(&mut a, true)?;
    balance(pool).await
}

async fn without_the_fence(database: &TestDatabase, pool: &PgPool) -> Result<i64> {
    let mut story = Story::begin("WITHOUT THE FENCE");
    let mut a = Worker::start(database, "A", &["10", "unfenced"])?;
    let first = story.takes_the_lease(&mut a)?;
    story.pauses(&a, pool).await?;
    let mut b = Worker::start(database, "B", &["50", "unfenced"])?;
    let second = story.takes_the_lease(&mut b)?;
    ensure(second > first, "the later token is the larger one")?;
    story.writes(&mut b, "with a plain UPDATE")?;
    ensure(balance(pool).await? == 150, "B's write is there")?;

    story.wakes(&mut a)?;
    story.hears_of_the_write(&mut a, "with a plain UPDATE")?;
    let left = balance(pool).await?;
    story.line("database", &format!("the balance is {left}: B's deposit is gone, and nobody was told"));
    story.releases(&mut b, true)?;
    story.releases(&mut a, false)?;
    Ok(left)
}

/// The timeline: numbered lines of who did what. Each step makes it happen, hears that it did, and tells it.
struct Story {
    step: u32,
}

impl Story {
    fn begin(title: &str) -> Self {
        println!("{}{title}", if title.starts_with("WITHOUT") { "\n" } else { "" });
        Self { step: 0 }
    }

    fn line(&mut self, who: &str, what: &str) {
        self.step += 1;
        println!("{:>4}  {who:<8}  {what}", self.step);
    }

    fn takes_the_lease(&mut self, worker: &mut Worker) -> Result<FencingToken> {
        let token = FencingToken::new(worker.hear("token")?.parse()?)?;
        self.line(worker.name, &format!("takes the lease: token {token}"));
        let sum = worker.hear("sum")?;
        self.line(worker.name, &format!("reads the balance and computes {sum}"));
        ensure(worker.hear("held")? == "true", "the lease is held before the pause")?;
        Ok(token)
    }

    /// Returns when the worker stands still and the database has given it up.
    async fn pauses(&mut self, worker: &Worker, pool: &PgPool) -> Result {
        self.line(worker.name, "looks at its own clock: the lease is held, so it goes on to write");
        let pid = Pid::from_child(&worker.child);
        kill_process(pid, Signal::STOP)?;
        // The kernel says when every thread of it has stopped.
        waitpid(Some(pid), WaitOptions::UNTRACED)?;
        self.line("(system)", &format!("pauses {} (SIGSTOP)", worker.name));
        worker.until_expired(pool).await?;
        self.line("database", &format!("has not heard from {} for its ttl: the lease is free", worker.name));
        Ok(())
    }

    fn wakes(&mut self, worker: &mut Worker) -> Result {
        kill_process(Pid::from_child(&worker.child), Signal::CONT)?;
        self.line("(system)", &format!("wakes {} (SIGCONT), which goes on where it was", worker.name));
        worker.tell("go on")
    }

    fn writes(&mut self, worker: &mut Worker, how: &str) -> Result {
        worker.tell("go on")?;
        self.hears_of_the_write(worker, how)
    }

    fn hears_of_the_write(&mut self, worker: &mut Worker, how: &str) -> Result {
        let balance = worker.hear("wrote")?;
        self.line(worker.name, &format!("writes {balance} {how}: committed"));
        Ok(())
    }

    fn releases(&mut self, worker: &mut Worker, held: bool) -> Result {
        worker.tell("release")?;
        ensure(
            worker.hear("released")? == held.to_string(),
            "release tells whether the lease was still held",
        )?;
        self.line(
            worker.name,
            if held { "releases the lease" } else { "releases, and is told that the lease was lost" },
        );
        ensure(worker.child.wait()?.success(), "the worker ended well")
    }
}

async fn balance(pool: &PgPool) -> Result<i64> {
    Ok(sqlx::query_scalar("SELECT balance FROM account").fetch_one(pool).await?)
}
