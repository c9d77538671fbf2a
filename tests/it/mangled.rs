//! Replies that no server sends, to everything this library asks: a result or a typed error within a deadline, no
//! panic of ours, and when the network is well again so is the owner.
//!
//! sqlx panics on some of them (a message shorter than its own length, a row with fewer values than columns, a
//! value that ends behind its row, an empty `bool`, a `ReadyForQuery` or `BackendKeyData` without a body). Such a
//! panic counts as a broken answer (`src/driver.rs`); the hook here tells them from ours by their place.

use std::collections::{BTreeMap, BTreeSet};
use std::panic;
use std::sync::{Arc, Mutex, Once};
use std::time::Duration;

use fencepost::{Error, Owner, Wait, fence, migrate, prune};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::mangle::Mangler;
use crate::proxy::Proxy;
use crate::support::{database, lease, until, within};

/// How many seeds a run tries, and how many of them at a time.
const SEEDS: u64 = 32;
const AT_A_TIME: usize = 8;

const TTL: Duration = Duration::from_millis(600);

/// How long a caller waits for what runs on connections of its own, which nobody else bounds.
const PATIENCE: Duration = Duration::from_millis(300);

/// Where threads of this process have panicked, and in which.
static PANICS: Mutex<BTreeSet<(String, String)>> = Mutex::new(BTreeSet::new());

fn watch_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let print = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            let place = panic.location().map_or("?", panic::Location::file);
            let thread = std::thread::current().name().unwrap_or("?").to_owned();
            PANICS.lock().unwrap().insert((thread, panic.location().unwrap().to_string()));
            if !is_of_the_driver(place) {
                print(panic);
            }
        }));
    });
}

/// Of sqlx, or of what it reads bytes with.
fn is_of_the_driver(place: &str) -> bool {
    ["/sqlx-", "/bytes-", "/byteorder-"].iter().any(|part| place.contains(part))
}

/// What the calls came to.
#[derive(Debug, Default)]
struct Tally {
    ok: u32,
    failed: BTreeMap<String, u32>,
    impatient: u32,
    mangled: u32,
}

impl Tally {
    fn count<T>(&mut self, what: &str, outcome: Result<T, Error>) -> Option<T> {
        match outcome {
            Ok(value) => {
                self.ok += 1;
                Some(value)
            }
            Err(error) => {
                assert!(!matches!(error, Error::Stopped | Error::Misuse { .. }), "{what}: {error:?}");
                assert!(!error.to_string().is_empty());
                let text = format!("{error:?}");
                let kind = text.split(|c: char| !c.is_alphanumeric()).next().unwrap();
                *self.failed.entry(kind.to_owned()).or_default() += 1;
                None
            }
        }
    }

    /// The same of a future on a connection of the caller's.
    async fn patiently<T>(
        &mut self,
        what: &str,
        future: impl Future<Output = Result<T, Error>>,
    ) -> Option<T> {
        match timeout(PATIENCE, future).await {
            Ok(outcome) => self.count(what, outcome),
            Err(_elapsed) => {
                self.impatient += 1;
                None
            }
        }
    }
}

