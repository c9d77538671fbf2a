//! The comparisons, one function each: each prints its table, and most return where the time goes.

use std::rc::Rc;
use std::time::Duration;

use fencepost::{HeldLease, Lease, Owner};
use sqlx::postgres::{PgAdvisoryLock, PgArguments, PgTransaction};
use sqlx::{Executor as _, PgConnection, PgPool, Postgres, Row as _};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use uuid::Uuid;

use crate::quantiles::median;
use crate::report::{self, Goal};
use crate::rounds::{Part, Result, Side, compare};
use crate::scene::Scene;

/// The library's own statements.
const ACQUIRE: &str = "SELECT granted, token, label, (extract(epoch FROM remaining) * 1000000)::bigint AS remaining \
     FROM fencepost.acquire($1::text, $2::uuid, $3::uuid, $4::bigint * interval '1 microsecond', \
     $5::text::jsonb, NULL, $6::boolean)";
const RELEASE: &str = "SELECT released FROM fencepost.release($1::text, $2::bigint, $3::uuid)";
const HEARTBEAT: &str = "SELECT (extract(epoch FROM remaining) * 1000000)::bigint AS remaining FROM fencepost.heartbeat($1::uuid)";
const FENCE: &str = "SELECT fencepost.fence($1::text, $2::bigint, $3::uuid)";

/// What a refused acquire has to read, as a bare statement.
const LOOK: &str = "SELECT l.token, l.label, least(o.expires_at, l.expires_at) - clock_timestamp() AS remaining \
     FROM fencepost.leases l LEFT JOIN fencepost.owners o ON o.id = l.owner \
     WHERE l.name = $1::text AND l.released_at IS NULL";

const PLAIN_ACQUIRE: &str = "INSERT INTO plain_leases AS l (name, token, holder, expires_at) \
     VALUES ($1::text, 0, $2::uuid, clock_timestamp() + interval '10 seconds') \
     ON CONFLICT (name) DO UPDATE SET token = nextval('plain_token'), holder = EXCLUDED.holder, \
     expires_at = clock_timestamp() + interval '10 seconds' WHERE l.expires_at <= clock_timestamp() RETURNING token";
const PLAIN_RELEASE: &str = "UPDATE plain_leases SET expires_at = clock_timestamp() \
     WHERE name = $1::text AND token = $2::bigint AND holder = $3::uuid";

const UPDATE: &str = "UPDATE counters SET n = n + 1 WHERE id = $1::integer";

type Query = sqlx::query::Query<'static, Postgres, PgArguments>;

fn acquire(name: &'static str, owner: Uuid, grant: Uuid) -> Query {
    let (none, no_text) = (None::<i64>, None::<String>);
    sqlx::query(ACQUIRE).bind(name).bind(owner).bind(grant).bind(none).bind(no_text).bind(false)
}

/// `SELECT 1` against a try that is refused, and what is between the two.
pub(crate) async fn refused(scene: &Scene, time: Duration) -> Result<Vec<String>> {
    const ONE: &str = "SELECT 1";
    const BARE: &str = "the look alone, a bare statement";
    const FUNCTION: &str = "fencepost.acquire refused, plain connection";
    const HOP: &str = "to another thread and back, nothing done";
    const TRY: &str = "try_acquire refused";

    let held = Lease::named("held")?.try_acquire(&scene.holder).await?.ok_or("the lease is free")?;
    let id = scene.id(&scene.owner).await?;
    let lease = Lease::named("held")?;
    let (elsewhere, _end) = thread()?;
    let sides = vec![
        Side::new(ONE, scene.connect().await?, async |conn, _| {
            conn.fetch_all(sqlx::query("SELECT 1")).await?;
            Ok(())
        }),
        Side::new(BARE, scene.connect().await?, async |conn, _| {
            conn.fetch_all(sqlx::query(LOOK).bind("held")).await?;
            Ok(())
        }),
        Side::new(FUNCTION, scene.connect().await?, async move |conn, _| {
            conn.fetch_all(acquire("held", id, Uuid::new_v4())).await?;
            Ok(())
        }),
        Side::new(HOP, elsewhere, async |elsewhere, _| Ok(elsewhere.spawn(async {}).await?)),
        Side::new(TRY, (scene.owner.clone(), lease.clone()), async |(owner, lease), _| {
            match lease.try_acquire(owner).await? {
                None => Ok(()),
                Some(_) => Err("granted, though it is held".into()),
            }
        }),
    ];
    let figures = compare(sides, 500, time).await?;
    report::table(&figures, ONE, None, &[Goal { side: TRY, reference: ONE, at_most: 4.0 }]);

    let bytes = wal_of_tries(scene, &lease).await?;
    report::verdict(&format!("WAL of a refused try: {bytes} B, goal 0 B"), bytes == 0.0);
    held.release().await?;
    Ok(vec![format!(
        "A refused try: the question {:.0}, what the function does more {:.0} (the bare look: {:.0}), \
         the owner's thread {:.0} (a hop alone: {:.0}).",
        figures.micros(ONE, Part::Whole),
        figures.more(FUNCTION, ONE, Part::Whole),
        figures.more(BARE, ONE, Part::Whole),
        figures.more(TRY, FUNCTION, Part::Whole),
        figures.micros(HOP, Part::Whole),
    )])
}

