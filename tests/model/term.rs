//! Terms: electing, stepping down, resigning when the work has ended, asking to resign, preferring.
//!
//! | state | |
//! |---|---|
//! | the election | which term leads, or led last; whether it was asked to resign, and in which term it was asked |
//! | the line | the candidates in the order in which they came; the first process is preferred |
//! | a process | away · in line · in a term, with or without trust in it, with or without work; whether the database takes it for alive |
//!
//! | promise | |
//! |---|---|
//! | I8 | at most one process believes that it leads |
//! | C30 | a term is resigned only when its work has ended |
//! | C28 | a resignation ends its own term and no other |
//! | request | nobody hears of a request that was for another term |
//! | preference | a new leader is never less preferred than one who waits and lives |
//! | never stuck | somebody leads and runs, or nobody campaigns |
//!
//! | abstracted away | why that is enough |
//! |---|---|
//! | heartbeats, lost answers, fences | `lease.rs`: a term is a lease's grant |
//! | tickets that are given back, wake-ups | `line.rs` |
//! | the grace after a loss | the work ends at some time after it; what matters is what waits for that |

use crate::explore::Model;
use crate::letter;

mutants! {
    /// A leader believes until it is told otherwise (DESIGN decision 6). C28.
    NoDeadline,
    /// A candidate that is preferred takes over from a living leader (election: "never displaced").
    Displaces,
    /// A term is resigned when it is lost or over, whatever its work does. C30.
    ResignsWhileWorking,
    /// A resignation is by name: of whoever leads. C28.
    ResignsByName,
    /// A request to resign is to the election, not to the term.
    AsksTheName,
    /// First come, first served, whoever is preferred.
    IgnoresPreference,
    /// Whoever waits only listens: nobody elects the next one when a leader has died.
    NobodyAsks,
}

impl Mutant {
    /// Which promise it breaks.
    fn breaks(self) -> &'static str {
        match self {
            Self::NoDeadline | Self::Displaces => I8,
            Self::ResignsWhileWorking => C30,
            Self::ResignsByName => C28,
            Self::AsksTheName => REQUEST,
            Self::IgnoresPreference => PREFERENCE,
            Self::NobodyAsks => Terms::NEVER_STUCK,
        }
    }
}

const I8: &str = "I8: at most one process believes that it leads";
const C30: &str = "C30: a term is resigned only when its work has ended";
const C28: &str = "C28: a resignation ends its own term and no other";
const REQUEST: &str = "nobody hears of a request that was for another term";
const PREFERENCE: &str = "a new leader is never less preferred than one who waits and lives";

/// No more terms than this are looked at.
const MOST_TERMS: u8 = 4;

/// Three, so that two can wait.
const PROCESSES: u8 = 3;

