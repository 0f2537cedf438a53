//! Verifies the ledger: every row, every link and every signature. Reports the first problem.

pub(crate) mod report;
mod rows;

use std::collections::{BTreeSet, HashMap};

use rusqlite::OptionalExtension;
use toolgate::store::StoreError;
use toolgate::{CallId, Receipt, SessionKey};
use toolgate_json::Digest;

use crate::error::DbResult;
use crate::hash_chain;
use crate::keys::{LedgerKeys, is_valid_signature};
use crate::reader::Ledger;
use crate::state_dir::HighWaterMark;
use crate::tables::ledger;
use crate::tables::ledger::{Checkpoint, PruneRecord, parse_digest, to_u64};
use crate::verify::report::{TrustRoots, VerificationReport, VerifyError};

/// Progress of the verification in the chain of one session.
struct SessionChainCheck {
    key: SessionKey,
    rows: u64,
    head: Digest,
    /// Number of rows and head in the `sessions` table.
    stored: (u64, Digest),
}

impl Ledger {
    /// Checks every row, every link, every signature, and the high-water mark.
    ///
    /// Calls `progress` after every thousandth row.
    ///
    /// # Errors
    /// The first problem.
    pub fn verify(
        &self,
        trust: &TrustRoots,
        mut progress: impl FnMut(u64),
    ) -> Result<VerificationReport, VerifyError> {
        let keys = match &trust.key {
            Some(key) => vec![key.clone()],
            None => match LedgerKeys::read_own_public_keys(&self.state_dir.keys_dir()) {
                Ok(keys) if !keys.is_empty() => keys,
                Ok(_) => {
                    return Err(VerifyError::unchecked(format!(
                        "no key in {}; pass one with `--key`",
                        self.state_dir.keys_dir().display()
                    )));
                }
                Err(error) => {
                    return Err(VerifyError::unchecked(format!(
                        "cannot read a key in {} ({error}); pass one with `--key`",
                        self.state_dir.keys_dir().display()
                    )));
                }
            },
        };
        // Read the mark first, because it only moves forward. Then read the ledger in one
        // transaction, because other processes may write.
        let mark = self.state_dir.read_mark().map_err(|error| match error.kind() {
            std::io::ErrorKind::Other => VerifyError::new(error.to_string()),
            _ => VerifyError::unchecked(format!(
                "{}: {error}",
                self.state_dir.path().join("mark.json").display()
            )),
        })?;
        self.sql.execute_batch("BEGIN")?;
        let verified = self.check_ledger(trust, &keys, mark.as_ref(), &mut progress);
        self.sql.execute_batch("COMMIT")?;
        verified
    }

    fn check_ledger(
        &self,
        trust: &TrustRoots,
        keys: &[String],
        mark: Option<&HighWaterMark>,
        progress: &mut dyn FnMut(u64),
    ) -> Result<VerificationReport, VerifyError> {
        let (anchor, has_given_key) = (trust.anchor, trust.key.is_some());
        let damage: String =
            self.sql.query_row("PRAGMA integrity_check(1)", [], |row| row.get(0))?;
        if damage != "ok" {
            return Err(VerifyError::new(format!("the file is damaged: {damage}")));
        }
        let mut meta = crate::tables::sessions::read_meta(&self.sql)?;
        let (id, key) =
            (meta.remove("id").unwrap_or_default(), meta.remove("key").unwrap_or_default());
        let trusted = self.trusted_keys(keys)?;
        let pruned = self.read_prune_record(&id, &trusted)?;
        let mut sessions = self.read_session_heads()?;
        let checkpoints = self.read_checkpoints(&id, &key, &trusted, pruned.as_ref())?;
        if let (Some(anchor), Some(pruned)) = (anchor, &pruned)
            && anchor.seq < pruned.seq
        {
            return Err(VerifyError::unchecked(format!(
                "the anchor is at row {}, but rows up to {} were pruned; use a newer anchor",
                anchor.seq, pruned.seq
            )));
        }
        let checked = self.check_rows(
            &mut sessions,
            pruned.as_ref(),
            &checkpoints,
            [
                mark.map(|m| (m.seq, m.chain, "the high-water mark")),
                anchor.map(|a| (a.seq, a.chain, "the anchor")),
            ],
            progress,
        )?;
        for seen in sessions.values() {
            if (seen.rows, seen.head) != seen.stored {
                let what = format!(
                    "session `{}` of `{}` with `{}` should end at its row {}, but ends at {}",
                    seen.key.session, seen.key.principal, seen.key.agent, seen.stored.0, seen.rows
                );
                return Err(VerifyError::new(what));
            }
        }
        let signed_to = checkpoints
            .iter()
            .map(|(seq, _)| *seq)
            .max()
            .or(pruned.as_ref().map(|p| p.seq))
            .unwrap_or(0);
        if let Some(mark) = mark {
            if mark.store != id {
                return Err(VerifyError::new(format!(
                    "another ledger was here, with {} rows",
                    mark.seq
                )));
            }
            if checked.end.seq < mark.seq {
                return Err(VerifyError::at_row(
                    checked.end.seq + 1,
                    format!("missing: the ledger had {} rows, but ends here", mark.seq),
                ));
            }
            if signed_to < mark.seq {
                return Err(VerifyError::new(format!(
                    "signatures are missing: row {} was signed, but no signature is after row {signed_to}",
                    mark.seq
                )));
            }
        }
        if let Some(anchor) = anchor.filter(|anchor| checked.end.seq < anchor.seq) {
            return Err(VerifyError::at_row(
                checked.end.seq + 1,
                format!(
                    "missing: the ledger had {} rows when the anchor was printed, but ends here",
                    anchor.seq
                ),
            ));
        }
        // If the state directory has the keys, it should have the mark, too.
        if mark.is_none() && signed_to > 0 && !has_given_key && anchor.is_none() {
            return Err(VerifyError::new(
                "the high-water mark is missing, so missing rows cannot be detected; pass a saved anchor",
            ));
        }
        if signed_to == 0 && checked.rows > 0 && mark.is_none() && anchor.is_none() {
            return Err(VerifyError::new(
                "no row is signed, so nothing can be verified; open the ledger once to sign it, or pass an anchor",
            ));
        }
        Ok(VerificationReport {
            rows: checked.rows,
            sessions: sessions.len() as u64,
            pruned: pruned.map_or(0, |pruned| pruned.seq),
            checkpoints: checkpoints.len() as u64,
            signed_to,
            anchor: checked.end,
            keys: trusted.into_iter().collect(),
        })
    }

