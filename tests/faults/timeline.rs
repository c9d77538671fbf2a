//! A paused holder as a picture: what it did, what the next holder did meanwhile, and what became of its late write.

use std::fmt::Write as _;

use crate::checker::{Facts, Outage, Step, Stop, steps};
use crate::history::{Kind, Phase};

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 250.0;
const LEFT: f64 = 130.0;
const RIGHT: f64 = 40.0;

/// One without the fence, in which an update is lost, and one with it, in which the late write is refused.
pub(crate) fn pictures(facts: &Facts) -> Option<(String, String)> {
    let steps = steps(&facts.records);
    let without = facts.stops.iter().find_map(|stop| Story::of(&steps, stop, Kind::Twin))?;
    let with = facts.stops.iter().find_map(|stop| Story::of(&steps, stop, Kind::Write))?;
    Some((without.draw(), with.draw()))
}

/// Two holders of one name.
struct Story<'a> {
    stop: &'a Stop,
    /// The write that was begun before the pause and ended after it.
    late: &'a Step,
    granted: &'a Step,
    /// The next holder's grant, and its write.
    next: &'a Step,
    written: &'a Step,
}

impl<'a> Story<'a> {
    fn of(steps: &'a [Step], stop: &'a Stop, kind: Kind) -> Option<Self> {
        if stop.outage != Outage::Stood {
            return None;
        }
        let ended = |step: &Step| step.ended.map_or(u64::MAX, |(at, _)| at);
        let right = |step: &&Step| match kind {
            Kind::Twin => step.is(Phase::Ok),
            _ => step.ended.is_some() && !step.is(Phase::Ok),
        };
        let late = steps.iter().find(|step| {
            step.process == stop.process
                && step.kind == kind
                && step.began < stop.stood
                && ended(step) > stop.woken
        });
        let late = late.filter(right)?;
        let of_name = || steps.iter().filter(|step| step.name == late.name);
        let granted = of_name()
            .find(|s| s.kind == Kind::Acquire && s.token == late.token && s.process == stop.process)?;
        let meanwhile =
            |step: &&Step| step.began > stop.stood && ended(step) < stop.woken && step.is(Phase::Ok);
        let next = of_name().filter(meanwhile).find(|step| step.kind == Kind::Acquire)?;
        let written =
            of_name().filter(meanwhile).find(|step| step.kind == kind && step.token == next.token)?;
        Some(Self { stop, late, granted, next, written })
    }

    fn draw(&self) -> String {
        let ended = |step: &Step| step.ended.map_or(0, |(at, _)| at);
        let from = self.granted.began;
        let until = ended(self.late);
        #[expect(clippy::as_conversions, clippy::cast_precision_loss, reason = "a picture")]
        let x = |at: u64| {
            let share = at.saturating_sub(from) as f64 / until.saturating_sub(from).max(1) as f64;
            LEFT + share * (WIDTH - LEFT - RIGHT)
        };
        let token = |step: &Step| step.token.unwrap_or(0);
        let value = |step: &Step| step.value.unwrap_or(0);
        let fenced = self.late.kind == Kind::Write;
        let (title, end, colour) = if fenced {
            ("With the fence: the late write is refused, nothing is lost", "refused", "#1a7f37")
        } else {
            ("Without the fence: the late write overwrites the next holder's", "overwrites", "#cf222e")
        };
        let (first, second) = (70.0, 150.0);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
             font-size=\"13\">\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#ffffff\"/>\n\
             <text x=\"16\" y=\"26\" font-size=\"16\" font-weight=\"bold\">{title}</text>\n"
        );
        let mut bar = |y: f64, from: f64, until: f64, colour: &str, label: &str| {
            let width = (until - from).max(2.0);
            writeln!(
                svg,
                "<rect x=\"{from:.1}\" y=\"{y}\" width=\"{width:.1}\" height=\"26\" rx=\"3\" fill=\"{colour}\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\">{label}</text>",
                from + 4.0,
                y + 18.0
            ).unwrap();
        };
        let handed = ended(self.next);
        bar(first, x(ended(self.granted)), x(handed), "#ddf4ff", "");
        bar(first, x(self.stop.stood), x(self.stop.woken), "#d0d7de", "stopped");
        bar(second, x(handed), x(until), "#ddf4ff", "");
        let mut mark = |y: f64, at: f64, colour: &str, label: &str, below: bool, anchor: &str| {
            let text = if below { y + 44.0 } else { y - 6.0 };
            writeln!(
                svg,
                "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{:.1}\" y2=\"{:.1}\" stroke=\"{colour}\" stroke-width=\"2\"/>\
                 <text x=\"{at:.1}\" y=\"{text:.1}\" fill=\"{colour}\" text-anchor=\"{anchor}\">{label}</text>",
                y - 3.0,
                y + 29.0
            ).unwrap();
        };
        let process = |step: &Step| step.process;
        mark(
            first,
            x(ended(self.granted)),
            "#0550ae",
            &format!("token {}", token(self.granted)),
            false,
            "start",
        );
        let reads = if fenced { "fence, read".to_owned() } else { format!("reads {}", value(self.late) - 1) };
        mark(first, x(self.late.began), "#0550ae", &reads, true, "start");
        mark(second, x(handed), "#0550ae", &format!("token {}", token(self.next)), false, "end");
        mark(
            second,
            x(ended(self.written)),
            "#0550ae",
            &format!("writes {}", value(self.written)),
            true,
            "middle",
        );
        let late = if fenced { end.to_owned() } else { format!("{end}: {}", value(self.late)) };
        mark(first, x(until), colour, &late, false, "end");
        let took = std::time::Duration::from_nanos(until.saturating_sub(from));
        writeln!(
            svg,
            "<text x=\"16\" y=\"{:.1}\">process {}</text><text x=\"16\" y=\"{:.1}\">process {}</text>\
             <text x=\"{:.1}\" y=\"{:.1}\" fill=\"#57606a\" text-anchor=\"end\">{} ms, lease {}</text>\n</svg>",
            first + 18.0,
            process(self.late),
            second + 18.0,
            process(self.next),
            WIDTH - RIGHT,
            HEIGHT - 14.0,
            took.as_millis(),
            self.late.name
        ).unwrap();
        svg
    }
}
