//! What can happen, and what comes of it.

use super::state::{ATTEMPTS, Answer, Id, Life, Place, Process, State, Wake};
use super::{Line, Mutant};

/// A step, by the process that it is of; of a notification, by its place in the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Acquire, or a poll: asked and answered.
    Ask(u8),
    Hear(u8),
    GiveUp(u8),
    Withdraw(u8),
    SendRelease(u8),
    Release(u8),
    HandOver(u8),
    Reconcile(u8),
    BeginWrite(u8),
    EndWrite(u8),
    Deliver(u8),
    /// The owner of a dead process has not been heard of for its ttl.
    Expire(u8),
    CommitBeat(u8),
    Restart(u8),
    // Faults.
    Die(u8),
    /// A running process is paused beyond its ttl, with or without a heartbeat in flight.
    Lapse(u8, bool),
    Lose(u8),
    Forge(u8),
}

/// What became of a hand-over.
#[derive(PartialEq, Eq)]
enum Handed {
    To(Id),
    /// The head's heartbeat is in flight: ask again soon.
    Undecided,
    Nobody,
}

/// All that might be possible: `step` says what is.
pub(super) fn possible(state: &State) -> Vec<Action> {
    let mut actions = Vec::with_capacity(40);
    for number in 0..u8::try_from(state.processes.len()).unwrap() {
        actions.extend([
            Action::Ask(number),
            Action::Hear(number),
            Action::GiveUp(number),
            Action::Withdraw(number),
            Action::SendRelease(number),
            Action::Release(number),
            Action::HandOver(number),
            Action::Reconcile(number),
            Action::BeginWrite(number),
            Action::EndWrite(number),
            Action::Expire(number),
            Action::CommitBeat(number),
            Action::Restart(number),
            Action::Die(number),
            Action::Lapse(number, false),
            Action::Lapse(number, true),
            Action::Forge(number),
        ]);
    }
    for wake in 0..u8::try_from(state.wakes.len()).unwrap() {
        actions.extend([Action::Deliver(wake), Action::Lose(wake)]);
    }
    actions
}

impl Line {
    /// The state after it; none if it is not possible, or has to wait.
    pub(super) fn step(&self, before: &State, action: Action) -> Option<State> {
        match action {
            Action::Ask(process) => self.ask(before, process),
            Action::Hear(process) => hear(before, process),
            Action::GiveUp(process) => go(before, process, Place::InLine, Place::Leaving),
            Action::Withdraw(process) => self.withdraw(before, process),
            Action::SendRelease(process) => {
                let Place::Holding { .. } = before.process(process).place else { return None };
                go(before, process, before.process(process).place, Place::Releasing)
            }
            Action::Release(process) => self.release(before, process),
            Action::HandOver(process) => self.hand_over(before, process),
            Action::Reconcile(process) => self.reconcile(before, process),
            Action::BeginWrite(process) => begin_write(before, process),
            Action::EndWrite(process) => end_write(before, process),
            Action::Deliver(wake) => self.deliver(before, wake),
            Action::Expire(process) => expire(before, process),
            Action::CommitBeat(process) => commit_beat(before, process),
            Action::Restart(process) => restart(before, process),
            Action::Die(process) => die(before, process),
            Action::Lapse(process, beat) => lapse(before, process, beat),
            Action::Lose(wake) => lose(before, wake),
            Action::Forge(process) => forge(before, process),
        }
    }

    /// `acquire` with `p_enqueue`, in `0003_leases.sql`, as `src/lease/line.rs` asks.
    fn ask(&self, before: &State, number: u8) -> Option<State> {
        let asking = before.process(number);
        let polls = asking.place == Place::InLine && !self.is(Mutant::NoPoll);
        let begins =
            asking.place == Place::Away && asking.attempts == asking.first && asking.attempts < ATTEMPTS;
        if !asking.running || asking.life != Life::Alive || !(polls || begins) {
            return None;
        }
        let mut after = before.clone();
        if begins {
            after.process_mut(number).attempts += 1;
        }
        let id = after.id(number);
        let answer = self.acquire(&mut after, id)?;
        after.process_mut(number).place = Place::Answered(answer);
        Some(after)
    }

