//! One case a function: the rest of its promise, beside what the scene checks after all of them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fencepost::row::{Filter, Order};
use fencepost::testing::TestDatabase;
use fencepost::{
    AdvisoryLock, Change, Election, Error, Group, HeldAdvisory, HeldLease, Isolation, Key, Leadership, Lease,
    LossReason, Member, Owner, Partition, Permit, Semaphore, Wait, fence, migrate, prune, transaction,
};
use sqlx::{Connection as _, Executor as _, PgConnection, PgPool};
use tokio::sync::oneshot;

use super::claim_cases::{
    attempt_fence, attempt_lost, begin_a_claim, claim_next_jobs, complete, enqueue, fail, forget_claims,
    look_for_poison, once, once_each, release_an_attempt, retry_poison,
};
use super::scene::{Case, NAME, Scene};
use super::schedule_cases::{run_due, slot_complete, slot_fence, slot_lost};
use super::version_cases::{
    check_version, delete, load, update, update_many, update_with, update_with_behind_a_pooler,
};
use super::{Cut, after_polls, sweep};
use crate::support::{connect, hold_when_free, lease, owner, until, until_true, within};

macro_rules! cases {
    ($($name:literal: $case:ident),* $(,)?) => {
        /// The public async functions; one may have several cases.
        pub(super) const CASES: &[(&str, Case)] = &[$(($name, |scene, cut| Box::pin($case(scene, cut)))),*];

        mod dropped {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $case() {
                super::sweep($name, |scene, cut| Box::pin(super::$case(scene, cut))).await;
            })*
        }
    };
}

cases! {
    "Lease::try_acquire": try_acquire,
    "Lease::attempt": attempt,
    "Lease::acquire": acquire_a_free_one,
    "Lease::acquire": acquire_in_line,
    "Lease::acquire_all": acquire_all,
    "HeldLease::lost": lost,
    "HeldLease::fence": pass_the_fence,
    "HeldLease::begin": begin,
    "HeldLease::begin_with": begin_with,
    "HeldLease::run": run,
    "HeldLease::release": release,
    "Election::campaign": campaign,
    "Election::run": run_while_leading,
    "Election::ask_to_resign": ask_to_resign,
    "Leadership::asked_to_resign": asked_to_resign,
    "Leadership::resign": resign,
    "Leaders::changed": observe,
    "Semaphore::try_acquire": try_a_permit,
    "Semaphore::acquire": acquire_permits_in_line,
    "Semaphore::resize": resize,
    "Permit::release": release_a_permit,
    "Owner::start": start,
    "OwnerBuilder::start": start_as_built,
    "Owner::lost": owner_lost,
    "Owner::shutdown": shutdown,
    "AdvisoryLock::try_acquire": try_acquire_advisory,
    "AdvisoryLock::acquire": acquire_advisory,
    "AdvisoryLock::acquire": wait_for_advisory,
    "AdvisoryLock::note_name": note_name,
    "AdvisoryLock::begin": begin_advisory,
    "AdvisoryLock::begin_all": begin_all_advisory,
    "AdvisoryLock::lock": lock_advisory,
    "AdvisoryLock::lock_all": lock_all_advisory,
    "AdvisoryLock::try_lock": try_lock_advisory,
    "HeldAdvisory::lost": lost_advisory,
    "HeldAdvisory::release": release_advisory,
    "RowLock::lock": lock,
    "RowLock::lock_many": lock_many,
    "RowLock::claim_next": claim_next,
    "Group::join": join,
    "Member::next": next,
    "Member::leave": leave,
    "Partition::revoked": revoked,
    "Partition::lost": lose_a_partition,
    "Partition::begin": begin_for_a_partition,
    "Partition::fence": pass_a_partitions_fence,
    "Partition::release": release_a_partition,
    "retry::transaction": run_a_transaction,
    "fence::check": check,
    "fence::advance": advance,
    "fence::protect": protect,
    "fence::unprotect": unprotect,
    "migrate::migrate": bring_the_schema,
    "prune::prune": forget,
    "Claim::once": once,
    "Claim::once_each": once_each,
    "Claim::enqueue": enqueue,
    "Claim::begin": begin_a_claim,
    "Claim::retry": retry_poison,
    "Attempt::lost": attempt_lost,
    "Attempt::fence": attempt_fence,
    "Attempt::complete": complete,
    "Attempt::fail": fail,
    "Attempt::release": release_an_attempt,
    "Jobs::claim_next": claim_next_jobs,
    "claim::poisoned": look_for_poison,
    "claim::prune": forget_claims,
    "Versioned::load": load,
    "Versioned::update": update,
    "Versioned::delete": delete,
    "Versioned::update_many": update_many,
    "Versioned::update_with": update_with,
    "Versioned::update_with": update_with_behind_a_pooler,
    "CheckVersion::check_version": check_version,
    "Schedule::run_due": run_due,
    "Slot::lost": slot_lost,
    "Slot::fence": slot_fence,
    "Slot::complete": slot_complete,
    "TestDatabase::create": create,
    "TestDatabase::create_on": create_on,
    "TestDatabase::terminate": terminate,
    "TestDatabase::terminate_where": terminate_where,
    "TestDatabase::close": close,
}

