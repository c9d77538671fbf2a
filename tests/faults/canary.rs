//! Canaries: something made wrong on purpose, one mistake each, which a cell must notice.
//!
//! A wrong function is made from the right one's own text, as the server has it, so it stays what it is but for
//! the mistake. That the mistake was made is checked: a canary that is well shows nothing. Mistakes of the client and
//! of the application are hooks of the library and of the workers.

use sqlx::{AssertSqlSafe, PgPool};

use crate::cell::{self, Cell};
use crate::worker;

/// A mistake.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Canary {
    pub(crate) mistake: &'static str,
    /// Who has made it before: cases of the field.
    pub(crate) made_by: &'static str,
    /// The invariant that it breaks.
    pub(crate) breaks: &'static str,
    /// Where that has to be noticed.
    pub(crate) cell: &'static Cell,
    change: Change,
}

/// What is right, and what is put in its place.
type Parts = &'static [(&'static str, &'static str)];

#[derive(Clone, Copy, Debug)]
enum Change {
    /// Parts of the text of a function.
    Function(&'static str, Parts),
    /// Of several.
    Functions(&'static [(&'static str, Parts)]),
    /// How many tokens a session draws ahead.
    Cache(i64),
    /// The library in the workers' processes.
    Client(&'static str),
    /// The workers themselves.
    Worker(worker::Mistake),
}

/// The fence looks at the owner's life only.
pub(crate) const NO_FENCE: Canary = Canary {
    mistake: "a fence without its lock and without comparing the pair",
    made_by: "macro-inc/macro#6026",
    breaks: "I2",
    cell: &cell::EVERYTHING,
    change: Change::Function(
        "fencepost.fence",
        &[
            (" WHERE l.name = p_name FOR KEY SHARE;", " WHERE l.name = p_name;"),
            ("NOT FOUND OR v_token <> p_token OR v_grant <> p_grant_id OR", "NOT FOUND OR"),
        ],
    ),
};

/// A takeover takes the lock that an update takes, which the fence's lock does not stop.
pub(crate) const WEAK_LOCK: Canary = Canary {
    mistake: "a takeover that does not wait for open fenced transactions",
    made_by: "openbao/openbao#1571",
    breaks: "I2",
    cell: &cell::CLIENT_PAUSED,
    change: Change::Function(
        "fencepost.acquire",
        &[("FOR UPDATE SKIP LOCKED", "FOR NO KEY UPDATE SKIP LOCKED")],
    ),
};

/// Whoever holds is taken over from, alive or not.
pub(crate) const IGNORES_LIFE: Canary = Canary {
    mistake: "a takeover from a living owner",
    made_by: "hexpm/hexpm#1825",
    breaks: "I4",
    cell: &cell::CLIENT_PAUSED,
    change: Change::Function(
        "fencepost.acquire",
        &[
            ("IF v_lease.owner IS NULL OR v_life > clock_timestamp() THEN", "IF false THEN"),
            ("v_held := coalesce(v_life > clock_timestamp(), false);", "v_held := false;"),
        ],
    ),
};

/// It promises another ttl of life and leaves the row as it is.
pub(crate) const IDLE_HEARTBEAT: Canary = Canary {
    mistake: "a heartbeat that answers and renews nothing",
    made_by: "riverqueue/river#199",
    breaks: "I4",
    cell: &cell::CLIENT_PAUSED,
    change: Change::Function(
        "fencepost.heartbeat",
        &[
            ("SET expires_at = clock_timestamp() + o.ttl", "SET expires_at = o.expires_at"),
            ("RETURNING o.expires_at - clock_timestamp()", "RETURNING o.ttl"),
        ],
    ),
};

