//! Implements gates 1 to 6: admit, resolve, validate, recall, progress and limits.

use std::sync::Arc;
use std::time::Duration;

use jiff::SignedDuration;
use rust_decimal::Decimal;
use rust_decimal::prelude::ToPrimitive;
use tokio::time::Instant;

use crate::agent::{Agent, ToolEntry};
use crate::call::error::{FieldError, ToolError};
use crate::call::error_code;
use crate::call::outcome::Outcome;
use crate::call::{Arguments, Call, CheckedArguments, SessionKey};
use crate::ledger::row::Gate;
use crate::limits::{Charge, ChargeError, ChargeUnit};
use crate::pipeline::call_state::CallState;
use crate::pipeline::gates::approval::{
    approval_unusable_error, approval_waiting_error, handler_refusal,
};
use crate::pipeline::{Rejection, Toolgate};
use crate::policy::ApprovalFact;
use crate::store::{
    Approval, ApprovalState, DedupKey, PauseTarget, PriorCall, SessionRequest, SessionSnapshot,
    prior_call_error, with_limit_details,
};
use crate::tool::Effect;
use crate::tool::context::RemainingBudget;
use toolgate_json;
use toolgate_json::{Digest, Pointer};
use toolgate_text::escape_for_display;

impl Toolgate {
    /// Gate 1: checks that the principal may act as this agent, that nothing is paused, and that
    /// the arguments are not too large.
    pub(crate) async fn check_principal(
        &self,
        call: &Call,
        trail: &mut CallState,
    ) -> Result<Arc<Agent>, Rejection> {
        if let Some(why) = &call.transport_rejection {
            (trail.facts.turned_away, trail.facts.misread) =
                (Some(why.clone()), call.is_unparsable);
            let error = if call.is_unparsable {
                ToolError::from_code(error_code::INVALID_REQUEST, why.clone())
            } else {
                ToolError::from_code(error_code::FORBIDDEN, why.clone())
            };
            return Err(error.into());
        }
        let agent = Arc::clone(
            self.0.agents.get(&call.key.agent).ok_or_else(|| forbidden_rejection(&call.key))?,
        );
        trail.config = agent.definition_digest;
        if agent.principals.as_ref().is_some_and(|allowed| !allowed.contains(&*call.key.principal))
        {
            return Err(forbidden_rejection(&call.key));
        }
        // Do not reveal whether a tool is paused to a caller who may not see the tool.
        let seen = agent
            .tools
            .get(call.tool.as_str())
            .is_none_or(|tool| tool.is_visible_to(&call.key.principal));
        let tool = if seen { Arc::clone(&trail.tool) } else { Arc::from("") };
        if self.0.store.may_be_paused()
            && let Some((target, why)) = self.0.store.find_pause(&call.key, &tool).await?
        {
            let error = paused_target_error(&target, &why);
            trail.facts.paused = Some((target, why));
            return Err(error.into());
        }
        let over = match &call.arguments {
            Arguments::Text(text) => toolgate_json::find_exceeded_bound(text, &agent.bounds),
            Arguments::Value(value) => {
                toolgate_json::find_exceeded_bound_of_value(value, &agent.bounds)
            }
        };
        match over {
            Some(why) => Err(ToolError::from_code(
                error_code::PAYLOAD_TOO_LARGE,
                format!("the arguments are too large: {why}"),
            )
            .into()),
            None => Ok(agent),
        }
    }

    /// Gate 2: finds the tool, if this caller may see it.
    pub(crate) fn resolve_tool(
        &self,
        agent: &Agent,
        call: &Call,
    ) -> Result<Arc<ToolEntry>, Rejection> {
        if let Some(tool) = agent
            .tools
            .get(call.tool.as_str())
            .filter(|tool| tool.is_visible_to(&call.key.principal))
        {
            return Ok(Arc::clone(tool));
        }
        let mut names = agent.visible_names(&call.key.principal);
        // An entry point that runs tools does not offer tools that clients run themselves.
        if call.extension.is_some() {
            names.retain(|name| {
                agent.tools.get(*name).is_some_and(|tool| !tool.spec.is_run_by_client())
            });
        }
        let suggestion = toolgate_text::suggest::find_closest(&call.tool, names.iter().copied());
        let did_you_mean = suggestion
            .map(|name| format!("; did you mean `{name}`?"))
            .unwrap_or_else(|| ".".to_owned());
        let available = names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        let mut error = ToolError::from_code(
            error_code::UNKNOWN_TOOL,
            format!(
                "there is no tool `{}`{did_you_mean} Available: {available}",
                escape_for_display(&call.tool)
            ),
        );
        error.errors.push(FieldError {
            path: String::new(),
            expected: "the name of a tool".to_owned(),
            got: escape_for_display(&call.tool),
            did_you_mean: suggestion.map(str::to_owned),
        });
        Err(error.into())
    }

