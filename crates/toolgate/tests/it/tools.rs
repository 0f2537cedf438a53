//! Tools: typed and dynamic, secrets, extra arguments, large outputs, overrides.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use toolgate::limits::{Limits, Rate};
use toolgate::normalize::Rule;
use toolgate::{Agent, Ctx, Effect, Effects, Extra, Tool, builtin};

use crate::support::World;

async fn value(world: &World, tool: &str, args: Value) -> Value {
    let answer = world.session.call(tool, args).await;
    answer.outcome.success().unwrap_or_else(|| panic!("{answer:?}")).value.clone()
}

#[derive(Debug, Serialize, Deserialize, JsonSchema, PartialEq)]
struct Line {
    sku: String,
    price: f64,
    #[serde(default)]
    tags: BTreeMap<String, Payment>,
}

#[derive(Debug, Serialize, Deserialize, JsonSchema, PartialEq)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum Payment {
    Card { last4: String },
    Cash { amount: f64 },
}

#[derive(Debug, Serialize, Deserialize, JsonSchema, PartialEq)]
#[serde(untagged)]
enum Key {
    Number(u64),
    Text(String),
}

#[derive(Debug, Serialize, Deserialize, JsonSchema, PartialEq)]
struct Extra_ {
    weight: f64,
}

#[derive(Debug, Serialize, Deserialize, JsonSchema, PartialEq)]
struct Order {
    key: Key,
    lines: Vec<Line>,
    paid: Option<Payment>,
    #[serde(flatten)]
    extra: Extra_,
}

#[tokio::test]
async fn rich_types_arrive_whole_and_unknown_names_do_not() {
    let echo = Tool::typed("echo", "Echoes.", |_: Ctx, order: Order| async move { Ok(order) }).effect(Effect::Read);
    let world = World::new(|a| a.tool(echo));
    let order = json!({"key": 9_007_199_254_740_993_u64, "weight": 1.25, "paid": {"kind": "cash", "amount": 0.1}, "lines": [{"sku": "x", "price": 19.99, "tags": {"a": {"kind": "card", "last4": "1234"}}}]});
    assert_eq!(value(&world, "echo", order.clone()).await, order);
    let mut nested = order.clone();
    nested["lines"][0]["prise"] = json!(1);
    let answer = world.session.call("echo", nested).await;
    insta::assert_snapshot!(answer.outcome.error().unwrap().message, @"echo: `lines[0]` has no `prise`, did you mean `price`?");
}

#[tokio::test]
async fn a_result_that_cannot_be_written_comes_after_the_work() {
    // A name in JSON is text, and a pair is none.
    let made = || Tool::typed("make", "Makes something.", |_: Ctx, _: Line| async { Ok(BTreeMap::from([((1_u8, 2_u8), 3_u8)])) }).open();
    let cases = [
        ("an effect", made().effect(Effect::Write), Effects::Done),
        ("one that only acts here", made().effect(Effect::Write).local(), Effects::RolledBack),
        ("a read", made().effect(Effect::Read), Effects::None),
    ];
    for (what, tool, left) in cases {
        let world = World::new(|a| a.tool(tool));
        let answer = world.session.call("make", json!({"sku": "x", "price": 1})).await;
        let error = answer.outcome.error().unwrap_or_else(|| panic!("{what}: {answer:?}"));
        assert_eq!((&*error.code, error.retryable, error.effects), ("invalid_result", false, left), "{what}: {error}");
        assert_eq!(world.gate.pending_calls().await.unwrap().len(), 0, "{what}: nobody need settle it");
    }
}