// Safe: it runs in the owner; what was granted to a dropped future is released.

async fn try_acquire(scene: &Scene, cut: Cut) -> bool {
    let acquired = cut.cut(lease(NAME).try_acquire(&scene.a)).await;
    acquired.inspect(|held| assert!(held.as_ref().unwrap().as_ref().unwrap().is_held())).is_some()
}

async fn attempt(scene: &Scene, cut: Cut) -> bool {
    cut.cut(lease(NAME).attempt(&scene.a)).await.map(Result::unwrap).is_some()
}

async fn acquire_a_free_one(scene: &Scene, cut: Cut) -> bool {
    cut.cut(lease(NAME).acquire(&scene.a, Wait::forever())).await.map(Result::unwrap).is_some()
}

// Its place in the line is given up, and what was granted at that moment is released.
async fn acquire_in_line(scene: &Scene, cut: Cut) -> bool {
    let held = hold_when_free(&scene.b, NAME).await;
    let (over, is_over) = oneshot::channel();
    let acquire = async {
        let acquired = cut.cut(lease(NAME).acquire(&scene.a, Wait::forever())).await;
        // It may know already.
        _ = over.send(());
        acquired.map(Result::unwrap).is_some()
    };
    // Released while it waits in line.
    let release = async {
        tokio::select! {
            _ = is_over => {}
            () = until("it is in line", async || {
                (scene.count("SELECT count(*) FROM fencepost.waiters").await > 0).then_some(())
            }) => {}
        }
        assert!(held.release().await.unwrap());
    };
    tokio::join!(acquire, release).0
}

async fn acquire_all(scene: &Scene, cut: Cut) -> bool {
    let leases = ["x", NAME, "a"].map(lease);
    let acquired = cut.cut(Lease::acquire_all(&scene.a, leases, Wait::forever())).await;
    acquired.inspect(|all| assert_eq!(all.as_ref().unwrap().len(), 3)).is_some()
}

// Safe: it only watches: the lease stays as it was, and whoever asks again is told.
async fn lost(scene: &Scene, cut: Cut) -> bool {
    let capped = lease(NAME).at_most(Duration::from_millis(4)).unwrap();
    let held = within("the lease", capped.acquire(&scene.a, Wait::forever())).await.unwrap();
    let told = cut.cut(held.lost()).await;
    assert!(told.is_none_or(|reason| reason == LossReason::Expired), "{told:?}");
    assert_eq!(within("being told", held.lost()).await, LossReason::Expired);
    let held = scene.held().await;
    assert!(after_polls(1, held.lost()).await.is_none());
    assert!(held.is_held() && held.release().await.unwrap());
    told.is_some()
}

// Drop the transaction together with the future.

async fn pass_the_fence(scene: &Scene, cut: Cut) -> bool {
    let held = scene.held().await;
    let mut tx = scene.pool.begin().await.unwrap();
    cut.cut(held.fence(&mut tx)).await.map(Result::unwrap).is_some()
}

