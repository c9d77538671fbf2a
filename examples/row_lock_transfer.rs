//! Money between accounts, moved by many tasks at once: nothing is lost, and no deadlock is ever seen.
//!
//! ```text
//! cargo run --example row_lock_transfer
//! ```
//!
//! It fails if a sum is not the one before.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use fencepost::row::{Locked, RowLock};
use fencepost::testing::TestDatabase;
use fencepost::{Error, Isolation, transaction};
use sqlx::PgPool;
use sqlx::postgres::PgTransaction;
use tokio::sync::Barrier;

type Result<T = (), E = Box<dyn std::error::Error + Send + Sync>> = std::result::Result<T, E>;

const ACCOUNTS: i64 = 8;
const TASKS: i64 = 16;
const TRANSFERS: i64 = 50;

#[tokio::main]
async fn main() -> Result {
    let database = TestDatabase::create().await?;
    let pool = database.pool();
    sqlx::raw_sql(
        "CREATE TABLE accounts (id bigint PRIMARY KEY, balance bigint NOT NULL CHECK (balance >= 0));
         INSERT INTO accounts SELECT id, 1000 FROM generate_series(1, 8) id",
    )
    .execute(&pool)
    .await?;
    in_one_order(&pool).await?;
    println!();
    in_opposite_orders(&pool).await?;
    Ok(database.close().await?)
}

/// Both accounts by one call, which locks them in the order of their keys.
async fn in_one_order(pool: &PgPool) -> Result {
    println!(
        "{TASKS} tasks move money between {ACCOUNTS} accounts, {TRANSFERS} times each; both are locked by one call."
    );
    let before = sum(pool).await?;
    let runs = Arc::new(AtomicU32::new(0));
    let accounts = RowLock::on("accounts")?.key("id")?;
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..TASKS {
        let (pool, runs, accounts) = (pool.clone(), Arc::clone(&runs), accounts.clone());
        tasks.spawn(async move {
            for round in 0..TRANSFERS {
                let from = 1 + (task + round) % ACCOUNTS;
                let to = 1 + (task * 3 + round * 5 + 1) % ACCOUNTS;
                let amount = 1 + (task * 7 + round) % 400;
                transfer(&pool, &accounts, &runs, from, to, amount).await?;
            }
            Ok::<_, Error>(())
        });
    }
    for done in tasks.join_all().await {
        done?;
    }
    println!("  {} transfers, {} runs: no deadlock", TASKS * TRANSFERS, runs.load(Ordering::SeqCst));
    same(before, sum(pool).await?)
}

async fn transfer(
    pool: &PgPool,
    accounts: &RowLock,
    runs: &AtomicU32,
    from: i64,
    to: i64,
    amount: i64,
) -> Result<(), Error> {
    transaction(pool, Isolation::ReadCommitted, |tx| {
        Box::pin(async move {
            runs.fetch_add(1, Ordering::SeqCst);
            let both = accounts.lock_many::<(i64, i64), _>(tx, &[from, to]).await?;
            // Locked, so it is still true below.
            if both.rows.iter().any(|(id, balance)| *id == from && *balance >= amount) {
                add(tx, from, -amount).await?;
                add(tx, to, amount).await?;
            }
            Ok(())
        })
    })
    .await
}

/// One account after the other, as one should not: both tasks hold the account that the other one wants.
async fn in_opposite_orders(pool: &PgPool) -> Result {
    println!("Two tasks lock two accounts one by one, in opposite orders.");
    let before = sum(pool).await?;
    let (runs, both) = (AtomicU32::new(0), Barrier::new(2));
    tokio::try_join!(one_by_one(pool, &runs, &both, 1, 2), one_by_one(pool, &runs, &both, 2, 1))?;
    println!("  2 transfers, {} runs: a deadlock, whose victim ran again", runs.load(Ordering::SeqCst));
    same(before, sum(pool).await?)
}

async fn one_by_one(
    pool: &PgPool,
    runs: &AtomicU32,
    both: &Barrier,
    from: i64,
    to: i64,
) -> Result<(), Error> {
    let accounts = &RowLock::on("accounts")?;
    let first = &AtomicU32::new(0);
    transaction(pool, Isolation::ReadCommitted, |tx| {
        Box::pin(async move {
            runs.fetch_add(1, Ordering::SeqCst);
            let Locked::Found((_, balance)) = accounts.lock::<(i64, i64), _>(tx, from).await? else {
                return Ok(());
            };
            if first.fetch_add(1, Ordering::SeqCst) == 0 {
                both.wait().await;
            }
            accounts.lock::<(i64, i64), _>(tx, to).await?;
            let half = balance / 2;
            add(tx, from, -half).await?;
            add(tx, to, half).await
        })
    })
    .await
}

async fn add(tx: &mut PgTransaction<'_>, id: i64, amount: i64) -> Result<(), Error> {
    let text = "UPDATE accounts SET balance = balance + $2 WHERE id = $1";
    sqlx::query(text).bind(id).bind(amount).execute(&mut **tx).await?;
    Ok(())
}

async fn sum(pool: &PgPool) -> Result<i64> {
    Ok(sqlx::query_scalar("SELECT sum(balance)::bigint FROM accounts").fetch_one(pool).await?)
}

fn same(before: i64, after: i64) -> Result {
    println!("  the sum was {before} and is {after}");
    if before == after { Ok(()) } else { Err("money was lost or made".into()) }
}
