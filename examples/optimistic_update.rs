//! Two people change the same account, and nobody locks: who was slower is told, and nothing is overwritten.
//!
//! ```text
//! cargo run --example optimistic_update
//! ```
//!
//! It fails if a deposit is lost where none may be.

use fencepost::testing::TestDatabase;
use fencepost::version::{Changes, IfMatch, Update, Versioned};
use fencepost::{Error, Version};
use sqlx::{AssertSqlSafe, PgConnection, PgPool};

type Result<T = (), E = Box<dyn std::error::Error + Send + Sync>> = std::result::Result<T, E>;

/// Its number and its balance.
type Account = (i64, i64);

#[tokio::main]
async fn main() -> Result {
    let database = TestDatabase::create().await?;
    let pool = database.pool();
    let accounts = Versioned::on("accounts")?;
    sqlx::raw_sql(
        "CREATE TABLE accounts (id bigint PRIMARY KEY, balance bigint NOT NULL);
         INSERT INTO accounts SELECT id, 100 FROM generate_series(1, 5) id",
    )
    .execute(&pool)
    .await?;
    sqlx::raw_sql(AssertSqlSafe(accounts.add_column())).execute(&pool).await?;
    let mut conn = pool.acquire().await?;

    println!("Without versions: two read, then both write what they have computed.");
    let (a, b) = (balance(&accounts, &mut conn, 1).await?.0, balance(&accounts, &mut conn, 1).await?.0);
    for (who, now) in [("A", a + 10), ("B", b + 50)] {
        sqlx::query("UPDATE accounts SET balance = $1 WHERE id = 1").bind(now).execute(&mut *conn).await?;
        println!("  {who} writes {now}");
    }
    println!("  100, then deposits of 10 and 50: {}", balance(&accounts, &mut conn, 1).await?.0);

    println!("\nWith versions: the second one is told, reads again and decides anew.");
    two_people(&accounts, &mut conn).await?;

    println!("\nOver HTTP the version is an entity tag.");
    let tag = balance(&accounts, &mut conn, 2).await?.1.etag();
    println!("  GET                            -> 200, ETag: {tag}");
    for header in [tag.as_str(), "\"1\"", "W/\"3\"", "*"] {
        println!("  PUT, If-Match: {header:<15} -> {}", put(&accounts, &mut conn, header).await?);
    }

    println!("\nSeveral rows in one statement, each by its version: the losers are listed.");
    let rows = [(3, Version::new(1)), (2, Version::new(1)), (77, Version::new(1)), (4, Version::new(1))];
    let changes = Changes::new().set_each("balance", &[103_i64, 102, 177, 104]);
    let many = accounts.update_many(&mut conn, &rows, changes).await?;
    let ids = |rows: &[(i64, Version)]| rows.iter().map(|(id, _)| *id).collect::<Vec<_>>();
    println!(
        "  updated {:?}, conflicts {:?}, gone {:?}",
        ids(&many.updated),
        ids(&many.conflicts),
        many.gone
    );
    drop(conn);

    println!("\n16 tasks add 1 to one account, 20 times each, with update_with.");
    many_deposits(&pool, &accounts).await?;
    Ok(database.close().await?)
}

async fn balance(accounts: &Versioned, conn: &mut PgConnection, id: i64) -> Result<(i64, Version)> {
    let read = accounts.load::<Account, _>(conn, id).await?.ok_or(Error::Gone)?;
    Ok((read.value.1, read.version))
}

async fn two_people(accounts: &Versioned, conn: &mut PgConnection) -> Result {
    let a = balance(accounts, conn, 2).await?;
    let mut b = balance(accounts, conn, 2).await?;
    for (who, deposit) in [("A", 10), ("B", 50)] {
        let mut read = if who == "A" { a } else { b };
        loop {
            let (now, version) = read;
            let changes = Changes::new().set("balance", now + deposit);
            match accounts.update(conn, 2_i64, version, changes).await? {
                Update::Updated(new) => {
                    println!(
                        "  {who} writes {} over version {version}: updated, version {new}",
                        now + deposit
                    );
                    break;
                }
                Update::Conflict { current } => {
                    println!(
                        "  {who} writes {} over version {version}: conflict, it has version {current}",
                        now + deposit
                    );
                }
                Update::Gone => return Err("the account is gone".into()),
            }
            b = balance(accounts, conn, 2).await?;
            read = b;
        }
    }
    let (end, _) = balance(accounts, conn, 2).await?;
    println!("  100, then deposits of 10 and 50: {end}");
    if end == 160 { Ok(()) } else { Err("a deposit was lost".into()) }
}

/// The status that a server would answer.
async fn put(accounts: &Versioned, conn: &mut PgConnection, if_match: &str) -> Result<String> {
    let condition: IfMatch = match if_match.parse() {
        Ok(condition) => condition,
        Err(error) => return Ok(format!("400 {error}")),
    };
    let (now, version) = balance(accounts, conn, 2).await?;
    if !condition.is_met_by(version) {
        return Ok("412 Precondition Failed".into());
    }
    // Compared once more by the statement: somebody may have been faster since.
    Ok(match accounts.update(conn, 2_i64, version, Changes::new().set("balance", now + 1)).await? {
        Update::Updated(new) => format!("200, ETag: {}", new.etag()),
        Update::Conflict { .. } => "412 Precondition Failed".into(),
        Update::Gone => "404 Not Found".into(),
    })
}

async fn many_deposits(pool: &PgPool, accounts: &Versioned) -> Result {
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..16 {
        let (pool, accounts) = (pool.clone(), accounts.clone());
        tasks.spawn(async move {
            for _ in 0..20 {
                let deposit = accounts.update_with(&pool, 5_i64, |read| {
                    let (_, now): Account = read.value;
                    Ok::<_, Error>(Changes::new().set("balance", now + 1))
                });
                deposit.await?.ok_or(Error::Gone)?;
            }
            Ok::<_, Error>(())
        });
    }
    for done in tasks.join_all().await {
        done?;
    }
    let (end, version) = balance(accounts, &mut *pool.acquire().await?, 5).await?;
    println!("  100, then 320 deposits of 1: {end}, version {version}");
    if (end, version) == (420, Version::new(321)) { Ok(()) } else { Err("a deposit was lost".into()) }
}
