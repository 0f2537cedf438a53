//! Stores sessions in tables.
//!
//! A call loads only the keys it needs, so its cost does not grow with the session.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use rusqlite::{Connection, OptionalExtension, params};
use serde_json::Value;
use toolgate::SessionKey;
use toolgate::policy::{DecisionFacts, FactRequest};
use toolgate::provenance;
use toolgate::provenance::{ProvenanceFlags, ProvenanceStore as _};
use toolgate::session::repetition::RepetitionState;
use toolgate::session::state::{
    Evidence, EvidenceKey, NamedChange, SessionChanges, SessionEdit, SessionState,
};
use toolgate::store::SessionItem;
use toolgate_json::Digest;

use crate::error::{DbError, DbResult};
use crate::hash_chain;
use crate::keys::LedgerKeys;
use crate::tables::ledger::{canonical_text, parse_digest, to_i64, to_nanos, to_u64};
use crate::tables::provenance::{CarrierTable, ProvenanceTables};
use crate::transaction::{SharedStoreState, UncountedCall, WriteTransaction, lock_unpoisoned};

/// What encrypted items are bound to.
pub(crate) const ITEM_SEAL_CONTEXT: &str = "item";

/// Header of a session, without its evidence, marks, logs and slices.
pub(crate) struct SessionHeader {
    pub(crate) id: i64,
    pub(crate) version: u64,
    pub(crate) stamp: u64,
    pub(crate) opened_at: Option<Timestamp>,
    pub(crate) progress: RepetitionState,
    pub(crate) provenance_flags: ProvenanceFlags,
    /// Whether evidence was ever revoked in this session.
    pub(crate) has_revocations: bool,
    pub(crate) rows: u64,
    pub(crate) head: Digest,
}

impl SessionHeader {
    pub(crate) fn find(sql: &Connection, key: &SessionKey) -> DbResult<Option<Self>> {
        let mut statement = sql.prepare_cached(
            "SELECT id, version, stamp, opened, progress, memory, revokes, rows, head FROM sessions
             WHERE session = ?1 AND principal = ?2 AND agent = ?3",
        )?;
        let mut rows = statement.query(params![&*key.session, &*key.principal, &*key.agent])?;
        let Some(row) = rows.next()? else { return Ok(None) };
        let (progress, memory): (Option<String>, Option<String>) = (row.get(4)?, row.get(5)?);
        Ok(Some(Self {
            id: row.get(0)?,
            version: to_u64(row.get(1)?),
            stamp: to_u64(row.get(2)?),
            opened_at: row.get::<_, Option<i64>>(3)?.map(from_nanos),
            progress: progress
                .map_or(Ok(RepetitionState::default()), |text| serde_json::from_str(&text))?,
            provenance_flags: memory
                .map_or(Ok(ProvenanceFlags::default()), |text| serde_json::from_str(&text))?,
            has_revocations: row.get(6)?,
            rows: to_u64(row.get(7)?),
            head: parse_digest(row.get_ref(8)?.as_blob().unwrap_or_default())?,
        }))
    }

    pub(crate) fn get_or_create(sql: &Connection, key: &SessionKey) -> DbResult<Self> {
        if let Some(session) = Self::find(sql, key)? {
            return Ok(session);
        }
        let head = hash_chain::session_genesis(key);
        sql.prepare_cached(
            "INSERT INTO sessions (agent, principal, session, head) VALUES (?1, ?2, ?3, ?4)",
        )?
        .execute(params![
            &*key.agent,
            &*key.principal,
            &*key.session,
            head.as_bytes().as_slice()
        ])?;
        Ok(Self {
            id: sql.last_insert_rowid(),
            version: 0,
            stamp: 0,
            opened_at: None,
            progress: RepetitionState::default(),
            provenance_flags: ProvenanceFlags::default(),
            has_revocations: false,
            rows: 0,
            head,
        })
    }

    /// Counts the calls that are counted in memory only. Returns true if there were any.
    ///
    /// The caller saves the session afterwards.
    pub(crate) fn count_uncounted_calls(
        &mut self,
        tx: &WriteTransaction<'_>,
        key: &SessionKey,
    ) -> bool {
        let ahead = tx.replace_uncounted_calls(key, None);
        self.count_calls(ahead.as_deref().unwrap_or_default());
        ahead.is_some()
    }

