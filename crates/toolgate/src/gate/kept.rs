//! Permission that outlives its process: the first half of the path here, the second perhaps in another.

use std::sync::Arc;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tracing::Instrument;

use super::authorize::{Granted, Permit};
use super::pass::Passed;
use super::run::Ran;
use super::seen::{self, Otherwise};
use super::settle::Blind;
use super::trail::Trail;
use super::{Stop, Toolgate};
use crate::call::{Arguments, Call, CallId, Judged};
use crate::code;
use crate::context::{Remaining, Txn};
use crate::error::{Effects, ToolError};
use crate::json::{self, Digest, Pointer};
use crate::ledger::{Gate, Latency};
use crate::names::shown;
use crate::outcome::Answer;
use crate::policy::Facts;
use crate::store::{Intent, StoreError, Taken};
use crate::tool::Failure;

/// A call that was admitted, and that its client runs. What came of it is told with [`Toolgate::report_kept`], here or in
/// another process. Until then its claim is open, and what is never told becomes pending.
#[derive(Debug)]
#[must_use = "an admitted call must be reported"]
pub struct Kept {
    /// The call's name in the ledger.
    pub call: CallId,
    /// The arguments to run with: hooks may have rewritten them.
    pub arguments: Judged,
    /// Where the client must ask its user first: why.
    pub asks: Option<String>,
}

/// What is known of such a call, sealed into its claim.
#[derive(Serialize, Deserialize)]
pub(super) struct Parked {
    arguments: Value,
    asked: Option<Digest>,
    started: Timestamp,
    admitted: Timestamp,
    turn: Option<u64>,
    stop_reason: Option<String>,
    config: Digest,
    facts: Box<Facts>,
    latency: Latency,
    /// How far the session had come.
    stamp: u64,
    /// What it is about.
    #[serde(default)]
    about: Vec<(Arc<str>, Value)>,
}

impl Parked {
    /// What another process must know to settle it.
    pub(super) fn of(permit: &Permit, now: Timestamp, trail: &mut Trail) -> Result<Vec<u8>, ToolError> {
        let parked = Self {
            arguments: permit.arguments().value().clone(),
            asked: trail.asked,
            started: trail.started,
            admitted: now,
            turn: trail.turn,
            stop_reason: trail.stop_reason.clone(),
            config: trail.config,
            facts: trail.facts.clone(),
            latency: trail.latency(),
            stamp: trail.stamp,
            about: super::settle::entities(permit.tool(), &trail.arguments, None),
        };
        serde_json::to_vec(&parked).map_err(|_| ToolError::of(code::INTERNAL_FAULT, "the call cannot be kept"))
    }

    /// The call goes on as what it was when it was admitted. The arguments that it was admitted with.
    fn go_on(self, taken: &Taken, now: Timestamp, trail: &mut Trail) -> Value {
        trail.id = taken.intent.call;
        trail.tool = Arc::clone(&taken.intent.tool);
        trail.started = self.started;
        trail.turn = self.turn;
        trail.stop_reason = self.stop_reason;
        trail.config = self.config;
        trail.asked = self.asked;
        trail.stamp = self.stamp;
        trail.about = self.about;
        trail.facts = self.facts;
        trail.facts.claimed.clone_from(&taken.used);
        let away = now.duration_since(self.admitted).as_nanos();
        trail.resume(self.latency, u64::try_from(away).unwrap_or_default());
        self.arguments
    }
}

impl Toolgate {
    /// The first half of the path, for a client that runs its tools itself and comes back later: the pass is kept in the
    /// store under the name that the client gives the call.
    ///
    /// # Errors
    /// The answer, where the call was refused or replayed. It is recorded already.
    pub async fn admit_kept(&self, call: Call) -> Result<Kept, Answer> {
        let mut trail = Trail::open(self, &call, None);
        trail.kept = Some(call.client_id.clone().unwrap_or_default());
        trail.apart = true;
        trail.facts.reported = true;
        self.admit_apart(call, trail, |_, passed, mut trail| Kept {
            call: trail.id,
            arguments: passed.permit.arguments().clone(),
            asks: trail.asks.take(),
        })
        .await
    }

