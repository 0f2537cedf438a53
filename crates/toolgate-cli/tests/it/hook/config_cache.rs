//! Tests that a cached configuration is used only while nothing has changed.

use std::path::{Path, PathBuf};

use assert_cmd::Command;
use assert_cmd::cargo::CommandCargoExt;
use serde_json::json;

use super::service::HookServiceProcess;
use super::{CONFIG, TestProject, decision, hook_event, list_files};

#[test]
fn config_cache_is_separate_per_environment() {
    let project = TestProject::with_config(&CONFIG.replace("store = \"ledger.db\"\n", ""));
    std::thread::sleep(std::time::Duration::from_millis(1_200));
    let run = |store: Option<&str>, id: &str| {
        let mut command = std::process::Command::cargo_bin("toolgate").unwrap();
        project.set_environment(&mut command);
        command.envs(store.map(|store| ("TOOLGATE_STORE", store)));
        let event =
            hook_event("PreToolUse", id, "Bash", json!({"command": format!("git push {id}")}));
        Command::from_std(command)
            .args(["hook", "--config", "toolgate.toml"])
            .write_stdin(event.to_string())
            .output()
            .unwrap();
    };
    let rows = |store: &Path| {
        project.run(&["audit", "export", "--store", store.to_str().unwrap()], "").1.lines().count()
    };
    (0..3).for_each(|n| run(None, &format!("a{n}")));
    (0..2).for_each(|n| run(Some("other.db"), &format!("b{n}")));
    assert_eq!(
        (
            rows(&project.path(".local/state/toolgate/ledger.db")),
            rows(&project.path("project/other.db"))
        ),
        (3, 2)
    );
}

#[test]
fn config_cache_is_dropped_on_any_change() {
    let project = TestProject::with_config(CONFIG);
    let old = std::time::SystemTime::now() - std::time::Duration::from_secs(60);
    let set_old_time = || {
        std::fs::File::open(project.path("project/toolgate.toml"))
            .unwrap()
            .set_modified(old)
            .unwrap()
    };
    set_old_time();
    std::thread::sleep(std::time::Duration::from_millis(1_100));
    let cache = project.path(".local/state/toolgate/compiled");
    assert_eq!(
        decision(&project.pre_tool_use("t1", "Bash", json!({"command": "git push a"}))).0,
        "deny"
    );
    let cache_files = || {
        list_files(&cache)
            .into_iter()
            .filter(|path| path.file_name().is_some_and(|name| name == "bash"))
            .collect::<Vec<_>>()
    };
    assert_eq!(cache_files().len(), 1);
    // The same decision, from the cache.
    assert_eq!(
        decision(&project.pre_tool_use("t2", "Bash", json!({"command": "git push b"}))).0,
        "deny"
    );
    assert_eq!(decision(&project.pre_tool_use("t3", "Read", json!({"file_path": "x"}))).0, "allow");
    // An edited cache file is ignored.
    let [path] = cache_files().try_into().unwrap();
    let mut text = std::fs::read(&path).unwrap();
    let at = text.windows(8).position(|part| part == b"git push").unwrap();
    text[at..at + 8].copy_from_slice(b"git pull");
    std::fs::write(&path, text).unwrap();
    assert_eq!(
        decision(&project.pre_tool_use("t4", "Bash", json!({"command": "git push c"}))).0,
        "deny"
    );
    // An edited configuration makes the cache invalid.
    project.write("project/toolgate.toml", &CONFIG.replace("git push", "git pull"));
    assert_eq!(
        decision(&project.pre_tool_use("t5", "Bash", json!({"command": "git push d"}))).0,
        "none"
    );
}

#[test]
fn config_cache_is_dropped_when_symlink_changes() {
    let link = |from: PathBuf, to: PathBuf| {
        std::fs::rename(&from, &to).unwrap();
        std::os::unix::fs::symlink(to, from).unwrap();
    };
    for (serves, args) in
        [(false, ["hook", "--config", "toolgate.toml"]), (true, ["hook", "--socket", "hook.sock"])]
    {
        let project = TestProject::with_config(CONFIG);
        project.write("project/.claude/settings.json", "{}");
        project.write("dotfiles/other.json", "{}");
        std::thread::sleep(std::time::Duration::from_millis(1_200));
        let _service = serves.then(|| HookServiceProcess::start(&project));
        let write = |id: &str, name: &str| {
            let answer = project.run_hook_with(
                &args,
                &hook_event(
                    "PreToolUse",
                    id,
                    "Write",
                    json!({"file_path": project.path(name), "content": id}),
                ),
            );
            decision(&answer).0.to_owned()
        };
        assert_eq!(write("t1", "dotfiles/one.json"), "none");
        assert_eq!(write("t2", "dotfiles/one.json"), "none");
        assert!(serves || project.path(".local/state/toolgate/compiled").exists());
        link(project.path("project/.claude/settings.json"), project.path("dotfiles/one.json"));
        assert_eq!(write("t3", "dotfiles/one.json"), "deny");
        // A file does not change if its directory is moved.
        assert_eq!(write("t4", "dotfiles/claude/settings.local.json"), "none");
        link(project.path("project/.claude"), project.path("dotfiles/claude"));
        assert_eq!(write("t5", "dotfiles/claude/settings.local.json"), "deny");
    }
}
