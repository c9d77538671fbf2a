//! A queue whose items are worked one at a time and in order for each key, with real processes: one is paused in the
//! middle of an item and one is killed.
//!
//! ```text
//! cargo run --example serial_queue
//! ```
//!
//! The whole of the queue is in `support/serial_queue.rs`. This process starts the workers (it runs itself again), tells
//! them what to do, and checks every claim it prints: it fails if one is not true.

#[path = "support/serial_queue.rs"]
mod serial_queue;
#[path = "support/worker.rs"]
#[allow(dead_code, reason = "other examples use another part of it")]
mod worker;

use std::time::Duration;

use fencepost::Owner;
use fencepost::testing::TestDatabase;
use rustix::process::{Pid, Signal, kill_process};
use sqlx::PgPool;
use worker::{Result, Worker, end_with_parent, ensure, say};

/// Short, so that the story does not take long. Leave it at its default in a service.
const TTL: Duration = Duration::from_secs(1);

#[tokio::main]
async fn main() -> Result {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => tell().await,
        ["worker", name] => work(name).await,
        _ => Err("usage: serial_queue".into()),
    }
}

// ---- A worker. ----------------------------------------------------------------------------------------

/// Claims and finishes as it is told. A service does the same in a loop, with its work in between.
async fn work(name: &str) -> Result {
    end_with_parent()?;
    let pool = PgPool::connect(&std::env::var("DATABASE_URL")?).await?;
    let owner = Owner::builder(&pool).label(name).ttl(TTL).start().await?;
    let mut claimed = None;
    for order in std::io::stdin().lines() {
        match order?.as_str() {
            "claim" => {
                claimed = serial_queue::claim(&owner, &pool).await?;
                match &claimed {
                    Some(claim) => say("claimed", format!("{} {}", claim.body, claim.token())),
                    None => say("claimed", "nothing 0"),
                }
            }
            _ => match claimed.take().ok_or("nothing is claimed")?.finish(&pool).await {
                Ok(()) => say("finished", "done"),
                Err(error) if error.is_lost() => say("finished", "refused"),
                Err(error) => return Err(error.into()),
            },
        }
    }
    Ok(())
}

// ---- The storyteller. ---------------------------------------------------------------------------------

async fn tell() -> Result {
    let database = TestDatabase::create().await?;
    let pool = database.pool();
    sqlx::raw_sql(serial_queue::TABLE).execute(&pool).await?;
    let items = "INSERT INTO item (key, body) VALUES \
                 ('apple', 'apple-1'), ('apple', 'apple-2'), ('pear', 'pear-1'), ('apple', 'apple-3'), ('pear', 'pear-2')";
    sqlx::raw_sql(items).execute(&pool).await?;
    let mut story = Story { pool: pool.clone(), step: 0 };
    let [mut a, mut b, mut c] = [
        Worker::start(&database, "A", &[])?,
        Worker::start(&database, "B", &[])?,
        Worker::start(&database, "C", &[])?,
    ];
    story.claims(&mut a, "apple-1").await?;
    story.claims(&mut b, "pear-1").await?;
    story.claims(&mut c, "nothing").await?;

    kill_process(Pid::from_child(&a.child), Signal::STOP)?;
    story.line("(system)", "pauses A (SIGSTOP) in the middle of apple-1");
    a.until_expired(&pool).await?;
    story.line("database", "has not heard from A for its ttl: the key is free");
    story.claims(&mut c, "apple-1").await?;
    kill_process(Pid::from_child(&a.child), Signal::CONT)?;
    story.line("(system)", "wakes A (SIGCONT), which goes on where it was");
    story.finishes(&mut a, "apple-1", "refused").await?;
    story.claims(&mut a, "nothing").await?;
    story.finishes(&mut c, "apple-1", "done").await?;

    b.child.kill()?;
    story.line("(system)", "kills B (SIGKILL) in the middle of pear-1");
    b.until_expired(&pool).await?;
    story.claims(&mut a, "apple-2").await?;
    story.claims(&mut c, "pear-1").await?;
    story.finishes(&mut c, "pear-1", "done").await?;
    story.claims(&mut c, "pear-2").await?;
    story.finishes(&mut a, "apple-2", "done").await?;
    story.claims(&mut a, "apple-3").await?;
    story.finishes(&mut a, "apple-3", "done").await?;
    story.finishes(&mut c, "pear-2", "done").await?;
    story.claims(&mut a, "nothing").await?;

    // In the order of the tokens by which they were done.
    let order = "SELECT key, string_agg(body, ' ' ORDER BY done) FROM item GROUP BY key ORDER BY key";
    println!();
    for (key, order) in sqlx::query_as::<_, (String, String)>(order).fetch_all(&pool).await? {
        println!("{key}:  {order}");
    }
    Ok(())
}

struct Story {
    pool: PgPool,
    step: u32,
}

impl Story {
    fn line(&mut self, who: &str, what: &str) {
        self.step += 1;
        println!("{:>4}  {who:<9} {what}", self.step);
    }

    async fn claims(&mut self, worker: &mut Worker, body: &str) -> Result {
        worker.tell("claim")?;
        let heard = worker.hear("claimed")?;
        let (claimed, token) = heard.split_once(' ').ok_or("no token")?;
        ensure(claimed == body, &format!("{} claims {body}, not {claimed}", worker.name))?;
        if body == "nothing" {
            self.line(worker.name, "finds nothing: every key is being worked on, or done");
        } else {
            let known = "SELECT attempt FROM item WHERE body = $1";
            let known: i64 = sqlx::query_scalar(known).bind(body).fetch_one(&self.pool).await?;
            ensure(known.to_string() == token, "the database knows the attempt")?;
            self.line(worker.name, &format!("claims {body}: attempt {token}"));
        }
        Ok(())
    }

    async fn finishes(&mut self, worker: &mut Worker, body: &str, outcome: &str) -> Result {
        worker.tell("finish")?;
        let heard = worker.hear("finished")?;
        ensure(heard == outcome, &format!("{} finishes {body}: {outcome}, not {heard}", worker.name))?;
        let done = "SELECT done IS NOT NULL FROM item WHERE body = $1";
        let done: bool = sqlx::query_scalar(done).bind(body).fetch_one(&self.pool).await?;
        ensure(done == (outcome == "done"), "the database agrees")?;
        self.line(worker.name, &format!("finishes {body}: {outcome}"));
        Ok(())
    }
}
