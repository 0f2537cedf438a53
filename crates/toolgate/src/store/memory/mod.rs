//! Implements [`Store`] in memory, with one lock around all data.

mod tables;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ahash::HashMap;
use async_trait::async_trait;
use jiff::{SignedDuration, Timestamp};
use rust_decimal::Decimal;
use tokio::sync::RwLock;

use super::{
    Approval, ApprovalState, Conflict, Enter, Entered, Finish, Guard, Hold, Intent, NotClaimed, RecallKey, Recalled, Settle, Store,
    StoreError, Taken, Target, room_for,
};
use crate::call::outcome::Outcome;
use crate::call::{CallId, SessionKey};
use crate::ledger::row::{Decision, Recorded, Row};
use crate::limits::{Charge, Counter, Over};
use crate::policy::{Facts, Needs, Used};
use crate::provenance::Carriers;
use crate::session::repetition::Progress;
use crate::session::state::{Alter, State};
use crate::store::open_claims::Open;
use toolgate_json::Digest;

/// The number of large outputs that are stored, and the default number of rows. Claims, limits and
/// sessions are never dropped.
const OUTPUTS: usize = 256;
const ROWS: usize = 10_000;

/// A store that lives only as long as the process: for tests, demos and short-lived agents.
pub struct MemoryStore {
    inner: Mutex<Inner>,
    max_rows: usize,
    /// Whether any kill switch is on, readable without the lock.
    any_paused: AtomicBool,
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self { inner: Mutex::default(), max_rows: ROWS, any_paused: AtomicBool::new(false) }
    }
}

#[derive(Default)]
struct Inner {
    paused: HashMap<Target, String>,
    sessions: HashMap<SessionKey, Session>,
    /// Counters by name and time window.
    counters: HashMap<(String, Option<SignedDuration>), Counter>,
    claims: HashMap<CallId, Claim>,
    open_claims: Open,
    dedup_keys: HashMap<RecallKey, (Digest, CallId)>,
    approvals: HashMap<String, Approval>,
    approval_ids: HashMap<(SessionKey, Digest), String>,
    outputs: HashMap<(SessionKey, String), Arc<str>>,
    output_order: VecDeque<(SessionKey, String)>,
    rows: VecDeque<Arc<Row>>,
    /// The number of rows ever recorded.
    rows_recorded: u64,
    carriers: Carriers,
}

struct Session {
    version: u64,
    opened: Option<Timestamp>,
    state: Arc<State>,
    progress: Progress,
    lock: Arc<RwLock<()>>,
}

struct Claim {
    record: Box<Intent>,
    charges: Vec<Charge>,
    used: Vec<Used>,
    /// The outcome; `None` while it is unknown.
    outcome: Option<Outcome>,
    pending: bool,
}

impl Claim {
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
    pub fn keeping(rows: usize) -> Self {
        Self { max_rows: rows, ..Self::default() }
    }
}

impl MemoryStore {
    /// Records the end of a call that has no other effect on the store.
    pub(crate) fn note_end(&self, key: &SessionKey, ended: &crate::session::repetition::Ended) {
        crate::lock(&self.inner).session(key).progress.ended(ended);
    }

    /// Sets the progress and the start of a session whose earlier rows are not available.
    pub(crate) fn seed(&self, key: &SessionKey, progress: Progress, opened: Timestamp) {
        let mut inner = crate::lock(&self.inner);
        let session = inner.session(key);
        (session.progress, session.opened) = (progress, Some(opened));
    }

    async fn acquire(&self, key: &SessionKey, alone: bool, wait: Duration) -> Option<Hold> {
        let lock = Arc::clone(&crate::lock(&self.inner).session(key).lock);
        // The uncontended case needs no timer.
        if alone {
            if let Ok(guard) = Arc::clone(&lock).try_write_owned() {
                return Some(Hold::of(Guard::Exclusive(guard)));
            }
            tokio::time::timeout(wait, lock.write_owned()).await.ok().map(|guard| Hold::of(Guard::Exclusive(guard)))
        } else {
            if let Ok(guard) = Arc::clone(&lock).try_read_owned() {
                return Some(Hold::of(Guard::Shared(guard)));
            }
            tokio::time::timeout(wait, lock.read_owned()).await.ok().map(|guard| Hold::of(Guard::Shared(guard)))
        }
    }
}

#[async_trait]
impl Store for MemoryStore {
    async fn paused(&self, key: &SessionKey, tool: &Arc<str>) -> Result<Option<(Target, String)>, StoreError> {
        Ok(crate::lock(&self.inner).paused(key, tool))
    }

