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
    let (mut subscriber, mut other) =
        (LegacyStreamClient::open(&gate).await, LegacyStreamClient::open(&gate).await);
    assert!(
        subscriber
            .call_method("resources/subscribe", json!({"uri": watched}))
            .await
            .get("result")
            .is_some()
    );
    other
        .call_method("resources/subscribe", json!({"uri": "toolgate://a/test://static-text"}))
        .await;
    let updated = |messages: &[Value]| -> Vec<Value> {
        let updates = messages
            .iter()
            .filter(|message| message["method"] == "notifications/resources/updated");
        updates.map(|message| message["params"]["uri"].clone()).collect()
    };
    let mut changes = 0;
    // The upstream may not have received the subscription yet. Then the resource is changed again.
    while updated(&subscriber.notifications).is_empty() && changes < 20 {
        for tool in ["a_count", "b_count"] {
            let counted =
                subscriber.call_method("tools/call", json!({"name": tool, "arguments": {}})).await;
            assert_eq!(counted["result"]["isError"], json!(false), "{counted}");
        }
        changes += 1;
        while updated(&subscriber.notifications).is_empty() {
            let Ok(message) =
                tokio::time::timeout(Duration::from_secs(5), subscriber.next_message()).await
            else {
                break;
            };
            subscriber.notifications.push(message);
        }
    }
    // All earlier notifications arrive before this answer.
    subscriber.call_method("ping", json!({})).await;
    let uris = updated(&subscriber.notifications);
    assert!(
        (1..=changes).contains(&uris.len()) && uris.iter().all(|uri| *uri == watched),
        "{uris:?} after {changes} changes"
    );
    other.call_method("ping", json!({})).await;
    assert_eq!(updated(&other.notifications), Vec::<Value>::new());
    drop((subscriber, other));
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn upstream_is_unsubscribed_after_last_client() {
    let requests: Arc<Mutex<Vec<Value>>> = Arc::default();
    let x = start_resource_server("x", Arc::default(), Arc::clone(&requests)).await;
    let gate = TestGateway::open(&upstream_config("x", &x, "")).await;
    let count = |method: &str| {
        requests.lock().unwrap().iter().filter(|request| request["method"] == method).count()
    };
    let uri = json!({"uri": "toolgate://x/note://a"});
    let (mut first, mut second) =
        (LegacyStreamClient::open(&gate).await, LegacyStreamClient::open(&gate).await);
    first.call_method("resources/subscribe", uri.clone()).await;
    second.call_method("resources/subscribe", uri.clone()).await;
    assert_eq!(count("resources/subscribe"), 1);
    first.call_method("resources/unsubscribe", uri.clone()).await;
    assert_eq!(count("resources/unsubscribe"), 0, "the other client is still subscribed");
    drop(second);
    wait_until("the upstream is unsubscribed", async || count("resources/unsubscribe") == 1).await;
    drop(first);
    // Clients with a `subscriptions/listen` stream count too.
    let stream = ListenStreamClient::open(
        &gate,
        "",
        json!({"resourceSubscriptions": ["toolgate://x/note://a"]}),
    )
    .await;
    wait_until("the upstream is subscribed again", async || count("resources/subscribe") == 2)
        .await;
    drop(stream);
    wait_until("the upstream is unsubscribed again", async || count("resources/unsubscribe") == 2)
        .await;
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn subscription_during_reload_is_kept() {
    let requests: Arc<Mutex<Vec<Value>>> = Arc::default();
    let x = start_resource_server("x", Arc::default(), Arc::clone(&requests)).await;
    let gate = TestGateway::open(&upstream_config("x", &x, "")).await;
    let count = |method: &str| {
        requests.lock().unwrap().iter().filter(|request| request["method"] == method).count()
    };
    let (mut client, before) = (LegacyStreamClient::open(&gate).await, count("initialize"));
    // The gateway waits for the silent upstream. Meanwhile the old and the new connection to `x`
    // exist.
    let slow = "[upstreams.slow]\ncommand = \"/bin/sleep\"\nargs = [\"997\"]\n";
    let config = upstream_config("x", &x, "timeout = \"20s\"") + slow;
    let subscribe = async {
        wait_until("the gateway opens a new connection", async || count("initialize") > before)
            .await;
        client.call_method("resources/subscribe", json!({"uri": "toolgate://x/note://a"})).await
    };
    let (reloaded, subscribed) = tokio::join!(gate.reload(&config), subscribe);
    reloaded.unwrap();
    assert!(subscribed.get("result").is_some(), "{subscribed}");
    wait_until("the new connection is subscribed", async || count("resources/subscribe") == 2)
        .await;
    drop(client);
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_supported_notifications_are_acknowledged() {
    let x = start_resource_server("x", Arc::default(), Arc::default()).await;
    let gate = TestGateway::open(&upstream_config("x", &x, "prompts = false")).await;
    let known = "toolgate://x/note://a";
    let long = format!("toolgate://x/note://{}", "a".repeat(3_000));
    let requested = json!({"toolsListChanged": true, "promptsListChanged": true, "resourcesListChanged": true,
        "resourceSubscriptions": [known, "toolgate://z/note://a", known, long, "other://"]});
    // A URI without a prefix belongs to the only upstream.
    let accepted = json!({"toolsListChanged": true, "resourcesListChanged": true, "resourceSubscriptions": [known, "other://"]});
    let mut stream = ListenStreamClient::open(&gate, "", requested.clone()).await;
    let message = stream.next_message().await;
    assert_eq!(
        (&message["method"], &message["params"]["notifications"]),
        (&json!("notifications/subscriptions/acknowledged"), &accepted),
        "{message}"
    );
    // The same on streams.
    let (_, mut writer, mut answers) = gate.connect_streams(None);
    let meta = json!({"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {},
        "io.modelcontextprotocol/clientInfo": {"name": "t", "version": "1"}});
    let listen = json!({"jsonrpc": "2.0", "id": 1, "method": "subscriptions/listen", "params": {"_meta": meta, "notifications": requested}});
    let discover =
        json!({"jsonrpc": "2.0", "id": 0, "method": "server/discover", "params": {"_meta": meta}});
    writer.write_all(format!("{discover}\n{listen}\n").as_bytes()).await.unwrap();
    let message = loop {
        let message: Value =
            serde_json::from_str(&answers.next_line().await.unwrap().unwrap()).unwrap();
        if message["method"] == "notifications/subscriptions/acknowledged" {
            break message;
        }
    };
    assert_eq!(message["params"]["notifications"], accepted, "{message}");
    // Even 100 000 subscriptions are checked quickly.
    let uris: Vec<String> = (0..100_000).map(|n| format!("toolgate://x/note://{n}")).collect();
    let mut stream = tokio::time::timeout(
        std::time::Duration::from_secs(60),
        ListenStreamClient::open(&gate, "", json!({"resourceSubscriptions": uris})),
    )
    .await
    .unwrap();
    let message = tokio::time::timeout(std::time::Duration::from_secs(60), stream.next_message())
        .await
        .unwrap();
    assert_eq!(
        message["params"]["notifications"]["resourceSubscriptions"].as_array().map(Vec::len),
        Some(1_000)
    );
    drop((writer, stream));
    gate.shut_down().await;
}

/// Changes the watched resource.
///
/// The calls of `calc` prevent the refusal of repeated calls as a loop.
async fn change_watched_resource(client: &mut LegacyStreamClient, turn: usize) {
    for (name, arguments) in
        [("calc", json!({"expression": format!("{turn} + 1")})), ("x_count", json!({}))]
    {
        let answer =
            client.call_method("tools/call", json!({"name": name, "arguments": arguments})).await;
        assert_eq!(answer["result"]["isError"], json!(false), "{answer}");
    }
}

/// Returns all messages until none arrives for 700 ms.
async fn drain_messages(stream: &mut ListenStreamClient) -> Vec<Value> {
    let mut messages = Vec::new();
    while let Ok(message) =
        tokio::time::timeout(std::time::Duration::from_millis(700), stream.next_message()).await
    {
        messages.push(message);
    }
    messages
}

#[tokio::test(flavor = "multi_thread")]
async fn agent_without_upstream_gets_no_more_updates() {
    let config = |upstreams_of_a: &str| {
        format!(
            "[gateway]\nagent = \"a\"\n[agents.a]\nupstreams = {upstreams_of_a}\n[agents.a.tools.calc]\nkind = \"builtin\"\n\
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
    let mut stream = ListenStreamClient::open(
        &gate,
        "a",
        json!({"toolsListChanged": true, "resourceSubscriptions": [watched]}),
    )
    .await;
    assert_eq!(
        stream.next_message().await["params"]["notifications"]["resourceSubscriptions"],
        json!([watched])
    );
    for client in [&mut loses, &mut keeps] {
        assert!(
            client
                .call_method("resources/subscribe", json!({"uri": watched}))
                .await
                .get("result")
                .is_some()
        );
    }
    let updates = |messages: &[Value]| {
        messages
            .iter()
            .filter(|message| message["method"] == "notifications/resources/updated")
            .count()
    };
    let mut turn = 0;
    wait_until("both clients are notified", async || {
        turn += 1;
        change_watched_resource(&mut keeps, turn).await;
        loses.call_method("ping", json!({})).await;
        updates(&loses.notifications) > 0 && updates(&keeps.notifications) > 0
    })
    .await;
    while stream.next_message().await["method"] != "notifications/resources/updated" {}
    drain_messages(&mut stream).await;
    gate.reload(&config("[]")).await.unwrap();
    // The client still receives list changes. Updates that were sent before the reload may arrive
    // first.
    while stream.next_message().await["method"] != "notifications/tools/list_changed" {}
    loses.call_method("ping", json!({})).await;
    let before = updates(&loses.notifications);
    for _ in 0..3 {
        let known = updates(&keeps.notifications);
        turn += 1;
        change_watched_resource(&mut keeps, turn).await;
        while updates(&keeps.notifications) <= known {
            let message = keeps.next_message().await;
            keeps.notifications.push(message);
        }
    }
    // All earlier notifications have arrived.
    loses.call_method("ping", json!({})).await;
    assert_eq!(updates(&loses.notifications), before, "{:?}", loses.notifications);
    let messages = drain_messages(&mut stream).await;
    assert!(
        messages.iter().all(|message| message["method"] == "notifications/tools/list_changed"),
        "{messages:?}"
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
    for client in [&mut paused, &mut other] {
        assert!(
            client
                .call_method("resources/subscribe", watched.clone())
                .await
                .get("result")
                .is_some()
        );
    }
    let updates = |messages: &[Value]| {
        messages
            .iter()
            .filter(|message| message["method"] == "notifications/resources/updated")
            .count()
    };
    let mut turn = 0;
    wait_until("both clients are notified", async || {
        turn += 1;
        change_watched_resource(&mut other, turn).await;
        paused.call_method("ping", json!({})).await;
        updates(&paused.notifications) > 0 && updates(&other.notifications) > 0
    })
    .await;
    gate.gateway.runtime().pause(PauseTarget::Agent("a".into()), "a token is out").await.unwrap();
    // All notifications from before the pause have arrived by now.
    while let Ok(message) =
        tokio::time::timeout(Duration::from_millis(300), paused.next_message()).await
    {
        paused.notifications.push(message);
    }
    let before = updates(&paused.notifications);
    for _ in 0..3 {
        let known = updates(&other.notifications);
        turn += 1;
        change_watched_resource(&mut other, turn).await;
        while updates(&other.notifications) <= known {
            let message = other.next_message().await;
            other.notifications.push(message);
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
    // More than the queue of a client holds.
    let uris: Vec<String> = (0..600).map(|n| format!("toolgate://x/test://{n}")).collect();
    let gate = TestGateway::open(&config).await;
    let mut stream =
        ListenStreamClient::open(&gate, "", json!({"resourceSubscriptions": uris})).await;
    assert_eq!(
        stream.next_message().await["params"]["notifications"]["resourceSubscriptions"],
        json!(uris)
    );
    kill_processes_with_number(8);
    let mut updated = HashSet::new();
    while updated.len() < uris.len() {
        let message = tokio::time::timeout(Duration::from_secs(60), stream.next_message())
            .await
            .unwrap_or_else(|_| panic!("{} of 600 updates", updated.len()));
        if message["method"] == "notifications/resources/updated" {
            updated.insert(message["params"]["uri"].to_string());
        }
    }
    drop(stream);
    gate.shut_down().await;
}
