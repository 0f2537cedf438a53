//! Tests which text the redaction patterns remove from rows.

use serde_json::json;
use toolgate::{Agent, Effect, Replay, ReplayComparison, Tool};

use crate::support::BuildWithReplayCheck;

/// Checks a pattern that matches timestamps and names: text of callers is redacted, and values of
/// toolgate stay.
#[tokio::test]
async fn patterns_keep_values_written_by_toolgate() {
    let schema = || json!({"type": "object", "properties": {"card": {"type": "string"}}});
    let pay =
        Tool::dynamic("pay", "Pays.", schema(), |_, _| async { Ok(json!({"said": "paid 4111"})) })
            .effect(Effect::Write)
            .entity("card", "/card");
    let look = Tool::dynamic("look", "Looks.", schema(), |_, _| async { Ok(json!({})) });
    let look = look.effect(Effect::Read).entity("card", "/card");
    let rule = toolgate::policy::Require::new("looked", ["pay"], ["look"]).same("card", "/card");
    let agent = Agent::builder("a").tool(pay).tool(look).policy(rule).build().unwrap();
    let clock = std::sync::Arc::new(toolgate::ManualClock::at(
        "2026-04-11T10:41:11.411141114Z".parse().unwrap(),
    ));
    let gate = crate::support::runtime_builder_at(clock)
        .redact_pattern("[0-9]+")
        .unwrap()
        .agent(agent)
        .build_checked();
    let s = gate.session("a", "alice", "s");
    let key = toolgate::SessionKey::new("unknown_agent", "alice", "s");
    gate.call(
        toolgate::Call::new(key, "pay", toolgate::Arguments::Value(json!({})))
            .with_parse_error("4111 is not an object"),
    )
    .await;
    for (tool, expected) in [
        ("pay", "prerequisite_missing"),
        ("look", "ok"),
        ("pay", "ok"),
        ("pay4111", "unknown_tool"),
    ] {
        let answer = s.call(tool, json!({"card": "4111"})).await;
        assert_eq!(answer.outcome.error().map_or("ok", |error| &error.code), expected);
    }
    let mut rows = gate.session("unknown_agent", "alice", "s").rows().await.unwrap();
    rows.extend(s.rows().await.unwrap());
    assert_eq!(rows.len(), 5);
    for row in &rows {
        assert_eq!(row.facts.now, row.at, "{row:?}");
        assert!(
            !serde_json::to_string(&(
                &row.tool,
                &row.arguments,
                &row.entities,
                &row.outcome.success()
            ))
            .unwrap()
            .contains("4111")
        );
        if let Some(error) = row.outcome.error() {
            assert!(
                error.call_id == Some(row.call)
                    && error.message != "[redacted]"
                    && !error.message.contains("4111"),
                "{error:?}"
            );
        }
    }
    assert!(
        rows[0].facts.misread
            && rows[0]
                .facts
                .turned_away
                .as_deref()
                .is_some_and(|why| why.ends_with("] is not an object"))
    );
    let [(_, None), ..] = rows[1].facts.evidence.as_slice() else { panic!("{:?}", rows[1].facts) };
    let [(known, Some(proof)), ..] = rows[3].facts.evidence.as_slice() else {
        panic!("{:?}", rows[3].facts)
    };
    assert_eq!(proof.at, rows[2].at);
    assert!(!format!("{known:?}{:?}", proof.entities).contains("4111"));
}

