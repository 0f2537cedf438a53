//! Tests which tools are quarantined, in one process and with several.

use serde_json::json;

use super::*;

fn upstream() -> UpstreamConfig {
    toolgate_config::Config::parse("toolgate.toml", "[upstreams.a]\ncommand = \"a\"\n")
        .upstreams
        .remove(0)
}

fn tool(name: &str, description: &str) -> Tool {
    serde_json::from_value(
        json!({"name": name, "description": description, "inputSchema": {"type": "object"}}),
    )
    .unwrap()
}

/// Returns the descriptions of quarantined tools: accepted, and current.
fn quarantined_texts(pins: &Pins) -> Vec<(String, String)> {
    let description_of = |tool: &Value| tool["description"].as_str().unwrap_or_default().to_owned();
    pins.quarantined()
        .iter()
        .map(|change| {
            (
                change.before.as_ref().map(description_of).unwrap_or_default(),
                description_of(&change.now),
            )
        })
        .collect()
}

/// Returns the quarantined tools as stored, without asking the upstream.
fn stored_quarantine(directory: &Path) -> Vec<(String, String)> {
    quarantined_texts(&Pins::open(Some(directory), &upstream()).unwrap())
}

/// Shows the quarantined tools and accepts them.
fn accept(directory: &Path) {
    let pins = Pins::open(Some(directory), &upstream()).unwrap();
    pins.show_quarantined().unwrap();
    assert_eq!(pins.accept(None).unwrap().tools, ["look"]);
}

fn pair(before: &str, now: &str) -> Vec<(String, String)> {
    vec![(before.to_owned(), now.to_owned())]
}

#[test]
fn each_process_uses_the_definitions_of_its_own_upstream() {
    let home = tempfile::tempdir().unwrap();
    let open = || Pins::open(Some(home.path()), &upstream()).unwrap();
    let (old, new) = ([tool("look", "Looks.")], [tool("look", "Looks further.")]);
    let (process_a, process_b) = (open(), open());
    process_a.record_offered(&old).unwrap();
    let accepted = process_a.accepted_digest("look");
    process_b.record_offered(&new).unwrap();
    for _ in 0..2 {
        // Each process has read what the other one wrote.
        for pins in [&process_a, &process_b] {
            pins.retry_recording();
            assert_eq!(pins.accepted_digest("look"), accepted);
        }
        assert!(process_a.is_current("look", accepted) && quarantined_texts(&process_a).is_empty());
        assert!(!process_b.is_current("look", accepted));
        assert_eq!(
            (quarantined_texts(&process_b), stored_quarantine(home.path())),
            (pair("Looks.", "Looks further."), pair("Looks.", "Looks further."))
        );
        process_a.record_offered(&old).unwrap();
        assert!(!process_b.is_current("look", accepted));
        process_b.record_offered(&new).unwrap();
    }
    // After the other version is accepted, the first one is quarantined.
    accept(home.path());
    for pins in [&process_a, &process_b] {
        assert_eq!(pins.accepted_digest("look"), Some(tool_digest(&new[0])));
    }
    assert!(
        process_b.is_current("look", process_b.accepted_digest("look"))
            && quarantined_texts(&process_b).is_empty()
    );
    assert!(
        !process_a.is_current("look", process_a.accepted_digest("look"))
            && !process_a.is_current("look", accepted)
    );
    process_a.record_offered(&old).unwrap();
    process_b.record_offered(&new).unwrap();
    assert_eq!(
        (quarantined_texts(&process_a), stored_quarantine(home.path())),
        (pair("Looks further.", "Looks."), pair("Looks further.", "Looks."))
    );
    // If both upstreams have that version, nothing is quarantined.
    process_a.record_offered(&new).unwrap();
    assert!(
        process_a.is_current("look", process_a.accepted_digest("look"))
            && stored_quarantine(home.path()).is_empty()
    );
}

#[test]
fn an_old_difference_is_resolved_unless_another_process_sees_it() {
    let home = tempfile::tempdir().unwrap();
    let open = || Pins::open(Some(home.path()), &upstream()).unwrap();
    let (old, new) = ([tool("look", "Looks.")], [tool("look", "Looks further.")]);
    let before = open();
    before.record_offered(&old).unwrap();
    before.record_offered(&new).unwrap();
    // The upstream went back to the old version while the process was stopped.
    let after = open();
    assert_eq!(stored_quarantine(home.path()).len(), 1);
    after.record_offered(&old).unwrap();
    assert!(
        stored_quarantine(home.path()).is_empty()
            && after.is_current("look", after.accepted_digest("look"))
    );
    // A second process that still sees the new version reports it when it reads the file again.
    assert!(!before.is_current("look", before.accepted_digest("look")));
    before.retry_recording();
    assert_eq!(stored_quarantine(home.path()).len(), 1);
    after.record_offered(&old).unwrap();
    assert_eq!(stored_quarantine(home.path()).len(), 1);
    assert!(
        after.is_current("look", after.accepted_digest("look"))
            && !before.is_current("look", before.accepted_digest("look"))
    );
}

