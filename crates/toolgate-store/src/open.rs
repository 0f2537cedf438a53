//! Opens the database: checks that it is a ledger, migrates its schema and detects old copies.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags, OptionalExtension};
use toolgate_json::hex;

use crate::error::{DbError, DbResult};
use crate::keys::{LedgerKeys, random_bytes};
use crate::state_dir::StateDir;
use crate::tables::ledger;
use crate::tables::sessions::read_meta;

/// SQLite `application_id` of a ledger: "tgl1". Files of development versions have another one.
const APPLICATION_ID: i32 = 0x7467_6c31;

/// Schema migrations in order. A released migration is never changed.
const MIGRATIONS: [&str; 1] = [include_str!("../migrations/0001_schema.sql")];

/// How long SQLite waits while another process writes.
pub(crate) const BUSY_TIMEOUT: Duration = Duration::from_secs(10);

/// Checks that an existing file may be opened. A database of another program is not touched.
pub(crate) fn check_file(path: &Path) -> DbResult<()> {
    let Ok(file) = std::fs::metadata(path) else { return Ok(()) };
    check_regular_file(path)?;
    if file.len() == 0 {
        return Ok(());
    }
    let sql = Connection::open_with_flags(
        path,
        OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX,
    )?;
    sql.busy_timeout(BUSY_TIMEOUT)?;
    match schema_version(&sql).map(|_| ()) {
        // A process that is killed while it switches to WAL leaves a hot journal. The next writer
        // rolls it back.
        Err(DbError::Sql(error)) if has_hot_journal(&error) => match is_blank_database(path)? {
            true => Ok(()),
            false => {
                Err(DbError::Message("another program left the file in the middle of a change; open it with that program first".to_owned()))
            }
        },
        other => other,
    }
}

fn has_hot_journal(error: &rusqlite::Error) -> bool {
    error
        .sqlite_error()
        .is_some_and(|error| error.extended_code == rusqlite::ffi::SQLITE_READONLY_ROLLBACK)
}

/// Returns true if a database has at most one page, without tables, version or application id.
fn is_blank_database(path: &Path) -> DbResult<bool> {
    use std::io::Read;
    const DATABASE_HEADER_BYTES: usize = 108;
    let (mut file, mut header) =
        (std::fs::File::open(path)?, Vec::with_capacity(DATABASE_HEADER_BYTES));
    file.by_ref().take(DATABASE_HEADER_BYTES as u64).read_to_end(&mut header)?;
    let read_number = |at: std::ops::Range<usize>| {
        header
            .get(at)
            .map(|bytes| bytes.iter().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte)))
    };
    // `user_version`, `application_id`, and the number of entries on the first page.
    let is_bare = [60..64, 68..72, 103..105].into_iter().all(|at| read_number(at) == Some(0));
    Ok(is_bare
        && read_number(16..18)
            .is_some_and(|page| file.metadata().is_ok_and(|file| file.len() <= page)))
}

/// Rejects a path that exists and is not a regular file.
///
/// Opening a pipe would block. A missing file is reported by the caller.
fn check_regular_file(path: &Path) -> DbResult<()> {
    match std::fs::metadata(path) {
        Ok(file) if file.is_dir() => {
            Err(DbError::Message("is a directory; name a file".to_owned()))
        }
        Ok(file) if !file.is_file() => Err(DbError::Message("not a regular file".to_owned())),
        _ => Ok(()),
    }
}

/// Overwrites deleted data, so that free pages contain no pruned rows and no arguments of claims.
const SECURE_DELETE_SQL: &str = "PRAGMA secure_delete = ON";

/// Opens a connection for writing.
pub(crate) fn open_writable(path: &Path) -> DbResult<Connection> {
    let new = !path.exists();
    if new {
        // Other users must not read rows.
        use std::os::unix::fs::OpenOptionsExt;
        let created =
            std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
        match created {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(DbError::Message(format!(
                    "cannot create the file: {error}; check that its directory exists and is writable"
                )));
            }
            _ => {}
        }
    }
    let sql = Connection::open_with_flags(
        path,
        OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX,
    )?;
    sql.busy_timeout(BUSY_TIMEOUT)?;
    sql.set_prepared_statement_cache_capacity(256);
    // Applies to new files. A call changes a little in each of a dozen pages, and SQLite writes,
    // checksums and syncs whole pages, so small pages are faster.
    sql.execute_batch("PRAGMA page_size = 2048")?;
    let mode: String = sql.query_row("PRAGMA journal_mode = WAL", [], |row| row.get(0))?;
    if mode != "wal" {
        return Err(DbError::Message(format!(
            "cannot set the journal mode to WAL (it is `{mode}`); do not put the ledger on a network drive or in memory"
        )));
    }
    sql.execute_batch(
        "PRAGMA synchronous = FULL; PRAGMA temp_store = MEMORY; PRAGMA cache_size = -65536",
    )?;
    sql.execute_batch(SECURE_DELETE_SQL)?;
    migrate(&sql)?;
    Ok(sql)
}

