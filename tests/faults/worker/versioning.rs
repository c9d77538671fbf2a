//! The worker that changes versioned rows: it loads some, lets others be faster, and changes them as it has read them:
//! one or several, in autocommit or in a transaction, or by a closure that decides anew. It deletes some and puts others
//! in their place.

use std::cell::Cell;

use fencepost::version::{Changes, Current, Delete, Update, Versioned};
use fencepost::{Error, Isolation, Version, transaction};
use sqlx::PgConnection;
use sqlx::postgres::PgTransaction;
use tokio::time::{sleep, timeout};

use super::{Ask, DEADLINE, Mistake, Place, Worker};
use crate::history::{CONFLICT, GONE, Kind, Phase, Record, SUPPRESSED, now};

/// What the names of rows begin with.
pub(crate) const ROW: &str = "row ";

/// Has `name`, `n`, and who made it so: `process` and `op`.
pub(crate) fn table() -> Versioned {
    Versioned::on("versioned").unwrap().key("name").unwrap()
}

pub(super) fn is_row(name: &str) -> bool {
    name.starts_with(ROW)
}

pub(super) async fn work(worker: &Worker) {
    let rows = table();
    while !*worker.quitting.borrow() {
        let name = worker.dice.borrow_mut().pick(&worker.orders.names).clone();
        let what = worker.dice.borrow_mut().below(100);
        // That mistake is made by nothing else.
        let what = if worker.orders.mistake == Some(Mistake::RepeatsUnknown) { 60 } else { what };
        // Whose session is ended begins anew.
        let _done: Option<()> = match what {
            0..25 => worker.change_one(&rows, &name).await,
            25..45 => worker.change_one_in_a_transaction(&rows, &name).await,
            45..55 => worker.change_by_transactions(&rows, &name).await,
            55..72 => worker.change_by_a_closure(&rows, &name).await.map(drop),
            72..90 => worker.change_several(&rows).await,
            _ => worker.replace(&rows, &name).await,
        };
        sleep(worker.think(0, 3)).await;
    }
}

/// Changes each row once, and ends.
pub(super) async fn once(worker: &Worker) {
    let rows = table();
    for name in &worker.orders.names {
        let change = async {
            while worker.change_by_a_closure(&rows, name).await.is_none() {
                let mut conn = worker.pool.acquire().await.unwrap();
                worker.insert(&mut conn, name).await;
            }
        };
        timeout(DEADLINE, change).await.unwrap_or_else(|_| panic!("{name} cannot be changed"));
    }
}

/// A row as it was read.
struct Read {
    name: String,
    n: i64,
    version: Version,
}

/// A change on its way: a step of the history.
struct Change<'a> {
    worker: &'a Worker,
    op: i64,
    kind: Kind,
    name: &'a str,
    base: Option<Version>,
}

impl<'a> Change<'a> {
    fn of(worker: &'a Worker, kind: Kind, name: &'a str, base: Option<Version>) -> Self {
        let change = Self { worker, op: worker.next_op(), kind, name, base };
        change.write(&change.record(Phase::Invoke));
        change
    }

    fn record(&self, phase: Phase) -> Record {
        let record = self.worker.record(self.op, self.kind, phase, self.name);
        Record { token: self.base.map(Version::as_i64), ..record }
    }

    fn write(&self, record: &Record) {
        self.worker.history.write(record);
    }

    /// From now on it may happen.
    fn is_sent(&self) {
        self.write(&self.record(Phase::Commit));
    }

    fn is_made(&self, version: Option<Version>) {
        self.write(&Record { value: version.map(Version::as_i64), ..self.record(Phase::Ok) });
    }

    fn conflicts(&self, current: Option<Version>) {
        let value = current.map(Version::as_i64);
        self.write(&Record { value, ..self.record(Phase::Fail).why(CONFLICT) });
    }

    fn fails(&self, why: &str) {
        self.write(&self.record(Phase::Fail).why(why));
    }

    /// Before its COMMIT is sent no error leaves anything open.
    fn errs(&self, error: &Error, is_sent: bool) {
        match error {
            Error::Misuse { .. } => panic!("{error:?}"),
            Error::Suppressed { .. } | Error::NotVersioned { .. } => self.fails(SUPPRESSED),
            Error::Conflict { current, .. } => self.conflicts(*current),
            Error::Gone => self.fails(GONE),
            Error::SerializationFailure { .. } | Error::Deadlock { .. } | Error::RetriesExhausted { .. } => {
                self.fails(&error.to_string());
            }
            _ if is_sent => self.write(&self.record(Phase::Unknown).why(format!("{error:?}"))),
            _ => self.fails(&format!("{error:?}")),
        }
    }

