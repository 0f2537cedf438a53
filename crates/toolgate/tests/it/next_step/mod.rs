//! What the model is told to do next.

mod explain;
mod search;

use std::sync::Arc;

use serde_json::{Value, json};
use toolgate::policy::source::RuleSet;
use toolgate::policy::{
    Condition, Deny, EvidenceEntity, Limit, LimitOwner, Policy, ReadBeforeWrite, Require, Sequence,
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
    crate::support::runtime_builder()
        .agent(agent)
        .clock(Arc::new(clock))
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
    // Over `long_way` it would be one step more: `badge`, `login`, `long_way`.
    let (code, advice) = call_and_next_step(&session, "act", json!({"entity": 7, "n": 1})).await;
    assert_eq!(
        (code.as_str(), advice),
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
        // Another session is only told what came of it then, and that proves nothing here: the
        // advice would go in circles.
        assert!(
            second.call("verify", json!({"entity": 1})).await.outcome.success().unwrap().replayed
        );
        let (code, advice) = call_and_next_step(&second, "act", json!({"entity": 1})).await;
        assert_eq!(
            (code.as_str(), advice),
            (
                "prerequisite_missing",
                next_step("person", json!({"entity": 1})).filter(|_| redirect)
            )
        );
        // Of somebody else it was never asked.
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
    for (n, kept) in [(1, false), (2, true)] {
        assert!(
            call_and_next_step(&session, "pay", json!({"n": n})).await.1.is_some(),
            "a tool may say what it likes"
        );
        let again = session.call("pay", json!({"n": n})).await;
        let error = again.outcome.error().unwrap();
        assert_eq!((error.replayed, error.next.is_some()), (true, kept), "{n}");
    }
}

/// Denies everything and sends the model somewhere.
struct RedirectingPolicy(&'static str, Value);

impl Policy for RedirectingPolicy {
    fn name(&self) -> &str {
        "sends"
    }
    fn governs(&self, tool: &toolgate::ToolSpec) -> bool {
        tool.name() == "act"
    }
    fn check(
        &self,
        _: &toolgate::policy::PolicyInput<'_>,
    ) -> Result<toolgate::policy::Verdict, toolgate::policy::PolicyError> {
        let mut error = toolgate::ToolError::new(toolgate::ErrorCategory::Business, "no", "no");
        error.redirect_tool = Some(self.0.to_owned());
        error.next =
            Some(toolgate::NextStep { tool: self.0.to_owned(), arguments: self.1.clone() });
        Ok(toolgate::policy::Verdict::deny(error))
    }
}

#[tokio::test]
async fn policy_redirect_to_unreachable_tool_is_removed() {
    for (to, arguments, redirect, advised) in [
        ("person", json!({"n": 5}), true, true),
        ("hidden", json!({"n": 5}), false, false),
        ("nowhere", json!({"n": 5}), false, false),
        // The very call that was refused is no next step.
        ("act", json!({"entity": 1}), true, false),
    ] {
        let agent = Agent::builder("a")
            .tool(entity_tool("act"))
            .tool(entity_tool("person").open())
            .tool(entity_tool("hidden").open().visible_to(["bob"]))
            .policy(RedirectingPolicy(to, arguments));
        let answer = start_session(agent).call("act", json!({"entity": 1})).await;
        let error = answer.outcome.error().unwrap();
        assert_eq!(
            (&*error.code, error.redirect_tool.is_some(), error.next.is_some()),
            ("no", redirect, advised),
            "{to}: {error:?}"
        );
    }
}

#[tokio::test]
async fn tool_redirect_to_unreachable_tool_is_removed() {
    use toolgate::store::PauseTarget;
    for (to, paused, leads) in [
        ("person", false, true),
        ("person", true, false),
        ("hidden", false, false),
        ("nowhere", false, false),
    ] {
        let fails =
            Tool::dynamic("fails", "Fails.", json!({"type": "object"}), move |_, _| async move {
                Err(toolgate::Failure::business("no", "not here").redirect(to))
            });
        let agent = Agent::builder("a")
            .tool(fails.effect(Effect::Read))
            .tool(entity_tool("person").open())
            .tool(entity_tool("hidden").open().visible_to(["bob"]));
        let session = start_session(agent);
        if paused {
            session.toolgate().pause(PauseTarget::Tool(to.into()), "incident").await.unwrap();
        }
        let answer = session.call("fails", json!({})).await;
        let error = answer.outcome.error().unwrap();
        let said = (&*error.code, error.message.as_str(), error.redirect_tool.as_deref());
        assert_eq!(
            said,
            ("no", "not here", leads.then_some(to)),
            "the failure stands, with or without"
        );
    }
}

#[tokio::test]
async fn denial_without_next_step_says_repeating_is_useless() {
    let cap = || {
        Deny::new("cap", ["act"])
            .when("/amount", Condition::Above(5.into()))
            .reason("At most five.")
    };
    let session = start_session(Agent::builder("a").tool(entity_tool("act")).policy(cap()));
    let answer = session.call("act", json!({"entity": 1, "amount": 6})).await;
    assert_eq!(
        answer.outcome.error().unwrap().message,
        "At most five. Repeating this call does not help."
    );
    // Nobody is sent to a tool that they may not see.
    let hidden = entity_tool("person").open().visible_to(["bob"]);
    let session = start_session(
        Agent::builder("a").tool(entity_tool("act")).tool(hidden).policy(cap().redirect("person")),
    );
    let answer = session.call("act", json!({"entity": 1, "amount": 6})).await;
    assert!(
        !serde_json::to_string(&answer.outcome.to_json()).unwrap().contains("person"),
        "{answer:?}"
    );
}

#[tokio::test]
async fn invisible_prerequisite_is_not_named() {
    let cannot = "a step that this caller cannot take must come first; tell the user";
    let require = |any_of: &str, more: &str| {
        format!("rule = \"require\"\ntools = [\"act\"]\nany_of = {any_of}\n{more}")
    };
    let sequence = |first: &str| format!("rule = \"sequence\"\nafter = {{ act = {first} }}");
    for (rule, message, advised) in [
        (require("[\"hidden\"]", ""), cannot, None),
        (require("[\"hidden\"]", "code = \"other\""), cannot, None),
        (require("[\"hidden\"]", "reason = \"Call `hidden` first.\""), cannot, None),
        (
            require("[\"hidden\"]", "reason = \"A manager must look at it.\""),
            "A manager must look at it.",
            None,
        ),
        (require("[\"hidden\"]", "where = [{ argument = \"/amount\", above = 5 }]"), cannot, None),
        (
            require("[\"hidden\", \"proof\"]", ""),
            "`proof` must have succeeded first in this session",
            Some("proof"),
        ),
        (
            require("[\"proof\"]", ""),
            "`proof` must have succeeded first in this session",
            Some("proof"),
        ),
        (sequence("[\"hidden\"]"), cannot, None),
        (sequence("[\"hidden\", \"proof\"]"), cannot, None),
        (
            sequence("[\"proof\"]"),
            "`act` needs `proof` to have succeeded first in this session",
            Some("proof"),
        ),
    ] {
        let agent = Agent::builder("a")
            .tool(entity_tool("act"))
            .tool(entity_tool("proof").effect(Effect::Read))
            .tool(entity_tool("hidden").effect(Effect::Read).visible_to(["bob"]))
            .rules(RuleSet::parse("policy.toml", &format!("[[policy]]\nname = \"r\"\n{rule}\n")));
        let answer = start_session(agent).call("act", json!({"entity": 1, "amount": 9})).await;
        let error = answer.outcome.error().unwrap();
        assert_eq!(
            (error.message.as_str(), error.next.as_ref().map(|n| n.tool.as_str())),
            (message, advised),
            "{rule}"
        );
        assert!(
            !serde_json::to_string(&answer.outcome.to_json()).unwrap().contains("hidden"),
            "{answer:?}"
        );
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
    // What it would be about, it does not take.
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
    for who in [json!(null), json!(" ")] {
        assert_eq!(call_and_next_step(&session, "proof", json!({ "who": who })).await.0, "ok");
        assert_eq!(
            call_and_next_step(&session, "act", json!({ "who": who })).await,
            ("policy_fault".to_owned(), None),
            "{who}"
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
    for wrong in [
        agent().policy(Require::new("r", ["act"], ["proof"]).same("pin", "/pin")),
        agent().policy(Limit::calls("r", ["act"], 1).per(LimitOwner::Entity("/pin".into()))),
        agent().policy(ReadBeforeWrite::new("r").guard("act", "/pin")),
        agent().tool(wants_pin("other").open().entity("pin", "/pin")).policy(Limit::calls(
            "r",
            ["act"],
            1,
        )),
    ] {
        assert!(wrong.build().unwrap_err().to_string().contains("secret"));
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
    let (code, advice) =
        call_and_next_step(&session, "write_file", json!({"path": "./a.txt", "content": "y"}))
            .await;
    assert_eq!(
        (code.as_str(), advice),
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
    // Nothing is known of the owner: nothing is guessed, and the model is told where to look.
    let (code, advice) =
        call_and_next_step(&session, "act", json!({"entity": 1, "amount": 60})).await;
    assert_eq!((code.as_str(), advice), ("policy_fault", next_step("look", json!({"entity": 1}))));
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
