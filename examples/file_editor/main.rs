//! Plays `calls.txt` against the rules of `policy.toml`, and shows what the model would be told.

#![expect(clippy::indexing_slicing, reason = "a member that a JSON object lacks is null")]

#[path = "../play.rs"]
mod play;
mod tools;

use std::sync::Arc;

use toolgate::{ManualClock, Timestamp, Toolgate};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let agent = tools::agent().map_err(|error| error.render(false))?;
    let name = agent.name().to_owned();
    let clock = Arc::new(ManualClock::at("2026-03-02T09:00:00Z".parse::<Timestamp>()?));
    let gate = Toolgate::builder().agent(agent).clock(clock.clone()).build()?;
    let tally = play::play(&gate, &name, &clock, include_str!("calls.txt"), |line| println!("{line}")).await;
    println!("\n{} calls let through, {} refused", tally.allowed, tally.refused);
    if tally.wrong.is_empty() { Ok(()) } else { Err(tally.wrong.join("\n").into()) }
}
