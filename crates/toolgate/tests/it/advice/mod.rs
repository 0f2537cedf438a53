//! What the model is told to do next.

mod played;
mod why;

use std::sync::Arc;

use serde_json::{Value, json};
use toolgate::policy::source::Rules;
use toolgate::policy::{Condition, Deny, Limit, Per, Policy, Proved, ReadBeforeWrite, Require, Sequence};
use toolgate::{Agent, AgentBuilder, Effect, ManualClock, MemoryFs, Session, Tool, builtin};

use crate::support::Built;

fn tool(name: &str) -> Tool {
    let schema = json!({"type": "object", "required": ["entity"], "properties": {
        "entity": {"type": "integer"}, "amount": {"type": "number"}, "n": {"type": "integer"}, "pin": {"type": "string", "writeOnly": true},
    }});
    Tool::dynamic(name, "A tool.", schema, |_, args: Value| async move { Ok(json!({"ok": true, "owner": format!("o{}", args["entity"])})) })
        .entity("entity", "/entity")
        .proves("/ok")
        .proves("/owner")
}

fn start(agent: AgentBuilder) -> Session {
    let agent = agent.build().unwrap_or_else(|e| panic!("{}", e.render(false)));
    let clock = ManualClock::at("2026-03-02T09:30:00Z".parse().unwrap());
    crate::support::gate().agent(agent).clock(Arc::new(clock)).built().session("a", "alice", "s")
}

async fn next(session: &Session, name: &str, args: Value) -> (String, Option<(String, Value)>) {
    let answer = session.call(name, args).await;
    let error = answer.outcome.error();
    (error.map_or_else(|| "ok".to_owned(), |e| e.code.to_string()), error.and_then(|e| e.next.clone()).map(|n| (n.tool, n.arguments)))
}

fn step(tool: &str, arguments: Value) -> Option<(String, Value)> {
    Some((tool.to_owned(), arguments))
}

#[tokio::test]
async fn the_next_step_is_the_first_of_the_shortest_way() {
    let reads = |name: &str| tool(name).effect(Effect::Read);
    let session = start(
        Agent::builder("a")
            .tool(tool("act"))
            .tool(reads("proof"))
            .tool(reads("long_way"))
            .tool(reads("login"))
            .tool(reads("badge"))
            .policy(Require::new("proved", ["act"], ["long_way", "proof"]).same("entity", "/entity").field("/ok", json!(true)))
            .policy(Require::new("logged_in", ["proof", "long_way"], ["login"]))
            .policy(Sequence::new("badge_first").after("long_way", ["badge"])),
    );
    // Over `long_way` it would be one step more: `badge`, `login`, `long_way`.
    let (code, advice) = next(&session, "act", json!({"entity": 7, "n": 1})).await;
    assert_eq!((code.as_str(), advice), ("prerequisite_missing", step("login", json!({"entity": 7}))));
    assert_eq!(next(&session, "login", json!({"entity": 7})).await.0, "ok");
    assert_eq!(next(&session, "act", json!({"entity": 7, "n": 2})).await.1, step("proof", json!({"entity": 7})));
    assert_eq!(next(&session, "proof", json!({"entity": 7})).await.0, "ok");
    assert_eq!(next(&session, "act", json!({"entity": 7, "n": 3})).await.0, "ok");
}

#[tokio::test]
async fn what_was_answered_otherwise_is_not_asked_again() {
    let check = Tool::dynamic("check", "Checks.", json!({"type": "object", "properties": {"entity": {"type": "integer"}}}), |_, _| async {
        Ok(json!({"ok": false}))
    });
    let check = check.effect(Effect::Read).entity("entity", "/entity").proves("/ok");
    let rule = |redirect: bool| {
        let rule =
            Require::new("checked", ["act"], ["check"]).same("entity", "/entity").field("/ok", json!(true)).reason("It must be checked.");
        if redirect { rule.redirect("person") } else { rule }
    };
    for redirect in [true, false] {
        let session = start(Agent::builder("a").tool(check.clone()).tool(tool("act")).tool(tool("person").open()).policy(rule(redirect)));
        assert_eq!(next(&session, "act", json!({"entity": 1, "n": 1})).await.1, step("check", json!({"entity": 1})));
        assert_eq!(next(&session, "check", json!({"entity": 1})).await.0, "ok");
        let answer = session.call("act", json!({"entity": 1, "n": 2})).await;
        let error = answer.outcome.error().unwrap();
        assert_eq!(
            (error.message.as_str(), error.next.as_ref().map(|n| n.tool.as_str())),
            ("It must be checked.", redirect.then_some("person"))
        );
    }
}

