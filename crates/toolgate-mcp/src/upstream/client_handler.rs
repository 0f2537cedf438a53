//! Handles requests and notifications that an upstream sends to toolgate as its client.

use std::sync::{LazyLock, Weak};

use rmcp::model::{
    ClientCapabilities, ClientConfig, ClientJsonRpcMessage, ClientRequest,
    CreateMessageRequestParams, CreateMessageResult, ElicitRequestParams, ElicitResult,
    GetMeta as _, Implementation, JsonRpcMessage, ListRootsResult, LoggingMessageNotificationParam,
    NotificationMetaObject, ProgressNotificationParam, ProtocolVersion, RequestId,
    ResourceUpdatedNotificationParam, ServerJsonRpcMessage, ServerNotification,
};
use rmcp::service::{InboundStreamOrigin, NotificationContext, RequestContext};
use rmcp::transport::Transport;
use rmcp::{ClientHandler, ErrorData, RoleClient};
use tokio_util::sync::CancellationToken;

use crate::mcp_convert::strip_reserved_keys_deep;
use crate::upstream::{
    ClientSender, ReplySender, UpstreamEvent, UpstreamSupervisor, is_within_notification_limit,
};

/// The metadata key that marks a log message with the id of its request.
///
/// rmcp tracks the origin of requests only. The key is random, so that no upstream can forge the
/// mark. Without random numbers, messages are not marked.
pub(crate) static LOG_ORIGIN_META_KEY: LazyLock<Option<String>> = LazyLock::new(|| {
    let mut random = [0; 16];
    getrandom::fill(&mut random).ok()?;
    Some(format!("toolgate/request-{}", toolgate_json::hex(&random)))
});

/// Returns the request that a log message belongs to, if known.
fn log_message_origin(meta: &NotificationMetaObject) -> Option<RequestId> {
    meta.get(LOG_ORIGIN_META_KEY.as_deref()?).and_then(|id| serde_json::from_value(id.clone()).ok())
}

/// Returns the name and version that toolgate sends to upstreams.
pub(crate) fn client_info() -> Implementation {
    Implementation::new("toolgate", env!("CARGO_PKG_VERSION"))
}

/// Receives messages of an upstream, and forwards those that belong to a call.
#[derive(Clone)]
pub(crate) struct UpstreamClientHandler(Weak<UpstreamSupervisor>);

impl UpstreamClientHandler {
    pub(crate) const fn new(supervisor: Weak<UpstreamSupervisor>) -> Self {
        Self(supervisor)
    }

    /// Forwards a request to the client of the call that it belongs to.
    async fn ask_client<T>(
        &self,
        context: &RequestContext<RoleClient>,
        ask: impl FnOnce(ReplySender<T>) -> UpstreamEvent,
    ) -> Result<T, ErrorData> {
        let unknown_call_error = || {
            ErrorData::invalid_request(
                "toolgate cannot tell which call this request belongs to",
                None,
            )
        };
        let supervisor = self.0.upgrade().ok_or_else(unknown_call_error)?;
        let origin = match context.extensions.get::<InboundStreamOrigin>() {
            Some(InboundStreamOrigin::OutboundRequest(id)) => Some(id.clone()),
            _ => None,
        };
        let client = supervisor.client_for(origin.as_ref()).await.ok_or_else(unknown_call_error)?;
        let question_origin =
            context.meta.get_progress_token().map(|token| (context.peer.clone(), token));
        let (reply, answer) = ReplySender::new(question_origin);
        client.try_send(ask(reply)).map_err(|_| unknown_call_error())?;
        tokio::select! {
            answer = answer => answer.unwrap_or_else(|_| Err(ErrorData::invalid_request("the client disconnected", None))),
            () = context.ct.cancelled() => Err(ErrorData::invalid_request("the request was cancelled", None)),
        }
    }
}

