//! Answers of 100 MB over standard streams: nobody keeps them, and what they are the answer to is
//! not done again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::json;

use super::{EffectJournal, health, read_until_ok, scripted_upstream_config};
use crate::support::{TestGateway, child_processes, fixture_path, run_in_own_process, wait_until};
use crate::upstream_faults::well_and_ill_config;

/// More than one answer may have and less than one of these, in KiB.
const MAX_EXTRA_MEMORY_KIB: usize = 80 << 10;

/// In a process of its own, where nobody else needs memory.
#[test]
fn oversized_result_is_dropped_and_not_requested_again() {
    run_in_own_process("load::huge_results::huge_results_in_own_process");
}

/// The memory of this process, in KiB.
fn resident_memory_kib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let now = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    now.trim().trim_end_matches(" kB").parse().unwrap()
}

/// How much more memory is needed in the middle of something than before it, in KiB.
async fn peak_extra_memory_kib(during: impl Future<Output = ()>) -> usize {
    let (before, over, most) =
        (resident_memory_kib(), Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
    let looking = std::thread::spawn({
        let (over, most) = (Arc::clone(&over), Arc::clone(&most));
        move || {
            while !over.load(Ordering::Relaxed) {
                most.fetch_max(resident_memory_kib(), Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    });
    during.await;
    over.store(true, Ordering::Relaxed);
    looking.join().unwrap();
    most.load(Ordering::Relaxed).saturating_sub(before)
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "started by oversized_result_is_dropped_and_not_requested_again"]
async fn huge_results_in_own_process() {
    let home = tempfile::tempdir().unwrap();
    let books = EffectJournal::open(home.path());
    let text = well_and_ill_config(&scripted_upstream_config(home.path(), 86, "timeout = \"2s\""))
        + &format!(
            "[upstreams.big]\ncommand = {}\nargs = [\"--stdio\", \"--tools\", \"87\"]\n\
             [tools.big_big]\nkind = \"mcp\"\nupstream = \"big\"\neffect = \"read\"\ntimeout = \"2s\"\n",
            json!(fixture_path())
        );
    let gate = TestGateway::open(&text).await;
    let client = gate.client();
    let read = async |session: &str, bytes: u64| {
        client.in_session(session).call_code("big_big", json!({"bytes": bytes})).await
    };
    // What is needed once for all is there after these.
    read_until_ok(&client, "before").await;
    assert_eq!(read("before", 300_000).await, "ok");
    let of_an_effect = peak_extra_memory_kib(async {
        // It was done, nobody heard of it, and whoever asks for it again is told so.
        assert!(!books.call_until_effect(&client, "big", "big").await);
        read_until_ok(&client, "after").await;
    })
    .await;
    let of_a_read = peak_extra_memory_kib(async {
        assert_eq!(read("big", 100_000_000).await, "timeout");
        let mut turn = 0;
        wait_until("it is heard again", async || {
            turn += 1;
            read(&format!("after-{turn}"), 300).await == "ok"
        })
        .await;
    })
    .await;
    assert!(
        of_an_effect < MAX_EXTRA_MEMORY_KIB && of_a_read < MAX_EXTRA_MEMORY_KIB,
        "{of_an_effect} and {of_a_read} KiB more"
    );
    assert_eq!(books.check_effects(), (0, 1));
    assert_eq!(std::fs::read_to_string(home.path().join("effects")).unwrap(), "big\n");
    assert_eq!(health(&gate).starts, 1, "it is not started anew for that");
    gate.shut_down().await;
    wait_until("all of it is gone", async || child_processes().is_empty()).await;
}
