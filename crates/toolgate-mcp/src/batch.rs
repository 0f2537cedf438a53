//! Several messages in one request, which only 2025-03-26 knows. Each goes the way that it would go alone; what they come to is told
//! in one stream, in the order in which it is known.

use std::collections::HashSet;
use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream::SelectAll;
use futures_util::{StreamExt, stream};
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use http::request::Parts;
use http::{Request, Response, StatusCode};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Frame;
use rmcp::model::{ClientJsonRpcMessage, ProtocolVersion};
use serde_json::{Value, json};

use crate::gateway::Gateway;
use crate::identity::Caller;
use crate::misread::{self, Glimpse};
use crate::raw::{self, Message};
use crate::serve::{Answer, Http, json_answer};
use crate::straight::event_stream;

/// Most messages in one request.
pub(crate) const MOST: usize = 64;

/// The messages of one request.
pub(crate) struct Batch(Vec<Message>);

/// What is wrong with several messages in one; `None` if nothing is.
pub(crate) fn fault(messages: &[Message]) -> Option<String> {
    if messages.is_empty() || messages.len() > MOST {
        return Some(format!("a batch holds 1 to {MOST} messages"));
    }
    let said = || messages.iter().map(|message| &message.value);
    if said().any(|message| !message.is_object()) {
        return Some("a batch holds messages, and nothing else".to_owned());
    }
    if said().any(|message| message.get("method").is_some_and(|method| method == "initialize")) {
        return Some("`initialize` comes alone".to_owned());
    }
    let mut seen = HashSet::new();
    let asked = said().filter(|message| asks(message)).filter_map(|message| message.get("id"));
    if !asked.map(ToString::to_string).all(|id| seen.insert(id)) {
        return Some("two requests of a batch have the same `id`".to_owned());
    }
    // One that cannot be understood would be refused when others have been heard already.
    let is_odd = |message: &Message| serde_json::from_slice::<ClientJsonRpcMessage>(&message.text).is_err();
    messages.iter().any(is_odd).then(|| "one of the batch is no message of the protocol".to_owned())
}

/// Whether somebody waits for an answer.
pub(crate) fn asks(message: &Value) -> bool {
    message.get("method").is_some() && message.get("id").is_some()
}

impl Batch {
    /// The messages of a request that holds several; else these, and what is wrong with them.
    pub(crate) fn of(parts: &Parts, messages: Vec<Message>) -> Result<Self, (Vec<Message>, String)> {
        let version = parts.headers.get("mcp-protocol-version");
        let knows = version.is_none_or(|version| version == ProtocolVersion::V_2025_03_26.as_str());
        let fault = match knows {
            true => fault(&messages).or_else(|| messages.iter().find_map(|message| raw::overlong(&message.value))),
            false => Some("only 2025-03-26 knows batches; send one message a request".to_owned()),
        };
        match fault {
            None => Ok(Self(messages)),
            Some(why) => Err((messages, why)),
        }
    }

    pub(crate) fn into_messages(self) -> Vec<Message> {
        self.0
    }

    /// What they say.
    pub(crate) fn values(&self) -> impl Iterator<Item = &Value> {
        self.0.iter().map(|message| &message.value)
    }

    /// How many there are.
    pub(crate) fn len(&self) -> u32 {
        self.0.len().try_into().unwrap_or(u32::MAX)
    }

    /// Says each of them, and what they come to. What is refused before any is heard is refused for all.
    pub(crate) async fn answer(self, http: &Arc<Http>, parts: &Parts, caller: &Caller, agent: Option<&str>) -> Answer {
        let (mut open, mut said, mut heard) = (SelectAll::new(), Vec::new(), false);
        let mut rest = self.0.into_iter();
        while let Some(message) = rest.next() {
            let mut parts = parts.clone();
            parts.headers.remove(CONTENT_LENGTH);
            if let Some(raw) = message.raw {
                parts.extensions.insert(raw);
            }
            let mut handling = pin!(http.handle(Request::from_parts(parts, Full::new(message.text)), caller, agent));
            // Those before are heard meanwhile: a session that has too much to say takes nothing in.
            let answer = loop {
                tokio::select! {
                    biased;
                    answer = &mut handling => break answer,
                    Some(event) = open.next(), if !open.is_empty() => said.push(event),
                }
            };
            let answer = http.noted(answer, caller, agent, &message.value).await;
            match events(answer).await {
                Ok(Some(events)) => open.push(Box::pin(whole_events(events))),
                Ok(None) => {}
                Err(refused) if !heard => {
                    http.set_down(caller, agent, calls(rest), MOST, "the batch that this came in was refused").await;
                    return refused;
                }
                // Others were heard, and are told what they came to.
                Err(refused) => {
                    let why = format!("this was not taken: HTTP {}", refused.status().as_u16());
                    let id = message.value.get("id").filter(|_| asks(&message.value));
                    said.extend(id.map(|id| event(&refused_as(id, &why))));
                }
            }
            heard = true;
        }
        if open.is_empty() && said.is_empty() {
            let mut heard = Response::new(Full::default().boxed());
            *heard.status_mut() = StatusCode::ACCEPTED;
            return heard;
        }
        event_stream(stream::iter(said).chain(open).map(|event| Ok::<_, Infallible>(Frame::data(event))))
    }
}

