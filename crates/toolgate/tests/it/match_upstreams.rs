//! What an upstream says of its tools is no reason not to load a file.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Value, json};
use toolgate::policy::Diagnostic;
use toolgate::{
    Agent, CheckedArguments, Failure, Handler, Permit, ToolContext, Toolgate, ToolgateBuilder,
};
use toolgate_config::{Backend, Config, HttpTool, RemoteToolSpec, UnusableTool, UpstreamConfig};

/// What upstreams offer, by their names.
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

/// Two tools that a file declares of one upstream: `x`, of which a case speaks, and `y`, of which
/// nobody does.
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
    let offers = FakeUpstreams { tools: BTreeMap::from([("u", tools)]), live };
    Config::parse("toolgate.toml", text)
        .with_backend(&offers)
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
        ("no schema", open, String::new(), text(json!({"a": {"type": "strin"}})), "input schema of `x`"),
        ("null", open, String::new(), json!({"type": "null"}), "are `null`"),
        (
            "a secret that evidence is about",
            "effect = \"read\"\nentities = { customer = \"/id\" }",
            String::new(),
            text(json!({"id": {"type": "string", "writeOnly": true}})),
            "is its secret",
        ),
        ("no command", "policy = \"open\"\nshell = \"/command\"", String::new(), amount(), "but there is no such argument"),
        (
            "an example",
            "policy = \"open\"\nexamples = [{ description = \"one\", input = { cent = 1 } }]",
            String::new(),
            amount(),
            "invalid input",
        ),
        (
            "an argument",
            "",
            deny("[\"x\"]", "where = [{ argument = \"/amuont\", above = 5 }]"),
            amount(),
            "policy `cap`: `x` has no argument `amuont`; did you mean `amount`?",
        ),
        ("an argument in an expression", "", deny("[\"x\"]", "when = \"input.amuont > 5\""), amount(), "has no argument `amuont`"),
        (
            "a condition",
            "",
            deny("[\"x\"]", "where = [{ argument = \"/amount\", above = 5 }]"),
            text(json!({"amount": {"type": "string"}})),
            "is declared as string",
        ),
        (
            "a secret that is looked up",
            "",
            "[[policy]]\nname = \"cap\"\nrule = \"limit\"\ntools = [\"x\"]\ncalls = 3\nper = \"/id\"\n".to_owned(),
            text(json!({"id": {"type": "string", "writeOnly": true}})),
            "is secret",
        ),
    ] {
        let text = config_with_upstream(of_x, &rules);
        let tools = || vec![remote_tool("x", input.clone()), remote_tool("y", json!({"type": "object"}))];
        let (agents, unfit) = build_with_tools(&text, tools(), true).unwrap_or_else(|error| panic!("{case}: {error}"));
        let [UnusableTool { agent, name, upstream, tool, reason: told, is_awaited: false }] = &unfit[..] else {
            panic!("{case}: {unfit:?}")
        };
        assert_eq!([agent, name, upstream, tool], ["default", "x", "u", "x"], "{case}");
        assert!(told.contains(why), "{case}: {told}");
        let given = json!({"amuont": 1, "amount": 1, "id": "A"});
        assert_eq!(call_code(agents, "x", given.clone()).await, "definition_changed", "{case}");
        assert_eq!(call_code(build_with_tools(&text, tools(), true).unwrap().0, "y", given).await, "ok", "{case}");
        // Who only looks at the file sees that something is wrong.
        let error = build_with_tools(&text, tools(), false).unwrap_err();
        assert!(error.contains("error: "), "{case}: {error}");
        // It is as it would be where the upstream was never seen.
        let offers = FakeUpstreams { tools: BTreeMap::new(), live: true };
        assert!(Config::parse("toolgate.toml", &text).with_backend(&offers).build_with_upstreams(None).unwrap().1.is_empty(), "{case}");
    }
}

/// Its calls are written down, though nobody runs them.
#[tokio::test]
async fn secret_of_quarantined_tool_is_redacted_in_ledger() {
    let rule = "[[policy]]\nname = \"cap\"\nrule = \"deny\"\ntools = [\"x\"]\nwhere = [{ argument = \"/amuont\", above = 5 }]\n";
    let input = json!({"type": "object", "properties": {"amount": {"type": "number"}, "key": {"type": "string", "writeOnly": true}}});
    let (agents, unfit) = build_with_tools(
        &config_with_upstream("", rule),
        vec![remote_tool("x", input), remote_tool("y", json!({"type": "object"}))],
        true,
    )
    .unwrap();
    assert_eq!(unfit.len(), 1);
    let spec = agents[0].tools().find(|spec| spec.name() == "x").unwrap();
    assert!(serde_json::to_string(spec).unwrap().contains("/key"), "{spec:?}");
}