/// Checks that each pattern sees the original text.
///
/// An empty match removes nothing, and marks are not redacted.
#[tokio::test]
async fn overlapping_patterns_each_see_original_text() {
    let properties = json!({"text": {"type": "string"}, "n": {"type": "integer"}, "pin": {"type": "string", "writeOnly": true}});
    let say = Tool::dynamic(
        "say",
        "Says.",
        json!({"type": "object", "properties": properties}),
        |_, _| async { Ok(json!({})) },
    );
    let agent = Agent::builder("a").tool(say.effect(Effect::Read)).build().unwrap();
    let mut gate = crate::support::runtime_builder().agent(agent);
    for pattern in [r"\d{4}", "sk-[0-9a-z-]{10,}", "[0-9a-f]{32}", "q*"] {
        gate = gate.redact_pattern(pattern).unwrap();
    }
    let s = gate.build_checked().session("a", "alice", "s");
    for args in [
        json!({"text": "4111"}),
        json!({"text": "key sk-abcd-4111-efgh, then 4111"}),
        json!({"pin": "1234", "n": 7}),
        json!({"pin": "1234", "n": 8}),
    ] {
        assert!(s.call("say", args).await.outcome.error().is_none());
    }
    let rows = s.rows().await.unwrap();
    let argument = |row: usize, name: &str| rows[row].arguments[name].as_str().unwrap().to_owned();
    let is_mark = |text: &str| {
        text.len() == 43 && text.starts_with("[redacted ") && text.matches('[').count() == 1
    };
    let card = argument(0, "text");
    assert!(is_mark(&card), "{card}");
    let text = argument(1, "text");
    let key = text
        .strip_prefix("key ")
        .and_then(|text| text.strip_suffix(&format!(", then {card}")))
        .unwrap();
    assert!(is_mark(key), "{text}");
    let pin = argument(2, "pin");
    assert!(is_mark(&pin) && pin == argument(3, "pin"), "{pin}");
    assert_eq!(rows[2].arguments["n"], 7);
}

/// Checks evidence keys, counters and errors, which contain JSON-escaped values.
#[tokio::test]
async fn patterns_match_json_escaped_text() {
    let schema = |user: serde_json::Value| json!({"type": "object", "properties": {"user": user}});
    let tool = |name: &str, user| {
        Tool::dynamic(name, "T.", schema(user), |_, _| async { Ok(json!({})) })
            .entity("user", "/user")
    };
    let text = || json!({"type": "string"});
    let agent = Agent::builder("a")
        .tool(tool("look", text()).effect(Effect::Read))
        .tool(tool("pay", text()).effect(Effect::Write))
        .tool(tool("pick", json!({"enum": ["a"]})).effect(Effect::Read))
        .policy(toolgate::policy::Require::new("looked", ["pay"], ["look"]).same("user", "/user"))
        .policy(
            toolgate::policy::Limit::calls("few", ["pay"], 9)
                .per(toolgate::policy::LimitOwner::Entity("/user".into())),
        )
        .build()
        .unwrap();
    let s = crate::support::runtime_builder()
        .redact_pattern(r"CORP\\\w+")
        .unwrap()
        .agent(agent)
        .build_checked()
        .session("a", "alice", "s");
    for (tool, expected) in [
        ("pay", "prerequisite_missing"),
        ("look", "ok"),
        ("pay", "ok"),
        ("pick", "invalid_arguments"),
    ] {
        let answer = s.call(tool, json!({"user": r"CORP\mallory"})).await;
        assert_eq!(answer.outcome.error().map_or("ok", |error| &error.code), expected);
    }
    let rows = s.rows().await.unwrap();
    for row in &rows {
        let row = serde_json::to_string(row).unwrap();
        assert!(!row.contains("mallory") && row.contains("[redacted "), "{row}");
    }
    // A secret has the same mark in every spelling.
    let mark = rows[2].arguments["user"].as_str().unwrap();
    assert_eq!(
        rows[2].facts.evidence[0].0.entity.as_ref().map(|(_, value)| &**value),
        Some(format!("\"{mark}\"").as_str())
    );
    assert!(rows[2].facts.claimed[0].0.contains(mark), "{:?}", rows[2].facts);
}

