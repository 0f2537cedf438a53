//! Attacks on the ledger file, with the problem that a verification must report for each.

use rusqlite::{Connection, OptionalExtension, params};
use serde_json::json;
use toolgate::Row;
use toolgate_json::{Digest, to_canonical_bytes};
use toolgate_store::{SqliteStore, hash_chain};

use crate::ledger_fixture::{LedgerFixture, SeededRng};

fn row_count(sql: &Connection) -> usize {
    sql.query_row("SELECT count(*) FROM ledger", [], |row| row.get::<_, i64>(0))
        .unwrap()
        .try_into()
        .unwrap()
}

/// Returns the first row of a session.
fn first_row_of_session(sql: &Connection, session: i64) -> usize {
    sql.query_row("SELECT min(seq) FROM ledger WHERE session = ?1", [session], |row| {
        row.get::<_, i64>(0)
    })
    .unwrap()
    .try_into()
    .unwrap()
}

/// Recomputes all links and the columns that depend on them, as an attacker without the key can.
pub(super) fn relink_chain(sql: &Connection) {
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
    let mut chain = hash_chain::genesis();
    for (index, (old, session, body)) in rows.iter().enumerate() {
        let row: Row = serde_json::from_str(body).unwrap();
        let (n, head) = heads
            .get(session)
            .copied()
            .unwrap_or_else(|| (0, hash_chain::session_genesis(&row.key)));
        let seq = u64::try_from(first).unwrap() + index as u64 + 1;
        let link = hash_chain::session_link(&head, n + 1, body.as_bytes());
        chain = hash_chain::ledger_link(&chain, seq, &link);
        heads.insert(*session, (n + 1, link));
        let (seq, n) = (i64::try_from(seq).unwrap(), i64::try_from(n + 1).unwrap());
        sql.execute(
            "UPDATE ledger SET seq = ?2, n = ?3, hash = ?4, chain = ?5, call = ?6, tool = ?7, code = ?8, decision = ?9 WHERE seq = ?1",
            params![
                old + 1_000_000,
                seq,
                n,
                link.as_bytes(),
                chain.as_bytes(),
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

/// Changes the content of a row.
fn edit_row(sql: &Connection, seq: usize) {
    let body: String = sql
        .query_row("SELECT body FROM ledger WHERE seq = ?1", [seq as i64], |row| row.get(0))
        .unwrap();
    let mut row: Row = serde_json::from_str(&body).unwrap();
    row.turn = Some(row.turn.unwrap_or(0) + 1);
    let body = String::from_utf8(row.to_canonical_bytes().unwrap()).unwrap();
    sql.execute("UPDATE ledger SET body = ?2 WHERE seq = ?1", params![seq as i64, body]).unwrap();
}

/// Swaps a random row with the last row, and returns its number.
fn swap_with_last_row(sql: &Connection, rng: &mut SeededRng) -> usize {
    let (a, b) = (1 + rng.next_below(row_count(sql) - 1) as i64, row_count(sql) as i64);
    sql.execute("UPDATE ledger SET seq = -1 WHERE seq = ?1", [a]).unwrap();
    sql.execute("UPDATE ledger SET seq = ?1 WHERE seq = ?2", [a, b]).unwrap();
    sql.execute("UPDATE ledger SET seq = ?1 WHERE seq = -1", [b]).unwrap();
    a as usize
}

/// Creates another ledger, and returns its public key and a function that signs with its key.
fn ledger_signed_by_other_key() -> (String, impl Fn(&str, &str) -> String) {
    let other = LedgerFixture::new();
    let store = SqliteStore::open(other.ledger_path()).unwrap();
    let key = store.public_key().to_string();
    // The signing key is read from the state directory of the other ledger.
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

/// The expected error: its row, if any, and the start of its message.
pub(super) type ExpectedFlaw = (Option<u64>, String);

fn flaw_at_row(row: usize, what: impl Into<String>) -> ExpectedFlaw {
    (Some(row as u64), what.into())
}

fn flaw_without_row(what: impl Into<String>) -> ExpectedFlaw {
    (None, what.into())
}

/// Relinks the chain after a change at a row.
///
/// Verification detects the change at the next signed row.
fn flaw_after_relink(sql: &Connection, changed: usize) -> ExpectedFlaw {
    relink_chain(sql);
    let signed: i64 = sql
        .query_row("SELECT min(seq) FROM checkpoints WHERE seq >= ?1", [changed as i64], |row| {
            row.get(0)
        })
        .unwrap();
    let (signed, remaining) = (signed as usize, row_count(sql));
    if signed <= remaining {
        flaw_at_row(signed, "the rows up to here do not match a checkpoint")
    } else {
        flaw_at_row(
            remaining + 1,
            format!("missing: row {signed} was signed, but the ledger ends here"),
        )
    }
}

pub(super) type TamperAttack =
    (&'static str, fn(&Connection, &LedgerFixture, &mut SeededRng) -> ExpectedFlaw);

pub(super) const REMOVED_SIGNATURES_ATTACK: &str = "all signatures are deleted";

pub(super) const ATTACKS: [TamperAttack; 18] = [
    ("a row is edited", |sql, _, rng| {
        let seq = 1 + rng.next_below(row_count(sql));
        edit_row(sql, seq);
        flaw_at_row(seq, "the row was changed")
    }),
    ("a row is edited, and its own link is recomputed", |sql, _, rng| {
        let seq = 1 + rng.next_below(row_count(sql) - 1);
        edit_row(sql, seq);
        let (session, n, body): (i64, i64, String) = sql
            .query_row("SELECT session, n, body FROM ledger WHERE seq = ?1", [seq as i64], |row| {
                Ok((row.get(0)?, row.get(1)?, row.get(2)?))
            })
            .unwrap();
        let previous: Option<Vec<u8>> = sql
            .query_row(
                "SELECT hash FROM ledger WHERE session = ?1 AND n = ?2",
                [session, n - 1],
                |row| row.get(0),
            )
            .optional()
            .unwrap();
        let previous = match previous {
            Some(hash) => Digest::from_bytes(hash.try_into().unwrap()),
            None => hash_chain::session_genesis(&serde_json::from_str::<Row>(&body).unwrap().key),
        };
        let link = hash_chain::session_link(&previous, u64::try_from(n).unwrap(), body.as_bytes());
        sql.execute(
            "UPDATE ledger SET hash = ?2 WHERE seq = ?1",
            params![seq as i64, link.as_bytes()],
        )
        .unwrap();
        flaw_at_row(seq, "the row was moved")
    }),
    ("a row is edited, and all links are recomputed", |sql, _, rng| {
        let seq = 1 + rng.next_below(row_count(sql));
        edit_row(sql, seq);
        flaw_after_relink(sql, seq)
    }),
    ("a row is deleted", |sql, _, rng| {
        let seq = 1 + rng.next_below(row_count(sql));
        sql.execute("DELETE FROM ledger WHERE seq = ?1", [seq as i64]).unwrap();
        flaw_at_row(seq, "missing")
    }),
    ("a row is deleted, and all links are recomputed", |sql, _, rng| {
        let seq = 1 + rng.next_below(row_count(sql) - 1);
        sql.execute("DELETE FROM ledger WHERE seq = ?1", [seq as i64]).unwrap();
        flaw_after_relink(sql, seq)
    }),
    ("two rows are swapped", |sql, _, rng| {
        let seq = swap_with_last_row(sql, rng);
        flaw_at_row(seq, "not the next row of its session")
    }),
    ("two rows are swapped, and all links are recomputed", |sql, _, rng| {
        let seq = swap_with_last_row(sql, rng);
        flaw_after_relink(sql, seq)
    }),
    ("a row is inserted, and all links are recomputed", |sql, _, rng| {
        let seq = 1 + rng.next_below(row_count(sql) - 1) as i64;
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
    ("the last rows and their signatures are deleted", |sql, _, rng| {
        let (keep, all) = (rng.next_below(row_count(sql) - 1), row_count(sql));
        sql.execute("DELETE FROM ledger WHERE seq > ?1", [keep as i64]).unwrap();
        sql.execute("DELETE FROM checkpoints WHERE seq > ?1", [keep as i64]).unwrap();
        relink_chain(sql);
        flaw_at_row(keep + 1, format!("missing: row {all} was signed, but the ledger ends here"))
    }),
    ("a whole session is deleted", |sql, _, rng| {
        let session = 1 + rng.next_below(3) as i64;
        let first = first_row_of_session(sql, session);
        sql.execute("DELETE FROM ledger WHERE session = ?1", [session]).unwrap();
        flaw_after_relink(sql, first)
    }),
    ("a session gets another name", |sql, _, rng| {
        let session = 1 + rng.next_below(3) as i64;
        sql.execute("UPDATE sessions SET principal = 'mallory' WHERE id = ?1", [session]).unwrap();
        flaw_at_row(first_row_of_session(sql, session), "the row was changed")
    }),
    ("a column is changed", |sql, _, rng| {
        let column = [
            "tool = 'look2'",
            "decision = 'succeeded2'",
            "at = at + 1",
            "code = 'other'",
            "rule = 'other'",
            "gate = 'other'",
        ][rng.next_below(6)];
        let seq = 1 + rng.next_below(row_count(sql));
        sql.execute(&format!("UPDATE ledger SET {column} WHERE seq = ?1"), [seq as i64]).unwrap();
        flaw_at_row(seq, "the search columns do not match the row")
    }),
    ("an entity of a row is deleted from the index", |sql, _, rng| {
        let (name, value, seq): (String, String, i64) = sql
            .query_row(
                "SELECT name, value, seq FROM entities LIMIT 1 OFFSET ?1",
                [rng.next_below(9) as i64],
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
    ("an entity is added to the index", |sql, _, rng| {
        sql.execute(
            "INSERT INTO entities VALUES ('customer_id', '\"C-77\"', ?1)",
            [1 + rng.next_below(row_count(sql)) as i64],
        )
        .unwrap();
        flaw_without_row("the entity index has entries for entities that no row has")
    }),
    ("the definition of recorded decisions is changed", |sql, _, _| {
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
    ("everything is signed with another key", |sql, _, rng| {
        edit_row(sql, 1 + rng.next_below(row_count(sql)));
        relink_chain(sql);
        let (key, sign) = ledger_signed_by_other_key();
        let (seq, chain): (i64, Vec<u8>) = sql
            .query_row("SELECT seq, chain FROM ledger ORDER BY seq DESC LIMIT 1", [], |row| {
                Ok((row.get(0)?, row.get(1)?))
            })
            .unwrap();
        let id: String = sql
            .query_row("SELECT value FROM meta WHERE name = 'id'", [], |row| row.get(0))
            .unwrap();
        let chain = Digest::from_bytes(chain.try_into().unwrap());
        let body = json!({"at": "2026-11-15T00:00:00Z", "chain": chain, "seq": seq, "store": id});
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
    (
        "deleted rows are recorded as pruned, with a key that vouches for the right key",
        |sql, _, rng| {
            let pruned = 1 + rng.next_below(row_count(sql) - 1) as i64;
            let right_key: String =
                sql.query_row("SELECT key FROM checkpoints LIMIT 1", [], |row| row.get(0)).unwrap();
            let id: String = sql
                .query_row("SELECT value FROM meta WHERE name = 'id'", [], |row| row.get(0))
                .unwrap();
            let chain: Vec<u8> = sql
                .query_row("SELECT chain FROM ledger WHERE seq = ?1", [pruned], |row| row.get(0))
                .unwrap();
            let chain = Digest::from_bytes(chain.try_into().unwrap());
            let (key, sign) = ledger_signed_by_other_key();
            let vouch = json!({"at": "2026-11-15T00:00:00Z", "chain": hash_chain::genesis(), "seq": 0, "store": id, "next_key": right_key});
            let vouch = String::from_utf8(to_canonical_bytes(&vouch)).unwrap();
            sql.execute(
            "INSERT INTO checkpoints (rowid, seq, body, key, signature) VALUES (-5, 0, ?1, ?2, ?3)",
            params![vouch, key, sign("checkpoint", &vouch)],
        )
        .unwrap();
            sql.execute(
            "UPDATE sessions SET pruned = g.n, anchor = (SELECT hash FROM ledger WHERE session = sessions.id AND n = g.n)
             FROM (SELECT session, max(n) AS n FROM ledger WHERE seq <= ?1 GROUP BY session) AS g WHERE g.session = sessions.id",
            [pruned],
        )
        .unwrap();
            sql.execute("DELETE FROM ledger WHERE seq <= ?1", [pruned]).unwrap();
            sql.execute("DELETE FROM entities WHERE seq <= ?1", [pruned]).unwrap();
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
            let body = json!({"at": "2026-11-15T00:00:00Z", "chain": chain, "seq": pruned, "store": id, "anchors": Digest::of(&all)});
            let body = String::from_utf8(to_canonical_bytes(&body)).unwrap();
            sql.execute(
                "INSERT INTO prunes VALUES (?1, ?2, ?3, ?4)",
                params![pruned, body, key, sign("prune", &body)],
            )
            .unwrap();
            flaw_without_row(format!(
                "the record of pruned rows is signed with {key}, which is not a trusted key"
            ))
        },
    ),
];
