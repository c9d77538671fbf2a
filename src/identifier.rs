//! Names of the caller's tables and columns, to be written into a statement.

use std::fmt::{self, Write as _};

use crate::error::{Error, Result};

/// The longest name that Postgres keeps, in bytes. It would cut a longer one off, and find something else.
const MAX_BYTES: usize = 63;

/// One part of a name. Its spelling is exact, and it displays quoted: whatever it holds is a name to Postgres.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Identifier(String);

impl Identifier {
    pub(crate) fn new(name: &str) -> Result<Self> {
        let broken = if name.is_empty() {
            "is not empty".to_owned()
        } else if name.len() > MAX_BYTES {
            format!("is at most {MAX_BYTES} bytes long, this one has {}", name.len())
        } else if name.contains('\0') {
            "has no NUL character".to_owned()
        } else {
            return Ok(Self(name.to_owned()));
        };
        Err(Error::misuse(format!("the name of a table, schema or column {broken}")))
    }
}

impl fmt::Display for Identifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_char('"')?;
        f.write_str(&self.0.replace('"', "\"\""))?;
        f.write_char('"')
    }
}

/// `table`, found by the session's `search_path`, or `schema.table`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Table {
    schema: Option<Identifier>,
    name: Identifier,
}

impl Table {
    pub(crate) fn new(name: &str) -> Result<Self> {
        match name.split_once('.') {
            None => Ok(Self { schema: None, name: Identifier::new(name)? }),
            Some((_, rest)) if rest.contains('.') => {
                Err(Error::misuse("a table is named table or schema.table, with one dot at most"))
            }
            Some((schema, name)) => {
                Ok(Self { schema: Some(Identifier::new(schema)?), name: Identifier::new(name)? })
            }
        }
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(schema) = &self.schema {
            write!(f, "{schema}.")?;
        }
        write!(f, "{}", self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_it_holds_is_quoted() {
        for (name, quoted) in [
            ("accounts", r#""accounts""#),
            ("public.Accounts", r#""public"."Accounts""#),
            ("select", r#""select""#),
            (r#"a"; DROP TABLE b; --"#, r#""a""; DROP TABLE b; --""#),
            (r#"a" b"."c"#, r#""a"" b"""."""c""#),
            ("köln", "\"köln\""),
        ] {
            assert_eq!(Table::new(name).unwrap().to_string(), quoted);
        }
    }

    #[test]
    fn what_postgres_would_not_take_as_it_is_is_a_misuse() {
        let long = "x".repeat(64);
        for name in ["", ".", "a.", ".a", "a.b.c", "nul\0", &long, &format!("a.{long}")] {
            assert!(matches!(Table::new(name), Err(Error::Misuse { .. })), "{name:?}");
        }
        assert!(Table::new(&format!("{0}.{0}", "x".repeat(63))).is_ok());
    }
}
