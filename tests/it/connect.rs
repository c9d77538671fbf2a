//! Connect options of every kind, to whom nobody answers as Postgres would: a typed error within a deadline.

use std::time::Duration;

use fencepost::testing::Server;
use fencepost::{Error, Owner, migrate};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions, PgSslMode};
use sqlx::{Executor as _, PgPool};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::runtime::Handle;

use crate::support::{database, hold, within};

/// The shortest bound there is on a start, for those who do not answer.
const BOUND: Duration = Duration::from_secs(1);

fn pool(options: PgConnectOptions) -> PgPool {
    PgPoolOptions::new().connect_lazy_with(options)
}

/// What a start and a migration say.
async fn both(options: PgConnectOptions) -> [Result<(), Error>; 2] {
    let pool = pool(options);
    let start = async {
        let owner = Owner::start(&pool).await?;
        owner.shutdown().await
    };
    let started = within("the start", start).await;
    [started, within("the migration", migrate(&pool)).await]
}

fn tcp(port: u16) -> PgConnectOptions {
    PgConnectOptions::new_without_pgpass()
        .host("127.0.0.1")
        .port(port)
        .ssl_mode(PgSslMode::Disable)
        .username("postgres")
        .database("postgres")
}

fn code(error: &Error) -> Option<&str> {
    error.sqlstate()
}

