//! Forgetting what is long over.

use std::time::Duration;

use sqlx::{PgConnection, Row as _};

use crate::error::{Error, Result};
use crate::sql::{self, Arg, Call, micros};

/// How much [`prune`] deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pruned {
    /// Owners long dead.
    pub owners: u64,
    /// Leases long free.
    pub leases: u64,
    /// Slots of semaphores long free.
    pub permits: u64,
}

/// Deletes owners that are dead, and leases and slots of semaphores that are free, since longer than `older_than`.
///
/// Only needed where names or processes come and go without end. Tokens go on rising for a name that was
/// deleted. Nothing that is held is touched.
///
/// # Errors
/// [`Error::Misuse`] for more than 1,000 years; [`Error::Database`] with SQLSTATE LK004 in a transaction that is not
/// `READ COMMITTED`.
///
/// # Cancel safety
/// It happens or not.
///
/// # Database
/// One statement. It waits for nobody: what somebody is at, or writes under, is skipped and there the next time.
pub async fn prune(conn: &mut PgConnection, older_than: Duration) -> Result<Pruned> {
    check_age(older_than)?;
    let fail = |source| Error::database("pruning", source);
    let call = Call::new(sql::PRUNE, [Arg::Number(micros(older_than))]);
    let rows = call.written_out_on(conn).await.map_err(fail)?;
    let row = rows.first().ok_or(sqlx::Error::RowNotFound).map_err(fail)?;
    let count = |column| -> Result<u64> {
        let count: i64 = row.try_get(column).map_err(fail)?;
        Ok(u64::try_from(count).unwrap_or(0))
    };
    Ok(Pruned { owners: count("owners")?, leases: count("leases")?, permits: count("permits")? })
}

/// The rule for ages.
pub(crate) fn check_age(older_than: Duration) -> Result<()> {
    const MOST: Duration = Duration::from_hours(8_760_000);
    if older_than > MOST {
        return Err(Error::misuse(format!("prune takes an age of up to 1000 years, not {older_than:?}")));
    }
    Ok(())
}
