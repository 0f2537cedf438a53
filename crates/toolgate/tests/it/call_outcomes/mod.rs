//! Tests every way in which a call can stop.
//!
//! A stopped call has one structured error, one row and no state change. Claims and limits are
//! settled by effect.

/// Builds a step that stops a call.
macro_rules! step {
    ($world:ident => $body:expr) => {{
        let step: StopStep = |$world| Box::pin(async move { StopOutcome::from($body) });
        step
    }};
}

/// Builds a step that calls `act` with a mode.
macro_rules! acts {
    ($how:literal) => {
        step!(w => call_act(w, $how).await)
    };
}

mod after_run;
mod before_run;
mod faulty_collaborators;

use std::collections::BTreeSet;
use std::future::Future;
use std::pin::Pin;

use serde_json::json;
use toolgate::call::error_code;
use toolgate::{
    Answer, CallEffects, CallId, Decision, ErrorCategory, Gate, Outcome, Row, SignedDuration,
    ToolError,
};
use toolgate_json::Digest;

use crate::support::TestWorld;

type StopStep = for<'a> fn(&'a TestWorld) -> Pin<Box<dyn Future<Output = StopOutcome> + Send + 'a>>;
type StopCase = (&'static str, TestWorld, StopStep, ExpectedStop);

/// Holds the result of a stopped call.
struct StopOutcome {
    /// Answer to the caller, or `None` if the caller disconnected.
    answer: Option<Answer>,
    /// State that the call must not change, if the step made other calls before.
    baseline: Option<WorldBaseline>,
}

impl From<Answer> for StopOutcome {
    fn from(answer: Answer) -> Self {
        Self { answer: Some(answer), baseline: None }
    }
}

impl From<(WorldBaseline, Answer)> for StopOutcome {
    fn from((baseline, answer): (WorldBaseline, Answer)) -> Self {
        Self { answer: Some(answer), baseline: Some(baseline) }
    }
}

/// Records the state before a call: session, files and existing rows.
struct WorldBaseline {
    fingerprint: (String, Digest),
    rows: BTreeSet<CallId>,
}

impl WorldBaseline {
    async fn capture(world: &TestWorld) -> Self {
        Self {
            fingerprint: world.fingerprint().await,
            rows: world.rows().await.0.iter().map(|row| row.call).collect(),
        }
    }
}

/// Describes the expected state after a stop.
///
/// Runs, meter and pending calls include the other calls of the case.
struct ExpectedStop {
    code: &'static str,
    gate: Gate,
    effects: CallEffects,
    ran: u32,
    metered: u32,
    pending: usize,
    spooled: bool,
}

const fn expect_refused(code: &'static str, gate: Gate) -> ExpectedStop {
    ExpectedStop {
        code,
        gate,
        effects: CallEffects::None,
        ran: 0,
        metered: 0,
        pending: 0,
        spooled: false,
    }
}

/// Expects a call with an unknown outcome, which is pending and keeps its reservation.
const fn expect_unknown(code: &'static str) -> ExpectedStop {
    ExpectedStop {
        code,
        gate: Gate::Run,
        effects: CallEffects::Unknown,
        ran: 1,
        metered: 1,
        pending: 1,
        spooled: false,
    }
}

/// Expects a call that ran and whose result is withheld.
const fn expect_withheld(code: &'static str) -> ExpectedStop {
    ExpectedStop {
        code,
        gate: Gate::Shape,
        effects: CallEffects::Done,
        ran: 1,
        metered: 1,
        pending: 0,
        spooled: false,
    }
}

async fn call_act(world: &TestWorld, how: &str) -> Answer {
    world.session.call("act", json!({"how": how})).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopped_call_has_one_error_one_row_and_no_change() {
    let cases: Vec<StopCase> = crate::call_outcomes::before_run::cases()
        .into_iter()
        .chain(crate::call_outcomes::after_run::cases())
        .collect();
    let names: BTreeSet<&str> = cases.iter().map(|(name, ..)| *name).collect();
    assert!(names.len() >= 25 && names.len() == cases.len());
    for (name, world, step, expected) in cases {
        let initial = WorldBaseline::capture(&world).await;
        let StopOutcome { answer, baseline } = step(&world).await;
        world.store.inject_faults(&[]);
        check_stop(name, &world, answer.as_ref(), &baseline.unwrap_or(initial), &expected).await;
    }
}

async fn check_stop(
    name: &str,
    world: &TestWorld,
    answer: Option<&Answer>,
    before: &WorldBaseline,
    expected: &ExpectedStop,
) {
    let row = only_new_row(name, world, before, expected.spooled).await;
    // If the caller disconnected, check the row instead.
    let (outcome, gate) =
        answer.map_or((&row.outcome, row.gate), |answer| (&answer.outcome, answer.gate));
    let Outcome::Error(error) = outcome else { panic!("{name}: {outcome:?}") };
    assert_eq!(
        (&*error.code, gate, error.effects),
        (expected.code, expected.gate, expected.effects),
        "{name}: {error:?}"
    );
    assert_eq!(error.call_id, Some(row.call), "{name}");
    assert!(
        !error.message.is_empty() && (error.effects.is_clean() || !error.retryable),
        "{name}: {error:?}"
    );
    let category =
        error_code::find(&error.code).map_or(ErrorCategory::Business, |code| code.category);
    assert_eq!(error.category, category, "{name}: {error:?}");
    assert_eq!(
        serde_json::from_value::<ToolError>(outcome.to_json()).unwrap(),
        **error,
        "{name}: the JSON form is complete"
    );
    assert!(matches!(row.decision, Decision::Failed | Decision::Refused), "{name}: {row:?}");
    assert_eq!(row.effects, expected.effects, "{name}: {row:?}");
    if !expected.spooled {
        assert_eq!((row.code(), row.gate), (Some(expected.code), expected.gate), "{name}: {row:?}");
    }
    assert_eq!(world.fingerprint().await, before.fingerprint, "{name}: something changed");
    assert_eq!(world.run_count(), expected.ran, "{name}: runs");
    assert_eq!(world.meter_value().await, expected.metered.into(), "{name}: limits");
    // `pending_calls` adds spooled rows to the ledger. After 48 h, no other claim may be pending.
    world.advance(SignedDuration::from_hours(48));
    assert_eq!(world.gate.pending_calls().await.unwrap().len(), expected.pending, "{name}: claims");
    only_new_row(name, world, before, false).await;
}

/// Returns the only new row, from the ledger or, if `spooled` is set, from the spool.
async fn only_new_row(name: &str, world: &TestWorld, before: &WorldBaseline, spooled: bool) -> Row {
    let rows = world
        .rows()
        .await
        .0
        .into_iter()
        .filter(|row| !before.rows.contains(&row.call))
        .map(|row| (*row).clone());
    let (mut recorded, spool_lines) = (rows.collect::<Vec<Row>>(), world.spooled_lines());
    assert_eq!(
        (recorded.len(), spool_lines.len()),
        if spooled { (0, 1) } else { (1, 0) },
        "{name}: {recorded:#?} {spool_lines:#?}"
    );
    recorded.extend(spool_lines.iter().map(|line| serde_json::from_str::<Row>(line).unwrap()));
    recorded.remove(0)
}
