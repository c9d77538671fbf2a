//! Claims: one key, and clients that begin it, complete it, drop it and recover it.
//!
//! | state | |
//! |---|---|
//! | the claim's row | ready, running or done; the grant and the owner of the last attempt; whether its outcome is unclear |
//! | the effect | how often it has been committed; whether an attempt that somebody had in hand ended without a word |
//! | a process | its life; idle · looked · answered · working · with a transaction open · dropping |
//!
//! | action | atomic steps |
//! |---|---|
//! | begin | look without a lock · lock the row, judge, grant · the answer is heard |
//! | complete | check the grant and the life, with the row locked, in the transaction of the effect · commit, or roll back |
//! | drop | the attempt is gone · the claim is given back |
//! | reconcile | an attempt that is listed and not known is given back |
//! | time | a dead process' owner expires; a heartbeat that was in time commits; a process that has lost its life starts again |
//! | faults | a process dies, or is paused beyond its ttl; an answer is lost |
//!
//! | promise | |
//! |---|---|
//! | I6, effects | the effect is committed once at most |
//! | I6, ends | a stale attempt ends nothing |
//! | I4 | at most one process believes that the attempt is its own |
//! | unclear | who begins after an attempt that ended without a word is told so |
//! | never stuck | it is done, or it can be begun, or a running process that knows it is at it |
//!
//! | abstracted away | why that is enough |
//! |---|---|
//! | time, tokens, failover, a retry of a begin | `lease.rs`: a begin locks, judges and grants as an acquire does |
//! | fail, release, poison | end an attempt as complete or drop do |
//! | `claim_next` | begins, many at once, what nobody has locked |
//! | an attempt that knows by its own clock that it is lost | is the same, without the question: here it always asks |
//!
//! The mutants: [`Mutant`].

mod step;

use self::step::{Action, Doing, Life, State, Status};
use crate::explore::Model;
use crate::letter;

mutants! {
    /// Complete asks for the key alone (DESIGN decision 4). C32.
    FinishById,
    /// A claim that runs for long is begun again, whether its owner beats or not (decision 2). C33.
    RescueByRunTime,
    /// Complete compares, and does not lock the row (decision 5). C43.
    CompleteWithoutLock,
    /// Begin believes its look, and does not judge again under the lock (decision 8). C35.
    ReadThenInsert,
    /// A recovery neither waits for a heartbeat in flight nor marks the owner dead (decision 2; OWNER 1).
    PlainReadOfLife,
    /// The open transaction of a dead client is never ended (decision 5, the idle bound). C11.
    NoIdleBound,
    /// Nobody looks for attempts that no process knows (decision 2; trap B1).
    NoReconcile,
    /// The effect is committed in a transaction of its own, before the claim is completed: a mistake of the application.
    EffectApart,
    /// A dropped attempt is given back as if it had never begun.
    DropsWithoutAWord,
}

impl Mutant {
    /// Which promise it breaks.
    fn breaks(self) -> &'static str {
        match self {
            Self::FinishById | Self::CompleteWithoutLock => ENDS,
            Self::EffectApart => EFFECTS,
            Self::RescueByRunTime | Self::ReadThenInsert | Self::PlainReadOfLife => I4,
            Self::NoIdleBound | Self::NoReconcile => Claim::NEVER_STUCK,
            Self::DropsWithoutAWord => UNCLEAR,
        }
    }
}

const EFFECTS: &str = "I6: the effect is committed once at most";
const ENDS: &str = "I6: a stale attempt ends nothing";
const I4: &str = "I4: at most one process believes that the attempt is its own";
const UNCLEAR: &str = "who begins after an attempt that ended without a word is told so";

/// The model.
#[derive(Debug)]
struct Claim {
    clients: u8,
    mutant: Option<Mutant>,
}

impl Claim {
    fn is(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }
}

impl Model for Claim {
    type State = State;
    type Action = Action;

    const NEVER_STUCK: &'static str =
        "never stuck: it is done, or it can be begun, or a running process that knows it is at it";

    fn initial(&self) -> State {
        State::initial(self.clients)
    }

