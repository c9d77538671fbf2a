//! What claims cost, as a ratio to the plain statements that do the same.
//!
//! ```sh
//! cargo bench --bench claim                            # about 80 s
//! FENCEPOST_BENCH_SECONDS=10 cargo bench --bench claim # shorter, noisier
//! ```
//!
//! It starts a durable Postgres of its own and ends it. All sides of a comparison take turns on the same server; see
//! `benches/lease/main.rs` for how the figures are to be read.
//!
//! All is measured twice: on the disk as it is, and where a flush takes 1 ms.
//!
//! | work | reference | goal |
//! |---|---|---|
//! | BEGIN, `once`, COMMIT | the same with `INSERT … ON CONFLICT DO NOTHING` | ≤ 1.5 × |
//! | `begin`, and `complete` in a transaction | an INSERT, and an UPDATE in a transaction | ≤ 1.6 × |
//! | 8 workers, `claim_next` of one job | … `UPDATE … (SELECT … FOR UPDATE SKIP LOCKED)` of one, on a table like theirs | ≥ 0.7 × as many |
//! | … `claim_next` of 50 | … `claim_next` of one | ≥ 5 × as many |

#![expect(clippy::print_stdout, reason = "a bench prints its figures")]
#![expect(
    clippy::disallowed_methods,
    reason = "timings are what a bench is for; nothing here decides about a claim"
)]

#[path = "../shared/flush.rs"]
mod flush;
mod jobs;
#[path = "../shared/quantiles.rs"]
mod quantiles;
#[path = "../shared/report.rs"]
mod report;
#[path = "../shared/rounds.rs"]
#[allow(dead_code, reason = "shared with the bench of leases, which uses all of it")]
mod rounds;

use std::time::Duration;

use fencepost::Owner;
use fencepost::claim::Claim;
use fencepost::testing::{Server, TestDatabase};
use sqlx::postgres::PgPoolOptions;
use sqlx::{ConnectOptions as _, Executor as _, PgPool};

use crate::report::Goal;
use crate::rounds::{Result, Side, compare};

/// How long it measures by default.
const SECONDS: f64 = 80.0;

fn main() -> Result<()> {
    let seconds = match std::env::var("FENCEPOST_BENCH_SECONDS") {
        Ok(text) => text.parse()?,
        Err(_) => SECONDS,
    };
    // Blocks the thread, so before the runtime.
    let server = Server::builder().durable().setting("autovacuum_naptime", "1h").start()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let database = TestDatabase::create_on(&server).await?;
        run(&database, Duration::from_secs_f64(seconds / 8.0)).await?;
        Ok(database.close().await?)
    })
}

async fn run(database: &TestDatabase, time: Duration) -> Result<()> {
    let setup = pool(database, 1).await?;
    setup
        .execute(
            "CREATE TABLE keys (key text PRIMARY KEY);
             CREATE TABLE work (key text PRIMARY KEY, state text NOT NULL, result jsonb);
             CREATE TABLE job (LIKE fencepost.claims INCLUDING ALL)",
        )
        .await?;
    println!("Unix socket, durable; {} processors; times in µs", std::thread::available_parallelism()?);
    for slow in [false, true] {
        if slow {
            setup.execute("TRUNCATE keys, work, fencepost.claims").await?;
            flush::takes_a_millisecond(&mut *setup.acquire().await?).await?;
        }
        once(database, time).await?;
        attempt(database, time).await?;
        jobs::eight_workers(database, &setup, time * 2).await?;
    }
    Ok(())
}

/// Connections that are there, without the ping before use.
async fn pool(database: &TestDatabase, connections: u32) -> Result<PgPool> {
    let pool = PgPoolOptions::new().min_connections(connections).max_connections(connections);
    Ok(pool.test_before_acquire(false).connect_with(database.options().disable_statement_logging()).await?)
}

async fn once(database: &TestDatabase, time: Duration) -> Result<()> {
    const PLAIN: &str = "BEGIN, INSERT … ON CONFLICT DO NOTHING, COMMIT";
    let sides = vec![
        Side::new(PLAIN, (pool(database, 1).await?, 0_u64), async |(pool, n): &mut (PgPool, u64), _| {
            *n += 1;
            let mut tx = pool.begin().await?;
            let insert =
                sqlx::query("INSERT INTO keys VALUES ($1) ON CONFLICT DO NOTHING").bind(format!("key-{n}"));
            let inserted = insert.execute(&mut *tx).await?.rows_affected();
            tx.commit().await?;
            if inserted == 1 { Ok(()) } else { Err("not inserted".into()) }
        }),
        Side::new(
            "BEGIN, once, COMMIT",
            (pool(database, 1).await?, 0_u64),
            async |(pool, n): &mut (PgPool, u64), _| {
                *n += 1;
                let mut tx = pool.begin().await?;
                let ours = Claim::named(&format!("key-{n}"))?.once(&mut tx).await?;
                tx.commit().await?;
                if ours { Ok(()) } else { Err("not ours".into()) }
            },
        ),
    ];
    report::heading("Once, in a transaction");
    let goal = Goal { side: "BEGIN, once, COMMIT", reference: PLAIN, at_most: 1.5 };
    report::table(&compare(sides, 200, time).await?, PLAIN, None, &[goal]);
    Ok(())
}

async fn attempt(database: &TestDatabase, time: Duration) -> Result<()> {
    const PLAIN: &str = "INSERT; BEGIN, UPDATE, COMMIT";
    const OURS: &str = "begin; BEGIN, complete, COMMIT";
    let plain = (pool(database, 1).await?, 0_u64);
    let ours = pool(database, 1).await?;
    let owner = Owner::start(&ours).await?;
    let sides = vec![
        Side::new(PLAIN, plain, async |(pool, n): &mut (PgPool, u64), watch| {
            *n += 1;
            let key = format!("work-{n}");
            let insert = "INSERT INTO work (key, state) VALUES ($1, 'running') ON CONFLICT DO NOTHING";
            sqlx::query(insert).bind(&key).execute(&*pool).await?;
            watch.split();
            let mut tx = pool.begin().await?;
            let update = "UPDATE work SET state = 'done', result = '1' WHERE key = $1 AND state = 'running'";
            sqlx::query(update).bind(&key).execute(&mut *tx).await?;
            Ok(tx.commit().await?)
        }),
        Side::new(OURS, (ours, owner, 0_u64), async |(pool, owner, n): &mut (PgPool, Owner, u64), watch| {
            *n += 1;
            let begun = Claim::named(&format!("work-{n}"))?.begin(owner).await?;
            let attempt = begun.into_attempt().ok_or("not ours")?;
            watch.split();
            let mut tx = pool.begin().await?;
            attempt.complete(&mut tx, &1).await?;
            Ok(tx.commit().await?)
        }),
    ];
    report::heading("An attempt, begun and completed");
    let goal = Goal { side: OURS, reference: PLAIN, at_most: 1.6 };
    report::table(&compare(sides, 200, time).await?, PLAIN, Some(["first", "second"]), &[goal]);
    Ok(())
}
