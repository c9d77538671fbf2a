//! Interleaved rounds, and the figures they give.

use std::error::Error;
use std::pin::Pin;
use std::time::{Duration, Instant};

use crate::quantiles::{median, quantile, sorted};

pub(crate) type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// The least number of rounds, however short the time.
const ROUNDS: usize = 4;

/// How many operations a side does before it is the next one's turn, within a round.
const TURN: usize = 20;

/// One operation: how long it took, and its first part alone.
#[derive(Clone, Copy)]
pub(crate) struct Lap {
    whole: Duration,
    first: Duration,
}

/// Which part of the operations a figure is about.
#[derive(Clone, Copy)]
pub(crate) enum Part {
    Whole,
    First,
    Rest,
}

/// Times an operation of one or two parts.
pub(crate) struct Watch {
    start: Instant,
    first: Option<Duration>,
}

impl Watch {
    pub(crate) fn start() -> Self {
        Self { start: Instant::now(), first: None }
    }

    /// The first part has ended.
    pub(crate) fn split(&mut self) {
        self.first = Some(self.start.elapsed());
    }

    pub(crate) fn stop(&self) -> Lap {
        let whole = self.start.elapsed();
        Lap { whole, first: self.first.unwrap_or(whole) }
    }
}

/// One side of a comparison: an operation that can be repeated.
pub(crate) struct Side {
    name: &'static str,
    work: Box<dyn Work>,
}

type Laps<'a> = Pin<Box<dyn Future<Output = Result<Vec<Lap>>> + 'a>>;

trait Work {
    fn block(&mut self, operations: usize) -> Laps<'_>;
}

struct Operation<S, F> {
    state: S,
    once: F,
}

impl<S, F: AsyncFnMut(&mut S, &mut Watch) -> Result<()>> Work for Operation<S, F> {
    fn block(&mut self, operations: usize) -> Laps<'_> {
        Box::pin(async move {
            let mut laps = Vec::with_capacity(operations);
            for _ in 0..operations {
                let mut watch = Watch::start();
                (self.once)(&mut self.state, &mut watch).await?;
                laps.push(watch.stop());
            }
            Ok(laps)
        })
    }
}

impl Side {
    /// `once` is the operation; it may split its watch.
    pub(crate) fn new<S: 'static>(
        name: &'static str,
        state: S,
        once: impl AsyncFnMut(&mut S, &mut Watch) -> Result<()> + 'static,
    ) -> Self {
        Self { name, work: Box::new(Operation { state, once }) }
    }
}

/// The medians of every side in every round.
pub(crate) struct Figures {
    operations: usize,
    sides: Vec<(&'static str, Vec<[f64; 2]>)>,
}

/// Runs the sides in turn until the time is over; `operations` of each side make a round.
pub(crate) async fn compare(mut sides: Vec<Side>, operations: usize, time: Duration) -> Result<Figures> {
    for side in &mut sides {
        side.work.block(operations.min(100)).await?;
    }
    let start = Instant::now();
    let mut figures =
        Figures { operations, sides: sides.iter().map(|side| (side.name, Vec::new())).collect() };
    let mut round = 0;
    while round < ROUNDS || start.elapsed() < time {
        let mut laps = vec![Vec::with_capacity(operations); sides.len()];
        for turn in 0..operations / TURN {
            let mut order: Vec<_> = sides.iter_mut().zip(&mut laps).collect();
            if turn % 2 == 1 {
                order.reverse();
            }
            for (side, laps) in order {
                laps.extend(side.work.block(TURN).await?);
            }
        }
        for ((_, rounds), laps) in figures.sides.iter_mut().zip(laps) {
            let of = |pick: fn(&Lap) -> Duration| median(laps.iter().map(|lap| micros(pick(lap))));
            rounds.push([of(|lap| lap.whole), of(|lap| lap.first)]);
        }
        round += 1;
    }
    Ok(figures)
}

/// A ratio, and between which quartiles the rounds had it.
#[derive(Clone, Copy)]
pub(crate) struct Ratio {
    pub(crate) median: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
}

impl Figures {
    pub(crate) fn names(&self) -> impl Iterator<Item = &'static str> {
        self.sides.iter().map(|(name, _)| *name)
    }

    /// Operations of each side, in all rounds.
    pub(crate) fn total(&self) -> usize {
        self.operations * self.sides.first().map_or(0, |(_, rounds)| rounds.len())
    }

    pub(crate) fn micros(&self, side: &str, part: Part) -> f64 {
        median(self.rounds(side, part))
    }

    pub(crate) fn ratio(&self, side: &str, to: &str) -> Ratio {
        let pairs = self.rounds(side, Part::Whole).zip(self.rounds(to, Part::Whole));
        let ratios = sorted(pairs.map(|(side, to)| side / to));
        Ratio { median: quantile(&ratios, 0.5), low: quantile(&ratios, 0.25), high: quantile(&ratios, 0.75) }
    }

    /// How many microseconds more a side takes than another.
    pub(crate) fn more(&self, side: &str, than: &str, part: Part) -> f64 {
        median(self.rounds(side, part).zip(self.rounds(than, part)).map(|(side, than)| side - than))
    }

    fn rounds(&self, side: &str, part: Part) -> impl Iterator<Item = f64> {
        let rounds = self.sides.iter().find(|(name, _)| *name == side).map(|(_, rounds)| rounds);
        rounds.into_iter().flatten().map(move |[whole, first]| match part {
            Part::Whole => *whole,
            Part::First => *first,
            Part::Rest => whole - first,
        })
    }
}

pub(crate) fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
