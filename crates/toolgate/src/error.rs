//! The error contract: one type, two spellings.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::call::CallId;
use crate::code;

/// What a model should do about an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Category {
    /// Try again later.
    Transient,
    /// Correct the call, or ask the user.
    Validation,
    /// Tell the user, or escalate; never try again.
    Permission,
    /// Explain the rule.
    Business,
}

impl Category {
    /// The name in the bucket dialect.
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
        [Self::Transient, Self::Validation, Self::Permission, Self::Business].into_iter().find(|c| c.bucket() == name)
    }
}

/// How errors are written for a model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dialect {
    /// `{"isError": true, "errorCategory", "code", "message", …}`.
    #[default]
    Standard,
    /// `{"is_error": true, "error": {"bucket", "code", "detail", …}}`.
    Bucket,
}

impl fmt::Display for Category {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Transient => "TRANSIENT",
            Self::Validation => "VALIDATION",
            Self::Permission => "PERMISSION",
            Self::Business => "BUSINESS",
        })
    }
}

/// What a failed call left behind in the world.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Effects {
    /// Proven: nothing happened.
    None,
    /// It happened and was undone.
    RolledBack,
    /// It happened.
    Done,
    /// It may have happened.
    Unknown,
}

impl Effects {
    /// True where the world is as it was before the call.
    #[must_use]
    pub const fn is_clean(self) -> bool {
        matches!(self, Self::None | Self::RolledBack)
    }
}

/// One thing that is wrong with the arguments.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FieldError {
    /// JSON pointer into the arguments.
    pub path: String,
    /// What would be right.
    pub expected: String,
    /// What was there.
    pub got: String,
    /// The name that was probably meant.
    #[serde(rename = "didYouMean", default, skip_serializing_if = "Option::is_none")]
    pub did_you_mean: Option<String>,
}

/// The next legal move.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NextStep {
    /// The tool to call.
    pub tool: String,
    /// Its arguments, as far as they are known.
    #[serde(default)]
    pub arguments: Value,
}

/// Where a call waits for a person.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ApprovalRef {
    /// Names the request; repeat the call with it once it is approved.
    pub id: String,
    /// RFC 3339; afterwards a new approval is needed.
    pub expires_at: String,
}

/// A refusal or failure, complete enough for a model to know what to do next.
///
/// Serialises in the standard dialect; [`ToolError::to_bucket`] gives the other.
///
/// ```
/// use toolgate::{ToolError, code};
/// let error = ToolError::of(code::UNKNOWN_TOOL, "there is no tool `calculator`");
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
    is_error: IsError,
    /// What kind of error it is.
    #[serde(rename = "errorCategory")]
    pub category: Category,
    /// Whether the identical call may succeed later.
    #[serde(rename = "isRetryable")]
    pub retryable: bool,
    /// Stable name of the error.
    pub code: Cow<'static, str>,
    /// For reading; never for branching.
    pub message: String,
    /// What is wrong with the arguments, all at once.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<FieldError>,
    /// What the call left behind.
    pub effects: Effects,
    /// The tool that handles such requests instead.
    #[serde(default)]
    pub redirect_tool: Option<String>,
    /// The next legal move, where one was computed.
    #[serde(default)]
    pub next: Option<NextStep>,
    /// How long to wait before trying again.
    #[serde(default)]
    pub retry_after_ms: Option<u64>,
    /// The approval that the call waits for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub approval: Option<ApprovalRef>,
    /// What the service behind the tool said: untrusted text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upstream: Option<Value>,
    /// What an earlier run of the same call came to, handed back without running it again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub replayed: bool,
    /// The call's name in the ledger.
    #[serde(default)]
    pub call_id: Option<CallId>,
}

/// Serialises as `true` and refuses anything else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "bool", into = "bool")]
struct IsError;

impl TryFrom<bool> for IsError {
    type Error = &'static str;
    fn try_from(is_error: bool) -> Result<Self, Self::Error> {
        if is_error { Ok(Self) } else { Err("`isError` is false: this is not an error") }
    }
}

impl From<IsError> for bool {
    fn from(_: IsError) -> Self {
        true
    }
}

impl ToolError {
    /// An error with one of toolgate's own codes; category and retryability come from the table.
    pub fn of(name: &'static str, message: impl Into<String>) -> Self {
        let (category, retryable) = code::find(name).map_or((Category::Business, false), |c| (c.category, c.retryable));
        Self { retryable, ..Self::new(category, name, message) }
    }

    /// An error with a code of the caller's choice. TRANSIENT ones are retryable, others not.
    pub fn new(category: Category, code: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self {
            is_error: IsError,
            category,
            retryable: category == Category::Transient,
            code: code.into(),
            message: message.into(),
            errors: Vec::new(),
            effects: Effects::None,
            redirect_tool: None,
            next: None,
            retry_after_ms: None,
            approval: None,
            upstream: None,
            replayed: false,
            call_id: None,
        }
    }

    /// Says what the call left behind. What may have happened is never retryable.
    #[must_use]
    pub fn with_effects(mut self, effects: Effects) -> Self {
        self.effects = effects;
        self.retryable &= effects.is_clean();
        self
    }

    /// Says how long to wait before trying again.
    #[must_use]
    pub fn retry_after_ms(mut self, ms: u64) -> Self {
        self.retry_after_ms = Some(ms);
        self
    }

    /// What the model reads: in words, and as the contract has it.
    #[must_use]
    pub fn for_model(&self) -> String {
        self.for_model_in(Dialect::Standard)
    }

    /// The same in a dialect; see [`AgentBuilder::dialect`](crate::AgentBuilder::dialect).
    #[must_use]
    pub fn for_model_in(&self, dialect: Dialect) -> String {
        format!("{}\n{}", self.message, self.told_in(dialect))
    }

    /// The error as a dialect has it.
    #[must_use]
    pub fn told_in(&self, dialect: Dialect) -> Value {
        match dialect {
            Dialect::Standard => serde_json::to_value(self).unwrap_or_default(),
            Dialect::Bucket => self.to_bucket(),
        }
    }

    /// The bucket dialect: `{"is_error": true, "error": {"bucket", "code", "detail", "retryable", …}}`.
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

    /// Reads the bucket dialect.
    #[must_use]
    pub fn from_bucket(value: &Value) -> Option<Self> {
        if value.get("is_error") != Some(&Value::Bool(true)) {
            return None;
        }
        let mut inner = value.get("error")?.as_object()?.clone();
        let category = Category::from_bucket(inner.get("bucket")?.as_str()?)?;
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

/// Fields that the two dialects name differently.
const BUCKET_NAMES: &[(&str, &str)] = &[("errorCategory", "bucket"), ("isRetryable", "retryable"), ("message", "detail")];

impl fmt::Display for ToolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.category, self.code, self.message)
    }
}

impl std::error::Error for ToolError {}
