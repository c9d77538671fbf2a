//! The owner-row protocol, interleaving by interleaving: two transactions held open at the step that matters.
//! Stress hides some of these faults. B1 to B7 are traps that an earlier draft of the protocol fell into.

use fencepost::testing::TestDatabase;
use sqlx::types::Uuid;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, PgPool, Row as _};
use tokio::task::JoinHandle;

use crate::support::{LONG, connect, database, hold, owner, owner_id, terminate, until, until_true, within};

struct Stage {
    database: TestDatabase,
    pool: PgPool,
}

impl Stage {
    async fn new() -> Self {
        let (database, pool) = database().await;
        Self { database, pool }
    }

    async fn actor(&self) -> PgConnection {
        let mut conn = connect(&self.database.options()).await;
        // The caller's own bound stays; without one a retry gives up after 100 ms behind a held row.
        run(&mut conn, "SET lock_timeout = '1min'").await;
        conn
    }

    async fn owner(&self, ttl: &str) -> Uuid {
        sqlx::query_scalar("SELECT fencepost.owner_start('x', $1::text::interval)")
            .bind(ttl)
            .fetch_one(&self.pool)
            .await
            .unwrap()
    }

    /// An owner whose time is over and whom nobody has marked dead.
    async fn expired_owner(&self) -> Uuid {
        let id = self.owner("1 minute").await;
        self.expire(id).await;
        id
    }

    async fn expire(&self, id: Uuid) {
        sqlx::query("UPDATE fencepost.owners SET expires_at = clock_timestamp() WHERE id = $1")
            .bind(id)
            .execute(&self.pool)
            .await
            .unwrap();
    }

    async fn marked_dead(&self, id: Uuid) -> bool {
        sqlx::query_scalar("SELECT expires_at = 'epoch' FROM fencepost.owners WHERE id = $1")
            .bind(id)
            .fetch_one(&self.pool)
            .await
            .unwrap()
    }

    /// A heartbeat that was in time and is not committed, until what is committed says that it is over.
    async fn beat_in_flight_beyond_the_end(&self, beating: &mut PgConnection, holder: Uuid) {
        until("a beat shortly before the end", async || {
            sqlx::query("UPDATE fencepost.owners SET expires_at = clock_timestamp() + interval '200 ms' WHERE id = $1")
                .bind(holder)
                .execute(&self.pool)
                .await
                .unwrap();
            run(beating, "BEGIN").await;
            if beats(beating, holder).await {
                return Some(());
            }
            // Too slow this time: it cannot come back, so let it live again by hand.
            run(beating, "ROLLBACK").await;
            None
        })
        .await;
        until_true(
            &self.pool,
            "its time is over",
            "SELECT min(expires_at) < clock_timestamp() FROM fencepost.owners",
        )
        .await;
    }

    /// Until somebody in this database waits for a lock.
    async fn someone_waits(&self) {
        until_true(
            &self.pool,
            "somebody waits for a lock",
            "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')",
        )
        .await;
    }
}

/// (granted, token)
async fn acquire(
    conn: &mut PgConnection,
    name: &str,
    owner: Uuid,
    id: Uuid,
    retry: bool,
) -> sqlx::Result<(bool, Option<i64>)> {
    let row = sqlx::query("SELECT granted, token FROM fencepost.acquire($1, $2, $3, p_retry => $4)")
        .bind(name)
        .bind(owner)
        .bind(id)
        .bind(retry)
        .fetch_one(conn)
        .await?;
    Ok((row.get("granted"), row.get("token")))
}

async fn granted(conn: &mut PgConnection, name: &str, owner: Uuid) -> bool {
    acquire(conn, name, owner, Uuid::new_v4(), false).await.unwrap().0
}

async fn beats(conn: &mut PgConnection, owner: Uuid) -> bool {
    sqlx::query("SELECT * FROM fencepost.heartbeat($1)")
        .bind(owner)
        .fetch_optional(conn)
        .await
        .unwrap()
        .is_some()
}

async fn run(conn: &mut PgConnection, text: &'static str) {
    conn.execute(text).await.unwrap();
}

fn aside<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
    tokio::spawn(work)
}

