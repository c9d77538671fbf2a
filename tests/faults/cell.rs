//! The cells: one fault each, the load under which it strikes, and what of the promises it suspends.
//!
//! A cell is a few seconds of worker processes under one kind of fault, healing, and a last look; every
//! invariant of the checker is judged in each. Nearly all of them pause holders as well, where that hurts most,
//! since a fault alone is seldom as bad as a fault at the wrong moment; and there the unfenced twin has to lose
//! updates, or the cell would have shown nothing.

use std::time::Duration;

use crate::fault::{Fault, Session};
use crate::stage::{Setting, Way};
use crate::worker::{Habits, Mode};

/// What the workers do, on what, and what is done to them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cell {
    /// The fault, as the report names it.
    pub(crate) name: &'static str,
    /// How it is made, in a few words.
    pub(crate) how: &'static str,
    pub(crate) mode: Mode,
    /// How many names they contend for.
    pub(crate) names: usize,
    pub(crate) workers: usize,
    pub(crate) seconds: u64,
    /// The least and the most, in milliseconds.
    pub(crate) ttl: (u64, u64),
    pub(crate) habits: Habits,
    pub(crate) setting: Setting,
    /// By their share in all faults.
    pub(crate) faults: &'static [(u64, Fault)],
    /// Between two faults, in milliseconds.
    pub(crate) every: (u64, u64),
    /// Holders are paused where it hurts, besides.
    pub(crate) pauses: bool,
    /// Nothing may be lost here: each loss that is signalled is a false alarm.
    pub(crate) calm: bool,
    /// Invariants that are not promised here, with the reason.
    pub(crate) suspended: &'static [(&'static str, &'static str)],
    /// What must have happened three times at least, or nothing was shown.
    pub(crate) needs: &'static [&'static str],
}

impl Cell {
    pub(crate) fn length(&self) -> Duration {
        Duration::from_secs(self.seconds)
    }

    pub(crate) fn promises(&self, invariant: &str) -> bool {
        !self.suspended.iter().any(|(suspended, _)| *suspended == invariant)
    }

    /// Whether a holder's answers get late before none comes any more.
    pub(crate) fn fades_out(&self) -> bool {
        self.faults.iter().any(|(_, fault)| *fault == Fault::Slow)
    }

    /// Whether the server's memory, with all unlogged tables, is lost on the way.
    pub(crate) fn forgets(&self) -> bool {
        self.faults.iter().any(|(_, fault)| matches!(fault, Fault::Crash | Fault::FailOver))
    }
}

/// Six processes try for three names, are paused, and nothing else happens.
const TRYING: Cell = Cell {
    name: "",
    how: "",
    mode: Mode::Try,
    names: 3,
    workers: 6,
    seconds: 4,
    ttl: (50, 150),
    habits: Habits::PLAIN,
    setting: Setting::PLAIN,
    faults: &[],
    every: (5, 50),
    pauses: true,
    calm: false,
    suspended: &[],
    needs: &["grants", "fenced writes", "twin writes"],
};

/// Eight tasks in each process wait in line for four names.
const WAITING: Cell = Cell {
    mode: Mode::Wait,
    names: 4,
    workers: 5,
    ttl: (500, 1_000),
    habits: Habits { connections: 4, ..Habits::PLAIN },
    every: (5, 150),
    pauses: false,
    needs: &["grants", "tickets"],
    ..TRYING
};

pub(crate) const EVERYTHING: Cell = Cell {
    name: "everything at once",
    how: "SIGSTOP, SIGKILL and ended sessions, several at a time",
    workers: 8,
    seconds: 15,
    faults: &[
        (30, Fault::Pause),
        (8, Fault::Kill),
        (13, Fault::EndSession(Session::Heartbeat)),
        (13, Fault::EndSession(Session::Call)),
        (18, Fault::EndSession(Session::Application)),
        (18, Fault::EndSession(Session::Fenced)),
    ],
    needs: &["grants", "fenced writes", "twin writes", "rejected fences", "losses signalled"],
    ..TRYING
};

