//! Advisory locks of a transaction: when they are freed, how long they are waited for, and that the caller's
//! transaction and settings are left as they were.

use std::time::Duration;

use fencepost::{AdvisoryLock, Error, Key, Wait};
use sqlx::postgres::{PgPoolOptions, PgTransaction};
use sqlx::{AssertSqlSafe, Executor as _, PgPool, Row as _};

use crate::advisory::advisory_locks;
use crate::cancel::after_polls;
use crate::support::{database, until, within};

fn exclusive(number: i64) -> AdvisoryLock {
    AdvisoryLock::exclusive(Key::from_i64(number))
}

fn shared(number: i64) -> AdvisoryLock {
    AdvisoryLock::shared(Key::from_i64(number))
}

async fn show(tx: &mut PgTransaction<'_>, setting: &str) -> String {
    tx.fetch_one(AssertSqlSafe(format!("SHOW {setting}"))).await.unwrap().get(0)
}

/// Held by somebody else until the result is dropped.
async fn somebody_holds(pool: &PgPool, number: i64) -> PgTransaction<'static> {
    exclusive(number).begin(pool, Wait::no()).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn shared_goes_with_shared_and_nothing_with_exclusive() {
    let (_database, pool) = database().await;
    for (first, second, both) in [
        (exclusive(1), exclusive(1), false),
        (exclusive(1), shared(1), false),
        (shared(1), exclusive(1), false),
        (shared(1), shared(1), true),
        (exclusive(1), shared(2), true),
    ] {
        let holder = first.begin(&pool, Wait::no()).await.unwrap();
        let mut tx = pool.begin().await.unwrap();
        assert_eq!(second.try_lock(&mut tx).await.unwrap(), both, "{first:?} {second:?}");
        for wait in [Wait::no(), short()] {
            let locked = second.lock(&mut tx, wait).await;
            assert_eq!(locked.is_ok(), both, "{first:?} {second:?}");
            if let Err(error) = locked {
                assert!(matches!(error, Error::Busy { .. }) && error.is_timeout(), "{error:?}");
            }
            let begun = second.begin(&pool, wait).await;
            assert_eq!(begun.is_ok(), both, "{first:?} {second:?}");
            if let Ok(begun) = begun {
                begun.commit().await.unwrap();
            }
        }
        // Freed by ROLLBACK, and by COMMIT.
        holder.rollback().await.unwrap();
        second.lock(&mut tx, Wait::forever()).await.unwrap();
        tx.commit().await.unwrap();
        assert_eq!(advisory_locks(&pool, true).await, 0);
    }
}

