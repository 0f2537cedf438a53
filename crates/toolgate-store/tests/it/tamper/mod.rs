//! Tests that verification detects changes to the ledger.

mod attacks;

use rusqlite::Connection;
use serde_json::json;
use toolgate::SessionKey;
use toolgate_store::{
    Ledger, LedgerAnchor, SqliteStore, TrustRoots, VerificationReport, VerifyError, hash_chain,
};

use self::attacks::{ATTACKS, REMOVED_SIGNATURES_ATTACK, relink_chain};
use crate::ledger_fixture::{LedgerFixture, SeededRng, round_count, runtime};

/// Creates a closed, fully signed ledger of several sessions.
fn signed_ledger() -> LedgerFixture {
    let fixture = LedgerFixture::new();
    runtime().block_on(async { record_calls(&fixture, 0..9).await });
    fixture
}

async fn record_calls(fixture: &LedgerFixture, customers: std::ops::Range<u32>) {
    let gate = fixture.open();
    for n in customers {
        let session = gate.session("desk", "alice", &format!("s{}", n % 3));
        session.call("look", json!({"customer": format!("C-{n}")})).await;
        session
            .call(
                "pay",
                json!({"customer": format!("C-{n}"), "amount": 100, "name": format!("p{n}")}),
            )
            .await;
        session.call("pay", json!({"customer": format!("C-{n}"), "amount": 700})).await;
        session.call("lok", json!({})).await;
    }
}

fn open_sql(fixture: &LedgerFixture) -> Connection {
    Connection::open(fixture.ledger_path()).unwrap()
}

fn call_id_at(sql: &Connection, row: Option<u64>) -> toolgate::CallId {
    let seq = i64::try_from(row.unwrap()).unwrap();
    toolgate::CallId::from_bytes(
        sql.query_row("SELECT call FROM ledger WHERE seq = ?1", [seq], |row| row.get(0)).unwrap(),
    )
}

#[test]
fn every_tamper_attack_is_detected() {
    let fixture = signed_ledger();
    let verified = fixture.verify();
    assert_eq!((verified.rows, verified.sessions, verified.signed_to), (36, 3, 36));
    let mut rng = SeededRng::new(11);
    for round in 0..round_count(6, 250) {
        for (name, attack) in ATTACKS {
            let copy = fixture.copy();
            let connection = open_sql(&copy);
            let (row, what) = attack(&connection, &copy, &mut rng);
            drop(connection);
            let assert_detected =
                |trust: &str, checked: Result<VerificationReport, VerifyError>, what: &str| {
                    let Err(flaw) = checked else {
                        panic!("round {round}: {name} is not detected with {trust}")
                    };
                    assert!(
                        flaw.seq == row && flaw.what.starts_with(what),
                        "round {round}: {name} at {row:?} with {trust}: {flaw}"
                    );
                    // The call of the error is the call of the row.
                    let call_at_row = flaw.call.map(|_| call_id_at(&open_sql(&copy), row));
                    assert_eq!(flaw.call, call_at_row, "round {round}: {name}, {flaw}");
                };
            assert_detected(
                "the state directory",
                copy.ledger().verify(&TrustRoots::default(), |_| ()),
                &what,
            );
            // The attack is also detected with the public key only.
            let key = Some(verified.keys[0].clone());
            let elsewhere =
                Ledger::open_with_state_dir(copy.ledger_path(), std::path::Path::new("/nowhere"))
                    .unwrap();
            // An anchor replaces the signatures, so their removal is checked without an anchor.
            let (anchor, what) = match name == REMOVED_SIGNATURES_ATTACK {
                true => (None, "no row is signed"),
                false => (Some(verified.anchor), what.as_str()),
            };
            assert_detected(
                "a key and an anchor",
                elsewhere.verify(&TrustRoots { anchor, key }, |_| ()),
                what,
            );
        }
    }
}

#[test]
fn relinking_unchanged_rows_changes_nothing() {
    let fixture = signed_ledger();
    let before = fixture.export();
    relink_chain(&open_sql(&fixture));
    assert_eq!(fixture.export(), before, "relinking computes the same chains");
    fixture.verify();
}

#[test]
fn older_copy_of_ledger_is_detected() {
    let fixture = signed_ledger();
    let older_copy = fixture.copy();
    runtime().block_on(async { record_calls(&fixture, 20..24).await });
    let newer_report = fixture.verify();
    // Only the database file is restored.
    std::fs::copy(older_copy.ledger_path(), fixture.ledger_path()).unwrap();
    let flaw = fixture.ledger().verify(&TrustRoots::default(), |_| ()).unwrap_err();
    assert_eq!(
        flaw.to_string(),
        format!(
            "row 37: missing: row {} was signed, but the ledger ends here",
            newer_report.anchor.seq
        )
    );
    let error = SqliteStore::open(fixture.ledger_path()).unwrap_err().to_string();
    assert!(error.contains("ends at row 36") && error.contains("older copy"), "{error}");
    // If the state directory is restored, too, only a saved anchor detects the older copy.
    older_copy.verify();
    let anchor = TrustRoots { anchor: Some(newer_report.anchor), key: None };
    let flaw = older_copy.ledger().verify(&anchor, |_| ()).unwrap_err();
    assert!(flaw.to_string().contains("missing"), "{flaw}");
    let forged = TrustRoots {
        anchor: Some(LedgerAnchor { seq: 10, chain: newer_report.anchor.chain }),
        key: None,
    };
    assert!(
        older_copy
            .ledger()
            .verify(&forged, |_| ())
            .unwrap_err()
            .to_string()
            .contains("do not match the anchor")
    );
}

#[test]
fn deleted_ledger_is_detected() {
    let fixture = signed_ledger();
    std::fs::remove_file(fixture.ledger_path()).unwrap();
    let error = SqliteStore::open(fixture.ledger_path()).unwrap_err().to_string();
    assert!(error.contains("another ledger was here, with 36 rows"), "{error}");
}

#[test]
fn flipped_bit_is_detected_or_changes_no_row() {
    let fixture = signed_ledger();
    let (rows_before, bytes) = (fixture.export(), std::fs::read(fixture.ledger_path()).unwrap());
    let mut rng = SeededRng::new(3);
    let (mut detected, mut harmless) = (0, 0);
    let copy = fixture.copy();
    for _ in 0..round_count(150, 20_000) {
        let mut flipped = bytes.clone();
        let at = rng.next_below(flipped.len());
        flipped[at] ^= 1 << rng.next_below(8);
        std::fs::write(copy.ledger_path(), &flipped).unwrap();
        let checked =
            Ledger::open(copy.ledger_path()).map_err(|e| e.to_string()).and_then(|ledger| {
                let checked =
                    ledger.verify(&TrustRoots::default(), |_| ()).map_err(|flaw| flaw.to_string());
                checked.map(|_| crate::ledger_fixture::export(&ledger))
            });
        match checked {
            Err(_) => detected += 1,
            Ok(rows) => {
                assert_eq!(rows, rows_before, "bit at {at}");
                harmless += 1;
            }
        }
    }
    assert!(detected > 0, "{detected} detected, {harmless} harmless");
    println!("{detected} flipped bits were detected, {harmless} changed no row");
}

#[test]
fn session_key_digests_do_not_collide() {
    let (a, b) = (SessionKey::new("a", "b", "c"), SessionKey::new("a", "b\",\"c", ""));
    assert_ne!(hash_chain::session_genesis(&a), hash_chain::session_genesis(&b));
}
