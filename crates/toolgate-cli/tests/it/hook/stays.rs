//! A process that stays while a session is open says what a hook by itself would say, and where it cannot, the hook does all by itself.

use std::io::Write;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use assert_cmd::cargo::CommandCargoExt;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::{CONFIG, Project, after, decision, event};

/// The processes that stay with a project.
fn staying(project: &Project) -> Vec<i32> {
    let here = project.path("project").canonicalize().unwrap();
    let numbers = std::fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().to_str()?.parse::<i32>().ok());
    let stays = |number: &i32| {
        let process = PathBuf::from(format!("/proc/{number}"));
        let words = std::fs::read(process.join("cmdline")).unwrap_or_default();
        words.split(|byte| *byte == 0).any(|word| word == b"--stay") && std::fs::read_link(process.join("cwd")).is_ok_and(|cwd| cwd == here)
    };
    numbers.filter(stays).collect()
}

/// Waits until something holds.
fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_secs(60), "it never came about that {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A project with an open session, and somebody who stays with it and has answered.
fn opened() -> Project {
    let project = Project::with(CONFIG);
    // What has just been written is not kept ready.
    std::thread::sleep(Duration::from_millis(1_200));
    for (id, tool) in [("r1", "Bash"), ("r2", "Read"), ("r3", "Write"), ("r4", "Lookup")] {
        project.before(id, tool, json!({"n": id, "command": "true"}));
    }
    project.hook(&json!({"hook_event_name": "SessionStart", "session_id": "s1"}));
    until("somebody stays", || staying(&project).len() == 1 && listens(&project));
    project.before("r5", "Bash", json!({"command": "echo first"}));
    assert!(has_ledger(&project), "whoever stays did not answer");
    project
}

fn listens(project: &Project) -> bool {
    let stays = project.path(".local/state/toolgate/stay");
    let sockets = std::fs::read_dir(stays).into_iter().flatten().map(|entry| entry.unwrap().path());
    sockets.filter(|path| path.extension().is_none()).any(|path| std::os::unix::net::UnixStream::connect(path).is_ok())
}

/// Whether whoever stays has the ledger open: nobody opens it for nothing.
fn has_ledger(project: &Project) -> bool {
    let ledger = project.path("project/ledger.db").canonicalize().unwrap();
    staying(project).iter().any(|number| {
        let open = std::fs::read_dir(format!("/proc/{number}/fd")).into_iter().flatten();
        open.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok()).any(|path| path == ledger)
    })
}

fn end(project: &Project) {
    project.hook(&json!({"hook_event_name": "SessionEnd", "session_id": "s1"}));
    until("nobody stays any more", || staying(project).is_empty());
}

