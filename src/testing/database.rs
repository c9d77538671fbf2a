//! A database for one test, on the shared server or a given one.

use std::{env, str::FromStr, sync::OnceLock, thread, time::Duration};

use sqlx::{
    AssertSqlSafe, ConnectOptions, Connection, PgConnection, PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use uuid::Uuid;

use super::{Server, StartError};

/// For the removal in drop: a frozen server must not hold up the test that froze it for long.
const DROP_LIMIT: Duration = Duration::from_secs(5);

/// For a session that was told to end, and for the template's last one.
const END_LIMIT: Duration = Duration::from_secs(30);

/// A test's database was not made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DatabaseError {
    /// There is no server.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The server refused a statement, or the connection to it broke.
    #[error("preparing a test's database")]
    Database(#[from] sqlx::Error),
    /// The schema could not be brought into it.
    #[error(transparent)]
    Migrate(#[from] crate::Error),
    /// A session that was told to end did not.
    #[error("a session did not end within {END_LIMIT:?}")]
    SessionStays,
}

/// Makes in an empty database what every test finds in it.
async fn prepare_template(pool: &PgPool) -> Result<(), DatabaseError> {
    Ok(crate::migrate(pool).await?)
}

/// The server of all tests of this process.
#[derive(Debug)]
pub struct Shared(Source);

#[derive(Debug)]
enum Source {
    Own(Server),
    Given { options: PgConnectOptions, url: String },
}

impl Shared {
    /// Options that connect to its maintenance database, as a user that may create databases.
    #[must_use]
    pub fn options(&self) -> PgConnectOptions {
        match &self.0 {
            Source::Own(server) => server.options(),
            Source::Given { options, .. } => options.clone(),
        }
    }

    /// The same as a URL.
    #[must_use]
    pub fn url(&self) -> String {
        match &self.0 {
            Source::Own(server) => server.url(),
            Source::Given { url, .. } => url.clone(),
        }
    }

    /// The server, when this process started it; `None` when `DATABASE_URL` names it.
    #[must_use]
    pub fn server(&self) -> Option<&Server> {
        match &self.0 {
            Source::Own(server) => Some(server),
            Source::Given { .. } => None,
        }
    }
}

/// The server shared by all tests of this process: the one `DATABASE_URL` names, else a [`Server`] that the
/// first call starts.
///
/// The first call blocks its thread until the server is there. When it fails, every later call returns the
/// same error. Do not crash or pause this server: other tests use it.
///
/// # Errors
/// [`StartError`]: the server did not start, or `DATABASE_URL` cannot be read.
pub fn shared() -> Result<&'static Shared, StartError> {
    static SHARED: OnceLock<Result<Shared, StartError>> = OnceLock::new();
    let shared = SHARED.get_or_init(|| match env::var("DATABASE_URL") {
        Ok(url) if !url.is_empty() => match PgConnectOptions::from_str(&url) {
            Ok(options) => Ok(Shared(Source::Given { options, url })),
            // Without the URL itself, which holds a password.
            Err(error) => {
                Err(StartError::Environment { variable: "DATABASE_URL", problem: error.to_string() })
            }
        },
        _ => Server::start().map(|server| Shared(Source::Own(server))),
    });
    shared.as_ref().map_err(Clone::clone)
}

/// A database for one test, alone on it: migrated, otherwise empty.
///
/// On a server of this process it is a copy of a template that is made once. On the server `DATABASE_URL`
/// names it is made anew each time, so that no template is left there when the process ends.
///
/// Its name begins with `fencepost_test_` and is unique over processes and machines.
///
/// # Drop
/// The database is removed, its open sessions are ended. Drop waits for it, at most 5 seconds; a failure is
/// logged. [`close`](Self::close) does the same and tells.
///
/// # Database
/// It holds no connection. Each method opens one to the server's maintenance database for as long as it runs.
/// Needs Postgres 13 (`DROP DATABASE … WITH (FORCE)`) and the right to create databases.
///
/// # Examples
/// ```
/// use fencepost::testing::TestDatabase;
///
/// # #[tokio::main]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let database = TestDatabase::create().await?;
/// sqlx::query("CREATE TABLE seat (id int)").execute(&database.pool()).await?;
/// database.close().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct TestDatabase {
    name: String,
    options: PgConnectOptions,
    url: String,
    /// `None` once it is removed.
    admin: Option<PgConnectOptions>,
}

