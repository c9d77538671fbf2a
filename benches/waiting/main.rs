//! What waiting in line costs: hand-offs a second, statements a hand-off, and what waiting itself takes.
//!
//! ```sh
//! cargo bench --bench waiting                            # about 90 s
//! FENCEPOST_BENCH_SECONDS=20 cargo bench --bench waiting # shorter, noisier
//! ```
//!
//! It starts a durable Postgres of its own (see `fencepost::testing` for how one is found) and ends it. For
//! the figures across processes it starts itself four more times; they end with it.
//!
//! # What is measured against what, and why
//!
//! | figure | reference | goal |
//! |---|---|---|
//! | hand-offs a second, 256 waiters in one process on one lease, each queueing again at once | serial durable UPDATEs of one row on one connection: a hand-off is one durable write, and none can begin before the one before has ended | ≥ 0.7 × |
//! | the same | 256 tasks that try every 50 ms, through the same owner | ≥ 5 × |
//! | the same | sqlx's `PgAdvisoryLock` on 256 connections, neither durable nor fenced | shown |
//! | the owner's connections meanwhile | | ≤ 10 |
//! | hand-offs of 32 leases at once | of one lease; and UPDATEs of 32 rows on 32 connections, the most that the disk's group commit gives | shown |
//! | statements from a release until the next one has the lease | | ≤ 1.3 within a process, ≤ 2.3 from process to process |
//! | statements a second and waiter while the lease is held | | ≤ 1, and no byte of WAL |
//!
//! A waiter that queues *again* sends one statement more to do so, which the figures a second contain: they
//! are of acquire, release and acquire again. It is shown beside the statements of a hand-off.
//!
//! # How it is counted
//!
//! Hand-offs are counted by the database: each grant draws one token from a sequence that caches none. (Of those who
//! poll only a grant to another task than the last one counts.)
//! Statements are counted in the server's log, in a database of its own where `log_statement = all`: every
//! message of every connection, also those nobody thought of, and by what they call. That no release is
//! missing in it is checked. Where hand-offs are slow the figures contain waiters that ask again meanwhile, as each
//! does every second or two (column `acquire`).
//!
//! # How noise is kept out
//!
//! The sides of a comparison take turns of part of a second, in rounds; a ratio is taken inside a round.
//! Printed are the medians over the rounds and the quartiles of the ratio. Postgres, the waiters and the owner's
//! thread share the processors: on few of them the hand-offs compete with the queueing. Timings never fail
//! the program; errors do.

#![expect(clippy::print_stdout, reason = "a bench prints its figures")]
#![expect(
    clippy::disallowed_methods,
    reason = "timings are what a bench is for; nothing here decides about a lease"
)]

mod counts;
mod figures;
#[path = "../shared/flush.rs"]
mod flush;
mod processes;
#[path = "../shared/quantiles.rs"]
mod quantiles;
mod scene;
mod sides;

use std::time::{Duration, Instant};

use fencepost::testing::Server;

use crate::figures::{Figures, Result, heading, verdict};
use crate::processes::{Process, tell_all};
use crate::scene::{Log, Scene};

/// How long it measures by default.
const SECONDS: f64 = 90.0;

/// The least number of rounds of a comparison, however short the time.
const ROUNDS: u32 = 4;

const PROCESSES: usize = 4;

const UPDATES: &str = "serial durable UPDATEs of one row";
const LINE: &str = "256 waiters";

fn main() -> Result<()> {
    if processes::was_one()? {
        return Ok(());
    }
    let seconds = match std::env::var("FENCEPOST_BENCH_SECONDS") {
        Ok(text) => text.parse()?,
        Err(_) => SECONDS,
    };
    // Blocks the thread, so before the runtime.
    let server = scene::server()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(run(&server, Duration::from_secs_f64(seconds)))
}

async fn run(server: &Server, total: Duration) -> Result<()> {
    let start = Instant::now();
    let mut scene = Scene::set_up(server, "waiting", false).await?;
    let mut others = start_processes(&scene)?;
    println!(
        "PostgreSQL {}, Unix socket, durable; {} processors",
        scene.version().await?,
        std::thread::available_parallelism()?,
    );
    let part = |share: f64| total.mul_f64(share);

    heading("Hand-offs on one lease, by waiters in one process");
    one_lease(&mut scene, part(0.2)).await?;
    heading("256 waiters, against others");
    against_others(&mut scene, &mut others, part(0.2)).await?;
    heading("Hand-offs of 32 leases at once");
    many_leases(&mut scene, &mut others, part(0.13)).await?;

    heading("Statements, counted");
    {
        let mut counted = Scene::set_up(server, "counted", true).await?;
        let mut others = start_processes(&counted)?;
        let mut log = Log::of(server)?;
        counts::statements(&mut counted, &mut log, &mut others).await?;
        heading("64 waiters on a lease that is held");
        counts::waiting(&mut counted, &mut log, part(0.06)).await?;
        drop(others);
        counted.tear_down().await?;
    }

    flush::takes_a_millisecond(&mut scene.look).await?;
    heading("Hand-offs on one lease, a flush takes 1 ms");
    one_lease(&mut scene, part(0.17)).await?;
    heading("Hand-offs of 32 leases at once, a flush takes 1 ms");
    many_leases(&mut scene, &mut others, part(0.1)).await?;
    drop(others);
    scene.tear_down().await?;
    println!("\n{:.0} s", start.elapsed().as_secs_f64());
    Ok(())
}

