//! Appends, signs and prunes ledger rows.

use jiff::Timestamp;
use rusqlite::{Connection, OptionalExtension, params};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use toolgate::Row;
use toolgate_json::{Digest, serialize_canonical, to_canonical_bytes};

use crate::error::{DbError, DbResult};
use crate::hash_chain;
use crate::keys::LedgerKeys;
use crate::state_dir::HighWaterMark;
use crate::tables::sessions::SessionHeader;
use crate::transaction::WriteTransaction;

/// Last row of the ledger and the chain value there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LedgerHead {
    pub(crate) seq: u64,
    pub(crate) chain: Digest,
}

/// Content of a checkpoint, which is then signed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Checkpoint {
    /// Id of the ledger.
    pub(crate) store: String,
    /// The last row.
    pub(crate) seq: u64,
    /// The chain value at that row. It covers every row, so it fixes the head of each session.
    pub(crate) chain: Digest,
    pub(crate) at: Timestamp,
    /// The key that signs from here on, if it changes here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) next_key: Option<String>,
    /// The key that signed until here, if it changed here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) previous_key: Option<String>,
}

/// Record of pruned rows, which is then signed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PruneRecord {
    pub(crate) store: String,
    /// The last pruned row, and the chain value there.
    pub(crate) seq: u64,
    pub(crate) chain: Digest,
    /// Digest over the heads of all sessions that lost rows.
    pub(crate) anchors: Digest,
    pub(crate) at: Timestamp,
}

/// Returns the bytes to sign.
pub(crate) fn signed_statement(kind: &str, body: &str) -> Vec<u8> {
    format!("toolgate-{kind}-v1\0{body}").into_bytes()
}

pub(crate) fn parse_digest(bytes: &[u8]) -> DbResult<Digest> {
    let bytes: [u8; 32] = bytes
        .try_into()
        .map_err(|_| DbError::Message("a stored digest does not have 32 bytes".to_owned()))?;
    Ok(Digest::from_bytes(bytes))
}

/// Converts to nanoseconds since 1970.
pub(crate) fn to_nanos(at: Timestamp) -> i64 {
    let nanos = at.as_nanosecond();
    i64::try_from(nanos).unwrap_or(if nanos < 0 { i64::MIN } else { i64::MAX })
}

pub(crate) fn to_u64(n: i64) -> u64 {
    u64::try_from(n).unwrap_or(0)
}

