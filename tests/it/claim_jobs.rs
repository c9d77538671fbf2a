//! Jobs: claims by kind, taken by whoever is free.

use std::collections::HashMap;
use std::time::Duration;

use fencepost::claim::{Attempt, Begun, Claim, Failed, Jobs};
use fencepost::{Error, Owner};
use serde_json::json;
use sqlx::PgPool;

use crate::cancel::after_polls;
use crate::support::{LONG, SHORT, database, owner, until, until_true, within};

fn jobs() -> Jobs {
    Jobs::of_kind("mail").unwrap()
}

fn job(key: &str) -> Claim {
    Claim::named(key).unwrap().kind("mail").unwrap()
}

async fn enqueue(pool: &PgPool, count: usize) {
    let mut tx = pool.begin().await.unwrap();
    for n in 0..count {
        assert!(
            job(&format!("mail-{n:04}")).payload(&json!({"to": n})).unwrap().enqueue(&mut tx).await.unwrap()
        );
    }
    tx.commit().await.unwrap();
}

async fn next(owner: &Owner, limit: usize) -> Vec<Attempt> {
    jobs().claim_next(owner, limit).await.unwrap()
}

fn keys(attempts: &[Attempt]) -> Vec<&str> {
    attempts.iter().map(|attempt| attempt.key().as_str()).collect()
}

async fn complete(pool: &PgPool, attempt: &Attempt) -> Result<(), Error> {
    let mut tx = pool.begin().await.unwrap();
    sqlx::query("INSERT INTO sent VALUES ($1)").bind(attempt.key().as_str()).execute(&mut *tx).await.unwrap();
    attempt.complete(&mut tx, "sent").await?;
    tx.commit().await.unwrap();
    Ok(())
}

