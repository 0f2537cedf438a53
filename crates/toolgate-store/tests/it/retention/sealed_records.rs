//! Tests that secrets are stored only encrypted or redacted.

use std::sync::Arc;

use serde_json::{Value, json};
use toolgate::policy::{Limit, LimitOwner};
use toolgate::{Failure, Tool, Toolgate};
use toolgate_store::{RowFilter, SqliteStore};

use super::{all_bytes, contains};
use crate::ledger_fixture::{LedgerFixture, runtime};

#[test]
fn equal_secrets_are_redacted_to_equal_marks() {
    let fixture = LedgerFixture::new();
    runtime().block_on(async {
        let run = async |session: &str| {
            let store = Arc::new(SqliteStore::open(fixture.ledger_path()).unwrap());
            let world = fixture.world_path();
            let agent = toolgate::Agent::builder("desk")
                .tool(
                    Tool::dynamic(
                        "say",
                        "Says.",
                        json!({"type": "object", "properties": {"text": {"type": "string"}, "account": {"type": "string"}, "card": {"type": "string", "writeOnly": true}}}),
                        |_, args: Value| async move {
                            if args["text"] == "fail" { Err(Failure::business("no", "no: 4111-2222-3333-4444")) } else { Ok(json!({"said": args["text"]})) }
                        },
                    )
                    .open()
                    .once()
                    .entity("account", "/account"),
                )
                .build()
                .unwrap();
            let _ = world;
            let gate = Toolgate::builder().agent(agent).store(store).redact_pattern(r"\d{4}-\d{4}-\d{4}-\d{4}").unwrap().build().unwrap();
            let session = gate.session("desk", "alice", session);
            let answer = session.call("say", json!({"text": "it is 4111-2222-3333-4444, she said", "card": "tops3cret"})).await;
            assert_eq!(answer.outcome.success().unwrap().value["said"], "it is 4111-2222-3333-4444, she said", "the caller gets the unredacted value");
            session.call("say", json!({"text": "fail", "account": "4111-2222-3333-4444"})).await;
            answer
        };
        assert!(!run("one").await.outcome.success().unwrap().replayed);
        // After a restart, the repeated call returns the recorded outcome.
        assert!(run("two").await.outcome.success().unwrap().replayed);
    });
    let bytes = all_bytes(&fixture);
    assert!(!contains(&bytes, "4111-2222"), "a matching text is redacted everywhere");
    assert!(!contains(&bytes, "tops3cret"), "a secret is redacted");
    let entries = fixture.ledger().find(&RowFilter::default()).unwrap();
    let cards: Vec<&Value> = entries.iter().map(|entry| &entry.row.arguments["card"]).collect();
    assert!(cards[0].as_str().unwrap().starts_with("[redacted "), "{cards:?}");
    assert_eq!(cards[0], cards[2], "equal secrets have equal marks after a restart");
    let by_account = RowFilter {
        entity: Some(("account".to_owned(), "4111-2222-3333-4444".into())),
        ..RowFilter::default()
    };
    assert_eq!(
        fixture.ledger().find(&by_account).unwrap().len(),
        2,
        "a redacted value can be searched by its text"
    );
    fixture.verify();
}

#[test]
fn abandoned_call_leaves_no_secret_in_row() {
    let (fixture, card) = (LedgerFixture::new(), "4111111111111111");
    runtime().block_on(async {
        let schema = json!({"type": "object", "properties": {"card": {"type": "string"}, "n": {"type": "integer"}}});
        let agent = toolgate::Agent::builder("desk")
            .tool(Tool::external("pay", "Pays.", Some(schema)))
            .policy(Limit::calls("n", ["pay"], 5).per(LimitOwner::Entity("/card".into())));
        let store = Arc::new(SqliteStore::open(fixture.ledger_path()).unwrap());
        let gate = Toolgate::builder().agent(agent.build().unwrap()).store(store).redact_pattern(r"\b\d{16}\b").unwrap().build().unwrap();
        let session = gate.session("desk", "alice", "s");
        for n in 0..2 {
            let call = session.prepare("pay", json!({"card": card, "n": n})).client_id(format!("c{n}"));
            let _ = gate.admit(call).await.unwrap();
        }
        gate.close_client_session(session.key()).await.unwrap();
        let rows = session.rows().await.unwrap();
        assert_eq!(rows.iter().map(|row| row.code()).collect::<Vec<_>>(), [Some("abandoned"); 2]);
        for row in &rows {
            let text = String::from_utf8(row.to_canonical_bytes().unwrap()).unwrap();
            assert!(!text.contains(card) && text.contains("[redacted "), "{text}");
            // The row has the used amounts, under redacted names.
            let used: Vec<_> =
                row.facts.claimed.iter().map(|(counter, _, used)| (counter.contains("[redacted "), used.to_string())).collect();
            assert_eq!(used, [(true, row.arguments["n"].to_string())]);
        }
    });
    fixture.verify();
}
