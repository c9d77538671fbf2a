//! A worker process: contends for leases, writes with the fence and without it, and keeps a history.
//!
//! It is this test binary, executed again with its orders in an environment variable. By its standard output it
//! asks the controller for being stopped at a point where that hurts; by its standard input it is told to go on
//! (`go`) and to end (`quit`). It ends when that input ends, so none outlives the test.
//!
//! | it does | with |
//! |---|---|
//! | fenced write | the fence, a read of the counter, a pause, its write, a row of the log: one transaction |
//! | twin | a read of another counter, a pause, its write: two statements, trusting in `is_held` |
//! | look | `is_held`, with the instants before and after it |
//! | give back | by release, by drop, or by being stopped for too long |
//!
//! What else it does, or does wrong, is in its [`Habits`].

mod claiming;
mod leading;
mod locking;
mod permits;
pub(crate) mod sharing;
mod slotting;
mod trying;
pub(crate) mod versioning;
mod waiting;

pub(crate) use leading::ELECTION;
pub(crate) use permits::{PERMITS, SEMAPHORE};

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io::BufRead as _;
use std::path::PathBuf;
use std::rc::Rc;
use std::str::FromStr as _;
use std::time::Duration;

use fencepost::Isolation;
use fencepost::{Error, HeldLease, Lease, LossReason, Owner};
use serde::{Deserialize, Serialize};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions, PgTransaction};
use sqlx::{AssertSqlSafe, ConnectOptions as _, PgPool, Row as _};
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::{sleep, timeout};

use crate::dice::Dice;
use crate::history::{Kind, Phase, REJECTED, Record, Writer, now};
use crate::locks::LOCK;
use crate::slots;

/// The variable that carries the orders.
pub(crate) const VARIABLE: &str = "FENCEPOST_FAULTS_WORKER";

/// What begins a line that asks for being stopped.
pub(crate) const ASK: &str = "@stop-me ";

/// The application's connections, as the server sees them.
pub(crate) const APPLICATION: &str = "faults worker";

/// The longest that a worker waits for what must come. Not a measurement.
const DEADLINE: Duration = Duration::from_secs(20);

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Orders {
    pub(crate) process: i32,
    pub(crate) url: String,
    pub(crate) history: PathBuf,
    pub(crate) ttl: Duration,
    pub(crate) seed: u64,
    pub(crate) names: Vec<String>,
    pub(crate) mode: Mode,
    pub(crate) habits: Habits,
    /// What the application does wrong on purpose.
    pub(crate) mistake: Option<Mistake>,
}

/// How the application of a cell behaves.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "habits are independent of each other")]
pub(crate) struct Habits {
    /// In its pool.
    pub(crate) connections: u32,
    /// Blocks its only runtime thread now and then, for longer than the ttl.
    pub(crate) starves: bool,
    /// Takes its only connection now and then, for longer than the ttl.
    pub(crate) hogs: bool,
    /// Its own commits are durable, whatever its role says.
    pub(crate) durable: bool,
    /// Rolls back to savepoints in its fenced transactions.
    pub(crate) savepoints: bool,
    /// Asks to be stopped whenever it holds.
    pub(crate) dozes: bool,
    /// Gives most of its acquires up.
    pub(crate) impatient: bool,
    /// Has a wall clock that somebody sets.
    pub(crate) false_clock: bool,
    /// Holds some of its locks for seconds.
    pub(crate) lingers: bool,
}

impl Habits {
    pub(crate) const PLAIN: Self = Self {
        connections: 2,
        starves: false,
        hogs: false,
        durable: false,
        savepoints: false,
        dozes: false,
        impatient: false,
        false_clock: false,
        lingers: false,
    };
}

/// A mistake of an application.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Mistake {
    /// It checks its fence in a transaction of its own, and writes in the next one.
    FenceInAutocommit,
    /// It updates several versioned rows, whatever their versions are.
    ComparesNoVersion,
    /// It sends an update whose answer was lost once more.
    RepeatsUnknown,
    /// A row that takes the place of a deleted one begins with version 1.
    BeginsAtOne,
}

/// What a worker does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Mode {
    /// Contends by trying, until told to end.
    Try,
    /// Waits in line, with several tasks, until told to end.
    Wait,
    /// Takes jobs and begins claims, until told to end.
    Claim,
    /// Campaigns for elections, leads, and resigns, until told to end.
    Lead,
    /// Takes permits of semaphores and gives them back, until told to end.
    Permits,
    /// Contends for session-level locks, with several tasks, until told to end.
    Lock,
    /// Changes versioned rows, until told to end.
    Version,
    /// Is a member of a group, and writes for the partitions that it is assigned, until told to end.
    Share,
    /// Runs the slots of schedules, until told to end.
    Slot,
    /// Takes each name once, when it is free, writes, and ends.
    Once,
}

