//! Tests that each example in `examples/` decides the calls of its script as the script expects.

use std::path::PathBuf;
use std::process::Command;

/// Returns the path of an example, which `cargo test` builds beside the tests.
fn example_program(name: &str) -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    tests.ancestors().nth(2).unwrap().join("examples").join(name)
}

#[test]
fn example_programs_follow_their_scripts() {
    for name in ["refund_desk", "file_editor", "deployment", "bank_transfers"] {
        let output = Command::new(example_program(name)).output().unwrap();
        let stdout = String::from_utf8(output.stdout).unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{name}: {stdout}{stderr}");
        let summary = stdout.lines().last().unwrap();
        let counts: Vec<u32> = summary.split(' ').filter_map(|word| word.parse().ok()).collect();
        assert!(counts.len() == 2 && counts.iter().all(|count| *count >= 15), "{name}: {summary}");
    }
}