/// The token is drawn before the row is locked; the time between the two is stretched. The calls overlap, so I1
/// cannot tell their order, but what is written with the tokens can.
pub(crate) const EARLY_TOKEN: Canary = Canary {
    mistake: "a token drawn before the lease's row is locked",
    made_by: "nextlyhq/nextly#777",
    breaks: "I2",
    cell: &cell::CLIENT_PAUSED,
    change: Change::Function(
        "fencepost.acquire",
        &[
            (
                "v_own_label text :=",
                "v_drawn bigint := nextval('fencepost.fencing_token');\n    v_own_label text :=",
            ),
            ("SET token = nextval('fencepost.fencing_token')", "SET token = v_drawn"),
            ("    FOR v_round IN", "    PERFORM pg_sleep(random() * 0.03);\n    FOR v_round IN"),
        ],
    ),
};

/// The sequence hands tokens to sessions in blocks, so they come in the order of the sessions' blocks.
pub(crate) const CACHED_TOKENS: Canary = Canary {
    mistake: "a sequence with a cache",
    made_by: "wavect/semaprax#192",
    breaks: "I1",
    cell: &cell::CLIENT_KILLED,
    change: Change::Cache(32),
};

/// Whoever came last is served first.
pub(crate) const NEWEST_FIRST: Canary = Canary {
    mistake: "a hand-over to the newest ticket",
    made_by: "pmcfadin/cqlite#3924",
    breaks: "I13",
    cell: &cell::EVERYTHING_WAITING,
    change: Change::Function(
        "fencepost.hand_to_head",
        &[("ORDER BY w.rank, w.ticket LIMIT 1", "ORDER BY w.rank, w.ticket DESC LIMIT 1")],
    ),
};

/// Whoever asks when it is free gets it, though others wait.
pub(crate) const JUMPS_QUEUE: Canary = Canary {
    mistake: "an acquire that does not look at the queue",
    made_by: "alibaba/nacos#15280",
    breaks: "I13",
    cell: &cell::EVERYTHING_WAITING,
    change: Change::Function(
        "fencepost.acquire",
        &[(
            "IF EXISTS (SELECT FROM fencepost.waiters w WHERE w.name = p_name) THEN\n        SELECT * INTO v_head",
            "IF false THEN\n        SELECT * INTO v_head",
        )],
    ),
};

/// Those who wait have to find out by asking.
pub(crate) const SILENT_RELEASE: Canary = Canary {
    mistake: "a release that hands over to nobody",
    made_by: "iopsystems/durable#66",
    breaks: "I12",
    cell: &cell::EVERYTHING_WAITING,
    change: Change::Function(
        "fencepost.release",
        &[("IF EXISTS (SELECT FROM fencepost.waiters w WHERE w.name = p_name) THEN", "IF false THEN")],
    ),
};

/// A waiter that gives up keeps its place: it is served though nobody is there.
pub(crate) const KEEPS_TICKETS: Canary = Canary {
    mistake: "a withdrawal that takes nothing back",
    made_by: "constructorfabric/gears-rust#4705",
    breaks: "I11",
    cell: &cell::EVERYTHING_WAITING,
    change: Change::Function(
        "fencepost.withdraw",
        &[("WHERE w.grant_id = p_grant_id;", "WHERE false;"), ("IF NOT withdrawn THEN", "IF false THEN")],
    ),
};

/// A heartbeat brings back whoever sends one.
pub(crate) const REVIVES: Canary = Canary {
    mistake: "a heartbeat as an upsert: it revives a dead owner",
    made_by: "openbao/openbao#2097",
    breaks: "I5",
    cell: &cell::BLACK_HOLE,
    change: Change::Function(
        "fencepost.heartbeat",
        &[("WHERE o.id = p_owner AND o.expires_at > clock_timestamp()", "WHERE o.id = p_owner")],
    ),
};

