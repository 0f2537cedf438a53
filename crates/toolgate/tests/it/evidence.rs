//! Tests the evidence of calls, dropped arguments and access to recorded outcomes.

use std::sync::Arc;

use serde_json::{Value, json};
use toolgate::policy::{Require, Verdict};
use toolgate::{
    Agent, Effect, ErrorCategory, Failure, Handler, Tool, ToolError, Toolgate, ToolgateBuilder,
};
use toolgate_config::Config;

use crate::rules::call_code;
use crate::support::{BuildWithReplayCheck as _, TestWorld, closure_policy};

#[tokio::test]
async fn permission_denial_withholds_replay_despite_business_denial() {
    let world = TestWorld::new(|agent| {
        agent
            .policy(closure_policy("business", |ask| match ask.key.session.as_ref() {
                "s" => Ok(Verdict::allow()),
                _ => Ok(Verdict::deny(ToolError::new(
                    ErrorCategory::Business,
                    "not_verified",
                    "verify first",
                ))),
            }))
            .policy(closure_policy("forbids", |ask| match ask.key.session.as_ref() {
                "forbidden" => Ok(Verdict::deny(ToolError::new(
                    ErrorCategory::Permission,
                    "not_here",
                    "not in this session",
                ))),
                _ => Ok(Verdict::allow()),
            }))
    });
    let keyed = async |session: &str| {
        let session = world.gate.session("agent", "alice", session);
        let answer = world
            .gate
            .call(session.prepare("act", json!({"how": "ok"})).idempotency_key("k"))
            .await;
        answer.outcome.error().map_or_else(|| "ok".to_owned(), |error| error.code.to_string())
    };
    let first = world.session.key().session.to_string();
    assert_eq!(keyed(&first).await, "ok");
    assert_eq!(keyed("elsewhere").await, "ok", "a replay of the same call");
    assert_eq!(keyed("forbidden").await, "not_here");
}

#[tokio::test]
async fn only_unknown_arguments_are_dropped() {
    let yes = json!({"type": "boolean"});
    let schemas = [
        json!({"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"], "allOf": [{"properties": {"dry_run": yes}}]}),
        json!({"type": "object", "allOf": [{"properties": {"path": {"type": "string"}, "dry_run": yes}}]}),
        json!({"type": "object", "properties": {"path": {"type": "string"}}, "patternProperties": {"^dry_": yes}}),
        json!({"type": "object", "properties": {"path": {"type": "string"}}, "if": {"required": ["path"]}, "then": {"properties": {"dry_run": yes}}}),
    ];
    for schema in schemas {
        let world = TestWorld::new(|agent| {
            let tool =
                Tool::dynamic("rm", "Removes.", schema.clone(), |_, args| async move { Ok(args) });
            agent.tool(tool.extra(toolgate::ExtraArguments::Drop).open())
        });
        for (arguments, runs_with) in [
            (json!({"path": "/x", "dry_run": "true"}), None),
            (json!({"path": "/x", "dry_run": "true", "zz": 1}), None),
            (
                json!({"path": "/x", "dry_run": true, "zz": 1}),
                Some(json!({"path": "/x", "dry_run": true})),
            ),
            (json!({"path": "/x", "zz": 1}), Some(json!({"path": "/x"}))),
        ] {
            let answer = world.session.call("rm", arguments.clone()).await;
            match (&runs_with, answer.outcome.success()) {
                (Some(expected), Some(output)) => {
                    assert_eq!(output.value, *expected, "{schema} {arguments}")
                }
                (None, None) => assert_eq!(
                    answer.outcome.error().unwrap().code,
                    "invalid_arguments",
                    "{schema} {arguments}"
                ),
                _ => panic!("{schema} {arguments}: {answer:?}"),
            }
        }
    }
}

fn refund_config(input: &Value) -> Config {
    Config::parse(
        "toolgate.toml",
        &format!(
            "[tools.whoami]\neffect = \"read\"\ninput = {input}\nentities = {{ customer_id = \"/customer_id\" }}\nproves = [\"/active\"]\n\
             [tools.refund]\ninput = {{ type = \"object\", properties = {{ customer_id = {{ type = \"string\" }} }}, required = [\"customer_id\"] }}\n\
             [[policy]]\nname = \"verified\"\nrule = \"require\"\ntools = [\"refund\"]\nany_of = [\"whoami\"]\nsame = {{ customer_id = \"/customer_id\" }}\n",
            input = input.as_str().unwrap_or_default()
        ),
    )
}

