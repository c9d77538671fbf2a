//! A run: a server, workers, faults from a seed, healing, and the facts that are left to judge.
//!
//! | fault | how |
//! |---|---|
//! | paused at random | SIGSTOP for 0.3 to 3 ttl, SIGCONT |
//! | paused where it hurts | on a worker's request, until somebody else has been granted more (and has written) |
//! | killed | SIGKILL, a fresh process in its place |
//! | session ended | `pg_terminate_backend`: heartbeats, calls, the application's, inside of fenced transactions |
//! | rolled back | by the workers themselves |

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use fencepost::testing::Server;
use sqlx::postgres::PgPoolOptions;
use sqlx::{ConnectOptions as _, PgPool, Row as _};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::canary::Canary;
use crate::checker::{Facts, Row};
use crate::dice::Dice;
use crate::fleet::{Fleet, Target};
use crate::history::{self, now};
use crate::line;
use crate::worker::{Ask, Mode, Place};

/// The longest that anything here may take, on a slow machine too. Not a measurement.
pub(crate) const DEADLINE: Duration = Duration::from_secs(30);

/// A paused holder that kept everybody else out for [`BLOCKED_FOR`], twenty times a ttl and more.
pub(crate) const BLOCKED: &str = "paused, and nobody took over";
pub(crate) const BLOCKED_FOR: Duration = Duration::from_secs(5);

/// No more than these are stopped at a time: somebody must take over.
const MOST_STOPPED: usize = 3;

/// Names to contend for, and more of them to wait for.
const NAMES: [&str; 4] = ["amber", "birch", "cedar", "dogwood"];

const TABLES: &str = "\
    CREATE TABLE counter (name text PRIMARY KEY, value bigint NOT NULL); \
    CREATE TABLE twin (name text PRIMARY KEY, value bigint NOT NULL); \
    CREATE TABLE log (name text, token bigint, value bigint, process integer, op bigint)";

/// The sessions that a fault may end, by what they are.
const SESSIONS: [(&str, &str); 5] = [
    (
        "heartbeat's session ended",
        "application_name LIKE 'fencepost %' AND query LIKE '%fencepost.heartbeat%'",
    ),
    (
        "call's session ended",
        "application_name LIKE 'fencepost %' AND query NOT LIKE '%fencepost.heartbeat%' AND query NOT LIKE 'LISTEN%'",
    ),
    ("listening session ended", "application_name LIKE 'fencepost %' AND query LIKE 'LISTEN%'"),
    ("application's session ended", "application_name = 'faults worker' AND xact_start IS NULL"),
    ("fenced session ended", "application_name = 'faults worker' AND state LIKE 'idle in transaction%'"),
];

/// What to run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) length: Duration,
    pub(crate) workers: usize,
    pub(crate) mode: Mode,
    pub(crate) canary: Option<Canary>,
}

/// What came of it.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) facts: Facts,
    pub(crate) faults: BTreeMap<&'static str, u64>,
    /// How long until each name had been granted anew after the last fault; none: not in time.
    pub(crate) healed: Option<Duration>,
    /// A fresh process could take each name in the end.
    pub(crate) taken_once_more: bool,
    /// Processes that did not end well.
    pub(crate) failed: Vec<String>,
    /// What was left behind.
    pub(crate) left: Vec<String>,
    pub(crate) processes: i32,
    /// Where the histories are.
    pub(crate) folder: PathBuf,
}

pub(crate) async fn run(plan: Plan) -> Outcome {
    let server = Server::builder().start().unwrap();
    let options = server.options().application_name("faults controller").disable_statement_logging();
    let pool = PgPoolOptions::new().max_connections(6).connect_with(options).await.unwrap();
    fencepost::migrate(&pool).await.unwrap();
    let count = if plan.mode == Mode::Wait { NAMES.len() } else { 3 };
    let names: Vec<String> = NAMES.iter().take(count).map(|name| (*name).to_owned()).collect();
    sqlx::raw_sql(TABLES).execute(&pool).await.unwrap();
    for fill in
        ["INSERT INTO counter SELECT unnest($1::text[]), 0", "INSERT INTO twin SELECT unnest($1::text[]), 0"]
    {
        sqlx::query(fill).bind(&names).execute(&pool).await.unwrap();
    }
    if plan.mode == Mode::Wait {
        line::watch(&pool).await;
    }
    if let Some(canary) = plan.canary {
        canary.install(&pool).await;
    }
    let folder = format!("faults-{}-{:?}-{}", std::process::id(), plan.mode, plan.seed);
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(folder);
    fs::create_dir_all(&folder).unwrap();

    let (asks, mut asked) = mpsc::unbounded_channel();
    let fleet = Arc::new(Fleet::new(plan.seed, server.url(), folder.clone(), names.clone(), asks, plan.mode));
    fleet.start(plan.workers);
    let faults = inject(plan, &fleet, &pool, &mut asked).await;

    // From here on nobody is stopped any more.
    let answering = async {
        while let Some((target, _)) = asked.recv().await {
            fleet.refuse(target);
        }
    };
    // A canary may have made a mistake of which nothing heals.
    let patience = if plan.canary.is_some() { Duration::from_secs(3) } else { DEADLINE };
    let healing = async {
        let healed = heal(&pool, &names, patience).await;
        if plan.mode == Mode::Wait {
            line::quit(&pool).await;
        }
        let failed = fleet.finish().await;
        (healed, failed, fleet.once_more().await)
    };
    let (healed, failed, taken_once_more) = tokio::select! {
        healing = healing => healing,
        () = answering => unreachable!("the fleet keeps its sender"),
    };
    let left = left_behind(&pool).await;
    let facts = Facts {
        records: history::read(&folder),
        stops: fleet.stops(),
        log: log(&pool).await,
        counters: values(&pool, "SELECT name, value FROM counter").await,
        twins: values(&pool, "SELECT name, value FROM twin").await,
        line: if plan.mode == Mode::Wait { line::read(&pool).await } else { Vec::new() },
        clock: clock(&pool).await,
    };
    pool.close().await;
    let processes = fleet.started();
    Outcome { facts, faults, healed, taken_once_more, failed, left, processes, folder }
}

