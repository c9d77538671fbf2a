//! The election: many candidates, one leader at a time, whose terms are numbered.
//!
//! ```text
//!            campaign                      resign, drop, or the owner's end
//! candidate ──────────▶ leader (term n) ──────────────────────────────────────▶ no leader ──▶ the next term
//!     ▲                   │      ▲                                                 ▲            is larger
//!     │                   │      └── asked to resign: it decides                   │
//!     └── campaigns again └── paused, cut off: lost ── ttl over ────────────────────┘
//!                             (by the local clock)
//! ```
//!
//! It is a [`Lease`] under a name of its own, and says no more than that can keep: a leadership is a held lease, its
//! term the fencing token. What it adds is to look on without campaigning, to ask for a resignation, to prefer
//! candidates, and to work whenever one leads.
//!
//! | failure | the leader | the others |
//! |---|---|---|
//! | its process dies | – | elect the next one when its ttl is over |
//! | it is paused beyond the ttl | has lost on waking; its fence rejects | elect the next one when its ttl is over |
//! | the database is out of reach | steps down at its local deadline, before the ttl is over | see no leader change; elect when they reach it |
//! | its work goes on after the loss | is dropped after the grace; only then does it resign | elect when its ttl is over |
//! | a candidate dies waiting | – | it is skipped when its turn comes |

use std::fmt;
use std::ops::{ControlFlow, Deref};
use std::sync::Arc;
use std::time::Duration;

use sqlx::postgres::PgRow;
use sqlx::{PgPool, Row as _};

use crate::error::{Error, Result};
use crate::lease::{HeldLease, Lease};
use crate::name::LockName;
use crate::owner::Owner;
use crate::sql::{self, Arg, Call, micros};
use crate::token::FencingToken;
use crate::wait::{Wait, jittered};

/// How long between two looks at who leads, at the most; at the least half of it.
const LOOK: Duration = Duration::from_secs(1);

/// One leader among many candidates; the definition: cheap, no connection, clone it as you like.
///
/// Use it for a role that somebody has to fill all the time: the scheduler, the compactor, the one that polls. For work
/// that is to be done now and then by whoever comes first, a [`Lease`] says it more plainly.
///
/// # Guarantees
/// Terms do not overlap: at no moment do two leaderships answer [`is_held`](HeldLease::is_held) with yes, and each
/// term's number is larger than that of the one before. (A leadership that an operator revokes learns it with its next
/// heartbeat.) Fenced writes of two leaders commit in the order of their terms.
///
/// Candidates are elected in the order in which they began to campaign, those with a higher
/// [`priority`](Self::priority) before. A leader is never displaced by a candidate, so nothing flaps: preference
/// decides who comes next, and somebody may [`ask_to_resign`](Self::ask_to_resign).
///
/// # Examples
/// ```no_run
/// # async fn schedule(_tx: sqlx::postgres::PgTransaction<'static>) -> fencepost::Result<()> { Ok(()) }
/// # async fn example(pool: sqlx::PgPool, owner: fencepost::Owner) -> fencepost::Result<()> {
/// use std::ops::ControlFlow;
/// use std::time::Duration;
/// use fencepost::Election;
///
/// // In every process: one of them schedules, always.
/// let scheduler = Election::named("scheduler")?;
/// let () = scheduler
///     .run(&owner, |leadership| {
///         let pool = pool.clone();
///         async move {
///             // Refused when the term is over.
///             while let Ok(tx) = leadership.begin(&pool).await {
///                 if schedule(tx).await.is_err() {
///                     break;
///                 }
///                 tokio::select! {
///                     () = tokio::time::sleep(Duration::from_secs(1)) => {}
///                     () = leadership.asked_to_resign() => break,
///                 }
///             }
///             ControlFlow::Continue(()) // resign, and campaign again
///         }
///     })
///     .await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Election {
    lease: Lease,
}

impl Election {
    /// The election of this name, which is of its own kind: a lease of the same name has nothing to do with it.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a name that is empty, longer than 236 bytes or has a control character.
    pub fn named(name: &str) -> Result<Self> {
        Ok(Self { lease: Lease::of(LockName::of_kind("election", name)?) })
    }

    /// Prefers this candidate over those with a lower priority, when there is a new leader to elect; unless told
    /// otherwise it is 0. Whoever leads goes on leading.
    #[must_use]
    pub fn priority(self, priority: i16) -> Self {
        Self { lease: self.lease.rank(-i32::from(priority)) }
    }

    /// How long [`run`](Self::run) lets the work of a term go on after a loss was signalled. Default: a tenth of the
    /// owner's ttl, about when the database may let another one lead.
    #[must_use]
    pub fn grace(self, grace: Duration) -> Self {
        Self { lease: self.lease.grace(grace) }
    }

    /// Its name, as it was given.
    #[must_use]
    pub fn name(&self) -> &str {
        self.lease.name().plain()
    }

