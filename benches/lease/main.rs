//! What a lease costs, as a ratio to the plainest statement that could do the same work.
//!
//! ```sh
//! cargo bench --bench lease                            # about 80 s
//! FENCEPOST_BENCH_SECONDS=15 cargo bench --bench lease # shorter, noisier
//! FENCEPOST_BENCH_TCP=1 cargo bench --bench lease      # by TCP over the loopback instead of a Unix socket
//! ```
//!
//! It starts a durable Postgres of its own (see `fencepost::testing` for how one is found) and ends it.
//!
//! # What is measured against what, and why
//!
//! | work | reference | goal |
//! |---|---|---|
//! | a refused `try_acquire` | `SELECT 1`: the cheapest question there is | ≤ 4 ×, no byte of WAL |
//! | `try_acquire` and `release` | one upsert and one update of a lease table without a fence, an owner or a queue, both durable: what one writes by hand | ≤ 1.3 ×; ≤ 0.65 × when a flush takes 1 ms, since the release need not wait for one |
//! | a heartbeat of an owner with 10,000 leases | the same with one lease | ≤ 1.2 × |
//! | a fenced transaction with an UPDATE in it | the same transaction without a fence | ≤ 1.5 ×; ≤ 1.1 × when a flush takes 1 ms |
//!
//! The references run on the same server, by the same driver, prepared, on one plain connection (the
//! transactions on a pool of one connection each). The application's runtime has a single thread, which gives
//! the references their best: no hop at all. The library pays its own, to the owner's thread and back.
//!
//! # How noise is kept out
//!
//! All sides of a comparison take turns of 20 operations, forwards and backwards. Some hundred operations of
//! each make a round, which gives each side a median and each pair of sides a ratio; printed are the medians
//! over the rounds and the quartiles of the ratio. Whatever slows the machine for longer than a few turns
//! slows both sides of a ratio. On a machine or a disk with other work to do read the ratios, and not too
//! closely where the quartiles are far apart. Timings never fail the program; errors do.

#![expect(clippy::print_stdout, reason = "a bench prints its figures")]
#![expect(
    clippy::disallowed_methods,
    reason = "timings are what a bench is for; nothing here decides about a lease"
)]

#[path = "../shared/flush.rs"]
mod flush;
#[path = "../shared/quantiles.rs"]
mod quantiles;
#[path = "../shared/report.rs"]
mod report;
#[path = "../shared/rounds.rs"]
mod rounds;
mod scene;
mod sections;

use std::time::Duration;

use crate::rounds::Result;
use crate::scene::Scene;

/// How long it measures by default.
const SECONDS: f64 = 75.0;

fn main() -> Result<()> {
    let seconds = match std::env::var("FENCEPOST_BENCH_SECONDS") {
        Ok(text) => text.parse()?,
        Err(_) => SECONDS,
    };
    let tcp = std::env::var_os("FENCEPOST_BENCH_TCP").is_some_and(|value| value != "0");
    // Blocks the thread, so before the runtime.
    let server = Scene::server(tcp)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let scene = Scene::set_up(&server).await?;
        run(&scene, Duration::from_secs_f64(seconds), tcp).await?;
        scene.tear_down().await
    })
}

async fn run(scene: &Scene, total: Duration, tcp: bool) -> Result<()> {
    println!(
        "PostgreSQL {}, {}, durable; {} processors; times in µs",
        scene.version().await?,
        if tcp { "TCP over the loopback" } else { "Unix socket" },
        std::thread::available_parallelism()?,
    );
    let mut obstacles: Vec<String> = Vec::new();

    report::heading("A refused try");
    obstacles.extend(sections::refused(scene, total.mul_f64(0.12)).await?);
    report::heading("Acquire and release, on the disk as it is");
    obstacles.extend(sections::pair(scene, total.mul_f64(0.2), 1.3).await?);
    report::heading("A fenced transaction, on the disk as it is");
    obstacles.extend(sections::fenced(scene, total.mul_f64(0.15), 1.5).await?);
    report::heading("A heartbeat");
    sections::heartbeat(scene, total.mul_f64(0.08)).await?;

    flush::takes_a_millisecond(&mut scene.connect().await?).await?;
    obstacles.push("When a flush takes 1 ms:".to_owned());
    report::heading("Acquire and release, a flush takes 1 ms");
    obstacles.extend(sections::pair(scene, total.mul_f64(0.25), 0.65).await?);
    report::heading("A fenced transaction, a flush takes 1 ms");
    obstacles.extend(sections::fenced(scene, total.mul_f64(0.2), 1.1).await?);

    report::heading("What stands in the way (µs; differences are medians over the rounds)");
    for obstacle in obstacles {
        println!("  {obstacle}");
    }
    Ok(())
}
