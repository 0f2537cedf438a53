//! Defines the explanation of a call, and formats it for people.

use std::fmt;

use rust_decimal::Decimal;
use serde::Serialize;
use serde_json::Value;

use crate::call::error::ToolError;
use crate::ledger::row::Gate;
use crate::limits::{Charge, ChargeError};
use crate::policy::{EnforcementMode, PolicyLevel, RuleCheck};

/// Predicts the outcome of a call.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PredictedOutcome {
    /// The call would run.
    Run,
    /// The call would wait for approval.
    Ask,
    /// The call would get the outcome of an earlier run.
    Replay,
    /// The call would be rejected.
    Refuse(Box<ToolError>),
}

/// Result of a gate or a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GateResult {
    /// The gate or rule allows the call.
    Pass,
    /// The gate or rule denies the call.
    Deny,
    /// The gate or rule asks for approval.
    Ask,
    /// The rule failed, which counts as a denial.
    Fault,
    /// The tool failed, or its result was invalid. Occurs only in explanations of recorded calls.
    Failed,
    /// The call does not reach this gate.
    NotReached,
    /// The gate has no result without making the call, or the rule concerns other tools.
    NotAsked,
}

/// Result of one gate.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GateExplanation {
    /// The gate.
    pub gate: Gate,
    /// The result.
    pub said: GateResult,
    /// The reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// Result of one rule.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RuleExplanation {
    /// The name of the rule.
    pub rule: String,
    /// Where the rule is attached. `None` if the rule does not govern the tool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub level: Option<PolicyLevel>,
    /// Whether the rule enforces or observes.
    pub mode: EnforcementMode,
    /// The result.
    pub said: GateResult,
    /// The reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// The values that the rule checked.
    pub looked_at: Vec<RuleCheck>,
}

/// Explains why a call would be allowed or rejected. Secrets are masked.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Explanation {
    /// The tool.
    pub tool: String,
    /// The arguments, with secrets masked.
    pub arguments: Value,
    /// Every gate, in order.
    pub gates: Vec<GateExplanation>,
    /// Every rule of the agent. Rules that govern the tool come first, closest attachment first.
    pub rules: Vec<RuleExplanation>,
    /// The predicted outcome.
    pub would: PredictedOutcome,
}

impl fmt::Display for GateResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Pass => "pass",
            Self::Deny => "deny",
            Self::Ask => "ask",
            Self::Fault => "fault",
            Self::Failed => "failed",
            Self::NotReached => "-",
            Self::NotAsked => "not asked",
        })
    }
}

impl Explanation {
    /// Returns the reason why the call would not run, or an empty string.
    fn reason(&self) -> &str {
        match &self.would {
            PredictedOutcome::Run | PredictedOutcome::Replay => "",
            PredictedOutcome::Ask => self
                .gates
                .iter()
                .find(|note| note.said == GateResult::Ask)
                .and_then(|note| note.why.as_deref())
                .unwrap_or_default(),
            PredictedOutcome::Refuse(error) => &error.message,
        }
    }

    /// Formats every gate and every rule, one per line.
    ///
    /// Omits the reason for the outcome, which the caller has printed already.
    #[must_use]
    pub fn format_steps(&self) -> String {
        let reason = self.reason();
        let line = |head: String, result: GateResult, why: Option<&str>| {
            let is_no = matches!(result, GateResult::Deny | GateResult::Ask | GateResult::Fault);
            let why = why.filter(|why| !(is_no && reason.contains(*why))).unwrap_or_default();
            let line = format!("{head} {why}");
            format!("{}\n", line.trim_end())
        };
        let mut text = "gates\n".to_owned();
        for note in &self.gates {
            text.push_str(&line(
                format!("  {:<9} {:<9}", note.gate, note.said),
                note.said,
                note.why.as_deref(),
            ));
        }
        text.push_str("\nrules\n");
        for note in &self.rules {
            let mode = if note.mode == EnforcementMode::Observe { " (observes)" } else { "" };
            text.push_str(&line(
                format!("  {:<9} {}{mode}", note.said, note.rule),
                note.said,
                note.why.as_deref(),
            ));
            for check in &note.looked_at {
                text.push_str(&format!(
                    "            {} {}: {}\n",
                    if check.holds { "+" } else { "-" },
                    check.what,
                    check.found
                ));
            }
        }
        text
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} {}", self.tool, self.arguments)?;
        match &self.would {
            PredictedOutcome::Run => writeln!(f, "would run")?,
            PredictedOutcome::Ask => writeln!(f, "would wait for approval: {}", self.reason())?,
            PredictedOutcome::Replay => writeln!(f, "would get the outcome of an earlier run")?,
            PredictedOutcome::Refuse(error) => {
                writeln!(f, "would be refused: {error}")?;
                if let Some(next) = &error.next {
                    writeln!(f, "next: {} {}", next.tool, next.arguments)?;
                }
            }
        }
        write!(f, "\n{}", self.format_steps())
    }
}

impl RuleExplanation {
    /// Marks the rule as denying because the call exceeds one of its limits.
    pub(crate) fn mark_exceeded(&mut self, charge: &Charge, error: &ChargeError, why: String) {
        (self.said, self.why) = (GateResult::Deny, Some(why));
        let limit = format!("at most {}", charge.cap);
        for check in self
            .looked_at
            .iter_mut()
            .filter(|check| check.what == limit && error.used > Decimal::ZERO)
        {
            (check.holds, check.found) =
                (false, format!("{} used, {}", error.used.normalize(), check.found));
        }
    }
}
