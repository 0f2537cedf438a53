//! Tests typed and dynamic tools, extra arguments, large outputs and overrides.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use toolgate::limits::{Limits, RateLimit};
use toolgate::normalize::NormalizationRule;
use toolgate::{Agent, CallEffects, Effect, ExtraArguments, Tool, ToolContext};

use crate::support::TestWorld;

async fn call_value(world: &TestWorld, tool: &str, args: Value) -> Value {
    let answer = world.session.call(tool, args).await;
    answer.outcome.success().unwrap_or_else(|| panic!("{answer:?}")).value.clone()
}

#[derive(Debug, Serialize, Deserialize, JsonSchema, PartialEq)]
struct OrderLine {
    sku: String,
    price: f64,
    #[serde(default)]
    tags: BTreeMap<String, OrderPayment>,
}

#[derive(Debug, Serialize, Deserialize, JsonSchema, PartialEq)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum OrderPayment {
    Card { last4: String },
    Cash { amount: f64 },
}

#[derive(Debug, Serialize, Deserialize, JsonSchema, PartialEq)]
#[serde(untagged)]
enum OrderKey {
    Number(u64),
    Text(String),
}

#[derive(Debug, Serialize, Deserialize, JsonSchema, PartialEq)]
struct OrderExtra {
    weight: f64,
}

#[derive(Debug, Serialize, Deserialize, JsonSchema, PartialEq)]
struct CustomerOrder {
    key: OrderKey,
    lines: Vec<OrderLine>,
    paid: Option<OrderPayment>,
    #[serde(flatten)]
    extra: OrderExtra,
}

#[tokio::test]
async fn typed_arguments_round_trip_and_unknown_names_fail() {
    let echo =
        Tool::typed(
            "echo",
            "Echoes.",
            |_: ToolContext, order: CustomerOrder| async move { Ok(order) },
        )
        .effect(Effect::Read);
    let world = TestWorld::new(|a| a.tool(echo));
    let order = json!({"key": 9_007_199_254_740_993_u64, "weight": 1.25, "paid": {"kind": "cash", "amount": 0.1}, "lines": [{"sku": "x", "price": 19.99, "tags": {"a": {"kind": "card", "last4": "1234"}}}]});
    assert_eq!(call_value(&world, "echo", order.clone()).await, order);
    let mut nested = order.clone();
    nested["lines"][0]["prise"] = json!(1);
    let answer = world.session.call("echo", nested).await;
    insta::assert_snapshot!(answer.outcome.error().unwrap().message, @"echo: `lines[0]` has no `prise`, did you mean `price`?");
}

#[tokio::test]
async fn unserializable_result_reports_effects() {
    // A JSON member name is a text, so a pair cannot be a key.
    let make_tool = || {
        Tool::typed("make", "Makes something.", |_: ToolContext, _: OrderLine| async {
            Ok(BTreeMap::from([((1_u8, 2_u8), 3_u8)]))
        })
        .open()
    };
    let cases = [
        ("an effect", make_tool().effect(Effect::Write), CallEffects::Done),
        ("a local write", make_tool().effect(Effect::Write).local(), CallEffects::RolledBack),
        ("a read", make_tool().effect(Effect::Read), CallEffects::None),
    ];
    for (case, tool, effects) in cases {
        let world = TestWorld::new(|a| a.tool(tool));
        let answer = world.session.call("make", json!({"sku": "x", "price": 1})).await;
        let error = answer.outcome.error().unwrap_or_else(|| panic!("{case}: {answer:?}"));
        assert_eq!(
            (&*error.code, error.retryable, error.effects),
            ("invalid_result", false, effects),
            "{case}: {error}"
        );
        assert_eq!(
            world.gate.pending_calls().await.unwrap().len(),
            0,
            "{case}: no claim is pending"
        );
    }
}

