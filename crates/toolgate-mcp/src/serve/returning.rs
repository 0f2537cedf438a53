//! Sessions of earlier revisions, in which an answer waits for a client that is away when it comes.
//!
//! The stream of an answer may end before the answer is there: the connection breaks, or the gateway ends it because streams may not last
//! longer (`stream` in its settings). The client comes back with the name of the last thing that it heard. What is said meanwhile is
//! taped from the moment on that nobody listens, which costs nothing as long as somebody does. Nobody is told when a connection breaks
//! without a word, so an answer that took its time is kept as well, also where somebody seemed to listen.

use std::collections::{HashMap, HashSet, VecDeque};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::{Stream, StreamExt as _, stream};
use rmcp::model::{ClientJsonRpcMessage, JsonRpcMessage, ProtocolVersion, ServerJsonRpcMessage, ServerResult};
use rmcp::transport::streamable_http_server::session::local::{LocalSessionManager, LocalSessionManagerError};
use rmcp::transport::streamable_http_server::session::{RestoreOutcome, ServerSseMessage, SessionId, SessionManager};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::{Instant, Sleep};
use tokio_util::sync::CancellationToken;

use super::sessions::SESSION_LIFE;
use crate::gateway::{Gateway, lock};

/// How long an answer waits for its client.
const WAITS: Duration = Duration::from_secs(5 * 60);
/// How long a call takes whose answer is kept although somebody seemed to listen.
const SLOW: Duration = Duration::from_secs(1);
/// How many of the last things that were said wait, the answer among them.
const WORDS: usize = 64;
/// How many answers of one session wait.
const ANSWERS: usize = 64;
/// How many bytes all of them have as text. Over it, the session that has most of them loses its oldest.
const BYTES: usize = 256 << 20;

type Events = Pin<Box<dyn Stream<Item = ServerSseMessage> + Send + Sync>>;
type Refused = LocalSessionManagerError;

/// Sessions of earlier revisions.
pub(crate) struct Returning {
    pub(super) local: LocalSessionManager,
    gateway: Gateway,
    tapes: Tapes,
    /// Those whose clients come back for the rest of a stream that ends early: from 2025-11-25 on they do.
    known_to_return: Mutex<HashSet<SessionId>>,
}

