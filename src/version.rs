//! Optimistic versions: nobody locks, and a row is changed only by who has read it as it is.
//!
//! Each row has a number that each change raises. Who has read version 7 changes the row `WHERE version = 7`, so of
//! two who have read the same one is told that the other was faster. Nothing is held in between: the one who reads
//! may be a person with a form on a screen, or a client of an HTTP interface ([`IfMatch`]). It needs nothing of the
//! schema `fencepost`, and a `bigint NOT NULL` in the table ([`Versioned::add_column`] writes the migration).
//!
//! ```text
//!  load ──▶ (value, version) ── decide ──▶ update … WHERE version = ─┬─▶ Updated: the version is larger by one
//!    ▲                                                               ├─▶ Conflict: somebody was faster ──┐
//!    │                                                               └─▶ Gone: there is no such row      │
//!    └───────────────────────────────────────── decide anew ◀───────────────────────────────────────────┘
//! ```
//!
//! | it finds | answer |
//! |---|---|
//! | the version asked for | [`Update::Updated`] |
//! | another version | [`Update::Conflict`] with that one |
//! | no row | [`Update::Gone`] |
//! | under REPEATABLE READ and SERIALIZABLE: changed or deleted since the transaction's snapshot | [`Error::Conflict`], the transaction is aborted |
//! | the version asked for, and the row is not changed all the same (a trigger, row security) | [`Error::Suppressed`] |
//! | NULL for a version, or a trigger that takes the increment back | [`Error::NotVersioned`] |
//! | a rule on the table | Postgres refuses the statement (0A000), an [`Error::Database`] |
//!
//! Every statement that changes the row has to raise the version, the ones of your own, too:
//! `SET version = version + 1`. What became of those says [`CheckVersion`].
//!
//! Not for a row that many want to change at once: all but one are refused each time. There a
//! [row lock](crate::row) makes them wait for each other, and `SET n = n + 1` needs neither.

mod changes;
mod etag;

use std::collections::HashSet;
use std::hash::Hash;
use std::time::Duration;

use sqlx::postgres::{PgHasArrayType, PgQueryResult, PgRow};
use sqlx::{Connection as _, Encode, FromRow, PgConnection, PgPool, Postgres, Row as _, Type};

use crate::error::{self, Error, Result};
use crate::identifier::{Identifier, Table};
use crate::retry::{self, Isolation};
use crate::statement::{Statement, Values};
use crate::token::Version;
use crate::wait::Backoff;

pub use changes::Changes;
pub use etag::IfMatch;

/// How often [`Versioned::update_with`] tries before it gives up.
const ATTEMPTS: u32 = 20;

/// Pauses between its attempts: the first, doubled each time, up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

const READING: &str = "reading a row and its version";
const UPDATING: &str = "updating a row by its version";
const DELETING: &str = "deleting a row by its version";

/// A table whose rows have versions: a definition, cheap to clone, without a connection.
///
/// # Guarantees
/// - The version is compared and raised by Postgres, in the statement that changes the row. So versions of a row behave
///   as a compare-and-set register: of those who have read the same version, one changes the row.
/// - Names are quoted, never text of a statement; values are bound. A name is spelled exactly as in the database.
/// - A new row begins with a version that no row before it has had, if [`add_column`](Self::add_column) made the column.
///
/// # Errors
/// As in the [table](crate::version). [`Error::Misuse`] if several rows have the key: it has to be unique. What the
/// statement did to them stays in your transaction, if there is one: roll back. [`Error::Misuse`], too, without a
/// transaction behind a [pooler](Self::transaction_pooler).
///
/// # Examples
/// ```no_run
/// # async fn example(pool: sqlx::PgPool) -> fencepost::Result<()> {
/// use fencepost::version::{Changes, Update, Versioned};
///
/// let accounts = Versioned::on("accounts")?;
/// let mut conn = pool.acquire().await?;
/// // A row is read as a tuple, or as a type of yours with `#[derive(sqlx::FromRow)]`.
/// if let Some(read) = accounts.load::<(i64, i64), _>(&mut conn, 7_i64).await? {
///     let (_id, balance) = read.value;
///     let changes = Changes::new().set("balance", balance + 10);
///     match accounts.update(&mut conn, 7_i64, read.version, changes).await? {
///         Update::Updated(version) => println!("it has version {version} now"),
///         Update::Conflict { current } => println!("somebody was faster: version {current}"),
///         Update::Gone => println!("there is no such account any more"),
///     }
/// }
/// // Or, to decide anew as often as somebody was faster:
/// accounts
///     .update_with(&pool, 7_i64, |read| {
///         let (_id, balance): (i64, i64) = read.value;
///         Ok::<_, fencepost::Error>(Changes::new().set("balance", balance + 10))
///     })
///     .await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Versioned {
    table: Table,
    key: Identifier,
    version: Identifier,
    pooled: bool,
}

