//! Tests the next step in the errors that a model reads.

mod explain;
mod redirects;
mod search;

use std::sync::Arc;

use serde_json::{Value, json};
use toolgate::policy::{
    Condition, Deny, EvidenceEntity, Limit, LimitOwner, ReadBeforeWrite, Require, Sequence,
};
use toolgate::{Agent, AgentBuilder, Effect, ManualClock, MemoryFs, Session, Tool};

use crate::support::BuildWithReplayCheck;

fn entity_tool(name: &str) -> Tool {
    let schema = json!({"type": "object", "required": ["entity"], "properties": {
        "entity": {"type": "integer"}, "amount": {"type": "number"}, "n": {"type": "integer"}, "pin": {"type": "string", "writeOnly": true},
    }});
    Tool::dynamic(name, "A tool.", schema, |_, args: Value| async move {
        Ok(json!({"ok": true, "owner": format!("o{}", args["entity"])}))
    })
    .entity("entity", "/entity")
    .proves("/ok")
    .proves("/owner")
}

fn start_session(agent: AgentBuilder) -> Session {
    let agent = agent.build().unwrap_or_else(|e| panic!("{}", e.render(false)));
    let clock = ManualClock::at("2026-03-02T09:30:00Z".parse().unwrap());
    crate::support::runtime_builder_at(Arc::new(clock))
        .agent(agent)
        .build_checked()
        .session("a", "alice", "s")
}

async fn call_and_next_step(
    session: &Session,
    name: &str,
    args: Value,
) -> (String, Option<(String, Value)>) {
    let answer = session.call(name, args).await;
    let error = answer.outcome.error();
    (
        error.map_or_else(|| "ok".to_owned(), |e| e.code.to_string()),
        error.and_then(|e| e.next.clone()).map(|n| (n.tool, n.arguments)),
    )
}

fn next_step(tool: &str, arguments: Value) -> Option<(String, Value)> {
    Some((tool.to_owned(), arguments))
}

#[tokio::test]
async fn next_step_is_first_call_of_shortest_plan() {
    let reads = |name: &str| entity_tool(name).effect(Effect::Read);
    let session = start_session(
        Agent::builder("a")
            .tool(entity_tool("act"))
            .tool(reads("proof"))
            .tool(reads("long_way"))
            .tool(reads("login"))
            .tool(reads("badge"))
            .policy(
                Require::new("proved", ["act"], ["long_way", "proof"])
                    .same("entity", "/entity")
                    .field("/ok", json!(true)),
            )
            .policy(Require::new("logged_in", ["proof", "long_way"], ["login"]))
            .policy(Sequence::new("badge_first").after("long_way", ["badge"])),
    );
    // The way over `long_way` has one more step: `badge`, `login`, `long_way`.
    let (code, next) = call_and_next_step(&session, "act", json!({"entity": 7, "n": 1})).await;
    assert_eq!(
        (code.as_str(), next),
        ("prerequisite_missing", next_step("login", json!({"entity": 7})))
    );
    assert_eq!(call_and_next_step(&session, "login", json!({"entity": 7})).await.0, "ok");
    assert_eq!(
        call_and_next_step(&session, "act", json!({"entity": 7, "n": 2})).await.1,
        next_step("proof", json!({"entity": 7}))
    );
    assert_eq!(call_and_next_step(&session, "proof", json!({"entity": 7})).await.0, "ok");
    assert_eq!(call_and_next_step(&session, "act", json!({"entity": 7, "n": 3})).await.0, "ok");
}

