//! Tests the conditions of rules on arguments.

use serde_json::{Value, json};
use toolgate::policy::{Condition, Deny, Limit, LimitOwner};
use toolgate::{Agent, ErrorCategory, Tool};

use super::{agent, call_code, start_session};
use crate::support::BuildWithReplayCheck;

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
    // All conditions must match, and the error lists each of them.
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
        let condition = |path: &str| if path == "/stage" { is("prod") } else { is("drop") };
        let rule = order
            .iter()
            .fold(Deny::new("rule", ["act"]), |rule, path| rule.when(*path, condition(path)));
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
        "an item without an amount"
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
    let error = Agent::builder("a")
        .tool(pay())
        .policy(
            Limit::calls("l", ["pay"], 1)
                .per(LimitOwner::Entity("/lines/*/amount".into()))
                .redirect("gone"),
        )
        .build()
        .unwrap_err();
    assert!(
        error.to_string().contains("names more than one value")
            && error.to_string().contains("redirects to `gone`"),
        "{error}"
    );
}
