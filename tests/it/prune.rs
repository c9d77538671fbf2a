//! Pruning while others are at work: it waits for nobody, and nobody waits for it.

use std::time::Duration;

use sqlx::{Executor as _, PgPool};

use crate::support::{LONG, connect, database, hold, lease, owner, until_true, within};

async fn prune(pool: &PgPool) -> fencepost::Pruned {
    let mut conn = pool.acquire().await.unwrap();
    within("pruning", fencepost::prune(&mut conn, Duration::ZERO)).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_fence_is_not_waited_for() {
    let (_database, pool) = database().await;
    let a = owner(&pool, "a", LONG).await;
    let held = hold(&a, "report").await;
    let tx = held.begin(&pool).await.unwrap();
    assert!(held.release().await.unwrap());
    assert_eq!(prune(&pool).await.leases, 0, "free, and still being written under");
    // Others go on.
    assert!(hold(&a, "other").await.release().await.unwrap());
    tx.commit().await.unwrap();
    assert_eq!(prune(&pool).await.leases, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_heartbeat_in_flight_is_not_waited_for_and_keeps_its_leases() {
    let (database, pool) = database().await;
    let a = owner(&pool, "a", LONG).await;
    let id: sqlx::types::Uuid =
        sqlx::query_scalar("SELECT fencepost.owner_start('x', '1 minute')").fetch_one(&pool).await.unwrap();
    sqlx::query("SELECT fencepost.acquire('report', $1)").bind(id).execute(&pool).await.unwrap();
    let mut beating = connect(&database.options()).await;
    sqlx::query(
        "UPDATE fencepost.owners SET expires_at = clock_timestamp() + interval '500 ms' WHERE id = $1",
    )
    .bind(id)
    .execute(&pool)
    .await
    .unwrap();
    beating.execute("BEGIN").await.unwrap();
    let alive = sqlx::query("SELECT * FROM fencepost.heartbeat($1)")
        .bind(id)
        .fetch_optional(&mut beating)
        .await
        .unwrap();
    until_true(
        &pool,
        "what is committed is over",
        "SELECT expires_at < clock_timestamp() FROM fencepost.owners WHERE label = 'x'",
    )
    .await;
    let pruned = prune(&pool).await;
    assert_eq!((pruned.owners, pruned.leases), (0, 0));
    assert!(hold(&a, "other").await.release().await.unwrap(), "nobody waits for it");
    beating.execute("COMMIT").await.unwrap();
    if alive.is_some() {
        assert!(lease("report").try_acquire(&a).await.unwrap().is_none(), "it lives");
    }
}

// Neither side ever fails: no deadlock between the row locks of an acquire and those of pruning.
#[tokio::test(flavor = "multi_thread")]
async fn pruning_all_the_time_disturbs_nobody() {
    let (_database, pool) = database().await;
    let mut busy = Vec::new();
    for n in 0..4 {
        let owner = owner(&pool, &format!("o{n}"), LONG).await;
        busy.push(tokio::spawn(async move {
            let mut last = None;
            for _ in 0..60 {
                let held = lease("report").acquire(&owner, fencepost::Wait::forever()).await.unwrap();
                assert!(last < Some(held.token()));
                last = Some(held.token());
                assert!(held.release().await.unwrap());
            }
        }));
    }
    while busy.iter().any(|task| !task.is_finished()) {
        prune(&pool).await;
    }
    for task in busy {
        task.await.unwrap();
    }
}
