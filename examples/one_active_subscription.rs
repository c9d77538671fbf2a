//! One active subscription per user, by a constraint: no lock, and no way around it.
//!
//! ```text
//! cargo run --example one_active_subscription
//! ```
//!
//! 64 sign-ups of the same user at once. First with a rule that the database enforces, then with the same rule behind a
//! lock, as it is often built: right as long as everybody takes the lock, for as long as it is held. It fails if the
//! constraint lets a second one in.

use std::time::Duration;

use fencepost::testing::TestDatabase;
use fencepost::{Lease, Owner, Wait};
use sqlx::PgPool;
use tokio::task::JoinSet;

type Result<T = (), E = Box<dyn std::error::Error + Send + Sync>> = std::result::Result<T, E>;

const SIGN_UPS: usize = 64;

#[tokio::main]
async fn main() -> Result {
    let database = TestDatabase::create().await?;
    let pool = database.pool();
    sqlx::raw_sql(
        "CREATE TABLE subscriptions (
             id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
             user_id bigint NOT NULL,
             plan text NOT NULL,
             cancelled_at timestamptz
         );
         CREATE TABLE unguarded (LIKE subscriptions INCLUDING ALL);
         CREATE UNIQUE INDEX one_active_per_user ON subscriptions (user_id) WHERE cancelled_at IS NULL",
    )
    .execute(&pool)
    .await?;
    by_constraint(&pool).await?;
    println!();
    by_lock(&pool).await?;
    Ok(database.close().await?)
}

async fn by_constraint(pool: &PgPool) -> Result {
    println!("{SIGN_UPS} sign-ups at once, each an INSERT … ON CONFLICT DO NOTHING:");
    let mut tasks = JoinSet::new();
    for n in 0..SIGN_UPS {
        let pool = pool.clone();
        tasks.spawn(async move { sign_up(&pool, 7, if n % 2 == 0 { "basic" } else { "pro" }).await });
    }
    let mut created = 0;
    for done in tasks.join_all().await {
        created += usize::from(done?);
    }
    println!(
        "  {created} created, {} were told that there is one; active: {}",
        SIGN_UPS - created,
        active(pool).await?
    );
    ensure(created == 1, "one of them created it")?;

    let again = sign_up(pool, 7, "pro").await?;
    println!("  one more, later: created: {again}");
    let cancelled =
        "UPDATE subscriptions SET cancelled_at = now() WHERE user_id = 7 AND cancelled_at IS NULL";
    sqlx::query(cancelled).execute(pool).await?;
    println!("  cancelled, then one more: created: {}", sign_up(pool, 7, "pro").await?);
    // Whoever forgets the rule, or does not know of it, is stopped all the same.
    let forgetful = "INSERT INTO subscriptions (user_id, plan) VALUES (7, 'basic')";
    let refused = sqlx::query(forgetful).execute(pool).await.err();
    let refused =
        refused.as_ref().and_then(sqlx::Error::as_database_error).and_then(|error| error.constraint());
    println!("  a plain INSERT by somebody who knows of no rule: refused by {}", refused.unwrap_or("nobody"));
    println!("  active: {}", active(pool).await?);
    ensure(active(pool).await? == 1, "one is active")
}

/// Whether it was created; else there is an active one already, and nothing was changed.
async fn sign_up(pool: &PgPool, user: i64, plan: &str) -> Result<bool> {
    let text = "INSERT INTO subscriptions (user_id, plan) VALUES ($1, $2) \
                ON CONFLICT (user_id) WHERE cancelled_at IS NULL DO NOTHING RETURNING id";
    let created: Option<i64> = sqlx::query_scalar(text).bind(user).bind(plan).fetch_optional(pool).await?;
    Ok(created.is_some())
}

async fn active(pool: &PgPool) -> Result<i64> {
    let text = "SELECT count(*) FROM subscriptions WHERE user_id = 7 AND cancelled_at IS NULL";
    Ok(sqlx::query_scalar(text).fetch_one(pool).await?)
}

/// The wrong way: look under a lock, then insert.
async fn by_lock(pool: &PgPool) -> Result {
    println!("The same with a lock, and no constraint: look whether there is one, then insert.");
    let owner = Owner::builder(pool).label("sign-ups").start().await?;
    let mut tasks = JoinSet::new();
    for _ in 0..SIGN_UPS {
        let (owner, pool) = (owner.clone(), pool.clone());
        tasks.spawn(async move {
            let held =
                Lease::named("sign-up/7")?.acquire(&owner, Wait::at_most(Duration::from_mins(1))).await?;
            if look(&pool).await? == 0 {
                insert(&pool).await?;
            }
            held.release().await?;
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
        });
    }
    for done in tasks.join_all().await {
        done?;
    }
    println!("  {SIGN_UPS} sign-ups, one after the other: active: {}", look(pool).await?);

    sqlx::query("DELETE FROM unguarded").execute(pool).await?;
    let lease = Lease::named("sign-up/7")?.at_most(Duration::from_millis(200))?;
    let a = lease.try_acquire(&owner).await?.ok_or("the lease is free")?;
    let found = look(pool).await?;
    println!("  A looks under the lock: {found} active; then it pauses, for longer than its lock lasts");
    let b = lease.acquire(&owner, Wait::at_most(Duration::from_mins(1))).await?;
    if look(pool).await? == 0 {
        insert(pool).await?;
        println!("  B takes the lock, looks: 0 active, and inserts");
    }
    drop(b);
    insert(pool).await?;
    println!("  A wakes up, and inserts: active: {}", look(pool).await?);
    drop(a);
    insert(pool).await?;
    println!("  a script that knows of no lock inserts: active: {}", look(pool).await?);
    ensure(look(pool).await? == 3, "the lock alone has let all of them in")?;
    Ok(owner.shutdown().await?)
}

async fn look(pool: &PgPool) -> Result<i64> {
    let text = "SELECT count(*) FROM unguarded WHERE user_id = 7 AND cancelled_at IS NULL";
    Ok(sqlx::query_scalar(text).fetch_one(pool).await?)
}

async fn insert(pool: &PgPool) -> Result {
    sqlx::query("INSERT INTO unguarded (user_id, plan) VALUES (7, 'basic')").execute(pool).await?;
    Ok(())
}

fn ensure(is_true: bool, claim: &str) -> Result {
    if is_true { Ok(()) } else { Err(format!("not true: {claim}").into()) }
}
