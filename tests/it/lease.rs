//! The lease: exclusion, tokens, release, loss.

use std::time::Duration;

use fencepost::{Attempt, Error, FencingToken, LossReason};
use tokio::sync::oneshot;

use crate::support::{LONG, SHORT, TOUGH, database, hold, hold_when_free, lease, owner, until_true, within};

#[tokio::test(flavor = "multi_thread")]
async fn one_holds_the_other_is_told_who() {
    let (_database, pool) = database().await;
    let a = owner(&pool, "worker-a", LONG).await;
    let b = owner(&pool, "worker-b", LONG).await;
    let held = hold(&a, "report").await;
    assert!(held.is_held() && held.remaining() > Duration::ZERO);
    assert!(lease("report").try_acquire(&b).await.unwrap().is_none());
    let Attempt::Busy(holder) = lease("report").attempt(&b).await.unwrap() else { panic!("two holders") };
    assert_eq!(holder.label.as_deref(), Some("worker-a"));
    assert_eq!(holder.token, Some(held.token()));
    assert!(holder.remaining > Duration::ZERO && holder.remaining <= LONG);
    // The same process is no exception: leases are not re-entrant.
    assert!(lease("report").try_acquire(&a).await.unwrap().is_none());
    assert!(lease("other").try_acquire(&b).await.unwrap().is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn release_frees_and_the_next_token_is_larger() {
    let (_database, pool) = database().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let mut last = None::<FencingToken>;
    for _ in 0..3 {
        for owner in [&a, &b] {
            let held = hold(owner, "report").await;
            assert!(last < Some(held.token()));
            last = Some(held.token());
            assert!(held.release().await.unwrap());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn dropping_releases() {
    let (_database, pool) = database().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let token = hold(&a, "report").await.token();
    assert!(hold_when_free(&b, "report").await.token() > token);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_owners_with_one_label_are_two() {
    let (_database, pool) = database().await;
    let (a, b) = (owner(&pool, "same", LONG).await, owner(&pool, "same", LONG).await);
    let held = hold(&a, "report").await;
    assert!(lease("report").try_acquire(&b).await.unwrap().is_none());
    b.shutdown().await.unwrap();
    assert!(held.is_held());
    assert!(lease("report").try_acquire(&a).await.unwrap().is_none());
}

// C22: a cap does not need to be guessed, but may be set; and its end is not the owner's.
#[tokio::test(flavor = "multi_thread")]
async fn a_cap_ends_the_hold_and_not_the_owner() {
    let (_database, pool) = database().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let uncapped = hold(&a, "uncapped").await;
    let capped = lease("capped").at_most(TOUGH).unwrap().try_acquire(&a).await.unwrap().unwrap();
    assert!(capped.is_held() && capped.remaining() <= TOUGH);
    assert_eq!(within("the cap", capped.lost()).await, LossReason::Expired);
    assert!(!capped.is_held());
    assert_eq!(capped.remaining(), Duration::ZERO);
    let token = capped.token();
    assert!(hold_when_free(&b, "capped").await.token() > token);
    assert!(!capped.release().await.unwrap());
    assert!(uncapped.is_held() && a.is_alive());
}

#[tokio::test(flavor = "multi_thread")]
async fn metadata_is_there_for_people_while_it_is_held() {
    let (_database, pool) = database().await;
    let a = owner(&pool, "a", LONG).await;
    let tagged = lease("report").metadata(&serde_json::json!({"run": 7, "who": "o'hara"})).unwrap();
    let held = tagged.try_acquire(&a).await.unwrap().unwrap();
    let query = "SELECT metadata->>'who' = 'o''hara' FROM fencepost.leases WHERE name = 'report'";
    until_true(&pool, "metadata", query).await;
    held.release().await.unwrap();
    let _plain = hold(&a, "report").await;
    until_true(&pool, "no metadata", "SELECT metadata IS NULL FROM fencepost.leases WHERE name = 'report'")
        .await;
}

// C16: the holder is told, with a reason, when somebody else ended its hold: by its next heartbeat.
#[tokio::test(flavor = "multi_thread")]
async fn an_operators_revoke_reaches_the_holder() {
    let (_database, pool) = database().await;
    let a = owner(&pool, "a", TOUGH).await;
    let held = hold(&a, "report").await;
    let other = hold(&a, "other").await;
    // Another token than that of the holder: nothing.
    let revoke = "SELECT revoked FROM fencepost.revoke('report', $1)";
    let wrong: bool =
        sqlx::query_scalar(revoke).bind(held.token().as_i64() + 1).fetch_one(&pool).await.unwrap();
    assert!(!wrong);
    let revoked: bool = sqlx::query_scalar(revoke).bind(held.token()).fetch_one(&pool).await.unwrap();
    assert!(revoked);
    assert_eq!(within("being told", held.lost()).await, LossReason::Released);
    assert!(!held.is_held() && other.is_held());
    assert!(!held.release().await.unwrap());
}

// A release says whether it was held until then, also when nobody has been told yet.
#[tokio::test(flavor = "multi_thread")]
async fn a_release_after_an_unnoticed_revoke_says_that_it_was_lost() {
    let (_database, pool) = database().await;
    let a = owner(&pool, "a", LONG).await;
    let held = hold(&a, "report").await;
    sqlx::query("SELECT fencepost.revoke('report')").execute(&pool).await.unwrap();
    assert!(held.is_held(), "nobody has told it yet");
    assert!(!held.release().await.unwrap());
}

// C15: a fence that refuses is believed: the lease says so from then on.
#[tokio::test(flavor = "multi_thread")]
async fn a_refused_fence_is_a_loss() {
    let (_database, pool) = database().await;
    let a = owner(&pool, "a", LONG).await;
    let held = hold(&a, "report").await;
    sqlx::query("SELECT fencepost.revoke('report')").execute(&pool).await.unwrap();
    let taken = sqlx::query_scalar::<_, FencingToken>(
        "SELECT token FROM fencepost.acquire('report', p_at_most => '1 minute')",
    )
    .fetch_one(&pool)
    .await
    .unwrap();
    assert!(held.is_held(), "nobody has told it yet");
    let refused = held.begin(&pool).await.unwrap_err();
    assert!(matches!(&refused, Error::StaleFence { current: Some(by), .. } if *by == taken), "{refused}");
    assert!(refused.to_string().contains("report") && refused.is_lost());
    assert_eq!(within("the loss", held.lost()).await, LossReason::TakenOver { by: taken });
    assert!(!held.is_held());
    assert!(matches!(held.begin(&pool).await, Err(Error::Lost { reason: LossReason::TakenOver { .. }, .. })));
}

// C30: released only after the work has ended.
#[tokio::test(flavor = "multi_thread")]
async fn run_releases_when_the_work_has_ended() {
    let (_database, pool) = database().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let held = hold(&a, "report").await;
    let (end, ended) = oneshot::channel::<u32>();
    let work = tokio::spawn(async move {
        held.run(async |held: &fencepost::HeldLease| {
            assert!(held.is_held());
            ended.await.unwrap()
        })
        .await
    });
    assert!(lease("report").try_acquire(&b).await.unwrap().is_none());
    end.send(7).unwrap();
    assert_eq!(work.await.unwrap().unwrap(), 7);
    // `run` has released it before it returned.
    let _now = hold(&b, "report").await;
}

// C30, C16: on a loss the work is told, has its grace, and is dropped before the lease is released.
#[tokio::test(flavor = "multi_thread")]
async fn run_signals_a_loss_then_drops_the_work() {
    struct OnDrop(Option<oneshot::Sender<()>>);
    impl Drop for OnDrop {
        fn drop(&mut self) {
            self.0.take().unwrap().send(()).unwrap();
        }
    }
    let (_database, pool) = database().await;
    let a = owner(&pool, "a", LONG).await;
    let capped = lease("report").at_most(SHORT).unwrap().grace(Duration::from_millis(1));
    let held = capped.try_acquire(&a).await.unwrap().unwrap();
    let (dropped, is_dropped) = oneshot::channel();
    let (told, is_told) = oneshot::channel();
    let outcome = held
        .run(async |held: &fencepost::HeldLease| {
            let _on_drop = OnDrop(Some(dropped));
            told.send(held.lost().await).unwrap();
            std::future::pending::<()>().await;
        })
        .await;
    assert!(matches!(outcome, Err(Error::Lost { reason: LossReason::Expired, .. })), "{outcome:?}");
    assert_eq!(is_told.await, Ok(LossReason::Expired));
    assert_eq!(is_dropped.await, Ok(()));
}

#[tokio::test(flavor = "multi_thread")]
async fn run_keeps_the_value_of_work_that_ends_in_its_grace() {
    let (_database, pool) = database().await;
    let a = owner(&pool, "a", LONG).await;
    let held = lease("report").at_most(SHORT).unwrap().grace(LONG).try_acquire(&a).await.unwrap().unwrap();
    let outcome = held.run(async |held: &fencepost::HeldLease| held.lost().await).await;
    assert_eq!(outcome.unwrap(), LossReason::Expired);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_of_the_work_releases() {
    let (_database, pool) = database().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let held = hold(&a, "report").await;
    let work = tokio::spawn(async move {
        held.run(async |_: &fencepost::HeldLease| -> () { panic!("the work's own") }).await
    });
    assert!(work.await.unwrap_err().is_panic());
    let _free = hold_when_free(&b, "report").await;
}

// C23: three separate times: no end of an acquire's future ends the hold.
#[tokio::test(flavor = "multi_thread")]
async fn the_hold_outlives_the_task_that_acquired() {
    let (_database, pool) = database().await;
    let a = owner(&pool, "a", TOUGH).await;
    let acquiring = a.clone();
    let held = tokio::spawn(async move { hold(&acquiring, "report").await }).await.unwrap();
    let beaten = "SELECT expires_at > started_at + 2 * ttl FROM fencepost.owners WHERE label = 'a'";
    until_true(&pool, "several ttls", beaten).await;
    assert!(held.is_held());
    assert!(held.release().await.unwrap());
}

// C44: tokens outlive release and deletion.
#[tokio::test(flavor = "multi_thread")]
async fn tokens_go_on_rising_after_pruning() {
    let (_database, pool) = database().await;
    let a = owner(&pool, "a", LONG).await;
    let kept = hold(&a, "kept").await;
    let first = hold(&a, "report").await;
    let token = first.token();
    assert!(first.release().await.unwrap());
    let mut conn = pool.acquire().await.unwrap();
    let pruned = fencepost::prune(&mut conn, Duration::ZERO).await.unwrap();
    assert_eq!(pruned.leases, 1, "the free one and not the held one");
    assert_eq!(pruned.owners, 0);
    assert!(hold(&a, "report").await.token() > token);
    assert!(kept.is_held());
    let mut tx = kept.begin(&pool).await.unwrap();
    sqlx::query("SELECT 1").execute(&mut *tx).await.unwrap();
    tx.commit().await.unwrap();
}