/// Whoever releases frees the lease, though somebody else has it by now.
pub(crate) const RELEASE_BY_NAME: Canary = Canary {
    mistake: "a release by name alone",
    made_by: "riverqueue/river#1302",
    breaks: "I4",
    cell: &cell::CLIENT_PAUSED,
    change: Change::Function(
        "fencepost.release",
        &[(
            "WHERE l.name = p_name AND l.token = p_token AND l.grant_id = p_grant_id AND l.released_at IS NULL",
            "WHERE l.name = p_name AND l.released_at IS NULL",
        )],
    ),
};

/// A takeover finds the owner dead and neither locks its row nor writes that down: a heartbeat in flight succeeds.
/// The time in which one is in flight is stretched.
pub(crate) const NO_MARK: Canary = Canary {
    mistake: "a takeover that leaves the dead owner unmarked",
    made_by: "oban-bg/oban#1488",
    breaks: "I5",
    cell: &cell::CLIENT_PAUSED,
    change: Change::Functions(&[
        (
            "fencepost.acquire",
            &[
                ("WHERE o.id = v_lease.owner FOR NO KEY UPDATE;", "WHERE o.id = v_lease.owner;"),
                ("UPDATE fencepost.owners o SET expires_at = 'epoch' WHERE o.id = v_lease.owner;", "NULL;"),
            ],
        ),
        (
            "fencepost.heartbeat",
            &[(
                "RETURNING o.expires_at - clock_timestamp(), o.revocations;",
                "RETURNING o.expires_at - clock_timestamp(), o.revocations;\n    \
                 PERFORM pg_sleep(0.9 * date_part('epoch', o.ttl)) FROM fencepost.owners o \
                 WHERE o.id = p_owner AND random() < 0.15;",
            )],
        ),
    ]),
};

/// A release takes the lock that an open fence does not let pass.
pub(crate) const WAITS_FOR_FENCES: Canary = Canary {
    mistake: "a release that waits for open fences",
    made_by: "enyineer/checkstack#233",
    breaks: "I12",
    cell: &cell::CANCELLED,
    change: Change::Function(
        "fencepost.release",
        &[(
            "    waiting := false;",
            "    waiting := false;\n    PERFORM FROM fencepost.leases l WHERE l.name = p_name FOR UPDATE;",
        )],
    ),
};

pub(crate) const NO_RECONCILE: Canary = Canary {
    mistake: "no look for grants that nobody knows",
    made_by: "constructorfabric/gears-rust#4705",
    breaks: "I12",
    cell: &cell::CARELESS_ROLE,
    change: Change::Client("no-reconcile"),
};

pub(crate) const NUMBER_ONLY: Canary = Canary {
    mistake: "a fence that compares the number and not the grant",
    made_by: "wavect/semaprax#192",
    breaks: "I2",
    cell: &cell::FAILOVER_LOSSY,
    change: Change::Function(
        "fencepost.fence",
        &[("v_token <> p_token OR v_grant <> p_grant_id OR", "v_token <> p_token OR")],
    ),
};

pub(crate) const AUTOCOMMIT: Canary = Canary {
    mistake: "a fence in a transaction of its own",
    made_by: "macro-inc/macro#6026",
    breaks: "I2",
    cell: &cell::CLIENT_PAUSED,
    change: Change::Worker(worker::Mistake::FenceInAutocommit),
};

pub(crate) const NO_DEADLINE: Canary = Canary {
    mistake: "a holder that believes until it is told otherwise",
    made_by: "JasperFx/wolverine#2602, timescale/prometheus-postgresql-adapter#91",
    breaks: "I4",
    cell: &cell::BLACK_HOLE,
    change: Change::Client("no-deadline"),
};

pub(crate) const COUNTS_FROM_ANSWER: Canary = Canary {
    mistake: "trust counted from a heartbeat's answer",
    made_by: "nextlyhq/nextly#777",
    breaks: "I4",
    cell: &cell::SLOW_NETWORK,
    change: Change::Client("counts-from-answer"),
};

