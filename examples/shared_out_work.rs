//! Partitions, with real processes: members of a group share out seven partitions, one writer each, while members come,
//! sleep, die and leave.
//!
//! ```text
//! cargo run --example shared_out_work
//! ```
//!
//! This process starts the members (it runs itself again), does things to them, and checks every claim it prints: it fails
//! if one is not true. Each writes for its partitions all the time; the register shows who wrote what.

#![expect(clippy::disallowed_methods, reason = "a service spawns tasks of its own")]

#[path = "support/worker.rs"]
#[allow(dead_code, reason = "other examples use another part of it")]
mod worker;

use std::io::BufRead as _;
use std::time::Duration;

use fencepost::testing::TestDatabase;
use fencepost::{Change, Group, Owner, Partition};
use rustix::process::{Pid, Signal, kill_process};
use sqlx::PgPool;
use worker::{DEADLINE, Result, Worker, end_with_parent, ensure, say};

/// Short, so that the story does not take long. Leave it at its default in a service.
const TTL: Duration = Duration::from_secs(1);

const PARTITIONS: u32 = 7;

#[tokio::main]
async fn main() -> Result {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => tell().await,
        ["worker", name] => work(name).await,
        _ => Err("usage: shared_out_work".into()),
    }
}

// ---- A member: a small service, like one that you might have. -----------------------------------------

async fn work(name: &str) -> Result {
    end_with_parent()?;
    let pool = PgPool::connect(&std::env::var("DATABASE_URL")?).await?;
    let owner = Owner::builder(&pool).label(name).ttl(TTL).start().await?;
    let mut member = Group::named("orders", PARTITIONS)?.join(&owner).await?;
    let (quit, quitting) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        // Told to leave, or the storyteller is gone.
        _ = std::io::stdin().lock().lines().next();
        _ = quit.send(());
    });
    let changes = async {
        loop {
            if let Change::Assigned(partition) = member.next().await? {
                tokio::spawn(write_for(partition, pool.clone()));
            }
        }
    };
    tokio::select! {
        never = changes => return never,
        _ = quitting => {}
    }
    member.leave().await?;
    say("left", name);
    Ok(owner.shutdown().await?)
}

/// Writes for the partition for as long as it is ours.
async fn write_for(partition: Partition, pool: PgPool) -> fencepost::Result<()> {
    loop {
        match write(&partition, &pool).await {
            Ok(()) => {}
            // It was asleep, and somebody else has it by now: the fence has refused it. (Or, in the middle of its
            // transaction, the server has ended that.)
            Err(error) if error.is_lost() || !partition.is_held() => {
                say("refused", partition.number());
                return Ok(());
            }
            Err(error) => return Err(error),
        }
        let pause = Duration::from_millis(20);
        if tokio::time::timeout(pause, partition.revoked()).await.is_ok() && partition.is_held() {
            // Somebody else shall have it: what is begun is finished, here nothing.
            return partition.release().await.map(drop);
        }
    }
}

async fn write(partition: &Partition, pool: &PgPool) -> fencepost::Result<()> {
    let mut tx = partition.begin(pool).await?;
    sqlx::query("INSERT INTO register (partition, token) VALUES ($1, $2)")
        .bind(i64::from(partition.number()))
        .bind(partition.token())
        .execute(&mut *tx)
        .await?;
    Ok(tx.commit().await?)
}

// ---- The storyteller. ---------------------------------------------------------------------------------

async fn tell() -> Result {
    let database = TestDatabase::create().await?;
    let pool = database.pool();
    let register =
        "CREATE TABLE register (line bigint GENERATED ALWAYS AS IDENTITY, partition bigint, token bigint)";
    sqlx::raw_sql(register).execute(&pool).await?;
    let mut story = Story { pool: &pool, step: 0 };

    let mut a = Worker::start(&database, "A", &[])?;
    story.line("A", "joins");
    story.shared("A has 7").await?;
    let mut b = Worker::start(&database, "B", &[])?;
    story.line("B", "joins");
    story.shared("A has 4, B has 3").await?;
    let mut c = Worker::start(&database, "C", &[])?;
    story.line("C", "joins");
    story.shared("A has 3, B has 2, C has 2").await?;

    kill_process(Pid::from_child(&b.child), Signal::STOP)?;
    story.line("(system)", "pauses B (SIGSTOP)");
    story.shared("A has 4, C has 3").await?;
    kill_process(Pid::from_child(&b.child), Signal::CONT)?;
    story.line("(system)", "wakes B (SIGCONT), which goes on where it was");
    b.hear("refused")?;
    b.hear("refused")?;
    story.line("B", "writes for its two partitions: refused, they are others' by now");
    story.shared("A has 3, B has 2, C has 2").await?;

    c.child.kill()?;
    story.line("(system)", "kills C (SIGKILL)");
    story.shared("A has 4, B has 3").await?;
    a.tell("leave")?;
    a.hear("left")?;
    story.line("A", "finishes what it has begun, and leaves");
    story.shared("B has 7").await?;
    b.tell("leave")?;
    b.hear("left")?;

    let written: i64 =
        sqlx::query_scalar("SELECT count(DISTINCT partition) FROM register").fetch_one(&pool).await?;
    ensure(written == i64::from(PARTITIONS), "every partition was written for")?;
    let back = "SELECT count(*) FROM (SELECT token < max(token) OVER (PARTITION BY partition ORDER BY line) AS back \
                FROM register) AS lines WHERE back";
    let back: i64 = sqlx::query_scalar(back).fetch_one(&pool).await?;
    ensure(back == 0, "no writer came after a later one")?;
    println!(
        "\nEach partition had one writer after the other: no token in the register is smaller than one before it."
    );
    Ok(())
}

struct Story<'a> {
    pool: &'a PgPool,
    step: u32,
}

impl Story<'_> {
    fn line(&mut self, who: &str, what: &str) {
        self.step += 1;
        println!("{:>4}  {who:<9} {what}", self.step);
    }

    /// Waits until they have so many, and all of them write.
    async fn shared(&mut self, expected: &str) -> Result {
        let query = "SELECT coalesce(string_agg(label || ' has ' || many, ', ' ORDER BY label), '') FROM ( \
                        SELECT l.label, count(*) AS many FROM fencepost.leases l \
                          JOIN fencepost.owners o ON o.id = l.owner AND o.expires_at > clock_timestamp() \
                         WHERE l.released_at IS NULL \
                           AND EXISTS (SELECT FROM register r WHERE r.token = l.token) GROUP BY 1) AS shares";
        let mut shared = String::new();
        let wait = async {
            while shared != expected {
                tokio::time::sleep(Duration::from_millis(10)).await;
                shared = sqlx::query_scalar(query).fetch_one(self.pool).await?;
            }
            Ok::<_, sqlx::Error>(())
        };
        let waited = tokio::time::timeout(DEADLINE, wait).await;
        ensure(waited.is_ok(), &format!("{expected}; it is {shared:?}"))?;
        waited??;
        self.line("database", expected);
        Ok(())
    }
}
