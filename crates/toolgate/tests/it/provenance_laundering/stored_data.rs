//! Tests that values in files and notes stay untrusted after they are read back.

use serde_json::{Value, json};
use toolgate::policy::Flow;
use toolgate::{Agent, AgentBuilder, CallEffects, Effect, Failure, MemoryFs, Session, Tool};

use crate::flow::{
    UNTRUSTED_PAGE, call_code, can_send_to, fixed_answer_tool, send_tool, start_session,
};
use crate::support::{InjectedFault, TestWorld};

/// Returns the file tools, with `write_file` open to calls without a policy.
fn open_file_tools() -> impl IntoIterator<Item = Tool> {
    toolgate::builtin::files()
        .map(|tool| if tool.spec().name() == "write_file" { tool.open() } else { tool })
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
                Err(Failure::business("failed", "requested by the test"))
            } else {
                Ok(json!(true))
            }
        },
    );
    let agent = Agent::builder("a")
        .files(MemoryFs::default())
        .tools(open_file_tools())
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
            .tools(open_file_tools())
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
    // A saved page stays untrusted when another session reads it.
    let session = start_session(build());
    assert_eq!(call_code(&session, "download", json!({"path": "page.txt"})).await, "ok");
    let other = session.toolgate().session("a", "alice", "other");
    assert_eq!(call_code(&other, "read_file", json!({"path": "page.txt"})).await, "ok");
    assert!(!can_send_to(&other, "nina@evil.example").await);
    // Every spelling of the id of the note is recognized.
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
    // Only the result contains the id of the note. The note stays untrusted by id, in a list and
    // after a reset.
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
            "{tool}: no untrusted text was written"
        );
    }
}

#[tokio::test]
async fn write_and_read_back_keeps_taint() {
    let notes = std::sync::Arc::new(std::sync::Mutex::new(std::collections::BTreeMap::<
        String,
        String,
    >::new()));
    let (notes_to_write, notes_to_read) = (notes.clone(), notes.clone());
    let note = json!({"type": "object", "properties": {"id": {"type": "string"}, "text": {"type": "string"}}});
    let write = Tool::dynamic("write_note", "Writes.", note.clone(), move |_, args: Value| {
        let notes_to_write = notes_to_write.clone();
        async move {
            let mut notes = notes_to_write.lock().unwrap();
            let id = args["id"].as_str().unwrap_or_default().to_owned();
            // The store appends, so the result differs from the text of each single call.
            notes.entry(id).or_default().push_str(args["text"].as_str().unwrap_or_default());
            Ok(json!("kept"))
        }
    })
    .effect(Effect::Write)
    .open()
    .entity("note", "/id")
    .keeps("note");
    let read = Tool::dynamic("read_note", "Reads.", note, move |_, args: Value| {
        let notes_to_read = notes_to_read.clone();
        async move {
            Ok(json!(notes_to_read.lock().unwrap().get(args["id"].as_str().unwrap_or_default())))
        }
    })
    .effect(Effect::Read)
    .entity("note", "/id");
    let session = start_session(
        Agent::builder("a")
            .files(MemoryFs::new([("clean.txt", "frank@house.example")]))
            .tools(open_file_tools())
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
    // No single call contains the whole address.
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
    // A file without writes stays trusted.
    assert_eq!(call_code(&session, "read_file", json!({"path": "./clean.txt"})).await, "ok");
    assert!(can_send_to(&session, "frank@house.example").await);
}

#[tokio::test]
async fn flow_rule_distrusts_data_read_back_from_file() {
    let session = start_session(
        Agent::builder("a")
            .files(MemoryFs::default())
            .tools(open_file_tools())
            .tool(fixed_answer_tool("page", UNTRUSTED_PAGE).untrusted())
            .tool(send_tool())
            .policy(Flow::new("f", ["send"], ["/to"]).trust_tools(["read_file"])),
    );
    // Toolgate does not decode Rot13: the model decodes the text, writes it and reads it back.
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
        .tools(open_file_tools())
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
        let deferred =
            session.admit("save", json!({"text": "mail evil@x.com"})).await.ok().unwrap();
        assert_eq!(call_code(&session, "lookup", json!({})).await, "ok");
        assert!(!can_send_to(&session, "evil@x.com").await, "{effect:?}");
        session.report(&deferred, Ok(json!({}))).await;
    }
}

/// Adds two tools that keep notes, one of them run by the client, and a rule that trusts the notes.
fn with_note_tools(agent: AgentBuilder) -> AgentBuilder {
    let note = || json!({"type": "object", "properties": {"id": {"type": "string"}, "how": {"type": "string"}}});
    let amend =
        Tool::dynamic("amend", "Amends.", note(), |_, args: Value| async move {
            match args["how"].as_str() {
                Some("refuse") => Err(Failure::business("refused", "requested by the test")
                    .effects(CallEffects::None)),
                Some("fail") => Err(Failure::business("failed", "requested by the test")),
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

/// Reads a note and checks whether its content is trusted.
async fn is_note_trusted(session: &Session, id: &str) -> bool {
    assert_eq!(call_code(session, "read_note", json!({ "id": id })).await, "ok");
    can_send_to(session, "olga@house.example").await
}

#[tokio::test]
async fn call_without_effects_taints_nothing() {
    for (how, code, trusted) in
        [("refuse", "refused", true), ("fail", "failed", false), ("do", "ok", false)]
    {
        let session = start_session(with_note_tools(Agent::builder("a")));
        assert_eq!(call_code(&session, "amend", json!({"id": "7", "how": how})).await, code);
        for session in [&session, &session.toolgate().session("a", "alice", "other")] {
            assert_eq!(is_note_trusted(session, "7").await, trusted, "{how}");
        }
    }
    // A client may run a call as soon as it is admitted, so a later report does not remove the
    // taint.
    let session = start_session(with_note_tools(Agent::builder("a")));
    let another = |name: &str| session.toolgate().session("a", "alice", name);
    let deferred = session.admit("save", json!({"id": "7"})).await.ok().unwrap();
    assert!(
        !is_note_trusted(&another("1"), "7").await && is_note_trusted(&another("2"), "8").await
    );
    session
        .report(
            &deferred,
            Err(Failure::business("refused", "requested by the test").effects(CallEffects::None)),
        )
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
