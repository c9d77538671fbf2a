//! Schedules: each slot runs once in the fleet, whoever looks, and whatever its clock says.
//!
//! A *slot* is one due time of a schedule, computed by its rule: "02:30 of the first of December" is the same for
//! every process, and it is the slot's identity. Which slots are due says the database's clock; who does one is settled by a
//! [claim](crate::claim) with the key `schedule/NAME/SLOT`. So an early timer finds nothing to do, two hosts with
//! different clocks find the same slot, and a restart finds what has been done.
//!
//! ```text
//!             the database's clock               claim                       completed with the effect
//!   computed ─────────────────────▶ due ───────────────────────▶ running ────────────────────────────▶ done
//!                                    │ ▲                            │
//!                                    │ └── its process died, or it ─┘
//!                                    │     failed (ten times: poison)
//!                                    └── nobody came in time: missed
//! ```
//!
//! | event | what follows |
//! |---|---|
//! | a timer fires early, or a host's clock is ahead | not due by the database's clock: nothing runs, it looks again |
//! | … late, or behind | the slot is still due; somebody else may have run it |
//! | all look at once | one runs it |
//! | the process that runs it dies | the next look runs it again, as [recovered](Slot::recovered), when the owner's ttl is over; after three times it is poison, as after ten failures |
//! | it is paused meanwhile and wakes up late | its `complete` is refused, with the transaction that it is in |
//! | nobody was there | by [`Missed`] |
//! | the local time of a slot does not exist, or exists twice | see `Schedule::cron` (feature `cron`) |
//! | the database's clock is set back | slots that are settled stay so |
//!
//! It is no job framework: you say when to look. Between two looks nothing is held and nothing runs.

#[cfg(feature = "cron")]
mod cron;
mod rule;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use chrono::{DateTime, SecondsFormat, Utc};
use sqlx::postgres::{PgRow, PgTransaction};
use sqlx::{PgPool, Row as _};

use crate::claim::{Attempt, Begun, Claim, Previous};
use crate::error::{Error, LossReason, Result};
use crate::lease::{HeldLease, Lease};
use crate::mistake::Mistake;
use crate::name::LockName;
use crate::owner::Owner;
use crate::retry::{self, Isolation};
use crate::sql::{Arg, Call, schedule as sql};
use crate::token::FencingToken;

use rule::{Look, Rule};

/// When something is to be done, once in the fleet at each slot; the definition: cheap, no connection.
///
/// # Guarantees
/// - A slot is *completed* once. Work whose effect is in the transaction of [`Slot::complete`] is done exactly once;
///   what it does elsewhere it may do again after a crash, and is told so by [`Slot::recovered`].
/// - No slot runs before it is due by the database's clock, and none that was due before the schedule was first
///   looked at, except those of [`at`](Self::at).
/// - The rule belongs to the name: change it, and the slots of the new rule count from now on.
/// - That a slot is done is known as long as its claim is kept, and for good when all before it are done as well: prune no
///   claims ([`prune`](crate::claim::prune)) that are younger than the time after which slots are [missed](Missed).
///
/// # Examples
/// ```no_run
/// # async fn example(pool: sqlx::PgPool, owner: fencepost::Owner) -> fencepost::Result<()> {
/// use std::time::Duration;
/// use fencepost::schedule::Schedule;
///
/// // Every day at 02:30 UTC.
/// let nightly = Schedule::every("nightly-report", Duration::from_hours(24))?.offset(Duration::from_mins(150))?;
/// loop {
///     let looked = nightly.run_due(&owner, &pool, |slot| {
///         let pool = pool.clone();
///         async move {
///             let mut tx = pool.begin().await?;
///             sqlx::query("INSERT INTO report (day) VALUES ($1::text::date)")
///                 .bind(slot.at().format("%F").to_string())
///                 .execute(&mut *tx)
///                 .await?;
///             slot.complete(&mut tx).await?;      // with the effect, or not at all
///             tx.commit().await?;
///             Ok::<_, fencepost::Error>(())
///         }
///     });
///     let look_again = looked.await.map_or(Duration::from_secs(10), |looked| looked.look_again);
///     tokio::time::sleep(look_again).await;
/// }
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Schedule {
    name: LockName,
    rule: Rule,
    missed: Missed,
    one_at_a_time: bool,
}

