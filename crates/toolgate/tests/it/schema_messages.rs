//! Tests that messages about invalid arguments are correct for composed schemas.

use serde_json::{Value, json};
use toolgate::{Effect, Tool};

use crate::support::TestWorld;

/// Asserts the message for each set of arguments.
async fn assert_messages(schema: &Value, cases: &[(Value, &str)]) {
    let tool = Tool::dynamic("t", "A tool.", schema.clone(), |_, _| async { Ok(Value::Null) })
        .effect(Effect::Read);
    let world = TestWorld::new(|agent| agent.tool(tool));
    for (args, expected) in cases {
        let answer = world.session.call("t", args.clone()).await;
        let message = answer.outcome.error().map_or("ok", |error| error.message.as_str());
        assert_eq!(message, *expected, "{args} of {schema}");
        // A suggestion differs from the given name.
        for field in answer.outcome.error().into_iter().flat_map(|error| &error.errors) {
            assert!(field.did_you_mean.as_ref() != Some(&field.got), "{field:?}");
        }
    }
}

#[tokio::test]
async fn all_of_error_names_failing_part() {
    let schema = json!({"type": "object", "allOf": [
        {"properties": {"amount": {"type": "integer"}, "order": {"type": "string"}}},
        {"properties": {"note": {"type": "string"}}, "required": ["note"]},
    ]});
    let cases = [
        (json!({"amount": 1, "order": "A", "note": "x"}), "ok"),
        // `amount` has the wrong type, and the other members are valid.
        (
            json!({"amount": "x", "order": "A", "note": "y"}),
            "t: `amount` must be an integer; got the string \"x\"",
        ),
        (json!({"amount": 1, "note": 2}), "t: `note` must be a string; got 2"),
        (json!({"amount": 1}), "`t` requires `note` (string), which is missing"),
        (json!({"amuont": 1, "note": "x"}), "`t` has no `amuont`, did you mean `amount`?"),
        (
            json!({"amount": "x", "oder": "A", "note": "y"}),
            "`t` has no `oder`, did you mean `order`? `amount` must be an integer; got the string \"x\"",
        ),
    ];
    assert_messages(&schema, &cases).await;
    // Equal requirements are reported once; contradicting types are not listed.
    let twice = json!({"type": "object", "allOf": [
        {"properties": {"a": {"type": "integer"}}, "required": ["a", "b"]},
        {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["b"]},
        {"properties": {"b": {"type": "integer"}}},
    ]});
    let cases = [
        (
            json!({"a": "x"}),
            "`t` requires `b`, which is missing; `a` must be an integer; got the string \"x\"",
        ),
        (json!({"a": 1}), "`t` requires `b`, which is missing"),
    ];
    assert_messages(&twice, &cases).await;
}

#[tokio::test]
async fn one_of_error_uses_discriminating_member() {
    let forms = json!([
        {"properties": {"kind": {"const": "card"}, "number": {"type": "integer"}}, "required": ["kind", "number"]},
        {"properties": {"kind": {"const": "bank"}, "iban": {"type": "string"}}, "required": ["kind", "iban"]},
    ]);
    for word in ["oneOf", "anyOf"] {
        let schema = json!({"type": "object", word: forms});
        let cases = [
            (json!({"kind": "card", "number": 1}), "ok"),
            (
                json!({"kind": "card", "number": "x"}),
                "t: `number` must be an integer; got the string \"x\"",
            ),
            (json!({"kind": "bank", "iban": 5}), "t: `iban` must be a string; got 5"),
            (
                json!({"kind": "cash", "number": 1}),
                "t: `kind` must be one of \"card\", \"bank\"; got \"cash\"",
            ),
            (json!({"kind": "bank"}), "`t` requires `iban` (string), which is missing"),
            (json!({"number": 1}), "`t` requires `kind`, which is missing"),
            (json!({}), "`t` requires `kind` and `number`, or `kind` and `iban`"),
            // `iban` belongs to another form.
            (
                json!({"kind": "card", "number": 1, "iban": "x"}),
                "`t` does not accept `iban` together with the other members",
            ),
            (
                json!({"kind": "card", "number": 1, "ibn": "x"}),
                "`t` has no `ibn`, did you mean `iban`?",
            ),
        ];
        assert_messages(&schema, &cases).await;
        // The same schema inside an argument, by reference.
        let schema = json!({
            "type": "object", "properties": {"by": {"$ref": "#/$defs/payment"}}, "$defs": {"payment": {"type": "object", word: forms}},
        });
        let cases = [
            (
                json!({"by": {"kind": "card", "number": "x"}}),
                "t: `by.number` must be an integer; got the string \"x\"",
            ),
            (
                json!({"by": {"kind": "cash"}}),
                "t: `by.kind` must be one of \"card\", \"bank\"; got \"cash\"",
            ),
        ];
        assert_messages(&schema, &cases).await;
    }
}

