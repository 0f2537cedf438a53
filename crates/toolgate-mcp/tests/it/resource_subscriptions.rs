//! Tests which clients receive notifications about resources.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use toolgate::store::PauseTarget;

use crate::resources::{start_resource_server, upstream_config};
use crate::stream_clients::{LegacyStreamClient, ListenStreamClient};
use crate::support::{TestGateway, fixture_path, kill_processes_with_number, wait_until};

#[tokio::test(flavor = "multi_thread")]
async fn subscriber_is_notified_only_of_its_resource() {
    let fixture = |name: &str| {
        format!(
            "[upstreams.{name}]\ncommand = {}\nargs = [\"--stdio\"]\nundeclared = \"open\"\n",
            json!(fixture_path())
        )
    };
    let gate = TestGateway::open(&(fixture("a") + &fixture("b"))).await;
    let watched = "toolgate://b/test://watched-resource";
    let (mut hears, mut other) =
        (LegacyStreamClient::open(&gate).await, LegacyStreamClient::open(&gate).await);
    assert!(
        hears
            .call_method("resources/subscribe", json!({"uri": watched}))
            .await
            .get("result")
            .is_some()
    );
    other
        .call_method("resources/subscribe", json!({"uri": "toolgate://a/test://static-text"}))
        .await;
    let updated = |told: &[Value]| -> Vec<Value> {
        let updates =
            told.iter().filter(|message| message["method"] == "notifications/resources/updated");
        updates.map(|message| message["params"]["uri"].clone()).collect()
    };
    let mut changes = 0;
    // Its upstream may not have heard yet that somebody wants to know: then it is changed again.
    while updated(&hears.notifications).is_empty() && changes < 20 {
        for tool in ["a_count", "b_count"] {
            let counted =
                hears.call_method("tools/call", json!({"name": tool, "arguments": {}})).await;
            assert_eq!(counted["result"]["isError"], json!(false), "{counted}");
        }
        changes += 1;
        while updated(&hears.notifications).is_empty() {
            let Ok(said) = tokio::time::timeout(Duration::from_secs(5), hears.next_message()).await
            else {
                break;
            };
            hears.notifications.push(said);
        }
    }
    // Whatever else was to come has come when this is answered.
    hears.call_method("ping", json!({})).await;
    let told = updated(&hears.notifications);
    assert!(
        (1..=changes).contains(&told.len()) && told.iter().all(|uri| *uri == watched),
        "{told:?} after {changes}"
    );
    other.call_method("ping", json!({})).await;
    assert_eq!(updated(&other.notifications), Vec::<Value>::new());
    drop((hears, other));
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn upstream_is_unsubscribed_after_last_client() {
    let asked_for: Arc<Mutex<Vec<Value>>> = Arc::default();
    let x = start_resource_server("x", Arc::default(), Arc::clone(&asked_for)).await;
    let gate = TestGateway::open(&upstream_config("x", &x, "")).await;
    let times = |method: &str| {
        asked_for.lock().unwrap().iter().filter(|asked| asked["method"] == method).count()
    };
    let uri = json!({"uri": "toolgate://x/note://a"});
    let (mut one, mut two) =
        (LegacyStreamClient::open(&gate).await, LegacyStreamClient::open(&gate).await);
    one.call_method("resources/subscribe", uri.clone()).await;
    two.call_method("resources/subscribe", uri.clone()).await;
    assert_eq!(times("resources/subscribe"), 1);
    one.call_method("resources/unsubscribe", uri.clone()).await;
    assert_eq!(times("resources/unsubscribe"), 0, "the other still listens");
    drop(two);
    wait_until("it is told", async || times("resources/unsubscribe") == 1).await;
    drop(one);
    // Those who listen to one stream for everything are counted like the rest.
    let listening = ListenStreamClient::open(
        &gate,
        "",
        json!({"resourceSubscriptions": ["toolgate://x/note://a"]}),
    )
    .await;
    wait_until("it is wanted again", async || times("resources/subscribe") == 2).await;
    drop(listening);
    wait_until("it is told again", async || times("resources/unsubscribe") == 2).await;
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn subscription_during_reload_is_kept() {
    let asked_for: Arc<Mutex<Vec<Value>>> = Arc::default();
    let x = start_resource_server("x", Arc::default(), Arc::clone(&asked_for)).await;
    let gate = TestGateway::open(&upstream_config("x", &x, "")).await;
    let times = |method: &str| {
        asked_for.lock().unwrap().iter().filter(|asked| asked["method"] == method).count()
    };
    let (mut old, before) = (LegacyStreamClient::open(&gate).await, times("initialize"));
    // One that says nothing is waited for; meanwhile the other one is there twice, as it was and as
    // it will be.
    let slow = "[upstreams.slow]\ncommand = \"/bin/sleep\"\nargs = [\"997\"]\n";
    let config = upstream_config("x", &x, "timeout = \"20s\"") + slow;
    let wants = async {
        wait_until("it is connected to anew", async || times("initialize") > before).await;
        old.call_method("resources/subscribe", json!({"uri": "toolgate://x/note://a"})).await
    };
    let (reloaded, subscribed) = tokio::join!(gate.reload(&config), wants);
    reloaded.unwrap();
    assert!(subscribed.get("result").is_some(), "{subscribed}");
    wait_until("the one that is there now has heard of it", async || {
        times("resources/subscribe") == 2
    })
    .await;
    drop(old);
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_supported_notifications_are_acknowledged() {
    let x = start_resource_server("x", Arc::default(), Arc::default()).await;
    let gate = TestGateway::open(&upstream_config("x", &x, "prompts = false")).await;
    let known = "toolgate://x/note://a";
    let long = format!("toolgate://x/note://{}", "a".repeat(3_000));
    let wanted = json!({"toolsListChanged": true, "promptsListChanged": true, "resourcesListChanged": true,
        "resourceSubscriptions": [known, "toolgate://z/note://a", known, long, "other://"]});
    // A bare address that nobody else has is the only upstream's.
    let kept = json!({"toolsListChanged": true, "resourcesListChanged": true, "resourceSubscriptions": [known, "other://"]});
    let mut listening = ListenStreamClient::open(&gate, "", wanted.clone()).await;
    let said = listening.next_message().await;
    assert_eq!(
        (&said["method"], &said["params"]["notifications"]),
        (&json!("notifications/subscriptions/acknowledged"), &kept),
        "{said}"
    );
    // The same over streams.
    let (_, mut ask, mut answers) = gate.connect_streams(None);
    let meta = json!({"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {},
        "io.modelcontextprotocol/clientInfo": {"name": "t", "version": "1"}});
    let listen = json!({"jsonrpc": "2.0", "id": 1, "method": "subscriptions/listen", "params": {"_meta": meta, "notifications": wanted}});
    let hello =
        json!({"jsonrpc": "2.0", "id": 0, "method": "server/discover", "params": {"_meta": meta}});
    ask.write_all(format!("{hello}\n{listen}\n").as_bytes()).await.unwrap();
    let said = loop {
        let said: Value =
            serde_json::from_str(&answers.next_line().await.unwrap().unwrap()).unwrap();
        if said["method"] == "notifications/subscriptions/acknowledged" {
            break said;
        }
    };
    assert_eq!(said["params"]["notifications"], kept, "{said}");
    // However many there are, they are looked at in a moment.
    let many: Vec<String> = (0..100_000).map(|n| format!("toolgate://x/note://{n}")).collect();
    let mut listening = tokio::time::timeout(
        std::time::Duration::from_secs(60),
        ListenStreamClient::open(&gate, "", json!({"resourceSubscriptions": many})),
    )
    .await
    .unwrap();
    let said = tokio::time::timeout(std::time::Duration::from_secs(60), listening.next_message())
        .await
        .unwrap();
    assert_eq!(
        said["params"]["notifications"]["resourceSubscriptions"].as_array().map(Vec::len),
        Some(1_000)
    );
    drop((ask, listening));
    gate.shut_down().await;
}

/// Changes what is watched. The same call three times in a row would be a loop.
async fn change_watched_resource(old: &mut LegacyStreamClient, turn: usize) {
    for (name, arguments) in
        [("calc", json!({"expression": format!("{turn} + 1")})), ("x_count", json!({}))]
    {
        let said =
            old.call_method("tools/call", json!({"name": name, "arguments": arguments})).await;
        assert_eq!(said["result"]["isError"], json!(false), "{said}");
    }
}

/// All that is heard until nothing was said for a while.
async fn drain_messages(listening: &mut ListenStreamClient) -> Vec<Value> {
    let mut all = Vec::new();
    while let Ok(said) =
        tokio::time::timeout(std::time::Duration::from_millis(700), listening.next_message()).await
    {
        all.push(said);
    }
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn agent_without_upstream_gets_no_more_updates() {
    let config = |of_a: &str| {
        format!(
            "[gateway]\nagent = \"a\"\n[agents.a]\nupstreams = {of_a}\n[agents.a.tools.calc]\nkind = \"builtin\"\n\
             [agents.b]\nupstreams = [\"x\"]\n[agents.b.tools.calc]\nkind = \"builtin\"\n\
             [upstreams.x]\ncommand = {}\nargs = [\"--stdio\"]\nundeclared = \"open\"\n",
            json!(fixture_path())
        )
    };
    let gate = TestGateway::open(&config("[\"x\"]")).await;
    let watched = json!("toolgate://x/test://watched-resource");
    let (mut loses, mut keeps) = (
        LegacyStreamClient::open(&gate).await,
        LegacyStreamClient::open_as_agent(&gate, Some("b")).await,
    );
    let mut listening = ListenStreamClient::open(
        &gate,
        "a",
        json!({"toolsListChanged": true, "resourceSubscriptions": [watched]}),
    )
    .await;
    assert_eq!(
        listening.next_message().await["params"]["notifications"]["resourceSubscriptions"],
        json!([watched])
    );
    for old in [&mut loses, &mut keeps] {
        assert!(
            old.call_method("resources/subscribe", json!({"uri": watched}))
                .await
                .get("result")
                .is_some()
        );
    }
    let updates = |told: &[Value]| {
        told.iter().filter(|message| message["method"] == "notifications/resources/updated").count()
    };
    let mut turn = 0;
    wait_until("both hear of it", async || {
        turn += 1;
        change_watched_resource(&mut keeps, turn).await;
        loses.call_method("ping", json!({})).await;
        updates(&loses.notifications) > 0 && updates(&keeps.notifications) > 0
    })
    .await;
    while listening.next_message().await["method"] != "notifications/resources/updated" {}
    drain_messages(&mut listening).await;
    gate.reload(&config("[]")).await.unwrap();
    // It still hears that there is something else to see. What was on its way until then may come
    // before that.
    while listening.next_message().await["method"] != "notifications/tools/list_changed" {}
    loses.call_method("ping", json!({})).await;
    let before = updates(&loses.notifications);
    for _ in 0..3 {
        let kept = updates(&keeps.notifications);
        turn += 1;
        change_watched_resource(&mut keeps, turn).await;
        while updates(&keeps.notifications) <= kept {
            let said = keeps.next_message().await;
            keeps.notifications.push(said);
        }
    }
    // What was to come has come.
    loses.call_method("ping", json!({})).await;
    assert_eq!(updates(&loses.notifications), before, "{:?}", loses.notifications);
    let more = drain_messages(&mut listening).await;
    assert!(
        more.iter().all(|message| message["method"] == "notifications/tools/list_changed"),
        "{more:?}"
    );
    drop((loses, keeps));
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn paused_agent_gets_no_resource_updates() {
    let config = format!(
        "[gateway]\nagent = \"a\"\n[agents.a]\nupstreams = [\"x\"]\n[agents.a.tools.calc]\nkind = \"builtin\"\n\
         [agents.b]\nupstreams = [\"x\"]\n[agents.b.tools.calc]\nkind = \"builtin\"\n\
         [upstreams.x]\ncommand = {}\nargs = [\"--stdio\"]\nundeclared = \"open\"\n",
        json!(fixture_path())
    );
    let gate = TestGateway::open(&config).await;
    let watched = json!({"uri": "toolgate://x/test://watched-resource"});
    let (mut paused, mut other) = (
        LegacyStreamClient::open(&gate).await,
        LegacyStreamClient::open_as_agent(&gate, Some("b")).await,
    );
    for old in [&mut paused, &mut other] {
        assert!(
            old.call_method("resources/subscribe", watched.clone()).await.get("result").is_some()
        );
    }
    let updates = |told: &[Value]| {
        told.iter().filter(|message| message["method"] == "notifications/resources/updated").count()
    };
    let mut turn = 0;
    wait_until("both hear of it", async || {
        turn += 1;
        change_watched_resource(&mut other, turn).await;
        paused.call_method("ping", json!({})).await;
        updates(&paused.notifications) > 0 && updates(&other.notifications) > 0
    })
    .await;
    gate.gateway.runtime().pause(PauseTarget::Agent("a".into()), "a token is out").await.unwrap();
    // What was on its way until then has come by now.
    while let Ok(said) =
        tokio::time::timeout(Duration::from_millis(300), paused.next_message()).await
    {
        paused.notifications.push(said);
    }
    let before = updates(&paused.notifications);
    for _ in 0..3 {
        let kept = updates(&other.notifications);
        turn += 1;
        change_watched_resource(&mut other, turn).await;
        while updates(&other.notifications) <= kept {
            let said = other.next_message().await;
            other.notifications.push(said);
        }
    }
    let refused = paused.call_method("resources/subscribe", watched).await;
    assert_eq!(refused["error"]["data"]["code"], "paused", "{refused}");
    assert_eq!(updates(&paused.notifications), before, "{:?}", paused.notifications);
    drop((paused, other));
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn subscribers_are_notified_after_upstream_restart() {
    let config = format!(
        "[tools.calc]\nkind = \"builtin\"\n[upstreams.x]\ncommand = {}\nargs = [\"--stdio\", \"--tools\", \"8\"]\nundeclared = \"open\"\n",
        json!(fixture_path())
    );
    // More at once than anybody keeps.
    let wanted: Vec<String> = (0..600).map(|n| format!("toolgate://x/test://{n}")).collect();
    let gate = TestGateway::open(&config).await;
    let mut listening =
        ListenStreamClient::open(&gate, "", json!({"resourceSubscriptions": wanted})).await;
    assert_eq!(
        listening.next_message().await["params"]["notifications"]["resourceSubscriptions"],
        json!(wanted)
    );
    kill_processes_with_number(8);
    let mut told = HashSet::new();
    while told.len() < wanted.len() {
        let said = tokio::time::timeout(Duration::from_secs(60), listening.next_message())
            .await
            .unwrap_or_else(|_| panic!("{} of 600", told.len()));
        if said["method"] == "notifications/resources/updated" {
            told.insert(said["params"]["uri"].to_string());
        }
    }
    drop(listening);
    gate.shut_down().await;
}