#[tokio::test]
async fn evidence_entity_must_match_argument_and_result() {
    let open = json!("{ type = \"object\" }");
    let declared = json!(
        "{ type = \"object\", properties = { customer_id = { type = [\"string\", \"null\"] } } }"
    );
    for (input, arguments, result, refund, runs) in [
        // The schema is open, so the result names the customer.
        (
            &open,
            json!({"customer_id": "C-9"}),
            json!({"customer_id": "C-1", "active": true}),
            "C-9",
            false,
        ),
        (
            &open,
            json!({"customer_id": "C-9"}),
            json!({"customer_id": "C-1", "active": true}),
            "C-1",
            true,
        ),
        (&open, json!({"customer_id": "C-9"}), json!({"active": true}), "C-9", false),
        // The result names another customer than the argument.
        (
            &declared,
            json!({"customer_id": "C-9"}),
            json!({"customer_id": "C-1", "active": true}),
            "C-9",
            false,
        ),
        (
            &declared,
            json!({"customer_id": "C-9"}),
            json!({"customer_id": "C-1", "active": true}),
            "C-1",
            true,
        ),
        (
            &declared,
            json!({"customer_id": null}),
            json!({"customer_id": "C-1", "active": true}),
            "C-1",
            true,
        ),
        (
            &declared,
            json!({"customer_id": "C-1"}),
            json!({"customer_id": "C-1", "active": true}),
            "C-1",
            true,
        ),
        (&declared, json!({"customer_id": "C-1"}), json!({"active": true}), "C-1", true),
    ] {
        let gate = build_gate(refund_config(input), result.clone());
        let session = gate.session("default", "alice", "s");
        assert!(session.call("whoami", arguments.clone()).await.outcome.success().is_some());
        let answer = session.call("refund", json!({"customer_id": refund})).await;
        assert_eq!(
            answer.outcome.success().is_some(),
            runs,
            "{input} {arguments} {result} {refund}: {answer:?}"
        );
    }
}

struct FixedAnswerHandler(Value);

#[async_trait::async_trait]
impl Handler for FixedAnswerHandler {
    async fn run(
        &self,
        _: &toolgate::Permit,
        _: toolgate::ToolContext,
        _: &toolgate::CheckedArguments,
    ) -> Result<Value, Failure> {
        Ok(self.0.clone())
    }
}

/// Builds a runtime whose tools all return `result`.
fn build_gate(config: Config, result: Value) -> Toolgate {
    let handler: Arc<dyn Handler> = Arc::new(FixedAnswerHandler(result));
    config
        .build_agents(Some(&handler))
        .unwrap_or_else(|error| panic!("{}", error.render(false)))
        .into_iter()
        .fold(Toolgate::builder(), ToolgateBuilder::agent)
        .build()
        .unwrap()
}

#[tokio::test]
async fn upstream_error_detail_is_truncated() {
    let long = || "x".repeat(4_000);
    let members: Value = (0..3_000)
        .map(|n| (format!("{n}{}", long()), json!(long())))
        .collect::<serde_json::Map<_, _>>()
        .into();
    for detail in [
        members,
        json!(vec![long(); 3_000]),
        json!({"a": {"b": vec![long(); 64]}}),
        json!("y".repeat(1 << 20)),
    ] {
        let failing = detail.clone();
        let tool = Tool::dynamic("fails", "Fails.", json!({"type": "object"}), move |_, _| {
            let failing = failing.clone();
            async move { Err::<Value, _>(Failure::business("no", "no").upstream(failing)) }
        });
        let world = TestWorld::new(|agent| agent.tool(tool.effect(Effect::Read)));
        let answer = world.session.call("fails", json!({})).await;
        let text = answer.outcome.to_json().to_string();
        assert!(text.len() < 20_000 && text.contains("upstream"), "{}", text.len());
    }
}

#[tokio::test]
async fn configured_tool_cost_spends_budget() {
    let config = Config::parse(
        "toolgate.toml",
        "limits = { session = { tokens = 250, money = 0.05 } }\n[tools.look]\neffect = \"read\"\ncost = { tokens = 100, money = 0.01 }\ninput = { type = \"object\", properties = { n = { type = \"integer\" } } }\n",
    );
    let gate = build_gate(config, json!({}));
    let session = gate.session("default", "alice", "s");
    let mut codes = Vec::new();
    for n in 0..3 {
        let answer = session.call("look", json!({"n": n})).await;
        codes.push(
            answer.outcome.error().map_or_else(|| "ok".to_owned(), |error| error.code.to_string()),
        );
    }
    assert_eq!(codes, ["ok", "ok", "budget_exhausted"]);
}

