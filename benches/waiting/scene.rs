//! The server, a database to measure in and one in which every statement is logged.

use std::path::PathBuf;
use std::time::Duration;

use fencepost::Owner;
use fencepost::testing::{Server, TestDatabase};
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions as _, Executor as _, PgConnection, PgPool};

use crate::figures::Result;

/// So long that no heartbeat comes in between.
const TTL: Duration = Duration::from_hours(12);

/// The reference: one row a connection to update.
const TABLES: &str =
    "CREATE TABLE counters (id integer PRIMARY KEY, n bigint NOT NULL) WITH (fillfactor = 10);
    INSERT INTO counters SELECT id, 0 FROM generate_series(1, 64) id;";

/// Room for one connection a waiter, which is what advisory locks take.
const CONNECTIONS: &str = "400";

/// A database, an owner in it, and a connection to look on.
pub(crate) struct Scene {
    database: TestDatabase,
    pub(crate) owner: Owner,
    pub(crate) look: PgConnection,
}

pub(crate) fn server() -> Result<Server> {
    let settings = [("autovacuum_naptime", "1h"), ("max_connections", CONNECTIONS)];
    let builder = Server::builder().durable();
    Ok(settings.iter().fold(builder, |builder, (name, value)| builder.setting(name, value)).start()?)
}

/// An owner in the database that this URL names.
pub(crate) async fn owner(url: &str, label: &str) -> Result<Owner> {
    let pool = PgPool::connect_lazy(url)?;
    Ok(Owner::builder(&pool).label(label).ttl(TTL).start().await?)
}

impl Scene {
    /// `logged`: every statement of every session but ours goes to the server's log.
    pub(crate) async fn set_up(server: &Server, label: &str, logged: bool) -> Result<Self> {
        let database = TestDatabase::create_on(server).await?;
        let options = database.options().options([("log_statement", "none")]).disable_statement_logging();
        let mut look = options.connect().await?;
        look.execute(TABLES).await?;
        if logged {
            let all = format!("ALTER DATABASE {} SET log_statement = 'all'", database.name());
            look.execute(AssertSqlSafe(all)).await?;
        }
        let owner = owner(&database.url(), label).await?;
        Ok(Self { database, owner, look })
    }

    pub(crate) async fn tear_down(self) -> Result<()> {
        self.owner.shutdown().await?;
        drop(self.look);
        Ok(self.database.close().await?)
    }

    pub(crate) fn url(&self) -> String {
        self.database.url()
    }

    pub(crate) fn options(&self) -> PgConnectOptions {
        self.database.options().disable_statement_logging()
    }

    pub(crate) async fn version(&mut self) -> Result<String> {
        let version = "SELECT current_setting('server_version')";
        Ok(sqlx::query_scalar(version).fetch_one(&mut self.look).await?)
    }

    /// How many grants there have been: each draws one token from the sequence, which caches none.
    pub(crate) async fn grants(&mut self) -> Result<i64> {
        Ok(sqlx::query_scalar("SELECT last_value FROM fencepost.fencing_token")
            .fetch_one(&mut self.look)
            .await?)
    }

    pub(crate) async fn tickets(&mut self) -> Result<i64> {
        Ok(sqlx::query_scalar("SELECT count(*) FROM fencepost.waiters").fetch_one(&mut self.look).await?)
    }

    /// Connections of the owner of this label.
    pub(crate) async fn connections(&mut self, label: &str) -> Result<i64> {
        let count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'fencepost ' || $1::text";
        Ok(sqlx::query_scalar(count).bind(label).fetch_one(&mut self.look).await?)
    }

    /// Bytes of WAL ever written.
    pub(crate) async fn wal(&mut self) -> Result<f64> {
        let written = "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::float8";
        Ok(sqlx::query_scalar(written).fetch_one(&mut self.look).await?)
    }
}

/// The server's log, read from where the last look at it ended.
pub(crate) struct Log {
    path: PathBuf,
    read: usize,
}

/// What the log says that clients sent.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sent {
    pub(crate) acquire: u32,
    pub(crate) release: u32,
    pub(crate) notify: u32,
    pub(crate) other: u32,
}

impl Sent {
    pub(crate) fn total(self) -> u32 {
        self.acquire + self.release + self.notify + self.other
    }
}

impl Log {
    pub(crate) fn of(server: &Server) -> Result<Self> {
        let mut log = Self { path: server.socket_dir().join("log"), read: 0 };
        log.sent()?;
        Ok(log)
    }

    /// The statements since the last look. A session logs a statement before it executes it, and writes to the
    /// file itself: what has been answered is there.
    pub(crate) fn sent(&mut self) -> Result<Sent> {
        let text = std::fs::read(&self.path)?;
        let new = String::from_utf8_lossy(text.get(self.read..).unwrap_or_default());
        self.read = text.len();
        let mut sent = Sent::default();
        for line in new.lines() {
            if !(line.contains(" LOG:  execute ") || line.contains(" LOG:  statement: ")) {
                continue;
            }
            let kind = if line.contains("fencepost.acquire(") {
                &mut sent.acquire
            } else if line.contains("fencepost.release(") {
                &mut sent.release
            } else if line.contains("pg_notify(") {
                &mut sent.notify
            } else {
                &mut sent.other
            };
            *kind += 1;
        }
        Ok(sent)
    }
}
