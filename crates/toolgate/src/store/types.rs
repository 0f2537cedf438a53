//! Defines the requests and responses of a [`Store`](super::Store).

use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use rust_decimal::Decimal;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::call::error::{CallEffects, ToolError};
use crate::call::outcome::Outcome;
use crate::call::{CallId, SessionKey};
use crate::ledger::row::Row;
use crate::limits::{Charge, ChargeError, ChargeUnit, Cost};
use crate::policy::{CounterReading, DedupKeyKind, PriorCallFact};
use crate::provenance::ProvenanceUpdate;
use crate::session::repetition::{CallEnd, RepetitionState};
use crate::session::state::{Revocation, SessionChanges, SessionState};
use crate::tool::PollingSettings;
use toolgate_json::Digest;

/// The target of a kill switch.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PauseTarget {
    /// An agent.
    Agent(Arc<str>),
    /// A tool, in every agent.
    Tool(Arc<str>),
    /// A principal.
    Principal(Arc<str>),
    /// One session.
    Session(SessionKey),
}

/// The key that finds an earlier call: the idempotency key, or the arguments of a `once` tool.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DedupKey {
    /// The principal of the call.
    pub principal: Arc<str>,
    /// The agent of the call.
    pub agent: Arc<str>,
    /// The tool of the call.
    pub tool: Arc<str>,
    /// The idempotency key of the client, or the digest of the arguments.
    pub key: String,
}

impl DedupKey {
    /// Returns whether the key comes from the client or from the arguments of a `once` tool.
    #[must_use]
    pub fn kind(&self) -> DedupKeyKind {
        if self.key.starts_with("once:") { DedupKeyKind::Once } else { DedupKeyKind::Key }
    }
}

/// The state of an earlier call with the same key.
#[derive(Debug, Clone, PartialEq)]
pub enum PriorCall {
    /// The call ran; its outcome is `None` if it was deleted.
    Settled(Option<Outcome>),
    /// The call is running.
    InProgress,
    /// The outcome of the call is unknown.
    Pending(CallId),
    /// The call had other arguments.
    KeyReused,
}

impl PriorCall {
    /// Returns the fact that the ledger records.
    #[must_use]
    pub const fn fact(&self) -> PriorCallFact {
        match self {
            Self::Settled(Some(_)) => PriorCallFact::Settled,
            Self::Settled(None) => PriorCallFact::Forgotten,
            Self::InProgress => PriorCallFact::InProgress,
            Self::Pending(_) => PriorCallFact::Pending,
            Self::KeyReused => PriorCallFact::KeyReused,
        }
    }
}

/// What a call needs of its session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseRequest {
    /// Whether no other call may use the session meanwhile. Otherwise it is shared with readers.
    pub is_exclusive: bool,
    /// How long the call waits for other calls.
    pub timeout: Duration,
    /// How long the lease lasts if its owner cannot release it.
    pub term: SignedDuration,
}

/// The right to use a session until it is released or its term has ended.
///
/// A store that shares no state with other machines need not enforce the term: it knows whether
/// the owning process is alive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionLease {
    /// The number of the lease in its store.
    pub id: u64,
    /// The session.
    pub key: SessionKey,
    /// Whether no other call may use the session.
    pub is_exclusive: bool,
    /// The end of the term.
    pub expires: Timestamp,
}

/// A request of a validated call to open its session.
#[derive(Debug)]
pub struct SessionRequest<'a> {
    /// The session.
    pub key: &'a SessionKey,
    /// The digest of the checked call.
    pub digest: Digest,
    /// The keys that find an earlier call.
    pub dedup_keys: &'a [DedupKey],
    /// Whether the call counts as a repetition.
    pub counts_repetition: bool,
    /// How often the tool may be polled.
    pub polling: Option<&'a PollingSettings>,
    /// Leases the session first. `None` if the caller has a lease already.
    pub lease: Option<LeaseRequest>,
}

