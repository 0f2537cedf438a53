//! Sessions of earlier revisions, in which an answer waits for a client that is away when it comes.
//!
//! The stream of an answer may end before the answer is there: the connection breaks, or the gateway ends it because streams may not last
//! longer (`stream` in its settings). The client comes back with the name of the last thing that it heard. What is said meanwhile is
//! taped from the moment on that nobody listens, which costs nothing as long as somebody does. Nobody is told when a connection breaks
//! without a word, so an answer that took its time is kept as well, also where somebody seemed to listen.

mod tapes;

use std::collections::{HashMap, HashSet};
use std::pin::Pin;
use std::sync::Mutex;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::{Stream, StreamExt as _, stream};
use rmcp::model::{ClientJsonRpcMessage, JsonRpcMessage, ProtocolVersion, ServerJsonRpcMessage, ServerResult};
use rmcp::transport::streamable_http_server::session::local::{LocalSessionManager, LocalSessionManagerError, SessionError};
use rmcp::transport::streamable_http_server::session::{RestoreOutcome, ServerSseMessage, SessionId, SessionManager};
use tokio::runtime::Handle;
use tokio::time::{Instant, Sleep};
use tokio_util::sync::CancellationToken;

use self::tapes::{Tapes, is_answer};
use super::sessions::Owner;
use crate::gateway::{Gateway, lock};

/// How long a call takes whose answer is kept although somebody seemed to listen.
const SLOW: Duration = Duration::from_secs(1);
type Events = Pin<Box<dyn Stream<Item = ServerSseMessage> + Send + Sync>>;
type Refused = LocalSessionManagerError;

/// Sessions of earlier revisions.
pub(crate) struct Returning {
    pub(super) local: LocalSessionManager,
    gateway: Gateway,
    tapes: Tapes,
    /// Those whose clients come back for the rest of a stream that ends early: from 2025-11-25 on they do.
    known_to_return: Mutex<HashSet<SessionId>>,
    /// Whose each is. One that has ended is nobody's.
    pub(super) owners: Mutex<HashMap<SessionId, Owner>>,
}

impl Returning {
    pub(super) fn new(gateway: Gateway) -> Self {
        let mut local = LocalSessionManager::default();
        // To the library a call that takes its time is no sign of life.
        local.session_config.keep_alive = None;
        Self { local, gateway, tapes: Tapes::default(), known_to_return: Mutex::default(), owners: Mutex::default() }
    }

    /// What something is refused for. A session that has ended by itself is not known any more: whoever is told so begins another.
    async fn refused(&self, id: &SessionId, why: Refused) -> Refused {
        if matches!(why, Refused::SessionNotFound(_) | Refused::SessionError(SessionError::SessionServiceTerminated)) {
            drop(self.close_session(id).await);
        }
        why
    }

    /// A stream that ends with the answer, or earlier where its client knows to come back and streams may not last longer.
    fn heard(&self, session: &SessionId, rest: Rest) -> Events {
        let returns = || lock(&self.known_to_return).contains(session);
        let life = self.gateway.running().settings.stream.filter(|_| returns());
        let keeper = Keeper { tapes: self.tapes.clone(), session: session.clone(), closed: self.gateway.0.closed.clone() };
        Box::pin(Heard {
            rest: Some(rest),
            begun: Instant::now(),
            end: life.map(|life| Box::pin(tokio::time::sleep(life))),
            stop: self.gateway.0.stop.clone(),
            keeper,
        })
    }
}

/// The request whose stream something was said in. What was said in none has a shorter name.
fn request_of(event: &str) -> Option<&str> {
    event.split_once('/').map(|(_, request)| request)
}

impl SessionManager for Returning {
    type Error = Refused;
    type Transport = <LocalSessionManager as SessionManager>::Transport;

    async fn create_session(&self) -> Result<(SessionId, Self::Transport), Refused> {
        self.local.create_session().await
    }

    async fn initialize_session(&self, id: &SessionId, message: ClientJsonRpcMessage) -> Result<ServerJsonRpcMessage, Refused> {
        let answer = self.local.initialize_session(id, message).await?;
        if let JsonRpcMessage::Response(response) = &answer
            && let ServerResult::InitializeResult(agreed) = &response.result
            && agreed.protocol_version >= ProtocolVersion::V_2025_11_25
        {
            lock(&self.known_to_return).insert(id.clone());
        }
        // Who is refused has no session.
        if matches!(answer, JsonRpcMessage::Error(_)) {
            drop(self.close_session(id).await);
        }
        Ok(answer)
    }

    async fn has_session(&self, id: &SessionId) -> Result<bool, Refused> {
        self.local.has_session(id).await
    }

    async fn close_session(&self, id: &SessionId) -> Result<(), Refused> {
        self.tapes.forget(id);
        lock(&self.known_to_return).remove(id);
        drop(lock(&self.owners).remove(id));
        self.local.close_session(id).await
    }

