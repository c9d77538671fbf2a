//! A statement on the caller's own tables, of quoted names and bound values.

use std::fmt::Write as _;

use sqlx::postgres::{PgArguments, PgRow};
use sqlx::{
    Arguments as _, AssertSqlSafe, Connection as _, Encode, PgConnection, Postgres, Type, TypeInfo as _,
};

use crate::error::{self, Error, Result};

pub(crate) struct Statement {
    /// Of our words, quoted names and the program's own conditions.
    pub(crate) text: String,
    pub(crate) values: Values,
    /// Whether it has a name on its session, and is kept.
    pub(crate) named: bool,
}

/// The values of its parameters.
#[derive(Default)]
pub(crate) struct Values {
    args: PgArguments,
    /// Their types, as a comment.
    types: String,
}

impl Values {
    pub(crate) fn of<'q>(value: impl Encode<'q, Postgres> + Type<Postgres>) -> Result<Self> {
        let mut values = Self::default();
        values.add(value)?;
        Ok(values)
    }

    /// The number of its parameter.
    pub(crate) fn add<'q, V: Encode<'q, Postgres> + Type<Postgres>>(&mut self, value: V) -> Result<usize> {
        let of_its_type = value.produces().unwrap_or_else(V::type_info);
        // A String as a fmt::Write never fails.
        _ = write!(self.types, " {}", of_its_type.name().escape_debug());
        self.args
            .add(value)
            .map_err(|error| Error::misuse(format!("the value cannot be encoded: {error}")))?;
        Ok(self.args.len())
    }
}

impl Statement {
    pub(crate) async fn rows(self, conn: &mut PgConnection) -> sqlx::Result<Vec<PgRow>> {
        let Self { text, values: Values { args, types }, named } = self;
        // sqlx finds a prepared statement by its text alone, and would send an i32 to one that was prepared for an i64.
        let text = format!("{text}\n--{types}");
        let rows = sqlx::query_with(AssertSqlSafe(text), args).persistent(named).fetch_all(&mut *conn).await;
        if rows.as_ref().is_err_and(|failure| error::is_stale_statement(failure)) {
            // It says `t.*`, and a column has been added. This transaction is lost, the next one will prepare it anew.
            conn.clear_cached_statements().await?;
        }
        rows
    }
}
