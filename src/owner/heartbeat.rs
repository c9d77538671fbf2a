//! The owner's thread: starts a life, beats for it, starts the next one when it is lost.

use std::sync::{Arc, Weak};
use std::time::Duration;

use sqlx::postgres::PgRow;
use sqlx::{PgPool, Row as _};
use tokio::sync::{Notify, oneshot, watch};
use tokio::time::timeout;
use uuid::Uuid;

use super::ended::Endings;
use super::hand_over::HandedOver;
use super::life::{Grants, Life, Stage};
use super::locks::Locks;
use super::session::{Session, Source, Statements};
use super::wakes::Wakes;
use super::{Shared, Started};
use super::{listen, locks, reconcile};
use crate::clock::Moment;
use crate::error::{Error, LossReason, Result};
use crate::migrate;
use crate::mistake::Mistake;
use crate::pooler;
use crate::sql::{self, Arg, Call, micros};
use crate::wait::Backoff;

/// What an owner begins with.
pub(crate) struct Beginning {
    pub(crate) pool: PgPool,
    pub(crate) label: String,
    pub(crate) ttl: Duration,
    /// Whether a transaction-mode pooler is in between, if that is known.
    pub(crate) pooled: Option<bool>,
    /// How many session-level advisory locks it may hold.
    pub(crate) advisory_locks: usize,
}

/// The main function of the owner's thread. Reports the start, then lives until it is stopped.
pub(super) async fn live(beginning: Beginning, ready: oneshot::Sender<Result<Started>>) {
    let bound = bound(beginning.ttl);
    // To its end, also when nobody waits for it any more: what is begun in the database is ended there.
    let begun = timeout(bound, begin(beginning)).await.unwrap_or_else(|_elapsed| {
        Err(Error::TimedOut { step: "starting the owner", after: bound, source: None })
    });
    let (shared, session, life) = match begun {
        Ok(begun) => begun,
        Err(error) => {
            // Nobody waiting for the error: nothing was started.
            drop(ready.send(Err(error)));
            return;
        }
    };
    let _end = EndOfThread(Arc::clone(&shared));
    // Nobody waiting for it, now or before it is taken: dropped, which stops it.
    drop(ready.send(Ok(Started(Arc::clone(&shared)))));
    let mut stop = shared.stop.subscribe();
    tokio::select! {
        () = lives(&shared, session, life) => {}
        () = reconcile::forever(&shared) => {}
        () = listen::forever(&shared) => {}
        () = locks::forever(&shared) => {}
        // The lives end by themselves on stop; this is for a stop that they do not notice in time.
        () = async { _ = stop.wait_for(|stop| *stop).await; tokio::time::sleep(shared.bound() * 2).await } => {}
    }
}

/// How long a call to the database may take: the ttl, within reason.
fn bound(ttl: Duration) -> Duration {
    ttl.clamp(Duration::from_secs(1), Duration::from_secs(10))
}

/// However the thread ends, by a panic too: nothing counts as held any more.
struct EndOfThread(Arc<Shared>);

impl Drop for EndOfThread {
    fn drop(&mut self) {
        self.0.statements.close();
        self.0.locks.end();
        let stopped = matches!(*self.0.stage.borrow(), Stage::Stopped { .. });
        if !stopped {
            self.0.enter(Stage::Stopped { told: false }, LossReason::Stopped);
        }
    }
}

/// Connects, looks at what is there, and begins the first life.
async fn begin(
    Beginning { pool, label, ttl, pooled, advisory_locks }: Beginning,
) -> Result<(Arc<Shared>, Session, Arc<Life>)> {
    let fail = |source| Error::database("starting the owner", source);
    let mut source = Source {
        pool,
        // The server cuts names at 63 bytes, by itself.
        application_name: format!("fencepost {label}"),
        bound: bound(ttl),
        pooled: false,
    };
    let (mut first, mut second) =
        (source.connect().await.map_err(fail)?, source.connect().await.map_err(fail)?);
    source.pooled = match pooled {
        Some(pooled) => pooled,
        None => pooler::in_transaction_mode(&mut first, &mut second).await.map_err(fail)?,
    };
    migrate::check_version(&mut first).await?;
    let beating = source.adopt(first).await.map_err(fail)?;
    let calling = source.adopt(second).await.map_err(fail)?;
    let shared = Arc::new_cyclic(|myself| Shared {
        label,
        ttl,
        margin: (ttl / 10).max(Duration::from_millis(5)),
        statements: Statements::new(source, calling),
        grants: Grants::default(),
        wakes: Wakes::default(),
        locks: Locks::new(advisory_locks),
        endings: Endings::default(),
        stage: watch::Sender::new(Stage::Starting(LossReason::Stopped)),
        runtime: tokio::runtime::Handle::current(),
        beat_now: Notify::new(),
        stop: watch::Sender::new(false),
        myself: Weak::clone(myself),
    });
    let (life, session) = start_life(&shared, beating, None).await.map_err(|(error, _)| fail(error))?;
    shared.enter(Stage::Alive(Arc::clone(&life)), LossReason::Stopped);
    tracing::debug!(
        label = shared.label,
        pooled = shared.statements.source().pooled,
        "fencepost: owner started"
    );
    Ok((shared, session, life))
}

