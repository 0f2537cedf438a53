//! Gate 12: normalizes the result, runs hooks, checks the schema, masks secrets, truncates, and
//! derives evidence.

use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use serde_json::Value;

use crate::call::CallId;
use crate::call::error::ToolError;
use crate::call::error_code;
use crate::call::outcome::{CallOutput, StoredOutputRef};
use crate::hook::{HookCall, HookError};
use crate::ledger::row::Gate;
use crate::pipeline::Toolgate;
use crate::pipeline::admission::AdmittedCall;
use crate::pipeline::call_state::CallState;
use crate::pipeline::gates::run::RunResult;
use crate::pipeline::mask_secrets::SecretValues;
use crate::policy::{EnforcementMode, PolicyInput, SuccessfulCall};
use crate::redact::Redactor;
use crate::session::state::{Evidence, EvidenceOrigin, SessionChanges};
use crate::tool::Failure;
use crate::tool::context::CallTransaction;
use toolgate_json;
use toolgate_json::JsonBounds;

/// Bounds of every tool result. A ledger row that contains the result must stay readable.
pub(crate) const OUTPUT_BOUNDS: JsonBounds =
    JsonBounds { bytes: 64 << 20, depth: 100, nodes: 2_000_000 };
/// Size of the part of a truncated result that the model sees at once.
const MAX_PREVIEW_BYTES: usize = 4 << 10;

/// A result that may be returned, and the data that commits with it.
pub(crate) struct ShapedResult {
    pub(crate) output: CallOutput,
    pub(crate) stored: Option<(String, Arc<str>)>,
    pub(crate) changes: SessionChanges,
    pub(crate) digest: Option<toolgate_json::Digest>,
    /// The untruncated result, if provenance rules need it.
    pub(crate) untruncated: Option<Value>,
}

/// A finished run, with its result in the shape that the caller gets.
pub(crate) struct ShapedRun {
    pub(crate) result: RunOutcome,
    pub(crate) txn: CallTransaction,
    /// A file could not be rolled back.
    pub(crate) is_unclean: bool,
    /// The tool was started.
    pub(crate) has_started: bool,
}

/// Result of a run after shaping.
pub(crate) enum RunOutcome {
    Success(Box<ShapedResult>),
    /// The tool succeeded, but its result may not be returned.
    InvalidResult(ToolError),
    Failure(Failure),
}

/// Shapes the result of a run. A failure passes unchanged.
pub(crate) async fn run(
    gate: &Toolgate,
    ran: RunResult,
    admitted: &AdmittedCall,
    call_state: &mut CallState,
) -> ShapedRun {
    let RunResult { result, mut txn, is_empty, is_unclean, has_started } = ran;
    let result = match result {
        Ok(value) => {
            call_state.enter_gate(Gate::Shape);
            match shape_result(gate, value, is_empty, admitted, &mut txn, call_state).await {
                Ok(shaped) => RunOutcome::Success(Box::new(shaped)),
                Err(error) => RunOutcome::InvalidResult(error),
            }
        }
        Err(failure) => RunOutcome::Failure(failure),
    };
    ShapedRun { result, txn, is_unclean, has_started }
}

/// Normalizes the result, runs hooks, checks the schema, masks secrets, truncates, and
/// derives evidence.
async fn shape_result(
    gate: &Toolgate,
    mut value: Value,
    empty: bool,
    admitted: &AdmittedCall,
    txn: &mut CallTransaction,
    call_state: &mut CallState,
) -> Result<ShapedResult, ToolError> {
    let tool = admitted.authorization.tool();
    if let Some(why) = toolgate_json::find_exceeded_bound_of_value(&value, &OUTPUT_BOUNDS) {
        toolgate_json::drop_iteratively(value);
        return Err(ToolError::from_code(
            error_code::INVALID_RESULT,
            format!("the result of `{}` is too large: {why}", tool.spec.name),
        ));
    }
    if !empty {
        crate::normalize::apply_rules(&tool.spec.normalize, &mut value).map_err(|e| {
            let what = if tool.secrets.is_empty() {
                e.to_string()
            } else {
                format!("the value at `{}` {}", e.path, e.reason)
            };
            ToolError::from_code(
                error_code::INVALID_RESULT,
                format!("cannot normalize the result of `{}`: {what}", tool.spec.name),
            )
        })?;
    }
    run_after_hooks(&mut value, admitted, call_state).await?;
    if let Some(schema) = tool.output.as_ref().filter(|_| !empty) {
        schema.check(&tool.spec.name, &value).map_err(|invalid| {
            let mut error = ToolError::from_code(
                error_code::INVALID_RESULT,
                format!("the result does not match its schema: {}", invalid.message),
            );
            error.errors = invalid.errors;
            error
        })?;
    }
    if !tool.secrets.is_empty() {
        value = gate.0.redactor.redact(&value, &tool.secrets);
    }
    let changes = collect_changes(&value, empty, admitted, txn, call_state)?;
    let digest = tool.spec.polling.map(|_| toolgate_json::digest_of(&value));
    let mut output = CallOutput {
        message: txn.message.take(),
        value,
        hidden: txn.is_value_hidden,
        empty,
        ..CallOutput::default()
    };
    let max_bytes = tool.spec.max_output.unwrap_or(admitted.agent.max_output);
    let untruncated = (admitted.agent.tracked_sources.is_some()
        && !is_certainly_small(&output.value, max_bytes))
    .then(|| output.value.clone());
    let stored = truncate_output(&mut output, max_bytes, &gate.0.redactor);
    Ok(ShapedResult { output, stored, changes, digest, untruncated })
}

