//! Advisory locks of the owner's sessions: what excludes whom, on which connections, and what is left behind.

use std::collections::HashSet;
use std::future::poll_fn;
use std::task::Poll;
use std::time::Duration;

use fencepost::testing::{Server, TestDatabase};
use fencepost::{AdvisoryLock, Error, HeldAdvisory, Key, LossReason, Owner, Wait};
use sqlx::postgres::{PgAdvisoryLock, PgPoolOptions};
use sqlx::{AssertSqlSafe, Executor as _, PgPool, Row as _};

use crate::cancel::after_polls;
use crate::proxy::Proxy;
use crate::support::{LONG, SHORT, connect, database, owner, until, until_true, within};

fn key(name: &str) -> Key {
    Key::from_name("test", name).unwrap()
}

fn exclusive(name: &str) -> AdvisoryLock {
    AdvisoryLock::exclusive(key(name))
}

fn shared(name: &str) -> AdvisoryLock {
    AdvisoryLock::shared(key(name))
}

async fn hold(lock: &AdvisoryLock, owner: &Owner) -> HeldAdvisory {
    lock.try_acquire(owner).await.unwrap().expect("the lock is free")
}

async fn hold_when_free(lock: &AdvisoryLock, owner: &Owner) -> HeldAdvisory {
    until("it is free", async || lock.try_acquire(owner).await.unwrap()).await
}

const OURS: &str = "l.locktype = 'advisory' AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())";

/// Of this database: granted advisory locks, or waiting ones.
pub(crate) async fn advisory_locks(pool: &PgPool, granted: bool) -> i64 {
    let query = format!("SELECT count(*) FROM pg_locks l WHERE {OURS} AND granted = {granted}");
    sqlx::query_scalar(AssertSqlSafe(query)).fetch_one(pool).await.unwrap()
}

/// The sessions that hold, or wait for, an advisory lock.
async fn pids(pool: &PgPool, granted: bool) -> Vec<i32> {
    let query = format!("SELECT DISTINCT pid FROM pg_locks l WHERE {OURS} AND granted = {granted}");
    sqlx::query_scalar(AssertSqlSafe(query)).fetch_all(pool).await.unwrap()
}

async fn until_none_is_left(pool: &PgPool) {
    until("no lock is left", async || {
        (advisory_locks(pool, true).await + advisory_locks(pool, false).await == 0).then_some(())
    })
    .await;
}

async fn scene() -> (TestDatabase, PgPool, Owner, Owner) {
    let (database, pool) = database().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    (database, pool, a, b)
}

// ---- Who excludes whom. -----------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn shared_goes_with_shared_and_nothing_with_exclusive() {
    let (_database, _pool, a, b) = scene().await;
    // Within one process, where they share a session, and across processes.
    for other in [&a, &b] {
        for (first, second, both) in [
            (exclusive("m"), exclusive("m"), false),
            (exclusive("m"), shared("m"), false),
            (shared("m"), exclusive("m"), false),
            (shared("m"), shared("m"), true),
        ] {
            let held = hold(&first, &a).await;
            let second_held = second.try_acquire(other).await.unwrap();
            assert_eq!(second_held.is_some(), both, "{first:?} {second:?}");
            if let Some(second_held) = second_held {
                assert!(second_held.release().await.unwrap());
                // One of two is still there.
                assert!(exclusive("m").try_acquire(&b).await.unwrap().is_none());
            }
            assert!(held.is_held() && held.release().await.unwrap());
        }
    }
}

