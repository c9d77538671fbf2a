//! Keys: the numbers that Postgres sees of an advisory lock, and the text that people see.

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use sha2::{Digest as _, Sha256};
use sqlx::postgres::{PgAdvisoryLock, PgAdvisoryLockKey};

use crate::error::{Error, Result};
use crate::name;

/// What an advisory lock locks: a 64-bit number, or a pair of 32-bit numbers. Cheap to clone.
///
/// The two kinds are separate spaces: `from_i64(1)` and `from_pair(0, 1)` do not exclude each other. Two keys are
/// equal, and ordered, by what is locked; the text that people see plays no part.
///
/// A key means something within one database of one server: a standby grants the same key again.
///
/// # The number of a name
/// [`from_name`](Self::from_name) is frozen for ever, and the same in every language:
///
/// 1. SHA-256 over three parts: the namespace, the text `advisory`, the name. Each part is its length in bytes as
///    four bytes, most significant first, and then its UTF-8 bytes. (The lengths keep `("a", "bc")` and
///    `("ab", "c")` apart.)
/// 2. The first eight bytes of the digest, most significant first, as a signed 64-bit number.
///
/// | namespace | name | key |
/// |---|---|---|
/// | `billing` | `nightly-report` | 2307511725075743275 |
/// | `a` | `bc` | 352616767362972103 |
/// | `ab` | `c` | 7213939997031763098 |
/// | `köln` | `日本 🦀` | -40207241714709991 |
///
/// In the database it is `fencepost.advisory_key(namespace, name)`, so `psql` can take the same lock:
/// `SELECT pg_advisory_xact_lock(fencepost.advisory_key('billing', 'nightly-report'))`. In Python:
///
/// ```python
/// part = lambda text: struct.pack(">I", len(text.encode())) + text.encode()
/// digest = hashlib.sha256(part(namespace) + part("advisory") + part(name)).digest()
/// key, = struct.unpack(">q", digest[:8])
/// ```
///
/// 64 bits: among a million names two collide with a chance of one to 37 million. (With 32 bits, as in many
/// libraries, they all but certainly do.)
#[derive(Clone)]
pub struct Key {
    numbers: Numbers,
    /// For people.
    name: Option<Arc<str>>,
}

/// What Postgres locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Numbers {
    One(i64),
    Pair(i32, i32),
}

/// How an advisory lock is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Mode {
    // The stronger one first: of two locks with one key it is the one to take.
    Exclusive,
    Shared,
}

impl Key {
    /// The key of a name within a namespace (the service, the team, the kind of thing), by the hash above.
    ///
    /// # Errors
    /// [`Error::Misuse`] if either is not 1 to 255 bytes without control characters.
    pub fn from_name(namespace: &str, name: &str) -> Result<Self> {
        name::check(namespace, "a namespace")?;
        name::check(name, "a name")?;
        let mut hash = Sha256::new();
        for part in [namespace, "advisory", name] {
            // At most 255, as checked.
            hash.update(u32::try_from(part.len()).unwrap_or(u32::MAX).to_be_bytes());
            hash.update(part);
        }
        let digest: [u8; 32] = hash.finalize().into();
        // It has more than eight bytes.
        let number = digest.first_chunk().map_or(0, |first| i64::from_be_bytes(*first));
        Ok(Self { numbers: Numbers::One(number), name: Some(format!("{namespace}/{name}").into()) })
    }

    /// The key `pg_advisory_lock(number)` takes.
    #[must_use]
    pub fn from_i64(number: i64) -> Self {
        Self { numbers: Numbers::One(number), name: None }
    }

    /// The key `pg_advisory_lock(first, second)` takes: of a space of its own.
    #[must_use]
    pub fn from_pair(first: i32, second: i32) -> Self {
        Self { numbers: Numbers::Pair(first, second), name: None }
    }

