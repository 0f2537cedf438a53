//! Tests that upstreams with invalid, partial, oversized or missing output leak no resources.

use std::path::Path;

use futures_util::future::{join, join_all};
use serde_json::json;

use super::{alive_tasks, open_files, scripted_upstream_config, wait_until_stable};
use crate::legacy_upstreams::{http_response, start_tool_server};
use crate::load::effect_journal::call_mark;
use crate::support::{
    McpTestClient, TestGateway, child_processes, fixture_path, run_in_own_process, wait_until,
};
use crate::upstream_faults::{well_and_ill_config, write_script};

/// A result that other tests treat as endless, and a result above the size limit.
const HUGE_RESULT_BYTES: u64 = 100_000_000;
const OVERSIZED_RESULT_BYTES: usize = 17 << 20;

/// The test counts open files of its process, so the process runs no other test.
#[test]
fn faulty_upstreams_leak_no_resources() {
    run_in_own_process("load::garbage_upstreams::faulty_upstreams_in_own_process");
}

/// Builds a configuration with a working upstream, a scripted one, two with oversized output, and
/// three that fail the handshake.
async fn faulty_upstreams_config(home: &Path) -> String {
    let flood = start_tool_server("talk", |_| {
        http_response("200 OK", "application/json", &"x".repeat(OVERSIZED_RESULT_BYTES))
    })
    .await;
    let mut text = well_and_ill_config(&scripted_upstream_config(home, 84, "timeout = \"3s\""));
    text += &format!(
        "[upstreams.big]\ncommand = {}\nargs = [\"--stdio\", \"--tools\", \"85\"]\n\
         [tools.big_big]\nkind = \"mcp\"\nupstream = \"big\"\neffect = \"read\"\ntimeout = \"2s\"\n\
         [upstreams.flood]\nurl = \"http://{flood}/mcp\"\nundeclared = \"read\"\n",
        json!(fixture_path())
    );
    for (name, script) in [
        ("mute", "sleep 1000"),
        ("cut", "printf '{\"jsonrpc\":\"2.0\",\"id\":0,\"resu'; sleep 1000"),
        ("gone", "echo garbage; exit 7"),
    ] {
        let command = write_script(home, name, script);
        text += &format!(
            "[upstreams.{name}]\ncommand = {command}\n[tools.{name}_talk]\nkind = \"mcp\"\nupstream = \"{name}\"\neffect = \"read\"\n"
        );
    }
    text
}

/// Calls all upstreams, and checks the outcomes.
async fn call_faulty_upstreams(client: &McpTestClient, round: usize) {
    let answered = call_mark(client, &format!("garbage-{round}"), "garbage", 0).await;
    assert!(answered["toolgate/error"].is_null(), "{answered}");
    let unanswered = ["half", "glued", "hang"].map(|how| async move {
        let outcome = call_mark(client, &format!("{how}-{round}"), how, 0).await;
        assert!(outcome["toolgate/error"]["code"].is_string(), "{how}: {outcome}");
    });
    let read = [
        ("big_big", json!({"bytes": HUGE_RESULT_BYTES}), "timeout"),
        ("flood_talk", json!({}), "invalid_result"),
        ("mute_talk", json!({}), "upstream_unavailable"),
        ("cut_talk", json!({}), "upstream_unavailable"),
        ("gone_talk", json!({}), "upstream_unavailable"),
        ("well_echo", json!({"text": "x"}), "ok"),
    ];
    let read = read.map(|(tool, arguments, code)| async move {
        let outcome =
            client.in_session(&format!("{tool}-{round}")).call_code(tool, arguments).await;
        assert_eq!(outcome, code, "{tool}");
    });
    join(join_all(unanswered), join_all(read)).await;
    // The gateway reads the oversized result to its end.
    let mut attempt = 0;
    wait_until("the upstream answers again", async || {
        attempt += 1;
        client
            .in_session(&format!("small-{round}-{attempt}"))
            .call_code("big_big", json!({"bytes": 300}))
            .await
            == "ok"
    })
    .await;
}

/// Returns the number of open files and tasks.
fn resource_counts() -> (usize, usize) {
    (open_files(), alive_tasks())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "started by faulty_upstreams_leak_no_resources"]
async fn faulty_upstreams_in_own_process() {
    let home = tempfile::tempdir().unwrap();
    let text = faulty_upstreams_config(home.path()).await;
    let mut before = (0, 0);
    for round in 1..=4 {
        // The short timeout avoids the wait for silent upstreams.
        let gate = TestGateway::open_with_short_timeout(&text).await;
        let client = gate.client();
        wait_until("the other upstreams are up", async || {
            let tools = client.tool_names().await;
            ["ill_echo", "flood_talk", "well_echo"]
                .iter()
                .all(|name| tools.contains(&(*name).to_owned()))
        })
        .await;
        call_faulty_upstreams(&client, round).await;
        drop(client);
        gate.shut_down().await;
        wait_until("all child processes have exited", async || child_processes().is_empty()).await;
        // The first round opens the files that stay open.
        if round == 1 {
            before = wait_until_stable(resource_counts).await;
        }
    }
    // A leak per gateway would be at least three.
    wait_until("the files are closed and the tasks have ended", async || {
        let now = resource_counts();
        now.0 <= before.0 + 2 && now.1 <= before.1 + 2
    })
    .await;
}
