//! Owners, grants and fences: one lease, and clients that acquire it, beat, write through the fence and release.
//!
//! | state | |
//! |---|---|
//! | the lease's row | token, grant, owner, released; whether a release is on disk yet |
//! | the owners' rows | alive for so many ticks, or marked dead; one for each life of a process |
//! | the rest of the database | the sequence; the token of the last fenced write; open fenced transactions; a standby |
//! | a process | the life it lives and for how many ticks it trusts it; which grants it knows; the one it holds; what it is about (an acquire, a release); a heartbeat and calls under way, each with its age, its stage, and whether an answer will be heard |
//!
//! | action | atomic steps |
//! |---|---|
//! | heartbeat | sent · judged with the owner's row locked · committed · answer heard |
//! | acquire | announced and sent · looked, locked, judged, token drawn · committed · answer heard |
//! | release | sent · done · answer heard; asked again, like an acquire, when the answer is lost |
//! | fenced write | BEGIN and fence · read · write and commit, or roll back at any moment |
//! | reconcile | compare the database's list with what is known · release what is not |
//! | restart | the old owner's row is marked dead, a new life begins |
//! | time | a tick for all clocks |
//! | faults | a process dies; an answer is lost; the database's clock steps back; the server crashes; failover |
//!
//! | promise | |
//! |---|---|
//! | I1 | of two grants, the later one has the larger token |
//! | I2 | fenced writes commit in token order; none overwrites one that it has not read |
//! | I4 | at most one process believes that it holds the lease |
//! | answers | nobody is refused because of its own first attempt |
//! | never stuck | a running process that knows it holds the lease, or it can be granted |
//!
//! | abstracted away | why that is enough |
//! |---|---|
//! | time is ticks, a ttl is two | clocks run at one speed (the margin is for those that do not); a step happens between two ticks, any number of them; lives and trust count down, so no clock grows |
//! | a paused process | is one that takes no step while others do: any client, at any point, for any time |
//! | the loss signal | a belief is judged by the clock; whoever is told, and when, changes nothing that is written |
//! | `BEGIN`, `COMMIT`, an update, a release | each one step: their locks are not waited for with another lock held |
//! | a waiting lock request | the step is not possible until the lock is free: which is when it would go on |
//! | three calls of a process under way at most | more are more of the same |
//! | `try`, no queue; READ COMMITTED; no cap | the queue is `line.rs`; the rest is tested against Postgres |
//!
//! Four scenes, each with the faults that matter together and without what does not: [`Scene`]. The rules that are
//! switched off: [`Mutant`].

mod process;
mod server;
mod state;
mod step;
mod story;
mod world;

use self::state::{Answer, Ask, Call, Stage, State, View};
use self::step::Action;
use crate::explore::Model;

/// Which faults there are; and what is left out so that all of it can be explored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scene {
    /// Who believes what when A holds the lease at first: time, heartbeats step by step, the database's clock steps
    /// back. Nobody writes, releases or starts again.
    Clock,
    /// Who writes what when A holds the lease at first: fenced writes, processes that are paused or die. A heartbeat
    /// is one step.
    Pause,
    /// Answers are lost, the server crashes. No time passes, so every owner lives; nobody writes.
    Wire,
    /// Fenced writes, and a standby that lags takes over. No time passes. That two believe then is not excluded
    /// (nobody has told the first one); that both write is.
    Failover,
}

