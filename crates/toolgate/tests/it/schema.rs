//! Tests that the JSON schema of the configuration and the parser agree.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use toolgate_config::{Config, config_schema};

/// Returns the keys that the parser lists in its error about an unknown key.
fn known_keys(config: &str) -> BTreeSet<String> {
    let problems = Config::parse("toolgate.toml", config)
        .build_agents(None)
        .err()
        .map(|error| error.problems)
        .unwrap_or_default();
    let mut unknown_key_problems =
        problems.iter().filter(|problem| problem.message.contains("`zzzzzzzzzz`")).peekable();
    assert!(unknown_key_problems.peek().is_some(), "{config}: {problems:?}");
    let names = |help: &str| {
        let names = help.trim_start_matches("known names: ").split(", ");
        names.map(|name| name.trim_matches('`').to_owned()).collect::<Vec<_>>()
    };
    unknown_key_problems
        .flat_map(|problem| names(problem.help.as_deref().unwrap_or_default()))
        .collect()
}

fn schema_keys(schema: &Value) -> BTreeSet<String> {
    schema["properties"].as_object().unwrap().keys().cloned().collect()
}

#[test]
fn schema_keys_equal_parser_keys() {
    let schema = config_schema();
    let at = |name: &str| schema_keys(&schema["$defs"][name]);
    let tool = "[tools.look]\neffect = \"read\"\n";
    let cases = [
        ("the file", schema_keys(&schema), format!("zzzzzzzzzz = 1\n{tool}")),
        ("an agent", at("agent"), "[agents.a]\nzzzzzzzzzz = 1\n".to_owned()),
        (
            "a sandbox",
            at("sandbox"),
            "[tools.run]\nkind = \"command\"\ncommand = \"x\"\npolicy = \"open\"\nsandbox = { zzzzzzzzzz = 1 }\n".to_owned(),
        ),
        ("a hook", at("hook"), format!("{tool}[[hooks]]\nname = \"a\"\ncommand = \"b\"\nzzzzzzzzzz = 1\n")),
        ("a budget", at("budget"), format!("limits = {{ session = {{ zzzzzzzzzz = 1 }} }}\n{tool}")),
        (
            "an upstream",
            at("upstream"),
            format!("{tool}[upstreams.u]\ncommand = \"x\"\nzzzzzzzzzz = 1\n[upstreams.v]\nurl = \"http://x/\"\nzzzzzzzzzz = 1\n"),
        ),
        ("the gateway", at("gateway"), format!("{tool}[gateway]\nzzzzzzzzzz = 1\n")),
        ("limits", at("limits"), format!("limits = {{ zzzzzzzzzz = 1 }}\n{tool}")),
        ("the client", at("client"), format!("client = {{ zzzzzzzzzz = 1 }}\n{tool}")),
        ("a lint exception", at("lint"), format!("lint = [{{ allow = \"overlap\", reason = \"x\", zzzzzzzzzz = 1 }}]\n{tool}")),
    ];
    for (name, expected, config) in cases {
        assert_eq!(known_keys(&config), expected, "{name}");
    }
    let mut all = BTreeSet::new();
    for kind in [
        "kind = \"command\"\ncommand = \"x\"",
        "kind = \"http\"\nurl = \"https://x.example/\"",
        "kind = \"mcp\"\nupstream = \"u\"",
    ] {
        all.extend(known_keys(&format!("[tools.run]\npolicy = \"open\"\n{kind}\nzzzzzzzzzz = 1\n[upstreams.u]\ncommand = \"x\"\n")));
    }
    assert_eq!(all, at("tool"), "a tool");
    let rules = [
        "rule = \"require\"\ntools = [\"look\"]\nany_of = [\"look\"]",
        "rule = \"deny\"\ntools = [\"look\"]",
        "rule = \"ask\"\ntools = [\"look\"]",
        "rule = \"limit\"\ntools = [\"look\"]\ncalls = 3",
        "rule = \"limit\"\ntools = [\"look\"]\nsum = \"/a\"\nmax = 3",
        "rule = \"sequence\"\nafter = { look = [\"look\"] }",
        "rule = \"read_before_write\"",
        "rule = \"flow\"\ntools = [\"look\"]\narguments = [\"/a\"]",
    ];
    let mut all = BTreeSet::new();
    for rule in rules {
        all.extend(known_keys(&format!(
            "{tool}[[policy]]\nname = \"r\"\n{rule}\nzzzzzzzzzz = 1\n"
        )));
    }
    assert_eq!(all, at("policy"));
    let condition = known_keys(&format!(
        "{tool}[[policy]]\nname = \"r\"\nrule = \"deny\"\ntools = [\"look\"]\nwhere = [{{ touches = [\"x\"], zzzzzzzzzz = 1 }}]\n"
    ));
    assert_eq!(condition, at("condition"));
}

