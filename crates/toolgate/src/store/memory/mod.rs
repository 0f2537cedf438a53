//! Implements [`Store`] in memory, with one lock around all data.

mod claims;
mod session_lock;
mod tables;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use ahash::HashMap;
use async_trait::async_trait;
use jiff::{SignedDuration, Timestamp};
use rust_decimal::Decimal;
use tokio::sync::RwLock;

use self::session_lock::SessionGuard;
use super::{
    Approval, ApprovalState, ClaimError, ClaimRecord, ClaimRequest, ClaimResolution,
    CommitConflictError, CommitRequest, DedupKey, DeferredClaim, LeaseRequest, PauseTarget,
    PriorCall, SessionItem, SessionLease, SessionRequest, SessionSnapshot, Store, StoreError,
};
use crate::call::outcome::Outcome;
use crate::call::{CallId, SessionKey};
use crate::clock::{Clock, SystemClock};
use crate::ledger::row::{Decision, LazyReceipt, Row};
use crate::limits::{Charge, ChargeError, Counter};
use crate::policy::{CounterReading, DecisionFacts, FactRequest};
use crate::provenance::MemoryCarrierStore;
use crate::session::repetition::RepetitionState;
use crate::session::state::{SessionEdit, SessionState};
use crate::store::open_claims::OpenClaims;
use toolgate_json::Digest;

/// The number of large outputs that are stored, and the default number of rows. Claims, limits and
/// sessions are never dropped.
const MAX_OUTPUTS: usize = 256;
const DEFAULT_MAX_ROWS: usize = 10_000;

/// A store that lives only as long as the process: for tests, demos and short-lived agents.
pub struct MemoryStore {
    inner: Mutex<Inner>,
    max_rows: usize,
    clock: Arc<dyn Clock>,
    /// The locks behind the leases that are not released.
    lease_locks: Mutex<HashMap<u64, SessionGuard>>,
    lease_count: AtomicU64,
    /// Whether any kill switch is on, readable without the lock.
    any_paused: AtomicBool,
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self {
            inner: Mutex::default(),
            max_rows: DEFAULT_MAX_ROWS,
            clock: Arc::new(SystemClock),
            lease_locks: Mutex::default(),
            lease_count: AtomicU64::new(0),
            any_paused: AtomicBool::new(false),
        }
    }
}

#[derive(Default)]
struct Inner {
    paused: HashMap<PauseTarget, String>,
    sessions: HashMap<SessionKey, MemorySession>,
    /// Counters by name and time window.
    counters: HashMap<(String, Option<SignedDuration>), Counter>,
    claims: HashMap<CallId, MemoryClaim>,
    open_claims: OpenClaims,
    dedup_keys: HashMap<DedupKey, (Digest, CallId)>,
    approvals: HashMap<String, Approval>,
    approval_ids: HashMap<(SessionKey, Digest), String>,
    outputs: HashMap<(SessionKey, String), Arc<str>>,
    output_order: VecDeque<(SessionKey, String)>,
    rows: VecDeque<Arc<Row>>,
    /// The number of rows ever recorded.
    rows_recorded: u64,
    carriers: MemoryCarrierStore,
    items: HashMap<SessionKey, Vec<SessionItem>>,
}

struct MemorySession {
    version: u64,
    opened: Option<Timestamp>,
    state: Arc<SessionState>,
    progress: RepetitionState,
    lock: Arc<RwLock<()>>,
}

struct MemoryClaim {
    record: Box<ClaimRecord>,
    charges: Vec<Charge>,
    used: Vec<CounterReading>,
    /// The outcome; `None` while it is unknown.
    outcome: Option<Outcome>,
    pending: bool,
}

impl MemoryClaim {
    fn is_pending(&self, now: Timestamp) -> bool {
        self.outcome.is_none() && self.record.effect && (self.pending || now > self.record.lease)
    }
}

impl MemoryStore {
    /// Creates an empty store that keeps the newest 10,000 rows of its ledger.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates an empty store that keeps this many rows.
    #[must_use]
    pub fn with_max_rows(rows: usize) -> Self {
        Self { max_rows: rows, ..Self::default() }
    }

    /// Sets the clock, for tests and replays.
    #[must_use]
    pub fn with_clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }
}

