//! The client's side of a connection: what an upstream says unasked.

use std::sync::{LazyLock, Weak};

use rmcp::model::{
    ClientCapabilities, ClientConfig, ClientJsonRpcMessage, ClientRequest, CreateMessageRequestParams, CreateMessageResult,
    ElicitRequestParams, ElicitResult, GetMeta as _, Implementation, JsonRpcMessage, ListRootsResult, LoggingMessageNotificationParam,
    NotificationMetaObject, ProgressNotificationParam, ProtocolVersion, RequestId, ResourceUpdatedNotificationParam, ServerJsonRpcMessage,
    ServerNotification,
};
use rmcp::service::{InboundStreamOrigin, NotificationContext, RequestContext};
use rmcp::transport::Transport;
use rmcp::{ClientHandler, ErrorData, RoleClient};
use tokio_util::sync::CancellationToken;

use crate::render::unspoofed;
use crate::upstream::{FromUpstream, Link, Reply, ToClient, is_short};

/// Where it is said of a log message which request it came in answer to: the library says that of requests alone. What an upstream says
/// stands beside it, so no upstream may know what this is called. Where nothing can be drawn by lot, nothing is said.
pub(crate) static ORIGIN: LazyLock<Option<String>> = LazyLock::new(|| {
    let mut lot = [0; 16];
    getrandom::fill(&mut lot).ok()?;
    Some(format!("toolgate/request-{}", toolgate::json::hex(&lot)))
});

/// The request that a log message came in answer to, where that is known.
fn origin(meta: &NotificationMetaObject) -> Option<RequestId> {
    meta.get(ORIGIN.as_deref()?).and_then(|id| serde_json::from_value(id.clone()).ok())
}

/// What toolgate calls itself.
pub(crate) fn own_name() -> Implementation {
    Implementation::new("toolgate", env!("CARGO_PKG_VERSION"))
}

/// Hears an upstream, and passes on what belongs to a call.
#[derive(Clone)]
pub(crate) struct Ears(Weak<Link>);

impl Ears {
    pub(crate) const fn new(link: Weak<Link>) -> Self {
        Self(link)
    }

    /// Asks the client of the call that this request belongs to.
    async fn ask<T>(&self, context: &RequestContext<RoleClient>, ask: impl FnOnce(Reply<T>) -> FromUpstream) -> Result<T, ErrorData> {
        let nobody = || ErrorData::invalid_request("toolgate cannot tell which call this belongs to", None);
        let link = self.0.upgrade().ok_or_else(nobody)?;
        let origin = match context.extensions.get::<InboundStreamOrigin>() {
            Some(InboundStreamOrigin::OutboundRequest(id)) => Some(id.clone()),
            _ => None,
        };
        let line = link.line_of(origin.as_ref()).await.ok_or_else(nobody)?;
        let asker = context.meta.get_progress_token().map(|token| (context.peer.clone(), token));
        let (reply, answer) = Reply::new(asker);
        line.try_send(ask(reply)).map_err(|_| nobody())?;
        tokio::select! {
            answer = answer => answer.unwrap_or_else(|_| Err(ErrorData::invalid_request("the client has hung up", None))),
            () = context.ct.cancelled() => Err(ErrorData::invalid_request("the request was cancelled", None)),
        }
    }
}

impl ClientHandler for Ears {
    fn get_info(&self) -> ClientConfig {
        let capabilities = ClientCapabilities::builder().enable_elicitation().enable_sampling().enable_roots().build();
        // The revision is said with `initialize` alone, which the newest does not have.
        ClientConfig::new(capabilities, own_name()).with_protocol_version(ProtocolVersion::LATEST_WITH_INITIALIZE)
    }

    async fn create_elicitation(
        &self,
        request: ElicitRequestParams,
        context: RequestContext<RoleClient>,
    ) -> Result<ElicitResult, ErrorData> {
        self.ask(&context, |reply| FromUpstream::Elicit(Box::new(unspoofed(request)), reply)).await
    }

    async fn create_message(
        &self,
        params: CreateMessageRequestParams,
        context: RequestContext<RoleClient>,
    ) -> Result<CreateMessageResult, ErrorData> {
        self.ask(&context, |reply| FromUpstream::Sample(Box::new(unspoofed(params)), reply)).await
    }

    async fn list_roots(&self, context: RequestContext<RoleClient>) -> Result<ListRootsResult, ErrorData> {
        // Asked outside of a call, it is nobody's roots that are meant.
        self.ask(&context, FromUpstream::Roots).await.or_else(|_| Ok(ListRootsResult::default()))
    }

    async fn on_resource_updated(&self, params: ResourceUpdatedNotificationParam, _: NotificationContext<RoleClient>) {
        if let Some(link) = self.0.upgrade() {
            link.updated(params.uri);
        }
    }

    async fn on_tool_list_changed(&self, _: NotificationContext<RoleClient>) {
        self.lists_changed();
    }

    async fn on_resource_list_changed(&self, _: NotificationContext<RoleClient>) {
        self.lists_changed();
    }

    async fn on_prompt_list_changed(&self, _: NotificationContext<RoleClient>) {
        self.lists_changed();
    }
}

