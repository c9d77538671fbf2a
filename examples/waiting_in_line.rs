//! Waiting in line, with real processes: five queue for one lease, one is killed while it waits and one while
//! it holds. The others are served in the order in which they came.
//!
//! ```text
//! cargo run --example waiting_in_line
//! ```
//!
//! This process holds the lease at first. It starts the workers one after the other (it runs itself again),
//! kills two of them, and checks every claim it prints: it fails if one is not true. Nothing depends on how
//! long a step takes; what is awaited is what a worker says, or what the database shows.

#[path = "support/worker.rs"]
mod worker;

use std::os::unix::process::ExitStatusExt as _;
use std::time::Duration;

use fencepost::testing::TestDatabase;
use fencepost::{FencingToken, Lease, Owner, Wait};
use sqlx::PgPool;
use worker::{DEADLINE, Result, Worker, end_with_parent, ensure, say, wait_for_a_line};

/// Short, so that the story does not take long. Leave it at its default in a service.
const TTL: Duration = Duration::from_secs(1);

/// How long after the ttl of a dead holder the next one has to be served, on a busy machine too.
const SOON: Duration = Duration::from_secs(1);

#[tokio::main]
async fn main() -> Result {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => tell().await,
        ["worker", name] => work(name).await,
        _ => Err("usage: waiting_in_line".into()),
    }
}

// ---- A worker: a small service, like one that you might have. ---------------------------------------

/// Waits for its turn and signs the register. What it says on stdout is what the storyteller hears.
async fn work(name: &str) -> Result {
    end_with_parent()?;
    let pool = PgPool::connect(&std::env::var("DATABASE_URL")?).await?;
    let owner = Owner::builder(&pool).label(name).ttl(TTL).start().await?;

    // The whole of waiting in line, to a service. (It blocks nothing, and holds no connection.)
    let held = Lease::named("counter")?.acquire(&owner, Wait::at_most(DEADLINE)).await?;
    say("token", held.token());

    let mut tx = held.begin(&pool).await?;
    sqlx::query("INSERT INTO register (name, token) VALUES ($1, $2)")
        .bind(name)
        .bind(held.token())
        .execute(&mut *tx)
        .await?;
    tx.commit().await?;
    say("signed", name);

    wait_for_a_line()?;
    say("released", held.release().await?);
    Ok(owner.shutdown().await?)
}

// ---- The storyteller: starts the workers, and kills some. -------------------------------------------

#[expect(clippy::many_single_char_names, reason = "the workers are called so")]
async fn tell() -> Result {
    let database = TestDatabase::create().await?;
    let pool = database.pool();
    sqlx::raw_sql(
        "CREATE TABLE register (line bigint GENERATED ALWAYS AS IDENTITY, name text, token bigint)",
    )
    .execute(&pool)
    .await?;
    let owner = Owner::builder(&pool).label("parent").ttl(TTL).start().await?;
    let held = Lease::named("counter")?.acquire(&owner, Wait::no()).await?;
    let mut story = Story { pool: &pool, step: 0, last: held.token() };
    story.line("parent", &format!("holds the lease: token {}", held.token()));

    let mut a = story.arrives(&database, "A", "A").await?;
    let mut b = story.arrives(&database, "B", "A B").await?;
    let mut c = story.arrives(&database, "C", "A B C").await?;
    let mut d = story.arrives(&database, "D", "A B C D").await?;
    let mut e = story.arrives(&database, "E", "A B C D E").await?;

    story.kills(&mut b, "while it waits")?;
    // Until then its ticket counts: it would be granted the lease, and keep it for the rest of its ttl.
    b.until_expired(&pool).await?;
    ensure(line(&pool).await? == "A C D E", "only the dead one has lost its place")?;
    story.line("database", "has not heard from B for its ttl; in line: A C D E");

    ensure(held.release().await?, "it was held until now")?;
    story.handed_over("parent", "A").await?;
    story.is_served(&mut a, "C D E").await?;
    story.releases(&mut a, "C").await?;
    story.is_served(&mut c, "D E").await?;

    let may_be_granted = alive_until(c.name, &pool).await?;
    story.kills(&mut c, "while it holds the lease")?;
    let killed = now(&pool).await?;
    story.is_served(&mut d, "E").await?;
    let granted = granted_at(story.last, &pool).await?;
    ensure(granted >= may_be_granted, "not while C might have been alive")?;
    ensure(granted <= killed + (TTL + SOON).as_secs_f64(), "as soon as C was known to be dead")?;
    story.line("database", "had kept the lease for C until its ttl was over, and no longer");

    story.releases(&mut d, "E").await?;
    story.is_served(&mut e, "").await?;
    story.releases(&mut e, "").await?;

    // What the fence has let through says the same.
    let register: String =
        sqlx::query_scalar("SELECT string_agg(name || ' ' || token, ', ' ORDER BY line) FROM register")
            .fetch_one(&pool)
            .await?;
    ensure(register == "A 2, C 3, D 4, E 5", "who signed the register, with which token, in which order")?;
    let tickets: i64 = sqlx::query_scalar("SELECT count(*) FROM fencepost.waiters").fetch_one(&pool).await?;
    ensure(tickets == 0, "no ticket is left, of the dead neither")?;

    println!();
    println!("arrived:  A B C D E");
    println!("killed:   B while it waited, C while it held the lease");
    println!("served:   A C D E, the order of arrival without B");
    println!("delayed:  whoever came after C, by its ttl ({TTL:?}) and no more");
    owner.shutdown().await?;
    Ok(database.close().await?)
}

