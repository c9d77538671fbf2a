//! Who waits in this process, and how a hand-over reaches it.
//!
//! A hand-over names a ticket and a token, and proves them by a digest over the grant id, which only the
//! waiter and the database know: anybody may send a notification. It is a hint that saves asking; whoever
//! hears nothing asks again after a while.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sha2::{Digest as _, Sha256};
use tokio::sync::{Notify, oneshot, watch};
use uuid::Uuid;

use crate::mistake::Mistake;
use crate::token::{FencingToken, GrantId};

/// Hand-overs that came before their waiter knew its ticket; more are forgotten, and found by asking.
const MOST_EARLY: usize = 1_024;

/// The waiters of this process, by ticket.
#[derive(Debug, Default)]
pub(crate) struct Wakes {
    places: Arc<Mutex<Places>>,
    /// Somebody waits for the first time: it is worth listening from now on.
    wanted: Notify,
    /// Changes whenever notifications may have been missed: whoever waits shall ask.
    missed: watch::Sender<u64>,
    listening: watch::Sender<bool>,
}

#[derive(Debug, Default)]
struct Places {
    waiting: HashMap<i64, (GrantId, oneshot::Sender<FencingToken>)>,
    early: HashMap<i64, HandOver>,
}

/// A ticket's place in the line of this process; given up when dropped.
#[derive(Debug)]
pub(crate) struct Place {
    ticket: i64,
    id: GrantId,
    places: Arc<Mutex<Places>>,
    handed: oneshot::Receiver<FencingToken>,
    /// Heard, and not yet taken.
    arrived: Option<FencingToken>,
}

impl Place {
    pub(crate) fn ticket(&self) -> i64 {
        self.ticket
    }

    /// Whether it will not hear any more: something was taken already, or another waiter has its ticket (they
    /// begin anew when the server has crashed).
    pub(crate) fn is_deaf(&mut self) -> bool {
        match self.handed.try_recv() {
            Ok(token) => self.arrived = Some(token),
            Err(oneshot::error::TryRecvError::Empty) => return false,
            Err(oneshot::error::TryRecvError::Closed) => {}
        }
        self.arrived.is_none()
    }

    /// The token, when a proven hand-over to this ticket has arrived. Pending for ever after that.
    pub(crate) async fn handed_over(&mut self) -> FencingToken {
        if let Some(token) = self.arrived.take() {
            return token;
        }
        if !self.handed.is_terminated()
            && let Ok(token) = (&mut self.handed).await
        {
            return token;
        }
        std::future::pending().await
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut places = lock(&self.places);
        if places.waiting.get(&self.ticket).is_some_and(|(id, _)| *id == self.id) {
            places.waiting.remove(&self.ticket);
        }
    }
}

/// What a notification says.
#[derive(Debug)]
struct HandOver {
    token: FencingToken,
    digest: String,
}

impl HandOver {
    /// `ticket token digest`
    fn parse(payload: &str) -> Option<(i64, Self)> {
        let mut parts = payload.split(' ');
        let (ticket, token, digest) = (parts.next()?, parts.next()?, parts.next()?);
        let token = FencingToken::new(token.parse().ok()?).ok()?;
        Some((ticket.parse().ok()?, Self { token, digest: digest.to_owned() }))
    }

    /// Whether whoever sent it knows the grant id: the database.
    fn is_proven(&self, id: GrantId) -> bool {
        if Mistake::BelievesNotifications.is_made() {
            return true;
        }
        let proof = Sha256::new()
            .chain_update(id.as_uuid().as_bytes())
            .chain_update(self.token.as_i64().to_be_bytes());
        hex(&proof.finalize()) == self.digest
    }
}

impl Wakes {
    /// From now on it is worth listening.
    pub(crate) fn want(&self) {
        self.wanted.notify_one();
    }

    pub(crate) async fn wanted(&self) {
        self.wanted.notified().await;
    }

    /// The place of this ticket; a hand-over that came before is there already.
    pub(crate) fn register(&self, ticket: i64, id: GrantId) -> Place {
        let (tell, handed) = oneshot::channel();
        let mut places = lock(&self.places);
        match places.early.remove(&ticket) {
            Some(early) if early.is_proven(id) => _ = tell.send(early.token),
            _ => _ = places.waiting.insert(ticket, (id, tell)),
        }
        Place { ticket, id, places: Arc::clone(&self.places), handed, arrived: None }
    }

