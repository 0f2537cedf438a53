//! Defines the row format of the ledger. Every call has a row, including rejected calls.

use std::fmt;
use std::sync::Arc;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::call::error::CallEffects;
use crate::call::outcome::Outcome;
use crate::call::{CallId, SessionKey};
use crate::limits::Cost;
use crate::policy::DecisionFacts;
use toolgate_json::Digest;

/// The gates, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Gate {
    /// Checks the principal, pauses and the size of the arguments.
    Admit,
    /// Finds the tool.
    Resolve,
    /// Checks the arguments against the schema.
    Validate,
    /// Replays an identical call that has ended.
    Recall,
    /// Rejects repetition without progress.
    Progress,
    /// Checks budgets, deadlines and rate limits.
    Limits,
    /// Runs hooks before the tool.
    Hooks,
    /// Evaluates policies.
    Policy,
    /// Requires the approval of a person.
    Approval,
    /// Stores the intent and reserves limits.
    Claim,
    /// Runs the tool.
    Run,
    /// Normalizes and checks the result, and runs hooks after the tool.
    Shape,
    /// Commits or rolls back.
    Settle,
    /// Writes the row.
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

    /// Returns the gate's name.
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

/// Final state of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// The tool ran and succeeded.
    Succeeded,
    /// The tool ran and failed.
    Failed,
    /// The tool did not run.
    Refused,
    /// The call ran before, and its recorded outcome was replayed.
    Replayed,
    /// The tool sent a signal to the prompt layer.
    Signalled,
    /// The outcome of an earlier pending call was found out. This is a separate row.
    Settled,
}

impl Decision {
    /// All decisions.
    pub const ALL: [Self; 6] = [
        Self::Succeeded,
        Self::Failed,
        Self::Refused,
        Self::Replayed,
        Self::Signalled,
        Self::Settled,
    ];

    /// Returns the decision's name.
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

    /// Returns the nanoseconds spent at a gate.
    #[must_use]
    pub fn nanos_at(&self, gate: Gate) -> u64 {
        self.0.get(gate as usize).copied().unwrap_or(0)
    }

    /// Returns the nanoseconds spent at the gates after a gate.
    fn total_after(&self, gate: Gate) -> u64 {
        self.0.iter().skip(gate as usize + 1).sum()
    }

    /// Returns the total nanoseconds.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }
}

/// One row of the ledger, for one call. Secrets are masked before a row is built.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The id of the call.
    pub call: CallId,
    /// The client's own id for the call.
    pub client_id: Option<String>,
    /// The time of the store by which the call was decided, or its arrival if no session was
    /// opened.
    pub at: Timestamp,
    /// The session of the call.
    #[serde(flatten)]
    pub key: SessionKey,
    /// The model's turn.
    pub turn: Option<u64>,
    /// Why the model stopped to make this call.
    pub stop_reason: Option<String>,
    /// The requested tool, redacted if unknown.
    pub tool: Arc<str>,
    /// The redacted arguments, or `null` if they could not be parsed.
    pub arguments: Arc<Value>,
    /// The entities of the call that its tool declares. Rows can be found by them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub entities: Vec<(Arc<str>, Value)>,
    /// Keyed digest of the validated call, from which arguments cannot be guessed.
    pub digest: Option<Digest>,
    /// The final state of the call.
    pub decision: Decision,
    /// The gate that ended the call.
    pub gate: Gate,
    /// The policy or hook that decided.
    pub rule: Option<String>,
    /// The facts that the decision is based on.
    pub facts: Box<DecisionFacts>,
    /// The redacted outcome.
    pub outcome: Outcome,
    /// The effects of a failed call, or `done` for a success with effects.
    pub effects: CallEffects,
    /// The time at each gate.
    pub latency: Latency,
    /// The number of retries.
    pub retries: u32,
    /// The cost, if the tool reported one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spent: Option<Cost>,
    /// Digest of the agent's definition.
    pub config: Digest,
    /// The settled call, if this row settles an earlier call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settles: Option<Settlement>,
}

/// Settlement of a call with unknown outcome.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settlement {
    /// The settled call.
    pub call: CallId,
    /// The person or the tool that settled the call.
    pub by: String,
}

