//! Dropping a future after a number of polls.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;

/// Polls the future at most `polls` times, whenever it asks to be polled, and drops it then. Its output if it
/// completed before.
pub(crate) async fn after_polls<T>(polls: u32, future: impl Future<Output = T>) -> Option<T> {
    let mut future = pin!(future);
    let mut left = polls;
    poll_fn(move |cx| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        match future.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            // The last poll is used up: dropped without waiting for its wake-up.
            Poll::Pending if left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}
