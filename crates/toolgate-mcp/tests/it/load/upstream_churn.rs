//! Tests that repeated losses of upstreams leak no resources in a gateway.

use std::sync::{Arc, Mutex};

use serde_json::json;

use super::{alive_tasks, open_files, wait_until_stable};
use crate::load::effect_journal::EffectJournal;
use crate::load::session_server::{FakeUpstreamSessions, start_session_server};
use crate::support::{
    TestGateway, child_processes, fixture_path, kill_processes_with_number, processes_with_number,
    run_in_own_process, wait_until,
};

/// The number of upstreams of each kind.
///
/// The restart delay of one upstream grows with each loss. Ten upstreams that are lost once restart
/// at once.
const UPSTREAMS_PER_KIND: usize = 10;

/// The test counts open files of its process, so the process runs no other test.
#[test]
fn upstream_restarts_leak_no_resources() {
    run_in_own_process("load::upstream_churn::upstream_churn_in_own_process");
}

/// Returns the number of open files, tasks and child processes.
fn resource_counts() -> (usize, usize, usize) {
    (open_files(), alive_tasks(), child_processes().len())
}

/// Calls all upstreams until each has answered.
async fn call_all_upstreams(
    gate: &TestGateway,
    sessions: &Mutex<FakeUpstreamSessions>,
    round: usize,
) {
    let client = gate.client();
    for tool in
        (0..UPSTREAMS_PER_KIND).flat_map(|n| [format!("ill{n}_echo"), format!("old{n}_echo")])
    {
        let mut attempt = 0;
        wait_until(&format!("`{tool}` answers"), async || {
            attempt += 1;
            client
                .in_session(&format!("{tool}-{round}-{attempt}"))
                .call_code(&tool, json!({"text": "x"}))
                .await
                == "ok"
        })
        .await;
    }
    let counts = || (processes_with_number(10).len(), sessions.lock().unwrap().open.len());
    wait_until("each upstream is replaced once", async || {
        counts() == (UPSTREAMS_PER_KIND, UPSTREAMS_PER_KIND)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "started by upstream_restarts_leak_no_resources"]
async fn upstream_churn_in_own_process() {
    let home = tempfile::tempdir().unwrap();
    let (journal, sessions) =
        (EffectJournal::open(home.path()), Arc::<Mutex<FakeUpstreamSessions>>::default());
    let address = start_session_server(&sessions, &journal).await;
    let upstreams = |n: usize| {
        format!(
            "[upstreams.ill{n}]\ncommand = {}\nargs = [\"--stdio\", \"--tools\", \"10\"]\nundeclared = \"read\"\n\
             [upstreams.old{n}]\nurl = \"http://{address}/mcp\"\nundeclared = \"read\"\n",
            json!(fixture_path())
        )
    };
    let gate = TestGateway::open(&(0..UPSTREAMS_PER_KIND).map(upstreams).collect::<String>()).await;
    call_all_upstreams(&gate, &sessions, 0).await;
    let mut before = (0, 0, 0);
    for round in 1..=3 {
        assert_eq!(kill_processes_with_number(10), UPSTREAMS_PER_KIND);
        sessions.lock().unwrap().open.clear();
        call_all_upstreams(&gate, &sessions, round).await;
        // The first loss opens the files that stay open.
        if round == 1 {
            before = wait_until_stable(resource_counts).await;
        }
    }
    // A leak per lost process or session would be at least twenty.
    wait_until("the resource counts are stable", async || {
        let now = resource_counts();
        now.0 <= before.0 + 4 && now.1 <= before.1 + 4 && now.2 == before.2
    })
    .await;
    gate.shut_down().await;
    wait_until("all processes and sessions have ended", async || {
        child_processes().is_empty() && sessions.lock().unwrap().open.is_empty()
    })
    .await;
}