async fn check(scene: &Scene, cut: Cut) -> bool {
    let held = scene.held().await;
    let mut tx = scene.pool.begin().await.unwrap();
    cut.cut(fence::check(&mut tx, held.name(), held.grant())).await.map(Result::unwrap).is_some()
}

async fn advance(scene: &Scene, cut: Cut) -> bool {
    let held = scene.held().await;
    let mut tx = scene.pool.begin().await.unwrap();
    let completed =
        cut.cut(fence::advance(&mut tx, held.name(), held.token())).await.map(Result::unwrap).is_some();
    drop(tx);
    assert_eq!(
        scene.count("SELECT count(*) FROM fencepost.fences").await,
        0,
        "rolled back, or not there yet"
    );
    completed
}

async fn lock(scene: &Scene, cut: Cut) -> bool {
    let rows = scene.rows().await.at_most(Duration::from_secs(5)).unwrap();
    let mut tx = scene.pool.begin().await.unwrap();
    cut.cut(rows.lock::<(i64,), _>(&mut tx, 7_i64)).await.map(Result::unwrap).is_some()
}

async fn lock_many(scene: &Scene, cut: Cut) -> bool {
    let rows = scene.rows().await.no_wait();
    let mut tx = scene.pool.begin().await.unwrap();
    cut.cut(rows.lock_many::<(i64,), _>(&mut tx, &[9_i64, 7])).await.map(Result::unwrap).is_some()
}

async fn claim_next(scene: &Scene, cut: Cut) -> bool {
    let (rows, order) = (scene.rows().await, [Order::ascending("id").unwrap()]);
    let mut tx = scene.pool.begin().await.unwrap();
    let claimed = cut.cut(rows.claim_next::<(i64,)>(&mut tx, 2, &order, Filter::all())).await;
    claimed.inspect(|rows| assert_eq!(*rows.as_ref().unwrap(), [(1,), (2,)])).is_some()
}

// The pool gets back a clean connection, and the transaction is rolled back, or committed if it was at that.
async fn run_a_transaction(scene: &Scene, cut: Cut) -> bool {
    let rows = &scene.rows().await;
    let counted = cut.cut(transaction(&scene.pool, Isolation::Serializable, |tx| {
        Box::pin(async move {
            rows.lock::<(i64,), _>(tx, 7_i64).await?;
            Ok::<_, Error>(7)
        })
    }));
    counted.await.inspect(|counted| assert_eq!(*counted.as_ref().unwrap(), 7)).is_some()
}

// Safe: it runs in the owner, and what is granted to nobody is released.

fn advisory() -> AdvisoryLock {
    AdvisoryLock::exclusive(Key::from_name("cancel", NAME).unwrap())
}

async fn held_advisory(owner: &Owner) -> HeldAdvisory {
    within("the lock", advisory().acquire(owner, Wait::forever())).await.unwrap()
}

async fn try_acquire_advisory(scene: &Scene, cut: Cut) -> bool {
    // What a call before has left may be on its way back.
    within("it is free", held_advisory(&scene.a)).await.release().await.unwrap();
    let acquired = cut.cut(advisory().try_acquire(&scene.a)).await;
    let completed = acquired.inspect(|held| assert!(held.as_ref().unwrap().is_some())).is_some();
    within("it strands nothing", held_advisory(&scene.b)).await.release().await.unwrap();
    completed
}

async fn acquire_advisory(scene: &Scene, cut: Cut) -> bool {
    let completed =
        cut.cut(advisory().acquire(&scene.a, Wait::forever())).await.map(Result::unwrap).is_some();
    within("it strands nothing", held_advisory(&scene.b)).await.release().await.unwrap();
    completed
}

async fn wait_for_advisory(scene: &Scene, cut: Cut) -> bool {
    let held = held_advisory(&scene.b).await;
    let lock = advisory();
    let waiting = async {
        let acquire = lock.acquire(&scene.a, Wait::forever());
        let release = async { held.release().await.unwrap() };
        let (acquired, _) = tokio::join!(acquire, release);
        acquired
    };
    let completed = cut.cut(waiting).await.map(Result::unwrap).is_some();
    within("it strands nothing", held_advisory(&scene.b)).await.release().await.unwrap();
    completed
}

