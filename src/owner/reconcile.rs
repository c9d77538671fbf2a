//! Comparing what the database says this owner holds with what the process knows.
//!
//! A release whose commit a crash took back, an acquire whose answer was lost, a failover: each can leave a
//! grant that nobody here will ever release, alive for as long as the process beats. And an operator can
//! take away a grant that somebody here believes in.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use sqlx::Row as _;
use uuid::Uuid;

use super::Shared;
use super::life::Life;
use crate::clock::Moment;
use crate::error::{Error, LossReason, Result};
use crate::mistake::Mistake;
use crate::name::LockName;
use crate::sql::{self, Arg, Call};
use crate::token::{Grant, GrantId};

/// The longest time between two looks; the shortest beside reconnects, since one look scans all leases.
const PERIOD: Duration = Duration::from_mins(1);

/// Looks after each reconnect and unknown outcome, and once a minute.
pub(super) async fn forever(shared: &Arc<Shared>) {
    let mut wait = PERIOD;
    loop {
        tokio::select! {
            () = shared.statements.doubted() => {}
            () = tokio::time::sleep(wait) => {}
        }
        let Some(life) = shared.current() else { continue };
        wait = match once(shared, &life).await {
            Ok(()) => PERIOD,
            Err(error) => {
                tracing::warn!(label = shared.label, %error, "fencepost: cannot look up what is held; trying again");
                shared.ttl.min(PERIOD)
            }
        };
    }
}

async fn once(shared: &Arc<Shared>, life: &Life) -> Result<()> {
    if Mistake::NoReconcile.is_made() {
        return Ok(());
    }
    let asked = Moment::now();
    let call = Call::new(sql::OWNED, [Arg::Uuid(life.id())]);
    let rows = shared.statements.call_until_answered("looking up what is held", &call, &call).await?;
    let mut listed = HashSet::new();
    for row in rows {
        let fail = |source| Error::database("reading what is held", source);
        let id = GrantId::from(row.try_get::<Uuid, _>("grant_id").map_err(fail)?);
        listed.insert(id);
        if shared.grants.is_known(id) {
            continue;
        }
        let name: String = row.try_get("name").map_err(fail)?;
        let what: String = row.try_get("what").map_err(fail)?;
        tracing::warn!(label = shared.label, name, what, "fencepost: giving back what nobody here knows");
        let name = LockName::stored(&name)?;
        if what == "claim" {
            shared.end_unknown(&name, Grant::new(row.try_get("token").map_err(fail)?, id));
        } else {
            shared.give_back(&name, id).await?;
        }
    }
    for held in shared.grants.held_before(life, asked) {
        if !listed.contains(&held.grant.id) {
            tracing::warn!(label = shared.label, name = %held.name, "fencepost: released from outside");
            held.lose(LossReason::Released);
        }
    }
    Ok(())
}
