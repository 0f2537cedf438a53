//! Tests that rules are checked when an agent is built.

use serde_json::{Value, json};
use toolgate::policy::{Condition, Deny};
use toolgate::{Agent, Effect, Tool};

use crate::rules::{call_code, start_session, tool};

#[test]
fn rules_attach_only_at_matching_levels() {
    use toolgate::PromptSection;
    use toolgate::policy::source::RuleSet;
    let built = |extra: &str| {
        let text = format!(
            "[[policy]]\nname = \"r\"\nrule = \"deny\"\ntools = [\"act\"]\nwhere = [{{ argument = \"/amount\", above = 5 }}]\n{extra}\n"
        );
        Agent::builder("a")
            .tool(tool("act").open())
            .section(PromptSection::new("other").tool(tool("other").open()))
            .rules(RuleSet::parse("p.toml", &text))
            .build()
    };
    assert!(built("").is_ok());
    assert!(built("level = \"tool\"").is_ok());
    let error = built("section = \"other\"").unwrap_err().to_string();
    assert!(
        error.contains("p.toml:6:11") && error.contains("which is outside of its scope"),
        "{error}"
    );
    let tool_level = "[[policy]]\nname = \"s\"\nrule = \"sequence\"\nlevel = \"tool\"\nafter = { act = [\"proof\"] }\n";
    let (s, _) = start_session(
        Agent::builder("a")
            .tool(tool("act"))
            .tool(tool("proof").effect(Effect::Read))
            .rules(RuleSet::parse("p.toml", tool_level))
            .build()
            .unwrap(),
    );
    let code = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(call_code(&s, "act", json!({})));
    assert_eq!(code, "prerequisite_missing");
}

