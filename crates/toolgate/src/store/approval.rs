//! Calls that wait for a person.

use std::sync::Arc;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::call::SessionKey;
use crate::json::Digest;
use crate::policy::ApprovalFact;

/// Where an approval stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ApprovalState {
    /// Nobody has answered.
    Waiting,
    /// Somebody said yes.
    Approved,
    /// Somebody said no.
    Denied,
    /// The call was made.
    Used,
}

/// A call that waits for a person, or did.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Approval {
    /// Its name.
    pub id: String,
    /// Whose call.
    pub key: SessionKey,
    /// Which tool.
    pub tool: Arc<str>,
    /// The exact call.
    pub digest: Digest,
    /// The arguments that will run. Not serialised with the rest: they may hold secrets, and a store must seal them.
    #[serde(skip)]
    pub arguments: Value,
    /// The arguments as a person may see them.
    pub shown: Value,
    /// The rules and hooks that asked: only their "ask" is answered.
    pub asked_by: Vec<String>,
    /// Who may answer: somebody who is in each of these lists.
    #[serde(default)]
    pub approvers: Vec<Vec<String>>,
    /// What the person reads.
    pub reason: String,
    /// When it was asked.
    pub asked_at: Timestamp,
    /// Until when it can be answered and used.
    pub expires: Timestamp,
    /// Where it stands.
    pub state: ApprovalState,
    /// Who answered.
    pub answered_by: Option<String>,
}

impl Approval {
    /// Whether a call may be made by it at a moment.
    #[must_use]
    pub fn is_usable(&self, now: Timestamp) -> bool {
        self.state == ApprovalState::Approved && now <= self.expires
    }

    /// What is written down of it with a decision.
    #[must_use]
    pub fn fact(&self) -> ApprovalFact {
        ApprovalFact {
            id: self.id.clone(),
            state: self.state,
            asked_by: self.asked_by.clone(),
            answered_by: self.answered_by.clone(),
            expires: self.expires,
            named: false,
        }
    }

    /// Whether this person may answer.
    #[must_use]
    pub fn may_be_answered_by(&self, person: &str) -> bool {
        self.approvers.iter().all(|people| people.iter().any(|name| name == person))
    }
}