    /// Returns the given keys and those that they vouch for.
    ///
    /// At a rotation, the old key names the new one, and the new key the old one.
    fn trusted_keys(&self, keys: &[String]) -> Result<BTreeSet<String>, VerifyError> {
        let mut vouches: Vec<(String, String)> = Vec::new();
        let mut statement = self.sql.prepare(
            "SELECT body, key, signature FROM checkpoints
             WHERE json_extract(body, '$.next_key') IS NOT NULL OR json_extract(body, '$.previous_key') IS NOT NULL",
        )?;
        let mut rows = statement.query([])?;
        while let Some(row) = rows.next()? {
            let (body, key, signature): (String, String, String) =
                (row.get(0)?, row.get(1)?, row.get(2)?);
            if let Ok(checkpoint) = serde_json::from_str::<Checkpoint>(&body)
                && is_valid_signature(
                    &key,
                    &ledger::signed_statement("checkpoint", &body),
                    &signature,
                )
            {
                vouches.extend(
                    checkpoint
                        .next_key
                        .into_iter()
                        .chain(checkpoint.previous_key)
                        .map(|other| (key.clone(), other)),
                );
            }
        }
        let mut trusted: BTreeSet<String> = keys.iter().cloned().collect();
        loop {
            let vouched: Vec<String> = vouches
                .iter()
                .filter(|(key, other)| trusted.contains(key) && !trusted.contains(other))
                .map(|(_, other)| other.clone())
                .collect();
            if vouched.is_empty() {
                return Ok(trusted);
            }
            trusted.extend(vouched);
        }
    }

