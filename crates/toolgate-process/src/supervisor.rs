//! Supervises a program: kills it and all its descendants when the parent process exits.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{PipeReader, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal as Name};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{FdFlags, fcntl_setfd, ioctl_fionbio};
use rustix::process::{
    Pid, PidfdFlags, Resource, Rlimit, Signal, WaitOptions, WaitStatus, getpid, getppid, getrlimit,
    kill_process, pidfd_open, set_child_subreaper, set_parent_process_death_signal, setrlimit,
    wait,
};

/// First argument that turns a program that calls
/// [`run_as_helper_if_requested`](crate::sandbox::run_as_helper_if_requested) into a supervisor.
///
/// The pid of the parent, the program to run and its arguments follow.
///
/// When the parent has exited for any reason, or sends `SIGTERM`, the supervisor kills the program
/// and all its descendants, including those that left its process group.
pub const SUPERVISE_ARG: &str = "__toolgate_child";

/// Like [`SUPERVISE_ARG`], for a program whose output matters.
///
/// After the program has ended, its descendants are killed only when `SIGUSR1` arrives. Descendants
/// that still write output are not interrupted.
pub const SUPERVISE_UNTIL_EOF_ARG: &str = "__toolgate_child_heard_out";
/// Tells the supervisor that the output is read completely.
pub const OUTPUT_DRAINED_SIGNAL: Signal = Signal::USR1;

/// First argument of the last step, which becomes the program.
const EXEC_ARG: &str = "__toolgate_child_begin";
/// Environment variable with the open-file limit for the program, if the parent has raised its own
/// limit.
pub const NOFILE_ENV: &str = "__TOOLGATE_CHILD_FILES";
/// Signals that end the supervisor and the program.
///
/// All other signals are ignored: a program may signal its own group, and a terminal stops
/// background processes.
const TERMINATION_SIGNALS: [Name; 4] = [Name::SIGTERM, Name::SIGINT, Name::SIGHUP, Name::SIGQUIT];
/// How long killed processes may take to exit.
pub const KILL_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between checks whether killed processes have exited.
const REAP_INTERVAL: Duration = Duration::from_millis(1);
/// Exit code if the program could not be started.
pub const NOT_STARTED_EXIT_CODE: i32 = 127;
/// Signal that a supervisor kills itself with if the sandboxed program did not run.
///
/// A supervisor ends by this signal for no other reason, because the signal is blocked. A program
/// that ends by it is reported with an exit code.
pub const NOT_STARTED_SIGNAL: Signal = Signal::USR2;

/// Runs the supervisor if this process was started as one, and does not return then.
pub fn run_as_supervisor_if_requested() {
    let mut words = std::env::args_os().skip(1);
    let word = words.next();
    let code = if word.as_deref() == Some(EXEC_ARG.as_ref()) {
        let (Some(leader), Some(program)) = (words.next(), words.next()) else {
            std::process::exit(NOT_STARTED_EXIT_CODE)
        };
        // Returns only if `exec` fails.
        let reason = match prepare_exec(&leader) {
            Ok(()) => Command::new(&program).args(words).exec().to_string(),
            Err(reason) => reason,
        };
        report_start_error(&program, &reason)
    } else if let Some(kind) = [
        (SUPERVISE_ARG, SupervisorMode::Service),
        (SUPERVISE_UNTIL_EOF_ARG, SupervisorMode::Captured),
    ]
    .into_iter()
    .find(|(known, _)| word.as_deref() == Some(known.as_ref()))
    {
        let (Some(parent), words) = (words.next(), words.collect::<Vec<_>>()) else {
            std::process::exit(NOT_STARTED_EXIT_CODE)
        };
        let Some(program) = words.first() else { std::process::exit(NOT_STARTED_EXIT_CODE) };
        match supervise(&parent, EXEC_ARG, &words, kind.1) {
            Ok((status, _)) => exit_code_of(status),
            Err(reason) => report_start_error(program, &reason),
        }
    } else {
        return;
    };
    std::process::exit(code);
}

/// Kind of supervised program.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum SupervisorMode {
    /// A program that runs until it is stopped.
    Service,
    /// A program whose output matters.
    Captured,
    /// The same in a sandbox, which may be unavailable.
    Sandboxed,
}

