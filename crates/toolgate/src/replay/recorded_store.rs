//! Implements a store that answers from recorded rows.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use jiff::{SignedDuration, Timestamp};
use rust_decimal::Decimal;
use serde_json::Value;

use crate::call::outcome::{CallOutput, Outcome};
use crate::call::{CallId, SessionKey};
use crate::clock::{Clock, ManualClock};
use crate::ledger::row::{Gate, LazyReceipt, Row};
use crate::limits::{Charge, ChargeError};
use crate::policy::{DecisionFacts, DedupKeyKind, FactRequest, MissingFactTracker, PriorCallFact};
use crate::replay::recorded_limits::{check_recorded_charges, claim_recorded_charges};
use crate::session::repetition::CallEnd;
use crate::session::state::{Revocation, SessionEdit, SessionState};
use crate::store::{
    Approval, ClaimError, ClaimRecord, ClaimRequest, ClaimResolution, CommitConflictError,
    CommitRequest, DedupKey, DeferredClaim, LeaseRequest, MemoryStore, PauseTarget, PriorCall,
    SessionItem, SessionLease, SessionRequest, SessionSnapshot, Store, StoreError,
};
use toolgate_json::Digest;

/// Store for replays. Each answer is the recorded one.
pub(crate) struct RecordedStore {
    current_row: Mutex<Option<(Arc<Row>, MissingFactTracker)>>,
    /// Counters, evidence and progress under the replayed decisions. `None` uses the recorded
    /// values.
    memory: Option<MemoryStore>,
    /// Digest under which the current call was counted.
    counted_digest: Mutex<Option<Digest>>,
    /// The time of the replayed calls.
    clock: Arc<ManualClock>,
    /// Sessions that the replay has opened.
    opened_sessions: Mutex<HashSet<SessionKey>>,
    /// Keys of `once` calls that succeeded or are assumed to have succeeded.
    remembered_keys: Mutex<HashSet<DedupKey>>,
}

impl RecordedStore {
    /// Creates a store that answers only from the recorded row.
    pub(crate) fn from_facts() -> Self {
        Self {
            current_row: Mutex::default(),
            memory: None,
            counted_digest: Mutex::default(),
            clock: Arc::new(ManualClock::at(Timestamp::UNIX_EPOCH)),
            opened_sessions: Mutex::default(),
            remembered_keys: Mutex::default(),
        }
    }

    /// Creates a store that computes counters, evidence and progress from the replayed calls. All
    /// other answers are recorded ones.
    pub(crate) fn with_memory() -> Self {
        let store = Self::from_facts();
        let memory = MemoryStore::with_max_rows(0).with_clock(store.clock.clone());
        Self { memory: Some(memory), ..store }
    }

    /// Sets the time of the replayed call.
    pub(crate) fn set_time(&self, now: Timestamp) {
        self.clock.set(now);
    }

    /// Returns the session without the revoked evidence, or `None` if nothing is revoked.
    pub(crate) async fn state_without(
        &self,
        key: &SessionKey,
        revoked: Vec<Revocation>,
    ) -> Option<SessionState> {
        let memory = self.memory.as_ref().filter(|_| !revoked.is_empty())?;
        let (_, state) = memory.snapshot(key).await.ok()?;
        let mut state = (*state).clone();
        revoked.into_iter().for_each(|revoked| state.revoke(revoked));
        Some(state)
    }

    /// Returns the digest under which the current call was counted, if it was.
    pub(crate) fn counted_digest(&self) -> Option<Digest> {
        *crate::lock(&self.counted_digest)
    }

    /// Records the end of a call without effects.
    pub(crate) fn record_call_end(&self, row: &Row, ended: &CallEnd) {
        if let Some(memory) = &self.memory {
            memory.record_call_end(&row.key, ended);
        }
    }

    /// Remembers a call that did not run and is assumed to have succeeded.
    pub(crate) fn remember_keys(&self, keys: Vec<DedupKey>) {
        crate::lock(&self.remembered_keys)
            .extend(keys.into_iter().filter(|key| key.kind() == DedupKeyKind::Once));
    }

    /// Settles a call whose outcome was found out later.
    pub(crate) async fn settle_call(&self, call: CallId, resolution: ClaimResolution, row: &Row) {
        self.set_time(row.at);
        if let Some(memory) = &self.memory {
            let _ = memory
                .settle_claim(call, resolution, row.outcome.clone(), row.outcome.clone(), "")
                .await;
        }
    }

