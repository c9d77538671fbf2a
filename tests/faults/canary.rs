//! Canaries: the schema made wrong on purpose, one mistake each, which the checker must notice.
//!
//! A wrong function is made from the right one's own text, as the server has it, so it stays what it is but for
//! the mistake. That the mistake was made is checked: a canary that is well shows nothing.

use sqlx::{AssertSqlSafe, PgPool};

/// A mistake.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Canary {
    pub(crate) mistake: &'static str,
    /// The rule that it breaks.
    pub(crate) breaks: &'static str,
    change: Change,
}

#[derive(Clone, Copy, Debug)]
enum Change {
    /// Parts of the text of a function.
    Function(&'static str, &'static [(&'static str, &'static str)]),
    /// How many tokens a session draws ahead.
    Cache(i64),
}

/// The fence looks at the owner's life only.
pub(crate) const NO_FENCE: Canary = Canary {
    mistake: "a fence without its lock and without comparing the pair",
    breaks: "I2",
    change: Change::Function(
        "fencepost.fence",
        &[
            (" WHERE l.name = p_name FOR KEY SHARE;", " WHERE l.name = p_name;"),
            ("IF NOT FOUND OR v_token <> p_token OR v_grant <> p_grant_id OR", "IF NOT FOUND OR"),
        ],
    ),
};

/// A takeover takes the lock that an update takes, which the fence's lock does not stop.
pub(crate) const WEAK_LOCK: Canary = Canary {
    mistake: "a takeover that does not wait for open fenced transactions",
    breaks: "I2",
    change: Change::Function(
        "fencepost.acquire",
        &[("FOR UPDATE SKIP LOCKED", "FOR NO KEY UPDATE SKIP LOCKED")],
    ),
};

/// Whoever holds is taken over from, alive or not.
pub(crate) const IGNORES_LIFE: Canary = Canary {
    mistake: "a takeover from a living owner",
    breaks: "I4",
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
    breaks: "I4",
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
    breaks: "I2",
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
pub(crate) const CACHED_TOKENS: Canary =
    Canary { mistake: "a sequence with a cache", breaks: "I1", change: Change::Cache(32) };

/// Whoever came last is served first.
pub(crate) const NEWEST_FIRST: Canary = Canary {
    mistake: "a hand-over to the newest ticket",
    breaks: "I13",
    change: Change::Function(
        "fencepost.hand_to_head",
        &[("ORDER BY w.ticket LIMIT 1", "ORDER BY w.ticket DESC LIMIT 1")],
    ),
};

/// Whoever asks when it is free gets it, though others wait.
pub(crate) const JUMPS_QUEUE: Canary = Canary {
    mistake: "an acquire that does not look at the queue",
    breaks: "I13",
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
    breaks: "I12",
    change: Change::Function(
        "fencepost.release",
        &[("IF EXISTS (SELECT FROM fencepost.waiters w WHERE w.name = p_name) THEN", "IF false THEN")],
    ),
};

/// A waiter that gives up keeps its place: it is served though nobody is there.
pub(crate) const KEEPS_TICKETS: Canary = Canary {
    mistake: "a withdrawal that takes nothing back",
    breaks: "I11",
    change: Change::Function(
        "fencepost.withdraw",
        &[("WHERE w.grant_id = p_grant_id;", "WHERE false;"), ("IF NOT withdrawn THEN", "IF false THEN")],
    ),
};

impl Canary {
    pub(crate) async fn install(&self, pool: &PgPool) {
        let wrong = match self.change {
            Change::Function(function, replace) => {
                let right = sqlx::query_scalar("SELECT pg_get_functiondef($1::regproc)").bind(function);
                let mut text: String = right.fetch_one(pool).await.unwrap();
                for (from, to) in replace {
                    assert!(text.contains(from), "{function} has not {from:?} any more: adapt the canary");
                    text = text.replace(from, to);
                }
                text
            }
            Change::Cache(size) => {
                let right = "SELECT cache_size FROM pg_sequences WHERE sequencename = 'fencing_token'";
                assert_eq!(sqlx::query_scalar::<_, i64>(right).fetch_one(pool).await.unwrap(), 1);
                format!("ALTER SEQUENCE fencepost.fencing_token CACHE {size}")
            }
        };
        sqlx::raw_sql(AssertSqlSafe(wrong)).execute(pool).await.unwrap();
    }
}
