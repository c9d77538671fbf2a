//! Optimistic versions: a row is changed only by who has read it as it is, and every other answer says what is so.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use fencepost::testing::TestDatabase;
use fencepost::version::{Changes, CheckVersion as _, Delete, Update, Versioned};
use fencepost::{Error, Isolation, Version, transaction};
use sqlx::{AssertSqlSafe, Executor as _, PgConnection, PgPool};

use crate::support::{database, until_true, within};

const SOMEBODY_WAITS: &str = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')";

type Row = (i64, i64);

fn accounts() -> Versioned {
    Versioned::on("accounts").unwrap()
}

fn balance(balance: i64) -> Changes {
    Changes::new().set("balance", balance)
}

/// Accounts 1 to 9, each with 100 and version 1.
async fn nine() -> (TestDatabase, PgPool) {
    let (database, pool) = database().await;
    pool.execute(
        "CREATE TABLE accounts (id bigint PRIMARY KEY, balance bigint NOT NULL);
         INSERT INTO accounts SELECT id, 100 FROM generate_series(1, 9) id",
    )
    .await
    .unwrap();
    pool.execute(AssertSqlSafe(accounts().add_column())).await.unwrap();
    (database, pool)
}

async fn row(conn: &mut PgConnection, id: i64) -> (i64, Version) {
    let read = accounts().load::<Row, _>(conn, id).await.unwrap().unwrap();
    (read.value.1, read.version)
}

async fn set(conn: &mut PgConnection, id: i64, version: i64, to: i64) -> fencepost::Result<Update> {
    accounts().update(conn, id, Version::new(version), balance(to)).await
}

fn updated(version: i64) -> Update {
    Update::Updated(Version::new(version))
}

fn conflict(current: i64) -> Update {
    Update::Conflict { current: Version::new(current) }
}

// C42: told apart at every isolation level, and the transaction goes on.
#[tokio::test(flavor = "multi_thread")]
async fn updated_conflict_and_gone_are_told_apart_at_every_isolation_level() {
    let (_database, pool) = nine().await;
    for (id, level) in [(1, "READ COMMITTED"), (2, "REPEATABLE READ"), (3, "SERIALIZABLE")] {
        let mut tx = pool.begin().await.unwrap();
        tx.execute(AssertSqlSafe(format!("SET TRANSACTION ISOLATION LEVEL {level}"))).await.unwrap();
        assert_eq!(set(&mut tx, id, 1, 101).await.unwrap(), updated(2), "{level}");
        assert_eq!(set(&mut tx, id, 1, 102).await.unwrap(), conflict(2), "{level}");
        assert_eq!(set(&mut tx, id, 3, 102).await.unwrap(), conflict(2), "{level}");
        assert_eq!(set(&mut tx, 77, 1, 102).await.unwrap(), Update::Gone, "{level}");
        let none = Changes::new();
        assert_eq!(accounts().update(&mut tx, id, Version::new(2), none).await.unwrap(), updated(3));
        let delete = async |conn: &mut PgConnection, version| {
            accounts().delete(conn, id, Version::new(version)).await.unwrap()
        };
        assert_eq!(delete(&mut tx, 2).await, Delete::Conflict { current: Version::new(3) }, "{level}");
        assert_eq!(row(&mut tx, id).await, (101, Version::new(3)), "{level}");
        assert_eq!(delete(&mut tx, 3).await, Delete::Deleted, "{level}");
        assert_eq!(delete(&mut tx, 3).await, Delete::Gone, "{level}");
        assert!(accounts().load::<Row, _>(&mut tx, id).await.unwrap().is_none(), "{level}");
        tx.commit().await.unwrap();
    }
    let gone =
        accounts().update(&mut pool.acquire().await.unwrap(), 1_i64, Version::new(3), balance(1)).await;
    assert!(matches!(gone.unwrap().into_result(), Err(Error::Gone)));
    assert!(
        matches!(conflict(7).into_result(), Err(Error::Conflict { current: Some(v), .. }) if v.as_i64() == 7)
    );
    assert_eq!(updated(7).into_result().unwrap().as_i64(), 7);
}

