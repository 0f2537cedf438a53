//! Defines the tools of a deployment pipeline, with made-up results.

use serde_json::{Value, json};
use toolgate::policy::source::RuleSet;
use toolgate::{Agent, AgentBuildError, Effect, Tool};

fn commit_schema() -> Value {
    json!({"type": "object", "properties": {"commit": {"type": "string"}}, "required": ["commit"]})
}

fn test_tool(name: &str) -> Tool {
    Tool::dynamic(name, "Run tests of a commit.", commit_schema(), |_, args: Value| async move {
        Ok(if args["commit"] == "bad0000" {
            json!({"passed": 11, "failed": 1})
        } else {
            json!({"passed": 12, "failed": 0})
        })
    })
    .effect(Effect::Read)
    .entity("commit", "/commit")
    .proves("/passed")
    .proves("/failed")
}

/// Builds the agent with its rules.
pub(crate) fn agent() -> Result<Agent, AgentBuildError> {
    let environment = json!({"enum": ["staging", "production"]});
    Agent::builder("pipeline")
        .tool(Tool::dynamic("lint", "Lint.", json!({"type": "object", "properties": {}}), |_, _| async { Ok(json!({"warnings": 0})) }).effect(Effect::Read))
        .tool(test_tool("run_tests"))
        .tool(test_tool("run_smoke_tests"))
        .tool(
            Tool::dynamic("build", "Build a commit.", commit_schema(), |_, args: Value| async move { Ok(json!({"image": format!("app:{}", args["commit"])})) })
                .effect(Effect::Write)
                .entity("commit", "/commit"),
        )
        .tool(Tool::dynamic(
            "deploy",
            "Deploy a commit.",
            json!({"type": "object", "required": ["commit", "environment"], "properties": {"commit": {"type": "string"}, "environment": environment}}),
            |_, args: Value| async move { Ok(json!({"live": args["commit"]})) },
        ))
        .tool(Tool::dynamic(
            "roll_back",
            "Roll back to the previous version.",
            json!({"type": "object", "required": ["environment"], "properties": {"environment": environment, "reason": {"type": "string"}}}),
            |_, _| async { Ok(json!({"live": "before"})) },
        ))
        .tool(Tool::dynamic("page_on_call", "Page the on-call engineer.", json!({"type": "object", "properties": {"why": {"type": "string"}}}), |_, _| async {
            Ok(json!({"paged": true}))
        }))
        .rules(RuleSet::parse("deployment/policy.toml", include_str!("policy.toml")))
        .build()
}
