//! Reads a ledger: queries, lookups and indexes.

mod ledger_reader;
mod receipt;
mod side_tables;

pub use ledger_reader::LedgerReader;

use std::path::{Path, PathBuf};

use jiff::Timestamp;
use rusqlite::types::Value as Sql;
use rusqlite::{Connection, params, params_from_iter};
use serde::Serialize;
use serde_json::Value;
use toolgate::store::StoreError;
use toolgate::{BacktestPlace, CallId, Decision, Row, SessionKey};
use toolgate_json::Digest;

use crate::error::{DbError, DbResult};
use crate::keys::LedgerKeys;
use crate::open;
use crate::state_dir::StateDir;
use crate::store::ledger_error;
use crate::tables::ledger::{entity_index_key, parse_digest, to_i64, to_nanos, to_u64};
use crate::transaction::read_transaction;
use crate::verify::report::VerifyError;

/// A ledger that is open for reading. Other processes may write to it meanwhile.
pub struct Ledger {
    path: PathBuf,
    pub(crate) sql: Connection,
    pub(crate) state_dir: StateDir,
}

/// A row with its position in the ledger.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LedgerEntry {
    /// Its sequence number in the ledger.
    pub seq: u64,
    /// Its sequence number in its session.
    pub n: u64,
    /// The chain value of its session at this row.
    pub hash: Digest,
    /// The chain value of the ledger at this row.
    pub chain: Digest,
    /// The row.
    pub row: Row,
}

/// Selects rows. A row must match every field that is set.
#[derive(Debug, Clone, Default)]
pub struct RowFilter {
    /// At this time or later.
    pub since: Option<Timestamp>,
    /// At this time or earlier.
    pub until: Option<Timestamp>,
    /// Rows of this tool.
    pub tool: Option<String>,
    /// Rows of this agent.
    pub agent: Option<String>,
    /// Rows of other agents than this one.
    pub excluded_agent: Option<String>,
    /// Rows of this principal.
    pub principal: Option<String>,
    /// Rows of sessions with this name.
    pub session: Option<String>,
    /// Rows with this decision.
    pub decision: Option<Decision>,
    /// Rows with this error code.
    pub code: Option<String>,
    /// Rows that this rule or hook decided.
    pub rule: Option<String>,
    /// Rows with this entity (name and value). A redacted value is found by its mark.
    pub entity: Option<(String, Value)>,
    /// Rows after this sequence number.
    pub after_seq: Option<u64>,
    /// At most this many rows.
    pub limit: Option<usize>,
    /// Whether the newest row comes first.
    pub newest_first: bool,
}