#[test]
fn unknown_paths_in_open_or_composed_schemas_are_allowed() {
    let build = |schema: Value, rule: Deny| {
        let act = Tool::dynamic("act", "Acts.", schema, |_, _| async { Ok(Value::Null) });
        Agent::builder("a").tool(act).policy(rule).build().map(|_| ()).map_err(|e| e.to_string())
    };
    let typed = || Deny::new("r", ["act"]).when("/extra/deep", Condition::Above(1.into()));
    let cel = || Deny::new("r", ["act"]).when_cel("input.extra.deep > 1");
    let open = json!({"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": true});
    let composed = json!({"type": "object", "properties": {"a": {"type": "string"}}, "allOf": [{"properties": {"extra": {"type": "object"}}}]});
    let referred = json!({"type": "object", "properties": {"extra": {"$ref": "#/$defs/e"}}, "$defs": {"e": {"type": "object", "properties": {"deep": {"type": "number"}}}}});
    let dependent = json!({"type": "object", "properties": {"a": {"type": "string"}},
        "dependentSchemas": {"a": {"properties": {"extra": {"type": "object"}}}}});
    let unevaluated = json!({"type": "object", "properties": {"a": {"type": "string"}}, "unevaluatedProperties": {"type": "object"}});
    for schema in [open, composed, referred, dependent, unevaluated] {
        assert_eq!(build(schema.clone(), typed()), Ok(()), "{schema}");
        assert_eq!(build(schema.clone(), cel()), Ok(()), "{schema}");
    }
    let closed = json!({"type": "object", "properties": {"extra": {"type": "object", "properties": {"deap": {"type": "number"}}}}});
    for rule in [typed(), cel()] {
        assert!(build(closed.clone(), rule).unwrap_err().contains("did you mean `deap`?"));
    }
    // A nullable member can have a value that the schema does not list.
    let nullable = json!({"type": "object", "properties": {"status": {"enum": ["open", null]}, "n": {"anyOf": [{"const": 5}, {"type": "null"}]}}});
    for when in ["input.status != \"open\"", "input.n != 5"] {
        assert_eq!(
            build(nullable.clone(), Deny::new("r", ["act"]).when_cel(when)),
            Ok(()),
            "{when}"
        );
    }
    // The check gives up on a schema that refers to itself 60 times.
    let names: Vec<String> = (0..60).map(|n| format!("f{n}")).collect();
    let mut properties = serde_json::Map::new();
    names.iter().for_each(|name| drop(properties.insert(name.clone(), json!({"$ref": "#"}))));
    let tangle = json!({"type": "object", "properties": properties});
    assert_eq!(
        build(tangle, Deny::new("r", ["act"]).when_cel("input.f1.f2.f3 == input.f4")),
        Ok(())
    );
    // A condition may be unsatisfiable for one tool if another tool can satisfy it.
    let tool = |name: &str, most: i64| {
        let schema = json!({"type": "object", "properties": {"amount": {"type": "number", "maximum": most}}});
        Tool::dynamic(name, "Acts.", schema, |_, _| async { Ok(Value::Null) })
    };
    let rule = |tools: &[&'static str]| {
        Deny::new("r", tools.iter().copied()).when_cel("input.amount > 500")
    };
    assert!(
        Agent::builder("a")
            .tool(tool("large", 1_000))
            .tool(tool("small", 200))
            .policy(rule(&["large", "small"]))
            .build()
            .is_ok()
    );
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

#[test]
fn paths_into_text_or_list_members_are_refused() {
    let schema = json!({"type": "object", "properties": {
        "items": {"type": "array", "items": {"type": "object", "properties": {"price": {"type": "number"}}}},
        "s": {"type": "string"}, "n": {"type": ["integer", "null"]}, "either": {"type": ["string", "object"]}, "any": {},
    }});
    let build = |rule: Deny| {
        let act = Tool::dynamic("act", "Acts.", schema.clone(), |_, _| async { Ok(Value::Null) });
        Agent::builder("a").tool(act).policy(rule).build().map(|_| ()).map_err(|e| e.to_string())
    };
    let above = |path: &str| Deny::new("r", ["act"]).when(path, Condition::Above(1.into()));
    let cel = |when: &str| Deny::new("r", ["act"]).when_cel(when);
    for rule in [above("/items/price"), cel("has(input.items.price) && input.items.price > 5")] {
        let error = build(rule).unwrap_err();
        assert!(
            error.contains("`/items` is a list") && error.contains("`/items/*/price`"),
            "{error}"
        );
    }
    for rule in [
        above("/s/tier"),
        above("/s/0"),
        above("/n/*"),
        cel("has(input.s.tier) && input.s.tier > 1"),
    ] {
        let error = build(rule).unwrap_err();
        assert!(error.contains("neither an object nor a list"), "{error}");
    }
    for rule in [
        above("/items/*/price"),
        above("/items/0/price"),
        above("/either/x"),
        above("/any/x/0"),
        cel("input.either.x > 1"),
    ] {
        assert_eq!(build(rule), Ok(()));
    }
}

#[test]
fn impossible_date_comparisons_are_refused() {
    let build = |when: &str| {
        let rule = Deny::new("r", ["act"]).when_cel(when);
        Agent::builder("a")
            .tool(tool("act"))
            .policy(rule)
            .build()
            .map(|_| ())
            .map_err(|e| e.to_string())
    };
    for when in [
        "now.getMonth() == 12",
        "now.getDate() > 30",
        "now.getDayOfWeek() == 7",
        "now.getHours() == 24",
        "now.getMinutes() > 59",
    ] {
        assert!(build(when).is_err_and(|error| error.contains("this can never be true")), "{when}");
    }
    for when in [
        "now.getMonth() == 11",
        "now.getDate() == 0",
        "now.getHours() >= 18",
        "now.getFullYear() == 2030",
    ] {
        assert_eq!(build(when), Ok(()), "{when}");
    }
}

#[test]
fn shadowed_rule_is_reported() {
    let schema = json!({"type": "object", "properties": {"command": {"type": "string"}, "amount": {"type": "number"}, "to": {"type": "string"}}});
    let bash =
        Tool::dynamic("bash", "Runs.", schema, |_, _| async { Ok(Value::Null) }).shell("/command");
    let runs =
        |names: &[&str]| Condition::Runs(names.iter().map(|name| (*name).to_owned()).collect());
    let touches = |places: &[&str]| Condition::Touches {
        places: places.iter().map(|place| (*place).to_owned()).collect(),
        lenient: false,
        trees: true,
        whole: false,
        from: None,
    };
    let deny = |name: &str| Deny::new(name, ["bash"]);
    let mut agent = Agent::builder("a").tool(bash);
    for rule in [
        deny("wide").when("/command", runs(&["rm", "mv"])),
        deny("rm").when("/command", runs(&["rm"])),
        deny("mv").when("/command", runs(&["mv"])),
        deny("more").when("/command", runs(&["rm", "cp"])),
        deny("files").when("/to", touches(&[".env", ".git"])),
        deny("env").when("/to", touches(&[".env"])),
        deny("keys").when("/to", touches(&[".ssh"])),
        deny("large").when("/amount", Condition::Above(500.into())),
        deny("some").when("/amount", Condition::one_of([json!(600), json!(700)])),
        deny("others").when("/amount", Condition::one_of([json!(400), json!(700)])),
        deny("zip").when("/command", runs(&["zip"])).when("/amount", Condition::Above(900.into())),
        Deny::ask("asks", ["bash"]).when("/command", runs(&["mv"])),
    ] {
        agent = agent.policy(rule);
    }
    for n in 0..200 {
        agent = agent
            .policy(deny(&format!("rule_{n}")).when("/command", runs(&[&format!("program_{n}")])));
    }
    let limit = |name: &str, most: u64| toolgate::policy::Limit::calls(name, ["bash"], most);
    let agent = agent
        .policy(limit("nine", 9))
        .policy(limit("five", 5))
        .build()
        .unwrap_or_else(|e| panic!("{}", e.render(false)));
    let warnings: Vec<String> = agent
        .warnings()
        .iter()
        .map(|p| format!("{}: {}", p.rule.as_deref().unwrap_or_default(), p.message))
        .collect();
    let never_applies = |rule: &str, by: &str| {
        format!("{rule}: the rule never applies: `{by}` always applies first")
    };
    let expected = [
        ("asks", "mv"),
        ("env", "files"),
        ("mv", "wide"),
        ("nine", "five"),
        ("rm", "wide"),
        ("some", "large"),
        ("zip", "large"),
    ];
    assert_eq!(warnings, expected.map(|(rule, by)| never_applies(rule, by)));
}

#[test]
fn rule_definition_contains_only_limits_it_reads() {
    use toolgate::policy::{Limit, Policy};
    let with = |when: &str| {
        let rule = Deny::new("r", ["act"]).when_cel(when);
        (0..300)
            .fold(rule, |rule, n| rule.reading(&Limit::calls(&format!("limit_{n}"), ["act"], 5)))
            .definition()
    };
    assert!(
        !with("input.amount > 5").contains("limit_"),
        "the definition contains a limit that the rule does not read"
    );
    assert!(with("sum_of(\"limit_7\") > 5").contains("limit_7"));
}

#[test]
fn unsatisfiable_conditions_are_reported() {
    let schema = json!({"type": "object", "properties": {
        "amount": {"type": "number", "minimum": 0, "maximum": 100}, "status": {"enum": ["open", "closed"]}, "maybe": {"enum": ["open", null]},
        "flag": {"type": "boolean"}, "text": {"type": "string"}, "either": {"type": ["string", "integer"]}, "any": {},
        "composed": {"anyOf": [{"const": "a"}, {"const": "b"}]}, "tags": {"type": "array", "items": {"enum": ["x", "y"]}},
        "pair": {"type": "array", "prefixItems": [{"enum": ["read", "write"]}], "items": {"enum": ["x"]}}, "list": {"type": "array"},
        "named": {"type": "object", "patternProperties": {"^x-": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
        "known": {"type": "object", "properties": {"n": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
    }});
    let act = |name: &str, schema: &Value| {
        Tool::dynamic(name, "Acts.", schema.clone(), |_, _| async { Ok(Value::Null) })
    };
    let warnings = |agent: toolgate::AgentBuilder| {
        let agent = agent.build().unwrap_or_else(|e| panic!("{}", e.render(false)));
        let line = |problem: &toolgate::policy::Diagnostic| {
            assert_eq!(
                (problem.lint_code, problem.severity),
                (Some("never_true"), toolgate::policy::Severity::Warning),
                "{problem}"
            );
            format!("{}; {}", problem.message, problem.help.as_deref().unwrap_or_default())
        };
        agent.warnings().iter().map(line).collect::<Vec<_>>().join(" | ")
    };
    let one_of = |values: Value| Condition::one_of(values.as_array().unwrap().clone());
    let none_of = |values: Value| Condition::none_of(values.as_array().unwrap().clone());
    let amount = "allowed by the schema: between 0 and 100";
    let status = "allowed by the schema: one of \"open\", \"closed\"";
    let cases = [
        ("/amount", Condition::Above(99.into()), String::new()),
        (
            "/amount",
            Condition::Above(100.into()),
            format!("`/amount` of `act` is never above 100; {amount}"),
        ),
        ("/amount", Condition::Below(1.into()), String::new()),
        (
            "/amount",
            Condition::Below(0.into()),
            format!("`/amount` of `act` is never below 0; {amount}"),
        ),
        (
            "/amount",
            one_of(json!([5, "5"])),
            format!("`/amount` of `act` is never \"5\"; {amount}"),
        ),
        ("/amount", one_of(json!([101])), format!("`/amount` of `act` is never 101; {amount}")),
        (
            "/status",
            one_of(json!(["open", "closd"])),
            "`/status` of `act` is never \"closd\"; did you mean `closed`?".to_owned(),
        ),
        (
            "/status",
            one_of(json!(["xyz"])),
            format!("`/status` of `act` is never \"xyz\"; {status}"),
        ),
        ("/status", none_of(json!(["open"])), String::new()),
        (
            "/status",
            none_of(json!(["open", "closed"])),
            format!("`/status` of `act` is never not in \"open\", \"closed\"; {status}"),
        ),
        ("/status", Condition::Glob("c*".to_owned()), String::new()),
        (
            "/status",
            Condition::Glob("x*".to_owned()),
            format!("`/status` of `act` is never like `x*`; {status}"),
        ),
        (
            "/status",
            Condition::matches("^x").unwrap(),
            format!("`/status` of `act` is never matching `^x`; {status}"),
        ),
        (
            "/flag",
            one_of(json!(["true"])),
            "`/flag` of `act` is never \"true\"; allowed by the schema: true or false".to_owned(),
        ),
        (
            "/text",
            one_of(json!([5])),
            "`/text` of `act` is never 5; allowed by the schema: text".to_owned(),
        ),
        (
            "/tags/*",
            one_of(json!(["z"])),
            "`/tags/*` of `act` is never \"z\"; allowed by the schema: one of \"x\", \"y\""
                .to_owned(),
        ),
        // No warning if the schema does not decide the value.
        ("/maybe", one_of(json!(["shut"])), String::new()),
        ("/text", one_of(json!(["anything"])), String::new()),
        ("/either", one_of(json!([5, "a", true])), String::new()),
        ("/any", one_of(json!([5, "a", true])), String::new()),
        ("/composed", one_of(json!(["c"])), String::new()),
        ("/pair/0", one_of(json!(["write"])), String::new()),
        ("/pair/*", one_of(json!(["write"])), String::new()),
        ("/named/x-a", one_of(json!([5])), String::new()),
        ("/named/*", one_of(json!([5])), String::new()),
        ("/known/*", one_of(json!([5])), String::new()),
        (
            "/known/m",
            one_of(json!([5])),
            "`/known/m` of `act` is never 5; allowed by the schema: text".to_owned(),
        ),
    ];
    for (path, condition, expected) in cases {
        let shown = format!("{path} {condition:?}");
        assert_eq!(
            warnings(
                Agent::builder("a")
                    .tool(act("act", &schema))
                    .policy(Deny::new("r", ["act"]).when(path, condition))
            ),
            expected,
            "{shown}"
        );
    }
    // Part of the expression is never true, although the whole expression can be true.
    for (when, expected) in [
        ("input.amount > 5 || input.status == \"open\"", String::new()),
        (
            "input.amount > 5 || input.status == \"gone\"",
            format!("this can never be true; {status}"),
        ),
        ("input.amount > 5 || input.amount > 200", format!("this can never be true; {amount}")),
        (
            "input.amount in [1, 2] || input.amount in [200, 300]",
            format!("this can never be true; {amount}"),
        ),
        ("input.text == \"x\" || session == \"s\"", String::new()),
        ("input.pair[0] == \"write\" || session == \"s\"", String::new()),
        ("\"y\" in (input.list + [\"x\"]) || session == \"s\"", String::new()),
        (
            "\"z\" in input.tags || session == \"s\"",
            "this can never be true; allowed by the schema: one of \"x\", \"y\"".to_owned(),
        ),
    ] {
        let rule = Deny::new("r", ["act"]).when_cel(when);
        assert_eq!(
            warnings(Agent::builder("a").tool(act("act", &schema)).policy(rule)),
            expected,
            "{when}"
        );
    }
    // No warning if another tool can satisfy the condition.
    let wider = json!({"type": "object", "properties": {"amount": {"type": "number"}, "status": {"type": "string"}}});
    let both = |rule: Deny| {
        warnings(
            Agent::builder("a").tool(act("act", &schema)).tool(act("other", &wider)).policy(rule),
        )
    };
    assert_eq!(
        both(Deny::new("r", ["act", "other"]).when("/amount", Condition::Above(100.into()))),
        ""
    );
    assert_eq!(
        both(
            Deny::new("r", ["act", "other"])
                .when_cel("input.amount > 5 || input.status == \"gone\"")
        ),
        ""
    );
    // The condition of a `require` rule is checked too.
    let require = toolgate::policy::Require::new("r", ["act"], ["other"])
        .only_when("/status", one_of(json!(["zzz"])));
    let agent = Agent::builder("a")
        .tool(act("act", &schema))
        .tool(act("other", &wider).effect(Effect::Read))
        .policy(require);
    assert_eq!(warnings(agent), format!("`/status` of `act` is never \"zzz\"; {status}"));
    // The required value of a result field is checked too.
    let never = |value: &str, help: &str| {
        format!("`/ok` in a result of `proof` is never {value}; allowed by the schema: {help}")
    };
    for (output, required, expected) in [
        (json!({"properties": {"ok": {"type": "boolean"}}}), json!(true), String::new()),
        (json!({"properties": {"ok": {"type": "string"}}}), json!(true), never("true", "text")),
        (json!({"properties": {"ok": {"const": false}}}), json!(true), never("true", "false")),
        (json!({"properties": {"ok": {"enum": ["yes", "no"]}}}), json!("yes"), String::new()),
        (json!({"properties": {"ok": {"enum": ["yes", "no"]}}}), json!("on"), never("\"on\"", "one of \"yes\", \"no\"")),
        (json!({"properties": {"ok": {"type": "integer", "maximum": 3}}}), json!(4), never("4", "at most 3")),
        (
            json!({"properties": {"good": {}}, "additionalProperties": false}),
            json!(true),
            "`/ok` in a result of `proof` is never there; the output schema does not allow this field".to_owned(),
        ),
        // No warning if the schema does not decide the value.
        (json!({"properties": {"good": {}}}), json!(true), String::new()),
        (json!({"properties": {"ok": {"anyOf": [{"type": "string"}, {"type": "number"}]}}}), json!(true), String::new()),
    ] {
        let shown = format!("{output} {required}");
        let proof = act("proof", &wider).effect(Effect::Read).proves("/ok").output_schema(output);
        let rule = toolgate::policy::Require::new("r", ["act"], ["proof"]).field("/ok", required);
        assert_eq!(warnings(Agent::builder("a").tool(act("act", &schema)).tool(proof).policy(rule)), expected, "{shown}");
    }
}
