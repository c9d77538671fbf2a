//! Permits: rows that die with their owner, a limit that changes, fenced writes, and the order of those who wait.
//!
//! | state | |
//! |---|---|
//! | the semaphore | its limit, two or one; of each process whether it has been granted permits, and how many |
//! | the line | who waits, for how many, in order |
//! | a process | away · asking, with what it saw · in line · holding, with or without trust · whether the database takes it for alive · whether a fenced write is open |
//!
//! | promise | |
//! |---|---|
//! | I14 | when permits are granted, those believed in and those written under are within the limit |
//! | eviction | who lives and has not released keeps its permits |
//! | order | nobody is granted permits before one who waits, came before it and lives |
//! | never stuck | nobody living waits, or somebody holds, lives and runs |
//!
//! | abstracted away | why that is enough |
//! |---|---|
//! | tokens, lost answers, heartbeats in flight | `lease.rs`: a permit is granted, fenced and reconciled as a lease is |
//! | tickets that are given back, wake-ups | `line.rs` |
//! | slots | a grant locks the rows it takes; which of the free ones does not matter |

use crate::explore::Model;
use crate::letter;

mutants! {
    /// A number is raised and lowered instead of rows: nobody lowers it for the dead (DESIGN section 3).
    Counter,
    /// The limit is the one of the first use, whatever is stored since.
    IgnoresLimitChange,
    /// What was seen before the semaphore's row was locked decides (DESIGN decision 3).
    TrustsTheLook,
    /// Whoever might be alive is taken from (decision 6).
    TakesFromTheLiving,
    /// A slot under an open fenced write is granted (decision 5).
    GrantsUnderWrite,
    /// A limit that shrinks ends what is above it.
    Evicts,
    /// Whoever wants what is free gets it, though one who wants more came before.
    PassesBy,
    /// A holder believes until it is told otherwise (decision 6). C15.
    NoDeadline,
}

impl Mutant {
    /// Which promise it breaks.
    fn breaks(self) -> &'static str {
        match self {
            Self::Counter => Permits::NEVER_STUCK,
            Self::Evicts => EVICTION,
            Self::PassesBy => ORDER,
            _ => I14,
        }
    }
}

const I14: &str =
    "I14: when permits are granted, those believed in and those written under are within the limit";
const EVICTION: &str = "who lives and has not released keeps its permits";
const ORDER: &str = "nobody is granted permits before one who waits, came before it and lives";

/// The last one wants two permits at once, the others one.
const PROCESSES: u8 = 3;
const LARGE: u8 = 2;

fn wants(process: u8) -> u8 {
    if process + 1 == PROCESSES { 2 } else { 1 }
}

