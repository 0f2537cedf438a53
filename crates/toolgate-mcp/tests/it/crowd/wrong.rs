//! Gateways whose upstreams say garbage, half of it, too much of it or nothing at all: nothing is left of them.

use std::path::Path;

use futures_util::future::{join, join_all};
use serde_json::json;

use super::{files, ill, mark, settled, tasks};
use crate::faults::{config, script};
use crate::old::{answer, with_tool};
use crate::support::{Client, Gate, alone, children, fixture, until};

/// What the tests of others take for endless, and more than any answer may have.
const BIG: u64 = 100_000_000;
const OVER: usize = 17 << 20;

/// In a process of its own, where nobody else opens files.
#[test]
fn nothing_is_left_of_upstreams_that_go_wrong() {
    alone("crowd::wrong::counted");
}

/// One that answers well, one that does as it is told, one that says too much in either way, and three that never come to say hello.
async fn all_of_them(home: &Path) -> String {
    let flood = with_tool("talk", |_| answer("200 OK", "application/json", &"x".repeat(OVER))).await;
    let mut text = config(&ill(home, 84, "timeout = \"3s\""));
    text += &format!(
        "[upstreams.big]\ncommand = {}\nargs = [\"--stdio\", \"--tools\", \"85\"]\n\
         [tools.big_big]\nkind = \"mcp\"\nupstream = \"big\"\neffect = \"read\"\ntimeout = \"2s\"\n\
         [upstreams.flood]\nurl = \"http://{flood}/mcp\"\nundeclared = \"read\"\n",
        json!(fixture())
    );
    for (name, says) in
        [("mute", "sleep 1000"), ("cut", "printf '{\"jsonrpc\":\"2.0\",\"id\":0,\"resu'; sleep 1000"), ("gone", "echo garbage; exit 7")]
    {
        let command = script(home, name, says);
        text += &format!(
            "[upstreams.{name}]\ncommand = {command}\n[tools.{name}_talk]\nkind = \"mcp\"\nupstream = \"{name}\"\neffect = \"read\"\n"
        );
    }
    text
}

/// Calls all of them, and hears of each what it came to.
async fn go_wrong(client: &Client, round: usize) {
    let done = mark(client, &format!("garbage-{round}"), "garbage", 0).await;
    assert!(done["toolgate/error"].is_null(), "{done}");
    let unsaid = ["half", "glued", "hang"].map(|how| async move {
        let said = mark(client, &format!("{how}-{round}"), how, 0).await;
        assert!(said["toolgate/error"]["code"].is_string(), "{how}: {said}");
    });
    let read = [
        ("big_big", json!({"bytes": BIG}), "timeout"),
        ("flood_talk", json!({}), "invalid_result"),
        ("mute_talk", json!({}), "upstream_unavailable"),
        ("cut_talk", json!({}), "upstream_unavailable"),
        ("gone_talk", json!({}), "upstream_unavailable"),
        ("well_echo", json!({"text": "x"}), "ok"),
    ];
    let read = read.map(|(tool, arguments, code)| async move {
        let said = client.in_session(&format!("{tool}-{round}")).code(tool, arguments).await;
        assert_eq!(said, code, "{tool}");
    });
    join(join_all(unsaid), join_all(read)).await;
    // What was too long was read to its end.
    let mut turn = 0;
    until("it is heard again", async || {
        turn += 1;
        client.in_session(&format!("small-{round}-{turn}")).code("big_big", json!({"bytes": 300})).await == "ok"
    })
    .await;
}

/// Files that are open, and tasks.
fn counts() -> (usize, usize) {
    (files(), tasks())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "started by nothing_is_left_of_upstreams_that_go_wrong"]
async fn counted() {
    let home = tempfile::tempdir().unwrap();
    let text = all_of_them(home.path()).await;
    let mut before = (0, 0);
    for round in 1..=4 {
        // It does not wait for those that say nothing.
        let gate = Gate::hasty(&text).await;
        let client = gate.client();
        until("the others are there", async || {
            let tools = client.tools().await;
            ["ill_echo", "flood_talk", "well_echo"].iter().all(|name| tools.contains(&(*name).to_owned()))
        })
        .await;
        go_wrong(&client, round).await;
        drop(client);
        gate.end().await;
        until("all of it is gone", async || children().is_empty()).await;
        // What is opened once for all is open after the first time.
        if round == 1 {
            before = settled(counts).await;
        }
    }
    // One a gateway would be three.
    until("its files are closed and its tasks are over", async || {
        let now = counts();
        now.0 <= before.0 + 2 && now.1 <= before.1 + 2
    })
    .await;
}
