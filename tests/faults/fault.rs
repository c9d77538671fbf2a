//! The faults, and how each is made.

use std::sync::Arc;
use std::time::Duration;

use sqlx::PgPool;
use sqlx::postgres::PgConnectOptions;
use tokio::time::{sleep, timeout};

use crate::dice::Dice;
use crate::fleet::Fleet;
use crate::history::now;
use crate::link;
use crate::stage::Stage;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// SIGSTOP for 0.3 to 3 ttl, SIGCONT.
    Pause,
    /// SIGKILL, a fresh process in its place.
    Kill,
    /// `pg_terminate_backend`.
    EndSession(Session),
    /// The answer to the next such statement of some worker is lost, with its connection.
    CutAnswer(&'static str),
    /// Nothing passes between one worker and the server for 0.3 to 3 ttl.
    BlackHole,
    /// What one worker asks, or what it is answered, arrives up to 0.3 ttl later, from now on.
    Slow,
    /// The link is down.
    CutLink,
    /// An immediate stop, and a start.
    Crash,
    /// The whole server stands still.
    Stall,
    /// The primary is gone, the standby is promoted.
    FailOver,
    /// The wall clock of one worker jumps.
    StepClocks,
    /// Strangers take all connections that are free, while sessions of workers are ended.
    Crowd,
    /// Four at once.
    Migrate,
    /// Hand-overs that nobody made are notified to every owner.
    Forge,
}

/// A session, by what it was last used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Session {
    Heartbeat,
    Call,
    Listening,
    Application,
    Fenced,
    /// One that holds an advisory lock, or waits for one.
    Lock,
    Any,
}

impl Session {
    /// What the fault is called, and which sessions it may end.
    fn describe(self) -> (&'static str, &'static str) {
        match self {
            Self::Heartbeat => (
                "heartbeat's session ended",
                "application_name LIKE 'fencepost %' AND query LIKE '%fencepost.heartbeat%'",
            ),
            Self::Call => (
                "call's session ended",
                "application_name LIKE 'fencepost %' AND query NOT LIKE '%fencepost.heartbeat%' \
                 AND query NOT LIKE 'LISTEN%'",
            ),
            Self::Listening => {
                ("listening session ended", "application_name LIKE 'fencepost %' AND query LIKE 'LISTEN%'")
            }
            Self::Application => {
                ("application's session ended", "application_name = 'faults worker' AND xact_start IS NULL")
            }
            Self::Fenced => (
                "fenced session ended",
                "application_name = 'faults worker' AND state LIKE 'idle in transaction%'",
            ),
            Self::Lock => (
                "lock session ended",
                "application_name LIKE 'fencepost %' AND pid IN (SELECT pid FROM pg_locks WHERE locktype = 'advisory')",
            ),
            Self::Any => ("session ended", "usename = 'worker'"),
        }
    }
}

