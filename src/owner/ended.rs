//! Attempts at claims that have ended here, and that the database may still have as running.
//!
//! An attempt ends in a transaction of the caller's, of which only the caller knows whether it committed. So each that
//! is over is shown to the database once more, many in one statement: what is still running is given back, and what a
//! transaction is still open on is shown again later. Nobody waits for it.

use std::collections::HashSet;
use std::mem;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::Serialize;
use sqlx::Row as _;
use tokio::sync::Notify;
use uuid::Uuid;

use super::Shared;
use super::life::Held;
use crate::error::{Error, Result};
use crate::name::LockName;
use crate::sql::{Arg, Call, claim};
use crate::token::{Grant, GrantId};
use crate::wait::Backoff;

/// The most that are shown in one statement.
const BATCH: usize = 500;

/// How an attempt ended, if no transaction has ended it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Why {
    /// Nothing was done.
    Unused,
    /// Without a word.
    Dropped,
    /// Nobody here knows it.
    Unknown,
}

/// One attempt.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Ended {
    key: String,
    token: i64,
    grant_id: Uuid,
    why: Why,
}

#[derive(Debug, Default)]
pub(crate) struct Endings {
    queue: Mutex<Queue>,
    soon: Notify,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: Vec<Ended>,
    /// A task is at it.
    is_swept: bool,
}

impl Endings {
    fn queue(&self) -> std::sync::MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    /// Nobody here holds it any more; its id stays known until the database has been told.
    pub(crate) fn ending(&self, held: &Held, why: Why) -> Ended {
        self.grants.releasing(held.grant.id);
        Ended {
            key: held.name.as_str().to_owned(),
            token: held.grant.token.as_i64(),
            grant_id: held.grant.id.as_uuid(),
            why,
        }
    }

    /// Whatever the database has under this grant, which nobody here knows.
    pub(super) fn end_unknown(&self, name: &LockName, grant: Grant) {
        let (key, token) = (name.as_str().to_owned(), grant.token.as_i64());
        self.end_soon(Ended { key, token, grant_id: grant.id.as_uuid(), why: Why::Unknown });
    }

    /// In the background, at once.
    pub(crate) fn end_soon(&self, ended: Ended) {
        self.end_if_need_be(ended);
        self.endings.soon.notify_one();
    }

    /// In the background, in a moment: a transaction is likely to end it, or has.
    pub(crate) fn end_if_need_be(&self, ended: Ended) {
        let is_swept = {
            let mut queue = self.endings.queue();
            queue.waiting.push(ended);
            mem::replace(&mut queue.is_swept, true)
        };
        if !is_swept && let Some(shared) = self.myself.upgrade() {
            self.run_unattended(sweep(shared));
        }
    }

    /// Tells the database now. Whether it was ours until then; if a transaction is open on it, in the background.
    pub(crate) async fn end_now(&self, ended: Ended) -> Result<bool> {
        let id = GrantId::from(ended.grant_id);
        match tell(self, std::slice::from_ref(&ended)).await {
            Ok(told) if told.busy.contains(&id) => {
                self.end_if_need_be(ended);
                Ok(true)
            }
            Ok(told) => Ok(told.given_back.contains(&id)),
            Err(error) => {
                self.end_if_need_be(ended);
                Err(error)
            }
        }
    }
}

/// Until there is nothing to tell any more.
async fn sweep(shared: Arc<Shared>) {
    let mut backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(1));
    loop {
        tokio::select! {
            () = shared.endings.soon.notified() => {}
            () = tokio::time::sleep(backoff.pause()) => {}
        }
        let batch = {
            let mut queue = shared.endings.queue();
            let most = queue.waiting.len().min(BATCH);
            queue.waiting.drain(..most).collect::<Vec<_>>()
        };
        let left = match tell(&shared, &batch).await {
            Ok(told) => batch.into_iter().filter(|one| told.busy.contains(&one.grant_id.into())).collect(),
            Err(error) => {
                tracing::warn!(label = shared.label, %error, "fencepost: cannot give claims back; trying on");
                batch
            }
        };
        let mut queue = shared.endings.queue();
        if left.is_empty() {
            backoff.reset();
        }
        queue.waiting.extend(left);
        if queue.waiting.is_empty() {
            queue.is_swept = false;
            return;
        }
    }
}

/// What the database said.
#[derive(Default)]
struct Told {
    busy: HashSet<GrantId>,
    given_back: HashSet<GrantId>,
}

async fn tell(shared: &Shared, batch: &[Ended]) -> Result<Told> {
    const STEP: &str = "giving claims back";
    let mut told = Told::default();
    if batch.is_empty() {
        return Ok(told);
    }
    let list = crate::json::text(batch, "a list of attempts", usize::MAX)?;
    let call = Call::new(claim::GIVE_BACK, [Arg::Text(list)]);
    let rows = shared.statements.call_until_answered(STEP, &call, &call).await?;
    for row in rows {
        let read =
            || Ok((GrantId::from(row.try_get::<Uuid, _>("grant_id")?), row.try_get::<String, _>("outcome")?));
        let (id, outcome) = read().map_err(|source| Error::database(STEP, source))?;
        match outcome.as_str() {
            "busy" => {
                told.busy.insert(id);
                continue;
            }
            "given back" => {
                told.given_back.insert(id);
            }
            _ => {}
        }
        shared.grants.forget(id);
    }
    Ok(told)
}
