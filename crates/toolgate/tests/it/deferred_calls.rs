//! Tests that one process admits a call and another process settles it.

mod removed_tool;
mod unadmitted_reports;

use std::sync::Arc;

use serde_json::{Value, json};
use toolgate::policy::Deny;
use toolgate::store::Store;
use toolgate::{
    Agent, AgentBuilder, Call, CallEffects, Decision, Effect, Failure, SignedDuration, Tool,
    Toolgate,
};

use crate::flow::{UNTRUSTED_PAGE, fixed_answer_tool};
use crate::support::{BuildWithReplayCheck, InjectedFault, TestWorld, test_store};

/// Opens several runtimes, which stand for processes, on one store.
struct SharedStoreFixture(Arc<dyn Store>);

impl SharedStoreFixture {
    fn new() -> Self {
        Self(test_store())
    }

    fn open_process(&self) -> Toolgate {
        self.open_process_with(|agent| agent)
    }

    fn open_process_with(&self, configure: impl FnOnce(AgentBuilder) -> AgentBuilder) -> Toolgate {
        Toolgate::builder().store(Arc::clone(&self.0)).agent(Self::agent(configure)).build_checked()
    }

    fn agent(configure: impl FnOnce(AgentBuilder) -> AgentBuilder) -> Agent {
        let run = Tool::external(
            "run",
            "Runs.",
            Some(
                json!({"type": "object", "properties": {"what": {"type": "string"}, "key": {"type": "string"}}}),
            ),
        );
        let look = Tool::external("look", "Looks.", None)
            .effect(Effect::Read)
            .entity("id", "/id")
            .proves("/ok");
        configure(Agent::builder("coder").tool(run.open().secret("/key")).tool(look))
            .build()
            .unwrap()
    }
}

fn client_call(gate: &Toolgate, id: &str, tool: &str, arguments: Value) -> Call {
    gate.session("coder", "alice", "s").prepare(tool, arguments).client_id(id)
}

fn answer_code(answer: &toolgate::Answer) -> &str {
    answer.outcome.error().map_or("ok", |error| &*error.code)
}

#[tokio::test]
async fn deferred_call_is_settled_once_by_other_process() {
    let fixture = SharedStoreFixture::new();
    let first = fixture.open_process();
    let deferred =
        first.admit(client_call(&first, "c1", "look", json!({"id": "A-7"}))).await.unwrap();
    assert_eq!(deferred.arguments.value(), &json!({"id": "A-7"}));
    drop(first);

    let second = fixture.open_process();
    let answer = second
        .report(client_call(&second, "c1", "look", json!({"id": "A-7"})), Ok(json!({"ok": true})))
        .await;
    assert_eq!((answer_code(&answer), answer.call), ("ok", deferred.call));
    let again = second
        .report(client_call(&second, "c1", "look", json!({"id": "A-7"})), Ok(json!({"ok": false})))
        .await;
    assert_eq!(answer_code(&again), "not_admitted");

    let session = second.session("coder", "alice", "s");
    let proofs: Vec<Value> = session
        .state()
        .await
        .unwrap()
        .evidence
        .values()
        .map(|proof| proof.fields.clone())
        .collect();
    assert!(
        !proofs.is_empty() && proofs.iter().all(|fields| *fields == json!({"/ok": true})),
        "{proofs:?}"
    );
    let rows = session.rows().await.unwrap();
    let decisions: Vec<_> = rows.iter().map(|row| (row.decision, row.facts.reported)).collect();
    assert_eq!(decisions, [(Decision::Succeeded, true), (Decision::Refused, true)]);
}

