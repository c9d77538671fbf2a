//! The numbers that tell late from new: what a grant hands out, a fencing token and the grant it belongs to; and the
//! version of a row.

use std::fmt;
use std::str::FromStr;

use bytes::BytesMut;
use serde::{Deserialize, Serialize};
use sqlx::encode::IsNull;
use sqlx::error::BoxDynError;
use sqlx::postgres::{PgArgumentBuffer, PgHasArrayType, PgTypeInfo, PgValueRef};
use sqlx::{Decode, Encode, Postgres, Type};
use uuid::Uuid;

use crate::error::Error;

/// A number that grows with every grant, for a storage to reject the smaller one.
///
/// Each grant of a lease draws it from one sequence of the database, after the lease's row is locked:
/// it is larger than the token of every earlier grant of that name, also across crash, restart, release
/// and pruning. Numbers may be skipped. It is a `bigint` to Postgres, through sqlx and through
/// tokio-postgres alike, and a number to serde.
///
/// The token alone orders grants; to *identify* a grant use [`Grant`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "i64", into = "i64")]
pub struct FencingToken(i64);

impl FencingToken {
    /// A token from a number, as read from another storage.
    ///
    /// # Errors
    /// [`Error::Misuse`] if it is less than 1: no grant ever has such a token.
    pub fn new(token: i64) -> Result<Self, Error> {
        if token < 1 {
            return Err(Error::misuse(format!("a fencing token is 1 or more, not {token}")));
        }
        Ok(Self(token))
    }

    /// The number.
    #[must_use]
    pub fn as_i64(self) -> i64 {
        self.0
    }
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl TryFrom<i64> for FencingToken {
    type Error = Error;

    fn try_from(token: i64) -> Result<Self, Error> {
        Self::new(token)
    }
}

impl From<FencingToken> for i64 {
    fn from(token: FencingToken) -> Self {
        token.0
    }
}

/// The fresh uuid of one acquire. With the token it makes a grant unique for ever.
///
/// It is a secret of the holder: who knows a grant's pair can release it and pass its fence. A `uuid`
/// to Postgres.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct GrantId(Uuid);

impl fmt::Debug for GrantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A secret does not belong into a log.
        f.write_str("GrantId(..)")
    }
}

impl GrantId {
    /// The uuid.
    #[must_use]
    pub fn as_uuid(self) -> Uuid {
        self.0
    }

    pub(crate) fn fresh() -> Self {
        Self(Uuid::new_v4())
    }
}

impl From<Uuid> for GrantId {
    fn from(id: Uuid) -> Self {
        Self(id)
    }
}

impl FromStr for GrantId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let id = text.parse().map_err(|_| Error::misuse("a grant id is a uuid"))?;
        Ok(Self(id))
    }
}

impl fmt::Display for GrantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// One grant of a lease: what a fence checks, and what release takes.
///
/// Why a pair: an asynchronous failover may forget the last grants and hand out a token a second time.
/// The fresh id tells the two apart, so a check of the pair never takes one for the other.
///
/// As text (also to Postgres and serde) it reads `token/id`, to be handed to another process that works
/// under the same grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[non_exhaustive]
pub struct Grant {
    /// Orders the grants of a name.
    pub token: FencingToken,
    /// Tells this grant from every other.
    pub id: GrantId,
}

impl Grant {
    /// The pair, as read from elsewhere.
    #[must_use]
    pub fn new(token: FencingToken, id: GrantId) -> Self {
        Self { token, id }
    }
}

impl fmt::Display for Grant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.token, self.id)
    }
}

impl FromStr for Grant {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let misuse = || Error::misuse("a grant reads `token/uuid`");
        let (token, id) = text.split_once('/').ok_or_else(misuse)?;
        let token = FencingToken::new(token.parse().map_err(|_| misuse())?)?;
        Ok(Self::new(token, id.parse()?))
    }
}

impl TryFrom<String> for Grant {
    type Error = Error;

    fn try_from(text: String) -> Result<Self, Error> {
        text.parse()
    }
}

impl From<Grant> for String {
    fn from(grant: Grant) -> Self {
        grant.to_string()
    }
}