/// Calls that are refused: as many as can be written down, and how many more there are.
pub(crate) type Calls = (Vec<Glimpse>, usize);

/// The calls among messages.
pub(crate) fn calls(messages: impl IntoIterator<Item = Message>) -> Calls {
    let mut calls = messages.into_iter().filter_map(|message| Glimpse::of_value(&message.value));
    // They may have to wait, and somebody may send very many.
    let first = calls.by_ref().take(MOST).collect();
    (first, calls.count())
}

/// Writes down the calls of a batch that is refused as such: so many of them, and with the last how many more there were.
pub(crate) async fn lost(gateway: &Gateway, caller: &Caller, agent: Option<&str>, (mut calls, more): Calls, most: usize, why: &str) {
    let more = more + calls.len().saturating_sub(most);
    calls.truncate(most);
    let last = calls.pop();
    for call in calls {
        misread::note(gateway, caller, agent, call, why).await;
    }
    if let Some(call) = last {
        let why = if more > 0 { format!("{why} (calls beside this that are not written down: {more})") } else { why.to_owned() };
        misread::note(gateway, caller, agent, call, &why).await;
    }
}

/// What a batch is told that is refused as such.
pub(crate) fn refused(why: &str) -> Answer {
    json_answer(StatusCode::BAD_REQUEST, &refused_as(&Value::Null, why))
}

fn refused_as(id: &Value, why: &str) -> Value {
    json!({"jsonrpc": "2.0", "id": id, "error": {"code": -32600, "message": why, "data": misread::contract(why, None)}})
}

/// A message as an event.
fn event(message: &Value) -> Bytes {
    format!("data: {message}\n\n").into()
}

/// An answer as events; none, where there is nothing to say; as it is, where it refuses the request as such.
async fn events(answer: Answer) -> Result<Option<BoxBody<Bytes, Infallible>>, Answer> {
    let (parts, body) = answer.into_parts();
    if parts.headers.get(CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream")) {
        return Ok(Some(body));
    }
    let text = match body.collect().await {
        Ok(text) => text.to_bytes(),
        Err(never) => match never {},
    };
    match serde_json::from_slice::<Value>(&text) {
        Ok(said) if said.get("jsonrpc").is_some() => Ok(Some(Full::new(event(&said)).boxed())),
        _ if parts.status.is_success() => Ok(None),
        _ => Err(Response::from_parts(parts, Full::new(text).boxed())),
    }
}

/// What a body says, cut only where an event ends: another's may stand between two.
fn whole_events(body: BoxBody<Bytes, Infallible>) -> impl stream::Stream<Item = Bytes> + Send + Sync {
    stream::unfold((body, Vec::new()), |(mut body, mut held)| async move {
        while let Some(Ok(frame)) = body.frame().await {
            let Ok(chunk) = frame.into_data() else { continue };
            held.extend_from_slice(&chunk);
            if let Some(end) = held.windows(2).rposition(|pair| pair == b"\n\n") {
                let rest = held.split_off(end + 2);
                return Some((Bytes::from(held), (body, rest)));
            }
        }
        (!held.is_empty()).then(|| (Bytes::from(held), (body, Vec::new())))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_very_many_calls_no_more_is_kept_than_is_written_down() {
        let call = json!({"id": 1, "method": "tools/call", "params": {"name": "pay"}});
        let message = |value: &Value| Message { value: value.clone(), ..Message::default() };
        let other = json!({"id": 2, "method": "tools/list"});
        let kept = |many: usize| {
            let (calls, more) = calls((0..many).flat_map(|_| [message(&call), message(&other)]));
            assert!(calls.capacity() <= 2 * MOST, "{}", calls.capacity());
            (calls.len(), more)
        };
        assert_eq!([0, 3, MOST, 10_000].map(kept), [(0, 0), (3, 0), (MOST, 0), (MOST, 10_000 - MOST)]);
    }
}