pub(crate) const EVERYTHING_WAITING: Cell = Cell {
    name: "everything at once, in line",
    how: "the same, while 64 tasks wait",
    workers: 8,
    seconds: 15,
    faults: &[
        (30, Fault::Pause),
        (5, Fault::Kill),
        (13, Fault::EndSession(Session::Heartbeat)),
        (13, Fault::EndSession(Session::Call)),
        (13, Fault::EndSession(Session::Listening)),
        (13, Fault::EndSession(Session::Application)),
        (13, Fault::EndSession(Session::Fenced)),
    ],
    needs: &[
        "grants",
        "tickets",
        "hand-overs by a release",
        "hand-overs by an asker",
        "cancelled acquires",
        "timed out acquires",
    ],
    ..WAITING
};

/// Two of three things at a time happen to every kind of session, through proxies.
const HELD_FAULTS: &[(u64, Fault)] = &[
    (30, Fault::Pause),
    (8, Fault::Kill),
    (20, Fault::BlackHole),
    (10, Fault::EndSession(Session::Heartbeat)),
    (10, Fault::EndSession(Session::Call)),
    (10, Fault::EndSession(Session::Fenced)),
    (6, Fault::CutAnswer("fencepost.release")),
];

pub(crate) const LEADERS: Cell = Cell {
    name: "leaders",
    how: "six candidates; SIGSTOP, SIGKILL, black holes, ended sessions and lost answers, several at a time",
    mode: Mode::Lead,
    seconds: 10,
    ttl: (150, 400),
    setting: Setting { way: Way::Proxies, ..Setting::PLAIN },
    faults: HELD_FAULTS,
    every: (20, 160),
    needs: &["grants", "fenced writes", "rejected fences", "losses signalled", "cancelled acquires"],
    ..TRYING
};

pub(crate) const LEADERS_CRASH: Cell = Cell {
    name: "leaders, server crash and restart",
    how: "the same stop as above, and SIGSTOP",
    ttl: CRASH.ttl,
    setting: CRASH.setting,
    faults: &[(1, Fault::Crash), (2, Fault::Pause)],
    every: (300, 700),
    pauses: false,
    needs: &["grants", "fenced writes", "cancelled acquires"],
    ..LEADERS
};

pub(crate) const PERMITS_CRASH: Cell = Cell {
    name: "permits, server crash and restart",
    how: "the same stop as above",
    ttl: CRASH.ttl,
    setting: CRASH.setting,
    faults: CRASH.faults,
    every: CRASH.every,
    needs: &["permits", "writes under a permit"],
    ..PERMITS
};

pub(crate) const SHARING_CRASH: Cell = Cell {
    name: "members, server crash and restart",
    how: "the same stop as above",
    ttl: CRASH.ttl,
    setting: CRASH.setting,
    faults: CRASH.faults,
    every: CRASH.every,
    needs: &["grants", "fenced writes"],
    ..SHARING
};

pub(crate) const PERMITS: Cell = Cell {
    name: "permits",
    how: "six processes share three permits; the same faults, and SIGSTOP inside a fenced transaction",
    mode: Mode::Permits,
    // All want more of it than there is.
    names: 1,
    pauses: false,
    needs: &["permits", "writes under a permit", "losses signalled"],
    ..LEADERS
};

pub(crate) const VERSIONS: Cell = Cell {
    name: "versioned rows",
    how: "six processes change three rows by their versions, in autocommit and in transactions of every isolation; SIGSTOP, also between a load and its change, SIGKILL, black holes, ended sessions and lost answers",
    mode: Mode::Version,
    seconds: 8,
    ttl: (150, 400),
    setting: Setting { way: Way::Proxies, ..Setting::PLAIN },
    faults: &[
        (10, Fault::Pause),
        (4, Fault::Kill),
        (5, Fault::BlackHole),
        (10, Fault::EndSession(Session::Application)),
        (10, Fault::EndSession(Session::Fenced)),
        (30, Fault::CutAnswer("AS t SET")),
        (10, Fault::CutAnswer("DELETE FROM")),
        (20, Fault::CutAnswer("COMMIT")),
    ],
    every: (5, 60),
    pauses: false,
    needs: &["updates", "version conflicts", "unknown updates", "deletes", "inserts"],
    ..TRYING
};

