//! Tests that the rule engine agrees with the reference model on random histories.

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use serde_json::json;
use toolgate::policy::{
    Condition, Deny, EvidenceEntity, Flow, Limit, LimitOwner, Policy, Require, Sequence, observe,
};
use toolgate::{AgentBuilder, ManualClock};

use super::{account, agent};
use crate::rules::reference_model::{LimitScope, PastCall, RuleModel, expected_denial};
use crate::support::BuildWithReplayCheck;

const TOOL_NAMES: [&str; 8] =
    ["proof", "check", "act", "other", "logout", "forget", "page", "contacts"];

fn any_rule() -> impl Strategy<Value = RuleModel> {
    prop_oneof![8 => any_enforced(), 1 => any_enforced().prop_map(|rule| RuleModel::Observed(Box::new(rule)))]
}

fn any_enforced() -> impl Strategy<Value = RuleModel> {
    let scope = || {
        prop::sample::select(vec![LimitScope::Session, LimitScope::Principal, LimitScope::Entity])
    };
    let window = || prop::option::of(1..200i64);
    prop_oneof![
        (
            prop::sample::subsequence(vec!["proof", "check"], 1..=2),
            any::<bool>(),
            any::<bool>(),
            window()
        )
            .prop_map(|(any_of, same, ok, within)| RuleModel::Require {
                any_of,
                same,
                ok,
                within
            }),
        (0..30i64).prop_map(RuleModel::DenyAbove),
        (0..3u8).prop_map(RuleModel::DenyEntity),
        (0..10i64).prop_map(RuleModel::AskBelow),
        (0..4u64, scope(), window()).prop_map(|(max, scope, window)| RuleModel::Calls {
            max,
            scope,
            window
        }),
        (0..60i64, scope(), window(), any::<bool>()).prop_map(
            |(max, scope, window, by_currency)| RuleModel::Sum { max, scope, window, by_currency }
        ),
        prop::sample::select(vec!["proof", "check"]).prop_map(RuleModel::After),
        (0..30i64, 0..5u8).prop_map(|(limit, entity)| RuleModel::When(limit, entity)),
        any::<bool>().prop_map(|strict| RuleModel::Flow { strict }),
        (0..4u64, window()).prop_map(|(max, window)| RuleModel::OwnerCalls { max, window }),
    ]
}

/// Generates a step with a number of principals, sessions and entities.
fn any_step(
    principals: usize,
    sessions: usize,
    entities: u8,
) -> impl Strategy<Value = (i64, PastCall)> {
    (
        0..90i64,
        prop::sample::select(TOOL_NAMES.to_vec()),
        0..principals,
        0..sessions,
        0..entities,
        0..30i64,
        0..2u8,
        any::<bool>(),
    )
        .prop_map(|(pause, tool, principal, session, entity, amount, currency, ok)| {
            (
                pause,
                PastCall {
                    tool,
                    principal,
                    session,
                    entity,
                    amount,
                    currency,
                    ok,
                    at: Timestamp::UNIX_EPOCH,
                },
            )
        })
}

fn attach_rule(agent: AgentBuilder, name: &str, rule: &RuleModel) -> AgentBuilder {
    match rule {
        RuleModel::Observed(rule) => add_modelled_rule(name, rule, ObservingTarget(agent)),
        rule => add_modelled_rule(name, rule, EnforcingTarget(agent)),
    }
}

