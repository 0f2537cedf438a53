//! Defines the storage of sessions, claims, limits, approvals and the ledger.
//!
//! A store only loads, reserves and commits, each in one transaction. The pipeline makes all
//! decisions. Every backend behaves like [`MemoryStore`].

mod approval;
mod charge_check;
mod memory;
mod open_claims;
mod types;

use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use jiff::Timestamp;
use rust_decimal::Decimal;

pub use crate::store::charge_check::check_call_charges;
pub(crate) use crate::store::charge_check::{prior_call_error, with_limit_details};
pub use approval::{Approval, ApprovalState};
pub use memory::MemoryStore;
pub use types::{
    ClaimError, ClaimOwner, ClaimRecord, ClaimRequest, ClaimResolution, CommitConflictError,
    CommitRequest, DedupKey, DeferredClaim, LeaseRequest, PauseTarget, PriorCall, RejectedRow,
    SessionItem, SessionLease, SessionRequest, SessionSnapshot,
};

use crate::call::outcome::Outcome;
use crate::call::{CallId, SessionKey};
use crate::ledger::row::{LazyReceipt, Row};
use crate::limits::{Charge, ChargeError};
use crate::policy::{DecisionFacts, FactRequest};
use crate::session::state::{SessionEdit, SessionState};
use toolgate_json::Digest;

/// Why a store operation failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreErrorKind {
    /// The store cannot be reached or is busy. A retry may succeed.
    Unavailable,
    /// The term of this process has ended, so another process may own its claims.
    Fenced,
    /// The data has another schema, or is damaged.
    Schema,
    /// This process may not write.
    ReadOnly,
    /// The disk is full.
    Full,
}

/// A store operation failed; nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct StoreError {
    /// Why the operation failed.
    pub kind: StoreErrorKind,
    /// The message for operators. A caller never sees it, because it may name hosts and users.
    pub message: String,
}

impl StoreError {
    /// Creates an error.
    #[must_use]
    pub fn new(kind: StoreErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    /// Creates an error that a retry may resolve.
    #[must_use]
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StoreErrorKind::Unavailable, message)
    }
}