/// What [`Versioned::load`] has read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Current<R> {
    /// The row.
    pub value: R,
    /// Its version, for the update.
    pub version: Version,
}

/// The answer of [`Versioned::update`]. After each of them the transaction goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a conflict is an answer, not an error"]
#[expect(clippy::exhaustive_enums, reason = "there is no fourth answer, and a match should say all three")]
pub enum Update {
    /// Changed. This is its version now.
    Updated(Version),
    /// Not changed: it has another version.
    Conflict {
        /// That version.
        current: Version,
    },
    /// Not changed: there is no such row.
    Gone,
}

impl Update {
    /// The new version, or the error to leave a function with.
    ///
    /// # Errors
    /// [`Error::Conflict`] and [`Error::Gone`].
    pub fn into_result(self) -> Result<Version> {
        match self {
            Self::Updated(version) => Ok(version),
            Self::Conflict { current } => Err(Error::Conflict { current: Some(current), source: None }),
            Self::Gone => Err(Error::Gone),
        }
    }
}

/// The answer of [`Versioned::delete`]. After each of them the transaction goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a conflict is an answer, not an error"]
#[expect(clippy::exhaustive_enums, reason = "there is no fourth answer, and a match should say all three")]
pub enum Delete {
    /// Deleted.
    Deleted,
    /// Not deleted: it has another version.
    Conflict {
        /// That version.
        current: Version,
    },
    /// There is no such row.
    Gone,
}

impl Delete {
    /// Nothing, or the error to leave a function with.
    ///
    /// # Errors
    /// [`Error::Conflict`] and [`Error::Gone`].
    pub fn into_result(self) -> Result<()> {
        match self {
            Self::Deleted => Ok(()),
            Self::Conflict { current } => Err(Error::Conflict { current: Some(current), source: None }),
            Self::Gone => Err(Error::Gone),
        }
    }
}

/// The answer of [`Versioned::update_many`]: each key is in one of the three, in the order given.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "some rows may have lost"]
#[non_exhaustive]
pub struct UpdatedMany<K> {
    /// Changed, with the versions that they have now.
    pub updated: Vec<(K, Version)>,
    /// Not changed, with the other versions that they have.
    pub conflicts: Vec<(K, Version)>,
    /// Not changed: there is no such row, or row security shows it to nobody who updates.
    pub gone: Vec<K>,
}

impl<K> UpdatedMany<K> {
    /// Whether all were updated.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.conflicts.is_empty() && self.gone.is_empty()
    }
}

impl Versioned {
    /// Rows of this table, by its column `id`, with versions in its column `version`.
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
            version: Identifier::new("version")?,
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

    /// The column of the version, a `bigint NOT NULL`.
    ///
    /// # Errors
    /// [`Error::Misuse`] as for [`on`](Self::on).
    pub fn version(mut self, column: &str) -> Result<Self> {
        self.version = Identifier::new(column)?;
        Ok(self)
    }

    /// Behind a transaction-mode pooler that keeps no prepared statements (PgBouncer before 1.21) sessions are shared, and
    /// so would be the statements' names: with `true` they have none, for one round trip more each time.
    ///
    /// Only in a transaction are they on one session, from their preparation to their end. So everything that takes
    /// a connection needs one that is in a transaction of sqlx's (`begin`), and is an [`Error::Misuse`] without, before
    /// anything is sent. [`update_with`](Self::update_with) begins its own.
    #[must_use]
    pub fn transaction_pooler(mut self, pooled: bool) -> Self {
        self.pooled = pooled;
        self
    }

