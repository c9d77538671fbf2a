//! Only one at a time, on Postgres.