    fn count_calls(&mut self, calls: &[UncountedCall]) {
        for call in calls {
            self.progress.count_call(call.digest, call.at, call.polling.as_ref());
        }
    }

    /// Opens the session of a call, and creates it if necessary.
    ///
    /// For a known session, nothing is written now: the call is counted with the next write to the
    /// session. Other processes see it then.
    pub(crate) fn open_for_call(
        tx: &WriteTransaction<'_>,
        key: &SessionKey,
        call: Option<UncountedCall>,
        now: Timestamp,
    ) -> DbResult<(Self, Timestamp)> {
        if let Some((session, opened, ahead)) = Self::find_opened(tx.sql, tx.shared, key, call)? {
            if call.is_some() {
                tx.replace_uncounted_calls(key, Some(ahead));
            }
            return Ok((session, opened));
        }
        let mut session = Self::get_or_create(tx.sql, key)?;
        session.count_uncounted_calls(tx, key);
        session.count_calls(call.as_slice());
        let opened = *session.opened_at.get_or_insert(now);
        session.save(tx.sql)?;
        Ok((session, opened))
    }

    /// Reads a session that exists, and its calls that are counted in memory only.
    pub(crate) fn find_opened(
        sql: &Connection,
        shared: &SharedStoreState,
        key: &SessionKey,
        call: Option<UncountedCall>,
    ) -> DbResult<Option<(Self, Timestamp, Vec<UncountedCall>)>> {
        let Some((opened, mut session)) =
            Self::find(sql, key)?.and_then(|session| Some((session.opened_at?, session)))
        else {
            return Ok(None);
        };
        let mut ahead =
            lock_unpoisoned(&shared.uncounted_calls).get(key).cloned().unwrap_or_default();
        ahead.extend(call);
        session.count_calls(&ahead);
        Ok(Some((session, opened, ahead)))
    }

    pub(crate) fn save(&self, sql: &Connection) -> DbResult<()> {
        let memory = if self.provenance_flags == ProvenanceFlags::default() {
            None
        } else {
            Some(serde_json::to_string(&self.provenance_flags)?)
        };
        sql.prepare_cached(
            "UPDATE sessions SET version = ?2, stamp = ?3, opened = ?4, progress = ?5, memory = ?6, revokes = ?7, rows = ?8, head = ?9
             WHERE id = ?1",
        )?
        .execute(params![
            self.id,
            to_i64(self.version),
            to_i64(self.stamp),
            self.opened_at.map(to_nanos),
            serde_json::to_string(&self.progress)?,
            memory,
            self.has_revocations,
            to_i64(self.rows),
            self.head.as_bytes().as_slice(),
        ])?;
        Ok(())
    }

    /// Reads a snapshot with all slices and nothing else.
    pub(crate) fn read_slices(&self, sql: &Connection) -> DbResult<SessionState> {
        self.build_state(self.read_raw_slices(sql)?)
    }

    /// Reads the slices as stored.
    pub(crate) fn read_raw_slices(&self, sql: &Connection) -> DbResult<Vec<(String, String)>> {
        // Every change of a slice increments the version.
        if self.version == 0 {
            return Ok(Vec::new());
        }
        let mut statement =
            sql.prepare_cached("SELECT name, value FROM slices WHERE session = ?1")?;
        let rows = statement.query_map([self.id], |row| Ok((row.get(0)?, row.get(1)?)))?;
        Ok(rows.collect::<Result<_, _>>()?)
    }

    pub(crate) fn build_state(&self, slices: Vec<(String, String)>) -> DbResult<SessionState> {
        let mut state = SessionState { stamp: self.stamp, ..SessionState::default() };
        for (name, value) in slices {
            state.slices.insert_mut(name.into(), Arc::new(serde_json::from_str(&value)?));
        }
        Ok(state)
    }

