//! What a run plays on: a server, with a standby where it shall fail over, and the way by which each worker
//! reaches it.

use std::fs;
use std::os::unix::fs::chown;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fencepost::testing::Server;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions, PgSslMode};
use sqlx::{AssertSqlSafe, ConnectOptions as _, PgPool};
use tokio::task::block_in_place;

use crate::controller::until_asked;
use crate::history::now;
use crate::pgbouncer::PgBouncer;
use crate::proxy::Proxy;

/// The role of the workers: an application's, not a superuser's.
pub(crate) const ROLE: &str = "worker";

/// What is special about the server and the way to it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setting {
    pub(crate) way: Way,
    /// Parameters of the server.
    pub(crate) server: &'static [(&'static str, &'static str)],
    /// Parameters of the workers' role.
    pub(crate) role: &'static [(&'static str, &'static str)],
    /// There is a standby, and whether commits wait for it.
    pub(crate) standby: Option<bool>,
}

impl Setting {
    pub(crate) const PLAIN: Self = Self { way: Way::Straight, server: &[], role: &[], standby: None };
}

/// How a worker reaches the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// By its Unix socket.
    Straight,
    /// Each through a proxy of its own.
    Proxies,
    /// All through one PgBouncer in transaction mode.
    Pooler,
    /// By TCP, in a network namespace in which this process runs already.
    Link,
}

pub(crate) struct Stage {
    way: Way,
    /// Where the database is now.
    primary: Mutex<(Arc<Server>, PgPool)>,
    standby: Option<Standby>,
    proxies: Vec<Proxy>,
    pgbouncer: Option<PgBouncer>,
}

struct Standby {
    server: Arc<Server>,
    synchronous: bool,
}

impl Stage {
    /// A migrated database, which the workers' role may use; or why there can be none on this machine.
    pub(crate) async fn set(setting: Setting, workers: usize) -> Result<Self, &'static str> {
        if setting.way == Way::Link && std::env::var_os(crate::link::INSIDE).is_none() {
            return Err("not in a network namespace of its own");
        }
        let mut builder = Server::builder();
        for (name, value) in setting.server {
            builder = builder.setting(name, value);
        }
        if setting.way == Way::Link {
            builder = builder.tcp();
        }
        let server = Arc::new(block_in_place(|| builder.start()).unwrap());
        let standby = match setting.standby {
            Some(synchronous) => {
                let standby =
                    block_in_place(|| Server::builder().setting("synchronous_commit", "on").start());
                let server = Arc::new(block_in_place(|| follow(&server, standby.unwrap())));
                Some(Standby { server, synchronous })
            }
            None => None,
        };
        let pool = connect(&server).await;
        if let Some(standby) = &standby {
            let follows = "SELECT EXISTS (SELECT FROM pg_stat_replication WHERE state = 'streaming')";
            until_asked(&pool, "the standby follows", follows).await;
            if standby.synchronous {
                sqlx::raw_sql("ALTER SYSTEM SET synchronous_standby_names = '*'")
                    .execute(&pool)
                    .await
                    .unwrap();
                sqlx::raw_sql("SELECT pg_reload_conf()").execute(&pool).await.unwrap();
                let waits = "SELECT EXISTS (SELECT FROM pg_stat_replication WHERE sync_state = 'sync')";
                until_asked(&pool, "the standby is synchronous", waits).await;
            }
        }
        fencepost::migrate(&pool).await.unwrap();
        let role = format!(
            "CREATE ROLE {ROLE} LOGIN; SELECT fencepost.allow('{ROLE}'); \
             GRANT SELECT ON ALL TABLES IN SCHEMA fencepost TO {ROLE}; \
             ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT ALL ON TABLES TO {ROLE}"
        );
        sqlx::raw_sql(AssertSqlSafe(role)).execute(&pool).await.unwrap();
        for (name, value) in setting.role {
            let alter = format!("ALTER ROLE {ROLE} SET {name} = '{value}'");
            sqlx::raw_sql(AssertSqlSafe(alter)).execute(&pool).await.unwrap();
        }
        let mut proxies = Vec::new();
        if setting.way == Way::Proxies {
            for _ in 0..workers {
                proxies.push(Proxy::before(server.options()).await);
            }
        }
        let mut pgbouncer = None;
        if setting.way == Way::Pooler {
            let started = PgBouncer::before(&server, "transaction", 8, ROLE).await;
            pgbouncer = Some(started.ok_or("pgbouncer is not installed")?);
        }
        Ok(Self { way: setting.way, primary: Mutex::new((server, pool)), standby, proxies, pgbouncer })
    }

    /// The controller's own connections to the database where it is now.
    pub(crate) fn pool(&self) -> PgPool {
        self.primary.lock().unwrap_or_else(PoisonError::into_inner).1.clone()
    }

    fn server(&self) -> Arc<Server> {
        Arc::clone(&self.primary.lock().unwrap_or_else(PoisonError::into_inner).0)
    }

    /// How the worker in this place reaches the database.
    pub(crate) fn url(&self, place: usize) -> String {
        match (self.way, &self.pgbouncer) {
            (_, Some(pgbouncer)) => pgbouncer.url(),
            (Way::Proxies, _) => {
                let port = self.proxies[place].options().get_port();
                format!("postgres://{ROLE}@127.0.0.1:{port}/postgres?sslmode=disable")
            }
            _ => self.server().url().replace("postgres://postgres@", &format!("postgres://{ROLE}@")),
        }
    }

    pub(crate) fn proxy(&self, place: usize) -> &Proxy {
        &self.proxies[place]
    }

    /// Nothing stands in the way any more.
    pub(crate) fn clear(&self) {
        for proxy in &self.proxies {
            proxy.black_hole(false);
            proxy.slow(Duration::ZERO);
            proxy.cut_nothing();
        }
    }

    /// From when to when nobody can have had an answer.
    pub(crate) async fn crash_and_restart(&self, down: Duration) -> (u64, u64) {
        let server = self.server();
        block_in_place(|| server.crash()).unwrap();
        let from = now();
        tokio::time::sleep(down).await;
        let until = now();
        block_in_place(|| server.restart()).unwrap();
        (from, until)
    }

    /// From when to when nobody can have had an answer.
    pub(crate) async fn stall(&self, length: Duration) -> (u64, u64) {
        let server = self.server();
        block_in_place(|| server.pause()).unwrap();
        let from = now();
        tokio::time::sleep(length).await;
        let until = now();
        block_in_place(|| server.resume()).unwrap();
        (from, until)
    }

    /// The primary is gone for ever, and the standby is the database from now on. Once; from when to when nobody can
    /// have had an answer.
    pub(crate) async fn fail_over(&self, length_of_loss: Duration) -> Option<(u64, u64)> {
        let standby = self.standby.as_ref()?;
        let old = self.server();
        if Arc::ptr_eq(&old, &standby.server) {
            return None;
        }
        let next = connect(&standby.server).await;
        if !standby.synchronous {
            sqlx::raw_sql("ALTER SYSTEM SET primary_conninfo = ''").execute(&next).await.unwrap();
            sqlx::raw_sql("SELECT pg_reload_conf()").execute(&next).await.unwrap();
            tokio::time::sleep(length_of_loss).await;
        }
        block_in_place(|| old.crash()).unwrap();
        let from = now();
        sqlx::query("SELECT pg_promote()").execute(&next).await.unwrap();
        until_asked(&next, "it is promoted", "SELECT NOT pg_is_in_recovery()").await;
        *self.primary.lock().unwrap_or_else(PoisonError::into_inner) = (Arc::clone(&standby.server), next);
        let until = now();
        for proxy in &self.proxies {
            proxy.switch(&standby.server.options());
        }
        Some((from, until))
    }
}

