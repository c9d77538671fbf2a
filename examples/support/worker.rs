//! A worker process of an example: the example runs itself again, tells it what to do by lines on its stdin,
//! and hears what it did by lines on its stdout.

use std::error::Error;
use std::fmt::Display;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use fencepost::testing::TestDatabase;
use sqlx::PgPool;

pub(crate) type Result<T = (), E = Box<dyn Error>> = std::result::Result<T, E>;

/// The longest that any step may take, on a busy machine too.
pub(crate) const DEADLINE: Duration = Duration::from_mins(1);

// ---- In the worker. ---------------------------------------------------------------------------------

/// A worker that is paused, or waits, cannot notice that its parent was killed: the kernel shall end it.
pub(crate) fn end_with_parent() -> Result {
    #[cfg(target_os = "linux")]
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    Ok(())
}

pub(crate) fn say(what: &str, value: impl Display) {
    println!("{what} {value}");
}

/// Blocks this thread. What is held stays held: the heartbeat has a thread of its own.
pub(crate) fn wait_for_a_line() -> Result {
    match std::io::stdin().read_line(&mut String::new())? {
        0 => Err("the storyteller is gone".into()),
        _ => Ok(()),
    }
}

// ---- In the storyteller. ----------------------------------------------------------------------------

/// A child process. It is killed, paused or not, when this value goes.
pub(crate) struct Worker {
    pub(crate) name: &'static str,
    pub(crate) child: Child,
    orders: ChildStdin,
    says: Receiver<String>,
}

impl Worker {
    /// Runs this program again, as `worker name args…`. Its owner's label is to be its name.
    pub(crate) fn start(database: &TestDatabase, name: &'static str, args: &[&str]) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["worker", name])
            .args(args)
            .env("DATABASE_URL", database.url())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (Some(orders), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("a worker without pipes".into());
        };
        let (heard, says) = channel();
        // A thread, so that `hear` can give up on a worker that says nothing.
        std::thread::spawn(move || {
            BufReader::new(output)
                .lines()
                .map_while(std::result::Result::ok)
                .try_for_each(|line| heard.send(line))
        });
        Ok(Self { name, child, orders, says })
    }

    pub(crate) fn tell(&mut self, order: &str) -> Result {
        writeln!(self.orders, "{order}").map_err(|error| format!("{} is gone: {error}", self.name).into())
    }

    /// What the worker says next, which has to be about `what`.
    pub(crate) fn hear(&mut self, what: &str) -> Result<String> {
        let line =
            self.says.recv_timeout(DEADLINE).map_err(|_| format!("{} did not say {what}", self.name))?;
        match line.split_once(' ') {
            Some((word, value)) if word == what => Ok(value.to_owned()),
            _ => Err(format!("{} said {line:?}, not {what}", self.name).into()),
        }
    }

    /// Returns when the database has not heard from it for its ttl.
    pub(crate) async fn until_expired(&self, pool: &PgPool) -> Result {
        let query = "SELECT bool_and(expires_at <= clock_timestamp()) FROM fencepost.owners WHERE label = $1";
        let expired = async {
            while !sqlx::query_scalar::<_, bool>(query).bind(self.name).fetch_one(pool).await? {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            Ok(())
        };
        tokio::time::timeout(DEADLINE, expired).await?
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Both do nothing to a child that has been waited for.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

pub(crate) fn ensure(is_true: bool, claim: &str) -> Result {
    if is_true { Ok(()) } else { Err(format!("not true: {claim}").into()) }
}
