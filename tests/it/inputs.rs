//! Bad input: a typed error before any statement is sent, without a word of SQL.

use std::time::Duration;

use fencepost::row::{Order, RowLock};
use fencepost::{Error, Lease, LockName, Owner};
use proptest::prelude::*;
use sqlx::PgPool;
use sqlx::postgres::PgConnectOptions;

/// A pool that reaches nobody: whoever sends a statement through it gets a database error, not a misuse.
fn nowhere() -> PgPool {
    PgPool::connect_lazy_with(PgConnectOptions::new_without_pgpass().socket("/nonexistent").database("none"))
}

fn is_plain_misuse(error: &Error) -> bool {
    let text = error.to_string();
    matches!(error, Error::Misuse { .. })
        && !text.contains("SELECT")
        && error.sqlstate().is_none()
        && !error.is_retryable()
}

#[tokio::test]
async fn an_owner_refuses_what_is_out_of_range_before_it_connects() {
    let pool = nowhere();
    let ms = Duration::from_millis;
    for ttl in [Duration::ZERO, Duration::from_nanos(1), ms(9), Owner::MAX_TTL + ms(1), Duration::MAX] {
        let refused = Owner::builder(&pool).ttl(ttl).start().await.unwrap_err();
        assert!(is_plain_misuse(&refused), "{ttl:?}: {refused:?}");
    }
    for label in ["", "a\nb", "nul\0", &"x".repeat(256)] {
        let refused = Owner::builder(&pool).label(label).start().await.unwrap_err();
        assert!(is_plain_misuse(&refused), "{label:?}: {refused:?}");
    }
    // sqlx takes a list of hosts for one name.
    let several = PgPool::connect_lazy_with(PgConnectOptions::new_without_pgpass().host("a,b"));
    let refused = Owner::start(&several).await.unwrap_err();
    assert!(is_plain_misuse(&refused) && refused.to_string().contains("host"), "{refused:?}");
}

#[test]
fn a_lease_refuses_what_is_out_of_range() {
    let lease = Lease::named("report").unwrap();
    for at_most in [
        Duration::ZERO,
        Duration::from_micros(999),
        Lease::MAX_AT_MOST + Duration::from_secs(1),
        Duration::MAX,
    ] {
        let refused = lease.clone().at_most(at_most).unwrap_err();
        assert!(is_plain_misuse(&refused), "{at_most:?}: {refused:?}");
    }
    let large = "x".repeat(Lease::MAX_METADATA_BYTES);
    assert!(is_plain_misuse(&lease.clone().metadata(&large).unwrap_err()));
    assert!(is_plain_misuse(&lease.clone().metadata(&"nul\0").unwrap_err()));
    let not_json = std::collections::HashMap::from([((1, 2), 3)]);
    assert!(is_plain_misuse(&lease.metadata(&not_json).unwrap_err()));
}

#[test]
fn a_row_lock_refuses_names_and_bounds_that_cannot_be() {
    let accounts = RowLock::on("accounts").unwrap();
    for name in ["", "nul\0", &"x".repeat(64), &"ä".repeat(32)] {
        assert!(is_plain_misuse(&RowLock::on(name).unwrap_err()), "{name:?}");
        assert!(is_plain_misuse(&accounts.clone().key(name).unwrap_err()), "{name:?}");
        assert!(is_plain_misuse(&Order::ascending(name).unwrap_err()), "{name:?}");
        assert!(is_plain_misuse(&Order::descending(name).unwrap_err()), "{name:?}");
    }
    for table in [".", "a.", ".a", "a.b.c", "a..b"] {
        assert!(is_plain_misuse(&RowLock::on(table).unwrap_err()), "{table:?}");
    }
    for most in [RowLock::MAX_AT_MOST + Duration::from_nanos(1), Duration::MAX] {
        assert!(is_plain_misuse(&accounts.clone().at_most(most).unwrap_err()), "{most:?}");
    }
}

proptest! {
    #[test]
    fn any_text_is_a_name_or_a_misuse(text in any::<String>()) {
        let good = !text.is_empty() && text.len() <= LockName::MAX_BYTES && !text.chars().any(char::is_control);
        match LockName::new(&text) {
            Ok(name) => { prop_assert!(good); prop_assert_eq!(name.as_str(), text.as_str()) }
            Err(refused) => { prop_assert!(!good); prop_assert!(is_plain_misuse(&refused)) }
        }
    }

    #[test]
    fn any_text_is_a_grant_or_a_misuse(text in "[0-9]{0,25}/?[0-9a-f-]{0,40}") {
        match text.parse::<fencepost::Grant>() {
            Ok(grant) => prop_assert_eq!(grant.to_string().parse::<fencepost::Grant>().unwrap(), grant),
            Err(refused) => prop_assert!(is_plain_misuse(&refused)),
        }
    }
}

// Whatever a name holds, it reaches the database as it is: nothing of it is ever quoted.
#[tokio::test(flavor = "multi_thread")]
async fn strange_names_travel_unharmed() {
    let (_database, pool) = crate::support::database().await;
    let a = crate::support::owner(&pool, "o'brien \"the\" \\ $1", crate::support::LONG).await;
    for name in ["'", "''; DROP SCHEMA fencepost; --", "$1", "\\", "%", "köln/日本 🦀", &"x".repeat(255)]
    {
        let lease = Lease::named(name).unwrap().metadata(&name).unwrap();
        let held = lease.try_acquire(&a).await.unwrap().unwrap();
        let mut tx = held.begin(&pool).await.unwrap();
        let stored: String = sqlx::query_scalar(
            "SELECT name FROM fencepost.leases WHERE token = $1 AND metadata #>> '{}' = name",
        )
        .bind(held.token())
        .fetch_one(&mut *tx)
        .await
        .unwrap();
        assert_eq!(stored, name);
        tx.commit().await.unwrap();
        assert!(held.release().await.unwrap());
    }
}
