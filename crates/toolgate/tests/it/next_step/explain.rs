//! Tests `explain` and observed rules.

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use serde_json::json;
use toolgate::policy::source::RuleSet;
use toolgate::policy::{Condition, Deny, Limit, Policy, Require, observe};
use toolgate::{
    Agent, Decision, Effect, Explanation, Gate, GateResult, PredictedOutcome, Replay,
    SignedDuration,
};

use super::{call_and_next_step, entity_tool, start_session};
use crate::support::BuildWithReplayCheck;

#[tokio::test]
async fn explain_lists_every_gate_and_rule() {
    let session = start_session(
        Agent::builder("a")
            .tool(entity_tool("act"))
            .tool(entity_tool("proof").effect(Effect::Read))
            .tool(entity_tool("person").open())
            .policy(
                Require::new("proved", ["act"], ["proof"])
                    .same("entity", "/entity")
                    .field("/ok", json!(true))
                    .within(SignedDuration::from_mins(5)),
            )
            .tool_policy(
                "act",
                Deny::new("cap", ["act"])
                    .when("/amount", Condition::Above(500.into()))
                    .redirect("person"),
            )
            .policy(Limit::sum("daily", ["act"], "/amount", 600.into()))
            .policy(observe(Deny::new("trial", ["act"]).when_cel("input.amount > 100")))
            .policy(Deny::ask("unrelated", ["person"]).when_cel("input.entity > 5")),
    );
    insta::assert_snapshot!(session.explain("act", json!({"entity": 1, "amount": 600})).await);
    assert_eq!(call_and_next_step(&session, "proof", json!({"entity": 1})).await.0, "ok");
    let why = session.explain("act", json!({"entity": 1, "amount": 400})).await;
    assert_eq!(why.would, PredictedOutcome::Run);
    insta::assert_snapshot!(why);
    assert_eq!(
        call_and_next_step(&session, "act", json!({"entity": 1, "amount": 400})).await.0,
        "ok"
    );
    let why = session.explain("act", json!({"entity": 1, "amount": 201})).await;
    assert!(matches!(&why.would, PredictedOutcome::Refuse(error) if error.code == "daily"));
    assert!(why.rules.iter().any(|r| r.rule == "daily" && r.said == GateResult::Deny), "{why}");
    let why = session.explain("person", json!({"entity": 6})).await;
    assert_eq!(
        (why.would, why.gates[8].gate, why.gates[8].said),
        (PredictedOutcome::Ask, Gate::Approval, GateResult::Ask)
    );
    // A limit that the amount alone exceeds is listed, even if another rule denies first.
    let why = session.explain("act", json!({"entity": 1, "amount": 601})).await;
    assert!(matches!(&why.would, PredictedOutcome::Refuse(error) if error.code == "cap"));
    assert!(why.rules.iter().any(|r| r.rule == "daily" && r.said == GateResult::Deny), "{why}");
    // `explain` writes no row.
    assert_eq!(session.rows().await.unwrap().len(), 2);
    for _ in 0..5 {
        assert_eq!(
            session.explain("proof", json!({"entity": 1})).await.would,
            PredictedOutcome::Run
        );
    }
    let unknown = session.explain("atc", json!({})).await;
    assert!(
        matches!(&unknown.would, PredictedOutcome::Refuse(error) if error.code == "unknown_tool")
    );
    assert_eq!(unknown.gates[1].said, GateResult::Deny);
}

#[tokio::test]
async fn explain_names_inspected_arguments() {
    let text = "[[policy]]\nname = \"keys\"\nrule = \"deny\"\ntools = [\"act\"]\nwhere = [{ touches = [\"/keys\"] }]\n";
    let session = start_session(
        Agent::builder("a").tool(entity_tool("act")).rules(RuleSet::parse("policy.toml", text)),
    );
    let why = session.explain("act", json!({"entity": 1})).await;
    let looked_at: Vec<&str> = why
        .rules
        .iter()
        .flat_map(|note| note.looked_at.iter().map(|look| look.what.as_str()))
        .collect();
    assert_eq!(looked_at, ["arguments naming `/keys`"], "{why}");
}

