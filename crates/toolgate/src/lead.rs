//! The way into another program that ends when whoever started it does, with everything that it has started.

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
    Pid, PidfdFlags, Resource, Rlimit, Signal, WaitOptions, WaitStatus, getpid, getppid, getrlimit, kill_process, pidfd_open,
    set_child_subreaper, set_parent_process_death_signal, setrlimit, wait,
};

/// The word by which a program that calls [`enter_if_asked`](crate::sandbox::enter_if_asked) knows that it is only the way into another.
/// Behind it stand the number of the process that started it, the other program, and its words.
///
/// When the process that started it is gone, however that went, or says so with `SIGTERM`, the other one ends with all that it has
/// started, also with what has left its group.
pub const WORD: &str = "__toolgate_child";

/// The same for a program whose words count: when it has ended, the rest is ended only where `SIGUSR1` was told, too. Who still writes what
/// the program has to say is not cut off.
pub const HEARD_OUT: &str = "__toolgate_child_heard_out";
/// Everything was heard that there was to hear.
pub(crate) const HEARD: Signal = Signal::USR1;

/// The word by which it knows that it is the last step.
const LAST: &str = "__toolgate_child_begin";
/// The variable that says how many files the program may have open, where whoever started it may have more than there were.
pub const FILES: &str = "__TOOLGATE_CHILD_FILES";
/// What ends it, with the program, whoever says so: of several that say it at once, only one is heard of. Nothing else is heeded: a program
/// may send it to its whole group, and a terminal what stops those in the background.
const ENDING: [Name; 4] = [Name::SIGTERM, Name::SIGINT, Name::SIGHUP, Name::SIGQUIT];
/// How long those who were killed have to be gone.
pub const GONE: Duration = Duration::from_secs(5);
/// After how long it is looked again whether they are.
const AGAIN: Duration = Duration::from_millis(1);
/// The exit code of what could not begin.
const NOT_BEGUN: i32 = 127;
/// By this signal a process ends that leads into a room where nothing ran. It ends so for no other reason: the signal is held back from it,
/// and a program that ends by it is told by an exit code.
pub(crate) const NEVER_RAN: Signal = Signal::USR2;

/// Where this program was started to lead into another one: does so, and never comes back.
pub(crate) fn enter_if_asked() {
    let mut words = std::env::args_os().skip(1);
    let word = words.next();
    let code = if word.as_deref() == Some(LAST.as_ref()) {
        let (Some(leader), Some(program)) = (words.next(), words.next()) else { std::process::exit(NOT_BEGUN) };
        // Comes back only where that cannot be.
        let why = match begin(&leader) {
            Ok(()) => Command::new(&program).args(words).exec().to_string(),
            Err(why) => why,
        };
        cannot_start(&program, &why)
    } else if let Some(kind) =
        [(WORD, Kind::Served), (HEARD_OUT, Kind::Heard)].into_iter().find(|(known, _)| word.as_deref() == Some(known.as_ref()))
    {
        let (Some(parent), words) = (words.next(), words.collect::<Vec<_>>()) else { std::process::exit(NOT_BEGUN) };
        let Some(program) = words.first() else { std::process::exit(NOT_BEGUN) };
        match lead(&parent, LAST, &words, kind.1) {
            Ok((status, _)) => code_of(status),
            Err(why) => cannot_start(program, &why),
        }
    } else {
        return;
    };
    std::process::exit(code);
}

/// What a process leads into.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A program that is there until it is told to end.
    Served,
    /// A program whose words count.
    Heard,
    /// The same, in a room that it may not get into.
    Room,
}

