//! One upstream falls ill; nobody else notices, and nothing happens twice.

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
    processes_with_number, run_in_own_process, unused_address, wait_until,
};
pub(crate) use crate::upstream_faults::many_clients::ClientCrowd;

/// Two upstreams: one that is well, and one that is not.
pub(crate) fn well_and_ill_config(ill: &str) -> String {
    format!(
        "[upstreams.well]\ncommand = {}\nargs = [\"--stdio\"]\nundeclared = \"read\"\nconcurrency = 64\n[upstreams.ill]\n{ill}\n",
        json!(fixture_path())
    )
}

/// A program of a few lines.
pub(crate) fn write_script(home: &Path, name: &str, text: &str) -> Value {
    let (path, draft) = (home.join(name), home.join(format!("{name}.txt")));
    std::fs::write(&draft, format!("#!/bin/sh\n{text}\n")).unwrap();
    // Another program makes it: what is open for writing here may be so in a child that another
    // test has just begun, and cannot be run.
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
    // Before it has heard that somebody listens, and after.
    for pause in [0, 300] {
        let word = home.path().join(pause.to_string());
        let more = format!("undeclared = \"read\"\nenv = {{ FIXTURE_GOODBYE = {} }}", json!(word));
        let config = toolgate_config::Config::parse("toolgate.toml", &fixture_config(&more));
        // It is given seconds, in which a machine with much to do may do something else: then
        // another one is tried. One that is not told that nobody listens any more never ends by
        // itself.
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
            if word.exists() {
                break;
            }
        }
        assert!(word.exists(), "it was killed: {pause}");
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
    let (mut sure, mut unsure, mut refused) = (Vec::new(), Vec::new(), 0);
    let rounds = if std::env::var_os("TOOLGATE_SOAK").is_some() { 2_000 } else { 60 };
    for round in 0..100 * rounds {
        // More of them, until it was away often enough to tell.
        if round >= rounds && kills.load(Ordering::Relaxed) > 3 && refused > 0 {
            break;
        }
        // A call whose end is not known holds nothing but itself.
        let key = format!("count-{round}");
        let result = gate.client().in_session(&key).call("ill_count", json!({"key": key})).await;
        let error = &result["_meta"]["toolgate/error"];
        match (result["isError"].as_bool(), error["effects"].as_str()) {
            (Some(true), Some("none")) => refused += 1,
            (Some(true), _) => unsure.push(key),
            _ => sure.push(key),
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    crowd.assert_progress().await;
    done.store(true, Ordering::Relaxed);
    killer.await.unwrap();
    crowd.finish().await;
    let kills = kills.load(Ordering::Relaxed);
    assert!(kills > 3 && refused > 0, "{kills} {refused}");
    // Nothing happened twice, and nothing of which it was said that it did not.
    let mut happened = BTreeSet::new();
    for key in std::fs::read_to_string(&counter).unwrap_or_default().lines() {
        assert!(happened.insert(key.to_owned()), "`{key}` happened twice");
        assert!(
            sure.iter().chain(&unsure).any(|known| known == key),
            "`{key}` happened, and it was said that it did not"
        );
    }
    for key in &sure {
        assert!(happened.contains(key), "`{key}` was answered and never happened");
    }
    wait_until("it is back", async || matches!(status_of(&gate, "ill"), UpstreamStatus::Up { .. }))
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
    let begun = home.path().join("begun");
    let declared = |name: &str, time: &str| {
        format!(
            "[tools.ill_{name}]\nkind = \"mcp\"\nupstream = \"ill\"\ntool = \"sleep\"\neffect = \"read\"\ntimeout = \"{time}\"\n"
        )
    };
    let ill = format!(
        "command = {}\nargs = [\"--stdio\", \"--tools\", \"2\"]\nenv = {{ FIXTURE_COUNTER = {} }}\n{}{}",
        json!(fixture_path()),
        json!(begun),
        declared("sleep", "2s"),
        declared("rest", "40s")
    );
    let gate = TestGateway::open(&well_and_ill_config(&ill)).await;
    let crowd = ClientCrowd::start(&gate.client());
    let client = gate.client();
    // One that takes its time takes nobody else's.
    let resting = client.in_session("resting");
    let resting =
        tokio::spawn(async move { resting.call_code("ill_rest", json!({"ms": 30_000})).await });
    let rests =
        || std::fs::read_to_string(&begun).is_ok_and(|message| message.contains("sleep 30000"));
    wait_until("it is under way", async || rests()).await;
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
    // First it is waited for; then it is left alone.
    assert_eq!(codes.first().map(String::as_str), Some("timeout"), "{codes:?}");
    assert!(codes.iter().any(|code| code == "upstream_unavailable"), "{codes:?}");
    crowd.assert_progress().await;
    let mut tries = 0;
    wait_until("it is tried again", async || {
        tries += 1;
        client.in_session(&format!("later-{tries}")).call_code("ill_sleep", json!({"ms": 1})).await
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
    for (name, text, lives) in cases {
        let ill = format!(
            "command = {}\nundeclared = \"read\"\n[tools.ill_echo]\nkind = \"mcp\"\nupstream = \"ill\"\neffect = \"read\"\n",
            write_script(home.path(), name, &text)
        );
        let gate = TestGateway::open_with_short_timeout(&well_and_ill_config(&ill)).await;
        // Who says nothing is not waited for.
        let waited = !matches!(status_of(&gate, "ill"), UpstreamStatus::Starting);
        assert!(!waited || !matches!(name, "silent" | "half"), "{name}");
        let mut tries = 0;
        wait_until("the other one is there", async || {
            tries += 1;
            gate.client()
                .in_session(&format!("well-{tries}"))
                .call_code("well_echo", json!({"text": "x"}))
                .await
                == "ok"
        })
        .await;
        let crowd = ClientCrowd::start(&gate.client());
        if lives {
            let mut tries = 0;
            wait_until("it is heard through the noise", async || {
                tries += 1;
                gate.client()
                    .in_session(&format!("s{tries}"))
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
        let is_of_it =
            |words: &str| words.contains(&format!("/{name}")) || words.contains("sleep 1000");
        wait_until(&format!("nothing of {name} is left"), async || {
            !child_processes().iter().any(|(_, words)| is_of_it(words))
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
    // What is too large for the context is kept aside; what is too large for anything is an error.
    let kept = gate.client().in_session("a").call("ill_big", json!({"bytes": 300_000})).await;
    assert!(
        kept["_meta"]["toolgate/stored"]["bytes"].as_u64().unwrap() >= 300_000,
        "{:.300}",
        kept.to_string()
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
    // It was read to its end all the same, and what comes after it is an answer again.
    let mut turn = 0;
    wait_until("it is heard again", async || {
        turn += 1;
        gate.client()
            .in_session(&format!("c{turn}"))
            .call_code("ill_big", json!({"bytes": 300}))
            .await
            == "ok"
    })
    .await;
    // It was waited for twice as long.
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
    wait_until("the change is seen", async || {
        gate.gateway.health().iter().any(|health| !health.held.is_empty())
    })
    .await;
    // What has changed is held back; what is gone is gone; what is as it was goes on.
    assert_eq!(
        client.in_session("b").call_code("ill_echo", json!({"text": "x"})).await,
        "definition_changed"
    );
    assert_eq!(client.in_session("b").call_code("ill_sleep", json!({"ms": 1})).await, "ok");
    let gone = client.in_session("b").call_code("ill_add", json!({"a": 1, "b": 2})).await;
    assert!(gone == "upstream_invalid" || gone == "tool_failed", "{gone}");
    let held = gate.gateway.health().into_iter().find(|health| health.name == "ill").unwrap().held;
    assert_eq!(held.iter().map(|change| change.tool.as_str()).collect::<Vec<_>>(), ["echo"]);
    assert!(held[0].before.is_some());
    // Somebody looks at it and finds it fine.
    let upstream = toolgate_config::Config::parse("toolgate.toml", &text)
        .upstreams
        .into_iter()
        .find(|one| one.name == "ill")
        .unwrap();
    let pins = toolgate_mcp::Pins::open(Some(&gate.pins_dir()), &upstream).unwrap();
    // What nobody was shown cannot be accepted.
    assert_eq!(pins.accept(Some("echo")).unwrap().not_shown, ["echo"]);
    assert_eq!(pins.show_quarantined().unwrap().len(), 1);
    assert_eq!(pins.accept(Some("echo")).unwrap().tools, ["echo"]);
    gate.reload(&text).await.unwrap();
    assert_eq!(client.in_session("d").call_code("ill_echo", json!({"text": "x"})).await, "ok");
    assert!(client.tool_names().await.contains(&"ill_extra".to_owned()));
    crowd.finish().await;
    gate.shut_down().await;
}

/// In a process of its own, where nobody else opens files.
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
        wait_until("its children are gone", async || child_processes().is_empty()).await;
        // What is opened once for all is open after the first time.
        if round == 0 {
            tokio::time::sleep(Duration::from_millis(500)).await;
            before = count();
        }
    }
    // One a gateway would be five.
    wait_until("their files are closed", async || count() <= before + 2).await;
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
    // One that is broken leaves the old one in force.
    let error = gate.reload("[tools.calc]\nkind = \"bulitin\"\n").await.unwrap_err().to_string();
    assert!(error.contains("did you mean `builtin`?"), "{error}");
    assert!(gate.client().tool_names().await.contains(&"calc".to_owned()));
    assert_eq!(slow.await.unwrap(), "ok");
    crowd.finish().await;
    gate.shut_down().await;
}
