//! Slots: a schedule, and clients that look at it, each with a clock of its own; they begin what is due, complete it with
//! its effect, and settle what is done.
//!
//! | state | |
//! |---|---|
//! | the schedule | the database's clock; up to where all is settled; the lease for one at a time |
//! | a slot | its claim: ready, running under a life of a client, done; how often its effect was committed |
//! | a client | whether it runs, and its owner lives; idle · looked · between two slots · working · with a transaction open |
//!
//! | action | atomic steps |
//! |---|---|
//! | look | the clock and the mark are read, and what is due is computed · the lease is tried |
//! | run | a slot is begun, and given back if it is settled by now · completed, in the transaction of the effect · commit, or roll back |
//! | finish | what is done is settled, the lease is released · what is settled is pruned |
//! | time | the database's clock goes on; a dead client's owner expires; one that has lost its life starts again, whatever it is at |
//! | faults | a client dies, or is paused beyond its ttl; a slot fails |
//!
//! | promise | |
//! |---|---|
//! | I7, once | each slot is completed once at most |
//! | I7, due | no slot is run before it is due by the database's clock |
//! | I7, alone | one at a time: nobody is at a slot, by belief or with a transaction that may commit, beside another one |
//! | never stuck | every slot that counts can be completed: all, or the last one |
//!
//! | abstracted away | why that is enough |
//! |---|---|
//! | what a begin and a complete do | `claim.rs`; here each is one step |
//! | heartbeats in flight, tokens, lost answers | `lease.rs` and `claim.rs` |
//! | the age at which a slot is missed | it is never so old here; `rule.rs` has tests of its own |
//! | claims that are pruned because they are old | as here those that are settled: what is so old is missed |

use crate::explore::Model;
use crate::letter;

mutants! {
    /// A slot is the moment at which somebody found it due. C34.
    FromNow,
    /// What is due says the clock of whoever looks (DESIGN decision 6). C27.
    DueByOwnClock,
    /// It counts as done from its begin on, not with its effect.
    DoneWhenBegun,
    /// Settled is what was due, though somebody is still at it.
    SettlesUnfinished,
    /// What was due at the look is run, though others have run it and its claim is pruned.
    TrustsTheLook,
    /// One at a time without the lease.
    NoLock,
    /// The next slot is begun under whatever life there is by then; the lease was of another one.
    BeginsUnderAnotherLife,
    /// A completion checks the slot's claim alone, and does not hold the lease until its commit (decision 5).
    CompletesWithoutLease,
}

impl Mutant {
    /// Which promise it breaks.
    fn breaks(self) -> &'static str {
        match self {
            Self::FromNow | Self::TrustsTheLook => ONCE,
            Self::DueByOwnClock => DUE,
            Self::DoneWhenBegun | Self::SettlesUnfinished => Slots::NEVER_STUCK,
            Self::NoLock | Self::BeginsUnderAnotherLife | Self::CompletesWithoutLease => ALONE,
        }
    }
}

const ONCE: &str = "I7: each slot is completed once at most";
const DUE: &str = "I7: no slot is run before it is due by the database's clock";
const ALONE: &str = "I7: one at a time: nobody is at a slot beside another one";

/// Two slots, at 2 and at 4; at 5 the clock stands still.
const PERIOD: usize = 2;
const SLOTS: usize = 2;
const MOMENTS: usize = PERIOD * SLOTS + 2;

/// How many faults there may be.
const FAULTS: u8 = 2;

