//! Two processes are to run a nightly report; one runs it. The lock is Postgres's own: an advisory lock on the key
//! of a name, held by a connection of the process that runs, and so gone with it.
//!
//! ```text
//! cargo run --example nightly_report_advisory
//! ```
//!
//! The storyteller starts the workers (it runs itself again), kills one in the middle of its report, and checks
//! every claim it prints: it fails if one is not true. What is awaited is what a worker says, or what the
//! database shows.

#[path = "support/worker.rs"]
#[expect(dead_code, reason = "an advisory lock has no ttl whose end would have to be awaited")]
mod worker;

use std::os::unix::process::ExitStatusExt as _;
use std::time::Duration;

use fencepost::testing::TestDatabase;
use fencepost::{AdvisoryLock, HeldAdvisory, Key, Owner, Wait};
use sqlx::PgPool;
use worker::{DEADLINE, Result, Worker, end_with_parent, ensure, say, wait_for_a_line};

#[tokio::main]
async fn main() -> Result {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => tell().await,
        ["worker", name] => work(name).await,
        _ => Err("usage: nightly_report_advisory".into()),
    }
}

// ---- A worker: a small service, like one that you might have. ---------------------------------------

async fn work(name: &str) -> Result {
    end_with_parent()?;
    let pool = PgPool::connect(&std::env::var("DATABASE_URL")?).await?;
    let owner = Owner::builder(&pool).label(name).start().await?;

    // The whole of it, to a service: whoever gets the lock runs, the others do not.
    let report = AdvisoryLock::exclusive(Key::from_name("reports", "nightly")?);
    let first = report.try_acquire(&owner).await?;
    say("tried", if first.is_some() { "held" } else { "refused" });
    let held = match first {
        Some(held) => held,
        // This one stands by, in case the other one does not get to the end.
        None => report.acquire(&owner, Wait::at_most(DEADLINE)).await?,
    };
    run(&held, &pool, name).await?;
    say("released", held.release().await?);
    Ok(owner.shutdown().await?)
}

/// The report takes until the storyteller says so, unless the lock is lost meanwhile.
async fn run(held: &HeldAdvisory, pool: &PgPool, name: &str) -> Result {
    say("runs", name);
    tokio::task::block_in_place(wait_for_a_line)?;
    if !held.is_held() {
        return Err("lost it on the way: this report is not to be published".into());
    }
    sqlx::query("INSERT INTO published (by) VALUES ($1)").bind(name).execute(pool).await?;
    Ok(())
}

// ---- The storyteller: starts the workers, and kills one. --------------------------------------------

async fn tell() -> Result {
    let database = TestDatabase::create().await?;
    let pool = database.pool();
    sqlx::raw_sql("CREATE TABLE published (by text)").execute(&pool).await?;

    let mut a = Worker::start(&database, "A", &[])?;
    ensure(a.hear("tried")? == "held", "the lock was free")?;
    a.hear("runs")?;
    line(1, "A", "takes the lock and runs the report");

    let mut b = Worker::start(&database, "B", &[])?;
    ensure(b.hear("tried")? == "refused", "one of the two has it")?;
    line(2, "B", "is refused, so it does not run; it stands by");

    until(&pool, "A holds, B waits").await?;
    line(3, "database", "shows reports/nightly: A holds, B waits");

    a.child.kill()?;
    ensure(a.child.wait()?.signal() == Some(9), "it was alive until it was killed")?;
    line(4, "(system)", "kills A (SIGKILL) in the middle of the report");

    b.hear("runs")?;
    until(&pool, "B holds").await?;
    line(5, "B", "has the lock, which went with A's connection, and runs the report");

    b.tell("to the end")?;
    ensure(b.hear("released")? == "true", "it was held until now")?;
    ensure(b.child.wait()?.success(), "the worker ended well")?;
    until(&pool, "").await?;
    line(6, "B", "publishes it and releases the lock");

    let published: Vec<String> = sqlx::query_scalar("SELECT by FROM published").fetch_all(&pool).await?;
    ensure(published == ["B"], "published once")?;
    println!();
    println!("started:    A and B");
    println!("ran:        A, killed on the way; then B, and never both");
    println!("published:  once");
    Ok(database.close().await?)
}

/// Returns when the database shows this of the lock.
async fn until(pool: &PgPool, what: &str) -> Result {
    let shown = async {
        while shown(pool).await? != what {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    };
    tokio::time::timeout(DEADLINE, shown).await?
}

/// Who holds the lock and who waits for it, as an operator would look it up.
async fn shown(pool: &PgPool) -> Result<String> {
    Ok(sqlx::query_scalar(
        "SELECT coalesce(string_agg(replace(application_name, 'fencepost ', '') || CASE WHEN granted THEN ' holds' ELSE ' waits' END,
                                    ', ' ORDER BY granted DESC), '')
           FROM fencepost.advisory_locks() WHERE name = 'reports/nightly'",
    )
    .fetch_one(pool)
    .await?)
}

fn line(step: u32, who: &str, what: &str) {
    println!("{step:>4}  {who:<8}  {what}");
}
