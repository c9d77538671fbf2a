//! What travels: round trips counted exactly, replies cut at each step, a network that swallows everything.

use std::time::Duration;

use fencepost::claim::{Claim, Jobs};
use fencepost::row::{Filter, Locked, RowLock};
use fencepost::testing::TestDatabase;
use fencepost::version::{Changes, Current, Delete, Update, Versioned};
use fencepost::{AdvisoryLock, Error, Isolation, Key, LossReason, Owner, Version, transaction};
use sqlx::postgres::PgPoolOptions;
use sqlx::{Executor as _, PgPool};

use crate::proxy::Proxy;
use crate::support::{LONG, SHORT, database, hold, hold_when_free, lease, owner, until, until_true, within};

/// A database, an observer beside the proxy, and a pool through it.
async fn through_proxy() -> (TestDatabase, PgPool, Proxy, PgPool) {
    let (database, observer) = database().await;
    let proxy = Proxy::before(database.options()).await;
    let pool =
        PgPoolOptions::new().max_connections(1).test_before_acquire(false).connect_lazy_with(proxy.options());
    (database, observer, proxy, pool)
}

/// How many times the work waited for the server.
async fn round_trips<T>(proxy: &Proxy, work: impl Future<Output = T>) -> (u64, T) {
    let before = proxy.round_trips();
    let done = work.await;
    (proxy.round_trips() - before, done)
}

#[tokio::test(flavor = "multi_thread")]
async fn every_operation_is_one_round_trip() {
    let (_database, _observer, proxy, pool) = through_proxy().await;
    let a = owner(&pool, "a", LONG).await;
    let b = owner(&pool, "b", LONG).await;
    // Prepared once on each session.
    for owner in [&a, &b] {
        assert!(hold(owner, "warm").await.release().await.unwrap());
    }
    pool.execute("CREATE TABLE data (n int)").await.unwrap();
    let (trips, held) = round_trips(&proxy, hold(&a, "report")).await;
    assert_eq!(trips, 1, "acquire");
    let (trips, refused) = round_trips(&proxy, lease("report").try_acquire(&b)).await;
    assert_eq!((trips, refused.unwrap().is_none()), (1, true), "refused");
    let (trips, tx) = round_trips(&proxy, held.begin(&pool)).await;
    assert_eq!(trips, 1, "BEGIN and the fence");
    let (trips, done) = round_trips(&proxy, tx.unwrap().commit()).await;
    done.unwrap();
    assert_eq!(trips, 1, "COMMIT");
    let mut tx = pool.begin().await.unwrap();
    let (trips, passed) = round_trips(&proxy, held.fence(&mut tx)).await;
    passed.unwrap();
    assert_eq!(trips, 1, "the fence in a transaction");
    tx.commit().await.unwrap();
    let (trips, _) = round_trips(&proxy, async { (held.is_held(), held.remaining(), held.token()) }).await;
    assert_eq!(trips, 0, "asking a held lease costs nothing");
    let (trips, released) = round_trips(&proxy, held.release()).await;
    assert_eq!((trips, released.unwrap()), (1, true), "release");
}

