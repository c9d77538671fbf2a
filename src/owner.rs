//! The owner: one start of one process, alive by heartbeat, and everything it holds lives with it.
//!
//! One row in the database stands for the process. Its leases belong to the row, so that one update every
//! third of the ttl renews all of them, and liveness has one meaning. The beating is done by a thread of its
//! own with connections of its own: a busy application runtime or an exhausted application pool does not
//! lose a lease.
//!
//! | what happens | what the owner does |
//! |---|---|
//! | a heartbeat fails | reconnects and tries on, until the local deadline |
//! | the deadline passes, or the database says "dead" | tells every held lease; starts again under a new id |
//! | an answer is lost | asks which grants it has and releases those nobody here knows |
//! | the process is paused beyond the ttl | on waking it is lost at once, by the local clock |
//! | its thread ends, for whatever reason | everything held is lost: [`LossReason::Stopped`] |

pub(crate) mod ended;
pub(crate) mod hand_over;
mod heartbeat;
pub(crate) mod life;
mod listen;
pub(crate) mod locks;
mod reconcile;
pub(crate) mod registry;
pub(crate) mod session;
mod trust;
pub(crate) mod wakes;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use sqlx::PgPool;
use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot, watch};
use tokio::time::timeout;

use crate::error::{Error, LossReason, Result};
use crate::migrate;
use crate::name::LockName;
use crate::owner::ended::Endings;
use crate::owner::heartbeat::Beginning;
use crate::owner::life::{Grants, Life, Stage, enter};
use crate::owner::locks::Locks;
use crate::owner::session::Statements;
use crate::owner::wakes::Wakes;

/// A process, to the database: what holds leases, as long as it beats.
///
/// One per process; clones are the same owner. It needs four connections at most, however many leases it holds: one
/// for the heartbeat, two for calls, and one that listens once something is waited for. (Session-level
/// [advisory locks](crate::AdvisoryLock) need one more, and up to four to wait for some.) They are made from the
/// options of the given pool and not taken from it.
///
/// # Guarantees
/// - A lease is reported as held only until a *local deadline*: the instant before the last successful
///   heartbeat was sent, plus the ttl, less a tenth. Before that nobody else can have been granted it, unless an
///   operator revoked it, which the next heartbeat tells.
/// - Whoever stops beating, for whatever reason, blocks nobody for longer than its ttl.
/// - Dead is final: an owner that the database took for dead comes back under a new id, never with its old
///   leases.
///
/// # Drop
/// When the last clone and the last thing held with it are dropped it stops in the background, as
/// [`shutdown`](Self::shutdown) does: what it held is freed soon, or after its ttl if the process ends first.
/// Use `shutdown` to know.
///
/// # Database
/// Works behind a transaction-mode pooler, which it detects at its start. The pool's `after_connect` does
/// not apply to its connections. At every reconnect it reads the pool's connect options again.
///
/// # Examples
/// ```no_run
/// # async fn example(pool: sqlx::PgPool) -> fencepost::Result<()> {
/// use std::time::Duration;
/// use fencepost::Owner;
///
/// let owner = Owner::builder(&pool).label("billing").ttl(Duration::from_secs(5)).start().await?;
/// // … take leases with it …
/// owner.shutdown().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Owner {
    inner: Arc<Inner>,
}

/// A started owner, on its way to whoever started it and then in their hands: stops when it is dropped.
#[derive(Debug)]
struct Started(Arc<Shared>);

/// What the clones of an owner share (each held thing has one); the last one stops it.
struct Inner {
    started: Started,
    thread: Mutex<Option<thread::JoinHandle<()>>>,
    /// Nothing is sent; it closes when the thread ends.
    ended: watch::Receiver<bool>,
}

