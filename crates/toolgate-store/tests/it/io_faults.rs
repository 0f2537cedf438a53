//! Tests that faults of disks, files and clocks cause clear errors or no harm.

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

/// Makes calls until the disk is full, and a few more.
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
    let fixture = LedgerFixture::new();
    let exe = std::env::current_exe().unwrap();
    // Files may have 512 KiB, and the ledger reaches this limit first.
    let script = format!(
        "trap '' XFSZ; ulimit -f 1024; exec '{}' worker --exact --nocapture --test-threads=1",
        exe.display()
    );
    let output = Command::new("sh")
        .args(["-c", &script])
        .env("TOOLGATE_WORKER", "fill")
        .env("TOOLGATE_DIR", fixture.directory.path())
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(stdout.contains("full"), "{stdout}\n{}", String::from_utf8_lossy(&output.stderr));
    let acks = read_lines(&fixture.directory.path().join("acks.log"));
    runtime().block_on(async {
        let gate = fixture.open();
        gate.recover_spool().await.unwrap();
        let rows = gate.session("desk", "alice", "s").rows().await.unwrap();
        for ack in acks {
            let (call, code) = ack.split_once(' ').unwrap();
            let found = rows.iter().filter(|row| row.call.to_string() == call).count();
            assert_eq!(found, 1, "{call} was answered with {code}");
        }
    });
    fixture.verify();
}

#[test]
fn unwritable_directory_is_reported() {
    let missing = SqliteStore::open("/nowhere/at/all/ledger.db").unwrap_err().to_string();
    assert!(missing.contains("/nowhere/at/all"), "{missing}");
    let readable = tempfile::tempdir().unwrap();
    let fixture = LedgerFixture::new();
    runtime().block_on(async { record_calls(&fixture.open(), "s", 0..2).await });
    copy_all(fixture.directory.path(), readable.path());
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
    // Root ignores permissions, so the worker runs as another user.
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
    // Another program copies the binary. A file descriptor of this process could be inherited by a
    // child of another test, and a file that is open for writing cannot be executed.
    let test_binary = std::env::current_exe().unwrap();
    assert!(
        Command::new("install")
            .args(["-m", "755"])
            .args([&test_binary, &exe])
            .status()
            .unwrap()
            .success()
    );
    let output = Command::new(&exe)
        .args(["worker", "--exact", "--nocapture"])
        .env("TOOLGATE_WORKER", "fill")
        .env("TOOLGATE_DIR", readable.path())
        .current_dir(readable.path())
        .uid(65_534)
        .output()
        .unwrap();
    let output_text = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    let is_clear =
        output_text.contains("ermission denied") || output_text.contains("this user cannot write");
    assert!(
        !output.status.success() && output_text.contains("ledger.db") && is_clear,
        "{output_text}"
    );
}

/// Writes the hot journal that SQLite leaves if it is killed while it changes a database.
///
/// Before the change, the database had `pages` pages.
fn leave_journal(database: &std::path::Path, pages: u32) {
    let mut journal = vec![0xd9, 0xd5, 0x05, 0xf9, 0x20, 0xa1, 0x63, 0xd7];
    for number in [0, 7, pages, 512, 4096] {
        journal.extend(u32::to_be_bytes(number));
    }
    journal.resize(512, 0);
    std::fs::write(database.with_extension("db-journal"), journal).unwrap();
}

#[test]
fn ledger_creation_can_be_repeated_after_kill() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.db");
    // The switch to WAL uses a rollback journal.
    rusqlite::Connection::open(&path)
        .unwrap()
        .query_row("PRAGMA journal_mode = WAL", [], |_| Ok(()))
        .unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 4096);
    leave_journal(&path, 0);
    drop(SqliteStore::open(&path).unwrap());
    drop(SqliteStore::open(&path).unwrap());
    // A database of another program stays unchanged.
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
    let fixture = LedgerFixture::new();
    runtime().block_on(async { record_calls(&fixture.open(), "s", 0..2).await });
    let keys = fixture.directory.path().join("ledger.db.state/keys");
    let aside = fixture.directory.path().join("keys");
    std::fs::rename(&keys, &aside).unwrap();
    let error = SqliteStore::open(fixture.ledger_path()).unwrap_err().to_string();
    assert!(error.contains("keys of this ledger are missing"), "{error}");
    std::fs::rename(&aside, &keys).unwrap();
    std::fs::write(keys.join("seal.key"), "11".repeat(32)).unwrap();
    let error = SqliteStore::open(fixture.ledger_path()).unwrap_err().to_string();
    assert!(error.contains("belong to another ledger"), "{error}");
}

#[test]
fn damaged_pages_cause_error_and_never_wrong_row() {
    let fixture = LedgerFixture::new();
    runtime().block_on(async { record_calls(&fixture.open(), "s", 0..40).await });
    let rows_before = fixture.export();
    let pages = std::fs::metadata(fixture.ledger_path()).unwrap().len() / 4096;
    let (mut detected, mut harmless) = (0, 0);
    for page in 1..pages {
        let copy = fixture.copy();
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
            Err(_) => detected += 1,
            Ok(rows) => {
                assert_eq!(rows, rows_before, "page {page}");
                harmless += 1;
            }
        }
        // Later calls fail, or work correctly.
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
                // A successful call has its row, if the rows are readable.
                if let (Outcome::Success(_), Ok(rows)) = (&answer.outcome, session.rows().await) {
                    assert!(rows.iter().any(|row| row.call == answer.call), "page {page}");
                }
            });
        }
    }
    assert!(detected > 10, "{detected} detected, {harmless} harmless");
}

#[test]
fn truncated_wal_gives_older_state_or_error() {
    let fixture = LedgerFixture::new();
    let gate = fixture.open();
    runtime().block_on(async { record_calls(&gate, "s", 0..10).await });
    // As after a power loss: the WAL exists, and no process has closed the database.
    let crashed = fixture.copy();
    drop(gate);
    let wal = crashed.directory.path().join("ledger.db-wal");
    let length = std::fs::metadata(&wal).unwrap().len();
    assert!(length > 0);
    let all_rows: Vec<String> = fixture.export();
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
                let unchanged: Vec<_> =
                    rows.iter().take_while(|row| all_rows.contains(*row)).collect();
                assert!(
                    rows.len() - unchanged.len() <= 1,
                    "the remaining rows are the first ones, and at most one row of an abandoned call"
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
    let fixture = LedgerFixture::new();
    let clock = Arc::new(ManualClock::at(noon()));
    runtime().block_on(async {
        let gate = fixture.open_at(clock.clone());
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
        assert_eq!(pay("c").await, "daily", "both payments count, whatever the clock shows");
        clock.advance(SignedDuration::from_hours(60));
        assert_eq!(pay("d").await, "ok", "one payment has left the window");
    });
    assert_eq!(fixture.verify().rows, 5);
}
