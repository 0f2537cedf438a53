//! Tests each typed rule.

mod conditions;
mod limits;
pub(crate) mod reference_model;
mod reference_model_agreement;

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use toolgate::policy::{Condition, Deny, Limit, LimitOwner, Policy, Require, Sequence};
use toolgate::{Agent, AgentBuilder, Effect, Failure, ManualClock, Tool};

use crate::support::BuildWithReplayCheck;

pub(crate) fn tool(name: &str) -> Tool {
    let schema = json!({"type": "object", "properties": {
        "entity": {"type": "integer"}, "amount": {"type": "number"}, "currency": {"type": "integer"}, "ok": {"type": "boolean"},
        "n": {"type": "integer"}, "to": {"type": "string"}, "fail": {"type": "boolean"}, "lose": {"type": "boolean"}, "pin": {"type": "integer", "writeOnly": true},
    }});
    Tool::dynamic(name, "A tool.", schema, |_, args: Value| async move {
        if args["lose"] == true {
            return Err(Failure::business("lost", "the outcome is unknown"));
        }
        if args["fail"] == true {
            Err(Failure::business("failed", "requested by the test").effects(toolgate::CallEffects::None))
        } else {
            let entity = args["entity"].as_u64().unwrap_or_default();
            Ok(json!({"ok": args["ok"], "owner": format!("o{}", entity % 2), "says": account(entity)}))
        }
    })
    .entity("entity", "/entity")
    .proves("/ok")
    .proves("/owner")
}

fn account(entity: u64) -> String {
    format!("acct-{entity}00")
}

fn agent(rules: impl FnOnce(AgentBuilder) -> AgentBuilder) -> Agent {
    let agent = Agent::builder("a")
        .tool(tool("proof").effect(Effect::Read))
        .tool(tool("check").effect(Effect::Read))
        .tool(tool("act").open())
        .tool(tool("other").open())
        .tool(tool("page").effect(Effect::Read).untrusted())
        .tool(tool("contacts").effect(Effect::Read))
        .tool(tool("logout").open().revokes("proof"))
        .tool(tool("forget").open().revokes_about("check", "entity"));
    rules(agent).build().unwrap()
}

pub(crate) async fn call_code(session: &toolgate::Session, name: &str, args: Value) -> String {
    let answer = session.call(name, args).await;
    answer.outcome.error().map_or_else(|| "ok".to_owned(), |e| e.code.to_string())
}

pub(crate) fn start_session(agent: Agent) -> (toolgate::Session, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::at(Timestamp::from_second(1_800_000_000).unwrap()));
    (
        crate::support::runtime_builder_at(clock.clone())
            .agent(agent)
            .build_checked()
            .session("a", "alice", "s"),
        clock,
    )
}

#[tokio::test]
async fn require_checks_entity_field_and_age() {
    let rule = Require::new("verified", ["act"], ["proof", "check"])
        .same("entity", "/entity")
        .field("/ok", json!(true))
        .within(SignedDuration::from_mins(15))
        .code("not_verified");
    let (s, clock) = start_session(agent(|a| a.policy(rule)));
    let refused = s.call("act", json!({"entity": 1})).await;
    let error = refused.outcome.error().unwrap();
    assert_eq!(error.code, "not_verified");
    assert_eq!(
        error.next.as_ref().map(|n| (n.tool.as_str(), &n.arguments)),
        Some(("proof", &json!({"entity": 1})))
    );
    assert_eq!(call_code(&s, "proof", json!({"entity": 2, "ok": true})).await, "ok");
    assert_eq!(
        call_code(&s, "act", json!({"entity": 1, "n": 1})).await,
        "not_verified",
        "another entity"
    );
    assert_eq!(call_code(&s, "check", json!({"entity": 1, "ok": false})).await, "ok");
    assert_eq!(
        call_code(&s, "act", json!({"entity": 1, "n": 2})).await,
        "not_verified",
        "another result"
    );
    assert_eq!(call_code(&s, "check", json!({"entity": 1, "ok": true})).await, "ok");
    assert_eq!(
        call_code(&s, "act", json!({"entity": 1, "n": 3})).await,
        "ok",
        "evidence of either tool is enough"
    );
    clock.advance(SignedDuration::from_mins(15));
    assert_eq!(call_code(&s, "act", json!({"entity": 1, "n": 4})).await, "ok");
    clock.advance(SignedDuration::from_secs(1));
    assert_eq!(call_code(&s, "act", json!({"entity": 1, "n": 5})).await, "not_verified", "too old");
    assert_eq!(call_code(&s, "check", json!({"entity": 1, "ok": true, "n": 2})).await, "ok");
    assert_eq!(call_code(&s, "check", json!({"entity": 1, "ok": false, "n": 3})).await, "ok");
    assert_eq!(
        call_code(&s, "act", json!({"entity": 1, "n": 6})).await,
        "not_verified",
        "the latest result counts"
    );
    assert_eq!(call_code(&s, "act", json!({"n": 7})).await, "policy_fault", "nothing to compare");
}