/// A storage backend.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// Returns the time of the store, or the best estimate without asking it.
    ///
    /// All decisions use this clock, so that processes with different clocks agree.
    fn now(&self) -> Timestamp;

    /// Returns the kill switch that pauses the agent, principal, tool or session of a call, if any.
    async fn find_pause(
        &self,
        key: &SessionKey,
        tool: &Arc<str>,
    ) -> Result<Option<(PauseTarget, String)>, StoreError>;
    /// Turns a kill switch on with a reason, or off with `None`.
    async fn set_pause(
        &self,
        target: PauseTarget,
        reason: Option<String>,
    ) -> Result<(), StoreError>;

    /// Leases a session; `None` after the timeout.
    async fn lease_session(
        &self,
        key: &SessionKey,
        request: LeaseRequest,
    ) -> Result<Option<SessionLease>, StoreError>;
    /// Releases a lease. Does not wait.
    fn release_session(&self, lease: SessionLease);
    /// Leases the session, finds earlier calls, counts the repetition and loads the state.
    ///
    /// This is one transaction. A new session is created. The result is `None` if the lease timed
    /// out, and then nothing is counted.
    async fn open_session(
        &self,
        request: SessionRequest<'_>,
    ) -> Result<Option<Box<SessionSnapshot>>, StoreError>;
    /// Returns the result of [`Store::open_session`] without any change.
    async fn inspect_session(
        &self,
        request: SessionRequest<'_>,
    ) -> Result<Box<SessionSnapshot>, StoreError>;
    /// Returns `false` if no kill switch is on, which saves a query.
    fn may_be_paused(&self) -> bool {
        true
    }
    /// Returns whether a session snapshot contains all evidence and marks.
    ///
    /// If so, only counters must be loaded.
    fn has_complete_snapshots(&self) -> bool {
        false
    }

    /// Loads the requested facts: evidence and marks at least as new as the snapshot, and current
    /// counters.
    async fn load_facts(
        &self,
        key: &SessionKey,
        needs: &FactRequest,
        at: &SessionState,
        facts: &mut DecisionFacts,
    ) -> Result<(), StoreError>;
    /// Returns for each charge the used amount, or that the charge exceeds the limit.
    async fn check_charges(
        &self,
        charges: &[Charge],
    ) -> Result<Vec<Result<Decimal, ChargeError>>, StoreError>;
    /// Claims a call, and returns the amount used of each counter before.
    ///
    /// Atomically writes the claim record, reserves every charge and uses the approval.
    async fn claim(
        &self,
        request: ClaimRequest<'_>,
    ) -> Result<Result<Vec<Decimal>, ClaimError>, StoreError>;
    /// Ends a call: commits state, claim, charges and row in one transaction.
    ///
    /// If the ledger outlives the process, returns a receipt for the row.
    async fn commit(
        &self,
        request: Box<CommitRequest>,
    ) -> Result<Result<Option<LazyReceipt>, CommitConflictError>, StoreError>;

    /// Takes the newest unsettled deferred call of a tool, by the client's id for the call.
    async fn take_deferred_claim(
        &self,
        key: &SessionKey,
        client: &str,
        tool: &str,
    ) -> Result<Option<DeferredClaim>, StoreError>;
    /// Closes a client's session: deferred calls without a report become pending.
    async fn close_client_session(&self, key: &SessionKey) -> Result<(), StoreError>;

    /// Returns a session's version and slices; the state is complete if
    /// [`Store::has_complete_snapshots`].
    async fn snapshot(&self, key: &SessionKey) -> Result<(u64, Arc<SessionState>), StoreError>;
    /// Returns the whole state of a session, whatever its size.
    async fn load_session(&self, key: &SessionKey)
    -> Result<Option<Arc<SessionState>>, StoreError>;
    /// Changes a session outside of a call.
    async fn edit_session(&self, key: &SessionKey, edit: SessionEdit) -> Result<(), StoreError>;
    /// Adds to counters outside of a call, for example the tokens of the model itself.
    async fn add_cost(&self, charges: &[Charge]) -> Result<(), StoreError>;

    /// Stores a request for approval.
    async fn create_approval(&self, approval: Approval) -> Result<(), StoreError>;
    /// Returns the newest approval for exactly this call.
    async fn approval_for(
        &self,
        key: &SessionKey,
        digest: Digest,
    ) -> Result<Option<Approval>, StoreError>;
    /// Returns an approval by its id.
    async fn approval(&self, id: &str) -> Result<Option<Approval>, StoreError>;
    /// Answers a waiting approval; false if it no longer waits or this person may not answer.
    async fn answer_approval(&self, id: &str, approved: bool, by: &str)
    -> Result<bool, StoreError>;

    /// Returns the claims with an unknown outcome.
    async fn pending_claims(&self) -> Result<Vec<ClaimRecord>, StoreError>;
    /// Settles a pending claim and records a row that names the person; false if the claim is not
    /// pending.
    ///
    /// `shown` is the outcome with secrets redacted, for the ledger.
    async fn settle_claim(
        &self,
        call: CallId,
        resolution: ClaimResolution,
        outcome: Outcome,
        shown: Outcome,
        by: &str,
    ) -> Result<bool, StoreError>;

    /// Returns a stored output of this session.
    async fn load_output(
        &self,
        key: &SessionKey,
        handle: &str,
    ) -> Result<Option<Arc<str>>, StoreError>;
    /// Returns the items of a session after the first `after`, with their numbers from 1.
    async fn items(
        &self,
        key: &SessionKey,
        after: u64,
    ) -> Result<Vec<(u64, SessionItem)>, StoreError>;
    /// Returns the rows of a session in order.
    async fn rows(&self, key: &SessionKey) -> Result<Vec<Arc<Row>>, StoreError>;
    /// Returns whether the ledger contains a success of this call.
    async fn has_succeeded(&self, call: CallId) -> Result<bool, StoreError>;
    /// Appends a row that was spooled while the store was unavailable; ignores a known row.
    async fn append_spooled(&self, row: Arc<Row>) -> Result<(), StoreError>;
    /// Appends several spooled rows in order, and returns the rows that can never be appended.
    ///
    /// After an error, some rows may be appended already. The caller may pass them again.
    async fn append_all_spooled(&self, rows: &[Arc<Row>]) -> Result<Vec<RejectedRow>, StoreError> {
        for row in rows {
            self.append_spooled(Arc::clone(row)).await?;
        }
        Ok(Vec::new())
    }

    /// Registers an agent's definition, which is stored once under its digest for the ledger.
    fn register_definition(&self, config: Digest, definition: &Arc<str>) {
        let _ = (config, definition);
    }
    /// Returns the key for the marks of redacted values, so that equal values match after a
    /// restart.
    fn redaction_key(&self) -> Option<[u8; 32]> {
        None
    }
    /// Returns whether the store outlives the process, so that another one can end its claims.
    fn outlives_process(&self) -> bool {
        false
    }
    /// Returns the directory for rows that the store cannot take now.
    fn spool_dir(&self) -> Option<PathBuf> {
        None
    }
    /// Returns the directory for the undo entries of files that calls change.
    fn undo_dir(&self) -> Option<PathBuf> {
        None
    }
    /// Returns the term of this process for claims, if the store can detect dead processes.
    fn term(&self) -> Option<Arc<str>> {
        None
    }
}
