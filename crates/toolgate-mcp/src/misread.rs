//! Requests that ask for a call and cannot be understood. Nothing of them runs; that they came is written down, and told in the one
//! contract.

use rmcp::model::{ErrorCode, ProtocolVersion};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use toolgate::{Answer, Call, SessionKey, ToolError, Toolgate, code};

use crate::gateway::Gateway;
use crate::identity::{self, Caller};

/// The longest name of a request, a tool or an agent that is written down.
const LONGEST: usize = 200;
/// How many letters of the reason are.
const REASON: usize = 300;

/// As much of a reason as is written down: it may quote what the client sent.
pub(crate) fn brief(why: &str) -> String {
    why.chars().take(REASON).collect()
}

/// As much of a request for a call as is needed to write down that it came.
pub(crate) struct Glimpse {
    pub(crate) tool: String,
    /// The agent that a body names.
    pub(crate) agent: Option<String>,
    /// What the client calls it.
    id: Option<String>,
}

/// Text that stands in a document; nothing else is a name.
fn text(raw: &RawValue) -> Option<String> {
    serde_json::from_str(raw.get()).ok()
}

/// As much of a name as is written down.
fn cut(name: &str) -> String {
    name.chars().take(LONGEST).collect()
}

/// What a client calls a request: text, or a number.
fn name(id: &RawValue) -> Option<String> {
    let named = text(id).or_else(|| serde_json::from_str::<serde_json::Number>(id.get()).ok().map(|number| number.to_string()))?;
    Some(cut(&named))
}

impl Glimpse {
    /// The call that a message of the protocol asks for, whatever is wrong with the rest of it.
    pub(crate) fn of_message(message: &[u8]) -> Option<Self> {
        #[derive(Deserialize)]
        struct Message<'m> {
            #[serde(borrow, default)]
            id: Option<&'m RawValue>,
            #[serde(borrow)]
            method: &'m RawValue,
            #[serde(borrow)]
            params: Params<'m>,
        }
        #[derive(Deserialize)]
        struct Params<'m> {
            #[serde(borrow)]
            name: &'m RawValue,
        }
        let message: Message<'_> = serde_json::from_slice(message).ok()?;
        text(message.method).filter(|method| method == "tools/call")?;
        Some(Self { tool: cut(&text(message.params.name)?), agent: None, id: message.id.and_then(name) })
    }

    /// The same of a message that could be read.
    pub(crate) fn of_value(message: &Value) -> Option<Self> {
        if message.get("method")?.as_str()? != "tools/call" {
            return None;
        }
        let tool = cut(message.get("params")?.get("name")?.as_str()?);
        let id = match message.get("id") {
            Some(Value::String(id)) => Some(cut(id)),
            Some(Value::Number(id)) => Some(id.to_string()),
            _ => None,
        };
        Some(Self { tool, agent: None, id })
    }

    /// The call that a body of the decision API speaks of.
    pub(crate) fn of_body(body: &[u8]) -> Option<Self> {
        #[derive(Deserialize)]
        struct Body<'b> {
            #[serde(borrow, default)]
            id: Option<&'b RawValue>,
            #[serde(borrow, default)]
            agent: Option<&'b RawValue>,
            #[serde(borrow)]
            tool: &'b RawValue,
        }
        let body: Body<'_> = serde_json::from_slice(body).ok()?;
        Some(Self { tool: cut(&text(body.tool)?), agent: body.agent.and_then(text).map(|agent| cut(&agent)), id: body.id.and_then(name) })
    }

    /// The call, to be refused by the first gate.
    pub(crate) fn call(self, key: SessionKey) -> Call {
        let call = Call::new(key, self.tool, json!({}));
        match self.id {
            Some(id) => call.client_id(id),
            None => call,
        }
    }
}

/// Whether a message names a revision of the protocol that nobody knows. The library refuses it for that, whatever it asks for.
pub(crate) fn is_of_unknown_revision(message: &Value) -> bool {
    let named = message.pointer("/params/_meta/io.modelcontextprotocol~1protocolVersion").and_then(Value::as_str);
    named.is_some_and(|named| ProtocolVersion::KNOWN_VERSIONS.iter().all(|known| known.as_str() != named))
}

/// Refuses a call because of the request that it came in.
pub(crate) async fn refuse(gate: &Toolgate, call: Call, why: &str) -> Answer {
    gate.call(call.misread(brief(why))).await
}

/// Writes down that a call was refused because of the request that it came in.
pub(crate) async fn note(gateway: &Gateway, caller: &Caller, agent: Option<&str>, call: Glimpse, why: &str) -> Answer {
    let _counted = gateway.count();
    let running = gateway.running();
    let call = call.call(identity::turned_away(&running, caller, agent));
    refuse(&running.gate, call, why).await
}

/// What is told of a request that cannot be understood, as the contract has it; where it asked for a call, with the receipt of that.
pub(crate) fn contract(why: &str, answer: Option<&Answer>) -> Value {
    let own = ToolError::of(code::INVALID_REQUEST, brief(why));
    let mut told = serde_json::to_value(answer.and_then(|answer| answer.outcome.error()).unwrap_or(&own)).unwrap_or_default();
    if let (Some(fields), Some(receipt)) = (told.as_object_mut(), answer.and_then(Answer::receipt)) {
        fields.insert("receipt".to_owned(), serde_json::to_value(receipt).unwrap_or_default());
    }
    told
}

/// What is answered to a message that cannot be understood.
pub(crate) async fn refusal(
    gateway: &Gateway,
    caller: &Caller,
    agent: Option<&str>,
    call: Option<Glimpse>,
    id: Value,
    code: ErrorCode,
    why: &str,
) -> Value {
    let why = brief(why);
    let why = why.as_str();
    let answer = match call {
        None => None,
        Some(call) => Some(note(gateway, caller, agent, call, why).await),
    };
    json!({"jsonrpc": "2.0", "id": id, "error": {"code": code.0, "message": why, "data": contract(why, answer.as_ref())}})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_seen_whatever_is_wrong_around_it() {
        let seen = |text: &str| Glimpse::of_message(text.as_bytes()).map(|seen| (seen.tool, seen.id));
        let deep = format!("{}1{}", "[".repeat(5_000), "]".repeat(5_000));
        for meta in [r#"{"a":1,"a":2}"#, "1e999", r#""\ud800""#, &deep] {
            let text = format!(r#"{{"id":7,"x":1,"x":2,"method":"tools/call","params":{{"_meta":{meta},"_meta":0,"name":"pay"}}}}"#);
            assert_eq!(seen(&text), Some(("pay".to_owned(), Some("7".to_owned()))), "{meta}");
        }
        for text in [
            r#"{"method":"tools/list","params":{"name":"pay"}}"#,
            r#"{"method":"tools/call","params":{"name":7}}"#,
            r#"{"method":"tools/call","params":{"name":"pay","name":"look"}}"#,
            r#"{"method":"tools/call","params":[]}"#,
            r#"{"method":"tools/call","params":{"name":"pay"}"#,
            "[]",
        ] {
            assert_eq!(seen(text), None, "{text}");
        }
        let body = Glimpse::of_body(br#"{"id":"a","tool":"pay","arguments":{"x":1,"x":2},"agent":7}"#);
        assert_eq!(body.map(|seen| (seen.tool, seen.agent, seen.id)), Some(("pay".to_owned(), None, Some("a".to_owned()))));
    }
}
