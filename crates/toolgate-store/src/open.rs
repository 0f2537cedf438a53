//! Opening a database: whose it is, which shape it has, and whether it is the newest that there was.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags, OptionalExtension};
use toolgate::json::hex;

use crate::fault::{Done, Fault};
use crate::home::Home;
use crate::keys::{Keys, random};
use crate::ledger;
use crate::session::meta;

/// What marks a file as ours: "tgat".
const APPLICATION: i32 = 0x7467_6174;

/// Numbered steps from one shape to the next. What was released is never changed, only added to.
const MIGRATIONS: [&str; 4] = [
    include_str!("../migrations/0001_ledger.sql"),
    include_str!("../migrations/0002_passes.sql"),
    include_str!("../migrations/0003_large_rows.sql"),
    include_str!("../migrations/0004_under_way.sql"),
];

/// How long another process may write before somebody gives up.
pub(crate) const BUSY: Duration = Duration::from_secs(10);

/// Whether a file that is there may be opened at all. What is somebody else's is not touched.
pub(crate) fn is_ours(path: &Path) -> Done<()> {
    let Ok(file) = std::fs::metadata(path) else { return Ok(()) };
    is_plain(path)?;
    if file.len() == 0 {
        return Ok(());
    }
    let sql = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
    sql.busy_timeout(BUSY)?;
    match shape(&sql).map(|_| ()) {
        // Whoever was killed while it was set to WAL has left half a change, which is undone by whoever writes to it.
        Err(Fault::Sql(error)) if is_cut_off(&error) => match is_blank(path)? {
            true => Ok(()),
            false => Err(Fault::Said("another program has left it in the middle of a change; let that program open it first".to_owned())),
        },
        other => other,
    }
}

fn is_cut_off(error: &rusqlite::Error) -> bool {
    error.sqlite_error().is_some_and(|error| error.extended_code == rusqlite::ffi::SQLITE_READONLY_ROLLBACK)
}

/// Whether a database has its first page at most, and nobody's table, number or name stands in it.
fn is_blank(path: &Path) -> Done<bool> {
    use std::io::Read;
    const HEADER: usize = 108;
    let (mut file, mut header) = (std::fs::File::open(path)?, Vec::with_capacity(HEADER));
    file.by_ref().take(HEADER as u64).read_to_end(&mut header)?;
    let figure = |at: std::ops::Range<usize>| header.get(at).map(|bytes| bytes.iter().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte)));
    // Its number, whose it is, and how many entries its first page has.
    let is_bare = [60..64, 68..72, 103..105].into_iter().all(|at| figure(at) == Some(0));
    Ok(is_bare && figure(16..18).is_some_and(|page| file.metadata().is_ok_and(|file| file.len() <= page)))
}

/// A pipe would be waited for, and a device is nobody's ledger. What is not there is told by whoever looks for it.
fn is_plain(path: &Path) -> Done<()> {
    match std::fs::metadata(path) {
        Ok(there) if there.is_dir() => Err(Fault::Said("it is a directory; name a file".to_owned())),
        Ok(there) if !there.is_file() => Err(Fault::Said("it is no plain file; name one".to_owned())),
        _ => Ok(()),
    }
}

/// What is taken out is not to be read in free pages: rows that are pruned, and what a call asked for, which stands in its claim until it
/// ends.
const OVERWRITE: &str = "PRAGMA secure_delete = ON";

/// A connection that writes.
pub(crate) fn writing(path: &Path) -> Done<Connection> {
    let new = !path.exists();
    if new {
        // Rows are nobody else's business.
        use std::os::unix::fs::OpenOptionsExt;
        let made = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
        match made {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(Fault::Said(format!("it cannot be made: {error}; look whether the directory is there and can be written to")));
            }
            _ => {}
        }
    }
    let sql = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
    sql.busy_timeout(BUSY)?;
    sql.set_prepared_statement_cache_capacity(256);
    // Counts for a file that is new: a call changes a little in each of a dozen pages, and all of them are written, summed and synced.
    sql.execute_batch("PRAGMA page_size = 2048")?;
    let mode: String = sql.query_row("PRAGMA journal_mode = WAL", [], |row| row.get(0))?;
    if mode != "wal" {
        return Err(Fault::Said(format!(
            "its journal cannot be set to WAL (it is `{mode}`); a network drive or memory is no place for a ledger"
        )));
    }
    sql.execute_batch("PRAGMA synchronous = FULL; PRAGMA temp_store = MEMORY; PRAGMA cache_size = -65536")?;
    sql.execute_batch(OVERWRITE)?;
    migrate(&sql)?;
    Ok(sql)
}