#[tokio::test]
async fn prerequisite_with_wrong_result_is_not_suggested_again() {
    let check = Tool::dynamic(
        "check",
        "Checks.",
        json!({"type": "object", "properties": {"entity": {"type": "integer"}}}),
        |_, _| async { Ok(json!({"ok": false})) },
    );
    let check = check.effect(Effect::Read).entity("entity", "/entity").proves("/ok");
    let rule = |redirect: bool| {
        let rule = Require::new("checked", ["act"], ["check"])
            .same("entity", "/entity")
            .field("/ok", json!(true))
            .reason("It must be checked.");
        if redirect { rule.redirect("person") } else { rule }
    };
    for redirect in [true, false] {
        let session = start_session(
            Agent::builder("a")
                .tool(check.clone())
                .tool(entity_tool("act"))
                .tool(entity_tool("person").open())
                .policy(rule(redirect)),
        );
        assert_eq!(
            call_and_next_step(&session, "act", json!({"entity": 1, "n": 1})).await.1,
            next_step("check", json!({"entity": 1}))
        );
        assert_eq!(call_and_next_step(&session, "check", json!({"entity": 1})).await.0, "ok");
        let answer = session.call("act", json!({"entity": 1, "n": 2})).await;
        let error = answer.outcome.error().unwrap();
        assert_eq!(
            (error.message.as_str(), error.next.as_ref().map(|n| n.tool.as_str())),
            ("It must be checked.", redirect.then_some("person"))
        );
    }
}

#[tokio::test]
async fn completed_once_tool_is_not_suggested_again() {
    for redirect in [true, false] {
        let rule = Require::new("verified", ["act"], ["verify"]).same("entity", "/entity");
        let rule = if redirect { rule.redirect("person") } else { rule };
        let agent = Agent::builder("a")
            .tool(entity_tool("act"))
            .tool(entity_tool("verify").open().once())
            .tool(entity_tool("person").open())
            .policy(rule);
        let gate = crate::support::runtime_builder().agent(agent.build().unwrap()).build_checked();
        let (first, second) =
            (gate.session("a", "alice", "one"), gate.session("a", "alice", "two"));
        assert_eq!(
            call_and_next_step(&first, "act", json!({"entity": 1})).await.1,
            next_step("verify", json!({"entity": 1}))
        );
        assert_eq!(call_and_next_step(&first, "verify", json!({"entity": 1})).await.0, "ok");
        assert_eq!(call_and_next_step(&first, "act", json!({"entity": 1, "n": 1})).await.0, "ok");
        // Another session gets a replay, which is not evidence there. Another call of `verify`
        // would not help.
        assert!(
            second.call("verify", json!({"entity": 1})).await.outcome.success().unwrap().replayed
        );
        let (code, next) = call_and_next_step(&second, "act", json!({"entity": 1})).await;
        assert_eq!(
            (code.as_str(), next),
            (
                "prerequisite_missing",
                next_step("person", json!({"entity": 1})).filter(|_| redirect)
            )
        );
        // For another entity, `verify` has not run yet.
        assert_eq!(
            call_and_next_step(&second, "act", json!({"entity": 2})).await.1,
            next_step("verify", json!({"entity": 2}))
        );
    }
}

#[tokio::test]
async fn replayed_error_does_not_suggest_same_call() {
    use toolgate::{ErrorCategory, Failure, NextStep, ToolError};
    let pay = Tool::dynamic(
        "pay",
        "Pays.",
        json!({"type": "object", "properties": {"n": {"type": "integer"}}}),
        |_, args: Value| async move {
            let mut error = ToolError::new(ErrorCategory::Business, "later", "not yet");
            error.next = Some(NextStep {
                tool: "pay".to_owned(),
                arguments: if args["n"] == 1 { args } else { json!({"n": 1}) },
            });
            Err::<Value, _>(Failure::from(error).effects(toolgate::CallEffects::Done))
        },
    );
    let session = start_session(Agent::builder("a").tool(pay.open().once()));
    for (n, has_next) in [(1, false), (2, true)] {
        assert!(
            call_and_next_step(&session, "pay", json!({"n": n})).await.1.is_some(),
            "a tool can suggest any call"
        );
        let again = session.call("pay", json!({"n": n})).await;
        let error = again.outcome.error().unwrap();
        assert_eq!((error.replayed, error.next.is_some()), (true, has_next), "{n}");
    }
}

