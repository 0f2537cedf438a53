//! Masks secret arguments in failures and in hook messages.
//!
//! A secret is masked in its JSON, path and message spellings too.

use serde_json::Value;

use crate::agent::ToolEntry;
use crate::call::error::ToolError;
use crate::call::error_code;
use crate::call::outcome::PromptSignal;
use crate::redact::{clean_document, remove_values_and_short_words};

/// The secret arguments of a call, in all their spellings.
pub(crate) struct SecretValues(Vec<String>);

impl SecretValues {
    pub(crate) fn from_arguments(arguments: &Value, tool: &ToolEntry) -> Self {
        let mut found = Self(Vec::new());
        found.add_document(arguments, tool);
        found
    }

    /// Adds the secrets of another document: a rewrite or a result.
    pub(crate) fn add_document(&mut self, document: &Value, tool: &ToolEntry) {
        tool.secrets
            .iter()
            .flat_map(|path| path.get_all(document))
            .for_each(|value| collect_spellings(value, &mut self.0));
    }

    /// Removes the secrets from a text.
    pub(crate) fn mask_text(&self, text: &str) -> String {
        remove_values_and_short_words(&self.0, text)
    }

    /// Removes the secrets from an error. Toolgate's own error codes never contain secrets.
    pub(crate) fn mask_error(&self, error: &mut ToolError) {
        if self.0.is_empty() {
            return;
        }
        let clean = |text: &str| self.mask_text(text);
        if error_code::find(&error.code).is_none() {
            error.code = clean(&error.code).into();
        }
        error.message = clean(&error.message);
        for field in &mut error.errors {
            field.path = clean(&field.path);
            field.got = clean(&field.got);
            field.expected = clean(&field.expected);
            field.did_you_mean = field.did_you_mean.as_deref().map(clean);
        }
        error.upstream = error
            .upstream
            .take()
            .map(|upstream| clean_document(upstream, &self.0, remove_values_and_short_words));
    }

    /// Removes the secrets from the reason of a signal.
    pub(crate) fn mask_signal(&self, signal: &mut PromptSignal) {
        let (PromptSignal::ExpandSection { reason, .. } | PromptSignal::Abort { reason }) = signal;
        *reason = self.mask_text(reason);
    }
}

fn collect_spellings(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::String(text) => {
            found.push(text.clone());
            let spelled = value.to_string();
            found.push(spelled.trim_matches('"').to_owned());
            let shown = toolgate_text::escape_text(text);
            if shown != *text {
                found.push(shown);
            }
            if text.contains(['~', '/']) {
                found.push(text.replace('~', "~0").replace('/', "~1"));
            }
        }
        Value::Number(number) => found.push(number.to_string()),
        Value::Array(items) => items.iter().for_each(|item| collect_spellings(item, found)),
        Value::Object(map) => map.values().for_each(|item| collect_spellings(item, found)),
        Value::Null | Value::Bool(_) => {}
    }
}
