//! Defines the runtime that library users build and call.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ahash::HashMap;
use tracing::Instrument;

use crate::agent::Agent;
use crate::call::error::{CallEffects, ToolError};
use crate::call::error_code;
use crate::call::event::{Event, EventListener};
use crate::call::outcome::{Answer, Outcome};
use crate::call::{Call, CallId, SessionKey};
use crate::ledger::spool::Spool;
use crate::pipeline::call_state::CallState;
use crate::pipeline::gates::policy::{EnforcingEngine, PolicyEngine};
use crate::pipeline::rejection::{Rejection, paused_target_error};
use crate::pipeline::spawn_on_drop::{SpawnOnDrop, poll_then_spawn};
use crate::redact::Redactor;
use crate::session::handle::Session;
use crate::store::{
    Approval, ClaimRecord, ClaimResolution, MemoryStore, PauseTarget, Store, StoreError,
};

/// Runs calls: holds the agents, the store and the pipeline that every call goes through.
///
/// Cheap to clone.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use serde_json::json;
/// use toolgate::{Agent, Toolgate, builtin};
///
/// let agent = Agent::builder("desk").tool(builtin::calc()).build()?;
/// let gate = Toolgate::builder().agent(agent).build()?;
/// let session = gate.session("desk", "alice", "conversation-1");
///
/// let answer = session.call("calc", json!({"expression": "0.1 + 0.2"})).await;
/// assert_eq!(answer.outcome.success().map(|o| &o.value["result"]), Some(&json!(0.3)));
///
/// let answer = session.call("calc", json!({"expr": "1 + 1"})).await;
/// assert_eq!(
///     answer.outcome.error().map(|e| e.message.as_str()),
///     Some("`calc` requires `expression` (string); got `expr`, did you mean `expression`?"),
/// );
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Toolgate(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    pub(crate) agents: HashMap<Arc<str>, Arc<Agent>>,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) listeners: Vec<EventListener>,
    pub(crate) redactor: Redactor,
    pub(crate) engine: Arc<dyn PolicyEngine>,
    pub(crate) spool: Arc<Spool>,
    /// Identifies this process in claims.
    pub(crate) term: Arc<str>,
    pub(crate) busy_timeout: Duration,
    pub(crate) approval_ttl: Duration,
}

impl Toolgate {
    /// Takes a call through all gates.
    ///
    /// If the caller drops the future, the tool is cancelled, but the call is still recorded. A
    /// call with effects runs on its own task. A read moves to its own task when its caller goes
    /// away.
    pub async fn call(&self, call: Call) -> Answer {
        let call = Arc::new(call);
        let call_state = CallState::start(self, &call, None);
        let (id, span) = (call_state.id, call_state.span.clone());
        let cancel_guard = call_state.cancel.clone().drop_guard();
        let gate = self.clone();
        let shared_call = Arc::clone(&call);
        let path =
            async move { gate.run_pipeline(&shared_call, call_state).await }.instrument(span);
        let ended = if self.is_read(&call) {
            SpawnOnDrop::new(path).await
        } else {
            poll_then_spawn(path).await
        };
        match ended {
            Some(answer) => {
                // The caller is still there, so background work that the tool started may continue.
                cancel_guard.disarm();
                answer
            }
            None => Box::pin(self.record_internal_error(&call, id)).await,
        }
    }

    fn is_read(&self, call: &Call) -> bool {
        let tool = self
            .0
            .agents
            .get(&call.key.agent)
            .and_then(|agent| agent.tools.get(call.tool.as_str()));
        tool.is_some_and(|tool| tool.spec.effect() == crate::Effect::Read)
    }
}

impl Toolgate {
    /// Records a call whose task panicked, which no input should be able to cause.
    pub(crate) async fn record_internal_error(&self, call: &Call, id: CallId) -> Answer {
        let call_state = CallState::start(self, call, Some(id));
        let error = ToolError::from_code(
            error_code::INTERNAL_FAULT,
            "toolgate failed while it handled this call; do not repeat the call",
        )
        .with_effects(CallEffects::Unknown);
        let tool = self
            .0
            .agents
            .get(&call.key.agent)
            .and_then(|agent| agent.tools.get(call.tool.as_str()));
        let revoked =
            tool.map(|tool| tool.revoked_evidence(&call_state.arguments, None)).unwrap_or_default();
        self.end_rejected_with(Rejection::new(error), None, revoked, call_state).await
    }
}

