//! A run of a cell: its stage, its workers, faults from a seed, healing, and the facts that are left to judge.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use sqlx::{PgPool, Row as _};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::canary::Canary;
use crate::cell::Cell;
use crate::checker::{Facts, Row};
use crate::claims;
use crate::dice::Dice;
use crate::fault::Fault;
use crate::fleet::{Fleet, Target};
use crate::history::{self, now};
use crate::line;
use crate::locks::{self, LOCK};
use crate::sharing::Shared;
use crate::slots;
use crate::stage::{Stage, Way};
use crate::versions;
use crate::worker::versioning::ROW;
use crate::worker::{Ask, ELECTION, Mode, Place, SEMAPHORE, sharing};

/// The longest that anything here may take, on a slow machine too. Not a measurement.
pub(crate) const DEADLINE: Duration = Duration::from_secs(30);

/// A paused holder that kept everybody else out for [`BLOCKED_FOR`], several times any ttl.
pub(crate) const BLOCKED: &str = "paused, and nobody took over";
pub(crate) const BLOCKED_FOR: Duration = Duration::from_secs(10);

/// No more than these are stopped or out of reach at a time: somebody must take over.
pub(crate) const MOST_STOPPED: usize = 3;

/// Names to contend for.
const NAMES: [&str; 4] = ["amber", "birch", "cedar", "dogwood"];

const TABLES: &str = "\
    CREATE TABLE counter (name text PRIMARY KEY, value bigint NOT NULL); \
    CREATE TABLE twin (name text PRIMARY KEY, value bigint NOT NULL); \
    CREATE TABLE log (name text, token bigint, value bigint, process integer, op bigint)";

/// The database writes down what only it sees: an owner that lives on though it was found dead and something was
/// taken over from it. Looked at when the heartbeat commits, since it may have begun before that.
const WATCH: &str = "\
    CREATE TABLE taken_from (owner uuid); CREATE INDEX ON taken_from (owner); \
    CREATE TABLE revived (owner uuid); \
    CREATE FUNCTION note_takeover() RETURNS trigger LANGUAGE plpgsql AS \
        'BEGIN INSERT INTO public.taken_from VALUES (OLD.owner); RETURN NULL; END'; \
    CREATE TRIGGER note_takeover AFTER UPDATE ON fencepost.leases FOR EACH ROW \
        WHEN (OLD.released_at IS NULL AND OLD.expires_at IS NULL AND NEW.grant_id <> OLD.grant_id) \
        EXECUTE FUNCTION note_takeover(); \
    CREATE FUNCTION note_revival() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS \
        'BEGIN \
            IF OLD.expires_at = ''epoch'' OR EXISTS (SELECT FROM public.taken_from t WHERE t.owner = NEW.id) THEN \
                INSERT INTO public.revived VALUES (NEW.id); \
            END IF; \
            RETURN NULL; \
        END'; \
    CREATE CONSTRAINT TRIGGER note_revival AFTER UPDATE ON fencepost.owners DEFERRABLE INITIALLY DEFERRED \
        FOR EACH ROW WHEN (NEW.expires_at > OLD.expires_at) EXECUTE FUNCTION note_revival()";

/// What to run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) cell: &'static Cell,
    pub(crate) seed: u64,
    pub(crate) length: Duration,
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
    /// How partitions were shared out in the end, where there were any.
    pub(crate) shared: Option<Shared>,
    /// Where the histories are.
    pub(crate) folder: PathBuf,
}

