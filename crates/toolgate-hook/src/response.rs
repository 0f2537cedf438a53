//! Renders the answer to an event: exit code 0 with a JSON object, or exit code 2 with a reason on
//! standard error.

use std::io::Write;

use serde_json::{Map, Value, json};

use super::event::{Client, Event, Kind};

/// The answer to an event.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub(crate) decision: Option<Decision>,
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
pub(crate) enum Decision {
    Allow,
    Deny(String),
    Ask(String),
    /// The tool ran, and its result is not acceptable.
    Block(String),
}

impl Answer {
    pub(crate) fn deny(reason: impl Into<String>) -> Self {
        Self { decision: Some(Decision::Deny(reason.into())), ..Self::default() }
    }

    pub(crate) fn ask(reason: impl Into<String>) -> Self {
        Self { decision: Some(Decision::Ask(reason.into())), ..Self::default() }
    }

    pub(crate) fn block(reason: impl Into<String>) -> Self {
        Self { decision: Some(Decision::Block(reason.into())), ..Self::default() }
    }

    /// Builds an answer that withholds the result of a tool.
    pub(crate) fn withhold(event: &Event, reason: impl Into<String>) -> Self {
        let output = match &event.kind {
            Kind::AfterTool(given) => Some(withhold_value(given)),
            Kind::Malformed(_, Some(given)) if !given.is_null() => Some(withhold_value(given)),
            // Most clients accept a result of this shape.
            Kind::UnreadableResult | Kind::Malformed(_, Some(_)) => {
                Some(json!({"stdout": "(withheld)", "stderr": "", "interrupted": false}))
            }
            _ => None,
        };
        Self { replaced_output: output, ..Self::block(reason) }
    }

    /// Builds the answer for an event that the gate could not judge.
    pub(crate) fn gate_error(event: &Event, reason: impl Into<String>) -> Self {
        if event.is_after_run() { Self::withhold(event, reason) } else { Self::deny(reason) }
    }

    /// Renders the answer in the dialect of the client.
    pub(crate) fn render(self, event: &Event, client: Client) -> Rendered {
        match (&event.name, client) {
            (None, _) => self.render_plain(event),
            (Some(_), Client::Cursor) => self.render_flat(event),
            (Some(name), _) => self.render_nested(name, event, client),
        }
    }

    fn render_plain(self, event: &Event) -> Rendered {
        let mut told = Map::new();
        match self.decision {
            // A client that checks only the exit code reads any JSON as permission.
            Some(Decision::Deny(reason) | Decision::Ask(reason)) => return Rendered::Denied(reason),
            Some(Decision::Block(reason)) => {
                told.insert("reason".to_owned(), reason.into());
            }
            Some(Decision::Allow) | None if matches!(event.kind, Kind::BeforeTool) => {
                told.insert("decision".to_owned(), "allow".into());
            }
            _ => {}
        }
        told.extend(self.updated_input.map(|input| ("tool_input".to_owned(), input)));
        told.extend(self.replaced_output.map(|output| ("tool_result".to_owned(), output)));
        Rendered::Json(Value::Object(told))
    }

    fn render_flat(self, event: &Event) -> Rendered {
        let mut told = Map::new();
        let mut say = |key: &str, value: Value| told.insert(key.to_owned(), value);
        match self.decision {
            // Cursor cannot ask its user, so a question is a denial.
            Some(Decision::Deny(reason) | Decision::Ask(reason)) if matches!(event.kind, Kind::BeforeTool) => {
                say("permission", "deny".into());
                say("user_message", reason.as_str().into());
                say("agent_message", reason.into());
            }
            Some(Decision::Deny(reason) | Decision::Ask(reason) | Decision::Block(reason)) => {
                say("additional_context", reason.into());
            }
            Some(Decision::Allow) | None if matches!(event.kind, Kind::BeforeTool) => {
                say("permission", "allow".into());
            }
            _ => {}
        }
        if let Some(context) = self.context {
            say("additional_context", context.into());
        }
        if let Some(input) = self.updated_input {
            say("updated_input", input);
        }
        if let Some(output) = self.replaced_output {
            say("updated_mcp_tool_output", output);
        }
        Rendered::Json(Value::Object(told))
    }

