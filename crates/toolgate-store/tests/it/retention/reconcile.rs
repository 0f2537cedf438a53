//! Tests that a pending call is settled by its reconcile tool.

use std::sync::Arc;

use serde_json::{Value, json};
use toolgate::{Decision, Failure, ReconcileOutcome, ReconcileSpec, Tool, Toolgate};
use toolgate_store::{RowFilter, SqliteStore};

use crate::ledger_fixture::{LedgerFixture, runtime};

/// Opens a gate whose payments have unknown outcomes.
fn gate_with_unknown_outcomes(fixture: &LedgerFixture) -> Toolgate {
    let world = fixture.world_path();
    let schema = json!({"type": "object", "properties": {"name": {"type": "string"}, "arrives": {"type": "boolean"}}});
    let find_world = world.clone();
    let pay = Tool::dynamic("pay", "Pays.", schema, move |_, args: Value| {
        let world = world.clone();
        async move {
            if args["arrives"] == true {
                crate::ledger_fixture::append_line(&world, args["name"].as_str().unwrap());
            }
            Err(Failure::transient("upstream_timeout", "no answer"))
        }
    })
    .open()
    .reconcile(
        ReconcileSpec::new("find")
            .argument("name", "/name")
            .happened_if("/found", true)
            .never_if("/found", false),
    );
    let find =
        Tool::dynamic("find", "Finds.", json!({"type": "object", "properties": {"name": {"type": "string"}}}), move |_, args: Value| {
            let world = find_world.clone();
            async move {
                if args["name"] == "hidden" {
                    Ok(json!({"found": "perhaps"}))
                } else {
                    Ok(json!({"found": crate::ledger_fixture::read_lines(&world).iter().any(|line| *line == args["name"])}))
                }
            }
        })
        .effect(toolgate::Effect::Read);
    let agent = toolgate::Agent::builder("desk").tool(pay).tool(find).build().unwrap();
    Toolgate::builder()
        .agent(agent)
        .store(Arc::new(SqliteStore::open(fixture.ledger_path()).unwrap()))
        .build()
        .unwrap()
}

#[test]
fn pending_call_is_settled_by_reconcile_tool() {
    let fixture = LedgerFixture::new();
    runtime().block_on(async {
        let gate = gate_with_unknown_outcomes(&fixture);
        let session = gate.session("desk", "alice", "s");
        let pay = async |name: &str, arrives: bool| {
            gate.call(
                session
                    .prepare("pay", json!({"name": name, "arrives": arrives}))
                    .idempotency_key(name),
            )
            .await
        };
        for (name, arrives) in [("a", true), ("b", false), ("hidden", true)] {
            assert_eq!(
                pay(name, arrives).await.outcome.error().unwrap().effects,
                toolgate::CallEffects::Unknown
            );
            assert_eq!(
                pay(name, arrives).await.outcome.error().unwrap().code,
                "pending_reconciliation"
            );
        }
        let outcomes: Vec<ReconcileOutcome> =
            gate.reconcile().await.unwrap().into_iter().map(|(_, outcome)| outcome).collect();
        assert_eq!(outcomes[..2], [ReconcileOutcome::Happened, ReconcileOutcome::Never]);
        assert!(
            matches!(&outcomes[2], ReconcileOutcome::Unknown(reason) if reason.contains("inconclusive")),
            "{outcomes:?}"
        );
        assert_eq!(gate.pending_calls().await.unwrap().len(), 1);
        let again = pay("a", true).await;
        assert!(again.outcome.success().is_some_and(|output| output.replayed), "{again:?}");
        let again = pay("b", false).await;
        assert_eq!(
            again.outcome.error().unwrap().code,
            "upstream_timeout",
            "a call without effect can run again"
        );
        assert_eq!(crate::ledger_fixture::read_lines(&fixture.world_path()), ["a", "hidden"]);
    });
    let settled = fixture
        .ledger()
        .find(&RowFilter { decision: Some(Decision::Settled), ..RowFilter::default() })
        .unwrap();
    let by: Vec<&str> = settled
        .iter()
        .map(|entry| entry.row.settles.as_ref().unwrap().by.split(' ').next().unwrap())
        .collect();
    assert_eq!(by, ["`find`", "`find`"], "the rows name the settler");
    fixture.verify();
}

#[test]
fn invalid_reconcile_settings_do_not_load() {
    let tool = |reconcile| {
        Tool::dynamic(
            "pay",
            "Pays.",
            json!({"type": "object", "properties": {"card": {"type": "string", "writeOnly": true}}}),
            |_, _| async { Ok(Value::Null) },
        )
        .open()
        .reconcile(reconcile)
    };
    let build = |reconcile| {
        toolgate::Agent::builder("desk").tool(tool(reconcile)).build().unwrap_err().to_string()
    };
    let error = build(ReconcileSpec::new("fnd").argument("card", "/card"));
    for part in [
        "not a tool of this agent",
        "no result means that the call took effect",
        "`/card` is secret",
    ] {
        assert!(error.contains(part), "{error}");
    }
    assert!(
        build(ReconcileSpec::new("pay").happened_if("/a", 1)).contains("it does not only read")
    );
}