/// Opens a connection for one call. Returns `None` if the ledger needs a migration first.
///
/// A long-lived process does the next WAL checkpoint.
pub(crate) fn open_current(path: &Path) -> DbResult<Option<Connection>> {
    check_regular_file(path)?;
    let sql = Connection::open_with_flags(
        path,
        OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX,
    )?;
    // The caller retries, and has to report an error before its client times out.
    sql.busy_timeout(Duration::from_secs(1))?;
    sql.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
    sql.execute_batch(SECURE_DELETE_SQL)?;
    let (application, found) = read_version(&sql)?;
    if application != APPLICATION_ID || found != MIGRATIONS.len() {
        return Ok(None);
    }
    Ok(Some(sql))
}

/// Opens a read-only connection.
pub(crate) fn open_readonly(path: &Path) -> DbResult<Connection> {
    if !path.exists() {
        return Err(DbError::Message(
            "no such file; name an existing ledger with `--store`".to_owned(),
        ));
    }
    check_regular_file(path)?;
    let open = |uri: &str| -> DbResult<Connection> {
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY
            | OpenFlags::SQLITE_OPEN_NO_MUTEX
            | OpenFlags::SQLITE_OPEN_URI;
        let sql = Connection::open_with_flags(uri, flags).map_err(|error| match error {
            // The message must not show the URI. The caller adds the path.
            rusqlite::Error::SqliteFailure(code, Some(why)) => {
                rusqlite::Error::SqliteFailure(code, Some(why.replace(&format!(": {uri}"), "")))
            }
            other => other,
        })?;
        sql.busy_timeout(BUSY_TIMEOUT)?;
        sql.set_prepared_statement_cache_capacity(64);
        check_schema(&sql)?;
        Ok(sql)
    };
    let escaped =
        path.display().to_string().replace('%', "%25").replace('?', "%3f").replace('#', "%23");
    match open(&format!("file:{escaped}")) {
        // A copy in a read-only directory: no other process writes to it either.
        Err(DbError::Sql(error)) if is_open_denied(&error) && !has_wal(path) => {
            open(&format!("file:{escaped}?immutable=1"))
        }
        other => other,
    }
}

/// Returns true if SQLite could not create its WAL files beside the database.
fn is_open_denied(error: &rusqlite::Error) -> bool {
    matches!(
        error.sqlite_error_code(),
        Some(rusqlite::ErrorCode::CannotOpen | rusqlite::ErrorCode::ReadOnly)
    )
}

fn has_wal(path: &Path) -> bool {
    let mut wal = path.as_os_str().to_owned();
    wal.push("-wal");
    std::fs::metadata(wal).is_ok_and(|file| file.len() > 0)
}

fn read_version(sql: &Connection) -> DbResult<(i32, usize)> {
    let application = sql.query_row("PRAGMA application_id", [], |row| row.get(0))?;
    let version: i64 = sql.query_row("PRAGMA user_version", [], |row| row.get(0))?;
    Ok((application, usize::try_from(version).unwrap_or(usize::MAX)))
}

/// Checks that the database is a ledger with a known schema version.
fn check_schema(sql: &Connection) -> DbResult<()> {
    match read_version(sql)? {
        (APPLICATION_ID, version) if version > MIGRATIONS.len() => Err(DbError::Message(format!(
            "the schema version {version} is newer than this toolgate supports ({}); use a newer toolgate",
            MIGRATIONS.len()
        ))),
        (APPLICATION_ID, version) if version > 0 => Ok(()),
        _ => Err(DbError::Message("not a toolgate ledger".to_owned())),
    }
}

/// Returns the schema version: 0 for an empty database, an error for one of another program.
fn schema_version(sql: &Connection) -> DbResult<usize> {
    let (application, found) = read_version(sql)?;
    if application != 0 || found != 0 {
        return check_schema(sql).map(|()| found);
    }
    let tables: i64 = sql.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
    if tables > 0 {
        Err(DbError::Message(
            "the file is a database of another program; name another file".to_owned(),
        ))
    } else {
        Ok(0)
    }
}

fn migrate(sql: &Connection) -> DbResult<()> {
    let found = schema_version(sql)?;
    if found == MIGRATIONS.len() {
        return Ok(());
    }
    sql.execute_batch("BEGIN IMMEDIATE")?;
    let done = (|| -> DbResult<()> {
        // Another process may have migrated meanwhile.
        let (_, found) = read_version(sql)?;
        for step in MIGRATIONS.iter().skip(found) {
            sql.execute_batch(step)?;
        }
        sql.execute_batch(&format!(
            "PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {}",
            MIGRATIONS.len()
        ))?;
        Ok(())
    })();
    sql.execute_batch(if done.is_ok() { "COMMIT" } else { "ROLLBACK" })?;
    done
}

