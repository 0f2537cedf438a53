//! What the model is told to do next, what a person is told about why, and rules on trial.

use crate::support::Built;
use std::sync::Arc;

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use serde_json::{Value, json};
use toolgate::config::Rules;
use toolgate::policy::{Condition, Deny, Limit, Per, Policy, Proved, ReadBeforeWrite, Require, Sequence, observe};
use toolgate::{
    Agent, AgentBuilder, Decision, Effect, Explanation, Gate, ManualClock, MemoryFs, Replay, Said, Session, SignedDuration, Tool, Would,
    builtin,
};

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
            session.gate().pause(Target::Tool(to.into()), "incident").await.unwrap();
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
    let cannot = "something that this caller cannot do must come first; tell the user";
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
    let session =
        start(Agent::builder("a").files(MemoryFs::new([("a.txt", "x")])).tools(builtin::files()).policy(ReadBeforeWrite::default()));
    let (code, advice) = next(&session, "write_file", json!({"path": "./a.txt", "content": "y"})).await;
    assert_eq!((code.as_str(), advice), ("read_before_write", step("read_file", json!({"path": "a.txt"}))));
}

#[tokio::test]
async fn the_evidence_says_whose_limit_it_is() {
    let proved = Proved { tool: "look".into(), same: ("entity".into(), "/entity".into()), field: "/owner".into(), otherwise: None };
    let session = start(
        Agent::builder("a")
            .tool(tool("look").effect(Effect::Read))
            .tool(tool("act"))
            .policy(Limit::sum("per_owner", ["act"], "/amount", 100.into()).per(Per::Proved(Box::new(proved)))),
    );
    // Nothing is known of the owner: nothing is guessed, and the model is told where to look.
    let (code, advice) = next(&session, "act", json!({"entity": 1, "amount": 60})).await;
    assert_eq!((code.as_str(), advice), ("policy_fault", step("look", json!({"entity": 1}))));
    assert_eq!(next(&session, "look", json!({"entity": 1})).await.0, "ok");
    assert_eq!(next(&session, "act", json!({"entity": 1, "amount": 60})).await.0, "ok");
    assert_eq!(next(&session, "act", json!({"entity": 1, "amount": 41})).await.0, "per_owner");
    assert_eq!(next(&session, "act", json!({"entity": 1, "amount": 40})).await.0, "ok");
}

#[tokio::test]
async fn why_is_told_gate_by_gate_and_rule_by_rule() {
    let session = start(
        Agent::builder("a")
            .tool(tool("act"))
            .tool(tool("proof").effect(Effect::Read))
            .tool(tool("person").open())
            .policy(
                Require::new("proved", ["act"], ["proof"])
                    .same("entity", "/entity")
                    .field("/ok", json!(true))
                    .within(SignedDuration::from_mins(5)),
            )
            .tool_policy("act", Deny::new("cap", ["act"]).when("/amount", Condition::Above(500.into())).redirect("person"))
            .policy(Limit::sum("daily", ["act"], "/amount", 600.into()))
            .policy(observe(Deny::new("trial", ["act"]).when_cel("input.amount > 100")))
            .policy(Deny::ask("unrelated", ["person"]).when_cel("input.entity > 5")),
    );
    insta::assert_snapshot!(session.explain("act", json!({"entity": 1, "amount": 600})).await);
    assert_eq!(next(&session, "proof", json!({"entity": 1})).await.0, "ok");
    let why = session.explain("act", json!({"entity": 1, "amount": 400})).await;
    assert_eq!(why.would, Would::Run);
    insta::assert_snapshot!(why);
    assert_eq!(next(&session, "act", json!({"entity": 1, "amount": 400})).await.0, "ok");
    let why = session.explain("act", json!({"entity": 1, "amount": 201})).await;
    assert!(matches!(&why.would, Would::Refuse(error) if error.code == "daily"));
    assert!(why.rules.iter().any(|r| r.rule == "daily" && r.said == Said::Deny), "{why}");
    let why = session.explain("person", json!({"entity": 6})).await;
    assert_eq!((why.would, why.gates[8].gate, why.gates[8].said), (Would::Ask, Gate::Approval, Said::Ask));
    // What is too much by itself is told, whoever refuses first.
    let why = session.explain("act", json!({"entity": 1, "amount": 601})).await;
    assert!(matches!(&why.would, Would::Refuse(error) if error.code == "cap"));
    assert!(why.rules.iter().any(|r| r.rule == "daily" && r.said == Said::Deny), "{why}");
    // Looking leaves no trace.
    assert_eq!(session.rows().await.unwrap().len(), 2);
    for _ in 0..5 {
        assert_eq!(session.explain("proof", json!({"entity": 1})).await.would, Would::Run);
    }
    let strange = session.explain("atc", json!({})).await;
    assert!(matches!(&strange.would, Would::Refuse(error) if error.code == "unknown_tool"));
    assert_eq!(strange.gates[1].said, Said::Deny);
}

