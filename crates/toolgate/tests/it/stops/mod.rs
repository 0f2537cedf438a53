//! Every way a call can stop: one structured error, one row, nothing changed, claims and limits settled by effect.

/// A step towards a stop.
macro_rules! step {
    ($world:ident => $body:expr) => {{
        let step: Step = |$world| Box::pin(async move { Stopped::from($body) });
        step
    }};
}

/// The tool does as it is told.
macro_rules! acts {
    ($how:literal) => {
        step!(w => act(w, $how).await)
    };
}

mod admitting;
mod running;
mod worlds;

use std::collections::BTreeSet;
use std::future::Future;
use std::pin::Pin;

use serde_json::json;
use toolgate::call::error_code;
use toolgate::{Answer, CallId, Category, Decision, Effects, Gate, Outcome, Row, SignedDuration, ToolError};
use toolgate_json::Digest;

use crate::support::World;

type Step = for<'a> fn(&'a World) -> Pin<Box<dyn Future<Output = Stopped> + Send + 'a>>;
type Case = (&'static str, World, Step, Expected);

/// What became of a call that was stopped.
struct Stopped {
    /// What its caller heard: nothing, where the caller was gone by then.
    heard: Option<Answer>,
    /// What it must leave as it was, where more has happened than this call.
    since: Option<Before>,
}

impl From<Answer> for Stopped {
    fn from(answer: Answer) -> Self {
        Self { heard: Some(answer), since: None }
    }
}

impl From<(Before, Answer)> for Stopped {
    fn from((since, answer): (Before, Answer)) -> Self {
        Self { heard: Some(answer), since: Some(since) }
    }
}

/// What is there before a call: session and files, and the rows of others.
struct Before {
    fingerprint: (String, Digest),
    rows: BTreeSet<CallId>,
}

impl Before {
    async fn now(world: &World) -> Self {
        Self { fingerprint: world.fingerprint().await, rows: world.rows().await.0.iter().map(|row| row.call).collect() }
    }
}

/// What a stopped call leaves. Runs, what is used of the meter, and what is pending are those of the whole story.
struct Expected {
    code: &'static str,
    gate: Gate,
    effects: Effects,
    ran: u32,
    metered: u32,
    pending: usize,
    spooled: bool,
}

const fn refused(code: &'static str, gate: Gate) -> Expected {
    Expected { code, gate, effects: Effects::None, ran: 0, metered: 0, pending: 0, spooled: false }
}

/// It ran and nobody can say what it did: pending, and the meter stays reserved.
const fn unknown(code: &'static str) -> Expected {
    Expected { code, gate: Gate::Run, effects: Effects::Unknown, ran: 1, metered: 1, pending: 1, spooled: false }
}

/// It ran, and its result is withheld.
const fn withheld(code: &'static str) -> Expected {
    Expected { code, gate: Gate::Shape, effects: Effects::Done, ran: 1, metered: 1, pending: 0, spooled: false }
}

async fn act(world: &World, how: &str) -> Answer {
    world.session.call("act", json!({"how": how})).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_stop_is_one_error_one_row_and_no_change() {
    let cases: Vec<Case> = admitting::cases().into_iter().chain(running::cases()).collect();
    let names: BTreeSet<&str> = cases.iter().map(|(name, ..)| *name).collect();
    assert!(names.len() >= 25 && names.len() == cases.len());
    for (name, world, step, expected) in cases {
        let quiet = Before::now(&world).await;
        let Stopped { heard, since } = step(&world).await;
        world.store.fail(&[]);
        check(name, &world, heard.as_ref(), &since.unwrap_or(quiet), &expected).await;
    }
}

async fn check(name: &str, world: &World, heard: Option<&Answer>, before: &Before, expected: &Expected) {
    let row = only_row(name, world, before, expected.spooled).await;
    // Where nobody listens any more, the row tells it.
    let (outcome, gate) = heard.map_or((&row.outcome, row.gate), |answer| (&answer.outcome, answer.gate));
    let Outcome::Error(error) = outcome else { panic!("{name}: {outcome:?}") };
    assert_eq!((&*error.code, gate, error.effects), (expected.code, expected.gate, expected.effects), "{name}: {error:?}");
    assert_eq!(error.call_id, Some(row.call), "{name}");
    assert!(!error.message.is_empty() && (error.effects.is_clean() || !error.retryable), "{name}: {error:?}");
    let category = error_code::find(&error.code).map_or(Category::Business, |code| code.category);
    assert_eq!(error.category, category, "{name}: {error:?}");
    assert_eq!(serde_json::from_value::<ToolError>(outcome.to_json()).unwrap(), **error, "{name}: the contract is written in full");
    assert!(matches!(row.decision, Decision::Failed | Decision::Refused), "{name}: {row:?}");
    assert_eq!(row.effects, expected.effects, "{name}: {row:?}");
    if !expected.spooled {
        assert_eq!((row.code(), row.gate), (Some(expected.code), expected.gate), "{name}: {row:?}");
    }
    assert_eq!(world.fingerprint().await, before.fingerprint, "{name}: something changed");
    assert_eq!(world.ran(), expected.ran, "{name}: runs");
    assert_eq!(world.metered().await, expected.metered.into(), "{name}: limits");
    // Asking what is pending takes in what was spooled. However late it is, nothing else turns out to have been left open.
    world.advance(SignedDuration::from_hours(48));
    assert_eq!(world.gate.pending_calls().await.unwrap().len(), expected.pending, "{name}: claims");
    only_row(name, world, before, false).await;
}

/// The one row that the call left: in the ledger, or where the store was away, in the spool.
async fn only_row(name: &str, world: &World, before: &Before, spooled: bool) -> Row {
    let rows = world.rows().await.0.into_iter().filter(|row| !before.rows.contains(&row.call)).map(|row| (*row).clone());
    let (mut recorded, waiting) = (rows.collect::<Vec<Row>>(), world.spooled());
    assert_eq!((recorded.len(), waiting.len()), if spooled { (0, 1) } else { (1, 0) }, "{name}: {recorded:#?} {waiting:#?}");
    recorded.extend(waiting.iter().map(|line| serde_json::from_str::<Row>(line).unwrap()));
    recorded.remove(0)
}
