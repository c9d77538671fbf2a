//! The worker processes as the controller has them: started, stopped, woken, cut off, killed, replaced.
//!
//! Signals go only to children of this process that have not been waited for, so never to a stranger.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use tokio::sync::mpsc;

use crate::checker::{Outage, Stop};
use crate::controller::{MOST_STOPPED, Plan, until};
use crate::dice::Dice;
use crate::history::now;
use crate::stage::Stage;
use crate::worker::{ASK, Ask, Mode, Orders, VARIABLE};

/// The test that a worker process runs.
pub(crate) const ENTRY: &str = "worker_process";

/// A process that a signal shall still reach: the place in the fleet and the number of its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    place: usize,
    process: i32,
}

impl Target {
    /// Of its way to the server.
    pub(crate) fn place(self) -> usize {
        self.place
    }
}

struct Worker {
    process: i32,
    child: Child,
    input: ChildStdin,
    ttl: Duration,
    /// Somebody has it stopped or cut off, or is about to.
    taken: bool,
    /// It has been killed, and a fresh one is about to take its place.
    gone: bool,
    /// What its wall clock is ahead of the true one is written here.
    clock: Option<PathBuf>,
}

pub(crate) struct Fleet {
    workers: Mutex<Vec<Worker>>,
    dice: Mutex<Dice>,
    started: Mutex<i32>,
    stops: Mutex<Vec<Stop>>,
    /// Those that ended by themselves and not well.
    failed: Mutex<Vec<String>>,
    asks: mpsc::UnboundedSender<(Target, Ask)>,
    stage: Arc<Stage>,
    /// Taken by the fault that concerns everybody, one at a time.
    server_fault: tokio::sync::Mutex<()>,
    failover: Mutex<Option<u64>>,
    /// The grants of larger tokens will be lost.
    kept: AtomicI64,
    folder: PathBuf,
    names: Vec<String>,
    plan: Plan,
    /// The library that makes a clock wrong, where one is wanted.
    false_clock: Option<PathBuf>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Fleet {
    /// Its workers' requests to be stopped come through `asks`. Or why there can be none on this machine.
    pub(crate) fn new(
        plan: Plan,
        stage: Arc<Stage>,
        folder: PathBuf,
        names: Vec<String>,
        asks: mpsc::UnboundedSender<(Target, Ask)>,
    ) -> Result<Self, &'static str> {
        let false_clock = if plan.cell.habits.false_clock {
            Some(false_clock().ok_or("libfaketime is not installed")?)
        } else {
            None
        };
        let (workers, started, stops) = (Mutex::default(), Mutex::new(0), Mutex::default());
        let (dice, failed, failover) = (Mutex::new(Dice::new(plan.seed)), Mutex::default(), Mutex::default());
        let (server_fault, kept) = (tokio::sync::Mutex::default(), AtomicI64::new(i64::MAX));
        Ok(Self {
            workers,
            dice,
            started,
            stops,
            failed,
            asks,
            stage,
            server_fault,
            failover,
            kept,
            folder,
            names,
            plan,
            false_clock,
        })
    }

    pub(crate) fn start(&self, count: usize) {
        for place in 0..count {
            let worker = self.spawn(place, self.plan.cell.mode);
            lock(&self.workers).push(worker);
        }
    }

