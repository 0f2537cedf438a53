//! Parses hook events: one JSON object on standard input.

use std::fmt;
use std::io::{self, Read};

use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use serde_json::value::RawValue;
use toolgate_json::{JsonBounds, parse};

/// Maximum size of an event. A larger one is denied.
pub(crate) const MAX_EVENT_BYTES: u64 = 32 << 20;
/// Reason for denying such an event.
pub(crate) const EVENT_TOO_LARGE: &str = "the event is larger than 32 MiB";
/// Longer strings are removed from an event that is too large.
const MAX_SHORTENED_STRING_BYTES: usize = 1 << 10;
/// Number of bytes of invalid JSON that are searched for the members of an event.
const MAX_SCANNED_BYTES: usize = 1 << 20;
/// Limits for parsing a result. The size of the event is limited already, and the gate limits
/// results.
const RESULT_BOUNDS: JsonBounds = JsonBounds { bytes: usize::MAX, depth: 128, nodes: usize::MAX };

/// The dialect of the hook protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum HookClient {
    /// Claude Code, and compatible clients.
    ClaudeCode,
    /// Codex, which cannot ask its user.
    Codex,
    /// Cursor, which uses flat answers and cannot ask its user.
    Cursor,
    /// VS Code.
    Vscode,
}

/// A hook event.
#[derive(Debug)]
pub struct HookEvent {
    pub(crate) kind: HookEventKind,
    /// Event name, which the answer must repeat; `None` in the plain protocol.
    pub(crate) name: Option<String>,
    pub(crate) session: String,
    pub(crate) tool: String,
    /// Arguments as written, so that duplicate keys are detected.
    pub(crate) input: String,
    pub(crate) id: Option<String>,
}

/// The kind of an event.
#[derive(Debug)]
pub(crate) enum HookEventKind {
    BeforeTool,
    AfterTool(Value),
    ToolFailed {
        error: String,
        interrupted: bool,
    },
    /// The tool ran, and its result cannot be parsed.
    UnreadableResult,
    SessionStart,
    SessionEnd,
    UserPrompt(String),
    /// An invalid event about a tool: the reason, and the readable part of the result if the tool
    /// ran.
    Malformed(String, Option<Value>),
}

#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct RawHookEvent<'t> {
    hook_event_name: Option<String>,
    session_id: Option<String>,
    conversation_id: Option<String>,
    tool_name: Option<String>,
    #[serde(borrow)]
    tool_input: Option<&'t RawValue>,
    #[serde(borrow)]
    tool_response: Option<&'t RawValue>,
    #[serde(borrow, default, deserialize_with = "deserialize_present")]
    tool_result: Option<&'t RawValue>,
    tool_output: Option<String>,
    tool_use_id: Option<String>,
    error: Option<Value>,
    error_message: Option<String>,
    #[serde(default)]
    is_interrupt: bool,
    prompt: Option<String>,
}

/// Distinguishes a result of `null` from a missing one.
fn deserialize_present<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(deserializer).map(Some)
}

/// All members of an object, including duplicate keys.
struct JsonMembers<'t>(Vec<(String, &'t RawValue)>);

impl<'de> Deserialize<'de> for JsonMembers<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct JsonMembersVisitor;
        impl<'de> Visitor<'de> for JsonMembersVisitor {
            type Value = JsonMembers<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(
                self,
                mut map: A,
            ) -> Result<JsonMembers<'de>, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry::<String, &'de RawValue>()? {
                    members.push(member);
                }
                Ok(JsonMembers(members))
            }
        }
        deserializer.deserialize_map(JsonMembersVisitor)
    }
}

/// Tool name in the ledger for an event without one.
const UNNAMED_TOOL_NAME: &str = "unnamed";
/// Session name in the ledger for an event without one, as in the gateway.
const REJECTED_SESSION_NAME: &str = "(turned away)";