/// Life after life, until told to stop.
async fn lives(shared: &Shared, session: Session, mut life: Arc<Life>) {
    let mut session = Some(session);
    let mut stop = shared.stop.subscribe();
    while let Err(reason) = beat(shared, &mut session, &life, &mut stop).await {
        tracing::warn!(label = shared.label, %reason, "fencepost: the owner is lost, with all it held; starting again");
        shared.enter(Stage::Starting(reason), reason);
        let Some(next) = start_again(shared, &mut session, life.id(), &mut stop).await else { break };
        life = next;
        shared.enter(Stage::Alive(Arc::clone(&life)), LossReason::Stopped);
        shared.statements.doubt();
    }
    // First nothing counts as held, then others may have it.
    shared.enter(Stage::Starting(LossReason::Stopped), LossReason::Stopped);
    shared.locks.stop(shared.bound()).await;
    let stopping = Call::new(sql::OWNER_STOP, [Arg::Uuid(life.id())]);
    let freed = shared.statements.call_until_answered("stopping the owner", &stopping, &stopping).await;
    // While this thread still runs: those who got what was freed are to hear of it.
    for handed in freed.iter().flatten().filter_map(HandedOver::of) {
        shared.statements.call_once(&handed.notification()).await;
    }
    let told = freed.is_ok();
    shared.enter(Stage::Stopped { told }, LossReason::Stopped);
}

/// Beats until the life is lost (the reason) or the owner is to stop.
async fn beat(
    shared: &Shared,
    session: &mut Option<Session>,
    life: &Life,
    stop: &mut watch::Receiver<bool>,
) -> Result<(), LossReason> {
    let call = Call::new(sql::HEARTBEAT, [Arg::Uuid(life.id())]);
    let period = shared.ttl / 3;
    let mut backoff = Backoff::new(shared.ttl / 50, (shared.ttl / 10).min(Duration::from_millis(500)));
    let mut next = Moment::now().after(period);
    let mut failed = false;
    let mut revocations = 0;
    loop {
        tokio::select! {
            _ = stop.wait_for(|stop| *stop) => return Ok(()),
            // By somebody who watched it while this thread stood still.
            reason = life.declared_lost() => return Err(reason),
            () = next.reached() => {}
            () = shared.beat_now.notified() => {}
        }
        // Paused beyond the deadline: lost by our own clock, without asking.
        if life.trusted_until().has_passed() {
            return Err(at_deadline(failed));
        }
        let sent = Moment::now();
        let answer = tokio::select! {
            biased;
            // No attempt may use up the time of the next one.
            answer = timeout(period.max(Duration::from_millis(20)), attempt(shared, session, &call)) => answer,
            () = life.trusted_until().reached() => return Err(at_deadline(failed)),
            _ = stop.wait_for(|stop| *stop) => return Ok(()),
        };
        match answer {
            Ok(Ok(rows)) => {
                let Some(beat) = rows.first().and_then(Beat::read) else {
                    return Err(LossReason::Expired);
                };
                let since = if Mistake::CountsFromAnswer.is_made() { Moment::now() } else { sent };
                life.trust_until(deadline(since, beat.remaining.min(shared.ttl), shared.margin));
                if beat.revocations != revocations {
                    // Somebody has ended a hold of ours: find out which.
                    revocations = beat.revocations;
                    shared.statements.doubt();
                }
                failed = false;
                backoff.reset();
                // From when this one was sent; a missed beat is skipped, not made up for.
                next = sent.after(period);
            }
            // On waking from a pause every timer has run out: no fault of the database's.
            _ if life.trusted_until().has_passed() => return Err(at_deadline(failed)),
            unanswered => {
                let why = match unanswered {
                    Ok(Err(error)) => error.to_string(),
                    _ => "no answer in time".to_owned(),
                };
                tracing::warn!(label = shared.label, why, "fencepost: heartbeat failed; trying on");
                failed = true;
                next = Moment::now().after(backoff.pause()).min(life.trusted_until());
            }
        }
    }
}