/// What came of it, or why it cannot be run on this machine.
pub(crate) async fn run(plan: Plan) -> Result<Outcome, &'static str> {
    let cell = plan.cell;
    let stage = Arc::new(Stage::set(cell.setting, cell.workers).await?);
    let pool = stage.pool();
    let names = names(plan, &pool).await;
    prepare(cell, &pool, &names).await;
    if let Some(canary) = plan.canary {
        canary.install(&pool).await;
    }
    let folder = format!("faults-{}-{}", std::process::id(), plan.seed);
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(folder);
    fs::create_dir_all(&folder).unwrap();

    let (asks, mut asked) = mpsc::unbounded_channel();
    let fleet = Arc::new(Fleet::new(plan, Arc::clone(&stage), folder.clone(), names.clone(), asks)?);
    fleet.start(cell.workers);
    let faults = inject(plan, &fleet, &mut asked).await;

    // From here on nobody is stopped any more, and nothing stands in the way.
    stage.clear();
    let answering = async {
        while let Some((target, _)) = asked.recv().await {
            fleet.refuse(target);
        }
    };
    let pool = stage.pool();
    // A canary may have made a mistake of which nothing heals.
    let patience = if plan.canary.is_some() { Duration::from_secs(4) } else { DEADLINE };
    let healing = async {
        let mut shared = None;
        let healed = match cell.mode {
            Mode::Claim => claims::heal(&pool, patience).await,
            Mode::Lock => locks::heal(&pool, &names, patience).await,
            Mode::Slot => slots::heal(&pool, patience).await,
            Mode::Version => versions::heal(&pool, &names, patience).await,
            Mode::Share => shared.insert(crate::sharing::watch(&pool, patience).await).even,
            _ => heal(&pool, &names, patience).await,
        };
        if has_line(cell) {
            line::quit(&pool).await;
        }
        let failed = fleet.finish().await;
        (healed, shared, failed, fleet.once_more().await)
    };
    let (healed, shared, failed, taken_once_more) = tokio::select! {
        healing = healing => healing,
        () = answering => unreachable!("the fleet keeps its sender"),
    };
    let left = left_behind(&pool, cell.setting.way == Way::Pooler).await;
    let facts = facts(cell, &pool, &folder, &fleet).await;
    pool.close().await;
    let processes = fleet.started();
    Ok(Outcome { facts, faults, healed, taken_once_more, failed, left, processes, shared, folder })
}

/// What a cell's workers contend for.
async fn names(plan: Plan, pool: &PgPool) -> Vec<String> {
    let kind = match plan.cell.mode {
        Mode::Share => return sharing::names(),
        Mode::Slot => return slots::names(pool, plan.length).await,
        Mode::Lead => ELECTION,
        Mode::Permits => SEMAPHORE,
        Mode::Lock => LOCK,
        Mode::Version => ROW,
        _ => "",
    };
    NAMES.iter().take(plan.cell.names).map(|name| format!("{kind}{name}")).collect()
}

/// Whether the database writes down who waits and who is served; what it notes would not outlive a crash.
fn has_line(cell: &Cell) -> bool {
    cell.mode == Mode::Wait && !cell.forgets()
}

/// The tables of the application, and what the database itself writes down.
async fn prepare(cell: &Cell, pool: &PgPool, names: &[String]) {
    sqlx::raw_sql(TABLES).execute(pool).await.unwrap();
    for fill in
        ["INSERT INTO counter SELECT unnest($1::text[]), 0", "INSERT INTO twin SELECT unnest($1::text[]), 0"]
    {
        sqlx::query(fill).bind(names).execute(pool).await.unwrap();
    }
    sqlx::raw_sql(WATCH).execute(pool).await.unwrap();
    if has_line(cell) {
        line::watch(pool).await;
    }
    match cell.mode {
        Mode::Claim => claims::fill(pool).await,
        Mode::Slot => slots::prepare(pool).await,
        Mode::Version => versions::fill(pool, names).await,
        _ => {}
    }
}