    /// Loads the approval that the call names. Its stored arguments are the ones that run.
    pub(crate) async fn load_named_approval(
        &self,
        call: &Call,
        tool: &ToolEntry,
        trail: &mut CallState,
    ) -> Result<Option<Box<Approval>>, Rejection> {
        let Some(id) = &call.approval else { return Ok(None) };
        trail.enter_gate(Gate::Approval);
        let known = self.0.store.approval(id).await?;
        trail.facts.approval =
            known.as_ref().map(|approval| ApprovalFact { named: true, ..approval.fact() });
        match known.filter(|approval| approval.key == call.key && approval.tool == tool.spec.name) {
            Some(approval) if approval.is_usable(trail.started) => Ok(Some(Box::new(approval))),
            Some(approval)
                if approval.state == ApprovalState::Waiting
                    && trail.started <= approval.expires =>
            {
                Err(handler_refusal(tool)
                    .unwrap_or_else(|| approval_waiting_error(&approval).into()))
            }
            // The outcome of a call made with this approval may be replayed. Gate 5 rejects
            // everything else.
            Some(approval) if call.idempotency_key.is_some() || tool.spec.once => {
                Ok(Some(Box::new(approval)))
            }
            Some(approval) => Err(approval_unusable_error(&approval).into()),
            None => Err(ToolError::from_code(
                error_code::APPROVAL_DENIED,
                format!(
                    "there is no approval `{}` for this tool in this session",
                    escape_for_display(id)
                ),
            )
            .into()),
        }
    }

    /// Gate 3: parses the arguments as strict JSON, canonicalizes them and checks the schema.
    pub(crate) fn validate_arguments(
        &self,
        agent: &Agent,
        tool: &ToolEntry,
        call: &Call,
        resumed: Option<&Approval>,
        trail: &mut CallState,
    ) -> Result<CheckedArguments, Rejection> {
        let refuse = |message: String| {
            Rejection::new(ToolError::from_code(
                error_code::INVALID_ARGUMENTS,
                format!("{}: {message}", tool.spec.name),
            ))
        };
        let value = match (&call.arguments, resumed) {
            (_, Some(approval)) => approval.arguments.clone(),
            (Arguments::Text(text), _) if text.iter().all(u8::is_ascii_whitespace) => {
                serde_json::json!({})
            }
            (Arguments::Text(text), _) => {
                let read = if tool.secrets.is_empty() {
                    toolgate_json::parse
                } else {
                    toolgate_json::parse_with_hidden_keys
                };
                read(text, &agent.bounds)
                    .map_err(|e| refuse(format!("the arguments are not valid JSON: {e}")))?
            }
            (Arguments::Value(value), _) => {
                let mut value = value.clone();
                toolgate_json::canonicalize_numbers(&mut value, &mut Pointer::default()).map_err(
                    |(at, why)| {
                        refuse(if tool.secrets.is_empty() {
                            format!("{why} (at `{at}`)")
                        } else {
                            why
                        })
                    },
                )?;
                value
            }
        };
        self.check_input_schema(tool, value, trail)
    }

    /// Checks arguments against the schema. Also used after a hook has rewritten them.
    pub(crate) fn check_input_schema(
        &self,
        tool: &ToolEntry,
        mut value: serde_json::Value,
        trail: &mut CallState,
    ) -> Result<CheckedArguments, Rejection> {
        // The changed definition does not say which arguments are secret, so all of them are
        // masked.
        if tool.spec.veiled {
            trail.arguments = Arc::new(self.0.redactor.mark(&value));
            let held = || {
                ToolError::from_code(
                    error_code::DEFINITION_CHANGED,
                    format!("`{}` is quarantined because its definition changed", tool.spec.name),
                )
                .with_effects(crate::CallEffects::None)
            };
            return Err(handler_refusal(tool).unwrap_or_else(|| held().into()));
        }
        let checked = match &tool.input {
            Some(schema) => schema.validate(&tool.spec.name, &mut value),
            None => Ok(()),
        };
        match checked {
            Ok(()) => {
                let judged = CheckedArguments::new(&tool.spec.name, value);
                // The digest is always keyed. Which arguments are secret may change, but a call
                // must keep its digest.
                let judged = judged.with_digest(|digest| self.0.redactor.key_digest(digest));
                trail.digest = Some(judged.digest());
                trail.arguments =
                    self.0.redactor.redact_shared(judged.shared_value(), &tool.secrets);
                Ok(judged)
            }
            Err(invalid) => {
                // A misspelled argument name may carry a secret. If the tool has secrets, mask all
                // invalid arguments.
                trail.arguments = if tool.secrets.is_empty() {
                    Arc::new(value)
                } else {
                    Arc::new(self.0.redactor.mark(&value))
                };
                let mut error =
                    ToolError::from_code(error_code::INVALID_ARGUMENTS, invalid.message);
                error.errors = invalid.errors;
                Err(error.into())
            }
        }
    }