/// Where a worker wants to be stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Place {
    /// In a fenced transaction, between its read and its write.
    Fenced,
    /// Between the unfenced read and the unfenced write.
    Twin,
    /// While it holds and does nothing.
    Idle,
    /// In a fenced transaction under a permit.
    Permit,
    /// With an attempt at a claim.
    Claimed,
    /// In a transaction in which it has completed one.
    Completing,
    /// With one slot completed, and others to come.
    Between,
    /// Between the load of a versioned row and its change; the token is the version.
    Versioned,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Ask {
    pub(crate) place: Place,
    pub(crate) name: String,
    pub(crate) token: i64,
    pub(crate) grant: String,
    /// What was read, for [`Place::Twin`].
    pub(crate) value: i64,
}

/// The main function of a worker process.
pub(crate) fn main(orders: &str) {
    let orders: Orders = serde_json::from_str(orders).unwrap();
    let (quit, quitting) = watch::channel(false);
    let (go, going) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            match line.as_str() {
                "go" => drop(go.send(())),
                "quit" => drop(quit.send_replace(true)),
                other => panic!("told {other:?}"),
            }
        }
        // Nobody is there any more to stop us or to read what we did.
        std::process::exit(1);
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(work(orders, quitting, going));
}

async fn work(orders: Orders, quitting: watch::Receiver<bool>, going: mpsc::UnboundedReceiver<()>) {
    let options = PgConnectOptions::from_str(&orders.url)
        .unwrap()
        .application_name(APPLICATION)
        .disable_statement_logging();
    let durable = orders.habits.durable;
    let pool = PgPoolOptions::new()
        .max_connections(orders.habits.connections)
        .acquire_timeout(DEADLINE)
        .after_connect(move |connection, _| {
            Box::pin(async move {
                if durable {
                    sqlx::raw_sql("SET synchronous_commit = on").execute(connection).await?;
                }
                Ok(())
            })
        })
        .connect_lazy_with(options);
    let label = format!("worker-{}", orders.process);
    let start = async {
        // A session that is ended while the owner starts is a fault of ours.
        loop {
            match Owner::builder(&pool).label(&label).ttl(orders.ttl).start().await {
                Ok(owner) => return owner,
                Err(error) if error.is_retryable() || error.is_timeout() => {
                    sleep(Duration::from_millis(5)).await;
                }
                Err(Error::Database { .. }) => sleep(Duration::from_millis(5)).await,
                Err(error) => panic!("{error:?}"),
            }
        }
    };
    let owner = timeout(DEADLINE, start).await.expect("the owner starts");
    let worker = Rc::new(Worker {
        history: Writer::create(&orders.history),
        dice: RefCell::new(Dice::new(orders.seed)),
        going: RefCell::new(going),
        op: Cell::new(0),
        held: RefCell::default(),
        stopping: Cell::new(false),
        quitting,
        owner,
        pool,
        orders,
    });
    // Claims have names of their own, and then there is none.
    let first = worker.orders.names.first().map_or("", String::as_str);
    match worker.orders.mode {
        Mode::Wait => waiting::work(Rc::clone(&worker)).await,
        Mode::Claim => claiming::work(Rc::clone(&worker)).await,
        Mode::Lead => leading::work(&worker).await,
        Mode::Permits => permits::work(&worker).await,
        Mode::Lock => locking::work(Rc::clone(&worker)).await,
        Mode::Slot => slotting::work(&worker).await,
        Mode::Once if slots::is_schedule(first) => slotting::once(&worker).await,
        Mode::Once if leading::is_election(first) => leading::once(&worker).await,
        Mode::Once if permits::is_semaphore(first) => permits::once(&worker).await,
        Mode::Once if first.starts_with(LOCK) => locking::once(&worker).await,
        Mode::Version => versioning::work(&worker).await,
        Mode::Once if versioning::is_row(first) => versioning::once(&worker).await,
        Mode::Share => sharing::work(Rc::clone(&worker)).await,
        Mode::Once if sharing::are_partitions(&worker.orders.names) => sharing::once(&worker).await,
        Mode::Once => {
            for name in &worker.orders.names {
                let take = async {
                    loop {
                        if let Some(held) = worker.acquire(name).await {
                            return held;
                        }
                        sleep(worker.think(1, 5)).await;
                    }
                };
                let held =
                    timeout(DEADLINE, take).await.unwrap_or_else(|_| panic!("{name} is never granted"));
                worker.fenced_write(&held).await;
                worker.give_back(held, false).await;
            }
        }
        Mode::Try => trying::work(&worker).await,
    }
    worker.shut_down().await;
    worker.pool.close().await;
}

