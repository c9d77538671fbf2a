//! What a run with claims begins with, and what is left of it in the database.

use std::time::Duration;

use sqlx::{PgPool, Row as _};
use tokio::time::{Instant, sleep};

pub(crate) use crate::claim_checker::Claimed;
use crate::claim_checker::{Effect, Row};
use crate::history::now;

/// So many there are at first.
pub(crate) const CLAIMS: u64 = 1_000;

pub(crate) const KIND: &str = "job";

/// Poison is no matter of this suite: they may crash as often as they like.
const TABLES: &str = "\
    CREATE TABLE claim_effect (key text, token bigint, process integer, op bigint); \
    SELECT count(fencepost.claim_enqueue('claim-' || n, 'job', p_max_failures => 1000000, p_max_crashes => 1000000)) \
      FROM generate_series(0, 999) n";

pub(crate) fn key(number: u64) -> String {
    format!("claim-{number}")
}

pub(crate) async fn fill(pool: &PgPool) {
    sqlx::raw_sql(TABLES).execute(pool).await.unwrap();
}

/// How long until all that was due when the last fault had struck is done. How many a second is a matter of the disk,
/// so the patience is with each.
pub(crate) async fn heal(pool: &PgPool, patience: Duration) -> Option<Duration> {
    let began = now();
    let last: String = sqlx::query_scalar("SELECT clock_timestamp()::text").fetch_one(pool).await.unwrap();
    let (mut fewest, mut deadline) = (i64::MAX, Instant::now() + patience);
    while Instant::now() < deadline {
        let left =
            "SELECT count(*) FROM fencepost.claims WHERE state <> 'done' AND due_at <= $1::timestamptz";
        let left: i64 = sqlx::query_scalar(left).bind(&last).fetch_one(pool).await.unwrap();
        if left == 0 {
            return Some(Duration::from_nanos(now() - began));
        }
        if left < fewest {
            (fewest, deadline) = (left, Instant::now() + patience);
        }
        sleep(Duration::from_millis(2)).await;
    }
    None
}

pub(crate) async fn read(pool: &PgPool) -> Claimed {
    let rows = sqlx::query("SELECT key, state, token FROM fencepost.claims").fetch_all(pool).await.unwrap();
    let rows =
        rows.iter().map(|row| Row { key: row.get("key"), state: row.get("state"), token: row.get("token") });
    let effects =
        sqlx::query("SELECT key, token, process, op FROM claim_effect").fetch_all(pool).await.unwrap();
    let effects = effects.iter().map(|row| Effect {
        key: row.get("key"),
        token: row.get("token"),
        process: row.get("process"),
        op: row.get("op"),
    });
    Claimed { rows: rows.collect(), effects: effects.collect() }
}

/// Whether somebody else has begun it since, or nothing keeps anybody from that: it has been ready for long, and others
/// are due before it; or its owner has been dead for long, nobody has locked it, and nobody has looked for the dead
/// since. The server may be out of reach itself.
pub(crate) async fn overtaken(pool: &PgPool, key: &str, token: i64) -> bool {
    let overtaken = "\
        SELECT token > $2 OR (state = 'ready' AND ended_at < clock_timestamp() - interval '1 s') \
            OR EXISTS (SELECT FROM ( \
                SELECT FROM fencepost.claims d WHERE d.key = $1 AND d.state = 'running' AND NOT EXISTS ( \
                    SELECT FROM fencepost.owners o \
                     WHERE o.id = d.owner AND o.expires_at > clock_timestamp() - interval '5 s') \
                FOR UPDATE SKIP LOCKED) free) \
          FROM fencepost.claims WHERE key = $1";
    sqlx::query_scalar(overtaken).bind(key).bind(token).fetch_one(pool).await.unwrap_or(false)
}
