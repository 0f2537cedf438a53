//! Programs that hooks and tools start: they see what they are given, and nothing of them is left afterwards.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use tokio::io::AsyncWriteExt;
use tokio::process::{Child, ChildStdin, Command};

use crate::lead::HEARD;

/// Its streams are ours, its process group is its own, and of the environment it sees what is named and what is set.
pub(crate) fn shut_off(command: &mut Command, led: bool, inherit: &[String], set: &BTreeMap<String, OsString>) {
    command.env_clear().stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // What leads into it must live for as long as it takes to end all of it.
    command.process_group(0).kill_on_drop(!led);
    command.envs(inherit.iter().filter_map(|name| std::env::var_os(name).map(|value| (name, value))));
    command.envs(set);
}

/// Gives it what it is to read. One that ends without reading has closed the pipe: what it says counts all the same.
pub(crate) async fn feed(stdin: Option<ChildStdin>, text: &[u8]) {
    if let Some(mut stdin) = stdin {
        let _ = stdin.write_all(text).await;
        let _ = stdin.shutdown().await;
    }
}

/// Ends a program when dropped: with all that it has started where something leads into it (see [`crate::lead`]), else with its group.
pub(crate) struct Group {
    id: Option<Pid>,
    led: bool,
    over: AtomicBool,
}

impl Group {
    pub(crate) fn of(program: &Child, led: bool) -> Self {
        let id = program.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        Self { id, led, over: AtomicBool::new(false) }
    }

    /// Nobody says anything any more: what leads into it need not wait for that.
    pub(crate) fn is_heard(&self) {
        if let Some(id) = self.id.filter(|_| self.led && !self.over.load(Ordering::Relaxed)) {
            let _ = kill_process(id, HEARD);
        }
    }

    /// Waits for its end.
    pub(crate) async fn wait(&self, program: &mut Child) -> std::io::Result<ExitStatus> {
        let status = program.wait().await?;
        self.over.store(true, Ordering::Relaxed);
        // What led into it was killed by force: of the rest, its group is known.
        if let Some(id) = self.id.filter(|_| self.led && status.signal() == Some(Signal::KILL.as_raw())) {
            let _ = kill_process_group(id, Signal::KILL);
        }
        Ok(status)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let Some(id) = self.id else { return };
        // Gone already is what is wanted.
        if !self.led {
            let _ = kill_process_group(id, Signal::KILL);
        } else if !self.over.load(Ordering::Relaxed) {
            let _ = kill_process(id, Signal::TERM);
            // One that was stopped would not hear it.
            let _ = kill_process(id, Signal::CONT);
        }
    }
}
