//! The owner's lock sessions: what holds session-level advisory locks.
//!
//! ```text
//! main:    one session for all that is granted at once, however many keys
//! beside:  a few more; on each one lock is waited for at the server, and then held
//! ```
//!
//! A lock lives as long as its session, so a session is trusted like an owner's life: each answer confirms it, a
//! question is asked each second while it holds something, and when none is answered it is lost with all that it
//! holds. Nothing is ever put back to use whose state is not certain.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sqlx::Row as _;
use sqlx::postgres::PgRow;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::Shared;
use super::registry::Registry;
use super::session::{Session, Source};
use super::trust::Trust;
use crate::clock::Moment;
use crate::error::{LossReason, is_lock_not_available, leaves_outcome_open};
use crate::key::{Mode, Numbers};
use crate::mistake::Mistake;
use crate::sql::{Call, advisory};

/// Sessions on which locks are waited for, and held afterwards. With all of them in use whoever waits asks now and
/// then on the main one: a storm of waiters does not use up the server's connections.
const BESIDE: usize = 4;

/// How long a session beside the main one is kept unused.
const UNUSED: Duration = Duration::from_secs(10);

/// How often a session that holds something is asked whether it is there, or a quarter of the time for which it is
/// trusted if that is less.
const PERIOD: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct Locks {
    pub(crate) registry: Arc<Registry>,
    main: tokio::sync::Mutex<Option<Arc<LockSession>>>,
    beside: Arc<Semaphore>,
    unused: Mutex<Vec<(Arc<LockSession>, Moment)>>,
    /// All of them; none once it is stopped.
    open: Mutex<Vec<Arc<LockSession>>>,
    stopped: AtomicBool,
}

/// A session beside the main one, until it is put back.
#[derive(Debug)]
pub(crate) struct Beside {
    session: Arc<LockSession>,
    permit: OwnedSemaphorePermit,
}