/// What an owner's thread and the things it holds share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) label: String,
    pub(crate) ttl: Duration,
    pub(crate) margin: Duration,
    pub(crate) statements: Statements,
    pub(crate) grants: Grants,
    pub(crate) wakes: Wakes,
    pub(crate) locks: Locks,
    pub(crate) endings: Endings,
    /// The groups of which it is a member, or was.
    pub(crate) groups: Mutex<HashMap<LockName, Enrolled>>,
    stage: watch::Sender<Stage>,
    runtime: Handle,
    beat_now: Notify,
    stop: watch::Sender<bool>,
    myself: Weak<Self>,
}

/// A membership, by the two ends of channels that tell of its end.
#[derive(Clone, Debug)]
pub(crate) struct Enrolled {
    /// Its sender is gone when nobody wants the membership any more.
    pub(crate) wanted: watch::Receiver<()>,
    /// Its sender is gone when it is over.
    pub(crate) over: watch::Receiver<()>,
}

/// How an owner is made; from [`Owner::builder`].
#[derive(Clone, Debug)]
#[must_use]
pub struct OwnerBuilder {
    pool: PgPool,
    label: Option<String>,
    ttl: Duration,
    pooled: Option<bool>,
    advisory_locks: usize,
}

impl Owner {
    /// The ttl unless told otherwise: 10 s.
    ///
    /// It is how long others wait for a process that vanished, and how long the database may be out of reach
    /// before a living process loses what it holds. Ten seconds outlast a restart of Postgres, most
    /// failovers and a long pause of a runtime; a beat every third of it costs nothing.
    pub const DEFAULT_TTL: Duration = Duration::from_secs(10);

    /// The shortest ttl: 100 ms (10 ms with feature `test-util`). Below it, ordinary scheduling delays lose leases.
    pub const MIN_TTL: Duration =
        if cfg!(feature = "test-util") { Duration::from_millis(10) } else { Duration::from_millis(100) };

    /// The longest ttl: 24 h. It is how long a crashed process blocks the others.
    pub const MAX_TTL: Duration = Duration::from_hours(24);

    /// How many session-level advisory locks an owner holds at most, unless told otherwise: 1,000.
    pub const DEFAULT_ADVISORY_LOCKS: usize = 1_000;

    /// Starts an owner with the default ttl and a label made of program, host and process id.
    ///
    /// # Errors
    /// As for [`OwnerBuilder::start`].
    ///
    /// # Cancel safety
    /// Dropping the future stops what has been started, in the background.
    pub async fn start(pool: &PgPool) -> Result<Self> {
        Self::builder(pool).start().await
    }

    /// An owner with settings of your own.
    pub fn builder(pool: &PgPool) -> OwnerBuilder {
        OwnerBuilder {
            pool: pool.clone(),
            label: None,
            ttl: Self::DEFAULT_TTL,
            pooled: None,
            advisory_locks: Self::DEFAULT_ADVISORY_LOCKS,
        }
    }

    /// What people see of it: in refusals, errors and inspection. Need not be unique.
    #[must_use]
    pub fn label(&self) -> &str {
        &self.shared().label
    }

    /// How long it lives after a heartbeat.
    #[must_use]
    pub fn ttl(&self) -> Duration {
        self.shared().ttl
    }

