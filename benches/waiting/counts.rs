//! How many statements it takes: counted, not timed.

use std::time::{Duration, Instant};

use fencepost::{HeldLease, Lease, Wait};
use tokio::task::JoinSet;

use crate::figures::{Result, verdict};
use crate::processes::{Process, tell_all};
use crate::quantiles::median;
use crate::scene::{Log, Scene, Sent};
use crate::sides::{self, ONCE};

/// How long whatever is still under way when the last answer has come may take.
const QUIET: Duration = Duration::from_millis(200);

/// Statements a hand-off, inside of one process and from process to process.
pub(crate) async fn statements(scene: &mut Scene, log: &mut Log, processes: &mut [Process]) -> Result<()> {
    println!("  {:<41} {:>5} {:>10}   acquire release notify other", "", "n", "statements");
    let (mut within, mut across) = (0_f64, 0_f64);
    for waiters in [1, 8, 64, 256] {
        let sent = once_each(scene, log, waiters).await?;
        within = within.max(line("hand-off within the process", waiters, waiters, sent));
    }
    for waiters in [8, 64, 256] {
        let sent = across_processes(scene, log, processes, waiters).await?;
        across = across.max(line("hand-off from process to process", waiters, waiters, sent));
    }
    for waiters in [1, 8, 64, 256] {
        let times = (512 / waiters).max(3);
        let sent = again_and_again(scene, log, waiters, times).await?;
        line("queue, hand-off, queue again: a grant", waiters, waiters * times, sent);
    }
    verdict(
        &format!("statements a hand-off within a process: at most {within:.2}, goal ≤ 1.3"),
        within <= 1.3,
    );
    verdict(
        &format!("statements a hand-off across processes: at most {across:.2}, goal ≤ 2.3"),
        across <= 2.3,
    );
    Ok(())
}

fn line(what: &str, waiters: u32, grants: u32, sent: Sent) -> f64 {
    let each = |count| f64::from(count) / f64::from(grants);
    println!(
        "  {what:<41} {waiters:>5} {:>10.3} {:>9.3} {:>7.3} {:>6.3} {:>5.3}",
        each(sent.total()),
        each(sent.acquire),
        each(sent.release),
        each(sent.notify),
        each(sent.other),
    );
    each(sent.total())
}

/// Some queue behind a holder; then it releases, and they pass it on. The last one's release hands nothing over and
/// does not count.
async fn once_each(scene: &mut Scene, log: &mut Log, waiters: u32) -> Result<Sent> {
    let held = hold(scene).await?;
    let mut tasks = JoinSet::new();
    for _ in 0..waiters {
        let owner = scene.owner.clone();
        tasks.spawn(async move { sides::once(&owner).await });
    }
    queued(scene, waiters).await?;
    tokio::time::sleep(QUIET).await;
    log.sent()?;
    held.release().await?;
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    passed_on(log).await
}

/// The same, where each hand-off is to another process.
async fn across_processes(
    scene: &mut Scene,
    log: &mut Log,
    processes: &mut [Process],
    waiters: u32,
) -> Result<Sent> {
    let held = hold(scene).await?;
    let mut turn = (0..processes.len()).cycle();
    for queue in 1..=waiters {
        let next = turn.next().and_then(|next| processes.get_mut(next)).ok_or("no process")?;
        next.tell("join")?;
        next.hear()?;
        queued(scene, queue).await?;
    }
    tokio::time::sleep(QUIET).await;
    log.sent()?;
    held.release().await?;
    tell_all(processes, "served")?;
    passed_on(log).await
}

async fn again_and_again(scene: &Scene, log: &mut Log, waiters: u32, times: u32) -> Result<Sent> {
    log.sent()?;
    let mut tasks = JoinSet::new();
    for _ in 0..waiters {
        let owner = scene.owner.clone();
        tasks.spawn(async move {
            for _ in 0..times {
                sides::once(&owner).await?;
            }
            Result::<_>::Ok(())
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    tokio::time::sleep(QUIET).await;
    let sent = log.sent()?;
    if sent.release != waiters * times {
        return Err(format!("{} releases were logged of {}", sent.release, waiters * times).into());
    }
    Ok(sent)
}

async fn passed_on(log: &mut Log) -> Result<Sent> {
    tokio::time::sleep(QUIET).await;
    let mut sent = log.sent()?;
    sent.release = sent.release.checked_sub(1).ok_or("the log has no release")?;
    Ok(sent)
}

async fn hold(scene: &Scene) -> Result<HeldLease> {
    Ok(Lease::named(ONCE)?.acquire(&scene.owner, Wait::no()).await?)
}

async fn queued(scene: &mut Scene, waiters: u32) -> Result<()> {
    let start = Instant::now();
    while scene.tickets().await? != i64::from(waiters) {
        if start.elapsed() > Duration::from_secs(20) {
            return Err(format!("{} in line instead of {waiters}", scene.tickets().await?).into());
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Ok(())
}

/// What waiting costs while nothing happens.
pub(crate) async fn waiting(scene: &mut Scene, log: &mut Log, time: Duration) -> Result<()> {
    const WAITERS: u32 = 64;
    const BLOCKS: u32 = 10;
    let held = hold(scene).await?;
    let mut tasks = JoinSet::new();
    for _ in 0..WAITERS {
        let owner = scene.owner.clone();
        tasks.spawn(async move { sides::once(&owner).await });
    }
    queued(scene, WAITERS).await?;
    tokio::time::sleep(QUIET).await;
    log.sent()?;
    let start = Instant::now();
    let mut blocks = Vec::new();
    for _ in 0..BLOCKS {
        let before = scene.wal().await?;
        tokio::time::sleep(time / BLOCKS).await;
        blocks.push(scene.wal().await? - before);
    }
    let (sent, took) = (log.sent()?, start.elapsed());
    held.release().await?;
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    let each = f64::from(sent.total()) / f64::from(WAITERS) / took.as_secs_f64();
    println!(
        "  {} statements in {:.1} s ({} acquire, {} other); WAL {} B, in {} of {BLOCKS} parts of that time",
        sent.total(),
        took.as_secs_f64(),
        sent.acquire,
        sent.total() - sent.acquire,
        blocks.iter().sum::<f64>(),
        blocks.iter().filter(|bytes| **bytes > 0.0).count(),
    );
    verdict(&format!("statements a waiter and second: {each:.2}, goal ≤ 1"), each <= 1.0);
    let bytes = median(blocks.into_iter());
    verdict(&format!("WAL once queued, the median part: {bytes} B, goal 0 B"), bytes == 0.0);
    Ok(())
}
