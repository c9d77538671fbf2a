//! What the operating system knows: who we are, which processes run, and waiting with a deadline.

use std::{
    fs,
    os::unix::{fs::MetadataExt, process::CommandExt},
    process::{Command, Stdio},
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

use super::StartError;

/// A user and a group, by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct User {
    pub(super) uid: u32,
    pub(super) gid: u32,
}

/// Whom this process runs as, and whom a server has to run as.
#[derive(Debug, Clone, Copy)]
pub(super) struct Identity {
    pub(super) own_uid: u32,
    /// Set when this process is root: Postgres refuses to run as root.
    pub(super) server: Option<User>,
}

impl Identity {
    pub(super) fn current() -> Result<Self, StartError> {
        static OWN: OnceLock<u32> = OnceLock::new();
        // The standard library has no `geteuid`, and the owner of `/proc/self` is not always it.
        let own_uid = *OWN.get_or_init(|| ask_own_uid().unwrap_or(u32::MAX));
        let server = if own_uid == 0 { Some(server_user().ok_or(StartError::NoServerUser)?) } else { None };
        Ok(Self { own_uid, server })
    }

    /// The owner of the server's files.
    pub(super) fn server_uid(self) -> u32 {
        self.server.map_or(self.own_uid, |user| user.uid)
    }

    /// Lets a command run as the server's user.
    pub(super) fn apply(self, command: &mut Command) -> &mut Command {
        if let Some(user) = self.server {
            command.uid(user.uid).gid(user.gid);
        }
        command
    }
}

fn ask_own_uid() -> Option<u32> {
    let output = Command::new("id").arg("-u").stdin(Stdio::null()).output();
    let uid = output.ok().and_then(|output| String::from_utf8_lossy(&output.stdout).trim().parse().ok());
    uid.or_else(|| fs::metadata("/proc/self").map(|found| found.uid()).ok())
}

fn server_user() -> Option<User> {
    let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
    ["postgres", "nobody"].iter().find_map(|name| user_in(&passwd, name))
}

fn user_in(passwd: &str, name: &str) -> Option<User> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        if fields.next() != Some(name) {
            return None;
        }
        let uid = fields.nth(1)?.parse().ok()?;
        let gid = fields.next()?.parse().ok()?;
        // A user `nobody` with number 0 would be root again.
        (uid != 0).then_some(User { uid, gid })
    })
}

/// A line of the process table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Process {
    pub(super) pid: u32,
    pub(super) parent: u32,
    /// As `ps` writes it: `T` is stopped, `Z` has ended.
    pub(super) state: char,
}

/// All processes of this machine.
pub(super) fn processes() -> Vec<Process> {
    // `/proc` first: slim Linux images have no `ps`.
    let from_proc: Vec<Process> = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(|c: char| c.is_ascii_digit()))
        .filter_map(|entry| fs::read_to_string(entry.path().join("stat")).ok())
        .filter_map(|stat| parse_stat(&stat))
        .collect();
    if !from_proc.is_empty() {
        return from_proc;
    }
    let output = Command::new("ps")
        .args(["-A", "-o", "pid=", "-o", "ppid=", "-o", "state="])
        .stdin(Stdio::null())
        .output()
        .map(|output| output.stdout)
        .unwrap_or_default();
    String::from_utf8_lossy(&output).lines().filter_map(parse_ps).collect()
}

fn parse_stat(stat: &str) -> Option<Process> {
    // `pid (name) state ppid …`: the name may hold spaces and parentheses, so what follows the last one counts.
    let pid = stat.split(' ').next()?.parse().ok()?;
    let mut rest = stat.rsplit_once(") ")?.1.split(' ');
    let state = rest.next()?.chars().next()?;
    let parent = rest.next()?.parse().ok()?;
    Some(Process { pid, parent, state })
}

fn parse_ps(line: &str) -> Option<Process> {
    let mut fields = line.split_whitespace();
    let pid = fields.next()?.parse().ok()?;
    let parent = fields.next()?.parse().ok()?;
    let state = fields.next()?.chars().next()?;
    Some(Process { pid, parent, state })
}

/// Asks every 2 ms until there is an answer or the time is over.
pub(super) fn poll<T>(limit: Duration, mut ask: impl FnMut() -> Option<T>) -> Option<T> {
    let start = now();
    loop {
        if let Some(answer) = ask() {
            return Some(answer);
        }
        if start.elapsed() > limit {
            return None;
        }
        thread::sleep(Duration::from_millis(2));
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "a deadline for a local process; decides nothing about locks, and this module must not depend on the crate's clock"
)]
fn now() -> Instant {
    Instant::now()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_name_may_hold_anything() {
        let expected = Process { pid: 7, parent: 3, state: 'T' };
        assert_eq!(parse_stat("7 (a) b (c) T 3 7 7 0"), Some(expected));
        assert_eq!(parse_ps("    7     3 T+"), Some(expected));
        assert_eq!(parse_stat(""), None);
    }

    #[test]
    fn the_server_never_runs_as_root() {
        let passwd =
            "root:x:0:0::/root:/bin/sh\npostgresx:x:5:5::/:\npostgres:x:101:104:,,,:/:\nnobody:x:0:0::/:";
        assert_eq!(user_in(passwd, "postgres"), Some(User { uid: 101, gid: 104 }));
        assert_eq!(user_in(passwd, "nobody"), None);
    }
}
