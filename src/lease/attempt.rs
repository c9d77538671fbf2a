//! One question for a lease, as it runs on the owner's thread.

use std::sync::Arc;
use std::time::Duration;

use sqlx::Row as _;
use sqlx::postgres::PgRow;

use super::held::HeldLease;
use super::{Attempt, Holder, Kind, Lease};
use crate::clock::Moment;
use crate::error::{Error, Result};
use crate::owner::Owner;
use crate::owner::hand_over::HandedOver;
use crate::owner::life::{Held, Life};
use crate::sql::{self, Arg, Call, micros};
use crate::token::{FencingToken, Grant, GrantId};

/// What is being done, for errors.
const STEP: &str = "acquiring a lease";

/// Asks once; a second time under the next life if the database says that the present one is over.
pub(super) async fn attempt(owner: Owner, lease: Lease) -> Result<Attempt> {
    let shared = owner.shared();
    let life = shared.alive().await?;
    match once(&owner, &lease, &life).await {
        Err(error) if is_owner_dead(&error) => {
            shared.doubt(&life).await;
            let next = shared.alive().await?;
            once(&owner, &lease, &next).await
        }
        answered => answered,
    }
}

async fn once(owner: &Owner, lease: &Lease, life: &Arc<Life>) -> Result<Attempt> {
    let grants = &owner.shared().grants;
    let id = grants.announce();
    match ask(owner, lease, life, id, Line::StayOut).await {
        Ok(Asked::Granted(held)) => Ok(Attempt::Held(held)),
        Ok(Asked::Refused { holder, .. }) => {
            grants.forget(id);
            Ok(Attempt::Busy(holder))
        }
        Err(error) => {
            // It may have been granted, or may still be: whatever is found under this id is to be released.
            grants.forget(id);
            owner.shared().statements.doubt();
            Err(error)
        }
    }
}

/// Whether the database says that the owner that asks is dead.
pub(super) fn is_owner_dead(error: &Error) -> bool {
    error.sqlstate() == Some("LK003")
}

/// Whether to leave a ticket when refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Line {
    StayOut,
    Join,
}

/// The answer.
#[derive(Debug)]
pub(super) enum Asked {
    Granted(HeldLease),
    Refused { holder: Holder, ticket: Option<i64>, ahead: i64 },
}

/// Asks for the lease under a grant id that has been announced, which it stays until something is granted.
pub(super) async fn ask(
    owner: &Owner,
    lease: &Lease,
    life: &Arc<Life>,
    id: GrantId,
    place: Line,
) -> Result<Asked> {
    let shared = owner.shared();
    let call = |retry| {
        if let Kind::Permits { limit, count } = lease.kind {
            let args = [
                Arg::Text(lease.name.plain().to_owned()),
                Arg::Number(limit.into()),
                Arg::Number(count.into()),
                Arg::Uuid(life.id()),
                Arg::Uuid(id.as_uuid()),
                Arg::Bool(place == Line::Join),
            ];
            return Call::new(sql::PERMIT_ACQUIRE, args);
        }
        let args = [
            Arg::Text(lease.name.as_str().to_owned()),
            Arg::Uuid(life.id()),
            Arg::Uuid(id.as_uuid()),
            Arg::OptionalNumber(lease.at_most.map(micros)),
            Arg::OptionalText(lease.metadata.clone()),
            Arg::Bool(retry),
            Arg::Bool(place == Line::Join),
            Arg::Number(lease.rank.into()),
        ];
        Call::new(sql::ACQUIRE, args)
    };
    // Before sending: what is left of a cap is counted from a later instant.
    let asked = Moment::now();
    let rows = shared.statements.call_until_answered(STEP, &call(false), &call(true)).await?;
    let row = rows.first().ok_or(sqlx::Error::RowNotFound);
    let row = row.and_then(Row::read).map_err(|source| Error::database(STEP, source))?;
    // It was free and others were first.
    rows.iter().filter_map(HandedOver::of).for_each(|handed| shared.pass_on(handed));
    Ok(match row {
        Row { granted: true, token: Some(token), cap, .. } => {
            Asked::Granted(granted(owner, lease, life, id, token, cap.map(|cap| asked.after(cap))))
        }
        Row { ticket, ahead, .. } => {
            Asked::Refused { ticket, ahead: ahead.unwrap_or(0), holder: row.holder() }
        }
    })
}

/// What is held now; with a cap, until then by the database's clock at the latest.
pub(super) fn granted(
    owner: &Owner,
    lease: &Lease,
    life: &Arc<Life>,
    id: GrantId,
    token: FencingToken,
    cap: Option<Moment>,
) -> HeldLease {
    // A little less, since no two clocks run at quite the same speed.
    let margin =
        lease.at_most.map_or(Duration::ZERO, |at_most| (at_most / 1_000).max(Duration::from_millis(1)));
    let cap = cap.map(|cap| cap.before(margin));
    let held = Arc::new(Held::new(lease.name.clone(), Grant::new(token, id), Arc::clone(life), cap));
    owner.shared().grants.hold(&held);
    tracing::debug!(name = %lease.name, %token, "fencepost: acquired");
    HeldLease::new(held, owner.clone(), lease.grace)
}

/// The answer of `fencepost.acquire`.
struct Row {
    granted: bool,
    token: Option<FencingToken>,
    label: Option<String>,
    remaining: Duration,
    /// What is left of the cap, of a lease that has one.
    cap: Option<Duration>,
    ticket: Option<i64>,
    ahead: Option<i64>,
}

impl Row {
    fn read(row: &PgRow) -> sqlx::Result<Self> {
        let remaining: Option<i64> = row.try_get("remaining")?;
        let cap: Option<i64> = row.try_get("cap")?;
        Ok(Self {
            granted: row.try_get("granted")?,
            token: row.try_get("token")?,
            label: row.try_get("label")?,
            remaining: Duration::from_micros(remaining.and_then(|left| left.try_into().ok()).unwrap_or(0)),
            cap: cap.map(|left| Duration::from_micros(left.try_into().unwrap_or(0))),
            ticket: row.try_get("ticket")?,
            ahead: row.try_get("ahead")?,
        })
    }

    fn holder(self) -> Holder {
        Holder { label: self.label, token: self.token, remaining: self.remaining }
    }
}
