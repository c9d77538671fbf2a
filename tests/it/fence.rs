//! The fence in the writer's transaction: what passes, what waits, what is refused, and what it leaves behind.

use fencepost::Isolation;
use fencepost::fence;
use fencepost::{Error, FencingToken, Grant, GrantId, HeldLease, LockName, LossReason};
use sqlx::{Acquire as _, PgPool, Row as _};

use crate::support::{
    LONG, SHORT, TOUGH, database, hold, hold_when_free, lease, owner, until, until_true, within,
};

const LEVELS: [Isolation; 4] =
    [Isolation::SessionDefault, Isolation::ReadCommitted, Isolation::RepeatableRead, Isolation::Serializable];

async fn accounts(pool: &PgPool) {
    sqlx::raw_sql("CREATE TABLE account (id int PRIMARY KEY, balance bigint NOT NULL, token bigint); INSERT INTO account VALUES (1, 0, NULL)")
        .execute(pool)
        .await
        .unwrap();
}

/// Takes the lease away from its holder, as an operator and the next holder would; the new token.
async fn take_over(pool: &PgPool, name: &str) -> FencingToken {
    sqlx::query("SELECT fencepost.revoke($1)").bind(name).execute(pool).await.unwrap();
    until("the take-over", async || {
        let row = sqlx::query("SELECT granted, token FROM fencepost.acquire($1, p_at_most => '1 minute')")
            .bind(name)
            .fetch_one(pool)
            .await
            .unwrap();
        row.get::<bool, _>("granted").then(|| row.get("token"))
    })
    .await
}