impl Ledger {
    /// Opens an existing ledger.
    ///
    /// # Errors
    /// The file does not exist, is not a ledger, or cannot be read.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        // The state directory is beside the file itself, not beside a symbolic link to it.
        let path =
            std::fs::canonicalize(path.as_ref()).unwrap_or_else(|_| path.as_ref().to_owned());
        Self::open_with_state_dir(&path, &crate::state_dir::state_dir_for(&path))
    }

    /// Opens a ledger for verification. The error says whether the ledger is damaged or unreadable.
    ///
    /// # Errors
    /// As for [`Ledger::open`].
    pub fn open_to_verify(path: impl AsRef<Path>) -> Result<Self, VerifyError> {
        let path =
            std::fs::canonicalize(path.as_ref()).unwrap_or_else(|_| path.as_ref().to_owned());
        match open::open_readonly(&path) {
            Ok(sql) => Ok(Self {
                state_dir: StateDir::open_readonly(&crate::state_dir::state_dir_for(&path)),
                path,
                sql,
            }),
            Err(fault) => {
                let what = format!("the ledger {}: {fault}", path.display());
                Err(VerifyError { what, ..VerifyError::from(fault) })
            }
        }
    }

    /// Opens a ledger with another state directory than the default.
    ///
    /// # Errors
    /// As for [`Ledger::open`].
    pub fn open_with_state_dir(path: impl AsRef<Path>, state: &Path) -> Result<Self, StoreError> {
        let path = path.as_ref();
        let sql = open::open_readonly(path).map_err(|fault| ledger_error(path, &fault))?;
        Ok(Self { path: path.to_owned(), sql, state_dir: StateDir::open_readonly(state) })
    }

    pub(crate) fn with_path<T>(&self, done: DbResult<T>) -> Result<T, StoreError> {
        done.map_err(|fault| ledger_error(&self.path, &fault))
    }

    /// Calls `f` with each row that matches, until `f` returns `false`.
    ///
    /// # Errors
    /// The rows cannot be read, or `f` returns an error.
    pub fn query(
        &self,
        filter: &RowFilter,
        mut f: impl FnMut(LedgerEntry) -> Result<bool, StoreError>,
    ) -> Result<(), StoreError> {
        let (text, values) = self.with_path(self.build_query(filter))?;
        let mut statement =
            self.with_path(self.sql.prepare_cached(&text).map_err(DbError::from))?;
        let mut rows =
            self.with_path(statement.query(params_from_iter(values)).map_err(DbError::from))?;
        while let Some(row) = self.with_path(rows.next().map_err(DbError::from))? {
            if !f(self.with_path(parse_entry(row))?)? {
                break;
            }
        }
        Ok(())
    }

    /// Returns all rows that match.
    ///
    /// # Errors
    /// The rows cannot be read.
    pub fn find(&self, filter: &RowFilter) -> Result<Vec<LedgerEntry>, StoreError> {
        let mut found = Vec::new();
        self.query(filter, |entry| {
            found.push(entry);
            Ok(true)
        })?;
        Ok(found)
    }

    /// Counts the rows that match.
    ///
    /// # Errors
    /// The rows cannot be counted.
    pub fn count(&self, filter: &RowFilter) -> Result<u64, StoreError> {
        let counted = self.build_query(filter).and_then(|(text, values)| {
            let text = format!("SELECT count(*) FROM ({text})");
            Ok(to_u64(self.sql.query_row(&text, params_from_iter(values), |row| row.get(0))?))
        });
        self.with_path(counted)
    }

    fn build_query(&self, filter: &RowFilter) -> DbResult<(String, Vec<Sql>)> {
        let (mut conditions, mut values): (Vec<String>, Vec<Sql>) = (Vec::new(), Vec::new());
        let mut from = "ledger AS l";
        if let Some((name, value)) = &filter.entity {
            from = "entities AS e CROSS JOIN ledger AS l ON l.seq = e.seq";
            let keys = self.entity_index_keys(name, value)?;
            conditions
                .push(format!("e.name = ? AND e.value IN ({})", vec!["?"; keys.len()].join(", ")));
            values.push(name.clone().into());
            values.extend(keys.into_iter().map(Sql::from));
        }
        let mut require = |condition: &str, value: Option<Sql>| {
            if let Some(value) = value {
                conditions.push(condition.to_owned());
                values.push(value);
            }
        };
        let seq = if filter.entity.is_some() { "e.seq" } else { "l.seq" };
        require(&format!("{seq} > ?"), filter.after_seq.map(|after| to_i64(after).into()));
        require("l.at >= ?", filter.since.map(|at| to_nanos(at).into()));
        require("l.at <= ?", filter.until.map(|at| to_nanos(at).into()));
        require("l.tool = ?", filter.tool.clone().map(Into::into));
        require(
            "l.decision = ?",
            filter.decision.map(|decision| decision.name().to_owned().into()),
        );
        require("l.code = ?", filter.code.clone().map(Into::into));
        require("l.rule = ?", filter.rule.clone().map(Into::into));
        let owners = [
            ("session", &filter.session),
            ("principal", &filter.principal),
            ("agent", &filter.agent),
        ];
        let owners: Vec<_> =
            owners.into_iter().filter_map(|(column, name)| Some((column, name.clone()?))).collect();
        if !owners.is_empty() {
            let columns: Vec<String> =
                owners.iter().map(|(column, _)| format!("{column} = ?")).collect();
            conditions.push(format!(
                "l.session IN (SELECT id FROM sessions WHERE {})",
                columns.join(" AND ")
            ));
            values.extend(owners.into_iter().map(|(_, name)| Sql::from(name)));
        }
        if let Some(agent) = &filter.excluded_agent {
            conditions
                .push("l.session NOT IN (SELECT id FROM sessions WHERE agent = ?)".to_owned());
            values.push(agent.clone().into());
        }
        let conditions =
            if conditions.is_empty() { "1".to_owned() } else { conditions.join(" AND ") };
        let order = if filter.newest_first { "DESC" } else { "ASC" };
        let limit = filter.limit.map_or(-1, |limit| i64::try_from(limit).unwrap_or(i64::MAX));
        let text = format!(
            "SELECT l.seq, l.n, l.hash, l.chain, l.body FROM {from} WHERE {conditions} ORDER BY {seq} {order} LIMIT {limit}"
        );
        Ok((text, values))
    }

    /// Returns the index keys of an entity value: as given, as a JSON literal, and redacted.
    ///
    /// Keys that are not in the index are left out, because a query with one key is faster.
    fn entity_index_keys(&self, name: &str, value: &Value) -> DbResult<Vec<String>> {
        let mut keys = vec![entity_index_key(value)];
        if let Value::String(text) = value
            && let Ok(literal @ (Value::Number(_) | Value::Bool(_) | Value::Null)) =
                serde_json::from_str(text)
        {
            keys.push(entity_index_key(&literal));
        }
        if let Ok(redaction_key) = LedgerKeys::read_redaction_key(&self.state_dir.keys_dir()) {
            let mark = toolgate::redact::redaction_mark(redaction_key, value);
            keys.extend(mark.map(|mark| entity_index_key(&mark)));
        }
        let mut indexed_keys = Vec::new();
        for key in &keys {
            if self
                .sql
                .prepare_cached("SELECT 1 FROM entities WHERE name = ?1 AND value = ?2 LIMIT 1")?
                .exists(params![name, key])?
            {
                indexed_keys.push(key.clone());
            }
        }
        Ok(if indexed_keys.is_empty() { keys } else { indexed_keys })
    }

    /// Returns the row of a call, unless it was pruned, and the rows that settle the call.
    ///
    /// # Errors
    /// The rows cannot be read.
    pub fn rows_of_call(&self, call: CallId) -> Result<Vec<LedgerEntry>, StoreError> {
        let find = || -> DbResult<Vec<LedgerEntry>> {
            let columns = "seq, n, hash, chain, body";
            let mut statement =
                self.sql.prepare(&format!("SELECT {columns} FROM ledger WHERE call = ?1"))?;
            let mut rows = statement.query([call.as_bytes().as_slice()])?;
            let mut found: Vec<LedgerEntry> =
                rows.next()?.map(parse_entry).transpose()?.into_iter().collect();
            // The session of a pruned row is unknown, so search all sessions.
            let condition = if found.is_empty() {
                "?1 IS NOT NULL"
            } else {
                "session = (SELECT session FROM ledger WHERE call = ?1)"
            };
            let mut statement = self.sql.prepare(&format!(
                "SELECT {columns} FROM ledger WHERE {condition} AND decision = 'settled' AND json_extract(body, '$.settles.call') = ?2 ORDER BY seq"
            ))?;
            let mut rows =
                statement.query(params![call.as_bytes().as_slice(), call.to_string()])?;
            while let Some(row) = rows.next()? {
                found.push(parse_entry(row)?);
            }
            Ok(found)
        };
        self.with_path(read_transaction(&self.sql, |_| find()))
    }

    /// Returns at most 5 calls whose ids begin or end with these hexadecimal digits.
    ///
    /// # Errors
    /// The rows cannot be read.
    pub fn find_calls(&self, part: &str) -> Result<Vec<CallId>, StoreError> {
        let find = || -> DbResult<Vec<CallId>> {
            let digits: String = part.chars().filter(char::is_ascii_hexdigit).collect();
            let mut statement = self.sql.prepare(
                "SELECT call FROM ledger WHERE hex(call) LIKE ?1 OR hex(call) LIKE ?2 LIMIT 5",
            )?;
            let calls = statement
                .query_map([format!("{digits}%"), format!("%{digits}")], |row| {
                    row.get::<_, Vec<u8>>(0)
                })?;
            let calls = calls.collect::<Result<Vec<_>, _>>()?;
            Ok(calls
                .into_iter()
                .filter_map(|bytes| bytes.try_into().ok().map(CallId::from_bytes))
                .collect())
        };
        self.with_path(find())
    }

    /// Returns the names of entities in the ledger.
    ///
    /// # Errors
    /// The entities cannot be read.
    pub fn entity_names(&self) -> Result<Vec<String>, StoreError> {
        let find = || -> DbResult<Vec<String>> {
            // One query for each name is faster than `DISTINCT`: there are few names and many rows.
            let mut statement = self
                .sql
                .prepare("SELECT name FROM entities WHERE name > ?1 ORDER BY name LIMIT 1")?;
            let mut names: Vec<String> = Vec::new();
            while names.len() < 20 {
                let last = names.last().cloned().unwrap_or_default();
                let mut rows = statement.query([last])?;
                let Some(row) = rows.next()? else { break };
                names.push(row.get(0)?);
            }
            Ok(names)
        };
        self.with_path(find())
    }

    /// Returns the sessions with this name, or all sessions.
    ///
    /// # Errors
    /// The sessions cannot be read.
    pub fn sessions(&self, name: Option<&str>) -> Result<Vec<SessionKey>, StoreError> {
        let find = || -> DbResult<Vec<SessionKey>> {
            let mut statement = self
                .sql
                .prepare("SELECT agent, principal, session FROM sessions WHERE rows > 0 AND (?1 IS NULL OR session = ?1) ORDER BY id")?;
            let keys = statement.query_map([name], |row| {
                Ok(SessionKey::new(
                    row.get::<_, String>(0)?,
                    row.get::<_, String>(1)?,
                    row.get::<_, String>(2)?,
                ))
            })?;
            Ok(keys.collect::<Result<_, _>>()?)
        };
        self.with_path(find())
    }

    /// Counts the sessions of each agent, and for each of its tools the sessions that used it.
    ///
    /// # Errors
    /// The ledger cannot be read.
    pub fn sessions_by_tool(&self) -> Result<Vec<(String, Option<String>, u64)>, StoreError> {
        let find = || -> DbResult<Vec<(String, Option<String>, u64)>> {
            let mut found = Vec::new();
            for (text, has_tool) in [
                ("SELECT agent, count(*), NULL FROM sessions WHERE rows > 0 GROUP BY agent", false),
                (
                    "SELECT s.agent, count(DISTINCT l.session), l.tool FROM ledger l JOIN sessions s ON s.id = l.session GROUP BY s.agent, l.tool",
                    true,
                ),
            ] {
                let mut statement = self.sql.prepare(text)?;
                let mut rows = statement.query([])?;
                while let Some(row) = rows.next()? {
                    let tool: Option<String> = if has_tool { row.get(2)? } else { None };
                    found.push((row.get(0)?, tool, crate::tables::ledger::to_u64(row.get(1)?)));
                }
            }
            Ok(found)
        };
        self.with_path(find())
    }

    /// Returns the positions of an agent's rows in a period.
    ///
    /// # Errors
    /// The rows cannot be read.
    pub fn backtest_places(
        &self,
        agent: &str,
        since: Option<Timestamp>,
        until: Option<Timestamp>,
    ) -> Result<Vec<BacktestPlace>, StoreError> {
        let find = || -> DbResult<Vec<BacktestPlace>> {
            let mut statement = self.sql.prepare(
                "SELECT seq, json_extract(body, '$.facts.after'), call FROM ledger
                 WHERE session IN (SELECT id FROM sessions WHERE agent = ?1) AND at >= ?2 AND at <= ?3 ORDER BY seq",
            )?;
            let (since, until) =
                (since.map_or(i64::MIN, to_nanos), until.map_or(i64::MAX, to_nanos));
            let rows = statement.query_map(params![agent, since, until], |row| {
                let after = row.get::<_, Option<i64>>(1)?.map(to_u64);
                Ok(BacktestPlace {
                    seq: to_u64(row.get(0)?),
                    seq_at_start: after,
                    call: CallId::from_bytes(row.get(2)?),
                })
            })?;
            Ok(rows.collect::<Result<_, _>>()?)
        };
        self.with_path(find())
    }

    /// Returns the digests of the configurations that decided an agent's calls in a period.
    ///
    /// # Errors
    /// The rows cannot be read.
    pub fn config_digests(
        &self,
        agent: &str,
        since: Option<Timestamp>,
        until: Option<Timestamp>,
    ) -> Result<Vec<Digest>, StoreError> {
        let find = || -> DbResult<Vec<Digest>> {
            let mut statement = self.sql.prepare(
                "SELECT DISTINCT json_extract(body, '$.config') FROM ledger
                 WHERE session IN (SELECT id FROM sessions WHERE agent = ?1) AND at >= ?2 AND at <= ?3",
            )?;
            let (since, until) =
                (since.map_or(i64::MIN, to_nanos), until.map_or(i64::MAX, to_nanos));
            let rows =
                statement.query_map(params![agent, since, until], |row| row.get::<_, String>(0))?;
            rows.map(|config| Ok(serde_json::from_value(Value::String(config?))?)).collect()
        };
        self.with_path(find())
    }

    /// Returns the row with a sequence number.
    ///
    /// # Errors
    /// The row cannot be read.
    pub fn find_row(&self, seq: u64) -> Result<Option<Row>, StoreError> {
        let find = || -> DbResult<Option<Row>> {
            let mut statement =
                self.sql.prepare_cached("SELECT body FROM ledger WHERE seq = ?1")?;
            let mut rows = statement.query([to_i64(seq)])?;
            let Some(row) = rows.next()? else { return Ok(None) };
            Ok(Some(serde_json::from_str(row.get_ref(0)?.as_str().unwrap_or_default())?))
        };
        self.with_path(find())
    }

    /// Returns the sequence number of the last pruned row, or 0.
    ///
    /// # Errors
    /// The ledger cannot be read.
    pub fn last_pruned_seq(&self) -> Result<u64, StoreError> {
        let find = || -> DbResult<u64> {
            let seq: Option<i64> =
                self.sql.query_row("SELECT max(seq) FROM prunes", [], |row| row.get(0))?;
            Ok(seq.map_or(0, to_u64))
        };
        self.with_path(find())
    }

    /// Returns the sequence number of the last row, or 0.
    ///
    /// # Errors
    /// The ledger cannot be read.
    pub fn last_seq(&self) -> Result<u64, StoreError> {
        self.with_path(crate::tables::ledger::read_head(&self.sql)).map(|head| head.seq)
    }
}

pub(crate) fn parse_entry(row: &rusqlite::Row<'_>) -> DbResult<LedgerEntry> {
    let seq = to_u64(row.get(0)?);
    let body = row.get_ref(4)?.as_str().map_err(|e| DbError::Message(format!("row {seq}: {e}")))?;
    Ok(LedgerEntry {
        seq,
        n: to_u64(row.get(1)?),
        hash: parse_digest(row.get_ref(2)?.as_blob().unwrap_or_default())?,
        chain: parse_digest(row.get_ref(3)?.as_blob().unwrap_or_default())?,
        row: serde_json::from_str(body)
            .map_err(|e| DbError::Message(format!("row {seq} cannot be read: {e}")))?,
    })
}
