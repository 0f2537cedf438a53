//! A limit of the process is an error, and not its end: most clients take a program that was ended by a signal for one that has nothing
//! to say.

use nix::sys::signal::{SigSet, Signal};

/// Whoever may not write so much hears so from what is written to, and goes on; so does whoever has taken its time of the processor.
/// It holds for this thread, and for all that it starts from here on.
pub(crate) fn outlive_limits() {
    let of_limits: SigSet = [Signal::SIGXFSZ, Signal::SIGXCPU].into_iter().collect();
    // Where it cannot be had, all is as it was.
    let _ = of_limits.thread_block();
}