    /// Locks the session, loads it and counts the call.
    ///
    /// A tool with effects gets an exclusive lock, a read a shared one. A batch holds one lock for
    /// all its calls.
    pub(crate) async fn open_session(
        &self,
        call: &Call,
        tool: &ToolEntry,
        arguments: &CheckedArguments,
        resumed: bool,
        held: bool,
        trail: &mut CallState,
    ) -> Result<Box<SessionSnapshot>, Rejection> {
        trail.requested_digest = Some(arguments.digest());
        let recall = dedup_keys(call, tool, arguments.digest());
        let left =
            trail.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let wait = left.map_or(self.0.busy_timeout, |left| left.min(self.0.busy_timeout));
        let enter = SessionRequest {
            key: &call.key,
            digest: arguments.digest(),
            dedup_keys: &recall,
            counts_repetition: !resumed,
            polling: tool.spec.polling.as_ref(),
            lock: (!held).then_some((tool.spec.effect != Effect::Read, wait)),
            now: trail.started,
        };
        let entered = tokio::select! {
            biased;
            entered = self.0.store.open_session(enter) => entered?,
            () = trail.cancel.cancelled() => return Err(Rejection::at_gate(Gate::Claim, ToolError::from_code(error_code::CANCELLED, "the call was cancelled before it began"))),
        };
        let entered = entered.ok_or_else(busy_rejection)?;
        trail.facts.after = Some(entered.row_count);
        trail.facts.opened = Some(entered.started_at);
        (trail.facts.recalled, trail.facts.recalled_by) =
            (entered.prior_call.as_ref().map(PriorCall::fact), entered.dedup_key_kind);
        trail.facts.progress = Some(entered.repetitions);
        Ok(entered)
    }

    /// Gate 4: returns the outcome of an earlier identical call, if the caller may still make the
    /// call.
    pub(crate) async fn recall_outcome(
        &self,
        agent: &Agent,
        call: &Call,
        tool: &Arc<ToolEntry>,
        arguments: &CheckedArguments,
        entered: &SessionSnapshot,
        trail: &mut CallState,
    ) -> Result<Option<Outcome>, Rejection> {
        match &entered.prior_call {
            None => Ok(None),
            Some(PriorCall::Settled(Some(outcome))) => {
                Box::pin(self.recheck_policies(
                    agent,
                    call,
                    tool,
                    (arguments, outcome),
                    &entered.state,
                    trail,
                ))
                .await?;
                Ok(Some(outcome.clone()))
            }
            Some(other) => Err(prior_call_error(other).into()),
        }
    }

    /// Gate 5: rejects calls that repeat without progress.
    pub(crate) async fn check_repetition(
        &self,
        call: &Call,
        tool: &ToolEntry,
        entered: &SessionSnapshot,
        resumed: Option<&Approval>,
        trail: &mut CallState,
    ) -> Result<(), Rejection> {
        // No call was made with an approval that is used, expired or denied, so there is nothing to
        // replay.
        match resumed {
            Some(approval) if approval.is_usable(trail.started) => return Ok(()),
            Some(approval) => {
                return Err(Rejection::at_gate(Gate::Approval, approval_unusable_error(approval)));
            }
            None => {}
        }
        let Err(error) = entered.repetitions.check(&tool.spec.name, tool.spec.polling.as_ref())
        else {
            return Ok(());
        };
        // Repeating a call after its approval is not a loop.
        let approved = match trail.requested_digest {
            Some(asked) if error.code == error_code::LOOP_DETECTED => {
                self.0.store.approval_for(&call.key, asked).await?
            }
            _ => None,
        };
        trail.facts.approval = approved.as_ref().map(Approval::fact);
        if approved.is_some_and(|approval| approval.is_usable(trail.started)) {
            Ok(())
        } else {
            Err(error.into())
        }
    }

