//! Partitions: members that look, act on what they saw, drain what they give up, join, leave and die.
//!
//! | state | |
//! |---|---|
//! | a partition | whose lease it is; revoked; whose work on it is going on |
//! | a member | away · alive · leaving · dead; what it saw when it last looked and has not acted on yet |
//!
//! | action | atomic steps |
//! |---|---|
//! | a round | look at all members and leases at once · do its part: take what was free and still is, revoke what is over |
//! | a drain | the work is finished and the lease released; or the deadline comes, and what is late is refused by its fence |
//! | join, leave | a member more; a member less, which drains what it has |
//! | faults | a member dies, and its ttl is over; whether work is finished before the deadline is nothing to count on |
//!
//! | promise | |
//! |---|---|
//! | living | nobody takes what a living member has |
//! | drain | nobody takes a partition on which another member's work goes on |
//! | still | when everything is shared out evenly, who sees that moves nothing |
//! | few | who sees everything at rest gives up no more than has to move |
//! | never stuck | everything can be shared out evenly among the living |
//!
//! | abstracted away | why that is enough |
//! |---|---|
//! | how a lease excludes | `lease.rs`; a paused member is a dead one, whose fences reject |
//! | the limit of moves a round | it delays, and takes no choice away |
//! | a settled round, which does not look | what it looks at instead changes with everything that changes what a look would show |
//!
//! There is a partition more than members, so that the shares differ. The mutants: [`Mutant`].

use crate::explore::Model;
use crate::letter;

mutants! {
    /// A member gives one up whenever another has fewer (C39).
    LargerThanMine,
    /// The larger shares are those of certain members, wherever the partitions are.
    SharesByName,
    /// Members that are dead have their shares (C38).
    CountsTheDead,
    /// A member counts those that it saw when it came (C38).
    OwnView,
    /// A newcomer takes what it lacks from whoever has more (C38).
    TakesFromTheLiving,
    /// What is given up is released at once, whatever goes on.
    NoDrain,
    /// A drain takes as long as it takes.
    NoDeadline,
}

impl Mutant {
    fn breaks(self) -> &'static str {
        match self {
            Self::LargerThanMine | Self::CountsTheDead => STILL,
            Self::SharesByName => FEW,
            Self::OwnView | Self::NoDeadline => Sharing::NEVER_STUCK,
            Self::TakesFromTheLiving => LIVING,
            Self::NoDrain => DRAIN,
        }
    }
}

const LIVING: &str = "nobody takes what a living member has";
const DRAIN: &str = "nobody takes a partition on which another member's work goes on";
const FEW: &str = "who sees everything at rest gives up no more than has to move";
const STILL: &str = "when everything is shared out evenly, who sees that moves nothing";

/// The most members.
const MOST: usize = 3;