    /// Reads the record of pruned rows and checks its signature.
    fn read_prune_record(
        &self,
        id: &str,
        trusted: &BTreeSet<String>,
    ) -> Result<Option<PruneRecord>, VerifyError> {
        let read = |row: &rusqlite::Row<'_>| {
            Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?, row.get::<_, String>(2)?))
        };
        let found = self
            .sql
            .query_row(
                "SELECT body, key, signature FROM prunes ORDER BY seq DESC LIMIT 1",
                [],
                read,
            )
            .optional()?;
        let Some((body, key, signature)) = found else { return Ok(None) };
        if !trusted.contains(&key) {
            return Err(VerifyError::new(format!(
                "the record of pruned rows is signed with {key}, which is not a trusted key"
            )));
        }
        let wrong = || VerifyError::new("the record of pruned rows does not match its signature");
        let pruned: PruneRecord = serde_json::from_str(&body).map_err(|_| wrong())?;
        let is_valid =
            is_valid_signature(&key, &ledger::signed_statement("prune", &body), &signature);
        if !is_valid || pruned.store != id || ledger::anchors_digest(&self.sql)? != pruned.anchors {
            return Err(wrong());
        }
        Ok(Some(pruned))
    }

    /// Returns the last pruned row, if rows were pruned after the call id was created.
    ///
    /// The row of the call may be one of the pruned rows.
    ///
    /// # Errors
    /// The ledger cannot be read.
    pub fn pruned_since(&self, call: CallId) -> Result<Option<u64>, StoreError> {
        let find = || -> DbResult<Option<u64>> {
            let last = self
                .sql
                .query_row("SELECT body FROM prunes ORDER BY seq DESC LIMIT 1", [], |row| {
                    row.get::<_, String>(0)
                })
                .optional()?;
            let Some(pruned) =
                last.map(|body| serde_json::from_str::<PruneRecord>(&body)).transpose()?
            else {
                return Ok(None);
            };
            // A call id begins with its creation time in milliseconds.
            let created_at_ms = call
                .as_bytes()
                .iter()
                .take(6)
                .fold(0_i64, |millis, byte| (millis << 8) | i64::from(*byte));
            Ok((created_at_ms <= pruned.at.as_millisecond()).then_some(pruned.seq))
        };
        self.with_path(find())
    }

    fn read_session_heads(&self) -> Result<HashMap<i64, SessionChainCheck>, VerifyError> {
        let mut statement = self.sql.prepare(
            "SELECT id, agent, principal, session, rows, head, pruned, anchor FROM sessions",
        )?;
        let mut rows = statement.query([])?;
        let mut sessions = HashMap::new();
        while let Some(row) = rows.next()? {
            let key = SessionKey::new(
                row.get::<_, String>(1)?,
                row.get::<_, String>(2)?,
                row.get::<_, String>(3)?,
            );
            let anchor: Option<Vec<u8>> = row.get(7)?;
            let pruned = to_u64(row.get(6)?);
            let head = match anchor {
                Some(anchor) if pruned > 0 => parse_digest(&anchor)?,
                _ => hash_chain::session_genesis(&key),
            };
            let stored =
                (to_u64(row.get(4)?), parse_digest(row.get_ref(5)?.as_blob().unwrap_or_default())?);
            sessions.insert(row.get(0)?, SessionChainCheck { key, rows: pruned, head, stored });
        }
        Ok(sessions)
    }

    /// Reads the checkpoints and checks that the key that was current at the time signed each.
    fn read_checkpoints(
        &self,
        id: &str,
        next_signer: &str,
        trusted: &BTreeSet<String>,
        pruned: Option<&PruneRecord>,
    ) -> Result<Vec<(u64, Digest)>, VerifyError> {
        let mut statement =
            self.sql.prepare("SELECT body, key, signature, seq FROM checkpoints ORDER BY rowid")?;
        let mut rows = statement.query([])?;
        let mut found: Vec<(u64, Digest)> = Vec::new();
        // After a rotation, the old key signs nothing. The first checkpoint left has the first key.
        let mut current_key: Option<String> = None;
        while let Some(row) = rows.next()? {
            let (body, key, signature): (String, String, String) =
                (row.get(0)?, row.get(1)?, row.get(2)?);
            let seq = to_u64(row.get(3)?);
            let wrong =
                |what: &str| VerifyError::new(format!("the checkpoint at row {seq} {what}"));
            if !trusted.contains(&key) {
                return Err(wrong(&format!("is signed with {key}, which is not a trusted key")));
            }
            let checkpoint: Checkpoint =
                serde_json::from_str(&body).map_err(|_| wrong("cannot be read"))?;
            if !is_valid_signature(&key, &ledger::signed_statement("checkpoint", &body), &signature)
                || checkpoint.seq != seq
            {
                return Err(wrong("does not match its signature"));
            }
            if checkpoint.store != id {
                return Err(wrong("belongs to another ledger"));
            }
            if let Some(current_key) = current_key.filter(|current_key| *current_key != key) {
                return Err(wrong(&format!(
                    "is signed with {key}, but {current_key} was current: a key rotation was undone"
                )));
            }
            current_key = Some(checkpoint.next_key.unwrap_or(key));
            if pruned.is_none_or(|pruned| seq > pruned.seq) {
                found.push((seq, checkpoint.chain));
            }
        }
        if let Some(current_key) = current_key.filter(|current_key| current_key != next_signer) {
            return Err(VerifyError::new(format!(
                "the next signature would use {next_signer}, but {current_key} is current: a key rotation was undone"
            )));
        }
        Ok(found)
    }
}

/// Verifies a receipt with the public key of the ledger only.
#[must_use]
pub fn check_receipt(receipt: &Receipt, key: &str) -> bool {
    *receipt.key == *key
        && receipt
            .to_signed_bytes()
            .is_ok_and(|statement| is_valid_signature(key, &statement, &receipt.signature))
}
