//! The report: which faults were tried, what was judged under them, and which mistakes were noticed. Figures come from
//! a run, all of one seed and one commit.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::{Deserialize, Serialize};

use crate::canary::Canary;
use crate::cell::Cell;
use crate::checker::Report;
use crate::controller::{Outcome, Plan};
use crate::timeline;

/// Where a run in another process leaves its finding.
pub(crate) const RESULT: &str = "FENCEPOST_FAULTS_RESULT";

/// The columns. I3 is the twin.
const INVARIANTS: [&str; 13] =
    ["I1", "I2", "I4", "I5", "I6", "I7", "I8", "I9", "I10", "I11", "I12", "I13", "I14"];

/// What a run came to.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Finding {
    cell: String,
    skipped: Option<String>,
    seed: u64,
    seconds: u64,
    processes: i32,
    operations: usize,
    faults: u64,
    /// How often judged, and how often broken.
    verdicts: BTreeMap<String, (u64, usize)>,
    twin: (i64, u64),
    /// The paused holders of this run as pictures, without the fence and with it.
    pictures: Option<(String, String)>,
}

impl Finding {
    pub(crate) fn skipped(cell: &Cell, why: &str) -> Self {
        Self {
            cell: cell.name.to_owned(),
            skipped: Some(why.to_owned()),
            seed: 0,
            seconds: 0,
            processes: 0,
            operations: 0,
            faults: 0,
            verdicts: BTreeMap::new(),
            twin: (0, 0),
            pictures: None,
        }
    }

    pub(crate) fn of(plan: Plan, outcome: &Outcome, report: &Report) -> Self {
        let verdicts = report.verdicts.iter();
        Self {
            cell: plan.cell.name.to_owned(),
            skipped: None,
            seed: plan.seed,
            seconds: plan.length.as_secs(),
            processes: outcome.processes,
            operations: outcome.facts.records.len(),
            faults: outcome.faults.values().sum(),
            verdicts: verdicts.map(|(rule, v)| ((*rule).to_owned(), (v.judged, v.broken.len()))).collect(),
            twin: (report.twin_lost, report.count("twin writes")),
            pictures: timeline::pictures(&outcome.facts),
        }
    }

    /// For the process that has started this one, if one has.
    pub(crate) fn write_result(&self) {
        if let Some(path) = std::env::var_os(RESULT) {
            fs::write(path, serde_json::to_string(self).unwrap()).unwrap();
        }
    }

    fn figure(&self, invariant: &str) -> String {
        match self.verdicts.get(invariant) {
            None | Some((0, 0)) => "–".to_owned(),
            Some((judged, 0)) => grouped(*judged),
            Some((judged, broken)) => format!("**{broken} broken** of {}", grouped(*judged)),
        }
    }
}

/// Whether this run is to write the report.
pub(crate) fn is_wanted() -> bool {
    std::env::var_os("FENCEPOST_FAULTS_REPORT").is_some()
}

pub(crate) fn result_file() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("finding-{}.json", std::process::id()))
}

pub(crate) fn read_result(path: &Path) -> Finding {
    let finding = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    fs::remove_file(path).unwrap();
    finding
}

fn place() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/faults.md")
}

/// The report in `docs/` has a row for each of these, and no other.
pub(crate) fn is_of(cells: &[(&str, &Cell)], canaries: &[Canary]) {
    let text = fs::read_to_string(place()).unwrap();
    let (_, text) = text.split_once("## The run").expect("a report has a run");
    let rows: Vec<&str> =
        text.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next()).collect();
    let expected =
        cells.iter().map(|(_, cell)| cell.name).chain(canaries.iter().map(|canary| canary.mistake));
    let missing: Vec<&str> = expected.clone().filter(|name| !rows.contains(name)).collect();
    let expected: Vec<&str> = expected.collect();
    let more: Vec<&&str> =
        rows.iter().filter(|row| !expected.contains(row) && !TITLES.contains(row)).collect();
    assert!(
        missing.is_empty() && more.is_empty(),
        "docs/faults.md is of another suite: it lacks {missing:?} and has {more:?}; \
         FENCEPOST_FAULTS_REPORT=1 cargo test --test faults -- --exact the_report writes it"
    );
}

