//! A PgBouncer in front of a server of ours.

use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use fencepost::testing::Server;
use sqlx::Connection as _;
use sqlx::postgres::{PgConnectOptions, PgSslMode};
use tokio::time::{sleep, timeout};

pub(crate) struct PgBouncer {
    child: Child,
    folder: PathBuf,
    options: PgConnectOptions,
}

impl PgBouncer {
    /// In front of the server, where everybody is `user`; or none, said loudly, where it is not installed.
    pub(crate) async fn before(server: &Server, mode: &str, pool_size: u32, user: &str) -> Option<Self> {
        let program = std::env::var_os("PATH")
            .iter()
            .flat_map(std::env::split_paths)
            .chain(["/usr/sbin".into()])
            .map(|folder| folder.join("pgbouncer"))
            .find(|path| path.is_file());
        let Some(program) = program else {
            eprintln!(
                "SKIPPED: pgbouncer is not installed, so nothing was checked behind a transaction-mode pooler"
            );
            return None;
        };
        let folder = server.socket_dir().join(format!("pgbouncer-{mode}-{pool_size}"));
        std::fs::create_dir(&folder).unwrap();
        // A port of the system's choice may be taken again before PgBouncer has it: its socket cannot.
        let config = format!(
            "[databases]\npostgres = host={} port={} user={user}\n\
             [pgbouncer]\nlisten_addr =\nlisten_port = 6432\nunix_socket_dir = {}\nauth_type = any\n\
             pool_mode = {mode}\ndefault_pool_size = {pool_size}\nmax_client_conn = 100\n\
             ignore_startup_parameters = extra_float_digits\nlogfile = {}/log\n",
            server.socket_dir().display(),
            server.port(),
            folder.display(),
            folder.display(),
        );
        std::fs::write(folder.join("ini"), config).unwrap();
        let mut command = Command::new(program);
        command
            .arg("-q")
            .arg(folder.join("ini"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        if let Some((user, group)) = server.run_as() {
            // It refuses to run as root, like the server.
            std::os::unix::fs::chown(&folder, Some(user), Some(group)).unwrap();
            command.uid(user).gid(group);
        }
        let child = command.spawn().unwrap();
        let options = PgConnectOptions::new_without_pgpass()
            .socket(&folder)
            .port(6432)
            .ssl_mode(PgSslMode::Disable)
            .username(user)
            .database("postgres");
        let mut started = Self { child, folder, options };
        let answers = async {
            while sqlx::PgConnection::connect_with(&started.options).await.is_err() {
                assert!(
                    started.child.try_wait().unwrap().is_none(),
                    "{}",
                    std::fs::read_to_string(started.folder.join("log")).unwrap_or_default()
                );
                sleep(Duration::from_millis(3)).await;
            }
        };
        timeout(Duration::from_secs(30), answers).await.expect("pgbouncer answers");
        Some(started)
    }

    pub(crate) fn options(&self) -> PgConnectOptions {
        self.options.clone()
    }

    pub(crate) fn url(&self) -> String {
        let folder = self.folder.to_str().unwrap().replace('/', "%2F");
        let user = self.options.get_username();
        format!("postgres://{user}@{folder}:6432/postgres")
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
