//! Row locks: every answer is a value, names are names, many are locked in one order.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use fencepost::row::{Filter, Locked, LockedMany, Order, RowLock, Strength};
use fencepost::testing::TestDatabase;
use fencepost::{Error, Isolation, transaction};
use sqlx::postgres::PgPoolOptions;
use sqlx::{AssertSqlSafe, Executor as _, PgPool, Row as _};

use crate::cancel::after_polls;
use crate::support::{LONG, connect, database, until, until_true, within};

/// Whoever waits that long in a test has waited in vain.
const MOMENT: Duration = Duration::from_millis(50);

const STRENGTHS: [Strength; 4] =
    [Strength::KeyShare, Strength::Share, Strength::NoKeyUpdate, Strength::Update];

const SOMEBODY_WAITS: &str = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')";

#[derive(Debug, PartialEq)]
struct Account {
    id: i64,
    balance: i64,
}

/// What `#[derive(FromRow)]` makes.
impl sqlx::FromRow<'_, sqlx::postgres::PgRow> for Account {
    fn from_row(row: &sqlx::postgres::PgRow) -> sqlx::Result<Self> {
        Ok(Self { id: row.try_get("id")?, balance: row.try_get("balance")? })
    }
}

fn account(id: i64, balance: i64) -> Account {
    Account { id, balance }
}

fn accounts() -> RowLock {
    RowLock::on("accounts").unwrap()
}

/// Accounts 1 to 9, on the disk in no order of their keys.
async fn nine() -> (TestDatabase, PgPool) {
    let (database, pool) = database().await;
    pool.execute(
        "CREATE TABLE accounts (id bigint PRIMARY KEY, balance bigint NOT NULL);
         INSERT INTO accounts SELECT id, 100 FROM unnest('{5,9,2,7,1,8,3,6,4}'::bigint[]) id",
    )
    .await
    .unwrap();
    (database, pool)
}

/// The accounts that somebody has locked.
async fn locked(pool: &PgPool) -> Vec<i64> {
    let free: Vec<i64> =
        sqlx::query_scalar("SELECT id FROM accounts FOR UPDATE SKIP LOCKED").fetch_all(pool).await.unwrap();
    let all: Vec<i64> =
        sqlx::query_scalar("SELECT id FROM accounts ORDER BY id").fetch_all(pool).await.unwrap();
    all.into_iter().filter(|id| !free.contains(id)).collect()
}