    /// By a statement of its own.
    fn answers(&self, answer: Result<Update, Error>) {
        match answer.and_then(Update::into_result) {
            Ok(new) => self.is_made(Some(new)),
            Err(error) => self.errs(&error, true),
        }
    }

    fn to(&self, n: i64) -> Changes {
        Changes::new().set("n", n).set("process", self.worker.orders.process).set("op", self.op)
    }
}

/// Whether it is committed, as far as one knows, is written down for each of its changes.
async fn commit(tx: PgTransaction<'_>, changes: &[(Change<'_>, Option<Version>)]) -> Option<()> {
    for (change, _) in changes {
        change.is_sent();
    }
    let answer = tx.commit().await.map_err(Error::from);
    for (change, new) in changes {
        match &answer {
            Ok(()) => change.is_made(*new),
            Err(error) => change.errs(error, true),
        }
    }
    answer.ok()
}

impl Worker {
    /// A row, read after this instant.
    async fn load(
        &self,
        rows: &Versioned,
        conn: &mut PgConnection,
        name: &str,
        since: u64,
    ) -> Option<Option<Read>> {
        let read = rows.load::<(String, i64), _>(conn, name).await.ok()?;
        let read = read.map(|read| Read { name: name.to_owned(), n: read.value.1, version: read.version });
        self.has_seen(name, since, read.as_ref().map(|read| (read.version, read.n)));
        Some(read)
    }

    fn has_seen(&self, name: &str, since: u64, read: Option<(Version, i64)>) {
        let record = self.record(self.next_op(), Kind::Load, Phase::Ok, name);
        let (token, value) = read.map(|(version, n)| (version.as_i64(), n)).unzip();
        self.history.write(&Record { at: since, until: Some(now()), token, value, ..record });
    }

    /// Between the load and the change.
    async fn let_others_be_faster(&self, read: &Read) {
        if self.percent(4) {
            let (name, token) = (read.name.clone(), read.version.as_i64());
            self.ask(&Ask { place: Place::Versioned, name, token, grant: String::new(), value: 0 }).await;
        } else {
            sleep(self.think(0, 3)).await;
        }
    }

