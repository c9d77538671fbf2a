//! Partitions: shared out evenly, one writer each, whoever joins, leaves, dies, sleeps or never lets go.

use std::collections::BTreeMap;
use std::time::Duration;

use fencepost::{Change, Error, Group, Lease, LossReason, Member, Owner, Partition};
use sqlx::types::Uuid;
use sqlx::{Executor as _, PgPool, Row as _};

use crate::support::{LONG, TOUGH, database, owner, owner_id, terminate, until, until_true, within};

fn group(partitions: u32) -> Group {
    Group::named("orders", partitions).unwrap()
}

/// What a member has, by number; it lets go of what is revoked at once.
struct Has {
    member: Member,
    partitions: BTreeMap<u32, Partition>,
}

impl Has {
    async fn join(group: &Group, owner: &Owner) -> Self {
        let member = within("joining", group.join(owner)).await.unwrap();
        Self { member, partitions: BTreeMap::new() }
    }

    async fn change(&mut self) -> Change {
        self.member.next().await.unwrap()
    }

    /// Takes in the next change.
    async fn live(&mut self) {
        match self.change().await {
            Change::Assigned(partition) => {
                assert!(partition.is_held());
                let twice = self.partitions.insert(partition.number(), partition);
                assert!(twice.is_none(), "assigned twice");
            }
            Change::Revoked { number, .. } | Change::Lost { number, .. } => {
                drop(self.partitions.remove(&number).expect("it had that one"));
            }
            other => panic!("{other:?}"),
        }
    }

    async fn leave(self) {
        drop(self.partitions);
        within("leaving", self.member.leave()).await.unwrap();
    }
}

/// Lets them live until all is settled.
async fn settle(pool: &PgPool, members: &mut [&mut Has]) {
    let even = async |members: &mut [&mut Has]| loop {
        let futures: Vec<_> = members.iter_mut().map(|has| Box::pin(has.live())).collect();
        first(futures).await;
    };
    let settled = until("settled", async || {
        sqlx::query_scalar::<_, bool>(SETTLED).fetch_one(pool).await.unwrap().then_some(())
    });
    // What was settled before may not be any more when the members have looked: they look while they live here.
    tokio::select! {
        () = async { even(members).await } => {}
        () = settled => {}
    }
}

/// The group is settled among the members that live now.
const SETTLED: &str = "SELECT coalesce(bool_and(g.settled = (\
        SELECT array_agg(m.owner ORDER BY m.owner) FROM fencepost.members m JOIN fencepost.owners o ON o.id = m.owner \
         WHERE m.group_name = g.name AND o.expires_at > clock_timestamp())), false) FROM fencepost.groups g";

/// The first of them that completes.
async fn first<T>(mut futures: Vec<impl Future<Output = T> + Unpin>) -> T {
    std::future::poll_fn(move |cx| {
        for future in &mut futures {
            if let std::task::Poll::Ready(output) = std::pin::Pin::new(future).poll(cx) {
                return std::task::Poll::Ready(output);
            }
        }
        std::task::Poll::Pending
    })
    .await
}

/// How many partitions each label has, by the database.
async fn counts(pool: &PgPool) -> Vec<(String, i64)> {
    sqlx::query_as(
        "SELECT l.label, count(*) FROM fencepost.leases l JOIN fencepost.owners o ON o.id = l.owner \
          WHERE l.name LIKE E'orders\\t%' AND l.released_at IS NULL AND o.expires_at > clock_timestamp() \
          GROUP BY 1 ORDER BY 1",
    )
    .fetch_all(pool)
    .await
    .unwrap()
}

fn labelled(counts: &[(&str, i64)]) -> Vec<(String, i64)> {
    counts.iter().map(|(label, count)| ((*label).to_owned(), *count)).collect()
}