/// Faults, one after the other and some beside each other, until the time is over and all are awake again.
async fn inject(
    plan: Plan,
    fleet: &Arc<Fleet>,
    pool: &PgPool,
    asked: &mut mpsc::UnboundedReceiver<(Target, Ask)>,
) -> BTreeMap<&'static str, u64> {
    let mut dice = Dice::new(plan.seed ^ 0x5eed);
    let mut faults = BTreeMap::new();
    let mut stopping = JoinSet::new();
    let end = Instant::now() + plan.length;
    let mut next = Instant::now() + Duration::from_millis(300);
    while Instant::now() < end {
        tokio::select! {
            Some((target, ask)) = asked.recv() => {
                if fleet.stopped() < MOST_STOPPED {
                    stopping.spawn(stop_where_it_hurts(Arc::clone(fleet), pool.clone(), target, ask));
                } else {
                    fleet.refuse(target);
                }
                continue;
            }
            Some(fault) = stopping.join_next(), if !stopping.is_empty() => {
                if let Some(fault) = fault.unwrap() {
                    *faults.entry(fault).or_default() += 1;
                }
                continue;
            }
            () = sleep_until(next.min(end)) => {}
        }
        // Load, not synchronisation. A longer ttl takes longer to get over a kill.
        let waiting = plan.mode == Mode::Wait;
        let most = if waiting { 150 } else { 50 };
        next = Instant::now() + Duration::from_millis(dice.between(5, most));
        let kills = if waiting { 5 } else { 8 };
        let fault = match dice.below(100) {
            0..30 => {
                if fleet.stopped() < MOST_STOPPED
                    && let Some(target) = fleet.any()
                {
                    let share = dice.between(30, 300);
                    stopping.spawn(stop_for_a_while(Arc::clone(fleet), target, share));
                }
                None
            }
            roll if (30..30 + kills).contains(&roll) => fleet.any().map(|target| {
                fleet.replace(target);
                "killed"
            }),
            _ => {
                let (what, which) = *dice.pick(&SESSIONS);
                end_a_session(pool, which, &mut dice).await.then_some(what)
            }
        };
        if let Some(fault) = fault {
            *faults.entry(fault).or_default() += 1;
        }
    }
    // Those that are stopped wait for others to take over, so the others must go on.
    while !stopping.is_empty() {
        tokio::select! {
            Some((target, _)) = asked.recv() => fleet.refuse(target),
            Some(fault) = stopping.join_next() => {
                if let Some(fault) = fault.unwrap() {
                    *faults.entry(fault).or_default() += 1;
                }
            }
        }
    }
    faults
}

/// `share`: of the ttl, in percent.
async fn stop_for_a_while(fleet: Arc<Fleet>, target: Target, share: u64) -> Option<&'static str> {
    let ttl = fleet.ttl(target)?;
    let stood = fleet.stop(target).await?;
    sleep(ttl * u32::try_from(share).unwrap() / 100).await;
    fleet.wake(target, stood, false);
    Some("paused at random")
}

/// Stopped where it asked for it, until somebody else has been granted a larger token (and has written).
async fn stop_where_it_hurts(
    fleet: Arc<Fleet>,
    pool: PgPool,
    target: Target,
    ask: Ask,
) -> Option<&'static str> {
    let Some(stood) = fleet.stop(target).await else {
        fleet.refuse(target);
        return None;
    };
    let overtaken = timeout(BLOCKED_FOR, overtaken(pool, ask.clone())).await.is_ok();
    fleet.wake(target, stood, true);
    Some(match (overtaken, ask.place) {
        (false, Place::Twin) => "paused, and nobody wrote",
        (false, _) => BLOCKED,
        (true, Place::Fenced) => "paused in a fenced transaction",
        (true, Place::Twin) => "paused in an unfenced write",
        (true, Place::Idle) => "paused holding",
    })
}

