//! What the library promises, capability by capability, on a real Postgres.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by panicking"
)]
#![allow(clippy::disallowed_methods, reason = "tests spawn tasks of their own")]

mod advisory;
mod advisory_transaction;
mod cancel;
mod claim;
mod claim_jobs;
mod claim_once;
mod connect;
mod contract;
#[path = "../faults/dice.rs"]
mod dice;
mod durability;
mod election;
mod fence;
mod inputs;
mod interleave;
mod lease;
mod mangle;
mod mangled;
mod migrate;
mod owner;
mod partition;
#[path = "../support/pgbouncer.rs"]
#[allow(dead_code, reason = "the fault suite uses another part of it")]
mod pgbouncer;
mod pooler;
mod postgres_facts;
mod process;
mod protect;
#[path = "../support/proxy.rs"]
#[allow(dead_code, reason = "the fault suite uses another part of it")]
mod proxy;
mod prune;
#[path = "../../examples/support/serial_queue.rs"]
mod queue;
mod retry;
mod row;
mod schedule;
mod semaphore;
mod serial_queue;
#[path = "../support/sources.rs"]
mod sources;
mod sql;
mod support;
mod version;
mod waiting;
mod wire;
