//! Manages sessions of earlier revisions, whose clients can resume an interrupted response stream.
//!
//! A stream may end before its answer: the connection breaks, or the gateway ends it after the time
//! `stream` of its settings. The client resumes it with the ID of the last event that it received.
//! Events are buffered only while no client reads the stream. A broken connection is not always
//! noticed, so the answer of a slow call is buffered in any case.

use std::collections::{HashMap, HashSet};
use std::pin::Pin;
use std::sync::Mutex;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::{Stream, StreamExt as _, stream};
use rmcp::model::{
    ClientJsonRpcMessage, JsonRpcMessage, ProtocolVersion, ServerJsonRpcMessage, ServerResult,
};
use rmcp::transport::streamable_http_server::session::local::{
    LocalSessionManager, LocalSessionManagerError, SessionError,
};
use rmcp::transport::streamable_http_server::session::{
    RestoreOutcome, ServerSseMessage, SessionId, SessionManager,
};
use tokio::runtime::Handle;
use tokio::time::{Instant, Sleep};
use tokio_util::sync::CancellationToken;

use crate::gateway::{Gateway, lock};
use crate::server::http::event_buffer::{EventBuffers, is_answer};
use crate::server::http::legacy_sessions::SessionOwner;

/// Duration from which on the answer of a call is buffered in any case.
const MIN_SLOW_CALL_DURATION: Duration = Duration::from_secs(1);
type ServerEventStream = Pin<Box<dyn Stream<Item = ServerSseMessage> + Send + Sync>>;
type ResumableSessionError = LocalSessionManagerError;

/// Session manager for earlier revisions.
pub(crate) struct ResumableSessions {
    pub(crate) local: LocalSessionManager,
    gateway: Gateway,
    buffers: EventBuffers,
    /// Sessions whose clients resume streams that end early: those of 2025-11-25 and later.
    resumable: Mutex<HashSet<SessionId>>,
    /// Owners of open sessions.
    pub(crate) owners: Mutex<HashMap<SessionId, SessionOwner>>,
}

impl ResumableSessions {
    pub(crate) fn new(gateway: Gateway) -> Self {
        let mut local = LocalSessionManager::default();
        // The library does not count a running call as activity.
        local.session_config.keep_alive = None;
        Self {
            local,
            gateway,
            buffers: EventBuffers::default(),
            resumable: Mutex::default(),
            owners: Mutex::default(),
        }
    }

    /// Returns the error. Removes a session that has ended by itself, so that its client starts
    /// another.
    async fn close_if_ended(
        &self,
        id: &SessionId,
        why: ResumableSessionError,
    ) -> ResumableSessionError {
        if matches!(
            why,
            ResumableSessionError::SessionNotFound(_)
                | ResumableSessionError::SessionError(SessionError::SessionServiceTerminated)
        ) {
            drop(self.close_session(id).await);
        }
        why
    }

    /// Wraps a stream that ends with the answer, or earlier if its client can resume it.
    fn wrap_stream(&self, session: &SessionId, rest: StreamRemainder) -> ServerEventStream {
        let can_resume = || lock(&self.resumable).contains(session);
        let max_duration =
            self.gateway.active_config().settings.max_stream_duration.filter(|_| can_resume());
        let recorder = StreamRecorder {
            buffers: self.buffers.clone(),
            session: session.clone(),
            closed: self.gateway.0.closed.clone(),
        };
        Box::pin(ResumableStream {
            rest: Some(rest),
            started: Instant::now(),
            deadline: max_duration.map(|max_duration| Box::pin(tokio::time::sleep(max_duration))),
            stop: self.gateway.0.stop.clone(),
            recorder,
        })
    }
}

/// Returns the request in the ID of an event. The ID of an event without a request is shorter.
fn request_of_event(event: &str) -> Option<&str> {
    event.split_once('/').map(|(_, request)| request)
}

impl SessionManager for ResumableSessions {
    type Error = ResumableSessionError;
    type Transport = <LocalSessionManager as SessionManager>::Transport;

    async fn create_session(&self) -> Result<(SessionId, Self::Transport), ResumableSessionError> {
        self.local.create_session().await
    }

