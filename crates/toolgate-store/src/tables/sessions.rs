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
use toolgate::session::state::{Evidence, EvidenceKey, SessionState};
use toolgate_json::Digest;

use crate::error::DbResult;
use crate::hash_chain;
use crate::tables::ledger::{canonical_text, parse_digest, to_i64, to_nanos, to_u64};
use crate::tables::provenance::ProvenanceTables;
use crate::transaction::{SharedStoreState, UncountedCall, WriteTransaction, lock_unpoisoned};

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
    /// Reads the header of a session.
    pub(crate) fn find(sql: &Connection, key: &SessionKey) -> DbResult<Option<Self>> {
        let mut statement = sql.prepare_cached(
            "SELECT id, version, stamp, opened, progress, memory, revokes, rows, head FROM sessions
             WHERE session = ?1 AND principal = ?2 AND agent = ?3",
        )?;
        let mut rows = statement.query(params![&*key.session, &*key.principal, &*key.agent])?;
        let Some(row) = rows.next()? else { return Ok(None) };
        let (progress, flags): (Option<String>, Option<String>) = (row.get(4)?, row.get(5)?);
        Ok(Some(Self {
            id: row.get(0)?,
            version: to_u64(row.get(1)?),
            stamp: to_u64(row.get(2)?),
            opened_at: row.get::<_, Option<i64>>(3)?.map(from_nanos),
            progress: progress
                .map_or(Ok(RepetitionState::default()), |text| serde_json::from_str(&text))?,
            provenance_flags: flags
                .map_or(Ok(ProvenanceFlags::default()), |text| serde_json::from_str(&text))?,
            has_revocations: row.get(6)?,
            rows: to_u64(row.get(7)?),
            head: parse_digest(row.get_ref(8)?.as_blob().unwrap_or_default())?,
        }))
    }

    /// Reads the header of a session, and creates the session if necessary.
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
        let uncounted = tx.replace_uncounted_calls(key, None);
        self.count_calls(uncounted.as_deref().unwrap_or_default());
        uncounted.is_some()
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
        if let Some((session, started_at, uncounted)) =
            Self::find_opened(tx.sql, tx.shared, key, call)?
        {
            if call.is_some() {
                tx.replace_uncounted_calls(key, Some(uncounted));
            }
            return Ok((session, started_at));
        }
        let mut session = Self::get_or_create(tx.sql, key)?;
        session.count_uncounted_calls(tx, key);
        session.count_calls(call.as_slice());
        let started_at = *session.opened_at.get_or_insert(now);
        session.save(tx.sql)?;
        Ok((session, started_at))
    }

    /// Reads a session that exists, and its calls that are counted in memory only.
    pub(crate) fn find_opened(
        sql: &Connection,
        shared: &SharedStoreState,
        key: &SessionKey,
        call: Option<UncountedCall>,
    ) -> DbResult<Option<(Self, Timestamp, Vec<UncountedCall>)>> {
        let Some((started_at, mut session)) =
            Self::find(sql, key)?.and_then(|session| Some((session.opened_at?, session)))
        else {
            return Ok(None);
        };
        let mut uncounted =
            lock_unpoisoned(&shared.uncounted_calls).get(key).cloned().unwrap_or_default();
        uncounted.extend(call);
        session.count_calls(&uncounted);
        Ok(Some((session, started_at, uncounted)))
    }

    pub(crate) fn save(&self, sql: &Connection) -> DbResult<()> {
        let flags = if self.provenance_flags == ProvenanceFlags::default() {
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
            flags,
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
    pub(super) fn latest_evidence(
        &self,
        sql: &Connection,
        key: &EvidenceKey,
    ) -> DbResult<Option<Evidence>> {
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
    for (path, value) in &needs.origins {
        let known = match &session {
            Some(session) => {
                let tables = ProvenanceTables::new(sql, secret, session);
                let known = provenance::find_provenance(&tables, value);
                tables.finish()?;
                known
            }
            None => provenance::Provenance::default(),
        };
        facts.origins.insert(path.clone(), known);
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
