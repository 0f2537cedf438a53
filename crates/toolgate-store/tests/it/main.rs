//! Contains all integration tests of the crate.

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

/// Runs the worker process that other tests start and kill.
#[test]
fn worker() {
    match std::env::var("TOOLGATE_WORKER").as_deref() {
        Ok("crash") => crash::run_worker(),
        Ok("fill") => crate::io_faults::run_worker(),
        Ok("share") => crate::multi_process::run_worker(),
        _ => {}
    }
}