/// A connection to a ledger that is ready, for one call. The next checkpoint is left to whoever has the time.
pub(crate) fn ready(path: &Path) -> Done<Option<Connection>> {
    is_plain(path)?;
    let sql = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
    // Whoever makes one call tries several times, and has to say what is wrong before its client stops waiting.
    sql.busy_timeout(Duration::from_secs(1))?;
    sql.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
    sql.execute_batch(OVERWRITE)?;
    let (application, found) = version(&sql)?;
    if application != APPLICATION || found != MIGRATIONS.len() {
        return Ok(None);
    }
    Ok(Some(sql))
}

/// A connection that only reads.
pub(crate) fn reading(path: &Path) -> Done<Connection> {
    if !path.exists() {
        return Err(Fault::Said("there is no such file; `--store` names the ledger that toolgate wrote".to_owned()));
    }
    is_plain(path)?;
    let open = |uri: &str| -> Done<Connection> {
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX | OpenFlags::SQLITE_OPEN_URI;
        let sql = Connection::open_with_flags(uri, flags).map_err(|error| match error {
            // How it was asked for is nobody's business; whoever tells of it names the file.
            rusqlite::Error::SqliteFailure(code, Some(why)) => {
                rusqlite::Error::SqliteFailure(code, Some(why.replace(&format!(": {uri}"), "")))
            }
            other => other,
        })?;
        sql.busy_timeout(BUSY)?;
        sql.set_prepared_statement_cache_capacity(64);
        check(&sql)?;
        Ok(sql)
    };
    let escaped = path.display().to_string().replace('%', "%25").replace('?', "%3f").replace('#', "%23");
    match open(&format!("file:{escaped}")) {
        // A copy in a directory that nobody may write to: nobody else writes it either.
        Err(Fault::Sql(error)) if is_kept_out(&error) && !has_wal(path) => open(&format!("file:{escaped}?immutable=1")),
        other => other,
    }
}

/// Whether SQLite could not make the files that it wants beside the database.
fn is_kept_out(error: &rusqlite::Error) -> bool {
    matches!(error.sqlite_error_code(), Some(rusqlite::ErrorCode::CannotOpen | rusqlite::ErrorCode::ReadOnly))
}

fn has_wal(path: &Path) -> bool {
    let mut wal = path.as_os_str().to_owned();
    wal.push("-wal");
    std::fs::metadata(wal).is_ok_and(|file| file.len() > 0)
}

fn version(sql: &Connection) -> Done<(i32, usize)> {
    let application = sql.query_row("PRAGMA application_id", [], |row| row.get(0))?;
    let version: i64 = sql.query_row("PRAGMA user_version", [], |row| row.get(0))?;
    Ok((application, usize::try_from(version).unwrap_or(usize::MAX)))
}

/// Whether it is a ledger of a shape that is known.
fn check(sql: &Connection) -> Done<()> {
    match version(sql)? {
        (APPLICATION, version) if version > MIGRATIONS.len() => Err(Fault::Said(format!(
            "it has the shape of a newer toolgate (number {version}, and this one knows {}); use the newer one",
            MIGRATIONS.len()
        ))),
        (APPLICATION, version) if version > 0 => Ok(()),
        _ => Err(Fault::Said("it is no ledger of toolgate".to_owned())),
    }
}

/// Which shape it has: none where it is empty. What is neither is somebody else's.
fn shape(sql: &Connection) -> Done<usize> {
    let (application, found) = version(sql)?;
    if application != 0 || found != 0 {
        return check(sql).map(|()| found);
    }
    let tables: i64 = sql.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
    if tables > 0 { Err(Fault::Said("it is a database of something else; name another file".to_owned())) } else { Ok(0) }
}

fn migrate(sql: &Connection) -> Done<()> {
    let found = shape(sql)?;
    if found == MIGRATIONS.len() {
        return Ok(());
    }
    sql.execute_batch("BEGIN IMMEDIATE")?;
    let done = (|| -> Done<()> {
        // Perhaps another process was first.
        let (_, found) = version(sql)?;
        for step in MIGRATIONS.iter().skip(found) {
            sql.execute_batch(step)?;
        }
        sql.execute_batch(&format!("PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {}", MIGRATIONS.len()))?;
        Ok(())
    })();
    sql.execute_batch(if done.is_ok() { "COMMIT" } else { "ROLLBACK" })?;
    done
}