    async fn initialize_session(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> Result<ServerJsonRpcMessage, ResumableSessionError> {
        let answer = self.local.initialize_session(id, message).await?;
        if let JsonRpcMessage::Response(response) = &answer
            && let ServerResult::InitializeResult(agreed) = &response.result
            && agreed.protocol_version >= ProtocolVersion::V_2025_11_25
        {
            lock(&self.resumable).insert(id.clone());
        }
        // A rejected handshake creates no session.
        if matches!(answer, JsonRpcMessage::Error(_)) {
            drop(self.close_session(id).await);
        }
        Ok(answer)
    }

    async fn has_session(&self, id: &SessionId) -> Result<bool, ResumableSessionError> {
        self.local.has_session(id).await
    }

    async fn close_session(&self, id: &SessionId) -> Result<(), ResumableSessionError> {
        self.buffers.drop_session(id);
        lock(&self.resumable).remove(id);
        drop(lock(&self.owners).remove(id));
        self.local.close_session(id).await
    }

    async fn create_stream(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, ResumableSessionError>
    {
        match self.local.create_stream(id, message).await {
            Ok(events) => Ok(self.wrap_stream(
                id,
                StreamRemainder {
                    events: Box::pin(events),
                    request: None,
                    is_resumed: false,
                    is_buffered: false,
                },
            )),
            Err(why) => Err(self.close_if_ended(id, why).await),
        }
    }

    async fn accept_message(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> Result<(), ResumableSessionError> {
        match self.local.accept_message(id, message).await {
            Ok(()) => Ok(()),
            Err(why) => Err(self.close_if_ended(id, why).await),
        }
    }

    async fn create_standalone_stream(
        &self,
        id: &SessionId,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, ResumableSessionError>
    {
        match self.local.create_standalone_stream(id).await {
            Ok(events) => Ok(events),
            Err(why) => Err(self.close_if_ended(id, why).await),
        }
    }

    async fn resume(
        &self,
        id: &SessionId,
        last: String,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, ResumableSessionError>
    {
        let Some(request) = request_of_event(&last).map(str::to_owned) else {
            return match self.local.resume(id, last).await {
                Ok(rest) => Ok(Box::pin(rest) as ServerEventStream),
                Err(why) => Err(self.close_if_ended(id, why).await),
            };
        };
        let buffered = self.buffers.replay(id, &request, last.clone());
        let (rest, buffered): (ServerEventStream, bool) = match buffered {
            Some(buffered) => (Box::pin(buffered), true),
            None => match self.local.resume(id, last.clone()).await {
                Ok(rest) => (Box::pin(rest), false),
                Err(why) => return Err(self.close_if_ended(id, why).await),
            },
        };
        // The first event has an ID, so that the client can resume this stream as well. The library
        // repeats the last event, so it is skipped.
        let retry = self.local.session_config.sse_retry.unwrap_or_default();
        let (first, known) = (ServerSseMessage::priming(last.clone(), retry), last);
        let rest =
            rest.filter(move |event| std::future::ready(event.event_id.as_ref() != Some(&known)));
        let events = Box::pin(stream::once(std::future::ready(first)).chain(rest));
        Ok(self.wrap_stream(
            id,
            StreamRemainder {
                events,
                request: Some(request),
                is_resumed: true,
                is_buffered: buffered,
            },
        ))
    }

    async fn restore_session(
        &self,
        id: SessionId,
    ) -> Result<RestoreOutcome<Self::Transport>, ResumableSessionError> {
        self.local.restore_session(id).await
    }
}

/// The rest of a stream.
struct StreamRemainder {
    events: ServerEventStream,
    /// Known from the first event on.
    request: Option<String>,
    /// Whether a client has resumed the stream.
    is_resumed: bool,
    /// Whether the events come from a buffer.
    is_buffered: bool,
}

/// A response stream. If its client leaves before the answer, the rest is buffered.
struct ResumableStream {
    /// `None` after the last event.
    rest: Option<StreamRemainder>,
    started: Instant,
    deadline: Option<Pin<Box<Sleep>>>,
    /// During shutdown no stream ends early, because its client could not resume it.
    stop: CancellationToken,
    recorder: StreamRecorder,
}

impl Stream for ResumableStream {
    type Item = ServerSseMessage;

    fn poll_next(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<ServerSseMessage>> {
        let this = &mut *self;
        let Some(rest) = &mut this.rest else { return Poll::Ready(None) };
        let Poll::Ready(next) = rest.events.as_mut().poll_next(context) else {
            // Before the first event, the client has no ID to resume with.
            if let (Some(end), true) = (&mut this.deadline, rest.request.is_some()) {
                ready!(end.as_mut().poll(context));
                this.deadline = None;
                if !this.stop.is_cancelled() {
                    return Poll::Ready(None);
                }
            }
            return Poll::Pending;
        };
        match &next {
            Some(event) if !is_answer(event) => {
                let named =
                    || event.event_id.as_deref().and_then(request_of_event).map(str::to_owned);
                rest.request = rest.request.take().or_else(named);
            }
            ended => {
                let slow = (rest.is_resumed || this.started.elapsed() >= MIN_SLOW_CALL_DURATION)
                    && !rest.is_buffered;
                if let (Some(answer), Some(request), true) = (ended, &rest.request, slow) {
                    this.recorder.buffers.store_answer(
                        &this.recorder.session,
                        request,
                        answer.clone(),
                    );
                }
                this.rest = None;
            }
        }
        Poll::Ready(next)
    }
}

impl Drop for ResumableStream {
    fn drop(&mut self) {
        // Events from a buffer are still in it.
        if let Some(StreamRemainder {
            events, request: Some(request), is_buffered: false, ..
        }) = self.rest.take()
        {
            self.recorder.record(request, events);
        }
    }
}

/// Buffers the rest of a stream that no client reads.
struct StreamRecorder {
    buffers: EventBuffers,
    session: SessionId,
    closed: CancellationToken,
}

impl StreamRecorder {
    fn record(&self, request: String, mut rest: ServerEventStream) {
        let Ok(runtime) = Handle::try_current() else { return };
        let Some(number) = self.buffers.open(&self.session, &request) else { return };
        let (buffers, session, closed) =
            (self.buffers.clone(), self.session.clone(), self.closed.clone());
        runtime.spawn(async move {
            let recording = async {
                while let Some(event) = rest.next().await {
                    if !buffers.push(&session, &request, number, event) {
                        break;
                    }
                }
            };
            closed.run_until_cancelled(recording).await;
            buffers.close(&session, &request, number);
        });
    }
}
