//! Claims: do it once.
//!
//! A claim is a key in a table, and what has become of it. For an effect that is one short transaction, [`Claim::once`]
//! is all there is: its row commits with the effect, or not at all. For work that outlives a transaction there are
//! attempts:
//!
//! ```text
//!                begin, claim_next                     complete
//!      ready ──────────────────────────▶ running ──────────────────▶ done: its result is replayed
//!        ▲                                  │
//!        ├── fail: it says how it went ─────┤
//!        ├── release: nothing was done ─────┤
//!        └── dropped, or its owner died: ───┴── too often ──▶ poison: waits for a person
//!            the next attempt is *recovered*
//! ```
//!
//! | failure | what follows |
//! |---|---|
//! | two begin at once | one gets the attempt, the other [`Begun::InProgress`] |
//! | the process of an attempt dies | the next begin, or [`Jobs::claim_next`], recovers it when the owner's ttl is over |
//! | it is paused beyond the ttl | the same; its own `complete` is refused when it wakes up, and its transaction with it |
//! | it takes for ever | nothing, as long as its owner beats: no run time is guessed at |
//! | the answer to a begin is lost | asked again under the same grant id: the same attempt |
//! | the answer to the COMMIT of a complete is lost | begin again: [`Begun::Replay`] if it had arrived |
//! | the same key comes with another request | [`Begun::Mismatch`], where a fingerprint is given |

mod attempt;
mod begin;
mod jobs;

use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use sqlx::postgres::{PgRow, PgTransaction};
use sqlx::{PgConnection, Row as _};

use crate::error::{Error, Result};
use crate::json;
use crate::name::LockName;
use crate::owner::Owner;
use crate::sql::claim as sql;
use crate::sql::{Arg, Call, micros};
use crate::token::FencingToken;

pub use attempt::{Attempt, Failed};
pub use jobs::Jobs;

/// Something to be done once, by its key; the definition: cheap, no connection, clone it as you like.
///
/// If the effect has a natural key of its own in one of your tables, a unique constraint there needs no claim.
///
/// # Examples
/// ```no_run
/// # async fn example(pool: sqlx::PgPool) -> fencepost::Result<()> {
/// use fencepost::claim::Claim;
///
/// let mut tx = pool.begin().await?;
/// if Claim::named("welcome-mail/42")?.once(&mut tx).await? {
///     sqlx::query("INSERT INTO outbox (mail) VALUES ('welcome, 42')").execute(&mut *tx).await?;
/// }
/// tx.commit().await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Claim {
    key: LockName,
    kind: Option<LockName>,
    fingerprint: Option<String>,
    payload: Option<String>,
    delay: Duration,
    max_failures: u32,
    max_crashes: u32,
}

/// What [`Claim::begin`] came to.
#[derive(Debug)]
#[expect(
    clippy::exhaustive_enums,
    reason = "whoever begins has to think of each, and a match shall not need a dead arm"
)]
pub enum Begun {
    /// Ours to do. Whoever tried before, if anybody, has said that it failed.
    Fresh(Attempt),
    /// Ours to do, but look first: the attempt before ended without a word, so it may have had effects outside of this
    /// database.
    Recovered(Attempt, Previous),
    /// It has been done, with this result (`null` where there is none).
    Replay(Value),
    /// Somebody is at it.
    InProgress {
        /// The label of its owner; none while the first begin of the key is under way.
        by: Option<String>,
        /// Since when, by the database's clock.
        since: Option<DateTime<Utc>>,
        /// What is left of its owner's life if that does not beat again. Zero: it is changing hands this moment, or
        /// its owner is dead and a transaction of it is still open.
        remaining: Duration,
    },
    /// The key stands for a request with another fingerprint: a mistake of whoever made the key.
    Mismatch,
    /// It has failed or crashed too often, and waits for a person: [`Claim::retry`].
    Poison(Poison),
}

