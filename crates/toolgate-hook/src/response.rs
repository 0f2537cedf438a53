//! Renders the answer to an event: exit code 0 with a JSON object, or exit code 2 with a reason on
//! standard error.

use std::io::Write;

use serde_json::{Map, Value, json};

use super::event::{HookClient, HookEvent, HookEventKind};

/// The answer to an event.
#[derive(Debug, Default)]
pub(crate) struct HookReply {
    pub(crate) decision: Option<ReplyDecision>,
    /// Changed arguments to run the tool with.
    pub(crate) updated_input: Option<Value>,
    /// Result that replaces the one of the tool.
    pub(crate) replaced_output: Option<Value>,
    /// Additional text for the model.
    pub(crate) context: Option<String>,
    /// Message for the user.
    pub(crate) notice: Option<String>,
}

/// The decision about a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ReplyDecision {
    Allow,
    Deny(String),
    Ask(String),
    /// The tool ran, and its result is not acceptable.
    Block(String),
}

impl HookReply {
    pub(crate) fn deny(reason: impl Into<String>) -> Self {
        Self { decision: Some(ReplyDecision::Deny(reason.into())), ..Self::default() }
    }

    pub(crate) fn ask(reason: impl Into<String>) -> Self {
        Self { decision: Some(ReplyDecision::Ask(reason.into())), ..Self::default() }
    }

    pub(crate) fn block(reason: impl Into<String>) -> Self {
        Self { decision: Some(ReplyDecision::Block(reason.into())), ..Self::default() }
    }

    /// Builds an answer that withholds the result of a tool.
    pub(crate) fn withhold(event: &HookEvent, reason: impl Into<String>) -> Self {
        let output = match &event.kind {
            HookEventKind::AfterTool(result) => Some(withhold_value(result)),
            HookEventKind::Malformed(_, Some(result)) if !result.is_null() => {
                Some(withhold_value(result))
            }
            // Most clients accept a result of this shape.
            HookEventKind::UnreadableResult | HookEventKind::Malformed(_, Some(_)) => {
                Some(json!({"stdout": "(withheld)", "stderr": "", "interrupted": false}))
            }
            _ => None,
        };
        Self { replaced_output: output, ..Self::block(reason) }
    }

    /// Builds the answer for an event that the gate could not judge.
    pub(crate) fn gate_error(event: &HookEvent, reason: impl Into<String>) -> Self {
        if event.is_after_run() { Self::withhold(event, reason) } else { Self::deny(reason) }
    }

    /// Renders the answer in the dialect of the client.
    pub(crate) fn render(self, event: &HookEvent, client: HookClient) -> RenderedReply {
        match (&event.name, client) {
            (None, _) => self.render_plain(event),
            (Some(_), HookClient::Cursor) => self.render_flat(event),
            (Some(name), _) => self.render_nested(name, event, client),
        }
    }

    fn render_plain(self, event: &HookEvent) -> RenderedReply {
        let mut fields = Map::new();
        match self.decision {
            // A client that checks only the exit code reads any JSON as permission.
            Some(ReplyDecision::Deny(reason) | ReplyDecision::Ask(reason)) => {
                return RenderedReply::Denied(reason);
            }
            Some(ReplyDecision::Block(reason)) => {
                fields.insert("reason".to_owned(), reason.into());
            }
            Some(ReplyDecision::Allow) | None
                if matches!(event.kind, HookEventKind::BeforeTool) =>
            {
                fields.insert("decision".to_owned(), "allow".into());
            }
            _ => {}
        }
        fields.extend(self.updated_input.map(|input| ("tool_input".to_owned(), input)));
        fields.extend(self.replaced_output.map(|output| ("tool_result".to_owned(), output)));
        RenderedReply::Json(Value::Object(fields))
    }

    fn render_flat(self, event: &HookEvent) -> RenderedReply {
        let mut fields = Map::new();
        let mut insert = |key: &str, value: Value| fields.insert(key.to_owned(), value);
        match self.decision {
            // Cursor cannot ask its user, so a question is a denial.
            Some(ReplyDecision::Deny(reason) | ReplyDecision::Ask(reason))
                if matches!(event.kind, HookEventKind::BeforeTool) =>
            {
                insert("permission", "deny".into());
                insert("user_message", reason.as_str().into());
                insert("agent_message", reason.into());
            }
            Some(
                ReplyDecision::Deny(reason)
                | ReplyDecision::Ask(reason)
                | ReplyDecision::Block(reason),
            ) => {
                insert("additional_context", reason.into());
            }
            Some(ReplyDecision::Allow) | None
                if matches!(event.kind, HookEventKind::BeforeTool) =>
            {
                insert("permission", "allow".into());
            }
            _ => {}
        }
        if let Some(context) = self.context {
            insert("additional_context", context.into());
        }
        if let Some(input) = self.updated_input {
            insert("updated_input", input);
        }
        if let Some(output) = self.replaced_output {
            insert("updated_mcp_tool_output", output);
        }
        RenderedReply::Json(Value::Object(fields))
    }

