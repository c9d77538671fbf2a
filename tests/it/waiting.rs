//! Waiting in line: order, hand-over, giving up, and what happens to waiters when things break.

use std::time::Duration;

use fencepost::testing::Server;
use fencepost::{Error, FencingToken, HeldLease, Lease, LossReason, Owner, Result, Wait};
use sqlx::postgres::PgPoolOptions;
use sqlx::{Executor as _, PgPool};
use tokio::task::JoinHandle;

use crate::cancel::after_polls;
use crate::proxy::Proxy;
use crate::support::{
    LONG, SHORT, TOUGH, database, hold, hold_when_free, lease, owner, until, until_true, within,
};

const NO_TICKET: &str = "SELECT NOT EXISTS (SELECT FROM fencepost.waiters)";

/// Begins to wait, and returns when it is in line.
async fn queue(pool: &PgPool, owner: &Owner, lease: &Lease, wait: Wait) -> JoinHandle<Result<HeldLease>> {
    // The newest, not how many: one of somebody who has given up may be on its way back.
    let newest = async || {
        let newest = "SELECT coalesce(max(ticket), 0) FROM fencepost.waiters";
        sqlx::query_scalar::<_, i64>(newest).fetch_one(pool).await.unwrap()
    };
    let before = newest().await;
    let (owner, lease) = (owner.clone(), lease.clone());
    let waiting = tokio::spawn(async move { lease.acquire(&owner, wait).await });
    until("it is in line", async || (newest().await > before).then_some(())).await;
    waiting
}

