//! What a permit and a term cost, as a ratio to a lease: all are granted, fenced and released in the same way.
//!
//! ```sh
//! cargo bench --bench held                            # about 30 s
//! FENCEPOST_BENCH_SECONDS=10 cargo bench --bench held # shorter, noisier
//! ```
//!
//! It starts a durable Postgres of its own and ends it. All sides of a comparison take turns on the same server; see
//! `benches/lease/main.rs` for how the figures are to be read.
//!
//! | work | reference | goal |
//! |---|---|---|
//! | campaign and resign | acquire and release of a lease | ≤ 1.1 × |
//! | acquire and release of a permit, of 5 | the same | ≤ 2 ×: two tables, and who is dead among the holders |
//! | … of 100, of which 50 are held | the same | – |
//! | a refused try for a permit, of 5 | a refused try for a lease | ≤ 1.5 × |

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

use fencepost::testing::{Server, TestDatabase};
use fencepost::{Election, Lease, Owner, Semaphore, Wait};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;

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
        run(&database, Duration::from_secs_f64(seconds / 2.0)).await?;
        Ok(database.close().await?)
    })
}

async fn run(database: &TestDatabase, time: Duration) -> Result<()> {
    println!("Unix socket, durable; {} processors; times in µs", std::thread::available_parallelism()?);
    let pool = PgPoolOptions::new().max_connections(2).connect_with(database.options()).await?;
    // A ttl without a beat in between.
    let owner = Owner::builder(&pool).ttl(Duration::from_mins(10)).start().await?;
    pairs(&pool, &owner, time).await?;
    refused(&pool, &owner, time).await?;
    owner.shutdown().await?;
    Ok(())
}

/// The work of a side, with the owner.
fn side(
    pool: &PgPool,
    owner: &Owner,
    name: &'static str,
    work: impl AsyncFn(&Owner) -> Result<()> + 'static,
) -> Side {
    let owner = owner.clone();
    Side::new(name, pool.clone(), async move |_, _| work(&owner).await)
}

async fn pairs(pool: &PgPool, owner: &Owner, time: Duration) -> Result<()> {
    const LEASE: &str = "a lease";
    let (lease, election) = (Lease::named("bench")?, Election::named("bench")?);
    let (five, hundred) = (Semaphore::named("five", 5)?, Semaphore::named("hundred", 100)?);
    let half = hundred.clone().taking(50)?.acquire(owner, Wait::no()).await?;
    let three = five.clone().taking(3)?;
    let permit = async |some: &Semaphore, owner: &Owner| -> Result<()> {
        some.acquire(owner, Wait::no()).await?.release().await?;
        Ok(())
    };
    let of_five = five.clone();
    let sides = vec![
        side(pool, owner, LEASE, async move |owner| {
            lease.acquire(owner, Wait::no()).await?.release().await?;
            Ok(())
        }),
        side(pool, owner, "a term", async move |owner| {
            election.campaign(owner, Wait::no()).await?.resign().await?;
            Ok(())
        }),
        side(pool, owner, "a permit of 5", async move |owner| permit(&of_five, owner).await),
        side(pool, owner, "3 permits of 5", async move |owner| permit(&three, owner).await),
        side(pool, owner, "a permit of 100", async move |owner| permit(&hundred, owner).await),
    ];
    report::heading("Acquired and released");
    let goals = [
        Goal { side: "a term", reference: LEASE, at_most: 1.1 },
        Goal { side: "a permit of 5", reference: LEASE, at_most: 2.0 },
    ];
    report::table(&compare(sides, 200, time).await?, LEASE, None, &goals);
    half.release().await?;
    Ok(())
}

async fn refused(pool: &PgPool, owner: &Owner, time: Duration) -> Result<()> {
    const LEASE: &str = "a lease";
    let (lease, five) = (Lease::named("held")?, Semaphore::named("full", 5)?);
    let held =
        (lease.acquire(owner, Wait::no()).await?, five.clone().taking(5)?.acquire(owner, Wait::no()).await?);
    let is_busy =
        |refused: bool| -> Result<()> { if refused { Ok(()) } else { Err("it was granted".into()) } };
    let sides = vec![
        side(pool, owner, LEASE, async move |owner| is_busy(lease.try_acquire(owner).await?.is_none())),
        side(pool, owner, "a permit of 5", async move |owner| {
            is_busy(five.try_acquire(owner).await?.is_none())
        }),
    ];
    report::heading("A refused try");
    let goal = Goal { side: "a permit of 5", reference: LEASE, at_most: 1.5 };
    report::table(&compare(sides, 400, time).await?, LEASE, None, &[goal]);
    held.0.release().await?;
    held.1.release().await?;
    Ok(())
}
