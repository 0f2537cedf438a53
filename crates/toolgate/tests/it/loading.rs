//! What is right and wrong about rules before the first call.

use serde_json::{Value, json};
use toolgate::policy::{Condition, Deny};
use toolgate::{Agent, Effect, Tool};

use crate::rules::{code, session, tool};

#[test]
fn rules_are_attached_where_they_have_something_to_say() {
    use toolgate::Section;
    use toolgate::config::Rules;
    let built = |extra: &str| {
        let text = format!(
            "[[policy]]\nname = \"r\"\nrule = \"deny\"\ntools = [\"act\"]\nwhere = [{{ argument = \"/amount\", above = 5 }}]\n{extra}\n"
        );
        Agent::builder("a")
            .tool(tool("act").open())
            .section(Section::new("other").tool(tool("other").open()))
            .rules(Rules::parse("p.toml", &text))
            .build()
    };
    assert!(built("").is_ok());
    assert!(built("level = \"tool\"").is_ok());
    let wrong = built("section = \"other\"").unwrap_err().to_string();
    assert!(wrong.contains("p.toml:6:11") && wrong.contains("which is not where the rule is attached"), "{wrong}");
    let tool_level = "[[policy]]\nname = \"s\"\nrule = \"sequence\"\nlevel = \"tool\"\nafter = { act = [\"proof\"] }\n";
    let (s, _) = session(
        Agent::builder("a")
            .tool(tool("act"))
            .tool(tool("proof").effect(Effect::Read))
            .rules(Rules::parse("p.toml", tool_level))
            .build()
            .unwrap(),
    );
    let refused = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(code(&s, "act", json!({})));
    assert_eq!(refused, "prerequisite_missing");
}

#[test]
fn schemas_that_are_open_or_put_together_are_not_second_guessed() {
    let build = |schema: Value, rule: Deny| {
        let act = Tool::dynamic("act", "Acts.", schema, |_, _| async { Ok(Value::Null) });
        Agent::builder("a").tool(act).policy(rule).build().map(|_| ()).map_err(|e| e.to_string())
    };
    let typed = || Deny::new("r", ["act"]).when("/extra/deep", Condition::Above(1.into()));
    let cel = || Deny::new("r", ["act"]).when_cel("input.extra.deep > 1");
    let open = json!({"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": true});
    let composed =
        json!({"type": "object", "properties": {"a": {"type": "string"}}, "allOf": [{"properties": {"extra": {"type": "object"}}}]});
    let referred = json!({"type": "object", "properties": {"extra": {"$ref": "#/$defs/e"}}, "$defs": {"e": {"type": "object", "properties": {"deep": {"type": "number"}}}}});
    for schema in [open, composed, referred] {
        assert_eq!(build(schema.clone(), typed()), Ok(()), "{schema}");
        assert_eq!(build(schema.clone(), cel()), Ok(()), "{schema}");
    }
    let closed = json!({"type": "object", "properties": {"extra": {"type": "object", "properties": {"deap": {"type": "number"}}}}});
    for rule in [typed(), cel()] {
        assert!(build(closed.clone(), rule).unwrap_err().contains("did you mean `deap`?"));
    }
    // What may be null may be something else than what is listed.
    let nullable =
        json!({"type": "object", "properties": {"status": {"enum": ["open", null]}, "n": {"anyOf": [{"const": 5}, {"type": "null"}]}}});
    for when in ["input.status != \"open\"", "input.n != 5"] {
        assert_eq!(build(nullable.clone(), Deny::new("r", ["act"]).when_cel(when)), Ok(()), "{when}");
    }
    // A tangle is given up on, not untangled.
    let names: Vec<String> = (0..60).map(|n| format!("f{n}")).collect();
    let mut properties = serde_json::Map::new();
    names.iter().for_each(|name| drop(properties.insert(name.clone(), json!({"$ref": "#"}))));
    let tangle = json!({"type": "object", "properties": properties});
    assert_eq!(build(tangle, Deny::new("r", ["act"]).when_cel("input.f1.f2.f3 == input.f4")), Ok(()));
    // What one of two tools rules out is a rule still.
    let tool = |name: &str, most: i64| {
        let schema = json!({"type": "object", "properties": {"amount": {"type": "number", "maximum": most}}});
        Tool::dynamic(name, "Acts.", schema, |_, _| async { Ok(Value::Null) })
    };
    let rule = |tools: &[&'static str]| Deny::new("r", tools.iter().copied()).when_cel("input.amount > 500");
    assert!(Agent::builder("a").tool(tool("large", 1_000)).tool(tool("small", 200)).policy(rule(&["large", "small"])).build().is_ok());
    assert!(
        Agent::builder("a")
            .tool(tool("small", 200))
            .policy(rule(&["small"]))
            .build()
            .unwrap_err()
            .to_string()
            .contains("can never be true")
    );
}
