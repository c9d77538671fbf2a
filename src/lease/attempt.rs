//! One acquire, as it runs on the owner's thread.

use std::sync::Arc;
use std::time::Duration;

use sqlx::Row as _;
use sqlx::postgres::PgRow;

use super::held::HeldLease;
use super::{Attempt, Holder, Lease};
use crate::clock::Moment;
use crate::error::{Error, Result};
use crate::owner::life::{Held, Life};
use crate::owner::{Owner, Shared};
use crate::sql::{self, Arg, Call, micros};
use crate::token::{FencingToken, Grant, GrantId};

/// The SQLSTATE of "the owner that asks is dead".
const OWNER_IS_DEAD: &str = "LK003";

/// What is being done, for errors.
const STEP: &str = "acquiring a lease";

/// Asks once; a second time under the next life if the database says that the present one is over.
pub(super) async fn attempt(owner: Owner, lease: Lease) -> Result<Attempt> {
    let shared = owner.shared();
    let life = shared.alive().await?;
    match ask(&owner, &lease, &life).await {
        Err(error) if error.sqlstate() == Some(OWNER_IS_DEAD) => {
            shared.doubt(&life).await;
            let next = shared.alive().await?;
            ask(&owner, &lease, &next).await
        }
        answered => answered,
    }
}

async fn ask(owner: &Owner, lease: &Lease, life: &Arc<Life>) -> Result<Attempt> {
    let shared = owner.shared();
    let id = shared.grants.announce();
    let call = |retry| {
        let args = [
            Arg::Text(lease.name.as_str().to_owned()),
            Arg::Uuid(life.id()),
            Arg::Uuid(id.as_uuid()),
            Arg::OptionalNumber(lease.at_most.map(micros)),
            Arg::OptionalText(lease.metadata.clone()),
            Arg::Bool(retry),
        ];
        Call::new(sql::ACQUIRE, args)
    };
    // Before sending: the database counts the cap from a later instant.
    let asked = Moment::now();
    let answer = shared.statements.call_until_answered(STEP, &call(false), &call(true)).await;
    let read = answer.and_then(|rows| {
        let row = rows.first().ok_or(sqlx::Error::RowNotFound);
        row.and_then(Row::read).map_err(|source| Error::database(STEP, source))
    });
    match read {
        Ok(Row { granted: true, token: Some(token), .. }) => {
            let grant = Grant::new(token, id);
            let cap = lease.at_most.map(|at_most| asked.after(at_most));
            let held = Arc::new(Held::new(lease.name.clone(), grant, Arc::clone(life), cap));
            shared.grants.hold(&held);
            tracing::debug!(name = %lease.name, %token, "fencepost: acquired");
            Ok(Attempt::Held(HeldLease::new(held, owner.clone(), lease.grace)))
        }
        Ok(row) => {
            shared.grants.forget(id);
            Ok(Attempt::Busy(row.holder()))
        }
        Err(error) => {
            give_up(shared, id);
            Err(error)
        }
    }
}

/// It may have been granted, or may still be: whatever is found under this id is to be released.
fn give_up(shared: &Shared, id: GrantId) {
    shared.grants.forget(id);
    shared.statements.doubt();
}

/// The answer of `fencepost.acquire`.
struct Row {
    granted: bool,
    token: Option<FencingToken>,
    label: Option<String>,
    remaining: Duration,
}

impl Row {
    fn read(row: &PgRow) -> sqlx::Result<Self> {
        let remaining: Option<i64> = row.try_get("remaining")?;
        Ok(Self {
            granted: row.try_get("granted")?,
            token: row.try_get("token")?,
            label: row.try_get("label")?,
            remaining: Duration::from_micros(remaining.and_then(|left| left.try_into().ok()).unwrap_or(0)),
        })
    }

    fn holder(self) -> Holder {
        Holder { label: self.label, token: self.token, remaining: self.remaining }
    }
}