    /// The statement that gives the table its column of versions, for a migration of yours.
    ///
    /// It locks the table for a moment and rewrites nothing, however large it is. Rows that are there begin with one.
    /// Rows that come later begin with the microseconds since 1970: so a row that takes the place of a deleted one,
    /// under the same key, never has a version that somebody has read of the old one (who would overwrite it). That
    /// holds as long as the database's clock is not set back by more than the time in between.
    ///
    /// # Examples
    /// ```
    /// let sql = fencepost::version::Versioned::on("accounts")?.add_column();
    /// assert!(sql.starts_with(r#"ALTER TABLE "accounts" ADD COLUMN "version" bigint NOT NULL DEFAULT 1"#));
    /// # Ok::<_, fencepost::Error>(())
    /// ```
    #[must_use]
    pub fn add_column(&self) -> String {
        let Self { table, version, .. } = self;
        // Two steps in one statement would be one default, and one that is not constant rewrites the table.
        format!(
            "ALTER TABLE {table} ADD COLUMN {version} bigint NOT NULL DEFAULT 1; \
             ALTER TABLE {table} ALTER COLUMN {version} \
             SET DEFAULT (pg_catalog.date_part('epoch', pg_catalog.clock_timestamp()) * 1000000)::bigint;"
        )
    }

    /// Reads a row and its version; `None` if there is no such row.
    ///
    /// # Errors
    /// As for [`Versioned`].
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    ///
    /// # Database
    /// One statement, without a lock.
    pub async fn load<R, K>(&self, conn: &mut PgConnection, id: K) -> Result<Option<Current<R>>>
    where
        R: for<'r> FromRow<'r, PgRow>,
        K: for<'q> Encode<'q, Postgres> + Type<Postgres>,
    {
        let Self { table, key, version, .. } = self;
        let text = format!(
            "SELECT t.*, t.{version}::bigint AS fencepost_version FROM {table} AS t WHERE t.{key} = $1"
        );
        let failed = |source| Error::on_callers_objects(READING, source);
        let rows = self.statement(conn, text, Values::of(&id)?)?.rows(conn).await.map_err(failed)?;
        let Some(row) = self.only(&rows)? else { return Ok(None) };
        let version = self.not_null(row.try_get("fencepost_version").map_err(failed)?)?;
        Ok(Some(Current { value: R::from_row(row).map_err(failed)?, version }))
    }

    /// Changes the row, if it still has this version, and raises that by one.
    ///
    /// # Errors
    /// As for [`Versioned`]. [`Error::Misuse`] if the changes cannot be: see [`Changes`].
    ///
    /// # Cancel safety
    /// In a transaction: drop that together with the future. Without one it may have happened, as if its answer were
    /// lost: then `load` again.
    ///
    /// # Database
    /// One statement. One more to tell what has happened, if the row was changed or deleted while the statement waited
    /// for it, or was not changed though it has the version.
    pub async fn update<K>(
        &self,
        conn: &mut PgConnection,
        id: K,
        version: Version,
        changes: Changes,
    ) -> Result<Update>
    where
        K: for<'q> Encode<'q, Postgres> + Type<Postgres>,
    {
        let (set, values) = changes.of_one(&self.key, &self.version)?;
        let Self { table, version: column, .. } = self;
        let change = format!("UPDATE {table} AS t SET {set}{column} = t.{column} + 1");
        Ok(match self.change(conn, UPDATING, &change, values, &id, version).await? {
            Changed::Done(new) if new > version => Update::Updated(new),
            Changed::Done(_) => return Err(self.not_versioned("a trigger takes the increment back")),
            Changed::Conflict(current) => Update::Conflict { current },
            Changed::Gone => Update::Gone,
        })
    }

    /// Deletes the row, if it still has this version.
    ///
    /// # Errors
    /// As for [`Versioned`].
    ///
    /// # Cancel safety
    /// As for [`update`](Self::update).
    ///
    /// # Database
    /// As for [`update`](Self::update).
    pub async fn delete<K>(&self, conn: &mut PgConnection, id: K, version: Version) -> Result<Delete>
    where
        K: for<'q> Encode<'q, Postgres> + Type<Postgres>,
    {
        let change = format!("DELETE FROM {} AS t", self.table);
        Ok(match self.change(conn, DELETING, &change, Values::default(), &id, version).await? {
            Changed::Done(_) => Delete::Deleted,
            Changed::Conflict(current) => Delete::Conflict { current },
            Changed::Gone => Delete::Gone,
        })
    }

