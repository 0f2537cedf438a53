//! Tests CEL conditions: their meaning, exact numbers, and a denial on every fault.

use crate::support::BuildWithReplayCheck;
use serde_json::{Value, json};
use toolgate::policy::{Deny, Limit, LimitOwner, Policy, Require};
use toolgate::{Agent, Effect, ManualClock, Tool};

fn act_tool() -> Tool {
    let schema = json!({"type": "object", "properties": {
        "n": {"type": "number"}, "m": {"type": "number"}, "text": {"type": "string"}, "flag": {"type": "boolean"}, "when": {"type": "string"},
        "list": {"type": "array", "items": {"type": "number"}}, "names": {"type": "array", "items": {"type": "string"}},
        "lines": {"type": "array", "items": {"type": "object", "properties": {"amount": {"type": "number"}, "to": {"type": "string"}}}},
        "at": {"type": "object", "properties": {"city": {"type": "string"}, "zip": {"type": ["string", "null"]}}},
        "any": {}, "map": {"type": "object"}, "pin": {"type": "string", "writeOnly": true},
    }});
    Tool::dynamic("act", "Acts.", schema, |_, _| async { Ok(Value::Null) })
}

async fn call_under_rule(rule: impl Policy + 'static, args: Value) -> String {
    let clock = ManualClock::at("2026-03-02T09:30:00Z".parse().unwrap());
    let agent = Agent::builder("a")
        .tool(act_tool())
        .policy(rule)
        .build()
        .unwrap_or_else(|e| panic!("{}", e.render(false)));
    let gate =
        crate::support::runtime_builder_at(std::sync::Arc::new(clock)).agent(agent).build_checked();
    let answer = gate.session("a", "alice", "s").call("act", args).await;
    answer.outcome.error().map_or_else(|| "ok".to_owned(), |e| e.code.to_string())
}

