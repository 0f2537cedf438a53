//! Measures the cost of a governed call, compared with a floor in the same run.
//!
//! The floor is parsing, validation and a bare handler, with the same hop to a separate task.
//! Prints a table and writes `target/bench.json`.

#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a benchmark may fail loudly")]

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use toolgate::policy::{FactRequest, Policy, PolicyError, PolicyInput, Sequence, Verdict};
use toolgate::{
    Agent, Effect, ErrorCategory, Session, Tool, ToolContext, ToolError, ToolSpec, Toolgate,
};
use toolgate_json::{Pointer, decimal_of};
use toolgate_testkit::bench_report::{BenchLine, line, write_lines};

/// Calls in one measured stretch. The median of all stretches counts.
const CALLS_PER_ROUND: usize = 2_000;
const ROUNDS: usize = 31;

#[derive(Deserialize, JsonSchema)]
struct BenchRefund {
    customer_id: String,
    order_id: String,
    amount: f64,
}

#[derive(Serialize, JsonSchema)]
struct BenchReceipt {
    refund_id: String,
}

struct BenchCapPolicy(Pointer);

impl Policy for BenchCapPolicy {
    fn name(&self) -> &str {
        "cap"
    }
    fn governs(&self, tool: &ToolSpec) -> bool {
        tool.name() == "refund"
    }
    fn check(&self, input: &PolicyInput<'_>) -> Result<Verdict, PolicyError> {
        let amount = input
            .argument(&self.0)
            .and_then(decimal_of)
            .ok_or_else(|| PolicyError::new("no amount"))?;
        if amount > 500.into() {
            return Ok(Verdict::deny(ToolError::new(ErrorCategory::Business, "cap", "over 500")));
        }
        Ok(Verdict::allow())
    }
}

struct BenchCustomerPolicy {
    customer: Pointer,
    tool: Arc<str>,
    entity: Arc<str>,
}

impl BenchCustomerPolicy {
    fn customer<'a>(&self, input: &PolicyInput<'a>) -> &'a Value {
        input.argument(&self.customer).unwrap_or(&Value::Null)
    }
}

impl Policy for BenchCustomerPolicy {
    fn name(&self) -> &str {
        "same_customer"
    }
    fn governs(&self, tool: &ToolSpec) -> bool {
        tool.name() == "refund"
    }
    fn request_facts(&self, input: &PolicyInput<'_>, needs: &mut FactRequest) {
        needs.evidence_of(&self.tool, Some((&self.entity, self.customer(input))), false);
    }
    fn check(&self, input: &PolicyInput<'_>) -> Result<Verdict, PolicyError> {
        match input.evidence_of(&self.tool, Some((&self.entity, self.customer(input))), false)? {
            Some(_) => Ok(Verdict::allow()),
            None => Ok(Verdict::deny(ToolError::new(
                ErrorCategory::Business,
                "unverified",
                "verify first",
            ))),
        }
    }
}

fn refund() -> Tool {
    Tool::typed("refund", "Refund an order.", |ctx: ToolContext, args: BenchRefund| async move {
        ctx.set_slice("last", &args.order_id)?;
        black_box((&args.customer_id, args.amount));
        Ok(BenchReceipt { refund_id: args.order_id })
    })
    .effect(Effect::Write)
    .local()
    .entity("order_id", "/order_id")
}

fn verify() -> Tool {
    let schema = json!({"type": "object", "properties": {"customer_id": {"type": "string"}}, "required": ["customer_id"]});
    Tool::dynamic("verify", "Verify a customer.", schema, |_, args| async move { Ok(args) })
        .effect(Effect::Read)
        .entity("customer_id", "/customer_id")
}

/// Builds a gate with a number of tools, three policies on the called tool, and a listener.
fn gate(tools: usize) -> Toolgate {
    let others =
        (0..tools.saturating_sub(2)).map(|n| {
            let schema = json!({"type": "object", "properties": {"q": {"type": "string"}}});
            Tool::dynamic(&format!("other_{n}"), "Another tool.", schema, |_, args| async move {
                Ok(args)
            })
            .effect(Effect::Read)
        });
    let agent = Agent::builder("bench")
        .tool(refund())
        .tool(verify())
        .tools(others)
        .policy(BenchCapPolicy("/amount".into()))
        .policy(BenchCustomerPolicy {
            customer: "/customer_id".into(),
            tool: "verify".into(),
            entity: "customer_id".into(),
        })
        .policy(Sequence::new("order").after("refund", ["verify"]))
        .build()
        .unwrap();
    let event_count = AtomicU64::new(0);
    Toolgate::builder()
        .agent(agent)
        .on_event(move |_| {
            event_count.fetch_add(1, Ordering::Relaxed);
        })
        .build()
        .unwrap()
}

