//! Explains what would happen to a call, gate by gate and rule by rule, without making the call.

use std::fmt;
use std::sync::Arc;

use rust_decimal::Decimal;
use serde::Serialize;
use serde_json::Value;

use super::{Rejection, Toolgate};
use crate::agent::{Agent, ToolEntry};
use crate::call::error::ToolError;
use crate::call::{Call, CheckedArguments};
use crate::ledger::row::Gate;
use crate::limits::{Charge, ChargeError};
use crate::pipeline::call_state::CallState;
use crate::pipeline::gates::admit::dedup_keys;
use crate::pipeline::gates::hooks::negative_charge_message;
use crate::pipeline::gates::policy;
use crate::pipeline::gates::policy::evaluate_rule;
use crate::policy::{EnforcementMode, Obligations, PolicyInput, PolicyLevel, RuleCheck, RuleTrace};
use crate::store::{
    ApprovalState, PriorCall, SessionRequest, SessionSnapshot, prior_call_error, with_limit_details,
};

/// Predicts the outcome of a call.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PredictedOutcome {
    /// The call would run.
    Run,
    /// The call would wait for approval.
    Ask,
    /// The call would get the outcome of an earlier run.
    Replay,
    /// The call would be rejected.
    Refuse(Box<ToolError>),
}

/// Result of a gate or a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GateResult {
    /// The gate or rule allows the call.
    Pass,
    /// The gate or rule denies the call.
    Deny,
    /// The gate or rule asks for approval.
    Ask,
    /// The rule failed, which counts as a denial.
    Fault,
    /// The tool failed, or its result was invalid. Occurs only in explanations of recorded calls.
    Failed,
    /// The call does not reach this gate.
    NotReached,
    /// The gate has no result without making the call, or the rule concerns other tools.
    NotAsked,
}

/// Result of one gate.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GateExplanation {
    /// The gate.
    pub gate: Gate,
    /// The result.
    pub said: GateResult,
    /// The reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// Result of one rule.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RuleExplanation {
    /// The name of the rule.
    pub rule: String,
    /// Where the rule is attached. `None` if the rule does not govern the tool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub level: Option<PolicyLevel>,
    /// Whether the rule enforces or observes.
    pub mode: EnforcementMode,
    /// The result.
    pub said: GateResult,
    /// The reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// The values that the rule checked.
    pub looked_at: Vec<RuleCheck>,
}

/// Explains why a call would be allowed or rejected. Secrets are masked.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Explanation {
    /// The tool.
    pub tool: String,
    /// The arguments, with secrets masked.
    pub arguments: Value,
    /// Every gate, in order.
    pub gates: Vec<GateExplanation>,
    /// Every rule of the agent. Rules that govern the tool come first, closest attachment first.
    pub rules: Vec<RuleExplanation>,
    /// The predicted outcome.
    pub would: PredictedOutcome,
}

/// Collects the notes of an explanation.
struct ExplainState {
    gates: Vec<GateExplanation>,
    rules: Vec<RuleExplanation>,
}

/// The prediction for a call that is not rejected.
type AcceptedPrediction = PredictedOutcome;

impl Toolgate {
    /// Explains what would happen to a call, with every gate, every rule and the values that
    /// decide.
    ///
    /// Reads the session and changes nothing: writes no row, counts no call and runs no hook.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use toolgate::policy::{Condition, Deny};
    /// use toolgate::{Agent, Toolgate, builtin};
    /// let no_secrets = Deny::new("no_secrets", ["write_file"])
    ///     .when("/path", Condition::Glob("*.env".into()));
    /// let agent = Agent::builder("a")
    ///     .files(toolgate::MemoryFs::default())
    ///     .tools(builtin::files())
    ///     .policy(no_secrets)
    ///     .build()?;
    /// let session = Toolgate::builder().agent(agent).build()?.session("a", "alice", "s");
    /// let arguments = serde_json::json!({"path": "prod.env", "content": ""});
    /// let why = session.explain("write_file", arguments).await;
    /// assert!(why.to_string().contains("/path like `*.env`"), "{why}");
    /// # Ok(()) }
    /// ```
    pub async fn explain(&self, call: &Call) -> Explanation {
        self.explain_with_state(call, CallState::for_explain(self, call, None)).await
    }

