//! Measures the cost of rules: one typed rule, one expression, 1,000 rules of which three apply,
//! and an old session.
//!
//! The cost of one rule is the difference between calls under many rules and under one.

#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a benchmark may fail loudly")]

use std::hint::black_box;
use std::time::Instant;

use serde_json::{Value, json};
use toolgate::policy::{
    Condition, Deny, Limit, LimitOwner, Policy, PolicyError, PolicyInput, Require, Verdict,
};
use toolgate::{Agent, AgentBuilder, Effect, ErrorCategory, Session, Tool, ToolError, Toolgate};
use toolgate_json::{Pointer, decimal_of};
use toolgate_testkit::bench_report::{BenchLine, line, median, write_lines};

const CALLS_PER_ROUND: usize = 1_000;
const ROUNDS: usize = 21;
/// Number of rules of one kind that are measured together.
const ADDED_RULES: usize = 40;
const CONDITION: &str = "input.amount > 500 && input.currency == \"EUR\"";

/// A rule that is implemented in Rust.
struct BenchRustPolicy(String, Pointer);

impl Policy for BenchRustPolicy {
    fn name(&self) -> &str {
        &self.0
    }
    fn check(&self, input: &PolicyInput<'_>) -> Result<Verdict, PolicyError> {
        let amount = input
            .argument(&self.1)
            .and_then(decimal_of)
            .ok_or_else(|| PolicyError::new("no amount"))?;
        if amount > 500.into() {
            return Ok(Verdict::deny(ToolError::new(ErrorCategory::Business, "cap", "over 500")));
        }
        Ok(Verdict::allow())
    }
}

fn tool(name: &str) -> Tool {
    let schema = json!({"type": "object", "properties": {
        "customer": {"type": "string"}, "amount": {"type": "number"}, "currency": {"type": "string"}, "n": {"type": "integer"},
    }});
    Tool::dynamic(name, "A tool.", schema, |_, _| async { Ok(Value::Null) })
        .effect(Effect::Read)
        .entity("customer", "/customer")
}

fn start_session(agent: AgentBuilder) -> Session {
    Toolgate::builder().agent(agent.build().unwrap()).build().unwrap().session("a", "alice", "s")
}

/// Returns a session whose tool `act` has a number of rules of one kind.
fn session_with_rules(count: usize, rule: impl Fn(AgentBuilder, &str) -> AgentBuilder) -> Session {
    start_session(
        (0..count)
            .fold(Agent::builder("a").tool(tool("act")), |agent, n| rule(agent, &format!("r{n}"))),
    )
}

/// Returns a session with a number of rules, of which three apply to `act`.
fn session_with_three_matching(count: usize) -> Session {
    let others = (0..count.div_ceil(10)).map(|n| tool(&format!("other_{n}")));
    let mut agent = Agent::builder("a").tool(tool("act")).tool(tool("proof")).tools(others);
    for n in 3..count {
        let other = format!("other_{}", n % count.div_ceil(10));
        agent = agent.policy(
            Deny::new(&format!("r{n}"), [other.as_str()])
                .when("/amount", Condition::Above(n.into())),
        );
    }
    let rules = [1, 2, 3].into_iter().take(count);
    for n in rules {
        agent = match n {
            1 => agent
                .policy(Require::new("proved", ["act"], ["proof"]).same("customer", "/customer")),
            2 => agent
                .policy(Deny::new("cap", ["act"]).when("/amount", Condition::Above(500.into()))),
            _ => agent.policy(
                Limit::calls("limit", ["act"], 1_000_000_000)
                    .per(LimitOwner::Entity("/customer".into())),
            ),
        };
    }
    start_session(agent)
}

async fn time_calls(session: &Session, from: usize, count: usize) -> f64 {
    let calls: Vec<Value> = (from..from + count)
        .map(|n| json!({"customer": "C-1", "amount": n % 400, "currency": "EUR", "n": n}))
        .collect();
    let start = Instant::now();
    for arguments in calls {
        let answer = session.call("act", arguments).await;
        assert!(answer.outcome.success().is_some(), "{answer:?}");
    }
    start.elapsed().as_nanos() as f64 / count as f64
}

async fn add_evidence(session: &Session) {
    let answer = session.call("proof", json!({"customer": "C-1"})).await;
    assert!(answer.outcome.success().is_some(), "{answer:?}");
}

