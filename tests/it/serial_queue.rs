//! The queue of the example: items of a key one at a time and in order, whoever dies or sleeps in the middle of one.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fencepost::Owner;
use sqlx::PgPool;
use tokio::task::JoinSet;

use crate::dice::Dice;
use crate::queue::{TABLE, claim};
use crate::support::{LONG, TOUGH, database, owner, until, within};

async fn fill(pool: &PgPool, keys: i32, items: i32) {
    sqlx::raw_sql(TABLE).execute(pool).await.unwrap();
    let fill = "INSERT INTO item (key, body) SELECT 'key-' || k, k || '/' || i \
                FROM generate_series(1, $2) i, generate_series(1, $1) k ORDER BY i, k";
    sqlx::query(fill).bind(keys).bind(items).execute(pool).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_sleeps_between_claim_and_finish_is_refused_and_the_item_is_worked_again_before_the_next() {
    let (_database, pool) = database().await;
    fill(&pool, 1, 2).await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let first = claim(&a, &pool).await.unwrap().unwrap();
    assert!(claim(&b, &pool).await.unwrap().is_none(), "the key is being worked on");
    // As whoever takes over from a process that was paused for too long does.
    sqlx::query("UPDATE fencepost.owners SET expires_at = 'epoch' WHERE label = 'a'")
        .execute(&pool)
        .await
        .unwrap();
    let again = claim(&b, &pool).await.unwrap().unwrap();
    assert_eq!((again.id, again.body.as_str()), (first.id, "1/1"));
    assert!(again.token() > first.token());
    let late = first.finish(&pool).await.unwrap_err();
    assert!(late.is_lost(), "{late:?}");
    let open: i64 =
        sqlx::query_scalar("SELECT count(*) FROM item WHERE done IS NULL").fetch_one(&pool).await.unwrap();
    assert_eq!(open, 2);
    again.finish(&pool).await.unwrap();
    assert_eq!(claim(&b, &pool).await.unwrap().unwrap().body, "1/2");
}

#[tokio::test(flavor = "multi_thread")]
async fn no_lock_and_no_connection_is_held_over_the_work() {
    let (_database, pool) = database().await;
    fill(&pool, 2, 1).await;
    let owner = owner(&pool, "a", LONG).await;
    let mut claims = Vec::new();
    while let Some(claim) = claim(&owner, &pool).await.unwrap() {
        claims.push(claim);
    }
    assert_eq!(claims.len(), 2, "of different keys beside each other");
    let open = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
                AND xact_start IS NOT NULL AND pid <> pg_backend_pid() AND backend_type = 'client backend'";
    until("no transaction is open", async || {
        (sqlx::query_scalar::<_, i64>(open).fetch_one(&pool).await.unwrap() == 0).then_some(())
    })
    .await;
    for claim in claims {
        claim.finish(&pool).await.unwrap();
    }
}

/// What workers do to keys, as they do it.
#[derive(Default)]
struct Watched {
    working: HashMap<String, i64>,
    done: HashMap<String, Vec<i64>>,
    most_keys: usize,
}

#[tokio::test(flavor = "multi_thread")]
async fn many_workers_that_give_up_now_and_then_keep_the_order_of_each_key() {
    const KEYS: i32 = 5;
    const ITEMS: i32 = 12;
    let (_database, pool) = database().await;
    fill(&pool, KEYS, ITEMS).await;
    let mut owners: Vec<Owner> = Vec::new();
    for label in ["a", "b", "c"] {
        owners.push(owner(&pool, label, TOUGH).await);
    }
    let watched = Arc::new(Mutex::new(Watched::default()));
    let mut workers = JoinSet::new();
    for number in 0..6 {
        let (owner, pool, watched) = (owners[number % 3].clone(), pool.clone(), Arc::clone(&watched));
        workers.spawn(async move {
            let mut dice = Dice::new(u64::try_from(number).unwrap() + 1);
            loop {
                let Some(claim) = claim(&owner, &pool).await.unwrap() else {
                    let left = "SELECT count(*) FROM item WHERE done IS NULL";
                    let left: i64 = sqlx::query_scalar(left).fetch_one(&pool).await.unwrap();
                    if left == 0 {
                        return;
                    }
                    tokio::task::yield_now().await;
                    continue;
                };
                let key = claim.body.split('/').next().unwrap().to_owned();
                {
                    let mut watched = watched.lock().unwrap();
                    let other = watched.working.insert(key.clone(), claim.id);
                    assert!(other.is_none(), "{key} is being worked on twice");
                    watched.most_keys = watched.most_keys.max(watched.working.len());
                }
                tokio::time::sleep(Duration::from_millis(dice.below(4))).await;
                let id = claim.id;
                {
                    let mut watched = watched.lock().unwrap();
                    watched.working.remove(&key);
                    if dice.percent(20) {
                        // It gives up; the item comes again.
                        drop(claim);
                        continue;
                    }
                    watched.done.entry(key).or_default().push(id);
                }
                claim.finish(&pool).await.unwrap();
            }
        });
    }
    let all = async { while workers.join_next().await.map(Result::unwrap).is_some() {} };
    within("everything is done", all).await;
    let watched = watched.lock().unwrap();
    assert_eq!(watched.done.len(), usize::try_from(KEYS).unwrap());
    for (key, done) in &watched.done {
        assert_eq!(done.len(), usize::try_from(ITEMS).unwrap(), "{key}");
        assert!(done.is_sorted(), "{key}: {done:?}");
    }
    assert!(watched.most_keys > 1, "different keys are worked on beside each other");
}