impl Returning {
    pub(super) fn new(gateway: Gateway) -> Self {
        let mut local = LocalSessionManager::default();
        local.session_config.keep_alive = Some(SESSION_LIFE);
        Self { local, gateway, tapes: Tapes::default(), known_to_return: Mutex::default() }
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

fn is_answer(event: &ServerSseMessage) -> bool {
    matches!(event.message.as_deref(), Some(JsonRpcMessage::Response(_) | JsonRpcMessage::Error(_)))
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
        Ok(answer)
    }

    async fn has_session(&self, id: &SessionId) -> Result<bool, Refused> {
        self.local.has_session(id).await
    }

    async fn close_session(&self, id: &SessionId) -> Result<(), Refused> {
        self.tapes.forget(id);
        lock(&self.known_to_return).remove(id);
        self.local.close_session(id).await
    }

    async fn create_stream(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Refused> {
        let events = self.local.create_stream(id, message).await?;
        Ok(self.heard(id, Rest { events: Box::pin(events), request: None, resumed: false, taped: false }))
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
        let Some(request) = request_of(&last).map(str::to_owned) else {
            return self.local.resume(id, last).await.map(|rest| Box::pin(rest) as Events);
        };
        let taped = self.tapes.replay(id, &request, last.clone());
        let (rest, taped): (Events, bool) = match taped {
            Some(taped) => (Box::pin(taped), true),
            None => (Box::pin(self.local.resume(id, last.clone()).await?), false),
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

/// What was said while nobody listened, by session and request.
#[derive(Clone, Default)]
struct Tapes(Arc<Mutex<All>>);

#[derive(Default)]
struct All {
    sessions: HashMap<SessionId, HashMap<String, Tape>>,
    bytes: usize,
    /// How many tapes there ever were.
    count: u64,
    swept: Option<Instant>,
}

struct Tape {
    /// Tells it from another of the same request.
    number: u64,
    events: VecDeque<(ServerSseMessage, usize)>,
    bytes: usize,
    /// How many are at it. Whoever came back before it was noticed that they had gone has a stream of their own, in which the rest is said.
    writers: usize,
    /// Since when nothing more will be said.
    over: Option<Instant>,
    changed: Arc<Notify>,
}

impl All {
    fn tape(&mut self, session: &SessionId, request: &str, number: u64) -> Option<&mut Tape> {
        self.sessions.get_mut(session)?.get_mut(request).filter(|tape| tape.number == number)
    }

    /// The tape of a request; `None` where the answer is on one.
    fn begin(&mut self, session: &SessionId, request: &str) -> Option<u64> {
        self.sweep();
        if let Some(tape) = self.sessions.get_mut(session).and_then(|tapes| tapes.get_mut(request)) {
            tape.writers += 1;
            return tape.over.is_none().then_some(tape.number);
        }
        self.count += 1;
        let tape = Tape { number: self.count, events: VecDeque::new(), bytes: 0, writers: 1, over: None, changed: Arc::default() };
        self.sessions.entry(session.clone()).or_default().insert(request.to_owned(), tape);
        Some(self.count)
    }

    /// Puts something onto a tape; false where it is gone.
    fn add(&mut self, session: &SessionId, request: &str, number: u64, event: ServerSseMessage, bytes: usize) -> bool {
        let Some(tape) = self.tape(session, request, number) else { return false };
        // Behind the answer nothing comes, and nothing twice.
        let known = |(known, _): &(ServerSseMessage, usize)| known.event_id.is_some() && known.event_id == event.event_id;
        if tape.over.is_some() || tape.events.iter().any(known) {
            return true;
        }
        tape.events.push_back((event, bytes));
        // The answer comes last, and stays.
        let gone = if tape.events.len() > WORDS { tape.events.pop_front().map_or(0, |(_, bytes)| bytes) } else { 0 };
        tape.bytes = tape.bytes + bytes - gone;
        tape.changed.notify_waiters();
        self.bytes = self.bytes + bytes - gone;
        let all = |tapes: &HashMap<String, Tape>| tapes.values().map(|tape| tape.bytes).sum::<usize>();
        while self.bytes > BYTES {
            let most = self.sessions.iter().max_by_key(|(_, tapes)| all(tapes)).map(|(session, _)| session.clone());
            let Some(session) = most else { break };
            self.drop_oldest(&session, |_| true);
        }
        true
    }

    /// Nothing more comes. Without an answer there is nothing to come back for.
    fn end(&mut self, session: &SessionId, request: &str, number: u64) {
        let Some(tape) = self.tape(session, request, number) else { return };
        tape.writers -= 1;
        let answered = tape.events.back().is_some_and(|(event, _)| is_answer(event));
        if tape.writers > 0 && !answered {
            return;
        }
        tape.over = Some(Instant::now());
        tape.changed.notify_waiters();
        if !answered {
            return self.drop_tape(session, request);
        }
        // Those that are not over are as many as calls are under way.
        let over = self.sessions.get(session).into_iter().flatten().filter(|(_, tape)| tape.over.is_some()).count();
        if over > ANSWERS {
            self.drop_oldest(session, |tape| tape.over.is_some());
        }
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
    fn drop_oldest(&mut self, session: &SessionId, which: impl Fn(&Tape) -> bool) {
        let tapes = self.sessions.get(session).into_iter().flatten().filter(|(_, tape)| which(tape));
        if let Some(request) = tapes.min_by_key(|(_, tape)| tape.number).map(|(request, _)| request.clone()) {
            tracing::warn!("an answer that nobody came back for makes room for others");
            self.drop_tape(session, &request);
        }
    }

    /// Now and then, what has waited for long enough goes.
    fn sweep(&mut self) {
        if self.swept.is_some_and(|at| at.elapsed() < WAITS / 10) {
            return;
        }
        self.swept = Some(Instant::now());
        for tapes in self.sessions.values_mut() {
            tapes.retain(|_, tape| {
                let stays = tape.over.is_none_or(|over| over.elapsed() < WAITS);
                self.bytes -= if stays { 0 } else { tape.bytes };
                stays
            });
        }
        self.sessions.retain(|_, tapes| !tapes.is_empty());
    }
}

/// How much there is to keep of something.
fn bytes(event: &ServerSseMessage) -> usize {
    event.message.as_ref().and_then(|message| serde_json::to_vec(message).ok()).map_or(0, |text| text.len())
}

impl Tapes {
    fn begin(&self, session: &SessionId, request: &str) -> Option<u64> {
        lock(&self.0).begin(session, request)
    }

    fn add(&self, session: &SessionId, request: &str, number: u64, event: ServerSseMessage) -> bool {
        let bytes = bytes(&event);
        lock(&self.0).add(session, request, number, event, bytes)
    }

    fn end(&self, session: &SessionId, request: &str, number: u64) {
        lock(&self.0).end(session, request, number);
    }

    /// Keeps an answer that was said: perhaps nobody heard it.
    fn keep(&self, session: &SessionId, request: &str, answer: ServerSseMessage) {
        let bytes = bytes(&answer);
        let mut all = lock(&self.0);
        let Some(number) = all.begin(session, request) else { return };
        all.add(session, request, number, answer, bytes);
        all.end(session, request, number);
    }

    fn forget(&self, session: &SessionId) {
        let mut all = lock(&self.0);
        let requests: Vec<String> = all.sessions.get(session).into_iter().flat_map(HashMap::keys).cloned().collect();
        for request in requests {
            all.drop_tape(session, &request);
        }
    }

    /// What was taped of a request after something, and what is still to come; `None` where nothing was.
    fn replay(&self, session: &SessionId, request: &str, last: String) -> Option<impl Stream<Item = ServerSseMessage> + use<>> {
        let number = lock(&self.0).sessions.get(session)?.get(request)?.number;
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
                        if tape.over.is_some() {
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

#[cfg(test)]
mod tests {
    use rmcp::model::{EmptyResult, JsonRpcResponse, NumberOrString};

    use super::*;

    fn answer(name: &str) -> ServerSseMessage {
        let response = JsonRpcResponse {
            jsonrpc: Default::default(),
            id: NumberOrString::Number(1),
            result: ServerResult::EmptyResult(EmptyResult {}),
        };
        ServerSseMessage::new(name, JsonRpcMessage::Response(response))
    }

    async fn replayed(tapes: &Tapes, session: &SessionId, request: &str) -> usize {
        match tapes.replay(session, request, format!("0/{request}")) {
            Some(replay) => replay.count().await,
            None => 0,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn answers_make_room_for_newer_ones_and_go_after_a_while() {
        let (tapes, session, other): (_, SessionId, SessionId) = (Tapes::default(), "one".into(), "two".into());
        for n in 0..ANSWERS + 1 {
            tapes.keep(&session, &n.to_string(), answer("1"));
        }
        tapes.keep(&other, "0", answer("1"));
        assert_eq!((replayed(&tapes, &session, "0").await, replayed(&tapes, &session, "1").await), (0, 1));
        assert_eq!(replayed(&tapes, &other, "0").await, 1);
        // Only what is over has to make room.
        let numbers: Vec<u64> = (0..2 * ANSWERS).filter_map(|n| tapes.begin(&other, &format!("open {n}"))).collect();
        assert!(tapes.add(&other, "open 0", numbers[0], answer("1")));
        tokio::time::advance(WAITS).await;
        tapes.keep(&other, "new", answer("1"));
        assert_eq!((replayed(&tapes, &session, "1").await, replayed(&tapes, &other, "0").await), (0, 0));
        assert_eq!(replayed(&tapes, &other, "new").await, 1);
        tapes.forget(&other);
        let all = lock(&tapes.0);
        assert!(all.bytes == 0 && all.sessions.is_empty(), "{} bytes", all.bytes);
    }

    #[tokio::test]
    async fn of_much_that_was_said_the_newest_waits() {
        let (tapes, session): (_, SessionId) = (Tapes::default(), "one".into());
        let number = tapes.begin(&session, "7").unwrap();
        for n in 1..=2 * WORDS {
            assert!(tapes.add(&session, "7", number, ServerSseMessage::priming(format!("{n}/7"), Duration::ZERO)));
        }
        assert!(tapes.add(&session, "7", number, answer("last/7")));
        tapes.end(&session, "7", number);
        let heard: Vec<_> = tapes.replay(&session, "7", "0/7".to_owned()).unwrap().collect().await;
        assert_eq!((heard.len(), heard.last().is_some_and(is_answer)), (WORDS, true));
        // Whoever knows some of it hears the rest.
        let heard: Vec<_> = tapes.replay(&session, "7", format!("{}/7", 2 * WORDS)).unwrap().collect().await;
        assert_eq!(heard.len(), 1);
        // Whoever notices late that somebody has gone takes nothing away from those who came back since.
        assert_eq!(tapes.begin(&session, "7"), None);
        let (early, late) = (tapes.begin(&session, "9").unwrap(), tapes.begin(&session, "9").unwrap());
        tapes.end(&session, "9", late);
        assert!(tapes.add(&session, "9", early, answer("1/9")));
        tapes.end(&session, "9", early);
        assert!(tapes.add(&session, "9", early, ServerSseMessage::priming("0/9", Duration::ZERO)));
        assert_eq!(replayed(&tapes, &session, "9").await, 1);
        // What ends without an answer is nothing to come back for.
        let number = tapes.begin(&session, "8").unwrap();
        tapes.end(&session, "8", number);
        assert!(tapes.replay(&session, "8", "0/8".to_owned()).is_none());
    }
}