pub(crate) fn to_i64(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// Reads the head of the ledger. If all rows were pruned, the record of the pruning has it.
pub(crate) fn read_head(sql: &Connection) -> DbResult<LedgerHead> {
    let read = |row: &rusqlite::Row<'_>| Ok((row.get::<_, i64>(0)?, row.get::<_, Vec<u8>>(1)?));
    let last = sql
        .prepare_cached("SELECT seq, chain FROM ledger ORDER BY seq DESC LIMIT 1")?
        .query_row([], read)
        .optional()?;
    if let Some((seq, chain)) = last {
        return Ok(LedgerHead { seq: to_u64(seq), chain: parse_digest(&chain)? });
    }
    let pruned: Option<String> = sql
        .prepare_cached("SELECT body FROM prunes ORDER BY seq DESC LIMIT 1")?
        .query_row([], |row| row.get(0))
        .optional()?;
    match pruned {
        Some(body) => {
            let pruned: PruneRecord = serde_json::from_str(&body)?;
            Ok(LedgerHead { seq: pruned.seq, chain: pruned.chain })
        }
        None => Ok(LedgerHead { seq: 0, chain: hash_chain::genesis() }),
    }
}

/// Returns the index key of an entity value: its canonical JSON, or a digest if that is too long.
pub(crate) fn entity_index_key(value: &Value) -> String {
    let text = to_canonical_bytes(value);
    if text.len() > 512 {
        format!("sha256:{}", Digest::of(&text))
    } else {
        String::from_utf8(text).unwrap_or_default()
    }
}

/// Returns the entities of a row without duplicates.
pub(crate) fn distinct_entities(row: &Row) -> Vec<(&str, String)> {
    let mut entities: Vec<(&str, String)> =
        row.entities.iter().map(|(name, value)| (&**name, entity_index_key(value))).collect();
    entities.sort_unstable();
    entities.dedup();
    entities
}

/// Appends a row to the ledger and to the chain of its session. The caller saves the session.
pub(crate) fn append_to_chains(
    tx: &mut WriteTransaction<'_>,
    session: &mut SessionHeader,
    row: &Row,
    body: &str,
) -> DbResult<(u64, Digest)> {
    store_definition(tx, row.config)?;
    let (seq, n) = (tx.head.seq + 1, session.rows + 1);
    let link = hash_chain::session_link(&session.head, n, body.as_bytes());
    let chain = hash_chain::ledger_link(&tx.head.chain, seq, &link);
    tx.sql
        .prepare_cached(
            "INSERT INTO ledger (seq, session, n, call, at, tool, decision, gate, code, rule, hash, chain, body)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13)",
        )?
        .execute(params![
            to_i64(seq),
            session.id,
            to_i64(n),
            row.call.as_bytes().as_slice(),
            to_nanos(row.at),
            &*row.tool,
            row.decision.name(),
            row.gate.name(),
            row.code(),
            row.rule,
            link.as_bytes().as_slice(),
            chain.as_bytes().as_slice(),
            body,
        ])?;
    for (name, value) in distinct_entities(row) {
        tx.sql
            .prepare_cached("INSERT INTO entities (name, value, seq) VALUES (?1, ?2, ?3)")?
            .execute(params![name, value, to_i64(seq)])?;
    }
    (session.rows, session.head) = (n, link);
    tx.head = LedgerHead { seq, chain };
    Ok((seq, link))
}

/// Stores the definition of an agent once, with the first row that it decided.
///
/// A stored definition that differs is repaired: the one in memory matches its digest.
pub(crate) fn store_definition(tx: &mut WriteTransaction<'_>, config: Digest) -> DbResult<()> {
    if tx.stored_configs.contains(&config) {
        return Ok(());
    }
    let known = crate::transaction::lock_unpoisoned(&tx.shared.definitions)
        .iter()
        .find(|(digest, _)| *digest == config)
        .map(|(_, body)| std::sync::Arc::clone(body));
    // A definition that is not registered yet may be registered later.
    if let Some(body) = known {
        tx.sql
            .prepare_cached(
                "INSERT INTO configs (digest, body) VALUES (?1, ?2)
                 ON CONFLICT (digest) DO UPDATE SET body = excluded.body WHERE body <> excluded.body",
            )?
            .execute(params![config.as_bytes().as_slice(), &*body])?;
        tx.stored_configs.insert(config);
    }
    Ok(())
}

/// Returns true if the ledger has a row for this call.
pub(crate) fn has_row(sql: &Connection, call: &toolgate::CallId) -> DbResult<bool> {
    Ok(sql
        .prepare_cached("SELECT 1 FROM ledger WHERE call = ?1")?
        .exists(params![call.as_bytes().as_slice()])?)
}

/// Signs a checkpoint at the head of the ledger.
pub(crate) fn sign_checkpoint(
    tx: &mut WriteTransaction<'_>,
    at: Timestamp,
) -> DbResult<HighWaterMark> {
    let keys = tx.current_keys()?;
    sign_head(tx, at, &keys, None, None)
}

/// Changes the signing key. The old key signs the new one, and the new key signs the old one.
pub(crate) fn rotate_key(
    tx: &mut WriteTransaction<'_>,
    at: Timestamp,
    new: &LedgerKeys,
) -> DbResult<HighWaterMark> {
    let old = tx.current_keys()?;
    sign_head(tx, at, &old, Some(new.public_key().to_string()), None)?;
    tx.sql.execute("UPDATE meta SET value = ?1 WHERE name = 'key'", [&**new.public_key()])?;
    sign_head(tx, at, new, None, Some(old.public_key().to_string()))
}

fn sign_head(
    tx: &WriteTransaction<'_>,
    at: Timestamp,
    keys: &LedgerKeys,
    next_key: Option<String>,
    previous_key: Option<String>,
) -> DbResult<HighWaterMark> {
    let LedgerHead { seq, chain } = tx.head;
    let body =
        Checkpoint { store: tx.shared.ledger_id.clone(), seq, chain, at, next_key, previous_key };
    let body = canonical_text(&body)?;
    let signature = keys.sign(&signed_statement("checkpoint", &body));
    tx.sql
        .prepare_cached(
            "INSERT INTO checkpoints (seq, body, key, signature) VALUES (?1, ?2, ?3, ?4)",
        )?
        .execute(params![to_i64(seq), body, &**keys.public_key(), signature])?;
    Ok(HighWaterMark { store: tx.shared.ledger_id.clone(), seq, chain })
}

/// Serializes a value as canonical JSON.
pub(crate) fn canonical_text(value: &impl Serialize) -> DbResult<String> {
    String::from_utf8(serialize_canonical(value)?).map_err(|e| DbError::Message(e.to_string()))
}

/// Computes the digest over the heads of all sessions that lost rows.
pub(crate) fn anchors_digest(sql: &Connection) -> DbResult<Digest> {
    let mut all = Sha256::new();
    let mut statement = sql.prepare("SELECT id, pruned, anchor, agent, principal, session FROM sessions WHERE pruned > 0 ORDER BY id")?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let (id, n, anchor): (i64, i64, Vec<u8>) = (row.get(0)?, row.get(1)?, row.get(2)?);
        let key = [row.get::<_, String>(3)?, row.get(4)?, row.get(5)?];
        all.update(to_canonical_bytes(&serde_json::json!(key)));
        all.update(id.to_be_bytes());
        all.update(n.to_be_bytes());
        all.update(anchor);
    }
    Ok(Digest::from_bytes(all.finalize().into()))
}