/// The version of one row: it grows by each change, and the row is changed only by who knows it.
///
/// It is a `bigint` to Postgres, through sqlx and through tokio-postgres alike, and a number to serde. As an HTTP
/// entity tag it is written by [`etag`](Self::etag) and read by [`IfMatch`](crate::version::IfMatch).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Version(i64);

impl Version {
    /// A version from a number, as read elsewhere. One that the row does not have is a conflict, and no harm.
    #[must_use]
    pub fn new(version: i64) -> Self {
        Self(version)
    }

    /// The number.
    #[must_use]
    pub fn as_i64(self) -> i64 {
        self.0
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Both codecs of a newtype by way of the plain type it is to Postgres.
macro_rules! codec {
    ($newtype:ty as $plain:ty, |$value:ident| $plain_of:expr, |$read:ident| $newtype_of:expr) => {
        impl Type<Postgres> for $newtype {
            fn type_info() -> PgTypeInfo {
                <$plain as Type<Postgres>>::type_info()
            }

            fn compatible(ty: &PgTypeInfo) -> bool {
                <$plain as Type<Postgres>>::compatible(ty)
            }
        }

        impl PgHasArrayType for $newtype {
            fn array_type_info() -> PgTypeInfo {
                <$plain as PgHasArrayType>::array_type_info()
            }
        }

        impl Encode<'_, Postgres> for $newtype {
            fn encode_by_ref(&self, buf: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
                let $value = self;
                <$plain as Encode<'_, Postgres>>::encode_by_ref(&$plain_of, buf)
            }
        }

        impl<'r> Decode<'r, Postgres> for $newtype {
            fn decode(value: PgValueRef<'r>) -> Result<Self, BoxDynError> {
                let $read = <$plain as Decode<'r, Postgres>>::decode(value)?;
                $newtype_of
            }
        }

        impl postgres_types::ToSql for $newtype {
            fn to_sql(
                &self,
                ty: &postgres_types::Type,
                out: &mut BytesMut,
            ) -> Result<postgres_types::IsNull, BoxDynError> {
                let $value = self;
                postgres_types::ToSql::to_sql(&$plain_of, ty, out)
            }

            fn accepts(ty: &postgres_types::Type) -> bool {
                <$plain as postgres_types::ToSql>::accepts(ty)
            }

            postgres_types::to_sql_checked!();
        }

        impl<'r> postgres_types::FromSql<'r> for $newtype {
            fn from_sql(ty: &postgres_types::Type, raw: &'r [u8]) -> Result<Self, BoxDynError> {
                let $read = <$plain as postgres_types::FromSql<'r>>::from_sql(ty, raw)?;
                $newtype_of
            }

            fn accepts(ty: &postgres_types::Type) -> bool {
                <$plain as postgres_types::FromSql<'r>>::accepts(ty)
            }
        }
    };
}

codec!(FencingToken as i64, |token| token.0, |number| Ok(Self::new(number)?));
codec!(Version as i64, |version| version.0, |number| Ok(Self(number)));
codec!(GrantId as Uuid, |id| id.0, |uuid| Ok(Self(uuid)));
codec!(Grant as String, |grant| grant.to_string(), |text| Ok(text.parse()?));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_order_and_refuse_what_no_grant_has() {
        assert!(FencingToken::new(33).unwrap() < FencingToken::new(34).unwrap());
        for none in [0, -1, i64::MIN] {
            assert!(matches!(FencingToken::new(none), Err(Error::Misuse { .. })));
        }
    }

    #[test]
    fn a_grant_reads_back_from_its_text_and_from_json() {
        let grant = Grant::new(FencingToken::new(33).unwrap(), GrantId::fresh());
        assert_eq!(grant.to_string().parse::<Grant>().unwrap(), grant);
        let json = serde_json::to_string(&(grant, grant.token)).unwrap();
        assert_eq!(serde_json::from_str::<(Grant, FencingToken)>(&json).unwrap(), (grant, grant.token));
        assert!(serde_json::from_str::<FencingToken>("0").is_err());
        for bad in ["", "33", "33/", "/x", "0/67e55044-10b1-426f-9247-bb680e5fe0c8", "33/67e55044"] {
            assert!(matches!(bad.parse::<Grant>(), Err(Error::Misuse { .. })), "{bad:?}");
        }
    }
}
