//! A savepoint of our own in the caller's transaction: what is done after it can be undone, and waits for locks can
//! be bounded until it ends.

use std::time::Duration;

use sqlx::{AssertSqlSafe, Executor as _, PgConnection, Row as _};

use crate::{error, sql};

/// It must be settled, kept or undone. Dropped in between (with the caller's future) it stays open in the transaction,
/// and so does the bound.
#[must_use]
pub(crate) struct Savepoint {
    /// The caller's `lock_timeout`, if there is another one until the end.
    lock_timeout: Option<String>,
}

impl Savepoint {
    /// One message. With a bound, no single wait for a lock takes longer until it ends.
    pub(crate) async fn open(conn: &mut PgConnection, bound: Option<Duration>) -> sqlx::Result<Self> {
        let Some(bound) = bound else {
            conn.execute(sqlx::raw_sql("SAVEPOINT fencepost")).await?;
            return Ok(Self { lock_timeout: None });
        };
        // Read before it is set: rows of the one message arrive in order.
        let text = sql::with_bound(
            "SAVEPOINT fencepost; \
             SELECT pg_catalog.current_setting('lock_timeout') AS before; \
             SET LOCAL lock_timeout = {bound}",
            bound,
        );
        let row = conn.fetch_one(sqlx::raw_sql(AssertSqlSafe(text))).await?;
        Ok(Self { lock_timeout: Some(row.try_get("before")?) })
    }

    /// Keeps what was done, or undoes it if it waited in vain for a lock (`None`). Any other failure aborts the
    /// transaction, as failures do. One message.
    pub(crate) async fn settle<T>(
        self,
        conn: &mut PgConnection,
        done: sqlx::Result<T>,
    ) -> sqlx::Result<Option<T>> {
        match done {
            Ok(done) => self.keep(conn).await.map(|()| Some(done)),
            Err(failure) if error::is_lock_not_available(&failure) => self.undo(conn).await.map(|()| None),
            Err(failure) => Err(failure),
        }
    }

    /// Keeps what was done, and puts the caller's setting back.
    pub(crate) async fn keep(self, conn: &mut PgConnection) -> sqlx::Result<()> {
        let back = self.lock_timeout.map(|before| format!("SET LOCAL lock_timeout = '{before}'; "));
        let text = back.unwrap_or_default() + "RELEASE SAVEPOINT fencepost";
        conn.execute(sqlx::raw_sql(AssertSqlSafe(text))).await?;
        Ok(())
    }

    /// Undoes what was done, the setting and the locks included.
    pub(crate) async fn undo(self, conn: &mut PgConnection) -> sqlx::Result<()> {
        conn.execute(sqlx::raw_sql("ROLLBACK TO SAVEPOINT fencepost; RELEASE SAVEPOINT fencepost")).await?;
        Ok(())
    }
}
