//! Represents a call between two gates: resolved, then admitted and not settled yet.

use std::sync::Arc;

use crate::agent::{Agent, ToolEntry};
use crate::call::error::CallEffects;
use crate::call::outcome::Outcome;
use crate::call::{Call, SessionKey};
use crate::pipeline::gates::policy::Authorization;
use crate::pipeline::provenance::MismatchedRun;
use crate::session::state::SessionState;
use crate::store::Approval;
use crate::tool::context::RemainingBudget;

/// A call whose agent and tool are known.
pub(crate) struct ResolvedCall<'c> {
    pub(crate) call: &'c Call,
    pub(crate) agent: Arc<Agent>,
    pub(crate) tool: Arc<ToolEntry>,
    /// The approval that the call names. Its stored arguments are the ones that run.
    pub(crate) approval: Option<Box<Approval>>,
    /// The state of the session at the start of the batch, if the call belongs to one.
    pub(crate) batch: Option<&'c SessionState>,
}

/// Result of the gates before the tool.
pub(crate) enum Admission {
    Admitted(Box<AdmittedCall>),
    Replay(Outcome),
}

/// A call with a permit and an open claim.
pub(crate) struct AdmittedCall {
    pub(crate) agent: Arc<Agent>,
    pub(crate) authorization: Authorization,
    pub(crate) version: u64,
    /// The session as the tool sees it. `None` after the tool has run.
    pub(crate) state: Option<Arc<SessionState>>,
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
