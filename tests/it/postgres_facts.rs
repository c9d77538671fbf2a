//! What the code believes of Postgres, one test a belief. A server version that breaks one breaks the library.

use sqlx::{Executor as _, PgConnection, Row as _};
use tokio::task::JoinHandle;

use crate::support::{connect, database, until_true, within};

async fn two() -> (fencepost::testing::TestDatabase, sqlx::PgPool, PgConnection, PgConnection) {
    let (database, pool) = database().await;
    pool.execute("CREATE TABLE fact (id int PRIMARY KEY, n int NOT NULL, until timestamptz); INSERT INTO fact VALUES (1, 0, clock_timestamp() + interval '200 ms')")
        .await
        .unwrap();
    let (a, b) = (connect(&database.options()).await, connect(&database.options()).await);
    (database, pool, a, b)
}

fn aside<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
    tokio::spawn(work)
}

const SOMEBODY_WAITS: &str = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')";

async fn run(conn: &mut PgConnection, text: &'static str) -> Result<(), String> {
    let done = conn.execute(sqlx::raw_sql(text)).await;
    done.map(drop).map_err(|error| error.as_database_error().unwrap().code().unwrap().into_owned())
}

async fn text(conn: &mut PgConnection, query: &'static str) -> String {
    conn.fetch_one(sqlx::raw_sql(query)).await.unwrap().get(0)
}

// `HeldLease::begin`: statements of one message share an implicit transaction, which BEGIN makes the explicit one.
#[tokio::test(flavor = "multi_thread")]
async fn begin_at_the_end_of_a_message_keeps_what_came_before_it() {
    let (_database, pool, mut a, _) = two().await;
    run(&mut a, "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE; SELECT FROM fact FOR KEY SHARE; UPDATE fact SET n = 1; BEGIN").await.unwrap();
    assert_eq!(text(&mut a, "SHOW transaction_isolation").await, "serializable");
    until_true(&pool, "not committed", "SELECT n = 0 FROM fact").await;
    run(&mut a, "ROLLBACK").await.unwrap();
    until_true(&pool, "rolled back", "SELECT n = 0 FROM fact").await;
    // An error before BEGIN leaves no transaction at all.
    assert_eq!(run(&mut a, "SELECT 1/0; BEGIN").await.unwrap_err(), "22012");
    assert_eq!(text(&mut a, "SELECT 'fine'").await, "fine");
}

// `acquire`: a raised setting lasts to the commit, through the function's own SET clause.
#[tokio::test(flavor = "multi_thread")]
async fn a_setting_raised_in_a_function_lasts_until_the_commit() {
    let (_database, _pool, mut a, _) = two().await;
    run(&mut a, "CREATE FUNCTION raise() RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog AS $$ BEGIN PERFORM set_config('synchronous_commit', 'on', true); END $$; SET synchronous_commit = off").await.unwrap();
    run(&mut a, "BEGIN; SELECT raise()").await.unwrap();
    assert_eq!(text(&mut a, "SHOW synchronous_commit").await, "on");
    run(&mut a, "COMMIT").await.unwrap();
    assert_eq!(text(&mut a, "SHOW synchronous_commit").await, "off");
}

// `fence`: the credential of `protect` ends with the transaction, and with a savepoint that is rolled back.
#[tokio::test(flavor = "multi_thread")]
async fn a_local_setting_of_our_own_ends_with_its_transaction_or_savepoint() {
    let (_database, _pool, mut a, _) = two().await;
    let passed = "SELECT coalesce(current_setting('fencepost.passed', true), '')";
    run(&mut a, "BEGIN; SAVEPOINT s; SELECT set_config('fencepost.passed', 'x', true)").await.unwrap();
    assert_eq!(text(&mut a, passed).await, "x");
    run(&mut a, "ROLLBACK TO s").await.unwrap();
    assert_eq!(text(&mut a, passed).await, "");
    run(&mut a, "SELECT set_config('fencepost.passed', 'x', true); COMMIT").await.unwrap();
    assert_eq!(text(&mut a, passed).await, "");
}

