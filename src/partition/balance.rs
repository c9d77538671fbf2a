//! Who should have how many: the rule, and nothing else.
//!
//! With `n` partitions and `m` members each has a share of `n / m`, and the `n % m` members that have the most have one
//! more. So the larger shares lie where the partitions are already, and as few as possible move. A member below
//! its share takes what is free; one above it gives up what is over. Nobody takes from the living.
//!
//! **It comes to an end.** A member gives up only while it has more than `n / m`, so nobody falls below that by
//! balancing; it takes only up to its share. When nothing is free and nobody has fewer than `n / m`, those that have one
//! more are exactly `n % m`: everybody has its share, and nothing moves. "Give to whoever has fewer" has no such end:
//! with 7 partitions and 3 members the seventh goes round for ever.

use crate::mistake::Mistake;

/// How things stand, to one member.
#[derive(Clone, Copy, Debug)]
pub(super) struct View<'a> {
    pub(super) partitions: u32,
    /// How many each living member has by the database's list, in the order in which they joined.
    pub(super) held: &'a [u32],
    /// Which of them is asking.
    pub(super) position: usize,
    /// The numbers of those that nobody has.
    pub(super) free: &'a [u32],
    /// How many the member has and has not yet begun to give up.
    pub(super) keeps: u32,
}

/// What the member does now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    /// The numbers that it tries to take.
    pub(super) take: Vec<u32>,
    /// How many it begins to give up.
    pub(super) give: u32,
}

/// The most that a member takes, and gives up, in one round: an eighth of all. When many join one that has everything
/// it is done in eight rounds; and whoever came first does not take all from those who come in the same moment.
pub(super) fn most_moves(partitions: u32) -> u32 {
    partitions.div_ceil(8)
}

/// How many the member at `position` should have.
pub(super) fn share(partitions: u32, held: &[u32], position: usize) -> u32 {
    let members = u32::try_from(held.len()).unwrap_or(u32::MAX).max(1);
    let own = held.get(position).copied().unwrap_or(0);
    let before =
        held.iter().zip(0..).filter(|(other, at)| **other > own || (**other == own && *at < position));
    let rank = u32::try_from(before.count()).unwrap_or(u32::MAX);
    partitions / members + u32::from(rank < partitions % members)
}

