//! Stores approvals, with encrypted arguments.

use rusqlite::{Connection, OptionalExtension, params};
use toolgate::SessionKey;
use toolgate::store::{Approval, ApprovalState, Store as _, StoreError};
use toolgate_json::Digest;

use super::SqliteStore;
use crate::error::{DbError, DbResult};
use crate::tables::ledger::to_nanos;
use crate::tables::sessions::SessionHeader;
use crate::transaction::SharedStoreState;

/// Reads an approval and decrypts its arguments.
fn decrypt_approval(shared: &SharedStoreState, body: &str, sealed: &[u8]) -> DbResult<Approval> {
    let approval: Approval = serde_json::from_str(body)?;
    let opened = shared.keys().unseal(&format!("approval {}", approval.id), sealed);
    let opened = opened.ok_or_else(|| {
        DbError::Message("cannot decrypt an approval: another key encrypted it".to_owned())
    })?;
    Ok(Approval { arguments: serde_json::from_slice(&opened)?, ..approval })
}

/// Finds an approval by its id.
pub(super) fn find_approval(
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

/// Replaces the stored body of an approval.
pub(super) fn save_approval(sql: &Connection, approval: &Approval) -> DbResult<()> {
    sql.prepare_cached("UPDATE approvals SET body = ?2 WHERE id = ?1")?
        .execute(params![approval.id, serde_json::to_string(approval)?])?;
    Ok(())
}

impl SqliteStore {
    /// Inserts a request for approval.
    pub(super) async fn insert_approval(&self, approval: Approval) -> Result<(), StoreError> {
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

    /// Returns the newest approval for exactly this call.
    pub(super) async fn find_approval_for(
        &self,
        key: &SessionKey,
        digest: Digest,
    ) -> Result<Option<Approval>, StoreError> {
        let key = key.clone();
        self.read(move |sql, shared| {
            let Some(session) = SessionHeader::find(sql, &key)? else { return Ok(None) };
            let read =
                |row: &rusqlite::Row<'_>| Ok((row.get::<_, String>(0)?, row.get::<_, Vec<u8>>(1)?));
            let found = sql
                .prepare_cached("SELECT body, arguments FROM approvals WHERE session = ?1 AND digest = ?2 ORDER BY n DESC LIMIT 1")?
                .query_row(params![session.id, digest.as_bytes().as_slice()], read)
                .optional()?;
            found.map(|(body, sealed)| decrypt_approval(shared, &body, &sealed)).transpose()
        })
        .await
    }

    /// Answers a waiting approval; false if it no longer waits or this person may not answer.
    pub(super) async fn record_approval_answer(
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
}
