//! Implements the `Store` trait for `SqliteStore`.

use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use jiff::Timestamp;
use rusqlite::{Connection, OptionalExtension, params};
use rust_decimal::Decimal;
use toolgate::limits::{Charge, ChargeError};
use toolgate::policy::{DecisionFacts, DedupKeyKind, FactRequest};
use toolgate::session::state::{SessionEdit, SessionState};
use toolgate::store::{
    Approval, ApprovalState, ClaimError, ClaimRecord, ClaimRequest, ClaimResolution,
    CommitConflictError, CommitRequest, DeferredClaim, LeaseRequest, PauseTarget, PriorCall,
    RejectedRow, SessionItem, SessionLease, SessionRequest, SessionSnapshot, Store, StoreError,
    check_call_charges,
};
use toolgate::{CallId, Decision, LazyReceipt, Outcome, Row, SessionKey};
use toolgate_json::Digest;

use super::SqliteStore;
use crate::error::{DbError, DbResult};
use crate::keys::recorded_row;
use crate::store::finish_call::{append_spooled_row, append_spooled_row_if_valid, commit_call};
use crate::tables::claims;
use crate::tables::claims::StoredClaim;
use crate::tables::counters;
use crate::tables::ledger;
use crate::tables::ledger::to_nanos;
use crate::tables::sessions;
use crate::tables::sessions::SessionHeader;
use crate::transaction::{SharedStoreState, UncountedCall, lock_unpoisoned, read_transaction};

/// How many calls of a session may be counted in memory before they are stored.
const MAX_UNCOUNTED_CALLS: usize = 64;

/// Owned copy of a session request, for the writer thread.
struct OwnedSessionRequest {
    key: SessionKey,
    digest: Digest,
    dedup_keys: Vec<toolgate::store::DedupKey>,
    counts_repetition: bool,
    polling: Option<toolgate::PollingSettings>,
    now: Timestamp,
}

impl OwnedSessionRequest {
    fn from_request(enter: &SessionRequest<'_>, now: Timestamp) -> Self {
        Self {
            key: enter.key.clone(),
            digest: enter.digest,
            dedup_keys: enter.dedup_keys.to_vec(),
            counts_repetition: enter.counts_repetition,
            polling: enter.polling.copied(),
            now,
        }
    }

    fn uncounted_call(&self) -> Option<UncountedCall> {
        self.counts_repetition.then_some(UncountedCall {
            digest: self.digest,
            at: self.now,
            polling: self.polling,
        })
    }

    fn find_prior_call(
        &self,
        sql: &Connection,
        shared: &SharedStoreState,
    ) -> DbResult<Option<(PriorCall, DedupKeyKind)>> {
        if self.dedup_keys.is_empty() {
            return Ok(None);
        }
        claims::find_prior_call(
            sql,
            &shared.state_dir,
            &shared.keys(),
            &self.dedup_keys,
            self.digest,
            self.now,
        )
    }
}

fn find_pause(
    sql: &Connection,
    key: &SessionKey,
    tool: &Arc<str>,
) -> DbResult<Option<(PauseTarget, String)>> {
    // Usually nothing is paused.
    if !sql.prepare_cached("SELECT 1 FROM paused LIMIT 1")?.exists([])? {
        return Ok(None);
    }
    let targets = [
        PauseTarget::Agent(Arc::clone(&key.agent)),
        PauseTarget::Principal(Arc::clone(&key.principal)),
        PauseTarget::Tool(Arc::clone(tool)),
        PauseTarget::Session(key.clone()),
    ];
    for target in targets {
        let why: Option<String> = sql
            .prepare_cached("SELECT reason FROM paused WHERE target = ?1")?
            .query_row([ledger::canonical_text(&target)?], |row| row.get(0))
            .optional()?;
        if let Some(why) = why {
            return Ok(Some((target, why)));
        }
    }
    Ok(None)
}

fn decrypt_approval(shared: &SharedStoreState, body: &str, sealed: &[u8]) -> DbResult<Approval> {
    let approval: Approval = serde_json::from_str(body)?;
    let opened = shared.keys().unseal(&format!("approval {}", approval.id), sealed);
    let opened = opened.ok_or_else(|| {
        DbError::Message("cannot decrypt an approval: another key encrypted it".to_owned())
    })?;
    Ok(Approval { arguments: serde_json::from_slice(&opened)?, ..approval })
}