/// What becomes of slots that were due when nobody looked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "these are the three that people ask for")]
pub enum Missed {
    /// Not run: a slot that has been due for a minute is missed. If several are due within it, the last one is run.
    Skip,
    /// The last one is run, until it has been due for so long; those before it are not.
    Last(Duration),
    /// Each is run, the earliest first, until it has been due for so long. At most a thousand at one look.
    All(Duration),
}

impl Missed {
    fn horizon(self) -> Duration {
        match self {
            Self::Skip => Duration::from_mins(1),
            Self::Last(horizon) | Self::All(horizon) => horizon,
        }
    }
}

/// What [`Schedule::run_due`] has done.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Looked {
    /// The slots that were run here and are done, in their order.
    pub ran: Vec<DateTime<Utc>>,
    /// The first slot that was not due yet; none if the rule has no more.
    pub next: Option<DateTime<Utc>>,
    /// When to look again: the time until that slot by the database's clock, a minute at most; at once after work; a
    /// second (at most) while a slot is somebody else's who has not completed it, or has failed too often.
    pub look_again: Duration,
}

impl Schedule {
    /// The shortest period.
    pub const MIN_PERIOD: Duration = Duration::from_secs(1);
    /// The longest period, offset and time to be missed.
    pub const MAX_PERIOD: Duration = Duration::from_hours(366 * 24);
    /// The longest name, in bytes: slots are written behind it.
    pub const MAX_NAME_BYTES: usize = 200;

    /// Slots a period apart, counted from 1970-01-01 00:00 UTC (a Thursday). For 24 hours that is midnight UTC.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a period that is shorter than [`MIN_PERIOD`](Self::MIN_PERIOD), longer than
    /// [`MAX_PERIOD`](Self::MAX_PERIOD) or has a part of a microsecond; for a name that [`LockName::new`] refuses or that is
    /// longer than [`MAX_NAME_BYTES`](Self::MAX_NAME_BYTES).
    pub fn every(name: &str, period: Duration) -> Result<Self> {
        let period = rule::micros(period, Self::MIN_PERIOD, Self::MAX_PERIOD, "a period")?;
        Self::named(name, Rule::Every { period, offset: 0 })
    }

    /// Moves the slots of [`every`](Self::every): by 2.5 hours, those of 24 hours come at 02:30 UTC.
    ///
    /// # Errors
    /// [`Error::Misuse`] for slots that come otherwise, and for an offset that is longer than
    /// [`MAX_PERIOD`](Self::MAX_PERIOD) or has a part of a microsecond.
    pub fn offset(mut self, by: Duration) -> Result<Self> {
        let by = rule::micros(by, Duration::ZERO, Self::MAX_PERIOD, "an offset")?;
        let Rule::Every { offset, .. } = &mut self.rule else {
            return Err(Error::misuse("an offset is for slots that come every so often"));
        };
        *offset = by;
        Ok(self)
    }

    /// Slots at these moments, in whatever order given. All count, also those that were due before the schedule was
    /// first looked at, until they are missed by [`Missed`].
    ///
    /// # Errors
    /// [`Error::Misuse`] if there is none, or one has a part of a microsecond; for a name as for [`every`](Self::every).
    pub fn at(name: &str, slots: impl IntoIterator<Item = DateTime<Utc>>) -> Result<Self> {
        let mut slots: Vec<_> = slots.into_iter().collect();
        slots.sort_unstable();
        slots.dedup();
        if slots.is_empty() || slots.iter().any(|slot| !slot.timestamp_subsec_nanos().is_multiple_of(1_000)) {
            return Err(Error::misuse("a schedule has slots, at whole microseconds"));
        }
        Self::named(name, Rule::At(slots))
    }

