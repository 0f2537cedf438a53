//! Sandboxes programs: files with landlock, system calls with seccomp, resources with rlimits.
//!
//! A process must confine itself, before it runs the program, while it has one thread. So toolgate
//! starts its own executable (or any program that calls [`run_as_helper_if_requested`] first in
//! `main`) as a supervisor. The supervisor starts the executable once more, and that process
//! confines itself and becomes the program.
//!
//! If the process cannot confine itself, the program does not run. The supervisor stays outside of
//! the sandbox. When the program or the parent ends, it kills all descendants.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd,
    Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetStatus, Scope,
};
use rustix::process::{Resource, Rlimit};
use serde::{Deserialize, Serialize};

use crate::supervisor;

/// Permissions and limits of a program.
///
/// ```
/// use toolgate_process::sandbox::Sandbox;
/// let room = Sandbox::default().read("/srv/orders").write("/srv/out");
/// assert!(!room.network);
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sandbox {
    /// Files and directories that the program may read and execute, recursively, in addition to the
    /// system's.
    pub read: Vec<PathBuf>,
    /// Directories that the program may also change.
    pub write: Vec<PathBuf>,
    /// Whether the program may use the network. Local sockets (`AF_UNIX`) are always forbidden.
    pub network: bool,
    /// Maximum address space in bytes. Default: 2 GiB.
    pub memory: u64,
    /// Maximum number of additional processes and threads. Default: 64. The kernel does not limit
    /// root.
    pub processes: u64,
    /// Maximum number of open files. Default: 256.
    pub files: u64,
    /// Maximum processor time in seconds. Default: 60.
    pub cpu: u64,
    /// Maximum size of a written file in bytes. Default: 256 MiB.
    pub file_size: u64,
}

impl Default for Sandbox {
    fn default() -> Self {
        Self {
            read: Vec::new(),
            write: Vec::new(),
            network: false,
            memory: 2 << 30,
            processes: 64,
            files: 256,
            cpu: 60,
            file_size: 256 << 20,
        }
    }
}

/// Files of the system that every program needs.
const SYSTEM_PATHS: [&str; 12] = [
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/alternatives",
    "/etc/localtime",
    "/etc/ssl",
];
/// Files that name resolution needs.
const NAME_RESOLUTION_PATHS: [&str; 5] = [
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/nsswitch.conf",
    "/etc/gai.conf",
    "/run/systemd/resolve",
];
const DEVICE_PATHS: [&str; 5] =
    ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"];

/// First arguments that start the supervisor (`SANDBOX_SUPERVISE_ARG`) and the sandboxed process
/// (`SANDBOX_EXEC_ARG`).
const SANDBOX_SUPERVISE_ARG: &str = "__toolgate_sandbox";
const SANDBOX_EXEC_ARG: &str = "__toolgate_sandbox_enter";
/// Environment variable that makes the sandboxed process report missing kernel features.
const SANDBOX_REPORT_ENV: &str = "TOOLGATE_SANDBOX_TELL";
/// Exit code if the sandbox could not be set up, so the program did not run.
const SANDBOX_FAILED_EXIT_CODE: i32 = 126;

impl Sandbox {
    /// Allows reading a path, recursively.
    #[must_use]
    pub fn read(mut self, path: impl Into<PathBuf>) -> Self {
        self.read.push(path.into());
        self
    }

    /// Allows changing a path, recursively.
    #[must_use]
    pub fn write(mut self, path: impl Into<PathBuf>) -> Self {
        self.write.push(path.into());
        self
    }

    /// Allows network access.
    #[must_use]
    pub const fn network(mut self) -> Self {
        self.network = true;
        self
    }

    /// Returns the command-line arguments that start a program in this sandbox. The executable must
    /// call [`run_as_helper_if_requested`] and must be a child of this process.
    ///
    /// If the sandbox cannot be set up, the supervisor ends by
    /// [`crate::supervisor::NOT_STARTED_SIGNAL`]. A program cannot cause that.
    pub fn command_line(
        &self,
        program: OsString,
        args: impl IntoIterator<Item = OsString>,
    ) -> Result<Vec<OsString>, serde_json::Error> {
        let (parent, spec) = (std::process::id().to_string(), serde_json::to_string(self)?);
        Ok([SANDBOX_SUPERVISE_ARG.into(), parent.into(), spec.into(), program]
            .into_iter()
            .chain(args)
            .collect())
    }

    /// Confines this process, or returns the reason why the kernel cannot.
    fn confine_process(&self, program: &std::path::Path) -> Result<(), String> {
        self.set_resource_limits()?;
        self.restrict_file_access(program)?;
        self.filter_system_calls()
    }

