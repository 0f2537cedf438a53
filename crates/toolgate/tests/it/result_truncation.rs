//! Tests which part of a result a model reads: all, a truncated part with a handle, or nothing.

use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use proptest::prelude::*;
use serde_json::{Value, json};
use toolgate::hook::{Hook, HookCall, HookError};
use toolgate::{CallEffects, Effect, Outcome, Session, Tool, ToolContext};

use crate::properties::{block_on, proptest_config};
use crate::support::TestWorld;

/// Largest result that is shown in full, in bytes.
const MAX_CONTEXT_BYTES: usize = 64;

/// Fails after calls with `how` = `withhold`.
struct WithholdingHook;

#[async_trait]
impl Hook for WithholdingHook {
    fn name(&self) -> &str {
        "keeper"
    }
    async fn after(
        &self,
        call: HookCall<'_>,
        _: &Value,
        _: u64,
    ) -> Result<Option<Value>, HookError> {
        if call.input["how"] == "withhold" {
            Err(HookError("cannot write the audit log".into()))
        } else {
            Ok(None)
        }
    }
}

/// Builds a world with a tool that returns `result`, so that no argument contains the result.
fn world_with_result(result: &Arc<Mutex<Value>>) -> TestWorld {
    let result = Arc::clone(result);
    let schema = json!({"type": "object", "properties": {"how": {"type": "string"}, "n": {"type": "integer"}}});
    let tell = Tool::dynamic("tell", "Tells.", schema, move |ctx: ToolContext, args: Value| {
        let value = result.lock().unwrap().clone();
        async move {
            if args["how"] == "hide" {
                ctx.hide_value();
            }
            ctx.set_slice("last", &args)?;
            Ok(value)
        }
    });
    let tell = tell.effect(Effect::Write).max_output(MAX_CONTEXT_BYTES).open();
    TestWorld::without_replay_check(|agent| {
        agent.tool(tell).tool(toolgate::builtin::read_output()).hook(WithholdingHook)
    })
}

/// Generates a text, alone or nested, that is too long to occur elsewhere by chance.
fn any_result() -> impl Strategy<Value = (String, Value)> {
    ("[a-z]{12}[a-zé漢]{0,60}", 0..3usize).prop_map(|(text, within)| {
        let value = match within {
            0 => json!(text),
            1 => json!([1, text]),
            _ => json!({"deep": {"text": text}}),
        };
        (text, value)
    })
}

/// Reads all pages of a result.
async fn read_all_pages(session: &Session, handle: &str) -> String {
    let (mut text, mut offset) = (String::new(), 0);
    loop {
        let page = session
            .call("read_output", json!({"handle": handle, "offset": offset, "limit": 40}))
            .await;
        let page = page.outcome.success().unwrap_or_else(|| panic!("{page:?}")).value.clone();
        text.push_str(page["text"].as_str().unwrap());
        match page["next"].as_u64() {
            Some(next) => offset = next,
            None => return text,
        }
    }
}

/// Joins all texts of an outcome that a model or a program can read.
fn visible_text(outcome: &Outcome) -> String {
    let model_text = match outcome {
        Outcome::Success(output) => output.for_model(),
        Outcome::Error(error) => error.for_model(),
        Outcome::Signal(signal) => format!("{signal:?}"),
    };
    format!("{model_text}\n{}", outcome.to_json())
}

async fn check_results(calls: &[(&str, (String, Value))]) -> Result<(), TestCaseError> {
    let result = Arc::default();
    let world = world_with_result(&result);
    for (n, (how, (text, value))) in calls.iter().enumerate() {
        *result.lock().unwrap() = value.clone();
        let before = world.fingerprint().await;
        let answer = world.session.call("tell", json!({"how": how, "n": n})).await;
        let row = world
            .session
            .rows()
            .await
            .unwrap()
            .iter()
            .find(|row| row.call == answer.call)
            .cloned()
            .unwrap();
        if *how == "withhold" {
            let error = answer.outcome.error().map(|error| (&*error.code, error.effects));
            prop_assert_eq!(error, Some(("hook_failed", CallEffects::Done)));
            prop_assert!(
                !visible_text(&answer.outcome).contains(text)
                    && !serde_json::to_string(&*row).unwrap().contains(text)
            );
            prop_assert_eq!(world.fingerprint().await, before);
            continue;
        }
        let output = answer.outcome.success().unwrap_or_else(|| panic!("{answer:?}"));
        let all = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        if *how == "hide" {
            prop_assert!(
                !visible_text(&answer.outcome).contains(text),
                "{}",
                visible_text(&answer.outcome)
            );
            prop_assert_eq!(
                row.outcome.success().map(|output| &output.value),
                Some(value),
                "the row must contain the hidden value"
            );
        } else if all.len() <= MAX_CONTEXT_BYTES {
            prop_assert_eq!((&output.value, &output.stored), (value, &None));
        } else {
            let head = output.value.as_str().unwrap();
            prop_assert!(
                !head.is_empty() && head.len() <= MAX_CONTEXT_BYTES && all.starts_with(head),
                "{}",
                head
            );
            prop_assert!(!visible_text(&answer.outcome).contains(&all));
            let stored = output.stored.clone().unwrap();
            prop_assert_eq!(stored.bytes, all.len());
            prop_assert_eq!(read_all_pages(&world.session, &stored.handle).await, all);
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(proptest_config(32, 2_000))]

    #[test]
    fn result_is_either_shown_truncated_hidden_or_withheld(
        calls in prop::collection::vec((prop::sample::select(vec!["show", "hide", "withhold"]), any_result()), 1..8)
    ) {
        block_on(check_results(&calls))?;
    }
}
