//! What there is: the lease, the line, and the processes.

/// How often a process may acquire, once in each of its lives.
pub(super) const ATTEMPTS: u8 = 2;
/// How many faults there may be.
const FAULTS: u8 = 1;

#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct State {
    pub(super) row: Row,
    /// The tickets, oldest first.
    pub(super) queue: Vec<Id>,
    /// Notifications under way, in order.
    pub(super) wakes: Vec<Wake>,
    pub(super) processes: Vec<Process>,
    /// How many more faults there may be.
    pub(super) faults: u8,
}

/// A grant id: of a process' so-manieth acquire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Id {
    pub(super) process: u8,
    pub(super) attempt: u8,
}

/// The lease's row.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Row {
    pub(super) id: Id,
    pub(super) released: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Wake {
    pub(super) to: Id,
    /// By a digest over the grant id.
    pub(super) proven: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Process {
    pub(super) running: bool,
    pub(super) life: Life,
    /// The first of its acquires under this life; those before are of a dead owner.
    pub(super) first: u8,
    /// How many acquires it has begun; the last one is the present one.
    pub(super) attempts: u8,
    pub(super) place: Place,
    /// It has a fenced write open.
    pub(super) writes: bool,
    /// It has released what could not be granted at once, and sees to it.
    pub(super) hands_over: bool,
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
pub(super) enum Place {
    Away,
    /// The database has answered, which is not yet heard.
    Answered(Answer),
    InLine,
    Holding {
        /// Whatever became of its life.
        blindly: bool,
    },
    /// Release is sent, and waited for.
    Releasing,
    /// It has given up; withdraw is sent.
    Leaving,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Answer {
    Granted,
    Queued,
}

impl State {
    pub(super) fn initial(clients: u8) -> Self {
        let away = Process {
            running: true,
            life: Life::Alive,
            first: 0,
            attempts: 0,
            place: Place::Away,
            writes: false,
            hands_over: false,
        };
        let holds = Process { attempts: ATTEMPTS, place: Place::Holding { blindly: false }, ..away };
        let mut processes = vec![away; usize::from(clients)];
        processes.push(holds);
        Self {
            row: Row { id: Id { process: clients, attempt: ATTEMPTS - 1 }, released: false },
            queue: Vec::new(),
            wakes: Vec::new(),
            processes,
            faults: FAULTS,
        }
    }

    pub(super) fn process(&self, number: u8) -> &Process {
        &self.processes[usize::from(number)]
    }

    pub(super) fn process_mut(&mut self, number: u8) -> &mut Process {
        &mut self.processes[usize::from(number)]
    }

    /// Of its present acquire, or of its last one.
    pub(super) fn id(&self, process: u8) -> Id {
        Id { process, attempt: self.process(process).attempts.saturating_sub(1) }
    }

    /// Of the owner that this grant id belongs to.
    pub(super) fn life(&self, id: Id) -> Life {
        let process = self.process(id.process);
        if id.attempt < process.first { Life::Dead } else { process.life }
    }

    /// Released, or its owner does not live.
    pub(super) fn is_free(&self) -> bool {
        self.row.released || self.life(self.row.id) != Life::Alive
    }

    pub(super) fn is_written(&self) -> bool {
        self.processes.iter().any(|process| process.writes)
    }

    /// Whether somebody waits for this grant who runs and lives.
    pub(super) fn waits(&self, id: Id) -> bool {
        let process = self.process(id.process);
        process.running
            && self.id(id.process) == id
            && self.life(id) == Life::Alive
            && matches!(process.place, Place::InLine | Place::Answered(Answer::Queued))
    }
}

impl Process {
    /// By its own clock: it trusts its life no longer than it lasts.
    pub(super) fn believes(self) -> bool {
        match self.place {
            Place::Holding { blindly } => self.running && (self.life == Life::Alive || blindly),
            _ => false,
        }
    }
}
