//! Tests that the tool definitions of an upstream do not prevent a configuration from loading.

mod secrets;

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Value, json};
use toolgate::policy::Diagnostic;
use toolgate::{
    Agent, CheckedArguments, Failure, Handler, Permit, ToolContext, Toolgate, ToolgateBuilder,
};
use toolgate_config::{Backend, Config, HttpTool, RemoteToolSpec, UnusableTool, UpstreamConfig};

/// Holds the tools of each upstream by name.
struct FakeUpstreams {
    tools: BTreeMap<&'static str, Vec<RemoteToolSpec>>,
    live: bool,
}

struct SucceedingHandler;

#[async_trait]
impl Handler for SucceedingHandler {
    async fn run(
        &self,
        _: &Permit,
        _: ToolContext,
        _: &CheckedArguments,
    ) -> Result<Value, Failure> {
        Ok(json!({"ran": true}))
    }
}

impl Backend for FakeUpstreams {
    fn accepted_tools(&self, upstream: &str) -> Option<Vec<RemoteToolSpec>> {
        self.tools.get(upstream).cloned()
    }

    fn remote_handler(&self, _: &UpstreamConfig, _: &str) -> Arc<dyn Handler> {
        Arc::new(SucceedingHandler)
    }

    fn http_handler(&self, _: &HttpTool) -> Arc<dyn Handler> {
        Arc::new(SucceedingHandler)
    }

    fn is_live(&self) -> bool {
        self.live
    }
}

fn remote_tool(name: &str, input: Value) -> RemoteToolSpec {
    RemoteToolSpec { name: name.to_owned(), description: "Does.".to_owned(), input, output: None }
}

/// Builds a configuration with two tools of one upstream: `x`, which a case changes, and `y`.
fn config_with_upstream(of_x: &str, rules: &str) -> String {
    format!(
        "[upstreams.u]\ncommand = \"u\"\nprefix = \"\"\n[tools.x]\nkind = \"mcp\"\nupstream = \"u\"\n{of_x}\n\
         [tools.y]\nkind = \"mcp\"\nupstream = \"u\"\npolicy = \"open\"\n{rules}\n"
    )
}

fn build_with_tools(
    text: &str,
    tools: Vec<RemoteToolSpec>,
    live: bool,
) -> Result<(Vec<Agent>, Vec<UnusableTool>), String> {
    let backend = FakeUpstreams { tools: BTreeMap::from([("u", tools)]), live };
    Config::parse("toolgate.toml", text)
        .with_backend(&backend)
        .build_with_upstreams(None)
        .map_err(|error| error.render(false))
}

async fn call_code(agents: Vec<Agent>, tool: &str, arguments: Value) -> String {
    let gate =
        agents.into_iter().fold(Toolgate::builder(), ToolgateBuilder::agent).build().unwrap();
    let answer = gate.session("default", "alice", "s").call(tool, arguments).await;
    answer.outcome.error().map_or("ok", |error| &*error.code).to_owned()
}