#[test]
fn whoever_stays_says_what_a_hook_by_itself_says() {
    let script = [
        event("PreToolUse", "t1", "Bash", json!({"command": "git push"})),
        event("PreToolUse", "t2", "Bash", json!({"command": "rm x"})),
        event("PreToolUse", "t3", "Bash", json!({"command": "ls"})),
        after("t3", "Bash", json!({"command": "ls"}), json!({"stdout": "a"})),
        after("t3", "Bash", json!({"command": "ls"}), json!({"stdout": "twice"})),
        event("PreToolUse", "t4", "Read", json!({"file_path": "a"})),
        json!({"hook_event_name": "PostToolUseFailure", "session_id": "s1", "tool_name": "Read", "tool_use_id": "t4",
            "tool_input": {"file_path": "a"}, "error": "there is no such file"}),
        event("PreToolUse", "t5", "Lookup", json!({"q": 1})),
        after("t5", "Lookup", json!({"q": 1}), json!({"created": 1_700_000_000})),
        event("PreToolUse", "t6", "Write", json!({"file_path": "toolgate.toml"})),
        event("PreToolUse", "t7", "Write", json!({"file_path": "b"})),
        event("PreToolUse", "t8", "Write", json!({"file_path": "b"})),
        event("PreToolUse", "t9", "Write", json!({"file_path": "b"})),
        event("PreToolUse", "t10", "Nobody", json!({})),
        json!({"hook_event_name": "PreToolUse", "session_id": "s1", "tool_name": "Bash", "tool_use_id": "t11"}),
        json!({"hook_event_name": "UserPromptSubmit", "session_id": "s1", "prompt": "hello"}),
    ];
    let plain = |project: &Project, text: &Value| {
        let id = regex::Regex::new("[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}").unwrap();
        id.replace_all(&text.to_string(), "CALL").replace(project.path("").to_str().unwrap(), "HOME/")
    };
    let played = |project: &Project| script.iter().map(|event| plain(project, &project.hook(event))).collect::<Vec<_>>();
    let (alone, stayed) = (Project::with(CONFIG), opened());
    assert_eq!(played(&stayed), played(&alone));
    assert_eq!((staying(&alone).len(), staying(&stayed).len()), (0, 1));
    assert!(has_ledger(&stayed), "whoever stays did not answer");
    end(&stayed);
    // Every call has its row, as it has without anybody who stays.
    alone.hook(&json!({"hook_event_name": "SessionEnd", "session_id": "s1"}));
    let said = |project: &Project| {
        let mut said: Vec<_> = project.said_of();
        said.sort();
        said
    };
    let of_first = vec![("failed".to_owned(), "abandoned".to_owned()); 5];
    let mut expected = [said(&alone), of_first].concat();
    expected.sort();
    assert_eq!(said(&stayed), expected);
    assert_eq!(stayed.run(&["audit", "verify", "--store", "ledger.db"], "").0, 0);
}

#[test]
fn whoever_stays_goes_by_what_holds_now() {
    let project = opened();
    let push = |id: &str| decision(&project.before(id, "Bash", json!({"command": format!("git push {id}")}))).1.to_owned();
    assert!(push("t1").contains("Nobody pushes"));
    project.write("project/toolgate.toml", &CONFIG.replace("Nobody pushes", "No one pushes"));
    assert!(push("t2").contains("No one pushes"));
    project.write("project/toolgate.toml", "store = [");
    assert!(push("t3").contains("invalid configuration"));
    project.write("project/toolgate.toml", CONFIG);
    assert!(push("t4").contains("Nobody pushes"));
    // It goes on once the file has stood for a while.
    std::thread::sleep(Duration::from_millis(1_200));
    assert!(push("t4b").contains("Nobody pushes") && push("t4c").contains("Nobody pushes"));
    assert!(has_ledger(&project), "whoever stays did not answer");
    // A ledger that is gone is gone, also where somebody has it open.
    std::fs::rename(project.path("project/ledger.db"), project.path("project/away.db")).unwrap();
    let told = project.before("t5", "Bash", json!({"command": "ls -a"}));
    assert_eq!(decision(&told).0, "deny", "{told}");
    std::fs::rename(project.path("project/away.db"), project.path("project/ledger.db")).unwrap();
    assert_eq!(project.before("t6", "Bash", json!({"command": "ls -b"})), json!({}));
    end(&project);
}

#[test]
fn whose_log_was_taken_away_leaves_it_alone() {
    let project = opened();
    for end in ["-wal", "-shm"] {
        std::fs::remove_file(project.path(&format!("project/ledger.db{end}"))).unwrap();
    }
    // Every hook by itself, from here on, and all of them by the same ledger.
    assert_eq!(project.before("t1", "Bash", json!({"command": "ls -a"})), json!({}));
    until("it is gone", || staying(&project).is_empty());
    assert_eq!(project.before("t2", "Bash", json!({"command": "ls -b"})), json!({}));
    project.hook(&json!({"hook_event_name": "SessionEnd", "session_id": "s1"}));
    assert_eq!(project.run(&["audit", "verify", "--store", "ledger.db"], "").0, 0);
}