/// Six processes share out seven partitions; they leave and join again.
pub(crate) const SHARING: Cell = Cell {
    name: "members come and go",
    how: "SIGSTOP, SIGKILL and ended sessions, while six processes share out seven partitions, leave and join again",
    mode: Mode::Share,
    seconds: 8,
    ttl: (150, 400),
    faults: &[
        (10, Fault::Pause),
        (3, Fault::Kill),
        (2, Fault::EndSession(Session::Heartbeat)),
        (2, Fault::EndSession(Session::Call)),
        (2, Fault::EndSession(Session::Application)),
    ],
    every: (50, 300),
    pauses: false,
    needs: &["grants", "fenced writes", "rejected fences", "losses signalled"],
    ..TRYING
};

pub(crate) const BACKEND_KILLED: Cell = Cell {
    name: "backend killed",
    how: "`pg_terminate_backend`: heartbeats, calls, fenced transactions",
    faults: &[
        (1, Fault::EndSession(Session::Heartbeat)),
        (1, Fault::EndSession(Session::Call)),
        (1, Fault::EndSession(Session::Application)),
        (1, Fault::EndSession(Session::Fenced)),
    ],
    ..TRYING
};

pub(crate) const CLIENT_KILLED: Cell = Cell {
    name: "client killed",
    how: "SIGKILL; a fresh process in its place",
    faults: &[(1, Fault::Kill)],
    every: (50, 150),
    ..TRYING
};

pub(crate) const CLIENT_PAUSED: Cell = Cell {
    name: "client paused",
    how: "SIGSTOP for 0.3 to 3 ttl, or until others have written; also inside a fenced transaction",
    faults: &[(1, Fault::Pause)],
    needs: &["grants", "fenced writes", "twin writes", "rejected fences", "losses signalled"],
    ..TRYING
};

pub(crate) const REPLY_CUT: Cell = Cell {
    name: "reply cut",
    how: "a proxy forwards an acquire, heartbeat, release, fence or COMMIT, and drops the answer",
    ttl: (200, 500),
    setting: Setting { way: Way::Proxies, ..Setting::PLAIN },
    faults: &[
        (1, Fault::CutAnswer("fencepost.acquire")),
        (1, Fault::CutAnswer("fencepost.heartbeat")),
        (1, Fault::CutAnswer("fencepost.release")),
        (1, Fault::CutAnswer("fencepost.fence")),
        (2, Fault::CutAnswer("COMMIT")),
    ],
    ..TRYING
};

pub(crate) const BLACK_HOLE: Cell = Cell {
    name: "black hole",
    how: "a proxy passes nothing for 0.3 to 3 ttl, then everything it kept",
    ttl: (100, 300),
    seconds: 5,
    setting: Setting { way: Way::Proxies, ..Setting::PLAIN },
    faults: &[(1, Fault::BlackHole)],
    ..TRYING
};

pub(crate) const SLOW_NETWORK: Cell = Cell {
    name: "slow network",
    how: "proxies delay what is asked or answered by up to 0.3 ttl, and pass nothing: to some at random, to some that hold",
    ttl: (150, 300),
    setting: Setting { way: Way::Proxies, ..Setting::PLAIN },
    faults: &[(2, Fault::Slow), (1, Fault::BlackHole)],
    ..TRYING
};

pub(crate) const LINK_LOST: Cell = Cell {
    name: "link lost",
    how: "the link is down for 0.3 to 1.5 s, in a network namespace of its own: TCP itself loses packets",
    ttl: (200, 500),
    seconds: 6,
    setting: Setting { way: Way::Link, ..Setting::PLAIN },
    faults: &[(1, Fault::CutLink)],
    every: (500, 1_500),
    ..TRYING
};

