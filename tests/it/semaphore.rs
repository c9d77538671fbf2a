//! Semaphores: the limit, permits that die with their owner, the order of those who wait, and the fence.

use std::time::Duration;

use fencepost::{Error, LossReason, Owner, Permit, Result, Semaphore, Wait};
use sqlx::{AssertSqlSafe, Executor as _, PgPool, Row as _};
use tokio::task::JoinHandle;

use crate::proxy::Proxy;
use crate::support::{LONG, TOUGH, connect, database, hold, owner, owner_id, until, until_true, within};

fn exports(permits: u32) -> Semaphore {
    Semaphore::named("exports", permits).unwrap()
}

async fn take(semaphore: &Semaphore, owner: &Owner) -> Permit {
    semaphore.try_acquire(owner).await.unwrap().expect("a permit is free")
}

async fn is_full(semaphore: &Semaphore, owner: &Owner) -> bool {
    semaphore.try_acquire(owner).await.unwrap().is_none()
}

/// Begins to wait, and returns when it is in line.
async fn queue(pool: &PgPool, owner: &Owner, semaphore: Semaphore) -> JoinHandle<Result<Permit>> {
    let tickets = async || -> i64 {
        sqlx::query_scalar("SELECT count(*) FROM fencepost.waiters").fetch_one(pool).await.unwrap()
    };
    let (before, owner) = (tickets().await, owner.clone());
    let waiting = tokio::spawn(async move { semaphore.acquire(&owner, Wait::forever()).await });
    until("it is in line", async || (tickets().await > before).then_some(())).await;
    waiting
}

async fn served(waiting: JoinHandle<Result<Permit>>) -> Permit {
    within("being served", waiting).await.unwrap().unwrap()
}

/// Without a word: as the next one finds it.
async fn kill(pool: &PgPool, label: &str) {
    let id = owner_id(pool, label).await;
    let expire = "UPDATE fencepost.owners SET expires_at = 'epoch' WHERE id = $1";
    sqlx::query(expire).bind(id).execute(pool).await.unwrap();
}

