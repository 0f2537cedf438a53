//! Sessions of earlier revisions, in which an answer waits for a client that is away when it comes.
//!
//! The stream of an answer may end before the answer is there: the connection breaks, or the gateway ends it because streams may not last
//! longer (`stream` in its settings). The client comes back with the name of the last thing that it heard. What is said meanwhile is
//! taped from the moment on that nobody listens, which costs nothing as long as somebody does.

use std::collections::{HashMap, VecDeque};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::{Stream, StreamExt as _, stream};
use http::request::Parts;
use rmcp::model::{ClientJsonRpcMessage, GetExtensions as _, JsonRpcMessage, ProtocolVersion, ServerJsonRpcMessage};
use rmcp::transport::streamable_http_server::session::local::{LocalSessionManager, LocalSessionManagerError};
use rmcp::transport::streamable_http_server::session::{RestoreOutcome, ServerSseMessage, SessionId, SessionManager};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::Sleep;
use tokio_util::sync::CancellationToken;

use super::sessions::SESSION_LIFE;
use crate::gateway::{Gateway, lock};

/// How long an answer waits for its client.
const WAITS: Duration = Duration::from_secs(5 * 60);
/// How many of the last things that were said wait with it.
const WORDS: usize = 64;
/// How many answers of one session wait.
const ANSWERS: usize = 64;
/// How many bytes all of them have. Over it, the session that has most of them loses its oldest.
const BYTES: usize = 256 << 20;

type Events = Pin<Box<dyn Stream<Item = ServerSseMessage> + Send + Sync>>;
type Refused = LocalSessionManagerError;

/// Sessions of earlier revisions.
pub(crate) struct Returning {
    pub(super) local: LocalSessionManager,
    gateway: Gateway,
    tapes: Tapes,
}

impl Returning {
    pub(super) fn new(gateway: Gateway) -> Self {
        let mut local = LocalSessionManager::default();
        local.session_config.keep_alive = Some(SESSION_LIFE);
        Self { local, gateway, tapes: Tapes::default() }
    }

    /// A stream that ends with the answer, or earlier where its client knows to come back and streams may not last longer.
    fn heard(&self, session: &SessionId, request: Option<String>, rest: Events, returns: bool) -> Events {
        let end = self.gateway.running().settings.stream.filter(|_| returns).map(|life| Box::pin(tokio::time::sleep(life)));
        let keeper = Keeper { tapes: self.tapes.clone(), session: session.clone(), closed: self.gateway.0.closed.clone() };
        Box::pin(Heard { rest: Some(rest), request, end, keeper })
    }
}

/// The request whose stream something was said in. What was said in none has a shorter name.
fn request_of(event: &str) -> Option<&str> {
    event.split_once('/').map(|(_, request)| request)
}

fn is_answer(event: &ServerSseMessage) -> bool {
    matches!(event.message.as_deref(), Some(JsonRpcMessage::Response(_) | JsonRpcMessage::Error(_)))
}

/// Whether a client comes back for the rest of a stream that ends early: from 2025-11-25 on they do.
fn returns(message: &ClientJsonRpcMessage) -> bool {
    let ClientJsonRpcMessage::Request(request) = message else { return false };
    let said = request.request.extensions().get::<Parts>().and_then(|parts| parts.headers.get("mcp-protocol-version"));
    said.is_some_and(|version| version.as_bytes() >= ProtocolVersion::V_2025_11_25.as_str().as_bytes())
}

impl SessionManager for Returning {
    type Error = Refused;
    type Transport = <LocalSessionManager as SessionManager>::Transport;

    async fn create_session(&self) -> Result<(SessionId, Self::Transport), Refused> {
        self.local.create_session().await
    }

    async fn initialize_session(&self, id: &SessionId, message: ClientJsonRpcMessage) -> Result<ServerJsonRpcMessage, Refused> {
        self.local.initialize_session(id, message).await
    }

    async fn has_session(&self, id: &SessionId) -> Result<bool, Refused> {
        self.local.has_session(id).await
    }

    async fn close_session(&self, id: &SessionId) -> Result<(), Refused> {
        self.tapes.forget(id);
        self.local.close_session(id).await
    }

