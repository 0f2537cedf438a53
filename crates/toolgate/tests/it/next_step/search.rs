//! The next step, played until the call is let through or a person must help.

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use serde_json::json;
use toolgate::policy::{Deny, Limit, Require, Sequence};
use toolgate::{Agent, Effect, Session};

use super::{call_and_next_step, entity_tool, start_session};

/// A rule among tools `t0` to `t4`, each needing only tools before it.
#[derive(Debug, Clone)]
enum GeneratedRule {
    Require { tool: usize, any_of: Vec<usize>, same: bool },
    After { tool: usize, first: usize },
    Calls { tool: usize, most: u64 },
    Cap { tool: usize, most: i64, redirect: bool },
}

fn any_rule() -> impl Strategy<Value = GeneratedRule> {
    prop_oneof![
        4 => (1..5usize, prop::collection::vec(0..5usize, 1..3), any::<bool>()).prop_map(|(tool, mut any_of, same)| {
            any_of.iter_mut().for_each(|first| *first %= tool);
            GeneratedRule::Require { tool, any_of, same }
        }),
        2 => (1..5usize, 0..5usize).prop_map(|(tool, first)| GeneratedRule::After { tool, first: first % tool }),
        1 => (0..5usize, 1..4u64).prop_map(|(tool, most)| GeneratedRule::Calls { tool, most }),
        1 => (0..5usize, 0..9i64, any::<bool>()).prop_map(|(tool, most, redirect)| GeneratedRule::Cap { tool, most, redirect }),
    ]
}

fn session_with_rules(rules: &[GeneratedRule], revoking: bool) -> Session {
    let name = |tool: usize| format!("t{tool}");
    let mut agent = Agent::builder("a").tool(entity_tool("person").open());
    for n in 0..5 {
        let made = entity_tool(&name(n))
            .effect(if n % 2 == 0 { Effect::Read } else { Effect::Write })
            .open();
        agent = agent.tool(if revoking && n == 2 { made.revokes("t0") } else { made });
    }
    for (n, rule) in rules.iter().enumerate() {
        let called = format!("r{n}");
        agent = match rule {
            GeneratedRule::Require { tool, any_of, same } => {
                let any_of: Vec<String> = any_of.iter().map(|first| name(*first)).collect();
                let rule = Require::new(
                    &called,
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
                agent.policy(Sequence::new(called).after(&name(*tool), [name(*first).as_str()]))
            }
            GeneratedRule::Calls { tool, most } => agent
                .policy(Limit::calls(&called, [name(*tool).as_str()], *most).redirect("person")),
            GeneratedRule::Cap { tool, most, redirect } => {
                let rule = Deny::new(&called, [name(*tool).as_str()])
                    .when_cel(&format!("has(input.amount) && input.amount > {most}"));
                agent.policy(if *redirect { rule.redirect("person") } else { rule })
            }
        };
    }
    start_session(agent)
}

/// Plays what it is told until the call is let through, or a person has it.
async fn follow_next_steps(
    rules: &[GeneratedRule],
    revoking: bool,
    calls: &[(usize, i64, i64)],
) -> (usize, usize) {
    let session = session_with_rules(rules, revoking);
    let (mut reached, mut handed_over) = (0, 0);
    for (n, (tool, entity, amount)) in calls.iter().enumerate() {
        let mut told: Vec<String> = Vec::new();
        let mut unique = n * 1_000;
        loop {
            unique += 1;
            let (code, advice) = call_and_next_step(
                &session,
                &format!("t{tool}"),
                json!({"entity": entity, "amount": amount, "n": unique}),
            )
            .await;
            told.push(format!("t{tool}: {code} {advice:?}"));
            if code == "ok" {
                reached += usize::from(told.len() > 1);
                break;
            }
            let Some((step, mut arguments)) = advice else {
                assert_eq!(told.len(), 1, "the advice led nowhere: {told:#?}\nunder {rules:#?}");
                break;
            };
            arguments["n"] = json!(unique);
            arguments.as_object_mut().unwrap().entry("entity").or_insert(json!(entity));
            let (code, _) = call_and_next_step(&session, &step, arguments).await;
            told.push(format!("  {step}: {code}"));
            assert_eq!(
                code, "ok",
                "a step that was advised was refused: {told:#?}\nunder {rules:#?}"
            );
            if step == "person" {
                handed_over += 1;
                break;
            }
            assert!(told.len() < 60, "the advice goes in circles: {told:#?}\nunder {rules:#?}");
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
        let (there, over) = follow_next_steps(&rules, revoking, &calls).await;
        reached += there;
        handed_over += over;
    }
    assert!(reached > sets / 4 && handed_over > sets / 50, "both happen: {reached} {handed_over}");
}
