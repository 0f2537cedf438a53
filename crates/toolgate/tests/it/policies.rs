//! Policies: all are asked, the closest denial is shown, and nothing with effects is ungoverned.

use std::sync::Mutex;

use serde_json::json;
use toolgate::policy::{Ask, Fault, Policy, ReadBeforeWrite, Sequence, Verdict};
use toolgate::{Agent, Category, Effect, Section, Tool, ToolError};

use crate::support::{Built, World, rule};

fn plain(name: &str) -> Tool {
    Tool::dynamic(name, "A tool.", json!({"type": "object"}), |_, args| async move { Ok(args) })
}

fn deny(name: &'static str) -> impl Policy {
    rule(name, move |_: &Ask<'_>| Ok(Verdict::deny(ToolError::new(Category::Business, name, "no"))))
}

#[tokio::test]
async fn the_closest_denial_is_shown_then_the_first_declared() {
    let cases: Vec<(Vec<&'static str>, &str)> = vec![
        (vec!["agent", "prompt", "section", "tool"], "tool"),
        (vec!["agent", "prompt", "section"], "section"),
        (vec!["agent", "prompt"], "prompt"),
        (vec!["agent", "agent2"], "agent"),
        (vec!["agent2", "agent"], "agent2"),
    ];
    for (levels, shown) in cases {
        let mut section = Section::new("s").tool(plain("t"));
        if levels.contains(&"section") {
            section = section.policy(deny("section"));
        }
        let mut agent = Agent::builder("a").section(section);
        for level in levels {
            agent = match level {
                "prompt" => agent.prompt_policy(deny("prompt")),
                "tool" => agent.tool_policy("t", deny("tool")),
                "section" => agent,
                name => agent.policy(deny(name)),
            };
        }
        let gate = crate::support::gate().agent(agent.build().unwrap()).built();
        let answer = gate.session("a", "alice", "s").call("t", json!({})).await;
        assert_eq!((answer.outcome.error().map(|e| &*e.code), answer.rule.as_deref()), (Some(shown), Some(shown)));
    }
}

#[tokio::test]
async fn a_section_policy_governs_its_own_tools_only() {
    let agent = Agent::builder("a")
        .section(Section::new("s").tool(plain("inside")).policy(deny("section")))
        .tool(plain("outside").open())
        .build()
        .unwrap();
    let session = crate::support::gate().agent(agent).built().session("a", "alice", "s");
    assert!(session.call("inside", json!({})).await.outcome.error().is_some());
    assert!(session.call("outside", json!({})).await.outcome.success().is_some());
}

#[tokio::test]
async fn deny_beats_ask_beats_allow_and_all_are_asked() {
    static ASKED: Mutex<Vec<&str>> = Mutex::new(Vec::new());
    fn note(name: &'static str, verdict: Verdict) -> impl Policy {
        rule(name, move |_: &Ask<'_>| {
            ASKED.lock().unwrap().push(name);
            Ok::<_, Fault>(verdict.clone())
        })
    }
    let world = World::unwatched(|a| {
        a.policy(note("allows", Verdict::allow()))
            .policy(note("asks", Verdict::ask("?")))
            .policy(note("denies", Verdict::deny(ToolError::new(Category::Business, "no", "no"))))
            .policy(note("allows_too", Verdict::allow()))
    });
    let answer = world.session.call("act", json!({"how": "ok"})).await;
    assert_eq!(answer.outcome.error().map(|e| &*e.code), Some("no"));
    assert_eq!(*ASKED.lock().unwrap(), ["allows", "asks", "denies", "allows_too"]);
}

#[tokio::test]
async fn a_pipeline_goes_in_order_and_says_what_comes_next() {
    let tools = ["lint", "build", "test", "deploy"].map(plain).map(|tool| tool.effect(Effect::Write).open());
    let agent = Agent::builder("ci")
        .tools(tools)
        .policy(Sequence::new("pipeline").after("deploy", ["test", "build"]).after("build", ["lint"]))
        .build()
        .unwrap();
    let session = crate::support::gate().agent(agent).built().session("ci", "alice", "s");
    let mut asked = Vec::new();
    // Whatever is asked for, playing `next` reaches it.
    for _ in 0..10 {
        let mut tool = "deploy".to_owned();
        let answer = loop {
            asked.push(tool.clone());
            let answer = session.call(&tool, json!({})).await;
            match answer.outcome.error().and_then(|e| e.next.clone()) {
                Some(next) => tool = next.tool,
                None => break answer,
            }
        };
        assert!(answer.outcome.success().is_some(), "{answer:?}");
        if tool == "deploy" {
            assert_eq!(asked, ["deploy", "lint", "deploy", "build", "deploy", "test", "deploy"]);
            return;
        }
    }
    panic!("{asked:?}");
}

#[test]
fn what_is_wrong_with_an_agent_is_said_all_at_once() {
    let bad = Tool::dynamic("Bad Name", "", json!({"type": "strange"}), |_, args| async move { Ok(args) });
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
        .tool(plain("twice").open())
        .tool(plain("twice").open())
        .tool(plain("ungoverned"))
        .tool_policy("twise", deny("typo"))
        .policy(deny("same"))
        .prompt_policy(deny("same"))
        .describe("twice", "Another description.")
        .describe("gone", "Nobody.")
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
fn a_tool_with_effects_and_no_rule_is_refused_and_hearing_is_not_ruling() {
    let write = || {
        Tool::dynamic("write_file", "Writes.", json!({"type": "object", "properties": {"path": {"type": "string"}}}), |_, _| async {
            Ok(json!(1))
        })
    };
    let build = |tool: Tool| Agent::builder("a").tool(write()).tool(tool).policy(ReadBeforeWrite::default()).build();
    assert!(build(plain("refund")).unwrap_err().to_string().contains("has effects, but no enforced policy governs it"));
    assert!(build(plain("refund").effect(Effect::Read)).is_ok());
    assert!(build(plain("refund").open()).is_ok());
}

#[tokio::test]
async fn policies_hear_of_rollbacks() {
    struct Told(&'static Mutex<Vec<String>>);
    impl Policy for Told {
        fn name(&self) -> &str {
            "told"
        }
        fn check(&self, _: &Ask<'_>) -> Result<Verdict, Fault> {
            Ok(Verdict::allow())
        }
        fn on_rollback(&self, ask: &Ask<'_>, error: &ToolError) {
            self.0.lock().unwrap().push(format!("{} {}", ask.tool.name(), error.code));
        }
    }
    static HEARD: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let world = World::new(|a| a.policy(Told(&HEARD)));
    world.session.call("act", json!({"how": "ok"})).await;
    world.session.call("act", json!({"how": "fail"})).await;
    world.session.call("act", json!({"how": "junk"})).await;
    assert_eq!(*HEARD.lock().unwrap(), ["act no_stock", "act invalid_result"]);
}
