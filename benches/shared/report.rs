//! The table.

use crate::rounds::{Figures, Part};

pub(crate) fn heading(text: &str) {
    println!("\n{text}");
}

/// The ratio of one side to another, and its goal.
pub(crate) struct Goal {
    pub(crate) side: &'static str,
    pub(crate) reference: &'static str,
    pub(crate) at_most: f64,
}

/// One line a side; `parts` names the two parts of an operation if it has two.
pub(crate) fn table(figures: &Figures, reference: &'static str, parts: Option<[&str; 2]>, goals: &[Goal]) {
    let split = parts.map_or(String::new(), |[first, rest]| format!("{first:>9} {rest:>9}"));
    println!("  {:<52} {:>6} {:>8} {split:<19} {:>6}  quartiles", "", "n", "median", "×");
    for side in figures.names() {
        let split = parts.map_or(String::new(), |_| {
            format!("{:>9.1} {:>9.1}", figures.micros(side, Part::First), figures.micros(side, Part::Rest))
        });
        let ratio = figures.ratio(side, reference);
        println!(
            "  {side:<52} {:>6} {:>8.1} {split:<19} {:>6.2}  {:.2}–{:.2}",
            figures.total(),
            figures.micros(side, Part::Whole),
            ratio.median,
            ratio.low,
            ratio.high,
        );
    }
    for Goal { side, reference, at_most } in goals {
        let ratio = figures.ratio(side, reference);
        let unsure = if ratio.low <= *at_most && ratio.high > *at_most {
            " (the rounds disagree: too noisy to say)"
        } else {
            ""
        };
        let text = format!("{side} / {reference}: {:.2} ×, goal ≤ {at_most} ×{unsure}", ratio.median);
        verdict(&text, ratio.median <= *at_most);
    }
}

pub(crate) fn verdict(text: &str, reached: bool) {
    println!("  → {text}: {}", if reached { "reached" } else { "missed" });
}