    /// Reads the whole session.
    pub(crate) fn read_all(&self, sql: &Connection) -> DbResult<SessionState> {
        let mut state = self.read_slices(sql)?;
        for (name, value) in
            read_named_values(sql, "SELECT name, value FROM marks WHERE session = ?1", self.id)?
        {
            state.marks.insert_mut(name, Arc::new(value));
        }
        for (name, entry) in read_named_values(
            sql,
            "SELECT name, entry FROM logs WHERE session = ?1 ORDER BY name, n",
            self.id,
        )? {
            let log = state.logs.get(&name).cloned().unwrap_or_default();
            state.logs.insert_mut(name, log.push_back(Arc::new(entry)));
        }
        for (key, proof) in
            read_named_values(sql, "SELECT key, proof FROM evidence WHERE session = ?1", self.id)?
        {
            state.evidence.insert_mut(
                serde_json::from_str(&key)?,
                Arc::new(serde_json::from_value::<Evidence>(proof)?),
            );
        }
        let mut statement =
            sql.prepare_cached("SELECT key, stamp FROM revocations WHERE session = ?1")?;
        let mut rows = statement.query([self.id])?;
        while let Some(row) = rows.next()? {
            state
                .revocations
                .insert_mut(serde_json::from_str(&row.get::<_, String>(0)?)?, to_u64(row.get(1)?));
        }
        // Values are stored as keyed fingerprints and cannot be read back.
        state.provenance.set_flags(self.provenance_flags);
        Ok(state)
    }

    /// Reads the latest evidence for a key, even if it was revoked.
    fn latest_evidence(&self, sql: &Connection, key: &EvidenceKey) -> DbResult<Option<Evidence>> {
        let found: Option<String> = sql
            .prepare_cached("SELECT proof FROM evidence WHERE session = ?1 AND key = ?2")?
            .query_row(params![self.id, canonical_text(key)?], |row| row.get(0))
            .optional()?;
        found.map(|found| serde_json::from_str(&found)).transpose().map_err(Into::into)
    }

    /// Reads the latest evidence for a key, unless it was revoked.
    pub(crate) fn current_evidence(
        &self,
        sql: &Connection,
        key: &EvidenceKey,
    ) -> DbResult<Option<Arc<Evidence>>> {
        let Some(proof) = self.latest_evidence(sql, key)? else { return Ok(None) };
        if self.has_revocations {
            for key in proof.keys_for_reported(false) {
                let revoked: Option<i64> = sql
                    .prepare_cached(
                        "SELECT stamp FROM revocations WHERE session = ?1 AND key = ?2",
                    )?
                    .query_row(params![self.id, canonical_text(&key)?], |row| row.get(0))
                    .optional()?;
                if revoked.is_some_and(|at| to_u64(at) >= proof.stamp) {
                    return Ok(None);
                }
            }
        }
        Ok(Some(Arc::new(proof)))
    }

    pub(crate) fn append_logs(
        &mut self,
        sql: &Connection,
        logs: Vec<(Arc<str>, Value)>,
    ) -> DbResult<()> {
        self.stamp += 1;
        for (name, entry) in logs {
            sql.prepare_cached(
                "INSERT INTO logs (session, name, n, entry)
                 VALUES (?1, ?2, (SELECT coalesce(max(n), 0) + 1 FROM logs WHERE session = ?1 AND name = ?2), ?3)",
            )?
            .execute(params![self.id, &*name, entry.to_string()])?;
        }
        Ok(())
    }

    pub(crate) fn revoke_evidence(&mut self, sql: &Connection, key: &EvidenceKey) -> DbResult<()> {
        self.stamp += 1;
        self.has_revocations = true;
        sql.prepare_cached(
            "INSERT OR REPLACE INTO revocations (session, key, stamp) VALUES (?1, ?2, ?3)",
        )?
        .execute(params![self.id, canonical_text(key)?, to_i64(self.stamp)])?;
        Ok(())
    }

