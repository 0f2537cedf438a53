//! Defines the error contract: one type with two serializations.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::call::CallId;
use crate::call::error_code;

/// Category of an error, which tells a model what to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum ErrorCategory {
    /// Retry later.
    Transient,
    /// Correct the call, or ask the user.
    Validation,
    /// Tell the user or escalate. Never retry.
    Permission,
    /// Explain the rule.
    Business,
}

impl ErrorCategory {
    /// Returns the name in the bucket dialect.
    #[must_use]
    pub const fn bucket(self) -> &'static str {
        match self {
            Self::Transient => "Transient",
            Self::Validation => "Data",
            Self::Permission => "Permission",
            Self::Business => "Business",
        }
    }

    fn from_bucket(name: &str) -> Option<Self> {
        [Self::Transient, Self::Validation, Self::Permission, Self::Business]
            .into_iter()
            .find(|c| c.bucket() == name)
    }
}

/// Format of errors for a model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorDialect {
    /// `{"isError": true, "errorCategory", "code", "message", …}`.
    #[default]
    Standard,
    /// `{"is_error": true, "error": {"bucket", "code", "detail", …}}`.
    Bucket,
}

impl fmt::Display for ErrorCategory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Transient => "TRANSIENT",
            Self::Validation => "VALIDATION",
            Self::Permission => "PERMISSION",
            Self::Business => "BUSINESS",
        })
    }
}

/// Effects of a failed call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CallEffects {
    /// Nothing happened, provably.
    None,
    /// The action happened and was undone.
    RolledBack,
    /// The action happened.
    Done,
    /// The action may have happened.
    Unknown,
}

impl CallEffects {
    /// Returns true if nothing changed, or if every change was undone.
    #[must_use]
    pub const fn is_clean(self) -> bool {
        matches!(self, Self::None | Self::RolledBack)
    }
}

/// One invalid argument.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FieldError {
    /// JSON pointer into the arguments.
    pub path: String,
    /// The expected value.
    pub expected: String,
    /// The received value.
    pub got: String,
    /// The suggested name.
    #[serde(rename = "didYouMean", default, skip_serializing_if = "Option::is_none")]
    pub did_you_mean: Option<String>,
}

/// The next allowed call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NextStep {
    /// The tool to call.
    pub tool: String,
    /// The known arguments.
    #[serde(default)]
    pub arguments: Value,
}

/// Reference to an approval that a call waits for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ApprovalRef {
    /// The id of the approval. Repeat the call with it after the approval.
    pub id: String,
    /// When the approval expires (RFC 3339). After that, a new approval is needed.
    pub expires_at: String,
}

/// A rejection or failure, with all that a model needs to decide what to do next.
///
/// Serializes in the standard dialect. [`ToolError::to_bucket`] returns the other one.
///
/// ```
/// use toolgate::{ToolError, call::error_code};
/// let error = ToolError::from_code(error_code::UNKNOWN_TOOL, "unknown tool `calculator`");
/// let json = serde_json::to_value(&error)?;
/// assert_eq!(json["errorCategory"], "VALIDATION");
/// assert_eq!(serde_json::from_value::<ToolError>(json)?, error);
/// assert_eq!(ToolError::from_bucket(&error.to_bucket()).as_ref(), Some(&error));
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ToolError {
    #[serde(rename = "isError")]
    is_error: IsErrorMarker,
    /// The category of the error.
    #[serde(rename = "errorCategory")]
    pub category: ErrorCategory,
    /// Whether the identical call may succeed later.
    #[serde(rename = "isRetryable")]
    pub retryable: bool,
    /// The stable error code.
    pub code: Cow<'static, str>,
    /// The message for people and models. Programs must branch on `code` instead.
    pub message: String,
    /// All invalid arguments.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<FieldError>,
    /// The effects of the call.
    pub effects: CallEffects,
    /// The tool that handles such requests.
    #[serde(default)]
    pub redirect_tool: Option<String>,
    /// The next allowed call, if one was found.
    #[serde(default)]
    pub next: Option<NextStep>,
    /// How long to wait before a retry.
    #[serde(default)]
    pub retry_after_ms: Option<u64>,
    /// The approval that the call waits for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub approval: Option<ApprovalRef>,
    /// The error of the upstream, as untrusted text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upstream: Option<Value>,
    /// The error comes from an earlier run of the same call. The tool did not run again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub replayed: bool,
    /// The id of the call in the ledger.
    #[serde(default)]
    pub call_id: Option<CallId>,
}

