//! What must hold whatever is called: no run without a permit, no change by a failure, one row a call,
//! and what was judged is byte for byte what runs.

use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use proptest::prelude::*;
use serde_json::{Value, json};
use toolgate::json::canonical;
use toolgate::policy::{Ask, Fault, Policy, Verdict};
use toolgate::{Category, Ctx, Decision, Effect, Failure, Handler, Judged, Permit, Tool, ToolError};

use crate::support::World;

/// What the policy judged, and what the handler was given.
type Seen = Arc<Mutex<(Vec<Vec<u8>>, Vec<(Vec<u8>, Vec<u8>)>)>>;

struct Watcher(Seen);

#[async_trait]
impl Handler for Watcher {
    async fn run(&self, permit: &Permit, ctx: Ctx, arguments: &Judged) -> Result<Value, Failure> {
        self.0.lock().unwrap().1.push((permit.arguments().bytes().to_vec(), arguments.bytes().to_vec()));
        assert_eq!(permit.call_id(), ctx.call_id());
        ctx.set_slice("last", arguments.value())?;
        if arguments.value()["fail"] == true { Err(Failure::business("told_to", "told to fail")) } else { Ok(arguments.value().clone()) }
    }
}

struct Judge(Seen);

impl Policy for Judge {
    fn name(&self) -> &str {
        "judge"
    }
    fn check(&self, ask: &Ask<'_>) -> Result<Verdict, Fault> {
        if ask.arguments.value()["deny"] == true {
            return Ok(Verdict::deny(ToolError::new(Category::Business, "told_to_deny", "no")));
        }
        self.0.lock().unwrap().0.push(ask.arguments.bytes().to_vec());
        Ok(Verdict::allow())
    }
}

fn world(seen: &Seen) -> World {
    let schema = json!({"type": "object", "properties": {"deny": {"type": "boolean"}, "fail": {"type": "boolean"}, "data": {}}});
    let tool = Tool::with_handler("watch", "Watches.", schema, Arc::new(Watcher(Arc::clone(seen)))).effect(Effect::Write);
    let judge = Judge(Arc::clone(seen));
    World::unwatched(|agent| agent.tool(tool).tool_policy("watch", judge))
}

fn any_call() -> impl Strategy<Value = String> {
    let data = prop_oneof![
        "[0-9]{1,25}(\\.[0-9]{1,12})?(e-?[0-9]{1,2})?"
            .prop_map(|n| n.trim_start_matches('0').to_owned())
            .prop_filter("a number", |n| n.starts_with(|c: char| c.is_ascii_digit())),
        any::<String>().prop_map(|s| serde_json::to_string(&s).unwrap()),
        Just(r#"{"b": 1.50, "a": [1e2, -0.0, null, true]}"#.to_owned()),
    ];
    (any::<bool>(), any::<bool>(), data, prop::sample::select(vec!["", ", \"unknown\": 1", ", \"fail\": 3", ", \"data\": 1", "}"]))
        .prop_map(|(deny, fail, data, junk)| format!(r#"{{"deny": {deny}, "fail": {fail}, "data": {data}{junk}}}"#))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if std::env::var_os("TOOLGATE_SOAK").is_some() { 5_000 } else { 64 }, ..ProptestConfig::default() })]

    #[test]
    fn no_run_without_a_permit_no_change_by_a_failure_one_row_a_call(calls in prop::collection::vec(any_call(), 1..12)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let seen = Seen::default();
            let world = world(&seen);
            let mut model: Option<Value> = None;
            for text in &calls {
                let before = world.fingerprint().await;
                let answer = world.session.call("watch", text.as_str()).await;
                let rows = world.session.rows().await.unwrap();
                let row = rows.iter().filter(|row| row.call == answer.call).collect::<Vec<_>>();
                prop_assert_eq!(row.len(), 1);
                match answer.outcome.success() {
                    Some(_) => {
                        prop_assert_eq!(row[0].decision, Decision::Succeeded);
                        model = Some((*row[0].arguments).clone());
                    }
                    None => prop_assert_eq!(world.fingerprint().await, before),
                }
                prop_assert_eq!(world.session.slice("last").await.unwrap(), model.clone());
            }
            prop_assert_eq!(world.session.rows().await.unwrap().len(), calls.len());
            let seen = seen.lock().unwrap();
            // Everything that ran had been judged, in that order, and with the same bytes.
            prop_assert_eq!(&seen.0, &seen.1.iter().map(|(permitted, _)| permitted.clone()).collect::<Vec<_>>());
            for (permitted, ran) in &seen.1 {
                prop_assert_eq!(permitted, ran);
                prop_assert_eq!(&canonical(&serde_json::from_slice::<Value>(ran).unwrap()), ran);
            }
            Ok(())
        })?;
    }
}