fn find_approval(
    sql: &Connection,
    shared: &SharedStoreState,
    id: &str,
) -> DbResult<Option<Approval>> {
    let read = |row: &rusqlite::Row<'_>| Ok((row.get::<_, String>(0)?, row.get::<_, Vec<u8>>(1)?));
    let found = sql
        .prepare_cached("SELECT body, arguments FROM approvals WHERE id = ?1")?
        .query_row([id], read)
        .optional()?;
    found.map(|(body, sealed)| decrypt_approval(shared, &body, &sealed)).transpose()
}

fn save_approval(sql: &Connection, approval: &Approval) -> DbResult<()> {
    sql.prepare_cached("UPDATE approvals SET body = ?2 WHERE id = ?1")?
        .execute(params![approval.id, serde_json::to_string(approval)?])?;
    Ok(())
}

#[async_trait]
impl Store for SqliteStore {
    fn now(&self) -> Timestamp {
        self.shared.clock.now()
    }

    async fn find_pause(
        &self,
        key: &SessionKey,
        tool: &Arc<str>,
    ) -> Result<Option<(PauseTarget, String)>, StoreError> {
        let (key, tool) = (key.clone(), Arc::clone(tool));
        self.read_inline(move |sql, _| find_pause(sql, &key, &tool))
    }

    async fn set_pause(
        &self,
        target: PauseTarget,
        reason: Option<String>,
    ) -> Result<(), StoreError> {
        self.write(true, move |tx| {
            let target = ledger::canonical_text(&target)?;
            match reason {
                Some(reason) => tx.sql.execute(
                    "INSERT OR REPLACE INTO paused (target, reason) VALUES (?1, ?2)",
                    [target, reason],
                )?,
                None => tx.sql.execute("DELETE FROM paused WHERE target = ?1", [target])?,
            };
            Ok(())
        })
        .await
    }

    async fn lease_session(
        &self,
        key: &SessionKey,
        request: LeaseRequest,
    ) -> Result<Option<SessionLease>, StoreError> {
        let guard = self.acquire_session_lock(key, request).await?;
        Ok(guard.map(|guard| self.register_lease(key, request, guard)))
    }

    fn release_session(&self, lease: SessionLease) {
        let guard = lock_unpoisoned(&self.held_sessions).remove(&lease.id);
        drop(guard);
    }

    async fn open_session(
        &self,
        enter: SessionRequest<'_>,
    ) -> Result<Option<Box<SessionSnapshot>>, StoreError> {
        let now = self.now();
        let guard = match enter.lease {
            Some(request) => match self.acquire_session_lock(enter.key, request).await? {
                Some(guard) => Some((request, guard)),
                None => return Ok(None),
            },
            None => None,
        };
        let entering = OwnedSessionRequest::from_request(&enter, now);
        // A long-lived process sweeps when it opens the ledger. A process that makes one call
        // sweeps a little each time.
        let sweeps = self.writer.is_inline();
        // Opening a known session writes nothing, unless many calls are counted in memory only.
        let look =
            |sql: &Connection, shared: &SharedStoreState, tip: ledger::LedgerHead| -> DbResult<_> {
                let call = entering.uncounted_call();
                let Some((session, opened, ahead)) =
                    SessionHeader::find_opened(sql, shared, &entering.key, call)?
                else {
                    return Ok(None);
                };
                if ahead.len() > MAX_UNCOUNTED_CALLS {
                    return Ok(None);
                }
                let slices = session.read_raw_slices(sql)?;
                if call.is_some() {
                    lock_unpoisoned(&shared.uncounted_calls).insert(entering.key.clone(), ahead);
                }
                Ok(Some((session, opened, slices, tip.seq, None)))
            };
        let known = match sweeps || !entering.dedup_keys.is_empty() {
            true => None,
            false => self
                .writer
                .try_read_consistent(look)
                .map_err(|fault| self.with_path(&fault.into()))?,
        };
        let (session, started_at, slices, row_count, recalled) = match known {
            Some(known) => known,
            None => {
                let entered = self.write(false, move |tx| {
                    if sweeps {
                        claims::sweep_client_claims(tx, entering.now)?;
                    }
                    let recalled = entering.find_prior_call(tx.sql, tx.shared)?;
                    let call = entering
                        .uncounted_call()
                        .filter(|_| !matches!(recalled, Some((PriorCall::Settled(_), _))));
                    let (session, opened) =
                        SessionHeader::open_for_call(tx, &entering.key, call, entering.now)?;
                    let slices = session.read_raw_slices(tx.sql)?;
                    Ok((session, opened, slices, tx.head.seq, recalled))
                });
                entered.await?
            }
        };
        // Parse outside of the writer thread.
        let state =
            Arc::new(session.build_state(slices).map_err(|fault| self.with_path(&fault.into()))?);
        let (version, repetitions) = (session.version, session.progress);
        let (prior_call, dedup_key_kind) = recalled.unzip();
        Ok(Some(Box::new(SessionSnapshot {
            version,
            started_at,
            state,
            row_count,
            prior_call,
            dedup_key_kind,
            repetitions,
            lease: guard.map(|(request, guard)| self.register_lease(enter.key, request, guard)),
            now,
        })))
    }

