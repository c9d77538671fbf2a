//! JSON of the caller's, on its way into a `jsonb` column.

use serde::Serialize;

use crate::error::{Error, Result};

/// As text of at most so many bytes; `what` it is, for the error.
pub(crate) fn text(value: &(impl Serialize + ?Sized), what: &str, most: usize) -> Result<String> {
    let json = serde_json::to_string(value)
        .map_err(|error| Error::misuse(format!("{what} does not serialise: {error}")))?;
    if json.len() > most {
        return Err(Error::misuse(format!("{what} is at most {most} bytes of JSON, not {}", json.len())));
    }
    // Not an escaped backslash and four digits after it.
    if json.replace("\\\\", "").contains("\\u0000") {
        return Err(Error::misuse(format!("{what} has a NUL character, which jsonb cannot hold")));
    }
    Ok(json)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nul_is_refused_and_what_looks_like_one_is_not() {
        for good in ["", "\\u0000", "a\\\\u0000", "\"\\", "\u{1}"] {
            assert_eq!(text(good, "it", 99).unwrap(), serde_json::to_string(good).unwrap());
        }
        for bad in ["\0", "a\\\0", "\\\\\0b"] {
            assert!(matches!(text(bad, "it", 99), Err(Error::Misuse { .. })), "{bad:?}");
        }
        assert!(text("12345678", "it", 10).is_ok() && text("123456789", "it", 10).is_err());
    }
}
