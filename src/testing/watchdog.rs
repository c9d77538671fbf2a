//! The shell that owns a server: it starts and stops it, and cleans up when we are gone, however we went.
//!
//! Its standard input is a pipe from us, and only we hold the other end. When the pipe ends, because the
//! server was dropped or this process exited, panicked or was killed, the shell stops the postmaster and
//! removes the folder. A parent-death signal would not do: it fires when the *thread* that started the
//! server ends, as every test's thread does.
//!
//! The shell does all the work on the folder, the making of it included, one command after the other, so
//! that nothing else still runs when the end of the pipe is read.

use std::{
    env,
    io::{BufRead, BufReader, Write},
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread,
    time::Duration,
};

use super::process::{Identity, poll};

/// Longer than the 5 s after which a postmaster kills children that ignore an immediate stop.
const STOP_LIMIT: Duration = Duration::from_secs(20);

const SCRIPT: &str = r#"
dir=$1 bin=$2 cached=$3
pid= stopped=

# Signals the postmaster and waits for its end. It is our child: its number cannot be taken by another
# process before the wait. Frozen processes first have to go on to see the signal.
halt() {
    [ -n "$pid" ] || return 0
    for signal in "$@"; do kill -"$signal" "$pid"; done
    kill -CONT "$pid" $stopped
    wait "$pid"
    pid= stopped=
    return 0
}

finish() {
    trap '' HUP INT TERM
    # TERM as well: a shell's background job ignores QUIT until postgres has set its own handlers.
    halt TERM QUIT
    tries=0
    while [ -e "$dir" ] && [ $tries -lt 100 ]; do rm -rf "$dir"; tries=$((tries + 1)); done
    exit 0
}

start() {
    rm -f "$dir/forked"
    { : >"$dir/forked"; exec "$bin/postgres" -D "$dir/data" >&2; } </dev/null &
    pid=$!
    # Until the fork has dropped our traps, it would swallow a TERM.
    spins=0
    until [ -e "$dir/forked" ] || [ $spins -ge 200000 ]; do spins=$((spins + 1)); done
}

umask 077
# Answering a process that is gone must not end us before the clean-up.
trap '' PIPE
# HUP comes to a group that holds a frozen process when its parent dies.
trap finish HUP INT TERM
problem=$(mkdir "$dir" 2>&1) || { echo "failed $problem"; exit 1; }
exec 2>>"$dir/log"
echo ok

while read -r command words; do
    case $command in
        initdb)
            "$bin/initdb" -D "$dir/data" -U postgres -A trust -E UTF8 --locale=C --no-sync --wal-segsize=1 \
                </dev/null >&2 ;;
        copy) cp -Rp "$cached" "$dir/data" ;;
        save) cp -Rp "$dir/data" "$dir/template" ;;
        start) start ;;
        halt) halt $words ;;
        pause) stopped="$stopped $words"; kill -STOP $words; true ;;
        resume) kill -CONT $stopped; stopped= ;;
    esac && echo "ok $pid" || echo "failed $command"
done
finish
"#;

/// For a watchdog that was killed itself, so that its postmaster and folder are left.
const LAST_RESORT: &str = r#"
if read -r pid <"$1/data/postmaster.pid"; then
    kill -QUIT "$pid"; kill -CONT "$pid"
    tries=0
    while kill -0 "$pid" && [ $tries -lt 5 ]; do sleep 1; tries=$((tries + 1)); done
fi
rm -rf "$1"
"#;

/// A running shell.
#[derive(Debug)]
pub(super) struct Watchdog {
    shell: Child,
    commands: Option<ChildStdin>,
    replies: Receiver<String>,
    folder: Box<Path>,
    identity: Identity,
}

impl Watchdog {
    /// Starts the shell, which makes `folder`; an error says why it could not.
    pub(super) fn spawn(
        folder: &Path,
        bin: &Path,
        cached: &Path,
        identity: Identity,
    ) -> Result<Self, String> {
        let mut command = shell(SCRIPT, identity);
        command.arg(folder).arg(bin).arg(cached);
        let mut shell = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("/bin/sh: {error}"))?;
        let commands = shell.stdin.take();
        let (sender, replies) = mpsc::channel();
        if let Some(stdout) = shell.stdout.take() {
            // Reading has no time limit of its own; a channel has. The thread ends with the shell.
            thread::spawn(move || {
                for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                    if sender.send(line).is_err() {
                        break;
                    }
                }
            });
        }
        let mut watchdog = Self { shell, commands, replies, folder: folder.into(), identity };
        watchdog.reply(Duration::from_secs(30))?;
        Ok(watchdog)
    }

    /// Sends a command and waits for its end.
    pub(super) fn ask(&mut self, command: &str, limit: Duration) -> Result<String, String> {
        let pipe = self.commands.as_mut().ok_or("the watchdog was closed")?;
        pipe.write_all(format!("{command}\n").as_bytes())
            .map_err(|error| format!("the watchdog is gone: {error}"))?;
        self.reply(limit)
    }

    fn reply(&mut self, limit: Duration) -> Result<String, String> {
        match self.replies.recv_timeout(limit) {
            Ok(line) => match line.strip_prefix("ok") {
                Some(answer) => Ok(answer.trim().to_owned()),
                None => Err(line),
            },
            Err(RecvTimeoutError::Disconnected) => Err("the watchdog is gone".to_owned()),
            Err(RecvTimeoutError::Timeout) => {
                // A late reply would be taken for that of the next command.
                self.commands = None;
                Err(format!("no answer within {limit:?}"))
            }
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.commands = None;
        let ended = poll(STOP_LIMIT, || self.shell.try_wait().ok().flatten());
        // A shell that still waits for its postmaster goes on after us; one that was killed left everything.
        if ended.is_some() && self.folder.exists() {
            let mut command = shell(LAST_RESORT, self.identity);
            if let Err(error) = command.arg(&*self.folder).stdin(Stdio::null()).output() {
                tracing::warn!(%error, folder = %self.folder.display(), "a test server was left behind");
            }
        }
    }
}

fn shell(script: &str, identity: Identity) -> Command {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", script, "fencepost-watchdog"]);
    // Not the caller's folder, which the server's user may not be allowed to enter.
    command.current_dir("/");
    // A group of its own: Ctrl-C at the terminal ends us, and the watchdog then cleans up in peace.
    command.process_group(0);
    command.stderr(Stdio::null());
    // The caller's defaults for clients would change what initdb and postgres do.
    for (name, _) in env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("PG")) {
        command.env_remove(name);
    }
    command.env("LC_ALL", "C").env_remove("LANGUAGE");
    identity.apply(&mut command);
    command
}