#[tokio::test]
async fn extra_arguments_follow_extra_setting() {
    let tool = |name: &str, extra: ExtraArguments| {
        let schema = json!({"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"type": "integer"}}}}, "allOf": [{"properties": {"c": {"type": "integer"}}}]});
        Tool::dynamic(name, "Echoes.", schema, |_, args| async move { Ok(args) })
            .effect(Effect::Read)
            .extra(extra)
    };
    let world = TestWorld::new(|a| {
        a.tool(tool("refuse", ExtraArguments::Refuse))
            .tool(tool("drop", ExtraArguments::Drop))
            .tool(tool("pass", ExtraArguments::Pass))
    });
    let args = json!({"a": {"b": 1, "x": 2}, "c": 3, "y": 4});
    assert_eq!(
        world.session.call("refuse", args.clone()).await.outcome.error().map(|e| e.errors.len()),
        Some(2)
    );
    assert_eq!(call_value(&world, "drop", args.clone()).await, json!({"a": {"b": 1}, "c": 3}));
    assert_eq!(call_value(&world, "pass", args.clone()).await, args);
    assert_eq!(
        call_value(&world, "refuse", json!({"a": {"b": 1}, "c": 3})).await,
        json!({"a": {"b": 1}, "c": 3})
    );
    // Dropped arguments are neither checked nor recorded.
    let rows = world.session.rows().await.unwrap();
    assert_eq!(
        *rows.iter().find(|r| &*r.tool == "drop").unwrap().arguments,
        json!({"a": {"b": 1}, "c": 3})
    );
}

#[tokio::test]
async fn large_result_is_stored_and_read_in_pages() {
    let text: String = (0..20_000).map(|n| format!("línea {n}\n")).collect();
    let whole = text.clone();
    let dump = Tool::dynamic("dump", "Dumps.", json!({"type": "object"}), move |_, _| {
        let text = text.clone();
        async move { Ok(json!(text)) }
    })
    .effect(Effect::Read);
    let world = TestWorld::new(|a| a.tool(dump).tool(toolgate::builtin::read_output()));
    let answer = world.session.call("dump", json!({})).await;
    let output = answer.outcome.success().unwrap();
    let stored = output.stored.clone().unwrap();
    assert_eq!(stored.bytes, whole.len());
    assert!(
        output.for_model().len() < 8_000
            && output.message.as_ref().unwrap().contains(&stored.handle)
    );
    let mut read = output.value.as_str().unwrap().to_owned();
    loop {
        let page = call_value(
            &world,
            "read_output",
            json!({"handle": stored.handle, "offset": read.len()}),
        )
        .await;
        read.push_str(page["text"].as_str().unwrap());
        if page.get("next").is_none() {
            break;
        }
    }
    assert_eq!(read, whole);
    // The handle belongs to the session that made the call.
    let other = world
        .gate
        .session("agent", "bob", "s")
        .call("read_output", json!({"handle": stored.handle}))
        .await;
    assert_eq!(other.outcome.error().map(|e| &*e.code), Some("unknown_handle"));
}

#[tokio::test]
async fn hidden_value_is_not_sent_to_model() {
    let fetch = Tool::dynamic(
        "fetch",
        "Fetches.",
        json!({"type": "object"}),
        |ctx: ToolContext, _| async move {
            ctx.set_message("3 rows are ready");
            ctx.hide_value();
            Ok(json!([1, 2, 3]))
        },
    )
    .effect(Effect::Read);
    let world = TestWorld::new(|a| a.tool(fetch));
    let answer = world.session.call("fetch", json!({})).await;
    let output = answer.outcome.success().unwrap();
    assert_eq!(
        (output.for_model().as_str(), &output.value),
        ("3 rows are ready", &json!([1, 2, 3]))
    );
    assert_eq!(
        answer.outcome.to_json(),
        json!({"isError": false, "message": "3 rows are ready", "hidden": true})
    );
    assert_eq!(
        world.session.rows().await.unwrap()[0].outcome.success().map(|o| o.value.clone()),
        Some(json!([1, 2, 3])),
        "the ledger contains the value"
    );
}

#[tokio::test]
async fn results_are_normalized_before_use() {
    let lookup = Tool::dynamic("lookup", "Looks up.", json!({"type": "object"}), |_, _| async {
        Ok(json!({"id": "A-7", "created_unix": 1_700_000_000, "status": "2", "total_cents": 1999, "vip": "yes", "internal": "x"}))
    })
    .effect(Effect::Read)
    .output_schema(json!({"type": "object", "properties": {"created_at": {"type": "string", "format": "date-time"}}, "required": ["created_at", "total"]}))
    .normalize(NormalizationRule::first_of("", ["order_id", "id"], "order_id"))
    .normalize(NormalizationRule::rename("/created_unix", "created_at"))
    .normalize(NormalizationRule::timestamp("/created_at"))
    .normalize(NormalizationRule::codes("/status", [("1", "OPEN"), ("2", "PAID")]))
    .normalize(NormalizationRule::scale("/total_cents", toolgate::Decimal::new(1, 2)))
    .normalize(NormalizationRule::rename("/total_cents", "total"))
    .normalize(NormalizationRule::bool("/vip"))
    .normalize(NormalizationRule::default_value("/tier", json!("standard")))
    .normalize(NormalizationRule::keep("", ["order_id", "created_at", "status", "total", "vip", "tier"]));
    let world = TestWorld::new(|a| a.tool(lookup));
    let expected = json!({"order_id": "A-7", "created_at": "2023-11-14T22:13:20Z", "status": "PAID", "total": 19.99, "vip": true, "tier": "standard"});
    assert_eq!(call_value(&world, "lookup", json!({})).await, expected);
}

#[test]
fn description_override_needs_consent_of_tool() {
    let build = |tool: Tool| Agent::builder("a").tool(tool).describe("calc", "Adds.").build();
    assert!(build(toolgate::builtin::calc()).is_err());
    assert_eq!(
        build(toolgate::builtin::calc().accepts_overrides())
            .unwrap()
            .tools()
            .next()
            .unwrap()
            .description(),
        "Adds."
    );
}

#[derive(Deserialize, JsonSchema)]
struct UnitArguments;

#[derive(Deserialize, JsonSchema)]
struct EmptyArguments {}

#[tokio::test]
async fn useless_settings_are_refused_at_build() {
    let agent = || Agent::builder("a");
    let no_arguments = "the arguments of `ping` are `null`";
    let cases = [
        (
            agent().tool(
                Tool::typed("ping", "Pings.", |_: ToolContext, _: ()| async { Ok(true) })
                    .effect(Effect::Read),
            ),
            no_arguments,
        ),
        (
            agent().tool(
                Tool::typed("ping", "Pings.", |_: ToolContext, _: UnitArguments| async {
                    Ok(true)
                })
                .effect(Effect::Read),
            ),
            no_arguments,
        ),
        (
            agent().limits(Limits {
                rate: Some(RateLimit { calls: 5, per: std::time::Duration::ZERO }),
                ..Limits::default()
            }),
            "`per` of a rate limit must be longer than zero",
        ),
        (
            agent().resource(7_u32).resource("other").resource(8_u32),
            "two resources have the type `u32`",
        ),
    ];
    for (builder, expected) in cases {
        let error = builder.build().unwrap_err();
        assert!(error.problems.len() == 1 && error.to_string().contains(expected), "{error}");
    }
    let ping =
        Tool::typed("ping", "Pings.", |_: ToolContext, _: EmptyArguments| async { Ok(true) })
            .effect(Effect::Read);
    let world = TestWorld::new(|a| a.tool(ping).resource(7_u32).resource(8_u64));
    assert_eq!(call_value(&world, "ping", json!({})).await, json!(true));
}

#[test]
fn builtin_tools_have_complete_declarations() {
    let agent = Agent::builder("a")
        .tool(toolgate::builtin::calc())
        .tool(toolgate::builtin::json_query())
        .tool(toolgate::builtin::read_output())
        .tools(toolgate::builtin::files())
        .policy(toolgate::policy::ReadBeforeWrite::default())
        .build()
        .unwrap();
    assert_eq!(agent.tools().count(), 6);
    for tool in agent.tools() {
        assert_eq!(
            tool.description().lines().count(),
            4,
            "{}: the description needs purpose, use, edge cases and ordering",
            tool.name()
        );
    }
}

#[tokio::test]
async fn many_argument_errors_give_short_message() {
    let world = TestWorld::new(|a| a);
    let many: serde_json::Map<String, Value> =
        (0..50_000).map(|n| (format!("unknown_{n}"), json!(n))).collect();
    let answer = world.session.call("act", Value::Object(many)).await;
    let error = answer.outcome.error().unwrap();
    assert!(
        error.message.len() < 4_000 && error.errors.len() <= 40,
        "{} {}",
        error.message.len(),
        error.errors.len()
    );
}

#[tokio::test]
async fn composed_schemas_reject_unknown_members() {
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
    let world = TestWorld::new(|a| {
        a.tool(
            Tool::dynamic("order", "Orders.", schema, |_, _| async { Ok(Value::Null) })
                .effect(Effect::Read),
        )
    });
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
fn normalization_without_effect_is_refused() {
    for (rule, expected) in [
        (NormalizationRule::rename("/items/*", "x"), Some("`/items/*` ends in `*`")),
        (
            NormalizationRule::Default { path: "/items/*".into(), value: json!(1) },
            Some("`/items/*` ends in `*`"),
        ),
        (NormalizationRule::first_of("", [], "x"), Some("has no `names`")),
        (NormalizationRule::Keep { within: "".into(), names: Vec::new() }, Some("has no `names`")),
        (NormalizationRule::codes("/code", []), Some("every code is an error")),
        (NormalizationRule::rename("/items/*/a", "x"), None),
    ] {
        let tool = Tool::dynamic("t", "A tool.", json!({"type": "object"}), |_, _| async {
            Ok(Value::Null)
        });
        let built =
            Agent::builder("a").tool(tool.effect(Effect::Read).normalize(rule.clone())).build();
        let error = built.err().map(|e| e.to_string());
        assert_eq!(error.is_some(), expected.is_some(), "{rule:?}: {error:?}");
        assert!(error.unwrap_or_default().contains(expected.unwrap_or_default()), "{rule:?}");
    }
}
