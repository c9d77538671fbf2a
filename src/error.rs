//! What can go wrong, as data: one enum, with the SQLSTATE kept.

use std::error::Error as StdError;
use std::time::Duration;

use serde::Deserialize;
use sqlx::error::DatabaseError;
use sqlx::postgres::{PgDatabaseError, PgSeverity};

use crate::token::{FencingToken, Version};

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything this crate fails with. That something is held by somebody else is not an error.
///
/// `Error::from(sqlx::Error)` classifies an error of your own statements in the same way: a write to a
/// table under [`fence::protect`](crate::fence::protect) becomes [`Error::Unfenced`], and so on.
///
/// Its text says what failed; why is in its [`source`](std::error::Error::source), as usual.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument that is wrong whatever the database holds. Found before any statement is sent.
    #[error("misuse: {what}")]
    #[non_exhaustive]
    Misuse {
        /// The rule, and how it was broken.
        what: String,
    },

    /// A lease, or an attempt at a claim, was held, and is not any more. Roll back; the next holder may be at work.
    #[error("\"{name}\" with token {token} is lost: {reason}")]
    #[non_exhaustive]
    Lost {
        /// The lease, or the claim's key.
        name: String,
        /// The token it was held with.
        token: FencingToken,
        /// Why it is lost.
        reason: LossReason,
    },

    /// A fence, or the end of an attempt, was refused its token: a later grant exists. Roll back.
    #[error("stale fence: \"{name}\" refused token {token}{}", current.map(|t| format!("; it has seen token {t}")).unwrap_or_default())]
    #[non_exhaustive]
    StaleFence {
        /// The lease, the resource or the claim's key.
        name: String,
        /// The token that was refused.
        token: FencingToken,
        /// The later one; none if the name has no grant at all.
        current: Option<FencingToken>,
    },

    /// A write to a protected table in a transaction that has not passed the fence.
    #[error(
        "unfenced write: table {table} is protected by lease \"{name}\": pass its fence first in the same transaction"
    )]
    #[non_exhaustive]
    Unfenced {
        /// The table, quoted as SQL.
        table: String,
        /// The lease whose fence it wants.
        name: String,
    },

    /// The semaphore has another limit than the caller says. Whichever is right, it is changed explicitly:
    /// [`Semaphore::resize`](crate::Semaphore::resize).
    #[error("semaphore \"{name}\" has {permits} permits, not {asked}")]
    #[non_exhaustive]
    OtherLimit {
        /// The semaphore.
        name: String,
        /// Its limit.
        permits: u32,
        /// The caller's.
        asked: u32,
    },

    /// The database did not answer in time. Nothing was changed, or what was changed will be undone.
    #[error("timed out after {after:?}: {step}")]
    #[non_exhaustive]
    TimedOut {
        /// What was waited for.
        step: &'static str,
        /// How long.
        after: Duration,
        /// The last failure seen while waiting.
        #[source]
        source: Option<sqlx::Error>,
    },

    /// Not acquired in the time that the caller would wait: somebody else holds it.
    #[error("\"{name}\" is busy, not acquired within {after:?}: held by {}{}",
        label.as_deref().unwrap_or("somebody"), token.map(|t| format!(" with token {t}")).unwrap_or_default())]
    #[non_exhaustive]
    Busy {
        /// The lease, or the key of the advisory lock.
        name: String,
        /// The label of whoever held it last, as far as known.
        label: Option<String>,
        /// The holder's token, as far as known.
        token: Option<FencingToken>,
        /// How long it was waited for.
        after: Duration,
    },

    /// The group has another number of partitions, and is in use: a key would have two writers. Let all its members leave
    /// (or its owners die), then join with the other number.
    #[error(
        "group \"{name}\" has {partitions} partitions and is in use: let all its members leave before one joins with another number"
    )]
    #[non_exhaustive]
    GroupInUse {
        /// The group.
        name: String,
        /// How many partitions it has.
        partitions: u32,
    },

    /// The request was sent and its answer lost, so it may have happened. What an acquire got in this way is
    /// found and freed by the owner; a COMMIT of yours must be looked up before it is repeated.
    #[error("outcome unknown: {step}: the answer was lost")]
    #[non_exhaustive]
    OutcomeUnknown {
        /// What was asked.
        step: &'static str,
        /// How the answer was lost.
        #[source]
        source: sqlx::Error,
    },

    /// The transaction was chosen as the victim of a deadlock (40P01). Run it again.
    #[error("deadlock: the transaction was rolled back; run it again")]
    #[non_exhaustive]
    Deadlock {
        /// Postgres's report.
        #[source]
        source: sqlx::Error,
    },

    /// What was read has changed since the transaction's snapshot (40001). Run it again; for a fence: it
    /// answers then, and lets nobody stale pass.
    #[error("serialization failure: the transaction was rolled back; run it again")]
    #[non_exhaustive]
    SerializationFailure {
        /// Postgres's report.
        #[source]
        source: sqlx::Error,
    },

    /// [`transaction`](crate::transaction()) gave up, since each run ended in a deadlock or a serialization failure; or
    /// [`update_with`](crate::version::Versioned::update_with), since each time somebody else was faster. Nothing was
    /// committed.
    #[error("gave up after {attempts} attempts: each time others were in the way")]
    #[non_exhaustive]
    RetriesExhausted {
        /// How often it ran.
        attempts: u32,
        /// The error of the last run, as the work returned it.
        #[source]
        source: Box<dyn StdError + Send + Sync>,
    },

    /// The row has another version than the one that was read: somebody has changed it. Nothing was changed. Read it
    /// again, and decide anew.
    #[error("conflict: the row was changed by somebody else{}", current.map(|v| format!("; it has version {v} by now")).unwrap_or_default())]
    #[non_exhaustive]
    Conflict {
        /// The version that it has; none if Postgres does not say, under REPEATABLE READ and SERIALIZABLE.
        current: Option<Version>,
        /// Postgres's report (40001), if it gave one. The transaction is aborted by it.
        #[source]
        source: Option<sqlx::Error>,
    },

    /// There is no row with this key (any more). Nothing was changed.
    #[error("gone: there is no row with this key")]
    Gone,

    /// The row is there with the version asked for, and was not changed all the same. It is no conflict: trying
    /// again changes nothing.
    #[error(
        "suppressed: a row of {table} has the version asked for and was not changed: \
         a trigger, a policy of row security or another condition of the statement prevented it"
    )]
    #[non_exhaustive]
    Suppressed {
        /// The table, quoted as SQL.
        table: String,
    },

    /// The table does not keep its versions as it has to. Roll back, if something was changed.
    #[error("{table} does not keep versions: {what}")]
    #[non_exhaustive]
    NotVersioned {
        /// The table, quoted as SQL.
        table: String,
        /// What is wrong.
        what: &'static str,
    },

    /// No connection of the given pool became free in time.
    #[error("pool exhausted: no connection of {pool} became free in time")]
    #[non_exhaustive]
    PoolExhausted {
        /// Which pool.
        pool: &'static str,
        /// What the pool said.
        #[source]
        source: sqlx::Error,
    },

    /// There is no room for another advisory lock: in the server's lock table (53200), or under the cap of
    /// [`OwnerBuilder::advisory_locks`](crate::OwnerBuilder::advisory_locks). Nothing held is lost by it.
    #[error("lock table full: {}", match cap {
        Some(cap) => format!("this owner holds or asks for {cap} session-level advisory locks, its cap"),
        None => "the server has no room for another lock: raise max_locks_per_transaction".to_owned(),
    })]
    #[non_exhaustive]
    LockTableFull {
        /// The owner's cap, if it is that.
        cap: Option<usize>,
        /// Postgres's report, if it is the server's table.
        #[source]
        source: Option<sqlx::Error>,
    },

    /// What was asked for does not work through a pooler in transaction mode. Found before it was tried.
    #[error("a transaction-mode pooler is in between, and {what} does not work through one: use {instead}")]
    #[non_exhaustive]
    TransactionPooler {
        /// What was asked for.
        what: &'static str,
        /// What works there.
        instead: &'static str,
    },

    /// The schema `fencepost` is not in this database.
    #[error(
        "the schema fencepost is not in this database: run fencepost::migrate(&pool), or the printed migrations"
    )]
    #[non_exhaustive]
    SchemaMissing {
        /// Postgres's report.
        #[source]
        source: sqlx::Error,
    },

    /// The schema and this library do not go together.
    #[error(
        "this library needs schema version {library}; the database has {schema}, which serves libraries from {compatible_from}: {}",
        if schema < library { "run fencepost::migrate(&pool) or the printed migrations" } else { "upgrade the library" }
    )]
    #[non_exhaustive]
    SchemaVersion {
        /// The schema version this library was written for.
        library: i32,
        /// The version in the database.
        schema: i32,
        /// The oldest library version that it serves.
        compatible_from: i32,
    },

    /// The role may not call our functions (42501).
    #[error("the role lacks rights on the schema fencepost: its owner runs SELECT fencepost.allow('role')")]
    #[non_exhaustive]
    NotAllowed {
        /// Postgres's report.
        #[source]
        source: sqlx::Error,
    },

    /// The [`Owner`](crate::Owner) has been shut down or dropped.
    #[error("the owner is stopped")]
    Stopped,

    /// Any other failure of the database or of the way to it.
    #[error("database: {doing}")]
    #[non_exhaustive]
    Database {
        /// What was being done.
        doing: &'static str,
        /// The failure.
        #[source]
        source: sqlx::Error,
    },
}

