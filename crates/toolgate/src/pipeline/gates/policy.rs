//! Implements gate 8: evaluates the policies. This file is the only place that creates a
//! [`Permit`].

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::agent::ToolEntry;
use crate::call::error::{CallEffects, ErrorCategory, ToolError};
use crate::call::error_code;
use crate::call::{CallId, CheckedArguments, SessionKey};
use crate::files::FileExpectation;
use crate::limits::Charge;
use crate::policy::{
    AttachedPolicy, DecisionFacts, EnforcementMode, Obligations, ObservedVerdict, Policy,
    PolicyError, PolicyInput, Verdict,
};
use crate::store::{Approval, ApprovalState};
use crate::tool::ToolSpec;
use toolgate_json::Digest;

/// Permits one run of one tool with exactly these arguments.
///
/// Only the policy gate creates a permit, so no code can run a tool without a decision.
///
/// A handler gets a reference. Code outside this module cannot build a permit from another:
///
/// ```compile_fail
/// fn forged(judged: toolgate::CheckedArguments, other: toolgate::Permit) -> toolgate::Permit {
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
/// but any code may read a permit:
///
/// ```
/// fn seen(lent: &toolgate::Permit) -> (toolgate::CallId, toolgate::CheckedArguments) {
///     (lent.call_id(), lent.arguments().clone())
/// }
/// ```
#[derive(Debug)]
pub struct Permit {
    call: CallId,
    arguments: CheckedArguments,
    definition: Digest,
    /// Charges, each with the rule that it comes from.
    charges: Vec<(String, Charge, ToolError)>,
    /// Charges of rules in observe mode. They count, but never reject a call.
    observed_charges: Vec<(String, Charge, ToolError)>,
    file_expectations: Vec<FileExpectation>,
    tool: ToolRef,
}

/// Prints only the tool's name in `Debug` output.
struct ToolRef(Arc<ToolEntry>);

impl std::fmt::Debug for ToolRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0.spec.name())
    }
}

impl Permit {
    /// Returns the id of the permitted call.
    #[must_use]
    pub const fn call_id(&self) -> CallId {
        self.call
    }

    /// Returns the arguments that the policies checked.
    #[must_use]
    pub const fn arguments(&self) -> &CheckedArguments {
        &self.arguments
    }

    /// Returns the digest of the tool's definition at the time of the decision.
    #[must_use]
    pub const fn definition(&self) -> Digest {
        self.definition
    }

    pub(crate) fn has_secrets(&self) -> bool {
        !self.tool.0.secrets.is_empty()
    }

    /// Returns the effects of a finished run whose result is withheld.
    pub(crate) fn effects_of_run(&self) -> CallEffects {
        self.tool.0.effects_of_run()
    }

    pub(crate) const fn tool(&self) -> &Arc<ToolEntry> {
        &self.tool.0
    }

    pub(crate) fn charges(&self) -> &[(String, Charge, ToolError)] {
        &self.charges
    }

    pub(crate) fn observed_charges(&self) -> &[(String, Charge, ToolError)] {
        &self.observed_charges
    }

    pub(crate) fn file_expectations(&self) -> &[FileExpectation] {
        &self.file_expectations
    }
}

/// Authorizes a call: with a permit if toolgate runs the tool, without one if the client has run
/// the tool.
pub(crate) enum Authorization {
    Run(Permit),
    /// The call was admitted earlier, perhaps in another process, and is only settled here. Its
    /// charges are claimed already.
    Settle {
        arguments: CheckedArguments,
        tool: Arc<ToolEntry>,
    },
}

impl Authorization {
    pub(crate) const fn run_permit(&self) -> Option<&Permit> {
        match self {
            Self::Run(permit) => Some(permit),
            Self::Settle { .. } => None,
        }
    }

    pub(crate) const fn arguments(&self) -> &CheckedArguments {
        match self {
            Self::Run(permit) => permit.arguments(),
            Self::Settle { arguments, .. } => arguments,
        }
    }

    pub(crate) const fn tool(&self) -> &Arc<ToolEntry> {
        match self {
            Self::Run(permit) => permit.tool(),
            Self::Settle { tool, .. } => tool,
        }
    }
}