    async fn inspect_session(
        &self,
        enter: SessionRequest<'_>,
    ) -> Result<Box<SessionSnapshot>, StoreError> {
        let now = self.now();
        let entering = OwnedSessionRequest::from_request(&enter, now);
        self.read(move |sql, shared| {
            read_transaction(sql, |sql| {
                let (recalled, recalled_by) = entering.find_prior_call(sql, shared)?.unzip();
                let session = SessionHeader::find(sql, &entering.key)?;
                let mut progress =
                    session.as_ref().map(|session| session.progress).unwrap_or_default();
                if entering.counts_repetition {
                    progress.count_call(entering.digest, entering.now, entering.polling.as_ref());
                }
                Ok(Box::new(SessionSnapshot {
                    version: session.as_ref().map_or(0, |session| session.version),
                    started_at: session
                        .as_ref()
                        .and_then(|session| session.opened_at)
                        .unwrap_or(entering.now),
                    state: Arc::new(
                        session
                            .map(|session| session.read_slices(sql))
                            .transpose()?
                            .unwrap_or_default(),
                    ),
                    row_count: ledger::read_head(sql)?.seq,
                    prior_call: recalled,
                    dedup_key_kind: recalled_by,
                    repetitions: progress,
                    lease: None,
                    now,
                }))
            })
        })
        .await
    }

    async fn load_facts(
        &self,
        key: &SessionKey,
        needs: &FactRequest,
        _: &SessionState,
        facts: &mut DecisionFacts,
    ) -> Result<(), StoreError> {
        let (key, needs, mut found) = (key.clone(), needs.clone(), DecisionFacts::at(facts.now));
        let mut found = self.read_inline(move |sql, shared| {
            read_transaction(sql, |sql| {
                for (counter, window) in &needs.counters {
                    let used = counters::read_used(sql, counter, *window, found.now)?;
                    found.counters.push((counter.clone(), *window, used));
                }
                sessions::load_facts(sql, &shared.keys().redaction_key, &key, &needs, &mut found)
            })?;
            Ok(found)
        })?;
        facts.evidence.append(&mut found.evidence);
        facts.counters.append(&mut found.counters);
        facts.marks.append(&mut found.marks);
        facts.origins.append(&mut found.origins);
        Ok(())
    }

    async fn check_charges(
        &self,
        charges: &[Charge],
    ) -> Result<Vec<Result<Decimal, ChargeError>>, StoreError> {
        let now = self.now();
        if charges.is_empty() {
            return Ok(Vec::new());
        }
        let charges = charges.to_vec();
        self.read_inline(move |sql, _| {
            read_transaction(sql, |sql| {
                charges.iter().map(|charge| counters::check_charge(sql, charge, now)).collect()
            })
        })
    }

