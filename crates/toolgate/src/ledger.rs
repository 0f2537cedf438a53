//! The record of every call, the refused ones too.

use std::fmt;
use std::sync::Arc;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::call::{CallId, SessionKey};
use crate::error::Effects;
use crate::json::Digest;
use crate::limits::Spend;
use crate::outcome::Outcome;
use crate::policy::Facts;

/// The gates, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Gate {
    /// Principal, kill switch, size.
    Admit,
    /// The tool's name.
    Resolve,
    /// The arguments' shape.
    Validate,
    /// The same call, settled before.
    Recall,
    /// Repetition.
    Progress,
    /// Budgets, deadlines, rates.
    Limits,
    /// Hooks before the tool.
    Hooks,
    /// Policies.
    Policy,
    /// A person's word.
    Approval,
    /// The durable intent.
    Claim,
    /// The tool.
    Run,
    /// Normalisation, hooks after the tool, output schema, size.
    Shape,
    /// Commit or rollback.
    Settle,
    /// The row.
    Record,
}

impl Gate {
    /// All gates in order.
    pub const ALL: [Self; 14] = [
        Self::Admit,
        Self::Resolve,
        Self::Validate,
        Self::Recall,
        Self::Progress,
        Self::Limits,
        Self::Hooks,
        Self::Policy,
        Self::Approval,
        Self::Claim,
        Self::Run,
        Self::Shape,
        Self::Settle,
        Self::Record,
    ];

    /// The gate's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Admit => "admit",
            Self::Resolve => "resolve",
            Self::Validate => "validate",
            Self::Recall => "recall",
            Self::Progress => "progress",
            Self::Limits => "limits",
            Self::Hooks => "hooks",
            Self::Policy => "policy",
            Self::Approval => "approval",
            Self::Claim => "claim",
            Self::Run => "run",
            Self::Shape => "shape",
            Self::Settle => "settle",
            Self::Record => "record",
        }
    }
}

impl fmt::Display for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What became of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// It ran and succeeded.
    Succeeded,
    /// It ran and failed.
    Failed,
    /// It did not run.
    Refused,
    /// It had run before; its recorded outcome was handed back.
    Replayed,
    /// It passed a signal to the prompt layer.
    Signalled,
    /// It was left open, and somebody found out what had become of it: a row of its own, beside that of the call.
    Settled,
}

impl Decision {
    /// All decisions.
    pub const ALL: [Self; 6] = [Self::Succeeded, Self::Failed, Self::Refused, Self::Replayed, Self::Signalled, Self::Settled];

    /// The decision's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::Refused => "refused",
            Self::Replayed => "replayed",
            Self::Signalled => "signalled",
            Self::Settled => "settled",
        }
    }
}

impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Time spent at each gate, in nanoseconds, in the order of [`Gate::ALL`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Latency([u64; 14]);

impl Latency {
    pub(crate) fn add(&mut self, gate: Gate, nanos: u64) {
        if let Some(slot) = self.0.get_mut(gate as usize) {
            *slot = slot.saturating_add(nanos);
        }
    }

    /// Nanoseconds spent at a gate.
    #[must_use]
    pub fn at(&self, gate: Gate) -> u64 {
        self.0.get(gate as usize).copied().unwrap_or(0)
    }

    /// Nanoseconds spent in all.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }
}

/// One row of the ledger: one call. Secrets are redacted before a row exists.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Name of the call.
    pub call: CallId,
    /// What the client calls it.
    pub client_id: Option<String>,
    /// When it came in.
    pub at: Timestamp,
    /// Whose conversation.
    #[serde(flatten)]
    pub key: SessionKey,
    /// The model's turn.
    pub turn: Option<u64>,
    /// Why the model stopped to make this call.
    pub stop_reason: Option<String>,
    /// The tool that was asked for, as far as it can be shown.
    pub tool: Arc<str>,
    /// Redacted arguments; `null` where they could not be read.
    pub arguments: Arc<Value>,
    /// The entities it is about, by which it can be found again: those that its tool declares.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub entities: Vec<(Arc<str>, Value)>,
    /// Keyed digest of the judged call: nothing can be guessed from it.
    pub digest: Option<Digest>,
    /// What became of it.
    pub decision: Decision,
    /// The gate that ended it.
    pub gate: Gate,
    /// The policy or hook that decided.
    pub rule: Option<String>,
    /// What the decision rested on.
    pub facts: Box<Facts>,
    /// Redacted outcome.
    pub outcome: Outcome,
    /// What a failed call left behind; `done` for a success that has effects.
    pub effects: Effects,
    /// Time at each gate.
    pub latency: Latency,
    /// Runs after the first.
    pub retries: u32,
    /// What it cost, where its tool said so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spent: Option<Spend>,
    /// Digest of the agent's definition.
    pub config: Digest,
    /// Where it is no call of its own: the call that was settled, and by whom.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settles: Option<Settlement>,
}