#[tokio::test]
async fn extra_arguments_are_refused_dropped_or_passed() {
    let tool = |name: &str, extra: Extra| {
        let schema = json!({"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"type": "integer"}}}}, "allOf": [{"properties": {"c": {"type": "integer"}}}]});
        Tool::dynamic(name, "Echoes.", schema, |_, args| async move { Ok(args) }).effect(Effect::Read).extra(extra)
    };
    let world = World::new(|a| a.tool(tool("refuse", Extra::Refuse)).tool(tool("drop", Extra::Drop)).tool(tool("pass", Extra::Pass)));
    let args = json!({"a": {"b": 1, "x": 2}, "c": 3, "y": 4});
    assert_eq!(world.session.call("refuse", args.clone()).await.outcome.error().map(|e| e.errors.len()), Some(2));
    assert_eq!(value(&world, "drop", args.clone()).await, json!({"a": {"b": 1}, "c": 3}));
    assert_eq!(value(&world, "pass", args.clone()).await, args);
    assert_eq!(value(&world, "refuse", json!({"a": {"b": 1}, "c": 3})).await, json!({"a": {"b": 1}, "c": 3}));
    // What was dropped was never judged and is not recorded.
    let rows = world.session.rows().await.unwrap();
    assert_eq!(*rows.iter().find(|r| &*r.tool == "drop").unwrap().arguments, json!({"a": {"b": 1}, "c": 3}));
}

#[tokio::test]
async fn a_secret_is_in_no_error_and_no_row() {
    let login = |name: &str| {
        let schema = json!({"type": "object", "properties": {
            "user": {"type": "string"},
            "password": {"type": "string", "writeOnly": true, "minLength": 8},
            "pins": {"type": "array", "items": {"type": "object", "properties": {"pin": {"type": "integer", "writeOnly": true, "maximum": 999_999_999_999_u64}}}},
        }, "required": ["user", "password"]});
        Tool::dynamic(name, "Logs in.", schema, |_, _| async move { Ok(json!({"token": "hunter2-token", "ok": true})) })
            .effect(Effect::Read)
            .secret("/token")
    };
    let world = World::new(|a| a.tool(login("login")));
    let mut said = String::new();
    for args in [
        json!({"user": "al", "password": "hunter2"}),
        json!({"user": "al", "password": 771_177_117_711_u64}),
        json!({"user": "al", "pasword": "hunter2-long"}),
        json!({"user": "al", "password": "hunter2-long", "pins": [{"pin": 7_711_771_177_117_u64}]}),
        json!({"user": "al", "password": "hunter2-long", "pins": [{"pin": "hunter2"}]}),
        json!({"user": "al", "password": "hunter2-long", "pins": [{"pin": 771_177_117_711_u64}]}),
    ] {
        said.push_str(&serde_json::to_string(&world.session.call("login", args).await).unwrap());
    }
    for row in world.session.rows().await.unwrap() {
        said.push_str(&serde_json::to_string(&*row).unwrap());
    }
    // Long enough not to stand in a digest by chance.
    assert!(!said.contains("hunter2") && !said.contains("771177117711"), "{said}");
    assert!(said.contains("(hidden)") && said.contains("[redacted "));
    // The same secret leaves the same mark, so that rows can be matched.
    world.session.call("login", json!({"user": "bo", "password": "hunter2-long"})).await;
    world.session.call("login", json!({"user": "bo", "password": "hunter2-other"})).await;
    let rows = world.session.rows().await.unwrap();
    assert_eq!(rows[5].arguments["password"], rows[6].arguments["password"]);
    assert_ne!(rows[5].arguments["password"], rows[7].arguments["password"]);
    assert_eq!(rows[6].arguments["user"], json!("bo"));
}

#[tokio::test]
async fn a_secret_that_stands_as_a_name_is_not_told() {
    let schema = json!({"type": "object", "properties": {
        "card": {"type": "object", "properties": {"number": {"type": "string"}}, "patternProperties": {"^x-": {"type": "string"}}},
        "open": {"type": "object", "additionalProperties": {"type": "object", "properties": {"n": {"type": "integer"}}}},
        "user": {"type": "string"},
    }});
    let pay = Tool::dynamic("pay", "Pays.", schema, |_, _| async { Ok(Value::Null) }).effect(Effect::Read).secret("/card").secret("/open");
    let world = World::new(|a| a.tool(pay));
    let mut said = String::new();
    for args in [
        json!({"card": {"hunter2": "x", "hunter22": "y"}}),
        json!({"card": {"x-hunter2": 5}}),
        json!({"card": {"number": 5}}),
        json!({"open": {"hunter2": {"n": "x"}}}),
        json!({"open": {"hunter2": {"hunter2": 1}}}),
    ] {
        let answer = world.session.call("pay", args).await;
        assert_eq!(answer.outcome.error().unwrap().code, "invalid_arguments");
        said.push_str(&serde_json::to_string(&answer).unwrap());
    }
    assert!(said.contains("has 2 unknown member(s), not shown (it takes `number`)") && said.contains("`card.number` must be"), "{said}");
    assert!(said.contains("open.(hidden).n"), "{said}");
    for text in [r#"{"card": {"hunter2": 1, "hunter2": 2}}"#, r#"{"card": {"hunter2" 1}}"#] {
        said.push_str(&serde_json::to_string(&world.session.call("pay", text).await).unwrap());
    }
    assert!(said.contains("a key is given twice"), "{said}");
    for row in world.session.rows().await.unwrap() {
        said.push_str(&serde_json::to_string(&*row).unwrap());
    }
    assert!(!said.contains("hunter2"), "{said}");
    // Outside of the secret, a name is told.
    let answer = world.session.call("pay", json!({"usr": "x"})).await;
    assert!(answer.outcome.error().unwrap().message.contains("did you mean `user`?"), "{answer:?}");
}

#[tokio::test]
async fn a_large_result_is_put_aside_and_read_page_by_page() {
    let text: String = (0..20_000).map(|n| format!("línea {n}\n")).collect();
    let whole = text.clone();
    let dump = Tool::dynamic("dump", "Dumps.", json!({"type": "object"}), move |_, _| {
        let text = text.clone();
        async move { Ok(json!(text)) }
    })
    .effect(Effect::Read);
    let world = World::new(|a| a.tool(dump).tool(builtin::read_output()));
    let answer = world.session.call("dump", json!({})).await;
    let output = answer.outcome.success().unwrap();
    let stored = output.stored.clone().unwrap();
    assert_eq!(stored.bytes, whole.len());
    assert!(output.for_model().len() < 8_000 && output.message.as_ref().unwrap().contains(&stored.handle));
    let mut read = output.value.as_str().unwrap().to_owned();
    loop {
        let page = value(&world, "read_output", json!({"handle": stored.handle, "offset": read.len()})).await;
        read.push_str(page["text"].as_str().unwrap());
        if page.get("next").is_none() {
            break;
        }
    }
    assert_eq!(read, whole);
    // It belongs to the session that made it.
    let other = world.gate.session("agent", "bob", "s").call("read_output", json!({"handle": stored.handle})).await;
    assert_eq!(other.outcome.error().map(|e| &*e.code), Some("unknown_handle"));
}

#[tokio::test]
async fn a_value_can_be_kept_out_of_the_context() {
    let fetch = Tool::dynamic("fetch", "Fetches.", json!({"type": "object"}), |ctx: Ctx, _| async move {
        ctx.set_message("3 rows are ready");
        ctx.hide_value();
        Ok(json!([1, 2, 3]))
    })
    .effect(Effect::Read);
    let world = World::new(|a| a.tool(fetch));
    let answer = world.session.call("fetch", json!({})).await;
    let output = answer.outcome.success().unwrap();
    assert_eq!((output.for_model().as_str(), &output.value), ("3 rows are ready", &json!([1, 2, 3])));
    assert_eq!(answer.outcome.to_json(), json!({"isError": false, "message": "3 rows are ready", "hidden": true}));
    assert_eq!(
        world.session.rows().await.unwrap()[0].outcome.success().map(|o| o.value.clone()),
        Some(json!([1, 2, 3])),
        "the ledger has it"
    );
}

#[tokio::test]
async fn results_are_normalised_before_anyone_sees_them() {
    let lookup = Tool::dynamic("lookup", "Looks up.", json!({"type": "object"}), |_, _| async {
        Ok(json!({"id": "A-7", "created_unix": 1_700_000_000, "status": "2", "total_cents": 1999, "vip": "yes", "internal": "x"}))
    })
    .effect(Effect::Read)
    .output_schema(json!({"type": "object", "properties": {"created_at": {"type": "string", "format": "date-time"}}, "required": ["created_at", "total"]}))
    .normalize(Rule::first_of("", ["order_id", "id"], "order_id"))
    .normalize(Rule::rename("/created_unix", "created_at"))
    .normalize(Rule::timestamp("/created_at"))
    .normalize(Rule::codes("/status", [("1", "OPEN"), ("2", "PAID")]))
    .normalize(Rule::scale("/total_cents", toolgate::Decimal::new(1, 2)))
    .normalize(Rule::rename("/total_cents", "total"))
    .normalize(Rule::bool("/vip"))
    .normalize(Rule::default_value("/tier", json!("standard")))
    .normalize(Rule::keep("", ["order_id", "created_at", "status", "total", "vip", "tier"]));
    let world = World::new(|a| a.tool(lookup));
    let expected =
        json!({"order_id": "A-7", "created_at": "2023-11-14T22:13:20Z", "status": "PAID", "total": 19.99, "vip": true, "tier": "standard"});
    assert_eq!(value(&world, "lookup", json!({})).await, expected);
}

#[test]
fn a_description_is_replaced_only_where_the_tool_accepts_it() {
    let build = |tool: Tool| Agent::builder("a").tool(tool).describe("calc", "Adds.").build();
    assert!(build(toolgate::builtin::calc()).is_err());
    assert_eq!(build(toolgate::builtin::calc().accepts_overrides()).unwrap().tools().next().unwrap().description(), "Adds.");
}

#[derive(Deserialize, JsonSchema)]
struct Unit;

#[derive(Deserialize, JsonSchema)]
struct Nothing {}

#[tokio::test]
async fn what_could_never_do_anything_is_told_when_the_agent_is_built() {
    let agent = || Agent::builder("a");
    let no_arguments = "the arguments of `ping` are `null`";
    let cases = [
        (agent().tool(Tool::typed("ping", "Pings.", |_: Ctx, _: ()| async { Ok(true) }).effect(Effect::Read)), no_arguments),
        (agent().tool(Tool::typed("ping", "Pings.", |_: Ctx, _: Unit| async { Ok(true) }).effect(Effect::Read)), no_arguments),
        (
            agent().limits(Limits { rate: Some(Rate { calls: 5, per: std::time::Duration::ZERO }), ..Limits::default() }),
            "`per` of a rate limit must be longer than zero",
        ),
        (agent().resource(7_u32).resource("other").resource(8_u32), "two resources have the type `u32`"),
    ];
    for (builder, told) in cases {
        let error = builder.build().unwrap_err();
        assert!(error.problems.len() == 1 && error.to_string().contains(told), "{error}");
    }
    let ping = Tool::typed("ping", "Pings.", |_: Ctx, _: Nothing| async { Ok(true) }).effect(Effect::Read);
    let world = World::new(|a| a.tool(ping).resource(7_u32).resource(8_u64));
    assert_eq!(value(&world, "ping", json!({})).await, json!(true));
}

#[test]
fn the_built_in_tools_are_well_declared() {
    let agent = Agent::builder("a")
        .tool(toolgate::builtin::calc())
        .tool(builtin::json_query())
        .tool(builtin::read_output())
        .tools(toolgate::builtin::files())
        .policy(toolgate::policy::ReadBeforeWrite::default())
        .build()
        .unwrap();
    assert_eq!(agent.tools().count(), 6);
    for tool in agent.tools() {
        assert_eq!(tool.description().lines().count(), 4, "{}: what, when, edge cases, ordering", tool.name());
    }
}

#[tokio::test]
async fn a_secret_that_should_have_been_elsewhere_is_a_secret_still() {
    // Inside a condition, inside a type that holds itself, as text where an object should be, in another branch.
    let schema = json!({
        "type": "object",
        "properties": {
            "auth": {"type": "object", "properties": {"token": {"type": "string", "writeOnly": true}}, "required": ["token"]},
            "tree": {"$ref": "#/$defs/tree"},
            "kind": {"type": "string"},
        },
        "if": {"properties": {"kind": {"const": "key"}}, "required": ["kind"]},
        "then": {"properties": {"key": {"type": "string", "writeOnly": true}}, "required": ["key"]},
        "$defs": {"tree": {"type": "object", "properties": {"pin": {"type": "string", "writeOnly": true}, "next": {"$ref": "#/$defs/tree"}}}},
    });
    let tool = Tool::dynamic("open", "Opens.", schema, |_, _| async { Ok(Value::Null) }).effect(Effect::Read);
    let world = World::new(|a| a.tool(tool));
    let mut said = String::new();
    for args in [
        json!({"auth": "hunter2"}),
        json!({"auth": {"token": "hunter2"}}),
        json!({"auth": {"tokken": "hunter2"}}),
        json!({"kind": "key", "key": "hunter2"}),
        json!({"tree": {"pin": "hunter2", "next": {"pin": "hunter2", "next": {"next": {"pin": "hunter2"}}}}}),
    ] {
        said.push_str(&serde_json::to_string(&world.session.call("open", args).await).unwrap());
    }
    for row in world.session.rows().await.unwrap() {
        said.push_str(&serde_json::to_string(&*row).unwrap());
    }
    assert!(!said.contains("hunter2"), "{said}");
}

#[tokio::test]
async fn many_mistakes_make_a_short_message() {
    let world = World::new(|a| a);
    let many: serde_json::Map<String, Value> = (0..50_000).map(|n| (format!("unknown_{n}"), json!(n))).collect();
    let answer = world.session.call("act", Value::Object(many)).await;
    let error = answer.outcome.error().unwrap();
    assert!(error.message.len() < 4_000 && error.errors.len() <= 40, "{} {}", error.message.len(), error.errors.len());
}

#[tokio::test]
async fn references_and_compositions_are_closed_as_a_whole() {
    let schema = json!({
        "type": "object",
        "properties": {
            "bill": {"allOf": [{"$ref": "#/$defs/address"}, {"properties": {"vat": {"type": "string"}}}]},
            "ship": {"$ref": "#/$defs/address"},
            "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
            "map": {"type": "object"},
        },
        "dependentSchemas": {"ship": {"$ref": "#/$defs/shipping"}},
        "$defs": {
            "address": {"type": "object", "properties": {"city": {"type": "string"}, "geo": {"properties": {"lat": {"type": "number"}}}}},
            "shipping": {"properties": {"speed": {"type": "string"}}},
        },
    });
    let world = World::new(|a| a.tool(Tool::dynamic("order", "Orders.", schema, |_, _| async { Ok(Value::Null) }).effect(Effect::Read)));
    let cases = [
        (json!({"bill": {"city": "x", "vat": "y"}}), true),
        (json!({"bill": {"city": "x", "vatt": "y"}}), false),
        (json!({"ship": {"city": "x"}, "speed": "fast"}), true),
        (json!({"ship": {"city": "x", "zip": "1"}}), false),
        (json!({"ship": {"geo": {"lat": 1, "lng": 2}}}), false),
        (json!({"next": {"next": null, "map": {"anything": 1}}}), true),
        (json!({"next": {"nexxt": null}}), false),
        (json!({"speed": "fast"}), false),
        (json!({"other": 1}), false),
    ];
    for (args, fits) in cases {
        let answer = world.session.call("order", args.clone()).await;
        assert_eq!(answer.outcome.success().is_some(), fits, "{args}: {answer:?}");
    }
}

#[test]
fn a_rule_for_results_that_says_nothing_does_not_build() {
    for (rule, expected) in [
        (Rule::rename("/items/*", "x"), Some("`/items/*` ends in `*`")),
        (Rule::Default { path: "/items/*".into(), value: json!(1) }, Some("`/items/*` ends in `*`")),
        (Rule::first_of("", [], "x"), Some("has no `names`")),
        (Rule::Keep { within: "".into(), names: Vec::new() }, Some("has no `names`")),
        (Rule::codes("/code", []), Some("every code would fail")),
        (Rule::rename("/items/*/a", "x"), None),
    ] {
        let tool = Tool::dynamic("t", "A tool.", json!({"type": "object"}), |_, _| async { Ok(Value::Null) });
        let built = Agent::builder("a").tool(tool.effect(Effect::Read).normalize(rule.clone())).build();
        let wrong = built.err().map(|e| e.to_string());
        assert_eq!(wrong.is_some(), expected.is_some(), "{rule:?}: {wrong:?}");
        assert!(wrong.unwrap_or_default().contains(expected.unwrap_or_default()), "{rule:?}");
    }
}
