//! Writes the changes of sessions: logs, evidence, slices, marks and provenance.

use std::sync::Arc;

use rusqlite::{Connection, params};
use serde_json::Value;
use toolgate::provenance;
use toolgate::session::state::{
    Evidence, EvidenceKey, NamedChange, SessionChanges, SessionEdit, SessionSlices,
};

use crate::error::DbResult;
use crate::tables::ledger::{canonical_text, to_i64};
use crate::tables::provenance::{CarrierTable, ProvenanceTables};
use crate::tables::sessions::SessionHeader;

impl SessionHeader {
    /// Appends entries to log slices.
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

    /// Revokes all earlier evidence for a key.
    pub(crate) fn revoke_evidence(&mut self, sql: &Connection, key: &EvidenceKey) -> DbResult<()> {
        self.stamp += 1;
        self.has_revocations = true;
        sql.prepare_cached(
            "INSERT OR REPLACE INTO revocations (session, key, stamp) VALUES (?1, ?2, ?3)",
        )?
        .execute(params![self.id, canonical_text(key)?, to_i64(self.stamp)])?;
        Ok(())
    }

    /// Stores the changes of a successful call.
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

    /// Changes the session outside of a call.
    pub(crate) fn edit(
        &mut self,
        sql: &Connection,
        key: &[u8; 32],
        edit: SessionEdit,
    ) -> DbResult<()> {
        self.version += 1;
        self.stamp += 1;
        match edit {
            SessionEdit::UserText(text) => {
                let mut tables = ProvenanceTables::new(sql, key, self);
                provenance::trust_user_text(&mut tables, &text);
                self.provenance_flags = tables.finish()?;
            }
            SessionEdit::Reset => {
                self.clear_tables(sql, &["slices", "marks", "evidence", "revocations", "logs"])?;
                self.has_revocations = false;
            }
            SessionEdit::Restore(earlier) => {
                self.clear_tables(sql, &["slices", "marks", "evidence", "revocations"])?;
                let changes_of = |map: &SessionSlices| {
                    map.iter()
                        .map(|(name, value)| (Arc::clone(name), Some((**value).clone())))
                        .collect()
                };
                self.store_values(sql, "slices", changes_of(&earlier.slices))?;
                self.store_values(sql, "marks", changes_of(&earlier.marks))?;
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
        update: provenance::ProvenanceUpdate,
    ) -> DbResult<()> {
        self.stamp += 1;
        let (mut tables, mut carriers) =
            (ProvenanceTables::new(sql, key, self), CarrierTable::new(sql));
        provenance::apply_update(&mut tables, update, &mut carriers);
        self.provenance_flags = tables.finish()?;
        carriers.finish()
    }
}