/// Checks that error codes and file digests are not redacted, even if a pattern matches them.
#[tokio::test]
async fn patterns_change_no_replayed_decision() {
    let tool = |name: &str| {
        Tool::dynamic(name, "T.", json!({"type": "object"}), |_, _| async { Ok(json!({})) })
    };
    let agent = |extra_tool: &str| {
        let rule = toolgate::policy::Require::new("looked", ["pay"], ["look"]).code("step-1");
        Agent::builder("a")
            .tool(tool("look").effect(Effect::Read))
            .tool(tool("pay").effect(Effect::Write))
            .tool(tool(extra_tool).effect(Effect::Read))
            .tools(toolgate::builtin::files())
            .files(toolgate::MemoryFs::new([("a.txt", "x")]))
            .policy(rule)
            .policy(toolgate::policy::ReadBeforeWrite::default())
            .build()
            .unwrap()
    };
    let gate = crate::support::runtime_builder()
        .redact_pattern("[0-9]+")
        .unwrap()
        .redact_pattern("[0-9a-f]{9,}")
        .unwrap()
        .agent(agent("other"))
        .build()
        .unwrap();
    let s = gate.session("a", "alice", "s");
    for (tool, args, expected) in [
        ("pay", json!({}), "step-1"),
        ("read_file", json!({"path": "a.txt"}), "ok"),
        ("write_file", json!({"path": "a.txt", "content": "y"}), "ok"),
        ("tool-4111", json!({}), "unknown_tool"),
    ] {
        let answer = s.call(tool, args).await;
        assert_eq!(answer.outcome.error().map_or("ok", |error| &error.code), expected, "{tool}");
    }
    let rows = s.rows().await.unwrap();
    assert_eq!(rows[0].code(), Some("step-1"));
    let replay = Replay::from_toolgate(&gate).unwrap();
    for row in &rows {
        assert_eq!(replay.decide(row).await, ReplayComparison::Same, "{row:?}");
    }
    // A new tool can be the tool with the redacted name, so the replay is undecidable.
    let replay_with_new_tool = Replay::new([agent("tool-4111")]).unwrap();
    let comparison = replay_with_new_tool.decide(&rows[3]).await;
    assert!(
        matches!(&comparison, ReplayComparison::Undecidable(why) if why.contains("name is redacted")),
        "{comparison:?}"
    );
    assert_eq!(
        Replay::new([agent("tool-")]).unwrap().decide(&rows[3]).await,
        ReplayComparison::Same
    );
    // A redacted mark makes the replay undecidable.
    let mut row = (*rows[2]).clone();
    let mark = row.facts.marks.values_mut().next().unwrap();
    *mark = Some(json!("[redacted 0123]"));
    assert!(matches!(replay.decide(&row).await, ReplayComparison::Undecidable(_)));
}

/// Checks that truncation does not split a secret, because patterns do not match one half.
#[tokio::test]
async fn truncation_does_not_split_secret() {
    let long = || format!("{}4111-1111-1111-1111{}", "x".repeat(4090), "y".repeat(100_000));
    let tell = Tool::dynamic("tell", "Tells.", json!({"type": "object"}), move |_, _| async move {
        Ok(json!(long()))
    });
    let agent = Agent::builder("a")
        .tool(tell.effect(Effect::Read))
        .tool(toolgate::builtin::read_output())
        .build()
        .unwrap();
    let s = crate::support::runtime_builder()
        .redact_pattern(r"\d{4}(-\d{4}){3}")
        .unwrap()
        .agent(agent)
        .build_checked()
        .session("a", "alice", "s");
    let answer = s.call("tell", json!({})).await;
    let row = s.rows().await.unwrap().remove(0);
    assert_eq!(row.outcome.success().unwrap().value, json!("x".repeat(4090)));
    // The next page starts at the truncation.
    let handle =
        answer.outcome.success().and_then(|output| output.stored.as_ref()).unwrap().handle.clone();
    let page = s.call("read_output", json!({"handle": handle, "offset": 4090})).await;
    let text = page.outcome.success().unwrap().value["text"].as_str().unwrap().to_owned();
    assert!(text.starts_with("4111-1111-1111-1111yyy"), "{text}");
    assert!(!serde_json::to_string(&s.rows().await.unwrap()).unwrap().contains("4111"));
}