mutants! {
    /// Writes without a fence (DESIGN decision 5): the classic pause between looking and writing.
    NoFence,
    /// The fence compares and does not lock the row (decision 5). C43.
    FenceWithoutLock,
    /// A grant takes the row by `FOR NO KEY UPDATE`, which passes open fences (decision 5; OWNER 3, control).
    GrantPassesFence,
    /// The fence compares the token alone, not the pair (decision 4): a failover issues a number twice.
    FenceByNumber,
    /// The fenced transaction of a dead client is never ended (decision 5, the idle bound). C11.
    NoIdleBound,
    /// The token is drawn before the row is locked (decision 3).
    EarlyToken,
    /// The heartbeat is an upsert (decision 2, "dead is final"; the contract of `heartbeat`). C21.
    BeatUpserts,
    /// A takeover reads the owner's life without locking its row, and marks nothing (decision 2; OWNER 1): a
    /// heartbeat in flight succeeds after it.
    PlainReadOfLife,
    /// A takeover locks and judges, and does not write the mark (decision 2): the clock steps back, and the dead lives.
    NoMark,
    /// A process believes until it is told (decision 6). C15.
    IgnoresDeadline,
    /// The deadline counts from the answer, not from before the sending (decision 6). C26.
    DeadlineFromReply,
    /// A retry has a grant id of its own (decision 4, idempotence).
    FreshRetry,
    /// A retry skips a locked row (decision 4; trap B5).
    SkippingRetry,
    /// No reconcile (decision 2; trap B1).
    NoReconcile,
    /// A grant id is known from its answer on, not before it is sent (trap B1): reconcile takes it away.
    AnnouncedLate,
    /// Release asks for the name alone (decision 4). C32.
    ReleaseByName,
}

impl Mutant {
    /// Where it shows.
    fn scene(self) -> Scene {
        match self {
            Self::FenceByNumber => Scene::Failover,
            Self::EarlyToken
            | Self::FreshRetry
            | Self::SkippingRetry
            | Self::NoReconcile
            | Self::AnnouncedLate
            | Self::ReleaseByName => Scene::Wire,
            Self::NoFence | Self::FenceWithoutLock | Self::GrantPassesFence | Self::NoIdleBound => {
                Scene::Pause
            }
            _ => Scene::Clock,
        }
    }

    /// Which promise it breaks.
    fn breaks(self) -> &'static str {
        match self {
            Self::NoFence | Self::FenceWithoutLock | Self::GrantPassesFence | Self::FenceByNumber => I2,
            Self::EarlyToken => I1,
            Self::FreshRetry | Self::SkippingRetry => ANSWERS,
            Self::NoIdleBound | Self::NoReconcile => Lease::NEVER_STUCK,
            _ => I4,
        }
    }
}

const I1: &str = "I1: of two grants, the later one has the larger token";
const I2: &str = "I2: fenced writes commit in token order, and none overwrites one that it has not read";
const I4: &str = "I4: at most one process believes that it holds the lease";
const ANSWERS: &str = "nobody is refused because of its own first attempt";

/// The model.
#[derive(Debug)]
struct Lease {
    scene: Scene,
    clients: u8,
    mutant: Option<Mutant>,
}

impl Lease {
    fn is(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }

    /// How many faults there may be, of the scene's kinds, in any order.
    fn faults(&self) -> u8 {
        match self.scene {
            Scene::Wire => 2,
            Scene::Clock | Scene::Pause | Scene::Failover => 1,
        }
    }

    /// How often a client may acquire; what it holds at first counts.
    fn attempts(&self) -> u8 {
        if self.scene == Scene::Wire && self.clients == 2 { 2 } else { 1 }
    }

    /// How many lives a process may have, one after the other.
    fn lives(&self) -> u8 {
        if self.scene == Scene::Pause { 2 } else { 1 }
    }

    /// For how many ticks a heartbeat keeps an owner alive.
    fn ttl(&self) -> u8 {
        if self.time_passes() { 2 } else { 1 }
    }

    fn time_passes(&self) -> bool {
        matches!(self.scene, Scene::Clock | Scene::Pause)
    }

    fn has_writes(&self) -> bool {
        matches!(self.scene, Scene::Pause | Scene::Failover)
    }

    /// Whether the client believes that it holds the lease.
    fn believes(&self, state: &State, client: u8) -> bool {
        let client = state.client(client);
        client.running && client.held.is_some() && (client.trust > 0 || self.is(Mutant::IgnoresDeadline))
    }
}

