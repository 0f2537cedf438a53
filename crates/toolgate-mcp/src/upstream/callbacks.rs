//! Routes messages that an upstream sends during a call to the client of the call.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use rmcp::model::{
    CancelledNotification, CancelledNotificationParam, ClientCapabilities, ClientRequest,
    CreateMessageRequestParams, CreateMessageResult, ElicitRequestParams, ElicitResult,
    InputRequests, InputResponses, ListRootsResult, LoggingLevel, LoggingMessageNotificationParam,
    ProgressNotificationParam, ProgressToken, RequestId, RequestMetaObject, ServerResult,
};
use rmcp::service::{Peer, PeerRequestOptions};
use rmcp::{ErrorData, RoleClient, ServiceError};
use serde::Serialize;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};

use crate::upstream::supervisor::{UpstreamSupervisor, is_modern};

/// The upstream that asks a question, and its progress token for the answer.
pub(crate) type QuestionOrigin = (Peer<RoleClient>, ProgressToken);

/// The reply channel of a question.
pub(crate) struct ReplySender<T> {
    to: oneshot::Sender<Result<T, ErrorData>>,
    /// Where to report progress of the answer.
    pub(crate) origin: Option<QuestionOrigin>,
    /// Counts the question as open until it is dropped.
    question: Option<OpenQuestionGuard>,
}

impl<T> ReplySender<T> {
    pub(crate) fn new(
        origin: Option<QuestionOrigin>,
    ) -> (Self, oneshot::Receiver<Result<T, ErrorData>>) {
        let (to, answer) = oneshot::channel();
        (Self { to, origin, question: None }, answer)
    }

    /// Sends the answer. The receiver may be gone.
    pub(crate) fn send(self, answer: Result<T, ErrorData>) {
        drop(self.question);
        let _ = self.to.send(answer);
    }

    /// Waits until the asker no longer waits for the answer.
    pub(crate) async fn closed(&mut self) {
        self.to.closed().await;
    }
}

/// A message that an upstream sends during a call.
pub(crate) enum UpstreamEvent {
    Progress(ProgressNotificationParam),
    Log(LoggingMessageNotificationParam),
    Elicit(Box<ElicitRequestParams>, ReplySender<ElicitResult>),
    Sample(Box<CreateMessageRequestParams>, ReplySender<CreateMessageResult>),
    Roots(ReplySender<ListRootsResult>),
    /// All questions of an upstream of revision 2026-07-28.
    Inputs(InputRequests, ReplySender<InputResponses>),
}

/// Counts the questions of an upstream that the client of a call has not answered.
#[derive(Clone, Default)]
pub(crate) struct OpenQuestionCounter(Arc<AtomicUsize>);

impl OpenQuestionCounter {
    fn add(&self) -> OpenQuestionGuard {
        self.0.fetch_add(1, Ordering::SeqCst);
        OpenQuestionGuard(Arc::clone(&self.0))
    }

    pub(crate) fn has_open(&self) -> bool {
        self.0.load(Ordering::SeqCst) > 0
    }
}

/// An open question. Dropping it decrements the count.
struct OpenQuestionGuard(Arc<AtomicUsize>);

impl Drop for OpenQuestionGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The channel from an upstream to the client of a call.
#[derive(Clone)]
pub(crate) struct ClientSender {
    to: mpsc::Sender<UpstreamEvent>,
    open_questions: OpenQuestionCounter,
}

/// The message was not delivered to the client.
pub(crate) struct DeliveryError;

impl ClientSender {
    /// Forwards a message. A client that reads too slowly misses messages.
    pub(crate) fn try_send(&self, mut event: UpstreamEvent) -> Result<(), DeliveryError> {
        let question = || Some(self.open_questions.add());
        match &mut event {
            UpstreamEvent::Elicit(_, reply) => reply.question = question(),
            UpstreamEvent::Sample(_, reply) => reply.question = question(),
            UpstreamEvent::Roots(reply) => reply.question = question(),
            UpstreamEvent::Inputs(_, reply) => reply.question = question(),
            UpstreamEvent::Progress(_) | UpstreamEvent::Log(_) => {}
        }
        self.to.try_send(event).map_err(|_| DeliveryError)
    }
}