/// How many rows one transaction prunes, so that other writers get a turn in between.
const MAX_PRUNED_ROWS_PER_TRANSACTION: i64 = 5_000;

/// Deletes the entity index entries of pruned rows.
///
/// The entries are computed from the rows, because an index by row would slow down every call.
fn delete_entities(sql: &Connection, first: i64, last: i64) -> DbResult<()> {
    #[derive(Deserialize)]
    struct RowEntities {
        #[serde(default)]
        entities: Vec<(String, Value)>,
    }
    let mut bodies =
        sql.prepare_cached("SELECT seq, body FROM ledger WHERE seq BETWEEN ?1 AND ?2")?;
    let mut delete =
        sql.prepare_cached("DELETE FROM entities WHERE name = ?1 AND value = ?2 AND seq = ?3")?;
    let (mut rows, mut has_unreadable) = (bodies.query([first, last])?, false);
    while let Some(row) = rows.next()? {
        let seq: i64 = row.get(0)?;
        match serde_json::from_str::<RowEntities>(row.get_ref(1)?.as_str().unwrap_or_default()) {
            Ok(row) => {
                for (name, value) in &row.entities {
                    delete.execute(params![name, entity_index_key(value), seq])?;
                }
            }
            Err(_) => has_unreadable = true,
        }
    }
    // The entities of an unreadable row are unknown, so scan the whole index.
    if has_unreadable {
        sql.execute("DELETE FROM entities WHERE seq <= ?1", [last])?;
    }
    Ok(())
}

/// Records for each session how many rows it loses, and the hash of the last.
///
/// Reads only these rows.
const SET_SESSION_ANCHORS_SQL: &str =
    "UPDATE sessions SET pruned = g.n, anchor = (SELECT hash FROM ledger WHERE session = sessions.id AND n = g.n)
    FROM (SELECT session, max(n) AS n FROM ledger NOT INDEXED WHERE seq <= ?1 GROUP BY session) AS g WHERE g.session = sessions.id";

/// Finds the first checkpoint that stays. Checkpoints are in the order of their rows.
const FIRST_RETAINED_CHECKPOINT_SQL: &str =
    "SELECT rowid FROM checkpoints WHERE seq > ?1 ORDER BY rowid LIMIT 1";