pub(crate) const CRASH: Cell = Cell {
    name: "server crash and restart",
    how: "`pg_ctl stop -m immediate`, down for up to 0.5 s",
    ttl: (200, 1_500),
    seconds: 6,
    setting: Setting { server: &[("synchronous_commit", "on")], ..Setting::PLAIN },
    faults: &[(1, Fault::Crash)],
    every: (1_000, 2_000),
    ..TRYING
};

pub(crate) const CRASH_WAITING: Cell = Cell {
    name: "server crash and restart, in line",
    how: "the same, while 40 tasks wait",
    seconds: 6,
    setting: CRASH.setting,
    faults: CRASH.faults,
    every: CRASH.every,
    needs: &["grants", "fenced writes"],
    suspended: &[("I13", "tickets are unlogged: a crash empties the line, and everybody queues again")],
    ..WAITING
};

pub(crate) const CARELESS_ROLE: Cell = Cell {
    name: "`synchronous_commit = off`, and a crash",
    how: "at role level, WAL written every 10 s; the server crashes and restarts",
    ttl: (2_000, 3_000),
    seconds: 6,
    habits: Habits { durable: true, ..Habits::PLAIN },
    setting: Setting {
        server: &[("synchronous_commit", "on"), ("wal_writer_delay", "10s")],
        role: &[("synchronous_commit", "off")],
        ..Setting::PLAIN
    },
    faults: CRASH.faults,
    every: (400, 800),
    pauses: false,
    ..TRYING
};

pub(crate) const STALLED: Cell = Cell {
    name: "server stalled",
    how: "SIGSTOP of the postmaster and all backends for 0.1 to 1 s",
    ttl: (100, 500),
    seconds: 6,
    faults: &[(1, Fault::Stall)],
    every: (300, 700),
    ..TRYING
};

pub(crate) const FAILOVER: Cell = Cell {
    name: "failover, synchronous",
    how: "a streaming standby with `synchronous_standby_names`; the primary crashes, it is promoted",
    ttl: (500, 1_000),
    seconds: 5,
    setting: Setting {
        way: Way::Proxies,
        server: &[("synchronous_commit", "on")],
        standby: Some(true),
        ..Setting::PLAIN
    },
    faults: &[(1, Fault::FailOver)],
    every: (2_000, 3_000),
    ..TRYING
};

pub(crate) const FAILOVER_LOSSY: Cell = Cell {
    name: "failover, asynchronous",
    how: "the standby has stopped receiving when it is promoted: commits are lost, their tokens are issued again, and then their paused holders wake up",
    // So that the first token that is issued again is for the same name.
    names: 1,
    ttl: (2_000, 3_000),
    habits: Habits { dozes: true, ..Habits::PLAIN },
    setting: Setting { standby: Some(false), ..FAILOVER.setting },
    pauses: false,
    needs: &["grants", "fenced writes"],
    suspended: &[
        ("I1", "a token of a lost grant may be issued again, with another grant id"),
        ("I4", "whoever holds a lost grant is told within its ttl; its fenced writes are refused at once"),
    ],
    ..FAILOVER
};

pub(crate) const CLOCKS_STEPPED: Cell = Cell {
    name: "client clocks wrong",
    how: "the workers' wall clocks are stepped by up to an hour, both ways (libfaketime)",
    habits: Habits { false_clock: true, ..Habits::PLAIN },
    faults: &[(3, Fault::StepClocks), (1, Fault::Pause)],
    needs: &["grants", "fenced writes", "twin writes", "losses signalled"],
    ..TRYING
};

pub(crate) const STARVED: Cell = Cell {
    name: "application runtime starved",
    how: "the only worker thread is blocked for 1.5 ttl while it holds",
    ttl: (1_500, 2_000),
    seconds: 6,
    habits: Habits { starves: true, ..Habits::PLAIN },
    faults: &[],
    pauses: false,
    calm: true,
    needs: &["grants"],
    ..TRYING
};

pub(crate) const POOL_EXHAUSTED: Cell = Cell {
    name: "application pool exhausted",
    how: "a pool of 1, taken for 1.5 ttl while a lease is held and others are acquired",
    habits: Habits { connections: 1, hogs: true, ..Habits::PLAIN },
    ..STARVED
};

