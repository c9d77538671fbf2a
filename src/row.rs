//! Row locks on the caller's own tables: `SELECT … FOR UPDATE` with an answer instead of an error.
//!
//! The row is the lock. It is taken in the caller's transaction and lasts until that ends, so what was read of
//! the row stays true until the write. It needs nothing of the schema `fencepost`.
//!
//! | wait | [`lock`](RowLock::lock) of a row that is locked | [`lock_many`](RowLock::lock_many), one of them locked |
//! |---|---|---|
//! | [`block`](RowLock::block) | waits | waits |
//! | [`no_wait`](RowLock::no_wait) | [`Locked::Busy`] at once | locks none, says which are busy |
//! | [`skip_locked`](RowLock::skip_locked) | [`Locked::Busy`] at once | locks the others, says which are busy |
//! | [`at_most`](RowLock::at_most) | [`Locked::Busy`] when the time is over | locks none when the time is over |
//!
//! After each of these answers the transaction goes on. After an error it is aborted: roll back.
//!
//! Not for work that takes longer than a transaction should: that wants a [`Lease`](crate::Lease). Not for
//! counting: `UPDATE … SET n = n + 1` locks by itself. And where a unique constraint says what must not happen
//! twice, it needs no lock at all.
//!
//! # Which lock waits for which
//! From the [manual](https://www.postgresql.org/docs/current/explicit-locking.html#LOCKING-ROWS); a plain SELECT
//! never waits for any, a write of the row does:
//!
//! | | key share | share | no key update | update |
//! |---|---|---|---|---|
//! | [`KeyShare`](Strength::KeyShare) | | | | waits |
//! | [`Share`](Strength::Share) | | | waits | waits |
//! | [`NoKeyUpdate`](Strength::NoKeyUpdate), as an UPDATE | | waits | waits | waits |
//! | [`Update`](Strength::Update), as a DELETE | waits | waits | waits | waits |

use std::fmt;
use std::time::Duration;

use sqlx::postgres::{PgHasArrayType, PgRow, PgTransaction};
use sqlx::{Encode, FromRow, PgConnection, Postgres, Row as _, Type};

use crate::error::{Error, Result};
use crate::identifier::{Identifier, Table};
use crate::savepoint::Savepoint;
use crate::sql;
use crate::statement::{Statement, Values};

/// How to lock rows of a table: a definition, cheap to clone, without a connection.
///
/// Takes a [`Transaction`](sqlx::Transaction), since a lock in autocommit is gone when the answer arrives.
///
/// # Guarantees
/// - Names are quoted, never text of a statement; keys are bound. A name is spelled exactly as in the database, upper
///   and lower case included (`CREATE TABLE Accounts` makes `accounts`).
/// - [`lock_many`](Self::lock_many) locks in the order of the keys, whatever order they are given in, so two of
///   them never deadlock (as long as they use the same key column of a table, and keys are not changed).
///
/// # Errors
/// [`Error::Deadlock`], if the transaction also locks in another way, or locks twice;
/// [`Error::SerializationFailure`] under REPEATABLE READ and SERIALIZABLE, if a row was changed since the
/// transaction's snapshot. And once for each connection, when a column of the table was added or changed (0A000:
/// a prepared statement is stale), an [`Error::Database`] that [is retryable](Error::is_retryable).
/// [`transaction`](crate::transaction()) runs the work again after all three.
///
/// # Database
/// Prepared statements on the transaction's connection, which collide behind a transaction-mode pooler that does not know of
/// them: see [`transaction_pooler`](Self::transaction_pooler).
///
/// # Examples
/// ```no_run
/// # async fn example(pool: sqlx::PgPool) -> fencepost::Result<()> {
/// use fencepost::row::{Locked, RowLock};
/// use fencepost::{Isolation, transaction};
///
/// let accounts = &RowLock::on("accounts")?.key("id")?;
/// let taken = transaction(&pool, Isolation::SessionDefault, |tx| {
///     Box::pin(async move {
///         // A row is read as a tuple, or as a type of yours with `#[derive(sqlx::FromRow)]`.
///         let balance = match accounts.lock::<(i64, i64), _>(tx, 7_i64).await? {
///             Locked::Found((_id, balance)) => balance,
///             Locked::NotFound | Locked::Busy => return Ok(false),
///         };
///         if balance < 100 {
///             return Ok(false);
///         }
///         sqlx::query("UPDATE accounts SET balance = balance - 100 WHERE id = 7").execute(&mut **tx).await?;
///         Ok::<_, fencepost::Error>(true)
///     })
/// })
/// .await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct RowLock {
    table: Table,
    key: Identifier,
    strength: Strength,
    waits: Waits,
    pooled: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waits {
    Block,
    NoWait,
    SkipLocked,
    AtMost(Duration),
}

