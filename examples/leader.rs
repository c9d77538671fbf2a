//! A leader among three candidates, with real processes: the first leader is killed, the second one paused, the third
//! one asked to resign. There is never more than one, and whoever comes back too late is refused.
//!
//! ```text
//! cargo run --example leader
//! ```
//!
//! This process takes no part: it starts the candidates (it runs itself again), looks on, and does to them what the
//! story needs. It checks every claim it prints: it fails if one is not true. Nothing depends on how long a step
//! takes; what is awaited is what a candidate says, or what the database shows.

#[path = "support/worker.rs"]
#[expect(dead_code, reason = "other examples use other parts of it")]
mod worker;

use std::ops::ControlFlow;
use std::os::unix::process::ExitStatusExt as _;
use std::time::Duration;

use fencepost::testing::TestDatabase;
use fencepost::{Election, FencingToken, Leaders, Leadership, Owner, fence};
use rustix::process::{Pid, Signal, kill_process};
use sqlx::PgPool;
use worker::{DEADLINE, Result, Worker, end_with_parent, ensure, say};

/// Short, so that the story does not take long. Leave it at its default in a service.
const TTL: Duration = Duration::from_secs(1);

#[tokio::main]
async fn main() -> Result {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => tell().await,
        ["worker", name] => work(name).await,
        _ => Err("usage: leader".into()),
    }
}

// ---- A candidate: a small service, like one that you might have. ------------------------------------

/// Schedules whenever it leads. What it says on stdout is what the storyteller hears.
async fn work(name: &str) -> Result {
    end_with_parent()?;
    let pool = PgPool::connect(&std::env::var("DATABASE_URL")?).await?;
    let owner = Owner::builder(&pool).label(name).ttl(TTL).start().await?;

    // The whole of leading, to a service. (The grace is for the story: it has more to say after a loss.)
    let scheduler = Election::named("scheduler")?.grace(DEADLINE);
    scheduler
        .run(&owner, |leadership| {
            let pool = pool.clone();
            async move {
                match lead(&leadership, &pool).await {
                    Ok(()) => ControlFlow::Continue(()),
                    Err(error) => ControlFlow::Break(error.to_string()),
                }
            }
        })
        .await
        .map_or_else(|error| Err(error.into()), |failed| Err(failed.into()))
}

/// One term.
async fn lead(
    leadership: &Leadership,
    pool: &PgPool,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let mut tx = leadership.begin(pool).await?;
    sqlx::query("INSERT INTO journal (leader, term) SELECT label, term FROM fencepost.leader('scheduler')")
        .execute(&mut *tx)
        .await?;
    tx.commit().await?;
    say("leads", leadership.term());

    tokio::select! {
        reason = leadership.lost() => {
            say("lost", reason);
            // It knows by its own clock. If it did not, the database does:
            let mut tx = pool.begin().await?;
            let late = fence::check(&mut tx, leadership.name(), leadership.grant()).await;
            say("late", late.err().map_or("written".to_owned(), |refused| refused.to_string()));
        }
        () = leadership.asked_to_resign() => say("asked", leadership.term()),
    }
    Ok(())
}

// ---- The storyteller: starts the candidates, looks on, and interferes. ------------------------------

async fn tell() -> Result {
    let database = TestDatabase::create().await?;
    let pool = database.pool();
    sqlx::raw_sql(
        "CREATE TABLE journal (line bigint GENERATED ALWAYS AS IDENTITY, leader text, term bigint)",
    )
    .execute(&pool)
    .await?;
    let election = Election::named("scheduler")?;
    let mut story = Story { step: 0, pool: &pool, leaders: election.observe(&pool), term: None };

    let mut a = Worker::start(&database, "A", &[])?;
    story.is_elected(&mut a).await?;
    let mut b = Worker::start(&database, "B", &[])?;
    story.campaigns(&b, "B").await?;
    let mut c = Worker::start(&database, "C", &[])?;
    story.campaigns(&c, "B C").await?;

    a.child.kill()?;
    ensure(a.child.wait()?.signal() == Some(9), "it was alive until it was killed")?;
    story.line("(system)", "kills A (SIGKILL)");
    story.is_elected(&mut b).await?;

    kill_process(Pid::from_child(&b.child), Signal::STOP)?;
    story.line("(system)", "pauses B (SIGSTOP)");
    story.is_elected(&mut c).await?;

    kill_process(Pid::from_child(&b.child), Signal::CONT)?;
    story.line("(system)", "wakes B (SIGCONT), which goes on where it was");
    story.line("B", &format!("looks at its own clock: {}", b.hear("lost")?));
    story.line("B", &format!("asks the database all the same: {}", b.hear("late")?));
    story.campaigns(&b, "B").await?;

    ensure(election.ask_to_resign(&pool, Duration::ZERO).await?, "there is a leader to ask")?;
    story.line("parent", "asks the leader to resign");
    story.line("C", &format!("hears of it, in term {}, and resigns", c.hear("asked")?));
    story.is_elected(&mut b).await?;

    let journal = "SELECT string_agg(leader || ' ' || term, ', ' ORDER BY line) FROM journal";
    let journal: String = sqlx::query_scalar(journal).fetch_one(&pool).await?;
    ensure(journal == "A 1, B 2, C 3, B 4", "who wrote as the leader, in which term, in which order")?;
    println!();
    println!("led:  {journal}");
    drop((a, b, c));
    Ok(database.close().await?)
}

/// The timeline: numbered lines of who did what.
struct Story<'a> {
    step: u32,
    pool: &'a PgPool,
    leaders: Leaders,
    /// The last one.
    term: Option<FencingToken>,
}

impl Story<'_> {
    fn line(&mut self, who: &str, what: &str) {
        self.step += 1;
        println!("{:>4}  {who:<8}  {what}", self.step);
    }

    /// It says so, and whoever looks on sees the same.
    async fn is_elected(&mut self, worker: &mut Worker) -> Result {
        let term = FencingToken::new(worker.hear("leads")?.parse()?)?;
        ensure(self.term.is_none_or(|before| term > before), "terms grow")?;
        self.term = Some(term);
        self.line(worker.name, &format!("is elected: term {term}"));
        let seen = async {
            loop {
                // Nobody, for a moment, while a ttl runs out.
                if let Some(leader) = self.leaders.changed().await? {
                    return Ok::<_, fencepost::Error>(leader);
                }
            }
        };
        let leader = tokio::time::timeout(DEADLINE, seen).await??;
        ensure(
            leader.label == worker.name && leader.term == term,
            "the leader that is seen is the one that leads",
        )?;
        self.line("parent", &format!("sees that {leader} leads"));
        Ok(())
    }

    /// Returns when the database shows its ticket, so that whoever is started next comes after it.
    async fn campaigns(&mut self, worker: &Worker, in_line: &str) -> Result {
        let line = "SELECT coalesce(string_agg(o.label, ' ' ORDER BY w.rank, w.ticket), '')
                      FROM fencepost.waiters w JOIN fencepost.owners o ON o.id = w.owner
                     WHERE o.expires_at > clock_timestamp()";
        let arrived = async {
            while sqlx::query_scalar::<_, String>(line).fetch_one(self.pool).await? != in_line {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            Ok::<_, sqlx::Error>(())
        };
        tokio::time::timeout(DEADLINE, arrived).await??;
        self.line(worker.name, &format!("campaigns; in line: {in_line}"));
        Ok(())
    }
}
