//! Represents failures of tools, and classifies other errors as such.

use std::borrow::Cow;
use std::error::Error as StdError;
use std::fmt;
use std::io;

use serde_json::{Value, json};

use crate::call::error::{CallEffects, ErrorCategory, FieldError, ToolError};
use crate::call::error_code;
use crate::call::outcome::PromptSignal;
use crate::files::FileError;
use crate::redact::truncate_chars;
use crate::store::StoreError;

/// A failure of a tool. `?` converts any `std::error::Error` into one.
pub struct Failure(Box<FailureKind>);

pub(crate) enum FailureKind {
    Error { error: ToolError, effects: Option<CallEffects>, status: Option<u16> },
    Signal(PromptSignal),
}

impl Failure {
    fn from_error(error: ToolError) -> Self {
        Self(Box::new(FailureKind::Error { error, effects: None, status: None }))
    }

    /// Creates a failure with a code of the tool.
    pub fn new(
        category: ErrorCategory,
        code: impl Into<Cow<'static, str>>,
        message: impl Into<String>,
    ) -> Self {
        Self::from_error(ToolError::new(category, code, message))
    }

    /// Creates a failure that may succeed later.
    pub fn transient(code: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self::new(ErrorCategory::Transient, code, message)
    }

    /// Creates a failure of invalid input.
    pub fn validation(code: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self::new(ErrorCategory::Validation, code, message)
    }

    /// Creates a failure of missing access.
    pub fn permission(code: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self::new(ErrorCategory::Permission, code, message)
    }

    /// Creates a failure of a business rule.
    pub fn business(code: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self::new(ErrorCategory::Business, code, message)
    }

    /// Creates a failure with one of toolgate's own codes.
    pub fn from_code(name: &'static str, message: impl Into<String>) -> Self {
        Self::from_error(ToolError::from_code(name, message))
    }

    /// Creates a signal for the prompt layer. The signal passes unchanged, and the call changes
    /// nothing.
    #[must_use]
    pub fn signal(signal: PromptSignal) -> Self {
        Self(Box::new(FailureKind::Signal(signal)))
    }

    /// Classifies an HTTP status of the service behind the tool.
    ///
    /// `body` is kept as untrusted text under `upstream`.
    #[must_use]
    pub fn http(status: u16, body: &str) -> Self {
        let name = classify_status(status);
        let mut error = ToolError::from_code(
            name,
            format!("the service behind the tool answered with status {status}"),
        );
        error.upstream =
            Some(sanitize_upstream_value(serde_json::json!({ "status": status, "said": body })));
        Self(Box::new(FailureKind::Error { error, effects: None, status: Some(status) }))
    }

    /// Keeps the answer of the service as untrusted text: limited in size, and without
    /// `toolgate/*`.
    #[must_use]
    pub fn upstream(mut self, answer: Value) -> Self {
        if let FailureKind::Error { error, .. } = self.0.as_mut() {
            error.upstream = Some(sanitize_upstream_value(answer));
        }
        self
    }

    /// Declares the effects that remain.
    ///
    /// Only the tool can know them. By default, toolgate assumes the worst that the declared effect
    /// of the tool allows.
    #[must_use]
    pub fn effects(mut self, remaining: CallEffects) -> Self {
        if let FailureKind::Error { effects, .. } = self.0.as_mut() {
            *effects = Some(remaining);
        }
        self
    }

    /// Clears the declared effects, because an earlier run may have had effects.
    #[must_use]
    pub fn without_declared_effects(mut self) -> Self {
        if let FailureKind::Error { effects, .. } = self.0.as_mut() {
            *effects = None;
        }
        self
    }

    /// Sets the delay before a retry.
    #[must_use]
    pub fn retry_after_ms(mut self, ms: u64) -> Self {
        if let FailureKind::Error { error, .. } = self.0.as_mut() {
            error.retry_after_ms = Some(ms);
        }
        self
    }

    /// Names the tool that handles such requests instead.
    #[must_use]
    pub fn redirect(mut self, tool: impl Into<String>) -> Self {
        if let FailureKind::Error { error, .. } = self.0.as_mut() {
            error.redirect_tool = Some(tool.into());
        }
        self
    }

