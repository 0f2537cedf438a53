//! Buffers events that no client was connected to receive.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::{Stream, stream};
use rmcp::model::JsonRpcMessage;
use rmcp::transport::streamable_http_server::session::{ServerSseMessage, SessionId};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::gateway::lock;

/// How long an answer is kept.
const BUFFERED_ANSWER_TTL: Duration = Duration::from_secs(5 * 60);
/// Maximum number of events in a buffer, with the answer.
const MAX_EVENTS_PER_BUFFER: usize = 64;
/// Maximum number of buffers of a session that contain an answer.
const MAX_ANSWERS_PER_SESSION: usize = 64;
/// Maximum size of all buffers. Above it, the session with the most bytes loses its oldest buffer.
const MAX_TOTAL_BUFFER_BYTES: usize = 256 << 20;

pub(crate) fn is_answer(event: &ServerSseMessage) -> bool {
    matches!(event.message.as_deref(), Some(JsonRpcMessage::Response(_) | JsonRpcMessage::Error(_)))
}

/// Buffers of events, by session and request.
#[derive(Clone, Default)]
pub(crate) struct EventBuffers(Arc<Mutex<EventBufferIndex>>);

#[derive(Default)]
struct EventBufferIndex {
    sessions: HashMap<SessionId, HashMap<String, EventBuffer>>,
    bytes: usize,
    /// Number of buffers that were ever created.
    created: u64,
    last_sweep: Option<Instant>,
}

struct EventBuffer {
    /// Distinguishes it from another buffer of the same request.
    id: u64,
    events: VecDeque<(ServerSseMessage, usize)>,
    bytes: usize,
    /// Number of streams that write. A client that resumes before its disconnect is noticed adds
    /// one.
    writers: usize,
    /// Time of the answer.
    ended_at: Option<Instant>,
    changed: Arc<Notify>,
}

impl EventBufferIndex {
    fn buffer(
        &mut self,
        session: &SessionId,
        request: &str,
        number: u64,
    ) -> Option<&mut EventBuffer> {
        self.sessions.get_mut(session)?.get_mut(request).filter(|tape| tape.id == number)
    }

    /// Opens the buffer of a request; `None` if it already has the answer.
    fn open(&mut self, session: &SessionId, request: &str) -> Option<u64> {
        self.remove_expired();
        if let Some(tape) = self.sessions.get_mut(session).and_then(|tapes| tapes.get_mut(request))
        {
            tape.writers += 1;
            return tape.ended_at.is_none().then_some(tape.id);
        }
        self.created += 1;
        let tape = EventBuffer {
            id: self.created,
            events: VecDeque::new(),
            bytes: 0,
            writers: 1,
            ended_at: None,
            changed: Arc::default(),
        };
        self.sessions.entry(session.clone()).or_default().insert(request.to_owned(), tape);
        Some(self.created)
    }

    /// Adds an event to a buffer; false if the buffer does not exist any more.
    fn push(
        &mut self,
        session: &SessionId,
        request: &str,
        number: u64,
        event: ServerSseMessage,
        bytes: usize,
    ) -> bool {
        let Some(tape) = self.buffer(session, request, number) else { return false };
        // Events after the answer, and duplicates, are ignored.
        let known = |(known, _): &(ServerSseMessage, usize)| {
            known.event_id.is_some() && known.event_id == event.event_id
        };
        if tape.ended_at.is_some() || tape.events.iter().any(known) {
            return true;
        }
        tape.events.push_back((event, bytes));
        // The answer is the last event, so it is never dropped here.
        let gone = if tape.events.len() > MAX_EVENTS_PER_BUFFER {
            tape.events.pop_front().map_or(0, |(_, bytes)| bytes)
        } else {
            0
        };
        tape.bytes = tape.bytes + bytes - gone;
        tape.changed.notify_waiters();
        self.bytes = self.bytes + bytes - gone;
        let all = |tapes: &HashMap<String, EventBuffer>| {
            tapes.values().map(|tape| tape.bytes).sum::<usize>()
        };
        while self.bytes > MAX_TOTAL_BUFFER_BYTES {
            let most = self
                .sessions
                .iter()
                .max_by_key(|(_, tapes)| all(tapes))
                .map(|(session, _)| session.clone());
            let Some(session) = most else { break };
            self.drop_oldest(&session, |_| true);
        }
        true
    }

