//! Tests that all policies are checked, the closest denial is shown, and every tool with effects is
//! governed.

use std::sync::Mutex;

use serde_json::json;
use toolgate::policy::{Policy, PolicyError, PolicyInput, ReadBeforeWrite, Sequence, Verdict};
use toolgate::{Agent, Effect, ErrorCategory, PromptSection, Tool, ToolError};

use crate::support::{BuildWithReplayCheck, TestWorld, closure_policy};

fn plain_tool(name: &str) -> Tool {
    Tool::dynamic(name, "A tool.", json!({"type": "object"}), |_, args| async move { Ok(args) })
}

fn deny_policy(name: &'static str) -> impl Policy {
    closure_policy(name, move |_: &PolicyInput<'_>| {
        Ok(Verdict::deny(ToolError::new(ErrorCategory::Business, name, "no")))
    })
}

#[tokio::test]
async fn closest_then_first_declared_denial_is_shown() {
    let cases: Vec<(Vec<&'static str>, &str)> = vec![
        (vec!["agent", "prompt", "section", "tool"], "tool"),
        (vec!["agent", "prompt", "section"], "section"),
        (vec!["agent", "prompt"], "prompt"),
        (vec!["agent", "agent2"], "agent"),
        (vec!["agent2", "agent"], "agent2"),
    ];
    for (levels, shown) in cases {
        let mut section = PromptSection::new("s").tool(plain_tool("t"));
        if levels.contains(&"section") {
            section = section.policy(deny_policy("section"));
        }
        let mut agent = Agent::builder("a").section(section);
        for level in levels {
            agent = match level {
                "prompt" => agent.prompt_policy(deny_policy("prompt")),
                "tool" => agent.tool_policy("t", deny_policy("tool")),
                "section" => agent,
                name => agent.policy(deny_policy(name)),
            };
        }
        let gate = crate::support::runtime_builder().agent(agent.build().unwrap()).build_checked();
        let answer = gate.session("a", "alice", "s").call("t", json!({})).await;
        assert_eq!(
            (answer.outcome.error().map(|e| &*e.code), answer.rule.as_deref()),
            (Some(shown), Some(shown))
        );
    }
}

#[tokio::test]
async fn section_policy_governs_only_its_tools() {
    let agent = Agent::builder("a")
        .section(PromptSection::new("s").tool(plain_tool("inside")).policy(deny_policy("section")))
        .tool(plain_tool("outside").open())
        .build()
        .unwrap();
    let session =
        crate::support::runtime_builder().agent(agent).build_checked().session("a", "alice", "s");
    assert!(session.call("inside", json!({})).await.outcome.error().is_some());
    assert!(session.call("outside", json!({})).await.outcome.success().is_some());
}

#[tokio::test]
async fn deny_beats_ask_and_every_policy_is_checked() {
    static CHECKED_POLICIES: Mutex<Vec<&str>> = Mutex::new(Vec::new());
    fn recording_policy(name: &'static str, verdict: Verdict) -> impl Policy {
        closure_policy(name, move |_: &PolicyInput<'_>| {
            CHECKED_POLICIES.lock().unwrap().push(name);
            Ok::<_, PolicyError>(verdict.clone())
        })
    }
    let world = TestWorld::without_replay_check(|a| {
        a.policy(recording_policy("allows", Verdict::allow()))
            .policy(recording_policy("asks", Verdict::ask("?")))
            .policy(recording_policy(
                "denies",
                Verdict::deny(ToolError::new(ErrorCategory::Business, "no", "no")),
            ))
            .policy(recording_policy("allows_too", Verdict::allow()))
    });
    let answer = world.session.call("act", json!({"how": "ok"})).await;
    assert_eq!(answer.outcome.error().map(|e| &*e.code), Some("no"));
    assert_eq!(*CHECKED_POLICIES.lock().unwrap(), ["allows", "asks", "denies", "allows_too"]);
}

#[tokio::test]
async fn sequence_rule_suggests_next_tool() {
    let tools = ["lint", "build", "test", "deploy"]
        .map(plain_tool)
        .map(|tool| tool.effect(Effect::Write).open());
    let agent = Agent::builder("ci")
        .tools(tools)
        .policy(
            Sequence::new("pipeline").after("deploy", ["test", "build"]).after("build", ["lint"]),
        )
        .build()
        .unwrap();
    let session =
        crate::support::runtime_builder().agent(agent).build_checked().session("ci", "alice", "s");
    let mut called = Vec::new();
    // Following the next steps reaches the call.
    for _ in 0..10 {
        let mut tool = "deploy".to_owned();
        let answer = loop {
            called.push(tool.clone());
            let answer = session.call(&tool, json!({})).await;
            match answer.outcome.error().and_then(|e| e.next.clone()) {
                Some(next) => tool = next.tool,
                None => break answer,
            }
        };
        assert!(answer.outcome.success().is_some(), "{answer:?}");
        if tool == "deploy" {
            assert_eq!(called, ["deploy", "lint", "deploy", "build", "deploy", "test", "deploy"]);
            return;
        }
    }
    panic!("{called:?}");
}