    /// The name of its lease, for [`fence::check`](crate::fence::check) and [`fence::protect`](crate::fence::protect).
    #[must_use]
    pub fn lock_name(&self) -> &LockName {
        self.lease.name()
    }

    /// Waits until it is elected.
    ///
    /// # Errors
    /// [`Error::Busy`] with the leader when the wait is over; [`Error::Stopped`] after the owner's shutdown. A
    /// database that is out of reach is waited for like a leader.
    ///
    /// # Cancel safety
    /// Safe: when the future is dropped the candidacy is withdrawn, and a term that had just begun is resigned.
    ///
    /// # Database
    /// As for [`Lease::acquire`]; it holds no connection.
    pub async fn campaign(&self, owner: &Owner, wait: Wait) -> Result<Leadership> {
        Ok(Leadership { lease: self.lease.acquire(owner, wait).await? })
    }

    /// Works whenever it leads: campaigns, does the work of a term, resigns when that has ended, and campaigns again;
    /// until the work says [`Break`](ControlFlow::Break) instead of [`Continue`](ControlFlow::Continue).
    ///
    /// When the term is lost the work goes on for the [`grace`](Self::grace), in which
    /// [`lost`](HeldLease::lost) tells it; then it is dropped at its next await. It resigns only after the work is gone:
    /// what the work has spawned elsewhere is the work's to end, and sees the term lost from then on. Whether to resign when asked is up to the work too:
    /// [`Leadership::asked_to_resign`]. Before it campaigns again it rests for up to a tenth of the ttl, so that work which
    /// ends at once does not spin.
    ///
    /// # Errors
    /// [`Error::Stopped`] after the owner's shutdown, and whatever [`campaign`](Self::campaign) fails with. A lost term
    /// is not an error: it campaigns again, under the owner's next life.
    ///
    /// # Cancel safety
    /// Dropping the future drops the work, then resigns in the background. So does a panic of the work.
    pub async fn run<T, F>(&self, owner: &Owner, mut work: impl FnMut(Arc<Leadership>) -> F) -> Result<T>
    where
        F: Future<Output = ControlFlow<T>>,
    {
        loop {
            let leadership = Arc::new(self.campaign(owner, Wait::forever()).await?);
            let ended = leadership.lease.until_lost(work(Arc::clone(&leadership))).await;
            // The work is gone now. Its outcome stands, whatever comes of this.
            if let Err(error) = leadership.lease.give_back().await {
                tracing::debug!(%error, "fencepost: a resignation failed; the owner will see to it");
            }
            match ended {
                Ok(ControlFlow::Break(value)) => return Ok(value),
                Ok(ControlFlow::Continue(())) => {}
                Err(error) => {
                    tracing::info!(name = self.name(), term = %leadership.term(), %error, "fencepost: not leading any more");
                }
            }
            tokio::time::sleep(jittered(owner.shared().margin)).await;
        }
    }

    /// Looks on: who leads, and who does after that. It takes no part in the election and needs no owner.
    #[must_use]
    pub fn observe(&self, pool: &PgPool) -> Leaders {
        Leaders { name: self.lock_name().clone(), pool: pool.clone(), last: None, told: false }
    }

    /// Asks the leader to resign, if there is one that has led for at least `led_for`. True: it is asked, now or before.
    ///
    /// The leader decides what to do about it ([`Leadership::asked_to_resign`]). The request is a note on its term and ends
    /// with it: the next leader is not asked. `led_for` keeps two that would both rather lead from driving each other
    /// out: a preferred candidate asks with a minute, say, and who has just been elected has its minute in any case.
    ///
    /// # Errors
    /// [`Error::Misuse`] for more than 366 days. [`Error::PoolExhausted`], or [`Error::Database`].
    ///
    /// # Cancel safety
    /// It happens or not; repeating it is harmless.
    ///
    /// # Database
    /// One statement on a connection of the pool; writes once in a term.
    pub async fn ask_to_resign(&self, pool: &PgPool, led_for: Duration) -> Result<bool> {
        if led_for > Lease::MAX_AT_MOST {
            return Err(Error::misuse(format!("a leader has led for 0 to 366 days, not {led_for:?}")));
        }
        let fail = |source| Error::database("asking a leader to resign", source);
        let args = [Arg::Text(self.name().to_owned()), Arg::Number(micros(led_for))];
        let mut conn = pool.acquire().await.map_err(fail)?;
        let rows = Call::new(sql::ASK_TO_RESIGN, args).written_out_on(&mut conn).await.map_err(fail)?;
        rows.first().ok_or(sqlx::Error::RowNotFound).and_then(|row| row.try_get("asked")).map_err(fail)
    }
}

/// A term in office, until it is resigned, dropped or lost.
///
/// It is a [`HeldLease`] in all but the ways to end it: [`is_held`](HeldLease::is_held), [`lost`](HeldLease::lost),
/// [`begin`](HeldLease::begin) and [`fence`](HeldLease::fence) are that one's.
///
/// # Drop
/// Resigns in the background, soon; after the owner's ttl if the process ends before. Use
/// [`resign`](Self::resign) to know.
#[must_use = "dropping it resigns"]
pub struct Leadership {
    lease: HeldLease,
}

