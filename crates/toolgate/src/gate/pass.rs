//! Represents a call that is admitted and not settled yet.

use std::sync::Arc;

use super::authorize::Granted;
use super::seen::Otherwise;
use crate::call::SessionKey;
use crate::context::Remaining;
use crate::error::Effects;
use crate::outcome::Outcome;
use crate::registry::Agent;
use crate::session::State;
use crate::store::Hold;

/// Result of the gates before the tool.
pub(super) enum Admitted {
    Admitted(Box<Passed>),
    Replay(Outcome),
}

/// Result of the claim.
pub(super) enum Claim {
    /// Everything that must be settled later is claimed.
    Claimed,
    /// An identical call was first and has ended.
    Replay(Outcome),
}

pub(super) struct Passed {
    pub(super) agent: Arc<Agent>,
    pub(super) authorization: Granted,
    pub(super) version: u64,
    /// The session as the tool sees it. `None` after the tool has run.
    pub(super) state: Option<Arc<State>>,
    pub(super) session_lock: Option<Hold>,
    pub(super) remaining: Remaining,
    /// A later identical call may replay the outcome.
    pub(super) is_recallable: bool,
    pub(super) key: SessionKey,
    /// The client ran the tool and reports the result.
    pub(super) is_reported: bool,
    /// The run, if the client ran other arguments than the admitted ones.
    pub(super) mismatched_run: Option<Otherwise>,
}

impl Passed {
    /// Returns the effects of a failure that does not declare them.
    ///
    /// Toolgate cannot roll back what a client has done.
    pub(super) fn effects_of_failure(&self) -> Effects {
        match self.authorization.tool().effects_of_failure() {
            Effects::RolledBack if self.is_reported => Effects::Unknown,
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