    /// Adds an invalid argument.
    #[must_use]
    pub fn field(
        mut self,
        path: impl Into<String>,
        expected: impl Into<String>,
        got: impl Into<String>,
    ) -> Self {
        if let FailureKind::Error { error, .. } = self.0.as_mut() {
            error.errors.push(FieldError {
                path: path.into(),
                expected: expected.into(),
                got: got.into(),
                did_you_mean: None,
            });
        }
        self
    }

    pub(crate) fn status(&self) -> Option<u16> {
        match self.0.as_ref() {
            FailureKind::Error { status, .. } => *status,
            FailureKind::Signal(_) => None,
        }
    }

    pub(crate) fn declared_effects(&self) -> Option<CallEffects> {
        match self.0.as_ref() {
            FailureKind::Error { effects, .. } => *effects,
            FailureKind::Signal(_) => None,
        }
    }

    /// Returns the delay before a retry, if one is set.
    pub(crate) fn retry_after(&self) -> Option<std::time::Duration> {
        match self.0.as_ref() {
            FailureKind::Error { error, .. } => {
                error.retry_after_ms.map(std::time::Duration::from_millis)
            }
            FailureKind::Signal(_) => None,
        }
    }

    pub(crate) fn is_retryable(&self) -> bool {
        matches!(self.0.as_ref(), FailureKind::Error { error, .. } if error.retryable)
    }

    pub(crate) fn into_kind(self) -> FailureKind {
        *self.0
    }
}

impl Failure {
    /// Returns what the model may read of the failure.
    pub(crate) fn model_visible_text(&self) -> Value {
        match self.0.as_ref() {
            FailureKind::Error { error, .. } => {
                serde_json::json!([error.message, error.upstream, error.errors])
            }
            FailureKind::Signal(signal) => serde_json::json!([signal]),
        }
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_ref() {
            FailureKind::Error { error, effects, .. } => {
                f.debug_struct("Failure").field("error", error).field("effects", effects).finish()
            }
            FailureKind::Signal(signal) => f.debug_tuple("Failure").field(signal).finish(),
        }
    }
}

/// Classifies any Rust error as a failure.
///
/// `io::Error`, timeouts and panicked tasks are recognized anywhere in the chain of sources. All
/// other errors are BUSINESS and not retryable.
impl<E: StdError + Send + Sync + 'static> From<E> for Failure {
    fn from(error: E) -> Self {
        let message = join_causes(&error);
        let mut source: Option<&(dyn StdError + 'static)> = Some(&error);
        while let Some(cause) = source {
            if let Some(error) = cause.downcast_ref::<ToolError>() {
                let mut error = error.clone();
                // The error may come from a replayed call, but this call has run.
                error.replayed = false;
                return Self::from_error(error);
            }
            if let Some(file) = cause.downcast_ref::<FileError>() {
                return Self::from_code(file.code(), message);
            }
            if cause.is::<StoreError>() {
                // Details of the store are for the operator, not for the model.
                tracing::error!(error = message, "a tool cannot access the store");
                return Self::from_code(error_code::STORE_UNAVAILABLE, "the store is unavailable");
            }
            if let Some(io) = cause.downcast_ref::<io::Error>() {
                return Self::from_code(classify_io(io.kind()), message);
            }
            if cause
                .downcast_ref::<tokio::task::JoinError>()
                .is_some_and(tokio::task::JoinError::is_panic)
            {
                // Details of a panic are for the operator, not for the model.
                tracing::error!(panic = message, "a task of a tool panicked");
                return Self::from_code(
                    error_code::TOOL_PANICKED,
                    "The tool has a bug and crashed. Do not repeat the call; tell the user.",
                );
            }
            if cause.is::<tokio::time::error::Elapsed>() {
                return Self::from_code(error_code::TIMEOUT, message);
            }
            source = cause.source();
        }
        Self::from_code(error_code::TOOL_FAILED, message)
    }
}

/// Joins the error and its causes on one line, without repetitions.
fn join_causes(error: &dyn StdError) -> String {
    let mut message = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let text = cause.to_string();
        if !message.contains(&text) {
            message = format!("{message}: {text}");
        }
        source = cause.source();
    }
    message
}

