//! The one connection that listens for hand-overs from other processes; opened when somebody first waits.

use std::time::Duration;

use sqlx::AssertSqlSafe;
use sqlx::Executor as _;
use sqlx::postgres::{PgListener, PgPoolOptions};

use super::Shared;
use super::life::{Life, Stage};
use super::wakes;
use crate::driver::caught;
use crate::wait::Backoff;

/// Listens for the present life's channel, and reconnects for as long as the owner is there. Behind a
/// transaction-mode pooler nothing would arrive: there everybody asks.
pub(super) async fn forever(shared: &Shared) {
    if shared.statements.source().pooled {
        return std::future::pending().await;
    }
    shared.wakes.wanted().await;
    let mut backoff = Backoff::new(Duration::from_millis(10), Duration::from_secs(1));
    loop {
        let Err(error) = caught(listen(shared, &mut backoff)).await;
        shared.wakes.set_listening(false);
        tracing::warn!(label = shared.label, %error, "fencepost: not listening; those who wait ask until it works again");
        tokio::time::sleep(backoff.pause()).await;
    }
}

async fn listen(shared: &Shared, backoff: &mut Backoff) -> sqlx::Result<std::convert::Infallible> {
    let source = shared.statements.source();
    let settings = source.settings();
    // A pool of one, since sqlx's listener comes from a pool.
    let pool = PgPoolOptions::new()
        .max_connections(1)
        .acquire_timeout(source.bound)
        .after_connect(move |conn, _| {
            let settings = settings.clone();
            Box::pin(async move { conn.execute(sqlx::raw_sql(AssertSqlSafe(settings))).await.map(drop) })
        })
        .connect_lazy_with(source.options());
    let mut listener = PgListener::connect_with(&pool).await?;
    // Not behind our back: what is missed meanwhile has to be asked for.
    listener.eager_reconnect(false);
    let mut stage = shared.stage.subscribe();
    loop {
        let life = match &*stage.borrow_and_update() {
            Stage::Alive(life) => Some(std::sync::Arc::clone(life)),
            Stage::Starting(_) | Stage::Stopped { .. } => None,
        };
        bounded(source.bound, listener.unlisten_all()).await?;
        if let Some(life) = life.as_deref() {
            bounded(source.bound, subscribe(shared, &mut listener, life)).await?;
        }
        loop {
            tokio::select! {
                heard = listener.try_recv() => match heard? {
                    Some(notification) => {
                        backoff.reset();
                        shared.wakes.deliver(notification.payload());
                    }
                    None => return Err(sqlx::Error::Io(std::io::ErrorKind::ConnectionReset.into())),
                },
                // A connection whose other end has vanished says nothing either: a statement without effect tells.
                () = tokio::time::sleep(source.bound) => {
                    bounded(source.bound, listener.unlisten("fencepost_nobody")).await?;
                    backoff.reset();
                }
                changed = stage.changed() => {
                    changed.map_err(|_| sqlx::Error::PoolClosed)?;
                    break;
                }
            }
        }
    }
}

async fn bounded<T>(bound: Duration, statement: impl Future<Output = sqlx::Result<T>>) -> sqlx::Result<T> {
    tokio::time::timeout(bound, statement).await.unwrap_or(Err(sqlx::Error::PoolTimedOut))
}

/// First subscribed, then everybody asks once: nothing falls in between.
async fn subscribe(shared: &Shared, listener: &mut PgListener, life: &Life) -> sqlx::Result<()> {
    listener.listen(&wakes::channel(life.id())).await?;
    shared.wakes.set_listening(true);
    Ok(())
}
