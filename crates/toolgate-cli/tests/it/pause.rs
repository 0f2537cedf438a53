//! Tests `pause` and `resume` of tools.

use serde_json::json;

use crate::hook::{CONFIG, TestProject, decision};
use crate::run_toolgate;

#[test]
fn tool_is_paused_and_resumed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger.db");
    let store = path.to_str().unwrap();
    assert_eq!(run_toolgate(&["demo", "--store", store]).0, 0);
    let (code, stdout, _) = run_toolgate(&[
        "pause",
        "--tool",
        "crm_lookup",
        "--because",
        "the CRM is down",
        "--store",
        store,
    ]);
    assert_eq!(
        (code, stdout.as_str()),
        (0, &*format!("the tool `crm_lookup` is paused in {store}\n"))
    );
    // Another agent on the same ledger is paused too.
    run_toolgate(&["demo", "--store", store]);
    let (_, stdout, _) =
        run_toolgate(&["audit", "query", "--code", "paused", "--json", "--store", store]);
    assert_eq!(stdout.lines().count(), 3, "{stdout}");
    let (code, stdout, _) = run_toolgate(&["resume", "--tool", "crm_lookup", "--store", store]);
    assert_eq!(
        (code, stdout.as_str()),
        (0, &*format!("the tool `crm_lookup` is resumed in {store}\n"))
    );
    run_toolgate(&["demo", "--store", store]);
    let (_, stdout, _) =
        run_toolgate(&["audit", "query", "--code", "paused", "--json", "--store", store]);
    assert_eq!(stdout.lines().count(), 3);
    let (code, stdout, stderr) =
        run_toolgate(&["pause", "--tool", "crm_lokup", "--because", "x", "--store", store]);
    assert!(
        code == 0 && stderr.contains("the tool `crm_lokup` does not occur in this ledger"),
        "{stdout}{stderr}"
    );
    let (_, stdout, _) = run_toolgate(&["pause", "--store", store]);
    assert_eq!(stdout, "the tool `crm_lokup`: x\n");
    let (code, _, stderr) = run_toolgate(&["resume", "--tool", "crm_lookup", "--store", store]);
    assert!(code == 2 && stderr.contains("is not paused"), "{stderr}");
    let (code, _, stderr) = run_toolgate(&["pause", "--tool", "crm_lookup", "--store", store]);
    assert!(code == 2 && stderr.contains("--because"), "{stderr}");
    let (code, _, stderr) = run_toolgate(&["pause", "--because", "x", "--store", store]);
    assert!(code == 2 && stderr.contains("--agent"), "{stderr}");
    let (code, _, stderr) =
        run_toolgate(&["pause", "--session", "monday", "--because", "x", "--store", store]);
    assert!(code == 2 && stderr.contains("--principal"), "{stderr}");
}

#[test]
fn pause_accepts_client_tool_name() {
    let project = TestProject::with_config(CONFIG);
    let decide = |id: &str| {
        decision(&project.pre_tool_use(id, "Read", json!({"file_path": format!("/tmp/{id}")})))
            .0
            .to_owned()
    };
    assert_eq!(decide("t1"), "allow");
    let (code, stdout, stderr) =
        project.run(&["pause", "--tool", "Read", "--because", "x", "--store", "ledger.db"], "");
    assert_eq!(
        (code, stdout.as_str(), stderr.as_str()),
        (0, "the tool `Read` is paused as `read` in ledger.db\n", "")
    );
    assert_eq!(decide("t2"), "deny");
    let (code, stdout, stderr) =
        project.run(&["resume", "--tool", "Read", "--store", "ledger.db"], "");
    assert_eq!(
        (code, stdout.as_str()),
        (0, "the tool `read` is resumed in ledger.db\n"),
        "{stderr}"
    );
    assert_eq!(decide("t3"), "allow");
    // An ambiguous name gets a derived name.
    let (code, stdout, stderr) =
        project.run(&["pause", "--tool", "READ.ALL", "--because", "x", "--store", "ledger.db"], "");
    assert!(
        code == 0 && stdout.contains("is paused as `read_all_4c4a413de6c5e658`"),
        "{stdout}{stderr}"
    );
    assert!(
        stderr.contains("the tool `read_all_4c4a413de6c5e658` does not occur in this ledger"),
        "{stderr}"
    );
    assert_eq!(decide("t4"), "allow");
}