    pub(crate) fn apply_changes(
        &mut self,
        sql: &Connection,
        changes: SessionChanges,
    ) -> DbResult<()> {
        self.version += u64::from(changes.can_conflict());
        self.stamp += 1;
        self.store_values(sql, "slices", changes.slices)?;
        self.store_values(sql, "marks", changes.marks)?;
        if let Some(mut evidence) = changes.evidence {
            let is_late = evidence.stamp < self.stamp;
            evidence.stamp = evidence.stamp.min(self.stamp);
            for key in evidence.keys() {
                // Do not replace newer evidence.
                if !is_late
                    || self
                        .latest_evidence(sql, &key)?
                        .is_none_or(|known| known.stamp <= evidence.stamp)
                {
                    self.store_evidence(sql, &key, &evidence)?;
                }
            }
        }
        Ok(())
    }

    fn store_evidence(
        &self,
        sql: &Connection,
        key: &EvidenceKey,
        evidence: &Evidence,
    ) -> DbResult<()> {
        sql.prepare_cached(
            "INSERT OR REPLACE INTO evidence (session, key, proof) VALUES (?1, ?2, ?3)",
        )?
        .execute(params![
            self.id,
            canonical_text(key)?,
            serde_json::to_string(evidence)?
        ])?;
        Ok(())
    }

    fn store_values(
        &self,
        sql: &Connection,
        table: &str,
        changes: Vec<NamedChange>,
    ) -> DbResult<()> {
        for (name, value) in changes {
            match value {
                Some(value) => sql
                    .prepare_cached(&format!(
                        "INSERT OR REPLACE INTO {table} (session, name, value) VALUES (?1, ?2, ?3)"
                    ))?
                    .execute(params![self.id, &*name, value.to_string()])?,
                None => sql
                    .prepare_cached(&format!(
                        "DELETE FROM {table} WHERE session = ?1 AND name = ?2"
                    ))?
                    .execute(params![self.id, &*name])?,
            };
        }
        Ok(())
    }

    pub(crate) fn edit(
        &mut self,
        sql: &Connection,
        key: &[u8; 32],
        alter: SessionEdit,
    ) -> DbResult<()> {
        self.version += 1;
        self.stamp += 1;
        match alter {
            SessionEdit::UserText(words) => {
                let mut memory = ProvenanceTables::new(sql, key, self);
                provenance::trust_user_text(&mut memory, &words);
                self.provenance_flags = memory.finish()?;
            }
            SessionEdit::Reset => {
                self.clear_tables(sql, &["slices", "marks", "evidence", "revocations", "logs"])?;
                self.has_revocations = false;
            }
            SessionEdit::Restore(earlier) => {
                self.clear_tables(sql, &["slices", "marks", "evidence", "revocations"])?;
                let all = |map: &toolgate::session::state::SessionSlices| {
                    map.iter()
                        .map(|(name, value)| (Arc::clone(name), Some((**value).clone())))
                        .collect()
                };
                self.store_values(sql, "slices", all(&earlier.slices))?;
                self.store_values(sql, "marks", all(&earlier.marks))?;
                for (key, evidence) in &earlier.evidence {
                    self.store_evidence(sql, key, evidence)?;
                }
                self.has_revocations = !earlier.revocations.is_empty();
                for (key, stamp) in &earlier.revocations {
                    sql.prepare_cached(
                        "INSERT INTO revocations (session, key, stamp) VALUES (?1, ?2, ?3)",
                    )?
                    .execute(params![
                        self.id,
                        canonical_text(key)?,
                        to_i64(*stamp)
                    ])?;
                }
            }
        }
        Ok(())
    }

    fn clear_tables(&self, sql: &Connection, tables: &[&str]) -> DbResult<()> {
        for table in tables {
            sql.prepare_cached(&format!("DELETE FROM {table} WHERE session = ?1"))?
                .execute([self.id])?;
        }
        Ok(())
    }

    /// Stores the provenance of values.
    pub(crate) fn store_provenance(
        &mut self,
        sql: &Connection,
        key: &[u8; 32],
        seen: provenance::ProvenanceUpdate,
    ) -> DbResult<()> {
        self.stamp += 1;
        let (mut memory, mut carriers) =
            (ProvenanceTables::new(sql, key, self), CarrierTable::new(sql));
        provenance::apply_update(&mut memory, seen, &mut carriers);
        self.provenance_flags = memory.finish()?;
        carriers.finish()
    }
}

