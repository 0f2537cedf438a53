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
    /// Distinguishes the buffer from another buffer of the same request.
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
        self.sessions.get_mut(session)?.get_mut(request).filter(|buffer| buffer.id == number)
    }

    /// Opens the buffer of a request; `None` if it already has the answer.
    fn open(&mut self, session: &SessionId, request: &str) -> Option<u64> {
        self.remove_expired();
        if let Some(buffer) =
            self.sessions.get_mut(session).and_then(|buffers| buffers.get_mut(request))
        {
            buffer.writers += 1;
            return buffer.ended_at.is_none().then_some(buffer.id);
        }
        self.created += 1;
        let buffer = EventBuffer {
            id: self.created,
            events: VecDeque::new(),
            bytes: 0,
            writers: 1,
            ended_at: None,
            changed: Arc::default(),
        };
        self.sessions.entry(session.clone()).or_default().insert(request.to_owned(), buffer);
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
        let Some(buffer) = self.buffer(session, request, number) else { return false };
        // Events after the answer, and duplicates, are ignored.
        let known = |(known, _): &(ServerSseMessage, usize)| {
            known.event_id.is_some() && known.event_id == event.event_id
        };
        if buffer.ended_at.is_some() || buffer.events.iter().any(known) {
            return true;
        }
        buffer.events.push_back((event, bytes));
        // The answer is the last event, so it is never dropped here.
        let dropped_bytes = if buffer.events.len() > MAX_EVENTS_PER_BUFFER {
            buffer.events.pop_front().map_or(0, |(_, bytes)| bytes)
        } else {
            0
        };
        buffer.bytes = buffer.bytes + bytes - dropped_bytes;
        buffer.changed.notify_waiters();
        self.bytes = self.bytes + bytes - dropped_bytes;
        let all = |buffers: &HashMap<String, EventBuffer>| {
            buffers.values().map(|buffer| buffer.bytes).sum::<usize>()
        };
        while self.bytes > MAX_TOTAL_BUFFER_BYTES {
            let largest = self
                .sessions
                .iter()
                .max_by_key(|(_, buffers)| all(buffers))
                .map(|(session, _)| session.clone());
            let Some(session) = largest else { break };
            self.drop_oldest(&session, |_| true);
        }
        true
    }

    /// Removes a writer of a buffer. A buffer that ends without an answer is dropped.
    fn close(&mut self, session: &SessionId, request: &str, number: u64) {
        let Some(buffer) = self.buffer(session, request, number) else { return };
        buffer.writers -= 1;
        let answered = buffer.events.back().is_some_and(|(event, _)| is_answer(event));
        if buffer.writers > 0 && !answered {
            return;
        }
        buffer.ended_at = Some(Instant::now());
        buffer.changed.notify_waiters();
        if !answered {
            return self.drop_buffer(session, request);
        }
        // The number of running calls limits the number of unfinished buffers.
        let ended_count = self
            .sessions
            .get(session)
            .into_iter()
            .flatten()
            .filter(|(_, buffer)| buffer.ended_at.is_some())
            .count();
        if ended_count > MAX_ANSWERS_PER_SESSION {
            self.drop_oldest(session, |buffer| buffer.ended_at.is_some());
        }
    }

    fn drop_buffer(&mut self, session: &SessionId, request: &str) {
        let Some(buffers) = self.sessions.get_mut(session) else { return };
        if let Some(buffer) = buffers.remove(request) {
            self.bytes -= buffer.bytes;
            buffer.changed.notify_waiters();
        }
        if buffers.is_empty() {
            self.sessions.remove(session);
        }
    }

    /// Drops the oldest of the matching buffers of a session.
    fn drop_oldest(&mut self, session: &SessionId, is_match: impl Fn(&EventBuffer) -> bool) {
        let buffers =
            self.sessions.get(session).into_iter().flatten().filter(|(_, buffer)| is_match(buffer));
        if let Some(request) =
            buffers.min_by_key(|(_, buffer)| buffer.id).map(|(request, _)| request.clone())
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
        for buffers in self.sessions.values_mut() {
            buffers.retain(|_, buffer| {
                let is_kept = buffer.ended_at.is_none_or(|at| at.elapsed() < BUFFERED_ANSWER_TTL);
                self.bytes -= if is_kept { 0 } else { buffer.bytes };
                is_kept
            });
        }
        self.sessions.retain(|_, buffers| !buffers.is_empty());
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
    /// Returns `None` without a buffer.
    pub(crate) fn replay(
        &self,
        session: &SessionId,
        request: &str,
        last: String,
    ) -> Option<impl Stream<Item = ServerSseMessage> + use<>> {
        let number = lock(&self.0).sessions.get(session)?.get(request)?.id;
        let (buffers, session, request) = (self.clone(), session.clone(), request.to_owned());
        Some(stream::unfold(last, move |last| {
            let (buffers, session, request) = (buffers.clone(), session.clone(), request.clone());
            async move {
                loop {
                    let changed = {
                        let mut all = lock(&buffers.0);
                        let buffer = all.buffer(&session, &request, number)?;
                        // If `last` is not in the buffer, it is older than all of it.
                        let known = buffer
                            .events
                            .iter()
                            .rposition(|(event, _)| event.event_id.as_deref() == Some(&*last));
                        if let Some((event, _)) = buffer.events.get(known.map_or(0, |at| at + 1)) {
                            return Some((event.clone(), event.event_id.clone().unwrap_or(last)));
                        }
                        if buffer.ended_at.is_some() {
                            return None;
                        }
                        // Registered under the lock, so that no event is missed.
                        Arc::clone(&buffer.changed).notified_owned()
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
        buffers: &EventBuffers,
        session: &SessionId,
        request: &str,
    ) -> usize {
        match buffers.replay(session, request, format!("0/{request}")) {
            Some(replay) => replay.count().await,
            None => 0,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn oldest_answers_are_dropped_and_expire() {
        let (buffers, session, other): (_, SessionId, SessionId) =
            (EventBuffers::default(), "one".into(), "two".into());
        for n in 0..MAX_ANSWERS_PER_SESSION + 1 {
            buffers.store_answer(&session, &n.to_string(), answer("1"));
        }
        buffers.store_answer(&other, "0", answer("1"));
        assert_eq!(
            (
                count_replayed_events(&buffers, &session, "0").await,
                count_replayed_events(&buffers, &session, "1").await
            ),
            (0, 1)
        );
        assert_eq!(count_replayed_events(&buffers, &other, "0").await, 1);
        // Only finished buffers count for the limit.
        let numbers: Vec<u64> = (0..2 * MAX_ANSWERS_PER_SESSION)
            .filter_map(|n| buffers.open(&other, &format!("open {n}")))
            .collect();
        assert!(buffers.push(&other, "open 0", numbers[0], answer("1")));
        tokio::time::advance(BUFFERED_ANSWER_TTL).await;
        buffers.store_answer(&other, "new", answer("1"));
        assert_eq!(
            (
                count_replayed_events(&buffers, &session, "1").await,
                count_replayed_events(&buffers, &other, "0").await
            ),
            (0, 0)
        );
        assert_eq!(count_replayed_events(&buffers, &other, "new").await, 1);
        buffers.drop_session(&other);
        let all = lock(&buffers.0);
        assert!(all.bytes == 0 && all.sessions.is_empty(), "{} bytes", all.bytes);
    }

    #[tokio::test]
    async fn newest_events_are_kept() {
        let (buffers, session): (_, SessionId) = (EventBuffers::default(), "one".into());
        let number = buffers.open(&session, "7").unwrap();
        for n in 1..=2 * MAX_EVENTS_PER_BUFFER {
            assert!(buffers.push(
                &session,
                "7",
                number,
                ServerSseMessage::priming(format!("{n}/7"), Duration::ZERO)
            ));
        }
        assert!(buffers.push(&session, "7", number, answer("last/7")));
        buffers.close(&session, "7", number);
        let events: Vec<_> =
            buffers.replay(&session, "7", "0/7".to_owned()).unwrap().collect().await;
        assert_eq!(
            (events.len(), events.last().is_some_and(is_answer)),
            (MAX_EVENTS_PER_BUFFER, true)
        );
        // A client that has some of the events receives the rest.
        let events: Vec<_> = buffers
            .replay(&session, "7", format!("{}/7", 2 * MAX_EVENTS_PER_BUFFER))
            .unwrap()
            .collect()
            .await;
        assert_eq!(events.len(), 1);
        // A disconnect that is noticed late does not affect a client that has resumed since.
        assert_eq!(buffers.open(&session, "7"), None);
        let (early, late) =
            (buffers.open(&session, "9").unwrap(), buffers.open(&session, "9").unwrap());
        buffers.close(&session, "9", late);
        assert!(buffers.push(&session, "9", early, answer("1/9")));
        buffers.close(&session, "9", early);
        assert!(buffers.push(
            &session,
            "9",
            early,
            ServerSseMessage::priming("0/9", Duration::ZERO)
        ));
        assert_eq!(count_replayed_events(&buffers, &session, "9").await, 1);
        // A stream that ends without an answer cannot be resumed.
        let number = buffers.open(&session, "8").unwrap();
        buffers.close(&session, "8", number);
        assert!(buffers.replay(&session, "8", "0/8".to_owned()).is_none());
    }
}
