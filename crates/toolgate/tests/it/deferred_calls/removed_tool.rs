//! Reports of calls whose tool or agent is not there any more.

use super::*;

#[tokio::test]
async fn report_for_removed_tool_is_recorded_for_its_call() {
    type RemovedToolCase = (&'static str, Result<Value, Failure>, Value, &'static str, CallEffects);
    let failed = |effects| Err(Failure::business("exit_1", "it failed").effects(effects));
    let one = || json!({"id": 1});
    let cases: [RemovedToolCase; 5] = [
        ("coder", Ok(json!("done")), one(), "unknown_tool", CallEffects::Done),
        ("coder", failed(CallEffects::None), one(), "unknown_tool", CallEffects::None),
        ("coder", failed(CallEffects::Unknown), one(), "unknown_tool", CallEffects::Unknown),
        ("coder", Ok(json!("done")), json!({"id": 2}), "not_as_admitted", CallEffects::Done),
        ("another", Ok(json!("done")), one(), "unknown_tool", CallEffects::Done),
    ];
    for (left, result, ran, expected, effects) in cases {
        let what = format!("{left} {result:?} {ran}");
        let desk = SharedStoreFixture::new();
        let before = desk
            .open_process_with(|agent| agent.tool(Tool::external("wipe", "Wipes.", None).open()));
        // As it is read again: that agent has other tools, or is not there at all.
        let look = Tool::external("look", "Looks.", None).effect(Effect::Read);
        let agent = Agent::builder(left).tool(look).build().unwrap();
        let after = Toolgate::builder().store(Arc::clone(&desk.0)).agent(agent).build().unwrap();
        let wipe = |gate: &Toolgate, id: &str, arguments: Value| {
            client_call(gate, id, "wipe", arguments).idempotency_key("k")
        };
        let kept = before.admit(wipe(&before, "c", one())).await.unwrap();
        let answer = after.report(wipe(&after, "c", ran.clone()), result).await;
        assert_eq!((answer_code(&answer), answer.call), (expected, kept.call), "{what}");
        let rows = after.session("coder", "alice", "s").rows().await.unwrap();
        let said: Vec<_> = rows.iter().map(|row| (row.call, row.decision, row.effects)).collect();
        assert_eq!(said, [(kept.call, Decision::Failed, effects)], "{what}");
        assert_eq!(rows.iter().any(|row| row.facts.ran.is_some()), ran != one(), "{what}");
        // Its claim is settled by that, and not left open: what has happened is not made again, and
        // what has not may be.
        assert_eq!(
            before.pending_calls().await.unwrap().len(),
            usize::from(effects == CallEffects::Unknown),
            "{what}"
        );
        assert_eq!(
            before.admit(wipe(&before, "d", one())).await.is_ok(),
            effects == CallEffects::None,
            "{what}"
        );
        // It was reported, once.
        assert_eq!(
            answer_code(&before.report(wipe(&before, "c", one()), Ok(json!(1))).await),
            "not_admitted",
            "{what}"
        );
    }
}

#[tokio::test]
async fn report_for_removed_tool_counts_and_revokes() {
    use toolgate::policy::{Limit, LimitOwner, Require};
    let rule = || Require::new("looked", ["run"], ["look"]).same("id", "/what").accept_reported();
    let few = || Limit::calls("few", ["peek"], 1).per(LimitOwner::Session);
    let more = |agent: AgentBuilder| {
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
    // What it ran, and of which records it still holds that somebody looked.
    for (ran, left) in [
        ("A", ["prerequisite_missing", "ok"]),
        ("B", ["prerequisite_missing", "prerequisite_missing"]),
    ] {
        let desk = SharedStoreFixture::new();
        // Calls of the one are not decided again by the other.
        let before = desk.open_process_with(more);
        let after = Toolgate::builder()
            .store(Arc::clone(&desk.0))
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
        let kept =
            before.admit(client_call(&before, "w", "wipe", json!({"id": "A"}))).await.unwrap();
        let _ =
            after.report(client_call(&after, "w", "wipe", json!({"id": ran})), Ok(json!({}))).await;
        for (id, expected) in ["A", "B"].iter().zip(left) {
            let run = after
                .admit(client_call(&after, &format!("r{id}"), "run", json!({"what": id})))
                .await;
            assert_eq!(run.as_ref().map_or_else(answer_code, |_| "ok"), expected, "{ran} {id}");
        }
        let rows = after.session("coder", "alice", "s").rows().await.unwrap();
        let row = rows.iter().find(|row| row.call == kept.call).unwrap();
        assert_eq!(row.entities, [("id".into(), json!("A"))], "{ran}");
        // A read that was made counts, too.
        let peek = |gate: &Toolgate, id: &str| client_call(gate, id, "peek", json!({"n": id}));
        let _ = before.admit(peek(&before, "p1")).await.unwrap();
        let _ = after.report(peek(&after, "p1"), Ok(json!(1))).await;
        assert!(before.admit(peek(&before, "p2")).await.is_err(), "{ran}");
    }
}