/// Returns the id and keys of a ledger, if it has them.
pub(crate) fn read_identity(
    sql: &Connection,
    state_dir: &StateDir,
) -> DbResult<Option<(String, LedgerKeys)>> {
    let known = read_meta(sql)?;
    let (Some(id), Some(fingerprint)) = (known.get("id"), known.get("keys")) else {
        return Ok(None);
    };
    Ok(Some((id.clone(), read_keys(&known, fingerprint, state_dir)?)))
}

/// Reads the keys of a ledger from its state directory.
fn read_keys(
    known: &BTreeMap<String, String>,
    fingerprint: &str,
    state_dir: &StateDir,
) -> DbResult<LedgerKeys> {
    let public = known.get("key").cloned().unwrap_or_default();
    let keys = LedgerKeys::open(&state_dir.keys_dir(), &public).map_err(|error| {
        DbError::Message(format!(
            "the keys of this ledger are missing ({error}); restore its `.state` directory"
        ))
    })?;
    if keys.fingerprint.to_string() != *fingerprint {
        return Err(DbError::Message(format!(
            "the keys in {} belong to another ledger; restore the `.state` directory of this one",
            state_dir.keys_dir().display()
        )));
    }
    Ok(keys)
}

/// Links a database to its state directory: reads or creates the ledger id and the keys.
pub(crate) fn link_state_dir(
    sql: &Connection,
    state_dir: &StateDir,
) -> DbResult<(String, LedgerKeys)> {
    sql.execute_batch("BEGIN IMMEDIATE")?;
    let linked = (|| -> DbResult<(String, LedgerKeys)> {
        let known = read_meta(sql)?;
        let keys = match known.get("keys") {
            Some(fingerprint) => read_keys(&known, fingerprint, state_dir)?,
            None => LedgerKeys::create(&state_dir.keys_dir())?,
        };
        let id = match known.get("id") {
            Some(id) => id.clone(),
            None => {
                let id = hex(&random_bytes::<16>()?);
                let mut put = sql.prepare("INSERT INTO meta (name, value) VALUES (?1, ?2)")?;
                put.execute(["id", &id])?;
                put.execute(["keys", &keys.fingerprint.to_string()])?;
                put.execute(["key", keys.public_key()])?;
                id
            }
        };
        Ok((id, keys))
    })();
    sql.execute_batch(if linked.is_ok() { "COMMIT" } else { "ROLLBACK" })?;
    linked
}

/// Checks that the database is not an older copy, which would let completed calls run again.
pub(crate) fn check_not_older(sql: &Connection, state_dir: &StateDir, id: &str) -> DbResult<()> {
    let Some(mark) = state_dir.read_mark()? else { return Ok(()) };
    let hint = "restore the newer file; or, to continue without the lost rows, move";
    let mark_path = state_dir.path().join("mark.json");
    if mark.store != id {
        return Err(DbError::Message(format!(
            "another ledger was here, with {} rows; {hint} {} away",
            mark.seq,
            mark_path.display()
        )));
    }
    let head = ledger::read_head(sql)?;
    let chain: Option<Vec<u8>> = sql
        .query_row("SELECT chain FROM ledger WHERE seq = ?1", [ledger::to_i64(mark.seq)], |row| {
            row.get(0)
        })
        .optional()?;
    if head.seq < mark.seq {
        return Err(DbError::Message(format!(
            "the ledger ends at row {}, but row {} was written: it was truncated, or an older copy was restored; {hint} {} away",
            head.seq,
            mark.seq,
            mark_path.display()
        )));
    }
    match chain {
        Some(chain) if ledger::parse_digest(&chain)? != mark.chain => Err(DbError::Message(
            format!("row {} was changed; run `toolgate audit verify`", mark.seq),
        )),
        _ => Ok(()),
    }
}

/// Creates an empty ledger in memory.
#[cfg(test)]
pub(crate) fn empty_ledger() -> Connection {
    let sql = Connection::open_in_memory().unwrap();
    migrate(&sql).unwrap();
    sql
}

/// Returns the steps of a query plan that scan a whole table.
#[cfg(test)]
pub(crate) fn full_scans(statement: &str) -> Vec<String> {
    let sql = empty_ledger();
    let mut plan = sql.prepare(&format!("EXPLAIN QUERY PLAN {statement}")).unwrap();
    let steps: Vec<String> =
        plan.raw_query().mapped(|row| row.get(3)).collect::<Result<_, _>>().unwrap();
    steps.into_iter().filter(|step| step.starts_with("SCAN")).collect()
}