/// Adds a rule to an agent, as enforced or as observed.
trait PolicyTarget {
    fn add_policy(self, rule: impl Policy + 'static) -> AgentBuilder;
}
struct EnforcingTarget(AgentBuilder);
struct ObservingTarget(AgentBuilder);
impl PolicyTarget for EnforcingTarget {
    fn add_policy(self, rule: impl Policy + 'static) -> AgentBuilder {
        self.0.policy(rule)
    }
}
impl PolicyTarget for ObservingTarget {
    fn add_policy(self, rule: impl Policy + 'static) -> AgentBuilder {
        self.0.policy(observe(rule))
    }
}

fn add_modelled_rule(name: &str, rule: &RuleModel, agent: impl PolicyTarget) -> AgentBuilder {
    let seconds = |w: &Option<i64>| w.map(SignedDuration::from_secs);
    let on = ["act", "other"];
    let per = |scope: &LimitScope| match scope {
        LimitScope::Session => LimitOwner::Session,
        LimitScope::Principal => LimitOwner::Principal,
        LimitScope::Entity => LimitOwner::Entity("/entity".into()),
    };
    let windowed =
        |limit: Limit, window: &Option<i64>| seconds(window).into_iter().fold(limit, Limit::within);
    match rule {
        RuleModel::Require { any_of, same, ok, within } => {
            let mut rule = Require::new(name, on, any_of.iter().copied()).code(name);
            rule = if *same { rule.same("entity", "/entity") } else { rule };
            rule = if *ok { rule.field("/ok", json!(true)) } else { rule };
            agent.add_policy(seconds(within).into_iter().fold(rule, Require::within))
        }
        RuleModel::DenyAbove(limit) => {
            agent.add_policy(Deny::new(name, on).when("/amount", Condition::Above((*limit).into())))
        }
        RuleModel::DenyEntity(entity) => agent
            .add_policy(Deny::new(name, on).when("/entity", Condition::one_of([json!(entity)]))),
        RuleModel::AskBelow(limit) => {
            agent.add_policy(Deny::ask(name, on).when("/amount", Condition::Below((*limit).into())))
        }
        RuleModel::Calls { max, scope, window } => {
            agent.add_policy(windowed(Limit::calls(name, on, *max).per(per(scope)), window))
        }
        RuleModel::Sum { max, scope, window, by_currency } => {
            let limit =
                windowed(Limit::sum(name, on, "/amount", (*max).into()).per(per(scope)), window);
            agent.add_policy(if *by_currency { limit.currency("/currency") } else { limit })
        }
        RuleModel::After(tool) => {
            agent.add_policy(Sequence::new(name).after("act", [*tool]).after("other", [*tool]))
        }
        RuleModel::When(limit, entity) => agent.add_policy(
            Deny::new(name, on)
                .when_cel(&format!("input.amount > {limit} || input.entity == {entity}")),
        ),
        RuleModel::Flow { strict } => {
            let rule = if *strict {
                Flow::only_from(name, on, ["/to"])
            } else {
                Flow::new(name, on, ["/to"])
            };
            agent.add_policy(rule.trust_tools(["contacts"]).code(name))
        }
        RuleModel::OwnerCalls { max, window } => {
            let proved = EvidenceEntity {
                tool: "check".into(),
                entity: ("entity".into(), "/entity".into()),
                field: "/owner".into(),
                fallback: Some("/entity".into()),
            };
            agent.add_policy(windowed(
                Limit::calls(name, on, *max).per(LimitOwner::EvidenceEntity(Box::new(proved))),
                window,
            ))
        }
        // A nested observation has no further effect.
        RuleModel::Observed(rule) => add_modelled_rule(name, rule, agent),
    }
}

/// Compares the engine with the model for one set of rules and several histories.
async fn compare_with_model(
    rules: &[(String, RuleModel)],
    histories: &[Vec<(i64, PastCall)>],
) -> (usize, usize) {
    let (mut allowed, mut refused) = (0, 0);
    for steps in histories {
        let clock = Arc::new(ManualClock::at(Timestamp::from_second(1_800_000_000).unwrap()));
        let built = agent(|agent| {
            rules.iter().fold(agent, |agent, (name, rule)| attach_rule(agent, name, rule))
        });
        let gate = crate::support::runtime_builder_at(clock.clone()).agent(built).build_checked();
        let mut history: Vec<PastCall> = Vec::new();
        for (n, (pause, step)) in steps.iter().enumerate() {
            clock.advance(SignedDuration::from_secs(*pause));
            let call = PastCall { at: toolgate::Clock::now(&*clock), ..step.clone() };
            let session =
                gate.session("a", &format!("p{}", call.principal), &format!("s{}", call.session));
            let mut args = json!({"entity": call.entity, "amount": call.amount, "currency": call.currency, "ok": call.ok, "n": n});
            if call.tool == "act" || call.tool == "other" {
                args["to"] = json!(account(call.entity.into()));
            }
            let answer = session.call(call.tool, args).await;
            let actual = answer.outcome.error().map(|e| {
                if e.code == "prerequisite_missing" {
                    answer.rule.clone().unwrap_or_default()
                } else {
                    e.code.to_string()
                }
            });
            let governed = call.tool == "act" || call.tool == "other";
            let expected = if governed { expected_denial(rules, &history, &call) } else { None };
            assert_eq!(actual, expected, "call {n} of {steps:#?}\nunder {rules:#?}");
            if actual.is_none() {
                allowed += 1;
                history.push(call);
            } else {
                refused += 1;
            }
        }
    }
    (allowed, refused)
}

#[tokio::test]
async fn rule_engine_agrees_with_reference_model() {
    let sets = if std::env::var_os("TOOLGATE_SOAK").is_some() { 25_000 } else { 250 };
    let mut runner = TestRunner::new_with_rng(
        Config::default(),
        TestRng::from_seed(RngAlgorithm::ChaCha, &[3; 32]),
    );
    // Some histories have several sessions and entities; some have one session and two entities.
    let history = || {
        prop_oneof![
            prop::collection::vec(any_step(2, 2, 3), 1..24),
            prop::collection::vec(any_step(1, 1, 2), 1..32)
        ]
    };
    let strategy = (prop::collection::vec(any_rule(), 1..5), prop::collection::vec(history(), 4));
    let (mut allowed, mut refused) = (0, 0);
    for _ in 0..sets {
        let (rules, histories) = strategy.new_tree(&mut runner).unwrap().current();
        let rules: Vec<(String, RuleModel)> =
            rules.into_iter().enumerate().map(|(n, rule)| (format!("r{n}"), rule)).collect();
        let (yes, no) = compare_with_model(&rules, &histories).await;
        allowed += yes;
        refused += no;
    }
    assert!(allowed > sets && refused > sets, "too few cases: {allowed} {refused}");
}
