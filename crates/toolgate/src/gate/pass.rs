//! Represents a call that is admitted and not settled yet.

use std::sync::Arc;

use serde_json::Value;
use tracing::Instrument;

use super::Toolgate;
use super::authorize::Granted;
use super::run::Ran;
use super::seen::Otherwise;
use super::trail::Trail;
use crate::call::{Call, CallId, Judged, SessionKey};
use crate::code;
use crate::context::{Remaining, Txn};
use crate::error::Effects;
use crate::outcome::{Answer, Outcome};
use crate::registry::Agent;
use crate::session::State;
use crate::store::Hold;
use crate::tool::Failure;

/// Result of the gates before the tool.
pub(super) enum Admitted {
    Pass(Box<Passed>),
    Replay(Outcome),
}

/// Result of the claim.
pub(super) enum Claim {
    /// Everything that must be settled later is claimed.
    Held,
    /// An identical call was first and has ended.
    Replay(Outcome),
}

pub(super) struct Passed {
    pub(super) agent: Arc<Agent>,
    pub(super) permit: Granted,
    pub(super) version: u64,
    /// The session as the tool sees it. `None` after the tool has run.
    pub(super) state: Option<Arc<State>>,
    pub(super) hold: Option<Hold>,
    pub(super) remaining: Remaining,
    /// A later identical call may replay the outcome.
    pub(super) recallable: bool,
    pub(super) key: SessionKey,
    /// The client ran the tool and reports the result.
    pub(super) reported: bool,
    /// The run, if the client ran other arguments than the admitted ones.
    pub(super) ran: Option<Otherwise>,
}

impl Passed {
    /// Returns the effects of a failure that does not declare them.
    ///
    /// Toolgate cannot roll back what a client has done.
    pub(super) fn effects_of_failure(&self) -> Effects {
        match self.permit.tool().effects_of_failure() {
            Effects::RolledBack if self.reported => Effects::Unknown,
            other => other,
        }
    }

    /// Returns the effects of a finished run whose result is withheld.
    pub(super) fn effects_of_run(&self) -> Effects {
        match self.effects_of_failure() {
            Effects::Unknown => Effects::Done,
            other => other,
        }
    }
}

/// An admitted call that the client runs itself.
///
/// The client must report its result. If this value is dropped, the call is recorded as abandoned,
/// and its claim stays reserved until it is settled.
#[must_use = "an admitted call must be reported"]
pub struct Pass {
    gate: Toolgate,
    runtime: tokio::runtime::Handle,
    inner: Option<(Box<Passed>, Box<Trail>)>,
}

impl Pass {
    /// Returns the id of the call in the ledger.
    #[must_use]
    pub fn call_id(&self) -> Option<CallId> {
        self.inner.as_ref().map(|(_, trail)| trail.id)
    }

    /// Returns the arguments to run with. Hooks may have rewritten them.
    #[must_use]
    pub fn arguments(&self) -> Option<&Judged> {
        self.inner.as_ref().map(|(passed, _)| passed.permit.arguments())
    }

    /// Reports the result of the client's run. Evidence from it is marked as reported.
    pub async fn report(mut self, result: Result<Value, Failure>) -> Answer {
        let gate = self.gate.clone();
        let Some((passed, trail)) = self.inner.take() else {
            return gate.lost(&Call::new(SessionKey::new("", "", ""), "", Value::Null), CallId::fresh()).await;
        };
        let (settling, span) = (gate.clone(), trail.span.clone());
        let (key, tool, id) = (passed.key.clone(), trail.tool.to_string(), trail.id);
        let task = tokio::spawn(async move { settling.settle(passed, Ran::ended(result, Txn::default()), trail).await }.instrument(span));
        match task.await {
            Ok(answer) => answer,
            Err(_) => gate.lost(&Call::new(key, tool, Value::Null), id).await,
        }
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        if let Some((passed, trail)) = self.inner.take() {
            let gate = self.gate.clone();
            // The value may be dropped outside of any runtime, so use the runtime that admitted the
            // call.
            self.runtime.spawn(async move {
                let effects = passed.effects_of_failure();
                let failure = Failure::of(code::ABANDONED, "the client did not report a result").effects(effects);
                gate.settle(passed, Ran::ended(Err(failure), Txn::default()), trail).await;
            });
        }
    }
}

impl Toolgate {
    /// Admits a call for a client that runs its tools itself.
    ///
    /// # Errors
    /// The final answer, if the call was rejected or replayed. It is recorded already.
    pub async fn admit(&self, call: Call) -> Result<Pass, Answer> {
        let mut trail = Trail::open(self, &call, None);
        trail.apart = true;
        trail.facts.reported = true;
        self.admit_apart(call, trail, |gate, mut passed, mut trail| {
            passed.reported = true;
            // Time spent from here on counts as run time.
            trail.at(crate::ledger::Gate::Run);
            // The client may take any time, so do not hold the session lock. Limits stay reserved
            // by the claim.
            passed.hold = None;
            Pass { gate, runtime: tokio::runtime::Handle::current(), inner: Some((passed, trail)) }
        })
        .await
    }

    /// Runs the gates before the tool on a separate task.
    ///
    /// If the caller goes away, the call is still admitted or rejected. `pass` turns the admitted
    /// call into the value for the client.
    pub(super) async fn admit_apart<T: Send + 'static>(
        &self,
        call: Call,
        mut trail: Box<Trail>,
        pass: impl FnOnce(Self, Box<Passed>, Box<Trail>) -> T + Send + 'static,
    ) -> Result<T, Answer> {
        let call = Arc::new(call);
        let (id, span) = (trail.id, trail.span.clone());
        let (gate, asked) = (self.clone(), Arc::clone(&call));
        let task = tokio::spawn(
            async move {
                match gate.admit_call(&asked, &mut trail, None).await {
                    Ok(Admitted::Pass(passed)) => Ok(pass(gate, passed, trail)),
                    Ok(Admitted::Replay(outcome)) => Err(gate.replay(outcome, trail).await),
                    Err(stop) => Err(gate.refuse(stop, trail).await),
                }
            }
            .instrument(span),
        );
        match task.await {
            Ok(result) => result,
            Err(_) => Err(self.lost(&call, id).await),
        }
    }
}