#[test]
fn shipped_schema_equals_generated_schema() {
    let path =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../schema/toolgate.schema.json");
    let shipped: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert!(shipped == config_schema(), "run `cargo run -- schema > schema/toolgate.schema.json`");
}

/// Serializes a JSON value as TOML.
fn to_toml(value: &Value) -> String {
    let join = |parts: Vec<String>| parts.join(", ");
    match value {
        Value::Object(members) => {
            format!(
                "{{ {} }}",
                join(
                    members
                        .iter()
                        .map(|(key, value)| format!("{key:?} = {}", to_toml(value)))
                        .collect()
                )
            )
        }
        Value::Array(items) => format!("[{}]", join(items.iter().map(to_toml).collect())),
        other => other.to_string(),
    }
}

#[test]
fn schema_and_parser_refuse_same_values() {
    let validator = jsonschema::validator_for(&config_schema()).unwrap();
    let rule = |extra: Value| {
        let mut rule = json!({"name": "r", "tools": ["pay"]});
        rule.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        // A sequence rule has no `tools`.
        if rule["rule"] == "sequence" {
            rule.as_object_mut().unwrap().remove("tools");
        }
        json!({"policy": [rule]})
    };
    let get = |extra: Value| {
        let mut tool = json!({"kind": "http", "effect": "read", "url": "https://api.example.com/"});
        tool.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        json!({"tools": {"get": tool}})
    };
    let upstream = |prefix: &str| json!({"upstreams": {"git": {"command": "mcp-server-git", "prefix": prefix}}});
    let signed = |resource: &str| json!({"gateway": {"jwt": {"issuer": "i", "audience": "a", "keys": "keys.json", "resource": resource}}});
    let spent = |money: f64| json!({"limits": {"session": {"money": money}}});
    let proved = json!({"proved_by": "look", "same": {"id": "/to"}, "field": "/owner"});
    let cases = [
        (rule(json!({"rule": "ask", "approvers": []})), false),
        (rule(json!({"rule": "ask", "approvers": ["ann"]})), true),
        (rule(json!({"rule": "ask", "approvers": "ann"})), true),
        (rule(json!({"rule": "ask", "tools": []})), false),
        (rule(json!({"rule": "ask", "name": " "})), false),
        (rule(json!({"rule": "deny", "where": [{"argument": "/to", "in": []}]})), false),
        (rule(json!({"rule": "deny", "where": [{"argument": "/to", "in": ["a"]}]})), true),
        (rule(json!({"rule": "deny", "where": [{"touches": []}]})), false),
        (rule(json!({"rule": "require", "any_of": []})), false),
        (rule(json!({"rule": "require", "any_of": ["look"], "same": {}})), false),
        (rule(json!({"rule": "require", "any_of": ["look"], "within": "PT15M"})), true),
        (rule(json!({"rule": "require", "any_of": ["look"], "within": " 15m"})), true),
        (rule(json!({"rule": "require", "any_of": ["look"], "within": "soon"})), false),
        (rule(json!({"rule": "sequence", "after": {}})), false),
        (rule(json!({"rule": "sequence", "after": {"pay": []}})), false),
        (rule(json!({"rule": "sequence", "after": {"pay": ["look"]}})), true),
        (rule(json!({"rule": "only_from", "user": true, "arguments": []})), false),
        (rule(json!({"rule": "only_from", "user": true, "arguments": ["/to"]})), true),
        (rule(json!({"rule": "limit", "calls": 3, "per": "principal"})), true),
        (rule(json!({"rule": "limit", "calls": 3, "per": "/to"})), true),
        (rule(json!({"rule": "limit", "calls": 3, "per": proved})), true),
        (rule(json!({"rule": "limit", "calls": 3, "per": {"proved_by": "look"}})), false),
        (rule(json!({"rule": "limit", "calls": 3, "per": "sesion"})), false),
        (rule(json!({"rule": "limit", "sum": "/amount", "max": -1})), false),
        (get(json!({"method": "get"})), true),
        (get(json!({"method": "FETCH"})), false),
        (get(json!({"empty_on": [404]})), true),
        (get(json!({"empty_on": ["404"]})), false),
        (get(json!({"empty_on": [70000]})), false),
        (get(json!({"polling": {"max_unchanged": 0}})), false),
        (get(json!({"polling": {"max_unchanged": 1}})), true),
        (get(json!({"cost": {"money": -1}})), false),
        (get(json!({"reconcile": {"tool": "look", "happened": {}}})), false),
        (spent(-1.5), false),
        (spent(1.5), true),
        (json!({"gateway": {"concurrency": 0}}), false),
        (json!({"gateway": {"concurrency": 1}}), true),
        (json!({"gateway": {"otlp": {"endpoint": "127.0.0.1:4318"}}}), false),
        (json!({"gateway": {"otlp": {"endpoint": "http://127.0.0.1:4318"}}}), true),
        (signed("https://gate.example.com/mcp"), true),
        (signed("http://[::1]:7070/mcp"), true),
        (signed("api://gate"), false),
        (signed("https:///mcp"), false),
        (signed("https://gate.example.com/mcp?a=b"), false),
        (signed("https://gate.example.com/mcp#a"), false),
        (signed("https://gate.example.com/ mcp"), false),
        (upstream("Git"), false),
        (upstream(""), true),
        (json!({"lint": [{"allow": "overlap", "reason": " "}]}), false),
        (json!({"lint": [{"allow": "overlap", "reason": "so"}]}), true),
        (json!({"store": " "}), false),
        (json!({"store": "ledger.db"}), true),
    ];
    for (change, is_valid) in cases {
        let mut whole = json!({"tools": {
            "look": {"effect": "read", "proves": ["/owner"], "entities": {"id": "/id"}, "input": {"type": "object", "properties": {"id": {"type": "string"}}}},
            "pay": {"policy": "open", "input": {"type": "object", "properties": {"to": {"type": "string"}, "amount": {"type": "number"}}}},
        }});
        for (key, value) in change.as_object().unwrap() {
            match whole.get_mut(key).and_then(Value::as_object_mut) {
                Some(known) => known.extend(value.as_object().unwrap().clone()),
                None => whole[key] = value.clone(),
            }
        }
        let text: String = whole
            .as_object()
            .unwrap()
            .iter()
            .map(|(key, value)| format!("{key} = {}\n", to_toml(value)))
            .collect();
        let read = Config::parse("toolgate.toml", &text).build_agents(None);
        let why = read.as_ref().err().map(|error| error.render(false)).unwrap_or_default();
        assert_eq!(
            (read.is_ok(), validator.is_valid(&whole)),
            (is_valid, is_valid),
            "{change}: {why}"
        );
    }
}

#[test]
fn schema_accepts_valid_config() {
    let validator = jsonschema::validator_for(&config_schema()).unwrap();
    let good = json!({
        "name": "coder", "store": "ledger.db", "retention": "90d", "redact": ["x"], "client": {"on_failure": "ask"},
        "tools": {"bash": {"kind": "client", "shell": "/command"}},
        "policy": [{"name": "r", "rule": "deny", "tools": "bash", "where": [{"argument": "/command", "runs": ["rm"]}]}],
        "hooks": [{"name": "h", "command": "./h", "when": "both"}],
        "lint": [{"allow": "overlap", "reason": "because"}],
    });
    assert!(
        validator.is_valid(&good),
        "{:?}",
        validator.iter_errors(&good).map(|e| e.to_string()).collect::<Vec<_>>()
    );
    for bad in [
        json!({"tools": {"Bash": {}}}),
        json!({"client": {"on_failure": "allow"}}),
        json!({"colour": 1}),
    ] {
        assert!(!validator.is_valid(&bad), "{bad}");
    }
}
