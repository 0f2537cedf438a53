//! Tests the behaviours that a safe tool registry must have, and every row of its failure
//! semantics.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use toolgate::{Effect, Failure, Outcome, PromptSignal, Tool, ToolContext};

use crate::support::TestWorld;

fn world_with_builtin_tools() -> TestWorld {
    TestWorld::new(|agent| {
        agent.tool(toolgate::builtin::calc()).tool(toolgate::builtin::json_query())
    })
}

async fn error_message(world: &TestWorld, tool: &str, arguments: Value) -> String {
    let answer = world.session.call(tool, arguments).await;
    answer.outcome.error().unwrap_or_else(|| panic!("{answer:?}")).message.clone()
}

#[tokio::test]
async fn unknown_tool_error_suggests_and_lists_names() {
    let world = world_with_builtin_tools();
    insta::assert_snapshot!(error_message(&world, "calculator", json!({"expression": "2+2"})).await, @"there is no tool `calculator`; did you mean `calc`? Available: `act`, `calc`, `json_query`, `look`");
    insta::assert_snapshot!(error_message(&world, "zzzz", json!({})).await, @"there is no tool `zzzz`. Available: `act`, `calc`, `json_query`, `look`");
}

#[tokio::test]
async fn argument_errors_are_reported_all_at_once() {
    let world = world_with_builtin_tools();
    insta::assert_snapshot!(error_message(&world, "calc", json!({})).await, @"`calc` requires `expression` (string), which is missing");
    insta::assert_snapshot!(error_message(&world, "calc", json!({"expr": "1"})).await, @"`calc` requires `expression` (string); got `expr`, did you mean `expression`?");
    insta::assert_snapshot!(error_message(&world, "calc", json!({"expression": 42})).await, @"calc: `expression` must be a string; got 42");
    insta::assert_snapshot!(error_message(&world, "json_query", json!({"dta": "{}", "pth": 1, "loud": true})).await, @"`json_query` requires `data` (string); got `dta`, did you mean `data`? `json_query` requires `path` (string); got `pth`, did you mean `path`? `json_query` has no `loud` (it takes `data`, `path`)");
}

#[tokio::test]
async fn third_and_later_identical_calls_are_loops() {
    let world = world_with_builtin_tools();
    for turn in 1..=4 {
        let answer = world.session.call("calc", json!({"expression": "1+1"})).await;
        match turn {
            1 | 2 => {
                assert_eq!(answer.outcome.success().map(|o| &o.value), Some(&json!({"result": 2})))
            }
            _ => assert!(
                answer
                    .outcome
                    .error()
                    .unwrap()
                    .message
                    .starts_with("tool-call loop: `calc` was called with identical arguments")
            ),
        }
    }
    // Another spelling of the same arguments is the same call; other arguments are progress.
    let again = world.session.call("calc", "{ \"expression\" : \"1+1\" }").await;
    assert_eq!(again.outcome.error().unwrap().code, "loop_detected");
    assert!(
        world
            .session
            .call("calc", json!({"expression": "1 + 1"}))
            .await
            .outcome
            .success()
            .is_some()
    );
    assert!(
        world.session.call("calc", json!({"expression": "1+1"})).await.outcome.success().is_some()
    );
}

#[tokio::test]
async fn valid_call_returns_result() {
    let answer =
        world_with_builtin_tools().session.call("calc", json!({"expression": "2+2"})).await;
    assert_eq!(answer.outcome.success().map(|o| o.for_model()).as_deref(), Some(r#"{"result":4}"#));
}

#[tokio::test]
async fn json_query_returns_value_or_known_names() {
    let world = world_with_builtin_tools();
    let query = |path: &str| json!({"data": r#"{"user": {"email": "a@b.c"}, "items": [{"name": "pen"}]}"#, "path": path});
    let found = world.session.call("json_query", query("items.0.name")).await;
    assert_eq!(
        found.outcome.success().map(|o| &o.value),
        Some(&json!({"found": true, "value": "pen"}))
    );
    let missing = world.session.call("json_query", query("user.emial")).await;
    let output = missing.outcome.success().unwrap();
    assert_eq!(
        (&output.value, output.message.as_deref()),
        (
            &json!({"found": false, "value": null}),
            Some("there is no `emial` here, did you mean `email`?; known names: email")
        )
    );
    let invalid = world.session.call("json_query", json!({"data": "{", "path": "a"})).await;
    assert_eq!(invalid.outcome.error().map(|e| &*e.code), Some("invalid_json"));
}

#[derive(Deserialize, JsonSchema)]
struct EvenNumber {
    /// Accepts any number in the schema, but only even numbers in serde.
    #[serde(deserialize_with = "deserialize_even")]
    n: i64,
}

#[derive(Serialize, JsonSchema)]
struct HalfResult {
    half: i64,
}

fn deserialize_even<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<i64, D::Error> {
    let n = i64::deserialize(deserializer)?;
    if n % 2 == 0 { Ok(n) } else { Err(serde::de::Error::custom("an odd number")) }
}

/// Checks the outcome of each handler failure. No failure escapes as a panic.
#[tokio::test]
async fn handler_failures_map_to_documented_outcomes() {
    let halve = Tool::typed("halve", "Halves.", |_: ToolContext, args: EvenNumber| async move {
        Ok(HalfResult { half: args.n / 2 })
    })
    .effect(Effect::Read);
    let abort = Tool::dynamic("abort", "Aborts.", json!({"type": "object"}), |_, _| async {
        Err::<Value, _>(Failure::signal(PromptSignal::Abort {
            reason: "the prompt cannot be evaluated".into(),
        }))
    })
    .effect(Effect::Read);
    let world = TestWorld::new(|agent| agent.tool(halve).tool(abort));
    let before = world.fingerprint().await;
    // A validation error of the tool is a failed result.
    let answer = world.session.call("act", json!({"how": "unknown"})).await;
    assert_eq!(
        answer.outcome.error().map(|e| (&*e.code, e.category)),
        Some(("unknown_way", toolgate::ErrorCategory::Validation))
    );
    // Prompt signals pass through.
    assert!(matches!(
        world.session.call("act", json!({"how": "expand"})).await.outcome,
        Outcome::Signal(PromptSignal::ExpandSection { .. })
    ));
    assert!(matches!(
        world.session.call("abort", json!({})).await.outcome,
        Outcome::Signal(PromptSignal::Abort { .. })
    ));
    // A passed deadline has its own code.
    let late = world
        .gate
        .call(
            world.session.prepare("act", json!({"how": "hang"})).timeout(Duration::from_millis(20)),
        )
        .await;
    assert_eq!(late.outcome.error().map(|e| &*e.code), Some("deadline_exceeded"));
    // The error describes arguments that the schema accepts and the type refuses.
    let odd = world.session.call("halve", json!({"n": 3})).await;
    assert_eq!(
        odd.outcome.error().map(|e| (&*e.code, e.message.as_str())),
        Some(("invalid_arguments", "cannot read the arguments: an odd number"))
    );
    // Every other failure is a failed result.
    assert_eq!(
        world.session.call("act", json!({"how": "io"})).await.outcome.error().map(|e| &*e.code),
        Some("upstream_unavailable")
    );
    assert_eq!(world.fingerprint().await, before);
    assert_eq!(world.session.rows().await.unwrap().len(), 6);
}
