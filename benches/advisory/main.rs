//! What an advisory lock costs, as a ratio to the bare statements and to sqlx's lock, and how many there can be.
//!
//! ```sh
//! cargo bench --bench advisory                            # about 40 s
//! FENCEPOST_BENCH_SECONDS=10 cargo bench --bench advisory # shorter, noisier
//! ```
//!
//! It starts a Postgres of its own, with 100 connections and a lock table as they are by default, and ends it.
//!
//! # What is measured against what, and why
//!
//! | work | reference | goal |
//! |---|---|---|
//! | `try_acquire` and `release` on the owner's session | the two statements, prepared, on a plain connection | ≤ 2.2 × |
//! | the same | sqlx's `PgAdvisoryLock` with a connection of a pool each time | ≤ 1 × |
//! | a transaction that begins with a lock | the same without one | the lock's own work, no round trip more |
//! | 10,000 locks of one process | one connection for each | one connection; theirs end at about 100 |
//!
//! How noise is kept out: see `benches/lease/main.rs`. Timings never fail the program; errors do.

#![expect(clippy::print_stdout, reason = "a bench prints its figures")]
#![expect(
    clippy::disallowed_methods,
    reason = "timings are what a bench is for; nothing here decides about a lock"
)]

#[path = "../shared/quantiles.rs"]
mod quantiles;
#[path = "../shared/report.rs"]
mod report;
#[path = "../shared/rounds.rs"]
mod rounds;

use std::time::{Duration, Instant};

use fencepost::testing::{Server, TestDatabase};
use fencepost::{AdvisoryLock, HeldAdvisory, Key, Owner, Wait};
use sqlx::postgres::{PgAdvisoryLock, PgAdvisoryLockKey, PgPoolOptions};
use sqlx::{ConnectOptions as _, Executor as _, PgConnection, PgPool, Row as _};

use crate::report::Goal;
use crate::rounds::{Part, Result, Side, compare, micros};

/// How long it measures by default.
const SECONDS: f64 = 40.0;

/// How many locks one process is to hold.
const MANY: usize = 10_000;

fn main() -> Result<()> {
    let seconds = match std::env::var("FENCEPOST_BENCH_SECONDS") {
        Ok(text) => text.parse()?,
        Err(_) => SECONDS,
    };
    // Blocks the thread, so before the runtime.
    let server = Server::builder().setting("max_connections", "100").start()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let database = TestDatabase::create_on(&server).await?;
        let pool = database.pool();
        let owner = Owner::builder(&pool).ttl(Duration::from_hours(12)).advisory_locks(MANY).start().await?;
        pool.close().await;
        println!("Unix socket; {} processors; times in µs", std::thread::available_parallelism()?);
        let total = Duration::from_secs_f64(seconds);
        session_level(&database, &owner, total.mul_f64(0.5)).await?;
        transaction_level(&database, total.mul_f64(0.5)).await?;
        many(&database, &owner).await?;
        owner.shutdown().await?;
        Ok(database.close().await?)
    })
}

async fn connect(database: &TestDatabase) -> Result<PgConnection> {
    Ok(database.options().disable_statement_logging().connect().await?)
}

/// A pool of one connection, as it comes: with a ping before each use.
async fn pool(database: &TestDatabase) -> Result<PgPool> {
    let options = database.options().disable_statement_logging();
    Ok(PgPoolOptions::new().max_connections(1).connect_with(options).await?)
}

fn granted(answer: bool) -> Result<()> {
    if answer { Ok(()) } else { Err("refused, though it is free".into()) }
}

async fn session_level(database: &TestDatabase, owner: &Owner, time: Duration) -> Result<()> {
    const RAW: &str = "pg_try_advisory_lock, unlock: plain connection";
    const SQLX: &str = "sqlx PgAdvisoryLock, pool.acquire each time";
    const OURS: &str = "try_acquire, release";

    report::heading("A lock of the session");
    let sides = vec![
        Side::new(RAW, connect(database).await?, async |conn, watch| {
            let try_lock = sqlx::query_scalar("SELECT pg_try_advisory_lock($1)").bind(1_i64);
            granted(try_lock.fetch_one(&mut *conn).await?)?;
            watch.split();
            let unlock = sqlx::query_scalar("SELECT pg_advisory_unlock($1)").bind(1_i64);
            granted(unlock.fetch_one(&mut *conn).await?)
        }),
        Side::new(
            SQLX,
            (pool(database).await?, PgAdvisoryLock::with_key(PgAdvisoryLockKey::BigInt(2))),
            async |(pool, lock), watch| {
                let tried = lock.try_acquire(pool.acquire().await?).await?;
                let guard = tried.left().ok_or("refused, though it is free")?;
                watch.split();
                guard.release_now().await?;
                Ok(())
            },
        ),
        Side::new(
            OURS,
            (owner.clone(), AdvisoryLock::exclusive(Key::from_i64(3))),
            async |(owner, lock), watch| {
                let held = lock.try_acquire(owner).await?.ok_or("refused, though it is free")?;
                watch.split();
                granted(held.release().await?)
            },
        ),
    ];
    let figures = compare(sides, 400, time).await?;
    let goals = [
        Goal { side: OURS, reference: RAW, at_most: 2.2 },
        Goal { side: OURS, reference: SQLX, at_most: 1.0 },
    ];
    report::table(&figures, RAW, Some(["acquire", "release"]), &goals);
    println!("  the owner's thread costs {:.0} a pair", figures.more(OURS, RAW, Part::Whole));
    Ok(())
}

