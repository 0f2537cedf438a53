//! One gateway that lives on while its upstreams are lost again and again: nothing piles up in it.

use std::sync::{Arc, Mutex};

use serde_json::json;

use super::{
    EffectJournal, FakeUpstreamSessions, alive_tasks, open_files, start_session_server,
    wait_until_stable,
};
use crate::support::{
    TestGateway, child_processes, fixture_path, kill_processes_with_number, processes_with_number,
    run_in_own_process, wait_until,
};

/// So many of each kind. One that is lost often is waited for ever longer; ten that are lost are
/// back at once.
const UPSTREAMS_PER_KIND: usize = 10;

/// In a process of its own, where nobody else opens files.
#[test]
fn upstream_restarts_leak_no_resources() {
    run_in_own_process("load::upstream_churn::upstream_churn_in_own_process");
}

/// Files that are open, tasks, and processes.
fn resource_counts() -> (usize, usize, usize) {
    (open_files(), alive_tasks(), child_processes().len())
}

/// Calls all of them, until each has answered.
async fn call_all_upstreams(
    gate: &TestGateway,
    sessions: &Mutex<FakeUpstreamSessions>,
    round: usize,
) {
    let client = gate.client();
    for tool in
        (0..UPSTREAMS_PER_KIND).flat_map(|n| [format!("ill{n}_echo"), format!("old{n}_echo")])
    {
        let mut turn = 0;
        wait_until(&tool, async || {
            turn += 1;
            client
                .in_session(&format!("{tool}-{round}-{turn}"))
                .call_code(&tool, json!({"text": "x"}))
                .await
                == "ok"
        })
        .await;
    }
    let there = || (processes_with_number(10).len(), sessions.lock().unwrap().open.len());
    wait_until("each was replaced, once", async || {
        there() == (UPSTREAMS_PER_KIND, UPSTREAMS_PER_KIND)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "started by upstream_restarts_leak_no_resources"]
async fn upstream_churn_in_own_process() {
    let home = tempfile::tempdir().unwrap();
    let (books, sessions) =
        (EffectJournal::open(home.path()), Arc::<Mutex<FakeUpstreamSessions>>::default());
    let address = start_session_server(&sessions, &books).await;
    let both = |n: usize| {
        format!(
            "[upstreams.ill{n}]\ncommand = {}\nargs = [\"--stdio\", \"--tools\", \"10\"]\nundeclared = \"read\"\n\
             [upstreams.old{n}]\nurl = \"http://{address}/mcp\"\nundeclared = \"read\"\n",
            json!(fixture_path())
        )
    };
    let gate = TestGateway::open(&(0..UPSTREAMS_PER_KIND).map(both).collect::<String>()).await;
    call_all_upstreams(&gate, &sessions, 0).await;
    let mut before = (0, 0, 0);
    for round in 1..=3 {
        assert_eq!(kill_processes_with_number(10), UPSTREAMS_PER_KIND);
        sessions.lock().unwrap().open.clear();
        call_all_upstreams(&gate, &sessions, round).await;
        // What is opened once for all, or with the first loss, is open after that.
        if round == 1 {
            before = wait_until_stable(resource_counts).await;
        }
    }
    // Twenty processes and twenty sessions later: one for each would be twenty.
    wait_until("nothing has piled up", async || {
        let now = resource_counts();
        now.0 <= before.0 + 4 && now.1 <= before.1 + 4 && now.2 == before.2
    })
    .await;
    gate.shut_down().await;
    wait_until("all of it is gone", async || {
        child_processes().is_empty() && sessions.lock().unwrap().open.is_empty()
    })
    .await;
}