    fn render_nested(self, name: &str, event: &HookEvent, client: HookClient) -> RenderedReply {
        let (mut top, mut inner) = (Map::new(), Map::new());
        let is_before_tool = matches!(event.kind, HookEventKind::BeforeTool);
        let decide = |inner: &mut Map<String, Value>, word: &str, reason: Option<String>| {
            inner.insert("permissionDecision".to_owned(), word.into());
            inner.extend(
                reason.map(|reason| ("permissionDecisionReason".to_owned(), reason.into())),
            );
        };
        let has_new_input = self.updated_input.is_some();
        match self.decision {
            Some(ReplyDecision::Deny(reason)) if is_before_tool => {
                decide(&mut inner, "deny", Some(reason))
            }
            Some(ReplyDecision::Ask(reason)) if is_before_tool && client == HookClient::Codex => {
                decide(
                    &mut inner,
                    "deny",
                    Some(format!(
                        "{reason} This client cannot ask its user, so the call is denied."
                    )),
                );
            }
            Some(ReplyDecision::Ask(reason)) if is_before_tool => {
                decide(&mut inner, "ask", Some(reason))
            }
            Some(ReplyDecision::Allow) if is_before_tool && client != HookClient::Codex => {
                decide(&mut inner, "allow", None)
            }
            // Codex ignores changed arguments without a decision.
            _ if is_before_tool && has_new_input && client == HookClient::Codex => {
                decide(&mut inner, "allow", None)
            }
            // A session start cannot be blocked. A prompt can.
            Some(ReplyDecision::Deny(reason) | ReplyDecision::Block(reason))
                if matches!(
                    event.kind,
                    HookEventKind::SessionStart | HookEventKind::SessionEnd
                ) =>
            {
                inner.extend(
                    matches!(event.kind, HookEventKind::SessionStart)
                        .then(|| ("additionalContext".to_owned(), reason.as_str().into())),
                );
                top.insert("systemMessage".to_owned(), reason.into());
            }
            Some(
                ReplyDecision::Deny(reason)
                | ReplyDecision::Ask(reason)
                | ReplyDecision::Block(reason),
            ) => {
                top.insert("decision".to_owned(), "block".into());
                top.insert("reason".to_owned(), reason.into());
            }
            _ => {}
        }
        if let Some(input) = self.updated_input {
            inner.insert("updatedInput".to_owned(), input);
        }
        match self.replaced_output {
            // Codex replaces a result only with the reason of a block.
            Some(output) if client == HookClient::Codex => {
                top.insert("decision".to_owned(), "block".into());
                let text = output.as_str().map_or_else(|| output.to_string(), str::to_owned);
                top.entry("reason").or_insert_with(|| text.into());
            }
            Some(output) => {
                inner.insert("updatedToolOutput".to_owned(), output);
            }
            None => {}
        }
        inner.extend(self.context.map(|context| ("additionalContext".to_owned(), context.into())));
        top.extend(self.notice.map(|notice| ("systemMessage".to_owned(), notice.into())));
        if !inner.is_empty() {
            inner.insert("hookEventName".to_owned(), name.into());
            top.insert("hookSpecificOutput".to_owned(), Value::Object(inner));
        }
        RenderedReply::Json(Value::Object(top))
    }
}

/// The rendered answer.
#[derive(Debug)]
pub(crate) enum RenderedReply {
    /// The answer was written already, with this exit code.
    AlreadyWritten(u8),
    Json(Value),
    Denied(String),
}

impl RenderedReply {
    /// Writes the answer, and returns the exit code. If writing fails, the call is denied.
    pub(crate) fn write(self) -> u8 {
        match self {
            Self::AlreadyWritten(code) => code,
            Self::Json(reply) => {
                // If the client cannot read the answer, anything but a plain permission must be an
                // exit code.
                if is_reply_required(&reply) && crate::protocol::is_stdout_discarded() {
                    let _ = writeln!(
                        std::io::stderr().lock(),
                        "toolgate: {}",
                        crate::protocol::STDOUT_CLOSED
                    );
                    return 2;
                }
                let mut out = std::io::stdout().lock();
                match writeln!(out, "{reply}").and_then(|()| out.flush()) {
                    Ok(()) => 0,
                    Err(_) => 2,
                }
            }
            Self::Denied(reason) => {
                let _ = writeln!(std::io::stderr().lock(), "toolgate: {reason}");
                2
            }
        }
    }
}

/// Returns whether a client would act differently if it did not read the answer.
fn is_reply_required(reply: &Value) -> bool {
    let text_at = |pointer: &str| reply.pointer(pointer).and_then(Value::as_str);
    let has_nested_change = ["updatedInput", "updatedToolOutput"]
        .iter()
        .any(|name| reply.pointer(&format!("/hookSpecificOutput/{name}")).is_some());
    let has_flat_change = ["updated_input", "updated_mcp_tool_output", "tool_input", "tool_result"]
        .iter()
        .any(|name| reply.get(name).is_some());
    let is_refusal = text_at("/hookSpecificOutput/permissionDecision")
        .is_some_and(|decision| decision != "allow");
    is_refusal
        || has_nested_change
        || has_flat_change
        || text_at("/permission") == Some("deny")
        || text_at("/decision") == Some("block")
}

/// Replaces all strings of a result, and keeps its shape.
pub(crate) fn withhold_value(value: &Value) -> Value {
    match value {
        Value::String(_) => "(withheld)".into(),
        Value::Array(items) => items.iter().map(withhold_value).collect(),
        Value::Object(fields) => {
            fields.iter().map(|(name, field)| (name.clone(), withhold_field(name, field))).collect()
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => value.clone(),
    }
}

/// Keeps `type` members, because they state the shape.
fn withhold_field(name: &str, field: &Value) -> Value {
    if name == "type" { field.clone() } else { withhold_value(field) }
}
