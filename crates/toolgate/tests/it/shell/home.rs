//! The home of a user: where `~` leads, and what of it a row holds.

use serde_json::json;
use toolgate::policy::{Condition, Deny, Require};
use toolgate::{Agent, Compared, Replay, Row, Tool, Toolgate};

use super::gate;
use crate::support::Built;

/// The row of a call that was made, or refused.
async fn row_of(gate: &Toolgate, agent: &str, tool: &str, arguments: serde_json::Value) -> Row {
    let session = gate.session(agent, "alice", &format!("{tool} {arguments}"));
    if let Ok(pass) = session.admit(tool, arguments).await {
        session.report(&pass, Ok(json!({}))).await;
    }
    Row::clone(&session.rows().await.unwrap()[0])
}

/// The same row, as another user would have left it.
fn at_home_in(home: &str, row: &Row) -> Row {
    let mut row = row.clone();
    row.facts.home = Some(home.to_owned());
    row
}

#[tokio::test]
async fn a_look_back_takes_the_home_of_its_time() {
    let gate = gate();
    let replay = Replay::of(&gate).unwrap();
    // The rule speaks of what lies under a home.
    let there = row_of(&gate, "coder", "bash", json!({"command": "cat /srv/agent/.ssh/key"})).await;
    assert!(there.facts.home.as_ref().is_some_and(|home| !home.ends_with('/')), "{:?}", there.facts);
    assert_eq!(replay.decide(&there).await, Compared::Same);
    assert!(matches!(replay.decide(&at_home_in("/srv/agent", &there)).await, Compared::Differs(_)));
    // Wherever that is, `~` is the same in the rule and in the command.
    let here = row_of(&gate, "coder", "bash", json!({"command": "cat \"$HOME/.ssh/key\""})).await;
    assert_eq!(replay.decide(&at_home_in("/srv/agent", &here)).await, Compared::Same);
    // A row that does not tell is taken for one's own.
    let mut old = there.clone();
    old.facts.home = None;
    assert_eq!(replay.decide(&old).await, Compared::Same);
    // What nobody knows any more decides nothing.
    let said = replay.decide(&at_home_in("[redacted 00]", &there)).await;
    assert!(matches!(&said, Compared::Undecidable(why) if why.contains("home")), "{said:?}");
}

#[tokio::test]
async fn a_row_holds_the_home_only_where_it_may_matter() {
    let touches =
        || Condition::Touches { places: vec!["/srv/agent/.ssh".to_owned()], lenient: false, trees: true, whole: false, from: None };
    let agent = Agent::builder("coder")
        .tool(Tool::external("bash", "Runs a command.", None).shell("/command"))
        .tool(Tool::external("read", "Reads a file.", None))
        .tool(Tool::external("write", "Writes a file.", None))
        .policy(Require::new("read_first", ["write"], ["read"]).accept_reported().only_when("/path", touches()))
        .policy(Deny::new("no_keys", ["bash"]).when("/command", touches()))
        .policy(Deny::new("no_files", ["read"]).when("/path", touches()));
    let gate = crate::support::gate().agent(agent.build().unwrap()).built();
    let replay = Replay::of(&gate).unwrap();
    for (tool, arguments, matters) in [
        ("bash", json!({"command": "cat ~/.ssh/key"}), true),
        ("bash", json!({"command": "cat $HOME/.ssh/key"}), true),
        ("bash", json!({"command": "cat < ~/.ssh/key"}), true),
        ("bash", json!({"command": "cat notes.txt"}), false),
        ("read", json!({"path": "~/.ssh/key"}), true),
        ("read", json!({"path": "notes.txt"}), false),
        ("read", json!({"path": "notes.txt", "note": "about ~/.ssh"}), false),
        ("write", json!({"path": "~/.ssh/key"}), true),
        ("write", json!({"path": "notes.txt"}), false),
    ] {
        let row = row_of(&gate, "coder", tool, arguments).await;
        assert_eq!(row.facts.home.is_some(), matters, "{:?}", row.arguments);
        assert_eq!(replay.decide(&row).await, Compared::Same, "{:?}", row.arguments);
        let said = replay.decide(&at_home_in("/srv/agent", &row)).await;
        assert_eq!(matches!(said, Compared::Differs(_)), matters, "{said:?} {:?}", row.arguments);
    }
}

#[tokio::test]
async fn a_search_that_does_not_say_where_hangs_on_the_home() {
    let places = vec!["~/.ssh".to_owned()];
    let touches = Condition::Touches { places, lenient: true, trees: true, whole: false, from: Some("/srv/agent".to_owned()) };
    let agent = Agent::builder("coder")
        .tool(Tool::external("grep", "Searches.", None))
        .policy(Deny::new("no_keys", ["grep"]).when("/path", touches));
    let gate = crate::support::gate().agent(agent.build().unwrap()).built();
    let replay = Replay::of(&gate).unwrap();
    for arguments in [json!({"pattern": "x"}), json!({"pattern": "x", "path": null}), json!({"pattern": "x", "path": []})] {
        let row = row_of(&gate, "coder", "grep", arguments).await;
        assert!(row.facts.home.is_some(), "{:?}", row.arguments);
        assert_eq!(replay.decide(&row).await, Compared::Same, "{:?}", row.arguments);
        let said = replay.decide(&at_home_in("/srv/agent", &row)).await;
        assert!(matches!(said, Compared::Differs(_)), "{said:?} {:?}", row.arguments);
    }
}
