//! A network namespace of its own, with a link that can be cut: TCP loses its packets and is not told.
//!
//! A proxy cannot show this: its kernel goes on acknowledging what its program does not pass on.

use std::process::Command;

/// Set in the process that runs in a namespace.
pub(crate) const INSIDE: &str = "FENCEPOST_FAULTS_NAMESPACE";

/// Runs a test of this binary in a network namespace of its own. No: this machine has none to give, which is said.
pub(crate) fn run_inside(test: &str, variables: &[(&str, String)]) -> bool {
    let possible = Command::new("unshare").args(["--net", "ip", "link", "set", "lo", "up"]).output();
    if !possible.is_ok_and(|tried| tried.status.success()) {
        eprintln!("SKIPPED: no network namespace here (needs root, unshare and ip), so no link was cut");
        return false;
    }
    let up_and_on = r#"ip link set lo up && exec "$0" "$@""#;
    let status = Command::new("unshare")
        .args(["--net", "sh", "-c", up_and_on])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(INSIDE, "1")
        .envs(variables.iter().map(|(name, value)| (name, value)))
        .status()
        .unwrap();
    assert!(status.success(), "in the namespace: {status}");
    true
}

/// Of the namespace in which this process runs.
pub(crate) fn set_up(up: bool) {
    assert!(std::env::var_os(INSIDE).is_some(), "the link of this machine stays as it is");
    let state = if up { "up" } else { "down" };
    let set = Command::new("ip").args(["link", "set", "lo", state]).status().unwrap();
    assert!(set.success(), "ip link set lo {state}: {set}");
}