/// A snapshot of a session, as a call opens it.
#[derive(Debug)]
pub struct SessionSnapshot {
    /// The time of the store, by which windows, leases and approvals are judged.
    pub now: Timestamp,
    /// The version of the session.
    pub version: u64,
    /// The time when the session started.
    pub started_at: Timestamp,
    /// The state with all its slices; complete if [`super::Store::has_complete_snapshots`].
    pub state: Arc<SessionState>,
    /// The number of rows in the ledger.
    pub row_count: u64,
    /// The earlier call with the same key.
    pub prior_call: Option<PriorCall>,
    /// The kind of key that found the earlier call.
    pub dedup_key_kind: Option<DedupKeyKind>,
    /// How often the same call was repeated.
    pub repetitions: RepetitionState,
    /// The lease of the session, if one was requested.
    pub lease: Option<SessionLease>,
}

/// The party that ends a claim.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClaimOwner {
    /// A process, by the term that identifies this start of it.
    Term(Arc<str>),
    /// The session of a client, which runs the tool itself.
    ClientSession(Arc<str>),
}

/// An entry of a session that the store keeps in order and does not read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionItem(pub Vec<u8>);

/// The data that claims a call, written in one transaction.
#[derive(Debug, Clone)]
pub struct ClaimRequest<'a> {
    /// The claim. The store sets the end of its lease.
    pub record: Box<ClaimRecord>,
    /// How long the lease lasts.
    pub lease_ttl: SignedDuration,
    /// The charges to reserve.
    pub charges: &'a [Charge],
    /// The id of the approval to use.
    pub approval: Option<&'a str>,
    /// Items to append to the session.
    pub items: Vec<SessionItem>,
}

/// The durable record of a claim, written before the tool runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClaimRecord {
    /// The id of the call.
    pub call: CallId,
    /// The session of the call.
    pub key: SessionKey,
    /// The tool of the call.
    pub tool: Arc<str>,
    /// The digest of the checked call.
    pub digest: Digest,
    /// The digest of the call before hooks, which a repetition is compared with.
    pub asked: Digest,
    /// The keys under which later calls find this one.
    pub recall: Vec<DedupKey>,
    /// The owner of the claim.
    pub owner: ClaimOwner,
    /// The end of the lease, which the store sets; a claim that has not ended by then is pending.
    pub lease: Timestamp,
    /// Whether the call can have an effect; a read leaves nothing to reconcile.
    pub effect: bool,
    /// The row to record if the call is abandoned and the store outlives the process.
    #[serde(skip)]
    pub row: Option<Arc<Row>>,
    /// The state of a deferred call, with the client's id for it.
    ///
    /// The state may contain secrets, so a store must encrypt it.
    #[serde(skip)]
    pub pass: Option<(String, Vec<u8>)>,
    /// The files and entities that the call writes, as keys of [`crate::provenance::CarrierStore`].
    ///
    /// They are recorded if the call has or may have an effect: for a deferred call with the claim,
    /// otherwise when the call ends or is abandoned.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub carriers: Vec<String>,
    /// The provenance of the arguments, recorded with the claim.
    #[serde(skip)]
    pub seen: Option<Box<ProvenanceUpdate>>,
    /// The evidence that the call revokes if it has or may have an effect.
    ///
    /// A deferred call revokes with the claim, any other call when it is abandoned.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub revokes: Vec<Revocation>,
}

impl ClaimRecord {
    /// Returns whether a client runs the tool; this process then sees neither start nor end.
    #[must_use]
    pub fn is_run_by_client(&self) -> bool {
        matches!(self.owner, ClaimOwner::ClientSession(_))
    }
}

/// A deferred call, taken from the store to settle it; only one caller gets it.
#[derive(Debug, Clone, PartialEq)]
pub struct DeferredClaim {
    /// The claim of the call.
    pub claim: ClaimRecord,
    /// The stored state of the call.
    pub state: Vec<u8>,
    /// The amount used of each counter before the call.
    pub counters_before: Vec<CounterReading>,
}

