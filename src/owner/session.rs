//! The owner's connections: opened with settings of our own, used by one call at a time, and thrown away
//! whenever it is not certain what state they are in.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgRow};
use sqlx::{AssertSqlSafe, ConnectOptions as _, Executor as _, PgConnection, PgPool};
use tokio::sync::{Notify, Semaphore};
use tokio::time::timeout;

use crate::clock::Moment;
use crate::error::{Error, Result, is_transient, leaves_outcome_open};
use crate::sql::{self, Call};

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
    /// A bare connection: nothing set, so right in front of a pooler too.
    pub(crate) async fn connect(&self) -> sqlx::Result<PgConnection> {
        let options = PgConnectOptions::clone(&self.pool.connect_options())
            .application_name(&self.application_name)
            // A written-out call shows grant ids, which are secrets.
            .disable_statement_logging();
        timeout(self.bound, options.connect()).await.unwrap_or_else(|_| Err(too_slow("connecting")))
    }

    pub(crate) async fn open(&self) -> sqlx::Result<Session> {
        let conn = self.connect().await?;
        self.adopt(conn).await
    }

    /// Makes a bare connection a session of ours.
    pub(crate) async fn adopt(&self, mut conn: PgConnection) -> sqlx::Result<Session> {
        if !self.pooled {
            let settings = sql::with_bound(sql::SETTINGS, self.bound);
            let set = conn.execute(sqlx::raw_sql(AssertSqlSafe(settings)));
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
    /// Sends the call and hands the session back with the rows. It is handed back only when it is known to
    /// be ready for the next call: after an answer. Dropped in between, it is closed.
    pub(crate) async fn call(mut self, call: &Call) -> (sqlx::Result<Vec<PgRow>>, Option<Self>) {
        let answer = async {
            if self.pooled {
                call.through_pooler(&mut self.conn, self.bound).await
            } else {
                call.prepared(&mut self.conn).await
            }
        };
        // The server bounds the statement too; the slack lets its answer arrive.
        let answer = timeout(self.bound.saturating_add(Duration::from_millis(500)), answer);
        match answer.await.unwrap_or_else(|_| Err(too_slow("waiting for an answer"))) {
            Err(error) if leaves_outcome_open(&error) => (Err(error), None),
            answered => (answered, Some(self)),
        }
    }
}

/// Sessions for the calls that are not heartbeats: a few, made when needed, without a ping before use.
///
/// Not an sqlx pool: that pings on return, a second round trip for each call.
#[derive(Debug)]
pub(crate) struct Statements {
    source: Source,
    permits: Semaphore,
    idle: Mutex<Vec<Session>>,
    /// Told whenever it is not known what a session did last: what is held has to be looked up.
    in_doubt: Notify,
}

/// How an attempt failed.
#[derive(Debug)]
enum Failure {
    /// Before anything was sent.
    NotSent(sqlx::Error),
    /// By the server's report: rolled back.
    Answered(sqlx::Error),
    /// After sending, without a report: it may have happened.
    Unknown(sqlx::Error),
}

/// Sessions for calls, beside the heartbeat's.
const SESSIONS: usize = 2;

impl Statements {
    pub(crate) fn new(source: Source, first: Session) -> Self {
        Self {
            source,
            permits: Semaphore::new(SESSIONS),
            idle: Mutex::new(vec![first]),
            in_doubt: Notify::new(),
        }
    }

    pub(crate) fn source(&self) -> &Source {
        &self.source
    }

    /// One attempt.
    async fn call(&self, call: &Call) -> Result<Vec<PgRow>, Failure> {
        let _permit = self.permits.acquire().await.map_err(|_| Failure::NotSent(sqlx::Error::PoolClosed))?;
        let session = match self.take() {
            Some(session) => session,
            None => self.source.open().await.map_err(Failure::NotSent)?,
        };
        let (answer, session) = session.call(call).await;
        if let Some(session) = session {
            self.idle().push(session);
        } else {
            // The others are likely to be as dead.
            self.idle().clear();
            self.doubt();
        }
        answer.map_err(|error| match error {
            open if leaves_outcome_open(&open) => Failure::Unknown(open),
            report => Failure::Answered(report),
        })
    }

    /// Attempts until there is an answer, or `bound` has passed; `again` is sent once an earlier attempt may
    /// have happened. Both must be safe to repeat.
    pub(crate) async fn call_until_answered(
        &self,
        step: &'static str,
        first: &Call,
        again: &Call,
    ) -> Result<Vec<PgRow>> {
        let start = Moment::now();
        let (mut call, mut in_doubt) = (first, false);
        let mut pause = Duration::from_millis(2);
        loop {
            let failure = match self.call(call).await {
                Ok(rows) => return Ok(rows),
                Err(Failure::Answered(error) | Failure::NotSent(error)) if !is_transient(&error) => {
                    return Err(Error::database(step, error));
                }
                Err(failure) => failure,
            };
            if matches!(failure, Failure::Unknown(_)) {
                (call, in_doubt) = (again, true);
            }
            let left = start.after(self.source.bound).remaining();
            if left.is_zero() {
                let (Failure::NotSent(source) | Failure::Answered(source) | Failure::Unknown(source)) =
                    failure;
                return Err(if in_doubt {
                    Error::OutcomeUnknown { step, source }
                } else {
                    Error::TimedOut { step, after: start.elapsed(), source: Some(source) }
                });
            }
            tracing::debug!(step, ?failure, "fencepost: trying again");
            tokio::time::sleep(pause.min(left)).await;
            pause = (pause * 2).min(Duration::from_millis(250));
        }
    }

    /// Closes the idle sessions, and lets no call begin any more.
    pub(crate) fn close(&self) {
        self.permits.close();
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

    fn take(&self) -> Option<Session> {
        self.idle().pop()
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Session>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