    /// Changes those of the rows that still have the version given with them, and says which have not.
    ///
    /// [`Changes::set`] gives all rows the same value, [`Changes::set_each`] each row its own. All rows that are there
    /// are locked in the order of their keys until the transaction ends, those that lose, too; so two calls never wait
    /// for each other in a circle. For all or nothing, roll back if the answer is not
    /// [complete](UpdatedMany::is_complete).
    ///
    /// # Errors
    /// As for [`Versioned`]. [`Error::Misuse`] if a key is given twice, or if the changes cannot be.
    ///
    /// # Cancel safety
    /// As for [`update`](Self::update).
    ///
    /// # Database
    /// One statement, whatever their number.
    pub async fn update_many<K>(
        &self,
        conn: &mut PgConnection,
        rows: &[(K, Version)],
        changes: Changes,
    ) -> Result<UpdatedMany<K>>
    where
        K: for<'q> Encode<'q, Postgres> + Type<Postgres> + PgHasArrayType + Clone + Eq + Hash,
    {
        let (keys, versions): (Vec<K>, Vec<Version>) = rows.iter().cloned().unzip();
        if keys.iter().collect::<HashSet<_>>().len() < keys.len() {
            return Err(Error::misuse("of several rows each key is given once"));
        }
        let many = changes.of_many(&self.key, &self.version, keys.len())?;
        let mut values = many.values;
        let (key_at, version_at) = (values.add(keys)?, values.add(versions)?);
        let Self { table, key, version, .. } = self;
        let (set, columns, arrays) = (many.set, many.columns, many.arrays);
        // Locked in the order of the keys, and as they are then; what is locked stays so. The key and the number are read
        // from the row that is updated, so that a partition can be left.
        let text = format!(
            "WITH fencepost_wanted AS MATERIALIZED (\
                 SELECT u.* FROM ROWS FROM (pg_catalog.unnest(${key_at}), pg_catalog.unnest(${version_at}){arrays}) \
                 WITH ORDINALITY AS u (fencepost_key, fencepost_version{columns}, fencepost_n)), \
             fencepost_locked AS MATERIALIZED (\
                 SELECT w.fencepost_n AS n, t.{version}::bigint AS version \
                 FROM fencepost_wanted AS w JOIN {table} AS t ON t.{key} = w.fencepost_key \
                 ORDER BY t.{key} FOR NO KEY UPDATE OF t), \
             fencepost_updated AS (\
                 UPDATE {table} AS t SET {set}{version} = t.{version} + 1 \
                 FROM fencepost_wanted AS w JOIN fencepost_locked AS l ON l.n = w.fencepost_n \
                 WHERE t.{key} = w.fencepost_key AND t.{version} = w.fencepost_version \
                     AND l.version = w.fencepost_version \
                 RETURNING w.fencepost_n AS n, t.{version}::bigint AS version) \
             SELECT w.fencepost_n AS n, u.version AS updated, l.n IS NOT NULL AS is_there, l.version AS found \
             FROM fencepost_wanted AS w LEFT JOIN fencepost_updated AS u ON u.n = w.fencepost_n \
             LEFT JOIN fencepost_locked AS l ON l.n = w.fencepost_n ORDER BY w.fencepost_n"
        );
        let answers = self
            .statement(conn, text, values)?
            .rows(conn)
            .await
            .map_err(|source| failed(UPDATING, source))?;
        let failed = |source| Error::on_callers_objects(UPDATING, source);
        let mut many = UpdatedMany { updated: Vec::new(), conflicts: Vec::new(), gone: Vec::new() };
        let mut before = 0;
        for row in &answers {
            let n: i64 = row.try_get("n").map_err(failed)?;
            let at = usize::try_from(n - 1).ok().and_then(|at| rows.get(at));
            let (key, version) = at.ok_or(sqlx::Error::RowNotFound).map_err(failed)?;
            if n == before {
                return Err(self.not_unique());
            }
            before = n;
            if let Some(new) = row.try_get::<Option<Version>, _>("updated").map_err(failed)? {
                if new <= *version {
                    return Err(self.not_versioned("a trigger takes the increment back"));
                }
                many.updated.push((key.clone(), new));
            } else if row.try_get("is_there").map_err(failed)? {
                let current = self.not_null(row.try_get("found").map_err(failed)?)?;
                if current == *version {
                    return Err(self.suppressed());
                }
                many.conflicts.push((key.clone(), current));
            } else {
                many.gone.push(key.clone());
            }
        }
        Ok(many)
    }

