//! Claims whose work outlives a transaction: attempts, how they end, and what the next one is told.

use std::time::Duration;

use fencepost::claim::{self, Attempt, Begun, Claim, Failed};
use fencepost::{Error, GrantId, LossReason, Owner};
use serde_json::{Value, json};
use sqlx::types::Uuid;
use sqlx::{AssertSqlSafe, PgPool, Row as _};

use crate::cancel::after_polls;
use crate::support::{LONG, SHORT, database, owner, owner_id, terminate, until, until_true, within};

fn claim(key: &str) -> Claim {
    Claim::named(key).unwrap()
}

async fn fresh(owner: &Owner, key: &str) -> Attempt {
    match claim(key).begin(owner).await.unwrap() {
        Begun::Fresh(attempt) => attempt,
        other => panic!("not fresh: {other:?}"),
    }
}

async fn recovered(owner: &Owner, key: &str) -> Attempt {
    until("it can be recovered", async || match claim(key).begin(owner).await.unwrap() {
        Begun::Recovered(attempt, _) => Some(attempt),
        Begun::InProgress { .. } => None,
        other => panic!("neither recovered nor in progress: {other:?}"),
    })
    .await
}

async fn complete(pool: &PgPool, attempt: &Attempt, result: &Value) -> Result<(), Error> {
    let mut tx = pool.begin().await.unwrap();
    sqlx::query("INSERT INTO effect VALUES ($1)")
        .bind(attempt.key().as_str())
        .execute(&mut *tx)
        .await
        .unwrap();
    attempt.complete(&mut tx, result).await?;
    tx.commit().await.unwrap();
    Ok(())
}

async fn with_effects() -> (fencepost::testing::TestDatabase, PgPool) {
    let (database, pool) = database().await;
    sqlx::raw_sql("CREATE TABLE effect (key text)").execute(&pool).await.unwrap();
    (database, pool)
}

async fn effects(pool: &PgPool, key: &str) -> i64 {
    sqlx::query_scalar("SELECT count(*) FROM effect WHERE key = $1").bind(key).fetch_one(pool).await.unwrap()
}

async fn state(pool: &PgPool, key: &str) -> String {
    sqlx::query_scalar("SELECT state FROM fencepost.claims WHERE key = $1")
        .bind(key)
        .fetch_one(pool)
        .await
        .unwrap()
}