/// Why a held lease, or an owner, is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum LossReason {
    /// Its time ran out: this process was paused past it, or the cap of [`Lease::at_most`](crate::Lease::at_most) came.
    #[error("its time ran out")]
    Expired,
    /// A later grant was seen.
    #[error("token {by} took it over")]
    TakenOver {
        /// The later grant's token.
        by: FencingToken,
    },
    /// An operator released it, or the database has forgotten it.
    #[error("it was released from outside")]
    Released,
    /// An attempt at a claim has been completed, failed or given back before.
    #[error("it has been ended before")]
    Settled,
    /// The database could not be reached until the local deadline.
    #[error("the database could not be reached until the deadline")]
    Unreachable,
    /// The database session that held it has ended: terminated, crashed, or its connection broke.
    #[error("its database session has ended")]
    SessionEnded,
    /// The owner was shut down or dropped.
    #[error("its owner was stopped")]
    Stopped,
}

impl Error {
    pub(crate) fn misuse(what: impl Into<String>) -> Self {
        Self::Misuse { what: what.into() }
    }

    /// Whether the same call may succeed when it is simply made again, in a new transaction.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Deadlock { .. }
            | Self::SerializationFailure { .. }
            | Self::RetriesExhausted { .. }
            | Self::PoolExhausted { .. }
            | Self::LockTableFull { .. }
            | Self::Busy { .. }
            | Self::TimedOut { .. }
            | Self::Conflict { source: Some(_), .. } => true,
            Self::Database { source, .. } => is_transient(source),
            _ => false,
        }
    }

    /// Whether it says that a lease is not held any more: by this process's clock, or refused by a fence.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Lost { .. } | Self::StaleFence { .. })
    }

    /// Whether something was waited for in vain.
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::TimedOut { .. } | Self::Busy { .. } | Self::PoolExhausted { .. })
    }

    /// The SQLSTATE, where Postgres gave one.
    pub fn sqlstate(&self) -> Option<&str> {
        let source = match self {
            Self::OutcomeUnknown { source, .. }
            | Self::Deadlock { source }
            | Self::SerializationFailure { source }
            | Self::PoolExhausted { source, .. }
            | Self::SchemaMissing { source }
            | Self::NotAllowed { source }
            | Self::Database { source, .. } => source,
            Self::TimedOut { source, .. }
            | Self::LockTableFull { source, .. }
            | Self::Conflict { source, .. } => source.as_ref()?,
            Self::RetriesExhausted { source, .. } => return report(&**source).map(PgDatabaseError::code),
            Self::StaleFence { .. } => return Some("LK001"),
            Self::Lost { .. } => return Some("LK002"),
            Self::Unfenced { .. } => return Some("LK006"),
            Self::GroupInUse { .. } => return Some("LK010"),
            Self::OtherLimit { .. } => return Some("LK007"),
            Self::Misuse { .. }
            | Self::SchemaVersion { .. }
            | Self::TransactionPooler { .. }
            | Self::Busy { .. }
            | Self::Gone
            | Self::Suppressed { .. }
            | Self::NotVersioned { .. }
            | Self::Stopped => return None,
        };
        server_error(source).map(PgDatabaseError::code)
    }

    /// Classifies a failure of one of our own calls; `doing` says what was attempted.
    pub(crate) fn database(doing: &'static str, source: sqlx::Error) -> Self {
        Self::classify(doing, source, true)
    }

    /// `ours`: the statement was a call of ours, so a right that it lacks is one on our schema.
    fn classify(doing: &'static str, source: sqlx::Error, ours: bool) -> Self {
        if matches!(source, sqlx::Error::PoolTimedOut) {
            return Self::PoolExhausted { pool: "the application's pool", source };
        }
        let Some(error) = server_error(&source) else { return Self::Database { doing, source } };
        let names_us = error.message().contains("fencepost");
        match error.code() {
            "40P01" => Self::Deadlock { source },
            "40001" => Self::SerializationFailure { source },
            // Also the code of a lack of memory; the setting's name is in the hint, in every language.
            "53200" if error.hint().is_some_and(|hint| hint.contains("max_locks_per_transaction")) => {
                Self::LockTableFull { cap: None, source: Some(source) }
            }
            // No such schema, function or table.
            "3F000" | "42883" | "42P01" if names_us => Self::SchemaMissing { source },
            "42501" if ours || names_us => Self::NotAllowed { source },
            _ => refusal(error).unwrap_or(Self::Database { doing, source }),
        }
    }

    /// The same for a statement of ours that needs rights on the caller's own objects.
    pub(crate) fn on_callers_objects(doing: &'static str, source: sqlx::Error) -> Self {
        Self::classify(doing, source, false)
    }
}