// What a statement waits for is not what it saw when it began: the answer is about the row as it is afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn who_waited_for_the_faster_one_is_told_its_version() {
    let (_database, pool) = nine().await;
    for (faster, answer) in [
        ("UPDATE accounts SET version = version + 1 WHERE id = 1", conflict(2)),
        ("UPDATE accounts SET version = version + 1 WHERE id = 2; ROLLBACK; BEGIN", updated(2)),
        ("DELETE FROM accounts WHERE id = 3", Update::Gone),
        ("DELETE FROM accounts WHERE id = 4; INSERT INTO accounts VALUES (4, 7, 55)", conflict(55)),
        ("UPDATE accounts SET id = 55 WHERE id = 5", Update::Gone),
        ("SELECT FROM accounts WHERE id = 6 FOR UPDATE", updated(2)),
    ] {
        let id: i64 = faster.split("id = ").last().unwrap()[..1].parse().unwrap();
        let mut tx = pool.begin().await.unwrap();
        let text = faster.split("; ROLLBACK").next().unwrap();
        tx.execute(AssertSqlSafe(text.to_owned())).await.unwrap();
        let waiting = tokio::spawn({
            let pool = pool.clone();
            async move { set(&mut pool.acquire().await.unwrap(), id, 1, 7).await.unwrap() }
        });
        until_true(&pool, "the update waits", SOMEBODY_WAITS).await;
        if text == faster {
            tx.commit().await.unwrap();
        } else {
            tx.rollback().await.unwrap();
        }
        assert_eq!(within("the update", waiting).await.unwrap(), answer, "{faster}");
    }
}

// C42: with a snapshot Postgres raises 40001 where the row has moved on: the same kind of error, and no other.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_moved_on_after_the_snapshot_is_a_typed_conflict() {
    const OWN: &str = "UPDATE accounts SET balance = 7, version = version + 1 WHERE id = $1 AND version = $2";
    let (_database, pool) = nine().await;
    pool.execute("INSERT INTO accounts SELECT id, 100 FROM generate_series(10, 30) id").await.unwrap();
    let mut id = 0_i64;
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        for faster in ["UPDATE accounts SET version = version + 1", "DELETE FROM accounts"] {
            for way in ["update", "update_many", "delete", "own statement"] {
                id += 1;
                let mut tx = pool.begin().await.unwrap();
                tx.execute(AssertSqlSafe(format!("SET TRANSACTION ISOLATION LEVEL {level}"))).await.unwrap();
                let (_, read) = row(&mut tx, id).await;
                pool.execute(AssertSqlSafe(format!("{faster} WHERE id = {id}"))).await.unwrap();
                let table = accounts();
                let failed = match way {
                    "update" => table.update(&mut tx, id, read, balance(7)).await.map(drop_it),
                    "delete" => table.delete(&mut tx, id, read).await.map(drop_it),
                    "update_many" => table.update_many(&mut tx, &[(id, read)], balance(7)).await.map(drop_it),
                    _ => {
                        let own = sqlx::query(OWN).bind(id).bind(read).execute(&mut *tx).await;
                        own.check_version(&table, &mut tx, id, read).await.map(drop_it)
                    }
                };
                is_conflict(&failed.unwrap_err(), level);
                tx.rollback().await.unwrap();
            }
        }
    }
}

fn drop_it<T>(_: T) {}

fn is_conflict(error: &Error, level: &str) {
    assert!(matches!(error, Error::Conflict { current: None, .. }), "{level}: {error:?}");
    assert_eq!(error.sqlstate(), Some("40001"));
    assert!(error.is_retryable());
}

// A serialization failure of the whole transaction is not about the row.
#[tokio::test(flavor = "multi_thread")]
async fn a_failure_to_serialize_that_is_not_about_the_row_is_no_conflict() {
    let (_database, pool) = nine().await;
    let mut both = [pool.begin().await.unwrap(), pool.begin().await.unwrap()];
    for tx in &mut both {
        tx.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE; SELECT sum(balance) FROM accounts")
            .await
            .unwrap();
    }
    let [mut a, mut b] = both;
    assert_eq!(set(&mut a, 1, 1, 0).await.unwrap(), updated(2));
    assert_eq!(set(&mut b, 2, 1, 0).await.unwrap(), updated(2));
    a.commit().await.unwrap();
    let failed = set(&mut b, 3, 1, 0).await.unwrap_err();
    assert!(matches!(failed, Error::SerializationFailure { .. }), "{failed:?}");
}

