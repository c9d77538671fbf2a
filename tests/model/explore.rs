//! The explorer: every state that a model can reach, breadth first, so that a counterexample is a shortest one.
//!
//! Two kinds of promises:
//!
//! * **always** (safety): [`Model::broken`] judges each step, with the states before and after it.
//! * **never stuck** (progress): from every state that can be reached, some continuation *without a further fault*
//!   leads to one that [`Model::is_well`]. In CTL: `AG EF well`, with the faults left out of `EF`. Whatever is
//!   scheduled fairly takes such a way in the end; where there is none, no scheduler helps.
//!
//! Our own hundred lines, since the library for it (`stateright` 0.31) judges only states, not steps; its
//! `eventually` ignores, as documented, whatever ends in a cycle, and a heartbeat is a cycle; so the search for the
//! second kind would be our own all the same. It also brings a web server, which cannot be left out.
//!
//! States are kept whole, not as hashes: two states are never taken for one.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::hash::Hash;
use std::rc::Rc;

/// More than that is not explored: the bounds of the model are wrong.
const MOST_STATES: usize = 60_000_000;

/// A protocol with its clients, its faults, and what it promises. See `lease.rs` for how one is written.
pub(crate) trait Model {
    type State: Eq + Hash;
    type Action: Copy;

    /// Where it begins.
    fn initial(&self) -> Self::State;

    /// Where it begins, in words.
    fn begins(&self) -> &'static str;

    /// The steps that may be possible.
    fn actions(&self, state: &Self::State) -> Vec<Self::Action>;

    /// The state after the step; none if it has to wait.
    fn after(&self, state: &Self::State, action: Self::Action) -> Option<Self::State>;

    /// The promise that this step has broken.
    fn broken(&self, before: &Self::State, action: Self::Action, after: &Self::State)
    -> Option<&'static str>;

    /// Whether the step is a fault, or a choice, which nobody may count on for getting well.
    fn is_fault(&self, before: &Self::State, action: Self::Action, after: &Self::State) -> bool;

    /// Whether nothing is stuck in this state.
    fn is_well(&self, state: &Self::State) -> bool;

    /// What [`is_well`](Self::is_well) promises, in words.
    const NEVER_STUCK: &'static str;

    /// Something worth seeing that this step shows: a rule at work.
    fn sight(&self, before: &Self::State, action: Self::Action, after: &Self::State) -> Option<&'static str>;

    /// What must be seen, or the model proves nothing.
    fn sights(&self) -> &'static [&'static str];

    /// The step in words.
    fn tell(&self, before: &Self::State, action: Self::Action, after: &Self::State) -> String;
}

/// What came of it.
pub(crate) struct Explored {
    pub(crate) states: usize,
    pub(crate) steps: usize,
    /// The length of the longest of the shortest ways to a state.
    pub(crate) depth: usize,
    pub(crate) seen: BTreeSet<&'static str>,
    pub(crate) counterexample: Option<Trace>,
}

/// The shortest way to break a promise, in words.
pub(crate) struct Trace {
    pub(crate) promise: &'static str,
    pub(crate) begins: &'static str,
    pub(crate) lines: Vec<String>,
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "      {}", self.begins)?;
        for (number, line) in self.lines.iter().enumerate() {
            writeln!(f, "  {:>2}. {line}", number + 1)?;
        }
        write!(f, "  broken: {}", self.promise)
    }
}

/// A state and the step by which it was found first.
struct Found<M: Model> {
    state: Rc<M::State>,
    from: Option<(u32, M::Action)>,
    depth: usize,
}

/// Explores until a promise is broken or nothing is left to explore.
pub(crate) fn explore<M: Model>(model: &M) -> Explored {
    let first = Rc::new(model.initial());
    let mut numbers = HashMap::from([(Rc::clone(&first), 0)]);
    let mut found: Vec<Found<M>> = vec![Found { state: first, from: None, depth: 0 }];
    // The steps that are no faults, backwards.
    let mut helped_by: Vec<(u32, u32)> = Vec::new();
    let mut explored =
        Explored { states: 1, steps: 0, depth: 0, seen: BTreeSet::new(), counterexample: None };
    let mut next = 0;
    while next < found.len() {
        let (before, depth) = (Rc::clone(&found[next].state), found[next].depth + 1);
        let number = u32::try_from(next).unwrap();
        for action in model.actions(&before) {
            let Some(after) = model.after(&before, action) else { continue };
            explored.steps += 1;
            explored.seen.extend(model.sight(&before, action, &after));
            if let Some(promise) = model.broken(&before, action, &after) {
                let mut lines = way_to(model, &found, number);
                lines.push(model.tell(&before, action, &after));
                explored.counterexample = Some(Trace { promise, begins: model.begins(), lines });
                return explored;
            }
            let helps = !model.is_fault(&before, action, &after);
            let after = Rc::new(after);
            let fresh = u32::try_from(found.len()).unwrap();
            let to = *numbers.entry(Rc::clone(&after)).or_insert(fresh);
            if to == fresh {
                assert!(found.len() < MOST_STATES, "the model has no end");
                found.push(Found { state: after, from: Some((number, action)), depth });
                explored.depth = depth;
            }
            if helps {
                helped_by.push((to, number));
            }
        }
        next += 1;
    }
    explored.states = found.len();
    drop(numbers);
    if let Some(stuck) = first_stuck(model, &found, helped_by) {
        let mut lines = way_to(model, &found, stuck);
        lines.push("and from here no way leads on, without a further fault".to_owned());
        explored.counterexample = Some(Trace { promise: M::NEVER_STUCK, begins: model.begins(), lines });
    }
    explored
}