// What is refused leaves the transaction as it was, whatever was set, at every level, in a savepoint or not.
#[tokio::test(flavor = "multi_thread")]
async fn a_refused_lock_leaves_the_transaction_and_its_settings_as_they_were() {
    let (_database, pool) = database().await;
    pool.execute("CREATE TABLE data (n int); INSERT INTO data VALUES (0)").await.unwrap();
    let _holder = somebody_holds(&pool, 1).await;
    for level in ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"] {
        for (set, timeout) in
            [("SET LOCAL statement_timeout = 0", "0"), ("SET LOCAL lock_timeout = '7s'", "7s")]
        {
            for savepoint in [false, true] {
                let mut tx = pool
                    .begin_with(AssertSqlSafe(format!(
                        "BEGIN ISOLATION LEVEL {level}; {set}; UPDATE data SET n = n + 1"
                    )))
                    .await
                    .unwrap();
                exclusive(2).lock(&mut tx, short()).await.unwrap();
                if savepoint {
                    tx.execute("SAVEPOINT mine").await.unwrap();
                }
                for wait in [Duration::ZERO, Duration::from_nanos(1), Duration::from_millis(5)] {
                    let refused = within("it is refused", exclusive(1).lock(&mut tx, Wait::at_most(wait)))
                        .await
                        .unwrap_err();
                    let Error::Busy { name, after, .. } = &refused else { panic!("{refused:?}") };
                    assert_eq!((name.as_str(), *after), ("1", wait));
                    let refused =
                        AdvisoryLock::lock_all(&mut tx, [exclusive(1), exclusive(0)], Wait::at_most(wait))
                            .await;
                    assert!(matches!(refused, Err(Error::Busy { .. })), "{refused:?}");
                }
                exclusive(4).lock(&mut tx, Wait::forever()).await.unwrap();
                AdvisoryLock::lock_all(&mut tx, [exclusive(5), shared(6)], short()).await.unwrap();
                assert_eq!(show(&mut tx, "lock_timeout").await, timeout, "{level}");
                // 0 was taken before 1 was refused, and is free again: all of them, or none.
                exclusive(0).begin(&pool, Wait::no()).await.unwrap().commit().await.unwrap();
                let held = 1 + 1 + 3;
                assert_eq!(advisory_locks(&pool, true).await, held);
                if savepoint {
                    tx.execute("ROLLBACK TO mine").await.unwrap();
                    assert_eq!(advisory_locks(&pool, true).await, held - 3, "freed with the savepoint");
                    assert_eq!(show(&mut tx, "lock_timeout").await, timeout, "{level}");
                }
                // Nothing of the caller's is lost.
                let n: i32 = tx.fetch_one("SELECT n FROM data").await.unwrap().get(0);
                tx.commit().await.unwrap();
                let after: i32 = sqlx::query_scalar("SELECT n FROM data").fetch_one(&pool).await.unwrap();
                assert_eq!(after, n);
                assert_eq!(advisory_locks(&pool, true).await, 1);
            }
        }
    }
}

fn short() -> Wait {
    Wait::at_most(Duration::from_millis(5))
}

// Zero would be no time-out at all, and so would be what Postgres rounds to zero.
#[tokio::test(flavor = "multi_thread")]
async fn a_wait_below_a_millisecond_ends() {
    let (_database, pool) = database().await;
    let _holder = somebody_holds(&pool, 1).await;
    for wait in [Duration::ZERO, Duration::from_nanos(1), Duration::from_micros(400)] {
        let mut tx = pool.begin().await.unwrap();
        let refused = within("lock", exclusive(1).lock(&mut tx, Wait::at_most(wait))).await.unwrap_err();
        assert!(matches!(refused, Error::Busy { .. }), "{refused:?}");
        let refused = within("begin", exclusive(1).begin(&pool, Wait::at_most(wait))).await.err().unwrap();
        assert!(matches!(refused, Error::Busy { .. }), "{refused:?}");
    }
}

// The caller's own time-out neither shortens a wait for ever, nor is it lengthened by ours.
#[tokio::test(flavor = "multi_thread")]
async fn a_wait_is_as_long_as_it_says_whatever_the_sessions_setting() {
    let (_database, pool) = database().await;
    let holder = somebody_holds(&pool, 1).await;
    let waiting = tokio::spawn({
        let pool = pool.clone();
        async move {
            let mut tx = pool.begin().await.unwrap();
            tx.execute("SET LOCAL lock_timeout = 1").await.unwrap();
            exclusive(1).lock(&mut tx, Wait::forever()).await.unwrap();
            assert_eq!(show(&mut tx, "lock_timeout").await, "1ms");
        }
    });
    until("it waits", async || (advisory_locks(&pool, false).await == 1).then_some(())).await;
    until("it waits for longer than that", async || {
        let query = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND clock_timestamp() > waitstart + interval '20 ms'";
        (sqlx::query_scalar::<_, i64>(query).fetch_one(&pool).await.unwrap() == 1).then_some(())
    })
    .await;
    holder.commit().await.unwrap();
    within("it is granted", waiting).await.unwrap();
}

