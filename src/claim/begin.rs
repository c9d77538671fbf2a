//! Beginning an attempt, as it runs on the owner's thread.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use sqlx::Row as _;
use sqlx::postgres::PgRow;

use super::{Attempt, Begun, Claim, Poison, Previous, moment, text, value};
use crate::error::{Error, Result};
use crate::owner::Owner;
use crate::owner::life::Life;
use crate::sql::claim as sql;
use crate::sql::{Arg, Call};
use crate::token::GrantId;

const STEP: &str = "beginning a claim";

/// Asks once; a second time under the next life if the database says that the present one is over.
pub(super) async fn begin(owner: Owner, claim: Claim) -> Result<Begun> {
    let life = owner.shared().alive().await?;
    match once(&owner, &claim, &life).await {
        Err(error) if is_owner_dead(&error) => {
            let next = after(&owner, &life).await?;
            once(&owner, &claim, &next).await
        }
        answered => answered,
    }
}

/// Whether the database says that the owner that asks is dead.
pub(super) fn is_owner_dead(error: &Error) -> bool {
    error.sqlstate() == Some("LK003")
}

/// The life after one that the database takes for dead; or the same, if it lives after all.
pub(super) async fn after(owner: &Owner, life: &Life) -> Result<Arc<Life>> {
    owner.shared().doubt(life).await;
    owner.shared().alive().await
}

async fn once(owner: &Owner, claim: &Claim, life: &Arc<Life>) -> Result<Begun> {
    let grants = &owner.shared().grants;
    let id = grants.announce();
    let begun = ask(owner, claim, life, id).await;
    if !matches!(begun, Ok(Begun::Fresh(_) | Begun::Recovered(..))) {
        grants.forget(id);
    }
    if begun.is_err() {
        // It may have been granted, or may still be: whatever is found under this id is to be given back.
        owner.shared().statements.doubt();
    }
    begun
}

async fn ask(owner: &Owner, claim: &Claim, life: &Arc<Life>, id: GrantId) -> Result<Begun> {
    let call = |retry| {
        let args = [
            text(&claim.key),
            Arg::Uuid(life.id()),
            Arg::Uuid(id.as_uuid()),
            Arg::OptionalText(claim.fingerprint.clone()),
            Arg::OptionalText(claim.kind.as_ref().map(|kind| kind.as_str().to_owned())),
            Arg::OptionalText(claim.payload.clone()),
            Arg::Number(claim.max_failures.into()),
            Arg::Number(claim.max_crashes.into()),
            Arg::Bool(retry),
        ];
        Call::new(sql::BEGIN, args)
    };
    let rows = owner.shared().statements.call_until_answered(STEP, &call(false), &call(true)).await?;
    let row = rows.first().ok_or(sqlx::Error::RowNotFound);
    row.and_then(|row| read(row, owner, claim, life, id)).map_err(|source| Error::database(STEP, source))
}

fn read(row: &PgRow, owner: &Owner, claim: &Claim, life: &Arc<Life>, id: GrantId) -> sqlx::Result<Begun> {
    let attempt = |unclear| Attempt::read(row, owner, life, claim.key.clone(), id, unclear);
    let outcome: String = row.try_get("outcome")?;
    Ok(match outcome.as_str() {
        "fresh" => Begun::Fresh(attempt(false)?),
        "recovered" => {
            let attempt = attempt(true)?;
            let nobody = || Previous { by: None, since: None, token: None };
            let previous = attempt.recovered().cloned().unwrap_or_else(nobody);
            Begun::Recovered(attempt, previous)
        }
        "replay" => Begun::Replay(value(row, "result")?.unwrap_or(Value::Null)),
        "in_progress" => {
            let remaining: Option<i64> = row.try_get("remaining")?;
            let remaining = remaining.and_then(|left| left.try_into().ok()).unwrap_or(0);
            Begun::InProgress {
                by: row.try_get("label")?,
                since: moment(row, "since")?,
                remaining: Duration::from_micros(remaining),
            }
        }
        "mismatch" => Begun::Mismatch,
        "poison" => {
            let kind = claim.kind.as_ref().map(ToString::to_string);
            Begun::Poison(Poison::read(row, claim.key.to_string(), kind)?)
        }
        other => return Err(sqlx::Error::Decode(format!("an outcome {other:?}").into())),
    })
}
