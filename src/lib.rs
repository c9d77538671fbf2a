//! Only one at a time, on Postgres.

#[cfg(feature = "test-util")]
pub mod testing;
