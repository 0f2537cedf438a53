//! Reads the other tables of a ledger: definitions, claims, approvals and pauses.

use jiff::Timestamp;
use rusqlite::OptionalExtension;
use toolgate::store::{Approval, ApprovalState, ClaimRecord, PauseTarget, StoreError};
use toolgate_json::Digest;

use super::Ledger;
use crate::error::DbResult;
use crate::tables::claims;
use crate::tables::claims::StoredClaim;
use crate::transaction::read_transaction;

impl Ledger {
    /// Returns the approvals that wait for an answer, oldest first.
    ///
    /// # Errors
    /// The approvals cannot be read.
    pub fn waiting_approvals(&self, now: Timestamp) -> Result<Vec<Approval>, StoreError> {
        let find = || -> DbResult<Vec<Approval>> {
            let mut statement =
                self.sql.prepare("SELECT body FROM approvals WHERE expires >= ?1 ORDER BY n")?;
            let mut rows = statement.query([crate::tables::ledger::to_nanos(now)])?;
            let mut found = Vec::new();
            while let Some(row) = rows.next()? {
                let approval: Approval =
                    serde_json::from_str(row.get_ref(0)?.as_str().unwrap_or_default())?;
                if approval.state == ApprovalState::Waiting {
                    found.push(approval);
                }
            }
            Ok(found)
        };
        self.with_path(find())
    }

    /// Returns the ids of all stored approvals, oldest first, including answered and expired ones.
    ///
    /// # Errors
    /// The approvals cannot be read.
    pub fn approval_ids(&self) -> Result<Vec<String>, StoreError> {
        let find = || -> DbResult<Vec<String>> {
            let mut statement = self.sql.prepare("SELECT id FROM approvals ORDER BY n")?;
            let ids = statement.query_map([], |row| row.get::<_, String>(0))?;
            let ids = ids.collect::<Result<Vec<_>, _>>()?;
            Ok(ids)
        };
        self.with_path(find())
    }

    /// Returns the definition of an agent by its digest in rows.
    ///
    /// # Errors
    /// The definition cannot be read.
    pub fn definition(&self, config: Digest) -> Result<Option<String>, StoreError> {
        let find = || -> DbResult<Option<String>> {
            let bytes = config.as_bytes().as_slice();
            Ok(self
                .sql
                .query_row("SELECT body FROM configs WHERE digest = ?1", [bytes], |row| row.get(0))
                .optional()?)
        };
        self.with_path(find())
    }

    /// Returns the pending claims: calls with effects whose outcome is unknown.
    ///
    /// # Errors
    /// The claims cannot be read.
    pub fn pending_claims(&self, now: Timestamp) -> Result<Vec<ClaimRecord>, StoreError> {
        let find = || -> DbResult<Vec<ClaimRecord>> {
            let unsettled = read_transaction(&self.sql, StoredClaim::read_unsettled)?;
            unsettled
                .into_iter()
                .filter(|claim| claim.is_pending(&self.state_dir, now))
                .map(claims::into_record)
                .collect()
        };
        self.with_path(find())
    }

    /// Returns the paused targets with their reasons.
    ///
    /// # Errors
    /// The table cannot be read.
    pub fn paused_targets(&self) -> Result<Vec<(PauseTarget, String)>, StoreError> {
        let find = || -> DbResult<Vec<(PauseTarget, String)>> {
            let mut statement =
                self.sql.prepare("SELECT target, reason FROM paused ORDER BY target")?;
            let mut rows = statement.query([])?;
            let mut found = Vec::new();
            while let Some(row) = rows.next()? {
                found.push((serde_json::from_str(&row.get::<_, String>(0)?)?, row.get(1)?));
            }
            Ok(found)
        };
        self.with_path(find())
    }

    /// Returns true if this agent, tool, principal or session occurs in the ledger.
    ///
    /// # Errors
    /// The ledger cannot be read.
    pub fn has_target(&self, target: &PauseTarget) -> Result<bool, StoreError> {
        let find = || -> DbResult<bool> {
            Ok(match target {
                PauseTarget::Agent(name) => self
                    .sql
                    .prepare("SELECT 1 FROM sessions WHERE agent = ?1")?
                    .exists([&**name])?,
                PauseTarget::Principal(name) => self
                    .sql
                    .prepare("SELECT 1 FROM sessions WHERE principal = ?1")?
                    .exists([&**name])?,
                PauseTarget::Session(key) => {
                    crate::tables::sessions::SessionHeader::find(&self.sql, key)?.is_some()
                }
                PauseTarget::Tool(name) => {
                    self.sql.prepare("SELECT 1 FROM ledger WHERE tool = ?1")?.exists([&**name])?
                        || self
                            .sql
                            .prepare("SELECT 1 FROM configs WHERE instr(body, ?1) > 0")?
                            .exists([format!("\"name\":\"{name}\"")])?
                }
            })
        };
        self.with_path(find())
    }
}
