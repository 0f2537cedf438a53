//! Stops the child process of an upstream with all its descendants, and reads its standard error.

use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::Child;
use toolgate_config::UpstreamConfig;

/// A child process and its descendants.
pub(crate) struct UpstreamProcess {
    pub(super) child: Child,
    pub(super) id: Option<Pid>,
    /// The child is the supervisor process, which kills the program and its descendants on
    /// `SIGTERM`.
    pub(super) is_supervised: bool,
}

impl UpstreamProcess {
    /// Waits for the process to exit after its input was closed, then kills it.
    pub(crate) async fn stop(mut self, timeout: Duration) {
        let _ = tokio::time::timeout(timeout, self.child.wait()).await;
        self.kill();
        let kill_timeout = if self.is_supervised {
            toolgate_process::supervisor::KILL_TIMEOUT + Duration::from_secs(1)
        } else {
            Duration::from_secs(2)
        };
        if tokio::time::timeout(kill_timeout, self.child.wait()).await.is_err() {
            self.is_supervised = false;
            self.kill();
            let _ = tokio::time::timeout(Duration::from_secs(2), self.child.wait()).await;
        }
    }

    /// Returns whether the supervisor process could not start the program.
    ///
    /// The supervisor process reports that by its exit code, and the reason on standard error.
    pub(super) async fn has_failed_to_start(&mut self) -> bool {
        let status_result = tokio::time::timeout(Duration::from_secs(1), self.child.wait()).await;
        self.is_supervised
            && matches!(status_result, Ok(Ok(status)) if status.code() == Some(toolgate_process::supervisor::NOT_STARTED_EXIT_CODE))
    }

    fn kill(&mut self) {
        use std::os::unix::process::ExitStatusExt as _;
        let Some(id) = self.id else { return };
        let exit_status = self.child.try_wait();
        match &exit_status {
            // The supervisor process kills everything, also before a normal exit.
            Ok(None) if self.is_supervised => {
                let _ = kill_process(id, Signal::TERM);
            }
            Ok(Some(status)) if self.is_supervised && status.signal().is_none() => {}
            // Members of the process group may outlive the child.
            _ => {
                let _ = kill_process_group(id, Signal::KILL);
                let _ = self.child.start_kill();
            }
        }
    }
}

impl Drop for UpstreamProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Reads standard error line by line.
///
/// Long lines are passed on in pieces, never split inside a secret.
pub(super) async fn read_stderr(
    stderr: impl AsyncRead + Unpin,
    upstream: UpstreamConfig,
    on_line: Arc<dyn Fn(String) + Send + Sync>,
) -> String {
    let mut lines = BufReader::new(stderr);
    let (mut line, mut last) = (Vec::new(), String::new());
    loop {
        let is_end = matches!(lines.read_bounded_line(&mut line).await, Ok(0) | Err(_));
        let piece_len = if is_end || line.ends_with(b"\n") {
            line.len()
        } else {
            line.len() - pending_tail_bytes(&upstream, &line)
        };
        let piece: Vec<u8> = line.drain(..piece_len).collect();
        if !piece.is_empty() {
            last = String::from_utf8_lossy(&piece).trim_end().to_owned();
            on_line(last.clone());
        }
        if is_end {
            return last;
        }
    }
}

/// Returns how many trailing bytes of a piece to keep for the next one: an incomplete character or
/// the start of a secret.
fn pending_tail_bytes(upstream: &UpstreamConfig, piece: &[u8]) -> usize {
    let Some(last) = piece.utf8_chunks().last() else { return 0 };
    last.invalid().len() + last.valid().len() - upstream.safe_prefix_len(last.valid())
}

/// Lines of bounded length.
trait BoundedLineReader {
    async fn read_bounded_line(&mut self, line: &mut Vec<u8>) -> std::io::Result<usize>;
}

impl<R: tokio::io::AsyncBufRead + Unpin> BoundedLineReader for R {
    async fn read_bounded_line(&mut self, line: &mut Vec<u8>) -> std::io::Result<usize> {
        use tokio::io::AsyncReadExt;
        self.take(8 << 10).read_until(b'\n', line).await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use toolgate_config::Config;

    use super::*;

    #[tokio::test]
    async fn no_secret_is_split_across_pieces() {
        // The second secret ends as it begins.
        for secret in ["hünter2-öf-the-upstream", "hünter2-öf-this-month"] {
            let config = format!(
                "[upstreams.loud]\ncommand = \"/bin/true\"\nenv = {{ KEY = \"{secret}\" }}\n"
            );
            let upstream =
                Config::parse("toolgate.toml", &config).upstreams.into_iter().next().unwrap();
            // For every cut of the line.
            for padding in (8 << 10) - secret.len() - 1..=(8 << 10) + 1 {
                let line = format!("{}{secret} and more\nnext\nlast", "x".repeat(padding));
                let pieces = Arc::new(Mutex::new(Vec::new()));
                let (redactor, sink) = (upstream.clone(), Arc::clone(&pieces));
                let on_line = Arc::new(move |piece: String| {
                    sink.lock().unwrap().push(redactor.redact_secrets(&piece))
                });
                read_stderr(line.as_bytes(), upstream.clone(), on_line).await;
                let pieces = pieces.lock().unwrap().clone();
                assert_eq!(
                    pieces.iter().rev().take(2).collect::<Vec<_>>(),
                    ["last", "next"],
                    "{padding}"
                );
                let joined = pieces.get(..pieces.len() - 2).unwrap().concat();
                assert_eq!(
                    joined.trim_start_matches('x').replace(' ', ""),
                    "[redacted]andmore",
                    "{padding}"
                );
            }
        }
    }
}