    /// Explains a call whose state is partly known already.
    pub(crate) async fn explain_with_state(
        &self,
        call: &Call,
        mut trail: Box<CallState>,
    ) -> Explanation {
        let mut walk = ExplainState { gates: Vec::new(), rules: Vec::new() };
        let would = match Box::pin(self.explain_gates(call, &mut trail, &mut walk)).await {
            Ok(would) => would,
            Err(stop) => {
                let gate = stop.gate.unwrap_or_else(|| trail.gate());
                walk.gates.push(GateExplanation {
                    gate,
                    said: GateResult::Deny,
                    why: Some(stop.error.message.clone()),
                });
                PredictedOutcome::Refuse(stop.error)
            }
        };
        for gate in Gate::ALL {
            if !walk.gates.iter().any(|note| note.gate == gate) {
                let said = if matches!(would, PredictedOutcome::Run) {
                    GateResult::NotAsked
                } else {
                    GateResult::NotReached
                };
                walk.gates.push(GateExplanation { gate, said, why: None });
            }
        }
        walk.gates.sort_by_key(|note| note.gate);
        Explanation {
            tool: trail.tool.to_string(),
            arguments: (*trail.arguments).clone(),
            gates: walk.gates,
            rules: walk.rules,
            would,
        }
    }

    /// Runs the same gates in the same order as [`Toolgate::call`], but only reads.
    async fn explain_gates(
        &self,
        call: &Call,
        trail: &mut CallState,
        walk: &mut ExplainState,
    ) -> Result<AcceptedPrediction, Rejection> {
        let agent = self.check_principal(call, trail).await?;
        walk.add_pass(Gate::Admit, trail);
        trail.enter_gate(Gate::Resolve);
        let tool = self.resolve_tool(&agent, call)?;
        walk.add_pass(Gate::Resolve, trail);
        trail.enter_gate(Gate::Validate);
        let resumed = self.load_named_approval(call, &tool, trail).await?;
        trail.enter_gate(Gate::Validate);
        let arguments = self.validate_arguments(&agent, &tool, call, resumed.as_deref(), trail)?;
        walk.add_pass(Gate::Validate, trail);
        let entered = self.inspect_session(call, &tool, &arguments, trail).await?;
        trail.enter_gate(Gate::Policy);
        self.load_facts(&agent, call, &tool, &arguments, &entered.state, trail).await?;
        walk.rules = self.explain_rules(&agent, call, &tool, &arguments, trail);
        trail.enter_gate(Gate::Recall);
        match &entered.prior_call {
            Some(PriorCall::Settled(Some(outcome))) => {
                self.recheck_policies(
                    &agent,
                    call,
                    &tool,
                    (&arguments, outcome),
                    &entered.state,
                    trail,
                )
                .await?;
                walk.gates.push(GateExplanation {
                    gate: Gate::Recall,
                    said: GateResult::Pass,
                    why: Some("the call was made before; its outcome is replayed".to_owned()),
                });
                return Ok(PredictedOutcome::Replay);
            }
            Some(other) => return Err(prior_call_error(other).into()),
            None => walk.add_pass(Gate::Recall, trail),
        }
        trail.enter_gate(Gate::Progress);
        self.check_repetition(call, &tool, &entered, resumed.as_deref(), trail).await?;
        walk.add_pass(Gate::Progress, trail);
        trail.enter_gate(Gate::Limits);
        let (budget, _) = self.check_limits(&agent, call, &tool, &entered, trail).await?;
        walk.add_pass(Gate::Limits, trail);
        let hooks = tool.hooks.iter().map(|hook| hook.name()).collect::<Vec<_>>().join(", ");
        let (said, why) = if hooks.is_empty() {
            (GateResult::Pass, None)
        } else {
            (GateResult::NotAsked, Some(format!("only an actual call runs hooks: {hooks}")))
        };
        walk.gates.push(GateExplanation { gate: Gate::Hooks, said, why });
        trail.enter_gate(Gate::Policy);
        let judged = policy::evaluate_policies(
            &*self.0.engine,
            trail.id,
            &call.key,
            &tool,
            arguments,
            &trail.facts,
            Vec::new(),
        );
        let judgement = match judged {
            Ok((judgement, _)) => judgement,
            Err(denied) => {
                return Err(Box::pin(self.reject_denied(
                    *denied,
                    &agent,
                    &tool,
                    &entered.state,
                    trail,
                ))
                .await);
            }
        };
        walk.add_pass(Gate::Policy, trail);
        trail.enter_gate(Gate::Approval);
        let known = match &resumed {
            Some(approval) => Some((**approval).clone()),
            None => self
                .0
                .store
                .approval_for(&call.key, judgement.arguments().digest())
                .await?
                .filter(|known| trail.started <= known.expires),
        };
        if let Some(refused) = known.as_ref().filter(|known| {
            known.state == ApprovalState::Denied && !judgement.approval_requests().is_empty()
        }) {
            return Err(crate::pipeline::gates::approval::approval_unusable_error(refused).into());
        }
        let permit = match judgement.into_permit(known.as_ref()) {
            Ok(permit) => permit,
            Err(asked) => {
                if let Some(refused) =
                    crate::pipeline::gates::approval::handler_refusal(asked.tool())
                {
                    return Err(refused);
                }
                let why = asked
                    .approval_requests()
                    .iter()
                    .map(|asked| asked.reason.as_str())
                    .collect::<Vec<_>>()
                    .join("; ");
                walk.gates.push(GateExplanation {
                    gate: Gate::Approval,
                    said: GateResult::Ask,
                    why: Some(why),
                });
                return Ok(PredictedOutcome::Ask);
            }
        };
        walk.add_pass(Gate::Approval, trail);
        trail.enter_gate(Gate::Claim);
        let ruled = permit
            .charges()
            .iter()
            .map(|(rule, charge, error)| (charge.clone(), Some(rule.clone()), error.clone()));
        let all: Vec<(Charge, Option<String>, ToolError)> =
            budget.into_iter().map(|(charge, error)| (charge, None, error)).chain(ruled).collect();
        let charges: Vec<Charge> = all.iter().map(|(charge, ..)| charge.clone()).collect();
        let mut used = Vec::new();
        for (room, (charge, rule, error)) in
            self.0.store.check_charges(&charges, trail.started).await?.into_iter().zip(&all)
        {
            let note = walk.rules.iter_mut().find(|note| Some(&note.rule) == rule.as_ref());
            match room {
                Ok(so_far) => {
                    let said = format!("{} of {} used", so_far.normalize(), charge.cap.normalize());
                    used.push(said.clone());
                    if let Some(note) = note {
                        (note.said, note.why) = (GateResult::Pass, Some(said));
                    }
                }
                Err(over) => {
                    let error = with_limit_details(error.clone(), &over);
                    if let Some(note) = note {
                        note.mark_exceeded(charge, &over, error.message.clone());
                    }
                    return Err(Box::pin(self.reject_unclaimed(
                        error.into(),
                        &permit,
                        &agent,
                        &entered.state,
                        trail,
                    ))
                    .await);
                }
            }
        }
        let watched: Vec<Charge> =
            permit.observed_charges().iter().map(|(_, charge, _)| charge.clone()).collect();
        for (room, (rule, charge, error)) in self
            .0
            .store
            .check_charges(&watched, trail.started)
            .await?
            .into_iter()
            .zip(permit.observed_charges())
        {
            if let Some(note) = walk.rules.iter_mut().find(|note| note.rule == *rule) {
                match room {
                    _ if charge.amount < Decimal::ZERO => {
                        (note.said, note.why) =
                            (GateResult::Fault, Some(negative_charge_message(rule)))
                    }
                    Ok(_) if note.said == GateResult::NotReached => {
                        (note.said, note.why) = (GateResult::Pass, None)
                    }
                    Ok(_) => {}
                    Err(over) => note.mark_exceeded(
                        charge,
                        &over,
                        with_limit_details(error.clone(), &over).message,
                    ),
                }
            }
        }
        walk.gates.push(GateExplanation {
            gate: Gate::Claim,
            said: GateResult::Pass,
            why: (!used.is_empty()).then(|| used.join("; ")),
        });
        Ok(PredictedOutcome::Run)
    }