/// Of what is wrong with it, its secret is a part: then nobody can tell what else is one.
#[tokio::test]
async fn arguments_are_redacted_if_secrets_are_unknown() {
    let input = json!({"type": "object", "properties": {"id": {"type": "string", "writeOnly": true}, "key": {"type": "string"}}});
    let text = config_with_upstream("effect = \"read\"\nentities = { customer = \"/id\" }", "");
    let (agents, _) = build_with_tools(
        &text,
        vec![remote_tool("x", input), remote_tool("y", json!({"type": "object"}))],
        true,
    )
    .unwrap();
    let gate =
        agents.into_iter().fold(Toolgate::builder(), ToolgateBuilder::agent).build().unwrap();
    let session = gate.session("default", "alice", "s");
    let answer = session.call("x", json!({"id": "hunter2", "key": "hunter3"})).await;
    assert_eq!(answer.outcome.error().map(|error| &*error.code), Some("definition_changed"));
    let rows = serde_json::to_string(&session.rows().await.unwrap()).unwrap();
    assert!(rows.contains("[redacted ") && !rows.contains("hunter"), "{rows}");
}

/// A counter has a name, and a refusal says what it has found.
#[tokio::test]
async fn rule_messages_hide_arguments_with_unknown_secrets() {
    let input =
        json!({"type": "object", "properties": {"id": {"type": "string", "writeOnly": true}}});
    for rule in [
        "rule = \"limit\"\ncalls = 3\nper = \"/id\"",
        "rule = \"deny\"\nwhere = [{ argument = \"/id\", in = [\"hunter2\"] }]",
    ] {
        let limit = "[[policy]]\nname = \"most\"\nrule = \"limit\"\ntools = [\"x\"]\ncalls = 3\nper = \"/id\"\n";
        let rules = format!("{limit}[[policy]]\nname = \"cap\"\ntools = [\"x\"]\n{rule}\n");
        let (agents, _) = build_with_tools(
            &config_with_upstream("", &rules),
            vec![remote_tool("x", input.clone()), remote_tool("y", json!({"type": "object"}))],
            true,
        )
        .unwrap();
        let gate =
            agents.into_iter().fold(Toolgate::builder(), ToolgateBuilder::agent).build().unwrap();
        let session = gate.session("default", "alice", "s");
        let mut written = String::new();
        for arguments in [json!("hunter2"), json!(["hunter2"]), json!({"id": "hunter2"})] {
            let answer = session.call("x", arguments).await;
            assert_eq!(
                answer.outcome.error().map(|error| &*error.code),
                Some("definition_changed"),
                "{rule}"
            );
            written += &format!("{answer:?} ");
        }
        written += &format!("{:?}", session.rows().await.unwrap());
        assert!(!written.contains("hunter2"), "{rule}: {written}");
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
        let own = "[tools.git_status]\ninput = { type = \"object\" }\npolicy = \"open\"\n\
                   [tools.git_wipe]\ninput = { type = \"object\" }\npolicy = \"open\"\n[tools.find]\ninput = { type = \"object\" }\npolicy = \"open\"\n\
                   [tools.wipe]\nkind = \"mcp\"\nupstream = \"git\"\ntool = \"clean_all\"\npolicy = \"open\"\n";
        format!(
            "[upstreams.git]\ncommand = \"git\"\nundeclared = \"{undeclared}\"\n{own}{}",
            rule(tool)
        )
    };
    for (undeclared, tool, seen, live, expected) in [
        ("ask", "git_commit", false, false, None),
        ("open", "git_commit", false, true, None),
        ("read", "git_log", true, false, None),
        // It was seen, and has no such tool.
        ("read", "git_comit", true, false, Some("did you mean `git_commit`?")),
        ("read", "git_comit", true, true, None),
        // Nobody could.
        ("deny", "git_commit", false, true, Some("is not a tool of this agent")),
        ("read", "gut_commit", false, true, Some("is not a tool of this agent")),
        // Likeness to a tool of the file decides nothing.
        ("read", "git_statsu", false, true, None),
        ("read", "git_find", false, true, None),
        // The upstream has it by that name, and a table gives it another.
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
        let offers = FakeUpstreams { tools: if seen { tools } else { BTreeMap::new() }, live };
        let fitted = Config::parse("toolgate.toml", &text(undeclared, tool))
            .with_backend(&offers)
            .build_with_upstreams(None);
        match (fitted, expected) {
            (Ok((agents, unfit)), None) => {
                let is_there = seen && tool == "git_log";
                assert_eq!(
                    unfit.iter().any(|one| one.name == tool),
                    !is_there,
                    "{case}: {unfit:?}"
                );
                let told = agents[0]
                    .warnings()
                    .iter()
                    .any(|warning| warning.message.contains(tool) && warning.span.is_some());
                assert!(told || is_there, "{case}: {:?}", agents[0].warnings());
                // The whole upstream is quarantined, the tool that a table declares too.
                assert_eq!(
                    unfit.iter().any(|one| one.name == "git_commit"),
                    tool == "git_commit" || (seen && tool != "git_log"),
                    "{case}: {unfit:?}"
                );
                let held = |one: &UnusableTool| one.name == "wipe" && !one.is_awaited;
                assert_eq!(unfit.iter().any(held), seen && tool != "git_log", "{case}: {unfit:?}");
            }
            (Err(error), Some(why)) => {
                assert!(error.render(false).contains(why), "{case}: {}", error.render(false))
            }
            (fitted, _) => panic!("{case}: {fitted:?}"),
        }
    }
}