    fn set_resource_limits(&self) -> Result<(), String> {
        let limits = [
            (Resource::As, self.memory),
            (Resource::Nproc, count_own_threads().saturating_add(self.processes)),
            (Resource::Nofile, self.files),
            (Resource::Cpu, self.cpu),
            (Resource::Fsize, self.file_size),
            (Resource::Core, 0),
        ];
        for (resource, most) in limits {
            // Limits can only be lowered.
            let most =
                rustix::process::getrlimit(resource).maximum.map_or(most, |now| now.min(most));
            let limit = Rlimit { current: Some(most), maximum: Some(most) };
            rustix::process::setrlimit(resource, limit)
                .map_err(|error| format!("cannot set the limit for {resource:?}: {error}"))?;
        }
        Ok(())
    }

    fn restrict_file_access(&self, program: &std::path::Path) -> Result<(), String> {
        let message =
            |error: landlock::RulesetError| format!("cannot restrict file access: {error}");
        let abi = ABI::V6;
        // ABI version 1 is required. Later features are used if the kernel has them.
        let mut rules = Ruleset::default()
            .set_compatibility(CompatLevel::HardRequirement)
            .handle_access(AccessFs::from_all(ABI::V1))
            .map_err(message)?
            .set_compatibility(CompatLevel::BestEffort)
            .handle_access(AccessFs::from_all(abi))
            .map_err(message)?
            .scope(Scope::from_all(abi))
            .map_err(message)?;
        if !self.network {
            rules = rules.handle_access(AccessNet::from_all(abi)).map_err(message)?;
        }
        let mut rules = rules.create().map_err(message)?;
        let read = AccessFs::from_read(abi);
        let device: BitFlags<AccessFs> = AccessFs::ReadFile | AccessFs::WriteFile;
        let network = NAME_RESOLUTION_PATHS.iter().filter(|_| self.network);
        let system =
            SYSTEM_PATHS.iter().chain(network).map(|path| (PathBuf::from(path), read, false));
        let devices = DEVICE_PATHS.iter().map(|path| (PathBuf::from(path), device, false));
        let configured = self
            .read
            .iter()
            .map(|path| (path.clone(), read, true))
            .chain(self.write.iter().map(|path| (path.clone(), AccessFs::from_all(abi), true)));
        for (path, access, is_required) in
            system.chain(devices).chain(configured).chain([(program.to_owned(), read, true)])
        {
            let opened = match PathFd::new(&path) {
                Ok(opened) => opened,
                Err(_) if !is_required => continue,
                Err(error) => return Err(format!("{}: {error}", path.display())),
            };
            // Rights of directories are invalid for a file.
            let access = if path.is_dir() { access } else { access & AccessFs::from_file(abi) };
            rules = rules.add_rule(PathBeneath::new(opened, access)).map_err(message)?;
        }
        let status = rules.restrict_self().map_err(message)?;
        match status.ruleset {
            RulesetStatus::NotEnforced => {
                Err("this kernel cannot restrict file access (landlock)".to_owned())
            }
            RulesetStatus::PartiallyEnforced if std::env::var_os(SANDBOX_REPORT_ENV).is_some() => {
                let _ = std::io::Write::write_all(
                    &mut std::io::stderr(),
                    b"this kernel supports landlock only in part: signals or the network are not restricted by landlock\n",
                );
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

/// Tests the sandbox with a launcher. Returns what the kernel does not support, or `None`.
///
/// # Errors
/// The sandbox is unavailable, for this reason.
pub fn test_sandbox(launcher: &std::path::Path) -> Result<Option<String>, String> {
    let words =
        Sandbox::default().command_line("true".into(), []).map_err(|error| error.to_string())?;
    let message = |error: std::io::Error| error.to_string();
    let mut command = Command::new(launcher);
    command
        .args(words)
        .env(SANDBOX_REPORT_ENV, "1")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let mut program = command.spawn().map_err(message)?;
    let mut report = Vec::new();
    let read_result = program
        .stderr
        .take()
        .map_or(Ok(0), |mut stderr| std::io::Read::read_to_end(&mut stderr, &mut report));
    supervisor::notify_output_drained(&program);
    let status = program.wait().map_err(message)?;
    read_result.map_err(message)?;
    let report = String::from_utf8_lossy(&report).trim().to_owned();
    match (status.success(), report.is_empty()) {
        (true, true) if rustix::process::getuid().is_root() => {
            Ok(Some("the kernel does not limit the processes of root, so `processes` only applies to other users".to_owned()))
        }
        (true, true) => Ok(None),
        (true, false) => Ok(Some(report)),
        (false, _) => Err(report),
    }
}

/// Closes all inherited files except the standard streams.
///
/// Landlock does not restrict files that are already open. Call this before the process opens any
/// file.
///
/// # Errors
/// The list of open files cannot be read.
pub fn close_inherited_files() -> Result<(), String> {
    close_files_except(None)
}

/// Closes all files except the standard streams and one file.
pub fn close_files_except(kept_file: Option<i32>) -> Result<(), String> {
    let open = std::fs::read_dir("/proc/self/fd")
        .map_err(|error| format!("cannot list the open files: {error}"))?;
    let open: Vec<i32> =
        open.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    for file in open.into_iter().filter(|file| *file > 2 && Some(*file) != kept_file) {
        // The list includes the descriptor of the directory itself, which is closed already.
        let _ = nix::unistd::close(file);
    }
    Ok(())
}

/// Counts the user's processes and threads, because the limit counts each of them.
fn count_own_threads() -> u64 {
    let uid = rustix::process::getuid().as_raw();
    let is_number = |name: &str| name.bytes().all(|byte| byte.is_ascii_digit());
    let is_process = |entry: &std::fs::DirEntry| entry.file_name().to_str().is_some_and(is_number);
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten().filter(is_process);
    let statuses = processes.filter_map(|entry| std::fs::read(entry.path().join("status")).ok());
    statuses.map(|status| count_threads(&String::from_utf8_lossy(&status), uid)).sum()
}

/// Counts the threads of a process from its `status` file. Returns 0 for a process of another user.
fn count_threads(status: &str, uid: u32) -> u64 {
    let number = |name: &str| {
        status.lines().find_map(|line| {
            line.strip_prefix(name)?.split_whitespace().next()?.parse::<u64>().ok()
        })
    };
    if number("Uid:") == Some(u64::from(uid)) { number("Threads:").unwrap_or(1) } else { 0 }
}

/// Runs the sandbox helper or supervisor if this process was started as one; otherwise returns.
///
/// Call this first in `main`, before a second thread exists.
pub fn run_as_helper_if_requested() {
    supervisor::run_as_supervisor_if_requested();
    let mut words = std::env::args_os().skip(1);
    let word = words.next();
    if word.as_deref() == Some(OsStr::new(SANDBOX_SUPERVISE_ARG)) {
        // The supervisor stays outside of the sandbox.
        match supervisor::supervise(
            &words.next().unwrap_or_default(),
            SANDBOX_EXEC_ARG,
            &words.collect::<Vec<_>>(),
            supervisor::SupervisorMode::Sandboxed,
        ) {
            Ok((status, false)) => supervisor::exit_with_status(status),
            Ok((_, true)) => {}
            Err(reason) => print_error(&reason),
        }
        supervisor::exit_not_started()
    }
    if word.as_deref() == Some(OsStr::new(SANDBOX_EXEC_ARG)) {
        let leader = words.next().unwrap_or_default();
        match supervisor::SpawnErrorPipe::open(&words.next().unwrap_or_default()) {
            Ok(error_pipe) => {
                let Err(reason) = enter_sandbox(&leader, words);
                print_error(&reason);
                error_pipe.report_failure();
            }
            Err(reason) => print_error(&reason),
        }
        std::process::exit(SANDBOX_FAILED_EXIT_CODE);
    }
}

/// Prints why the program did not run, for the parent process.
fn print_error(reason: &str) {
    let _ = std::io::Write::write_all(
        &mut std::io::stderr(),
        format!("toolgate sandbox: {reason}\n").as_bytes(),
    );
}

/// Confines this process and becomes the program. Returns only on error.
fn enter_sandbox(
    leader: &OsStr,
    mut words: impl Iterator<Item = OsString>,
) -> Result<std::convert::Infallible, String> {
    supervisor::prepare_exec(leader)?;
    let spec = words
        .next()
        .and_then(|spec| spec.into_string().ok())
        .ok_or("missing sandbox specification")?;
    let sandbox: Sandbox = serde_json::from_str(&spec).map_err(|error| error.to_string())?;
    let program = words.next().ok_or("missing program")?;
    let found = find_program(&program)
        .ok_or_else(|| format!("program `{}` does not exist", program.display()))?;
    sandbox.confine_process(&found)?;
    Err(format!("{}: {}", found.display(), Command::new(&found).args(words).exec()))
}

/// Finds a program by its path or in `PATH`.
fn find_program(program: &std::ffi::OsStr) -> Option<PathBuf> {
    let path = PathBuf::from(program);
    if path.components().count() > 1 {
        return path.canonicalize().ok();
    }
    let places = std::env::var_os("PATH").unwrap_or_else(|| "/usr/bin:/bin".into());
    std::env::split_paths(&places)
        .map(|place| place.join(&path))
        .find(|path| path.is_file())
        .and_then(|path| path.canonicalize().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_count_like_processes() {
        let status = "Name:\tUid: 7\nUmask:\t0022\nTgid:\t42\nUid:\t1000\t0\t0\t0\nGid:\t1000\t0\t0\t0\nThreads:\t31\n";
        assert_eq!(
            (count_threads(status, 1000), count_threads(status, 0), count_threads("", 0)),
            (31, 0, 0)
        );
        let end = std::sync::Arc::new(std::sync::Barrier::new(201));
        let naps: Vec<_> = (0..200)
            .map(|_| std::sync::Arc::clone(&end))
            .map(|end| std::thread::spawn(move || end.wait()))
            .collect();
        let threads = count_own_threads();
        end.wait();
        naps.into_iter().for_each(|nap| drop(nap.join()));
        assert!(threads >= 201, "{threads}");
    }
}