/// The model.
#[derive(Debug)]
struct Sharing {
    members: u8,
    mutant: Option<Mutant>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Life {
    Away,
    Alive,
    Leaving,
    Dead,
}

/// What a look showed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct View {
    /// How many each member that counts has; none: it does not count.
    held: [Option<u8>; MOST],
    free: [bool; MOST + 1],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Member {
    life: Life,
    view: Option<View>,
    /// Who was there when it came.
    met: [bool; MOST],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Partition {
    holder: Option<u8>,
    revoked: bool,
    work: Option<u8>,
}

impl Partition {
    const FREE: Self = Self { holder: None, revoked: false, work: None };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct State {
    members: [Member; MOST],
    partitions: [Partition; MOST + 1],
    deaths: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Join(u8),
    Look(u8),
    Act(u8),
    Drain(u8),
    Deadline(u8),
    Leave(u8),
    Die(u8),
}

/// What a member does after a look.
#[derive(Default)]
struct Plan {
    take: Vec<u8>,
    give: Vec<u8>,
}

impl State {
    fn member(&self, member: u8) -> &Member {
        &self.members[usize::from(member)]
    }

    fn is_alive(&self, member: u8) -> bool {
        self.member(member).life == Life::Alive
    }
}

impl Sharing {
    fn is(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }

    fn all(&self) -> u8 {
        self.members + 1
    }

    /// By the database's list: a dead member's lease is free.
    fn holder(state: &State, partition: u8) -> Option<u8> {
        let holder = state.partitions[usize::from(partition)].holder;
        holder.filter(|holder| state.member(*holder).life != Life::Dead)
    }

    fn held(&self, state: &State, member: u8) -> u8 {
        let held = (0..self.all()).filter(|at| state.partitions[usize::from(*at)].holder == Some(member));
        u8::try_from(held.count()).unwrap()
    }

    fn look(&self, state: &State, member: u8) -> View {
        let mut view = View { held: [None; MOST], free: [false; MOST + 1] };
        for other in 0..self.members {
            let life = state.member(other).life;
            let counts = life == Life::Alive
                || self.is(Mutant::CountsTheDead) && life == Life::Dead
                || other == member;
            let knows = !self.is(Mutant::OwnView) || state.member(member).met[usize::from(other)];
            // What the dead had is not theirs, though they may count.
            let held = if life == Life::Dead { 0 } else { self.held(state, other) };
            view.held[usize::from(other)] = (counts && knows).then_some(held);
        }
        for at in 0..self.all() {
            let taken = Self::holder(state, at);
            view.free[usize::from(at)] = match taken {
                None => true,
                Some(holder) => {
                    self.is(Mutant::TakesFromTheLiving)
                        && self.held(state, holder) > self.held(state, member) + 1
                }
            };
        }
        view
    }

    fn share(&self, view: &View, member: u8) -> u8 {
        let counted = || view.held.iter().zip(0..).filter_map(|(held, other)| Some(((*held)?, other)));
        let own = view.held[usize::from(member)].unwrap_or(0);
        let before = counted().filter(|(held, other): &(u8, u8)| {
            if self.is(Mutant::SharesByName) {
                *other < member
            } else {
                *held > own || (*held == own && *other < member)
            }
        });
        let (members, rank) =
            (u8::try_from(counted().count()).unwrap(), u8::try_from(before.count()).unwrap());
        self.all() / members + u8::from(rank < self.all() % members)
    }

    fn plan(&self, state: &State, member: u8) -> Plan {
        let Some(view) = state.member(member).view else { return Plan::default() };
        let kept = |at: &u8| {
            let partition = &state.partitions[usize::from(*at)];
            partition.holder == Some(member) && !partition.revoked
        };
        let kept: Vec<u8> = (0..self.all()).filter(kept).collect();
        let keeps = u8::try_from(kept.len()).unwrap();
        let share = self.share(&view, member);
        let give = if self.is(Mutant::LargerThanMine) {
            u8::from(view.held.iter().flatten().any(|held| *held < keeps))
        } else {
            keeps.saturating_sub(share)
        };
        let want = share.saturating_sub(view.held[usize::from(member)].unwrap_or(0));
        let free = (0..self.all()).filter(|at| view.free[usize::from(*at)]);
        // Whoever has it by now has it: the lease is refused.
        let still = |at: &u8| self.is(Mutant::TakesFromTheLiving) || Self::holder(state, *at).is_none();
        Plan {
            take: free.take(usize::from(want)).filter(still).collect(),
            give: kept.into_iter().rev().take(usize::from(give)).collect(),
        }
    }

    /// How many have to be given up at least: with the largest shares where the most are.
    fn fewest(&self, state: &State) -> usize {
        let kept =
            |member: u8| state.partitions.iter().filter(|p| p.holder == Some(member) && !p.revoked).count();
        let mut kept: Vec<usize> = (0..self.members).filter(|m| state.is_alive(*m)).map(kept).collect();
        kept.sort_unstable_by_key(|kept| std::cmp::Reverse(*kept));
        let (all, members) = (usize::from(self.all()), kept.len());
        let over = |(kept, rank): (&usize, usize)| {
            kept.saturating_sub(all / members + usize::from(rank < all % members))
        };
        kept.iter().zip(0..).map(over).sum()
    }

    fn is_even(&self, state: &State) -> bool {
        let held: Vec<u8> =
            (0..self.members).filter(|m| state.is_alive(*m)).map(|m| self.held(state, m)).collect();
        let all = (0..self.all()).all(|at| {
            let partition = &state.partitions[usize::from(at)];
            !partition.revoked && partition.holder.is_some_and(|holder| state.is_alive(holder))
        });
        all && held.iter().max().zip(held.iter().min()).is_some_and(|(most, least)| most - least <= 1)
    }
}

impl Model for Sharing {
    type State = State;
    type Action = Action;

    const NEVER_STUCK: &'static str = "never stuck: everything can be shared out evenly among the living";

    fn initial(&self) -> State {
        let mut members = [Member { life: Life::Away, view: None, met: [false; MOST] }; MOST];
        let last = usize::from(self.members - 1);
        members[last].life = Life::Alive;
        members[last].met[last] = true;
        let mut partitions = [Partition::FREE; MOST + 1];
        for partition in partitions.iter_mut().take(usize::from(self.all())) {
            *partition =
                Partition { holder: Some(self.members - 1), revoked: false, work: Some(self.members - 1) };
        }
        State { members, partitions, deaths: 0 }
    }

    fn begins(&self) -> &'static str {
        "the last member is alone, and has all partitions"
    }

    fn actions(&self, _state: &State) -> Vec<Action> {
        let of_members = (0..self.members).flat_map(|member| {
            [
                Action::Join(member),
                Action::Look(member),
                Action::Act(member),
                Action::Leave(member),
                Action::Die(member),
            ]
        });
        let of_partitions = (0..self.all()).flat_map(|at| [Action::Drain(at), Action::Deadline(at)]);
        of_members.chain(of_partitions).collect()
    }

    fn after(&self, before: &State, action: Action) -> Option<State> {
        let mut state = *before;
        match action {
            Action::Join(member) => {
                if before.member(member).life != Life::Away {
                    return None;
                }
                let met = std::array::from_fn(|other| {
                    other == usize::from(member) || before.members[other].life == Life::Alive
                });
                state.members[usize::from(member)] = Member { life: Life::Alive, view: None, met };
            }
            Action::Look(member) => {
                if !before.is_alive(member) || before.member(member).view.is_some() {
                    return None;
                }
                state.members[usize::from(member)].view = Some(self.look(before, member));
            }
            Action::Act(member) => {
                if !before.is_alive(member) || before.member(member).view.is_none() {
                    return None;
                }
                let plan = self.plan(before, member);
                for at in plan.take {
                    state.partitions[usize::from(at)] =
                        Partition { holder: Some(member), revoked: false, work: Some(member) };
                }
                for at in plan.give {
                    let partition = &mut state.partitions[usize::from(at)];
                    if self.is(Mutant::NoDrain) {
                        partition.holder = None;
                    } else {
                        partition.revoked = true;
                    }
                }
                state.members[usize::from(member)].view = None;
            }
            Action::Drain(at) | Action::Deadline(at) => {
                let partition = before.partitions[usize::from(at)];
                let by_deadline = matches!(action, Action::Deadline(_));
                if !partition.revoked || (by_deadline && self.is(Mutant::NoDeadline)) {
                    return None;
                }
                state.partitions[usize::from(at)] = Partition::FREE;
            }
            Action::Leave(member) => {
                if !before.is_alive(member) {
                    return None;
                }
                state.members[usize::from(member)].life = Life::Leaving;
                state.members[usize::from(member)].view = None;
                for partition in state.partitions.iter_mut().filter(|p| p.holder == Some(member)) {
                    partition.revoked = true;
                }
            }
            Action::Die(member) => {
                if before.deaths > 0 || !matches!(before.member(member).life, Life::Alive | Life::Leaving) {
                    return None;
                }
                state.deaths += 1;
                state.members[usize::from(member)].life = Life::Dead;
                state.members[usize::from(member)].view = None;
                for partition in &mut state.partitions {
                    if partition.holder == Some(member) {
                        partition.revoked = false;
                    }
                    // What it goes on with is refused by its fences.
                    if partition.work == Some(member) {
                        partition.work = None;
                    }
                }
            }
        }
        (state != *before).then_some(state)
    }

    fn broken(&self, before: &State, action: Action, after: &State) -> Option<&'static str> {
        let Action::Act(member) = action else { return None };
        for at in 0..usize::from(self.all()) {
            let (was, is) = (&before.partitions[at], &after.partitions[at]);
            if is.holder != Some(member) || was.holder == Some(member) {
                continue;
            }
            if was.holder.is_some_and(|holder| before.member(holder).life != Life::Dead) {
                return Some(LIVING);
            }
            if was.work.is_some_and(|worker| worker != member) {
                return Some(DRAIN);
            }
        }
        let fresh = before.member(member).view == Some(self.look(before, member));
        let gives =
            before.partitions.iter().zip(&after.partitions).filter(|(was, is)| !was.revoked && is.revoked);
        let at_rest = (0..self.all())
            .all(|at| Self::holder(before, at).is_some() && !before.partitions[usize::from(at)].revoked);
        if fresh && at_rest && !self.is_even(before) && gives.count() > self.fewest(before) {
            return Some(FEW);
        }
        (fresh && self.is_even(before) && before.partitions != after.partitions).then_some(STILL)
    }

    fn is_fault(&self, _before: &State, action: Action, _after: &State) -> bool {
        matches!(action, Action::Die(_) | Action::Leave(_) | Action::Drain(_) | Action::Join(_))
    }

    fn is_well(&self, state: &State) -> bool {
        self.is_even(state) || (0..self.members).all(|member| !state.is_alive(member))
    }

    fn sight(&self, before: &State, action: Action, after: &State) -> Option<&'static str> {
        match action {
            Action::Act(member) => {
                let took = |at: usize| {
                    after.partitions[at].holder == Some(member)
                        && before.partitions[at].holder != Some(member)
                };
                let from_dead = |at: usize| before.partitions[at].holder.is_some();
                let fresh = before.member(member).view == Some(self.look(before, member));
                if (0..=MOST).any(|at| took(at) && from_dead(at)) {
                    Some(TAKEN_FROM_THE_DEAD)
                } else if (0..=MOST).any(|at| after.partitions[at].revoked && !before.partitions[at].revoked)
                {
                    Some(if fresh { REVOKED } else { OLD_NEWS })
                } else {
                    None
                }
            }
            Action::Deadline(_) => Some(NOT_DRAINED),
            _ if self.is_even(after) => Some(EVEN),
            _ => None,
        }
    }