/// What is there to judge when all have ended.
async fn facts(cell: &Cell, pool: &PgPool, folder: &Path, fleet: &Fleet) -> Facts {
    Facts {
        records: history::read(folder),
        stops: fleet.stops(),
        log: log(pool).await,
        counters: values(pool, "SELECT name, value FROM counter").await,
        twins: values(pool, "SELECT name, value FROM twin").await,
        line: if has_line(cell) { line::read(pool).await } else { Vec::new() },
        clock: clock(pool).await,
        claimed: match cell.mode {
            Mode::Claim => claims::read(pool).await,
            Mode::Slot => slots::claimed(pool).await,
            _ => claims::Claimed::default(),
        },
        slotted: if cell.mode == Mode::Slot { slots::read(pool).await } else { slots::Slotted::default() },
        versions: if cell.mode == Mode::Version {
            versions::read(pool).await
        } else {
            versions::Versions::default()
        },
        revived: sqlx::query_scalar("SELECT owner::text FROM revived").fetch_all(pool).await.unwrap(),
        failed_over: fleet.failover().filter(|_| cell.setting.standby == Some(false)),
        calm: cell.calm,
        trust: (cell.mode == Mode::Lock).then(|| locks::trust(cell)),
    }
}

/// Faults, beside each other, until the time is over and all are awake and reachable again.
async fn inject(
    plan: Plan,
    fleet: &Arc<Fleet>,
    asked: &mut mpsc::UnboundedReceiver<(Target, Ask)>,
) -> BTreeMap<&'static str, u64> {
    let cell = plan.cell;
    let mut dice = Dice::new(plan.seed ^ 0x5eed);
    let mut faults = BTreeMap::new();
    let mut striking = JoinSet::new();
    let began = Instant::now();
    let mut next = began + Duration::from_millis(300);
    // On a slow machine, or by bad luck, for longer: until it has shown something.
    let longest = if plan.canary.is_some() { plan.length } else { plan.length * 4 };
    loop {
        let end = began + if wanted(cell, &faults).is_empty() { plan.length } else { longest };
        if Instant::now() >= end {
            break;
        }
        tokio::select! {
            Some((target, ask)) = asked.recv() => {
                if fleet.stopped() >= MOST_STOPPED {
                    fleet.refuse(target);
                } else if fleet.is_lost(ask.token) {
                    striking.spawn(stop_until_its_token_is_issued_again(Arc::clone(fleet), target, ask));
                } else if cell.fades_out() && ask.place != Place::Fenced && ask.token % 4 > 0 {
                    striking.spawn(fade_out(Arc::clone(fleet), target, ask));
                } else if cell.pauses || matches!(cell.mode, Mode::Claim | Mode::Permits | Mode::Slot | Mode::Version) {
                    striking.spawn(stop_where_it_hurts(Arc::clone(fleet), target, ask));
                } else {
                    fleet.refuse(target);
                }
            }
            Some(fault) = striking.join_next(), if !striking.is_empty() => {
                if let Some(fault) = fault.unwrap() {
                    *faults.entry(fault).or_default() += 1;
                }
            }
            () = sleep_until(next.min(end)) => {
                // Load, not synchronisation.
                next = Instant::now() + Duration::from_millis(dice.between(cell.every.0, cell.every.1));
                if let Some(fault) = draw(cell, &mut dice) {
                    let dice = Dice::new(dice.next());
                    striking.spawn(fault.strike(Arc::clone(fleet), dice));
                }
            }
        }
    }
    // Those that are stopped wait for others to take over, so the others must go on.
    while !striking.is_empty() {
        tokio::select! {
            Some((target, _)) = asked.recv() => fleet.refuse(target),
            Some(fault) = striking.join_next() => {
                if let Some(fault) = fault.unwrap() {
                    *faults.entry(fault).or_default() += 1;
                }
            }
        }
    }
    faults
}

