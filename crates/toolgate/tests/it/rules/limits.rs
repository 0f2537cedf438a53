//! Tests what limits count, for which owner, and when they release an amount.

use jiff::SignedDuration;
use serde_json::{Value, json};
use toolgate::policy::{EvidenceEntity, Limit, LimitOwner, observe};
use toolgate::{Agent, Effect, ErrorCategory, Tool};

use super::{agent, call_code, start_session, tool};
use crate::support::BuildWithReplayCheck;

#[tokio::test]
async fn limits_span_sessions_and_settle_by_effect() {
    let daily = Limit::sum("daily", ["act"], "/amount", 500.into())
        .per(LimitOwner::Entity("/entity".into()))
        .within(SignedDuration::from_hours(24));
    let once = Limit::calls("once", ["act"], 1).per(LimitOwner::Entity("/n".into()));
    let (s, clock) = start_session(agent(|a| a.policy(daily).policy(once)));
    let act = |amount: f64, n: i64| json!({"entity": 1, "amount": amount, "n": n});
    assert_eq!(
        call_code(&s, "act", json!({"entity": 1, "amount": 499, "n": 1, "fail": true})).await,
        "failed",
        "a failure without effects releases its amount"
    );
    assert_eq!(call_code(&s, "act", act(499.0, 1)).await, "ok");
    assert_eq!(call_code(&s, "act", act(499.0, 2)).await, "daily", "two amounts of 499 exceed 500");
    assert_eq!(call_code(&s, "act", act(1.0, 1)).await, "once");
    assert_eq!(
        call_code(&s, "act", act(-100.0, 3)).await,
        "invalid_arguments",
        "negative amounts are refused"
    );
    assert_eq!(call_code(&s, "act", act(1.01, 4)).await, "daily");
    assert_eq!(call_code(&s, "act", act(1.0, 5)).await, "ok");
    assert_eq!(call_code(&s, "act", json!({"entity": 2, "amount": 500, "n": 6})).await, "ok");
    assert_eq!(
        call_code(&s, "act", json!({"amount": 1, "n": 7})).await,
        "invalid_arguments",
        "the owner is required"
    );
    clock.advance(SignedDuration::from_hours(24));
    assert_eq!(call_code(&s, "act", act(500.0, 8)).await, "ok", "the window slides");
}

#[tokio::test]
async fn limit_faults_if_evidence_lacks_owner() {
    let look = Tool::dynamic(
        "look",
        "Looks.",
        json!({"type": "object", "properties": {"entity": {"type": "integer"}}}),
        |_, _| async { Ok(json!({"found": false})) },
    );
    let look = look.effect(Effect::Read).entity("entity", "/entity").proves("/owner");
    let proved = EvidenceEntity {
        tool: "look".into(),
        entity: ("entity".into(), "/entity".into()),
        field: "/owner".into(),
        fallback: Some("/to".into()),
    };
    let rule = Limit::calls("r", ["act"], 5).per(LimitOwner::EvidenceEntity(Box::new(proved)));
    let (s, _) = start_session(
        Agent::builder("a").tool(look).tool(tool("act")).policy(rule).build().unwrap(),
    );
    assert_eq!(call_code(&s, "act", json!({"entity": 1, "to": "me"})).await, "ok");
    assert_eq!(call_code(&s, "look", json!({"entity": 1})).await, "ok");
    assert_eq!(
        call_code(&s, "act", json!({"entity": 1, "to": "me", "n": 2})).await,
        "policy_fault"
    );
}

