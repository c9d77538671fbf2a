//! The owner: what it survives, and what it is told when it does not.

use std::sync::mpsc;
use std::time::Duration;

use fencepost::testing::Server;
use fencepost::{Error, LossReason, Owner};
use sqlx::postgres::PgPoolOptions;
use sqlx::{AssertSqlSafe, Executor as _, PgPool};

use crate::support::{
    LONG, SHORT, TOUGH, database, hold, hold_when_free, lease, owner, owner_id, terminate, until, until_true,
    within,
};

const BEATEN_ON: &str =
    "SELECT max(expires_at - started_at) > 2 * max(ttl) FROM fencepost.owners WHERE label = 'a'";

async fn migrated(server: &Server) -> PgPool {
    let pool = PgPoolOptions::new().max_connections(5).connect_lazy_with(server.options());
    fencepost::migrate(&pool).await.unwrap();
    pool
}

// C17, C18: a killed heartbeat session is a transient error: reconnected, nothing lost.
#[tokio::test(flavor = "multi_thread")]
async fn a_terminated_heartbeat_is_survived() {
    let (_database, pool) = database().await;
    let a = owner(&pool, "a", TOUGH).await;
    let held = hold(&a, "report").await;
    for _ in 0..2 {
        // The session beats soon, and is the one with that statement.
        until("the heartbeat's session", async || (terminate(&pool, "heartbeat").await > 0).then_some(()))
            .await;
    }
    let beat = "SELECT expires_at > clock_timestamp() + 0.9 * ttl FROM fencepost.owners WHERE label = 'a'";
    until_true(&pool, "a beat after that", beat).await;
    assert!(held.is_held() && a.is_alive());
    assert!(held.release().await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn all_sessions_terminated_again_and_again_lose_nothing() {
    let (_database, pool) = database().await;
    let a = owner(&pool, "a", TOUGH).await;
    let held = hold(&a, "report").await;
    for round in 0..5 {
        terminate(&pool, "").await;
        let other = hold(&a, &format!("other-{round}")).await;
        assert!(other.release().await.unwrap());
    }
    assert!(held.is_held() && held.release().await.unwrap());
}

// C19: beats come from a thread of their own: a blocked application runtime loses nothing.
#[test]
fn a_blocked_application_runtime_loses_nothing() {
    let (hand, handed) = mpsc::channel();
    let (unblock, blocked) = mpsc::channel::<()>();
    let application = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (database, pool) = database().await;
            let a = owner(&pool, "a", TOUGH).await;
            let held = hold(&a, "report").await;
            hand.send(database.options()).unwrap();
            // Its only thread stands still.
            blocked.recv().unwrap();
            assert!(held.is_held(), "lost while the runtime was blocked");
            assert!(held.release().await.unwrap());
        });
    });
    let observer = tokio::runtime::Runtime::new().unwrap();
    observer.block_on(async {
        let options = handed.recv().unwrap();
        let pool = PgPoolOptions::new().max_connections(1).connect_lazy_with(options);
        until_true(&pool, "several ttls", BEATEN_ON).await;
        pool.close().await;
    });
    unblock.send(()).unwrap();
    application.join().unwrap();
}

// C09: leases and their own work do not share a pool: an exhausted one loses nothing and does not stop an acquire.
#[tokio::test(flavor = "multi_thread")]
async fn an_exhausted_application_pool_loses_nothing() {
    let (database, observer) = database().await;
    let pool = PgPoolOptions::new()
        .max_connections(1)
        .acquire_timeout(Duration::from_millis(50))
        .connect_lazy_with(database.options());
    let a = owner(&pool, "a", TOUGH).await;
    let held = hold(&a, "report").await;
    let only = pool.acquire().await.unwrap();
    until_true(&observer, "several ttls", BEATEN_ON).await;
    assert!(held.is_held());
    let another = hold(&a, "another").await;
    let exhausted = held.begin(&pool).await.unwrap_err();
    assert!(matches!(exhausted, Error::PoolExhausted { .. }), "{exhausted:?}");
    assert!(exhausted.to_string().contains("the application's pool") && exhausted.is_timeout());
    drop(only);
    held.begin(&pool).await.unwrap().commit().await.unwrap();
    assert!(another.release().await.unwrap() && held.release().await.unwrap());
}

