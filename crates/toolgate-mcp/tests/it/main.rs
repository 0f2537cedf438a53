//! The gateway, tried from outside.

#![expect(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests fail loudly")]

mod asked;
mod back;
mod beside;
mod between;
mod bombs;
mod called;
mod crowd;
mod dawdling;
mod door;
mod ending;
mod entering;
mod faults;
mod fitting;
mod http;
mod kept;
mod kinds;
#[path = "../../../toolgate-store/tests/it/lookback.rs"]
mod lookback;
mod noticed;
mod oauth;
mod old;
mod resources;
mod returning;
mod rotated;
mod seats;
mod security;
mod signed;
mod smuggled;
mod spoken;
mod straight;
mod support;
mod taken_back;
mod tricks;
mod unwritten;
mod watched;