async fn lost_advisory(scene: &Scene, cut: Cut) -> bool {
    let held = held_advisory(&scene.a).await;
    // Pending while it is held: it is told of by dropping the owner's session.
    let end = "SELECT count(pg_terminate_backend(pid)) FROM pg_locks WHERE locktype = 'advisory' AND database = \
               (SELECT oid FROM pg_database WHERE datname = current_database())";
    assert_eq!(scene.count(end).await, 1);
    let told = cut.cut(held.lost()).await;
    within("being told", held.lost()).await;
    assert!(!held.is_held() && after_polls(1, held.lost()).await.is_some());
    told.is_some()
}

async fn release_advisory(scene: &Scene, cut: Cut) -> bool {
    let held = held_advisory(&scene.a).await;
    let completed = cut.cut(held.release()).await.map(Result::unwrap).is_some();
    within("it is freed", held_advisory(&scene.b)).await.release().await.unwrap();
    completed
}

async fn note_name(scene: &Scene, cut: Cut) -> bool {
    let mut tx = scene.pool.begin().await.unwrap();
    cut.cut(advisory().note_name(&mut tx)).await.map(Result::unwrap).is_some()
}

async fn begin_advisory(scene: &Scene, cut: Cut) -> bool {
    cut.cut(advisory().begin(&scene.pool, Wait::forever())).await.map(Result::unwrap).is_some()
}

async fn begin_all_advisory(scene: &Scene, cut: Cut) -> bool {
    let locks = [advisory(), AdvisoryLock::shared(Key::from_i64(7))];
    cut.cut(AdvisoryLock::begin_all(&scene.pool, locks, Wait::forever())).await.map(Result::unwrap).is_some()
}

// Drop the transaction together with the future.

async fn lock_advisory(scene: &Scene, cut: Cut) -> bool {
    let mut tx = scene.pool.begin().await.unwrap();
    cut.cut(advisory().lock(&mut tx, Wait::forever())).await.map(Result::unwrap).is_some()
}

async fn lock_all_advisory(scene: &Scene, cut: Cut) -> bool {
    let locks = [advisory(), AdvisoryLock::shared(Key::from_i64(7))];
    let mut tx = scene.pool.begin().await.unwrap();
    cut.cut(AdvisoryLock::lock_all(&mut tx, locks, Wait::forever())).await.map(Result::unwrap).is_some()
}

async fn try_lock_advisory(scene: &Scene, cut: Cut) -> bool {
    let mut tx = scene.pool.begin().await.unwrap();
    let locked = cut.cut(advisory().try_lock(&mut tx)).await;
    locked.inspect(|locked| assert!(locked.as_ref().unwrap())).is_some()
}

// Safe: a transaction that nobody takes is rolled back; the pool gets back a clean connection.

async fn begin(scene: &Scene, cut: Cut) -> bool {
    let held = scene.held().await;
    // Dropped here, so that the pool's connection is looked at next.
    cut.cut(held.begin(&scene.pool)).await.map(Result::unwrap).is_some()
}

async fn begin_with(scene: &Scene, cut: Cut) -> bool {
    let held = scene.held().await;
    let begun = cut.cut(held.begin_with(&scene.pool, Isolation::Serializable)).await;
    match begun {
        Some(tx) => tx.unwrap().commit().await.map(|()| true).unwrap(),
        None => false,
    }
}

// Dropping the future drops the work, then releases in the background.
async fn run(scene: &Scene, cut: Cut) -> bool {
    let held = scene.held().await;
    let working = AtomicBool::new(true);
    let work = async |held: &HeldLease| {
        let _ended = Ended(&working);
        held.begin(&scene.pool).await.unwrap().commit().await.unwrap();
        7
    };
    let ran = cut.cut(held.run(work)).await.map(Result::unwrap);
    assert!(!working.load(Ordering::SeqCst), "the work is gone with the future");
    ran.inspect(|value| assert_eq!(*value, 7)).is_some()
}