    fn render_nested(self, name: &str, event: &Event, client: Client) -> Rendered {
        let (mut top, mut inner) = (Map::new(), Map::new());
        let before = matches!(event.kind, Kind::BeforeTool);
        let decide = |inner: &mut Map<String, Value>, word: &str, reason: Option<String>| {
            inner.insert("permissionDecision".to_owned(), word.into());
            inner.extend(reason.map(|reason| ("permissionDecisionReason".to_owned(), reason.into())));
        };
        let rewritten = self.updated_input.is_some();
        match self.decision {
            Some(Decision::Deny(reason)) if before => decide(&mut inner, "deny", Some(reason)),
            Some(Decision::Ask(reason)) if before && client == Client::Codex => {
                decide(&mut inner, "deny", Some(format!("{reason} This client cannot ask its user, so the call is denied.")));
            }
            Some(Decision::Ask(reason)) if before => decide(&mut inner, "ask", Some(reason)),
            Some(Decision::Allow) if before && client != Client::Codex => decide(&mut inner, "allow", None),
            // Codex ignores changed arguments without a decision.
            _ if before && rewritten && client == Client::Codex => decide(&mut inner, "allow", None),
            // A session start cannot be blocked. A prompt can.
            Some(Decision::Deny(reason) | Decision::Block(reason)) if matches!(event.kind, Kind::SessionStart | Kind::SessionEnd) => {
                inner.extend(matches!(event.kind, Kind::SessionStart).then(|| ("additionalContext".to_owned(), reason.as_str().into())));
                top.insert("systemMessage".to_owned(), reason.into());
            }
            Some(Decision::Deny(reason) | Decision::Ask(reason) | Decision::Block(reason)) => {
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
            Some(output) if client == Client::Codex => {
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
        Rendered::Json(Value::Object(top))
    }
}

/// The rendered answer.
#[derive(Debug)]
pub(crate) enum Rendered {
    /// The answer was written already, with this exit code.
    AlreadyWritten(u8),
    Json(Value),
    Denied(String),
}

impl Rendered {
    /// Writes the answer, and returns the exit code. If writing fails, the call is denied.
    pub(crate) fn write(self) -> u8 {
        match self {
            Self::AlreadyWritten(code) => code,
            Self::Json(told) => {
                // If the client cannot read the answer, anything but a plain permission must be an
                // exit code.
                if is_reply_required(&told) && crate::protocol::is_stdout_discarded() {
                    let _ = writeln!(std::io::stderr().lock(), "toolgate: {}", crate::protocol::UNHEARD);
                    return 2;
                }
                let mut out = std::io::stdout().lock();
                match writeln!(out, "{told}").and_then(|()| out.flush()) {
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
fn is_reply_required(told: &Value) -> bool {
    let word = |place: &str| told.pointer(place).and_then(Value::as_str);
    let inner = ["updatedInput", "updatedToolOutput"].iter().any(|name| told.pointer(&format!("/hookSpecificOutput/{name}")).is_some());
    let outer = ["updated_input", "updated_mcp_tool_output", "tool_input", "tool_result"].iter().any(|name| told.get(name).is_some());
    let refuses = word("/hookSpecificOutput/permissionDecision").is_some_and(|word| word != "allow");
    refuses || inner || outer || word("/permission") == Some("deny") || word("/decision") == Some("block")
}

/// Replaces all strings of a result, and keeps its shape.
pub(crate) fn withhold_value(value: &Value) -> Value {
    match value {
        Value::String(_) => "(withheld)".into(),
        Value::Array(items) => items.iter().map(withhold_value).collect(),
        Value::Object(fields) => fields.iter().map(|(name, field)| (name.clone(), withhold_field(name, field))).collect(),
        Value::Null | Value::Bool(_) | Value::Number(_) => value.clone(),
    }
}

/// Keeps `type` members, because they state the shape.
fn withhold_field(name: &str, field: &Value) -> Value {
    if name == "type" { field.clone() } else { withhold_value(field) }
}