/// Supervises a child process: restarts this executable with `next`, this pid and `words`.
///
/// Waits until the child or the parent has ended, then kills all remaining descendants. Returns the
/// exit status of the child, and whether the child reported that it could not become the program.
/// For a sandbox, the number of the error pipe follows the pid.
pub fn supervise(
    parent: &OsStr,
    next: &str,
    words: &[OsString],
    kind: SupervisorMode,
) -> Result<(Option<WaitStatus>, bool), String> {
    // A signal that one thread blocks is delivered to another thread.
    if std::fs::read_dir("/proc/self/task").map_err(|error| error.to_string())?.count() > 1 {
        return Err(
            "the process has several threads: call `run_as_helper_if_requested` first in `main`"
                .to_owned(),
        );
    }
    // The parent may have exited already, which a later check could not detect.
    let parent = getppid()
        .filter(|now| parent.to_str() == Some(format_pid(*now).as_str()))
        .ok_or("the parent process has exited")?;
    if let Some(before) = std::env::var(NOFILE_ENV).ok().and_then(|files| files.parse().ok()) {
        restore_file_limit(before);
    }
    // Inherited files are not for the program.
    crate::sandbox::close_inherited_files()?;
    let message = |error: std::io::Error| error.to_string();
    let signals = watch_signals().map_err(message)?;
    let null = File::options().read(true).write(true).open("/dev/null").map_err(message)?;
    // The extra process is needed because a child would inherit this process's blocked signals.
    let mut command = Command::new("/proc/self/exe");
    command.arg(next).arg(format_pid(getpid())).env_remove(NOFILE_ENV);
    let mut error_reader = None;
    let error_writer = if kind == SupervisorMode::Sandboxed {
        let (reader, error_writer) = std::io::pipe().map_err(message)?;
        ioctl_fionbio(&reader, true)
            .and_then(|()| fcntl_setfd(&error_writer, FdFlags::empty()))
            .map_err(|error| error.to_string())?;
        command.arg(error_writer.as_raw_fd().to_string());
        error_reader = Some(reader);
        Some(error_writer)
    } else {
        None
    };
    let child = command.args(words).spawn().map_err(message)?;
    drop(error_writer);
    // Release the streams of the program, so that the parent notices when the program closes one.
    let _ = rustix::stdio::dup2_stdin(&null);
    let _ = rustix::stdio::dup2_stdout(&null);
    let _ = rustix::stdio::dup2_stderr(&null);
    Ok(wait_and_reap(
        i32::try_from(child.id()).ok().and_then(Pid::from_raw),
        parent,
        &signals,
        kind,
        error_reader,
    ))
}

/// Pipe on which the child reports that `exec` failed (one byte).
///
/// The pipe closes when the program starts, so end of file means success.
pub struct SpawnErrorPipe(File);

impl SpawnErrorPipe {
    /// Opens the pipe that `supervise` has created under this number.
    ///
    /// Closes all other files except the standard streams.
    pub fn open(number: &OsStr) -> Result<Self, String> {
        let number: i32 = number
            .to_str()
            .and_then(|number| number.parse().ok())
            .ok_or("invalid number of the error pipe")?;
        let writer = File::options()
            .write(true)
            .open(format!("/proc/self/fd/{number}"))
            .map_err(|error| error.to_string())?;
        crate::sandbox::close_files_except(Some(writer.as_raw_fd()))?;
        Ok(Self(writer))
    }

    /// Reports that the program did not start.
    pub fn report_failure(mut self) {
        // If the write fails, the supervisor assumes that the program ran and failed.
        let _ = self.0.write_all(b"!");
    }
}

/// Tells a supervisor that the output is read completely.
pub fn notify_output_drained(leader: &Child) {
    if let Some(id) = i32::try_from(leader.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process(id, OUTPUT_DRAINED_SIGNAL);
    }
}

/// Reads whether the program did not start. `None` if that is not known yet.
fn read_spawn_error(pipe: &PipeReader) -> Option<bool> {
    match rustix::io::read(pipe, &mut [0; 1]) {
        Ok(bytes) => Some(bytes > 0),
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => None,
        Err(_) => Some(false),
    }
}

/// Ends this process in a way that tells the parent that the program did not run.
pub fn exit_not_started() -> ! {
    exit_by_signal(NOT_STARTED_SIGNAL);
    std::process::exit(NOT_STARTED_EXIT_CODE)
}

/// Ends this process by a signal, if possible.
fn exit_by_signal(signal: Signal) {
    // A core dump of the supervisor would be of no use.
    let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) });
    // Unblock only this signal, not other pending ones.
    let only = Name::try_from(signal.as_raw()).map(|name| [name].into_iter().collect::<SigSet>());
    let _ = only.and_then(|only| only.thread_unblock());
    // The first signal may only remove a handler of the Rust runtime.
    for _ in 0..2 {
        let _ = kill_process(getpid(), signal);
    }
}

/// Restores the open-file limit for the program.
fn restore_file_limit(before: u64) {
    let maximum = getrlimit(Resource::Nofile).maximum;
    let current = Some(maximum.map_or(before, |most| most.min(before)));
    let _ = setrlimit(Resource::Nofile, Rlimit { current, maximum });
}