    /// None: it waits for a heartbeat of the holder.
    fn acquire(&self, state: &mut State, id: Id) -> Option<Answer> {
        if !state.is_free() {
            if state.row.id == id {
                return Some(Answer::Granted);
            }
            queue(state, id);
            return Some(Answer::Queued);
        }
        if !state.row.released {
            match state.life(state.row.id) {
                Life::Lapsed { beat: true } => return None,
                Life::Lapsed { beat: false } => state.process_mut(state.row.id.process).life = Life::Dead,
                Life::Alive | Life::Dead => {}
            }
        }
        if state.is_written() {
            queue(state, id);
            return Some(Answer::Queued);
        }
        if !state.queue.is_empty() && !self.is(Mutant::JumpsQueue) {
            queue(state, id);
            match self.hand_to_head(state) {
                Handed::To(head) if head == id => {
                    state.wakes.retain(|wake| wake.to != id);
                    return Some(Answer::Granted);
                }
                Handed::To(_) | Handed::Undecided => return Some(Answer::Queued),
                Handed::Nobody => {}
            }
        }
        state.queue.retain(|ticket| *ticket != id);
        grant(state, id);
        Some(Answer::Granted)
    }

    /// `hand_to_head` in `0004_waiters.sql`. The lease is free, and no write is open.
    fn hand_to_head(&self, state: &mut State) -> Handed {
        loop {
            let newest = self.is(Mutant::NewestFirst);
            let Some(head) = (if newest { state.queue.last() } else { state.queue.first() }).copied() else {
                return Handed::Nobody;
            };
            let mut life = state.life(head);
            if self.is(Mutant::HandsToDead) {
                life = Life::Alive;
            }
            if life == (Life::Lapsed { beat: true }) && !self.is(Mutant::ThrowsAwayUndecided) {
                return Handed::Undecided;
            }
            if life == (Life::Lapsed { beat: false }) {
                state.process_mut(head.process).life = Life::Dead;
            }
            state.queue.retain(|ticket| *ticket != head);
            if life == Life::Alive {
                grant(state, head);
                notify(state, Wake { to: head, proven: true });
                return Handed::To(head);
            }
        }
    }

    fn release(&self, before: &State, number: u8) -> Option<State> {
        let releasing = before.process(number);
        if releasing.place != Place::Releasing || before.is_written() && self.is(Mutant::ReleaseWaits) {
            return None;
        }
        let mut after = before.clone();
        let id = before.id(number);
        self.free(&mut after, id, number);
        after.process_mut(number).place = Place::Away;
        Some(after)
    }

    /// `release` in `0003_leases.sql`: this grant alone, and never waiting for a write.
    fn free(&self, state: &mut State, id: Id, by: u8) {
        if state.row.id != id || state.is_free() {
            return;
        }
        state.row.released = true;
        if self.is(Mutant::HandsToNobody) || state.queue.is_empty() {
            return;
        }
        let waits = state.is_written() && !self.is(Mutant::HandsOverDuringWrite)
            || self.hand_to_head(state) == Handed::Undecided;
        let process = state.process_mut(by);
        process.hands_over = waits && process.running;
    }

    /// `hand_over` in `0004_waiters.sql`, tried until nobody waits: `src/owner/hand_over.rs`.
    fn hand_over(&self, before: &State, number: u8) -> Option<State> {
        if !before.process(number).hands_over {
            return None;
        }
        let mut after = before.clone();
        let to_do = !before.queue.is_empty() && before.row.released;
        if to_do && (before.is_written() || self.hand_to_head(&mut after) == Handed::Undecided) {
            // Tickets of the dead have been thrown away all the same.
            return (after != *before).then_some(after);
        }
        after.process_mut(number).hands_over = false;
        Some(after)
    }

    /// `withdraw` in `0004_waiters.sql`.
    fn withdraw(&self, before: &State, number: u8) -> Option<State> {
        let leaving = before.process(number);
        if leaving.place != Place::Leaving {
            return None;
        }
        let mut after = before.clone();
        let id = before.id(number);
        if after.queue.contains(&id) {
            after.queue.retain(|ticket| *ticket != id);
        } else if !self.is(Mutant::BlindWithdraw) {
            self.free(&mut after, id, number);
        }
        after.process_mut(number).place = Place::Away;
        Some(after)
    }

    /// A grant that is listed for the process and that it does not know: `src/owner/reconcile.rs`.
    fn reconcile(&self, before: &State, number: u8) -> Option<State> {
        let process = before.process(number);
        let known = before.row.id == before.id(number) && process.place != Place::Away;
        if !process.running || before.row.id.process != number || before.is_free() || known {
            return None;
        }
        let mut after = before.clone();
        self.free(&mut after, before.row.id, number);
        Some(after)
    }

