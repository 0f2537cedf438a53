//! One gateway that lives on while its upstreams are lost again and again: nothing piles up in it.

use std::sync::{Arc, Mutex};

use serde_json::json;

use super::{Books, Sessions, files, settled, tasks, with_sessions};
use crate::support::{Gate, alone, children, fixture, kill, processes, until};

/// So many of each kind. One that is lost often is waited for ever longer; ten that are lost are back at once.
const MANY: usize = 10;

/// In a process of its own, where nobody else opens files.
#[test]
fn nothing_piles_up_in_a_gateway_that_lives_on() {
    alone("crowd::living::counted");
}

/// Files that are open, tasks, and processes.
fn counts() -> (usize, usize, usize) {
    (files(), tasks(), children().len())
}

/// Calls all of them, until each has answered.
async fn all_answer(gate: &Gate, sessions: &Mutex<Sessions>, round: usize) {
    let client = gate.client();
    for tool in (0..MANY).flat_map(|n| [format!("ill{n}_echo"), format!("old{n}_echo")]) {
        let mut turn = 0;
        until(&tool, async || {
            turn += 1;
            client.in_session(&format!("{tool}-{round}-{turn}")).code(&tool, json!({"text": "x"})).await == "ok"
        })
        .await;
    }
    let there = || (processes(10).len(), sessions.lock().unwrap().open.len());
    until("each was replaced, once", async || there() == (MANY, MANY)).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "started by nothing_piles_up_in_a_gateway_that_lives_on"]
async fn counted() {
    let home = tempfile::tempdir().unwrap();
    let (books, sessions) = (Books::open(home.path()), Arc::<Mutex<Sessions>>::default());
    let address = with_sessions(&sessions, &books).await;
    let both = |n: usize| {
        format!(
            "[upstreams.ill{n}]\ncommand = {}\nargs = [\"--stdio\", \"--tools\", \"10\"]\nundeclared = \"read\"\n\
             [upstreams.old{n}]\nurl = \"http://{address}/mcp\"\nundeclared = \"read\"\n",
            json!(fixture())
        )
    };
    let gate = Gate::open(&(0..MANY).map(both).collect::<String>()).await;
    all_answer(&gate, &sessions, 0).await;
    let mut before = (0, 0, 0);
    for round in 1..=3 {
        assert_eq!(kill(10), MANY);
        sessions.lock().unwrap().open.clear();
        all_answer(&gate, &sessions, round).await;
        // What is opened once for all, or with the first loss, is open after that.
        if round == 1 {
            before = settled(counts).await;
        }
    }
    // Twenty processes and twenty sessions later: one for each would be twenty.
    until("nothing has piled up", async || {
        let now = counts();
        now.0 <= before.0 + 4 && now.1 <= before.1 + 4 && now.2 == before.2
    })
    .await;
    gate.end().await;
    until("all of it is gone", async || children().is_empty() && sessions.lock().unwrap().open.is_empty()).await;
}