/// How strong a lock is: what it shuts out is in the [table](crate::row#which-lock-waits-for-which).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Strength {
    /// `FOR UPDATE`: alone with the row, foreign keys that point at it wait, too.
    #[default]
    Update,
    /// `FOR NO KEY UPDATE`: alone with the row; others may insert rows that point at it.
    NoKeyUpdate,
    /// `FOR SHARE`: nobody changes the row. Two that hold it and then both write deadlock.
    Share,
    /// `FOR KEY SHARE`: nobody deletes it or changes its key.
    KeyShare,
}

impl Strength {
    fn clause(self) -> &'static str {
        match self {
            Self::Update => "FOR UPDATE",
            Self::NoKeyUpdate => "FOR NO KEY UPDATE",
            Self::Share => "FOR SHARE",
            Self::KeyShare => "FOR KEY SHARE",
        }
    }
}

/// The answer of [`RowLock::lock`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "there is no fourth answer, and a match should say all three")]
pub enum Locked<R> {
    /// Locked until the transaction ends, as it is now.
    Found(R),
    /// There is no such row.
    NotFound,
    /// Somebody else has it, and the wait was not for longer.
    Busy,
}

impl<R> Locked<R> {
    /// The row, if it is locked.
    #[must_use]
    pub fn found(self) -> Option<R> {
        match self {
            Self::Found(row) => Some(row),
            Self::NotFound | Self::Busy => None,
        }
    }
}

/// The answer of [`RowLock::lock_many`]: each key is in one of the three, once.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockedMany<R, K> {
    /// Locked until the transaction ends, in the order in which their keys were given.
    pub rows: Vec<R>,
    /// There is no row with this key.
    pub not_found: Vec<K>,
    /// Not locked. Under [`no_wait`](RowLock::no_wait) and [`skip_locked`](RowLock::skip_locked) those that somebody
    /// else has; after the time of [`at_most`](RowLock::at_most) all keys as given, since Postgres does not say which
    /// it waited for.
    pub busy: Vec<K>,
}

impl<R, K> LockedMany<R, K> {
    /// Whether all were found and locked.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.not_found.is_empty() && self.busy.is_empty()
    }
}

impl RowLock {
    /// The longest bound of [`at_most`](Self::at_most).
    pub const MAX_AT_MOST: Duration = Duration::from_hours(24);

    /// Rows of this table, by its column `id`, for update, waiting as long as it takes.
    ///
    /// `table` or `schema.table`; without a schema it is looked up in the session's `search_path`.
    ///
    /// # Errors
    /// [`Error::Misuse`] if a part of the name is empty, longer than 63 bytes or has a NUL character, or if there is more than
    /// one dot.
    pub fn on(table: &str) -> Result<Self> {
        Ok(Self {
            table: Table::new(table)?,
            key: Identifier::new("id")?,
            strength: Strength::Update,
            waits: Waits::Block,
            pooled: false,
        })
    }

    /// The column that tells rows apart: the primary key, or another one that is unique.
    ///
    /// # Errors
    /// [`Error::Misuse`] as for [`on`](Self::on).
    pub fn key(mut self, column: &str) -> Result<Self> {
        self.key = Identifier::new(column)?;
        Ok(self)
    }

    /// How strong the lock is; [`Strength::Update`] unless told otherwise.
    #[must_use]
    pub fn strength(mut self, strength: Strength) -> Self {
        self.strength = strength;
        self
    }

    /// Waits as long as it takes (or the session's `lock_timeout` allows, which then is an error).
    #[must_use]
    pub fn block(mut self) -> Self {
        self.waits = Waits::Block;
        self
    }

    /// Does not wait for a row; of several it locks all or none.
    ///
    /// It still waits for a lock on the whole *table* (ALTER TABLE, TRUNCATE), as NOWAIT does.
    #[must_use]
    pub fn no_wait(mut self) -> Self {
        self.waits = Waits::NoWait;
        self
    }

    /// Does not wait for a row; of several it locks those that are free.
    ///
    /// It still waits for a lock on the whole *table* (ALTER TABLE, TRUNCATE), as SKIP LOCKED does.
    #[must_use]
    pub fn skip_locked(mut self) -> Self {
        self.waits = Waits::SkipLocked;
        self
    }