/// Prepares the process for the program: unblocks all signals, and dies with the supervisor.
pub fn prepare_exec(leader: &OsStr) -> Result<(), String> {
    let _ = SigSet::empty().thread_set_mask();
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| format!("cannot set the parent-death signal: {error}"))?;
    // The supervisor may have exited before the signal was set.
    if getppid().map(format_pid).as_deref() == leader.to_str() {
        Ok(())
    } else {
        Err("the supervisor has exited".to_owned())
    }
}

/// Ends this process with the status of the program, including a signal.
pub fn exit_with_status(status: Option<WaitStatus>) -> ! {
    let signal = status.and_then(WaitStatus::terminating_signal).and_then(Signal::from_named_raw);
    // A signal that is ignored here is reported by the exit code below.
    if let Some(signal) = signal.filter(|signal| *signal != NOT_STARTED_SIGNAL) {
        exit_by_signal(signal);
    }
    std::process::exit(exit_code_of(status))
}

fn format_pid(pid: Pid) -> String {
    pid.as_raw_nonzero().get().to_string()
}

/// Prints why the program cannot be started. Only this process knows the reason.
fn report_start_error(program: &OsStr, reason: &str) -> i32 {
    #[expect(clippy::print_stderr, reason = "standard error is the output channel of the program")]
    {
        eprintln!("`{}` cannot be started: {reason}", program.display());
    }
    NOT_STARTED_EXIT_CODE
}

/// Makes this process the subreaper of orphaned descendants, and starts to receive signals.
fn watch_signals() -> std::io::Result<SignalFd> {
    set_child_subreaper(Some(getpid()))?;
    SigSet::all().thread_block()?;
    let watched: SigSet =
        TERMINATION_SIGNALS.into_iter().chain([Name::SIGCHLD, Name::SIGUSR1]).collect();
    Ok(SignalFd::with_flags(&watched, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?)
}

/// Waits until the program or the parent has ended, then kills all remaining descendants.
///
/// Returns the status of the program, and whether it reported that it did not start.
fn wait_and_reap(
    child: Option<Pid>,
    parent: Pid,
    signals: &SignalFd,
    kind: SupervisorMode,
    mut error_pipe: Option<PipeReader>,
) -> (Option<WaitStatus>, bool) {
    let watched = pidfd_open(parent, PidfdFlags::empty()).ok();
    let (mut ended, mut has_failed, mut is_drained) =
        (None, false, kind == SupervisorMode::Service);
    loop {
        // The pipe closes when the program starts.
        if let Some(known) = error_pipe.as_ref().and_then(read_spawn_error) {
            (error_pipe, has_failed) = (None, known);
        }
        // Read signals first, then reap children. A child that ends in between sends another
        // signal.
        let mut must_end = false;
        while let Ok(Some(signal)) = signals.read_signal() {
            must_end |= TERMINATION_SIGNALS.iter().any(|name| signal.ssi_signo == *name as u32);
            is_drained |= signal.ssi_signo == Name::SIGUSR1 as u32;
        }
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
            if Some(pid) == child {
                ended = Some(status);
            }
        }
        must_end |= ended.is_some() && is_drained;
        // The parent may have exited before the pidfd was opened.
        if must_end || getppid() != Some(parent) {
            break;
        }
        let mut polled = vec![PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN)];
        polled.extend(watched.iter().map(|pidfd| PollFd::new(pidfd, PollFlags::IN)));
        polled.extend(error_pipe.iter().map(|error_pipe| PollFd::new(error_pipe, PollFlags::IN)));
        // Without a pidfd, check at intervals.
        let interval = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
        let _ = poll(&mut polled, watched.is_none().then_some(&interval));
    }
    let start = Instant::now();
    // Children of killed processes are reparented and appear in the next round.
    while start.elapsed() < KILL_TIMEOUT {
        loop {
            match wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) if Some(pid) == child => ended = Some(status),
                Ok(Some(_)) => {}
                Ok(None) => break,
                // No children are left.
                Err(_) => {
                    return (
                        ended,
                        has_failed || error_pipe.as_ref().and_then(read_spawn_error) == Some(true),
                    );
                }
            }
        }
        for pid in child_pids() {
            let _ = kill_process(pid, Signal::KILL);
        }
        std::thread::sleep(REAP_INTERVAL);
    }
    (ended, has_failed)
}

fn exit_code_of(status: Option<WaitStatus>) -> i32 {
    let code = |status: WaitStatus| {
        status.exit_status().or_else(|| status.terminating_signal().map(|signal| 128 + signal))
    };
    status.and_then(code).unwrap_or(NOT_STARTED_EXIT_CODE)
}

/// Returns the children of this process, including adopted orphans.
fn child_pids() -> Vec<Pid> {
    let own_pid = getpid().as_raw_nonzero().get();
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = all.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let parent_of = |pid: i32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The process name before it may contain any character.
        stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse::<i32>().ok()
    };
    numbers.filter(|pid| parent_of(*pid) == Some(own_pid)).filter_map(Pid::from_raw).collect()
}
