//! What can happen.

use super::state::State;
use super::{Lease, process, server, world};

/// How many calls of one process may be under way, heard or not.
pub(super) const MOST_CALLS: usize = 3;

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

/// All that might be possible: `step` says what is.
pub(super) fn possible(state: &State) -> Vec<Action> {
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
            actions.extend([Action::JudgeBeat(number), Action::CommitBeat(number), Action::HearBeat(number)]);
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

impl Lease {
    /// The state after it; none if it is not possible, or has to wait.
    pub(super) fn step(&self, before: &State, action: Action) -> Option<State> {
        match action {
            Action::SendBeat(client) => self.send_beat(before, client),
            Action::JudgeBeat(client) => self.judge_beat(before, client),
            Action::CommitBeat(client) => server::commit_beat(before, client),
            Action::HearBeat(client) => self.hear_beat(before, client),
            Action::Restart(client) => self.restart(before, client),
            Action::Acquire(client) => self.acquire(before, client),
            Action::Release(client) => self.release(before, client),
            Action::Retry(client) => self.retry(before, client),
            Action::GiveUp(client) => process::give_up(before, client),
            Action::Draw(client, call) => self.draw(before, client, call),
            Action::Arrive(client, call) => self.arrive(before, client, call),
            Action::Commit(client, call) => self.commit(before, client, call),
            Action::Hear(client, call) => process::hear(before, client, call),
            Action::Reconcile(client) => self.reconcile(before, client),
            Action::Fence(client) => self.fence(before, client),
            Action::Read(client) => process::read(before, client),
            Action::Write(client) => process::write(before, client),
            Action::RollBack(client) => self.roll_back(before, client),
            Action::Tick => self.tick(before),
            Action::Die(client) => self.die(before, client),
            Action::Cut(client, call) => self.cut(before, client, call),
            Action::StepBack => self.step_back(before),
            Action::ServerCrash => self.server_crash(before),
            Action::Replicate => world::replicate(before),
            Action::Failover => world::failover(before),
        }
    }
}
