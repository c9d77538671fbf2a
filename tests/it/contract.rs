//! The contract of everything that excludes: one list of promises, kept by every capability that says "only one".
//!
//! A capability joins by an `Exclusive` of its own and a line in `contract!`; `every_capability_is_in_the_contract`
//! fails when one is missing.

use std::time::Duration;

use fencepost::claim::{self as claims, Claim};
use fencepost::{
    AdvisoryLock, Election, Error, HeldAdvisory, HeldLease, Key, Leadership, Lease, Owner, Permit, Result,
    Semaphore, Wait,
};
use sqlx::PgPool;

use crate::cancel::after_polls;
use crate::support::{LONG, database, owner, until, within};

/// What everything that excludes can do.
trait Exclusive: Clone + Send + Sync + 'static {
    type Held: Send;

    fn named(name: &str) -> Self;
    fn try_acquire(&self, owner: &Owner) -> impl Future<Output = Result<Option<Self::Held>>> + Send;
    fn release(held: Self::Held) -> impl Future<Output = Result<bool>> + Send;
    fn is_held(held: &Self::Held) -> bool;
    fn lost(held: &Self::Held) -> impl Future<Output = fencepost::LossReason> + Send;
}

/// What can be waited for, besides.
trait Waits: Exclusive {
    fn acquire(&self, owner: &Owner, wait: Wait) -> impl Future<Output = Result<Self::Held>> + Send;
    /// How many wait for it.
    fn waiting(pool: &PgPool) -> impl Future<Output = i64> + Send;
}

impl Exclusive for Lease {
    type Held = HeldLease;

    fn named(name: &str) -> Self {
        Self::named(name).unwrap()
    }

    async fn try_acquire(&self, owner: &Owner) -> Result<Option<HeldLease>> {
        Self::try_acquire(self, owner).await
    }

    async fn release(held: HeldLease) -> Result<bool> {
        held.release().await
    }

    fn is_held(held: &HeldLease) -> bool {
        held.is_held()
    }

    async fn lost(held: &HeldLease) -> fencepost::LossReason {
        held.lost().await
    }
}

impl Waits for Lease {
    async fn acquire(&self, owner: &Owner, wait: Wait) -> Result<HeldLease> {
        Self::acquire(self, owner, wait).await
    }

    async fn waiting(pool: &PgPool) -> i64 {
        sqlx::query_scalar("SELECT count(*) FROM fencepost.waiters").fetch_one(pool).await.unwrap()
    }
}

impl Exclusive for AdvisoryLock {
    type Held = HeldAdvisory;

    fn named(name: &str) -> Self {
        Self::exclusive(Key::from_name("contract", name).unwrap())
    }

    async fn try_acquire(&self, owner: &Owner) -> Result<Option<HeldAdvisory>> {
        Self::try_acquire(self, owner).await
    }

    async fn release(held: HeldAdvisory) -> Result<bool> {
        held.release().await
    }

    fn is_held(held: &HeldAdvisory) -> bool {
        held.is_held()
    }

    async fn lost(held: &HeldAdvisory) -> fencepost::LossReason {
        held.lost().await
    }
}

impl Waits for AdvisoryLock {
    async fn acquire(&self, owner: &Owner, wait: Wait) -> Result<HeldAdvisory> {
        Self::acquire(self, owner, wait).await
    }

    async fn waiting(pool: &PgPool) -> i64 {
        crate::advisory::advisory_locks(pool, false).await
    }
}

/// An attempt at it.
impl Exclusive for Claim {
    type Held = claims::Attempt;

    fn named(name: &str) -> Self {
        // Poison is another matter.
        Self::named(name).unwrap().max_crashes(1_000).unwrap()
    }

    async fn try_acquire(&self, owner: &Owner) -> Result<Option<claims::Attempt>> {
        Ok(self.begin(owner).await?.into_attempt())
    }

    async fn release(held: claims::Attempt) -> Result<bool> {
        held.release().await
    }

    fn is_held(held: &claims::Attempt) -> bool {
        held.is_held()
    }

    async fn lost(held: &claims::Attempt) -> fencepost::LossReason {
        held.lost().await
    }
}

impl Exclusive for Election {
    type Held = Leadership;

    fn named(name: &str) -> Self {
        Self::named(name).unwrap()
    }

    async fn try_acquire(&self, owner: &Owner) -> Result<Option<Leadership>> {
        match self.campaign(owner, Wait::no()).await {
            Err(Error::Busy { .. }) => Ok(None),
            answered => answered.map(Some),
        }
    }

