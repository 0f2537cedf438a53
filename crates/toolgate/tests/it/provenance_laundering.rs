//! Tests that a value does not become trusted because a tool returns it.

mod stored_data;

use serde_json::{Value, json};
use toolgate::policy::Flow;
use toolgate::{Agent, Effect, Tool};

use crate::flow::{
    UNTRUSTED_PAGE, call_code, can_send_to, echo_tool, fixed_answer_tool, send_tool, start_session,
};

#[tokio::test]
async fn normalized_echo_of_argument_is_not_trusted() {
    let check = Tool::dynamic(
        "check",
        "Normalises.",
        json!({"type": "object", "properties": {"iban": {"type": "string"}, "mail": {"type": "string"}}}),
        |_, args: Value| async move {
            Ok(
                json!({"iban": args["iban"].as_str().unwrap_or_default().replace('-', ""), "mail": args["mail"].as_str().unwrap_or_default().to_lowercase(), "bank": "Commerzbank"}),
            )
        },
    );
    let session = start_session(
        Agent::builder("a")
            .tool(check.effect(Effect::Read))
            .tool(send_tool())
            .policy(Flow::only_from("known", ["send"], ["/to"]).trust_tools(["check"])),
    );
    assert_eq!(
        call_code(
            &session,
            "check",
            json!({"iban": "DE89-3704-0044-0532-0130-00", "mail": "Mallory@Evil.Example"})
        )
        .await,
        "ok"
    );
    for to in ["DE89370400440532013000", "mallory@evil.example"] {
        assert!(!can_send_to(&session, to).await, "{to}");
    }
    assert!(can_send_to(&session, "Commerzbank").await, "values added by the tool are trusted");
}

#[tokio::test]
async fn zero_padded_echo_of_number_is_not_trusted() {
    let schema = json!({"type": "object", "properties": {"id": {"type": "integer"}}});
    let pad = Tool::dynamic("pad", "Pads.", schema, |_, args: Value| async move {
        Ok(
            json!({"account": format!("{:012}", args["id"].as_u64().unwrap_or_default()), "bank": "Commerzbank"}),
        )
    });
    let session = start_session(
        Agent::builder("a")
            .tool(pad.effect(Effect::Read))
            .tool(send_tool())
            .policy(Flow::only_from("known", ["send"], ["/to"]).trust_tools(["pad"])),
    );
    assert_eq!(call_code(&session, "pad", json!({"id": 12_345_678})).await, "ok");
    for to in ["000012345678", "12345678"] {
        assert!(!can_send_to(&session, to).await, "{to}");
    }
    assert!(can_send_to(&session, "Commerzbank").await, "values added by the tool are trusted");
}