/// Asks a person to decide about a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ApprovalRequest {
    pub(crate) asked_by: String,
    pub(crate) reason: String,
    /// The people who may answer. Empty means anyone.
    pub(crate) approvers: Vec<String>,
}

/// Holds the decision of the policies: no denial, but possibly approval requests.
#[derive(Debug)]
pub(crate) struct PolicyDecision {
    permit: Permit,
    requests: Vec<ApprovalRequest>,
}

impl PolicyDecision {
    pub(crate) fn approval_requests(&self) -> &[ApprovalRequest] {
        &self.requests
    }

    pub(crate) const fn arguments(&self) -> &CheckedArguments {
        &self.permit.arguments
    }

    pub(crate) const fn tool(&self) -> &Arc<ToolEntry> {
        &self.permit.tool.0
    }

    /// Returns the permit if no approval is requested, or if this approval covers every request for
    /// exactly this call.
    pub(crate) fn into_permit(self, approval: Option<&Approval>) -> Result<Permit, Self> {
        let answered = |asked: &ApprovalRequest| {
            approval.is_some_and(|a| {
                let by_the_right_person = asked.approvers.is_empty()
                    || a.answered_by.as_ref().is_some_and(|by| asked.approvers.contains(by));
                a.state == ApprovalState::Approved
                    && a.digest == self.permit.arguments.digest()
                    && a.asked_by.contains(&asked.asked_by)
                    && by_the_right_person
            })
        };
        if self.requests.iter().all(answered) { Ok(self.permit) } else { Err(self) }
    }
}

/// Holds the verdict of one rule. A fault or panic is a denial.
#[derive(Debug)]
pub(crate) enum RuleVerdict {
    Allow(Obligations),
    Ask(String, Obligations),
    Deny(ToolError),
    Fault(ToolError),
}

