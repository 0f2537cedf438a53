//! What must hold whatever is called: no run without a permit, no change by a failure, one row a
//! call, and what was judged is byte for byte what runs.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use proptest::prelude::*;
use serde_json::{Value, json};
use toolgate::hook::{BeforeHookResult, Hook, HookCall, HookError};
use toolgate::policy::{Policy, PolicyError, PolicyInput, Verdict};
use toolgate::{
    AgentBuilder, CallId, CheckedArguments, Decision, Effect, ErrorCategory, Failure, Handler,
    HostFs, Permit, Tool, ToolContext, ToolError,
};
use toolgate_json::{JsonBounds, parse, to_canonical_bytes};

use crate::support::TestWorld;

/// What the policy judged and what the handler was given, in their order.
#[derive(Debug, Clone, PartialEq)]
enum ObservedStep {
    Checked(Vec<u8>),
    Ran { permitted: Vec<u8>, given: Vec<u8> },
}

impl ObservedStep {
    /// A run with nothing but these arguments.
    fn run_with(arguments: &[u8]) -> Self {
        Self::Ran { permitted: arguments.to_vec(), given: arguments.to_vec() }
    }
}

#[derive(Clone, Default)]
struct StepLog(Arc<Mutex<Vec<ObservedStep>>>);

impl StepLog {
    fn record(&self, moment: ObservedStep) {
        self.0.lock().unwrap().push(moment);
    }