#[tokio::test]
async fn require_rule_applies_only_if_conditions_match() {
    let rule = |conditions: &str| {
        Config::parse(
            "toolgate.toml",
            &format!(
                "[tools.verify]\neffect = \"read\"\ninput = {{ type = \"object\", properties = {{ id = {{ type = \"string\" }} }} }}\nentities = {{ id = \"/id\" }}\n\
                 [tools.refund]\ninput = {{ type = \"object\", properties = {{ id = {{ type = \"string\" }}, amount = {{ type = \"number\" }}, cur = {{ type = \"string\" }} }} }}\n\
                 [[policy]]\nname = \"verified\"\nrule = \"require\"\ntools = [\"refund\"]\nany_of = [\"verify\"]\nsame = {{ id = \"/id\" }}\nwhere = {conditions}\n"
            ),
        )
    };
    let config =
        rule("[{ argument = \"/amount\", above = 100 }, { argument = \"/cur\", in = [\"USD\"] }]");
    let gate = build_gate(config, json!({}));
    let runs = async |session: &toolgate::Session, arguments: Value| {
        session.call("refund", arguments).await.outcome.success().is_some()
    };
    let session = gate.session("default", "alice", "s");
    for (arguments, expected) in [
        (json!({"id": "C", "amount": 100, "cur": "USD"}), true),
        (json!({"id": "C", "amount": 101, "cur": "EUR"}), true),
        (json!({"id": "C", "amount": 101, "cur": "USD"}), false),
        // A missing argument could have any value.
        (json!({"id": "C", "amount": 101}), false),
        (json!({"id": "C", "cur": "USD"}), false),
    ] {
        assert_eq!(runs(&session, arguments.clone()).await, expected, "{arguments}");
    }
    let refused = session.call("refund", json!({"id": "C", "amount": 500, "cur": "USD"})).await;
    assert_eq!(
        refused
            .outcome
            .error()
            .and_then(|error| error.next.as_ref())
            .map(|next| next.tool.as_str()),
        Some("verify")
    );
    session.call("verify", json!({"id": "C"})).await;
    assert!(runs(&session, json!({"id": "C", "amount": 500, "cur": "USD"})).await);
    let error = rule("[{ argument = \"/amuont\", above = 100 }]")
        .build_agents(None)
        .unwrap_err()
        .render(false);
    assert!(
        error.contains("has no argument `amuont`") && error.contains("--> toolgate.toml:"),
        "{error}"
    );
}

#[tokio::test]
async fn revocation_matches_any_spelling_of_entity() {
    let schema = || json!({"type": "object", "properties": {"customer": {"type": "string"}}, "required": ["customer"]});
    // Returns the customer in upper case, whatever the case of the argument.
    let upper_case_customer = |_, args: serde_json::Value| async move {
        Ok(json!({"customer": args["customer"].as_str().unwrap_or_default().to_uppercase()}))
    };
    for pattern in ["nothing like it", r"[Cc]-\d{4}"] {
        let verify = Tool::dynamic("verify", "Verifies.", schema(), upper_case_customer)
            .effect(Effect::Read)
            .entity("customer", "/customer");
        let close = Tool::dynamic("close", "Closes.", schema(), upper_case_customer)
            .effect(Effect::Write)
            .open();
        let close = close.entity("customer", "/customer").revokes_about("verify", "customer");
        let refund = Tool::dynamic("refund", "Refunds.", schema(), upper_case_customer)
            .effect(Effect::Write);
        let rule = Require::new("verified", ["refund"], ["verify"]).same("customer", "/customer");
        let agent =
            Agent::builder("a").tool(verify).tool(close).tool(refund).policy(rule).build().unwrap();
        let gate = crate::support::runtime_builder()
            .redact_pattern(pattern)
            .unwrap()
            .agent(agent)
            .build_checked();
        let s = gate.session("a", "alice", "s");
        let arguments = |customer: &str| json!({"customer": customer});
        for (tool, customer, expected) in [
            ("verify", "C-1042", "ok"),
            ("verify", "C-2000", "ok"),
            ("refund", "C-1042", "ok"),
            ("close", "c-1042", "ok"),
            ("refund", "C-1042", "prerequisite_missing"),
            ("refund", "C-2000", "ok"),
        ] {
            assert_eq!(
                call_code(&s, tool, arguments(customer)).await,
                expected,
                "{tool} {customer}, {pattern}"
            );
        }
    }
}

#[tokio::test]
async fn admission_of_deferred_call_revokes_evidence_at_once() {
    let tool = |name: &str| {
        Tool::dynamic(name, "T.", json!({"type": "object"}), |_, _| async { Ok(json!({})) })
    };
    let wipe = || tool("wipe").effect(Effect::Write).open().revokes("look");
    let gate = |wipe: Tool| {
        let act = tool("act").effect(Effect::Write);
        let agent =
            Agent::builder("a").tool(tool("look").effect(Effect::Read)).tool(wipe).tool(act);
        crate::support::runtime_builder()
            .agent(agent.policy(Require::new("looked", ["act"], ["look"])).build().unwrap())
            .build_checked()
    };
    let here = gate(wipe()).session("a", "alice", "s");
    assert_eq!(call_code(&here, "look", json!({})).await, "ok");
    let deferred = here.admit("wipe", json!({})).await.unwrap();
    assert_eq!(call_code(&here, "act", json!({})).await, "prerequisite_missing");
    drop(deferred);
    // A call that toolgate cannot run revokes nothing.
    let elsewhere =
        gate(Tool::external("wipe", "T.", None).open().revokes("look")).session("a", "alice", "s");
    assert_eq!(call_code(&elsewhere, "look", json!({})).await, "ok");
    assert_eq!(call_code(&elsewhere, "wipe", json!({})).await, "no_handler");
    assert_eq!(call_code(&elsewhere, "act", json!({})).await, "ok");
}