    /// Exactly the key that this lock of sqlx takes, so that a service can move to this library one replica at a
    /// time: old and new replicas exclude each other.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a kind of key that sqlx has added since.
    ///
    /// # Examples
    /// ```
    /// use fencepost::Key;
    /// use sqlx::postgres::PgAdvisoryLock;
    ///
    /// let key = Key::from_sqlx(&PgAdvisoryLock::new("my first Postgres advisory lock!"))?;
    /// assert_eq!(key, Key::from_i64(-5560419505042474287));
    /// # Ok::<(), fencepost::Error>(())
    /// ```
    pub fn from_sqlx(lock: &PgAdvisoryLock) -> Result<Self> {
        match *lock.key() {
            PgAdvisoryLockKey::BigInt(number) => Ok(Self::from_i64(number)),
            PgAdvisoryLockKey::IntPair(first, second) => Ok(Self::from_pair(first, second)),
            ref other => Err(Error::misuse(format!("sqlx's key {other:?} is not known here"))),
        }
    }

    /// The same key under another text for people.
    ///
    /// # Errors
    /// [`Error::Misuse`] if it is not 1 to 255 bytes without control characters.
    pub fn called(self, name: &str) -> Result<Self> {
        name::check(name, "a name")?;
        Ok(Self { name: Some(name.into()), ..self })
    }

    /// What people see of it, if it has a name: `namespace/name`, or what it was [`called`](Self::called).
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    pub(crate) fn numbers(&self) -> Numbers {
        self.numbers
    }
}

impl Numbers {
    /// Where `pg_locks` shows it: `classid`, `objid`, `objsubid`.
    pub(crate) fn tag(self) -> [u32; 3] {
        match self {
            Self::One(number) => {
                let bits = number.cast_unsigned();
                // Both fit: they are halves.
                [bits >> 32, bits & 0xffff_ffff, 1].map(|part| u32::try_from(part).unwrap_or(0))
            }
            Self::Pair(first, second) => [first.cast_unsigned(), second.cast_unsigned(), 2],
        }
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.numbers == other.numbers
    }
}

impl Eq for Key {}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Key {
    fn cmp(&self, other: &Self) -> Ordering {
        self.numbers.cmp(&other.numbers)
    }
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.numbers.hash(state);
    }
}

impl fmt::Display for Key {
    /// Its name, or else the number or the pair.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.name, self.numbers) {
            (Some(name), _) => f.write_str(name),
            (None, Numbers::One(number)) => write!(f, "{number}"),
            (None, Numbers::Pair(first, second)) => write!(f, "({first}, {second})"),
        }
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.numbers, f)?;
        self.name.as_ref().map_or(Ok(()), |name| write!(f, " {name:?}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // C48, C49: frozen. A change of one of these lets old and new replicas in at once. Computed by Python, from
    // the words of the documentation.
    #[test]
    fn the_numbers_of_names_never_change() {
        let long = ["x".repeat(255), "y".repeat(255)];
        for (namespace, name, number) in [
            ("billing", "nightly-report", 2_307_511_725_075_743_275),
            ("billing", "nightly-repors", -9_161_627_134_409_121_427),
            ("a", "bc", 352_616_767_362_972_103),
            ("ab", "c", 7_213_939_997_031_763_098),
            ("köln", "日本 🦀", -40_207_241_714_709_991),
            ("o'brien", "\\", -578_374_841_244_641_763),
            (&long[0], &long[1], 5_596_618_158_881_330_331),
        ] {
            assert_eq!(Key::from_name(namespace, name).unwrap(), Key::from_i64(number), "{namespace} {name}");
        }
    }

    #[test]
    fn keys_are_what_is_locked_whatever_they_are_called() {
        let key = Key::from_i64(1);
        assert_eq!(key.clone().called("one").unwrap(), key);
        assert_ne!(Key::from_pair(0, 1), key);
        assert!(key < Key::from_i64(2) && Key::from_i64(i64::MAX) < Key::from_pair(i32::MIN, 0));
        assert_eq!([key.to_string(), key.called("one").unwrap().to_string()], ["1", "one"]);
        assert_eq!(Key::from_pair(1, -2).to_string(), "(1, -2)");
        for bad in ["", "line\nbreak", &"x".repeat(256)] {
            assert!(Key::from_name(bad, "x").is_err() && Key::from_name("x", bad).is_err(), "{bad:?}");
            assert!(Key::from_i64(1).called(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn what_sqlx_locks_is_what_we_lock() {
        let pair = PgAdvisoryLock::with_key(PgAdvisoryLockKey::IntPair(-1, 2));
        assert_eq!(Key::from_sqlx(&pair).unwrap(), Key::from_pair(-1, 2));
    }
}