/// Starts this program once more, with `next`, the number of this process and these words, and stays with it until it has ended, or
/// whoever started this one, and nothing is left of it. Says how it ended, and whether it has told that it did not become the other
/// program: into a room, behind the number stands where to tell.
pub(crate) fn lead(parent: &OsStr, next: &str, words: &[OsString], kind: Kind) -> Result<(Option<WaitStatus>, bool), String> {
    // A signal that is held back from one thread comes to another.
    if std::fs::read_dir("/proc/self/task").map_err(|error| error.to_string())?.count() > 1 {
        return Err("it has threads already: it must be led into first thing in `main`".to_owned());
    }
    // Whoever started this may be gone already, and would not be missed.
    let parent = getppid().filter(|now| parent.to_str() == Some(number(*now).as_str())).ok_or("whoever started it is gone")?;
    if let Some(before) = std::env::var(FILES).ok().and_then(|files| files.parse().ok()) {
        give_back(before);
    }
    // What else is open here is not for it.
    crate::sandbox::close_inherited()?;
    let said = |error: std::io::Error| error.to_string();
    let told = listen().map_err(said)?;
    let nothing = File::options().read(true).write(true).open("/dev/null").map_err(said)?;
    // By way of this program once more: what is held back from this process would be held back from its child.
    let mut command = Command::new("/proc/self/exe");
    command.arg(next).arg(number(getpid())).env_remove(FILES);
    let mut news = None;
    let tell = if kind == Kind::Room {
        let (hear, tell) = std::io::pipe().map_err(said)?;
        ioctl_fionbio(&hear, true).and_then(|()| fcntl_setfd(&tell, FdFlags::empty())).map_err(|error| error.to_string())?;
        command.arg(tell.as_raw_fd().to_string());
        news = Some(hear);
        Some(tell)
    } else {
        None
    };
    let child = command.args(words).spawn().map_err(said)?;
    drop(tell);
    // Its streams are its own: who closes one is heard to close it.
    let _ = rustix::stdio::dup2_stdin(&nothing);
    let _ = rustix::stdio::dup2_stdout(&nothing);
    let _ = rustix::stdio::dup2_stderr(&nothing);
    Ok(accompany(i32::try_from(child.id()).ok().and_then(Pid::from_raw), parent, &told, kind, news))
}

/// Where it is told that a program did not begin. Nothing of it is open any more when it begins.
pub(crate) struct Tell(File);

impl Tell {
    /// What `lead` has opened under this number. Everything else but the three streams is closed.
    pub(crate) fn at(number: &OsStr) -> Result<Self, String> {
        let number: i32 = number.to_str().and_then(|number| number.parse().ok()).ok_or("it is not said where to tell")?;
        let tell = File::options().write(true).open(format!("/proc/self/fd/{number}")).map_err(|error| error.to_string())?;
        crate::sandbox::close_all_but(Some(tell.as_raw_fd()))?;
        Ok(Self(tell))
    }

    pub(crate) fn did_not_begin(mut self) {
        // Whoever does not hear it takes it for a program that failed.
        let _ = self.0.write_all(b"!");
    }
}

/// Tells what leads into a program that everything was heard.
pub(crate) fn is_heard(leader: &Child) {
    if let Some(id) = i32::try_from(leader.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process(id, HEARD);
    }
}

/// Whether it is told that the program did not begin; `None` while nobody knows.
fn did_not_begin(news: &PipeReader) -> Option<bool> {
    match rustix::io::read(news, &mut [0; 1]) {
        Ok(bytes) => Some(bytes > 0),
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => None,
        Err(_) => Some(false),
    }
}

/// Ends this process so that whoever waits for it knows that nothing ran.
pub(crate) fn end_without() -> ! {
    end_by(NEVER_RAN);
    std::process::exit(NOT_BEGUN)
}

/// Ends this process by a signal, if that can be.
fn end_by(signal: Signal) {
    // What there is to be seen is not in this process.
    let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) });
    // No other one that waits is let through.
    let only = Name::try_from(signal.as_raw()).map(|name| [name].into_iter().collect::<SigSet>());
    let _ = only.and_then(|only| only.thread_unblock());
    // The first one may only take away a handler of the language.
    for _ in 0..2 {
        let _ = kill_process(getpid(), signal);
    }
}

/// Gives back what was taken: the program may have as many files open as there were.
fn give_back(before: u64) {
    let maximum = getrlimit(Resource::Nofile).maximum;
    let current = Some(maximum.map_or(before, |most| most.min(before)));
    let _ = setrlimit(Resource::Nofile, Rlimit { current, maximum });
}