// Lock in one statement, judge in the next: a condition of the locking statement is not evaluated again after a
// wait for a transaction that only locked the row.
#[tokio::test(flavor = "multi_thread")]
async fn a_condition_is_judged_before_the_wait_for_the_row() {
    let (_database, pool, mut a, mut b) = two().await;
    run(&mut a, "UPDATE fact SET until = clock_timestamp() + interval '300 ms'").await.unwrap();
    run(&mut a, "BEGIN; SELECT FROM fact FOR UPDATE").await.unwrap();
    let update = aside(async move {
        b.execute("UPDATE fact SET n = 1 WHERE id = 1 AND until > clock_timestamp()")
            .await
            .unwrap()
            .rows_affected()
    });
    until_true(&pool, "it waits", SOMEBODY_WAITS).await;
    until_true(&pool, "it is over", "SELECT until < clock_timestamp() FROM fact").await;
    run(&mut a, "COMMIT").await.unwrap();
    assert_eq!(within("the update", update).await.unwrap(), 1, "updated although it was over by then");
}

// The fence holds KEY SHARE: it passes release (NO KEY UPDATE) and the heartbeat of nobody, it stops a grant (UPDATE).
#[tokio::test(flavor = "multi_thread")]
async fn key_share_lets_a_plain_update_pass_and_not_for_update() {
    let (_database, _pool, mut a, mut b) = two().await;
    run(&mut a, "BEGIN; SELECT FROM fact FOR KEY SHARE").await.unwrap();
    run(&mut b, "UPDATE fact SET n = 1").await.unwrap();
    run(&mut b, "SELECT FROM fact FOR NO KEY UPDATE NOWAIT").await.unwrap();
    assert_eq!(run(&mut b, "SELECT FROM fact FOR UPDATE NOWAIT").await.unwrap_err(), "55P03");
    assert_eq!(b.execute("SELECT FROM fact FOR UPDATE SKIP LOCKED").await.unwrap().rows_affected(), 0);
}

// Under REPEATABLE READ a lock on a row that has moved on since the snapshot is 40001: so success proves that what
// the snapshot says of the owner's life is still true.
#[tokio::test(flavor = "multi_thread")]
async fn an_old_snapshot_cannot_lock_a_row_that_moved_on() {
    let (_database, _pool, mut a, mut b) = two().await;
    for level in [
        "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM fact",
        "BEGIN ISOLATION LEVEL SERIALIZABLE; SELECT FROM fact",
    ] {
        run(&mut a, level).await.unwrap();
        run(&mut a, "SELECT FROM fact FOR SHARE NOWAIT; ROLLBACK").await.unwrap();
        run(&mut a, level).await.unwrap();
        run(&mut b, "UPDATE fact SET n = n + 1").await.unwrap();
        assert_eq!(run(&mut a, "SELECT FROM fact FOR SHARE NOWAIT").await.unwrap_err(), "40001");
        run(&mut a, "ROLLBACK").await.unwrap();
    }
}

// `acquire` draws the token in a statement after the lock; drawn in VALUES it would come before the wait.
#[tokio::test(flavor = "multi_thread")]
async fn nextval_in_values_is_drawn_before_the_wait() {
    let (_database, pool, mut a, mut b) = two().await;
    run(&mut a, "CREATE SEQUENCE s").await.unwrap();
    run(&mut a, "BEGIN; SELECT FROM fact FOR UPDATE").await.unwrap();
    let naive = aside(async move {
        b.fetch_one("INSERT INTO fact VALUES (1, nextval('s')) ON CONFLICT (id) DO UPDATE SET n = EXCLUDED.n RETURNING n").await.unwrap().get::<i32, _>(0)
    });
    until_true(&pool, "it waits", SOMEBODY_WAITS).await;
    // Drawn later, and committed earlier.
    run(&mut a, "UPDATE fact SET n = nextval('s')::int; COMMIT").await.unwrap();
    assert_eq!(within("the upsert", naive).await.unwrap(), 1, "smaller than the 2 that was there before it");
}