/// Serializes as `true` and rejects any other value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "bool", into = "bool")]
struct IsErrorMarker;

impl TryFrom<bool> for IsErrorMarker {
    type Error = &'static str;
    fn try_from(is_error: bool) -> Result<Self, Self::Error> {
        if is_error { Ok(Self) } else { Err("`isError` is false: this is not an error") }
    }
}

impl From<IsErrorMarker> for bool {
    fn from(_: IsErrorMarker) -> Self {
        true
    }
}

impl ToolError {
    /// Creates an error with one of toolgate's own codes. The code table defines category and
    /// retryability.
    pub fn from_code(name: &'static str, message: impl Into<String>) -> Self {
        let (category, retryable) = error_code::find(name)
            .map_or((ErrorCategory::Business, false), |c| (c.category, c.retryable));
        Self { retryable, ..Self::new(category, name, message) }
    }

    /// Creates an error with a custom code. TRANSIENT errors are retryable, others are not.
    pub fn new(
        category: ErrorCategory,
        code: impl Into<Cow<'static, str>>,
        message: impl Into<String>,
    ) -> Self {
        Self {
            is_error: IsErrorMarker,
            category,
            retryable: category == ErrorCategory::Transient,
            code: code.into(),
            message: message.into(),
            errors: Vec::new(),
            effects: CallEffects::None,
            redirect_tool: None,
            next: None,
            retry_after_ms: None,
            approval: None,
            upstream: None,
            replayed: false,
            call_id: None,
        }
    }

    /// Sets the effects. A call that may have had effects is never retryable.
    #[must_use]
    pub fn with_effects(mut self, effects: CallEffects) -> Self {
        self.effects = effects;
        self.retryable &= effects.is_clean();
        self
    }

    /// Sets how long to wait before a retry.
    #[must_use]
    pub fn retry_after_ms(mut self, ms: u64) -> Self {
        self.retry_after_ms = Some(ms);
        self
    }

    /// Returns the text for the model: the message, then the error contract as JSON.
    #[must_use]
    pub fn for_model(&self) -> String {
        self.for_model_in(ErrorDialect::Standard)
    }

    /// Returns the text for the model in a dialect; see
    /// [`AgentBuilder::dialect`](crate::AgentBuilder::dialect).
    #[must_use]
    pub fn for_model_in(&self, dialect: ErrorDialect) -> String {
        format!("{}\n{}", self.message, self.to_json_in(dialect))
    }

    /// Serializes the error in a dialect.
    #[must_use]
    pub fn to_json_in(&self, dialect: ErrorDialect) -> Value {
        match dialect {
            ErrorDialect::Standard => serde_json::to_value(self).unwrap_or_default(),
            ErrorDialect::Bucket => self.to_bucket(),
        }
    }

    /// Serializes the error in the bucket dialect: `{"is_error": true, "error": {"bucket", "code",
    /// "detail", "retryable", …}}`.
    #[must_use]
    pub fn to_bucket(&self) -> Value {
        let mut inner = match serde_json::to_value(self) {
            Ok(Value::Object(map)) => map,
            _ => serde_json::Map::new(),
        };
        for (standard, _) in BUCKET_NAMES {
            inner.remove(*standard);
        }
        inner.remove("isError");
        inner.insert("bucket".to_owned(), self.category.bucket().into());
        inner.insert("detail".to_owned(), self.message.clone().into());
        inner.insert("retryable".to_owned(), self.retryable.into());
        serde_json::json!({ "is_error": true, "error": inner })
    }

    /// Parses an error in the bucket dialect.
    #[must_use]
    pub fn from_bucket(value: &Value) -> Option<Self> {
        if value.get("is_error") != Some(&Value::Bool(true)) {
            return None;
        }
        let mut inner = value.get("error")?.as_object()?.clone();
        let category = ErrorCategory::from_bucket(inner.get("bucket")?.as_str()?)?;
        for (standard, bucket) in BUCKET_NAMES {
            if let Some(value) = inner.remove(*bucket) {
                inner.insert((*standard).to_owned(), value);
            }
        }
        inner.insert("errorCategory".to_owned(), category.to_string().into());
        inner.insert("isError".to_owned(), true.into());
        serde_json::from_value(Value::Object(inner)).ok()
    }
}

/// Field names that differ between the dialects: standard, bucket.
const BUCKET_NAMES: &[(&str, &str)] =
    &[("errorCategory", "bucket"), ("isRetryable", "retryable"), ("message", "detail")];

impl fmt::Display for ToolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.category, self.code, self.message)
    }
}

impl std::error::Error for ToolError {}