    /// `src/owner/wakes.rs`. One that comes before its waiter has heard of its ticket is kept for it.
    fn deliver(&self, before: &State, number: u8) -> Option<State> {
        let wake = before.wakes[usize::from(number)];
        let waiter = before.process(wake.to.process);
        let present = before.id(wake.to.process) == wake.to;
        if present && waiter.running && waiter.place == Place::Answered(Answer::Queued) {
            return None;
        }
        let mut after = before.clone();
        after.wakes.remove(usize::from(number));
        let believed = wake.proven || self.is(Mutant::ForgedWake);
        let trusted = before.life(wake.to) == Life::Alive;
        let blindly = !trusted && self.is(Mutant::BlindWake);
        if present && waiter.running && waiter.place == Place::InLine && believed && (trusted || blindly) {
            after.process_mut(wake.to.process).place = Place::Holding { blindly };
        }
        Some(after)
    }
}

fn queue(state: &mut State, id: Id) {
    if !state.queue.contains(&id) {
        state.queue.push(id);
    }
}

fn grant(state: &mut State, id: Id) {
    (state.row.id, state.row.released) = (id, false);
}

fn notify(state: &mut State, wake: Wake) {
    if let Err(place) = state.wakes.binary_search(&wake) {
        state.wakes.insert(place, wake);
    }
}

/// From one place to the next.
fn go(before: &State, number: u8, from: Place, to: Place) -> Option<State> {
    let process = before.process(number);
    (process.running && process.place == from).then(|| {
        let mut after = before.clone();
        after.process_mut(number).place = to;
        after
    })
}

fn hear(before: &State, number: u8) -> Option<State> {
    let Place::Answered(answer) = before.process(number).place else { return None };
    let to = match answer {
        Answer::Granted => Place::Holding { blindly: false },
        Answer::Queued => Place::InLine,
    };
    go(before, number, Place::Answered(answer), to)
}

/// Passes the fence: it holds the lease.
fn begin_write(before: &State, number: u8) -> Option<State> {
    let process = before.process(number);
    let holds = process.believes() && before.row.id == before.id(number) && !before.is_free();
    if !holds || process.writes {
        return None;
    }
    let mut after = before.clone();
    after.process_mut(number).writes = true;
    Some(after)
}

/// By the process, which does nothing while it waits for its release; of a dead one by the server.
fn end_write(before: &State, number: u8) -> Option<State> {
    let process = before.process(number);
    if !process.writes || process.running && process.place == Place::Releasing {
        return None;
    }
    let mut after = before.clone();
    after.process_mut(number).writes = false;
    Some(after)
}

fn expire(before: &State, number: u8) -> Option<State> {
    let process = before.process(number);
    if process.running || process.life != Life::Alive {
        return None;
    }
    let mut after = before.clone();
    after.process_mut(number).life = Life::Lapsed { beat: false };
    Some(after)
}

fn commit_beat(before: &State, number: u8) -> Option<State> {
    if before.process(number).life != (Life::Lapsed { beat: true }) {
        return None;
    }
    let mut after = before.clone();
    after.process_mut(number).life = Life::Alive;
    Some(after)
}

/// The life before is over for good; whoever waited under it begins anew, at the end.
fn restart(before: &State, number: u8) -> Option<State> {
    let process = before.process(number);
    let over = matches!(process.life, Life::Lapsed { beat: false } | Life::Dead);
    if !process.running || !over || process.place == Place::Releasing || process.place == Place::Leaving {
        return None;
    }
    let mut after = before.clone();
    let fresh = Process { life: Life::Alive, first: process.attempts, place: Place::Away, ..*process };
    *after.process_mut(number) = fresh;
    // `owner_stop` takes its tickets back.
    after.queue.retain(|ticket| ticket.process != number);
    Some(after)
}

fn spend(before: &State) -> Option<State> {
    let faults = before.faults.checked_sub(1)?;
    Some(State { faults, ..before.clone() })
}

fn die(before: &State, number: u8) -> Option<State> {
    let mut after = spend(before)?;
    let process = after.process_mut(number);
    if !process.running {
        return None;
    }
    (process.running, process.place, process.hands_over) = (false, Place::Away, false);
    Some(after)
}

fn lapse(before: &State, number: u8, beat: bool) -> Option<State> {
    let mut after = spend(before)?;
    let process = after.process_mut(number);
    if !process.running || process.life != Life::Alive {
        return None;
    }
    process.life = Life::Lapsed { beat };
    Some(after)
}

fn lose(before: &State, wake: u8) -> Option<State> {
    let mut after = spend(before)?;
    after.wakes.remove(usize::from(wake));
    Some(after)
}

/// Tickets are no secret, grant ids are.
fn forge(before: &State, number: u8) -> Option<State> {
    if before.process(number).place != Place::InLine {
        return None;
    }
    let mut after = spend(before)?;
    notify(&mut after, Wake { to: before.id(number), proven: false });
    (after.wakes != before.wakes).then_some(after)
}
