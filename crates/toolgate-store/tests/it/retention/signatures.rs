//! Tests of signatures, key rotation and receipts.

use jiff::Timestamp;
use serde_json::json;
use toolgate_store::{Ledger, SqliteStore, TrustRoots, check_receipt};

use crate::ledger_fixture::{LedgerFixture, runtime};

#[test]
fn signatures_of_old_key_stay_valid_after_rotation() {
    let fixture = LedgerFixture::new();
    let (first, second, receipt) = runtime().block_on(async {
        let gate = fixture.open();
        let session = gate.session("desk", "alice", "s");
        let answer = session.call("look", json!({"customer": "C-1"})).await;
        let other = SqliteStore::open(fixture.ledger_path()).unwrap();
        let first = other.public_key();
        let second = other.rotate_key().await.unwrap();
        drop(other);
        // A process that was already running continues with the new key.
        session.call("look", json!({"customer": "C-2"})).await;
        (first, second, answer.receipt().unwrap())
    });
    assert_ne!(first, second);
    assert!(check_receipt(&receipt, &first) && !check_receipt(&receipt, &second));
    let verified = fixture.verify();
    assert_eq!(verified.signed_to, 2);
    for key in [&first, &second] {
        let elsewhere =
            Ledger::open_with_state_dir(fixture.ledger_path(), std::path::Path::new("/nowhere"))
                .unwrap();
        elsewhere.verify(&TrustRoots { key: Some(key.to_string()), anchor: None }, |_| ()).unwrap();
    }
    let elsewhere =
        Ledger::open_with_state_dir(fixture.ledger_path(), std::path::Path::new("/nowhere"))
            .unwrap();
    assert!(
        elsewhere.verify(&TrustRoots { key: Some("11".repeat(32)), anchor: None }, |_| ()).is_err()
    );
}

#[test]
fn undone_key_rotation_is_detected() {
    let fixture = LedgerFixture::new();
    let look = |fixture: &LedgerFixture, n: u32| {
        let call = async {
            fixture
                .open()
                .session("desk", "alice", "s")
                .call("look", json!({"customer": format!("C-{n}")}))
                .await
        };
        runtime().block_on(call);
    };
    let rotate = || {
        runtime().block_on(async {
            SqliteStore::open(fixture.ledger_path()).unwrap().rotate_key().await.unwrap()
        })
    };
    look(&fixture, 1);
    let first = fixture.verify().keys.remove(0);
    let (second, third) = (rotate(), rotate());
    look(&fixture, 2);
    fixture.verify();
    // The ledger is also valid after a prune.
    let pruned = async {
        SqliteStore::open(fixture.ledger_path())
            .unwrap()
            .prune(Timestamp::now(), Timestamp::MIN)
            .await
            .unwrap()
            .rows
    };
    assert_eq!(runtime().block_on(pruned), 2);
    fixture.verify();
    let flaw = |fixture: &LedgerFixture| {
        fixture.ledger().verify(&TrustRoots::default(), |_| ()).unwrap_err().to_string()
    };
    for key in [&*first, &*second] {
        let copy = fixture.copy();
        let sql = rusqlite::Connection::open(copy.ledger_path()).unwrap();
        sql.execute("UPDATE meta SET value = ?1 WHERE name = 'key'", [key]).unwrap();
        let error = flaw(&copy);
        assert!(
            error.starts_with(&format!(
                "the next signature would use {key}, but {third} is current"
            )),
            "{error}"
        );
        // Signing with the old key and restoring the name of the new key does not hide the change.
        look(&copy, 3);
        sql.execute("UPDATE meta SET value = ?1 WHERE name = 'key'", [&*third]).unwrap();
        let error = flaw(&copy);
        assert!(
            error.contains(&format!("is signed with {key}, but {third} was current")),
            "{error}"
        );
    }
}

#[test]
fn missing_signature_is_added_later() {
    let fixture = LedgerFixture::new();
    runtime().block_on(async {
        let gate = fixture.open();
        let session = gate.session("desk", "alice", "s");
        session.call("look", json!({"customer": "C-1"})).await;
        let other = SqliteStore::open(fixture.ledger_path()).unwrap();
        let key = other.rotate_key().await.unwrap();
        drop(other);
        let file = fixture
            .directory
            .path()
            .join(format!("ledger.db.state/keys/sign-{}.key", &key.get(..16).unwrap()));
        let aside = fixture.directory.path().join("aside.key");
        std::fs::rename(&file, &aside).unwrap();
        session.call("look", json!({"customer": "C-2"})).await;
        tokio::time::sleep(std::time::Duration::from_millis(1_500)).await;
        std::fs::rename(&aside, &file).unwrap();
        let signed = async || {
            for _ in 0..600 {
                if fixture.verify().signed_to == 2 {
                    return true;
                }
                tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            }
            false
        };
        assert!(signed().await, "the last row is not signed after the key is readable again");
    });
}

#[test]
fn receipt_is_valid_only_for_its_row() {
    let fixture = LedgerFixture::new();
    let receipt = runtime().block_on(async {
        let answer = fixture
            .open()
            .session("desk", "alice", "s")
            .call("look", json!({"customer": "C-1"}))
            .await;
        answer.receipt().unwrap()
    });
    let key = SqliteStore::open(fixture.ledger_path()).unwrap().public_key();
    assert!(check_receipt(&receipt, &key));
    let text = serde_json::to_string(&receipt).unwrap();
    for (from, to) in [("look", "pay"), ("succeeded", "refused"), ("\"seq\":1", "\"seq\":2")] {
        let changed: toolgate::Receipt = serde_json::from_str(&text.replace(from, to)).unwrap();
        assert!(!check_receipt(&changed, &key), "{from} to {to}");
    }
    let entry = &fixture.ledger().rows_of_call(receipt.call).unwrap()[0];
    assert_eq!((entry.seq, entry.hash), (receipt.seq, receipt.hash));
}
