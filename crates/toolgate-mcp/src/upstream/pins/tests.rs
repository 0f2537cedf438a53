//! Tests which tools are quarantined, in one process and with several.

use serde_json::json;

use super::*;

fn upstream() -> Upstream {
    toolgate::config::Config::parse("toolgate.toml", "[upstreams.a]\ncommand = \"a\"\n").upstreams.remove(0)
}

fn tool(name: &str, description: &str) -> Tool {
    serde_json::from_value(json!({"name": name, "description": description, "inputSchema": {"type": "object"}})).unwrap()
}

/// Returns the descriptions of quarantined tools: accepted, and current.
fn told(pins: &Pins) -> Vec<(String, String)> {
    let words = |tool: &Value| tool["description"].as_str().unwrap_or_default().to_owned();
    pins.changes().iter().map(|change| (change.before.as_ref().map(words).unwrap_or_default(), words(&change.now))).collect()
}

/// Returns the quarantined tools as stored, without asking the upstream.
fn found(place: &Path) -> Vec<(String, String)> {
    told(&Pins::open(Some(place), &upstream()).unwrap())
}

/// Shows the quarantined tools and accepts them.
fn accept(place: &Path) {
    let pins = Pins::open(Some(place), &upstream()).unwrap();
    pins.show().unwrap();
    assert_eq!(pins.accept(None).unwrap().tools, ["look"]);
}

fn pair(before: &str, now: &str) -> Vec<(String, String)> {
    vec![(before.to_owned(), now.to_owned())]
}

#[test]
fn each_instance_goes_by_what_its_own_upstream_offers() {
    let home = tempfile::tempdir().unwrap();
    let open = || Pins::open(Some(home.path()), &upstream()).unwrap();
    let (old, new) = ([tool("look", "Looks.")], [tool("look", "Looks further.")]);
    let (one, other) = (open(), open());
    one.note(&old).unwrap();
    let accepted = one.digest_of("look");
    other.note(&new).unwrap();
    for _ in 0..2 {
        // Each process has read what the other one wrote.
        for pins in [&one, &other] {
            pins.note_again();
            assert_eq!(pins.digest_of("look"), accepted);
        }
        assert!(one.holds("look", accepted) && told(&one).is_empty());
        assert!(!other.holds("look", accepted));
        assert_eq!((told(&other), found(home.path())), (pair("Looks.", "Looks further."), pair("Looks.", "Looks further.")));
        one.note(&old).unwrap();
        assert!(!other.holds("look", accepted));
        other.note(&new).unwrap();
    }
    // After the other version is accepted, the first one is quarantined.
    accept(home.path());
    for pins in [&one, &other] {
        assert_eq!(pins.digest_of("look"), Some(digest(&new[0])));
    }
    assert!(other.holds("look", other.digest_of("look")) && told(&other).is_empty());
    assert!(!one.holds("look", one.digest_of("look")) && !one.holds("look", accepted));
    one.note(&old).unwrap();
    other.note(&new).unwrap();
    assert_eq!((told(&one), found(home.path())), (pair("Looks further.", "Looks."), pair("Looks further.", "Looks.")));
    // If both upstreams have that version, nothing is quarantined.
    one.note(&new).unwrap();
    assert!(one.holds("look", one.digest_of("look")) && found(home.path()).is_empty());
}

#[test]
fn what_was_found_before_is_over_unless_somebody_finds_it_still() {
    let home = tempfile::tempdir().unwrap();
    let open = || Pins::open(Some(home.path()), &upstream()).unwrap();
    let (old, new) = ([tool("look", "Looks.")], [tool("look", "Looks further.")]);
    let before = open();
    before.note(&old).unwrap();
    before.note(&new).unwrap();
    // The upstream went back to the old version while the process was stopped.
    let after = open();
    assert_eq!(found(home.path()).len(), 1);
    after.note(&old).unwrap();
    assert!(found(home.path()).is_empty() && after.holds("look", after.digest_of("look")));
    // A second process that still sees the new version reports it when it reads the file again.
    assert!(!before.holds("look", before.digest_of("look")));
    before.note_again();
    assert_eq!(found(home.path()).len(), 1);
    after.note(&old).unwrap();
    assert_eq!(found(home.path()).len(), 1);
    assert!(after.holds("look", after.digest_of("look")) && !before.holds("look", before.digest_of("look")));
}