    /// Slots by a cron pattern of five fields (minute, hour, day of the month, month, day of the week), in a time zone:
    /// `"30 2 * * *"` is every day at 02:30 there. With the feature `cron`; the patterns are those of the crate
    /// [`croner`](https://docs.rs/croner).
    ///
    /// When clocks change, a time of the day that does not exist comes when the gap is over, and one that exists twice
    /// comes the first time. A pattern with several hours or minutes, `*` included, is taken literally: what falls into
    /// the gap is left out, and what exists twice is two slots.
    ///
    /// The rules of time zones are part of the program (`chrono-tz`). Where two versions of it disagree about a day, they
    /// see different slots; and so do they if they disagree about the pattern.
    ///
    /// # Errors
    /// [`Error::Misuse`] if it is no such pattern or never comes; for a name as for [`every`](Self::every).
    #[cfg(feature = "cron")]
    pub fn cron(name: &str, pattern: &str, zone: chrono_tz::Tz) -> Result<Self> {
        Self::named(name, Rule::Cron(Box::new(cron::Cron::new(pattern, zone)?)))
    }

    fn named(name: &str, rule: Rule) -> Result<Self> {
        if name.len() > Self::MAX_NAME_BYTES {
            let (most, has) = (Self::MAX_NAME_BYTES, name.len());
            return Err(Error::misuse(format!(
                "a schedule's name is at most {most} bytes long, this one has {has}"
            )));
        }
        let missed = Missed::Last(Duration::from_hours(24));
        Ok(Self { name: LockName::new(name)?, rule, missed, one_at_a_time: false })
    }

    /// What becomes of missed slots. Default: [`Missed::Last`] of a day.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a time that is zero, or longer than [`MAX_PERIOD`](Self::MAX_PERIOD).
    pub fn missed(self, missed: Missed) -> Result<Self> {
        let horizon = missed.horizon();
        if horizon.is_zero() || horizon > Self::MAX_PERIOD {
            return Err(Error::misuse(format!("slots are missed after up to 366 days, not {horizon:?}")));
        }
        Ok(Self { missed, ..self })
    }

