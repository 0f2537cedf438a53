//! Whoever changes the ledger is found out.

use rusqlite::{Connection, OptionalExtension, params};
use serde_json::json;
use toolgate::{Row, SessionKey};
use toolgate_json::{Digest, to_canonical_bytes};
use toolgate_store::{
    Ledger, LedgerAnchor, SqliteStore, TrustRoots, VerificationReport, VerifyError, hash_chain,
};

use crate::ledger_fixture::{LedgerFixture, SeededRng, round_count, runtime};

/// A ledger of several sessions, closed, so that all of it is signed.
fn signed_ledger() -> LedgerFixture {
    let desk = LedgerFixture::new();
    runtime().block_on(async { record_calls(&desk, 0..9).await });
    desk
}

async fn record_calls(desk: &LedgerFixture, customers: std::ops::Range<u32>) {
    let gate = desk.open();
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

fn open_sql(desk: &LedgerFixture) -> Connection {
    Connection::open(desk.ledger_path()).unwrap()
}

fn call_id_at(sql: &Connection, row: Option<u64>) -> toolgate::CallId {
    let seq = i64::try_from(row.unwrap()).unwrap();
    toolgate::CallId::from_bytes(
        sql.query_row("SELECT call FROM ledger WHERE seq = ?1", [seq], |row| row.get(0)).unwrap(),
    )
}

fn row_count(sql: &Connection) -> usize {
    sql.query_row("SELECT count(*) FROM ledger", [], |row| row.get::<_, i64>(0))
        .unwrap()
        .try_into()
        .unwrap()
}

/// The first row of a session.
fn first_row_of_session(sql: &Connection, session: i64) -> usize {
    sql.query_row("SELECT min(seq) FROM ledger WHERE session = ?1", [session], |row| {
        row.get::<_, i64>(0)
    })
    .unwrap()
    .try_into()
    .unwrap()
}

/// What an attacker without the key can do: make all links fit again, and everything that hangs on
/// them.
fn relink_chain(sql: &Connection) {
    let first: i64 =
        sql.query_row("SELECT coalesce(max(seq), 0) FROM prunes", [], |row| row.get(0)).unwrap();
    let mut statement =
        sql.prepare("SELECT rowid, session, body FROM ledger ORDER BY seq").unwrap();
    let rows: Vec<(i64, i64, String)> = statement
        .query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))
        .unwrap()
        .map(Result::unwrap)
        .collect();
    sql.execute_batch("UPDATE ledger SET n = -n, seq = seq + 1000000; DELETE FROM entities")
        .unwrap();
    let mut heads: std::collections::BTreeMap<i64, (u64, Digest)> =
        std::collections::BTreeMap::new();
    let mut chained = hash_chain::genesis();
    for (index, (old, session, body)) in rows.iter().enumerate() {
        let row: Row = serde_json::from_str(body).unwrap();
        let (n, head) = heads
            .get(session)
            .copied()
            .unwrap_or_else(|| (0, hash_chain::session_genesis(&row.key)));
        let seq = u64::try_from(first).unwrap() + index as u64 + 1;
        let link = hash_chain::session_link(&head, n + 1, body.as_bytes());
        chained = hash_chain::ledger_link(&chained, seq, &link);
        heads.insert(*session, (n + 1, link));
        let (seq, n) = (i64::try_from(seq).unwrap(), i64::try_from(n + 1).unwrap());
        sql.execute(
            "UPDATE ledger SET seq = ?2, n = ?3, hash = ?4, chain = ?5, call = ?6, tool = ?7, code = ?8, decision = ?9 WHERE seq = ?1",
            params![
                old + 1_000_000,
                seq,
                n,
                link.as_bytes(),
                chained.as_bytes(),
                row.call.as_bytes(),
                &*row.tool,
                row.code(),
                row.decision.name()
            ],
        )
        .unwrap();
        for (name, value) in &row.entities {
            let value = String::from_utf8(to_canonical_bytes(value)).unwrap();
            sql.execute(
                "INSERT OR IGNORE INTO entities VALUES (?1, ?2, ?3)",
                params![&**name, value, seq],
            )
            .unwrap();
        }
    }
    sql.execute("UPDATE sessions SET rows = 0", []).unwrap();
    for (session, (n, head)) in heads {
        sql.execute(
            "UPDATE sessions SET rows = ?2, head = ?3 WHERE id = ?1",
            params![session, i64::try_from(n).unwrap(), head.as_bytes()],
        )
        .unwrap();
    }
    sql.execute("DELETE FROM sessions WHERE rows = 0", []).unwrap();
}

