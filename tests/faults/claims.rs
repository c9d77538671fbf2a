//! What a run with claims begins with, and what is left of it in the database.

use std::time::Duration;

use sqlx::{PgPool, Row as _};
use tokio::time::{sleep, timeout};

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

/// How long until all that was due when the last fault had struck is done.
pub(crate) async fn heal(pool: &PgPool, patience: Duration) -> Option<Duration> {
    let began = now();
    let last: String = sqlx::query_scalar("SELECT clock_timestamp()::text").fetch_one(pool).await.unwrap();
    let all = async {
        loop {
            let left =
                "SELECT count(*) FROM fencepost.claims WHERE state <> 'done' AND due_at <= $1::timestamptz";
            if sqlx::query_scalar::<_, i64>(left).bind(&last).fetch_one(pool).await.unwrap() == 0 {
                return;
            }
            sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(patience, all).await.ok().map(|()| Duration::from_nanos(now() - began))
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

/// Whether somebody else has begun it since, or it has been ready for long: others may be due before it. The server
/// may be out of reach itself.
pub(crate) async fn overtaken(pool: &PgPool, key: &str, token: i64) -> bool {
    let overtaken = "SELECT token > $2 OR (state = 'ready' AND ended_at < clock_timestamp() - interval '1 s') \
                     FROM fencepost.claims WHERE key = $1";
    sqlx::query_scalar(overtaken).bind(key).bind(token).fetch_one(pool).await.unwrap_or(false)
}