// `transaction` runs work that reads again, and leaves a conflict with a version from outside alone.
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_runs_again_after_40001_and_not_after_an_answer() {
    let (_database, pool) = nine().await;
    let runs = &AtomicU32::new(0);
    let meanwhile = &pool;
    let work = transaction(&pool, Isolation::RepeatableRead, |tx| {
        Box::pin(async move {
            let (read, version) = row(tx, 1).await;
            if runs.fetch_add(1, Ordering::SeqCst) == 0 {
                set(&mut *meanwhile.acquire().await?, 1, 1, 500).await?.into_result()?;
            }
            accounts().update(tx, 1_i64, version, balance(read + 1)).await?.into_result()
        })
    });
    assert_eq!(within("the transaction", work).await.unwrap().as_i64(), 3);
    assert_eq!(runs.load(Ordering::SeqCst), 2);
    let mut conn = pool.acquire().await.unwrap();
    assert_eq!(row(&mut conn, 1).await, (501, Version::new(3)));
    let from_outside = transaction(&pool, Isolation::RepeatableRead, |tx| {
        runs.fetch_add(1, Ordering::SeqCst);
        Box::pin(async move { set(tx, 1, 1, 0).await?.into_result() })
    });
    let failed = from_outside.await.unwrap_err();
    assert!(matches!(failed, Error::Conflict { current: Some(v), .. } if v.as_i64() == 3), "{failed:?}");
    assert_eq!(runs.load(Ordering::SeqCst), 3);
}

/// What one writer has done, with the moments of its begin and end.
struct Op {
    began: Instant,
    ended: Instant,
    expected: i64,
    read: i64,
    writes: i64,
    answer: Update,
}

// I10: a compare-and-set register. Each change of the version is made once, from the value of the one before it;
// what is told of the current version was true at a moment between the asking and the answer.
#[tokio::test(flavor = "multi_thread")]
async fn versions_are_compare_and_set_registers_under_sixteen_writers() {
    const WRITERS: i64 = 16;
    const EACH: i64 = 60;
    let (_database, pool) = nine().await;
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..WRITERS {
        let pool = pool.clone();
        writers.spawn(async move {
            let (mut ops, mut known) = (Vec::new(), None);
            for n in 0..EACH {
                let mut conn = pool.acquire().await.unwrap();
                // Every third time by what was read before: what is old must be refused.
                let (read, version) = match known {
                    Some(known) if n % 3 == 0 => known,
                    _ => row(&mut conn, 1).await,
                };
                known = Some((read, version));
                let value = 1_000 + writer * EACH + n;
                let began = Instant::now();
                let answer = accounts().update(&mut conn, 1_i64, version, balance(value)).await.unwrap();
                let expected = version.as_i64();
                ops.push(Op { began, ended: Instant::now(), expected, read, writes: value, answer });
            }
            ops
        });
    }
    let ops: Vec<Op> = within("the writers", writers.join_all()).await.into_iter().flatten().collect();
    // The change that made each version, by number: the register's history, since numbers are its order.
    let mut made: Vec<&Op> = ops.iter().filter(|op| matches!(op.answer, Update::Updated(_))).collect();
    made.sort_by_key(|op| op.expected);
    let version_of = |op: &Op| if let Update::Updated(new) = op.answer { new.as_i64() } else { 0 };
    let mut value = 100;
    let mut latest_begin = made[0].began;
    for (at, op) in (1..).zip(&made) {
        assert_eq!(
            (op.expected, version_of(op)),
            (at, at + 1),
            "each version is made once, by one from the one before"
        );
        assert_eq!(op.read, value, "version {at} was read with the value that was written with it");
        assert!(latest_begin <= op.ended, "version {} was made before {at} was begun to be", at + 1);
        latest_begin = latest_begin.max(op.began);
        value = op.writes;
    }
    let mut refused = 0;
    for op in &ops {
        if let Update::Conflict { current } = op.answer {
            refused += 1;
            let current = current.as_i64();
            assert!(current > op.expected, "refused at {current}, though {} was asked for", op.expected);
            let by = made[usize::try_from(current - 2).unwrap()];
            assert!(by.began < op.ended, "{current} was told before anybody began to make it");
            let next = made.get(usize::try_from(current - 1).unwrap());
            assert!(next.is_none_or(|next| next.ended > op.began), "{current} was told after it was over");
        }
    }
    assert_eq!(made.len() + refused, ops.len(), "nobody was told that the row is gone");
    assert!(refused > 50, "the writers did not meet: {refused}");
    let end = row(&mut pool.acquire().await.unwrap(), 1).await;
    assert_eq!(end, (value, Version::new(i64::try_from(made.len()).unwrap() + 1)));
}

