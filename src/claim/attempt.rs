//! The attempt: a claim that is being done.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::Row as _;
use sqlx::postgres::{PgRow, PgTransaction};

use super::{Claim, Previous, check_delay, count, moment, read};
use crate::error::{Error, LossReason, Result};
use crate::json;
use crate::name::LockName;
use crate::owner::Owner;
use crate::owner::ended::Why;
use crate::owner::life::{Held, Life};
use crate::sql::claim as sql;
use crate::sql::{Arg, Call, micros};
use crate::token::{FencingToken, Grant, GrantId};

/// A claim that is ours to do, until it is completed, failed, released, dropped or lost.
///
/// It holds no connection. It lives as long as its owner, however long the work takes.
///
/// # Guarantees
/// While [`is_held`](Self::is_held) says yes nobody else can have begun. [`complete`](Self::complete) and
/// [`fail`](Self::fail) commit with the caller's transaction, or are refused and that cannot commit them; exactly one
/// of all attempts at a key is ever completed.
///
/// # Drop
/// An attempt that is dropped without a word counts as a crash: the claim is given back soon, in the background, and
/// the next attempt is [`Recovered`](super::Begun::Recovered). After [`complete`](Self::complete) or
/// [`fail`](Self::fail) that is so only if their transaction did not commit. Dropping it never waits and never fails.
#[must_use = "dropping it counts as a crash"]
pub struct Attempt {
    held: Arc<Held>,
    /// A clone: what is held keeps its owner going.
    owner: Owner,
    number: u32,
    failures: u32,
    crashes: u32,
    payload: Option<String>,
    previous: Option<Previous>,
    /// Somebody has got it: what was done with it is not known here.
    taken: bool,
    /// A transaction may have ended it, or will.
    settling: AtomicBool,
    released: bool,
}

/// What became of a claim whose attempt has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "there is no third outcome")]
pub enum Failed {
    /// It may be tried again.
    Ready,
    /// That was the last failure it may have: it waits for a person.
    Poison,
}

impl Attempt {
    /// From a row of `claim_begin` or `claim_next`.
    pub(super) fn read(
        row: &PgRow,
        owner: &Owner,
        life: &Arc<Life>,
        key: LockName,
        id: GrantId,
        unclear: bool,
    ) -> sqlx::Result<Self> {
        let grant = Grant::new(row.try_get("token")?, id);
        let previous = if unclear {
            let (by, since) = (row.try_get("label")?, moment(row, "since")?);
            Some(Previous { by, since, token: row.try_get("previous")? })
        } else {
            None
        };
        let held = Arc::new(Held::new(key, grant, Arc::clone(life), None));
        let attempt = Self {
            number: count(row, "attempts")?,
            failures: count(row, "failures")?,
            crashes: count(row, "crashes")?,
            payload: row.try_get("payload")?,
            previous,
            held,
            owner: owner.clone(),
            taken: false,
            settling: AtomicBool::new(false),
            released: false,
        };
        owner.shared().grants.hold(&attempt.held);
        tracing::debug!(key = %attempt.key(), token = %attempt.token(), "fencepost: begun");
        Ok(attempt)
    }

    /// Somebody has got it.
    pub(super) fn taken(mut self) -> Self {
        self.taken = true;
        self
    }

    /// The claim's key.
    #[must_use]
    pub fn key(&self) -> &LockName {
        &self.held.name
    }

    /// The fencing token of this attempt, larger than those of all attempts before, for a storage to compare.
    #[must_use]
    pub fn token(&self) -> FencingToken {
        self.held.grant.token
    }

    /// Token and grant id: what the functions in the database compare.
    #[must_use]
    pub fn grant(&self) -> Grant {
        self.held.grant
    }

    /// Which attempt at the claim it is; the first is 1.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// How many attempts before it said that they failed.
    #[must_use]
    pub fn failures(&self) -> u32 {
        self.failures
    }

    /// How many attempts before it ended without a word.
    #[must_use]
    pub fn crashes(&self) -> u32 {
        self.crashes
    }

    /// The attempt before, if that ended without a word: look what it has done outside of this database.
    #[must_use]
    pub fn recovered(&self) -> Option<&Previous> {
        self.previous.as_ref()
    }

    /// What the claim was made with, if anything.
    ///
    /// # Errors
    /// [`Error::Database`] if it is no such `T`.
    pub fn payload<T: DeserializeOwned>(&self) -> Result<Option<T>> {
        let read = |json: &String| serde_json::from_str(json);
        self.payload
            .as_ref()
            .map(read)
            .transpose()
            .map_err(|error| Error::database("reading a payload", sqlx::Error::Decode(error.into())))
    }