pub(crate) const BELIEVES_NOTIFICATIONS: Canary = Canary {
    mistake: "a notification that is believed without its digest",
    made_by: "etcd-io/etcd#11456",
    breaks: "I4",
    cell: &cell::NOTIFICATIONS,
    change: Change::Client("believes-notifications"),
};

pub(crate) const LARGER_THAN_MINE: Canary = Canary {
    mistake: "a partition moves whenever another member has fewer",
    made_by: "azure-sdk-for-java#13597",
    breaks: "I9",
    cell: &cell::SHARING,
    change: Change::Client("larger-than-mine"),
};

/// Their shares are kept for them.
pub(crate) const COUNTS_THE_DEAD: Canary = Canary {
    mistake: "dead members count",
    made_by: "namastack/namastack-outbox#75",
    breaks: "I9",
    cell: &cell::SHARING,
    change: Change::Function(
        "fencepost.member_round",
        &[
            (
                "WHERE m.group_name = p_group AND o.expires_at > clock_timestamp();",
                "WHERE m.group_name = p_group;",
            ),
            (
                "AND NOT EXISTS (SELECT FROM fencepost.owners o WHERE o.id = m.owner AND o.expires_at > 'epoch');",
                "AND false;",
            ),
        ],
    ),
};

pub(crate) const KEEPS_REVOKED: Canary = Canary {
    mistake: "a member that is not told of the end of its drain",
    made_by: "azure-sdk-for-js#6945",
    breaks: "I4",
    cell: &cell::SHARING,
    change: Change::Client("keeps-revoked"),
};

pub(crate) const WALL_CLOCK: Canary = Canary {
    mistake: "a deadline by the clock that people set",
    made_by: "lukas-krecan/ShedLock#231, quartz-scheduler/quartz#106",
    breaks: "I4",
    cell: &cell::CLOCKS_STEPPED,
    change: Change::Client("wall-clock"),
};

/// Whoever completes a claim completes it, whoever has it.
pub(crate) const FINISH_BY_ID: Canary = Canary {
    mistake: "a claim that is finished by its key alone",
    made_by: "riverqueue/river#1302",
    breaks: "I6",
    cell: &cell::EVERYTHING_CLAIMED,
    change: Change::Functions(&[
        (
            "fencepost.claim_fence",
            &[("OR v_token <> p_token OR v_grant IS DISTINCT FROM p_grant_id THEN", "THEN")],
        ),
        (
            "fencepost.claim_complete",
            &[(
                "WHERE c.key = p_key AND c.token = p_token AND c.grant_id = p_grant_id AND c.state = 'running'",
                "WHERE c.key = p_key AND c.state = 'running'",
            )],
        ),
    ]),
};

/// What runs for long is taken for dead, and some things take long.
pub(crate) const RESCUE_BY_RUN_TIME: Canary = Canary {
    mistake: "a claim that is rescued by a fixed run time",
    made_by: "hexpm/hexpm#1825, apalis-dev/apalis#530",
    breaks: "I4",
    cell: &cell::EVERYTHING_CLAIMED,
    change: Change::Functions(&[(
        "fencepost.claim_next",
        &[(
            "    LOOP\n        -- Several",
            "    UPDATE fencepost.claims c SET state = 'ready', unclear = true WHERE c.key IN (\n        \
             SELECT r.key FROM fencepost.claims r WHERE r.kind = p_kind AND r.state = 'running' \
             AND r.started_at < v_now - interval '20 ms' FOR UPDATE SKIP LOCKED);\n    LOOP\n        -- Several",
        )],
    )]),
};

pub(crate) const SLOTS_FROM_NOW: Canary = Canary {
    mistake: "a slot that is the moment at which it was found due",
    made_by: "bensheldon/good_job#1543, #731",
    breaks: "I7",
    cell: &cell::EVERYTHING_SLOTS,
    change: Change::Client("slots-from-now"),
};