async fn run_after_hooks(
    value: &mut Value,
    admitted: &AdmittedCall,
    call_state: &mut CallState,
) -> Result<(), ToolError> {
    let tool = admitted.authorization.tool();
    for hook in &tool.hooks {
        let ran_ms = call_state.latency().nanos_at(Gate::Run) / 1_000_000;
        let call = HookCall {
            call: call_state.id,
            key: &admitted.key,
            tool: &tool.spec.name,
            input: admitted.authorization.arguments().value(),
        };
        let current: &Value = value;
        let work = futures_util::FutureExt::catch_unwind(AssertUnwindSafe(async move {
            hook.after(call, current, ran_ms).await
        }));
        let answer = match tokio::time::timeout(hook.timeout(), work).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err(HookError("it panicked".to_owned())),
            Err(_) => Err(HookError(format!("it gave no answer within {:?}", hook.timeout()))),
        };
        match answer {
            Ok(Some(rewritten)) => {
                if let Some(why) =
                    toolgate_json::find_exceeded_bound_of_value(&rewritten, &OUTPUT_BOUNDS)
                {
                    toolgate_json::drop_iteratively(rewritten);
                    call_state.rule = Some(hook.name().to_owned());
                    return Err(ToolError::from_code(
                        error_code::HOOK_FAILED,
                        format!(
                            "the hook `{}` rewrote the result, and it is too large: {why}",
                            hook.name()
                        ),
                    ));
                }
                *value = rewritten;
            }
            Ok(None) => {}
            Err(fault) => {
                call_state.rule = Some(hook.name().to_owned());
                let mut secrets =
                    SecretValues::from_arguments(admitted.authorization.arguments().value(), tool);
                secrets.add_document(value, tool);
                let fault = secrets.mask_text(&fault.0);
                return Err(ToolError::from_code(
                    error_code::HOOK_FAILED,
                    format!(
                        "the hook `{}` failed after the tool had run, so its result is withheld: {fault}",
                        hook.name()
                    ),
                ));
            }
        }
    }
    Ok(())
}

