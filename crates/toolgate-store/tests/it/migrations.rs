//! A ledger that an older toolgate has written.

use serde_json::json;

use crate::ledger_fixture::{LedgerFixture, runtime};
use crate::retention::gate_with_unknown_outcomes;

/// Puts a ledger into the shape that it had before the newest migration.
fn downgrade_ledger(path: &std::path::Path) {
    let old = path.with_extension("old");
    let sql = rusqlite::Connection::open(&old).unwrap();
    sql.execute_batch(include_str!("../../migrations/0001_ledger.sql")).unwrap();
    sql.execute_batch(include_str!("../../migrations/0002_passes.sql")).unwrap();
    sql.execute("ATTACH ?1 AS new", [path.to_str().unwrap()]).unwrap();
    let names = |query: &str| -> Vec<String> {
        sql.prepare(query)
            .unwrap()
            .query_map([], |row| row.get(0))
            .unwrap()
            .collect::<Result<_, _>>()
            .unwrap()
    };
    for table in names(
        "SELECT name FROM main.sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'",
    ) {
        let columns =
            names(&format!("SELECT name FROM pragma_table_info('{table}', 'main')")).join(", ");
        sql.execute_batch(&format!(
            "INSERT INTO main.{table} ({columns}) SELECT {columns} FROM new.{table}"
        ))
        .unwrap();
    }
    sql.execute_batch("DETACH new; PRAGMA application_id = 0x74676174; PRAGMA user_version = 2")
        .unwrap();
    drop(sql);
    for end in ["-wal", "-shm"] {
        let _ = std::fs::remove_file(format!("{}{end}", path.display()));
    }
    std::fs::rename(old, path).unwrap();
}

#[test]
fn migration_of_older_ledger_keeps_every_record() {
    let desk = LedgerFixture::new();
    runtime().block_on(async {
        let gate = gate_with_unknown_outcomes(&desk);
        let session = gate.session("desk", "alice", "s");
        for name in ["a", "b"] {
            gate.call(
                session
                    .prepare("pay", json!({"name": name, "arrives": true}))
                    .idempotency_key(name),
            )
            .await;
        }
        let pending = gate.pending_calls().await.unwrap();
        assert_eq!(pending.len(), 2);
        assert!(
            gate.settle_pending(
                pending[0].call,
                Some(toolgate::Outcome::Success(toolgate::CallOutput::from_value(json!("done")))),
                "eve"
            )
            .await
            .unwrap()
        );
    });
    downgrade_ledger(&desk.ledger_path());
    runtime().block_on(async {
        let gate = gate_with_unknown_outcomes(&desk);
        let session = gate.session("desk", "alice", "s");
        assert_eq!(gate.pending_calls().await.unwrap().len(), 1);
        let again = async |name: &str| {
            gate.call(
                session
                    .prepare("pay", json!({"name": name, "arrives": true}))
                    .idempotency_key(name),
            )
            .await
        };
        assert!(again("a").await.outcome.success().is_some_and(|output| output.replayed));
        assert_eq!(again("b").await.outcome.error().unwrap().code, "pending_reconciliation");
    });
    assert_eq!(
        crate::ledger_fixture::read_lines(&desk.world_path()),
        ["a", "b"],
        "nothing was made twice"
    );
    desk.verify();
}
