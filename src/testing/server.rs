//! A private server: made from a cached cluster, owned by a watchdog.

use std::{
    collections::hash_map::DefaultHasher,
    env,
    fmt::Write as _,
    fs::{self, OpenOptions},
    hash::{Hash, Hasher},
    io::Write as _,
    net::TcpListener,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use sqlx::postgres::{PgConnectOptions, PgSslMode};
use tokio::sync::OnceCell;
use uuid::Uuid;

use super::{
    StartError, locate,
    process::{Identity, poll, processes},
    watchdog::Watchdog,
};

/// On a machine that does ten other things at once, too.
const LIMIT: Duration = Duration::from_mins(1);

/// A socket's path is limited to about 100 bytes (104 on macOS, 108 on Linux).
const LONGEST_SOCKET: usize = 100;

/// Cleaners of temp folders remove single files that are some days old; a cluster that lacks a file is worse
/// than none.
const CACHED_FOR: Duration = Duration::from_hours(24);

/// How the name of a cached cluster begins.
const CLUSTER: &str = "fencepost-cluster";

/// Linux keeps what lies here in memory.
const MEMORY: &str = "/dev/shm";

/// Room for a few servers with some hundred databases, 8 MB each.
const MEMORY_NEEDED_KIB: u64 = 2 * 1024 * 1024;

const ALWAYS: [(&str, &str); 5] = [
    ("max_connections", "200"),
    ("timezone", "UTC"),
    ("log_timezone", "UTC"),
    ("log_line_prefix", "%m [%p] %q%a "),
    ("max_wal_size", "64MB"),
];

const FAST: [(&str, &str); 4] =
    [("fsync", "off"), ("full_page_writes", "off"), ("synchronous_commit", "off"), ("wal_init_zero", "off")];

/// How a [`Server`] is to be.
///
/// ```
/// use fencepost::testing::Server;
///
/// let server = Server::builder().durable().setting("max_connections", "20").start()?;
/// # Ok::<(), fencepost::testing::StartError>(())
/// ```
#[derive(Debug, Clone, Default)]
#[must_use = "`start` starts the server"]
pub struct ServerBuilder {
    durable: bool,
    tcp: bool,
    settings: Vec<(String, String)>,
}

impl ServerBuilder {
    /// Keeps Postgres' own settings for durability, on a real file system: for measuring, and for what a
    /// power cut would leave.
    ///
    /// Without it, `fsync`, `full_page_writes` and `synchronous_commit` are off, and even a server that only
    /// [crashes](Server::crash) loses commits it had acknowledged. For a test of such crashes,
    /// `.setting("synchronous_commit", "on")` is enough, and restarts much faster: the operating system keeps
    /// what was written to it.
    pub fn durable(mut self) -> Self {
        self.durable = true;
        self
    }

    /// Listens on 127.0.0.1 too, on a free port; [`Server::options`] and [`Server::url`] then use it.
    ///
    /// While it runs, every user of this machine can log in as superuser, which includes running programs
    /// as the server's user. Without it, only processes of that user and root reach the server.
    pub fn tcp(mut self) -> Self {
        self.tcp = true;
        self
    }

    /// Sets a server parameter; the last one of a name counts.
    ///
    /// Where the server listens is not for this: `port`, `listen_addresses` and `unix_socket_directories`
    /// are overridden.
    pub fn setting(mut self, name: &str, value: &str) -> Self {
        self.settings.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Starts the server and returns when it accepts connections.
    ///
    /// Blocks the thread: 0.1 to 0.2 s as a rule, about 0.6 s for the first server of a day, and for as long
    /// as the download takes when the binaries have to be fetched.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn start(self) -> Result<Server, StartError> {
        let identity = Identity::current()?;
        let bin = locate::bin_dir(identity)?;
        match self.attempt(&bin, identity, true) {
            // A cached cluster can be damaged, and another process can take the port between our look and the
            // server's.
            Err(StartError::Server { .. }) => self.attempt(&bin, identity, false),
            result => result,
        }
    }

    fn attempt(&self, bin: &Path, identity: Identity, from_cache: bool) -> Result<Server, StartError> {
        let (root, cached, watchdog) = make_folder(&self.bases(), bin, identity)?;
        let server = Server {
            data: root.join("data"),
            root,
            bin: bin.to_owned(),
            port: if self.tcp { free_port()? } else { 5432 },
            tcp: self.tcp,
            durable: self.durable,
            identity,
            state: Mutex::new(State { watchdog, postmaster: None }),
            template: OnceCell::new(),
        };
        server.make_cluster(&cached, from_cache)?;
        server.configure(self)?;
        server.launch(&mut server.state())?;
        Ok(server)
    }

    /// Where the server's folder may lie, best first.
    fn bases(&self) -> Vec<PathBuf> {
        let mut bases = Vec::new();
        // In memory a database is made five times as fast. A durable server belongs on a real file system.
        if !self.durable && env::var_os("TMPDIR").is_none() && has_room_in_memory() {
            bases.push(PathBuf::from(MEMORY));
        }
        // The folder of the environment may be closed to the server's user, or too long for a socket.
        bases.extend([env::temp_dir(), PathBuf::from("/tmp")]);
        bases
    }
}

/// A Postgres server started by this process and private to it.
///
/// Its superuser is `postgres`, without a password; it listens on a Unix socket in a folder that only its
/// user can enter. It ends with the process, however that ends. Any number can run at once.
///
/// The methods that start, stop and freeze it block the thread until it is done.
///
/// # Drop
/// The server is stopped at once, its open connections break, its folder is removed; when drop returns, both
/// are gone. The same happens, without drop, within a moment of the end of this process.
///
/// # Examples
/// ```
/// use fencepost::testing::Server;
/// use sqlx::{ConnectOptions, Connection};
///
/// # #[tokio::main]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let server = Server::start()?;
/// let mut connection = server.options().connect().await?;
/// server.crash()?;
/// assert!(connection.ping().await.is_err());
/// server.restart()?;
/// server.options().connect().await?.ping().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Server {
    root: PathBuf,
    data: PathBuf,
    bin: PathBuf,
    port: u16,
    tcp: bool,
    durable: bool,
    identity: Identity,
    state: Mutex<State>,
    /// The template of [`TestDatabase`](super::TestDatabase), once made.
    pub(super) template: OnceCell<String>,
}