// `protect` has to visit each partition, and a plain table is not in its own tree of partitions.
#[tokio::test(flavor = "multi_thread")]
async fn a_statement_fires_the_triggers_of_the_table_it_names() {
    let (_database, _pool, mut a, _) = two().await;
    assert_eq!(text(&mut a, "SELECT count(*)::text FROM pg_partition_tree('fact')").await, "0");
    run(
        &mut a,
        "CREATE TABLE parent (id int) PARTITION BY RANGE (id); CREATE TABLE child PARTITION OF parent FOR VALUES FROM (0) TO (9); \
         CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN UPDATE public.fact SET n = n + 1; RETURN NULL; END $$; \
         CREATE TRIGGER note AFTER INSERT ON parent FOR EACH STATEMENT EXECUTE FUNCTION note(); INSERT INTO child VALUES (1)",
    )
    .await
    .unwrap();
    assert_eq!(
        text(&mut a, "SELECT n::text FROM fact").await,
        "0",
        "an insert into the child is not one into the parent"
    );
    run(&mut a, "INSERT INTO parent VALUES (1)").await.unwrap();
    assert_eq!(text(&mut a, "SELECT n::text FROM fact").await, "1");
}

// `migrate` asks the catalogs' tables: inside a transaction a cached "there is none" is not refreshed by waiting for an
// advisory lock.
#[tokio::test(flavor = "multi_thread")]
async fn a_look_into_the_catalogs_tables_is_fresh_after_a_wait() {
    let (_database, _pool, mut a, mut b) = two().await;
    run(&mut a, "BEGIN; SELECT pg_advisory_xact_lock(7)").await.unwrap();
    run(&mut b, "BEGIN; SELECT to_regprocedure('public.late()')").await.unwrap();
    run(&mut a, "CREATE FUNCTION public.late() RETURNS int LANGUAGE sql AS 'SELECT 1'; COMMIT")
        .await
        .unwrap();
    run(&mut b, "SELECT pg_advisory_xact_lock(7)").await.unwrap();
    let tables = "SELECT count(*)::text FROM pg_catalog.pg_proc WHERE proname = 'late'";
    assert_eq!(text(&mut b, tables).await, "1");
}

// Behind a pooler: settings of one message end with it.
#[tokio::test(flavor = "multi_thread")]
async fn set_local_in_a_message_ends_with_the_message() {
    let (_database, _pool, mut a, _) = two().await;
    let before = text(&mut a, "SHOW statement_timeout").await;
    assert_eq!(text(&mut a, "SET LOCAL statement_timeout = 4321; SHOW statement_timeout").await, "4321ms");
    assert_eq!(text(&mut a, "SHOW statement_timeout").await, before);
}

// A fenced writer whose client is gone is noticed in mid-statement, so it does not keep a grant waiting.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_vanished_is_noticed_in_mid_statement() {
    let (database, pool, mut a, _) = two().await;
    let pid: i32 = sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut a).await.unwrap();
    let busy = aside(async move {
        run(&mut a, "BEGIN; SET LOCAL client_connection_check_interval = 20; SELECT FROM fact FOR KEY SHARE; SELECT pg_sleep(3600)").await
    });
    let sleeping =
        format!("SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = {pid} AND wait_event = 'PgSleep')");
    let mut b = connect(&database.options()).await;
    crate::support::until("it is busy", async || {
        let row = b.fetch_one(sqlx::AssertSqlSafe(sleeping.clone())).await.unwrap();
        row.get::<bool, _>(0).then_some(())
    })
    .await;
    busy.abort();
    drop(busy.await);
    within("the lock", b.execute("SELECT FROM fact FOR UPDATE")).await.unwrap();
    drop(pool);
}

// `RowLock::lock_many`: rows are locked in the order of an ORDER BY beside the lock; one around it comes too late.
#[tokio::test(flavor = "multi_thread")]
async fn rows_are_locked_in_the_order_of_the_select_that_locks() {
    let (database, pool, mut a, _) = two().await;
    // On the disk: 1, 3, 2.
    run(&mut a, "INSERT INTO fact VALUES (3, 0), (2, 0)").await.unwrap();
    let beside = "SELECT id FROM fact ORDER BY id FOR UPDATE";
    let around = "SELECT * FROM (SELECT id FROM fact FOR UPDATE) AS f ORDER BY id";
    for (query, behind) in [(beside, false), (around, true)] {
        run(&mut a, "BEGIN; SELECT FROM fact WHERE id = 2 FOR UPDATE").await.unwrap();
        let mut b = connect(&database.options()).await;
        let waiting = aside(async move { run(&mut b, query).await });
        until_true(&pool, "it waits", SOMEBODY_WAITS).await;
        let mut c = connect(&database.options()).await;
        let third = run(&mut c, "SELECT FROM fact WHERE id = 3 FOR UPDATE NOWAIT").await;
        assert_eq!(third.is_err(), behind, "{query}");
        run(&mut a, "ROLLBACK").await.unwrap();
        within("the locks", waiting).await.unwrap().unwrap();
    }
}

