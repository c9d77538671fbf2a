//! What can happen, and what comes of it.

use super::state::{
    About, Answer, Ask, Beat, BeatStage, Call, Grant, Held, Known, Life, Open, Stage, State, View,
};
use super::{Lease, Mutant, Scene};

/// How many calls of one process may be under way, heard or not.
const MOST_CALLS: usize = 3;

/// A step, by the client that it is of; of a call, by its place in the client's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    // The process.
    SendBeat(u8),
    HearBeat(u8),
    Restart(u8),
    Acquire(u8),
    Release(u8),
    Hear(u8, u8),
    Retry(u8),
    GiveUp(u8),
    Reconcile(u8),
    Fence(u8),
    Read(u8),
    Write(u8),
    RollBack(u8),
    // The server.
    JudgeBeat(u8),
    CommitBeat(u8),
    Draw(u8, u8),
    Arrive(u8, u8),
    Commit(u8, u8),
    Replicate,
    // The world.
    Tick,
    Die(u8),
    Cut(u8, u8),
    StepBack,
    ServerCrash,
    Failover,
}

impl Lease {
    /// All that might be possible: `step` says what is.
    pub(super) fn possible(&self, state: &State) -> Vec<Action> {
        let mut actions = Vec::with_capacity(24);
        for (client, number) in state.clients.iter().zip(0..) {
            for call in 0..u8::try_from(client.calls.len()).unwrap() {
                actions.extend([
                    Action::Draw(number, call),
                    Action::Arrive(number, call),
                    Action::Commit(number, call),
                    Action::Hear(number, call),
                    Action::Cut(number, call),
                ]);
            }
            if client.beat.is_some() {
                actions.extend([
                    Action::JudgeBeat(number),
                    Action::CommitBeat(number),
                    Action::HearBeat(number),
                ]);
            }
            if client.open.is_some() {
                actions.extend([Action::Read(number), Action::Write(number), Action::RollBack(number)]);
            }
            if client.running {
                actions.extend([
                    Action::SendBeat(number),
                    Action::Restart(number),
                    Action::Acquire(number),
                    Action::Release(number),
                    Action::Retry(number),
                    Action::GiveUp(number),
                    Action::Reconcile(number),
                    Action::Fence(number),
                    Action::Die(number),
                ]);
            }
        }
        actions.extend([
            Action::Tick,
            Action::StepBack,
            Action::ServerCrash,
            Action::Replicate,
            Action::Failover,
        ]);
        actions
    }

    /// The state after it; none if it is not possible, or has to wait.
    pub(super) fn step(&self, before: &State, action: Action) -> Option<State> {
        match action {
            Action::SendBeat(client) => self.send_beat(before, client),
            Action::JudgeBeat(client) => self.judge_beat(before, client),
            Action::CommitBeat(client) => commit_beat(before, client),
            Action::HearBeat(client) => self.hear_beat(before, client),
            Action::Restart(client) => self.restart(before, client),
            Action::Acquire(client) => self.acquire(before, client),
            Action::Release(client) => self.release(before, client),
            Action::Retry(client) => self.retry(before, client),
            Action::GiveUp(client) => give_up(before, client),
            Action::Draw(client, call) => self.draw(before, client, call),
            Action::Arrive(client, call) => self.arrive(before, client, call),
            Action::Commit(client, call) => self.commit(before, client, call),
            Action::Hear(client, call) => self.hear(before, client, call),
            Action::Reconcile(client) => self.reconcile(before, client),
            Action::Fence(client) => self.fence(before, client),
            Action::Read(client) => read(before, client),
            Action::Write(client) => write(before, client),
            Action::RollBack(client) => self.roll_back(before, client),
            Action::Tick => self.tick(before),
            Action::Die(client) => self.die(before, client),
            Action::Cut(client, call) => self.cut(before, client, call),
            Action::StepBack => self.step_back(before),
            Action::ServerCrash => self.server_crash(before),
            Action::Replicate => replicate(before),
            Action::Failover => failover(before),
        }
    }

    // Heartbeats: src/owner/heartbeat.rs, and `heartbeat` in 0002_owners.sql.

