//! Bad input: a typed error before any statement is sent, without a word of SQL. Whatever is accepted reaches the
//! database as it is.

use std::time::Duration;

use fencepost::row::{Order, RowLock};
use fencepost::version::{Changes, Versioned};
use fencepost::{Error, FencingToken, Grant, Group, Lease, LockName, Owner, Version, Wait};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use serde_json::Value;
use sqlx::PgPool;
use sqlx::postgres::PgConnectOptions;
use tokio::runtime::Handle;

use crate::support::{LONG, database, hold_when_free, owner, within};

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

#[tokio::test]
async fn changes_that_cannot_be_are_refused_before_anything_is_sent() {
    let table = || Versioned::on("accounts").unwrap();
    for name in ["", "a.b.c", &"x".repeat(64)] {
        assert!(is_plain_misuse(&Versioned::on(name).unwrap_err()), "{name:?}");
    }
    for name in ["", "nul\0", &"x".repeat(64)] {
        assert!(is_plain_misuse(&table().key(name).unwrap_err()), "{name:?}");
        assert!(is_plain_misuse(&table().version(name).unwrap_err()), "{name:?}");
    }
    // There is no such table: whatever is sent is another error.
    let (_database, pool) = database().await;
    let mut conn = pool.acquire().await.unwrap();
    let one = Version::new(1);
    for changes in [
        || Changes::new().set("version", 7_i64),
        || Changes::new().set("id", 7_i64),
        || Changes::new().set("n", 7_i64).set("n", 8_i64),
        || Changes::new().set("nul\0", 7_i64).set("n", 8_i64),
        || Changes::new().set("n", 7_i64).set("", 8_i64),
        || Changes::new().set("n", NotEncodable),
        || Changes::new().set_each("n", &[7_i64]),
    ] {
        let table = table();
        let refused = table.update(&mut conn, 7_i64, one, changes()).await.unwrap_err();
        assert!(is_plain_misuse(&refused), "{refused:?}");
        let refused = table.update_many(&mut conn, &[(7_i64, one), (8, one)], changes()).await.unwrap_err();
        assert!(is_plain_misuse(&refused), "{refused:?}");
    }
    let twice = [(7_i64, one), (8, one), (7, one)];
    let refused = table().update_many(&mut conn, &twice, Changes::new()).await.unwrap_err();
    assert!(is_plain_misuse(&refused), "{refused:?}");
}

struct NotEncodable;

impl sqlx::Type<sqlx::Postgres> for NotEncodable {
    fn type_info() -> sqlx::postgres::PgTypeInfo {
        <i64 as sqlx::Type<sqlx::Postgres>>::type_info()
    }
}

impl sqlx::Encode<'_, sqlx::Postgres> for NotEncodable {
    fn encode_by_ref(
        &self,
        _: &mut sqlx::postgres::PgArgumentBuffer,
    ) -> Result<sqlx::encode::IsNull, sqlx::error::BoxDynError> {
        Err("never".into())
    }
}

/// Any time there is, and more often those at the edges.
fn durations() -> impl Strategy<Value = Duration> {
    let any = (any::<u64>(), 0..1_000_000_000_u32).prop_map(|(secs, nanos)| Duration::new(secs, nanos));
    let short = (0..2_000_000_000_u64).prop_map(Duration::from_nanos);
    let days = (0..500_u64, 0..2_u32).prop_map(|(days, nanos)| Duration::new(days * 86_400, nanos));
    let edges = [Duration::ZERO, Duration::MAX, Owner::MIN_TTL, Owner::MAX_TTL, Lease::MAX_AT_MOST];
    prop_oneof![any, short, days, proptest::sample::select(edges.to_vec())]
}