pub(crate) const DUE_BY_OWN_CLOCK: Canary = Canary {
    mistake: "slots that are due by the clock of whoever looks",
    made_by: "lukas-krecan/ShedLock#231, quartz-scheduler/quartz#106",
    breaks: "I7",
    cell: &cell::CLOCKS_STEPPED_SLOTS,
    change: Change::Client("due-by-own-clock"),
};

/// Who goes on after a pause, or commits after it, does so beside whoever has taken over.
pub(crate) const ASKS_FOR_THE_LEASE_ONCE: Canary = Canary {
    mistake: "slots one at a time by a lease that is looked at once",
    made_by: "macro-inc/macro#6026, openbao/openbao#1571",
    breaks: "I7",
    cell: &cell::EVERYTHING_SLOTS,
    change: Change::Client("asks-for-the-lease-once"),
};

/// Whoever resigns ends the term, though somebody else leads by now.
pub(crate) const RESIGNS_BY_NAME: Canary = Canary {
    mistake: "a past leader ends the present one's term",
    made_by: "riverqueue/river#1302",
    breaks: "I8",
    cell: &cell::LEADERS,
    change: RELEASE_BY_NAME.change,
};

/// A renewal answers yes and renews nothing: the next one is elected, and the past one believes.
pub(crate) const RENEWS_PAST_LEADERS: Canary = Canary {
    mistake: "a renewal that tells a past leader that it goes on",
    made_by: "riverqueue/river#199, oban-bg/oban#1488",
    breaks: "I8",
    cell: &cell::LEADERS,
    change: IDLE_HEARTBEAT.change,
};

/// What is in use is what has been granted and not been released: as a counter has it, which no dead process lowers.
pub(crate) const COUNTER: Canary = Canary {
    mistake: "a counter in place of permits that die with their owner",
    made_by: "redisson/redisson#2515, lukas-krecan/ShedLock#1587",
    breaks: "I12",
    cell: &cell::PERMITS,
    change: Change::Function(
        "fencepost.permit_take",
        &[
            ("OR o.id IS NULL OR o.expires_at = 'epoch'", ""),
            (
                "OR NOT EXISTS (SELECT FROM fencepost.owners o WHERE o.id = p.owner AND o.expires_at > 'epoch')",
                "",
            ),
        ],
    ),
};

/// Whoever has not beaten for a while is taken for dead.
pub(crate) const TAKES_FROM_THE_LIVING: Canary = Canary {
    mistake: "permits taken from an owner that lives",
    made_by: "hexpm/hexpm#1825",
    breaks: "I14",
    cell: &cell::PERMITS,
    change: Change::Functions(&[
        (
            "fencepost.permit_take",
            &[("AND o.expires_at > 'epoch')", "AND o.expires_at > clock_timestamp() + o.ttl * 0.6)")],
        ),
        (
            "fencepost.permit_acquire",
            &[("AND p.released_at IS NULL AND o.expires_at > clock_timestamp();", "AND false;")],
        ),
    ]),
};

/// The lock that an update takes, which an open fence does not stop.
pub(crate) const PERMIT_UNDER_A_WRITE: Canary = Canary {
    mistake: "a permit granted under an open fenced write",
    made_by: "openbao/openbao#1571",
    breaks: "I14",
    cell: &cell::PERMITS,
    change: Change::Function(
        "fencepost.permit_take",
        &[("FOR UPDATE OF p SKIP LOCKED", "FOR NO KEY UPDATE OF p SKIP LOCKED")],
    ),
};

/// Whoever has read before the others writes over what they have written.
pub(crate) const COMPARES_NO_VERSION: Canary = Canary {
    mistake: "a bulk update that does not compare the versions",
    made_by: "borisdj/EFCore.BulkExtensions#469",
    breaks: "I10",
    cell: &cell::VERSIONS,
    change: Change::Worker(worker::Mistake::ComparesNoVersion),
};

