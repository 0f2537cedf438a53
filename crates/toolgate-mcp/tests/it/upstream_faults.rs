//! Tests that a faulty upstream affects no other upstream and repeats no effect.

mod many_clients;
mod redaction;
mod start_failures;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::{Value, json};
use toolgate_mcp::{UpstreamOptions, UpstreamStatus, Upstreams};

use crate::support::{
    TestGateway, child_processes, fixture_config, fixture_path, kill_processes_with_number,
    processes_with_number, run_in_own_process, wait_until,
};
pub(crate) use crate::upstream_faults::many_clients::ClientCrowd;

/// Builds a configuration with a working and a faulty upstream.
pub(crate) fn well_and_ill_config(ill: &str) -> String {
    format!(
        "[upstreams.well]\ncommand = {}\nargs = [\"--stdio\"]\nundeclared = \"read\"\nconcurrency = 64\n[upstreams.ill]\n{ill}\n",
        json!(fixture_path())
    )
}

/// Writes a shell script, and returns its path as JSON.
pub(crate) fn write_script(home: &Path, name: &str, text: &str) -> Value {
    let (path, draft) = (home.join(name), home.join(format!("{name}.txt")));
    std::fs::write(&draft, format!("#!/bin/sh\n{text}\n")).unwrap();
    // Another process writes the script. A child of another test could inherit an open write
    // descriptor, and then the script cannot be run.
    assert!(
        std::process::Command::new("install")
            .args(["-m", "755"])
            .args([&draft, &path])
            .status()
            .unwrap()
            .success()
    );
    json!(path)
}

pub(crate) fn status_of(gate: &TestGateway, name: &str) -> UpstreamStatus {
    gate.gateway.health().into_iter().find(|health| health.name == name).unwrap().status
}