    /// Does not run a slot while another slot of this schedule is running, here or elsewhere: it runs later.
    ///
    /// By belief as any lease ([`Slot::is_held`], [`Slot::lost`]), and by what is committed: as long as a transaction
    /// that has passed [`Slot::complete`] or [`Slot::fence`] is open, nobody else begins a slot, and after `complete`
    /// nobody does. The lease ends with [`run_due`](Self::run_due): whoever has a clone of a slot then has lost it.
    #[must_use]
    pub fn one_at_a_time(self) -> Self {
        Self { one_at_a_time: true, ..self }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &LockName {
        &self.name
    }

    /// The first slot after this moment; none if there are no more.
    #[must_use]
    pub fn next_after(&self, moment: DateTime<Utc>) -> Option<DateTime<Utc>> {
        self.rule.next_after(moment)
    }

    /// Looks once, and runs the slots that are due and nobody else's, one after the other.
    ///
    /// Work that returns `Ok` without having called [`Slot::complete`] is completed afterwards, in a transaction of its own. So
    /// if the process dies in between it runs again: effects in this database belong into the transaction of
    /// [`complete`](Slot::complete).
    ///
    /// # Errors
    /// - The work's own, at once: the slot has failed, and is run again by the next look; after ten failures it is poison,
    ///   and waits for [`Claim::retry`] of its [key](Self::key). (An error after [`Slot::complete`] counts as a crash, of
    ///   which three make poison: whether its transaction committed is not known here.)
    /// - Those of [`Claim::begin`], and [`Error::Lost`] if the slot was lost before it could be completed.
    ///
    /// # Cancel safety
    /// Safe: the slot that is running counts as crashed, and is run again by whoever looks next.
    ///
    /// # Database
    /// One statement if nothing is due; for each slot one to begin and one to look whether it is still to be run, and a
    /// transaction to complete it, or a statement to find that the work has done so; one to settle. [`one_at_a_time`](Self::one_at_a_time) adds a lease, and its fence to each
    /// completion.
    pub async fn run_due<E, F>(
        &self,
        owner: &Owner,
        pool: &PgPool,
        mut work: impl FnMut(Slot) -> F,
    ) -> Result<Looked, E>
    where
        F: Future<Output = Result<(), E>>,
        E: From<Error> + fmt::Display,
    {
        let look = self.look(owner).await?;
        let next = self.rule.next_after(look.now);
        let mut looked = Looked { ran: Vec::new(), next, look_again: until(look.now, next) };
        let mut due = self.rule.due(look, self.missed);
        if due.is_empty() {
            return Ok(looked);
        }
        if Mistake::SlotsFromNow.is_made() {
            due = vec![look.now];
        }
        let alone = if self.one_at_a_time {
            let lease = Lease::of(LockName::of_kind("schedule", self.name.as_str())?);
            let Some(held) = lease.try_acquire(owner).await? else {
                looked.look_again = looked.look_again.min(SOON);
                return Ok(looked);
            };
            Some(Alone(Arc::new(held)))
        } else {
            None
        };
        let is_lost = || alone.as_ref().is_some_and(Alone::is_lost);
        let (mut settled, mut all_done) = (None, true);
        for at in due {
            if is_lost() {
                looked.look_again = looked.look_again.min(SOON);
                break;
            }
            let claim = Claim::named(&self.key(at))?;
            let (is_done, may_run) = match claim.begin(owner).await? {
                Begun::Fresh(attempt) | Begun::Recovered(attempt, _) => {
                    // The begin may have come late: others may have run it, and its claim may have been pruned.
                    let is_open = at > self.rule.closed(self.look(owner).await?, self.missed);
                    // The owner may have started again meanwhile: then somebody else may be at another slot.
                    if !is_open || is_lost() {
                        give_back(attempt).await;
                        (!is_open, is_open)
                    } else {
                        let (attempt, alone) = (Arc::new(attempt), alone.as_ref().and_then(Alone::of_a_slot));
                        let slot = Slot { at, attempt, alone, is_completed: Arc::default() };
                        let is_done = run(slot, pool, &claim, owner, &mut work).await?;
                        looked.ran.extend(is_done.then_some(at));
                        // A transaction may be open that completes it.
                        (is_done, !is_done)
                    }
                }
                Begun::Replay(_) => (true, false),
                Begun::InProgress { .. } => (false, true),
                _ => (false, false),
            };
            if !is_done {
                all_done = false;
                looked.look_again = looked.look_again.min(SOON);
                if may_run && alone.as_ref().is_some_and(Alone::counts) {
                    break;
                }
            }
            if all_done {
                settled = Some(at);
            }
        }
        // What is done is done, whatever comes of this: the next look settles, and the owner sees to the lease.
        if let Some(at) = settled
            && let Err(error) = self.settle(owner, at).await
        {
            tracing::debug!(schedule = %self.name, %error, "fencepost: slots were not settled");
        }
        if let Some(Alone(held)) = &alone
            && let Err(error) = held.give_back().await
        {
            tracing::debug!(schedule = %self.name, %error, "fencepost: the schedule's lease was not released");
        }
        if !looked.ran.is_empty() {
            looked.look_again = Duration::ZERO;
        }
        Ok(looked)
    }

    /// The key of a slot's claim: `schedule/NAME/2026-12-01T02:30:00Z`.
    #[must_use]
    pub fn key(&self, slot: DateTime<Utc>) -> String {
        format!("schedule/{}/{}", self.name, slot.to_rfc3339_opts(SecondsFormat::AutoSi, true))
    }

    async fn look(&self, owner: &Owner) -> Result<Look> {
        const STEP: &str = "looking for due slots";
        let rows = call(owner, STEP, Call::new(sql::LOOK, [self.arg()])).await?;
        let row = rows.first().ok_or(sqlx::Error::RowNotFound);
        let look = row.and_then(read).map_err(|source| Error::database(STEP, source))?;
        Ok(if Mistake::DueByOwnClock.is_made() { Look { now: own_clock(), ..look } } else { look })
    }

    async fn settle(&self, owner: &Owner, slot: DateTime<Utc>) -> Result<()> {
        let call_ = Call::new(sql::SETTLE, [self.arg(), Arg::Number(slot.timestamp_micros())]);
        call(owner, "settling slots", call_).await.map(drop)
    }

    fn arg(&self) -> Arg {
        Arg::Text(self.name.as_str().to_owned())
    }
}

/// When to look again while somebody else is at a slot, and at most otherwise.
const SOON: Duration = Duration::from_secs(1);
const AT_MOST: Duration = Duration::from_mins(1);

fn until(now: DateTime<Utc>, next: Option<DateTime<Utc>>) -> Duration {
    next.and_then(|next| (next - now).to_std().ok()).map_or(AT_MOST, |until| until.min(AT_MOST))
}

/// A mistake: people set this clock.
fn own_clock() -> DateTime<Utc> {
    #[expect(clippy::disallowed_methods, reason = "it is the mistake")]
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    DateTime::from_timestamp_micros(crate::sql::micros(since)).unwrap_or_default()
}

/// The lease of one at a time, until the look is over, whoever has a clone of a slot.
struct Alone(Arc<HeldLease>);

impl Alone {
    /// After it has been had, too.
    #[expect(clippy::unused_self, reason = "it is a mistake if this one does not")]
    fn counts(&self) -> bool {
        !Mistake::AsksForTheLeaseOnce.is_made()
    }