#[derive(Debug)]
struct State {
    watchdog: Watchdog,
    /// `None` while it is stopped.
    postmaster: Option<u32>,
}

impl Server {
    /// Starts a server with settings for speed, and returns when it accepts connections.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn start() -> Result<Self, StartError> {
        Self::builder().start()
    }

    /// A server with other settings.
    pub fn builder() -> ServerBuilder {
        ServerBuilder::default()
    }

    /// Options that connect to the database `postgres` as the superuser `postgres`.
    #[must_use]
    pub fn options(&self) -> PgConnectOptions {
        let options = PgConnectOptions::new_without_pgpass()
            .port(self.port)
            .username("postgres")
            .database("postgres")
            .ssl_mode(PgSslMode::Disable);
        if self.tcp { options.host("127.0.0.1") } else { options.socket(&self.root) }
    }

    /// The same as [`options`](Self::options) as a URL, which `psql` and other drivers understand, too.
    #[must_use]
    pub fn url(&self) -> String {
        let host = if self.tcp { "127.0.0.1".to_owned() } else { percent_encoded(&self.root) };
        format!("postgres://postgres@{host}:{}/postgres", self.port)
    }

    /// The port: that of TCP, or the one in the socket's name.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The folder of the Unix socket.
    #[must_use]
    pub fn socket_dir(&self) -> &Path {
        &self.root
    }

    /// The data directory.
    #[must_use]
    pub fn data_dir(&self) -> &Path {
        &self.data
    }

    /// The folder of the binaries, for tools such as `psql` and `pg_basebackup` where they exist.
    #[must_use]
    pub fn bin_dir(&self) -> &Path {
        &self.bin
    }

    /// User and group the server runs as, when that is not this process's user, because it is root.
    #[must_use]
    pub fn run_as(&self) -> Option<(u32, u32)> {
        self.identity.server.map(|user| (user.uid, user.gid))
    }

    /// Stops the server as a crash would: no checkpoint, no word to clients. Returns when it is gone.
    ///
    /// Nothing happens when it is stopped already.
    ///
    /// # Errors
    /// [`StartError::Server`] when it does not end in time.
    pub fn crash(&self) -> Result<(), StartError> {
        self.halt(&mut self.state(), "QUIT")
    }

    /// Stops the server in good order, but ends its sessions: a *fast* shutdown. Returns when it is gone.
    ///
    /// Nothing happens when it is stopped already.
    ///
    /// # Errors
    /// [`StartError::Server`] when it does not end in time.
    pub fn stop_fast(&self) -> Result<(), StartError> {
        self.halt(&mut self.state(), "INT")
    }

    /// Starts the server again on the same data, socket and port, and returns when it accepts connections.
    ///
    /// One that runs is stopped before, as by [`stop_fast`](Self::stop_fast).
    ///
    /// # Errors
    /// [`StartError::Server`] when it does not start.
    pub fn restart(&self) -> Result<(), StartError> {
        let mut state = self.state();
        self.halt(&mut state, "INT")?;
        self.launch(&mut state)
    }

    /// Freezes the server with all its sessions: it neither answers nor breaks a connection, as in a stalled
    /// virtual machine. Returns when all of it stands still.
    ///
    /// # Errors
    /// [`StartError::Server`] when the server is stopped.
    pub fn pause(&self) -> Result<(), StartError> {
        const DOING: &str = "pausing";
        let mut state = self.state();
        let postmaster =
            state.postmaster.ok_or_else(|| self.failure(DOING, "the server is stopped".to_owned()))?;
        // First the postmaster, so that no new session starts behind our back.
        for only_postmaster in [true, false] {
            let still = poll(LIMIT, || {
                let running: Vec<String> = processes()
                    .into_iter()
                    .filter(|process| {
                        process.pid == postmaster || (!only_postmaster && process.parent == postmaster)
                    })
                    .filter(|process| !matches!(process.state, 'T' | 't' | 'Z'))
                    .map(|process| process.pid.to_string())
                    .collect();
                if running.is_empty() {
                    return Some(Ok(()));
                }
                let told = state.watchdog.ask(&format!("pause {}", running.join(" ")), LIMIT);
                told.err().map(Err)
            });
            still
                .unwrap_or_else(|| Err("it did not stand still".to_owned()))
                .map_err(|problem| self.failure(DOING, problem))?;
        }
        Ok(())
    }

    /// Lets a paused server go on.
    ///
    /// # Errors
    /// [`StartError::Server`] when the server is stopped.
    pub fn resume(&self) -> Result<(), StartError> {
        self.state().watchdog.ask("resume", LIMIT).map_err(|problem| self.failure("resuming", problem))?;
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What to add to `CREATE DATABASE`.
    ///
    /// Copying files takes a checkpoint and a third of the time; with `fsync` on, that checkpoint is slow.
    /// Before version 15 there was no other way, and no word for it.
    pub(super) fn copy_strategy(&self) -> &'static str {
        let version = fs::read_to_string(self.data.join("PG_VERSION")).unwrap_or_default();
        let version: u32 = version.trim().parse().unwrap_or(0);
        if !self.durable && version >= 15 { " STRATEGY file_copy" } else { "" }
    }

    fn make_cluster(&self, cached: &Path, from_cache: bool) -> Result<(), StartError> {
        let uid = self.identity.server_uid();
        let mut state = self.state();
        if from_cache && is_cluster(cached, uid) && state.watchdog.ask("copy", LIMIT).is_ok() {
            return Ok(());
        }
        // A copy that failed half-way; the server's user owns it, and we may be another.
        let made = match fs::remove_dir_all(&self.data) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.to_string()),
            _ => state.watchdog.ask("initdb", LIMIT),
        };
        made.map_err(|problem| self.failure("initdb", problem))?;
        // The cache saves time: that it cannot be filled is no failure.
        if state.watchdog.ask("save", LIMIT).is_ok() {
            for old in outdated(cached, uid) {
                ignore(fs::rename(&old, self.root.join(old.file_name().unwrap_or_default())));
            }
            // Fails when another process was faster, whose cluster is as good.
            ignore(fs::rename(self.root.join("template"), cached));
        }
        Ok(())
    }

    fn configure(&self, builder: &ServerBuilder) -> Result<(), StartError> {
        let path = self.data.join("postgresql.conf");
        let fast: &[(&str, &str)] = if builder.durable { &[] } else { &FAST };
        let given = builder.settings.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let port = self.port.to_string();
        let folder = self.root.to_string_lossy();
        let addresses = [
            ("listen_addresses", if self.tcp { "127.0.0.1" } else { "" }),
            ("port", port.as_str()),
            ("unix_socket_directories", folder.as_ref()),
        ];
        let mut text = String::from("\n");
        for (name, value) in ALWAYS.iter().chain(fast).copied().chain(given).chain(addresses) {
            let value = value.replace('\\', r"\\").replace('\'', "''").replace('\n', r"\n");
            writeln!(text, "{name} = '{value}'").unwrap_or_default();
        }
        let file = OpenOptions::new().append(true).open(&path);
        file.and_then(|mut file| file.write_all(text.as_bytes()))
            .map_err(|error| StartError::io("writing", path, error))
    }

    fn launch(&self, state: &mut State) -> Result<(), StartError> {
        const DOING: &str = "starting";
        let pid = state.watchdog.ask("start", LIMIT).map_err(|problem| self.failure(DOING, problem))?;
        let number: Option<u32> = pid.parse().ok();
        state.postmaster = number;
        let pid_file = self.data.join("postmaster.pid");
        let mut asked = 0_u32;
        let ready = poll(LIMIT, || {
            // A file of a server before has another number in its first line.
            let text = fs::read_to_string(&pid_file).unwrap_or_default();
            let mut lines = text.lines();
            if lines.next() == Some(&pid) && lines.nth(6).map(str::trim) == Some("ready") {
                return Some(Ok(()));
            }
            asked += 1;
            let look = asked.is_multiple_of(25);
            let ended =
                look && !processes().iter().any(|found| Some(found.pid) == number && found.state != 'Z');
            ended.then(|| Err("it ended".to_owned()))
        });
        ready.unwrap_or_else(|| Err(format!("not ready within {LIMIT:?}"))).map_err(|problem| {
            let failure = self.failure(DOING, problem);
            // It must not come up later, unasked.
            if let Err(error) = self.halt(state, "TERM QUIT") {
                tracing::warn!(%error, "a server that did not start was not stopped either");
            }
            failure
        })
    }

    fn halt(&self, state: &mut State, signals: &str) -> Result<(), StartError> {
        if state.postmaster.is_some() {
            let done = state.watchdog.ask(&format!("halt {signals}"), LIMIT);
            done.map_err(|problem| self.failure("stopping", problem))?;
            state.postmaster = None;
        }
        Ok(())
    }

    fn failure(&self, doing: &'static str, problem: String) -> StartError {
        let log = fs::read(self.root.join("log")).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        let end = lines.get(lines.len().saturating_sub(20)..).unwrap_or_default().join("\n");
        StartError::Server { doing, problem, log: end }
    }
}