// The wait bounds the whole, not each of them: two that are busy one after the other.
#[tokio::test(flavor = "multi_thread")]
async fn the_wait_for_many_bounds_the_whole() {
    let (_database, pool) = database().await;
    let first = somebody_holds(&pool, 1).await;
    let _second = somebody_holds(&pool, 2).await;
    let mut tx = pool.begin().await.unwrap();
    let pid: i32 = tx.fetch_one("SELECT pg_backend_pid()").await.unwrap().get(0);
    let waiting = tokio::spawn(async move {
        let wait = Wait::at_most(Duration::from_secs(20));
        AdvisoryLock::lock_all(&mut tx, [exclusive(2), exclusive(1)], wait).await
    });
    until("it waits for the first", async || (advisory_locks(&pool, false).await == 1).then_some(())).await;
    // The bound of the second is what is left: the server's own view of it while it waits there.
    first.commit().await.unwrap();
    until("it waits for the second", async || {
        let query = "SELECT EXISTS (SELECT FROM pg_locks WHERE pid = $1 AND objid = 2 AND NOT granted)";
        sqlx::query_scalar::<_, bool>(query).bind(pid).fetch_one(&pool).await.unwrap().then_some(())
    })
    .await;
    sqlx::query("SELECT pg_cancel_backend($1)").bind(pid).execute(&pool).await.unwrap();
    let cancelled = within("it is cancelled", waiting).await.unwrap().unwrap_err();
    assert_eq!(cancelled.sqlstate(), Some("57014"), "{cancelled:?}");
    // And it does end by itself, once for both.
    let _first = somebody_holds(&pool, 1).await;
    let mut tx = pool.begin().await.unwrap();
    let refused = within("both", AdvisoryLock::lock_all(&mut tx, (1..9).map(exclusive), short())).await;
    assert!(matches!(refused, Err(Error::Busy { name, .. }) if name.starts_with("1, 2")));
}

// C50: whatever the order given, and whatever the names: sorted by what is locked.
#[tokio::test(flavor = "multi_thread")]
async fn many_locks_in_any_order_never_deadlock() {
    let (_database, pool) = database().await;
    let keys: Vec<Key> = (0..6)
        .map(|n| Key::from_name("test", &n.to_string()).unwrap())
        .chain((0..3).map(|n| Key::from_pair(n, -n)))
        .collect();
    let tasks: Vec<_> = (0..4_usize)
        .map(|task| {
            let (pool, keys) = (pool.clone(), keys.clone());
            tokio::spawn(async move {
                for round in 0..60 {
                    let locks = (0..keys.len()).map(|n| {
                        let key = keys[(n * (task + 1) + round) % keys.len()].clone();
                        if (n + round) % 3 == 0 {
                            AdvisoryLock::shared(key)
                        } else {
                            AdvisoryLock::exclusive(key)
                        }
                    });
                    let locks: Vec<_> = if task % 2 == 0 { locks.collect() } else { locks.rev().collect() };
                    let tx = AdvisoryLock::begin_all(&pool, locks, Wait::forever()).await.unwrap();
                    tx.commit().await.unwrap();
                }
            })
        })
        .collect();
    for task in tasks {
        within("no deadlock", task).await.unwrap();
    }
}

