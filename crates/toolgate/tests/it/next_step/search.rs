//! Tests that following next steps leads to an admitted call or to a person.

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use serde_json::json;
use toolgate::policy::{Deny, Limit, Require, Sequence};
use toolgate::{Agent, Effect, Session};

use super::{call_and_next_step, entity_tool, start_session};

/// Describes a rule for the tools `t0` to `t4`, each of which requires only earlier tools.
#[derive(Debug, Clone)]
enum GeneratedRule {
    Require { tool: usize, any_of: Vec<usize>, same: bool },
    After { tool: usize, first: usize },
    Calls { tool: usize, max: u64 },
    Cap { tool: usize, max: i64, redirect: bool },
}

fn any_rule() -> impl Strategy<Value = GeneratedRule> {
    prop_oneof![
        4 => (1..5usize, prop::collection::vec(0..5usize, 1..3), any::<bool>()).prop_map(|(tool, mut any_of, same)| {
            any_of.iter_mut().for_each(|first| *first %= tool);
            GeneratedRule::Require { tool, any_of, same }
        }),
        2 => (1..5usize, 0..5usize).prop_map(|(tool, first)| GeneratedRule::After { tool, first: first % tool }),
        1 => (0..5usize, 1..4u64).prop_map(|(tool, max)| GeneratedRule::Calls { tool, max }),
        1 => (0..5usize, 0..9i64, any::<bool>()).prop_map(|(tool, max, redirect)| GeneratedRule::Cap { tool, max, redirect }),
    ]
}

fn session_with_rules(rules: &[GeneratedRule], revoking: bool) -> Session {
    let name = |tool: usize| format!("t{tool}");
    let mut agent = Agent::builder("a").tool(entity_tool("person").open());
    for n in 0..5 {
        let declared = entity_tool(&name(n))
            .effect(if n % 2 == 0 { Effect::Read } else { Effect::Write })
            .open();
        agent = agent.tool(if revoking && n == 2 { declared.revokes("t0") } else { declared });
    }
    for (n, rule) in rules.iter().enumerate() {
        let rule_name = format!("r{n}");
        agent = match rule {
            GeneratedRule::Require { tool, any_of, same } => {
                let any_of: Vec<String> = any_of.iter().map(|first| name(*first)).collect();
                let rule = Require::new(
                    &rule_name,
                    [name(*tool).as_str()],
                    any_of.iter().map(String::as_str),
                );
                agent.policy(if *same {
                    rule.same("entity", "/entity").field("/ok", json!(true))
                } else {
                    rule
                })
            }
            GeneratedRule::After { tool, first } => {
                agent.policy(Sequence::new(rule_name).after(&name(*tool), [name(*first).as_str()]))
            }
            GeneratedRule::Calls { tool, max } => agent
                .policy(Limit::calls(&rule_name, [name(*tool).as_str()], *max).redirect("person")),
            GeneratedRule::Cap { tool, max, redirect } => {
                let rule = Deny::new(&rule_name, [name(*tool).as_str()])
                    .when_cel(&format!("has(input.amount) && input.amount > {max}"));
                agent.policy(if *redirect { rule.redirect("person") } else { rule })
            }
        };
    }
    start_session(agent)
}

/// Follows next steps until the call is admitted or a person is asked.
async fn follow_next_steps(
    rules: &[GeneratedRule],
    revoking: bool,
    calls: &[(usize, i64, i64)],
) -> (usize, usize) {
    let session = session_with_rules(rules, revoking);
    let (mut reached, mut handed_over) = (0, 0);
    for (n, (tool, entity, amount)) in calls.iter().enumerate() {
        let mut steps: Vec<String> = Vec::new();
        let mut unique = n * 1_000;
        loop {
            unique += 1;
            let (code, next) = call_and_next_step(
                &session,
                &format!("t{tool}"),
                json!({"entity": entity, "amount": amount, "n": unique}),
            )
            .await;
            steps.push(format!("t{tool}: {code} {next:?}"));
            if code == "ok" {
                reached += usize::from(steps.len() > 1);
                break;
            }
            let Some((step, mut arguments)) = next else {
                assert_eq!(steps.len(), 1, "a next step led nowhere: {steps:#?}\nunder {rules:#?}");
                break;
            };
            arguments["n"] = json!(unique);
            arguments.as_object_mut().unwrap().entry("entity").or_insert(json!(entity));
            let (code, _) = call_and_next_step(&session, &step, arguments).await;
            steps.push(format!("  {step}: {code}"));
            assert_eq!(code, "ok", "a suggested step was refused: {steps:#?}\nunder {rules:#?}");
            if step == "person" {
                handed_over += 1;
                break;
            }
            assert!(steps.len() < 60, "the next steps form a cycle: {steps:#?}\nunder {rules:#?}");
        }
    }
    (reached, handed_over)
}

#[tokio::test]
async fn following_next_steps_reaches_call_or_person() {
    let sets = if std::env::var_os("TOOLGATE_SOAK").is_some() { 20_000 } else { 400 };
    let mut runner = TestRunner::new_with_rng(
        Config::default(),
        TestRng::from_seed(RngAlgorithm::ChaCha, &[6; 32]),
    );
    let strategy = (
        prop::collection::vec(any_rule(), 1..7),
        any::<bool>(),
        prop::collection::vec((0..5usize, 0..3i64, 0..10i64), 1..6),
    );
    let (mut reached, mut handed_over) = (0, 0);
    for _ in 0..sets {
        let (rules, revoking, calls) = strategy.new_tree(&mut runner).unwrap().current();
        let (calls_reached, calls_handed_over) = follow_next_steps(&rules, revoking, &calls).await;
        reached += calls_reached;
        handed_over += calls_handed_over;
    }
    assert!(
        reached > sets / 4 && handed_over > sets / 50,
        "too few cases: {reached} {handed_over}"
    );
}