// What the documentation says that they cost.
#[tokio::test(flavor = "multi_thread")]
async fn row_locks_and_transactions_cost_the_round_trips_they_say() {
    let (_database, observer, proxy, pool) = through_proxy().await;
    pool.execute("CREATE TABLE data (id bigint PRIMARY KEY); INSERT INTO data SELECT generate_series(1, 9)")
        .await
        .unwrap();
    let mut holder = observer.begin().await.unwrap();
    let lock = RowLock::on("data").unwrap();
    let (no_wait, skip) = (lock.clone().no_wait(), lock.clone().skip_locked());
    let at_most = lock.clone().at_most(Duration::from_millis(20)).unwrap();
    lock.lock::<(i64,), _>(&mut holder, 9_i64).await.unwrap();
    // The first time the statements are prepared.
    for counts in [false, true] {
        let mut tx = pool.begin().await.unwrap();
        let check = |what: &str, trips: u64, expected: u64| {
            assert!(!counts || trips == expected, "{what}: {trips} round trips, not {expected}");
        };
        for (what, lock, found, busy) in
            [("block", &lock, 1, None), ("no_wait", &no_wait, 1, Some(2)), ("at_most", &at_most, 3, Some(3))]
        {
            let (trips, got) = round_trips(&proxy, lock.lock::<(i64,), _>(&mut tx, 1_i64)).await;
            assert_eq!(got.unwrap(), Locked::Found((1,)));
            check(what, trips, found);
            if let Some(busy) = busy {
                let (trips, got) = round_trips(&proxy, lock.lock::<(i64,), _>(&mut tx, 9_i64)).await;
                assert_eq!(got.unwrap(), Locked::Busy);
                check(what, trips, busy);
            }
        }
        for (what, lock, keys, expected) in [
            ("many, block", &lock, &[1, 2, 77][..], 1),
            ("many, skip_locked", &skip, &[1, 2, 77, 9], 1),
            ("many, no_wait", &no_wait, &[1, 2, 77], 3),
            ("many, no_wait, busy", &no_wait, &[1, 2, 77, 9], 3),
            ("many, at_most", &at_most, &[1, 2, 77], 3),
            ("many, at_most, busy", &at_most, &[1, 2, 77, 9], 3),
        ] {
            let (trips, got) = round_trips(&proxy, lock.lock_many::<(i64,), i64>(&mut tx, keys)).await;
            got.unwrap();
            check(what, trips, expected);
        }
        let (trips, got) =
            round_trips(&proxy, lock.claim_next::<(i64,)>(&mut tx, 3, &[], Filter::all())).await;
        assert_eq!(got.unwrap().len(), 3);
        check("claim_next", trips, 1);
        tx.rollback().await.unwrap();
        let done = transaction(&pool, Isolation::Serializable, |_| Box::pin(async { Ok::<_, Error>(()) }));
        let (trips, done) = round_trips(&proxy, done).await;
        done.unwrap();
        // The rollback of nothing that goes with the connection's way back to the pool may have been sent already.
        check("transaction", trips.min(2), 2);
        assert!(trips <= 3, "{trips}");
        pool.acquire().await.unwrap();
    }
}

// What the documentation says that they cost. The answer to an update that was lost is never asked for again.
#[tokio::test(flavor = "multi_thread")]
async fn versions_cost_the_round_trips_they_say() {
    let (_database, observer, proxy, pool) = through_proxy().await;
    pool.execute(
        "CREATE TABLE data (id bigint PRIMARY KEY, n bigint, version bigint NOT NULL DEFAULT 1, text text);
         INSERT INTO data SELECT generate_series(1, 9)",
    )
    .await
    .unwrap();
    let (data, one) = (Versioned::on("data").unwrap(), Version::new(1));
    let changes = || Changes::new().set("n", 7_i64);
    let mut conn = pool.acquire().await.unwrap();
    // The first time the statements are prepared.
    for (id, counts) in [(1_i64, false), (2, true)] {
        let check = |what: &str, trips: u64, expected: u64| {
            assert!(!counts || trips == expected, "{what}: {trips} round trips, not {expected}");
        };
        let (trips, read) = round_trips(&proxy, data.load::<(i64,), _>(&mut conn, id)).await;
        assert_eq!(read.unwrap().unwrap().version, one);
        check("load", trips, 1);
        for (what, id) in [("updated", id), ("conflict", id), ("gone", 77)] {
            let (trips, answer) = round_trips(&proxy, data.update(&mut conn, id, one, changes())).await;
            answer.unwrap().into_result().err().map_or_else(|| assert_eq!(what, "updated"), drop);
            check(what, trips, 1);
        }
        let rows = [(id, Version::new(2)), (77, one), (9, Version::new(5))];
        let (trips, many) = round_trips(&proxy, data.update_many(&mut conn, &rows, changes())).await;
        assert_eq!(many.unwrap().updated.len(), 1);
        check("update_many", trips, 1);
        // Somebody is faster while it waits: looked at once more.
        let mut faster = observer.begin().await.unwrap();
        sqlx::query("UPDATE data SET version = version + 1 WHERE id = $1")
            .bind(id)
            .execute(&mut *faster)
            .await
            .unwrap();
        let update = round_trips(&proxy, data.update(&mut conn, id, Version::new(3), changes()));
        let waits = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')";
        let ((trips, answer), ()) = tokio::join!(update, async {
            until_true(&observer, "the update waits", waits).await;
            faster.commit().await.unwrap();
        });
        assert_eq!(answer.unwrap(), Update::Conflict { current: Version::new(4) });
        check("a race", trips, 2);
        let (trips, deleted) = round_trips(&proxy, data.delete(&mut conn, id, Version::new(4))).await;
        assert_eq!(deleted.unwrap(), Delete::Deleted);
        check("delete", trips, 1);
    }
    drop(conn);
    // The value tells which one is cut: after it was prepared, and executed.
    let mut decided = Vec::new();
    for (text, is_cut) in [("prepares", false), ("is cut", true)] {
        if is_cut {
            proxy.cut_answer_to(text);
        }
        let update = data.update_with(&pool, 3_i64, |read: Current<(i64,)>| {
            decided.push(read.version.as_i64());
            Ok::<_, Error>(Changes::new().set("text", text))
        });
        let done = within("the update", update).await;
        assert_eq!(matches!(done, Err(Error::OutcomeUnknown { .. })), is_cut, "{done:?}");
    }
    assert_eq!((decided, proxy.cuts()), (vec![1, 2], 1));
    let version: i64 =
        sqlx::query_scalar("SELECT version FROM data WHERE id = 3").fetch_one(&observer).await.unwrap();
    assert_eq!(version, 3, "it had happened");
}