/// Builds a [`Toolgate`].
pub struct ToolgateBuilder {
    pub(crate) agents: HashMap<Arc<str>, Arc<Agent>>,
    store: Option<Arc<dyn Store>>,
    listeners: Vec<EventListener>,
    redact_patterns: Vec<regex::Regex>,
    engine: Arc<dyn PolicyEngine>,
    spool: Option<PathBuf>,
    busy_timeout: Duration,
    approval_ttl: Duration,
}

impl Toolgate {
    /// Starts a builder with an in-memory store and the system clock.
    #[must_use]
    pub fn builder() -> ToolgateBuilder {
        ToolgateBuilder {
            agents: HashMap::default(),
            store: None,
            listeners: Vec::new(),
            redact_patterns: Vec::new(),
            engine: Arc::new(EnforcingEngine),
            spool: None,
            busy_timeout: Duration::from_secs(5),
            approval_ttl: Duration::from_secs(15 * 60),
        }
    }

    /// Returns a handle for one session of a principal with an agent.
    pub fn session(&self, agent: &str, principal: &str, session: &str) -> Session {
        // Reuse the agent's own `Arc`, so that keys are cheap to compare and clone.
        let agent = self
            .0
            .agents
            .get(agent)
            .map_or_else(|| Arc::from(agent), |agent| Arc::clone(&agent.name));
        Session::new(self.clone(), SessionKey::new(agent, principal, session))
    }

    /// Returns an agent by name.
    #[must_use]
    pub fn agent(&self, name: &str) -> Option<&Agent> {
        self.0.agents.get(name).map(AsRef::as_ref)
    }

    /// Pauses an agent, tool, principal or session immediately.
    ///
    /// # Errors
    /// The store cannot record the change.
    pub async fn pause(&self, target: PauseTarget, reason: &str) -> Result<(), StoreError> {
        self.0.store.set_pause(target, Some(reason.to_owned())).await
    }

    /// Resumes an agent, tool, principal or session.
    ///
    /// # Errors
    /// The store cannot record the change.
    pub async fn unpause(&self, target: PauseTarget) -> Result<(), StoreError> {
        self.0.store.set_pause(target, None).await
    }

    /// Returns the error for a request that is not a call, such as a prompt or a resource.
    ///
    /// Returns `None` if nothing is paused that the request needs, and the store is available.
    pub async fn paused_error(&self, key: &SessionKey) -> Option<ToolError> {
        if !self.0.store.may_be_paused() {
            return None;
        }
        match self.0.store.find_pause(key, &Arc::from("")).await {
            Ok(stopped) => stopped.map(|(target, why)| paused_target_error(&target, &why)),
            Err(error) => Some(*Rejection::from(error).error),
        }
    }

    /// Returns an approval by id.
    ///
    /// # Errors
    /// The store is unavailable.
    pub async fn approval(&self, id: &str) -> Result<Option<Approval>, StoreError> {
        self.0.store.approval(id).await
    }

    /// Approves or denies a waiting call. Returns false if the call no longer waits.
    ///
    /// # Errors
    /// The store cannot record the change.
    pub async fn answer_approval(
        &self,
        id: &str,
        approved: bool,
        by: &str,
    ) -> Result<bool, StoreError> {
        self.0.store.answer_approval(id, approved, by).await
    }

    /// Lists the calls whose outcome is unknown.
    ///
    /// # Errors
    /// The store is unavailable.
    pub async fn pending_calls(&self) -> Result<Vec<ClaimRecord>, StoreError> {
        // The spool may contain the end of a call that would otherwise be listed.
        if self.0.spool.has_waiting_rows() {
            self.recover_spool().await?;
        }
        self.0.store.pending_claims().await
    }

