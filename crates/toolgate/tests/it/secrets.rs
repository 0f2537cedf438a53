//! Tests that secret arguments do not appear in errors, signals and rows.

use serde_json::{Value, json};
use toolgate::{Effect, Failure, PromptSignal, Tool};

use crate::support::TestWorld;

#[tokio::test]
async fn secret_is_absent_from_errors_and_rows() {
    let login = |name: &str| {
        let schema = json!({"type": "object", "properties": {
            "user": {"type": "string"},
            "password": {"type": "string", "writeOnly": true, "minLength": 8},
            "pins": {"type": "array", "items": {"type": "object", "properties": {"pin": {"type": "integer", "writeOnly": true, "maximum": 999_999_999_999_u64}}}},
        }, "required": ["user", "password"]});
        Tool::dynamic(name, "Logs in.", schema, |_, _| async move {
            Ok(json!({"token": "hunter2-token", "ok": true}))
        })
        .effect(Effect::Read)
        .secret("/token")
    };
    let world = TestWorld::new(|a| a.tool(login("login")));
    let mut output = String::new();
    for args in [
        json!({"user": "al", "password": "hunter2"}),
        json!({"user": "al", "password": 771_177_117_711_u64}),
        json!({"user": "al", "pasword": "hunter2-long"}),
        json!({"user": "al", "password": "hunter2-long", "pins": [{"pin": 7_711_771_177_117_u64}]}),
        json!({"user": "al", "password": "hunter2-long", "pins": [{"pin": "hunter2"}]}),
        json!({"user": "al", "password": "hunter2-long", "pins": [{"pin": 771_177_117_711_u64}]}),
    ] {
        output.push_str(&serde_json::to_string(&world.session.call("login", args).await).unwrap());
    }
    for row in world.session.rows().await.unwrap() {
        output.push_str(&serde_json::to_string(&*row).unwrap());
    }
    // The secrets are long enough not to occur in a digest by chance.
    assert!(!output.contains("hunter2") && !output.contains("771177117711"), "{output}");
    assert!(output.contains("(hidden)") && output.contains("[redacted "));
    // A secret has the same mark in each row, so that rows can be matched.
    world.session.call("login", json!({"user": "bo", "password": "hunter2-long"})).await;
    world.session.call("login", json!({"user": "bo", "password": "hunter2-other"})).await;
    let rows = world.session.rows().await.unwrap();
    assert_eq!(rows[5].arguments["password"], rows[6].arguments["password"]);
    assert_ne!(rows[5].arguments["password"], rows[7].arguments["password"]);
    assert_eq!(rows[6].arguments["user"], json!("bo"));
}

#[tokio::test]
async fn secret_member_names_are_redacted() {
    let schema = json!({"type": "object", "properties": {
        "card": {"type": "object", "properties": {"number": {"type": "string"}}, "patternProperties": {"^x-": {"type": "string"}}},
        "open": {"type": "object", "additionalProperties": {"type": "object", "properties": {"n": {"type": "integer"}}}},
        "user": {"type": "string"},
    }});
    let pay = Tool::dynamic("pay", "Pays.", schema, |_, _| async { Ok(Value::Null) })
        .effect(Effect::Read)
        .secret("/card")
        .secret("/open");
    let world = TestWorld::new(|a| a.tool(pay));
    let mut output = String::new();
    for args in [
        json!({"card": {"hunter2": "x", "hunter22": "y"}}),
        json!({"card": {"x-hunter2": 5}}),
        json!({"card": {"number": 5}}),
        json!({"open": {"hunter2": {"n": "x"}}}),
        json!({"open": {"hunter2": {"hunter2": 1}}}),
    ] {
        let answer = world.session.call("pay", args).await;
        assert_eq!(answer.outcome.error().unwrap().code, "invalid_arguments");
        output.push_str(&serde_json::to_string(&answer).unwrap());
    }
    assert!(
        output.contains("has 2 unknown member(s), not shown (it takes `number`)")
            && output.contains("`card.number` must be"),
        "{output}"
    );
    assert!(output.contains("open.(hidden).n"), "{output}");
    for text in [r#"{"card": {"hunter2": 1, "hunter2": 2}}"#, r#"{"card": {"hunter2" 1}}"#] {
        output.push_str(&serde_json::to_string(&world.session.call("pay", text).await).unwrap());
    }
    assert!(output.contains("a key is given twice"), "{output}");
    for row in world.session.rows().await.unwrap() {
        output.push_str(&serde_json::to_string(&*row).unwrap());
    }
    assert!(!output.contains("hunter2"), "{output}");
    // Names outside of the secret are shown.
    let answer = world.session.call("pay", json!({"usr": "x"})).await;
    assert!(answer.outcome.error().unwrap().message.contains("did you mean `user`?"), "{answer:?}");
}