impl Begun {
    /// The attempt, if it is ours to do.
    #[must_use]
    pub fn into_attempt(self) -> Option<Attempt> {
        match self {
            Self::Fresh(attempt) | Self::Recovered(attempt, _) => Some(attempt),
            _ => None,
        }
    }
}

/// An attempt that ended without a word; if others have begun since and were given back as if they had never, the last
/// of them.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Previous {
    /// The label of its owner.
    pub by: Option<String>,
    /// When it began, by the database's clock.
    pub since: Option<DateTime<Utc>>,
    /// Its token: what it may have left behind elsewhere is marked with it, if you have marked it.
    pub token: Option<FencingToken>,
}

/// A claim that has failed or crashed too often.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Poison {
    /// Its key.
    pub key: String,
    /// Its kind, if it is a job.
    pub kind: Option<String>,
    /// How many attempts said that they failed.
    pub failures: u32,
    /// How many ended without a word.
    pub crashes: u32,
    /// What the last failure said.
    pub error: Option<String>,
    /// The label of the owner of the last attempt.
    pub by: Option<String>,
}

impl Claim {
    /// The largest result or payload, as JSON: 64 kB.
    pub const MAX_JSON_BYTES: usize = 65_536;

    /// How often attempts may fail unless told otherwise.
    pub const DEFAULT_MAX_FAILURES: u32 = 10;

    /// How often attempts may end without a word unless told otherwise.
    pub const DEFAULT_MAX_CRASHES: u32 = 3;

    /// The longest [`delay`](Self::delay), and the longest pause after a failure: 366 days.
    pub const MAX_DELAY: Duration = Duration::from_hours(8784);

    /// The claim with this key.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a key that [`LockName::new`] refuses.
    pub fn named(key: &str) -> Result<Self> {
        Ok(Self {
            key: LockName::new(key)?,
            kind: None,
            fingerprint: None,
            payload: None,
            delay: Duration::ZERO,
            max_failures: Self::DEFAULT_MAX_FAILURES,
            max_crashes: Self::DEFAULT_MAX_CRASHES,
        })
    }

    /// The request that the key stands for, byte by byte: who comes with the same key and another request is told
    /// [`Begun::Mismatch`]. Only its SHA-256 is kept. Without one nothing is compared.
    #[must_use]
    pub fn fingerprint(self, request: impl AsRef<[u8]>) -> Self {
        use std::fmt::Write as _;
        let mut hex = String::with_capacity(64);
        for byte in Sha256::digest(request.as_ref()) {
            // A String as a fmt::Write never fails.
            _ = write!(hex, "{byte:02x}");
        }
        Self { fingerprint: Some(hex), ..self }
    }

    /// What kind of job it is: [`Jobs`] of that kind take it, now and after a failure.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a kind that [`LockName::new`] would refuse as a name.
    pub fn kind(self, kind: &str) -> Result<Self> {
        crate::name::check(kind, "a kind")?;
        Ok(Self { kind: Some(LockName::new(kind)?), ..self })
    }

    /// What whoever does it has to know: any JSON, at most [`MAX_JSON_BYTES`](Self::MAX_JSON_BYTES). Kept where the
    /// key is new.
    ///
    /// # Errors
    /// [`Error::Misuse`] if it does not serialise, is too large, or has a NUL character, which `jsonb` refuses.
    pub fn payload(self, payload: &(impl Serialize + ?Sized)) -> Result<Self> {
        let payload = json::text(payload, "a payload", Self::MAX_JSON_BYTES)?;
        Ok(Self { payload: Some(payload), ..self })
    }

    /// How long after [`enqueue`](Self::enqueue) it is due; until then no [`Jobs`] take it. At most
    /// [`MAX_DELAY`](Self::MAX_DELAY), in whole microseconds.
    ///
    /// # Errors
    /// [`Error::Misuse`] beyond that.
    pub fn delay(self, delay: Duration) -> Result<Self> {
        check_delay(delay)?;
        Ok(Self { delay, ..self })
    }