#[test]
fn what_is_held_back_stays_so_where_it_is_not_said_any_more() {
    let home = tempfile::tempdir().unwrap();
    let open = || Pins::open(Some(home.path()), &upstream()).unwrap();
    let before = open();
    before.note(&[tool("look", "Looks."), tool("find", "Finds.")]).unwrap();
    before.note(&[tool("look", "Looks further."), tool("find", "Finds.")]).unwrap();
    // The next process lists neither tool.
    let after = open();
    for _ in 0..2 {
        assert!(!after.holds("look", after.digest_of("look")));
        assert!(after.holds("find", after.digest_of("find")));
        assert_eq!(told(&after), pair("Looks.", "Looks further."));
        after.note(&[]).unwrap();
    }
    after.note(&[tool("look", "Looks.")]).unwrap();
    assert!(after.holds("look", after.digest_of("look")));
}

/// Otherwise a person could never accept what was shown: the stored definition would have changed
/// by then.
#[test]
fn two_that_find_different_things_do_not_take_turns() {
    let home = tempfile::tempdir().unwrap();
    let open = || Pins::open(Some(home.path()), &upstream()).unwrap();
    let (second, third) = ([tool("look", "Second.")], [tool("look", "Third.")]);
    let (one, other) = (open(), open());
    one.note(&[tool("look", "First.")]).unwrap();
    one.note(&second).unwrap();
    other.note(&third).unwrap();
    for _ in 0..2 {
        one.note(&second).unwrap();
        one.note_again();
        other.note(&third).unwrap();
        assert_eq!(found(home.path()), pair("First.", "Third."));
    }
    accept(home.path());
    assert!(other.holds("look", other.digest_of("look")) && !one.holds("look", one.digest_of("look")));
    other.note(&third).unwrap();
    one.note(&second).unwrap();
    assert_eq!(found(home.path()), pair("Third.", "Second."));
}

#[test]
fn two_by_one_name_are_held_back_in_either_order() {
    let (one, other) = (tool("look", "Looks."), tool("look", "Looks further."));
    for list in [[one.clone(), other.clone()], [other, one.clone()]] {
        let pins = Pins::open(None, &upstream()).unwrap();
        pins.note(std::slice::from_ref(&one)).unwrap();
        let accepted = pins.digest_of("look");
        for _ in 0..2 {
            pins.note(&list).unwrap();
            assert!(!pins.holds("look", accepted));
            assert_eq!(told(&pins), pair("Looks.", "Looks further."));
        }
        pins.note(std::slice::from_ref(&one)).unwrap();
        assert!(pins.holds("look", accepted) && told(&pins).is_empty());
        // The same without an earlier definition.
        let pins = Pins::open(None, &upstream()).unwrap();
        pins.note(&list).unwrap();
        assert_eq!((pins.digest_of("look"), told(&pins).len()), (None, 1));
    }
}

#[test]
fn what_several_write_at_once_is_all_there() {
    let home = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let place = home.path();
            scope.spawn(move || {
                let pins = Pins::open(Some(place), &upstream()).unwrap();
                for number in 0..8 {
                    pins.note(&[tool(&format!("look_{thread}_{number}"), "Looks.")]).unwrap();
                }
                // On a slow disk the lock may have timed out.
                pins.note_again();
            });
        }
    });
    assert_eq!(Pins::open(Some(home.path()), &upstream()).unwrap().accepted().unwrap().len(), 24);
}

/// A process that holds the lock may be suspended.
#[test]
fn whoever_writes_for_ever_keeps_nobody_waiting_and_lifts_nothing() {
    let home = tempfile::tempdir().unwrap();
    let pins = Pins::open(Some(home.path()), &upstream()).unwrap();
    pins.note(&[tool("look", "Looks.")]).unwrap();
    let accepted = pins.digest_of("look");
    let stopped = std::fs::File::options().write(true).open(home.path().join("a.json.lock")).unwrap();
    rustix::fs::flock(&stopped, rustix::fs::FlockOperation::LockExclusive).unwrap();
    pins.note(&[tool("look", "Looks further."), tool("find", "Finds.")]).unwrap();
    assert!(!pins.holds("look", accepted) && pins.digest_of("find").is_none());
    assert!(pins.changes().iter().any(|change| change.tool == "find" && matches!(&change.why[..], [Suspicion::Unwritten { .. }])));
    assert!(found(home.path()).is_empty());
    // The kernel releases the lock when the process ends.
    drop(stopped);
    pins.note_again();
    assert!(pins.digest_of("find").is_some());
    assert_eq!(found(home.path()), pair("Looks.", "Looks further."));
}