#[tokio::test]
async fn what_is_looked_at_has_a_name() {
    let text = "[[policy]]\nname = \"keys\"\nrule = \"deny\"\ntools = [\"act\"]\nwhere = [{ touches = [\"/keys\"] }]\n";
    let session = start(Agent::builder("a").tool(tool("act")).rules(Rules::parse("policy.toml", text)));
    let why = session.explain("act", json!({"entity": 1})).await;
    let looked_at: Vec<&str> = why.rules.iter().flat_map(|note| note.looked_at.iter().map(|look| look.what.as_str())).collect();
    assert_eq!(looked_at, ["arguments naming `/keys`"], "{why}");
}

#[tokio::test]
async fn explanations_agree_with_what_happens() {
    let session = start(
        Agent::builder("a")
            .tool(tool("act"))
            .tool(tool("proof").effect(Effect::Read))
            .policy(Require::new("proved", ["act"], ["proof"]).same("entity", "/entity"))
            .policy(Limit::calls("three", ["act"], 3))
            .policy(Deny::ask("ask", ["act"]).when("/amount", Condition::Above(8.into()))),
    );
    let mut runner = TestRunner::new_with_rng(Config::default(), TestRng::from_seed(RngAlgorithm::ChaCha, &[8; 32]));
    let calls = (prop::sample::select(vec!["act", "proof"]), 0..4i64, 0..10i64);
    for n in 0..200 {
        let (name, entity, amount) = calls.new_tree(&mut runner).unwrap().current();
        let args = json!({"entity": entity, "amount": amount, "n": n});
        let why = session.explain(name, args.clone()).await;
        let answer = session.call(name, args).await;
        let expected = match &why.would {
            Would::Run => "ok".to_owned(),
            Would::Ask => "approval_required".to_owned(),
            Would::Replay => "replay".to_owned(),
            Would::Refuse(error) => error.code.to_string(),
        };
        assert_eq!(answer.outcome.error().map_or("ok", |e| &e.code), expected, "{why}");
    }
}

#[tokio::test]
async fn a_recorded_call_is_explained_as_it_was_decided() {
    let agent = Agent::builder("a")
        .tool(tool("act"))
        .tool(tool("proof").effect(Effect::Read))
        .policy(Require::new("proved", ["act"], ["proof"]).same("entity", "/entity"))
        .policy(Limit::sum("daily", ["act"], "/amount", 600.into()))
        .policy(Deny::ask("large", ["act"]).when("/amount", Condition::Above(500.into())));
    let gate = crate::support::gate().agent(agent.build().unwrap()).built();
    let session = gate.session("a", "alice", "s");
    for amount in [100, 100, 100, 0, 400, 300, 501] {
        let (name, args) = if amount == 0 { ("proof", json!({"entity": 1})) } else { ("act", json!({"entity": 1, "amount": amount})) };
        session.call(name, args).await;
    }
    session.call("act", json!({"amount": 1})).await;
    session.call("atc", json!({})).await;
    let replay = Replay::of(&gate).unwrap();
    let mut told: Vec<Explanation> = Vec::new();
    for row in session.rows().await.unwrap() {
        let why = replay.explain(&row).await.unwrap();
        let no: Vec<Gate> = why.gates.iter().filter(|note| matches!(note.said, Said::Deny | Said::Ask)).map(|note| note.gate).collect();
        let refused = row.decision == Decision::Refused;
        assert_eq!(no, if refused { vec![row.gate] } else { Vec::new() }, "{why}");
        assert_eq!(why.gates.last().map(|note| note.said), Some(if refused { Said::NotReached } else { Said::Pass }), "{why}");
        told.push(why);
    }
    assert_eq!(told.len(), 9);
    // On what was known then, and not on what is known now.
    assert!(told[0].to_string().contains("`proof` succeeded about the same `entity`: never in this session"), "{}", told[0]);
    assert!(told[4].to_string().contains("daily 0 of 600 used"), "{}", told[4]);
    let said = |n: usize, rule: &str| told[n].rules.iter().find(|note| note.rule == rule).map(|note| note.said);
    assert_eq!((said(5, "proved"), said(5, "daily")), (Some(Said::Pass), Some(Said::Deny)));
    assert_eq!((&told[6].would, said(6, "large")), (&Would::Ask, Some(Said::Ask)));
    // Who was not asked then says nothing.
    assert_eq!((told[2].gates[4].said, said(2, "proved")), (Said::Deny, Some(Said::NotReached)));
    assert!(told[2].rules.iter().all(|note| note.looked_at.is_empty() && note.why.is_none()), "{}", told[2]);
}