#[tokio::test]
async fn null_entities_do_not_match() {
    let schema =
        || json!({"type": "object", "properties": {"owner": {"type": ["string", "null"]}}});
    let look = Tool::dynamic("look", "Looks.", schema(), |_, args: Value| async move {
        Ok(json!({"owner": args["owner"]}))
    });
    let act = Tool::dynamic("act", "Acts.", schema(), |_, _| async { Ok(Value::Null) });
    let rule = Require::new("owned", ["act"], ["look"]).field_is_argument("/owner", "/owner");
    let agent =
        Agent::builder("a").tool(look.effect(Effect::Read).proves("/owner")).tool(act).policy(rule);
    let (s, _) = start_session(agent.build().unwrap());
    for (owner, expected) in [(json!("ann"), "ok"), (json!(null), "prerequisite_missing")] {
        assert_eq!(call_code(&s, "look", json!({ "owner": owner.clone() })).await, "ok");
        assert_eq!(
            call_code(&s, "act", json!({ "owner": owner.clone() })).await,
            expected,
            "{owner}"
        );
    }
}

#[tokio::test]
async fn evidence_can_be_revoked() {
    let rule = |name: &str, source: &'static str| {
        Require::new(name, ["act"], [source]).same("entity", "/entity").code(name)
    };
    let (s, _) = start_session(agent(|a| {
        a.policy(rule("logged_in", "proof")).policy(rule("checked", "check"))
    }));
    for (n, (name, entity, expected)) in [
        ("proof", 1, "ok"),
        ("check", 1, "ok"),
        ("check", 2, "ok"),
        ("act", 1, "ok"),
        ("forget", 2, "ok"),
        ("act", 1, "ok"),
        ("forget", 1, "ok"),
        ("act", 1, "checked"),
        ("check", 1, "ok"),
        ("act", 1, "ok"),
        ("logout", 9, "ok"),
        ("act", 1, "logged_in"),
        ("proof", 1, "ok"),
        ("act", 1, "ok"),
    ]
    .into_iter()
    .enumerate()
    {
        assert_eq!(
            call_code(&s, name, json!({"entity": entity, "n": n})).await,
            expected,
            "step {n}: {name} {entity}"
        );
    }
    // A revocation without an entity revokes all evidence of the tool.
    assert_eq!(call_code(&s, "forget", json!({"n": 100})).await, "ok");
    assert_eq!(call_code(&s, "act", json!({"entity": 1, "n": 101})).await, "checked");
    assert_eq!(call_code(&s, "check", json!({"entity": 1, "n": 102})).await, "ok");
    // A logout with an unknown outcome revokes the evidence.
    assert_eq!(call_code(&s, "logout", json!({"lose": true})).await, "lost");
    assert_eq!(call_code(&s, "act", json!({"entity": 1, "n": 103})).await, "logged_in");
    assert_eq!(call_code(&s, "proof", json!({"entity": 1, "n": 104})).await, "ok");
    // A logout without effects revokes nothing.
    assert_eq!(call_code(&s, "logout", json!({"fail": true})).await, "failed");
    assert_eq!(call_code(&s, "act", json!({"entity": 1, "n": 99})).await, "ok");
    let error = Agent::builder("a")
        .tool(tool("logout").open().revokes("gone").revokes_about("logout", "missing"))
        .build()
        .unwrap_err();
    assert!(
        error.to_string().contains("`gone`, which is not a tool")
            && error.to_string().contains("about `missing`"),
        "{error}"
    );
}

#[tokio::test]
async fn reported_evidence_counts_only_with_accept_reported() {
    for accepts in [false, true] {
        let rule = Require::new("needs_proof", ["act"], ["client"]);
        let rule = if accepts { rule.accept_reported() } else { rule };
        let (s, _) = start_session(
            Agent::builder("a")
                .tool(tool("act"))
                .tool(Tool::external("client", "Run by the client.", None).open())
                .policy(rule)
                .build()
                .unwrap(),
        );
        let deferred = s.admit("client", json!({})).await.ok().unwrap();
        s.report(&deferred, Ok(json!("done"))).await;
        assert_eq!(
            call_code(&s, "act", json!({})).await,
            if accepts { "ok" } else { "prerequisite_missing" }
        );
    }
}

#[tokio::test]
async fn ask_rule_requires_approval() {
    let (s, _) = start_session(agent(|a| {
        a.policy(
            Deny::ask("large", ["act"])
                .when("/amount", Condition::Above(100.into()))
                .reason("large amounts need a person"),
        )
    }));
    assert_eq!(call_code(&s, "act", json!({"amount": 100})).await, "ok");
    assert_eq!(call_code(&s, "act", json!({"amount": 101})).await, "approval_required");
}

