//! Names of what is locked: text that people choose.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::error::Error;

/// The name of a lease or of a fenced resource: 1 to 255 bytes of UTF-8 without (ASCII) control characters.
///
/// Names are compared byte by byte: `"Report"` and `"report"` are two names. Those that begin with `fencepost:` are
/// the library's own: an election and a lease of one name are two things. Cloning is cheap.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LockName(Arc<str>);

impl LockName {
    /// The longest name, in bytes.
    pub const MAX_BYTES: usize = 255;

    /// What the names of our own begin with.
    const RESERVED: &str = "fencepost:";

    /// Checks the name.
    ///
    /// # Errors
    /// [`Error::Misuse`] if it is empty, longer than [`MAX_BYTES`](Self::MAX_BYTES), has a control character or begins
    /// with `fencepost:`.
    pub fn new(name: &str) -> Result<Self, Error> {
        if name.starts_with(Self::RESERVED) {
            return Err(Error::misuse(format!(
                "a name does not begin with {:?}, which is for names of the library's own",
                Self::RESERVED
            )));
        }
        Self::stored(name)
    }

    /// The name as the database has it, of whatever kind.
    pub(crate) fn stored(name: &str) -> Result<Self, Error> {
        check(name, "a name")?;
        Ok(Self(name.into()))
    }

    /// As it was given, without what makes it a name of its own kind.
    pub(crate) fn plain(&self) -> &str {
        let of_kind = self.0.strip_prefix(Self::RESERVED).and_then(|rest| rest.split_once(':'));
        of_kind.map_or(&self.0, |(_kind, name)| name)
    }

    /// `fencepost:kind:name`, which is no name that anybody chooses for something else.
    pub(crate) fn of_kind(kind: &str, name: &str) -> Result<Self, Error> {
        check(name, "a name")?;
        let whole = format!("{}{kind}:{name}", Self::RESERVED);
        if whole.len() > Self::MAX_BYTES {
            let most = Self::MAX_BYTES - (whole.len() - name.len());
            return Err(Error::misuse(format!(
                "a name of this kind is at most {most} bytes long, this one has {}",
                name.len()
            )));
        }
        Ok(Self(whole.into()))
    }

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The rule for names and labels; `what` begins the sentence that says how it was broken.
pub(crate) fn check(text: &str, what: &str) -> Result<(), Error> {
    let broken = if text.is_empty() {
        "is not empty".to_owned()
    } else if text.len() > LockName::MAX_BYTES {
        format!("is at most {} bytes long, this one has {}", LockName::MAX_BYTES, text.len())
    } else if let Some(at) = text.find(|c: char| c.is_ascii_control()) {
        format!("has no control characters, this one has one at byte {at}")
    } else {
        return Ok(());
    };
    Err(Error::misuse(format!("{what} {broken}")))
}

impl fmt::Display for LockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for LockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl FromStr for LockName {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        Self::new(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_1_to_255_bytes_without_control_characters() {
        for good in ["a", "nightly-report", "o'brien \"quoted\" $1 \\", "köln/日本", &"x".repeat(255)] {
            assert_eq!(LockName::new(good).unwrap().as_str(), good);
        }
        for bad in
            ["", "nul\0", "line\nbreak", "del\x7f", "fencepost:x", &"x".repeat(256), &"x".repeat(10_240)]
        {
            assert!(matches!(LockName::new(bad), Err(Error::Misuse { .. })), "{bad:?}");
        }
    }
}
