//! Programs that hooks and tools start: they see what they are given, and nothing of them is left afterwards.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::process::Stdio;

use tokio::io::AsyncWriteExt;
use tokio::process::{ChildStdin, Command};

/// Its streams are ours, its process group is its own, and of the environment it sees what is named and what is set.
pub(crate) fn shut_off(command: &mut Command, inherit: &[String], set: &BTreeMap<String, OsString>) {
    command.env_clear().stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.process_group(0).kill_on_drop(true);
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

/// Ends a whole process group when dropped.
pub(crate) struct Group(pub(crate) Option<u32>);

impl Drop for Group {
    fn drop(&mut self) {
        let pid = self.0.and_then(|id| i32::try_from(id).ok()).and_then(rustix::process::Pid::from_raw);
        if let Some(pid) = pid {
            // Gone already is what is wanted.
            let _ = rustix::process::kill_process_group(pid, rustix::process::Signal::KILL);
        }
    }
}