    async fn claim(
        &self,
        request: ClaimRequest<'_>,
    ) -> Result<Result<Vec<Decimal>, ClaimError>, StoreError> {
        let now = self.now();
        let ClaimRequest { record: mut intent, lease_ttl, charges, approval, items } = request;
        intent.lease = now.checked_add(lease_ttl).unwrap_or(Timestamp::MAX);
        let (charges, approval) = (charges.to_vec(), approval.map(str::to_owned));
        let items = self.seal_items(&items)?;
        // The draft is parsed again before it becomes a row, so it need not be canonical.
        let draft = intent.row.as_ref().map(|row| serde_json::to_string(&**row)).transpose();
        let draft = draft.map_err(|error| StoreError::from(DbError::from(error)))?;
        self.write(intent.effect, move |tx| {
            if let Some((target, why)) = find_pause(tx.sql, &intent.key, &intent.tool)? {
                return Ok(Err(ClaimError::Paused(target, why)));
            }
            let recalled = claims::find_prior_call(
                tx.sql,
                &tx.shared.state_dir,
                &tx.shared.keys(),
                &intent.recall,
                intent.asked,
                now,
            )?;
            if let Some((recalled, by)) = recalled {
                return Ok(Err(ClaimError::PriorCall(recalled, by)));
            }
            let used = match check_call_charges(&charges, |charge| {
                counters::check_charge(tx.sql, charge, now)
            })? {
                Ok(used) => used,
                Err(full) => return Ok(Err(full)),
            };
            if let Some(id) = approval {
                match find_approval(tx.sql, tx.shared, &id)? {
                    Some(a)
                        if a.is_usable(now) && a.digest == intent.digest && a.key == intent.key =>
                    {
                        save_approval(tx.sql, &Approval { state: ApprovalState::Used, ..a })?;
                    }
                    _ => return Ok(Err(ClaimError::ApprovalUnavailable)),
                }
            }
            if let Some(row) = &intent.row {
                ledger::store_definition(tx, row.config)?;
            }
            claims::store_claim(tx, &intent, draft.as_deref(), &charges, &used, now)?;
            claims::apply_claim_effects(tx, &mut intent)?;
            sessions::append_items(tx, &intent.key, &items)?;
            Ok(Ok(used))
        })
        .await
    }

    async fn commit(
        &self,
        finish: Box<CommitRequest>,
    ) -> Result<Result<Option<LazyReceipt>, CommitConflictError>, StoreError> {
        let body = ledger::canonical_text(&*finish.row).map_err(StoreError::from)?;
        let keys = self.keys();
        let outputs: Result<Vec<_>, _> = finish
            .outputs
            .iter()
            .map(|(handle, text)| keys.seal(&format!("output {handle}"), text.as_bytes()))
            .collect();
        let items = self.seal_items(&finish.items)?;
        let outputs =
            outputs.map_err(|error| self.with_path(&StoreError::unavailable(error.to_string())))?;
        // A process that makes one call cannot sign later, so it signs each row in its transaction.
        let durable = finish.is_durable || self.writer.is_inline();
        let written =
            self.write(durable, move |tx| commit_call(tx, *finish, &body, outputs, &items)).await?;
        let Ok((row, seq, hash)) = written else { return Ok(Err(CommitConflictError)) };
        Ok(Ok(Some(recorded_row(self.keys(), &row, seq, hash))))
    }

    async fn take_deferred_claim(
        &self,
        key: &SessionKey,
        client: &str,
        tool: &str,
    ) -> Result<Option<DeferredClaim>, StoreError> {
        let (key, client, tool) = (key.clone(), client.to_owned(), tool.to_owned());
        self.write(false, move |tx| claims::take_deferred(tx, &key, &client, &tool)).await
    }

    async fn close_client_session(&self, key: &SessionKey) -> Result<(), StoreError> {
        let now = self.now();
        let key = key.clone();
        self.write(true, move |tx| claims::close_client_session(tx, &key, now)).await
    }

    async fn snapshot(&self, key: &SessionKey) -> Result<(u64, Arc<SessionState>), StoreError> {
        let key = key.clone();
        self.read(move |sql, _| {
            read_transaction(sql, |sql| {
                let Some(session) = SessionHeader::find(sql, &key)? else {
                    return Ok((0, Arc::default()));
                };
                Ok((session.version, Arc::new(session.read_slices(sql)?)))
            })
        })
        .await
    }

    async fn load_session(
        &self,
        key: &SessionKey,
    ) -> Result<Option<Arc<SessionState>>, StoreError> {
        let key = key.clone();
        self.read(move |sql, _| {
            read_transaction(sql, |sql| {
                SessionHeader::find(sql, &key)?
                    .map(|session| session.read_all(sql).map(Arc::new))
                    .transpose()
            })
        })
        .await
    }

