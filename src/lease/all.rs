//! Several leases at once.

use super::Lease;
use super::held::HeldLease;
use crate::clock::Moment;
use crate::error::Result;
use crate::owner::Owner;
use crate::wait::Wait;

/// One after the other in the order of names, holding the earlier ones.
pub(super) async fn acquire(owner: &Owner, mut leases: Vec<Lease>, wait: Wait) -> Result<Vec<HeldLease>> {
    // Stable, so of two definitions of a name the first one stays.
    leases.sort_by(|a, b| a.name.cmp(&b.name));
    leases.dedup_by(|later, earlier| later.name == earlier.name);
    let start = Moment::now();
    let mut held = Vec::with_capacity(leases.len());
    for lease in leases {
        let left = match wait.bound() {
            Some(bound) => Wait::at_most(bound.saturating_sub(start.elapsed())),
            None => Wait::forever(),
        };
        match lease.acquire(owner, left).await {
            Ok(one) => held.push(one),
            Err(error) => {
                for one in held {
                    // Nothing to be told: the error that matters is the other one.
                    drop(one.release().await);
                }
                return Err(error);
            }
        }
    }
    Ok(held)
}
