//! Bringing the schema into a database, and knowing that the two go together.
//!
//! The migrations live in a schema of their own with a version table of their own
//! (`fencepost._migrations`); nothing of the application's migrations is touched. One transaction applies
//! what is missing: all or nothing, and what serialises two replicas that start at once is a lock of that
//! transaction, so a failure leaves neither a half-made schema nor a lock behind.
//!
//! | the database has | [`migrate`] |
//! |---|---|
//! | nothing of ours | applies all |
//! | an older schema | applies what is missing |
//! | this version | does nothing |
//! | a newer one that serves this library | does nothing: rolling deploys work in both orders |
//! | a newer one that does not | [`Error::SchemaVersion`] |
//! | an older one from the printed form | [`Error::SchemaVersion`]: the application's migrations own it; add [`sql_since`] |

use sqlx::postgres::{PgConnectOptions, PgRow};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, PgPool, Row as _};
use tokio::time::timeout;

use crate::driver::caught;
use crate::error::{Error, Result};
use crate::sql;

/// One numbered migration.
struct Migration {
    version: i32,
    name: &'static str,
    sql: &'static str,
}

macro_rules! migrations {
    ($($version:literal $name:literal),* $(,)?) => {
        &[$(Migration {
            version: $version,
            name: $name,
            sql: include_str!(concat!("../migrations/", $name, ".sql")),
        }),*]
    };
}

const MIGRATIONS: &[Migration] = migrations![
    1 "0001_tokens",
    2 "0002_owners",
    3 "0003_leases",
    4 "0004_waiters",
    5 "0005_fence",
    6 "0006_protect",
    7 "0007_advisory",
    8 "0008_prune",
    9 "0009_claims",
    10 "0010_elections",
    11 "0011_semaphores",
    12 "0012_schedules",
    13 "0013_partitions",
    14 "0014_access",
];

/// The schema version that this library was written for: the number of its last migration.
pub const VERSION: i32 = 14;

/// Makes whoever migrates wait for whoever does already. Arbitrary and fixed: "fence" in ASCII.
const LOCK: &str = "SELECT pg_catalog.pg_advisory_xact_lock(439721161573)";

const BEGIN: &str = "\
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED READ WRITE; \
    SET LOCAL search_path = pg_catalog, pg_temp; \
    SET LOCAL lock_timeout = 0; \
    SET LOCAL statement_timeout = 0; \
    SET LOCAL idle_in_transaction_session_timeout = 0; \
    SET LOCAL synchronous_commit = on; \
    BEGIN";

const VERSION_TABLE: &str = "\
    CREATE SCHEMA IF NOT EXISTS fencepost; \
    CREATE TABLE IF NOT EXISTS fencepost._migrations (\
        version    integer     PRIMARY KEY, \
        name       text        NOT NULL, \
        applied_at timestamptz NOT NULL DEFAULT clock_timestamp())";

/// Applies the migrations that the database does not have yet.
///
/// Any number of processes may do this at once: one migrates, the others wait for it, all succeed. The
/// role needs `CREATE` on the database the first time, and owns the schema from then on; applications may
/// use another role (`SELECT fencepost.allow('app')`).
///
/// # Errors
/// [`Error::Misuse`] for a pool with several hosts in one URL; [`Error::SchemaVersion`] as in the table of [this module](self); [`Error::Database`] with Postgres's
/// report, in which case nothing has changed; [`Error::TimedOut`] if there is no connection within the pool's
/// `acquire_timeout`; [`Error::OutcomeUnknown`] if the answer to COMMIT was lost: call it again.
///
/// # Cancel safety
/// Dropping the future closes its connection; the transaction is rolled back, or had been committed.
///
/// # Database
/// One connection of its own, made from the pool's options and closed at the end; simple protocol and one
/// transaction, so a transaction-mode pooler is no obstacle.
pub async fn migrate(pool: &PgPool) -> Result<()> {
    let fail = |source| Error::database("migrating the schema fencepost", source);
    let patience = pool.options().get_acquire_timeout();
    let options = pool.connect_options();
    check_hosts(&options)?;
    let mut conn = timeout(patience, caught(PgConnection::connect_with(&options)))
        .await
        .map_err(|_elapsed| Error::TimedOut { step: "connecting to migrate", after: patience, source: None })?
        .map_err(fail)?;
    if let Some(found) = installed(&mut conn).await?
        && found.version >= VERSION
    {
        return found.check();
    }
    sql::rows(&mut conn, BEGIN).await.map_err(fail)?;
    sql::rows(&mut conn, LOCK).await.map_err(fail)?;
    let last = match installed(&mut conn).await? {
        Some(found) if found.version >= VERSION => return found.check(),
        Some(found) if !found.ours => return found.check(),
        Some(found) => found.version,
        None => {
            sql::rows(&mut conn, VERSION_TABLE).await.map_err(fail)?;
            0
        }
    };
    for &Migration { version, name, sql: script } in MIGRATIONS.iter().filter(|m| m.version > last) {
        sql::rows(&mut conn, script).await.map_err(fail)?;
        let note = format!("INSERT INTO fencepost._migrations (version, name) VALUES ({version}, '{name}')");
        sql::rows(&mut conn, AssertSqlSafe(note)).await.map_err(fail)?;
        tracing::info!(version, name, "fencepost: migration applied");
    }
    sql::rows(&mut conn, "COMMIT")
        .await
        .map_err(|source| Error::OutcomeUnknown { step: "committing the migration", source })?;
    // Done: a failure to say good-bye changes nothing.
    _ = conn.close().await;
    Ok(())
}