#[test]
fn agent_build_reports_all_errors_at_once() {
    let bad =
        Tool::dynamic(
            "Bad Name",
            "",
            json!({"type": "strange"}),
            |_, args| async move { Ok(args) },
        );
    let shown = Tool::dynamic(
        "shown",
        "Shown.",
        json!({"type": "object", "properties": {"n": {"type": "integer"}}}),
        |_, args| async move { Ok(args) },
    )
    .output_schema(json!({"type": "string"}))
    .example("wrong both ways", json!({"m": 1}), json!(2))
    .open();
    let error = Agent::builder("a")
        .tool(bad)
        .tool(shown)
        .tool(plain_tool("twice").open())
        .tool(plain_tool("twice").open())
        .tool(plain_tool("ungoverned"))
        .tool_policy("twise", deny_policy("typo"))
        .policy(deny_policy("same"))
        .prompt_policy(deny_policy("same"))
        .describe("twice", "Another description.")
        .describe("gone", "No such tool.")
        .policy(Sequence::new("circle").after("a", ["b"]).after("b", ["a"]))
        .build()
        .unwrap_err();
    insta::assert_snapshot!(error, @"
    cannot build the agent `a`:
      - policy `typo`: the rule is attached to `twise`, which is not a tool of this agent; did you mean `twice`?
      - two policies have the name `same`; give each rule its own name
      - policy `circle`: the requirements form a cycle: a needs b needs a; remove one of these requirements
      - policy `circle`: `a` is not a tool of this agent; known names: `Bad Name`, `shown`, `twice`, `ungoverned`
      - policy `circle`: `b` is not a tool of this agent; known names: `Bad Name`, `shown`, `twice`, `ungoverned`
      - `Bad Name` is not a valid tool name: use 1 to 64 of a-z, 0-9, `_` and `-`
      - the description of `Bad Name` has 0 characters; allowed are 1 to 1,024
      - input schema of `Bad Name`: \"strange\" is not a type; the types are array, boolean, integer, null, number, object, string (at `/type`)
      - the example `wrong both ways` of `shown` has an invalid input: `shown` has no `m` (it takes `n`); an example must be a valid call; fix its `input`, or remove the example
      - the example `wrong both ways` of `shown` has an invalid output: shown: the value must be a string; got 2; an example must be a valid call; fix its `output`, or remove the example
      - `twice` does not accept another description
      - two tools have the name `twice`
      - a description is set for `gone`, which is not a tool of this agent
    ");
}

#[test]
fn tool_with_effects_needs_enforced_policy() {
    let write = || {
        Tool::dynamic(
            "write_file",
            "Writes.",
            json!({"type": "object", "properties": {"path": {"type": "string"}}}),
            |_, _| async { Ok(json!(1)) },
        )
    };
    let build = |tool: Tool| {
        Agent::builder("a").tool(write()).tool(tool).policy(ReadBeforeWrite::default()).build()
    };
    assert!(
        build(plain_tool("refund"))
            .unwrap_err()
            .to_string()
            .contains("has effects, but no enforced policy governs it")
    );
    assert!(build(plain_tool("refund").effect(Effect::Read)).is_ok());
    assert!(build(plain_tool("refund").open()).is_ok());
}

#[tokio::test]
async fn policies_are_notified_of_rollbacks() {
    struct RollbackRecorder(&'static Mutex<Vec<String>>);
    impl Policy for RollbackRecorder {
        fn name(&self) -> &str {
            "recorder"
        }
        fn check(&self, _: &PolicyInput<'_>) -> Result<Verdict, PolicyError> {
            Ok(Verdict::allow())
        }
        fn on_rollback(&self, ask: &PolicyInput<'_>, error: &ToolError) {
            self.0.lock().unwrap().push(format!("{} {}", ask.tool.name(), error.code));
        }
    }
    static ROLLBACKS: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let world = TestWorld::new(|a| a.policy(RollbackRecorder(&ROLLBACKS)));
    world.session.call("act", json!({"how": "ok"})).await;
    world.session.call("act", json!({"how": "fail"})).await;
    world.session.call("act", json!({"how": "junk"})).await;
    assert_eq!(*ROLLBACKS.lock().unwrap(), ["act no_stock", "act invalid_result"]);
}
