//! What is recorded, whatever happens to the caller or the store.

use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::json;
use toolgate::policy::Deny;
use toolgate::{Agent, Compared, Effect, Effects, Gate, Replay, Tool};

use crate::support::{Built, Fails, World};

#[tokio::test]
async fn a_caller_who_hangs_up_cancels_the_tool_and_not_the_row() {
    let world = World::whose_act(|act| act.timeout(Duration::from_secs(60)));
    let quiet = world.fingerprint().await;
    let mut call = Box::pin(world.session.call("act", json!({"how": "hang"})));
    while world.ran() == 0 {
        assert!(tokio::time::timeout(Duration::from_millis(30), &mut call).await.is_err());
    }
    drop(call);
    recorded(&world).await;
    let (rows, _) = world.rows().await;
    assert_eq!(rows.len(), 1);
    assert_eq!(rows[0].outcome.error().map(|e| (&*e.code, e.effects)), Some(("cancelled", Effects::Unknown)));
    assert_eq!(world.fingerprint().await, quiet);
    assert_eq!((world.metered().await, world.gate.pending().await.unwrap().len()), (1.into(), 1), "nobody knows what it did");
}

#[tokio::test]
async fn a_row_tells_the_time_at_the_last_gate_too() {
    let world = World::new(|agent| agent);
    for how in [json!("ok"), json!("fail"), json!(7)] {
        world.session.call("act", json!({"how": how})).await;
    }
    let (rows, _) = world.rows().await;
    assert_eq!(rows.len(), 3);
    assert!(rows.iter().all(|row| row.latency.at(Gate::Record) > 0), "{rows:#?}");
}

#[tokio::test]
async fn a_look_back_tells_a_caller_without_time_from_a_session_without() {
    let world = World::new(|agent| agent);
    let answer = world.gate.call(world.session.prepare("look", json!({})).within(Duration::ZERO)).await;
    assert_eq!((answer.gate, answer.outcome.error().map(|e| &*e.code)), (Gate::Limits, Some("deadline_exceeded")));
    let (rows, _) = world.rows().await;
    let said = Replay::of(&world.gate).unwrap().decide(&rows[0]).await;
    assert!(matches!(said, Compared::Circumstance(_)), "{said:?}");
}

#[tokio::test]
async fn a_rule_whose_code_is_that_of_a_circumstance_is_a_rule() {
    let world = World::new(|agent| agent.policy(Deny::new("frozen", ["look"]).code("busy")));
    world.session.call("look", json!({})).await;
    let (rows, _) = world.rows().await;
    assert_eq!(Replay::of(&world.gate).unwrap().decide(&rows[0]).await, Compared::Same);
    let other = Agent::builder("agent").tool(crate::support::look()).build().unwrap();
    let said = Replay::new([other]).unwrap().decide(&rows[0]).await;
    assert!(matches!(said, Compared::Differs(_)), "{said:?}");
}

#[tokio::test]
async fn arguments_that_nobody_has_read_are_not_judged_later() {
    let world = World::new(|agent| agent);
    world.session.call("gone", json!({"n": 1})).await;
    let (rows, _) = world.rows().await;
    assert_eq!((rows[0].gate, rows[0].arguments.is_null()), (Gate::Resolve, true));
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]});
    let gone = Tool::external("gone", "Is there by now.", Some(schema)).open();
    let now = Agent::builder("agent").tool(gone).build().unwrap();
    let said = Replay::new([now]).unwrap().decide(&rows[0]).await;
    assert!(matches!(&said, Compared::Undecidable(why) if why.contains("before its arguments were read")), "{said:?}");
}

type Noted = std::sync::Arc<std::sync::Mutex<Vec<&'static str>>>;

/// Says so when it is gone.
struct Gone(Noted);

impl Drop for Gone {
    fn drop(&mut self) {
        self.0.lock().unwrap().push("gone");
    }
}

