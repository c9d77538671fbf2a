//! Every statement this library sends, and the two ways a call travels.
//!
//! On a connection of its own a call is a prepared statement with parameters: one round trip. Behind a
//! transaction-mode pooler prepared statements of several clients collide, so there the same text travels
//! by the simple protocol, with its parameters written out. Text of other than the plainest characters is
//! written in hexadecimal, so no quoting rule is ever relied on.

pub(crate) mod advisory;
pub(crate) mod claim;
pub(crate) mod schedule;

use std::fmt::Write as _;
use std::time::Duration;

use sqlx::postgres::{PgArguments, PgRow, PgTransaction};
use sqlx::{AssertSqlSafe, Executor as _, PgConnection, PgPool, Postgres, SqlSafeStr};
use uuid::Uuid;

use crate::driver;
use crate::name::LockName;
use crate::token::Grant;

pub(crate) const VERSION: &str = "SELECT version, compatible_from FROM fencepost.version()";

pub(crate) const OWNER_START: &str =
    "SELECT fencepost.owner_start($1::text, $2::bigint * interval '1 microsecond') AS id";

pub(crate) const HEARTBEAT: &str = "SELECT (date_part('epoch', remaining) * 1000000)::bigint AS remaining, revocations \
     FROM fencepost.heartbeat($1::uuid)";

pub(crate) const OWNER_STOP: &str =
    "SELECT name, waiting, wake_channel, wake_payload FROM fencepost.owner_stop($1::uuid)";

pub(crate) const OWNED: &str = "SELECT what, name, token, grant_id FROM fencepost.owned($1::uuid)";

pub(crate) const ACQUIRE: &str = "SELECT granted, token, label, \
     (date_part('epoch', remaining) * 1000000)::bigint AS remaining, \
     (date_part('epoch', cap) * 1000000)::bigint AS cap, ticket, ahead, wake_channel, wake_payload \
     FROM fencepost.acquire($1::text, $2::uuid, $3::uuid, $4::bigint * interval '1 microsecond', \
     $5::text::jsonb, NULL, $6::boolean, $7::boolean, $8::bigint::integer)";

pub(crate) const PERMIT_ACQUIRE: &str = "SELECT granted, token, label, \
     (date_part('epoch', remaining) * 1000000)::bigint AS remaining, \
     (date_part('epoch', cap) * 1000000)::bigint AS cap, ticket, ahead, wake_channel, wake_payload \
     FROM fencepost.permit_acquire($1::text, $2::bigint::integer, $3::bigint::integer, $4::uuid, $5::uuid, $6::boolean)";

pub(crate) const SEMAPHORE_RESIZE: &str = "SELECT waiting, wake_channel, wake_payload \
     FROM fencepost.semaphore_resize($1::text, $2::bigint::integer)";

pub(crate) const RELEASE: &str = "SELECT released, waiting, wake_channel, wake_payload \
     FROM fencepost.release($1::text, $2::bigint, $3::uuid)";

pub(crate) const WITHDRAW: &str =
    "SELECT waiting, wake_channel, wake_payload FROM fencepost.withdraw($1::text, $2::uuid)";

pub(crate) const HAND_OVER: &str =
    "SELECT waiting, wake_channel, wake_payload FROM fencepost.hand_over($1::text)";

/// A statement of its own, after the commit that it tells of: inside a transaction that waits for the disk it
/// would serialise all such commits of the database.
pub(crate) const NOTIFY: &str = "SELECT pg_catalog.pg_notify($1::text, $2::text)";

pub(crate) const LEADER: &str = "SELECT term, label, asked FROM fencepost.leader($1::text)";

pub(crate) const ASK_TO_RESIGN: &str =
    "SELECT fencepost.ask_to_resign($1::text, $2::bigint * interval '1 microsecond') AS asked";

pub(crate) const MEMBER_ROUND: &str = "SELECT settled, \"position\", held, free \
     FROM fencepost.member_round($1::text, $2::bigint::integer, $3::uuid, $4::bigint::integer)";

pub(crate) const MEMBER_LEAVE: &str = "SELECT fencepost.member_leave($1::text, $2::uuid)";

pub(crate) const PRUNE: &str =
    "SELECT owners, leases, permits FROM fencepost.prune($1::bigint * interval '1 microsecond')";

