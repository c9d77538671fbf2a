//! What row locks and transactions cost, as a ratio to the plain statements that do the same.
//!
//! ```sh
//! cargo bench --bench row                            # about 40 s
//! FENCEPOST_BENCH_SECONDS=10 cargo bench --bench row # shorter, noisier
//! ```
//!
//! It starts a durable Postgres of its own and ends it. All sides of a comparison take turns on the same server, by the
//! same driver, prepared; see `benches/lease/main.rs` for how the figures are to be read.
//!
//! | work | reference | goal |
//! |---|---|---|
//! | BEGIN, `lock`, ROLLBACK | the same with `SELECT … FOR UPDATE` | ≤ 1.1 × |
//! | … `lock_many` of 100 keys | … `SELECT … WHERE id = ANY($1) ORDER BY id FOR UPDATE` | ≤ 2 ×: it says which are missing |
//! | … `claim_next` of one row | … `SELECT … ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED` | ≤ 1.1 × |
//! | `transaction` with an UPDATE in it | `pool.begin()`, UPDATE, `commit()` | ≤ 1.2 × |

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
#[allow(dead_code, reason = "shared with the bench of leases, which uses all of it")]
mod rounds;

use std::time::Duration;

use fencepost::row::{Filter, Locked, LockedMany, Order, RowLock};
use fencepost::testing::{Server, TestDatabase};
use fencepost::{Isolation, transaction};
use sqlx::postgres::{PgPoolOptions, PgTransaction};
use sqlx::{ConnectOptions as _, Executor as _, PgPool};

use crate::report::Goal;
use crate::rounds::{Result, Side, compare};

/// How long it measures by default.
const SECONDS: f64 = 40.0;

type Row = (i64, i64);

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
        run(&database, Duration::from_secs_f64(seconds / 4.0)).await?;
        Ok(database.close().await?)
    })
}

async fn run(database: &TestDatabase, time: Duration) -> Result<()> {
    let setup = pool(database).await?;
    setup
        .execute(
            "CREATE TABLE data (id bigint PRIMARY KEY, n bigint NOT NULL) WITH (fillfactor = 50);
             INSERT INTO data SELECT id, 0 FROM generate_series(1, 10000) id; ANALYZE data",
        )
        .await?;
    setup.close().await;
    println!("Unix socket, durable; {} processors; times in µs", std::thread::available_parallelism()?);
    one(database, time).await?;
    many(database, time).await?;
    next(database, time).await?;
    whole(database, time).await
}

/// A pool of one connection, which is there, without the ping before use.
async fn pool(database: &TestDatabase) -> Result<PgPool> {
    let pool = PgPoolOptions::new().min_connections(1).max_connections(1).test_before_acquire(false);
    Ok(pool.connect_with(database.options().disable_statement_logging()).await?)
}