async fn served(waiting: JoinHandle<Result<HeldLease>>) -> HeldLease {
    within("being served", waiting).await.unwrap().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn first_come_first_served_within_and_across_processes() {
    let (_database, pool) = database().await;
    let (a, b, c) =
        (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await, owner(&pool, "c", LONG).await);
    let report = lease("report");
    let mut held = hold(&a, "report").await;
    let mut line = Vec::new();
    for owner in [&b, &b, &c, &a, &b, &c] {
        line.push(queue(&pool, owner, &report, Wait::forever()).await);
    }
    for (place, next) in line.into_iter().enumerate() {
        let token = held.token();
        assert!(held.release().await.unwrap(), "place {place}");
        held = served(next).await;
        // Nobody was served in between.
        assert_eq!(held.token().as_i64(), token.as_i64() + 1, "place {place}");
        assert!(held.is_held());
        let mut tx = held.begin(&pool).await.unwrap();
        sqlx::query("SELECT 1").execute(&mut *tx).await.unwrap();
        tx.commit().await.unwrap();
    }
    until_true(&pool, "no ticket is left", NO_TICKET).await;
}

// A free lease with a queue goes to its head, whoever asks.
#[tokio::test(flavor = "multi_thread")]
async fn a_fresh_try_never_jumps_the_queue() {
    let (_database, pool) = database().await;
    let (a, b, c) =
        (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await, owner(&pool, "c", LONG).await);
    let held = hold(&a, "report").await;
    let waiting = queue(&pool, &b, &lease("report"), Wait::forever()).await;
    // Its holder is gone without a word; nobody has noticed yet.
    pool.execute("UPDATE fencepost.owners SET expires_at = clock_timestamp() WHERE label = 'a'")
        .await
        .unwrap();
    assert!(lease("report").try_acquire(&c).await.unwrap().is_none(), "not for itself, but for the head");
    let next = served(waiting).await;
    assert!(next.token() > held.token());
    // From psql, too.
    let behind = queue(&pool, &c, &lease("report"), Wait::forever()).await;
    sqlx::query("UPDATE fencepost.leases SET released_at = clock_timestamp()").execute(&pool).await.unwrap();
    let granted: bool =
        sqlx::query_scalar("SELECT granted FROM fencepost.acquire('report', p_at_most => '1 minute')")
            .fetch_one(&pool)
            .await
            .unwrap();
    assert!(!granted);
    assert!(served(behind).await.token() > next.token());
}

#[tokio::test(flavor = "multi_thread")]
async fn every_end_of_a_hold_serves_the_head() {
    let (_database, pool) = database().await;
    let b = owner(&pool, "b", LONG).await;
    let report = lease("report");
    // Its release, its drop, its owner's shutdown, its owner's death, its cap, an operator, a release from psql.
    for end in ["release", "drop", "shutdown", "death", "cap", "revoke", "psql"] {
        let a = owner(&pool, end, LONG).await;
        let held = match end {
            "cap" => report.clone().at_most(SHORT).unwrap().try_acquire(&a).await.unwrap().unwrap(),
            _ => hold_when_free(&a, "report").await,
        };
        let (token, grant) = (held.token(), held.grant());
        let waiting = queue(&pool, &b, &report, Wait::forever()).await;
        match end {
            "release" => assert!(held.release().await.unwrap()),
            "drop" => drop(held),
            "shutdown" => a.shutdown().await.unwrap(),
            "death" => drop(
                sqlx::query("UPDATE fencepost.owners SET expires_at = clock_timestamp() WHERE label = $1")
                    .bind(end)
                    .execute(&pool)
                    .await
                    .unwrap(),
            ),
            "cap" => assert_eq!(held.lost().await, LossReason::Expired),
            "revoke" => drop(pool.execute("SELECT fencepost.revoke('report')").await.unwrap()),
            _ => drop(
                sqlx::query("SELECT fencepost.release('report', $1, $2)")
                    .bind(grant.token)
                    .bind(grant.id)
                    .execute(&pool)
                    .await
                    .unwrap(),
            ),
        }
        let next = served(waiting).await;
        assert!(next.token() > token, "{end}");
        assert!(next.release().await.unwrap(), "{end}");
    }
}

// As soon as an open fenced transaction of the one before has ended; and not before.
#[tokio::test(flavor = "multi_thread")]
async fn an_open_fence_delays_the_hand_over_until_it_ends() {
    let (_database, pool) = database().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let held = hold(&a, "report").await;
    let waiting = queue(&pool, &b, &lease("report"), Wait::forever()).await;
    let tx = held.begin(&pool).await.unwrap();
    assert!(within("the release", held.release()).await.unwrap());
    let free =
        "SELECT released_at IS NOT NULL AND EXISTS (SELECT FROM fencepost.waiters) FROM fencepost.leases";
    until_true(&pool, "free, and nobody is served", free).await;
    assert!(!waiting.is_finished());
    tx.commit().await.unwrap();
    assert!(served(waiting).await.is_held());
}

// C23, C24: the deadline of waiting is its own; a place given up is gone.
#[tokio::test(flavor = "multi_thread")]
async fn a_wait_that_is_over_says_who_held_it_up_and_leaves_no_ticket() {
    let (_database, pool) = database().await;
    let (a, b, c) =
        (owner(&pool, "worker-a", LONG).await, owner(&pool, "b", LONG).await, owner(&pool, "c", LONG).await);
    let held = hold(&a, "report").await;
    for wait in [Wait::no(), Wait::at_most(Duration::ZERO), Wait::at_most(Duration::from_millis(50))] {
        let error = lease("report").acquire(&b, wait).await.unwrap_err();
        assert!(matches!(error, Error::Busy { .. }) && error.is_timeout() && error.is_retryable());
        let expected = format!(": held by worker-a with token {}", held.token());
        assert!(error.to_string().contains(&expected), "{error}");
    }
    until_true(&pool, "no ticket is left", NO_TICKET).await;
    // The one behind it is served, not the one that gave up.
    let impatient = queue(&pool, &b, &lease("report"), Wait::at_most(SHORT)).await;
    let patient = queue(&pool, &c, &lease("report"), Wait::at_most(Duration::MAX)).await;
    assert!(within("giving up", impatient).await.unwrap().is_err());
    until_true(&pool, "its ticket is gone", "SELECT count(*) = 1 FROM fencepost.waiters").await;
    assert!(held.release().await.unwrap());
    assert!(served(patient).await.is_held());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_free_lease_is_acquired_at_once_whatever_the_wait() {
    let (_database, pool) = database().await;
    let a = owner(&pool, "a", LONG).await;
    for wait in [Wait::no(), Wait::at_most(Duration::MAX), Wait::forever()] {
        let held = within("at once", lease("report").acquire(&a, wait)).await.unwrap();
        assert!(held.release().await.unwrap());
    }
}

// Dropped at any moment: neither a ticket nor a grant is left. (A wait is one await to its caller, on the task in
// the owner's thread; so the moments are those of that task.)
#[tokio::test(flavor = "multi_thread")]
async fn a_wait_dropped_at_any_moment_leaves_nothing() {
    let (_database, pool) = database().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let report = lease("report");
    for round in 0..40 {
        let held = hold_when_free(&a, "report").await;
        match round % 4 {
            // Before and while it asks.
            0 => drop(after_polls(round / 4 % 2, report.acquire(&b, Wait::forever())).await),
            // While it is in line.
            1 => queue(&pool, &b, &report, Wait::forever()).await.abort(),
            // While it is being handed over, earlier and later.
            _ => {
                let waiting = queue(&pool, &b, &report, Wait::forever()).await;
                let release = tokio::spawn(held.release());
                for _ in 0..round {
                    tokio::task::yield_now().await;
                }
                waiting.abort();
                assert!(within("the release", release).await.unwrap().unwrap());
                until_true(&pool, "no ticket is left", NO_TICKET).await;
                continue;
            }
        }
        assert!(held.release().await.unwrap());
        until_true(&pool, "no ticket is left", NO_TICKET).await;
    }
    assert!(hold_when_free(&a, "report").await.is_held());
}

// A deadline that races with the grant: granted or not, never stranded.
#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_that_races_with_the_grant_strands_nothing() {
    let (_database, pool) = database().await;
    let (a, b, c) =
        (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await, owner(&pool, "c", LONG).await);
    let (mut granted, mut timed_out) = (0, 0);
    for round in 0..60 {
        let held = hold_when_free(&c, "report").await;
        let report = lease("report");
        let waiting = report.acquire(&b, Wait::at_most(Duration::from_millis(20)));
        // Released shortly before, at, and after the deadline.
        let release = async {
            let moment = Duration::from_millis(14 + round % 10);
            drop(tokio::time::timeout(moment, std::future::pending::<()>()).await);
            held.release().await
        };
        let (waited, _) = tokio::join!(waiting, release);
        match waited {
            Ok(held) => {
                granted += 1;
                drop(held);
            }
            Err(error) => {
                assert!(error.is_timeout(), "{error:?}");
                timed_out += 1;
            }
        }
        drop(hold_when_free(&a, "report").await);
    }
    until_true(&pool, "no ticket is left", NO_TICKET).await;
    assert_eq!(granted + timed_out, 60);
}

// C31: an owner that dies while waiting queues again under its next life.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_whose_owner_is_lost_queues_again() {
    let (_database, pool) = database().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", SHORT).await);
    let held = hold(&a, "report").await;
    let waiting = queue(&pool, &b, &lease("report"), Wait::forever()).await;
    let lost = tokio::spawn({
        let b = b.clone();
        async move { b.lost().await }
    });
    pool.execute("UPDATE fencepost.owners SET expires_at = 'epoch' WHERE label = 'b'").await.unwrap();
    within("the owner is told", lost).await.unwrap();
    let again = "SELECT EXISTS (SELECT FROM fencepost.waiters w JOIN fencepost.owners o ON o.id = w.owner AND o.expires_at > clock_timestamp())";
    until_true(&pool, "in line again", again).await;
    assert!(held.release().await.unwrap());
    assert!(served(waiting).await.is_held());
    until_true(&pool, "no ticket is left", "SELECT (SELECT count(*) FROM fencepost.waiters) <= 1").await;
}