#[tokio::test]
async fn expressions_evaluate_exactly() {
    let (yes, no, fault) = ("rule", "ok", "policy_fault");
    let cases: Vec<(&str, Value, &str)> = vec![
        // Numbers are exact and have one type.
        ("input.n > 500", json!({"n": 500}), no),
        ("input.n > 500", json!({"n": 500.000_000_000_000_1}), yes),
        ("input.n == 0.3", json!({"n": 0.3}), yes),
        ("input.n + input.m == 0.3", json!({"n": 0.1, "m": 0.2}), yes),
        ("0.1 + 0.2 == input.n", json!({"n": 0.3}), yes),
        ("input.n * 3 == 0.3", json!({"n": 0.1}), yes),
        ("input.n / 4 == 0.25", json!({"n": 1}), yes),
        ("input.n % 2 == 1", json!({"n": 7}), yes),
        ("-input.n < 0", json!({"n": 1}), yes),
        ("input.n == 9007199254740993.0", json!({"n": 9_007_199_254_740_993_u64}), yes),
        ("input.n == 9007199254740993.0", json!({"n": 9_007_199_254_740_992_u64}), no),
        (
            "input.text == \"ä\" || input.n == 9007199254740993.0",
            json!({"text": "x", "n": 9_007_199_254_740_993_u64}),
            yes,
        ),
        (
            "input.text == \"ä\" || input.n == 9007199254740993.0",
            json!({"text": "x", "n": 9_007_199_254_740_992_u64}),
            no,
        ),
        ("input.n == decimal(\"1.10\")", json!({"n": 1.1}), yes),
        ("decimal(input.text) >= 10", json!({"text": "10.0"}), yes),
        ("decimal(input.text) >= 10", json!({"text": "ten"}), fault),
        ("input.n > 1", json!({"n": 1e30}), fault),
        ("input.n > -0.5", json!({"n": 0}), yes),
        ("input.n > -0.5", json!({"n": -0.5}), no),
        ("input.n == -1.25", json!({"n": -1.25}), yes),
        ("input.n == 1.5e2", json!({"n": 150}), yes),
        ("input.n - 1.5 == -1", json!({"n": 0.5}), yes),
        (
            "input.n * input.m > 0",
            json!({"n": 0.000_000_000_000_01, "m": 0.000_000_000_000_001}),
            fault,
        ),
        ("input.n / input.m > 1", json!({"n": 1, "m": 0}), fault),
        (
            "input.n + input.m > 1",
            json!({"n": 70_000_000_000_000_000_000_000_000_000_f64, "m": 0.000_000_000_1}),
            fault,
        ),
        // Logical operators short-circuit, and a fault before that denies the call.
        ("has(input.n) && input.n > 5", json!({}), no),
        ("has(input.n) && input.n > 5", json!({"n": 6}), yes),
        ("input.n > 5", json!({}), fault),
        ("input.n > 5 && false == input.flag", json!({"flag": true}), fault),
        ("input.flag || input.n > 5", json!({"flag": true}), yes),
        ("input.n > 5 || input.flag", json!({"flag": true}), fault),
        ("!input.flag", json!({"flag": false}), yes),
        ("input.flag ? input.n > 1 : input.m > 1", json!({"flag": true, "n": 2}), yes),
        ("input.flag ? input.n > 1 : input.m > 1", json!({"flag": false, "m": 1}), no),
        // Text.
        ("input.text == \"x\"", json!({"text": "x"}), yes),
        ("input.text in [\"a\", \"b\"]", json!({"text": "b"}), yes),
        ("!(input.text in [\"a\", \"b\"])", json!({"text": "c"}), yes),
        ("input.text.startsWith(\"/etc\")", json!({"text": "/etc/passwd"}), yes),
        ("input.text.endsWith(\".pem\")", json!({"text": "a.pem"}), yes),
        ("input.text.contains(\"://\")", json!({"text": "see http://x"}), yes),
        ("input.text.lowerAscii() == \"abc\"", json!({"text": "ABC"}), yes),
        ("input.text.matches(\"^[A-Z]{2}[0-9]+$\")", json!({"text": "DE12"}), yes),
        ("matches(input.text, \"^[A-Z]{2}[0-9]+$\")", json!({"text": "DE12x"}), no),
        ("glob(input.text, \"*@evil.example\")", json!({"text": "a@evil.example"}), yes),
        ("size(input.text) > 3", json!({"text": "äöü"}), no),
        ("input.text + \"!\" == \"hi!\"", json!({"text": "hi"}), yes),
        ("input.text < \"b\"", json!({"text": "a"}), yes),
        // Lists and objects.
        ("size(input.list) > 2", json!({"list": [1, 2, 3]}), yes),
        ("sum_of(input.list) > 500", json!({"list": [250.5, 249.5]}), no),
        ("sum_of(input.list) > 500", json!({"list": [250.5, 249.50001]}), yes),
        (
            "sum_of(input.lines.map(l, l.amount)) > 10",
            json!({"lines": [{"amount": 6}, {"amount": 5}]}),
            yes,
        ),
        (
            "input.lines.exists(l, l.amount > 500)",
            json!({"lines": [{"amount": 1}, {"amount": 501}]}),
            yes,
        ),
        ("input.lines.exists(l, l.amount > 500)", json!({"lines": [{"amount": 1}]}), no),
        ("input.lines.exists(l, l.amount > 500)", json!({"lines": [{}]}), fault),
        (
            "!input.lines.all(l, l.to == \"me\")",
            json!({"lines": [{"to": "me"}, {"to": "you"}]}),
            yes,
        ),
        (
            "size(input.lines.filter(l, l.amount > 1)) == 1",
            json!({"lines": [{"amount": 1}, {"amount": 2}]}),
            yes,
        ),
        ("input.list.exists_one(i, i == 2)", json!({"list": [1, 2, 2]}), no),
        ("input.list[0] == 7", json!({"list": [7]}), yes),
        ("input.list[1] == 7", json!({"list": [7]}), fault),
        ("3 in input.list", json!({"list": [1, 2, 3]}), yes),
        ("input.at.city == \"Bonn\"", json!({"at": {"city": "Bonn"}}), yes),
        ("input[\"at\"][\"city\"] == \"Bonn\"", json!({"at": {"city": "Bonn"}}), yes),
        ("has(input.at.zip)", json!({"at": {}}), no),
        ("input.at.zip == null", json!({"at": {"zip": null}}), yes),
        ("\"x\" in input.map", json!({"map": {"x": 1}}), yes),
        ("input.map[\"*\"] == 1", json!({"map": {"a": 1}}), fault),
        ("input.text == \"a\\\\\" || (input.n > 1)", json!({"text": "a\\"}), yes),
        ("input.any > 1", json!({"any": "text"}), fault),
        ("input.any.deep.er == 1", json!({"any": {"deep": {"er": 1.0}}}), yes),
        ("same(input.n, input.m)", json!({"n": 1.0, "m": 1}), yes),
        ("!same(input.text, input.at.city)", json!({"text": "x"}), yes),
        ("input.list == [1, 2]", json!({"list": [1, 2.0]}), yes),
        // The meaning of a value of another type is unknown, so the comparison faults. Only `null`
        // compares with any value.
        ("input.any == \"admin\"", json!({"any": ["admin"]}), fault),
        ("input.any == \"admin\"", json!({"any": null}), fault),
        ("input.any == 3", json!({"any": "3"}), fault),
        ("input.any != 3", json!({"any": "3"}), fault),
        ("input.any == null", json!({"any": "x"}), no),
        ("null != input.any", json!({"any": ["x"]}), yes),
        ("input.any != null && input.any == \"x\"", json!({"any": null}), no),
        ("input.any == [1, 2]", json!({"any": ["1", 2]}), fault),
        ("input.any == [1, 2]", json!({"any": [1]}), no),
        (
            "input.any == input.map",
            json!({"any": {"a": {"b": "1"}}, "map": {"a": {"b": 1}}}),
            fault,
        ),
        ("input.any == input.map", json!({"any": {"a": {"b": 1.0}}, "map": {"a": {"b": 1}}}), yes),
        ("input.any == input.map", json!({"any": {"a": 1}, "map": {"b": "1"}}), no),
        ("input.any in [\"a\", \"b\"]", json!({"any": ["a"]}), fault),
        ("input.any in [\"a\", \"b\"]", json!({"any": null}), fault),
        ("input.any in [\"a\", 3]", json!({"any": "b"}), no),
        ("input.any in [\"a\", 3]", json!({"any": 3}), yes),
        ("input.any in [\"a\", 3]", json!({"any": true}), fault),
        ("input.any in [\"a\", null]", json!({"any": null}), yes),
        ("input.any in [\"a\", null]", json!({"any": ["a"]}), fault),
        ("\"admin\" in input.any", json!({"any": []}), no),
        ("\"admin\" in input.any", json!({"any": ["x", "admin"]}), yes),
        ("\"admin\" in input.any", json!({"any": ["x", ["admin"]]}), fault),
        ("null in input.any", json!({"any": ["x", 1]}), no),
        ("same(input.any, \"x\")", json!({"any": ["x"]}), fault),
        ("same(input.any, \"x\")", json!({"any": null}), no),
        // Principal, agent, tool, session and time.
        (
            "principal == \"alice\" && agent == \"a\" && tool == \"act\" && session == \"s\"",
            json!({}),
            yes,
        ),
        (
            "now.getHours() == 9 && now.getMinutes() == 30 && now.getFullYear() == 2026",
            json!({}),
            yes,
        ),
        ("now.getMonth() == 2 && now.getDate() == 1 && now.getDayOfWeek() == 1", json!({}), yes),
        ("now.getHours(\"America/New_York\") == 4", json!({}), yes),
        (
            "now - timestamp(input.when) > duration(\"24h\")",
            json!({"when": "2026-03-01T09:29:59Z"}),
            yes,
        ),
        (
            "now - timestamp(input.when) > duration(\"1d\")",
            json!({"when": "2026-03-01T09:30:00Z"}),
            no,
        ),
        ("now + duration(\"30m\") >= timestamp(\"2026-03-02T10:00:00Z\")", json!({}), yes),
        ("timestamp(input.when) < now", json!({"when": "yesterday"}), fault),
    ];
    for (expression, args, expected) in cases {
        let shown = format!("{expression} of {args}");
        assert_eq!(
            call_under_rule(Deny::new("rule", ["act"]).when_cel(expression), args).await,
            expected,
            "{shown}"
        );
    }
}