#[tokio::test]
async fn mismatch_quarantines_only_its_tool() {
    let text = |properties: Value| json!({"type": "object", "properties": properties});
    let amount = || text(json!({"amount": {"type": "number"}}));
    let deny = |tools: &str, what: &str| {
        format!("[[policy]]\nname = \"cap\"\nrule = \"deny\"\ntools = {tools}\n{what}\n")
    };
    let open = "policy = \"open\"";
    for (case, of_x, rules, input, why) in [
        ("invalid schema", open, String::new(), text(json!({"a": {"type": "strin"}})), "input schema of `x`"),
        ("null", open, String::new(), json!({"type": "null"}), "are `null`"),
        (
            "secret entity",
            "effect = \"read\"\nentities = { customer = \"/id\" }",
            String::new(),
            text(json!({"id": {"type": "string", "writeOnly": true}})),
            "is its secret",
        ),
        ("missing command argument", "policy = \"open\"\nshell = \"/command\"", String::new(), amount(), "which is not one of its arguments"),
        (
            "invalid example",
            "policy = \"open\"\nexamples = [{ description = \"one\", input = { cent = 1 } }]",
            String::new(),
            amount(),
            "invalid input",
        ),
        (
            "unknown argument in a condition",
            "",
            deny("[\"x\"]", "where = [{ argument = \"/amuont\", above = 5 }]"),
            amount(),
            "policy `cap`: `x` has no argument `amuont`; did you mean `amount`?",
        ),
        ("unknown argument in an expression", "", deny("[\"x\"]", "when = \"input.amuont > 5\""), amount(), "has no argument `amuont`"),
        (
            "condition of another type",
            "",
            deny("[\"x\"]", "where = [{ argument = \"/amount\", above = 5 }]"),
            text(json!({"amount": {"type": "string"}})),
            "is declared as string",
        ),
        (
            "secret limit owner",
            "",
            "[[policy]]\nname = \"cap\"\nrule = \"limit\"\ntools = [\"x\"]\ncalls = 3\nper = \"/id\"\n".to_owned(),
            text(json!({"id": {"type": "string", "writeOnly": true}})),
            "is secret",
        ),
    ] {
        let text = config_with_upstream(of_x, &rules);
        let tools = || vec![remote_tool("x", input.clone()), remote_tool("y", json!({"type": "object"}))];
        let (agents, unusable) = build_with_tools(&text, tools(), true).unwrap_or_else(|error| panic!("{case}: {error}"));
        let [UnusableTool { agent, name, upstream, tool, reason, is_awaited: false }] = &unusable[..] else {
            panic!("{case}: {unusable:?}")
        };
        assert_eq!([agent, name, upstream, tool], ["default", "x", "u", "x"], "{case}");
        assert!(reason.contains(why), "{case}: {reason}");
        let arguments = json!({"amuont": 1, "amount": 1, "id": "A"});
        assert_eq!(call_code(agents, "x", arguments.clone()).await, "definition_changed", "{case}");
        assert_eq!(call_code(build_with_tools(&text, tools(), true).unwrap().0, "y", arguments).await, "ok", "{case}");
        // A check without live upstreams reports the error.
        let error = build_with_tools(&text, tools(), false).unwrap_err();
        assert!(error.contains("error: "), "{case}: {error}");
        // The file loads if the upstream was never seen.
        let backend = FakeUpstreams { tools: BTreeMap::new(), live: true };
        assert!(Config::parse("toolgate.toml", &text).with_backend(&backend).build_with_upstreams(None).unwrap().1.is_empty(), "{case}");
    }
}

#[test]
fn error_in_file_itself_prevents_loading() {
    let tools = || {
        vec![
            remote_tool("x", json!({"type": "object", "properties": {"a": {"type": "strin"}}})),
            remote_tool("y", json!({"type": "object"})),
        ]
    };
    for (of_x, rules, why) in [
        ("", "", "`x` has effects, but no enforced policy governs it"),
        (
            "policy = \"open\"",
            "[[policy]]\nname = \"r\"\nrule = \"require\"\ntools = [\"y\"]\nany_of = [\"x\"]\nsame = { a = \"/a\" }\n",
            "entity",
        ),
        (
            "policy = \"open\"",
            "[tools.own]\ninput = { type = \"object\", properties = { amount = { type = \"number\" } } }\n\
             [[policy]]\nname = \"r\"\nrule = \"deny\"\ntools = [\"own\"]\nwhere = [{ argument = \"/amuont\", above = 5 }]\n",
            "did you mean `amount`?",
        ),
    ] {
        let error =
            build_with_tools(&config_with_upstream(of_x, rules), tools(), true).unwrap_err();
        assert!(error.contains(why) && error.contains("--> toolgate.toml:"), "{why}: {error}");
    }
}

