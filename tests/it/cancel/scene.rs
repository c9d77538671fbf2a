//! Where the cases play, and what has to be true of it after each of them.

use std::pin::Pin;
use std::time::Duration;

use fencepost::row::RowLock;
use fencepost::testing::{Server, TestDatabase};
use fencepost::{HeldLease, Owner};
use sqlx::postgres::PgPoolOptions;
use sqlx::{Executor as _, PgPool, Row as _};
use tokio::sync::OnceCell;
use tokio::time::timeout;

use super::Cut;
use crate::support::{DEADLINE, LONG, hold, hold_when_free, owner, within};

/// Runs a function once, drops it where the cut says, and tells whether it completed before.
pub(super) type Case = for<'a> fn(&'a Scene, Cut) -> Pin<Box<dyn Future<Output = bool> + 'a>>;

/// The lease that the cases are about.
pub(super) const NAME: &str = "report";

/// What is there that should not be, in words. An owner has four sessions at most, and five more for advisory locks.
const LEFT_BEHIND: &str = "
    WITH session AS (
        SELECT application_name AS name, count(*) AS times, bool_or(state LIKE 'idle in transaction%') AS idle
          FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'
         GROUP BY 1)
    SELECT coalesce(string_agg(what, ', '), '') FROM (
        SELECT 'a ticket' AS what FROM fencepost.waiters
        UNION ALL
        SELECT 'a grant of ' || l.name FROM fencepost.leases l JOIN fencepost.owners o ON o.id = l.owner
         WHERE l.released_at IS NULL AND o.expires_at > clock_timestamp()
        UNION ALL
        SELECT 'an attempt at ' || c.key FROM fencepost.claims c JOIN fencepost.owners o ON o.id = c.owner
         WHERE c.state = 'running' AND o.expires_at > clock_timestamp()
        UNION ALL
        SELECT 'a permit of ' || p.semaphore FROM fencepost.permits p JOIN fencepost.owners o ON o.id = p.owner
         WHERE p.released_at IS NULL AND o.expires_at > clock_timestamp()
        UNION ALL
        SELECT 'a living owner ' || o.label FROM fencepost.owners o
         WHERE o.expires_at > clock_timestamp() AND o.label NOT IN ('a', 'b')
        UNION ALL
        SELECT 'an advisory lock' FROM pg_locks l JOIN pg_database d ON d.oid = l.database
         WHERE l.locktype = 'advisory' AND d.datname = current_database()
        UNION ALL
        SELECT 'an open transaction of ' || s.name FROM session s WHERE s.idle
        UNION ALL
        SELECT s.times || ' sessions of ' || s.name FROM session s
         WHERE s.times > CASE WHEN s.name IN ('observer', 'application') THEN 1
                              WHEN s.name IN ('fencepost a', 'fencepost b') THEN 4 + 5 ELSE 0 END
    ) AS found";

pub(super) struct Scene {
    pub(super) database: TestDatabase,
    /// The application's: with one connection, so that it shows when something is the matter with that.
    pub(super) pool: PgPool,
    /// Beside everything.
    pub(super) observer: PgPool,
    /// Whoever the function is called with.
    pub(super) a: Owner,
    /// Somebody else.
    pub(super) b: Owner,
    server: OnceCell<Server>,
    bare: OnceCell<(TestDatabase, PgPool)>,
}

fn one_connection(database: &TestDatabase, name: &str) -> PgPool {
    PgPoolOptions::new()
        .max_connections(1)
        .test_before_acquire(false)
        .connect_lazy_with(database.options().application_name(name))
}

impl Scene {
    pub(super) async fn new() -> Self {
        let database = TestDatabase::create().await.unwrap();
        let pool = one_connection(&database, "application");
        let observer = one_connection(&database, "observer");
        let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
        Self { database, pool, observer, a, b, server: OnceCell::new(), bare: OnceCell::new() }
    }

    /// Rows 1 to 9 of a table, to be locked by their `id`.
    pub(super) async fn rows(&self) -> RowLock {
        let table = "CREATE TABLE IF NOT EXISTS nine (id bigint PRIMARY KEY); \
                     INSERT INTO nine SELECT generate_series(1, 9) ON CONFLICT DO NOTHING";
        self.observer.execute(table).await.unwrap();
        RowLock::on("nine").unwrap()
    }

    pub(super) async fn held(&self) -> HeldLease {
        hold_when_free(&self.a, NAME).await
    }

    /// A server of its own.
    pub(super) async fn server(&self) -> &Server {
        let start = async || tokio::task::spawn_blocking(|| Server::start().unwrap()).await.unwrap();
        self.server.get_or_init(start).await
    }

    /// Another database, with nothing of ours in it, and a pool there.
    pub(super) async fn bare(&self) -> &PgPool {
        let make = async || {
            let database = TestDatabase::create().await.unwrap();
            let pool = one_connection(&database, "application");
            (database, pool)
        };
        let (_, pool) = self.bare.get_or_init(make).await;
        pool.execute("DROP SCHEMA IF EXISTS fencepost CASCADE").await.unwrap();
        pool
    }

    pub(super) async fn count(&self, query: &'static str) -> i64 {
        sqlx::query_scalar(query).fetch_one(&self.observer).await.unwrap()
    }

    /// After a function was dropped, whichever and wherever.
    pub(super) async fn is_sound(&self, after: &str) {
        // C07: what the pool lends is in no transaction. One message, whose transaction begins with it.
        let fresh = self.pool.fetch_one(sqlx::raw_sql("SELECT now() = statement_timestamp() AS fresh"));
        let row = within(&format!("a connection of the pool after {after}"), fresh).await.unwrap();
        let fresh: bool = row.get("fresh");
        assert!(fresh, "after {after} the pool lends a connection that is in a transaction");
        // C24: nothing is stranded for the others, and the owner goes on.
        for owner in [&self.b, &self.a] {
            let free = within(&format!("the lease after {after}"), hold_when_free(owner, NAME)).await;
            assert!(free.release().await.unwrap(), "{after}");
            assert!(owner.is_alive(), "{after}");
        }
        assert!(hold(&self.a, "another").await.release().await.unwrap(), "{after}");
        let mut left = String::new();
        let nothing = timeout(DEADLINE, async {
            loop {
                left = sqlx::query_scalar(LEFT_BEHIND).fetch_one(&self.observer).await.unwrap();
                if left.is_empty() {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(3)).await;
            }
        });
        assert!(nothing.await.is_ok(), "left behind after {after}: {left}");
    }
}