// A dead waiter is skipped, as soon as its time is over; and is not granted anything.
#[tokio::test(flavor = "multi_thread")]
async fn a_dead_waiter_is_skipped() {
    let (_database, pool) = database().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let held = hold(&a, "report").await;
    // A process that queued and vanished.
    pool.execute(
        "SELECT fencepost.acquire('report', fencepost.owner_start('vanished', '300 ms'), p_enqueue => true)",
    )
    .await
    .unwrap();
    let waiting = queue(&pool, &b, &lease("report"), Wait::forever()).await;
    until_true(
        &pool,
        "the dead one is dead",
        "SELECT expires_at < clock_timestamp() FROM fencepost.owners WHERE label = 'vanished'",
    )
    .await;
    let token = held.token();
    assert!(held.release().await.unwrap());
    let next = served(waiting).await;
    assert_eq!(next.token().as_i64(), token.as_i64() + 1);
    until_true(&pool, "no ticket is left", NO_TICKET).await;
}

// Unlogged tickets vanish with a crash of the server: they queue again by themselves.
#[tokio::test(flavor = "multi_thread")]
async fn waiters_survive_a_crash_of_the_server() {
    let start = || Server::builder().setting("synchronous_commit", "on").start().unwrap();
    let server = tokio::task::spawn_blocking(start).await.unwrap();
    let pool = PgPoolOptions::new().max_connections(3).connect_lazy_with(server.options());
    fencepost::migrate(&pool).await.unwrap();
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let held = hold(&a, "report").await;
    let waiting: Vec<_> = (0..20)
        .map(|_| {
            let b = b.clone();
            tokio::spawn(async move {
                let held = lease("report").acquire(&b, Wait::forever()).await.unwrap();
                let token = held.token();
                assert!(held.release().await.unwrap());
                token
            })
        })
        .collect();
    until_true(&pool, "all are in line", "SELECT count(*) = 20 FROM fencepost.waiters").await;
    server.crash().unwrap();
    server.restart().unwrap();
    until("all are in line again", async || {
        let count =
            sqlx::query_scalar::<_, i64>("SELECT count(*) FROM fencepost.waiters").fetch_one(&pool).await;
        (count.ok()? == 20).then_some(())
    })
    .await;
    assert!(held.is_held() && held.release().await.unwrap());
    let mut tokens: Vec<FencingToken> = Vec::new();
    for waiter in waiting {
        tokens.push(within("being served", waiter).await.unwrap());
    }
    tokens.sort_unstable();
    tokens.dedup();
    assert_eq!(tokens.len(), 20);
}