impl Model for Lease {
    type State = State;
    type Action = Action;

    const NEVER_STUCK: &'static str =
        "never stuck: a running process that knows it holds the lease, or it can be granted";

    fn initial(&self) -> State {
        State::initial(self)
    }

    fn begins(&self) -> &'static str {
        if self.time_passes() { "process A holds the lease, with token 1" } else { "nobody holds the lease" }
    }

    fn actions(&self, state: &State) -> Vec<Action> {
        step::possible(state)
    }

    fn after(&self, state: &State, action: Action) -> Option<State> {
        self.step(state, action)
    }

    fn broken(&self, before: &State, action: Action, after: &State) -> Option<&'static str> {
        match action {
            Action::Commit(..) if after.db.token <= before.db.token => return Some(I1),
            Action::Arrive(client, call) if is_refused_by_itself(before, client, call, after) => {
                return Some(ANSWERS);
            }
            Action::Write(client) => {
                let open = before.client(client).open?;
                if open.view == View::Overwritten || open.token < before.db.written {
                    return Some(I2);
                }
            }
            _ => {}
        }
        let believing = (0..self.clients).filter(|client| self.believes(after, *client)).count();
        (believing > 1 && self.scene != Scene::Failover).then_some(I4)
    }

    fn is_fault(&self, before: &State, action: Action, after: &State) -> bool {
        match action {
            Action::Die(_) | Action::Cut(..) | Action::StepBack | Action::ServerCrash | Action::Failover => {
                true
            }
            // A process that runs beats in time.
            Action::Tick => before.clients.iter().zip(&after.clients).zip(0..).any(|((was, is), client)| {
                let lived = |state: &State| state.db.life(client, was.life).is_alive();
                was.running && (was.trust > is.trust && is.trust == 0 || lived(before) && !lived(after))
            }),
            _ => false,
        }
    }

    fn is_well(&self, state: &State) -> bool {
        if state.locked() {
            return false;
        }
        if state.db.is_held() {
            let owner = state.client(state.db.owner);
            return owner.running && owner.held.is_some_and(|held| held.grant == state.db.grant);
        }
        // Free, and no write of the dead is open.
        state.clients.iter().all(|client| client.running || client.open.is_none_or(|open| !open.locks))
    }

    fn sight(&self, before: &State, action: Action, after: &State) -> Option<&'static str> {
        match action {
            Action::Commit(client, call) => match before.client(client).calls[usize::from(call)].stage {
                Stage::Locked { buries: true, .. } => Some(TAKEOVER),
                _ if !self.is(Mutant::EarlyToken) && before.db.token > after.db.token => Some(REISSUED),
                _ => None,
            },
            Action::Arrive(client, call) => {
                let (call, row) = (before.client(client).calls[usize::from(call)], &before.db);
                let granted_before = row.is_held() && row.grant == call.grant;
                match call.ask {
                    Ask::Acquire { retry: true } if granted_before => Some(OWN_GRANT_FOUND),
                    Ask::Acquire { .. } if !row.is_held() && before.fences_open() => Some(WAITS_FOR_FENCE),
                    Ask::Release { .. } if !after.db.released && !row.released => Some(LATE_RELEASE),
                    _ => None,
                }
            }
            Action::Fence(client) if after.client(client).open.is_none() => Some(FENCED_OFF),
            Action::Reconcile(client) if after.client(client).held.is_none() => {
                if before.client(client).held.is_some() { Some(LOSS_FOUND) } else { Some(GIVEN_BACK) }
            }
            Action::Failover if after.db.sequence < before.db.sequence => Some(REISSUED),
            Action::HearBeat(client) if after.client(client).trust == 0 => Some(TOLD_DEAD),
            _ => None,
        }
    }

    fn sights(&self) -> &'static [&'static str] {
        match self.scene {
            Scene::Clock => &[TAKEOVER, TOLD_DEAD],
            Scene::Pause => &[TAKEOVER, WAITS_FOR_FENCE, FENCED_OFF],
            Scene::Wire => &[OWN_GRANT_FOUND, LATE_RELEASE, GIVEN_BACK],
            Scene::Failover => &[REISSUED, FENCED_OFF, OWN_GRANT_FOUND, GIVEN_BACK, LOSS_FOUND],
        }
    }

    fn tell(&self, before: &State, action: Action, after: &State) -> String {
        story::tell(before, action, after)
    }
}

