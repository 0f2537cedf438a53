//! Tests that faults of one upstream under load lose no other call and repeat no effect.

mod client_churn;
mod client_sessions;
mod effect_journal;
mod garbage_upstreams;
mod huge_results;
mod session_server;
mod upstream_churn;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::json;
use tokio::task::JoinHandle;
use toolgate_mcp::{UpstreamHealth, UpstreamStatus};

use crate::load::effect_journal::EffectJournal;
use crate::load::session_server::{FakeUpstreamSessions, start_session_server};
use crate::support::{
    McpTestClient, TestGateway, child_processes, fixture_path, kill_processes_with_number,
    processes_with_number, run_in_own_process, wait_until,
};
use crate::upstream_faults::{ClientCrowd, well_and_ill_config};

/// A tool with an effect, of the faulty upstream.
const MARK_TOOL_CONFIG: &str =
    "[tools.ill_mark]\nkind = \"mcp\"\nupstream = \"ill\"\neffect = \"write\"\npolicy = \"open\"\n";
/// The modes of the fixture in which the server answers after its mark.
const ANSWERED_MODES: [&str; 4] = ["answer", "slow", "garbage", "twice"];
/// The modes of the fixture in which the server does not answer.
const UNANSWERED_MODES: [&str; 3] = ["half", "glued", "hang"];

/// Builds the configuration of the scripted fixture. Tests find its process by the number.
fn scripted_upstream_config(home: &Path, number: u8, extra: &str) -> String {
    format!(
        "command = {}\nargs = [\"--ill\", \"--tools\", \"{number}\"]\nenv = {{ FIXTURE_COUNTER = {}, FIXTURE_REVISION = {} }}\n\
         undeclared = \"read\"\nconcurrency = 64\n{extra}\n{MARK_TOOL_CONFIG}",
        json!(fixture_path()),
        json!(home.join("effects")),
        json!(home.join("revision"))
    )
}

fn health(gate: &TestGateway) -> UpstreamHealth {
    gate.gateway.health().into_iter().find(|health| health.name == "ill").unwrap()
}

fn is_up(gate: &TestGateway) -> bool {
    matches!(health(gate).status, UpstreamStatus::Up { .. })
}

fn quarantined_tools(gate: &TestGateway) -> Vec<String> {
    health(gate).held.into_iter().map(|change| change.tool).collect()
}