#[tokio::test]
async fn explain_predicts_actual_outcome() {
    let session = start_session(
        Agent::builder("a")
            .tool(entity_tool("act"))
            .tool(entity_tool("proof").effect(Effect::Read))
            .policy(Require::new("proved", ["act"], ["proof"]).same("entity", "/entity"))
            .policy(Limit::calls("three", ["act"], 3))
            .policy(Deny::ask("ask", ["act"]).when("/amount", Condition::Above(8.into()))),
    );
    let mut runner = TestRunner::new_with_rng(
        Config::default(),
        TestRng::from_seed(RngAlgorithm::ChaCha, &[8; 32]),
    );
    let calls = (prop::sample::select(vec!["act", "proof"]), 0..4i64, 0..10i64);
    for n in 0..200 {
        let (name, entity, amount) = calls.new_tree(&mut runner).unwrap().current();
        let args = json!({"entity": entity, "amount": amount, "n": n});
        let why = session.explain(name, args.clone()).await;
        let answer = session.call(name, args).await;
        let expected = match &why.would {
            PredictedOutcome::Run => "ok".to_owned(),
            PredictedOutcome::Ask => "approval_required".to_owned(),
            PredictedOutcome::Replay => "replay".to_owned(),
            PredictedOutcome::Refuse(error) => error.code.to_string(),
        };
        assert_eq!(answer.outcome.error().map_or("ok", |e| &e.code), expected, "{why}");
    }
}

#[tokio::test]
async fn recorded_call_is_explained_as_decided() {
    let agent = Agent::builder("a")
        .tool(entity_tool("act"))
        .tool(entity_tool("proof").effect(Effect::Read))
        .policy(Require::new("proved", ["act"], ["proof"]).same("entity", "/entity"))
        .policy(Limit::sum("daily", ["act"], "/amount", 600.into()))
        .policy(Deny::ask("large", ["act"]).when("/amount", Condition::Above(500.into())));
    let gate = crate::support::runtime_builder().agent(agent.build().unwrap()).build_checked();
    let session = gate.session("a", "alice", "s");
    for amount in [100, 100, 100, 0, 400, 300, 501] {
        let (name, args) = if amount == 0 {
            ("proof", json!({"entity": 1}))
        } else {
            ("act", json!({"entity": 1, "amount": amount}))
        };
        session.call(name, args).await;
    }
    session.call("act", json!({"amount": 1})).await;
    session.call("atc", json!({})).await;
    let replay = Replay::from_toolgate(&gate).unwrap();
    let mut explanations: Vec<Explanation> = Vec::new();
    for row in session.rows().await.unwrap() {
        let why = replay.explain(&row).await.unwrap();
        let refusing_gates: Vec<Gate> = why
            .gates
            .iter()
            .filter(|note| matches!(note.said, GateResult::Deny | GateResult::Ask))
            .map(|note| note.gate)
            .collect();
        let refused = row.decision == Decision::Refused;
        assert_eq!(refusing_gates, if refused { vec![row.gate] } else { Vec::new() }, "{why}");
        assert_eq!(
            why.gates.last().map(|note| note.said),
            Some(if refused { GateResult::NotReached } else { GateResult::Pass }),
            "{why}"
        );
        explanations.push(why);
    }
    assert_eq!(explanations.len(), 9);
    // The explanation uses the facts at the time of the call.
    assert!(
        explanations[0]
            .to_string()
            .contains("`proof` succeeded about the same `entity`: never in this session"),
        "{}",
        explanations[0]
    );
    assert!(explanations[4].to_string().contains("daily 0 of 600 used"), "{}", explanations[4]);
    let rule_result = |n: usize, rule: &str| {
        explanations[n].rules.iter().find(|note| note.rule == rule).map(|note| note.said)
    };
    assert_eq!(
        (rule_result(5, "proved"), rule_result(5, "daily")),
        (Some(GateResult::Pass), Some(GateResult::Deny))
    );
    assert_eq!(
        (&explanations[6].would, rule_result(6, "large")),
        (&PredictedOutcome::Ask, Some(GateResult::Ask))
    );
    // Rules that were not checked have no details.
    assert_eq!(
        (explanations[2].gates[4].said, rule_result(2, "proved")),
        (GateResult::Deny, Some(GateResult::NotReached))
    );
    assert!(
        explanations[2].rules.iter().all(|note| note.looked_at.is_empty() && note.why.is_none()),
        "{}",
        explanations[2]
    );
}