/// The maximum size of a message that is buffered for a client, in bytes.
pub(crate) const MAX_BUFFERED_MESSAGE_BYTES: usize = 64 << 10;

/// Returns whether a message is small enough to be buffered for a client.
pub(crate) fn is_within_notification_limit(message: &impl Serialize) -> bool {
    struct LimitedWriter(usize);
    impl io::Write for LimitedWriter {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 = self.0.checked_sub(bytes.len()).ok_or(io::ErrorKind::FileTooLarge)?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    serde_json::to_writer(LimitedWriter(MAX_BUFFERED_MESSAGE_BYTES), message).is_ok()
}

/// The data and channel of a call's client, passed along with the call.
pub(crate) struct CallChannel {
    pub(crate) to_client: mpsc::Sender<UpstreamEvent>,
    /// The metadata of the client's request.
    pub(crate) meta: rmcp::model::RequestMetaObject,
    /// The client's capabilities.
    pub(crate) capabilities: ClientCapabilities,
    /// The minimum log level that the client wants; `None` for no log messages.
    pub(crate) log_level: Option<LoggingLevel>,
    /// The unmodified result of the upstream.
    pub(crate) raw_result: Mutex<Option<(serde_json::Value, Box<rmcp::model::CallToolResult>)>>,
}

/// A request in progress, and the client that receives its messages.
struct RequestRoute {
    /// A unique number, because request ids start again with each connection.
    number: u64,
    token: ProgressToken,
    client: ClientSender,
    is_call: bool,
}

/// The requests in progress at one upstream.
#[derive(Default)]
pub(crate) struct RequestRoutes {
    /// Locked while a request is sent, so that its route exists before its first message.
    routes: tokio::sync::Mutex<HashMap<RequestId, RequestRoute>>,
    /// The number of requests in progress that have no client channel.
    unrouted: AtomicUsize,
    next_number: AtomicU64,
}

/// A request without a client channel. Dropping it decrements the count.
pub(crate) struct UnroutedRequestGuard<'r>(&'r AtomicUsize);

impl Drop for UnroutedRequestGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl RequestRoutes {
    /// Sends a request, and returns the number of its route if it has one.
    pub(crate) async fn send_for_call<T, E>(
        &self,
        client: Option<&CallChannel>,
        open_questions: &OpenQuestionCounter,
        send: impl Future<Output = Result<T, E>>,
        id: impl FnOnce(&T) -> (RequestId, ProgressToken),
    ) -> Result<(T, Option<u64>), E> {
        let Some(client) = client else { return Ok((send.await?, None)) };
        let client =
            ClientSender { to: client.to_client.clone(), open_questions: open_questions.clone() };
        let (sent, number) = self.send_routed(client, true, send, id).await?;
        Ok((sent, Some(number)))
    }

    async fn send_routed<T, E>(
        &self,
        client: ClientSender,
        is_call: bool,
        send: impl Future<Output = Result<T, E>>,
        id: impl FnOnce(&T) -> (RequestId, ProgressToken),
    ) -> Result<(T, u64), E> {
        let mut routes = self.routes.lock().await;
        let sent = send.await?;
        let (id, token) = id(&sent);
        let number = self.next_number.fetch_add(1, Ordering::Relaxed);
        routes.insert(id, RequestRoute { number, token, client, is_call });
        Ok((sent, number))
    }