#[tokio::test]
async fn nobody_is_sent_back_to_what_was_done_once_and_for_all() {
    for redirect in [true, false] {
        let rule = Require::new("verified", ["act"], ["verify"]).same("entity", "/entity");
        let rule = if redirect { rule.redirect("person") } else { rule };
        let agent = Agent::builder("a").tool(tool("act")).tool(tool("verify").open().once()).tool(tool("person").open()).policy(rule);
        let gate = crate::support::gate().agent(agent.build().unwrap()).built();
        let (first, second) = (gate.session("a", "alice", "one"), gate.session("a", "alice", "two"));
        assert_eq!(next(&first, "act", json!({"entity": 1})).await.1, step("verify", json!({"entity": 1})));
        assert_eq!(next(&first, "verify", json!({"entity": 1})).await.0, "ok");
        assert_eq!(next(&first, "act", json!({"entity": 1, "n": 1})).await.0, "ok");
        // Another session is only told what came of it then, and that proves nothing here: the advice would go in circles.
        assert!(second.call("verify", json!({"entity": 1})).await.outcome.success().unwrap().replayed);
        let (code, advice) = next(&second, "act", json!({"entity": 1})).await;
        assert_eq!((code.as_str(), advice), ("prerequisite_missing", step("person", json!({"entity": 1})).filter(|_| redirect)));
        // Of somebody else it was never asked.
        assert_eq!(next(&second, "act", json!({"entity": 2})).await.1, step("verify", json!({"entity": 2})));
    }
}

#[tokio::test]
async fn what_is_told_again_does_not_say_that_it_should_be_asked_again() {
    use toolgate::{Category, Failure, NextStep, ToolError};
    let pay =
        Tool::dynamic("pay", "Pays.", json!({"type": "object", "properties": {"n": {"type": "integer"}}}), |_, args: Value| async move {
            let mut error = ToolError::new(Category::Business, "later", "not yet");
            error.next = Some(NextStep { tool: "pay".to_owned(), arguments: if args["n"] == 1 { args } else { json!({"n": 1}) } });
            Err::<Value, _>(Failure::from(error).effects(toolgate::Effects::Done))
        });
    let session = start(Agent::builder("a").tool(pay.open().once()));
    for (n, kept) in [(1, false), (2, true)] {
        assert!(next(&session, "pay", json!({"n": n})).await.1.is_some(), "a tool may say what it likes");
        let again = session.call("pay", json!({"n": n})).await;
        let error = again.outcome.error().unwrap();
        assert_eq!((error.replayed, error.next.is_some()), (true, kept), "{n}");
    }
}