impl From<sqlx::Error> for Error {
    fn from(source: sqlx::Error) -> Self {
        Self::classify("a statement", source, false)
    }
}

/// The figures that our functions put into DETAIL.
#[derive(Deserialize)]
struct Detail {
    name: String,
    token: Option<FencingToken>,
    current: Option<FencingToken>,
    why: Option<String>,
    table: Option<String>,
    permits: Option<u32>,
    asked: Option<u32>,
    partitions: Option<u32>,
}

/// An error raised by our own functions, from its SQLSTATE and DETAIL.
fn refusal(error: &PgDatabaseError) -> Option<Error> {
    if !error.code().starts_with("LK") {
        return None;
    }
    let Detail { name, token, current, why, table, permits, asked, partitions } =
        serde_json::from_str(error.detail()?).ok()?;
    match error.code() {
        "LK001" => Some(Error::StaleFence { name, token: token?, current }),
        "LK002" => {
            let reason = match why.as_deref() {
                Some("released") => LossReason::Released,
                Some("settled") => LossReason::Settled,
                _ => LossReason::Expired,
            };
            Some(Error::Lost { name, token: token?, reason })
        }
        "LK006" => Some(Error::Unfenced { table: table?, name }),
        "LK007" => Some(Error::OtherLimit { name, permits: permits?, asked: asked? }),
        "LK010" => Some(Error::GroupInUse { name, partitions: partitions? }),
        _ => None,
    }
}