    /// Whether its life is confirmed: the last answered heartbeat is recent enough.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.shared().current().is_some_and(|life| life.is_trusted())
    }

    /// Whether a transaction-mode pooler was found between it and the server.
    #[must_use]
    pub fn is_pooled(&self) -> bool {
        self.shared().statements.source().pooled
    }

    /// Resolves when its present life is lost, and with it everything held; at once if it is just starting
    /// again. It does that by itself, under a new id; leases have to be acquired again.
    ///
    /// # Cancel safety
    /// Safe: it only watches.
    pub async fn lost(&self) -> LossReason {
        let stage = self.shared().stage.borrow().clone();
        match stage {
            Stage::Alive(life) => life.lost().await,
            Stage::Starting(reason) => reason,
            Stage::Stopped { .. } => LossReason::Stopped,
        }
    }

    /// Stops it: everything held is lost and freed in the database, its connections are closed, its thread
    /// has ended. Doing so again does nothing.
    ///
    /// # Errors
    /// [`Error::TimedOut`] if the database could not be told: then what it held is free after its ttl.
    ///
    /// # Cancel safety
    /// Once polled it stops, also when the future is dropped.
    pub async fn shutdown(&self) -> Result<()> {
        self.shared().stop.send_replace(true);
        // The thread drops its end as the last thing it does, also when it panics.
        let mut ended = self.inner.ended.clone();
        drop(ended.wait_for(|ended| *ended).await);
        let thread = self.inner.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // So this takes no time. A panic of it has been reported as lost leases.
            drop(thread.join());
        }
        let told = matches!(*self.shared().stage.borrow(), Stage::Stopped { told: true });
        if told {
            Ok(())
        } else {
            Err(Error::TimedOut { step: "stopping the owner", after: self.shared().bound(), source: None })
        }
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.inner.started.0
    }
}

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not its id, which is a secret.
        f.debug_struct("Owner")
            .field("label", &self.label())
            .field("ttl", &self.ttl())
            .finish_non_exhaustive()
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        self.0.stop.send_replace(true);
    }
}

impl OwnerBuilder {
    /// How long it lives after a heartbeat; a beat is sent each third of it. Default:
    /// [`Owner::DEFAULT_TTL`]. From [`Owner::MIN_TTL`] to [`Owner::MAX_TTL`].
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// What people see of it; 1 to 255 bytes without control characters.
    pub fn label(mut self, label: &str) -> Self {
        self.label = Some(label.to_owned());
        self
    }

    /// Says whether a transaction-mode pooler is in between, instead of finding out. Needed where finding out
    /// cannot work: several poolers behind one address may each show a session of their own.
    pub fn transaction_pooler(mut self, pooled: bool) -> Self {
        self.pooled = Some(pooled);
        self
    }

    /// How many session-level advisory locks it holds at most, or asks for at a time; beyond it is
    /// [`Error::LockTableFull`]. Default: [`Owner::DEFAULT_ADVISORY_LOCKS`]; at least 1, at most 1,000,000.
    ///
    /// All sessions of a server share one lock table, made at its start for `max_locks_per_transaction` × (
    /// `max_connections` + `max_prepared_transactions`) locks of every kind: 6,400 by default, of which about twice as
    /// many fit. When it is full everybody suffers: statements that lock fail, and new connections are refused. So the
    /// caps of all owners together are to stay below the product, or the setting is to be raised.
    pub fn advisory_locks(mut self, at_most: usize) -> Self {
        self.advisory_locks = at_most;
        self
    }

    /// Starts it: connects, looks for a pooler, checks the schema's version, beats from then on.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a ttl, label or number of locks out of range, or a pool with several hosts in one URL (sqlx
    /// takes them for one name). [`Error::SchemaMissing`], [`Error::SchemaVersion`], [`Error::NotAllowed`].
    /// [`Error::Database`] if the server cannot be reached: starting does not wait for it to come up;
    /// [`Error::TimedOut`] if it does not answer for as long as the ttl (at least 1 s, at most 10 s).
    ///
    /// # Cancel safety
    /// Dropping the future stops what has been started, in the background.
    ///
    /// # Database
    /// Two connections, one statement on each beside their settings, and forty-one small ones to be sure that there is no
    /// pooler; none of these if [`transaction_pooler`](Self::transaction_pooler) says it.
    pub async fn start(self) -> Result<Owner> {
        if self.ttl < Owner::MIN_TTL || self.ttl > Owner::MAX_TTL {
            return Err(Error::misuse(format!(
                "an owner's ttl is {:?} to {:?}, not {:?}",
                Owner::MIN_TTL,
                Owner::MAX_TTL,
                self.ttl
            )));
        }
        migrate::check_hosts(&self.pool.connect_options())?;
        if !(1..=1_000_000).contains(&self.advisory_locks) {
            return Err(Error::misuse(format!(
                "an owner holds at most 1 to 1,000,000 session-level advisory locks, not {}",
                self.advisory_locks
            )));
        }
        let label = self.label.unwrap_or_else(default_label);
        crate::name::check(&label, "a label")?;
        let beginning = Beginning {
            pool: self.pool,
            label,
            ttl: self.ttl,
            pooled: self.pooled,
            advisory_locks: self.advisory_locks,
        };

        let fail = |error| Error::database("starting the owner's thread", sqlx::Error::Io(error));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(fail)?;
        let (ready, is_ready) = oneshot::channel();
        let (end, ended) = watch::channel(false);
        let thread = thread::Builder::new()
            .name("fencepost".to_owned())
            .spawn(move || {
                let _end = end;
                runtime.block_on(heartbeat::live(beginning, ready));
                // Not to wait for a look-up of a host's name that may take its time.
                runtime.shutdown_background();
            })
            .map_err(fail)?;
        let started = is_ready.await.map_err(|_ended| Error::Stopped)??;
        Ok(Owner { inner: Arc::new(Inner { started, thread: Mutex::new(Some(thread)), ended }) })
    }
}

