//! Starts the programs of hooks and tools isolated, and kills all their processes at the end.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use tokio::io::AsyncWriteExt;
use tokio::process::{Child, ChildStdin, Command};

use crate::supervisor::OUTPUT_DRAINED_SIGNAL;

/// Configures a command with piped streams, a separate process group and an explicit environment.
pub fn configure_isolation(
    command: &mut Command,
    has_supervisor: bool,
    inherit: &[String],
    set: &BTreeMap<String, OsString>,
) {
    command.env_clear().stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // The supervisor must stay alive until it has killed all descendants.
    command.process_group(0).kill_on_drop(!has_supervisor);
    command
        .envs(inherit.iter().filter_map(|name| std::env::var_os(name).map(|value| (name, value))));
    command.envs(set);
}

/// Writes the input. Ignores errors: a program may exit without reading, and its output still
/// counts.
pub async fn write_stdin(stdin: Option<ChildStdin>, text: &[u8]) {
    if let Some(mut stdin) = stdin {
        let _ = stdin.write_all(text).await;
        let _ = stdin.shutdown().await;
    }
}

/// Kills a program when dropped: all its descendants if it has a supervisor (see
/// [`crate::supervisor`]), else its process group.
pub struct ProcessGroup {
    id: Option<Pid>,
    has_supervisor: bool,
    has_exited: AtomicBool,
}

impl ProcessGroup {
    /// Takes responsibility for a started program.
    pub fn new(program: &Child, has_supervisor: bool) -> Self {
        let id = program.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        Self { id, has_supervisor, has_exited: AtomicBool::new(false) }
    }

    /// Tells the supervisor that the output is read completely, so it need not wait for that.
    pub fn notify_output_drained(&self) {
        if let Some(id) =
            self.id.filter(|_| self.has_supervisor && !self.has_exited.load(Ordering::Relaxed))
        {
            let _ = kill_process(id, OUTPUT_DRAINED_SIGNAL);
        }
    }

    /// Waits until the program has ended.
    pub async fn wait(&self, program: &mut Child) -> std::io::Result<ExitStatus> {
        let status = program.wait().await?;
        self.has_exited.store(true, Ordering::Relaxed);
        // If the supervisor was killed by force, only the process group of the rest is known.
        if let Some(id) = self
            .id
            .filter(|_| self.has_supervisor && status.signal() == Some(Signal::KILL.as_raw()))
        {
            let _ = kill_process_group(id, Signal::KILL);
        }
        Ok(status)
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        let Some(id) = self.id else { return };
        // An error means that the processes are gone already.
        if !self.has_supervisor {
            let _ = kill_process_group(id, Signal::KILL);
        } else if !self.has_exited.load(Ordering::Relaxed) {
            let _ = kill_process(id, Signal::TERM);
            // A stopped supervisor would not receive the signal.
            let _ = kill_process(id, Signal::CONT);
        }
    }
}
