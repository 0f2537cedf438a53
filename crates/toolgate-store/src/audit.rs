//! Reading a ledger.

mod beside;
mod receipt;

use std::path::{Path, PathBuf};

use jiff::Timestamp;
use rusqlite::types::Value as Sql;
use rusqlite::{Connection, params, params_from_iter};
use serde::Serialize;
use serde_json::Value;
use toolgate::json::Digest;
use toolgate::store::StoreError;
use toolgate::{BacktestPlace, CallId, Decision, Row, SessionKey};

use crate::fault::{Done, Fault};
use crate::flaw::Flaw;
use crate::home::Home;
use crate::keys::Keys;
use crate::ledger::{digest, nanos, signed, spelling, unsigned};
use crate::open;
use crate::tx::at_once;

/// A ledger to read, while others may write it.
pub struct Ledger {
    path: PathBuf,
    pub(crate) sql: Connection,
    pub(crate) home: Home,
}

/// One row at its place.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Entry {
    /// Where it stands in the ledger.
    pub seq: u64,
    /// Where it stands in its session.
    pub n: u64,
    /// Its link in the chain of its session.
    pub hash: Digest,
    /// The chain through all rows, at this one.
    pub chain: Digest,
    /// The row.
    pub row: Row,
}

/// Which rows are wanted. All that is said must hold.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    /// Not before.
    pub since: Option<Timestamp>,
    /// Not after.
    pub until: Option<Timestamp>,
    /// Of this tool.
    pub tool: Option<String>,
    /// Of this agent.
    pub agent: Option<String>,
    /// Not of this agent.
    pub without_agent: Option<String>,
    /// Of this principal.
    pub principal: Option<String>,
    /// Of sessions of this name.
    pub session: Option<String>,
    /// That ended so.
    pub decision: Option<Decision>,
    /// With this code.
    pub code: Option<String>,
    /// That this rule or hook decided.
    pub rule: Option<String>,
    /// About this entity: its name and its value. A value that was redacted is found by its mark.
    pub entity: Option<(String, Value)>,
    /// Behind this place in the ledger.
    pub after: Option<u64>,
    /// At most so many.
    pub most: Option<usize>,
    /// From the newest to the oldest.
    pub newest_first: bool,
}