    fn sights(&self) -> &'static [&'static str] {
        &[TAKEN_FROM_THE_DEAD, REVOKED, OLD_NEWS, NOT_DRAINED, EVEN]
    }

    fn tell(&self, before: &State, action: Action, after: &State) -> String {
        match action {
            Action::Join(member) => format!("{} joins", letter(member)),
            Action::Look(member) => format!("{} looks how things stand", letter(member)),
            Action::Act(member) => {
                let mut did = Vec::new();
                for at in 0..usize::from(self.all()) {
                    let (was, is) = (&before.partitions[at], &after.partitions[at]);
                    if is.holder == Some(member) && was.holder != Some(member) {
                        did.push(format!("takes {at}"));
                    } else if was.holder == Some(member) && is.holder.is_none() {
                        did.push(format!("releases {at} while it works on it"));
                    } else if is.revoked && !was.revoked {
                        did.push(format!("begins to drain {at}"));
                    }
                }
                let did = if did.is_empty() { "has nothing to do".to_owned() } else { did.join(", ") };
                format!("{} {did}", letter(member))
            }
            Action::Drain(at) => format!("the work on {at} is finished, and it is released"),
            Action::Deadline(at) => format!("the work on {at} took too long, and it is released"),
            Action::Leave(member) => format!("{} leaves, and begins to drain what it has", letter(member)),
            Action::Die(member) => format!("{} dies, and its ttl is over", letter(member)),
        }
    }
}