#[tokio::test]
async fn a_rule_on_trial_touches_nothing_and_counts_everything() {
    struct Broken;
    impl Policy for Broken {
        fn name(&self) -> &str {
            "broken"
        }
        fn check(&self, _: &toolgate::policy::Ask<'_>) -> Result<toolgate::policy::Verdict, toolgate::policy::Fault> {
            panic!("on trial, and failing")
        }
        fn on_result(&self, _: &toolgate::policy::Done<'_>) -> Result<Vec<toolgate::session::Change>, toolgate::policy::Fault> {
            panic!("here as well")
        }
    }
    let session = start(
        Agent::builder("a")
            .tool(tool("act").open())
            .policy(observe(Deny::new("cap", ["act"]).when("/amount", Condition::Above(5.into())).reason("too much")))
            .policy(observe(Limit::calls("two", ["act"], 2)))
            .policy(observe(Deny::ask("ask", ["act"]).when_cel("input.amount > 8").reason("ask first")))
            .policy(observe(Broken)),
    );
    for amount in [1, 6, 9] {
        assert_eq!(next(&session, "act", json!({"entity": 1, "amount": amount})).await.0, "ok");
    }
    let seen: Vec<Vec<String>> = session
        .rows()
        .await
        .unwrap()
        .iter()
        .map(|row| row.facts.observed.iter().map(|o| format!("{} {} {}", o.rule, o.said, o.code)).collect())
        .collect();
    let broken = "broken fault policy_fault".to_owned();
    assert_eq!(
        seen,
        [
            vec![broken.clone()],
            vec!["cap deny cap".to_owned(), broken.clone()],
            vec!["cap deny cap".to_owned(), "ask ask approval_required".to_owned(), broken, "two deny two".to_owned()],
        ]
    );
}

#[tokio::test]
async fn only_those_who_may_answer_can() {
    let rule = |name: &str, people: &[&str]| Deny::ask(name, ["act"]).approvers(people.iter().copied());
    let session = start(Agent::builder("a").tool(tool("act")).policy(rule("money", &["ann", "bob"])).policy(rule("law", &["bob", "cem"])));
    let answer = session.call("act", json!({"entity": 1})).await;
    let id = answer.outcome.error().unwrap().approval.clone().unwrap().id;
    for (who, expected) in [("ann", false), ("cem", false), ("model", false), ("bob", true)] {
        assert_eq!(session.gate().answer_approval(&id, true, who).await, Ok(expected), "{who}");
    }
    assert_eq!(next(&session, "act", json!({"entity": 1})).await.0, "ok");
}

