//! The way into another program that ends when this one does, with everything that it has started.

use std::ffi::{OsStr, OsString};
use std::os::fd::AsFd as _;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal as Name};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, WaitStatus, getpid, getppid, kill_process, pidfd_open, set_child_subreaper,
    set_parent_process_death_signal, wait,
};

/// The word by which a program knows that it is only the way into another.
pub(crate) const WORD: &str = "__toolgate_child";

/// The word by which it knows that it is the last step: no signal is held back from the program.
const LAST: &str = "__toolgate_child_begin";
/// The variable that says how many files the program may have open, where whoever started it may have more than there were.
pub(crate) const FILES: &str = "__TOOLGATE_CHILD_FILES";
/// What ends it. Nothing else is heeded: a program may send it to its whole group, and a terminal what stops those in the background.
const ENDING: [Name; 4] = [Name::SIGTERM, Name::SIGINT, Name::SIGHUP, Name::SIGQUIT];
/// How long those who were killed have to be gone, and after how long it is looked again.
pub(crate) const GONE: Duration = Duration::from_secs(5);
const AGAIN: Duration = Duration::from_millis(1);

/// Where this program was started to lead into another one: does so, and never comes back. When the process that started it is gone,
/// however that went, or says so with `SIGTERM`, the other one ends with all that it has started, also with what has left its group.
pub fn enter_if_asked() {
    let mut words = std::env::args_os().skip(1);
    let word = words.next();
    let code = if word.as_deref() == Some(LAST.as_ref()) {
        let (Some(leader), Some(program)) = (words.next(), words.next()) else { std::process::exit(127) };
        let _ = SigSet::empty().thread_set_mask();
        // Should what leads here be killed by force, this goes with it.
        let _ = set_parent_process_death_signal(Some(Signal::KILL));
        if getppid().map(number).as_deref() != leader.to_str() {
            std::process::exit(127);
        }
        // Comes back only where that cannot be.
        cannot_start(&program, &Command::new(&program).args(words).exec().to_string())
    } else if word.as_deref() == Some(WORD.as_ref()) {
        let Some(parent) = words.next() else { std::process::exit(127) };
        // Whoever started this may be gone already, and would not be missed.
        let parent = getppid().filter(|now| Some(number(*now).as_str()) == parent.to_str());
        let Some(parent) = parent else { std::process::exit(127) };
        lead(parent, &words.collect::<Vec<_>>())
    } else {
        return;
    };
    std::process::exit(code);
}

/// Begins the program, and stays with it.
fn lead(parent: Pid, words: &[OsString]) -> i32 {
    let Some(program) = words.first() else { return 127 };
    if let Some(before) = std::env::var(FILES).ok().and_then(|files| files.parse().ok()) {
        crate::files::give_back(before);
    }
    // What else is open here is not for it.
    let begun = toolgate::sandbox::close_inherited().and_then(|()| {
        let told = listen().map_err(|error| error.to_string())?;
        // By way of this program once more: what is held back from this process would be held back from its child.
        let mut command = Command::new("/proc/self/exe");
        command.arg(LAST).arg(number(getpid())).args(words).env_remove(FILES);
        let child = command.spawn().map_err(|error| error.to_string())?;
        Ok((told, i32::try_from(child.id()).ok().and_then(Pid::from_raw)))
    });
    match begun {
        Ok((told, child)) => accompany(child, parent, &told),
        Err(error) => cannot_start(program, &error),
    }
}

fn number(pid: Pid) -> String {
    pid.as_raw_nonzero().get().to_string()
}

/// Nobody else can say it.
fn cannot_start(program: &OsStr, why: &str) -> i32 {
    #[expect(clippy::print_stderr, reason = "standard error is where an upstream speaks")]
    {
        eprintln!("`{}` cannot be started: {why}", program.display());
    }
    127
}

/// Whoever is left behind by the program becomes a child of this process, and it is heard who ends, and whether this is to.
fn listen() -> std::io::Result<SignalFd> {
    set_child_subreaper(Some(getpid()))?;
    SigSet::all().thread_block()?;
    let heard: SigSet = ENDING.into_iter().chain([Name::SIGCHLD]).collect();
    Ok(SignalFd::with_flags(&heard, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?)
}

/// Stays until the program has ended, or whoever wanted it, and ends all that is left of it. Gives back its exit code.
fn accompany(child: Option<Pid>, parent: Pid, told: &SignalFd) -> i32 {
    // Its streams are its own: who closes one is heard to close it.
    if let Ok(nothing) = std::fs::File::options().read(true).write(true).open("/dev/null") {
        let _ = rustix::stdio::dup2_stdin(&nothing);
        let _ = rustix::stdio::dup2_stdout(&nothing);
        let _ = rustix::stdio::dup2_stderr(&nothing);
    }
    let watched = pidfd_open(parent, PidfdFlags::empty()).ok();
    let mut code = None;
    loop {
        // First what was said, then who has ended: whoever ends in between is said again.
        let mut ends = false;
        while let Ok(Some(signal)) = told.read_signal() {
            ends |= ENDING.iter().any(|name| signal.ssi_signo == *name as u32);
        }
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
            if Some(pid) == child {
                code = Some(code_of(status));
            }
        }
        ends |= code.is_some();
        // It may have been gone before it was watched.
        if ends || getppid() != Some(parent) {
            break;
        }
        match &watched {
            Some(gone) => {
                let told = told.as_fd();
                let _ = poll(&mut [PollFd::new(gone, PollFlags::IN), PollFd::from_borrowed_fd(told, PollFlags::IN)], None);
            }
            None => std::thread::sleep(Duration::from_millis(200)),
        }
    }
    let begun = Instant::now();
    // Whoever was a child of one that is killed comes up in the next round.
    while begun.elapsed() < GONE {
        for pid in children() {
            let _ = kill_process(pid, Signal::KILL);
        }
        std::thread::sleep(AGAIN);
        loop {
            match wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) if Some(pid) == child => code = Some(code_of(status)),
                Ok(Some(_)) => {}
                Ok(None) => break,
                // There is nobody left.
                Err(_) => return code.unwrap_or(127),
            }
        }
    }
    code.unwrap_or(127)
}

fn code_of(status: WaitStatus) -> i32 {
    status.exit_status().or_else(|| status.terminating_signal().map(|signal| 128 + signal)).unwrap_or(127)
}

/// Those whose parent this process is, by birth or since they were left behind.
fn children() -> Vec<Pid> {
    let own = getpid().as_raw_nonzero().get();
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = all.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let parent_of = |pid: i32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name before it may have any sign in it.
        stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse::<i32>().ok()
    };
    numbers.filter(|pid| parent_of(*pid) == Some(own)).filter_map(Pid::from_raw).collect()
}