impl Fault {
    /// What it is called when it has struck.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Pause => "paused at random",
            Self::Kill => "killed",
            Self::EndSession(session) => session.describe().0,
            Self::CutAnswer("fencepost.acquire") => "answer to an acquire cut",
            Self::CutAnswer("fencepost.heartbeat") => "answer to a heartbeat cut",
            Self::CutAnswer("fencepost.release") => "answer to a release cut",
            Self::CutAnswer("fencepost.claim_begin") => "answer to a begin cut",
            Self::CutAnswer("fencepost.claim_next") => "answer to claimed jobs cut",
            Self::CutAnswer("fencepost.claim_complete") => "answer to a complete cut",
            Self::CutAnswer("fencepost.fence") => "answer to a fence cut",
            Self::CutAnswer("AS t SET") => "answer to an update cut",
            Self::CutAnswer("DELETE FROM") => "answer to a delete cut",
            Self::CutAnswer(_) => "answer to a COMMIT cut",
            Self::BlackHole => "black hole",
            Self::Slow => "slowed down",
            Self::CutLink => "link cut",
            Self::Crash => "crashed and restarted",
            Self::Stall => "stalled",
            Self::FailOver => "failed over",
            Self::StepClocks => "clock stepped",
            Self::Crowd => "no connection left",
            Self::Migrate => "migrated",
            Self::Forge => "hand-overs forged",
        }
    }

    /// Only one such at a time: it concerns everybody.
    fn is_of_the_server(self) -> bool {
        matches!(self, Self::CutLink | Self::Crash | Self::Stall | Self::FailOver | Self::Crowd)
    }

    /// What has happened, if anything has; returns when it is over.
    pub(crate) async fn strike(self, fleet: Arc<Fleet>, dice: Dice) -> Option<&'static str> {
        self.happen(fleet, dice).await.map(|()| self.name())
    }

    async fn happen(self, fleet: Arc<Fleet>, mut dice: Dice) -> Option<()> {
        let stage = Arc::clone(fleet.stage());
        let _alone = if self.is_of_the_server() { Some(fleet.server_fault().try_lock().ok()?) } else { None };
        match self {
            Self::Pause => pause(&fleet, &mut dice).await,
            Self::Kill => {
                fleet.replace(fleet.any()?);
                Some(())
            }
            Self::EndSession(session) => end_a_session(&stage.pool(), session, &mut dice).await,
            Self::CutAnswer(statement) => cut_answer(&fleet, statement).await,
            Self::BlackHole => black_hole(&fleet, &mut dice).await,
            Self::Slow => {
                let (place, ttl) = fleet.any_ttl()?;
                // Some are quick: they take over what the others are too slow to keep.
                let (asking, answering) = match dice.below(10) {
                    0..4 => (0, 0),
                    4..7 => (dice.between(0, 30), 0),
                    _ => (0, dice.between(15, 30)),
                };
                let [asking, answering] =
                    [asking, answering].map(|percent| ttl * u32::try_from(percent).unwrap_or(0) / 100);
                stage.proxy(place).slow(asking, answering);
                Some(())
            }
            Self::CutLink => {
                link::set_up(false);
                let from = now();
                sleep(Duration::from_millis(dice.between(300, 1_500))).await;
                let until = now();
                link::set_up(true);
                fleet.all_cut_off((from, until));
                Some(())
            }
            Self::Crash => {
                let outage = stage.crash_and_restart(Duration::from_millis(dice.between(0, 500))).await;
                fleet.all_cut_off(outage);
                Some(())
            }
            Self::Stall => {
                let outage = stage.stall(Duration::from_millis(dice.between(100, 1_000))).await;
                fleet.all_cut_off(outage);
                Some(())
            }
            Self::FailOver => {
                let loss = async {
                    let last = sqlx::query_scalar("SELECT last_value FROM fencepost.fencing_token");
                    fleet.keep(last.fetch_one(&stage.pool()).await.ok());
                    sleep(Duration::from_millis(dice.between(300, 600))).await;
                    // Until somebody is stopped whose grant will be lost; some hold for long.
                    let one = async {
                        while fleet.stopped() == 0 {
                            sleep(Duration::from_millis(1)).await;
                        }
                    };
                    drop(timeout(Duration::from_secs(5), one).await);
                };
                let outage = stage.fail_over(loss).await?;
                fleet.keep(None);
                fleet.failed_over(outage);
                Some(())
            }
            Self::StepClocks => {
                fleet.step_clock(i64::try_from(dice.between(0, 7_200)).ok()? - 3_600)?;
                Some(())
            }
            Self::Crowd => crowd(&stage, &mut dice).await,
            Self::Migrate => {
                let pool = stage.pool();
                let all = async || {
                    let (a, b, c, d) = tokio::join!(
                        fencepost::migrate(&pool),
                        fencepost::migrate(&pool),
                        fencepost::migrate(&pool),
                        fencepost::migrate(&pool)
                    );
                    [a, b, c, d].into_iter().for_each(Result::unwrap);
                };
                all().await;
                Some(())
            }
            Self::Forge => forge(&stage.pool()).await,
        }
    }
}

