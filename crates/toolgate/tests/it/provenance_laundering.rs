//! What comes back proves nothing: echoes, files, notes and replays.

use serde_json::{Value, json};
use toolgate::policy::Flow;
use toolgate::{Agent, AgentBuilder, CallEffects, Effect, Failure, MemoryFs, Session, Tool};

use crate::flow::{
    UNTRUSTED_PAGE, call_code, can_send_to, echo_tool, fixed_answer_tool, send_tool, start_session,
};
use crate::support::{InjectedFault, TestWorld};

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
    assert!(can_send_to(&session, "Commerzbank").await, "what the tool added itself is believed");
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
    assert!(can_send_to(&session, "Commerzbank").await, "what the tool added itself is believed");
}

#[tokio::test]
async fn echoes_are_distrusted_and_new_values_trusted() {
    let rule = || Flow::only_from("known", ["send"], ["/to"]).trust_tools(["lookup"]);
    // What is asked, what is echoed of it, and what of that must not be believed.
    for (asked, echoed) in [
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
        assert_eq!(call_code(&session, "lookup", asked.clone()).await, "ok");
        assert!(!can_send_to(&session, echoed.clone()).await, "{echoed} of {asked}");
    }
    // Nor is what is taken out of an argument of an earlier call.
    for (written, back) in [
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
            .tool(fixed_answer_tool("lookup", back))
            .tool(send_tool())
            .policy(rule());
        let session = start_session(agent);
        assert_eq!(call_code(&session, "note", json!({ "says": written })).await, "ok");
        assert_eq!(call_code(&session, "lookup", json!({})).await, "ok");
        assert!(!can_send_to(&session, back).await, "{back} out of {written}");
    }
    // In the same call, in pieces however short or long.
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
    // Lists without spaces are lists.
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
    // In pieces, in two calls, shown side by side.
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
    // Names of a tool's own arguments were not written by anybody, nor words in other places.
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
    // A long text is no reason to believe nobody any more.
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
    // One source does not vouch for what only another has said.
    let session = start_session(
        Agent::builder("a").tool(echo_tool("lookup")).tool(send_tool()).policy(rule()),
    );
    session.add_user_text("They want it on DE89 3704 0044 0532 0130 00, it seems.").await.unwrap();
    assert_eq!(
        call_code(&session, "lookup", json!({"says": "DE89370400440532013000"})).await,
        "ok"
    );
    assert!(!can_send_to(&session, "DE89370400440532013000").await);
    // Searching by name finds somebody.
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

#[tokio::test]
async fn failed_write_keeps_taint_and_file_names_carry_it() {
    let fails = Tool::dynamic(
        "save",
        "Saves and fails.",
        json!({"type": "object", "properties": {"path": {"type": "string"}, "then": {"type": "string"}}}),
        |ctx: toolgate::ToolContext, args: Value| async move {
            ctx.files()?.write(args["path"].as_str().unwrap_or_default(), b"clean")?;
            if args["then"] == "fail" {
                Err(Failure::business("failed", "told to"))
            } else {
                Ok(json!(true))
            }
        },
    );
    let agent = Agent::builder("a")
        .files(MemoryFs::default())
        .tools(
            toolgate::builtin::files()
                .map(|tool| if tool.spec().name() == "write_file" { tool.open() } else { tool }),
        )
        .tool(fails.effect(Effect::Write).local().open())
        .tool(fixed_answer_tool("page", UNTRUSTED_PAGE).untrusted())
        .tool(send_tool())
        .policy(
            Flow::only_from("strict", ["send"], ["/to"]).trust_tools(["read_file", "list_files"]),
        );
    let tainted = start_session(agent);
    assert_eq!(call_code(&tainted, "page", json!({})).await, "ok");
    assert_eq!(
        call_code(
            &tainted,
            "write_file",
            json!({"path": "peggy@evil.example", "content": "quinn@evil.example"})
        )
        .await,
        "ok"
    );
    let clean = tainted.toolgate().session("a", "alice", "clean");
    assert_eq!(
        call_code(&clean, "save", json!({"path": "peggy@evil.example", "then": "fail"})).await,
        "failed"
    );
    let third = tainted.toolgate().session("a", "alice", "third");
    assert_eq!(call_code(&third, "read_file", json!({"path": "peggy@evil.example"})).await, "ok");
    let fourth = tainted.toolgate().session("a", "alice", "fourth");
    assert_eq!(call_code(&fourth, "list_files", json!({})).await, "ok");
    assert!(
        !can_send_to(&third, "quinn@evil.example").await
            && !can_send_to(&fourth, "peggy@evil.example").await
    );
}

#[tokio::test]
async fn taint_of_stored_data_outlives_session() {
    let download = Tool::dynamic(
        "download",
        "Saves a page.",
        json!({"type": "object", "properties": {"path": {"type": "string"}}}),
        |ctx: toolgate::ToolContext, args: Value| async move {
            ctx.files()?.write(args["path"].as_str().unwrap_or_default(), b"nina@evil.example")?;
            Ok(json!(true))
        },
    );
    let create = Tool::dynamic(
        "create_note",
        "Keeps.",
        json!({"type": "object", "properties": {"text": {"type": "string"}, "id": {}}}),
        |_, _| async { Ok(json!({"id": "n7"})) },
    );
    let list = Tool::dynamic(
        "list_notes",
        "Lists.",
        json!({"type": "object", "properties": {}}),
        |_, _| async { Ok(json!([{"text": "olga@evil.example"}])) },
    );
    let read = Tool::dynamic(
        "read_note",
        "Reads.",
        json!({"type": "object", "properties": {"id": {}}}),
        |_, _| async { Ok(json!("olga@evil.example")) },
    );
    let build = || {
        Agent::builder("a")
            .files(MemoryFs::default())
            .tools(
                toolgate::builtin::files().map(|tool| {
                    if tool.spec().name() == "write_file" { tool.open() } else { tool }
                }),
            )
            .tool(download.clone().effect(Effect::Write).local().open().untrusted())
            .tool(create.clone().effect(Effect::Write).open().entity("note", "/id").keeps("note"))
            .tool(list.clone().effect(Effect::Read).entity("note", "/id"))
            .tool(read.clone().effect(Effect::Read).entity("note", "/id"))
            .tool(fixed_answer_tool("page", UNTRUSTED_PAGE).untrusted())
            .tool(send_tool())
            .policy(Flow::only_from("strict", ["send"], ["/to"]).trust_tools([
                "read_file",
                "read_note",
                "list_notes",
            ]))
    };
    // A page that is saved and not shown; in another session it is what it was.
    let session = start_session(build());
    assert_eq!(call_code(&session, "download", json!({"path": "page.txt"})).await, "ok");
    let other = session.toolgate().session("a", "alice", "other");
    assert_eq!(call_code(&other, "read_file", json!({"path": "page.txt"})).await, "ok");
    assert!(!can_send_to(&other, "nina@evil.example").await);
    // Under whatever spelling the note is asked for.
    for id in [json!("N7"), json!(["n7"]), json!(null)] {
        let session = start_session(build());
        assert_eq!(call_code(&session, "page", json!({})).await, "ok");
        assert_eq!(
            call_code(&session, "create_note", json!({"text": "…", "id": null})).await,
            "ok"
        );
        let other = session.toolgate().session("a", "alice", "other");
        assert_eq!(call_code(&other, "read_note", json!({ "id": id })).await, "ok");
        assert!(!can_send_to(&other, "olga@evil.example").await, "{id}");
    }
    // A note whose name only the result tells, read by its name and in a list; and a reset forgets
    // nothing.
    for tool in ["read_note", "list_notes"] {
        let session = start_session(build());
        assert_eq!(call_code(&session, "page", json!({})).await, "ok");
        assert_eq!(call_code(&session, "create_note", json!({"text": "…"})).await, "ok");
        session.reset().await.unwrap();
        assert_eq!(
            call_code(
                &session,
                tool,
                if tool == "read_note" { json!({"id": "n7"}) } else { json!({}) }
            )
            .await,
            "ok"
        );
        assert!(!can_send_to(&session, "olga@evil.example").await, "{tool}");
        let clean = start_session(build());
        assert_eq!(call_code(&clean, tool, json!({})).await, "ok");
        assert!(
            can_send_to(&clean, "olga@evil.example").await,
            "{tool} of what nobody strange has written"
        );
    }
}

#[tokio::test]
async fn write_and_read_back_keeps_taint() {
    let notes = std::sync::Arc::new(std::sync::Mutex::new(std::collections::BTreeMap::<
        String,
        String,
    >::new()));
    let (kept, held) = (notes.clone(), notes.clone());
    let note = json!({"type": "object", "properties": {"id": {"type": "string"}, "text": {"type": "string"}}});
    let write = Tool::dynamic("write_note", "Writes.", note.clone(), move |_, args: Value| {
        let kept = kept.clone();
        async move {
            let mut notes = kept.lock().unwrap();
            let id = args["id"].as_str().unwrap_or_default().to_owned();
            // A store that appends: what comes back is not what any single call wrote.
            notes.entry(id).or_default().push_str(args["text"].as_str().unwrap_or_default());
            Ok(json!("kept"))
        }
    })
    .effect(Effect::Write)
    .open()
    .entity("note", "/id")
    .keeps("note");
    let read = Tool::dynamic("read_note", "Reads.", note, move |_, args: Value| {
        let held = held.clone();
        async move { Ok(json!(held.lock().unwrap().get(args["id"].as_str().unwrap_or_default()))) }
    })
    .effect(Effect::Read)
    .entity("note", "/id");
    let session =
        start_session(
            Agent::builder("a")
                .files(MemoryFs::new([("clean.txt", "frank@house.example")]))
                .tools(toolgate::builtin::files().map(|tool| {
                    if tool.spec().name() == "write_file" { tool.open() } else { tool }
                }))
                .tool(write)
                .tool(read)
                .tool(fixed_answer_tool("page", UNTRUSTED_PAGE).untrusted())
                .tool(send_tool())
                .policy(
                    Flow::only_from("strict", ["send"], ["/to"])
                        .trust_tools(["read_file", "read_note"]),
                ),
        );
    assert_eq!(call_code(&session, "read_file", json!({"path": "clean.txt"})).await, "ok");
    assert!(can_send_to(&session, "frank@house.example").await);
    assert_eq!(call_code(&session, "page", json!({})).await, "ok");
    // In pieces, so that no single call holds the address.
    for (n, piece) in ["grace", "@evil", ".exam", "ple"].iter().enumerate() {
        assert_eq!(
            call_code(&session, "write_note", json!({"id": "1", "text": piece})).await,
            "ok",
            "{n}"
        );
    }
    assert_eq!(call_code(&session, "read_note", json!({"id": "1"})).await, "ok");
    assert!(!can_send_to(&session, "grace@evil.example").await, "pieces of a note");
    assert_eq!(
        call_code(
            &session,
            "write_file",
            json!({"path": "plan.txt", "content": "heidi@evil.example"})
        )
        .await,
        "ok"
    );
    assert_eq!(call_code(&session, "read_file", json!({"path": "plan.txt"})).await, "ok");
    assert!(!can_send_to(&session, "heidi@evil.example").await, "a file");
    // A file that nobody wrote to is believed as before.
    assert_eq!(call_code(&session, "read_file", json!({"path": "./clean.txt"})).await, "ok");
    assert!(can_send_to(&session, "frank@house.example").await);
}

#[tokio::test]
async fn flow_rule_distrusts_data_read_back_from_file() {
    let session =
        start_session(
            Agent::builder("a")
                .files(MemoryFs::default())
                .tools(toolgate::builtin::files().map(|tool| {
                    if tool.spec().name() == "write_file" { tool.open() } else { tool }
                }))
                .tool(fixed_answer_tool("page", UNTRUSTED_PAGE).untrusted())
                .tool(send_tool())
                .policy(Flow::new("f", ["send"], ["/to"]).trust_tools(["read_file"])),
        );
    // Rot13 is an encoding that nobody looks through: the model decodes it, writes it down and
    // reads it back.
    assert_eq!(call_code(&session, "page", json!({})).await, "ok");
    assert_eq!(
        call_code(
            &session,
            "write_file",
            json!({"path": "n.txt", "content": "judy@elsewhere.test"})
        )
        .await,
        "ok"
    );
    assert_eq!(call_code(&session, "read_file", json!({"path": "n.txt"})).await, "ok");
    assert!(!can_send_to(&session, "judy@elsewhere.test").await);
}

#[tokio::test]
async fn replayed_file_read_keeps_taint() {
    let agent = Agent::builder("a")
        .files(MemoryFs::default())
        .tools(
            toolgate::builtin::files()
                .map(|tool| if tool.spec().name() == "write_file" { tool.open() } else { tool }),
        )
        .tool(fixed_answer_tool("page", UNTRUSTED_PAGE).untrusted())
        .tool(send_tool())
        .policy(Flow::new("f", ["send"], ["/to"]));
    let first = start_session(agent);
    assert_eq!(call_code(&first, "page", json!({})).await, "ok");
    assert_eq!(
        call_code(&first, "write_file", json!({"path": "n.txt", "content": "rupert@evil.example"}))
            .await,
        "ok"
    );
    let keyed = |session: &Session| {
        session.prepare("read_file", json!({"path": "n.txt"})).idempotency_key("k")
    };
    assert!(first.toolgate().call(keyed(&first)).await.outcome.success().is_some());
    let second = first.toolgate().session("a", "alice", "another");
    assert!(
        first
            .toolgate()
            .call(keyed(&second))
            .await
            .outcome
            .success()
            .is_some_and(|output| output.replayed)
    );
    assert!(!can_send_to(&second, "rupert@evil.example").await);
}

#[tokio::test]
async fn unreported_deferred_call_counts_as_write() {
    let rule = Flow::only_from("known", ["send"], ["/to"]).trust_tools(["lookup"]);
    for effect in [Effect::Write, Effect::Read] {
        let save = Tool::external("save", "Saves.", None).effect(effect).open();
        let session = start_session(
            Agent::builder("a")
                .tool(save)
                .tool(fixed_answer_tool("lookup", "evil@x.com"))
                .tool(send_tool())
                .policy(rule.clone()),
        );
        let pass = session.admit("save", json!({"text": "mail evil@x.com"})).await.ok().unwrap();
        assert_eq!(call_code(&session, "lookup", json!({})).await, "ok");
        assert!(!can_send_to(&session, "evil@x.com").await, "{effect:?}");
        session.report(&pass, Ok(json!({}))).await;
    }
}

/// Notes that are kept, by a tool that is run here and by a client, and believed.
fn with_note_tools(agent: AgentBuilder) -> AgentBuilder {
    let note = || json!({"type": "object", "properties": {"id": {"type": "string"}, "how": {"type": "string"}}});
    let amend = Tool::dynamic("amend", "Amends.", note(), |_, args: Value| async move {
        match args["how"].as_str() {
            Some("refuse") => {
                Err(Failure::business("refused", "told to").effects(CallEffects::None))
            }
            Some("fail") => Err(Failure::business("failed", "told to")),
            _ => Ok(json!({})),
        }
    });
    let read = Tool::dynamic("read_note", "Reads.", note(), |_, _| async {
        Ok(json!("olga@house.example"))
    });
    let keeps = |tool: Tool| tool.effect(Effect::Write).open().entity("note", "/id").keeps("note");
    agent
        .tool(keeps(amend))
        .tool(keeps(Tool::external("save", "Saves.", Some(note()))))
        .tool(read.effect(Effect::Read).entity("note", "/id"))
        .tool(send_tool())
        .policy(Flow::only_from("strict", ["send"], ["/to"]).trust_tools(["read_note"]))
}

/// Whether a session believes what it reads of a note.
async fn is_note_trusted(session: &Session, id: &str) -> bool {
    assert_eq!(call_code(session, "read_note", json!({ "id": id })).await, "ok");
    can_send_to(session, "olga@house.example").await
}

#[tokio::test]
async fn call_without_effects_taints_nothing() {
    for (how, code, believed) in
        [("refuse", "refused", true), ("fail", "failed", false), ("do", "ok", false)]
    {
        let session = start_session(with_note_tools(Agent::builder("a")));
        assert_eq!(call_code(&session, "amend", json!({"id": "7", "how": how})).await, code);
        for session in [&session, &session.toolgate().session("a", "alice", "other")] {
            assert_eq!(is_note_trusted(session, "7").await, believed, "{how}");
        }
    }
    // What a client runs may have happened from the moment on that it is let through, whatever it
    // says later.
    let session = start_session(with_note_tools(Agent::builder("a")));
    let another = |name: &str| session.toolgate().session("a", "alice", name);
    let pass = session.admit("save", json!({"id": "7"})).await.ok().unwrap();
    assert!(
        !is_note_trusted(&another("1"), "7").await && is_note_trusted(&another("2"), "8").await
    );
    session
        .report(&pass, Err(Failure::business("refused", "told to").effects(CallEffects::None)))
        .await;
    assert!(!is_note_trusted(&another("3"), "7").await);
}

#[tokio::test]
async fn unrecorded_call_still_taints_its_entity() {
    for fails in [InjectedFault::Commit, InjectedFault::CommitPanics] {
        let world = TestWorld::new(with_note_tools);
        world.store.inject_faults(&[fails]);
        assert_ne!(call_code(&world.session, "amend", json!({"id": "7"})).await, "ok", "{fails:?}");
        world.store.inject_faults(&[]);
        world.gate.recover_spool().await.unwrap();
        let another = |name: &str| world.gate.session("agent", "alice", name);
        assert!(
            !is_note_trusted(&another("1"), "7").await && is_note_trusted(&another("2"), "8").await,
            "{fails:?}"
        );
    }
}