impl Leadership {
    /// The number of the term: the fencing token of its grant, larger than that of every term before.
    #[must_use]
    pub fn term(&self) -> FencingToken {
        self.lease.token()
    }

    /// Resolves when the leader is asked to resign, which it may do or not; never if the term ends before: select on
    /// [`lost`](HeldLease::lost) as well, as [`Election::run`] does.
    ///
    /// # Cancel safety
    /// Safe: it only looks.
    ///
    /// # Database
    /// A statement on the owner's connections each half to whole second, as long as it is awaited.
    pub async fn asked_to_resign(&self) {
        loop {
            let shared = self.lease.owner().shared();
            let call = Call::new(sql::LEADER, [Arg::Text(self.name().plain().to_owned())]);
            let answer = {
                let shared = Arc::clone(shared);
                let ask = async move {
                    // A question that can wait: not before a release or a try.
                    let _turn = shared.statements.turn().await;
                    shared
                        .statements
                        .call_until_answered("looking for a request to resign", &call, &call)
                        .await
                };
                self.lease.owner().shared().run(ask).await
            };
            let asked = answer.is_ok_and(|rows| {
                rows.first().is_some_and(|row| {
                    row.try_get("term").is_ok_and(|term: FencingToken| term == self.term())
                        && row.try_get("asked").unwrap_or(false)
                })
            });
            if asked {
                return;
            }
            tokio::time::sleep(jittered(LOOK)).await;
        }
    }

    /// Ends the term. `true`: it led until now. `false`: the term had been lost before.
    ///
    /// # Errors
    /// As for [`HeldLease::release`].
    ///
    /// # Cancel safety
    /// Once polled it is resigned, also when the future is dropped.
    ///
    /// # Database
    /// One statement on the owner's connections, which elects the next one if somebody campaigns.
    pub async fn resign(self) -> Result<bool> {
        self.lease.release().await
    }
}

impl Deref for Leadership {
    type Target = HeldLease;

    fn deref(&self) -> &HeldLease {
        &self.lease
    }
}

impl fmt::Debug for Leadership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leadership")
            .field("election", &self.name().plain())
            .field("term", &self.term())
            .field("remaining", &self.lease.remaining())
            .finish_non_exhaustive()
    }
}

/// Who leads, as the database said it: a hint, not a proof.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Leader {
    /// Its owner's label. Two processes may have the same one; their terms differ.
    pub label: String,
    /// Its term.
    pub term: FencingToken,
}

impl fmt::Display for Leader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in term {}", self.label, self.term)
    }
}

/// The leaders one after the other, for whoever looks on; from [`Election::observe`].
///
/// # Guarantees
/// The last one is always told, by about a second after the election. Terms that begin and end between two looks are
/// skipped.
///
/// # Database
/// One statement on a connection of the pool each half to whole second, as long as [`changed`](Self::changed) is awaited:
/// no lock, nothing is written, no connection is held in between. It works behind a transaction-mode pooler.
///
/// # Examples
/// ```no_run
/// # async fn example(pool: sqlx::PgPool) -> fencepost::Result<()> {
/// let mut leaders = fencepost::Election::named("scheduler")?.observe(&pool);
/// loop {
///     match leaders.changed().await? {
///         Some(leader) => println!("{leader}"),
///         None => println!("nobody leads"),
///     }
/// }
/// # }
/// ```
#[derive(Debug)]
pub struct Leaders {
    name: LockName,
    pool: PgPool,
    /// Who was told last; before anybody was, the first answer is told whatever it is.
    last: Option<Leader>,
    told: bool,
}

impl Leaders {
    /// Who leads by now: at once the first time, then when it has changed. None: nobody, or a leader whose time is over.
    ///
    /// # Errors
    /// [`Error::PoolExhausted`], or [`Error::Database`]: call it again, nothing is forgotten.
    ///
    /// # Cancel safety
    /// Safe: a change that was not told is told by the next call.
    pub async fn changed(&mut self) -> Result<Option<Leader>> {
        loop {
            let leader = self.look().await?;
            if !self.told || self.last != leader {
                self.told = true;
                self.last.clone_from(&leader);
                return Ok(leader);
            }
            tokio::time::sleep(jittered(LOOK)).await;
        }
    }

    async fn look(&self) -> Result<Option<Leader>> {
        let fail = |source| Error::database("looking for the leader", source);
        let read = |row: &PgRow| Ok(Leader { label: row.try_get("label")?, term: row.try_get("term")? });
        let mut conn = self.pool.acquire().await.map_err(fail)?;
        let call = Call::new(sql::LEADER, [Arg::Text(self.name.plain().to_owned())]);
        let rows = call.written_out_on(&mut conn).await.map_err(fail)?;
        rows.first().map(read).transpose().map_err(fail)
    }
}