// C10: what is held costs no connection.
#[tokio::test(flavor = "multi_thread")]
async fn any_number_of_leases_needs_no_more_connections() {
    let (_database, pool) = database().await;
    let a = owner(&pool, "a", LONG).await;
    let mut acquiring = Vec::new();
    for n in 0..100 {
        let a = a.clone();
        acquiring.push(tokio::spawn(async move { hold(&a, &format!("lease-{n}")).await }));
    }
    let mut held = Vec::new();
    for acquire in acquiring {
        held.push(acquire.await.unwrap());
    }
    let connections: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'fencepost%'",
    )
    .fetch_one(&pool)
    .await
    .unwrap();
    assert!(connections <= 3, "{connections}");
    assert!(held.iter().all(fencepost::HeldLease::is_held));
}

// Its row is gone or marked dead: told at the next beat, and it starts again by itself under a new id.
#[tokio::test(flavor = "multi_thread")]
async fn an_owner_taken_for_dead_is_told_and_starts_again() {
    for fault in ["UPDATE fencepost.owners SET expires_at = 'epoch'", "DELETE FROM fencepost.owners"] {
        let (_database, pool) = database().await;
        let a = owner(&pool, "a", SHORT).await;
        let first = owner_id(&pool, "a").await;
        let held = hold(&a, "report").await;
        let lost = tokio::spawn({
            let a = a.clone();
            async move { a.lost().await }
        });
        pool.execute(fault).await.unwrap();
        assert_eq!(within("the lease is told", held.lost()).await, LossReason::Expired);
        assert_eq!(within("the owner is told", lost).await.unwrap(), LossReason::Expired);
        assert!(!held.is_held());
        let token = held.token();
        let again = hold_when_free(&a, "report").await;
        assert!(again.token() > token && again.is_held() && a.is_alive());
        assert_ne!(owner_id(&pool, "a").await, first);
        assert!(!held.release().await.unwrap(), "the old handle says so");
        assert!(again.is_held());
    }
}

// C31: an acquire under an owner that the database has given up finds out, and gets its answer under the next.
#[tokio::test(flavor = "multi_thread")]
async fn an_acquire_of_a_dead_owner_is_answered_under_its_next_life() {
    let (_database, pool) = database().await;
    let a = owner(&pool, "a", LONG).await;
    let held = hold(&a, "report").await;
    pool.execute("UPDATE fencepost.owners SET expires_at = 'epoch'").await.unwrap();
    // Long before the next beat is due.
    let other = within("the next life", lease("other").try_acquire(&a)).await.unwrap().unwrap();
    assert!(other.is_held());
    assert!(!held.is_held());
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_frees_everything_and_ends_the_thread() {
    let (_database, pool) = database().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let held = [hold(&a, "x").await, hold(&a, "y").await];
    let clone = a.clone();
    within("shutdown", a.shutdown()).await.unwrap();
    assert_eq!(held[0].lost().await, LossReason::Stopped);
    assert!(!held[1].is_held() && !clone.is_alive());
    for name in ["x", "y"] {
        assert!(hold(&b, name).await.is_held(), "free at once");
    }
    assert!(matches!(lease("z").try_acquire(&clone).await, Err(Error::Stopped)));
    assert_eq!(clone.lost().await, LossReason::Stopped);
    within("shutdown again", clone.shutdown()).await.unwrap();
    let [x, _y] = held;
    assert!(!x.release().await.unwrap());
    let gone = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'fencepost a')";
    until_true(&pool, "its connections are closed", gone).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn dropping_the_last_of_it_frees_everything() {
    let (_database, pool) = database().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let held = hold(&a, "report").await;
    drop(a);
    // What is held keeps it going.
    assert!(held.is_held() && lease("report").try_acquire(&b).await.unwrap().is_none());
    drop(held);
    let _free = hold_when_free(&b, "report").await;
    let gone = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'fencepost a')";
    until_true(&pool, "its connections are closed", gone).await;
    until_true(&pool, "it is dead", "SELECT expires_at = 'epoch' FROM fencepost.owners WHERE label = 'a'")
        .await;
}

