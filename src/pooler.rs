//! Finding out whether a transaction-mode pooler sits between us and the server.
//!
//! Behind one (`PgBouncer` with `pool_mode = transaction`) two transactions of one connection may run in two
//! server sessions, and one session serves many clients. Prepared statements collide there, session settings
//! leak, session-level locks are stranded, LISTEN delivers nothing. So an owner asks before it relies on any.

use std::time::Duration;

use sqlx::{PgConnection, Row as _};

use crate::sql;

const PID: &str = "SELECT pg_catalog.pg_backend_pid() AS pid";
/// Keeps the session busy, so that a pooler cannot lend it to the other connection meanwhile.
const BEGIN_AND_PID: &str = "BEGIN; SELECT pg_catalog.pg_backend_pid() AS pid";
const ROLLBACK: &str = "ROLLBACK";

/// How long the second look at the first connection may take. A direct session answers at once; a pooler
/// with one session lends it to the open transaction and lets us wait.
const PATIENCE: Duration = Duration::from_secs(1);

/// How often both are looked at. Sessions are lent last in, first out as a rule, so on a quiet pooler the first look
/// shows it. On a busy one a look is fooled if others take and return a session at just that moment, in one case
/// of two at the worst; each further look halves that.
const LOOKS: usize = 10;

/// Whether the two connections' sessions are lent by the transaction.
///
/// `first` shows its session; `second` opens a transaction, which holds on to its own; if that is the same
/// one, or `first` has another one by now, or none can be had, a pooler moves us about. One that lends its sessions
/// in turn shows another one to whoever asks twice.
pub(crate) async fn in_transaction_mode(
    first: &mut PgConnection,
    second: &mut PgConnection,
) -> sqlx::Result<bool> {
    let session = pid(first, PID).await?;
    for _ in 0..LOOKS {
        if pid(first, PID).await? != session {
            return Ok(true);
        }
        let held = pid(second, BEGIN_AND_PID).await?;
        let again = tokio::time::timeout(PATIENCE, pid(first, PID)).await;
        sql::rows(second, ROLLBACK).await?;
        let Ok(again) = again else { return Ok(true) };
        if held == session || again? != session {
            return Ok(true);
        }
    }
    Ok(false)
}

async fn pid(conn: &mut PgConnection, ask: &'static str) -> sqlx::Result<i32> {
    sql::rows(conn, ask).await?.first().ok_or(sqlx::Error::RowNotFound)?.try_get("pid")
}
