//! Jobs: claims of one kind, taken by whoever is free.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use sqlx::Row as _;
use uuid::Uuid;

use super::begin::{after, is_owner_dead};
use super::{Attempt, text};
use crate::error::{Error, Result};
use crate::name::LockName;
use crate::owner::Owner;
use crate::owner::life::Life;
use crate::sql::claim as sql;
use crate::sql::{Arg, Call};
use crate::token::GrantId;

/// The jobs of one kind: claims left by [`Claim::enqueue`](super::Claim::enqueue); the definition.
///
/// # Guarantees
/// Any number of workers, in any number of processes: each gets others, locked and marked in one statement (a
/// `FOR UPDATE SKIP LOCKED` by itself, outside of a transaction, would give one job to two of them). Those due first
/// come first.
///
/// # Examples
/// ```no_run
/// # async fn example(pool: sqlx::PgPool, owner: fencepost::Owner) -> fencepost::Result<()> {
/// use fencepost::claim::{Claim, Jobs};
///
/// let mut tx = pool.begin().await?;
/// Claim::named("mail/42")?.kind("mail")?.payload("to 42")?.enqueue(&mut tx).await?;
/// tx.commit().await?;
///
/// for attempt in Jobs::of_kind("mail")?.claim_next(&owner, 50).await? {
///     let mut tx = pool.begin().await?;
///     sqlx::query("INSERT INTO sent VALUES ($1)").bind(attempt.key().as_str()).execute(&mut *tx).await?;
///     attempt.complete(&mut tx, "sent").await?;
///     tx.commit().await?;
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Jobs {
    kind: LockName,
}

impl Jobs {
    /// The most that one call claims.
    pub const MAX_BATCH: usize = 1_000;

    /// The jobs of this kind.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a kind that [`LockName::new`] would refuse as a name.
    pub fn of_kind(kind: &str) -> Result<Self> {
        crate::name::check(kind, "a kind")?;
        Ok(Self { kind: LockName::new(kind)? })
    }

    /// Attempts at the next jobs, at most `limit`, those due first first; none if nothing is due. Also jobs whose owner
    /// has died: they are [`recovered`](Attempt::recovered). Never waits for other workers, and not for a job.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a limit of 0 or more than [`MAX_BATCH`](Self::MAX_BATCH); otherwise as for
    /// [`Claim::begin`](super::Claim::begin).
    ///
    /// # Cancel safety
    /// Safe: it runs in the owner; what a dropped future was granted is given back as if it had never begun.
    ///
    /// # Database
    /// One statement on the owner's connections, durable; one that finds nothing writes nothing.
    pub async fn claim_next(&self, owner: &Owner, limit: usize) -> Result<Vec<Attempt>> {
        if limit == 0 || limit > Self::MAX_BATCH {
            let most = Self::MAX_BATCH;
            return Err(Error::misuse(format!("1 to {most} jobs are claimed at a time, not {limit}")));
        }
        let attempts = owner.shared().run(next(owner.clone(), self.kind.clone(), limit)).await?;
        Ok(attempts.into_iter().map(Attempt::taken).collect())
    }
}

/// Runs on the owner's thread.
async fn next(owner: Owner, kind: LockName, limit: usize) -> Result<Vec<Attempt>> {
    let life = owner.shared().alive().await?;
    match once(&owner, &kind, &life, limit).await {
        Err(error) if is_owner_dead(&error) => {
            let next = after(&owner, &life).await?;
            once(&owner, &kind, &next, limit).await
        }
        answered => answered,
    }
}

async fn once(owner: &Owner, kind: &LockName, life: &Arc<Life>, limit: usize) -> Result<Vec<Attempt>> {
    let grants = &owner.shared().grants;
    let mut announced = Vec::new();
    let asked = ask(owner, kind, life, limit, &mut announced).await;
    let claimed: HashSet<GrantId> = asked.iter().flatten().map(|attempt| attempt.grant().id).collect();
    for id in announced.iter().filter(|id| !claimed.contains(id)) {
        grants.forget(*id);
    }
    if asked.is_err() {
        // What the lost answers told of is to be given back. (If another one came, the call has said so, and nothing
        // was awaited since: whoever looks does not know these ids any more.)
        owner.shared().statements.doubt();
    }
    asked
}

async fn ask(
    owner: &Owner,
    kind: &LockName,
    life: &Arc<Life>,
    limit: usize,
    announced: &mut Vec<GrantId>,
) -> Result<Vec<Attempt>> {
    const STEP: &str = "claiming jobs";
    // Asked again under other ids each time: what a call claims whose answer is lost, perhaps only later, is not taken
    // for what the next one does, and can be told from it.
    let call = || {
        let ids: Vec<GrantId> = (0..limit).map(|_| owner.shared().grants.announce()).collect();
        let list: Vec<String> = ids.iter().map(ToString::to_string).collect();
        announced.extend(ids);
        let args = [text(kind), Arg::Uuid(life.id()), Arg::Text(format!("{{{}}}", list.join(",")))];
        Call::new(sql::NEXT, args)
    };
    let rows = owner.shared().statements.call_anew_until_answered(STEP, call).await?;
    // The ids were given in the order in which the jobs are due; the rows come in any.
    let mut claimed = HashMap::new();
    for row in &rows {
        let read = || {
            let id = GrantId::from(row.try_get::<Uuid, _>("grant_id")?);
            let key =
                LockName::new(row.try_get("key")?).map_err(|error| sqlx::Error::Decode(error.into()))?;
            Ok((id, Attempt::read(row, owner, life, key, id, row.try_get("unclear")?)?))
        };
        let (id, attempt) = read().map_err(|source| Error::database(STEP, source))?;
        claimed.insert(id, attempt);
    }
    Ok(announced.iter().filter_map(|id| claimed.remove(id)).collect())
}
