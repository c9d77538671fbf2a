//! The nightly job, on two servers whose clocks disagree by two days: a timer runs it twice, a schedule once.
//!
//! ```text
//! cargo run --example nightly_once
//! ```
//!
//! The servers are processes (this program runs itself again), under libfaketime where that is installed. A night
//! takes 400 ms. It fails if a schedule runs a night twice, or before it is due by the database's clock, or not at all.

#[path = "support/worker.rs"]
#[allow(dead_code, reason = "other examples use more of it")]
mod worker;

use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, SystemTime};

use chrono::{DateTime, TimeDelta, Utc};
use fencepost::schedule::Schedule;
use fencepost::testing::TestDatabase;
use fencepost::{Error, Owner};
use sqlx::PgPool;
use worker::{Result, Worker, end_with_parent, ensure, say, wait_for_a_line};

const NIGHTS: i64 = 5;
const NIGHT: TimeDelta = TimeDelta::milliseconds(400);

#[tokio::main]
async fn main() -> Result {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => tell().await,
        ["worker", name, clock, first] => work(name, clock, first).await,
        _ => Err("usage: nightly_once".into()),
    }
}

// ---- A server. -------------------------------------------------------------------------------------

async fn work(name: &str, clock: &str, first: &str) -> Result {
    end_with_parent()?;
    if let (Some(library), None) = (false_clock(), std::env::var_os("FAKETIME")) {
        // Once more, under a clock that is wrong. (The one that only counts is left alone, as on a server.)
        let mut again = Command::new(std::env::current_exe()?);
        again.args(["worker", name, clock, first]).env("LD_PRELOAD", library);
        return Err(again.env("FAKETIME", clock).env("FAKETIME_DONT_FAKE_MONOTONIC", "1").exec().into());
    }
    #[expect(clippy::disallowed_methods, reason = "to show how wrong it is")]
    say("clock", SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_secs());
    let pool = PgPool::connect(&std::env::var("DATABASE_URL")?).await?;
    let first: DateTime<Utc> = DateTime::from_timestamp_micros(first.parse()?).ok_or("a moment")?;

    // A timer in each server: each thinks that it is the one.
    for _ in 0..NIGHTS {
        sqlx::query("INSERT INTO by_timer (server) VALUES ($1)").bind(name).execute(&pool).await?;
    }
    say("timer", "done");
    wait_for_a_line()?;

    // A schedule. (In a service: `Schedule::every` or `Schedule::cron`. These are the nights of this story.)
    let owner = Owner::builder(&pool).label(name).start().await?;
    let nightly = Schedule::at("nightly-report", (0..NIGHTS).filter_map(|n| night(first, n)))?;
    loop {
        let looked = nightly.run_due(&owner, &pool, |slot| {
            let (pool, name) = (pool.clone(), name.to_owned());
            async move {
                let mut tx = pool.begin().await?;
                sqlx::query("INSERT INTO by_schedule (night, server) VALUES ($1, $2)")
                    .bind(slot.at().timestamp_micros())
                    .bind(name)
                    .execute(&mut *tx)
                    .await?;
                slot.complete(&mut tx).await?;
                tx.commit().await?;
                Ok::<_, Error>(())
            }
        });
        let looked = looked.await?;
        // The last night is over, for the other server, too.
        if looked.next.is_none() && looked.ran.is_empty() && looked.look_again > Duration::from_secs(1) {
            break;
        }
        tokio::time::sleep(looked.look_again).await;
    }
    owner.shutdown().await?;
    say("schedule", "done");
    Ok(())
}

fn night(first: DateTime<Utc>, n: i64) -> Option<DateTime<Utc>> {
    first.checked_add_signed(NIGHT * i32::try_from(n).ok()?)
}

fn false_clock() -> Option<PathBuf> {
    let machine = std::env::consts::ARCH;
    [
        format!("/usr/lib/{machine}-linux-gnu/faketime"),
        "/usr/lib/faketime".into(),
        "/usr/lib64/faketime".into(),
    ]
    .into_iter()
    .map(|folder| PathBuf::from(folder).join("libfaketimeMT.so.1"))
    .find(|library| library.is_file())
}

// ---- The storyteller. --------------------------------------------------------------------------------

async fn tell() -> Result {
    let database = TestDatabase::create().await?;
    let pool = database.pool();
    sqlx::raw_sql(
        "CREATE TABLE by_timer (server text);
         CREATE TABLE by_schedule (night bigint, server text, at timestamptz DEFAULT clock_timestamp())",
    )
    .execute(&pool)
    .await?;
    println!("Two servers, A's clock is a day behind, B's a day ahead; {NIGHTS} nights.\n");
    // Far enough ahead for both to be there.
    let first: i64 = sqlx::query_scalar(
        "SELECT (date_part('epoch', clock_timestamp() + interval '2 s') * 1000000)::bigint",
    )
    .fetch_one(&pool)
    .await?;
    let first = first.to_string();
    let mut servers =
        [Worker::start(&database, "A", &["-1d", &first])?, Worker::start(&database, "B", &["+1d", &first])?];
    let clocks: Vec<i64> =
        servers.iter_mut().map(|server| Ok(server.hear("clock")?.parse()?)).collect::<Result<_>>()?;
    match clocks[..] {
        [a, b] if b - a > 2 * 86_400 - 3_600 => {}
        _ => eprintln!("fencepost: libfaketime is not installed: both clocks are right here"),
    }
    for server in &mut servers {
        server.hear("timer")?;
    }
    let (reports,): (i64,) = sqlx::query_as("SELECT count(*) FROM by_timer").fetch_one(&pool).await?;
    println!("a timer in each server:   {NIGHTS} nights, {reports} reports");
    for server in &mut servers {
        server.tell("go")?;
    }
    for server in &mut servers {
        server.hear("schedule")?;
    }
    let (reports, nights, early): (i64, i64, i64) = sqlx::query_as(
        "SELECT count(*), count(DISTINCT night), count(*) FILTER (WHERE date_part('epoch', at) * 1000000 < night) FROM by_schedule",
    )
    .fetch_one(&pool)
    .await?;
    println!("a schedule in each:       {nights} nights, {reports} reports, {early} of them early");
    ensure((reports, nights, early) == (NIGHTS, NIGHTS, 0), "each night was run once, when it was due")?;
    drop(servers);
    Ok(database.close().await?)
}
