//! What a call proves, what it may drop, and who may hear what was recorded.

use serde_json::{Value, json};
use toolgate::policy::{Require, Verdict};
use toolgate::{Agent, Effect, ErrorCategory, Failure, PromptSignal, Tool, ToolError};
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
    assert_eq!(keyed("elsewhere").await, "ok", "the same act, not a new one");
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
        for (given, runs_with) in [
            (json!({"path": "/x", "dry_run": "true"}), None),
            (json!({"path": "/x", "dry_run": "true", "zz": 1}), None),
            (
                json!({"path": "/x", "dry_run": true, "zz": 1}),
                Some(json!({"path": "/x", "dry_run": true})),
            ),
            (json!({"path": "/x", "zz": 1}), Some(json!({"path": "/x"}))),
        ] {
            let answer = world.session.call("rm", given.clone()).await;
            match (&runs_with, answer.outcome.success()) {
                (Some(wanted), Some(output)) => {
                    assert_eq!(output.value, *wanted, "{schema} {given}")
                }
                (None, None) => assert_eq!(
                    answer.outcome.error().unwrap().code,
                    "invalid_arguments",
                    "{schema} {given}"
                ),
                _ => panic!("{schema} {given}: {answer:?}"),
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
    for (input, asked, told, refund, runs) in [
        // The model's word alone, where the tool takes anything.
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
        // An answer about somebody else than was asked for.
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
        let handler = FixedAnswerHandler(told.clone());
        let agents = refund_config(input)
            .build_agents(Some(
                &(std::sync::Arc::new(handler) as std::sync::Arc<dyn toolgate::Handler>),
            ))
            .unwrap_or_else(|error| panic!("{}", error.render(false)));
        let gate = agents
            .into_iter()
            .fold(toolgate::Toolgate::builder(), toolgate::ToolgateBuilder::agent)
            .build()
            .unwrap();
        let session = gate.session("default", "alice", "s");
        assert!(session.call("whoami", asked.clone()).await.outcome.success().is_some());
        let answer = session.call("refund", json!({"customer_id": refund})).await;
        assert_eq!(
            answer.outcome.success().is_some(),
            runs,
            "{input} {asked} {told} {refund}: {answer:?}"
        );
    }
}

struct FixedAnswerHandler(Value);

#[async_trait::async_trait]
impl toolgate::Handler for FixedAnswerHandler {
    async fn run(
        &self,
        _: &toolgate::Permit,
        _: toolgate::ToolContext,
        _: &toolgate::CheckedArguments,
    ) -> Result<Value, Failure> {
        Ok(self.0.clone())
    }
}

#[tokio::test]
async fn upstream_error_detail_is_truncated() {
    let long = || "x".repeat(4_000);
    let members: Value = (0..3_000)
        .map(|n| (format!("{n}{}", long()), json!(long())))
        .collect::<serde_json::Map<_, _>>()
        .into();
    for said in [
        members,
        json!(vec![long(); 3_000]),
        json!({"a": {"b": vec![long(); 64]}}),
        json!("y".repeat(1 << 20)),
    ] {
        let failing = said.clone();
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
    let handler =
        std::sync::Arc::new(FixedAnswerHandler(json!({}))) as std::sync::Arc<dyn toolgate::Handler>;
    let agents = config
        .build_agents(Some(&handler))
        .unwrap_or_else(|error| panic!("{}", error.render(false)));
    let gate = agents
        .into_iter()
        .fold(toolgate::Toolgate::builder(), toolgate::ToolgateBuilder::agent)
        .build()
        .unwrap();
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
async fn secret_in_tool_error_is_redacted() {
    let schema = json!({"type": "object", "properties": {"pin": {"type": "string"}, "code": {"type": "string", "writeOnly": true}}});
    let tool = Tool::dynamic("login", "Logs in.", schema, |_, args: Value| async move {
        let said =
            format!("wrong: {} {}", args["pin"].as_str().unwrap(), args["code"].as_str().unwrap());
        let (code, path) = (
            format!("no_{}", args["code"].as_str().unwrap()),
            args["pin"].as_str().unwrap().replace('/', "~1"),
        );
        let failure = Failure::business(code, said.clone()).field(
            format!("/pins/{path}"),
            "another",
            said.clone(),
        );
        Err::<Value, _>(failure.upstream(json!({"said": [said]})))
    });
    let world = TestWorld::new(|agent| agent.tool(tool.effect(Effect::Read).secret("/pin")));
    let answer =
        world.session.call("login", json!({"pin": "PIN-SECRET/1", "code": "CODE-SECRET-2"})).await;
    let error = answer.outcome.error().unwrap();
    assert_eq!(
        (&*error.code, error.errors[0].path.as_str()),
        ("no_[redacted]", "/pins/[redacted]")
    );
    let rows = serde_json::to_string(
        &world.session.rows().await.unwrap().iter().map(|row| (**row).clone()).collect::<Vec<_>>(),
    )
    .unwrap();
    for text in [answer.outcome.to_json().to_string(), rows] {
        assert!(!text.contains("SECRET") && text.contains("[redacted"), "{text}");
    }
}

#[tokio::test]
async fn signal_reason_is_redacted_and_codes_are_kept() {
    let schema = json!({"type": "object", "properties": {"pin": {"type": "string"}, "how": {"type": "string"}}});
    let tool = Tool::dynamic("login", "Logs in.", schema, |_, args: Value| async move {
        let reason = format!("because of {}", args["pin"].as_str().unwrap());
        Err::<Value, _>(match args["how"].as_str().unwrap() {
            "abort" => Failure::signal(PromptSignal::Abort { reason }),
            "expand" => {
                Failure::signal(PromptSignal::ExpandSection { section: "pins".to_owned(), reason })
            }
            _ => Failure::business("tool_failed", reason),
        })
    });
    let world = TestWorld::new(|agent| agent.tool(tool.effect(Effect::Read).secret("/pin")));
    for (how, pin, code) in [
        ("abort", "SECRET-1", None),
        ("expand", "SECRET-2", None),
        ("fail", "tool_failed", Some("tool_failed")),
    ] {
        let answer = world.session.call("login", json!({"pin": pin, "how": how})).await;
        assert_eq!(answer.outcome.error().map(|error| &*error.code), code, "{how}");
        let row = world.session.rows().await.unwrap().pop().unwrap();
        for outcome in [&answer.outcome, &row.outcome] {
            let text = outcome.to_json().to_string();
            assert!(!text.contains("SECRET") && text.contains("because of [redacted]"), "{text}");
        }
    }
}

#[tokio::test]
async fn short_secret_is_redacted_as_whole_word() {
    let schema = json!({"type": "object", "properties": {"pin": {"type": "string"}, "cvv": {"type": "integer", "writeOnly": true}}});
    let tool = Tool::dynamic("pay", "Pays.", schema, |_, args: Value| async move {
        let said = format!(
            "wrong cvv {}, wrong pin ({}); 1234 tries",
            args["cvv"],
            args["pin"].as_str().unwrap()
        );
        let upstream = json!({"said": [said], "cvv 123": 123, "of": 1234});
        Err::<Value, _>(
            Failure::business("no", said.clone()).field("/pin", "not 987", said).upstream(upstream),
        )
    });
    let world = TestWorld::new(|agent| agent.tool(tool.effect(Effect::Read).secret("/pin")));
    let answer = world.session.call("pay", json!({"pin": "987", "cvv": 123})).await;
    let error = answer.outcome.error().unwrap();
    assert_eq!(error.message, "wrong cvv [redacted], wrong pin ([redacted]); 1234 tries");
    let row = world.session.rows().await.unwrap().remove(0);
    for error in [error, row.outcome.error().unwrap()] {
        let text = json!([error.message, error.errors, error.upstream]).to_string();
        let alone =
            |digits: &str| text.split(|c: char| !c.is_alphanumeric()).any(|word| word == digits);
        assert!(!alone("123") && !alone("987") && alone("1234"), "{text}");
    }
}

#[tokio::test]
async fn truncated_secret_is_fully_redacted() {
    let schema = json!({"type": "object", "properties": {"pin": {"type": "string"}, "before": {"type": "integer"}, "how": {"type": "string"}}});
    let tool = Tool::dynamic("login", "Logs in.", schema, |_, args: Value| async move {
        let said = format!(
            "{}{} and more",
            "x".repeat(args["before"].as_u64().unwrap() as usize),
            args["pin"].as_str().unwrap()
        );
        let failure = Failure::business("no", "no");
        Err::<Value, _>(match args["how"].as_str().unwrap() {
            "http" => Failure::http(500, &format!("{said}{}", "y".repeat(5_000))),
            "name" => failure.upstream(json!({(said.clone()): 1})),
            // So much in all that it is written out and cut as one text.
            "whole" => failure.upstream(json!({"a": said, "b": vec!["z".repeat(4_000); 8]})),
            _ => failure.upstream(json!({"said": [format!("{said}{}", "y".repeat(5_000))]})),
        })
    });
    let world = TestWorld::new(|agent| {
        agent.tool(tool.effect(Effect::Read).retry(0, std::time::Duration::ZERO).secret("/pin"))
    });
    // Quotes and line breaks are spelled otherwise where a text is written out.
    for pin in ["SECRET-0123456789", "SECRET \"quoted\"\nover lines", "SECRET-ÄÖÜ-0123456789"] {
        for how in ["http", "list", "name", "whole"] {
            // Before, at, in the middle of and behind the place where it is cut: 4,096 letters, 256
            // of a name.
            let at = if how == "name" { 256 } else { 4_096 };
            for before in [at - 30, at - 20, at - 15, at - 8, at - 7, at - 6, at - 1, at, at + 1] {
                let answer = world
                    .session
                    .call("login", json!({"pin": pin, "before": before, "how": how}))
                    .await;
                let text = answer
                    .outcome
                    .error()
                    .and_then(|error| error.upstream.as_ref())
                    .unwrap()
                    .to_string();
                assert!(
                    !text.contains("SE") && text.contains("xxx"),
                    "{how} {before}: {}",
                    text.chars().rev().take(60).collect::<String>()
                );
            }
        }
    }
    let rows = serde_json::to_string(
        &world.session.rows().await.unwrap().iter().map(|row| (**row).clone()).collect::<Vec<_>>(),
    )
    .unwrap();
    assert!(!rows.contains("SE"), "no row has a part of it either");
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
    let handler =
        std::sync::Arc::new(FixedAnswerHandler(json!({}))) as std::sync::Arc<dyn toolgate::Handler>;
    let config =
        rule("[{ argument = \"/amount\", above = 100 }, { argument = \"/cur\", in = [\"USD\"] }]");
    let agents = config
        .build_agents(Some(&handler))
        .unwrap_or_else(|error| panic!("{}", error.render(false)));
    let gate = agents
        .into_iter()
        .fold(toolgate::Toolgate::builder(), toolgate::ToolgateBuilder::agent)
        .build()
        .unwrap();
    let runs = async |session: &toolgate::Session, arguments: Value| {
        session.call("refund", arguments).await.outcome.success().is_some()
    };
    let session = gate.session("default", "alice", "s");
    for (arguments, may) in [
        (json!({"id": "C", "amount": 100, "cur": "USD"}), true),
        (json!({"id": "C", "amount": 101, "cur": "EUR"}), true),
        (json!({"id": "C", "amount": 101, "cur": "USD"}), false),
        // What is not said might be anything.
        (json!({"id": "C", "amount": 101}), false),
        (json!({"id": "C", "cur": "USD"}), false),
    ] {
        assert_eq!(runs(&session, arguments.clone()).await, may, "{arguments}");
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
    // It does not care about case, and says what it found.
    let found = |_, args: serde_json::Value| async move {
        Ok(json!({"customer": args["customer"].as_str().unwrap_or_default().to_uppercase()}))
    };
    for pattern in ["nothing like it", r"[Cc]-\d{4}"] {
        let verify = Tool::dynamic("verify", "Verifies.", schema(), found)
            .effect(Effect::Read)
            .entity("customer", "/customer");
        let close = Tool::dynamic("close", "Closes.", schema(), found).effect(Effect::Write).open();
        let close = close.entity("customer", "/customer").revokes_about("verify", "customer");
        let refund = Tool::dynamic("refund", "Refunds.", schema(), found).effect(Effect::Write);
        let rule = Require::new("verified", ["refund"], ["verify"]).same("customer", "/customer");
        let agent =
            Agent::builder("a").tool(verify).tool(close).tool(refund).policy(rule).build().unwrap();
        let gate = crate::support::runtime_builder()
            .redact_pattern(pattern)
            .unwrap()
            .agent(agent)
            .build_checked();
        let s = gate.session("a", "alice", "s");
        let of = |customer: &str| json!({"customer": customer});
        for (tool, customer, expected) in [
            ("verify", "C-1042", "ok"),
            ("verify", "C-2000", "ok"),
            ("refund", "C-1042", "ok"),
            ("close", "c-1042", "ok"),
            ("refund", "C-1042", "prerequisite_missing"),
            ("refund", "C-2000", "ok"),
        ] {
            assert_eq!(
                call_code(&s, tool, of(customer)).await,
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
    let pass = here.admit("wipe", json!({})).await.unwrap();
    assert_eq!(call_code(&here, "act", json!({})).await, "prerequisite_missing");
    drop(pass);
    // What nobody here can run takes nothing away.
    let elsewhere =
        gate(Tool::external("wipe", "T.", None).open().revokes("look")).session("a", "alice", "s");
    assert_eq!(call_code(&elsewhere, "look", json!({})).await, "ok");
    assert_eq!(call_code(&elsewhere, "wipe", json!({})).await, "no_handler");
    assert_eq!(call_code(&elsewhere, "act", json!({})).await, "ok");
}