    async fn set_pause(&self, target: Target, reason: Option<String>) -> Result<(), StoreError> {
        let mut inner = crate::lock(&self.inner);
        match reason {
            Some(reason) => inner.paused.insert(target, reason),
            None => inner.paused.remove(&target),
        };
        self.any_paused.store(!inner.paused.is_empty(), Ordering::SeqCst);
        Ok(())
    }

    async fn hold(&self, key: &SessionKey, alone: bool, wait: Duration) -> Result<Option<Hold>, StoreError> {
        Ok(self.acquire(key, alone, wait).await)
    }

    async fn enter(&self, enter: Enter<'_>) -> Result<Option<Box<Entered>>, StoreError> {
        let hold = match enter.lock {
            Some((alone, wait)) => match self.acquire(enter.key, alone, wait).await {
                Some(hold) => Some(hold),
                None => return Ok(None),
            },
            None => None,
        };
        let mut inner = crate::lock(&self.inner);
        let (recalled, recalled_by) = inner.recall_any(enter.dedup_keys, enter.digest, enter.now).unzip();
        let rows = inner.rows_recorded;
        let session = inner.session(enter.key);
        if enter.counts_repetition && !matches!(recalled, Some(Recalled::Settled(_))) {
            session.progress.count(enter.digest, enter.now, enter.polling);
        }
        Ok(Some(Box::new(Entered {
            version: session.version,
            started_at: *session.opened.get_or_insert(enter.now),
            state: Arc::clone(&session.state),
            row_count: rows,
            prior_call: recalled,
            dedup_key_kind: recalled_by,
            repetitions: session.progress,
            lock: hold,
        })))
    }

    async fn look(&self, enter: Enter<'_>) -> Result<Box<Entered>, StoreError> {
        let inner = crate::lock(&self.inner);
        let (recalled, recalled_by) = inner.recall_any(enter.dedup_keys, enter.digest, enter.now).unzip();
        let session = inner.sessions.get(enter.key);
        let mut progress = session.map(|session| session.progress).unwrap_or_default();
        if enter.counts_repetition {
            progress.count(enter.digest, enter.now, enter.polling);
        }
        Ok(Box::new(Entered {
            version: session.map_or(0, |session| session.version),
            started_at: session.and_then(|session| session.opened).unwrap_or(enter.now),
            state: session.map(|session| Arc::clone(&session.state)).unwrap_or_default(),
            row_count: inner.rows_recorded,
            prior_call: recalled,
            dedup_key_kind: recalled_by,
            repetitions: progress,
            lock: None,
        }))
    }

    fn may_be_paused(&self) -> bool {
        self.any_paused.load(Ordering::SeqCst)
    }

    fn snapshots_are_complete(&self) -> bool {
        true
    }

    async fn load(&self, _: &SessionKey, needs: &Needs, at: &State, facts: &mut Facts) -> Result<(), StoreError> {
        let mut inner = crate::lock(&self.inner);
        for (counter, window) in &needs.counters {
            let used = inner.counters.get_mut(&(counter.clone(), *window)).map_or(Decimal::ZERO, |c| c.used(facts.now, *window));
            facts.counters.push((counter.clone(), *window, used));
        }
        drop(inner);
        let Needs { evidence, marks, origins, .. } = needs;
        let mut rest = Needs { evidence: evidence.clone(), marks: marks.clone(), origins: origins.clone(), ..Needs::default() };
        facts.take_from(&mut rest, at);
        Ok(())
    }

    async fn room(&self, charges: &[Charge], now: Timestamp) -> Result<Vec<Result<Decimal, Over>>, StoreError> {
        let mut inner = crate::lock(&self.inner);
        Ok(charges.iter().map(|charge| inner.fits(charge, now)).collect())
    }