// The version is compared and raised by Postgres, whatever the program thinks.
#[tokio::test(flavor = "multi_thread")]
async fn update_with_loses_no_update_under_sixteen_writers() {
    let (_database, pool) = nine().await;
    let tried = std::sync::Arc::new(AtomicU32::new(0));
    let mut writers = tokio::task::JoinSet::new();
    for _ in 0..16 {
        let (pool, tried) = (pool.clone(), std::sync::Arc::clone(&tried));
        writers.spawn(async move {
            for _ in 0..10 {
                let table = accounts();
                let done = table.update_with(&pool, 1_i64, |read| {
                    tried.fetch_add(1, Ordering::SeqCst);
                    let (_, now): Row = read.value;
                    Ok::<_, Error>(balance(now + 1))
                });
                done.await.unwrap().unwrap();
            }
        });
    }
    within("the writers", writers.join_all()).await;
    assert_eq!(row(&mut pool.acquire().await.unwrap(), 1).await, (260, Version::new(161)));
    assert!(tried.load(Ordering::SeqCst) > 160, "the writers did not meet");
}

#[tokio::test(flavor = "multi_thread")]
async fn update_with_gives_up_and_says_so() {
    let (_database, pool) = nine().await;
    let mut decided = 0;
    let faster = "UPDATE accounts SET version = version + 1 WHERE id = 1";
    let table = accounts();
    let never = table.update_with(&pool, 1_i64, |read| {
        let (_, now): Row = read.value;
        decided += 1;
        // Somebody is always faster.
        let pool = pool.clone();
        tokio::task::block_in_place(|| {
            tokio::runtime::Handle::current().block_on(async { pool.execute(faster).await.unwrap() })
        });
        Ok::<_, Error>(balance(now + 1))
    });
    let failed = within("giving up", never).await.unwrap_err();
    assert!(matches!(failed, Error::RetriesExhausted { attempts: 20, .. }), "{failed:?}");
    let source = std::error::Error::source(&failed).unwrap().downcast_ref::<Error>().unwrap();
    assert!(matches!(source, Error::Conflict { current: Some(v), .. } if v.as_i64() == 21), "{source:?}");
    assert_eq!(decided, 20);
    // The closure's own error ends it at once, and a row that is not there is no error.
    let mut asked = 0;
    let table = accounts();
    let refused = table.update_with(&pool, 1_i64, |_: fencepost::version::Current<Row>| {
        asked += 1;
        Err::<Changes, _>(Error::from(sqlx::Error::RowNotFound))
    });
    assert!(matches!(refused.await.unwrap_err(), Error::Database { .. }));
    assert_eq!(asked, 1);
    let table = accounts();
    let gone =
        table.update_with(&pool, 77_i64, |_: fencepost::version::Current<Row>| Ok::<_, Error>(balance(0)));
    assert_eq!(gone.await.unwrap(), None);
}

// C42: whatever the session's default is, it decides anew.
#[tokio::test(flavor = "multi_thread")]
async fn update_with_decides_anew_under_every_default_isolation() {
    let (database, pool) = nine().await;
    for (at, level) in (1..).zip(["read committed", "repeatable read", "serializable"]) {
        let options = database.options().options([("default_transaction_isolation", level)]);
        let strict = sqlx::postgres::PgPoolOptions::new().connect_lazy_with(options);
        let mut writers = tokio::task::JoinSet::new();
        for _ in 0..8 {
            let pool = strict.clone();
            writers.spawn(async move {
                for _ in 0..5 {
                    let table = accounts();
                    let done = table.update_with(&pool, 2_i64, |read| {
                        let (_, now): Row = read.value;
                        Ok::<_, Error>(balance(now + 1))
                    });
                    done.await.unwrap().unwrap();
                }
            });
        }
        within("the writers", writers.join_all()).await;
        assert_eq!(row(&mut pool.acquire().await.unwrap(), 2).await.0, 100 + 40 * at, "{level}");
        strict.close().await;
    }
}

// C41: the losers are listed, and only they have lost.
#[tokio::test(flavor = "multi_thread")]
async fn of_many_the_losers_are_listed() {
    let (_database, pool) = nine().await;
    let mut tx = pool.begin().await.unwrap();
    set(&mut tx, 3, 1, 3_333).await.unwrap().into_result().unwrap();
    let rows = [9, 77, 3, 1, 78].map(|id| (id, Version::new(1)));
    let changes = Changes::new().set_each("balance", &[109_i64, 177, 103, 101, 178]);
    let many = accounts().update_many(&mut tx, &rows, changes).await.unwrap();
    assert_eq!(many.updated, [(9, Version::new(2)), (1, Version::new(2))]);
    assert_eq!(many.conflicts, [(3, Version::new(2))]);
    assert_eq!(many.gone, [77, 78]);
    assert!(!many.is_complete());
    tx.commit().await.unwrap();
    let mut conn = pool.acquire().await.unwrap();
    for (id, now, version) in [(1, 101, 2), (3, 3_333, 2), (9, 109, 2), (2, 100, 1)] {
        assert_eq!(row(&mut conn, id).await, (now, Version::new(version)), "{id}");
    }
    let rows = [1, 2].map(|id| (id, Version::new(if id == 1 { 2 } else { 1 })));
    let many = accounts().update_many(&mut conn, &rows, balance(0)).await.unwrap();
    assert!(many.is_complete() && many.updated.len() == 2);
    let many = accounts().update_many::<i64>(&mut conn, &[], balance(0)).await.unwrap();
    assert!(many.is_complete() && many.updated.is_empty());
}

