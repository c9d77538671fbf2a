//! The questions one asks of a lock server, and the answers of a Postgres: acquire, refused, wrong token,
//! release, again, and the take-over from a holder that is gone.
//!
//! ```text
//! cargo run --example lock_server
//! ```
//!
//! It fails if an answer is not the one it prints.

use std::error::Error;
use std::time::Duration;

use fencepost::testing::TestDatabase;
use fencepost::{Attempt, FencingToken, Grant, GrantId, HeldLease, Lease, LockName, Owner, Wait, fence};
use sqlx::PgPool;

type Result<T = (), E = Box<dyn Error>> = std::result::Result<T, E>;

#[tokio::main]
async fn main() -> Result {
    let database = TestDatabase::create().await?;
    let pool = database.pool();
    // Two owners in one process, for the sake of the example: a service has one.
    let alice = Owner::builder(&pool).label("alice").start().await?;
    let bob = Owner::builder(&pool).label("bob").start().await?;
    let printer = Lease::named("printer")?;

    let held = acquired(&printer, &alice).await?;
    let first = held.token();
    refused(&printer, &bob, first).await?;

    // A number that was not granted opens nothing.
    let wrong = Grant::new(FencingToken::new(first.as_i64() + 1)?, held.grant().id);
    not_released("bob", "with a wrong token", &pool, &printer, wrong).await?;
    // Nor does the right number alone: it is no secret, bob knows it from the refusal. The grant's id is.
    let forged = Grant::new(first, GrantId::from(sqlx::types::Uuid::nil()));
    not_released("bob", "with alice's token", &pool, &printer, forged).await?;

    released("alice", held).await?;

    let held = acquired(&printer, &bob).await?;
    let second = held.token();
    ensure(second > first, "a larger token")?;
    released("bob", held).await?;

    let lost = acquired_by_a_client_that_goes_away(&pool, &printer).await?;
    ensure(lost.token > second, "a larger token")?;
    let held = taken_over(&printer, &alice).await?;
    ensure(held.token() > lost.token, "a larger token")?;
    not_released("carol", "with her old token", &pool, &printer, lost).await?;
    not_past_the_fence(&pool, printer.name(), lost).await?;
    ensure(held.is_held(), "alice still holds it")?;

    alice.shutdown().await?;
    bob.shutdown().await?;
    Ok(database.close().await?)
}

async fn acquired(lease: &Lease, owner: &Owner) -> Result<HeldLease> {
    let held = lease.try_acquire(owner).await?.ok_or("it is free, and was refused")?;
    line(owner.label(), "acquire", &format!("acquired, token {}", held.token()));
    Ok(held)
}

async fn refused(lease: &Lease, owner: &Owner, holding: FencingToken) -> Result {
    let Attempt::Busy(holder) = lease.attempt(owner).await? else { return Err("two holders".into()) };
    ensure(holder.token == Some(holding), "the refusal names the holder's token")?;
    let by = holder.label.ok_or("a holder without a label")?;
    line(owner.label(), "acquire", &format!("refused: {by} holds it with token {holding}"));
    Ok(())
}

async fn released(who: &str, held: HeldLease) -> Result {
    ensure(held.release().await?, "it was held until now")?;
    line(who, "release", "released");
    Ok(())
}

/// Any language can ask Postgres directly. It takes the pair of token and grant id.
async fn not_released(who: &str, how: &str, pool: &PgPool, lease: &Lease, grant: Grant) -> Result {
    let released: bool = sqlx::query_scalar("SELECT released FROM fencepost.release($1, $2, $3)")
        .bind(lease.name().as_str())
        .bind(grant.token)
        .bind(grant.id)
        .fetch_one(pool)
        .await?;
    ensure(!released, "only its holder can release a lease")?;
    line(who, &format!("release {how}"), "not released");
    Ok(())
}

/// A client without a heartbeat, like a script with psql: its lease ends by the clock of the database.
async fn acquired_by_a_client_that_goes_away(pool: &PgPool, lease: &Lease) -> Result<Grant> {
    let (token, id) = sqlx::query_as(
        "SELECT token, grant_id FROM fencepost.acquire($1, p_at_most => '300 ms', p_label => 'carol') WHERE granted",
    )
    .bind(lease.name().as_str())
    .fetch_one(pool)
    .await?;
    line("carol", "acquire for 300 ms", &format!("acquired, token {token}; she is never heard of again"));
    Ok(Grant::new(token, id))
}

async fn taken_over(lease: &Lease, owner: &Owner) -> Result<HeldLease> {
    let held = lease.acquire(owner, Wait::at_most(Duration::from_mins(1))).await?;
    line(owner.label(), "acquire", &format!("acquired after her expiry, token {}", held.token()));
    Ok(held)
}

async fn not_past_the_fence(pool: &PgPool, name: &LockName, grant: Grant) -> Result {
    let mut tx = pool.begin().await?;
    match fence::check(&mut tx, name, grant).await {
        Err(error @ fencepost::Error::StaleFence { .. }) => {
            line("carol", "write through the fence", &format!("rejected: {error}"));
        }
        other => return Err(format!("the fence said {other:?} to a stale grant").into()),
    }
    Ok(tx.rollback().await?)
}

fn line(who: &str, asks: &str, answer: &str) {
    println!("{who:<6} {asks:<26} -> {answer}");
}

fn ensure(is_true: bool, claim: &str) -> Result {
    if is_true { Ok(()) } else { Err(format!("not true: {claim}").into()) }
}
