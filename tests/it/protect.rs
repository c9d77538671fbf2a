//! A fence that cannot be forgotten.

use fencepost::{Error, LockName, fence};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgPool};

use crate::support::{LONG, TOUGH, connect, database, hold, lease, owner, until, until_true, within};

async fn write(pool: &PgPool, statement: &str) -> Result<(), Error> {
    sqlx::raw_sql(AssertSqlSafe(statement.to_owned())).execute(pool).await?;
    Ok(())
}

const WRITES: [&str; 6] = [
    "INSERT INTO ledger VALUES (1, 1)",
    "UPDATE ledger SET amount = 2",
    "UPDATE ledger SET amount = 2 WHERE false",
    "DELETE FROM ledger",
    "TRUNCATE ledger",
    "MERGE INTO ledger l USING (VALUES (1)) v (id) ON l.id = v.id WHEN NOT MATCHED THEN INSERT VALUES (1, 1)",
];

#[tokio::test(flavor = "multi_thread")]
async fn every_kind_of_write_needs_the_fence_of_this_lease() {
    let (_database, pool) = database().await;
    let a = owner(&pool, "a", LONG).await;
    let (held, other) = (hold(&a, "ledger's lease").await, hold(&a, "other").await);
    write(
        &pool,
        "CREATE TABLE \"Led ger\" (id int, amount int); CREATE TABLE ledger (id int PRIMARY KEY, amount int)",
    )
    .await
    .unwrap();
    let mut conn = pool.acquire().await.unwrap();
    fence::protect(&mut conn, "ledger", held.name()).await.unwrap();
    fence::protect(&mut conn, "public.\"Led ger\"", held.name()).await.unwrap();
    let version: i32 = sqlx::query_scalar("SELECT current_setting('server_version_num')::int")
        .fetch_one(&pool)
        .await
        .unwrap();
    let writes = || WRITES.into_iter().filter(|text| version >= 150_000 || !text.starts_with("MERGE"));
    for statement in writes() {
        let refused = write(&pool, statement).await.unwrap_err();
        let Error::Unfenced { table, name, .. } = &refused else { panic!("{statement}: {refused:?}") };
        assert_eq!((table.as_str(), name.as_str()), ("public.ledger", "ledger's lease"));
        assert_eq!(refused.sqlstate(), Some("LK006"));
        // The fence of another lease does not count.
        let mut tx = other.begin(&pool).await.unwrap();
        let refused = sqlx::raw_sql(AssertSqlSafe(statement)).execute(&mut *tx).await.map_err(Error::from);
        assert!(matches!(refused, Err(Error::Unfenced { .. })), "{statement}");
        tx.rollback().await.unwrap();
        // Its own does, also beside the other.
        let mut tx = other.begin(&pool).await.unwrap();
        held.fence(&mut tx).await.unwrap();
        sqlx::raw_sql(AssertSqlSafe(statement)).execute(&mut *tx).await.unwrap();
        tx.rollback().await.unwrap();
    }
    assert!(write(&pool, "INSERT INTO \"Led ger\" VALUES (1)").await.is_err());
    write(&pool, "SELECT FROM ledger").await.unwrap();
    fence::unprotect(&mut conn, "ledger").await.unwrap();
    for statement in writes() {
        write(&pool, statement).await.unwrap();
    }
    let missing = fence::protect(&mut conn, "no_such_table", held.name()).await.unwrap_err();
    assert!(matches!(missing, Error::Database { .. }) && missing.sqlstate() == Some("42P01"), "{missing:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn partitions_are_protected_by_every_way_in() {
    let (_database, pool) = database().await;
    let held = hold(&owner(&pool, "a", LONG).await, "parted").await;
    write(
        &pool,
        "CREATE TABLE parted (id int, amount int) PARTITION BY RANGE (id); \
         CREATE TABLE low PARTITION OF parted FOR VALUES FROM (0) TO (10) PARTITION BY RANGE (id); \
         CREATE TABLE lowest PARTITION OF low FOR VALUES FROM (0) TO (5)",
    )
    .await
    .unwrap();
    let mut conn = pool.acquire().await.unwrap();
    fence::protect(&mut conn, "parted", held.name()).await.unwrap();
    for table in ["parted", "low", "lowest"] {
        let statement = format!("INSERT INTO {table} VALUES (1, 1)");
        assert!(matches!(write(&pool, &statement).await, Err(Error::Unfenced { .. })), "{table}");
        let mut tx = held.begin(&pool).await.unwrap();
        sqlx::raw_sql(AssertSqlSafe(statement)).execute(&mut *tx).await.unwrap();
        tx.commit().await.unwrap();
    }
    // A partition added later, and protected by asking again.
    write(&pool, "CREATE TABLE middle PARTITION OF low FOR VALUES FROM (5) TO (10)").await.unwrap();
    fence::protect(&mut conn, "parted", held.name()).await.unwrap();
    assert!(matches!(write(&pool, "INSERT INTO middle VALUES (7, 1)").await, Err(Error::Unfenced { .. })));
    fence::unprotect(&mut conn, "parted").await.unwrap();
    write(&pool, "INSERT INTO middle VALUES (7, 1)").await.unwrap();
}

// A trigger of a part is not fired by a statement that names the whole, so a part cannot be protected alone; and
// the children of a table that is inherited from are protected with it.
#[tokio::test(flavor = "multi_thread")]
async fn a_part_is_protected_with_its_whole() {
    let (_database, pool) = database().await;
    let held = hold(&owner(&pool, "a", LONG).await, "family").await;
    write(
        &pool,
        "CREATE TABLE whole (id int) PARTITION BY RANGE (id); CREATE TABLE part PARTITION OF whole DEFAULT; \
         CREATE TABLE parent (id int); CREATE TABLE child () INHERITS (parent); CREATE TABLE grandchild () INHERITS (child)",
    )
    .await
    .unwrap();
    let mut conn = pool.acquire().await.unwrap();
    for part in ["part", "child", "grandchild"] {
        let refused = fence::protect(&mut conn, part, held.name()).await.unwrap_err();
        assert_eq!(refused.sqlstate(), Some("LK005"), "{refused:?}");
    }
    fence::protect(&mut conn, "parent", held.name()).await.unwrap();
    for table in ["parent", "child", "grandchild"] {
        let statement = format!("INSERT INTO {table} VALUES (1)");
        assert!(matches!(write(&pool, &statement).await, Err(Error::Unfenced { .. })), "{table}");
    }
}

// The credential is a setting that anybody can write: it is compared with the lease.
#[tokio::test(flavor = "multi_thread")]
async fn a_forged_credential_does_not_pass() {
    let (database, pool) = database().await;
    let held = hold(&owner(&pool, "a", LONG).await, "ledger").await;
    write(&pool, "CREATE TABLE ledger (id int)").await.unwrap();
    fence::protect(&mut pool.acquire().await.unwrap(), "ledger", held.name()).await.unwrap();
    let mut conn = connect(&database.options()).await;
    let token = held.token();
    let nil = sqlx::types::Uuid::nil();
    for forged in [format!("{nil}/{token};"), format!("/{token};"), ";".into(), "%".into()] {
        sqlx::query("SELECT set_config('fencepost.passed', $1, false)")
            .bind(&forged)
            .execute(&mut conn)
            .await
            .unwrap();
        let refused =
            sqlx::query("INSERT INTO ledger VALUES (1)").execute(&mut conn).await.map_err(Error::from);
        assert!(matches!(refused, Err(Error::Unfenced { .. })), "{forged}");
    }
    // The pair of an earlier grant does not pass either.
    let old = held.grant();
    assert!(held.release().await.unwrap());
    let _next = hold(&owner(&pool, "b", LONG).await, "ledger").await;
    sqlx::query("SELECT set_config('fencepost.passed', $1, false)")
        .bind(format!("{}/{};", old.id, old.token))
        .execute(&mut conn)
        .await
        .unwrap();
    let refused = sqlx::query("INSERT INTO ledger VALUES (1)").execute(&mut conn).await.map_err(Error::from);
    assert!(matches!(refused, Err(Error::Unfenced { .. })));
}

// B4: a REPEATABLE READ transaction longer than the ttl goes on writing: the trigger does not judge life again.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_repeatable_read_transaction_goes_on_writing() {
    let (_database, pool) = database().await;
    let held = hold(&owner(&pool, "a", TOUGH).await, "ledger").await;
    write(&pool, "CREATE TABLE ledger (id int)").await.unwrap();
    fence::protect(&mut pool.acquire().await.unwrap(), "ledger", held.name()).await.unwrap();
    let mut tx = held.begin_with(&pool, fencepost::Isolation::RepeatableRead).await.unwrap();
    let over = "SELECT (SELECT expires_at FROM fencepost.owners) < clock_timestamp()";
    until("what the snapshot says of the owner's life is over", async || {
        sqlx::query("INSERT INTO ledger VALUES (1)").execute(&mut *tx).await.unwrap();
        sqlx::query_scalar::<_, bool>(over).fetch_one(&mut *tx).await.unwrap().then_some(())
    })
    .await;
    sqlx::query("INSERT INTO ledger VALUES (2)").execute(&mut *tx).await.unwrap();
    tx.commit().await.unwrap();
    assert!(held.is_held());
}

