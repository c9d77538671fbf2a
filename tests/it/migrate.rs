//! Bringing the schema in: at once, half-way, in a rolling deploy, in the application's own migrations.

use fencepost::{Error, Owner, migrate};
use sqlx::{AssertSqlSafe, Executor as _, PgPool};

use crate::support::{LONG, database, hold, owner, until_true, within};

/// A database without our schema.
async fn empty() -> (fencepost::testing::TestDatabase, PgPool) {
    let (database, pool) = database().await;
    pool.execute("DROP SCHEMA fencepost CASCADE").await.unwrap();
    (database, pool)
}

async fn pretend(pool: &PgPool, version: i32, compatible_from: i32) {
    let text = format!(
        "CREATE OR REPLACE FUNCTION fencepost.version() RETURNS TABLE (version integer, compatible_from integer) \
         LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS 'SELECT {version}, {compatible_from}'"
    );
    pool.execute(sqlx::raw_sql(AssertSqlSafe(text))).await.unwrap();
}

const NO_LOCK_LEFT: &str = "SELECT NOT EXISTS (SELECT FROM pg_locks l JOIN pg_database d ON d.oid = l.database \
                            WHERE l.locktype = 'advisory' AND d.datname = current_database())";

// C52: 49 of 160 concurrent CREATE TABLE IF NOT EXISTS failed; here one migrates and all succeed.
#[tokio::test(flavor = "multi_thread")]
async fn any_number_of_replicas_may_migrate_at_once() {
    let (_database, pool) = empty().await;
    let replicas: Vec<_> = (0..8)
        .map(|_| {
            let pool = pool.clone();
            tokio::spawn(async move { migrate(&pool).await })
        })
        .collect();
    for replica in replicas {
        within("migrating", replica).await.unwrap().unwrap();
    }
    migrate(&pool).await.unwrap();
    let applied: Vec<i32> = sqlx::query_scalar("SELECT version FROM fencepost._migrations ORDER BY version")
        .fetch_all(&pool)
        .await
        .unwrap();
    assert_eq!(applied, (1..=migrate::VERSION).collect::<Vec<_>>());
    until_true(&pool, "no lock is left", NO_LOCK_LEFT).await;
    hold(&owner(&pool, "a", LONG).await, "report").await.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_migration_leaves_nothing_behind_and_the_next_one_works() {
    let (_database, pool) = empty().await;
    // Something in the way of the third migration.
    pool.execute("CREATE SCHEMA fencepost; CREATE TABLE fencepost.leases (mine int)").await.unwrap();
    let failed = migrate(&pool).await.unwrap_err();
    assert_eq!(failed.sqlstate(), Some("42P07"), "{failed:?}");
    let nothing = "SELECT NOT EXISTS (SELECT FROM pg_class WHERE relnamespace = 'fencepost'::regnamespace AND relname <> 'leases')";
    until_true(&pool, "nothing of it is left", nothing).await;
    until_true(&pool, "no lock is left", NO_LOCK_LEFT).await;
    pool.execute("DROP TABLE fencepost.leases").await.unwrap();
    migrate(&pool).await.unwrap();
    Owner::start(&pool).await.unwrap().shutdown().await.unwrap();
}

// C51: the application's own migrations and their table are not touched.
#[tokio::test(flavor = "multi_thread")]
async fn the_printed_form_serves_the_applications_own_migrations() {
    let (_database, pool) = empty().await;
    pool.execute(
        "CREATE TABLE _sqlx_migrations (version bigint PRIMARY KEY); INSERT INTO _sqlx_migrations VALUES (1)",
    )
    .await
    .unwrap();
    let mut tx = pool.begin().await.unwrap();
    tx.execute(sqlx::raw_sql(AssertSqlSafe(migrate::sql()))).await.unwrap();
    tx.commit().await.unwrap();
    let a = owner(&pool, "a", LONG).await;
    hold(&a, "report").await.release().await.unwrap();
    // Nothing to do, and nothing done.
    migrate(&pool).await.unwrap();
    until_true(&pool, "no table of ours", "SELECT to_regclass('fencepost._migrations') IS NULL").await;
    let untouched: i64 = sqlx::query_scalar("SELECT sum(version)::bigint FROM _sqlx_migrations")
        .fetch_one(&pool)
        .await
        .unwrap();
    assert_eq!(untouched, 1);
    // After an upgrade of the library the application's migrations lag behind: they must do it.
    pretend(&pool, migrate::VERSION - 1, 1).await;
    let behind = migrate(&pool).await.unwrap_err();
    let Error::SchemaVersion { library, schema, .. } = behind else { panic!("{behind:?}") };
    assert_eq!((library, schema), (migrate::VERSION, migrate::VERSION - 1));
    assert!(migrate::sql_since(migrate::VERSION - 1).contains("fencepost.version()"));
}

// Rolling deploys: a newer schema that serves this library, and one that does not.
#[tokio::test(flavor = "multi_thread")]
async fn a_newer_schema_serves_an_older_library_or_says_so() {
    let (_database, pool) = database().await;
    let before = owner(&pool, "before", LONG).await;
    pretend(&pool, migrate::VERSION + 2, migrate::VERSION).await;
    migrate(&pool).await.unwrap();
    let after = owner(&pool, "after", LONG).await;
    hold(&before, "report").await.release().await.unwrap();
    hold(&after, "report").await.release().await.unwrap();
    pretend(&pool, migrate::VERSION + 2, migrate::VERSION + 1).await;
    for refused in [migrate(&pool).await.unwrap_err(), Owner::start(&pool).await.unwrap_err()] {
        let text = refused.to_string();
        let Error::SchemaVersion { library, schema, compatible_from, .. } = refused else {
            panic!("{refused:?}")
        };
        assert_eq!(
            (library, schema, compatible_from),
            (migrate::VERSION, migrate::VERSION + 2, migrate::VERSION + 1)
        );
        assert!(
            text.contains(&schema.to_string())
                && text.contains(&library.to_string())
                && text.contains("upgrade the library")
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_older_schema_is_refused_until_it_is_migrated() {
    let (_database, pool) = database().await;
    pretend(&pool, migrate::VERSION - 1, 1).await;
    let refused = Owner::start(&pool).await.unwrap_err();
    assert!(refused.to_string().contains("migrate"), "{refused}");
    assert!(matches!(refused, Error::SchemaVersion { .. }));
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_schema_the_error_says_what_to_run() {
    let (_database, pool) = empty().await;
    let missing = Owner::start(&pool).await.unwrap_err();
    assert!(matches!(missing, Error::SchemaMissing { .. }), "{missing:?}");
    assert!(missing.to_string().contains("fencepost::migrate"), "{missing}");
}
