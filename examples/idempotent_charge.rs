//! A card is charged once, though the client asks again and again, one server dies in the middle of it and another is
//! paused.
//!
//! ```text
//! cargo run --example idempotent_charge
//! ```
//!
//! Each request is served by a process of its own (this program runs itself again). The card company is another
//! system: a charge there is no part of any transaction here. It fails if a claim that it prints is not true.

#[path = "support/worker.rs"]
#[allow(dead_code, reason = "other examples use another part of it")]
mod worker;

use std::time::Duration;

use fencepost::claim::{Begun, Claim};
use fencepost::testing::TestDatabase;
use fencepost::{Error, Owner};
use rustix::process::{Pid, Signal, kill_process};
use sqlx::PgPool;
use worker::{Result, Worker, end_with_parent, ensure, say, wait_for_a_line};

/// Short, so that the story does not take long. Leave it at its default in a service.
const TTL: Duration = Duration::from_secs(1);

#[tokio::main]
async fn main() -> Result {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => tell().await,
        ["worker", name, order, cents] => serve(name, order, cents.parse()?).await,
        _ => Err("usage: idempotent_charge".into()),
    }
}

// ---- The server: one request. -----------------------------------------------------------------------

async fn serve(name: &str, order: &str, cents: i64) -> Result {
    end_with_parent()?;
    let pool = PgPool::connect(&std::env::var("DATABASE_URL")?).await?;
    let owner = Owner::builder(&pool).label(name).ttl(TTL).start().await?;
    let claim = Claim::named(&format!("charge/{order}"))?.fingerprint(cents.to_string());

    let (attempt, receipt) = match claim.begin(&owner).await? {
        Begun::Fresh(attempt) => {
            let receipt = charge(&pool, order, cents).await?;
            say("charged", &receipt);
            (attempt, receipt)
        }
        // Whoever was at it has said nothing: the card company knows.
        Begun::Recovered(attempt, previous) => {
            say("recovers", previous.by.as_deref().unwrap_or("somebody"));
            let made = "SELECT receipt FROM card_company WHERE reference = $1";
            let made: Option<String> = sqlx::query_scalar(made).bind(order).fetch_optional(&pool).await?;
            say("found", made.as_deref().unwrap_or("nothing"));
            let receipt = match made {
                Some(receipt) => receipt,
                None => charge(&pool, order, cents).await?,
            };
            (attempt, receipt)
        }
        nothing_to_do => {
            match nothing_to_do {
                Begun::InProgress { by, .. } => say("in-progress", by.as_deref().unwrap_or("somebody")),
                Begun::Replay(receipt) => say("replay", receipt),
                Begun::Poison(poison) => say("poison", poison.crashes),
                _ => say("mismatch", order),
            }
            return Ok(());
        }
    };
    wait_for_a_line()?;

    // The order is paid and the claim complete, or neither.
    let mut tx = pool.begin().await?;
    sqlx::query("INSERT INTO paid (reference, receipt, by) VALUES ($1, $2, $3)")
        .bind(order)
        .bind(&receipt)
        .bind(name)
        .execute(&mut *tx)
        .await?;
    match attempt.complete(&mut tx, &receipt).await {
        Ok(()) => {
            tx.commit().await?;
            say("completed", receipt);
        }
        Err(error) if error.is_lost() => say("refused", error_of_the_database(&pool, &attempt).await?),
        Err(error) => return Err(error.into()),
    }
    Ok(owner.shutdown().await?)
}

/// At the card company, for ever, at once.
async fn charge(pool: &PgPool, order: &str, cents: i64) -> Result<String> {
    let charge = "INSERT INTO card_company (reference, cents) VALUES ($1, $2) RETURNING receipt";
    Ok(sqlx::query_scalar(charge).bind(order).bind(cents).fetch_one(pool).await?)
}

