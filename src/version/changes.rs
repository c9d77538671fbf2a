//! What an update sets: columns that are names, values that are bound.

use std::fmt;
use std::fmt::Write as _;

use sqlx::postgres::PgHasArrayType;
use sqlx::{Encode, Postgres, Type};

use crate::error::{Error, Result};
use crate::identifier::Identifier;
use crate::statement::Values;

/// What an update sets.
///
/// Columns are quoted names, values are bound: nothing in either becomes text of the statement. Without any, an
/// update raises the version only.
///
/// The update answers [`Error::Misuse`], before any statement is sent, if a column's name cannot be one, is set twice, or
/// is the version or the key; if a value cannot be encoded; or if [`set_each`](Self::set_each) does not fit to the number
/// of rows.
///
/// # Examples
/// ```
/// use fencepost::version::Changes;
///
/// let closed: Option<&str> = None;
/// let changes = Changes::new().set("balance", 110_i64).set("closed_by", closed);
/// ```
#[must_use]
#[derive(Default)]
pub struct Changes {
    sets: Vec<Set>,
    values: Values,
    /// The first mistake.
    mistake: Option<Error>,
}

struct Set {
    column: Identifier,
    /// How many values, if each row has its own.
    each: Option<usize>,
}

/// The parts of a statement that changes several rows.
pub(super) struct Many {
    /// `"a" = $1, "b" = w."c2", `
    pub(super) set: String,
    /// `, "c2"`
    pub(super) columns: String,
    /// `, unnest($2)`
    pub(super) arrays: String,
    pub(super) values: Values,
}

impl Changes {
    /// None so far.
    pub fn new() -> Self {
        Self::default()
    }

    /// This column gets this value. `None` of an `Option` is NULL.
    pub fn set<'q>(self, column: &str, value: impl Encode<'q, Postgres> + Type<Postgres>) -> Self {
        self.and(column, None, value)
    }

    /// This column gets a value for each row of [`update_many`](super::Versioned::update_many), in their order.
    pub fn set_each<V>(self, column: &str, values: &[V]) -> Self
    where
        V: for<'q> Encode<'q, Postgres> + Type<Postgres> + PgHasArrayType,
    {
        self.and(column, Some(values.len()), values)
    }

    fn and<'q>(
        mut self,
        column: &str,
        each: Option<usize>,
        value: impl Encode<'q, Postgres> + Type<Postgres>,
    ) -> Self {
        if self.mistake.is_none() {
            let added = Identifier::new(column).and_then(|column| {
                self.values.add(value)?;
                self.sets.push(Set { column, each });
                Ok(())
            });
            self.mistake = added.err();
        }
        self
    }

    /// `"a" = $1, `, and the values.
    pub(super) fn of_one(self, key: &Identifier, version: &Identifier) -> Result<(String, Values)> {
        let Many { set, columns, values, .. } = self.parts(key, version, None)?;
        if !columns.is_empty() {
            return Err(Error::misuse("a value for each row is for update_many"));
        }
        Ok((set, values))
    }

    pub(super) fn of_many(self, key: &Identifier, version: &Identifier, rows: usize) -> Result<Many> {
        self.parts(key, version, Some(rows))
    }

    fn parts(self, key: &Identifier, version: &Identifier, rows: Option<usize>) -> Result<Many> {
        if let Some(mistake) = self.mistake {
            return Err(mistake);
        }
        let (mut set, mut columns, mut arrays) = (String::new(), String::new(), String::new());
        // A String as a fmt::Write never fails.
        for (at, Set { column, each }) in (1..).zip(&self.sets) {
            if column == version {
                return Err(Error::misuse(format!("the version, {column}, is set by the database alone")));
            }
            if column == key {
                return Err(Error::misuse(format!("the key, {column}, is not to be changed")));
            }
            if self.sets.iter().filter(|other| other.column == *column).count() > 1 {
                return Err(Error::misuse(format!("{column} is set twice")));
            }
            match each {
                None => _ = write!(set, "{column} = ${at}, "),
                Some(count) => {
                    if let Some(rows) = rows.filter(|rows| rows != count) {
                        return Err(Error::misuse(format!("{column} has {count} values for {rows} rows")));
                    }
                    _ = write!(set, "{column} = w.fencepost_{at}, ");
                    _ = write!(columns, ", fencepost_{at}");
                    _ = write!(arrays, ", pg_catalog.unnest(${at})");
                }
            }
        }
        Ok(Many { set, columns, arrays, values: self.values })
    }
}

impl fmt::Debug for Changes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns: Vec<String> = self.sets.iter().map(|set| set.column.to_string()).collect();
        f.debug_struct("Changes").field("columns", &columns).finish_non_exhaustive()
    }
}
