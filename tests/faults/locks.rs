//! What a run with session-level locks locks, and how it is seen that it can be locked again.

use std::time::Duration;

use fencepost::Key;
use sqlx::{AssertSqlSafe, PgPool};
use tokio::time::Instant;

use crate::cell::Cell;
use crate::history::now;

/// What begins the name of a lock.
pub(crate) const LOCK: &str = "lock ";

const SPACE: &str = "faults";

pub(crate) fn key(name: &str) -> Key {
    Key::from_name(SPACE, name).unwrap()
}

/// For how long a lock's session is trusted after an answer, at most: nine tenths of the ttl, which is taken for one
/// second at least and ten at most.
pub(crate) fn trust(cell: &Cell) -> Duration {
    let (_, most) = cell.ttl;
    Duration::from_millis(most).clamp(Duration::from_secs(1), Duration::from_secs(10)) * 9 / 10
}

/// How long until a stranger has had each lock once.
pub(crate) async fn heal(pool: &PgPool, names: &[String], patience: Duration) -> Option<Duration> {
    let (began, deadline) = (now(), Instant::now() + patience);
    for name in names {
        // In the server's line, where whoever comes later does not overtake it. (The names are ours.)
        let left = deadline.saturating_duration_since(Instant::now()).as_millis().max(1);
        let take = format!(
            "SET LOCAL lock_timeout = {left}; \
             SELECT pg_advisory_xact_lock(fencepost.advisory_key('{SPACE}', '{name}'))"
        );
        sqlx::raw_sql(AssertSqlSafe(take)).execute(pool).await.ok()?;
    }
    Some(Duration::from_nanos(now() - began))
}
