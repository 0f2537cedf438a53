//! Tests reports of calls whose tool or agent was removed.

use super::*;

#[tokio::test]
async fn report_for_removed_tool_is_recorded_for_its_call() {
    type RemovedToolCase = (&'static str, Result<Value, Failure>, Value, &'static str, CallEffects);
    let failed = |effects| Err(Failure::business("exit_1", "it failed").effects(effects));
    let admitted_arguments = || json!({"id": 1});
    let cases: [RemovedToolCase; 5] = [
        ("coder", Ok(json!("done")), admitted_arguments(), "unknown_tool", CallEffects::Done),
        (
            "coder",
            failed(CallEffects::None),
            admitted_arguments(),
            "unknown_tool",
            CallEffects::None,
        ),
        (
            "coder",
            failed(CallEffects::Unknown),
            admitted_arguments(),
            "unknown_tool",
            CallEffects::Unknown,
        ),
        ("coder", Ok(json!("done")), json!({"id": 2}), "not_as_admitted", CallEffects::Done),
        ("another", Ok(json!("done")), admitted_arguments(), "unknown_tool", CallEffects::Done),
    ];
    for (agent_name, result, ran, expected, effects) in cases {
        let case = format!("{agent_name} {result:?} {ran}");
        let fixture = SharedStoreFixture::new();
        let before = fixture
            .open_process_with(|agent| agent.tool(Tool::external("wipe", "Wipes.", None).open()));
        // The reloaded configuration has other tools, or another agent.
        let look = Tool::external("look", "Looks.", None).effect(Effect::Read);
        let agent = Agent::builder(agent_name).tool(look).build().unwrap();
        let after = Toolgate::builder().store(Arc::clone(&fixture.0)).agent(agent).build().unwrap();
        let wipe = |gate: &Toolgate, id: &str, arguments: Value| {
            client_call(gate, id, "wipe", arguments).idempotency_key("k")
        };
        let deferred = before.admit(wipe(&before, "c", admitted_arguments())).await.unwrap();
        let answer = after.report(wipe(&after, "c", ran.clone()), result).await;
        assert_eq!((answer_code(&answer), answer.call), (expected, deferred.call), "{case}");
        let rows = after.session("coder", "alice", "s").rows().await.unwrap();
        let outcomes: Vec<_> =
            rows.iter().map(|row| (row.call, row.decision, row.effects)).collect();
        assert_eq!(outcomes, [(deferred.call, Decision::Failed, effects)], "{case}");
        assert_eq!(
            rows.iter().any(|row| row.facts.ran.is_some()),
            ran != admitted_arguments(),
            "{case}"
        );
        // The report settles the claim. A call that happened cannot run again; a call without
        // effects can.
        assert_eq!(
            before.pending_calls().await.unwrap().len(),
            usize::from(effects == CallEffects::Unknown),
            "{case}"
        );
        assert_eq!(
            before.admit(wipe(&before, "d", admitted_arguments())).await.is_ok(),
            effects == CallEffects::None,
            "{case}"
        );
        // A second report is refused.
        assert_eq!(
            answer_code(
                &before.report(wipe(&before, "c", admitted_arguments()), Ok(json!(1))).await
            ),
            "not_admitted",
            "{case}"
        );
    }
}

#[tokio::test]
async fn report_for_removed_tool_counts_and_revokes() {
    use toolgate::policy::{Limit, LimitOwner, Require};
    let rule = || Require::new("looked", ["run"], ["look"]).same("id", "/what").accept_reported();
    let few = || Limit::calls("few", ["peek"], 1).per(LimitOwner::Session);
    let configure = |agent: AgentBuilder| {
        let wipe = Tool::external("wipe", "Wipes.", None)
            .open()
            .entity("id", "/id")
            .revokes_about("look", "id");
        agent
            .tool(wipe)
            .tool(Tool::external("peek", "Peeks.", None).effect(Effect::Read))
            .policy(rule())
            .policy(few())
    };
    // Each case: the reported id, and the result for the records A and B afterwards.
    for (ran, expected_codes) in [
        ("A", ["prerequisite_missing", "ok"]),
        ("B", ["prerequisite_missing", "prerequisite_missing"]),
    ] {
        let fixture = SharedStoreFixture::new();
        // Only the first runtime has the replay check, because the configurations differ.
        let before = fixture.open_process_with(configure);
        let after = Toolgate::builder()
            .store(Arc::clone(&fixture.0))
            .agent(SharedStoreFixture::agent(|agent| agent.policy(rule())))
            .build()
            .unwrap();
        for id in ["A", "B"] {
            let _ =
                before.admit(client_call(&before, id, "look", json!({"id": id}))).await.unwrap();
            assert_eq!(
                answer_code(
                    &before
                        .report(
                            client_call(&before, id, "look", json!({"id": id})),
                            Ok(json!({"ok": true}))
                        )
                        .await
                ),
                "ok"
            );
        }
        let deferred =
            before.admit(client_call(&before, "w", "wipe", json!({"id": "A"}))).await.unwrap();
        let _ =
            after.report(client_call(&after, "w", "wipe", json!({"id": ran})), Ok(json!({}))).await;
        for (id, expected) in ["A", "B"].iter().zip(expected_codes) {
            let run = after
                .admit(client_call(&after, &format!("r{id}"), "run", json!({"what": id})))
                .await;
            assert_eq!(run.as_ref().map_or_else(answer_code, |_| "ok"), expected, "{ran} {id}");
        }
        let rows = after.session("coder", "alice", "s").rows().await.unwrap();
        let row = rows.iter().find(|row| row.call == deferred.call).unwrap();
        assert_eq!(row.entities, [("id".into(), json!("A"))], "{ran}");
        // A reported read counts against its limit.
        let peek = |gate: &Toolgate, id: &str| client_call(gate, id, "peek", json!({"n": id}));
        let _ = before.admit(peek(&before, "p1")).await.unwrap();
        let _ = after.report(peek(&after, "p1"), Ok(json!(1))).await;
        assert!(before.admit(peek(&before, "p2")).await.is_err(), "{ran}");
    }
}