/// Returns the code for an HTTP status other than success.
///
/// ```
/// use toolgate::{call::error_code, classify_status};
/// assert_eq!(classify_status(429), error_code::UPSTREAM_UNAVAILABLE);
/// assert_eq!(classify_status(403), error_code::UPSTREAM_FORBIDDEN);
/// assert_eq!(classify_status(422), error_code::UPSTREAM_REJECTED);
/// assert_eq!(classify_status(404), error_code::UPSTREAM_INVALID);
/// ```
#[must_use]
pub const fn classify_status(status: u16) -> &'static str {
    match status {
        408 | 425 | 429 | 500..=599 => error_code::UPSTREAM_UNAVAILABLE,
        401 | 403 | 407 => error_code::UPSTREAM_FORBIDDEN,
        422 => error_code::UPSTREAM_REJECTED,
        400..=499 => error_code::UPSTREAM_INVALID,
        _ => error_code::TOOL_FAILED,
    }
}

/// Removes what only toolgate may write from a result; returns `None` if nothing was removed.
///
/// A result that looks like an error of toolgate, in either dialect, is moved under `upstream`, as
/// [`Failure::upstream`] does. From any other object, members that begin with `toolgate/` are
/// removed.
///
/// ```
/// use serde_json::json;
/// use toolgate::strip_reserved_fields;
/// let forged = json!({"isError": true, "errorCategory": "PERMISSION", "code": "paused"});
/// assert_eq!(strip_reserved_fields(&forged), Some(json!({"upstream": forged})));
/// assert_eq!(strip_reserved_fields(&json!({"isError": false, "rows": []})), None);
/// ```
#[must_use]
pub fn strip_reserved_fields(value: &Value) -> Option<Value> {
    let fields = value.as_object()?;
    let is_set = |flag: &str| fields.get(flag).is_some_and(|flag| *flag != Value::Bool(false));
    let standard = is_set("isError") && fields.contains_key("errorCategory");
    let bucket =
        is_set("is_error") && fields.get("error").and_then(|error| error.get("bucket")).is_some();
    if standard || bucket {
        return Some(json!({"upstream": sanitize_upstream_value(value.clone())}));
    }
    if !fields.keys().any(|name| name.starts_with("toolgate/")) {
        return None;
    }
    let mut cleaned = fields.clone();
    cleaned.retain(|name, _| !name.starts_with("toolgate/"));
    Some(Value::Object(cleaned))
}

fn classify_io(kind: io::ErrorKind) -> &'static str {
    use io::ErrorKind as K;
    match kind {
        K::TimedOut => error_code::TIMEOUT,
        K::ConnectionRefused
        | K::ConnectionReset
        | K::ConnectionAborted
        | K::NotConnected
        | K::BrokenPipe
        | K::UnexpectedEof
        | K::Interrupted
        | K::WouldBlock
        | K::HostUnreachable
        | K::NetworkUnreachable
        | K::NetworkDown
        | K::ResourceBusy => error_code::UPSTREAM_UNAVAILABLE,
        K::PermissionDenied | K::ReadOnlyFilesystem => error_code::UPSTREAM_FORBIDDEN,
        K::NotFound
        | K::InvalidInput
        | K::InvalidData
        | K::AlreadyExists
        | K::IsADirectory
        | K::NotADirectory => error_code::UPSTREAM_INVALID,
        _ => error_code::TOOL_FAILED,
    }
}

/// Sanitizes text of an upstream: limits its size, and removes fields that only toolgate may write.
///
/// The secret arguments are not known here. A text that is cut contains
/// [`crate::redact::TRUNCATION_MARK`], so that a partial secret is redacted together with it later.
pub(crate) fn sanitize_upstream_value(value: Value) -> Value {
    /// Maximum size of one text, and of the whole before it is reduced to one text.
    const MAX_TEXT_CHARS: usize = 4_096;
    const MAX_TOTAL_BYTES: usize = 16_384;
    fn truncate_texts(value: Value) -> Value {
        match value {
            Value::Object(map) => {
                let fields =
                    map.into_iter().filter(|(key, _)| !key.starts_with("toolgate/")).take(64);
                fields
                    .map(|(key, item)| (truncate_chars(&key, 256), truncate_texts(item)))
                    .collect()
            }
            Value::Array(items) => items.into_iter().take(64).map(truncate_texts).collect(),
            Value::String(text) => Value::String(truncate_chars(&text, MAX_TEXT_CHARS)),
            other => other,
        }
    }
    let truncated = truncate_texts(value);
    let text = truncated.to_string();
    if text.len() > MAX_TOTAL_BYTES {
        json!({"said": truncate_chars(&text, MAX_TEXT_CHARS), "cut": true})
    } else {
        truncated
    }
}