#[tokio::test]
async fn next_step_arguments_fit_schema_of_tool() {
    let strange = Tool::dynamic(
        "strange",
        "Takes a text called entity.",
        json!({"type": "object", "required": ["entity", "why"], "properties": {"entity": {"type": "string"}, "why": {"type": "string"}}}),
        |_, _| async { Ok(Value::Null) },
    );
    let session = start_session(
        Agent::builder("a")
            .tool(entity_tool("act"))
            .tool(strange.effect(Effect::Read))
            .policy(Require::new("r", ["act"], ["strange"])),
    );
    assert_eq!(
        call_and_next_step(&session, "act", json!({"entity": 1})).await.1,
        next_step("strange", json!({}))
    );
    // The prerequisite does not accept the entity of the call.
    let schema = json!({"type": "object", "required": ["entity"], "properties": {"entity": {"type": "integer", "minimum": 5}}});
    let proof = Tool::dynamic("proof", "Proves.", schema, |_, _| async { Ok(Value::Null) })
        .effect(Effect::Read)
        .entity("entity", "/entity");
    let rule = Require::new("r", ["act"], ["proof"]).same("entity", "/entity");
    let session =
        start_session(Agent::builder("a").tool(entity_tool("act")).tool(proof).policy(rule));
    assert_eq!(
        call_and_next_step(&session, "act", json!({"entity": 7})).await.1,
        next_step("proof", json!({"entity": 7}))
    );
    assert_eq!(
        call_and_next_step(&session, "act", json!({"entity": 1})).await,
        ("prerequisite_missing".to_owned(), None)
    );
}

#[tokio::test]
async fn blank_entity_is_policy_fault() {
    let tool = |name: &str| {
        let schema = json!({"type": "object", "properties": {"who": {"type": ["string", "null"]}}});
        Tool::dynamic(name, "A tool.", schema, |_, _| async { Ok(json!({"ok": true})) })
            .entity("who", "/who")
    };
    let rule = Require::new("r", ["act"], ["proof"]).same("who", "/who");
    let session = start_session(
        Agent::builder("a").tool(tool("act")).tool(tool("proof").effect(Effect::Read)).policy(rule),
    );
    for value in [json!(null), json!(" ")] {
        assert_eq!(call_and_next_step(&session, "proof", json!({ "who": value })).await.0, "ok");
        assert_eq!(
            call_and_next_step(&session, "act", json!({ "who": value })).await,
            ("policy_fault".to_owned(), None),
            "{value}"
        );
    }
}

#[tokio::test]
async fn next_step_avoids_denied_prerequisites() {
    let reads = |name: &str| entity_tool(name).effect(Effect::Read);
    let build = |extra: fn(AgentBuilder) -> AgentBuilder| {
        start_session(extra(
            Agent::builder("a")
                .tool(entity_tool("act"))
                .tool(reads("a_proof"))
                .tool(reads("b_proof"))
                .policy(
                    Require::new("proved", ["act"], ["a_proof", "b_proof"])
                        .same("entity", "/entity"),
                ),
        ))
    };
    let open = build(|a| a);
    assert_eq!(
        call_and_next_step(&open, "act", json!({"entity": 1})).await.1,
        next_step("a_proof", json!({"entity": 1}))
    );
    let denied = build(|a| {
        a.policy(Deny::new("no", ["a_proof"]).when("/entity", Condition::Above(0.into())))
    });
    assert_eq!(
        call_and_next_step(&denied, "act", json!({"entity": 1})).await.1,
        next_step("b_proof", json!({"entity": 1}))
    );
    let used_up = build(|a| a.policy(Limit::calls("one", ["a_proof"], 1)));
    assert_eq!(call_and_next_step(&used_up, "a_proof", json!({"entity": 2})).await.0, "ok");
    assert_eq!(
        call_and_next_step(&used_up, "act", json!({"entity": 1})).await.1,
        next_step("b_proof", json!({"entity": 1}))
    );
    let both = build(|a| {
        a.policy(
            Deny::new("no", ["a_proof", "b_proof"]).when("/entity", Condition::Above(0.into())),
        )
    });
    assert_eq!(call_and_next_step(&both, "act", json!({"entity": 1})).await.1, None);
}