/// Bytes of WAL a refused try: the median of some blocks, since the server writes a few by itself now and then.
async fn wal_of_tries(scene: &Scene, lease: &Lease) -> Result<f64> {
    const BLOCKS: usize = 9;
    const TRIES: u32 = 200;
    let written = "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::float8";
    let mut conn = scene.connect().await?;
    let mut blocks = Vec::new();
    for _ in 0..BLOCKS {
        let before: f64 = sqlx::query_scalar(written).fetch_one(&mut conn).await?;
        for _ in 0..TRIES {
            lease.try_acquire(&scene.owner).await?;
        }
        let after: f64 = sqlx::query_scalar(written).fetch_one(&mut conn).await?;
        blocks.push((after - before) / f64::from(TRIES));
    }
    Ok(median(blocks.into_iter()))
}

/// A thread with a runtime of its own, which ends when the sender is dropped.
fn thread() -> Result<(Handle, oneshot::Sender<()>)> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (handle, (end, ended)) = (runtime.handle().clone(), oneshot::channel());
    std::thread::spawn(move || runtime.block_on(ended));
    Ok((handle, end))
}

/// Acquire and release against the plainest lease table.
pub(crate) async fn pair(scene: &Scene, time: Duration, goal: f64) -> Result<Vec<String>> {
    const PLAIN: &str = "plain lease table, both durable";
    const FUNCTIONS: &str = "fencepost.acquire, release: plain connection";
    const RELAXED: &str = "the same, commits asynchronous unless raised";
    const LEASE: &str = "try_acquire, release";
    const ADVISORY: &str = "sqlx PgAdvisoryLock through a pool, not durable";
    const DURABLE: &str = "UPDATE of one row, durable";
    const ASYNCHRONOUS: &str = "UPDATE of one row, asynchronous";

    let id = scene.id(&scene.owner).await?;
    let functions =
        async move |conn: &mut PgConnection, name: &'static str, watch: &mut crate::rounds::Watch| {
            let grant = Uuid::new_v4();
            let row = conn.fetch_one(acquire(name, id, grant)).await?;
            let token: i64 = row.try_get("token")?;
            watch.split();
            conn.fetch_one(sqlx::query(RELEASE).bind(name).bind(token).bind(grant)).await?;
            Result::<_>::Ok(())
        };
    let sides = vec![
        Side::new(PLAIN, scene.connect().await?, async |conn, watch| {
            let holder = Uuid::new_v4();
            let row = conn.fetch_one(sqlx::query(PLAIN_ACQUIRE).bind("plain").bind(holder)).await?;
            let token: i64 = row.try_get("token")?;
            watch.split();
            conn.execute(sqlx::query(PLAIN_RELEASE).bind("plain").bind(token).bind(holder)).await?;
            Ok(())
        }),
        Side::new(FUNCTIONS, scene.connect().await?, async move |conn, watch| {
            functions(conn, "functions", watch).await
        }),
        Side::new(RELAXED, scene.connect_asynchronous().await?, async move |conn, watch| {
            functions(conn, "relaxed", watch).await
        }),
        Side::new(LEASE, (scene.owner.clone(), Lease::named("lease")?), async |(owner, lease), watch| {
            let held = lease.try_acquire(owner).await?.ok_or("refused, though it is free")?;
            watch.split();
            held.release().await?;
            Ok(())
        }),
        Side::new(
            ADVISORY,
            (scene.pool().await?, PgAdvisoryLock::new("lock")),
            async |(pool, lock), watch| {
                let guard = lock.acquire(pool.acquire().await?).await?;
                watch.split();
                guard.release_now().await?;
                Ok(())
            },
        ),
        update(DURABLE, scene.connect().await?, 1),
        update(ASYNCHRONOUS, scene.connect_asynchronous().await?, 2),
    ];
    let figures = compare(sides, 200, time).await?;
    let goals = [Goal { side: LEASE, reference: PLAIN, at_most: goal }];
    report::table(&figures, PLAIN, Some(["acquire", "release"]), &goals);
    let part = |part| {
        format!(
            "plain {:.0}, the function {:+.0}, not waiting for the flush {:+.0}, the owner's thread {:+.0}",
            figures.micros(PLAIN, part),
            figures.more(FUNCTIONS, PLAIN, part),
            figures.more(RELAXED, FUNCTIONS, part),
            figures.more(LEASE, RELAXED, part),
        )
    };
    Ok(vec![
        format!(
            "Acquire (an UPDATE takes {:.0}): {}.",
            figures.micros(DURABLE, Part::Whole),
            part(Part::First)
        ),
        format!("Release: {}.", part(Part::Rest)),
    ])
}