    /// Whether it is certainly ours now. Cheap: looks at the local clock. (After the commit of its end it says yes for
    /// a while: that is your own doing.)
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.held.is_held()
    }

    /// How long it is certainly ours if nothing more is heard from the database; zero if it is not. It grows
    /// again with each heartbeat.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        if self.held.loss().is_some() { Duration::ZERO } else { self.held.trusted_until().remaining() }
    }

    /// Resolves with the reason when it is lost, within the owner's ttl by this process's clock.
    ///
    /// # Cancel safety
    /// Safe: it only watches.
    pub async fn lost(&self) -> LossReason {
        self.held.lost().await
    }

    /// Passes the fence in the caller's transaction, for one that writes and does not end the attempt: until it ends
    /// nobody else begins. Inside a savepoint it holds only if the savepoint is not rolled back.
    ///
    /// # Errors
    /// [`Error::Lost`] or [`Error::StaleFence`]: roll back; the attempt is lost from now on.
    /// [`Error::SerializationFailure`] under REPEATABLE READ and SERIALIZABLE: roll back and look again.
    ///
    /// # Cancel safety
    /// Drop the transaction together with the future.
    ///
    /// # Database
    /// One statement in the transaction; none if it is known to be lost. Lowers `idle_in_transaction_session_timeout`
    /// to the owner's ttl and `client_connection_check_interval` to one second for the rest of it.
    pub async fn fence(&self, tx: &mut PgTransaction<'_>) -> Result<()> {
        self.in_transaction(tx, "passing the fence of an attempt", sql::FENCE, [], |_| Ok(())).await
    }

    /// Completes the claim with the caller's transaction, in which the effect belongs: whoever begins afterwards is
    /// told `result`. Any JSON, at most [`Claim::MAX_JSON_BYTES`].
    ///
    /// If the transaction does not commit, nothing has happened: complete it in another one. If the answer to COMMIT
    /// is lost, begin again to find out.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a result that does not serialise, is too large or has a NUL character. Otherwise as for
    /// [`fence`](Self::fence); ended before, the reason is [`LossReason::Settled`].
    ///
    /// # Cancel safety
    /// Drop the transaction together with the future.
    ///
    /// # Database
    /// As for [`fence`](Self::fence).
    pub async fn complete(
        &self,
        tx: &mut PgTransaction<'_>,
        result: &(impl Serialize + ?Sized),
    ) -> Result<()> {
        let result = json::text(result, "a result", Claim::MAX_JSON_BYTES)?;
        self.settle();
        self.in_transaction(tx, "completing a claim", sql::COMPLETE, [Arg::Text(result)], |_| Ok(())).await
    }

    /// Says with the caller's transaction that the attempt has failed, and left no effects that the next one had to
    /// look for. The claim may be tried again: by [`Claim::begin`] at once, by [`Jobs`](super::Jobs) after the pause
    /// (at most [`Claim::MAX_DELAY`]); or it has failed too often.
    ///
    /// Of `error` the first 8,192 bytes are kept, for [`poisoned`](super::poisoned).
    ///
    /// # Errors
    /// [`Error::Misuse`] for a pause that is too long; otherwise as for [`complete`](Self::complete).
    ///
    /// # Cancel safety
    /// Drop the transaction together with the future.
    ///
    /// # Database
    /// As for [`fence`](Self::fence).
    pub async fn fail(
        &self,
        tx: &mut PgTransaction<'_>,
        error: impl fmt::Display,
        pause: Duration,
    ) -> Result<Failed> {
        check_delay(pause)?;
        let mut error = error.to_string().replace('\0', "\u{fffd}");
        error.truncate(error.floor_char_boundary(8_192));
        self.settle();
        let args = [Arg::Text(error), Arg::Number(micros(pause))];
        self.in_transaction(tx, "failing a claim", sql::FAIL, args, |row| {
            let poison: bool = row.try_get("poison")?;
            Ok(if poison { Failed::Poison } else { Failed::Ready })
        })
        .await
    }

    /// Gives it back as if it had never begun: nothing has been done. `true`: it was ours until now. `false`: it had
    /// been lost or ended before.
    ///
    /// Waits for nobody: while a transaction of this attempt is open, it is given back in the background when that
    /// has ended, unless that ends it.
    ///
    /// # Errors
    /// [`Error::TimedOut`] or [`Error::OutcomeUnknown`] if the database cannot be reached: the owner goes on trying,
    /// and the next attempt is recovered if the process ends before.
    ///
    /// # Cancel safety
    /// Once polled it is given back, also when the future is dropped.
    ///
    /// # Database
    /// One statement on the owner's connections.
    pub async fn release(mut self) -> Result<bool> {
        self.released = true;
        let shared = Arc::clone(self.owner.shared());
        let lost = self.held.loss().is_some();
        let ended = shared.ending(&self.held, Why::Unused);
        if lost {
            shared.end_soon(ended);
            return Ok(false);
        }
        let ending = Arc::clone(&shared);
        match shared.run(async move { ending.end_now(ended).await }).await {
            Err(Error::Stopped) => Ok(false),
            answered => answered,
        }
    }

    /// From now on a transaction may end it.
    fn settle(&self) {
        if !self.settling.swap(true, Ordering::AcqRel) {
            // If the database does not list it any more, that is not a loss.
            self.owner.shared().grants.releasing(self.held.grant.id);
        }
    }

    /// A call about this attempt.
    async fn in_transaction<T>(
        &self,
        tx: &mut PgTransaction<'_>,
        step: &'static str,
        text: &'static str,
        more: impl IntoIterator<Item = Arg>,
        of: impl Fn(&PgRow) -> sqlx::Result<T>,
    ) -> Result<T> {
        if let Some(reason) = self.held.loss() {
            return Err(Error::Lost { name: self.key().to_string(), token: self.token(), reason });
        }
        let mut args = vec![
            super::text(self.key()),
            Arg::Number(self.token().as_i64()),
            Arg::Uuid(self.grant().id.as_uuid()),
        ];
        args.extend(more);
        let answered = read(tx, step, &Call::new(text, args), of).await;
        answered.inspect_err(|error| self.held.learn(error))
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        if self.released {
            return;
        }
        let why = if self.taken { Why::Dropped } else { Why::Unused };
        let shared = self.owner.shared();
        let ended = shared.ending(&self.held, why);
        if self.settling.load(Ordering::Acquire) {
            shared.end_if_need_be(ended);
        } else {
            shared.end_soon(ended);
        }
    }
}

impl fmt::Debug for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not the grant id, which is a secret.
        f.debug_struct("Attempt")
            .field("key", self.key())
            .field("token", &self.token())
            .field("number", &self.number)
            .field("remaining", &self.remaining())
            .finish_non_exhaustive()
    }
}
