//! Other processes that wait: this program again, told by its environment and its standard input what to do.
//!
//! ```text
//! queue <leases> <waiters>   queue, on and on              → ok
//! stop                       each ends what it is at       → ok
//! join                       one more queues, once         → ok, at once
//! served                     all who joined have had it    → ok
//! (end of input)             end
//! ```

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::figures::Result;
use crate::scene;
use crate::sides::{self, Crowd};

/// In whose environment this is, with the URL of a database, is such a process.
const URL: &str = "FENCEPOST_BENCH_WAITS_AT";
const LABEL: &str = "FENCEPOST_BENCH_WAITS_AS";

pub(crate) struct Process {
    child: Child,
    /// Closed, it ends.
    tell: Option<ChildStdin>,
    hear: BufReader<ChildStdout>,
}

impl Process {
    pub(crate) fn start(url: &str, label: &str) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .env(URL, url)
            .env(LABEL, label)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (tell, hear) = (child.stdin.take(), child.stdout.take().ok_or("no output")?);
        let mut process = Self { child, tell, hear: BufReader::new(hear) };
        process.hear()?;
        Ok(process)
    }

    pub(crate) fn tell(&mut self, what: &str) -> Result<()> {
        let tell = self.tell.as_mut().ok_or("it has been told to end")?;
        Ok(writeln!(tell, "{what}")?)
    }

    /// Waits until it says that it is ready.
    pub(crate) fn hear(&mut self) -> Result<()> {
        let mut line = String::new();
        self.hear.read_line(&mut line)?;
        if line == "ok\n" { Ok(()) } else { Err(format!("a process that waits says {line:?}").into()) }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.tell = None;
        if let Err(error) = self.child.wait() {
            println!("a process did not end: {error}");
        }
    }
}

/// Tells them all, then waits for all.
pub(crate) fn tell_all(processes: &mut [Process], what: &str) -> Result<()> {
    for process in &mut *processes {
        process.tell(what)?;
    }
    processes.iter_mut().try_for_each(Process::hear)
}

/// `true`: this was one of them, and has ended.
pub(crate) fn was_one() -> Result<bool> {
    let (Ok(url), Ok(label)) = (std::env::var(URL), std::env::var(LABEL)) else { return Ok(false) };
    let (told, tasks) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(std::result::Result::ok) {
            if told.send(line).is_err() {
                return;
            }
        }
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(live(&url, &label, tasks))?;
    Ok(true)
}

async fn live(url: &str, label: &str, mut told: mpsc::UnboundedReceiver<String>) -> Result<()> {
    let owner = scene::owner(url, label).await?;
    println!("ok");
    let mut running = None;
    let mut joined = JoinSet::new();
    while let Some(line) = told.recv().await {
        match line.split(' ').collect::<Vec<_>>().as_slice() {
            ["queue", leases, waiters] => {
                let crowd = Crowd::default();
                let tasks = sides::queue(&owner, leases.parse()?, waiters.parse()?, &crowd)?;
                running = Some((crowd, tasks));
            }
            ["stop"] => {
                if let Some((crowd, tasks)) = running.take() {
                    crowd.disperse(tasks).await?;
                }
            }
            ["join"] => {
                let owner = owner.clone();
                joined.spawn(async move { sides::once(&owner).await });
            }
            ["served"] => {
                while let Some(ended) = joined.join_next().await {
                    ended??;
                }
            }
            _ => return Err(format!("told {line:?}").into()),
        }
        println!("ok");
    }
    owner.shutdown().await?;
    Ok(())
}