// A heartbeat in flight commits: the take-over waits for it and is refused.
#[tokio::test(flavor = "multi_thread")]
async fn a_takeover_waits_for_a_heartbeat_in_flight_and_judges_again() {
    for commits in [true, false] {
        let stage = Stage::new().await;
        let (mut beating, mut taking) = (stage.actor().await, stage.actor().await);
        let (holder, taker) = (stage.owner("1 minute").await, stage.owner("1 minute").await);
        assert!(granted(&mut taking, "x", holder).await);
        stage.beat_in_flight_beyond_the_end(&mut beating, holder).await;
        let takeover = aside(async move { (granted(&mut taking, "x", taker).await, taking) });
        stage.someone_waits().await;
        run(&mut beating, if commits { "COMMIT" } else { "ROLLBACK" }).await;
        let (got_it, _) = within("the take-over", takeover).await.unwrap();
        assert_eq!(got_it, !commits);
        assert_eq!(stage.marked_dead(holder).await, !commits, "dead exactly if it was taken from");
    }
}

// Found by the model of the line: judged by the committed row alone, the owner is dead; its heartbeat is in flight, and
// it lives on. A release that did nothing then left the lease to an owner whose process had forgotten it.
#[tokio::test(flavor = "multi_thread")]
async fn a_release_beside_a_heartbeat_in_flight_frees_the_lease() {
    let stage = Stage::new().await;
    let (mut a, mut releasing, mut b) = (stage.actor().await, stage.actor().await, stage.actor().await);
    let (dying, other) = (stage.owner("1 minute").await, stage.owner("1 minute").await);
    let id = Uuid::new_v4();
    let (granted_to_a, token) = acquire(&mut a, "report", dying, id, false).await.unwrap();
    assert!(granted_to_a);
    stage.beat_in_flight_beyond_the_end(&mut a, dying).await;
    let release =
        sqlx::query("SELECT released FROM fencepost.release('report', $1, $2)").bind(token).bind(id);
    assert!(
        !release.fetch_one(&mut releasing).await.unwrap().get::<bool, _>(0),
        "by what is committed, it was lost"
    );
    run(&mut a, "COMMIT").await;
    assert!(beats(&mut a, dying).await, "it lives on");
    let again = sqlx::query("SELECT released FROM fencepost.release('report', $1, $2)").bind(token).bind(id);
    assert!(!again.fetch_one(&mut releasing).await.unwrap().get::<bool, _>(0), "the same answer");
    assert!(granted(&mut b, "report", other).await, "and yet it is free");
}

// A mark in flight commits: the heartbeat waits for it and fails. Without the written mark it would succeed.
#[tokio::test(flavor = "multi_thread")]
async fn a_heartbeat_waits_for_a_takeover_in_flight_and_fails() {
    for commits in [true, false] {
        let stage = Stage::new().await;
        let (mut beating, mut taking) = (stage.actor().await, stage.actor().await);
        let (holder, taker) = (stage.owner("1 minute").await, stage.owner("1 minute").await);
        assert!(granted(&mut taking, "x", holder).await);
        stage.expire(holder).await;
        run(&mut taking, "BEGIN").await;
        assert!(granted(&mut taking, "x", taker).await);
        let beat = aside(async move { (beats(&mut beating, holder).await, beating) });
        stage.someone_waits().await;
        run(&mut taking, if commits { "COMMIT" } else { "ROLLBACK" }).await;
        let (alive, mut beating) = within("the heartbeat", beat).await.unwrap();
        assert!(!alive, "it had expired in any case");
        assert_eq!(stage.marked_dead(holder).await, commits);
        assert!(!beats(&mut beating, holder).await, "dead is final");
    }
}

// C21, C15: an owner that expired does not come back, taken from or not.
#[tokio::test(flavor = "multi_thread")]
async fn an_expired_owner_does_not_come_back() {
    let stage = Stage::new().await;
    let mut conn = stage.actor().await;
    let holder = stage.expired_owner().await;
    assert!(!beats(&mut conn, holder).await);
    assert!(!beats(&mut conn, Uuid::new_v4()).await, "nor one that never was: no upsert");
    let refused = acquire(&mut conn, "x", holder, Uuid::new_v4(), false).await.unwrap_err();
    assert_eq!(refused.as_database_error().unwrap().code().unwrap(), "LK003");
    // Also where the lease exists, and its holder is somebody else or dead.
    let other = stage.owner("1 minute").await;
    assert!(granted(&mut conn, "y", other).await);
    assert!(!granted(&mut conn, "y", holder).await);
    stage.expire(other).await;
    let refused = acquire(&mut conn, "y", holder, Uuid::new_v4(), false).await.unwrap_err();
    assert_eq!(refused.as_database_error().unwrap().code().unwrap(), "LK003");
}

