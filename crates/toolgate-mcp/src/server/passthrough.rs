//! Forwards requests for prompts, resources and completions to upstreams.

use std::pin::pin;
use std::sync::Arc;

use rmcp::RoleServer;
use rmcp::model::{ClientRequest, ErrorData, ServerResult};
use rmcp::service::RequestContext;
use tokio::sync::mpsc;

use crate::server::handler::{McpServer, client_error};
use crate::server::tool_call::{CLIENT_CHANNEL_CAPACITY, CallClient, poll_optional};
use crate::upstream::UpstreamSupervisor;

impl McpServer {
    /// Sends a request to an upstream and relays its notifications; questions are declined.
    ///
    /// If the client cancels, the request to the upstream is cancelled. Callers box this future,
    /// because the library reserves room for the largest request in each session.
    pub(crate) async fn forward_request(
        &self,
        link: &Arc<UpstreamSupervisor>,
        request: ClientRequest,
        context: &RequestContext<RoleServer>,
    ) -> Result<ServerResult, ErrorData> {
        // Counted before the check, so that shutdown waits for this request.
        let _counted = self.gateway.count_call();
        if self.gateway.0.stop.is_cancelled() {
            return Err(ErrorData::internal_error("the gateway is shutting down", None));
        }
        let peer = link
            .peer()
            .ok_or_else(|| ErrorData::internal_error("the upstream is not connected", None))?;
        let client = CallClient::from_context(context);
        let (to_client, mut events) = mpsc::channel(CLIENT_CHANNEL_CAPACITY);
        let mut response = pin!(link.send_request(link.forward_request(
            peer,
            request,
            to_client,
            self.log_level(&client)
        )));
        let cancelled = || ErrorData::invalid_request("the request was cancelled", None);
        // The timeout of the upstream also runs while the client receives a notification.
        let mut delivery = None;
        let answer = loop {
            let busy = delivery.is_some();
            tokio::select! {
                biased;
                () = context.ct.cancelled() => return Err(cancelled()),
                answer = &mut response => break answer,
                () = poll_optional(&mut delivery), if busy => delivery = None,
                Some(event) = events.recv(), if !busy => delivery = Some(Box::pin(self.deliver_event(event, &client))),
            }
        };
        // Delivers messages that the upstream sent before its answer.
        let deliver_rest = async {
            if let Some(delivery) = delivery {
                delivery.await;
            }
            while let Ok(event) = events.try_recv() {
                self.deliver_event(event, &client).await;
            }
        };
        tokio::select! {
            () = context.ct.cancelled() => return Err(cancelled()),
            () = deliver_rest => {}
        }
        answer.map_err(client_error)
    }
}