    async fn inspect_session(
        &self,
        call: &Call,
        tool: &ToolEntry,
        arguments: &CheckedArguments,
        trail: &mut CallState,
    ) -> Result<Box<SessionSnapshot>, Rejection> {
        trail.requested_digest = Some(arguments.digest());
        let recall = dedup_keys(call, tool, arguments.digest());
        let enter = SessionRequest {
            key: &call.key,
            digest: arguments.digest(),
            dedup_keys: &recall,
            counts_repetition: true,
            polling: tool.spec.polling.as_ref(),
            lock: None,
            now: trail.started,
        };
        Ok(self.0.store.inspect_session(enter).await?)
    }

    fn explain_rules(
        &self,
        agent: &Agent,
        call: &Call,
        tool: &Arc<ToolEntry>,
        arguments: &CheckedArguments,
        trail: &CallState,
    ) -> Vec<RuleExplanation> {
        let governing = tool.governed_by.iter().map(|attached| {
            let trace = RuleTrace::default();
            let ask = PolicyInput::new(trail.id, &call.key, &tool.spec, arguments, &trail.facts)
                .with_trace(&trace);
            let (said, why) = match evaluate_rule(&*self.0.engine, &*attached.policy, &ask) {
                policy::RuleVerdict::Allow(terms) => charged_result(&terms),
                policy::RuleVerdict::Ask(reason, _) => (GateResult::Ask, Some(reason)),
                policy::RuleVerdict::Deny(error) => (GateResult::Deny, Some(error.message)),
                policy::RuleVerdict::Fault(error) => (GateResult::Fault, Some(error.message)),
            };
            let (rule, mode) = (attached.policy.name().to_owned(), attached.policy.mode());
            RuleExplanation {
                rule,
                level: Some(attached.level),
                mode,
                said,
                why,
                looked_at: trace.into_checks(),
            }
        });
        let mut notes: Vec<RuleExplanation> = governing.collect();
        for policy in &agent.rules {
            if !notes.iter().any(|note| note.rule == policy.name()) {
                let (rule, mode) = (policy.name().to_owned(), policy.mode());
                notes.push(RuleExplanation {
                    rule,
                    level: None,
                    mode,
                    said: GateResult::NotAsked,
                    why: None,
                    looked_at: Vec::new(),
                });
            }
        }
        notes
    }
}