    /// Counts a request without a client channel.
    pub(crate) fn add_unrouted(&self) -> UnroutedRequestGuard<'_> {
        self.unrouted.fetch_add(1, Ordering::SeqCst);
        UnroutedRequestGuard(&self.unrouted)
    }

    pub(crate) async fn remove(&self, id: &RequestId, number: u64) {
        let mut routes = self.routes.lock().await;
        if routes.get(id).is_some_and(|route| route.number == number) {
            routes.remove(id);
        }
    }

    pub(crate) async fn find_by_token(&self, token: &ProgressToken) -> Option<ClientSender> {
        let routes = self.routes.lock().await;
        // Routes of an earlier connection may remain.
        let newest =
            routes.values().filter(|route| route.token == *token).max_by_key(|route| route.number);
        newest.map(|route| route.client.clone())
    }

    /// Returns the client for a message of the upstream.
    ///
    /// If the origin is known, that is the client of that request. Otherwise it is the client of
    /// the only request in progress.
    pub(crate) async fn find(&self, origin: Option<&RequestId>) -> Option<ClientSender> {
        let routes = self.routes.lock().await;
        match origin {
            Some(id) => routes.get(id).map(|route| route.client.clone()),
            None => {
                let mut calls = routes.values().filter(|route| route.is_call);
                let only = calls.next().filter(|_| {
                    calls.next().is_none() && self.unrouted.load(Ordering::SeqCst) == 0
                });
                only.map(|route| route.client.clone())
            }
        }
    }
}

/// A request in progress that is not a call. Dropping it early sends a cancellation.
struct ForwardedRequestGuard {
    link: Arc<UpstreamSupervisor>,
    peer: Peer<RoleClient>,
    id: RequestId,
    route: u64,
    is_done: bool,
}

impl Drop for ForwardedRequestGuard {
    fn drop(&mut self) {
        let Ok(runtime) = Handle::try_current() else { return };
        let (supervisor, peer, id) = (Arc::clone(&self.link), self.peer.clone(), self.id.clone());
        let (route, is_done) = (self.route, self.is_done);
        runtime.spawn(async move {
            supervisor.routes.remove(&id, route).await;
            if !is_done {
                let params = CancelledNotificationParam::new(
                    Some(id),
                    Some("the caller no longer waits for the response".to_owned()),
                );
                let _ = peer.send_notification(CancelledNotification::new(params).into()).await;
            }
        });
    }
}

impl UpstreamSupervisor {
    /// Sends a request that is not a call, and forwards its progress and log messages.
    ///
    /// An upstream of revision 2026-07-28 receives the log level with the request.
    pub(crate) async fn forward_request(
        self: &Arc<Self>,
        peer: Peer<RoleClient>,
        request: ClientRequest,
        client: mpsc::Sender<UpstreamEvent>,
        log_level: Option<LoggingLevel>,
    ) -> Result<ServerResult, ServiceError> {
        let client = ClientSender { to: client, open_questions: OpenQuestionCounter::default() };
        let mut options = PeerRequestOptions::no_options();
        if let Some(log_level) = log_level.filter(|_| is_modern(&peer)) {
            let mut meta = RequestMetaObject::default();
            meta.set_log_level(log_level);
            options = options.with_meta(meta);
        }
        let send = peer.send_request_with_option(request, options);
        let sent = self.routes.send_routed(client, false, send, |handle| {
            (handle.id.clone(), handle.progress_token.clone())
        });
        let (handle, route) = sent.await?;
        let mut guard = ForwardedRequestGuard {
            link: Arc::clone(self),
            peer: peer.clone(),
            id: handle.id.clone(),
            route,
            is_done: false,
        };
        let answer = handle.await_response().await;
        guard.is_done = true;
        answer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn removing_a_route_keeps_a_newer_one_of_the_same_id() {
        let (routes, id) = (RequestRoutes::default(), RequestId::Number(1));
        let open = async || {
            let (to, events) = mpsc::channel(1);
            let client = ClientSender { to, open_questions: OpenQuestionCounter::default() };
            let opened = routes.send_routed(client, true, async { Ok::<_, ErrorData>(()) }, |_| {
                (id.clone(), ProgressToken(id.clone()))
            });
            (opened.await.unwrap().1, events)
        };
        let (before, _) = open().await;
        let (after, mut events) = open().await;
        routes.remove(&id, before).await;
        let client = routes.find(Some(&id)).await.unwrap();
        assert!(
            client
                .try_send(UpstreamEvent::Progress(ProgressNotificationParam::new(
                    ProgressToken(id.clone()),
                    1.0
                )))
                .is_ok()
        );
        assert!(events.try_recv().is_ok());
        routes.remove(&id, after).await;
        assert!(routes.find(Some(&id)).await.is_none());
    }
}
