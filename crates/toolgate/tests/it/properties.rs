//! Tests invariants of every call.
//!
//! No call runs without a permit, a failure changes nothing, each call has one row, and the checked
//! bytes are the executed bytes.

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

/// Records the arguments that a policy checked or a handler received.
#[derive(Debug, Clone, PartialEq)]
enum ObservedStep {
    Checked(Vec<u8>),
    Ran { permitted: Vec<u8>, received: Vec<u8> },
}

impl ObservedStep {
    /// Builds the step of a run with these arguments.
    fn run_with(arguments: &[u8]) -> Self {
        Self::Ran { permitted: arguments.to_vec(), received: arguments.to_vec() }
    }
}

#[derive(Clone, Default)]
struct StepLog(Arc<Mutex<Vec<ObservedStep>>>);

impl StepLog {
    fn record(&self, step: ObservedStep) {
        self.0.lock().unwrap().push(step);
    }

    /// Returns the steps since the last call of this function.
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
            received: arguments.bytes().to_vec(),
        });
        assert_eq!(permit.call_id(), ctx.call_id());
        ctx.set_slice("last", arguments.value())?;
        if arguments.value()["fail"] == true {
            Err(Failure::business("requested_failure", "requested by the test"))
        } else {
            Ok(arguments.value().clone())
        }
    }
}

struct RecordingPolicy(StepLog);

impl Policy for RecordingPolicy {
    fn name(&self) -> &str {
        "recorder"
    }
    fn check(&self, ask: &PolicyInput<'_>) -> Result<Verdict, PolicyError> {
        if ask.arguments.value()["deny"] == true {
            return Ok(Verdict::deny(ToolError::new(
                ErrorCategory::Business,
                "requested_denial",
                "no",
            )));
        }
        self.0.record(ObservedStep::Checked(ask.arguments.bytes().to_vec()));
        Ok(if ask.arguments.value()["ask"] == true {
            Verdict::ask("requested by the test")
        } else {
            Verdict::allow()
        })
    }
}

/// Replaces the arguments with the stored value, if there is one.
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

fn recording_world(
    step_log: &StepLog,
    configure_agent: impl FnOnce(AgentBuilder) -> AgentBuilder,
) -> TestWorld {
    let flag = || json!({"type": "boolean"});
    let properties = json!({"deny": flag(), "fail": flag(), "ask": flag(), "n": {"type": "integer"}, "data": {}});
    let schema = json!({"type": "object", "properties": properties});
    let tool = Tool::with_handler(
        "watch",
        "Watches.",
        schema,
        Arc::new(RecordingHandler(step_log.clone())),
    )
    .effect(Effect::Write);
    let policy = RecordingPolicy(step_log.clone());
    TestWorld::without_replay_check(|agent| {
        configure_agent(agent.tool(tool).tool_policy("watch", policy))
    })
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

/// Generates arguments with a suffix that can make them invalid.
fn call_with(suffix: &'static [&'static str]) -> impl Strategy<Value = (String, &'static str)> {
    (any::<bool>(), any::<bool>(), any_data(), prop::sample::select(suffix)).prop_map(
        |(deny, fail, data, suffix)| {
            (format!(r#"{{"deny": {deny}, "fail": {fail}, "data": {data}{suffix}}}"#), suffix)
        },
    )
}

fn any_call() -> impl Strategy<Value = String> {
    call_with(&["", ", \"unknown\": 1", ", \"fail\": 3", ", \"data\": 1", "}"])
        .prop_map(|(text, _)| text)
}

/// Generates an optional rewrite by a hook, and whether the rewrite matches the schema.
fn any_rewrite() -> impl Strategy<Value = Option<(String, bool)>> {
    let object = call_with(&["", "", ", \"unknown\": 1", ", \"n\": \"one\""])
        .prop_map(|(text, suffix)| (text, suffix.is_empty()));
    prop::option::of(prop_oneof![4 => object, 1 => Just(("[1]".to_owned(), false))])
}

/// Canonicalizes a JSON text.
fn canonical_bytes(text: &str) -> Vec<u8> {
    to_canonical_bytes(&parse(text.as_bytes(), &JsonBounds::default()).unwrap())
}

/// Returns the decision and the arguments in the only row of a call.
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
    let step_log = StepLog::default();
    let world = recording_world(&step_log, |agent| agent);
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
        // Each run follows a check of the same bytes.
        let steps = step_log.take_new();
        if let Some(ObservedStep::Checked(checked)) = steps.first() {
            prop_assert_eq!(
                &to_canonical_bytes(&serde_json::from_slice::<Value>(checked).unwrap()),
                checked
            );
            let expected =
                vec![ObservedStep::Checked(checked.clone()), ObservedStep::run_with(checked)];
            prop_assert_eq!(&steps, &expected);
        } else {
            prop_assert!(steps.is_empty(), "{:?}", steps);
        }
    }
    prop_assert_eq!(world.session.rows().await.unwrap().len(), calls.len());
    Ok(())
}