/// A row that says something else.
fn edit_row(sql: &Connection, seq: usize) {
    let body: String = sql
        .query_row("SELECT body FROM ledger WHERE seq = ?1", [seq as i64], |row| row.get(0))
        .unwrap();
    let mut row: Row = serde_json::from_str(&body).unwrap();
    row.turn = Some(row.turn.unwrap_or(0) + 1);
    let body = String::from_utf8(row.to_canonical_bytes().unwrap()).unwrap();
    sql.execute("UPDATE ledger SET body = ?2 WHERE seq = ?1", params![seq as i64, body]).unwrap();
}

/// A row changes places with the last one: which.
fn swap_with_last_row(sql: &Connection, dice: &mut SeededRng) -> usize {
    let (a, b) = (1 + dice.next_below(row_count(sql) - 1) as i64, row_count(sql) as i64);
    sql.execute("UPDATE ledger SET seq = -1 WHERE seq = ?1", [a]).unwrap();
    sql.execute("UPDATE ledger SET seq = ?1 WHERE seq = ?2", [a, b]).unwrap();
    sql.execute("UPDATE ledger SET seq = ?1 WHERE seq = -1", [b]).unwrap();
    a as usize
}

/// A ledger signed by somebody else, who lets his key be vouched for by nobody but himself.
fn ledger_signed_by_other_key(desk: &LedgerFixture) -> (String, impl Fn(&str, &str) -> String) {
    let other = LedgerFixture::new();
    let store = SqliteStore::open(other.ledger_path()).unwrap();
    let key = store.public_key().to_string();
    let _ = desk;
    // What he signs is signed with the key of his own ledger: taken from there.
    let directory = other.directory.path().join("ledger.db.state/keys");
    let file = std::fs::read_dir(directory)
        .unwrap()
        .map(|e| e.unwrap().path())
        .find(|p| p.to_string_lossy().contains("sign-"))
        .unwrap();
    let secret = std::fs::read_to_string(file).unwrap();
    let bytes: Vec<u8> = (0..64)
        .step_by(2)
        .map(|at| u8::from_str_radix(secret.get(at..at + 2).unwrap(), 16).unwrap())
        .collect();
    let signing = ed25519_dalek::SigningKey::from_bytes(&bytes.try_into().unwrap());
    let sign = move |kind: &str, body: &str| {
        let statement = format!("toolgate-{kind}-v1\0{body}");
        ed25519_dalek::Signer::sign(&signing, statement.as_bytes())
            .to_bytes()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect()
    };
    (key, sign)
}

/// What must be found: the row that is named, where one is, and how the words about it begin.
type ExpectedFlaw = (Option<u64>, String);

fn flaw_at_row(row: usize, what: impl Into<String>) -> ExpectedFlaw {
    (Some(row as u64), what.into())
}

fn flaw_without_row(what: impl Into<String>) -> ExpectedFlaw {
    (None, what.into())
}

/// Makes all links fit again, behind a change at this row: nobody sees it before the next row that
/// was signed.
fn flaw_after_relink(sql: &Connection, changed: usize) -> ExpectedFlaw {
    relink_chain(sql);
    let signed: i64 = sql
        .query_row("SELECT min(seq) FROM checkpoints WHERE seq >= ?1", [changed as i64], |row| {
            row.get(0)
        })
        .unwrap();
    let (signed, left) = (signed as usize, row_count(sql));
    if signed <= left {
        flaw_at_row(signed, "the rows up to here do not match a checkpoint")
    } else {
        flaw_at_row(left + 1, format!("missing: row {signed} was signed, but the ledger ends here"))
    }
}