fn start_processes(scene: &Scene) -> Result<Vec<Process>> {
    (1..=PROCESSES).map(|number| Process::start(&scene.url(), &format!("process {number}"))).collect()
}

async fn one_lease(scene: &mut Scene, time: Duration) -> Result<()> {
    let sides = [(1, "1 waiter"), (8, "8 waiters"), (64, "64 waiters"), (256, LINE)];
    let (mut figures, mut connections, mut rounds) = (Figures::default(), 0, Rounds::of(time, 5));
    while let Some(slice) = rounds.next() {
        figures.add(UPDATES, sides::updates(scene, slice).await?);
        for (waiters, name) in sides {
            figures.add(name, sides::line(scene, 1, waiters, slice).await?);
            connections = connections.max(scene.connections("waiting").await?);
        }
    }
    figures.print(UPDATES);
    figures.judge(LINE, UPDATES, 0.7);
    verdict(&format!("connections of the owner: {connections}, goal ≤ 10"), connections <= 10);
    Ok(())
}

async fn against_others(scene: &mut Scene, others: &mut [Process], time: Duration) -> Result<()> {
    const POLLING: &str = "256 tasks that try every 50 ms";
    const SPREAD: &str = "256 waiters in 4 processes";
    const ADVISORY: &str = "sqlx PgAdvisoryLock, 256 connections, not durable";

    let (mut figures, mut rounds) = (Figures::default(), Rounds::of(time, 5));
    while let Some(slice) = rounds.next() {
        figures.add(UPDATES, sides::updates(scene, slice).await?);
        figures.add(LINE, sides::line(scene, 1, 256, slice).await?);
        figures.add(SPREAD, spread(scene, others, 1, 64, slice).await?);
        figures.add(POLLING, sides::polling(scene, 256, slice).await?);
        figures.add(ADVISORY, sides::advisory(scene, 256, slice).await?);
    }
    figures.print(UPDATES);
    figures.judge(LINE, POLLING, 5.0);
    Ok(())
}

async fn many_leases(scene: &mut Scene, others: &mut [Process], time: Duration) -> Result<()> {
    const PARALLEL: &str = "UPDATEs of 32 rows on 32 connections";
    const ONE: &str = "1 lease, 8 waiters";
    const MANY: &str = "32 leases, 8 waiters each";
    const SPREAD: &str = "32 leases, 8 waiters each, 2 in each of 4 processes";

    let (mut figures, mut rounds) = (Figures::default(), Rounds::of(time, 5));
    while let Some(slice) = rounds.next() {
        figures.add(UPDATES, sides::updates(scene, slice).await?);
        figures.add(PARALLEL, sides::parallel_updates(scene, 32, slice).await?);
        figures.add(ONE, sides::line(scene, 1, 8, slice).await?);
        figures.add(MANY, sides::line(scene, 32, 8, slice).await?);
        figures.add(SPREAD, spread(scene, others, 32, 2, slice).await?);
    }
    figures.print(ONE);
    Ok(())
}

/// As `sides::line`, with the waiters in other processes; so many each.
async fn spread(
    scene: &mut Scene,
    others: &mut [Process],
    leases: usize,
    waiters: usize,
    time: Duration,
) -> Result<f64> {
    tell_all(others, &format!("queue {leases} {waiters}"))?;
    let rate = sides::grants_a_second(scene, leases, leases * waiters * PROCESSES, time).await?;
    tell_all(others, "stop")?;
    Ok(rate)
}

/// Rounds until the time is over; each says how long each of its sides is measured.
struct Rounds {
    start: Instant,
    time: Duration,
    slice: Duration,
    done: u32,
}

impl Rounds {
    /// As long as a crowd takes to queue and to end, four rounds or so fit in.
    fn of(time: Duration, sides: u32) -> Self {
        let slice = (time / sides / 8).clamp(Duration::from_millis(100), Duration::from_millis(500));
        Self { start: Instant::now(), time, slice, done: 0 }
    }

    fn next(&mut self) -> Option<Duration> {
        let goes_on = self.done < ROUNDS || self.start.elapsed() < self.time;
        self.done += 1;
        goes_on.then_some(self.slice)
    }
}
