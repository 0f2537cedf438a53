//! Tests that errors name only tools that the principal can reach.

use serde_json::{Value, json};
use toolgate::policy::source::RuleSet;
use toolgate::policy::{Condition, Deny, Policy};
use toolgate::{Agent, Effect, Tool};

use super::{entity_tool, start_session};

/// Denies every call and redirects the model to a tool.
struct RedirectingPolicy(&'static str, Value);

impl Policy for RedirectingPolicy {
    fn name(&self) -> &str {
        "sends"
    }
    fn governs(&self, tool: &toolgate::ToolSpec) -> bool {
        tool.name() == "act"
    }
    fn check(
        &self,
        _: &toolgate::policy::PolicyInput<'_>,
    ) -> Result<toolgate::policy::Verdict, toolgate::policy::PolicyError> {
        let mut error = toolgate::ToolError::new(toolgate::ErrorCategory::Business, "no", "no");
        error.redirect_tool = Some(self.0.to_owned());
        error.next =
            Some(toolgate::NextStep { tool: self.0.to_owned(), arguments: self.1.clone() });
        Ok(toolgate::policy::Verdict::deny(error))
    }
}

#[tokio::test]
async fn policy_redirect_to_unreachable_tool_is_removed() {
    for (to, arguments, has_redirect, has_next) in [
        ("person", json!({"n": 5}), true, true),
        ("hidden", json!({"n": 5}), false, false),
        ("nowhere", json!({"n": 5}), false, false),
        // The refused call is not its own next step.
        ("act", json!({"entity": 1}), true, false),
    ] {
        let agent = Agent::builder("a")
            .tool(entity_tool("act"))
            .tool(entity_tool("person").open())
            .tool(entity_tool("hidden").open().visible_to(["bob"]))
            .policy(RedirectingPolicy(to, arguments));
        let answer = start_session(agent).call("act", json!({"entity": 1})).await;
        let error = answer.outcome.error().unwrap();
        assert_eq!(
            (&*error.code, error.redirect_tool.is_some(), error.next.is_some()),
            ("no", has_redirect, has_next),
            "{to}: {error:?}"
        );
    }
}

#[tokio::test]
async fn tool_redirect_to_unreachable_tool_is_removed() {
    use toolgate::store::PauseTarget;
    for (to, paused, is_reachable) in [
        ("person", false, true),
        ("person", true, false),
        ("hidden", false, false),
        ("nowhere", false, false),
    ] {
        let fails =
            Tool::dynamic("fails", "Fails.", json!({"type": "object"}), move |_, _| async move {
                Err(toolgate::Failure::business("no", "not here").redirect(to))
            });
        let agent = Agent::builder("a")
            .tool(fails.effect(Effect::Read))
            .tool(entity_tool("person").open())
            .tool(entity_tool("hidden").open().visible_to(["bob"]));
        let session = start_session(agent);
        if paused {
            session.toolgate().pause(PauseTarget::Tool(to.into()), "incident").await.unwrap();
        }
        let answer = session.call("fails", json!({})).await;
        let error = answer.outcome.error().unwrap();
        let actual = (&*error.code, error.message.as_str(), error.redirect_tool.as_deref());
        assert_eq!(
            actual,
            ("no", "not here", is_reachable.then_some(to)),
            "the failure is the same with and without a redirect"
        );
    }
}

#[tokio::test]
async fn denial_without_next_step_says_repeating_is_useless() {
    let cap = || {
        Deny::new("cap", ["act"])
            .when("/amount", Condition::Above(5.into()))
            .reason("At most five.")
    };
    let session = start_session(Agent::builder("a").tool(entity_tool("act")).policy(cap()));
    let answer = session.call("act", json!({"entity": 1, "amount": 6})).await;
    assert_eq!(
        answer.outcome.error().unwrap().message,
        "At most five. Repeating this call does not help."
    );
    // A redirect must not name a tool that the principal cannot see.
    let hidden = entity_tool("person").open().visible_to(["bob"]);
    let session = start_session(
        Agent::builder("a").tool(entity_tool("act")).tool(hidden).policy(cap().redirect("person")),
    );
    let answer = session.call("act", json!({"entity": 1, "amount": 6})).await;
    assert!(
        !serde_json::to_string(&answer.outcome.to_json()).unwrap().contains("person"),
        "{answer:?}"
    );
}

#[tokio::test]
async fn invisible_prerequisite_is_not_named() {
    let generic_message = "a step that this caller cannot take must come first; tell the user";
    let require = |any_of: &str, fields: &str| {
        format!("rule = \"require\"\ntools = [\"act\"]\nany_of = {any_of}\n{fields}")
    };
    let sequence = |first: &str| format!("rule = \"sequence\"\nafter = {{ act = {first} }}");
    for (rule, message, next_tool) in [
        (require("[\"hidden\"]", ""), generic_message, None),
        (require("[\"hidden\"]", "code = \"other\""), generic_message, None),
        (require("[\"hidden\"]", "reason = \"Call `hidden` first.\""), generic_message, None),
        (
            require("[\"hidden\"]", "reason = \"A manager must look at it.\""),
            "A manager must look at it.",
            None,
        ),
        (
            require("[\"hidden\"]", "where = [{ argument = \"/amount\", above = 5 }]"),
            generic_message,
            None,
        ),
        (
            require("[\"hidden\", \"proof\"]", ""),
            "`proof` must have succeeded first in this session",
            Some("proof"),
        ),
        (
            require("[\"proof\"]", ""),
            "`proof` must have succeeded first in this session",
            Some("proof"),
        ),
        (sequence("[\"hidden\"]"), generic_message, None),
        (sequence("[\"hidden\", \"proof\"]"), generic_message, None),
        (
            sequence("[\"proof\"]"),
            "`act` needs `proof` to have succeeded first in this session",
            Some("proof"),
        ),
    ] {
        let agent = Agent::builder("a")
            .tool(entity_tool("act"))
            .tool(entity_tool("proof").effect(Effect::Read))
            .tool(entity_tool("hidden").effect(Effect::Read).visible_to(["bob"]))
            .rules(RuleSet::parse("policy.toml", &format!("[[policy]]\nname = \"r\"\n{rule}\n")));
        let answer = start_session(agent).call("act", json!({"entity": 1, "amount": 9})).await;
        let error = answer.outcome.error().unwrap();
        assert_eq!(
            (error.message.as_str(), error.next.as_ref().map(|n| n.tool.as_str())),
            (message, next_tool),
            "{rule}"
        );
        assert!(
            !serde_json::to_string(&answer.outcome.to_json()).unwrap().contains("hidden"),
            "{answer:?}"
        );
    }
}
