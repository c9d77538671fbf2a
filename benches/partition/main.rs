//! What a member of a group costs while nothing happens: how many statements it sends, and what one of them costs, whatever
//! the number of partitions.
//!
//! ```sh
//! cargo bench --bench partition                            # about 40 s
//! FENCEPOST_BENCH_SECONDS=10 cargo bench --bench partition # shorter, noisier
//! ```
//!
//! It starts a durable Postgres of its own and ends it. See `benches/lease/main.rs` for how the figures are to be read.
//!
//! | work | reference | goal |
//! |---|---|---|
//! | a settled round, 8 members, 16 and 4,096 partitions | a heartbeat, which writes | ≤ 1 × |
//! | a settled round, 32 members | the same | ≤ 2 × |
//! | statements a second of an owner with a membership | of one without | one heartbeat a third of the ttl, and 1 to 2 rounds |

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
use fencepost::{Group, Owner};
use sqlx::postgres::PgPoolOptions;
use sqlx::types::Uuid;
use sqlx::{ConnectOptions as _, PgPool};

use crate::report::Goal;
use crate::rounds::{Result, Side, compare};

/// How long it measures by default.
const SECONDS: f64 = 40.0;

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
        println!("Unix socket, durable; {} processors; times in µs", std::thread::available_parallelism()?);
        rounds(&database, Duration::from_secs_f64(seconds / 2.0)).await?;
        statements(&database, Duration::from_secs_f64(seconds / 6.0)).await?;
        Ok(database.close().await?)
    })
}

/// A pool of one connection, which is there, without the ping before use.
async fn pool(database: &TestDatabase) -> Result<PgPool> {
    let pool = PgPoolOptions::new().min_connections(1).max_connections(1).test_before_acquire(false);
    Ok(pool.connect_with(database.options().disable_statement_logging()).await?)
}

/// A group of so many members, who have everything. One of them.
async fn settled(pool: &PgPool, group: &str, members: i32, partitions: i32) -> Result<(Uuid, i32)> {
    let start = "SELECT array_agg(fencepost.owner_start('member', '1 hour')) FROM generate_series(1, $1)";
    let owners: Vec<Uuid> = sqlx::query_scalar(start).bind(members).fetch_one(pool).await?;
    let each = partitions / members;
    for (owner, number) in owners.iter().zip(0..) {
        let join = sqlx::query("SELECT FROM fencepost.member_round($1, $2, $3, 0)");
        join.bind(group).bind(partitions).bind(owner).execute(pool).await?;
        let take = "SELECT count(*) FILTER (WHERE a.granted) FROM generate_series($2, $3 - 1) n, \
                    fencepost.acquire(fencepost.partition_lease($1, n), $4) a";
        let take = sqlx::query(take).bind(group).bind(number * each).bind((number + 1) * each);
        take.bind(owner).execute(pool).await?;
    }
    for owner in &owners {
        let look = sqlx::query("SELECT FROM fencepost.member_round($1, $2, $3, $4)");
        look.bind(group).bind(partitions).bind(owner).bind(each).execute(pool).await?;
    }
    sqlx::raw_sql("ANALYZE fencepost.members; ANALYZE fencepost.owners; ANALYZE fencepost.leases")
        .execute(pool)
        .await?;
    Ok((owners.first().copied().ok_or("no member")?, each))
}

async fn rounds(database: &TestDatabase, time: Duration) -> Result<()> {
    const BEAT: &str = "heartbeat";
    let setup = pool(database).await?;
    let beating: Uuid =
        sqlx::query_scalar("SELECT fencepost.owner_start('beating', '1 hour')").fetch_one(&setup).await?;
    let mut sides = vec![Side::new(BEAT, pool(database).await?, async move |pool: &mut PgPool, _| {
        sqlx::query("SELECT remaining FROM fencepost.heartbeat($1)").bind(beating).fetch_one(&*pool).await?;
        Ok(())
    })];
    for (name, members, partitions) in [
        ("round, 8 members, 16 partitions", 8, 16),
        ("round, 8 members, 4096 partitions", 8, 4096),
        ("round, 32 members, 4096 partitions", 32, 4096),
    ] {
        let (owner, held) = settled(&setup, name, members, partitions).await?;
        sides.push(Side::new(name, pool(database).await?, async move |pool: &mut PgPool, _| {
            let round = "SELECT settled FROM fencepost.member_round($1, $2, $3, $4)";
            let round = sqlx::query_scalar(round).bind(name).bind(partitions).bind(owner).bind(held);
            let settled: bool = round.fetch_one(&*pool).await?;
            if settled { Ok(()) } else { Err("it is not settled".into()) }
        }));
    }
    setup.close().await;
    report::heading("A round of a member while nothing happens");
    let goals = [
        Goal { side: "round, 8 members, 16 partitions", reference: BEAT, at_most: 1.0 },
        Goal { side: "round, 8 members, 4096 partitions", reference: BEAT, at_most: 1.0 },
        Goal { side: "round, 32 members, 4096 partitions", reference: BEAT, at_most: 2.0 },
    ];
    report::table(&compare(sides, 400, time).await?, BEAT, None, &goals);
    Ok(())
}

async fn statements(database: &TestDatabase, time: Duration) -> Result<()> {
    const TTL: Duration = Duration::from_secs(3);
    report::heading("Statements of an owner with a ttl of 3 s");
    let observer = pool(database).await?;
    // Each statement is a transaction. The figures of a session arrive when it is idle, with a delay of a second or so.
    let count = async || -> Result<i64> {
        let count = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()";
        Ok(sqlx::query_scalar(count).fetch_one(&observer).await?)
    };
    for partitions in [None, Some(16), Some(512)] {
        let owner = Owner::builder(&observer).ttl(TTL).start().await?;
        let mut all = Vec::new();
        let mut member = None;
        if let Some(partitions) = partitions {
            let joined =
                member.insert(Group::named(&format!("of {partitions}"), partitions)?.join(&owner).await?);
            while all.len() < usize::try_from(partitions)? {
                all.push(joined.next().await?);
            }
        }
        // What was done until now is counted by then.
        tokio::time::sleep(TTL).await;
        let before = count().await?;
        tokio::time::sleep(time).await;
        let sent = count().await? - before - 1;
        #[expect(clippy::as_conversions, clippy::cast_precision_loss, reason = "a small count")]
        let a_second = sent as f64 / time.as_secs_f64();
        let what = partitions.map_or("no group".to_owned(), |partitions| format!("{partitions} partitions"));
        println!("  {what:<16} {a_second:.1} a second");
        drop((all, member));
        owner.shutdown().await?;
    }
    observer.close().await;
    Ok(())
}
