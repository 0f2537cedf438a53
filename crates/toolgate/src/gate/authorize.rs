//! Gate 8, the last word. Permission is a value, and this file is the only place that makes one.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::Stop;
use crate::call::{CallId, Judged, SessionKey};
use crate::code;
use crate::error::ToolError;
use crate::json::Digest;
use crate::limits::Charge;
use crate::policy::{Ask, Facts, Verdict};
use crate::registry::Registered;
use crate::resource::Expect;
use crate::store::{Approval, ApprovalState};

/// Permission to run one tool once with exactly these arguments. Only the policy gate makes one, so
/// no code can run a tool unasked.
#[derive(Debug)]
pub struct Permit {
    call: CallId,
    arguments: Judged,
    definition: Digest,
    /// Each with the rule that it comes from.
    charges: Vec<(String, Charge, ToolError)>,
    expects: Vec<Expect>,
    tool: ToolRef,
}

/// Keeps `Debug` short.
struct ToolRef(Arc<Registered>);

impl std::fmt::Debug for ToolRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0.spec.name())
    }
}

impl Permit {
    /// The call that is permitted.
    #[must_use]
    pub const fn call_id(&self) -> CallId {
        self.call
    }

    /// The arguments that were judged.
    #[must_use]
    pub const fn arguments(&self) -> &Judged {
        &self.arguments
    }

    /// Digest of the tool's definition at the time of the judgement.
    #[must_use]
    pub const fn definition(&self) -> Digest {
        self.definition
    }

    pub(crate) fn has_secrets(&self) -> bool {
        !self.tool.0.secrets.is_empty()
    }

    pub(super) const fn tool(&self) -> &Arc<Registered> {
        &self.tool.0
    }

    pub(super) fn charges(&self) -> &[(String, Charge, ToolError)] {
        &self.charges
    }

    pub(super) fn expects(&self) -> &[Expect] {
        &self.expects
    }
}

/// Somebody wants a person to decide.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Asked {
    pub(super) by: String,
    pub(super) reason: String,
}

/// Nobody said no. Perhaps somebody asked.
#[derive(Debug)]
pub(super) struct Judgement {
    permit: Permit,
    asked: Vec<Asked>,
}

impl Judgement {
    pub(super) fn asked(&self) -> &[Asked] {
        &self.asked
    }

    pub(super) const fn arguments(&self) -> &Judged {
        &self.permit.arguments
    }

    pub(super) const fn tool(&self) -> &Arc<Registered> {
        &self.permit.tool.0
    }

    /// Permission, if nobody asked or a person has answered everyone who did, for exactly this call.
    pub(super) fn permit(self, approval: Option<&Approval>) -> Result<Permit, Self> {
        let answered = |asked: &Asked| {
            approval.is_some_and(|a| {
                a.state == ApprovalState::Approved && a.digest == self.permit.arguments.digest() && a.asked_by.contains(&asked.by)
            })
        };
        if self.asked.iter().all(answered) { Ok(self.permit) } else { Err(self) }
    }
}

/// Evaluates every policy of the tool. Deny beats ask beats allow; of several denials the closest
/// attachment, then the first declared, is shown. A fault or panic is a denial.
pub(super) fn authorize(
    call: CallId,
    key: &SessionKey,
    tool: &Arc<Registered>,
    arguments: Judged,
    facts: &Facts,
    mut asked: Vec<Asked>,
    rule: &mut Option<String>,
) -> Result<Judgement, Stop> {
    let (mut charges, mut expects) = (Vec::new(), Vec::new());
    let mut denial: Option<(String, ToolError)> = None;
    // Closest first: the order of `governed_by` is the order of precedence.
    for attached in &tool.governed_by {
        let name = attached.policy.name();
        let ask = Ask { call, key, tool: &tool.spec, arguments: &arguments, facts };
        let verdict = catch_unwind(AssertUnwindSafe(|| attached.policy.check(&ask)));
        let denied = match verdict {
            Ok(Ok(Verdict::Allow(terms))) => {
                charges.extend(terms.charges.into_iter().map(|(charge, error)| (name.to_owned(), charge, error)));
                expects.extend(terms.expects);
                continue;
            }
            Ok(Ok(Verdict::Ask(reason, terms))) => {
                asked.push(Asked { by: name.to_owned(), reason });
                charges.extend(terms.charges.into_iter().map(|(charge, error)| (name.to_owned(), charge, error)));
                expects.extend(terms.expects);
                continue;
            }
            Ok(Ok(Verdict::Deny(error))) => *error,
            Ok(Err(fault)) => {
                ToolError::of(code::POLICY_FAULT, format!("the policy `{name}` could not decide, so the call is refused: {fault}"))
            }
            Err(_) => ToolError::of(code::POLICY_FAULT, format!("the policy `{name}` panicked, so the call is refused")),
        };
        denial.get_or_insert_with(|| (name.to_owned(), denied));
    }
    if let Some((name, error)) = denial {
        *rule = Some(name);
        return Err(error.into());
    }
    let definition = tool.definition;
    Ok(Judgement { permit: Permit { call, arguments, definition, charges, expects, tool: ToolRef(Arc::clone(tool)) }, asked })
}
