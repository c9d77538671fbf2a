//! Transactions that run again: what must, does; what may have been committed, never.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use fencepost::testing::TestDatabase;
use fencepost::{Error, Isolation, transaction};
use sqlx::postgres::{PgPoolOptions, PgTransaction};
use sqlx::{Executor as _, PgPool, Row as _};

use crate::cancel::after_polls;
use crate::proxy::Proxy;
use crate::support::{database, until, until_true, within};

async fn counter() -> (TestDatabase, PgPool) {
    let (database, pool) = database().await;
    pool.execute("CREATE TABLE counter (id int PRIMARY KEY, n int NOT NULL); INSERT INTO counter VALUES (1, 0), (2, 0)")
        .await
        .unwrap();
    (database, pool)
}

fn one_connection(database: &TestDatabase) -> PgPool {
    PgPoolOptions::new().max_connections(1).test_before_acquire(false).connect_lazy_with(database.options())
}

async fn count(pool: &PgPool) -> i32 {
    sqlx::query_scalar("SELECT n FROM counter WHERE id = 1").fetch_one(pool).await.unwrap()
}

/// Reads, lets somebody else write, and writes: 40001 under REPEATABLE READ.
async fn conflict(tx: &mut PgTransaction<'_>, pool: &PgPool) -> sqlx::Result<()> {
    tx.execute("SELECT n FROM counter WHERE id = 1").await?;
    pool.execute("UPDATE counter SET n = n + 100 WHERE id = 1").await.unwrap();
    tx.execute("UPDATE counter SET n = n + 1 WHERE id = 1").await?;
    Ok(())
}