type TamperAttack = (&'static str, fn(&Connection, &LedgerFixture, &mut SeededRng) -> ExpectedFlaw);

const REMOVED_SIGNATURES_ATTACK: &str = "all signatures are taken out";

const ATTACKS: [TamperAttack; 18] = [
    ("a row is edited", |sql, _, dice| {
        let seq = 1 + dice.next_below(row_count(sql));
        edit_row(sql, seq);
        flaw_at_row(seq, "the row was changed")
    }),
    ("a row is edited, and its own link made to fit", |sql, _, dice| {
        let seq = 1 + dice.next_below(row_count(sql) - 1);
        edit_row(sql, seq);
        let (session, n, body): (i64, i64, String) = sql
            .query_row("SELECT session, n, body FROM ledger WHERE seq = ?1", [seq as i64], |row| {
                Ok((row.get(0)?, row.get(1)?, row.get(2)?))
            })
            .unwrap();
        let before: Option<Vec<u8>> = sql
            .query_row(
                "SELECT hash FROM ledger WHERE session = ?1 AND n = ?2",
                [session, n - 1],
                |row| row.get(0),
            )
            .optional()
            .unwrap();
        let before = match before {
            Some(hash) => Digest::from_bytes(hash.try_into().unwrap()),
            None => hash_chain::session_genesis(&serde_json::from_str::<Row>(&body).unwrap().key),
        };
        let link = hash_chain::session_link(&before, u64::try_from(n).unwrap(), body.as_bytes());
        sql.execute(
            "UPDATE ledger SET hash = ?2 WHERE seq = ?1",
            params![seq as i64, link.as_bytes()],
        )
        .unwrap();
        flaw_at_row(seq, "the row was moved")
    }),
    ("a row is edited, and all links made to fit", |sql, _, dice| {
        let seq = 1 + dice.next_below(row_count(sql));
        edit_row(sql, seq);
        flaw_after_relink(sql, seq)
    }),
    ("a row is taken out", |sql, _, dice| {
        let seq = 1 + dice.next_below(row_count(sql));
        sql.execute("DELETE FROM ledger WHERE seq = ?1", [seq as i64]).unwrap();
        flaw_at_row(seq, "missing")
    }),
    ("a row is taken out, and all links made to fit", |sql, _, dice| {
        let seq = 1 + dice.next_below(row_count(sql) - 1);
        sql.execute("DELETE FROM ledger WHERE seq = ?1", [seq as i64]).unwrap();
        flaw_after_relink(sql, seq)
    }),
    ("two rows are swapped", |sql, _, dice| {
        let seq = swap_with_last_row(sql, dice);
        flaw_at_row(seq, "not the next row of its session")
    }),
    ("two rows are swapped, and all links made to fit", |sql, _, dice| {
        let seq = swap_with_last_row(sql, dice);
        flaw_after_relink(sql, seq)
    }),
    ("a row is put in, and all links made to fit", |sql, _, dice| {
        let seq = 1 + dice.next_below(row_count(sql) - 1) as i64;
        let body: String = sql
            .query_row("SELECT body FROM ledger WHERE seq = ?1", [seq], |row| row.get(0))
            .unwrap();
        let mut row: Row = serde_json::from_str(&body).unwrap();
        let mut name = *row.call.as_bytes();
        name[15] ^= 1;
        row.call = toolgate::CallId::from_bytes(name);
        let body = String::from_utf8(row.to_canonical_bytes().unwrap()).unwrap();
        sql.execute("UPDATE ledger SET seq = seq + 500000 WHERE seq >= ?1", [seq]).unwrap();
        sql.execute(
            "INSERT INTO ledger SELECT ?1, session, n + 500, ?2, at, tool, decision, gate, code, rule, hash, chain, ?3 FROM ledger WHERE seq = ?1 + 500000",
            params![seq, name, body],
        )
        .unwrap();
        flaw_after_relink(sql, seq as usize)
    }),
    ("the end is cut off, and its signatures", |sql, _, dice| {
        let (keep, all) = (dice.next_below(row_count(sql) - 1), row_count(sql));
        sql.execute("DELETE FROM ledger WHERE seq > ?1", [keep as i64]).unwrap();
        sql.execute("DELETE FROM checkpoints WHERE seq > ?1", [keep as i64]).unwrap();
        relink_chain(sql);
        flaw_at_row(keep + 1, format!("missing: row {all} was signed, but the ledger ends here"))
    }),
    ("a whole session is taken out", |sql, _, dice| {
        let session = 1 + dice.next_below(3) as i64;
        let first = first_row_of_session(sql, session);
        sql.execute("DELETE FROM ledger WHERE session = ?1", [session]).unwrap();
        flaw_after_relink(sql, first)
    }),
    ("a session gets another name", |sql, _, dice| {
        let session = 1 + dice.next_below(3) as i64;
        sql.execute("UPDATE sessions SET principal = 'mallory' WHERE id = ?1", [session]).unwrap();
        flaw_at_row(first_row_of_session(sql, session), "the row was changed")
    }),
    ("a column says something else", |sql, _, dice| {
        let column = [
            "tool = 'look2'",
            "decision = 'succeeded2'",
            "at = at + 1",
            "code = 'other'",
            "rule = 'other'",
            "gate = 'other'",
        ][dice.next_below(6)];
        let seq = 1 + dice.next_below(row_count(sql));
        sql.execute(&format!("UPDATE ledger SET {column} WHERE seq = ?1"), [seq as i64]).unwrap();
        flaw_at_row(seq, "the search columns do not match the row")
    }),
    ("a row cannot be found by its entity any more", |sql, _, dice| {
        let (name, value, seq): (String, String, i64) = sql
            .query_row(
                "SELECT name, value, seq FROM entities LIMIT 1 OFFSET ?1",
                [dice.next_below(9) as i64],
                |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)),
            )
            .unwrap();
        sql.execute(
            "DELETE FROM entities WHERE name = ?1 AND value = ?2 AND seq = ?3",
            params![name, value, seq],
        )
        .unwrap();
        flaw_at_row(seq as usize, format!("the entity index has no entry for its `{name}`"))
    }),
    ("a row is found by what it is not about", |sql, _, dice| {
        sql.execute(
            "INSERT INTO entities VALUES ('customer_id', '\"C-77\"', ?1)",
            [1 + dice.next_below(row_count(sql)) as i64],
        )
        .unwrap();
        flaw_without_row("the entity index has entries for entities that no row has")
    }),
    ("the rules are changed that rows were decided by", |sql, _, _| {
        sql.execute("UPDATE configs SET body = replace(body, '300', '900')", []).unwrap();
        let config: Vec<u8> =
            sql.query_row("SELECT digest FROM configs", [], |row| row.get(0)).unwrap();
        flaw_without_row(format!(
            "the configuration {} was changed",
            Digest::from_bytes(config.try_into().unwrap())
        ))
    }),
    (REMOVED_SIGNATURES_ATTACK, |sql, _, _| {
        sql.execute("DELETE FROM checkpoints", []).unwrap();
        flaw_without_row(format!(
            "signatures are missing: row {} was signed, but no signature is after row 0",
            row_count(sql)
        ))
    }),
    ("everything is signed with another key", |sql, desk, dice| {
        edit_row(sql, 1 + dice.next_below(row_count(sql)));
        relink_chain(sql);
        let (key, sign) = ledger_signed_by_other_key(desk);
        let (seq, chained): (i64, Vec<u8>) = sql
            .query_row("SELECT seq, chain FROM ledger ORDER BY seq DESC LIMIT 1", [], |row| {
                Ok((row.get(0)?, row.get(1)?))
            })
            .unwrap();
        let id: String = sql
            .query_row("SELECT value FROM meta WHERE name = 'id'", [], |row| row.get(0))
            .unwrap();
        let chained = Digest::from_bytes(chained.try_into().unwrap());
        let body = json!({"at": "2026-11-15T00:00:00Z", "chain": chained, "seq": seq, "store": id});
        let body = String::from_utf8(to_canonical_bytes(&body)).unwrap();
        sql.execute("DELETE FROM checkpoints", []).unwrap();
        sql.execute(
            "INSERT INTO checkpoints VALUES (?1, ?2, ?3, ?4)",
            params![seq, body, key, sign("checkpoint", &body)],
        )
        .unwrap();
        sql.execute("UPDATE meta SET value = ?1 WHERE name = 'key'", [&key]).unwrap();
        flaw_without_row(format!(
            "the checkpoint at row {seq} is signed with {key}, which is not a trusted key"
        ))
    }),
    ("rows are passed off as pruned by a key that vouches for the right one", |sql, desk, dice| {
        let gone = 1 + dice.next_below(row_count(sql) - 1) as i64;
        let right: String =
            sql.query_row("SELECT key FROM checkpoints LIMIT 1", [], |row| row.get(0)).unwrap();
        let id: String = sql
            .query_row("SELECT value FROM meta WHERE name = 'id'", [], |row| row.get(0))
            .unwrap();
        let chained: Vec<u8> = sql
            .query_row("SELECT chain FROM ledger WHERE seq = ?1", [gone], |row| row.get(0))
            .unwrap();
        let chained = Digest::from_bytes(chained.try_into().unwrap());
        let (key, sign) = ledger_signed_by_other_key(desk);
        let vouch = json!({"at": "2026-11-15T00:00:00Z", "chain": hash_chain::genesis(), "seq": 0, "store": id, "next_key": right});
        let vouch = String::from_utf8(to_canonical_bytes(&vouch)).unwrap();
        sql.execute(
            "INSERT INTO checkpoints (rowid, seq, body, key, signature) VALUES (-5, 0, ?1, ?2, ?3)",
            params![vouch, key, sign("checkpoint", &vouch)],
        )
        .unwrap();
        sql.execute(
            "UPDATE sessions SET pruned = g.n, anchor = (SELECT hash FROM ledger WHERE session = sessions.id AND n = g.n)
             FROM (SELECT session, max(n) AS n FROM ledger WHERE seq <= ?1 GROUP BY session) AS g WHERE g.session = sessions.id",
            [gone],
        )
        .unwrap();
        sql.execute("DELETE FROM ledger WHERE seq <= ?1", [gone]).unwrap();
        sql.execute("DELETE FROM entities WHERE seq <= ?1", [gone]).unwrap();
        let mut all = Vec::new();
        let mut statement =
            sql.prepare("SELECT id, pruned, anchor, agent, principal, session FROM sessions WHERE pruned > 0 ORDER BY id").unwrap();
        let mut rows = statement.query([]).unwrap();
        while let Some(row) = rows.next().unwrap() {
            let names: [String; 3] =
                [row.get(3).unwrap(), row.get(4).unwrap(), row.get(5).unwrap()];
            all.extend(to_canonical_bytes(&json!(names)));
            all.extend(row.get::<_, i64>(0).unwrap().to_be_bytes());
            all.extend(row.get::<_, i64>(1).unwrap().to_be_bytes());
            all.extend(row.get::<_, Vec<u8>>(2).unwrap());
        }
        let body = json!({"at": "2026-11-15T00:00:00Z", "chain": chained, "seq": gone, "store": id, "anchors": Digest::of(&all)});
        let body = String::from_utf8(to_canonical_bytes(&body)).unwrap();
        sql.execute(
            "INSERT INTO prunes VALUES (?1, ?2, ?3, ?4)",
            params![gone, body, key, sign("prune", &body)],
        )
        .unwrap();
        flaw_without_row(format!(
            "the record of pruned rows is signed with {key}, which is not a trusted key"
        ))
    }),
];