/// By the socket, also where the workers use TCP.
async fn connect(server: &Server) -> PgPool {
    let options = PgConnectOptions::new_without_pgpass()
        .socket(server.socket_dir())
        .port(server.port())
        .ssl_mode(PgSslMode::Disable)
        .username("postgres")
        .database("postgres")
        .application_name("faults controller")
        .disable_statement_logging();
    // Open from the start, since a fault may take every free one.
    let pool = PgPoolOptions::new().max_connections(6).min_connections(6);
    pool.connect_with(options).await.unwrap()
}

/// Makes the other a standby that follows: a copy of the data, and a word that it shall.
fn follow(primary: &Server, standby: Server) -> Server {
    primary.stop_fast().unwrap();
    standby.stop_fast().unwrap();
    let own = fs::read_to_string(standby.data_dir().join("postgresql.conf")).unwrap();
    fs::remove_dir_all(standby.data_dir()).unwrap();
    copy(primary.data_dir(), standby.data_dir());
    let folder = primary.socket_dir().display();
    let conf = format!(
        "{own}\nprimary_conninfo = 'host={folder} port={} user=postgres application_name=standby'\n",
        primary.port()
    );
    fs::write(standby.data_dir().join("postgresql.conf"), conf).unwrap();
    let signal = standby.data_dir().join("standby.signal");
    fs::write(&signal, "").unwrap();
    if let Some((user, group)) = standby.run_as() {
        chown(&signal, Some(user), Some(group)).unwrap();
        chown(standby.data_dir().join("postgresql.conf"), Some(user), Some(group)).unwrap();
    }
    primary.restart().unwrap();
    standby.restart().unwrap();
    standby
}

/// With owners and modes.
fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-a").arg(from).arg(to).status().unwrap();
    assert!(copied.success(), "cp -a: {copied}");
}
