//! Jobs in a table, and workers that take them in batches: one is killed, one is paused, and each job is done once.
//!
//! ```text
//! cargo run --example job_claims
//! ```
//!
//! The workers are processes (this program runs itself again). It fails if a claim that it prints is not true.

#[path = "support/worker.rs"]
#[allow(dead_code, reason = "other examples use another part of it")]
mod worker;

use std::time::Duration;

use fencepost::Owner;
use fencepost::claim::{Attempt, Claim, Jobs};
use fencepost::testing::TestDatabase;
use rustix::process::{Pid, Signal, kill_process};
use sqlx::PgPool;
use worker::{Result, Worker, end_with_parent, ensure, say, wait_for_a_line};

/// Short, so that the story does not take long. Leave it at its default in a service.
const TTL: Duration = Duration::from_secs(1);

const JOBS: i64 = 60;
const BATCH: usize = 5;

#[tokio::main]
async fn main() -> Result {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => tell().await,
        ["worker", name, "one batch"] => one_batch(name).await,
        ["worker", name, "all"] => all(name).await,
        _ => Err("usage: job_claims".into()),
    }
}

// ---- The workers. -----------------------------------------------------------------------------------

/// The effect and the end of the job commit together, or not at all. Whether they did.
async fn work(pool: &PgPool, attempt: &Attempt, name: &str) -> Result<bool> {
    let mut tx = pool.begin().await?;
    sqlx::query("INSERT INTO done (job, by) VALUES ($1, $2)")
        .bind(attempt.key().as_str())
        .bind(name)
        .execute(&mut *tx)
        .await?;
    match attempt.complete(&mut tx, name).await {
        Ok(()) => tx.commit().await?,
        Err(error) if error.is_lost() => return Ok(false),
        Err(error) => return Err(error.into()),
    }
    Ok(true)
}

/// Takes one batch, and does it when it is told to.
async fn one_batch(name: &str) -> Result {
    end_with_parent()?;
    let pool = PgPool::connect(&std::env::var("DATABASE_URL")?).await?;
    let owner = Owner::builder(&pool).label(name).ttl(TTL).start().await?;
    let attempts = Jobs::of_kind("mail")?.claim_next(&owner, BATCH).await?;
    let keys: Vec<&str> = attempts.iter().map(|attempt| attempt.key().as_str()).collect();
    say("claimed", keys.join(" "));
    wait_for_a_line()?;
    let mut refused = 0;
    for attempt in &attempts {
        refused += i32::from(!work(&pool, attempt, name).await?);
    }
    say("refused", refused);
    Ok(owner.shutdown().await?)
}

/// Does what there is; and again, when it is told to.
async fn all(name: &str) -> Result {
    end_with_parent()?;
    let pool = PgPool::connect(&std::env::var("DATABASE_URL")?).await?;
    let owner = Owner::builder(&pool).label(name).ttl(TTL).start().await?;
    for _ in 0..2 {
        let (mut done, mut recovered) = (0, 0);
        loop {
            let attempts = Jobs::of_kind("mail")?.claim_next(&owner, BATCH).await?;
            if attempts.is_empty() {
                break;
            }
            for attempt in &attempts {
                done += i32::from(work(&pool, attempt, name).await?);
                recovered += i32::from(attempt.recovered().is_some());
            }
        }
        say("did", format!("{done} jobs, {recovered} of them recovered"));
        wait_for_a_line()?;
    }
    Ok(owner.shutdown().await?)
}

// ---- What happens to them. --------------------------------------------------------------------------

async fn tell() -> Result {
    let database = TestDatabase::create().await?;
    let pool = database.pool();
    sqlx::raw_sql("CREATE TABLE done (job text, by text)").execute(&pool).await?;

    // With the data that the jobs are about, in one transaction.
    let mut tx = pool.begin().await?;
    for n in 1..=JOBS {
        let job = Claim::named(&format!("mail-{n:02}"))?.kind("mail")?.payload(&n)?;
        ensure(job.enqueue(&mut tx).await?, "it is new")?;
    }
    tx.commit().await?;
    println!("{JOBS} jobs; workers take them by {BATCH}.");

    let mut a = Worker::start(&database, "A", &["one batch"])?;
    println!("A         claims {}", a.hear("claimed")?);
    let mut b = Worker::start(&database, "B", &["one batch"])?;
    println!("B         claims {}", b.hear("claimed")?);
    let mut c = Worker::start(&database, "C", &["all"])?;
    println!("C         does {}; A and B live, so theirs are not touched", c.hear("did")?);

    kill_process(Pid::from_child(&a.child), Signal::KILL)?;
    a.child.wait()?;
    kill_process(Pid::from_child(&b.child), Signal::STOP)?;
    println!("(system)  kills A and pauses B");
    a.until_expired(&pool).await?;
    b.until_expired(&pool).await?;
    println!("database  has heard from neither for a ttl");
    c.tell("go on")?;
    println!("C         does {}", c.hear("did")?);
    kill_process(Pid::from_child(&b.child), Signal::CONT)?;
    b.tell("go on")?;
    println!("B         wakes up and goes on: {} of its {BATCH} are refused", b.hear("refused")?);
    c.tell("end")?;

    let (rows, jobs, by_c): (i64, i64, i64) =
        sqlx::query_as("SELECT count(*), count(DISTINCT job), count(*) FILTER (WHERE by = 'C') FROM done")
            .fetch_one(&pool)
            .await?;
    ensure(rows == JOBS && jobs == JOBS && by_c == JOBS, "each once, all by C")?;
    let left: i64 = sqlx::query_scalar("SELECT count(*) FROM fencepost.claims WHERE state <> 'done'")
        .fetch_one(&pool)
        .await?;
    ensure(left == 0, "none is left")?;
    println!("{rows} effects of {jobs} jobs: each once");
    Ok(database.close().await?)
}
