//! The line: waiters' tickets, the hand-over, wake-ups that get lost, and giving up.
//!
//! | state | |
//! |---|---|
//! | the lease's row | which grant holds it, or held it last; released |
//! | the tickets | in the order in which they came |
//! | the owners' rows | alive · expired, with or without a heartbeat in flight that was in time · marked dead |
//! | fenced writes | which processes have one open |
//! | notifications | to which grant, and whether the database has proven it |
//! | a process | away · answered · in line · holding · releasing · leaving; whether it still has to hand over what it released |
//!
//! | action | atomic steps |
//! |---|---|
//! | acquire, and the same as a poll | look, queue, or grant to the head · the answer is heard |
//! | release | belief ends · free it and grant it to the head, or see to it later (`hand_over`) · |
//! | wake | sent after the commit · delivered |
//! | reconcile | a grant that is listed and not known is released |
//! | give up | belief ends · take the ticket back, or release what was granted (`withdraw`) |
//! | time | a dead process' owner expires; a heartbeat that was in time commits; a process that has lost its life starts again |
//! | faults | a process dies, or is paused beyond its ttl; a notification is lost, or forged |
//!
//! | promise | |
//! |---|---|
//! | I4 | at most one process believes that it holds the lease |
//! | I13 | nobody is served before an older ticket of the living; nobody living loses its place |
//! | I2 | nothing is granted while a fenced write is open |
//! | dead | nothing is granted to an owner that is known to be dead |
//! | hand-over | a release grants the lease to the head, or sees to it |
//! | giving up | who has given up keeps neither a ticket nor a grant |
//! | never stuck | the lease is held by a running process that knows it, or nobody living waits for it |
//!
//! | abstracted away | why that is enough |
//! |---|---|
//! | time | a running process beats, unless it is paused (a fault); that its trust ends before its life does is what `lease.rs` shows |
//! | tokens, lost answers, failover | `lease.rs` |
//! | an acquire under a life that is over | is answered so, and asked again under the next one, which is the same as beginning there |
//! | a database function is one step | it locks the lease's row first, and whoever comes to queue waits for that; who is skipped asks again, as a poll |
//! | a question on its way | is one that is not yet sent |
//! | the crash of the server | empties the line; whoever asks again queues again |
//!
//! The process after the last client holds the lease at first, and only ever gives it up. The others acquire once in each life. The mutants: [`Mutant`].

mod state;
mod step;
mod story;

use self::state::{Answer, Life, Place, State};
use self::step::Action;
use crate::explore::Model;

mutants! {
    /// The newest ticket is served first (DESIGN decision 9).
    NewestFirst,
    /// An acquire that finds the lease free takes it, whoever waits (decision 9; the contract of `acquire`).
    JumpsQueue,
    /// Who waits only listens (decision 9: NOTIFY is a hint, a poll timer always runs). C46.
    NoPoll,
    /// A release leaves it to the polls (decision 9).
    HandsToNobody,
    /// The hand-over of a release passes an open fence (decision 5).
    HandsOverDuringWrite,
    /// A release waits for open fences, of its own process too (decision 5; OWNER, found by a later review).
    ReleaseWaits,
    /// Giving up takes the ticket back and does not look whether it has been granted (decision 11). C24.
    BlindWithdraw,
    /// The hand-over does not ask whether the head lives (OWNER 5). C31.
    HandsToDead,
    /// A ticket whose owner has expired is thrown away without waiting for its heartbeat or marking it (decision 2).
    ThrowsAwayUndecided,
    /// A notification is believed without its proof (decision 9).
    ForgedWake,
    /// A hand-over is believed by a process whose own life is over (decision 6). C31.
    BlindWake,
}

impl Mutant {
    /// Which promise it breaks.
    fn breaks(self) -> &'static str {
        match self {
            Self::NewestFirst | Self::JumpsQueue => ORDER,
            Self::ThrowsAwayUndecided => PLACE,
            Self::NoPoll | Self::ReleaseWaits => Line::NEVER_STUCK,
            Self::HandsToNobody => HAND_OVER,
            Self::HandsOverDuringWrite => I2,
            Self::BlindWithdraw => GIVING_UP,
            Self::HandsToDead => DEAD,
            Self::ForgedWake | Self::BlindWake => I4,
        }
    }
}

const I2: &str = "I2: nothing is granted while a fenced write is open";
const I4: &str = "I4: at most one process believes that it holds the lease";
const ORDER: &str = "I13: nobody is served before an older ticket of the living";
const PLACE: &str = "I13: nobody living loses its place";
const DEAD: &str = "nothing is granted to an owner that is known to be dead";
const HAND_OVER: &str = "a release grants the lease to the head, or sees to it";
const GIVING_UP: &str = "who has given up keeps neither a ticket nor a grant";

/// The model.
#[derive(Debug)]
struct Line {
    clients: u8,
    mutant: Option<Mutant>,
}

impl Line {
    fn is(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }
}

impl Model for Line {
    type State = State;
    type Action = Action;

    const NEVER_STUCK: &'static str =
        "never stuck: the lease is held by a running process that knows it, or nobody living waits for it";

    fn initial(&self) -> State {
        State::initial(self.clients)
    }

