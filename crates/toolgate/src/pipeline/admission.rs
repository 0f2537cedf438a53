//! Represents a call that is admitted and not settled yet.

use std::sync::Arc;

use crate::agent::Agent;
use crate::call::SessionKey;
use crate::call::error::Effects;
use crate::call::outcome::Outcome;
use crate::pipeline::gates::policy::Granted;
use crate::pipeline::provenance::Otherwise;
use crate::session::state::State;
use crate::store::Hold;
use crate::tool::context::Remaining;

/// Result of the gates before the tool.
pub(crate) enum Admitted {
    Admitted(Box<Passed>),
    Replay(Outcome),
}

/// Result of the claim.
pub(crate) enum Claim {
    /// Everything that must be settled later is claimed.
    Claimed,
    /// An identical call was first and has ended.
    Replay(Outcome),
}

pub(crate) struct Passed {
    pub(crate) agent: Arc<Agent>,
    pub(crate) authorization: Granted,
    pub(crate) version: u64,
    /// The session as the tool sees it. `None` after the tool has run.
    pub(crate) state: Option<Arc<State>>,
    pub(crate) session_lock: Option<Hold>,
    pub(crate) remaining: Remaining,
    /// A later identical call may replay the outcome.
    pub(crate) is_recallable: bool,
    pub(crate) key: SessionKey,
    /// The client ran the tool and reports the result.
    pub(crate) is_reported: bool,
    /// The run, if the client ran other arguments than the admitted ones.
    pub(crate) mismatched_run: Option<Otherwise>,
}

impl Passed {
    /// Returns the effects of a failure that does not declare them.
    ///
    /// Toolgate cannot roll back what a client has done.
    pub(crate) fn effects_of_failure(&self) -> Effects {
        match self.authorization.tool().effects_of_failure() {
            Effects::RolledBack if self.is_reported => Effects::Unknown,
            other => other,
        }
    }

    /// Returns the effects of a finished run whose result is withheld.
    pub(crate) fn effects_of_run(&self) -> Effects {
        match self.effects_of_failure() {
            Effects::Unknown => Effects::Done,
            other => other,
        }
    }
}