    /// A hand-over has arrived, from this process or by notification. What proves nothing is ignored.
    pub(crate) fn deliver(&self, payload: &str) {
        let Some((ticket, hand_over)) = HandOver::parse(payload) else { return };
        let mut places = lock(&self.places);
        match places.waiting.get(&ticket) {
            Some((id, _)) if !hand_over.is_proven(*id) => {}
            Some(_) => {
                if let Some((_, tell)) = places.waiting.remove(&ticket) {
                    // A waiter that is gone at this moment withdraws.
                    _ = tell.send(hand_over.token);
                }
            }
            None => {
                if places.early.len() >= MOST_EARLY {
                    places.early.clear();
                }
                places.early.insert(ticket, hand_over);
            }
        }
    }

    /// Whether notifications arrive, from now on. What came before may have been missed.
    pub(crate) fn set_listening(&self, listening: bool) {
        let before = self.listening.send_replace(listening);
        if listening || before {
            self.missed.send_modify(|times| *times += 1);
        }
    }

    pub(crate) fn is_listening(&self) -> bool {
        *self.listening.borrow()
    }

    pub(crate) fn watch_missed(&self) -> watch::Receiver<u64> {
        self.missed.subscribe()
    }
}

/// Where the process of this owner listens: as `fencepost.wake_channel` says. A digest, since an owner's id is
/// a secret and a channel's name is not.
pub(crate) fn channel(owner: Uuid) -> String {
    let mut name = format!("fencepost_{}", hex(&Sha256::digest(owner.as_bytes())));
    name.truncate("fencepost_".len() + 40);
    name
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        // A String as a fmt::Write never fails.
        _ = write!(text, "{byte:02x}");
        text
    })
}

fn lock(places: &Mutex<Places>) -> MutexGuard<'_, Places> {
    places.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the database makes it.
    fn payload(ticket: i64, token: i64, id: GrantId) -> String {
        let digest = Sha256::new().chain_update(id.as_uuid().as_bytes()).chain_update(token.to_be_bytes());
        format!("{ticket} {token} {}", hex(&digest.finalize()))
    }

    #[tokio::test]
    async fn a_hand_over_reaches_its_ticket_before_or_after_it_is_known() {
        let (wakes, id) = (Wakes::default(), GrantId::fresh());
        let mut place = wakes.register(7, id);
        wakes.deliver(&payload(7, 33, id));
        assert_eq!(place.handed_over().await.as_i64(), 33);
        wakes.deliver(&payload(8, 34, id));
        assert_eq!(wakes.register(8, id).handed_over().await.as_i64(), 34);
    }

    #[tokio::test]
    async fn what_is_not_proven_is_ignored_and_the_truth_still_arrives() {
        let (wakes, id) = (Wakes::default(), GrantId::fresh());
        let mut place = wakes.register(7, id);
        for forged in [
            payload(7, 99, GrantId::fresh()),
            format!("7 99 {}", "0".repeat(64)),
            payload(7, 33, id).replace(" 33 ", " 99 "),
            "7 99".into(),
            "7 0 x".into(),
            String::new(),
            "x".repeat(8_000),
        ] {
            wakes.deliver(&forged);
        }
        wakes.deliver(&payload(7, 33, id));
        assert_eq!(place.handed_over().await.as_i64(), 33);
        // Two waiters with one ticket, as after a crash: the later one has it, the earlier one knows that it is deaf.
        let other = GrantId::fresh();
        let mut earlier = wakes.register(9, id);
        let mut later = wakes.register(9, other);
        assert!(earlier.is_deaf() && !later.is_deaf());
        drop(earlier);
        wakes.deliver(&payload(9, 40, other));
        assert!(!later.is_deaf(), "heard, and not lost by asking");
        assert_eq!(later.handed_over().await.as_i64(), 40);
        assert!(later.is_deaf());
        // A flood before the ticket is known costs bounded memory.
        for ticket in 0..10_000 {
            wakes.deliver(&payload(ticket, 1, id));
        }
        assert!(lock(&wakes.places).early.len() <= MOST_EARLY);
        drop(place);
        assert!(lock(&wakes.places).waiting.is_empty());
    }
}
