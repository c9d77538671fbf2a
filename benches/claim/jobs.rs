//! Eight workers that take jobs from one table.

use std::time::{Duration, Instant};

use fencepost::Owner;
use fencepost::claim::{Attempt, Jobs};
use fencepost::testing::TestDatabase;
use sqlx::types::Uuid;
use sqlx::{Executor as _, PgPool};

use crate::pool;
use crate::quantiles::{median, quantile, sorted};
use crate::report::{heading, verdict};
use crate::rounds::Result;

const WORKERS: usize = 8;

/// The least number of rounds, however short the time.
const ROUNDS: usize = 5;

/// How long a side claims in a round.
const TURN: Duration = Duration::from_millis(400);

/// More than are claimed in that time.
const FILL: [&str; 2] = [
    "TRUNCATE job; INSERT INTO job (key, kind, state, due_at) \
     SELECT 'job-' || n, 'mail', 'ready', now() - interval '1 h' FROM generate_series(1, 40000) n",
    "TRUNCATE fencepost.claims; INSERT INTO fencepost.claims (key, kind, state, due_at) \
     SELECT 'job-' || n, 'mail', 'ready', now() - interval '1 h' FROM generate_series(1, 40000) n",
];

/// On a table like that of the claims, writing what they write, without the rules.
const BARE: &str = "\
    UPDATE job SET state = 'running', token = 1, grant_id = gen_random_uuid(), owner = $1, label = 'worker', \
        started_at = clock_timestamp(), attempts = attempts + 1 WHERE key = (\
        SELECT key FROM job WHERE kind = 'mail' AND state = 'ready' AND due_at <= now() \
         ORDER BY due_at, key LIMIT 1 FOR UPDATE SKIP LOCKED) RETURNING key, payload";

pub(crate) async fn eight_workers(database: &TestDatabase, setup: &PgPool, time: Duration) -> Result<()> {
    let plain = pool(database, u32::try_from(WORKERS)?).await?;
    let mut owners = Vec::new();
    for n in 0..WORKERS {
        owners.push(Owner::builder(setup).label(&format!("worker-{n}")).start().await?);
    }
    let mut rounds = Vec::new();
    let start = Instant::now();
    while rounds.len() < ROUNDS || start.elapsed() < time {
        fill(setup, FILL[0], "job").await?;
        let bare = bare(&plain).await?;
        let mut ours = [0.0; 2];
        for (limit, rate) in [1, 50].into_iter().zip(&mut ours) {
            fill(setup, FILL[1], "fencepost.claims").await?;
            let attempts;
            (*rate, attempts) = claimed(&owners, limit).await?;
            // Gone before they are dropped: there is nothing to be given back.
            setup.execute("TRUNCATE fencepost.claims").await?;
            drop(attempts);
        }
        rounds.push([bare, ours[0], ours[1]]);
    }
    heading("Eight workers take jobs");
    for (at, side) in
        ["UPDATE … FOR UPDATE SKIP LOCKED", "claim_next, 1", "claim_next, 50"].iter().enumerate()
    {
        println!(
            "  {side:<40} {:>10.0} jobs/s",
            median(rounds.iter().filter_map(|round| round.get(at)).copied())
        );
    }
    for (what, least, ratios) in [
        ("claim_next, 1 / bare", 0.7, rounds.iter().map(|[bare, one, _]| one / bare).collect::<Vec<_>>()),
        ("claim_next, 50 / claim_next, 1", 5.0, rounds.iter().map(|[_, one, fifty]| fifty / one).collect()),
    ] {
        let ratios = sorted(ratios.into_iter());
        let [low, middle, high] = [0.25, 0.5, 0.75].map(|q| quantile(&ratios, q));
        verdict(&format!("{what}: {middle:.2} × ({low:.2}–{high:.2}), goal ≥ {least} ×"), middle >= least);
    }
    for owner in owners.to_vec() {
        owner.shutdown().await?;
    }
    Ok(())
}

async fn fill(setup: &PgPool, text: &'static str, table: &str) -> Result<()> {
    setup.execute(text).await?;
    setup.execute(sqlx::AssertSqlSafe(format!("VACUUM ANALYZE {table}"))).await?;
    Ok(())
}

/// Jobs a second.
async fn bare(pool: &PgPool) -> Result<f64> {
    let start = Instant::now();
    let mut workers = Vec::new();
    for _ in 0..WORKERS {
        let (pool, owner) = (pool.clone(), Uuid::from_u128(7));
        workers.push(tokio::spawn(async move {
            let mut connection = pool.acquire().await?;
            let mut jobs = 0_u32;
            while start.elapsed() < TURN {
                sqlx::query(BARE).bind(owner).fetch_one(&mut *connection).await?;
                jobs += 1;
            }
            Ok::<_, sqlx::Error>(jobs)
        }));
    }
    let mut all = 0;
    for worker in workers {
        all += worker.await??;
    }
    Ok(f64::from(all) / start.elapsed().as_secs_f64())
}

/// The same, with what was claimed.
async fn claimed(owners: &[Owner], limit: usize) -> Result<(f64, Vec<Attempt>)> {
    let start = Instant::now();
    let mut workers = Vec::new();
    for owner in owners.to_vec() {
        workers.push(tokio::spawn(async move {
            let jobs = Jobs::of_kind("mail")?;
            let mut all = Vec::new();
            while start.elapsed() < TURN {
                all.extend(jobs.claim_next(&owner, limit).await?);
            }
            Ok::<_, fencepost::Error>(all)
        }));
    }
    let mut all = Vec::new();
    for worker in workers {
        all.extend(worker.await??);
    }
    let jobs = f64::from(u32::try_from(all.len())?);
    Ok((jobs / start.elapsed().as_secs_f64(), all))
}