const TAKEOVER: &str = "a lease is taken over from a dead owner";
const WAITS_FOR_FENCE: &str = "a lease that is free is refused while a fenced write is open";
const FENCED_OFF: &str = "a stale holder is refused by the fence";
const TOLD_DEAD: &str = "a heartbeat is answered: dead";
const OWN_GRANT_FOUND: &str = "a retry finds its own grant";
const LATE_RELEASE: &str = "a release comes too late, and leaves the next holder alone";
const GIVEN_BACK: &str = "a grant that nobody knows is given back";
const LOSS_FOUND: &str = "a process finds out that its grant is gone";
const REISSUED: &str = "a token will be issued a second time";

/// Whether this acquire is refused by a grant, or a lock, of the same acquire.
fn is_refused_by_itself(before: &State, client: u8, call: u8, after: &State) -> bool {
    let asking = before.client(client).calls[usize::from(call)];
    let same = |other: &Call| {
        other.grant.is_same_acquire(asking.grant) && matches!(other.stage, Stage::Locked { .. })
    };
    asking.heard
        && after.client(client).calls[usize::from(call)].stage == Stage::Answered(Answer::Refused)
        && (before.client(client).calls.iter().any(same)
            || before.db.is_held() && before.db.grant.is_same_acquire(asking.grant))
}

mod tests {
    use super::*;
    use crate::{assert_tells, check, clients, refute};

    fn protocol(scene: Scene, mutant: Option<Mutant>) -> Lease {
        Lease { scene, clients: clients(), mutant }
    }

    #[test]
    fn the_clock() {
        check("lease, clock", &protocol(Scene::Clock, None));
    }

    #[test]
    fn pauses() {
        check("lease, pauses", &protocol(Scene::Pause, None));
    }

    #[test]
    fn the_wire() {
        check("lease, wire", &protocol(Scene::Wire, None));
    }

    #[test]
    fn failover() {
        check("lease, failover", &protocol(Scene::Failover, None));
    }

    #[test]
    fn every_rule_is_needed() {
        for mutant in Mutant::ALL {
            let trace = refute(&format!("lease, {mutant:?}"), &protocol(mutant.scene(), Some(*mutant)));
            assert_eq!(trace.promise, mutant.breaks(), "{mutant:?}");
        }
    }
    // B5: the retry is refused beside its own first attempt, which then commits.
    #[test]
    fn the_story_of_a_retry_that_skips() {
        let mutant = Some(Mutant::SkippingRetry);
        let trace = refute("lease, a story", &Lease { scene: Scene::Wire, clients: 2, mutant });
        let story = [
            "process A sends acquire",
            "the server locks the lease's row and writes token 1 for A, not yet committed",
            "the connection of A breaks: the answer to this acquire will not be heard",
            "process A sends acquire again",
            "the server refuses A: somebody is at the lease's row",
        ];
        assert_tells(&trace, &story);
    }

    // B1: without reconcile the lease is held for as long as the process beats, and nobody knows.
    #[test]
    fn the_story_of_a_grant_that_nobody_knows() {
        let mutant = Some(Mutant::NoReconcile);
        let trace = refute("lease, a story", &Lease { scene: Scene::Wire, clients: 2, mutant });
        let story = [
            "process A sends acquire",
            "the server locks the lease's row and writes token 1 for A, not yet committed",
            "the connection of A breaks: the answer to this acquire will not be heard",
            "process A gives up, and forgets the grant id",
            "and from here no way leads on, without a further fault",
        ];
        assert_tells(&trace, &story);
    }
}