    fn send_beat(&self, before: &State, client: u8) -> Option<State> {
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

    /// Locks the owner's row, then judges, in the next statement.
    fn judge_beat(&self, before: &State, client: u8) -> Option<State> {
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

    /// Trusted from the instant before it was sent.
    fn hear_beat(&self, before: &State, client: u8) -> Option<State> {
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
    fn restart(&self, before: &State, client: u8) -> Option<State> {
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

    // Acquire and release, as a process asks: src/lease/attempt.rs, src/lease/held.rs, src/owner/session.rs.

    fn acquire(&self, before: &State, client: u8) -> Option<State> {
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

    fn release(&self, before: &State, client: u8) -> Option<State> {
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
    fn retry(&self, before: &State, client: u8) -> Option<State> {
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
                send(&mut after, client, Ask::Release { token }, grant, true)
            }
        }
        Some(after)
    }

    fn hear(&self, before: &State, client: u8, call: u8) -> Option<State> {
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
                if self.is(Mutant::TrustsGrant) {
                    process.trust = self.ttl();
                }
            }
            _ => process.known.remove(answered.grant),
        }
        Some(after)
    }

    // And as the server answers: `acquire` and `release` in 0003_leases.sql.

    /// As it should not be: `nextval` before the row is locked.
    fn draw(&self, before: &State, client: u8, call: u8) -> Option<State> {
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

    fn arrive(&self, before: &State, client: u8, number: u8) -> Option<State> {
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

    fn commit(&self, before: &State, client: u8, number: u8) -> Option<State> {
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

    /// Compares what the database lists for this owner with what is known here: src/owner/reconcile.rs.
    fn reconcile(&self, before: &State, client: u8) -> Option<State> {
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

    // The fenced write: `fence` in 0005_fence.sql.

    fn fence(&self, before: &State, client: u8) -> Option<State> {
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
            let locks = looks && !self.is(Mutant::FenceWithoutLock);
            process.open = Some(Open { token: held.token, view: View::Nothing, locks });
        } else {
            process.held = None;
            process.known.remove(held.grant);
        }
        Some(after)
    }

    /// By the process at any moment; of one that is dead by the server, when it has been idle for too long.
    fn roll_back(&self, before: &State, client: u8) -> Option<State> {
        let process = before.client(client);
        if process.open.is_none() || !process.running && self.is(Mutant::NoIdleBound) {
            return None;
        }
        let mut after = before.clone();
        after.client_mut(client).open = None;
        Some(after)
    }

    // The world.

    fn tick(&self, before: &State) -> Option<State> {
        if !self.time_passes() {
            return None;
        }
        let mut after = before.clone();
        for life in after.db.lives.iter_mut().flatten() {
            if let Life::Ticks(left) = life {
                *left = left.saturating_sub(1);
            }
        }
        for client in &mut after.clients {
            client.trust = client.trust.saturating_sub(1);
            if let Some(beat) = &mut client.beat {
                beat.age = self.ttl().min(beat.age + 1);
                if let BeatStage::Judged(left) = &mut beat.stage {
                    *left = left.saturating_sub(1);
                }
            }
        }
        (after != *before).then_some(after)
    }

    /// The state with a fault less, if the scene has this one and there are any left.
    fn spend(&self, before: &State, scene: Scene) -> Option<State> {
        let faults = before.faults.checked_sub(1)?;
        (self.scene == scene).then(|| State { faults, ..before.clone() })
    }

    /// Its sessions live on until the server notices; what it had sent may still arrive.
    fn die(&self, before: &State, client: u8) -> Option<State> {
        let mut after = self.spend(before, Scene::Pause)?;
        let process = after.client_mut(client);
        (process.running, process.trust, process.held, process.about) = (false, 0, None, None);
        process.known = Known::default();
        process.beat =
            process.beat.filter(|beat| matches!(beat.stage, BeatStage::Sent | BeatStage::Judged(_)));
        process.calls.retain(|call| !matches!(call.stage, Stage::Answered(_)));
        process.calls.iter_mut().for_each(|call| call.heard = false);
        Some(after)
    }

    /// Nobody will hear the answer; the call itself goes on, or has yet to arrive.
    fn cut(&self, before: &State, client: u8, number: u8) -> Option<State> {
        let mut after = self.spend(before, Scene::Wire)?;
        let calls = &mut after.client_mut(client).calls;
        let call = &mut calls[usize::from(number)];
        if !call.heard {
            return None;
        }
        call.heard = false;
        if matches!(call.stage, Stage::Answered(_)) {
            calls.remove(usize::from(number));
        }
        Some(after)
    }

    /// So far that every owner that is not marked has its whole ttl again.
    fn step_back(&self, before: &State) -> Option<State> {
        let mut after = self.spend(before, Scene::Clock)?;
        for life in after.db.lives.iter_mut().flatten() {
            if let Life::Ticks(left) = life {
                *left = self.ttl();
            }
        }
        (after.db != before.db).then_some(after)
    }

    /// A release that is not on disk is taken back; whatever is under way ends.
    fn server_crash(&self, before: &State) -> Option<State> {
        let mut after = self.spend(before, Scene::Wire)?;
        if after.db.released && !after.db.on_disk {
            (after.db.released, after.db.on_disk) = (false, true);
        }
        end_sessions(&mut after);
        Some(after)
    }
}

/// The heartbeat's transaction commits: its owner lives for what is left of what it wrote.
fn commit_beat(before: &State, client: u8) -> Option<State> {
    let process = before.client(client);
    let beat = process.beat?;
    let BeatStage::Judged(left) = beat.stage else { return None };
    let mut after = before.clone();
    *after.db.life_mut(client, process.life) = Life::Ticks(left);
    let heard = process.running.then_some(Beat { stage: BeatStage::Alive, ..beat });
    after.client_mut(client).beat = heard;
    Some(after)
}

/// Nothing was heard for too long: whatever is found under this grant is for reconcile.
fn give_up(before: &State, client: u8) -> Option<State> {
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

fn read(before: &State, client: u8) -> Option<State> {
    let process = before.client(client);
    let open = process.open.filter(|open| open.view == View::Nothing && process.running)?;
    let mut after = before.clone();
    after.client_mut(client).open = Some(Open { view: View::Current, ..open });
    Some(after)
}

/// Writes what follows from what was read, and commits.
fn write(before: &State, client: u8) -> Option<State> {
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

fn replicate(before: &State) -> Option<State> {
    let behind = before.standby.as_ref().is_some_and(|standby| *standby != before.db);
    behind.then(|| State { standby: Some(before.db.clone()), ..before.clone() })
}

/// The standby takes over as it is.
fn failover(before: &State) -> Option<State> {
    let mut after = before.clone();
    after.db = after.standby.take()?;
    after.faults -= 1;
    end_sessions(&mut after);
    Some(after)
}

fn send(state: &mut State, client: u8, ask: Ask, grant: Grant, heard: bool) {
    let process = state.client_mut(client);
    process.calls.push(Call { ask, grant, life: process.life, stage: Stage::Sent, heard });
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

fn end_sessions(state: &mut State) {
    for client in &mut state.clients {
        (client.beat, client.open) = (None, None);
        client.calls.clear();
    }
}