pub(crate) const REPEATS_UNKNOWN: Canary = Canary {
    mistake: "an update that is sent again when its answer was lost",
    made_by: "golang/go#11978",
    breaks: "I10",
    cell: &cell::VERSIONS,
    change: Change::Worker(worker::Mistake::RepeatsUnknown),
};

/// So it comes to versions that somebody has read of the row before it.
pub(crate) const BEGINS_AT_ONE: Canary = Canary {
    mistake: "a version that was used before",
    made_by: "rails/rails#19776",
    breaks: "I10",
    cell: &cell::VERSIONS,
    change: Change::Worker(worker::Mistake::BeginsAtOne),
};

/// Now and then it was granted all the same: nobody knows of that lock, which is free when its session is closed.
pub(crate) const BELIEVES_TIMEOUTS: Canary = Canary {
    mistake: "a wait for the session's lock itself, whose time-out is believed",
    made_by: "madelson/DistributedLock#147, yugabyte/yugabyte-db#26105",
    breaks: "I12",
    cell: &cell::LOCKS_CALM,
    change: Change::Client("believes-timeouts"),
};

pub(crate) const REENTRANT: Canary = Canary {
    mistake: "a session that is shared, and its locks are re-entrant",
    made_by: "heroku/pg_lock#2, constructorfabric/gears-rust#4237",
    breaks: "I4",
    cell: &cell::LOCKS_CALM,
    change: Change::Client("reentrant"),
};

pub(crate) const KEEPS_LOCKS: Canary = Canary {
    mistake: "a session that is given back with its lock",
    made_by: "npgsql/npgsql#5592, lakekeeper/lakekeeper#1789",
    breaks: "I11",
    cell: &cell::LOCKS_CALM,
    change: Change::Client("keeps-locks"),
};

pub(crate) const NEVER_PROBES: Canary = Canary {
    mistake: "a lock whose session nobody looks after",
    made_by: "JasperFx/wolverine#2602, timescale/prometheus-postgresql-adapter#91",
    breaks: "I5",
    cell: &cell::LOCKS_ENDED,
    change: Change::Client("never-probes"),
};

impl Canary {
    /// The mistake of the library, by its name there.
    pub(crate) fn of_the_client(&self) -> Option<&'static str> {
        match self.change {
            Change::Client(mistake) => Some(mistake),
            _ => None,
        }
    }

    pub(crate) fn of_the_worker(&self) -> Option<worker::Mistake> {
        match self.change {
            Change::Worker(mistake) => Some(mistake),
            _ => None,
        }
    }

    pub(crate) async fn install(&self, pool: &PgPool) {
        let wrong = match self.change {
            Change::Client(_) | Change::Worker(_) => return,
            Change::Function(function, parts) => vec![wrong(pool, function, parts).await],
            Change::Functions(functions) => {
                let mut all = Vec::new();
                for (function, parts) in functions {
                    all.push(wrong(pool, function, parts).await);
                }
                all
            }
            Change::Cache(size) => {
                let right = "SELECT cache_size FROM pg_sequences WHERE sequencename = 'fencing_token'";
                assert_eq!(sqlx::query_scalar::<_, i64>(right).fetch_one(pool).await.unwrap(), 1);
                vec![format!("ALTER SEQUENCE fencepost.fencing_token CACHE {size}")]
            }
        };
        for wrong in wrong {
            sqlx::raw_sql(AssertSqlSafe(wrong)).execute(pool).await.unwrap();
        }
    }
}

/// The function with these parts replaced.
async fn wrong(pool: &PgPool, function: &str, parts: Parts) -> String {
    let right = sqlx::query_scalar("SELECT pg_get_functiondef($1::regproc)").bind(function);
    let mut text: String = right.fetch_one(pool).await.unwrap();
    for (from, to) in parts {
        assert!(text.contains(from), "{function} has not {from:?} any more: adapt the canary");
        text = text.replace(from, to);
    }
    text
}