#[test]
fn rule_for_undeclared_upstream_tool_is_no_error() {
    let rule = |tool: &str| {
        format!(
            "[[policy]]\nname = \"r\"\nrule = \"deny\"\ntools = [\"{tool}\"]\nwhen = \"true\"\n"
        )
    };
    let text = |undeclared: &str, tool: &str| {
        let declared = "[tools.git_status]\ninput = { type = \"object\" }\npolicy = \"open\"\n\
                   [tools.git_wipe]\ninput = { type = \"object\" }\npolicy = \"open\"\n[tools.find]\ninput = { type = \"object\" }\npolicy = \"open\"\n\
                   [tools.wipe]\nkind = \"mcp\"\nupstream = \"git\"\ntool = \"clean_all\"\npolicy = \"open\"\n";
        format!(
            "[upstreams.git]\ncommand = \"git\"\nundeclared = \"{undeclared}\"\n{declared}{}",
            rule(tool)
        )
    };
    for (undeclared, tool, seen, live, expected) in [
        ("ask", "git_commit", false, false, None),
        ("open", "git_commit", false, true, None),
        ("read", "git_log", true, false, None),
        // The upstream was seen and does not have the tool.
        ("read", "git_comit", true, false, Some("did you mean `git_commit`?")),
        ("read", "git_comit", true, true, None),
        // No upstream can provide the tool.
        ("deny", "git_commit", false, true, Some("is not a tool of this agent")),
        ("read", "gut_commit", false, true, Some("is not a tool of this agent")),
        // Similarity to a declared tool does not matter.
        ("read", "git_statsu", false, true, None),
        ("read", "git_find", false, true, None),
        // The upstream has the tool, but a table gives it another name.
        ("open", "git_clean_all", true, true, Some("`git_clean_all` is not a tool of this agent")),
        ("open", "git_clean_all", false, true, Some("`git_clean_all` is not a tool of this agent")),
        ("open", "git_clean_al", false, true, None),
        ("open", "git_clean_al", true, true, None),
    ] {
        let case = format!("{undeclared} {tool} {seen} {live}");
        let object = || json!({"type": "object"});
        let tools = BTreeMap::from([(
            "git",
            vec![
                remote_tool("commit", object()),
                remote_tool("log", object()),
                remote_tool("clean_all", object()),
            ],
        )]);
        let backend = FakeUpstreams { tools: if seen { tools } else { BTreeMap::new() }, live };
        let built = Config::parse("toolgate.toml", &text(undeclared, tool))
            .with_backend(&backend)
            .build_with_upstreams(None);
        match (built, expected) {
            (Ok((agents, unusable)), None) => {
                let is_offered = seen && tool == "git_log";
                assert_eq!(
                    unusable.iter().any(|entry| entry.name == tool),
                    !is_offered,
                    "{case}: {unusable:?}"
                );
                let has_warning = agents[0]
                    .warnings()
                    .iter()
                    .any(|warning| warning.message.contains(tool) && warning.span.is_some());
                assert!(has_warning || is_offered, "{case}: {:?}", agents[0].warnings());
                // The whole upstream is quarantined, including tools that a table declares.
                assert_eq!(
                    unusable.iter().any(|entry| entry.name == "git_commit"),
                    tool == "git_commit" || (seen && tool != "git_log"),
                    "{case}: {unusable:?}"
                );
                let is_held = |entry: &UnusableTool| entry.name == "wipe" && !entry.is_awaited;
                assert_eq!(
                    unusable.iter().any(is_held),
                    seen && tool != "git_log",
                    "{case}: {unusable:?}"
                );
            }
            (Err(error), Some(why)) => {
                assert!(error.render(false).contains(why), "{case}: {}", error.render(false))
            }
            (built, _) => panic!("{case}: {built:?}"),
        }
    }
}

/// Adds a quarantined tool to the upstream `git`.
struct QuarantiningUpstreams(FakeUpstreams);

impl Backend for QuarantiningUpstreams {
    fn accepted_tools(&self, upstream: &str) -> Option<Vec<RemoteToolSpec>> {
        self.0.accepted_tools(upstream)
    }

    fn quarantined_tools(&self, upstream: &str) -> Vec<String> {
        if upstream == "git" { vec!["merge".to_owned()] } else { Vec::new() }
    }