#[tokio::test]
async fn limit_faults_if_owner_is_no_scalar() {
    for (owner, expected) in [
        (json!("al"), "ok"),
        (json!(7), "ok"),
        (json!(null), "policy_fault"),
        (json!(" "), "policy_fault"),
        (json!(["al"]), "policy_fault"),
        (json!({"id": "al"}), "policy_fault"),
    ] {
        let answer = json!({"owner": &owner, "found": true});
        let look = Tool::dynamic(
            "look",
            "Looks.",
            json!({"type": "object", "properties": {"entity": {"type": "integer"}}}),
            move |_, _: Value| {
                let answer = answer.clone();
                async move { Ok(answer) }
            },
        );
        let look = look.effect(Effect::Read).entity("entity", "/entity").proves("/owner");
        let proved = EvidenceEntity {
            tool: "look".into(),
            entity: ("entity".into(), "/entity".into()),
            field: "/owner".into(),
            fallback: None,
        };
        let rule = Limit::calls("r", ["act"], 5).per(LimitOwner::EvidenceEntity(Box::new(proved)));
        let (s, _) = start_session(
            Agent::builder("a").tool(look).tool(tool("act")).policy(rule).build().unwrap(),
        );
        assert_eq!(call_code(&s, "look", json!({"entity": 1})).await, "ok");
        assert_eq!(call_code(&s, "act", json!({"entity": 1})).await, expected, "{owner}");
    }
}

#[tokio::test]
async fn uncountable_amount_is_invalid_argument() {
    const AMOUNT_EXPECTATION: &str = "a number of at least 0, with at most 28 digits";
    let pay = |amount: Value| {
        let schema = json!({"type": "object", "properties": {"amount": amount, "currency": {"type": "string"}, "to": {"type": "string"}}});
        Tool::dynamic("pay", "Pays.", schema, |_, _| async { Ok(Value::Null) })
    };
    let session_with_limit = |amount: Value| {
        let limit = Limit::sum("daily", ["pay"], "/amount", 500.into())
            .currency("/currency")
            .per(LimitOwner::Entity("/to".into()));
        start_session(Agent::builder("a").tool(pay(amount)).policy(limit).build().unwrap()).0
    };
    let call_error = async |session: &toolgate::Session, args: Value| {
        let answer = session.call("pay", args).await;
        let error = answer.outcome.error().cloned().unwrap();
        let fields: Vec<_> = error
            .errors
            .iter()
            .map(|e| format!("{} {} got {}", e.path, e.expected, e.got))
            .collect();
        (error.code.to_string(), error.category, fields.join("; "))
    };
    let invalid =
        |field: String| ("invalid_arguments".to_owned(), ErrorCategory::Validation, field);
    // The schema allows a number, so the model can correct the call.
    for schema in [json!({}), json!({"type": ["number", "string", "null"]})] {
        let s = session_with_limit(schema);
        for (args, got) in [
            (json!({"currency": "EUR", "to": "a"}), "nothing"),
            (json!({"amount": -1, "currency": "EUR", "to": "a"}), "-1"),
            (json!({"amount": "5", "currency": "EUR", "to": "a"}), "\"5\""),
            (json!({"amount": null, "currency": "EUR", "to": "a"}), "null"),
        ] {
            assert_eq!(
                call_error(&s, args).await,
                invalid(format!("/amount {AMOUNT_EXPECTATION} got {got}"))
            );
        }
        let long = json!({"amount": serde_json::from_str::<Value>("1e40").unwrap(), "currency": "EUR", "to": "a"});
        assert_eq!(
            call_error(&s, long).await.0,
            "invalid_arguments",
            "more digits than can be added up"
        );
        assert_eq!(
            call_error(&s, json!({"amount": 1, "to": "a"})).await,
            invalid("/currency given got nothing".to_owned())
        );
        assert_eq!(
            call_error(&s, json!({"amount": 1, "currency": "EUR"})).await,
            invalid("/to given got nothing".to_owned())
        );
        assert_eq!(
            call_error(&s, json!({"amount": 1, "currency": "", "to": "a"})).await,
            invalid("/currency given got \"\"".to_owned())
        );
        assert_eq!(
            call_error(&s, json!({"amount": 1, "currency": "EUR", "to": ""})).await,
            invalid("/to given got \"\"".to_owned())
        );
        assert_eq!(
            call_code(&s, "pay", json!({"amount": 1, "currency": "EUR", "to": "a"})).await,
            "ok"
        );
    }
    // If the schema allows only text, no call can satisfy the rule, so the rule does not load.
    for kind in [json!({"type": "string"}), json!({"type": ["string", "null"]})] {
        let limit = Limit::sum("daily", ["pay"], "/amount", 500.into());
        let build_error =
            Agent::builder("a").tool(pay(kind)).policy(limit).build().unwrap_err().to_string();
        assert!(build_error.contains("`/amount` of `pay` is never a number"), "{build_error}");
    }
    // A secret value is hidden.
    let s = session_with_limit(json!({"writeOnly": true}));
    assert_eq!(
        call_error(&s, json!({"amount": "hunter2", "currency": "EUR", "to": "a"})).await,
        invalid(format!("/amount {AMOUNT_EXPECTATION} got (hidden)"))
    );
}

