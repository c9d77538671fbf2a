//! The server, the tables of the references, and the owners.

use std::time::Duration;

use fencepost::Owner;
use fencepost::testing::{Server, TestDatabase};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{ConnectOptions as _, Executor as _, PgConnection, PgPool};
use uuid::Uuid;

use crate::rounds::Result;

/// So long that no heartbeat comes in between.
const TTL: Duration = Duration::from_hours(12);

/// What the references work on. The lease table is the plainest that keeps tokens in order: drawn in SET, after
/// the row is locked. Its row is there from the start, as it is after the first grant.
const TABLES: &str = "
    CREATE SEQUENCE plain_token;
    CREATE TABLE plain_leases (
        name text PRIMARY KEY, token bigint NOT NULL, holder uuid NOT NULL, expires_at timestamptz NOT NULL
    ) WITH (fillfactor = 50);
    CREATE TABLE counters (id integer PRIMARY KEY, n bigint NOT NULL) WITH (fillfactor = 50);
    INSERT INTO counters SELECT id, 0 FROM generate_series(1, 10) id;
    INSERT INTO plain_leases VALUES ('plain', nextval('plain_token'), gen_random_uuid(), 'epoch');";

pub(crate) struct Scene {
    database: TestDatabase,
    /// Holds what others are refused.
    pub(crate) holder: Owner,
    /// Tries, acquires and releases.
    pub(crate) owner: Owner,
    /// Holds ten thousand leases, from the heartbeat's section on.
    pub(crate) laden: Owner,
}

impl Scene {
    pub(crate) fn server(tcp: bool) -> Result<Server> {
        let builder = Server::builder().durable().setting("autovacuum_naptime", "1h");
        Ok(if tcp { builder.tcp() } else { builder }.start()?)
    }

    pub(crate) async fn set_up(server: &Server) -> Result<Self> {
        let database = TestDatabase::create_on(server).await?;
        let pool = database.pool();
        pool.execute(TABLES).await?;
        let holder = owner(&pool, "holder").await?;
        let scene = Self {
            database,
            holder,
            owner: owner(&pool, "owner").await?,
            laden: owner(&pool, "laden").await?,
        };
        pool.close().await;
        Ok(scene)
    }

    pub(crate) async fn tear_down(self) -> Result<()> {
        for owner in [&self.holder, &self.owner, &self.laden] {
            owner.shutdown().await?;
        }
        Ok(self.database.close().await?)
    }

    pub(crate) async fn version(&self) -> Result<String> {
        let version = "SELECT current_setting('server_version')";
        Ok(sqlx::query_scalar(version).fetch_one(&mut self.connect().await?).await?)
    }

    fn options(&self) -> PgConnectOptions {
        self.database.options().disable_statement_logging()
    }

    /// A plain connection.
    pub(crate) async fn connect(&self) -> Result<PgConnection> {
        Ok(self.options().connect().await?)
    }

    /// A plain connection whose commits wait for no flush.
    pub(crate) async fn connect_asynchronous(&self) -> Result<PgConnection> {
        let mut connection = self.connect().await?;
        connection.execute("SET synchronous_commit = off").await?;
        Ok(connection)
    }

    /// A pool of one connection, which is there, without the ping before use.
    pub(crate) async fn pool(&self) -> Result<PgPool> {
        let pool = PgPoolOptions::new().min_connections(1).max_connections(1).test_before_acquire(false);
        Ok(pool.connect_with(self.options()).await?)
    }

    /// The id of an owner, which only a superuser can look up.
    pub(crate) async fn id(&self, owner: &Owner) -> Result<Uuid> {
        let id = "SELECT id FROM fencepost.owners WHERE label = $1 AND expires_at > clock_timestamp()";
        Ok(sqlx::query_scalar(id).bind(owner.label()).fetch_one(&mut self.connect().await?).await?)
    }
}

async fn owner(pool: &PgPool, label: &str) -> Result<Owner> {
    Ok(Owner::builder(pool).label(label).ttl(TTL).start().await?)
}
