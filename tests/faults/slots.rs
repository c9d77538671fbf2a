//! What a run with schedules begins with, when it has healed, and what is left of it in the database.

use std::time::Duration;

use fencepost::schedule::{Missed, Schedule};
use sqlx::{PgPool, Row as _};
use tokio::time::{sleep, timeout};

use crate::claim_checker::{self, Claimed};
use crate::history::now;
pub(crate) use crate::slot_checker::Slotted;
use crate::slot_checker::{Effect, Known};

/// What the names of schedules begin with. The rest is their rule, so every process has the same, and so has the judge.
const SCHEDULE: &str = "slots";

/// No slot is missed for good.
const HORIZON: Duration = Duration::from_hours(24);

/// Poison is no matter of this suite: slots may crash as often as they like.
const TABLES: &str = "\
    CREATE TABLE slot_effect (name text, slot bigint, key text, token bigint, process integer, op bigint, \
        at bigint DEFAULT (date_part('epoch', clock_timestamp()) * 1000000)::bigint); \
    CREATE TABLE judged (until bigint); \
    CREATE FUNCTION tough() RETURNS trigger LANGUAGE plpgsql AS \
        'BEGIN NEW.max_failures := 1000000; NEW.max_crashes := 1000000; RETURN NEW; END'; \
    CREATE TRIGGER tough BEFORE INSERT ON fencepost.claims FOR EACH ROW EXECUTE FUNCTION tough()";

/// When the slots of a schedule are, in microseconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Times {
    pub(crate) first: i64,
    pub(crate) period: i64,
    /// Listed one by one: so many.
    pub(crate) count: Option<i64>,
    pub(crate) alone: bool,
}

impl Times {
    /// By the schedule's name.
    pub(crate) fn of(name: &str) -> Option<Self> {
        let parts: Vec<&str> = name.split(' ').collect();
        let [SCHEDULE, together, first, period, count] = parts.as_slice() else { return None };
        let count = if *count == "all" { None } else { Some(count.parse().ok()?) };
        let alone = *together == "alone";
        Some(Self { first: first.parse().ok()?, period: period.parse().ok()?, count, alone })
    }

    fn name(self) -> String {
        let Self { first, period, count, alone } = self;
        let together = if alone { "alone" } else { "together" };
        let count = count.map_or("all".to_owned(), |count| count.to_string());
        format!("{SCHEDULE} {together} {first} {period} {count}")
    }

    pub(crate) fn schedule(self) -> Schedule {
        let schedule = if let Some(count) = self.count {
            let slot = |number| chrono::DateTime::from_timestamp_micros(self.first + number * self.period);
            Schedule::at(&self.name(), (0..count).map(|number| slot(number).unwrap()))
        } else {
            Schedule::every(&self.name(), Duration::from_micros(self.period.unsigned_abs()))
        };
        let schedule = schedule.unwrap().missed(Missed::All(HORIZON)).unwrap();
        if self.alone { schedule.one_at_a_time() } else { schedule }
    }

    pub(crate) fn has(self, slot: i64) -> bool {
        let since = slot - self.first;
        since >= 0 && since % self.period == 0 && self.count.is_none_or(|count| since / self.period < count)
    }

    /// Those after the one moment, up to the other.
    pub(crate) fn between(self, after: i64, until: i64) -> impl Iterator<Item = i64> {
        let next = ((after - self.first).div_euclid(self.period) + 1).max(0);
        let numbers = next..self.count.unwrap_or(i64::MAX);
        let slots = numbers.map(move |number| self.first + number * self.period);
        slots.take_while(move |slot| *slot <= until)
    }
}

pub(crate) fn is_schedule(name: &str) -> bool {
    Times::of(name).is_some()
}

/// More slots than a run of this length can need, the first ones due at once.
pub(crate) async fn names(pool: &PgPool, length: Duration) -> Vec<String> {
    let first = clock(pool).await;
    let micros = i64::try_from(length.as_micros()).unwrap() * 5 + 120_000_000;
    let listed = |period, alone| Times { first, period, count: Some(micros / period), alone };
    let every = Times { first: 0, period: 1_000_000, count: None, alone: false };
    [every, listed(100_000, false), listed(120_000, true)].map(Times::name).to_vec()
}

pub(crate) async fn prepare(pool: &PgPool) {
    sqlx::raw_sql(TABLES).execute(pool).await.unwrap();
}

/// How long until all that was due when the last fault had struck is done.
pub(crate) async fn heal(pool: &PgPool, patience: Duration) -> Option<Duration> {
    let began = now();
    let until = clock(pool).await;
    sqlx::query("INSERT INTO judged VALUES ($1)").bind(until).execute(pool).await.unwrap();
    let all = async {
        while read(pool).await.missing().next().is_some() {
            // Where processes die all the time a slot may have crashed too often: somebody looks, and has it tried again.
            let again =
                "SELECT count(fencepost.claim_retry(key)) FROM fencepost.claims WHERE state = 'poison'";
            sqlx::query(again).execute(pool).await.unwrap();
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(patience, all).await.ok().map(|()| Duration::from_nanos(now() - began))
}

pub(crate) async fn read(pool: &PgPool) -> Slotted {
    let known = sqlx::query(
        "SELECT name, (date_part('epoch', since) * 1000000)::bigint AS since FROM fencepost.schedules",
    );
    let known = known.fetch_all(pool).await.unwrap();
    let effects = sqlx::query("SELECT name, slot, process, op, at FROM slot_effect");
    let effects = effects.fetch_all(pool).await.unwrap();
    Slotted {
        known: known.iter().map(|row| Known::new(row.get("name"), row.get("since"))).collect(),
        effects: effects
            .iter()
            .map(|row| Effect {
                name: row.get("name"),
                slot: row.get("slot"),
                process: row.get("process"),
                op: row.get("op"),
                at: row.get("at"),
            })
            .collect(),
        until: sqlx::query_scalar("SELECT until FROM judged").fetch_one(pool).await.unwrap(),
    }
}

/// The same as claims, which slots are.
pub(crate) async fn claimed(pool: &PgPool) -> Claimed {
    let rows = sqlx::query("SELECT key, state, token FROM fencepost.claims").fetch_all(pool).await.unwrap();
    let effects =
        sqlx::query("SELECT key, token, process, op FROM slot_effect").fetch_all(pool).await.unwrap();
    Claimed {
        rows: rows
            .iter()
            .map(|row| claim_checker::Row {
                key: row.get("key"),
                state: row.get("state"),
                token: row.get("token"),
            })
            .collect(),
        effects: effects
            .iter()
            .map(|row| claim_checker::Effect {
                key: row.get("key"),
                token: row.get("token"),
                process: row.get("process"),
                op: row.get("op"),
            })
            .collect(),
    }
}

/// Whether somebody has begun another slot of its schedule since.
pub(crate) async fn overtaken(pool: &PgPool, key: &str, token: i64) -> bool {
    let of_schedule = &key[..=key.rfind('/').unwrap()];
    let overtaken = "SELECT EXISTS (SELECT FROM fencepost.claims WHERE starts_with(key, $1) AND token > $2)";
    sqlx::query_scalar(overtaken).bind(of_schedule).bind(token).fetch_one(pool).await.unwrap_or(false)
}

async fn clock(pool: &PgPool) -> i64 {
    let clock = "SELECT (date_part('epoch', clock_timestamp()) * 1000000)::bigint";
    sqlx::query_scalar(clock).fetch_one(pool).await.unwrap()
}