// C25, C26: judged by a clock that runs, after the wait: a lease that expires while somebody waits is seen as expired,
// and what is granted after the wait has its whole life.
#[tokio::test(flavor = "multi_thread")]
async fn expiry_is_judged_and_computed_after_the_wait() {
    let stage = Stage::new().await;
    let (mut blocking, mut fencing) = (stage.actor().await, stage.actor().await);
    let row = sqlx::query("SELECT * FROM fencepost.acquire('x', p_at_most => '200 milliseconds')")
        .fetch_one(&stage.pool)
        .await
        .unwrap();
    let (token, id): (i64, Uuid) = (row.get("token"), row.get("grant_id"));
    run(&mut blocking, "BEGIN; SELECT FROM fencepost.leases FOR UPDATE").await;
    // Both begin before it expires, and wait beyond.
    let fence = aside(async move {
        run(&mut fencing, "BEGIN").await;
        sqlx::query("SELECT fencepost.fence('x', $1, $2)").bind(token).bind(id).execute(&mut fencing).await
    });
    stage.someone_waits().await;
    until_true(&stage.pool, "it has expired", "SELECT expires_at < clock_timestamp() FROM fencepost.leases")
        .await;
    run(&mut blocking, "COMMIT").await;
    let refused = within("the fence", fence).await.unwrap().unwrap_err();
    assert_eq!(
        refused.as_database_error().unwrap().code().unwrap(),
        "LK002",
        "not the clock of before the wait"
    );
    run(&mut blocking, "BEGIN; SELECT FROM fencepost.leases FOR UPDATE").await;
    let (mut waiting, asker) = (stage.actor().await, stage.owner("1 minute").await);
    let acquire = aside(async move {
        sqlx::query("SELECT granted, remaining > interval '900 milliseconds' AS whole FROM fencepost.acquire('x', $1, p_at_most => '1 second', p_retry => true)")
            .bind(asker)
            .fetch_one(&mut waiting)
            .await
    });
    stage.someone_waits().await;
    let later = "SELECT clock_timestamp() > min(query_start) + interval '300 milliseconds' FROM pg_stat_activity \
                 WHERE datname = current_database() AND wait_event_type = 'Lock'";
    until_true(&stage.pool, "it has waited for a part of that life", later).await;
    run(&mut blocking, "COMMIT").await;
    let row = within("the acquire", acquire).await.unwrap().unwrap();
    assert!(row.get::<bool, _>("granted") && row.get::<bool, _>("whole"), "computed after the wait");
}

// C43: a fence that waits for a take-over in flight does not pass when that commits; and its transaction is clean
// if the take-over rolls back.
#[tokio::test(flavor = "multi_thread")]
async fn a_fence_waits_for_a_takeover_in_flight() {
    for level in ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"] {
        for commits in [true, false] {
            let stage = Stage::new().await;
            let (mut taking, mut fencing) = (stage.actor().await, stage.actor().await);
            let row = sqlx::query("SELECT * FROM fencepost.acquire('x', p_at_most => '1 minute')")
                .fetch_one(&stage.pool)
                .await
                .unwrap();
            let (token, id): (i64, Uuid) = (row.get("token"), row.get("grant_id"));
            run(&mut fencing, "BEGIN").await;
            fencing
                .execute(AssertSqlSafe(format!(
                    "SET TRANSACTION ISOLATION LEVEL {level}; SELECT FROM fencepost.leases"
                )))
                .await
                .unwrap();
            // A take-over of a lease that is still alive when it is rolled back: its cap is pulled in inside.
            run(&mut taking, "BEGIN; UPDATE fencepost.leases SET expires_at = clock_timestamp()").await;
            let taker = stage.owner("1 minute").await;
            assert!(granted(&mut taking, "x", taker).await);
            let fence = aside(async move {
                let passed = sqlx::query("SELECT fencepost.fence('x', $1, $2)")
                    .bind(token)
                    .bind(id)
                    .execute(&mut fencing)
                    .await;
                (passed, fencing)
            });
            stage.someone_waits().await;
            run(&mut taking, if commits { "COMMIT" } else { "ROLLBACK" }).await;
            let (passed, _) = within("the fence", fence).await.unwrap();
            let code =
                passed.map_err(|error| error.as_database_error().unwrap().code().unwrap().into_owned());
            match (commits, level) {
                (false, _) => assert!(code.is_ok(), "{level}: {code:?}"),
                (true, "READ COMMITTED") => assert_eq!(code.unwrap_err(), "LK001"),
                (true, _) => assert_eq!(code.unwrap_err(), "40001", "{level}"),
            }
        }
    }
}