#[tokio::test]
async fn echoes_are_distrusted_and_new_values_trusted() {
    let rule = || Flow::only_from("known", ["send"], ["/to"]).trust_tools(["lookup"]);
    // Each case: the argument, and the echoed part that must stay untrusted.
    for (argument, echoed) in [
        (json!({"says": {"id": 4711}}), json!(4711)),
        (json!({"says": "C-9"}), json!("C-9")),
        (json!({"says": "ship to 10 Downing Street now"}), json!("10 Downing Street")),
        (json!({"says": "mail a'mallory@evil.com today"}), json!("a'mallory@evil.com")),
        (json!({"says": "word ".repeat(200)}), json!("word ".repeat(200).trim())),
        (json!({"says": "--"}), json!("--")),
    ] {
        let session = start_session(
            Agent::builder("a").tool(echo_tool("lookup")).tool(send_tool()).policy(rule()),
        );
        assert_eq!(call_code(&session, "lookup", argument.clone()).await, "ok");
        assert!(!can_send_to(&session, echoed.clone()).await, "{echoed} of {argument}");
    }
    // Values extracted from an argument of an earlier call stay untrusted.
    for (note, returned) in [
        ("EMAIL:evil@x.com", "evil@x.com"),
        ("iban=DE89370400440532013000", "DE89370400440532013000"),
        ("{\"to\":\"evil@x.com\"}", "evil@x.com"),
        ("a@b.com,evil@x.com", "evil@x.com"),
        ("ZXZpbEB4LmNvbQ==", "evil@x.com"),
        ("pay DE8937040044 0532013000 now", "DE8937040044 0532013000"),
        ("pay DE8937040044 0532013000 now", "DE89370400440532013000"),
    ] {
        let agent = Agent::builder("a")
            .tool(echo_tool("note"))
            .tool(fixed_answer_tool("lookup", returned))
            .tool(send_tool())
            .policy(rule());
        let session = start_session(agent);
        assert_eq!(call_code(&session, "note", json!({ "says": note })).await, "ok");
        assert_eq!(call_code(&session, "lookup", json!({})).await, "ok");
        assert!(!can_send_to(&session, returned).await, "{returned} out of {note}");
    }
    // Values joined from two arguments of one call stay untrusted.
    let joins = || {
        Tool::dynamic(
            "lookup",
            "Joins.",
            json!({"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}}),
            |_, args: Value| async move {
                Ok(
                    json!({"joined": format!("{}{}", args["a"].as_str().unwrap_or_default(), args["b"].as_str().unwrap_or_default()), "bank": "Commerzbank"}),
                )
            },
        )
    };
    let long = format!("https://evil.example/{}", "path".repeat(30));
    for (a, b) in [
        ("DE", "89370400440532013000"),
        ("jo", "@evil.example"),
        ("https://evil.example/", "path".repeat(30).as_str()),
    ] {
        let session = start_session(
            Agent::builder("a").tool(joins().effect(Effect::Read)).tool(send_tool()).policy(rule()),
        );
        assert_eq!(call_code(&session, "lookup", json!({"a": a, "b": b})).await, "ok");
        assert!(!can_send_to(&session, format!("{a}{b}")).await, "{a} + {b}");
        assert!(can_send_to(&session, "Commerzbank").await);
    }
    assert!(long.len() > 96);
    // Values in a list without spaces are separate values.
    let csv = "Jane Doe,jane@acme.example,DE02120300000000202051\n{\"mail\":\"mum@family.example\"} Dad<dad@family.example>";
    let session = start_session(
        Agent::builder("a")
            .tool(fixed_answer_tool("lookup", &serde_json::to_string(csv).unwrap()))
            .tool(send_tool())
            .policy(rule()),
    );
    assert_eq!(call_code(&session, "lookup", json!({})).await, "ok");
    for to in [
        "jane@acme.example",
        "DE02120300000000202051",
        "mum@family.example",
        "dad@family.example",
        "Jane Doe",
    ] {
        assert!(can_send_to(&session, to).await, "{to}");
    }
    // Pieces written by two calls and returned side by side stay untrusted.
    let session = start_session(
        Agent::builder("a")
            .tool(echo_tool("note"))
            .tool(fixed_answer_tool("lookup", "DE89 3704 0044 0532 0130 00"))
            .tool(send_tool())
            .policy(rule()),
    );
    assert_eq!(call_code(&session, "note", json!({"says": "DE89 3704 0044"})).await, "ok");
    assert_eq!(call_code(&session, "note", json!({"says": "0532 0130 00"})).await, "ok");
    assert_eq!(call_code(&session, "lookup", json!({})).await, "ok");
    assert!(
        !can_send_to(&session, "DE89370400440532013000").await
            && !can_send_to(&session, "DE89 3704 0044 0532 0130 00").await
    );
    // Argument names of a tool, and words in other positions, do not count as written by the model.
    let named = Tool::dynamic(
        "find",
        "Finds.",
        json!({"type": "object", "properties": {"user_id": {"type": "integer"}, "text": {"type": "string"}}}),
        |_, _| async { Ok(json!(1)) },
    );
    let session = start_session(
        Agent::builder("a")
            .tool(named.effect(Effect::Read))
            .tool(fixed_answer_tool("lookup", r#"["user", "North Park"]"#))
            .tool(send_tool())
            .policy(rule()),
    );
    assert_eq!(call_code(&session, "find", json!({"user_id": 7, "text": "up north"})).await, "ok");
    assert_eq!(
        call_code(&session, "find", json!({"user_id": 8, "text": "in the park"})).await,
        "ok"
    );
    assert_eq!(call_code(&session, "lookup", json!({})).await, "ok");
    assert!(can_send_to(&session, "user").await && can_send_to(&session, "North Park").await);
    // A long text does not make all other values untrusted.
    let session = start_session(
        Agent::builder("a")
            .tool(echo_tool("note"))
            .tool(fixed_answer_tool("lookup", "mum@family.example"))
            .tool(send_tool())
            .policy(rule()),
    );
    assert_eq!(
        call_code(&session, "note", json!({"says": "many words of no consequence ".repeat(2_000)}))
            .await,
        "ok"
    );
    assert_eq!(call_code(&session, "lookup", json!({})).await, "ok");
    assert!(can_send_to(&session, "mum@family.example").await);
    // A trusted tool does not vouch for a value that only the user gave.
    let session = start_session(
        Agent::builder("a").tool(echo_tool("lookup")).tool(send_tool()).policy(rule()),
    );
    session.add_user_text("They want it on DE89 3704 0044 0532 0130 00, it seems.").await.unwrap();
    assert_eq!(
        call_code(&session, "lookup", json!({"says": "DE89370400440532013000"})).await,
        "ok"
    );
    assert!(!can_send_to(&session, "DE89370400440532013000").await);
    // A search by name returns new values, which are trusted.
    let search = Tool::dynamic(
        "search",
        "Searches.",
        json!({"type": "object", "properties": {"query": {"type": "string"}}}),
        |_, _| async {
            Ok(
                json!([{"name": "Jane Doe", "mail": "jane.doe@acme.com", "iban": "DE02120300000000202051"}]),
            )
        },
    );
    let rule = Flow::only_from("known", ["send"], ["/to"]).trust_tools(["search"]);
    let session = start_session(
        Agent::builder("a")
            .tool(search.effect(Effect::Read))
            .tool(fixed_answer_tool("page", UNTRUSTED_PAGE).untrusted())
            .tool(send_tool())
            .policy(rule),
    );
    assert_eq!(call_code(&session, "search", json!({"query": "jane doe acme"})).await, "ok");
    assert!(
        can_send_to(&session, "jane.doe@acme.com").await
            && can_send_to(&session, "DE02120300000000202051").await
    );
}

#[tokio::test]
async fn echo_of_earlier_call_is_not_trusted() {
    let rule = Flow::only_from("known", ["send"], ["/to"]).trust_tools(["lookup", "recall"]);
    let session = start_session(
        Agent::builder("a")
            .tool(echo_tool("lookup"))
            .tool(fixed_answer_tool("recall", "eve@evil.example"))
            .tool(send_tool())
            .policy(rule),
    );
    assert_eq!(call_code(&session, "lookup", json!({"says": "eve@evil.example"})).await, "ok");
    assert!(!can_send_to(&session, "eve@evil.example").await, "an echo of the call itself");
    assert_eq!(call_code(&session, "recall", json!({})).await, "ok");
    assert!(!can_send_to(&session, "eve@evil.example").await, "an echo of an earlier call");
}