// C45: behind a pooler it is in a transaction, of which only the COMMIT leaves open what has happened.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_to_an_update_in_a_transaction_is_no_update() {
    let (_database, observer, proxy, pool) = through_proxy().await;
    pool.execute(
        "CREATE TABLE data (id bigint PRIMARY KEY, version bigint NOT NULL DEFAULT 1, text text);
         INSERT INTO data VALUES (1)",
    )
    .await
    .unwrap();
    let data = Versioned::on("data").unwrap().transaction_pooler(true);
    let mut decided = 0;
    for (cut, version, is_unknown) in [("is cut", 1_i64, false), ("COMMIT", 2, true)] {
        proxy.cut_answer_to(cut);
        let update = data.update_with(&pool, 1_i64, |_: Current<(i64,)>| {
            decided += 1;
            Ok::<_, Error>(Changes::new().set("text", "is cut"))
        });
        let error = within("the update", update).await.unwrap_err();
        assert_eq!(matches!(error, Error::OutcomeUnknown { .. }), is_unknown, "{error:?}");
        let found: i64 = sqlx::query_scalar("SELECT version FROM data").fetch_one(&observer).await.unwrap();
        assert_eq!(found, version, "{cut}");
    }
    assert_eq!((decided, proxy.cuts()), (2, 2));
}

// A refused try writes nothing: no transaction id, no WAL.
#[tokio::test(flavor = "multi_thread")]
async fn a_refused_try_writes_nothing() {
    // A server of its own: WAL is the whole server's.
    let server = tokio::task::spawn_blocking(|| fencepost::testing::Server::start().unwrap()).await.unwrap();
    let pool = PgPoolOptions::new().max_connections(1).connect_lazy_with(server.options());
    fencepost::migrate(&pool).await.unwrap();
    let (a, b) = (owner(&pool, "a", Owner::MAX_TTL).await, owner(&pool, "b", Owner::MAX_TTL).await);
    let _held = hold(&a, "report").await;
    assert!(lease("report").try_acquire(&b).await.unwrap().is_none());
    let written = "SELECT pg_current_wal_insert_lsn()::text || ' ' || pg_current_snapshot()::text";
    // Now and then the server writes a little by itself: one quiet round is enough.
    until("a round without a byte of WAL or a transaction id", async || {
        let before: String = sqlx::query_scalar(written).fetch_one(&pool).await.unwrap();
        for _ in 0..100 {
            assert!(lease("report").try_acquire(&b).await.unwrap().is_none());
        }
        let after: String = sqlx::query_scalar(written).fetch_one(&pool).await.unwrap();
        (before == after).then_some(())
    })
    .await;
}

// B5, C01: the answer to an acquire is lost: asked again, it is the same grant.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_to_an_acquire_is_asked_for_again() {
    let (_database, observer, proxy, pool) = through_proxy().await;
    let a = owner(&pool, "a", LONG).await;
    for name in ["first grant of its name", "second"] {
        if name == "second" {
            assert!(hold(&a, name).await.release().await.unwrap());
        }
        let before = proxy.cuts();
        proxy.cut_answer_to(name);
        let held = within("the acquire", lease(name).try_acquire(&a)).await.unwrap().unwrap();
        assert_eq!(proxy.cuts(), before + 1, "the answer was cut");
        let granted: (i64, bool) = sqlx::query_as(
            "SELECT token, token = (SELECT last_value FROM fencepost.fencing_token) FROM fencepost.leases WHERE name = $1",
        )
        .bind(name)
        .fetch_one(&observer)
        .await
        .unwrap();
        assert_eq!(granted, (held.token().as_i64(), true), "granted once");
        assert!(held.is_held() && held.release().await.unwrap());
    }
}

