//! The statements of advisory locks.

use std::fmt::Write as _;
use std::time::Duration;

use super::{Arg, Call};
use crate::key::{Key, Mode, Numbers};
use crate::wait::Wait;

/// What is asked of a lock session at its start. On a standby every lock would be granted, and exclude nobody.
pub(crate) const WHO_ARE_YOU: &str =
    "SELECT pg_catalog.pg_backend_pid() AS pid, pg_catalog.pg_is_in_recovery() AS standby";

/// The question that shows whether a lock session is still there, and still the same.
pub(crate) const PID: &str = "SELECT pg_catalog.pg_backend_pid() AS pid";

pub(crate) const UNLOCK_ALL: &str = "SELECT pg_catalog.pg_advisory_unlock_all()";

const NOTE: &str =
    "SELECT fencepost.advisory_note($1::bigint::oid, $2::bigint::oid, $3::bigint::smallint, $4::text)";

/// Takes it for the session if it is free: a row with `answer`.
pub(crate) fn try_lock(numbers: Numbers, mode: Mode) -> Call {
    call(
        numbers,
        match (numbers, mode) {
            (Numbers::One(_), Mode::Exclusive) => {
                "SELECT pg_catalog.pg_try_advisory_lock($1::bigint) AS answer"
            }
            (Numbers::One(_), Mode::Shared) => {
                "SELECT pg_catalog.pg_try_advisory_lock_shared($1::bigint) AS answer"
            }
            (Numbers::Pair(..), Mode::Exclusive) => {
                "SELECT pg_catalog.pg_try_advisory_lock($1::bigint::integer, $2::bigint::integer) AS answer"
            }
            (Numbers::Pair(..), Mode::Shared) => {
                "SELECT pg_catalog.pg_try_advisory_lock_shared($1::bigint::integer, $2::bigint::integer) AS answer"
            }
        },
    )
}

/// Frees it once: a row with `answer`, which is whether the session held it.
pub(crate) fn unlock(numbers: Numbers, mode: Mode) -> Call {
    call(
        numbers,
        match (numbers, mode) {
            (Numbers::One(_), Mode::Exclusive) => {
                "SELECT pg_catalog.pg_advisory_unlock($1::bigint) AS answer"
            }
            (Numbers::One(_), Mode::Shared) => {
                "SELECT pg_catalog.pg_advisory_unlock_shared($1::bigint) AS answer"
            }
            (Numbers::Pair(..), Mode::Exclusive) => {
                "SELECT pg_catalog.pg_advisory_unlock($1::bigint::integer, $2::bigint::integer) AS answer"
            }
            (Numbers::Pair(..), Mode::Shared) => {
                "SELECT pg_catalog.pg_advisory_unlock_shared($1::bigint::integer, $2::bigint::integer) AS answer"
            }
        },
    )
}

fn call(numbers: Numbers, text: &'static str) -> Call {
    match numbers {
        Numbers::One(number) => Call::new(text, [Arg::Number(number)]),
        Numbers::Pair(first, second) => {
            Call::new(text, [Arg::Number(first.into()), Arg::Number(second.into())])
        }
    }
}

/// One message that waits for a lock of the session, at most so long.
///
/// Waiting for the session's lock itself could end in a timeout *and* hold it: a session-level lock has no owner
/// that would free it when the statement fails. So it waits for the same lock of the transaction, which the
/// failure does free; once that is held, the session's own is there without a wait, and stays when the
/// transaction ends with the message.
pub(crate) fn wait_for_session(numbers: Numbers, mode: Mode, at_most: Duration) -> String {
    format!(
        "SET LOCAL lock_timeout = {}; SELECT {}; SELECT {}",
        lock_timeout(at_most),
        function("pg_advisory_xact_lock", numbers, mode),
        function("pg_advisory_lock", numbers, mode)
    )
}

/// Takes it for the transaction if it is free: a row with `answer`.
pub(crate) fn try_in_transaction(numbers: Numbers, mode: Mode) -> String {
    format!("SELECT {} AS answer", function("pg_try_advisory_xact_lock", numbers, mode))
}

/// Statements that wait for all of them, for the transaction, and leave `lock_timeout` as they found it.
pub(crate) fn wait_in_transaction(locks: &[(Numbers, Mode)], wait: Wait) -> String {
    let mut text = "SELECT pg_catalog.set_config('fencepost.lock_timeout', pg_catalog.current_setting('lock_timeout'), true)".to_owned();
    let at_most = wait.bound().map(lock_timeout);
    // A String as a fmt::Write never fails.
    _ = write!(text, "; SET LOCAL lock_timeout = {}", at_most.unwrap_or(0));
    if let (Some(at_most), true) = (at_most, locks.len() > 1) {
        _ = write!(
            text,
            "; SELECT pg_catalog.set_config('fencepost.deadline', (pg_catalog.date_part('epoch', pg_catalog.clock_timestamp()) * 1000 + {at_most})::text, true)"
        );
    }
    for (index, (numbers, mode)) in locks.iter().enumerate() {
        if index > 0 && at_most.is_some() {
            // What is left of the whole; at least one, since zero means no bound.
            text += "; SELECT pg_catalog.set_config('lock_timeout', greatest(1, pg_catalog.ceil(pg_catalog.current_setting('fencepost.deadline')::float8 \
                     - pg_catalog.date_part('epoch', pg_catalog.clock_timestamp()) * 1000))::integer::text, true)";
        }
        _ = write!(text, "; SELECT {}", function("pg_advisory_xact_lock", *numbers, *mode));
    }
    text + "; SELECT pg_catalog.set_config('lock_timeout', pg_catalog.current_setting('fencepost.lock_timeout'), true)"
}

/// Tells people what the key is called.
pub(crate) fn note(key: &Key) -> Option<Call> {
    let [class, object, space] = key.numbers().tag().map(|number| Arg::Number(number.into()));
    Some(Call::new(NOTE, [class, object, space, Arg::Text(key.name()?.to_owned())]))
}

/// The function's call, as text. Numbers are quoted: the smallest would not be read back otherwise.
fn function(name: &'static str, numbers: Numbers, mode: Mode) -> String {
    let shared = if mode == Mode::Shared { "_shared" } else { "" };
    match numbers {
        Numbers::One(number) => format!("pg_catalog.{name}{shared}('{number}'::bigint)"),
        Numbers::Pair(first, second) => {
            format!("pg_catalog.{name}{shared}('{first}'::integer, '{second}'::integer)")
        }
    }
}

/// In whole milliseconds, as Postgres counts; rounded up, since what is less than one would be zero: no bound.
fn lock_timeout(at_most: Duration) -> u128 {
    at_most.as_nanos().div_ceil(1_000_000).clamp(1, 0x7fff_ffff)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_below_a_millisecond_is_one_and_not_for_ever() {
        for (wait, milliseconds) in [
            (Duration::ZERO, 1),
            (Duration::from_nanos(1), 1),
            (Duration::from_micros(999), 1),
            (Duration::from_micros(1_001), 2),
            (Duration::MAX, 0x7fff_ffff),
        ] {
            assert_eq!(lock_timeout(wait), milliseconds, "{wait:?}");
        }
    }

    #[test]
    fn any_number_can_be_written_out() {
        let text = wait_for_session(Numbers::One(i64::MIN), Mode::Shared, Duration::ZERO);
        assert!(text.contains("pg_advisory_xact_lock_shared('-9223372036854775808'::bigint)"), "{text}");
    }
}
