//! Tests that hostile input gets an error within bounds of time and memory.

use std::time::{Duration, Instant};

use proptest::prelude::*;
use serde_json::{Value, json};
use toolgate::{Agent, Effect, Tool};
use toolgate_json::{JsonBounds, parse, to_canonical_bytes};

use crate::support::TestWorld;

async fn refusal_code(
    world: &TestWorld,
    tool: &str,
    arguments: impl Into<toolgate::Arguments>,
) -> String {
    let start = Instant::now();
    let answer = world.session.call(tool, arguments).await;
    // A generous bound, because this test is not a benchmark.
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    assert_eq!(world.run_count(), 0);
    let error = answer.outcome.error().unwrap_or_else(|| panic!("{answer:?}"));
    assert!(error.message.len() < 2_000, "{} bytes of message", error.message.len());
    error.code.to_string()
}

#[tokio::test]
async fn oversized_and_malformed_arguments_are_refused() {
    let world = TestWorld::new(|agent| agent);
    let deep = |open: &str, n: usize| format!(r#"{{"how": {}"#, open.repeat(n));
    let mut nested = json!("x");
    for _ in 0..100_000 {
        nested = Value::Array(vec![nested]);
    }
    let cases: Vec<(&str, toolgate::Arguments, &str)> = vec![
        ("a nesting bomb", "[".repeat(5_000_000).into(), "payload_too_large"),
        ("a nesting bomb in an argument", deep("[", 100_000).into(), "payload_too_large"),
        ("objects in objects", deep(r#"{"a":"#, 100_000).into(), "payload_too_large"),
        (
            "a nested value in memory",
            Value::Object([("how".to_owned(), nested)].into_iter().collect()).into(),
            "payload_too_large",
        ),
        (
            "fifty megabytes of text",
            format!(r#"{{"how": "{}"}}"#, "x".repeat(50 << 20)).into(),
            "payload_too_large",
        ),
        (
            "fifty megabytes in memory",
            json!({"how": "x".repeat(50 << 20)}).into(),
            "payload_too_large",
        ),
        (
            "two hundred thousand values",
            format!(r#"{{"how": [{}0]}}"#, "0,".repeat(200_000)).into(),
            "payload_too_large",
        ),
        ("duplicate keys", r#"{"how": "ok", "how": "ok"}"#.into(), "invalid_arguments"),
        (
            "duplicate keys by escape",
            r#"{"how": "ok", "h\u006fw": "fail"}"#.into(),
            "invalid_arguments",
        ),
        ("duplicate keys inside", r#"{"how": {"a": 1, "a": 2}}"#.into(), "invalid_arguments"),
        ("NaN", r#"{"how": "ok", "n": NaN}"#.into(), "invalid_arguments"),
        ("nan in capitals", r#"{"how": "ok", "n": nan}"#.into(), "invalid_arguments"),
        ("Infinity", r#"{"how": "ok", "n": -Infinity}"#.into(), "invalid_arguments"),
        ("hexadecimal", r#"{"how": "ok", "n": 0x10}"#.into(), "invalid_arguments"),
        ("a leading zero", r#"{"how": "ok", "n": 010}"#.into(), "invalid_arguments"),
        ("a leading plus", r#"{"how": "ok", "n": +1}"#.into(), "invalid_arguments"),
        ("1e400", r#"{"how": "ok", "n": 1e400}"#.into(), "invalid_arguments"),
        ("1e-400", r#"{"how": "ok", "n": 1e-400}"#.into(), "invalid_arguments"),
        (
            "an exponent of many digits",
            format!(r#"{{"how": "ok", "n": 1e{}}}"#, "9".repeat(100_000)).into(),
            "invalid_arguments",
        ),
        (
            "a number of many digits",
            format!(r#"{{"how": "ok", "n": {}}}"#, "9".repeat(100_000)).into(),
            "invalid_arguments",
        ),
        ("a fraction for an integer", r#"{"how": "ok", "n": 1.5}"#.into(), "invalid_arguments"),
        ("invalid UTF-8", b"{\"how\": \"\xff\xfe\"}".to_vec().into(), "invalid_arguments"),
        ("overlong UTF-8", b"{\"how\": \"\xc0\xaf\"}".to_vec().into(), "invalid_arguments"),
        ("a lone surrogate", r#"{"how": "\ud800"}"#.into(), "invalid_arguments"),
        ("a reversed pair", r#"{"how": "\udc00\ud800"}"#.into(), "invalid_arguments"),
        ("a cut-off escape", r#"{"how": "\u12"#.into(), "invalid_arguments"),
        ("a control character", "{\"how\": \"a\u{1}b\"}".into(), "invalid_arguments"),
        ("a trailing comma", r#"{"how": "ok",}"#.into(), "invalid_arguments"),
        ("a comment", r#"{"how": "ok" /* fine */}"#.into(), "invalid_arguments"),
        ("two documents", r#"{"how": "ok"}{"how": "ok"}"#.into(), "invalid_arguments"),
        ("an array", "[]".into(), "invalid_arguments"),
        ("a bare word", "ok".into(), "invalid_arguments"),
        ("a byte order mark", "\u{feff}{\"how\": \"ok\"}".into(), "invalid_arguments"),
        (
            "serde's own magic number",
            r#"{"how": "ok", "n": {"$serde_json::private::Number": "1"}}"#.into(),
            "invalid_arguments",
        ),
    ];
    for (name, arguments, code) in cases {
        assert_eq!(refusal_code(&world, "act", arguments).await, code, "{name}");
    }
    let rows = world.rows().await.0.len();
    assert_eq!(rows, 34, "one row each");
}

#[tokio::test]
async fn large_integers_are_exact() {
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer"}, "x": {"type": "number"}}});
    let echo = Tool::dynamic("echo", "Echoes.", schema, |_, args| async move { Ok(args) })
        .effect(Effect::Read);
    let world = TestWorld::new(|agent| agent.tool(echo));
    for (sent, expected) in [
        (r#"{"n": 9007199254740993}"#, r#"{"n":9007199254740993}"#),
        (r#"{"n": 18446744073709551617}"#, r#"{"n":18446744073709551617}"#),
        (r#"{"n": 1.0}"#, r#"{"n":1}"#),
        (r#"{"n": 1e3}"#, r#"{"n":1000}"#),
        (
            r#"{"x": 0.1000000000000000055511151231257827}"#,
            r#"{"x":0.1000000000000000055511151231257827}"#,
        ),
        (r#"{"x": -0.0}"#, r#"{"x":0}"#),
    ] {
        let answer = world.session.call("echo", sent).await;
        assert_eq!(
            answer.outcome.success().map(|o| o.value.to_string()).as_deref(),
            Some(expected),
            "{sent}: {answer:?}"
        );
    }
}

#[tokio::test]
async fn confusable_tool_names_are_escaped_in_errors() {
    let world = TestWorld::new(|agent| agent);
    for name in
        ["\u{430}ct", "act\u{200b}", "ACT", "act\0", "\u{202e}tca", "", &"a".repeat(10_000_000)]
    {
        let answer = world.session.call(name, json!({"how": "ok"})).await;
        let error = answer.outcome.error().unwrap();
        assert_eq!(error.code, "unknown_tool");
        assert!(error.message.is_ascii() || error.message.contains('…'), "{}", error.message);
        assert!(error.message.len() < 500 && world.run_count() == 0);
    }
    assert!(world.rows().await.0.iter().all(|row| row.tool.len() < 500));
}

#[tokio::test]
async fn argument_names_are_escaped_in_errors() {
    let schema = json!({"type": "object", "properties": {"n": {"type": "object", "additionalProperties": {"type": "integer"}}}});
    let tool = Tool::dynamic("count", "Counts.", schema, |_, args| async move { Ok(args) })
        .effect(Effect::Read);
    let world = TestWorld::new(|agent| agent.tool(tool));
    for name in ["\u{430}", "n\u{200b}", "\u{202e}x", "a\u{1b}[2J", &"n".repeat(300_000)] {
        for arguments in
            [json!({name: 1}), json!({"n": {name: "text"}}), json!({"n": {name: {name: 1}}})]
        {
            let answer = world.session.call("count", arguments).await;
            let error = serde_json::to_string(answer.outcome.error().unwrap()).unwrap();
            assert!(error.len() < 3_000, "{} bytes", error.len());
            let plain = error.chars().all(|c| c.is_ascii_graphic() || c == ' ' || c == '…');
            assert!(plain, "{error}");
        }
    }
}

#[tokio::test]
async fn catastrophic_regex_patterns_terminate() {
    let schema = |pattern: &str| json!({"type": "object", "properties": {"text": {"type": "string", "pattern": pattern}}, "required": ["text"]});
    let tool = |name: &str, pattern: &str| {
        Tool::dynamic(name, "Matches.", schema(pattern), |_, args| async move { Ok(args) })
            .effect(Effect::Read)
    };
    let world = TestWorld::new(|agent| {
        agent
            .tool(tool("linear", "^(a+)+$"))
            .tool(tool("backtracking", r"^(?=(a+)+$)(a+)+\1$"))
            .tool(tool("nested", "^((a|aa)+)+(?!b)$"))
    });
    let text = "a".repeat(50_000) + "!";
    for name in ["linear", "backtracking", "nested"] {
        assert_eq!(refusal_code(&world, name, json!({ "text": text })).await, "invalid_arguments");
    }
    // A pattern that would take the memory of the machine is refused when the agent is built.
    let huge = Agent::builder("x").tool(tool("huge", "^((a{1,1000}){1,1000}){1,1000}$")).build();
    assert!(huge.unwrap_err().to_string().contains("input schema of `huge`"));
}

#[test]
fn remote_schema_references_are_refused() {
    for reference in ["https://example.com/schema.json", "file:///etc/passwd", "other.json"] {
        let tool =
            Tool::dynamic("remote", "Remote.", json!({"$ref": reference}), |_, args| async move {
                Ok(args)
            })
            .effect(Effect::Read);
        assert!(Agent::builder("x").tool(tool).build().is_err(), "{reference}");
    }
}

fn any_json() -> impl Strategy<Value = Value> {
    let number = prop_oneof![
        any::<i64>().prop_map(|n| json!(n)),
        any::<f64>().prop_filter("finite", |f| f.is_finite()).prop_map(|f| json!(f))
    ];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::Bool),
        number,
        any::<String>().prop_map(Value::String)
    ];
    leaf.prop_recursive(6, 64, 8, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::Array),
            prop::collection::btree_map(any::<String>(), inner, 0..6)
                .prop_map(|m| m.into_iter().collect())
        ]
    })
}

proptest! {
    #[test]
    fn strict_parser_accepts_serialized_json(value in any_json()) {
        let text = serde_json::to_string(&value).unwrap();
        let strict = parse(text.as_bytes(), &JsonBounds::default());
        if let Err(error) = &strict {
            prop_assert!(error.message.contains("the number"), "only numbers out of range are refused: {error}");
        }
        if let Ok(read) = strict {
            // Numbers out of range are refused. All other values keep their meaning and have one
            // canonical form.
            let again = parse(&to_canonical_bytes(&read), &JsonBounds::default()).unwrap();
            prop_assert_eq!(&again, &read);
            prop_assert_eq!(to_canonical_bytes(&again), to_canonical_bytes(&read));
            let same = |a: &Value, b: &Value| a == b || (a.as_f64().is_some() && a.as_f64() == b.as_f64());
            prop_assert!(is_alike(&read, &value, &same), "{} {}", read, value);
        }
    }

    #[test]
    fn strict_parser_accepts_no_invalid_json(text in r#"[\[\]{}:,"\\0-9eE+.a-f u-]{0,24}|\PC{0,24}"#) {
        let strict = parse(text.as_bytes(), &JsonBounds::default());
        if strict.is_ok() {
            prop_assert!(serde_json::from_str::<Value>(&text).is_ok(), "{}", text);
        }
    }

    #[test]
    fn any_bytes_are_parsed_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        let _ = parse(&bytes, &JsonBounds::default());
    }
}

fn is_alike(a: &Value, b: &Value, same: &dyn Fn(&Value, &Value) -> bool) -> bool {
    match (a, b) {
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| is_alike(a, b, same))
        }
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len()
                && a.iter().all(|(k, a)| b.get(k).is_some_and(|b| is_alike(a, b, same)))
        }
        _ => same(a, b),
    }
}

/// Checks a recursive filter schema with an error at the deepest level.
#[tokio::test]
async fn deep_error_in_recursive_schema_is_found_quickly() {
    let node = |kind: &str| json!({"type": "object", "properties": {"kind": {"const": kind}, "left": {"$ref": "#/$defs/f"}, "right": {"$ref": "#/$defs/f"}}, "required": ["kind"]});
    let schema = json!({
        "type": "object", "properties": {"filter": {"$ref": "#/$defs/f"}}, "required": ["filter"],
        "$defs": {"f": {"oneOf": [node("and"), node("or"), node("not"), node("xor"), {"type": "string"}]}},
    });
    let world = TestWorld::new(|a| {
        a.tool(
            Tool::dynamic("find", "Finds.", schema.clone(), |_, _| async { Ok(Value::Null) })
                .effect(Effect::Read),
        )
        .tool(
            Tool::dynamic("drop", "Finds.", schema, |_, _| async { Ok(Value::Null) })
                .effect(Effect::Read)
                .extra(toolgate::ExtraArguments::Drop),
        )
    });
    let mut filter = json!(7);
    for _ in 0..16 {
        filter = json!({"kind": "and", "left": filter, "right": "x"});
    }
    for tool in ["find", "drop"] {
        assert_eq!(
            refusal_code(&world, tool, json!({ "filter": filter })).await,
            "invalid_arguments"
        );
    }
    assert_eq!(
        refusal_code(&world, "find", json!({"filter": {"kind": "nand"}})).await,
        "invalid_arguments"
    );
    let answer = world
        .session
        .call("find", json!({"filter": {"kind": "and", "left": {"kind": "not", "left": "x"}}}))
        .await;
    assert!(answer.outcome.success().is_some(), "{answer:?}");
}

/// Runs the tests of this module again in a process with at most 1 GiB of memory.
#[test]
fn hostile_input_uses_bounded_memory() {
    if std::env::var_os("TOOLGATE_BOUNDED").is_some() {
        return;
    }
    let tests = std::env::current_exe().unwrap();
    let script = "ulimit -v 1048576; exec \"$0\" hostile_input:: --test-threads=1";
    let output = std::process::Command::new("/bin/sh")
        .arg("-c")
        .arg(script)
        .arg(tests)
        .env("TOOLGATE_BOUNDED", "1")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    assert!(
        String::from_utf8_lossy(&output.stdout)
            .contains("oversized_and_malformed_arguments_are_refused ... ok")
    );
}