impl HookEvent {
    /// Builds an event from an invalid one if it is about a tool, with the first of duplicate
    /// members.
    ///
    /// The gate denies this call and records it.
    fn from_malformed(text: &str, is_about_tool: bool, why: String) -> Result<Self, String> {
        let text = text.trim_start_matches('\u{feff}');
        let Ok(JsonMembers(members)) = serde_json::from_str::<JsonMembers<'_>>(text) else {
            return Self::recover(text.as_bytes(), why);
        };
        let first = |name: &str| {
            let (_, raw) = members.iter().find(|(key, _)| key == name)?;
            serde_json::from_str::<String>(raw.get()).ok().filter(|text| !text.is_empty())
        };
        let events = [
            "PreToolUse",
            "preToolUse",
            "PostToolUse",
            "postToolUse",
            "PostToolUseFailure",
            "postToolUseFailure",
        ];
        let is_about_tool = is_about_tool
            || first("hook_event_name").is_some_and(|name| events.contains(&name.as_str()));
        let Some(tool) =
            first("tool_name").or_else(|| is_about_tool.then(|| UNNAMED_TOOL_NAME.to_owned()))
        else {
            return Err(why);
        };
        let default_session = if members.iter().all(|(key, _)| key != "hook_event_name") {
            "plain"
        } else {
            REJECTED_SESSION_NAME
        };
        let session = first("session_id")
            .or_else(|| first("conversation_id"))
            .unwrap_or_else(|| default_session.to_owned());
        // A denial is an exit code. After a tool, that would not withhold the result, so an
        // unambiguous event name is repeated in the answer.
        let is_unambiguous =
            members.iter().filter(|(key, _)| key == "hook_event_name").count() == 1;
        let name = first("hook_event_name").filter(|name| is_unambiguous && is_after_event(name));
        let find_result =
            || members.iter().find(|(key, _)| key == "tool_response" || key == "tool_result");
        let result = name.as_ref().map(|_| {
            find_result()
                .and_then(|(_, raw)| parse(raw.get().as_bytes(), &RESULT_BOUNDS).ok())
                .unwrap_or_default()
        });
        Ok(Self {
            kind: HookEventKind::Malformed(why, result),
            name,
            session,
            tool,
            input: "{}".to_owned(),
            id: first("tool_use_id"),
        })
    }

    /// Recovers an event after a tool from invalid or incomplete JSON.
    ///
    /// Answering with an exit code would show the result to the model.
    pub(crate) fn recover(text: &[u8], why: String) -> Result<Self, String> {
        let members = scan_members(text);
        let first = |name: &str| {
            members
                .iter()
                .find(|(key, value)| key == name && !value.is_empty())
                .map(|(_, value)| value.clone())
        };
        let mut names = members.iter().filter(|(key, _)| key == "hook_event_name");
        let name = match (names.next(), names.next()) {
            (Some((_, name)), None) if is_after_event(name) => name.clone(),
            _ => return Err(why),
        };
        let session = first("session_id")
            .or_else(|| first("conversation_id"))
            .unwrap_or_else(|| REJECTED_SESSION_NAME.to_owned());
        let tool = first("tool_name").unwrap_or_else(|| UNNAMED_TOOL_NAME.to_owned());
        let kind = HookEventKind::Malformed(why, Some(Value::Null));
        Ok(Self {
            kind,
            name: Some(name),
            session,
            tool,
            input: "{}".to_owned(),
            id: first("tool_use_id"),
        })
    }

    /// Reads an event that exceeds the limit, without its long strings.
    ///
    /// The shape of the event is enough to withhold the result in the form that the client expects.
    pub(crate) fn read_oversized(head: &[u8], rest: &mut dyn Read) -> Result<Self, String> {
        let (mut shortener, mut buffer, mut input) =
            (EventShortener::default(), vec![0_u8; 64 << 10], head.chain(rest));
        while shortener.text.len() as u64 <= MAX_EVENT_BYTES {
            match input.read(&mut buffer) {
                Ok(0) => break,
                Ok(length) => shortener.add(buffer.get(..length).unwrap_or_default()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        Self::from_malformed(
            &String::from_utf8_lossy(&shortener.text),
            false,
            EVENT_TOO_LARGE.to_owned(),
        )
    }

    /// Parses the bytes of an event.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        if bytes.len() as u64 > MAX_EVENT_BYTES {
            return Self::read_oversized(bytes, &mut io::empty());
        }
        match std::str::from_utf8(bytes) {
            Ok(text) => Self::parse_text(text),
            Err(error) => Self::from_malformed(
                &String::from_utf8_lossy(bytes),
                false,
                invalid_event_message(&error),
            ),
        }
    }

    /// Returns whether the tool has run, so that its result is shown unless it is withheld.
    pub(crate) const fn is_after_run(&self) -> bool {
        matches!(
            self.kind,
            HookEventKind::AfterTool(_)
                | HookEventKind::UnreadableResult
                | HookEventKind::Malformed(_, Some(_))
        )
    }

    /// Parses the text of an event.
    fn parse_text(text: &str) -> Result<Self, String> {
        let text = text.trim_start_matches('\u{feff}');
        // serde accepts an array as the fields in their order.
        if text.trim_start().starts_with('[') {
            return Err(invalid_event_message(&"a list, not a JSON object"));
        }
        let fields: RawHookEvent<'_> = match serde_json::from_str(text) {
            Ok(fields) => fields,
            Err(error) => return Self::from_malformed(text, false, invalid_event_message(&error)),
        };
        let name = fields.hook_event_name;
        // Strict: other parsers read a different one of two duplicate keys.
        let result = |raw: Option<&RawValue>| match raw
            .map(|raw| parse(raw.get().as_bytes(), &RESULT_BOUNDS))
        {
            None => HookEventKind::AfterTool(Value::Null),
            Some(parsed) => {
                parsed.map_or(HookEventKind::UnreadableResult, HookEventKind::AfterTool)
            }
        };
        let kind = match name.as_deref() {
            Some("PreToolUse" | "preToolUse") => HookEventKind::BeforeTool,
            Some("PostToolUse") => result(fields.tool_response.or(fields.tool_result)),
            Some("postToolUse") => parse_nested(fields.tool_output.as_deref().unwrap_or("null")),
            Some("PostToolUseFailure" | "postToolUseFailure") => {
                let text =
                    |error: Value| error.as_str().map_or_else(|| error.to_string(), str::to_owned);
                let error = fields
                    .error_message
                    .or(fields.error.map(text))
                    .unwrap_or_else(|| "the tool failed".to_owned());
                HookEventKind::ToolFailed { error, interrupted: fields.is_interrupt }
            }
            Some("SessionStart" | "sessionStart") => HookEventKind::SessionStart,
            Some("SessionEnd" | "sessionEnd") => HookEventKind::SessionEnd,
            Some("UserPromptSubmit") => {
                HookEventKind::UserPrompt(fields.prompt.unwrap_or_default())
            }
            Some(other) => return Err(format!("unsupported event `{}`", other.escape_debug())),
            // In the plain protocol, an event with a result comes after the tool.
            None if fields.tool_result.is_some() => result(fields.tool_result),
            None => HookEventKind::BeforeTool,
        };
        let is_about_tool = matches!(
            kind,
            HookEventKind::BeforeTool
                | HookEventKind::AfterTool(_)
                | HookEventKind::UnreadableResult
                | HookEventKind::ToolFailed { .. }
        );
        let tool = match fields.tool_name {
            Some(tool) if !tool.is_empty() => tool,
            _ if is_about_tool => {
                return Self::from_malformed(text, true, "`tool_name` is required".to_owned());
            }
            _ => String::new(),
        };
        let input = fields.tool_input.map_or("{}", RawValue::get);
        // Some clients send the arguments as a string of JSON.
        let input = match serde_json::from_str::<String>(input) {
            Ok(text) => text,
            Err(_) => input.to_owned(),
        };
        let session = fields.session_id.or(fields.conversation_id).filter(|id| !id.is_empty());
        if session.is_none() && name.is_some() {
            return Self::from_malformed(
                text,
                is_about_tool,
                "`session_id` is required".to_owned(),
            );
        }
        // An empty id would be the same for every call.
        let id = fields.tool_use_id.filter(|id| !id.is_empty());
        Ok(Self {
            kind,
            name,
            session: session.unwrap_or_else(|| "plain".to_owned()),
            tool,
            input,
            id,
        })
    }
}