#[tokio::test]
async fn only_admitted_report_is_evidence() {
    type ReportCase = (
        &'static str,
        Option<(&'static str, Value)>,
        (&'static str, Value),
        &'static str,
        CallEffects,
    );
    let cases: [ReportCase; 5] = [
        (
            "same arguments",
            Some(("look", json!({"id": 1}))),
            ("look", json!({"id": 1.0})),
            "ok",
            CallEffects::None,
        ),
        (
            "other arguments",
            Some(("look", json!({"id": 1}))),
            ("look", json!({"id": 2})),
            "not_as_admitted",
            CallEffects::Done,
        ),
        (
            "another tool",
            Some(("look", json!({}))),
            ("run", json!({})),
            "not_admitted",
            CallEffects::Unknown,
        ),
        ("never admitted", None, ("look", json!({"id": 1})), "not_admitted", CallEffects::Unknown),
        ("unknown tool", None, ("gone", json!({})), "not_admitted", CallEffects::Unknown),
    ];
    for (name, admitted, (tool, arguments), expected, effects) in cases {
        let fixture = SharedStoreFixture::new();
        let gate = fixture.open_process();
        if let Some((tool, arguments)) = admitted {
            let _ = gate.admit(client_call(&gate, "c", tool, arguments)).await.unwrap();
        }
        let answer =
            gate.report(client_call(&gate, "c", tool, arguments), Ok(json!({"ok": true}))).await;
        assert_eq!(answer_code(&answer), expected, "{name}");
        let session = gate.session("coder", "alice", "s");
        assert_eq!(session.state().await.unwrap().evidence.is_empty(), expected != "ok", "{name}");
        let rows = session.rows().await.unwrap();
        assert_eq!(
            rows.iter().map(|row| (row.code().unwrap_or("ok"), row.effects)).collect::<Vec<_>>(),
            [(expected, effects)],
            "{name}"
        );
        let ran = (expected == "not_as_admitted").then(|| json!({"id": 2}));
        assert_eq!(rows.first().and_then(|row| row.facts.ran.clone()), ran, "{name}");
    }
}

#[tokio::test]
async fn report_for_other_tool_keeps_deferred_call() {
    let gate = SharedStoreFixture::new().open_process();
    let deferred = gate.admit(client_call(&gate, "c", "look", json!({"id": 1}))).await.unwrap();
    let other = gate.report(client_call(&gate, "c", "run", json!({})), Ok(json!(1))).await;
    assert_eq!(answer_code(&other), "not_admitted");
    let answer = gate
        .report(client_call(&gate, "c", "look", json!({"id": 1})), Ok(json!({"ok": true})))
        .await;
    assert_eq!((answer_code(&answer), answer.call), ("ok", deferred.call));
}

#[tokio::test]
async fn row_of_deferred_call_contains_no_secret() {
    let fixture = SharedStoreFixture::new();
    let (first, second) = (fixture.open_process(), fixture.open_process());
    let arguments = json!({"what": "login", "key": "hunter2"});
    let _ = first.admit(client_call(&first, "c", "run", arguments.clone())).await.unwrap();
    let answer =
        second.report(client_call(&second, "c", "run", arguments), Ok(json!("done"))).await;
    assert_eq!(answer_code(&answer), "ok");
    let rows = second.session("coder", "alice", "s").rows().await.unwrap();
    assert!(rows.iter().all(|row| !serde_json::to_string(row).unwrap().contains("hunter2")));
}

#[tokio::test]
async fn closed_session_leaves_unreported_writes_pending() {
    let fixture = SharedStoreFixture::new();
    let gate = fixture.open_process();
    for (id, tool) in [("c1", "run"), ("c2", "look")] {
        let _ = gate.admit(client_call(&gate, id, tool, json!({}))).await.unwrap();
    }
    assert_eq!(gate.pending_calls().await.unwrap().len(), 0);
    let session = gate.session("coder", "alice", "s");
    gate.close_client_session(session.key()).await.unwrap();
    // An unreported read is not pending.
    let pending: Vec<_> =
        gate.pending_calls().await.unwrap().iter().map(|intent| intent.tool.to_string()).collect();
    assert_eq!(pending, ["run"]);
    let late = gate.report(client_call(&gate, "c1", "run", json!({})), Ok(json!(1))).await;
    assert_eq!(answer_code(&late), "not_admitted");
    let read = || client_call(&gate, "c3", "look", json!({"id": 3})).idempotency_key("k");
    let _ = gate.admit(read()).await.unwrap();
    gate.close_client_session(session.key()).await.unwrap();
    assert!(gate.admit(read()).await.is_ok(), "the read can run again");
}

#[tokio::test]
async fn reported_failure_keeps_reported_effects() {
    for (effects, pending) in
        [(CallEffects::Done, 0), (CallEffects::Unknown, 1), (CallEffects::None, 0)]
    {
        let gate = SharedStoreFixture::new().open_process();
        let _ = gate.admit(client_call(&gate, "c", "run", json!({}))).await.unwrap();
        let failure = Failure::business("exit_1", "it failed").effects(effects);
        assert_eq!(
            answer_code(
                &gate.report(client_call(&gate, "c", "run", json!({})), Err(failure)).await
            ),
            "exit_1"
        );
        assert_eq!(gate.pending_calls().await.unwrap().len(), pending, "{effects:?}");
    }
}

#[tokio::test]
async fn client_user_approves_if_rule_names_no_approvers() {
    let with_ask_rule = |approvers: &'static [&'static str]| {
        move |agent: AgentBuilder| {
            agent.policy(
                Deny::ask("person", ["run"])
                    .reason("A person must look at it.")
                    .approvers(approvers.iter().copied()),
            )
        }
    };
    let fixture = SharedStoreFixture::new();
    let gate = fixture.open_process_with(with_ask_rule(&[]));
    let without_prompt = gate.admit(client_call(&gate, "c0", "run", json!({}))).await.unwrap_err();
    assert_eq!(answer_code(&without_prompt), "approval_required");
    let deferred =
        gate.admit(client_call(&gate, "c1", "run", json!({})).allow_user_prompt()).await.unwrap();
    assert_eq!(deferred.approval_reason.as_deref(), Some("A person must look at it."));
    let answer = gate.report(client_call(&gate, "c1", "run", json!({})), Ok(json!("done"))).await;
    assert_eq!(answer_code(&answer), "ok");

    let gate = SharedStoreFixture::new().open_process_with(with_ask_rule(&["boss"]));
    let named = gate
        .admit(client_call(&gate, "c1", "run", json!({})).allow_user_prompt())
        .await
        .unwrap_err();
    assert_eq!(answer_code(&named), "approval_required");
}

#[tokio::test]
async fn deferred_call_reserves_limits() {
    use toolgate::policy::{Limit, LimitOwner};
    let limit_runs = |agent: AgentBuilder| {
        agent.policy(
            Limit::calls("most", ["run"], 1)
                .per(LimitOwner::Session)
                .within(SignedDuration::from_hours(1)),
        )
    };
    let fixture = SharedStoreFixture::new();
    let (first, second) =
        (fixture.open_process_with(limit_runs), fixture.open_process_with(limit_runs));
    let _ = first.admit(client_call(&first, "c1", "run", json!({"what": "a"}))).await.unwrap();
    let full =
        second.admit(client_call(&second, "c2", "run", json!({"what": "b"}))).await.unwrap_err();
    assert_eq!(full.rule.as_deref(), Some("most"));
    let answer = second
        .report(client_call(&second, "c1", "run", json!({"what": "a"})), Ok(json!("done")))
        .await;
    assert_eq!(answer_code(&answer), "ok");
}

#[tokio::test]
async fn possible_client_effect_revokes_evidence() {
    use toolgate::policy::Require;
    for how in ["nothing", "admitted", "abandoned", "unadmitted"] {
        let fixture = SharedStoreFixture::new();
        let gate = fixture.open_process_with(|agent| {
            let wipe = Tool::external("wipe", "Wipes.", None).open().revokes("look");
            agent.tool(wipe).policy(Require::new("looked", ["run"], ["look"]).accept_reported())
        });
        let _ = gate.admit(client_call(&gate, "l", "look", json!({"id": 1}))).await.unwrap();
        assert_eq!(
            answer_code(
                &gate
                    .report(
                        client_call(&gate, "l", "look", json!({"id": 1})),
                        Ok(json!({"ok": true}))
                    )
                    .await
            ),
            "ok"
        );
        if ["admitted", "abandoned"].contains(&how) {
            let _ = gate.admit(client_call(&gate, "w", "wipe", json!({}))).await.unwrap();
        }
        match how {
            "abandoned" => gate
                .close_client_session(&client_call(&gate, "w", "wipe", json!({})).key)
                .await
                .unwrap(),
            "unadmitted" => {
                assert_eq!(
                    answer_code(
                        &gate
                            .report(client_call(&gate, "u", "wipe", json!({})), Ok(json!({})))
                            .await
                    ),
                    "not_admitted"
                )
            }
            _ => {}
        }
        let ran = gate.admit(client_call(&gate, "r", "run", json!({"what": how}))).await;
        let code = ran.as_ref().map_or_else(answer_code, |_| "ok");
        assert_eq!(code, if how == "nothing" { "ok" } else { "prerequisite_missing" }, "{how}");
    }
}

#[tokio::test]
async fn report_during_store_outage_is_not_retryable() {
    let world = TestWorld::new(|agent| agent.tool(Tool::external("run", "Runs.", None).open()));
    let call = || world.session.prepare("run", json!({"what": "a"})).client_id("c");
    let _ = world.gate.admit(call()).await.unwrap();
    world.store.inject_faults(&[InjectedFault::TakeDeferred]);
    let answer = world.gate.report(call(), Ok(json!("done"))).await;
    let error = answer.outcome.error().unwrap();
    assert_eq!(
        (&*error.code, error.effects, error.retryable),
        ("store_unavailable", CallEffects::Unknown, false)
    );
    assert!(!error.message.contains("nothing was done"), "{}", error.message);
    let row = world.session.rows().await.unwrap().pop().unwrap();
    assert_eq!(
        (row.effects, &*row.arguments, row.is_call()),
        (CallEffects::Unknown, &json!({"what": "a"}), false)
    );
    world.store.inject_faults(&[]);
    assert_eq!(
        answer_code(&world.gate.report(call(), Ok(json!("done"))).await),
        "ok",
        "the deferred call is still open"
    );
}

#[tokio::test]
async fn unreported_call_is_abandoned_after_its_lease() {
    use toolgate::policy::{Limit, LimitOwner, Require};
    let world = TestWorld::new(|agent| {
        let plain = |name: &str| Tool::external(name, "Does.", None);
        let agent =
            agent.tool(plain("peek").effect(Effect::Read)).tool(plain("test").effect(Effect::Read));
        let agent = agent.tool(plain("edit").open().revokes("test")).tool(plain("ship"));
        let few = Limit::calls("few", ["peek"], 1).per(LimitOwner::Session);
        agent.policy(few).policy(Require::new("tested", ["ship"], ["test"]).accept_reported())
    });
    let call = |tool: &str, id: &str| world.session.prepare(tool, json!({"id": id})).client_id(id);
    let admitted = async |tool: &str, id: &str| match world.gate.admit(call(tool, id)).await {
        Ok(_) => "ok".to_owned(),
        Err(answer) => answer_code(&answer).to_owned(),
    };
    assert_eq!(admitted("edit", "e").await, "ok");
    assert_eq!(admitted("test", "t").await, "ok");
    assert_eq!(answer_code(&world.gate.report(call("test", "t"), Ok(json!({}))).await), "ok");
    assert_eq!(admitted("ship", "s").await, "ok", "the test ran after the admission of the edit");
    assert_eq!(answer_code(&world.gate.report(call("ship", "s"), Ok(json!({}))).await), "ok");
    assert_eq!(admitted("peek", "p").await, "ok");
    assert_eq!(admitted("peek", "q").await, "few");
    world.advance(SignedDuration::from_hours(25));
    let pending: Vec<_> = world
        .gate
        .pending_calls()
        .await
        .unwrap()
        .iter()
        .map(|intent| intent.tool.to_string())
        .collect();
    assert_eq!(pending, ["edit"], "an unreported read is not pending");
    assert_eq!(
        admitted("ship", "u").await,
        "prerequisite_missing",
        "the edit may have happened after the test"
    );
    assert_eq!(admitted("peek", "r").await, "ok", "the reservation is released");
    // Closing the session also abandons a call whose client still holds the deferred call.
    let deferred = world.session.admit("edit", json!({"id": "f"})).await.ok().unwrap();
    world.gate.close_client_session(world.session.key()).await.unwrap();
    assert_eq!(world.gate.pending_calls().await.unwrap().len(), 2);
    assert_eq!(
        answer_code(&world.gate.report(call("edit", "e"), Ok(json!({}))).await),
        "not_admitted",
        "the call was abandoned"
    );
    let late = world.session.report(&deferred, Ok(json!({}))).await;
    assert_eq!(answer_code(&late), "not_admitted", "the session of the client has ended");
    assert_eq!(world.gate.pending_calls().await.unwrap().len(), 2);
}

#[tokio::test]
async fn reported_evidence_is_dated_by_admission() {
    use toolgate::policy::Require;
    for (order, expected) in [
        ("l w l' w'", "prerequisite_missing"),
        ("l w w' l'", "prerequisite_missing"),
        ("w w' l l'", "ok"),
        ("l w w' m m' l'", "ok"),
    ] {
        // If `renews` is set, the admission of a test revokes the evidence of the previous test.
        for (renews, watched) in [(false, false), (true, false), (true, true)] {
            let fixture = SharedStoreFixture::new();
            let gate = fixture.open_process_with(|agent| {
                let wipe = Tool::external("wipe", "Wipes.", None).open().revokes("look");
                let test = Tool::external("test", "Tests.", None).effect(Effect::Read);
                let agent = agent.tool(wipe.revokes("test")).tool(if renews {
                    test.revokes("test")
                } else {
                    test
                });
                let agent = if watched {
                    agent
                        .tool(fixed_answer_tool("page", UNTRUSTED_PAGE).untrusted())
                        .policy(toolgate::policy::Flow::new("f", ["run"], ["/what"]))
                } else {
                    agent
                };
                agent.policy(Require::new("tested", ["run"], ["test"]).accept_reported())
            });
            for step in order.split(' ') {
                let id = step.trim_end_matches('\'');
                let call = || {
                    if id == "w" {
                        client_call(&gate, id, "wipe", json!({}))
                    } else {
                        client_call(&gate, id, "test", json!({"id": id.len()}))
                    }
                };
                match step == id {
                    true => drop(gate.admit(call()).await.unwrap()),
                    false => assert_eq!(
                        answer_code(&gate.report(call(), Ok(json!({"ok": true}))).await),
                        "ok",
                        "{order}"
                    ),
                }
            }
            let ran = gate.admit(client_call(&gate, "r", "run", json!({"what": "x"}))).await;
            assert_eq!(
                ran.as_ref().map_or_else(answer_code, |_| "ok"),
                expected,
                "{order} {renews} {watched}"
            );
        }
    }
}