async fn one(seed: u64, proxy: Proxy) -> Tally {
    let mut tally = Tally::default();
    let pool = PgPoolOptions::new()
        .max_connections(2)
        .acquire_timeout(Duration::from_secs(1))
        .connect_lazy_with(proxy.options());
    let name = format!("report-{seed}");
    let report = lease(&name);
    let at = |step: &str| format!("{step}, FENCEPOST_SEED={seed}");
    let start = || Owner::builder(&pool).label(&name).ttl(TTL).start();

    // A start that may fail, and one that succeeds before the trouble begins.
    let mangler = Arc::new(Mutex::new(Mangler::new(seed)));
    let trouble = || {
        let mangler = Arc::clone(&mangler);
        proxy.mangle(Some(Box::new(move |message| mangler.lock().unwrap().pass(message))));
    };
    trouble();
    let started = tally.count(&at("start"), within(&at("the start"), start()).await);
    proxy.mangle(None);
    proxy.hang_up();
    // On a busy machine a start may need longer than its bound.
    let start = async || until(&at("a start"), async || start().await.ok()).await;
    let old = match started {
        Some(owner) => owner,
        None => start().await,
    };
    trouble();
    for _ in 0..3 {
        let tried = within(&at("a try"), report.try_acquire(&old)).await;
        let held = tally.count(&at("try_acquire"), tried).flatten();
        let waited = report.acquire(&old, Wait::at_most(Duration::from_millis(100)));
        let waited = tally.count(&at("acquire"), within(&at("a wait"), waited).await);
        if let Some(held) = held.or(waited) {
            if let Some(mut tx) = tally.patiently(&at("begin"), held.begin(&pool)).await {
                tally.patiently(&at("fence"), held.fence(&mut tx)).await;
                let checked = fence::check(&mut tx, held.name(), held.grant());
                tally.patiently(&at("check"), checked).await;
                let advanced = fence::advance(&mut tx, held.name(), held.token());
                tally.patiently(&at("advance"), advanced).await;
            }
            let released = within(&at("the release"), held.release()).await;
            tally.count(&at("release"), released);
        }
        tally.patiently(&at("migrate"), migrate(&pool)).await;
        // Connecting is the pool's own matter: in a task, which may panic.
        let of_pool = pool.clone();
        let connected = tokio::spawn(async move { timeout(PATIENCE, of_pool.acquire()).await });
        if let Ok(Ok(Ok(mut conn))) = connected.await {
            tally.patiently(&at("prune"), prune(&mut conn, Duration::from_hours(1))).await;
        }
    }

    // The network is well again. What was mangled is out of step, and ends.
    proxy.mangle(None);
    proxy.hang_up();
    tally.mangled = mangler.lock().unwrap().done;
    let work = async || {
        let held = match report.try_acquire(&old).await {
            Err(Error::Stopped) => panic!("{}", at("the old owner has ended")),
            tried => tried?,
        };
        let Some(held) = held else { return Ok(false) };
        held.begin(&pool).await?.commit().await?;
        held.release().await
    };
    // Its life may still be lost, for the beats that failed; then under the next one.
    until(&at("the old owner and the pool recover"), async || work().await.unwrap_or(false).then_some(()))
        .await;
    let fresh = start().await;
    drop(
        until(&at("a fresh owner acquires"), async || report.try_acquire(&fresh).await.ok().flatten()).await,
    );
    for owner in [old, fresh] {
        let stopped = within(&at("the shutdown"), owner.shutdown()).await;
        assert!(stopped.as_ref().err().is_none_or(Error::is_timeout), "{}: {stopped:?}", at("the shutdown"));
    }
    tally
}

#[tokio::test(flavor = "multi_thread")]
async fn replies_that_no_server_sends_are_typed_errors_and_the_owner_recovers() {
    watch_panics();
    let (database, pool) = database().await;
    let given = std::env::var("FENCEPOST_SEED").ok().and_then(|seed| seed.parse::<u64>().ok());
    let mut seeds: Vec<u64> = match given {
        Some(seed) => vec![seed],
        None => (0..SEEDS).map(|_| u64::from(sqlx::types::Uuid::new_v4().as_fields().0)).collect(),
    };
    let (mut running, mut total) = (JoinSet::new(), Tally::default());
    loop {
        while running.len() < AT_A_TIME
            && let Some(seed) = seeds.pop()
        {
            let proxy = Proxy::before(database.options()).await;
            // On a thread of its own, since its futures stay on one.
            let runtime = Handle::current();
            running.spawn_blocking(move || runtime.block_on(one(seed, proxy)));
        }
        let Some(done) = running.join_next().await else { break };
        let tally = done.expect("the seed is named above");
        total.ok += tally.ok;
        total.impatient += tally.impatient;
        total.mangled += tally.mangled;
        for (kind, times) in tally.failed {
            *total.failed.entry(kind).or_default() += times;
        }
    }
    let panics = PANICS.lock().unwrap().clone();
    println!("{total:?}\npanics: {panics:#?}");
    let ours: Vec<_> = panics.iter().filter(|(_, place)| place.starts_with("src/")).collect();
    assert!(ours.is_empty(), "{ours:?}");
    nothing_is_left(&pool).await;
    if given.is_none() {
        assert!(total.mangled > 100 && total.ok > 100 && total.failed.len() > 2, "{total:?}");
    }
}

async fn nothing_is_left(pool: &PgPool) {
    let gone = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() \
                AND (application_name LIKE 'fencepost%' OR state LIKE 'idle in transaction%')) \
                AND NOT EXISTS (SELECT FROM fencepost.waiters)";
    crate::support::until_true(pool, "no session, transaction or ticket is left", gone).await;
}