impl Locks {
    pub(crate) fn new(cap: usize) -> Self {
        Self {
            registry: Arc::new(Registry::new(cap)),
            main: tokio::sync::Mutex::default(),
            beside: Arc::new(Semaphore::new(BESIDE)),
            unused: Mutex::default(),
            open: Mutex::default(),
            stopped: AtomicBool::new(false),
        }
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// The session for what is granted at once.
    pub(crate) async fn main(&self, source: &Source) -> sqlx::Result<Arc<LockSession>> {
        let mut main = self.main.lock().await;
        if let Some(session) = main.as_ref().filter(|session| session.trust.loss().is_none()) {
            return Ok(Arc::clone(session));
        }
        let session = self.open(source).await?;
        *main = Some(Arc::clone(&session));
        Ok(session)
    }

    /// A session that nothing else is held on, to wait with; none if all are in use.
    pub(crate) async fn beside(&self, source: &Source) -> sqlx::Result<Option<Beside>> {
        let Ok(permit) = Arc::clone(&self.beside).try_acquire_owned() else { return Ok(None) };
        let unused = self.unused().pop();
        let session = match unused {
            Some((session, _)) if session.trust.loss().is_none() => session,
            _ => self.open(source).await?,
        };
        Ok(Some(Beside { session, permit }))
    }

    /// Back to use: nothing is held on it.
    pub(crate) fn put_back(&self, Beside { session, permit }: Beside) {
        self.unused().push((session, Moment::now()));
        drop(permit);
    }

    async fn open(&self, source: &Source) -> sqlx::Result<Arc<LockSession>> {
        let session = Arc::new(LockSession::open(source).await?);
        let mut open = self.sessions();
        if self.is_stopped() {
            return Err(sqlx::Error::PoolClosed);
        }
        open.push(Arc::clone(&session));
        Ok(session)
    }

    /// Asks those that hold something whether they are there; closes what is lost or no more used.
    fn tend(&self, shared: &Shared) {
        self.unused().retain(|(session, since)| {
            let keep = since.elapsed() < UNUSED;
            if !keep {
                session.trust.lose(LossReason::Stopped);
            }
            keep
        });
        self.sessions().retain(|session| {
            if session.trust.loss().is_some() {
                return !session.close();
            }
            if session.holds.load(Ordering::Acquire) > 0 {
                let session = Arc::clone(session);
                shared.run_unattended(async move { session.probe().await });
            }
            true
        });
    }

    /// Everything is lost and freed.
    pub(crate) async fn stop(&self, bound: Duration) {
        for session in self.lose_all() {
            // Whoever is at it now will close it.
            let place = timeout(bound, session.place.lock()).await.ok().and_then(|mut place| place.take());
            if let Some(mut place) = place {
                // Closing it does the same, but when?
                drop(place.ask(&Call::new(advisory::UNLOCK_ALL, [])).await);
            }
        }
    }

    /// The same when there is no time.
    pub(crate) fn end(&self) {
        for session in self.lose_all() {
            session.close();
        }
    }

    fn lose_all(&self) -> Vec<Arc<LockSession>> {
        let sessions = {
            let mut open = self.sessions();
            self.stopped.store(true, Ordering::Release);
            std::mem::take(&mut *open)
        };
        self.unused().clear();
        for session in &sessions {
            session.trust.lose(LossReason::Stopped);
        }
        sessions
    }

    fn sessions(&self) -> MutexGuard<'_, Vec<Arc<LockSession>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unused(&self) -> MutexGuard<'_, Vec<(Arc<LockSession>, Moment)>> {
        self.unused.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Beside {
    pub(crate) fn session(&self) -> &Arc<LockSession> {
        &self.session
    }
}

/// Tends the lock sessions for as long as the owner is there.
pub(super) async fn forever(shared: &Shared) {
    let period = PERIOD.min(shared.bound() / 4);
    loop {
        tokio::time::sleep(period).await;
        shared.locks.tend(shared);
    }
}

/// A session that holds locks.
#[derive(Debug)]
pub(crate) struct LockSession {
    trust: Trust,
    /// How long an answer is trusted. Less than the eleven seconds after which the server's keepalives give up a
    /// client that is cut off.
    window: Duration,
    pid: i32,
    /// How many locks it holds.
    holds: AtomicUsize,
    /// Empty while it is asked something, so that dropping the question closes it; and once it is lost.
    place: tokio::sync::Mutex<Option<Session>>,
}

enum Question {
    Call(Call),
    Message(String),
}

impl LockSession {
    async fn open(source: &Source) -> sqlx::Result<Self> {
        let mut session = source.open().await?;
        let sent = Moment::now();
        let rows = session.ask(&Call::new(advisory::WHO_ARE_YOU, [])).await?;
        let row = rows.first().ok_or(sqlx::Error::RowNotFound)?;
        if row.try_get("standby")? {
            let standby = "a standby, where an advisory lock excludes nobody";
            return Err(sqlx::Error::Io(std::io::Error::new(std::io::ErrorKind::NotConnected, standby)));
        }
        let margin = source.bound / 10;
        let window = if Mistake::NeverProbes.is_made() {
            Duration::from_hours(1)
        } else {
            source.bound.saturating_sub(margin)
        };
        Ok(Self {
            trust: Trust::until(sent.after(window), margin),
            window,
            pid: row.try_get("pid")?,
            holds: AtomicUsize::new(0),
            place: tokio::sync::Mutex::new(Some(session)),
        })
    }

    pub(crate) fn trust(&self) -> &Trust {
        &self.trust
    }

    /// Takes the lock if it is free. `alone`: nobody else here holds or tries it.
    pub(crate) async fn try_lock(&self, numbers: Numbers, mode: Mode, alone: bool) -> sqlx::Result<bool> {
        let mut place = self.place.lock().await;
        let rows = match self.ask(&mut place, Question::Call(advisory::try_lock(numbers, mode))).await {
            Ok(rows) => rows,
            Err(error) => {
                // A report (no room for it; cancelled) does not say what it left behind. Unlocking does: whatever
                // the answer, it is not held afterwards. With all else on this session it is worth the question.
                let unlock = Question::Call(advisory::unlock(numbers, mode));
                if place.is_some() && (!alone || self.ask(&mut place, unlock).await.is_err()) {
                    self.lose(&mut place, LossReason::SessionEnded);
                }
                return Err(error);
            }
        };
        let granted = answer(&rows).inspect_err(|_| self.lose(&mut place, LossReason::SessionEnded))?;
        self.holds.fetch_add(usize::from(granted), Ordering::AcqRel);
        Ok(granted)
    }

    /// Waits for the lock at the server, at most so long.
    pub(crate) async fn wait_for(
        &self,
        numbers: Numbers,
        mode: Mode,
        at_most: Duration,
    ) -> sqlx::Result<bool> {
        let mut place = self.place.lock().await;
        let message = advisory::wait_for_session(numbers, mode, at_most);
        match self.ask(&mut place, Question::Message(message)).await {
            Ok(_) => {
                self.holds.fetch_add(1, Ordering::AcqRel);
                Ok(true)
            }
            // Of the transaction's lock, so nothing is held.
            Err(error) if is_lock_not_available(&error) => Ok(false),
            Err(error) => {
                // It may be held.
                self.lose(&mut place, LossReason::SessionEnded);
                Err(error)
            }
        }
    }

    /// Whether it was held until now. If not, or that is not known, the session is lost: it is not what we think.
    /// `alone` as for [`try_lock`](Self::try_lock).
    pub(crate) async fn unlock(&self, numbers: Numbers, mode: Mode, alone: bool) -> sqlx::Result<bool> {
        let mut place = self.place.lock().await;
        if Mistake::KeepsLocks.is_made() {
            self.holds.fetch_sub(1, Ordering::AcqRel);
            return Ok(true);
        }
        let unlock = || Question::Call(advisory::unlock(numbers, mode));
        let mut unlocked = self.ask(&mut place, unlock()).await.and_then(|rows| answer(&rows));
        if unlocked.is_err() && alone && place.is_some() {
            // A report (cancelled): the session is there, and the lock or not. Once more, and it is not.
            unlocked = self.ask(&mut place, unlock()).await.map(|_| true);
        }
        self.holds.fetch_sub(1, Ordering::AcqRel);
        if !matches!(unlocked, Ok(true)) {
            tracing::warn!(
                ?unlocked,
                "fencepost: an advisory lock could not be unlocked; closing its session"
            );
            self.lose(&mut place, LossReason::SessionEnded);
        }
        unlocked
    }

    /// Whether it is there. Whoever else is asking it something will find out as well.
    async fn probe(&self) {
        if Mistake::NeverProbes.is_made() {
            return;
        }
        let Ok(mut place) = self.place.try_lock() else { return };
        let asked = tokio::select! {
            biased;
            asked = self.ask(&mut place, Question::Call(Call::new(advisory::PID, []))) => Some(asked),
            () = self.trust.trusted_until().reached() => None,
        };
        let reason = match asked {
            Some(Ok(rows)) => match rows.first().map(|row| row.try_get::<i32, _>("pid")) {
                Some(Ok(pid)) if pid == self.pid => return,
                // A pooler that was not recognised.
                _ => LossReason::SessionEnded,
            },
            // A report (cancelled) is an answer, too.
            Some(Err(_)) if place.is_some() => return,
            Some(Err(_)) => LossReason::SessionEnded,
            None => LossReason::Unreachable,
        };
        self.lose(&mut place, reason);
    }

    /// Asks, and confirms the session by any answer. After anything else it is lost.
    async fn ask(&self, place: &mut Option<Session>, question: Question) -> sqlx::Result<Vec<PgRow>> {
        let ended = || sqlx::Error::Io(std::io::ErrorKind::NotConnected.into());
        if self.holds.load(Ordering::Acquire) > 0 && self.trust.trusted_until().has_passed() {
            // Paused beyond it: lost by our own clock, without asking.
            self.trust.lose(LossReason::Expired);
        }
        if self.trust.loss().is_some() {
            *place = None;
        }
        let mut session = place.take().ok_or_else(ended)?;
        let sent = Moment::now();
        let answer = match question {
            Question::Call(call) => session.ask(&call).await,
            Question::Message(message) => session.send(message).await,
        };
        if answer.as_ref().is_err_and(leaves_outcome_open) {
            self.trust.lose(LossReason::SessionEnded);
        } else if self.trust.loss().is_some() {
            // Declared lost by somebody who watched it meanwhile.
            return Err(ended());
        } else {
            self.trust.trust_until(sent.after(self.window));
            *place = Some(session);
        }
        answer
    }

    fn lose(&self, place: &mut Option<Session>, reason: LossReason) {
        self.trust.lose(reason);
        *place = None;
    }

    /// Closes what is lost. `false`: somebody is at it, who will.
    fn close(&self) -> bool {
        self.place.try_lock().map(|mut place| *place = None).is_ok()
    }
}

fn answer(rows: &[PgRow]) -> sqlx::Result<bool> {
    rows.first().ok_or(sqlx::Error::RowNotFound)?.try_get("answer")
}
