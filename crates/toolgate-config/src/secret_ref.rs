//! Resolves values that come from the environment or from a file.

use std::collections::VecDeque;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use crate::config::ConfigReader;
use toolgate::policy::source::table_reader::TomlTable;
use toolgate::policy::{Diagnostic, SourceSpan};

/// A value that may come from the environment (`${NAME}`) or from a file (`{ file = "…" }`).
///
/// It is resolved when it is needed, and its value is never shown.
#[derive(Clone)]
pub struct SecretRef {
    parts: Vec<SecretRefPart>,
    span: Option<SourceSpan>,
}

#[derive(Clone)]
enum SecretRefPart {
    Text(String),
    Variable(String),
    /// A file, and the values that were read from it.
    File(PathBuf, SecretHistory),
}

impl fmt::Debug for SecretRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reference")
    }
}

impl SecretRef {
    /// Parses a text in which `${NAME}` refers to an environment variable.
    ///
    /// # Errors
    /// A `${` is not closed.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once("${") {
            let (name, after_name) = after.split_once('}').ok_or("`${` is not closed")?;
            parts.push(SecretRefPart::Text(before.to_owned()));
            parts.push(SecretRefPart::Variable(name.to_owned()));
            rest = after_name;
        }
        parts.push(SecretRefPart::Text(rest.to_owned()));
        Ok(Self { parts, span: None })
    }

    /// Parses a value from a client's file. Some clients write `${env:NAME}` for `${NAME}`.
    pub(crate) fn parse_client_value(text: &str) -> Result<Self, String> {
        let mut reference = Self::parse(text)?;
        for part in &mut reference.parts {
            if let SecretRefPart::Variable(name) = part
                // `${env:-default}` is a variable called `env` with a default.
                && let Some(bare) = name.strip_prefix("env:").filter(|bare| !bare.starts_with('-'))
            {
                *part = SecretRefPart::Variable(bare.to_owned());
            }
        }
        Ok(reference)
    }

    /// Resolves the current value.
    ///
    /// # Errors
    /// A variable or file is missing. The message does not reveal values.
    pub fn resolve(&self) -> Result<String, String> {
        let resolve_part = |part: &SecretRefPart| match part {
            SecretRefPart::Text(text) => Ok(text.clone()),
            SecretRefPart::Variable(written) => {
                // Clients write a default for an unset variable after `:-`.
                let (name, otherwise) = written
                    .split_once(":-")
                    .map_or((written.as_str(), None), |(name, other)| (name, Some(other)));
                let missing = || {
                    format!(
                        "the environment variable `{}` is not set",
                        toolgate_text::escape_for_display(name)
                    )
                };
                std::env::var(name)
                    .ok()
                    .or_else(|| otherwise.map(str::to_owned))
                    .ok_or_else(missing)
            }
            SecretRefPart::File(path, _) => {
                toolgate::policy::source::read_file::read_untrusted_text_file(path)
                    .map(|text| text.trim_end_matches(['\r', '\n']).to_owned())
                    .map_err(|error| format!("{}: {error}", path.display()))
            }
        };
        self.parts.iter().map(resolve_part).collect()
    }

    /// Resolves the current value and remembers it, so that it stays redacted if the file changes
    /// later.
    ///
    /// The remembered values stay in memory.
    ///
    /// # Errors
    /// A variable or file is missing. The message does not reveal values.
    pub fn resolve_and_remember(&self) -> Result<String, String> {
        let value = self.resolve()?;
        if let Some((_, history)) = self.source_file() {
            history.add(&value);
        }
        Ok(value)
    }

    /// Returns the file of this value. Only files need to be remembered; the environment of a
    /// process does not change.
    fn source_file(&self) -> Option<(&PathBuf, &SecretHistory)> {
        match self.parts.as_slice() {
            [SecretRefPart::File(path, history)] => Some((path, history)),
            _ => None,
        }
    }

    /// Checks whether `other` resolves to the value that was last used here.
    ///
    /// If nothing was used yet, the current values are compared. An unreadable or empty file may be
    /// in the middle of a write and counts as unchanged.
    pub(crate) fn is_unchanged(&self, other: &Self) -> bool {
        let last = self.source_file().and_then(|(_, history)| history.values().pop());
        let is_one_file = || {
            self.source_file()
                .zip(other.source_file())
                .is_some_and(|((values, _), (other_values, _))| values == other_values)
        };
        match (last.map_or_else(|| self.resolve(), Ok), other.resolve()) {
            (Ok(_), Err(_)) => is_one_file(),
            (Ok(_), Ok(other_values)) if other_values.is_empty() && is_one_file() => true,
            (values, other_values) => values == other_values,
        }
    }

    /// Lists the current value and all remembered values.
    pub(crate) fn known_values(&self) -> Vec<String> {
        let used = self.source_file().map(|(_, used)| used.values()).unwrap_or_default();
        used.into_iter().chain(self.resolve().ok()).collect()
    }

    /// Lists current and remembered values that come from the environment or from a file. They are
    /// secret.
    pub(crate) fn secret_values(&self) -> impl Iterator<Item = String> {
        let values_of = |part: &SecretRefPart| match part {
            SecretRefPart::Text(_) => Vec::new(),
            other => Self { parts: vec![other.clone()], span: None }.known_values(),
        };
        self.parts.iter().flat_map(values_of)
    }

    pub(crate) fn with_span(self, place: SourceSpan) -> Self {
        Self { span: Some(place), ..self }
    }

    /// Describes why the value cannot be resolved.
    pub(crate) fn resolution_problem(&self) -> Option<Diagnostic> {
        let reason = self.resolve().err()?;
        let help = match self.parts.first() {
            Some(SecretRefPart::File(..)) => "a path is relative to this file",
            _ => "set it where toolgate is started, or use `{ file = \"…\" }`",
        };
        Some(Diagnostic { span: self.span.clone(), ..Diagnostic::new(reason).with_help(help) })
    }
}