// The bound of `RowLock::lock_many`: a volatile function in the list is evaluated after the sort, before each lock.
#[tokio::test(flavor = "multi_thread")]
async fn a_setting_in_the_list_is_set_before_each_row_is_locked() {
    let (_database, _pool, mut a, mut b) = two().await;
    run(&mut a, "INSERT INTO fact VALUES (3, 0), (2, 0)").await.unwrap();
    run(&mut a, "BEGIN; SELECT FROM fact WHERE id = 2 FOR UPDATE").await.unwrap();
    // Row 1 would be waited for for ever, the second for 1 ms.
    let query = "SELECT id, set_config('lock_timeout', CASE id WHEN 1 THEN '0' ELSE '1' END, true) FROM fact ORDER BY id FOR UPDATE";
    assert_eq!(within("the bound", run(&mut b, query)).await.unwrap_err(), "55P03");
}

// `Savepoint`: a rollback to it takes the setting and the row locks back, its release keeps both.
#[tokio::test(flavor = "multi_thread")]
async fn a_savepoint_takes_settings_and_row_locks_back() {
    let (_database, _pool, mut a, mut b) = two().await;
    run(&mut a, "BEGIN; SAVEPOINT s; SET LOCAL lock_timeout = 5; SELECT FROM fact FOR UPDATE; ROLLBACK TO s")
        .await
        .unwrap();
    assert_eq!(text(&mut a, "SHOW lock_timeout").await, "0");
    run(&mut b, "SELECT FROM fact FOR UPDATE NOWAIT").await.unwrap();
    run(&mut a, "SET LOCAL lock_timeout = 5; SELECT FROM fact FOR UPDATE; RELEASE s").await.unwrap();
    assert_eq!(text(&mut a, "SHOW lock_timeout").await, "5ms");
    assert_eq!(run(&mut b, "SELECT FROM fact FOR UPDATE NOWAIT").await.unwrap_err(), "55P03");
}

// `transaction`: what comes before COMMIT in its message fails in an aborted transaction, where COMMIT answers ROLLBACK;
// and AND CHAIN leaves an empty transaction at the level of the one before.
#[tokio::test(flavor = "multi_thread")]
async fn a_commit_of_an_aborted_transaction_is_no_error_but_a_statement_before_it_is() {
    let (_database, _pool, mut a, _) = two().await;
    run(&mut a, "BEGIN; SELECT 1/0").await.unwrap_err();
    run(&mut a, "COMMIT").await.unwrap();
    run(&mut a, "BEGIN; SELECT 1/0").await.unwrap_err();
    assert_eq!(run(&mut a, "SELECT; COMMIT AND CHAIN").await.unwrap_err(), "25P02");
    run(&mut a, "ROLLBACK").await.unwrap();
    assert_eq!(run(&mut a, "SELECT; COMMIT AND CHAIN").await.unwrap_err(), "25P01");
    run(&mut a, "BEGIN ISOLATION LEVEL SERIALIZABLE; UPDATE fact SET n = 5").await.unwrap();
    run(&mut a, "SELECT; COMMIT AND CHAIN").await.unwrap();
    assert_eq!(text(&mut a, "SHOW transaction_isolation").await, "serializable");
    run(&mut a, "ROLLBACK").await.unwrap();
    assert_eq!(text(&mut a, "SELECT n::text FROM fact").await, "5");
}

// `RowLock::claim_next`: the limit stands over the locks, and a subquery's would not hold under a plan that runs it again.
#[tokio::test(flavor = "multi_thread")]
async fn the_limit_stops_the_locking() {
    let (_database, _pool, mut a, mut b) = two().await;
    run(&mut a, "INSERT INTO fact SELECT id, 0 FROM generate_series(2, 100) id").await.unwrap();
    run(&mut a, "BEGIN; SELECT FROM fact ORDER BY n, id LIMIT 3 FOR UPDATE SKIP LOCKED").await.unwrap();
    let free = b.execute("SELECT FROM fact FOR UPDATE SKIP LOCKED").await.unwrap().rows_affected();
    assert_eq!(free, 97);
}