/// The first state from which none that is well can be reached without a fault.
fn first_stuck<M: Model>(model: &M, found: &[Found<M>], mut helped_by: Vec<(u32, u32)>) -> Option<u32> {
    helped_by.sort_unstable();
    let mut heals: Vec<bool> = found.iter().map(|found| model.is_well(&found.state)).collect();
    let mut frontier: Vec<u32> =
        (0..).zip(&heals).filter(|(_, well)| **well).map(|(number, _)| number).collect();
    while let Some(to) = frontier.pop() {
        let start = helped_by.partition_point(|(of, _)| *of < to);
        for (_, from) in helped_by[start..].iter().take_while(|(of, _)| *of == to) {
            if !std::mem::replace(&mut heals[usize::try_from(*from).unwrap()], true) {
                frontier.push(*from);
            }
        }
    }
    (0..).zip(&heals).find(|(_, heals)| !**heals).map(|(number, _)| number)
}

fn way_to<M: Model>(model: &M, found: &[Found<M>], to: u32) -> Vec<String> {
    let mut lines = Vec::new();
    let mut at = &found[usize::try_from(to).unwrap()];
    while let Some((from, action)) = at.from {
        let before = &found[usize::try_from(from).unwrap()];
        lines.push(model.tell(&before.state, action, &at.state));
        at = before;
    }
    lines.reverse();
    lines
}

mod tests {
    use super::*;

    /// From, to, and whether it is a fault; 0 is where it begins, 9 is well, stepping to 8 breaks the promise.
    struct Toy(&'static [(u8, u8, bool)]);

    impl Model for Toy {
        type State = u8;
        type Action = (u8, bool);

        const NEVER_STUCK: &'static str = "gets to 9";

        fn initial(&self) -> u8 {
            0
        }

        fn begins(&self) -> &'static str {
            "at 0"
        }

        fn actions(&self, state: &u8) -> Vec<(u8, bool)> {
            self.0.iter().filter(|edge| edge.0 == *state).map(|edge| (edge.1, edge.2)).collect()
        }

        fn after(&self, _before: &u8, (to, _fault): (u8, bool)) -> Option<u8> {
            Some(to)
        }

        fn broken(&self, _before: &u8, (to, _fault): (u8, bool), _after: &u8) -> Option<&'static str> {
            (to == 8).then_some("not 8")
        }

        fn is_fault(&self, _before: &u8, (_to, fault): (u8, bool), _after: &u8) -> bool {
            fault
        }

        fn is_well(&self, state: &u8) -> bool {
            *state == 9
        }

        fn sight(&self, _before: &u8, _action: (u8, bool), _after: &u8) -> Option<&'static str> {
            None
        }

        fn sights(&self) -> &'static [&'static str] {
            &[]
        }

        fn tell(&self, before: &u8, _action: (u8, bool), after: &u8) -> String {
            format!("{before} to {after}")
        }
    }

    fn found(edges: &'static [(u8, u8, bool)]) -> Option<(&'static str, Vec<String>)> {
        explore(&Toy(edges)).counterexample.map(|trace| (trace.promise, trace.lines))
    }

    #[test]
    fn the_shortest_way_is_told() {
        let edges =
            &[(0, 1, false), (1, 2, false), (2, 8, false), (0, 3, true), (3, 8, false), (1, 9, false)];
        assert_eq!(found(edges), Some(("not 8", vec!["0 to 3".to_owned(), "3 to 8".to_owned()])));
    }

    #[test]
    fn a_circle_that_never_gets_well_is_stuck_and_one_with_a_way_out_is_not() {
        let circle = &[(0, 9, false), (0, 1, true), (1, 2, false), (2, 1, false)];
        let (promise, lines) = found(circle).unwrap();
        assert_eq!((promise, lines[0].as_str(), lines.len()), ("gets to 9", "0 to 1", 2));
        assert_eq!(found(&[(0, 9, false), (0, 1, true), (1, 2, false), (2, 1, false), (2, 9, false)]), None);
    }

    #[test]
    fn a_fault_is_no_way_out() {
        let (promise, _) = found(&[(0, 9, false), (0, 1, true), (1, 9, true)]).unwrap();
        assert_eq!(promise, "gets to 9");
    }

    #[test]
    fn every_state_and_step_is_counted_once() {
        let explored =
            explore(&Toy(&[(0, 1, false), (0, 2, false), (1, 9, false), (2, 9, false), (9, 9, false)]));
        assert_eq!((explored.states, explored.steps, explored.depth), (4, 5, 2));
    }
}