/// An application's error, in the two ways in which it can carry one of sqlx's or ours.
#[derive(Debug, thiserror::Error)]
enum AppError {
    #[error("the database failed")]
    Database(#[from] sqlx::Error),
    #[error(transparent)]
    Transparent(sqlx::Error),
    #[error(transparent)]
    Fencepost(#[from] Error),
    #[error("that is enough")]
    Enough,
}

#[tokio::test(flavor = "multi_thread")]
async fn a_serialization_failure_runs_again_whatever_error_it_comes_in() {
    let (_database, pool) = counter().await;
    for level in [Isolation::RepeatableRead, Isolation::Serializable] {
        for wrap in [
            |error: sqlx::Error| AppError::Database(error),
            |error: sqlx::Error| AppError::Transparent(error),
            |error: sqlx::Error| AppError::Fencepost(error.into()),
        ] {
            let (before, runs) = (count(&pool).await, AtomicU32::new(0));
            let (runs, other) = (&runs, &pool);
            let done = transaction(&pool, level, |tx| {
                Box::pin(async move {
                    if runs.fetch_add(1, Ordering::SeqCst) == 0 {
                        conflict(tx, other).await.map_err(wrap)?;
                    }
                    tx.execute("UPDATE counter SET n = n + 1 WHERE id = 1").await?;
                    Ok::<_, AppError>("done")
                })
            });
            assert_eq!(within("two runs", done).await.unwrap(), "done");
            assert_eq!((runs.load(Ordering::SeqCst), count(&pool).await), (2, before + 101));
        }
    }
}

// The failure comes from COMMIT itself: each reads what the other one writes.
#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_fails_to_serialize_runs_again() {
    let (_database, pool) = counter().await;
    let runs = AtomicU32::new(0);
    let (runs_, other) = (&runs, &pool);
    let sum = transaction(&pool, Isolation::Serializable, |tx| {
        Box::pin(async move {
            let first = runs_.fetch_add(1, Ordering::SeqCst) == 0;
            let text = "SELECT sum(n)::bigint FROM counter";
            let sum: i64 = sqlx::query_scalar(text).fetch_one(&mut **tx).await?;
            tx.execute("UPDATE counter SET n = n + 1 WHERE id = 1").await?;
            if first {
                let mut theirs = other.begin_with("BEGIN ISOLATION LEVEL SERIALIZABLE").await?;
                theirs.execute("SELECT sum(n) FROM counter").await?;
                theirs.execute("UPDATE counter SET n = n + 10 WHERE id = 2").await?;
                theirs.commit().await?;
            }
            Ok::<_, Error>(sum)
        })
    });
    assert_eq!(within("two runs", sum).await.unwrap(), 10);
    assert_eq!((runs.load(Ordering::SeqCst), count(&pool).await), (2, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_victim_of_a_deadlock_runs_again() {
    let (_database, pool) = counter().await;
    let (runs, both) = (&AtomicU32::new(0), &tokio::sync::Barrier::new(2));
    let crossed = async |first: i32, second: i32| {
        let once = &AtomicU32::new(0);
        transaction(&pool, Isolation::ReadCommitted, |tx| {
            Box::pin(async move {
                runs.fetch_add(1, Ordering::SeqCst);
                let text = "UPDATE counter SET n = n + 1 WHERE id = $1";
                sqlx::query(text).bind(first).execute(&mut **tx).await?;
                if once.fetch_add(1, Ordering::SeqCst) == 0 {
                    both.wait().await;
                }
                sqlx::query(text).bind(second).execute(&mut **tx).await?;
                Ok::<_, Error>(())
            })
        })
        .await
    };
    let (a, b) = within("both", async { tokio::join!(crossed(1, 2), crossed(2, 1)) }).await;
    a.and(b).unwrap();
    assert_eq!(runs.load(Ordering::SeqCst), 3);
    until_true(&pool, "both were done", "SELECT bool_and(n = 2) FROM counter").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn it_gives_up_after_a_number_of_runs_and_says_so() {
    let (_database, pool) = counter().await;
    let runs = &AtomicU32::new(0);
    let other = &pool;
    let gave_up = transaction(&pool, Isolation::RepeatableRead, |tx| {
        Box::pin(async move {
            runs.fetch_add(1, Ordering::SeqCst);
            conflict(tx, other).await?;
            Ok::<(), Error>(())
        })
    });
    let gave_up = within("giving up", gave_up).await.unwrap_err();
    let Error::RetriesExhausted { attempts, ref source, .. } = gave_up else { panic!("{gave_up:?}") };
    assert_eq!((attempts, runs.load(Ordering::SeqCst)), (10, 10));
    assert!(matches!(source.downcast_ref(), Some(Error::SerializationFailure { .. })), "{source:?}");
    assert!(gave_up.is_retryable() && gave_up.sqlstate() == Some("40001"));
    assert_eq!(count(&pool).await, 1_000, "only the others'");
}

#[tokio::test(flavor = "multi_thread")]
async fn any_other_error_rolls_back_at_once_and_is_returned_as_it_is() {
    let (database, pool) = counter().await;
    let single = one_connection(&database);
    let runs = &AtomicU32::new(0);
    // A rollback in the background would be in time now and then.
    for _ in 0..50 {
        let refused = transaction(&single, Isolation::SessionDefault, |tx| {
            Box::pin(async move {
                tx.execute("UPDATE counter SET n = 7").await?;
                runs.fetch_add(1, Ordering::SeqCst);
                Err::<(), _>(AppError::Enough)
            })
        });
        assert!(matches!(refused.await, Err(AppError::Enough)));
        let free = pool.execute("SELECT FROM counter FOR UPDATE NOWAIT").await;
        free.expect("it is over when the error is there: its locks are gone");
    }
    let refused = transaction(&single, Isolation::SessionDefault, |tx| {
        Box::pin(async move {
            runs.fetch_add(1, Ordering::SeqCst);
            tx.execute("UPDATE counter SET n = 7").await?;
            tx.execute("INSERT INTO counter VALUES (1, 1)").await?;
            Ok::<_, Error>(())
        })
    });
    assert_eq!(refused.await.unwrap_err().sqlstate(), Some("23505"));
    assert_eq!((runs.load(Ordering::SeqCst), count(&pool).await), (51, 0));
    // No connection at all.
    let impatient = PgPoolOptions::new()
        .max_connections(1)
        .acquire_timeout(Duration::from_millis(20))
        .connect_lazy_with(database.options());
    let taken = until("its connection", async || impatient.acquire().await.ok()).await;
    let exhausted =
        transaction(&impatient, Isolation::SessionDefault, |_| Box::pin(async { Ok::<_, Error>(()) })).await;
    assert!(matches!(exhausted, Err(Error::PoolExhausted { .. })), "{exhausted:?}");
    drop(taken);
}

// C45: the answer to COMMIT is lost. It was committed; whoever runs it again has it twice.
#[tokio::test(flavor = "multi_thread")]
async fn a_commit_without_an_answer_is_unknown_and_never_run_again() {
    let (database, observer) = counter().await;
    let proxy = Proxy::before(database.options()).await;
    let pool =
        PgPoolOptions::new().max_connections(1).test_before_acquire(false).connect_lazy_with(proxy.options());
    for level in [Isolation::SessionDefault, Isolation::Serializable] {
        let (before, runs) = (count(&observer).await, AtomicU32::new(0));
        let runs = &runs;
        proxy.cut_answer_to("COMMIT");
        let unknown = transaction(&pool, level, |tx| {
            Box::pin(async move {
                runs.fetch_add(1, Ordering::SeqCst);
                tx.execute("UPDATE counter SET n = n + 1 WHERE id = 1").await?;
                Ok::<_, Error>(())
            })
        });
        let unknown = within("the commit", unknown).await.unwrap_err();
        assert!(matches!(unknown, Error::OutcomeUnknown { .. }), "{unknown:?}");
        assert!(!unknown.is_retryable());
        assert_eq!((runs.load(Ordering::SeqCst), count(&observer).await), (1, before + 1), "once");
    }
    assert_eq!(proxy.cuts(), 2);
    // The pool has thrown the connection away.
    let fine = transaction(&pool, Isolation::SessionDefault, |_| Box::pin(async { Ok::<_, Error>(()) }));
    within("another one", fine).await.unwrap();
}

// The connection ends before COMMIT was sent: certainly nothing was committed, and the error is the work's.
#[tokio::test(flavor = "multi_thread")]
async fn a_connection_lost_during_the_work_is_an_error_of_the_work() {
    let (database, pool) = counter().await;
    let (single, other, runs) = (one_connection(&database), &pool, &AtomicU32::new(0));
    let lost = transaction(&single, Isolation::SessionDefault, |tx| {
        Box::pin(async move {
            runs.fetch_add(1, Ordering::SeqCst);
            let text = "UPDATE counter SET n = n + 1 RETURNING pg_backend_pid()";
            let pid: i32 = sqlx::query_scalar(text).fetch_one(&mut **tx).await?;
            sqlx::query("SELECT pg_terminate_backend($1, 30000)").bind(pid).execute(other).await?;
            tx.execute("UPDATE counter SET n = n + 1").await?;
            Ok::<_, Error>(())
        })
    });
    let lost = within("the loss", lost).await.unwrap_err();
    assert!(matches!(lost, Error::Database { .. }) && lost.is_retryable(), "{lost:?}");
    assert_eq!((runs.load(Ordering::SeqCst), count(&pool).await), (1, 0));
}

// Postgres answers COMMIT of an aborted transaction by ROLLBACK, and sqlx takes that for success.
#[tokio::test(flavor = "multi_thread")]
async fn work_that_hides_a_failed_statement_is_not_taken_for_committed() {
    let (_database, pool) = counter().await;
    let hidden = transaction(&pool, Isolation::SessionDefault, |tx| {
        Box::pin(async move {
            tx.execute("UPDATE counter SET n = 7").await?;
            drop(tx.execute("INSERT INTO counter VALUES (1, 1)").await);
            Ok::<_, Error>(())
        })
    });
    let refused = hidden.await.unwrap_err();
    assert_eq!(refused.sqlstate(), Some("25P02"), "{refused:?}");
    assert_eq!(count(&pool).await, 0);
    // Work that commits by itself is told, too.
    let own = transaction(&pool, Isolation::SessionDefault, |tx| {
        Box::pin(async move {
            tx.execute("COMMIT").await?;
            Ok::<_, Error>(())
        })
    });
    assert_eq!(own.await.unwrap_err().sqlstate(), Some("25P01"));
    // The naive way.
    let mut naive = pool.begin().await.unwrap();
    naive.execute("UPDATE counter SET n = 7").await.unwrap();
    naive.execute("INSERT INTO counter VALUES (1, 1)").await.unwrap_err();
    naive.commit().await.unwrap();
    assert_eq!(count(&pool).await, 0, "sqlx says that it was committed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_is_refused_is_an_error_and_nothing_is_committed() {
    let (_database, pool) = counter().await;
    pool.execute("ALTER TABLE counter ADD UNIQUE (n) DEFERRABLE INITIALLY DEFERRED").await.unwrap_err();
    pool.execute(
        "UPDATE counter SET n = id; ALTER TABLE counter ADD UNIQUE (n) DEFERRABLE INITIALLY DEFERRED",
    )
    .await
    .unwrap();
    let runs = &AtomicU32::new(0);
    let refused = transaction(&pool, Isolation::SessionDefault, |tx| {
        Box::pin(async move {
            runs.fetch_add(1, Ordering::SeqCst);
            tx.execute("UPDATE counter SET n = 7").await?;
            Ok::<_, Error>(())
        })
    });
    let refused = refused.await.unwrap_err();
    assert!(matches!(refused, Error::Database { .. }), "{refused:?}");
    assert_eq!((refused.sqlstate(), runs.load(Ordering::SeqCst)), (Some("23505"), 1));
    assert_eq!(count(&pool).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_level_is_the_one_asked_for_and_it_is_for_writing() {
    let (database, pool) = counter().await;
    sqlx::query(sqlx::AssertSqlSafe(format!(
        "ALTER DATABASE \"{}\" SET default_transaction_read_only = on",
        database.name()
    )))
    .execute(&pool)
    .await
    .unwrap();
    let hostile = one_connection(&database);
    let settings =
        "SELECT current_setting('transaction_isolation') || ', ' || current_setting('transaction_read_only')";
    for (level, expected) in [
        (Isolation::SessionDefault, "read committed, on"),
        (Isolation::ReadCommitted, "read committed, off"),
        (Isolation::RepeatableRead, "repeatable read, off"),
        (Isolation::Serializable, "serializable, off"),
        (Isolation::SessionDefault, "read committed, on"),
    ] {
        let is: Result<String, Error> = transaction(&hostile, level, |tx| {
            Box::pin(async move { Ok(sqlx::query_scalar(settings).fetch_one(&mut **tx).await?) })
        })
        .await;
        assert_eq!(is.unwrap(), expected, "{level:?}");
    }
}

// Many that read, compute and write, at each level that notices; the tasks go to other threads.
#[tokio::test(flavor = "multi_thread")]
async fn no_update_is_lost_by_many_tasks() {
    let (_database, pool) = counter().await;
    for level in [Isolation::RepeatableRead, Isolation::Serializable] {
        pool.execute("UPDATE counter SET n = 0").await.unwrap();
        let tasks: Vec<_> = (0..4)
            .map(|_| {
                let pool = pool.clone();
                tokio::spawn(async move {
                    let mut done = 0;
                    let step = &1;
                    while done < 25 {
                        let added = transaction(&pool, level, |tx| {
                            Box::pin(async move {
                                let text = "SELECT n FROM counter WHERE id = 1";
                                let n: i32 = sqlx::query_scalar(text).fetch_one(&mut **tx).await?;
                                let text = "UPDATE counter SET n = $1 WHERE id = 1";
                                sqlx::query(text).bind(n + *step).execute(&mut **tx).await?;
                                Ok::<_, Error>(())
                            })
                        });
                        match added.await {
                            Ok(()) => done += 1,
                            // On a machine that is busy enough; then it is the caller's turn.
                            Err(error) => {
                                assert!(matches!(error, Error::RetriesExhausted { .. }), "{error:?}");
                            }
                        }
                    }
                })
            })
            .collect();
        for task in tasks {
            within("the tasks", task).await.unwrap();
        }
        assert_eq!(count(&pool).await, 100, "{level:?}");
    }
}

/// In no transaction, and with the settings of a new session. Simple protocol: its one statement begins its transaction.
async fn is_clean(single: &PgPool) -> bool {
    let clean = "SELECT now() = statement_timestamp() AND current_setting('transaction_isolation') = 'read committed'";
    within("a connection of the pool", single.fetch_one(sqlx::raw_sql(clean))).await.unwrap().get(0)
}

async fn both_rows(single: &PgPool) -> Result<(), Error> {
    transaction(single, Isolation::Serializable, |tx| {
        Box::pin(async move {
            tx.execute("UPDATE counter SET n = n + 1 WHERE id = 1").await?;
            tx.execute("UPDATE counter SET n = n + 1 WHERE id = 2").await?;
            Ok(())
        })
    })
    .await
}

// C07, poll by poll.
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_dropped_after_any_poll_leaves_a_clean_connection() {
    let (database, pool) = counter().await;
    let single = one_connection(&database);
    let (mut whole, mut cut) = (0, 0);
    for round in 0..96 {
        match after_polls(round % 12, both_rows(&single)).await {
            Some(done) => {
                done.unwrap();
                whole += 1;
            }
            None => cut += 1,
        }
        assert!(is_clean(&single).await, "round {round}");
    }
    assert!(whole > 0 && cut > 0, "{whole} {cut}");
    until_true(&pool, "all or nothing", "SELECT min(n) = max(n) FROM counter").await;
    assert!(count(&pool).await >= whole);
}

// C07, moment by moment: aborted after so many microseconds, wherever it is then.
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_aborted_at_any_moment_leaves_a_clean_connection() {
    let (database, pool) = counter().await;
    let single = one_connection(&database);
    let (mut whole, mut cut) = (0, 0);
    for round in 0..400_u32 {
        let task = tokio::spawn({
            let single = single.clone();
            async move { both_rows(&single).await }
        });
        let moment = Instant::now() + Duration::from_micros(u64::from(round % 200) * 10);
        while Instant::now() < moment {
            std::hint::spin_loop();
        }
        task.abort();
        match task.await {
            Ok(done) => {
                done.unwrap();
                whole += 1;
            }
            Err(_aborted) => cut += 1,
        }
        assert!(is_clean(&single).await, "round {round}");
    }
    println!("{whole} whole, {cut} cut");
    assert!(cut > 0);
    until_true(&pool, "all or nothing", "SELECT min(n) = max(n) FROM counter").await;
    assert!(count(&pool).await >= whole);
    until_true(
        &pool,
        "no session idle in a transaction",
        "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%')",
    )
    .await;
}

// What `transaction` is for: sqlx alone gives back a connection in an open transaction.
#[tokio::test(flavor = "multi_thread")]
async fn a_begin_of_sqlx_that_is_dropped_poisons_its_pool() {
    let (database, _pool) = counter().await;
    let mut poisoned = 0;
    for round in 0..40 {
        let single = one_connection(&database);
        single.execute("SELECT").await.unwrap();
        drop(after_polls(1 + round % 4, single.begin()).await);
        poisoned += u32::from(!is_clean(&single).await);
        single.close().await;
    }
    assert!(poisoned > 0, "sqlx has mended begin: simplify retry::begin");
}

#[tokio::test(flavor = "multi_thread")]
async fn work_that_panics_is_rolled_back() {
    let (database, pool) = counter().await;
    let single = one_connection(&database);
    let panicked = tokio::spawn({
        let single = single.clone();
        async move {
            transaction(&single, Isolation::Serializable, |tx| {
                Box::pin(async move {
                    tx.execute("UPDATE counter SET n = 7").await?;
                    if true {
                        std::panic::resume_unwind(Box::new("on purpose"));
                    }
                    Ok::<_, Error>(())
                })
            })
            .await
        }
    });
    assert!(panicked.await.unwrap_err().is_panic());
    assert!(is_clean(&single).await);
    assert_eq!(count(&pool).await, 0);
}

// The statement of another table's user: sqlx keeps it on the connection, where it fails for ever.
#[tokio::test(flavor = "multi_thread")]
async fn a_statement_that_a_migration_made_stale_is_prepared_anew() {
    let (database, pool) = counter().await;
    let single = one_connection(&database);
    let columns = async || {
        let run = transaction(&single, Isolation::Serializable, |tx| {
            Box::pin(async move {
                let row = sqlx::query("SELECT * FROM counter WHERE id = 1").fetch_one(&mut **tx).await?;
                Ok::<_, AppError>(row.len())
            })
        });
        within("the run", run).await.unwrap()
    };
    assert_eq!(columns().await, 2);
    pool.execute("ALTER TABLE counter ADD note text").await.unwrap();
    // The naive way, twice.
    for _ in 0..2 {
        let stale = sqlx::query("SELECT * FROM counter WHERE id = 1").fetch_one(&single).await;
        assert_eq!(Error::from(stale.unwrap_err()).sqlstate(), Some("0A000"), "sqlx has mended it");
    }
    assert_eq!(columns().await, 3);
}

// The pool hands out its connections in turn, so one after the other is stale.
#[tokio::test(flavor = "multi_thread")]
async fn a_pool_full_of_stale_statements_is_no_reason_to_give_up() {
    let (database, pool) = counter().await;
    let large = PgPoolOptions::new().max_connections(15).connect_lazy_with(database.options());
    let text = "SELECT * FROM counter WHERE id = 1";
    let mut all = Vec::new();
    for _ in 0..15 {
        let mut conn = large.acquire().await.unwrap();
        sqlx::query(text).fetch_one(&mut *conn).await.unwrap();
        all.push(conn);
    }
    drop(all);
    until("all are idle", async || (large.num_idle() == 15).then_some(())).await;
    pool.execute("ALTER TABLE counter ADD note text").await.unwrap();
    let runs = &AtomicU32::new(0);
    let run = transaction(&large, Isolation::SessionDefault, |tx| {
        Box::pin(async move {
            runs.fetch_add(1, Ordering::SeqCst);
            sqlx::query(text).fetch_one(&mut **tx).await?;
            Ok::<_, Error>(())
        })
    });
    within("the run", run).await.unwrap();
    assert!(runs.load(Ordering::SeqCst) <= 16);
}
