//! What optimistic versions cost, as a ratio to the plain statement without a version.
//!
//! ```sh
//! cargo bench --bench version                            # about 30 s
//! FENCEPOST_BENCH_SECONDS=10 cargo bench --bench version # shorter, noisier
//! ```
//!
//! It starts a durable Postgres of its own and ends it. All sides of a comparison take turns on the same server, by the
//! same driver, prepared; see `benches/lease/main.rs` for how the figures are to be read.
//!
//! | work | reference | goal |
//! |---|---|---|
//! | `update` | `UPDATE … WHERE id = $1` | ≤ 1.25 × |
//! | `update` that conflicts: nothing is written | the same | ≤ 1 × |
//! | `update_many` of a hundred rows | `UPDATE … FROM unnest($1, $2)` | ≤ 2.5 ×: it locks in order and lists the losers |

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

use fencepost::Version;
use fencepost::testing::{Server, TestDatabase};
use fencepost::version::{Changes, Update, Versioned};
use sqlx::postgres::PgPoolOptions;
use sqlx::{ConnectOptions as _, Executor as _, PgPool};

use crate::report::Goal;
use crate::rounds::{Result, Side, compare};

/// How long it measures by default.
const SECONDS: f64 = 30.0;

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
        let pool = pool(&database).await?;
        // Room for new versions of a row beside the old one, for all sides alike.
        pool.execute(
            "CREATE TABLE data (id bigint PRIMARY KEY, n bigint NOT NULL, version bigint NOT NULL) WITH (fillfactor = 50);
             INSERT INTO data SELECT id, 0, 1 FROM generate_series(1, 10000) id",
        )
        .await?;
        pool.execute("VACUUM ANALYZE data").await?;
        println!("{} cores", std::thread::available_parallelism()?);
        let time = Duration::from_secs_f64(seconds / 2.0);
        one(&database, time).await?;
        many(&database, time).await?;
        Ok(database.close().await?)
    })
}

/// A pool of one connection, which is there, without the ping before use.
async fn pool(database: &TestDatabase) -> Result<PgPool> {
    let pool = PgPoolOptions::new().min_connections(1).max_connections(1).test_before_acquire(false);
    Ok(pool.connect_with(database.options().disable_statement_logging()).await?)
}

async fn one(database: &TestDatabase, time: Duration) -> Result<()> {
    const PLAIN: &str = "UPDATE … WHERE id = $1";
    const BY_HAND: &str = "UPDATE … WHERE id = $1 AND version = $2";
    let (data, refused) = (Versioned::on("data")?, Versioned::on("data")?);
    let (mut by_hand, mut version) = (1_i64, Version::new(1));
    let sides = vec![
        Side::new(PLAIN, pool(database).await?, async |pool: &mut PgPool, _| {
            sqlx::query("UPDATE data SET n = $2 WHERE id = $1")
                .bind(1_i64)
                .bind(7_i64)
                .execute(&*pool)
                .await?;
            Ok(())
        }),
        Side::new(BY_HAND, pool(database).await?, async move |pool: &mut PgPool, _| {
            let text = "UPDATE data SET n = $3, version = version + 1 WHERE id = $1 AND version = $2";
            let done = sqlx::query(text).bind(2_i64).bind(by_hand).bind(7_i64).execute(&*pool).await?;
            by_hand += 1;
            if done.rows_affected() == 1 { Ok(()) } else { Err("not updated".into()) }
        }),
        Side::new("update", pool(database).await?, async move |pool: &mut PgPool, _| {
            let changes = Changes::new().set("n", 7_i64);
            let mut conn = pool.acquire().await?;
            version = data.update(&mut conn, 3_i64, version, changes).await?.into_result()?;
            Ok(())
        }),
        Side::new("update, a conflict", pool(database).await?, async move |pool: &mut PgPool, _| {
            let changes = Changes::new().set("n", 7_i64);
            let mut conn = pool.acquire().await?;
            match refused.update(&mut conn, 4_i64, Version::new(0), changes).await? {
                Update::Conflict { .. } => Ok(()),
                other => Err(format!("{other:?}").into()),
            }
        }),
    ];
    report::heading("One row");
    let goals = [
        Goal { side: "update", reference: PLAIN, at_most: 1.25 },
        Goal { side: "update, a conflict", reference: PLAIN, at_most: 1.0 },
    ];
    report::table(&compare(sides, 400, time).await?, PLAIN, None, &goals);
    Ok(())
}

async fn many(database: &TestDatabase, time: Duration) -> Result<()> {
    const PLAIN: &str = "UPDATE … FROM unnest($1, $2)";
    let data = Versioned::on("data")?;
    let keys = |from: i64| -> Vec<i64> { (0..100).map(|n| from + n * 37 % 4_000).collect() };
    let (plain, values) = (keys(1_000), vec![7_i64; 100]);
    let each = values.clone();
    let mut rows: Vec<(i64, Version)> = keys(6_000).into_iter().map(|key| (key, Version::new(1))).collect();
    let sides = vec![
        Side::new(PLAIN, pool(database).await?, async move |pool: &mut PgPool, _| {
            let text = "UPDATE data AS t SET n = u.n FROM unnest($1::bigint[], $2::bigint[]) AS u (id, n) WHERE t.id = u.id";
            sqlx::query(text).bind(&plain).bind(&values).execute(&*pool).await?;
            Ok(())
        }),
        Side::new("update_many", pool(database).await?, async move |pool: &mut PgPool, _| {
            let changes = Changes::new().set_each("n", &each);
            let mut conn = pool.acquire().await?;
            let many = data.update_many(&mut conn, &rows, changes).await?;
            if many.updated.len() < 100 {
                return Err("not all were updated".into());
            }
            rows = many.updated;
            Ok(())
        }),
    ];
    report::heading("A hundred rows");
    let goal = Goal { side: "update_many", reference: PLAIN, at_most: 2.5 };
    report::table(&compare(sides, 50, time).await?, PLAIN, None, &[goal]);
    Ok(())
}