/// Why a life ends at its deadline. An attempt takes a third of the ttl at most, so if the database was out
/// of reach one has failed before; if none has, this process did not run.
fn at_deadline(an_attempt_failed: bool) -> LossReason {
    if an_attempt_failed { LossReason::Unreachable } else { LossReason::Expired }
}

/// One call on the heartbeat's session, which is opened anew if there is none. It stays in place only when
/// it is fit for the next call; dropping this future closes it.
async fn attempt(shared: &Shared, session: &mut Option<Session>, call: &Call) -> sqlx::Result<Vec<PgRow>> {
    let open = if let Some(session) = session.take() {
        session
    } else {
        let session = shared.statements.source().open().await?;
        // What the old session did last is not known.
        shared.statements.doubt();
        session
    };
    match open.call(call).await {
        Ok((rows, fit)) => {
            *session = Some(fit);
            Ok(rows)
        }
        Err((error, fit)) => {
            *session = fit;
            Err(error)
        }
    }
}

/// The next life, tried until it begins; none when the owner is to stop.
async fn start_again(
    shared: &Shared,
    session: &mut Option<Session>,
    before: Uuid,
    stop: &mut watch::Receiver<bool>,
) -> Option<Arc<Life>> {
    let mut backoff = Backoff::new(Duration::from_millis(10), Duration::from_secs(1));
    loop {
        let attempt = async {
            let open = match session.take() {
                Some(session) => session,
                None => shared.statements.source().open().await?,
            };
            match start_life(shared, open, Some(before)).await {
                Ok((life, fit)) => {
                    *session = Some(fit);
                    Ok(life)
                }
                Err((error, fit)) => {
                    *session = fit;
                    Err(error)
                }
            }
        };
        let error = tokio::select! {
            _ = stop.wait_for(|stop| *stop) => return None,
            life = attempt => match life {
                Ok(life) => return Some(life),
                Err(error) => error,
            },
        };
        tracing::warn!(label = shared.label, %error, "fencepost: the owner cannot start again yet");
        tokio::select! {
            _ = stop.wait_for(|stop| *stop) => return None,
            () = tokio::time::sleep(backoff.pause()) => {}
        }
    }
}

/// Ends the life before, so that nobody waits for what it held, and begins a new one.
async fn start_life(
    shared: &Shared,
    mut session: Session,
    before: Option<Uuid>,
) -> Result<(Arc<Life>, Session), (sqlx::Error, Option<Session>)> {
    if let Some(before) = before {
        let freed;
        (freed, session) = session.call(&Call::new(sql::OWNER_STOP, [Arg::Uuid(before)])).await?;
        freed.iter().filter_map(HandedOver::of).for_each(|handed| shared.pass_on(handed));
    }
    let sent = Moment::now();
    let start =
        Call::new(sql::OWNER_START, [Arg::Text(shared.label.clone()), Arg::Number(micros(shared.ttl))]);
    let (rows, session) = session.call(&start).await?;
    let id = rows.first().ok_or(sqlx::Error::RowNotFound).and_then(|row| row.try_get::<Uuid, _>("id"));
    match id {
        Ok(id) => {
            let trusted = deadline(sent, shared.ttl, shared.margin);
            Ok((Arc::new(Life::new(id, trusted, shared.margin)), session))
        }
        Err(error) => Err((error, Some(session))),
    }
}

/// Until when an answer of `remaining`, asked for at `sent`, is trusted.
fn deadline(sent: Moment, remaining: Duration, margin: Duration) -> Moment {
    sent.after(remaining.saturating_sub(margin))
}

/// The answer to a heartbeat.
struct Beat {
    remaining: Duration,
    /// How often somebody else has ended a hold of this owner.
    revocations: i32,
}

impl Beat {
    fn read(row: &PgRow) -> Option<Self> {
        let micros: i64 = row.try_get("remaining").ok()?;
        let remaining = Duration::from_micros(u64::try_from(micros).ok()?);
        Some(Self { remaining, revocations: row.try_get("revocations").ok()? })
    }
}
