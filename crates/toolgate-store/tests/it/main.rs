//! All integration tests of the crate in one binary.

#![expect(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests may fail loudly")]

mod again;
mod crash;
mod faults;
mod keeping;
mod lookback;
mod restart;
mod shape;
mod shared;
mod spooled;
mod tamper;
mod world;

/// Not a test of its own: what other tests start as a process that they can kill.
#[test]
fn worker() {
    match std::env::var("TOOLGATE_WORKER").as_deref() {
        Ok("crash") => crash::run_worker(),
        Ok("fill") => faults::run_worker(),
        Ok("share") => shared::run_worker(),
        _ => {}
    }
}
