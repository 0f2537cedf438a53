//! Requests that are refused when they have been read. Each call among them has its row, whoever waits for it.

use std::sync::Arc;

use bytes::Bytes;
use http::{Response, StatusCode};
use http_body_util::{BodyExt, Full};
use rmcp::model::ErrorCode;
use serde_json::Value;

use super::{Answer, Http, json_answer, refusal};
use crate::batch::{self, Batch, Calls};
use crate::gateway::Running;
use crate::identity::Caller;
use crate::misread::{self, Glimpse};
use crate::raw::{self, Message};

/// How many are written down at the same time: they take no seat.
pub(super) const TURNS: usize = 64;
/// How many wait for that whose clients may have hung up. Whoever comes beside so many waits with its client.
pub(super) const WAITING: usize = 4_096;
/// The longest name of a request that is kept until it can be told, in bytes.
const LONGEST: usize = 4 << 10;

impl Http {
    /// Does something when it is its turn, also where its client has hung up by then. Nobody waits with all that was sent: what it works
    /// with is no more than it needs.
    async fn in_turn<T: Send + 'static>(self: &Arc<Self>, work: impl Future<Output = T> + Send + 'static) -> Option<T> {
        let waiting = Arc::clone(&self.waiting).acquire_owned().await.ok()?;
        let (http, counted) = (Arc::clone(self), self.gateway.count());
        let task = tokio::spawn(async move {
            let _turn = http.turns.acquire().await;
            drop(waiting);
            let done = work.await;
            drop(counted);
            done
        });
        task.await.ok()
    }

    /// Writes down calls that are refused: so many of them.
    pub(crate) async fn set_down(self: &Arc<Self>, caller: &Caller, agent: Option<&str>, calls: Calls, most: usize, why: &str) {
        let (gateway, caller, agent, why) = (self.gateway.clone(), caller.clone(), agent.map(str::to_owned), misread::brief(why));
        self.in_turn(async move { batch::lost(&gateway, &caller, agent.as_deref(), calls, most, &why).await }).await;
    }

    /// Writes down the calls of a batch that is refused as such, as far as the rate allows: each counts as a request.
    pub(super) async fn lost(self: &Arc<Self>, running: &Running, caller: &Caller, agent: Option<&str>, messages: Vec<Message>, why: &str) {
        let calls = batch::calls(messages);
        // The request itself has counted as one.
        let most = 1 + self.take_rate(running, caller, calls.0.len().saturating_sub(1));
        self.set_down(caller, agent, calls, most, why).await;
    }

    /// A message that cannot be understood. Where it asks for a call, that has its row.
    pub(super) async fn unread(
        self: &Arc<Self>,
        caller: &Caller,
        agent: Option<&str>,
        text: Bytes,
        code: ErrorCode,
        why: &str,
    ) -> Box<Answer> {
        let (call, id) = (Glimpse::of_message(&text), raw::id(&text));
        drop(text);
        self.refused(caller, agent, call, id, code, why).await
    }

    /// Requests of which one has the name of another that is not answered yet.
    pub(super) async fn confused(
        self: &Arc<Self>,
        running: &Running,
        caller: &Caller,
        agent: Option<&str>,
        message: Message,
        batch: Option<Batch>,
    ) -> Box<Answer> {
        let why = "another request of this session has the same `id`, and is not answered yet";
        if let Some(batch) = batch {
            self.lost(running, caller, agent, batch.into_messages(), why).await;
            return Box::new(batch::refused(why));
        }
        let (call, id) = (Glimpse::of_value(&message.value), message.value.get("id").cloned().unwrap_or_default());
        drop(message);
        self.refused(caller, agent, call, id, ErrorCode::INVALID_REQUEST, why).await
    }

    async fn refused(
        self: &Arc<Self>,
        caller: &Caller,
        agent: Option<&str>,
        call: Option<Glimpse>,
        id: Value,
        code: ErrorCode,
        why: &str,
    ) -> Box<Answer> {
        let id = if id.to_string().len() > LONGEST { Value::Null } else { id };
        let (gateway, caller, agent, why) = (self.gateway.clone(), caller.clone(), agent.map(str::to_owned), why.to_owned());
        let said = self.in_turn(async move { misread::refusal(&gateway, &caller, agent.as_deref(), call, id, code, &why).await }).await;
        match said {
            Some(said) => Box::new(json_answer(StatusCode::BAD_REQUEST, &said)),
            None => refusal(StatusCode::INTERNAL_SERVER_ERROR, "the request cannot be answered", None),
        }
    }

    /// An answer that turns a request for a call away before the door has seen it: that has its row, too.
    pub(crate) async fn noted(self: &Arc<Self>, answer: Answer, caller: &Caller, agent: Option<&str>, message: &Value) -> Answer {
        let Some(call) = Glimpse::of_value(message) else { return answer };
        // In a session of an older client it is told so in the stream, and the door never sees it.
        if answer.status().is_success() && misread::is_of_unknown_revision(message) {
            self.set_down(caller, agent, (vec![call], 0), 1, "the revision of the protocol is not known").await;
            return answer;
        }
        if !answer.status().is_client_error() {
            return answer;
        }
        let (parts, body) = answer.into_parts();
        let text = match body.collect().await {
            Ok(text) => text.to_bytes(),
            Err(never) => match never {},
        };
        let said: Value = serde_json::from_slice(&text).unwrap_or_default();
        // What the door has refused is written down.
        if said.pointer("/error/data/callId").is_none() {
            let why = said.pointer("/error/message").or_else(|| said.get("error")).and_then(Value::as_str).map(str::to_owned);
            let why = why.unwrap_or_else(|| String::from_utf8_lossy(&text).into_owned());
            self.set_down(caller, agent, (vec![call], 0), 1, &why).await;
        }
        Response::from_parts(parts, Full::new(text).boxed())
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use serde_json::json;

    use super::super::sessions::tests::{caller, hello, named, post, served};
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn who_hangs_up_while_others_are_written_down_has_its_row() {
        let http = served().await;
        let (running, ann) = (http.gateway.running(), caller("ann"));
        let message =
            |n: u32| Message { value: json!({"id": n, "method": "tools/call", "params": {"name": "calc"}}), ..Message::default() };
        let others = http.turns.acquire_many(TURNS as u32).await.unwrap();
        // Nobody waits for any of them.
        let _hung_up = http.lost(&running, &ann, None, vec![message(1), message(2)], "too many").now_or_never();
        let _hung_up = http.unread(&ann, None, message(3).value.to_string().into(), ErrorCode::PARSE_ERROR, "unread").now_or_never();
        drop(others);
        let session = running.gate.session("default", "ann", "(turned away)");
        let written = async {
            while session.rows().await.unwrap().len() < 3 {
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(std::time::Duration::from_secs(60), written).await.expect("they have no rows");
        http.gateway.end().await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_call_in_a_session_that_has_just_ended_has_its_row_and_its_client_is_to_begin_another() {
        let http = served().await;
        let (running, ann) = (http.gateway.running(), caller("ann"));
        let opened = http.open_session(&running, hello(), &ann, None).await.ok().unwrap();
        // It ends by itself, and the library does not know it yet.
        let ended = http.sessions.local.sessions.read().await.values().next().cloned().unwrap();
        ended.close().await.unwrap();
        let message = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "calc", "arguments": {}}});
        let mut request = post(&message);
        request.headers_mut().extend(named(&opened));
        let answer = http.handle(request, &ann, None).await;
        let answer = http.noted(answer, &ann, None, &message).await;
        assert_eq!(answer.status(), StatusCode::NOT_FOUND);
        assert_eq!(running.gate.session("default", "ann", "(turned away)").rows().await.unwrap().len(), 1);
        assert!(http.hold_session(&named(&opened), &ann, None).is_err());
        http.gateway.end().await;
    }
}