fn server_error(error: &sqlx::Error) -> Option<&PgDatabaseError> {
    error.as_database_error()?.try_downcast_ref()
}

/// Whether it is an answer of our own functions (or that a row was locked for too long): the session that
/// brought it is in order.
pub(crate) fn is_refusal(error: &sqlx::Error) -> bool {
    server_error(error).is_some_and(|error| error.code().starts_with("LK")) || is_lock_not_available(error)
}

/// Whether a lock was not to be had in time.
pub(crate) fn is_lock_not_available(error: &sqlx::Error) -> bool {
    server_error(error).is_some_and(|error| error.code() == "55P03")
}

/// Whether somebody else has changed the row of this statement since the transaction's snapshot (or the row is on its
/// way to another partition). Not the other kind of 40001, which is about all that the transaction has read.
pub(crate) fn is_row_conflict(error: &sqlx::Error) -> bool {
    server_error(error).is_some_and(|error| error.code() == "40001" && error.file() != Some("predicate.c"))
}

/// Whether the transaction that ended in this error is to be run again: a deadlock, a serialization failure or a stale
/// statement, also behind errors of the caller's own.
pub(crate) fn asks_to_run_again(error: &(dyn StdError + 'static)) -> bool {
    report(error).is_some_and(|report| matches!(report.code(), "40P01" | "40001"))
        || is_stale_statement(error)
}

/// Whether a prepared statement would return other columns by now: a table has changed. It fails for ever on a connection
/// that keeps it.
pub(crate) fn is_stale_statement(error: &(dyn StdError + 'static)) -> bool {
    report(error).is_some_and(|report| {
        // The code means only that something is not supported, and the message is translated.
        report.code() == "0A000" && report.routine() == Some("RevalidateCachedQuery")
    })
}

/// The server's report in the first error of the chain that can have one.
fn report<'a>(error: &'a (dyn StdError + 'static)) -> Option<&'a PgDatabaseError> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(ours) = error.downcast_ref::<Error>() {
            return match ours {
                // What that transaction was told has been acted upon.
                Error::RetriesExhausted { .. } | Error::OutcomeUnknown { .. } => None,
                ours => report(ours.source()?),
            };
        }
        if let Some(theirs) = error.downcast_ref::<sqlx::Error>() {
            return server_error(theirs);
        }
        // A transparent wrapper of sqlx's error shows only what is behind that.
        if let Some(boxed) = error.downcast_ref::<Box<dyn DatabaseError>>() {
            return boxed.try_downcast_ref();
        }
        next = error.source();
    }
    None
}

/// What may be otherwise in a moment, on this or another connection: connection lost or refused, server starting
/// up, shutting down or read-only (a standby, which has no unlogged tables either), too many connections, a lock not available, a deadlock.
pub(crate) fn is_transient(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(_) | sqlx::Error::PoolTimedOut => true,
        sqlx::Error::Database(_) => server_error(error).is_some_and(|error| {
            let code = error.code();
            code.starts_with("08")
                || code.starts_with("57P")
                || matches!(code, "53300" | "55P03" | "57014" | "25006" | "0A000" | "40P01" | "40001")
        }),
        _ => false,
    }
}