// B5: a concurrent retry waits for the first attempt instead of answering "refused" beside it.
#[tokio::test(flavor = "multi_thread")]
async fn b5_a_retry_waits_for_its_own_first_attempt() {
    for first_ever in [true, false] {
        for commits in [true, false] {
            let stage = Stage::new().await;
            let (mut first, mut second) = (stage.actor().await, stage.actor().await);
            let asker = stage.owner("1 minute").await;
            if !first_ever {
                let earlier = stage.expired_owner().await;
                sqlx::query("INSERT INTO fencepost.leases VALUES ('x', nextval('fencepost.fencing_token'), gen_random_uuid(), $1, 'x', clock_timestamp())")
                    .bind(earlier)
                    .execute(&stage.pool)
                    .await
                    .unwrap();
            }
            let id = Uuid::new_v4();
            run(&mut first, "BEGIN").await;
            let (_, token) = acquire(&mut first, "x", asker, id, false).await.unwrap();
            let retry = aside(async move { acquire(&mut second, "x", asker, id, true).await });
            stage.someone_waits().await;
            run(&mut first, if commits { "COMMIT" } else { "ROLLBACK" }).await;
            let (granted, again) = within("the retry", retry).await.unwrap().unwrap();
            assert!(granted);
            assert_eq!(again == token, commits, "the same grant if there was one");
        }
    }
}

// Behind somebody's open transaction neither a retry nor an arrival waits for long; a ticket does not wait at all.
#[tokio::test(flavor = "multi_thread")]
async fn nobody_waits_for_long_behind_an_open_transaction() {
    let stage = Stage::new().await;
    let (mut open, mut asking) = (stage.actor().await, stage.actor().await);
    run(&mut asking, "SET lock_timeout = 0").await;
    let (holder, asker) = (stage.owner("1 minute").await, stage.owner("1 minute").await);
    assert!(granted(&mut open, "x", holder).await);
    let id = Uuid::new_v4();
    let enqueue = "SELECT ticket FROM fencepost.acquire('x', $1, $2, p_enqueue => true)";
    run(&mut open, "BEGIN; SELECT fencepost.revoke('x')").await;
    for call in [enqueue, "SELECT ticket FROM fencepost.acquire('x', $1, $2, p_retry => true)"] {
        let answer = sqlx::query(call).bind(asker).bind(id).execute(&mut asking);
        if let Err(error) = within("the answer", answer).await {
            assert_eq!(error.as_database_error().unwrap().code().unwrap(), "55P03", "{call}");
        }
    }
    run(&mut open, "ROLLBACK").await;
    let ticket: Option<i64> =
        sqlx::query_scalar(enqueue).bind(asker).bind(id).fetch_one(&mut asking).await.unwrap();
    assert!(ticket.is_some());
    stage.expire(holder).await;
    run(&mut open, "BEGIN; SELECT FROM fencepost.leases FOR UPDATE").await;
    let again: Option<i64> =
        within("the answer", sqlx::query_scalar(enqueue).bind(asker).bind(id).fetch_one(&mut asking))
            .await
            .unwrap();
    assert_eq!(again, ticket);
    run(&mut open, "ROLLBACK").await;
}

// The naive retry, which skips the locked row, does answer "refused": the test above is not blind.
#[tokio::test(flavor = "multi_thread")]
async fn b5_a_try_that_skips_the_lock_is_refused_beside_its_own_first_attempt() {
    let stage = Stage::new().await;
    let (mut first, mut second) = (stage.actor().await, stage.actor().await);
    let asker = stage.owner("1 minute").await;
    sqlx::query(
        "SELECT fencepost.release('x', token, grant_id) FROM fencepost.acquire('x', p_at_most => '1 s')",
    )
    .execute(&stage.pool)
    .await
    .unwrap();
    let id = Uuid::new_v4();
    run(&mut first, "BEGIN").await;
    assert!(acquire(&mut first, "x", asker, id, false).await.unwrap().0);
    assert!(!acquire(&mut second, "x", asker, id, false).await.unwrap().0);
    run(&mut first, "COMMIT").await;
}