#[tokio::test]
async fn evaluation_faults_deny_call() {
    // Long lists are evaluated in bounded time, and a fault denies the call.
    let long: Vec<i64> = (0..20_000).collect();
    let walks = "input.list.all(i, i >= 0 && i < 100000) && size(input.list) > 30000";
    let session_with = |rule: Deny| {
        let agent = Agent::builder("a")
            .tool(act_tool())
            .policy(rule)
            .bounds(toolgate_json::JsonBounds { nodes: 50_000, ..Default::default() })
            .build()
            .unwrap();
        crate::support::runtime_builder().agent(agent).build_checked().session("a", "p", "s")
    };
    let session = session_with(Deny::new("rule", ["act"]).when_cel(walks));
    let answer = session.call("act", json!({"list": long})).await;
    assert_eq!(answer.outcome.error().unwrap().code, "policy_fault");
    let crossed = Deny::new("rule", ["act"]).when_cel("input.list.exists(x, x in input.any)");
    let session = session_with(crossed);
    let answer = session.call("act", json!({"list": (0..2_000).collect::<Vec<_>>(), "any": (10_000..40_000).collect::<Vec<_>>()})).await;
    assert_eq!(answer.outcome.error().unwrap().code, "policy_fault");
    let nested = Deny::new("rule", ["act"]).when_cel("input.any in input.map.lists");
    let session = session_with(nested);
    let lists: Vec<Vec<i64>> =
        (0..100).map(|n| (0..100).map(|m| if m == 99 { n } else { m }).collect()).collect();
    let answer = session
        .call("act", json!({"any": (1..101).collect::<Vec<_>>(), "map": {"lists": lists}}))
        .await;
    assert_eq!(
        answer.outcome.error().map_or("ok", |e| &e.code),
        "ok",
        "the lists are within the bounds"
    );
    // Ordinary lists are within the bounds. Objects of different sizes are not compared by member.
    let lines: Vec<Value> = (0..3_000).map(|n| json!({"amount": n, "to": "x"})).collect();
    let sums = Deny::new("rule", ["act"])
        .when_cel("sum_of(input.lines.map(l, l.amount)) > 500 && size(input.lines.filter(l, l.amount > 100)) == 2899");
    let session = session_with(sums);
    assert_eq!(
        session.call("act", json!({"lines": lines})).await.outcome.error().unwrap().code,
        "rule"
    );
    let objects = Deny::new("rule", ["act"]).when_cel("input.map in input.any");
    let session = session_with(objects);
    let large: serde_json::Map<String, Value> =
        (0..10_000).map(|n| (format!("k{n}"), json!(n))).collect();
    let answer = session.call("act", json!({"map": large, "any": vec![json!({}); 10_000]})).await;
    assert_eq!(answer.outcome.error().map_or("ok", |e| &e.code), "ok");
    let walking = Deny::new("rule", ["act"])
        .when_cel("input.list.exists(i, i > 100 && came_from(input.any, \"untrusted\"))");
    let session = session_with(walking);
    let answer = session
        .call("act", json!({"list": vec![101; 5_000], "any": vec![Value::Null; 40_000]}))
        .await;
    assert_eq!(answer.outcome.error().unwrap().code, "policy_fault");
    let keyed = Deny::new("rule", ["act"]).when_cel("input.map[input.pin] == 1");
    let session = session_with(keyed);
    let answer = session.call("act", json!({"pin": "hunter2", "map": {}})).await;
    assert!(!serde_json::to_string(&answer.outcome).unwrap().contains("hunter2"), "{answer:?}");
    // The message of a fault does not contain the value.
    let pin = Deny::new("rule", ["act"]).when_cel("decimal(input.pin) > 5");
    let session = session_with(pin);
    let answer = session.call("act", json!({"pin": "hunter2"})).await;
    assert_eq!(answer.outcome.error().unwrap().code, "policy_fault");
    assert!(!serde_json::to_string(&answer.outcome).unwrap().contains("hunter2"));
}

