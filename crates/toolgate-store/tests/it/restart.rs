//! Tests that a restart in the middle of a conversation changes no decision.

use std::sync::Arc;

use jiff::SignedDuration;
use serde_json::{Value, json};
use toolgate::{Call, ManualClock, MemoryStore, Session, Toolgate};

use crate::ledger_fixture::{LedgerFixture, SeededRng, default_agent, noon, round_count, runtime};

/// A random step of the test.
enum RestartStep {
    Call(usize, &'static str, Value, Option<String>),
    Wait(i64),
    Reset(usize),
    Restart,
}

fn next_step(rng: &mut SeededRng) -> RestartStep {
    let session = rng.next_below(3);
    let customer = format!("C-{}", [1, 2, 9][rng.next_below(3)]);
    match rng.next_below(20) {
        0..6 => RestartStep::Call(session, "look", json!({"customer": customer}), None),
        6..14 => {
            let amount = [100, 200, 250, 400][rng.next_below(4)];
            let key = (rng.next_below(3) == 0).then(|| format!("k{}", rng.next_below(4)));
            RestartStep::Call(
                session,
                "pay",
                json!({"customer": customer, "amount": amount, "name": "x"}),
                key,
            )
        }
        14 => RestartStep::Call(session, "pay", json!({"customer": customer}), None),
        15 => RestartStep::Call(session, "find", json!({"name": "x"}), None),
        16 => RestartStep::Wait(60 * 60 * [1, 12, 30][rng.next_below(3)]),
        17 => RestartStep::Reset(session),
        _ => RestartStep::Restart,
    }
}

async fn call_summary(
    gate: &Toolgate,
    session: &Session,
    tool: &str,
    arguments: &Value,
    key: Option<&String>,
) -> String {
    let mut call: Call = session.prepare(tool, arguments.clone());
    call.idempotency_key = key.cloned();
    let answer = gate.call(call).await;
    let value = answer.outcome.success().map(|output| (output.value.to_string(), output.replayed));
    format!(
        "{:?} {:?} {:?} {value:?}",
        answer.gate,
        answer.rule,
        answer.outcome.error().map(|error| (&error.code, &error.message))
    )
}

#[test]
fn restart_changes_no_decision() {
    for seed in 0..u64::from(round_count(12, 400)) {
        let (fixture, mut rng) = (LedgerFixture::new(), SeededRng::new(seed + 1));
        let clock = Arc::new(ManualClock::at(noon()));
        let steps: Vec<RestartStep> = (0..40).map(|_| next_step(&mut rng)).collect();
        runtime().block_on(async {
            let continuous = Toolgate::builder()
                .agent(default_agent(&fixture.world_path()))
                .store(Arc::new(MemoryStore::new().with_clock(clock.clone())))
                .build()
                .unwrap();
            let mut restarted = fixture.open_at(clock.clone());
            for (index, step) in steps.iter().enumerate() {
                match step {
                    RestartStep::Restart => {
                        drop(restarted);
                        restarted = fixture.open_at(clock.clone());
                    }
                    RestartStep::Wait(seconds) => {
                        clock.advance(SignedDuration::from_secs(*seconds))
                    }
                    RestartStep::Reset(session) => {
                        for gate in [&continuous, &restarted] {
                            gate.session("desk", "alice", &session.to_string())
                                .reset()
                                .await
                                .unwrap();
                        }
                    }
                    RestartStep::Call(session, tool, arguments, key) => {
                        let session = session.to_string();
                        let expected = call_summary(
                            &continuous,
                            &continuous.session("desk", "alice", &session),
                            tool,
                            arguments,
                            key.as_ref(),
                        )
                        .await;
                        let actual = call_summary(
                            &restarted,
                            &restarted.session("desk", "alice", &session),
                            tool,
                            arguments,
                            key.as_ref(),
                        )
                        .await;
                        assert_eq!(
                            actual, expected,
                            "seed {seed}, step {index}: {tool} {arguments}"
                        );
                    }
                }
            }
        });
        fixture.verify();
    }
}