/// The model.
#[derive(Debug)]
struct Permits {
    mutant: Option<Mutant>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    limit: u8,
    /// How often it may still change.
    changes: u8,
    line: Vec<u8>,
    processes: Vec<Process>,
    /// What the dead have left on the counter of the mutant.
    stranded: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Process {
    alive: bool,
    /// Its rows are not released.
    granted: bool,
    writes: bool,
    place: Place,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Place {
    Away,
    /// It has looked, and is about to lock the semaphore's row.
    Asking {
        saw_room: bool,
    },
    InLine,
    Holding {
        trusts: bool,
    },
    /// It has had its turn.
    Done,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Look(u8),
    Acquire(u8),
    /// In line: asks again.
    Poll(u8),
    Hear(u8),
    BeginWrite(u8),
    EndWrite(u8),
    Release(u8),
    Deadline(u8),
    Expire(u8),
    Resize(u8),
}

impl State {
    fn process(&self, process: u8) -> Process {
        self.processes[usize::from(process)]
    }

    /// In use as the rows have it: granted to the living, or free and under an open write.
    fn used(&self, mutant: Option<Mutant>) -> u8 {
        let counts = |process: &&u8| {
            let Process { alive, granted, writes, place } = self.process(**process);
            let held = granted
                && alive
                && !(mutant == Some(Mutant::TakesFromTheLiving) && place == Place::Holding { trusts: true });
            let written = writes && mutant != Some(Mutant::GrantsUnderWrite);
            held || written
        };
        let numbers: Vec<u8> = (0..PROCESSES).collect();
        let used: u8 = numbers.iter().filter(counts).map(|process| wants(*process)).sum();
        used + self.stranded
    }

    /// In use, in truth.
    fn relied_on(&self) -> u8 {
        let relied = |process: &u8| {
            let Process { granted, writes, place, .. } = self.process(*process);
            writes || place == Place::Holding { trusts: true } || granted && place == Place::InLine
        };
        (0..PROCESSES).filter(relied).map(wants).sum()
    }
}

impl Permits {
    fn is(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }

    fn room(&self, state: &State) -> u8 {
        let limit = if self.is(Mutant::IgnoresLimitChange) { LARGE } else { state.limit };
        limit.saturating_sub(state.used(self.mutant))
    }

    /// Grants what is free to those who wait, strictly in order.
    fn serve(&self, state: &mut State) {
        let alive: Vec<bool> = state.processes.iter().map(|process| process.alive).collect();
        state.line.retain(|process| alive[usize::from(*process)]);
        let mut at = 0;
        while let Some(process) = state.line.get(at).copied() {
            if self.room(state) >= wants(process) {
                state.line.remove(at);
                state.processes[usize::from(process)].granted = true;
            } else if self.is(Mutant::PassesBy) {
                at += 1;
            } else {
                return;
            }
        }
    }
}

impl Permits {
    fn resize(&self, state: &mut State, limit: u8) {
        state.limit = limit;
        state.changes -= 1;
        if self.is(Mutant::Evicts) {
            let last = (0..PROCESSES).rev().find(|number| state.process(*number).granted);
            if let Some(last) = last.filter(|_| state.used(None) > limit) {
                state.processes[usize::from(last)].granted = false;
            }
        }
        self.serve(state);
    }
}

impl Model for Permits {
    type State = State;
    type Action = Action;

    const NEVER_STUCK: &'static str = "never stuck: nobody living waits, or somebody holds, lives and runs";

    fn initial(&self) -> State {
        let process = Process { alive: true, granted: false, writes: false, place: Place::Away };
        let processes = vec![process; usize::from(PROCESSES)];
        State { limit: LARGE, changes: 2, line: Vec::new(), processes, stranded: 0 }
    }

    fn begins(&self) -> &'static str {
        "two permits are free; C wants two, the others one each"
    }

    fn actions(&self, _state: &State) -> Vec<Action> {
        let each = [
            Action::Look,
            Action::Acquire,
            Action::Poll,
            Action::Hear,
            Action::BeginWrite,
            Action::EndWrite,
            Action::Release,
            Action::Deadline,
            Action::Expire,
        ];
        let of_each = (0..PROCESSES).flat_map(|process| each.map(|action| action(process)));
        of_each.chain([Action::Resize(1), Action::Resize(LARGE)]).collect()
    }

    fn after(&self, before: &State, action: Action) -> Option<State> {
        let mut state = before.clone();
        match action {
            Action::Look(number) => {
                let saw_room = before.line.is_empty() && self.room(before) >= wants(number);
                let process = &mut state.processes[usize::from(number)];
                if process.place != Place::Away || !process.alive {
                    return None;
                }
                process.place = Place::Asking { saw_room };
            }
            Action::Acquire(number) => {
                let process = &mut state.processes[usize::from(number)];
                let Place::Asking { saw_room } = process.place else { return None };
                if !process.alive {
                    return None;
                }
                process.place = Place::InLine;
                if self.is(Mutant::TrustsTheLook) && saw_room {
                    process.granted = true;
                } else {
                    state.line.push(number);
                    self.serve(&mut state);
                }
            }
            Action::Poll(number) => {
                if !state.line.contains(&number) || !before.process(number).alive {
                    return None;
                }
                self.serve(&mut state);
            }
            Action::Hear(number) => {
                let process = &mut state.processes[usize::from(number)];
                if process.place != Place::InLine || !process.granted || !process.alive {
                    return None;
                }
                process.place = Place::Holding { trusts: true };
            }
            Action::BeginWrite(number) => {
                let process = &mut state.processes[usize::from(number)];
                // The fence.
                if !matches!(process.place, Place::Holding { .. })
                    || !process.granted
                    || !process.alive
                    || process.writes
                {
                    return None;
                }
                process.writes = true;
            }
            Action::EndWrite(number) => {
                if !std::mem::replace(&mut state.processes[usize::from(number)].writes, false) {
                    return None;
                }
            }
            Action::Release(number) => {
                let process = &mut state.processes[usize::from(number)];
                if !matches!(process.place, Place::Holding { .. }) {
                    return None;
                }
                process.place = Place::Done;
                let held = std::mem::replace(&mut process.granted, false);
                if held {
                    self.serve(&mut state);
                }
            }
            Action::Deadline(number) => match &mut state.processes[usize::from(number)].place {
                Place::Holding { trusts: trusts @ true } if !self.is(Mutant::NoDeadline) => *trusts = false,
                _ => return None,
            },
            // The database counts from a later instant: by then it does not trust any more.
            Action::Expire(number) => {
                let place = before.process(number).place;
                let trusts = place == Place::Holding { trusts: true } && !self.is(Mutant::NoDeadline);
                // One that waits, or is on its way, is not of interest when it dies.
                if trusts || !matches!(place, Place::Holding { .. } | Place::InLine) {
                    return None;
                }
                let process = &mut state.processes[usize::from(number)];
                if !std::mem::replace(&mut process.alive, false) {
                    return None;
                }
                if process.granted && self.is(Mutant::Counter) {
                    state.stranded += wants(number);
                }
                if process.place == Place::InLine {
                    process.place = Place::Done;
                }
            }
            Action::Resize(limit) => {
                if state.limit == limit || state.changes == 0 {
                    return None;
                }
                self.resize(&mut state, limit);
            }
        }
        (state != *before).then_some(state)
    }

    fn broken(&self, before: &State, action: Action, after: &State) -> Option<&'static str> {
        let granted = |process: &u8| after.process(*process).granted && !before.process(*process).granted;
        let new: Vec<u8> = (0..PROCESSES).filter(granted).collect();
        if !new.is_empty() && after.relied_on() > after.limit {
            return Some(I14);
        }
        let evicted = |process: u8| {
            let Process { alive, granted, .. } = after.process(process);
            before.process(process).granted && !granted && alive && action != Action::Release(process)
        };
        if (0..PROCESSES).any(evicted) {
            return Some(EVICTION);
        }
        // Whoever stood before it, lives, and stands there still.
        let overtook = |process: &u8| {
            let ahead = before.line.iter().take_while(|other| *other != process);
            ahead.into_iter().any(|other| after.line.contains(other) && after.process(*other).alive)
        };
        new.iter().any(overtook).then_some(ORDER)
    }