// C46: the listening connection is lost: subscribed again, then everybody asks; and meanwhile they ask anyway.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_listener_loses_no_hand_over() {
    let (_database, pool) = database().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    for _ in 0..3 {
        let held = hold_when_free(&a, "report").await;
        let waiting = queue(&pool, &b, &lease("report"), Wait::forever()).await;
        until("the listener", async || (crate::support::terminate(&pool, "LISTEN").await > 0).then_some(()))
            .await;
        assert!(held.release().await.unwrap());
        assert!(served(waiting).await.release().await.unwrap());
    }
}

// No listening connection at all: those who wait ask.
#[tokio::test(flavor = "multi_thread")]
async fn without_notifications_the_waiters_ask() {
    let (database, observer) = database().await;
    let proxy = Proxy::before(database.options()).await;
    let pool = PgPoolOptions::new().connect_lazy_with(proxy.options());
    let (a, b) = (owner(&observer, "a", LONG).await, owner(&pool, "b", LONG).await);
    // Its calls go on; a new connection, as the listener's, is refused.
    drop(hold(&b, "warm").await);
    proxy.refuse(true);
    let held = hold(&a, "report").await;
    let waiting = queue(&observer, &b, &lease("report"), Wait::forever()).await;
    assert!(held.release().await.unwrap());
    assert!(served(waiting).await.is_held());
}

// Anybody may notify: what does not prove the grant id is not believed.
#[tokio::test(flavor = "multi_thread")]
async fn a_forged_notification_is_not_believed() {
    let (_database, pool) = database().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let held = hold(&a, "report").await;
    let waiting = queue(&pool, &b, &lease("report"), Wait::forever()).await;
    let listening = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'fencepost b' AND query LIKE 'LISTEN%')";
    until_true(&pool, "it listens", listening).await;
    let forged = "SELECT pg_notify(fencepost.wake_channel(owner), p) FROM fencepost.waiters, \
                  unnest(ARRAY[ticket || ' 999 ' || repeat('0', 64), ticket || ' 999', 'x', '', repeat('x', 7000)]) p";
    for _ in 0..200 {
        pool.execute(forged).await.unwrap();
    }
    // Everything sent before this was heard: a proven one, for a ticket after it, is.
    assert!(!waiting.is_finished());
    assert!(held.is_held());
    assert!(held.release().await.unwrap());
    let next = served(waiting).await;
    assert!(next.token().as_i64() < 999);
}

