//! The shape of the source, checked: layers point down, public async functions say what cancelling does, a
//! file that grows large says so.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::path::Path;

use crate::sources::{folder, sources};

#[path = "support/sources.rs"]
mod sources;

/// The top-level modules by layer, lowest first. A module may use its own layer and those below.
const LAYERS: &[&[&str]] = &[
    // Words.
    &["clock", "error", "identifier", "json", "key", "mistake", "name", "token", "wait"],
    // Plumbing.
    &["driver", "sql", "migrate", "pooler", "owner", "retry", "savepoint", "statement"],
    // What Postgres itself holds.
    &["advisory", "row"],
    // What a table holds.
    &["claim", "fence", "lease", "prune", "semaphore", "version"],
    // Compositions.
    &["election", "partition", "schedule"],
    // For people.
    &["testing"],
];

/// Lines of code (without docs, comments, blanks and tests) at which a file wants to split.
const WANTS_TO_SPLIT: usize = 400;

/// The top-level module a file belongs to: `src/owner/life.rs` to `owner`.
fn module(path: &Path) -> String {
    let first = path.strip_prefix(folder()).unwrap().components().next().unwrap();
    Path::new(first.as_os_str()).file_stem().unwrap().to_str().unwrap().to_owned()
}

fn layer(module: &str) -> usize {
    LAYERS
        .iter()
        .position(|layer| layer.contains(&module))
        .unwrap_or_else(|| panic!("module {module} has no layer: add it to LAYERS"))
}

/// The top-level modules that a source names after `crate::`, outside of comments and of its tests.
fn used(source: &str) -> Vec<String> {
    code(source)
        .flat_map(|line| {
            line.match_indices("crate::").map(|(at, _)| line[at + 7..].to_owned()).collect::<Vec<_>>()
        })
        .map(|rest| rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>())
        .filter(|name| name.starts_with(char::is_lowercase))
        .collect()
}

fn code(source: &str) -> impl Iterator<Item = &str> {
    let source = source.split("#[cfg(test)]\nmod tests").next().unwrap();
    source.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("//"))
}

#[test]
fn layers_point_down() {
    let mut seen = 0;
    let mut upward = Vec::new();
    for (path, source) in sources() {
        let from = module(&path);
        if from == "lib" {
            continue;
        }
        for to in used(&source) {
            seen += 1;
            // The one function at the root that a helper for tests calls by its public path.
            if layer(&to) > layer(&from) {
                upward.push(format!("{} uses crate::{to}", path.display()));
            }
        }
    }
    assert!(seen > 30, "the uses were not found");
    assert!(upward.is_empty(), "{upward:#?}");
}

#[test]
fn every_public_async_function_documents_cancel_safety() {
    let mut seen = 0;
    let mut silent = Vec::new();
    for (path, source) in sources() {
        let lines: Vec<&str> = source.lines().collect();
        for (index, line) in lines.iter().enumerate() {
            if !line.trim_start().starts_with("pub async fn ") {
                continue;
            }
            seen += 1;
            let docs = lines[..index].iter().rev().take_while(|line| {
                let line = line.trim_start();
                line.starts_with("///") || line.starts_with("#[")
            });
            if !docs.into_iter().any(|line| line.contains("# Cancel safety")) {
                silent.push(format!("{}:{}", path.display(), index + 1));
            }
        }
    }
    assert!(seen > 10, "the functions were not found");
    assert!(silent.is_empty(), "no `# Cancel safety`: {silent:#?}");
}

#[test]
fn the_source_is_flat() {
    for path in sources().keys() {
        let depth = path.strip_prefix(env!("CARGO_MANIFEST_DIR")).unwrap().components().count();
        assert!(depth <= 3, "{}: src/part.rs or src/part/detail.rs, no deeper", path.display());
        assert_ne!(path.file_name().unwrap(), "mod.rs", "{}", path.display());
    }
}

#[test]
fn a_file_that_wants_to_split_says_so() {
    for (path, source) in sources() {
        let lines = code(&source).count();
        if lines > WANTS_TO_SPLIT {
            // A hint to people, in the log of the run; not a failure.
            println!("{} has {lines} lines of code and wants to split", path.display());
        }
    }
}