    async fn create_stream(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Refused> {
        let returns = returns(&message);
        let rest = self.local.create_stream(id, message).await?;
        Ok(self.heard(id, None, Box::pin(rest), returns))
    }

    async fn accept_message(&self, id: &SessionId, message: ClientJsonRpcMessage) -> Result<(), Refused> {
        self.local.accept_message(id, message).await
    }

    async fn create_standalone_stream(
        &self,
        id: &SessionId,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Refused> {
        self.local.create_standalone_stream(id).await
    }

    async fn resume(&self, id: &SessionId, last: String) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Refused> {
        let request = request_of(&last).map(str::to_owned);
        let taped = request.as_ref().and_then(|request| self.tapes.replay(id, request, last.clone()));
        let rest: Events = match taped {
            Some(taped) => Box::pin(taped),
            None => Box::pin(self.local.resume(id, last).await?),
        };
        // Who has come back once comes back again.
        Ok(self.heard(id, request, rest, true))
    }

    async fn restore_session(&self, id: SessionId) -> Result<RestoreOutcome<Self::Transport>, Refused> {
        self.local.restore_session(id).await
    }
}

/// A stream that somebody listens to. Where they stop before the answer, the rest is taped.
struct Heard {
    /// `None` once there is nothing more to come.
    rest: Option<Events>,
    /// Known from the first thing that is said on.
    request: Option<String>,
    end: Option<Pin<Box<Sleep>>>,
    keeper: Keeper,
}

impl Stream for Heard {
    type Item = ServerSseMessage;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<ServerSseMessage>> {
        let this = &mut *self;
        let Some(rest) = &mut this.rest else { return Poll::Ready(None) };
        let Poll::Ready(said) = rest.as_mut().poll_next(context) else {
            // Who has heard nothing yet has no name to come back with.
            if let (Some(end), true) = (&mut this.end, this.request.is_some()) {
                ready!(end.as_mut().poll(context));
                this.end = None;
                return Poll::Ready(None);
            }
            return Poll::Pending;
        };
        match &said {
            Some(event) if !is_answer(event) => {
                let named = || event.event_id.as_deref().and_then(request_of).map(str::to_owned);
                this.request = this.request.take().or_else(named);
            }
            _ => this.rest = None,
        }
        Poll::Ready(said)
    }
}

impl Drop for Heard {
    fn drop(&mut self) {
        if let (Some(rest), Some(request)) = (self.rest.take(), self.request.take()) {
            self.keeper.keep(request, rest);
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
                drop(rest);
                if tapes.end(&session, &request, number) {
                    tokio::time::sleep(WAITS).await;
                }
            };
            closed.run_until_cancelled(taping).await;
            tapes.remove(&session, &request, number);
        });
    }
}

/// What was said while nobody listened, by session and request.
#[derive(Clone, Default)]
struct Tapes(Arc<Mutex<All>>);

#[derive(Default)]
struct All {
    sessions: HashMap<SessionId, HashMap<String, Tape>>,
    bytes: usize,
    /// How many tapes there ever were.
    count: u64,
}

struct Tape {
    /// Tells it from another of the same request.
    number: u64,
    events: VecDeque<(ServerSseMessage, usize)>,
    bytes: usize,
    /// Nothing more will be said.
    over: bool,
    changed: Arc<Notify>,
}

impl Tape {
    fn is_answered(&self) -> bool {
        self.events.back().is_some_and(|(event, _)| is_answer(event))
    }

    /// Whether there is an answer on it, or will be.
    fn is_good(&self) -> bool {
        !self.over || self.is_answered()
    }
}

impl All {
    fn tape(&mut self, session: &SessionId, request: &str, number: u64) -> Option<&mut Tape> {
        self.sessions.get_mut(session)?.get_mut(request).filter(|tape| tape.number == number)
    }

    fn drop_tape(&mut self, session: &SessionId, request: &str) {
        let Some(tapes) = self.sessions.get_mut(session) else { return };
        if let Some(tape) = tapes.remove(request) {
            self.bytes -= tape.bytes;
            tape.changed.notify_waiters();
        }
        if tapes.is_empty() {
            self.sessions.remove(session);
        }
    }

    /// Drops the tape of a session that was begun first.
    fn drop_oldest(&mut self, session: &SessionId) {
        let tapes = self.sessions.get(session).into_iter().flatten();
        if let Some(request) = tapes.min_by_key(|(_, tape)| tape.number).map(|(request, _)| request.clone()) {
            tracing::warn!("an answer that nobody came back for makes room for others");
            self.drop_tape(session, &request);
        }
    }