pub(crate) const POOLER: Cell = Cell {
    name: "transaction-mode pooler",
    how: "PgBouncer with 8 server sessions for all; its sessions are ended",
    ttl: (300, 600),
    setting: Setting { way: Way::Pooler, ..Setting::PLAIN },
    faults: &[(1, Fault::EndSession(Session::Any))],
    every: (100, 300),
    ..TRYING
};

pub(crate) const ISOLATION: Cell = Cell {
    name: "isolation, aborted transactions",
    how: "a role with `default_transaction_isolation = serializable`; savepoints rolled back in fenced writes",
    habits: Habits { savepoints: true, ..Habits::PLAIN },
    setting: Setting { role: &[("default_transaction_isolation", "serializable")], ..Setting::PLAIN },
    faults: &[(1, Fault::Pause)],
    ..TRYING
};

pub(crate) const CANCELLED: Cell = Cell {
    name: "cancelled futures",
    how: "acquires dropped after 1 to 3 polls or up to a second, in line",
    ttl: (1_000, 1_500),
    habits: Habits { impatient: true, ..WAITING.habits },
    faults: &[],
    calm: true,
    needs: &["grants", "tickets", "cancelled acquires"],
    ..WAITING
};

pub(crate) const ROLE_LIMITS: Cell = Cell {
    name: "role-level timeouts",
    how: "`statement_timeout`, `lock_timeout` and `idle_in_transaction_session_timeout` of 20 to 50 ms",
    setting: Setting {
        role: &[
            ("statement_timeout", "50ms"),
            ("lock_timeout", "20ms"),
            ("idle_in_transaction_session_timeout", "30ms"),
        ],
        ..Setting::PLAIN
    },
    faults: &[(1, Fault::Pause)],
    ..TRYING
};

pub(crate) const CROWDED: Cell = Cell {
    name: "`max_connections` reached",
    how: "strangers take every free connection while sessions are ended",
    ttl: (150, 500),
    seconds: 5,
    setting: Setting { server: &[("max_connections", "60")], ..Setting::PLAIN },
    faults: &[(1, Fault::Crowd)],
    every: (100, 400),
    ..TRYING
};

pub(crate) const MIGRATED: Cell = Cell {
    name: "migrated under load",
    how: "four migrators at once, again and again",
    faults: &[(1, Fault::Migrate)],
    ..TRYING
};

pub(crate) const NOTIFICATIONS: Cell = Cell {
    name: "notifications lost and forged",
    how: "listeners ended; every channel flooded with forged hand-overs",
    seconds: 5,
    faults: &[(2, Fault::Forge), (1, Fault::EndSession(Session::Listening))],
    every: (5, 60),
    needs: &["grants", "tickets"],
    ..WAITING
};

/// A thousand claims, and more when they are done; begun by key or taken in batches.
const CLAIMING: Cell = Cell {
    mode: Mode::Claim,
    // Claims have names of their own.
    names: 0,
    workers: 8,
    ttl: (100, 300),
    pauses: false,
    needs: &["grants", "completions", "recovered attempts", "refused completions"],
    ..TRYING
};

pub(crate) const EVERYTHING_CLAIMED: Cell = Cell {
    name: "everything at once, claims",
    how: "8 processes, 1,000 claims; SIGSTOP, also in the transaction that completes, SIGKILL and ended sessions",
    seconds: 8,
    faults: &[
        (30, Fault::Pause),
        (8, Fault::Kill),
        (15, Fault::EndSession(Session::Heartbeat)),
        (15, Fault::EndSession(Session::Call)),
        (15, Fault::EndSession(Session::Application)),
        (15, Fault::EndSession(Session::Fenced)),
    ],
    every: (10, 80),
    ..CLAIMING
};