    /// Removes a writer of a buffer. A buffer that ends without an answer is dropped.
    fn close(&mut self, session: &SessionId, request: &str, number: u64) {
        let Some(tape) = self.buffer(session, request, number) else { return };
        tape.writers -= 1;
        let answered = tape.events.back().is_some_and(|(event, _)| is_answer(event));
        if tape.writers > 0 && !answered {
            return;
        }
        tape.ended_at = Some(Instant::now());
        tape.changed.notify_waiters();
        if !answered {
            return self.drop_buffer(session, request);
        }
        // The number of running calls limits the number of unfinished buffers.
        let over = self
            .sessions
            .get(session)
            .into_iter()
            .flatten()
            .filter(|(_, tape)| tape.ended_at.is_some())
            .count();
        if over > MAX_ANSWERS_PER_SESSION {
            self.drop_oldest(session, |tape| tape.ended_at.is_some());
        }
    }

    fn drop_buffer(&mut self, session: &SessionId, request: &str) {
        let Some(tapes) = self.sessions.get_mut(session) else { return };
        if let Some(tape) = tapes.remove(request) {
            self.bytes -= tape.bytes;
            tape.changed.notify_waiters();
        }
        if tapes.is_empty() {
            self.sessions.remove(session);
        }
    }

    /// Drops the oldest of the matching buffers of a session.
    fn drop_oldest(&mut self, session: &SessionId, which: impl Fn(&EventBuffer) -> bool) {
        let tapes =
            self.sessions.get(session).into_iter().flatten().filter(|(_, tape)| which(tape));
        if let Some(request) =
            tapes.min_by_key(|(_, tape)| tape.id).map(|(request, _)| request.clone())
        {
            tracing::warn!(
                "dropped a buffered answer that its client did not fetch, to make room for others"
            );
            self.drop_buffer(session, &request);
        }
    }

    /// Removes expired buffers, at intervals.
    fn remove_expired(&mut self) {
        if self.last_sweep.is_some_and(|at| at.elapsed() < BUFFERED_ANSWER_TTL / 10) {
            return;
        }
        self.last_sweep = Some(Instant::now());
        for tapes in self.sessions.values_mut() {
            tapes.retain(|_, tape| {
                let stays = tape.ended_at.is_none_or(|over| over.elapsed() < BUFFERED_ANSWER_TTL);
                self.bytes -= if stays { 0 } else { tape.bytes };
                stays
            });
        }
        self.sessions.retain(|_, tapes| !tapes.is_empty());
    }
}

/// Returns the size of an event as text.
fn event_bytes(event: &ServerSseMessage) -> usize {
    event
        .message
        .as_ref()
        .and_then(|message| serde_json::to_vec(message).ok())
        .map_or(0, |text| text.len())
}

impl EventBuffers {
    pub(crate) fn open(&self, session: &SessionId, request: &str) -> Option<u64> {
        lock(&self.0).open(session, request)
    }

    pub(crate) fn push(
        &self,
        session: &SessionId,
        request: &str,
        number: u64,
        event: ServerSseMessage,
    ) -> bool {
        let bytes = event_bytes(&event);
        lock(&self.0).push(session, request, number, event, bytes)
    }

    pub(crate) fn close(&self, session: &SessionId, request: &str, number: u64) {
        lock(&self.0).close(session, request, number);
    }

    /// Buffers an answer that was sent, because the client may not have received it.
    pub(crate) fn store_answer(
        &self,
        session: &SessionId,
        request: &str,
        answer: ServerSseMessage,
    ) {
        let bytes = event_bytes(&answer);
        let mut all = lock(&self.0);
        let Some(number) = all.open(session, request) else { return };
        all.push(session, request, number, answer, bytes);
        all.close(session, request, number);
    }

    pub(crate) fn drop_session(&self, session: &SessionId) {
        let mut all = lock(&self.0);
        let requests: Vec<String> =
            all.sessions.get(session).into_iter().flat_map(HashMap::keys).cloned().collect();
        for request in requests {
            all.drop_buffer(session, &request);
        }
    }