// Once polled it is released, also when the future is dropped.
async fn release(scene: &Scene, cut: Cut) -> bool {
    let held = scene.held().await;
    cut.cut(held.release()).await.inspect(|released| assert!(*released.as_ref().unwrap())).is_some()
}

// The candidacy is withdrawn, a term that had just begun is resigned: the scene allows no ticket and no grant.

fn election() -> Election {
    Election::named(NAME).unwrap()
}

async fn leads(scene: &Scene) -> Leadership {
    within("leading", election().campaign(&scene.a, Wait::forever())).await.unwrap()
}

async fn campaign(scene: &Scene, cut: Cut) -> bool {
    cut.cut(election().campaign(&scene.a, Wait::forever())).await.map(Result::unwrap).is_some()
}

// Dropping the future drops the work, then resigns in the background.
async fn run_while_leading(scene: &Scene, cut: Cut) -> bool {
    let working = AtomicBool::new(false);
    let election = election();
    let ran = cut.cut(election.run(&scene.a, |leadership| {
        let (pool, working) = (&scene.pool, &working);
        async move {
            working.store(true, Ordering::SeqCst);
            let _ended = Ended(working);
            leadership.begin(pool).await.unwrap().commit().await.unwrap();
            std::ops::ControlFlow::Break(7)
        }
    }));
    let ran = ran.await.map(Result::unwrap);
    assert!(!working.load(Ordering::SeqCst), "the work is gone with the future");
    ran.inspect(|value| assert_eq!(*value, 7)).is_some()
}

struct Ended<'a>(&'a AtomicBool);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

// It happens or not; repeating it is harmless.
async fn ask_to_resign(scene: &Scene, cut: Cut) -> bool {
    let leader = leads(scene).await;
    let asked = cut.cut(election().ask_to_resign(&scene.pool, Duration::ZERO)).await.map(Result::unwrap);
    assert!(election().ask_to_resign(&scene.pool, Duration::ZERO).await.unwrap());
    assert!(leader.is_held() && leader.resign().await.unwrap());
    asked.inspect(|asked| assert!(*asked)).is_some()
}

// Safe: it only looks.
async fn asked_to_resign(scene: &Scene, cut: Cut) -> bool {
    let leader = leads(scene).await;
    assert!(election().ask_to_resign(&scene.pool, Duration::ZERO).await.unwrap());
    let completed = cut.cut(leader.asked_to_resign()).await.is_some();
    within("being asked", leader.asked_to_resign()).await;
    assert!(leader.is_held() && leader.resign().await.unwrap());
    completed
}

// Once polled it is resigned, also when the future is dropped.
async fn resign(scene: &Scene, cut: Cut) -> bool {
    let leader = leads(scene).await;
    cut.cut(leader.resign()).await.inspect(|resigned| assert!(*resigned.as_ref().unwrap())).is_some()
}

// Safe: what was not told is told by the next call.
async fn observe(scene: &Scene, cut: Cut) -> bool {
    let leader = leads(scene).await;
    let mut leaders = election().observe(&scene.pool);
    let told = cut.cut(leaders.changed()).await.map(Result::unwrap);
    if told.is_none() {
        let told = within("the leader", leaders.changed()).await.unwrap();
        assert_eq!(told.unwrap().term, leader.term());
    }
    assert!(leader.resign().await.unwrap());
    told.is_some()
}

// As with a lease.

fn semaphore(permits: u32) -> Semaphore {
    Semaphore::named(NAME, permits).unwrap()
}

/// What the one before gave back may take a moment.
async fn permit(owner: &Owner, count: u32) -> Permit {
    let some = semaphore(3).taking(count).unwrap();
    until("permits are free", async || some.try_acquire(owner).await.unwrap()).await
}

async fn try_a_permit(scene: &Scene, cut: Cut) -> bool {
    let two = semaphore(3).taking(2).unwrap();
    let acquired = cut.cut(two.try_acquire(&scene.a)).await.map(Result::unwrap);
    let completed = acquired.inspect(|permit| assert!(permit.as_ref().unwrap().is_held())).is_some();
    // Nothing is stranded for the others.
    assert!(permit(&scene.b, 3).await.release().await.unwrap());
    completed
}