/// A new folder with its watchdog, and the place of the cached cluster next to it.
fn make_folder(
    bases: &[PathBuf],
    bin: &Path,
    identity: Identity,
) -> Result<(PathBuf, PathBuf, Watchdog), StartError> {
    let mut problems = String::new();
    for base in bases {
        let id = Uuid::new_v4().simple().to_string();
        let root = base.join(format!("fencepost-{}", id.get(..12).unwrap_or(&id)));
        if root.join(".s.PGSQL.32767").as_os_str().len() > LONGEST_SOCKET {
            continue;
        }
        let cached = base.join(cluster_name(bin, identity));
        match Watchdog::spawn(&root, bin, &cached, identity) {
            Ok(watchdog) => return Ok((root, cached, watchdog)),
            Err(problem) => writeln!(problems, "{problem}").unwrap_or_default(),
        }
    }
    Err(StartError::Server { doing: "making a folder", problem: problems, log: String::new() })
}

/// A container's `/dev/shm` is small as a rule, and a small machine's memory is not ours to fill.
fn has_room_in_memory() -> bool {
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let available = memory.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let space = Command::new("df").args(["-Pk", MEMORY]).stdin(Stdio::null()).output();
    let space = space.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let space = space.lines().nth(1).and_then(|line| line.split_whitespace().nth(3));
    let kib =
        |text: Option<&str>| text.and_then(|text| text.split_whitespace().next()?.parse().ok()).unwrap_or(0);
    kib(available).min(kib(space)) >= MEMORY_NEEDED_KIB
}