/// All on one thread: the cells are for the tasks that wait, and for the watch on a loss beside the work.
struct Worker {
    orders: Orders,
    history: Writer,
    dice: RefCell<Dice>,
    going: RefCell<mpsc::UnboundedReceiver<()>>,
    op: Cell<i64>,
    /// What tasks that wait have got, by token.
    held: RefCell<BTreeMap<i64, String>>,
    /// The owner is being stopped: everything is given back from now on, and lost for that reason.
    stopping: Cell<bool>,
    quitting: watch::Receiver<bool>,
    owner: Owner,
    pool: PgPool,
}

/// What a worker holds, and the way to end it.
trait Hold {
    fn lease(&self) -> &HeldLease;
    async fn end(self) -> fencepost::Result<bool>;
}

impl Hold for HeldLease {
    fn lease(&self) -> &HeldLease {
        self
    }

    async fn end(self) -> fencepost::Result<bool> {
        self.release().await
    }
}

/// A fenced transaction before its COMMIT.
struct OpenWrite {
    tx: PgTransaction<'static>,
    op: i64,
    name: String,
    token: i64,
    value: i64,
}

impl Worker {
    /// On a slow machine the database may not be told in time; then the owner dies by itself.
    async fn shut_down(&self) {
        if let Err(error) = self.owner.shutdown().await {
            assert!(error.is_timeout(), "{error:?}");
        }
    }

    fn next_op(&self) -> i64 {
        self.op.set(self.op.get() + 1);
        self.op.get()
    }

    /// A time to think, in milliseconds: load, not synchronisation.
    fn think(&self, low: u64, high: u64) -> Duration {
        Duration::from_millis(self.dice.borrow_mut().between(low, high))
    }

    fn percent(&self, chance: u64) -> bool {
        self.dice.borrow_mut().percent(chance)
    }

    fn record(&self, op: i64, kind: Kind, phase: Phase, name: &str) -> Record {
        Record::new(self.orders.process, op, kind, phase, name)
    }

    async fn acquire(&self, name: &str) -> Option<HeldLease> {
        let op = self.next_op();
        let record = |phase| self.record(op, Kind::Acquire, phase, name);
        self.history.write(&record(Phase::Invoke));
        let answer = Lease::named(name).unwrap().try_acquire(&self.owner).await;
        match answer {
            Ok(Some(held)) => {
                self.history.write(&record(Phase::Ok).token(held.token().as_i64()));
                Some(held)
            }
            Ok(None) => {
                self.history.write(&record(Phase::Fail));
                None
            }
            Err(error) => {
                self.history.write(&record(Phase::Unknown).why(error.to_string()));
                None
            }
        }
    }

    async fn watch_loss(&self, held: &HeldLease, done: &Notify) {
        tokio::select! {
            reason = held.lost() => {
                if !(self.stopping.get() && reason == LossReason::Stopped) {
                    let lost = self.record(self.next_op(), Kind::Lost, Phase::Ok, held.name().as_str());
                    self.history.write(&lost.token(held.token().as_i64()).why(reason.to_string()));
                }
            }
            () = done.notified() => {}
        }
    }

    /// Does the process believe that it holds? Asked between two instants.
    fn look(&self, held: &HeldLease) -> bool {
        self.look_as(held, || (held.is_held(), held.remaining()))
    }

    fn look_as(&self, held: &HeldLease, say: impl FnOnce() -> (bool, Duration)) -> bool {
        let before = now();
        let (answer, remaining) = say();
        let remaining = i64::try_from(remaining.as_nanos()).unwrap();
        let until = Some(now());
        let phase = if answer { Phase::Ok } else { Phase::Fail };
        let record = self.record(self.next_op(), Kind::Believe, phase, held.name().as_str());
        self.history.write(&Record {
            at: before,
            until,
            ..record.token(held.token().as_i64()).value(remaining)
        });
        answer
    }

    async fn fenced_write(&self, held: &HeldLease) {
        if let Some(open) = self.open_write(held).await {
            self.commit(open).await;
        }
    }

    /// Fenced and written, and not yet committed.
    async fn open_write(&self, held: &HeldLease) -> Option<OpenWrite> {
        let op = self.next_op();
        let (name, token) = (held.name().as_str(), held.token().as_i64());
        let record = |phase| self.record(op, Kind::Write, phase, name).token(token);
        self.history.write(&record(Phase::Invoke));
        let isolation = self.dice.borrow_mut().below(10);
        let isolation = match isolation {
            0..2 => Isolation::RepeatableRead,
            2 => Isolation::Serializable,
            _ => Isolation::ReadCommitted,
        };
        let begun = match self.orders.mistake {
            Some(Mistake::FenceInAutocommit) => self.fence_too_early(held).await,
            _ => held.begin_with(&self.pool, isolation).await,
        };
        let mut tx = match begun {
            Ok(tx) => tx,
            Err(error) => {
                let why = if error.is_lost() { REJECTED } else { "not begun" };
                self.history.write(&record(Phase::Fail).why(format!("{why}: {error}")));
                return None;
            }
        };
        // Until COMMIT is sent, a failure is a failure.
        let value = match self.write_in(&mut tx, held, op).await {
            Ok(value) => value,
            Err(error) => {
                self.history.write(&record(Phase::Fail).why(error.to_string()));
                return None;
            }
        };
        if self.percent(8) {
            drop(tx.rollback().await);
            self.history.write(&record(Phase::Fail).why("rolled back"));
            return None;
        }
        Some(OpenWrite { tx, op, name: name.to_owned(), token, value })
    }

