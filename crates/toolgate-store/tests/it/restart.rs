//! A restart in the middle of a conversation changes no decision.

use std::sync::Arc;

use jiff::SignedDuration;
use serde_json::{Value, json};
use toolgate::{Call, ManualClock, MemoryStore, Session, Toolgate};

use crate::world::{Desk, Dice, agent, noon, rounds, runtime};

/// What is done next.
enum Step {
    Call(usize, &'static str, Value, Option<String>),
    Wait(i64),
    Reset(usize),
    Restart,
}

fn step(dice: &mut Dice) -> Step {
    let session = dice.roll(3);
    let customer = format!("C-{}", [1, 2, 9][dice.roll(3)]);
    match dice.roll(20) {
        0..6 => Step::Call(session, "look", json!({"customer": customer}), None),
        6..14 => {
            let amount = [100, 200, 250, 400][dice.roll(4)];
            let key = (dice.roll(3) == 0).then(|| format!("k{}", dice.roll(4)));
            Step::Call(session, "pay", json!({"customer": customer, "amount": amount, "name": "x"}), key)
        }
        14 => Step::Call(session, "pay", json!({"customer": customer}), None),
        15 => Step::Call(session, "find", json!({"name": "x"}), None),
        16 => Step::Wait(60 * 60 * [1, 12, 30][dice.roll(3)]),
        17 => Step::Reset(session),
        _ => Step::Restart,
    }
}

async fn call(gate: &Toolgate, session: &Session, tool: &str, arguments: &Value, key: Option<&String>) -> String {
    let mut call: Call = session.prepare(tool, arguments.clone());
    call.idempotency_key = key.cloned();
    let answer = gate.call(call).await;
    let value = answer.outcome.success().map(|output| (output.value.to_string(), output.replayed));
    format!("{:?} {:?} {:?} {value:?}", answer.gate, answer.rule, answer.outcome.error().map(|error| (&error.code, &error.message)))
}

#[test]
fn a_restart_changes_no_decision() {
    for seed in 0..u64::from(rounds(12, 400)) {
        let (desk, mut dice) = (Desk::new(), Dice::new(seed + 1));
        let clock = Arc::new(ManualClock::at(noon()));
        let steps: Vec<Step> = (0..40).map(|_| step(&mut dice)).collect();
        runtime().block_on(async {
            let whole =
                Toolgate::builder().agent(agent(&desk.world())).store(Arc::new(MemoryStore::new())).clock(clock.clone()).build().unwrap();
            let mut restarted = desk.open_at(clock.clone());
            for (index, step) in steps.iter().enumerate() {
                match step {
                    Step::Restart => {
                        drop(restarted);
                        restarted = desk.open_at(clock.clone());
                    }
                    Step::Wait(seconds) => clock.advance(SignedDuration::from_secs(*seconds)),
                    Step::Reset(session) => {
                        for gate in [&whole, &restarted] {
                            gate.session("desk", "alice", &session.to_string()).reset().await.unwrap();
                        }
                    }
                    Step::Call(session, tool, arguments, key) => {
                        let session = session.to_string();
                        let expected = call(&whole, &whole.session("desk", "alice", &session), tool, arguments, key.as_ref()).await;
                        let found = call(&restarted, &restarted.session("desk", "alice", &session), tool, arguments, key.as_ref()).await;
                        assert_eq!(found, expected, "seed {seed}, step {index}: {tool} {arguments}");
                    }
                }
            }
        });
        desk.verify();
    }
}