/// Deletes checkpoints, except those where the key changed, which vouch for later keys.
const DELETE_CHECKPOINTS_SQL: &str = "DELETE FROM checkpoints
    WHERE rowid < ?1 AND json_extract(body, '$.next_key') IS NULL AND json_extract(body, '$.previous_key') IS NULL";

/// Prunes rows older than `before` from the start of the ledger, up to the first newer row.
///
/// A signed record of the pruning keeps the chain verifiable. Returns the number of pruned rows,
/// 0 if none are left.
pub(crate) fn prune_rows(
    tx: &mut WriteTransaction<'_>,
    before: Timestamp,
    now: Timestamp,
) -> DbResult<u64> {
    let first: Option<i64> =
        tx.sql.query_row("SELECT min(seq) FROM ledger", [], |row| row.get(0))?;
    let Some(first) = first else { return Ok(0) };
    // Search only this batch, by sequence: by time there may be many more rows.
    let last = first.saturating_add(MAX_PRUNED_ROWS_PER_TRANSACTION - 1).min(to_i64(tx.head.seq));
    let first_kept: Option<i64> = tx.sql.query_row(
        "SELECT min(seq) FROM ledger WHERE seq BETWEEN ?2 AND ?3 AND +at >= ?1",
        [to_nanos(before), first, last],
        |row| row.get(0),
    )?;
    let last_pruned = first_kept.map_or(last, |seq| seq - 1);
    let chain: Option<Vec<u8>> = tx
        .sql
        .query_row("SELECT chain FROM ledger WHERE seq = ?1", [last_pruned], |row| row.get(0))
        .optional()?;
    let Some(chain) = chain else { return Ok(0) };
    tx.sql.execute(SET_SESSION_ANCHORS_SQL, [last_pruned])?;
    delete_entities(tx.sql, first, last_pruned)?;
    let pruned = tx.sql.execute("DELETE FROM ledger WHERE seq <= ?1", [last_pruned])?;
    let first_checkpoint: Option<i64> = tx
        .sql
        .query_row(FIRST_RETAINED_CHECKPOINT_SQL, [last_pruned], |row| row.get(0))
        .optional()?;
    tx.sql.execute(DELETE_CHECKPOINTS_SQL, [first_checkpoint.unwrap_or(i64::MAX)])?;
    let body = PruneRecord {
        store: tx.shared.ledger_id.clone(),
        seq: to_u64(last_pruned),
        chain: parse_digest(&chain)?,
        anchors: anchors_digest(tx.sql)?,
        at: now,
    };
    let body = canonical_text(&body)?;
    let keys = tx.current_keys()?;
    let signature = keys.sign(&signed_statement("prune", &body));
    tx.sql.execute("DELETE FROM prunes", [])?;
    tx.sql.execute(
        "INSERT INTO prunes (seq, body, key, signature) VALUES (?1, ?2, ?3, ?4)",
        params![last_pruned, body, &**keys.public_key(), signature],
    )?;
    Ok(pruned as u64)
}

#[cfg(test)]
mod tests {
    #[test]
    fn pruning_does_not_scan_the_ledger() {
        let scans = crate::open::full_scans(super::SET_SESSION_ANCHORS_SQL);
        assert!(scans.iter().all(|step| !step.contains("ledger")), "{scans:?}");
    }

    #[test]
    fn pruning_does_not_scan_the_checkpoints() {
        let sql = crate::open::empty_ledger();
        for seq in 1..=1_000 {
            sql.execute(
                "INSERT INTO checkpoints (seq, body, key, signature) VALUES (?1, '{}', '', '')",
                [2 * seq],
            )
            .unwrap();
        }
        let mut first_kept = sql.prepare(super::FIRST_RETAINED_CHECKPOINT_SQL).unwrap();
        assert_eq!(first_kept.query_row([7], |row| row.get::<_, i64>(0)), Ok(4));
        let read = first_kept.get_status(rusqlite::StatementStatus::FullscanStep);
        assert!(read < 10, "{read} were read");
        assert_eq!(crate::open::full_scans(super::DELETE_CHECKPOINTS_SQL), Vec::<String>::new());
        assert_eq!(sql.execute(super::DELETE_CHECKPOINTS_SQL, [4]), Ok(3));
    }
}