/// Starts readers and writers, which call the upstream until the test sets `is_over`.
fn spawn_clients(
    client: &McpTestClient,
    journal: &Arc<EffectJournal>,
    is_over: &Arc<AtomicBool>,
    readers: usize,
    writers: usize,
) -> Vec<JoinHandle<()>> {
    let spawn_client = |number: usize| {
        let (client, journal, is_over) = (client.clone(), Arc::clone(journal), Arc::clone(is_over));
        tokio::spawn(async move {
            let mut turn = 0;
            while !is_over.load(Ordering::Relaxed) {
                let name = format!("w{number}-{turn}");
                if number < readers {
                    read_until_ok(&client, &name).await;
                } else {
                    journal.call_until_effect(&client, &name, "slow").await;
                }
                turn += 1;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
    };
    (0..readers + writers).map(spawn_client).collect()
}

/// Repeats a read while its error is retryable.
async fn read_until_ok(client: &McpTestClient, text: &str) {
    for attempt in 0..600 {
        let result = client
            .in_session(&format!("{text}-{attempt}"))
            .call("ill_echo", json!({"text": text}))
            .await;
        let error = &result["_meta"]["toolgate/error"];
        if error.is_null() {
            assert_eq!(result["structuredContent"]["text"], json!(text), "{result}");
            return;
        }
        assert_eq!(
            (&error["isRetryable"], &error["effects"]),
            (&json!(true), &json!("none")),
            "{error}"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("`{text}` was not answered");
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_messages_lose_one_call_and_repeat_none() {
    let home = tempfile::tempdir().unwrap();
    let journal = EffectJournal::open(home.path());
    let gate = TestGateway::open(&well_and_ill_config(&scripted_upstream_config(
        home.path(),
        80,
        "timeout = \"3s\"",
    )))
    .await;
    let client = gate.client();
    let crowd = ClientCrowd::start_with_tools(&client, &["well_echo"]);
    let modes: Vec<&str> = ANSWERED_MODES.into_iter().chain(UNANSWERED_MODES).collect();
    let (modes, journal, client) = (&modes, &journal, &client);
    let run_modes = |number: usize| async move {
        let mut outcomes = Vec::new();
        // Each client starts with another mode, so that all modes run at the same time.
        for mode in modes.iter().cycle().skip(number).take(modes.len()) {
            let key = format!("{mode}-{number}");
            outcomes.push((*mode, journal.call_until_effect(client, &key, mode).await));
        }
        outcomes
    };
    let outcomes: Vec<(&str, bool)> =
        join_all((0..14).map(run_modes)).await.into_iter().flatten().collect();
    // Half a line also corrupts the next line, so some other answers are lost too.
    assert!(ANSWERED_MODES.iter().all(|mode| outcomes.contains(&(*mode, true))), "{outcomes:?}");
    assert!(!UNANSWERED_MODES.iter().any(|mode| outcomes.contains(&(*mode, true))), "{outcomes:?}");
    read_until_ok(client, "after").await;
    assert_eq!(health(&gate).starts, 1, "the upstream was restarted");
    crowd.finish().await;
    let (certain, uncertain) = journal.check_effects();
    assert!(certain >= 4 && uncertain >= 3 * 14, "{certain} {uncertain}");
    gate.shut_down().await;
    assert!(processes_with_number(80).is_empty(), "{:?}", child_processes());
}

#[tokio::test(flavor = "multi_thread")]
async fn changed_list_quarantines_only_changed_tools() {
    let home = tempfile::tempdir().unwrap();
    let revision = |text: &str| std::fs::write(home.path().join("revision"), text).unwrap();
    let gate =
        TestGateway::open(&well_and_ill_config(&scripted_upstream_config(home.path(), 81, "")))
            .await;
    let client = gate.client();
    let mut call_count = 0;
    let mut code = async |tool: &str| {
        call_count += 1;
        client.in_session(&format!("s{call_count}")).call_code(tool, json!({})).await
    };
    assert_eq!(code("ill_talk").await, "ok");
    // The upstream announces this change, and no call is lost.
    let crowd = ClientCrowd::start_with_tools(&client, &["well_echo", "ill_echo"]);
    revision("2");
    assert_eq!(code("ill_announce").await, "ok");
    wait_until("the change is detected", async || quarantined_tools(&gate) == ["talk", "whisper"])
        .await;
    wait_until("the new harmless tool is listed", async || {
        client.tool_names().await.contains(&"ill_late".to_owned())
    })
    .await;
    assert_eq!(
        (code("ill_late").await, code("ill_talk").await),
        ("ok".to_owned(), "definition_changed".to_owned())
    );
    assert_eq!(code("ill_whisper").await, "unknown_tool");
    let (_, listed) = client.call_method("tools/list", json!({})).await;
    let listed = listed["result"]["tools"].as_array().unwrap();
    let talk = listed.iter().find(|tool| tool["name"] == "ill_talk").unwrap();
    assert_eq!(
        talk["description"], "Talks.",
        "the list has another description than the accepted one"
    );
    assert!(!listed.iter().any(|tool| tool["name"] == "ill_whisper"));
    crowd.finish().await;
    assert_eq!(health(&gate).starts, 1);
    // The upstream does not announce this change, and restarts with other tools.
    let crowd = ClientCrowd::start_with_tools(&client, &["well_echo"]);
    revision("3");
    kill_processes_with_number(81);
    wait_until("the change is detected", async || quarantined_tools(&gate) == ["late", "whisper"])
        .await;
    wait_until("the new harmless tool is listed", async || {
        client.tool_names().await.contains(&"ill_later".to_owned())
    })
    .await;
    assert_eq!(code("ill_late").await, "definition_changed");
    for tool in ["ill_talk", "ill_later", "ill_announce"] {
        assert_eq!(code(tool).await, "ok", "{tool}");
    }
    read_until_ok(&client, "as-before").await;
    crowd.finish().await;
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_sessions_lose_no_read_and_repeat_no_effect() {
    let home = tempfile::tempdir().unwrap();
    let (journal, sessions) =
        (EffectJournal::open(home.path()), Arc::<Mutex<FakeUpstreamSessions>>::default());
    let address = start_session_server(&sessions, &journal).await;
    let gate = TestGateway::open(&well_and_ill_config(&format!(
        "url = \"http://{address}/mcp\"\nundeclared = \"read\"\n{MARK_TOOL_CONFIG}"
    )))
    .await;
    let crowd = ClientCrowd::start_with_tools(&gate.client(), &["well_echo"]);
    let is_over = Arc::<AtomicBool>::default();
    let clients = spawn_clients(&gate.client(), &journal, &is_over, 32, 32);
    for round in 1..=3 {
        wait_until("the upstream is up", async || is_up(&gate)).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        sessions.lock().unwrap().open.clear();
        wait_until("another session is open", async || {
            sessions.lock().unwrap().opened_count > round
        })
        .await;
    }
    wait_until("enough effects have happened", async || journal.certain_count() >= 32).await;
    is_over.store(true, Ordering::Relaxed);
    join_all(clients).await.into_iter().for_each(Result::unwrap);
    crowd.finish().await;
    let ((certain, uncertain), refused) =
        (journal.check_effects(), sessions.lock().unwrap().refused_count);
    assert!(certain >= 32 && refused >= 3, "{certain} {uncertain} {refused}");
    gate.shut_down().await;
    wait_until("the last session is closed", async || sessions.lock().unwrap().open.is_empty())
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn read_is_repeated_in_new_session_after_session_loss() {
    let home = tempfile::tempdir().unwrap();
    let (journal, sessions) =
        (EffectJournal::open(home.path()), Arc::<Mutex<FakeUpstreamSessions>>::default());
    let address = start_session_server(&sessions, &journal).await;
    let gate = TestGateway::open(&well_and_ill_config(&format!(
        "url = \"http://{address}/mcp\"\nundeclared = \"read\"\n{MARK_TOOL_CONFIG}"
    )))
    .await;
    wait_until("the upstream is up", async || is_up(&gate)).await;
    sessions.lock().unwrap().open.clear();
    // The client sends the call once.
    let result = gate.client().call("ill_echo", json!({"text": "again"})).await;
    assert_eq!(result["structuredContent"]["text"], json!("again"), "{result}");
    assert!(sessions.lock().unwrap().opened_count > 1);
    assert!(sessions.lock().unwrap().refused_count > 0);
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn upgrade_and_reload_repeat_no_effect() {
    let home = tempfile::tempdir().unwrap();
    let journal = EffectJournal::open(home.path());
    let text = |seconds: u8| {
        well_and_ill_config(&scripted_upstream_config(
            home.path(),
            82,
            &format!("timeout = \"{seconds}s\""),
        ))
    };
    let gate = TestGateway::open(&text(50)).await;
    let crowd = ClientCrowd::start_with_tools(&gate.client(), &["well_echo"]);
    let is_over = Arc::<AtomicBool>::default();
    let clients = spawn_clients(&gate.client(), &journal, &is_over, 0, 32);
    tokio::time::sleep(Duration::from_millis(400)).await;
    std::fs::write(home.path().join("revision"), "2").unwrap();
    kill_processes_with_number(82);
    wait_until("the other version is up", async || health(&gate).starts > 1 && is_up(&gate)).await;
    tokio::time::sleep(Duration::from_millis(400)).await;
    // Each reload restarts the upstream while calls run.
    for seconds in 51..55 {
        gate.reload(&text(seconds)).await.unwrap();
        tokio::time::sleep(Duration::from_millis(150)).await;
    }
    wait_until("enough effects have happened", async || journal.certain_count() >= 32).await;
    is_over.store(true, Ordering::Relaxed);
    join_all(clients).await.into_iter().for_each(Result::unwrap);
    crowd.finish().await;
    let (certain, uncertain) = journal.check_effects();
    assert!(certain >= 32, "{certain} {uncertain}");
    gate.shut_down().await;
    wait_until("all upstream processes have exited", async || processes_with_number(82).is_empty())
        .await;
}

/// The test counts open files of its process, so the process runs no other test.
#[test]
fn crowd_of_clients_leaks_no_resources() {
    run_in_own_process("load::crowd_leaks_in_own_process");
}

fn alive_tasks() -> usize {
    tokio::runtime::Handle::current().metrics().num_alive_tasks()
}

/// Returns the number of open files of this process.
fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Returns a count once the count is stable.
async fn wait_until_stable<T: PartialEq + Copy>(count: impl Fn() -> T) -> T {
    let mut before = count();
    wait_until("the count is stable", async || {
        let last = std::mem::replace(&mut before, count());
        tokio::time::sleep(Duration::from_secs(1)).await;
        before == last && before == count()
    })
    .await;
    before
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "started by crowd_of_clients_leaks_no_resources"]
async fn crowd_leaks_in_own_process() {
    let home = tempfile::tempdir().unwrap();
    let (journal, sessions) =
        (EffectJournal::open(home.path()), Arc::<Mutex<FakeUpstreamSessions>>::default());
    let address = start_session_server(&sessions, &journal).await;
    let text = well_and_ill_config(&scripted_upstream_config(home.path(), 83, ""))
        + &format!("[upstreams.old]\nurl = \"http://{address}/mcp\"\nundeclared = \"read\"\n");
    let mut before = (0, 0);
    for round in 1..=4 {
        let gate = TestGateway::open(&text).await;
        let crowd = ClientCrowd::start_with_tools(&gate.client(), &["well_echo"]);
        assert_eq!(sessions.lock().unwrap().open.len(), 1, "all clients share one session");
        kill_processes_with_number(83);
        sessions.lock().unwrap().open.clear();
        let (client, mut attempt) = (gate.client(), 0);
        wait_until("the session is open again", async || {
            attempt += 1;
            client
                .in_session(&format!("{round}-{attempt}"))
                .call_code("old_echo", json!({"text": "x"}))
                .await
                == "ok"
        })
        .await;
        read_until_ok(&client, &format!("round-{round}")).await;
        assert_eq!(
            (processes_with_number(83).len(), sessions.lock().unwrap().open.len()),
            (1, 1),
            "each lost upstream is replaced once"
        );
        crowd.finish().await;
        drop(client);
        gate.shut_down().await;
        wait_until("all processes and sessions have ended", async || {
            child_processes().is_empty() && sessions.lock().unwrap().open.is_empty()
        })
        .await;
        // The first round opens the files that stay open.
        if round == 1 {
            tokio::time::sleep(Duration::from_millis(500)).await;
            before = (open_files(), alive_tasks());
        }
    }
    // A leak per gateway would be at least three.
    wait_until("the files are closed and the tasks have ended", async || {
        open_files() <= before.0 + 2 && alive_tasks() <= before.1 + 2
    })
    .await;
}
