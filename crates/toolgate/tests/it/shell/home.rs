//! Tests the home directory in rules, commands and rows.

use serde_json::json;
use toolgate::policy::{Condition, Deny, Require};
use toolgate::{Agent, Replay, ReplayComparison, Row, Tool, Toolgate};

use super::shell_gate;
use crate::support::BuildWithReplayCheck;

/// Makes a call and returns its row.
async fn record_row(gate: &Toolgate, agent: &str, tool: &str, arguments: serde_json::Value) -> Row {
    let session = gate.session(agent, "alice", &format!("{tool} {arguments}"));
    if let Ok(deferred) = session.admit(tool, arguments).await {
        session.report(&deferred, Ok(json!({}))).await;
    }
    Row::clone(&session.rows().await.unwrap()[0])
}

/// Returns the row with another home directory.
fn with_home(home: &str, row: &Row) -> Row {
    let mut row = row.clone();
    row.facts.home = Some(home.to_owned());
    row
}

#[tokio::test]
async fn replay_uses_recorded_home_directory() {
    let gate = shell_gate();
    let replay = Replay::from_toolgate(&gate).unwrap();
    // The rule protects a path below the home directory.
    let absolute =
        record_row(&gate, "coder", "bash", json!({"command": "cat /srv/agent/.ssh/key"})).await;
    assert!(
        absolute.facts.home.as_ref().is_some_and(|home| !home.ends_with('/')),
        "{:?}",
        absolute.facts
    );
    assert_eq!(replay.decide(&absolute).await, ReplayComparison::Same);
    assert!(matches!(
        replay.decide(&with_home("/srv/agent", &absolute)).await,
        ReplayComparison::Differs(_)
    ));
    // `~` is the same directory in the rule and in the command.
    let relative =
        record_row(&gate, "coder", "bash", json!({"command": "cat \"$HOME/.ssh/key\""})).await;
    assert_eq!(replay.decide(&with_home("/srv/agent", &relative)).await, ReplayComparison::Same);
    // A row without a home directory uses the one of this process.
    let mut old = absolute.clone();
    old.facts.home = None;
    assert_eq!(replay.decide(&old).await, ReplayComparison::Same);
    // A redacted home directory makes the replay undecidable.
    let comparison = replay.decide(&with_home("[redacted 00]", &absolute)).await;
    assert!(
        matches!(&comparison, ReplayComparison::Undecidable(why) if why.contains("home")),
        "{comparison:?}"
    );
}

#[tokio::test]
async fn row_records_home_only_if_rule_needs_it() {
    let touches = || Condition::Touches {
        places: vec!["/srv/agent/.ssh".to_owned()],
        lenient: false,
        trees: true,
        whole: false,
        from: None,
    };
    let agent = Agent::builder("coder")
        .tool(Tool::external("bash", "Runs a command.", None).shell("/command"))
        .tool(Tool::external("read", "Reads a file.", None))
        .tool(Tool::external("write", "Writes a file.", None))
        .policy(
            Require::new("read_first", ["write"], ["read"])
                .accept_reported()
                .only_when("/path", touches()),
        )
        .policy(Deny::new("no_keys", ["bash"]).when("/command", touches()))
        .policy(Deny::new("no_files", ["read"]).when("/path", touches()));
    let gate = crate::support::runtime_builder().agent(agent.build().unwrap()).build_checked();
    let replay = Replay::from_toolgate(&gate).unwrap();
    for (tool, arguments, is_needed) in [
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
        let row = record_row(&gate, "coder", tool, arguments).await;
        assert_eq!(row.facts.home.is_some(), is_needed, "{:?}", row.arguments);
        assert_eq!(replay.decide(&row).await, ReplayComparison::Same, "{:?}", row.arguments);
        let comparison = replay.decide(&with_home("/srv/agent", &row)).await;
        assert_eq!(
            matches!(comparison, ReplayComparison::Differs(_)),
            is_needed,
            "{comparison:?} {:?}",
            row.arguments
        );
    }
}

#[tokio::test]
async fn row_of_search_without_path_records_home() {
    let places = vec!["~/.ssh".to_owned()];
    let touches = Condition::Touches {
        places,
        lenient: true,
        trees: true,
        whole: false,
        from: Some("/srv/agent".to_owned()),
    };
    let agent = Agent::builder("coder")
        .tool(Tool::external("grep", "Searches.", None))
        .policy(Deny::new("no_keys", ["grep"]).when("/path", touches));
    let gate = crate::support::runtime_builder().agent(agent.build().unwrap()).build_checked();
    let replay = Replay::from_toolgate(&gate).unwrap();
    for arguments in [
        json!({"pattern": "x"}),
        json!({"pattern": "x", "path": null}),
        json!({"pattern": "x", "path": []}),
    ] {
        let row = record_row(&gate, "coder", "grep", arguments).await;
        assert!(row.facts.home.is_some(), "{:?}", row.arguments);
        assert_eq!(replay.decide(&row).await, ReplayComparison::Same, "{:?}", row.arguments);
        let comparison = replay.decide(&with_home("/srv/agent", &row)).await;
        assert!(
            matches!(comparison, ReplayComparison::Differs(_)),
            "{comparison:?} {:?}",
            row.arguments
        );
    }
}
