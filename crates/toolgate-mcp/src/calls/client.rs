//! Who asks for a call: how it hears of it, and what it cannot do.

use http::request::Parts;
use rmcp::model::*;
use rmcp::service::{Peer, RequestContext};
use rmcp::{ErrorData, RoleServer};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use toolgate::Answer;

use crate::misread;
use crate::raw::Raw;

/// The longest name of a request that is written down.
const LONGEST_ID: usize = 200;
/// How deep capabilities are looked into.
const DEPTH: u8 = 4;

/// The client of a request for a call, whichever way the request came.
pub(crate) struct Client<'c> {
    /// What it calls its request.
    pub(crate) id: String,
    pub(crate) meta: &'c RequestMetaObject,
    /// The head of its request, over HTTP.
    pub(crate) parts: Option<&'c Parts>,
    /// Its arguments, where they are no good.
    pub(crate) raw: Option<&'c Raw>,
    pub(crate) capabilities: Option<ClientCapabilities>,
    /// It is of 2026-07-28 or later.
    pub(crate) modern: bool,
    /// It does not wait any more.
    pub(crate) gone: &'c CancellationToken,
    pub(crate) ear: Ear<'c>,
}

/// How a client hears something in the middle of a call.
pub(crate) enum Ear<'c> {
    /// Over its connection; there it can be asked as well.
    Peer(&'c Peer<RoleServer>),
    /// In the answer to its request.
    Answer(&'c mpsc::Sender<ServerNotification>),
}

impl<'c> Client<'c> {
    /// What a request is called, as far as that is written down.
    pub(crate) fn name(id: &RequestId) -> String {
        id.to_string().chars().take(LONGEST_ID).collect()
    }

    pub(crate) fn of(context: &'c RequestContext<RoleServer>) -> Self {
        let parts: Option<&Parts> = context.extensions.get();
        Self {
            id: Self::name(&context.id),
            meta: &context.meta,
            raw: parts.and_then(|parts| parts.extensions.get()).or_else(|| context.extensions.get()),
            parts,
            capabilities: context.client_capabilities(),
            modern: context.protocol_version().is_some_and(|version| version.as_str() >= crate::MODERN),
            gone: &context.ct,
            ear: Ear::Peer(&context.peer),
        }
    }

    /// Tells it something. One that does not keep up keeps nobody else waiting.
    pub(super) async fn tell(&self, said: ServerNotification) {
        match self.ear {
            Ear::Peer(peer) => drop(peer.send_notification(said).await),
            Ear::Answer(answer) => drop(answer.try_send(said)),
        }
    }
}

/// What 2026-07-28 wants to be told in a word of its own: an upstream needs what the client has not said that it can do. The contract goes along;
/// everything else that an upstream says is told as the contract alone.
pub(super) fn lacking(answer: &Answer, client: &Client<'_>) -> Option<ErrorData> {
    let (error, word) = (answer.outcome.error()?, ErrorCode::MISSING_REQUIRED_CLIENT_CAPABILITY);
    let said = error.upstream.as_ref().filter(|_| client.modern)?;
    if said.get("code").and_then(Value::as_i64) != Some(i64::from(word.0)) {
        return None;
    }
    let mut has = serde_json::to_value(client.capabilities.clone().unwrap_or_default()).unwrap_or_default();
    // Who says nothing more of it can fill in forms.
    if let Some(asks) = has.get_mut("elicitation").and_then(Value::as_object_mut).filter(|asks| asks.is_empty()) {
        asks.insert("form".to_owned(), json!({}));
    }
    // What it can do, it does not lack.
    let lacks = missing(said.pointer("/data/requiredCapabilities").filter(|needs| needs.is_object())?, &has, DEPTH)?;
    let mut data = misread::contract(&error.message, Some(answer));
    data.as_object_mut()?.insert("requiredCapabilities".to_owned(), lacks);
    Some(ErrorData::new(word, error.message.clone(), Some(data)))
}

/// What of something needed is not there, by its names alone: values are the words of an upstream. `None` where all of it is.
fn missing(needs: &Value, has: &Value, depth: u8) -> Option<Value> {
    let is_not = |value: &Value| matches!(value, Value::Null | Value::Bool(false));
    if is_not(needs) {
        return None;
    }
    let parts = needs.as_object().filter(|_| depth > 0).into_iter().flatten();
    let lacks = parts.filter_map(|(name, part)| {
        let there = has.get(name.as_str()).unwrap_or(&Value::Null);
        Some((name.clone(), missing(part, there, depth.saturating_sub(1))?))
    });
    let lacks: JsonObject = lacks.collect();
    (is_not(has) || !lacks.is_empty()).then_some(Value::Object(lacks))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_client_lacks_is_told_by_its_names() {
        for (needs, has, lacks) in [
            (json!({"sampling": {}}), json!({}), Some(json!({"sampling": {}}))),
            (json!({"sampling": {}}), json!({"sampling": {}}), None),
            (json!({"sampling": {"tools": {"a": "words"}}}), json!({"sampling": {}}), Some(json!({"sampling": {"tools": {"a": {}}}}))),
            (json!({"sampling": {"tools": {}}}), json!({"sampling": {"tools": {}}, "roots": {}}), None),
            (
                json!({"roots": {"listChanged": true}}),
                json!({"roots": {"listChanged": false}}),
                Some(json!({"roots": {"listChanged": {}}})),
            ),
            (json!({"roots": {"listChanged": false}}), json!({"roots": {}}), None),
            (json!({}), json!({}), None),
        ] {
            assert_eq!(missing(&needs, &has, DEPTH), lacks, "{needs} {has}");
        }
    }
}
