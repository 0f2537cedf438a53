//! What is recorded, whatever happens to the caller or the store.

use std::time::Duration;

use serde_json::json;
use toolgate::Effects;

use crate::support::{Fails, World};

#[tokio::test]
async fn a_caller_who_hangs_up_cancels_the_tool_and_not_the_row() {
    let world = World::new(|agent| agent);
    let quiet = world.fingerprint().await;
    let call = world.session.call("act", json!({"how": "hang"}));
    assert!(tokio::time::timeout(Duration::from_millis(30), call).await.is_err());
    tokio::time::sleep(Duration::from_millis(30)).await;
    let (rows, _) = world.rows().await;
    assert_eq!(rows.len(), 1);
    assert_eq!(rows[0].outcome.error().map(|e| (&*e.code, e.effects)), Some(("cancelled", Effects::Unknown)));
    assert_eq!(world.fingerprint().await, quiet);
    assert_eq!((world.metered().await, world.gate.pending().await.unwrap().len()), (1.into(), 1), "nobody knows what it did");
}

#[tokio::test]
async fn a_spooled_row_is_taken_in_when_the_store_is_back() {
    let world = World::new(|agent| agent);
    world.store.fail(&[Fails::Finish]);
    let lost = world.session.call("act", json!({"how": "ok"})).await;
    assert_eq!(world.rows().await.1, 1);
    world.store.fail(&[]);
    // The next call that is recorded brings it along.
    world.session.call("look", json!({})).await;
    let (rows, spooled) = world.rows().await;
    assert_eq!((rows.len(), spooled), (2, 0));
    assert_eq!(rows.iter().filter(|row| row.call == lost.call).count(), 1);
    assert_eq!((world.metered().await, world.gate.pending().await.unwrap().len()), (1.into(), 0), "it happened, and its claim has ended");
    assert_eq!(world.gate.recover().await, Ok(0));
}

#[tokio::test]
async fn a_signal_passes_through_untouched_and_changes_nothing() {
    let world = World::new(|agent| agent);
    let quiet = world.fingerprint().await;
    let answer = world.session.call("act", json!({"how": "expand"})).await;
    assert_eq!(answer.outcome.to_json(), json!({"isError": false, "signal": "expand_section", "section": "refunds", "reason": "needed"}));
    assert_eq!(world.fingerprint().await, quiet);
    assert_eq!(world.rows().await.0.len(), 1);
}

#[tokio::test]
async fn a_log_slice_survives_what_a_state_slice_does_not() {
    let world = World::new(|agent| agent);
    world.session.call("act", json!({"how": "fail"})).await;
    world.session.call("act", json!({"how": "ok"})).await;
    let state = world.session.state().await.unwrap();
    assert_eq!(state.log("attempts").count(), 2);
    assert_eq!(state.slice("touched"), Some(&json!({"how": "ok"})));
    assert_eq!(world.files.get("kept.txt").as_deref(), Some("changed".as_bytes()));
}

#[tokio::test]
async fn a_spool_with_a_torn_line_gives_back_the_rest() {
    let world = World::new(|agent| agent);
    world.store.fail(&[Fails::Finish]);
    world.session.call("look", json!({"at": "1"})).await;
    let path = world.spool.path().join("rows.jsonl");
    let mut torn = std::fs::read(&path).unwrap();
    torn.extend_from_slice(b"\n{\"call\": \"cut \xc3");
    std::fs::write(&path, torn).unwrap();
    world.session.call("look", json!({"at": "2"})).await;
    world.store.fail(&[]);
    for _ in 0..3 {
        world.session.call("look", json!({})).await;
    }
    assert_eq!(world.session.rows().await.unwrap().iter().filter(|row| row.arguments["at"].is_string()).count(), 2);
    let left: Vec<_> = std::fs::read_dir(world.spool.path()).unwrap().map(|e| e.unwrap().path()).collect();
    assert_eq!(left.len(), 1, "one copy for a person to look at: {left:?}");
    assert!(left[0].to_string_lossy().ends_with(".spoilt"));
}