/// How often the proxy's side waits for the server while the lease goes from one to the other.
async fn round_trips_of_a_hand_over(observer: &PgPool, proxy: &Proxy, from: &Owner, to: &Owner) -> u64 {
    const LISTENING: &str = "SELECT EXISTS (SELECT FROM pg_stat_activity \
                             WHERE datname = current_database() AND query LIKE 'LISTEN%' AND state = 'idle')";
    let held = hold_when_free(from, "report").await;
    let waiting = queue(observer, to, &lease("report"), Wait::forever()).await;
    until_true(observer, "it listens", LISTENING).await;
    let before = proxy.round_trips();
    assert!(held.release().await.unwrap());
    let next = served(waiting).await;
    let trips = proxy.round_trips() - before;
    assert!(next.is_held() && next.release().await.unwrap());
    trips
}

// One statement a hand-over within a process, the release; and none in the waiter's process, if that is another one.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_is_handed_the_lease_without_a_question() {
    let (database, observer) = database().await;
    let proxy = Proxy::before(database.options()).await;
    let pool = PgPoolOptions::new().connect_lazy_with(proxy.options());
    let (elsewhere, here) = (owner(&observer, "elsewhere", LONG).await, owner(&pool, "here", LONG).await);
    assert!(hold(&here, "report").await.release().await.unwrap());
    for (from, expected) in [(&here, 1), (&elsewhere, 0)] {
        // A question in between is possible, once in a second or two: not in each of several rounds.
        until("a hand-over without a question", async || {
            (round_trips_of_a_hand_over(&observer, &proxy, from, &here).await == expected).then_some(())
        })
        .await;
    }
}

// C47: nobody waits, nobody is notified. Who waits and asks again writes nothing.
#[tokio::test(flavor = "multi_thread")]
async fn waiting_again_writes_nothing() {
    let server = tokio::task::spawn_blocking(|| Server::start().unwrap()).await.unwrap();
    let pool = PgPoolOptions::new().max_connections(1).connect_lazy_with(server.options());
    fencepost::migrate(&pool).await.unwrap();
    pool.execute("SELECT fencepost.acquire('report', fencepost.owner_start('a', '1 hour'))").await.unwrap();
    let (b, id) = (sqlx::types::Uuid::from_u128(1), sqlx::types::Uuid::from_u128(2));
    sqlx::query(
        "INSERT INTO fencepost.owners SELECT $1, 'b', ttl, started_at, expires_at FROM fencepost.owners",
    )
    .bind(b)
    .execute(&pool)
    .await
    .unwrap();
    let ask = async || {
        let (granted, ticket): (bool, Option<i64>) = sqlx::query_as(
            "SELECT granted, ticket FROM fencepost.acquire('report', $1, $2, p_enqueue => true)",
        )
        .bind(b)
        .bind(id)
        .fetch_one(&pool)
        .await
        .unwrap();
        assert!(!granted);
        ticket.unwrap()
    };
    let ticket = ask().await;
    let written = "SELECT pg_current_wal_insert_lsn()::text || ' ' || pg_current_snapshot()::text";
    until("a round without a byte of WAL or a transaction id", async || {
        let before: String = sqlx::query_scalar(written).fetch_one(&pool).await.unwrap();
        for _ in 0..100 {
            assert_eq!(ask().await, ticket, "its place stays");
        }
        let after: String = sqlx::query_scalar(written).fetch_one(&pool).await.unwrap();
        (before == after).then_some(())
    })
    .await;
}

