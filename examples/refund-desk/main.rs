//! Plays `calls.txt` against the rules of `policy.toml`, and shows what the model would be told.

#![expect(clippy::indexing_slicing, reason = "a member that a JSON object lacks is null")]

#[path = "../play.rs"]
mod play;
mod tools;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    play::show(tools::agent(), include_str!("calls.txt")).await
}