    /// Sets the row of the current call.
    pub(crate) fn set_current_row(&self, row: &Row, watch: &MissingFactTracker) {
        *crate::lock(&self.current_row) = Some((Arc::new(row.clone()), watch.clone()));
        *crate::lock(&self.counted_digest) = None;
    }

    pub(super) fn current_row(&self) -> Result<(Arc<Row>, MissingFactTracker), StoreError> {
        crate::lock(&self.current_row)
            .clone()
            .ok_or_else(|| StoreError::unavailable("no row is being replayed".to_owned()))
    }

    fn recorded_approval(&self, digest: Digest) -> Result<Option<Approval>, StoreError> {
        let (row, _) = self.current_row()?;
        Ok(row.facts.approval.as_ref().map(|fact| Approval {
            id: fact.id.clone(),
            key: row.key.clone(),
            tool: Arc::clone(&row.tool),
            digest,
            arguments: (*row.arguments).clone(),
            shown: Value::Null,
            asked_by: fact.asked_by.clone(),
            approvers: Vec::new(),
            reason: "recorded request for approval".to_owned(),
            asked_at: row.at,
            expires: fact.expires,
            state: fact.state,
            answered_by: fact.answered_by.clone(),
        }))
    }
}

#[async_trait]
impl Store for RecordedStore {
    fn now(&self) -> Timestamp {
        self.clock.now()
    }

    async fn find_pause(
        &self,
        _: &SessionKey,
        _: &Arc<str>,
    ) -> Result<Option<(PauseTarget, String)>, StoreError> {
        let (row, _) = self.current_row()?;
        Ok(row.facts.paused.clone().filter(|_| row.gate == Gate::Admit))
    }
    async fn set_pause(&self, _: PauseTarget, _: Option<String>) -> Result<(), StoreError> {
        Ok(())
    }
    async fn lease_session(
        &self,
        key: &SessionKey,
        request: LeaseRequest,
    ) -> Result<Option<SessionLease>, StoreError> {
        let LeaseRequest { is_exclusive, .. } = request;
        Ok(Some(SessionLease { id: 0, key: key.clone(), is_exclusive, expires: Timestamp::MAX }))
    }
    fn release_session(&self, _: SessionLease) {}

    async fn open_session(
        &self,
        request: SessionRequest<'_>,
    ) -> Result<Option<Box<SessionSnapshot>>, StoreError> {
        let (row, watch) = self.current_row()?;
        let recalled =
            row.facts.recalled.filter(|_| row.gate != Gate::Claim).map(|fact| match fact {
                PriorCallFact::Settled => {
                    PriorCall::Settled(Some(Outcome::Success(CallOutput::default())))
                }
                PriorCallFact::Forgotten => PriorCall::Settled(None),
                PriorCallFact::InProgress => PriorCall::InProgress,
                PriorCallFact::Pending => PriorCall::Pending(row.call),
                PriorCallFact::KeyReused => PriorCall::KeyReused,
            });
        if let Some(memory) = &self.memory {
            // If the `once` setting of the tool has changed, the row cannot tell the result of the
            // recall. A client's key is recalled under any configuration.
            if recalled.is_some() && request.dedup_keys.is_empty() {
                watch.record_missing(|| match row.facts.recalled_by {
                    Some(_) => {
                        "the recorded call was replayed, and its tool is not `once` any more"
                            .to_owned()
                    }
                    None => "the recorded call was replayed, and its row does not say by which key"
                        .to_owned(),
                });
            }
            for key in request.dedup_keys.iter().filter(|key| key.kind() == DedupKeyKind::Once) {
                let mut remembered = crate::lock(&self.remembered_keys);
                let again = remembered.contains(key);
                if row.outcome.success().is_some() {
                    remembered.insert(key.clone());
                }
                if again && recalled.is_none() {
                    watch.record_missing(|| {
                        "the same call would already have succeeded, and its tool is `once`"
                            .to_owned()
                    });
                }
            }
            let named = row.facts.approval.as_ref().is_some_and(|approval| approval.named);
            let counts = request.counts_repetition
                && !named
                && !matches!(recalled, Some(PriorCall::Settled(_)));
            // The first replayed row of a session records the state before it.
            if crate::lock(&self.opened_sessions).insert(request.key.clone())
                && let (Some(progress), Some(opened)) = (row.facts.progress, row.facts.opened)
            {
                memory.seed_session(
                    request.key,
                    progress.state_before(request.digest, row.digest),
                    opened,
                );
            }
            *crate::lock(&self.counted_digest) = counts.then_some(request.digest);
            let snapshot = memory
                .open_session(SessionRequest {
                    dedup_keys: &[],
                    lease: None,
                    counts_repetition: counts,
                    ..request
                })
                .await?;
            return Ok(snapshot.map(|snapshot| {
                Box::new(SessionSnapshot {
                    prior_call: recalled,
                    dedup_key_kind: row.facts.recalled_by,
                    ..*snapshot
                })
            }));
        }
        if row.facts.progress.is_none() {
            watch.record_missing(|| {
                format!(
                    "the recorded call ended at gate {}, and nothing is recorded about later gates",
                    row.gate
                )
            });
        }
        Ok(Some(Box::new(SessionSnapshot {
            version: 0,
            started_at: row.facts.opened.unwrap_or(row.at),
            state: Arc::default(),
            row_count: 0,
            prior_call: recalled,
            dedup_key_kind: row.facts.recalled_by,
            repetitions: row.facts.progress.unwrap_or_default(),
            lease: None,
            now: self.now(),
        })))
    }
    async fn inspect_session(
        &self,
        request: SessionRequest<'_>,
    ) -> Result<Box<SessionSnapshot>, StoreError> {
        self.open_session(request)
            .await?
            .ok_or_else(|| StoreError::unavailable("the session is locked".to_owned()))
    }