fn invalid_event_message(error: &dyn fmt::Display) -> String {
    format!("standard input is not a hook event: {error}")
}

fn is_after_event(name: &str) -> bool {
    matches!(name, "PostToolUse" | "postToolUse")
}

/// An event without its long strings, and with its shape unchanged.
#[derive(Default)]
struct EventShortener {
    text: Vec<u8>,
    /// Start of the string that has not ended yet.
    string_start: Option<usize>,
    is_escaped: bool,
    is_skipping: bool,
}

impl EventShortener {
    fn add(&mut self, mut bytes: &[u8]) {
        while let Some((byte, rest)) = bytes.split_first() {
            self.push(*byte);
            // Skip the rest of a removed string at once.
            let skipped = if self.is_skipping && !self.is_escaped {
                rest.iter().position(|byte| matches!(byte, b'"' | b'\\'))
            } else {
                Some(0)
            };
            bytes = skipped.and_then(|at| rest.get(at..)).unwrap_or_default();
        }
    }

    fn push(&mut self, byte: u8) {
        let Some(start) = self.string_start else {
            self.text.push(byte);
            self.string_start = (byte == b'"').then_some(self.text.len());
            return;
        };
        let is_end = byte == b'"' && !self.is_escaped;
        self.is_escaped = byte == b'\\' && !self.is_escaped;
        if is_end {
            self.text.push(byte);
            (self.string_start, self.is_skipping) = (None, false);
        } else if !self.is_skipping {
            self.text.push(byte);
            if self.text.len() - start > MAX_SHORTENED_STRING_BYTES {
                self.text.truncate(start);
                self.is_skipping = true;
            }
        }
    }
}

