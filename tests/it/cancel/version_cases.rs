//! The cases of optimistic versions.

use fencepost::version::{Changes, CheckVersion as _, Current, Versioned};
use fencepost::{Error, Version};
use sqlx::Executor as _;

use super::Cut;
use super::scene::Scene;

const VALUES: &str = "SELECT count(*) FROM versioned WHERE n = 0 AND version = 1";

/// Three rows, untouched.
async fn table(scene: &Scene) -> Versioned {
    let text =
        "CREATE TABLE IF NOT EXISTS versioned (id bigint PRIMARY KEY, n bigint, version bigint NOT NULL);
                TRUNCATE versioned; INSERT INTO versioned SELECT generate_series(1, 3), 0, 1";
    scene.observer.execute(text).await.unwrap();
    Versioned::on("versioned").unwrap()
}

fn changes() -> Changes {
    Changes::new().set("n", 7_i64)
}

// Safe: they only read.

pub(super) async fn load(scene: &Scene, cut: Cut) -> bool {
    let (table, mut conn) = (table(scene).await, scene.pool.acquire().await.unwrap());
    cut.cut(table.load::<(i64,), _>(&mut conn, 2_i64)).await.map(Result::unwrap).is_some()
}

pub(super) async fn check_version(scene: &Scene, cut: Cut) -> bool {
    let (table, mut conn) = (table(scene).await, scene.pool.acquire().await.unwrap());
    let none = conn.execute("UPDATE versioned SET n = 7 WHERE id = 2 AND version = 5").await;
    let checked = none.check_version(&table, &mut conn, 2_i64, Version::new(5));
    cut.cut(checked).await.map(|checked| checked.unwrap().into_result().unwrap_err()).is_some()
}

// Drop the transaction together with the future.

pub(super) async fn update(scene: &Scene, cut: Cut) -> bool {
    let (table, mut tx) = (table(scene).await, scene.pool.begin().await.unwrap());
    let updated = cut.cut(table.update(&mut tx, 2_i64, Version::new(1), changes())).await;
    drop(tx);
    assert_eq!(scene.count(VALUES).await, 3, "rolled back, or not there yet");
    updated.map(|updated| updated.unwrap().into_result().unwrap()).is_some()
}

pub(super) async fn delete(scene: &Scene, cut: Cut) -> bool {
    let (table, mut tx) = (table(scene).await, scene.pool.begin().await.unwrap());
    let deleted = cut.cut(table.delete(&mut tx, 2_i64, Version::new(1))).await;
    drop(tx);
    assert_eq!(scene.count(VALUES).await, 3, "rolled back, or not there yet");
    deleted.map(|deleted| deleted.unwrap().into_result().unwrap()).is_some()
}

pub(super) async fn update_many(scene: &Scene, cut: Cut) -> bool {
    let (table, mut tx) = (table(scene).await, scene.pool.begin().await.unwrap());
    let rows = [3, 1].map(|id: i64| (id, Version::new(1)));
    let updated = cut.cut(table.update_many(&mut tx, &rows, changes())).await;
    drop(tx);
    assert_eq!(scene.count(VALUES).await, 3, "rolled back, or not there yet");
    updated.inspect(|many| assert!(many.as_ref().unwrap().is_complete())).is_some()
}

// It may have happened, as if its answer were lost; once at most.
pub(super) async fn update_with(scene: &Scene, cut: Cut) -> bool {
    update_of(&table(scene).await, scene, cut).await
}

pub(super) async fn update_with_behind_a_pooler(scene: &Scene, cut: Cut) -> bool {
    update_of(&table(scene).await.transaction_pooler(true), scene, cut).await
}

async fn update_of(table: &Versioned, scene: &Scene, cut: Cut) -> bool {
    let decide = |read: Current<(i64,)>| {
        assert_eq!(read.version, Version::new(1));
        Ok::<_, Error>(changes())
    };
    let updated = cut.cut(table.update_with(&scene.pool, 2_i64, decide)).await;
    // Behind it on the one connection.
    scene.pool.execute("SELECT").await.unwrap();
    let changed = scene.count("SELECT count(*) FROM versioned WHERE n = 7 AND version = 2").await;
    assert_eq!(scene.count(VALUES).await + changed, 3);
    assert!(changed == 1 || updated.is_none());
    updated.inspect(|updated| assert_eq!(*updated.as_ref().unwrap(), Some(Version::new(2)))).is_some()
}