    async fn begin(
        &self,
        mut intent: Box<Intent>,
        charges: &[Charge],
        approval: Option<&str>,
        now: Timestamp,
    ) -> Result<Result<Vec<Decimal>, NotClaimed>, StoreError> {
        let mut inner = crate::lock(&self.inner);
        if let Some((target, why)) = inner.paused(&intent.key, &intent.tool) {
            return Ok(Err(NotClaimed::Paused(target, why)));
        }
        if let Some((recalled, by)) = inner.recall_any(&intent.recall, intent.asked, now) {
            return Ok(Err(NotClaimed::PriorCall(recalled, by)));
        }
        let used = match room_for(charges, |charge| Ok(inner.fits(charge, now)))? {
            Ok(used) => used,
            Err(full) => return Ok(Err(full)),
        };
        if let Some(id) = approval {
            match inner.approvals.get_mut(id) {
                Some(a) if a.is_usable(now) && a.digest == intent.digest && a.key == intent.key => {
                    a.state = ApprovalState::Used;
                }
                _ => return Ok(Err(NotClaimed::ApprovalUnavailable)),
            }
        }
        for charge in charges {
            inner.counters.entry((charge.counter.clone(), charge.window)).or_default().reserve(now, intent.call, charge, intent.effect);
        }
        for key in &intent.recall {
            inner.dedup_keys.insert(key.clone(), (intent.asked, intent.call));
        }
        let call = intent.call;
        if let Some(seen) = intent.seen.take() {
            inner.see(&intent.key, *seen);
        }
        if intent.is_run_by_client() {
            inner.carry(&intent.key, &intent.carriers);
        }
        for revoked in intent.revokes.iter().filter(|_| intent.is_run_by_client()) {
            Arc::make_mut(&mut inner.session(&intent.key).state).revoke(revoked.clone());
        }
        let before = charges.iter().zip(&used).map(|(charge, used)| (charge.counter.clone(), charge.window, *used)).collect();
        inner.open_claims.begin(&intent);
        inner.claims.insert(call, Claim { record: intent, charges: charges.to_vec(), used: before, outcome: None, pending: false });
        Ok(Ok(used))
    }

    async fn finish(&self, finish: Box<Finish>) -> Result<Result<Option<Recorded>, Conflict>, StoreError> {
        let mut inner = crate::lock(&self.inner);
        let session = inner.session(&finish.row.key);
        if finish.changes.as_ref().is_some_and(|c| c.needs_version()) && session.version != finish.version {
            return Ok(Err(Conflict));
        }
        if !finish.logs.is_empty() {
            Arc::make_mut(&mut session.state).append(finish.logs);
        }
        for revoked in finish.revoked {
            Arc::make_mut(&mut session.state).revoke(revoked);
        }
        if let Some(changes) = finish.changes {
            session.version += u64::from(changes.needs_version());
            Arc::make_mut(&mut session.state).apply(changes);
        }
        if let Some(ended) = &finish.ended {
            session.progress.ended(ended);
        }
        if let Some(seen) = finish.provenance {
            inner.see(&finish.row.key, *seen);
        }
        inner.end_claim(finish.row.call, finish.resolution, finish.spent, finish.outcome, finish.row.ended_at());
        for (handle, text) in finish.outputs {
            let at = (finish.row.key.clone(), handle);
            inner.output_order.push_back(at.clone());
            inner.outputs.insert(at, text);
            if inner.output_order.len() > OUTPUTS
                && let Some(oldest) = inner.output_order.pop_front()
            {
                inner.outputs.remove(&oldest);
            }
        }
        let oldest = inner.record(finish.row, self.max_rows);
        // Drop the old row outside of the lock.
        drop(inner);
        drop(oldest);
        Ok(Ok(None))
    }

    async fn take_pass(&self, key: &SessionKey, client: &str, tool: &str) -> Result<Option<Taken>, StoreError> {
        let mut inner = crate::lock(&self.inner);
        for call in inner.open_claims.of(key) {
            let Some(claim) = inner.claims.get_mut(&call).filter(|claim| *claim.record.tool == *tool) else { continue };
            if let Some((_, pass)) = claim.record.pass.take_if(|(name, _)| *name == *client) {
                return Ok(Some(Taken { claim: (*claim.record).clone(), state: pass, counters_before: claim.used.clone() }));
            }
        }
        Ok(None)
    }

    async fn leave(&self, key: &SessionKey, now: Timestamp) -> Result<(), StoreError> {
        let mut inner = crate::lock(&self.inner);
        let Inner { open_claims, claims, .. } = &mut *inner;
        let over = now.checked_sub(SignedDuration::from_nanos(1)).unwrap_or(Timestamp::MIN);
        for call in open_claims.of(key) {
            if let Some(claim) = claims.get_mut(&call).filter(|claim| claim.record.is_run_by_client()) {
                claim.record.pass = None;
                open_claims.renew(&mut claim.record, over);
            }
        }
        inner.sweep(now);
        Ok(())
    }

    async fn snapshot(&self, key: &SessionKey) -> Result<(u64, Arc<State>), StoreError> {
        Ok(crate::lock(&self.inner).sessions.get(key).map(|s| (s.version, Arc::clone(&s.state))).unwrap_or_default())
    }

    async fn session(&self, key: &SessionKey) -> Result<Option<Arc<State>>, StoreError> {
        Ok(crate::lock(&self.inner).sessions.get(key).map(|s| Arc::clone(&s.state)))
    }

