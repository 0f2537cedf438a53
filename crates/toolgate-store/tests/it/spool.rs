//! Tests that rows are spooled while the store is unavailable, and added to the ledger later.

use std::sync::Arc;

use serde_json::json;
use toolgate::Toolgate;
use toolgate_store::SqliteStore;

use crate::ledger_fixture::{
    LedgerFixture, RULES, agent_with_rules, append_line, default_agent, runtime,
};

#[test]
fn spooled_rows_survive_config_reload() {
    let fixture = LedgerFixture::new();
    runtime().block_on(async {
        let store = Arc::new(SqliteStore::open(fixture.ledger_path()).unwrap());
        let build = || {
            Toolgate::builder()
                .agent(default_agent(&fixture.world_path()))
                .store(store.clone())
                .build()
                .unwrap()
        };
        let sql = |text: &str| {
            rusqlite::Connection::open(fixture.ledger_path()).unwrap().execute_batch(text).unwrap()
        };
        let look = async |gate: &Toolgate, n: u32| {
            gate.session("desk", "alice", "s")
                .call("look", json!({"customer": format!("C-{n}0")}))
                .await
                .call
        };
        let first = build();
        let mut calls = vec![look(&first, 1).await];
        sql("CREATE TRIGGER away BEFORE INSERT ON ledger BEGIN SELECT RAISE(ABORT, 'away'); END");
        calls.push(look(&first, 2).await);
        // Another `Toolgate` uses the same store at the same time.
        let second = build();
        calls.push(look(&second, 3).await);
        calls.push(look(&first, 4).await);
        drop(first);
        calls.push(look(&second, 5).await);
        // A third one starts after the others have ended.
        drop(second);
        let third = build();
        calls.push(look(&third, 6).await);
        sql("DROP TRIGGER away");
        calls.push(look(&third, 7).await);
        let mut rows: Vec<_> = third
            .session("desk", "alice", "s")
            .rows()
            .await
            .unwrap()
            .iter()
            .map(|row| row.call)
            .collect();
        rows.sort_unstable();
        calls.sort_unstable();
        assert_eq!(rows, calls, "each call has its row");
    });
    fixture.verify();
}

#[test]
fn spooled_rows_are_added_in_few_transactions() {
    let fixture = LedgerFixture::new();
    runtime().block_on(async {
        let store = Arc::new(SqliteStore::open(fixture.ledger_path()).unwrap());
        let gate = Toolgate::builder()
            .agent(default_agent(&fixture.world_path()))
            .store(store.clone())
            .build()
            .unwrap();
        let sql = |text: &str| {
            rusqlite::Connection::open(fixture.ledger_path()).unwrap().execute_batch(text).unwrap()
        };
        let session = gate.session("desk", "alice", "s");
        session.call("look", json!({"customer": "C-0"})).await;
        sql("CREATE TRIGGER away BEFORE INSERT ON ledger BEGIN SELECT RAISE(ABORT, 'away'); END");
        let mut calls = Vec::new();
        for n in 1..=100 {
            calls.push(session.call("look", json!({"customer": format!("C-{n}0")})).await.call);
        }
        sql("DROP TRIGGER away");
        let before = store.transaction_count();
        assert_eq!(gate.recover_spool().await, Ok(100));
        let transactions = store.transaction_count() - before;
        assert!(transactions < 20, "100 rows took {transactions} transactions");
        let rows: Vec<_> =
            session.rows().await.unwrap().iter().skip(1).map(|row| row.call).collect();
        assert_eq!(rows, calls, "the rows are not in the order of the calls");
    });
    fixture.verify();
}

#[test]
fn store_with_room_for_one_row_is_not_recovered() {
    let fixture = LedgerFixture::new();
    runtime().block_on(async {
        let store = Arc::new(SqliteStore::open(fixture.ledger_path()).unwrap());
        let gate = Toolgate::builder().agent(default_agent(&fixture.world_path())).store(store).build().unwrap();
        let sql = |text: &str| rusqlite::Connection::open(fixture.ledger_path()).unwrap().execute_batch(text).unwrap();
        let full_at = |rows: u32| {
            let full = format!("WHEN (SELECT count(*) FROM ledger) >= {rows} BEGIN SELECT RAISE(ABORT, 'full'); END");
            sql(&format!("DROP TRIGGER IF EXISTS no_room; CREATE TRIGGER no_room BEFORE INSERT ON ledger {full}"));
        };
        let session = gate.session("desk", "alice", "s");
        full_at(0);
        for n in 1..=3 {
            session.call("look", json!({"customer": format!("C-{n}0")})).await;
        }
        full_at(1);
        assert!(gate.recover_spool().await.is_err());
        assert_eq!(session.rows().await.unwrap().len(), 1);
        // A reader that reaches this line moves it to another file.
        let files = || -> Vec<_> {
            let spool = fixture.directory.path().join("ledger.db.state/spool");
            std::fs::read_dir(spool).unwrap().map(|entry| entry.unwrap().path()).collect()
        };
        let ends_in = |ending: &str| files().into_iter().find(|path| path.to_string_lossy().ends_with(ending));
        append_line(&ends_in(".jsonl").unwrap(), "no row");
        assert!(gate.recover_spool().await.is_err());
        assert_eq!(ends_in(".spoilt"), None, "the rest of the spool was not read");
        sql("DROP TRIGGER no_room");
        assert_eq!(gate.recover_spool().await, Ok(3));
        assert_eq!(session.rows().await.unwrap().len(), 3);
    });
    fixture.verify();
}