async fn with_sent() -> (fencepost::testing::TestDatabase, PgPool) {
    let (database, pool) = database().await;
    sqlx::raw_sql("CREATE TABLE sent (key text)").execute(&pool).await.unwrap();
    (database, pool)
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_come_with_the_transaction_that_leaves_them_and_in_order() {
    let (_database, pool) = with_sent().await;
    let a = owner(&pool, "a", LONG).await;
    let mut tx = pool.begin().await.unwrap();
    assert!(job("never").enqueue(&mut tx).await.unwrap());
    assert!(next(&a, 10).await.is_empty());
    tx.rollback().await.unwrap();
    assert!(next(&a, 10).await.is_empty());
    enqueue(&pool, 5).await;
    let mut tx = pool.begin().await.unwrap();
    assert!(!job("mail-0001").enqueue(&mut tx).await.unwrap(), "there is one");
    assert!(Claim::named("fax").unwrap().kind("fax").unwrap().enqueue(&mut tx).await.unwrap());
    assert!(job("later").delay(Duration::from_hours(1)).unwrap().enqueue(&mut tx).await.unwrap());
    tx.commit().await.unwrap();
    let (first, rest) = (next(&a, 2).await, next(&a, 10).await);
    assert_eq!(keys(&first), ["mail-0000", "mail-0001"]);
    assert_eq!(
        keys(&rest),
        ["mail-0002", "mail-0003", "mail-0004"],
        "not the other kind, and not before its time"
    );
    assert_eq!(rest[1].payload().unwrap(), Some(json!({"to": 3})));
    assert!(rest.iter().all(|attempt| attempt.number() == 1 && attempt.recovered().is_none()));
    assert!(next(&a, 1).await.is_empty());
    sqlx::raw_sql("UPDATE fencepost.claims SET due_at = clock_timestamp() WHERE key = 'later'")
        .execute(&pool)
        .await
        .unwrap();
    assert_eq!(keys(&next(&a, 1).await), ["later"]);
    for limit in [0, Jobs::MAX_BATCH + 1] {
        assert!(matches!(jobs().claim_next(&a, limit).await, Err(Error::Misuse { .. })));
    }
}

// C37, C13: lock and claim in one statement: many workers, each job once, and none waits for another.
#[tokio::test(flavor = "multi_thread")]
async fn many_workers_get_each_job_once() {
    let (_database, pool) = with_sent().await;
    enqueue(&pool, 300).await;
    let mut workers = Vec::new();
    for n in 0..6 {
        let (pool, owner) = (pool.clone(), owner(&pool, &format!("worker-{n}"), LONG).await);
        workers.push(tokio::spawn(async move {
            loop {
                let attempts = next(&owner, 1 + n).await;
                if attempts.is_empty() {
                    return;
                }
                for attempt in &attempts {
                    complete(&pool, attempt).await.unwrap();
                }
            }
        }));
    }
    for worker in workers {
        within("a worker", worker).await.unwrap();
    }
    let sent: (i64, i64) =
        sqlx::query_as("SELECT count(*), count(DISTINCT key) FROM sent").fetch_one(&pool).await.unwrap();
    assert_eq!(sent, (300, 300));
    let tokens: (i64, i64) =
        sqlx::query_as("SELECT count(DISTINCT token), count(DISTINCT grant_id) FROM fencepost.claims")
            .fetch_one(&pool)
            .await
            .unwrap();
    assert_eq!(tokens, (300, 300));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_somebody_is_at_is_passed_over() {
    let (_database, pool) = with_sent().await;
    let a = owner(&pool, "a", LONG).await;
    enqueue(&pool, 3).await;
    let mut at_it = pool.begin().await.unwrap();
    let lock = "SELECT FROM fencepost.claims WHERE key IN ('mail-0000', 'mail-0002') FOR UPDATE";
    sqlx::raw_sql(lock).execute(&mut *at_it).await.unwrap();
    // Kept: what is dropped comes again.
    let passed_over = within("the next jobs", next(&a, 3)).await;
    assert_eq!(keys(&passed_over), ["mail-0001"]);
    at_it.rollback().await.unwrap();
    assert_eq!(keys(&next(&a, 3).await), ["mail-0000", "mail-0002"]);
}

// The dead are recovered by the statement that claims: nobody else has to look after them.
#[tokio::test(flavor = "multi_thread")]
async fn jobs_of_the_dead_come_to_whoever_asks_next() {
    let (_database, pool) = with_sent().await;
    let b = owner(&pool, "b", LONG).await;
    for pruned in [false, true] {
        sqlx::raw_sql("DELETE FROM fencepost.claims; DELETE FROM sent").execute(&pool).await.unwrap();
        let a = owner(&pool, "a", SHORT).await;
        enqueue(&pool, 4).await;
        let late = next(&a, 3).await;
        assert_eq!(late.len(), 3);
        complete(&pool, &late[2]).await.unwrap();
        let ended = if pruned {
            "DELETE FROM fencepost.owners WHERE label = 'a'"
        } else {
            "UPDATE fencepost.owners SET expires_at = 'epoch' WHERE label = 'a'"
        };
        sqlx::raw_sql(ended).execute(&pool).await.unwrap();
        // Those of the dead, though other jobs are ready, and those: each once.
        let mut got = HashMap::new();
        until("all three", async || {
            for attempt in next(&b, 1).await {
                got.insert(attempt.key().to_string(), attempt);
            }
            (got.len() == 3).then_some(())
        })
        .await;
        for attempt in &late[..2] {
            let next = &got[attempt.key().as_str()];
            let previous = next.recovered().unwrap();
            assert_eq!((previous.token, previous.by.as_deref()), (Some(attempt.token()), Some("a")));
            assert!(next.token() > attempt.token() && next.crashes() == 1);
            let refused = complete(&pool, attempt).await.unwrap_err();
            assert!(refused.is_lost(), "{refused:?}");
        }
        assert!(got["mail-0003"].recovered().is_none());
        for attempt in got.values() {
            complete(&pool, attempt).await.unwrap();
        }
        assert!(next(&b, 10).await.is_empty());
        let sent: (i64, i64) =
            sqlx::query_as("SELECT count(*), count(DISTINCT key) FROM sent").fetch_one(&pool).await.unwrap();
        assert_eq!(sent, (4, 4));
        drop(late);
    }
}

// Also while there is always something ready: the dead do not starve.
#[tokio::test(flavor = "multi_thread")]
async fn the_dead_are_recovered_though_there_is_always_work() {
    let (_database, pool) = with_sent().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    enqueue(&pool, 1).await;
    let late = next(&a, 1).await;
    enqueue_more(&pool, 2_000).await;
    sqlx::raw_sql("UPDATE fencepost.owners SET expires_at = 'epoch' WHERE label = 'a'")
        .execute(&pool)
        .await
        .unwrap();
    let mut others = Vec::new();
    let recovered = loop {
        let mut attempts = next(&b, 1).await;
        let attempt = attempts.pop().expect("there is always work");
        if attempt.recovered().is_some() {
            break attempt;
        }
        others.push(attempt);
    };
    assert_eq!(recovered.key(), late[0].key());
    assert!(others.len() < 1_999);
}

async fn enqueue_more(pool: &PgPool, count: i64) {
    sqlx::query("SELECT count(fencepost.claim_enqueue('more-' || n, 'mail')) FROM generate_series(1, $1) n")
        .bind(count)
        .execute(pool)
        .await
        .unwrap();
}

// C33: by the heartbeat, not by a run time.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_job_is_not_taken_from_the_living() {
    let (_database, pool) = with_sent().await;
    let (a, b) = (owner(&pool, "a", SHORT).await, owner(&pool, "b", LONG).await);
    enqueue(&pool, 1).await;
    let long = next(&a, 1).await;
    sqlx::raw_sql("UPDATE fencepost.claims SET started_at = started_at - interval '1 day'")
        .execute(&pool)
        .await
        .unwrap();
    until_true(
        &pool,
        "several beats",
        "SELECT expires_at > started_at + 4 * ttl FROM fencepost.owners WHERE label = 'a'",
    )
    .await;
    assert!(next(&b, 10).await.is_empty());
    complete(&pool, &long[0]).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recovery_of_jobs_waits_for_an_open_end() {
    let (_database, pool) = with_sent().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    enqueue(&pool, 2).await;
    let late = next(&a, 2).await;
    let mut tx = pool.begin().await.unwrap();
    late[0].complete(&mut tx, "late").await.unwrap();
    sqlx::raw_sql("UPDATE fencepost.owners SET expires_at = 'epoch' WHERE label = 'a'")
        .execute(&pool)
        .await
        .unwrap();
    let got = within("the next jobs", next(&b, 10)).await;
    assert_eq!(keys(&got), ["mail-0001"]);
    tx.commit().await.unwrap();
    assert!(next(&b, 10).await.is_empty(), "it is done");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_job_comes_again_after_its_pause() {
    let (_database, pool) = with_sent().await;
    let a = owner(&pool, "a", LONG).await;
    let mut tx = pool.begin().await.unwrap();
    job("twice").max_failures(2).unwrap().enqueue(&mut tx).await.unwrap();
    tx.commit().await.unwrap();
    let fail = async |attempt: &Attempt, pause| {
        let mut tx = pool.begin().await.unwrap();
        let failed = attempt.fail(&mut tx, "no route", pause).await.unwrap();
        tx.commit().await.unwrap();
        failed
    };
    let first = next(&a, 1).await;
    assert_eq!(fail(&first[0], Duration::from_hours(1)).await, Failed::Ready);
    assert!(next(&a, 1).await.is_empty(), "it pauses");
    // By its key, at once.
    let Begun::Fresh(second) = job("twice").begin(&a).await.unwrap() else { panic!("it may be tried again") };
    assert_eq!((second.number(), second.failures()), (2, 1));
    assert_eq!(fail(&second, Duration::ZERO).await, Failed::Poison);
    assert!(next(&a, 1).await.is_empty(), "it waits for a person");
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_claimed_for_a_dropped_future_are_given_back() {
    let (_database, pool) = with_sent().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    enqueue(&pool, 10).await;
    for polls in 0.. {
        let claimed = after_polls(polls, jobs().claim_next(&a, 10)).await;
        let complete = claimed.is_some();
        for attempt in claimed.into_iter().flat_map(Result::unwrap) {
            assert!(attempt.release().await.unwrap());
        }
        let mut all = Vec::new();
        until("all ten", async || {
            all.extend(next(&b, 10).await);
            (all.len() == 10).then_some(())
        })
        .await;
        assert!(all.iter().all(|attempt| attempt.crashes() == 0 && attempt.recovered().is_none()));
        for attempt in all {
            assert!(attempt.release().await.unwrap());
        }
        if complete {
            break;
        }
    }
}
