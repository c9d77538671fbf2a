//! Passing on what a call of ours has freed: whom it was granted to is to hear of it, and what could not be
//! granted yet is to be granted soon.

use std::sync::Arc;
use std::time::Duration;

use sqlx::Row as _;
use sqlx::postgres::PgRow;

use super::Shared;
use super::wakes;
use crate::error::Result;
use crate::name::LockName;
use crate::sql::{self, Arg, Call};
use crate::token::GrantId;
use crate::wait::Backoff;

/// A hand-over that has committed.
#[derive(Debug)]
pub(crate) struct HandedOver {
    channel: String,
    payload: String,
}

impl HandedOver {
    /// What the answer of one of our functions says of it.
    pub(crate) fn of(row: &PgRow) -> Option<Self> {
        let channel: Option<String> = row.try_get("wake_channel").ok()?;
        let payload: Option<String> = row.try_get("wake_payload").ok()?;
        Some(Self { channel: channel?, payload: payload? })
    }

    /// For another process.
    pub(crate) fn notification(self) -> Call {
        Call::new(sql::NOTIFY, [Arg::Text(self.channel), Arg::Text(self.payload)])
    }
}

impl Shared {
    /// Tells whoever was granted it: inside this process directly, another one by a notification, a statement of
    /// its own. It is a hint; nobody waits for it here.
    pub(crate) fn pass_on(&self, handed: HandedOver) {
        if self.current().is_some_and(|life| wakes::channel(life.id()) == handed.channel) {
            self.wakes.deliver(&handed.payload);
            return;
        }
        let Some(shared) = self.myself.upgrade() else { return };
        self.run_unattended(async move { shared.statements.call_once(&handed.notification()).await });
    }

    /// What a release, or the like, of `name` has answered.
    pub(crate) fn freed(self: &Arc<Self>, name: &LockName, rows: &[PgRow]) {
        if self.tell_all(rows) {
            // A fenced write is still open: whoever waits is granted it as soon as that has ended.
            let (shared, name) = (Arc::clone(self), name.clone());
            self.run_unattended(async move { shared.hand_over_when_possible(&name).await });
        }
    }

    /// Gives back whatever the database has under this grant id: a ticket, or a grant.
    pub(crate) async fn give_back(self: &Arc<Self>, name: &LockName, id: GrantId) -> Result<()> {
        let call = Call::new(sql::WITHDRAW, [Arg::Text(name.as_str().to_owned()), Arg::Uuid(id.as_uuid())]);
        let rows =
            self.statements.call_until_answered("giving back a place in the line", &call, &call).await?;
        self.freed(name, &rows);
        Ok(())
    }

    async fn hand_over_when_possible(&self, name: &LockName) {
        let call = Call::new(sql::HAND_OVER, [Arg::Text(name.as_str().to_owned())]);
        let mut backoff = Backoff::new(Duration::from_millis(4), Duration::from_millis(100));
        loop {
            tokio::time::sleep(backoff.pause()).await;
            // Where it fails, those who wait ask by themselves.
            let Ok(rows) = self.statements.call_until_answered("handing over a lease", &call, &call).await
            else {
                return;
            };
            if !self.tell_all(&rows) {
                return;
            }
        }
    }

    /// Tells those who were granted something; whether others still wait for what is free.
    fn tell_all(&self, rows: &[PgRow]) -> bool {
        rows.iter().filter_map(HandedOver::of).for_each(|handed| self.pass_on(handed));
        rows.iter().any(|row| row.try_get("waiting").unwrap_or(false))
    }
}