#[test]
fn foreign_spool_is_not_adopted_before_store_recovers() {
    let fixture = LedgerFixture::new();
    let spool = fixture.directory.path().join("ledger.db.state/spool");
    let files = || -> Vec<_> {
        let names = std::fs::read_dir(&spool).unwrap().map(|entry| entry.unwrap().path());
        names.filter(|path| path.extension().is_none_or(|ending| ending != "definition")).collect()
    };
    let sql = |text: &str| {
        rusqlite::Connection::open(fixture.ledger_path()).unwrap().execute_batch(text).unwrap()
    };
    drop(SqliteStore::open(fixture.ledger_path()).unwrap());
    sql("CREATE TRIGGER away BEFORE INSERT ON ledger BEGIN SELECT RAISE(ABORT, 'away'); END");
    runtime().block_on(async {
        fixture
            .open()
            .session("desk", "alice", "s")
            .call("look", json!({"customer": "C-10"}))
            .await;
        let files_before = files();
        assert_eq!(files_before.len(), 1);
        // Several processes that make one call each.
        for _ in 0..3 {
            let _ = fixture.open().recover_spool().await;
            assert_eq!(files(), files_before, "the spool was rewritten");
        }
        sql("DROP TRIGGER away");
        assert_eq!(fixture.open().recover_spool().await, Ok(1));
        assert_eq!(files(), Vec::<std::path::PathBuf>::new());
    });
    assert_eq!(fixture.verify().rows, 1);
}

#[test]
fn unaddable_spooled_row_does_not_block_others() {
    let fixture = LedgerFixture::new();
    let sql = || rusqlite::Connection::open(fixture.ledger_path()).unwrap();
    let look = async |gate: &Toolgate, session: &str, n: u32| {
        gate.session("desk", "alice", session)
            .call("look", json!({"customer": format!("C-{n}0")}))
            .await
            .call
    };
    runtime().block_on(async {
        let gate = fixture.open();
        look(&gate, "damaged", 1).await;
        look(&gate, "sound", 2).await;
        let head: Vec<u8> = sql().query_row("SELECT head FROM sessions WHERE session = 'damaged'", [], |row| row.get(0)).unwrap();
        sql()
            .execute_batch(
                "UPDATE sessions SET head = x'00' WHERE session = 'damaged';
                 CREATE TRIGGER away BEFORE INSERT ON ledger BEGIN SELECT RAISE(ABORT, 'away'); END",
            )
            .unwrap();
        let first = look(&gate, "sound", 3).await;
        let rejected_call = look(&gate, "damaged", 4).await;
        let second = look(&gate, "sound", 5).await;
        // While the store is unavailable, no row is set aside.
        assert!(gate.recover_spool().await.is_err());
        let spool = fixture.directory.path().join("ledger.db.state/spool");
        let spool_files = |ending: &str| -> Vec<_> {
            let files = std::fs::read_dir(&spool).unwrap().map(|file| file.unwrap().path());
            files.filter(|path| path.extension().is_some_and(|extension| extension == ending)).collect()
        };
        assert_eq!((spool_files("spoilt").len(), spool_files("jsonl").len()), (0, 1));
        sql().execute_batch("DROP TRIGGER away").unwrap();
        assert_eq!(gate.recover_spool().await, Ok(2));
        let rows = gate.session("desk", "alice", "sound").rows().await.unwrap();
        assert_eq!(rows.iter().skip(1).map(|row| row.call).collect::<Vec<_>>(), [first, second]);
        let (rejected, waiting) = (spool_files("spoilt"), spool_files("jsonl"));
        assert_eq!((rejected.len(), waiting.len()), (1, 0));
        let row: toolgate::Row = serde_json::from_slice(&std::fs::read(&rejected[0]).unwrap()).unwrap();
        assert_eq!(row.call, rejected_call);
        sql().execute("UPDATE sessions SET head = ?1 WHERE session = 'damaged'", [head]).unwrap();
    });
    assert_eq!(fixture.verify().rows, 4);
}