/// A tool that waits without end, and has set something going elsewhere.
fn waits(name: &str, effect: Effect, noted: &Noted) -> Tool {
    let noted = Noted::clone(noted);
    Tool::dynamic(name, "Waits.", json!({"type": "object"}), move |ctx: toolgate::Ctx, _| {
        let (guard, heard, told) = (Gone(Noted::clone(&noted)), Noted::clone(&noted), ctx.cancelled().clone());
        noted.lock().unwrap().push("begun");
        tokio::spawn(async move {
            told.cancelled().await;
            heard.lock().unwrap().push("told");
        });
        async move {
            let _guard = guard;
            std::future::pending().await
        }
    })
    .effect(effect)
    .open()
}

/// Waits until so much was noted.
async fn noted(noted: &Noted, count: usize) -> Vec<&'static str> {
    for _ in 0..2_000 {
        if noted.lock().unwrap().len() >= count {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut all = noted.lock().unwrap().clone();
    all.sort_unstable();
    all
}

/// Waits until there is a row: who has hung up is told nothing.
async fn recorded(world: &World) {
    for _ in 0..1_000 {
        if !world.rows().await.0.is_empty() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_caller_who_hangs_up_on_a_read_leaves_its_row_too() {
    let gone = Noted::default();
    let world = World::new(|agent| agent.tool(waits("wait", Effect::Read, &gone)));
    let quiet = world.fingerprint().await;
    let mut call = Box::pin(world.session.call("wait", json!({})));
    while gone.lock().unwrap().is_empty() {
        assert!(tokio::time::timeout(Duration::from_millis(30), &mut call).await.is_err());
    }
    drop(call);
    recorded(&world).await;
    let (rows, _) = world.rows().await;
    assert_eq!(rows.len(), 1);
    assert_eq!(rows[0].outcome.error().map(|e| (&*e.code, e.effects)), Some(("cancelled", Effects::None)));
    assert_eq!(noted(&gone, 3).await, ["begun", "gone", "told"], "the tool goes on");
    assert_eq!((world.fingerprint().await, world.gate.pending().await.unwrap().len()), (quiet, 0));
}

#[tokio::test]
async fn a_deadline_ends_the_tool_and_not_only_the_wait_for_it() {
    for effect in [Effect::Read, Effect::Write] {
        let gone = Noted::default();
        let world =
            World::new(|agent| agent.tool(waits("wait", effect, &gone).timeout(Duration::from_millis(40)).retry(0, Duration::ZERO)));
        let answer = world.session.call("wait", json!({})).await;
        assert_eq!(answer.outcome.error().map(|e| &*e.code), Some("timeout"), "{answer:?}");
        assert_eq!(noted(&gone, 3).await, ["begun", "gone", "told"]);
    }
}

#[tokio::test]
async fn what_a_tool_has_set_going_is_not_told_to_end_once_its_call_has_ended() {
    let tokens: std::sync::Arc<std::sync::Mutex<Vec<_>>> = std::sync::Arc::default();
    let kept = std::sync::Arc::clone(&tokens);
    let schema = json!({"type": "object", "properties": {"fails": {"type": "boolean"}}});
    let start = move |ctx: toolgate::Ctx, args: serde_json::Value| {
        kept.lock().unwrap().push(ctx.cancelled().clone());
        async move { if args["fails"] == true { Err(toolgate::Failure::business("no_room", "full")) } else { Ok(json!({})) } }
    };
    let tool = |name, effect| Tool::dynamic(name, "Starts.", schema.clone(), start.clone()).effect(effect).open();
    let world = World::new(|agent| agent.tool(tool("peek", Effect::Read)).tool(tool("start", Effect::Write)));
    for name in ["peek", "start"] {
        for fails in [false, true] {
            world.session.call(name, json!({"fails": fails})).await;
        }
    }
    world.session.batch([("peek".to_owned(), json!({})), ("start".to_owned(), json!({}))]).await;
    let tokens = tokens.lock().unwrap();
    assert_eq!(tokens.len(), 6);
    assert!(tokens.iter().all(|token| !token.is_cancelled()), "{tokens:?}");
}

#[tokio::test]
async fn a_handler_is_given_what_the_agent_has_for_its_type() {
    struct Rates(u32);
    let tool = Tool::dynamic("rate", "Tells.", json!({"type": "object"}), |ctx: toolgate::Ctx, _| async move {
        let rates = ctx.resource::<Rates>().map(|rates| rates.0);
        let left = ctx.deadline().is_some() && ctx.time_left().is_some_and(|left| left <= Duration::from_secs(7));
        Ok(json!({"rate": rates, "text": ctx.resource::<String>().is_some(), "has a deadline": left}))
    });
    let world = World::new(|agent| agent.tool(tool.effect(Effect::Read).timeout(Duration::from_secs(7))).resource(Rates(19)));
    let answer = world.session.call("rate", json!({})).await;
    assert_eq!(answer.outcome.success().unwrap().value, json!({"rate": 19, "text": false, "has a deadline": true}));
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
async fn nobody_hears_when_to_try_again_what_may_not_be_tried_again() {
    for (fails, code, wait) in [(Fails::Finish, "store_unavailable", 1_000), (Fails::FinishConflicts, "conflict", 100)] {
        // What has happened, and what was rolled back.
        for (world, again) in [(World::new(|agent| agent), false), (World::whose_act(Tool::local), true)] {
            world.store.fail(&[fails]);
            let answer = world.session.call("act", json!({"how": "ok"})).await;
            let heard = answer.outcome.error().map(|error| (&*error.code, error.retryable, error.retry_after_ms));
            assert_eq!(heard, Some((code, again, again.then_some(wait))));
        }
    }
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

#[tokio::test]
async fn while_the_store_is_away_a_call_does_not_read_all_that_waits_for_it() {
    let world = World::new(|agent| agent);
    world.store.fail(&[Fails::Finish]);
    world.session.call("look", json!({"at": "1"})).await;
    // Whoever reads as far as this makes a copy of the file.
    let path = world.spool.path().join("rows.jsonl");
    let mut rows = std::fs::read(&path).unwrap();
    rows.extend_from_slice(b"\nno row\n");
    std::fs::write(&path, rows).unwrap();
    for at in ["2", "3", "4"] {
        world.session.call("look", json!({"at": at})).await;
    }
    let copies = || std::fs::read_dir(world.spool.path()).unwrap().filter(|e| e.as_ref().unwrap().path() != path).count();
    assert_eq!((world.spooled().len(), copies()), (5, 0));
    world.store.fail(&[]);
    assert_eq!(world.gate.recover().await, Ok(4));
    assert_eq!((world.rows().await.0.len(), copies()), (4, 1));
}

/// The task of a call dies between its claim and its end: the row says so, and the claim is pending, not forgotten.
#[tokio::test]
async fn a_call_that_dies_is_recorded_and_its_claim_is_pending() {
    let world = World::new(|agent| agent);
    world.store.fail(&[Fails::FinishDies]);
    let answer = world.session.call("act", json!({"how": "ok"})).await;
    assert_eq!(answer.outcome.error().map(|e| (&*e.code, e.effects)), Some(("internal_fault", Effects::Unknown)));
    assert_eq!(world.session.rows().await.unwrap().len(), 1);
    assert_eq!(world.gate.pending().await.unwrap().len(), 1, "somebody must look");
    assert_eq!(world.metered().await, 1.into(), "what it reserved stays reserved");
}

/// Two runtimes that were given one file for their spools lose nothing of each other's.
#[tokio::test]
async fn a_spool_may_be_shared() {
    let store = std::sync::Arc::new(crate::support::FaultyStore::default());
    let directory = tempfile::tempdir().unwrap();
    let open = || {
        let agent = toolgate::Agent::builder("a").tool(toolgate::builtin::calc()).build().unwrap();
        let store: std::sync::Arc<dyn toolgate::Store> = store.clone();
        toolgate::Toolgate::builder().agent(agent).store(store).spool(directory.path().join("rows.jsonl")).build().unwrap()
    };
    let gates = [open(), open()];
    let call =
        async |gate: usize, n: u32| gates[gate].session("a", "alice", "s").call("calc", json!({"expression": format!("{n} + 1")})).await;
    store.fail(&[Fails::Finish]);
    call(0, 1).await;
    call(1, 2).await;
    store.fail(&[]);
    gates[0].recover().await.unwrap();
    store.fail(&[Fails::Finish]);
    call(1, 3).await;
    call(0, 4).await;
    store.fail(&[]);
    gates[1].recover().await.unwrap();
    let rows = gates[0].session("a", "alice", "s").rows().await.unwrap();
    assert_eq!(rows.len(), 4, "{rows:#?}");
}

/// `ship` wants a `check`, which an `edit` takes away.
fn shipping() -> World {
    let plain = |name: &str| Tool::dynamic(name, "Does.", json!({"type": "object"}), |_, _| async { Ok(json!({})) });
    World::new(|agent| {
        let edit = plain("edit").effect(Effect::Write).open().revokes("check");
        let ship = plain("ship").effect(Effect::Write);
        let rule = toolgate::policy::Require::new("checked", ["ship"], ["check"]);
        agent.tool(plain("check").effect(Effect::Read)).tool(edit).tool(ship).policy(rule)
    })
}

#[tokio::test]
async fn what_ended_while_the_store_was_away_takes_away_nothing_that_is_proved_after_it() {
    let world = shipping();
    let code = async |tool: &str| world.session.call(tool, json!({})).await.outcome.error().map(|error| error.code.to_string());
    assert_eq!(code("check").await, None);
    world.store.fail(&[Fails::Finish]);
    assert_eq!(code("edit").await.as_deref(), Some("store_unavailable"));
    world.store.fail(&[]);
    // What was proved before it is gone, and what is proved after it stands.
    assert_eq!(code("ship").await.as_deref(), Some("prerequisite_missing"));
    assert_eq!((code("check").await, code("ship").await), (None, None));
}

#[tokio::test]
async fn as_long_as_what_has_ended_cannot_be_taken_in_nothing_runs_on_what_it_takes_away() {
    let world = shipping();
    let code = async |tool: &str| world.session.call(tool, json!({})).await.outcome.error().map(|error| error.code.to_string());
    assert_eq!(code("check").await, None);
    world.store.fail(&[Fails::Finish]);
    code("edit").await;
    // The store takes calls again, but not yet what is spooled.
    world.store.fail(&[Fails::TakeIn]);
    assert_eq!(code("ship").await.as_deref(), Some("store_unavailable"));
    world.store.fail(&[]);
    assert_eq!(code("ship").await.as_deref(), Some("prerequisite_missing"));
    assert_eq!(world.rows().await.0.len(), 4);
}

#[tokio::test]
async fn a_call_beside_a_recovery_is_judged_when_the_rows_are_in() {
    let world = shipping();
    assert!(world.session.call("check", json!({})).await.outcome.success().is_some());
    world.store.fail(&[Fails::Finish]);
    world.session.call("edit", json!({})).await;
    world.store.fail(&[]);
    // The store is slow to take the first row in.
    let (held, before) = (world.store.takes_in.lock().await, world.store.offered.load(Ordering::SeqCst));
    let gate = world.gate.clone();
    let recovery = tokio::spawn(async move { gate.recover().await });
    while world.store.offered.load(Ordering::SeqCst) == before {
        tokio::task::yield_now().await;
    }
    let session = world.session.clone();
    let ship = tokio::spawn(async move { session.call("ship", json!({})).await });
    // Whoever does not wait for the recovery comes to an end meanwhile.
    for _ in 0..10_000 {
        tokio::task::yield_now().await;
    }
    assert!(!ship.is_finished(), "it was judged before the row was in");
    drop(held);
    assert_eq!(recovery.await.unwrap(), Ok(1));
    assert_eq!(ship.await.unwrap().outcome.error().map(|error| error.code.to_string()).as_deref(), Some("prerequisite_missing"));
}

#[tokio::test]
async fn those_who_wait_for_a_recovery_in_vain_do_not_try_one_after_the_other() {
    let world = World::new(|agent| agent);
    world.store.fail(&[Fails::Finish]);
    world.session.call("look", json!({})).await;
    let (held, before) = (world.store.takes_in.lock().await, world.store.offered.load(Ordering::SeqCst));
    let recover = || {
        let gate = world.gate.clone();
        tokio::spawn(async move { gate.recover().await })
    };
    let mut all = vec![recover()];
    while world.store.offered.load(Ordering::SeqCst) == before {
        tokio::task::yield_now().await;
    }
    all.extend((0..20).map(|_| recover()));
    // All of them have come when the last has run as far as it can.
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    drop(held);
    for one in all {
        assert!(one.await.unwrap().is_err());
    }
    assert_eq!(world.store.offered.load(Ordering::SeqCst) - before, 2);
}

/// A pattern that half of all times and names match: what callers said goes, what toolgate knows by itself stays.
#[tokio::test]
async fn a_pattern_takes_nothing_out_of_a_row_that_is_toolgates_own() {
    let schema = || json!({"type": "object", "properties": {"card": {"type": "string"}}});
    let pay = Tool::dynamic("pay", "Pays.", schema(), |_, _| async { Ok(json!({"said": "paid 4111"})) })
        .effect(Effect::Write)
        .entity("card", "/card");
    let look = Tool::dynamic("look", "Looks.", schema(), |_, _| async { Ok(json!({})) });
    let look = look.effect(Effect::Read).entity("card", "/card");
    let rule = toolgate::policy::Require::new("looked", ["pay"], ["look"]).same("card", "/card");
    let agent = Agent::builder("a").tool(pay).tool(look).policy(rule).build().unwrap();
    let clock = std::sync::Arc::new(toolgate::ManualClock::at("2026-04-11T10:41:11.411141114Z".parse().unwrap()));
    let gate = crate::support::gate().clock(clock).redact("[0-9]+").unwrap().agent(agent).built();
    let s = gate.session("a", "alice", "s");
    let key = toolgate::SessionKey::new("nobody", "alice", "s");
    gate.call(toolgate::Call::new(key, "pay", toolgate::Arguments::Value(json!({}))).misread("4111 is no object")).await;
    for (tool, expected) in [("pay", "prerequisite_missing"), ("look", "ok"), ("pay", "ok"), ("pay4111", "unknown_tool")] {
        let answer = s.call(tool, json!({"card": "4111"})).await;
        assert_eq!(answer.outcome.error().map_or("ok", |error| &error.code), expected);
    }
    let mut rows = gate.session("nobody", "alice", "s").rows().await.unwrap();
    rows.extend(s.rows().await.unwrap());
    assert_eq!(rows.len(), 5);
    for row in &rows {
        assert_eq!(row.facts.now, row.at, "{row:?}");
        assert!(!serde_json::to_string(&(&row.tool, &row.arguments, &row.entities, &row.outcome.success())).unwrap().contains("4111"));
        if let Some(error) = row.outcome.error() {
            assert!(error.call_id == Some(row.call) && error.message != "[redacted]" && !error.message.contains("4111"), "{error:?}");
        }
    }
    assert!(rows[0].facts.misread && rows[0].facts.turned_away.as_deref().is_some_and(|why| why.ends_with("] is no object")));
    let [(_, None), ..] = rows[1].facts.evidence.as_slice() else { panic!("{:?}", rows[1].facts) };
    let [(known, Some(proof)), ..] = rows[3].facts.evidence.as_slice() else { panic!("{:?}", rows[3].facts) };
    assert_eq!(proof.at, rows[2].at);
    assert!(!format!("{known:?}{:?}", proof.entities).contains("4111"));
}

/// Each pattern sees what was said, and not what another has left of it; what matches nothing takes out nothing; a mark is nobody's secret.
#[tokio::test]
async fn patterns_take_nothing_from_each_other() {
    let properties = json!({"text": {"type": "string"}, "n": {"type": "integer"}, "pin": {"type": "string", "writeOnly": true}});
    let say = Tool::dynamic("say", "Says.", json!({"type": "object", "properties": properties}), |_, _| async { Ok(json!({})) });
    let agent = Agent::builder("a").tool(say.effect(Effect::Read)).build().unwrap();
    let mut gate = crate::support::gate().agent(agent);
    for pattern in [r"\d{4}", "sk-[0-9a-z-]{10,}", "[0-9a-f]{32}", "q*"] {
        gate = gate.redact(pattern).unwrap();
    }
    let s = gate.built().session("a", "alice", "s");
    for args in [
        json!({"text": "4111"}),
        json!({"text": "key sk-abcd-4111-efgh, then 4111"}),
        json!({"pin": "1234", "n": 7}),
        json!({"pin": "1234", "n": 8}),
    ] {
        assert!(s.call("say", args).await.outcome.error().is_none());
    }
    let rows = s.rows().await.unwrap();
    let said = |row: usize, name: &str| rows[row].arguments[name].as_str().unwrap().to_owned();
    let is_mark = |text: &str| text.len() == 43 && text.starts_with("[redacted ") && text.matches('[').count() == 1;
    let card = said(0, "text");
    assert!(is_mark(&card), "{card}");
    let text = said(1, "text");
    let key = text.strip_prefix("key ").and_then(|text| text.strip_suffix(&format!(", then {card}"))).unwrap();
    assert!(is_mark(key), "{text}");
    let pin = said(2, "pin");
    assert!(is_mark(&pin) && pin == said(3, "pin"), "{pin}");
    assert_eq!(rows[2].arguments["n"], 7);
}

/// Keys of evidence and counters, and errors, hold values as they are spelled in JSON.
#[tokio::test]
async fn a_pattern_finds_what_is_spelled_as_in_json() {
    let schema = |user: serde_json::Value| json!({"type": "object", "properties": {"user": user}});
    let tool = |name: &str, user| Tool::dynamic(name, "T.", schema(user), |_, _| async { Ok(json!({})) }).entity("user", "/user");
    let text = || json!({"type": "string"});
    let agent = Agent::builder("a")
        .tool(tool("look", text()).effect(Effect::Read))
        .tool(tool("pay", text()).effect(Effect::Write))
        .tool(tool("pick", json!({"enum": ["a"]})).effect(Effect::Read))
        .policy(toolgate::policy::Require::new("looked", ["pay"], ["look"]).same("user", "/user"))
        .policy(toolgate::policy::Limit::calls("few", ["pay"], 9).per(toolgate::policy::Per::Entity("/user".into())))
        .build()
        .unwrap();
    let s = crate::support::gate().redact(r"CORP\\\w+").unwrap().agent(agent).built().session("a", "alice", "s");
    for (tool, expected) in [("pay", "prerequisite_missing"), ("look", "ok"), ("pay", "ok"), ("pick", "invalid_arguments")] {
        let answer = s.call(tool, json!({"user": r"CORP\mallory"})).await;
        assert_eq!(answer.outcome.error().map_or("ok", |error| &error.code), expected);
    }
    let rows = s.rows().await.unwrap();
    for row in &rows {
        let row = serde_json::to_string(row).unwrap();
        assert!(!row.contains("mallory") && row.contains("[redacted "), "{row}");
    }
    // The same secret leaves the same mark, however it is spelled.
    let mark = rows[2].arguments["user"].as_str().unwrap();
    assert_eq!(rows[2].facts.evidence[0].0.entity.as_ref().map(|(_, value)| &**value), Some(format!("\"{mark}\"").as_str()));
    assert!(rows[2].facts.claimed[0].0.contains(mark), "{:?}", rows[2].facts);
}

/// What a refusal is known by, and what a file was like, is no secret, whatever it looks like.
#[tokio::test]
async fn a_pattern_makes_no_decision_another_one() {
    let tool = |name: &str| Tool::dynamic(name, "T.", json!({"type": "object"}), |_, _| async { Ok(json!({})) });
    let agent = |more: &str| {
        let rule = toolgate::policy::Require::new("looked", ["pay"], ["look"]).code("step-1");
        Agent::builder("a")
            .tool(tool("look").effect(Effect::Read))
            .tool(tool("pay").effect(Effect::Write))
            .tool(tool(more).effect(Effect::Read))
            .tools(toolgate::builtin::files())
            .files(toolgate::MemoryFs::new([("a.txt", "x")]))
            .policy(rule)
            .policy(toolgate::policy::ReadBeforeWrite::default())
            .build()
            .unwrap()
    };
    let gate = crate::support::gate().redact("[0-9]+").unwrap().redact("[0-9a-f]{9,}").unwrap().agent(agent("other")).build().unwrap();
    let s = gate.session("a", "alice", "s");
    for (tool, args, expected) in [
        ("pay", json!({}), "step-1"),
        ("read_file", json!({"path": "a.txt"}), "ok"),
        ("write_file", json!({"path": "a.txt", "content": "y"}), "ok"),
        ("tool-4111", json!({}), "unknown_tool"),
    ] {
        let answer = s.call(tool, args).await;
        assert_eq!(answer.outcome.error().map_or("ok", |error| &error.code), expected, "{tool}");
    }
    let rows = s.rows().await.unwrap();
    assert_eq!(rows[0].code(), Some("step-1"));
    let replay = Replay::of(&gate).unwrap();
    for row in &rows {
        assert_eq!(replay.decide(row).await, Compared::Same, "{row:?}");
    }
    // Of a tool that is new nobody knows whether it was the one that was meant.
    let known = Replay::new([agent("tool-4111")]).unwrap();
    let compared = known.decide(&rows[3]).await;
    assert!(matches!(&compared, Compared::Undecidable(why) if why.contains("name was redacted")), "{compared:?}");
    assert_eq!(Replay::new([agent("tool-")]).unwrap().decide(&rows[3]).await, Compared::Same);
    // What a rule remembers and was redacted decides nothing.
    let mut row = (*rows[2]).clone();
    let mark = row.facts.marks.values_mut().next().unwrap();
    *mark = Some(json!("[redacted 0123]"));
    assert!(matches!(replay.decide(&row).await, Compared::Undecidable(_)));
}

/// Half a secret would be found by no pattern.
#[tokio::test]
async fn a_result_is_not_cut_in_the_middle_of_a_secret() {
    let long = || format!("{}4111-1111-1111-1111{}", "x".repeat(4090), "y".repeat(100_000));
    let tell = Tool::dynamic("tell", "Tells.", json!({"type": "object"}), move |_, _| async move { Ok(json!(long())) });
    let agent = Agent::builder("a").tool(tell.effect(Effect::Read)).tool(toolgate::builtin::read_output()).build().unwrap();
    let s = crate::support::gate().redact(r"\d{4}(-\d{4}){3}").unwrap().agent(agent).built().session("a", "alice", "s");
    let answer = s.call("tell", json!({})).await;
    let row = s.rows().await.unwrap().remove(0);
    assert_eq!(row.outcome.success().unwrap().value, json!("x".repeat(4090)));
    // Whoever reads on misses nothing.
    let handle = answer.outcome.success().and_then(|output| output.stored.as_ref()).unwrap().handle.clone();
    let page = s.call("read_output", json!({"handle": handle, "offset": 4090})).await;
    let text = page.outcome.success().unwrap().value["text"].as_str().unwrap().to_owned();
    assert!(text.starts_with("4111-1111-1111-1111yyy"), "{text}");
    assert!(!serde_json::to_string(&s.rows().await.unwrap()).unwrap().contains("4111"));
}