/// Evaluates one rule for one call. Every gate that judges rules calls it.
///
/// Only tests replace the engine, to show that the canary notices when rules are not enforced.
pub trait PolicyEngine: Send + Sync {
    /// Returns what the rule decides.
    ///
    /// # Errors
    /// The rule could not decide, which denies the call.
    fn check(&self, policy: &dyn Policy, input: &PolicyInput<'_>) -> Result<Verdict, PolicyError>;
}

/// Asks the rule itself.
pub(crate) struct EnforcingEngine;

impl PolicyEngine for EnforcingEngine {
    fn check(&self, policy: &dyn Policy, input: &PolicyInput<'_>) -> Result<Verdict, PolicyError> {
        policy.check(input)
    }
}

/// Evaluates one rule.
pub(crate) fn evaluate_rule(
    engine: &dyn PolicyEngine,
    policy: &dyn Policy,
    ask: &PolicyInput<'_>,
) -> RuleVerdict {
    let name = policy.name();
    match catch_unwind(AssertUnwindSafe(|| engine.check(policy, ask))) {
        Ok(Ok(Verdict::Allow(terms))) => RuleVerdict::Allow(terms),
        Ok(Ok(Verdict::Ask(reason, terms))) => RuleVerdict::Ask(reason, terms),
        Ok(Ok(Verdict::Deny(error))) => RuleVerdict::Deny(*error),
        Ok(Err(fault)) => RuleVerdict::Fault(ToolError::from_code(
            error_code::POLICY_FAULT,
            format!("the policy `{name}` failed, so the call is denied: {fault}"),
        )),
        Err(_) => RuleVerdict::Fault(ToolError::from_code(
            error_code::POLICY_FAULT,
            format!("the policy `{name}` panicked, so the call is denied"),
        )),
    }
}

/// Describes what a rule in observe mode would have decided, unless it would have allowed the call.
pub(crate) fn observed_verdict(policy: &dyn Policy, said: &RuleVerdict) -> Option<ObservedVerdict> {
    let line = |said: &str, code: &str, message: &str| {
        Some(ObservedVerdict {
            rule: policy.name().to_owned(),
            said: said.to_owned(),
            code: code.to_owned(),
            message: message.to_owned(),
        })
    };
    match said {
        RuleVerdict::Allow(_) => None,
        RuleVerdict::Ask(reason, _) => line("ask", error_code::APPROVAL_REQUIRED, reason),
        RuleVerdict::Deny(error) => line("deny", &error.code, &error.message),
        RuleVerdict::Fault(error) => line("fault", &error.code, &error.message),
    }
}

/// Holds a denial by policy.
pub(crate) struct PolicyDenial {
    /// The rule whose denial is shown.
    pub(crate) rule: String,
    pub(crate) error: ToolError,
    /// All rules that denied the call.
    pub(crate) denied_by: Vec<Arc<dyn Policy>>,
    /// The first rule that denies the caller permission, with its error.
    pub(crate) permission_denial: Option<(String, ToolError)>,
    pub(crate) arguments: CheckedArguments,
    pub(crate) observed: Vec<ObservedVerdict>,
}

fn is_limit(policy: &dyn Policy, tool: &ToolSpec) -> bool {
    catch_unwind(AssertUnwindSafe(|| policy.static_summary(tool).limit.is_some())).unwrap_or(false)
}

/// Evaluates every policy of the tool.
///
/// Deny beats ask, and ask beats allow. Of several denials, the one with the closest attachment,
/// then the first declared, is shown. A fault or panic is a denial. Rules in observe mode are
/// evaluated too, but their verdict is only recorded.
pub(crate) fn evaluate_policies(
    engine: &dyn PolicyEngine,
    call: CallId,
    key: &SessionKey,
    tool: &Arc<ToolEntry>,
    arguments: CheckedArguments,
    facts: &DecisionFacts,
    mut asked: Vec<ApprovalRequest>,
) -> Result<(PolicyDecision, Vec<ObservedVerdict>), Box<PolicyDenial>> {
    let (mut charges, mut watched, mut expects, mut taken_down) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut by: Vec<Arc<dyn Policy>> = Vec::new();
    let mut denial: Option<(String, ToolError)> = None;
    let mut forbids: Option<(String, ToolError)> = None;
    // `governed_by` is sorted by precedence, closest attachment first.
    for AttachedPolicy { policy, .. } in &tool.governed_by {
        let name = policy.name();
        let said = evaluate_rule(
            engine,
            &**policy,
            &PolicyInput::new(call, key, &tool.spec, &arguments, facts),
        );
        if policy.mode() == EnforcementMode::Observe {
            taken_down.extend(observed_verdict(&**policy, &said));
            if let RuleVerdict::Allow(terms) | RuleVerdict::Ask(_, terms) = said {
                watched.extend(
                    terms
                        .charges
                        .into_iter()
                        .map(|(charge, error)| (name.to_owned(), charge, error)),
                );
            }
            continue;
        }
        let terms = match said {
            RuleVerdict::Allow(terms) => terms,
            RuleVerdict::Ask(reason, mut terms) => {
                asked.push(ApprovalRequest {
                    asked_by: name.to_owned(),
                    reason,
                    approvers: std::mem::take(&mut terms.approvers),
                });
                terms
            }
            RuleVerdict::Deny(ref error) | RuleVerdict::Fault(ref error) => {
                let error = error.clone();
                // A limit that fails to evaluate is not a permission denial: like every limit, it
                // concerns new calls.
                let is_untold =
                    || matches!(said, RuleVerdict::Fault(_)) && is_limit(&**policy, &tool.spec);
                if forbids.is_none() && error.category == ErrorCategory::Permission && !is_untold()
                {
                    forbids = Some((name.to_owned(), error.clone()));
                }
                denial.get_or_insert_with(|| (name.to_owned(), error));
                by.push(Arc::clone(policy));
                continue;
            }
        };
        charges.extend(
            terms.charges.into_iter().map(|(charge, error)| (name.to_owned(), charge, error)),
        );
        expects.extend(terms.file_expectations);
    }
    if let Some((rule, error)) = denial {
        return Err(Box::new(PolicyDenial {
            rule,
            error,
            denied_by: by,
            permission_denial: forbids,
            arguments,
            observed: taken_down,
        }));
    }
    let definition = tool.definition_digest;
    let permit = Permit {
        call,
        arguments,
        definition,
        charges,
        observed_charges: watched,
        file_expectations: expects,
        tool: ToolRef(Arc::clone(tool)),
    };
    Ok((PolicyDecision { permit, requests: asked }, taken_down))
}