    async fn create_stream(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Refused> {
        match self.local.create_stream(id, message).await {
            Ok(events) => Ok(self.heard(id, Rest { events: Box::pin(events), request: None, resumed: false, taped: false })),
            Err(why) => Err(self.refused(id, why).await),
        }
    }

    async fn accept_message(&self, id: &SessionId, message: ClientJsonRpcMessage) -> Result<(), Refused> {
        match self.local.accept_message(id, message).await {
            Ok(()) => Ok(()),
            Err(why) => Err(self.refused(id, why).await),
        }
    }

    async fn create_standalone_stream(
        &self,
        id: &SessionId,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Refused> {
        match self.local.create_standalone_stream(id).await {
            Ok(events) => Ok(events),
            Err(why) => Err(self.refused(id, why).await),
        }
    }

    async fn resume(&self, id: &SessionId, last: String) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Refused> {
        let Some(request) = request_of(&last).map(str::to_owned) else {
            return match self.local.resume(id, last).await {
                Ok(rest) => Ok(Box::pin(rest) as Events),
                Err(why) => Err(self.refused(id, why).await),
            };
        };
        let taped = self.tapes.replay(id, &request, last.clone());
        let (rest, taped): (Events, bool) = match taped {
            Some(taped) => (Box::pin(taped), true),
            None => match self.local.resume(id, last.clone()).await {
                Ok(rest) => (Box::pin(rest), false),
                Err(why) => return Err(self.refused(id, why).await),
            },
        };
        // Whoever is sent away from this one as well has a name to come back with, whatever is said in it. The library says the last
        // thing again.
        let retry = self.local.session_config.sse_retry.unwrap_or_default();
        let (first, known) = (ServerSseMessage::priming(last.clone(), retry), last);
        let rest = rest.filter(move |event| std::future::ready(event.event_id.as_ref() != Some(&known)));
        let events = Box::pin(stream::once(std::future::ready(first)).chain(rest));
        Ok(self.heard(id, Rest { events, request: Some(request), resumed: true, taped }))
    }

    async fn restore_session(&self, id: SessionId) -> Result<RestoreOutcome<Self::Transport>, Refused> {
        self.local.restore_session(id).await
    }
}

/// What is still to be said.
struct Rest {
    events: Events,
    /// Known from the first thing that is said on.
    request: Option<String>,
    /// Somebody has come back for it.
    resumed: bool,
    /// It comes from a tape.
    taped: bool,
}

/// A stream that somebody listens to. Where they stop before the answer, the rest is taped.
struct Heard {
    /// `None` once there is nothing more to come.
    rest: Option<Rest>,
    begun: Instant,
    end: Option<Pin<Box<Sleep>>>,
    /// Nobody is sent away who could not come back.
    stop: CancellationToken,
    keeper: Keeper,
}

impl Stream for Heard {
    type Item = ServerSseMessage;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<ServerSseMessage>> {
        let this = &mut *self;
        let Some(rest) = &mut this.rest else { return Poll::Ready(None) };
        let Poll::Ready(said) = rest.events.as_mut().poll_next(context) else {
            // Who has heard nothing yet has no name to come back with.
            if let (Some(end), true) = (&mut this.end, rest.request.is_some()) {
                ready!(end.as_mut().poll(context));
                this.end = None;
                if !this.stop.is_cancelled() {
                    return Poll::Ready(None);
                }
            }
            return Poll::Pending;
        };
        match &said {
            Some(event) if !is_answer(event) => {
                let named = || event.event_id.as_deref().and_then(request_of).map(str::to_owned);
                rest.request = rest.request.take().or_else(named);
            }
            ended => {
                let slow = (rest.resumed || this.begun.elapsed() >= SLOW) && !rest.taped;
                if let (Some(answer), Some(request), true) = (ended, &rest.request, slow) {
                    this.keeper.tapes.keep(&this.keeper.session, request, answer.clone());
                }
                this.rest = None;
            }
        }
        Poll::Ready(said)
    }
}

impl Drop for Heard {
    fn drop(&mut self) {
        // What comes from a tape is on it.
        if let Some(Rest { events, request: Some(request), taped: false, .. }) = self.rest.take() {
            self.keeper.keep(request, events);
        }
    }
}

/// Who tapes what nobody listens to.
struct Keeper {
    tapes: Tapes,
    session: SessionId,
    closed: CancellationToken,
}

impl Keeper {
    fn keep(&self, request: String, mut rest: Events) {
        let Ok(runtime) = Handle::try_current() else { return };
        let Some(number) = self.tapes.begin(&self.session, &request) else { return };
        let (tapes, session, closed) = (self.tapes.clone(), self.session.clone(), self.closed.clone());
        runtime.spawn(async move {
            let taping = async {
                while let Some(event) = rest.next().await {
                    if !tapes.add(&session, &request, number, event) {
                        break;
                    }
                }
            };
            closed.run_until_cancelled(taping).await;
            tapes.end(&session, &request, number);
        });
    }
}