impl ClientHandler for UpstreamClientHandler {
    fn get_info(&self) -> ClientConfig {
        let capabilities = ClientCapabilities::builder()
            .enable_elicitation()
            .enable_sampling()
            .enable_roots()
            .build();
        // Only `initialize` sends this version. The newest revision has no `initialize`.
        ClientConfig::new(capabilities, client_info())
            .with_protocol_version(ProtocolVersion::LATEST_WITH_INITIALIZE)
    }

    async fn create_elicitation(
        &self,
        request: ElicitRequestParams,
        context: RequestContext<RoleClient>,
    ) -> Result<ElicitResult, ErrorData> {
        self.ask_client(&context, |reply| {
            UpstreamEvent::Elicit(Box::new(strip_reserved_keys_deep(request)), reply)
        })
        .await
    }

    async fn create_message(
        &self,
        params: CreateMessageRequestParams,
        context: RequestContext<RoleClient>,
    ) -> Result<CreateMessageResult, ErrorData> {
        self.ask_client(&context, |reply| {
            UpstreamEvent::Sample(Box::new(strip_reserved_keys_deep(params)), reply)
        })
        .await
    }

    async fn list_roots(
        &self,
        context: RequestContext<RoleClient>,
    ) -> Result<ListRootsResult, ErrorData> {
        // Outside of a call, no client can answer, so the upstream gets an empty list.
        self.ask_client(&context, UpstreamEvent::Roots)
            .await
            .or_else(|_| Ok(ListRootsResult::default()))
    }

    async fn on_resource_updated(
        &self,
        params: ResourceUpdatedNotificationParam,
        _: NotificationContext<RoleClient>,
    ) {
        if let Some(supervisor) = self.0.upgrade() {
            supervisor.publish_resource_update(params.uri);
        }
    }

    async fn on_tool_list_changed(&self, _: NotificationContext<RoleClient>) {
        self.on_lists_changed();
    }

    async fn on_resource_list_changed(&self, _: NotificationContext<RoleClient>) {
        self.on_lists_changed();
    }

    async fn on_prompt_list_changed(&self, _: NotificationContext<RoleClient>) {
        self.on_lists_changed();
    }
}

impl UpstreamClientHandler {
    fn on_lists_changed(&self) {
        if let Some(supervisor) = self.0.upgrade() {
            supervisor.on_lists_changed();
        }
    }
}

/// A notification that arrives during a call, for the client of the call.
enum UpstreamNotification {
    Progress(ProgressNotificationParam),
    Log(LoggingMessageNotificationParam, Option<RequestId>),
}

impl UpstreamNotification {
    /// Returns the notification if it belongs to a call and is small enough to be buffered.
    ///
    /// Notifications of a subscription are handled there.
    fn from_server(notification: &ServerNotification) -> Option<Self> {
        let meta = Some(notification.get_meta().clone())
            .filter(|meta| meta.subscription_id().is_none())?;
        match notification {
            ServerNotification::ProgressNotification(notification) => {
                let mut notification = notification.params.clone();
                notification.meta = Some(meta).filter(|meta| !meta.is_empty());
                is_within_notification_limit(&notification).then_some(Self::Progress(notification))
            }
            ServerNotification::LoggingMessageNotification(notification) => {
                let (mut notification, origin) =
                    (notification.params.clone(), log_message_origin(&meta));
                notification.meta = Some(meta).filter(|meta| !meta.is_empty());
                is_within_notification_limit(&notification)
                    .then_some(Self::Log(notification, origin))
            }
            _ => None,
        }
    }

    /// Returns the channel of the client that the notification belongs to.
    async fn find_client(&self, supervisor: &UpstreamSupervisor) -> Option<ClientSender> {
        match self {
            Self::Progress(params) => supervisor.client_by_token(&params.progress_token).await,
            Self::Log(_, origin) => supervisor.client_for(origin.as_ref()).await,
        }
    }
}