    /// Gate 6: checks deadlines and budgets. Charges are reserved at the claim.
    pub(crate) async fn check_limits(
        &self,
        agent: &Agent,
        call: &Call,
        tool: &ToolEntry,
        entered: &SessionSnapshot,
        trail: &mut CallState,
    ) -> Result<(Vec<(Charge, ToolError)>, RemainingBudget), Rejection> {
        if trail.deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            trail.facts.late = true;
            return Err(ToolError::from_code(
                error_code::DEADLINE_EXCEEDED,
                "the deadline of the call has passed",
            )
            .into());
        }
        if let Some(wall) = agent.limits.session.wall {
            let left = |at: jiff::Timestamp| {
                wall.saturating_sub(
                    Duration::try_from(at.duration_since(entered.started_at)).unwrap_or_default(),
                )
            };
            if left(trail.started).is_zero() {
                return Err(ToolError::from_code(
                    error_code::DEADLINE_EXCEEDED,
                    format!("the session has used up its time limit of {wall:?}; stop and report what you have"),
                )
                .into());
            }
            // The session's time limit also ends a running call.
            trail.deadline = crate::pipeline::earlier_deadline(
                trail.deadline,
                Instant::now().checked_add(left(self.now())),
            );
        }
        let charges = agent.limits.charges(&call.key, tool.spec.cost);
        let mut remaining = RemainingBudget::default();
        if charges.is_empty() {
            return Ok((charges, remaining));
        }
        let bare: Vec<Charge> = charges.iter().map(|(charge, _)| charge.clone()).collect();
        let room = self.0.store.check_charges(&bare, trail.started).await?;
        let used =
            |room: &Result<Decimal, ChargeError>| room.map_or_else(|over| over.used, |used| used);
        trail.facts.budget = room
            .iter()
            .zip(&bare)
            .map(|(room, c)| (c.counter.clone(), c.window, used(room)))
            .collect();
        for (room, (charge, error)) in room.iter().zip(&charges) {
            let used = room.map_err(|over| with_limit_details(error.clone(), &over))?;
            let left = (charge.cap - used).max(Decimal::ZERO);
            match charge.unit {
                ChargeUnit::Tokens => {
                    remaining.tokens = min_of_options(remaining.tokens, left.to_u64())
                }
                ChargeUnit::Money => remaining.money = min_of_options(remaining.money, Some(left)),
                ChargeUnit::Fixed | ChargeUnit::Attempt => {}
            }
        }
        Ok((charges, remaining))
    }
}

fn min_of_options<T: Ord>(a: Option<T>, b: Option<T>) -> Option<T> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// Returns the keys under which a call is recalled: the client's key and, for a tool declared
/// `once`, its arguments.
///
/// The second key prevents a client from repeating a `once` call under another key.
pub(crate) fn dedup_keys(call: &Call, tool: &ToolEntry, digest: Digest) -> Vec<DedupKey> {
    let by_key =
        call.idempotency_key.as_ref().map(|key| dedup_key(&call.key, tool, format!("key:{key}")));
    by_key.into_iter().chain(once_key(&call.key, tool, digest)).collect()
}

/// Returns the key under which a call of a `once` tool is recalled.
pub(crate) fn once_key(key: &SessionKey, tool: &ToolEntry, digest: Digest) -> Option<DedupKey> {
    tool.spec.once.then(|| dedup_key(key, tool, format!("once:{digest}")))
}

fn dedup_key(of: &SessionKey, tool: &ToolEntry, key: String) -> DedupKey {
    DedupKey {
        principal: Arc::clone(&of.principal),
        agent: Arc::clone(&of.agent),
        tool: Arc::clone(&tool.spec.name),
        key,
    }
}

/// Returns how long a claim stays valid before the call counts as abandoned.
pub(crate) fn lease_duration(timeout: Duration) -> SignedDuration {
    SignedDuration::try_from(timeout.saturating_add(Duration::from_secs(60)))
        .unwrap_or(SignedDuration::MAX)
}

/// Rejects a call because another call holds the session lock.
pub(crate) fn busy_rejection() -> Rejection {
    Rejection::at_gate(
        Gate::Claim,
        ToolError::from_code(
            error_code::BUSY,
            "another call of this session is still running; wait for it",
        )
        .retry_after_ms(1_000),
    )
}

/// Rejects a call because the principal may not act as the agent.
pub(crate) fn forbidden_rejection(key: &SessionKey) -> Rejection {
    Rejection::new(ToolError::from_code(
        error_code::FORBIDDEN,
        format!(
            "`{}` may not act as the agent `{}`",
            escape_for_display(&key.principal),
            escape_for_display(&key.agent)
        ),
    ))
}

/// Returns the error for a paused target.
pub(crate) fn paused_target_error(target: &PauseTarget, why: &str) -> ToolError {
    let what = match target {
        PauseTarget::Agent(name) => format!("the agent `{name}`"),
        PauseTarget::Tool(name) => format!("the tool `{name}`"),
        PauseTarget::Principal(name) => format!("`{}`", escape_for_display(name)),
        PauseTarget::Session(_) => "this session".to_owned(),
    };
    ToolError::from_code(error_code::PAUSED, format!("{what} is paused by an operator: {why}"))
}
