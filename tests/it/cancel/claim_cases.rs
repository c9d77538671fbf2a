//! The cases of claims.

use std::time::Duration;

use fencepost::claim::{self, Attempt, Claim, Jobs};
use fencepost::{LossReason, Owner};
use sqlx::Executor as _;

use super::scene::Scene;
use super::{Cut, after_polls};
use crate::support::{owner, until, within};

fn a_claim() -> Claim {
    // It is dropped more often than anybody would crash.
    Claim::named("charge").unwrap().kind("card").unwrap().max_crashes(1_000_000).unwrap()
}

/// An attempt at it, as soon as one that was dropped has been given back.
async fn attempt(scene: &Scene, owner: &Owner) -> Attempt {
    scene.observer.execute("DELETE FROM fencepost.claims WHERE state = 'done'").await.unwrap();
    until("an attempt", async || a_claim().begin(owner).await.unwrap().into_attempt()).await
}

async fn state(scene: &Scene) -> Option<String> {
    sqlx::query_scalar("SELECT state FROM fencepost.claims WHERE key = 'charge'")
        .fetch_optional(&scene.observer)
        .await
        .unwrap()
}

// Drop the transaction together with the future.

pub(super) async fn once(scene: &Scene, cut: Cut) -> bool {
    let mut tx = scene.pool.begin().await.unwrap();
    let ours = cut.cut(a_claim().once(&mut tx)).await.map(Result::unwrap);
    assert!(ours.is_none_or(|ours| ours));
    drop(tx);
    assert_eq!(state(scene).await, None, "rolled back, or not there yet");
    ours.is_some()
}

pub(super) async fn once_each(scene: &Scene, cut: Cut) -> bool {
    let claims = [a_claim(), Claim::named("other").unwrap()];
    let mut tx = scene.pool.begin().await.unwrap();
    let ours = cut.cut(Claim::once_each(&mut tx, &claims)).await.map(Result::unwrap);
    assert!(ours.as_ref().is_none_or(|ours| ours.len() == 2));
    drop(tx);
    assert_eq!(state(scene).await, None, "rolled back, or not there yet");
    ours.is_some()
}

pub(super) async fn enqueue(scene: &Scene, cut: Cut) -> bool {
    let mut tx = scene.pool.begin().await.unwrap();
    let fresh = cut.cut(a_claim().enqueue(&mut tx)).await.map(Result::unwrap);
    assert!(fresh.is_none_or(|fresh| fresh));
    drop(tx);
    assert_eq!(state(scene).await, None, "rolled back, or not there yet");
    fresh.is_some()
}

pub(super) async fn attempt_fence(scene: &Scene, cut: Cut) -> bool {
    let attempt = attempt(scene, &scene.a).await;
    let mut tx = scene.pool.begin().await.unwrap();
    cut.cut(attempt.fence(&mut tx)).await.map(Result::unwrap).is_some()
}

pub(super) async fn complete(scene: &Scene, cut: Cut) -> bool {
    let attempt = attempt(scene, &scene.a).await;
    let mut tx = scene.pool.begin().await.unwrap();
    let completed = cut.cut(attempt.complete(&mut tx, "done")).await.map(Result::unwrap).is_some();
    drop(tx);
    assert_eq!(state(scene).await.as_deref(), Some("running"), "rolled back, or not there yet");
    // And it is the attempt's still: in another transaction.
    let mut tx = scene.pool.begin().await.unwrap();
    within("completing again", attempt.complete(&mut tx, "done")).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(state(scene).await.as_deref(), Some("done"));
    completed
}

pub(super) async fn fail(scene: &Scene, cut: Cut) -> bool {
    let attempt = attempt(scene, &scene.a).await;
    let mut tx = scene.pool.begin().await.unwrap();
    let failed = cut.cut(attempt.fail(&mut tx, "no", Duration::ZERO)).await.map(Result::unwrap).is_some();
    drop(tx);
    assert_eq!(state(scene).await.as_deref(), Some("running"), "rolled back, or not there yet");
    failed
}

// Safe: it runs in the owner; what was granted to a dropped future is given back as if it had never begun.

