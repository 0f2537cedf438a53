//! A full disk, a directory that cannot be written to, damage, a clock that goes backwards: a clear
//! error or correct work.

use std::io::{Seek, SeekFrom, Write};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;

use jiff::SignedDuration;
use serde_json::json;
use toolgate::{ManualClock, Outcome, Toolgate};
use toolgate_store::{Ledger, SqliteStore, TrustRoots};

use crate::ledger_fixture::{
    LedgerFixture, append_line, copy_all, default_agent, noon, read_lines, runtime,
    worker_directory,
};

async fn record_calls(gate: &Toolgate, session: &str, customers: std::ops::Range<u32>) {
    let session = gate.session("desk", "alice", session);
    for n in customers {
        session.call("look", json!({"customer": format!("C-{n}0")})).await;
        session
            .call(
                "pay",
                json!({"customer": format!("C-{n}0"), "amount": 100, "name": format!("p{n}")}),
            )
            .await;
    }
}

/// Calls until the disk is full, and a little beyond.
pub(crate) fn run_worker() {
    let directory = worker_directory();
    runtime().block_on(async {
        let store = Arc::new(SqliteStore::open(directory.join("ledger.db")).unwrap());
        let gate = Toolgate::builder()
            .agent(default_agent(&directory.join("world.log")))
            .store(store)
            .build()
            .unwrap();
        let session = gate.session("desk", "alice", "s");
        let mut refused = 0;
        for n in 0..3_000 {
            let answer = session
                .call("look", json!({"customer": format!("C-{n} {}", "x".repeat(500))}))
                .await;
            let code = answer.outcome.error().map_or("ok", |error| &error.code).to_owned();
            append_line(&directory.join("acks.log"), &format!("{} {code}", answer.call));
            refused += u32::from(code == "store_unavailable");
            if refused == 5 {
                println!("full");
                return;
            }
        }
    });
}

#[test]
fn full_disk_is_reported_and_rows_are_added_later() {
    let desk = LedgerFixture::new();
    let exe = std::env::current_exe().unwrap();
    // Files may have 512 KiB: the ledger comes to that before anything else does.
    let script = format!(
        "trap '' XFSZ; ulimit -f 1024; exec '{}' worker --exact --nocapture --test-threads=1",
        exe.display()
    );
    let output = Command::new("sh")
        .args(["-c", &script])
        .env("TOOLGATE_WORKER", "fill")
        .env("TOOLGATE_DIR", desk.directory.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("full"), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    let acks = read_lines(&desk.directory.path().join("acks.log"));
    runtime().block_on(async {
        let gate = desk.open();
        gate.recover_spool().await.unwrap();
        let rows = gate.session("desk", "alice", "s").rows().await.unwrap();
        for ack in acks {
            let (call, code) = ack.split_once(' ').unwrap();
            let found = rows.iter().filter(|row| row.call.to_string() == call).count();
            assert_eq!(found, 1, "{call} heard {code}");
        }
    });
    desk.verify();
}

#[test]
fn unwritable_directory_is_reported() {
    let missing = SqliteStore::open("/nowhere/at/all/ledger.db").unwrap_err().to_string();
    assert!(missing.contains("/nowhere/at/all"), "{missing}");
    let readable = tempfile::tempdir().unwrap();
    let desk = LedgerFixture::new();
    runtime().block_on(async { record_calls(&desk.open(), "s", 0..2).await });
    copy_all(desk.directory.path(), readable.path());
    let open = |path: &std::path::Path| {
        for entry in [
            path.to_owned(),
            path.join("ledger.db"),
            path.join("ledger.db.state"),
            path.join("ledger.db.state/keys"),
        ] {
            use std::os::unix::fs::PermissionsExt;
            std::fs::set_permissions(entry, std::fs::Permissions::from_mode(0o755)).unwrap();
        }
    };
    open(readable.path());
    // Root may do everything: then somebody else tries.
    if Command::new("true").uid(65_534).status().is_err() {
        use std::os::unix::fs::PermissionsExt;
        for entry in [
            readable.path().join("ledger.db"),
            readable.path().join("ledger.db.state"),
            readable.path().to_owned(),
        ] {
            std::fs::set_permissions(entry, std::fs::Permissions::from_mode(0o555)).unwrap();
        }
        let error = SqliteStore::open(readable.path().join("ledger.db")).unwrap_err().to_string();
        assert!(error.contains("ledger.db"), "{error}");
        std::fs::set_permissions(readable.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        return;
    }
    let exe = readable.path().join("exe");
    // Another program makes it: what is open for writing here may be so in a child that another
    // test has just begun, and cannot be run.
    let own = std::env::current_exe().unwrap();
    assert!(
        Command::new("install").args(["-m", "755"]).args([&own, &exe]).status().unwrap().success()
    );
    let output = Command::new(&exe)
        .args(["worker", "--exact", "--nocapture"])
        .env("TOOLGATE_WORKER", "fill")
        .env("TOOLGATE_DIR", readable.path())
        .current_dir(readable.path())
        .uid(65_534)
        .output()
        .unwrap();
    let said = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    let clear = said.contains("ermission denied") || said.contains("this user cannot write");
    assert!(!output.status.success() && said.contains("ledger.db") && clear, "{said}");
}

/// What SQLite leaves beside a database, `pages` long before, when it is killed in the middle of a
/// change.
fn leave_journal(database: &std::path::Path, pages: u32) {
    let mut journal = vec![0xd9, 0xd5, 0x05, 0xf9, 0x20, 0xa1, 0x63, 0xd7];
    for figure in [0, 7, pages, 512, 4096] {
        journal.extend(u32::to_be_bytes(figure));
    }
    journal.resize(512, 0);
    std::fs::write(database.with_extension("db-journal"), journal).unwrap();
}

#[test]
fn ledger_creation_can_be_repeated_after_kill() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.db");
    // It is set to WAL first, which is a change of the other kind.
    rusqlite::Connection::open(&path)
        .unwrap()
        .query_row("PRAGMA journal_mode = WAL", [], |_| Ok(()))
        .unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 4096);
    leave_journal(&path, 0);
    drop(SqliteStore::open(&path).unwrap());
    drop(SqliteStore::open(&path).unwrap());
    // What is somebody else's is left as it is.
    let other = directory.path().join("other.db");
    rusqlite::Connection::open(&other).unwrap().execute_batch("CREATE TABLE mine (x)").unwrap();
    leave_journal(&other, 2);
    let before = std::fs::read(&other).unwrap();
    let error = SqliteStore::open(&other).unwrap_err().to_string();
    assert!(error.contains("in the middle of a change"), "{error}");
    assert!(
        other.with_extension("db-journal").exists() && std::fs::read(&other).unwrap() == before
    );
}

