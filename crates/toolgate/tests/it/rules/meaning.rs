//! All rules against their plain meaning, on random histories.

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use serde_json::json;
use toolgate::policy::{Condition, Deny, Flow, Limit, Per, Policy, Proved, Require, Sequence, observe};
use toolgate::{AgentBuilder, ManualClock};

use super::{account, agent};
use crate::reference::{Meaning, Past, Whose, judge};
use crate::support::Built;

const TOOLS: [&str; 8] = ["proof", "check", "act", "other", "logout", "forget", "page", "contacts"];

fn any_rule() -> impl Strategy<Value = Meaning> {
    prop_oneof![8 => any_enforced(), 1 => any_enforced().prop_map(|rule| Meaning::Observed(Box::new(rule)))]
}

fn any_enforced() -> impl Strategy<Value = Meaning> {
    let whose = || prop::sample::select(vec![Whose::Session, Whose::Principal, Whose::Entity]);
    let window = || prop::option::of(1..200i64);
    prop_oneof![
        (prop::sample::subsequence(vec!["proof", "check"], 1..=2), any::<bool>(), any::<bool>(), window())
            .prop_map(|(any_of, same, ok, within)| Meaning::Require { any_of, same, ok, within }),
        (0..30i64).prop_map(Meaning::DenyAbove),
        (0..3u8).prop_map(Meaning::DenyEntity),
        (0..10i64).prop_map(Meaning::AskBelow),
        (0..4u64, whose(), window()).prop_map(|(most, whose, window)| Meaning::Calls { most, whose, window }),
        (0..60i64, whose(), window(), any::<bool>()).prop_map(|(most, whose, window, by_currency)| Meaning::Sum {
            most,
            whose,
            window,
            by_currency
        }),
        prop::sample::select(vec!["proof", "check"]).prop_map(Meaning::After),
        (0..30i64, 0..5u8).prop_map(|(limit, entity)| Meaning::When(limit, entity)),
        any::<bool>().prop_map(|strict| Meaning::Flow { strict }),
        (0..4u64, window()).prop_map(|(most, window)| Meaning::OwnerCalls { most, window }),
    ]
}

/// Steps of so many principals, sessions and entities.
fn any_step(people: usize, sessions: usize, entities: u8) -> impl Strategy<Value = (i64, Past)> {
    (0..90i64, prop::sample::select(TOOLS.to_vec()), 0..people, 0..sessions, 0..entities, 0..30i64, 0..2u8, any::<bool>()).prop_map(
        |(pause, tool, principal, session, entity, amount, currency, ok)| {
            (pause, Past { tool, principal, session, entity, amount, currency, ok, at: Timestamp::UNIX_EPOCH })
        },
    )
}

fn attach(agent: AgentBuilder, name: &str, rule: &Meaning) -> AgentBuilder {
    match rule {
        Meaning::Observed(rule) => made(name, rule, Trial(agent)),
        rule => made(name, rule, Enforced(agent)),
    }
}