async fn acquire_permits_in_line(scene: &Scene, cut: Cut) -> bool {
    let held = permit(&scene.b, 2).await;
    let (over, is_over) = oneshot::channel();
    let acquire = async {
        let two = semaphore(3).taking(2).unwrap();
        let acquired = cut.cut(two.acquire(&scene.a, Wait::forever())).await;
        _ = over.send(());
        acquired.map(Result::unwrap).is_some()
    };
    let release = async {
        tokio::select! {
            _ = is_over => {}
            () = until("it is in line", async || {
                (scene.count("SELECT count(*) FROM fencepost.waiters").await > 0).then_some(())
            }) => {}
        }
        assert!(held.release().await.unwrap());
    };
    let completed = tokio::join!(acquire, release).0;
    assert!(permit(&scene.b, 3).await.release().await.unwrap());
    completed
}

async fn release_a_permit(scene: &Scene, cut: Cut) -> bool {
    let held = permit(&scene.a, 3).await;
    let released = cut.cut(held.release()).await.inspect(|released| assert!(*released.as_ref().unwrap()));
    assert!(permit(&scene.b, 3).await.release().await.unwrap());
    released.is_some()
}

// Once polled it happens; repeating it is harmless.
async fn resize(scene: &Scene, cut: Cut) -> bool {
    semaphore(3).resize(&scene.a).await.unwrap();
    let completed = cut.cut(semaphore(5).resize(&scene.a)).await.map(Result::unwrap).is_some();
    until("it has happened", async || {
        (scene.count("SELECT permits::bigint FROM fencepost.semaphores").await == 5).then_some(())
    })
    .await;
    semaphore(3).resize(&scene.a).await.unwrap();
    completed
}

// Dropping the future stops what has been started: the scene allows no other owner and no session of one.

async fn start(scene: &Scene, cut: Cut) -> bool {
    stopped(cut.cut(Owner::start(&scene.pool)).await).await
}

async fn start_as_built(scene: &Scene, cut: Cut) -> bool {
    let builder = Owner::builder(&scene.pool).label("c").ttl(Duration::from_millis(500));
    stopped(cut.cut(builder.start()).await).await
}

async fn stopped(started: Option<fencepost::Result<Owner>>) -> bool {
    match started {
        Some(owner) => owner.unwrap().shutdown().await.map(|()| true).unwrap(),
        None => false,
    }
}

// Safe: it only watches.
async fn owner_lost(scene: &Scene, cut: Cut) -> bool {
    let c = owner(&scene.pool, "c", Duration::from_secs(10)).await;
    let watching = {
        let c = c.clone();
        async move { c.lost().await }
    };
    let (told, stopped) = tokio::join!(cut.cut(watching), c.shutdown());
    stopped.unwrap();
    assert!(told.is_none_or(|reason| reason == LossReason::Stopped), "{told:?}");
    assert_eq!(within("being told", c.lost()).await, LossReason::Stopped);
    told.is_some()
}

// Once polled it stops, also when the future is dropped.
async fn shutdown(scene: &Scene, cut: Cut) -> bool {
    let c = owner(&scene.pool, "c", Duration::from_secs(10)).await;
    let held = hold_when_free(&c, NAME).await;
    let completed = cut.cut(c.shutdown()).await.map(Result::unwrap).is_some();
    assert_eq!(within("the loss", held.lost()).await, LossReason::Stopped);
    completed
}

// It happens or not; repeating it is harmless.

async fn partitioned(scene: &Scene) -> PgConnection {
    let mut conn = connect(&scene.database.options().application_name("application")).await;
    let tables = "CREATE TABLE IF NOT EXISTS ledger (n int) PARTITION BY RANGE (n); \
                  CREATE TABLE IF NOT EXISTS ledger_1 PARTITION OF ledger FOR VALUES FROM (0) TO (9); \
                  CREATE TABLE IF NOT EXISTS ledger_2 PARTITION OF ledger FOR VALUES FROM (9) TO (99)";
    conn.execute(sqlx::raw_sql(tables)).await.unwrap();
    conn
}