/// What has not happened yet of what has to.
pub(crate) fn wanted(cell: &Cell, faults: &BTreeMap<&'static str, u64>) -> Vec<&'static str> {
    let mostly = if cell.fades_out() { "faded out" } else { "paused in an unfenced write" };
    let pauses: &[&str] = &[mostly, "paused in a fenced transaction"];
    let mut wanted: Vec<&str> = if cell.pauses { pauses.to_vec() } else { Vec::new() };
    if cell.mode == Mode::Slot {
        wanted.extend(["paused completing a claim", "paused between two slots"]);
    }
    wanted.extend(cell.faults.iter().map(|(_, fault)| fault.name()));
    wanted.retain(|fault| !faults.contains_key(fault));
    wanted
}

fn draw(cell: &Cell, dice: &mut Dice) -> Option<Fault> {
    let all: u64 = cell.faults.iter().map(|(share, _)| share).sum();
    let mut roll = if all == 0 { 0 } else { dice.below(all) };
    cell.faults.iter().find_map(|(share, fault)| {
        let hit = roll < *share;
        roll = roll.saturating_sub(*share);
        hit.then_some(*fault)
    })
}

/// Stopped where it asked for it, until somebody else has been granted a larger token (and has written).
async fn stop_where_it_hurts(fleet: Arc<Fleet>, target: Target, ask: Ask) -> Option<&'static str> {
    let Some(stood) = fleet.stop(target).await else {
        fleet.refuse(target);
        return None;
    };
    let overtaken = timeout(BLOCKED_FOR, overtaken(&fleet, &ask)).await.is_ok();
    fleet.wake(target, stood, true);
    Some(match (overtaken, ask.place) {
        (false, Place::Twin) => "paused, and nobody wrote",
        (false, _) => BLOCKED,
        (true, Place::Fenced) => "paused in a fenced transaction",
        (true, Place::Twin) => "paused in an unfenced write",
        (true, Place::Idle) => "paused holding",
        (true, Place::Permit) => "paused in a write under a permit",
        (true, Place::Claimed) => "paused with a claim",
        (true, Place::Completing) => "paused completing a claim",
        (true, Place::Between) => "paused between two slots",
        (true, Place::Versioned) => "paused between a load and its change",
    })
}

/// Its grant will be lost in a failover; stopped until somebody else has been granted that token or a larger one.
async fn stop_until_its_token_is_issued_again(
    fleet: Arc<Fleet>,
    target: Target,
    ask: Ask,
) -> Option<&'static str> {
    let Some(stood) = fleet.stop(target).await else {
        fleet.refuse(target);
        return None;
    };
    let again = async {
        loop {
            // The old primary still has the grant itself.
            let again = "SELECT token >= $2 AND token || '/' || grant_id <> $3 AND released_at IS NULL \
                         FROM fencepost.leases WHERE name = $1";
            let again = sqlx::query_scalar(again).bind(&ask.name).bind(ask.token).bind(&ask.grant);
            if again.fetch_one(&fleet.stage().pool()).await.unwrap_or(false) {
                return;
            }
            sleep(Duration::from_millis(1)).await;
        }
    };
    let again = timeout(BLOCKED_FOR, again).await.is_ok();
    fleet.wake(target, stood, true);
    again.then_some("paused over a failover")
}

/// Answers come later to this holder, then nothing passes any more, until somebody else has been granted a larger token
/// and a while after.
async fn fade_out(fleet: Arc<Fleet>, target: Target, ask: Ask) -> Option<&'static str> {
    let Some(ttl) = fleet.ttl(target).filter(|_| fleet.take(target)) else {
        fleet.refuse(target);
        return None;
    };
    let proxy = fleet.stage().proxy(target.place());
    proxy.slow(Duration::ZERO, ttl * 3 / 10);
    // Long enough for a heartbeat and its late answer.
    sleep(ttl * 8 / 10).await;
    proxy.black_hole(true);
    let from = now();
    let overtaken = timeout(BLOCKED_FOR, overtaken(&fleet, &ask)).await.is_ok();
    sleep(ttl / 2).await;
    let until = now();
    proxy.slow(Duration::ZERO, Duration::ZERO);
    proxy.black_hole(false);
    fleet.cut_off(target, (from, until));
    fleet.refuse(target);
    Some(if overtaken { "faded out" } else { BLOCKED })
}

