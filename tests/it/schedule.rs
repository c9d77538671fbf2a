//! Schedules: each slot is completed once, whoever looks, and whatever becomes of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use chrono::{DateTime, Datelike as _, TimeDelta, Timelike as _, Utc};
use fencepost::claim::Claim;
use fencepost::schedule::{Looked, Missed, Schedule, Slot};
use fencepost::testing::TestDatabase;
use fencepost::{Error, Owner};
use sqlx::{Executor as _, PgPool};

use crate::support::{LONG, SHORT, TOUGH, database, hold, owner, until, within};

const DAY: Duration = Duration::from_hours(24);

/// A table of what was done, without a constraint that would hide a second time.
async fn nights() -> (TestDatabase, PgPool) {
    let (database, pool) = database().await;
    pool.execute("CREATE TABLE runs (slot text, by text)").await.unwrap();
    (database, pool)
}

async fn now(pool: &PgPool) -> DateTime<Utc> {
    let micros: i64 = sqlx::query_scalar("SELECT (date_part('epoch', clock_timestamp()) * 1000000)::bigint")
        .fetch_one(pool)
        .await
        .unwrap();
    DateTime::from_timestamp_micros(micros).unwrap()
}

/// So many hours ago, to the hour.
async fn hours_ago(pool: &PgPool, hours: i64) -> DateTime<Utc> {
    let hour = Schedule::every("clock", Duration::from_hours(1)).unwrap();
    hour.next_after(now(pool).await).unwrap() - TimeDelta::hours(hours + 1)
}

/// Looks, writes down what it runs, and completes it with that.
async fn look(schedule: &Schedule, owner: &Owner, pool: &PgPool) -> Looked {
    within("the look", schedule.run_due(owner, pool, |slot| write_down(slot, owner, pool))).await.unwrap()
}

async fn write_down(slot: Slot, owner: &Owner, pool: &PgPool) -> fencepost::Result<()> {
    let mut tx = pool.begin().await?;
    let text = "INSERT INTO runs VALUES ($1, $2)";
    sqlx::query(text).bind(slot.at().to_rfc3339()).bind(owner.label()).execute(&mut *tx).await?;
    slot.complete(&mut tx).await?;
    Ok(tx.commit().await?)
}

async fn runs(pool: &PgPool) -> Vec<String> {
    sqlx::query_scalar("SELECT slot FROM runs ORDER BY slot COLLATE \"C\"").fetch_all(pool).await.unwrap()
}

/// The schedule has been known for ever.
async fn known(schedule: &Schedule, owner: &Owner, pool: &PgPool) {
    let none = schedule.run_due(owner, pool, |_| async { Err(Error::from(sqlx::Error::RowNotFound)) });
    assert!(none.await.unwrap().ran.is_empty(), "nothing was due before it was known");
    pool.execute("UPDATE fencepost.schedules SET since = '1970-01-01'").await.unwrap();
}

// I7: the whole fleet looks at once, again and again.
#[tokio::test(flavor = "multi_thread")]
async fn each_slot_runs_once_in_the_fleet() {
    let (_database, pool) = nights().await;
    let hourly = Schedule::every("hourly", Duration::from_hours(1)).unwrap();
    let hourly = hourly.missed(Missed::All(Duration::from_hours(8))).unwrap();
    known(&hourly, &owner(&pool, "first", LONG).await, &pool).await;
    let mut hosts = tokio::task::JoinSet::new();
    for host in 0..6 {
        let (pool, hourly) = (pool.clone(), hourly.clone());
        hosts.spawn(async move {
            let owner = owner(&pool, &format!("host {host}"), LONG).await;
            let mut ran = 0;
            for _ in 0..3 {
                ran += look(&hourly, &owner, &pool).await.ran.len();
            }
            ran
        });
    }
    let ran: usize = within("the hosts", hosts.join_all()).await.into_iter().sum();
    let mut slots = runs(&pool).await;
    assert_eq!(slots.len(), ran);
    let all = slots.len();
    slots.dedup();
    assert_eq!(slots.len(), all, "one ran twice");
    assert!((8..=9).contains(&all), "eight hours, or nine if one has ended meanwhile: {all}");
}

