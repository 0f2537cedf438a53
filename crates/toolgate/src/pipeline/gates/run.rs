//! Gate 11: runs the tool under timeout, heartbeat, deadline and cancellation.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use backon::BackoffBuilder;
use futures_util::FutureExt;
use serde_json::Value;
use tokio::time::Instant;

use crate::agent::ToolEntry;
use crate::call::error::{CallEffects, ToolError};
use crate::call::error_code;
use crate::call::outcome::PromptSignal;
use crate::ledger::row::Gate;
use crate::limits::Cost;
use crate::pipeline::Toolgate;
use crate::pipeline::admission::AdmittedCall;
use crate::pipeline::call_state::{CallState, earlier_deadline};
use crate::tool::context::{CallTransaction, ToolContext, ToolContextParts};
use crate::tool::{Effect, Failure, FailureKind};

/// Result of a run.
pub(crate) struct RunResult {
    pub(crate) result: Result<Value, Failure>,
    pub(crate) txn: CallTransaction,
    /// The service reports that the requested object does not exist: a success without a value.
    pub(crate) is_empty: bool,
    /// A file could not be rolled back.
    pub(crate) is_unclean: bool,
    /// The tool was started.
    pub(crate) has_started: bool,
}

impl RunResult {
    /// Builds the result of a run that was stopped before the tool started.
    pub(crate) fn not_started(failure: Failure) -> Self {
        Self {
            has_started: false,
            ..Self::ended(Err(failure.effects(CallEffects::None)), CallTransaction::default())
        }
    }

    pub(crate) const fn ended(result: Result<Value, Failure>, txn: CallTransaction) -> Self {
        Self { result, txn, is_empty: false, is_unclean: false, has_started: true }
    }
}

/// A failure with its effects decided.
pub(crate) enum ResolvedFailure {
    Error(Box<ToolError>),
    Signal(PromptSignal),
}

/// Decides the effects of a failure. Effects that the tool does not declare are assumed at their
/// worst.
pub(crate) fn resolve_effects(failure: Failure, admitted: &AdmittedCall) -> ResolvedFailure {
    match failure.into_kind() {
        FailureKind::Signal(signal) => ResolvedFailure::Signal(signal),
        FailureKind::Error { error, effects, .. } => {
            // A read has no effects, unless the client ran something else.
            let reads = admitted.authorization.tool().spec.effect == Effect::Read
                && error.code != error_code::NOT_AS_ADMITTED;
            let effects =
                effects.filter(|_| !reads).unwrap_or_else(|| admitted.effects_of_failure());
            let mut error = error.with_effects(effects);
            if error.retryable && error.retry_after_ms.is_none() {
                error.retry_after_ms = Some(1_000);
            }
            ResolvedFailure::Error(Box::new(error))
        }
    }
}

/// Longest retry delay, as requested by the tool, that toolgate itself waits.
const MAX_INLINE_RETRY_DELAY: Duration = Duration::from_secs(1);

