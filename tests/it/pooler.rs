//! Behind PgBouncer in transaction mode: found by the probe, and everything of the spine works.
//!
//! Where PgBouncer is not installed these tests say so loudly and pass; `.ci/run` installs it.

use std::time::Duration;

use fencepost::claim::{Begun, Claim, Jobs};
use fencepost::row::RowLock;
use fencepost::testing::Server;
use fencepost::version::{Changes, CheckVersion as _, Current, Versioned};
use fencepost::{AdvisoryLock, Error, Isolation, Key, Version, Wait, transaction};
use sqlx::postgres::{PgPoolOptions, PgQueryResult};

use crate::pgbouncer::PgBouncer;
use crate::support::{LONG, SHORT, connect, database, hold, lease, owner, until_true, within};

async fn server() -> Server {
    // Commits wait for the disk by default: what our own sessions set would be seen.
    let start = || Server::builder().setting("synchronous_commit", "on").start().unwrap();
    let server = tokio::task::spawn_blocking(start).await.unwrap();
    let pool = PgPoolOptions::new().connect_lazy_with(server.options());
    fencepost::migrate(&pool).await.unwrap();
    pool.close().await;
    server
}

// Also where it is in between twice: begin and claim_next by the owner, complete and once in transactions of ours.
#[tokio::test(flavor = "multi_thread")]
async fn claims_work_behind_a_transaction_mode_pooler() {
    let server = server().await;
    let Some(pgbouncer) = PgBouncer::before(&server, "transaction", 2, "postgres").await else { return };
    let pool = PgPoolOptions::new().max_connections(5).connect_lazy_with(pgbouncer.options());
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    assert!(a.is_pooled());
    for n in 0..5 {
        let key = format!("o'brien's {n}");
        let claim = Claim::named(&key).unwrap().kind("o'kind").unwrap().payload(&key).unwrap();
        let claim = claim.fingerprint(&key);
        let mut tx = pool.begin().await.unwrap();
        assert!(Claim::named(&format!("once {n}")).unwrap().once(&mut tx).await.unwrap());
        assert!(claim.enqueue(&mut tx).await.unwrap());
        tx.commit().await.unwrap();
        let attempt = Jobs::of_kind("o'kind").unwrap().claim_next(&a, 3).await.unwrap().remove(0);
        assert!(matches!(claim.begin(&b).await.unwrap(), Begun::InProgress { .. }));
        let mut tx = pool.begin().await.unwrap();
        attempt.complete(&mut tx, &key).await.unwrap();
        tx.commit().await.unwrap();
        assert!(matches!(claim.begin(&b).await.unwrap(), Begun::Replay(done) if done == *key));
    }
}