#[test]
fn every_tamper_attack_is_detected() {
    let desk = signed_ledger();
    let verified = desk.verify();
    assert_eq!((verified.rows, verified.sessions, verified.signed_to), (36, 3, 36));
    let mut dice = SeededRng::new(11);
    for round in 0..round_count(6, 250) {
        for (name, attack) in ATTACKS {
            let copy = desk.copy();
            let connection = open_sql(&copy);
            let (row, what) = attack(&connection, &copy, &mut dice);
            drop(connection);
            let is_found =
                |who: &str, checked: Result<VerificationReport, VerifyError>, what: &str| {
                    let Err(flaw) = checked else {
                        panic!("round {round}: {name}, and {who} nobody notices")
                    };
                    assert!(
                        flaw.seq == row && flaw.what.starts_with(what),
                        "round {round}: {name}, at {row:?}, and {who} it is {flaw}"
                    );
                    // A call that is named is the one that stands there.
                    let there = flaw.call.map(|_| call_id_at(&open_sql(&copy), row));
                    assert_eq!(flaw.call, there, "round {round}: {name}, {flaw}");
                };
            is_found(
                "with what stands beside it",
                copy.ledger().verify(&TrustRoots::default(), |_| ()),
                &what,
            );
            // Nor does it hold for somebody who has nothing but the public key.
            let key = Some(verified.keys[0].clone());
            let elsewhere =
                Ledger::open_with_state_dir(copy.ledger_path(), std::path::Path::new("/nowhere"))
                    .unwrap();
            // Where all of it is still there, an anchor is as good as a signature.
            let (anchor, what) = match name == REMOVED_SIGNATURES_ATTACK {
                true => (None, "no row is signed"),
                false => (Some(verified.anchor), what.as_str()),
            };
            is_found(
                "with a key and an anchor",
                elsewhere.verify(&TrustRoots { anchor, key }, |_| ()),
                what,
            );
        }
    }
}

