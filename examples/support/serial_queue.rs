//! A queue in a table of your own: items of one key are worked one at a time and in order, those of different keys beside
//! each other, by any number of workers. It is a lease for each key that is being worked on, and nothing else.
//!
//! No row, transaction or connection is held over the work itself. A worker that dies, or is paused for longer than its
//! owner's ttl, loses the lease of its key: the next one works the same item again, with a larger token, and a late
//! finish of the first one is refused. Hand the token to whatever you call outside, if that can compare tokens.
//!
//! The order of a key is that of the `id`s that are there when one is claimed: whoever adds two items of one key commits
//! the first before the second draws its id.

use fencepost::{Error, FencingToken, HeldLease, Lease, Owner};
use sqlx::{PgPool, Row as _};

pub(crate) const TABLE: &str = "
    CREATE TABLE item (
        id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        key     text   NOT NULL,
        body    text   NOT NULL,
        attempt bigint,  -- the token of the latest attempt
        done    bigint); -- the token of the attempt that did it
    CREATE INDEX item_next ON item (key, id) WHERE done IS NULL";

/// An item that is ours to work on.
pub(crate) struct Claim {
    held: HeldLease,
    pub(crate) id: i64,
    pub(crate) body: String,
}

/// The next item of a key that nobody works on; none: there is none.
pub(crate) async fn claim(owner: &Owner, pool: &PgPool) -> Result<Option<Claim>, Error> {
    let keys = "SELECT key FROM item WHERE done IS NULL GROUP BY key ORDER BY min(id) LIMIT 100";
    for key in sqlx::query_scalar::<_, String>(keys).fetch_all(pool).await? {
        let Some(held) = Lease::named(&format!("item/{key}"))?.try_acquire(owner).await? else { continue };
        // Only now it is certain which one is next: whoever had the key may have finished one.
        let next = "UPDATE item SET attempt = $2 WHERE id = \
                    (SELECT id FROM item WHERE key = $1 AND done IS NULL ORDER BY id LIMIT 1) RETURNING id, body";
        let mut tx = held.begin(pool).await?;
        let next = sqlx::query(next).bind(&key).bind(held.token()).fetch_optional(&mut *tx).await?;
        tx.commit().await?;
        if let Some(next) = next {
            return Ok(Some(Claim { id: next.get("id"), body: next.get("body"), held }));
        }
        held.release().await?;
    }
    Ok(None)
}

impl Claim {
    /// The attempt: larger than that of every earlier attempt at the item.
    pub(crate) fn token(&self) -> FencingToken {
        self.held.token()
    }

    /// It is done. An error that [`Error::is_lost`]: somebody else works on it by now, and this attempt has done nothing.
    pub(crate) async fn finish(self, pool: &PgPool) -> Result<(), Error> {
        let mut tx = self.held.begin(pool).await?;
        // Your own writes go here, too.
        let done = "UPDATE item SET done = $2 WHERE id = $1 AND done IS NULL";
        sqlx::query(done).bind(self.id).bind(self.held.token()).execute(&mut *tx).await?;
        tx.commit().await?;
        self.held.release().await.map(drop)
    }
}