async fn overtaken(fleet: &Fleet, ask: &Ask) {
    while !is_overtaken(&fleet.stage().pool(), ask).await {
        sleep(Duration::from_millis(1)).await;
    }
}

/// Not if the server is out of reach itself.
async fn is_overtaken(pool: &PgPool, ask: &Ask) -> bool {
    let query = match ask.place {
        Place::Claimed | Place::Completing => return claims::overtaken(pool, &ask.name, ask.token).await,
        Place::Versioned => return versions::overtaken(pool, &ask.name, ask.token).await,
        Place::Between => return slots::overtaken(pool, &ask.name, ask.token).await,
        Place::Fenced | Place::Idle => "SELECT token <> $2 FROM fencepost.leases WHERE name = $1",
        Place::Twin => {
            "SELECT l.token <> $2 AND t.value > $3 FROM fencepost.leases l JOIN twin t USING (name) WHERE name = $1"
        }
        Place::Permit => "SELECT NOT EXISTS (SELECT FROM fencepost.permits WHERE token = $2)",
    };
    let query = sqlx::query_scalar(query).bind(&ask.name).bind(ask.token).bind(ask.value);
    query.fetch_one(pool).await.unwrap_or(false)
}

/// I12: how long until each name is granted anew.
async fn heal(pool: &PgPool, names: &[String], patience: Duration) -> Option<Duration> {
    let began = now();
    let last: String = sqlx::query_scalar("SELECT clock_timestamp()::text").fetch_one(pool).await.unwrap();
    let all = async {
        loop {
            let query = "SELECT count(*) + (SELECT count(DISTINCT semaphore) FROM fencepost.permits WHERE granted_at > $1::timestamptz) \
                         FROM fencepost.leases WHERE granted_at > $1::timestamptz";
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
///
/// A pooler keeps sessions: there only their transactions count.
async fn left_behind(pool: &PgPool, pooled: bool) -> Vec<String> {
    const LEFT: &str = "\
        SELECT 'a session: ' || application_name || ', ' || coalesce(state, '?') || ', ' || query \
          FROM pg_stat_activity WHERE usename = 'worker' AND application_name <> 'a stranger' AND NOT $1 \
        UNION ALL SELECT 'idle in transaction: ' || application_name FROM pg_stat_activity \
          WHERE state LIKE 'idle in transaction%' \
        UNION ALL SELECT 'an advisory lock' FROM pg_locks WHERE locktype = 'advisory' \
        UNION ALL SELECT 'a held lease: ' || l.name FROM fencepost.leases l JOIN fencepost.owners o ON o.id = l.owner \
          WHERE l.released_at IS NULL AND o.expires_at > clock_timestamp() \
        UNION ALL SELECT 'a running claim of the living: ' || c.key FROM fencepost.claims c \
          JOIN fencepost.owners o ON o.id = c.owner WHERE c.state = 'running' AND o.expires_at > clock_timestamp() \
        UNION ALL SELECT 'a held permit: ' || p.semaphore FROM fencepost.permits p JOIN fencepost.owners o ON o.id = p.owner \
          WHERE p.released_at IS NULL AND o.expires_at > clock_timestamp() \
        UNION ALL SELECT 'a ticket of the living: ' || w.name FROM fencepost.waiters w \
          JOIN fencepost.owners o ON o.id = w.owner WHERE o.expires_at > clock_timestamp()";
    let look =
        async || -> Vec<String> { sqlx::query_scalar(LEFT).bind(pooled).fetch_all(pool).await.unwrap() };
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

/// As soon as the database answers yes; fails after [`DEADLINE`].
pub(crate) async fn until_asked(pool: &PgPool, what: &str, query: &'static str) {
    let yes = async {
        while !sqlx::query_scalar(query).fetch_one(pool).await.unwrap_or(false) {
            sleep(Duration::from_millis(3)).await;
        }
    };
    timeout(DEADLINE, yes).await.unwrap_or_else(|_| panic!("not in {DEADLINE:?}: {what}"));
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