    fn remote_handler(&self, upstream: &UpstreamConfig, tool: &str) -> Arc<dyn Handler> {
        self.0.remote_handler(upstream, tool)
    }

    fn http_handler(&self, tool: &HttpTool) -> Arc<dyn Handler> {
        self.0.http_handler(tool)
    }
}

#[tokio::test]
async fn hook_for_undeclared_upstream_tool_is_deferred() {
    let declared = "[tools.git_status]\ninput = { type = \"object\" }\npolicy = \"open\"\n";
    let rule = "[tools.own_tool]\ninput = { type = \"object\" }\n\
                [[policy]]\nname = \"h\"\nrule = \"deny\"\ntools = [\"own_tool\"]\nwhen = \"false\"\n";
    for (tools, extra, seen, is_deferred) in [
        ("git_*", declared, false, Some(false)),
        ("git_*", "", false, Some(true)),
        ("git_push", declared, false, Some(true)),
        ("git_p*|git_merge", declared, false, Some(true)),
        ("git_merge", declared, true, Some(true)),
        ("git_push", declared, true, Some(false)),
        // The pattern matches every future tool.
        ("*", "", false, Some(false)),
        // The upstream does not have the tool, or no upstream can have it.
        ("git_psuh", declared, true, None),
        ("git_rebase", declared, true, None),
        ("gut_*", declared, false, None),
        ("git_push|own_tol", declared, false, None),
        ("git_statsu", declared, false, Some(true)),
        ("git_statsu*", declared, false, Some(true)),
        ("git_*psuh*", "", true, None),
        ("git_*psuh*", "", false, None),
        // Two rules with one name are an error with any upstream.
        ("git_*", rule, false, None),
    ] {
        let case = format!("{tools} {extra} {seen}");
        // Another upstream may have the same tool.
        let upstreams = ["git", "gits"]
            .map(|name| format!("[upstreams.{name}]\ncommand = \"x\"\nundeclared = \"open\"\n"))
            .concat();
        let text = format!(
            "{upstreams}{extra}[[hooks]]\nname = \"h\"\ncommand = \"./h\"\ntools = [\"{tools}\"]\n"
        );
        let push = || vec![remote_tool("push", json!({"type": "object"}))];
        let known = if seen {
            BTreeMap::from([("git", push()), ("gits", push())])
        } else {
            BTreeMap::from([("gits", push())])
        };
        let known = if tools == "*" { BTreeMap::new() } else { known };
        let backend = QuarantiningUpstreams(FakeUpstreams { tools: known, live: true });
        match (
            Config::parse("toolgate.toml", &text).with_backend(&backend).build_with_upstreams(None),
            is_deferred,
        ) {
            (Ok((agents, unusable)), Some(is_deferred)) => {
                // No tool is quarantined because of the hook.
                assert!(unusable.is_empty(), "{case}: {unusable:?}");
                let is_hook_warning = |warning: &Diagnostic| {
                    warning.message.contains("the hook `h`") && warning.span.is_some()
                };
                assert_eq!(
                    agents[0].warnings().iter().any(is_hook_warning),
                    is_deferred,
                    "{case}: {:?}",
                    agents[0].warnings()
                );
                if seen && !is_deferred {
                    // The hook program does not exist, so the call fails.
                    assert_ne!(call_code(agents, "git_push", json!({})).await, "ok", "{case}");
                }
            }
            (Err(error), None) => {
                let rendered = error.render(false);
                assert!(
                    rendered.contains("matches no tool")
                        || rendered.contains("has the name of another"),
                    "{case}: {rendered}"
                );
            }
            (built, _) => panic!("{case}: {built:?}"),
        }
    }
}