    /// The second half: what the client says that it ran, and what came of it. Only a call that was admitted, with exactly
    /// these arguments, and that nobody has reported yet, can be settled as a success; everything else is recorded as the
    /// violation that it is, and proves nothing.
    pub async fn report_kept(&self, call: Call, result: Result<Value, Failure>) -> Answer {
        let call = Arc::new(call);
        let trail = Trail::open(self, &call, None);
        let (id, span) = (trail.id, trail.span.clone());
        let (gate, told) = (self.clone(), Arc::clone(&call));
        match tokio::spawn(async move { gate.settle_kept(&told, result, trail).await }.instrument(span)).await {
            Ok(answer) => answer,
            Err(_) => self.lost(&call, id).await,
        }
    }

    /// The client's conversation is over: what it was admitted to and has not reported, nobody will report.
    ///
    /// # Errors
    /// The store cannot take it.
    pub async fn leave(&self, key: &crate::SessionKey) -> Result<(), StoreError> {
        self.0.store.leave(key, self.now()).await
    }

    async fn settle_kept(&self, call: &Call, result: Result<Value, Failure>, mut trail: Box<Trail>) -> Answer {
        trail.at(Gate::Settle);
        trail.facts.reported = true;
        let told = self.told(call, &mut trail);
        let ran = Arc::clone(&trail.arguments);
        let agent = self.0.agents.get(&call.key.agent).map(Arc::clone);
        if let Some(agent) = &agent {
            trail.config = agent.config;
        }
        let name = call.client_id.as_deref().unwrap_or_default();
        let taken = match self.0.store.take_pass(&call.key, name, &call.tool).await {
            Ok(taken) => taken,
            Err(error) => {
                let otherwise = Otherwise::new(told.as_ref(), &result);
                return self.refuse_unadmitted(not_taken_down(&error), call, &otherwise, trail).await;
            }
        };
        let otherwise = || Otherwise::new(told.as_ref(), &result);
        let Some(taken) = taken else {
            return self.refuse_unadmitted(never_admitted(&call.tool), call, &otherwise(), trail).await;
        };
        let Ok(parked) = serde_json::from_slice::<Parked>(&taken.pass) else {
            let error = ToolError::of(code::INTERNAL_FAULT, "what was kept of the call cannot be read").with_effects(Effects::Unknown);
            return self.refuse_unadmitted(Stop::new(error), call, &otherwise(), trail).await;
        };
        let arguments = parked.go_on(&taken, self.now(), &mut trail);
        let arguments = Judged::new(&taken.intent.tool, arguments).with_digest(|digest| self.0.redactor.keyed(digest));
        trail.digest = Some(arguments.digest());
        let as_admitted = told.as_ref().is_some_and(|told| told.digest() == arguments.digest());
        if !as_admitted {
            trail.facts.ran = told.as_ref().map(|_| (*ran).clone());
        }
        let Some((agent, tool)) = agent.as_ref().and_then(|agent| Some((agent, agent.tools.get(&taken.intent.tool)?))) else {
            // What of them is secret, only their tool knew.
            let known = taken.intent.row.as_ref().map(|row| Arc::clone(&row.arguments));
            trail.arguments = known.unwrap_or_else(|| Arc::new(self.0.redactor.mark(arguments.value())));
            // Of an agent that is gone nobody knows how to read what it says that it ran.
            let is_other = !as_admitted && agent.is_some();
            let seen = agent.as_ref().and_then(|agent| seen::blindly(agent, &otherwise()));
            let end = Blind { error: gone(&taken.intent, is_other, &result), ran: result.is_ok(), is_other: !as_admitted, seen };
            return self.end_blindly(end, &taken.intent, trail).await;
        };
        trail.arguments = self.0.redactor.redact_shared(arguments.shared(), &tool.secrets);
        let passed = Passed {
            agent: Arc::clone(agent),
            permit: Granted::ToSettle { arguments, tool: Arc::clone(tool) },
            version: 0,
            state: None,
            hold: None,
            remaining: Remaining::default(),
            recallable: !taken.intent.recall.is_empty(),
            key: call.key.clone(),
            reported: true,
            ran: (!as_admitted).then(otherwise),
        };
        let result = if as_admitted { result } else { Err(other_than_admitted()) };
        self.settle(Box::new(passed), Ran::ended(result, Txn::default()), trail).await
    }

