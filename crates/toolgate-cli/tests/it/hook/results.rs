//! Tests how results of admitted calls are recorded and shown to the model.

use serde_json::{Value, json};

use super::service::HookServiceProcess;
use super::{CONFIG, TestProject, decision, hook_event, post_tool_use_event};

#[test]
fn deferred_call_is_settled_once_with_admitted_arguments() {
    let project = TestProject::with_config(CONFIG);
    let ls = json!({"command": "ls"});
    assert_eq!(project.pre_tool_use("t1", "Bash", ls.clone()), json!({}));
    let done = json!({"stdout": "a\nb", "stderr": "", "interrupted": false});
    assert_eq!(
        project.run_hook(&post_tool_use_event("t1", "Bash", ls.clone(), done.clone())),
        json!({})
    );
    let twice = project.run_hook(&post_tool_use_event("t1", "Bash", ls.clone(), done.clone()));
    assert_eq!(twice["decision"], "block");
    assert_eq!(project.pre_tool_use("t2", "Bash", json!({"command": "pwd"})), json!({}));
    let other = project.run_hook(&post_tool_use_event(
        "t2",
        "Bash",
        json!({"command": "pwd; id"}),
        done.clone(),
    ));
    assert!(
        other["reason"].as_str().unwrap().starts_with("the client ran other arguments"),
        "{other}"
    );
    let never = project.run_hook(&post_tool_use_event("t3", "Bash", ls, done));
    assert!(never["reason"].as_str().unwrap().contains("never admitted"), "{never}");
    let outcomes: Vec<(String, String)> = project.recorded_outcomes();
    let expected = [
        ("succeeded", ""),
        ("refused", "not_admitted"),
        ("failed", "not_as_admitted"),
        ("refused", "not_admitted"),
    ];
    assert_eq!(outcomes, expected.map(|(a, b)| (a.to_owned(), b.to_owned())));
    let (code, ..) = project.run(&["audit", "verify", "--store", "ledger.db"], "");
    assert_eq!(code, 0);
    let (code, stdout, _) = project.run(&["replay", "s1", "--store", "ledger.db"], "");
    assert_eq!(
        (code, stdout.matches("refused at settle (not_admitted)").count()),
        (0, 2),
        "{stdout}"
    );
    let (_, stdout, _) = project.run(&["replay", "s1", "--store", "ledger.db", "--json"], "");
    assert_eq!(stdout.matches(r#""was":"admitted""#).count(), 2, "{stdout}");
}

#[test]
fn normalized_result_hides_path_of_original() {
    let project = TestProject::with_config(CONFIG);
    let input = json!({"id": 7});
    assert_eq!(project.pre_tool_use("t1", "lookup", input.clone()), json!({}));
    let raw = json!({"created": 1_700_000_000, "persistedOutputPath": "/tmp/all", "persistedOutputSize": 5});
    let answer = project.run_hook(&post_tool_use_event("t1", "lookup", input.clone(), raw));
    assert_eq!(
        answer["hookSpecificOutput"]["updatedToolOutput"],
        json!({"created": "2023-11-14T22:13:20Z"})
    );
    // A result that cannot be normalized is withheld.
    assert_eq!(project.pre_tool_use("t2", "lookup", json!({"id": 8})), json!({}));
    let answer = project.run_hook(&post_tool_use_event(
        "t2",
        "lookup",
        json!({"id": 8}),
        json!({"created": "soon", "text": "secret"}),
    ));
    assert_eq!(answer["decision"], "block");
    assert_eq!(
        answer["hookSpecificOutput"]["updatedToolOutput"],
        json!({"created": "(withheld)", "text": "(withheld)"})
    );
}

#[test]
fn unreadable_result_is_withheld() {
    let shown = |answer: &Value| answer["hookSpecificOutput"]["updatedToolOutput"].clone();
    let project = TestProject::with_config(CONFIG);
    let lone = r#"{"hook_event_name":"PostToolUse","session_id":"s1","tool_name":"Bash","tool_input":{"command":"ls"},"tool_use_id":"t1","tool_response":{"stdout":"secret \ud83d"}}"#;
    assert_eq!(project.pre_tool_use("t1", "Bash", json!({"command": "ls"})), json!({}));
    let (code, stdout, _) = project.run(&["hook", "--config", "toolgate.toml"], lone);
    let answer: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(
        (code, &shown(&answer)["stdout"], &answer["decision"]),
        (0, &json!("(withheld)"), &json!("block"))
    );
    assert_eq!(
        project.recorded_outcomes(),
        [("failed".to_owned(), "unreadable_result".to_owned())]
    );
    // Two parsers may read different values of a duplicate key. This also holds for the formats of
    // other clients.
    let twice = r#"{"ok":false,"ok":true}"#;
    for (id, name, result) in [
        ("d1", r#""hook_event_name":"PostToolUse","#, format!(r#""tool_response":{twice}"#)),
        ("d2", r#""hook_event_name":"PostToolUse","#, format!(r#""tool_result":{twice}"#)),
        ("d3", r#""hook_event_name":"postToolUse","#, format!(r#""tool_output":{}"#, json!(twice))),
        ("d4", "", format!(r#""tool_result":{twice}"#)),
    ] {
        assert_eq!(project.pre_tool_use(id, "lookup", json!({"id": id})), json!({}), "{id}");
        let event = format!(
            r#"{{{name}"session_id":"s1","tool_name":"lookup","tool_input":{{"id":"{id}"}},"tool_use_id":"{id}",{result}}}"#
        );
        let (code, stdout, stderr) = project.run(&["hook", "--config", "toolgate.toml"], &event);
        assert!(code == 0 && stdout.contains("(withheld)"), "{id}: {stdout}{stderr}");
        assert_eq!(
            project.recorded_outcomes().last(),
            Some(&("failed".to_owned(), "unreadable_result".to_owned())),
            "{id}"
        );
    }
    // With an exit code, the client would show the result. So an unreadable event gets an answer
    // too.
    let event = r#""hook_event_name":"PostToolUse","session_id":"s1","tool_name":"Bash","tool_input":{"command":"pwd"},"tool_use_id":"m1","tool_response":{"stdout":"secret"}"#;
    for duplicate in
        [r#""tool_response":{"stdout":"other"}"#, r#""tool_output":{}"#, r#""is_interrupt":null"#]
    {
        for args in
            [&["hook", "--config", "toolgate.toml"][..], &["hook", "--config", "nowhere.toml"]]
        {
            let (code, stdout, stderr) = project.run(args, &format!("{{{event},{duplicate}}}"));
            let answer: Value =
                serde_json::from_str(&stdout).unwrap_or_else(|_| panic!("{duplicate}: {stderr}"));
            assert_eq!(
                (code, shown(&answer), &answer["decision"]),
                (0, json!({"stdout": "(withheld)"}), &json!("block")),
                "{duplicate}"
            );
        }
        assert_eq!(
            project.recorded_outcomes().last(),
            Some(&("refused".to_owned(), "invalid_request".to_owned())),
            "{duplicate}"
        );
    }
    // The call was not admitted, or the store, the configuration or the service is missing.
    let response = json!({"stdout": "secret"});
    let never = project.run_hook(&post_tool_use_event(
        "t9",
        "Bash",
        json!({"command": "id"}),
        response.clone(),
    ));
    assert_eq!(shown(&never)["stdout"], "(withheld)");
    std::fs::remove_file(project.path("project/ledger.db")).unwrap();
    let unavailable = project.run_hook(&post_tool_use_event(
        "t1",
        "Bash",
        json!({"command": "ls"}),
        response.clone(),
    ));
    assert_eq!(shown(&unavailable)["stdout"], "(withheld)");
    for args in [&["hook", "--config", "nowhere.toml"][..], &["hook", "--socket", "nowhere.sock"]] {
        let unavailable = project.run_hook_with(
            args,
            &post_tool_use_event("t1", "Bash", json!({"command": "ls"}), response.clone()),
        );
        assert_eq!(shown(&unavailable)["stdout"], "(withheld)", "{args:?}");
    }
}

#[test]
fn result_of_unreadable_event_is_withheld() {
    let project = TestProject::with_config(CONFIG);
    let _service = HookServiceProcess::start(&project);
    let events = |name: &str, text: &[u8]| {
        let (event_name, head) = (
            format!(r#""hook_event_name":"{name}""#),
            r#""session_id":"s1","tool_name":"Bash","tool_use_id":"u1""#,
        );
        let result = [
            &br#""tool_response":{"content":[{"type":"text","text":""#[..],
            text,
            br#""}],"more":true}"#,
        ]
        .concat();
        let early =
            [format!("{{{head},{event_name},").as_bytes(), result.as_slice(), b"}"].concat();
        let late = [
            format!("{{{head},").as_bytes(),
            result.as_slice(),
            format!(",{event_name}}}").as_bytes(),
        ]
        .concat();
        (early, late)
    };
    let run = |name: &str, args: &[&str], event: &[u8]| {
        let (code, stdout, stderr) =
            crate::output_snapshots::run_program(&project, name, args, event);
        assert!(!stdout.contains("secret") && !stderr.contains("secret"), "{stdout}{stderr}");
        (code, serde_json::from_str::<Value>(&stdout).unwrap_or_default())
    };
    let (long, not_utf8) =
        ([&b"secret "[..], vec![b'x'; 32 << 20].as_slice()].concat(), b"secret \xff".to_vec());
    let entry_points: [(&str, &[&str]); 2] = [
        ("toolgate-hook", &["--config", "toolgate.toml"]),
        ("toolgate-hook", &["--socket", "hook.sock"]),
    ];
    for (name, args) in entry_points {
        for (text, is_long) in [(&long, true), (&not_utf8, false)] {
            let (early, late) = events("PostToolUse", text);
            let (code, answer) = run(name, args, &early);
            let shown = &answer["hookSpecificOutput"]["updatedToolOutput"];
            assert_eq!(
                (code, &answer["decision"]),
                (0, &json!("block")),
                "{name} {args:?}: {answer}"
            );
            let withheld =
                json!({"content": [{"type": "text", "text": "(withheld)"}], "more": true});
            assert_eq!(*shown, withheld, "{name} {args:?}");
            if is_long && args[0] == "--config" {
                assert_eq!(
                    run(name, args, &late).1["hookSpecificOutput"]["updatedToolOutput"],
                    withheld
                );
            }
            assert_eq!(
                project.recorded_outcomes().last(),
                Some(&("refused".to_owned(), "invalid_request".to_owned())),
                "{name} {args:?}"
            );
            // Before the tool runs, the exit code denies the call.
            assert_eq!(run(name, args, &events("PreToolUse", text).0).0, 2, "{name} {args:?}");
        }
        // A truncated event, and events in which only a nested value has such a name.
        let (early, _) = events("PostToolUse", b"secret");
        let (code, answer) = run(name, args, &early[..early.len() - 12]);
        let shown = &answer["hookSpecificOutput"]["updatedToolOutput"];
        assert_eq!(
            (code, shown),
            (0, &json!({"stdout": "(withheld)", "stderr": "", "interrupted": false})),
            "{name} {args:?}"
        );
        for text in [
            &br#"{"tool_name":"Bash","tool_input":{"hook_event_name":"PostToolUse","x":"#[..],
            br#"{"hook_event_name":"PreToolUse","session_id":"s1","tool_name":"\",\"hook_event_name\":\"PostToolUse\",","tool_input":{"#,
            br#"{"hook_event_name":"PreToolUse","hook_event_name":"PostToolUse","tool_name":"Bash","tool_input":{"#,
        ] {
            assert_eq!(run(name, args, text), (2, Value::Null), "{name} {args:?} {}", String::from_utf8_lossy(text));
        }
    }
}

#[test]
fn calls_without_id_are_matched_by_arguments() {
    for id in [json!(""), Value::Null] {
        let project = TestProject::with_config(CONFIG);
        let send = |mut event: Value| {
            event["tool_use_id"] = id.clone();
            project.run_hook(&event)
        };
        let (first, second) = (json!({"command": "ls"}), json!({"command": "pwd"}));
        for input in [&first, &second] {
            assert_eq!(
                send(hook_event("PreToolUse", "", "Bash", input.clone())),
                json!({}),
                "{id}"
            );
        }
        for input in [&first, &second] {
            assert_eq!(
                send(post_tool_use_event("", "Bash", input.clone(), json!({"stdout": "x"}))),
                json!({}),
                "{id}"
            );
        }
        assert!(
            project.recorded_outcomes().iter().all(|(decision, _)| decision == "succeeded"),
            "{id}: {:?}",
            project.recorded_outcomes()
        );
    }
}

#[test]
fn failed_tool_is_done_and_interrupted_tool_is_pending() {
    let project = TestProject::with_config(CONFIG);
    for (id, interrupted) in [("t1", false), ("t2", true)] {
        let input = json!({"command": format!("make {id}")});
        assert_eq!(project.pre_tool_use(id, "Bash", input.clone()), json!({}));
        let mut failed = hook_event("PostToolUseFailure", id, "Bash", input);
        failed["error"] = json!("Exit code 2\nno rule, card 4111-1111-1111-1111");
        failed["is_interrupt"] = json!(interrupted);
        assert_eq!(project.run_hook(&failed), json!({}));
    }
    let rows = project.exported_rows();
    let text = rows.iter().map(Value::to_string).collect::<String>();
    assert!(text.contains("Exit code 2") && !text.contains("1111-1111"), "{text}");
    let effects: Vec<&str> = ["\"effects\":\"done\"", "\"effects\":\"unknown\""]
        .into_iter()
        .filter(|effect| text.contains(effect))
        .collect();
    assert_eq!(effects.len(), 2, "{text}");
}

#[test]
fn session_end_abandons_unreported_calls() {
    let project = TestProject::with_config(CONFIG);
    assert_eq!(project.pre_tool_use("t1", "Bash", json!({"command": "sleep 1000"})), json!({}));
    assert_eq!(
        project.run_hook(
            &json!({"hook_event_name": "SessionStart", "session_id": "s1", "source": "startup"})
        ),
        json!({})
    );
    assert_eq!(
        project.run_hook(
            &json!({"hook_event_name": "SessionEnd", "session_id": "s1", "reason": "other"})
        ),
        json!({})
    );
    assert_eq!(project.recorded_outcomes(), [("failed".to_owned(), "abandoned".to_owned())]);
    let late = project.run_hook(&post_tool_use_event(
        "t1",
        "Bash",
        json!({"command": "sleep 1000"}),
        json!({}),
    ));
    assert_eq!(late["decision"], "block");
}

#[test]
fn slow_after_hook_withholds_result() {
    let config = format!(
        "{CONFIG}\n[[hooks]]\nname = \"slow\"\ncommand = \"./slow.sh\"\ntools = [\"lookup\"]\nwhen = \"after\"\ntimeout = \"60s\"\n"
    );
    let project = TestProject::with_config(&config);
    project.write_script("project/slow.sh", "#!/bin/sh\nsleep 30\n");
    assert_eq!(project.pre_tool_use("t1", "lookup", json!({})), json!({}));
    let answer =
        project.run_hook(&post_tool_use_event("t1", "lookup", json!({}), json!({"secret": "x"})));
    assert_eq!(answer["hookSpecificOutput"]["updatedToolOutput"], json!({"secret": "(withheld)"}));
}

#[test]
fn repeated_once_call_is_refused_with_recorded_result() {
    let once = CONFIG.replace("[tools.write]\n", "[tools.write]\nonce = true\n");
    let input = json!({"file_path": "/tmp/x", "content": "y"});
    for (setting, place) in [("", ""), ("dialect = \"bucket\"\n", "/error")] {
        let project = TestProject::with_config(&format!("{setting}{once}"));
        assert_eq!(project.pre_tool_use("t1", "Write", input.clone()), json!({}));
        assert_eq!(
            project.run_hook(&post_tool_use_event(
                "t1",
                "Write",
                input.clone(),
                json!({"written": 7})
            )),
            json!({})
        );
        let answer = project.pre_tool_use("t2", "Write", input.clone());
        let (decided, reason) = decision(&answer);
        assert_eq!(decided, "deny", "{answer}");
        let contract: Value = serde_json::from_str(reason.lines().last().unwrap()).unwrap();
        let contract = contract.pointer(place).unwrap();
        for (field, value) in [
            ("code", json!("duplicate_call")),
            ("effects", json!("done")),
            ("replayed", json!(true)),
            ("upstream", json!({"written": 7})),
        ] {
            assert_eq!(contract[field], value, "{answer}");
        }
        assert!(contract["callId"].is_string(), "{answer}");
    }
}