    async fn edit_session(&self, key: &SessionKey, alter: SessionEdit) -> Result<(), StoreError> {
        let key = key.clone();
        self.write(false, move |tx| {
            let mut session = SessionHeader::get_or_create(tx.sql, &key)?;
            session.edit(tx.sql, &tx.shared.keys().redaction_key, alter)?;
            session.save(tx.sql)
        })
        .await
    }

    async fn add_cost(&self, charges: &[Charge]) -> Result<(), StoreError> {
        let now = self.now();
        let charges = charges.to_vec();
        self.write(false, move |tx| {
            let call = CallId::from_bytes(crate::keys::random_bytes()?);
            for (n, charge) in charges.iter().enumerate() {
                let used = counters::read_used(tx.sql, &charge.counter, charge.window, now)?;
                counters::reserve_charge(tx.sql, call, n, charge, used, now)?;
            }
            Ok(())
        })
        .await
    }

    async fn create_approval(&self, approval: Approval) -> Result<(), StoreError> {
        let arguments = serde_json::to_vec(&approval.arguments)
            .map_err(|e| StoreError::unavailable(e.to_string()))?;
        let sealed = self
            .keys()
            .seal(&format!("approval {}", approval.id), &arguments)
            .map_err(|e| StoreError::unavailable(e.to_string()))?;
        self.write(true, move |tx| {
            let session = SessionHeader::get_or_create(tx.sql, &approval.key)?;
            tx.sql
                .prepare_cached("INSERT INTO approvals (id, session, digest, expires, body, arguments) VALUES (?1, ?2, ?3, ?4, ?5, ?6)")?
                .execute(params![
                    approval.id,
                    session.id,
                    approval.digest.as_bytes().as_slice(),
                    to_nanos(approval.expires),
                    serde_json::to_string(&approval)?,
                    sealed
                ])?;
            Ok(())
        })
        .await
    }

    async fn approval_for(
        &self,
        key: &SessionKey,
        digest: Digest,
    ) -> Result<Option<Approval>, StoreError> {
        let key = key.clone();
        self.read(move |sql, shared| {
            let Some(session) = SessionHeader::find(sql, &key)? else { return Ok(None) };
            let read = |row: &rusqlite::Row<'_>| Ok((row.get::<_, String>(0)?, row.get::<_, Vec<u8>>(1)?));
            let found = sql
                .prepare_cached("SELECT body, arguments FROM approvals WHERE session = ?1 AND digest = ?2 ORDER BY n DESC LIMIT 1")?
                .query_row(params![session.id, digest.as_bytes().as_slice()], read)
                .optional()?;
            found.map(|(body, sealed)| decrypt_approval(shared, &body, &sealed)).transpose()
        })
        .await
    }

    async fn approval(&self, id: &str) -> Result<Option<Approval>, StoreError> {
        let id = id.to_owned();
        self.read_inline(move |sql, shared| find_approval(sql, shared, &id))
    }

    async fn answer_approval(
        &self,
        id: &str,
        approved: bool,
        by: &str,
    ) -> Result<bool, StoreError> {
        let now = self.now();
        let (id, by) = (id.to_owned(), by.to_owned());
        self.write(true, move |tx| {
            let waiting = find_approval(tx.sql, tx.shared, &id)?.filter(|a| {
                a.state == ApprovalState::Waiting && now <= a.expires && a.can_be_answered_by(&by)
            });
            let Some(approval) = waiting else { return Ok(false) };
            let state = if approved { ApprovalState::Approved } else { ApprovalState::Denied };
            save_approval(tx.sql, &Approval { state, answered_by: Some(by), ..approval })?;
            Ok(true)
        })
        .await
    }

    async fn pending_claims(&self) -> Result<Vec<ClaimRecord>, StoreError> {
        let now = self.now();
        self.write(true, move |tx| {
            claims::sweep_abandoned(tx, now)?;
            let unsettled = StoredClaim::read_unsettled(tx.sql)?;
            unsettled
                .into_iter()
                .filter(|claim| claim.is_pending(&tx.shared.state_dir, now))
                .map(claims::into_intent)
                .collect()
        })
        .await
    }

    async fn settle_claim(
        &self,
        call: CallId,
        settle: ClaimResolution,
        outcome: Outcome,
        shown: Outcome,
        by: &str,
    ) -> Result<bool, StoreError> {
        let now = self.now();
        let by = by.to_owned();
        self.write(true, move |tx| {
            claims::settle_claim(tx, call, settle, (&outcome, shown), &by, now)
        })
        .await
    }

