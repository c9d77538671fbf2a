//! Locks of a transaction.

use std::time::Duration;

use sqlx::postgres::{PgRow, PgTransaction};
use sqlx::{AssertSqlSafe, PgConnection, PgPool, Row as _};

use super::{AdvisoryLock, STEP};
use crate::error::{Error, Result, is_lock_not_available};
use crate::key::{Mode, Numbers};
use crate::sql::{self, advisory};
use crate::wait::Wait;

/// What is done inside it can be undone without the rest of the caller's transaction.
const SAVEPOINT: &str = "SAVEPOINT fencepost_advisory";
const KEEP: &str = "RELEASE SAVEPOINT fencepost_advisory";
const UNDO: &str = "ROLLBACK TO SAVEPOINT fencepost_advisory; RELEASE SAVEPOINT fencepost_advisory";

/// READ COMMITTED whatever the default is: in a stricter transaction the snapshot would be taken before the wait, and
/// not show what the holder before wrote.
const ISOLATION: &str = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED READ WRITE";

impl AdvisoryLock {
    /// Begins a transaction that holds the lock.
    ///
    /// # Errors
    /// [`Error::Busy`] when the wait is over: nothing was begun. [`Error::LockTableFull`], [`Error::Deadlock`],
    /// [`Error::PoolExhausted`], [`Error::Database`].
    ///
    /// # Cancel safety
    /// Safe: it runs to its end in a task of its own, and a transaction that nobody takes is rolled back; the
    /// pool gets back a clean connection.
    ///
    /// # Database
    /// One message on a connection of the pool: BEGIN and the lock cost one round trip together. The transaction is
    /// READ COMMITTED and read-write, whatever the session's default: a stricter one would not see what the holder
    /// before wrote. Waits by `lock_timeout`, in whole milliseconds, at least one, also for [`Wait::no`]; afterwards the
    /// setting is what it was. `statement_timeout` bounds the wait, too.
    pub async fn begin(&self, pool: &PgPool, wait: Wait) -> Result<PgTransaction<'static>> {
        Self::begin_all(pool, [self.clone()], wait).await
    }

    /// Begins a transaction that holds all of them.
    ///
    /// They are taken in the order of what is locked, whatever the order given, so that callers that do this never
    /// deadlock with each other. Of an exclusive and a shared lock of one key the exclusive one is taken. The wait
    /// bounds the whole.
    ///
    /// # Errors
    /// As [`begin`](Self::begin).
    ///
    /// # Cancel safety
    /// As [`begin`](Self::begin).
    ///
    /// # Database
    /// As [`begin`](Self::begin): one message, however many.
    pub async fn begin_all(
        pool: &PgPool,
        locks: impl IntoIterator<Item = Self>,
        wait: Wait,
    ) -> Result<PgTransaction<'static>> {
        let locks = Sorted::new(locks);
        let message = format!("{ISOLATION}; {}; BEGIN", locks.take(wait));
        sql::begin(pool, message).await.map_err(|error| locks.failed(error, wait))
    }

    /// Takes the lock in the caller's transaction, waiting for it. It is freed when the transaction ends, or when a
    /// savepoint that it was taken in is rolled back.
    ///
    /// # Errors
    /// [`Error::Busy`] when the wait is over, [`Error::LockTableFull`]: in both cases the transaction goes on, with all it
    /// held before. [`Error::Deadlock`], [`Error::Database`]: roll back.
    ///
    /// # Cancel safety
    /// Drop the transaction together with the future.
    ///
    /// # Database
    /// One message in the transaction; one more if it is refused. While it waits the connection is in use, and keeps
    /// a snapshot: `CREATE INDEX CONCURRENTLY` waits for it. Waits by `lock_timeout`, in whole milliseconds, at least
    /// one; afterwards the setting is what it was. `statement_timeout` bounds the wait, too.
    ///
    /// Under REPEATABLE READ and SERIALIZABLE the transaction's snapshot may be older than the lock: what the holder
    /// before wrote is not seen, and changing it is a serialization failure. Take the lock in a READ COMMITTED
    /// transaction ([`begin`](Self::begin)), or be ready to run it again.
    pub async fn lock(&self, tx: &mut PgTransaction<'_>, wait: Wait) -> Result<()> {
        if wait == Wait::no() {
            return if self.try_lock(tx).await? { Ok(()) } else { Err(busy(self.key.to_string(), wait)) };
        }
        Self::lock_all(tx, [self.clone()], wait).await
    }

    /// Takes all of them in the caller's transaction, or none; in the order of what is locked, as
    /// [`begin_all`](Self::begin_all) does.
    ///
    /// # Errors
    /// As [`lock`](Self::lock).
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    ///
    /// # Database
    /// As [`lock`](Self::lock): one message, however many.
    pub async fn lock_all(
        tx: &mut PgTransaction<'_>,
        locks: impl IntoIterator<Item = Self>,
        wait: Wait,
    ) -> Result<()> {
        let locks = Sorted::new(locks);
        let message = format!("{SAVEPOINT}; {}; {KEEP}", locks.take(wait));
        let Err(error) = send(tx, message).await else { return Ok(()) };
        let error = locks.failed(error, wait);
        if matches!(error, Error::Busy { .. } | Error::LockTableFull { .. }) {
            send(tx, UNDO.to_owned()).await.map_err(|source| Error::database(STEP, source))?;
        }
        Err(error)
    }

    /// Takes the lock in the caller's transaction if it is free; `false`: somebody else holds it.
    ///
    /// # Errors
    /// [`Error::LockTableFull`], [`Error::Database`]: roll back.
    ///
    /// # Cancel safety
    /// Drop the transaction together with the future.
    ///
    /// # Database
    /// One statement in the transaction.
    pub async fn try_lock(&self, tx: &mut PgTransaction<'_>) -> Result<bool> {
        let answer = async {
            let rows = send(tx, advisory::try_in_transaction(self.key.numbers(), self.mode)).await?;
            rows.first().ok_or(sqlx::Error::RowNotFound)?.try_get("answer")
        };
        answer.await.map_err(|source| Error::database(STEP, source))
    }
}