// B1: a living owner holds a grant that its process does not know: it is found and released.
#[tokio::test(flavor = "multi_thread")]
async fn b1_a_grant_that_the_process_does_not_know_is_released() {
    let stage = Stage::new().await;
    let a = owner(&stage.pool, "a", LONG).await;
    let known = hold(&a, "known").await;
    let id = owner_id(&stage.pool, "a").await;
    // As after a lost release, a lost answer, or an attempt that arrives after it was given up.
    let mut zombie = stage.actor().await;
    assert!(granted(&mut zombie, "unknown", id).await);
    let b = owner(&stage.pool, "b", LONG).await;
    assert!(
        crate::support::lease("unknown").try_acquire(&b).await.unwrap().is_none(),
        "stranded, for as long as a beats"
    );
    // After a session broke, the owner looks.
    assert!(terminate(&stage.pool, "fencepost").await > 0);
    drop(crate::support::lease("other").try_acquire(&a).await.unwrap());
    let found = crate::support::hold_when_free(&b, "unknown").await;
    assert!(found.is_held() && known.is_held() && a.is_alive());
    assert!(known.release().await.unwrap());
}

// B2: nothing here lowers the caller's synchronous_commit; what grants raises it.
#[tokio::test(flavor = "multi_thread")]
async fn b2_functions_only_ever_raise_synchronous_commit() {
    let stage = Stage::new().await;
    let mut conn = stage.actor().await;
    let id = stage.owner("1 minute").await;
    let grant = "WITH g AS (SELECT * FROM fencepost.acquire('x', p_at_most => '1 minute')) SELECT fencepost.release('x', token, grant_id) FROM g";
    let (start, acquire) = (
        "SELECT fencepost.owner_start('y', '1 minute')",
        "SELECT fencepost.acquire('y', p_at_most => '1 minute')",
    );
    let beat = format!("SELECT fencepost.heartbeat('{id}')");
    let stop = format!("SELECT fencepost.owner_stop('{id}')");
    sqlx::query("SELECT fencepost.acquire('x', p_at_most => '1 ms')").execute(&stage.pool).await.unwrap();
    sqlx::query("SELECT fencepost.acquire('y', p_at_most => '1 ms')").execute(&stage.pool).await.unwrap();
    until_true(
        &stage.pool,
        "both are over",
        "SELECT max(expires_at) < clock_timestamp() FROM fencepost.leases",
    )
    .await;
    let release = "SELECT fencepost.release(name, token, grant_id) FROM fencepost.leases";
    for (before, call, after) in [
        ("on", release, "on"),
        ("remote_apply", release, "remote_apply"),
        ("off", release, "off"),
        ("local", release, "local"),
        ("on", stop.as_str(), "on"),
        ("off", start, "on"),
        ("local", start, "on"),
        ("off", acquire, "on"),
        ("remote_apply", acquire, "remote_apply"),
        ("off", grant, "on"),
        ("off", beat.as_str(), "on"),
    ] {
        conn.execute(AssertSqlSafe(format!("BEGIN; SET LOCAL synchronous_commit = {before}"))).await.unwrap();
        conn.execute(AssertSqlSafe(call.to_owned())).await.unwrap();
        let now: String = sqlx::query_scalar("SHOW synchronous_commit").fetch_one(&mut conn).await.unwrap();
        assert_eq!(now, after, "{before}, {call}");
        run(&mut conn, "ROLLBACK").await;
    }
}

// B6: stopping takes the leases first and never waits for one, so it cannot deadlock with a take-over.
#[tokio::test(flavor = "multi_thread")]
async fn b6_stopping_an_owner_does_not_wait_for_a_takeover() {
    let stage = Stage::new().await;
    let (mut taking, mut stopping) = (stage.actor().await, stage.actor().await);
    let (holder, taker) = (stage.owner("1 minute").await, stage.owner("1 minute").await);
    for name in ["x", "y"] {
        assert!(granted(&mut taking, name, holder).await);
    }
    // A take-over that has the lease's row and not yet the owner's.
    run(&mut taking, "BEGIN; SELECT FROM fencepost.leases WHERE name = 'x' FOR UPDATE").await;
    let freed: i64 = within(
        "stopping",
        sqlx::query_scalar("SELECT count(*) FROM fencepost.owner_stop($1)")
            .bind(holder)
            .fetch_one(&mut stopping),
    )
    .await
    .unwrap();
    assert_eq!(freed, 1, "the locked one is left to whoever has it");
    assert!(granted(&mut taking, "x", taker).await, "its holder is dead");
    run(&mut taking, "COMMIT").await;
    assert!(granted(&mut taking, "y", taker).await);
}

