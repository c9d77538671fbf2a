//! What the tests share. They wait for an event or a state of the database with a deadline, never for a time.

use std::time::Duration;

use fencepost::testing::TestDatabase;
use fencepost::{HeldLease, Lease, Owner};
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions as _, PgConnection, PgPool};
use tokio::time::{MissedTickBehavior, interval, timeout};

/// The longest that anything here may take, on a slow machine too. Not a measurement.
pub(crate) const DEADLINE: Duration = Duration::from_secs(30);

/// A ttl that outlasts a test: nothing dies unless the test makes it.
pub(crate) const LONG: Duration = Duration::from_mins(1);

/// A ttl that has to be survived, on a busy machine too, by a test that waits for several of it.
pub(crate) const TOUGH: Duration = Duration::from_secs(2);

/// A ttl whose end a test waits for.
pub(crate) const SHORT: Duration = Duration::from_millis(400);

pub(crate) async fn database() -> (TestDatabase, PgPool) {
    let database = TestDatabase::create().await.unwrap();
    let pool = database.pool();
    (database, pool)
}

pub(crate) async fn owner(pool: &PgPool, label: &str, ttl: Duration) -> Owner {
    Owner::builder(pool).label(label).ttl(ttl).start().await.unwrap()
}

/// The lease of this name, which must be free.
pub(crate) async fn hold(owner: &Owner, name: &str) -> HeldLease {
    lease(name).try_acquire(owner).await.unwrap().expect("the lease is free")
}

pub(crate) fn lease(name: &str) -> Lease {
    Lease::named(name).unwrap()
}

/// Acquires as soon as it is free.
pub(crate) async fn hold_when_free(owner: &Owner, name: &str) -> HeldLease {
    let lease = lease(name);
    until(&format!("{name} is free"), async || lease.try_acquire(owner).await.unwrap()).await
}

pub(crate) async fn connect(options: &PgConnectOptions) -> PgConnection {
    options.connect().await.unwrap()
}

/// The value, as soon as the probe has one; fails after [`DEADLINE`].
pub(crate) async fn until<T>(what: &str, mut probe: impl AsyncFnMut() -> Option<T>) -> T {
    let mut tick = interval(Duration::from_millis(3));
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    within(what, async {
        loop {
            tick.tick().await;
            if let Some(found) = probe().await {
                return found;
            }
        }
    })
    .await
}

/// The same for a query that answers yes or no.
pub(crate) async fn until_true(pool: &PgPool, what: &str, query: &'static str) {
    until(what, async || sqlx::query_scalar::<_, bool>(query).fetch_one(pool).await.unwrap().then_some(()))
        .await;
}

/// What the future gives; fails after [`DEADLINE`].
pub(crate) async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    timeout(DEADLINE, future).await.unwrap_or_else(|_| panic!("not in {DEADLINE:?}: {what}"))
}

/// Ends the sessions of owners on this database whose last statement contains `like`, and says how many.
pub(crate) async fn terminate(pool: &PgPool, like: &str) -> i64 {
    sqlx::query_scalar(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
         WHERE datname = current_database() AND application_name LIKE 'fencepost%' AND query LIKE $1",
    )
    .bind(format!("%{like}%"))
    .fetch_one(pool)
    .await
    .unwrap()
}

/// The id of the living owner with this label: a secret, which only the schema's owner can read.
pub(crate) async fn owner_id(pool: &PgPool, label: &str) -> sqlx::types::Uuid {
    sqlx::query_scalar(
        "SELECT id FROM fencepost.owners WHERE label = $1 AND expires_at > clock_timestamp() ORDER BY started_at DESC",
    )
    .bind(label)
    .fetch_one(pool)
    .await
    .unwrap()
}