async fn triggers(scene: &Scene) -> i64 {
    scene.count("SELECT count(*) FROM pg_trigger WHERE tgname = 'fencepost_fence'").await
}

async fn protect(scene: &Scene, cut: Cut) -> bool {
    let name = lease(NAME);
    let mut beside = partitioned(scene).await;
    let mut conn = scene.pool.acquire().await.unwrap();
    let completed =
        cut.cut(fence::protect(&mut conn, "ledger", name.name())).await.map(Result::unwrap).is_some();
    drop(conn);
    let installed = triggers(scene).await;
    assert!(installed == 3 || installed == 0 && !completed, "{installed} of 3");
    fence::protect(&mut beside, "ledger", name.name()).await.unwrap();
    assert_eq!(triggers(scene).await, 3);
    fence::unprotect(&mut beside, "ledger").await.unwrap();
    beside.close().await.unwrap();
    completed
}

async fn unprotect(scene: &Scene, cut: Cut) -> bool {
    let name = lease(NAME);
    let mut beside = partitioned(scene).await;
    fence::protect(&mut beside, "ledger", name.name()).await.unwrap();
    let mut conn = scene.pool.acquire().await.unwrap();
    let completed = cut.cut(fence::unprotect(&mut conn, "ledger")).await.map(Result::unwrap).is_some();
    drop(conn);
    let left = triggers(scene).await;
    assert!(left == 0 || left == 3 && !completed, "{left} of 3");
    fence::unprotect(&mut beside, "ledger").await.unwrap();
    assert_eq!(triggers(scene).await, 0);
    beside.close().await.unwrap();
    completed
}

async fn forget(scene: &Scene, cut: Cut) -> bool {
    const OLD: &str = "SELECT count(*) FROM fencepost.leases WHERE name LIKE 'old-%'";
    let make = "SELECT fencepost.release('old-' || n, a.token, a.grant_id) FROM generate_series(1, 3) n, \
                LATERAL fencepost.acquire('old-' || n, p_at_most => '1 minute') a";
    scene.observer.execute(make).await.unwrap();
    let mut conn = scene.pool.acquire().await.unwrap();
    let completed = cut.cut(prune(&mut conn, Duration::ZERO)).await.map(Result::unwrap).is_some();
    drop(conn);
    let left = scene.count(OLD).await;
    assert!(left == 0 || left == 3 && !completed, "{left} of 3");
    completed
}

// Dropping the future closes its connection; the transaction is rolled back, or had been committed.
async fn bring_the_schema(scene: &Scene, cut: Cut) -> bool {
    let bare: &PgPool = scene.bare().await;
    let completed = cut.cut(migrate(bare)).await.map(Result::unwrap).is_some();
    let closed = "SELECT count(*) = 1 FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'";
    until_true(bare, "its connection is closed", closed).await;
    let parts = "SELECT count(*) FROM pg_proc WHERE pronamespace = (SELECT oid FROM pg_namespace WHERE nspname = 'fencepost') \
                 AND proname IN ('owner_start', 'version')";
    let parts: i64 = sqlx::query_scalar(parts).fetch_one(bare).await.unwrap();
    assert!(parts == 2 || parts == 0 && !completed, "half a schema");
    completed
}

// The helpers for tests: the database may stay until the server ends; a session may or may not have ended.

async fn create(_scene: &Scene, cut: Cut) -> bool {
    cut.cut(TestDatabase::create()).await.map(Result::unwrap).is_some()
}

async fn create_on(scene: &Scene, cut: Cut) -> bool {
    let server = scene.server().await;
    cut.cut(TestDatabase::create_on(server)).await.map(Result::unwrap).is_some()
}

async fn terminate(scene: &Scene, cut: Cut) -> bool {
    let mut victim = connect(&scene.database.options().application_name("victim")).await;
    let pid: i32 = sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut victim).await.unwrap();
    let completed = cut.cut(scene.database.terminate(pid)).await.map(Result::unwrap).is_some();
    assert!(!scene.database.terminate(pid).await.unwrap() || !completed, "it had ended");
    assert!(victim.execute("SELECT 1").await.is_err());
    completed
}