impl Ears {
    fn lists_changed(&self) {
        if let Some(link) = self.0.upgrade() {
            link.lists_changed();
        }
    }
}

/// Something that an upstream says in the middle of a call, for its client.
enum Word {
    Progress(ProgressNotificationParam),
    Log(LoggingMessageNotificationParam, Option<RequestId>),
}

impl Word {
    /// What is for the client of a call, and short enough to wait for it. What is told over a subscription is heard there.
    fn of(said: &ServerNotification) -> Option<Self> {
        let meta = Some(said.get_meta().clone()).filter(|meta| meta.subscription_id().is_none())?;
        match said {
            ServerNotification::ProgressNotification(said) => {
                let mut said = said.params.clone();
                said.meta = Some(meta).filter(|meta| !meta.is_empty());
                is_short(&said).then_some(Self::Progress(said))
            }
            ServerNotification::LoggingMessageNotification(said) => {
                let (mut said, origin) = (said.params.clone(), origin(&meta));
                said.meta = Some(meta).filter(|meta| !meta.is_empty());
                is_short(&said).then_some(Self::Log(said, origin))
            }
            _ => None,
        }
    }

    /// Who is to hear it.
    async fn line(&self, link: &Link) -> Option<ToClient> {
        match self {
            Self::Progress(said) => link.line_by_token(&said.progress_token).await,
            Self::Log(_, origin) => link.line_of(origin.as_ref()).await,
        }
    }
}

/// A way to an upstream on which words are heard in the order in which they come, and before the answer that comes behind them. The
/// library begins a task for each of them, and these overtake one another, and are overtaken by the answer.
pub(crate) struct InOrder<T> {
    way: T,
    link: Weak<Link>,
    /// What is being passed on: whoever waits for what comes next may stop at any time, and begin again.
    word: Option<Word>,
    /// The newest greeting, where no other has come after it.
    greeting: Option<RequestId>,
    /// The newest greeting, where the other has come after it.
    given_up: Option<RequestId>,
    over: CancellationToken,
}

impl Ears {
    /// A way to the upstream that is heard, with its words in their order.
    pub(crate) fn in_order<T: Transport<RoleClient>>(&self, way: T) -> InOrder<T> {
        let link = Weak::clone(&self.0);
        InOrder { way, link, word: None, greeting: None, given_up: None, over: CancellationToken::new() }
    }
}

impl<T> InOrder<T> {
    /// Told when nothing comes any more. The library says so only when what was asked over it is answered, or after some seconds.
    pub(crate) fn over(&self) -> CancellationToken {
        self.over.clone()
    }
}

impl<T: Transport<RoleClient>> Transport<RoleClient> for InOrder<T> {
    type Error = T::Error;

    fn send(&mut self, item: ClientJsonRpcMessage) -> impl Future<Output = Result<(), T::Error>> + Send + 'static {
        if let JsonRpcMessage::Request(asked) = &item {
            match &asked.request {
                ClientRequest::DiscoverRequest(_) => self.greeting = Some(asked.id.clone()),
                ClientRequest::InitializeRequest(_) => self.given_up = self.greeting.take(),
                _ => {}
            }
        }
        self.way.send(item)
    }

    async fn receive(&mut self) -> Option<ServerJsonRpcMessage> {
        loop {
            if let Some(word) = &self.word {
                let line = match self.link.upgrade() {
                    Some(link) => word.line(&link).await,
                    None => None,
                };
                // A client that does not keep up misses some of it.
                let _ = match (self.word.take(), line) {
                    (Some(Word::Progress(said)), Some(line)) => line.try_send(FromUpstream::Progress(said)),
                    (Some(Word::Log(said, _)), Some(line)) => line.try_send(FromUpstream::Log(said)),
                    _ => Ok(()),
                };
            }
            let Some(message) = self.way.receive().await else {
                self.over.cancel();
                return None;
            };
            if let Some(link) = self.link.upgrade() {
                link.heard();
            }
            // Some say a number as text.
            let named = |id: &Option<RequestId>| id.as_ref().map(RequestId::to_string);
            // That it does not know the newest greeting is said late by whoever takes its time to start, and says nothing of the other one,
            // which it has yet to read.
            if matches!(&message, JsonRpcMessage::Error(error) if error.id.is_some() && named(&error.id) == named(&self.given_up)) {
                continue;
            }
            self.word = match &message {
                JsonRpcMessage::Notification(said) => Word::of(&said.notification),
                _ => None,
            };
            if self.word.is_none() {
                return Some(message);
            }
        }
    }

    async fn close(&mut self) -> Result<(), T::Error> {
        self.way.close().await
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn no_upstream_says_whose_a_log_message_is() {
        let of = |key: &str| origin(&serde_json::from_value(json!({key: 8})).unwrap());
        assert_eq!(of(ORIGIN.as_deref().unwrap()), Some(RequestId::Number(8)));
        for forged in ["toolgate/request", "toolgate/request-", "toolgate/request-00000000000000000000000000000000"] {
            assert_eq!(of(forged), None, "{forged}");
        }
    }
}
