//! Gate 11: the tool itself, under time-out, heartbeat, deadline and cancellation.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use backon::BackoffBuilder;
use futures_util::FutureExt;
use serde_json::Value;
use tokio::time::Instant;

use super::pass::Passed;
use super::trail::Trail;
use super::{Toolgate, nearest};
use crate::code;
use crate::context::{Ctx, Parts, Txn};
use crate::error::{Effects, ToolError};
use crate::ledger::Gate;
use crate::limits::Spend;
use crate::outcome::Signal;
use crate::registry::Registered;
use crate::tool::{Effect, Failure, Kind};

/// How a run ended.
pub(super) struct Ran {
    pub(super) result: Result<Value, Failure>,
    pub(super) txn: Txn,
    /// The service behind the tool has nothing of the kind: a success with no value.
    pub(super) empty: bool,
    /// A file could not be rolled back.
    pub(super) unclean: bool,
    /// The tool was started.
    pub(super) begun: bool,
}

impl Ran {
    /// It was stopped before the tool began.
    pub(super) fn not_begun(failure: Failure) -> Self {
        Self { begun: false, ..Self::ended(Err(failure.effects(Effects::None)), Txn::default()) }
    }

    pub(super) const fn ended(result: Result<Value, Failure>, txn: Txn) -> Self {
        Self { result, txn, empty: false, unclean: false, begun: true }
    }
}

/// What a failure says, once toolgate has weighed it.
pub(super) enum Failed {
    Error(Box<ToolError>),
    Signal(Signal),
}

/// Weighs a failure: what a tool does not say about its effects is assumed at its worst.
pub(super) fn weigh(failure: Failure, passed: &Passed) -> Failed {
    match failure.into_kind() {
        Kind::Signal(signal) => Failed::Signal(signal),
        Kind::Error { error, effects, .. } => {
            // Whatever became of a read, it changed nothing; unless it was something else that ran.
            let reads = passed.permit.tool().spec.effect == Effect::Read && error.code != code::NOT_AS_ADMITTED;
            let effects = effects.filter(|_| !reads).unwrap_or_else(|| passed.effects_of_failure());
            let mut error = error.with_effects(effects);
            if error.retryable && error.retry_after_ms.is_none() {
                error.retry_after_ms = Some(1_000);
            }
            Failed::Error(Box::new(error))
        }
    }
}

/// How long it is waited before a tool is tried again, where the tool says how long.
const MOMENT: Duration = Duration::from_secs(1);

impl Toolgate {
    /// Runs the tool, and again with backoff where that is safe: a read, an idempotent tool, or
    /// something proven not to have been sent. The time-out covers all of it.
    pub(super) async fn run(&self, passed: &Passed, trail: &mut Trail) -> Ran {
        trail.at(Gate::Run);
        let spec = &passed.permit.tool().spec;
        let timeout = Instant::now().checked_add(spec.timeout);
        let mut delays = backon::ExponentialBuilder::default()
            .with_min_delay(spec.retry.delay)
            .with_max_times(spec.retry.times as usize)
            .with_jitter()
            .build();
        if let Some(failure) = over_before_it_began(trail) {
            return Ran::not_begun(failure);
        }
        let (mut logs, mut spent, mut dirty) = (Vec::new(), None::<Spend>, false);
        loop {
            let mut ran = self.attempt(passed, trail, timeout).await;
            logs.append(&mut ran.txn.logs);
            spent = match (spent, ran.txn.spent) {
                (Some(before), Some(now)) => Some(before.plus(now)),
                (before, now) => before.or(now),
            };
            let delay = (may_retry(&ran, passed.permit.tool()) && !trail.cancel.is_cancelled()).then(|| delays.next()).flatten();
            // Never sooner than it was told; and for longer than a moment the model is told to wait, not kept waiting.
            let told = ran.result.as_ref().err().and_then(Failure::retry_after).unwrap_or_default();
            let delay = delay.filter(|_| told <= MOMENT).map(|delay| delay.max(told));
            let end = nearest(timeout, trail.deadline);
            let in_time = |delay: Duration| Instant::now().checked_add(delay).is_some_and(|then| end.is_none_or(|end| then < end));
            if let Some(delay) = delay.filter(|delay| in_time(*delay)) {
                // What the failed run did to files is undone before the next begins.
                ran.unclean = !rolled_back(&mut ran.txn);
                if !ran.unclean {
                    tokio::select! {
                        () = Box::pin(tokio::time::sleep(delay)) => {
                            dirty |= !left_behind(&ran, passed).is_clean();
                            trail.retries += 1;
                            continue;
                        }
                        () = trail.cancel.cancelled() => {}
                    }
                }
            }
            // What an earlier run may have done is not undone by a later one that did nothing.
            ran.unclean |= dirty && ran.result.is_err();
            ran.txn.logs = logs;
            ran.txn.spent = spent;
            return ran;
        }
    }

