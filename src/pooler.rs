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

/// Whether the two connections' sessions are lent by the transaction.
///
/// `first` shows its session; `second` opens a transaction, which holds on to its own; if that is the same
/// one, or `first` has another one by now, or none can be had, a pooler moves us about.
pub(crate) async fn in_transaction_mode(
    first: &mut PgConnection,
    second: &mut PgConnection,
) -> sqlx::Result<bool> {
    let before = pid(first, PID).await?;
    let held = pid(second, BEGIN_AND_PID).await?;
    let again = tokio::time::timeout(PATIENCE, pid(first, PID)).await;
    sql::rows(second, ROLLBACK).await?;
    Ok(match again {
        Ok(after) => held == before || after? != before,
        Err(_waited_for_a_session) => true,
    })
}

async fn pid(conn: &mut PgConnection, ask: &'static str) -> sqlx::Result<i32> {
    sql::rows(conn, ask).await?.first().ok_or(sqlx::Error::RowNotFound)?.try_get("pid")
}
