//! The cases of schedules.

use std::cell::Cell;
use std::time::Duration;

use chrono::DateTime;
use fencepost::schedule::{Missed, Schedule, Slot};
use fencepost::{Error, LossReason, Owner};
use sqlx::PgPool;

use super::scene::Scene;
use super::{Cut, after_polls};
use crate::support::{owner, until, within};

/// One that nobody has run, with a slot that was due a minute ago at least.
async fn fresh(scene: &Scene) -> Schedule {
    let minute = scene.count("SELECT (date_part('epoch', now()) / 60)::bigint").await - 2;
    let slot = DateTime::from_timestamp(minute * 60, 0).unwrap();
    let schedule = Schedule::at(&format!("schedule {}", sqlx::types::Uuid::new_v4()), [slot]).unwrap();
    schedule.missed(Missed::Last(Duration::from_hours(1))).unwrap()
}

/// Does this to a slot, whose completion does not matter.
async fn with_slot(scene: &Scene, owner: &Owner, pool: &PgPool, work: impl AsyncFn(Slot) -> bool) -> bool {
    let completed = Cell::new(false);
    let looked = fresh(scene)
        .await
        .run_due(owner, pool, |slot| {
            let (completed, work) = (&completed, &work);
            async move {
                completed.set(work(slot).await);
                Ok::<_, Error>(())
            }
        })
        .await;
    assert!(looked.is_ok() || !owner.is_alive(), "{looked:?}");
    completed.get()
}

// Safe: the slot counts as crashed, and is run again.
pub(super) async fn run_due(scene: &Scene, cut: Cut) -> bool {
    let schedule = fresh(scene).await;
    let ran = cut.cut(schedule.run_due(&scene.a, &scene.pool, |_| async { Ok::<_, Error>(()) })).await;
    let completed = ran.is_some();
    // Dropped at any moment: done, or done by the next one.
    until("it is done", async || {
        let next = schedule.run_due(&scene.b, &scene.pool, |_| async { Ok::<_, Error>(()) }).await.unwrap();
        (next.ran.is_empty() && next.look_again > Duration::from_secs(1)).then_some(())
    })
    .await;
    completed
}

// Drop the transaction together with the future.

pub(super) async fn slot_fence(scene: &Scene, cut: Cut) -> bool {
    with_slot(scene, &scene.a, &scene.pool, async |slot| {
        let mut tx = scene.pool.begin().await.unwrap();
        cut.cut(slot.fence(&mut tx)).await.map(Result::unwrap).is_some()
    })
    .await
}

pub(super) async fn slot_complete(scene: &Scene, cut: Cut) -> bool {
    with_slot(scene, &scene.a, &scene.pool, async |slot| {
        let mut tx = scene.pool.begin().await.unwrap();
        cut.cut(slot.complete(&mut tx)).await.map(Result::unwrap).is_some()
    })
    .await
}

// Safe: it only watches.
pub(super) async fn slot_lost(scene: &Scene, cut: Cut) -> bool {
    let c = owner(&scene.pool, "c", Duration::from_secs(10)).await;
    with_slot(scene, &c, &scene.pool, async |slot| {
        assert!(after_polls(1, slot.lost()).await.is_none());
        let (told, stopped) = tokio::join!(cut.cut(slot.lost()), c.shutdown());
        stopped.unwrap();
        assert!(told.is_none_or(|reason| reason == LossReason::Stopped), "{told:?}");
        assert_eq!(within("being told", slot.lost()).await, LossReason::Stopped);
        told.is_some()
    })
    .await
}
