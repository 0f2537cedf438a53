//! Verifies the rows of a ledger: links, columns, entities and definitions.

use std::collections::{BTreeSet, HashMap};

use rusqlite::params;
use toolgate::Row;
use toolgate_json::Digest;

use super::SessionChainCheck;
use crate::error::DbResult;
use crate::hash_chain;
use crate::reader::Ledger;
use crate::tables::ledger;
use crate::tables::ledger::{PruneRecord, parse_digest, to_i64, to_nanos, to_u64};
use crate::verify::report::{LedgerAnchor, VerifyError};

impl Ledger {
    /// Checks all rows, their links, columns and entities, and the definitions that they refer to.
    pub(super) fn check_rows(
        &self,
        sessions: &mut HashMap<i64, SessionChainCheck>,
        pruned: Option<&PruneRecord>,
        checkpoints: &[(u64, Digest)],
        expected: [Option<(u64, Digest, &str)>; 2],
        progress: &mut dyn FnMut(u64),
    ) -> Result<CheckedRows, VerifyError> {
        let mut due: HashMap<u64, Vec<(Digest, &str)>> = HashMap::new();
        for (seq, chain) in checkpoints {
            due.entry(*seq).or_default().push((*chain, "a checkpoint"));
        }
        for (seq, chain, source) in expected.into_iter().flatten() {
            due.entry(seq).or_default().push((chain, source));
        }
        let mut head = LedgerAnchor { seq: 0, chain: hash_chain::genesis() };
        if let Some(pruned) = pruned {
            head = LedgerAnchor { seq: pruned.seq, chain: pruned.chain };
        }
        let mut configs = BTreeSet::new();
        let (mut count, mut entity_count) = (0_u64, 0_u64);
        let mut statement = self
            .sql
            .prepare("SELECT seq, session, n, call, at, tool, decision, gate, code, rule, hash, chain, body FROM ledger ORDER BY seq")?;
        let mut rows = statement.query([])?;
        loop {
            if let Some(chains) = due.remove(&head.seq) {
                for (chain, source) in chains {
                    if chain != head.chain {
                        return Err(VerifyError::at_row(
                            head.seq,
                            format!("the rows up to here do not match {source}"),
                        ));
                    }
                }
            }
            let Some(row) = rows.next()? else { break };
            let seq = to_u64(row.get(0)?);
            if seq != head.seq + 1 {
                return Err(VerifyError::at_row(head.seq + 1, "missing"));
            }
            let stored = StoredRow::from_row(row)
                .map_err(|fault| VerifyError::at_row(seq, fault.to_string()))?;
            let error = |what: &str| VerifyError {
                seq: Some(seq),
                call: stored.row.as_ref().map(|row| row.call),
                session: sessions
                    .get(&stored.session)
                    .map(|session_check| session_check.key.clone()),
                what: what.to_owned(),
                unchecked: false,
            };
            let Some(session_check) = sessions.get(&stored.session) else {
                return Err(error("the session of the row is missing"));
            };
            if stored.n != session_check.rows + 1 {
                return Err(error("not the next row of its session"));
            }
            let link =
                hash_chain::session_link(&session_check.head, stored.n, stored.body.as_bytes());
            if link != stored.hash {
                return Err(error("the row was changed"));
            }
            let chain = hash_chain::ledger_link(&head.chain, seq, &link);
            if chain != stored.chain {
                return Err(error("the row was moved"));
            }
            let Some(row) = &stored.row else { return Err(error("the row cannot be read")) };
            if !stored.has_matching_columns || row.key != session_check.key {
                return Err(error("the search columns do not match the row"));
            }
            for (name, value) in ledger::distinct_entities(row) {
                entity_count += 1;
                let is_indexed = self
                    .sql
                    .prepare_cached(
                        "SELECT 1 FROM entities WHERE name = ?1 AND value = ?2 AND seq = ?3",
                    )?
                    .exists(params![name, value, to_i64(seq)])?;
                if !is_indexed {
                    return Err(error(&format!("the entity index has no entry for its `{name}`")));
                }
            }
            configs.insert(row.config);
            let (n, session) = (stored.n, stored.session);
            if let Some(session_check) = sessions.get_mut(&session) {
                (session_check.rows, session_check.head) = (n, link);
            }
            head = LedgerAnchor { seq, chain };
            count += 1;
            if count % 1_000 == 0 {
                progress(count);
            }
        }
        if let Some((seq, _)) =
            due.iter().filter(|(seq, _)| **seq > head.seq).min_by_key(|(seq, _)| **seq)
        {
            return Err(VerifyError::at_row(
                head.seq + 1,
                format!("missing: row {seq} was signed, but the ledger ends here"),
            ));
        }
        let indexed: i64 =
            self.sql.query_row("SELECT count(*) FROM entities", [], |row| row.get(0))?;
        if to_u64(indexed) != entity_count {
            return Err(VerifyError::new(
                "the entity index has entries for entities that no row has",
            ));
        }
        self.check_definitions(&configs)?;
        Ok(CheckedRows { end: head, rows: count })
    }

    /// Checks that each agent definition that rows refer to is stored and matches its digest.
    fn check_definitions(&self, configs: &BTreeSet<Digest>) -> Result<(), VerifyError> {
        let mut statement = self.sql.prepare("SELECT digest, body FROM configs")?;
        let mut rows = statement.query([])?;
        while let Some(row) = rows.next()? {
            let name = parse_digest(row.get_ref(0)?.as_blob().unwrap_or_default())?;
            if Digest::of(row.get_ref(1)?.as_bytes().unwrap_or_default()) != name {
                return Err(VerifyError::new(format!("the configuration {name} was changed")));
            }
        }
        for config in configs.iter().filter(|config| **config != Digest::default()) {
            if !self
                .sql
                .prepare_cached("SELECT 1 FROM configs WHERE digest = ?1")?
                .exists([config.as_bytes().as_slice()])?
            {
                return Err(VerifyError::new(format!(
                    "the configuration {config} is missing, but rows refer to it"
                )));
            }
        }
        Ok(())
    }
}

/// End and number of the checked rows.
pub(super) struct CheckedRows {
    pub(super) end: LedgerAnchor,
    pub(super) rows: u64,
}

/// A stored row with its columns.
struct StoredRow {
    session: i64,
    n: u64,
    hash: Digest,
    chain: Digest,
    body: String,
    row: Option<Row>,
    /// Whether the columns match the body.
    has_matching_columns: bool,
}

impl StoredRow {
    fn from_row(stored: &rusqlite::Row<'_>) -> DbResult<Self> {
        let body: String = stored.get(12)?;
        let row: Option<Row> = serde_json::from_str(&body).ok();
        let text = |column: usize| stored.get::<_, Option<String>>(column);
        let has_matching_columns = match &row {
            Some(row) => {
                stored.get_ref(3)?.as_blob().is_ok_and(|call| call == row.call.as_bytes())
                    && stored.get::<_, i64>(4)? == to_nanos(row.at)
                    && text(5)?.as_deref() == Some(&*row.tool)
                    && text(6)?.as_deref() == Some(row.decision.name())
                    && text(7)?.as_deref() == Some(row.gate.name())
                    && text(8)?.as_deref() == row.code()
                    && text(9)? == row.rule
            }
            None => false,
        };
        Ok(Self {
            session: stored.get(1)?,
            n: to_u64(stored.get(2)?),
            hash: parse_digest(stored.get_ref(10)?.as_blob().unwrap_or_default())?,
            chain: parse_digest(stored.get_ref(11)?.as_blob().unwrap_or_default())?,
            body,
            row,
            has_matching_columns,
        })
    }
}
