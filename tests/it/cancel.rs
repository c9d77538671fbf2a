//! Every public future, dropped after each of its polls and at moments in between: what its `# Cancel safety`
//! section promises, and one check for all that nothing is left behind.
//!
//! A case runs its function once on a scene and drops it where the [`Cut`] says. [`CASES`] names the functions;
//! `every_public_async_function_has_a_case` reads the sources and fails when one is missing.

mod cases;
mod claim_cases;
mod scene;
mod schedule_cases;
mod version_cases;

use std::collections::BTreeSet;
use std::future::{Future, poll_fn};
use std::path::Path;
use std::pin::pin;
use std::task::Poll;
use std::time::{Duration, Instant};

use crate::sources::{folder, sources};
use crate::support::{DEADLINE, within};
use cases::CASES;
use scene::{Case, Scene};

/// Polls the future at most `polls` times, whenever it asks to be polled, and drops it then. Its output if it
/// completed before.
pub(crate) async fn after_polls<T>(polls: u32, future: impl Future<Output = T>) -> Option<T> {
    let mut future = pin!(future);
    let mut left = polls;
    poll_fn(move |cx| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        match future.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            // The last poll is used up: dropped without waiting for its wake-up.
            Poll::Pending if left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// Polls the future without pause for that long, and drops it then. Timers are too coarse: they count in milliseconds.
async fn after_time<T>(time: Duration, future: impl Future<Output = T>) -> Option<T> {
    let mut future = pin!(future);
    let start = Instant::now();
    poll_fn(move |cx| match future.as_mut().poll(cx) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending if start.elapsed() >= time => Poll::Ready(None),
        Poll::Pending => {
            cx.waker().wake_by_ref();
            Poll::Pending
        }
    })
    .await
}

/// Where a future is dropped.
#[derive(Clone, Copy, Debug)]
enum Cut {
    Polls(u32),
    Time(Duration),
}

impl Cut {
    async fn cut<T>(self, future: impl Future<Output = T>) -> Option<T> {
        match self {
            Self::Polls(polls) => after_polls(polls, future).await,
            Self::Time(time) => after_time(time, future).await,
        }
    }
}

/// What takes more polls than this has got stuck.
const MOST_POLLS: u32 = 200;

/// The function, dropped after its first poll, its second, and so on until it completes three times in a row; then
/// from a microsecond on after half as long again, until it completes.
async fn sweep(name: &str, case: Case) {
    let scene = Scene::new().await;
    let once = async |cut: Cut| {
        let completed = within(&format!("{name}, {cut:?}"), case(&scene, cut)).await;
        scene.is_sound(&format!("{name}, {cut:?}, completed: {completed}")).await;
        completed
    };
    let mut in_a_row = 0;
    for polls in 1.. {
        assert!(polls <= MOST_POLLS, "{name} does not complete");
        in_a_row = if once(Cut::Polls(polls)).await { in_a_row + 1 } else { 0 };
        if in_a_row == 3 {
            break;
        }
    }
    let mut time = Duration::from_micros(1);
    while !once(Cut::Time(time)).await {
        time = time * 3 / 2 + Duration::from_nanos(500);
        assert!(time < DEADLINE, "{name} does not complete");
    }
}

/// `Type::function`, or `module::function`, of every public function whose result has to be awaited.
fn public_async_functions() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (path, source) in sources() {
        let first = path.strip_prefix(folder()).unwrap().components().next().unwrap();
        let module = Path::new(first.as_os_str()).file_stem().unwrap().to_str().unwrap();
        let source = source.split("#[cfg(test)]\nmod tests").next().unwrap();
        // The type or public trait whose block we are in.
        let (mut owner, mut in_trait) = (module, false);
        for (at, line) in source.split('\n').scan(0, |at, line| {
            *at += line.len() + 1;
            Some((*at - line.len() - 1, line))
        }) {
            if let Some(header) = line.strip_prefix("impl").or_else(|| line.strip_prefix("pub trait")) {
                in_trait = line.starts_with("pub trait");
                // Behind the parameters, and the path.
                let named = if header.starts_with('<') { header.split_once("> ").unwrap().1 } else { header };
                owner = word(named.trim_start());
            } else if line == "}" {
                (owner, in_trait) = (module, false);
            }
            let declared = line.trim_start();
            let declared = match declared.strip_prefix("pub ") {
                Some(declared) => declared,
                None if in_trait => declared,
                None => continue,
            };
            let function = if let Some(function) = declared.strip_prefix("async fn ") {
                function
            } else if let Some(function) = declared.strip_prefix("fn ")
                && source[at..].split(['{', ';']).next().unwrap().contains("Future")
            {
                function
            } else {
                continue;
            };
            found.insert(format!("{owner}::{}", word(function)));
        }
    }
    found
}

fn word(text: &str) -> &str {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap()
}

#[test]
fn every_public_async_function_has_a_case() {
    let public = public_async_functions();
    assert!(public.len() > 20, "the functions were not found: {public:?}");
    let cases: BTreeSet<String> = CASES.iter().map(|(name, _)| (*name).to_owned()).collect();
    let missing: Vec<_> = public.difference(&cases).collect();
    assert!(missing.is_empty(), "without a case in cancel/cases.rs: {missing:?}");
    let gone: Vec<_> = cases.difference(&public).collect();
    assert!(gone.is_empty(), "there are no such functions any more: {gone:?}");
}
