//! The worker processes as the controller has them: started, stopped, woken, killed, replaced.
//!
//! Signals go only to children of this process that have not been waited for, so never to a stranger.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use tokio::sync::mpsc;

use crate::checker::Stop;
use crate::controller::until;
use crate::dice::Dice;
use crate::history::now;
use crate::worker::{ASK, Ask, Mode, Orders, VARIABLE};

/// The test that a worker process runs.
pub(crate) const ENTRY: &str = "worker_process";

/// A process that a signal shall still reach: the place in the fleet and the number of its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    place: usize,
    process: i32,
}

struct Worker {
    process: i32,
    child: Child,
    input: ChildStdin,
    ttl: Duration,
    /// Somebody has it stopped, or is about to.
    taken: bool,
}

pub(crate) struct Fleet {
    workers: Mutex<Vec<Worker>>,
    dice: Mutex<Dice>,
    started: Mutex<i32>,
    stops: Mutex<Vec<Stop>>,
    /// Those that ended by themselves and not well.
    failed: Mutex<Vec<String>>,
    asks: mpsc::UnboundedSender<(Target, Ask)>,
    url: String,
    folder: PathBuf,
    names: Vec<String>,
    mode: Mode,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Fleet {
    /// Its workers' requests to be stopped come through `asks`.
    pub(crate) fn new(
        seed: u64,
        url: String,
        folder: PathBuf,
        names: Vec<String>,
        asks: mpsc::UnboundedSender<(Target, Ask)>,
        mode: Mode,
    ) -> Self {
        let (workers, started, stops) = (Mutex::default(), Mutex::new(0), Mutex::default());
        let (dice, failed) = (Mutex::new(Dice::new(seed)), Mutex::default());
        Self { workers, dice, started, stops, failed, asks, url, folder, names, mode }
    }

    pub(crate) fn start(&self, count: usize) {
        for place in 0..count {
            let worker = self.spawn(place, self.mode);
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
            let (least, most) = if self.mode == Mode::Wait { (500, 1_000) } else { (50, 150) };
            (dice.next(), Duration::from_millis(dice.between(least, most)))
        };
        let orders = Orders {
            process,
            url: self.url.clone(),
            history: self.folder.join(format!("{process:04}.jsonl")),
            ttl,
            seed,
            names: self.names.clone(),
            mode,
        };
        let mut child = Command::new(std::env::current_exe().unwrap())
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
        Worker { process, child, input, ttl, taken: false }
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
            let stop = Stop { process: worker.process, stood, woken: now(), ttl: worker.ttl };
            kill_process(pid(&worker.child), Signal::CONT).unwrap();
            stop
        });
        lock(&self.stops).extend(stop);
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
        });
        if ended.is_some() {
            let fresh = self.spawn(target.place, self.mode);
            lock(&self.workers)[target.place] = fresh;
        }
    }

    fn with<T>(&self, target: Target, act: impl FnOnce(&mut Worker) -> T) -> Option<T> {
        let mut workers = lock(&self.workers);
        let worker = workers.get_mut(target.place).filter(|worker| worker.process == target.process);
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