#[tokio::test(flavor = "multi_thread")]
async fn stopped_upstream_gets_time_to_exit() {
    let home = tempfile::tempdir().unwrap();
    // The stop comes before and after the program has received the end of the handshake.
    for pause in [0, 300] {
        let goodbye = home.path().join(pause.to_string());
        let extra =
            format!("undeclared = \"read\"\nenv = {{ FIXTURE_GOODBYE = {} }}", json!(goodbye));
        let config = toolgate_config::Config::parse("toolgate.toml", &fixture_config(&extra));
        // On a busy machine, the grace period may be too short, so the test tries again. A program
        // that does not notice the end of its input never exits.
        for _ in 0..3 {
            let upstreams =
                Upstreams::start(&config, &UpstreamOptions::default(), Duration::from_secs(20))
                    .await
                    .unwrap();
            assert!(
                upstreams
                    .health()
                    .iter()
                    .all(|health| matches!(health.status, UpstreamStatus::Up { .. })),
                "{:?}",
                upstreams.health()
            );
            tokio::time::sleep(Duration::from_millis(pause)).await;
            upstreams.stop_all().await;
            if goodbye.exists() {
                break;
            }
        }
        assert!(goodbye.exists(), "the program was killed after {pause} ms");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_upstream_restarts_without_lost_effects() {
    let home = tempfile::tempdir().unwrap();
    let counter = home.path().join("effects");
    let ill = format!(
        "command = {}\nargs = [\"--stdio\", \"--tools\", \"9\"]\nenv = {{ FIXTURE_COUNTER = {} }}\n[tools.ill_count]\nkind = \"mcp\"\nupstream = \"ill\"\neffect = \"write\"\npolicy = \"open\"\n",
        json!(fixture_path()),
        json!(counter)
    );
    let gate = TestGateway::open(&well_and_ill_config(&ill)).await;
    let crowd = ClientCrowd::start(&gate.client());
    let (done, kills) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let killer = tokio::spawn({
        let (done, kills) = (Arc::clone(&done), Arc::clone(&kills));
        async move {
            while !done.load(Ordering::Relaxed) {
                tokio::time::sleep(Duration::from_millis(120)).await;
                kills.fetch_add(kill_processes_with_number(9), Ordering::Relaxed);
            }
        }
    });
    let (mut certain, mut uncertain, mut refused) = (Vec::new(), Vec::new(), 0);
    let rounds = if std::env::var_os("TOOLGATE_SOAK").is_some() { 2_000 } else { 60 };
    for round in 0..100 * rounds {
        // The loop continues until the upstream was killed often enough.
        if round >= rounds && kills.load(Ordering::Relaxed) > 3 && refused > 0 {
            break;
        }
        // Each call has its own session, so a pending call blocks no other.
        let key = format!("count-{round}");
        let result = gate.client().in_session(&key).call("ill_count", json!({"key": key})).await;
        let error = &result["_meta"]["toolgate/error"];
        match (result["isError"].as_bool(), error["effects"].as_str()) {
            (Some(true), Some("none")) => refused += 1,
            (Some(true), _) => uncertain.push(key),
            _ => certain.push(key),
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    crowd.assert_progress().await;
    done.store(true, Ordering::Relaxed);
    killer.await.unwrap();
    crowd.finish().await;
    let kills = kills.load(Ordering::Relaxed);
    assert!(kills > 3 && refused > 0, "{kills} {refused}");
    // No effect happened twice, and none that was reported as refused.
    let mut happened = BTreeSet::new();
    for key in std::fs::read_to_string(&counter).unwrap_or_default().lines() {
        assert!(happened.insert(key.to_owned()), "`{key}` happened twice");
        assert!(
            certain.iter().chain(&uncertain).any(|known| known == key),
            "`{key}` happened, and was reported as refused"
        );
    }
    for key in &certain {
        assert!(happened.contains(key), "`{key}` was confirmed but did not happen");
    }
    wait_until("the upstream is up again", async || {
        matches!(status_of(&gate, "ill"), UpstreamStatus::Up { .. })
    })
    .await;
    assert_eq!(
        gate.client().in_session("after").call_code("ill_count", json!({"key": "after"})).await,
        "ok"
    );
    gate.shut_down().await;
    assert!(processes_with_number(9).is_empty(), "{:?}", child_processes());
}

#[tokio::test(flavor = "multi_thread")]
async fn hung_upstream_times_out_without_blocking_others() {
    let home = tempfile::tempdir().unwrap();
    let calls = home.path().join("calls");
    let declared = |name: &str, time: &str| {
        format!(
            "[tools.ill_{name}]\nkind = \"mcp\"\nupstream = \"ill\"\ntool = \"sleep\"\neffect = \"read\"\ntimeout = \"{time}\"\n"
        )
    };
    let ill = format!(
        "command = {}\nargs = [\"--stdio\", \"--tools\", \"2\"]\nenv = {{ FIXTURE_COUNTER = {} }}\n{}{}",
        json!(fixture_path()),
        json!(calls),
        declared("sleep", "2s"),
        declared("rest", "40s")
    );
    let gate = TestGateway::open(&well_and_ill_config(&ill)).await;
    let crowd = ClientCrowd::start(&gate.client());
    let client = gate.client();
    // A slow call does not block other upstreams.
    let resting = client.in_session("resting");
    let resting =
        tokio::spawn(async move { resting.call_code("ill_rest", json!({"ms": 30_000})).await });
    let is_resting =
        || std::fs::read_to_string(&calls).is_ok_and(|text| text.contains("sleep 30000"));
    wait_until("the call runs", async || is_resting()).await;
    crowd.assert_progress_during(&resting).await;
    resting.abort();
    let slow = |round: u32| {
        let client = client.in_session(&format!("s{round}"));
        async move { client.call_code("ill_sleep", json!({"ms": 600_000 + round})).await }
    };
    let mut codes = join_all((0..5).map(slow)).await;
    for round in 5..8 {
        codes.push(slow(round).await);
    }
    // The first calls time out, and then the circuit breaker opens.
    assert_eq!(codes.first().map(String::as_str), Some("timeout"), "{codes:?}");
    assert!(codes.iter().any(|code| code == "upstream_unavailable"), "{codes:?}");
    crowd.assert_progress().await;
    let mut attempt = 0;
    wait_until("the upstream answers again", async || {
        attempt += 1;
        client
            .in_session(&format!("later-{attempt}"))
            .call_code("ill_sleep", json!({"ms": 1}))
            .await
            == "ok"
    })
    .await;
    crowd.finish().await;
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn junk_output_disables_only_its_upstream() {
    let home = tempfile::tempdir().unwrap();
    let fixture = fixture_path();
    let fixture = fixture.display();
    let cases = [
        ("silent", "sleep 1000".to_owned(), false),
        ("gone", "exit 7".to_owned(), false),
        ("garbage", "yes garbage".to_owned(), false),
        ("half", "printf '{\"jsonrpc\":\"2.0\",\"id\":0,\"resu'; sleep 1000".to_owned(), false),
        ("chatty", format!("echo hello; echo '{{\"a\":1}}'; exec {fixture} --stdio"), true),
        ("endless", "tr '\\0' 'x' < /dev/zero".to_owned(), false),
    ];
    for (name, script, is_usable) in cases {
        let ill = format!(
            "command = {}\nundeclared = \"read\"\n[tools.ill_echo]\nkind = \"mcp\"\nupstream = \"ill\"\neffect = \"read\"\n",
            write_script(home.path(), name, &script)
        );
        let gate = TestGateway::open_with_short_timeout(&well_and_ill_config(&ill)).await;
        // The gateway does not wait for a silent upstream.
        let has_ended = !matches!(status_of(&gate, "ill"), UpstreamStatus::Starting);
        assert!(!has_ended || !matches!(name, "silent" | "half"), "{name}");
        let mut attempt = 0;
        wait_until("the other upstream is up", async || {
            attempt += 1;
            gate.client()
                .in_session(&format!("well-{attempt}"))
                .call_code("well_echo", json!({"text": "x"}))
                .await
                == "ok"
        })
        .await;
        let crowd = ClientCrowd::start(&gate.client());
        if is_usable {
            let mut attempt = 0;
            wait_until("the upstream answers despite its other output", async || {
                attempt += 1;
                gate.client()
                    .in_session(&format!("s{attempt}"))
                    .call_code("ill_echo", json!({"text": "x"}))
                    .await
                    == "ok"
            })
            .await;
        } else {
            let error = gate.client().in_session("t").call("ill_echo", json!({"text": "x"})).await
                ["_meta"]["toolgate/error"]
                .clone();
            assert_eq!(
                (error["errorCategory"].as_str(), error["effects"].as_str()),
                (Some("TRANSIENT"), Some("none")),
                "{name}: {error}"
            );
        }
        crowd.finish().await;
        gate.shut_down().await;
        let is_upstream_process = |command_line: &str| {
            command_line.contains(&format!("/{name}")) || command_line.contains("sleep 1000")
        };
        wait_until(&format!("the processes of {name} have exited"), async || {
            !child_processes().iter().any(|(_, command_line)| is_upstream_process(command_line))
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn endless_answer_fails_without_blocking_others() {
    let ill = format!(
        "command = {}\nargs = [\"--stdio\", \"--tools\", \"3\"]\n[tools.ill_big]\nkind = \"mcp\"\nupstream = \"ill\"\neffect = \"read\"\ntimeout = \"20s\"\n",
        json!(fixture_path())
    );
    let gate = TestGateway::open(&well_and_ill_config(&ill)).await;
    let crowd = ClientCrowd::start(&gate.client());
    // A result above the context limit is stored, and a result above the size limit is an error.
    let stored = gate.client().in_session("a").call("ill_big", json!({"bytes": 300_000})).await;
    assert!(
        stored["_meta"]["toolgate/stored"]["bytes"].as_u64().unwrap() >= 300_000,
        "{:.300}",
        stored.to_string()
    );
    let endless = gate.client().in_session("b");
    let endless =
        tokio::spawn(async move { endless.call("ill_big", json!({"bytes": 100_000_000})).await });
    crowd.assert_progress_during(&endless).await;
    let endless = endless.await.unwrap();
    let error = &endless["_meta"]["toolgate/error"];
    assert_eq!(
        (&error["code"], &error["errorCategory"]),
        (&json!("timeout"), &json!("TRANSIENT")),
        "{:.300}",
        endless.to_string()
    );
    // The gateway reads the oversized answer to its end, so the next answer is valid.
    let mut attempt = 0;
    wait_until("the upstream answers again", async || {
        attempt += 1;
        gate.client()
            .in_session(&format!("c{attempt}"))
            .call_code("ill_big", json!({"bytes": 300}))
            .await
            == "ok"
    })
    .await;
    // The timeout of the call is twice as long.
    crowd.finish_within(Duration::from_secs(10)).await;
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn upgraded_upstream_quarantines_changed_tools() {
    let home = tempfile::tempdir().unwrap();
    let flags = home.path().join("flags");
    std::fs::write(&flags, "").unwrap();
    let run = write_script(
        home.path(),
        "server",
        &format!("exec {} --stdio --tools 4 $(cat {})", fixture_path().display(), flags.display()),
    );
    let text = well_and_ill_config(&format!("command = {run}\nundeclared = \"read\"\n"));
    let gate = TestGateway::open(&text).await;
    let client = gate.client();
    let crowd = ClientCrowd::start(&client);
    assert_eq!(client.in_session("a").call_code("ill_echo", json!({"text": "x"})).await, "ok");
    std::fs::write(&flags, "--version-two").unwrap();
    kill_processes_with_number(4);
    wait_until("the change is detected", async || {
        gate.gateway.health().iter().any(|health| !health.held.is_empty())
    })
    .await;
    // A changed tool is quarantined, a removed tool is gone, and other tools still work.
    assert_eq!(
        client.in_session("b").call_code("ill_echo", json!({"text": "x"})).await,
        "definition_changed"
    );
    assert_eq!(client.in_session("b").call_code("ill_sleep", json!({"ms": 1})).await, "ok");
    let removed = client.in_session("b").call_code("ill_add", json!({"a": 1, "b": 2})).await;
    assert!(removed == "upstream_invalid" || removed == "tool_failed", "{removed}");
    let held = gate.gateway.health().into_iter().find(|health| health.name == "ill").unwrap().held;
    assert_eq!(held.iter().map(|change| change.tool.as_str()).collect::<Vec<_>>(), ["echo"]);
    assert!(held[0].before.is_some());
    // A person reviews and accepts the definition.
    let upstream = toolgate_config::Config::parse("toolgate.toml", &text)
        .upstreams
        .into_iter()
        .find(|entry| entry.name == "ill")
        .unwrap();
    let pins = toolgate_mcp::Pins::open(Some(&gate.pins_dir()), &upstream).unwrap();
    // A definition that was not shown cannot be accepted.
    assert_eq!(pins.accept(Some("echo")).unwrap().not_shown, ["echo"]);
    assert_eq!(pins.show_quarantined().unwrap().len(), 1);
    assert_eq!(pins.accept(Some("echo")).unwrap().tools, ["echo"]);
    gate.reload(&text).await.unwrap();
    assert_eq!(client.in_session("d").call_code("ill_echo", json!({"text": "x"})).await, "ok");
    assert!(client.tool_names().await.contains(&"ill_extra".to_owned()));
    crowd.finish().await;
    gate.shut_down().await;
}

/// The test counts open files of its process, so the process runs no other test.
#[test]
fn closed_gateway_leaks_no_files_or_processes() {
    run_in_own_process("upstream_faults::gateway_leaks_in_own_process");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "started by closed_gateway_leaks_no_files_or_processes"]
async fn gateway_leaks_in_own_process() {
    let count = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let text = well_and_ill_config(&format!(
        "command = {}\nargs = [\"--stdio\", \"--tools\", \"5\"]\nundeclared = \"read\"\n",
        json!(fixture_path())
    ));
    let mut before = 0;
    for round in 0..6 {
        let gate = TestGateway::open(&text).await;
        let clients: Vec<_> =
            (0..16).map(|number| gate.client().in_session(&format!("{round}-{number}"))).collect();
        for client in &clients {
            assert_eq!(client.call_code("ill_echo", json!({"text": "x"})).await, "ok");
        }
        drop(clients);
        gate.shut_down().await;
        wait_until("all child processes have exited", async || child_processes().is_empty()).await;
        // The first round opens the files that stay open.
        if round == 0 {
            tokio::time::sleep(Duration::from_millis(500)).await;
            before = count();
        }
    }
    // A leak per gateway would be at least five.
    wait_until("the files are closed", async || count() <= before + 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reload_drops_no_call() {
    let text = well_and_ill_config(&format!(
        "command = {}\nargs = [\"--stdio\", \"--tools\", \"6\"]\nundeclared = \"read\"\n",
        json!(fixture_path())
    ));
    let gate = TestGateway::open(&text).await;
    let crowd = ClientCrowd::start(&gate.client());
    crowd.assert_progress().await;
    let client = gate.client().in_session("slow");
    let slow =
        tokio::spawn(async move { client.call_code("ill_sleep", json!({"ms": 1_500})).await });
    tokio::time::sleep(Duration::from_millis(100)).await;
    for round in 0..5 {
        gate.reload(&format!(
            "{text}\n[tools.calc]\nkind = \"builtin\"\ndescription = \"round {round}\"\n"
        ))
        .await
        .unwrap();
    }
    assert!(gate.client().tool_names().await.contains(&"calc".to_owned()));
    // An invalid configuration keeps the old one in force.
    let error = gate.reload("[tools.calc]\nkind = \"bulitin\"\n").await.unwrap_err().to_string();
    assert!(error.contains("did you mean `builtin`?"), "{error}");
    assert!(gate.client().tool_names().await.contains(&"calc".to_owned()));
    assert_eq!(slow.await.unwrap(), "ok");
    crowd.finish().await;
    gate.shut_down().await;
}
