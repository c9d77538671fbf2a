//! What a run with versioned rows begins with, what the database notes of them, and what is left in the end.

use std::time::Duration;

use sqlx::{AssertSqlSafe, PgPool, Row as _};
use tokio::time::{sleep, timeout};

use crate::history::now;
pub(crate) use crate::version_checker::Versions;
use crate::version_checker::{Event, Row};
use crate::worker::versioning;

/// Each change of a row is written down by the transaction that makes it, in the order of the row's lock.
const TABLES: &str = "\
    CREATE TABLE versioned (name text PRIMARY KEY, n bigint NOT NULL, process integer, op bigint); \
    CREATE TABLE changed (id bigint GENERATED ALWAYS AS IDENTITY, at timestamptz DEFAULT clock_timestamp(), \
        name text, before bigint, after bigint, n bigint, process integer, op bigint); \
    CREATE FUNCTION note_change() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS \
        'BEGIN \
            INSERT INTO public.changed (name, before, after, n, process, op) \
                VALUES (coalesce(NEW.name, OLD.name), OLD.version, NEW.version, NEW.n, NEW.process, NEW.op); \
            RETURN NULL; \
        END'; \
    CREATE TRIGGER note_change AFTER INSERT OR UPDATE OR DELETE ON versioned FOR EACH ROW \
        EXECUTE FUNCTION note_change(); ";

/// The rows, each with zero, made by nobody.
pub(crate) async fn fill(pool: &PgPool, names: &[String]) {
    let tables = format!("{TABLES}{}", versioning::table().add_column());
    sqlx::raw_sql(AssertSqlSafe(tables)).execute(pool).await.unwrap();
    let fill = "INSERT INTO versioned (name, n, process, op) SELECT unnest($1::text[]), 0, 0, 0";
    sqlx::query(fill).bind(names).execute(pool).await.unwrap();
}

/// How long until each row was updated once more.
pub(crate) async fn heal(pool: &PgPool, names: &[String], patience: Duration) -> Option<Duration> {
    let began = now();
    let last: String = sqlx::query_scalar("SELECT clock_timestamp()::text").fetch_one(pool).await.unwrap();
    let all = async {
        loop {
            let anew = "SELECT count(DISTINCT name) FROM changed \
                        WHERE before IS NOT NULL AND after IS NOT NULL AND at > $1::timestamptz";
            let anew: i64 = sqlx::query_scalar(anew).bind(&last).fetch_one(pool).await.unwrap();
            if usize::try_from(anew).unwrap() == names.len() {
                return;
            }
            sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(patience, all).await.ok().map(|()| Duration::from_nanos(now() - began))
}

pub(crate) async fn read(pool: &PgPool) -> Versions {
    let events = "SELECT name, before, after, n, process, op FROM changed ORDER BY id";
    let events = sqlx::query(events).fetch_all(pool).await.unwrap();
    let events = events.iter().map(|row| Event {
        name: row.get("name"),
        before: row.get("before"),
        after: row.get("after"),
        n: row.get("n"),
        process: row.get("process"),
        op: row.get("op"),
    });
    let rows = sqlx::query("SELECT name, version, n FROM versioned").fetch_all(pool).await.unwrap();
    let rows =
        rows.iter().map(|row| Row { name: row.get("name"), version: row.get("version"), n: row.get("n") });
    Versions { events: events.collect(), rows: rows.collect() }
}

/// Whether somebody has changed the row since it had this version. The server may be out of reach itself.
pub(crate) async fn overtaken(pool: &PgPool, name: &str, version: i64) -> bool {
    let overtaken = "SELECT NOT EXISTS (SELECT FROM versioned WHERE name = $1 AND version <= $2)";
    sqlx::query_scalar(overtaken).bind(name).bind(version).fetch_one(pool).await.unwrap_or(false)
}
