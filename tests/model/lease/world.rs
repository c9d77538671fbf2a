//! What happens to them: time, and faults.

use super::state::{BeatStage, Known, Life, Stage, State};
use super::{Lease, Scene};

impl Lease {
    pub(super) fn tick(&self, before: &State) -> Option<State> {
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
    pub(super) fn die(&self, before: &State, client: u8) -> Option<State> {
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
    pub(super) fn cut(&self, before: &State, client: u8, number: u8) -> Option<State> {
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
    pub(super) fn step_back(&self, before: &State) -> Option<State> {
        let mut after = self.spend(before, Scene::Clock)?;
        for life in after.db.lives.iter_mut().flatten() {
            if let Life::Ticks(left) = life {
                *left = self.ttl();
            }
        }
        (after.db != before.db).then_some(after)
    }

    /// A release that is not on disk is taken back; whatever is under way ends.
    pub(super) fn server_crash(&self, before: &State) -> Option<State> {
        let mut after = self.spend(before, Scene::Wire)?;
        if after.db.released && !after.db.on_disk {
            (after.db.released, after.db.on_disk) = (false, true);
        }
        end_sessions(&mut after);
        Some(after)
    }
}

pub(super) fn replicate(before: &State) -> Option<State> {
    let behind = before.standby.as_ref().is_some_and(|standby| *standby != before.db);
    behind.then(|| State { standby: Some(before.db.clone()), ..before.clone() })
}

/// The standby takes over as it is.
pub(super) fn failover(before: &State) -> Option<State> {
    let mut after = before.clone();
    after.db = after.standby.take()?;
    after.faults -= 1;
    end_sessions(&mut after);
    Some(after)
}

fn end_sessions(state: &mut State) {
    for client in &mut state.clients {
        (client.beat, client.open) = (None, None);
        client.calls.clear();
    }
}
