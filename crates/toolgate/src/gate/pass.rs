//! Permission in hand: a call that was admitted and not settled yet.

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

/// What the gates before the tool come to.
pub(super) enum Admitted {
    Pass(Box<Passed>),
    Replay(Outcome),
}

/// What a claim comes to.
pub(super) enum Claim {
    /// Whatever there is to settle is claimed.
    Held,
    /// Somebody else was first, and is done.
    Replay(Outcome),
}

pub(super) struct Passed {
    pub(super) agent: Arc<Agent>,
    pub(super) permit: Granted,
    pub(super) version: u64,
    /// The session as the tool sees it; gone once the tool has run.
    pub(super) state: Option<Arc<State>>,
    pub(super) hold: Option<Hold>,
    pub(super) remaining: Remaining,
    /// A later call may want to know what this one came to.
    pub(super) recallable: bool,
    pub(super) key: SessionKey,
    /// A client ran it and says so.
    pub(super) reported: bool,
    /// What it ran instead.
    pub(super) ran: Option<Otherwise>,
}

impl Passed {
    /// What a failure left behind, as far as only toolgate knows. What a client does, nobody here undoes.
    pub(super) fn effects_of_failure(&self) -> Effects {
        match self.permit.tool().effects_of_failure() {
            Effects::RolledBack if self.reported => Effects::Unknown,
            other => other,
        }
    }

    /// What a run that finished left behind, if its result is then withheld.
    pub(super) fn effects_of_run(&self) -> Effects {
        match self.effects_of_failure() {
            Effects::Unknown => Effects::Done,
            other => other,
        }
    }
}

/// An admitted call that the client runs itself. It must be reported; dropped, it is recorded as
/// abandoned, and what it claimed stays reserved until somebody settles it.
#[must_use = "an admitted call must be reported"]
pub struct Pass {
    gate: Toolgate,
    runtime: tokio::runtime::Handle,
    inner: Option<(Box<Passed>, Box<Trail>)>,
}

impl Pass {
    /// The call's name in the ledger.
    #[must_use]
    pub fn call_id(&self) -> Option<CallId> {
        self.inner.as_ref().map(|(_, trail)| trail.id)
    }

    /// The arguments to run with: hooks may have rewritten them.
    #[must_use]
    pub fn arguments(&self) -> Option<&Judged> {
        self.inner.as_ref().map(|(passed, _)| passed.permit.arguments())
    }

    /// The second half of the path: what the client says happened. Evidence from it is marked as reported.
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
            // On the runtime that admitted it: whoever drops it may be on none.
            self.runtime.spawn(async move {
                let effects = passed.effects_of_failure();
                let failure = Failure::of(code::ABANDONED, "the client never reported what happened").effects(effects);
                gate.settle(passed, Ran::ended(Err(failure), Txn::default()), trail).await;
            });
        }
    }
}

impl Toolgate {
    /// The first half of the path, for a client that runs its tools itself.
    ///
    /// # Errors
    /// The answer, where the call was refused or replayed. It is recorded already.
    pub async fn admit(&self, call: Call) -> Result<Pass, Answer> {
        let mut trail = Trail::open(self, &call, None);
        trail.apart = true;
        trail.facts.reported = true;
        self.admit_apart(call, trail, |gate, mut passed, mut trail| {
            passed.reported = true;
            // From here on it is the client's time.
            trail.at(crate::ledger::Gate::Run);
            // Nobody knows how long a client takes; what must hold meanwhile is reserved.
            passed.hold = None;
            Pass { gate, runtime: tokio::runtime::Handle::current(), inner: Some((passed, trail)) }
        })
        .await
    }

    /// Takes a call up to the tool, on a task of its own: one whose caller hangs up is let in or refused all the same. `pass` makes of the
    /// permission what the client gets.
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
