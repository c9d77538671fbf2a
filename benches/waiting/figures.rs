//! What the rounds gave, and the table.

use std::error::Error;

use crate::quantiles::{median, quantile, sorted};

pub(crate) type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// A rate of each side in each round.
#[derive(Default)]
pub(crate) struct Figures {
    sides: Vec<(String, Vec<f64>)>,
}

/// A ratio, and between which quartiles the rounds had it.
#[derive(Clone, Copy)]
pub(crate) struct Ratio {
    median: f64,
    low: f64,
    high: f64,
}

impl Figures {
    pub(crate) fn add(&mut self, side: &str, rate: f64) {
        match self.sides.iter_mut().find(|(name, _)| name == side) {
            Some((_, rates)) => rates.push(rate),
            None => self.sides.push((side.to_owned(), vec![rate])),
        }
    }

    fn rates(&self, side: &str) -> &[f64] {
        self.sides.iter().find(|(name, _)| name == side).map_or(&[], |(_, rates)| rates)
    }

    pub(crate) fn ratio(&self, side: &str, to: &str) -> Ratio {
        let pairs = self.rates(side).iter().zip(self.rates(to));
        let ratios = sorted(pairs.map(|(side, to)| side / to));
        Ratio { median: quantile(&ratios, 0.5), low: quantile(&ratios, 0.25), high: quantile(&ratios, 0.75) }
    }

    /// One line a side, with its ratio to the reference.
    pub(crate) fn print(&self, reference: &str) {
        println!("  {:<62} {:>8} {:>7}  quartiles", "", "a second", "×");
        for (side, rates) in &self.sides {
            let ratio = self.ratio(side, reference);
            println!(
                "  {side:<62} {:>8.0} {:>7.2}  {:.2}–{:.2}",
                median(rates.iter().copied()),
                ratio.median,
                ratio.low,
                ratio.high,
            );
        }
    }

    /// Whether a side is at least so many times its reference.
    pub(crate) fn judge(&self, side: &str, to: &str, at_least: f64) {
        let ratio = self.ratio(side, to);
        let unsure = if ratio.low < at_least && ratio.high >= at_least {
            " (the rounds disagree: too noisy to say)"
        } else {
            ""
        };
        let text = format!("{side} / {to}: {:.2} ×, goal ≥ {at_least} ×{unsure}", ratio.median);
        verdict(&text, ratio.median >= at_least);
    }
}

pub(crate) fn heading(text: &str) {
    println!("\n{text}");
}

pub(crate) fn verdict(text: &str, reached: bool) {
    println!("  → {text}: {}", if reached { "reached" } else { "missed" });
}
