//! What there is, what can happen, and what comes of it.

use super::{Claim, Mutant};

/// How often a process may begin.
const ATTEMPTS: u8 = 2;
/// How many faults there may be.
const FAULTS: u8 = 2;

#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct State {
    pub(super) row: Row,
    /// How often the effect has been committed.
    pub(super) effects: u8,
    /// An attempt that somebody had in hand has ended without a word.
    pub(super) wordless: bool,
    pub(super) processes: Vec<Process>,
    /// How many more faults there may be.
    pub(super) faults: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Row {
    pub(super) status: Status,
    /// The last attempt: token and grant id in one. None yet: 0.
    pub(super) grant: u8,
    /// Of that.
    pub(super) owner: u8,
    pub(super) life: u8,
    pub(super) unclear: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Status {
    Ready,
    Running,
    Done,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Process {
    pub(super) running: bool,
    /// Of its present owner, which is its so-manieth.
    pub(super) life: Life,
    pub(super) lives: u8,
    attempts: u8,
    pub(super) doing: Doing,
}

/// An owner's row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Life {
    Alive,
    /// Expired, not marked.
    Lapsed {
        /// A heartbeat that was in time has its row, and will commit.
        beat: bool,
    },
    Dead,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Doing {
    Idle,
    /// It looked free.
    Looked,
    /// Granted, which is not yet heard.
    Answered {
        grant: u8,
    },
    /// Under this life of its process.
    Working {
        grant: u8,
        life: u8,
    },
    /// Complete has been answered in a transaction that is open.
    Open {
        grant: u8,
        life: u8,
    },
    /// Gone, and not yet given back.
    Dropping {
        grant: u8,
    },
}

impl Doing {
    /// The attempt that the process knows.
    pub(super) fn grant(self) -> Option<u8> {
        match self {
            Self::Idle | Self::Looked => None,
            Self::Answered { grant }
            | Self::Working { grant, .. }
            | Self::Open { grant, .. }
            | Self::Dropping { grant } => Some(grant),
        }
    }
}

impl Process {
    /// By its own clock: it trusts its life no longer than it lasts.
    pub(super) fn believes(self) -> bool {
        match self.doing {
            Doing::Working { life, .. } | Doing::Open { life, .. } => {
                self.running && self.life == Life::Alive && self.lives == life
            }
            _ => false,
        }
    }

    pub(super) fn locks(self) -> bool {
        matches!(self.doing, Doing::Open { .. })
    }
}

impl State {
    pub(super) fn initial(clients: u8) -> Self {
        let process = Process { running: true, life: Life::Alive, lives: 1, attempts: 0, doing: Doing::Idle };
        Self {
            row: Row { status: Status::Ready, grant: 0, owner: 0, life: 0, unclear: false },
            effects: 0,
            wordless: false,
            processes: vec![process; usize::from(clients)],
            faults: FAULTS,
        }
    }

    pub(super) fn process(&self, number: u8) -> &Process {
        &self.processes[usize::from(number)]
    }

    fn process_mut(&mut self, number: u8) -> &mut Process {
        &mut self.processes[usize::from(number)]
    }

    /// Of the owner of the last attempt.
    pub(super) fn owner_life(&self) -> Life {
        let owner = self.process(self.row.owner);
        if self.row.life < owner.lives { Life::Dead } else { owner.life }
    }

    /// The attempt of the row is over, and has said nothing.
    fn ends_without_a_word(&mut self) {
        let owner = self.process(self.row.owner);
        // What nobody has heard of had no effects.
        self.wordless |= !matches!(owner.doing, Doing::Answered { grant } if grant == self.row.grant);
    }
}

/// A step, by the process that it is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Look(u8),
    Take(u8),
    Hear(u8),
    Complete(u8),
    Commit(u8),
    RollBack(u8),
    Drop(u8),
    GiveBack(u8),
    Reconcile(u8),
    /// The owner of a dead process has not been heard of for its ttl.
    Expire(u8),
    CommitBeat(u8),
    Restart(u8),
    // Faults.
    Die(u8),
    /// A running process is paused beyond its ttl, with or without a heartbeat in flight.
    Lapse(u8, bool),
    LoseAnswer(u8),
}

/// All that might be possible: `step` says what is.
pub(super) fn possible(state: &State) -> Vec<Action> {
    let all = |number| {
        [
            Action::Look(number),
            Action::Take(number),
            Action::Hear(number),
            Action::Complete(number),
            Action::Commit(number),
            Action::RollBack(number),
            Action::Drop(number),
            Action::GiveBack(number),
            Action::Reconcile(number),
            Action::Expire(number),
            Action::CommitBeat(number),
            Action::Restart(number),
            Action::Die(number),
            Action::Lapse(number, false),
            Action::Lapse(number, true),
            Action::LoseAnswer(number),
        ]
    };
    (0..u8::try_from(state.processes.len()).unwrap()).flat_map(all).collect()
}

impl Claim {
    /// The state after it; none if it is not possible, or has to wait.
    pub(super) fn step(&self, before: &State, action: Action) -> Option<State> {
        let mut after = before.clone();
        let (Action::Look(number)
        | Action::Take(number)
        | Action::Hear(number)
        | Action::Complete(number)
        | Action::Commit(number)
        | Action::RollBack(number)
        | Action::Drop(number)
        | Action::GiveBack(number)
        | Action::Reconcile(number)
        | Action::Expire(number)
        | Action::CommitBeat(number)
        | Action::Restart(number)
        | Action::Die(number)
        | Action::Lapse(number, _)
        | Action::LoseAnswer(number)) = action;
        let process = *before.process(number);
        match (action, process.doing) {
            (Action::Expire(_), _) if !process.running && process.life == Life::Alive => {
                after.process_mut(number).life = Life::Lapsed { beat: false };
            }
            (Action::CommitBeat(_), _) if process.life == (Life::Lapsed { beat: true }) => {
                after.process_mut(number).life = Life::Alive;
            }
            _ if !process.running => return None,
            (Action::Look(_), Doing::Idle) if process.life == Life::Alive && process.attempts < ATTEMPTS => {
                after.process_mut(number).attempts += 1;
                let free = self.is_free(before);
                after.process_mut(number).doing = if free { Doing::Looked } else { Doing::Idle };
            }
            (Action::Take(_), Doing::Looked) => self.take(&mut after, number)?,
            (Action::Hear(_), Doing::Answered { grant }) => {
                // The life under which it asked: a process that has lost that gives it back unheard.
                let life = process.lives;
                after.process_mut(number).doing = Doing::Working { grant, life };
            }
            (Action::Complete(_), Doing::Working { grant, life }) => {
                self.complete(&mut after, number, grant, life)
            }
            (Action::Commit(_), Doing::Open { .. }) => {
                after.process_mut(number).doing = Doing::Idle;
                after.row.status = Status::Done;
                after.effects += u8::from(!self.is(Mutant::EffectApart));
            }
            (Action::RollBack(_), Doing::Open { grant, life }) => {
                after.process_mut(number).doing = Doing::Working { grant, life };
            }
            (Action::Drop(_), Doing::Working { grant, .. }) => {
                after.process_mut(number).doing = Doing::Dropping { grant };
            }
            (Action::GiveBack(_), Doing::Dropping { grant }) => {
                if before.row.status == Status::Running && before.row.grant == grant {
                    after.ends_without_a_word();
                    after.row.status = Status::Ready;
                    after.row.unclear |= !self.is(Mutant::DropsWithoutAWord);
                }
                after.process_mut(number).doing = Doing::Idle;
            }
            (Action::Reconcile(_), doing)
                if !self.is(Mutant::NoReconcile)
                    && before.row.status == Status::Running
                    && before.row.owner == number
                    && before.owner_life() == Life::Alive
                    && doing.grant() != Some(before.row.grant) =>
            {
                // Nobody here has ever heard of it; which is not known any more.
                after.row.status = Status::Ready;
                after.row.unclear = true;
            }
            (Action::Restart(_), Doing::Idle)
                if matches!(process.life, Life::Dead | Life::Lapsed { beat: false }) =>
            {
                after.process_mut(number).lives += 1;
                after.process_mut(number).life = Life::Alive;
            }
            (Action::Die(_), doing) if before.faults > 0 => {
                after.faults -= 1;
                after.process_mut(number).running = false;
                let stays = self.is(Mutant::NoIdleBound) && process.locks();
                after.process_mut(number).doing = match doing {
                    _ if stays => doing,
                    Doing::Answered { .. } => doing,
                    _ => Doing::Idle,
                };
            }
            (Action::Lapse(_, beat), _) if before.faults > 0 && process.life == Life::Alive => {
                after.faults -= 1;
                after.process_mut(number).life = Life::Lapsed { beat };
            }
            (Action::LoseAnswer(_), Doing::Answered { .. }) if before.faults > 0 => {
                after.faults -= 1;
                after.process_mut(number).doing = Doing::Idle;
            }
            _ => return None,
        }
        Some(after)
    }

    fn is_free(&self, state: &State) -> bool {
        match state.row.status {
            Status::Ready => true,
            Status::Running => state.owner_life() != Life::Alive || self.is(Mutant::RescueByRunTime),
            Status::Done => false,
        }
    }

    /// `claim_begin` from its lock on, in `0009_claims.sql`. None: it waits for a heartbeat of the owner.
    fn take(&self, state: &mut State, number: u8) -> Option<()> {
        state.process_mut(number).doing = Doing::Idle;
        let open = state.processes.iter().any(|process| process.locks());
        if open && !self.is(Mutant::CompleteWithoutLock) {
            return Some(());
        }
        if !self.is_free(state) && !self.is(Mutant::ReadThenInsert) {
            return Some(());
        }
        // Its own life, which is read after the lock.
        if state.process(number).life != Life::Alive {
            return Some(());
        }
        if state.row.status == Status::Running {
            let owner = state.row.owner;
            match state.owner_life() {
                Life::Lapsed { beat: true } if !self.is(Mutant::PlainReadOfLife) => return None,
                Life::Lapsed { beat: false } if !self.is(Mutant::PlainReadOfLife) => {
                    state.process_mut(owner).life = Life::Dead;
                }
                _ => {}
            }
            state.ends_without_a_word();
            state.row.unclear = true;
        }
        let grant = state.row.grant + 1;
        let life = state.process(number).lives;
        state.row = Row { status: Status::Running, grant, owner: number, life, unclear: state.row.unclear };
        state.process_mut(number).doing = Doing::Answered { grant };
        Some(())
    }

    /// `claim_complete`, up to the commit of its transaction.
    fn complete(&self, state: &mut State, number: u8, grant: u8, life: u8) {
        let is_ours = state.row.grant == grant && state.owner_life() == Life::Alive;
        let passes = state.row.status == Status::Running && (is_ours || self.is(Mutant::FinishById));
        state.effects += u8::from(passes && self.is(Mutant::EffectApart));
        state.process_mut(number).doing = if passes { Doing::Open { grant, life } } else { Doing::Idle };
    }
}