/// The whole schema as one script, for the application's own migrations. Run it in a transaction.
///
/// The library then finds its schema as if [`migrate`] had made it. After an upgrade of the library, add a
/// migration with [`sql_since`] the version before.
#[must_use]
pub fn sql() -> String {
    sql_since(0)
}

/// The migrations after schema version `version`, as one script; empty if there are none.
#[must_use]
pub fn sql_since(version: i32) -> String {
    let mut script = String::new();
    for migration in MIGRATIONS.iter().filter(|m| m.version > version) {
        script.extend(["-- fencepost ", migration.name, "\n", migration.sql, "\n"]);
    }
    script
}

/// What the database says of its schema.
struct Installed {
    version: i32,
    compatible_from: i32,
    /// Made by [`migrate`], not by the printed form.
    ours: bool,
}

impl Installed {
    fn check(&self) -> Result<()> {
        if self.version < VERSION || self.compatible_from > VERSION {
            return Err(Error::SchemaVersion {
                library: VERSION,
                schema: self.version,
                compatible_from: self.compatible_from,
            });
        }
        Ok(())
    }

    fn read(row: &PgRow, ours: bool) -> sqlx::Result<Self> {
        Ok(Self { version: row.try_get("version")?, compatible_from: row.try_get("compatible_from")?, ours })
    }
}

async fn installed(conn: &mut PgConnection) -> Result<Option<Installed>> {
    let fail = |source| Error::database("looking at the schema fencepost", source);
    // Two questions, since the first must not fail inside the migrating transaction. From the catalogs'
    // tables: to_regprocedure answers from a cache that waiting for the advisory lock does not refresh.
    let there = "SELECT EXISTS (SELECT FROM pg_catalog.pg_proc p WHERE p.pronamespace = n.oid AND p.proname = 'version') AS version, \
                 EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.relnamespace = n.oid AND c.relname = '_migrations') AS ours \
                 FROM (SELECT (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = 'fencepost') AS oid) n";
    let row = the_row(conn, there).await.map_err(fail)?;
    let (version, ours) =
        (row.try_get::<bool, _>("version").map_err(fail)?, row.try_get::<bool, _>("ours").map_err(fail)?);
    if !version {
        return Ok(None);
    }
    let row = the_row(conn, sql::VERSION).await.map_err(fail)?;
    Installed::read(&row, ours).map(Some).map_err(fail)
}

/// Whether this library can work with the schema it finds; asked by every owner at its start.
pub(crate) async fn check_version(conn: &mut PgConnection) -> Result<()> {
    let fail = |source| Error::database("looking at the schema fencepost", source);
    let row = the_row(conn, sql::VERSION).await.map_err(fail)?;
    Installed::read(&row, true).map_err(fail)?.check()
}

/// Refuses several hosts in one URL, as libpq takes them: sqlx takes them for one name.
pub(crate) fn check_hosts(options: &PgConnectOptions) -> Result<()> {
    if options.get_host().contains(',') {
        return Err(Error::misuse(
            "the pool's options name several hosts in one, which sqlx takes for one name",
        ));
    }
    Ok(())
}

async fn the_row(conn: &mut PgConnection, ask: &'static str) -> sqlx::Result<PgRow> {
    sql::rows(conn, ask).await?.pop().ok_or(sqlx::Error::RowNotFound)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_that_of_the_last_migration_and_of_its_function() {
        let last = MIGRATIONS.last().unwrap();
        assert_eq!(last.version, VERSION);
        assert!(last.sql.contains(&format!("SELECT {VERSION}, ")));
        for (index, migration) in MIGRATIONS.iter().enumerate() {
            assert_eq!(migration.version, i32::try_from(index).unwrap() + 1);
            assert!(migration.name.starts_with(&format!("{:04}_", migration.version)));
        }
        assert!(sql_since(VERSION).is_empty());
        assert!(sql().contains("CREATE SEQUENCE fencepost.fencing_token"));
    }
}