#[test]
fn rules_of_several_files_are_read_as_one_and_all_their_errors_said_at_once() {
    let limits = "[[policy]]\nname = \"daily\"\nrule = \"limit\"\ntools = [\"issue_refund\"]\nsum = \"/amount_usd\"\nmost = 500\n";
    let soft = "[[policy]]\nname = \"soft\"\nrule = \"ask\"\ntools = [\"issue_refund\"]\nwhen = 'sum_of(\"daily\") > 100'\n";
    let rules = Rules::parse_all([("limits.toml", limits), ("soft.toml", soft)]);
    assert_eq!(rules.names().collect::<Vec<_>>(), ["daily", "soft"]);
    assert!(crate::broken::desk().rules(rules).build().is_ok());
    let wrong = Rules::parse_all([
        ("one.toml", "[[policy]]\nname = 3\n"),
        ("two.toml", "policy = 1"),
        ("three.toml", &limits.replace("issue_refund", "issue_refnd")),
    ]);
    let error = crate::broken::desk().rules(wrong).build().unwrap_err();
    insta::assert_snapshot!(error, @"
    agent `desk` cannot be built:
      - one.toml:2:8: `name` must be text, and is a number; like `name = \"…\"`
      - one.toml:1:1: a rule says what `rule` it is; one of `require`, `deny`, `ask`, `limit`, `sequence`, `read_before_write`, `flow`, `only_from`
      - two.toml:1:1: `policy` is a number, and a list of tables is wanted; write `[[policy]]`
      - three.toml:4:10: policy `daily`: `issue_refnd` is no tool of this agent; did you mean `issue_refund`?
    ");
}

/// A rule among tools `t0` to `t4`, each needing only tools before it.
#[derive(Debug, Clone)]
enum Made {
    Require { tool: usize, any_of: Vec<usize>, same: bool },
    After { tool: usize, first: usize },
    Calls { tool: usize, most: u64 },
    Cap { tool: usize, most: i64, redirect: bool },
}

fn any_rule() -> impl Strategy<Value = Made> {
    prop_oneof![
        4 => (1..5usize, prop::collection::vec(0..5usize, 1..3), any::<bool>()).prop_map(|(tool, mut any_of, same)| {
            any_of.iter_mut().for_each(|first| *first %= tool);
            Made::Require { tool, any_of, same }
        }),
        2 => (1..5usize, 0..5usize).prop_map(|(tool, first)| Made::After { tool, first: first % tool }),
        1 => (0..5usize, 1..4u64).prop_map(|(tool, most)| Made::Calls { tool, most }),
        1 => (0..5usize, 0..9i64, any::<bool>()).prop_map(|(tool, most, redirect)| Made::Cap { tool, most, redirect }),
    ]
}

fn with_rules(rules: &[Made], revoking: bool) -> Session {
    let name = |tool: usize| format!("t{tool}");
    let mut agent = Agent::builder("a").tool(tool("person").open());
    for n in 0..5 {
        let made = tool(&name(n)).effect(if n % 2 == 0 { Effect::Read } else { Effect::Write }).open();
        agent = agent.tool(if revoking && n == 2 { made.revokes("t0") } else { made });
    }
    for (n, rule) in rules.iter().enumerate() {
        let called = format!("r{n}");
        agent = match rule {
            Made::Require { tool, any_of, same } => {
                let any_of: Vec<String> = any_of.iter().map(|first| name(*first)).collect();
                let rule = Require::new(&called, [name(*tool).as_str()], any_of.iter().map(String::as_str));
                agent.policy(if *same { rule.same("entity", "/entity").field("/ok", json!(true)) } else { rule })
            }
            Made::After { tool, first } => agent.policy(Sequence::new(called).after(&name(*tool), [name(*first).as_str()])),
            Made::Calls { tool, most } => agent.policy(Limit::calls(&called, [name(*tool).as_str()], *most).redirect("person")),
            Made::Cap { tool, most, redirect } => {
                let rule = Deny::new(&called, [name(*tool).as_str()]).when_cel(&format!("has(input.amount) && input.amount > {most}"));
                agent.policy(if *redirect { rule.redirect("person") } else { rule })
            }
        };
    }
    start(agent)
}

/// Plays what it is told until the call is let through, or a person has it.
async fn play(rules: &[Made], revoking: bool, calls: &[(usize, i64, i64)]) -> (usize, usize) {
    let session = with_rules(rules, revoking);
    let (mut reached, mut handed_over) = (0, 0);
    for (n, (tool, entity, amount)) in calls.iter().enumerate() {
        let mut told: Vec<String> = Vec::new();
        let mut unique = n * 1_000;
        loop {
            unique += 1;
            let (code, advice) = next(&session, &format!("t{tool}"), json!({"entity": entity, "amount": amount, "n": unique})).await;
            told.push(format!("t{tool}: {code} {advice:?}"));
            if code == "ok" {
                reached += usize::from(told.len() > 1);
                break;
            }
            let Some((step, mut arguments)) = advice else {
                assert_eq!(told.len(), 1, "the advice led nowhere: {told:#?}\nunder {rules:#?}");
                break;
            };
            arguments["n"] = json!(unique);
            arguments.as_object_mut().unwrap().entry("entity").or_insert(json!(entity));
            let (code, _) = next(&session, &step, arguments).await;
            told.push(format!("  {step}: {code}"));
            assert_eq!(code, "ok", "a step that was advised was refused: {told:#?}\nunder {rules:#?}");
            if step == "person" {
                handed_over += 1;
                break;
            }
            assert!(told.len() < 60, "the advice goes in circles: {told:#?}\nunder {rules:#?}");
        }
    }
    (reached, handed_over)
}

#[tokio::test]
async fn playing_the_next_step_leads_to_the_call_or_to_a_person() {
    let sets = if std::env::var_os("TOOLGATE_SOAK").is_some() { 20_000 } else { 400 };
    let mut runner = TestRunner::new_with_rng(Config::default(), TestRng::from_seed(RngAlgorithm::ChaCha, &[6; 32]));
    let strategy = (prop::collection::vec(any_rule(), 1..7), any::<bool>(), prop::collection::vec((0..5usize, 0..3i64, 0..10i64), 1..6));
    let (mut reached, mut handed_over) = (0, 0);
    for _ in 0..sets {
        let (rules, revoking, calls) = strategy.new_tree(&mut runner).unwrap().current();
        let (there, over) = play(&rules, revoking, &calls).await;
        reached += there;
        handed_over += over;
    }
    assert!(reached > sets / 4 && handed_over > sets / 50, "both happen: {reached} {handed_over}");
}