// C06: found, and leases work: acquire, refuse, beat, fence, lose, release, shut down.
#[tokio::test(flavor = "multi_thread")]
async fn leases_work_behind_a_transaction_mode_pooler() {
    let server = server().await;
    for pool_size in [1, 5] {
        let Some(pgbouncer) = PgBouncer::before(&server, "transaction", pool_size, "postgres").await else {
            return;
        };
        let direct = PgPoolOptions::new().connect_lazy_with(server.options());
        let pooled = PgPoolOptions::new().max_connections(5).connect_lazy_with(pgbouncer.options());
        fencepost::migrate(&pooled).await.unwrap();
        // Many clients on few sessions: prepared statements would collide.
        let mut owners = Vec::new();
        for n in 0..4 {
            owners.push(
                within("an owner", owner(&pooled, &format!("pooled-{n}"), Duration::from_secs(5))).await,
            );
        }
        assert!(owners.iter().all(fencepost::Owner::is_pooled));
        let straight = owner(&direct, "direct", LONG).await;
        assert!(!straight.is_pooled());
        let tagged = lease("o'brien's").metadata(&"o'hara").unwrap();
        let held = tagged.try_acquire(&owners[0]).await.unwrap().unwrap();
        for other in owners[1..].iter().chain([&straight]) {
            assert!(lease("o'brien's").try_acquire(other).await.unwrap().is_none());
        }
        for owner in &owners {
            for n in 0..5 {
                let held = hold(owner, &format!("lease-{n}")).await;
                // One simple-protocol message: BEGIN and the fence on whatever session it is.
                held.begin(&pooled).await.unwrap().commit().await.unwrap();
                assert!(held.release().await.unwrap());
            }
        }
        let beaten = "SELECT max(expires_at - started_at) > 2 * max(ttl) FROM fencepost.owners WHERE label = 'pooled-0' AND expires_at > clock_timestamp()";
        until_true(&direct, "heartbeats", beaten).await;
        assert!(held.is_held());
        // Nothing of ours leaked into the sessions that others use next.
        let mut conn = connect(&pgbouncer.options()).await;
        for (setting, default) in
            [("synchronous_commit", "on"), ("statement_timeout", "0"), ("search_path", "\"$user\", public")]
        {
            let show = sqlx::AssertSqlSafe(format!("SHOW {setting}"));
            let row = sqlx::Executor::fetch_one(&mut conn, sqlx::raw_sql(show)).await.unwrap();
            assert_eq!(sqlx::Row::get::<String, _>(&row, 0), default, "{setting}");
        }
        // Waiting works by asking: nothing is heard there.
        let waiting = {
            let b = owners[1].clone();
            tokio::spawn(async move { lease("o'brien's").acquire(&b, Wait::forever()).await })
        };
        until_true(&direct, "it is in line", "SELECT EXISTS (SELECT FROM fencepost.waiters)").await;
        assert!(held.release().await.unwrap());
        assert!(within("being served", waiting).await.unwrap().unwrap().release().await.unwrap());
        for owner in owners {
            owner.shutdown().await.unwrap();
        }
        drop(pgbouncer);
    }
}

// Found by the histories under faults: sessions are lent last in, first out, so a single look is easily fooled when
// others take and return them at that moment; and then our settings leak into everybody's sessions.
#[tokio::test(flavor = "multi_thread")]
async fn a_busy_pooler_is_found_out_each_time() {
    let server = server().await;
    for pool_size in [2, 8] {
        let Some(pgbouncer) = PgBouncer::before(&server, "transaction", pool_size, "postgres").await else {
            return;
        };
        let busy = PgPoolOptions::new().max_connections(6).connect_lazy_with(pgbouncer.options());
        let noise: Vec<_> = (0..6)
            .map(|_| {
                let busy = busy.clone();
                tokio::spawn(async move {
                    loop {
                        sqlx::raw_sql("SELECT 1").execute(&busy).await.unwrap();
                    }
                })
            })
            .collect();
        let pooled = PgPoolOptions::new().connect_lazy_with(pgbouncer.options());
        let found = owners_that_found_it(&pooled, 40).await;
        noise.iter().for_each(tokio::task::JoinHandle::abort);
        assert_eq!(found, 40, "with {pool_size} sessions");
    }
}