pub(crate) const ADVANCE: &str = "SELECT fencepost.advance($1::text, $2::bigint)";

pub(crate) const PROTECT: &str = "SELECT fencepost.protect($1::text::regclass, $2::text)";

pub(crate) const UNPROTECT: &str = "SELECT fencepost.unprotect($1::text::regclass)";

const FENCE: &str = "SELECT fencepost.fence($1::text, $2::bigint, $3::uuid)";

/// What a session of ours sets for itself, whatever the role's or the database's defaults are. Not behind a
/// transaction pooler, where it would leak into the sessions of others. `{bound}`: milliseconds.
pub(crate) const SETTINGS: &str = "\
    SET default_transaction_isolation = 'read committed'; \
    SET default_transaction_read_only = off; \
    SET default_transaction_deferrable = off; \
    SET search_path = pg_catalog, pg_temp; \
    SET synchronous_commit = off; \
    SET statement_timeout = {bound}; \
    SET lock_timeout = 0; \
    SET idle_in_transaction_session_timeout = {bound}; \
    SET tcp_keepalives_idle = 5; \
    SET tcp_keepalives_interval = 2; \
    SET tcp_keepalives_count = 3; \
    SET tcp_user_timeout = 15000; \
    SELECT pg_catalog.set_config(name, CASE name WHEN 'client_connection_check_interval' THEN '1000' ELSE '0' END, false) \
    FROM pg_catalog.pg_settings \
    WHERE name IN ('transaction_timeout', 'idle_session_timeout') \
    OR (name = 'client_connection_check_interval' AND pg_catalog.version() LIKE '%linux%')";

/// The same for one call behind a transaction pooler, in one message and so in one implicit transaction.
const PREAMBLE: &str = "\
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED READ WRITE; \
    SET LOCAL search_path = pg_catalog, pg_temp; \
    SET LOCAL statement_timeout = {bound}; \
    SET LOCAL lock_timeout = 0; ";

/// One parameter of a call.
#[derive(Clone, Debug)]
pub(crate) enum Arg {
    Text(String),
    OptionalText(Option<String>),
    Uuid(Uuid),
    Number(i64),
    OptionalNumber(Option<i64>),
    Bool(bool),
}

/// A statement with its parameters.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    text: &'static str,
    args: Vec<Arg>,
}

impl Call {
    pub(crate) fn new(text: &'static str, args: impl Into<Vec<Arg>>) -> Self {
        Self { text, args: args.into() }
    }

    /// Prepared, one round trip (two the first time on a connection).
    pub(crate) async fn prepared(&self, conn: &mut PgConnection) -> sqlx::Result<Vec<PgRow>> {
        let mut query: sqlx::query::Query<'_, Postgres, PgArguments> = sqlx::query(self.text);
        for arg in &self.args {
            query = match arg {
                Arg::Text(text) => query.bind(text.as_str()),
                Arg::OptionalText(text) => query.bind(text.as_deref()),
                Arg::Uuid(id) => query.bind(*id),
                Arg::Number(number) => query.bind(*number),
                Arg::OptionalNumber(number) => query.bind(*number),
                Arg::Bool(flag) => query.bind(*flag),
            };
        }
        driver::rows(query.fetch_all(conn)).await
    }

    /// Simple protocol, one message: right behind a transaction pooler.
    pub(crate) async fn through_pooler(
        &self,
        conn: &mut PgConnection,
        bound: Duration,
    ) -> sqlx::Result<Vec<PgRow>> {
        let text = with_bound(PREAMBLE, bound) + &self.written_out();
        rows(conn, AssertSqlSafe(text)).await
    }

    /// Simple protocol, in whatever state the caller's connection is: leaves no prepared statement behind.
    pub(crate) async fn written_out_on(&self, conn: &mut PgConnection) -> sqlx::Result<Vec<PgRow>> {
        rows(conn, AssertSqlSafe(self.written_out())).await
    }

    /// The text with its parameters in it.
    fn written_out(&self) -> String {
        let mut out = String::with_capacity(self.text.len() + 64);
        let mut rest = self.text;
        while let Some((before, after)) = rest.split_once('$') {
            out.push_str(before);
            let digits = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
            let (number, tail) = after.split_at(digits);
            match number.parse::<usize>().ok().and_then(|n| self.args.get(n.checked_sub(1)?)) {
                Some(arg) => push_literal(&mut out, arg),
                None => out.push('$'),
            }
            rest = tail;
        }
        out + rest
    }
}