impl TestDatabase {
    /// Makes a database on the [`shared()`] server.
    ///
    /// # Errors
    /// [`DatabaseError`].
    ///
    /// # Cancel safety
    /// A call that is cancelled while the server creates the database may leave it until the server ends.
    pub async fn create() -> Result<Self, DatabaseError> {
        let shared = shared()?;
        match &shared.0 {
            Source::Own(server) => Self::create_on(server).await,
            Source::Given { options, url } => {
                let database = Self::copy("template0", options, url).await?;
                prepare(&database.options).await?;
                Ok(database)
            }
        }
    }

    /// Makes a database on the given server. It has to be dropped before the server, or drop has nobody to
    /// talk to; nothing is left in either case.
    ///
    /// # Errors
    /// [`DatabaseError`].
    ///
    /// # Cancel safety
    /// A call that is cancelled while the server creates the database may leave it until the server ends.
    pub async fn create_on(server: &Server) -> Result<Self, DatabaseError> {
        let options = server.options();
        let template = server.template.get_or_try_init(|| make_template(&options)).await?;
        Self::copy(&format!("{template}{}", server.copy_strategy()), &options, &server.url()).await
    }

    async fn copy(template: &str, admin: &PgConnectOptions, url: &str) -> Result<Self, DatabaseError> {
        let name = format!("fencepost_test_{}_{}", std::process::id(), Uuid::new_v4().simple());
        create_database(admin, &name, template).await?;
        Ok(Self {
            options: admin.clone().database(&name),
            url: with_database(url, &name),
            name,
            admin: Some(admin.clone()),
        })
    }

    /// Options that connect to it.
    #[must_use]
    pub fn options(&self) -> PgConnectOptions {
        self.options.clone()
    }

    /// The same as a URL.
    #[must_use]
    pub fn url(&self) -> String {
        self.url.clone()
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A new pool of up to 10 connections, which are opened when they are needed.
    ///
    /// Call it inside a tokio runtime: the pool starts its upkeep there.
    #[must_use]
    pub fn pool(&self) -> PgPool {
        PgPoolOptions::new().max_connections(10).connect_lazy_with(self.options())
    }

    /// Ends the session with this number on this database, as an operator would, and waits for its end;
    /// tells whether there was one.
    ///
    /// # Errors
    /// [`DatabaseError`].
    ///
    /// # Cancel safety
    /// A cancelled call may or may not have ended the session.
    pub async fn terminate(&self, pid: i32) -> Result<bool, DatabaseError> {
        Ok(self.end_sessions(Some(pid), "%").await? > 0)
    }

    /// Ends all sessions on this database whose `application_name` is `LIKE` the pattern, and waits for
    /// their end; tells how many there were.
    ///
    /// # Errors
    /// [`DatabaseError`].
    ///
    /// # Cancel safety
    /// A cancelled call may have ended some of the sessions.
    pub async fn terminate_where(&self, application_name: &str) -> Result<usize, DatabaseError> {
        self.end_sessions(None, application_name).await
    }

    async fn end_sessions(&self, pid: Option<i32>, application_name: &str) -> Result<usize, DatabaseError> {
        let mut connection = self.admin.as_ref().unwrap_or(&self.options).connect().await?;
        let ended: Vec<i32> = sqlx::query_scalar(
            "SELECT pid FROM (SELECT pid, pg_terminate_backend(pid) AS told FROM pg_stat_activity \
             WHERE datname = $1 AND ($2::int IS NULL OR pid = $2) AND application_name LIKE $3) AS s WHERE told",
        )
        .bind(&self.name)
        .bind(pid)
        .bind(application_name)
        .fetch_all(&mut connection)
        .await?;
        wait_for_end(&mut connection, &self.name, &ended).await?;
        connection.close().await?;
        Ok(ended.len())
    }

    /// Removes the database now, and tells when that fails. Its open sessions are ended.
    ///
    /// # Errors
    /// [`DatabaseError::Database`].
    ///
    /// # Cancel safety
    /// A call that is cancelled still removes the database, by drop.
    pub async fn close(mut self) -> Result<(), DatabaseError> {
        if let Some(admin) = &self.admin {
            drop_database(admin, &self.name).await?;
        }
        self.admin = None;
        Ok(())
    }
}

impl Drop for TestDatabase {
    fn drop(&mut self) {
        let Some(admin) = self.admin.take() else { return };
        let name = self.name.clone();
        // A thread of its own: here we may be inside a runtime, which must not be blocked on, or in none.
        let removal = thread::Builder::new().spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let limited = async { tokio::time::timeout(DROP_LIMIT, drop_database(&admin, &name)).await };
            runtime.block_on(limited).map_err(|_| sqlx::Error::PoolTimedOut)?
        });
        let result = match removal.map(thread::JoinHandle::join) {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(sqlx::Error::WorkerCrashed),
            Err(error) => Err(error.into()),
        };
        if let Err(error) = result {
            tracing::warn!(%error, database = self.name, "a test's database was not removed");
        }
    }
}