    /// Makes room where all of them are too much: at whoever takes most of it.
    fn make_room(&mut self) {
        let bytes = |tapes: &HashMap<String, Tape>| tapes.values().map(|tape| tape.bytes).sum::<usize>();
        while self.bytes > BYTES {
            let most = self.sessions.iter().max_by_key(|(_, tapes)| bytes(tapes)).map(|(session, _)| session.clone());
            let Some(session) = most else { return };
            self.drop_oldest(&session);
        }
    }
}

impl Tapes {
    /// Begins a tape; `None` where there is one already.
    fn begin(&self, session: &SessionId, request: &str) -> Option<u64> {
        let mut all = lock(&self.0);
        let tapes = all.sessions.get(session);
        // Whoever listened to that one heard it from a tape, which goes on.
        if tapes.and_then(|tapes| tapes.get(request)).is_some_and(Tape::is_good) {
            return None;
        }
        let full = tapes.is_some_and(|tapes| tapes.len() >= ANSWERS);
        all.drop_tape(session, request);
        if full {
            all.drop_oldest(session);
        }
        all.count += 1;
        let number = all.count;
        let tape = Tape { number, events: VecDeque::new(), bytes: 0, over: false, changed: Arc::default() };
        all.sessions.entry(session.clone()).or_default().insert(request.to_owned(), tape);
        Some(number)
    }

    /// Tapes something; false where the tape is gone.
    fn add(&self, session: &SessionId, request: &str, number: u64, event: ServerSseMessage) -> bool {
        let bytes = event.message.as_ref().and_then(|message| serde_json::to_vec(message).ok()).map_or(0, |text| text.len());
        let mut all = lock(&self.0);
        let Some(tape) = all.tape(session, request, number) else { return false };
        tape.events.push_back((event, bytes));
        // The answer comes last, and stays.
        let gone = if tape.events.len() > WORDS { tape.events.pop_front().map_or(0, |(_, bytes)| bytes) } else { 0 };
        tape.bytes = tape.bytes + bytes - gone;
        tape.changed.notify_waiters();
        all.bytes = all.bytes + bytes - gone;
        all.make_room();
        true
    }

    /// Nothing more comes; whether there is an answer to wait with.
    fn end(&self, session: &SessionId, request: &str, number: u64) -> bool {
        let mut all = lock(&self.0);
        let Some(tape) = all.tape(session, request, number) else { return false };
        tape.over = true;
        tape.changed.notify_waiters();
        tape.is_answered()
    }

    fn remove(&self, session: &SessionId, request: &str, number: u64) {
        let mut all = lock(&self.0);
        if all.tape(session, request, number).is_some() {
            all.drop_tape(session, request);
        }
    }

    fn forget(&self, session: &SessionId) {
        let mut all = lock(&self.0);
        let requests: Vec<String> = all.sessions.get(session).into_iter().flat_map(HashMap::keys).cloned().collect();
        for request in requests {
            all.drop_tape(session, &request);
        }
    }

    /// What was taped of a request after something, and what is still to come; `None` where nothing was, or where it broke off.
    fn replay(&self, session: &SessionId, request: &str, last: String) -> Option<impl Stream<Item = ServerSseMessage> + use<>> {
        let number = lock(&self.0).sessions.get(session)?.get(request).filter(|tape| tape.is_good())?.number;
        let (tapes, session, request) = (self.clone(), session.clone(), request.to_owned());
        Some(stream::unfold(last, move |last| {
            let (tapes, session, request) = (tapes.clone(), session.clone(), request.clone());
            async move {
                loop {
                    let changed = {
                        let mut all = lock(&tapes.0);
                        let tape = all.tape(&session, &request, number)?;
                        // Whoever does not know any of it knows what came before.
                        let known = tape.events.iter().rposition(|(event, _)| event.event_id.as_deref() == Some(&*last));
                        if let Some((event, _)) = tape.events.get(known.map_or(0, |at| at + 1)) {
                            return Some((event.clone(), event.event_id.clone().unwrap_or(last)));
                        }
                        if tape.over {
                            return None;
                        }
                        // Before the lock is let go: what is said from here on is not missed.
                        Arc::clone(&tape.changed).notified_owned()
                    };
                    changed.await;
                }
            }
        }))
    }
}