/// Denies everything and sends the model somewhere.
struct Sends(&'static str, Value);

impl Policy for Sends {
    fn name(&self) -> &str {
        "sends"
    }
    fn governs(&self, tool: &toolgate::Spec) -> bool {
        tool.name() == "act"
    }
    fn check(&self, _: &toolgate::policy::Ask<'_>) -> Result<toolgate::policy::Verdict, toolgate::policy::Fault> {
        let mut error = toolgate::ToolError::new(toolgate::Category::Business, "no", "no");
        error.redirect_tool = Some(self.0.to_owned());
        error.next = Some(toolgate::NextStep { tool: self.0.to_owned(), arguments: self.1.clone() });
        Ok(toolgate::policy::Verdict::deny(error))
    }
}

#[tokio::test]
async fn a_rule_in_rust_sends_nobody_where_they_cannot_go() {
    for (to, arguments, redirect, advised) in [
        ("person", json!({"n": 5}), true, true),
        ("hidden", json!({"n": 5}), false, false),
        ("nowhere", json!({"n": 5}), false, false),
        // The very call that was refused is no next step.
        ("act", json!({"entity": 1}), true, false),
    ] {
        let agent = Agent::builder("a")
            .tool(tool("act"))
            .tool(tool("person").open())
            .tool(tool("hidden").open().visible_to(["bob"]))
            .policy(Sends(to, arguments));
        let answer = start(agent).call("act", json!({"entity": 1})).await;
        let error = answer.outcome.error().unwrap();
        assert_eq!((&*error.code, error.redirect_tool.is_some(), error.next.is_some()), ("no", redirect, advised), "{to}: {error:?}");
    }
}

#[tokio::test]
async fn a_tool_that_fails_sends_nobody_where_they_cannot_go() {
    use toolgate::store::Target;
    for (to, paused, leads) in [("person", false, true), ("person", true, false), ("hidden", false, false), ("nowhere", false, false)] {
        let fails = Tool::dynamic("fails", "Fails.", json!({"type": "object"}), move |_, _| async move {
            Err(toolgate::Failure::business("no", "not here").redirect(to))
        });
        let agent = Agent::builder("a")
            .tool(fails.effect(Effect::Read))
            .tool(tool("person").open())
            .tool(tool("hidden").open().visible_to(["bob"]));
        let session = start(agent);
        if paused {
            session.toolgate().pause(Target::Tool(to.into()), "incident").await.unwrap();
        }
        let answer = session.call("fails", json!({})).await;
        let error = answer.outcome.error().unwrap();
        let said = (&*error.code, error.message.as_str(), error.redirect_tool.as_deref());
        assert_eq!(said, ("no", "not here", leads.then_some(to)), "the failure stands, with or without");
    }
}

#[tokio::test]
async fn where_nothing_helps_that_is_said() {
    let cap = || Deny::new("cap", ["act"]).when("/amount", Condition::Above(5.into())).reason("At most five.");
    let session = start(Agent::builder("a").tool(tool("act")).policy(cap()));
    let answer = session.call("act", json!({"entity": 1, "amount": 6})).await;
    assert_eq!(answer.outcome.error().unwrap().message, "At most five. Repeating this call does not help.");
    // Nobody is sent to a tool that they may not see.
    let hidden = tool("person").open().visible_to(["bob"]);
    let session = start(Agent::builder("a").tool(tool("act")).tool(hidden).policy(cap().redirect("person")));
    let answer = session.call("act", json!({"entity": 1, "amount": 6})).await;
    assert!(!serde_json::to_string(&answer.outcome.to_json()).unwrap().contains("person"), "{answer:?}");
}

#[tokio::test]
async fn nobody_is_told_to_call_first_what_they_cannot_see() {
    let cannot = "a step that this caller cannot take must come first; tell the user";
    let require = |any_of: &str, more: &str| format!("rule = \"require\"\ntools = [\"act\"]\nany_of = {any_of}\n{more}");
    let sequence = |first: &str| format!("rule = \"sequence\"\nafter = {{ act = {first} }}");
    for (rule, message, advised) in [
        (require("[\"hidden\"]", ""), cannot, None),
        (require("[\"hidden\"]", "code = \"other\""), cannot, None),
        (require("[\"hidden\"]", "reason = \"Call `hidden` first.\""), cannot, None),
        (require("[\"hidden\"]", "reason = \"A manager must look at it.\""), "A manager must look at it.", None),
        (require("[\"hidden\"]", "where = [{ argument = \"/amount\", above = 5 }]"), cannot, None),
        (require("[\"hidden\", \"proof\"]", ""), "`proof` must have succeeded first in this session", Some("proof")),
        (require("[\"proof\"]", ""), "`proof` must have succeeded first in this session", Some("proof")),
        (sequence("[\"hidden\"]"), cannot, None),
        (sequence("[\"hidden\", \"proof\"]"), cannot, None),
        (sequence("[\"proof\"]"), "`act` needs `proof` to have succeeded first in this session", Some("proof")),
    ] {
        let agent = Agent::builder("a")
            .tool(tool("act"))
            .tool(tool("proof").effect(Effect::Read))
            .tool(tool("hidden").effect(Effect::Read).visible_to(["bob"]))
            .rules(Rules::parse("policy.toml", &format!("[[policy]]\nname = \"r\"\n{rule}\n")));
        let answer = start(agent).call("act", json!({"entity": 1, "amount": 9})).await;
        let error = answer.outcome.error().unwrap();
        assert_eq!((error.message.as_str(), error.next.as_ref().map(|n| n.tool.as_str())), (message, advised), "{rule}");
        assert!(!serde_json::to_string(&answer.outcome.to_json()).unwrap().contains("hidden"), "{answer:?}");
    }
}

#[tokio::test]
async fn advice_fits_the_tool_it_names() {
    let strange = Tool::dynamic(
        "strange",
        "Takes a text called entity.",
        json!({"type": "object", "required": ["entity", "why"], "properties": {"entity": {"type": "string"}, "why": {"type": "string"}}}),
        |_, _| async { Ok(Value::Null) },
    );
    let session =
        start(Agent::builder("a").tool(tool("act")).tool(strange.effect(Effect::Read)).policy(Require::new("r", ["act"], ["strange"])));
    assert_eq!(next(&session, "act", json!({"entity": 1})).await.1, step("strange", json!({})));
    // What it would be about, it does not take.
    let schema = json!({"type": "object", "required": ["entity"], "properties": {"entity": {"type": "integer", "minimum": 5}}});
    let proof =
        Tool::dynamic("proof", "Proves.", schema, |_, _| async { Ok(Value::Null) }).effect(Effect::Read).entity("entity", "/entity");
    let rule = Require::new("r", ["act"], ["proof"]).same("entity", "/entity");
    let session = start(Agent::builder("a").tool(tool("act")).tool(proof).policy(rule));
    assert_eq!(next(&session, "act", json!({"entity": 7})).await.1, step("proof", json!({"entity": 7})));
    assert_eq!(next(&session, "act", json!({"entity": 1})).await, ("prerequisite_missing".to_owned(), None));
}

#[tokio::test]
async fn what_is_nobodys_name_is_missing() {
    let tool = |name: &str| {
        let schema = json!({"type": "object", "properties": {"who": {"type": ["string", "null"]}}});
        Tool::dynamic(name, "A tool.", schema, |_, _| async { Ok(json!({"ok": true})) }).entity("who", "/who")
    };
    let rule = Require::new("r", ["act"], ["proof"]).same("who", "/who");
    let session = start(Agent::builder("a").tool(tool("act")).tool(tool("proof").effect(Effect::Read)).policy(rule));
    for who in [json!(null), json!(" ")] {
        assert_eq!(next(&session, "proof", json!({ "who": who })).await.0, "ok");
        assert_eq!(next(&session, "act", json!({ "who": who })).await, ("policy_fault".to_owned(), None), "{who}");
    }
}

#[tokio::test]
async fn a_way_that_is_barred_is_no_way() {
    let reads = |name: &str| tool(name).effect(Effect::Read);
    let build = |extra: fn(AgentBuilder) -> AgentBuilder| {
        start(extra(
            Agent::builder("a")
                .tool(tool("act"))
                .tool(reads("a_proof"))
                .tool(reads("b_proof"))
                .policy(Require::new("proved", ["act"], ["a_proof", "b_proof"]).same("entity", "/entity")),
        ))
    };
    let open = build(|a| a);
    assert_eq!(next(&open, "act", json!({"entity": 1})).await.1, step("a_proof", json!({"entity": 1})));
    let denied = build(|a| a.policy(Deny::new("no", ["a_proof"]).when("/entity", Condition::Above(0.into()))));
    assert_eq!(next(&denied, "act", json!({"entity": 1})).await.1, step("b_proof", json!({"entity": 1})));
    let used_up = build(|a| a.policy(Limit::calls("one", ["a_proof"], 1)));
    assert_eq!(next(&used_up, "a_proof", json!({"entity": 2})).await.0, "ok");
    assert_eq!(next(&used_up, "act", json!({"entity": 1})).await.1, step("b_proof", json!({"entity": 1})));
    let both = build(|a| a.policy(Deny::new("no", ["a_proof", "b_proof"]).when("/entity", Condition::Above(0.into()))));
    assert_eq!(next(&both, "act", json!({"entity": 1})).await.1, None);
}

#[tokio::test]
async fn secrets_are_not_advice() {
    let wants_pin = |name: &str| {
        let schema = json!({"type": "object", "required": ["entity", "pin"], "properties": {"entity": {"type": "integer"}, "pin": {"type": "string", "writeOnly": true}}});
        Tool::dynamic(name, "A tool.", schema, |_, _| async { Ok(Value::Null) }).entity("entity", "/entity")
    };
    let agent = || Agent::builder("a").tool(wants_pin("act")).tool(wants_pin("proof").effect(Effect::Read));
    let session = start(agent().policy(Require::new("proved", ["act"], ["proof"]).same("entity", "/entity").when_cel("input.pin != \"\"")));
    let answer = session.call("act", json!({"entity": 1, "pin": "hunter2"})).await;
    let error = answer.outcome.error().unwrap();
    assert_eq!(error.next.as_ref().map(|n| (n.tool.as_str(), &n.arguments)), Some(("proof", &json!({"entity": 1}))));
    assert!(!format!("{:?}", session.rows().await.unwrap()).contains("hunter2"));
    let why = session.explain("act", json!({"entity": 1, "pin": "hunter2"})).await;
    assert!(!why.to_string().contains("hunter2") && !serde_json::to_string(&why).unwrap().contains("hunter2"), "{why}");
    // What something is looked up by is written down, so it cannot be a secret.
    for wrong in [
        agent().policy(Require::new("r", ["act"], ["proof"]).same("pin", "/pin")),
        agent().policy(Limit::calls("r", ["act"], 1).per(Per::Entity("/pin".into()))),
        agent().policy(ReadBeforeWrite::new("r").guard("act", "/pin")),
        agent().tool(wants_pin("other").open().entity("pin", "/pin")).policy(Limit::calls("r", ["act"], 1)),
    ] {
        assert!(wrong.build().unwrap_err().to_string().contains("would be written down"));
    }
}

#[tokio::test]
async fn a_file_that_must_be_read_is_the_next_step() {
    let session = start(
        Agent::builder("a").files(MemoryFs::new([("a.txt", "x")])).tools(toolgate::builtin::files()).policy(ReadBeforeWrite::default()),
    );
    let (code, advice) = next(&session, "write_file", json!({"path": "./a.txt", "content": "y"})).await;
    assert_eq!((code.as_str(), advice), ("read_before_write", step("read_file", json!({"path": "a.txt"}))));
}

#[tokio::test]
async fn the_evidence_says_whose_limit_it_is() {
    let proved = Proved { tool: "look".into(), entity: ("entity".into(), "/entity".into()), field: "/owner".into(), fallback: None };
    let session = start(
        Agent::builder("a")
            .tool(tool("look").effect(Effect::Read))
            .tool(tool("act"))
            .policy(Limit::sum("per_owner", ["act"], "/amount", 100.into()).per(Per::ProvedEntity(Box::new(proved)))),
    );
    // Nothing is known of the owner: nothing is guessed, and the model is told where to look.
    let (code, advice) = next(&session, "act", json!({"entity": 1, "amount": 60})).await;
    assert_eq!((code.as_str(), advice), ("policy_fault", step("look", json!({"entity": 1}))));
    assert_eq!(next(&session, "look", json!({"entity": 1})).await.0, "ok");
    assert_eq!(next(&session, "act", json!({"entity": 1, "amount": 60})).await.0, "ok");
    assert_eq!(next(&session, "act", json!({"entity": 1, "amount": 41})).await.0, "per_owner");
    assert_eq!(next(&session, "act", json!({"entity": 1, "amount": 40})).await.0, "ok");
}