    /// Waits at most this long, for a lock on the table, too; of several rows it locks all or none. Zero is
    /// [`no_wait`](Self::no_wait). Postgres counts whole milliseconds: what is less becomes one.
    ///
    /// It bounds the waiting for others, not the time to find the rows, and takes the place of the session's
    /// `lock_timeout` meanwhile. Postgres bounds each wait for *one* other
    /// transaction (`lock_timeout`): a row that several share, or that others queue for, may be waited for that
    /// long for each of them. From row to row of [`lock_many`](Self::lock_many) it is the time that remains.
    ///
    /// # Errors
    /// [`Error::Misuse`] if it is longer than [`MAX_AT_MOST`](Self::MAX_AT_MOST).
    pub fn at_most(mut self, most: Duration) -> Result<Self> {
        if most > Self::MAX_AT_MOST {
            let max = Self::MAX_AT_MOST;
            return Err(Error::misuse(format!("a row is waited for at most {max:?}, this is {most:?}")));
        }
        self.waits = if most.is_zero() { Waits::NoWait } else { Waits::AtMost(most) };
        Ok(self)
    }

    /// Behind a transaction-mode pooler that keeps no prepared statements (PgBouncer before 1.21) sessions are shared, and
    /// so would be the statements' names: with `true` they have none, for one round trip more each time.
    #[must_use]
    pub fn transaction_pooler(mut self, pooled: bool) -> Self {
        self.pooled = pooled;
        self
    }