    async fn attempt(&self, passed: &Passed, trail: &Trail, timeout: Option<Instant>) -> Ran {
        let tool = passed.permit.tool();
        let (Some(handler), Some(permit)) = (&tool.handler, passed.permit.to_run()) else {
            let failure =
                Failure::of(code::NO_HANDLER, format!("`{}` is run by the client; admit it and report what happened", tool.spec.name));
            return Ran::not_begun(failure);
        };
        let ctx = Ctx::new(Parts {
            call: trail.id,
            key: passed.key.clone(),
            effect: tool.spec.effect,
            state: passed.state.clone().unwrap_or_default(),
            resources: passed.agent.resources.clone(),
            store: self.0.store.clone(),
            expects: permit.expects().to_vec(),
            deadline: nearest(timeout, trail.deadline),
            remaining: passed.remaining,
            cancel: trail.cancel.clone(),
            carried: trail.carried.clone(),
        });
        // Not even what a handler does before there is anything to wait for gets past.
        let own = ctx.clone();
        let work = AssertUnwindSafe(async move { handler.run(permit, own, permit.arguments()).await }).catch_unwind();
        let mut over = false;
        let result = tokio::select! {
            biased;
            ended = work => {
                over = true;
                ended.unwrap_or_else(|panic| Err(panicked(&tool.spec.name, panic.as_ref())))
            }
            () = trail.cancel.cancelled() => Err(Failure::of(code::CANCELLED, "the call was cancelled while it ran")),
            () = out_of_time(trail.deadline, &ctx) => Err(Failure::of(code::DEADLINE_EXCEEDED, "the deadline of the call passed while it ran")),
            () = until(timeout) => Err(Failure::of(code::TIMEOUT, format!("`{}` did not answer within {:?}", tool.spec.name, tool.spec.timeout))),
            every = heartbeat(&ctx, tool.spec.heartbeat) => Err(Failure::of(code::HEARTBEAT_MISSED, format!("`{}` gave no sign of life for {every:?}", tool.spec.name))),
        };
        // Whatever it has set going elsewhere is told to end, too.
        if !over {
            ctx.cancelled().cancel();
        }
        let txn = ctx.end();
        match result {
            Err(failure) if failure.status().is_some_and(|status| tool.spec.empty_statuses.contains(&status)) => {
                Ran { empty: true, ..Ran::ended(Ok(Value::Null), txn) }
            }
            result => Ran::ended(result, txn),
        }
    }
}

/// A call that was cancelled, or whose time was used up on the way, does not start.
fn over_before_it_began(trail: &Trail) -> Option<Failure> {
    let why = if trail.cancel.is_cancelled() {
        Failure::of(code::CANCELLED, "the call was cancelled before the tool began")
    } else if trail.deadline.is_some_and(|deadline| deadline <= Instant::now()) {
        Failure::of(code::DEADLINE_EXCEEDED, "the deadline of the call passed before the tool began")
    } else {
        return None;
    };
    Some(why)
}

/// What a failed run left behind, as far as is known. Whatever a read says of itself, it changed nothing.
fn left_behind(ran: &Ran, passed: &Passed) -> Effects {
    let reads = passed.permit.tool().spec.effect == Effect::Read;
    let declared = ran.result.as_ref().err().and_then(Failure::declared_effects).filter(|_| !reads);
    declared.unwrap_or_else(|| passed.effects_of_failure())
}

fn may_retry(ran: &Ran, tool: &Registered) -> bool {
    let Err(failure) = &ran.result else { return false };
    let safe = tool.spec.effect == Effect::Read || tool.spec.idempotent || failure.declared_effects().is_some_and(Effects::is_clean);
    failure.is_retryable() && safe
}

/// Undoes what a run did to files. True where the world is as it was.
pub(super) fn rolled_back(txn: &mut Txn) -> bool {
    match txn.files.take().map(|mut files| files.rollback()) {
        None | Some(Ok(())) => true,
        Some(Err(error)) => {
            tracing::error!(%error, "a file could not be rolled back");
            false
        }
    }
}

pub(super) fn panicked(tool: &str, panic: &(dyn std::any::Any + Send)) -> Failure {
    let said = panic.downcast_ref::<&str>().map(|s| (*s).to_owned()).or_else(|| panic.downcast_ref::<String>().cloned());
    // What a panic says is for the operator.
    tracing::error!(tool, panic = said.as_deref().unwrap_or("?"), "a tool panicked");
    Failure::of(code::TOOL_PANICKED, format!("`{tool}` has a fault and crashed; do not repeat the call, tell the user"))
}

/// Its timer is boxed: most work is done before anybody looks at the clock, and what waits for it stays small.
pub(super) async fn until(moment: Option<Instant>) {
    match moment {
        Some(moment) => Box::pin(tokio::time::sleep_until(moment)).await,
        None => std::future::pending().await,
    }
}

/// Ends when the call's own time is up. The tool hears of that before it is dropped: it had more time than that, and whoever did not answer
/// it within less is not to blame.
async fn out_of_time(deadline: Option<Instant>, ctx: &Ctx) {
    until(deadline).await;
    ctx.cancelled().cancel();
}

/// Ends when the run has been silent for too long.
async fn heartbeat(ctx: &Ctx, every: Option<Duration>) -> Duration {
    let Some(every) = every else { return std::future::pending().await };
    loop {
        let Some(due) = ctx.last_beat().checked_add(every) else { return std::future::pending().await };
        if due <= Instant::now() {
            return every;
        }
        Box::pin(tokio::time::sleep_until(due)).await;
    }
}