impl Row {
    /// Builds the row that settles a call with unknown outcome.
    #[must_use]
    pub fn settlement_row(
        &self,
        outcome: Outcome,
        effects: CallEffects,
        by: &str,
        at: Timestamp,
    ) -> Self {
        Self {
            call: CallId::generate(),
            client_id: None,
            at,
            decision: Decision::Settled,
            gate: Gate::Settle,
            rule: None,
            facts: Box::new(DecisionFacts::at(at)),
            outcome,
            effects,
            latency: Latency::default(),
            retries: 0,
            spent: None,
            settles: Some(Settlement { call: self.call, by: by.to_owned() }),
            ..self.clone()
        }
    }

    /// Returns when the call ended.
    #[must_use]
    pub fn ended_at(&self) -> Timestamp {
        // `at` is taken when gate 4 has opened the session, so the gates up to it are over then.
        let nanos = self.latency.total_after(Gate::Recall);
        let took = jiff::SignedDuration::from_nanos(i64::try_from(nanos).unwrap_or(i64::MAX));
        self.at.checked_add(took).unwrap_or(self.at)
    }

    /// Reports whether the row is about a call that requested admission.
    ///
    /// Returns false for a settlement and for a rejected report of a call without admission.
    #[must_use]
    pub fn is_call(&self) -> bool {
        self.decision != Decision::Settled
            && !(self.gate == Gate::Settle && self.decision == Decision::Refused)
    }

    /// Returns the error code, if the call failed.
    #[must_use]
    pub fn code(&self) -> Option<&str> {
        self.outcome.error().map(|error| &*error.code)
    }

    /// Returns the canonical bytes of the row, which are stored and hashed.
    ///
    /// # Errors
    /// The value cannot be serialized as JSON.
    pub fn to_canonical_bytes(&self) -> Result<Vec<u8>, serde_json::Error> {
        toolgate_json::serialize_canonical(self)
    }
}

/// Proof that the ledger contains a row and that the row has not changed since.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Receipt {
    /// The call.
    pub call: CallId,
    /// When the call arrived.
    pub at: Timestamp,
    /// The tool.
    pub tool: Arc<str>,
    /// The final state of the call.
    pub decision: Decision,
    /// Digest of the agent's definition.
    pub config: Digest,
    /// The sequence number of the row in the ledger.
    pub seq: u64,
    /// The hash of the row in the chain of its session.
    pub hash: Digest,
    /// The public key of the ledger, as hexadecimal digits.
    pub key: Arc<str>,
    /// The signature of all other fields, as hexadecimal digits.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub signature: String,
}

/// Signs statements for a ledger.
pub trait ReceiptSigner: Send + Sync {
    /// Returns the signature of a statement, as hexadecimal digits.
    fn sign(&self, statement: &[u8]) -> String;
}

/// A recorded row whose receipt is signed on demand, because a signature costs more than most
/// calls.
#[derive(Clone)]
pub struct LazyReceipt {
    unsigned: Receipt,
    signer: Arc<dyn ReceiptSigner>,
}

impl LazyReceipt {
    /// Creates a value from an unsigned receipt and its signer.
    #[must_use]
    pub fn new(unsigned: Receipt, signer: Arc<dyn ReceiptSigner>) -> Self {
        Self { unsigned, signer }
    }

    /// Returns the signed receipt.
    #[must_use]
    pub fn receipt(&self) -> Receipt {
        let statement = self.unsigned.to_signed_bytes().unwrap_or_default();
        Receipt { signature: self.signer.sign(&statement), ..self.unsigned.clone() }
    }
}

impl fmt::Debug for LazyReceipt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Recorded").field(&self.unsigned).finish()
    }
}

impl PartialEq for LazyReceipt {
    fn eq(&self, other: &Self) -> bool {
        self.unsigned == other.unsigned
    }
}

impl Serialize for LazyReceipt {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.receipt().serialize(serializer)
    }
}

impl Receipt {
    /// Returns the signed bytes: the canonical form of all fields except the signature.
    ///
    /// # Errors
    /// The value cannot be serialized as JSON.
    pub fn to_signed_bytes(&self) -> Result<Vec<u8>, serde_json::Error> {
        let statement = match self.signature.is_empty() {
            true => toolgate_json::serialize_canonical(self)?,
            false => toolgate_json::serialize_canonical(&Self {
                signature: String::new(),
                ..self.clone()
            })?,
        };
        Ok([b"toolgate-receipt-v1\0".as_slice(), &statement].concat())
    }
}