// Sixteen that take the same rows in other orders, by old versions and new ones: no deadlock, and each version is made once.
#[tokio::test(flavor = "multi_thread")]
async fn many_at_once_neither_deadlock_nor_lose_an_update() {
    let (_database, pool) = nine().await;
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..16_i64 {
        let pool = pool.clone();
        writers.spawn(async move {
            let mut won = 0;
            for round in 0..15 {
                let mut rows = Vec::new();
                let mut values = Vec::new();
                for n in 0..9 {
                    let id = 1 + (n * if writer % 2 == 0 { 1 } else { 8 } + writer + round) % 9;
                    let (now, version) = row(&mut pool.acquire().await.unwrap(), id).await;
                    rows.push((id, version));
                    values.push(now + 1);
                }
                let changes = Changes::new().set_each("balance", &values);
                let mut conn = pool.acquire().await.unwrap();
                let many = accounts().update_many(&mut conn, &rows, changes).await.unwrap();
                assert!(many.gone.is_empty());
                won += many.updated.len();
            }
            won
        });
    }
    let won: usize = within("the writers", writers.join_all()).await.into_iter().sum();
    let (sum, versions): (i64, i64) =
        sqlx::query_as("SELECT sum(balance)::bigint, sum(version)::bigint FROM accounts")
            .fetch_one(&pool)
            .await
            .unwrap();
    let won = i64::try_from(won).unwrap();
    assert_eq!((sum, versions), (900 + won, 9 + won));
    assert!(won < 16 * 15 * 9, "the writers did not meet");
}

// C40: NULL is not a version that one can have: it is said, and is neither a conflict nor an update.
#[tokio::test(flavor = "multi_thread")]
async fn null_for_a_version_is_said() {
    let (_database, pool) = nine().await;
    pool.execute(
        "ALTER TABLE accounts ALTER version DROP NOT NULL; UPDATE accounts SET version = NULL WHERE id = 1",
    )
    .await
    .unwrap();
    let mut conn = pool.acquire().await.unwrap();
    let one = Version::new(1);
    for failed in [
        accounts().load::<Row, _>(&mut conn, 1_i64).await.map(drop_it),
        accounts().update(&mut conn, 1_i64, one, balance(7)).await.map(drop_it),
        accounts().delete(&mut conn, 1_i64, one).await.map(drop_it),
        accounts().update_many(&mut conn, &[(1_i64, one)], balance(7)).await.map(drop_it),
    ] {
        let failed = failed.unwrap_err();
        assert!(matches!(failed, Error::NotVersioned { .. }), "{failed:?}");
        assert!(failed.to_string().contains("bigint NOT NULL"), "{failed}");
    }
    let untouched: i64 =
        sqlx::query_scalar("SELECT balance FROM accounts WHERE id = 1").fetch_one(&pool).await.unwrap();
    assert_eq!(untouched, 100);
}

// C40: a row that takes the place of a deleted one must not come to a version that somebody has read of the old one.
#[tokio::test(flavor = "multi_thread")]
async fn a_version_is_not_used_again_after_delete_and_insert() {
    let (_database, pool) = nine().await;
    let mut conn = pool.acquire().await.unwrap();
    conn.execute("INSERT INTO accounts VALUES (10, 0)").await.unwrap();
    for id in [1, 10] {
        for now in 0..5 {
            let (_, version) = row(&mut conn, id).await;
            set(&mut conn, id, version.as_i64(), now).await.unwrap().into_result().unwrap();
        }
        let (_, old) = row(&mut conn, id).await;
        assert_eq!(accounts().delete(&mut conn, id, old).await.unwrap(), Delete::Deleted);
        sqlx::query("INSERT INTO accounts VALUES ($1, 0)").bind(id).execute(&mut *conn).await.unwrap();
        let (_, new) = row(&mut conn, id).await;
        assert!(new > old, "{new} after {old}");
        assert_eq!(set(&mut conn, id, old.as_i64(), 7).await.unwrap(), conflict(new.as_i64()));
    }
}

