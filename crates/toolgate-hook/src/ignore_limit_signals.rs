//! Turns process limits into errors.
//!
//! Most clients treat a hook that was killed by a signal as a hook without an objection.

use nix::sys::signal::{SigSet, Signal};

/// Blocks `SIGXFSZ` and `SIGXCPU`, so that exceeding a limit is an I/O error and does not kill the
/// process.
///
/// This applies to the current thread and to all threads that it starts later.
pub fn block_limit_signals() {
    let signals: SigSet = [Signal::SIGXFSZ, Signal::SIGXCPU].into_iter().collect();
    // If blocking fails, the default behaviour remains.
    let _ = signals.thread_block();
}