async fn terminate_where(scene: &Scene, cut: Cut) -> bool {
    let mut victim = connect(&scene.database.options().application_name("victim")).await;
    let ended = cut.cut(scene.database.terminate_where("vict%")).await.map(Result::unwrap);
    assert!(ended.is_none_or(|ended| ended == 1));
    let again = scene.database.terminate_where("vict%").await.unwrap();
    assert!(again == 0 || ended.is_none(), "it had ended");
    assert!(victim.execute("SELECT 1").await.is_err());
    ended.is_some()
}

// A call that is cancelled still removes the database, by drop.
async fn close(scene: &Scene, cut: Cut) -> bool {
    let database = TestDatabase::create().await.unwrap();
    let name = database.name().to_owned();
    let completed = cut.cut(database.close()).await.map(Result::unwrap).is_some();
    until("the database is removed", async || {
        let there = sqlx::query("SELECT FROM pg_database WHERE datname = $1").bind(&name);
        there.fetch_optional(&scene.observer).await.unwrap().is_none().then_some(())
    })
    .await;
    completed
}

// A member that nobody has leaves again.
async fn join(scene: &Scene, cut: Cut) -> bool {
    cut.cut(one_partition().join(&scene.a)).await.map(Result::unwrap).is_some()
}

fn one_partition() -> Group {
    Group::named("orders", 1).unwrap().drain_within(Duration::ZERO).unwrap()
}

async fn member(scene: &Scene) -> Member {
    within("joining", one_partition().join(&scene.a)).await.unwrap()
}

async fn assigned(member: &mut Member) -> Partition {
    match within("being assigned it", member.next()).await.unwrap() {
        Change::Assigned(partition) => partition,
        other => panic!("{other:?}"),
    }
}

// Nothing is lost; what was assigned is told the next time.
async fn next(scene: &Scene, cut: Cut) -> bool {
    let mut member = member(scene).await;
    let told = cut.cut(member.next()).await.map(Result::unwrap);
    let completed = told.is_some();
    let partition = match told {
        None => assigned(&mut member).await,
        Some(Change::Assigned(partition)) => partition,
        Some(other) => panic!("{other:?}"),
    };
    assert!(partition.is_held());
    completed
}

// Once polled it leaves, also when the future is dropped.
async fn leave(scene: &Scene, cut: Cut) -> bool {
    let member = member(scene).await;
    cut.cut(member.leave()).await.map(Result::unwrap).is_some()
}

// Safe: it only watches.

async fn revoked(scene: &Scene, cut: Cut) -> bool {
    let mut member = member(scene).await;
    let partition = assigned(&mut member).await;
    let leaving = tokio::spawn(member.leave());
    let told = cut.cut(partition.revoked()).await;
    assert_eq!(within("being told", partition.revoked()).await, Duration::ZERO);
    within("leaving", leaving).await.unwrap().unwrap();
    told.is_some()
}

async fn lose_a_partition(scene: &Scene, cut: Cut) -> bool {
    let mut member = member(scene).await;
    let partition = assigned(&mut member).await;
    let leaving = tokio::spawn(member.leave());
    let told = cut.cut(partition.lost()).await;
    assert_eq!(within("being told", partition.lost()).await, LossReason::Released);
    within("leaving", leaving).await.unwrap().unwrap();
    told.is_some()
}

// As of the lease.

async fn begin_for_a_partition(scene: &Scene, cut: Cut) -> bool {
    let mut member = member(scene).await;
    let partition = assigned(&mut member).await;
    cut.cut(partition.begin(&scene.pool)).await.map(Result::unwrap).is_some()
}

async fn pass_a_partitions_fence(scene: &Scene, cut: Cut) -> bool {
    let mut member = member(scene).await;
    let partition = assigned(&mut member).await;
    let mut tx = scene.pool.begin().await.unwrap();
    cut.cut(partition.fence(&mut tx)).await.map(Result::unwrap).is_some()
}

async fn release_a_partition(scene: &Scene, cut: Cut) -> bool {
    let mut member = member(scene).await;
    let partition = assigned(&mut member).await;
    cut.cut(partition.release()).await.map(Result::unwrap).is_some()
}