/// What the database itself says, which has the last word.
async fn error_of_the_database(pool: &PgPool, attempt: &fencepost::claim::Attempt) -> Result<Error> {
    let complete = sqlx::query("SELECT fencepost.claim_complete($1, $2, $3)")
        .bind(attempt.key().as_str())
        .bind(attempt.token())
        .bind(attempt.grant().id);
    match complete.execute(pool).await {
        Ok(_) => Err("a stale attempt was completed".into()),
        Err(error) => Ok(error.into()),
    }
}

// ---- The client, and what happens to the servers. ---------------------------------------------------

async fn tell() -> Result {
    let database = TestDatabase::create().await?;
    let pool = database.pool();
    sqlx::raw_sql(
        "CREATE TABLE card_company (reference text, cents bigint, number bigint GENERATED ALWAYS AS IDENTITY,
                                    receipt text GENERATED ALWAYS AS ('receipt-' || reference) STORED);
         CREATE TABLE paid (reference text, receipt text, by text)",
    )
    .execute(&pool)
    .await?;
    killed(&database, &pool).await?;
    println!();
    paused(&database, &pool).await?;
    Ok(database.close().await?)
}

async fn killed(database: &TestDatabase, pool: &PgPool) -> Result {
    println!("THE SERVER IS KILLED");
    let mut a = Worker::start(database, "A", &["order-7", "4200"])?;
    println!("A         charges the card: {}", a.hear("charged")?);
    kill_process(Pid::from_child(&a.child), Signal::KILL)?;
    a.child.wait()?;
    println!("(system)  kills A before it has written that down");
    let mut b = Worker::start(database, "B", &["order-7", "4200"])?;
    println!("B         is asked again: {} is at it", b.hear("in-progress")?);
    a.until_expired(pool).await?;
    println!("database  has not heard from A for its ttl");
    let mut b = Worker::start(database, "B", &["order-7", "4200"])?;
    println!("B         is asked again: recovers the attempt of {}", b.hear("recovers")?);
    println!("B         asks the card company: there is {}", b.hear("found")?);
    b.tell("go on")?;
    println!("B         completes with {}", b.hear("completed")?);
    let mut c = Worker::start(database, "C", &["order-7", "4200"])?;
    println!("C         is asked again: replays {}", c.hear("replay")?);
    let mut c = Worker::start(database, "C", &["order-7", "4300"])?;
    println!(
        "C         is asked for another amount under the same key: refused, a mismatch ({})",
        c.hear("mismatch")?
    );
    once(pool, "order-7", "B").await
}

async fn paused(database: &TestDatabase, pool: &PgPool) -> Result {
    println!("THE SERVER IS PAUSED");
    let mut a = Worker::start(database, "A2", &["order-8", "900"])?;
    println!("A2        charges the card: {}", a.hear("charged")?);
    kill_process(Pid::from_child(&a.child), Signal::STOP)?;
    println!("(system)  pauses A2 (SIGSTOP)");
    a.until_expired(pool).await?;
    println!("database  has not heard from A2 for its ttl");
    let mut b = Worker::start(database, "B2", &["order-8", "900"])?;
    println!("B2        is asked again: recovers the attempt of {}", b.hear("recovers")?);
    println!("B2        asks the card company: there is {}", b.hear("found")?);
    b.tell("go on")?;
    println!("B2        completes with {}", b.hear("completed")?);
    kill_process(Pid::from_child(&a.child), Signal::CONT)?;
    a.tell("go on")?;
    println!("(system)  wakes A2 (SIGCONT), which goes on where it was");
    println!("A2        is refused: {}", a.hear("refused")?);
    once(pool, "order-8", "B2").await
}

async fn once(pool: &PgPool, order: &str, by: &str) -> Result {
    let charges: i64 = sqlx::query_scalar("SELECT count(*) FROM card_company WHERE reference = $1")
        .bind(order)
        .fetch_one(pool)
        .await?;
    let paid: Vec<String> =
        sqlx::query_scalar("SELECT by FROM paid WHERE reference = $1").bind(order).fetch_all(pool).await?;
    ensure(charges == 1, "charged once")?;
    ensure(paid == [by], "paid once, by whoever completed it")?;
    println!("{order}: charged once, paid once");
    Ok(())
}
