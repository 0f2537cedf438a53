//! Programs that hooks and tools start: they see what they are given, and nothing of them is left afterwards.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::process::{ExitStatus, Stdio};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use tokio::io::AsyncWriteExt;
use tokio::process::{Child, ChildStdin, Command};

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
}

impl Group {
    pub(crate) fn of(program: &Child, led: bool) -> Self {
        Self { id: program.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw), led }
    }

    /// It has ended by itself. What led into it has ended all of it then, unless that was killed.
    pub(crate) fn ended(&mut self, status: ExitStatus) {
        if self.led && status.code().is_some() {
            self.id = None;
        }
        self.led = false;
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let Some(id) = self.id else { return };
        // Gone already is what is wanted.
        if self.led {
            let _ = kill_process(id, Signal::TERM);
            // One that was stopped would not hear it.
            let _ = kill_process(id, Signal::CONT);
        } else {
            let _ = kill_process_group(id, Signal::KILL);
        }
    }
}