// The same for a claim: one attempt, and the key is not taken for somebody else's.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_to_a_begin_is_asked_for_again() {
    let (_database, observer, proxy, pool) = through_proxy().await;
    let a = owner(&pool, "a", LONG).await;
    let claim = Claim::named("charge-7").unwrap();
    proxy.cut_answer_to("charge-7");
    let attempt = within("the begin", claim.begin(&a)).await.unwrap().into_attempt().unwrap();
    assert_eq!(proxy.cuts(), 1);
    let begun: (i64, i32) =
        sqlx::query_as("SELECT token, attempts FROM fencepost.claims").fetch_one(&observer).await.unwrap();
    assert_eq!(begun, (attempt.token().as_i64(), 1), "begun once");
    assert!(attempt.is_held() && attempt.release().await.unwrap());
}

// Jobs that were claimed for an answer that never came are no longer claimed, though their owner lives; also when
// they were all that there were, so that asking again finds nothing (found by the histories under faults). When the
// database's list is looked at beside the second question it is too early: many rounds, to meet that.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_to_claimed_jobs_strands_none() {
    let (_database, observer, proxy, pool) = through_proxy().await;
    let a = owner(&pool, "a", LONG).await;
    for round in 0..40 {
        let (count, again) = if round == 0 { (6, 3) } else { (3, 0) };
        let kind = format!("mail-{round}-");
        let jobs = Jobs::of_kind(&kind).unwrap();
        let enqueue =
            "SELECT count(fencepost.claim_enqueue($1 || n, $1)) FROM generate_series(1, $2::integer) n";
        sqlx::query(enqueue).bind(&kind).bind(count).execute(&observer).await.unwrap();
        proxy.cut_answer_to(&kind);
        let mut all = within("the jobs", jobs.claim_next(&a, 3)).await.unwrap();
        assert_eq!((proxy.cuts(), all.len()), (round + 1, again));
        until("the others", async || {
            all.extend(jobs.claim_next(&a, 3).await.unwrap());
            (all.len() == usize::try_from(count).unwrap()).then_some(())
        })
        .await;
        let keys: std::collections::HashSet<_> = all.iter().map(fencepost::claim::Attempt::key).collect();
        assert_eq!(keys.len(), all.len());
        assert!(all.iter().all(|attempt| attempt.is_held() && attempt.crashes() == 0));
    }
}