/// Not to wait for the row: the answer, whatever the way of asking.
fn impatient() -> [RowLock; 4] {
    [
        accounts().no_wait(),
        accounts().skip_locked(),
        accounts().at_most(MOMENT).unwrap(),
        accounts().at_most(Duration::ZERO).unwrap(),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_answers_found_not_found_or_busy_and_the_transaction_goes_on() {
    let (_database, pool) = nine().await;
    let mut holder = pool.begin().await.unwrap();
    assert_eq!(accounts().lock(&mut holder, 1_i64).await.unwrap(), Locked::Found(account(1, 100)));
    assert_eq!(accounts().lock::<Account, _>(&mut holder, 77_i64).await.unwrap(), Locked::NotFound);
    for lock in impatient() {
        let mut tx = pool.begin().await.unwrap();
        tx.execute("UPDATE accounts SET balance = 101 WHERE id = 2").await.unwrap();
        assert_eq!(lock.lock(&mut tx, 3_i64).await.unwrap(), Locked::Found(account(3, 100)), "{lock:?}");
        assert_eq!(lock.lock::<Account, _>(&mut tx, 1_i64).await.unwrap(), Locked::Busy, "{lock:?}");
        assert_eq!(lock.lock::<Account, _>(&mut tx, 77_i64).await.unwrap(), Locked::NotFound, "{lock:?}");
        // What was done and locked before is still there.
        assert_eq!(lock.lock(&mut tx, 2_i64).await.unwrap(), Locked::Found(account(2, 101)), "{lock:?}");
        assert_eq!(locked(&pool).await, [1, 2, 3], "{lock:?}");
        tx.rollback().await.unwrap();
    }
    holder.commit().await.unwrap();
    assert!(locked(&pool).await.is_empty(), "the locks end with their transactions");
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_reads_the_row_as_it_is_when_it_is_locked() {
    let (_database, pool) = nine().await;
    for lock in [accounts(), accounts().no_wait().block(), accounts().at_most(LONG).unwrap()] {
        pool.execute("UPDATE accounts SET balance = 100").await.unwrap();
        let mut holder = pool.begin().await.unwrap();
        accounts().lock::<Account, _>(&mut holder, 1_i64).await.unwrap().found().unwrap();
        let waiting = tokio::spawn({
            let pool = pool.clone();
            async move {
                let mut tx = pool.begin().await.unwrap();
                lock.lock::<Account, _>(&mut tx, 1_i64).await.unwrap()
            }
        });
        until_true(&pool, "it waits", SOMEBODY_WAITS).await;
        holder.execute("UPDATE accounts SET balance = 7 WHERE id = 1").await.unwrap();
        holder.commit().await.unwrap();
        assert_eq!(within("the lock", waiting).await.unwrap(), Locked::Found(account(1, 7)));
    }
}

// The table in the documentation.
#[tokio::test(flavor = "multi_thread")]
async fn strengths_exclude_each_other_as_the_manual_says() {
    let (_database, pool) = nine().await;
    let waits = [
        [false, false, false, true],
        [false, false, true, true],
        [false, true, true, true],
        [true, true, true, true],
    ];
    for (row, asked) in waits.iter().zip(STRENGTHS) {
        for (busy, held) in row.iter().zip(STRENGTHS) {
            let mut holder = pool.begin().await.unwrap();
            accounts().strength(held).lock::<Account, _>(&mut holder, 1_i64).await.unwrap().found().unwrap();
            for lock in impatient() {
                let mut tx = pool.begin().await.unwrap();
                let got = lock.strength(asked).lock::<Account, _>(&mut tx, 1_i64).await.unwrap();
                assert_eq!(got == Locked::Busy, *busy, "{asked:?} while {held:?} is held");
                tx.rollback().await.unwrap();
            }
            holder.rollback().await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn names_are_names_whatever_they_hold() {
    let (_database, pool) = database().await;
    let names = [
        "plain",
        "Mixed Case",
        "select",
        "t",
        "w",
        "wanted",
        "locked",
        "köln",
        "$1",
        "a'b",
        "a\"b",
        "\"",
        "a\\b",
        "%",
        "--",
        "x\"; DROP TABLE plain; --",
        "x\" AS t; DELETE FROM plain WHERE \"id",
        &"x".repeat(63),
    ];
    pool.execute("CREATE SCHEMA \"my Schema\"").await.unwrap();
    let quoted = |name: &str| format!("\"{}\"", name.replace('"', "\"\""));
    for name in names {
        for schema in ["public", "my Schema"] {
            let (table, column) = (format!("{}.{}", quoted(schema), quoted(name)), quoted(name));
            let create = format!(
                "CREATE TABLE {table} ({column} bigint PRIMARY KEY); INSERT INTO {table} VALUES (1), (2)"
            );
            pool.execute(AssertSqlSafe(create)).await.unwrap();
            let written = if schema == "public" { name.to_owned() } else { format!("{schema}.{name}") };
            let lock = RowLock::on(&written).unwrap().key(name).unwrap();
            let mut tx = pool.begin().await.unwrap();
            assert_eq!(lock.lock(&mut tx, 1_i64).await.unwrap(), Locked::Found((1_i64,)), "{written}");
            for lock in [lock.clone(), lock.clone().no_wait(), lock.clone().at_most(LONG).unwrap()] {
                let many: LockedMany<(i64,), i64> = lock.lock_many(&mut tx, &[2, 1, 3]).await.unwrap();
                assert_eq!((many.rows, many.not_found), (vec![(2,), (1,)], vec![3]), "{written}");
            }
            let order = [Order::descending(name).unwrap()];
            let next: Vec<(i64,)> = lock.claim_next(&mut tx, 1, &order, Filter::all()).await.unwrap();
            assert_eq!(next, [(2,)], "{written}");
        }
    }
}

// Whatever an attacker puts into a name or a value, it is looked for and not carried out.
#[tokio::test(flavor = "multi_thread")]
async fn no_name_and_no_value_becomes_a_part_of_the_statement() {
    let (_database, pool) = nine().await;
    let evil = [
        "accounts; DELETE FROM accounts",
        "accounts\"; DELETE FROM accounts; --",
        "accounts\" AS t WHERE true; DELETE FROM accounts; --",
        "id\" = 1 OR true; --",
        "(SELECT pg_sleep(100))",
        "id DESC; DELETE FROM accounts",
    ];
    for text in evil {
        let missing = |error: Error| {
            let code = error.sqlstate().unwrap().to_owned();
            assert!(["42P01", "42703"].contains(&code.as_str()), "{text}: {error:?}");
        };
        let mut tx = pool.begin().await.unwrap();
        missing(RowLock::on(text).unwrap().lock::<Account, _>(&mut tx, 1_i64).await.unwrap_err());
        let mut tx = pool.begin().await.unwrap();
        missing(accounts().key(text).unwrap().lock::<Account, _>(&mut tx, 1_i64).await.unwrap_err());
        let mut tx = pool.begin().await.unwrap();
        missing(accounts().key(text).unwrap().lock_many::<Account, _>(&mut tx, &[1_i64]).await.unwrap_err());
        let mut tx = pool.begin().await.unwrap();
        let order = [Order::ascending(text).unwrap()];
        missing(accounts().claim_next::<Account>(&mut tx, 1, &order, Filter::all()).await.unwrap_err());
    }
    pool.execute("CREATE TABLE words (id text PRIMARY KEY)").await.unwrap();
    let words = RowLock::on("words").unwrap();
    let mut tx = pool.begin().await.unwrap();
    for text in evil {
        assert_eq!(words.lock::<(String,), _>(&mut tx, text).await.unwrap(), Locked::NotFound);
        let many = words.lock_many::<(String,), _>(&mut tx, &[text]).await.unwrap();
        assert_eq!(many.not_found, [text]);
        let filter = Filter::sql("id = $1").bind(text);
        assert!(words.claim_next::<(String,)>(&mut tx, 1, &[], filter).await.unwrap().is_empty());
    }
    tx.commit().await.unwrap();
    until_true(&pool, "all are there", "SELECT count(*) = 9 FROM accounts").await;
}

type Thing = (sqlx::types::Uuid, String, i16);

// Of the kinds of keys that people have.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_is_of_any_type_that_the_column_compares_with() {
    let (_database, pool) = database().await;
    pool.execute(
        "CREATE TABLE things (id uuid PRIMARY KEY, name text UNIQUE, small smallint UNIQUE);
         INSERT INTO things VALUES ('00000000-0000-0000-0000-000000000001', 'one', 1)",
    )
    .await
    .unwrap();
    let on = |column| RowLock::on("things").unwrap().key(column).unwrap();
    let mut tx = pool.begin().await.unwrap();
    let one = sqlx::types::Uuid::from_u128(1);
    assert!(on("id").lock::<Thing, _>(&mut tx, one).await.unwrap().found().is_some());
    assert!(on("id").lock_many::<Thing, _>(&mut tx, &[one]).await.unwrap().is_complete());
    assert!(on("name").lock::<Thing, _>(&mut tx, "one").await.unwrap().found().is_some());
    assert!(on("name").lock_many::<Thing, _>(&mut tx, &["one".to_owned()]).await.unwrap().is_complete());
    assert!(on("small").lock::<Thing, _>(&mut tx, 1_i64).await.unwrap().found().is_some());
    assert!(on("small").lock_many::<Thing, _>(&mut tx, &[1_i32]).await.unwrap().is_complete());
    assert_eq!(on("small").lock::<Thing, _>(&mut tx, None::<i16>).await.unwrap(), Locked::NotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_several_rows_have_is_a_misuse() {
    let (_database, pool) = nine().await;
    let lock = accounts().key("balance").unwrap();
    let mut tx = pool.begin().await.unwrap();
    let refused = lock.lock::<Account, _>(&mut tx, 100_i64).await.unwrap_err();
    assert!(matches!(refused, Error::Misuse { .. }), "{refused:?}");
    let refused = lock.lock_many::<Account, _>(&mut tx, &[100_i64]).await.unwrap_err();
    assert!(matches!(refused, Error::Misuse { .. }), "{refused:?}");
}

// Whatever plan Postgres makes: who waits for one of the rows has locked those before it and none behind.
#[tokio::test(flavor = "multi_thread")]
async fn many_are_locked_in_the_order_of_their_keys_by_every_plan() {
    let (database, pool) = nine().await;
    pool.execute("ANALYZE accounts").await.unwrap();
    let plans = [
        "",
        "SET enable_seqscan = off",
        "SET enable_nestloop = off; SET enable_mergejoin = off",
        "SET enable_hashjoin = off; SET enable_mergejoin = off; SET enable_indexscan = off; SET enable_bitmapscan = off",
        "SET enable_nestloop = off; SET enable_hashjoin = off",
        "SET enable_sort = off; SET enable_hashagg = off",
    ];
    for plan in plans {
        for (lock, keys) in [
            (accounts(), vec![9, 8, 7, 6, 5, 4, 3, 2, 1]),
            (accounts().at_most(LONG).unwrap(), vec![5, 1, 9, 2, 8, 3, 7, 4, 6, 5, 1]),
        ] {
            let mut holder = pool.begin().await.unwrap();
            accounts().lock::<Account, _>(&mut holder, 5_i64).await.unwrap();
            let mut conn = connect(&database.options()).await;
            conn.execute(plan).await.unwrap();
            let waiting = tokio::spawn(async move {
                let mut tx = sqlx::Connection::begin(&mut conn).await.unwrap();
                let many = lock.lock_many::<Account, i64>(&mut tx, &keys).await.unwrap();
                let order: Vec<i64> = many.rows.iter().map(|account| account.id).collect();
                assert_eq!(order, keys[..9], "in the order given");
                assert!(many.is_complete());
            });
            until_true(&pool, "it waits", SOMEBODY_WAITS).await;
            assert_eq!(locked(&pool).await, [1, 2, 3, 4, 5], "{plan}");
            holder.commit().await.unwrap();
            within("the locks", waiting).await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn many_tasks_that_lock_the_same_rows_in_opposite_orders_never_deadlock() {
    let (database, pool) = nine().await;
    let plans =
        ["SELECT", "SET enable_seqscan = off", "SET enable_nestloop = off; SET enable_mergejoin = off"];
    let tasks: Vec<_> = (0..6)
        .map(|task| {
            let options = database.options();
            tokio::spawn(async move {
                let mut conn = connect(&options).await;
                conn.execute(plans[task % 3]).await.unwrap();
                for round in 0..40 {
                    let mut keys: Vec<i64> = (1..=9).collect();
                    keys.rotate_left(round % 9);
                    if task % 2 == 0 {
                        keys.reverse();
                    }
                    let mut tx = sqlx::Connection::begin(&mut conn).await.unwrap();
                    let many = accounts().lock_many::<Account, _>(&mut tx, &keys).await.unwrap();
                    assert!(many.is_complete());
                    tx.execute("UPDATE accounts SET balance = balance + 1").await.unwrap();
                    tx.commit().await.unwrap();
                }
            })
        })
        .collect();
    for task in tasks {
        within("the tasks", task).await.unwrap();
    }
    until_true(&pool, "all were done", "SELECT bool_and(balance = 100 + 6 * 40) FROM accounts").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_says_which_are_missing_and_which_are_busy() {
    let (_database, pool) = nine().await;
    let mut holder = pool.begin().await.unwrap();
    accounts().lock_many::<Account, i64>(&mut holder, &[4, 6]).await.unwrap();
    let keys = [77_i64, 9, 6, 1, 9, 88, 4, 77];

    let mut tx = pool.begin().await.unwrap();
    let skipped = accounts().skip_locked().lock_many::<Account, _>(&mut tx, &keys).await.unwrap();
    assert_eq!(skipped.rows, [account(9, 100), account(1, 100)]);
    assert_eq!((&*skipped.not_found, &*skipped.busy), (&[77, 88][..], &[6, 4][..]));
    assert!(!skipped.is_complete());
    assert_eq!(locked(&pool).await, [1, 4, 6, 9]);
    tx.rollback().await.unwrap();

    // All or none, and what was locked before stays.
    let mut tx = pool.begin().await.unwrap();
    accounts().lock::<Account, _>(&mut tx, 2_i64).await.unwrap();
    let refused = accounts().no_wait().lock_many::<Account, _>(&mut tx, &keys).await.unwrap();
    assert!(refused.rows.is_empty());
    assert_eq!((&*refused.not_found, &*refused.busy), (&[77, 88][..], &[6, 4][..]));
    assert_eq!(locked(&pool).await, [2, 4, 6]);
    let late = accounts().at_most(MOMENT).unwrap().lock_many::<Account, _>(&mut tx, &keys).await.unwrap();
    assert!(late.rows.is_empty() && late.not_found.is_empty());
    assert_eq!(late.busy, keys);
    assert_eq!(locked(&pool).await, [2, 4, 6]);
    holder.commit().await.unwrap();
    for lock in impatient() {
        let many = lock.lock_many::<Account, _>(&mut tx, &keys).await.unwrap();
        assert_eq!(many.rows.iter().map(|account| account.id).collect::<Vec<_>>(), [9, 6, 1, 4], "{lock:?}");
        assert_eq!((&*many.not_found, many.busy.len()), (&[77, 88][..], 0), "{lock:?}");
    }
    assert_eq!(locked(&pool).await, [1, 2, 4, 6, 9], "kept when their savepoint has ended");
    let none = accounts().no_wait().lock_many::<Account, i64>(&mut tx, &[]).await.unwrap();
    assert!(none.is_complete() && none.rows.is_empty());
    tx.commit().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_are_one_statement() {
    let (_database, pool) = database().await;
    pool.execute("CREATE TABLE accounts (id bigint PRIMARY KEY, balance bigint NOT NULL); INSERT INTO accounts SELECT id, 1 FROM generate_series(1, 10001) id")
        .await
        .unwrap();
    let mut holder = pool.begin().await.unwrap();
    accounts().lock_many::<Account, i64>(&mut holder, &[5_000, 7_000]).await.unwrap();
    // Each twice, the large ones first.
    let keys: Vec<i64> = (2..=10_002).rev().chain(2..=10_002).collect();
    let mut tx = pool.begin().await.unwrap();
    let many = within("ten thousand", accounts().skip_locked().lock_many::<Account, _>(&mut tx, &keys))
        .await
        .unwrap();
    assert_eq!((many.rows.len(), many.not_found, many.busy), (9_998, vec![10_002], vec![7_000, 5_000]));
    let got: BTreeSet<i64> = many.rows.iter().map(|account| account.id).collect();
    assert_eq!((got.len(), got.contains(&7_000), many.rows[0].id), (9_998, false, 10_001));
}

// Postgres's own bound is for each wait: four waits of nearly that long would be nearly four times as long.
#[tokio::test(flavor = "multi_thread")]
async fn the_time_for_many_is_for_all_of_them_together() {
    let (_database, pool) = nine().await;
    let most = Duration::from_millis(1_500);
    let mut holders = Vec::new();
    for id in 1..=4_i64 {
        let mut tx = pool.begin().await.unwrap();
        accounts().lock::<Account, _>(&mut tx, id).await.unwrap();
        holders.push(tx);
    }
    let waiting = tokio::spawn({
        let pool = pool.clone();
        async move {
            let mut tx = pool.begin().await.unwrap();
            let lock = accounts().at_most(most).unwrap();
            lock.lock_many::<Account, i64>(&mut tx, &[1, 2, 3, 4]).await.unwrap()
        }
    });
    // Each holder ends when it has been waited for, for nearly a half of the time; the third is too late already.
    for holder in holders {
        until("waited for, or given up", async || {
            let waited: bool = sqlx::query_scalar(
                "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND clock_timestamp() - waitstart > interval '700 ms')",
            )
            .fetch_one(&pool)
            .await
            .unwrap();
            (waited || waiting.is_finished()).then_some(())
        })
        .await;
        holder.commit().await.unwrap();
    }
    let late = within("the end of the time", waiting).await.unwrap();
    assert_eq!((late.rows.len(), late.busy.len()), (0, 4), "2.8 s were waited in 1.5 s");
}

#[tokio::test(flavor = "multi_thread")]
async fn at_most_leaves_the_callers_settings_as_they_were() {
    let (database, pool) = nine().await;
    let mut holder = pool.begin().await.unwrap();
    accounts().lock::<Account, _>(&mut holder, 1_i64).await.unwrap();
    let mut conn = connect(&database.options()).await;
    conn.execute("SET lock_timeout = '61234 ms'").await.unwrap();
    for begin in ["BEGIN", "BEGIN ISOLATION LEVEL REPEATABLE READ", "BEGIN ISOLATION LEVEL SERIALIZABLE"] {
        // Half a microsecond: Postgres takes zero for "no bound".
        for most in [Duration::from_nanos(500), Duration::from_micros(999), MOMENT] {
            let lock = accounts().at_most(most).unwrap();
            let mut tx = sqlx::Connection::begin_with(&mut conn, begin).await.unwrap();
            let setting = async |tx: &mut sqlx::PgConnection| -> String {
                tx.fetch_one("SHOW lock_timeout").await.unwrap().get(0)
            };
            let busy = within("the bound", lock.lock::<Account, _>(&mut tx, 1_i64)).await.unwrap();
            assert_eq!(busy, Locked::Busy, "{begin}, {most:?}");
            assert_eq!(setting(&mut tx).await, "61234ms", "after busy");
            assert!(lock.lock::<Account, _>(&mut tx, 2_i64).await.unwrap().found().is_some());
            assert!(lock.lock_many::<Account, i64>(&mut tx, &[2, 3]).await.unwrap().is_complete());
            assert_eq!(setting(&mut tx).await, "61234ms", "after found");
            // In a savepoint of the caller's, with a setting of its own.
            let mut inner = sqlx::Connection::begin(&mut *tx).await.unwrap();
            inner.execute("SET LOCAL lock_timeout = '7s'").await.unwrap();
            assert_eq!(lock.lock::<Account, _>(&mut inner, 1_i64).await.unwrap(), Locked::Busy);
            assert!(lock.lock::<Account, _>(&mut inner, 4_i64).await.unwrap().found().is_some());
            assert_eq!(setting(&mut inner).await, "7s");
            assert_eq!(locked(&pool).await, [1, 2, 3, 4]);
            inner.rollback().await.unwrap();
            assert_eq!(setting(&mut tx).await, "61234ms");
            assert_eq!(locked(&pool).await, [1, 2, 3], "a lock ends with the savepoint it was taken in");
            tx.commit().await.unwrap();
            assert_eq!(setting(&mut conn).await, "61234ms", "after the transaction");
        }
    }
}

// NOWAIT and SKIP LOCKED are about rows; the bound is about the table, too.
#[tokio::test(flavor = "multi_thread")]
async fn at_most_bounds_the_wait_for_a_locked_table() {
    let (_database, pool) = nine().await;
    let mut ddl = pool.begin().await.unwrap();
    ddl.execute("ALTER TABLE accounts ADD note text").await.unwrap();
    let mut tx = pool.begin().await.unwrap();
    let lock = accounts().at_most(MOMENT).unwrap();
    assert_eq!(within("the bound", lock.lock::<Account, _>(&mut tx, 1_i64)).await.unwrap(), Locked::Busy);
    let many = within("the bound", lock.lock_many::<Account, i64>(&mut tx, &[1, 2])).await.unwrap();
    assert_eq!(many.busy, [1, 2]);
    ddl.rollback().await.unwrap();
    assert!(lock.lock::<Account, _>(&mut tx, 1_i64).await.unwrap().found().is_some());
}

// C42
#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_moved_on_since_the_snapshot_is_a_serialization_failure() {
    let (_database, pool) = nine().await;
    for begin in ["BEGIN ISOLATION LEVEL REPEATABLE READ", "BEGIN ISOLATION LEVEL SERIALIZABLE"] {
        for lock in impatient().into_iter().chain([accounts()]) {
            for many in [false, true] {
                let mut tx = pool.begin_with(begin).await.unwrap();
                tx.execute("SELECT FROM accounts").await.unwrap();
                pool.execute("UPDATE accounts SET balance = balance + 1 WHERE id = 1").await.unwrap();
                let failed = if many {
                    lock.lock_many::<Account, i64>(&mut tx, &[1, 2]).await.unwrap_err()
                } else {
                    lock.lock::<Account, _>(&mut tx, 1_i64).await.unwrap_err()
                };
                assert!(matches!(failed, Error::SerializationFailure { .. }), "{failed:?}");
                assert!(failed.is_retryable() && failed.sqlstate() == Some("40001"));
            }
        }
        let mut tx = pool.begin_with(begin).await.unwrap();
        tx.execute("SELECT FROM accounts").await.unwrap();
        pool.execute("UPDATE accounts SET balance = balance + 1 WHERE id = 1").await.unwrap();
        let order = [Order::ascending("id").unwrap()];
        let failed = accounts().claim_next::<Account>(&mut tx, 1, &order, Filter::all()).await.unwrap_err();
        assert!(matches!(failed, Error::SerializationFailure { .. }), "{failed:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadlock_is_typed_and_retryable() {
    let (_database, pool) = nine().await;
    let mut a = pool.begin().await.unwrap();
    let mut b = pool.begin().await.unwrap();
    accounts().lock::<Account, _>(&mut a, 1_i64).await.unwrap();
    accounts().lock::<Account, _>(&mut b, 2_i64).await.unwrap();
    let crossed = async |mut tx, id: i64| {
        let locked = accounts().lock::<Account, _>(&mut tx, id).await;
        // The victim makes way for the other one.
        drop::<sqlx::postgres::PgTransaction<'_>>(tx);
        locked
    };
    let (a, b) = within("the deadlock is found", async { tokio::join!(crossed(a, 2), crossed(b, 1)) }).await;
    let (won, lost) = if a.is_ok() { (a, b) } else { (b, a) };
    assert!(won.unwrap().found().is_some());
    let lost = lost.unwrap_err();
    assert!(matches!(lost, Error::Deadlock { .. }), "{lost:?}");
    assert!(lost.is_retryable() && lost.sqlstate() == Some("40P01"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_dropped_after_any_poll_leaves_a_clean_connection() {
    let (database, pool) = nine().await;
    let mut holder = pool.begin().await.unwrap();
    accounts().lock::<Account, _>(&mut holder, 1_i64).await.unwrap();
    let single = PgPoolOptions::new()
        .max_connections(1)
        .test_before_acquire(false)
        .connect_lazy_with(database.options());
    for lock in impatient() {
        for polls in 0..12 {
            let mut tx = single.begin().await.unwrap();
            let done =
                after_polls(polls, lock.lock::<Account, _>(&mut tx, 1_i64 + i64::from(polls % 2))).await;
            drop((done, tx));
            let clean = "SELECT now() = statement_timestamp() AND current_setting('lock_timeout') = '0'";
            let clean = within("a connection", single.fetch_one(sqlx::raw_sql(clean))).await.unwrap();
            assert!(clean.get::<bool, _>(0), "{lock:?}, {polls} polls");
        }
    }
    assert_eq!(locked(&pool).await, [1]);
}

async fn jobs() -> (TestDatabase, PgPool, RowLock) {
    let (database, pool) = database().await;
    pool.execute(
        "CREATE TABLE jobs (id bigint PRIMARY KEY, priority int, queue text NOT NULL);
         INSERT INTO jobs SELECT id, id % 3, CASE WHEN id % 2 = 0 THEN 'even' ELSE 'odd' END FROM generate_series(1, 200) id",
    )
    .await
    .unwrap();
    (database, pool, RowLock::on("jobs").unwrap())
}

type Job = (i64, Option<i32>, String);

#[tokio::test(flavor = "multi_thread")]
async fn the_next_rows_come_in_order_through_the_filter_and_past_the_locked() {
    let (_database, pool, jobs) = jobs().await;
    pool.execute("INSERT INTO jobs VALUES (1000, NULL, 'odd')").await.unwrap();
    let ids = |rows: Vec<Job>| rows.into_iter().map(|(id, ..)| id).collect::<Vec<_>>();
    let order = [Order::descending("priority").unwrap(), Order::ascending("id").unwrap()];
    let odd = || Filter::sql("queue = $1 AND t.id <> $2 -- not this one").bind("odd").bind(11_i64);
    let (mut a, mut b) = (pool.begin().await.unwrap(), pool.begin().await.unwrap());
    assert_eq!(ids(jobs.claim_next(&mut a, 3, &order, odd()).await.unwrap()), [1000, 5, 17]);
    let second = within("the next ones", jobs.claim_next(&mut b, 2, &order, odd())).await.unwrap();
    assert_eq!(ids(second), [23, 29], "past the locked ones, without waiting for them");
    // A second batch of the same transaction meets its own locks, which do not stop it: hence the delete.
    a.execute("DELETE FROM jobs WHERE id IN (1000, 5, 17)").await.unwrap();
    assert_eq!(ids(jobs.claim_next(&mut a, 1, &order, odd()).await.unwrap()), [35]);
    b.rollback().await.unwrap();
    a.commit().await.unwrap();
    let mut c = pool.begin().await.unwrap();
    assert_eq!(ids(jobs.claim_next(&mut c, 2, &order, odd()).await.unwrap()), [23, 29], "there again");
    let refused = jobs.claim_next::<Job>(&mut c, 0, &order, odd()).await.unwrap_err();
    assert!(matches!(refused, Error::Misuse { .. }), "{refused:?}");
    assert_eq!(ids(jobs.claim_next(&mut c, u32::MAX, &[], Filter::all()).await.unwrap()).len(), 198);
    // A value that was forgotten is an error, not another value in its place.
    let refused = jobs.claim_next::<Job>(&mut c, 1, &[], Filter::sql("queue = $1")).await.unwrap_err();
    assert!(matches!(refused, Error::Database { .. }), "{refused:?}");
}

// C13: locked are those that are returned, not those that were looked at.
#[tokio::test(flavor = "multi_thread")]
async fn no_more_rows_are_locked_than_are_returned() {
    let (_database, pool, jobs) = jobs().await;
    for order in [vec![], vec![Order::ascending("id").unwrap()], vec![Order::descending("priority").unwrap()]]
    {
        for strength in [Strength::Update, Strength::NoKeyUpdate] {
            let mut tx = pool.begin().await.unwrap();
            let lock = jobs.clone().strength(strength);
            let filter = Filter::sql("queue = $1").bind("even");
            assert_eq!(lock.claim_next::<Job>(&mut tx, 5, &order, filter).await.unwrap().len(), 5);
            let free = pool.fetch_all("SELECT FROM jobs FOR SHARE SKIP LOCKED").await.unwrap().len();
            assert_eq!(free, 195);
            tx.rollback().await.unwrap();
        }
    }
}

// C37: each job exactly once, though all workers want the first one.
#[tokio::test(flavor = "multi_thread")]
async fn many_workers_do_each_job_once() {
    let (database, pool, jobs) = jobs().await;
    pool.execute("CREATE TABLE done (id bigint)").await.unwrap();
    let order = [Order::ascending("priority").unwrap(), Order::ascending("id").unwrap()];
    let workers: Vec<_> = (0..6)
        .map(|worker| {
            let (jobs, order) = (jobs.clone(), order.clone());
            let pool = PgPoolOptions::new().max_connections(1).connect_lazy_with(database.options());
            tokio::spawn(async move {
                loop {
                    let (jobs, order, limit) = (&jobs, &order, 1 + worker % 3);
                    let batch = transaction(&pool, Isolation::ReadCommitted, |tx| {
                        Box::pin(async move {
                            let batch = jobs.claim_next::<Job>(tx, limit, order, Filter::all()).await?;
                            for (id, ..) in &batch {
                                let text = "WITH gone AS (DELETE FROM jobs WHERE id = $1) INSERT INTO done VALUES ($1)";
                                sqlx::query(text).bind(id).execute(&mut **tx).await?;
                            }
                            Ok::<_, Error>(batch.len())
                        })
                    });
                    if batch.await.unwrap() == 0 {
                        return;
                    }
                }
            })
        })
        .collect();
    for worker in workers {
        within("the workers", worker).await.unwrap();
    }
    // A worker that found nothing may have looked while the others' were still open.
    until_true(&pool, "each once", "SELECT count(*) = 200 AND count(DISTINCT id) = 200 FROM done").await;
}

// A statement that was prepared before a migration: Postgres refuses to return other columns, on and on.
#[tokio::test(flavor = "multi_thread")]
async fn a_column_that_is_added_costs_each_connection_one_run_at_the_most() {
    let (database, pool) = nine().await;
    let single = PgPoolOptions::new().max_connections(1).connect_lazy_with(database.options());
    let mut columns = 0;
    for lock in &[accounts(), accounts().skip_locked(), accounts().at_most(LONG).unwrap()] {
        for way in 0..3 {
            let runs = &AtomicU32::new(0);
            for first in [true, false] {
                let done = transaction(&single, Isolation::SessionDefault, |tx| {
                    Box::pin(async move {
                        runs.fetch_add(1, Ordering::SeqCst);
                        match way {
                            0 => lock.lock::<Account, _>(tx, 1_i64).await.map(drop),
                            1 => lock.lock_many::<Account, _>(tx, &[1_i64]).await.map(drop),
                            _ => lock.claim_next::<Account>(tx, 1, &[], Filter::all()).await.map(drop),
                        }
                    })
                });
                within("the lock", done).await.unwrap();
                if first {
                    columns += 1;
                    let add = format!("ALTER TABLE accounts ADD column_{columns} int");
                    pool.execute(AssertSqlSafe(add)).await.unwrap();
                }
            }
            assert!(runs.load(Ordering::SeqCst) <= 4, "{lock:?}");
            // In a transaction of the caller's own: one error, and that is all.
            columns += 1;
            let add = format!("ALTER TABLE accounts ADD column_{columns} int");
            pool.execute(AssertSqlSafe(add)).await.unwrap();
            let mut tx = single.begin().await.unwrap();
            if let Err(stale) = lock.lock::<Account, _>(&mut tx, 1_i64).await {
                assert!(stale.is_retryable() && stale.sqlstate() == Some("0A000"), "{stale:?}");
                tx.rollback().await.unwrap();
                tx = single.begin().await.unwrap();
                assert!(lock.lock::<Account, _>(&mut tx, 1_i64).await.unwrap().found().is_some());
            }
            tx.rollback().await.unwrap();
        }
    }
}

// A prepared statement is found by the driver by its text: it has to know the types, too.
#[tokio::test(flavor = "multi_thread")]
async fn keys_of_several_types_are_used_on_one_connection() {
    let (_database, pool) = nine().await;
    let mut tx = pool.begin().await.unwrap();
    for lock in [accounts(), accounts().no_wait()] {
        assert_eq!(lock.lock(&mut tx, 1_i64).await.unwrap(), Locked::Found(account(1, 100)));
        assert_eq!(lock.lock(&mut tx, 2_i32).await.unwrap(), Locked::Found(account(2, 100)));
        assert_eq!(lock.lock::<Account, _>(&mut tx, 77_i16).await.unwrap(), Locked::NotFound);
        assert!(lock.lock_many::<Account, _>(&mut tx, &[1_i64, 2]).await.unwrap().is_complete());
        assert!(lock.lock_many::<Account, _>(&mut tx, &[1_i32, 2]).await.unwrap().is_complete());
    }
}