// A cap counts from the grant: of which only the database knows the instant, so it is asked; also when the answer
// comes late, since nothing was heard of the hand-over.
#[tokio::test(flavor = "multi_thread")]
async fn a_cap_counts_from_the_hand_over_not_from_the_arrival_or_the_question() {
    let (database, observer) = database().await;
    let proxy = Proxy::before(database.options()).await;
    let deaf = PgPoolOptions::new().connect_lazy_with(proxy.options());
    let (a, b, c) =
        (owner(&observer, "a", LONG).await, owner(&observer, "b", LONG).await, owner(&deaf, "c", LONG).await);
    drop(hold(&c, "warm").await);
    // No listener of it gets through.
    proxy.refuse(true);
    let capped = lease("report").at_most(TOUGH).unwrap();
    for waiter in [&b, &c, &c, &c] {
        let held = hold_when_free(&a, "report").await;
        let waiting = queue(&observer, waiter, &capped, Wait::forever()).await;
        let waited = "SELECT clock_timestamp() > granted_at + interval '500 ms' FROM fencepost.leases WHERE name = 'report'";
        until_true(&observer, "it has waited for a part of that time", waited).await;
        assert!(held.release().await.unwrap());
        let next = served(waiting).await;
        assert!(next.remaining() > TOUGH / 2, "{:?}", next.remaining());
        let end = "SELECT date_part('epoch', expires_at - clock_timestamp()) FROM fencepost.leases WHERE name = 'report'";
        let end: f64 = sqlx::query_scalar(end).fetch_one(&observer).await.unwrap();
        // Asked later, so it has to be less: never longer than the database says.
        let remaining = next.remaining().as_secs_f64();
        assert!(remaining <= end, "believed for {remaining} s, granted for {end} s");
        drop(next);
    }
}