impl Ledger {
    /// Opens a ledger that is there.
    ///
    /// # Errors
    /// It is not there, is no ledger, or cannot be read.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        // What stands beside it stands beside the file, not beside a link to it.
        let path = std::fs::canonicalize(path.as_ref()).unwrap_or_else(|_| path.as_ref().to_owned());
        Self::open_beside(&path, &crate::home::beside(&path))
    }

    /// Opens a ledger to check it: one that merely cannot be read is told from one that does not hold.
    ///
    /// # Errors
    /// As for [`Ledger::open`].
    pub fn open_to_verify(path: impl AsRef<Path>) -> Result<Self, Flaw> {
        let path = std::fs::canonicalize(path.as_ref()).unwrap_or_else(|_| path.as_ref().to_owned());
        match open::reading(&path) {
            Ok(sql) => Ok(Self { home: Home::visit(&crate::home::beside(&path)), path, sql }),
            Err(fault) => {
                let what = format!("the ledger {}: {fault}", path.display());
                Err(Flaw { what, ..Flaw::from(fault) })
            }
        }
    }

    /// Opens a ledger whose keys and mark stand elsewhere than beside it.
    ///
    /// # Errors
    /// As for [`Ledger::open`].
    pub fn open_beside(path: impl AsRef<Path>, state: &Path) -> Result<Self, StoreError> {
        let path = path.as_ref();
        let sql = open::reading(path).map_err(|fault| StoreError(format!("the ledger {}: {fault}", path.display())))?;
        Ok(Self { path: path.to_owned(), sql, home: Home::visit(state) })
    }

    pub(crate) fn named<T>(&self, done: Done<T>) -> Result<T, StoreError> {
        done.map_err(|fault| StoreError(format!("the ledger {}: {fault}", self.path.display())))
    }

    /// Hands out the rows that are wanted, one by one, until there are no more or `f` says `false`.
    ///
    /// # Errors
    /// They cannot be read, or what `f` says.
    pub fn query(&self, filter: &Filter, mut f: impl FnMut(Entry) -> Result<bool, StoreError>) -> Result<(), StoreError> {
        let (text, values) = self.named(self.select(filter))?;
        let mut statement = self.named(self.sql.prepare_cached(&text).map_err(Fault::from))?;
        let mut rows = self.named(statement.query(params_from_iter(values)).map_err(Fault::from))?;
        while let Some(row) = self.named(rows.next().map_err(Fault::from))? {
            if !f(self.named(entry(row))?)? {
                break;
            }
        }
        Ok(())
    }

    /// The rows that are wanted, all at once.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn find(&self, filter: &Filter) -> Result<Vec<Entry>, StoreError> {
        let mut found = Vec::new();
        self.query(filter, |entry| {
            found.push(entry);
            Ok(true)
        })?;
        Ok(found)
    }

    /// How many rows are wanted.
    ///
    /// # Errors
    /// They cannot be counted.
    pub fn count(&self, filter: &Filter) -> Result<u64, StoreError> {
        let counted = self.select(filter).and_then(|(text, values)| {
            let text = format!("SELECT count(*) FROM ({text})");
            Ok(unsigned(self.sql.query_row(&text, params_from_iter(values), |row| row.get(0))?))
        });
        self.named(counted)
    }

    fn select(&self, filter: &Filter) -> Done<(String, Vec<Sql>)> {
        let (mut wanted, mut values): (Vec<String>, Vec<Sql>) = (Vec::new(), Vec::new());
        let mut from = "ledger AS l";
        if let Some((name, value)) = &filter.entity {
            from = "entities AS e CROSS JOIN ledger AS l ON l.seq = e.seq";
            let spellings = self.spellings(name, value)?;
            wanted.push(format!("e.name = ? AND e.value IN ({})", vec!["?"; spellings.len()].join(", ")));
            values.push(name.clone().into());
            values.extend(spellings.into_iter().map(Sql::from));
        }
        let mut want = |what: &str, value: Option<Sql>| {
            if let Some(value) = value {
                wanted.push(what.to_owned());
                values.push(value);
            }
        };
        let seq = if filter.entity.is_some() { "e.seq" } else { "l.seq" };
        want(&format!("{seq} > ?"), filter.after.map(|after| signed(after).into()));
        want("l.at >= ?", filter.since.map(|at| nanos(at).into()));
        want("l.at <= ?", filter.until.map(|at| nanos(at).into()));
        want("l.tool = ?", filter.tool.clone().map(Into::into));
        want("l.decision = ?", filter.decision.map(|decision| decision.name().to_owned().into()));
        want("l.code = ?", filter.code.clone().map(Into::into));
        want("l.rule = ?", filter.rule.clone().map(Into::into));
        let whose = [("session", &filter.session), ("principal", &filter.principal), ("agent", &filter.agent)];
        let whose: Vec<_> = whose.into_iter().filter_map(|(column, name)| Some((column, name.clone()?))).collect();
        if !whose.is_empty() {
            let named: Vec<String> = whose.iter().map(|(column, _)| format!("{column} = ?")).collect();
            wanted.push(format!("l.session IN (SELECT id FROM sessions WHERE {})", named.join(" AND ")));
            values.extend(whose.into_iter().map(|(_, name)| Sql::from(name)));
        }
        if let Some(agent) = &filter.without_agent {
            wanted.push("l.session NOT IN (SELECT id FROM sessions WHERE agent = ?)".to_owned());
            values.push(agent.clone().into());
        }
        let wanted = if wanted.is_empty() { "1".to_owned() } else { wanted.join(" AND ") };
        let order = if filter.newest_first { "DESC" } else { "ASC" };
        let most = filter.most.map_or(-1, |most| i64::try_from(most).unwrap_or(i64::MAX));
        let text = format!("SELECT l.seq, l.n, l.hash, l.chain, l.body FROM {from} WHERE {wanted} ORDER BY {seq} {order} LIMIT {most}");
        Ok((text, values))
    }

    /// How an entity may stand in the ledger: as it is, as text, or redacted. Only what is there is looked for, because one
    /// spelling is found faster than several.
    fn spellings(&self, name: &str, value: &Value) -> Done<Vec<String>> {
        let mut spellings = vec![spelling(value)];
        if let Value::String(text) = value
            && let Ok(meant @ (Value::Number(_) | Value::Bool(_) | Value::Null)) = serde_json::from_str(text)
        {
            spellings.push(spelling(&meant));
        }
        if let Ok(key) = Keys::redaction(&self.home.keys()) {
            let mark = toolgate::redact::mark(key, value);
            spellings.extend(mark.map(|mark| spelling(&mark)));
        }
        let mut there = Vec::new();
        for spelling in &spellings {
            if self.sql.prepare_cached("SELECT 1 FROM entities WHERE name = ?1 AND value = ?2 LIMIT 1")?.exists(params![name, spelling])? {
                there.push(spelling.clone());
            }
        }
        Ok(if there.is_empty() { spellings } else { there })
    }

    /// The row of a call, unless it was pruned, and what was found out about it later.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn show(&self, call: CallId) -> Result<Vec<Entry>, StoreError> {
        let find = || -> Done<Vec<Entry>> {
            let columns = "seq, n, hash, chain, body";
            let mut statement = self.sql.prepare(&format!("SELECT {columns} FROM ledger WHERE call = ?1"))?;
            let mut rows = statement.query([call.as_bytes().as_slice()])?;
            let mut found: Vec<Entry> = rows.next()?.map(entry).transpose()?.into_iter().collect();
            // Of a row that is gone nobody knows the session.
            let whose = if found.is_empty() { "?1 IS NOT NULL" } else { "session = (SELECT session FROM ledger WHERE call = ?1)" };
            let mut statement = self.sql.prepare(&format!(
                "SELECT {columns} FROM ledger WHERE {whose} AND decision = 'settled' AND json_extract(body, '$.settles.call') = ?2 ORDER BY seq"
            ))?;
            let mut rows = statement.query(params![call.as_bytes().as_slice(), call.to_string()])?;
            while let Some(row) = rows.next()? {
                found.push(entry(row)?);
            }
            Ok(found)
        };
        self.named(at_once(&self.sql, |_| find()))
    }

    /// The calls whose names begin or end so, in hexadecimal digits; not more than a few.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn calls_named(&self, part: &str) -> Result<Vec<CallId>, StoreError> {
        let find = || -> Done<Vec<CallId>> {
            let digits: String = part.chars().filter(char::is_ascii_hexdigit).collect();
            let mut statement = self.sql.prepare("SELECT call FROM ledger WHERE hex(call) LIKE ?1 OR hex(call) LIKE ?2 LIMIT 5")?;
            let calls = statement.query_map([format!("{digits}%"), format!("%{digits}")], |row| row.get::<_, Vec<u8>>(0))?;
            let calls = calls.collect::<Result<Vec<_>, _>>()?;
            Ok(calls.into_iter().filter_map(|bytes| bytes.try_into().ok().map(CallId::from_bytes)).collect())
        };
        self.named(find())
    }

    /// What entities are called that rows are about.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn entity_names(&self) -> Result<Vec<String>, StoreError> {
        let find = || -> Done<Vec<String>> {
            // One after the other, each found by the one before: there are few names and many rows.
            let mut statement = self.sql.prepare("SELECT name FROM entities WHERE name > ?1 ORDER BY name LIMIT 1")?;
            let mut names: Vec<String> = Vec::new();
            while names.len() < 20 {
                let last = names.last().cloned().unwrap_or_default();
                let mut rows = statement.query([last])?;
                let Some(row) = rows.next()? else { break };
                names.push(row.get(0)?);
            }
            Ok(names)
        };
        self.named(find())
    }

    /// The sessions of this name; all, where none is said.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn sessions(&self, name: Option<&str>) -> Result<Vec<SessionKey>, StoreError> {
        let find = || -> Done<Vec<SessionKey>> {
            let mut statement = self
                .sql
                .prepare("SELECT agent, principal, session FROM sessions WHERE rows > 0 AND (?1 IS NULL OR session = ?1) ORDER BY id")?;
            let keys = statement.query_map([name], |row| {
                Ok(SessionKey::new(row.get::<_, String>(0)?, row.get::<_, String>(1)?, row.get::<_, String>(2)?))
            })?;
            Ok(keys.collect::<Result<_, _>>()?)
        };
        self.named(find())
    }

    /// In how many sessions of each agent a tool was used, and how many sessions it has.
    ///
    /// # Errors
    /// The ledger cannot be read.
    pub fn sessions_by_tool(&self) -> Result<Vec<(String, Option<String>, u64)>, StoreError> {
        let find = || -> Done<Vec<(String, Option<String>, u64)>> {
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
                    found.push((row.get(0)?, tool, crate::ledger::unsigned(row.get(1)?)));
                }
            }
            Ok(found)
        };
        self.named(find())
    }

    /// The places of an agent's rows of a period.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn index(&self, agent: &str, since: Option<Timestamp>, until: Option<Timestamp>) -> Result<Vec<BacktestPlace>, StoreError> {
        let find = || -> Done<Vec<BacktestPlace>> {
            let mut statement = self.sql.prepare(
                "SELECT seq, json_extract(body, '$.facts.after'), call FROM ledger
                 WHERE session IN (SELECT id FROM sessions WHERE agent = ?1) AND at >= ?2 AND at <= ?3 ORDER BY seq",
            )?;
            let (since, until) = (since.map_or(i64::MIN, nanos), until.map_or(i64::MAX, nanos));
            let rows = statement.query_map(params![agent, since, until], |row| {
                let after = row.get::<_, Option<i64>>(1)?.map(unsigned);
                Ok(BacktestPlace { seq: unsigned(row.get(0)?), after, call: CallId::from_bytes(row.get(2)?) })
            })?;
            Ok(rows.collect::<Result<_, _>>()?)
        };
        self.named(find())
    }

    /// The configurations that decided an agent's calls of a period.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn configs(&self, agent: &str, since: Option<Timestamp>, until: Option<Timestamp>) -> Result<Vec<Digest>, StoreError> {
        let find = || -> Done<Vec<Digest>> {
            let mut statement = self.sql.prepare(
                "SELECT DISTINCT json_extract(body, '$.config') FROM ledger
                 WHERE session IN (SELECT id FROM sessions WHERE agent = ?1) AND at >= ?2 AND at <= ?3",
            )?;
            let (since, until) = (since.map_or(i64::MIN, nanos), until.map_or(i64::MAX, nanos));
            let rows = statement.query_map(params![agent, since, until], |row| row.get::<_, String>(0))?;
            rows.map(|config| Ok(serde_json::from_value(Value::String(config?))?)).collect()
        };
        self.named(find())
    }

    /// The row at a place.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn row(&self, seq: u64) -> Result<Option<Row>, StoreError> {
        let find = || -> Done<Option<Row>> {
            let mut statement = self.sql.prepare_cached("SELECT body FROM ledger WHERE seq = ?1")?;
            let mut rows = statement.query([signed(seq)])?;
            let Some(row) = rows.next()? else { return Ok(None) };
            Ok(Some(serde_json::from_str(row.get_ref(0)?.as_str().unwrap_or_default())?))
        };
        self.named(find())
    }

    /// The last row that was pruned.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn pruned_to(&self) -> Result<u64, StoreError> {
        let find = || -> Done<u64> {
            let seq: Option<i64> = self.sql.query_row("SELECT max(seq) FROM prunes", [], |row| row.get(0))?;
            Ok(seq.map_or(0, unsigned))
        };
        self.named(find())
    }

    /// Where the ledger ends.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn last(&self) -> Result<u64, StoreError> {
        self.named(crate::ledger::tip(&self.sql)).map(|tip| tip.seq)
    }
}

pub(crate) fn entry(row: &rusqlite::Row<'_>) -> Done<Entry> {
    let seq = unsigned(row.get(0)?);
    let body = row.get_ref(4)?.as_str().map_err(|e| Fault::Said(format!("row {seq}: {e}")))?;
    Ok(Entry {
        seq,
        n: unsigned(row.get(1)?),
        hash: digest(row.get_ref(2)?.as_blob().unwrap_or_default())?,
        chain: digest(row.get_ref(3)?.as_blob().unwrap_or_default())?,
        row: serde_json::from_str(body).map_err(|e| Fault::Said(format!("row {seq} cannot be read: {e}")))?,
    })
}