#[tokio::test(flavor = "multi_thread")]
async fn who_cannot_be_reached_is_a_retryable_error_at_once() {
    // A port that nobody listens on.
    let port = TcpListener::bind(("127.0.0.1", 0)).await.unwrap().local_addr().unwrap().port();
    let socket = |path: &str| PgConnectOptions::new_without_pgpass().socket(path).username("x").database("x");
    for options in [
        tcp(port),
        tcp(port).host(""),
        tcp(port).host("host.invalid"),
        tcp(port).host(&"x".repeat(10_000)),
        tcp(port).host("nul\0"),
        socket("/nonexistent"),
        socket(""),
        socket("/etc/passwd"),
        socket(&"/x".repeat(5_000)),
    ] {
        for failed in both(options.clone()).await {
            let failed = failed.unwrap_err();
            assert!(matches!(failed, Error::Database { .. }), "{options:?}: {failed:?}");
            assert!(failed.is_retryable(), "{options:?}: {failed:?}");
        }
    }
    // sqlx takes the list for one name.
    let [started, migrated] = both(tcp(port).host("127.0.0.1,127.0.0.1")).await;
    assert!(matches!(started, Err(Error::Misuse { .. })), "{started:?}");
    assert!(matches!(migrated, Err(Error::Misuse { .. })), "{migrated:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_answers_nothing_or_nonsense_is_an_error_in_time() {
    for answer in [
        None,
        Some(&b""[..]),
        Some(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"),
        Some(b"N"),
        Some(b"R\0\0\0\0"),
        Some(b"R\0\0\0\x04"),
        Some(b"R\0\0\0\x08\0\0\0\x63"),
        Some(b"Z\0\0\0\x04"),
        Some(b"K\0\0\0\x05\0"),
        Some(b"E\0\0\0\x04"),
        Some(b"E\0\0\0\x05\0"),
        Some(b"R\0\0\0\x17\0\0\0\x0aSCRAM-SHA-256\0\0"),
        // An end of the log-in, and then nothing.
        Some(b"R\0\0\0\x08\0\0\0\0Z\0\0\0\x05I"),
    ] {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let options = tcp(listener.local_addr().unwrap().port());
        let server = tokio::spawn(async move {
            let mut kept = Vec::new();
            loop {
                let (mut client, _) = listener.accept().await.unwrap();
                let Some(answer) = answer else {
                    kept.push(client);
                    continue;
                };
                // What it says first is of no interest, but is read: a close would be a reset otherwise.
                drop(client.read(&mut [0; 512]).await);
                drop(client.write_all(answer).await);
                if !answer.is_empty() {
                    kept.push(client);
                }
            }
        });
        // A migration has a bound on its connecting, which is over when it is logged in.
        let logged_in = answer.is_some_and(|answer| answer.ends_with(b"Z\0\0\0\x05I"));
        let pool = PgPoolOptions::new().acquire_timeout(BOUND).connect_lazy_with(options);
        let started = within("the start", Owner::builder(&pool).ttl(BOUND).start()).await.unwrap_err();
        assert!(
            matches!(started, Error::Database { .. } | Error::TimedOut { .. }),
            "{answer:?}: {started:?}"
        );
        if !logged_in {
            let migrated = within("the migration", migrate(&pool)).await.unwrap_err();
            assert!(
                matches!(migrated, Error::Database { .. } | Error::TimedOut { .. }),
                "{answer:?}: {migrated:?}"
            );
        }
        server.abort();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_names_and_passwords_are_told_with_their_code() {
    let server = tokio::task::spawn_blocking(|| Server::start().unwrap()).await.unwrap();
    let admin = pool(server.options());
    migrate(&admin).await.unwrap();
    admin.execute("CREATE ROLE app LOGIN PASSWORD 'secret'").await.unwrap();
    admin.execute("SELECT fencepost.allow('app')").await.unwrap();
    let rules = "local all app scram-sha-256\nlocal all nobody reject\nlocal all all trust\n";
    std::fs::write(server.data_dir().join("pg_hba.conf"), rules).unwrap();
    admin.execute("SELECT pg_reload_conf()").await.unwrap();
    let app = server.options().username("app");
    crate::support::until("the rules are read", async || {
        pool(app.clone().password("wrong")).acquire().await.is_err().then_some(())
    })
    .await;
    for (options, expected) in [
        (app.clone().password("wrong"), "28P01"),
        (app.clone().password(""), "28P01"),
        (server.options().username("nobody"), "28000"),
        (server.options().username("nonexistent"), "28000"),
        (server.options().username(&"x".repeat(300)), "28000"),
        (server.options().username(""), "28000"),
        (server.options().database("nonexistent"), "3D000"),
        (server.options().database(&"x".repeat(300)), "3D000"),
        (server.options().options([("nonsense", "1")]), "42704"),
    ] {
        for failed in both(options).await {
            let failed = failed.unwrap_err();
            assert_eq!(code(&failed), Some(expected), "{failed:?}");
            assert!(!failed.is_retryable(), "{failed:?}");
        }
    }
    for options in [
        app.clone().password("nul\0"),
        server.options().ssl_mode(PgSslMode::Require).socket(server.socket_dir()),
        server.options().ssl_mode(PgSslMode::VerifyFull).ssl_root_cert("/nonexistent"),
    ] {
        for outcome in both(options).await {
            println!("{outcome:?}");
            assert!(matches!(outcome, Err(Error::Database { .. })), "{outcome:?}");
        }
    }
    let right = pool(app.password("secret"));
    let owner = Owner::start(&right).await.unwrap();
    assert!(hold(&owner, "report").await.release().await.unwrap());
    owner.shutdown().await.unwrap();
    right.close().await;
    admin.close().await;
}

// Whatever the options say beside where the server is: it works, or is told.
#[tokio::test(flavor = "multi_thread")]
async fn any_options_work_or_are_a_typed_error() {
    let (database, _pool) = database().await;
    let text = || {
        prop_oneof![Just(None), any::<String>().prop_map(Some), "[a-z'\\\\ =\\x00-\\x1f]{0,9}".prop_map(Some)]
    };
    let values = (text(), text(), text(), text(), 0..3_usize);
    tokio::task::block_in_place(|| {
        let mut runner = TestRunner::new(ProptestConfig::with_cases(64));
        let checked = runner.run(&values, |(user, name, password, setting, cached)| {
            let mut options = database.options().statement_cache_capacity(cached);
            if let Some(user) = user {
                options = options.username(&user);
            }
            if let Some(name) = name {
                options = options.database(&name);
            }
            if let Some(password) = password {
                options = options.password(&password);
            }
            if let Some(setting) = setting {
                options = options.options([("search_path", setting)]);
            }
            for outcome in Handle::current().block_on(both(options)) {
                if let Err(error) = outcome {
                    prop_assert!(
                        code(&error).is_some() || matches!(error, Error::Database { .. }),
                        "{error:?}"
                    );
                    prop_assert!(!matches!(error, Error::Stopped | Error::Misuse { .. }), "{error:?}");
                }
            }
            Ok(())
        });
        checked.unwrap();
    });
}