// No rewrite of the table, and NOT NULL.
#[tokio::test(flavor = "multi_thread")]
async fn the_migration_rewrites_nothing() {
    let (_database, pool) = database().await;
    pool.execute(r#"CREATE TABLE "Odd.Name" (id text PRIMARY KEY); INSERT INTO "Odd.Name" VALUES ('x')"#)
        .await
        .unwrap_or_else(|error| panic!("{error}"));
    pool.execute(r#"CREATE SCHEMA s; CREATE TABLE s."select" ("Key" text PRIMARY KEY); INSERT INTO s."select" VALUES ('x')"#)
        .await
        .unwrap();
    let table = Versioned::on("s.select").unwrap().key("Key").unwrap().version(r#"lock "v""#).unwrap();
    let file = r#"SELECT pg_relation_filenode('s."select"')::bigint"#;
    let before: i64 = sqlx::query_scalar(file).fetch_one(&pool).await.unwrap();
    pool.execute(AssertSqlSafe(table.add_column())).await.unwrap();
    assert_eq!(sqlx::query_scalar::<_, i64>(file).fetch_one(&pool).await.unwrap(), before);
    let mut conn = pool.acquire().await.unwrap();
    let read = table.load::<(String,), _>(&mut conn, "x").await.unwrap().unwrap();
    assert_eq!((read.value.0.as_str(), read.version.as_i64()), ("x", 1));
    let none = Changes::new();
    assert_eq!(table.update(&mut conn, "x", read.version, none).await.unwrap(), updated(2));
    let null = conn.execute(r#"UPDATE s."select" SET "lock ""v""" = NULL"#).await;
    assert_eq!(Error::from(null.unwrap_err()).sqlstate(), Some("23502"));
}

// A trigger that suppresses the change looks like a conflict to who counts rows: it never goes away.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_trigger_does_is_told() {
    let (_database, pool) = nine().await;
    pool.execute(
        "CREATE FUNCTION meddle() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
             IF OLD.id = 1 THEN RETURN NULL; END IF;
             IF TG_OP = 'DELETE' THEN RETURN OLD; END IF;
             IF OLD.id = 2 THEN NEW.version := OLD.version; END IF;
             IF OLD.id = 3 THEN NEW.version := NEW.version + 10; END IF;
             RETURN NEW;
         END $$;
         CREATE TRIGGER meddle BEFORE UPDATE OR DELETE ON accounts FOR EACH ROW EXECUTE FUNCTION meddle()",
    )
    .await
    .unwrap();
    let mut conn = pool.acquire().await.unwrap();
    let one = Version::new(1);
    for (id, suppressed) in [(1_i64, true), (2, false)] {
        for failed in [
            accounts().update(&mut conn, id, one, balance(7)).await.map(drop_it),
            accounts()
                .update_many(&mut conn, &[(id, if id == 2 { Version::new(1) } else { one })], balance(7))
                .await
                .map(drop_it),
        ] {
            let failed = failed.unwrap_err();
            assert_eq!(matches!(failed, Error::Suppressed { .. }), suppressed, "{failed:?}");
            assert_eq!(matches!(failed, Error::NotVersioned { .. }), !suppressed, "{failed:?}");
            assert!(failed.to_string().contains(r#""accounts""#) && !failed.is_retryable(), "{failed}");
        }
    }
    let failed = accounts().delete(&mut conn, 1_i64, one).await.unwrap_err();
    assert!(matches!(failed, Error::Suppressed { .. }), "{failed:?}");
    // An old version is a conflict all the same.
    assert_eq!(set(&mut conn, 1, 0, 7).await.unwrap(), conflict(1));
    // A trigger that raises it further is reported as it is.
    assert_eq!(set(&mut conn, 3, 1, 7).await.unwrap(), updated(12));
    // update_with does not go round in circles.
    let mut decided = 0;
    let table = accounts();
    let failed = table.update_with(&pool, 1_i64, |_: fencepost::version::Current<Row>| {
        decided += 1;
        Ok::<_, Error>(balance(0))
    });
    assert!(matches!(failed.await.unwrap_err(), Error::Suppressed { .. }));
    assert_eq!(decided, 1);
}

// A row that the role may see and not update, by row security.
#[tokio::test(flavor = "multi_thread")]
async fn row_security_that_forbids_the_change_is_no_conflict() {
    let (_database, pool) = nine().await;
    let role = format!("reader_{}", uuid());
    let setup = format!(
        "CREATE ROLE {role}; GRANT SELECT, UPDATE, DELETE ON accounts TO {role};
         ALTER TABLE accounts ENABLE ROW LEVEL SECURITY;
         CREATE POLICY see ON accounts FOR SELECT USING (true);
         CREATE POLICY change ON accounts FOR UPDATE USING (id > 5)"
    );
    pool.execute(AssertSqlSafe(setup)).await.unwrap();
    let mut tx = pool.begin().await.unwrap();
    tx.execute(AssertSqlSafe(format!("SET LOCAL ROLE {role}"))).await.unwrap();
    assert_eq!(set(&mut tx, 6, 1, 7).await.unwrap(), updated(2));
    let failed = set(&mut tx, 1, 1, 7).await.unwrap_err();
    assert!(matches!(failed, Error::Suppressed { .. }), "{failed:?}");
    let rows = [(1_i64, Version::new(1)), (7, Version::new(1))];
    let many = accounts().update_many(&mut tx, &rows, balance(7)).await.unwrap();
    assert_eq!((many.updated.len(), many.gone), (1, vec![1]), "not shown to who updates");
    tx.rollback().await.unwrap();
    pool.execute(AssertSqlSafe(format!("DROP OWNED BY {role}; DROP ROLE {role}"))).await.unwrap();
}

fn uuid() -> String {
    sqlx::types::Uuid::new_v4().simple().to_string()
}

// A rule rewrites the statement: Postgres refuses it, nothing is changed, nobody is told a wrong answer.
#[tokio::test(flavor = "multi_thread")]
async fn a_table_with_a_rule_is_refused() {
    for rule in [
        "CREATE RULE r AS ON UPDATE TO accounts DO INSTEAD NOTHING",
        "CREATE RULE r AS ON UPDATE TO accounts WHERE OLD.id = 1 DO INSTEAD NOTHING",
        "CREATE RULE r AS ON UPDATE TO accounts DO ALSO NOTIFY x",
    ] {
        let (_database, pool) = nine().await;
        pool.execute(rule).await.unwrap();
        let mut conn = pool.acquire().await.unwrap();
        let one = Version::new(1);
        for failed in [
            accounts().update(&mut conn, 1_i64, one, balance(7)).await.map(drop_it),
            accounts().update_many(&mut conn, &[(1_i64, one)], balance(7)).await.map(drop_it),
        ] {
            let failed = failed.unwrap_err();
            assert!(matches!(failed, Error::Database { .. }), "{failed:?}");
            assert_eq!(failed.sqlstate(), Some("0A000"), "{rule}");
        }
        assert_eq!(row(&mut conn, 1).await, (100, one), "{rule}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn partitions_generated_columns_and_views_keep_versions() {
    let (_database, pool) = database().await;
    pool.execute(
        "CREATE TABLE accounts (id bigint, balance bigint NOT NULL, version bigint NOT NULL DEFAULT 1,
             twice bigint GENERATED ALWAYS AS (balance * 2) STORED,
             tag text GENERATED ALWAYS AS ('v' || version) STORED, PRIMARY KEY (id, balance)) PARTITION BY RANGE (balance);
         CREATE TABLE poor PARTITION OF accounts FOR VALUES FROM (0) TO (100);
         CREATE TABLE rich PARTITION OF accounts FOR VALUES FROM (100) TO (1000);
         INSERT INTO accounts VALUES (1, 5), (2, 5), (3, 5);
         CREATE VIEW customers AS SELECT id, balance, version FROM accounts",
    )
    .await
    .unwrap();
    let mut conn = pool.acquire().await.unwrap();
    // From one partition to the other and back.
    assert_eq!(set(&mut conn, 1, 1, 500).await.unwrap(), updated(2));
    assert_eq!(set(&mut conn, 1, 1, 5).await.unwrap(), conflict(2));
    assert_eq!(set(&mut conn, 1, 2, 50).await.unwrap(), updated(3));
    let rows = [1, 2].map(|id| (id, Version::new(if id == 1 { 3 } else { 1 })));
    let many =
        accounts().update_many(&mut conn, &rows, Changes::new().set_each("balance", &[600_i64, 7])).await;
    assert!(many.unwrap().is_complete());
    let read = accounts().load::<(i64, i64, i64, i64, String), _>(&mut conn, 1_i64).await.unwrap().unwrap();
    assert_eq!(read.value, (1, 600, 4, 1_200, "v4".to_owned()));
    let generated =
        accounts().update(&mut conn, 1_i64, read.version, Changes::new().set("twice", 1_i64)).await;
    assert_eq!(generated.unwrap_err().sqlstate(), Some("428C9"));
    let view = Versioned::on("customers").unwrap();
    assert_eq!(view.update(&mut conn, 2_i64, Version::new(2), balance(8)).await.unwrap(), updated(3));
    assert_eq!(view.update(&mut conn, 2_i64, Version::new(2), balance(8)).await.unwrap(), conflict(3));
    // A row that is on its way to another partition cannot be followed: the same conflict, with an aborted transaction.
    let mut faster = pool.begin().await.unwrap();
    assert_eq!(set(&mut faster, 3, 1, 500).await.unwrap(), updated(2));
    let waiting = tokio::spawn({
        let pool = pool.clone();
        async move { set(&mut pool.acquire().await.unwrap(), 3, 1, 7).await }
    });
    until_true(&pool, "the update waits", SOMEBODY_WAITS).await;
    faster.commit().await.unwrap();
    is_conflict(&within("the update", waiting).await.unwrap().unwrap_err(), "READ COMMITTED");
}

// A key that is not unique: said, not guessed.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_of_several_rows_is_a_misuse() {
    let (_database, pool) = nine().await;
    let by_balance = accounts().key("balance").unwrap();
    let one = Version::new(1);
    let changes = || Changes::new().set("id", 70_i64);
    let mut tx = pool.begin().await.unwrap();
    tx.execute(
        "UPDATE accounts SET balance = 7 WHERE id < 3; ALTER TABLE accounts DROP CONSTRAINT accounts_pkey",
    )
    .await
    .unwrap();
    for failed in [
        by_balance.load::<Row, _>(&mut tx, 7_i64).await.map(drop_it),
        by_balance.update(&mut tx, 7_i64, one, changes()).await.map(drop_it),
    ] {
        assert!(matches!(failed, Err(Error::Misuse { .. })), "{failed:?}");
    }
    let own = "UPDATE accounts SET version = version + 1 WHERE balance = 7";
    let own = sqlx::query(own).execute(&mut *tx).await.unwrap();
    let failed = own.check_version(&by_balance, &mut tx, 7_i64, one).await;
    assert!(matches!(failed, Err(Error::Misuse { .. })), "{failed:?}");
    let failed = by_balance.update_many(&mut tx, &[(7_i64, Version::new(3))], changes()).await;
    assert!(matches!(failed, Err(Error::Misuse { .. })), "{failed:?}");
    tx.rollback().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_statement_of_ones_own_gets_the_right_answer() {
    let (_database, pool) = nine().await;
    let mut conn = pool.acquire().await.unwrap();
    let own = "UPDATE accounts SET balance = balance - 30, version = version + 1 WHERE id = $1 AND version = $2 AND balance >= 30";
    let mut run = async |id: i64, version: i64| {
        let version = Version::new(version);
        let result = sqlx::query(own).bind(id).bind(version).execute(&mut *conn).await.unwrap();
        result.check_version(&accounts(), &mut conn, id, version).await
    };
    for version in [1, 2, 3] {
        assert_eq!(run(1, version).await.unwrap(), updated(version + 1));
    }
    assert_eq!(run(1, 3).await.unwrap(), conflict(4));
    assert_eq!(run(77, 1).await.unwrap(), Update::Gone);
    // Another condition was not true: 10 are left.
    assert!(matches!(run(1, 4).await, Err(Error::Suppressed { .. })));
}

// A value is a value, a name is a name.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_in_a_value_or_a_name_becomes_a_statement() {
    let (_database, pool) = nine().await;
    pool.execute(
        r#"ALTER TABLE accounts ADD COLUMN "x = 1; DROP TABLE accounts --" text, ADD COLUMN owner text"#,
    )
    .await
    .unwrap();
    let mut conn = pool.acquire().await.unwrap();
    let evil = "'; DROP TABLE accounts; -- $1 \" \\";
    let changes = Changes::new().set("x = 1; DROP TABLE accounts --", evil).set("owner", None::<&str>);
    assert_eq!(accounts().update(&mut conn, 1_i64, Version::new(1), changes).await.unwrap(), updated(2));
    let read: (String, Option<String>) =
        sqlx::query_as(r#"SELECT "x = 1; DROP TABLE accounts --", owner FROM accounts WHERE id = 1"#)
            .fetch_one(&pool)
            .await
            .unwrap();
    assert_eq!(read, (evil.to_owned(), None));
}