    /// Reads the row, lets the closure decide, and updates it; reads it again and lets it decide anew as often as
    /// somebody else was faster. The new version, or `None` if there is no such row (any more).
    ///
    /// # Errors
    /// - The closure's own, at once.
    /// - [`Error::RetriesExhausted`] after 20 attempts, with the last conflict as its source. Between them it pauses at
    ///   random, 2 ms at most at first, then twice as long each time, up to half a second.
    /// - [`Error::OutcomeUnknown`]: the connection broke while the update, or its COMMIT behind a pooler, was on its way,
    ///   which is never tried again. Look up whether it happened.
    /// - As for [`Versioned`]; [`Error::PoolExhausted`] if the pool has no connection in time. Behind a pooler, whatever
    ///   refuses the COMMIT: a deferred constraint, say.
    ///
    /// # Cancel safety
    /// As for [`update`](Self::update) without a transaction; behind a pooler as with one. Between attempts it holds nothing.
    ///
    /// # Database
    /// Two statements an attempt, each a transaction of its own, on a connection that is returned before each pause. Behind
    /// a [pooler](Self::transaction_pooler) both in one, so BEGIN and COMMIT are sent, too.
    pub async fn update_with<R, K, E>(
        &self,
        pool: &PgPool,
        id: K,
        mut decide: impl FnMut(Current<R>) -> Result<Changes, E>,
    ) -> Result<Option<Version>, E>
    where
        R: for<'r> FromRow<'r, PgRow>,
        K: for<'q> Encode<'q, Postgres> + Type<Postgres>,
        E: From<Error>,
    {
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        let mut attempts = 0;
        loop {
            let answer = if self.pooled {
                self.attempt_in_a_transaction(pool, &id, &mut decide).await?
            } else {
                self.attempt_in_autocommit(pool, &id, &mut decide).await?
            };
            let conflict = match answer {
                Ok(Update::Updated(new)) => return Ok(Some(new)),
                Ok(Update::Gone) => return Ok(None),
                Ok(Update::Conflict { current }) => Error::Conflict { current: Some(current), source: None },
                Err(failure @ (Error::Conflict { .. } | Error::SerializationFailure { .. })) => failure,
                Err(failure) => return Err(failure.into()),
            };
            attempts += 1;
            if attempts == ATTEMPTS {
                return Err(Error::RetriesExhausted { attempts, source: Box::new(conflict) }.into());
            }
            tracing::debug!(attempts, %conflict, "fencepost: an update decides anew");
            tokio::time::sleep(backoff.pause()).await;
        }
    }

    async fn attempt_in_autocommit<R, K, E>(
        &self,
        pool: &PgPool,
        id: &K,
        decide: &mut impl FnMut(Current<R>) -> Result<Changes, E>,
    ) -> Result<Result<Update>, E>
    where
        R: for<'r> FromRow<'r, PgRow>,
        K: for<'q> Encode<'q, Postgres> + Type<Postgres>,
        E: From<Error>,
    {
        let mut conn = pool.acquire().await.map_err(|source| Error::on_callers_objects(READING, source))?;
        Ok(match self.attempt(&mut conn, id, decide).await? {
            Err(Error::Database { doing: UPDATING, source }) if error::leaves_outcome_open(&source) => {
                Err(Error::OutcomeUnknown { step: UPDATING, source })
            }
            answer => answer,
        })
    }

