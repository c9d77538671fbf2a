//! The owner's connections: opened with settings of our own, used by one call at a time, and thrown away
//! whenever it is not certain what state they are in.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgRow};
use sqlx::{AssertSqlSafe, ConnectOptions as _, PgConnection, PgPool};
use tokio::sync::{Notify, Semaphore, SemaphorePermit};
use tokio::time::timeout;

use crate::clock::Moment;
use crate::driver::caught;
use crate::error::{Error, Result, is_refusal, is_transient, leaves_outcome_open};
use crate::sql::{self, Call};
use crate::wait::Backoff;

/// How the owner's connections are made.
#[derive(Debug)]
pub(crate) struct Source {
    /// Asked for its options at every connect, so that a rotated password is picked up. Never used otherwise.
    pub(crate) pool: PgPool,
    pub(crate) application_name: String,
    /// How long a connect or a call may take, here and on the server.
    pub(crate) bound: Duration,
    /// A transaction-mode pooler is in between.
    pub(crate) pooled: bool,
}

impl Source {
    /// The pool's options as they are now, under our name.
    pub(crate) fn options(&self) -> PgConnectOptions {
        PgConnectOptions::clone(&self.pool.connect_options())
            .application_name(&self.application_name)
            // A written-out call shows grant ids, which are secrets.
            .disable_statement_logging()
    }

    /// What a session of ours sets for itself.
    pub(crate) fn settings(&self) -> String {
        sql::with_bound(sql::SETTINGS, self.bound)
    }

    /// A bare connection: nothing set, so right in front of a pooler too.
    pub(crate) async fn connect(&self) -> sqlx::Result<PgConnection> {
        let connect = caught(async { self.options().connect().await });
        timeout(self.bound, connect).await.unwrap_or_else(|_| Err(too_slow("connecting")))
    }

    pub(crate) async fn open(&self) -> sqlx::Result<Session> {
        let conn = self.connect().await?;
        self.adopt(conn).await
    }

    /// Makes a bare connection a session of ours.
    pub(crate) async fn adopt(&self, mut conn: PgConnection) -> sqlx::Result<Session> {
        if !self.pooled {
            let set = sql::rows(&mut conn, AssertSqlSafe(self.settings()));
            timeout(self.bound, set).await.unwrap_or_else(|_| Err(too_slow("setting up a session")))?;
        }
        Ok(Session { conn, pooled: self.pooled, bound: self.bound })
    }
}

fn too_slow(what: &'static str) -> sqlx::Error {
    sqlx::Error::Io(std::io::Error::new(std::io::ErrorKind::TimedOut, what))
}

/// A connection ready for calls.
#[derive(Debug)]
pub(crate) struct Session {
    conn: PgConnection,
    pooled: bool,
    bound: Duration,
}

impl Session {
    /// Sends the call and hands the session back with the rows. It is handed back only after an answer of our
    /// own functions: after any other report (a server that is read-only by now, a pooler that lost its
    /// server) the next connection may be a better one. Dropped in between, it is closed.
    pub(crate) async fn call(
        mut self,
        call: &Call,
    ) -> Result<(Vec<PgRow>, Self), (sqlx::Error, Option<Self>)> {
        match self.ask(call).await {
            Ok(rows) => Ok((rows, self)),
            Err(error) if is_refusal(&error) => Err((error, Some(self))),
            Err(error) => Err((error, None)),
        }
    }

    /// The same for a caller that knows which reports leave the session in order. After an answer that did not
    /// come in time, or a future that was dropped, it is not.
    pub(crate) async fn ask(&mut self, call: &Call) -> sqlx::Result<Vec<PgRow>> {
        let bound = self.bound;
        let answer = async {
            if self.pooled {
                call.through_pooler(&mut self.conn, bound).await
            } else {
                call.prepared(&mut self.conn).await
            }
        };
        in_time(bound, answer).await
    }

    /// One message of the simple protocol, as [`ask`](Self::ask).
    pub(crate) async fn send(&mut self, message: String) -> sqlx::Result<Vec<PgRow>> {
        in_time(self.bound, sql::rows(&mut self.conn, AssertSqlSafe(message))).await
    }
}

/// The server bounds the statement too; the slack lets its answer arrive.
async fn in_time<T>(bound: Duration, answer: impl Future<Output = sqlx::Result<T>>) -> sqlx::Result<T> {
    let answer = timeout(bound.saturating_add(Duration::from_millis(500)), answer);
    answer.await.unwrap_or_else(|_| Err(too_slow("waiting for an answer")))
}

/// Sessions for the calls that are not heartbeats: a few, made when needed, without a ping before use.
///
/// Not an sqlx pool: that pings on return, a second round trip for each call.
#[derive(Debug)]
pub(crate) struct Statements {
    source: Source,
    permits: Semaphore,
    /// Of those, for the questions of who waits: they never take the last one from a release or a try.
    patient: Semaphore,
    idle: Mutex<Vec<Session>>,
    /// Told whenever it is not known what a session did last: what is held has to be looked up.
    in_doubt: Notify,
}