/// The model.
#[derive(Debug)]
struct Slots {
    clients: u8,
    alone: bool,
    /// Only the last one of those that were missed counts.
    last: bool,
    mutant: Option<Mutant>,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct State {
    now: usize,
    settled: usize,
    lease: Option<Holder>,
    /// By what a client takes for a slot's identity.
    claims: [Claim; MOMENTS],
    /// How often each slot's effect was committed.
    effects: [u8; SLOTS],
    clients: Vec<Client>,
    faults: u8,
}

/// A life of a client.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Holder {
    client: u8,
    life: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Claim {
    Ready,
    Running(Holder),
    Done,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct Client {
    running: bool,
    /// Its present owner, which is its so-manieth.
    alive: bool,
    life: u8,
    doing: Doing,
}

#[derive(Clone, PartialEq, Eq, Hash)]
enum Doing {
    Idle,
    /// And wants the lease.
    Looked(Run),
    Between(Run),
    /// Begun under this life.
    Working(Run, u8),
    /// Completed, and not committed.
    Open(Run, u8),
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct Run {
    /// What is left of what was due, the earliest first.
    due: Vec<usize>,
    /// The life under which it has the lease.
    lease: Option<u8>,
    /// Up to here all is done.
    settles: usize,
    /// Nothing was left out yet.
    whole: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Tick,
    Look(u8),
    Lock(u8),
    Begin(u8),
    Complete(u8),
    Commit(u8),
    RollBack(u8),
    Fail(u8),
    Finish(u8),
    /// A slot, by its number.
    Prune(u8),
    Expire(u8),
    Restart(u8),
    // Faults.
    Die(u8),
    Lapse(u8),
}

impl Doing {
    fn run(&self) -> Option<&Run> {
        match self {
            Self::Idle => None,
            Self::Looked(run) | Self::Between(run) | Self::Working(run, _) | Self::Open(run, _) => Some(run),
        }
    }

    fn is_open(&self) -> bool {
        matches!(self, Self::Open(..))
    }
}

impl Client {
    /// By its own clock, or because its transaction may commit.
    fn is_at_a_slot(&self) -> bool {
        match self.doing {
            Doing::Working(_, life) => self.running && self.alive && life == self.life,
            Doing::Open(..) => true,
            _ => false,
        }
    }
}

impl State {
    fn client(&self, number: u8) -> &Client {
        &self.clients[usize::from(number)]
    }

    fn client_mut(&mut self, number: u8) -> &mut Client {
        &mut self.clients[usize::from(number)]
    }

    fn lives(&self, holder: Holder) -> bool {
        let client = self.client(holder.client);
        client.alive && client.life == holder.life
    }

    /// Whether a completion of this slot may still commit.
    fn is_open(&self, slot: usize) -> bool {
        let its = |client: &Client| client.doing.run().is_some_and(|run| run.due.first() == Some(&slot));
        self.clients.iter().any(|client| client.doing.is_open() && its(client))
    }

    /// Ends a look; gives back the lease, if it has that still.
    fn leave(&mut self, number: u8) {
        let lease = self.client(number).doing.run().and_then(|run| run.lease);
        if lease.is_some_and(|life| self.lease == Some(Holder { client: number, life })) {
            self.lease = None;
        }
        self.client_mut(number).doing = Doing::Idle;
    }
}

impl Run {
    /// On to the next one.
    fn next(mut self, is_done: bool) -> Doing {
        let slot = self.due.remove(0);
        self.whole &= is_done;
        if self.whole {
            self.settles = slot;
        }
        Doing::Between(self)
    }
}

impl Slots {
    fn is(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }

    /// What the look finds.
    fn due(&self, state: &State, number: u8) -> Vec<usize> {
        // A is ahead, B behind, C right.
        let by_own_clock = match number {
            0 => (state.now + 1).min(MOMENTS - 1),
            1 => state.now.saturating_sub(1),
            _ => state.now,
        };
        let moment = if self.is(Mutant::DueByOwnClock) { by_own_clock } else { state.now };
        let slots = (1..=SLOTS).map(|slot| slot * PERIOD);
        let mut due: Vec<usize> = slots.filter(|slot| *slot > state.settled && *slot <= moment).collect();
        if self.last && due.len() > 1 {
            due.drain(..due.len() - 1);
        }
        if self.is(Mutant::FromNow) && !due.is_empty() {
            due = vec![moment];
        }
        due
    }

    fn lock(&self, state: &mut State, number: u8, mut run: Run) {
        let fenced = |holder: Holder| {
            let client = state.client(holder.client);
            let with_it = |run: &Run| run.lease == Some(holder.life);
            client.doing.is_open()
                && client.doing.run().is_some_and(with_it)
                && !self.is(Mutant::CompletesWithoutLease)
        };
        if state.lease.is_some_and(|holder| state.lives(holder) || fenced(holder)) {
            return state.leave(number);
        }
        let life = state.client(number).life;
        state.lease = Some(Holder { client: number, life });
        run.lease = Some(life);
        state.client_mut(number).doing = Doing::Between(run);
    }

    fn begin(&self, state: &mut State, number: u8, run: Run) -> Option<()> {
        let slot = *run.due.first()?;
        let is_done = match state.claims[slot] {
            Claim::Done => true,
            Claim::Running(holder) if state.lives(holder) || state.is_open(slot) => {
                self.is(Mutant::SettlesUnfinished)
            }
            Claim::Running(_) | Claim::Ready if slot <= state.settled && !self.is(Mutant::TrustsTheLook) => {
                true
            }
            Claim::Running(_) | Claim::Ready => {
                let life = state.client(number).life;
                let of_another_life = run.lease.is_some_and(|lease| lease != life);
                if of_another_life && !self.is(Mutant::BeginsUnderAnotherLife) {
                    // Given back.
                    state.leave(number);
                    return Some(());
                }
                state.claims[slot] = if self.is(Mutant::DoneWhenBegun) {
                    Claim::Done
                } else {
                    Claim::Running(Holder { client: number, life })
                };
                state.client_mut(number).doing = Doing::Working(run, life);
                return Some(());
            }
        };
        state.client_mut(number).doing = run.next(is_done);
        Some(())
    }

    fn complete(&self, state: &mut State, number: u8, run: Run, life: u8) {
        let own = Holder { client: number, life };
        let claim = state.claims[run.due[0]] == Claim::Running(own) && state.lives(own);
        let with_lease =
            |life| state.lease == Some(Holder { life, ..own }) && state.lives(Holder { life, ..own });
        let lease = run.lease.is_none_or(with_lease) || self.is(Mutant::CompletesWithoutLease);
        if claim && lease || self.is(Mutant::DoneWhenBegun) {
            state.client_mut(number).doing = Doing::Open(run, life);
        } else {
            state.leave(number);
        }
    }
}

impl Model for Slots {
    type State = State;
    type Action = Action;

    const NEVER_STUCK: &'static str = "never stuck: every slot that counts can be completed";

    fn initial(&self) -> State {
        let client = Client { running: true, alive: true, life: 1, doing: Doing::Idle };
        State {
            now: 1,
            settled: 0,
            lease: None,
            claims: [Claim::Ready; MOMENTS],
            effects: [0; SLOTS],
            clients: vec![client; usize::from(self.clients)],
            faults: FAULTS,
        }
    }

    fn begins(&self) -> &'static str {
        "slots at 2 and at 4; it is 1; the clock of A is ahead by 1, that of B behind"
    }

    fn actions(&self, _state: &State) -> Vec<Action> {
        let each = [
            Action::Look,
            Action::Lock,
            Action::Begin,
            Action::Complete,
            Action::Commit,
            Action::RollBack,
            Action::Fail,
            Action::Finish,
            Action::Expire,
            Action::Restart,
            Action::Die,
            Action::Lapse,
        ];
        let of_each = (0..self.clients).flat_map(|client| each.map(|action| action(client)));
        let prunes = (1..).take(SLOTS).map(Action::Prune);
        std::iter::once(Action::Tick).chain(prunes).chain(of_each).collect()
    }

    fn after(&self, before: &State, action: Action) -> Option<State> {
        let mut state = before.clone();
        if let Action::Prune(slot) = action {
            let slot = usize::from(slot) * PERIOD;
            let is_old = slot <= before.settled && before.claims[slot] == Claim::Done;
            state.claims[slot] = Claim::Ready;
            return is_old.then_some(state);
        }
        let (Action::Look(number)
        | Action::Lock(number)
        | Action::Begin(number)
        | Action::Complete(number)
        | Action::Commit(number)
        | Action::RollBack(number)
        | Action::Fail(number)
        | Action::Finish(number)
        | Action::Expire(number)
        | Action::Restart(number)
        | Action::Die(number)
        | Action::Lapse(number)) = action
        else {
            state.now += 1;
            return (state.now < MOMENTS).then_some(state);
        };
        let client = before.client(number).clone();
        match (action, client.doing) {
            (Action::Expire(_), _) if !client.running && client.alive => {
                state.client_mut(number).alive = false;
            }
            (Action::Restart(_), _) if !client.alive => {
                let client = state.client_mut(number);
                (client.running, client.alive, client.life) = (true, true, client.life + 1);
            }
            _ if !client.running => return None,
            (Action::Look(_), Doing::Idle) if client.alive => {
                let due = self.due(before, number);
                if due.is_empty() {
                    return None;
                }
                let run = Run { due, lease: None, settles: 0, whole: true };
                let locks = self.alone && !self.is(Mutant::NoLock);
                state.client_mut(number).doing = if locks { Doing::Looked(run) } else { Doing::Between(run) };
            }
            (Action::Lock(_), Doing::Looked(run)) if client.alive => self.lock(&mut state, number, run),
            (Action::Begin(_), Doing::Between(run)) if client.alive => self.begin(&mut state, number, run)?,
            (Action::Complete(_), Doing::Working(run, life)) => self.complete(&mut state, number, run, life),
            (Action::Commit(_), Doing::Open(run, _)) => {
                let slot = run.due[0];
                state.claims[slot] = Claim::Done;
                // Whatever it was taken for: the one that was due.
                state.effects[slot / PERIOD - 1] += 1;
                state.client_mut(number).doing = run.next(true);
            }
            (Action::RollBack(_), Doing::Open(run, life)) => {
                state.client_mut(number).doing = Doing::Working(run, life);
            }
            (Action::Fail(_), Doing::Working(run, life)) => {
                let own = Claim::Running(Holder { client: number, life });
                if state.claims[run.due[0]] == own || self.is(Mutant::DoneWhenBegun) {
                    state.claims[run.due[0]] = Claim::Ready;
                }
                state.leave(number);
            }
            (Action::Finish(_), Doing::Between(run)) if run.due.is_empty() => {
                state.settled = state.settled.max(run.settles);
                state.leave(number);
            }
            (Action::Die(_), _) if before.faults > 0 => {
                state.faults -= 1;
                let client = state.client_mut(number);
                (client.running, client.doing) = (false, Doing::Idle);
            }
            (Action::Lapse(_), _) if before.faults > 0 && client.alive => {
                state.faults -= 1;
                state.client_mut(number).alive = false;
            }
            _ => return None,
        }
        Some(state)
    }

    fn broken(&self, _before: &State, action: Action, after: &State) -> Option<&'static str> {
        if let Action::Begin(number) = action
            && let Doing::Working(run, _) = &after.client(number).doing
            && run.due[0] > after.now
        {
            return Some(DUE);
        }
        if after.effects.iter().any(|times| *times > 1) {
            return Some(ONCE);
        }
        let at_slots = after.clients.iter().filter(|client| client.is_at_a_slot()).count();
        (self.alone && at_slots > 1).then_some(ALONE)
    }

    fn is_fault(&self, _before: &State, action: Action, _after: &State) -> bool {
        matches!(action, Action::Die(_) | Action::Lapse(_) | Action::Fail(_) | Action::RollBack(_))
    }

    fn is_well(&self, state: &State) -> bool {
        let missed = if self.last { SLOTS - 1 } else { 0 };
        state.effects.iter().skip(missed).all(|times| *times == 1)
    }

    fn sight(&self, before: &State, action: Action, after: &State) -> Option<&'static str> {
        match action {
            Action::Look(number) if self.last && before.effects[0] == 0 => {
                let run = after.client(number).doing.run()?;
                (run.due.first() == Some(&(SLOTS * PERIOD))).then_some(MISSED)
            }
            Action::Lock(number) if after.client(number).doing == Doing::Idle => {
                Some(if before.lives(before.lease?) { BUSY } else { WAITS_FOR_COMMIT })
            }
            Action::Begin(number) => {
                let slot = *before.client(number).doing.run()?.due.first()?;
                match before.claims[slot] {
                    Claim::Done => Some(FOUND_DONE),
                    Claim::Ready if slot <= before.settled => Some(FOUND_SETTLED),
                    _ if after.client(number).doing == Doing::Idle => Some(GIVES_UP),
                    Claim::Running(_) if after.claims[slot] != before.claims[slot] => Some(RECOVERED),
                    Claim::Running(_) => Some(IN_PROGRESS),
                    Claim::Ready => None,
                }
            }
            Action::Complete(number) if after.client(number).doing == Doing::Idle => Some(REFUSED),
            _ => None,
        }
    }

