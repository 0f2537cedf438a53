//! Tests that results of 100 MB are dropped, and that their calls are not repeated.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::json;

use super::{health, read_until_ok, scripted_upstream_config};
use crate::load::effect_journal::EffectJournal;
use crate::support::{TestGateway, child_processes, fixture_path, run_in_own_process, wait_until};
use crate::upstream_faults::well_and_ill_config;

/// More than the largest result, and less than one of the dropped results, in KiB.
const MAX_EXTRA_MEMORY_KIB: usize = 80 << 10;

/// The test measures the memory of its process, so the process runs no other test.
#[test]
fn oversized_result_is_dropped_and_not_requested_again() {
    run_in_own_process("load::huge_results::huge_results_in_own_process");
}

/// Returns the resident memory of this process, in KiB.
fn resident_memory_kib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let now = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    now.trim().trim_end_matches(" kB").parse().unwrap()
}

/// Returns how much more memory an operation needs at its peak, in KiB.
async fn peak_extra_memory_kib(operation: impl Future<Output = ()>) -> usize {
    let (before, is_done, peak) =
        (resident_memory_kib(), Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
    let sampler = std::thread::spawn({
        let (is_done, peak) = (Arc::clone(&is_done), Arc::clone(&peak));
        move || {
            while !is_done.load(Ordering::Relaxed) {
                peak.fetch_max(resident_memory_kib(), Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    });
    operation.await;
    is_done.store(true, Ordering::Relaxed);
    sampler.join().unwrap();
    peak.load(Ordering::Relaxed).saturating_sub(before)
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "started by oversized_result_is_dropped_and_not_requested_again"]
async fn huge_results_in_own_process() {
    let home = tempfile::tempdir().unwrap();
    let journal = EffectJournal::open(home.path());
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
    // These calls allocate the memory that every call needs once.
    read_until_ok(&client, "before").await;
    assert_eq!(read("before", 300_000).await, "ok");
    let write_kib = peak_extra_memory_kib(async {
        // The effect happened, and its result is lost. A repeated call reports that.
        assert!(!journal.call_until_effect(&client, "big", "big").await);
        read_until_ok(&client, "after").await;
    })
    .await;
    let read_kib = peak_extra_memory_kib(async {
        assert_eq!(read("big", 100_000_000).await, "timeout");
        let mut attempt = 0;
        wait_until("the upstream answers again", async || {
            attempt += 1;
            read(&format!("after-{attempt}"), 300).await == "ok"
        })
        .await;
    })
    .await;
    assert!(
        write_kib < MAX_EXTRA_MEMORY_KIB && read_kib < MAX_EXTRA_MEMORY_KIB,
        "write: {write_kib} KiB more, read: {read_kib} KiB more"
    );
    assert_eq!(journal.check_effects(), (0, 1));
    assert_eq!(std::fs::read_to_string(home.path().join("effects")).unwrap(), "big\n");
    assert_eq!(health(&gate).starts, 1, "the upstream was restarted");
    gate.shut_down().await;
    wait_until("all child processes have exited", async || child_processes().is_empty()).await;
}
