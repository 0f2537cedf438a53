//! A look back when a test has ended: every session that it made is decided again, by `toolgate
//! replay`, and comes out the same.

use std::path::{Path, PathBuf};

use serde_json::json;

use crate::hook::{TestProject, list_files};

/// Fails where `replay` says that a call of this ledger would be decided otherwise now. What it
/// cannot judge, it says itself.
pub(crate) fn assert_replay_unchanged(
    store: &Path,
    run: impl Fn(&[&str]) -> (i32, String, String),
) {
    // A test that fails has its own reason.
    if std::thread::panicking() {
        return;
    }
    let sessions = toolgate_store::Ledger::open(store)
        .and_then(|ledger| ledger.sessions(None))
        .unwrap_or_else(|error| panic!("{error}"));
    for key in sessions {
        let (agent, principal) =
            (format!("--agent={}", key.agent), format!("--principal={}", key.principal));
        let (code, stdout, stderr) = run(&[
            "replay",
            "--json",
            &agent,
            &principal,
            "--store",
            store.to_str().unwrap(),
            "--",
            &key.session,
        ]);
        let pruned = code == 2 && stderr.contains("were pruned; there is nothing to decide again");
        assert!(
            code == 0 || pruned,
            "session `{}` is decided otherwise now, or not at all:\n{stdout}{stderr}",
            key.session
        );
        println!(
            "session `{}`: {}{stderr}",
            key.session,
            stdout.lines().last().unwrap_or_default()
        );
    }
}

/// The ledgers that are anywhere in a project or its home, and that nobody has taken away.
fn find_ledgers(project: &TestProject) -> Vec<PathBuf> {
    let files = list_files(&project.path(""));
    let keys = files.iter().filter(|path| path.ends_with("keys/redact.key"));
    keys.filter_map(|key| Some(key.ancestors().nth(2)?.with_extension("")))
        .filter(|ledger| ledger.is_file())
        .collect()
}

/// Where it was made, and by whom.
impl Drop for TestProject {
    fn drop(&mut self) {
        for ledger in find_ledgers(self) {
            assert_replay_unchanged(&ledger, |args| self.run(args, ""));
        }
    }
}

const CONFIG: &str = "store = \"ledger.db\"\n[tools.bash]\nkind = \"client\"\nshell = \"/command\"\n\
    [[policy]]\nname = \"no_push\"\nrule = \"deny\"\ntools = [\"bash\"]\nwhere = [{ argument = \"/command\", runs = [\"git push\"] }]\n";

#[test]
#[should_panic(expected = "session `s` is decided otherwise now")]
fn changed_decision_fails_replay_check() {
    let project = TestProject::with_config(CONFIG);
    let push = r#"{"hook_event_name": "PreToolUse", "session_id": "s", "tool_name": "bash", "tool_input": {"command": "git push"}, "tool_use_id": "t"}"#;
    let (_, said, _) = project.run(&["hook", "--config", "toolgate.toml"], push);
    assert!(said.contains("no_push"), "{said}");
    assert_eq!(find_ledgers(&project), [project.path("project/ledger.db")]);
    let sql = rusqlite::Connection::open(project.path("project/ledger.db")).unwrap();
    assert_eq!(
        sql.execute("UPDATE configs SET body = replace(body, 'git push', 'git pull')", []).unwrap(),
        1
    );
}

#[test]
fn replay_uses_recorded_home_directory() {
    let rule = "[[policy]]\nname = \"no_keys\"\nrule = \"deny\"\ntools = [\"bash\"]\nwhere = [{ touches = [\"~/.ssh\"] }]\n";
    let project = TestProject::with_config(&format!("{CONFIG}{rule}"));
    let home = project.path(".ssh").parent().unwrap().to_owned();
    let command = format!("cat {}/.ssh/id_ed25519", home.display());
    let event = json!({"hook_event_name": "PreToolUse", "session_id": "s", "tool_name": "bash", "tool_input": {"command": command}, "tool_use_id": "t"});
    let (_, said, _) = project.run(&["hook", "--config", "toolgate.toml"], &event.to_string());
    assert!(said.contains("no_keys"), "a home with a slash at its end is a home: {said}");
    let decided = |home: &str| {
        project.run_with(&[("HOME", home)], &["replay", "s", "--store", "ledger.db"], "")
    };
    let tried = |home: &str| {
        project.write("project/new.toml", rule);
        project.run_with(
            &[("HOME", home)],
            &["backtest", "--config", "new.toml", "--store", "ledger.db"],
            "",
        )
    };
    assert_eq!(decided("/nowhere").0, 0, "{:?}", decided("/nowhere"));
    assert_eq!(tried("/nowhere").0, 0, "{:?}", tried("/nowhere"));
    // A row of a time when none held its home is read as one's own.
    let sql = rusqlite::Connection::open(project.path("project/ledger.db")).unwrap();
    let held = format!("\"home\":{},", json!(home));
    assert_eq!(
        sql.execute(
            "UPDATE ledger SET body = replace(body, ?1, '') WHERE instr(body, ?1) > 0",
            [held]
        )
        .unwrap(),
        1
    );
    assert_eq!(decided(home.to_str().unwrap()).0, 0, "{:?}", decided(home.to_str().unwrap()));
    assert_eq!(decided("/nowhere").0, 1, "{:?}", decided("/nowhere"));
}