async fn overtaken(pool: PgPool, ask: Ask) {
    loop {
        let overtaken = sqlx::query_scalar(
            "SELECT (SELECT token FROM fencepost.leases WHERE name = $1) <> $2 \
             AND (NOT $3 OR (SELECT value FROM twin WHERE name = $1) > $4)",
        );
        let overtaken = overtaken.bind(ask.name.clone()).bind(ask.token);
        let overtaken = overtaken.bind(ask.place == Place::Twin).bind(ask.value);
        if overtaken.fetch_one(&pool).await.unwrap() {
            return;
        }
        sleep(Duration::from_millis(1)).await;
    }
}

async fn end_a_session(pool: &PgPool, which: &str, dice: &mut Dice) -> bool {
    let query = format!("SELECT pid FROM pg_stat_activity WHERE {which} ORDER BY pid");
    let pids: Vec<i32> = sqlx::query_scalar(sqlx::AssertSqlSafe(query)).fetch_all(pool).await.unwrap();
    if pids.is_empty() {
        return false;
    }
    sqlx::query_scalar("SELECT pg_terminate_backend($1)")
        .bind(*dice.pick(&pids))
        .fetch_one(pool)
        .await
        .unwrap()
}

/// I12: how long until each name is granted anew.
async fn heal(pool: &PgPool, names: &[String], patience: Duration) -> Option<Duration> {
    let began = now();
    let last: String = sqlx::query_scalar("SELECT clock_timestamp()::text").fetch_one(pool).await.unwrap();
    let all = async {
        loop {
            let query = "SELECT count(*) FROM fencepost.leases WHERE granted_at > $1::timestamptz";
            let anew: i64 = sqlx::query_scalar(query).bind(&last).fetch_one(pool).await.unwrap();
            if usize::try_from(anew).unwrap() == names.len() {
                return;
            }
            sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(patience, all).await.ok().map(|()| Duration::from_nanos(now() - began))
}

/// I11: sessions, transactions and locks that outlive their processes, and what is still held.
async fn left_behind(pool: &PgPool) -> Vec<String> {
    const LEFT: &str = "\
        SELECT 'a session: ' || application_name || ', ' || coalesce(state, '?') || ', ' || query \
          FROM pg_stat_activity WHERE backend_type = 'client backend' AND application_name <> 'faults controller' \
        UNION ALL SELECT 'idle in transaction: ' || application_name FROM pg_stat_activity \
          WHERE state LIKE 'idle in transaction%' \
        UNION ALL SELECT 'an advisory lock' FROM pg_locks WHERE locktype = 'advisory' \
        UNION ALL SELECT 'a held lease: ' || l.name FROM fencepost.leases l JOIN fencepost.owners o ON o.id = l.owner \
          WHERE l.released_at IS NULL AND o.expires_at > clock_timestamp() \
        UNION ALL SELECT 'a ticket of the living: ' || w.name FROM fencepost.waiters w \
          JOIN fencepost.owners o ON o.id = w.owner WHERE o.expires_at > clock_timestamp()";
    let look = async || -> Vec<String> { sqlx::query_scalar(LEFT).fetch_all(pool).await.unwrap() };
    // A session that was ended takes a moment to go.
    let clean = async {
        while !look().await.is_empty() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    match timeout(Duration::from_secs(10), clean).await {
        Ok(()) => Vec::new(),
        Err(_) => look().await,
    }
}

async fn log(pool: &PgPool) -> Vec<Row> {
    let rows = sqlx::query("SELECT name, token, value, process, op FROM log").fetch_all(pool).await.unwrap();
    rows.iter()
        .map(|row| Row {
            name: row.get("name"),
            token: row.get("token"),
            value: row.get("value"),
            process: row.get("process"),
            op: row.get("op"),
        })
        .collect()
}

/// How many nanoseconds the clock of the histories is ahead of the database's.
async fn clock(pool: &PgPool) -> i64 {
    let query = "SELECT (date_part('epoch', clock_timestamp()) * 1000000)::bigint";
    // The answer takes its time: the quickest of a few comes closest.
    let mut ahead = i64::MAX;
    for _ in 0..20 {
        let micros: i64 = sqlx::query_scalar(query).fetch_one(pool).await.unwrap();
        ahead = ahead.min(i64::try_from(now()).unwrap() - micros * 1_000);
    }
    ahead
}

async fn values(pool: &PgPool, query: &'static str) -> BTreeMap<String, i64> {
    sqlx::query_as(query).fetch_all(pool).await.unwrap().into_iter().collect()
}

/// The value, as soon as the probe has one; fails after [`DEADLINE`].
pub(crate) async fn until<T>(what: &str, mut probe: impl FnMut() -> Option<T>) -> T {
    let found = async {
        loop {
            if let Some(found) = probe() {
                return found;
            }
            sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(DEADLINE, found).await.unwrap_or_else(|_| panic!("not in {DEADLINE:?}: {what}"))
}