/// Loads evidence, marks and origins into the facts.
pub(crate) fn load_facts(
    sql: &Connection,
    secret: &[u8; 32],
    key: &SessionKey,
    needs: &FactRequest,
    facts: &mut DecisionFacts,
) -> DbResult<()> {
    if needs.evidence.is_empty() && needs.marks.is_empty() && needs.origins.is_empty() {
        return Ok(());
    }
    let session = SessionHeader::find(sql, key)?;
    for key in &needs.evidence {
        let found = session
            .as_ref()
            .map(|session| session.current_evidence(sql, key))
            .transpose()?
            .flatten();
        facts.evidence.push((key.clone(), found));
    }
    for mark in &needs.marks {
        let find = |session: &SessionHeader| -> DbResult<Option<Value>> {
            let found: Option<String> = sql
                .prepare_cached("SELECT value FROM marks WHERE session = ?1 AND name = ?2")?
                .query_row(params![session.id, mark], |row| row.get(0))
                .optional()?;
            Ok(found.map(|text| serde_json::from_str(&text)).transpose()?)
        };
        facts.marks.insert(mark.clone(), session.as_ref().map(find).transpose()?.flatten());
    }
    for (place, value) in &needs.origins {
        let known = match &session {
            Some(session) => {
                let memory = ProvenanceTables::new(sql, secret, session);
                let known = provenance::find_provenance(&memory, value);
                memory.finish()?;
                known
            }
            None => provenance::Provenance::default(),
        };
        facts.origins.insert(place.clone(), known);
    }
    Ok(())
}

fn read_named_values(
    sql: &Connection,
    query: &str,
    session: i64,
) -> DbResult<Vec<(Arc<str>, Value)>> {
    let mut statement = sql.prepare_cached(query)?;
    let mut rows = statement.query([session])?;
    let mut found = Vec::new();
    while let Some(row) = rows.next()? {
        found.push((
            row.get::<_, String>(0)?.into(),
            serde_json::from_str(&row.get::<_, String>(1)?)?,
        ));
    }
    Ok(found)
}

pub(crate) fn from_nanos(nanos: i64) -> Timestamp {
    Timestamp::from_nanosecond(nanos.into()).unwrap_or(Timestamp::MAX)
}

/// Reads the `meta` table.
pub(crate) fn read_meta(sql: &Connection) -> DbResult<BTreeMap<String, String>> {
    let mut statement = sql.prepare("SELECT name, value FROM meta")?;
    let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// Appends encrypted items to a session.
pub(crate) fn append_items(
    tx: &WriteTransaction<'_>,
    key: &SessionKey,
    items: &[Vec<u8>],
) -> DbResult<()> {
    if items.is_empty() {
        return Ok(());
    }
    let session = SessionHeader::get_or_create(tx.sql, key)?;
    let mut statement = tx.sql.prepare_cached(
        "INSERT INTO items (session, n, body) SELECT ?1, coalesce(max(n), 0) + 1, ?2 FROM items WHERE session = ?1",
    )?;
    for item in items {
        statement.execute(params![session.id, item])?;
    }
    Ok(())
}

/// Reads the items of a session after the first `after`, in order.
pub(crate) fn read_items(
    sql: &Connection,
    keys: &LedgerKeys,
    key: &SessionKey,
    after: u64,
) -> DbResult<Vec<(u64, SessionItem)>> {
    let Some(session) = SessionHeader::find(sql, key)? else { return Ok(Vec::new()) };
    let mut statement =
        sql.prepare_cached("SELECT n, body FROM items WHERE session = ?1 AND n > ?2 ORDER BY n")?;
    let mut rows = statement.query(params![session.id, to_i64(after)])?;
    let mut items = Vec::new();
    while let Some(row) = rows.next()? {
        let body = keys.unseal(ITEM_SEAL_CONTEXT, &row.get::<_, Vec<u8>>(1)?).ok_or_else(|| {
            DbError::Message("cannot decrypt an item: another key encrypted it".to_owned())
        })?;
        items.push((to_u64(row.get(0)?), SessionItem(body)));
    }
    Ok(items)
}