    /// A client says that it ran what nobody let through: it proves nothing, and may have written and changed what it names all the same.
    async fn refuse_unadmitted(&self, stop: Stop, call: &Call, otherwise: &Otherwise, trail: Box<Trail>) -> Answer {
        let agent = self.0.agents.get(&call.key.agent);
        let (seen, revoked) = match agent.and_then(|agent| Some((agent, agent.tools.get(call.tool.as_str())?))) {
            Some((agent, tool)) => {
                let may_act = agent.principals.as_ref().is_none_or(|who| who.contains(&*call.key.principal));
                let could = may_act && self.leads_to(&call.tool, agent, &call.key).await;
                (seen::unadmitted(agent, tool, otherwise, could), tool.takes_away(&trail.arguments, None))
            }
            None => (None, Vec::new()),
        };
        self.refuse_with(stop, seen, revoked, trail).await
    }

    /// What the client says that it ran.
    fn told(&self, call: &Call, trail: &mut Trail) -> Option<Judged> {
        let agent = self.0.agents.get(&call.key.agent)?;
        let mut value = match &call.arguments {
            Arguments::Text(text) => json::parse(text, &agent.bounds).ok()?,
            Arguments::Value(value) if json::value_over_bounds(value, &agent.bounds).is_none() => value.clone(),
            Arguments::Value(_) => return None,
        };
        json::canonicalize_numbers(&mut value, &mut Pointer::default()).ok()?;
        let told = Judged::new(&call.tool, value).with_digest(|digest| self.0.redactor.keyed(digest));
        trail.digest = Some(told.digest());
        // What nobody declared may hold anything, and a misspelt name may hide a secret.
        let known = agent.tools.get(call.tool.as_str()).filter(|tool| tool.secrets.is_empty() || tool.takes(told.value()));
        trail.arguments = match known {
            Some(tool) => self.0.redactor.redact_shared(told.shared(), &tool.secrets),
            None => Arc::new(self.0.redactor.mark(told.value())),
        };
        Some(told)
    }
}

/// A client speaks of a call that nobody let through, or of one that it has spoken of before.
fn never_admitted(tool: &str) -> Stop {
    let message = format!("a run of `{}` was reported that was never admitted, or was reported before; it proves nothing", shown(tool));
    Stop::at(Gate::Settle, ToolError::of(code::NOT_ADMITTED, message).with_effects(Effects::Unknown))
}

/// Whatever the client says, it has run: nobody may take it for something to repeat. Its pass stays where it is.
fn not_taken_down(error: &StoreError) -> Stop {
    tracing::error!(%error, "the store is not available, and a report could not be taken down");
    let message = "the store is not available, so what came of the call is not recorded; do not repeat it";
    Stop::at(Gate::Settle, ToolError::of(code::STORE_UNAVAILABLE, message).with_effects(Effects::Unknown))
}

const OTHER: &str = "what was run is not what was admitted: its arguments were changed in between; it proves nothing";

fn other_than_admitted() -> Failure {
    Failure::of(code::NOT_AS_ADMITTED, OTHER).effects(Effects::Done)
}

/// The tool of an admitted call is not there any more: that it was run stands, and what it left as far as the client says so.
fn gone(intent: &Intent, is_other: bool, result: &Result<Value, Failure>) -> ToolError {
    if is_other {
        return ToolError::of(code::NOT_AS_ADMITTED, OTHER).with_effects(Effects::Done);
    }
    let effects = match result {
        _ if !intent.effect => Effects::None,
        Ok(_) => Effects::Done,
        Err(failure) => failure.declared_effects().unwrap_or(Effects::Unknown),
    };
    let message = format!(
        "`{}` was admitted and is not there any more: that it was run is written down, what came of it cannot be looked at and proves nothing",
        intent.tool
    );
    ToolError::of(code::UNKNOWN_TOOL, message).with_effects(effects)
}