#[test]
fn relinking_unchanged_rows_changes_nothing() {
    let desk = signed_ledger();
    let before = desk.export();
    relink_chain(&open_sql(&desk));
    assert_eq!(desk.export(), before, "the attacker knows how it is done");
    desk.verify();
}

#[test]
fn older_copy_of_ledger_is_detected() {
    let desk = signed_ledger();
    let yesterday = desk.copy();
    runtime().block_on(async { record_calls(&desk, 20..24).await });
    let today = desk.verify();
    // Only the file is put back.
    std::fs::copy(yesterday.ledger_path(), desk.ledger_path()).unwrap();
    let flaw = desk.ledger().verify(&TrustRoots::default(), |_| ()).unwrap_err();
    assert_eq!(
        flaw.to_string(),
        format!("row 37: missing: row {} was signed, but the ledger ends here", today.anchor.seq)
    );
    let error = SqliteStore::open(desk.ledger_path()).unwrap_err().to_string();
    assert!(error.contains("ends at row 36") && error.contains("older copy"), "{error}");
    // All of it is put back: only somebody who noted down where it stood can tell.
    yesterday.verify();
    let anchor = TrustRoots { anchor: Some(today.anchor), key: None };
    let flaw = yesterday.ledger().verify(&anchor, |_| ()).unwrap_err();
    assert!(flaw.to_string().contains("missing"), "{flaw}");
    let forged =
        TrustRoots { anchor: Some(LedgerAnchor { seq: 10, chain: today.anchor.chain }), key: None };
    assert!(
        yesterday
            .ledger()
            .verify(&forged, |_| ())
            .unwrap_err()
            .to_string()
            .contains("do not match the anchor")
    );
}

