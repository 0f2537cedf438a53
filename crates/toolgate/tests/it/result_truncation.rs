//! What a model reads of a result: all of it, its beginning and a way to the rest, or nothing.

use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use proptest::prelude::*;
use serde_json::{Value, json};
use toolgate::hook::{Hook, HookCall, HookError};
use toolgate::{CallEffects, Effect, Outcome, Session, Tool, ToolContext};

use crate::properties::{block_on, proptest_config};
use crate::support::TestWorld;

/// Most bytes of a result that go into the context.
const MAX_CONTEXT_BYTES: usize = 64;

/// Cannot do its work after the calls that say so.
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

/// A world with a tool that gives what it is given here, so that no argument holds it.
fn world_with_result(given: &Arc<Mutex<Value>>) -> TestWorld {
    let given = Arc::clone(given);
    let schema = json!({"type": "object", "properties": {"how": {"type": "string"}, "n": {"type": "integer"}}});
    let tell = Tool::dynamic("tell", "Tells.", schema, move |ctx: ToolContext, args: Value| {
        let value = given.lock().unwrap().clone();
        async move {
            if args["how"] == "hide" {
                ctx.hide_value();
            }
            ctx.set_slice("told", &args)?;
            Ok(value)
        }
    });
    let tell = tell.effect(Effect::Write).max_output(MAX_CONTEXT_BYTES).open();
    TestWorld::without_replay_check(|agent| {
        agent.tool(tell).tool(toolgate::builtin::read_output()).hook(WithholdingHook)
    })
}

/// A text, alone or inside something. It is long enough to be found by chance nowhere else.
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

/// All pages of a result.
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

/// Everything that a model or program is told of an outcome.
fn visible_text(outcome: &Outcome) -> String {
    let read = match outcome {
        Outcome::Success(output) => output.for_model(),
        Outcome::Error(error) => error.for_model(),
        Outcome::Signal(signal) => format!("{signal:?}"),
    };
    format!("{read}\n{}", outcome.to_json())
}

async fn check_results(calls: &[(&str, (String, Value))]) -> Result<(), TestCaseError> {
    let given = Arc::default();
    let world = world_with_result(&given);
    for (n, (how, (text, value))) in calls.iter().enumerate() {
        *given.lock().unwrap() = value.clone();
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
                "it is recorded all the same"
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
