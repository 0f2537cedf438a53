//! Gate 8, the last word. Permission is a value, and this file is the only place that makes one.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::call::{CallId, Judged, SessionKey};
use crate::code;
use crate::error::{Category, Effects, ToolError};
use crate::json::Digest;
use crate::limits::Charge;
use crate::policy::{Ask, Attached, Facts, Mode, Observed, Policy, Terms, Verdict};
use crate::registry::Registered;
use crate::resource::Expect;
use crate::store::{Approval, ApprovalState};
use crate::tool::Spec;

/// Permission to run one tool once with exactly these arguments. Only the policy gate makes one, so
/// no code can run a tool unasked.
///
/// A handler is lent one. Nobody outside can put one together, not even from another:
///
/// ```compile_fail
/// fn forged(judged: toolgate::Judged, other: toolgate::Permit) -> toolgate::Permit {
///     toolgate::Permit { arguments: judged, ..other }
/// }
/// ```
///
/// nor keep one for a second run:
///
/// ```compile_fail
/// fn kept(lent: &toolgate::Permit) -> toolgate::Permit {
///     lent.clone()
/// }
/// ```
///
/// though everybody may look at the one that is lent:
///
/// ```
/// fn seen(lent: &toolgate::Permit) -> (toolgate::CallId, toolgate::Judged) {
///     (lent.call_id(), lent.arguments().clone())
/// }
/// ```
#[derive(Debug)]
pub struct Permit {
    call: CallId,
    arguments: Judged,
    definition: Digest,
    /// Each with the rule that it comes from.
    charges: Vec<(String, Charge, ToolError)>,
    /// Those of rules that only observe: they count, and stop nothing.
    watched: Vec<(String, Charge, ToolError)>,
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

    /// What a run that finished left behind, if its result cannot be handed on.
    pub(crate) fn effects_of_run(&self) -> Effects {
        self.tool.0.effects_of_run()
    }

    pub(super) const fn tool(&self) -> &Arc<Registered> {
        &self.tool.0
    }

    pub(super) fn charges(&self) -> &[(String, Charge, ToolError)] {
        &self.charges
    }

    pub(super) fn watched(&self) -> &[(String, Charge, ToolError)] {
        &self.watched
    }

    pub(super) fn expects(&self) -> &[Expect] {
        &self.expects
    }
}

/// What a call was let through with. A handler is run with a permit, and of a call that its client has run there is none.
pub(super) enum Granted {
    ToRun(Permit),
    /// It was admitted before, in another process perhaps, and is only settled here: its charges are claimed.
    ToSettle {
        arguments: Judged,
        tool: Arc<Registered>,
    },
}

impl Granted {
    pub(super) const fn to_run(&self) -> Option<&Permit> {
        match self {
            Self::ToRun(permit) => Some(permit),
            Self::ToSettle { .. } => None,
        }
    }

    pub(super) const fn arguments(&self) -> &Judged {
        match self {
            Self::ToRun(permit) => permit.arguments(),
            Self::ToSettle { arguments, .. } => arguments,
        }
    }

    pub(super) const fn tool(&self) -> &Arc<Registered> {
        match self {
            Self::ToRun(permit) => permit.tool(),
            Self::ToSettle { tool, .. } => tool,
        }
    }
}

/// Somebody wants a person to decide.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Asked {
    pub(super) by: String,
    pub(super) reason: String,
    /// Who may answer; anybody where nobody is named.
    pub(super) approvers: Vec<String>,
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
                let by_the_right_person =
                    asked.approvers.is_empty() || a.answered_by.as_ref().is_some_and(|by| asked.approvers.contains(by));
                a.state == ApprovalState::Approved
                    && a.digest == self.permit.arguments.digest()
                    && a.asked_by.contains(&asked.by)
                    && by_the_right_person
            })
        };
        if self.asked.iter().all(answered) { Ok(self.permit) } else { Err(self) }
    }
}

/// What one rule says of a call. A fault or panic is a denial.
#[derive(Debug)]
pub(super) enum Said {
    Allow(Terms),
    Ask(String, Terms),
    Deny(ToolError),
    Fault(ToolError),
}

