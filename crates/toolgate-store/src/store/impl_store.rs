//! Implements the `Store` trait for `SqliteStore`.

use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use jiff::Timestamp;
use rusqlite::{OptionalExtension, params};
use rust_decimal::Decimal;
use toolgate::limits::{Charge, ChargeError};
use toolgate::policy::{DecisionFacts, FactRequest};
use toolgate::session::state::{SessionEdit, SessionState};
use toolgate::store::{
    Approval, ClaimError, ClaimRecord, ClaimRequest, ClaimResolution, CommitConflictError,
    CommitRequest, DeferredClaim, LeaseRequest, PauseTarget, RejectedRow, SessionItem,
    SessionLease, SessionRequest, SessionSnapshot, Store, StoreError,
};
use toolgate::{CallId, Decision, LazyReceipt, Outcome, Row, SessionKey};
use toolgate_json::Digest;

use super::SqliteStore;
use crate::keys::recorded_row;
use crate::store::finish_call::{append_spooled_row, append_spooled_row_if_valid, commit_call};
use crate::store::{approvals, pauses};
use crate::tables::claim_settlement;
use crate::tables::claims;
use crate::tables::claims::StoredClaim;
use crate::tables::counters;
use crate::tables::ledger;
use crate::tables::session_items;
use crate::tables::sessions;
use crate::tables::sessions::SessionHeader;
use crate::transaction::{lock_unpoisoned, read_transaction};

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
        self.read_inline(move |sql, _| pauses::find_pause(sql, &key, &tool))
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
        let guard = lock_unpoisoned(&self.lease_guards).remove(&lease.id);
        drop(guard);
    }

    async fn open_session(
        &self,
        request: SessionRequest<'_>,
    ) -> Result<Option<Box<SessionSnapshot>>, StoreError> {
        self.lease_and_open(request).await
    }

    async fn inspect_session(
        &self,
        request: SessionRequest<'_>,
    ) -> Result<Box<SessionSnapshot>, StoreError> {
        self.read_snapshot(request).await
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
        self.claim_call(request).await
    }

    async fn commit(
        &self,
        request: Box<CommitRequest>,
    ) -> Result<Result<Option<LazyReceipt>, CommitConflictError>, StoreError> {
        let body = ledger::canonical_text(&*request.row).map_err(StoreError::from)?;
        let keys = self.keys();
        let outputs: Result<Vec<_>, _> = request
            .outputs
            .iter()
            .map(|(handle, text)| keys.seal(&format!("output {handle}"), text.as_bytes()))
            .collect();
        let items = self.seal_items(&request.items)?;
        let outputs =
            outputs.map_err(|error| self.with_path(&StoreError::unavailable(error.to_string())))?;
        // A process that makes one call cannot sign later, so it signs each row in its transaction.
        let durable = request.is_durable || self.writer.is_inline();
        let written = self
            .write(durable, move |tx| commit_call(tx, *request, &body, outputs, &items))
            .await?;
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
        self.write(true, move |tx| claim_settlement::close_client_session(tx, &key, now)).await
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

    async fn edit_session(&self, key: &SessionKey, edit: SessionEdit) -> Result<(), StoreError> {
        let key = key.clone();
        self.write(false, move |tx| {
            let mut session = SessionHeader::get_or_create(tx.sql, &key)?;
            session.edit(tx.sql, &tx.shared.keys().redaction_key, edit)?;
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
        self.insert_approval(approval).await
    }

    async fn approval_for(
        &self,
        key: &SessionKey,
        digest: Digest,
    ) -> Result<Option<Approval>, StoreError> {
        self.find_approval_for(key, digest).await
    }

    async fn approval(&self, id: &str) -> Result<Option<Approval>, StoreError> {
        let id = id.to_owned();
        self.read_inline(move |sql, shared| approvals::find_approval(sql, shared, &id))
    }

    async fn answer_approval(
        &self,
        id: &str,
        approved: bool,
        by: &str,
    ) -> Result<bool, StoreError> {
        self.record_approval_answer(id, approved, by).await
    }

    async fn pending_claims(&self) -> Result<Vec<ClaimRecord>, StoreError> {
        let now = self.now();
        self.write(true, move |tx| {
            claim_settlement::sweep_abandoned(tx, now)?;
            let unsettled = StoredClaim::read_unsettled(tx.sql)?;
            unsettled
                .into_iter()
                .filter(|claim| claim.is_pending(&tx.shared.state_dir, now))
                .map(claims::into_record)
                .collect()
        })
        .await
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
        let by = by.to_owned();
        self.write(true, move |tx| {
            claim_settlement::settle_claim(tx, call, resolution, (&outcome, shown), &by, now)
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
        self.read(move |sql, shared| session_items::read_items(sql, &shared.keys(), &key, after))
            .await
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
    fn a_definition_is_stored_in_memory_once() {
        let directory = tempfile::tempdir().unwrap();
        let store = SqliteStore::open(directory.path().join("ledger.db")).unwrap();
        for definition in ["{}", "[]", "{}", "{}"] {
            store.register_definition(Digest::of(definition.as_bytes()), &Arc::from(definition));
        }
        assert_eq!(lock_unpoisoned(&store.shared.definitions).len(), 2);
    }
}