// So is the answer to the second question: what that claimed is not taken for what the third one does (found by the
// histories under faults, where it stayed claimed for a minute).
#[tokio::test(flavor = "multi_thread")]
async fn two_lost_answers_to_claimed_jobs_strand_none() {
    let (_database, observer, proxy, pool) = through_proxy().await;
    let a = owner(&pool, "a", LONG).await;
    let jobs = Jobs::of_kind("mail").unwrap();
    let enqueue = "SELECT count(fencepost.claim_enqueue('mail-' || n, 'mail')) FROM generate_series(1, 9) n";
    observer.execute(enqueue).await.unwrap();
    proxy.cut_answers_to("mail", 2);
    let mut all = within("the jobs", jobs.claim_next(&a, 3)).await.unwrap();
    assert_eq!(proxy.cuts(), 2);
    assert_eq!(all.len(), 3);
    until("the others", async || {
        all.extend(jobs.claim_next(&a, 9).await.unwrap());
        (all.len() == 9).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_to_a_release_is_asked_for_again() {
    let (_database, _observer, proxy, pool) = through_proxy().await;
    let a = owner(&pool, "a", LONG).await;
    assert!(hold(&a, "report").await.release().await.unwrap());
    let held = hold(&a, "report").await;
    proxy.cut_answer_to("report");
    assert!(within("the release", held.release()).await.unwrap(), "it was held until this release");
    assert_eq!(proxy.cuts(), 1);
    assert!(hold(&a, "report").await.is_held());
}

// C17: the answer to a heartbeat is lost: it counts as unknown, and the next one decides.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_to_a_heartbeat_loses_nothing() {
    let (_database, observer, proxy, pool) = through_proxy().await;
    let a = owner(&pool, "a", Duration::from_secs(3)).await;
    let held = hold(&a, "report").await;
    let id = crate::support::owner_id(&observer, "a").await;
    proxy.cut_answer_to(id.as_bytes());
    until("the cut", async || (proxy.cuts() == 1).then_some(())).await;
    let beat = "SELECT expires_at > clock_timestamp() + 0.9 * ttl FROM fencepost.owners WHERE label = 'a'";
    until_true(&observer, "a beat", beat).await;
    assert!(held.is_held() && a.is_alive());
    assert!(held.release().await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_to_a_start_or_stop_leaves_no_doubt() {
    let (_database, observer, proxy, pool) = through_proxy().await;
    proxy.cut_answer_to("label-of-a");
    let failed = within("the start", Owner::builder(&pool).label("label-of-a").start()).await;
    // The connection carries the label, too: whichever answer was cut, the error says to try again.
    assert!(failed.unwrap_err().is_retryable());
    let a = owner(&pool, "label-of-a", LONG).await;
    let _held = hold(&a, "report").await;
    let id = crate::support::owner_id(&observer, "label-of-a").await;
    proxy.cut_answer_to(id.as_bytes());
    within("the shutdown", a.shutdown()).await.unwrap();
    assert_eq!(proxy.cuts(), 2);
    assert!(hold(&owner(&pool, "b", LONG).await, "report").await.is_held());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_to_a_begin_leaves_the_pool_and_the_lease_usable() {
    let (_database, _observer, proxy, pool) = through_proxy().await;
    let held = hold(&owner(&pool, "a", LONG).await, "report").await;
    held.begin(&pool).await.unwrap().rollback().await.unwrap();
    proxy.cut_answer_to("fencepost.fence(");
    let failed = within("the begin", held.begin(&pool)).await.unwrap_err();
    assert!(failed.is_retryable() && !failed.is_lost(), "{failed:?}");
    assert_eq!(proxy.cuts(), 1);
    held.begin(&pool).await.unwrap().commit().await.unwrap();
    assert!(held.is_held());
}

// A network that swallows everything: lost at the local deadline, told by nobody; and afterwards all is well again.
#[tokio::test(flavor = "multi_thread")]
async fn a_black_hole_is_a_loss_at_the_local_deadline() {
    let (_database, observer, proxy, pool) = through_proxy().await;
    let a = owner(&pool, "a", SHORT).await;
    let other = owner(&observer, "b", LONG).await;
    let held = hold(&a, "report").await;
    proxy.black_hole(true);
    assert_eq!(within("the deadline", held.lost()).await, LossReason::Unreachable);
    assert!(!held.is_held());
    // The others get it when the database's clock says so, not before.
    let next = hold_when_free(&other, "report").await;
    assert!(next.token() > held.token());
    let stuck = within("an acquire gives up", lease("report").try_acquire(&a)).await.unwrap_err();
    assert!(stuck.is_timeout() || matches!(stuck, Error::OutcomeUnknown { .. }), "{stuck:?}");
    proxy.black_hole(false);
    let free = hold_when_free(&a, "other").await;
    assert!(free.is_held() && next.is_held());
    drop(held);
    assert!(next.is_held());
}

// Connections refused for less than the ttl: reconnects until it may.
#[tokio::test(flavor = "multi_thread")]
async fn refused_connections_within_the_ttl_lose_nothing() {
    let (_database, observer, proxy, pool) = through_proxy().await;
    let a = owner(&pool, "a", Duration::from_secs(5)).await;
    let held = hold(&a, "report").await;
    proxy.refuse(true);
    crate::support::terminate(&observer, "").await;
    let gone = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'fencepost%')";
    until_true(&observer, "no session is left", gone).await;
    // A beat has been tried in vain: half of its life is gone without a beat.
    let half = "SELECT expires_at < clock_timestamp() + 0.5 * ttl FROM fencepost.owners WHERE label = 'a'";
    until_true(&observer, "beats fail", half).await;
    assert!(held.is_held());
    proxy.refuse(false);
    let beat = "SELECT expires_at > clock_timestamp() + 0.9 * ttl FROM fencepost.owners WHERE label = 'a'";
    until_true(&observer, "a beat", beat).await;
    assert!(held.is_held() && held.release().await.unwrap());
}

// Bounded also for those who stand behind others: the time does not grow with their number.
#[tokio::test(flavor = "multi_thread")]
async fn many_callers_give_up_together_in_a_black_hole() {
    let (_database, _observer, proxy, pool) = through_proxy().await;
    let a = owner(&pool, "a", SHORT).await;
    proxy.black_hole(true);
    let callers: Vec<_> = (0..200)
        .map(|n| {
            let a = a.clone();
            tokio::spawn(async move { lease(&format!("lease-{n}")).try_acquire(&a).await })
        })
        .collect();
    // One after the other it would be a second for every two.
    for caller in callers {
        let error = within("giving up", caller).await.unwrap().unwrap_err();
        assert!(error.is_timeout() || matches!(error, Error::OutcomeUnknown { .. }), "{error:?}");
    }
    let stopped = within("the shutdown", a.shutdown()).await;
    assert!(stopped.unwrap_err().is_timeout(), "the database could not be told");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_never_answers_is_an_error_of_the_start() {
    let (_database, _observer, proxy, pool) = through_proxy().await;
    proxy.black_hole(true);
    let failed = within("the start", Owner::builder(&pool).ttl(SHORT).start()).await.unwrap_err();
    assert!(failed.is_retryable(), "{failed:?}");
    // Started before it went silent, and silent in the middle of it.
    proxy.black_hole(false);
    let a = owner(&pool, "a", LONG).await;
    assert!(a.is_alive());
}

// After a failover, with an old address, a new connection may reach a standby: it is thrown away, not kept.
#[tokio::test(flavor = "multi_thread")]
async fn a_standby_that_was_reached_by_mistake_is_left_again() {
    let start = || fencepost::testing::Server::start().unwrap();
    let (primary, standby) = tokio::task::spawn_blocking(move || (start(), start())).await.unwrap();
    for server in [&primary, &standby] {
        let pool = PgPoolOptions::new().connect_lazy_with(server.options());
        fencepost::migrate(&pool).await.unwrap();
        pool.close().await;
    }
    // Read-only from now on, as a standby is that follows nobody.
    standby.stop_fast().unwrap();
    let signal = standby.data_dir().join("standby.signal");
    std::fs::write(&signal, "").unwrap();
    if let Some((user, group)) = standby.run_as() {
        std::os::unix::fs::chown(&signal, Some(user), Some(group)).unwrap();
    }
    standby.restart().unwrap();
    let read_only = PgPoolOptions::new().connect_lazy_with(standby.options());
    until_true(&read_only, "it is a standby", "SELECT pg_is_in_recovery()").await;

    let proxy = Proxy::before(primary.options()).await;
    let (pool, direct) = (
        PgPoolOptions::new().connect_lazy_with(proxy.options()),
        PgPoolOptions::new().connect_lazy_with(primary.options()),
    );
    let a = owner(&pool, "a", SHORT).await;
    let held = hold(&a, "report").await;
    let advisory = AdvisoryLock::exclusive(Key::from_i64(1));
    let locked = advisory.try_acquire(&a).await.unwrap().unwrap();
    proxy.switch(&standby.options());
    crate::support::terminate(&direct, "").await;
    within("the loss", held.lost()).await;
    within("the loss", locked.lost()).await;
    // It would grant it, and exclude nobody.
    let error = advisory.try_acquire(&a).await.unwrap_err();
    assert!(error.is_retryable() && error.is_timeout(), "{error:?}");
    let error = lease("report").try_acquire(&a).await.unwrap_err();
    assert!(error.is_retryable() || error.is_timeout(), "{error:?}");
    // Who waits goes on waiting.
    let waiting = tokio::spawn({
        let a = a.clone();
        async move { lease("waited for").acquire(&a, fencepost::Wait::forever()).await }
    });
    let tries = "SELECT count(*) > 0 FROM pg_stat_activity WHERE application_name LIKE 'fencepost%'";
    until_true(&read_only, "it tries there", tries).await;
    proxy.switch(&primary.options());
    assert!(within("the one that waited", waiting).await.unwrap().unwrap().is_held());
    let again = within("it comes back", async {
        loop {
            if let Ok(Some(held)) = lease("report").try_acquire(&a).await {
                return held;
            }
        }
    })
    .await;
    assert!(again.is_held() && again.token() > held.token());
    let locked = until("it is locked again", async || advisory.try_acquire(&a).await.ok().flatten()).await;
    assert!(locked.is_held());
}