fn update(name: &'static str, conn: PgConnection, row: i32) -> Side {
    Side::new(name, conn, async move |conn, _| {
        conn.execute(sqlx::query(UPDATE).bind(row)).await?;
        Ok(())
    })
}

/// A transaction with one UPDATE, with and without a fence.
pub(crate) async fn fenced(scene: &Scene, time: Duration, goal: f64) -> Result<Vec<String>> {
    const UNFENCED: &str = "pool.begin, UPDATE, COMMIT: no fence";
    const BEGIN: &str = "held.begin, UPDATE, COMMIT";
    const FENCE_CALL: &str = "pool.begin, held.fence, UPDATE, COMMIT";
    const PREPARED: &str = "pool.begin, fencepost.fence prepared, UPDATE, COMMIT";
    const ALONE: &str = "fencepost.fence prepared, by itself";

    let held = Lease::named("fenced")?.try_acquire(&scene.holder).await?.ok_or("the lease is taken")?;
    let held = Rc::new(held);
    let fence = |held: &HeldLease| {
        let grant = held.grant();
        sqlx::query(FENCE).bind("fenced").bind(grant.token.as_i64()).bind(grant.id.as_uuid())
    };
    let state = async || Result::<_>::Ok((scene.pool().await?, Rc::clone(&held)));
    let sides = vec![
        Side::new(UNFENCED, state().await?, async |(pool, _): &mut (PgPool, Rc<HeldLease>), watch| {
            let tx = pool.begin().await?;
            watch.split();
            write_in(tx, 3).await
        }),
        Side::new(BEGIN, state().await?, async |(pool, held), watch| {
            let tx = held.begin(pool).await?;
            watch.split();
            write_in(tx, 4).await
        }),
        Side::new(FENCE_CALL, state().await?, async |(pool, held), watch| {
            let mut tx = pool.begin().await?;
            held.fence(&mut tx).await?;
            watch.split();
            write_in(tx, 5).await
        }),
        Side::new(PREPARED, state().await?, async move |(pool, held), watch| {
            let mut tx = pool.begin().await?;
            tx.execute(fence(held)).await?;
            watch.split();
            write_in(tx, 6).await
        }),
        Side::new(
            ALONE,
            (scene.connect_asynchronous().await?, Rc::clone(&held)),
            async move |(conn, held), _| {
                conn.execute(fence(held)).await?;
                Ok(())
            },
        ),
    ];
    let figures = compare(sides, 200, time).await?;
    let goals = [Goal { side: BEGIN, reference: UNFENCED, at_most: goal }];
    report::table(&figures, UNFENCED, Some(["begin", "rest"]), &goals);
    let held = Rc::into_inner(held).ok_or("the sides are gone")?;
    held.release().await?;
    let [begin, rest] = [Part::First, Part::Rest].map(|part| figures.more(BEGIN, UNFENCED, part));
    Ok(vec![format!(
        "A fenced transaction: begin {begin:+.0} to {:.0} (with a round trip for the fence {:+.0}; prepared {:+.0}), \
         UPDATE and COMMIT {rest:+.0}.",
        figures.micros(UNFENCED, Part::First),
        figures.more(FENCE_CALL, UNFENCED, Part::First),
        figures.more(PREPARED, UNFENCED, Part::First),
    )])
}

async fn write_in(mut tx: PgTransaction<'static>, row: i32) -> Result<()> {
    tx.execute(sqlx::query(UPDATE).bind(row)).await?;
    Ok(tx.commit().await?)
}

/// The heartbeat of an owner with one lease and of one with ten thousand.
pub(crate) async fn heartbeat(scene: &Scene, time: Duration) -> Result<()> {
    const ONE: &str = "an owner with 1 lease";
    const MANY: &str = "an owner with 10,000 leases";

    let held = Lease::named("one")?.try_acquire(&scene.holder).await?.ok_or("the lease is taken")?;
    let laden = scene.id(&scene.laden).await?;
    let granted: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM generate_series(1, 10000) i, fencepost.acquire('bulk-' || i, $1::uuid) a WHERE a.granted",
    )
    .bind(laden)
    .fetch_one(&mut scene.connect().await?)
    .await?;
    if granted != 10_000 {
        return Err(format!("granted {granted} leases of 10,000").into());
    }
    let beat = async |name, owner: &Owner| {
        let id = scene.id(owner).await?;
        Result::<_>::Ok(Side::new(name, scene.connect().await?, async move |conn, _| {
            conn.fetch_one(sqlx::query(HEARTBEAT).bind(id)).await?;
            Ok(())
        }))
    };
    let sides = vec![beat(ONE, &scene.holder).await?, beat(MANY, &scene.laden).await?];
    let figures = compare(sides, 300, time).await?;
    report::table(&figures, ONE, None, &[Goal { side: MANY, reference: ONE, at_most: 1.2 }]);
    held.release().await?;
    Ok(())
}