const TITLES: [&str; 2] = ["fault", "mistake"];

pub(crate) fn write(findings: &[Finding], noticed: &[Finding]) {
    let mut text = String::from(include_str!("report.md"));
    let commit = Command::new("git").args(["rev-parse", "--short=12", "HEAD"]).output().unwrap();
    let commit = String::from_utf8(commit.stdout).unwrap();
    let skipped = findings.iter().chain(noticed).filter(|finding| finding.skipped.is_some()).count();
    let ran = || findings.iter().filter(|finding| finding.skipped.is_none());
    let operations: usize = ran().map(|finding| finding.operations).sum();
    let faults: u64 = ran().map(|finding| finding.faults).sum();
    let judged: u64 = ran().flat_map(|finding| finding.verdicts.values()).map(|(judged, _)| judged).sum();
    let broken: usize = ran().flat_map(|finding| finding.verdicts.values()).map(|(_, broken)| broken).sum();
    write!(
        text,
        "\n## The run\n\nCommit `{}`, Postgres {}. {} cells, {} faults, {} records of histories, {} judgements, \
         **{broken} violations**; {} of {} canaries noticed; {skipped} skipped.\n\n",
        commit.trim(),
        postgres(),
        ran().count(),
        grouped(faults),
        grouped(u64::try_from(operations).unwrap()),
        grouped(judged),
        noticed.iter().filter(|finding| finding.skipped.is_none()).count(),
        noticed.len(),
    ).unwrap();
    writeln!(text, "| fault | how | faults | {} | twin lost | seed |", INVARIANTS.join(" | ")).unwrap();
    writeln!(text, "|---|---|---|{}---|---|", "---|".repeat(INVARIANTS.len())).unwrap();
    for (finding, (_, cell)) in findings.iter().zip(crate::CELLS) {
        if let Some(why) = &finding.skipped {
            writeln!(
                text,
                "| {} | {} | **skipped**: {why} | {} | | |",
                cell.name,
                cell.how,
                "| ".repeat(INVARIANTS.len() - 1)
            )
            .unwrap();
            continue;
        }
        let figures: Vec<String> = INVARIANTS.iter().map(|invariant| finding.figure(invariant)).collect();
        let (lost, of) = finding.twin;
        let twin = if of == 0 { "–".to_owned() } else { format!("{lost} of {}", grouped(of)) };
        writeln!(
            text,
            "| {} | {} | {} | {} | {twin} | {} |",
            cell.name,
            cell.how,
            grouped(finding.faults),
            figures.join(" | "),
            finding.seed
        )
        .unwrap();
    }
    writeln!(text, "\nNot promised, and so not judged:\n").unwrap();
    for (_, cell) in crate::CELLS {
        for (invariant, why) in cell.suspended {
            writeln!(text, "- {invariant} in *{}*: {why}.", cell.name).unwrap();
        }
    }
    writeln!(
        text,
        "\n## Canaries\n\n| mistake | made before in | noticed in | by | how often broken | seed |\n|---|---|---|---|---|---|"
    ).unwrap();
    for (finding, canary) in noticed.iter().zip(crate::CANARIES) {
        let times = match &finding.skipped {
            Some(why) => format!("**skipped**: {why}"),
            None => finding.verdicts.get(canary.breaks).map_or(0, |(_, broken)| *broken).to_string(),
        };
        writeln!(
            text,
            "| {} | {} | {} | {} | {times} | {} |",
            canary.mistake, canary.made_by, canary.cell.name, canary.breaks, finding.seed
        )
        .unwrap();
    }
    fs::write(place(), text).unwrap();
    let pictures = findings.iter().find_map(|finding| finding.pictures.clone());
    let (without, with) = pictures.expect("a holder that was paused without a fence, and one with it");
    for (name, picture) in [("paused-without-fence.svg", without), ("paused-with-fence.svg", with)] {
        fs::write(place().with_file_name(name), picture).unwrap();
    }
}

fn postgres() -> String {
    let server = fencepost::testing::Server::start().unwrap();
    fs::read_to_string(server.data_dir().join("PG_VERSION")).unwrap().trim().to_owned()
}

fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.char_indices() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
