//! The typed rules, one by one.

mod limits;
pub(crate) mod reference_model;
mod reference_model_agreement;

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use toolgate::policy::{Condition, Deny, Limit, LimitOwner, Policy, Require, Sequence};
use toolgate::{Agent, AgentBuilder, Effect, ErrorCategory, Failure, ManualClock, Tool};

use crate::support::BuildWithReplayCheck;

pub(crate) fn tool(name: &str) -> Tool {
    let schema = json!({"type": "object", "properties": {
        "entity": {"type": "integer"}, "amount": {"type": "number"}, "currency": {"type": "integer"}, "ok": {"type": "boolean"},
        "n": {"type": "integer"}, "to": {"type": "string"}, "fail": {"type": "boolean"}, "lose": {"type": "boolean"}, "pin": {"type": "integer", "writeOnly": true},
    }});
    Tool::dynamic(name, "A tool.", schema, |_, args: Value| async move {
        if args["lose"] == true {
            return Err(Failure::business("lost", "nobody knows"));
        }
        if args["fail"] == true {
            Err(Failure::business("failed", "told to").effects(toolgate::CallEffects::None))
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
        crate::support::runtime_builder()
            .agent(agent)
            .clock(clock.clone())
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
        "another answer"
    );
    assert_eq!(call_code(&s, "check", json!({"entity": 1, "ok": true})).await, "ok");
    assert_eq!(
        call_code(&s, "act", json!({"entity": 1, "n": 3})).await,
        "ok",
        "either tool will do"
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
        "the latest answer counts"
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
    // Without saying about what, everything is forgotten.
    assert_eq!(call_code(&s, "forget", json!({"n": 100})).await, "ok");
    assert_eq!(call_code(&s, "act", json!({"entity": 1, "n": 101})).await, "checked");
    assert_eq!(call_code(&s, "check", json!({"entity": 1, "n": 102})).await, "ok");
    // A logout that may have happened counts as one that did.
    assert_eq!(call_code(&s, "logout", json!({"lose": true})).await, "lost");
    assert_eq!(call_code(&s, "act", json!({"entity": 1, "n": 103})).await, "logged_in");
    assert_eq!(call_code(&s, "proof", json!({"entity": 1, "n": 104})).await, "ok");
    // A logout that provably did not happen has not happened.
    assert_eq!(call_code(&s, "logout", json!({"fail": true})).await, "failed");
    assert_eq!(call_code(&s, "act", json!({"entity": 1, "n": 99})).await, "ok");
    let wrong = Agent::builder("a")
        .tool(tool("logout").open().revokes("gone").revokes_about("logout", "nobody"))
        .build()
        .unwrap_err();
    assert!(
        wrong.to_string().contains("`gone`, which is not a tool")
            && wrong.to_string().contains("about `nobody`"),
        "{wrong}"
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
        let gate_pass = s.admit("client", json!({})).await.ok().unwrap();
        s.report(&gate_pass, Ok(json!("done"))).await;
        assert_eq!(
            call_code(&s, "act", json!({})).await,
            if accepts { "ok" } else { "prerequisite_missing" }
        );
    }
}

#[tokio::test]
async fn conditions_compare_exactly_and_missing_values_deny() {
    let cases: Vec<(Condition, Value, &str)> = vec![
        (Condition::Above(500.into()), json!({"amount": 500}), "ok"),
        (Condition::Above(500.into()), json!({"amount": 500.000_000_000_001}), "rule"),
        (Condition::Above(500.into()), json!({"amount": 1e3}), "rule"),
        (Condition::Above(500.into()), json!({}), "rule"),
        (Condition::Below(1.into()), json!({"amount": 0.99}), "rule"),
        (Condition::Below(1.into()), json!({"amount": 1.0}), "ok"),
        (Condition::one_of([json!(1.0), json!("x")]), json!({"amount": 1}), "rule"),
        (Condition::one_of([json!(1.0)]), json!({"amount": 2}), "ok"),
        (Condition::none_of([json!(5)]), json!({"amount": 5.0}), "ok"),
        (Condition::none_of([json!(5)]), json!({"amount": 6}), "rule"),
        (Condition::Above(500.into()), json!({"amount": 1e300}), "policy_fault"),
    ];
    for (condition, args, expected) in cases {
        let shown = format!("{condition:?} {args}");
        let (s, _) = start_session(agent(|a| {
            a.policy(Deny::new("rule", ["act"]).when("/amount", condition))
        }));
        assert_eq!(call_code(&s, "act", args).await, expected, "{shown}");
    }
    let text: Vec<(Condition, &str, &str)> = vec![
        (Condition::Glob("*@evil.example".into()), "a@evil.example", "rule"),
        (Condition::Glob("*@evil.example".into()), "a@good.example", "ok"),
        (Condition::matches("^/etc/").unwrap(), "/etc/passwd", "rule"),
        (Condition::matches("^/etc/").unwrap(), "/home/etc/", "ok"),
    ];
    for (condition, to, expected) in text {
        let (s, _) =
            start_session(agent(|a| a.policy(Deny::new("rule", ["act"]).when("/to", condition))));
        assert_eq!(call_code(&s, "act", json!({ "to": to })).await, expected, "{to}");
    }
    // All conditions together, and what the model reads.
    let rule = Deny::new("rule", ["act"])
        .when("/amount", Condition::Above(5.into()))
        .when("/pin", Condition::Above(1.into()))
        .category(ErrorCategory::Permission)
        .redirect("other");
    let (s, _) = start_session(agent(|a| a.policy(rule)));
    assert_eq!(call_code(&s, "act", json!({"amount": 6, "pin": 1})).await, "ok");
    let refused = s.call("act", json!({"amount": 6, "pin": 7711})).await;
    let error = refused.outcome.error().unwrap();
    assert_eq!(
        (error.category, error.retryable, error.redirect_tool.as_deref()),
        (ErrorCategory::Permission, false, Some("other"))
    );
    let got: Vec<_> = error
        .errors
        .iter()
        .map(|e| (e.path.as_str(), e.expected.as_str(), e.got.as_str()))
        .collect();
    assert_eq!(got, [("/amount", "at most 5", "6"), ("/pin", "at most 1", "(hidden)")]);
}

#[tokio::test]
async fn value_of_unlisted_type_is_policy_fault() {
    let cases = [
        (json!([3, 4]), json!(3), "rule"),
        (json!([3, 4]), json!(5), "ok"),
        (json!([3, 4]), json!("3"), "policy_fault"),
        (json!(["prod"]), json!(null), "policy_fault"),
        (json!(["prod", null]), json!(null), "rule"),
        (json!(["prod", 1]), json!("test"), "ok"),
        (json!(["a@x.example"]), json!(["a@x.example"]), "policy_fault"),
        (json!([["a@x.example"]]), json!(["b@x.example"]), "ok"),
        (json!([true]), json!("true"), "policy_fault"),
    ];
    for (listed, value, expected) in cases {
        let schema = json!({"type": "object", "properties": {"to": {}}});
        let act = Tool::dynamic("act", "Acts.", schema, |_, _| async { Ok(Value::Null) });
        let rule = Deny::new("rule", ["act"])
            .when("/to", Condition::one_of(listed.as_array().cloned().unwrap_or_default()));
        let (s, _) = start_session(Agent::builder("a").tool(act).policy(rule).build().unwrap());
        assert_eq!(
            call_code(&s, "act", json!({ "to": value.clone() })).await,
            expected,
            "{value} in {listed}"
        );
    }
}

#[tokio::test]
async fn type_mismatch_counts_only_if_other_conditions_match() {
    let is = |value: &str| Condition::one_of([json!(value)]);
    for order in [["/stage", "/verb"], ["/verb", "/stage"]] {
        let schema = json!({"type": "object", "properties": {"stage": {}, "verb": {}}});
        let act = Tool::dynamic("act", "Acts.", schema, |_, _| async { Ok(Value::Null) });
        let wanted = |path: &str| if path == "/stage" { is("prod") } else { is("drop") };
        let rule = order
            .iter()
            .fold(Deny::new("rule", ["act"]), |rule, path| rule.when(*path, wanted(path)));
        let (s, _) = start_session(Agent::builder("a").tool(act).policy(rule).build().unwrap());
        for (stage, verb, expected) in [
            (json!(null), "list", "ok"),
            (json!(null), "drop", "policy_fault"),
            (json!(["prod"]), "drop", "policy_fault"),
            (json!("prod"), "drop", "rule"),
            (json!("test"), "drop", "ok"),
        ] {
            assert_eq!(
                call_code(&s, "act", json!({"stage": stage.clone(), "verb": verb})).await,
                expected,
                "{order:?}: {stage} {verb}"
            );
        }
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
        let pass = s.admit("proof", json!({"ok": false})).await.ok().unwrap();
        s.report(&pass, Ok(json!({"ok": false}))).await;
        // To a rule that listens to clients, the later word is that it is not so any more.
        assert_eq!(call_code(&s, "act", json!({})).await, if accepts { "r" } else { "ok" });
    }
}

#[tokio::test]
async fn wildcard_condition_checks_every_item() {
    let schema = json!({"type": "object", "properties": {"lines": {"type": "array", "items": {"type": "object", "properties": {"amount": {"type": "number"}}}}}});
    let pay = || Tool::dynamic("pay", "Pays.", schema.clone(), |_, _| async { Ok(Value::Null) });
    let lines = |amounts: &[i64]| json!({"lines": amounts.iter().map(|a| json!({"amount": a})).collect::<Vec<_>>()});
    let build = |policy: Deny| {
        crate::support::runtime_builder()
            .agent(Agent::builder("a").tool(pay()).policy(policy).build().unwrap())
            .build_checked()
            .session("a", "p", "s")
    };
    let s = build(Deny::new("cap", ["pay"]).when("/lines/*/amount", Condition::Above(500.into())));
    for (amounts, expected) in [(vec![1, 2], "ok"), (vec![1, 600], "cap"), (vec![], "cap")] {
        assert_eq!(call_code(&s, "pay", lines(&amounts)).await, expected, "{amounts:?}");
    }
    assert_eq!(
        call_code(&s, "pay", json!({"lines": [{"amount": 1}, {}]})).await,
        "cap",
        "an item that hides its amount"
    );
    assert_eq!(call_code(&s, "pay", json!({})).await, "cap");
    let limit = Limit::sum("sum", ["pay"], "/lines/*/amount", 500.into());
    let s = crate::support::runtime_builder()
        .agent(Agent::builder("a").tool(pay()).policy(limit).build().unwrap())
        .build_checked()
        .session("a", "p", "s");
    assert_eq!(call_code(&s, "pay", lines(&[300, 201])).await, "sum");
    assert_eq!(call_code(&s, "pay", lines(&[700, -300])).await, "invalid_arguments");
    assert_eq!(
        call_code(&s, "pay", json!({"lines": [{"amount": 1}, {}]})).await,
        "invalid_arguments"
    );
    assert_eq!(call_code(&s, "pay", lines(&[300, 200])).await, "ok");
    let wrong = Agent::builder("a")
        .tool(pay())
        .policy(
            Limit::calls("l", ["pay"], 1)
                .per(LimitOwner::Entity("/lines/*/amount".into()))
                .redirect("gone"),
        )
        .build()
        .unwrap_err();
    assert!(
        wrong.to_string().contains("names more than one value")
            && wrong.to_string().contains("redirects to `gone`"),
        "{wrong}"
    );
}

#[tokio::test]
async fn revocation_covers_every_entity_of_evidence() {
    // Proved twice about one customer, each time with another order: taking away the customer takes
    // both.
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
            "told"
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
