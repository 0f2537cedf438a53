//! Pins what is stored or hashed: definitions and digests of rules and agents, rows, and claims.
//!
//! A change here makes old ledgers unreadable or changes digests. Change a snapshot only together
//! with the schema version, and say so in the changelog.

use serde_json::{Value, json};
use toolgate::policy::{
    Condition, Deny, Flow, Limit, LimitOwner, Policy, ReadBeforeWrite, Require, Sequence,
};
use toolgate::store::{ClaimOwner, ClaimRecord, DedupKey};
use toolgate::{CallId, ManualClock, SessionKey, SignedDuration, Timestamp, Toolgate};
use toolgate_json::Digest;

fn rules() -> Vec<Box<dyn Policy>> {
    vec![
        Box::new(Require::new("verified", ["pay"], ["verify"]).same("customer", "/customer")),
        Box::new(Deny::new("cap", ["pay"]).when("/amount", Condition::Above(500.into()))),
        Box::new(Deny::ask("big", ["pay"]).when_cel("input.amount > 100")),
        Box::new(
            Limit::sum("daily", ["pay"], "/amount", 700.into())
                .per(LimitOwner::Principal)
                .within(SignedDuration::from_hours(24)),
        ),
        Box::new(Sequence::new("order").after("deploy", ["build"])),
        Box::new(ReadBeforeWrite::new("read_first").guard("write", "/path")),
        Box::new(Flow::new("no_mail", ["pay"], ["/note"])),
    ]
}

#[test]
fn rule_definitions_are_pinned() {
    let definitions: Vec<String> =
        rules().iter().map(|rule| format!("{}: {}", rule.name(), rule.definition())).collect();
    insta::assert_snapshot!(definitions.join("\n"));
}

#[test]
fn agent_definition_and_digest_are_pinned() {
    let agent = crate::agent_subset::whole_agent();
    let digest = Digest::of(agent.definition().as_bytes());
    let definition: Value = serde_json::from_str(agent.definition()).unwrap();
    insta::assert_snapshot!(format!("{digest}\n{definition:#}"));
}

/// Replaces what differs in every run.
fn normalize(row: &mut Value) {
    row["call"] = json!("CALL");
    row["latency"] = json!("LATENCY");
    row["config"] = json!("CONFIG");
    row["outcome"]["error"]["callId"] = json!("CALL");
    // Digests of calls are keyed, and the key of a store in memory is random.
    row["facts"]["progress"]["last"] = json!("DIGEST");
    assert_eq!(row["digest"].as_str().map(str::len), Some(64), "{row}");
    row["digest"] = json!("DIGEST");
}

#[tokio::test]
async fn row_json_is_pinned() {
    let clock =
        std::sync::Arc::new(ManualClock::at(Timestamp::from_second(1_800_000_000).unwrap()));
    let store = std::sync::Arc::new(toolgate::MemoryStore::new().with_clock(clock));
    let agent = crate::agent_subset::whole_agent();
    let gate = Toolgate::builder().agent(agent).store(store).build().unwrap();
    let session = gate.session("support", "alice", "s");
    let _ = session.call("issue_refund", json!({"customer_id": "C-1", "amount": 600})).await;
    let _ = session.call("bash", json!({"command": "git push"})).await;
    let rows = session.rows().await.unwrap();
    let rows: Vec<String> = rows
        .iter()
        .map(|row| {
            let mut row = serde_json::to_value(&**row).unwrap();
            normalize(&mut row);
            format!("{row:#}")
        })
        .collect();
    insta::assert_snapshot!(rows.join("\n"));
}

#[test]
fn claim_json_is_pinned() {
    let key = SessionKey::new("desk", "alice", "s");
    let claim = |owner| ClaimRecord {
        call: CallId::from_bytes([7; 16]),
        key: key.clone(),
        tool: "pay".into(),
        digest: Digest::of(b"call"),
        asked: Digest::of(b"call"),
        recall: vec![DedupKey {
            principal: "alice".into(),
            agent: "desk".into(),
            tool: "pay".into(),
            key: "key:k".to_owned(),
        }],
        owner,
        lease: Timestamp::from_second(1_800_000_000).unwrap(),
        effect: true,
        row: None,
        pass: None,
        carriers: Vec::new(),
        seen: None,
        revokes: Vec::new(),
    };
    let claims = [ClaimOwner::Term("t1".into()), ClaimOwner::ClientSession("s".into())].map(claim);
    insta::assert_snapshot!(format!("{:#}", serde_json::to_value(claims).unwrap()));
}