#[test]
fn quarantine_survives_a_missing_listing() {
    let home = tempfile::tempdir().unwrap();
    let open = || Pins::open(Some(home.path()), &upstream()).unwrap();
    let before = open();
    before.record_offered(&[tool("look", "Looks."), tool("find", "Finds.")]).unwrap();
    before.record_offered(&[tool("look", "Looks further."), tool("find", "Finds.")]).unwrap();
    // The next process lists neither tool.
    let after = open();
    for _ in 0..2 {
        assert!(!after.is_current("look", after.accepted_digest("look")));
        assert!(after.is_current("find", after.accepted_digest("find")));
        assert_eq!(quarantined_texts(&after), pair("Looks.", "Looks further."));
        after.record_offered(&[]).unwrap();
    }
    after.record_offered(&[tool("look", "Looks.")]).unwrap();
    assert!(after.is_current("look", after.accepted_digest("look")));
}

/// If two processes did, the definition that a person reviewed could change before the person
/// accepts it.
#[test]
fn two_processes_do_not_overwrite_each_other() {
    let home = tempfile::tempdir().unwrap();
    let open = || Pins::open(Some(home.path()), &upstream()).unwrap();
    let (second, third) = ([tool("look", "Second.")], [tool("look", "Third.")]);
    let (process_a, process_b) = (open(), open());
    process_a.record_offered(&[tool("look", "First.")]).unwrap();
    process_a.record_offered(&second).unwrap();
    process_b.record_offered(&third).unwrap();
    for _ in 0..2 {
        process_a.record_offered(&second).unwrap();
        process_a.retry_recording();
        process_b.record_offered(&third).unwrap();
        assert_eq!(stored_quarantine(home.path()), pair("First.", "Third."));
    }
    accept(home.path());
    assert!(
        process_b.is_current("look", process_b.accepted_digest("look"))
            && !process_a.is_current("look", process_a.accepted_digest("look"))
    );
    process_b.record_offered(&third).unwrap();
    process_a.record_offered(&second).unwrap();
    assert_eq!(stored_quarantine(home.path()), pair("Third.", "Second."));
}

#[test]
fn duplicate_names_are_quarantined_in_either_order() {
    let (tool_a, tool_b) = (tool("look", "Looks."), tool("look", "Looks further."));
    for list in [[tool_a.clone(), tool_b.clone()], [tool_b, tool_a.clone()]] {
        let pins = Pins::open(None, &upstream()).unwrap();
        pins.record_offered(std::slice::from_ref(&tool_a)).unwrap();
        let accepted = pins.accepted_digest("look");
        for _ in 0..2 {
            pins.record_offered(&list).unwrap();
            assert!(!pins.is_current("look", accepted));
            assert_eq!(quarantined_texts(&pins), pair("Looks.", "Looks further."));
        }
        pins.record_offered(std::slice::from_ref(&tool_a)).unwrap();
        assert!(pins.is_current("look", accepted) && quarantined_texts(&pins).is_empty());
        // The same without an earlier definition.
        let pins = Pins::open(None, &upstream()).unwrap();
        pins.record_offered(&list).unwrap();
        assert_eq!((pins.accepted_digest("look"), quarantined_texts(&pins).len()), (None, 1));
    }
}

#[test]
fn concurrent_writes_are_all_stored() {
    let home = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let directory = home.path();
            scope.spawn(move || {
                let pins = Pins::open(Some(directory), &upstream()).unwrap();
                for number in 0..8 {
                    pins.record_offered(&[tool(&format!("look_{thread}_{number}"), "Looks.")])
                        .unwrap();
                }
                // On a slow disk the lock may have timed out.
                pins.retry_recording();
            });
        }
    });
    assert_eq!(Pins::open(Some(home.path()), &upstream()).unwrap().accepted().unwrap().len(), 24);
}