async fn stolen(pool: &PgPool, held: &HeldLease) -> FencingToken {
    take_over(pool, held.name().as_str()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fenced_write_commits_at_every_isolation_level() {
    let (_database, pool) = database().await;
    accounts(&pool).await;
    let held = hold(&owner(&pool, "a", LONG).await, "account").await;
    for isolation in LEVELS {
        let mut tx = held.begin_with(&pool, isolation).await.unwrap();
        let level: String =
            sqlx::query_scalar("SHOW transaction_isolation").fetch_one(&mut *tx).await.unwrap();
        let expected = match isolation {
            Isolation::RepeatableRead => "repeatable read",
            Isolation::Serializable => "serializable",
            _ => "read committed",
        };
        assert_eq!(level, expected);
        sqlx::query("UPDATE account SET balance = balance + 1, token = $1")
            .bind(held.token())
            .execute(&mut *tx)
            .await
            .unwrap();
        tx.commit().await.unwrap();
        // In the caller's own transaction, too.
        let mut tx = pool.begin().await.unwrap();
        held.fence(&mut tx).await.unwrap();
        sqlx::query("UPDATE account SET balance = balance + 1").execute(&mut *tx).await.unwrap();
        tx.commit().await.unwrap();
    }
    let row = sqlx::query("SELECT balance, token FROM account").fetch_one(&pool).await.unwrap();
    assert_eq!(row.get::<i64, _>("balance"), 8);
    assert_eq!(row.get::<FencingToken, _>("token"), held.token());
}

// C43, C42: a stale holder never passes, at no level; the error says which token came later.
#[tokio::test(flavor = "multi_thread")]
async fn a_stale_holder_is_refused_at_every_isolation_level() {
    let (_database, pool) = database().await;
    let a = owner(&pool, "a", LONG).await;
    for (number, isolation) in LEVELS.into_iter().enumerate() {
        let held = hold(&a, &format!("account-{number}")).await;
        let later = stolen(&pool, &held).await;
        let refused = held.begin_with(&pool, isolation).await.unwrap_err();
        assert!(
            matches!(&refused, Error::StaleFence { name, token, current: Some(by), .. }
            if name == held.name().as_str() && *token == held.token() && *by == later),
            "{refused}"
        );
        let mut tx = pool.begin().await.unwrap();
        assert!(held.fence(&mut tx).await.unwrap_err().is_lost());
    }
}

// C42, C43: a snapshot from before the take-over does not let the stale holder pass either.
#[tokio::test(flavor = "multi_thread")]
async fn an_old_snapshot_does_not_help_a_stale_holder() {
    let (_database, pool) = database().await;
    let a = owner(&pool, "a", LONG).await;
    for (number, level) in ["REPEATABLE READ", "SERIALIZABLE"].into_iter().enumerate() {
        let held = hold(&a, &format!("account-{number}")).await;
        let mut tx = pool.begin().await.unwrap();
        let begin =
            format!("SET TRANSACTION ISOLATION LEVEL {level}; SELECT count(*) FROM fencepost.version()");
        sqlx::raw_sql(sqlx::AssertSqlSafe(begin)).execute(&mut *tx).await.unwrap();
        stolen(&pool, &held).await;
        let refused = held.fence(&mut tx).await.unwrap_err();
        assert!(matches!(refused, Error::SerializationFailure { .. }), "{level}: {refused}");
        assert!(refused.is_retryable() && refused.sqlstate() == Some("40001"));
        drop(tx);
        // Run again, as the error says, it gets the plain answer.
        assert!(held.begin(&pool).await.unwrap_err().is_lost());
    }
}

// A beat after the snapshot must not make a living holder look dead.
#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_older_than_the_ttl_does_not_make_a_living_holder_look_dead() {
    let (_database, pool) = database().await;
    let a = owner(&pool, "a", TOUGH).await;
    let held = hold(&a, "account").await;
    let mut tx = pool.begin().await.unwrap();
    let begin = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; SELECT * FROM fencepost.owners";
    sqlx::raw_sql(begin).execute(&mut *tx).await.unwrap();
    // What the snapshot says of the owner's life is over, the owner lives.
    let over = "SELECT (SELECT expires_at FROM fencepost.owners) < clock_timestamp()";
    until("the snapshot's life is over", async || {
        sqlx::query_scalar::<_, bool>(over).fetch_one(&mut *tx).await.unwrap().then_some(())
    })
    .await;
    assert!(held.is_held());
    let answer = held.fence(&mut tx).await;
    assert!(
        matches!(answer, Err(Error::SerializationFailure { .. })),
        "not lost, only to be run again: {answer:?}"
    );
    assert!(held.is_held());
    // A dead one is told so, with the same old snapshot.
    drop(tx);
    let id = crate::support::owner_id(&pool, "a").await;
    let grant = held.grant();
    let name = held.name().clone();
    a.shutdown().await.unwrap();
    sqlx::query("UPDATE fencepost.leases SET released_at = NULL").execute(&pool).await.unwrap();
    sqlx::query("UPDATE fencepost.owners SET expires_at = clock_timestamp() - interval '1 s' WHERE id = $1")
        .bind(id)
        .execute(&pool)
        .await
        .unwrap();
    let mut tx = pool.begin().await.unwrap();
    sqlx::raw_sql(begin).execute(&mut *tx).await.unwrap();
    let refused = fence::check(&mut tx, &name, grant).await.unwrap_err();
    assert!(matches!(refused, Error::Lost { reason: LossReason::Expired, .. }), "{refused:?}");
}

// The take-over waits for the fenced transaction that is open, and for nothing else.
#[tokio::test(flavor = "multi_thread")]
async fn the_next_grant_waits_for_an_open_fenced_transaction() {
    let (_database, pool) = database().await;
    accounts(&pool).await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let held = hold(&a, "account").await;
    let mut tx = held.begin(&pool).await.unwrap();
    sqlx::query("UPDATE account SET balance = 1").execute(&mut *tx).await.unwrap();
    // Released with its own transaction open: at once, not after it.
    assert!(within("release", held.release()).await.unwrap());
    let fencepost::Attempt::Busy(holder) = lease("account").attempt(&b).await.unwrap() else {
        panic!("granted beside an open fenced write")
    };
    assert!(holder.remaining.is_zero(), "its time is over: {holder:?}");
    // The write was fenced while it held the lease, so it may commit.
    tx.commit().await.unwrap();
    let next = hold(&b, "account").await;
    let mut tx = next.begin(&pool).await.unwrap();
    let seen: i64 = sqlx::query_scalar("SELECT balance FROM account").fetch_one(&mut *tx).await.unwrap();
    assert_eq!(seen, 1, "the next holder sees the last write of the one before");
}

// A paused holder cannot block a take-over for longer than its ttl: its idle transaction is ended.
#[tokio::test(flavor = "multi_thread")]
async fn an_idle_fenced_transaction_is_ended_after_the_ttl() {
    let (_database, pool) = database().await;
    let (a, b) = (owner(&pool, "a", SHORT).await, owner(&pool, "b", LONG).await);
    let held = hold(&a, "account").await;
    let mut tx = held.begin(&pool).await.unwrap();
    // As a paused process: it neither beats nor ends its transaction.
    sqlx::query("UPDATE fencepost.owners SET expires_at = 'epoch' WHERE label = 'a'")
        .execute(&pool)
        .await
        .unwrap();
    let next = hold_when_free(&b, "account").await;
    assert!(next.token() > held.token());
    let refused = sqlx::query("SELECT 1").execute(&mut *tx).await.unwrap_err();
    let code = refused.as_database_error().and_then(|error| error.code().map(std::borrow::Cow::into_owned));
    assert!(code.as_deref() == Some("25P03") || matches!(refused, sqlx::Error::Io(_)), "{refused:?}");
}

// B3: the bound is the ttl and the caller's own lower value stays; it is the transaction's only.
#[tokio::test(flavor = "multi_thread")]
async fn the_idle_bound_is_the_ttl_never_above_the_callers() {
    let (_database, pool) = database().await;
    let held = hold(&owner(&pool, "a", LONG).await, "account").await;
    let capped = lease("capped").at_most(LONG / 2).unwrap();
    let capped = capped.try_acquire(&owner(&pool, "b", LONG).await).await.unwrap().unwrap();
    let mut conn = pool.acquire().await.unwrap();
    let show = "SELECT (extract(epoch FROM current_setting('idle_in_transaction_session_timeout')::interval) * 1000)::bigint AS idle, \
                (extract(epoch FROM current_setting('client_connection_check_interval')::interval) * 1000)::bigint AS gone";
    let ttl = i64::try_from(LONG.as_millis()).unwrap();
    // (session's own setting, in ms; lease; expected)
    for (own, held, least, most) in [
        (0, &held, ttl, ttl),
        (2 * ttl, &held, ttl, ttl),
        (ttl - 1, &held, ttl - 1, ttl - 1),
        (0, &capped, 1, i64::try_from((LONG / 2).as_millis()).unwrap()),
    ] {
        let set = format!(
            "SET idle_in_transaction_session_timeout = {own}; SET client_connection_check_interval = 5000"
        );
        sqlx::raw_sql(sqlx::AssertSqlSafe(set)).execute(&mut *conn).await.unwrap();
        let mut tx = conn.begin().await.unwrap();
        held.fence(&mut tx).await.unwrap();
        let row = sqlx::query(show).fetch_one(&mut *tx).await.unwrap();
        let idle: i64 = row.get("idle");
        assert!((least..=most).contains(&idle), "{idle} ms, own {own}");
        assert!(row.get::<i64, _>("gone") <= 1000);
        tx.rollback().await.unwrap();
        let row = sqlx::query(show).fetch_one(&mut *conn).await.unwrap();
        assert_eq!(
            (row.get::<i64, _>("idle"), row.get::<i64, _>("gone")),
            (own, 5000),
            "after the transaction"
        );
    }
}

// A savepoint that is rolled back takes the fence with it: documented, and `protect` notices.
#[tokio::test(flavor = "multi_thread")]
async fn a_fence_in_a_savepoint_that_rolls_back_is_gone() {
    let (_database, pool) = database().await;
    accounts(&pool).await;
    let held = hold(&owner(&pool, "a", LONG).await, "account").await;
    fence::protect(&mut pool.acquire().await.unwrap(), "account", held.name()).await.unwrap();
    let mut tx = pool.begin().await.unwrap();
    let mut savepoint = tx.begin().await.unwrap();
    held.fence(&mut savepoint).await.unwrap();
    savepoint.rollback().await.unwrap();
    let write = "UPDATE account SET balance = 1";
    let refused = Error::from(sqlx::query(write).execute(&mut *tx).await.unwrap_err());
    assert!(matches!(refused, Error::Unfenced { .. }), "{refused:?}");
    tx.rollback().await.unwrap();
    // Released, it is kept.
    let mut tx = pool.begin().await.unwrap();
    let mut savepoint = tx.begin().await.unwrap();
    held.fence(&mut savepoint).await.unwrap();
    savepoint.commit().await.unwrap();
    sqlx::query(write).execute(&mut *tx).await.unwrap();
    tx.commit().await.unwrap();
}

// In autocommit the fence's lock ends with the statement: the SQL documentation demands BEGIN.
#[tokio::test(flavor = "multi_thread")]
async fn a_fence_in_autocommit_protects_nothing() {
    let (_database, pool) = database().await;
    accounts(&pool).await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let held = hold(&a, "account").await;
    fence::protect(&mut pool.acquire().await.unwrap(), "account", held.name()).await.unwrap();
    let mut conn = pool.acquire().await.unwrap();
    let grant = held.grant();
    sqlx::query("SELECT fencepost.fence('account', $1, $2)")
        .bind(grant.token)
        .bind(grant.id)
        .execute(&mut *conn)
        .await
        .unwrap();
    assert!(held.release().await.unwrap());
    let _next = hold(&b, "account").await; // not kept out
    let refused =
        Error::from(sqlx::query("UPDATE account SET balance = 1").execute(&mut *conn).await.unwrap_err());
    assert!(
        matches!(refused, Error::Unfenced { .. }),
        "nor does the credential outlive the statement: {refused:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn in_an_aborted_transaction_the_fence_fails_and_the_lease_stays() {
    let (_database, pool) = database().await;
    let held = hold(&owner(&pool, "a", LONG).await, "account").await;
    let mut tx = pool.begin().await.unwrap();
    sqlx::query("SELECT 1/0").execute(&mut *tx).await.unwrap_err();
    let failed = held.fence(&mut tx).await.unwrap_err();
    assert!(matches!(failed, Error::Database { .. }) && failed.sqlstate() == Some("25P02"), "{failed:?}");
    assert!(held.is_held());
}

// C07, B-trap of `begin_with`: a refused begin leaves the pool's one connection clean, and the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_refused_begin_leaves_a_clean_connection_in_the_pool() {
    let (database, pool) = database().await;
    let a = owner(&pool, "a", LONG).await;
    let single = one_connection(&database);
    let before: i32 = sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&single).await.unwrap();
    let mut grant = None;
    for (number, isolation) in LEVELS.into_iter().enumerate() {
        let held = hold(&a, &format!("account-{number}")).await;
        stolen(&pool, &held).await;
        held.begin_with(&single, isolation).await.unwrap_err();
        let clean = "SELECT pg_backend_pid() AS pid, pg_current_xact_id_if_assigned() IS NULL AS clean";
        let row = sqlx::query(clean).fetch_one(&single).await.unwrap();
        assert_eq!(row.get::<i32, _>("pid"), before, "the connection was kept");
        assert!(row.get::<bool, _>("clean"), "and is in no transaction");
        grant = Some(held.grant());
    }
    // The naive way, which the library avoids, does leave it aborted.
    let grant = grant.unwrap();
    let naive = format!("BEGIN; SELECT fencepost.fence('account-3', {}, '{}')", grant.token, grant.id);
    single.begin_with(sqlx::AssertSqlSafe(naive)).await.unwrap_err();
    let aborted = sqlx::query("SELECT 1").execute(&single).await;
    assert!(aborted.is_err(), "sqlx has mended begin_with: simplify HeldLease::begin_with");
}