    async fn attempt_in_a_transaction<R, K, E>(
        &self,
        pool: &PgPool,
        id: &K,
        decide: &mut impl FnMut(Current<R>) -> Result<Changes, E>,
    ) -> Result<Result<Update>, E>
    where
        R: for<'r> FromRow<'r, PgRow>,
        K: for<'q> Encode<'q, Postgres> + Type<Postgres>,
        E: From<Error>,
    {
        let begun = retry::begin(pool, Isolation::SessionDefault, "").await;
        let mut tx = begun.map_err(|source| Error::on_callers_objects(READING, source))?;
        let answer = self.attempt(&mut tx, id, decide).await;
        if let Ok(Ok(updated @ Update::Updated(_))) = answer {
            return Ok(retry::commit(tx).await.map(|()| updated));
        }
        retry::roll_back(tx).await;
        answer
    }

    /// The inner result is that of the update; what goes wrong before it goes no further.
    async fn attempt<R, K, E>(
        &self,
        conn: &mut PgConnection,
        id: &K,
        decide: &mut impl FnMut(Current<R>) -> Result<Changes, E>,
    ) -> Result<Result<Update>, E>
    where
        R: for<'r> FromRow<'r, PgRow>,
        K: for<'q> Encode<'q, Postgres> + Type<Postgres>,
        E: From<Error>,
    {
        let Some(read) = self.load(conn, id).await? else { return Ok(Ok(Update::Gone)) };
        let version = read.version;
        let changes = decide(read)?;
        Ok(self.update(conn, id, version, changes).await)
    }

    /// Sends the change of one row, and finds out what became of it. `change` is all before WHERE.
    async fn change<K>(
        &self,
        conn: &mut PgConnection,
        doing: &'static str,
        change: &str,
        mut values: Values,
        id: &K,
        version: Version,
    ) -> Result<Changed>
    where
        K: for<'q> Encode<'q, Postgres> + Type<Postgres>,
    {
        let (key_at, version_at) = (values.add(id)?, values.add(version)?);
        let Self { table, key, version: column, .. } = self;
        // Both parts see the row as it was before. The second is evaluated only if the first has changed none.
        let text = format!(
            "WITH fencepost_changed AS (\
                 {change} WHERE t.{key} = ${key_at} AND t.{column} = ${version_at} \
                 RETURNING t.{column}::bigint AS version) \
             SELECT true AS is_changed, version FROM fencepost_changed \
             UNION ALL SELECT false, t.{column}::bigint FROM {table} AS t \
             WHERE t.{key} = ${key_at} AND NOT EXISTS (SELECT FROM fencepost_changed)"
        );
        let rows =
            self.statement(conn, text, values)?.rows(conn).await.map_err(|source| failed(doing, source))?;
        let Some(row) = self.only(&rows)? else { return Ok(Changed::Gone) };
        let failed = |source| Error::on_callers_objects(doing, source);
        let found = self.not_null(row.try_get("version").map_err(failed)?)?;
        if row.try_get("is_changed").map_err(failed)? {
            return Ok(Changed::Done(found));
        }
        if found != version {
            return Ok(Changed::Conflict(found));
        }
        // It had the version when the statement began.
        self.look(conn, id, version).await
    }

    /// Why the row that had this version was not changed.
    async fn look<K>(&self, conn: &mut PgConnection, id: &K, version: Version) -> Result<Changed>
    where
        K: for<'q> Encode<'q, Postgres> + Type<Postgres>,
    {
        let Self { table, key, version: column, .. } = self;
        let text = format!("SELECT t.{column}::bigint AS version FROM {table} AS t WHERE t.{key} = $1");
        let failed = |source| Error::on_callers_objects(READING, source);
        let rows = self.statement(conn, text, Values::of(id)?)?.rows(conn).await.map_err(failed)?;
        let Some(row) = self.only(&rows)? else { return Ok(Changed::Gone) };
        let found = self.not_null(row.try_get("version").map_err(failed)?)?;
        if found == version { Err(self.suppressed()) } else { Ok(Changed::Conflict(found)) }
    }

    fn statement(&self, conn: &PgConnection, text: String, values: Values) -> Result<Statement> {
        // It is prepared by one message and executed by another one: between the two, a pooler may lend the session to
        // somebody whose nameless statement would be executed in place of ours.
        if self.pooled && !conn.is_in_transaction() {
            return Err(Error::misuse(
                "behind a transaction-mode pooler a versioned row is read and changed in a transaction (of sqlx: `begin`)",
            ));
        }
        Ok(Statement { text, values, named: !self.pooled })
    }