#[tokio::test]
async fn observed_rule_denies_nothing_and_counts_calls() {
    struct PanickingPolicy;
    impl Policy for PanickingPolicy {
        fn name(&self) -> &str {
            "broken"
        }
        fn check(
            &self,
            _: &toolgate::policy::PolicyInput<'_>,
        ) -> Result<toolgate::policy::Verdict, toolgate::policy::PolicyError> {
            panic!("an observed policy has a fault")
        }
        fn on_result(
            &self,
            _: &toolgate::policy::SuccessfulCall<'_>,
        ) -> Result<Vec<toolgate::session::state::NamedChange>, toolgate::policy::PolicyError>
        {
            panic!("an observed policy has a fault")
        }
    }
    let session = start_session(
        Agent::builder("a")
            .tool(entity_tool("act").open())
            .policy(observe(
                Deny::new("cap", ["act"])
                    .when("/amount", Condition::Above(5.into()))
                    .reason("too much"),
            ))
            .policy(observe(Limit::calls("two", ["act"], 2)))
            .policy(observe(
                Deny::ask("ask", ["act"]).when_cel("input.amount > 8").reason("ask first"),
            ))
            .policy(observe(PanickingPolicy)),
    );
    for amount in [1, 6, 9] {
        assert_eq!(
            call_and_next_step(&session, "act", json!({"entity": 1, "amount": amount})).await.0,
            "ok"
        );
    }
    let seen: Vec<Vec<String>> = session
        .rows()
        .await
        .unwrap()
        .iter()
        .map(|row| {
            row.facts.observed.iter().map(|o| format!("{} {} {}", o.rule, o.said, o.code)).collect()
        })
        .collect();
    let broken = "broken fault policy_fault".to_owned();
    assert_eq!(
        seen,
        [
            vec![broken.clone()],
            vec!["cap deny cap".to_owned(), broken.clone()],
            vec![
                "cap deny cap".to_owned(),
                "ask ask approval_required".to_owned(),
                broken,
                "two deny two".to_owned()
            ],
        ]
    );
}

#[tokio::test]
async fn only_common_approvers_can_answer() {
    let rule = |name: &str, approvers: &[&str]| {
        Deny::ask(name, ["act"]).approvers(approvers.iter().copied())
    };
    let session = start_session(
        Agent::builder("a")
            .tool(entity_tool("act"))
            .policy(rule("money", &["ann", "bob"]))
            .policy(rule("law", &["bob", "cem"])),
    );
    let answer = session.call("act", json!({"entity": 1})).await;
    let id = answer.outcome.error().unwrap().approval.clone().unwrap().id;
    for (approver, expected) in [("ann", false), ("cem", false), ("model", false), ("bob", true)] {
        assert_eq!(
            session.toolgate().answer_approval(&id, true, approver).await,
            Ok(expected),
            "{approver}"
        );
    }
    assert_eq!(call_and_next_step(&session, "act", json!({"entity": 1})).await.0, "ok");
}

#[test]
fn rule_files_are_merged_and_report_all_errors() {
    let limits = "[[policy]]\nname = \"daily\"\nrule = \"limit\"\ntools = [\"issue_refund\"]\nsum = \"/amount_usd\"\nmax = 500\n";
    let soft = "[[policy]]\nname = \"soft\"\nrule = \"ask\"\ntools = [\"issue_refund\"]\nwhen = 'sum_of(\"daily\") > 100'\n";
    let rules = RuleSet::parse_all([("limits.toml", limits), ("soft.toml", soft)]);
    assert_eq!(rules.names().collect::<Vec<_>>(), ["daily", "soft"]);
    assert!(crate::rule_diagnostics::refund_desk_builder().rules(rules).build().is_ok());
    let invalid_rules = RuleSet::parse_all([
        ("one.toml", "[[policy]]\nname = 3\n"),
        ("two.toml", "policy = 1"),
        ("three.toml", &limits.replace("issue_refund", "issue_refnd")),
    ]);
    let error =
        crate::rule_diagnostics::refund_desk_builder().rules(invalid_rules).build().unwrap_err();
    insta::assert_snapshot!(error, @"
    cannot build the agent `desk`:
      - one.toml:2:8: `name` must be a string, not a number; like `name = \"…\"`
      - one.toml:1:1: a rule needs a `rule` kind; one of `require`, `deny`, `ask`, `limit`, `sequence`, `read_before_write`, `flow`, `only_from`
      - two.toml:1:1: `policy` must be a list of tables, not a number; write `[[policy]]`
      - three.toml:4:10: policy `daily`: `issue_refnd` is not a tool of this agent; did you mean `issue_refund`?
    ");
}
