//! Defines approvals: calls that wait for the answer of a person.

use std::sync::Arc;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::call::SessionKey;
use crate::policy::ApprovalFact;
use toolgate_json::Digest;

/// The state of an approval.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ApprovalState {
    /// The approval has no answer yet.
    Waiting,
    /// A person approved the call.
    Approved,
    /// A person denied the call.
    Denied,
    /// The approved call was made.
    Used,
}

/// A request for the approval of one call, and its answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Approval {
    /// The id of the approval.
    pub id: String,
    /// The session of the call.
    pub key: SessionKey,
    /// The tool of the call.
    pub tool: Arc<str>,
    /// The digest of the exact call.
    pub digest: Digest,
    /// The arguments that will run.
    ///
    /// They are not serialized, because they may contain secrets and a store must encrypt them.
    #[serde(skip)]
    pub arguments: Value,
    /// The arguments with secrets redacted, for the approver.
    pub shown: Value,
    /// The rules and hooks that asked; the answer counts only for them.
    pub asked_by: Vec<String>,
    /// Lists of people; an approver must be in each of them.
    #[serde(default)]
    pub approvers: Vec<Vec<String>>,
    /// The text that the approver reads.
    pub reason: String,
    /// The time of the request.
    pub asked_at: Timestamp,
    /// The time until which the approval can be answered and used.
    pub expires: Timestamp,
    /// The state of the approval.
    pub state: ApprovalState,
    /// The person who answered.
    pub answered_by: Option<String>,
}

impl Approval {
    /// Returns whether the approval allows the call now.
    #[must_use]
    pub fn is_usable(&self, now: Timestamp) -> bool {
        self.state == ApprovalState::Approved && now <= self.expires
    }

    /// Returns the fact that is recorded with a decision.
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

    /// Returns whether this person may answer.
    #[must_use]
    pub fn can_be_answered_by(&self, person: &str) -> bool {
        self.approvers.iter().all(|people| people.iter().any(|name| name == person))
    }
}