/// Sessions for calls, beside the heartbeat's.
const SESSIONS: usize = 2;

impl Statements {
    pub(crate) fn new(source: Source, first: Session) -> Self {
        Self {
            source,
            permits: Semaphore::new(SESSIONS),
            patient: Semaphore::new(SESSIONS - 1),
            idle: Mutex::new(vec![first]),
            in_doubt: Notify::new(),
        }
    }

    pub(crate) fn source(&self) -> &Source {
        &self.source
    }

    /// One attempt; `sent` tells whether it may have happened.
    async fn call(&self, call: &Call, sent: &mut bool) -> sqlx::Result<Vec<PgRow>> {
        let _permit = self.permits.acquire().await.map_err(|_| sqlx::Error::PoolClosed)?;
        let idle = self.idle().pop();
        let session = match idle {
            Some(session) => session,
            None => self.source.open().await?,
        };
        *sent = true;
        let (answer, fit) = match session.call(call).await {
            Ok((rows, session)) => (Ok(rows), Some(session)),
            Err((error, session)) => (Err(error), session),
        };
        *sent = matches!(&answer, Err(error) if leaves_outcome_open(error));
        if let Some(session) = fit {
            self.idle().push(session);
        } else {
            // The others are likely to be as bad.
            self.idle().clear();
            self.doubt();
        }
        answer
    }

    /// The turn of a call that can wait, to be kept until it is answered.
    pub(crate) async fn turn(&self) -> Option<SemaphorePermit<'_>> {
        // Closed: the call itself will say so.
        self.patient.acquire().await.ok()
    }

    /// Attempts until there is an answer or the bound has passed, whatever is waited for meanwhile; `again` is
    /// sent once an earlier attempt may have happened. Both must be safe to repeat.
    pub(crate) async fn call_until_answered(
        &self,
        step: &'static str,
        first: &Call,
        again: &Call,
    ) -> Result<Vec<PgRow>> {
        let differ = !std::ptr::eq(first, again);
        self.until_answered(step, differ, |sent| if sent { again.clone() } else { first.clone() }).await
    }

    /// The same with another call each time: what an attempt came to whose answer is lost is not asked for again.
    pub(crate) async fn call_anew_until_answered(
        &self,
        step: &'static str,
        mut call: impl FnMut() -> Call,
    ) -> Result<Vec<PgRow>> {
        self.until_answered(step, true, |_sent| call()).await
    }

    /// `call` is told whether an earlier attempt may have happened.
    async fn until_answered(
        &self,
        step: &'static str,
        differ: bool,
        mut call: impl FnMut(bool) -> Call,
    ) -> Result<Vec<PgRow>> {
        let start = Moment::now();
        let (mut next, mut in_doubt) = (call(false), false);
        let mut backoff = Backoff::new(Duration::from_millis(4), Duration::from_millis(250));
        let mut last = too_slow("waiting for a connection");
        loop {
            let left = start.after(self.source.bound).remaining();
            let mut sent = false;
            let answer = timeout(left, self.call(&next, &mut sent)).await;
            match answer {
                Ok(Ok(rows)) => {
                    // Another question was answered than the one whose answer is lost: what became of that is to be
                    // looked up once more, since a look meanwhile was too early.
                    if in_doubt && differ {
                        self.doubt();
                    }
                    return Ok(rows);
                }
                Ok(Err(error)) if !sent && !is_transient(&error) => return Err(Error::database(step, error)),
                Ok(Err(error)) => last = error,
                Err(_elapsed) if sent => self.doubt(),
                Err(_elapsed) => {}
            }
            if sent {
                (next, in_doubt) = (call(true), true);
            }
            let left = start.after(self.source.bound).remaining();
            if left.is_zero() {
                return Err(if in_doubt {
                    Error::OutcomeUnknown { step, source: last }
                } else {
                    Error::TimedOut { step, after: start.elapsed(), source: Some(last) }
                });
            }
            tracing::debug!(step, error = %last, "fencepost: trying again");
            tokio::time::sleep(backoff.pause().min(left)).await;
        }
    }

    /// One attempt whose outcome does not matter.
    pub(crate) async fn call_once(&self, call: &Call) {
        if let Err(error) = self.call(call, &mut false).await {
            tracing::debug!(%error, "fencepost: not sent");
        }
    }

    /// Closes the idle sessions, and lets no call begin any more.
    pub(crate) fn close(&self) {
        self.permits.close();
        self.patient.close();
        self.idle().clear();
    }

    /// It is not known what a session did last.
    pub(crate) fn doubt(&self) {
        self.in_doubt.notify_one();
    }

    /// Resolves when there has been a doubt since it last did.
    pub(crate) async fn doubted(&self) {
        self.in_doubt.notified().await;
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Session>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
