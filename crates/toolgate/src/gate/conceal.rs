//! A secret among the arguments that a tool repeats when it fails, or a hook in what it says, is a secret still, also as it is spelled
//! in JSON, in a path and in a message.

use serde_json::Value;

use crate::code;
use crate::error::ToolError;
use crate::outcome::Signal;
use crate::redact::{cleaned, without_short};
use crate::registry::Registered;

/// The secrets among the arguments of a call, in all their spellings.
pub(super) struct Secrets(Vec<String>);

impl Secrets {
    pub(super) fn among(arguments: &Value, tool: &Registered) -> Self {
        let mut found = Self(Vec::new());
        found.add(arguments, tool);
        found
    }

    /// Those of another document too: of a rewrite, or of a result.
    pub(super) fn add(&mut self, document: &Value, tool: &Registered) {
        tool.secrets.iter().flat_map(|path| path.all(document)).for_each(|value| leaves(value, &mut self.0));
    }

    /// A text without them.
    pub(super) fn clean(&self, text: &str) -> String {
        without_short(&self.0, text)
    }

    /// Takes them out of a failure. Codes of toolgate's own are no words of the tool.
    pub(super) fn conceal(&self, error: &mut ToolError) {
        if self.0.is_empty() {
            return;
        }
        let clean = |text: &str| self.clean(text);
        if code::find(&error.code).is_none() {
            error.code = clean(&error.code).into();
        }
        error.message = clean(&error.message);
        for field in &mut error.errors {
            field.path = clean(&field.path);
            field.got = clean(&field.got);
            field.expected = clean(&field.expected);
            field.did_you_mean = field.did_you_mean.as_deref().map(clean);
        }
        error.upstream = error.upstream.take().map(|said| cleaned(said, &self.0, without_short));
    }

    /// Takes them out of what a signal gives as its reason.
    pub(super) fn conceal_reason(&self, signal: &mut Signal) {
        let (Signal::ExpandSection { reason, .. } | Signal::Abort { reason }) = signal;
        *reason = self.clean(reason);
    }
}

fn leaves(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::String(text) => {
            found.push(text.clone());
            let spelled = value.to_string();
            found.push(spelled.trim_matches('"').to_owned());
            let shown = crate::names::escaped(text);
            if shown != *text {
                found.push(shown);
            }
            if text.contains(['~', '/']) {
                found.push(text.replace('~', "~0").replace('/', "~1"));
            }
        }
        Value::Number(number) => found.push(number.to_string()),
        Value::Array(items) => items.iter().for_each(|item| leaves(item, found)),
        Value::Object(map) => map.values().for_each(|item| leaves(item, found)),
        Value::Null | Value::Bool(_) => {}
    }
}
