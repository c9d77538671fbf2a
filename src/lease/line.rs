//! Waiting in line, as it runs on the owner's thread.
//!
//! ```text
//!            refused                 handed over, proven (no question needed)
//! ask ─────────────────▶ in line ─────────────────────────────────────────────▶ held
//!  ▲                        │ └─ time to ask again: the holder's life may be over, or nothing was heard
//!  └────────────────────────┘
//! the caller is gone: the ticket is given back, or what was granted is released
//! the owner is lost: its tickets are dead with it; asks again under the next life, at the end of the line
//! ```

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use super::attempt::{Asked, Line, ask, granted, is_owner_dead};
use super::held::HeldLease;
use super::{Holder, Lease};
use crate::clock::Moment;
use crate::error::{Error, Result};
use crate::owner::Owner;
use crate::owner::life::Life;
use crate::owner::wakes::Place;
use crate::token::GrantId;
use crate::wait::{Backoff, jittered};

/// How often whoever waits asks, though notifications arrive: for the one that did not.
const SELDOM: Duration = Duration::from_secs(2);

/// Whoever last held up the waiter, for the error of its deadline.
pub(super) type HeldUpBy = Arc<Mutex<Option<Holder>>>;

/// Waits until it is granted, or nobody wants it any more: until the sender of `wanted` is gone.
pub(super) async fn acquire(
    owner: Owner,
    lease: Lease,
    held_up_by: HeldUpBy,
    mut wanted: watch::Receiver<()>,
) -> Result<HeldLease> {
    let start = Moment::now();
    owner.shared().wakes.want();
    loop {
        let life = tokio::select! {
            life = owner.shared().alive() => match life {
                // It starts again for as long as it takes; the deadline is the caller's.
                Err(Error::TimedOut { .. }) => continue,
                life => life?,
            },
            _gone = wanted.changed() => return Err(Error::Stopped),
        };
        let id = owner.shared().grants.announce();
        let mut waiter = Waiter {
            owner: &owner,
            lease: &lease,
            life: &life,
            id,
            held_up_by: &held_up_by,
            in_doubt: false,
        };
        match waiter.wait(&mut wanted).await {
            Ok(Turn::Held(held)) => {
                let after = start.elapsed();
                tracing::info!(name = %lease.name, token = %held.token(), ?after, "fencepost: acquired after waiting");
                return Ok(held);
            }
            Ok(Turn::OwnerLost) => {
                owner.shared().grants.forget(id);
                tracing::info!(name = %lease.name, "fencepost: the owner was lost; to the end of the line with the next one");
            }
            Ok(Turn::Unwanted) => {
                let given_back = owner.shared().give_back(&lease.name, id).await;
                owner.shared().grants.forget(id);
                if given_back.is_err() || waiter.in_doubt {
                    owner.shared().statements.doubt();
                }
                return Err(Error::Stopped);
            }
            Err(error) => {
                owner.shared().grants.forget(id);
                owner.shared().statements.doubt();
                return Err(error);
            }
        }
    }
}

/// How waiting under one life ended.
enum Turn {
    Held(HeldLease),
    OwnerLost,
    Unwanted,
}

/// One waiter under one life.
struct Waiter<'a> {
    owner: &'a Owner,
    lease: &'a Lease,
    life: &'a Arc<Life>,
    id: GrantId,
    held_up_by: &'a HeldUpBy,
    /// An answer has been lost: what was asked may still arrive.
    in_doubt: bool,
}

impl Waiter<'_> {
    fn is_trusted(&self) -> bool {
        self.life.is_trusted()
    }

    async fn wait(&mut self, wanted: &mut watch::Receiver<()>) -> Result<Turn> {
        let shared = self.owner.shared();
        let mut missed = shared.wakes.watch_missed();
        let mut unheard = Backoff::new(Duration::from_millis(20), Duration::from_millis(250));
        let mut open_fence = Backoff::new(Duration::from_millis(5), Duration::from_millis(500));
        let mut place: Option<Place> = None;
        loop {
            missed.mark_unchanged();
            let turn = tokio::select! {
                turn = shared.statements.turn() => turn,
                _gone = wanted.changed() => return Ok(Turn::Unwanted),
            };
            let answer = ask(self.owner, self.lease, self.life, self.id, Line::Join).await;
            drop(turn);
            let pause = match answer {
                // To a life that is not trusted any more: given back by being dropped.
                Ok(Asked::Granted(held)) if !self.is_trusted() => {
                    drop(held);
                    tokio::select! {
                        _reason = self.life.lost() => {}
                        () = self.life.beaten() => {}
                    }
                    return Ok(Turn::OwnerLost);
                }
                Ok(Asked::Granted(held)) => return Ok(Turn::Held(held)),
                Ok(Asked::Refused { holder, ticket, ahead }) => {
                    if let Some(ticket) = ticket
                        && place.as_mut().is_none_or(|place| place.ticket() != ticket || place.is_deaf())
                    {
                        tracing::debug!(name = %self.lease.name, ticket, ahead, %holder, "fencepost: in line");
                        place = Some(shared.wakes.register(ticket, self.id));
                    }
                    let listening = shared.wakes.is_listening();
                    let pause = if listening { jittered(SELDOM) } else { unheard.pause() };
                    // When its life may be over; or it is, and a fenced write of it is still open.
                    let over = if holder.remaining.is_zero() {
                        open_fence.pause()
                    } else {
                        open_fence.reset();
                        holder.remaining + jittered(Duration::from_millis(20))
                    };
                    *self.held_up_by.lock().unwrap_or_else(PoisonError::into_inner) = Some(holder);
                    pause.min(over)
                }
                Err(error) if is_owner_dead(&error) => {
                    shared.doubt(self.life).await;
                    // If it lives after all, it goes on waiting in its place.
                    unheard.pause()
                }
                // The database is out of reach: the deadline is the caller's.
                Err(Error::TimedOut { .. } | Error::OutcomeUnknown { .. }) => {
                    self.in_doubt = true;
                    unheard.pause()
                }
                Err(error) => return Err(error),
            };
            tokio::select! {
                token = handed_over(place.as_mut()) => {
                    // A cap counts from the grant, of which only the database knows the instant: ask. And what was
                    // handed to an owner counts only while that is trusted.
                    if self.lease.at_most.is_none() && self.is_trusted() {
                        tracing::debug!(name = %self.lease.name, %token, "fencepost: handed over");
                        return Ok(Turn::Held(granted(self.owner, self.lease, self.life, self.id, token, None)));
                    }
                }
                () = tokio::time::sleep(pause) => {}
                _ = missed.changed() => {}
                _reason = self.life.lost() => return Ok(Turn::OwnerLost),
                _gone = wanted.changed() => return Ok(Turn::Unwanted),
            }
        }
    }
}

async fn handed_over(place: Option<&mut Place>) -> crate::token::FencingToken {
    match place {
        Some(place) => place.handed_over().await,
        None => std::future::pending().await,
    }
}