impl MemoryStore {
    /// Records the end of a call that has no other effect on the store.
    pub(crate) fn record_call_end(
        &self,
        key: &SessionKey,
        ended: &crate::session::repetition::CallEnd,
    ) {
        crate::lock(&self.inner).session_mut(key).progress.record_end(ended);
    }

    /// Sets the progress and the start of a session whose earlier rows are not available.
    pub(crate) fn seed_session(
        &self,
        key: &SessionKey,
        progress: RepetitionState,
        opened: Timestamp,
    ) {
        let mut inner = crate::lock(&self.inner);
        let session = inner.session_mut(key);
        (session.progress, session.opened) = (progress, Some(opened));
    }
}

#[async_trait]
impl Store for MemoryStore {
    fn now(&self) -> Timestamp {
        self.clock.now()
    }

    async fn find_pause(
        &self,
        key: &SessionKey,
        tool: &Arc<str>,
    ) -> Result<Option<(PauseTarget, String)>, StoreError> {
        Ok(crate::lock(&self.inner).find_pause(key, tool))
    }

    async fn set_pause(
        &self,
        target: PauseTarget,
        reason: Option<String>,
    ) -> Result<(), StoreError> {
        let mut inner = crate::lock(&self.inner);
        match reason {
            Some(reason) => inner.paused.insert(target, reason),
            None => inner.paused.remove(&target),
        };
        self.any_paused.store(!inner.paused.is_empty(), Ordering::SeqCst);
        Ok(())
    }

    async fn lease_session(
        &self,
        key: &SessionKey,
        request: LeaseRequest,
    ) -> Result<Option<SessionLease>, StoreError> {
        let guard = self.acquire_lock(key, request).await;
        Ok(guard.map(|guard| self.register_lease(key, request, guard)))
    }

    fn release_session(&self, lease: SessionLease) {
        let guard = crate::lock(&self.lease_locks).remove(&lease.id);
        drop(guard);
    }

    async fn open_session(
        &self,
        request: SessionRequest<'_>,
    ) -> Result<Option<Box<SessionSnapshot>>, StoreError> {
        let locked = match request.lease {
            Some(lease) => match self.acquire_lock(request.key, lease).await {
                Some(guard) => Some((lease, guard)),
                None => return Ok(None),
            },
            None => None,
        };
        let now = self.now();
        let mut inner = crate::lock(&self.inner);
        let (prior_call, dedup_key_kind) =
            inner.find_prior_call(request.dedup_keys, request.digest, now).unzip();
        let row_count = inner.rows_recorded;
        let session = inner.session_mut(request.key);
        if request.counts_repetition && !matches!(prior_call, Some(PriorCall::Settled(_))) {
            session.progress.count_call(request.digest, now, request.polling);
        }
        let mut snapshot = Box::new(SessionSnapshot {
            version: session.version,
            started_at: *session.opened.get_or_insert(now),
            state: Arc::clone(&session.state),
            row_count,
            prior_call,
            dedup_key_kind,
            repetitions: session.progress,
            lease: None,
            now,
        });
        drop(inner);
        snapshot.lease =
            locked.map(|(lease, guard)| self.register_lease(request.key, lease, guard));
        Ok(Some(snapshot))
    }

    async fn inspect_session(
        &self,
        request: SessionRequest<'_>,
    ) -> Result<Box<SessionSnapshot>, StoreError> {
        let now = self.now();
        let inner = crate::lock(&self.inner);
        let (prior_call, dedup_key_kind) =
            inner.find_prior_call(request.dedup_keys, request.digest, now).unzip();
        let session = inner.sessions.get(request.key);
        let mut repetitions = session.map(|session| session.progress).unwrap_or_default();
        if request.counts_repetition {
            repetitions.count_call(request.digest, now, request.polling);
        }
        Ok(Box::new(SessionSnapshot {
            version: session.map_or(0, |session| session.version),
            started_at: session.and_then(|session| session.opened).unwrap_or(now),
            state: session.map(|session| Arc::clone(&session.state)).unwrap_or_default(),
            row_count: inner.rows_recorded,
            prior_call,
            dedup_key_kind,
            repetitions,
            lease: None,
            now,
        }))
    }