/// What the text answers, by the simple protocol.
pub(crate) async fn rows(conn: &mut PgConnection, text: impl SqlSafeStr) -> sqlx::Result<Vec<PgRow>> {
    driver::rows(conn.fetch_all(sqlx::raw_sql(text))).await
}

fn push_literal(out: &mut String, arg: &Arg) {
    match arg {
        Arg::Text(text) | Arg::OptionalText(Some(text)) => push_text(out, text),
        Arg::OptionalText(None) | Arg::OptionalNumber(None) => out.push_str("NULL"),
        // A String as a fmt::Write never fails.
        Arg::Uuid(id) => _ = write!(out, "'{id}'"),
        Arg::Number(number) | Arg::OptionalNumber(Some(number)) => _ = write!(out, "({number})"),
        Arg::Bool(flag) => _ = write!(out, "{flag}"),
    }
}

/// Text as an expression without a character of it that any quoting rule is about.
fn push_text(out: &mut String, text: &str) {
    // The common case, which is cheaper for the server.
    if text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_./: ".contains(&byte)) {
        out.extend(["'", text, "'"]);
        return;
    }
    out.push_str("pg_catalog.convert_from(pg_catalog.decode('");
    for byte in text.bytes() {
        _ = write!(out, "{byte:02x}");
    }
    out.push_str("', 'hex'), 'UTF8')");
}

/// The fence of a lease, as text for the simple protocol: it works in any transaction of the caller's, on
/// any connection, and leaves no prepared statement behind.
pub(crate) fn fence(name: &LockName, grant: Grant) -> String {
    let args = [
        Arg::Text(name.as_str().to_owned()),
        Arg::Number(grant.token.as_i64()),
        Arg::Uuid(grant.id.as_uuid()),
    ];
    Call::new(FENCE, args).written_out()
}

/// Begins a transaction by this message, which ends with BEGIN: statements before it share an implicit
/// transaction, which BEGIN makes the explicit one; one that fails leaves a clean connection behind. Nobody taking
/// the transaction, it is rolled back.
pub(crate) async fn begin(pool: &PgPool, message: String) -> sqlx::Result<PgTransaction<'static>> {
    let pool = pool.clone();
    #[expect(
        clippy::disallowed_methods,
        reason = "sqlx loses track of a transaction whose BEGIN is cancelled, so it must not be; and it belongs to \
                  the runtime of the pool's connections, not to the owner's"
    )]
    let begun =
        tokio::spawn(async move { driver::caught(pool.begin_with(AssertSqlSafe(message))).await }).await;
    begun.unwrap_or_else(|_runtime_ended| Err(sqlx::Error::WorkerCrashed))
}

/// For the database, which counts in microseconds.
pub(crate) fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

/// Fills `{bound}`, in milliseconds; at least one, since zero means no bound to Postgres.
pub(crate) fn with_bound(text: &str, bound: Duration) -> String {
    text.replace("{bound}", &bound.as_millis().clamp(1, 0x7fff_ffff).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_written_out_without_a_quoted_character_of_the_text() {
        let call = Call::new(
            "SELECT $1::text, $2::uuid, $3::bigint * interval '1 microsecond', $12, $",
            [Arg::Text("a'b\\$1".into()), Arg::Uuid(Uuid::nil()), Arg::OptionalNumber(None)],
        );
        assert_eq!(
            call.written_out(),
            "SELECT pg_catalog.convert_from(pg_catalog.decode('6127625c2431', 'hex'), 'UTF8')::text, \
             '00000000-0000-0000-0000-000000000000'::uuid, NULL::bigint * interval '1 microsecond', $, $"
        );
    }

    #[test]
    fn plain_text_is_written_plainly() {
        let call = Call::new(
            "SELECT $1::text, $2::text",
            [Arg::Text("nightly-report: 7".into()), Arg::OptionalText(None)],
        );
        assert_eq!(call.written_out(), "SELECT 'nightly-report: 7'::text, NULL::text");
    }

    #[test]
    fn a_bound_is_never_zero_which_would_mean_none() {
        assert_eq!(with_bound("{bound}", Duration::from_micros(3)), "1");
        assert_eq!(with_bound("{bound}", Duration::MAX), "2147483647");
    }
}