/// A process that holds the lock may be suspended.
#[test]
fn a_stuck_lock_holder_neither_blocks_nor_accepts() {
    let home = tempfile::tempdir().unwrap();
    let pins = Pins::open(Some(home.path()), &upstream()).unwrap();
    pins.record_offered(&[tool("look", "Looks.")]).unwrap();
    let accepted = pins.accepted_digest("look");
    let held_lock =
        std::fs::File::options().write(true).open(home.path().join("a.json.lock")).unwrap();
    rustix::fs::flock(&held_lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    pins.record_offered(&[tool("look", "Looks further."), tool("find", "Finds.")]).unwrap();
    assert!(!pins.is_current("look", accepted) && pins.accepted_digest("find").is_none());
    assert!(pins.quarantined().iter().any(|change| change.tool == "find"
        && matches!(&change.why[..], [QuarantineReason::Unwritten { .. }])));
    assert!(stored_quarantine(home.path()).is_empty());
    // The kernel releases the lock when the process ends.
    drop(held_lock);
    pins.retry_recording();
    assert!(pins.accepted_digest("find").is_some());
    assert_eq!(stored_quarantine(home.path()), pair("Looks.", "Looks further."));
}

/// A tool without a stored pin counts as new after the next start, even if its definition changed.
#[test]
fn new_tools_are_accepted_once_they_are_stored() {
    let home = tempfile::tempdir().unwrap();
    let directory = home.path().join("pins");
    let upstream = upstream();
    let names = |pins: &Pins| {
        pins.accepted()
            .unwrap_or_default()
            .iter()
            .map(|tool| tool.name.to_string())
            .collect::<Vec<_>>()
    };
    let pins = Pins::open(Some(&directory), &upstream).unwrap();
    pins.record_offered(&[tool("old", "Is there.")]).unwrap();
    // A directory cannot be created where a file exists.
    let aside = home.path().join("aside");
    std::fs::rename(&directory, &aside).unwrap();
    std::fs::write(&directory, "").unwrap();
    let offered = [tool("old", "Is there."), tool("new", "Has come.")];
    for _ in 0..2 {
        pins.record_offered(&offered).unwrap();
        assert_eq!(names(&pins), ["old"]);
        let changes = pins.quarantined();
        let [QuarantinedTool { tool, before: None, why, .. }] = &changes[..] else {
            panic!("{changes:?}")
        };
        assert!(
            tool == "new"
                && matches!(&why[..], [QuarantineReason::Unwritten { why }] if why.contains("a.json")),
            "{why:?}"
        );
        assert!(
            !pins.is_current("new", pins.accepted_digest("new"))
                && pins.is_current("old", pins.accepted_digest("old"))
        );
    }
    // A changed tool is quarantined even if nothing can be stored.
    pins.record_offered(&[tool("old", "Is another one."), tool("new", "Has come.")]).unwrap();
    assert!(!pins.is_current("old", pins.accepted_digest("old")));
    pins.record_offered(&offered).unwrap();
    std::fs::remove_file(&directory).unwrap();
    std::fs::rename(&aside, &directory).unwrap();
    pins.retry_recording();
    assert!(pins.quarantined().is_empty());
    // The same holds for the next process.
    for pins in [pins, Pins::open(Some(&directory), &upstream).unwrap()] {
        assert_eq!(names(&pins), ["new", "old"]);
        pins.record_offered(&[tool("new", "Is another one.")]).unwrap();
        assert_eq!(pins.quarantined().len(), 1);
        pins.record_offered(&offered).unwrap();
    }
}

/// Covers every part that a model or a client depends on.
#[test]
fn a_change_of_any_part_is_quarantined() {
    let first = json!({
        "name": "look",
        "title": "Look",
        "description": "Looks.",
        "inputSchema": {"type": "object", "properties": {"a": {"type": "string", "description": "Where."}}},
        "outputSchema": {"type": "object", "properties": {"b": {"type": "string"}}},
        "annotations": {"title": "Look", "readOnlyHint": true},
        "_meta": {"k": {"l": 1}},
    });
    let upstream = upstream();
    let tool = |written: &Value| -> Tool { serde_json::from_value(written.clone()).unwrap() };
    for (part, changed_value) in [
        ("title", json!("Look here")),
        ("title", Value::Null),
        ("description", json!("Looks further.")),
        ("description", Value::Null),
        (
            "inputSchema",
            json!({"type": "object", "properties": {"a": {"type": "string", "description": "Who."}}}),
        ),
        (
            "inputSchema",
            json!({"type": "object", "properties": {"a": {"type": "string", "description": "Where."}}, "required": ["a"]}),
        ),
        ("inputSchema", json!({"type": "object"})),
        ("outputSchema", json!({"type": "object", "properties": {"b": {"type": "number"}}})),
        ("outputSchema", Value::Null),
        ("annotations", json!({"title": "Look", "readOnlyHint": false})),
        ("annotations", json!({"title": "Look", "readOnlyHint": true, "destructiveHint": false})),
        ("annotations", json!({"title": "Look here", "readOnlyHint": true})),
        ("annotations", Value::Null),
        ("_meta", json!({"k": {"l": 2}})),
        ("_meta", Value::Null),
    ] {
        let mut second = first.clone();
        let fields = second.as_object_mut().unwrap();
        fields.insert(part.to_owned(), changed_value.clone());
        fields.retain(|_, value| !value.is_null());
        let pins = Pins::open(None, &upstream).unwrap();
        pins.record_offered(&[tool(&first)]).unwrap();
        let accepted = pins.accepted_digest("look");
        assert!(pins.quarantined().is_empty() && pins.is_current("look", accepted), "{part}");
        pins.record_offered(&[tool(&second)]).unwrap();
        let changes = pins.quarantined();
        let [QuarantinedTool { before, now, .. }] = &changes[..] else {
            panic!("{part}: {changed_value}")
        };
        assert_eq!((before.as_ref(), now), (Some(&first), &second), "{part}");
        // Neither definition is callable, and the accepted one stays in the list.
        assert!(
            !pins.is_current("look", accepted)
                && !pins.is_current("look", Some(tool_digest(&tool(&second)))),
            "{part}: {changed_value}"
        );
        assert_eq!(pins.accepted(), Some(vec![tool(&first)]), "{part}: {changed_value}");
        pins.record_offered(&[tool(&first)]).unwrap();
        assert!(
            pins.quarantined().is_empty() && pins.is_current("look", accepted),
            "{part}: {changed_value}"
        );
    }
}