    fn may_be_paused(&self) -> bool {
        self.any_paused.load(Ordering::SeqCst)
    }

    fn has_complete_snapshots(&self) -> bool {
        true
    }

    async fn load_facts(
        &self,
        _: &SessionKey,
        needs: &FactRequest,
        at: &SessionState,
        facts: &mut DecisionFacts,
    ) -> Result<(), StoreError> {
        let mut inner = crate::lock(&self.inner);
        for (counter, window) in &needs.counters {
            let used = inner
                .counters
                .get_mut(&(counter.clone(), *window))
                .map_or(Decimal::ZERO, |c| c.used(facts.now, *window));
            facts.counters.push((counter.clone(), *window, used));
        }
        drop(inner);
        let FactRequest { evidence, marks, origins, .. } = needs;
        let mut session_facts = FactRequest {
            evidence: evidence.clone(),
            marks: marks.clone(),
            origins: origins.clone(),
            ..FactRequest::default()
        };
        facts.load_from_session(&mut session_facts, at);
        Ok(())
    }

    async fn check_charges(
        &self,
        charges: &[Charge],
    ) -> Result<Vec<Result<Decimal, ChargeError>>, StoreError> {
        let now = self.now();
        let mut inner = crate::lock(&self.inner);
        Ok(charges.iter().map(|charge| inner.check_charge(charge, now)).collect())
    }

    async fn claim(
        &self,
        request: ClaimRequest<'_>,
    ) -> Result<Result<Vec<Decimal>, ClaimError>, StoreError> {
        let now = self.now();
        crate::lock(&self.inner).claim(request, now)
    }

    async fn commit(
        &self,
        request: Box<CommitRequest>,
    ) -> Result<Result<Option<LazyReceipt>, CommitConflictError>, StoreError> {
        let mut inner = crate::lock(&self.inner);
        let committed = inner.commit(*request, self.max_rows);
        // Drop the oldest row outside of the lock.
        drop(inner);
        Ok(committed.map(|_oldest_row| None))
    }

    async fn take_deferred_claim(
        &self,
        key: &SessionKey,
        client: &str,
        tool: &str,
    ) -> Result<Option<DeferredClaim>, StoreError> {
        Ok(crate::lock(&self.inner).take_deferred_claim(key, client, tool))
    }

    async fn close_client_session(&self, key: &SessionKey) -> Result<(), StoreError> {
        let now = self.now();
        crate::lock(&self.inner).close_client_session(key, now);
        Ok(())
    }

    async fn snapshot(&self, key: &SessionKey) -> Result<(u64, Arc<SessionState>), StoreError> {
        Ok(crate::lock(&self.inner)
            .sessions
            .get(key)
            .map(|s| (s.version, Arc::clone(&s.state)))
            .unwrap_or_default())
    }

    async fn load_session(
        &self,
        key: &SessionKey,
    ) -> Result<Option<Arc<SessionState>>, StoreError> {
        Ok(crate::lock(&self.inner).sessions.get(key).map(|s| Arc::clone(&s.state)))
    }

    async fn edit_session(&self, key: &SessionKey, edit: SessionEdit) -> Result<(), StoreError> {
        let mut inner = crate::lock(&self.inner);
        let session = inner.session_mut(key);
        session.version += 1;
        Arc::make_mut(&mut session.state).apply_edit(edit);
        Ok(())
    }

    async fn add_cost(&self, charges: &[Charge]) -> Result<(), StoreError> {
        let now = self.now();
        let mut inner = crate::lock(&self.inner);
        let call = CallId::generate();
        for charge in charges {
            inner
                .counters
                .entry((charge.counter.clone(), charge.window))
                .or_default()
                .reserve(now, call, charge, false);
        }
        Ok(())
    }

    async fn create_approval(&self, approval: Approval) -> Result<(), StoreError> {
        let mut inner = crate::lock(&self.inner);
        inner.approval_ids.insert((approval.key.clone(), approval.digest), approval.id.clone());
        inner.approvals.insert(approval.id.clone(), approval);
        Ok(())
    }