/// The reason why a claim failed; nothing was reserved.
#[derive(Debug, Clone, PartialEq)]
pub enum ClaimError {
    /// A charge exceeds its limit.
    LimitExceeded {
        /// The index of the charge.
        index: usize,
        /// The state of the limit.
        error: ChargeError,
        /// The amounts used of the limits before this one, including the charges of the call.
        used: Vec<Decimal>,
    },
    /// Another call with the same key was first; the kind of key.
    PriorCall(PriorCall, DedupKeyKind),
    /// The approval was used, has expired or was withdrawn.
    ApprovalUnavailable,
    /// A kill switch was turned on in the meantime; its reason.
    Paused(PauseTarget, String),
}

/// How a claim ends, according to the real effect of the call and not to the reported outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClaimResolution {
    /// The call took effect, and the charges are final.
    Done,
    /// The call had no effect, and the charges are released.
    Released,
    /// The effect is unknown, and the charges stay reserved until the claim is settled.
    Pending,
}

impl ClaimResolution {
    /// Returns how a claim ends after a call with these effects.
    #[must_use]
    pub const fn from_effects(effects: CallEffects) -> Self {
        match effects {
            CallEffects::None | CallEffects::RolledBack => Self::Released,
            CallEffects::Done => Self::Done,
            CallEffects::Unknown => Self::Pending,
        }
    }

    /// Returns how the claim of a read ends; a read is never pending.
    #[must_use]
    pub const fn for_read(self) -> Self {
        match self {
            Self::Pending => Self::Released,
            Self::Done | Self::Released => self,
        }
    }

    /// Returns the final amount of a charge: reserved, really spent, or zero.
    #[must_use]
    pub fn final_amount(self, charge: &Charge, spent: Option<Cost>) -> Decimal {
        match (self, charge.unit) {
            (_, ChargeUnit::Attempt) => charge.amount,
            (Self::Released, ChargeUnit::Fixed) => Decimal::ZERO,
            (_, ChargeUnit::Fixed) => charge.amount,
            (Self::Released, _) if spent.is_none() => Decimal::ZERO,
            (_, ChargeUnit::Tokens) => spent.map_or(charge.amount, |s| s.tokens.into()),
            (_, ChargeUnit::Money) => spent.map_or(charge.amount, |s| s.money),
        }
    }

    /// Returns the outcome of a pending call that turned out to have no effect.
    #[must_use]
    pub fn no_effect_outcome() -> Outcome {
        ToolError::from_code(crate::call::error_code::CANCELLED, "the call had no effect").into()
    }

    /// Returns the effects of a call whose claim ended this way.
    #[must_use]
    pub const fn effects(self) -> CallEffects {
        match self {
            Self::Done => CallEffects::Done,
            Self::Released => CallEffects::None,
            Self::Pending => CallEffects::Unknown,
        }
    }
}

/// The data that ends a call, written in one transaction.
#[derive(Debug, Clone)]
pub struct CommitRequest {
    /// The row.
    pub row: Arc<Row>,
    /// The version of the session that the changes are based on.
    pub version: u64,
    /// The changes to the session after a success.
    pub changes: Option<SessionChanges>,
    /// The revoked evidence, also after a failure if the call may have had an effect.
    pub revoked: Vec<Revocation>,
    /// The provenance of values, recorded for every outcome because the model has read them.
    pub provenance: Option<Box<ProvenanceUpdate>>,
    /// The entries to append to log slices, for every outcome.
    pub logs: Vec<(Arc<str>, Value)>,
    /// How the claim ends, if there is one.
    pub resolution: ClaimResolution,
    /// The outcome for repeated calls, redacted only as far as for the caller.
    pub outcome: Option<Outcome>,
    /// The amount really spent, if the tool reported one; otherwise the reserved amount counts.
    pub spent: Option<Cost>,
    /// The large outputs to store, by handle.
    pub outputs: Vec<(String, Arc<str>)>,
    /// How the call ended, for counting repetitions.
    pub ended: Option<CallEnd>,
    /// Items to append to the session.
    pub items: Vec<SessionItem>,
    /// Whether the write must survive a power failure: an effect, or the denial of one.
    pub is_durable: bool,
}

/// The session changed in the meantime, and nothing was written, not even the row.
///
/// The caller commits again without changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommitConflictError;

/// A spooled row that a store can never append.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RejectedRow {
    /// The call of the row.
    pub call: CallId,
    /// The reason.
    pub reason: String,
}