/// Several locks, in the order in which they are taken.
struct Sorted(Vec<AdvisoryLock>);

impl Sorted {
    fn new(locks: impl IntoIterator<Item = AdvisoryLock>) -> Self {
        let mut locks: Vec<AdvisoryLock> = locks.into_iter().collect();
        locks.sort_by(|a, b| a.key.cmp(&b.key).then(a.mode.cmp(&b.mode)));
        // The first one of a key is the stronger one.
        locks.dedup_by(|later, earlier| later.key == earlier.key);
        Self(locks)
    }

    /// The statements that take them.
    fn take(&self, wait: Wait) -> String {
        let locks: Vec<(Numbers, Mode)> = self.0.iter().map(|lock| (lock.key.numbers(), lock.mode)).collect();
        advisory::wait_in_transaction(&locks, wait)
    }

    fn failed(&self, error: sqlx::Error, wait: Wait) -> Error {
        if is_lock_not_available(&error) {
            // Which one of them it was the error does not say.
            let names: Vec<String> = self.0.iter().map(|lock| lock.key.to_string()).collect();
            return busy(names.join(", "), wait);
        }
        Error::database(STEP, error)
    }
}

fn busy(name: String, wait: Wait) -> Error {
    Error::Busy { name, label: None, token: None, after: wait.bound().unwrap_or(Duration::ZERO) }
}

/// By the simple protocol: it works in any transaction, and leaves no prepared statement behind a pooler.
async fn send(conn: &mut PgConnection, message: String) -> sqlx::Result<Vec<PgRow>> {
    sql::rows(conn, AssertSqlSafe(message)).await
}
