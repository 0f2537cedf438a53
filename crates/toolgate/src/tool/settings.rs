//! Defines the settings of a tool: effect, polling, retries, extra arguments and examples.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The effect of a tool on the world.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Effect {
    /// The tool changes nothing.
    Read,
    /// The tool makes a change that can be reverted.
    Write,
    /// The tool makes a change that cannot be reverted. This is the default.
    #[default]
    Destructive,
}

/// Settings of a tool that is called repeatedly until something has happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PollingSettings {
    /// Minimum time between two identical polls.
    pub interval: Duration,
    /// Maximum number of consecutive polls with the same result.
    pub max_unchanged: u32,
}

/// Settings of retries. A failed run is retried only if that is safe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RetrySettings {
    /// Maximum number of retries.
    pub times: u32,
    /// Delay before the first retry; it doubles each time.
    pub delay: Duration,
}

impl Default for RetrySettings {
    fn default() -> Self {
        Self { times: 2, delay: Duration::from_millis(100) }
    }
}

/// Treatment of arguments that the schema does not declare.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExtraArguments {
    /// Refuse the call.
    #[default]
    Refuse,
    /// Remove them before the call is checked.
    Drop,
    /// Let the schema decide.
    Pass,
}

/// An example call, shown to the model and checked against the schemas.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ToolExample {
    /// Description of at most 200 characters.
    pub description: String,
    /// The arguments.
    pub input: Value,
    /// The result.
    pub output: Value,
}