/// A name that differs where a cluster cannot be shared: another build of the server, another owner.
fn cluster_name(bin: &Path, identity: Identity) -> String {
    let mut hasher = DefaultHasher::new();
    let postgres = bin.join("postgres");
    postgres.hash(&mut hasher);
    if let Ok(found) = fs::metadata(&postgres) {
        (found.len(), found.mtime(), found.ino()).hash(&mut hasher);
    }
    env!("CARGO_PKG_VERSION").hash(&mut hasher);
    format!("{CLUSTER}-{}-{:016x}", identity.server_uid(), hasher.finish())
}

/// In a shared temp folder, somebody else could have put something under the name.
fn is_own_folder(path: &Path, uid: u32) -> bool {
    fs::symlink_metadata(path)
        .is_ok_and(|found| found.is_dir() && found.uid() == uid && found.mode() & 0o777 == 0o700)
}

fn is_cluster(path: &Path, uid: u32) -> bool {
    let age = fs::symlink_metadata(path).and_then(|found| found.modified()).map(|time| time.elapsed());
    is_own_folder(path, uid) && matches!(age, Ok(Ok(age)) if age < CACHED_FOR)
}

/// The cluster that is to be replaced, and others that nobody has made anew for a day.
fn outdated(cached: &Path, uid: u32) -> Vec<PathBuf> {
    let start = format!("{CLUSTER}-{uid}-");
    let entries = cached.parent().and_then(|base| fs::read_dir(base).ok()).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(&start))
        .map(|entry| entry.path())
        .filter(|path| is_own_folder(path, uid) && (path == cached || !is_cluster(path, uid)))
        .collect()
}

