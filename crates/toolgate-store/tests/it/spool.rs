//! Rows that could not be written when they came wait, and come in when the store is back.

use std::sync::Arc;

use serde_json::json;
use toolgate::Toolgate;
use toolgate_store::SqliteStore;

use crate::ledger_fixture::{
    LedgerFixture, RULES, agent_with_rules, append_line, default_agent, runtime,
};

#[test]
fn spooled_rows_survive_config_reload() {
    let desk = LedgerFixture::new();
    runtime().block_on(async {
        let store = Arc::new(SqliteStore::open(desk.ledger_path()).unwrap());
        let build = || {
            Toolgate::builder()
                .agent(default_agent(&desk.world_path()))
                .store(store.clone())
                .build()
                .unwrap()
        };
        let sql = |text: &str| {
            rusqlite::Connection::open(desk.ledger_path()).unwrap().execute_batch(text).unwrap()
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
        // Another runtime on the same store, while the first is still there.
        let second = build();
        calls.push(look(&second, 3).await);
        calls.push(look(&first, 4).await);
        drop(first);
        calls.push(look(&second, 5).await);
        // And one when nobody has the file open any more.
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
    desk.verify();
}

#[test]
fn spooled_rows_are_added_in_few_transactions() {
    let desk = LedgerFixture::new();
    runtime().block_on(async {
        let store = Arc::new(SqliteStore::open(desk.ledger_path()).unwrap());
        let gate = Toolgate::builder()
            .agent(default_agent(&desk.world_path()))
            .store(store.clone())
            .build()
            .unwrap();
        let sql = |text: &str| {
            rusqlite::Connection::open(desk.ledger_path()).unwrap().execute_batch(text).unwrap()
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
        let written = store.transaction_count() - before;
        assert!(written < 20, "100 rows took {written} transactions");
        let rows: Vec<_> =
            session.rows().await.unwrap().iter().skip(1).map(|row| row.call).collect();
        assert_eq!(rows, calls, "in the order in which they ended");
    });
    desk.verify();
}

#[test]
fn store_with_room_for_one_row_is_not_recovered() {
    let desk = LedgerFixture::new();
    runtime().block_on(async {
        let store = Arc::new(SqliteStore::open(desk.ledger_path()).unwrap());
        let gate = Toolgate::builder().agent(default_agent(&desk.world_path())).store(store).build().unwrap();
        let sql = |text: &str| rusqlite::Connection::open(desk.ledger_path()).unwrap().execute_batch(text).unwrap();
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
        // Whoever reads as far as this makes a copy of the file.
        let files = || -> Vec<_> {
            let spool = desk.directory.path().join("ledger.db.state/spool");
            std::fs::read_dir(spool).unwrap().map(|entry| entry.unwrap().path()).collect()
        };
        let ends_in = |ending: &str| files().into_iter().find(|path| path.to_string_lossy().ends_with(ending));
        append_line(&ends_in(".jsonl").unwrap(), "no row");
        assert!(gate.recover_spool().await.is_err());
        assert_eq!(ends_in(".spoilt"), None, "nobody has read all that waits");
        sql("DROP TRIGGER no_room");
        assert_eq!(gate.recover_spool().await, Ok(3));
        assert_eq!(session.rows().await.unwrap().len(), 3);
    });
    desk.verify();
}

#[test]
fn foreign_spool_is_not_adopted_before_store_recovers() {
    let desk = LedgerFixture::new();
    let spool = desk.directory.path().join("ledger.db.state/spool");
    let files = || -> Vec<_> {
        let names = std::fs::read_dir(&spool).unwrap().map(|entry| entry.unwrap().path());
        names.filter(|path| path.extension().is_none_or(|ending| ending != "definition")).collect()
    };
    let sql = |text: &str| {
        rusqlite::Connection::open(desk.ledger_path()).unwrap().execute_batch(text).unwrap()
    };
    drop(SqliteStore::open(desk.ledger_path()).unwrap());
    sql("CREATE TRIGGER away BEFORE INSERT ON ledger BEGIN SELECT RAISE(ABORT, 'away'); END");
    runtime().block_on(async {
        desk.open().session("desk", "alice", "s").call("look", json!({"customer": "C-10"})).await;
        let left = files();
        assert_eq!(left.len(), 1);
        // As many processes as make one call each.
        for _ in 0..3 {
            let _ = desk.open().recover_spool().await;
            assert_eq!(files(), left, "nobody has read and written it all again");
        }
        sql("DROP TRIGGER away");
        assert_eq!(desk.open().recover_spool().await, Ok(1));
        assert_eq!(files(), Vec::<std::path::PathBuf>::new());
    });
    assert_eq!(desk.verify().rows, 1);
}

#[test]
fn unaddable_spooled_row_does_not_block_others() {
    let desk = LedgerFixture::new();
    let sql = || rusqlite::Connection::open(desk.ledger_path()).unwrap();
    let look = async |gate: &Toolgate, session: &str, n: u32| {
        gate.session("desk", "alice", session)
            .call("look", json!({"customer": format!("C-{n}0")}))
            .await
            .call
    };
    runtime().block_on(async {
        let gate = desk.open();
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
        let never = look(&gate, "damaged", 4).await;
        let second = look(&gate, "sound", 5).await;
        // As long as the store is away, nothing is put aside.
        assert!(gate.recover_spool().await.is_err());
        let spool = desk.directory.path().join("ledger.db.state/spool");
        let left = |ending: &str| -> Vec<_> {
            let files = std::fs::read_dir(&spool).unwrap().map(|file| file.unwrap().path());
            files.filter(|path| path.extension().is_some_and(|extension| extension == ending)).collect()
        };
        assert_eq!((left("spoilt").len(), left("jsonl").len()), (0, 1));
        sql().execute_batch("DROP TRIGGER away").unwrap();
        assert_eq!(gate.recover_spool().await, Ok(2));
        let rows = gate.session("desk", "alice", "sound").rows().await.unwrap();
        assert_eq!(rows.iter().skip(1).map(|row| row.call).collect::<Vec<_>>(), [first, second]);
        let (aside, waiting) = (left("spoilt"), left("jsonl"));
        assert_eq!((aside.len(), waiting.len()), (1, 0));
        let row: toolgate::Row = serde_json::from_slice(&std::fs::read(&aside[0]).unwrap()).unwrap();
        assert_eq!(row.call, never);
        sql().execute("UPDATE sessions SET head = ?1 WHERE session = 'damaged'", [head]).unwrap();
    });
    assert_eq!(desk.verify().rows, 4);
}

#[test]
fn spooled_definition_is_kept_until_its_last_row_is_added() {
    let desk = LedgerFixture::new();
    let sql = |text: &str| {
        rusqlite::Connection::open(desk.ledger_path()).unwrap().execute_batch(text).unwrap()
    };
    let spool = desk.directory.path().join("ledger.db.state/spool");
    let definitions = || {
        let files = std::fs::read_dir(&spool).unwrap().map(|file| file.unwrap().path());
        files
            .filter(|path| path.extension().is_some_and(|extension| extension == "definition"))
            .count()
    };
    runtime().block_on(async {
        let other = agent_with_rules(&desk.world_path(), &RULES.replace("max = 500", "max = 400"));
        let [one, two] = [default_agent(&desk.world_path()), other].map(|agent| {
            let store = Arc::new(SqliteStore::open(desk.ledger_path()).unwrap());
            Toolgate::builder().agent(agent).store(store).build().unwrap()
        });
        sql("CREATE TRIGGER away BEFORE INSERT ON ledger BEGIN SELECT RAISE(ABORT, 'away'); END");
        for (gate, session) in [(&one, "a"), (&two, "b")] {
            let answer = gate
                .session("desk", "alice", session)
                .call("look", json!({"customer": "C-10"}))
                .await;
            assert_eq!(answer.outcome.error().unwrap().code, "store_unavailable");
        }
        assert_eq!(definitions(), 2);
        sql("DROP TRIGGER away");
        assert_eq!(one.recover_spool().await, Ok(1));
        assert_eq!(definitions(), 1, "the other waits still");
        assert_eq!(two.recover_spool().await, Ok(1));
        assert_eq!(definitions(), 0);
    });
    assert_eq!(desk.verify().rows, 2);
}

#[test]
fn unreadable_spool_keeps_store_unavailable() {
    let desk = LedgerFixture::new();
    let sql = |text: &str| {
        rusqlite::Connection::open(desk.ledger_path()).unwrap().execute_batch(text).unwrap()
    };
    let away = "CREATE TRIGGER away BEFORE INSERT ON ledger BEGIN SELECT RAISE(ABORT, 'away'); END";
    let spool = desk.directory.path().join("ledger.db.state/spool");
    runtime().block_on(async {
        let gate = desk.open();
        let session = gate.session("desk", "alice", "s");
        let look = async |n: u32| {
            let answer = session.call("look", json!({"customer": format!("C-{n}0")})).await;
            answer.outcome.error().map(|error| error.code.to_string())
        };
        sql(away);
        assert_eq!(look(1).await.as_deref(), Some("store_unavailable"));
        let mut files = std::fs::read_dir(&spool).unwrap().map(|entry| entry.unwrap().path());
        let own = files
            .find(|path| path.extension().is_some_and(|extension| extension == "jsonl"))
            .unwrap();
        sql("DROP TRIGGER away");
        assert_eq!(gate.recover_spool().await, Ok(1));
        // Its file cannot be made again, and what somebody has left behind cannot be read.
        let odd = [own.with_extension("new"), spool.join("gone.jsonl")];
        odd.iter().for_each(|path| std::fs::create_dir(path).unwrap());
        sql(away);
        assert_eq!(look(2).await.as_deref(), Some("store_unavailable"));
        sql("DROP TRIGGER away");
        assert!(gate.recover_spool().await.is_err());
        assert_eq!(session.rows().await.unwrap().len(), 2, "what was in memory is in");
        assert_eq!(look(3).await.as_deref(), Some("store_unavailable"));
        odd.iter().for_each(|path| std::fs::remove_dir(path).unwrap());
        assert_eq!(look(4).await, None);
    });
    assert_eq!(desk.verify().rows, 4);
}

#[test]
fn rows_of_spooled_definition_can_be_verified() {
    for part in [true, false] {
        let desk = LedgerFixture::new();
        let sql = |text: &str| {
            rusqlite::Connection::open(desk.ledger_path()).unwrap().execute_batch(text).unwrap()
        };
        drop(SqliteStore::open(desk.ledger_path()).unwrap());
        sql("CREATE TRIGGER no_row BEFORE INSERT ON ledger BEGIN SELECT RAISE(ABORT, 'away'); END;
             CREATE TRIGGER no_definition BEFORE INSERT ON configs BEGIN SELECT RAISE(ABORT, 'away'); END");
        runtime().block_on(async {
            let answer = desk
                .open()
                .session("desk", "alice", "s")
                .call("look", json!({"customer": "C-10"}))
                .await;
            assert_eq!(answer.outcome.error().unwrap().code, "store_unavailable");
        });
        sql("DROP TRIGGER no_row; DROP TRIGGER no_definition");
        // The next process has as much of it as one call needs, or something else.
        let next = match part {
            true => default_agent(&desk.world_path())
                .tool_subsets()
                .into_iter()
                .find(|(tool, _)| **tool == *"look")
                .unwrap()
                .1
                .build()
                .unwrap(),
            false => agent_with_rules(&desk.world_path(), &RULES.replace("max = 500", "max = 400")),
        };
        runtime().block_on(async {
            let store = Arc::new(SqliteStore::open(desk.ledger_path()).unwrap());
            let gate = Toolgate::builder().agent(next).store(store).build().unwrap();
            assert_eq!(gate.recover_spool().await, Ok(1));
        });
        assert_eq!(desk.verify().rows, 1);
    }
}
