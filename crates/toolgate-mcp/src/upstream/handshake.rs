//! Performs the handshake with an upstream, and chooses the protocol era and the timeout.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::upstream::client_handler::UpstreamClientHandler;
use crate::upstream::supervisor::UpstreamSupervisor;
use crate::upstream::transport::connect::{HandshakeMode, UpstreamConnection, connect};

/// The timeout of one handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(30);

impl UpstreamSupervisor {
    /// Connects to the upstream, trying the protocol eras in turn.
    pub(crate) async fn connect(self: &Arc<Self>) -> Result<UpstreamConnection, String> {
        let weak = Arc::downgrade(self);
        let on_stderr_line: Arc<dyn Fn(String) + Send + Sync> = Arc::new(move |line: String| {
            if let Some(supervisor) = weak.upgrade() {
                supervisor.record_stderr_line(line);
            }
        });
        // A server that stayed silent or exited last time may not survive a request of the other
        // era.
        let mut mode = if self.is_legacy_handshake_due.swap(false, Ordering::Relaxed) {
            HandshakeMode::Initialize
        } else {
            HandshakeMode::Auto
        };
        loop {
            let handler = UpstreamClientHandler::new(Arc::downgrade(self));
            let connecting = connect(
                &self.upstream,
                handler,
                self.launcher.as_deref(),
                mode,
                Arc::clone(&on_stderr_line),
            );
            let connected = tokio::select! {
                connected = tokio::time::timeout(HANDSHAKE_TIMEOUT, connecting) => connected,
                () = self.stop_requested.cancelled() => return Err("toolgate is stopping".to_owned()),
            };
            match connected {
                Ok(Ok(connection)) => return Ok(connection),
                Ok(Err(error)) => mode = mode.next_after(&error).ok_or(error.reason)?,
                Err(_) => {
                    self.is_legacy_handshake_due
                        .store(mode == HandshakeMode::Auto, Ordering::Relaxed);
                    return Err(format!(
                        "the handshake did not finish within {HANDSHAKE_TIMEOUT:?}"
                    ));
                }
            }
        }
    }
}