    /// What was seen since this was asked last.
    fn take_new(&self) -> Vec<ObservedStep> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

struct RecordingHandler(StepLog);

#[async_trait]
impl Handler for RecordingHandler {
    async fn run(
        &self,
        permit: &Permit,
        ctx: ToolContext,
        arguments: &CheckedArguments,
    ) -> Result<Value, Failure> {
        self.0.record(ObservedStep::Ran {
            permitted: permit.arguments().bytes().to_vec(),
            given: arguments.bytes().to_vec(),
        });
        assert_eq!(permit.call_id(), ctx.call_id());
        ctx.set_slice("last", arguments.value())?;
        if arguments.value()["fail"] == true {
            Err(Failure::business("told_to", "told to fail"))
        } else {
            Ok(arguments.value().clone())
        }
    }
}

struct RecordingPolicy(StepLog);

impl Policy for RecordingPolicy {
    fn name(&self) -> &str {
        "judge"
    }
    fn check(&self, ask: &PolicyInput<'_>) -> Result<Verdict, PolicyError> {
        if ask.arguments.value()["deny"] == true {
            return Ok(Verdict::deny(ToolError::new(
                ErrorCategory::Business,
                "told_to_deny",
                "no",
            )));
        }
        self.0.record(ObservedStep::Checked(ask.arguments.bytes().to_vec()));
        Ok(if ask.arguments.value()["ask"] == true {
            Verdict::ask("told to ask")
        } else {
            Verdict::allow()
        })
    }
}

/// Rewrites the arguments into what it is given.
#[derive(Clone, Default)]
struct RewritingHook(Arc<Mutex<Option<Value>>>);

#[async_trait]
impl Hook for RewritingHook {
    fn name(&self) -> &str {
        "rewriter"
    }
    async fn before(&self, _: HookCall<'_>) -> Result<BeforeHookResult, HookError> {
        Ok(BeforeHookResult {
            input: self.0.lock().unwrap().clone(),
            ..BeforeHookResult::default()
        })
    }
}

fn recording_world(seen: &StepLog, more: impl FnOnce(AgentBuilder) -> AgentBuilder) -> TestWorld {
    let flag = || json!({"type": "boolean"});
    let properties = json!({"deny": flag(), "fail": flag(), "ask": flag(), "n": {"type": "integer"}, "data": {}});
    let schema = json!({"type": "object", "properties": properties});
    let tool =
        Tool::with_handler("watch", "Watches.", schema, Arc::new(RecordingHandler(seen.clone())))
            .effect(Effect::Write);
    let judge = RecordingPolicy(seen.clone());
    TestWorld::without_replay_check(|agent| more(agent.tool(tool).tool_policy("watch", judge)))
}

fn any_data() -> impl Strategy<Value = String> {
    prop_oneof![
        "[0-9]{1,25}(\\.[0-9]{1,12})?(e-?[0-9]{1,2})?"
            .prop_map(|n| n.trim_start_matches('0').to_owned())
            .prop_filter("a number", |n| n.starts_with(|c: char| c.is_ascii_digit())),
        any::<String>().prop_map(|s| serde_json::to_string(&s).unwrap()),
        Just(r#"{"b": 1.50, "a": [1e2, -0.0, null, true]}"#.to_owned()),
    ]
}

/// Arguments with something after them, which may make them worthless.
fn call_with(junk: &'static [&'static str]) -> impl Strategy<Value = (String, &'static str)> {
    (any::<bool>(), any::<bool>(), any_data(), prop::sample::select(junk)).prop_map(
        |(deny, fail, data, junk)| {
            (format!(r#"{{"deny": {deny}, "fail": {fail}, "data": {data}{junk}}}"#), junk)
        },
    )
}

fn any_call() -> impl Strategy<Value = String> {
    call_with(&["", ", \"unknown\": 1", ", \"fail\": 3", ", \"data\": 1", "}"])
        .prop_map(|(text, _)| text)
}

/// What a hook may make of the arguments, and whether it fits the schema.
fn any_rewrite() -> impl Strategy<Value = Option<(String, bool)>> {
    let object = call_with(&["", "", ", \"unknown\": 1", ", \"n\": \"one\""])
        .prop_map(|(text, junk)| (text, junk.is_empty()));
    prop::option::of(prop_oneof![4 => object, 1 => Just(("[1]".to_owned(), false))])
}

/// The one spelling of a text.
fn canonical_bytes(text: &str) -> Vec<u8> {
    to_canonical_bytes(&parse(text.as_bytes(), &JsonBounds::default()).unwrap())
}

/// The arguments in the only row of a call.
async fn recorded_arguments(
    world: &TestWorld,
    call: CallId,
) -> Result<(Decision, Vec<u8>), TestCaseError> {
    let rows = world.session.rows().await.unwrap();
    let row = rows.iter().filter(|row| row.call == call).collect::<Vec<_>>();
    prop_assert_eq!(row.len(), 1);
    Ok((row[0].decision, to_canonical_bytes(&row[0].arguments)))
}

pub(crate) fn block_on(
    work: impl Future<Output = Result<(), TestCaseError>>,
) -> Result<(), TestCaseError> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

pub(crate) fn proptest_config(short: u32, long: u32) -> ProptestConfig {
    let cases = if std::env::var_os("TOOLGATE_SOAK").is_some() { long } else { short };
    ProptestConfig { cases, ..ProptestConfig::default() }
}

async fn check_calls(calls: &[String]) -> Result<(), TestCaseError> {
    let seen = StepLog::default();
    let world = recording_world(&seen, |agent| agent);
    let mut model: Option<Value> = None;
    for text in calls {
        let before = world.fingerprint().await;
        let answer = world.session.call("watch", text.as_str()).await;
        let (decision, arguments) = recorded_arguments(&world, answer.call).await?;
        match answer.outcome.success() {
            Some(_) => {
                prop_assert_eq!(decision, Decision::Succeeded);
                model = Some(serde_json::from_slice(&arguments).unwrap());
            }
            None => prop_assert_eq!(world.fingerprint().await, before),
        }
        prop_assert_eq!(world.session.slice("last").await.unwrap(), model.clone());
        // What ran was judged just before, with the same bytes.
        let now = seen.take_new();
        if let Some(ObservedStep::Checked(judged)) = now.first() {
            prop_assert_eq!(
                &to_canonical_bytes(&serde_json::from_slice::<Value>(judged).unwrap()),
                judged
            );
            let wanted =
                vec![ObservedStep::Checked(judged.clone()), ObservedStep::run_with(judged)];
            prop_assert_eq!(&now, &wanted);
        } else {
            prop_assert!(now.is_empty(), "{:?}", now);
        }
    }
    prop_assert_eq!(world.session.rows().await.unwrap().len(), calls.len());
    Ok(())
}

async fn check_rewrites(calls: &[(String, Option<(String, bool)>)]) -> Result<(), TestCaseError> {
    let (seen, hook) = (StepLog::default(), RewritingHook::default());
    let world = recording_world(&seen, |agent| agent.hook(hook.clone()));
    for (asked, rewrite) in calls {
        *hook.0.lock().unwrap() =
            rewrite.as_ref().map(|(text, _)| serde_json::from_str(text).unwrap());
        let before = world.fingerprint().await;
        let answer = world.session.call("watch", asked.as_str()).await;
        let (text, fits) = rewrite.as_ref().map_or((asked, true), |(text, fits)| (text, *fits));
        let (now, arguments) = (seen.take_new(), recorded_arguments(&world, answer.call).await?.1);
        let code = answer.outcome.error().map(|error| &*error.code);
        match code {
            None | Some("told_to") => {
                let wanted = canonical_bytes(text);
                prop_assert!(fits, "{} ran", text);
                prop_assert_eq!(
                    now,
                    vec![ObservedStep::Checked(wanted.clone()), ObservedStep::run_with(&wanted)]
                );
                prop_assert_eq!(arguments, wanted, "the row holds something else");
            }
            Some("told_to_deny") => prop_assert!(
                fits && text.contains(r#""deny": true"#) && now.is_empty(),
                "{} {:?}",
                text,
                now
            ),
            Some("hook_failed") => prop_assert!(!fits && now.is_empty(), "{} {:?}", text, now),
            Some("loop_detected") => prop_assert!(now.is_empty(), "{:?}", now),
            other => return Err(TestCaseError::fail(format!("{other:?}: {asked} {rewrite:?}"))),
        }
        if code.is_some() {
            prop_assert_eq!(world.fingerprint().await, before);
        }
    }
    Ok(())
}

/// One request to a person: a number, data, what the person says, and whether the call then names
/// the request.
type ApprovalCase = (i64, String, Option<bool>, bool);

fn any_request() -> impl Strategy<Value = ApprovalCase> {
    let data = prop_oneof![3 => Just("1.50".to_owned()), 1 => any_data()];
    (0..2i64, data, prop::option::of(any::<bool>()), any::<bool>())
}

async fn check_approvals(requests: &[ApprovalCase]) -> Result<(), TestCaseError> {
    let seen = StepLog::default();
    let world = recording_world(&seen, |agent| agent);
    for (n, data, said, by_name) in requests {
        let text = format!(r#"{{"data": {data}, "n": {n}, "ask": true}}"#);
        let asked = world.session.call("watch", text.as_str()).await;
        let approval = asked.outcome.error().and_then(|error| error.approval.clone());
        prop_assert!(
            !seen.take_new().iter().any(|moment| matches!(moment, ObservedStep::Ran { .. })),
            "asking ran it"
        );
        // It was refused for good before, or is a loop by now.
        let Some(approval) = approval else { continue };
        if let Some(yes) = *said {
            prop_assert!(world.gate.answer_approval(&approval.id, yes, "bob").await.unwrap());
        }
        for _ in 0..2 {
            let repeated = world.session.prepare("watch", text.as_str());
            let named = world
                .session
                .prepare("watch", r#"{"n": 99, "data": "something else"}"#)
                .approval(&approval.id);
            world.gate.call(if *by_name { named } else { repeated }).await;
        }
        // One answer is one run, with what the person saw.
        let runs: Vec<ObservedStep> = seen
            .take_new()
            .into_iter()
            .filter(|moment| matches!(moment, ObservedStep::Ran { .. }))
            .collect();
        let wanted = if *said == Some(true) {
            vec![ObservedStep::run_with(&canonical_bytes(&text))]
        } else {
            Vec::new()
        };
        prop_assert_eq!(runs, wanted);
    }
    Ok(())
}

/// What is in files, by their paths.
type FileContents = BTreeMap<String, Vec<u8>>;
/// Files to write, or to remove where there is nothing to write, and whether the call then fails.
type FileEdits = (Vec<(&'static str, Option<String>)>, bool);

/// `b` cannot be a file where there is something below it: then a call fails half-way by itself.
static EDIT_PATHS: [&str; 5] = ["kept.txt", "a.txt", "b", "b/c.txt", "b/d/e.txt"];

fn any_edit() -> impl Strategy<Value = FileEdits> {
    let change =
        (prop::sample::select(EDIT_PATHS.as_slice()), prop::option::weighted(0.7, "[a-z\n]{0,20}"));
    (prop::collection::vec(change, 0..6), any::<bool>())
}

fn edit_tool() -> Tool {
    let change = json!({"type": "object", "properties": {"path": {"type": "string"}, "content": {"type": "string"}}});
    let properties = json!({"n": {"type": "integer"}, "fail": {"type": "boolean"}, "changes": {"type": "array", "items": change}});
    let schema = json!({"type": "object", "properties": properties});
    Tool::dynamic("edit", "Edits files.", schema, |ctx: ToolContext, args: Value| async move {
        let files = ctx.files()?;
        for change in args["changes"].as_array().into_iter().flatten() {
            let path = change["path"].as_str().unwrap_or_default();
            match change["content"].as_str() {
                Some(content) => files.write(path, content.as_bytes())?,
                None => files.remove(path)?,
            }
        }
        if args["fail"] == true {
            Err(Failure::business("told_to", "told to fail"))
        } else {
            Ok(json!("done"))
        }
    })
    .effect(Effect::Write)
    .local()
    .open()
}

/// A success leaves what it wrote, and everything else leaves what was there.
async fn check_edits(
    world: &TestWorld,
    look: impl Fn() -> FileContents,
    edits: &[FileEdits],
) -> Result<(), TestCaseError> {
    let mut model = look();
    for (n, (changes, fail)) in edits.iter().enumerate() {
        let written = |(path, content): &(&str, Option<String>)| match content {
            Some(content) => json!({"path": path, "content": content}),
            None => json!({ "path": path }),
        };
        let list: Vec<Value> = changes.iter().map(written).collect();
        let answer =
            world.session.call("edit", json!({"n": n, "fail": fail, "changes": list})).await;
        match answer.outcome.error() {
            Some(error) => prop_assert!(error.effects.is_clean(), "{:?}", error),
            None => {
                prop_assert!(!fail);
                for (path, content) in changes {
                    match content {
                        Some(content) => {
                            drop(model.insert((*path).to_owned(), content.clone().into_bytes()))
                        }
                        None => drop(model.remove(*path)),
                    }
                }
            }
        }
        prop_assert_eq!(look(), model.clone());
    }
    Ok(())
}

/// Every file below a directory.
fn collect_files(below: &Path, root: &Path, found: &mut FileContents) {
    for entry in fs::read_dir(below).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect_files(&path, root, found);
        } else {
            found.insert(
                path.strip_prefix(root).unwrap().to_str().unwrap().to_owned(),
                fs::read(&path).unwrap(),
            );
        }
    }
}

proptest! {
    #![proptest_config(proptest_config(64, 5_000))]

    #[test]
    fn call_runs_with_permit_and_writes_one_row(calls in prop::collection::vec(any_call(), 1..12)) {
        block_on(check_calls(&calls))?;
    }
}

proptest! {
    #![proptest_config(proptest_config(32, 2_000))]

    #[test]
    fn rewritten_arguments_are_checked_run_and_recorded(
        calls in prop::collection::vec((call_with(&[""]).prop_map(|(text, _)| text), any_rewrite()), 1..8)
    ) {
        block_on(check_rewrites(&calls))?;
    }

    #[test]
    fn only_approved_arguments_run_and_only_once(requests in prop::collection::vec(any_request(), 1..6)) {
        block_on(check_approvals(&requests))?;
    }

    #[test]
    fn failed_call_leaves_memory_files_unchanged(edits in prop::collection::vec(any_edit(), 1..8)) {
        block_on(async {
            let world = TestWorld::without_replay_check(|agent| agent.tool(edit_tool()));
            let there = |path: &&str| world.files.get(path).map(|content| ((*path).to_owned(), content.to_vec()));
            check_edits(&world, || EDIT_PATHS.iter().filter_map(there).collect(), &edits).await
        })?;
    }
}

proptest! {
    // Each change is synced.
    #![proptest_config(proptest_config(12, 500))]

    #[test]
    fn failed_call_leaves_host_files_unchanged(edits in prop::collection::vec(any_edit(), 1..8)) {
        let (root, journal) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::write(root.path().join("kept.txt"), "as it was").unwrap();
        let look = || {
            let mut found = FileContents::new();
            collect_files(root.path(), root.path(), &mut found);
            found
        };
        block_on(async {
            let files = HostFs::open(root.path(), journal.path(), |_| Ok(false)).unwrap();
            check_edits(&TestWorld::without_replay_check(|agent| agent.files(files).tool(edit_tool())), look, &edits).await
        })?;
        let left: Vec<_> = fs::read_dir(journal.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        prop_assert_eq!(left, ["lock"]);
    }
}