#[tokio::test]
async fn currency_spellings_share_one_counter() {
    let schema = json!({"type": "object", "properties": {"amount": {"type": "number"}, "currency": {"type": "string"}}});
    let pay = Tool::dynamic("pay", "Pays.", schema, |_, _| async { Ok(Value::Null) });
    let limit = Limit::sum("sum", ["pay"], "/amount", 100.into()).currency("/currency");
    let (s, _) = start_session(Agent::builder("a").tool(pay).policy(limit).build().unwrap());
    for (amount, currency, expected) in [
        (60, "EUR", "ok"),
        (60, "eur", "sum"),
        (60, " Eur ", "sum"),
        (60, "USD", "ok"),
        (40, "eur", "ok"),
        (1, "EUR", "sum"),
    ] {
        assert_eq!(
            call_code(&s, "pay", json!({"amount": amount, "currency": currency})).await,
            expected,
            "{amount} {currency}"
        );
    }
    // A blank currency is not a separate counter.
    let schema =
        json!({"type": "object", "properties": {"amount": {"type": "number"}, "currency": {}}});
    let pay = Tool::dynamic("pay", "Pays.", schema, |_, _| async { Ok(Value::Null) });
    let limit = Limit::sum("sum", ["pay"], "/amount", 500.into()).currency("/currency");
    let (s, _) = start_session(Agent::builder("a").tool(pay).policy(limit).build().unwrap());
    for (currency, expected) in [
        (json!("USD"), "ok"),
        (json!(null), "invalid_arguments"),
        (json!(""), "invalid_arguments"),
        (json!(" "), "invalid_arguments"),
        (json!("usd"), "sum"),
    ] {
        assert_eq!(
            call_code(&s, "pay", json!({"amount": 500, "currency": currency})).await,
            expected,
            "{currency}"
        );
    }
}

#[tokio::test]
async fn observed_limit_never_refuses() {
    let (s, _) = start_session(agent(|a| {
        a.policy(observe(Limit::sum("huge", ["act"], "/amount", 1.into())))
    }));
    for n in 0..3 {
        assert_eq!(
            call_code(
                &s,
                "act",
                json!({"amount": 70_000_000_000_000_000_000_000_000_000_f64, "n": n})
            )
            .await,
            "ok"
        );
    }
}

#[tokio::test]
async fn exhausted_limit_does_not_withhold_replay() {
    let proved = EvidenceEntity {
        tool: "look".into(),
        entity: ("entity".into(), "/entity".into()),
        field: "/owner".into(),
        fallback: None,
    };
    let look = Tool::dynamic(
        "look",
        "Looks.",
        json!({"type": "object", "properties": {"entity": {"type": "integer"}}}),
        |_, _| async { Ok(json!({"owner": "al"})) },
    );
    let look = look.effect(Effect::Read).entity("entity", "/entity").proves("/owner");
    let rule = Limit::calls("r", ["act"], 5).per(LimitOwner::EvidenceEntity(Box::new(proved)));
    let agent = Agent::builder("a").tool(look).tool(tool("act")).policy(rule).build().unwrap();
    let gate = crate::support::runtime_builder().agent(agent).build_checked();
    let act = async |session: &str| {
        let session = gate.session("a", "alice", session);
        gate.call(session.prepare("act", json!({"entity": 1})).idempotency_key("k")).await
    };
    assert_eq!(
        call_code(&gate.session("a", "alice", "s"), "look", json!({"entity": 1})).await,
        "ok"
    );
    assert!(act("s").await.outcome.success().is_some());
    // The other session has no evidence of the owner.
    let again = act("other").await;
    assert!(again.outcome.success().is_some_and(|output| output.replayed), "{again:?}");
}
