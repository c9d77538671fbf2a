//! What there is: the database and the processes.

use super::{Lease, Scene};

/// The most clients, and the most lives of one.
const CLIENTS: usize = 3;
const LIVES: usize = 2;

#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct State {
    pub(super) db: Db,
    /// As it was when it last caught up. None: there is none, or it has taken over.
    pub(super) standby: Option<Db>,
    pub(super) clients: Vec<Client>,
    /// How many more faults there may be.
    pub(super) faults: u8,
}

/// What is committed.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct Db {
    /// The lease's row. The token of the grant that holds it, or held it last; 0: nobody.
    pub(super) token: u8,
    pub(super) grant: Grant,
    /// The client whose owner it is, and which of its lives.
    pub(super) owner: u8,
    pub(super) owner_life: u8,
    pub(super) released: bool,
    /// A release need not be, for a while.
    pub(super) on_disk: bool,
    /// The owners' rows, by client and life.
    pub(super) lives: [[Life; LIVES]; CLIENTS],
    pub(super) sequence: u8,
    /// The token of the last fenced write.
    pub(super) written: u8,
}

/// A row of `owners`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Life {
    Unborn,
    /// For so many ticks; at 0 it has expired, and nobody has marked it.
    Ticks(u8),
    /// Marked.
    Dead,
}

/// A grant id. A fresh one for each acquire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Grant {
    pub(super) client: u8,
    pub(super) attempt: u8,
    /// Of a retry, which should not have one.
    pub(super) again: bool,
}

#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct Client {
    pub(super) running: bool,
    /// Which of its lives.
    pub(super) life: u8,
    /// For how many more ticks it trusts that life.
    pub(super) trust: u8,
    pub(super) beat: Option<Beat>,
    /// How many acquires it has begun.
    pub(super) attempts: u8,
    /// Announced, held or on their way.
    pub(super) known: Known,
    pub(super) held: Option<Held>,
    pub(super) about: Option<About>,
    pub(super) calls: Vec<Call>,
    /// Its open fenced transaction.
    pub(super) open: Option<Open>,
}

/// A set of a client's own grant ids.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(super) struct Known(u8);

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Held {
    pub(super) grant: Grant,
    pub(super) token: u8,
}

/// What a process wants answered, and asks again for if the answer is lost.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum About {
    Acquire(Grant),
    Release(Held),
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Beat {
    /// Ticks since it was sent.
    pub(super) age: u8,
    pub(super) stage: BeatStage,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum BeatStage {
    Sent,
    /// Its transaction has locked the owner's row and written so many ticks: not yet committed.
    Judged(u8),
    Alive,
    Dead,
}

/// A call under way.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Call {
    pub(super) ask: Ask,
    pub(super) grant: Grant,
    /// Under which life it was sent.
    pub(super) life: u8,
    pub(super) stage: Stage,
    /// Somebody listens for the answer.
    pub(super) heard: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Ask {
    Acquire { retry: bool },
    Release { token: u8 },
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Stage {
    Sent,
    /// Has drawn a token, and no lock yet: as it should not be.
    Drawn(u8),
    /// Has locked the row, and its owner's if that is to be marked, and written both: not yet committed.
    Locked {
        token: u8,
        buries: bool,
    },
    Answered(Answer),
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Answer {
    Granted(u8),
    Refused,
    /// The owner that asks is dead.
    OwnerDead,
    Released,
}

/// A transaction that has passed the fence.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Open {
    pub(super) token: u8,
    pub(super) view: View,
    /// It has the lease's row `FOR KEY SHARE`.
    pub(super) locks: bool,
}

/// What it has read of the data.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum View {
    Nothing,
    Current,
    /// Another write has been committed since.
    Overwritten,
}

impl State {
    pub(super) fn initial(model: &Lease) -> Self {
        let nobody = Grant { client: u8::MAX, attempt: 0, again: false };
        let db = Db {
            token: 0,
            grant: nobody,
            owner: 0,
            owner_life: 0,
            released: true,
            on_disk: true,
            lives: [[Life::Ticks(model.ttl()), Life::Unborn]; CLIENTS],
            sequence: 0,
            written: 0,
        };
        let client = Client {
            running: true,
            life: 0,
            trust: model.ttl(),
            beat: None,
            attempts: 0,
            known: Known::default(),
            held: None,
            about: None,
            calls: Vec::new(),
            open: None,
        };
        let mut state = Self {
            standby: (model.scene == Scene::Failover).then(|| db.clone()),
            db,
            clients: vec![client; usize::from(model.clients)],
            faults: model.faults(),
        };
        if model.time_passes() {
            let held = Held { grant: Grant { client: 0, attempt: 0, again: false }, token: 1 };
            (state.db.token, state.db.grant, state.db.released, state.db.sequence) =
                (1, held.grant, false, 1);
            let holder = state.client_mut(0);
            (holder.held, holder.attempts) = (Some(held), 1);
            holder.known.insert(held.grant);
        }
        state
    }

    pub(super) fn client(&self, client: u8) -> &Client {
        &self.clients[usize::from(client)]
    }

    pub(super) fn client_mut(&mut self, client: u8) -> &mut Client {
        &mut self.clients[usize::from(client)]
    }

    /// Whether a grant that is not committed has the lease's row.
    pub(super) fn locked(&self) -> bool {
        self.locker().is_some()
    }

    pub(super) fn locker(&self) -> Option<&Call> {
        self.clients
            .iter()
            .flat_map(|client| &client.calls)
            .find(|call| matches!(call.stage, Stage::Locked { .. }))
    }

    /// Whether that grant is about to mark this owner, and has its row.
    pub(super) fn is_being_buried(&self, client: u8, life: u8) -> bool {
        let buries = |call: &Call| matches!(call.stage, Stage::Locked { buries: true, .. });
        (self.db.owner, self.db.owner_life) == (client, life) && self.locker().is_some_and(buries)
    }

    /// Whether somebody has the lease's row `FOR KEY SHARE`.
    pub(super) fn fences_open(&self) -> bool {
        self.clients.iter().any(|client| client.open.is_some_and(|open| open.locks))
    }
}

impl Db {
    pub(super) fn life(&self, client: u8, life: u8) -> Life {
        self.lives[usize::from(client)][usize::from(life)]
    }

    pub(super) fn life_mut(&mut self, client: u8, life: u8) -> &mut Life {
        &mut self.lives[usize::from(client)][usize::from(life)]
    }

    /// Granted, not released, by an owner that lives.
    pub(super) fn is_held(&self) -> bool {
        !self.released && self.life(self.owner, self.owner_life).is_alive()
    }
}

impl Life {
    pub(super) fn is_alive(self) -> bool {
        matches!(self, Self::Ticks(1..))
    }
}

impl Grant {
    pub(super) fn is_same_acquire(self, other: Self) -> bool {
        (self.client, self.attempt) == (other.client, other.attempt)
    }
}

impl Known {
    fn bit(grant: Grant) -> u8 {
        1 << (2 * grant.attempt + u8::from(grant.again))
    }

    pub(super) fn insert(&mut self, grant: Grant) {
        self.0 |= Self::bit(grant);
    }

    pub(super) fn remove(&mut self, grant: Grant) {
        self.0 &= !Self::bit(grant);
    }

    pub(super) fn contains(self, grant: Grant) -> bool {
        self.0 & Self::bit(grant) != 0
    }
}

impl Client {
    /// Whether an answer is on its way.
    pub(super) fn listens(&self) -> bool {
        self.calls.iter().any(|call| call.heard)
    }
}