pub(super) fn plan(view: &View<'_>) -> Plan {
    let own = view.held.get(view.position).copied().unwrap_or(0);
    let most = most_moves(view.partitions);
    if Mistake::LargerThanMine.is_made() && view.held.iter().any(|other| *other < view.keeps) {
        return Plan { take: Vec::new(), give: 1 };
    }
    let share = share(view.partitions, view.held, view.position);
    // Each begins at another place, so that members that come in the same moment do not want the same ones.
    let begin = view.position * view.free.len() / view.held.len().max(1);
    let want = usize::try_from(share.saturating_sub(own).min(most)).unwrap_or(usize::MAX);
    let take = view.free.iter().cycle().skip(begin).take(want.min(view.free.len())).copied().collect();
    Plan { take, give: view.keeps.saturating_sub(share).min(most) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A group in the making: who has what, which of that is being drained, and dice.
    struct Group {
        partitions: u32,
        /// Of each member, or nobody's.
        holders: Vec<Option<usize>>,
        /// Revoked, and released in so many rounds.
        draining: Vec<Option<u32>>,
        /// By the order of joining; those that left or died are none.
        members: Vec<usize>,
        seed: u64,
        moves: u32,
        /// Some act on what was true before others acted.
        old_news: bool,
    }

    impl Group {
        fn new(partitions: u32, members: usize, seed: u64) -> Self {
            let all = usize::try_from(partitions).unwrap();
            Self {
                partitions,
                holders: vec![None; all],
                draining: vec![None; all],
                members: (0..members).collect(),
                seed,
                moves: 0,
                old_news: true,
            }
        }

        fn dice(&mut self, sides: u64) -> u64 {
            self.seed =
                self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.seed >> 33) % sides
        }

        fn has(&self, member: usize) -> u32 {
            u32::try_from(self.holders.iter().filter(|holder| **holder == Some(member)).count()).unwrap()
        }

        fn held(&self) -> Vec<u32> {
            self.members.iter().map(|member| self.has(*member)).collect()
        }

        fn free(&self) -> Vec<u32> {
            self.holders
                .iter()
                .zip(0..)
                .filter(|(holder, _)| holder.is_none())
                .map(|(_, number)| number)
                .collect()
        }

        fn leaves(&mut self, member: usize) {
            self.members.retain(|other| *other != member);
            for (holder, drain) in self.holders.iter_mut().zip(&mut self.draining) {
                if *holder == Some(member) {
                    (*holder, *drain) = (None, None);
                }
            }
        }

        fn is_settled(&self) -> bool {
            let held = self.held();
            held.iter().sum::<u32>() == self.partitions
                && held.iter().max().unwrap() - held.iter().min().unwrap() <= 1
                && self.draining.iter().all(Option::is_none)
        }

        /// Each member once, in any order. A drain takes so many rounds.
        fn round(&mut self, drain: u32) {
            for at in 0..self.holders.len() {
                match &mut self.draining[at] {
                    Some(0) => (self.holders[at], self.draining[at]) = (None, None),
                    Some(left) => *left -= 1,
                    None => {}
                }
            }
            let old = (self.held(), self.free());
            let mut order: Vec<usize> = (0..self.members.len()).collect();
            for last in (1..order.len()).rev() {
                let other = usize::try_from(self.dice(u64::try_from(last).unwrap() + 1)).unwrap();
                order.swap(last, other);
            }
            for position in order {
                let member = self.members[position];
                let now = (self.held(), self.free());
                let stale = self.old_news && self.dice(2) == 0;
                let (mut held, free) = if stale { old.clone() } else { now };
                // What it has itself it knows.
                held[position] = self.has(member);
                let keeping = |group: &Self, at: usize| {
                    group.holders[at] == Some(member) && group.draining[at].is_none()
                };
                let keeps = (0..self.holders.len()).filter(|at| keeping(self, *at)).count();
                let keeps = u32::try_from(keeps).unwrap();
                let view = View { partitions: self.partitions, held: &held, position, free: &free, keeps };
                let plan = plan(&view);
                assert!(plan.give <= most_moves(self.partitions), "limited");
                assert!(u32::try_from(plan.take.len()).unwrap() <= most_moves(self.partitions), "limited");
                assert!(plan.give == 0 || keeps > self.partitions / u32::try_from(held.len()).unwrap());
                let kept: Vec<usize> =
                    (0..self.holders.len()).rev().filter(|at| keeping(self, *at)).collect();
                for at in kept.into_iter().take(usize::try_from(plan.give).unwrap()) {
                    self.draining[at] = Some(drain);
                }
                for number in plan.take {
                    let at = usize::try_from(number).unwrap();
                    if self.holders[at].is_none() {
                        self.holders[at] = Some(member);
                        self.moves += 1;
                    }
                }
            }
        }

        /// In how many rounds it settles, at most so many.
        fn settles(&mut self, most: u32, drain: u32) -> u32 {
            for rounds in 0..=most {
                if self.is_settled() {
                    return rounds;
                }
                self.round(drain);
            }
            panic!("not settled after {most} rounds: {:?}", self.held());
        }

        /// How many have to move at least: what is free, and what is over if the most have the largest shares.
        fn must_move(&self) -> u32 {
            let mut held = self.held();
            held.sort_unstable_by_key(|held| std::cmp::Reverse(*held));
            let members = u32::try_from(held.len()).unwrap();
            let (each, larger) = (self.partitions / members, self.partitions % members);
            let over = |(held, rank): (&u32, u32)| held.saturating_sub(each + u32::from(rank < larger));
            u32::try_from(self.free().len()).unwrap() + held.iter().zip(0..).map(over).sum::<u32>()
        }

        fn stays(&mut self) {
            let moves = self.moves;
            for _ in 0..10 {
                self.round(0);
                assert!(self.is_settled());
            }
            assert_eq!(self.moves, moves, "it moves though it is settled");
        }
    }

    // C39.
    #[test]
    fn it_settles_within_15_rounds_and_stays_settled() {
        for (partitions, members) in [(7, 3), (100, 10), (128, 32)] {
            for seed in 0..20 {
                // All come in the same moment.
                let mut group = Group::new(partitions, members, seed);
                group.settles(15, 0);
                group.stays();
                assert!(group.moves <= partitions + u32::try_from(members).unwrap(), "{}", group.moves);
                // One has everything when the others come.
                let mut group = Group::new(partitions, members, seed);
                group.holders.fill(Some(0));
                let must = group.must_move();
                group.settles(15, 0);
                group.stays();
                assert!(group.moves <= must + u32::try_from(members).unwrap(), "{} of {must}", group.moves);
                // Half of them die.
                for member in 0..members / 2 {
                    group.leaves(member);
                }
                group.settles(15, 0);
                group.stays();
            }
        }
    }

    #[test]
    fn with_fresh_news_nothing_moves_in_vain() {
        for (partitions, members) in [(7, 3), (100, 10), (128, 32), (11, 4)] {
            for has_everything in [0, members / 2, members - 1] {
                let mut group = Group::new(partitions, members, 7);
                group.old_news = false;
                group.holders.fill(Some(has_everything));
                let must = group.must_move();
                group.settles(15, 0);
                assert_eq!(group.moves, must, "{partitions} partitions, {members} members");
            }
        }
    }

    #[test]
    fn the_larger_shares_lie_where_the_partitions_are() {
        let shares = |held: &[u32]| (0..held.len()).map(|at| share(7, held, at)).collect::<Vec<_>>();
        assert_eq!(shares(&[2, 2, 3]), [2, 2, 3]);
        assert_eq!(shares(&[0, 0, 0]), [3, 2, 2]);
        assert_eq!(shares(&[0, 7, 0]), [2, 3, 2]);
        assert_eq!(shares(&[7]), [7]);
        assert_eq!(share(2, &[1, 1, 0], 2), 0);
    }

    proptest! {
        #[test]
        fn the_shares_are_even_and_add_up(
            partitions in 1_u32..200, held in prop::collection::vec(0_u32..50, 1..40)
        ) {
            let shares: Vec<u32> = (0..held.len()).map(|at| share(partitions, &held, at)).collect();
            prop_assert_eq!(shares.iter().sum::<u32>(), partitions);
            prop_assert!(shares.iter().max().unwrap() - shares.iter().min().unwrap() <= 1);
        }

        // Members that come, leave and die at any time, act on old news and take their time to drain.
        #[test]
        fn whatever_happens_it_settles_and_moves_no_more_than_it_must(
            partitions in 1_u32..130,
            begin in 1_usize..12,
            events in prop::collection::vec((0_usize..3, 0_u32..4, 0_usize..40), 0..8),
            drain in 0_u32..3,
            seed: u64,
        ) {
            let mut group = Group::new(partitions, begin, seed);
            let mut next = begin;
            for (event, rounds, which) in events {
                match event {
                    0 if group.members.len() > 1 => {
                        let member = group.members[which % group.members.len()];
                        group.leaves(member);
                    }
                    _ => {
                        group.members.push(next);
                        next += 1;
                    }
                }
                for _ in 0..rounds {
                    group.round(drain);
                }
            }
            let (moves, must) = (group.moves, group.must_move());
            let draining = u32::try_from(group.draining.iter().flatten().count()).unwrap();
            group.settles(15 * (drain + 1) + 10, drain);
            group.stays();
            let slack = u32::try_from(group.members.len()).unwrap() + draining;
            prop_assert!(group.moves - moves <= must + slack, "{} of {must}", group.moves - moves);
        }
    }
}