async fn check_rewrites(calls: &[(String, Option<(String, bool)>)]) -> Result<(), TestCaseError> {
    let (step_log, hook) = (StepLog::default(), RewritingHook::default());
    let world = recording_world(&step_log, |agent| agent.hook(hook.clone()));
    for (original, rewrite) in calls {
        *hook.0.lock().unwrap() =
            rewrite.as_ref().map(|(text, _)| serde_json::from_str(text).unwrap());
        let before = world.fingerprint().await;
        let answer = world.session.call("watch", original.as_str()).await;
        let (text, fits) = rewrite.as_ref().map_or((original, true), |(text, fits)| (text, *fits));
        let (steps, arguments) =
            (step_log.take_new(), recorded_arguments(&world, answer.call).await?.1);
        let code = answer.outcome.error().map(|error| &*error.code);
        match code {
            None | Some("requested_failure") => {
                let expected = canonical_bytes(text);
                prop_assert!(fits, "{} ran", text);
                prop_assert_eq!(
                    steps,
                    vec![
                        ObservedStep::Checked(expected.clone()),
                        ObservedStep::run_with(&expected)
                    ]
                );
                prop_assert_eq!(arguments, expected, "the row has other arguments");
            }
            Some("requested_denial") => prop_assert!(
                fits && text.contains(r#""deny": true"#) && steps.is_empty(),
                "{} {:?}",
                text,
                steps
            ),
            Some("hook_failed") => prop_assert!(!fits && steps.is_empty(), "{} {:?}", text, steps),
            Some("loop_detected") => prop_assert!(steps.is_empty(), "{:?}", steps),
            other => return Err(TestCaseError::fail(format!("{other:?}: {original} {rewrite:?}"))),
        }
        if code.is_some() {
            prop_assert_eq!(world.fingerprint().await, before);
        }
    }
    Ok(())
}

/// Holds one approval request: a number, data, the answer, and whether the next call names the
/// approval.
type ApprovalCase = (i64, String, Option<bool>, bool);

fn any_request() -> impl Strategy<Value = ApprovalCase> {
    let data = prop_oneof![3 => Just("1.50".to_owned()), 1 => any_data()];
    (0..2i64, data, prop::option::of(any::<bool>()), any::<bool>())
}

async fn check_approvals(requests: &[ApprovalCase]) -> Result<(), TestCaseError> {
    let step_log = StepLog::default();
    let world = recording_world(&step_log, |agent| agent);
    for (n, data, answer, by_name) in requests {
        let text = format!(r#"{{"data": {data}, "n": {n}, "ask": true}}"#);
        let first = world.session.call("watch", text.as_str()).await;
        let approval = first.outcome.error().and_then(|error| error.approval.clone());
        prop_assert!(
            !step_log.take_new().iter().any(|step| matches!(step, ObservedStep::Ran { .. })),
            "the request ran the tool"
        );
        // The call was denied before, or is a loop.
        let Some(approval) = approval else { continue };
        if let Some(approved) = *answer {
            prop_assert!(world.gate.answer_approval(&approval.id, approved, "bob").await.unwrap());
        }
        for _ in 0..2 {
            let repeated = world.session.prepare("watch", text.as_str());
            let named = world
                .session
                .prepare("watch", r#"{"n": 99, "data": "something else"}"#)
                .approval(&approval.id);
            world.gate.call(if *by_name { named } else { repeated }).await;
        }
        // One approval permits one run with the shown arguments.
        let runs: Vec<ObservedStep> = step_log
            .take_new()
            .into_iter()
            .filter(|step| matches!(step, ObservedStep::Ran { .. }))
            .collect();
        let expected = if *answer == Some(true) {
            vec![ObservedStep::run_with(&canonical_bytes(&text))]
        } else {
            Vec::new()
        };
        prop_assert_eq!(runs, expected);
    }
    Ok(())
}

/// Maps paths to file contents.
type FileContents = BTreeMap<String, Vec<u8>>;
/// Lists files to write, or to remove if the content is `None`, and whether the call then fails.
type FileEdits = (Vec<(&'static str, Option<String>)>, bool);

/// Contains `b` as a file and as a directory, so that some calls fail half-way.
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
            Err(Failure::business("requested_failure", "requested by the test"))
        } else {
            Ok(json!("done"))
        }
    })
    .effect(Effect::Write)
    .local()
    .open()
}

/// Checks that a success keeps its edits and a failure changes nothing.
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

/// Collects every file below a directory.
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
            let existing = |path: &&str| world.files.get(path).map(|content| ((*path).to_owned(), content.to_vec()));
            check_edits(&world, || EDIT_PATHS.iter().filter_map(existing).collect(), &edits).await
        })?;
    }
}

proptest! {
    // Few cases, because each change is synced to disk.
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
