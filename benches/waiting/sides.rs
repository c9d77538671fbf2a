//! What takes turns: each runs for a while and says how many it did a second.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use fencepost::{Lease, Owner, Wait};
use sqlx::postgres::PgAdvisoryLock;
use sqlx::{ConnectOptions as _, Executor as _, PgConnection};
use tokio::task::JoinSet;

use crate::figures::Result;
use crate::scene::Scene;

/// How long a crowd runs before it is measured.
const WARM: Duration = Duration::from_millis(100);

/// How long a crowd may take to queue. A crowd for whose statements the owner has too few connections queues for
/// those instead, and leaves no tickets.
const PATIENCE: Duration = Duration::from_secs(1);

/// How often whoever polls asks.
const POLL: Duration = Duration::from_millis(50);

/// Serial UPDATEs of one row on one connection.
pub(crate) async fn updates(scene: &Scene, time: Duration) -> Result<f64> {
    parallel_updates(scene, 1, time).await
}

/// UPDATEs of a row each on some connections.
pub(crate) async fn parallel_updates(scene: &Scene, connections: i32, time: Duration) -> Result<f64> {
    let crowd = Crowd::default();
    let mut tasks = JoinSet::new();
    for row in 1..=connections {
        let (mut conn, crowd): (PgConnection, _) = (scene.options().connect().await?, crowd.clone());
        tasks.spawn(async move {
            while crowd.goes_on() {
                conn.execute(sqlx::query("UPDATE counters SET n = n + 1 WHERE id = $1::integer").bind(row))
                    .await?;
                crowd.count();
            }
            Result::<_>::Ok(())
        });
    }
    crowd.rate(tasks, time).await
}

/// Waiters in line, of this process, on each of some leases; hand-offs on all of them together.
pub(crate) async fn line(scene: &mut Scene, leases: usize, waiters: usize, time: Duration) -> Result<f64> {
    let crowd = Crowd::default();
    let tasks = queue(&scene.owner, leases, waiters, &crowd)?;
    let rate = grants_a_second(scene, leases, leases * waiters, time).await?;
    crowd.disperse(tasks).await?;
    Ok(rate)
}

/// Waiters that acquire, release at once and queue again.
pub(crate) fn queue(
    owner: &Owner,
    leases: usize,
    waiters: usize,
    crowd: &Crowd,
) -> Result<JoinSet<Result<()>>> {
    let mut tasks = JoinSet::new();
    for lease in 0..leases {
        let lease = Lease::named(&format!("line-{lease}"))?;
        for _ in 0..waiters {
            let (owner, lease, crowd) = (owner.clone(), lease.clone(), crowd.clone());
            tasks.spawn(async move {
                while crowd.goes_on() {
                    lease.acquire(&owner, Wait::forever()).await?.release().await?;
                }
                Ok(())
            });
        }
    }
    Ok(tasks)
}

/// The lease for which `once` waits.
pub(crate) const ONCE: &str = "once";

/// Waits for a lease, and releases it.
pub(crate) async fn once(owner: &Owner) -> Result<()> {
    Lease::named(ONCE)?.acquire(owner, Wait::forever()).await?.release().await?;
    Ok(())
}

/// Grants a second, counted by the database, whoever causes them; from when most have queued.
pub(crate) async fn grants_a_second(
    scene: &mut Scene,
    leases: usize,
    waiters: usize,
    time: Duration,
) -> Result<f64> {
    // One of each line holds the lease.
    let in_line = i64::try_from((waiters - leases) * 3 / 4)?;
    let start = Instant::now();
    while scene.tickets().await? < in_line && start.elapsed() < PATIENCE {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    tokio::time::sleep(WARM).await;
    let (before, start) = (scene.grants().await?, Instant::now());
    tokio::time::sleep(time).await;
    let (after, took) = (scene.grants().await?, start.elapsed());
    Ok(f64::from(u32::try_from(after - before)?) / took.as_secs_f64())
}

/// Tasks that try, and try again after 50 ms, also after they had it: a hand-off is a grant to another one than
/// the one before.
pub(crate) async fn polling(scene: &Scene, waiters: u32, time: Duration) -> Result<f64> {
    let (crowd, last) = (Crowd::default(), Arc::new(AtomicU32::new(u32::MAX)));
    let mut tasks = JoinSet::new();
    for me in 0..waiters {
        let (owner, crowd, last) = (scene.owner.clone(), crowd.clone(), Arc::clone(&last));
        let lease = Lease::named("polled")?;
        tasks.spawn(async move {
            // They do not all begin at once.
            tokio::time::sleep(POLL * me / waiters).await;
            while crowd.goes_on() {
                if let Some(held) = lease.try_acquire(&owner).await? {
                    if last.swap(me, Ordering::Relaxed) != me {
                        crowd.count();
                    }
                    held.release().await?;
                }
                tokio::time::sleep(POLL).await;
            }
            Ok(())
        });
    }
    crowd.rate(tasks, time).await
}

/// `PgAdvisoryLock`, with a connection for each waiter, since each blocks in the server.
pub(crate) async fn advisory(scene: &Scene, waiters: u32, time: Duration) -> Result<f64> {
    let crowd = Crowd::default();
    let lock = Arc::new(PgAdvisoryLock::new("line"));
    let mut tasks = JoinSet::new();
    for _ in 0..waiters {
        let (mut conn, crowd): (PgConnection, _) = (scene.options().connect().await?, crowd.clone());
        let lock = Arc::clone(&lock);
        tasks.spawn(async move {
            while crowd.goes_on() {
                conn = lock.acquire(conn).await?.release_now().await?;
                crowd.count();
            }
            Ok(())
        });
    }
    crowd.rate(tasks, time).await
}

/// Tasks that go on until they are told to stop.
#[derive(Clone, Default)]
pub(crate) struct Crowd {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU32>,
}

impl Crowd {
    pub(crate) fn goes_on(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    pub(crate) fn count(&self) {
        self.done.fetch_add(1, Ordering::Relaxed);
    }

    /// How many they do a second; then they stop.
    pub(crate) async fn rate(&self, tasks: JoinSet<Result<()>>, time: Duration) -> Result<f64> {
        tokio::time::sleep(WARM).await;
        let (before, start) = (self.done.load(Ordering::Relaxed), Instant::now());
        tokio::time::sleep(time).await;
        let (after, took) = (self.done.load(Ordering::Relaxed), start.elapsed());
        self.disperse(tasks).await?;
        Ok(f64::from(after - before) / took.as_secs_f64())
    }

    /// Each ends what it is at.
    pub(crate) async fn disperse(&self, mut tasks: JoinSet<Result<()>>) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        while let Some(ended) = tasks.join_next().await {
            ended??;
        }
        Ok(())
    }
}
