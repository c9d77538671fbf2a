//! A storage that checks tokens itself, for a lock that lives elsewhere; and one that cannot be written to
//! without the check.
//!
//! ```text
//! cargo run --example storage
//! ```
//!
//! It fails if an answer is not the one it prints.

use std::error::Error;

use fencepost::testing::TestDatabase;
use fencepost::{FencingToken, Lease, LockName, Owner, fence};
use sqlx::PgPool;

type Result<T = (), E = Box<dyn Error>> = std::result::Result<T, E>;

#[tokio::main]
async fn main() -> Result {
    let database = TestDatabase::create().await?;
    let pool = database.pool();
    sqlx::raw_sql("CREATE TABLE file (content text); INSERT INTO file VALUES ('empty')")
        .execute(&pool)
        .await?;

    tokens_from_elsewhere(&pool).await?;
    println!();
    a_table_that_insists(&pool).await?;
    Ok(database.close().await?)
}

/// The lock is in another system (etcd, Consul, another database), which gives out growing numbers.
async fn tokens_from_elsewhere(pool: &PgPool) -> Result {
    println!("A lock elsewhere gives the tokens; the storage remembers the largest one it has seen.");
    for (token, content) in [(33, "written with 33"), (34, "written with 34"), (33, "late, with 33")] {
        match write(pool, FencingToken::new(token)?, content).await {
            Ok(()) => println!("  token {token}  accepted"),
            Err(error @ fencepost::Error::StaleFence { .. }) => {
                println!("  token {token}  rejected: {error}");
            }
            Err(error) => return Err(error.into()),
        }
    }
    let content = content(pool).await?;
    println!("  the file reads: {content}");
    ensure(content == "written with 34", "the late write was rejected")
}

/// The check and the write are one transaction: either both happen or none.
async fn write(pool: &PgPool, token: FencingToken, content: &str) -> fencepost::Result<()> {
    let mut tx = pool.begin().await?;
    fence::advance(&mut tx, &LockName::new("file")?, token).await?;
    sqlx::query("UPDATE file SET content = $1").bind(content).execute(&mut *tx).await?;
    tx.commit().await?;
    Ok(())
}

/// The lock is a lease in the same database, and the table refuses whoever forgets it.
async fn a_table_that_insists(pool: &PgPool) -> Result {
    println!("The lease is in the same database; the table is protected by it.");
    let lease = Lease::named("file")?;
    fence::protect(&mut *pool.acquire().await?, "file", lease.name()).await?;

    let forgotten = sqlx::query("UPDATE file SET content = 'without the fence'").execute(pool).await;
    match forgotten.map_err(fencepost::Error::from) {
        Err(error @ fencepost::Error::Unfenced { .. }) => println!("  without the fence  rejected: {error}"),
        other => return Err(format!("a forgotten fence gave {other:?}").into()),
    }

    let owner = Owner::start(pool).await?;
    let held = lease.try_acquire(&owner).await?.ok_or("nobody else wants it, and it was refused")?;
    let mut tx = held.begin(pool).await?;
    sqlx::query("UPDATE file SET content = 'through the fence'").execute(&mut *tx).await?;
    tx.commit().await?;
    println!("  through the fence  accepted");

    let content = content(pool).await?;
    println!("  the file reads: {content}");
    ensure(content == "through the fence", "the fenced write is there")?;
    ensure(held.release().await?, "it was held until now")?;
    Ok(owner.shutdown().await?)
}

async fn content(pool: &PgPool) -> Result<String> {
    Ok(sqlx::query_scalar("SELECT content FROM file").fetch_one(pool).await?)
}

fn ensure(is_true: bool, claim: &str) -> Result {
    if is_true { Ok(()) } else { Err(format!("not true: {claim}").into()) }
}