/// Somebody found out what had become of a call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settlement {
    /// The call.
    pub call: CallId,
    /// Who said so: a person, or the tool that was asked.
    pub by: String,
}

impl Row {
    /// The row that says what became of a call of which nobody knew.
    #[must_use]
    pub fn settled(&self, outcome: Outcome, effects: Effects, by: &str, at: Timestamp) -> Self {
        Self {
            call: CallId::fresh(),
            client_id: None,
            at,
            decision: Decision::Settled,
            gate: Gate::Settle,
            rule: None,
            facts: Box::new(Facts::at(at)),
            outcome,
            effects,
            latency: Latency::default(),
            retries: 0,
            spent: None,
            settles: Some(Settlement { call: self.call, by: by.to_owned() }),
            ..self.clone()
        }
    }

    /// When it ended.
    #[must_use]
    pub fn ended(&self) -> Timestamp {
        let took = jiff::SignedDuration::from_nanos(i64::try_from(self.latency.total()).unwrap_or(i64::MAX));
        self.at.checked_add(took).unwrap_or(self.at)
    }

    /// Whether it is about a call that asked to be let in: not what was found out about another, and not a report that was
    /// refused, as one of something that nobody had let in.
    #[must_use]
    pub fn is_a_call(&self) -> bool {
        self.decision != Decision::Settled && !(self.gate == Gate::Settle && self.decision == Decision::Refused)
    }

    /// The code of its error, where it came to one.
    #[must_use]
    pub fn code(&self) -> Option<&str> {
        self.outcome.error().map(|error| &*error.code)
    }

    /// The canonical bytes of the row: what is hashed and kept.
    ///
    /// # Errors
    /// It cannot be written as JSON.
    pub fn canonical(&self) -> Result<Vec<u8>, serde_json::Error> {
        crate::json::canonical_of(self)
    }
}

/// What a store says of a row that it has taken: who has it can show later that the ledger held it, and that it was not
/// changed since.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Receipt {
    /// The call.
    pub call: CallId,
    /// When it came in.
    pub at: Timestamp,
    /// Its tool.
    pub tool: Arc<str>,
    /// What became of it.
    pub decision: Decision,
    /// Digest of the agent's definition.
    pub config: Digest,
    /// Where the row stands in the ledger.
    pub seq: u64,
    /// The row's link in the chain of its session.
    pub hash: Digest,
    /// The public key of the ledger, in hexadecimal digits.
    pub key: Arc<str>,
    /// Signature of all of the above, in hexadecimal digits.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub signature: String,
}

/// Signs for a ledger.
pub trait Signer: Send + Sync {
    /// The signature of a statement, in hexadecimal digits.
    fn sign(&self, statement: &[u8]) -> String;
}

/// A row that a ledger has taken, and will sign for when it is asked to: a signature costs more than most calls.
#[derive(Clone)]
pub struct Recorded {
    unsigned: Receipt,
    signer: Arc<dyn Signer>,
}

impl Recorded {
    /// A row that was taken: the receipt without a signature, and who signs it.
    #[must_use]
    pub fn new(unsigned: Receipt, signer: Arc<dyn Signer>) -> Self {
        Self { unsigned, signer }
    }

    /// The receipt.
    #[must_use]
    pub fn receipt(&self) -> Receipt {
        let statement = self.unsigned.statement().unwrap_or_default();
        Receipt { signature: self.signer.sign(&statement), ..self.unsigned.clone() }
    }
}

impl fmt::Debug for Recorded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Recorded").field(&self.unsigned).finish()
    }
}

impl PartialEq for Recorded {
    fn eq(&self, other: &Self) -> bool {
        self.unsigned == other.unsigned
    }
}

impl Serialize for Recorded {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.receipt().serialize(serializer)
    }
}

impl Receipt {
    /// The bytes that are signed: everything but the signature, in its one spelling.
    ///
    /// # Errors
    /// It cannot be written as JSON.
    pub fn statement(&self) -> Result<Vec<u8>, serde_json::Error> {
        let said = match self.signature.is_empty() {
            true => crate::json::canonical_of(self)?,
            false => crate::json::canonical_of(&Self { signature: String::new(), ..self.clone() })?,
        };
        Ok([b"toolgate-receipt-v1\0".as_slice(), &said].concat())
    }
}