#[tokio::test]
async fn misplaced_secret_is_redacted() {
    // Inside a condition, inside a recursive type, as text instead of an object, and in another
    // branch.
    let schema = json!({
        "type": "object",
        "properties": {
            "auth": {"type": "object", "properties": {"token": {"type": "string", "writeOnly": true}}, "required": ["token"]},
            "tree": {"$ref": "#/$defs/tree"},
            "kind": {"type": "string"},
        },
        "if": {"properties": {"kind": {"const": "key"}}, "required": ["kind"]},
        "then": {"properties": {"key": {"type": "string", "writeOnly": true}}, "required": ["key"]},
        "$defs": {"tree": {"type": "object", "properties": {"pin": {"type": "string", "writeOnly": true}, "next": {"$ref": "#/$defs/tree"}}}},
    });
    let tool = Tool::dynamic("open", "Opens.", schema, |_, _| async { Ok(Value::Null) })
        .effect(Effect::Read);
    let world = TestWorld::new(|a| a.tool(tool));
    let mut output = String::new();
    for args in [
        json!({"auth": "hunter2"}),
        json!({"auth": {"token": "hunter2"}}),
        json!({"auth": {"tokken": "hunter2"}}),
        json!({"kind": "key", "key": "hunter2"}),
        json!({"tree": {"pin": "hunter2", "next": {"pin": "hunter2", "next": {"next": {"pin": "hunter2"}}}}}),
    ] {
        output.push_str(&serde_json::to_string(&world.session.call("open", args).await).unwrap());
    }
    for row in world.session.rows().await.unwrap() {
        output.push_str(&serde_json::to_string(&*row).unwrap());
    }
    assert!(!output.contains("hunter2"), "{output}");
}

#[tokio::test]
async fn secret_in_tool_error_is_redacted() {
    let schema = json!({"type": "object", "properties": {"pin": {"type": "string"}, "code": {"type": "string", "writeOnly": true}}});
    let tool = Tool::dynamic("login", "Logs in.", schema, |_, args: Value| async move {
        let message =
            format!("wrong: {} {}", args["pin"].as_str().unwrap(), args["code"].as_str().unwrap());
        let (code, path) = (
            format!("no_{}", args["code"].as_str().unwrap()),
            args["pin"].as_str().unwrap().replace('/', "~1"),
        );
        let failure = Failure::business(code, message.clone()).field(
            format!("/pins/{path}"),
            "another",
            message.clone(),
        );
        Err::<Value, _>(failure.upstream(json!({"said": [message]})))
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
        let message = format!(
            "wrong cvv {}, wrong pin ({}); 1234 tries",
            args["cvv"],
            args["pin"].as_str().unwrap()
        );
        let upstream = json!({"said": [message], "cvv 123": 123, "of": 1234});
        Err::<Value, _>(
            Failure::business("no", message.clone())
                .field("/pin", "not 987", message)
                .upstream(upstream),
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
        let detail = format!(
            "{}{} and more",
            "x".repeat(args["before"].as_u64().unwrap() as usize),
            args["pin"].as_str().unwrap()
        );
        let failure = Failure::business("no", "no");
        Err::<Value, _>(match args["how"].as_str().unwrap() {
            "http" => Failure::http(500, &format!("{detail}{}", "y".repeat(5_000))),
            "name" => failure.upstream(json!({(detail.clone()): 1})),
            // Large enough to be serialized and truncated as one text.
            "whole" => failure.upstream(json!({"a": detail, "b": vec!["z".repeat(4_000); 8]})),
            _ => failure.upstream(json!({"said": [format!("{detail}{}", "y".repeat(5_000))]})),
        })
    });
    let world = TestWorld::new(|agent| {
        agent.tool(tool.effect(Effect::Read).retry(0, std::time::Duration::ZERO).secret("/pin"))
    });
    // Serialized text contains escapes for quotes and line breaks.
    for pin in ["SECRET-0123456789", "SECRET \"quoted\"\nover lines", "SECRET-ÄÖÜ-0123456789"] {
        for how in ["http", "list", "name", "whole"] {
            // Places before, in and after the truncation limit: 4,096 characters, or 256 for a
            // name.
            let limit = if how == "name" { 256 } else { 4_096 };
            for before in [
                limit - 30,
                limit - 20,
                limit - 15,
                limit - 8,
                limit - 7,
                limit - 6,
                limit - 1,
                limit,
                limit + 1,
            ] {
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
    assert!(!rows.contains("SE"), "a row contains a part of the secret");
}
