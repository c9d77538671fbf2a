//! Transactions that are begun safely, run again when Postgres asks for it, and never twice.
//!
//! ```text
//!            ┌──────────────────────── a pause, longer each time ◀───────────────────────┐
//!            ▼                                                                           │ 40001, 40P01 …
//!  BEGIN ── work ── COMMIT ── answered: done                                              │ (rolled back)
//!             │        ├───── refused: rolled back ──────────────────────────────────────┤
//!             │        └───── no answer: Error::OutcomeUnknown, never run again           │
//!             └─ error: rolled back ─────────────────────────────────────────────────────┘
//! ```

use std::error::Error as StdError;
use std::pin::Pin;
use std::time::Duration;

use sqlx::postgres::PgTransaction;
use sqlx::{Connection as _, Executor as _, PgPool};

use crate::error::{self, Error, Result};
use crate::sql;
use crate::wait::Backoff;

/// How often [`transaction`] runs the work before it gives up.
const ATTEMPTS: u32 = 10;

/// Pauses between attempts: the first, doubled each time, up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// One run of the work of [`transaction`]: `Box::pin(async move { … })`.
///
/// Boxed, because the compiler cannot see of an `async` closure that takes a reference that its futures may go to
/// another thread, and `tokio::spawn` would refuse every task that calls [`transaction`].
pub type Work<'tx, T, E> = Pin<Box<dyn Future<Output = Result<T, E>> + Send + 'tx>>;

/// The isolation level of a transaction.
///
/// For a fenced one: at every level a stale holder is rejected. Under [`RepeatableRead`](Self::RepeatableRead) and
/// [`Serializable`](Self::Serializable) it is told by [`Error::SerializationFailure`] if the lease moved on
/// after the transaction's snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Isolation {
    /// The session's default; also for read-only or not. The others are for writing whatever the default is.
    #[default]
    SessionDefault,
    /// `READ COMMITTED`
    ReadCommitted,
    /// `REPEATABLE READ`
    RepeatableRead,
    /// `SERIALIZABLE`
    Serializable,
}

/// Begins a transaction by one message, in which `first` comes before BEGIN (it ends in `; ` or is empty).
///
/// Statements of one message share an implicit transaction, which BEGIN makes the explicit one. So a `first` that
/// fails ends the implicit transaction and leaves the connection clean, where one after BEGIN leaves it in an
/// aborted transaction.
///
/// # Cancel safety
/// Safe: it runs to its end in a task of its own, and a transaction that nobody takes is rolled back.
pub(crate) async fn begin(
    pool: &PgPool,
    isolation: Isolation,
    first: &str,
) -> sqlx::Result<PgTransaction<'static>> {
    let set = match isolation {
        Isolation::SessionDefault => "",
        Isolation::ReadCommitted => "SET TRANSACTION ISOLATION LEVEL READ COMMITTED READ WRITE; ",
        Isolation::RepeatableRead => "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ WRITE; ",
        Isolation::Serializable => "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE READ WRITE; ",
    };
    sql::begin(pool, format!("{set}{first}BEGIN")).await
}

