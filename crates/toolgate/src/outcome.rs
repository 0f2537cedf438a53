//! What a call comes to.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::call::CallId;
use crate::error::ToolError;
use crate::ledger::{Gate, Receipt, Recorded};

/// A success.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase")]
pub struct Output {
    /// Words for the model, beside the value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// The tool's result.
    #[serde(default)]
    pub value: Value,
    /// The value stays out of the model's context (it is recorded all the same). Not a security boundary.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub hidden: bool,
    /// The result of an earlier run of the same call, handed back without running it again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub replayed: bool,
    /// There is nothing of the kind, which is an answer and proves nothing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub empty: bool,
    /// Where the whole result can be read, if it was too large: the value is then its head.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored: Option<Stored>,
}

/// A result that was too large for the context and is kept aside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stored {
    /// Give it to `read_output`.
    pub handle: String,
    /// Size of the whole result as text.
    pub bytes: usize,
}

impl Output {
    /// A success with a value.
    #[must_use]
    pub fn of(value: Value) -> Self {
        Self { value, ..Self::default() }
    }

    /// What the model reads: the message, the value, or both.
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
            (None, None) if self.empty => "There is nothing of the kind.".to_owned(),
            (None, None) => "done".to_owned(),
        }
    }
}

/// A signal of the prompt layer. It passes through the gates untouched and changes nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "signal", rename_all = "snake_case")]
pub enum Signal {
    /// A hidden section of the prompt is wanted.
    ExpandSection {
        /// Its key.
        section: String,
        /// Why.
        reason: String,
    },
    /// The evaluation as a whole must end.
    Abort {
        /// Why.
        reason: String,
    },
}

/// What a call came to: never a panic, never a bare string.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It ran, or had run before.
    Success(Output),
    /// It was refused, or it failed.
    Error(Box<ToolError>),
    /// It asked for something that only the prompt layer can do.
    Signal(Signal),
}

impl Outcome {
    /// The success, if it is one.
    #[must_use]
    pub const fn success(&self) -> Option<&Output> {
        match self {
            Self::Success(output) => Some(output),
            _ => None,
        }
    }

    /// The error, if it is one.
    #[must_use]
    pub fn error(&self) -> Option<&ToolError> {
        match self {
            Self::Error(error) => Some(error),
            _ => None,
        }
    }

    /// The outcome as a model or program reads it: the error contract, or `{"isError": false, …}`.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let body = match self {
            Self::Error(error) => return serde_json::to_value(error).unwrap_or(Value::Null),
            Self::Success(output) => serde_json::to_value(output),
            Self::Signal(signal) => serde_json::to_value(signal),
        };
        let mut json = body.unwrap_or_else(|_| json!({}));
        if let (Self::Success(Output { hidden: true, .. }), Some(map)) = (self, json.as_object_mut()) {
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

/// An outcome, and who decided it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Answer {
    /// The call's name in the ledger.
    pub call: CallId,
    /// The gate that ended the call.
    pub gate: Gate,
    /// The policy or hook that decided, where one did.
    pub rule: Option<String>,
    /// What it came to.
    pub outcome: Outcome,
    /// What the ledger says of it, where there is one that outlives the process; see [`Answer::receipt`].
    #[serde(rename = "receipt", skip_serializing_if = "Option::is_none")]
    pub recorded: Option<Recorded>,
}

impl Answer {
    /// A signed receipt for the row of this call, where the ledger outlives the process.
    #[must_use]
    pub fn receipt(&self) -> Option<Receipt> {
        self.recorded.as_ref().map(Recorded::receipt)
    }
}