async fn slots(pool: &PgPool) -> i64 {
    sqlx::query_scalar("SELECT count(*) FROM fencepost.permits").fetch_one(pool).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn at_most_so_many_at_once_and_each_with_a_larger_token() {
    let (_database, pool) = database().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let three = exports(3);
    let mut held = vec![take(&three, &a).await, take(&three, &b).await, take(&three, &a).await];
    for _ in 0..10 {
        assert!(is_full(&three, &a).await && is_full(&three, &b).await);
        assert!(held.iter().all(|permit| permit.is_held()));
        let (last, first) = (held.last().unwrap().token(), held.remove(0));
        assert!(first.release().await.unwrap());
        held.push(take(&three, &b).await);
        assert!(held.last().unwrap().token() > last);
    }
    assert_eq!(slots(&pool).await, 3, "slots are granted again");
    // Another kind of thing than a lease of that name.
    assert!(hold(&a, "exports").await.is_held());
}

// By token, or all; those who hold are told, an open fenced write ends before its slots are granted, and who waits is served.
#[tokio::test(flavor = "multi_thread")]
async fn an_operator_may_take_permits_away() {
    let (_database, pool) = database().await;
    let (a, b) = (owner(&pool, "a", TOUGH).await, owner(&pool, "b", LONG).await);
    let three = exports(3);
    let (one, other) = (take(&three, &a).await, take(&three.clone().taking(2).unwrap(), &a).await);
    let revoke = "SELECT revoked FROM fencepost.revoke('fencepost:semaphore:exports', $1)";
    let revoke = async |token: Option<i64>| -> bool {
        sqlx::query_scalar(revoke).bind(token).fetch_optional(&pool).await.unwrap().unwrap()
    };
    assert!(!revoke(Some(other.token().as_i64() + 1)).await, "nobody has that token");
    let write = other.begin(&pool).await.unwrap();
    assert!(revoke(Some(other.token().as_i64())).await);
    assert_eq!(within("being told", other.lost()).await, LossReason::Released);
    assert!(one.is_held());
    assert!(is_full(&three, &b).await, "a fenced write is open under both");
    let waiting = queue(&pool, &b, three.clone()).await;
    write.commit().await.unwrap();
    let served = served(waiting).await;
    assert!(served.token() > other.token());
    let refused = other.begin(&pool).await.unwrap_err();
    assert!(refused.is_lost(), "{refused:?}");
    assert!(!other.release().await.unwrap(), "it had been lost");
    assert!(revoke(None).await);
    assert_eq!(within("being told", one.lost()).await, LossReason::Released);
    assert!(!served.release().await.unwrap(), "nobody has told it yet, and it is lost");
    assert!(!revoke(None).await);
    let all = take(&exports(3).taking(3).unwrap(), &b).await;
    assert!(all.is_held());
}

#[tokio::test(flavor = "multi_thread")]
async fn many_at_once_never_get_more_than_there_are() {
    let (_database, pool) = database().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let tasks: Vec<_> = (0..40)
        .map(|n| {
            let (owner, pool) = (if n % 2 == 0 { a.clone() } else { b.clone() }, pool.clone());
            let some = exports(4).taking(1 + n % 3).unwrap();
            tokio::spawn(async move {
                for _ in 0..5 {
                    let permit = some.acquire(&owner, Wait::forever()).await.unwrap();
                    let held = "SELECT count(*) FROM fencepost.permits WHERE released_at IS NULL";
                    let held: i64 = sqlx::query_scalar(held).fetch_one(&pool).await.unwrap();
                    assert!(held <= 4, "{held} of 4");
                    assert!(permit.release().await.unwrap());
                }
            })
        })
        .collect();
    for task in tasks {
        within("all are served", task).await.unwrap();
    }
    assert!(slots(&pool).await <= 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn permits_are_free_as_soon_as_their_owner_is_dead() {
    let (_database, pool) = database().await;
    let (a, b, c) =
        (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await, owner(&pool, "c", LONG).await);
    let three = exports(3);
    let (of_a, of_b) = (take(&three.clone().taking(2).unwrap(), &a).await, take(&three, &b).await);
    let waiting = queue(&pool, &c, three.clone().taking(2).unwrap()).await;
    kill(&pool, "a").await;
    let next = served(waiting).await;
    assert!(next.count() == 2 && next.is_held() && of_b.is_held() && next.token() > of_b.token());
    assert!(is_full(&three, &b).await);
    let late = fencepost::fence::check(&mut pool.begin().await.unwrap(), of_a.name(), of_a.grant()).await;
    assert!(matches!(late, Err(Error::StaleFence { .. })), "{late:?}");
    within("the loss", of_a.lost()).await;
    assert!(!of_a.release().await.unwrap() && next.is_held());
}

// A big request is waited for, or small ones would keep it waiting for ever.
#[tokio::test(flavor = "multi_thread")]
async fn several_are_acquired_all_or_none_and_nobody_passes_by() {
    let (_database, pool) = database().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let four = exports(4);
    let (first, second) = (take(&four, &a).await, take(&four.clone().taking(2).unwrap(), &a).await);
    assert!(is_full(&four.clone().taking(2).unwrap(), &b).await, "one is free, two are not");
    let all = queue(&pool, &b, four.clone().taking(4).unwrap()).await;
    let small = queue(&pool, &b, four.clone()).await;
    assert!(is_full(&four, &a).await, "the free one is for those who wait");
    assert!(first.release().await.unwrap());
    assert!(!small.is_finished() && !all.is_finished());
    assert!(second.release().await.unwrap());
    let all = served(all).await;
    assert!(!small.is_finished());
    assert!(all.release().await.unwrap());
    served(small).await.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn one_release_serves_as_many_as_there_is_room_for() {
    let (_database, pool) = database().await;
    let (a, b, c) =
        (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await, owner(&pool, "c", LONG).await);
    let three = exports(3);
    let all = take(&three.clone().taking(3).unwrap(), &a).await;
    let mut line = Vec::new();
    for owner in [&b, &c, &a, &b] {
        line.push(queue(&pool, owner, three.clone()).await);
    }
    assert!(all.release().await.unwrap());
    let last = line.pop().unwrap();
    let mut held = Vec::new();
    for next in line {
        held.push(served(next).await);
    }
    assert!(held.windows(2).all(|pair| pair[0].token() < pair[1].token()), "in the order of arrival");
    assert!(!last.is_finished());
    // One who gives up was all that the next one waited for.
    drop(held);
    served(last).await.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_gives_up_lets_those_behind_it_pass() {
    let (_database, pool) = database().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let held = take(&exports(3), &a).await;
    let big = queue(&pool, &b, exports(3).taking(3).unwrap()).await;
    let small = queue(&pool, &a, exports(3).taking(2).unwrap()).await;
    assert!(!small.is_finished());
    big.abort();
    served(small).await.release().await.unwrap();
    assert!(held.is_held());
}

#[tokio::test(flavor = "multi_thread")]
async fn another_limit_is_a_typed_error_and_grants_nothing() {
    let (_database, pool) = database().await;
    let a = owner(&pool, "a", LONG).await;
    let held = take(&exports(2), &a).await;
    for other in [exports(1), exports(3), exports(3).taking(3).unwrap()] {
        let tried = other.try_acquire(&a).await.unwrap_err();
        let waited = within("an answer", other.acquire(&a, Wait::forever())).await.unwrap_err();
        for refused in [tried, waited] {
            assert!(
                matches!(&refused, Error::OtherLimit { name, permits: 2, asked, .. }
                    if name == "exports" && *asked == other.permits()),
                "{refused:?}"
            );
            assert!(refused.sqlstate() == Some("LK007") && !refused.is_retryable() && !refused.is_lost());
        }
    }
    assert_eq!(slots(&pool).await, 1);
    until_true(&pool, "nobody waits", "SELECT NOT EXISTS (SELECT FROM fencepost.waiters)").await;
    assert!(held.is_held());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_smaller_limit_evicts_nobody_and_a_larger_one_serves_at_once() {
    let (_database, pool) = database().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let mut held = Vec::new();
    for _ in 0..4 {
        held.push(take(&exports(4), &a).await);
    }
    exports(2).resize(&a).await.unwrap();
    assert!(matches!(exports(4).try_acquire(&a).await, Err(Error::OtherLimit { permits: 2, .. })));
    for _ in 0..2 {
        assert!(held.iter().all(|permit| permit.is_held()));
        held.first().unwrap().begin(&pool).await.unwrap().commit().await.unwrap();
        assert!(is_full(&exports(2), &b).await);
        assert!(held.remove(0).release().await.unwrap());
    }
    assert!(is_full(&exports(2), &b).await, "two are still held, and two are the limit");
    assert!(held.remove(0).release().await.unwrap());
    held.push(take(&exports(2), &b).await);
    assert!(is_full(&exports(2), &b).await && slots(&pool).await == 2);
    // Whoever waits goes on waiting, whatever limit it came with.
    let waiting = [queue(&pool, &b, exports(2)).await, queue(&pool, &a, exports(2)).await];
    exports(4).resize(&b).await.unwrap();
    for one in waiting {
        held.push(served(one).await);
    }
    assert!(held.len() == 4 && is_full(&exports(4), &a).await);
}

// A stale holder's fenced write holds its own slot only, and that one is not granted before it has ended.
#[tokio::test(flavor = "multi_thread")]
async fn an_open_fenced_write_keeps_its_slot_and_no_other() {
    let (_database, pool) = database().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let two = exports(2);
    let (of_a, of_b) = (take(&two, &a).await, take(&two, &b).await);
    let write = of_a.begin(&pool).await.unwrap();
    kill(&pool, "a").await;
    assert!(is_full(&two, &b).await, "it may still write");
    assert!(of_b.release().await.unwrap());
    let again = take(&two, &b).await;
    let waiting = queue(&pool, &b, two.clone()).await;
    assert!(is_full(&two, &b).await && !waiting.is_finished());
    write.commit().await.unwrap();
    let next = served(waiting).await;
    assert!(next.is_held() && again.is_held());
    // Released under an open write of its own: that is not waited for, and the next one is served after it.
    let write = next.begin(&pool).await.unwrap();
    let waiting = queue(&pool, &b, two.clone()).await;
    assert!(within("the release", next.release()).await.unwrap());
    assert!(!waiting.is_finished());
    write.rollback().await.unwrap();
    served(waiting).await.release().await.unwrap();
}

// A limit that shrinks below what an open write holds does not forget that it may still write.
#[tokio::test(flavor = "multi_thread")]
async fn a_slot_under_an_open_write_counts_after_the_limit_has_shrunk() {
    let (_database, pool) = database().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let permit = take(&exports(3), &a).await;
    let others = take(&exports(3).taking(2).unwrap(), &b).await;
    let write = permit.begin(&pool).await.unwrap();
    assert!(permit.release().await.unwrap() && others.release().await.unwrap());
    exports(1).resize(&b).await.unwrap();
    assert!(is_full(&exports(1), &b).await);
    write.commit().await.unwrap();
    assert!(take(&exports(1), &b).await.is_held());
    assert_eq!(slots(&pool).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fence_tells_released_and_expired_apart_at_every_isolation_level() {
    let (_database, pool) = database().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    for level in ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"] {
        let check = async |name, grant| {
            let mut tx = pool.begin().await.unwrap();
            tx.execute(AssertSqlSafe(format!("SET TRANSACTION ISOLATION LEVEL {level}"))).await.unwrap();
            let checked = fencepost::fence::check(&mut tx, name, grant).await;
            // Its lock would keep the slot from being granted again.
            tx.rollback().await.unwrap();
            checked
        };
        let permit = take(&exports(2), &a).await;
        let (name, grant) = (permit.name().clone(), permit.grant());
        check(&name, grant).await.unwrap();
        assert!(permit.release().await.unwrap());
        let refused = check(&name, grant).await.unwrap_err();
        assert!(matches!(refused, Error::Lost { reason: LossReason::Released, .. }), "{level} {refused:?}");
        let next = take(&exports(2), &b).await;
        let refused = check(&name, grant).await.unwrap_err();
        let right = match level {
            "READ COMMITTED" => refused.is_lost(),
            _ => matches!(refused, Error::SerializationFailure { .. }),
        };
        assert!(right, "{level} {refused:?}");
        assert!(next.release().await.unwrap());
    }
    let permit = take(&exports(2), &a).await;
    kill(&pool, "a").await;
    let refused =
        fencepost::fence::check(&mut pool.begin().await.unwrap(), permit.name(), permit.grant()).await;
    assert!(matches!(refused, Err(Error::Lost { reason: LossReason::Expired, .. })), "{refused:?}");
}

// An expired owner whose heartbeat is in flight is not decided: neither waited for nor taken from.
#[tokio::test(flavor = "multi_thread")]
async fn a_heartbeat_in_flight_keeps_its_permits() {
    let (database, pool) = database().await;
    let b = owner(&pool, "b", LONG).await;
    let a: sqlx::types::Uuid =
        sqlx::query_scalar("SELECT fencepost.owner_start('a', '1 minute')").fetch_one(&pool).await.unwrap();
    let take_one = "SELECT granted FROM fencepost.permit_acquire('exports', 1, 1, $1)";
    assert!(sqlx::query_scalar::<_, bool>(take_one).bind(a).fetch_one(&pool).await.unwrap());
    let expire = "UPDATE fencepost.owners SET expires_at = clock_timestamp() WHERE id = $1";
    sqlx::query(expire).bind(a).execute(&pool).await.unwrap();
    let mut beating = connect(&database.options()).await;
    beating.execute("BEGIN").await.unwrap();
    let lock = "SELECT 1 FROM fencepost.owners WHERE id = $1 FOR NO KEY UPDATE";
    sqlx::query(lock).bind(a).execute(&mut beating).await.unwrap();
    assert!(within("an answer", is_full(&exports(1), &b)).await);
    let beat = "UPDATE fencepost.owners SET expires_at = clock_timestamp() + ttl WHERE id = $1";
    sqlx::query(beat).bind(a).execute(&mut beating).await.unwrap();
    beating.execute("COMMIT").await.unwrap();
    assert!(is_full(&exports(1), &b).await, "it was in time");
    sqlx::query(expire).bind(a).execute(&pool).await.unwrap();
    let permit = take(&exports(1), &b).await;
    let marked = "SELECT expires_at = 'epoch' FROM fencepost.owners WHERE id = $1";
    assert!(sqlx::query_scalar::<_, bool>(marked).bind(a).fetch_one(&pool).await.unwrap(), "dead is final");
    drop(permit);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_is_asked_for_again_and_grants_once() {
    let (database, observer) = database().await;
    let proxy = Proxy::before(database.options()).await;
    let pool = PgPool::connect_lazy_with(proxy.options());
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&observer, "b", LONG).await);
    let two = exports(2);
    take(&two, &a).await.release().await.unwrap();
    for (statement, cuts) in [("fencepost.permit_acquire", 1), ("fencepost.release", 2)] {
        proxy.cut_answer_to_statement(statement);
        let permit = within("a permit", two.acquire(&a, Wait::forever())).await.unwrap();
        let held = "SELECT count(*) FROM fencepost.permits WHERE released_at IS NULL";
        assert_eq!(sqlx::query_scalar::<_, i64>(held).fetch_one(&observer).await.unwrap(), 1);
        assert!(within("the release", permit.release()).await.unwrap(), "the same answer");
        assert_eq!(proxy.cuts(), cuts, "{statement}");
    }
    let both = take(&exports(2).taking(2).unwrap(), &b).await;
    assert!(both.is_held());
}

// What nobody here knows is given back (B1, C24): the database had it, the process did not.
#[tokio::test(flavor = "multi_thread")]
async fn a_permit_that_nobody_knows_is_given_back() {
    let (_database, pool) = database().await;
    let a = owner(&pool, "a", LONG).await;
    let id = owner_id(&pool, "a").await;
    let unknown = "SELECT granted FROM fencepost.permit_acquire('exports', 1, 1, $1)";
    assert!(sqlx::query_scalar::<_, bool>(unknown).bind(id).fetch_one(&pool).await.unwrap());
    // Whatever makes it look what it holds.
    crate::support::terminate(&pool, "").await;
    let one = exports(1);
    assert!(within("giving it back", one.acquire(&a, Wait::forever())).await.unwrap().is_held());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_try_writes_nothing() {
    let (_database, pool) = database().await;
    let a = owner(&pool, "a", LONG).await;
    let held = take(&exports(1), &a).await;
    let id = owner_id(&pool, "a").await;
    let mut tx = pool.begin().await.unwrap();
    let refused = "SELECT granted, label, token FROM fencepost.permit_acquire('exports', 1, 1, $1)";
    let row = sqlx::query(refused).bind(id).fetch_one(&mut *tx).await.unwrap();
    assert!(!row.get::<bool, _>("granted") && row.get::<String, _>("label") == "a");
    assert_eq!(row.get::<i64, _>("token"), held.token().as_i64());
    let wrote = "SELECT pg_current_xact_id_if_assigned() IS NOT NULL";
    assert!(!sqlx::query_scalar::<_, bool>(wrote).fetch_one(&mut *tx).await.unwrap());
}

#[test]
fn bad_input_is_refused_before_a_statement_is_sent() {
    for permits in [0, Semaphore::MAX_PERMITS + 1, u32::MAX] {
        assert!(matches!(Semaphore::named("exports", permits), Err(Error::Misuse { .. })), "{permits}");
    }
    for name in ["", "a\nb", "nul\0", &"x".repeat(236)] {
        assert!(matches!(Semaphore::named(name, 1), Err(Error::Misuse { .. })), "{name:?}");
    }
    for count in [0, 6, u32::MAX] {
        assert!(matches!(exports(5).taking(count), Err(Error::Misuse { .. })), "{count}");
    }
    let longest = "x".repeat(235);
    let semaphore = Semaphore::named(&longest, Semaphore::MAX_PERMITS).unwrap();
    assert_eq!((semaphore.name(), semaphore.lock_name().as_str().len()), (longest.as_str(), 255));
}

#[tokio::test(flavor = "multi_thread")]
async fn pruning_takes_free_slots_and_leaves_those_in_use() {
    let (_database, pool) = database().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let four = exports(4);
    let held = take(&four, &a).await;
    let written = take(&four, &a).await;
    let dead = take(&four, &b).await;
    take(&four, &a).await.release().await.unwrap();
    let write = written.begin(&pool).await.unwrap();
    assert!(written.release().await.unwrap());
    kill(&pool, "b").await;
    let mut conn = pool.acquire().await.unwrap();
    assert_eq!(fencepost::prune(&mut conn, Duration::ZERO).await.unwrap().permits, 2);
    assert_eq!(slots(&pool).await, 2);
    write.commit().await.unwrap();
    let next = take(&four.clone().taking(3).unwrap(), &a).await;
    assert!(held.is_held() && next.is_held() && is_full(&four, &a).await);
    drop(dead);
}