#[tokio::test(flavor = "multi_thread")]
async fn protecting_again_with_another_lease_replaces_the_first() {
    let (_database, pool) = database().await;
    let a = owner(&pool, "a", LONG).await;
    let (first, second) = (hold(&a, "first").await, hold(&a, "second").await);
    write(&pool, "CREATE TABLE ledger (id int)").await.unwrap();
    let mut conn = pool.acquire().await.unwrap();
    for name in ["first", "second"] {
        fence::protect(&mut conn, "ledger", &LockName::new(name).unwrap()).await.unwrap();
    }
    let insert = "INSERT INTO ledger VALUES (1)";
    let mut tx = first.begin(&pool).await.unwrap();
    assert!(sqlx::query(insert).execute(&mut *tx).await.is_err());
    drop(tx);
    let mut tx = second.begin(&pool).await.unwrap();
    sqlx::query(insert).execute(&mut *tx).await.unwrap();
    tx.commit().await.unwrap();
}

// Repeating it is harmless, also while an earlier call that was given up still runs in the database: each waits for
// the table before it holds anything else. (DROP TRIGGER alone locks the trigger first: a deadlock.)
#[tokio::test(flavor = "multi_thread")]
async fn unprotecting_twice_at_once_does_not_deadlock() {
    let (database, pool) = database().await;
    pool.execute("CREATE TABLE ledger (n int)").await.unwrap();
    let mut conn = connect(&database.options()).await;
    fence::protect(&mut conn, "ledger", lease("ledger").name()).await.unwrap();
    let mut tx = conn.begin().await.unwrap();
    tx.execute("LOCK TABLE ledger IN ACCESS SHARE MODE").await.unwrap();
    let mut other = connect(&database.options()).await;
    let again = tokio::spawn(async move { fence::unprotect(&mut other, "ledger").await });
    let waits = "SELECT EXISTS (SELECT FROM pg_locks WHERE relation = 'ledger'::regclass AND NOT granted)";
    until_true(&pool, "the other one waits for the table", waits).await;
    fence::unprotect(&mut tx, "ledger").await.unwrap();
    tx.commit().await.unwrap();
    within("the other one", again).await.unwrap().unwrap();
    let none = "SELECT NOT EXISTS (SELECT FROM pg_trigger WHERE tgname = 'fencepost_fence')";
    until_true(&pool, "no trigger is left", none).await;
}
