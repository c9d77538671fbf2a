//! Elections: terms, resignation, preference, and those who look on.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fencepost::{Election, Error, Leadership, Lease, Owner, Result, Wait};
use sqlx::PgPool;
use sqlx::postgres::PgConnectOptions;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::proxy::Proxy;
use crate::support::{LONG, SHORT, TOUGH, database, hold, owner, owner_id, until, until_true, within};

fn election() -> Election {
    Election::named("scheduler").unwrap()
}

async fn lead(owner: &Owner) -> Leadership {
    within("leading", election().campaign(owner, Wait::forever())).await.unwrap()
}

/// Begins to campaign, and returns when it is in line.
async fn candidate(pool: &PgPool, owner: &Owner, election: Election) -> JoinHandle<Result<Leadership>> {
    let tickets = async || -> i64 {
        sqlx::query_scalar("SELECT count(*) FROM fencepost.waiters").fetch_one(pool).await.unwrap()
    };
    let (before, owner) = (tickets().await, owner.clone());
    let waiting = tokio::spawn(async move { election.campaign(&owner, Wait::forever()).await });
    until("it is in line", async || (tickets().await > before).then_some(())).await;
    waiting
}

async fn elected(candidate: JoinHandle<Result<Leadership>>) -> Leadership {
    within("being elected", candidate).await.unwrap().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_term_is_larger_and_its_writes_are_fenced() {
    let (_database, pool) = database().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let first = lead(&a).await;
    let busy = election().campaign(&b, Wait::no()).await.unwrap_err();
    assert!(matches!(&busy, Error::Busy { label: Some(label), token: Some(term), .. }
        if label == "a" && *term == first.term()));
    first.begin(&pool).await.unwrap().commit().await.unwrap();
    let (term, grant) = (first.term(), first.grant());
    assert!(first.resign().await.unwrap());
    let second = lead(&b).await;
    assert!(second.term() > term && second.is_held());
    // C28: the term is in every check.
    let mut tx = pool.begin().await.unwrap();
    let late = fencepost::fence::check(&mut tx, election().lock_name(), grant).await.unwrap_err();
    assert!(matches!(late, Error::StaleFence { current: Some(by), .. } if by == second.term()), "{late:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_election_has_nothing_to_do_with_a_lease_of_its_name() {
    let (_database, pool) = database().await;
    let a = owner(&pool, "a", LONG).await;
    let leader = lead(&a).await;
    let lease = hold(&a, "scheduler").await;
    assert!(leader.is_held() && lease.is_held());
    let misuse = Lease::named(election().lock_name().as_str()).unwrap_err();
    assert!(matches!(misuse, Error::Misuse { .. }), "{misuse:?}");
}

#[tokio::test]
async fn bad_input_is_refused_before_a_statement_is_sent() {
    for bad in ["", "a\nb", "nul\0", &"x".repeat(237), &"x".repeat(10_240)] {
        assert!(matches!(Election::named(bad), Err(Error::Misuse { .. })), "{bad:?}");
    }
    assert_eq!(Election::named(&"x".repeat(236)).unwrap().lock_name().as_str().len(), 255);
    let nowhere = PgConnectOptions::new_without_pgpass().socket("/nonexistent").database("none");
    let nowhere = PgPool::connect_lazy_with(nowhere);
    let refused = election().ask_to_resign(&nowhere, Duration::MAX).await.unwrap_err();
    assert!(matches!(refused, Error::Misuse { .. }), "{refused:?}");
}

// Nothing flaps: who leads goes on leading, whoever comes.
#[tokio::test(flavor = "multi_thread")]
async fn a_preferred_candidate_is_next_and_displaces_nobody() {
    let (_database, pool) = database().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let leader = lead(&a).await;
    let first = candidate(&pool, &b, election()).await;
    let second = candidate(&pool, &a, election()).await;
    let unloved = candidate(&pool, &a, election().priority(-5)).await;
    let preferred = candidate(&pool, &b, election().priority(7)).await;
    let most = candidate(&pool, &a, election().priority(i16::MAX)).await;
    assert!(leader.is_held() && !most.is_finished());
    let mut term = leader.term();
    assert!(leader.resign().await.unwrap());
    for (place, next) in [most, preferred, first, second, unloved].into_iter().enumerate() {
        let next = elected(next).await;
        assert!(next.is_held(), "place {place}");
        assert_eq!(next.term().as_i64(), term.as_i64() + 1, "nobody led in between, place {place}");
        term = next.term();
        assert!(next.resign().await.unwrap());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_to_resign_is_for_one_term_and_the_leader_decides() {
    let (_database, pool) = database().await;
    let a = owner(&pool, "a", LONG).await;
    let now = Duration::ZERO;
    assert!(!election().ask_to_resign(&pool, now).await.unwrap(), "nobody leads");
    let leader = lead(&a).await;
    assert!(!election().ask_to_resign(&pool, LONG).await.unwrap(), "it has only just been elected");
    let early = tokio::time::timeout(Duration::from_millis(1), leader.asked_to_resign()).await;
    assert!(early.is_err(), "it was not asked");
    for _ in 0..2 {
        assert!(election().ask_to_resign(&pool, now).await.unwrap());
        within("hearing of it", leader.asked_to_resign()).await;
    }
    // An open fence is no obstacle, and the leader leads on as long as it likes.
    leader.begin(&pool).await.unwrap().commit().await.unwrap();
    assert!(leader.is_held() && leader.resign().await.unwrap());
    let next = lead(&a).await;
    let asked = "SELECT asked FROM fencepost.leader('scheduler')";
    assert!(
        !sqlx::query_scalar::<_, bool>(asked).fetch_one(&pool).await.unwrap(),
        "not for what the last one was"
    );
    drop(next);
}

// A label that two processes on one host share: their terms tell them apart.
#[tokio::test(flavor = "multi_thread")]
async fn whoever_looks_on_is_told_each_leader_also_under_one_label() {
    let (_database, pool) = database().await;
    let (a, b) = (owner(&pool, "same", LONG).await, owner(&pool, "same", LONG).await);
    let mut leaders = election().observe(&pool);
    assert_eq!(within("the first answer", leaders.changed()).await.unwrap(), None);
    for owner in [&a, &b] {
        let leader = lead(owner).await;
        let told = within("the leader", leaders.changed()).await.unwrap().unwrap();
        assert_eq!((told.label.as_str(), told.term), ("same", leader.term()));
        assert!(leader.resign().await.unwrap());
        assert_eq!(within("no leader", leaders.changed()).await.unwrap(), None);
    }
    // Dead without a word: nobody leads, as soon as its time is over.
    let c = owner(&pool, "c", LONG).await;
    let leader = lead(&c).await;
    assert_eq!(within("c", leaders.changed()).await.unwrap().unwrap().label, "c");
    let id = owner_id(&pool, "c").await;
    sqlx::query("UPDATE fencepost.owners SET expires_at = 'epoch' WHERE id = $1")
        .bind(id)
        .execute(&pool)
        .await
        .unwrap();
    assert_eq!(within("nobody", leaders.changed()).await.unwrap(), None);
    drop(leader);
}

/// What became of the work of a term.
struct Ended(Arc<AtomicBool>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

// C30: a term is resigned, and the next one campaigned for, only when the work of it has ended.
#[tokio::test(flavor = "multi_thread")]
async fn run_campaigns_again_only_after_its_work_has_ended() {
    let (_database, pool) = database().await;
    let (a, b) = (owner(&pool, "a", TOUGH).await, owner(&pool, "b", LONG).await);
    let (tell, mut told) = mpsc::unbounded_channel();
    let (end, ends) = mpsc::unbounded_channel::<()>();
    let ends = Arc::new(tokio::sync::Mutex::new(ends));
    let running = tokio::spawn({
        let a = a.clone();
        async move {
            let election = election().grace(LONG);
            election
                .run(&a, |leadership| {
                    let (tell, ends) = (tell.clone(), Arc::clone(&ends));
                    async move {
                        tell.send(("begun", leadership.term())).unwrap();
                        let reason = leadership.lost().await;
                        assert!(!leadership.is_held(), "{reason}");
                        tell.send(("lost", leadership.term())).unwrap();
                        // It takes its time, in the grace.
                        ends.lock().await.recv().await.unwrap();
                        ControlFlow::<()>::Continue(())
                    }
                })
                .await
        }
    });
    let mut next = async |what: &str| {
        let (heard, term) = within(what, told.recv()).await.unwrap();
        assert_eq!(heard, what);
        term
    };
    let first = next("begun").await;
    sqlx::raw_sql("UPDATE fencepost.owners SET expires_at = 'epoch' WHERE label = 'a'")
        .execute(&pool)
        .await
        .unwrap();
    assert_eq!(next("lost").await, first);
    let other = lead(&b).await;
    let a_lives =
        "SELECT EXISTS (SELECT FROM fencepost.owners WHERE label = 'a' AND expires_at > clock_timestamp())";
    until_true(&pool, "a is back under its next life", a_lives).await;
    // It would have a ticket by now, if it did not wait for its work.
    let again = candidate(&pool, &b, election()).await;
    assert!(other.resign().await.unwrap());
    let other = elected(again).await;
    let tickets = "SELECT count(*) FROM fencepost.waiters";
    assert_eq!(sqlx::query_scalar::<_, i64>(tickets).fetch_one(&pool).await.unwrap(), 0);
    end.send(()).unwrap();
    until_true(&pool, "a campaigns", "SELECT count(*) = 1 FROM fencepost.waiters").await;
    assert!(other.resign().await.unwrap());
    assert!(next("begun").await > first);
    running.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn work_that_does_not_end_after_a_loss_is_dropped() {
    let (_database, pool) = database().await;
    let a = owner(&pool, "a", TOUGH).await;
    let (tell, mut told) = mpsc::unbounded_channel();
    let running = tokio::spawn({
        let a = a.clone();
        async move {
            let mut terms = 0;
            election()
                .run(&a, |leadership| {
                    let (tell, ended) = (tell.clone(), Ended(Arc::default()));
                    terms += 1;
                    let last = terms == 2;
                    async move {
                        let _ended = ended;
                        tell.send(leadership.term()).unwrap();
                        if last {
                            return ControlFlow::Break(leadership.term());
                        }
                        std::future::pending().await
                    }
                })
                .await
        }
    });
    let first = within("the first term", told.recv()).await.unwrap();
    sqlx::raw_sql("UPDATE fencepost.owners SET expires_at = 'epoch' WHERE label = 'a'")
        .execute(&pool)
        .await
        .unwrap();
    let second = within("the end", running).await.unwrap().unwrap();
    assert!(second > first);
    // Resigned when it said that this was it.
    assert!(lead(&a).await.term() > second);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_of_the_work_resigns() {
    let (_database, pool) = database().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let running = tokio::spawn(async move {
        let fails =
            async |leads: bool| if leads { panic!("the work has failed") } else { ControlFlow::Break(()) };
        election().run(&a, |leadership| fails(leadership.is_held())).await
    });
    assert!(within("the panic", running).await.unwrap_err().is_panic());
    assert!(lead(&b).await.is_held());
}

#[tokio::test(flavor = "multi_thread")]
async fn run_ends_with_its_owner() {
    let (_database, pool) = database().await;
    let (a, b) = (owner(&pool, "a", LONG).await, owner(&pool, "b", LONG).await);
    let ended = Arc::new(AtomicBool::new(false));
    let (tell, mut told) = mpsc::unbounded_channel();
    let running = tokio::spawn({
        let (a, ended) = (a.clone(), Arc::clone(&ended));
        async move {
            election()
                .run(&a, |_| {
                    let (tell, ended) = (tell.clone(), Ended(Arc::clone(&ended)));
                    async move {
                        let _ended = ended;
                        tell.send(()).unwrap();
                        std::future::pending::<ControlFlow<()>>().await
                    }
                })
                .await
        }
    });
    within("leading", told.recv()).await.unwrap();
    within("the shutdown", a.shutdown()).await.unwrap();
    assert!(matches!(within("the end", running).await.unwrap(), Err(Error::Stopped)));
    assert!(ended.load(Ordering::SeqCst));
    assert!(lead(&b).await.is_held());
}

// C28, C15: a leader that hears nothing from the database steps down before another one can be elected.
#[tokio::test(flavor = "multi_thread")]
async fn an_unconfirmed_leader_steps_down_before_another_is_elected() {
    let (database, pool) = database().await;
    let proxy = Proxy::before(database.options()).await;
    let through = PgPool::connect_lazy_with(proxy.options());
    let (a, b) = (owner(&through, "a", SHORT).await, owner(&pool, "b", LONG).await);
    for _ in 0..3 {
        let leader = lead(&a).await;
        let next = candidate(&pool, &b, election()).await;
        let believing = std::thread::spawn(move || {
            let mut last = Instant::now();
            loop {
                let now = Instant::now();
                if !leader.is_held() {
                    return (last, leader);
                }
                last = now;
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        proxy.black_hole(true);
        let next = elected(next).await;
        let elected_at = Instant::now();
        let ended = tokio::task::spawn_blocking(|| believing.join().unwrap());
        let (believed_until, leader) = within("its end", ended).await.unwrap();
        assert!(believed_until < elected_at, "both led for {:?}", believed_until - elected_at);
        assert!(next.term() > leader.term());
        proxy.black_hole(false);
        assert!(next.resign().await.unwrap());
    }
}