/// Asks one rule.
pub(super) fn verdict(policy: &dyn Policy, ask: &Ask<'_>) -> Said {
    // Only in a build that is made to be seen failing: a gate that is off, once a file is there.
    #[cfg(toolgate_broken_on_purpose)]
    if std::env::var_os("TOOLGATE_OFF").is_some_and(|file| std::path::Path::new(&file).exists()) {
        return Said::Allow(Terms::default());
    }
    let name = policy.name();
    match catch_unwind(AssertUnwindSafe(|| policy.check(ask))) {
        Ok(Ok(Verdict::Allow(terms))) => Said::Allow(terms),
        Ok(Ok(Verdict::Ask(reason, terms))) => Said::Ask(reason, terms),
        Ok(Ok(Verdict::Deny(error))) => Said::Deny(*error),
        Ok(Err(fault)) => {
            Said::Fault(ToolError::of(code::POLICY_FAULT, format!("the policy `{name}` could not decide, so the call is refused: {fault}")))
        }
        Err(_) => Said::Fault(ToolError::of(code::POLICY_FAULT, format!("the policy `{name}` panicked, so the call is refused"))),
    }
}

/// What a rule that only observes would have said, where it is worth a line.
pub(super) fn observed(policy: &dyn Policy, said: &Said) -> Option<Observed> {
    let line = |said: &str, code: &str, message: &str| {
        Some(Observed { rule: policy.name().to_owned(), said: said.to_owned(), code: code.to_owned(), message: message.to_owned() })
    };
    match said {
        Said::Allow(_) => None,
        Said::Ask(reason, _) => line("ask", code::APPROVAL_REQUIRED, reason),
        Said::Deny(error) => line("deny", &error.code, &error.message),
        Said::Fault(error) => line("fault", &error.code, &error.message),
    }
}

/// Somebody said no.
pub(super) struct Denied {
    /// The one that is shown.
    pub(super) rule: String,
    pub(super) error: ToolError,
    /// Everyone who said no.
    pub(super) by: Vec<Arc<dyn Policy>>,
    /// The first who said that the caller may not at all, with its word.
    pub(super) forbids: Option<(String, ToolError)>,
    pub(super) arguments: Judged,
    pub(super) observed: Vec<Observed>,
}

fn is_limit(policy: &dyn Policy, tool: &Spec) -> bool {
    catch_unwind(AssertUnwindSafe(|| policy.outline(tool).caps.is_some())).unwrap_or(false)
}

/// Evaluates every policy of the tool. Deny beats ask beats allow; of several denials the closest
/// attachment, then the first declared, is shown. A fault or panic is a denial. A rule that only
/// observes is asked like the others, and its word is taken down.
pub(super) fn authorize(
    call: CallId,
    key: &SessionKey,
    tool: &Arc<Registered>,
    arguments: Judged,
    facts: &Facts,
    mut asked: Vec<Asked>,
) -> Result<(Judgement, Vec<Observed>), Box<Denied>> {
    let (mut charges, mut watched, mut expects, mut taken_down) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut by: Vec<Arc<dyn Policy>> = Vec::new();
    let mut denial: Option<(String, ToolError)> = None;
    let mut forbids: Option<(String, ToolError)> = None;
    // Closest first: the order of `governed_by` is the order of precedence.
    for Attached { policy, .. } in &tool.governed_by {
        let name = policy.name();
        let said = verdict(&**policy, &Ask::new(call, key, &tool.spec, &arguments, facts));
        if policy.mode() == Mode::Observe {
            taken_down.extend(observed(&**policy, &said));
            if let Said::Allow(terms) | Said::Ask(_, terms) = said {
                watched.extend(terms.charges.into_iter().map(|(charge, error)| (name.to_owned(), charge, error)));
            }
            continue;
        }
        let terms = match said {
            Said::Allow(terms) => terms,
            Said::Ask(reason, mut terms) => {
                asked.push(Asked { by: name.to_owned(), reason, approvers: std::mem::take(&mut terms.approvers) });
                terms
            }
            Said::Deny(ref error) | Said::Fault(ref error) => {
                let error = error.clone();
                // A limit that cannot be told speaks of new acts, as every limit does.
                let is_untold = || matches!(said, Said::Fault(_)) && is_limit(&**policy, &tool.spec);
                if forbids.is_none() && error.category == Category::Permission && !is_untold() {
                    forbids = Some((name.to_owned(), error.clone()));
                }
                denial.get_or_insert_with(|| (name.to_owned(), error));
                by.push(Arc::clone(policy));
                continue;
            }
        };
        charges.extend(terms.charges.into_iter().map(|(charge, error)| (name.to_owned(), charge, error)));
        expects.extend(terms.expects);
    }
    if let Some((rule, error)) = denial {
        return Err(Box::new(Denied { rule, error, by, forbids, arguments, observed: taken_down }));
    }
    let definition = tool.definition;
    let permit = Permit { call, arguments, definition, charges, watched, expects, tool: ToolRef(Arc::clone(tool)) };
    Ok((Judgement { permit, asked }, taken_down))
}
