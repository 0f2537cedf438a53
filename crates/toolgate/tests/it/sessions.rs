//! Tests the state of a session: evidence, reset, snapshot and restore.

use serde_json::json;
use toolgate::limits::{Budget, Limits};
use toolgate::policy::Sequence;
use toolgate::session::state::{EvidenceKey, EvidenceOrigin};
use toolgate::{Agent, Effect, Tool, ToolContext};

use crate::support::{BuildWithReplayCheck, TestWorld};

fn note_tool() -> Tool {
    let schema =
        json!({"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]});
    Tool::dynamic("note", "Notes.", schema, |ctx: ToolContext, args| async move {
        ctx.set_slice("note", &args["text"])?;
        ctx.log("notes", &args["text"])?;
        Ok(args)
    })
    .effect(Effect::Write)
    .local()
    .open()
}

#[tokio::test]
async fn snapshot_restore_keeps_logs() {
    let world = TestWorld::new(|a| a.tool(note_tool()));
    world.session.call("note", json!({"text": "one"})).await;
    let snapshot = world.session.snapshot().await.unwrap();
    world.session.call("note", json!({"text": "two"})).await;
    world.session.restore(&snapshot).await.unwrap();
    let state = world.session.state().await.unwrap();
    assert_eq!(state.slice("note"), Some(&json!("one")));
    assert_eq!(state.log("notes").collect::<Vec<_>>(), [&json!("one"), &json!("two")]);
}

#[tokio::test]
async fn session_reset_clears_evidence_and_keeps_spending() {
    let limits =
        Limits { session: Budget { calls: Some(3), ..Budget::default() }, ..Limits::default() };
    let world = TestWorld::new(|a| {
        a.tool(note_tool()).limits(limits).policy(Sequence::new("seq").after("act", ["look"]))
    });
    world.session.call("look", json!({})).await;
    assert!(world.session.call("act", json!({"how": "ok"})).await.outcome.success().is_some());
    world.session.reset().await.unwrap();
    let state = world.session.state().await.unwrap();
    assert!(state.slices.is_empty() && state.evidence.is_empty() && state.marks.is_empty());
    let refused = world.session.call("act", json!({"how": "ok"})).await;
    assert_eq!(refused.outcome.error().map(|e| &*e.code), Some("prerequisite_missing"));
    world.session.call("look", json!({"at": "again"})).await;
    assert_eq!(
        world.session.call("look", json!({"at": "more"})).await.outcome.error().map(|e| &*e.code),
        Some("budget_exhausted")
    );
    assert_eq!(world.meter_value().await, 1.into());
}

#[tokio::test]
async fn successful_call_is_evidence_about_its_entities() {
    let schema = json!({"type": "object", "properties": {"customer_id": {"type": "string"}}, "required": ["customer_id"]});
    let verify = Tool::dynamic("verify", "Verifies.", schema, |_, args| async move {
        Ok(json!({"active": args["customer_id"] == "C-1", "tier": "gold"}))
    })
    .effect(Effect::Read)
    .entity("customer_id", "/customer_id")
    .proves("/active");
    let world = TestWorld::new(|a| {
        a.tool(verify).tool(Tool::external("client_side", "Run by the client.", None).open())
    });
    for customer in ["C-1", "C-2"] {
        world.session.call("verify", json!({ "customer_id": customer })).await;
    }
    let state = world.session.state().await.unwrap();
    let about = |c: &str| {
        state.evidence(&EvidenceKey::tool("verify").about("customer_id", &json!(c))).cloned()
    };
    assert_eq!(about("C-1").unwrap().fields, json!({"/active": true}));
    assert_eq!(about("C-2").unwrap().fields, json!({"/active": false}));
    assert!(about("C-3").is_none());
    assert_eq!(
        state.evidence(&EvidenceKey::tool("verify")).unwrap().entities[0].1,
        json!("C-2"),
        "the latest"
    );
    // Evidence from a report of the client has its own origin.
    let deferred = world.session.admit("client_side", json!({"anything": 1})).await.ok().unwrap();
    assert_eq!(deferred.arguments.value(), &json!({"anything": 1}));
    world.session.report(&deferred, Ok(json!("done"))).await;
    let state = world.session.state().await.unwrap();
    assert_eq!(
        state.evidence(&EvidenceKey::tool("client_side").reported()).unwrap().origin,
        EvidenceOrigin::Reported
    );
}

#[tokio::test]
async fn session_state_is_isolated_by_agent_and_principal() {
    let agent = |name: &str| Agent::builder(name).tool(note_tool()).build().unwrap();
    let gate =
        crate::support::runtime_builder().agent(agent("a")).agent(agent("b")).build_checked();
    gate.session("a", "alice", "s").call("note", json!({"text": "mine"})).await;
    for (agent, principal, session) in [("a", "bob", "s"), ("b", "alice", "s"), ("a", "alice", "t")]
    {
        assert_eq!(gate.session(agent, principal, session).slice("note").await.unwrap(), None);
    }
    assert_eq!(gate.session("a", "alice", "s").slice("note").await.unwrap(), Some(json!("mine")));
}