    async fn load_facts(
        &self,
        key: &SessionKey,
        needs: &FactRequest,
        at: &SessionState,
        facts: &mut DecisionFacts,
    ) -> Result<(), StoreError> {
        let (row, watch) = self.current_row()?;
        let recorded = &row.facts;
        match &self.memory {
            Some(memory) => {
                let remaining =
                    FactRequest { marks: Vec::new(), origins: Vec::new(), ..needs.clone() };
                memory.load_facts(key, &remaining, at, facts).await?;
            }
            None => {
                for evidence_key in &needs.evidence {
                    let found = recorded.evidence.iter().find(|(known, _)| known == evidence_key);
                    if found.is_none() {
                        watch.record_missing(|| {
                            format!(
                                "evidence of `{}` is needed, but not recorded",
                                evidence_key.tool
                            )
                        });
                    }
                    facts
                        .evidence
                        .push((evidence_key.clone(), found.and_then(|(_, proof)| proof.clone())));
                }
                for (counter, window) in &needs.counters {
                    let found = recorded
                        .counters
                        .iter()
                        .find(|(known, w, _)| known == counter && w == window);
                    if found.is_none() {
                        watch.record_missing(|| "a counter is needed, but not recorded".to_owned());
                    }
                    facts.counters.push((
                        counter.clone(),
                        *window,
                        found.map_or(Decimal::ZERO, |(.., used)| *used),
                    ));
                }
            }
        }
        // Only the record contains past files and the provenance of past values.
        for mark in &needs.marks {
            if !recorded.marks.contains_key(mark) {
                watch.record_missing(|| "a policy mark is needed, but not recorded".to_owned());
            }
            facts.marks.insert(mark.clone(), recorded.marks.get(mark).cloned().flatten());
        }
        for (place, _) in &needs.origins {
            if !recorded.origins.contains_key(place) {
                watch.record_missing(|| {
                    format!("the provenance of the value at `{place}` is needed, but not recorded")
                });
            }
            facts
                .origins
                .insert(place.clone(), recorded.origins.get(place).cloned().unwrap_or_default());
        }
        Ok(())
    }

    async fn check_charges(
        &self,
        charges: &[Charge],
    ) -> Result<Vec<Result<Decimal, ChargeError>>, StoreError> {
        let (row, watch) = self.current_row()?;
        if let Some(memory) = &self.memory {
            return memory.check_charges(charges).await;
        }
        Ok(check_recorded_charges(&row, &watch, charges))
    }

