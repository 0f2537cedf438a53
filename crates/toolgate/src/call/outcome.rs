//! Defines the result of a call.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::call::CallId;
use crate::call::error::ToolError;
use crate::ledger::row::{Gate, LazyReceipt, Receipt};

/// Result of a successful call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase")]
pub struct CallOutput {
    /// Message for the model, in addition to the value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// The tool's result.
    #[serde(default)]
    pub value: Value,
    /// The value is hidden from the model, but recorded. This is not a security boundary.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub hidden: bool,
    /// The result comes from an earlier run of the same call. The tool did not run again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub replayed: bool,
    /// The requested object does not exist. This is a valid answer, but not evidence.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub empty: bool,
    /// Where to read the whole result if it was too large. The value is then its beginning.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored: Option<StoredOutputRef>,
}

/// Reference to a result that was too large for the context.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredOutputRef {
    /// Handle for `read_output`.
    pub handle: String,
    /// Size of the whole result as text.
    pub bytes: usize,
}

impl CallOutput {
    /// Creates a success with a value.
    #[must_use]
    pub fn from_value(value: Value) -> Self {
        Self { value, ..Self::default() }
    }

    /// Returns the text for the model: the message, the value, or both.
    #[must_use]
    pub fn for_model(&self) -> String {
        let value = match (&self.value, self.hidden) {
            (_, true) | (Value::Null, _) => None,
            (Value::String(text), _) => Some(text.clone()),
            (value, _) => Some(value.to_string()),
        };
        match (&self.message, value) {
            (Some(message), Some(value)) => format!("{message}\n{value}"),
            (Some(message), None) => message.clone(),
            (None, Some(value)) => value,
            (None, None) if self.empty => "No such object exists.".to_owned(),
            (None, None) => "done".to_owned(),
        }
    }
}

/// Signal to the prompt layer. Gates pass a signal through unchanged, and it changes nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "signal", rename_all = "snake_case")]
pub enum PromptSignal {
    /// Requests a hidden section of the prompt.
    ExpandSection {
        /// The key of the section.
        section: String,
        /// The reason.
        reason: String,
    },
    /// Requests the end of the whole evaluation.
    Abort {
        /// The reason.
        reason: String,
    },
}

/// Outcome of a call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The tool ran, now or earlier.
    Success(CallOutput),
    /// The call was rejected or failed.
    Error(Box<ToolError>),
    /// The tool requested something from the prompt layer.
    Signal(PromptSignal),
}

impl Outcome {
    /// Returns the output of a success.
    #[must_use]
    pub const fn success(&self) -> Option<&CallOutput> {
        match self {
            Self::Success(output) => Some(output),
            _ => None,
        }
    }

    /// Returns the error of a failure.
    #[must_use]
    pub fn error(&self) -> Option<&ToolError> {
        match self {
            Self::Error(error) => Some(error),
            _ => None,
        }
    }

    /// Serializes the outcome for a model or program: the error contract, or `{"isError": false,
    /// …}`.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let body = match self {
            Self::Error(error) => return serde_json::to_value(error).unwrap_or(Value::Null),
            Self::Success(output) => serde_json::to_value(output),
            Self::Signal(signal) => serde_json::to_value(signal),
        };
        let mut json = body.unwrap_or_else(|_| json!({}));
        if let (Self::Success(CallOutput { hidden: true, .. }), Some(map)) =
            (self, json.as_object_mut())
        {
            map.remove("value");
        }
        if let Some(map) = json.as_object_mut() {
            map.insert("isError".to_owned(), false.into());
        }
        json
    }
}

impl From<ToolError> for Outcome {
    fn from(error: ToolError) -> Self {
        Self::Error(Box::new(error))
    }
}

/// The outcome of a call and the gate and rule that decided it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Answer {
    /// The id of the call in the ledger.
    pub call: CallId,
    /// The gate that ended the call.
    pub gate: Gate,
    /// The policy or hook that decided, if any.
    pub rule: Option<String>,
    /// The outcome.
    pub outcome: Outcome,
    /// The recorded row, if the ledger is persistent; see [`Answer::receipt`].
    #[serde(rename = "receipt", skip_serializing_if = "Option::is_none")]
    pub recorded: Option<LazyReceipt>,
}

impl Answer {
    /// Returns a signed receipt for the row of this call, if the ledger is persistent.
    #[must_use]
    pub fn receipt(&self) -> Option<Receipt> {
        self.recorded.as_ref().map(LazyReceipt::receipt)
    }
}