    async fn release(held: Leadership) -> Result<bool> {
        held.resign().await
    }

    fn is_held(held: &Leadership) -> bool {
        held.is_held()
    }

    async fn lost(held: &Leadership) -> fencepost::LossReason {
        held.lost().await
    }
}

/// With one permit it is a lock.
impl Exclusive for Semaphore {
    type Held = Permit;

    fn named(name: &str) -> Self {
        Self::named(name, 1).unwrap()
    }

    async fn try_acquire(&self, owner: &Owner) -> Result<Option<Permit>> {
        Self::try_acquire(self, owner).await
    }

    async fn release(held: Permit) -> Result<bool> {
        held.release().await
    }

    fn is_held(held: &Permit) -> bool {
        held.is_held()
    }

    async fn lost(held: &Permit) -> fencepost::LossReason {
        held.lost().await
    }
}

impl Waits for Election {
    async fn acquire(&self, owner: &Owner, wait: Wait) -> Result<Leadership> {
        self.campaign(owner, wait).await
    }

    async fn waiting(pool: &PgPool) -> i64 {
        Lease::waiting(pool).await
    }
}

impl Waits for Semaphore {
    async fn acquire(&self, owner: &Owner, wait: Wait) -> Result<Permit> {
        Self::acquire(self, owner, wait).await
    }

    async fn waiting(pool: &PgPool) -> i64 {
        Lease::waiting(pool).await
    }
}

/// The capability's modules under `src/` that promise exclusion, each with its line here.
const CAPABILITIES: &[&str] = &["advisory", "claim", "election", "lease", "semaphore"];

#[test]
fn every_capability_is_in_the_contract() {
    let sources = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found: Vec<String> = std::fs::read_dir(sources)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_file())
        .filter(|path| {
            let source = std::fs::read_to_string(path).unwrap();
            ["try_acquire", "begin", "campaign"]
                .iter()
                .any(|way| source.contains(&format!("pub async fn {way}(&self, owner")))
        })
        .map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
        .collect();
    found.sort();
    assert_eq!(found, CAPABILITIES);
}

struct Scene<L> {
    _database: fencepost::testing::TestDatabase,
    pool: PgPool,
    a: Owner,
    b: Owner,
    lock: L,
}

async fn scene<L: Exclusive>() -> Scene<L> {
    let (database, pool) = database().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    Scene { _database: database, pool, a, b, lock: L::named("contract") }
}

async fn held_when_free<L: Exclusive>(lock: &L, owner: &Owner) -> L::Held {
    until("it is free", async || lock.try_acquire(owner).await.unwrap()).await
}

async fn one_holds_and_the_others_do_not<L: Exclusive>() {
    let Scene { a, b, lock, .. } = &scene::<L>().await;
    let held = lock.try_acquire(a).await.unwrap().unwrap();
    assert!(L::is_held(&held));
    for other in [a, b] {
        assert!(lock.try_acquire(other).await.unwrap().is_none());
    }
    assert!(L::named("another").try_acquire(b).await.unwrap().is_some());
    assert!(L::is_held(&held));
}

async fn who_does_not_wait_is_told_that_it_is_busy<L: Waits>() {
    let Scene { a, b, lock, .. } = &scene::<L>().await;
    let _held = lock.try_acquire(a).await.unwrap().unwrap();
    for other in [a, b] {
        let busy = lock.acquire(other, Wait::no()).await.err().unwrap();
        assert!(matches!(busy, Error::Busy { .. }) && busy.is_timeout() && !busy.is_lost());
    }
}

async fn released_it_is_free_and_can_be_acquired_again<L: Exclusive>() {
    let Scene { a, b, lock, .. } = &scene::<L>().await;
    for owner in [a, b, a] {
        let held = lock.try_acquire(owner).await.unwrap().unwrap();
        assert!(L::release(held).await.unwrap());
    }
}

async fn dropped_it_is_free<L: Exclusive>() {
    let Scene { a, b, lock, .. } = &scene::<L>().await;
    drop(lock.try_acquire(a).await.unwrap().unwrap());
    assert!(L::is_held(&held_when_free(lock, b).await));
}

async fn a_wait_ends_with_its_deadline_and_leaves_nothing<L: Waits>() {
    let Scene { pool, a, b, lock, .. } = &scene::<L>().await;
    let held = lock.try_acquire(a).await.unwrap().unwrap();
    let busy = within("the deadline", lock.acquire(b, Wait::at_most(Duration::from_millis(40))))
        .await
        .err()
        .unwrap();
    assert!(busy.is_timeout(), "{busy:?}");
    until("nobody waits", async || (L::waiting(pool).await == 0).then_some(())).await;
    assert!(L::is_held(&held) && L::release(held).await.unwrap());
    assert!(lock.try_acquire(a).await.unwrap().is_some());
}