    /// Settles a call with unknown outcome by hand, as done (`happened`) or as never executed.
    ///
    /// The ledger records `by` as the person who settled the call. Returns false if the call is not
    /// pending.
    ///
    /// # Errors
    /// The store cannot record the change.
    pub async fn settle_pending(
        &self,
        call: CallId,
        happened: Option<Outcome>,
        by: &str,
    ) -> Result<bool, StoreError> {
        let Some(claim) = self.pending_calls().await?.into_iter().find(|claim| claim.call == call)
        else {
            return Ok(false);
        };
        let (resolution, outcome) = match happened {
            Some(outcome) => (ClaimResolution::Done, outcome),
            None => (ClaimResolution::Released, ClaimResolution::no_effect_outcome()),
        };
        let tool =
            self.0.agents.get(&claim.key.agent).and_then(|agent| agent.tools.get(&claim.tool));
        let shown = self
            .0
            .redactor
            .redact_outcome(outcome.clone(), tool.map(|tool| tool.secrets.as_slice()));
        self.0.store.settle_claim(call, resolution, outcome, shown, by).await
    }

    pub(crate) fn now(&self) -> jiff::Timestamp {
        self.0.store.now()
    }

    pub(crate) fn publish_event(&self, event: &Event) {
        for listener in &self.0.listeners {
            // A panic in a listener must not affect the call.
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| listener(event)));
            if result.is_err() {
                tracing::error!("event listener panicked");
            }
        }
    }
}

impl ToolgateBuilder {
    /// Adds an agent. It replaces an agent of the same name.
    #[must_use]
    pub fn agent(mut self, agent: Agent) -> Self {
        self.agents.insert(Arc::clone(&agent.name), Arc::new(agent));
        self
    }

    /// Sets the store.
    #[must_use]
    pub fn store(mut self, store: Arc<dyn Store>) -> Self {
        self.store = Some(store);
        self
    }

    /// Adds a listener.
    #[must_use]
    pub fn on_event(mut self, listener: impl Fn(&Event) + Send + Sync + 'static) -> Self {
        self.listeners.push(Arc::new(listener));
        self
    }

    /// Redacts matches of a pattern in ledger rows.
    ///
    /// The model still sees the matches. To hide a value from the model, declare it with the tool.
    ///
    /// # Errors
    /// The pattern is not a valid regular expression.
    pub fn redact_pattern(mut self, pattern: &str) -> Result<Self, regex::Error> {
        self.redact_patterns.push(regex::Regex::new(pattern)?);
        Ok(self)
    }

    /// Replaces the policy engine. Exists only with the feature `testing`.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn policy_engine(mut self, engine: impl PolicyEngine + 'static) -> Self {
        self.engine = Arc::new(engine);
        self
    }

    /// Sets the file for ledger rows that the store cannot record yet.
    ///
    /// Default: a file in the `spool` directory of the store, else in the temporary directory.
    #[must_use]
    pub fn spool(mut self, path: impl Into<PathBuf>) -> Self {
        self.spool = Some(path.into());
        self
    }

    /// Sets how long a call waits for a session that another call has locked. Default: 5 s.
    #[must_use]
    pub const fn busy_timeout(mut self, wait: Duration) -> Self {
        self.busy_timeout = wait;
        self
    }

    /// Sets how long an approval can be answered and used. Default: 15 min.
    #[must_use]
    pub const fn approval_ttl(mut self, ttl: Duration) -> Self {
        self.approval_ttl = ttl;
        self
    }

    /// Builds the runtime.
    ///
    /// # Errors
    /// The system provides no random numbers for the redaction key, or the spool directory cannot
    /// be created.
    pub fn build(self) -> Result<Toolgate, std::io::Error> {
        let store = self.store.unwrap_or_else(|| Arc::new(MemoryStore::new()));
        let term = store.term().unwrap_or_else(|| CallId::generate().to_string().into());
        let spool = match (self.spool, store.spool_dir()) {
            (Some(path), _) => Arc::new(Spool::new(path)),
            (None, Some(directory)) => Spool::open_shared(&directory, &term)?,
            (None, None) => Arc::new(Spool::new(
                std::env::temp_dir().join(format!("toolgate-spool-{term}.jsonl")),
            )),
        };
        for agent in self.agents.values() {
            store.register_definition(agent.definition_digest, &agent.definition);
        }
        Ok(Toolgate(Arc::new(Inner {
            agents: self.agents,
            listeners: self.listeners,
            redactor: Redactor::new(store.redaction_key(), self.redact_patterns)
                .map_err(std::io::Error::other)?,
            store,
            engine: self.engine,
            spool,
            term,
            busy_timeout: self.busy_timeout,
            approval_ttl: self.approval_ttl,
        })))
    }
}