/// Upstreams of which one has something that is held back.
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
    let own = "[tools.git_status]\ninput = { type = \"object\" }\npolicy = \"open\"\n";
    let rule = "[tools.own_tool]\ninput = { type = \"object\" }\n\
                [[policy]]\nname = \"h\"\nrule = \"deny\"\ntools = [\"own_tool\"]\nwhen = \"false\"\n";
    for (tools, more, seen, waits) in [
        ("git_*", own, false, Some(false)),
        ("git_*", "", false, Some(true)),
        ("git_push", own, false, Some(true)),
        ("git_p*|git_merge", own, false, Some(true)),
        ("git_merge", own, true, Some(true)),
        ("git_push", own, true, Some(false)),
        // Whatever there will be.
        ("*", "", false, Some(false)),
        // It is there, and has no such tool; or nobody ever will.
        ("git_psuh", own, true, None),
        ("git_rebase", own, true, None),
        ("gut_*", own, false, None),
        ("git_push|own_tol", own, false, None),
        ("git_statsu", own, false, Some(true)),
        ("git_statsu*", own, false, Some(true)),
        ("git_*psuh*", "", true, None),
        ("git_*psuh*", "", false, None),
        // That is wrong whoever is there.
        ("git_*", rule, false, None),
    ] {
        let case = format!("{tools} {more} {seen}");
        // Another upstream may have the same tool.
        let upstreams = ["git", "gits"]
            .map(|name| format!("[upstreams.{name}]\ncommand = \"x\"\nundeclared = \"open\"\n"))
            .concat();
        let text = format!(
            "{upstreams}{more}[[hooks]]\nname = \"h\"\ncommand = \"./h\"\ntools = [\"{tools}\"]\n"
        );
        let push = || vec![remote_tool("push", json!({"type": "object"}))];
        let known = if seen {
            BTreeMap::from([("git", push()), ("gits", push())])
        } else {
            BTreeMap::from([("gits", push())])
        };
        let known = if tools == "*" { BTreeMap::new() } else { known };
        let offers = QuarantiningUpstreams(FakeUpstreams { tools: known, live: true });
        match (
            Config::parse("toolgate.toml", &text).with_backend(&offers).build_with_upstreams(None),
            waits,
        ) {
            (Ok((agents, unfit)), Some(waits)) => {
                // Nothing else is held back for it.
                assert!(unfit.is_empty(), "{case}: {unfit:?}");
                let told = |warning: &Diagnostic| {
                    warning.message.contains("the hook `h`") && warning.span.is_some()
                };
                assert_eq!(
                    agents[0].warnings().iter().any(told),
                    waits,
                    "{case}: {:?}",
                    agents[0].warnings()
                );
                if seen && !waits {
                    // There is no such program, so it is a fault.
                    assert_ne!(call_code(agents, "git_push", json!({})).await, "ok", "{case}");
                }
            }
            (Err(error), None) => {
                let said = error.render(false);
                assert!(
                    said.contains("matches no tool") || said.contains("has the name of another"),
                    "{case}: {said}"
                );
            }
            (fitted, _) => panic!("{case}: {fitted:?}"),
        }
    }
}

/// What is held back only for its name keeps its secrets by itself, and rules speak of it as ever.
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
    let offers =
        FakeUpstreams { tools: BTreeMap::from([("a", pull), ("b", Vec::new())]), live: true };
    let (agents, unfit) = Config::parse("toolgate.toml", &text)
        .with_backend(&offers)
        .build_with_upstreams(None)
        .unwrap();
    assert!(unfit.iter().any(|unfit| unfit.name == "pull"), "{unfit:?}");
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
        let offers = FakeUpstreams { tools: seen.iter().cloned().collect(), live: true };
        let (_, unfit) = Config::parse("toolgate.toml", &text)
            .with_backend(&offers)
            .build_with_upstreams(None)
            .unwrap();
        let mut names: Vec<String> =
            unfit.into_iter().map(|unfit| unfit.name).filter(|name| name != tool).collect();
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
        // An upstream that was never connected may have it. It keeps no other upstream from
        // working.
        (["", ""], std::slice::from_ref(&a), "pulll", &none),
        (["git_", "gitlab_"], std::slice::from_ref(&a), "gitlab_push", &none),
    ] {
        assert_eq!(quarantined(prefixes, seen, tool), expected, "{prefixes:?} {tool}");
    }
    // Two tools that are mapped to one name exist, and both are left out.
    let twice = ("b", remotes(&["push", "Push", "merge", "clean_all"]));
    assert_eq!(quarantined(["git_", "gitlab_"], &[a, twice], "gitlab_push"), none);
}
