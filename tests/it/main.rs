//! smoke
use fencepost::*;
use sqlx::PgPool;
#[tokio::test(flavor = "multi_thread")]
async fn smoke() {
    let pool = PgPool::connect(&std::env::var("DATABASE_URL").unwrap()).await.unwrap();
    sqlx::raw_sql("DROP SCHEMA IF EXISTS fencepost CASCADE; create table if not exists t(n int)").execute(&pool).await.unwrap();
    let (a, b) = tokio::join!(migrate(&pool), migrate(&pool));
    a.unwrap(); b.unwrap();
    let owner = Owner::start(&pool).await.unwrap();
    println!("{owner:?}");
    let l = Lease::named("x").unwrap();
    let held = l.try_acquire(&owner).await.unwrap().unwrap();
    println!("{held:?}");
    println!("{:?}", l.attempt(&owner).await.unwrap());
    let mut tx = held.begin_with(&pool, fence::Isolation::Serializable).await.unwrap();
    sqlx::query("insert into t values(1)").execute(&mut *tx).await.unwrap();
    tx.commit().await.unwrap();
    let p2 = pool.clone();
    let j = tokio::spawn(async move { held.run(async |h: &HeldLease| { let mut tx = h.begin(&p2).await?; h.fence(&mut tx).await?; tx.commit().await?; Ok::<_, Error>(3) }).await });
    println!("{:?}", j.await.unwrap());
    let held = l.try_acquire(&owner).await.unwrap().unwrap();
    println!("{held:?}");
    println!("{:?}", held.release().await);
    owner.shutdown().await.unwrap();
    println!("{:?}", l.try_acquire(&owner).await);
}
