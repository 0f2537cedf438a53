//! The schema that editors use knows what the reader knows, and nothing else.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use toolgate::config::{Config, schema};

/// The keys that the reader knows at a place, by what it says to one that it does not know.
fn known(config: &str) -> BTreeSet<String> {
    let said = Config::parse("toolgate.toml", config).agents(None).err().map(|error| error.problems).unwrap_or_default();
    let mut told = said.iter().filter(|problem| problem.message.contains("`zzzzzzzzzz`")).peekable();
    assert!(told.peek().is_some(), "{config}: {said:?}");
    let names = |help: &str| {
        let names = help.trim_start_matches("there is ").split(", ");
        names.map(|name| name.trim_matches('`').to_owned()).collect::<Vec<_>>()
    };
    told.flat_map(|problem| names(problem.help.as_deref().unwrap_or_default())).collect()
}

fn keys(schema: &Value) -> BTreeSet<String> {
    schema["properties"].as_object().unwrap().keys().cloned().collect()
}

#[test]
fn the_schema_has_the_keys_that_the_reader_has() {
    let schema = schema();
    let at = |name: &str| keys(&schema["$defs"][name]);
    let tool = "[tools.look]\neffect = \"read\"\n";
    let cases = [
        ("the file", keys(&schema), format!("zzzzzzzzzz = 1\n{tool}")),
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
        ("a silence", at("lint"), format!("lint = [{{ allow = \"overlap\", reason = \"x\", zzzzzzzzzz = 1 }}]\n{tool}")),
    ];
    for (name, wanted, config) in cases {
        assert_eq!(known(&config), wanted, "{name}");
    }
    let mut all = BTreeSet::new();
    for kind in ["kind = \"command\"\ncommand = \"x\"", "kind = \"http\"\nurl = \"https://x.example/\"", "kind = \"mcp\"\nupstream = \"u\""]
    {
        all.extend(known(&format!("[tools.run]\npolicy = \"open\"\n{kind}\nzzzzzzzzzz = 1\n[upstreams.u]\ncommand = \"x\"\n")));
    }
    assert_eq!(all, at("tool"), "a tool");
    let rules = [
        "rule = \"require\"\ntools = [\"look\"]\nany_of = [\"look\"]",
        "rule = \"deny\"\ntools = [\"look\"]",
        "rule = \"ask\"\ntools = [\"look\"]",
        "rule = \"limit\"\ntools = [\"look\"]\ncalls = 3",
        "rule = \"limit\"\ntools = [\"look\"]\nsum = \"/a\"\nmost = 3",
        "rule = \"sequence\"\nafter = { look = [\"look\"] }",
        "rule = \"read_before_write\"",
        "rule = \"flow\"\ntools = [\"look\"]\narguments = [\"/a\"]",
    ];
    let mut all = BTreeSet::new();
    for rule in rules {
        all.extend(known(&format!("{tool}[[policy]]\nname = \"r\"\n{rule}\nzzzzzzzzzz = 1\n")));
    }
    assert_eq!(all, at("policy"));
    let condition = known(&format!(
        "{tool}[[policy]]\nname = \"r\"\nrule = \"deny\"\ntools = [\"look\"]\nwhere = [{{ touches = [\"x\"], zzzzzzzzzz = 1 }}]\n"
    ));
    assert_eq!(condition, at("condition"));
}

#[test]
fn the_schema_that_is_shipped_is_the_one_that_is_generated() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../schema/toolgate.schema.json");
    let shipped: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert!(shipped == schema(), "run `cargo run -- schema > schema/toolgate.schema.json`");
}

#[test]
fn the_schema_takes_what_the_reader_takes() {
    let validator = jsonschema::validator_for(&schema()).unwrap();
    let good = json!({
        "name": "coder", "store": "ledger.db", "retention": "90d", "redact": ["x"], "client": {"on_failure": "ask"},
        "tools": {"bash": {"kind": "client", "shell": "/command"}},
        "policy": [{"name": "r", "rule": "deny", "tools": "bash", "where": [{"argument": "/command", "runs": ["rm"]}]}],
        "hooks": [{"name": "h", "command": "./h", "when": "both"}],
        "lint": [{"allow": "overlap", "reason": "because"}],
    });
    assert!(validator.is_valid(&good), "{:?}", validator.iter_errors(&good).map(|e| e.to_string()).collect::<Vec<_>>());
    for bad in [json!({"tools": {"Bash": {}}}), json!({"client": {"on_failure": "allow"}}), json!({"colour": 1})] {
        assert!(!validator.is_valid(&bad), "{bad}");
    }
}