async fn transaction_level(database: &TestDatabase, time: Duration) -> Result<()> {
    const PLAIN: &str = "pool.begin, SELECT 1, COMMIT: no lock";
    const BARE: &str = "pool.begin, pg_advisory_xact_lock prepared, …";
    const BEGIN: &str = "lock.begin, SELECT 1, COMMIT";
    const LOCK: &str = "pool.begin, lock.lock at most 5 s, SELECT 1, COMMIT";
    const TRY: &str = "pool.begin, lock.try_lock, SELECT 1, COMMIT";

    report::heading("A lock of the transaction");
    let lock = |number| AdvisoryLock::exclusive(Key::from_i64(number));
    let wait = Wait::at_most(Duration::from_secs(5));
    let sides = vec![
        Side::new(PLAIN, pool(database).await?, async |pool, watch| {
            let mut tx = pool.begin().await?;
            watch.split();
            tx.execute(sqlx::query("SELECT 1")).await?;
            Ok(tx.commit().await?)
        }),
        Side::new(BARE, pool(database).await?, async |pool, watch| {
            let mut tx = pool.begin().await?;
            tx.execute(sqlx::query("SELECT pg_advisory_xact_lock($1)").bind(11_i64)).await?;
            watch.split();
            tx.execute(sqlx::query("SELECT 1")).await?;
            Ok(tx.commit().await?)
        }),
        Side::new(BEGIN, (pool(database).await?, lock(12)), async move |(pool, lock), watch| {
            let mut tx = lock.begin(pool, wait).await?;
            watch.split();
            tx.execute(sqlx::query("SELECT 1")).await?;
            Ok(tx.commit().await?)
        }),
        Side::new(LOCK, (pool(database).await?, lock(13)), async move |(pool, lock), watch| {
            let mut tx = pool.begin().await?;
            lock.lock(&mut tx, wait).await?;
            watch.split();
            tx.execute(sqlx::query("SELECT 1")).await?;
            Ok(tx.commit().await?)
        }),
        Side::new(TRY, (pool(database).await?, lock(14)), async |(pool, lock), watch| {
            let mut tx = pool.begin().await?;
            granted(lock.try_lock(&mut tx).await?)?;
            watch.split();
            tx.execute(sqlx::query("SELECT 1")).await?;
            Ok(tx.commit().await?)
        }),
    ];
    let figures = compare(sides, 200, time).await?;
    report::table(&figures, PLAIN, Some(["begin", "rest"]), &[]);
    println!("  round trips: no more with begin, one more with lock and try_lock (a test counts them)");
    Ok(())
}

/// Ten thousand of one process, and as many as there are connections the other way.
async fn many(database: &TestDatabase, owner: &Owner) -> Result<()> {
    report::heading("Many locks of one process");
    let per_lock =
        |start: Instant| -> Result<f64> { Ok(micros(start.elapsed()) / f64::from(u32::try_from(MANY)?)) };
    let start = Instant::now();
    let mut held: Vec<HeldAdvisory> = Vec::with_capacity(MANY);
    for number in 0_i64.. {
        if held.len() == MANY {
            break;
        }
        let lock = AdvisoryLock::exclusive(Key::from_i64(1_000 + number));
        held.push(lock.try_acquire(owner).await?.ok_or("refused, though it is free")?);
    }
    let taken = per_lock(start)?;
    let mut conn = connect(database).await?;
    let shown = "SELECT count(*), count(DISTINCT pid) FROM pg_locks WHERE locktype = 'advisory' AND granted";
    let row = conn.fetch_one(shown).await?;
    let (locks, sessions): (i64, i64) = (row.try_get(0)?, row.try_get(1)?);
    let start = Instant::now();
    for one in held {
        granted(one.release().await?)?;
    }
    println!(
        "  {locks} locks on {sessions} connection: {taken:.1} to take one, {:.1} to release it",
        per_lock(start)?
    );
    let start = Instant::now();
    for number in 0..i64::try_from(MANY)? {
        let try_lock = sqlx::query_scalar("SELECT pg_try_advisory_lock($1)").bind(number);
        granted(try_lock.fetch_one(&mut conn).await?)?;
    }
    let taken = per_lock(start)?;
    let start = Instant::now();
    for number in 0..i64::try_from(MANY)? {
        let unlock = sqlx::query_scalar("SELECT pg_advisory_unlock($1)").bind(number);
        granted(unlock.fetch_one(&mut conn).await?)?;
    }
    println!(
        "  the bare statements on a plain connection: {taken:.1} and {:.1}; at the end of each the server looks through \
         all\n  that the session holds",
        per_lock(start)?
    );
    report::verdict("10,000 locks on one connection", locks == i64::try_from(MANY)? && sessions == 1);

    let mut guards = Vec::new();
    let refused = loop {
        match connect(database).await {
            Ok(conn) => {
                let number = 1_000_000 + i64::try_from(guards.len())?;
                let lock = PgAdvisoryLock::with_key(PgAdvisoryLockKey::BigInt(number));
                guards.push(lock.acquire(conn).await?);
            }
            Err(error) => break error,
        }
    };
    println!("  one connection for each: {} locks, and then: {refused}", guards.len());
    Ok(())
}