/// The name of a ledger and its keys, where it has them.
pub(crate) fn known(sql: &Connection, home: &Home) -> Done<Option<(String, Keys)>> {
    let known = meta(sql)?;
    let (Some(id), Some(print)) = (known.get("id"), known.get("keys")) else { return Ok(None) };
    Ok(Some((id.clone(), own_keys(&known, print, home)?)))
}

/// The keys of a ledger, from beside it.
fn own_keys(known: &BTreeMap<String, String>, print: &str, home: &Home) -> Done<Keys> {
    let public = known.get("key").cloned().unwrap_or_default();
    let keys = Keys::open(&home.keys(), &public).map_err(|error| {
        Fault::Said(format!("the keys of this ledger are not there ({error}); put the directory back that stood beside it"))
    })?;
    if keys.print.to_string() != *print {
        return Err(Fault::Said(format!(
            "the keys in {} are those of another ledger; put the directory back that stood beside it",
            home.keys().display()
        )));
    }
    Ok(keys)
}

/// Brings a database and the directory beside it together: the name of the ledger, and its keys.
pub(crate) fn acquaint(sql: &Connection, home: &Home) -> Done<(String, Keys)> {
    sql.execute_batch("BEGIN IMMEDIATE")?;
    let met = (|| -> Done<(String, Keys)> {
        let known = meta(sql)?;
        let keys = match known.get("keys") {
            Some(print) => own_keys(&known, print, home)?,
            None => Keys::make(&home.keys())?,
        };
        let id = match known.get("id") {
            Some(id) => id.clone(),
            None => {
                let id = hex(&random::<16>()?);
                let mut put = sql.prepare("INSERT INTO meta (name, value) VALUES (?1, ?2)")?;
                put.execute(["id", &id])?;
                put.execute(["keys", &keys.print.to_string()])?;
                put.execute(["key", keys.public()])?;
                id
            }
        };
        Ok((id, keys))
    })();
    sql.execute_batch(if met.is_ok() { "COMMIT" } else { "ROLLBACK" })?;
    met
}

/// Whether the database is the newest that there was. What is older would let calls run again that were made.
pub(crate) fn is_newest(sql: &Connection, home: &Home, id: &str) -> Done<()> {
    let Some(mark) = home.mark()? else { return Ok(()) };
    let put_back = "restore the newer file; or, to go on without what is lost, move";
    let at = home.path().join("mark.json");
    if mark.store != id {
        return Err(Fault::Said(format!("another ledger stood here, with {} rows; {put_back} {} away", mark.seq, at.display())));
    }
    let tip = ledger::tip(sql)?;
    let chain: Option<Vec<u8>> =
        sql.query_row("SELECT chain FROM ledger WHERE seq = ?1", [ledger::signed(mark.seq)], |row| row.get(0)).optional()?;
    if tip.seq < mark.seq {
        return Err(Fault::Said(format!(
            "it ends at row {}, and row {} was written: it was cut off, or an older copy was put back; {put_back} {} away",
            tip.seq,
            mark.seq,
            at.display()
        )));
    }
    match chain {
        Some(chain) if ledger::digest(&chain)? != mark.chain => {
            Err(Fault::Said(format!("row {} is not the row that was written; run `toolgate audit verify`", mark.seq)))
        }
        _ => Ok(()),
    }
}

/// A ledger without anything in it.
#[cfg(test)]
pub(crate) fn empty() -> Connection {
    let sql = Connection::open_in_memory().unwrap();
    migrate(&sql).unwrap();
    sql
}

/// What a statement reads from the beginning to the end.
#[cfg(test)]
pub(crate) fn scans(statement: &str) -> Vec<String> {
    let sql = empty();
    let mut plan = sql.prepare(&format!("EXPLAIN QUERY PLAN {statement}")).unwrap();
    let steps: Vec<String> = plan.raw_query().mapped(|row| row.get(3)).collect::<Result<_, _>>().unwrap();
    steps.into_iter().filter(|step| step.starts_with("SCAN")).collect()
}