    /// Locks the row with this key until the transaction ends (or the savepoint in which it is locked is rolled back),
    /// and reads it as it is then.
    ///
    /// # Errors
    /// As for [`RowLock`]. [`Error::Misuse`] if several rows have the key.
    ///
    /// # Cancel safety
    /// Drop the transaction together with the future.
    ///
    /// # Database
    /// One statement; one more to tell "busy" from "not found". [`at_most`](Self::at_most) is three round trips: a
    /// savepoint, so that running out of time does not abort the transaction, the statement, and its end.
    pub async fn lock<R, K>(&self, tx: &mut PgTransaction<'_>, key: K) -> Result<Locked<R>>
    where
        R: for<'r> FromRow<'r, PgRow>,
        K: for<'q> Encode<'q, Postgres> + Type<Postgres>,
    {
        let Self { table, key: column, .. } = self;
        let skip = self.skips();
        let text = format!("SELECT t.* FROM {table} AS t WHERE t.{column} = $1 {}", self.clause(skip));
        let statement = self.statement(text, Values::of(&key)?);
        let Some(rows) = self.within_its_time(tx, statement).await? else { return Ok(Locked::Busy) };
        if rows.len() > 1 {
            return Err(not_unique(column));
        }
        if let Some(row) = rows.first() {
            return Ok(Locked::Found(read(row)?));
        }
        if !skip {
            return Ok(Locked::NotFound);
        }
        let text = format!("SELECT FROM {table} AS t WHERE t.{column} = $1 LIMIT 1");
        let there = self.statement(text, Values::of(&key)?).rows(tx).await.map_err(failed)?;
        Ok(if there.is_empty() { Locked::NotFound } else { Locked::Busy })
    }

    /// Locks the rows with these keys. Keys given twice count once.
    ///
    /// They are locked one after the other in the order of the key column, so that two calls never wait for each other
    /// in a circle. (Postgres locks rows in the order in which a plan finds them, unless the ORDER BY stands in the same
    /// SELECT as the lock.)
    ///
    /// # Errors
    /// As for [`RowLock`]. [`Error::Misuse`] if several rows have the same key.
    ///
    /// # Cancel safety
    /// Drop the transaction together with the future.
    ///
    /// # Database
    /// One statement, whatever their number. [`no_wait`](Self::no_wait) and [`at_most`](Self::at_most) are three round trips:
    /// a savepoint, the statement, and its end.
    pub async fn lock_many<R, K>(&self, tx: &mut PgTransaction<'_>, keys: &[K]) -> Result<LockedMany<R, K>>
    where
        R: for<'r> FromRow<'r, PgRow>,
        K: for<'q> Encode<'q, Postgres> + Type<Postgres> + PgHasArrayType + Clone,
    {
        let mut values = Values::of(keys)?;
        if let Waits::AtMost(most) = self.waits {
            values.add(sql::micros(most))?;
        }
        let statement = self.statement(self.many(), values);
        let all_or_none = match self.waits {
            Waits::NoWait => Some(Savepoint::open(tx, None).await.map_err(failed)?),
            // The bound has a savepoint of its own.
            Waits::Block | Waits::SkipLocked | Waits::AtMost(_) => None,
        };
        let mut answer = LockedMany { rows: Vec::new(), not_found: Vec::new(), busy: Vec::new() };
        let Some(rows) = self.within_its_time(tx, statement).await? else {
            answer.busy = keys.to_vec();
            return Ok(answer);
        };
        let mut before = None;
        for row in &rows {
            let position: i64 = row.try_get("fencepost_wanted").map_err(failed)?;
            if before.replace(position) == Some(position) {
                return Err(not_unique(&self.key));
            }
            let key = usize::try_from(position - 1).ok().and_then(|at| keys.get(at));
            let key = key.ok_or(sqlx::Error::RowNotFound).map_err(failed)?;
            if row.try_get("fencepost_is_locked").map_err(failed)? {
                answer.rows.push(read(row)?);
            } else if row.try_get("fencepost_is_busy").map_err(failed)? {
                answer.busy.push(key.clone());
            } else {
                answer.not_found.push(key.clone());
            }
        }
        match all_or_none {
            Some(savepoint) if answer.busy.is_empty() => savepoint.keep(tx).await.map_err(failed)?,
            Some(savepoint) => {
                savepoint.undo(tx).await.map_err(failed)?;
                answer.rows.clear();
            }
            None => {}
        }
        Ok(answer)
    }

    /// The next rows that nobody else has locked, of a queue in a table of yours: locks and reads at most `limit` of
    /// them, those that come first. Delete or update them in the same transaction; if that does not commit, they are
    /// there for the next one.
    ///
    /// The lock's strength is this definition's; it never waits for a row.
    ///
    /// # Errors
    /// As for [`RowLock`]. [`Error::Misuse`] if `limit` is zero or a value of the filter cannot be encoded.
    ///
    /// # Cancel safety
    /// Drop the transaction together with the future.
    ///
    /// # Database
    /// One statement. It locks the rows that it returns and no others. Without an index that serves filter and order it
    /// reads the whole table each time.
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example(pool: sqlx::PgPool) -> fencepost::Result<()> {
    /// use fencepost::row::{Filter, Order, RowLock};
    ///
    /// let jobs = RowLock::on("jobs")?;
    /// let order = [Order::descending("priority")?, Order::ascending("id")?];
    /// let mut tx = pool.begin().await?;
    /// let filter = Filter::sql("queue = $1 AND run_at <= now()").bind("mail");
    /// for (id, text) in jobs.claim_next::<(i64, String)>(&mut tx, 10, &order, filter).await? {
    ///     println!("{text}");
    ///     sqlx::query("DELETE FROM jobs WHERE id = $1").bind(id).execute(&mut *tx).await?;
    /// }
    /// tx.commit().await?;
    /// # Ok(()) }
    /// ```
    pub async fn claim_next<R>(
        &self,
        tx: &mut PgTransaction<'_>,
        limit: u32,
        order: &[Order],
        filter: Filter,
    ) -> Result<Vec<R>>
    where
        R: for<'r> FromRow<'r, PgRow>,
    {
        if limit == 0 {
            return Err(Error::misuse("the next rows are at least one"));
        }
        let Filter { text: condition, values } = filter;
        let table = &self.table;
        let order: Vec<String> =
            order.iter().map(|Order { column, direction }| format!("t.{column} {direction}")).collect();
        let order = if order.is_empty() { String::new() } else { format!("ORDER BY {}", order.join(", ")) };
        let lock = self.clause(true);
        // A comment at the condition's end ends with its line.
        let text = format!("SELECT t.* FROM {table} AS t WHERE ({condition}\n) {order} LIMIT {limit} {lock}");
        let rows = self.statement(text, values?).rows(tx).await.map_err(failed)?;
        rows.iter().map(read).collect()
    }

    fn statement(&self, text: String, values: Values) -> Statement {
        Statement { text, values, named: !self.pooled }
    }

    /// NOWAIT would be an error that aborts the transaction.
    fn skips(&self) -> bool {
        matches!(self.waits, Waits::NoWait | Waits::SkipLocked)
    }

    fn clause(&self, skip: bool) -> String {
        format!("{} OF t{}", self.strength.clause(), if skip { " SKIP LOCKED" } else { "" })
    }

    /// One row of the answer for each key, in the order given: the key's position, what became of it, and the row.
    ///
    /// ORDER BY stands beside the lock, so the rows are locked in that order. With a bound the remaining time is set
    /// for each row before it is locked: a volatile function is evaluated after the sort, row by row.
    fn many(&self) -> String {
        let Self { table, key, .. } = self;
        let skip = self.skips();
        let lock = self.clause(skip);
        let remaining = if matches!(self.waits, Waits::AtMost(_)) {
            ", pg_catalog.set_config('lock_timeout', greatest(1, least(2147483647, \
             $2::bigint / 1000 - (pg_catalog.date_part('epoch', pg_catalog.clock_timestamp() - pg_catalog.statement_timestamp()) * 1000)::bigint \
             ))::text, true) AS fencepost_bound"
        } else {
            ""
        };
        // What is there and was not locked is locked by somebody else, if locked rows were skipped.
        let busy = if skip {
            format!("EXISTS (SELECT FROM {table} AS t WHERE t.{key} = w.key)")
        } else {
            "false".into()
        };
        // A table of the caller's may have any name: hence the prefix.
        format!(
            "WITH fencepost_wanted AS MATERIALIZED (\
                 SELECT u.key, pg_catalog.min(u.n) AS n FROM pg_catalog.unnest($1) WITH ORDINALITY AS u (key, n) GROUP BY u.key), \
             fencepost_locked AS MATERIALIZED (\
                 SELECT t.*, w.n AS fencepost_position{remaining} \
                 FROM fencepost_wanted AS w JOIN {table} AS t ON t.{key} = w.key ORDER BY t.{key} {lock}) \
             SELECT l.*, w.n AS fencepost_wanted, l.fencepost_position IS NOT NULL AS fencepost_is_locked, {busy} AS fencepost_is_busy \
             FROM fencepost_wanted AS w LEFT JOIN fencepost_locked AS l ON l.fencepost_position = w.n ORDER BY w.n"
        )
    }

    /// The rows; none if they were not to be had in the time of `at_most`.
    async fn within_its_time(
        &self,
        tx: &mut PgConnection,
        statement: Statement,
    ) -> Result<Option<Vec<PgRow>>> {
        let Waits::AtMost(most) = self.waits else {
            return statement.rows(tx).await.map(Some).map_err(failed);
        };
        let savepoint = Savepoint::open(tx, Some(most)).await.map_err(failed)?;
        let done = statement.rows(tx).await;
        savepoint.settle(tx, done).await.map_err(failed)
    }
}

/// One column of the order in which [`RowLock::claim_next`] takes rows.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Order {
    column: Identifier,
    direction: &'static str,
}

impl Order {
    /// The smallest first; NULL comes last.
    ///
    /// # Errors
    /// [`Error::Misuse`] as for [`RowLock::on`].
    pub fn ascending(column: &str) -> Result<Self> {
        Ok(Self { column: Identifier::new(column)?, direction: "ASC" })
    }

    /// The largest first; NULL comes before all.
    ///
    /// # Errors
    /// [`Error::Misuse`] as for [`RowLock::on`].
    pub fn descending(column: &str) -> Result<Self> {
        Ok(Self { column: Identifier::new(column)?, direction: "DESC" })
    }
}

/// Which rows [`RowLock::claim_next`] may take.
///
/// The condition is text of the program, so nothing from outside can become a part of it; values are bound. It is
/// evaluated for rows that are not returned, too: no function with an effect belongs into it (least of all one that takes
/// an advisory lock).
pub struct Filter {
    text: &'static str,
    values: Result<Values>,
}

impl Filter {
    /// Any row.
    #[must_use]
    pub fn all() -> Self {
        Self::sql("true")
    }

    /// Those for which this condition is true: what could stand after WHERE, with `$1`, `$2` … for the values.
    #[must_use]
    pub fn sql(condition: &'static str) -> Self {
        Self { text: condition, values: Ok(Values::default()) }
    }

    /// The value of the next parameter.
    #[must_use]
    pub fn bind<'q>(mut self, value: impl Encode<'q, Postgres> + Type<Postgres>) -> Self {
        self.values = self.values.and_then(|mut values| values.add(value).map(|_| values));
        self
    }
}

impl fmt::Debug for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Filter").field("text", &self.text).finish_non_exhaustive()
    }
}

fn read<R: for<'r> FromRow<'r, PgRow>>(row: &PgRow) -> Result<R> {
    R::from_row(row).map_err(|source| Error::on_callers_objects("reading a locked row", source))
}

fn failed(source: sqlx::Error) -> Error {
    Error::on_callers_objects("locking rows", source)
}

fn not_unique(column: &Identifier) -> Error {
    Error::misuse(format!(
        "the key of a row lock is a column that tells rows apart; {column} is the same in several"
    ))
}