#[test]
fn a_call_whose_client_does_not_wait_is_not_let_through() {
    let project = opened();
    let ledger = rusqlite::Connection::open(project.path("project/ledger.db")).unwrap();
    ledger.execute_batch("BEGIN IMMEDIATE").unwrap();
    let told = project.before("t1", "Bash", json!({"command": "ls -a"}));
    assert_eq!(decision(&told).0, "deny", "{told}");
    ledger.execute_batch("ROLLBACK").unwrap();
    // Nothing is left of it that somebody would have to settle.
    until("it is written down", || project.said_of().contains(&("failed".to_owned(), "unheard".to_owned())));
    let open: i64 =
        ledger.query_row("SELECT count(*) FROM claims WHERE client = 't1' AND state <> 'settled'", [], |row| row.get(0)).unwrap();
    assert_eq!(open, 0);
    end(&project);
}

#[test]
fn who_stays_and_does_not_answer_has_not_said_yes() {
    let project = opened();
    let number = Pid::from_raw(staying(&project)[0]);
    kill(number, Signal::SIGSTOP).unwrap();
    let told = project.before("t1", "Bash", json!({"command": "ls -a"}));
    assert!(decision(&told).0 == "deny" && decision(&told).1.contains("does not answer"), "{told}");
    let told = project.hook(&after("r5", "Bash", json!({"command": "echo first"}), json!({"stdout": "secret", "exit": 3})));
    assert_eq!(told["hookSpecificOutput"]["updatedToolOutput"], json!({"stdout": "(withheld)", "exit": 3}));
    kill(number, Signal::SIGKILL).unwrap();
    until("it is gone", || staying(&project).is_empty());
    // Nobody is there: every hook does all by itself.
    assert_eq!(project.before("t2", "Bash", json!({"command": "ls -b"})), json!({}));
    assert_eq!(decision(&project.before("t3", "Bash", json!({"command": "git push"}))).0, "deny");
    // Whoever begins next finds what it has left, and takes its place.
    project.hook(&json!({"hook_event_name": "SessionStart", "session_id": "s1"}));
    until("somebody stays again", || staying(&project).len() == 1 && listens(&project));
    end(&project);
}

#[test]
fn one_stays_for_all_sessions_and_until_the_last_has_ended() {
    let project = opened();
    // The one that it was begun for counts, too, whether or not anything was asked in it.
    for session in ["s2", "s3", "s2"] {
        project.hook(&json!({"hook_event_name": "SessionStart", "session_id": session}));
    }
    assert_eq!(staying(&project).len(), 1);
    for session in ["s2", "s3"] {
        project.hook(&json!({"hook_event_name": "SessionEnd", "session_id": session}));
    }
    project.before("t1", "Bash", json!({"command": "echo still there"}));
    assert_eq!(staying(&project).len(), 1);
    end(&project);
    // Its place is gone, and nobody misses it.
    let project = opened();
    std::fs::remove_dir_all(project.path(".local/state/toolgate/stay")).unwrap();
    until("it has noticed", || staying(&project).is_empty());
}

#[test]
fn a_result_that_does_not_come_in_time_is_withheld() {
    let project = Project::with(CONFIG);
    let mut command = std::process::Command::cargo_bin("toolgate-hook").unwrap();
    project.environment(&mut command);
    let mut child =
        command.args(["--config", "toolgate.toml"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let begins = json!({"hook_event_name": "PostToolUse", "session_id": "s1", "tool_name": "Bash", "tool_use_id": "t1"}).to_string();
    input.write_all(begins.trim_end_matches('}').as_bytes()).unwrap();
    input.write_all(br#", "tool_response": {"stdout": "secret"#).unwrap();
    let output = child.wait_with_output().unwrap();
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), &told["decision"]), (Some(0), &json!("block")), "{told}");
    assert_eq!(told["hookSpecificOutput"]["updatedToolOutput"]["stdout"], "(withheld)");
    drop(input);
}
