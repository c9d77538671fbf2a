//! What the database does: the functions of migrations 0002, 0003 and 0005, by atomic steps.

use super::state::{Answer, Ask, Beat, BeatStage, Call, Life, Open, Stage, State, View};
use super::{Lease, Mutant};

impl Lease {
    /// Locks the owner's row, then judges, in the next statement.
    pub(super) fn judge_beat(&self, before: &State, client: u8) -> Option<State> {
        let process = before.client(client);
        let beat = process.beat.filter(|beat| beat.stage == BeatStage::Sent)?;
        let waits = before.is_being_buried(client, process.life) && !self.is(Mutant::PlainReadOfLife);
        if waits {
            return None;
        }
        let lives = before.db.life(client, process.life).is_alive() || self.is(Mutant::BeatUpserts);
        let stage = if lives { BeatStage::Judged(self.ttl()) } else { BeatStage::Dead };
        let mut after = before.clone();
        after.client_mut(client).beat = Some(Beat { stage, ..beat });
        Some(after)
    }

    /// As it should not be: `nextval` before the row is locked.
    pub(super) fn draw(&self, before: &State, client: u8, call: u8) -> Option<State> {
        let drawn = before.client(client).calls[usize::from(call)];
        let acquires = matches!(drawn.ask, Ask::Acquire { .. });
        if !self.is(Mutant::EarlyToken) || !acquires || drawn.stage != Stage::Sent {
            return None;
        }
        let mut after = before.clone();
        after.db.sequence += 1;
        let token = after.db.sequence;
        after.client_mut(client).calls[usize::from(call)].stage = Stage::Drawn(token);
        Some(after)
    }

    pub(super) fn arrive(&self, before: &State, client: u8, number: u8) -> Option<State> {
        let call = before.client(client).calls[usize::from(number)];
        match (call.ask, call.stage) {
            (Ask::Release { token }, Stage::Sent) => self.arrive_release(before, client, number, call, token),
            (Ask::Acquire { .. }, Stage::Sent) if self.is(Mutant::EarlyToken) => None,
            (Ask::Acquire { retry }, Stage::Sent | Stage::Drawn(_)) => {
                self.arrive_acquire(before, client, number, call, retry)
            }
            _ => None,
        }
    }

    /// An update of this grant alone. It waits for a grant that has the row, not for fences.
    fn arrive_release(&self, before: &State, client: u8, number: u8, call: Call, token: u8) -> Option<State> {
        if before.locked() {
            return None;
        }
        let mut after = before.clone();
        let ours =
            (before.db.token, before.db.grant) == (token, call.grant) || self.is(Mutant::ReleaseByName);
        if ours && before.db.is_held() {
            (after.db.released, after.db.on_disk) = (true, false);
        }
        answer(&mut after, client, number, Answer::Released);
        Some(after)
    }

    fn arrive_acquire(
        &self,
        before: &State,
        client: u8,
        number: u8,
        call: Call,
        retry: bool,
    ) -> Option<State> {
        let mut after = before.clone();
        let row = &before.db;
        // 1. Look, without a lock.
        if row.is_held() {
            let found = if row.grant == call.grant { Answer::Granted(row.token) } else { Answer::Refused };
            answer(&mut after, client, number, found);
            return Some(after);
        }
        // 3. Lock. A try skips a row that somebody is at, a retry waits for it.
        if before.locked() {
            if retry && !self.is(Mutant::SkippingRetry) || self.is(Mutant::EarlyToken) {
                return None;
            }
            answer(&mut after, client, number, Answer::Refused);
            return Some(after);
        }
        // 4. Judge.
        if !row.life(client, call.life).is_alive() {
            answer(&mut after, client, number, Answer::OwnerDead);
            return Some(after);
        }
        if before.fences_open() && !self.is(Mutant::GrantPassesFence) {
            answer(&mut after, client, number, Answer::Refused);
            return Some(after);
        }
        // Not released, and yet not held: its owner has expired. Wait for a heartbeat in flight, and mark it.
        let expired = row.life(row.owner, row.owner_life) == Life::Ticks(0) && !row.released;
        let buries = expired && !self.is(Mutant::PlainReadOfLife);
        if buries {
            let holder = before.client(row.owner);
            let beating = holder.beat.is_some_and(|beat| matches!(beat.stage, BeatStage::Judged(_)));
            if beating && holder.life == row.owner_life {
                return None;
            }
        }
        // 6. Draw the token, now that the row is locked, and write.
        let token = if let Stage::Drawn(token) = call.stage {
            token
        } else {
            after.db.sequence += 1;
            after.db.sequence
        };
        after.client_mut(client).calls[usize::from(number)].stage = Stage::Locked { token, buries };
        Some(after)
    }

    pub(super) fn commit(&self, before: &State, client: u8, number: u8) -> Option<State> {
        let call = before.client(client).calls[usize::from(number)];
        let Stage::Locked { token, buries } = call.stage else { return None };
        let mut after = before.clone();
        let row = &mut after.db;
        if buries && !self.is(Mutant::NoMark) {
            *row.life_mut(row.owner, row.owner_life) = Life::Dead;
        }
        (row.token, row.grant, row.owner, row.owner_life) = (token, call.grant, client, call.life);
        (row.released, row.on_disk) = (false, true);
        answer(&mut after, client, number, Answer::Granted(token));
        Some(after)
    }

    pub(super) fn fence(&self, before: &State, client: u8) -> Option<State> {
        let (process, row) = (before.client(client), &before.db);
        let held = process.held?;
        // It waits for a grant that is being written.
        let looks = !self.is(Mutant::NoFence);
        if !self.has_writes() || process.open.is_some() || before.locked() && looks {
            return None;
        }
        let same = row.token == held.token && (row.grant == held.grant || self.is(Mutant::FenceByNumber));
        let mut after = before.clone();
        let process = after.client_mut(client);
        if same && row.is_held() || !looks {
            let open = Open {
                token: held.token,
                view: View::Nothing,
                locks: looks && !self.is(Mutant::FenceWithoutLock),
            };
            process.open = Some(open);
        } else {
            process.held = None;
            process.known.remove(held.grant);
        }
        Some(after)
    }

    /// By the process at any moment; of one that is dead by the server, when it has been idle for too long.
    pub(super) fn roll_back(&self, before: &State, client: u8) -> Option<State> {
        let process = before.client(client);
        if process.open.is_none() || !process.running && self.is(Mutant::NoIdleBound) {
            return None;
        }
        let mut after = before.clone();
        after.client_mut(client).open = None;
        Some(after)
    }
}

/// The heartbeat's transaction commits: its owner lives for what is left of what it wrote.
pub(super) fn commit_beat(before: &State, client: u8) -> Option<State> {
    let process = before.client(client);
    let beat = process.beat?;
    let BeatStage::Judged(left) = beat.stage else { return None };
    let mut after = before.clone();
    *after.db.life_mut(client, process.life) = Life::Ticks(left);
    let heard = process.running.then_some(Beat { stage: BeatStage::Alive, ..beat });
    after.client_mut(client).beat = heard;
    Some(after)
}

fn answer(state: &mut State, client: u8, number: u8, answer: Answer) {
    let calls = &mut state.client_mut(client).calls;
    let call = &mut calls[usize::from(number)];
    if call.heard {
        call.stage = Stage::Answered(answer);
    } else {
        calls.remove(usize::from(number));
    }
}