/// From a third of a ttl to three; in half of the cases close to the moment that decides.
fn for_a_while(ttl: Duration, dice: &mut Dice) -> Duration {
    let percent = if dice.percent(50) { dice.between(60, 120) } else { dice.between(30, 300) };
    ttl * u32::try_from(percent).unwrap_or(100) / 100
}

async fn pause(fleet: &Fleet, dice: &mut Dice) -> Option<()> {
    let target = fleet.any_to_stop()?;
    let ttl = fleet.ttl(target)?;
    let stood = fleet.stop(target).await?;
    sleep(for_a_while(ttl, dice)).await;
    fleet.wake(target, stood, false);
    Some(())
}

async fn end_a_session(pool: &PgPool, session: Session, dice: &mut Dice) -> Option<()> {
    let (_, which) = session.describe();
    let query = format!("SELECT pid FROM pg_stat_activity WHERE {which} ORDER BY pid");
    // The server itself may be gone for a moment.
    let pids: Vec<i32> = sqlx::query_scalar(sqlx::AssertSqlSafe(query)).fetch_all(pool).await.ok()?;
    if pids.is_empty() {
        return None;
    }
    let end = sqlx::query_scalar("SELECT pg_terminate_backend($1)").bind(*dice.pick(&pids));
    end.fetch_one(pool).await.ok().filter(|ended: &bool| *ended).map(drop)
}

async fn cut_answer(fleet: &Fleet, statement: &'static str) -> Option<()> {
    let (place, _) = fleet.any_ttl()?;
    let proxy = fleet.stage().proxy(place);
    let before = proxy.cuts();
    proxy.cut_answer_to_statement(statement);
    let cut = async {
        while proxy.cuts() == before {
            sleep(Duration::from_millis(1)).await;
        }
    };
    let cut = timeout(Duration::from_millis(200), cut).await.is_ok();
    proxy.cut_nothing();
    cut.then_some(())
}

async fn black_hole(fleet: &Fleet, dice: &mut Dice) -> Option<()> {
    let target = fleet.any_to_cut_off()?;
    let (place, ttl) = (target.place(), fleet.ttl(target)?);
    let proxy = fleet.stage().proxy(place);
    proxy.black_hole(true);
    let from = now();
    sleep(for_a_while(ttl, dice)).await;
    let until = now();
    proxy.black_hole(false);
    fleet.cut_off(target, (from, until));
    Some(())
}

async fn crowd(stage: &Stage, dice: &mut Dice) -> Option<()> {
    let url: PgConnectOptions = stage.url(0).parse().ok()?;
    let mut strangers = Vec::new();
    while let Ok(Ok(stranger)) = timeout(Duration::from_secs(2), connect(&url)).await {
        strangers.push(stranger);
        if strangers.len() > 500 {
            return None;
        }
    }
    for session in [Session::Heartbeat, Session::Call, Session::Application] {
        end_a_session(&stage.pool(), session, dice).await;
    }
    sleep(Duration::from_millis(dice.between(50, 300))).await;
    Some(())
}

async fn connect(options: &PgConnectOptions) -> sqlx::Result<sqlx::PgConnection> {
    use sqlx::ConnectOptions as _;
    options.clone().application_name("a stranger").connect().await
}

/// To each living owner: for each ticket in line, that it has been granted the lease, with the token that it
/// would have; and nonsense.
async fn forge(pool: &PgPool) -> Option<()> {
    const FORGE: &str = "\
        SELECT count(pg_notify(fencepost.wake_channel(w.owner), w.ticket || ' ' || l.token || ' ' || repeat('0', 64))), \
               count(pg_notify(fencepost.wake_channel(w.owner), repeat('x', 7000))) \
          FROM fencepost.waiters w JOIN fencepost.leases l USING (name)";
    let forged: i64 = sqlx::query_scalar(FORGE).fetch_one(pool).await.ok()?;
    (forged > 0).then_some(())
}