    async fn approval_for(
        &self,
        key: &SessionKey,
        digest: Digest,
    ) -> Result<Option<Approval>, StoreError> {
        let inner = crate::lock(&self.inner);
        let id = inner.approval_ids.get(&(key.clone(), digest));
        Ok(id.and_then(|id| inner.approvals.get(id)).cloned())
    }

    async fn approval(&self, id: &str) -> Result<Option<Approval>, StoreError> {
        Ok(crate::lock(&self.inner).approvals.get(id).cloned())
    }

    async fn answer_approval(
        &self,
        id: &str,
        approved: bool,
        by: &str,
    ) -> Result<bool, StoreError> {
        let now = self.now();
        let mut inner = crate::lock(&self.inner);
        let waiting = inner.approvals.get_mut(id).filter(|a| {
            a.state == ApprovalState::Waiting && now <= a.expires && a.can_be_answered_by(by)
        });
        let Some(approval) = waiting else { return Ok(false) };
        approval.state = if approved { ApprovalState::Approved } else { ApprovalState::Denied };
        approval.answered_by = Some(by.to_owned());
        Ok(true)
    }

    async fn pending_claims(&self) -> Result<Vec<ClaimRecord>, StoreError> {
        let now = self.now();
        let mut inner = crate::lock(&self.inner);
        inner.expire_leases(now);
        let mut pending: Vec<ClaimRecord> = inner
            .claims
            .values()
            .filter(|c| c.is_pending(now))
            .map(|c| c.record.as_ref().clone())
            .collect();
        pending.sort_unstable_by_key(|record| record.call);
        Ok(pending)
    }

    async fn settle_claim(
        &self,
        call: CallId,
        resolution: ClaimResolution,
        outcome: Outcome,
        shown: Outcome,
        by: &str,
    ) -> Result<bool, StoreError> {
        let now = self.now();
        let mut inner = crate::lock(&self.inner);
        inner.expire_leases(now);
        let Some(claim) = inner
            .claims
            .get(&call)
            .filter(|claim| claim.is_pending(now) && resolution != ClaimResolution::Pending)
        else {
            return Ok(false);
        };
        let row =
            inner.rows.iter().rev().find(|row| row.call == call).or(claim.record.row.as_ref());
        let row = row.map(|row| row.settlement_row(shown.clone(), resolution.effects(), by, now));
        inner.resolve_claim(call, resolution, None, Some(outcome), now);
        if let Some(row) = row {
            inner.record_row(Arc::new(row), self.max_rows);
        }
        Ok(true)
    }

    async fn load_output(
        &self,
        key: &SessionKey,
        handle: &str,
    ) -> Result<Option<Arc<str>>, StoreError> {
        Ok(crate::lock(&self.inner).outputs.get(&(key.clone(), handle.to_owned())).cloned())
    }

    async fn items(
        &self,
        key: &SessionKey,
        after: u64,
    ) -> Result<Vec<(u64, SessionItem)>, StoreError> {
        let inner = crate::lock(&self.inner);
        let items = inner.items.get(key).map(Vec::as_slice).unwrap_or_default();
        let after_index = usize::try_from(after).unwrap_or(usize::MAX);
        Ok((1..).zip(items.iter().cloned()).skip(after_index).collect())
    }

    async fn rows(&self, key: &SessionKey) -> Result<Vec<Arc<Row>>, StoreError> {
        Ok(crate::lock(&self.inner).rows.iter().filter(|row| row.key == *key).cloned().collect())
    }

    async fn has_succeeded(&self, call: CallId) -> Result<bool, StoreError> {
        let inner = crate::lock(&self.inner);
        Ok(inner.rows.iter().any(|row| row.call == call && row.decision == Decision::Succeeded))
    }

    async fn append_spooled(&self, row: Arc<Row>) -> Result<(), StoreError> {
        let mut inner = crate::lock(&self.inner);
        if !inner.rows.iter().any(|known| known.call == row.call) {
            if ClaimResolution::from_effects(row.effects) != ClaimResolution::Released {
                inner.revoke_evidence_of(row.call);
            }
            inner.resolve_claim(
                row.call,
                ClaimResolution::from_effects(row.effects),
                row.spent,
                Some(row.outcome.clone()),
                row.ended_at(),
            );
            inner.record_row(row, self.max_rows);
        }
        Ok(())
    }
}