/// Checks that a tool that is quarantined only for its name keeps its secrets and rules.
#[tokio::test]
async fn rule_denies_tool_quarantined_by_other_rule() {
    let upstream = |name: &str| {
        format!("[upstreams.{name}]\ncommand = \"x\"\nundeclared = \"open\"\nprefix = \"\"\n")
    };
    let rule = |tool: &str| {
        format!(
            "[[policy]]\nname = \"no_{tool}\"\nrule = \"deny\"\ntools = [\"{tool}\"]\nwhen = \"true\"\n"
        )
    };
    let text = format!("{}{}{}{}", upstream("a"), upstream("b"), rule("pulll"), rule("pull"));
    let pull = vec![remote_tool("pull", json!({"type": "object"}))];
    let backend =
        FakeUpstreams { tools: BTreeMap::from([("a", pull), ("b", Vec::new())]), live: true };
    let (agents, unusable) = Config::parse("toolgate.toml", &text)
        .with_backend(&backend)
        .build_with_upstreams(None)
        .unwrap();
    assert!(unusable.iter().any(|unusable| unusable.name == "pull"), "{unusable:?}");
    assert_eq!(call_code(agents, "pull", json!({})).await, "no_pull");
}

#[test]
fn rule_with_missing_tool_quarantines_its_whole_upstream() {
    let remotes = |names: &[&str]| {
        names.iter().map(|name| remote_tool(name, json!({"type": "object"}))).collect::<Vec<_>>()
    };
    let quarantined = |prefixes: [&str; 2],
                       seen: &[(&'static str, Vec<RemoteToolSpec>)],
                       tool: &str| {
        let upstream = |name: &str, prefix: &str| {
            format!(
                "[upstreams.{name}]\ncommand = \"x\"\nundeclared = \"open\"\nprefix = \"{prefix}\"\n"
            )
        };
        let table = "[tools.wipe]\nkind = \"mcp\"\nupstream = \"b\"\ntool = \"clean_all\"\npolicy = \"open\"\n";
        let rule = format!(
            "[[policy]]\nname = \"r\"\nrule = \"deny\"\ntools = [\"{tool}\"]\nwhen = \"true\"\n"
        );
        let text =
            format!("{}{}{table}{rule}", upstream("a", prefixes[0]), upstream("b", prefixes[1]));
        let backend = FakeUpstreams { tools: seen.iter().cloned().collect(), live: true };
        let (_, unusable) = Config::parse("toolgate.toml", &text)
            .with_backend(&backend)
            .build_with_upstreams(None)
            .unwrap();
        let mut names: Vec<String> = unusable
            .into_iter()
            .map(|unusable| unusable.name)
            .filter(|name| name != tool)
            .collect();
        names.sort();
        names
    };
    let (a, b) =
        (("a", remotes(&["push", "pull"])), ("b", remotes(&["push", "merge", "clean_all"])));
    let both = [a.clone(), b.clone()];
    let none: [&str; 0] = [];
    for (prefixes, seen, tool, expected) in [
        // The longest prefix decides, and another upstream goes on.
        (["git_", "gitlab_"], both.as_slice(), "git_lab_push", ["git_pull", "git_push"].as_slice()),
        (["git_", "gitlab_"], &both, "gitlab_clean_al", &["gitlab_merge", "gitlab_push", "wipe"]),
        (["git_", ""], &both, "gti_push", &["merge", "push", "wipe"]),
        // Either upstream could have it.
        (
            ["", ""],
            &[("a", remotes(&["pull"])), ("b", remotes(&["clean_all", "merge"]))],
            "drop_tables",
            &["merge", "pull", "wipe"],
        ),
        // An upstream that was never connected may have the tool. Other upstreams keep working.
        (["", ""], std::slice::from_ref(&a), "pulll", &none),
        (["git_", "gitlab_"], std::slice::from_ref(&a), "gitlab_push", &none),
    ] {
        assert_eq!(quarantined(prefixes, seen, tool), expected, "{prefixes:?} {tool}");
    }
    // Two tools that are mapped to one name exist, and both are left out.
    let duplicated = ("b", remotes(&["push", "Push", "merge", "clean_all"]));
    assert_eq!(quarantined(["git_", "gitlab_"], &[a, duplicated], "gitlab_push"), none);
}