/// Starts so many owners, four at a time; how many have found the pooler.
async fn owners_that_found_it(pool: &sqlx::PgPool, count: usize) -> usize {
    let mut found = 0;
    for batch in 0..count / 4 {
        let label = |n| format!("busy-{batch}-{n}");
        let labels: [String; 4] = std::array::from_fn(label);
        let (a, b, c, d) = within("owners", async {
            tokio::join!(
                owner(pool, &labels[0], LONG),
                owner(pool, &labels[1], LONG),
                owner(pool, &labels[2], LONG),
                owner(pool, &labels[3], LONG)
            )
        })
        .await;
        for owner in [a, b, c, d] {
            found += usize::from(owner.is_pooled());
            owner.shutdown().await.unwrap();
        }
    }
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_lost_behind_a_pooler_are_survived_and_death_is_told() {
    let server = server().await;
    let Some(pgbouncer) = PgBouncer::before(&server, "transaction", 3, "postgres").await else { return };
    let direct = PgPoolOptions::new().connect_lazy_with(server.options());
    let pooled = PgPoolOptions::new().connect_lazy_with(pgbouncer.options());
    let a = owner(&pooled, "a", Duration::from_secs(5)).await;
    let held = hold(&a, "report").await;
    sqlx::query("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND backend_type = 'client backend' AND query LIKE '%fencepost.%'")
        .execute(&direct)
        .await
        .unwrap();
    let another = hold(&a, "another").await;
    assert!(held.is_held() && another.is_held());
    sqlx::query("UPDATE fencepost.owners SET expires_at = 'epoch'").execute(&direct).await.unwrap();
    let _found_out = within("the next life", lease("third").try_acquire(&a)).await.unwrap().unwrap();
    assert!(!held.is_held());
    // The pooler itself goes away: lost at the local deadline.
    let short = owner(&pooled, "short", SHORT).await;
    let brief = hold(&short, "brief").await;
    drop(pgbouncer);
    assert_eq!(within("the deadline", brief.lost()).await, fencepost::LossReason::Unreachable);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_mode_pooler_is_as_good_as_none() {
    let server = server().await;
    let Some(pgbouncer) = PgBouncer::before(&server, "session", 20, "postgres").await else { return };
    let pool = PgPoolOptions::new().connect_lazy_with(pgbouncer.options());
    let a = owner(&pool, "a", LONG).await;
    assert!(!a.is_pooled());
    assert!(hold(&a, "report").await.release().await.unwrap());
    // Told otherwise, it believes what it is told.
    let told = fencepost::Owner::builder(&pool).transaction_pooler(true).start().await.unwrap();
    assert!(told.is_pooled() && hold(&told, "report").await.release().await.unwrap());
}

// Row locks are prepared statements: nameless ones do not collide.
#[tokio::test(flavor = "multi_thread")]
async fn transactions_and_row_locks_work_behind_a_transaction_mode_pooler() {
    let server = server().await;
    let Some(pgbouncer) = PgBouncer::before(&server, "transaction", 2, "postgres").await else { return };
    let direct = PgPoolOptions::new().connect_lazy_with(server.options());
    sqlx::raw_sql("CREATE TABLE data (id bigint PRIMARY KEY, n int); INSERT INTO data VALUES (1, 0), (2, 0)")
        .execute(&direct)
        .await
        .unwrap();
    let clients: Vec<_> = (0..6_i64)
        .map(|client| {
            let pool = PgPoolOptions::new().max_connections(1).connect_lazy_with(pgbouncer.options());
            tokio::spawn(async move {
                let lock = &RowLock::on("data").unwrap().at_most(LONG).unwrap().transaction_pooler(true);
                let keys = &[1 + client % 2, 2 - client % 2];
                for _ in 0..10 {
                    let done = transaction(&pool, Isolation::ReadCommitted, |tx| {
                        Box::pin(async move {
                            assert!(lock.lock_many::<(i64, i32), _>(tx, keys).await?.is_complete());
                            assert!(lock.lock::<(i64, i32), _>(tx, 1_i64).await?.found().is_some());
                            sqlx::raw_sql("UPDATE data SET n = n + 1").execute(&mut **tx).await?;
                            Ok::<_, Error>(())
                        })
                    });
                    done.await.unwrap();
                }
            })
        })
        .collect();
    for client in clients {
        within("the clients", client).await.unwrap();
    }
    until_true(&direct, "each was done", "SELECT bool_and(n = 60) FROM data").await;
    let idle = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%')";
    until_true(&direct, "no transaction is left", idle).await;
    let mut conn = connect(&pgbouncer.options()).await;
    let row = sqlx::Executor::fetch_one(&mut conn, sqlx::raw_sql("SHOW lock_timeout")).await.unwrap();
    assert_eq!(sqlx::Row::get::<String, _>(&row, 0), "0");
}

// Found by this test: a nameless statement outside of a transaction is prepared by one message and executed by the next
// one, and in between the pooler lends the session to somebody with another statement of no name.
#[tokio::test(flavor = "multi_thread")]
async fn versions_work_behind_a_transaction_mode_pooler() {
    let server = server().await;
    let Some(pgbouncer) = PgBouncer::before(&server, "transaction", 2, "postgres").await else { return };
    let direct = PgPoolOptions::new().connect_lazy_with(server.options());
    let rows = Versioned::on("data").unwrap().transaction_pooler(true);
    let tables =
        "CREATE TABLE data (id bigint PRIMARY KEY, n bigint); INSERT INTO data VALUES (1, 0), (2, 0); ";
    let tables = sqlx::AssertSqlSafe(tables.to_owned() + &rows.add_column());
    sqlx::raw_sql(tables).execute(&direct).await.unwrap();
    let clients: Vec<_> = (0..8_i64)
        .map(|client| {
            let pool = PgPoolOptions::new().max_connections(1).connect_lazy_with(pgbouncer.options());
            let rows = rows.clone();
            tokio::spawn(async move {
                for turn in 0..20 {
                    let key = 1 + (client + turn) % 2;
                    one_more_in_each_way(&pool, &rows, key).await;
                }
            })
        })
        .collect();
    for client in clients {
        within("the clients", client).await.unwrap();
    }
    // 160 turns: three times one of the rows, once both.
    until_true(&direct, "each was done", "SELECT bool_and(n = 400) FROM data").await;
    let idle = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%')";
    until_true(&direct, "no transaction is left", idle).await;
}

async fn one_more_in_each_way(pool: &sqlx::PgPool, rows: &Versioned, key: i64) {
    let read = |read: Current<(i64, i64)>| Ok::<_, Error>(Changes::new().set("n", read.value.1 + 1));
    loop {
        // Among eight it may give up.
        match rows.update_with(pool, key, read).await {
            Ok(new) => break assert!(new.is_some()),
            Err(error) => assert!(matches!(error, Error::RetriesExhausted { .. }), "{error:?}"),
        }
    }
    for isolation in [Isolation::ReadCommitted, Isolation::Serializable] {
        loop {
            let update = transaction(pool, isolation, |tx| {
                Box::pin(async move {
                    let read = rows.load::<(i64, i64), _>(tx, key).await?.ok_or(Error::Gone)?;
                    let changes = Changes::new().set("n", read.value.1 + 1);
                    rows.update(tx, key, read.version, changes).await?.into_result()
                })
            });
            match update.await {
                Ok(_) => break,
                Err(Error::Conflict { .. } | Error::RetriesExhausted { .. }) => {}
                Err(other) => panic!("{other:?}"),
            }
        }
    }
    loop {
        let mut tx = pool.begin().await.unwrap();
        let mut versions = Vec::new();
        let mut ns = Vec::new();
        for key in [2_i64, 1] {
            let read = rows.load::<(i64, i64), _>(&mut tx, key).await.unwrap().unwrap();
            versions.push((key, read.version));
            ns.push(read.value.1 + 1);
        }
        let changes = Changes::new().set_each("n", &ns);
        if rows.update_many(&mut tx, &versions, changes).await.unwrap().is_complete() {
            break tx.commit().await.unwrap();
        }
        tx.rollback().await.unwrap();
    }
}

// Outside of a transaction nothing is sent, also where the statement would be a single one; a BEGIN that sqlx does not
// know of is none.
#[tokio::test(flavor = "multi_thread")]
async fn versions_behind_a_pooler_need_a_transaction() {
    let (_db, pool) = database().await;
    let rows = Versioned::on("nowhere").unwrap().transaction_pooler(true);
    let mut conn = pool.acquire().await.unwrap();
    sqlx::raw_sql("BEGIN").execute(&mut *conn).await.unwrap();
    let version = Version::new(1);
    for refused in [
        rows.load::<(i64, i64), _>(&mut conn, 1_i64).await.map(drop),
        rows.update(&mut conn, 1_i64, version, Changes::new()).await.map(drop),
        rows.update_many(&mut conn, &[(1_i64, version)], Changes::new()).await.map(drop),
        rows.delete(&mut conn, 1_i64, version).await.map(drop),
        Ok::<_, sqlx::Error>(PgQueryResult::default())
            .check_version(&rows, &mut conn, 1_i64, version)
            .await
            .map(drop),
    ] {
        assert!(matches!(&refused, Err(Error::Misuse { .. })), "{refused:?}");
    }
    // The transaction is not aborted: nothing was sent.
    sqlx::raw_sql("SELECT 1; COMMIT").execute(&mut *conn).await.unwrap();
}

// C06: a session-level advisory lock would stay with a session of the pooler's. Found out each time, refused before
// anything is sent; what is of a transaction works.
#[tokio::test(flavor = "multi_thread")]
async fn session_level_advisory_locks_are_refused_behind_a_transaction_mode_pooler() {
    let server = server().await;
    let direct = PgPoolOptions::new().connect_lazy_with(server.options());
    let straight = owner(&direct, "direct", LONG).await;
    let key = |n| Key::from_i64(n);
    let mut detected = 0;
    for pool_size in [1, 2, 5, 20] {
        let Some(pgbouncer) = PgBouncer::before(&server, "transaction", pool_size, "postgres").await else {
            return;
        };
        let pooled = PgPoolOptions::new().connect_lazy_with(pgbouncer.options());
        for n in 0..5 {
            let a = within("an owner", owner(&pooled, &format!("pooled-{n}"), LONG)).await;
            detected += usize::from(a.is_pooled());
            for lock in [AdvisoryLock::exclusive(key(1)), AdvisoryLock::shared(key(1))] {
                for refused in [
                    lock.try_acquire(&a).await.map(|_| ()).unwrap_err(),
                    lock.acquire(&a, Wait::forever()).await.map(|_| ()).unwrap_err(),
                ] {
                    let text = refused.to_string();
                    assert!(matches!(refused, Error::TransactionPooler { .. }), "{refused:?}");
                    assert!(text.contains("AdvisoryLock::begin") && text.contains("Lease"), "{text}");
                }
            }
            let lease = hold(&a, "instead").await;
            assert!(lease.release().await.unwrap());
            a.shutdown().await.unwrap();
        }
        // Locks of transactions, against a holder beside the pooler.
        let held = AdvisoryLock::exclusive(key(1)).try_acquire(&straight).await.unwrap().unwrap();
        let wait = Wait::at_most(Duration::from_millis(5));
        let busy = AdvisoryLock::shared(key(1)).begin(&pooled, wait).await.err().unwrap();
        assert!(matches!(busy, Error::Busy { .. }), "{busy:?}");
        assert!(held.release().await.unwrap());
        let mut tx = AdvisoryLock::exclusive(key(1)).begin(&pooled, Wait::forever()).await.unwrap();
        AdvisoryLock::exclusive(key(2)).lock(&mut tx, wait).await.unwrap();
        assert!(AdvisoryLock::exclusive(key(2)).try_acquire(&straight).await.unwrap().is_none());
        tx.commit().await.unwrap();
        for n in [1, 2] {
            let held = AdvisoryLock::exclusive(key(n)).try_acquire(&straight).await.unwrap();
            assert!(held.expect("freed with the transaction").release().await.unwrap());
        }
        // Neither a lock nor a setting is left in a session that others use next.
        let left = "SELECT current_setting('lock_timeout') = '0' AND NOT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory')";
        until_true(
            &direct,
            "no lock is left",
            "SELECT NOT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory')",
        )
        .await;
        let mut conn = connect(&pgbouncer.options()).await;
        let row = sqlx::Executor::fetch_one(&mut conn, sqlx::raw_sql(left)).await.unwrap();
        assert!(sqlx::Row::get::<bool, _>(&row, 0));
        drop(pgbouncer);
    }
    assert_eq!(detected, 20, "of 20");
}