/// Evaluates the same expression with the `cel` crate as documented: compiled once, shared root
/// context.
fn time_cel_crate(count: usize) -> f64 {
    let program = cel::Program::compile(CONDITION).unwrap();
    let root = cel::Context::default();
    let text = |text: &str| CelInputValue::Text(text.to_owned());
    let calls: Vec<std::collections::HashMap<&str, CelInputValue>> = (0..count as i64)
        .map(|n| {
            [
                ("customer", text("C-1")),
                ("amount", CelInputValue::Integer(n % 400)),
                ("currency", text("EUR")),
                ("n", CelInputValue::Integer(n)),
            ]
            .into()
        })
        .collect();
    let start = Instant::now();
    for input in &calls {
        let mut context = root.new_inner_scope();
        context.add_variable("input", cel::to_value(input).unwrap()).unwrap();
        black_box(program.execute(&context).unwrap());
    }
    start.elapsed().as_nanos() as f64 / count as f64
}

/// Input value of the `cel` crate.
#[derive(serde::Serialize)]
#[serde(untagged)]
enum CelInputValue {
    Integer(i64),
    Text(String),
}

async fn measure() -> Vec<BenchLine> {
    let typed = |agent: AgentBuilder, name: &str| {
        agent.policy(Deny::new(name, ["act"]).when("/amount", Condition::Above(500.into())))
    };
    let by_hand = |agent: AgentBuilder, name: &str| {
        agent.policy(BenchRustPolicy(name.to_owned(), "/amount".into()))
    };
    let in_cel = |agent: AgentBuilder, name: &str| {
        agent.policy(Deny::new(name, ["act"]).when_cel(CONDITION))
    };
    let pairs = [
        [session_with_rules(1, typed), session_with_rules(1 + ADDED_RULES, typed)],
        [session_with_rules(1, by_hand), session_with_rules(1 + ADDED_RULES, by_hand)],
        [session_with_rules(1, in_cel), session_with_rules(1 + ADDED_RULES, in_cel)],
    ];
    let sized: Vec<Session> =
        [3, 10, 100, 1_000].into_iter().map(session_with_three_matching).collect();
    for session in &sized {
        add_evidence(session).await;
    }
    let old = session_with_three_matching(3);
    add_evidence(&old).await;
    time_calls(&old, 0, 100_000).await;
    let mut each: Vec<Vec<f64>> = vec![Vec::new(); 3];
    let mut by_size: Vec<Vec<f64>> = vec![Vec::new(); 4];
    let (mut peers, mut fresh, mut aged) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        for (index, [single, many]) in pairs.iter().enumerate() {
            let (single, many) = (
                time_calls(single, round * CALLS_PER_ROUND, CALLS_PER_ROUND).await,
                time_calls(many, round * CALLS_PER_ROUND, CALLS_PER_ROUND).await,
            );
            each[index].push((many - single) / ADDED_RULES as f64);
        }
        peers.push(time_cel_crate(CALLS_PER_ROUND));
        for (index, session) in sized.iter().enumerate() {
            by_size[index]
                .push(time_calls(session, round * CALLS_PER_ROUND, CALLS_PER_ROUND).await);
        }
        // The same store is used, so that only the age of the session differs.
        let young = old.toolgate().session("a", "alice", &format!("young-{round}"));
        add_evidence(&young).await;
        time_calls(&young, 0, 10).await;
        fresh.push(time_calls(&young, 10, CALLS_PER_ROUND).await);
        aged.push(time_calls(&old, 100_000 + round * CALLS_PER_ROUND, CALLS_PER_ROUND).await);
    }
    let smallest = by_size
        .iter()
        .min_by(|a, b| median((*a).clone()).total_cmp(&median((*b).clone())))
        .unwrap()
        .clone();
    vec![
        line(
            "rule_typed",
            each[0].clone(),
            each[1].clone(),
            "one `deny` on an argument; floor: the same by hand in Rust",
        ),
        line(
            "rule_cel",
            each[2].clone(),
            peers,
            "one `when` of two comparisons; floor: the `cel` crate, compiled once, shared context",
        ),
        line(
            "rules_1000",
            by_size[3].clone(),
            smallest.clone(),
            "1,000 rules, 3 apply; floor: the cheapest of 3, 10, 100, 1,000",
        ),
        line("rules_100", by_size[2].clone(), smallest.clone(), "100 rules, 3 apply; same floor"),
        line("rules_10", by_size[1].clone(), smallest, "10 rules, 3 apply; same floor"),
        line(
            "policy_old_session",
            aged,
            fresh,
            "3 rules after 100,000 calls; floor: calls 10 to 1,010 of a session",
        ),
    ]
}

fn main() {
    // `cargo test --benches` passes `--test`, and nothing is measured then.
    if std::env::args().any(|arg| arg == "--test") {
        return;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    write_lines(runtime.block_on(async { tokio::spawn(measure()).await.unwrap() }));
}