/// Runs the work in a transaction and commits it; runs it again, in a new transaction, after a deadlock (40P01), a
/// serialization failure (40001), or when a prepared `SELECT *` is stale, since a column was added (0A000).
///
/// The work may run several times: what it does outside of the transaction happens each time. Its error rolls
/// back and is returned, unless it is one of these or has one as its [`source`](StdError::source). What it uses of
/// its surroundings it uses by reference.
///
/// # Guarantees
/// - If it returns `Ok`, the work of one run is committed, and nothing of the others. Also when the work hides that
///   a statement failed: Postgres answers a COMMIT of an aborted transaction by a silent rollback, this does not.
/// - If it returns an error other than [`Error::OutcomeUnknown`], nothing is committed, and the transaction is over.
/// - Work whose COMMIT may have happened is never run again.
///
/// # Errors
/// - The work's own.
/// - [`Error::RetriesExhausted`] after 10 runs, with the last one's error as its source. Between them it pauses
///   at random, 2 ms at most at first, then twice as long each time, up to half a second.
/// - [`Error::OutcomeUnknown`]: the connection broke while COMMIT was on its way. Look up whether it happened.
/// - [`Error::PoolExhausted`] if the pool has no connection in time, [`Error::Database`] if it has no working one, or
///   if COMMIT is refused (a deferred constraint, or a statement that failed unheard).
///
/// # Cancel safety
/// The pool gets back a clean connection whenever it is dropped, and the transaction is rolled back; except when
/// it is dropped during COMMIT, which may happen or not.
///
/// # Database
/// Two round trips (BEGIN, COMMIT) and the work's own, on a connection of the pool that is returned between two runs.
/// Works behind a transaction-mode pooler as far as the work does.
///
/// # Examples
/// ```no_run
/// # async fn example(pool: sqlx::PgPool) -> fencepost::Result<()> {
/// use fencepost::{Error, Isolation, transaction};
///
/// let shelf = &String::from("A7");
/// let total = transaction(&pool, Isolation::Serializable, |tx| {
///     Box::pin(async move {
///         let count = "SELECT sum(n)::bigint FROM stock WHERE shelf = $1";
///         let total: i64 = sqlx::query_scalar(count).bind(shelf).fetch_one(&mut **tx).await?;
///         sqlx::query("INSERT INTO report (total) VALUES ($1)").bind(total).execute(&mut **tx).await?;
///         Ok::<_, Error>(total)
///     })
/// })
/// .await?;
/// # Ok(()) }
/// ```
pub async fn transaction<'env, T, E>(
    pool: &PgPool,
    isolation: Isolation,
    mut work: impl for<'tx> FnMut(&'tx mut PgTransaction<'env>) -> Work<'tx, T, E>,
) -> Result<T, E>
where
    E: From<Error> + StdError + Send + Sync + 'static,
{
    let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
    let (mut attempts, mut stale) = (0, 0);
    loop {
        let failure = match once(pool, isolation, &mut work).await {
            Ok(done) => return Ok(done),
            Err(failure) => failure,
        };
        // Each connection of the pool may have such statements, and loses them by one run.
        if error::is_stale_statement(&failure) && stale < pool.size() {
            stale += 1;
            continue;
        }
        attempts += 1;
        if !error::asks_to_run_again(&failure) {
            return Err(failure);
        }
        if attempts == ATTEMPTS {
            return Err(Error::RetriesExhausted { attempts, source: Box::new(failure) }.into());
        }
        tracing::debug!(attempts, error = %failure, "fencepost: a transaction runs again");
        tokio::time::sleep(backoff.pause()).await;
    }
}

async fn once<'env, T, E>(
    pool: &PgPool,
    isolation: Isolation,
    work: &mut impl for<'tx> FnMut(&'tx mut PgTransaction<'env>) -> Work<'tx, T, E>,
) -> Result<T, E>
where
    E: From<Error> + StdError + 'static,
{
    let begun = begin(pool, isolation, "").await;
    let mut tx: PgTransaction<'env> =
        begun.map_err(|source| Error::on_callers_objects("beginning a transaction", source))?;
    match work(&mut tx).await {
        Ok(done) => {
            commit(tx).await?;
            Ok(done)
        }
        Err(failure) => {
            if error::is_stale_statement(&failure) {
                drop(tx.clear_cached_statements().await);
            }
            roll_back(tx).await;
            Err(failure)
        }
    }
}

/// Commits by one message, which fails if the transaction is aborted or already over: to a plain COMMIT Postgres
/// would answer by a rollback, or a warning. The empty transaction that follows gives sqlx one to roll back, since it
/// does not know of this COMMIT; that goes with the connection's way back to its pool.
pub(crate) async fn commit(mut tx: PgTransaction<'_>) -> Result<()> {
    const STEP: &str = "committing a transaction";
    match tx.execute(sqlx::raw_sql("SELECT; COMMIT AND CHAIN")).await {
        Ok(_) => Ok(()),
        Err(source) if error::leaves_outcome_open(&source) => {
            Err(Error::OutcomeUnknown { step: STEP, source })
        }
        Err(source) => {
            roll_back(tx).await;
            Err(Error::on_callers_objects(STEP, source))
        }
    }
}

/// So that it is over when the caller hears of it. Where that fails the connection is broken, and the server ends it.
pub(crate) async fn roll_back(tx: PgTransaction<'_>) {
    if let Err(error) = tx.rollback().await {
        tracing::debug!(%error, "fencepost: a rollback failed");
    }
}