    fn is_lost(&self) -> bool {
        self.counts() && !self.0.is_held()
    }

    fn of_a_slot(&self) -> Option<Arc<HeldLease>> {
        self.counts().then(|| Arc::clone(&self.0))
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        self.0.give_back_soon();
    }
}

/// Nothing has been done with it. Where the database cannot be told, the owner sees to it.
async fn give_back(attempt: Attempt) {
    if let Err(error) = attempt.release().await {
        tracing::debug!(%error, "fencepost: a slot was not given back");
    }
}

/// On the owner's connections. Safe to repeat.
async fn call(owner: &Owner, step: &'static str, call: Call) -> Result<Vec<PgRow>> {
    let shared = Arc::clone(owner.shared());
    let calling = Arc::clone(&shared);
    shared.run(async move { calling.statements.call_until_answered(step, &call, &call).await }).await
}

fn read(row: &PgRow) -> sqlx::Result<Look> {
    let moment = |column| {
        let micros: Option<i64> = row.try_get(column)?;
        Ok::<_, sqlx::Error>(micros.and_then(DateTime::from_timestamp_micros))
    };
    let missing = || sqlx::Error::Decode("a moment is missing".into());
    Ok(Look {
        now: moment("looked_at")?.ok_or_else(missing)?,
        since: moment("since")?.ok_or_else(missing)?,
        settled: moment("settled")?,
    })
}

/// Whether it is done.
async fn run<E, F>(
    slot: Slot,
    pool: &PgPool,
    claim: &Claim,
    owner: &Owner,
    work: &mut impl FnMut(Slot) -> F,
) -> Result<bool, E>
where
    F: Future<Output = Result<(), E>>,
    E: From<Error> + fmt::Display,
{
    let done = work(slot.clone()).await;
    if slot.is_completed.load(Ordering::Acquire) {
        done?;
        // Its transaction may not have committed: the database knows.
        return match claim.begin(owner).await? {
            Begun::Replay(_) => Ok(true),
            Begun::Fresh(other) | Begun::Recovered(other, _) => {
                give_back(other).await;
                Ok(false)
            }
            _ => Ok(false),
        };
    }
    match done {
        Ok(()) => {
            let completed = async {
                let mut tx = begin(pool).await?;
                slot.complete(&mut tx).await?;
                commit(tx).await
            };
            completed.await?;
            Ok(true)
        }
        Err(failure) => {
            let recorded = async {
                let mut tx = begin(pool).await?;
                slot.attempt.fail(&mut tx, &failure, Duration::ZERO).await?;
                commit(tx).await
            };
            if let Err(error) = recorded.await {
                // It counts as a crash, then.
                tracing::warn!(slot = %slot.at, %error, "fencepost: a slot's failure was not recorded");
            }
            Err(failure)
        }
    }
}

async fn begin(pool: &PgPool) -> Result<PgTransaction<'static>> {
    let begun = retry::begin(pool, Isolation::ReadCommitted, "").await;
    begun.map_err(|source| Error::database("ending a slot", source))
}