#[test]
fn spooled_definition_is_kept_until_its_last_row_is_added() {
    let fixture = LedgerFixture::new();
    let sql = |text: &str| {
        rusqlite::Connection::open(fixture.ledger_path()).unwrap().execute_batch(text).unwrap()
    };
    let spool = fixture.directory.path().join("ledger.db.state/spool");
    let definitions = || {
        let files = std::fs::read_dir(&spool).unwrap().map(|file| file.unwrap().path());
        files
            .filter(|path| path.extension().is_some_and(|extension| extension == "definition"))
            .count()
    };
    runtime().block_on(async {
        let other =
            agent_with_rules(&fixture.world_path(), &RULES.replace("max = 500", "max = 400"));
        let [first, second] = [default_agent(&fixture.world_path()), other].map(|agent| {
            let store = Arc::new(SqliteStore::open(fixture.ledger_path()).unwrap());
            Toolgate::builder().agent(agent).store(store).build().unwrap()
        });
        sql("CREATE TRIGGER away BEFORE INSERT ON ledger BEGIN SELECT RAISE(ABORT, 'away'); END");
        for (gate, session) in [(&first, "a"), (&second, "b")] {
            let answer = gate
                .session("desk", "alice", session)
                .call("look", json!({"customer": "C-10"}))
                .await;
            assert_eq!(answer.outcome.error().unwrap().code, "store_unavailable");
        }
        assert_eq!(definitions(), 2);
        sql("DROP TRIGGER away");
        assert_eq!(first.recover_spool().await, Ok(1));
        assert_eq!(definitions(), 1, "the definition of the other row was deleted");
        assert_eq!(second.recover_spool().await, Ok(1));
        assert_eq!(definitions(), 0);
    });
    assert_eq!(fixture.verify().rows, 2);
}

#[test]
fn unreadable_spool_keeps_store_unavailable() {
    let fixture = LedgerFixture::new();
    let sql = |text: &str| {
        rusqlite::Connection::open(fixture.ledger_path()).unwrap().execute_batch(text).unwrap()
    };
    let block_rows =
        "CREATE TRIGGER away BEFORE INSERT ON ledger BEGIN SELECT RAISE(ABORT, 'away'); END";
    let spool = fixture.directory.path().join("ledger.db.state/spool");
    runtime().block_on(async {
        let gate = fixture.open();
        let session = gate.session("desk", "alice", "s");
        let look = async |n: u32| {
            let answer = session.call("look", json!({"customer": format!("C-{n}0")})).await;
            answer.outcome.error().map(|error| error.code.to_string())
        };
        sql(block_rows);
        assert_eq!(look(1).await.as_deref(), Some("store_unavailable"));
        let mut files = std::fs::read_dir(&spool).unwrap().map(|entry| entry.unwrap().path());
        let spool_file = files
            .find(|path| path.extension().is_some_and(|extension| extension == "jsonl"))
            .unwrap();
        sql("DROP TRIGGER away");
        assert_eq!(gate.recover_spool().await, Ok(1));
        // Directories prevent that the spool file is created and that a leftover file is read.
        let obstacles = [spool_file.with_extension("new"), spool.join("gone.jsonl")];
        obstacles.iter().for_each(|path| std::fs::create_dir(path).unwrap());
        sql(block_rows);
        assert_eq!(look(2).await.as_deref(), Some("store_unavailable"));
        sql("DROP TRIGGER away");
        assert!(gate.recover_spool().await.is_err());
        assert_eq!(session.rows().await.unwrap().len(), 2, "the row in memory was added");
        assert_eq!(look(3).await.as_deref(), Some("store_unavailable"));
        obstacles.iter().for_each(|path| std::fs::remove_dir(path).unwrap());
        assert_eq!(look(4).await, None);
    });
    assert_eq!(fixture.verify().rows, 4);
}

#[test]
fn rows_of_spooled_definition_can_be_verified() {
    for is_subset in [true, false] {
        let fixture = LedgerFixture::new();
        let sql = |text: &str| {
            rusqlite::Connection::open(fixture.ledger_path()).unwrap().execute_batch(text).unwrap()
        };
        drop(SqliteStore::open(fixture.ledger_path()).unwrap());
        sql("CREATE TRIGGER no_row BEFORE INSERT ON ledger BEGIN SELECT RAISE(ABORT, 'away'); END;
             CREATE TRIGGER no_definition BEFORE INSERT ON configs BEGIN SELECT RAISE(ABORT, 'away'); END");
        runtime().block_on(async {
            let answer = fixture
                .open()
                .session("desk", "alice", "s")
                .call("look", json!({"customer": "C-10"}))
                .await;
            assert_eq!(answer.outcome.error().unwrap().code, "store_unavailable");
        });
        sql("DROP TRIGGER no_row; DROP TRIGGER no_definition");
        // The next process has a part of the definition, or another definition.
        let next = match is_subset {
            true => default_agent(&fixture.world_path())
                .tool_subsets()
                .into_iter()
                .find(|(tool, _)| **tool == *"look")
                .unwrap()
                .1
                .build()
                .unwrap(),
            false => {
                agent_with_rules(&fixture.world_path(), &RULES.replace("max = 500", "max = 400"))
            }
        };
        runtime().block_on(async {
            let store = Arc::new(SqliteStore::open(fixture.ledger_path()).unwrap());
            let gate = Toolgate::builder().agent(next).store(store).build().unwrap();
            assert_eq!(gate.recover_spool().await, Ok(1));
        });
        assert_eq!(fixture.verify().rows, 1);
    }
}