fn arguments(n: usize) -> Vec<u8> {
    format!(r#"{{"customer_id": "C-1042", "order_id": "A-{n}", "amount": {}.50}}"#, n % 400)
        .into_bytes()
}

async fn open_verified_session(gate: &Toolgate, name: &str) -> Session {
    let session = gate.session("bench", "alice", name);
    let verified = session.call("verify", json!({"customer_id": "C-1042"})).await;
    assert!(verified.outcome.success().is_some(), "{verified:?}");
    session
}

async fn time_governed_calls(session: &Session, from: usize, count: usize) -> f64 {
    let calls: Vec<Vec<u8>> = (from..from + count).map(arguments).collect();
    let start = Instant::now();
    for arguments in calls {
        let answer = session.call("refund", arguments).await;
        assert!(answer.outcome.success().is_some(), "{answer:?}");
    }
    start.elapsed().as_nanos() as f64 / count as f64
}

async fn time_floor(validator: &Arc<jsonschema::Validator>, count: usize) -> f64 {
    let calls: Vec<Vec<u8>> = (0..count).map(arguments).collect();
    let start = Instant::now();
    for text in calls {
        let validator = Arc::clone(validator);
        let value = tokio::spawn(async move {
            let value: Value = serde_json::from_slice(&text).unwrap();
            assert!(validator.is_valid(&value));
            let args: BenchRefund = serde_json::from_value(value).unwrap();
            black_box((&args.customer_id, args.amount));
            serde_json::to_value(BenchReceipt { refund_id: args.order_id }).unwrap()
        })
        .await
        .unwrap();
        black_box(value);
    }
    start.elapsed().as_nanos() as f64 / count as f64
}

async fn measure() -> Vec<BenchLine> {
    let mut schema = schemars::schema_for!(BenchRefund).to_value();
    schema["additionalProperties"] = json!(false);
    let validator = Arc::new(jsonschema::validator_for(&schema).unwrap());
    let (few, many) = (gate(2), gate(1_000));
    let old = open_verified_session(&few, "old").await;
    time_governed_calls(&old, 0, 100_000).await;
    let wide = open_verified_session(&many, "wide").await;
    let (mut floors, mut fresh, mut aged, mut widened) = (vec![], vec![], vec![], vec![]);
    for round in 0..ROUNDS {
        let session = open_verified_session(&few, &format!("fresh-{round}")).await;
        time_governed_calls(&session, 0, 10).await;
        floors.push(time_floor(&validator, CALLS_PER_ROUND).await);
        fresh.push(time_governed_calls(&session, 10, CALLS_PER_ROUND).await);
        aged.push(
            time_governed_calls(&old, 100_000 + round * CALLS_PER_ROUND, CALLS_PER_ROUND).await,
        );
        widened.push(time_governed_calls(&wide, round * CALLS_PER_ROUND, CALLS_PER_ROUND).await);
    }
    vec![
        line(
            "governed_call",
            fresh.clone(),
            floors,
            "floor: parse, validate, bare handler, same task hop",
        ),
        line(
            "governed_call_old_session",
            aged,
            fresh.clone(),
            "call 100,000 and later; floor: calls 10 to 2,010 of a session",
        ),
        line("governed_call_1000_tools", widened, fresh, "1,000 registered tools; floor: 2"),
    ]
}

fn main() {
    // `cargo test --benches` passes `--test`, and nothing is measured then.
    if std::env::args().any(|arg| arg == "--test") {
        return;
    }
    // On one thread the hop to a task costs the same for both sides. On several threads the hop
    // wakes an idle worker, so the result mostly measures the scheduler. It is shown for comparison
    // only.
    let single_thread = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut lines = single_thread.block_on(async { tokio::spawn(measure()).await.unwrap() });
    let two_threads =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let busy = two_threads.block_on(async { tokio::spawn(measure()).await.unwrap() });
    lines.extend(busy.into_iter().take(1).map(|line| BenchLine {
        name: "governed_call_two_workers".into(),
        note: "the same on a runtime with two workers".into(),
        ..line
    }));
    write_lines(lines);
}