/// Whether the failure leaves open what the server did with the statement. An error *report* is an answer:
/// it was rolled back. Except when the session was ended with it (that may have come after the commit), or
/// the report is a pooler's about a server that it lost.
pub(crate) fn leaves_outcome_open(error: &sqlx::Error) -> bool {
    let Some(report) = server_error(error) else { return true };
    matches!(report.severity(), PgSeverity::Panic | PgSeverity::Fatal)
        || report.code().starts_with("57P")
        || report.code().starts_with("08")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_names_the_lock_the_token_and_what_to_do() {
        let error = Error::StaleFence {
            name: "nightly".into(),
            token: FencingToken::new(33).unwrap(),
            current: Some(FencingToken::new(34).unwrap()),
        };
        assert_eq!(error.to_string(), "stale fence: \"nightly\" refused token 33; it has seen token 34");
        assert!(error.is_lost() && !error.is_retryable());
        assert_eq!(error.sqlstate(), Some("LK001"));
        let error = Error::SchemaVersion { library: 7, schema: 9, compatible_from: 8 };
        assert!(error.to_string().ends_with("upgrade the library"), "{error}");
    }

    #[test]
    fn a_lost_connection_leaves_the_outcome_open_and_is_worth_a_retry() {
        let cut = || sqlx::Error::Io(std::io::ErrorKind::ConnectionReset.into());
        assert!(leaves_outcome_open(&cut()) && is_transient(&cut()));
        assert!(Error::database("acquire", cut()).is_retryable());
        assert!(matches!(Error::from(sqlx::Error::PoolTimedOut), Error::PoolExhausted { .. }));
        assert!(!Error::from(sqlx::Error::RowNotFound).is_retryable());
    }
}