#[test]
fn deleted_ledger_is_detected() {
    let desk = signed_ledger();
    std::fs::remove_file(desk.ledger_path()).unwrap();
    let error = SqliteStore::open(desk.ledger_path()).unwrap_err().to_string();
    assert!(error.contains("another ledger was here, with 36 rows"), "{error}");
}

#[test]
fn flipped_bit_is_detected_or_changes_no_row() {
    let desk = signed_ledger();
    let (whole, bytes) = (desk.export(), std::fs::read(desk.ledger_path()).unwrap());
    let mut dice = SeededRng::new(3);
    let (mut found, mut harmless) = (0, 0);
    let copy = desk.copy();
    for _ in 0..round_count(150, 20_000) {
        let mut flipped = bytes.clone();
        let at = dice.next_below(flipped.len());
        flipped[at] ^= 1 << dice.next_below(8);
        std::fs::write(copy.ledger_path(), &flipped).unwrap();
        let checked =
            Ledger::open(copy.ledger_path()).map_err(|e| e.to_string()).and_then(|ledger| {
                let checked =
                    ledger.verify(&TrustRoots::default(), |_| ()).map_err(|flaw| flaw.to_string());
                checked.map(|_| crate::ledger_fixture::export(&ledger))
            });
        match checked {
            Err(_) => found += 1,
            Ok(rows) => {
                assert_eq!(rows, whole, "bit at {at}");
                harmless += 1;
            }
        }
    }
    assert!(found > 0, "{found} found, {harmless} harmless");
    println!("{found} flipped bits were found, {harmless} changed no row");
}

#[test]
fn session_key_digests_do_not_collide() {
    let (a, b) = (SessionKey::new("a", "b", "c"), SessionKey::new("a", "b\",\"c", ""));
    assert_ne!(hash_chain::session_genesis(&a), hash_chain::session_genesis(&b));
}
