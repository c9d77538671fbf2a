//! A version as an HTTP entity tag.

use std::str::FromStr;

use crate::error::{Error, Result};
use crate::token::Version;

impl Version {
    /// The version as a strong entity tag, for the header `ETag`: `"7"`, quotes included.
    ///
    /// Strong means that what is sent depends on the row alone. Where one resource has several forms (languages,
    /// encodings), they need tags of their own.
    #[must_use]
    pub fn etag(self) -> String {
        format!("\"{self}\"")
    }
}

/// The header `If-Match`, which says what the client has read
/// ([RFC 9110, 13.1.1](https://www.rfc-editor.org/rfc/rfc9110#section-13.1.1)).
///
/// Load the row, answer 412 (Precondition Failed) unless it is [met by](Self::is_met_by) the row's version, and update with that
/// version: the statement compares it again, and its conflict is a 412, too.
///
/// # Errors
/// Parsing answers [`Error::Misuse`], which is for a 400: if it is no list of entity tags; or if one of them is weak
/// (`W/"7"`). A weak tag never matches here, by the RFC; a client has one if something on the way, a proxy that
/// compresses, has weakened it, and should hear of that rather than of a conflict that is none.
///
/// # Examples
/// ```
/// use fencepost::Version;
/// use fencepost::version::IfMatch;
///
/// let header = Version::new(7).etag();
/// let condition: IfMatch = header.parse()?;
/// assert!(condition.is_met_by(Version::new(7)) && !condition.is_met_by(Version::new(8)));
/// assert!("W/\"7\"".parse::<IfMatch>().is_err());
/// # Ok::<_, fencepost::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "the RFC knows these two")]
pub enum IfMatch {
    /// `*`: whatever version the row has.
    Any,
    /// One of these. Tags that are no version of ours match nothing, and are left out.
    OneOf(Vec<Version>),
}

impl IfMatch {
    /// Whether it allows to change a row that has this version.
    #[must_use]
    pub fn is_met_by(&self, current: Version) -> bool {
        match self {
            Self::Any => true,
            Self::OneOf(versions) => versions.contains(&current),
        }
    }
}

impl FromStr for IfMatch {
    type Err = Error;

    fn from_str(header: &str) -> Result<Self> {
        if trimmed(header) == "*" {
            return Ok(Self::Any);
        }
        let no_list = || Error::misuse("If-Match is * or a list of entity tags, each in quotes");
        let (mut versions, mut tags, mut rest) = (Vec::new(), 0, header);
        loop {
            // Commas with nothing in between are to be accepted (RFC 9110, 5.6.1.2).
            let next = rest.trim_start_matches([' ', '\t', ',']);
            if next.is_empty() {
                break;
            }
            if tags > 0 && !trimmed(rest).starts_with(',') {
                return Err(no_list());
            }
            if next.starts_with("W/") {
                return Err(Error::misuse("If-Match takes strong entity tags, this one is weak (W/)"));
            }
            let tag = next.strip_prefix('"').and_then(|next| next.split_once('"'));
            let (tag, after) = tag.ok_or_else(no_list)?;
            // What an entity tag may hold (RFC 9110, 8.8.3).
            if tag.chars().any(|c| c <= ' ' || c == '\x7f') {
                return Err(no_list());
            }
            versions.extend(tag.parse().ok().map(Version::new).filter(|version| version.to_string() == tag));
            tags += 1;
            rest = after;
        }
        if tags == 0 { Err(no_list()) } else { Ok(Self::OneOf(versions)) }
    }
}

/// Without the white space that a header may have.
fn trimmed(text: &str) -> &str {
    text.trim_matches([' ', '\t'])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_list_of_strong_tags_is_read_as_the_rfc_says() {
        let one_of = |versions: &[i64]| IfMatch::OneOf(versions.iter().copied().map(Version::new).collect());
        for (header, read) in [
            ("*", IfMatch::Any),
            (" * ", IfMatch::Any),
            (r#""7""#, one_of(&[7])),
            ("\"7\"\t,, \"8\" ,", one_of(&[7, 8])),
            (r#"  , "-3""#, one_of(&[-3])),
            // Tags of somebody else: they match nothing, and so do other spellings of a number.
            (r#""a,b", "", "07", "+7", "9223372036854775808", "7""#, one_of(&[7])),
            (r#""xyzzy""#, one_of(&[])),
        ] {
            assert_eq!(header.parse::<IfMatch>().unwrap(), read, "{header}");
        }
        assert!(!one_of(&[]).is_met_by(Version::new(0)) && IfMatch::Any.is_met_by(Version::new(0)));
    }

    #[test]
    fn what_is_no_list_of_strong_tags_is_refused() {
        for header in [
            "",
            ",",
            "7",
            "\"7",
            "7\"",
            "\"7\" \"8\"",
            "\"7\"x",
            "\"7 8\"",
            "*, \"7\"",
            "\"7\", *",
            "W/\"7\"",
            "\"8\", W/\"7\"",
        ] {
            assert!(matches!(header.parse::<IfMatch>(), Err(Error::Misuse { .. })), "{header}");
        }
        assert!("\"8\",W/\"7\"".parse::<IfMatch>().unwrap_err().to_string().contains("weak"));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(versions in proptest::collection::vec(any::<i64>(), 1..5)) {
            let versions: Vec<_> = versions.into_iter().map(Version::new).collect();
            let header = versions.iter().map(|version| version.etag()).collect::<Vec<_>>().join(", ");
            prop_assert_eq!(header.parse::<IfMatch>().unwrap(), IfMatch::OneOf(versions));
        }

        #[test]
        fn nothing_makes_it_panic(header in ".*") {
            drop(header.parse::<IfMatch>());
        }
    }
}