/// Returns the session changes of a success: slices, evidence and policy marks.
fn collect_changes(
    value: &Value,
    empty: bool,
    admitted: &AdmittedCall,
    txn: &mut CallTransaction,
    call_state: &mut CallState,
) -> Result<SessionChanges, ToolError> {
    let tool = admitted.authorization.tool();
    let arguments = admitted.authorization.arguments();
    let input =
        PolicyInput::new(call_state.id, &admitted.key, &tool.spec, arguments, &call_state.facts);
    let revoked = tool.revoked_evidence(&call_state.arguments, Some(value));
    let mut marks = Vec::new();
    for policy in &tool.observers {
        let result = catch_unwind(AssertUnwindSafe(|| {
            policy.on_result(&SuccessfulCall {
                input,
                value,
                file_accesses: &txn.observations,
                revoked: &revoked,
            })
        }));
        match result {
            Ok(Ok(mut new_marks)) => marks.append(&mut new_marks),
            // A failure of a rule in observe mode must not affect the call.
            _ if policy.mode() == EnforcementMode::Observe => {
                tracing::warn!(
                    policy = policy.name(),
                    "a rule in observe mode failed in `on_result`"
                )
            }
            Ok(Err(fault)) => {
                call_state.rule = Some(policy.name().to_owned());
                return Err(ToolError::from_code(
                    error_code::POLICY_FAULT,
                    format!("the policy `{}` cannot record the result: {fault}", policy.name()),
                ));
            }
            Err(_) => {
                call_state.rule = Some(policy.name().to_owned());
                return Err(ToolError::from_code(
                    error_code::POLICY_FAULT,
                    format!("the policy `{}` panicked", policy.name()),
                ));
            }
        }
    }
    let entities = tool.spec.entities.iter().zip(&tool.is_entity_declared).filter_map(
        |((name, path), declared)| {
            let argument = path.get(&call_state.arguments).filter(|_| *declared);
            proven_entity(argument, path.get(value)).map(|entity| {
                (Arc::clone(name), toolgate_json::with_canonical_numbers(entity.clone()))
            })
        },
    );
    let fields = tool.spec.proves.iter().filter_map(|path| {
        path.get(value)
            .map(|field| (path.to_string(), toolgate_json::with_canonical_numbers(field.clone())))
    });
    // Reported evidence is as old as the call, so evidence that others have revoked since stays
    // revoked. If the tool revokes its own evidence, it did so at admission, after its writes
    // were recorded.
    let own_revocations = if tool.spec.revokes.iter().any(|(of, _)| *of == tool.spec.name) {
        tool.revoked_evidence(&call_state.arguments, None).len()
            + usize::from(admitted.agent.tracked_sources.is_some())
    } else {
        0
    };
    let stamp = if admitted.is_reported {
        call_state.evidence_stamp.saturating_add(own_revocations as u64 + 1)
    } else {
        u64::MAX
    };
    let evidence = Evidence {
        tool: Arc::clone(&tool.spec.name),
        entities: entities.collect(),
        fields: Value::Object(fields.collect()),
        at: call_state.started,
        origin: if admitted.is_reported {
            EvidenceOrigin::Reported
        } else {
            EvidenceOrigin::RunHere
        },
        stamp,
    };
    // An empty result is not evidence.
    let evidence = (!empty).then_some(evidence);
    Ok(SessionChanges { slices: std::mem::take(&mut txn.slices), marks, evidence })
}

/// Stores a result that is too large. The model gets its beginning and a handle.
fn truncate_output(
    output: &mut CallOutput,
    max_bytes: usize,
    redactor: &Redactor,
) -> Option<(String, Arc<str>)> {
    if output.hidden || is_certainly_small(&output.value, max_bytes) {
        return None;
    }
    let text: Arc<str> = match &output.value {
        Value::String(text) => text.as_str().into(),
        value => value.to_string().into(),
    };
    if text.len() <= max_bytes {
        return None;
    }
    let handle = format!("out_{}", CallId::generate());
    let mut end = MAX_PREVIEW_BYTES.min(max_bytes);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    // Do not cut through a secret, because no pattern would match the rest.
    let end = redactor.find_cut_position(&text, end);
    let note = format!(
        "The result has {} bytes; this is its beginning. Read on with `read_output`, handle `{handle}`, offset {end}.",
        text.len()
    );
    output.message =
        Some(output.message.take().map_or(note.clone(), |message| format!("{message}\n{note}")));
    output.value = Value::String(text.get(..end).unwrap_or_default().to_owned());
    output.stored = Some(StoredOutputRef { handle: handle.clone(), bytes: text.len() });
    Some((handle, text))
}

/// Reports whether a value certainly fits, without serializing it.
fn is_certainly_small(value: &Value, max_bytes: usize) -> bool {
    match value {
        Value::Null | Value::Bool(_) => true,
        Value::Number(number) => number.as_str().len() <= max_bytes,
        Value::String(text) => text.len() <= max_bytes,
        Value::Array(_) | Value::Object(_) => toolgate_json::find_exceeded_bound_of_value(
            value,
            &JsonBounds { bytes: max_bytes / 8, depth: 128, nodes: max_bytes / 8 },
        )
        .is_none(),
    }
}

/// Returns the entity that a call is evidence about: from its result, or else from its arguments.
///
/// If both have the same text, the value from the arguments is returned.
fn proven_entity<'v>(argument: Option<&'v Value>, result: Option<&'v Value>) -> Option<&'v Value> {
    let [argument, result] = [argument, result].map(|value| value.filter(|value| !value.is_null()));
    let spelled = |value: &'v Value| match value {
        Value::String(text) => Cow::Borrowed(text.as_str()),
        other => Cow::Owned(other.to_string()),
    };
    match (argument, result) {
        (Some(argument), Some(result)) if spelled(argument) == spelled(result) => Some(argument),
        (argument, result) => result.or(argument),
    }
}