    /// Returns the buffered events of a request after `last`, and those that follow.
    ///
    /// `None` if there is no buffer.
    pub(crate) fn replay(
        &self,
        session: &SessionId,
        request: &str,
        last: String,
    ) -> Option<impl Stream<Item = ServerSseMessage> + use<>> {
        let number = lock(&self.0).sessions.get(session)?.get(request)?.id;
        let (tapes, session, request) = (self.clone(), session.clone(), request.to_owned());
        Some(stream::unfold(last, move |last| {
            let (tapes, session, request) = (tapes.clone(), session.clone(), request.clone());
            async move {
                loop {
                    let changed = {
                        let mut all = lock(&tapes.0);
                        let tape = all.buffer(&session, &request, number)?;
                        // If `last` is not in the buffer, it is older than all of it.
                        let known = tape
                            .events
                            .iter()
                            .rposition(|(event, _)| event.event_id.as_deref() == Some(&*last));
                        if let Some((event, _)) = tape.events.get(known.map_or(0, |at| at + 1)) {
                            return Some((event.clone(), event.event_id.clone().unwrap_or(last)));
                        }
                        if tape.ended_at.is_some() {
                            return None;
                        }
                        // Registered under the lock, so that no event is missed.
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
    use futures_util::StreamExt as _;
    use rmcp::model::{EmptyResult, JsonRpcResponse, NumberOrString, ServerResult};

    use super::*;

    fn answer(name: &str) -> ServerSseMessage {
        let response = JsonRpcResponse {
            jsonrpc: Default::default(),
            id: NumberOrString::Number(1),
            result: ServerResult::EmptyResult(EmptyResult {}),
        };
        ServerSseMessage::new(name, JsonRpcMessage::Response(response))
    }

    async fn count_replayed_events(
        tapes: &EventBuffers,
        session: &SessionId,
        request: &str,
    ) -> usize {
        match tapes.replay(session, request, format!("0/{request}")) {
            Some(replay) => replay.count().await,
            None => 0,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn oldest_answers_are_dropped_and_expire() {
        let (tapes, session, other): (_, SessionId, SessionId) =
            (EventBuffers::default(), "one".into(), "two".into());
        for n in 0..MAX_ANSWERS_PER_SESSION + 1 {
            tapes.store_answer(&session, &n.to_string(), answer("1"));
        }
        tapes.store_answer(&other, "0", answer("1"));
        assert_eq!(
            (
                count_replayed_events(&tapes, &session, "0").await,
                count_replayed_events(&tapes, &session, "1").await
            ),
            (0, 1)
        );
        assert_eq!(count_replayed_events(&tapes, &other, "0").await, 1);
        // Only finished buffers count for the limit.
        let numbers: Vec<u64> = (0..2 * MAX_ANSWERS_PER_SESSION)
            .filter_map(|n| tapes.open(&other, &format!("open {n}")))
            .collect();
        assert!(tapes.push(&other, "open 0", numbers[0], answer("1")));
        tokio::time::advance(BUFFERED_ANSWER_TTL).await;
        tapes.store_answer(&other, "new", answer("1"));
        assert_eq!(
            (
                count_replayed_events(&tapes, &session, "1").await,
                count_replayed_events(&tapes, &other, "0").await
            ),
            (0, 0)
        );
        assert_eq!(count_replayed_events(&tapes, &other, "new").await, 1);
        tapes.drop_session(&other);
        let all = lock(&tapes.0);
        assert!(all.bytes == 0 && all.sessions.is_empty(), "{} bytes", all.bytes);
    }

    #[tokio::test]
    async fn newest_events_are_kept() {
        let (tapes, session): (_, SessionId) = (EventBuffers::default(), "one".into());
        let number = tapes.open(&session, "7").unwrap();
        for n in 1..=2 * MAX_EVENTS_PER_BUFFER {
            assert!(tapes.push(
                &session,
                "7",
                number,
                ServerSseMessage::priming(format!("{n}/7"), Duration::ZERO)
            ));
        }
        assert!(tapes.push(&session, "7", number, answer("last/7")));
        tapes.close(&session, "7", number);
        let heard: Vec<_> = tapes.replay(&session, "7", "0/7".to_owned()).unwrap().collect().await;
        assert_eq!(
            (heard.len(), heard.last().is_some_and(is_answer)),
            (MAX_EVENTS_PER_BUFFER, true)
        );
        // A client that has some of the events receives the rest.
        let heard: Vec<_> = tapes
            .replay(&session, "7", format!("{}/7", 2 * MAX_EVENTS_PER_BUFFER))
            .unwrap()
            .collect()
            .await;
        assert_eq!(heard.len(), 1);
        // A disconnect that is noticed late does not affect a client that has resumed since.
        assert_eq!(tapes.open(&session, "7"), None);
        let (early, late) =
            (tapes.open(&session, "9").unwrap(), tapes.open(&session, "9").unwrap());
        tapes.close(&session, "9", late);
        assert!(tapes.push(&session, "9", early, answer("1/9")));
        tapes.close(&session, "9", early);
        assert!(tapes.push(&session, "9", early, ServerSseMessage::priming("0/9", Duration::ZERO)));
        assert_eq!(count_replayed_events(&tapes, &session, "9").await, 1);
        // A stream that ends without an answer cannot be resumed.
        let number = tapes.open(&session, "8").unwrap();
        tapes.close(&session, "8", number);
        assert!(tapes.replay(&session, "8", "0/8".to_owned()).is_none());
    }
}