    fn sights(&self) -> &'static [&'static str] {
        match (self.alone, self.last) {
            (false, false) => &[FOUND_DONE, FOUND_SETTLED, RECOVERED, IN_PROGRESS, REFUSED],
            (false, true) => &[FOUND_DONE, FOUND_SETTLED, RECOVERED, IN_PROGRESS, REFUSED, MISSED],
            (true, false) => {
                &[FOUND_DONE, FOUND_SETTLED, RECOVERED, REFUSED, BUSY, WAITS_FOR_COMMIT, GIVES_UP]
            }
            (true, true) => {
                &[FOUND_DONE, FOUND_SETTLED, RECOVERED, REFUSED, BUSY, WAITS_FOR_COMMIT, GIVES_UP, MISSED]
            }
        }
    }

    fn tell(&self, before: &State, action: Action, after: &State) -> String {
        let client = |number: u8| format!("client {}", letter(number));
        let slot = |number: u8| before.client(number).doing.run().map_or(0, |run| run.due[0]);
        match action {
            Action::Tick => format!("it is {}", after.now),
            Action::Look(number) => {
                let due = after.client(number).doing.run().map_or(&[][..], |run| &run.due);
                format!("{} looks, and finds {due:?} due", client(number))
            }
            Action::Lock(number) if after.client(number).doing == Doing::Idle => {
                format!("{} does not get the lease", client(number))
            }
            Action::Lock(number) => format!("{} gets the lease", client(number)),
            Action::Begin(number) => match after.client(number).doing {
                Doing::Working(..) => format!("{} begins {}", client(number), slot(number)),
                Doing::Idle => {
                    format!("{} has lost the lease, and gives {} back", client(number), slot(number))
                }
                _ => format!("{} is told that {} is done, or somebody at it", client(number), slot(number)),
            },
            Action::Complete(number) if after.client(number).doing == Doing::Idle => {
                format!("{} completes {}, and is refused", client(number), slot(number))
            }
            Action::Complete(number) => {
                format!(
                    "{} has the effect of {} and completes it; not yet committed",
                    client(number),
                    slot(number)
                )
            }
            Action::Commit(number) => format!("{} commits", client(number)),
            Action::RollBack(number) => format!("{} rolls back", client(number)),
            Action::Fail(number) => format!("{} fails in {}", client(number), slot(number)),
            Action::Finish(number) => {
                format!("{} is through; settled up to {}", client(number), after.settled)
            }
            Action::Prune(slot) => format!("what is known of {} is pruned", usize::from(slot) * PERIOD),
            Action::Expire(number) => format!("the owner of {} has expired", letter(number)),
            Action::Restart(number) => format!("{} has lost its life, and starts again", client(number)),
            Action::Die(number) => format!("{} dies", client(number)),
            Action::Lapse(number) => format!("{} is paused until its owner has expired", client(number)),
        }
    }
}