/// A transport that delivers notifications in order, and before the response that follows them.
///
/// rmcp starts a task for each notification. These tasks overtake each other, and the response
/// overtakes them.
pub(crate) struct OrderedTransport<T> {
    inner: T,
    link: Weak<UpstreamSupervisor>,
    /// The notification being delivered. `receive` may be cancelled and called again.
    pending: Option<UpstreamNotification>,
    /// The id of `server/discover`, until `initialize` follows.
    discover_id: Option<RequestId>,
    /// The id of `server/discover` once `initialize` was sent.
    superseded_discover_id: Option<RequestId>,
    closed: CancellationToken,
}

impl UpstreamClientHandler {
    /// Wraps a transport so that notifications stay in order.
    pub(crate) fn wrap_transport<T: Transport<RoleClient>>(
        &self,
        transport: T,
    ) -> OrderedTransport<T> {
        let supervisor = Weak::clone(&self.0);
        OrderedTransport {
            inner: transport,
            link: supervisor,
            pending: None,
            discover_id: None,
            superseded_discover_id: None,
            closed: CancellationToken::new(),
        }
    }
}

impl<T> OrderedTransport<T> {
    /// Returns a token that is cancelled when the transport ends.
    ///
    /// rmcp reports that only after pending requests are answered, or after some seconds.
    pub(crate) fn closed(&self) -> CancellationToken {
        self.closed.clone()
    }
}

impl<T: Transport<RoleClient>> Transport<RoleClient> for OrderedTransport<T> {
    type Error = T::Error;

    fn send(
        &mut self,
        item: ClientJsonRpcMessage,
    ) -> impl Future<Output = Result<(), T::Error>> + Send + 'static {
        if let JsonRpcMessage::Request(request) = &item {
            match &request.request {
                ClientRequest::DiscoverRequest(_) => self.discover_id = Some(request.id.clone()),
                ClientRequest::InitializeRequest(_) => {
                    self.superseded_discover_id = self.discover_id.take()
                }
                _ => {}
            }
        }
        self.inner.send(item)
    }

    async fn receive(&mut self) -> Option<ServerJsonRpcMessage> {
        loop {
            if let Some(pending) = &self.pending {
                let client = match self.link.upgrade() {
                    Some(supervisor) => pending.find_client(&supervisor).await,
                    None => None,
                };
                // A client that reads too slowly misses messages.
                let _ = match (self.pending.take(), client) {
                    (Some(UpstreamNotification::Progress(notification)), Some(client)) => {
                        client.try_send(UpstreamEvent::Progress(notification))
                    }
                    (Some(UpstreamNotification::Log(notification, _)), Some(client)) => {
                        client.try_send(UpstreamEvent::Log(notification))
                    }
                    _ => Ok(()),
                };
            }
            let Some(message) = self.inner.receive().await else {
                self.closed.cancel();
                return None;
            };
            if let Some(supervisor) = self.link.upgrade() {
                supervisor.on_message();
            }
            // Some servers return a numeric id as a string.
            let id_text = |id: &Option<RequestId>| id.as_ref().map(RequestId::to_string);
            // A slow server may reject `server/discover` after `initialize` was sent. That says
            // nothing about `initialize`, which the server has yet to read.
            if matches!(&message, JsonRpcMessage::Error(error) if error.id.is_some() && id_text(&error.id) == id_text(&self.superseded_discover_id))
            {
                continue;
            }
            self.pending = match &message {
                JsonRpcMessage::Notification(notification) => {
                    UpstreamNotification::from_server(&notification.notification)
                }
                _ => None,
            };
            if self.pending.is_none() {
                return Some(message);
            }
        }
    }

    async fn close(&mut self) -> Result<(), T::Error> {
        self.inner.close().await
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_origin_of_a_log_message_cannot_be_forged() {
        let of = |key: &str| log_message_origin(&serde_json::from_value(json!({key: 8})).unwrap());
        assert_eq!(of(LOG_ORIGIN_META_KEY.as_deref().unwrap()), Some(RequestId::Number(8)));
        for forged in [
            "toolgate/request",
            "toolgate/request-",
            "toolgate/request-00000000000000000000000000000000",
        ] {
            assert_eq!(of(forged), None, "{forged}");
        }
    }
}