#[test]
fn file_that_is_no_ledger_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let text = directory.path().join("notes.txt");
    std::fs::write(&text, "not a database at all, and long enough to have a header".repeat(40))
        .unwrap();
    let error = SqliteStore::open(&text).unwrap_err().to_string();
    assert!(error.contains("not a database"), "{error}");
    let other = directory.path().join("other.db");
    rusqlite::Connection::open(&other).unwrap().execute_batch("CREATE TABLE mine (x)").unwrap();
    let error = SqliteStore::open(&other).unwrap_err().to_string();
    assert!(error.contains("database of another program"), "{error}");
    assert!(Ledger::open(&other).is_err());
    let newer = directory.path().join("newer.db");
    drop(SqliteStore::open(&newer).unwrap());
    rusqlite::Connection::open(&newer).unwrap().execute_batch("PRAGMA user_version = 999").unwrap();
    let error = SqliteStore::open(&newer).unwrap_err().to_string();
    assert!(error.contains("newer toolgate"), "{error}");
}

#[test]
fn missing_or_foreign_keys_are_reported() {
    let desk = LedgerFixture::new();
    runtime().block_on(async { record_calls(&desk.open(), "s", 0..2).await });
    let keys = desk.directory.path().join("ledger.db.state/keys");
    let aside = desk.directory.path().join("keys");
    std::fs::rename(&keys, &aside).unwrap();
    let error = SqliteStore::open(desk.ledger_path()).unwrap_err().to_string();
    assert!(error.contains("keys of this ledger are missing"), "{error}");
    std::fs::rename(&aside, &keys).unwrap();
    std::fs::write(keys.join("seal.key"), "11".repeat(32)).unwrap();
    let error = SqliteStore::open(desk.ledger_path()).unwrap_err().to_string();
    assert!(error.contains("belong to another ledger"), "{error}");
}