/// `program@host:pid`, as far as known.
fn default_label() -> String {
    let program = std::env::current_exe().ok();
    let program = program.as_deref().and_then(|path| path.file_stem()?.to_str()).unwrap_or("?");
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").or_else(|_| std::env::var("HOSTNAME"));
    let host = host.as_deref().map_or("?", str::trim);
    let mut label = format!("{program}@{host}:{}", std::process::id()).replace(char::is_control, "?");
    label.truncate(label.floor_char_boundary(LockName::MAX_BYTES));
    label
}

impl Shared {
    /// Runs `work` on the owner's thread, to its end. If the caller's future is dropped, the result is
    /// dropped on that thread when it is there: what was acquired gives itself back.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        self.runtime.spawn(work).await.unwrap_or(Err(Error::Stopped))
    }

    /// Runs `work` on the owner's thread, with nobody waiting.
    pub(crate) fn run_unattended(&self, work: impl Future<Output = ()> + Send + 'static) {
        drop(self.runtime.spawn(work));
    }

    /// The present life.
    pub(crate) fn current(&self) -> Option<Arc<Life>> {
        match &*self.stage.borrow() {
            Stage::Alive(life) => Some(Arc::clone(life)),
            Stage::Starting(_) | Stage::Stopped { .. } => None,
        }
    }

    /// The present life, or the next one if it comes within the owner's bound.
    pub(crate) async fn alive(&self) -> Result<Arc<Life>> {
        if let Some(life) = self.current() {
            return Ok(life);
        }
        let mut stage = self.stage.subscribe();
        let settled = stage.wait_for(|stage| !matches!(stage, Stage::Starting(_)));
        match timeout(self.bound(), settled).await.map(|stage| stage.map(|stage| stage.clone())) {
            Ok(Ok(Stage::Alive(life))) => Ok(life),
            Ok(_) => Err(Error::Stopped),
            Err(_) => {
                Err(Error::TimedOut { step: "the owner's next start", after: self.bound(), source: None })
            }
        }
    }

    /// Somebody heard from the database that `life` is over: a heartbeat shall find out, now. Returns when it
    /// has; after the owner's bound in any case. (It may live: if its time was over for the moment in which a
    /// heartbeat that was in time had not yet been committed.)
    pub(crate) async fn doubt(&self, life: &Life) {
        self.beat_now.notify_one();
        let found_out = async {
            tokio::select! {
                _reason = life.lost() => {}
                () = life.beaten() => {}
            }
        };
        drop(timeout(self.bound(), found_out).await);
    }

    fn bound(&self) -> Duration {
        self.statements.source().bound
    }

    fn enter(&self, next: Stage, reason: LossReason) {
        enter(&self.stage, next, reason);
    }
}