fn ignore<T, E: std::fmt::Display>(result: Result<T, E>) {
    if let Err(error) = result {
        tracing::debug!(%error, "the cached cluster was not replaced");
    }
}

/// Below the range from which the system takes the ports of outgoing connections, so that none of them sits
/// on it when the server restarts.
fn free_port() -> Result<u16, StartError> {
    let mut last = None;
    for _ in 0..50 {
        let [high, low, ..] = Uuid::new_v4().into_bytes();
        let port = 20_000 + u16::from_be_bytes([high, low]) % 12_000;
        match TcpListener::bind(("127.0.0.1", port)) {
            Ok(_) => return Ok(port),
            Err(error) => last = Some(error),
        }
    }
    let error = last.unwrap_or_else(|| std::io::ErrorKind::AddrInUse.into());
    Err(StartError::io("looking for a free port on", "127.0.0.1", error))
}

fn percent_encoded(path: &Path) -> String {
    let mut text = String::new();
    for byte in path.as_os_str().as_bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_') {
            text.push(char::from(*byte));
        } else {
            write!(text, "%{byte:02X}").unwrap_or_default();
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_folder_in_a_url_is_percent_encoded() {
        assert_eq!(percent_encoded(Path::new("/tmp/a b")), "%2Ftmp%2Fa%20b");
    }
}