/// Otherwise a changed definition would count as new after the next start.
#[test]
fn what_is_new_is_accepted_once_it_is_written_down() {
    let home = tempfile::tempdir().unwrap();
    let place = home.path().join("pins");
    let upstream = upstream();
    let names = |pins: &Pins| pins.accepted().unwrap_or_default().iter().map(|tool| tool.name.to_string()).collect::<Vec<_>>();
    let pins = Pins::open(Some(&place), &upstream).unwrap();
    pins.note(&[tool("old", "Is there.")]).unwrap();
    // A directory cannot be created where a file exists.
    let aside = home.path().join("aside");
    std::fs::rename(&place, &aside).unwrap();
    std::fs::write(&place, "").unwrap();
    let offered = [tool("old", "Is there."), tool("new", "Has come.")];
    for _ in 0..2 {
        pins.note(&offered).unwrap();
        assert_eq!(names(&pins), ["old"]);
        let changes = pins.changes();
        let [Change { tool, before: None, why, .. }] = &changes[..] else { panic!("{changes:?}") };
        assert!(tool == "new" && matches!(&why[..], [Suspicion::Unwritten { why }] if why.contains("a.json")), "{why:?}");
        assert!(!pins.holds("new", pins.digest_of("new")) && pins.holds("old", pins.digest_of("old")));
    }
    // A changed tool is quarantined even if nothing can be stored.
    pins.note(&[tool("old", "Is another one."), tool("new", "Has come.")]).unwrap();
    assert!(!pins.holds("old", pins.digest_of("old")));
    pins.note(&offered).unwrap();
    std::fs::remove_file(&place).unwrap();
    std::fs::rename(&aside, &place).unwrap();
    pins.note_again();
    assert!(pins.changes().is_empty());
    // The same holds for the next process.
    for pins in [pins, Pins::open(Some(&place), &upstream).unwrap()] {
        assert_eq!(names(&pins), ["new", "old"]);
        pins.note(&[tool("new", "Is another one.")]).unwrap();
        assert_eq!(pins.changes().len(), 1);
        pins.note(&offered).unwrap();
    }
}

/// Covers every part that a model or a client depends on.
#[test]
fn each_part_of_a_tool_that_is_another_alone_is_held_back() {
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
    for (part, other) in [
        ("title", json!("Look here")),
        ("title", Value::Null),
        ("description", json!("Looks further.")),
        ("description", Value::Null),
        ("inputSchema", json!({"type": "object", "properties": {"a": {"type": "string", "description": "Who."}}})),
        ("inputSchema", json!({"type": "object", "properties": {"a": {"type": "string", "description": "Where."}}, "required": ["a"]})),
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
        fields.insert(part.to_owned(), other.clone());
        fields.retain(|_, value| !value.is_null());
        let pins = Pins::open(None, &upstream).unwrap();
        pins.note(&[tool(&first)]).unwrap();
        let accepted = pins.digest_of("look");
        assert!(pins.changes().is_empty() && pins.holds("look", accepted), "{part}");
        pins.note(&[tool(&second)]).unwrap();
        let changes = pins.changes();
        let [Change { before, now, .. }] = &changes[..] else { panic!("{part}: {other}") };
        assert_eq!((before.as_ref(), now), (Some(&first), &second), "{part}");
        // Neither definition is callable, and the accepted one stays in the list.
        assert!(!pins.holds("look", accepted) && !pins.holds("look", Some(digest(&tool(&second)))), "{part}: {other}");
        assert_eq!(pins.accepted(), Some(vec![tool(&first)]), "{part}: {other}");
        pins.note(&[tool(&first)]).unwrap();
        assert!(pins.changes().is_empty() && pins.holds("look", accepted), "{part}: {other}");
    }
}