    fn spawn(&self, place: usize, mode: Mode) -> Worker {
        let process = {
            let mut started = lock(&self.started);
            *started += 1;
            *started
        };
        let (seed, ttl) = {
            let mut dice = lock(&self.dice);
            let (least, most) = self.plan.cell.ttl;
            (dice.next(), Duration::from_millis(dice.between(least, most)))
        };
        let orders = Orders {
            process,
            url: self.stage.url(place),
            history: self.folder.join(format!("{process:04}.jsonl")),
            ttl,
            seed,
            names: self.names.clone(),
            mode,
            habits: self.plan.cell.habits,
            mistake: self.plan.canary.and_then(|canary| canary.of_the_worker()),
        };
        let mut command = Command::new(std::env::current_exe().unwrap());
        let clock = self.false_clock.as_ref().map(|library| {
            let file = self.folder.join(format!("{process:04}.clock"));
            std::fs::write(&file, "+0").unwrap();
            // Only the wall clock: the other one cannot be set.
            command.env("LD_PRELOAD", library).env("FAKETIME_TIMESTAMP_FILE", &file);
            command.env("FAKETIME_NO_CACHE", "1").env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
            file
        });
        if let Some(mistake) = self.plan.canary.and_then(|canary| canary.of_the_client()) {
            command.env(fencepost::testing::MISTAKE, mistake);
        }
        let mut child = command
            .args(["--exact", ENTRY, "--nocapture", "--test-threads=1"])
            .env(VARIABLE, serde_json::to_string(&orders).unwrap())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (asks, target) = (self.asks.clone(), Target { place, process });
        std::thread::spawn(move || {
            // The test harness prints lines of its own, and begins one without ending it.
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let Some((_, ask)) = line.split_once(ASK) else { continue };
                if let Ok(ask) = serde_json::from_str(ask) {
                    drop(asks.send((target, ask)));
                }
            }
        });
        Worker { process, child, input, ttl, taken: false, gone: false, clock }
    }

    /// One of the workers that nobody has stopped.
    pub(crate) fn any(&self) -> Option<Target> {
        let workers = lock(&self.workers);
        let free: Vec<Target> = (0..)
            .zip(workers.iter())
            .filter(|(_, worker)| !worker.taken)
            .map(|(place, worker)| Target { place, process: worker.process })
            .collect();
        drop(workers);
        (!free.is_empty()).then(|| *lock(&self.dice).pick(&free))
    }

    /// The same, if not too many are stopped already.
    pub(crate) fn any_to_stop(&self) -> Option<Target> {
        if self.stopped() < MOST_STOPPED { self.any() } else { None }
    }

    /// Nobody else stops it from now on, until [`cut_off`](Self::cut_off) says that it was.
    pub(crate) fn any_to_cut_off(&self) -> Option<Target> {
        self.any_to_stop().filter(|target| self.take(*target))
    }

    /// Whether nobody has stopped or cut off this one; nobody else does from now on.
    pub(crate) fn take(&self, target: Target) -> bool {
        self.with(target, |worker| !std::mem::replace(&mut worker.taken, true)) == Some(true)
    }

    /// A place in the fleet, and the ttl there.
    pub(crate) fn any_ttl(&self) -> Option<(usize, Duration)> {
        let target = self.any()?;
        Some((target.place, self.ttl(target)?))
    }

    pub(crate) fn stage(&self) -> &Arc<Stage> {
        &self.stage
    }

    pub(crate) fn server_fault(&self) -> &tokio::sync::Mutex<()> {
        &self.server_fault
    }

    pub(crate) fn stopped(&self) -> usize {
        lock(&self.workers).iter().filter(|worker| worker.taken).count()
    }

    pub(crate) fn ttl(&self, target: Target) -> Option<Duration> {
        self.with(target, |worker| worker.ttl)
    }

    /// Stops it, waits until it stands still; since when, or nothing if it is stopped already or no more.
    pub(crate) async fn stop(&self, target: Target) -> Option<u64> {
        let sent = self.with(target, |worker| {
            let free = !std::mem::replace(&mut worker.taken, true);
            free && kill_process(pid(&worker.child), Signal::STOP).is_ok()
        });
        if sent != Some(true) {
            return None;
        }
        let stands = || {
            self.with(target, |worker| {
                let stopped = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG;
                waitid(WaitId::Pid(pid(&worker.child)), stopped).unwrap().is_some()
            })
        };
        until("a worker stands still", || (stands() != Some(false)).then_some(())).await;
        Some(now())
    }

    /// Wakes what [`stop`](Self::stop) has stopped, and tells it to go on if it has asked.
    pub(crate) fn wake(&self, target: Target, stood: u64, asked: bool) {
        let stop = self.with(target, |worker| {
            if asked {
                go(worker);
            }
            worker.taken = false;
            let (process, ttl, outage) = (worker.process, worker.ttl, Outage::Stood);
            let stop = Stop { process, stood, woken: now(), ttl, outage };
            kill_process(pid(&worker.child), Signal::CONT).unwrap();
            stop
        });
        lock(&self.stops).extend(stop);
    }

    /// The server was out of its reach.
    pub(crate) fn cut_off(&self, target: Target, (from, until): (u64, u64)) {
        let stop = self.with(target, |worker| {
            worker.taken = false;
            let (process, ttl, outage) = (worker.process, worker.ttl, Outage::CutOff);
            Stop { process, stood: from, woken: until, ttl, outage }
        });
        lock(&self.stops).extend(stop);
    }

    /// The server was out of reach.
    pub(crate) fn all_cut_off(&self, (from, until): (u64, u64)) {
        let stops = lock(&self.workers)
            .iter()
            .map(|worker| {
                let (process, ttl, outage) = (worker.process, worker.ttl, Outage::CutOff);
                Stop { process, stood: from, woken: until, ttl, outage }
            })
            .collect::<Vec<_>>();
        lock(&self.stops).extend(stops);
    }

    /// A failover will lose, or has lost, the grant of this token.
    pub(crate) fn is_lost(&self, token: i64) -> bool {
        token > self.kept.load(Ordering::SeqCst)
    }

    /// The last token that a failover keeps; none: there is no failover now.
    pub(crate) fn keep(&self, last: Option<i64>) {
        self.kept.store(last.unwrap_or(i64::MAX), Ordering::SeqCst);
    }

    pub(crate) fn failed_over(&self, outage: (u64, u64)) {
        self.all_cut_off(outage);
        *lock(&self.failover) = Some(outage.0);
    }

    /// When the old primary was left, if it was.
    pub(crate) fn failover(&self) -> Option<u64> {
        *lock(&self.failover)
    }

    /// Sets some worker's wall clock to so many seconds ahead.
    pub(crate) fn step_clock(&self, seconds: i64) -> Option<()> {
        let target = self.any()?;
        let file = self.with(target, |worker| worker.clock.clone())??;
        // Read at any moment, so it must be whole at any moment.
        let whole = file.with_extension("next");
        std::fs::write(&whole, format!("{seconds:+}")).unwrap();
        std::fs::rename(whole, file).unwrap();
        Some(())
    }

    /// Lets one that has asked to be stopped go on as it is.
    pub(crate) fn refuse(&self, target: Target) {
        self.with(target, go);
    }

    /// Kills it, stopped or not, and puts a fresh process into its place.
    pub(crate) fn replace(&self, target: Target) {
        let ended = self.with(target, |worker| {
            if let Some(status) = worker.child.try_wait().unwrap() {
                lock(&self.failed).push(format!("worker process {} ended with {status}", worker.process));
            }
            end(worker);
            (worker.taken, worker.gone) = (true, true);
        });
        if ended.is_some() {
            let fresh = self.spawn(target.place, self.plan.cell.mode);
            lock(&self.workers)[target.place] = fresh;
        }
    }

    fn with<T>(&self, target: Target, act: impl FnOnce(&mut Worker) -> T) -> Option<T> {
        let mut workers = lock(&self.workers);
        let worker =
            workers.get_mut(target.place).filter(|worker| worker.process == target.process && !worker.gone);
        worker.map(act)
    }

    /// Tells all to end, and waits; the processes of the fleet that did not end well.
    pub(crate) async fn finish(&self) -> Vec<String> {
        for worker in lock(&self.workers).iter_mut() {
            drop(worker.input.write_all(b"quit\n"));
        }
        let ended = || {
            let mut workers = lock(&self.workers);
            workers.iter_mut().map(|w| Some((w.process, w.child.try_wait().unwrap()?))).collect()
        };
        let ended: Vec<_> = until("all workers have ended", ended).await;
        lock(&self.workers).clear();
        let mut failed = std::mem::take(&mut *lock(&self.failed));
        let badly = ended.iter().filter(|(_, status)| !status.success());
        failed.extend(badly.map(|(process, status)| format!("worker process {process} ended with {status}")));
        failed
    }

    /// A fresh process takes each name once; whether it could.
    pub(crate) async fn once_more(&self) -> bool {
        let worker = self.spawn(0, Mode::Once);
        lock(&self.workers).push(worker);
        self.finish().await.is_empty()
    }

    pub(crate) fn stops(&self) -> Vec<Stop> {
        lock(&self.stops).clone()
    }

    pub(crate) fn started(&self) -> i32 {
        *lock(&self.started)
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        lock(&self.workers).iter_mut().for_each(end);
    }
}

fn pid(child: &Child) -> Pid {
    Pid::from_child(child)
}

/// One that has been killed meanwhile does not listen.
fn go(worker: &mut Worker) {
    drop(worker.input.write_all(b"go\n"));
}

fn end(worker: &mut Worker) {
    worker.child.kill().unwrap();
    worker.child.wait().unwrap();
}

/// Debian has it in a folder that the package's own program knows; others beside the libraries.
fn false_clock() -> Option<PathBuf> {
    let machine = std::env::consts::ARCH;
    let places = [
        format!("/usr/lib/{machine}-linux-gnu/faketime/libfaketimeMT.so.1"),
        "/usr/lib/faketime/libfaketimeMT.so.1".to_owned(),
        "/usr/lib64/faketime/libfaketimeMT.so.1".to_owned(),
        "/usr/local/lib/faketime/libfaketimeMT.so.1".to_owned(),
    ];
    places.into_iter().map(PathBuf::from).find(|place| place.is_file())
}
