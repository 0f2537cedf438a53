//! Represents a call that is admitted and not settled yet.

use std::sync::Arc;

use crate::agent::Agent;
use crate::call::SessionKey;
use crate::call::error::CallEffects;
use crate::call::outcome::Outcome;
use crate::pipeline::gates::policy::Authorization;
use crate::pipeline::provenance::MismatchedRun;
use crate::session::state::SessionState;
use crate::store::SessionLock;
use crate::tool::context::RemainingBudget;

/// Result of the gates before the tool.
pub(crate) enum Admission {
    Admitted(Box<AdmittedCall>),
    Replay(Outcome),
}

/// Result of the claim.
pub(crate) enum ClaimOutcome {
    /// Everything that must be settled later is claimed.
    Claimed,
    /// An identical call was first and has ended.
    Replay(Outcome),
}

pub(crate) struct AdmittedCall {
    pub(crate) agent: Arc<Agent>,
    pub(crate) authorization: Authorization,
    pub(crate) version: u64,
    /// The session as the tool sees it. `None` after the tool has run.
    pub(crate) state: Option<Arc<SessionState>>,
    pub(crate) session_lock: Option<SessionLock>,
    pub(crate) remaining: RemainingBudget,
    /// A later identical call may replay the outcome.
    pub(crate) is_recallable: bool,
    pub(crate) key: SessionKey,
    /// The client ran the tool and reports the result.
    pub(crate) is_reported: bool,
    /// The run, if the client ran other arguments than the admitted ones.
    pub(crate) mismatched_run: Option<MismatchedRun>,
}

impl AdmittedCall {
    /// Returns the effects of a failure that does not declare them.
    ///
    /// Toolgate cannot roll back what a client has done.
    pub(crate) fn effects_of_failure(&self) -> CallEffects {
        match self.authorization.tool().effects_of_failure() {
            CallEffects::RolledBack if self.is_reported => CallEffects::Unknown,
            other => other,
        }
    }

    /// Returns the effects of a finished run whose result is withheld.
    pub(crate) fn effects_of_run(&self) -> CallEffects {
        match self.effects_of_failure() {
            CallEffects::Unknown => CallEffects::Done,
            other => other,
        }
    }
}