/// Maximum number of remembered secrets. A running call may still use an earlier one.
const MAX_REMEMBERED_SECRETS: usize = 8;

/// The latest secrets that were handed out. They are never shown.
#[derive(Clone, Default)]
pub(crate) struct SecretHistory(Arc<Mutex<VecDeque<String>>>);

impl fmt::Debug for SecretHistory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Given")
    }
}

impl SecretHistory {
    pub(crate) fn add(&self, secret: &str) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|value| value != secret);
        known.push_back(secret.to_owned());
        if known.len() > MAX_REMEMBERED_SECRETS {
            known.pop_front();
        }
    }

    pub(crate) fn values(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

/// Removes these values from a text, as a whole and without their authentication scheme.
pub(crate) fn redact_references<'a>(
    references: impl IntoIterator<Item = &'a SecretRef>,
    text: &str,
) -> String {
    let of = |reference: &'a SecretRef| {
        reference
            .secret_values()
            .chain(reference.known_values().into_iter().flat_map(with_and_without_scheme))
    };
    toolgate::redact::remove_values(references.into_iter().flat_map(of), text)
}

/// Returns a value, and the same value without a scheme such as `Bearer`, because services repeat
/// either.
pub(crate) fn with_and_without_scheme(value: String) -> Vec<String> {
    let without_scheme = value.split_once(' ').map(|(_, without_scheme)| without_scheme.to_owned());
    let without_scheme = without_scheme
        .filter(|without_scheme| without_scheme.len() >= 8 && !without_scheme.contains(' '));
    without_scheme.into_iter().chain([value]).collect()
}

impl ConfigReader<'_> {
    /// Reads a reference. Problems do not reveal its value.
    pub(crate) fn read_reference(&self, table: &TomlTable<'_>, key: &str) -> Option<SecretRef> {
        if table.is_table(key) {
            let inner = table.table(key)?;
            let path = inner.text("file").map(|path| self.base_dir.join(path));
            inner.reject_unknown_keys("a reference");
            let Some(path) = path else {
                table.report(
                    key,
                    Diagnostic::new("a reference needs a `file`")
                        .with_help("like `{ file = \"/run/secrets/key\" }`"),
                );
                return None;
            };
            self.referenced_files.borrow_mut().value_files.push(path.clone());
            return Some(SecretRef {
                parts: vec![SecretRefPart::File(path, SecretHistory::default())],
                span: Some(table.span_of(key)),
            });
        }
        match SecretRef::parse(table.text(key)?) {
            Ok(reference) => Some(reference.with_span(table.span_of(key))),
            Err(reason) => {
                table.report(key, Diagnostic::new(reason).with_help("like `${API_KEY}`"));
                None
            }
        }
    }

    /// Resolves a value that is needed immediately, and returns its secret parts.
    pub(crate) fn read_secret(
        &self,
        table: &TomlTable<'_>,
        key: &str,
    ) -> Option<(String, Vec<String>)> {
        let reference = self.read_reference(table, key)?;
        if let Some(problem) = reference.resolution_problem() {
            table.report(key, problem);
            return None;
        }
        Some((reference.resolve().ok()?, reference.secret_values().collect()))
    }

    /// Reads a table of references.
    pub(crate) fn read_references(
        &self,
        table: &TomlTable<'_>,
        key: &str,
    ) -> Vec<(String, SecretRef)> {
        let Some(inner) = table.table(key) else { return Vec::new() };
        inner
            .keys()
            .into_iter()
            .filter_map(|name| self.read_reference(&inner, &name).map(|value| (name, value)))
            .collect()
    }
}