    fn is_fault(&self, _before: &State, action: Action, _after: &State) -> bool {
        matches!(action, Action::Deadline(_) | Action::Expire(_) | Action::Resize(1) | Action::Look(_))
    }

    fn is_well(&self, state: &State) -> bool {
        let holds = |process: &Process| process.alive && process.place == Place::Holding { trusts: true };
        let waits = state.line.iter().any(|process| state.process(*process).alive);
        // With a limit of one nobody is granted two: that is what was asked for.
        let too_large = state.line.first().is_some_and(|process| wants(*process) > state.limit);
        !waits || too_large || state.processes.iter().any(holds)
    }

    fn sight(&self, before: &State, action: Action, after: &State) -> Option<&'static str> {
        let served = after.line.len() < before.line.len();
        match action {
            Action::Release(_) if before.line.len() > after.line.len() + 1 => Some(SERVES_TWO),
            Action::Release(_)
                if !served && before.line.first() == Some(&(PROCESSES - 1)) && !after.line.is_empty() =>
            {
                Some(WAITED_FOR)
            }
            Action::Poll(_)
                if served
                    && (0..PROCESSES)
                        .any(|number| before.process(number).granted && !before.process(number).alive) =>
            {
                Some(FOUND_DEAD)
            }
            Action::Resize(1) if after.relied_on() > 1 => Some(ABOVE),
            Action::Resize(LARGE) if served => Some(GROWN),
            Action::Release(number)
                if before.process(number).writes && !served && !before.line.is_empty() =>
            {
                Some(UNDER_WRITE)
            }
            _ => None,
        }
    }

    fn sights(&self) -> &'static [&'static str] {
        &[SERVES_TWO, WAITED_FOR, FOUND_DEAD, ABOVE, GROWN, UNDER_WRITE]
    }

    fn tell(&self, before: &State, action: Action, after: &State) -> String {
        let told = match action {
            Action::Look(process) => format!("process {} looks", letter(process)),
            Action::Acquire(process) => format!("process {} asks for {}", letter(process), wants(process)),
            Action::Poll(process) => format!("process {} asks again", letter(process)),
            Action::Hear(process) => format!("process {} hears that it was granted", letter(process)),
            Action::BeginWrite(process) => format!("process {} begins a fenced write", letter(process)),
            Action::EndWrite(process) => format!("the write of {} ends", letter(process)),
            Action::Release(process) => format!("process {} releases", letter(process)),
            Action::Deadline(process) => format!("the local deadline of {} passes", letter(process)),
            Action::Expire(process) => format!("the time of {} is over in the database", letter(process)),
            Action::Resize(limit) => format!("the limit is {limit} from now on"),
        };
        let granted = |process: &u8| after.process(*process).granted && !before.process(*process).granted;
        let granted: Vec<String> =
            (0..PROCESSES).filter(granted).map(|process| letter(process).to_string()).collect();
        if granted.is_empty() { told } else { format!("{told}; granted to {}", granted.join(" and ")) }
    }
}

const SERVES_TWO: &str = "a release of two serves two";
const WAITED_FOR: &str = "who wants two is waited for";
const FOUND_DEAD: &str = "who waits finds a holder dead";
const ABOVE: &str = "a smaller limit leaves the holders what they have";
const GROWN: &str = "a larger limit serves who waits";
const UNDER_WRITE: &str = "what was released under an open write is not granted yet";

mod tests {
    use super::*;
    use crate::{assert_tells, check, refute};

    #[test]
    fn sharing() {
        check("permit", &Permits { mutant: None });
    }

    #[test]
    fn every_rule_is_needed() {
        for mutant in Mutant::ALL {
            let trace = refute(&format!("permit, {mutant:?}"), &Permits { mutant: Some(*mutant) });
            assert_eq!(trace.promise, mutant.breaks(), "{mutant:?}");
        }
    }

    #[test]
    fn the_story_of_a_limit_that_nobody_looked_at_again() {
        let trace = refute("permit, a story", &Permits { mutant: Some(Mutant::IgnoresLimitChange) });
        let story = ["process C looks", "the limit is 1 from now on", "process C asks for 2; granted to C"];
        assert_tells(&trace, &story);
    }
}