    fn begins(&self) -> &'static str {
        "nobody has begun"
    }

    fn actions(&self, state: &State) -> Vec<Action> {
        step::possible(state)
    }

    fn after(&self, state: &State, action: Action) -> Option<State> {
        self.step(state, action)
    }

    fn broken(&self, before: &State, action: Action, after: &State) -> Option<&'static str> {
        match action {
            // By what was committed: which attempt it was, and that it was the last one.
            Action::Commit(number) if after.effects < 2 => {
                let Doing::Open { grant, .. } = before.process(number).doing else { return None };
                if grant != before.row.grant {
                    return Some(ENDS);
                }
            }
            _ if after.effects > 1 => return Some(EFFECTS),
            Action::Take(_)
                if after.row.grant > before.row.grant && before.wordless && !after.row.unclear =>
            {
                return Some(UNCLEAR);
            }
            _ => {}
        }
        let believing = after.processes.iter().filter(|process| process.believes()).count();
        (believing > 1).then_some(I4)
    }

    fn is_fault(&self, _before: &State, action: Action, _after: &State) -> bool {
        matches!(action, Action::Die(_) | Action::Lapse(..) | Action::LoseAnswer(_))
    }

    fn is_well(&self, state: &State) -> bool {
        match state.row.status {
            Status::Done => true,
            Status::Running if state.owner_life() == Life::Alive => {
                let owner = state.process(state.row.owner);
                owner.running && owner.doing.grant() == Some(state.row.grant)
            }
            Status::Running | Status::Ready => {
                state.processes.iter().all(|process| process.running || !process.locks())
            }
        }
    }

    fn sight(&self, before: &State, action: Action, after: &State) -> Option<&'static str> {
        match action {
            Action::Take(_) if after.row.grant > before.row.grant => match before.row.status {
                Status::Running => Some(RECOVERED),
                _ if before.row.unclear => Some(TOLD),
                _ => None,
            },
            Action::Take(_) if before.row.status == Status::Running => {
                let open = before.owner_life() != Life::Alive;
                Some(if open { WAITS_FOR_COMPLETE } else { IN_PROGRESS })
            }
            Action::Take(_) | Action::Look(_) if before.row.status == Status::Done => Some(REPLAYED),
            Action::Complete(number) if !after.process(number).locks() => Some(REFUSED),
            Action::Reconcile(_) => Some(GIVEN_BACK),
            _ => None,
        }
    }

    fn sights(&self) -> &'static [&'static str] {
        &[RECOVERED, TOLD, WAITS_FOR_COMPLETE, IN_PROGRESS, REPLAYED, REFUSED, GIVEN_BACK]
    }

    fn tell(&self, before: &State, action: Action, after: &State) -> String {
        let process = |number: u8| format!("process {}", letter(number));
        match action {
            Action::Look(number) => format!("{} looks whether it is free", process(number)),
            Action::Take(number) if after.row.grant > before.row.grant => {
                format!("the server grants {} the attempt {}", letter(number), after.row.grant)
            }
            Action::Take(number) => {
                format!("the server tells {} that there is nothing to begin", letter(number))
            }
            Action::Hear(number) => format!("{} hears that it is to do it", process(number)),
            Action::Complete(number) if after.process(number).doing == Doing::Idle => {
                format!("{} completes, and is refused", process(number))
            }
            Action::Complete(number) => {
                format!("{} has its effect and completes; not yet committed", process(number))
            }
            Action::Commit(number) => format!("{} commits", process(number)),
            Action::RollBack(number) => format!("{} rolls back", process(number)),
            Action::Drop(number) => format!("{} drops the attempt", process(number)),
            Action::GiveBack(number) => format!("what {} dropped is given back", letter(number)),
            Action::Reconcile(number) => {
                format!("{} gives back an attempt that it does not know", process(number))
            }
            Action::Expire(number) => format!("the owner of {} has expired", letter(number)),
            Action::CommitBeat(number) => format!("the heartbeat of {} commits: it lives", letter(number)),
            Action::Restart(number) => format!("{} has lost its life, and starts again", process(number)),
            Action::Die(number) => format!("{} dies", process(number)),
            Action::Lapse(number, beat) => {
                let beat = if beat { ", with a heartbeat in flight" } else { "" };
                format!("{} is paused until its owner has expired{beat}", process(number))
            }
            Action::LoseAnswer(number) => format!("the answer to {} is lost", letter(number)),
        }
    }
}

const RECOVERED: &str = "an attempt is recovered from a dead owner";
const TOLD: &str = "a begin is told that the outcome before it is unclear";
const WAITS_FOR_COMPLETE: &str = "a recovery waits for an open complete of the dead";
const IN_PROGRESS: &str = "a begin finds somebody at it, under the lock";
const REPLAYED: &str = "a begin finds it done";
const REFUSED: &str = "a stale attempt is refused";
const GIVEN_BACK: &str = "an attempt that nobody knows is given back";

mod tests {
    use super::*;
    use crate::{assert_tells, check, clients, refute};

    #[test]
    fn the_protocol() {
        check("claim", &Claim { clients: clients(), mutant: None });
    }

    #[test]
    fn every_mutant_is_refuted() {
        for mutant in Mutant::ALL {
            let trace =
                refute(&format!("claim, {mutant:?}"), &Claim { clients: clients(), mutant: Some(*mutant) });
            assert_eq!(trace.promise, mutant.breaks(), "{mutant:?}\n{trace}");
        }
    }

    // The story of C32.
    #[test]
    fn who_wakes_up_late_finishes_the_attempt_of_another_one() {
        let trace = refute("claim", &Claim { clients: 2, mutant: Some(Mutant::FinishById) });
        assert_tells(
            &trace,
            &[
                "process A looks whether it is free",
                "the server grants A the attempt 1",
                "process A hears that it is to do it",
                "process A is paused until its owner has expired",
                "process B looks whether it is free",
                "the server grants B the attempt 2",
                "process A has its effect and completes; not yet committed",
                "process A commits",
            ],
        );
    }
}