const FOUND_DONE: &str = "a late begin finds it done";
const FOUND_SETTLED: &str = "a late begin finds it settled and pruned";
const RECOVERED: &str = "a slot is recovered from a dead owner";
const IN_PROGRESS: &str = "a begin finds somebody at it";
const REFUSED: &str = "a stale completion is refused";
const MISSED: &str = "a slot was missed";
const BUSY: &str = "somebody else has the lease";
const WAITS_FOR_COMMIT: &str = "the lease of the dead is not had while they may commit";
const GIVES_UP: &str = "a slot begun without the lease is given back";

mod tests {
    use super::*;
    use crate::{assert_tells, check, clients, refute};

    fn mutant(mutant: Mutant) -> Slots {
        Slots { clients: clients(), alone: mutant.breaks() == ALONE, last: false, mutant: Some(mutant) }
    }

    #[test]
    fn slots_are_run_once_each() {
        for (alone, last) in [(false, false), (false, true), (true, false), (true, true)] {
            let name = format!(
                "slot, {}{}",
                if last { "the last one that was missed" } else { "all that were missed" },
                if alone { ", one at a time" } else { "" }
            );
            check(&name, &Slots { clients: clients(), alone, last, mutant: None });
        }
    }

    #[test]
    fn every_rule_of_slots_is_needed() {
        for mistake in Mutant::ALL {
            let trace = refute(&format!("slot, {mistake:?}"), &mutant(*mistake));
            assert_eq!(trace.promise, mistake.breaks(), "{mistake:?}\n{trace}");
        }
    }

    // The story of C34.
    #[test]
    fn one_slot_has_two_names_when_it_is_taken_from_now() {
        let trace = refute("slot", &Slots { clients: 2, ..mutant(Mutant::FromNow) });
        assert_tells(
            &trace,
            &[
                "it is 2",
                "client A looks, and finds [2] due",
                "it is 3",
                "client A begins 2",
                "client A has the effect of 2 and completes it; not yet committed",
                "client A commits",
                "client B looks, and finds [3] due",
                "client B begins 3",
                "client B has the effect of 3 and completes it; not yet committed",
                "client B commits",
            ],
        );
    }
}
