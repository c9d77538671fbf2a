//! A slower disk than this machine's.

use std::error::Error;
use std::time::Duration;

use sqlx::{AssertSqlSafe, Executor as _, PgConnection};

/// Makes each flush that a commit waits for take at least 1 ms, and says so.
pub(crate) async fn takes_a_millisecond(
    connection: &mut PgConnection,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    for statement in [
        "ALTER SYSTEM SET commit_siblings = 0",
        "ALTER SYSTEM SET commit_delay = 1000",
        "SELECT pg_reload_conf()",
    ] {
        connection.execute(AssertSqlSafe(statement)).await?;
    }
    // Every session reads it before its next statement, once the signal has arrived.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let delay: String = sqlx::query_scalar("SHOW commit_delay").fetch_one(connection).await?;
    if delay != "1000" {
        return Err(format!("commit_delay is {delay}").into());
    }
    println!(
        "\nFrom here on a flush takes 1 ms and more. This is a stand-in for a slower disk: commit_delay = 1000 \
         and\ncommit_siblings = 0 make Postgres sleep 1 ms before each flush that a commit waits for. \
         Commits that wait for\nno flush do not pay it."
    );
    Ok(())
}