fn one_connection(database: &fencepost::testing::TestDatabase) -> PgPool {
    sqlx::postgres::PgPoolOptions::new()
        .max_connections(1)
        .test_before_acquire(false)
        .connect_lazy_with(database.options())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_was_handed_the_grant_passes_the_fence() {
    let (_database, pool) = database().await;
    let held = hold(&owner(&pool, "a", LONG).await, "account").await;
    // As text, the way it would travel to another process.
    let handed: Grant = held.grant().to_string().parse().unwrap();
    let name: LockName = held.name().as_str().parse().unwrap();
    let mut tx = pool.begin().await.unwrap();
    fence::check(&mut tx, &name, handed).await.unwrap();
    tx.commit().await.unwrap();
    // C44, C53: the right number with another id is somebody else's.
    let other = Grant::new(held.token(), GrantId::from(sqlx::types::Uuid::nil()));
    let mut tx = pool.begin().await.unwrap();
    let refused = fence::check(&mut tx, &name, other).await.unwrap_err();
    assert!(matches!(refused, Error::StaleFence { .. }), "{refused:?}");
    tx.rollback().await.unwrap();
    let mut tx = pool.begin().await.unwrap();
    let never = LockName::new("never granted").unwrap();
    let refused = fence::check(&mut tx, &never, handed).await.unwrap_err();
    assert!(matches!(refused, Error::StaleFence { current: None, .. }), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_high_water_mark_rejects_the_smaller_token() {
    let (_database, pool) = database().await;
    let resource = LockName::new("s3://bucket/o'brien").unwrap();
    let token = |n| FencingToken::new(n).unwrap();
    let advance = async |n| {
        let mut tx = pool.begin().await.unwrap();
        let answer = fence::advance(&mut tx, &resource, token(n)).await;
        tx.commit().await.unwrap();
        answer
    };
    for accepted in [33, 33, 34, 34] {
        advance(accepted).await.unwrap();
    }
    let late = advance(33).await.unwrap_err();
    assert!(matches!(&late, Error::StaleFence { current: Some(seen), .. } if *seen == token(34)), "{late:?}");
    // While a mark is raised in an open transaction, a smaller one waits for its outcome.
    let mut first = pool.begin().await.unwrap();
    fence::advance(&mut first, &resource, token(40)).await.unwrap();
    let second = tokio::spawn({
        let (pool, resource) = (pool.clone(), resource.clone());
        async move {
            let mut tx = pool.begin().await.unwrap();
            fence::advance(&mut tx, &resource, token(35)).await
        }
    });
    until_true(&pool, "the second waits", "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)").await;
    first.commit().await.unwrap();
    assert!(within("the second", second).await.unwrap().unwrap_err().is_lost());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_codecs_agree_with_postgres() {
    let (_database, pool) = database().await;
    let held = hold(&owner(&pool, "a", LONG).await, "account").await;
    let grant = held.grant();
    let row = sqlx::query("SELECT $1::bigint AS token, $2::uuid AS id, $3::text AS pair, $4::bigint[] AS tokens, $5::uuid[] AS ids, $6::text[] AS pairs")
        .bind(grant.token)
        .bind(grant.id)
        .bind(grant)
        .bind(vec![grant.token])
        .bind(vec![grant.id])
        .bind(vec![grant])
        .fetch_one(&pool)
        .await
        .unwrap();
    assert_eq!(row.get::<FencingToken, _>("token"), grant.token);
    assert_eq!(row.get::<GrantId, _>("id"), grant.id);
    assert_eq!(row.get::<Grant, _>("pair"), grant);
    assert_eq!(row.get::<Vec<FencingToken>, _>("tokens"), [grant.token]);
    assert_eq!(row.get::<Vec<GrantId>, _>("ids"), [grant.id]);
    assert_eq!(row.get::<Vec<Grant>, _>("pairs"), [grant]);
    let zero = sqlx::query("SELECT 0::bigint AS token, 'x' AS pair").fetch_one(&pool).await.unwrap();
    assert!(zero.try_get::<FencingToken, _>("token").is_err(), "no grant has token 0");
    assert!(zero.try_get::<Grant, _>("pair").is_err());
}

// A service on tokio-postgres checks the same fence.
#[tokio::test(flavor = "multi_thread")]
async fn the_fence_is_passed_from_tokio_postgres() {
    let (database, pool) = database().await;
    accounts(&pool).await;
    let held = hold(&owner(&pool, "a", LONG).await, "account").await;
    let Grant { token, id, .. } = held.grant();
    let options = database.options();
    let mut config = tokio_postgres::Config::new();
    config.user(options.get_username()).dbname(options.get_database().unwrap()).port(options.get_port());
    match options.get_socket() {
        Some(folder) => config.host_path(folder),
        None => config.host(options.get_host()),
    };
    let (mut client, connection) = config.connect(tokio_postgres::NoTls).await.unwrap();
    let connection = tokio::spawn(connection);
    let tx = client.transaction().await.unwrap();
    tx.execute("SELECT fencepost.fence($1, $2, $3)", &[&"account", &token, &id]).await.unwrap();
    tx.execute("UPDATE account SET balance = 1, token = $1", &[&token]).await.unwrap();
    tx.commit().await.unwrap();
    let row = client
        .query_one("SELECT token, $1::uuid, $2::text FROM account", &[&id, &held.grant()])
        .await
        .unwrap();
    assert_eq!(
        (row.get::<_, FencingToken>(0), row.get::<_, GrantId>(1), row.get::<_, Grant>(2)),
        (token, id, held.grant())
    );
    stolen(&pool, &held).await;
    let tx = client.transaction().await.unwrap();
    let refused =
        tx.execute("SELECT fencepost.fence($1, $2, $3)", &[&"account", &token, &id]).await.unwrap_err();
    assert_eq!(refused.code().unwrap().code(), "LK001");
    tx.rollback().await.unwrap();
    drop(client);
    connection.await.unwrap().unwrap();
}

// The row is younger than the snapshot: run again, not lost.
#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_from_before_the_first_grant_does_not_lose_it() {
    let (_database, pool) = database().await;
    let a = owner(&pool, "a", LONG).await;
    for (number, level) in ["REPEATABLE READ", "SERIALIZABLE"].into_iter().enumerate() {
        let mut tx = pool.begin().await.unwrap();
        let begin = format!("SET TRANSACTION ISOLATION LEVEL {level}; SELECT count(*) FROM fencepost.leases");
        sqlx::raw_sql(sqlx::AssertSqlSafe(begin)).execute(&mut *tx).await.unwrap();
        let held = hold(&a, &format!("new-{number}")).await;
        let again = held.fence(&mut tx).await.unwrap_err();
        assert!(matches!(again, Error::SerializationFailure { .. }), "{level}: {again:?}");
        drop(tx);
        assert!(held.is_held());
        held.begin(&pool).await.unwrap().commit().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fence_passed_again_in_a_savepoint_that_rolls_back_stays_passed() {
    let (_database, pool) = database().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let held = hold(&a, "account").await;
    let mut tx = held.begin(&pool).await.unwrap();
    let mut savepoint = tx.begin().await.unwrap();
    held.fence(&mut savepoint).await.unwrap();
    sqlx::query("SELECT FROM fencepost.leases FOR NO KEY UPDATE").execute(&mut *savepoint).await.unwrap();
    savepoint.rollback().await.unwrap();
    assert!(held.release().await.unwrap());
    assert!(lease("account").try_acquire(&b).await.unwrap().is_none(), "the first fence is still passed");
    tx.commit().await.unwrap();
    assert!(hold(&b, "account").await.is_held());
}

// NULL compares with nothing: it must not pass for the grant.
#[tokio::test(flavor = "multi_thread")]
async fn null_passes_no_fence() {
    let (_database, pool) = database().await;
    let held = hold(&owner(&pool, "a", LONG).await, "account").await;
    for call in ["fence('account', $1, NULL)", "fence('account', NULL, $2)", "fence(NULL, $1, $2)"] {
        let text = format!("SELECT fencepost.{call}, $1::bigint, $2::uuid");
        let grant = held.grant();
        let refused = sqlx::query(sqlx::AssertSqlSafe(text))
            .bind(grant.token)
            .bind(grant.id)
            .execute(&pool)
            .await
            .unwrap_err();
        assert_eq!(refused.as_database_error().unwrap().code().unwrap(), "LK001", "{call}");
    }
    let released: bool = sqlx::query_scalar("SELECT released FROM fencepost.release('account', $1, NULL)")
        .bind(held.token())
        .fetch_one(&pool)
        .await
        .unwrap();
    assert!(!released);
}