/// Where a rule goes.
trait Place {
    fn put(self, rule: impl Policy + 'static) -> AgentBuilder;
}
struct Enforced(AgentBuilder);
struct Trial(AgentBuilder);
impl Place for Enforced {
    fn put(self, rule: impl Policy + 'static) -> AgentBuilder {
        self.0.policy(rule)
    }
}
impl Place for Trial {
    fn put(self, rule: impl Policy + 'static) -> AgentBuilder {
        self.0.policy(observe(rule))
    }
}

fn made(name: &str, rule: &Meaning, agent: impl Place) -> AgentBuilder {
    let seconds = |w: &Option<i64>| w.map(SignedDuration::from_secs);
    let on = ["act", "other"];
    let per = |whose: &Whose| match whose {
        Whose::Session => Per::Session,
        Whose::Principal => Per::Principal,
        Whose::Entity => Per::Entity("/entity".into()),
    };
    let windowed = |limit: Limit, window: &Option<i64>| seconds(window).into_iter().fold(limit, Limit::within);
    match rule {
        Meaning::Require { any_of, same, ok, within } => {
            let mut rule = Require::new(name, on, any_of.iter().copied()).code(name);
            rule = if *same { rule.same("entity", "/entity") } else { rule };
            rule = if *ok { rule.field("/ok", json!(true)) } else { rule };
            agent.put(seconds(within).into_iter().fold(rule, Require::within))
        }
        Meaning::DenyAbove(limit) => agent.put(Deny::new(name, on).when("/amount", Condition::Above((*limit).into()))),
        Meaning::DenyEntity(entity) => agent.put(Deny::new(name, on).when("/entity", Condition::one_of([json!(entity)]))),
        Meaning::AskBelow(limit) => agent.put(Deny::ask(name, on).when("/amount", Condition::Below((*limit).into()))),
        Meaning::Calls { most, whose, window } => agent.put(windowed(Limit::calls(name, on, *most).per(per(whose)), window)),
        Meaning::Sum { most, whose, window, by_currency } => {
            let limit = windowed(Limit::sum(name, on, "/amount", (*most).into()).per(per(whose)), window);
            agent.put(if *by_currency { limit.currency("/currency") } else { limit })
        }
        Meaning::After(tool) => agent.put(Sequence::new(name).after("act", [*tool]).after("other", [*tool])),
        Meaning::When(limit, entity) => {
            agent.put(Deny::new(name, on).when_cel(&format!("input.amount > {limit} || input.entity == {entity}")))
        }
        Meaning::Flow { strict } => {
            let rule = if *strict { Flow::only_from(name, on, ["/to"]) } else { Flow::new(name, on, ["/to"]) };
            agent.put(rule.trust_tools(["contacts"]).code(name))
        }
        Meaning::OwnerCalls { most, window } => {
            let proved = Proved {
                tool: "check".into(),
                entity: ("entity".into(), "/entity".into()),
                field: "/owner".into(),
                fallback: Some("/entity".into()),
            };
            agent.put(windowed(Limit::calls(name, on, *most).per(Per::ProvedEntity(Box::new(proved))), window))
        }
        // One trial is enough.
        Meaning::Observed(rule) => made(name, rule, agent),
    }
}

/// One set of rules, several histories: the engine and the plain meaning say the same of every call.
async fn compare(rules: &[(String, Meaning)], histories: &[Vec<(i64, Past)>]) -> (usize, usize) {
    let (mut allowed, mut refused) = (0, 0);
    for steps in histories {
        let clock = Arc::new(ManualClock::at(Timestamp::from_second(1_800_000_000).unwrap()));
        let built = agent(|agent| rules.iter().fold(agent, |agent, (name, rule)| attach(agent, name, rule)));
        let gate = crate::support::gate().agent(built).clock(clock.clone()).built();
        let mut history: Vec<Past> = Vec::new();
        for (n, (pause, step)) in steps.iter().enumerate() {
            clock.advance(SignedDuration::from_secs(*pause));
            let call = Past { at: toolgate::Clock::now(&*clock), ..step.clone() };
            let session = gate.session("a", &format!("p{}", call.principal), &format!("s{}", call.session));
            let mut args = json!({"entity": call.entity, "amount": call.amount, "currency": call.currency, "ok": call.ok, "n": n});
            if call.tool == "act" || call.tool == "other" {
                args["to"] = json!(account(call.entity.into()));
            }
            let answer = session.call(call.tool, args).await;
            let said = answer
                .outcome
                .error()
                .map(|e| if e.code == "prerequisite_missing" { answer.rule.clone().unwrap_or_default() } else { e.code.to_string() });
            let governed = call.tool == "act" || call.tool == "other";
            let meant = if governed { judge(rules, &history, &call) } else { None };
            assert_eq!(said, meant, "call {n} of {steps:#?}\nunder {rules:#?}");
            if said.is_none() {
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
async fn the_rules_mean_what_they_say() {
    let sets = if std::env::var_os("TOOLGATE_SOAK").is_some() { 25_000 } else { 250 };
    let mut runner = TestRunner::new_with_rng(Config::default(), TestRng::from_seed(RngAlgorithm::ChaCha, &[3; 32]));
    // Some histories are spread over many, some are one conversation about little.
    let history = || prop_oneof![prop::collection::vec(any_step(2, 2, 3), 1..24), prop::collection::vec(any_step(1, 1, 2), 1..32)];
    let strategy = (prop::collection::vec(any_rule(), 1..5), prop::collection::vec(history(), 4));
    let (mut allowed, mut refused) = (0, 0);
    for _ in 0..sets {
        let (rules, histories) = strategy.new_tree(&mut runner).unwrap().current();
        let rules: Vec<(String, Meaning)> = rules.into_iter().enumerate().map(|(n, rule)| (format!("r{n}"), rule)).collect();
        let (yes, no) = compare(&rules, &histories).await;
        allowed += yes;
        refused += no;
    }
    assert!(allowed > sets && refused > sets, "both happen: {allowed} {refused}");
}
