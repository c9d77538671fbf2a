//! What a crash of the server may take back, and what it may not. Durable servers of their own.

use std::time::Duration;

use fencepost::testing::Server;
use sqlx::postgres::PgPoolOptions;
use sqlx::types::Uuid;
use sqlx::{AssertSqlSafe, Executor as _, PgPool};

use crate::support::{connect, hold, hold_when_free, owner};

/// A server that keeps what it says it keeps, and a role that asks for less.
async fn careless() -> (Server, PgPool) {
    let start = || {
        Server::builder()
            .setting("synchronous_commit", "on")
            .setting("wal_writer_delay", "10s")
            .start()
            .unwrap()
    };
    let server = tokio::task::spawn_blocking(start).await.unwrap();
    let pool =
        PgPoolOptions::new().max_connections(2).test_before_acquire(true).connect_lazy_with(server.options());
    fencepost::migrate(&pool).await.unwrap();
    let mut conn = connect(&server.options()).await;
    conn.execute("ALTER ROLE postgres SET synchronous_commit = off").await.unwrap();
    (server, pool)
}

/// Grants on a careless connection until one round's crash has taken back a token, or the rounds are over.
async fn a_token_was_issued_again(server: &Server, rounds: usize) -> bool {
    for _ in 0..rounds {
        let mut conn = connect(&server.options()).await;
        let grant = "SELECT token FROM fencepost.acquire($1, p_at_most => '1 hour')";
        let fresh = Uuid::new_v4().to_string();
        let last: i64 = sqlx::query_scalar(grant).bind(&fresh).fetch_one(&mut conn).await.unwrap();
        server.crash().unwrap();
        server.restart().unwrap();
        let mut conn = connect(&server.options()).await;
        let kept: bool =
            sqlx::query_scalar("SELECT EXISTS (SELECT FROM fencepost.leases WHERE name = $1 AND token = $2)")
                .bind(&fresh)
                .bind(last)
                .fetch_one(&mut conn)
                .await
                .unwrap();
        let next: i64 =
            sqlx::query_scalar(grant).bind(Uuid::new_v4().to_string()).fetch_one(&mut conn).await.unwrap();
        if !kept || next <= last {
            return true;
        }
    }
    false
}

// A token is handed out only after its commit is on disk, whatever the role's setting.
#[tokio::test(flavor = "multi_thread")]
async fn a_crash_takes_back_no_token_though_the_role_is_careless() {
    let (server, pool) = careless().await;
    assert!(!a_token_was_issued_again(&server, 5).await);
    // The same without the line that raises the setting: the check is not blind.
    let mut conn = connect(&server.options()).await;
    let definition: String =
        sqlx::query_scalar("SELECT pg_get_functiondef(oid) FROM pg_proc WHERE proname = 'acquire' AND pronamespace = 'fencepost'::regnamespace")
            .fetch_one(&mut conn)
            .await
            .unwrap();
    let naive = definition.replace(
        "set_config('synchronous_commit', 'on', true)",
        "set_config('synchronous_commit', 'off', true)",
    );
    assert_ne!(naive, definition);
    conn.execute("SET synchronous_commit = on").await.unwrap();
    conn.execute(AssertSqlSafe(naive)).await.unwrap();
    assert!(a_token_was_issued_again(&server, 10).await, "the naive function survived: the test cannot fail");
    pool.close().await;
}

// B1: the release of a living owner is taken back by a crash; the owner finds it and releases it again.
#[tokio::test(flavor = "multi_thread")]
async fn b1_a_release_that_a_crash_took_back_is_done_again() {
    let (server, pool) = careless().await;
    let a = owner(&pool, "a", Duration::from_mins(1)).await;
    let b = owner(&pool, "b", Duration::from_mins(1)).await;
    for round in 0.. {
        assert!(round < 20, "no crash took a release back: the test is blind");
        let name = format!("report-{round}");
        let held = hold(&a, &name).await;
        let token = held.token();
        assert!(held.release().await.unwrap());
        server.crash().unwrap();
        server.restart().unwrap();
        let mut conn = connect(&server.options()).await;
        let taken_back: bool =
            sqlx::query_scalar("SELECT released_at IS NULL FROM fencepost.leases WHERE token = $1")
                .bind(token)
                .fetch_one(&mut conn)
                .await
                .unwrap();
        // Some call of it meets the broken session, and leads to the look.
        assert!(hold_when_free(&a, "anything").await.is_held());
        let next = hold_when_free(&b, &name).await;
        assert!(next.token() > token && a.is_alive());
        if taken_back {
            return;
        }
    }
}