const TAKEN_FROM_THE_DEAD: &str = "what a dead member had is taken";
const REVOKED: &str = "a member gives up what is over its share";
const OLD_NEWS: &str = "a member gives something up for what is not so any more";
const NOT_DRAINED: &str = "the deadline of a drain comes";
const EVEN: &str = "everything is shared out evenly";

mod tests {
    use super::*;
    use crate::{assert_tells, check, clients, refute};

    fn sharing(mutant: Option<Mutant>) -> Sharing {
        Sharing { members: clients(), mutant }
    }

    #[test]
    fn sharing_out() {
        check("partition", &sharing(None));
    }

    #[test]
    fn every_rule_is_needed() {
        for mutant in Mutant::ALL {
            let trace = refute(&format!("partition, {mutant:?}"), &sharing(Some(*mutant)));
            assert_eq!(trace.promise, mutant.breaks(), "{mutant:?}");
        }
    }

    // C39: three partitions, two members: one has more, for ever.
    #[test]
    fn the_story_of_a_partition_that_goes_back_and_forth() {
        let trace =
            refute("partition, a story", &Sharing { members: 2, mutant: Some(Mutant::LargerThanMine) });
        assert_eq!(trace.promise, STILL);
        let story = [
            "A joins",
            "B looks how things stand",
            "B begins to drain 2",
            "the work on 2 is finished, and it is released",
            "A looks how things stand",
            "A takes 2",
            "B looks how things stand",
            "B begins to drain 1",
        ];
        assert_tells(&trace, &story);
    }
}
