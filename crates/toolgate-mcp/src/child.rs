//! The way into another program that ends when this one does.

use std::process::{Child, Command};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, getpgrp, getppid, kill_process_group, pidfd_open};

/// The word by which a program knows that it is only the way into another.
pub(crate) const WORD: &str = "__toolgate_child";

/// Where this program was started to lead into another one: does so, and never comes back. When the process that started it is gone,
/// however that went, the other one ends with all that it has started in its group.
pub fn enter_if_asked() {
    let mut words = std::env::args_os().skip(1);
    if words.next().as_deref() != Some(WORD.as_ref()) {
        return;
    }
    let (Some(parent), Some(program)) = (words.next(), words.next()) else { std::process::exit(127) };
    // Whoever started this may be gone already, and would not be missed.
    let parent = getppid().filter(|now| Some(now.as_raw_nonzero().get().to_string().as_str()) == parent.to_str());
    let Some(parent) = parent else { std::process::exit(127) };
    // What else is open here is not for it.
    let shut = toolgate::sandbox::close_inherited();
    let code = match shut.and_then(|()| Command::new(&program).args(words).spawn().map_err(|error| error.to_string())) {
        Ok(child) => accompany(child, parent),
        Err(error) => {
            // Nobody else can say it.
            #[expect(clippy::print_stderr, reason = "standard error is where an upstream speaks")]
            {
                eprintln!("`{}` cannot be started: {error}", program.display());
            }
            127
        }
    };
    std::process::exit(code);
}

/// Stays until the program has ended, or whoever wanted it. Gives back its exit code.
fn accompany(mut child: Child, parent: Pid) -> i32 {
    // Its streams are its own: who closes one is heard to close it.
    if let Ok(nothing) = std::fs::File::options().read(true).write(true).open("/dev/null") {
        let _ = rustix::stdio::dup2_stdin(&nothing);
        let _ = rustix::stdio::dup2_stdout(&nothing);
        let _ = rustix::stdio::dup2_stderr(&nothing);
    }
    let own = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let watched = (pidfd_open(parent, PidfdFlags::empty()).ok(), own.and_then(|own| pidfd_open(own, PidfdFlags::empty()).ok()));
    while matches!(child.try_wait(), Ok(None)) {
        // It may have been gone before it was watched.
        if getppid() != Some(parent) {
            // Also where it has left the group.
            let _ = child.kill();
            let _ = kill_process_group(getpgrp(), Signal::KILL);
        }
        if let (Some(gone), Some(ended)) = &watched {
            let _ = poll(&mut [PollFd::new(gone, PollFlags::IN), PollFd::new(ended, PollFlags::IN)], None);
        } else {
            std::thread::sleep(Duration::from_millis(200));
        }
    }
    use std::os::unix::process::ExitStatusExt as _;
    child.wait().map_or(127, |status| status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default()))
}