// All of them are held at one moment: what is lost while another is waited for is acquired again.
#[tokio::test(flavor = "multi_thread")]
async fn one_that_is_lost_while_another_is_waited_for_is_taken_again() {
    let (_database, pool) = database().await;
    let (a, b) = (owner(&pool, "a", SHORT).await, owner(&pool, "b", LONG).await);
    let y = hold(&b, "y").await;
    let taking = tokio::spawn({
        let a = a.clone();
        async move { Lease::acquire_all(&a, ["x", "y"].map(lease), Wait::forever()).await }
    });
    let waits = "SELECT EXISTS (SELECT FROM fencepost.waiters w JOIN fencepost.owners o ON o.id = w.owner AND o.expires_at > clock_timestamp() \
                 JOIN fencepost.leases x ON x.name = 'x' AND x.owner = o.id AND x.released_at IS NULL)";
    until_true(&pool, "it has x and waits for y", waits).await;
    let lost = a.clone();
    let lost = tokio::spawn(async move { lost.lost().await });
    pool.execute("UPDATE fencepost.owners SET expires_at = 'epoch' WHERE label = 'a'").await.unwrap();
    within("the loss", lost).await.unwrap();
    until_true(&pool, "it has x again and waits for y", waits).await;
    assert!(y.release().await.unwrap());
    let held = within("both", taking).await.unwrap().unwrap();
    assert!(held.len() == 2 && held.iter().all(HeldLease::is_held));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_while_waiting_ends_the_wait() {
    let (_database, pool) = database().await;
    let (a, b, c) =
        (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await, owner(&pool, "c", LONG).await);
    let held = hold(&a, "report").await;
    let waiting = queue(&pool, &b, &lease("report"), Wait::forever()).await;
    let behind = queue(&pool, &c, &lease("report"), Wait::forever()).await;
    within("the shutdown", b.shutdown()).await.unwrap();
    assert!(matches!(within("the wait", waiting).await.unwrap(), Err(Error::Stopped)));
    assert!(held.release().await.unwrap());
    assert!(served(behind).await.is_held());
    until_true(&pool, "no ticket is left", NO_TICKET).await;
}

// B1 for tickets: one that its process does not know is given back.
#[tokio::test(flavor = "multi_thread")]
async fn a_ticket_that_the_process_does_not_know_is_given_back() {
    let (_database, pool) = database().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let _held = hold(&a, "report").await;
    let id = crate::support::owner_id(&pool, "b").await;
    sqlx::query("SELECT fencepost.acquire('report', $1, p_enqueue => true)")
        .bind(id)
        .execute(&pool)
        .await
        .unwrap();
    assert!(crate::support::terminate(&pool, "").await > 0);
    assert!(hold(&b, "other").await.is_held());
    until_true(&pool, "no ticket is left", NO_TICKET).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn several_leases_are_taken_all_or_none_in_one_order() {
    let (_database, pool) = database().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let named = |names: &[&str]| names.iter().map(|name| lease(name)).collect::<Vec<_>>();
    let held = Lease::acquire_all(&a, named(&["z", "x", "y", "x"]), Wait::no()).await.unwrap();
    assert_eq!(held.iter().map(|held| held.name().as_str()).collect::<Vec<_>>(), ["x", "y", "z"]);
    drop(held);
    // One of them is not to be had: none is kept.
    let _y = hold_when_free(&b, "y").await;
    let error = Lease::acquire_all(&a, named(&["x", "y", "z"]), Wait::at_most(Duration::from_millis(50)))
        .await
        .unwrap_err();
    assert!(error.is_timeout() && error.to_string().contains("\"y\""), "{error}");
    for free in ["x", "z"] {
        drop(hold(&b, free).await);
    }
    // Dropped half-way: none is kept either.
    tokio::select! {
        _ = Lease::acquire_all(&a, named(&["w", "y"]), Wait::forever()) => panic!("y is held"),
        () = until_true(&pool, "it has w and waits for y", "SELECT EXISTS (SELECT FROM fencepost.waiters WHERE name = 'y')") => {}
    }
    assert!(hold_when_free(&b, "w").await.is_held());
    assert!(Lease::acquire_all(&a, [], Wait::no()).await.unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn those_who_take_several_do_not_deadlock() {
    let (_database, pool) = database().await;
    let mut tasks = Vec::new();
    for n in 0..4 {
        let owner = owner(&pool, &format!("o{n}"), LONG).await;
        for order in [["x", "y", "z"], ["z", "y", "x"], ["y", "z", "x"]] {
            let owner = owner.clone();
            tasks.push(tokio::spawn(async move {
                for _ in 0..3 {
                    let leases = order.map(lease);
                    drop(Lease::acquire_all(&owner, leases, Wait::forever()).await.unwrap());
                }
            }));
        }
    }
    for task in tasks {
        within("all get their turn", task).await.unwrap();
    }
    until_true(&pool, "no ticket is left", NO_TICKET).await;
}

// A heartbeat that was in time and is not yet committed: its owner's ticket keeps its place. Whoever frees the lease
// meanwhile does not decide, and hands over when that is decided.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_whose_heartbeat_is_in_flight_keeps_its_place() {
    for commits in [true, false] {
        let (database, pool) = database().await;
        let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
        let held = hold(&a, "report").await;
        let first: sqlx::types::Uuid =
            sqlx::query_scalar("SELECT fencepost.owner_start('first', '1 minute')")
                .fetch_one(&pool)
                .await
                .unwrap();
        sqlx::query("SELECT fencepost.acquire('report', $1, p_enqueue => true)")
            .bind(first)
            .execute(&pool)
            .await
            .unwrap();
        let second = queue(&pool, &b, &lease("report"), Wait::forever()).await;
        let mut beating = crate::support::connect(&database.options()).await;
        until("a beat shortly before the end", async || {
            sqlx::query("UPDATE fencepost.owners SET expires_at = clock_timestamp() + interval '200 ms' WHERE id = $1")
                .bind(first)
                .execute(&pool)
                .await
                .unwrap();
            beating.execute("BEGIN").await.unwrap();
            let beat = sqlx::query("SELECT * FROM fencepost.heartbeat($1)").bind(first).fetch_optional(&mut beating).await;
            if beat.unwrap().is_some() {
                return Some(());
            }
            beating.execute("ROLLBACK").await.unwrap();
            None
        })
        .await;
        let over = "SELECT expires_at < clock_timestamp() FROM fencepost.owners WHERE label = 'first'";
        until_true(&pool, "what is committed is over", over).await;
        assert!(within("the release", held.release()).await.unwrap(), "it does not wait for the heartbeat");
        let undecided = "SELECT released_at IS NOT NULL AND (SELECT count(*) = 2 FROM fencepost.waiters) FROM fencepost.leases";
        until_true(&pool, "nobody was served, and both wait", undecided).await;
        beating.execute(if commits { "COMMIT" } else { "ROLLBACK" }).await.unwrap();
        if commits {
            until_true(
                &pool,
                "the first is served",
                "SELECT label = 'first' AND released_at IS NULL FROM fencepost.leases",
            )
            .await;
            assert!(!second.is_finished());
            second.abort();
        } else {
            assert!(served(second).await.is_held(), "the first was dead indeed");
        }
    }
}