    fn begins(&self) -> &'static str {
        "the last process holds the lease, nobody waits"
    }

    fn actions(&self, state: &State) -> Vec<Action> {
        step::possible(state)
    }

    fn after(&self, state: &State, action: Action) -> Option<State> {
        self.step(state, action)
    }

    fn broken(&self, before: &State, action: Action, after: &State) -> Option<&'static str> {
        if before.row.id != after.row.id {
            // Somebody was granted it.
            let ahead = before.queue.iter().take_while(|ticket| **ticket != after.row.id);
            if ahead.into_iter().any(|ticket| before.waits(*ticket)) {
                return Some(ORDER);
            }
            if before.processes.iter().any(|process| process.writes) {
                return Some(I2);
            }
            if after.life(after.row.id) != Life::Alive {
                return Some(DEAD);
            }
        }
        match action {
            Action::Release(process) => {
                let overlooked = !before.is_free()
                    && after.is_free()
                    && after.queue.iter().any(|ticket| after.life(*ticket) == Life::Alive)
                    && !after.process(process).hands_over;
                if overlooked {
                    return Some(HAND_OVER);
                }
            }
            Action::Withdraw(process) => {
                let id = before.id(process);
                if after.queue.contains(&id) || !after.is_free() && after.row.id == id {
                    return Some(GIVING_UP);
                }
            }
            _ => {}
        }
        let numbers = || (0..).zip(&after.processes);
        if numbers().filter(|(_, process)| process.believes()).count() > 1 {
            return Some(I4);
        }
        let has_no_place = |number| {
            let id = after.id(number);
            after.waits(id) && !after.queue.contains(&id) && after.row.id != id
        };
        numbers()
            .any(|(number, process)| process.place == Place::InLine && has_no_place(number))
            .then_some(PLACE)
    }

    fn is_fault(&self, _before: &State, action: Action, _after: &State) -> bool {
        // Nobody need give up.
        matches!(
            action,
            Action::Die(_) | Action::Lapse(..) | Action::Lose(_) | Action::Forge(_) | Action::GiveUp(_)
        )
    }

    fn is_well(&self, state: &State) -> bool {
        if state.is_free() {
            return !state.queue.iter().any(|ticket| state.waits(*ticket));
        }
        let holder = state.process(state.row.id.process);
        holder.running && matches!(holder.place, Place::Holding { .. })
    }

    fn sight(&self, before: &State, action: Action, after: &State) -> Option<&'static str> {
        let granted = before.row.id != after.row.id;
        match action {
            Action::HandOver(_) if granted => Some(HANDED_OVER_LATER),
            Action::Release(process) if after.process(process).hands_over && !before.is_written() => {
                Some(UNDECIDED)
            }
            Action::Release(_) if granted && before.queue.len() > after.queue.len() + 1 => Some(DEAD_SKIPPED),
            Action::Release(_) if granted => Some(HANDED_OVER),
            Action::Withdraw(process) if before.row.id == before.id(process) => Some(GIVEN_UP_TOO_LATE),
            Action::Ask(process) if before.process(process).place == Place::InLine => {
                let answered = after.process(process).place;
                (answered == Place::Answered(Answer::Granted) && !granted).then_some(FOUND_BY_ASKING)
            }
            Action::Deliver(wake) if !before.wakes[usize::from(wake)].proven => Some(FORGERY_IGNORED),
            Action::Restart(process) if before.process(process).place == Place::InLine => Some(BACK_IN_LINE),
            _ => None,
        }
    }

    fn sights(&self) -> &'static [&'static str] {
        &[
            HANDED_OVER,
            HANDED_OVER_LATER,
            UNDECIDED,
            DEAD_SKIPPED,
            GIVEN_UP_TOO_LATE,
            FOUND_BY_ASKING,
            FORGERY_IGNORED,
            BACK_IN_LINE,
        ]
    }

    fn tell(&self, before: &State, action: Action, after: &State) -> String {
        story::tell(before, action, after)
    }
}

const HANDED_OVER: &str = "a release hands over";
const HANDED_OVER_LATER: &str = "what was released during a write is handed over after it";
const UNDECIDED: &str = "the head's heartbeat is in flight: not decided yet";
const DEAD_SKIPPED: &str = "a dead waiter is skipped";
const GIVEN_UP_TOO_LATE: &str = "who gives up has just been granted it";
const FOUND_BY_ASKING: &str = "a grant that was not heard of is found by asking";
const FORGERY_IGNORED: &str = "a forged notification is ignored";
const BACK_IN_LINE: &str = "a waiter whose life is over begins anew";

mod tests {
    use super::*;
    use crate::{assert_tells, check, clients, refute};

    fn protocol(mutant: Option<Mutant>) -> Line {
        Line { clients: clients(), mutant }
    }

    #[test]
    fn waiting() {
        check("line", &protocol(None));
    }

    #[test]
    fn every_rule_is_needed() {
        for mutant in Mutant::ALL {
            let trace = refute(&format!("line, {mutant:?}"), &protocol(Some(*mutant)));
            assert_eq!(trace.promise, mutant.breaks(), "{mutant:?}");
        }
    }
    #[test]
    fn the_story_of_a_waiter_that_gives_up_too_late() {
        let mutant = Some(Mutant::BlindWithdraw);
        let trace = refute("line, a story", &Line { clients: 2, mutant });
        let story = [
            "process A sends acquire; the server answers: in line",
            "process A hears that it is in line",
            "process A gives up, and sends withdraw",
            "process C sends release",
            "the server does the release of C: frees the lease, and grants it to A",
            "the server finds no ticket of A",
        ];
        assert_tells(&trace, &story);
    }
}