// Nor for a fenced write of its own: it is freed, and the next grant waits.
#[tokio::test(flavor = "multi_thread")]
async fn neither_release_nor_stop_waits_for_an_open_fence() {
    let stage = Stage::new().await;
    let (mut fencing, mut other) = (stage.actor().await, stage.actor().await);
    let (holder, taker) = (stage.owner("1 minute").await, stage.owner("1 minute").await);
    for ending in [
        "SELECT fencepost.release(name, token, grant_id) FROM fencepost.leases WHERE name = 'x'",
        "SELECT fencepost.owner_stop(owner) FROM fencepost.leases WHERE name = 'x'",
    ] {
        assert!(granted(&mut other, "x", holder).await);
        run(
            &mut fencing,
            "BEGIN; SELECT fencepost.fence(name, token, grant_id) FROM fencepost.leases WHERE name = 'x'",
        )
        .await;
        within(ending, other.execute(ending)).await.unwrap();
        assert!(!granted(&mut other, "x", taker).await, "while the write is open");
        run(&mut fencing, "COMMIT").await;
        assert!(granted(&mut other, "x", taker).await);
        sqlx::query("SELECT fencepost.revoke('x')").execute(&mut other).await.unwrap();
    }
}

// A cap that ended is not its owner's end: the take-over does not bury a living owner.
#[tokio::test(flavor = "multi_thread")]
async fn taking_over_a_capped_lease_leaves_its_owner_alive() {
    let stage = Stage::new().await;
    let mut conn = stage.actor().await;
    let (holder, taker) = (stage.owner("1 minute").await, stage.owner("1 minute").await);
    sqlx::query("SELECT fencepost.acquire('x', $1, p_at_most => '1 ms')")
        .bind(holder)
        .execute(&mut conn)
        .await
        .unwrap();
    until("the cap", async || granted(&mut conn, "x", taker).await.then_some(())).await;
    assert!(beats(&mut conn, holder).await && !stage.marked_dead(holder).await);
}

// Many processes take over many leases of one dead owner at once: each exactly once, no deadlock.
#[tokio::test(flavor = "multi_thread")]
async fn a_mass_takeover_grants_each_lease_once() {
    const LEASES: usize = 200;
    let stage = Stage::new().await;
    let mut conn = stage.actor().await;
    let holder = stage.owner("1 minute").await;
    for n in 0..LEASES {
        assert!(granted(&mut conn, &format!("lease-{n}"), holder).await);
    }
    stage.expire(holder).await;
    let takers: Vec<_> = (0..4)
        .map(|first| {
            let (pool, options) = (stage.pool.clone(), stage.database.options());
            aside(async move {
                let mut conn = connect(&options).await;
                let taker: Uuid = sqlx::query_scalar("SELECT fencepost.owner_start('t', '1 minute')")
                    .fetch_one(&pool)
                    .await
                    .unwrap();
                let mut grants = 0;
                for n in 0..LEASES {
                    // From different ends, so that they cross.
                    let n = if first % 2 == 0 { n } else { LEASES - 1 - n };
                    grants += usize::from(granted(&mut conn, &format!("lease-{n}"), taker).await);
                }
                grants
            })
        })
        .collect();
    let mut grants = 0;
    for taker in takers {
        grants += within("a taker", taker).await.unwrap();
    }
    // A try that skips a row somebody else has this moment is refused, and that one gets it.
    assert_eq!(grants, LEASES);
    assert!(stage.marked_dead(holder).await);
}

// C54: heartbeats and grants stay in place: no index follows them.
#[tokio::test(flavor = "multi_thread")]
async fn heartbeats_and_grants_are_hot_updates() {
    let stage = Stage::new().await;
    let mut conn = stage.actor().await;
    let a = stage.owner("1 minute").await;
    for _ in 0..300 {
        assert!(beats(&mut conn, a).await);
        sqlx::query("SELECT fencepost.release('x', token, grant_id) FROM fencepost.acquire('x', $1)")
            .bind(a)
            .execute(&mut conn)
            .await
            .unwrap();
    }
    // The end of a session delivers its counts.
    conn.close().await.unwrap();
    let hot = "SELECT bool_and(n_tup_hot_upd::float8 >= 0.98 * n_tup_upd AND n_tup_upd >= 290) FROM pg_stat_user_tables WHERE relname IN ('owners', 'leases')";
    until_true(&stage.pool, "hot updates", hot).await;
}