/// The template of a server of ours; it goes with the server.
async fn make_template(admin: &PgConnectOptions) -> Result<String, DatabaseError> {
    let name = format!("fencepost_template_{}", Uuid::new_v4().simple());
    create_database(admin, &name, "template0").await?;
    prepare(&admin.clone().database(&name)).await?;
    // A session that is just ending would make the first copy wait for 100 ms.
    let mut connection = admin.connect().await?;
    let sessions = sqlx::query_scalar(
        "SELECT pid FROM pg_stat_activity WHERE datname = $1 AND backend_type = 'client backend'",
    )
    .bind(&name)
    .fetch_all(&mut connection)
    .await?;
    wait_for_end(&mut connection, &name, &sessions).await?;
    connection.close().await?;
    Ok(name)
}

async fn prepare(database: &PgConnectOptions) -> Result<(), DatabaseError> {
    let pool = PgPoolOptions::new().max_connections(2).connect_lazy_with(database.clone());
    let prepared = prepare_template(&pool).await;
    pool.close().await;
    prepared
}

async fn create_database(admin: &PgConnectOptions, name: &str, template: &str) -> Result<(), sqlx::Error> {
    statement(admin, format!("CREATE DATABASE {name} TEMPLATE {template}")).await
}

async fn drop_database(admin: &PgConnectOptions, name: &str) -> Result<(), sqlx::Error> {
    statement(admin, format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)")).await
}

/// The names in the text are ours: lower-case letters, digits and underscores.
async fn statement(admin: &PgConnectOptions, text: String) -> Result<(), sqlx::Error> {
    let mut connection = admin.connect().await?;
    sqlx::raw_sql(AssertSqlSafe(text)).execute(&mut connection).await?;
    connection.close().await
}

async fn wait_for_end(
    connection: &mut PgConnection,
    database: &str,
    sessions: &[i32],
) -> Result<(), DatabaseError> {
    let gone = async {
        loop {
            let left: i64 = sqlx::query_scalar(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = $1 AND pid = ANY($2)",
            )
            .bind(database)
            .bind(sessions)
            .fetch_one(&mut *connection)
            .await?;
            if left == 0 {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(END_LIMIT, gone).await.unwrap_or(Err(DatabaseError::SessionStays))
}

/// The URL with another database: in its path, and not in its parameters, which would win.
fn with_database(url: &str, name: &str) -> String {
    let (base, parameters) = url.split_once('?').unwrap_or((url, ""));
    let authority = base.find("://").map_or(0, |start| start + 3);
    let end =
        base.get(authority..).and_then(|rest| rest.find('/')).map_or(base.len(), |slash| authority + slash);
    let kept: Vec<&str> =
        parameters.split('&').filter(|pair| !pair.is_empty() && !pair.starts_with("dbname=")).collect();
    let mark = if kept.is_empty() { "" } else { "?" };
    format!("{}/{name}{mark}{}", base.get(..end).unwrap_or(base), kept.join("&"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_database_in_a_url() {
        assert_eq!(with_database("postgres://u:p@h:1/a?x=1&dbname=b", "t"), "postgres://u:p@h:1/t?x=1");
        assert_eq!(with_database("postgres://u@%2Ftmp%2Fs:5432/a", "t"), "postgres://u@%2Ftmp%2Fs:5432/t");
        assert_eq!(with_database("postgres:///?host=/tmp", "t"), "postgres:///t?host=/tmp");
        assert_eq!(with_database("postgres://h", "t"), "postgres://h/t");
    }
}