/// Any JSON, with strings that look like an escaped character more often than most.
fn json() -> impl Strategy<Value = Value> {
    let parts = proptest::sample::select(vec!["\\", "u0000", "\0", "\"", "🦀", "\n", " "]);
    let text =
        prop_oneof![any::<String>(), prop::collection::vec(parts, 0..6).prop_map(|parts| parts.concat())];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        text.clone().prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 24, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::btree_map(text.clone(), inner, 0..6)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

fn has_nul(json: &Value) -> bool {
    match json {
        Value::String(text) => text.contains('\0'),
        Value::Array(values) => values.iter().any(has_nul),
        Value::Object(map) => map.iter().any(|(key, value)| key.contains('\0') || has_nul(value)),
        _ => false,
    }
}

fn is_good(text: &str) -> bool {
    !text.is_empty() && text.len() <= LockName::MAX_BYTES && !text.chars().any(|c| c.is_ascii_control())
}

#[test]
fn a_group_refuses_what_cannot_be() {
    let long = "x".repeat(Group::MAX_NAME_BYTES + 1);
    for name in ["", "tab\tbed", "nul\0", &long] {
        let refused = Group::named(name, 1).unwrap_err();
        assert!(is_plain_misuse(&refused), "{name:?}: {refused:?}");
    }
    for partitions in [0, Group::MAX_PARTITIONS + 1, u32::MAX] {
        let refused = Group::named("orders", partitions).unwrap_err();
        assert!(is_plain_misuse(&refused), "{partitions}: {refused:?}");
    }
    let group = Group::named(&"x".repeat(Group::MAX_NAME_BYTES), Group::MAX_PARTITIONS).unwrap();
    let refused = group.clone().drain_within(Group::MAX_DRAIN + Duration::from_nanos(1)).unwrap_err();
    assert!(is_plain_misuse(&refused), "{refused:?}");
    assert!(group.drain_within(Group::MAX_DRAIN).is_ok());
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
    fn any_text_is_a_name_or_a_misuse(text in prop_oneof![any::<String>(), "\\PC{250,260}", "[a-z\x00-\x1f\x7f-\u{9f}]{1,3}"]) {
        match LockName::new(&text) {
            Ok(name) => { prop_assert!(is_good(&text)); prop_assert_eq!(name.as_str(), text.as_str()) }
            Err(refused) => { prop_assert!(!is_good(&text)); prop_assert!(is_plain_misuse(&refused)) }
        }
    }

    #[test]
    fn any_text_is_a_grant_or_a_misuse(text in prop_oneof![any::<String>(), "-?[0-9]{0,25}/?[0-9a-fA-F{}:un-]{0,40}"]) {
        match text.parse::<Grant>() {
            Ok(grant) => prop_assert_eq!(grant.to_string().parse::<Grant>().unwrap(), grant),
            Err(refused) => prop_assert!(is_plain_misuse(&refused)),
        }
        prop_assert_eq!(
            serde_json::from_value::<Grant>(Value::from(text.clone())).ok(), text.parse::<Grant>().ok()
        );
    }

    #[test]
    fn any_number_is_a_token_or_a_misuse(number in any::<i64>(), other in json()) {
        let token = FencingToken::new(number);
        prop_assert_eq!(token.is_ok(), number > 0);
        prop_assert_eq!(serde_json::from_value::<FencingToken>(number.into()).ok(), token.as_ref().ok().copied());
        match token {
            Ok(token) => prop_assert_eq!(serde_json::to_value(token).unwrap(), Value::from(number)),
            Err(refused) => prop_assert!(is_plain_misuse(&refused)),
        }
        // Other JSON is none, and no panic.
        if other.as_i64().is_none() {
            prop_assert!(serde_json::from_value::<FencingToken>(other.clone()).is_err());
        }
        if !other.is_string() {
            prop_assert!(serde_json::from_value::<Grant>(other).is_err());
        }
    }

    #[test]
    fn any_time_is_a_cap_or_a_misuse(at_most in durations()) {
        let good = at_most >= Duration::from_millis(1) && at_most <= Lease::MAX_AT_MOST;
        match Lease::named("report").unwrap().at_most(at_most) {
            Ok(_) => prop_assert!(good),
            Err(refused) => prop_assert!(!good && is_plain_misuse(&refused)),
        }
    }

    #[test]
    fn any_json_is_metadata_or_a_misuse(json in json()) {
        let good = !has_nul(&json) && json.to_string().len() <= Lease::MAX_METADATA_BYTES;
        match Lease::named("report").unwrap().metadata(&json) {
            Ok(_) => prop_assert!(good),
            Err(refused) => prop_assert!(!good && is_plain_misuse(&refused)),
        }
    }
}

/// Checks `property` on this many values, each to its end.
fn holds<S: Strategy>(cases: u32, values: S, property: impl AsyncFn(S::Value)) {
    tokio::task::block_in_place(|| {
        let mut runner = TestRunner::new(ProptestConfig::with_cases(cases));
        let checked = runner.run(&values, |value| {
            Handle::current().block_on(property(value));
            Ok(())
        });
        checked.unwrap();
    });
}

// A label and a ttl: refused without a word to the database, or the start goes on to the database.
#[tokio::test(flavor = "multi_thread")]
async fn any_label_and_ttl_begin_an_owner_or_are_a_misuse() {
    let pool = nowhere();
    let labels = prop_oneof![any::<String>(), "[a-zé\x00-\x1f\x7f]{1,3}", "\\PC{120,130}"];
    holds(128, (labels, durations()), async |(label, ttl)| {
        let refused = Owner::builder(&pool).label(&label).ttl(ttl).start();
        let refused = within("a start", refused).await.unwrap_err();
        if is_good(&label) && ttl >= Owner::MIN_TTL && ttl <= Owner::MAX_TTL {
            assert!(matches!(refused, Error::Database { .. }) && refused.is_retryable(), "{refused:?}");
        } else {
            assert!(is_plain_misuse(&refused), "{label:?} {ttl:?}: {refused:?}");
        }
    });
}

// Names, caps, waits and graces of any length, on a real database: acquired, with what was said, and no overflow.
#[tokio::test(flavor = "multi_thread")]
async fn whatever_is_accepted_works_and_arrives_unharmed() {
    let (_database, pool) = database().await;
    let a = owner(&pool, "a", LONG).await;
    let names =
        prop_oneof![any::<String>(), "[-'\"\\\\$%;日🦀 ]{1,20}"].prop_filter("a name", |name| is_good(name));
    let json = json().prop_filter("no NUL", |json| !has_nul(json) && json.to_string().len() < 8_000);
    holds(
        64,
        (names, json, durations(), durations(), durations()),
        async |(name, json, cap, wait, grace)| {
            let mut lease = Lease::named(&name).unwrap().metadata(&json).unwrap().grace(grace);
            if let Ok(capped) = lease.clone().at_most(cap.max(LONG)) {
                lease = capped;
            }
            let free = hold_when_free(&a, &name).await;
            assert!(free.release().await.unwrap());
            let held = match within("acquired", lease.acquire(&a, Wait::at_most(wait))).await {
                // Of a wait that is over before it begins.
                Err(error) => {
                    assert!(error.is_timeout() && wait < Duration::from_secs(2), "{wait:?}: {error:?}");
                    return;
                }
                Ok(held) => held,
            };
            assert!(held.is_held() && held.remaining() <= LONG);
            let mut tx = held.begin(&pool).await.unwrap();
            let (stored, metadata): (String, String) =
                sqlx::query_as("SELECT name, metadata::text FROM fencepost.leases WHERE token = $1")
                    .bind(held.token())
                    .fetch_one(&mut *tx)
                    .await
                    .unwrap();
            assert_eq!(stored, name);
            let metadata: Value = serde_json::from_str(&metadata).unwrap();
            assert!(alike(&metadata, &json), "{metadata} {json}");
            fencepost::fence::advance(&mut tx, held.name(), held.token()).await.unwrap();
            tx.commit().await.unwrap();
            within("run", held.run(async |_: &fencepost::HeldLease| ())).await.unwrap();
        },
    );
}

/// The same JSON, as far as `jsonb` promises: a float may come back as another number type.
fn alike(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => {
            let (a, b) = (a.as_f64().unwrap(), b.as_f64().unwrap());
            (a - b).abs() <= b.abs() * 1e-12
        }
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| alike(a, b)),
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(key, a)| b.get(key).is_some_and(|b| alike(a, b)))
        }
        _ => a == b,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn any_age_prunes_or_is_a_misuse() {
    let (_database, pool) = database().await;
    holds(64, durations(), async |age| {
        let mut conn = pool.acquire().await.unwrap();
        match within("pruning", fencepost::prune(&mut conn, age)).await {
            Ok(pruned) => assert_eq!((pruned.owners, pruned.leases), (0, 0)),
            Err(refused) => assert!(is_plain_misuse(&refused) && age > LONG, "{age:?}: {refused:?}"),
        }
    });
}