#[tokio::test]
async fn any_of_error_lists_alternatives() {
    let text = json!({"type": "string"});
    let schema = json!({"type": "object", "properties": {"email": text, "phone": text, "at": {"anyOf": [text, {"type": "integer"}, {"type": "null"}]}},
        "anyOf": [{"required": ["email"]}, {"required": ["phone"]}]});
    let cases = [
        (json!({"phone": "1"}), "ok"),
        (json!({"email": "a", "at": null}), "ok"),
        (json!({}), "`t` requires `email` or `phone`"),
        (
            json!({"email": "a", "at": true}),
            "t: `at` must be a string or an integer or null; got true",
        ),
        (json!({"email": 5}), "t: `email` must be a string; got 5"),
    ];
    assert_messages(&schema, &cases).await;
    // The message is about the form that matches the given members.
    let forms = [
        json!({"properties": {"query": text}, "required": ["query"]}),
        json!({"properties": {"ids": {"type": "array", "items": {"type": "integer"}}}, "required": ["ids"]}),
    ];
    for forms in [json!([forms[0], forms[1]]), json!([forms[1], forms[0]])] {
        let cases = [
            (json!({"ids": [1]}), "ok"),
            (json!({"ids": ["x"]}), "t: `ids[0]` must be an integer; got the string \"x\""),
            (json!({"query": 5}), "t: `query` must be a string; got 5"),
        ];
        assert_messages(&json!({"type": "object", "oneOf": forms}), &cases).await;
    }
    let both = json!({"type": "object", "oneOf": [{"properties": {"a": text}, "required": ["a"]}, {"properties": {"b": text}, "required": ["b"]}]});
    assert_messages(
        &both,
        &[(
            json!({"a": "x", "b": "y"}),
            "t: the value must be of exactly one of the allowed forms; got object",
        )],
    )
    .await;
}

#[tokio::test]
async fn errors_in_references_and_nested_lists_have_paths() {
    let schema = json!({
        "type": "object",
        "properties": {
            "to": {"$ref": "#/$defs/address"},
            "bill": {"allOf": [{"$ref": "#/$defs/address"}, {"properties": {"vat": {"type": "string"}}}]},
            "orders": {"type": "array", "items": {"type": "object", "properties": {"lines": {"type": "array", "items": {"allOf": [{"$ref": "#/$defs/line"}]}}}}},
            "grid": {"type": "array", "items": {"type": "array", "items": {"$ref": "#/$defs/line"}}},
        },
        "patternProperties": {"^x-": {"allOf": [{"properties": {"on": {"type": "boolean"}}}]}},
        "$defs": {
            "address": {"type": "object", "properties": {"street": {"type": "string"}, "zip": {"type": "string"}}, "required": ["street"]},
            "line": {"properties": {"sku": {"type": "string"}, "count": {"type": "integer"}}, "required": ["sku"]},
        },
    });
    let cases = [
        (json!({"to": {"street": 5}}), "t: `to.street` must be a string; got 5"),
        (
            json!({"to": {"steet": "x"}}),
            "t: `to` requires `street` (string); got `steet`, did you mean `street`?",
        ),
        (
            json!({"bill": {"street": 5, "zip": "1", "vat": "x"}}),
            "t: `bill.street` must be a string; got 5",
        ),
        (
            json!({"bill": {"street": "x", "vatt": "x"}}),
            "t: `bill` has no `vatt`, did you mean `vat`?",
        ),
        (
            json!({"orders": [{"lines": [{"sku": "a", "count": "x"}]}]}),
            "t: `orders[0].lines[0].count` must be an integer; got the string \"x\"",
        ),
        (
            json!({"orders": [{"lines": [{"count": 1}]}]}),
            "t: `orders[0].lines[0]` requires `sku` (string), which is missing",
        ),
        (
            json!({"orders": [{"lines": [{"sku": "a"}, {"sku": "a", "cout": 1}]}]}),
            "t: `orders[0].lines[1]` has no `cout`, did you mean `count`?",
        ),
        (
            json!({"grid": [[{"sku": "a"}], [{"sku": 7}]]}),
            "t: `grid[1][0].sku` must be a string; got 7",
        ),
        (
            json!({"x-flag": {"on": "yes"}}),
            "t: `x-flag.on` must be a boolean; got the string \"yes\"",
        ),
    ];
    assert_messages(&schema, &cases).await;
    // An error inside a part has its path there.
    let inside = json!({"type": "object", "allOf": [{"properties": {"lines": {"type": "array", "items": {"type": "object", "properties": {"sku": {"type": "string"}}}}}}]});
    let cases = [
        (json!({"lines": [{"skuu": "a"}]}), "t: `lines[0]` has no `skuu`, did you mean `sku`?"),
        (json!({"lines": 7}), "t: `lines` must be an array; got 7"),
    ];
    assert_messages(&inside, &cases).await;
}