#[test]
fn damaged_pages_cause_error_and_never_wrong_row() {
    let desk = LedgerFixture::new();
    runtime().block_on(async { record_calls(&desk.open(), "s", 0..40).await });
    let whole = desk.export();
    let pages = std::fs::metadata(desk.ledger_path()).unwrap().len() / 4096;
    let (mut noticed, mut harmless) = (0, 0);
    for page in 1..pages {
        let copy = desk.copy();
        let mut file = std::fs::OpenOptions::new().write(true).open(copy.ledger_path()).unwrap();
        file.seek(SeekFrom::Start(page * 4096)).unwrap();
        file.write_all(&[0xa5; 4096]).unwrap();
        drop(file);
        let verified =
            Ledger::open(copy.ledger_path()).map_err(|e| e.to_string()).and_then(|ledger| {
                let verified =
                    ledger.verify(&TrustRoots::default(), |_| ()).map_err(|flaw| flaw.to_string());
                verified.map(|_| crate::ledger_fixture::export(&ledger))
            });
        match verified {
            Err(_) => noticed += 1,
            Ok(rows) => {
                assert_eq!(rows, whole, "page {page}");
                harmless += 1;
            }
        }
        // Whoever goes on with it hears an error, or goes on correctly.
        if let Ok(store) = SqliteStore::open(copy.ledger_path()) {
            runtime().block_on(async {
                let gate = Toolgate::builder()
                    .agent(default_agent(&copy.world_path()))
                    .store(Arc::new(store))
                    .build()
                    .unwrap();
                let session = gate.session("desk", "alice", "s");
                session.call("look", json!({"customer": "C-10"})).await;
                let answer = session
                    .call("pay", json!({"customer": "C-10", "amount": 200, "name": "again"}))
                    .await;
                // What is said to have been done has its row, wherever that can be read.
                if let (Outcome::Success(_), Ok(rows)) = (&answer.outcome, session.rows().await) {
                    assert!(rows.iter().any(|row| row.call == answer.call), "page {page}");
                }
            });
        }
    }
    assert!(noticed > 10, "{noticed} noticed, {harmless} harmless");
}

#[test]
fn truncated_wal_gives_older_state_or_error() {
    let desk = LedgerFixture::new();
    let gate = desk.open();
    runtime().block_on(async { record_calls(&gate, "s", 0..10).await });
    // As a power cut would leave it: the log is there, and nobody has closed the database.
    let crashed = desk.copy();
    drop(gate);
    let wal = crashed.directory.path().join("ledger.db-wal");
    let length = std::fs::metadata(&wal).unwrap().len();
    assert!(length > 0);
    let whole: Vec<String> = desk.export();
    for part in 0..12 {
        let copy = crashed.copy();
        let file = std::fs::OpenOptions::new()
            .write(true)
            .open(copy.directory.path().join("ledger.db-wal"))
            .unwrap();
        file.set_len(length * part / 12).unwrap();
        drop(file);
        match SqliteStore::open(copy.ledger_path()) {
            Ok(store) => {
                drop(store);
                let rows = copy.export();
                let begun: Vec<_> = rows.iter().take_while(|row| whole.contains(*row)).collect();
                assert!(
                    rows.len() - begun.len() <= 1,
                    "what is left is what was written first, and at most one call was abandoned"
                );
                copy.verify();
            }
            Err(error) => assert!(
                error.to_string().contains("cut off")
                    || error.to_string().contains("another ledger"),
                "{error}"
            ),
        }
    }
}

#[test]
fn clock_set_back_frees_no_limit() {
    let desk = LedgerFixture::new();
    let clock = Arc::new(ManualClock::at(noon()));
    runtime().block_on(async {
        let gate = desk.open_at(clock.clone());
        let session = gate.session("desk", "alice", "s");
        session.call("look", json!({"customer": "C-1"})).await;
        let pay = async |name: &str| {
            let answer =
                session.call("pay", json!({"customer": "C-1", "amount": 250, "name": name})).await;
            answer.outcome.error().map_or("ok".to_owned(), |error| error.code.to_string())
        };
        assert_eq!(pay("a").await, "ok");
        clock.advance(SignedDuration::from_hours(-48));
        assert_eq!(pay("b").await, "ok");
        assert_eq!(pay("c").await, "daily", "two payments stand, whatever the clock says");
        clock.advance(SignedDuration::from_hours(60));
        assert_eq!(pay("d").await, "ok", "one of them has left the window");
    });
    assert_eq!(desk.verify().rows, 5);
}
