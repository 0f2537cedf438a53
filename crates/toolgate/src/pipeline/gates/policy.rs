//! Gate 8: do all policies of the tool allow the call? Only this gate creates a [`Permit`].

mod permit;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

pub use permit::Permit;
use permit::ToolRef;

use crate::agent::ToolEntry;
use crate::call::error::{ErrorCategory, ToolError};
use crate::call::error_code;
use crate::call::{CallId, CheckedArguments, SessionKey};
use crate::ledger::row::Gate;
use crate::pipeline::Toolgate;
use crate::pipeline::admission::ResolvedCall;
use crate::pipeline::call_state::CallState;
use crate::pipeline::rejection::Rejection;
use crate::policy::{
    AttachedPolicy, DecisionFacts, EnforcementMode, Obligations, ObservedVerdict, Policy,
    PolicyError, PolicyInput, Verdict,
};
use crate::session::state::SessionState;
use crate::store::{Approval, ApprovalState};
use crate::tool::ToolSpec;

/// Lets every policy of the tool decide, and creates the permit if none denies the call.
pub(crate) async fn run(
    gate: &Toolgate,
    resolved: &ResolvedCall<'_>,
    arguments: CheckedArguments,
    requests: Vec<ApprovalRequest>,
    session: &SessionState,
    call_state: &mut CallState,
) -> Result<PolicyDecision, Rejection> {
    call_state.enter_gate(Gate::Policy);
    let ResolvedCall { call, agent, tool, .. } = resolved;
    if call_state.explain.is_none() {
        gate.load_facts(resolved, &arguments, session, call_state).await?;
    }
    let engine = &*gate.0.engine;
    let (key, facts) = (&call.key, &call_state.facts);
    match evaluate_policies(engine, call_state.id, key, tool, arguments, facts, requests) {
        Ok((decision, observed)) => {
            if call_state.explain.is_none() {
                call_state.facts.observed = observed;
            }
            Ok(decision)
        }
        Err(denial) => {
            Err(Box::pin(gate.reject_denied(*denial, agent, tool, session, call_state)).await)
        }
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
        let answered = |request: &ApprovalRequest| {
            approval.is_some_and(|a| {
                let by_the_right_person = request.approvers.is_empty()
                    || a.answered_by.as_ref().is_some_and(|name| request.approvers.contains(name));
                a.state == ApprovalState::Approved
                    && a.digest == self.permit.arguments.digest()
                    && a.asked_by.contains(&request.asked_by)
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
    input: &PolicyInput<'_>,
) -> RuleVerdict {
    let name = policy.name();
    match catch_unwind(AssertUnwindSafe(|| engine.check(policy, input))) {
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
pub(crate) fn observed_verdict(
    policy: &dyn Policy,
    verdict: &RuleVerdict,
) -> Option<ObservedVerdict> {
    let record = |decision: &str, code: &str, message: &str| {
        Some(ObservedVerdict {
            rule: policy.name().to_owned(),
            said: decision.to_owned(),
            code: code.to_owned(),
            message: message.to_owned(),
        })
    };
    match verdict {
        RuleVerdict::Allow(_) => None,
        RuleVerdict::Ask(reason, _) => record("ask", error_code::APPROVAL_REQUIRED, reason),
        RuleVerdict::Deny(error) => record("deny", &error.code, &error.message),
        RuleVerdict::Fault(error) => record("fault", &error.code, &error.message),
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
    mut requests: Vec<ApprovalRequest>,
) -> Result<(PolicyDecision, Vec<ObservedVerdict>), Box<PolicyDenial>> {
    let (mut charges, mut observed_charges, mut file_expectations, mut observed) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut denied_by: Vec<Arc<dyn Policy>> = Vec::new();
    let mut denial: Option<(String, ToolError)> = None;
    let mut permission_denial: Option<(String, ToolError)> = None;
    // `governed_by` is sorted by precedence, closest attachment first.
    for AttachedPolicy { policy, .. } in &tool.governed_by {
        let name = policy.name();
        let verdict = evaluate_rule(
            engine,
            &**policy,
            &PolicyInput::new(call, key, &tool.spec, &arguments, facts),
        );
        if policy.mode() == EnforcementMode::Observe {
            observed.extend(observed_verdict(&**policy, &verdict));
            if let RuleVerdict::Allow(terms) | RuleVerdict::Ask(_, terms) = verdict {
                observed_charges.extend(
                    terms
                        .charges
                        .into_iter()
                        .map(|(charge, error)| (name.to_owned(), charge, error)),
                );
            }
            continue;
        }
        let terms = match verdict {
            RuleVerdict::Allow(terms) => terms,
            RuleVerdict::Ask(reason, mut terms) => {
                requests.push(ApprovalRequest {
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
                    || matches!(verdict, RuleVerdict::Fault(_)) && is_limit(&**policy, &tool.spec);
                if permission_denial.is_none()
                    && error.category == ErrorCategory::Permission
                    && !is_untold()
                {
                    permission_denial = Some((name.to_owned(), error.clone()));
                }
                denial.get_or_insert_with(|| (name.to_owned(), error));
                denied_by.push(Arc::clone(policy));
                continue;
            }
        };
        charges.extend(
            terms.charges.into_iter().map(|(charge, error)| (name.to_owned(), charge, error)),
        );
        file_expectations.extend(terms.file_expectations);
    }
    if let Some((rule, error)) = denial {
        return Err(Box::new(PolicyDenial {
            rule,
            error,
            denied_by,
            permission_denial,
            arguments,
            observed,
        }));
    }
    let definition = tool.definition_digest;
    let permit = Permit {
        call,
        arguments,
        definition,
        charges,
        observed_charges,
        file_expectations,
        tool: ToolRef(Arc::clone(tool)),
    };
    Ok((PolicyDecision { permit, requests }, observed))
}
