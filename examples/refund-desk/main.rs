//! Runs `calls.txt` against the rules of `policy.toml`, and prints what the model would receive.

#![expect(clippy::indexing_slicing, reason = "indexing a missing JSON member returns null")]

mod tools;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    toolgate_testkit::script::run_and_print(tools::agent(), include_str!("calls.txt")).await
}