/// Runs the tool, and retries with backoff if that is safe.
///
/// A retry is safe for a read, an idempotent tool, or a request that was provably not sent. The
/// timeout covers all attempts.
pub(crate) async fn run(
    gate: &Toolgate,
    admitted: &AdmittedCall,
    call_state: &mut CallState,
) -> RunResult {
    call_state.enter_gate(Gate::Run);
    let spec = &admitted.authorization.tool().spec;
    let timeout = Instant::now().checked_add(spec.timeout);
    let mut delays = backon::ExponentialBuilder::default()
        .with_min_delay(spec.retry.delay)
        .with_max_times(spec.retry.times as usize)
        .with_jitter()
        .build();
    if let Some(failure) = failure_before_start(call_state) {
        return RunResult::not_started(failure);
    }
    let (mut logs, mut spent, mut had_effects) = (Vec::new(), None::<Cost>, false);
    loop {
        let mut ran = run_once(gate, admitted, call_state, timeout).await;
        logs.append(&mut ran.txn.logs);
        spent = match (spent, ran.txn.cost) {
            (Some(before), Some(now)) => Some(before.plus(now)),
            (before, now) => before.or(now),
        };
        let delay = (can_retry(&ran, admitted.authorization.tool())
            && !call_state.cancel.is_cancelled())
        .then(|| delays.next())
        .flatten();
        // Never retry sooner than the tool asks. For longer delays, tell the model to wait
        // instead.
        let requested_delay =
            ran.result.as_ref().err().and_then(Failure::retry_after).unwrap_or_default();
        let delay = delay
            .filter(|_| requested_delay <= MAX_INLINE_RETRY_DELAY)
            .map(|delay| delay.max(requested_delay));
        let end = earlier_deadline(timeout, call_state.deadline);
        let in_time = |delay: Duration| {
            Instant::now().checked_add(delay).is_some_and(|then| end.is_none_or(|end| then < end))
        };
        if let Some(delay) = delay.filter(|delay| in_time(*delay)) {
            // Undo the file changes of the failed attempt before the next one starts.
            ran.is_unclean = !roll_back_files(&mut ran.txn);
            if !ran.is_unclean {
                tokio::select! {
                    () = Box::pin(tokio::time::sleep(delay)) => {
                        had_effects |= !effects_of_attempt(&ran, admitted).is_clean();
                        call_state.retries += 1;
                        continue;
                    }
                    () = call_state.cancel.cancelled() => {}
                }
            }
        }
        // A later attempt without effects does not undo the effects of an earlier attempt.
        ran.is_unclean |= had_effects && ran.result.is_err();
        ran.txn.logs = logs;
        ran.txn.cost = spent;
        return ran;
    }
}

async fn run_once(
    gate: &Toolgate,
    admitted: &AdmittedCall,
    call_state: &CallState,
    timeout: Option<Instant>,
) -> RunResult {
    let tool = admitted.authorization.tool();
    let (Some(handler), Some(permit)) = (&tool.handler, admitted.authorization.run_permit()) else {
        let failure = Failure::from_code(
            error_code::NO_HANDLER,
            format!(
                "`{}` is run by the client; admit the call and report the result",
                tool.spec.name
            ),
        );
        return RunResult::not_started(failure);
    };
    let ctx = ToolContext::new(ToolContextParts {
        call: call_state.id,
        key: admitted.key.clone(),
        effect: tool.spec.effect,
        state: admitted.state.clone().unwrap_or_default(),
        resources: admitted.agent.resources.clone(),
        store: gate.0.store.clone(),
        file_expectations: permit.file_expectations().to_vec(),
        deadline: earlier_deadline(timeout, call_state.deadline),
        remaining: admitted.remaining,
        cancel: call_state.cancel.clone(),
        extension: call_state.extension.clone(),
    });
    // `catch_unwind` also covers the part of the handler before its first await.
    let handler_ctx = ctx.clone();
    let work =
        AssertUnwindSafe(async move { handler.run(permit, handler_ctx, permit.arguments()).await })
            .catch_unwind();
    let mut has_ended = false;
    let result = tokio::select! {
        biased;
        ended = work => {
            has_ended = true;
            ended.unwrap_or_else(|panic| Err(panic_failure(&tool.spec.name, panic.as_ref())))
        }
        () = call_state.cancel.cancelled() => Err(Failure::from_code(error_code::CANCELLED, "the call was cancelled while it ran")),
        () = wait_for_deadline(call_state.deadline, &ctx) => Err(Failure::from_code(error_code::DEADLINE_EXCEEDED, "the deadline of the call passed while it ran")),
        () = sleep_until(timeout) => Err(Failure::from_code(error_code::TIMEOUT, format!("`{}` timed out after {:?}", tool.spec.name, tool.spec.timeout))),
        every = wait_for_missed_heartbeat(&ctx, tool.spec.heartbeat) => Err(Failure::from_code(error_code::HEARTBEAT_MISSED, format!("`{}` sent no heartbeat for {every:?}", tool.spec.name))),
    };
    // Background work that the tool started must end too.
    if !has_ended {
        ctx.cancellation_token().cancel();
    }
    let txn = ctx.finish();
    match result {
        Err(failure)
            if failure
                .status()
                .is_some_and(|status| tool.spec.empty_statuses.contains(&status)) =>
        {
            RunResult { is_empty: true, ..RunResult::ended(Ok(Value::Null), txn) }
        }
        result => RunResult::ended(result, txn),
    }
}