#[tokio::test]
async fn next_step_contains_no_secret_arguments() {
    let wants_pin = |name: &str| {
        let schema = json!({"type": "object", "required": ["entity", "pin"], "properties": {"entity": {"type": "integer"}, "pin": {"type": "string", "writeOnly": true}}});
        Tool::dynamic(name, "A tool.", schema, |_, _| async { Ok(Value::Null) })
            .entity("entity", "/entity")
    };
    let agent =
        || Agent::builder("a").tool(wants_pin("act")).tool(wants_pin("proof").effect(Effect::Read));
    let session = start_session(
        agent().policy(
            Require::new("proved", ["act"], ["proof"])
                .same("entity", "/entity")
                .when_cel("input.pin != \"\""),
        ),
    );
    let answer = session.call("act", json!({"entity": 1, "pin": "hunter2"})).await;
    let error = answer.outcome.error().unwrap();
    assert_eq!(
        error.next.as_ref().map(|n| (n.tool.as_str(), &n.arguments)),
        Some(("proof", &json!({"entity": 1})))
    );
    assert!(!format!("{:?}", session.rows().await.unwrap()).contains("hunter2"));
    let why = session.explain("act", json!({"entity": 1, "pin": "hunter2"})).await;
    assert!(
        !why.to_string().contains("hunter2")
            && !serde_json::to_string(&why).unwrap().contains("hunter2"),
        "{why}"
    );
    // The ledger records entities and limits, so their arguments cannot be secrets.
    for builder in [
        agent().policy(Require::new("r", ["act"], ["proof"]).same("pin", "/pin")),
        agent().policy(Limit::calls("r", ["act"], 1).per(LimitOwner::Entity("/pin".into()))),
        agent().policy(ReadBeforeWrite::new("r").guard("act", "/pin")),
        agent().tool(wants_pin("other").open().entity("pin", "/pin")).policy(Limit::calls(
            "r",
            ["act"],
            1,
        )),
    ] {
        assert!(builder.build().unwrap_err().to_string().contains("secret"));
    }
}

#[tokio::test]
async fn next_step_reads_file_before_write() {
    let session = start_session(
        Agent::builder("a")
            .files(MemoryFs::new([("a.txt", "x")]))
            .tools(toolgate::builtin::files())
            .policy(ReadBeforeWrite::default()),
    );
    let (code, next) =
        call_and_next_step(&session, "write_file", json!({"path": "./a.txt", "content": "y"}))
            .await;
    assert_eq!(
        (code.as_str(), next),
        ("read_before_write", next_step("read_file", json!({"path": "a.txt"})))
    );
}

#[tokio::test]
async fn limit_by_evidence_suggests_missing_evidence() {
    let proved = EvidenceEntity {
        tool: "look".into(),
        entity: ("entity".into(), "/entity".into()),
        field: "/owner".into(),
        fallback: None,
    };
    let session = start_session(
        Agent::builder("a")
            .tool(entity_tool("look").effect(Effect::Read))
            .tool(entity_tool("act"))
            .policy(
                Limit::sum("per_owner", ["act"], "/amount", 100.into())
                    .per(LimitOwner::EvidenceEntity(Box::new(proved))),
            ),
    );
    // The owner is unknown, so the rule faults and suggests the tool that proves the owner.
    let (code, next) =
        call_and_next_step(&session, "act", json!({"entity": 1, "amount": 60})).await;
    assert_eq!((code.as_str(), next), ("policy_fault", next_step("look", json!({"entity": 1}))));
    assert_eq!(call_and_next_step(&session, "look", json!({"entity": 1})).await.0, "ok");
    assert_eq!(
        call_and_next_step(&session, "act", json!({"entity": 1, "amount": 60})).await.0,
        "ok"
    );
    assert_eq!(
        call_and_next_step(&session, "act", json!({"entity": 1, "amount": 41})).await.0,
        "per_owner"
    );
    assert_eq!(
        call_and_next_step(&session, "act", json!({"entity": 1, "amount": 40})).await.0,
        "ok"
    );
}
