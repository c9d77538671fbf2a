//! Several leases at once.

use std::future::poll_fn;
use std::task::Poll;

use super::Lease;
use super::held::HeldLease;
use crate::clock::Moment;
use crate::error::{Error, Result};
use crate::owner::Owner;
use crate::wait::Wait;

/// All of them, held at one moment, or none.
pub(super) async fn acquire(owner: &Owner, mut leases: Vec<Lease>, wait: Wait) -> Result<Vec<HeldLease>> {
    // Stable, so of two definitions of a name the first one stays.
    leases.sort_by(|a, b| a.name.cmp(&b.name));
    leases.dedup_by(|later, earlier| later.name == earlier.name);
    let start = Moment::now();
    loop {
        let mut held = Vec::with_capacity(leases.len());
        let taken = take(owner, &leases, wait, start, &mut held).await;
        let lost = held.iter().find_map(|one: &HeldLease| one.check_lost().err());
        let error = match (taken, lost) {
            (Ok(()), None) => return Ok(held),
            (Err(error), None) => error,
            // One of them was lost while others were waited for: from the beginning, while there is time.
            (_, Some(lost)) => lost,
        };
        let again = error.is_lost() && wait.bound().is_none_or(|bound| start.elapsed() < bound);
        for one in held {
            // Nothing to be told: the error that matters is the other one.
            drop(one.release().await);
        }
        if !again {
            return Err(match error {
                Error::Busy { name, label, token, .. } => {
                    Error::Busy { name, label, token, after: start.elapsed() }
                }
                other => other,
            });
        }
    }
}

/// One after the other in the order of names, holding the earlier ones; ends when one of those is lost.
async fn take(
    owner: &Owner,
    leases: &[Lease],
    wait: Wait,
    start: Moment,
    held: &mut Vec<HeldLease>,
) -> Result<()> {
    for lease in leases {
        let left = match wait.bound() {
            Some(bound) => Wait::at_most(bound.saturating_sub(start.elapsed())),
            None => Wait::forever(),
        };
        let one = tokio::select! {
            one = lease.acquire(owner, left) => one?,
            () = one_is_lost(held) => return Ok(()),
        };
        held.push(one);
    }
    Ok(())
}

/// Resolves when one of them is lost; never if there are none.
async fn one_is_lost(held: &[HeldLease]) {
    let mut losses: Vec<_> = held.iter().map(|one| Box::pin(one.lost())).collect();
    poll_fn(move |cx| {
        if losses.iter_mut().any(|loss| loss.as_mut().poll(cx).is_ready()) {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    })
    .await;
}
