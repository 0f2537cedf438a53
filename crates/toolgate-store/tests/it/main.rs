//! All integration tests of the crate in one binary.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "tests may fail loudly"
)]

mod conformance;
mod crash;
mod idempotency_after_restart;
mod io_faults;
mod ledger_fixture;
mod multi_process;
mod restart;
mod retention;
mod spool;
mod tamper;

/// Not a test of its own: what other tests start as a process that they can kill.
#[test]
fn worker() {
    match std::env::var("TOOLGATE_WORKER").as_deref() {
        Ok("crash") => crash::run_worker(),
        Ok("fill") => crate::io_faults::run_worker(),
        Ok("share") => crate::multi_process::run_worker(),
        _ => {}
    }
}
