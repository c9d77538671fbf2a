//! `once`: in the caller's transaction, one caller and no other.

use fencepost::claim::{Begun, Claim};
use fencepost::{Error, Isolation, transaction};
use sqlx::PgPool;

use crate::support::{LONG, database, owner, until_true, within};

fn claim(key: &str) -> Claim {
    Claim::named(key).unwrap()
}

async fn someone_waits(pool: &PgPool) {
    until_true(
        pool,
        "somebody waits for a lock",
        "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')",
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_many_callers_one_does_it() {
    let (_database, pool) = database().await;
    sqlx::raw_sql("CREATE TABLE effect (key text)").execute(&pool).await.unwrap();
    for isolation in [Isolation::SessionDefault, Isolation::RepeatableRead, Isolation::Serializable] {
        let mut callers = Vec::new();
        for _ in 0..8 {
            let pool = pool.clone();
            callers.push(tokio::spawn(async move {
                let mut ours = 0;
                for round in 0..20 {
                    let key = format!("{isolation:?}/{round}");
                    let done = transaction(&pool, isolation, |tx| {
                        let key = key.clone();
                        Box::pin(async move {
                            let ours = claim(&key).once(tx).await?;
                            if ours {
                                sqlx::query("INSERT INTO effect VALUES ($1)")
                                    .bind(&key)
                                    .execute(&mut **tx)
                                    .await?;
                            }
                            Ok::<_, Error>(ours)
                        })
                    });
                    ours += usize::from(done.await.unwrap());
                }
                ours
            }));
        }
        let mut all = 0;
        for caller in callers {
            all += within("a caller", caller).await.unwrap();
        }
        assert_eq!(all, 20, "{isolation:?}");
    }
    let effects: (i64, i64) =
        sqlx::query_as("SELECT count(*), count(DISTINCT key) FROM effect").fetch_one(&pool).await.unwrap();
    assert_eq!(effects, (60, 60));
}

// C35: the second waits for the outcome of the first, and gets an answer, not a unique violation.
#[tokio::test(flavor = "multi_thread")]
async fn a_second_caller_waits_for_the_outcome_of_the_first() {
    let (_database, pool) = database().await;
    for commits in [true, false] {
        let key = format!("key/{commits}");
        let mut first = pool.begin().await.unwrap();
        assert!(claim(&key).once(&mut first).await.unwrap());
        assert!(!claim(&key).once(&mut first).await.unwrap(), "not twice in one transaction either");
        let second = tokio::spawn({
            let (pool, key) = (pool.clone(), key.clone());
            async move {
                let mut tx = pool.begin().await.unwrap();
                let ours = claim(&key).once(&mut tx).await.unwrap();
                tx.commit().await.unwrap();
                ours
            }
        });
        someone_waits(&pool).await;
        assert!(!second.is_finished());
        if commits {
            first.commit().await.unwrap();
        } else {
            first.rollback().await.unwrap();
        }
        assert_eq!(within("the second", second).await.unwrap(), !commits);
        let mut third = pool.begin().await.unwrap();
        assert!(!claim(&key).once(&mut third).await.unwrap());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_old_snapshot_is_told_to_run_again() {
    let (_database, pool) = database().await;
    for isolation in ["REPEATABLE READ", "SERIALIZABLE"] {
        let key = format!("key/{isolation}");
        let mut old = pool.begin().await.unwrap();
        let level = sqlx::AssertSqlSafe(format!("SET TRANSACTION ISOLATION LEVEL {isolation}"));
        sqlx::raw_sql(level).execute(&mut *old).await.unwrap();
        sqlx::raw_sql("SELECT FROM pg_class LIMIT 1").execute(&mut *old).await.unwrap();
        let mut first = pool.begin().await.unwrap();
        assert!(claim(&key).once(&mut first).await.unwrap());
        first.commit().await.unwrap();
        let refused = claim(&key).once(&mut old).await.unwrap_err();
        assert!(matches!(refused, Error::SerializationFailure { .. }), "{refused:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_answers_which_are_ours() {
    let (_database, pool) = database().await;
    let odd = ["o'brien", "back\\slash", "\\u0000", "köln/日本", "$1"];
    let mut tx = pool.begin().await.unwrap();
    assert!(Claim::once_each(&mut tx, &[]).await.unwrap().is_empty());
    let claims: Vec<Claim> = odd.iter().map(|key| claim(key)).collect();
    assert_eq!(Claim::once_each(&mut tx, &claims).await.unwrap().len(), odd.len());
    for one in &claims {
        assert!(!one.once(&mut tx).await.unwrap(), "{}", one.key());
    }
    tx.commit().await.unwrap();
    let mut tx = pool.begin().await.unwrap();
    let claims = [claim("z"), claim("o'brien"), claim("a"), claim("z")];
    let ours = Claim::once_each(&mut tx, &claims).await.unwrap();
    let keys: Vec<&str> = ours.iter().map(|claim| claim.key().as_str()).collect();
    assert_eq!(keys, ["a", "z"], "each once, in the order of the keys");
}

// In whatever order the keys come, they are taken in one: no deadlock.
#[tokio::test(flavor = "multi_thread")]
async fn batches_with_the_same_keys_wait_and_never_deadlock() {
    let (_database, pool) = database().await;
    let keys: Vec<Claim> = (0..40).map(|n| claim(&format!("key-{n}"))).collect();
    let backwards: Vec<Claim> = keys.iter().rev().cloned().collect();
    // The first has the last key by then: whoever begins with that one holds nothing that the first wants.
    for _ in 0..20 {
        let mut both = Vec::new();
        for claims in [keys.clone(), backwards.clone()] {
            let pool = pool.clone();
            both.push(tokio::spawn(async move {
                let mut tx = pool.begin().await.unwrap();
                let ours = Claim::once_each(&mut tx, &claims).await.map(|ours| ours.len());
                tx.rollback().await.unwrap();
                ours
            }));
        }
        for one in both {
            assert_eq!(within("a batch", one).await.unwrap().unwrap(), 40);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_begun_is_not_done_by_once_and_the_other_way_round() {
    let (_database, pool) = database().await;
    let a = owner(&pool, "a", LONG).await;
    let attempt = claim("begun").begin(&a).await.unwrap().into_attempt().unwrap();
    let mut tx = pool.begin().await.unwrap();
    assert!(!claim("begun").once(&mut tx).await.unwrap());
    assert!(claim("once").once(&mut tx).await.unwrap());
    tx.commit().await.unwrap();
    assert!(matches!(claim("once").begin(&a).await.unwrap(), Begun::Replay(serde_json::Value::Null)));
    assert!(attempt.is_held());
}