    async fn load_output(
        &self,
        key: &SessionKey,
        handle: &str,
    ) -> Result<Option<Arc<str>>, StoreError> {
        let (key, handle) = (key.clone(), handle.to_owned());
        self.read(move |sql, shared| {
            let Some(session) = SessionHeader::find(sql, &key)? else { return Ok(None) };
            let sealed: Option<Vec<u8>> = sql
                .prepare_cached("SELECT text FROM outputs WHERE session = ?1 AND handle = ?2")?
                .query_row(params![session.id, handle], |row| row.get(0))
                .optional()?;
            let text = sealed
                .and_then(|sealed| shared.keys().unseal(&format!("output {handle}"), &sealed));
            Ok(text.and_then(|text| String::from_utf8(text).ok()).map(Into::into))
        })
        .await
    }

    async fn items(
        &self,
        key: &SessionKey,
        after: u64,
    ) -> Result<Vec<(u64, SessionItem)>, StoreError> {
        let key = key.clone();
        self.read(move |sql, shared| sessions::read_items(sql, &shared.keys(), &key, after)).await
    }

    async fn rows(&self, key: &SessionKey) -> Result<Vec<Arc<Row>>, StoreError> {
        let key = key.clone();
        self.read(move |sql, _| {
            let Some(session) = SessionHeader::find(sql, &key)? else { return Ok(Vec::new()) };
            let mut statement =
                sql.prepare_cached("SELECT body FROM ledger WHERE session = ?1 ORDER BY n")?;
            let mut rows = statement.query([session.id])?;
            let mut found = Vec::new();
            while let Some(row) = rows.next()? {
                found.push(Arc::new(serde_json::from_str(
                    row.get_ref(0)?.as_str().unwrap_or_default(),
                )?));
            }
            Ok(found)
        })
        .await
    }

    async fn has_succeeded(&self, call: CallId) -> Result<bool, StoreError> {
        let succeeded = Decision::Succeeded.name();
        self.read(move |sql, _| {
            let mut statement =
                sql.prepare_cached("SELECT 1 FROM ledger WHERE call = ?1 AND decision = ?2")?;
            Ok(statement.exists(params![call.as_bytes().as_slice(), succeeded])?)
        })
        .await
    }

    async fn append_spooled(&self, row: Arc<Row>) -> Result<(), StoreError> {
        self.write(true, move |tx| append_spooled_row(tx, &row)).await
    }

    async fn append_all_spooled(&self, rows: &[Arc<Row>]) -> Result<Vec<RejectedRow>, StoreError> {
        let rows = rows.to_vec();
        self.write(true, move |tx| {
            rows.iter().filter_map(|row| append_spooled_row_if_valid(tx, row).transpose()).collect()
        })
        .await
    }

    fn register_definition(&self, config: Digest, definition: &Arc<str>) {
        // A partial agent, built for one call, does not have the definition of this digest.
        if Digest::of(definition.as_bytes()) != config {
            return;
        }
        let mut definitions = lock_unpoisoned(&self.shared.definitions);
        // A configuration is often reloaded without changes.
        if definitions.iter().all(|(known, _)| *known != config) {
            definitions.push((config, Arc::clone(definition)));
        }
        drop(definitions);
        self.writer.enqueue(move |tx| ledger::store_definition(tx, config));
    }

    fn redaction_key(&self) -> Option<[u8; 32]> {
        Some(self.keys().redaction_key)
    }

    fn outlives_process(&self) -> bool {
        true
    }

    fn spool_dir(&self) -> Option<PathBuf> {
        Some(self.shared.state_dir.path().join("spool"))
    }

    fn undo_dir(&self) -> Option<PathBuf> {
        Some(self.shared.state_dir.path().to_owned())
    }

    fn term(&self) -> Option<Arc<str>> {
        self.shared.state_dir.term().map(Arc::clone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_definition_is_kept_in_memory_once() {
        let directory = tempfile::tempdir().unwrap();
        let store = SqliteStore::open(directory.path().join("ledger.db")).unwrap();
        for definition in ["{}", "[]", "{}", "{}"] {
            store.register_definition(Digest::of(definition.as_bytes()), &Arc::from(definition));
        }
        assert_eq!(lock_unpoisoned(&store.shared.definitions).len(), 2);
    }
}
