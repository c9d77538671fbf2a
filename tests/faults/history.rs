//! Histories: what each process did and when, one JSON line a step, all on one clock.
//!
//! A line is one write to the kernel, made before a step begins and after it has ended. So a SIGKILL leaves a
//! history that can be read: a step that was begun and has no end may have happened.

use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// Nanoseconds of the machine's clock, comparable between its processes.
pub(crate) fn now() -> u64 {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    let clock = rustix::time::ClockId::Boottime;
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    let clock = rustix::time::ClockId::Monotonic;
    let time = rustix::time::clock_gettime(clock);
    u64::try_from(time.tv_sec).unwrap() * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    /// `try_acquire`, or `acquire` with its longest wait in milliseconds as the value.
    Acquire,
    /// A read-modify-write and a row of the log, in one fenced transaction.
    Write,
    /// A read-modify-write of another counter without a fence.
    Twin,
    /// The effect of a claim and its end, in one transaction; `Acquire` is its begin.
    Complete,
    /// A look at `is_held`: one record, `Ok` for yes and `Fail` for no, from `at` to `until`; the value is how
    /// many nanoseconds it says are left.
    Believe,
    /// `lost()` has resolved: one record.
    Lost,
    /// The lease is given back: release or drop.
    End,
    /// The application has stood still, or has had no connection, for longer than the ttl: one record.
    Trouble,
    /// Permits are acquired; the value is how many.
    Permit,
    /// A fenced transaction under a permit.
    Use,
    /// A look at a versioned row: one record from `at` to `until`; the token is its version, the value is what it has.
    Load,
    /// A versioned row is updated, or deleted, by its version, which is the token; the value is the new one, or the other
    /// one that it has.
    Update,
    Delete,
    /// A row is put into the place of one that is gone; the value is its version.
    Insert,
    /// At the end, what the database still has of a living owner of which nobody holds or waits: one record.
    Rest,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Phase {
    Invoke,
    /// COMMIT is sent next.
    Commit,
    Ok,
    /// It did not happen.
    Fail,
    /// It may have happened.
    Unknown,
}

/// The reason of a begin whose attempt before ended without a word.
pub(crate) const RECOVERED: &str = "recovered";

/// What begins the reason of a write that was refused because the lease is lost.
pub(crate) const REJECTED: &str = "rejected";

/// The reasons of an update that found another version, no row, and of one that says that a trigger has stopped it, or
/// that it is not one of a versioned row.
pub(crate) const CONFLICT: &str = "conflict";
pub(crate) const GONE: &str = "gone";
pub(crate) const SUPPRESSED: &str = "suppressed";

/// The reason of the grant of a lock that is held with others.
pub(crate) const SHARED: &str = "shared";

/// The reason of an acquire whose future was dropped, and what begins that of one whose time was over.
pub(crate) const CANCELLED: &str = "cancelled";
pub(crate) const TIMED_OUT: &str = "timed out";

/// One line. A step is the records of one `process` with one `op`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) at: u64,
    pub(crate) process: i32,
    pub(crate) op: i64,
    pub(crate) kind: Kind,
    pub(crate) phase: Phase,
    pub(crate) name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) token: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) value: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) until: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) why: Option<String>,
}

impl Record {
    pub(crate) fn new(process: i32, op: i64, kind: Kind, phase: Phase, name: &str) -> Self {
        let (token, value, until, why) = (None, None, None, None);
        Self { at: now(), process, op, kind, phase, name: name.to_owned(), token, value, until, why }
    }

    pub(crate) fn token(self, token: i64) -> Self {
        Self { token: Some(token), ..self }
    }

    pub(crate) fn value(self, value: i64) -> Self {
        Self { value: Some(value), ..self }
    }

    pub(crate) fn why(self, why: impl Into<String>) -> Self {
        Self { why: Some(why.into()), ..self }
    }
}

/// The history that one process writes.
pub(crate) struct Writer(File);

impl Writer {
    pub(crate) fn create(path: &Path) -> Self {
        Self(OpenOptions::new().create_new(true).append(true).open(path).unwrap())
    }

    pub(crate) fn write(&self, record: &Record) {
        let mut line = serde_json::to_vec(record).unwrap();
        line.push(b'\n');
        (&self.0).write_all(&line).unwrap();
    }
}

/// All histories in the folder, in the order of their instants.
pub(crate) fn read(folder: &Path) -> Vec<Record> {
    let mut records: Vec<Record> = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|kind| kind != "jsonl") {
            continue;
        }
        let text = fs::read_to_string(path).unwrap();
        // What follows the last line's end is a line that a SIGKILL cut off.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        records.extend(whole.lines().map(|line| serde_json::from_str::<Record>(line).unwrap()));
    }
    records.sort_by_key(|record| record.at);
    records
}