/// The timeline: numbered lines of who did what. Each step makes it happen, sees that it did, and tells it.
struct Story<'a> {
    pool: &'a PgPool,
    step: u32,
    /// The token granted last.
    last: FencingToken,
}

impl Story<'_> {
    fn line(&mut self, who: &str, what: &str) {
        self.step += 1;
        println!("{:>4}  {who:<8}  {what}", self.step);
    }

    /// Returns when the database shows its ticket, so that whoever is started next arrives after it.
    async fn arrives(
        &mut self,
        database: &TestDatabase,
        name: &'static str,
        in_line: &str,
    ) -> Result<Worker> {
        let mut worker = Worker::start(database, name, &[])?;
        let arrived = async {
            while line(self.pool).await? != in_line {
                if let Some(status) = worker.child.try_wait()? {
                    return Err(format!("{name} went away instead of waiting: {status}").into());
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            Ok(())
        };
        let arrived: Result = tokio::time::timeout(DEADLINE, arrived).await?;
        arrived?;
        self.line(name, &format!("arrives and waits; in line: {in_line}"));
        Ok(worker)
    }

    fn kills(&mut self, worker: &mut Worker, when: &str) -> Result {
        worker.child.kill()?;
        let status = worker.child.wait()?;
        ensure(status.signal() == Some(9), "it was alive until it was killed")?;
        self.line("(system)", &format!("kills {} (SIGKILL) {when}", worker.name));
        Ok(())
    }

    async fn is_served(&mut self, worker: &mut Worker, in_line: &str) -> Result {
        let token = FencingToken::new(worker.hear("token")?.parse()?)?;
        ensure(token > self.last, "tokens grow in the order in which the lease is granted")?;
        self.last = token;
        worker.hear("signed")?;
        ensure(line(self.pool).await? == in_line, "who is still in line")?;
        let in_line = if in_line.is_empty() { "nobody" } else { in_line };
        self.line(worker.name, &format!("is served: token {token}; in line: {in_line}"));
        Ok(())
    }

    async fn releases(&mut self, worker: &mut Worker, next: &str) -> Result {
        worker.tell("release")?;
        ensure(worker.hear("released")? == "true", "it was held until now")?;
        self.handed_over(worker.name, next).await?;
        ensure(worker.child.wait()?.success(), "the worker ended well")
    }

    /// The statement that has released the lease has also granted it.
    async fn handed_over(&mut self, from: &str, to: &str) -> Result {
        ensure(holder(self.pool).await? == to, "the head of the line has the lease")?;
        let what = if to.is_empty() { "which is free" } else { &format!("which goes to {to}") };
        self.line(from, &format!("releases the lease, {what}"));
        Ok(())
    }
}

// ---- What the database shows. -----------------------------------------------------------------------

/// The living in the order of their tickets.
async fn line(pool: &PgPool) -> Result<String> {
    Ok(sqlx::query_scalar(
        "SELECT coalesce(string_agg(o.label, ' ' ORDER BY w.ticket), '')
           FROM fencepost.waiters w JOIN fencepost.owners o ON o.id = w.owner
          WHERE o.expires_at > clock_timestamp()",
    )
    .fetch_one(pool)
    .await?)
}

/// Whoever holds the lease; empty: nobody.
async fn holder(pool: &PgPool) -> Result<String> {
    Ok(sqlx::query_scalar(
        "SELECT coalesce(string_agg(label, ' '), '') FROM fencepost.leases WHERE released_at IS NULL",
    )
    .fetch_one(pool)
    .await?)
}

/// Until when the last heartbeat keeps the owner alive, in seconds of the database's clock.
async fn alive_until(label: &str, pool: &PgPool) -> Result<f64> {
    let query = "SELECT extract(epoch FROM expires_at)::float8 FROM fencepost.owners WHERE label = $1";
    Ok(sqlx::query_scalar(query).bind(label).fetch_one(pool).await?)
}

async fn granted_at(token: FencingToken, pool: &PgPool) -> Result<f64> {
    let query = "SELECT extract(epoch FROM granted_at)::float8 FROM fencepost.leases WHERE token = $1";
    Ok(sqlx::query_scalar(query).bind(token).fetch_one(pool).await?)
}

async fn now(pool: &PgPool) -> Result<f64> {
    Ok(sqlx::query_scalar("SELECT extract(epoch FROM clock_timestamp())::float8").fetch_one(pool).await?)
}