/// A member of which nothing more is heard: made by SQL, it never beats.
async fn ghost(pool: &PgPool, label: &str, ttl: &str, partitions: i32, takes: i32) -> Uuid {
    let start =
        sqlx::query_scalar("SELECT fencepost.owner_start($1, $2::text::interval)").bind(label).bind(ttl);
    let id: Uuid = start.fetch_one(pool).await.unwrap();
    let join =
        sqlx::query("SELECT FROM fencepost.member_round('orders', $1, $2, 0)").bind(partitions).bind(id);
    join.execute(pool).await.unwrap();
    let take = "SELECT bool_and(a.granted) FROM generate_series(0, $1 - 1) n, \
                fencepost.acquire(fencepost.partition_lease('orders', n), $2) a";
    if takes > 0 {
        let took: bool = sqlx::query_scalar(take).bind(takes).bind(id).fetch_one(pool).await.unwrap();
        assert!(took);
    }
    id
}

// Frozen: whoever changes this moves every key of every user.
#[tokio::test]
async fn a_key_belongs_where_it_always_did_in_rust_and_in_sql() {
    let (_database, pool) = database().await;
    let vectors = [
        ("", [2, 1, 1090]),
        ("a", [18, 2, 274]),
        ("customer-17", [43, 0, 2731]),
        ("order:1", [7, 6, 2439]),
        ("köln", [24, 1, 856]),
    ];
    for (key, numbers) in vectors {
        for (partitions, number) in [64, 7, 4096].into_iter().zip(numbers) {
            assert_eq!(group(partitions).partition_for(key), number, "{key:?} of {partitions}");
            let sql = sqlx::query_scalar("SELECT fencepost.partition_for($1, $2)").bind(key.as_bytes());
            let sql: i32 = sql.bind(i32::try_from(partitions).unwrap()).fetch_one(&pool).await.unwrap();
            assert_eq!(u32::try_from(sql).unwrap(), number, "{key:?} of {partitions} in SQL");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn members_share_out_and_whoever_leaves_is_replaced() {
    let (_database, pool) = database().await;
    let owners =
        [owner(&pool, "a", TOUGH).await, owner(&pool, "b", TOUGH).await, owner(&pool, "c", TOUGH).await];
    let group = group(7);
    let mut a = Has::join(&group, &owners[0]).await;
    settle(&pool, &mut [&mut a]).await;
    assert_eq!(counts(&pool).await, labelled(&[("a", 7)]));
    let mut b = Has::join(&group, &owners[1]).await;
    settle(&pool, &mut [&mut a, &mut b]).await;
    assert_eq!(counts(&pool).await, labelled(&[("a", 4), ("b", 3)]));
    let mut c = Has::join(&group, &owners[2]).await;
    settle(&pool, &mut [&mut a, &mut b, &mut c]).await;
    let shared = counts(&pool).await;
    assert_eq!(shared.iter().map(|(_, count)| count).sum::<i64>(), 7, "{shared:?}");
    assert!(shared.iter().all(|(_, count)| (2..=3).contains(count)), "{shared:?}");
    // C39: and there it stays: who has what it had finds it settled, and does nothing (see below).
    until_true(
        &pool,
        "everybody has looked",
        "SELECT bool_and(m.held = (SELECT count(*) FROM fencepost.leases l \
                                    WHERE l.owner = m.owner AND l.released_at IS NULL)) FROM fencepost.members m",
    )
    .await;
    let tokens = async || -> i64 {
        sqlx::query_scalar("SELECT last_value FROM fencepost.fencing_token").fetch_one(&pool).await.unwrap()
    };
    let before = tokens().await;
    let finds = "SELECT bool_and((SELECT r.settled FROM fencepost.member_round('orders', 7, m.owner, m.held) r)) \
                 FROM fencepost.members m";
    assert!(sqlx::query_scalar::<_, bool>(finds).fetch_one(&pool).await.unwrap());
    assert_eq!((tokens().await, counts(&pool).await), (before, shared), "it moves though it is settled");
    a.leave().await;
    settle(&pool, &mut [&mut b, &mut c]).await;
    let shared: Vec<i64> = counts(&pool).await.into_iter().map(|(_, count)| count).collect();
    assert_eq!(shared.iter().sum::<i64>(), 7);
    assert!(shared.iter().all(|count| (3..=4).contains(count)), "{shared:?}");
}

// C38: the members are those that live, by the database; a label is not who they are.
#[tokio::test(flavor = "multi_thread")]
async fn two_processes_of_one_label_are_two_members() {
    let (_database, pool) = database().await;
    let owners = [owner(&pool, "web@host", TOUGH).await, owner(&pool, "web@host", TOUGH).await];
    let (mut a, mut b) = (Has::join(&group(4), &owners[0]).await, Has::join(&group(4), &owners[1]).await);
    settle(&pool, &mut [&mut a, &mut b]).await;
    until("both have two", async || {
        tokio::select! {
            () = a.live() => {}
            () = b.live() => {}
            () = tokio::time::sleep(Duration::from_millis(5)) => {}
        }
        (a.partitions.len() == 2 && b.partitions.len() == 2).then_some(())
    })
    .await;
}

// C38: nobody is starved by a member that is dead, also one that dies in the middle of a rebalance.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_dead_member_had_is_shared_out_when_its_ttl_is_over() {
    let (_database, pool) = database().await;
    ghost(&pool, "dead", "400 milliseconds", 8, 5).await;
    let owner = owner(&pool, "living", TOUGH).await;
    let mut living = Has::join(&group(8), &owner).await;
    settle(&pool, &mut [&mut living]).await;
    assert_eq!(counts(&pool).await, labelled(&[("living", 8)]));
    until_true(&pool, "forgotten", "SELECT count(*) = 1 FROM fencepost.members").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_partition_is_drained_before_anybody_else_has_it() {
    let (_database, pool) = database().await;
    let (one, other) = (owner(&pool, "one", TOUGH).await, owner(&pool, "other", TOUGH).await);
    let patient = group(2).drain_within(LONG).unwrap();
    let mut a = Has::join(&patient, &one).await;
    settle(&pool, &mut [&mut a]).await;
    while a.partitions.len() < 2 {
        a.live().await;
    }
    let mut b = Has::join(&patient, &other).await;
    let Change::Revoked { number, within: left, .. } = within("the revocation", a.change()).await else {
        panic!("not revoked")
    };
    assert!(left <= LONG);
    let partition = a.partitions.remove(&number).unwrap();
    assert!(within("being told", partition.revoked()).await > Duration::ZERO);
    // It works on, and its writes go through.
    let mut tx = partition.begin(&pool).await.unwrap();
    tx.execute("CREATE TABLE drained ()").await.unwrap();
    tx.commit().await.unwrap();
    // B has looked and asked nobody; the token says that it was not granted in between.
    until_true(&pool, "b is there", "SELECT count(*) = 2 FROM fencepost.members").await;
    assert_eq!(counts(&pool).await, labelled(&[("one", 2)]));
    let token = partition.token();
    assert!(partition.release().await.unwrap());
    within("the hand-over", b.live()).await;
    let theirs = b.partitions.get(&number).expect("the one that was released");
    assert!(theirs.token() > token);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partition_that_is_never_drained_is_released_at_the_deadline_and_its_fence_rejects() {
    let (_database, pool) = database().await;
    let (one, other) = (owner(&pool, "one", TOUGH).await, owner(&pool, "other", TOUGH).await);
    let hasty = group(2).drain_within(Duration::from_millis(50)).unwrap();
    let mut a = Has::join(&hasty, &one).await;
    while a.partitions.len() < 2 {
        within("all", a.live()).await;
    }
    let mut b = Has::join(&hasty, &other).await;
    let Change::Revoked { number, .. } = within("the revocation", a.change()).await else {
        panic!("not revoked")
    };
    // It goes on as if nothing had been said.
    within("the hand-over", b.live()).await;
    let late = &a.partitions[&number];
    assert!(!late.is_held());
    assert_eq!(within("the loss", late.lost()).await, LossReason::Released);
    assert!(late.begin(&pool).await.unwrap_err().is_lost());
    let mut tx = pool.begin().await.unwrap();
    let by_the_database =
        fencepost::fence::check(&mut tx, late.lease().name(), late.lease().grant()).await.unwrap_err();
    assert!(matches!(by_the_database, Error::StaleFence { .. }), "{by_the_database:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_was_dead_wakes_up_without_its_partitions_and_joins_again() {
    let (_database, pool) = database().await;
    let owner = owner(&pool, "sleepy", TOUGH).await;
    let mut has = Has::join(&group(3), &owner).await;
    while has.partitions.len() < 3 {
        within("all", has.live()).await;
    }
    let old: Vec<_> = has.partitions.values().map(|partition| partition.lease().grant()).collect();
    // As whoever takes over from a process that was paused for too long does.
    sqlx::query("UPDATE fencepost.owners SET expires_at = 'epoch'").execute(&pool).await.unwrap();
    let taken = ghost(&pool, "other", "1 minute", 3, 1).await;
    let late = &has.partitions[&0];
    let refused = within("the fence", late.begin(&pool)).await.unwrap_err();
    assert!(refused.is_lost(), "{refused:?}");
    let mut lost = 0;
    while lost < 3 {
        match within("a loss", has.change()).await {
            Change::Lost { .. } => lost += 1,
            other => panic!("{other:?}"),
        }
    }
    has.partitions.clear();
    // The other one has more, so the larger share is its own.
    within("a partition", has.live()).await;
    assert_eq!(has.partitions.len(), 1);
    assert!(has.partitions.values().all(|partition| !old.contains(&partition.lease().grant())));
    let stop = sqlx::query("SELECT FROM fencepost.owner_stop($1)").bind(taken);
    stop.execute(&pool).await.unwrap();
    while has.partitions.len() < 3 {
        within("all", has.live()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn another_number_of_partitions_is_refused_while_members_live() {
    let (_database, pool) = database().await;
    let (one, other) = (owner(&pool, "one", TOUGH).await, owner(&pool, "other", TOUGH).await);
    let mut a = Has::join(&group(4), &one).await;
    settle(&pool, &mut [&mut a]).await;
    for differs in [2, 5] {
        let refused = within("joining", group(differs).join(&other)).await.unwrap_err();
        assert!(
            matches!(&refused, Error::GroupInUse { name, partitions: 4, .. } if name == "orders"),
            "{refused:?}"
        );
        assert_eq!(refused.sqlstate(), Some("LK010"));
        assert!(!refused.is_retryable() && refused.to_string().contains("leave before"), "{refused}");
    }
    // The same owner may try again, and the group goes on.
    let mut b = Has::join(&group(4), &other).await;
    settle(&pool, &mut [&mut a, &mut b]).await;
    assert_eq!(counts(&pool).await, labelled(&[("one", 2), ("other", 2)]));
    a.leave().await;
    b.leave().await;
    let mut c = Has::join(&group(2), &other).await;
    settle(&pool, &mut [&mut c]).await;
    assert_eq!(counts(&pool).await, labelled(&[("other", 2)]));
}

// A key belongs to another partition then: its old writer must be through.
#[tokio::test(flavor = "multi_thread")]
async fn the_number_is_not_changed_beside_a_write_by_the_old_one() {
    let (_database, pool) = database().await;
    let dead = ghost(&pool, "dead", "1 minute", 4, 4).await;
    let name = "orders\t3";
    let query = "SELECT token, grant_id FROM fencepost.leases WHERE name = $1";
    let row = sqlx::query(query).bind(name).fetch_one(&pool).await.unwrap();
    let fence = "SELECT fencepost.fence($1, $2, $3)";
    let (token, grant): (i64, Uuid) = (row.get(0), row.get(1));
    // An old snapshot, which believes that nothing has happened.
    let mut old = pool.begin().await.unwrap();
    old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ").await.unwrap();
    old.execute("SELECT FROM fencepost.owners").await.unwrap();
    let mut open = pool.begin().await.unwrap();
    sqlx::query(fence).bind(name).bind(token).bind(grant).execute(&mut *open).await.unwrap();
    // Its owner dies with the write open; the idle bound of the fence is its ttl.
    let kill = sqlx::query("UPDATE fencepost.owners SET expires_at = 'epoch' WHERE id = $1").bind(dead);
    kill.execute(&pool).await.unwrap();
    let owner = owner(&pool, "next", TOUGH).await;
    let refused = within("joining", group(2).join(&owner)).await.unwrap_err();
    assert!(matches!(refused, Error::GroupInUse { .. }), "{refused:?}");
    open.rollback().await.unwrap();
    let _member = within("joining", group(2).join(&owner)).await.unwrap();
    let late = sqlx::query(fence).bind(name).bind(token).bind(grant).execute(&mut *old).await.unwrap_err();
    let late = Error::from(late);
    assert!(matches!(late, Error::SerializationFailure { .. }), "{late:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_owner_is_a_member_of_a_group_once() {
    let (_database, pool) = database().await;
    let owner = owner(&pool, "a", TOUGH).await;
    let member = group(2).join(&owner).await.unwrap();
    let twice = within("a refusal", group(2).join(&owner)).await.unwrap_err();
    assert!(matches!(twice, Error::Misuse { .. }), "{twice:?}");
    let another = Group::named("invoices", 2).unwrap().join(&owner).await.unwrap();
    // As soon as it has left, in the background too.
    drop(member);
    let again = within("joining again", group(2).join(&owner)).await.unwrap();
    within("leaving", again.leave()).await.unwrap();
    drop(another);
    within("joining again", group(2).join(&owner)).await.unwrap().leave().await.unwrap();
    owner.shutdown().await.unwrap();
    assert!(matches!(group(2).join(&owner).await, Err(Error::Stopped)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_owners_member_is_told() {
    let (_database, pool) = database().await;
    let owner = owner(&pool, "a", TOUGH).await;
    let mut has = Has::join(&group(1), &owner).await;
    within("the one", has.live()).await;
    owner.shutdown().await.unwrap();
    assert_eq!(within("the loss", has.partitions[&0].lost()).await, LossReason::Stopped);
    let end = async {
        loop {
            if let Err(error) = has.member.next().await {
                return error;
            }
        }
    };
    assert!(matches!(within("the end", end).await, Error::Stopped));
}

// A grant of a partition that nobody here knows is given back, though nobody could choose its name.
#[tokio::test(flavor = "multi_thread")]
async fn a_partition_that_its_process_does_not_know_of_is_given_back() {
    let (_database, pool) = database().await;
    ghost(&pool, "maker of the leases", "1 minute", 3, 0).await;
    let owner = owner(&pool, "a", LONG).await;
    let id = owner_id(&pool, "a").await;
    let lost = sqlx::query("SELECT FROM fencepost.acquire(E'orders\\t1', $1)").bind(id);
    lost.execute(&pool).await.unwrap();
    assert_eq!(counts(&pool).await, labelled(&[("a", 1)]));
    terminate(&pool, "fencepost.%").await;
    let free = "SELECT released_at IS NOT NULL FROM fencepost.leases WHERE name = E'orders\\t1'";
    // The next call finds the session gone, and so does the next beat.
    until("given back", async || {
        drop(Lease::named("another").unwrap().try_acquire(&owner).await);
        sqlx::query_scalar::<_, bool>(free).fetch_one(&pool).await.unwrap().then_some(())
    })
    .await;
}

// Whatever the number of partitions: settled, a round looks at no lease, takes no lock and writes nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_settled_round_looks_at_the_members_only() {
    let (_database, pool) = database().await;
    let id = ghost(&pool, "a", "1 minute", 4096, 4096).await;
    let round = "SELECT settled FROM fencepost.member_round('orders', 4096, $1, 4096)";
    let round = async |conn: &mut sqlx::PgConnection| -> bool {
        sqlx::query_scalar(round).bind(id).fetch_one(conn).await.unwrap()
    };
    // It says what it has; then it is settled.
    assert!(!round(&mut pool.acquire().await.unwrap()).await);
    let mut tx = pool.begin().await.unwrap();
    // Of this session, whatever it did before.
    let scans = async |conn: &mut sqlx::PgConnection| -> i64 {
        let scans = "SELECT coalesce(sum(seq_scan + coalesce(idx_scan, 0)), 0)::bigint FROM pg_stat_xact_all_tables \
                     WHERE schemaname = 'fencepost' AND relname = 'leases'";
        sqlx::query_scalar(scans).fetch_one(conn).await.unwrap()
    };
    let before = scans(&mut tx).await;
    assert!(round(&mut tx).await);
    assert_eq!(scans(&mut tx).await, before);
    let cost = "SELECT pg_current_xact_id_if_assigned() IS NULL, \
                       (SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND mode LIKE 'Row%')";
    let (no_xid, locks): (bool, i64) = sqlx::query_as(cost).fetch_one(&mut *tx).await.unwrap();
    assert_eq!((no_xid, locks), (true, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn members_meet_behind_a_transaction_mode_pooler() {
    let (_database, pool) = database().await;
    // The calls travel as they would there.
    let pooled =
        Owner::builder(&pool).label("pooled").ttl(TOUGH).transaction_pooler(true).start().await.unwrap();
    let direct = owner(&pool, "direct", TOUGH).await;
    let (mut a, mut b) = (Has::join(&group(4), &pooled).await, Has::join(&group(4), &direct).await);
    settle(&pool, &mut [&mut a, &mut b]).await;
    assert_eq!(counts(&pool).await, labelled(&[("direct", 2), ("pooled", 2)]));
    a.leave().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rounds_refuse_what_makes_no_sense() {
    let (_database, pool) = database().await;
    let id = ghost(&pool, "a", "1 minute", 3, 0).await;
    let ask = async |name: Option<&str>, partitions: i32, id: Option<Uuid>| {
        let round = sqlx::query("SELECT FROM fencepost.member_round($1, $2, $3, 0)");
        let error = round.bind(name).bind(partitions).bind(id).execute(&pool).await.unwrap_err();
        error.as_database_error().unwrap().code().unwrap().into_owned()
    };
    let long = "x".repeat(251);
    for name in [None, Some(""), Some("a\tb"), Some(long.as_str())] {
        assert_eq!(ask(name, 3, Some(id)).await, "LK005");
    }
    for partitions in [0, -1, 4097] {
        assert_eq!(ask(Some("orders"), partitions, Some(id)).await, "LK005");
    }
    assert_eq!(ask(Some("orders"), 3, None).await, "LK005");
    assert_eq!(ask(Some("orders"), 3, Some(Uuid::nil())).await, "LK003");
    // And no name that people choose is a partition's.
    assert!(Lease::named("orders\t1").is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn members_that_are_dead_are_pruned() {
    let (_database, pool) = database().await;
    let dead = ghost(&pool, "dead", "1 minute", 2, 0).await;
    let living = ghost(&pool, "living", "1 minute", 2, 0).await;
    sqlx::query("SELECT FROM fencepost.owner_stop($1)").bind(dead).execute(&pool).await.unwrap();
    fencepost::prune(&mut pool.acquire().await.unwrap(), LONG).await.unwrap();
    let left: Vec<Uuid> =
        sqlx::query_scalar("SELECT owner FROM fencepost.members").fetch_all(&pool).await.unwrap();
    assert_eq!(left, [living]);
}