pub(super) async fn begin_a_claim(scene: &Scene, cut: Cut) -> bool {
    let unclear = "SELECT count(*) FROM fencepost.claims WHERE unclear";
    assert_eq!(scene.count(unclear).await, 0);
    let begun = cut.cut(a_claim().begin(&scene.a)).await.map(Result::unwrap);
    let completed = begun.is_some();
    if let Some(begun) = begun {
        let attempt = begun.into_attempt().unwrap();
        assert!(attempt.recovered().is_none() && attempt.release().await.unwrap());
    }
    completed
}

pub(super) async fn claim_next_jobs(scene: &Scene, cut: Cut) -> bool {
    const UNTOUCHED: &str =
        "SELECT count(*) FROM fencepost.claims WHERE state = 'ready' AND NOT unclear AND crashes = 0";
    let make = "SELECT count(fencepost.claim_enqueue('card-' || n, 'card')) FROM generate_series(1, 3) n";
    scene.observer.execute(make).await.unwrap();
    assert_eq!(scene.count(UNTOUCHED).await, 3);
    let claimed = cut.cut(Jobs::of_kind("card").unwrap().claim_next(&scene.a, 3)).await.map(Result::unwrap);
    let completed = claimed.is_some();
    for attempt in claimed.into_iter().flatten() {
        assert!(attempt.release().await.unwrap());
    }
    completed
}

// Once polled it is given back, also when the future is dropped.
pub(super) async fn release_an_attempt(scene: &Scene, cut: Cut) -> bool {
    let attempt = attempt(scene, &scene.a).await;
    assert!(attempt.recovered().is_none(), "it is never dropped");
    cut.cut(attempt.release()).await.inspect(|released| assert!(*released.as_ref().unwrap())).is_some()
}

// Safe: it only watches.
pub(super) async fn attempt_lost(scene: &Scene, cut: Cut) -> bool {
    let c = owner(&scene.pool, "c", Duration::from_secs(10)).await;
    let attempt = attempt(scene, &c).await;
    assert!(after_polls(1, attempt.lost()).await.is_none());
    let (told, stopped) = tokio::join!(cut.cut(attempt.lost()), c.shutdown());
    stopped.unwrap();
    assert!(told.is_none_or(|reason| reason == LossReason::Stopped), "{told:?}");
    assert_eq!(within("being told", attempt.lost()).await, LossReason::Stopped);
    told.is_some()
}

// It happens or not; repeating it is harmless.

async fn poison(scene: &Scene) {
    let make = "INSERT INTO fencepost.claims (key, kind, state, due_at) VALUES ('charge', 'card', 'poison', now()) \
                ON CONFLICT (key) DO UPDATE SET state = 'poison'";
    scene.observer.execute(make).await.unwrap();
}

pub(super) async fn retry_poison(scene: &Scene, cut: Cut) -> bool {
    poison(scene).await;
    let mut conn = scene.pool.acquire().await.unwrap();
    let retried = cut.cut(a_claim().retry(&mut conn)).await.map(Result::unwrap);
    drop(conn);
    let state = state(scene).await.unwrap();
    assert!(state == "ready" || state == "poison" && retried.is_none());
    retried.is_some()
}

pub(super) async fn look_for_poison(scene: &Scene, cut: Cut) -> bool {
    poison(scene).await;
    let mut conn = scene.pool.acquire().await.unwrap();
    let found = cut.cut(claim::poisoned(&mut conn, Some("card"), 7)).await.map(Result::unwrap);
    found.inspect(|found| assert_eq!(found.len(), 1)).is_some()
}

pub(super) async fn forget_claims(scene: &Scene, cut: Cut) -> bool {
    scene.observer.execute("SELECT fencepost.once('old-' || n) FROM generate_series(1, 3) n").await.unwrap();
    let mut conn = scene.pool.acquire().await.unwrap();
    let completed = cut.cut(claim::prune(&mut conn, Duration::ZERO)).await.map(Result::unwrap).is_some();
    drop(conn);
    let left = scene.count("SELECT count(*) FROM fencepost.claims").await;
    assert!(left == 0 || left == 3 && !completed, "{left} of 3");
    completed
}