async fn commit(tx: PgTransaction<'_>) -> Result<()> {
    tx.commit().await.map_err(|source| Error::database("ending a slot", source))
}

/// A slot that is ours to run. A clone is the same slot.
#[derive(Clone, Debug)]
pub struct Slot {
    at: DateTime<Utc>,
    attempt: Arc<Attempt>,
    /// The lease of one at a time, under the same life of the owner.
    alone: Option<Arc<HeldLease>>,
    is_completed: Arc<AtomicBool>,
}

impl Slot {
    /// When it was due, by the rule: its identity. (What time it is when it runs is another question.)
    #[must_use]
    pub fn at(&self) -> DateTime<Utc> {
        self.at
    }

    /// The fencing token of this attempt at it, for a storage to compare.
    #[must_use]
    pub fn token(&self) -> FencingToken {
        self.attempt.token()
    }

    /// The attempt before, if that ended without a word: look what it has done outside of this database.
    #[must_use]
    pub fn recovered(&self) -> Option<&Previous> {
        self.attempt.recovered()
    }

    /// Whether it is certainly ours now, by the local clock.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.attempt.is_held() && self.alone.as_ref().is_none_or(|held| held.is_held())
    }

    /// How long it is certainly ours if nothing more is heard from the database; zero if it is not. It grows
    /// again with each heartbeat.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        let alone = self.alone.as_ref().map_or(Duration::MAX, |held| held.remaining());
        self.attempt.remaining().min(alone)
    }

    /// Resolves with the reason when it is lost; somebody else may run it then.
    ///
    /// # Cancel safety
    /// Safe: it only watches.
    pub async fn lost(&self) -> LossReason {
        let Some(alone) = &self.alone else { return self.attempt.lost().await };
        tokio::select! {
            biased;
            reason = self.attempt.lost() => reason,
            reason = alone.lost() => reason,
        }
    }

    /// Passes the fence in the caller's transaction, for one that writes and does not complete the slot.
    ///
    /// # Errors
    /// As for [`Attempt::fence`].
    ///
    /// # Cancel safety
    /// Drop the transaction together with the future.
    ///
    /// # Database
    /// One statement; two for [one at a time](Schedule::one_at_a_time).
    pub async fn fence(&self, tx: &mut PgTransaction<'_>) -> Result<()> {
        self.fence_alone(tx).await?;
        self.attempt.fence(tx).await
    }

    /// Completes it with the caller's transaction, in which the effect belongs.
    ///
    /// # Errors
    /// As for [`Attempt::complete`]: if it is refused it is somebody else's, and the transaction cannot commit.
    ///
    /// # Cancel safety
    /// Drop the transaction together with the future.
    ///
    /// # Database
    /// One statement; two for [one at a time](Schedule::one_at_a_time).
    pub async fn complete(&self, tx: &mut PgTransaction<'_>) -> Result<()> {
        self.is_completed.store(true, Ordering::Release);
        self.fence_alone(tx).await?;
        self.attempt.complete(tx, &()).await
    }

    /// One at a time: nobody begins another slot while this transaction may commit.
    async fn fence_alone(&self, tx: &mut PgTransaction<'_>) -> Result<()> {
        match &self.alone {
            Some(held) => held.fence(tx).await,
            None => Ok(()),
        }
    }
}