// C34, C27: the look is early by the database's clock, whatever timer or clock has caused it.
#[tokio::test(flavor = "multi_thread")]
async fn an_early_timer_finds_nothing_and_is_told_when_to_look_again() {
    let (_database, pool) = nights().await;
    let a = owner(&pool, "a", LONG).await;
    let slot = now(&pool).await + TimeDelta::milliseconds(700);
    let once = Schedule::at("once", [slot]).unwrap();
    let early = look(&once, &a, &pool).await;
    assert!(early.ran.is_empty() && early.next == Some(slot), "{early:?}");
    assert!(early.look_again <= Duration::from_millis(700), "{early:?}");
    let looked = until("the slot", async || {
        let looked = look(&once, &a, &pool).await;
        (!looked.ran.is_empty()).then_some(looked)
    })
    .await;
    assert_eq!((looked.ran, looked.next), (vec![slot], None));
    assert!(now(&pool).await >= slot, "not before it was due");
    assert!(look(&once, &a, &pool).await.ran.is_empty());
    assert_eq!(runs(&pool).await.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn missed_slots_are_run_by_policy() {
    let (_database, pool) = nights().await;
    let a = owner(&pool, "a", LONG).await;
    let [first, second, last] = [5, 3, 2].map(|hours| (hours, hours_ago(&pool, hours)));
    let slots = [first.1.await, second.1.await, last.1.await];
    for (name, missed, expected) in [
        ("skip", Missed::Skip, &slots[3..]),
        ("last", Missed::Last(DAY), &slots[2..]),
        ("all", Missed::All(DAY), &slots[..]),
        ("some", Missed::All(Duration::from_hours(4) + Duration::from_mins(30)), &slots[1..]),
        ("too late", Missed::Last(Duration::from_mins(90)), &slots[3..]),
    ] {
        let schedule = Schedule::at(name, slots).unwrap().missed(missed).unwrap();
        assert_eq!(look(&schedule, &a, &pool).await.ran, expected, "{name}");
        assert!(look(&schedule, &a, &pool).await.ran.is_empty(), "{name}, again");
    }
}

// What has been done stays done, though its claim is forgotten, the process is another one, and no clock is asked.
#[tokio::test(flavor = "multi_thread")]
async fn a_restart_and_a_prune_run_nothing_again() {
    let (_database, pool) = nights().await;
    let slots = [hours_ago(&pool, 3).await, hours_ago(&pool, 2).await];
    let schedules = [Missed::All(DAY), Missed::Last(DAY)].map(|missed| {
        let name = if missed == Missed::All(DAY) { "all" } else { "last" };
        Schedule::at(name, slots).unwrap().missed(missed).unwrap()
    });
    let a = owner(&pool, "a", LONG).await;
    for schedule in &schedules {
        look(schedule, &a, &pool).await;
    }
    a.shutdown().await.unwrap();
    let pruned: i64 = sqlx::query_scalar("SELECT fencepost.claim_prune('0')").fetch_one(&pool).await.unwrap();
    assert_eq!(pruned, 3);
    let b = owner(&pool, "b", LONG).await;
    for schedule in &schedules {
        assert!(look(schedule, &b, &pool).await.ran.is_empty());
    }
    assert_eq!(runs(&pool).await.len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_due_before_the_schedule_was_known_is_not_run() {
    let (_database, pool) = nights().await;
    let a = owner(&pool, "a", LONG).await;
    let hourly =
        Schedule::every("hourly", Duration::from_hours(1)).unwrap().missed(Missed::All(DAY)).unwrap();
    known(&hourly, &a, &pool).await;
    assert!(look(&hourly, &a, &pool).await.ran.len() >= 24, "known for ever, it is");
}

// C33, I6: the process dies, or its future is dropped, or the work fails: the slot is run again, and completed once.
#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_was_not_completed_is_run_again() {
    let (_database, pool) = nights().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let once = Schedule::at("once", [hours_ago(&pool, 2).await]).unwrap();
    // It fails, after it has written in a transaction that is rolled back.
    let failed = once.run_due(&a, &pool, |_| async { Err(Error::from(sqlx::Error::RowNotFound)) }).await;
    assert!(matches!(failed, Err(Error::Database { .. })), "{failed:?}");
    // It is dropped in the middle.
    let begun = Arc::new(tokio::sync::Notify::new());
    let dropped = tokio::spawn({
        let (once, a, pool, begun) = (once.clone(), a.clone(), pool.clone(), Arc::clone(&begun));
        async move {
            let never = once.run_due(&a, &pool, |slot| {
                begun.notify_one();
                assert!(slot.is_held() && slot.recovered().is_none());
                std::future::pending::<fencepost::Result<()>>()
            });
            never.await.map(drop)
        }
    });
    within("the begin", begun.notified()).await;
    let busy = look(&once, &b, &pool).await;
    assert!(busy.ran.is_empty() && busy.look_again <= Duration::from_secs(1), "somebody is at it: {busy:?}");
    dropped.abort();
    // Told that it may have had effects.
    let recovered = AtomicU32::new(0);
    until("the slot is run again", async || {
        let looked = once.run_due(&b, &pool, |slot| {
            recovered.fetch_add(u32::from(slot.recovered().is_some()), Ordering::SeqCst);
            // Completed afterwards.
            async { Ok::<_, Error>(()) }
        });
        (!looked.await.unwrap().ran.is_empty()).then_some(())
    })
    .await;
    assert_eq!(recovered.load(Ordering::SeqCst), 1);
    assert!(look(&once, &a, &pool).await.ran.is_empty());
}

// The work says that it is done, and its transaction has not committed: believed is the database.
#[tokio::test(flavor = "multi_thread")]
async fn a_completion_that_was_rolled_back_is_none() {
    let (_database, pool) = nights().await;
    let a = owner(&pool, "a", LONG).await;
    let once = Schedule::at("once", [hours_ago(&pool, 2).await]).unwrap();
    let rolled_back = once.run_due(&a, &pool, |slot| {
        let pool = pool.clone();
        async move {
            let mut tx = pool.begin().await?;
            slot.complete(&mut tx).await?;
            tx.rollback().await?;
            Ok::<_, Error>(())
        }
    });
    let looked = rolled_back.await.unwrap();
    assert!(looked.ran.is_empty() && looked.look_again <= Duration::from_secs(1), "{looked:?}");
    until("it is run again", async || (!look(&once, &a, &pool).await.ran.is_empty()).then_some(())).await;
    assert!(look(&once, &a, &pool).await.ran.is_empty());
    assert_eq!(runs(&pool).await.len(), 1);
}

// C32: whoever was paused past its ttl cannot complete what somebody else has done meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn a_late_completion_is_refused_with_its_effect() {
    let (_database, pool) = nights().await;
    let (a, b) = (owner(&pool, "a", SHORT).await, owner(&pool, "b", TOUGH).await);
    let once = Schedule::at("once", [hours_ago(&pool, 2).await]).unwrap();
    let late = once.run_due(&a, &pool, |slot| {
        let (once, a, b, pool) = (once.clone(), a.clone(), b.clone(), pool.clone());
        async move {
            // The owner is found dead, as after a pause.
            pool.execute("UPDATE fencepost.owners SET expires_at = 'epoch' WHERE label = 'a'").await?;
            until("the other one runs it", async || {
                (!look(&once, &b, &pool).await.ran.is_empty()).then_some(())
            })
            .await;
            write_down(slot, &a, &pool).await
        }
    });
    let refused = within("the look", Box::pin(late)).await.unwrap_err();
    assert!(refused.is_lost(), "{refused:?}");
    let by: Vec<String> = sqlx::query_scalar("SELECT by FROM runs").fetch_all(&pool).await.unwrap();
    assert_eq!(by, ["b"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_at_a_time_waits_for_the_slot_before() {
    let (_database, pool) = nights().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let (first, second) = (hours_ago(&pool, 3).await, hours_ago(&pool, 2).await);
    for (name, alone) in [("together", false), ("alone", true)] {
        let schedule = |slots: &[DateTime<Utc>]| {
            let schedule = Schedule::at(name, slots.iter().copied()).unwrap();
            if alone { schedule.one_at_a_time() } else { schedule }
        };
        // The second one becomes due while the first one runs.
        let (before, after) = (schedule(&[first]), schedule(&[first, second]));
        let during = before.run_due(&a, &pool, |slot| {
            let (b, pool, after) = (b.clone(), pool.clone(), after.clone());
            async move {
                assert_eq!(slot.at(), first);
                let looked = look(&after, &b, &pool).await;
                assert_eq!(looked.ran.is_empty(), alone, "{name}: {looked:?}");
                Ok::<_, Error>(())
            }
        });
        assert_eq!(within("the look", Box::pin(during)).await.unwrap().ran, [first]);
        assert_eq!(look(&after, &b, &pool).await.ran.is_empty(), !alone, "{name}: afterwards it is run");
    }
}

// A completion that may commit keeps the next slot out, though its process is found dead.
#[tokio::test(flavor = "multi_thread")]
async fn one_at_a_time_nothing_is_begun_beside_an_open_completion() {
    let (_database, pool) = nights().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let slots = [hours_ago(&pool, 3).await, hours_ago(&pool, 2).await];
    let schedule = Schedule::at("alone", slots).unwrap().missed(Missed::All(DAY)).unwrap().one_at_a_time();
    let looked = schedule.run_due(&a, &pool, |slot| {
        let (schedule, b, pool) = (schedule.clone(), b.clone(), pool.clone());
        async move {
            assert_eq!(slot.at(), slots[0]);
            let mut tx = pool.begin().await?;
            slot.complete(&mut tx).await?;
            pool.execute("UPDATE fencepost.owners SET expires_at = 'epoch' WHERE label = 'a'").await?;
            let beside = look(&schedule, &b, &pool).await;
            assert!(beside.ran.is_empty() && beside.look_again <= Duration::from_secs(1), "{beside:?}");
            Ok::<_, Error>(tx.commit().await?)
        }
    });
    assert_eq!(within("the look", Box::pin(looked)).await.unwrap().ran, slots[..1]);
    let next = until("the next one", async || {
        let ran = look(&schedule, &b, &pool).await.ran;
        (!ran.is_empty()).then_some(ran)
    });
    assert_eq!(next.await, slots[1..]);
}

// The owner of a process that was paused starts again; its lease is not what it was.
#[tokio::test(flavor = "multi_thread")]
async fn one_at_a_time_who_has_lost_the_lease_between_two_slots_begins_no_more() {
    let (_database, pool) = nights().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let slots = [hours_ago(&pool, 4).await, hours_ago(&pool, 3).await, hours_ago(&pool, 2).await];
    let schedule = Schedule::at("alone", slots).unwrap().missed(Missed::All(DAY)).unwrap().one_at_a_time();
    let (go, going) = tokio::sync::watch::channel(false);
    let others = Arc::new(std::sync::Mutex::new(None));
    let looked = schedule.run_due(&a, &pool, |slot| {
        let (schedule, a, b, pool) = (schedule.clone(), a.clone(), b.clone(), pool.clone());
        let (others, going) = (Arc::clone(&others), going.clone());
        async move {
            assert_eq!(slot.at(), slots[0], "begun beside another one");
            write_down(slot, &a, &pool).await?;
            pool.execute("UPDATE fencepost.owners SET expires_at = 'epoch' WHERE label = 'a'").await?;
            let begun = Arc::new(tokio::sync::Notify::new());
            let at_it = Arc::clone(&begun);
            let other = tokio::spawn(async move {
                let run = schedule.run_due(&b, &pool, |slot| {
                    let (at_it, mut going) = (Arc::clone(&at_it), going.clone());
                    let (b, pool) = (b.clone(), pool.clone());
                    async move {
                        at_it.notify_one();
                        going.wait_for(|go| *go).await.unwrap();
                        write_down(slot, &b, &pool).await
                    }
                });
                run.await.unwrap().ran
            });
            *others.lock().unwrap() = Some(other);
            within("the other one begins", begun.notified()).await;
            Ok::<_, Error>(())
        }
    });
    let looked = within("the look", Box::pin(looked)).await.unwrap();
    assert!(looked.ran == slots[..1], "{looked:?}");
    go.send_replace(true);
    let other = others.lock().unwrap().take().unwrap();
    assert_eq!(within("the other look", other).await.unwrap(), slots[1..]);
    assert_eq!(runs(&pool).await.len(), 3);
}

// Whoever watches a slot has a clone of it, and may go on watching when the look has failed or was given up.
#[tokio::test(flavor = "multi_thread")]
async fn one_at_a_time_ends_with_the_look_whoever_has_a_clone_of_the_slot() {
    let (_database, pool) = nights().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let slots = [hours_ago(&pool, 2).await];
    let schedule = Schedule::at("alone", slots).unwrap().missed(Missed::All(DAY)).unwrap().one_at_a_time();
    for fails in [true, false] {
        let watcher = Arc::new(std::sync::Mutex::new(None));
        let begun = tokio::sync::Notify::new();
        let looked = schedule.run_due(&a, &pool, |slot| {
            *watcher.lock().unwrap() = Some(tokio::spawn(async move { slot.lost().await }));
            begun.notify_one();
            async move {
                if fails { Err(Error::from(sqlx::Error::RowNotFound)) } else { std::future::pending().await }
            }
        });
        tokio::select! {
            failed = looked => assert!(fails && failed.is_err(), "{failed:?}"),
            () = begun.notified(), if !fails => {}
        }
        let watcher = watcher.lock().unwrap().take().unwrap();
        within("the watcher is told", watcher).await.unwrap();
    }
    let ran = until("somebody else runs it", async || {
        let ran = look(&schedule, &b, &pool).await.ran;
        (!ran.is_empty()).then_some(ran)
    });
    assert_eq!(ran.await, slots);
}

// The work may leave its transaction to a task and say that it is done.
#[tokio::test(flavor = "multi_thread")]
async fn one_at_a_time_the_next_slot_waits_for_the_commit_of_the_one_before() {
    let (_database, pool) = nights().await;
    let a = owner(&pool, "a", LONG).await;
    let slots = [hours_ago(&pool, 3).await, hours_ago(&pool, 2).await];
    let schedule = Schedule::at("alone", slots).unwrap().missed(Missed::All(DAY)).unwrap().one_at_a_time();
    let left = Arc::new(std::sync::Mutex::new(None));
    let looked = schedule.run_due(&a, &pool, |slot| {
        let (pool, left) = (pool.clone(), Arc::clone(&left));
        async move {
            assert_eq!(slot.at(), slots[0], "begun while the one before may commit");
            let mut tx = pool.begin().await?;
            slot.complete(&mut tx).await?;
            *left.lock().unwrap() = Some(tx);
            Ok::<_, Error>(())
        }
    });
    let looked = within("the look", Box::pin(looked)).await.unwrap();
    assert!(looked.ran.is_empty(), "{looked:?}");
    let left = left.lock().unwrap().take().unwrap();
    left.commit().await.unwrap();
    assert_eq!(look(&schedule, &a, &pool).await.ran, slots[1..]);
}

// A look may be old when it begins a slot: others have run it, and its claim has been pruned since, as it may be.
#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_was_done_and_pruned_since_the_look_is_not_run_again() {
    let (_database, pool) = nights().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    // The last of them is missed in a moment, and its claim may be pruned then.
    let horizon = Duration::from_secs(3);
    let last = now(&pool).await;
    let slots = [last - TimeDelta::milliseconds(1), last];
    let schedule = Schedule::at("short", slots).unwrap().missed(Missed::All(horizon)).unwrap();
    let looked = schedule.run_due(&a, &pool, |slot| {
        let (schedule, a, b, pool) = (schedule.clone(), a.clone(), b.clone(), pool.clone());
        async move {
            assert_eq!(slot.at(), slots[0], "run again");
            assert_eq!(look(&schedule, &b, &pool).await.ran, slots[1..]);
            let pruned = async || {
                let pruned =
                    fencepost::claim::prune(&mut pool.acquire().await.unwrap(), horizon).await.unwrap();
                (pruned > 0).then_some(())
            };
            until("it is pruned", pruned).await;
            write_down(slot, &a, &pool).await
        }
    });
    assert_eq!(within("the look", Box::pin(looked)).await.unwrap().ran, slots[..1]);
    assert_eq!(runs(&pool).await.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_at_a_time_is_no_lease_that_people_take() {
    let (_database, pool) = nights().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let _of_people = [hold(&b, "report").await, hold(&b, "schedule/report").await];
    let report = Schedule::at("report", [hours_ago(&pool, 2).await]).unwrap().one_at_a_time();
    assert_eq!(look(&report, &a, &pool).await.ran.len(), 1);
}

// One that always fails is put aside, and the others go on; a person can have it tried again.
#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_always_fails_is_poison_and_delays_no_other() {
    let (_database, pool) = nights().await;
    let a = owner(&pool, "a", LONG).await;
    let slots = [hours_ago(&pool, 3).await, hours_ago(&pool, 2).await];
    let schedule = Schedule::at("report", slots).unwrap().missed(Missed::All(DAY)).unwrap();
    let mut failures = 0;
    loop {
        let done = schedule.run_due(&a, &pool, |slot| {
            let (a, pool) = (a.clone(), pool.clone());
            async move {
                if slot.at() == slots[0] {
                    return Err(Error::from(sqlx::Error::RowNotFound));
                }
                write_down(slot, &a, &pool).await
            }
        });
        match done.await {
            Ok(looked) => break assert_eq!(looked.ran, slots[1..]),
            Err(_) => failures += 1,
        }
    }
    assert_eq!(failures, Claim::DEFAULT_MAX_FAILURES);
    assert!(look(&schedule, &a, &pool).await.ran.is_empty());
    let poison = Claim::named(&schedule.key(slots[0])).unwrap();
    assert!(poison.retry(&mut pool.acquire().await.unwrap()).await.unwrap());
    assert_eq!(look(&schedule, &a, &pool).await.ran, slots[..1]);
}

// A cron pattern is a rule like any other.
#[tokio::test(flavor = "multi_thread")]
async fn a_cron_pattern_in_a_time_zone_runs_its_slots() {
    let (_database, pool) = nights().await;
    let a = owner(&pool, "a", LONG).await;
    let nightly = Schedule::cron("nightly", "30 2 * * *", chrono_tz::Europe::Berlin).unwrap();
    let nightly = nightly.missed(Missed::All(Duration::from_hours(49))).unwrap();
    known(&nightly, &a, &pool).await;
    let looked = look(&nightly, &a, &pool).await;
    assert!((1..=3).contains(&looked.ran.len()), "{looked:?}");
    let next = looked.next.unwrap().with_timezone(&chrono_tz::Europe::Berlin);
    assert!(next > now(&pool).await && look(&nightly, &a, &pool).await.ran.is_empty());
}

// I7: of the night without a half past two, and of the one that has two of them, there is one slot each.
#[tokio::test(flavor = "multi_thread")]
async fn the_nights_in_which_clocks_change_are_run_once_each() {
    let (_database, pool) = nights().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let berlin = chrono_tz::Europe::Berlin;
    let nightly = Schedule::cron("nightly", "30 2 * 3,10 *", berlin).unwrap();
    let nightly = nightly.missed(Missed::All(Schedule::MAX_PERIOD)).unwrap();
    known(&nightly, &a, &pool).await;
    tokio::join!(look(&nightly, &a, &pool), look(&nightly, &b, &pool));
    let nights = runs(&pool).await;
    let nights: Vec<_> = nights
        .iter()
        .map(|slot| DateTime::parse_from_rfc3339(slot).unwrap().with_timezone(&berlin).naive_local())
        .collect();
    for pair in nights.windows(2).filter(|pair| pair[0].month() == pair[1].month()) {
        let days = (pair[1].date() - pair[0].date()).num_days();
        // Of a month that has begun again within the year, the rest.
        assert!(days == 1 || days > 300, "{pair:?}");
    }
    // March and October of a year, and of leap years a day.
    assert!((61..=63).contains(&nights.len()), "{nights:?}");
    let of_the_gap = nights.iter().filter(|night| night.month() == 3 && night.hour() == 3);
    assert!(of_the_gap.count() >= 1, "{nights:?}");
    assert!(nights.iter().all(|night| night.minute() == 30 || night.hour() == 3), "{nights:?}");
}

#[test]
fn what_cannot_be_a_schedule_is_a_misuse() {
    let hour = Duration::from_hours(1);
    let is_misuse = |made: fencepost::Result<Schedule>| matches!(made, Err(Error::Misuse { .. }));
    for period in [Duration::ZERO, Duration::from_millis(999), Duration::MAX, hour + Duration::from_nanos(1)]
    {
        assert!(is_misuse(Schedule::every("x", period)), "{period:?}");
        assert!(
            period.is_zero()
                || period < hour
                || is_misuse(Schedule::every("x", hour).unwrap().offset(period))
        );
    }
    for name in ["", "nul\0", &"x".repeat(201)] {
        assert!(is_misuse(Schedule::every(name, hour)), "{name:?}");
    }
    assert!(Schedule::every(&"x".repeat(200), hour).is_ok());
    assert!(is_misuse(Schedule::at("x", [])));
    assert!(is_misuse(Schedule::at("x", [DateTime::from_timestamp_nanos(1)])));
    assert!(is_misuse(Schedule::at("x", [DateTime::UNIX_EPOCH]).unwrap().offset(hour)));
    for horizon in [Duration::ZERO, Duration::MAX] {
        assert!(is_misuse(Schedule::every("x", hour).unwrap().missed(Missed::Last(horizon))));
        assert!(is_misuse(Schedule::every("x", hour).unwrap().missed(Missed::All(horizon))));
    }
    assert!(is_misuse(Schedule::cron("x", "every night", chrono_tz::UTC)));
}