    /// How often attempts may fail; with this failure the claim is poison. Default:
    /// [`DEFAULT_MAX_FAILURES`](Self::DEFAULT_MAX_FAILURES). Counts where the key is new.
    ///
    /// # Errors
    /// [`Error::Misuse`] for 0 or more than 2,147,483,647.
    pub fn max_failures(self, most: u32) -> Result<Self> {
        check_count(most)?;
        Ok(Self { max_failures: most, ..self })
    }

    /// How often attempts may end without a word, since their process died or they were dropped; with this one the
    /// claim is poison. Default: [`DEFAULT_MAX_CRASHES`](Self::DEFAULT_MAX_CRASHES). Counts where the key is new.
    ///
    /// # Errors
    /// [`Error::Misuse`] for 0 or more than 2,147,483,647.
    pub fn max_crashes(self, most: u32) -> Result<Self> {
        check_count(most)?;
        Ok(Self { max_crashes: most, ..self })
    }

    /// Its key.
    #[must_use]
    pub fn key(&self) -> &LockName {
        &self.key
    }

    /// Claims it with the caller's transaction: `true` for exactly one caller whose transaction commits. What it is
    /// to be done belongs into the same transaction.
    ///
    /// Another caller waits until the first transaction has ended: committed, it is told `false`; rolled back, `true`.
    /// (Bound the wait by `lock_timeout`.) Use a key either so or with [`begin`](Self::begin), which takes it for done.
    ///
    /// # Errors
    /// [`Error::SerializationFailure`] under REPEATABLE READ and SERIALIZABLE where another one has claimed it since
    /// the snapshot: run the transaction again.
    ///
    /// # Cancel safety
    /// Drop the transaction together with the future.
    ///
    /// # Database
    /// One statement.
    pub async fn once(&self, tx: &mut PgTransaction<'_>) -> Result<bool> {
        let call = Call::new(sql::ONCE, [text(&self.key)]);
        read(tx, "claiming once", &call, |row| row.try_get("ours")).await
    }