    fn only<'r>(&self, rows: &'r [PgRow]) -> Result<Option<&'r PgRow>> {
        if rows.len() > 1 { Err(self.not_unique()) } else { Ok(rows.first()) }
    }

    fn not_null(&self, version: Option<Version>) -> Result<Version> {
        version.ok_or_else(|| {
            self.not_versioned("a row has NULL for a version; the column is to be bigint NOT NULL")
        })
    }

    fn not_unique(&self) -> Error {
        let key = &self.key;
        Error::misuse(format!(
            "the key of a version is a column that tells rows apart; {key} is the same in several"
        ))
    }

    fn not_versioned(&self, what: &'static str) -> Error {
        Error::NotVersioned { table: self.table.to_string(), what }
    }

    fn suppressed(&self) -> Error {
        Error::Suppressed { table: self.table.to_string() }
    }
}

enum Changed {
    Done(Version),
    Conflict(Version),
    Gone,
}

fn failed(doing: &'static str, source: sqlx::Error) -> Error {
    if error::is_row_conflict(&source) {
        return Error::Conflict { current: None, source: Some(source) };
    }
    Error::on_callers_objects(doing, source)
}

/// For statements of your own: what it means that a row was changed, or none.
///
/// The statement has to say `SET version = version + 1` and `WHERE … AND version = …`.
///
/// # Examples
/// ```no_run
/// # async fn example(pool: sqlx::PgPool, version: fencepost::Version) -> fencepost::Result<()> {
/// use fencepost::version::{CheckVersion, Versioned};
///
/// let accounts = Versioned::on("accounts")?;
/// let mut conn = pool.acquire().await?;
/// let new = sqlx::query(
///     "UPDATE accounts SET balance = balance * 2, version = version + 1 WHERE id = $1 AND version = $2",
/// )
/// .bind(7_i64)
/// .bind(version)
/// .execute(&mut *conn)
/// .await
/// .check_version(&accounts, &mut conn, 7_i64, version)
/// .await?
/// .into_result()?; // a conflict and a row that is gone are errors here
/// # Ok(()) }
/// ```
pub trait CheckVersion {
    /// The answer that [`Versioned::update`] would have given.
    ///
    /// # Errors
    /// As for [`Versioned`]; [`Error::Suppressed`], too, if the row has this version and another condition of the
    /// statement was not true; [`Error::Misuse`] if it changed several rows.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    ///
    /// # Database
    /// Nothing if one row was changed, else one statement.
    fn check_version<K>(
        self,
        table: &Versioned,
        conn: &mut PgConnection,
        id: K,
        version: Version,
    ) -> impl Future<Output = Result<Update>> + Send
    where
        K: for<'q> Encode<'q, Postgres> + Type<Postgres> + Send + Sync;
}

impl CheckVersion for sqlx::Result<PgQueryResult> {
    async fn check_version<K>(
        self,
        table: &Versioned,
        conn: &mut PgConnection,
        id: K,
        version: Version,
    ) -> Result<Update>
    where
        K: for<'q> Encode<'q, Postgres> + Type<Postgres> + Send + Sync,
    {
        match self.map_err(|source| failed(UPDATING, source))?.rows_affected() {
            0 => Ok(match table.look(conn, &id, version).await? {
                Changed::Done(new) => Update::Updated(new),
                Changed::Conflict(current) => Update::Conflict { current },
                Changed::Gone => Update::Gone,
            }),
            1 => Ok(Update::Updated(Version::new(version.as_i64().saturating_add(1)))),
            _ => Err(table.not_unique()),
        }
    }
}

impl CheckVersion for PgQueryResult {
    async fn check_version<K>(
        self,
        table: &Versioned,
        conn: &mut PgConnection,
        id: K,
        version: Version,
    ) -> Result<Update>
    where
        K: for<'q> Encode<'q, Postgres> + Type<Postgres> + Send + Sync,
    {
        Ok::<_, sqlx::Error>(self).check_version(table, conn, id, version).await
    }
}