/// The owner's time is over, though it beats on: as for a process that is paused.
async fn kill(pool: &PgPool, label: &str) {
    sqlx::query("UPDATE fencepost.owners SET expires_at = 'epoch' WHERE label = $1")
        .bind(label)
        .execute(pool)
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn it_is_done_once_and_its_result_is_replayed() {
    let (_database, pool) = with_effects().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let attempt = fresh(&a, "charge").await;
    assert_eq!((attempt.number(), attempt.failures(), attempt.crashes()), (1, 0, 0));
    assert!(attempt.is_held() && attempt.recovered().is_none() && attempt.remaining() > Duration::ZERO);
    for other in [&a, &b] {
        match claim("charge").begin(other).await.unwrap() {
            Begun::InProgress { by, since, remaining } => {
                assert_eq!(by.as_deref(), Some("a"));
                assert!(since.is_some() && remaining > Duration::from_secs(30));
            }
            other => panic!("{other:?}"),
        }
    }
    let receipt = json!({"receipt": "köln ' \\u0000 \"x\"", "cents": 4_200, "of": [1.5, null, true]});
    complete(&pool, &attempt, &receipt).await.unwrap();
    for other in [&a, &b] {
        match claim("charge").begin(other).await.unwrap() {
            Begun::Replay(replayed) => assert_eq!(replayed, receipt),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(effects(&pool, "charge").await, 1);
    // An end that has been committed is not a loss, whoever looks.
    terminate(&pool, "heartbeat").await;
    assert!(attempt.is_held());
}

// C35: two first requests at once: one does it, the others are told so, and nobody sees an error of the database.
#[tokio::test(flavor = "multi_thread")]
async fn of_many_that_begin_at_once_one_has_the_attempt() {
    let (_database, pool) = with_effects().await;
    let mut owners = Vec::new();
    for n in 0..4 {
        owners.push(owner(&pool, &format!("owner-{n}"), LONG).await);
    }
    for round in 0..15 {
        let key = format!("round-{round}");
        let mut all = Vec::new();
        for owner in owners.iter().cycle().take(12) {
            let (owner, key) = (owner.clone(), key.clone());
            all.push(tokio::spawn(async move { claim(&key).begin(&owner).await.unwrap() }));
        }
        let mut ours = Vec::new();
        for one in all {
            match within("a begin", one).await.unwrap() {
                Begun::Fresh(attempt) => ours.push(attempt),
                Begun::InProgress { .. } => {}
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(ours.len(), 1);
        complete(&pool, &ours[0], &json!(null)).await.unwrap();
    }
}

// The same, step by step: a begin that has not committed yet.
#[tokio::test(flavor = "multi_thread")]
async fn a_begin_beside_another_one_in_flight_is_told_so_or_waits_for_a_new_key() {
    let (database, pool) = with_effects().await;
    let b = owner(&pool, "b", LONG).await;
    let a: Uuid =
        sqlx::query_scalar("SELECT fencepost.owner_start('a', '1 minute')").fetch_one(&pool).await.unwrap();
    for commits in [true, false] {
        let [known, new] = ["known", "new"].map(|what| format!("{what}, {commits}"));
        let mut tx = pool.begin().await.unwrap();
        assert!(claim(&known).kind("job").unwrap().enqueue(&mut tx).await.unwrap());
        tx.commit().await.unwrap();
        let mut first = crate::support::connect(&database.options()).await;
        sqlx::raw_sql("BEGIN").execute(&mut first).await.unwrap();
        for key in [&known, &new] {
            let begin = "SELECT outcome FROM fencepost.claim_begin($1, $2, gen_random_uuid())";
            let outcome: String =
                sqlx::query_scalar(begin).bind(key).bind(a).fetch_one(&mut first).await.unwrap();
            assert_eq!(outcome, "fresh");
        }
        // Whose row is there is answered at once.
        let beside = within("a begin beside it", claim(&known).begin(&b)).await.unwrap();
        assert!(
            matches!(beside, Begun::InProgress { remaining, .. } if remaining == Duration::ZERO),
            "{beside:?}"
        );
        // Of a new key there is nothing to see yet.
        let waiting = tokio::spawn({
            let (claim, b) = (claim(&new), b.clone());
            async move { claim.begin(&b).await.unwrap() }
        });
        until_true(
            &pool,
            "it waits",
            "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')",
        )
        .await;
        sqlx::raw_sql(if commits { "COMMIT" } else { "ROLLBACK" }).execute(&mut first).await.unwrap();
        let waited = within("the other begin", waiting).await.unwrap();
        let again = claim(&known).begin(&b).await.unwrap();
        for begun in [waited, again] {
            match begun {
                Begun::InProgress { by, .. } if commits => assert_eq!(by.as_deref(), Some("a")),
                Begun::Fresh(attempt) if !commits => assert!(attempt.release().await.unwrap()),
                other => panic!("{commits}: {other:?}"),
            }
        }
    }
}

// A begin of a new key may wait for another one that is then rolled back: its owner is judged after that, and its token
// is drawn after that.
#[tokio::test(flavor = "multi_thread")]
async fn a_begin_that_waited_is_judged_when_the_row_is_its_own() {
    let (_database, pool) = with_effects().await;
    let a = owner(&pool, "a", LONG).await;
    let id = owner_id(&pool, "a").await;
    for dies in [false, true] {
        let mut first = pool.begin().await.unwrap();
        sqlx::query("SELECT fencepost.once('new')").execute(&mut *first).await.unwrap();
        let waiting = tokio::spawn({
            let pool = pool.clone();
            async move {
                let begin = "SELECT token FROM fencepost.claim_begin('new', $1, gen_random_uuid())";
                sqlx::query_scalar::<_, i64>(begin).bind(id).fetch_one(&pool).await
            }
        });
        until_true(
            &pool,
            "it waits",
            "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')",
        )
        .await;
        let later = fresh(&a, &format!("later-{dies}")).await;
        if dies {
            let die = "UPDATE fencepost.owners SET expires_at = 'epoch' WHERE id = $1";
            sqlx::query(die).bind(id).execute(&pool).await.unwrap();
        }
        let rolled_back: String =
            sqlx::query_scalar("SELECT clock_timestamp()::text").fetch_one(&pool).await.unwrap();
        first.rollback().await.unwrap();
        let begun = within("the begin", waiting).await.unwrap();
        if dies {
            let refused = begun.unwrap_err();
            assert_eq!(refused.as_database_error().unwrap().code().unwrap(), "LK003", "{refused}");
            let left: i64 = sqlx::query_scalar("SELECT count(*) FROM fencepost.claims WHERE key = 'new'")
                .fetch_one(&pool)
                .await
                .unwrap();
            assert_eq!(left, 0, "begun for the dead");
        } else {
            assert!(begun.unwrap() > later.token().as_i64(), "drawn before the row was its own");
            let since = "SELECT started_at > $1::timestamptz FROM fencepost.claims WHERE key = 'new'";
            let since: bool = sqlx::query_scalar(since).bind(&rolled_back).fetch_one(&pool).await.unwrap();
            assert!(since, "it has not run while it waited");
            sqlx::query("DELETE FROM fencepost.claims WHERE key = 'new'").execute(&pool).await.unwrap();
        }
    }
}

// C36: the same key with another request is never answered with the result of the first.
#[tokio::test(flavor = "multi_thread")]
async fn another_request_under_the_same_key_is_a_mismatch_at_any_time() {
    let (_database, pool) = with_effects().await;
    let a = owner(&pool, "a", LONG).await;
    let (right, wrong) = (claim("key").fingerprint("42 cents"), claim("key").fingerprint("43 cents"));
    let mismatch = async || matches!(wrong.begin(&a).await.unwrap(), Begun::Mismatch);
    let attempt = right.begin(&a).await.unwrap().into_attempt().unwrap();
    assert!(mismatch().await, "running");
    let mut tx = pool.begin().await.unwrap();
    assert_eq!(attempt.fail(&mut tx, "no", Duration::ZERO).await.unwrap(), Failed::Ready);
    tx.commit().await.unwrap();
    assert!(mismatch().await, "failed");
    let attempt = right.begin(&a).await.unwrap().into_attempt().unwrap();
    assert_eq!(attempt.number(), 2, "the mismatch was no attempt");
    complete(&pool, &attempt, &json!("done")).await.unwrap();
    assert!(mismatch().await, "done");
    assert!(matches!(right.begin(&a).await.unwrap(), Begun::Replay(_)));
    // Who gives none is not compared.
    assert!(matches!(claim("key").begin(&a).await.unwrap(), Begun::Replay(_)));
    let stored: String =
        sqlx::query_scalar("SELECT fingerprint FROM fencepost.claims").fetch_one(&pool).await.unwrap();
    assert!(stored.len() == 64 && !stored.contains("cents"), "a digest, not the request");
    // Also if both are the first.
    let a = owner_id(&pool, "a").await;
    let begin = "SELECT outcome FROM fencepost.claim_begin('raced', $1, gen_random_uuid(), $2)";
    let mut first = pool.begin().await.unwrap();
    let fresh: String = sqlx::query_scalar(begin).bind(a).bind("one").fetch_one(&mut *first).await.unwrap();
    let waiting = tokio::spawn({
        let pool = pool.clone();
        async move { sqlx::query_scalar::<_, String>(begin).bind(a).bind("another").fetch_one(&pool).await }
    });
    until_true(
        &pool,
        "it waits",
        "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')",
    )
    .await;
    first.commit().await.unwrap();
    let other = within("the other begin", waiting).await.unwrap().unwrap();
    assert_eq!((fresh.as_str(), other.as_str()), ("fresh", "mismatch"));
}

// C32: whoever comes back late cannot end the attempt of another one, and what it wrote goes with it.
#[tokio::test(flavor = "multi_thread")]
async fn a_stale_attempt_is_refused_and_its_transaction_with_it() {
    let (_database, pool) = with_effects().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let late = fresh(&a, "charge").await;
    kill(&pool, "a").await;
    let next = match claim("charge").begin(&b).await.unwrap() {
        Begun::Recovered(attempt, previous) => {
            assert_eq!(previous.by.as_deref(), Some("a"));
            assert_eq!(previous.token, Some(late.token()));
            assert!(previous.since.is_some());
            attempt
        }
        other => panic!("{other:?}"),
    };
    assert!(next.token() > late.token());
    assert_eq!((next.number(), next.failures(), next.crashes()), (2, 0, 1));
    // The database refuses it, also where the process has not heard yet.
    for call in ["claim_complete($1, $2, $3, '1')", "claim_fail($1, $2, $3, 'x')", "claim_fence($1, $2, $3)"]
    {
        let mut tx = pool.begin().await.unwrap();
        sqlx::query("INSERT INTO effect VALUES ('charge')").execute(&mut *tx).await.unwrap();
        let refused = sqlx::query(AssertSqlSafe(format!("SELECT fencepost.{call}")))
            .bind("charge")
            .bind(late.token())
            .bind(late.grant().id)
            .execute(&mut *tx)
            .await
            .map_err(Error::from)
            .unwrap_err();
        match refused {
            Error::StaleFence { name, token, current, .. } => {
                assert_eq!((name.as_str(), token, current), ("charge", late.token(), Some(next.token())));
            }
            other => panic!("{call}: {other:?}"),
        }
        let commit = sqlx::raw_sql("COMMIT").execute(&mut *tx).await;
        assert!(commit.is_ok(), "which is a rollback");
    }
    let refused = complete(&pool, &late, &json!("late")).await.unwrap_err();
    assert!(refused.is_lost(), "{refused:?}");
    within("the loss", late.lost()).await;
    assert_eq!(effects(&pool, "charge").await, 0);
    drop(late);
    complete(&pool, &next, &json!("in time")).await.unwrap();
    assert_eq!(effects(&pool, "charge").await, 1);
    assert!(
        matches!(claim("charge").begin(&a).await.unwrap(), Begun::Replay(Value::String(s)) if s == "in time")
    );
}

// C33: however long it takes: whoever beats is at it.
#[tokio::test(flavor = "multi_thread")]
async fn no_run_time_is_too_long_while_the_owner_beats() {
    let (_database, pool) = with_effects().await;
    let (a, b) = (owner(&pool, "a", SHORT).await, owner(&pool, "b", LONG).await);
    let attempt = fresh(&a, "video").await;
    until_true(
        &pool,
        "it has run for several times its ttl",
        "SELECT clock_timestamp() > c.started_at + 4 * o.ttl FROM fencepost.claims c JOIN fencepost.owners o ON o.id = c.owner",
    )
    .await;
    assert!(attempt.is_held());
    assert!(matches!(claim("video").begin(&b).await.unwrap(), Begun::InProgress { .. }));
    // As if for a day.
    sqlx::raw_sql("UPDATE fencepost.claims SET started_at = started_at - interval '1 day'")
        .execute(&pool)
        .await
        .unwrap();
    assert!(matches!(claim("video").begin(&b).await.unwrap(), Begun::InProgress { .. }));
    complete(&pool, &attempt, &json!(null)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_end_that_does_not_commit_is_no_end() {
    let (_database, pool) = with_effects().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let attempt = fresh(&a, "charge").await;
    let mut tx = pool.begin().await.unwrap();
    attempt.complete(&mut tx, "first").await.unwrap();
    tx.rollback().await.unwrap();
    assert!(matches!(claim("charge").begin(&b).await.unwrap(), Begun::InProgress { .. }));
    // Again, in another transaction, by the same attempt.
    complete(&pool, &attempt, &json!("second")).await.unwrap();
    assert!(
        matches!(claim("charge").begin(&b).await.unwrap(), Begun::Replay(Value::String(s)) if s == "second")
    );
    // And no third time: nothing is done twice.
    let twice = complete(&pool, &attempt, &json!("third")).await.unwrap_err();
    assert!(matches!(twice, Error::Lost { reason: LossReason::Settled, .. }), "{twice:?}");
    assert_eq!(effects(&pool, "charge").await, 1);

    // Not committed, and then dropped: given back, for the next one to look.
    let attempt = fresh(&a, "other").await;
    let mut tx = pool.begin().await.unwrap();
    attempt.complete(&mut tx, "lost").await.unwrap();
    drop(attempt);
    // While it may still commit, nobody else begins, and nobody waits for it either.
    assert!(matches!(claim("other").begin(&b).await.unwrap(), Begun::InProgress { .. }));
    assert!(within("another release", fresh(&a, "third").await.release()).await.unwrap());
    drop(tx);
    assert_eq!(recovered(&b, "other").await.crashes(), 1);
}

// What the fence is to a lease.
#[tokio::test(flavor = "multi_thread")]
async fn a_recovery_waits_for_an_open_end_of_the_dead() {
    let (_database, pool) = with_effects().await;
    let b = owner(&pool, "b", LONG).await;
    for (round, commits) in [true, false].into_iter().enumerate() {
        let label = format!("a-{round}");
        let (a, key) = (owner(&pool, &label, LONG).await, format!("charge-{round}"));
        let attempt = fresh(&a, &key).await;
        let mut tx = pool.begin().await.unwrap();
        attempt.complete(&mut tx, "late").await.unwrap();
        kill(&pool, &label).await;
        match within("a begin", claim(&key).begin(&b)).await.unwrap() {
            Begun::InProgress { remaining, .. } => assert_eq!(remaining, Duration::ZERO),
            other => panic!("{other:?}"),
        }
        if commits {
            tx.commit().await.unwrap();
            assert!(matches!(claim(&key).begin(&b).await.unwrap(), Begun::Replay(_)));
        } else {
            tx.rollback().await.unwrap();
            assert_eq!(recovered(&b, &key).await.crashes(), 1);
        }
        // The same for a write that ends nothing.
        let key = format!("fenced-{round}");
        let a = owner(&pool, &format!("{label}-again"), LONG).await;
        let attempt = fresh(&a, &key).await;
        let mut tx = pool.begin().await.unwrap();
        attempt.fence(&mut tx).await.unwrap();
        kill(&pool, &format!("{label}-again")).await;
        assert!(matches!(claim(&key).begin(&b).await.unwrap(), Begun::InProgress { .. }));
        tx.rollback().await.unwrap();
        assert!(recovered(&b, &key).await.is_held());
    }
}

// A process that is paused in its last transaction blocks the next attempt no longer than its ttl.
#[tokio::test(flavor = "multi_thread")]
async fn an_idle_end_is_ended_after_the_ttl() {
    let (_database, pool) = with_effects().await;
    let (a, b) = (owner(&pool, "a", SHORT).await, owner(&pool, "b", LONG).await);
    let attempt = fresh(&a, "charge").await;
    let mut tx = pool.begin().await.unwrap();
    sqlx::query("INSERT INTO effect VALUES ('charge')").execute(&mut *tx).await.unwrap();
    attempt.complete(&mut tx, "late").await.unwrap();
    kill(&pool, "a").await;
    let next = recovered(&b, "charge").await;
    assert!(tx.commit().await.is_err(), "its session was ended");
    assert_eq!(effects(&pool, "charge").await, 0);
    complete(&pool, &next, &json!(1)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn it_ends_in_transactions_of_any_isolation() {
    let (_database, pool) = with_effects().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    for isolation in ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"] {
        let begin = async |attempt: &Attempt| {
            let mut tx = pool.begin().await.unwrap();
            let level = AssertSqlSafe(format!("SET TRANSACTION ISOLATION LEVEL {isolation}"));
            sqlx::raw_sql(level).execute(&mut *tx).await.unwrap();
            let seen = "SELECT count(*) FROM fencepost.claims WHERE key = $1";
            let seen: i64 =
                sqlx::query_scalar(seen).bind(attempt.key().as_str()).fetch_one(&mut *tx).await.unwrap();
            assert_eq!(seen, 1);
            tx
        };
        let attempt = fresh(&a, &format!("in time, {isolation}")).await;
        let mut tx = begin(&attempt).await;
        // Beats since the snapshot change nothing.
        let beat = "SELECT expires_at > clock_timestamp() + ttl / 2 FROM fencepost.owners WHERE label = 'a'";
        sqlx::query("SELECT fencepost.heartbeat($1)")
            .bind(owner_id(&pool, "a").await)
            .execute(&pool)
            .await
            .unwrap();
        until_true(&pool, "a beat", beat).await;
        attempt.complete(&mut tx, isolation).await.unwrap();
        tx.commit().await.unwrap();

        // Taken over since the snapshot: refused, or to be run again, and refused then.
        let attempt = fresh(&a, &format!("late, {isolation}")).await;
        let mut tx = begin(&attempt).await;
        let key = attempt.key().as_str();
        let dead = "UPDATE fencepost.claims SET owner = gen_random_uuid() WHERE key = $1";
        sqlx::query(dead).bind(key).execute(&pool).await.unwrap();
        let next = recovered(&b, key).await;
        let refused = attempt.complete(&mut tx, isolation).await.unwrap_err();
        if isolation == "READ COMMITTED" {
            assert!(matches!(refused, Error::StaleFence { .. }), "{refused:?}");
        } else {
            assert!(matches!(refused, Error::SerializationFailure { .. }), "{refused:?}");
            tx.rollback().await.unwrap();
            let refused = complete(&pool, &attempt, &json!(1)).await.unwrap_err();
            assert!(matches!(refused, Error::StaleFence { .. }), "{refused:?}");
        }
        drop(next);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn failures_and_crashes_are_counted_apart_and_poison_is_seen() {
    let (_database, pool) = with_effects().await;
    let a = owner(&pool, "a", LONG).await;
    let job = claim("job").kind("video").unwrap().max_failures(2).unwrap().max_crashes(3).unwrap();
    let begin = async || {
        until("ready", async || match job.begin(&a).await.unwrap() {
            Begun::Fresh(attempt) | Begun::Recovered(attempt, _) => Some(Ok(attempt)),
            Begun::Poison(poison) => Some(Err(poison)),
            _ => None,
        })
        .await
    };
    let fail = async |attempt: &Attempt, why: &str| {
        let mut tx = pool.begin().await.unwrap();
        let failed = attempt.fail(&mut tx, why, Duration::ZERO).await.unwrap();
        tx.commit().await.unwrap();
        failed
    };
    // Two crashes and a failure: neither limit is reached.
    drop(begin().await.unwrap());
    drop(begin().await.unwrap());
    let attempt = begin().await.unwrap();
    assert_eq!((attempt.number(), attempt.failures(), attempt.crashes()), (3, 0, 2));
    assert_eq!(fail(&attempt, "no such file\0").await, Failed::Ready);
    // Given back: counts as nothing; and the failure before had said how it ended.
    let attempt = begin().await.unwrap();
    assert!(attempt.recovered().is_none());
    assert!(attempt.release().await.unwrap());
    let attempt = begin().await.unwrap();
    assert_eq!((attempt.number(), attempt.failures(), attempt.crashes()), (5, 1, 2));
    assert_eq!(fail(&attempt, &"x".repeat(9_000)).await, Failed::Poison);
    let poison = begin().await.unwrap_err();
    assert_eq!((poison.failures, poison.crashes, poison.by.as_deref()), (2, 2, Some("a")));
    assert_eq!(poison.error.as_ref().unwrap().len(), 8_192);

    // By crashes, found by whoever comes next.
    let other = claim("other").max_crashes(1).unwrap();
    let attempt = other.begin(&a).await.unwrap().into_attempt().unwrap();
    kill(&pool, "a").await;
    let b = owner(&pool, "b", LONG).await;
    let Begun::Poison(poison) = other.begin(&b).await.unwrap() else { panic!("it has crashed too often") };
    assert_eq!((poison.failures, poison.crashes), (0, 1));
    assert!(complete(&pool, &attempt, &json!(1)).await.unwrap_err().is_lost());
    drop(attempt);

    let mut conn = pool.acquire().await.unwrap();
    let all = claim::poisoned(&mut conn, None, 10).await.unwrap();
    assert_eq!(all.iter().map(|poison| poison.key.as_str()).collect::<Vec<_>>(), ["job", "other"]);
    assert_eq!(all[0].kind.as_deref(), Some("video"));
    assert_eq!(claim::poisoned(&mut conn, Some("video"), 10).await.unwrap(), all[..1]);
    assert!(claim::poisoned(&mut conn, Some("audio"), 10).await.unwrap().is_empty());
    // A person decides.
    assert!(job.retry(&mut conn).await.unwrap() && !job.retry(&mut conn).await.unwrap());
    assert!(!claim("nothing").retry(&mut conn).await.unwrap());
    drop(conn);
    let attempt = job.begin(&b).await.unwrap().into_attempt().unwrap();
    assert_eq!((attempt.failures(), attempt.crashes()), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_attempt_is_recovered_and_a_released_one_never_was() {
    let (_database, pool) = with_effects().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let attempt = fresh(&a, "charge").await;
    assert!(attempt.release().await.unwrap());
    let attempt = fresh(&b, "charge").await;
    assert_eq!(attempt.number(), 2);
    drop(attempt);
    let attempt = recovered(&a, "charge").await;
    assert_eq!(attempt.crashes(), 1);
    // What is unclear stays unclear until somebody says how it is.
    assert!(attempt.release().await.unwrap());
    let attempt = recovered(&a, "charge").await;
    let mut tx = pool.begin().await.unwrap();
    attempt.fail(&mut tx, "looked; nothing was charged", Duration::ZERO).await.unwrap();
    tx.commit().await.unwrap();
    let attempt = fresh(&b, "charge").await;
    // With its own transaction open it is given back when that has ended.
    let mut tx = pool.begin().await.unwrap();
    attempt.complete(&mut tx, "no").await.unwrap();
    assert!(within("a release", attempt.release()).await.unwrap());
    assert_eq!(state(&pool, "charge").await, "running");
    tx.rollback().await.unwrap();
    let attempt = until("given back", async || claim("charge").begin(&a).await.unwrap().into_attempt()).await;
    assert!(attempt.recovered().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_begin_dropped_after_any_poll_leaves_nothing_behind() {
    let (_database, pool) = with_effects().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let mut complete = false;
    for polls in 0.. {
        let key = format!("polls-{polls}");
        let begun = after_polls(polls, claim(&key).begin(&a)).await;
        complete = begun.is_some();
        if let Some(begun) = begun {
            assert!(begun.unwrap().into_attempt().unwrap().release().await.unwrap());
        }
        // Nobody has ever had it in hand, so it had no effects.
        let next = until("free", async || match claim(&key).begin(&b).await.unwrap() {
            Begun::Fresh(attempt) => Some(attempt),
            Begun::InProgress { .. } => None,
            other => panic!("{other:?}"),
        })
        .await;
        assert_eq!((next.crashes(), next.failures()), (0, 0));
        if complete {
            break;
        }
    }
    assert!(complete);
}

// A grant whose answer never came belongs to nobody, and its owner goes on beating.
#[tokio::test(flavor = "multi_thread")]
async fn what_nobody_here_knows_is_given_back() {
    let (_database, pool) = with_effects().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let known = fresh(&a, "known").await;
    let unknown = "SELECT outcome FROM fencepost.claim_begin('unknown', $1, gen_random_uuid())";
    let outcome: String =
        sqlx::query_scalar(unknown).bind(owner_id(&pool, "a").await).fetch_one(&pool).await.unwrap();
    assert_eq!(outcome, "fresh");
    // Whatever makes the owner look.
    assert!(terminate(&pool, "heartbeat").await + terminate(&pool, "claim_begin").await > 0);
    drop(fresh(&a, "another").await);
    let next = recovered(&b, "unknown").await;
    assert_eq!(next.crashes(), 0, "it is not known to have crashed");
    assert!(known.is_held());
    complete(&pool, &known, &json!(1)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_ended_from_outside_is_noticed() {
    let (_database, pool) = with_effects().await;
    let a = owner(&pool, "a", LONG).await;
    let attempt = fresh(&a, "charge").await;
    sqlx::raw_sql("UPDATE fencepost.claims SET state = 'ready'").execute(&pool).await.unwrap();
    let mut tx = pool.begin().await.unwrap();
    let refused = attempt.fence(&mut tx).await.unwrap_err();
    assert!(matches!(refused, Error::Lost { reason: LossReason::Settled, .. }), "{refused:?}");
    drop(tx);
    assert!(!attempt.is_held() && attempt.remaining() == Duration::ZERO);
    assert!(!attempt.release().await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn pruning_forgets_what_is_done_and_nothing_else() {
    let (_database, pool) = with_effects().await;
    let a = owner(&pool, "a", LONG).await;
    let mut tx = pool.begin().await.unwrap();
    assert!(claim("once").once(&mut tx).await.unwrap());
    assert!(claim("waiting").kind("mail").unwrap().enqueue(&mut tx).await.unwrap());
    tx.commit().await.unwrap();
    let running = fresh(&a, "running").await;
    let poison = claim("poison").max_failures(1).unwrap().begin(&a).await.unwrap().into_attempt().unwrap();
    let mut tx = pool.begin().await.unwrap();
    assert_eq!(poison.fail(&mut tx, "x", Duration::ZERO).await.unwrap(), Failed::Poison);
    tx.commit().await.unwrap();
    complete(&pool, &fresh(&a, "done").await, &json!(1)).await.unwrap();
    sqlx::raw_sql("UPDATE fencepost.claims SET started_at = started_at - interval '1 year', due_at = due_at - interval '1 year', \
                   ended_at = ended_at - interval '1 hour'")
        .execute(&pool)
        .await
        .unwrap();
    let mut conn = pool.acquire().await.unwrap();
    assert_eq!(claim::prune(&mut conn, Duration::from_hours(2)).await.unwrap(), 0);
    // One that somebody is at is there the next time.
    let mut at_it = pool.begin().await.unwrap();
    sqlx::raw_sql("SELECT FROM fencepost.claims WHERE key = 'done' FOR SHARE")
        .execute(&mut *at_it)
        .await
        .unwrap();
    assert_eq!(within("pruning", claim::prune(&mut conn, Duration::from_mins(30))).await.unwrap(), 1);
    drop(at_it);
    until("the rest", async || {
        (claim::prune(&mut conn, Duration::from_mins(30)).await.unwrap() == 1).then_some(())
    })
    .await;
    let left: Vec<String> =
        sqlx::query_scalar("SELECT key FROM fencepost.claims ORDER BY key").fetch_all(&pool).await.unwrap();
    assert_eq!(left, ["poison", "running", "waiting"]);
    assert!(running.is_held());
    // Tokens go on rising for a key that was forgotten.
    let before = running.token();
    assert!(fresh(&a, "done").await.token() > before);
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_arguments_never_reach_the_database() {
    let (_database, pool) = with_effects().await;
    let a = owner(&pool, "a", LONG).await;
    let misuse =
        |refused: Result<Claim, Error>| assert!(matches!(refused, Err(Error::Misuse { .. })), "{refused:?}");
    for bad in ["", "nul\0", "line\nbreak", &"x".repeat(256)] {
        misuse(Claim::named(bad));
        misuse(claim("x").kind(bad));
    }
    misuse(claim("x").max_failures(0));
    misuse(claim("x").max_crashes(0));
    misuse(claim("x").max_crashes(u32::MAX));
    misuse(claim("x").delay(Claim::MAX_DELAY + Duration::from_micros(1)));
    misuse(claim("x").payload("a\0b"));
    misuse(claim("x").payload(&"x".repeat(Claim::MAX_JSON_BYTES)));
    let largest = "x".repeat(Claim::MAX_JSON_BYTES - 2);
    let attempt = claim("x").payload(&largest).unwrap().begin(&a).await.unwrap().into_attempt().unwrap();
    assert_eq!(attempt.payload().unwrap(), Some(largest));
    assert!(matches!(attempt.payload::<u32>(), Err(Error::Database { .. })), "it is text");
    let mut tx = pool.begin().await.unwrap();
    for refused in [
        attempt.complete(&mut tx, &"x".repeat(Claim::MAX_JSON_BYTES)).await.unwrap_err(),
        attempt.complete(&mut tx, "a\0b").await.unwrap_err(),
        attempt.fail(&mut tx, "x", Claim::MAX_DELAY * 2).await.unwrap_err(),
        claim("y").enqueue(&mut tx).await.unwrap_err(),
        claim::prune(&mut tx, Duration::MAX).await.unwrap_err(),
    ] {
        assert!(matches!(refused, Error::Misuse { .. }), "{refused:?}");
    }
    // What is largest as text, and as what the database makes of it.
    attempt.complete(&mut tx, &vec![1; Claim::MAX_JSON_BYTES / 2 - 1]).await.unwrap();
    tx.commit().await.unwrap();
}

// The same from psql, with nothing but functions.
#[tokio::test(flavor = "multi_thread")]
async fn psql_alone_can_claim() {
    let (_database, pool) = with_effects().await;
    let id: Uuid = sqlx::query_scalar("SELECT fencepost.owner_start('psql', '1 minute')")
        .fetch_one(&pool)
        .await
        .unwrap();
    let grant = Uuid::new_v4();
    let begin = "SELECT * FROM fencepost.claim_begin('report', $1, $2, 'print')";
    for _ in 0..2 {
        // Asked again: the same attempt.
        let row = sqlx::query(begin).bind(id).bind(grant).fetch_one(&pool).await.unwrap();
        assert_eq!((row.get("outcome"), row.get("attempts")), ("fresh", 1));
    }
    let refused = sqlx::query(begin).bind(id).bind(Uuid::new_v4()).fetch_one(&pool).await.unwrap();
    assert_eq!((refused.get("outcome"), refused.get::<Option<i64>, _>("token")), ("in_progress", None));
    let wrong = [(grant, 1_000_000), (Uuid::new_v4(), 1)];
    for (grant, token) in wrong {
        let complete = "SELECT fencepost.claim_complete('report', $1, $2, '7')";
        let refused = sqlx::query(complete).bind(token).bind(grant).execute(&pool).await.unwrap_err();
        assert!(matches!(Error::from(refused), Error::StaleFence { .. }));
    }
    let complete = "SELECT fencepost.claim_complete('report', (SELECT token FROM fencepost.claims), $1, '7')";
    sqlx::query(complete).bind(grant).execute(&pool).await.unwrap();
    let row =
        sqlx::query("SELECT outcome, result::text FROM fencepost.claim_begin('report', $1, $2, 'print')")
            .bind(id)
            .bind(GrantId::from(grant))
            .fetch_one(&pool)
            .await
            .unwrap();
    assert_eq!((row.get("outcome"), row.get("result")), ("replay", "7"));
}