/// Returns a failure if the call was cancelled or its deadline passed before the start.
fn failure_before_start(call_state: &CallState) -> Option<Failure> {
    let why = if call_state.cancel.is_cancelled() {
        Failure::from_code(error_code::CANCELLED, "the call was cancelled before the tool began")
    } else if call_state.deadline.is_some_and(|deadline| deadline <= Instant::now()) {
        Failure::from_code(
            error_code::DEADLINE_EXCEEDED,
            "the deadline of the call passed before the tool began",
        )
    } else {
        return None;
    };
    Some(why)
}

/// Returns the effects of a failed attempt. A read has none, whatever it declares.
fn effects_of_attempt(ran: &RunResult, admitted: &AdmittedCall) -> CallEffects {
    let reads = admitted.authorization.tool().spec.effect == Effect::Read;
    let declared = ran.result.as_ref().err().and_then(Failure::declared_effects).filter(|_| !reads);
    declared.unwrap_or_else(|| admitted.effects_of_failure())
}

fn can_retry(ran: &RunResult, tool: &ToolEntry) -> bool {
    let Err(failure) = &ran.result else { return false };
    let safe = tool.spec.effect == Effect::Read
        || tool.spec.idempotent
        || failure.declared_effects().is_some_and(CallEffects::is_clean);
    failure.is_retryable() && safe
}

/// Undoes the file changes of a run. Returns true if everything was restored.
pub(crate) fn roll_back_files(txn: &mut CallTransaction) -> bool {
    match txn.files.take().map(|mut files| files.rollback()) {
        None | Some(Ok(())) => true,
        Some(Err(error)) => {
            tracing::error!(%error, "cannot roll back a file");
            false
        }
    }
}

pub(crate) fn panic_failure(tool: &str, panic: &(dyn std::any::Any + Send)) -> Failure {
    let message = panic
        .downcast_ref::<&str>()
        .map(|s| (*s).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned());
    // The panic message goes to the operator only.
    tracing::error!(tool, panic = message.as_deref().unwrap_or("?"), "tool panicked");
    Failure::from_code(
        error_code::TOOL_PANICKED,
        format!("`{tool}` crashed because of a bug; do not repeat the call, tell the user"),
    )
}

/// Waits until a moment, or forever.
///
/// The timer is boxed because most work ends before it is polled. This keeps waiting futures small.
pub(crate) async fn sleep_until(moment: Option<Instant>) {
    match moment {
        Some(moment) => Box::pin(tokio::time::sleep_until(moment)).await,
        None => std::future::pending().await,
    }
}

/// Waits until the call's deadline, then cancels the tool.
///
/// The tool is cancelled before it is dropped, because its own timeout is longer. An upstream that
/// has not answered in the shorter time is not at fault.
async fn wait_for_deadline(deadline: Option<Instant>, ctx: &ToolContext) {
    sleep_until(deadline).await;
    ctx.cancellation_token().cancel();
}

/// Waits until the run misses a heartbeat. Returns the interval.
async fn wait_for_missed_heartbeat(ctx: &ToolContext, every: Option<Duration>) -> Duration {
    let Some(every) = every else { return std::future::pending().await };
    loop {
        let Some(due) = ctx.last_heartbeat().checked_add(every) else {
            return std::future::pending().await;
        };
        if due <= Instant::now() {
            return every;
        }
        Box::pin(tokio::time::sleep_until(due)).await;
    }
}