    /// A mistake: what the fence has locked is unlocked before the write begins.
    async fn fence_too_early(&self, held: &HeldLease) -> Result<PgTransaction<'static>, Error> {
        held.begin(&self.pool).await?.commit().await?;
        Ok(self.pool.begin().await?)
    }

    async fn commit(&self, open: OpenWrite) {
        let OpenWrite { tx, op, name, token, value } = open;
        let record = |phase| self.record(op, Kind::Write, phase, &name).token(token);
        self.history.write(&record(Phase::Commit).value(value));
        let (phase, why) = match tx.commit().await.map_err(Error::from) {
            Ok(()) => (Phase::Ok, String::new()),
            Err(error @ (Error::SerializationFailure { .. } | Error::Deadlock { .. })) => {
                (Phase::Fail, error.to_string())
            }
            Err(error) => (Phase::Unknown, format!("{error:?}")),
        };
        self.history.write(&record(phase).value(value).why(why));
    }

    /// The read-modify-write, which nothing but the fence protects: a plain read.
    async fn write_in(&self, tx: &mut PgTransaction<'_>, held: &HeldLease, op: i64) -> sqlx::Result<i64> {
        let (name, token) = (held.name().as_str(), held.token().as_i64());
        // All as text: through a pooler, sqlx's prepared statements may be another session's. (The names are ours.)
        let read = format!("SELECT value FROM counter WHERE name = '{name}'");
        let read: i64 = sqlx::raw_sql(AssertSqlSafe(read)).fetch_one(&mut **tx).await?.try_get(0)?;
        if self.orders.habits.savepoints && self.percent(50) {
            sqlx::raw_sql("SAVEPOINT attempt; UPDATE counter SET value = -1; ROLLBACK TO attempt")
                .execute(&mut **tx)
                .await?;
        }
        if matches!(self.orders.mode, Mode::Try | Mode::Lead) && self.percent(7) {
            self.ask_to_be_stopped(Place::Fenced, held, read).await;
        } else {
            sleep(self.think(0, 3)).await;
        }
        let process = self.orders.process;
        let write = format!(
            "UPDATE counter SET value = {0} WHERE name = '{name}'; \
             INSERT INTO log (name, token, value, process, op) VALUES ('{name}', {token}, {0}, {process}, {op})",
            read + 1
        );
        sqlx::raw_sql(AssertSqlSafe(write)).execute(&mut **tx).await?;
        Ok(read + 1)
    }

    async fn give_back(&self, held: impl Hold, drop_it: bool) {
        let op = self.next_op();
        let (name, token) = (held.lease().name().to_string(), held.lease().token().as_i64());
        self.held.borrow_mut().remove(&token);
        if self.stopping.get() {
            // It is given back already; that this changes nothing is what there is to see.
            return if drop_it { drop(held) } else { drop(held.end().await) };
        }
        let record = self.record(op, Kind::End, Phase::Invoke, &name).token(token).why("drop");
        if drop_it {
            self.history.write(&record);
            return drop(held);
        }
        self.history.write(&record.why("release"));
        let released = held.end().await;
        let end = self.record(op, Kind::End, Phase::Ok, &name);
        self.history.write(&end.why(format!("{released:?}")));
    }

    /// Stands still here, with its owner beating on, until it has been stopped for long and told to go on.
    async fn ask_to_be_stopped(&self, place: Place, held: &HeldLease, value: i64) {
        let (name, token, grant) = (held.name().to_string(), held.token().as_i64(), held.grant().to_string());
        self.ask(&Ask { place, name, token, grant, value }).await;
    }

    async fn ask(&self, ask: &Ask) {
        let mut quitting = self.quitting.clone();
        println!("{ASK}{}", serde_json::to_string(ask).unwrap());
        tokio::select! {
            told = self.told_to_go_on() => told,
            _ = quitting.wait_for(|quit| *quit) => {}
        }
    }

    async fn told_to_go_on(&self) {
        std::future::poll_fn(|cx| self.going.borrow_mut().poll_recv(cx)).await.unwrap_or_default();
    }
}
