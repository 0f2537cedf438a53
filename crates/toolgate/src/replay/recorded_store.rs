//! Implements a store that answers from recorded rows.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use jiff::{SignedDuration, Timestamp};
use rust_decimal::Decimal;
use serde_json::Value;

use crate::agent::{Agent, ToolEntry};
use crate::call::outcome::{CallOutput, Outcome};
use crate::call::{CallId, SessionKey};
use crate::clock::{Clock, ManualClock};
use crate::files::{FileExpectation, FileSystem, FileTransaction, MemoryFs, Resources};
use crate::hook::{BeforeHookResult, Hook, HookCall, HookDecision, HookDenial, HookError};
use crate::ledger::row::{Gate, LazyReceipt, Row};
use crate::limits::{Charge, ChargeError};
use crate::policy::{
    CounterReading, DecisionFacts, DedupKeyKind, FactRequest, FileFact, MissingFactTracker,
    PriorCallFact,
};
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
        taken: Vec<Revocation>,
    ) -> Option<SessionState> {
        let memory = self.memory.as_ref().filter(|_| !taken.is_empty())?;
        let (_, state) = memory.snapshot(key).await.ok()?;
        let mut state = (*state).clone();
        taken.into_iter().for_each(|revoked| state.revoke(revoked));
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
    pub(crate) async fn settle_call(&self, call: CallId, settle: ClaimResolution, row: &Row) {
        self.set_time(row.at);
        if let Some(memory) = &self.memory {
            let _ = memory
                .settle_claim(call, settle, row.outcome.clone(), row.outcome.clone(), "")
                .await;
        }
    }

    /// Sets the row of the current call.
    pub(crate) fn set_current_row(&self, row: &Row, watch: &MissingFactTracker) {
        *crate::lock(&self.current_row) = Some((Arc::new(row.clone()), watch.clone()));
        *crate::lock(&self.counted_digest) = None;
    }

    fn current_row(&self) -> Result<(Arc<Row>, MissingFactTracker), StoreError> {
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

fn find_usage(used: &[CounterReading], charge: &Charge) -> Option<Decimal> {
    used.iter()
        .find(|(counter, window, _)| *counter == charge.counter && *window == charge.window)
        .map(|(.., used)| *used)
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
        enter: SessionRequest<'_>,
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
            if recalled.is_some() && enter.dedup_keys.is_empty() {
                watch.record_missing(|| match row.facts.recalled_by {
                    Some(_) => {
                        "the recorded call was replayed, and its tool is not `once` any more"
                            .to_owned()
                    }
                    None => "the recorded call was replayed, and its row does not say by which key"
                        .to_owned(),
                });
            }
            for key in enter.dedup_keys.iter().filter(|key| key.kind() == DedupKeyKind::Once) {
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
            let counts = enter.counts_repetition
                && !named
                && !matches!(recalled, Some(PriorCall::Settled(_)));
            // The first replayed row of a session records the state before it.
            if crate::lock(&self.opened_sessions).insert(enter.key.clone())
                && let (Some(progress), Some(opened)) = (row.facts.progress, row.facts.opened)
            {
                memory.seed_session(
                    enter.key,
                    progress.state_before(enter.digest, row.digest),
                    opened,
                );
            }
            *crate::lock(&self.counted_digest) = counts.then_some(enter.digest);
            let snapshot = memory
                .open_session(SessionRequest {
                    dedup_keys: &[],
                    lease: None,
                    counts_repetition: counts,
                    ..enter
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
        enter: SessionRequest<'_>,
    ) -> Result<Box<SessionSnapshot>, StoreError> {
        self.open_session(enter)
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
        let then = &row.facts;
        match &self.memory {
            Some(memory) => {
                let own = FactRequest { marks: Vec::new(), origins: Vec::new(), ..needs.clone() };
                memory.load_facts(key, &own, at, facts).await?;
            }
            None => {
                for wanted in &needs.evidence {
                    let found = then.evidence.iter().find(|(known, _)| known == wanted);
                    if found.is_none() {
                        watch.record_missing(|| {
                            format!("evidence of `{}` is needed, but not recorded", wanted.tool)
                        });
                    }
                    facts
                        .evidence
                        .push((wanted.clone(), found.and_then(|(_, proof)| proof.clone())));
                }
                for (counter, window) in &needs.counters {
                    let found =
                        then.counters.iter().find(|(known, w, _)| known == counter && w == window);
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
            if !then.marks.contains_key(mark) {
                watch.record_missing(|| "a policy mark is needed, but not recorded".to_owned());
            }
            facts.marks.insert(mark.clone(), then.marks.get(mark).cloned().flatten());
        }
        for (place, _) in &needs.origins {
            if !then.origins.contains_key(place) {
                watch.record_missing(|| {
                    format!("the provenance of the value at `{place}` is needed, but not recorded")
                });
            }
            facts
                .origins
                .insert(place.clone(), then.origins.get(place).cloned().unwrap_or_default());
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
        let one = |charge: &Charge| {
            let own = charge.counter.starts_with("budget\u{1f}")
                || charge.counter.starts_with("rate\u{1f}");
            // Limits of rules are read at the claim and by `explain`.
            let used = if own {
                find_usage(&row.facts.budget, charge)
            } else {
                find_usage(&row.facts.claimed, charge)
            };
            if used.is_none() && own {
                watch.record_missing(|| "a budget is needed, but not recorded".to_owned());
            }
            let used = used.unwrap_or_default();
            if charge.fits_within(used) {
                Ok(used)
            } else {
                Err(ChargeError { used, retry_after: None })
            }
        };
        Ok(charges.iter().map(one).collect())
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
        let charges = request.charges;
        let mut all = Vec::with_capacity(charges.len());
        for (index, charge) in charges.iter().enumerate() {
            // A call may charge the same counter twice. The charges are recorded in order.
            let known = row.facts.claimed.get(index..).unwrap_or_default();
            let used = find_usage(known.get(..1).unwrap_or_default(), charge)
                .or_else(|| find_usage(&row.facts.claimed, charge));
            if used.is_none() && charge.cap != Decimal::MAX {
                watch.record_missing(|| "a limit is needed, but not recorded".to_owned());
            }
            let used = used.unwrap_or_default();
            // The recorded usage includes the earlier charges of this call.
            if !charge.fits_within(used) {
                return Ok(Err(ClaimError::LimitExceeded {
                    index,
                    error: ChargeError { used, retry_after: None },
                    used: all,
                }));
            }
            all.push(used);
        }
        Ok(Ok(all))
    }

    async fn commit(
        &self,
        finish: Box<CommitRequest>,
    ) -> Result<Result<Option<LazyReceipt>, CommitConflictError>, StoreError> {
        match &self.memory {
            Some(memory) => memory.commit(finish).await,
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

/// A hook that repeats its recorded decision.
struct ReplayHook {
    name: String,
    store: Arc<RecordedStore>,
}

#[async_trait]
impl Hook for ReplayHook {
    fn name(&self) -> &str {
        &self.name
    }

    async fn before(&self, _: HookCall<'_>) -> Result<BeforeHookResult, HookError> {
        let (row, watch) = self.store.current_row().map_err(|e| HookError(e.to_string()))?;
        let decided = row.gate == Gate::Hooks && row.rule.as_deref() == Some(&self.name);
        let decision = match row
            .facts
            .hooks
            .iter()
            .find(|fact| fact.hook == self.name)
            .map(|fact| fact.said.as_str())
        {
            Some("deny") => {
                let error = row.outcome.error();
                let code = error.map(|error| error.code.to_string());
                let category = error.map(|error| error.category);
                HookDecision::Deny(HookDenial {
                    code,
                    category,
                    ..HookDenial::new("recorded denial")
                })
            }
            Some("ask") => HookDecision::Ask("recorded request for approval".to_owned()),
            Some(_) if !decided => HookDecision::Allow,
            _ if decided => return Err(HookError("recorded failure".to_owned())),
            _ => {
                watch.record_missing(|| {
                    format!("the decision of the hook `{}` is not recorded", self.name)
                });
                HookDecision::Allow
            }
        };
        Ok(BeforeHookResult { decision, input: None })
    }
}

/// File system that answers with the recorded file facts.
struct ReplayFileSystem(Arc<RecordedStore>);

impl FileSystem for ReplayFileSystem {
    fn fact(&self, path: &str) -> FileFact {
        let Ok((row, watch)) = self.0.current_row() else { return FileFact::Absent };
        let known = |(spelt, _): &(&String, &FileFact)| {
            crate::files::normalize_path(spelt).is_ok_and(|spelt| spelt == path)
        };
        match row.facts.files.iter().find(known) {
            Some((_, fact)) => fact.clone(),
            None => {
                watch.record_missing(|| {
                    format!(
                        "the state of the file `{}` is not recorded",
                        toolgate_text::escape_for_display(path)
                    )
                });
                FileFact::Absent
            }
        }
    }
    fn begin(&self, call: CallId, expects: Vec<FileExpectation>) -> Box<dyn FileTransaction> {
        MemoryFs::default().begin(call, expects)
    }
}

impl Agent {
    /// Returns the agent for a replay: results and hook decisions come from the record.
    pub(crate) fn for_replay(&self, stage: &Arc<RecordedStore>) -> Self {
        let mut resources = Resources::default();
        if self.resources.files().is_some() {
            resources.set_files(Arc::new(ReplayFileSystem(Arc::clone(stage))));
        }
        let tools = self.tools.iter().map(|(name, tool)| {
            let mut spec = tool.spec.clone();
            spec.normalize.clear();
            spec.max_output = Some(usize::MAX);
            let hooks = tool.hooks.iter().map(|hook| {
                let said: Arc<dyn Hook> =
                    Arc::new(ReplayHook { name: hook.name().to_owned(), store: Arc::clone(stage) });
                said
            });
            let staged = ToolEntry {
                spec,
                handler: None,
                input: tool.input.clone(),
                output: None,
                secrets: tool.secrets.clone(),
                is_entity_declared: tool.is_entity_declared.clone(),
                governed_by: tool.governed_by.clone(),
                observers: tool.observers.clone(),
                hooks: hooks.collect(),
                definition_digest: tool.definition_digest,
            };
            (Arc::clone(name), Arc::new(staged))
        });
        self.with_tools(tools.collect(), resources)
    }
}
