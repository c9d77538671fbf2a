//! What a process does: its heartbeats (`src/owner/heartbeat.rs`), acquires and releases (`src/lease/attempt.rs`,
//! `src/lease/held.rs`, `src/owner/session.rs`), reconcile (`src/owner/reconcile.rs`), and its writes.

use super::state::{About, Answer, Ask, Beat, BeatStage, Call, Grant, Held, Life, Open, Stage, State, View};
use super::step::MOST_CALLS;
use super::{Lease, Mutant, Scene};

impl Lease {
    pub(super) fn send_beat(&self, before: &State, client: u8) -> Option<State> {
        let process = before.client(client);
        if !self.time_passes() || process.beat.is_some() || process.trust == 0 {
            return None;
        }
        let mut after = before.clone();
        if self.scene == Scene::Pause {
            // There and back in one step.
            *after.db.life_mut(client, process.life) = Life::Ticks(self.ttl());
            after.client_mut(client).trust = self.ttl();
            return (after != *before).then_some(after);
        }
        after.client_mut(client).beat = Some(Beat { age: 0, stage: BeatStage::Sent });
        Some(after)
    }

    /// Trusted from the instant before it was sent.
    pub(super) fn hear_beat(&self, before: &State, client: u8) -> Option<State> {
        let beat = before.client(client).beat?;
        let mut after = before.clone();
        let process = after.client_mut(client);
        match beat.stage {
            BeatStage::Alive if self.is(Mutant::DeadlineFromReply) => process.trust = self.ttl(),
            BeatStage::Alive => process.trust = process.trust.max(self.ttl() - beat.age),
            BeatStage::Dead => process.trust = 0,
            BeatStage::Sent | BeatStage::Judged(_) => return None,
        }
        process.beat = None;
        Some(after)
    }

    /// Ends the life before, and begins the next one. Waits for a heartbeat that has the row.
    pub(super) fn restart(&self, before: &State, client: u8) -> Option<State> {
        let process = before.client(client);
        let next = process.life + 1;
        let beating = process.beat.is_some_and(|beat| matches!(beat.stage, BeatStage::Judged(_)));
        if process.trust > 0
            || next >= self.lives()
            || beating
            || before.is_being_buried(client, process.life)
        {
            return None;
        }
        let mut after = before.clone();
        *after.db.life_mut(client, process.life) = Life::Dead;
        *after.db.life_mut(client, next) = Life::Ticks(self.ttl());
        let process = after.client_mut(client);
        if let Some(held) = process.held.take() {
            process.known.remove(held.grant);
        }
        (process.life, process.trust, process.beat) = (next, self.ttl(), None);
        Some(after)
    }

    pub(super) fn acquire(&self, before: &State, client: u8) -> Option<State> {
        let process = before.client(client);
        let busy = process.about.is_some() || process.held.is_some() || process.open.is_some();
        if busy
            || process.trust == 0
            || process.attempts == self.attempts()
            || process.calls.len() == MOST_CALLS
        {
            return None;
        }
        let grant = Grant { client, attempt: process.attempts, again: false };
        let mut after = before.clone();
        let process = after.client_mut(client);
        process.attempts += 1;
        process.about = Some(About::Acquire(grant));
        if !self.is(Mutant::AnnouncedLate) {
            process.known.insert(grant);
        }
        send(&mut after, client, Ask::Acquire { retry: false }, grant, true);
        Some(after)
    }

    pub(super) fn release(&self, before: &State, client: u8) -> Option<State> {
        let process = before.client(client);
        let held = process.held?;
        if self.scene == Scene::Clock || process.calls.len() == MOST_CALLS {
            return None;
        }
        let mut after = before.clone();
        let process = after.client_mut(client);
        (process.held, process.about) = (None, Some(About::Release(held)));
        send(&mut after, client, Ask::Release { token: held.token }, held.grant, true);
        Some(after)
    }