// Taken twice, once shared: upgrading later would deadlock with whoever does the same.
#[tokio::test(flavor = "multi_thread")]
async fn of_two_locks_of_one_key_the_exclusive_one_is_taken() {
    let (_database, pool) = database().await;
    let _tx = AdvisoryLock::begin_all(&pool, [shared(1), exclusive(1), shared(1)], Wait::no()).await.unwrap();
    assert_eq!(advisory_locks(&pool, true).await, 1);
    assert!(shared(1).begin(&pool, short()).await.is_err());
    drop(AdvisoryLock::begin_all(&pool, [], Wait::no()).await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn begin_holds_the_lock_in_a_transaction_that_sees_what_the_holder_before_wrote() {
    let (database, pool) = database().await;
    pool.execute("CREATE TABLE data (n int); INSERT INTO data VALUES (0)").await.unwrap();
    let pool_of_one = PgPoolOptions::new()
        .max_connections(1)
        .after_connect(|conn, _| {
            Box::pin(async move {
                conn.execute("SET default_transaction_isolation = 'serializable'; SET lock_timeout = '9s'")
                    .await
                    .map(drop)
            })
        })
        .connect_lazy_with(database.options());
    // Refused: nothing was begun, the connection is clean, its settings are its own.
    let mut holder = somebody_holds(&pool, 1).await;
    for wait in [Wait::no(), short()] {
        let refused = exclusive(1).begin(&pool_of_one, wait).await.err().unwrap();
        assert!(matches!(refused, Error::Busy { .. }), "{refused:?}");
        let clean: bool = sqlx::query_scalar(
            "SELECT pg_current_xact_id_if_assigned() IS NULL AND current_setting('lock_timeout') = '9s'",
        )
        .fetch_one(&pool_of_one)
        .await
        .unwrap();
        assert!(clean);
    }
    let waiting = tokio::spawn({
        let pool = pool_of_one.clone();
        async move { exclusive(1).begin(&pool, Wait::forever()).await.unwrap() }
    });
    until("it waits", async || (advisory_locks(&pool, false).await == 1).then_some(())).await;
    holder.execute("UPDATE data SET n = 1").await.unwrap();
    holder.commit().await.unwrap();
    let mut tx = within("it is granted", waiting).await.unwrap();
    let n: i32 = tx.fetch_one("UPDATE data SET n = n + 1 RETURNING n").await.unwrap().get(0);
    assert_eq!((n, show(&mut tx, "lock_timeout").await.as_str()), (2, "9s"));
    assert!(exclusive(1).begin(&pool, Wait::no()).await.is_err());
    tx.commit().await.unwrap();
    assert_eq!(advisory_locks(&pool, true).await, 0);
    // The next user of the connection has its own settings.
    let mut tx = pool_of_one.begin().await.unwrap();
    assert_eq!(
        (show(&mut tx, "transaction_isolation").await.as_str(), show(&mut tx, "lock_timeout").await.as_str()),
        ("serializable", "9s")
    );
}

// C07: cancelled after any poll, free or waiting, the pool gets back a clean connection without a lock.
#[tokio::test(flavor = "multi_thread")]
async fn a_begin_dropped_after_any_poll_leaves_no_transaction_and_no_lock() {
    let (database, pool) = database().await;
    let pool_of_one = PgPoolOptions::new().max_connections(1).connect_lazy_with(database.options());
    for polls in 0..6 {
        drop(after_polls(polls, exclusive(1).begin(&pool_of_one, Wait::forever())).await);
        let holder = exclusive(1).begin(&pool, Wait::forever()).await.unwrap();
        // Polled again only when it is over: not for ever.
        let wait = Wait::at_most(Duration::from_millis(20));
        drop(after_polls(polls, exclusive(1).begin(&pool_of_one, wait)).await);
        holder.commit().await.unwrap();
        let clean = sqlx::raw_sql("SELECT now() = statement_timestamp()");
        let row = within("a connection of the pool", pool_of_one.fetch_one(clean)).await.unwrap();
        assert!(row.get::<bool, _>(0), "in an open transaction after {polls} polls");
        until("no lock is left", async || (advisory_locks(&pool, true).await == 0).then_some(())).await;
    }
}

// Two that take the same locks by themselves in different orders: the victim is told in a typed way.
#[tokio::test(flavor = "multi_thread")]
async fn a_deadlock_is_a_typed_error() {
    let (_database, pool) = database().await;
    let mut a = exclusive(1).begin(&pool, Wait::no()).await.unwrap();
    let mut b = exclusive(2).begin(&pool, Wait::no()).await.unwrap();
    let both = within("one is the victim", async {
        tokio::join!(
            async { (exclusive(2).lock(&mut a, Wait::forever()).await, a.rollback().await) },
            async { (exclusive(1).lock(&mut b, Wait::forever()).await, b.rollback().await) }
        )
    })
    .await;
    let victims = [both.0.0, both.1.0].into_iter().filter_map(Result::err).collect::<Vec<_>>();
    assert!(matches!(victims[..], [Error::Deadlock { .. }]), "{victims:?}");
}