    async fn claim(
        &self,
        request: ClaimRequest<'_>,
    ) -> Result<Result<Vec<Decimal>, ClaimError>, StoreError> {
        let (row, watch) = self.current_row()?;
        if row.gate == Gate::Claim {
            let by = row.facts.recalled_by.unwrap_or(DedupKeyKind::Key);
            match (&row.facts.paused, row.facts.recalled) {
                (Some((target, why)), _) => {
                    return Ok(Err(ClaimError::Paused(target.clone(), why.clone())));
                }
                (_, Some(PriorCallFact::InProgress)) => {
                    return Ok(Err(ClaimError::PriorCall(PriorCall::InProgress, by)));
                }
                (_, Some(PriorCallFact::Pending)) => {
                    return Ok(Err(ClaimError::PriorCall(PriorCall::Pending(row.call), by)));
                }
                (_, Some(PriorCallFact::KeyReused)) => {
                    return Ok(Err(ClaimError::PriorCall(PriorCall::KeyReused, by)));
                }
                (_, Some(PriorCallFact::Settled | PriorCallFact::Forgotten)) => {
                    return Ok(Err(ClaimError::PriorCall(PriorCall::Settled(None), by)));
                }
                _ => {}
            }
        }
        if let Some(memory) = &self.memory {
            // The claim never expires, because the record says when it is settled.
            let record = Box::new(ClaimRecord { recall: Vec::new(), ..*request.record });
            let lease_ttl = SignedDuration::MAX;
            return memory
                .claim(ClaimRequest { record, lease_ttl, approval: None, ..request })
                .await;
        }
        Ok(claim_recorded_charges(&row, &watch, request.charges))
    }

    async fn commit(
        &self,
        request: Box<CommitRequest>,
    ) -> Result<Result<Option<LazyReceipt>, CommitConflictError>, StoreError> {
        match &self.memory {
            Some(memory) => memory.commit(request).await,
            None => Ok(Ok(None)),
        }
    }
    async fn take_deferred_claim(
        &self,
        _: &SessionKey,
        _: &str,
        _: &str,
    ) -> Result<Option<DeferredClaim>, StoreError> {
        Ok(None)
    }
    async fn close_client_session(&self, _: &SessionKey) -> Result<(), StoreError> {
        Ok(())
    }
    async fn snapshot(&self, _: &SessionKey) -> Result<(u64, Arc<SessionState>), StoreError> {
        Ok((0, Arc::default()))
    }
    async fn load_session(&self, _: &SessionKey) -> Result<Option<Arc<SessionState>>, StoreError> {
        Ok(None)
    }
    async fn edit_session(&self, _: &SessionKey, _: SessionEdit) -> Result<(), StoreError> {
        Ok(())
    }
    async fn add_cost(&self, _: &[Charge]) -> Result<(), StoreError> {
        Ok(())
    }
    async fn create_approval(&self, _: Approval) -> Result<(), StoreError> {
        Ok(())
    }
    async fn approval_for(
        &self,
        _: &SessionKey,
        digest: Digest,
    ) -> Result<Option<Approval>, StoreError> {
        self.recorded_approval(digest)
    }
    async fn approval(&self, _: &str) -> Result<Option<Approval>, StoreError> {
        Ok(None)
    }
    async fn answer_approval(&self, _: &str, _: bool, _: &str) -> Result<bool, StoreError> {
        Ok(false)
    }
    async fn pending_claims(&self) -> Result<Vec<ClaimRecord>, StoreError> {
        Ok(Vec::new())
    }
    async fn settle_claim(
        &self,
        _: CallId,
        _: ClaimResolution,
        _: Outcome,
        _: Outcome,
        _: &str,
    ) -> Result<bool, StoreError> {
        Ok(false)
    }
    async fn load_output(&self, _: &SessionKey, _: &str) -> Result<Option<Arc<str>>, StoreError> {
        Ok(None)
    }
    async fn items(&self, _: &SessionKey, _: u64) -> Result<Vec<(u64, SessionItem)>, StoreError> {
        Ok(Vec::new())
    }
    async fn rows(&self, _: &SessionKey) -> Result<Vec<Arc<Row>>, StoreError> {
        Ok(Vec::new())
    }
    async fn has_succeeded(&self, _: CallId) -> Result<bool, StoreError> {
        Ok(false)
    }
    async fn append_spooled(&self, _: Arc<Row>) -> Result<(), StoreError> {
        Ok(())
    }
}