// C03: two tasks of one process on one session.
#[tokio::test(flavor = "multi_thread")]
async fn tasks_of_one_process_exclude_each_other_though_they_share_a_session() {
    let (_database, _pool, a, _) = scene().await;
    for _ in 0..50 {
        let tasks: Vec<_> = (0..8)
            .map(|_| {
                let a = a.clone();
                tokio::spawn(async move { exclusive("same").try_acquire(&a).await.unwrap() })
            })
            .collect();
        let mut held = Vec::new();
        for task in tasks {
            held.extend(task.await.unwrap());
        }
        assert_eq!(held.len(), 1, "one of eight, not more");
        for one in held {
            assert!(one.release().await.unwrap());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn everybody_who_takes_the_key_by_any_means_is_excluded() {
    let (database, pool, a, _) = scene().await;
    let mut conn = connect(&database.options()).await;
    let sqlx_lock = PgAdvisoryLock::new("nightly");
    let from_sqlx = Key::from_sqlx(&sqlx_lock).unwrap();
    for (key, sql) in [
        (Key::from_i64(i64::MIN), format!("'{}'::bigint", i64::MIN)),
        (Key::from_i64(7), "7".to_owned()),
        (Key::from_pair(-7, i32::MAX), format!("-7, {}", i32::MAX)),
        (key("any"), "fencepost.advisory_key('test', 'any')".to_owned()),
    ] {
        for lock in [AdvisoryLock::exclusive(key.clone()), AdvisoryLock::shared(key.clone())] {
            let held = hold(&lock, &a).await;
            let raw = async |conn: &mut sqlx::PgConnection, function: &str| -> bool {
                let query = AssertSqlSafe(format!("SELECT {function}({sql})"));
                conn.fetch_one(query).await.unwrap().get(0)
            };
            assert!(!raw(&mut conn, "pg_try_advisory_lock").await, "{lock:?}");
            assert_eq!(raw(&mut conn, "pg_try_advisory_lock_shared").await, lock.is_shared(), "{lock:?}");
            conn.execute("SELECT pg_advisory_unlock_all()").await.unwrap();
            assert!(held.release().await.unwrap());
            assert!(raw(&mut conn, "pg_try_advisory_lock").await);
            assert!(lock.try_acquire(&a).await.unwrap().is_none());
            // And the level of transactions.
            let mut tx = pool.begin().await.unwrap();
            assert!(!lock.try_lock(&mut tx).await.unwrap());
            conn.execute("SELECT pg_advisory_unlock_all()").await.unwrap();
            assert!(lock.try_lock(&mut tx).await.unwrap());
            assert!(AdvisoryLock::exclusive(key.clone()).try_acquire(&a).await.unwrap().is_none());
            tx.commit().await.unwrap();
        }
    }
    // One replica with sqlx's lock, one with ours.
    let ours = AdvisoryLock::exclusive(from_sqlx);
    let theirs = sqlx_lock.acquire(pool.acquire().await.unwrap()).await.unwrap();
    assert!(ours.try_acquire(&a).await.unwrap().is_none());
    theirs.release_now().await.unwrap();
    let held = hold(&ours, &a).await;
    assert!(sqlx_lock.try_acquire(pool.acquire().await.unwrap()).await.unwrap().left().is_none());
    assert!(held.release().await.unwrap());
}

// C48, C49: the database computes what the library computes, whatever the name.
#[tokio::test(flavor = "multi_thread")]
async fn the_key_of_a_name_is_the_same_in_sql() {
    let (_database, pool) = database().await;
    let long = "x".repeat(255);
    for (namespace, name) in
        [("billing", "nightly-report"), ("ab", "c"), ("köln", "日本 🦀"), ("o'brien", "\\"), (&long, &long)]
    {
        let number: i64 = sqlx::query_scalar("SELECT fencepost.advisory_key($1, $2)")
            .bind(namespace)
            .bind(name)
            .fetch_one(&pool)
            .await
            .unwrap();
        assert_eq!(Key::from_name(namespace, name).unwrap(), Key::from_i64(number), "{namespace} {name}");
    }
    for bad in ["'', 'x'", "'x', NULL", "'x', E'a\\nb'", "repeat('x', 256), 'x'", "'x', E'\\x7f'"] {
        let query = AssertSqlSafe(format!("SELECT fencepost.advisory_key({bad})"));
        let refused = pool.execute(query).await.unwrap_err();
        assert_eq!(Error::from(refused).sqlstate(), Some("LK005"), "{bad}");
    }
}

// ---- On which sessions. -----------------------------------------------------------------------------

// C10: not a connection each.
#[tokio::test(flavor = "multi_thread")]
async fn many_keys_are_held_by_one_session() {
    let (_database, pool, a, b) = scene().await;
    let mut held = Vec::new();
    for n in 0..500 {
        held.push(hold(&AdvisoryLock::exclusive(Key::from_i64(n)), &a).await);
    }
    assert_eq!((advisory_locks(&pool, true).await, pids(&pool, true).await.len()), (500, 1));
    assert!(AdvisoryLock::shared(Key::from_i64(499)).try_acquire(&b).await.unwrap().is_none());
    // Released, or dropped.
    for one in held.drain(250..) {
        assert!(one.release().await.unwrap());
    }
    assert_eq!(advisory_locks(&pool, true).await, 250);
    drop(held);
    until_none_is_left(&pool).await;
}

// C12: who waits in one process for one key needs one session, and however many keys there are, a few.
#[tokio::test(flavor = "multi_thread")]
async fn waiters_use_a_few_sessions_however_many_they_are() {
    let (_database, pool, a, b) = scene().await;
    for keys in [1, 12] {
        let locks: Vec<_> = (0..keys).map(|n| exclusive(&format!("key-{n}"))).collect();
        let mut held = Vec::new();
        for lock in &locks {
            held.push(hold(lock, &b).await);
        }
        let waiters: Vec<_> = (0..48)
            .map(|n| {
                let (a, lock) = (a.clone(), locks[n % keys].clone());
                tokio::spawn(async move {
                    let held = lock.acquire(&a, Wait::forever()).await.unwrap();
                    assert!(held.is_held() && held.release().await.unwrap());
                })
            })
            .collect();
        let most = keys.min(4);
        // Between two half seconds none waits for a moment.
        until("the first ones wait at the server", async || {
            let waiting = usize::try_from(advisory_locks(&pool, false).await).unwrap();
            assert!(waiting <= most, "{waiting} wait at the server");
            (waiting == most).then_some(())
        })
        .await;
        for one in held {
            assert!(one.release().await.unwrap());
        }
        for waiter in waiters {
            within("every waiter is served", waiter).await.unwrap();
        }
        let sessions: i64 = sqlx::query_scalar(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'fencepost a'",
        )
        .fetch_one(&pool)
        .await
        .unwrap();
        // Heartbeat, two for statements, the main lock session, and four beside it: those who wait, and those who hold
        // what they got there.
        assert!(sessions <= 8, "{sessions} sessions");
    }
    until_none_is_left(&pool).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_in_one_process_is_served_in_the_order_of_arrival() {
    let (_database, _pool, a, b) = scene().await;
    let held = hold(&exclusive("line"), &b).await;
    let (served, mut order) = tokio::sync::mpsc::unbounded_channel();
    let mut waiters = Vec::new();
    for n in 0..6 {
        let (waiting, served) = (a.clone(), served.clone());
        let mut waiter = Box::pin(async move {
            let held = exclusive("line").acquire(&waiting, Wait::forever()).await.unwrap();
            served.send(n).unwrap();
            held.release().await.unwrap()
        });
        // Polled once it is on its way; and the owner's thread, which has one session to ask on, has refused it and
        // put it in line before it answers whoever came later.
        assert!(poll_fn(|cx| Poll::Ready(waiter.as_mut().poll(cx).is_pending())).await);
        drop(hold(&exclusive(&format!("another-{n}")), &a).await);
        waiters.push(tokio::spawn(waiter));
    }
    assert!(held.release().await.unwrap());
    for waiter in waiters {
        assert!(within("it is served", waiter).await.unwrap());
    }
    for n in 0..6 {
        assert_eq!(order.recv().await, Some(n));
    }
}

// C05: a session is used again only after its lock was unlocked; then it is.
#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_waited_holds_what_it_got_and_is_used_again_afterwards() {
    let (_database, pool, a, b) = scene().await;
    let mut used = HashSet::new();
    for _ in 0..3 {
        let theirs = hold(&exclusive("w"), &b).await;
        let waiting = {
            let a = a.clone();
            tokio::spawn(async move { exclusive("w").acquire(&a, Wait::forever()).await.unwrap() })
        };
        until("it waits", async || (advisory_locks(&pool, false).await == 1).then_some(())).await;
        let [waiter] = pids(&pool, false).await[..] else { panic!("one session waits") };
        assert!(theirs.release().await.unwrap());
        let ours = within("it is granted", waiting).await.unwrap();
        assert_eq!(pids(&pool, true).await, [waiter]);
        used.insert(waiter);
        // It is held like any other.
        assert!(exclusive("w").try_acquire(&a).await.unwrap().is_none());
        assert!(exclusive("w").try_acquire(&b).await.unwrap().is_none());
        assert!(ours.is_held() && ours.release().await.unwrap());
        assert_eq!(advisory_locks(&pool, true).await, 0, "the release knows");
    }
    assert_eq!(used.len(), 1, "one session for all");
}

// ---- What is left behind. ---------------------------------------------------------------------------

// C02: a time-out that races with the grant. The holder lets go at about the moment when the wait is over.
#[tokio::test(flavor = "multi_thread")]
async fn thousands_of_timeouts_that_race_with_the_grant_leave_no_lock_behind() {
    const ACQUIRES: usize = 3_000;
    let (database, pool, a, _) = scene().await;
    let mut other = connect(&database.options()).await;
    let (end, mut ended) = tokio::sync::oneshot::channel::<()>();
    let holder = tokio::spawn(async move {
        let mut turns = 0_u32;
        while ended.try_recv() == Err(tokio::sync::oneshot::error::TryRecvError::Empty) {
            other
                .execute(sqlx::raw_sql(
                    "SELECT pg_advisory_lock(fencepost.advisory_key('test', 'race')); SELECT pg_sleep(0.0011); \
                     SELECT pg_advisory_unlock(fencepost.advisory_key('test', 'race'))",
                ))
                .await
                .unwrap();
            turns += 1;
        }
        turns
    });
    let (mut granted, mut refused) = (0, 0);
    for _ in 0..ACQUIRES {
        match exclusive("race").acquire(&a, Wait::at_most(Duration::from_millis(1))).await {
            Ok(held) => {
                granted += 1;
                assert!(held.release().await.unwrap());
            }
            Err(Error::Busy { .. }) => refused += 1,
            Err(other) => panic!("{other:?}"),
        }
    }
    // All that was granted has been released, or was granted to nobody and gives itself back.
    until_true(
        &pool,
        "no session of ours holds a stray lock",
        "SELECT NOT EXISTS (SELECT FROM fencepost.advisory_locks() WHERE application_name = 'fencepost a')",
    )
    .await;
    drop(end);
    let turns = within("the other holder ends", holder).await.unwrap();
    assert!(granted > 0 && refused > 0 && turns > 10, "a race: {granted} granted, {refused} refused");
    until_none_is_left(&pool).await;
    println!("{granted} granted, {refused} refused, {turns} turns of the other holder");
}

// C02 of the statements that do not wait: somebody cancels them, at any moment. What they left behind is found out.
#[tokio::test(flavor = "multi_thread")]
async fn a_storm_of_cancelled_statements_leaves_no_lock_behind() {
    let (database, pool, a, b) = scene().await;
    let mut other = connect(&database.options()).await;
    let (end, mut ended) = tokio::sync::oneshot::channel::<()>();
    let storm = tokio::spawn(async move {
        let mut cancelled = 0;
        while ended.try_recv() == Err(tokio::sync::oneshot::error::TryRecvError::Empty) {
            let row = other
                .fetch_one(
                    "SELECT count(pg_cancel_backend(s.pid)) FROM generate_series(1, 50), pg_stat_activity s \
                     WHERE s.datname = current_database() AND s.application_name = 'fencepost a' \
                     AND s.query LIKE '%advisory%' AND s.query NOT LIKE '%note%'",
                )
                .await
                .unwrap();
            cancelled += row.get::<i64, _>(0);
        }
        cancelled
    });
    let mut granted = 0;
    for n in 0..1_500 {
        let lock = AdvisoryLock::exclusive(Key::from_i64(n % 7));
        // Refused only while a session that was closed has not ended yet.
        if let Some(held) = within("an answer", lock.try_acquire(&a)).await.unwrap() {
            granted += 1;
            // Known, or lost with its session.
            drop(held.release().await);
        }
        if n % 50 == 0 {
            let theirs = hold_when_free(&lock, &b).await;
            let wait = lock.acquire(&a, Wait::at_most(Duration::from_millis(5)));
            assert!(matches!(wait.await, Err(Error::Busy { .. })));
            assert!(theirs.release().await.unwrap());
        }
    }
    drop(end);
    let cancelled = within("the storm ends", storm).await.unwrap();
    println!("{granted} granted, {cancelled} cancels");
    assert!(granted > 0 && cancelled > 1_000, "{granted} granted, {cancelled} cancels");
    until_none_is_left(&pool).await;
}

// C01, C24: cancelled after any poll, held or waiting.
#[tokio::test(flavor = "multi_thread")]
async fn an_acquire_dropped_after_any_poll_strands_nothing() {
    let (_database, pool, a, b) = scene().await;
    for polls in 0..5 {
        drop(after_polls(polls, exclusive("c").try_acquire(&a)).await);
        drop(hold_when_free(&exclusive("c"), &b).await);
        let theirs = hold_when_free(&exclusive("c"), &b).await;
        // A waiter is polled a few times only: whatever the time, it is dropped before it is granted anything.
        let wait = Wait::at_most(Duration::from_millis(20));
        drop(after_polls(polls, exclusive("c").acquire(&a, wait)).await);
        assert!(theirs.is_held() && theirs.release().await.unwrap());
        drop(hold_when_free(&exclusive("c"), &b).await);
        // Released while it is cancelled.
        let held = hold_when_free(&exclusive("c"), &a).await;
        drop(after_polls(polls, held.release()).await);
        drop(hold_when_free(&exclusive("c"), &b).await);
    }
    until_none_is_left(&pool).await;
}

// C01: cancelled at any moment of a wait, the grant included.
#[tokio::test(flavor = "multi_thread")]
async fn a_wait_cancelled_at_any_moment_strands_nothing() {
    let (_database, pool, a, b) = scene().await;
    for round in 0..150_u64 {
        let theirs = hold_when_free(&exclusive("c"), &b).await;
        let lock = exclusive("c");
        let cancelled = tokio::time::timeout(
            Duration::from_micros(round * 37 % 3_000),
            lock.acquire(&a, Wait::forever()),
        );
        let (ours, ()) = tokio::join!(cancelled, async {
            tokio::time::sleep(Duration::from_micros(round * 53 % 3_000)).await;
            assert!(theirs.release().await.unwrap());
        });
        if let Ok(ours) = ours {
            assert!(ours.unwrap().is_held());
        }
    }
    drop(hold_when_free(&exclusive("c"), &b).await);
    until_none_is_left(&pool).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_frees_everything_and_tells_everyone() {
    let (_database, pool, a, b) = scene().await;
    let theirs = hold(&exclusive("theirs"), &b).await;
    let held = [hold(&exclusive("x"), &a).await, hold(&shared("s"), &a).await, hold(&shared("s"), &a).await];
    let waiting = {
        let a = a.clone();
        tokio::spawn(async move { exclusive("theirs").acquire(&a, Wait::forever()).await.map(drop) })
    };
    until("it waits", async || (advisory_locks(&pool, false).await == 1).then_some(())).await;
    within("the shutdown", a.shutdown()).await.unwrap();
    let freed = [exclusive("x"), exclusive("s")];
    for lock in &freed {
        assert!(lock.try_acquire(&b).await.unwrap().is_some(), "the shutdown knows");
    }
    assert!(matches!(within("the waiter is told", waiting).await.unwrap(), Err(Error::Stopped)));
    for one in held {
        assert_eq!(within("the loss", one.lost()).await, LossReason::Stopped);
        assert!(!one.is_held() && !one.release().await.unwrap());
    }
    assert!(theirs.release().await.unwrap());
    until_none_is_left(&pool).await;
}

// ---- Losing it. -------------------------------------------------------------------------------------

// C15, C16: the loss is noticed while nothing is asked, and pushed to every lock of the session.
#[tokio::test(flavor = "multi_thread")]
async fn a_terminated_session_is_a_loss_of_all_its_locks_and_of_no_others() {
    let (database, pool, a, b) = scene().await;
    let held: Vec<_> = [hold(&exclusive("x"), &a).await, hold(&shared("y"), &a).await].into();
    let theirs = hold(&exclusive("z"), &b).await;
    let pid: i32 = sqlx::query_scalar(AssertSqlSafe(format!(
        "SELECT DISTINCT l.pid FROM pg_locks l JOIN pg_stat_activity s USING (pid) WHERE {OURS} AND s.application_name = 'fencepost a'"
    )))
    .fetch_one(&pool)
    .await
    .unwrap();
    assert!(database.terminate(pid).await.unwrap());
    for one in &held {
        assert_eq!(within("the loss", one.lost()).await, LossReason::SessionEnded);
        assert!(!one.is_held());
    }
    assert!(theirs.is_held());
    // Though it has not been dropped, what was lost stands in nobody's way, in the same process neither.
    assert!(hold(&exclusive("y"), &a).await.release().await.unwrap());
    // Somebody else has it by now, and a late release does not touch that.
    let next = hold(&exclusive("x"), &b).await;
    for one in held {
        assert!(!one.release().await.unwrap());
    }
    assert!(next.is_held() && exclusive("x").try_acquire(&a).await.unwrap().is_none());
    assert!(next.release().await.unwrap());
    assert!(hold(&exclusive("x"), &a).await.is_held(), "on a new session");
}

// C15: lost before anybody has noticed, it is the next question that finds out.
#[tokio::test(flavor = "multi_thread")]
async fn a_release_of_what_was_lost_says_so() {
    let (_database, pool, a, b) = scene().await;
    let held = hold(&exclusive("x"), &a).await;
    let [pid] = pids(&pool, true).await[..] else { panic!("one session") };
    sqlx::query("SELECT pg_terminate_backend($1)").bind(pid).execute(&pool).await.unwrap();
    until_none_is_left(&pool).await;
    match held.release().await {
        // Before or after the loss was noticed by itself.
        Ok(false) | Err(Error::OutcomeUnknown { .. }) => {}
        other => panic!("{other:?}"),
    }
    assert!(exclusive("x").try_acquire(&b).await.unwrap().is_some());
}

// C08, C17: nothing gets through, and nobody says so: lost at the local deadline.
#[tokio::test(flavor = "multi_thread")]
async fn a_black_hole_is_a_loss_at_the_local_deadline() {
    let (database, _observer) = database().await;
    let proxy = Proxy::before(database.options()).await;
    let pool = PgPoolOptions::new().connect_lazy_with(proxy.options());
    let a = owner(&pool, "a", SHORT).await;
    let held = hold(&exclusive("x"), &a).await;
    proxy.black_hole(true);
    assert_eq!(within("the deadline", held.lost()).await, LossReason::Unreachable);
    assert!(!held.is_held());
    assert!(!within("the release", held.release()).await.unwrap());
    let stuck = within("an acquire gives up", exclusive("y").try_acquire(&a)).await.unwrap_err();
    assert!(stuck.is_timeout() && stuck.is_retryable(), "{stuck:?}");
    let y = exclusive("y");
    let stuck = y.acquire(&a, Wait::at_most(Duration::from_millis(50)));
    assert!(matches!(within("a wait ends", stuck).await, Err(Error::Busy { .. })));
    proxy.black_hole(false);
    drop(hold_when_free(&exclusive("y"), &a).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_restarts_loses_every_lock_and_those_who_wait_go_on() {
    let server = tokio::task::spawn_blocking(|| Server::builder().start().unwrap()).await.unwrap();
    let pool = PgPoolOptions::new().connect_lazy_with(server.options());
    fencepost::migrate(&pool).await.unwrap();
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let held = hold(&exclusive("x"), &a).await;
    let waiting = tokio::spawn({
        let b = b.clone();
        async move { exclusive("x").acquire(&b, Wait::forever()).await.unwrap() }
    });
    until("it waits", async || (advisory_locks(&pool, false).await == 1).then_some(())).await;
    let server = tokio::task::spawn_blocking(move || {
        server.crash().unwrap();
        server.restart().unwrap();
        server
    })
    .await
    .unwrap();
    assert_eq!(within("the loss", held.lost()).await, LossReason::SessionEnded);
    let next = within("the waiter is granted it", waiting).await.unwrap();
    assert!(next.is_held() && !held.is_held());
    drop((a, b, held, next));
    pool.close().await;
    drop(server);
}

// ---- Limits. ----------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn the_cap_is_a_typed_error_and_what_is_held_stays() {
    let (_database, pool) = database().await;
    for bad in [0, 1_000_001] {
        let refused = Owner::builder(&pool).advisory_locks(bad).start().await.unwrap_err();
        assert!(matches!(refused, Error::Misuse { .. }), "{bad}: {refused:?}");
    }
    let a = Owner::builder(&pool).label("a").advisory_locks(2).start().await.unwrap();
    let held = [hold(&exclusive("1"), &a).await, hold(&exclusive("2"), &a).await];
    for refused in [
        exclusive("3").try_acquire(&a).await.err().unwrap(),
        exclusive("3").acquire(&a, Wait::forever()).await.err().unwrap(),
    ] {
        assert!(matches!(refused, Error::LockTableFull { cap: Some(2), .. }), "{refused:?}");
        assert!(refused.to_string().contains('2') && refused.sqlstate().is_none(), "{refused}");
    }
    // Busy is busy, with the cap reached as well.
    assert!(exclusive("1").try_acquire(&a).await.unwrap().is_none());
    assert!(held.iter().all(HeldAdvisory::is_held));
    for one in held {
        assert!(one.release().await.unwrap());
    }
    assert!(hold(&exclusive("3"), &a).await.release().await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_lock_table_is_a_typed_error_and_what_is_held_stays() {
    let small = || {
        Server::builder()
            .setting("max_connections", "20")
            .setting("max_locks_per_transaction", "10")
            .start()
            .unwrap()
    };
    let server = tokio::task::spawn_blocking(small).await.unwrap();
    let pool = PgPoolOptions::new().max_connections(3).connect_lazy_with(server.options());
    fencepost::migrate(&pool).await.unwrap();
    let a = Owner::builder(&pool).label("a").advisory_locks(100_000).start().await.unwrap();
    let mut held = Vec::new();
    let full = loop {
        let next = i64::try_from(held.len()).unwrap();
        match AdvisoryLock::exclusive(Key::from_i64(next)).try_acquire(&a).await {
            Ok(Some(one)) => held.push(one),
            Ok(None) => panic!("nobody else is there"),
            Err(error) => break error,
        }
        assert!(held.len() < 100_000, "the table is full before that");
    };
    assert!(matches!(full, Error::LockTableFull { cap: None, .. }), "{full:?}");
    assert_eq!(full.sqlstate(), Some("53200"));
    assert!(full.to_string().contains("max_locks_per_transaction"), "{full}");
    // Waiting for one more, and locks of a transaction.
    let next = AdvisoryLock::exclusive(Key::from_i64(-1));
    let full = next.acquire(&a, Wait::at_most(LONG)).await.err().unwrap();
    assert!(matches!(full, Error::LockTableFull { .. }), "{full:?}");
    assert!(held.len() > 200 && held.iter().all(HeldAdvisory::is_held));
    let locks: i64 = i64::try_from(held.len()).unwrap();
    // With room again, nothing was lost, and nothing more is held.
    let spare = held.split_off(held.len() - 60);
    for one in spare {
        assert!(one.release().await.unwrap());
    }
    assert_eq!(advisory_locks(&pool, true).await, locks - 60);
    let mut tx = pool.begin().await.unwrap();
    next.lock(&mut tx, Wait::forever()).await.unwrap();
    let many = (0..100_000).map(|n| AdvisoryLock::exclusive(Key::from_pair(1, n)));
    let full = AdvisoryLock::lock_all(&mut tx, many, Wait::forever()).await.unwrap_err();
    assert!(matches!(full, Error::LockTableFull { .. }), "{full:?}");
    // The transaction goes on with what it had.
    assert_eq!(advisory_locks(&pool, true).await, locks - 60 + 1);
    tx.commit().await.unwrap();
    for one in held {
        assert!(one.is_held() && one.release().await.unwrap());
    }
    a.shutdown().await.unwrap();
    pool.close().await;
    drop(server);
}

// ---- For people. ------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn locks_are_shown_under_readable_names() {
    let (database, pool, a, b) = scene().await;
    let held = hold(&exclusive("nightly"), &a).await;
    assert_eq!((held.key().name(), held.is_shared()), (Some("test/nightly"), false));
    let _shared = hold(&AdvisoryLock::shared(Key::from_pair(-1, 7).called("pair").unwrap()), &a).await;
    let _nameless = hold(&AdvisoryLock::exclusive(Key::from_i64(-42)), &a).await;
    let waiting = tokio::spawn(async move { exclusive("nightly").acquire(&b, Wait::forever()).await });
    let mut tx = pool.begin().await.unwrap();
    let of_tx = exclusive("of a transaction");
    of_tx.note_name(&mut connect(&database.options()).await).await.unwrap();
    of_tx.lock(&mut tx, Wait::forever()).await.unwrap();
    let number: i64 = sqlx::query_scalar("SELECT fencepost.advisory_key('test', 'nightly')")
        .fetch_one(&pool)
        .await
        .unwrap();
    let expected = [
        (Some("pair".to_owned()), "(-1, 7)".to_owned(), true, true, "fencepost a"),
        (Some("test/nightly".to_owned()), number.to_string(), false, true, "fencepost a"),
        (Some("test/nightly".to_owned()), number.to_string(), false, false, "fencepost b"),
        (None, "-42".to_owned(), false, true, "fencepost a"),
    ];
    until("all are shown", async || {
        let rows = sqlx::query(
            "SELECT name, key, shared, granted, application_name FROM fencepost.advisory_locks() WHERE application_name LIKE 'fencepost%'",
        )
        .fetch_all(&pool)
        .await
        .unwrap();
        let shown: Vec<_> = rows
            .iter()
            .map(|row| {
                let application: String = row.get(4);
                (row.get::<Option<String>, _>(0), row.get::<String, _>(1), row.get::<bool, _>(2), row.get::<bool, _>(3), application)
            })
            .collect();
        let expected: Vec<_> =
            expected.iter().map(|(name, key, shared, granted, who)| (name.clone(), key.clone(), *shared, *granted, (*who).to_owned())).collect();
        (shown == expected).then_some(())
    })
    .await;
    until_true(&pool, "the transaction's", "SELECT EXISTS (SELECT FROM fencepost.advisory_locks() WHERE name = 'test/of a transaction' AND waiting_since IS NULL)").await;
    tx.commit().await.unwrap();
    // A name in use stays; one that nobody notes any more is forgotten.
    let mut conn = connect(&database.options()).await;
    until("it is forgotten", async || {
        fencepost::prune(&mut conn, Duration::ZERO).await.unwrap();
        let names: i64 = sqlx::query_scalar("SELECT count(*) FROM fencepost.advisory_names")
            .fetch_one(&pool)
            .await
            .unwrap();
        (names == 2).then_some(())
    })
    .await;
    waiting.abort();
}

// C14: the holder runs CREATE INDEX CONCURRENTLY, which waits for the snapshots of all who wait for the lock.
#[tokio::test(flavor = "multi_thread")]
async fn an_index_is_created_concurrently_under_a_lock_that_others_wait_for() {
    let (database, pool, a, b) = scene().await;
    pool.execute("CREATE TABLE data (n int); INSERT INTO data SELECT generate_series(1, 100)").await.unwrap();
    for round in 0..2 {
        let held = hold_when_free(&exclusive("migration"), &a).await;
        let waiting = tokio::spawn({
            let b = b.clone();
            async move { exclusive("migration").acquire(&b, Wait::forever()).await.unwrap() }
        });
        until("it waits", async || (advisory_locks(&pool, false).await == 1).then_some(())).await;
        let mut conn = connect(&database.options()).await;
        let create = AssertSqlSafe(format!("CREATE INDEX CONCURRENTLY index_{round} ON data (n)"));
        within("the index", conn.execute(create)).await.unwrap();
        assert!(!waiting.is_finished() && held.release().await.unwrap());
        assert!(within("it is granted", waiting).await.unwrap().release().await.unwrap());
    }
}

// ---- What travels. ----------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn every_operation_is_one_round_trip_and_begin_is_not_one_more() {
    let (database, _observer) = database().await;
    let proxy = Proxy::before(database.options()).await;
    let pool =
        PgPoolOptions::new().max_connections(1).test_before_acquire(false).connect_lazy_with(proxy.options());
    let a = Owner::builder(&pool).ttl(Duration::from_hours(1)).start().await.unwrap();
    let lock = AdvisoryLock::exclusive(Key::from_i64(1));
    // Prepared once.
    hold(&lock, &a).await.release().await.unwrap();
    pool.begin().await.unwrap().commit().await.unwrap();
    // Each second a question is asked while something is held: what is counted is the least of several.
    let mut least = [u64::MAX; 6];
    for _ in 0..5 {
        let mut count =
            |index: usize, before: u64| least[index] = least[index].min(proxy.round_trips() - before);
        let before = proxy.round_trips();
        let held = hold(&lock, &a).await;
        count(0, before);
        let before = proxy.round_trips();
        assert!(lock.try_acquire(&a).await.unwrap().is_none() && held.is_held());
        count(1, before);
        let before = proxy.round_trips();
        assert!(held.release().await.unwrap());
        count(2, before);
        let before = proxy.round_trips();
        let tx = lock.begin(&pool, Wait::at_most(LONG)).await.unwrap();
        count(3, before);
        tx.commit().await.unwrap();
        let mut tx = pool.begin().await.unwrap();
        let before = proxy.round_trips();
        lock.lock(&mut tx, Wait::at_most(LONG)).await.unwrap();
        count(4, before);
        let before = proxy.round_trips();
        let many = (0..100).map(|n| AdvisoryLock::shared(Key::from_i64(n + 2)));
        AdvisoryLock::lock_all(&mut tx, many, Wait::forever()).await.unwrap();
        count(5, before);
        tx.commit().await.unwrap();
    }
    assert_eq!(
        least,
        [1, 0, 1, 1, 1, 1],
        "try, refused in the process, release, begin, lock, a hundred locks"
    );
}