/// Returns the string members of the outer object in the first part of invalid JSON.
fn scan_members(text: &[u8]) -> Vec<(String, String)> {
    let (mut members, mut depth, mut key, mut is_value) = (Vec::new(), 0_usize, None, false);
    let (mut start, mut is_escaped) = (None, false);
    for (at, byte) in text.iter().enumerate().take(MAX_SCANNED_BYTES) {
        if let Some(from) = start {
            let is_end = *byte == b'"' && !is_escaped;
            is_escaped = *byte == b'\\' && !is_escaped;
            if !is_end {
                continue;
            }
            start = None;
            if depth == 1 {
                let string = text
                    .get(from..=at)
                    .and_then(|string| serde_json::from_slice::<String>(string).ok());
                if is_value {
                    members.extend(key.take().zip(string));
                } else {
                    key = string;
                }
            }
            continue;
        }
        match byte {
            b'"' => start = Some(at),
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth = depth.saturating_sub(1),
            b':' if depth == 1 => is_value = true,
            b',' if depth == 1 => (key, is_value) = (None, false),
            _ => {}
        }
    }
    members
}

/// Parses JSON inside a string, else returns the string.
fn parse_nested(text: &str) -> HookEventKind {
    match parse(text.as_bytes(), &RESULT_BOUNDS) {
        Ok(value) => HookEventKind::AfterTool(value),
        Err(_) if serde_json::from_str::<Value>(text).is_ok() => HookEventKind::UnreadableResult,
        Err(_) => HookEventKind::AfterTool(Value::String(text.to_owned())),
    }
}