    async fn alter(&self, key: &SessionKey, alter: Alter) -> Result<(), StoreError> {
        let mut inner = crate::lock(&self.inner);
        let session = inner.session(key);
        session.version += 1;
        Arc::make_mut(&mut session.state).alter(alter);
        Ok(())
    }

    async fn spend(&self, charges: &[Charge], now: Timestamp) -> Result<(), StoreError> {
        let mut inner = crate::lock(&self.inner);
        let call = CallId::generate();
        for charge in charges {
            inner.counters.entry((charge.counter.clone(), charge.window)).or_default().reserve(now, call, charge, false);
        }
        Ok(())
    }

    async fn ask(&self, approval: Approval) -> Result<(), StoreError> {
        let mut inner = crate::lock(&self.inner);
        inner.approval_ids.insert((approval.key.clone(), approval.digest), approval.id.clone());
        inner.approvals.insert(approval.id.clone(), approval);
        Ok(())
    }

    async fn approval_for(&self, key: &SessionKey, digest: Digest) -> Result<Option<Approval>, StoreError> {
        let inner = crate::lock(&self.inner);
        let id = inner.approval_ids.get(&(key.clone(), digest));
        Ok(id.and_then(|id| inner.approvals.get(id)).cloned())
    }

    async fn approval(&self, id: &str) -> Result<Option<Approval>, StoreError> {
        Ok(crate::lock(&self.inner).approvals.get(id).cloned())
    }

    async fn answer(&self, id: &str, approved: bool, by: &str, now: Timestamp) -> Result<bool, StoreError> {
        let mut inner = crate::lock(&self.inner);
        let waiting =
            inner.approvals.get_mut(id).filter(|a| a.state == ApprovalState::Waiting && now <= a.expires && a.may_be_answered_by(by));
        let Some(approval) = waiting else { return Ok(false) };
        approval.state = if approved { ApprovalState::Approved } else { ApprovalState::Denied };
        approval.answered_by = Some(by.to_owned());
        Ok(true)
    }

    async fn pending(&self, now: Timestamp) -> Result<Vec<Intent>, StoreError> {
        let mut inner = crate::lock(&self.inner);
        inner.sweep(now);
        let mut pending: Vec<Intent> = inner.claims.values().filter(|c| c.is_pending(now)).map(|c| c.record.as_ref().clone()).collect();
        pending.sort_unstable_by_key(|intent| intent.call);
        Ok(pending)
    }

    async fn settle(
        &self,
        call: CallId,
        settle: Settle,
        outcome: Outcome,
        shown: Outcome,
        by: &str,
        now: Timestamp,
    ) -> Result<bool, StoreError> {
        let mut inner = crate::lock(&self.inner);
        inner.sweep(now);
        let Some(claim) = inner.claims.get(&call).filter(|claim| claim.is_pending(now) && settle != Settle::Pending) else {
            return Ok(false);
        };
        let row = inner.rows.iter().rev().find(|row| row.call == call).or(claim.record.row.as_ref());
        let row = row.map(|row| row.settlement(shown.clone(), settle.effects(), by, now));
        inner.end_claim(call, settle, None, Some(outcome), now);
        if let Some(row) = row {
            inner.record(Arc::new(row), self.max_rows);
        }
        Ok(true)
    }

    async fn output(&self, key: &SessionKey, handle: &str) -> Result<Option<Arc<str>>, StoreError> {
        Ok(crate::lock(&self.inner).outputs.get(&(key.clone(), handle.to_owned())).cloned())
    }

    async fn rows(&self, key: &SessionKey) -> Result<Vec<Arc<Row>>, StoreError> {
        Ok(crate::lock(&self.inner).rows.iter().filter(|row| row.key == *key).cloned().collect())
    }

    async fn has_succeeded(&self, call: CallId) -> Result<bool, StoreError> {
        let inner = crate::lock(&self.inner);
        Ok(inner.rows.iter().any(|row| row.call == call && row.decision == Decision::Succeeded))
    }

    async fn take_in(&self, row: Arc<Row>) -> Result<(), StoreError> {
        let mut inner = crate::lock(&self.inner);
        if !inner.rows.iter().any(|known| known.call == row.call) {
            if Settle::by(row.effects) != Settle::Released {
                inner.revoke_for(row.call);
            }
            inner.end_claim(row.call, Settle::by(row.effects), row.spent, Some(row.outcome.clone()), row.ended_at());
            inner.record(row, self.max_rows);
        }
        Ok(())
    }
}