pub(crate) const REPLY_CUT_CLAIMED: Cell = Cell {
    name: "reply cut, claims",
    how: "a proxy forwards a begin, a claim of jobs, a complete or its COMMIT, and drops the answer",
    workers: 6,
    ttl: (200, 500),
    setting: REPLY_CUT.setting,
    faults: &[
        (1, Fault::CutAnswer("fencepost.claim_begin")),
        (1, Fault::CutAnswer("fencepost.claim_next")),
        (1, Fault::CutAnswer("fencepost.claim_complete")),
        (1, Fault::CutAnswer("COMMIT")),
        (1, Fault::CutAnswer("fencepost.heartbeat")),
        (1, Fault::Pause),
    ],
    ..CLAIMING
};

/// Three schedules, one of them one at a time.
const SLOTTING: Cell = Cell {
    mode: Mode::Slot,
    seconds: 8,
    ttl: (100, 300),
    every: (10, 80),
    pauses: false,
    needs: &["slots", "slots of one at a time", "recovered attempts", "refused completions"],
    ..TRYING
};

pub(crate) const EVERYTHING_SLOTS: Cell = Cell {
    name: "everything at once, slots",
    how: "three schedules with slots every 100 ms to 1 s; SIGSTOP, also in the transaction that completes and between two \
          slots, SIGKILL and ended sessions",
    faults: EVERYTHING_CLAIMED.faults,
    ..SLOTTING
};

pub(crate) const CLOCKS_STEPPED_SLOTS: Cell = Cell {
    name: "client clocks wrong, slots",
    how: "the same schedules; the workers' wall clocks are stepped by up to an hour, both ways (libfaketime)",
    habits: CLOCKS_STEPPED.habits,
    faults: &[(3, Fault::StepClocks), (3, Fault::Pause), (1, Fault::Kill)],
    ..SLOTTING
};

pub(crate) const CLAIMS_CRASH: Cell = Cell {
    name: "claims, server crash and restart",
    how: "the same stop as above, while attempts are begun, are paused and complete",
    ttl: (200, 800),
    seconds: 8,
    setting: CRASH.setting,
    faults: CRASH.faults,
    every: CRASH.every,
    needs: &["grants", "completions", "recovered attempts"],
    ..CLAIMING
};

pub(crate) const CLAIMS_FAILOVER: Cell = Cell {
    name: "claims, synchronous failover",
    how: "the primary crashes and its synchronous standby is promoted, as above",
    ttl: FAILOVER.ttl,
    seconds: 6,
    setting: FAILOVER.setting,
    faults: FAILOVER.faults,
    every: FAILOVER.every,
    needs: &["grants", "completions", "recovered attempts"],
    ..CLAIMING
};

/// Six tasks in each process contend for three session-level locks.
const LOCKING: Cell = Cell {
    mode: Mode::Lock,
    workers: 4,
    // So that the trust in a session does not end while the machine is busy.
    ttl: (10_000, 10_000),
    pauses: false,
    needs: &["grants", "refused tries", "timed out acquires", "cancelled acquires"],
    ..TRYING
};

pub(crate) const LOCKS_CALM: Cell = Cell {
    name: "session-level locks, time-outs and cancels",
    how: "24 tasks try, wait for up to 5 ms, 50 ms or longer, give up; locks are held for a moment, some shared",
    seconds: 5,
    calm: true,
    ..LOCKING
};

pub(crate) const LOCKS_ENDED: Cell = Cell {
    name: "lock sessions ended",
    how: "`pg_terminate_backend` of sessions that hold locks or wait; SIGKILL, SIGSTOP; some hold for seconds",
    seconds: 8,
    ttl: (1_000, 1_200),
    habits: Habits { lingers: true, ..Habits::PLAIN },
    faults: &[(10, Fault::EndSession(Session::Lock)), (2, Fault::Kill), (2, Fault::Pause)],
    every: (20, 200),
    needs: &["grants", "timed out acquires", "losses signalled", "holds told of their loss in time"],
    ..LOCKING
};

pub(crate) const LOCKS_CRASH: Cell = Cell {
    name: "session-level locks, server crash and restart",
    how: "the same stop as above; every lock is lost, and some hold for seconds",
    seconds: 6,
    setting: CRASH.setting,
    faults: CRASH.faults,
    every: CRASH.every,
    needs: &["grants", "timed out acquires", "losses signalled"],
    ..LOCKS_ENDED
};