    /// The answer has been lost: the same question again.
    pub(super) fn retry(&self, before: &State, client: u8) -> Option<State> {
        let process = before.client(client);
        if process.listens() || process.calls.len() == MOST_CALLS {
            return None;
        }
        let mut after = before.clone();
        match process.about? {
            About::Acquire(mut grant) => {
                if self.is(Mutant::FreshRetry) {
                    after.client_mut(client).known.remove(grant);
                    grant.again = true;
                    after.client_mut(client).known.insert(grant);
                    after.client_mut(client).about = Some(About::Acquire(grant));
                }
                send(&mut after, client, Ask::Acquire { retry: true }, grant, true);
            }
            About::Release(Held { grant, token }) => {
                send(&mut after, client, Ask::Release { token }, grant, true);
            }
        }
        Some(after)
    }

    /// Compares what the database lists for this owner with what is known here: `src/owner/reconcile.rs`.
    pub(super) fn reconcile(&self, before: &State, client: u8) -> Option<State> {
        let (process, row) = (before.client(client), &before.db);
        if self.is(Mutant::NoReconcile) {
            return None;
        }
        let listed = !row.released && (row.owner, row.owner_life) == (client, process.life);
        let releasing = |call: &Call| call.grant == row.grant && matches!(call.ask, Ask::Release { .. });
        let mut after = before.clone();
        if listed
            && !process.known.contains(row.grant)
            && !process.calls.iter().any(releasing)
            && process.calls.len() < MOST_CALLS
        {
            send(&mut after, client, Ask::Release { token: row.token }, row.grant, false);
            return Some(after);
        }
        let held = process.held.filter(|held| !listed || held.grant != row.grant)?;
        let process = after.client_mut(client);
        process.held = None;
        process.known.remove(held.grant);
        Some(after)
    }
}

pub(super) fn hear(before: &State, client: u8, call: u8) -> Option<State> {
    let call = usize::from(call);
    let answered = before.client(client).calls[call];
    let Stage::Answered(answer) = answered.stage else { return None };
    let mut after = before.clone();
    let process = after.client_mut(client);
    process.calls.remove(call);
    process.about = None;
    match answer {
        // What was granted to a life that is over is lost with it.
        Answer::Granted(token) if answered.life == process.life => {
            process.known.insert(answered.grant);
            process.held = Some(Held { grant: answered.grant, token });
        }
        _ => process.known.remove(answered.grant),
    }
    Some(after)
}

/// Nothing was heard for too long: whatever is found under this grant is for reconcile.
pub(super) fn give_up(before: &State, client: u8) -> Option<State> {
    let process = before.client(client);
    let grant = match process.about? {
        About::Acquire(grant) => grant,
        About::Release(held) => held.grant,
    };
    if process.listens() {
        return None;
    }
    let mut after = before.clone();
    let process = after.client_mut(client);
    process.about = None;
    process.known.remove(grant);
    Some(after)
}

pub(super) fn read(before: &State, client: u8) -> Option<State> {
    let process = before.client(client);
    let open = process.open.filter(|open| open.view == View::Nothing && process.running)?;
    let mut after = before.clone();
    after.client_mut(client).open = Some(Open { view: View::Current, ..open });
    Some(after)
}

/// Writes what follows from what was read, and commits.
pub(super) fn write(before: &State, client: u8) -> Option<State> {
    let process = before.client(client);
    let open = process.open.filter(|open| open.view != View::Nothing && process.running)?;
    let mut after = before.clone();
    after.client_mut(client).open = None;
    after.db.written = open.token;
    for other in after.clients.iter_mut().filter_map(|client| client.open.as_mut()) {
        if other.view == View::Current {
            other.view = View::Overwritten;
        }
    }
    Some(after)
}

fn send(state: &mut State, client: u8, ask: Ask, grant: Grant, heard: bool) {
    let process = state.client_mut(client);
    process.calls.push(Call { ask, grant, life: process.life, stage: Stage::Sent, heard });
}