async fn answer(conn: &mut PgConnection, query: &'static str) -> bool {
    conn.fetch_one(sqlx::raw_sql(query)).await.unwrap().get(0)
}

// Why exclusivity within a process is decided in the process (C03), and a session counts what it took.
#[tokio::test(flavor = "multi_thread")]
async fn a_session_takes_its_own_advisory_lock_again_and_has_to_unlock_it_as_often() {
    let (_database, _pool, mut a, mut b) = two().await;
    for _ in 0..2 {
        assert!(answer(&mut a, "SELECT pg_try_advisory_lock(1)").await);
    }
    assert!(answer(&mut a, "SELECT pg_advisory_unlock(1)").await);
    assert!(!answer(&mut b, "SELECT pg_try_advisory_lock(1)").await);
    assert!(answer(&mut a, "SELECT pg_advisory_unlock(1)").await);
    // Once too often, or in the wrong mode, is false and frees nothing of others.
    assert!(answer(&mut b, "SELECT pg_try_advisory_lock(1)").await);
    assert!(!answer(&mut a, "SELECT pg_advisory_unlock(1)").await);
    assert!(!answer(&mut b, "SELECT pg_advisory_unlock_shared(1)").await);
    assert!(!answer(&mut a, "SELECT pg_try_advisory_lock(1)").await);
}

// One number and a pair are two spaces, with the same halves; `Key` keeps them apart.
#[tokio::test(flavor = "multi_thread")]
async fn a_number_and_a_pair_are_separate_advisory_keys() {
    let (_database, _pool, mut a, mut b) = two().await;
    assert!(answer(&mut a, "SELECT pg_try_advisory_lock(1)").await);
    assert!(answer(&mut b, "SELECT pg_try_advisory_lock(0, 1)").await);
}

// `lock_timeout` below a millisecond is rounded to none; a wait is rounded up instead.
#[tokio::test(flavor = "multi_thread")]
async fn a_lock_timeout_below_half_a_millisecond_is_none() {
    let (_database, _pool, mut a, _) = two().await;
    run(&mut a, "SET lock_timeout = '400us'").await.unwrap();
    assert_eq!(text(&mut a, "SHOW lock_timeout").await, "0");
}

// What a savepoint set locally stays after its release, and goes when it is rolled back; so does a lock.
#[tokio::test(flavor = "multi_thread")]
async fn a_released_savepoint_keeps_settings_and_advisory_locks_and_a_rolled_back_one_does_not() {
    let (_database, _pool, mut a, mut b) = two().await;
    run(&mut a, "BEGIN; SAVEPOINT s; SET LOCAL lock_timeout = 5; SELECT pg_advisory_xact_lock(1); RELEASE s")
        .await
        .unwrap();
    assert_eq!(text(&mut a, "SHOW lock_timeout").await, "5ms");
    run(&mut a, "SAVEPOINT s; SET LOCAL lock_timeout = 7; SELECT pg_advisory_xact_lock(2); ROLLBACK TO s")
        .await
        .unwrap();
    assert_eq!(text(&mut a, "SHOW lock_timeout").await, "5ms");
    assert!(answer(&mut b, "SELECT pg_try_advisory_lock(2)").await);
    assert!(!answer(&mut b, "SELECT pg_try_advisory_lock(1)").await);
}

// `AdvisoryLock::begin` is READ COMMITTED: a snapshot of the whole transaction is older than the lock it waited for.
#[tokio::test(flavor = "multi_thread")]
async fn under_repeatable_read_the_snapshot_is_older_than_the_advisory_lock() {
    for (level, seen) in [("REPEATABLE READ", "0"), ("READ COMMITTED", "1")] {
        let (_database, pool, mut a, mut b) = two().await;
        run(&mut a, "BEGIN; SELECT pg_advisory_xact_lock(1)").await.unwrap();
        let waiting = aside(async move {
            let begin = format!("BEGIN ISOLATION LEVEL {level}; SELECT pg_advisory_xact_lock(1)");
            b.execute(sqlx::raw_sql(sqlx::AssertSqlSafe(begin))).await.unwrap();
            text(&mut b, "SELECT n::text FROM fact").await
        });
        until_true(&pool, "it waits", SOMEBODY_WAITS).await;
        run(&mut a, "UPDATE fact SET n = 1; COMMIT").await.unwrap();
        assert_eq!(within("it is granted", waiting).await.unwrap(), seen, "{level}");
    }
}