/// Returns the result of a rule that allows the call. If the rule charges a limit, the claim
/// decides.
fn charged_result(terms: &Obligations) -> (GateResult, Option<String>) {
    match terms.charges.iter().find(|(charge, _)| charge.amount > charge.cap) {
        Some((_, error)) => (GateResult::Deny, Some(error.message.clone())),
        None if terms.charges.is_empty() => (GateResult::Pass, None),
        None => (GateResult::NotReached, Some("not reached (claim)".to_owned())),
    }
}

impl RuleExplanation {
    /// Marks the rule as denying because the call exceeds one of its limits.
    fn mark_exceeded(&mut self, charge: &Charge, over: &ChargeError, why: String) {
        (self.said, self.why) = (GateResult::Deny, Some(why));
        let limit = format!("at most {}", charge.cap);
        for look in
            self.looked_at.iter_mut().filter(|look| look.what == limit && over.used > Decimal::ZERO)
        {
            (look.holds, look.found) =
                (false, format!("{} used, {}", over.used.normalize(), look.found));
        }
    }
}

impl ExplainState {
    fn add_pass(&mut self, gate: Gate, trail: &mut CallState) {
        trail.enter_gate(gate);
        self.gates.push(GateExplanation { gate, said: GateResult::Pass, why: None });
    }
}

impl fmt::Display for GateResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Pass => "pass",
            Self::Deny => "deny",
            Self::Ask => "ask",
            Self::Fault => "fault",
            Self::Failed => "failed",
            Self::NotReached => "-",
            Self::NotAsked => "not asked",
        })
    }
}

impl Explanation {
    /// Returns the reason why the call would not run, or an empty string.
    fn reason(&self) -> &str {
        match &self.would {
            PredictedOutcome::Run | PredictedOutcome::Replay => "",
            PredictedOutcome::Ask => self
                .gates
                .iter()
                .find(|note| note.said == GateResult::Ask)
                .and_then(|note| note.why.as_deref())
                .unwrap_or_default(),
            PredictedOutcome::Refuse(error) => &error.message,
        }
    }

    /// Formats every gate and every rule, one per line.
    ///
    /// Omits the reason for the outcome, which the caller has printed already.
    #[must_use]
    pub fn format_steps(&self) -> String {
        let reason = self.reason();
        let line = |head: String, said: GateResult, why: Option<&str>| {
            let is_no = matches!(said, GateResult::Deny | GateResult::Ask | GateResult::Fault);
            let why = why.filter(|why| !(is_no && reason.contains(*why))).unwrap_or_default();
            let line = format!("{head} {why}");
            format!("{}\n", line.trim_end())
        };
        let mut text = "gates\n".to_owned();
        for note in &self.gates {
            text.push_str(&line(
                format!("  {:<9} {:<9}", note.gate, note.said),
                note.said,
                note.why.as_deref(),
            ));
        }
        text.push_str("\nrules\n");
        for note in &self.rules {
            let mode = if note.mode == EnforcementMode::Observe { " (observes)" } else { "" };
            text.push_str(&line(
                format!("  {:<9} {}{mode}", note.said, note.rule),
                note.said,
                note.why.as_deref(),
            ));
            for look in &note.looked_at {
                text.push_str(&format!(
                    "            {} {}: {}\n",
                    if look.holds { "+" } else { "-" },
                    look.what,
                    look.found
                ));
            }
        }
        text
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} {}", self.tool, self.arguments)?;
        match &self.would {
            PredictedOutcome::Run => writeln!(f, "would run")?,
            PredictedOutcome::Ask => writeln!(f, "would wait for approval: {}", self.reason())?,
            PredictedOutcome::Replay => writeln!(f, "would get the outcome of an earlier run")?,
            PredictedOutcome::Refuse(error) => {
                writeln!(f, "would be refused: {error}")?;
                if let Some(next) = &error.next {
                    writeln!(f, "next: {} {}", next.tool, next.arguments)?;
                }
            }
        }
        write!(f, "\n{}", self.format_steps())
    }
}
