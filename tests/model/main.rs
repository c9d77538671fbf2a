//! The protocol as executable models, explored exhaustively.
//!
//! A model is a small state machine of the database's rows and the clients' processes, with every interleaving and
//! the faults of its scene. Two tests for each:
//!
//! * the protocol as it is: every state is explored, and no promise is broken;
//! * every rule switched off, one at a time (a *mutant*): a counterexample is found, and printed as a story. So no
//!   rule is there without a reason, and the model is not blind.
//!
//! | model | of what |
//! |---|---|
//! | `lease` | owners, grants, fences; retries and reconcile; failover |
//! | `claim` | attempts: begin, complete, recovery; answers that are lost |
//! | `line` | waiters: tickets, hand-over, wake-ups, giving up |
//! | `term` | elections: stepping down, resigning, being asked to, preference |
//! | `permit` | semaphores: rows that die with their owner, a limit that changes |
//! | `slot` | schedules: looking, beginning, completing, settling; one at a time |
//! | `partition` | members that share out partitions: joining, draining, leaving, dying |
//!
//! `FENCEPOST_MODEL_CLIENTS=3 cargo test --release --test model` explores with three clients instead of two.
//! `cargo test --test model -- --nocapture` shows the figures and all counterexamples.
//!
//! A further model implements [`Model`], declares its mutants by [`mutants!`], and calls [`check`] and [`refute`].

#![expect(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a test fails by panicking")]

/// An enum of rules that are switched off, and the list of all of them, which so cannot forget one.
macro_rules! mutants {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// A rule that is switched off.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        enum Mutant {
            $($(#[$doc])* $name,)*
        }

        impl Mutant {
            const ALL: &[Self] = &[$(Self::$name),*];
        }
    };
}

mod claim;
mod explore;
mod lease;
mod line;
mod partition;
mod permit;
mod slot;
mod term;

use crate::explore::{Model, Trace, explore};

/// How many clients the models have: two, or as `FENCEPOST_MODEL_CLIENTS` says.
fn clients() -> u8 {
    std::env::var("FENCEPOST_MODEL_CLIENTS").map_or(2, |clients| match clients.as_str() {
        "2" => 2,
        "3" => 3,
        other => panic!("FENCEPOST_MODEL_CLIENTS is 2 or 3, not {other:?}"),
    })
}

/// Explores all of it: no promise is broken, and all that the model is to show was seen.
fn check<M: Model>(name: &str, model: &M) {
    let explored = explore(model);
    if let Some(trace) = explored.counterexample {
        panic!("{name}: a promise is broken\n{trace}");
    }
    println!("{name}: {} states, {} steps, {} deep", explored.states, explored.steps, explored.depth);
    for sight in model.sights() {
        assert!(explored.seen.contains(sight), "{name}: never seen: {sight}");
    }
}

/// Finds the counterexample that there must be.
fn refute<M: Model>(name: &str, model: &M) -> Trace {
    let explored = explore(model);
    let (states, steps) = (explored.states, explored.steps);
    let trace = explored
        .counterexample
        .unwrap_or_else(|| panic!("{name}: no counterexample in {states} states, {steps} steps"));
    println!("{name}:\n{trace}\n");
    trace
}

/// What a client is called in a story.
fn letter(client: u8) -> char {
    char::from(b'A' + client)
}

/// That this is the story.
fn assert_tells(trace: &Trace, story: &[&str]) {
    let told: Vec<&str> = trace.lines.iter().map(String::as_str).collect();
    assert_eq!(told, story);
}