/// The model.
#[derive(Debug)]
struct Terms {
    mutant: Option<Mutant>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    /// The last term and whose it is; over: resigned.
    term: u8,
    leader: u8,
    over: bool,
    /// In which term somebody asked last, and that the database shows a request.
    asked_in: u8,
    asked: bool,
    line: Vec<u8>,
    processes: Vec<Process>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Process {
    /// As the database has it.
    alive: bool,
    place: Place,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Place {
    Away,
    InLine,
    /// Resigns: it has been sent.
    Resigning {
        term: u8,
    },
    Term {
        term: u8,
        trusts: bool,
        works: bool,
        heard: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Campaign(u8),
    /// Somebody in line looks whether there is a leader.
    Ask(u8),
    Elected(u8),
    /// Its local deadline passes: cut off, or paused.
    Deadline(u8),
    /// Its time is over by the database's clock.
    Expire(u8),
    EndWork(u8),
    Resign(u8),
    Resigned(u8),
    AskToResign,
    Hear(u8),
    /// A process whose life is over begins the next one.
    Restart(u8),
}

impl Terms {
    fn is(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }

    /// Elects the next one in line, if nobody leads.
    fn elect(&self, state: &mut State) {
        if state.leads() || state.term == MOST_TERMS {
            return;
        }
        // The dead are skipped.
        let processes = state.processes.clone();
        state.line.retain(|process| processes[usize::from(*process)].alive);
        let preferred = state.line.iter().position(|process| *process == 0);
        let next = preferred.filter(|_| !self.is(Mutant::IgnoresPreference)).unwrap_or(0);
        if next < state.line.len() {
            let process = state.line.remove(next);
            self.grant(state, process);
        }
    }

    fn grant(&self, state: &mut State, process: u8) {
        state.term += 1;
        state.leader = process;
        state.over = false;
        // The request is a note on the grant.
        state.asked &= self.is(Mutant::AsksTheName);
    }
}

impl State {
    fn process(&self, process: u8) -> Process {
        self.processes[usize::from(process)]
    }

    /// Somebody who is alive, as the database has it.
    fn leads(&self) -> bool {
        self.term > 0 && !self.over && self.process(self.leader).alive
    }

    fn believes(&self, process: u8) -> bool {
        matches!(self.process(process).place, Place::Term { trusts: true, .. })
    }
}

impl Model for Terms {
    type State = State;
    type Action = Action;

    const NEVER_STUCK: &'static str = "never stuck: somebody leads and runs, or nobody campaigns";

    fn initial(&self) -> State {
        let process = Process { alive: true, place: Place::Away };
        State {
            term: 0,
            leader: 0,
            over: true,
            asked_in: 0,
            asked: false,
            line: Vec::new(),
            processes: vec![process; usize::from(PROCESSES)],
        }
    }

    fn begins(&self) -> &'static str {
        "nobody leads; A is preferred"
    }

    fn actions(&self, _state: &State) -> Vec<Action> {
        let each = [
            Action::Campaign,
            Action::Ask,
            Action::Elected,
            Action::Deadline,
            Action::Expire,
            Action::EndWork,
            Action::Resign,
            Action::Resigned,
            Action::Hear,
            Action::Restart,
        ];
        let of_each = (0..PROCESSES).flat_map(|process| each.map(|action| action(process)));
        of_each.chain([Action::AskToResign]).collect()
    }

    fn after(&self, before: &State, action: Action) -> Option<State> {
        let mut state = before.clone();
        match action {
            Action::Campaign(process) => {
                let candidate = state.process(process);
                if candidate.place != Place::Away || !candidate.alive || state.term == MOST_TERMS {
                    return None;
                }
                state.processes[usize::from(process)].place = Place::InLine;
                if self.is(Mutant::Displaces) && process == 0 && state.leads() {
                    self.grant(&mut state, process);
                } else {
                    state.line.push(process);
                    self.elect(&mut state);
                }
            }
            Action::Ask(process) => {
                let waits = state.process(process).place == Place::InLine && state.process(process).alive;
                if !waits || self.is(Mutant::NobodyAsks) {
                    return None;
                }
                self.elect(&mut state);
            }
            Action::Elected(process) => {
                let granted = state.leader == process && state.leads();
                if state.process(process).place != Place::InLine || !granted {
                    return None;
                }
                let term = state.term;
                state.processes[usize::from(process)].place =
                    Place::Term { term, trusts: true, works: true, heard: false };
            }
            Action::Deadline(process) => match &mut state.processes[usize::from(process)].place {
                Place::Term { trusts: trusts @ true, .. } if !self.is(Mutant::NoDeadline) => *trusts = false,
                _ => return None,
            },
            // The database counts from a later instant: by then it does not trust any more.
            Action::Expire(process) => {
                let trusts = state.believes(process) && !self.is(Mutant::NoDeadline);
                if trusts || !std::mem::replace(&mut state.processes[usize::from(process)].alive, false) {
                    return None;
                }
            }
            Action::EndWork(process) => match &mut state.processes[usize::from(process)].place {
                Place::Term { works: works @ true, .. } => *works = false,
                _ => return None,
            },
            Action::Resign(process) => match state.process(process).place {
                Place::Term { term, works, .. } if !works || self.is(Mutant::ResignsWhileWorking) => {
                    if works {
                        // Sent, though the work goes on.
                        state.over |= state.term == term;
                        self.elect(&mut state);
                    } else {
                        state.processes[usize::from(process)].place = Place::Resigning { term };
                    }
                }
                _ => return None,
            },
            Action::Resigned(process) => {
                let Place::Resigning { term } = state.process(process).place else { return None };
                state.processes[usize::from(process)].place = Place::Away;
                state.over |= state.term == term || self.is(Mutant::ResignsByName);
                self.elect(&mut state);
            }
            Action::AskToResign => {
                if !state.leads() || state.asked {
                    return None;
                }
                (state.asked, state.asked_in) = (true, state.term);
            }
            Action::Hear(process) => {
                let now = state.term;
                match &mut state.processes[usize::from(process)].place {
                    Place::Term { term, heard: heard @ false, .. } if before.asked && *term == now => {
                        *heard = true;
                    }
                    _ => return None,
                }
            }
            Action::Restart(number) => {
                let process = &mut state.processes[usize::from(number)];
                // Only a work that has ended is followed by a next campaign.
                if process.alive
                    || matches!(process.place, Place::Term { works: true, .. } | Place::Resigning { .. })
                {
                    return None;
                }
                *process = Process { alive: true, place: Place::Away };
                state.line.retain(|waiting| *waiting != number);
                // What it led is under a life that is over.
                if state.leader == number {
                    state.over = true;
                }
            }
        }
        (state != *before).then_some(state)
    }

    fn broken(&self, before: &State, action: Action, after: &State) -> Option<&'static str> {
        if (0..PROCESSES).filter(|process| after.believes(*process)).count() > 1 {
            return Some(I8);
        }
        match action {
            Action::Resign(process) => {
                let works = matches!(before.process(process).place, Place::Term { works: true, .. });
                if works && (after.over != before.over || after.term != before.term) {
                    return Some(C30);
                }
            }
            Action::Resigned(process) => {
                let own = before.process(process).place == Place::Resigning { term: before.term };
                let ended = after.over != before.over || after.term != before.term;
                if ended && !own && before.leads() {
                    return Some(C28);
                }
            }
            Action::Hear(_) if before.asked_in != before.term => return Some(REQUEST),
            _ => {}
        }
        let waits = before.line.contains(&0) && before.process(0).alive;
        (after.term > before.term && after.leader != 0 && waits).then_some(PREFERENCE)
    }

    fn is_fault(&self, _before: &State, action: Action, _after: &State) -> bool {
        matches!(action, Action::Deadline(_) | Action::Expire(_) | Action::AskToResign | Action::Campaign(_))
    }

    fn is_well(&self, state: &State) -> bool {
        let campaigns = |process: &Process| process.alive && process.place == Place::InLine;
        let knows = matches!(state.process(state.leader).place, Place::Term { trusts: true, .. });
        state.term == MOST_TERMS || state.leads() && knows || !state.processes.iter().any(campaigns)
    }

    fn sight(&self, before: &State, action: Action, after: &State) -> Option<&'static str> {
        let elected = after.term > before.term;
        match action {
            Action::Ask(_) if elected => Some(FOUND_DEAD),
            Action::Resigned(_) if elected && after.leader == 0 && before.line.first() != Some(&0) => {
                Some(PREFERRED)
            }
            Action::Resigned(_) if elected => Some(HANDED_OVER),
            Action::Resigned(process)
                if before.process(process).place != (Place::Resigning { term: before.term }) =>
            {
                Some(LATE)
            }
            Action::Campaign(0) if before.leads() && after.line.contains(&0) => Some(WAITS),
            Action::Hear(_) => Some(HEARD),
            _ => None,
        }
    }

