//! Replays every session of a test with `toolgate replay` when the test ends.

use std::path::{Path, PathBuf};

use serde_json::json;

use crate::hook::{TestProject, list_files};

/// Fails if `replay` decides a call of this ledger differently.
///
/// `replay` itself reports the calls that it cannot decide.
pub(crate) fn assert_replay_unchanged(
    store: &Path,
    run: impl Fn(&[&str]) -> (i32, String, String),
) {
    // A failed test has its own message.
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
        let is_pruned =
            code == 2 && stderr.contains("were pruned; there is nothing to decide again");
        assert!(
            code == 0 || is_pruned,
            "session `{}` is decided differently now, or not at all:\n{stdout}{stderr}",
            key.session
        );
        println!(
            "session `{}`: {}{stderr}",
            key.session,
            stdout.lines().last().unwrap_or_default()
        );
    }
}

/// Returns all ledgers that exist in the home directory of a project.
fn find_ledgers(project: &TestProject) -> Vec<PathBuf> {
    let files = list_files(&project.path(""));
    let keys = files.iter().filter(|path| path.ends_with("keys/redact.key"));
    keys.filter_map(|key| Some(key.ancestors().nth(2)?.with_extension("")))
        .filter(|ledger| ledger.is_file())
        .collect()
}

/// Replays the ledgers of a project at the end of a test.
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
#[should_panic(expected = "session `s` is decided differently now")]
fn changed_decision_fails_replay_check() {
    let project = TestProject::with_config(CONFIG);
    let push = r#"{"hook_event_name": "PreToolUse", "session_id": "s", "tool_name": "bash", "tool_input": {"command": "git push"}, "tool_use_id": "t"}"#;
    let (_, stdout, _) = project.run(&["hook", "--config", "toolgate.toml"], push);
    assert!(stdout.contains("no_push"), "{stdout}");
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
    let (_, stdout, _) = project.run(&["hook", "--config", "toolgate.toml"], &event.to_string());
    assert!(stdout.contains("no_keys"), "a home directory may end with a slash: {stdout}");
    let replay = |home: &str| {
        project.run_with(&[("HOME", home)], &["replay", "s", "--store", "ledger.db"], "")
    };
    let backtest = |home: &str| {
        project.write("project/new.toml", rule);
        project.run_with(
            &[("HOME", home)],
            &["backtest", "--config", "new.toml", "--store", "ledger.db"],
            "",
        )
    };
    assert_eq!(replay("/nowhere").0, 0, "{:?}", replay("/nowhere"));
    assert_eq!(backtest("/nowhere").0, 0, "{:?}", backtest("/nowhere"));
    // Rows of earlier versions have no home directory. Then the current one applies.
    let sql = rusqlite::Connection::open(project.path("project/ledger.db")).unwrap();
    let home_field = format!("\"home\":{},", json!(home));
    assert_eq!(
        sql.execute(
            "UPDATE ledger SET body = replace(body, ?1, '') WHERE instr(body, ?1) > 0",
            [home_field]
        )
        .unwrap(),
        1
    );
    assert_eq!(replay(home.to_str().unwrap()).0, 0, "{:?}", replay(home.to_str().unwrap()));
    assert_eq!(replay("/nowhere").0, 1, "{:?}", replay("/nowhere"));
}