#[test]
fn rules_with_unknown_names_do_not_load() {
    let error = Agent::builder("a")
        .tool(tool("act"))
        .tool(
            Tool::dynamic("plain", "Plain.", json!({"type": "object"}), |_, args| async move {
                Ok(args)
            })
            .effect(Effect::Read),
        )
        .policy(Deny::new("typo", ["atc"]))
        .policy(Deny::new("argument", ["act"]).when("/amont", Condition::Above(1.into())))
        .policy(
            Limit::sum("limit", ["act"], "/amuont", 1.into())
                .per(LimitOwner::Entity("/entty".into())),
        )
        .policy(
            Require::new("require", ["act"], ["plain", "gone"])
                .same("customer", "/customer")
                .field("/active", json!(true)),
        )
        .policy(Sequence::new("sequence").after("act", ["verfy"]))
        .build()
        .unwrap_err();
    insta::assert_snapshot!(error, @"
    cannot build the agent `a`:
      - policy `typo`: `atc` is not a tool of this agent; did you mean `act`?
      - policy `argument`: `act` has no argument `amont`; did you mean `amount`?
      - policy `limit`: `act` has no argument `amuont`; did you mean `amount`?
      - policy `limit`: `act` has no argument `entty`; did you mean `entity`?
      - policy `require`: `gone` is not a tool of this agent; known names: `act`, `plain`
      - policy `require`: `act` has no argument `customer`; known names: `amount`, `currency`, `entity`, `fail`, `lose`, `n`, `ok`, `pin`, `to`
      - policy `require`: `plain` declares no entity `customer`, so its evidence cannot be compared
      - policy `require`: `plain` does not declare `/active` as evidence
      - policy `sequence`: `verfy` is not a tool of this agent; known names: `act`, `plain`
    ");
}

#[tokio::test]
async fn reported_and_observed_evidence_are_separate() {
    for accepts in [false, true] {
        let rule = Require::new("r", ["act"], ["proof"]).field("/ok", json!(true)).code("r");
        let rule = if accepts { rule.accept_reported() } else { rule };
        let (s, clock) = start_session(agent(|a| a.policy(rule)));
        assert_eq!(call_code(&s, "proof", json!({"ok": true})).await, "ok");
        clock.advance(SignedDuration::from_secs(1));
        let deferred = s.admit("proof", json!({"ok": false})).await.ok().unwrap();
        s.report(&deferred, Ok(json!({"ok": false}))).await;
        // For a rule that accepts reports, the later report replaces the observed result.
        assert_eq!(call_code(&s, "act", json!({})).await, if accepts { "r" } else { "ok" });
    }
}

#[tokio::test]
async fn revocation_covers_every_entity_of_evidence() {
    // Two results name one customer and different orders; a revocation by customer revokes both.
    let verify = tool("verify").effect(Effect::Read).entity("order", "/n");
    let logout = tool("end").open().revokes_about("verify", "entity");
    let rule = Require::new("r", ["act"], ["verify"]).same("order", "/n");
    let (s, _) = start_session(
        Agent::builder("a")
            .tool(verify)
            .tool(logout)
            .tool(tool("act"))
            .policy(rule)
            .build()
            .unwrap(),
    );
    assert_eq!(call_code(&s, "verify", json!({"entity": 1, "n": 10})).await, "ok");
    assert_eq!(call_code(&s, "verify", json!({"entity": 1, "n": 11})).await, "ok");
    assert_eq!(call_code(&s, "verify", json!({"entity": 2, "n": 12})).await, "ok");
    assert_eq!(call_code(&s, "end", json!({"entity": 1})).await, "ok");
    for (n, expected) in [(10, "prerequisite_missing"), (11, "prerequisite_missing"), (12, "ok")] {
        assert_eq!(call_code(&s, "act", json!({"entity": 1, "n": n})).await, expected, "{n}");
    }
}

#[tokio::test]
async fn policies_are_notified_of_revocations() {
    struct RevocationRecorder(std::sync::Mutex<Vec<String>>);
    impl Policy for &'static RevocationRecorder {
        fn name(&self) -> &str {
            "recorder"
        }
        fn observes_all_tools(&self) -> bool {
            true
        }
        fn governs(&self, _: &toolgate::ToolSpec) -> bool {
            false
        }
        fn check(
            &self,
            _: &toolgate::policy::PolicyInput<'_>,
        ) -> Result<toolgate::policy::Verdict, toolgate::policy::PolicyError> {
            Ok(toolgate::policy::Verdict::allow())
        }
        fn on_result(
            &self,
            done: &toolgate::policy::SuccessfulCall<'_>,
        ) -> Result<Vec<toolgate::session::state::NamedChange>, toolgate::policy::PolicyError>
        {
            let lines = done.revoked.iter().map(|r| {
                format!(
                    "{} {:?}",
                    r.tool,
                    r.about.as_ref().map(|(name, value)| format!("{name} {value}"))
                )
            });
            self.0.lock().unwrap().extend(lines);
            Ok(Vec::new())
        }
    }
    static REVOCATION_RECORDER: RevocationRecorder =
        RevocationRecorder(std::sync::Mutex::new(Vec::new()));
    let (s, _) = start_session(agent(|a| a.policy(&REVOCATION_RECORDER)));
    for name in ["proof", "forget", "logout"] {
        assert_eq!(call_code(&s, name, json!({"entity": 1})).await, "ok");
    }
    assert_eq!(*REVOCATION_RECORDER.0.lock().unwrap(), ["check Some(\"entity 1\")", "proof None"]);
}
