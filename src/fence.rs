//! The fence: the check in the transaction of the write.
//!
//! [`HeldLease::begin`](crate::HeldLease::begin) and [`HeldLease::fence`](crate::HeldLease::fence) are the
//! usual way in. What is here serves the cases beside it: a worker that was handed only the [`Grant`], data
//! whose lock lives in another system, and tables that must never be written without a fence.

use sqlx::postgres::PgTransaction;
use sqlx::{AssertSqlSafe, PgConnection};

use crate::error::{Error, Result};
use crate::name::LockName;
use crate::sql::{self, Arg, Call};
use crate::token::{FencingToken, Grant};

/// Passes the fence of lease `name` in the caller's transaction: for a worker that was handed the name and the
/// [`Grant`] and has no [`HeldLease`](crate::HeldLease).
///
/// # Guarantees
/// Once it returns, nobody else is granted the lease until the transaction ends. Inside a savepoint it holds
/// only if the savepoint is not rolled back.
///
/// # Errors
/// [`Error::StaleFence`] or [`Error::Lost`]: roll back. [`Error::SerializationFailure`] under REPEATABLE READ
/// and SERIALIZABLE.
///
/// # Cancel safety
/// Drop the transaction together with the future.
///
/// # Database
/// One statement, simple protocol. (If it waits for long, sqlx logs slow statements with their text, and this one
/// shows the grant id.) Lowers `idle_in_transaction_session_timeout` to the owner's ttl and
/// `client_connection_check_interval` to one second for the rest of the transaction.
pub async fn check(tx: &mut PgTransaction<'_>, name: &LockName, grant: Grant) -> Result<()> {
    let text = sql::fence(name, grant);
    sql::rows(tx, AssertSqlSafe(text)).await.map_err(|source| Error::database("passing a fence", source))?;
    Ok(())
}

/// The classic storage check: raises the high-water mark of `resource` to `token`, or refuses a token smaller
/// than one seen before. For data in this database whose lock lives elsewhere.
///
/// Weaker than a fence: a stale write passes until the new holder has written once. The mark's row stays
/// locked until the transaction ends, so call it in the transaction of the write.
///
/// # Errors
/// [`Error::StaleFence`] with the token seen before; [`Error::SerializationFailure`] under REPEATABLE READ and
/// SERIALIZABLE.
///
/// # Cancel safety
/// Drop the transaction together with the future.
///
/// # Database
/// One statement.
///
/// # Examples
/// ```no_run
/// # async fn example(pool: sqlx::PgPool, token_of_another_lock: i64) -> fencepost::Result<()> {
/// use fencepost::{FencingToken, LockName, fence};
///
/// let mut tx = pool.begin().await?;
/// fence::advance(&mut tx, &LockName::new("file")?, FencingToken::new(token_of_another_lock)?).await?;
/// sqlx::query("UPDATE file SET content = 'new'").execute(&mut *tx).await?;
/// tx.commit().await?;
/// # Ok(()) }
/// ```
pub async fn advance(tx: &mut PgTransaction<'_>, resource: &LockName, token: FencingToken) -> Result<()> {
    let args = [Arg::Text(resource.as_str().to_owned()), Arg::Number(token.as_i64())];
    run(tx, "raising a high-water mark", Call::new(sql::ADVANCE, args)).await
}

/// Makes the fence of a table impossible to forget: from now on a statement that writes to it fails with
/// [`Error::Unfenced`] unless its transaction has passed the fence of lease `name`.
///
/// `table` is a name as SQL takes it (`accounts`, `public."Accounts"`). A partitioned table's partitions are
/// included; call it again after adding one. Repeating it with another lease replaces the first.
///
/// # Errors
/// [`Error::Database`] with Postgres's report if there is no such table, if it is a partition or a child of
/// another one (protect that one), or if the role does not own it and the schema `fencepost` (an application's
/// role does not).
///
/// # Cancel safety
/// It happens or not; repeating it is harmless.
///
/// # Database
/// One statement; takes `SHARE ROW EXCLUSIVE` on the table for a moment.
///
/// # Examples
/// ```no_run
/// # async fn example(pool: sqlx::PgPool) -> fencepost::Result<()> {
/// use fencepost::{Error, Lease, fence};
///
/// fence::protect(&mut *pool.acquire().await?, "public.ledger", Lease::named("ledger")?.name()).await?;
/// // Your own statements fail with sqlx's error; `Error::from` says what it is.
/// let forgotten = sqlx::query("DELETE FROM ledger").execute(&pool).await.map_err(Error::from);
/// assert!(matches!(forgotten, Err(Error::Unfenced { .. })));
/// # Ok(()) }
/// ```
pub async fn protect(conn: &mut PgConnection, table: &str, name: &LockName) -> Result<()> {
    let args = [Arg::Text(table.to_owned()), Arg::Text(name.as_str().to_owned())];
    run(conn, "protecting a table", Call::new(sql::PROTECT, args)).await
}

/// Takes away what [`protect`] installed.
///
/// # Errors
/// As [`protect`].
///
/// # Cancel safety
/// It happens or not; repeating it is harmless.
///
/// # Database
/// One statement; takes `ACCESS EXCLUSIVE` on the table for a moment.
pub async fn unprotect(conn: &mut PgConnection, table: &str) -> Result<()> {
    run(conn, "unprotecting a table", Call::new(sql::UNPROTECT, [Arg::Text(table.to_owned())])).await
}

async fn run(conn: &mut PgConnection, doing: &'static str, call: Call) -> Result<()> {
    call.written_out_on(conn).await.map_err(|source| Error::on_callers_objects(doing, source))?;
    Ok(())
}