#[test]
fn oversized_expression_is_refused_before_parsing() {
    let problems = |expression: &str| {
        let built = Agent::builder("a")
            .tool(act_tool())
            .policy(Deny::new("rule", ["act"]).when_cel(expression))
            .build();
        built
            .err()
            .map(|e| e.problems.into_iter().map(|p| p.message).collect::<Vec<_>>().join("; "))
            .unwrap_or_default()
    };
    for (expression, expected) in [
        ("(".repeat(100_000), "bytes, the maximum is 2000"),
        ("(".repeat(1_900), "nested more than 32 deep"),
        ("[".repeat(500), "nested more than 32 deep"),
        ("!".repeat(1_900) + "true", "nested more than 32 deep"),
        ("- ".repeat(900) + "1 > 0", "more than 200 operators"),
        ("true ? ".repeat(200), "nested more than 32 deep"),
        (format!("1{} > 0", "+1".repeat(900)), "more than 200 operators"),
        (format!("input{} == 1", ".a".repeat(900)), "more than 200 operators"),
        // Expressions at the bounds are accepted.
        (format!("input.n{} > 0", "+1".repeat(198)), ""),
        (format!("input.any{} == 1", ".a".repeat(198)), ""),
        (format!("input.flag{}", " && input.flag".repeat(90)), ""),
        (format!("{}input.n > 0{}", "(".repeat(32), ")".repeat(32)), ""),
        (format!("{}input.flag", "!".repeat(32)), ""),
        (format!("{}input.n > 1", "- ".repeat(190)), ""),
        ("input.flag ? true : ".repeat(30) + "false", ""),
        (
            format!("input.list.all(a, {}true{})", "input.list.all(b, ".repeat(25), ")".repeat(25)),
            "",
        ),
        ("input.text == \"((((((((((((((((((((((((((((((((((((((((((\"".to_owned(), ""),
    ] {
        let messages = problems(&expression);
        assert!(
            if expected.is_empty() { messages.is_empty() } else { messages.contains(expected) },
            "{} …: {messages}",
            expression.chars().take(20).collect::<String>()
        );
    }
}