    fn isolation(&self) -> &'static str {
        let level = self.dice.borrow_mut().below(4);
        match level {
            0 => "BEGIN",
            1 => "BEGIN ISOLATION LEVEL READ COMMITTED",
            2 => "BEGIN ISOLATION LEVEL REPEATABLE READ",
            _ => "BEGIN ISOLATION LEVEL SERIALIZABLE",
        }
    }

    async fn change_one(&self, rows: &Versioned, name: &str) -> Option<()> {
        let mut conn = self.pool.acquire().await.ok()?;
        let Some(read) = self.load(rows, &mut conn, name, now()).await? else {
            self.insert(&mut conn, name).await;
            return None;
        };
        self.let_others_be_faster(&read).await;
        let change = Change::of(self, Kind::Update, name, Some(read.version));
        change.is_sent();
        change.answers(rows.update(&mut conn, name, read.version, change.to(read.n + 1)).await);
        Some(())
    }

    /// Read before the transaction, or in it.
    async fn change_one_in_a_transaction(&self, rows: &Versioned, name: &str) -> Option<()> {
        let mut read = None;
        if self.percent(40) {
            let mut conn = self.pool.acquire().await.ok()?;
            read = self.load(rows, &mut conn, name, now()).await?;
        }
        let since = now();
        let mut tx = self.pool.begin_with(self.isolation()).await.ok()?;
        let read = match read {
            Some(read) => read,
            None => self.load(rows, &mut tx, name, since).await??,
        };
        self.let_others_be_faster(&read).await;
        let change = Change::of(self, Kind::Update, name, Some(read.version));
        let answer = rows.update(&mut tx, name, read.version, change.to(read.n + 1)).await;
        match answer.and_then(Update::into_result) {
            Ok(_) if self.percent(8) => {
                drop(tx.rollback().await);
                change.fails("rolled back");
                None
            }
            Ok(new) => commit(tx, &[(change, Some(new))]).await,
            Err(error) => {
                change.errs(&error, false);
                None
            }
        }
    }

    /// By the library's own, which runs it again after a serialization failure, and never after a lost COMMIT.
    async fn change_by_transactions(&self, rows: &Versioned, name: &str) -> Option<()> {
        let isolations = [Isolation::SessionDefault, Isolation::RepeatableRead, Isolation::Serializable];
        let isolation = *self.dice.borrow_mut().pick(&isolations);
        let (process, pause) = (self.orders.process, self.think(0, 3));
        let change = Change::of(self, Kind::Update, name, None);
        let op = change.op;
        change.is_sent();
        let done = transaction(&self.pool, isolation, |tx| {
            Box::pin(async move {
                let read = rows.load::<(String, i64), _>(tx, name).await?.ok_or(Error::Gone)?;
                sleep(pause).await;
                let changes = Changes::new().set("n", read.value.1 + 1).set("process", process).set("op", op);
                rows.update(tx, name, read.version, changes).await?.into_result()
            })
        });
        match done.await {
            Ok(new) => change.is_made(Some(new)),
            Err(error) => change.errs(&error, matches!(error, Error::OutcomeUnknown { .. })),
        }
        Some(())
    }

    /// `None` if it was not changed, as far as one knows.
    async fn change_by_a_closure(&self, rows: &Versioned, name: &str) -> Option<Version> {
        let mut change = Change::of(self, Kind::Update, name, None);
        change.is_sent();
        let (since, base) = (Cell::new(now()), Cell::new(None));
        let answer = loop {
            let decide = |read: Current<(String, i64)>| {
                self.has_seen(name, since.get(), Some((read.version, read.value.1)));
                base.set(Some(read.version));
                // The closure is not one that can wait.
                std::thread::sleep(self.think(0, 2));
                since.set(now());
                Ok::<_, Error>(change.to(read.value.1 + 1))
            };
            let answer = rows.update_with(&self.pool, name, decide).await;
            let repeats = self.orders.mistake == Some(Mistake::RepeatsUnknown);
            if !(repeats && matches!(answer, Err(Error::OutcomeUnknown { .. }))) {
                break answer;
            }
        };
        change.base = base.get();
        match answer {
            Ok(Some(new)) => {
                change.is_made(Some(new));
                return Some(new);
            }
            Ok(None) => change.fails(GONE),
            Err(error) => change.errs(&error, matches!(error, Error::OutcomeUnknown { .. })),
        }
        None
    }

    /// Two or three rows in one statement.
    async fn change_several(&self, rows: &Versioned) -> Option<()> {
        let without = if self.percent(50) {
            self.dice.borrow_mut().pick(&self.orders.names).clone()
        } else {
            String::new()
        };
        let names = self.orders.names.iter().filter(|name| **name != without);
        if self.percent(50) {
            let mut conn = self.pool.acquire().await.ok()?;
            let mut reads = Vec::new();
            for name in names {
                reads.extend(self.load(rows, &mut conn, name, now()).await?);
            }
            self.let_others_be_faster(reads.first()?).await;
            let changes = self.changes(&reads);
            changes.iter().for_each(Change::is_sent);
            match self.send(rows, &mut conn, &reads, &changes).await {
                Ok(answers) => {
                    for (change, answer) in changes.iter().zip(answers) {
                        change.answers(Ok(answer));
                    }
                }
                Err(error) => changes.iter().for_each(|change| change.errs(&error, true)),
            }
            return Some(());
        }
        let since = now();
        let mut tx = self.pool.begin_with(self.isolation()).await.ok()?;
        let mut reads = Vec::new();
        for name in names {
            reads.extend(self.load(rows, &mut tx, name, since).await?);
        }
        self.let_others_be_faster(reads.first()?).await;
        let changes = self.changes(&reads);
        match self.send(rows, &mut tx, &reads, &changes).await {
            Ok(answers) => {
                let mut made = Vec::new();
                for (change, answer) in changes.into_iter().zip(answers) {
                    match answer {
                        Update::Updated(new) => made.push((change, Some(new))),
                        other => change.answers(Ok(other)),
                    }
                }
                commit(tx, &made).await
            }
            Err(error) => {
                for change in &changes {
                    change.errs(&error, false);
                }
                None
            }
        }
    }

    fn changes<'a>(&'a self, reads: &'a [Read]) -> Vec<Change<'a>> {
        reads.iter().map(|read| Change::of(self, Kind::Update, &read.name, Some(read.version))).collect()
    }

    /// The answers in the order of the changes.
    async fn send(
        &self,
        rows: &Versioned,
        conn: &mut PgConnection,
        reads: &[Read],
        changes: &[Change<'_>],
    ) -> Result<Vec<Update>, Error> {
        if self.orders.mistake == Some(Mistake::ComparesNoVersion) {
            return self.send_whatever_the_version(conn, reads, changes).await;
        }
        let versions: Vec<(String, Version)> =
            reads.iter().map(|read| (read.name.clone(), read.version)).collect();
        let ns: Vec<i64> = reads.iter().map(|read| read.n + 1).collect();
        let ops: Vec<i64> = changes.iter().map(|change| change.op).collect();
        let set = Changes::new().set("process", self.orders.process).set_each("n", &ns).set_each("op", &ops);
        let answer = rows.update_many(conn, &versions, set).await?;
        let find = |found: &[(String, Version)], name: &String| {
            found.iter().find(|(of, _)| of == name).map(|(_, version)| *version)
        };
        let of = |name| match (find(&answer.updated, name), find(&answer.conflicts, name)) {
            (Some(new), None) => Update::Updated(new),
            (None, Some(current)) => Update::Conflict { current },
            _ => Update::Gone,
        };
        Ok(versions.iter().map(|(name, _)| of(name)).collect())
    }

    /// A mistake: it raises the version, and compares none.
    async fn send_whatever_the_version(
        &self,
        conn: &mut PgConnection,
        reads: &[Read],
        changes: &[Change<'_>],
    ) -> Result<Vec<Update>, Error> {
        let mut answers = Vec::new();
        for (read, change) in reads.iter().zip(changes) {
            let update =
                "UPDATE versioned SET n = $2, process = $3, op = $4, version = version + 1 WHERE name = $1";
            let update = sqlx::query(update).bind(&read.name).bind(read.n + 1);
            let update = update.bind(self.orders.process).bind(change.op).execute(&mut *conn).await?;
            answers.push(match update.rows_affected() {
                0 => Update::Gone,
                _ => Update::Updated(Version::new(read.version.as_i64() + 1)),
            });
        }
        Ok(answers)
    }

    /// Deletes a row as it was read, and puts another one into its place: at once, later, or somebody else does.
    async fn replace(&self, rows: &Versioned, name: &str) -> Option<()> {
        let mut conn = self.pool.acquire().await.ok()?;
        let Some(read) = self.load(rows, &mut conn, name, now()).await? else {
            self.insert(&mut conn, name).await;
            return None;
        };
        self.let_others_be_faster(&read).await;
        if self.percent(50) {
            let delete = Change::of(self, Kind::Delete, name, Some(read.version));
            delete.is_sent();
            match rows.delete(&mut conn, name, read.version).await.and_then(Delete::into_result) {
                Ok(()) => delete.is_made(None),
                Err(error) => delete.errs(&error, true),
            }
            if self.percent(50) {
                self.insert(&mut conn, name).await;
            }
            return Some(());
        }
        drop(conn);
        let mut tx = self.pool.begin_with(self.isolation()).await.ok()?;
        let delete = Change::of(self, Kind::Delete, name, Some(read.version));
        if let Err(error) = rows.delete(&mut tx, name, read.version).await.and_then(Delete::into_result) {
            delete.errs(&error, false);
            return None;
        }
        let insert = Change::of(self, Kind::Insert, name, None);
        match self.put(&mut tx, &insert).await {
            Ok(Some(new)) => commit(tx, &[(delete, None), (insert, Some(new))]).await,
            Ok(None) => panic!("the row that was deleted is there: {name}"),
            Err(error) => {
                delete.errs(&error, false);
                insert.errs(&error, false);
                None
            }
        }
    }

    /// In the place of one that is gone.
    async fn insert(&self, conn: &mut PgConnection, name: &str) {
        let insert = Change::of(self, Kind::Insert, name, None);
        insert.is_sent();
        match self.put(conn, &insert).await {
            Ok(Some(new)) => insert.is_made(Some(new)),
            Ok(None) => insert.fails("it is there"),
            Err(error) => insert.errs(&error, true),
        }
    }

    async fn put(&self, conn: &mut PgConnection, insert: &Change<'_>) -> Result<Option<Version>, Error> {
        let text = if self.orders.mistake == Some(Mistake::BeginsAtOne) {
            "INSERT INTO versioned (name, n, process, op, version) VALUES ($1, 0, $2, $3, 1) \
             ON CONFLICT (name) DO NOTHING RETURNING version"
        } else {
            "INSERT INTO versioned (name, n, process, op) VALUES ($1, 0, $2, $3) \
             ON CONFLICT (name) DO NOTHING RETURNING version"
        };
        let put = sqlx::query_scalar(text).bind(insert.name).bind(self.orders.process).bind(insert.op);
        Ok(put.fetch_optional(conn).await?)
    }
}