#[tokio::test]
async fn a_server_that_is_gone_at_the_start_is_an_error_at_once() {
    let nowhere = sqlx::postgres::PgConnectOptions::new_without_pgpass()
        .socket("/nonexistent")
        .username("x")
        .database("x");
    let refused = within("start", Owner::start(&PgPool::connect_lazy_with(nowhere))).await.unwrap_err();
    assert!(matches!(refused, Error::Database { .. }) && refused.is_retryable(), "{refused:?}");
}

// Our sessions set for themselves what they need, whatever the database's defaults are.
#[tokio::test(flavor = "multi_thread")]
async fn hostile_defaults_do_not_matter() {
    let (database, pool) = database().await;
    let name = database.name();
    // From before the changes: a default is taken at the start of a session.
    let mut friendly = crate::support::connect(&database.options()).await;
    for setting in [
        "default_transaction_isolation = 'serializable'",
        "default_transaction_read_only = on",
        "default_transaction_deferrable = on",
        "statement_timeout = '150ms'",
        "lock_timeout = '1ms'",
        "idle_in_transaction_session_timeout = '150ms'",
        "idle_session_timeout = '150ms'",
        "search_path = 'nowhere'",
        "timezone = 'Asia/Kathmandu'",
        "intervalstyle = 'sql_standard'",
        "datestyle = 'SQL, DMY'",
        "standard_conforming_strings = off",
        "synchronous_commit = off",
        "bytea_output = 'escape'",
    ] {
        friendly.execute(AssertSqlSafe(format!("ALTER DATABASE {name} SET {setting}"))).await.unwrap();
    }
    let hostile = PgPoolOptions::new().max_connections(2).connect_lazy_with(database.options());
    fencepost::migrate(&hostile).await.unwrap();
    let a = owner(&hostile, "a", TOUGH).await;
    let held = hold(&a, "report").await;
    until_true(&pool, "several ttls", BEATEN_ON).await;
    assert!(held.is_held());
    let mut tx = held.begin_with(&hostile, fencepost::Isolation::ReadCommitted).await.unwrap();
    sqlx::query("SELECT 1").execute(&mut *tx).await.unwrap();
    tx.commit().await.unwrap();
    assert!(held.release().await.unwrap());
    // And migrates from nothing, too.
    friendly.execute("DROP SCHEMA fencepost CASCADE").await.unwrap();
    fencepost::migrate(&hostile).await.unwrap();
}

// C08: a dead client is noticed: what the server offers for that is set on our sessions.
#[tokio::test(flavor = "multi_thread")]
async fn our_sessions_notice_dead_peers() {
    let server = tokio::task::spawn_blocking(|| Server::builder().tcp().start().unwrap()).await.unwrap();
    let pool = migrated(&server).await;
    pool.execute(
        "CREATE TABLE seen (name text, setting text); \
         CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
         INSERT INTO public.seen SELECT name, setting FROM pg_settings WHERE name IN \
         ('client_connection_check_interval', 'tcp_keepalives_idle', 'tcp_keepalives_interval', 'tcp_keepalives_count', 'tcp_user_timeout', 'synchronous_commit', 'transaction_isolation'); \
         RETURN NULL; END $$; \
         CREATE TRIGGER note AFTER UPDATE ON fencepost.leases EXECUTE FUNCTION note()",
    )
    .await
    .unwrap();
    let tcp = server.options().host("127.0.0.1").port(server.port());
    let pool_over_tcp = PgPoolOptions::new().connect_lazy_with(tcp);
    let a = owner(&pool_over_tcp, "a", LONG).await;
    let _held = hold(&a, "report").await;
    let seen: std::collections::HashMap<String, String> =
        sqlx::query_as::<_, (String, String)>("SELECT name, setting FROM seen")
            .fetch_all(&pool)
            .await
            .unwrap()
            .into_iter()
            .collect();
    assert_eq!(seen["client_connection_check_interval"], "1000");
    assert_eq!(seen["transaction_isolation"], "read committed");
    // Raised for this grant, on a session that has it off.
    assert_eq!(seen["synchronous_commit"], "on");
    if server.options().get_socket().is_none() {
        assert_eq!((seen["tcp_keepalives_idle"].as_str(), seen["tcp_user_timeout"].as_str()), ("5", "15000"));
    }
}