async fn waiters_are_served_in_the_order_of_arrival<L: Waits>() {
    let Scene { pool, a, b, lock, .. } = &scene::<L>().await;
    let mut held = lock.try_acquire(a).await.unwrap().unwrap();
    let mut line = Vec::new();
    for (place, owner) in [b, a, b].into_iter().enumerate() {
        let (waiter, owner) = (lock.clone(), owner.clone());
        line.push(tokio::spawn(async move { waiter.acquire(&owner, Wait::forever()).await }));
        until("it is in line", async || {
            (L::waiting(pool).await == i64::try_from(place).unwrap() + 1).then_some(())
        })
        .await;
    }
    while !line.is_empty() {
        assert!(lock.try_acquire(b).await.unwrap().is_none(), "nobody jumps the line");
        assert!(L::release(held).await.unwrap());
        held = within("the first in line", line.remove(0)).await.unwrap().unwrap();
        assert!(line.iter().all(|other| !other.is_finished()), "one, and the first");
    }
}

async fn a_cancelled_acquire_strands_nothing<L: Exclusive>() {
    let Scene { a, b, lock, .. } = &scene::<L>().await;
    for polls in 0..4 {
        drop(after_polls(polls, lock.try_acquire(a)).await);
        assert!(L::is_held(&held_when_free(lock, b).await));
    }
}

async fn a_stopped_owner_holds_nothing<L: Exclusive>() {
    let Scene { a, b, lock, .. } = &scene::<L>().await;
    let held = lock.try_acquire(a).await.unwrap().unwrap();
    within("the shutdown", a.shutdown()).await.unwrap();
    assert_eq!(within("the loss", L::lost(&held)).await, fencepost::LossReason::Stopped);
    assert!(!L::is_held(&held));
    assert!(lock.try_acquire(b).await.unwrap().is_some());
    assert!(!L::release(held).await.unwrap());
    assert!(matches!(lock.try_acquire(a).await, Err(Error::Stopped)));
}

async fn nobody_waits_for_a_stopped_owner<L: Waits>() {
    let Scene { a, lock, .. } = &scene::<L>().await;
    within("the shutdown", a.shutdown()).await.unwrap();
    assert!(matches!(lock.acquire(a, Wait::forever()).await, Err(Error::Stopped)));
}

macro_rules! contract {
    ($($capability:ident: $lock:ty),* $(,)?; $promises:tt) => {
        $(contract!(@one $capability, $lock, $promises);)*
    };
    (@one $capability:ident, $lock:ty, [$($promise:ident),* $(,)?]) => {
        mod $capability {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $promise() {
                super::$promise::<$lock>().await;
            })*
        }
    };
}

contract!(election: fencepost::Election, lease: fencepost::Lease, semaphore: fencepost::Semaphore; [
    one_holds_and_the_others_do_not,
    who_does_not_wait_is_told_that_it_is_busy,
    released_it_is_free_and_can_be_acquired_again,
    dropped_it_is_free,
    a_wait_ends_with_its_deadline_and_leaves_nothing,
    waiters_are_served_in_the_order_of_arrival,
    a_cancelled_acquire_strands_nothing,
    a_stopped_owner_holds_nothing,
    nobody_waits_for_a_stopped_owner,
]);

contract!(claim: fencepost::claim::Claim; [
    one_holds_and_the_others_do_not,
    released_it_is_free_and_can_be_acquired_again,
    dropped_it_is_free,
    a_cancelled_acquire_strands_nothing,
    a_stopped_owner_holds_nothing,
]);

// Postgres's own line does not keep the order of arrival across processes for longer than half a second
// (`advisory::who_waits_in_one_process_is_served_in_the_order_of_arrival` is what is promised).
contract!(advisory: fencepost::AdvisoryLock; [
    one_holds_and_the_others_do_not,
    who_does_not_wait_is_told_that_it_is_busy,
    released_it_is_free_and_can_be_acquired_again,
    dropped_it_is_free,
    a_wait_ends_with_its_deadline_and_leaves_nothing,
    a_cancelled_acquire_strands_nothing,
    a_stopped_owner_holds_nothing,
    nobody_waits_for_a_stopped_owner,
]);