#[tokio::test]
async fn ask_rule_reads_counter_of_limit() {
    let daily =
        Limit::sum("daily", ["act"], "/n", 500.into()).per(LimitOwner::Entity("/text".into()));
    let soft =
        Deny::ask("soft", ["act"]).when_cel("sum_of(\"daily\") + input.n > 300").reading(&daily);
    let agent = Agent::builder("a").tool(act_tool()).policy(daily).policy(soft).build().unwrap();
    let session =
        crate::support::runtime_builder().agent(agent).build_checked().session("a", "p", "s");
    for (n, text, expected) in [
        (200, "x", "ok"),
        (100, "x", "ok"),
        (1, "x", "approval_required"),
        (300, "y", "ok"),
        (501, "z", "approval_required"),
    ] {
        let answer = session.call("act", json!({"n": n, "text": text})).await;
        assert_eq!(answer.outcome.error().map_or("ok", |e| &e.code), expected, "{n} {text}");
    }
}

#[tokio::test]
async fn require_expression_reads_evidence() {
    let check = Tool::dynamic(
        "check",
        "Checks.",
        json!({"type": "object", "properties": {"who": {"type": "string"}, "risk": {"type": "number"}}}),
        |_, args: Value| async move {
            Ok(json!({"report": {"risk": args["risk"], "who": args["who"]}}))
        },
    );
    let check = check.effect(Effect::Read).entity("who", "/who").proves("/report");
    let rule = Require::new("low_risk", ["act"], ["check"])
        .same("who", "/text")
        .when_cel("result.report.risk <= input.n")
        .code("risky");
    let agent = Agent::builder("a")
        .tool(check)
        .tool(act_tool())
        .policy(rule)
        .build()
        .unwrap_or_else(|e| panic!("{}", e.render(false)));
    let session =
        crate::support::runtime_builder().agent(agent).build_checked().session("a", "p", "s");
    let code = async |tool: &str, args: Value| {
        session
            .call(tool, args)
            .await
            .outcome
            .error()
            .map_or_else(|| "ok".to_owned(), |e| e.code.to_string())
    };
    assert_eq!(code("act", json!({"text": "bob", "n": 5})).await, "risky");
    assert_eq!(code("check", json!({"who": "bob", "risk": 5.5})).await, "ok");
    assert_eq!(code("act", json!({"text": "bob", "n": 5})).await, "risky");
    assert_eq!(code("act", json!({"text": "bob", "n": 5.5})).await, "ok");
    assert_eq!(code("act", json!({"text": "bob"})).await, "policy_fault");
}