// A crash and a restart within the ttl lose nothing; beyond it everything, by the local clock, and it comes back.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_crash_within_the_ttl_is_survived_and_beyond_it_is_told() {
    let server = tokio::task::spawn_blocking(|| Server::builder().durable().start().unwrap()).await.unwrap();
    let pool = migrated(&server).await;
    let a = owner(&pool, "a", Duration::from_secs(20)).await;
    let short = owner(&pool, "short", SHORT).await;
    let (held, briefly) = (hold(&a, "report").await, hold(&short, "brief").await);
    let token = held.token();
    server.crash().unwrap();
    assert!(matches!(within("the deadline", briefly.lost()).await, LossReason::Unreachable));
    assert!(!briefly.is_held() && !short.is_alive());
    assert!(held.is_held(), "its ttl is not over");
    server.restart().unwrap();
    // Under its next life, with a larger token.
    let again = hold_when_free(&short, "brief").await;
    assert!(again.token() > briefly.token() && again.token() > token);
    // The other one still holds what it held.
    assert!(held.is_held());
    let mut tx = within("a connection of the pool", async {
        loop {
            // The pool may hand out connections from before the crash.
            match held.begin(&pool).await {
                Ok(tx) => return tx,
                Err(error) => assert!(error.is_retryable(), "{error:?}"),
            }
        }
    })
    .await;
    sqlx::query("SELECT 1").execute(&mut *tx).await.unwrap();
    tx.commit().await.unwrap();
    let another = hold(&a, "another").await;
    assert!(another.release().await.unwrap() && held.release().await.unwrap());
}

// A server that stands still for longer than the ttl: told by the local clock, without an answer.
#[tokio::test(flavor = "multi_thread")]
async fn a_stalled_server_is_a_loss_at_the_local_deadline() {
    let server = tokio::task::spawn_blocking(|| Server::start().unwrap()).await.unwrap();
    let pool = migrated(&server).await;
    let a = owner(&pool, "a", SHORT).await;
    let held = hold(&a, "report").await;
    server.pause().unwrap();
    assert_eq!(within("the deadline", held.lost()).await, LossReason::Unreachable);
    assert!(!held.is_held() && held.remaining().is_zero());
    assert!(!within("release does not wait for it", held.release()).await.unwrap());
    server.resume().unwrap();
    let again = hold_when_free(&a, "report").await;
    assert!(again.is_held());
}

// C22: a short ttl with renewal, and a process that vanishes blocks nobody for longer.
#[tokio::test(flavor = "multi_thread")]
async fn whoever_vanishes_blocks_nobody_beyond_its_ttl() {
    let (_database, pool) = database().await;
    let b = owner(&pool, "b", LONG).await;
    // A process that acquired and never beat.
    sqlx::query("SELECT fencepost.acquire('report', fencepost.owner_start('vanished', '2 seconds'))")
        .execute(&pool)
        .await
        .unwrap();
    let fencepost::Attempt::Busy(holder) = lease("report").attempt(&b).await.unwrap() else {
        panic!("free too early")
    };
    assert!(holder.remaining <= TOUGH);
    let _held = hold_when_free(&b, "report").await;
    until("the vanished owner is marked", async || {
        let marked = "SELECT expires_at = 'epoch' FROM fencepost.owners WHERE label = 'vanished'";
        sqlx::query_scalar::<_, bool>(marked).fetch_one(&pool).await.unwrap().then_some(())
    })
    .await;
}

// The start has succeeded and its future is dropped before it hears of it.
#[tokio::test(flavor = "multi_thread")]
async fn a_start_dropped_between_success_and_hearing_of_it_stops() {
    let (_database, pool) = database().await;
    let mut start = Box::pin(Owner::builder(&pool).label("a").ttl(TOUGH).start());
    let pending =
        std::future::poll_fn(|cx| std::task::Poll::Ready(start.as_mut().poll(cx).is_pending())).await;
    assert!(pending);
    let beats = "SELECT coalesce(bool_or(expires_at > started_at + ttl), false) FROM fencepost.owners";
    until_true(&pool, "it has started and beats", beats).await;
    drop(start);
    let gone = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'fencepost a') \
                AND (SELECT expires_at = 'epoch' FROM fencepost.owners)";
    until_true(&pool, "it is stopped", gone).await;
}