    fn sights(&self) -> &'static [&'static str] {
        &[FOUND_DEAD, PREFERRED, HANDED_OVER, LATE, WAITS, HEARD]
    }

    fn tell(&self, before: &State, action: Action, after: &State) -> String {
        let told = match action {
            Action::Campaign(process) => format!("process {} campaigns", letter(process)),
            Action::Ask(process) => format!("process {} asks who leads", letter(process)),
            Action::Elected(process) => {
                format!("process {} hears that it leads, and begins to work", letter(process))
            }
            Action::Deadline(process) => format!("the local deadline of {} passes", letter(process)),
            Action::Expire(process) => format!("the time of {} is over in the database", letter(process)),
            Action::EndWork(process) => format!("the work of {} ends", letter(process)),
            Action::Resign(process) => format!("process {} resigns", letter(process)),
            Action::Resigned(process) => format!("the server does the resignation of {}", letter(process)),
            Action::AskToResign => "somebody asks the leader to resign".to_owned(),
            Action::Hear(process) => format!("process {} hears that it is asked to resign", letter(process)),
            Action::Restart(process) => format!("process {} begins its next life", letter(process)),
        };
        if after.term > before.term {
            return format!("{told}; {} is elected: term {}", letter(after.leader), after.term);
        }
        told
    }
}

const FOUND_DEAD: &str = "whoever waits finds the leader dead, and the next one is elected";
const PREFERRED: &str = "the preferred candidate is next, though it came later";
const HANDED_OVER: &str = "a resignation elects the next one";
const LATE: &str = "a resignation that comes too late changes nothing";
const WAITS: &str = "the preferred candidate waits for a living leader";
const HEARD: &str = "a leader hears of a request";

mod tests {
    use super::*;
    use crate::{assert_tells, check, refute};

    #[test]
    fn electing() {
        check("term", &Terms { mutant: None });
    }

    #[test]
    fn every_rule_is_needed() {
        for mutant in Mutant::ALL {
            let trace = refute(&format!("term, {mutant:?}"), &Terms { mutant: Some(*mutant) });
            assert_eq!(trace.promise, mutant.breaks(), "{mutant:?}");
        }
    }

    #[test]
    fn the_story_of_a_request_that_outlives_its_term() {
        let trace = refute("term, a story", &Terms { mutant: Some(Mutant::AsksTheName) });
        let story = [
            "process A campaigns; A is elected: term 1",
            "somebody asks the leader to resign",
            "the time of A is over in the database",
            "process B campaigns; B is elected: term 2",
            "process B hears that it leads, and begins to work",
            "process B hears that it is asked to resign",
        ];
        assert_tells(&trace, &story);
    }
}