    /// The same for many claims in one statement: those that are the caller's, in the order of their keys' bytes. A
    /// key that is given twice is claimed once.
    ///
    /// They are claimed in one order whatever the order given, so that callers of this never deadlock with each other.
    ///
    /// # Errors
    /// As for [`once`](Self::once).
    ///
    /// # Cancel safety
    /// As for [`once`](Self::once).
    ///
    /// # Database
    /// One statement.
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example(mut tx: sqlx::postgres::PgTransaction<'_>) -> fencepost::Result<()> {
    /// use fencepost::claim::Claim;
    ///
    /// let events = [Claim::named("event/1")?, Claim::named("event/2")?];
    /// for ours in Claim::once_each(&mut tx, &events).await? {
    ///     println!("to be done: {}", ours.key());
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn once_each<'a>(tx: &mut PgTransaction<'_>, claims: &'a [Self]) -> Result<Vec<&'a Self>> {
        const STEP: &str = "claiming once";
        let fail = |source| Error::database(STEP, source);
        let keys: Vec<&str> = claims.iter().map(|claim| claim.key.as_str()).collect();
        // Names have no NUL character, and there is no bound on how many there are.
        let keys = json::text(&keys, "a list of keys", usize::MAX)?;
        let rows = Call::new(sql::ONCE_EACH, [Arg::Text(keys)]).written_out_on(tx).await.map_err(fail)?;
        let ours: std::collections::HashSet<String> =
            rows.iter().map(|row| row.try_get("key")).collect::<sqlx::Result<_>>().map_err(fail)?;
        let mut claimed: Vec<&Self> =
            claims.iter().filter(|claim| ours.contains(claim.key.as_str())).collect();
        claimed.sort_by(|a, b| a.key.cmp(&b.key));
        claimed.dedup_by(|a, b| a.key == b.key);
        Ok(claimed)
    }

    /// Leaves it as a job with the caller's transaction, for [`Jobs`] of its kind. `false`: there is such a claim.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a claim without a [`kind`](Self::kind); [`Error::SerializationFailure`] as for
    /// [`once`](Self::once).
    ///
    /// # Cancel safety
    /// Drop the transaction together with the future.
    ///
    /// # Database
    /// One statement.
    pub async fn enqueue(&self, tx: &mut PgTransaction<'_>) -> Result<bool> {
        let Some(kind) = &self.kind else {
            return Err(Error::misuse("a claim without a kind is nobody's job"));
        };
        let args = [
            text(&self.key),
            text(kind),
            Arg::OptionalText(self.payload.clone()),
            Arg::Number(micros(self.delay)),
            Arg::OptionalText(self.fingerprint.clone()),
            Arg::Number(self.max_failures.into()),
            Arg::Number(self.max_crashes.into()),
        ];
        read(tx, "enqueueing a job", &Call::new(sql::ENQUEUE, args), |row| row.try_get("fresh")).await
    }

    /// Begins an attempt, for work that outlives a transaction; or says why there is none.
    ///
    /// # Guarantees
    /// At most one attempt runs at any time, in token order, under pauses, crashes, partitions and failover, as far as
    /// the database is concerned: what it completes, fails or writes through [`Attempt::fence`]. Who works elsewhere
    /// on without looking at [`Attempt::is_held`] may still be at it when the next attempt has begun, which is why
    /// that one is [`Begun::Recovered`].
    ///
    /// # Errors
    /// [`Error::TimedOut`] if the database cannot be reached for as long as the owner's ttl (at least 1 s, at
    /// most 10 s), [`Error::OutcomeUnknown`] if answers were lost meanwhile (the owner then gives back what may
    /// have been granted), [`Error::Stopped`] after the owner's shutdown.
    ///
    /// # Cancel safety
    /// Safe: it runs in the owner; an attempt of a dropped future is given back as if it had never begun.
    ///
    /// # Database
    /// One statement on the owner's connections. Where there is nothing to begin it writes nothing.
    ///
    /// # Examples
    /// ```no_run
    /// # async fn charge(_: &str) -> fencepost::Result<String> { Ok(String::new()) }
    /// # async fn charge_was_made(_: &str) -> Option<String> { None }
    /// # async fn example(pool: sqlx::PgPool, owner: fencepost::Owner, key: &str, body: &[u8]) -> fencepost::Result<()> {
    /// use fencepost::claim::{Begun, Claim};
    ///
    /// let (attempt, receipt) = match Claim::named(key)?.fingerprint(body).begin(&owner).await? {
    ///     Begun::Fresh(attempt) => (attempt, charge(key).await?),
    ///     // The attempt before may have charged the card: ask.
    ///     Begun::Recovered(attempt, _) => match charge_was_made(key).await {
    ///         Some(receipt) => (attempt, receipt),
    ///         None => (attempt, charge(key).await?),
    ///     },
    ///     Begun::Replay(receipt) => return Ok(println!("again: {receipt}")),
    ///     other => return Ok(println!("{other:?}")),
    /// };
    /// let mut tx = pool.begin().await?;
    /// sqlx::query("INSERT INTO receipts VALUES ($1)").bind(&receipt).execute(&mut *tx).await?;
    /// attempt.complete(&mut tx, &receipt).await?;
    /// tx.commit().await?;
    /// # Ok(()) }
    /// ```
    pub async fn begin(&self, owner: &Owner) -> Result<Begun> {
        let begun = owner.shared().run(begin::begin(owner.clone(), self.clone())).await?;
        Ok(match begun {
            Begun::Fresh(attempt) => Begun::Fresh(attempt.taken()),
            Begun::Recovered(attempt, previous) => Begun::Recovered(attempt.taken(), previous),
            other => other,
        })
    }

    /// A person has looked at the poison: it may be tried again, with its counts at nothing. `false`: it is not poison.
    ///
    /// # Cancel safety
    /// It happens or not; repeating it is harmless.
    ///
    /// # Database
    /// One statement.
    pub async fn retry(&self, conn: &mut PgConnection) -> Result<bool> {
        let call = Call::new(sql::RETRY, [text(&self.key)]);
        read(conn, "making poison ready again", &call, |row| row.try_get("retried")).await
    }
}

/// The claims that wait for a person, of one kind or of all, those that have waited for longest first.
///
/// # Errors
/// [`Error::Misuse`] for a kind that no claim has.
///
/// # Cancel safety
/// Safe: it only looks.
///
/// # Database
/// One statement.
pub async fn poisoned(conn: &mut PgConnection, kind: Option<&str>, limit: u32) -> Result<Vec<Poison>> {
    let fail = |source| Error::database("looking for poison", source);
    kind.map_or(Ok(()), |kind| crate::name::check(kind, "a kind"))?;
    let args = [Arg::OptionalText(kind.map(str::to_owned)), Arg::Number(limit.into())];
    let rows = Call::new(sql::POISONED, args).written_out_on(conn).await.map_err(fail)?;
    rows.iter()
        .map(|row| {
            let kind = row.try_get("kind")?;
            Poison::read(row, row.try_get("key")?, kind)
        })
        .collect::<sqlx::Result<_>>()
        .map_err(fail)
}

/// Forgets claims that were done longer ago than this, and with them that they were done: how long keys are good for.
/// Returns how many.
///
/// What is ready, running or poison is kept.
///
/// # Errors
/// [`Error::Misuse`] for more than 1,000 years; [`Error::Database`] with SQLSTATE LK004 in a transaction that is not
/// `READ COMMITTED`.
///
/// # Cancel safety
/// It happens or not.
///
/// # Database
/// One statement. It waits for nobody.
pub async fn prune(conn: &mut PgConnection, older_than: Duration) -> Result<u64> {
    crate::prune::check_age(older_than)?;
    let call = Call::new(sql::PRUNE, [Arg::Number(micros(older_than))]);
    let pruned: i64 = read(conn, "pruning claims", &call, |row| row.try_get("pruned")).await?;
    Ok(u64::try_from(pruned).unwrap_or(0))
}

impl Poison {
    fn read(row: &PgRow, key: String, kind: Option<String>) -> sqlx::Result<Self> {
        Ok(Self {
            key,
            kind,
            failures: count(row, "failures")?,
            crashes: count(row, "crashes")?,
            error: row.try_get("error")?,
            by: row.try_get("label")?,
        })
    }
}

fn check_delay(delay: Duration) -> Result<()> {
    if delay > Claim::MAX_DELAY {
        return Err(Error::misuse(format!("a job is due within 366 days, not {delay:?}")));
    }
    Ok(())
}

fn check_count(most: u32) -> Result<()> {
    if most == 0 || i32::try_from(most).is_err() {
        return Err(Error::misuse(format!("attempts may end badly 1 to 2147483647 times, not {most}")));
    }
    Ok(())
}

fn text(name: &LockName) -> Arg {
    Arg::Text(name.as_str().to_owned())
}

fn count(row: &PgRow, column: &str) -> sqlx::Result<u32> {
    let count: i32 = row.try_get(column)?;
    Ok(u32::try_from(count).unwrap_or(0))
}

fn moment(row: &PgRow, column: &str) -> sqlx::Result<Option<DateTime<Utc>>> {
    let micros: Option<i64> = row.try_get(column)?;
    Ok(micros.and_then(DateTime::from_timestamp_micros))
}

fn value(row: &PgRow, column: &str) -> sqlx::Result<Option<Value>> {
    let text: Option<String> = row.try_get(column)?;
    text.map(|text| serde_json::from_str(&text).map_err(|error| sqlx::Error::Decode(error.into())))
        .transpose()
}

/// One call on the caller's connection, and what its row says.
async fn read<T>(
    conn: &mut PgConnection,
    step: &'static str,
    call: &Call,
    of: impl Fn(&PgRow) -> sqlx::Result<T>,
) -> Result<T> {
    let rows = call.written_out_on(conn).await.map_err(|source| Error::database(step, source))?;
    let row = rows.first().ok_or(sqlx::Error::RowNotFound);
    row.and_then(of).map_err(|source| Error::database(step, source))
}
