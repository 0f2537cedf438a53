//! Finds the kill switch that pauses a call.

use std::sync::Arc;

use rusqlite::{Connection, OptionalExtension};
use toolgate::SessionKey;
use toolgate::store::PauseTarget;

use crate::error::DbResult;
use crate::tables::ledger;

/// Returns the kill switch that applies to a call, and its reason.
pub(super) fn find_pause(
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
        let reason: Option<String> = sql
            .prepare_cached("SELECT reason FROM paused WHERE target = ?1")?
            .query_row([ledger::canonical_text(&target)?], |row| row.get(0))
            .optional()?;
        if let Some(reason) = reason {
            return Ok(Some((target, reason)));
        }
    }
    Ok(None)
}