// C02: a session-level lock may be held after a time-out, which is why the lock of the transaction is waited for.
#[tokio::test(flavor = "multi_thread")]
async fn a_time_out_of_a_session_level_wait_may_hold_the_lock_and_of_a_transaction_level_one_never_does() {
    // The holder lets go when the wait is about to be over.
    const HOLD: &str = "SELECT pg_advisory_lock(1); SELECT pg_sleep(0.0012); SELECT pg_advisory_unlock(1)";
    const NAIVE: &str = "SET LOCAL lock_timeout = 1; SELECT pg_advisory_lock(1)";
    const OURS: &str =
        "SET LOCAL lock_timeout = 1; SELECT pg_advisory_xact_lock(1); SELECT pg_advisory_lock(1)";
    let (_database, _pool, mut a, mut b) = two().await;
    let (end, mut ended) = tokio::sync::oneshot::channel::<()>();
    let holder = aside(async move {
        while ended.try_recv() == Err(tokio::sync::oneshot::error::TryRecvError::Empty) {
            run(&mut a, HOLD).await.unwrap();
        }
    });
    let mut timed_out = async |message: &'static str| {
        let refused = run(&mut b, message).await;
        let held = answer(&mut b, "SELECT pg_advisory_unlock(1)").await;
        assert!(refused.is_err() || held, "granted is held");
        refused.is_err().then_some(held)
    };
    // Some seconds at the most: about every tenth.
    within("a time-out that held it", async { while timed_out(NAIVE).await != Some(true) {} }).await;
    let mut refused = 0;
    while refused < 500 {
        if let Some(held) = within("an answer", timed_out(OURS)).await {
            assert!(!held, "held after a time-out");
            refused += 1;
        }
    }
    drop(end);
    within("the holder ends", holder).await.unwrap();
}

// The other half of it: under the lock of the transaction the session's own is there at once, whoever queues, and
// stays when the transaction ends.
#[tokio::test(flavor = "multi_thread")]
async fn a_session_level_lock_under_a_transactions_one_does_not_wait_and_outlives_it() {
    let (database, pool, mut a, mut b) = two().await;
    run(&mut a, "BEGIN; SELECT pg_advisory_xact_lock(1)").await.unwrap();
    let queued = aside(async move { run(&mut b, "SELECT pg_advisory_lock(1)").await });
    until_true(&pool, "somebody queues", SOMEBODY_WAITS).await;
    within("no wait", run(&mut a, "SELECT pg_advisory_lock(1); COMMIT")).await.unwrap();
    let mut c = connect(&database.options()).await;
    assert!(!answer(&mut c, "SELECT pg_try_advisory_lock(1)").await);
    until_true(&pool, "it still waits", SOMEBODY_WAITS).await;
    assert!(answer(&mut a, "SELECT pg_advisory_unlock(1)").await);
    within("its turn", queued).await.unwrap().unwrap();
    // Also through a rollback.
    run(&mut a, "BEGIN; SELECT pg_advisory_lock(2); ROLLBACK").await.unwrap();
    assert!(!answer(&mut c, "SELECT pg_try_advisory_lock(2)").await);
    run(&mut a, "SELECT pg_advisory_unlock_all()").await.unwrap();
    assert!(answer(&mut c, "SELECT pg_try_advisory_lock(2)").await);
}

// C14: who waits at the server keeps a snapshot. If the holder waits for that, Postgres ends one of the two.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiting_advisory_lock_keeps_a_snapshot_that_create_index_concurrently_waits_for() {
    let (_database, pool, mut a, mut b) = two().await;
    run(&mut a, "SELECT pg_advisory_lock(1)").await.unwrap();
    let waiting = aside(async move { run(&mut b, "SELECT pg_advisory_lock(1)").await });
    until_true(&pool, "it waits", SOMEBODY_WAITS).await;
    let created = within("a deadlock is found", run(&mut a, "CREATE INDEX CONCURRENTLY ON fact (n)")).await;
    let waited = if created.is_err() { Ok(()) } else { within("the waiter", waiting).await.unwrap() };
    assert_eq!(created.and(waited).unwrap_err(), "40P01");
}
