//! Cancels or counts a request of a call whose caller stopped waiting.

use std::sync::Arc;

use rmcp::RoleClient;
use rmcp::model::{CancelledNotification, CancelledNotificationParam, RequestId};
use rmcp::service::Peer;
use tokio_util::sync::CancellationToken;

use crate::upstream::callbacks::OpenQuestionCounter;
use crate::upstream::supervisor::{UpstreamFailure, UpstreamSupervisor};

/// A request on the fast path. An abandoned request counts as a failure of the upstream, unless the
/// caller cancelled it.
pub(super) struct DirectRequestGuard<'u> {
    pub(super) link: &'u UpstreamSupervisor,
    /// The generation of the connection.
    pub(super) generation: u64,
    pub(super) is_done: bool,
    pub(super) cancelled: &'u CancellationToken,
}

impl Drop for DirectRequestGuard<'_> {
    fn drop(&mut self) {
        if !self.is_done && !self.cancelled.is_cancelled() {
            self.link.on_failure(self.generation, UpstreamFailure::Timeout);
        }
    }
}

/// A request through rmcp. Dropping it before the response sends a cancellation.
pub(super) struct RmcpRequestGuard {
    pub(super) peer: Peer<RoleClient>,
    pub(super) link: Arc<UpstreamSupervisor>,
    /// The generation of the connection.
    pub(super) generation: u64,
    pub(super) id: RequestId,
    /// The route for messages about the request, if there is one.
    pub(super) route: Option<u64>,
    pub(super) is_done: bool,
    /// Cancelled if the client disconnected, which is not the upstream's fault.
    pub(super) cancelled: CancellationToken,
    /// Open questions to the client. Waiting for them is not the upstream's fault.
    pub(super) open_questions: OpenQuestionCounter,
}

impl Drop for RmcpRequestGuard {
    fn drop(&mut self) {
        if self.is_done && self.route.is_none() {
            return;
        }
        let (peer, supervisor, id) = (self.peer.clone(), Arc::clone(&self.link), self.id.clone());
        let (route, is_done, generation) = (self.route, self.is_done, self.generation);
        let is_upstream_fault = !self.cancelled.is_cancelled() && !self.open_questions.has_open();
        tokio::spawn(async move {
            if let Some(route) = route {
                supervisor.routes.remove(&id, route).await;
            }
            if !is_done {
                if is_upstream_fault {
                    supervisor.on_failure(generation, UpstreamFailure::Timeout);
                }
                let params = CancelledNotificationParam::new(
                    Some(id),
                    Some("the caller no longer waits for the response".to_owned()),
                );
                let _ = peer.send_notification(CancelledNotification::new(params).into()).await;
            }
        });
    }
}
