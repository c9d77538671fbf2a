//! An answer that makes no sense: the driver may panic on it, and it counts as a broken connection.
//!
//! sqlx trusts the length fields of what it reads. A message, a row or a value that is shorter than it should be (a
//! faulty proxy, broken memory) makes it panic where other nonsense is an error. In the owner's thread that
//! would end the owner with all it holds. So whatever reads an answer for us does it in here.

use std::any::Any;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::Poll;

use sqlx::postgres::PgRow;
use sqlx::{Row as _, TypeInfo as _, ValueRef as _};

/// The work, whose panic is an [`sqlx::Error::Protocol`]. Its connection is of no use after that.
pub(crate) fn caught<T>(
    work: impl Future<Output = sqlx::Result<T>>,
) -> impl Future<Output = sqlx::Result<T>> {
    // Boxed, since the driver's futures are large and go through several hands.
    let mut work = Box::pin(work);
    poll_fn(move |cx| {
        // Unwind safe: it is not polled again, and whoever has its connection throws it away.
        let polled = catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(cx)));
        polled.unwrap_or_else(|panic| Poll::Ready(Err(broken(panic.as_ref()))))
    })
}

/// The rows, all of whose values can be read without a panic later.
pub(crate) fn rows(
    rows: impl Future<Output = sqlx::Result<Vec<PgRow>>>,
) -> impl Future<Output = sqlx::Result<Vec<PgRow>>> {
    caught(async {
        let rows = rows.await?;
        rows.iter().try_for_each(touch)?;
        Ok(rows)
    })
}

/// Reads what sqlx reads without looking first: where each value lies in the row, and the byte of a `bool`.
fn touch(row: &PgRow) -> sqlx::Result<()> {
    for column in 0..row.len() {
        let value = row.try_get_raw(column)?;
        if !value.is_null() && value.type_info().name() == "BOOL" {
            row.try_get::<bool, _>(column)?;
        }
    }
    Ok(())
}

fn broken(panic: &(dyn Any + Send)) -> sqlx::Error {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message");
    sqlx::Error::Protocol(format!("the driver panicked on an answer: {text}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_is_a_broken_answer_and_what_it_had_is_dropped() {
        let connection = std::sync::Arc::new(());
        let theirs = std::sync::Arc::clone(&connection);
        let answer = caught(async move {
            tokio::task::yield_now().await;
            assert!(std::sync::Arc::strong_count(&theirs) == 1, "index out of bounds");
            Ok(())
        });
        let error = answer.await.unwrap_err();
        assert!(
            matches!(&error, sqlx::Error::Protocol(text) if text.ends_with("out of bounds")),
            "{error:?}"
        );
        assert_eq!(std::sync::Arc::strong_count(&connection), 1);
        assert_eq!(caught(async { Ok(7) }).await.unwrap(), 7);
    }
}