/// BEGIN, this, ROLLBACK.
async fn side(
    database: &TestDatabase,
    name: &'static str,
    work: impl AsyncFn(&mut PgTransaction<'static>) -> Result<()> + 'static,
) -> Result<Side> {
    Ok(Side::new(name, pool(database).await?, async move |pool, _| {
        let mut tx = pool.begin().await?;
        work(&mut tx).await?;
        Ok(tx.rollback().await?)
    }))
}

fn found<R>(locked: Locked<R>) -> Result<()> {
    locked.found().map(drop).ok_or_else(|| "the row is not locked".into())
}

async fn one(database: &TestDatabase, time: Duration) -> Result<()> {
    const PLAIN: &str = "SELECT … FOR UPDATE";
    let (data, at_most) = (RowLock::on("data")?, RowLock::on("data")?.at_most(Duration::from_secs(1))?);
    let no_wait = data.clone().no_wait();
    let sides = vec![
        side(database, PLAIN, async |tx| {
            let text = "SELECT * FROM data WHERE id = $1 FOR UPDATE";
            sqlx::query_as::<_, Row>(text).bind(7_i64).fetch_one(&mut **tx).await?;
            Ok(())
        })
        .await?,
        side(database, "lock", async move |tx| found(data.lock::<Row, _>(tx, 7_i64).await?)).await?,
        side(database, "lock, no_wait", async move |tx| found(no_wait.lock::<Row, _>(tx, 7_i64).await?))
            .await?,
        side(database, "lock, at_most", async move |tx| found(at_most.lock::<Row, _>(tx, 7_i64).await?))
            .await?,
    ];
    report::heading("One row, locked and let go");
    let goal = Goal { side: "lock", reference: PLAIN, at_most: 1.1 };
    report::table(&compare(sides, 400, time).await?, PLAIN, None, &[goal]);
    Ok(())
}

async fn many(database: &TestDatabase, time: Duration) -> Result<()> {
    const PLAIN: &str = "SELECT … = ANY … ORDER BY … FOR UPDATE";
    let (data, no_wait) = (RowLock::on("data")?, RowLock::on("data")?.no_wait());
    let keys: Vec<i64> = (0..100).map(|n| 1 + n * 37 % 10_000).collect();
    let all = |locked: LockedMany<Row, i64>| -> Result<()> {
        if locked.is_complete() { Ok(()) } else { Err("the rows are not locked".into()) }
    };
    let (ours, none_or_all) = (keys.clone(), keys.clone());
    let sides = vec![
        side(database, PLAIN, async move |tx| {
            let text = "SELECT * FROM data WHERE id = ANY($1) ORDER BY id FOR UPDATE";
            sqlx::query_as::<_, Row>(text).bind(&keys).fetch_all(&mut **tx).await?;
            Ok(())
        })
        .await?,
        side(database, "lock_many", async move |tx| all(data.lock_many(tx, &ours).await?)).await?,
        side(database, "lock_many, no_wait", async move |tx| {
            all(no_wait.lock_many(tx, &none_or_all).await?)
        })
        .await?,
    ];
    report::heading("A hundred rows, locked and let go");
    let goal = Goal { side: "lock_many", reference: PLAIN, at_most: 2.0 };
    report::table(&compare(sides, 100, time).await?, PLAIN, None, &[goal]);
    Ok(())
}

async fn next(database: &TestDatabase, time: Duration) -> Result<()> {
    const PLAIN: &str = "SELECT … LIMIT 1 FOR UPDATE SKIP LOCKED";
    let (data, order) = (RowLock::on("data")?, [Order::ascending("id")?]);
    let sides = vec![
        side(database, PLAIN, async |tx| {
            let text = "SELECT * FROM data WHERE n >= $1 ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED";
            sqlx::query_as::<_, Row>(text).bind(0_i64).fetch_one(&mut **tx).await?;
            Ok(())
        })
        .await?,
        side(database, "claim_next", async move |tx| {
            let filter = Filter::sql("n >= $1").bind(0_i64);
            let rows: Vec<Row> = data.claim_next(tx, 1, &order, filter).await?;
            if rows.len() == 1 { Ok(()) } else { Err("there was no next row".into()) }
        })
        .await?,
    ];
    report::heading("The next row of a queue, locked and let go");
    let goal = Goal { side: "claim_next", reference: PLAIN, at_most: 1.1 };
    report::table(&compare(sides, 400, time).await?, PLAIN, None, &[goal]);
    Ok(())
}

async fn whole(database: &TestDatabase, time: Duration) -> Result<()> {
    const PLAIN: &str = "begin, UPDATE, commit";
    const UPDATE: &str = "UPDATE data SET n = n + 1 WHERE id = $1";
    let ours = async |isolation| -> Result<Side> {
        let name =
            if isolation == Isolation::SessionDefault { "transaction" } else { "transaction, serializable" };
        Ok(Side::new(name, pool(database).await?, async move |pool: &mut PgPool, _| {
            let done = transaction(pool, isolation, |tx| {
                Box::pin(async move {
                    sqlx::query(UPDATE).bind(2_i64).execute(&mut **tx).await?;
                    Ok::<_, fencepost::Error>(())
                })
            });
            Ok(done.await?)
        }))
    };
    let sides = vec![
        Side::new(PLAIN, pool(database).await?, async |pool: &mut PgPool, _| {
            let mut tx = pool.begin().await?;
            sqlx::query(UPDATE).bind(1_i64).execute(&mut *tx).await?;
            Ok(tx.commit().await?)
        }),
        ours(Isolation::SessionDefault).await?,
        ours(Isolation::Serializable).await?,
    ];
    report::heading("A transaction with an UPDATE in it");
    let goal = Goal { side: "transaction", reference: PLAIN, at_most: 1.2 };
    report::table(&compare(sides, 200, time).await?, PLAIN, None, &[goal]);
    Ok(())
}