/// The last step before the program: no signal is held back from it, and should what leads here be killed by force, it goes with it.
pub(crate) fn begin(leader: &OsStr) -> Result<(), String> {
    let _ = SigSet::empty().thread_set_mask();
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(|error| format!("no death with the parent: {error}"))?;
    // It may have been gone before that.
    if getppid().map(number).as_deref() == leader.to_str() { Ok(()) } else { Err("what leads here is gone".to_owned()) }
}

/// Ends this process as the program has ended, so that whoever waits for it hears also of a signal.
pub(crate) fn end_as(status: Option<WaitStatus>) -> ! {
    let signal = status.and_then(WaitStatus::terminating_signal).and_then(Signal::from_named_raw);
    // One that is ignored here is told by the code below.
    if let Some(signal) = signal.filter(|signal| *signal != NEVER_RAN) {
        end_by(signal);
    }
    std::process::exit(code_of(status))
}

fn number(pid: Pid) -> String {
    pid.as_raw_nonzero().get().to_string()
}

/// Nobody else can say it.
fn cannot_start(program: &OsStr, why: &str) -> i32 {
    #[expect(clippy::print_stderr, reason = "standard error is where the program would speak")]
    {
        eprintln!("`{}` cannot be started: {why}", program.display());
    }
    NOT_BEGUN
}

/// Whoever is left behind by the program becomes a child of this process, and it is heard who ends, and whether this is to.
fn listen() -> std::io::Result<SignalFd> {
    set_child_subreaper(Some(getpid()))?;
    SigSet::all().thread_block()?;
    let heard: SigSet = ENDING.into_iter().chain([Name::SIGCHLD, Name::SIGUSR1]).collect();
    Ok(SignalFd::with_flags(&heard, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?)
}

/// Stays until the program has ended, or whoever wanted it, and ends all that is left of it. Gives back how it ended, and whether it was
/// told that it did not begin.
fn accompany(child: Option<Pid>, parent: Pid, told: &SignalFd, kind: Kind, mut news: Option<PipeReader>) -> (Option<WaitStatus>, bool) {
    let watched = pidfd_open(parent, PidfdFlags::empty()).ok();
    let (mut ended, mut never, mut heard) = (None, false, kind == Kind::Served);
    loop {
        // From the moment on that it begins, nobody can say otherwise.
        if let Some(known) = news.as_ref().and_then(did_not_begin) {
            (news, never) = (None, known);
        }
        // First what was said, then who has ended: whoever ends in between is said again.
        let mut ends = false;
        while let Ok(Some(signal)) = told.read_signal() {
            ends |= ENDING.iter().any(|name| signal.ssi_signo == *name as u32);
            heard |= signal.ssi_signo == Name::SIGUSR1 as u32;
        }
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
            if Some(pid) == child {
                ended = Some(status);
            }
        }
        ends |= ended.is_some() && heard;
        // It may have been gone before it was watched.
        if ends || getppid() != Some(parent) {
            break;
        }
        let mut heeded = vec![PollFd::from_borrowed_fd(told.as_fd(), PollFlags::IN)];
        heeded.extend(watched.iter().map(|gone| PollFd::new(gone, PollFlags::IN)));
        heeded.extend(news.iter().map(|news| PollFd::new(news, PollFlags::IN)));
        // Where nobody can be watched, it is looked now and then.
        let now_and_then = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
        let _ = poll(&mut heeded, watched.is_none().then_some(&now_and_then));
    }
    let begun = Instant::now();
    // Whoever was a child of one that is killed comes up in the next round.
    while begun.elapsed() < GONE {
        loop {
            match wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) if Some(pid) == child => ended = Some(status),
                Ok(Some(_)) => {}
                Ok(None) => break,
                // There is nobody left.
                Err(_) => return (ended, never || news.as_ref().and_then(did_not_begin) == Some(true)),
            }
        }
        for pid in children() {
            let _ = kill_process(pid, Signal::KILL);
        }
        std::thread::sleep(AGAIN);
    }
    (ended, never)
}

fn code_of(status: Option<WaitStatus>) -> i32 {
    let code = |status: WaitStatus| status.exit_status().or_else(|| status.terminating_signal().map(|signal| 128 + signal));
    status.and_then(code).unwrap_or(NOT_BEGUN)
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
