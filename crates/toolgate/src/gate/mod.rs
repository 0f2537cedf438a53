//! The path of a call. Its order is a security property, so it is written down here as a list.

mod admit;
mod approve;
mod authorize;
mod batch;
mod conceal;
mod explain;
mod judge;
mod kept;
mod next;
mod pass;
mod reconcile;
mod recover;
mod replay;
mod run;
mod seen;
mod session;
mod settle;
mod shape;
mod through;
mod trail;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ahash::HashMap;
use tokio::time::Instant;
use tracing::Instrument;

pub use authorize::Permit;
pub use explain::{Explanation, GateNote, RuleNote, Said, Would};
pub use kept::Kept;
pub use pass::Pass;
pub use reconcile::Reconciled;
pub use replay::{Backtest, BacktestPlace, Change, Compared, Replay, Ruling};
pub use session::{Session, Snapshot};
pub(crate) use shape::OUTPUT_BOUNDS;

use crate::call::{Call, CallId, SessionKey};
use crate::clock::{Clock, SystemClock};
use crate::code;
use crate::error::{Effects, ToolError};
use crate::event::{Event, Listener};
use crate::ledger::Gate;
use crate::outcome::{Answer, Outcome};
use crate::redact::Redactor;
use crate::registry::Agent;
use crate::session::State;
use crate::spool::Spool;
use crate::store::{Approval, Intent, MemoryStore, Settle, Store, StoreError, Target};
use pass::{Admitted, Passed};
use through::Through;
use trail::Trail;

/// The runtime: agents, a store, and the one path that every call takes. Cheap to clone.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
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
pub struct Toolgate(Arc<Inner>);

pub(crate) struct Inner {
    agents: HashMap<Arc<str>, Arc<Agent>>,
    store: Arc<dyn Store>,
    clock: Arc<dyn Clock>,
    listeners: Vec<Listener>,
    redactor: Redactor,
    spool: Arc<Spool>,
    /// Names this process in claims.
    owner: Arc<str>,
    busy_wait: Duration,
    approval_life: Duration,
}

impl Toolgate {
    /// Takes a call through all gates. A caller who hangs up cancels the tool, never the record: what changes something runs on a
    /// task of its own, and a read goes on by itself where nobody waits for it any more.
    pub async fn call(&self, call: Call) -> Answer {
        let call = Arc::new(call);
        let trail = Trail::open(self, &call, None);
        let (id, span) = (trail.id, trail.span.clone());
        let hang_up = trail.cancel.clone().drop_guard();
        let gate = self.clone();
        let asked = Arc::clone(&call);
        let path = async move { gate.path(&asked, trail).await }.instrument(span);
        let ended = if self.is_read(&call) { Through::new(path).await } else { through::apart(path).await };
        match ended {
            Some(answer) => {
                // Nobody hung up: what the tool has set going elsewhere goes on.
                hang_up.disarm();
                answer
            }
            None => Box::pin(self.lost(&call, id)).await,
        }
    }

    fn is_read(&self, call: &Call) -> bool {
        let tool = self.0.agents.get(&call.key.agent).and_then(|agent| agent.tools.get(call.tool.as_str()));
        tool.is_some_and(|tool| tool.spec.effect() == crate::Effect::Read)
    }

    /// The path. The first "no" ends it, and the ledger still gets its row.
    async fn path(&self, call: &Call, mut trail: Box<Trail>) -> Answer {
        // Boxed stage by stage, so that the task that carries them is small.
        match Box::pin(self.admit_call(call, &mut trail, None)).await {
            Ok(Admitted::Pass(passed)) => {
                let ran = Box::pin(self.run(&passed, &mut trail)).await;
                Box::pin(self.settle(passed, ran, trail)).await
            }
            Ok(Admitted::Replay(outcome)) => Box::pin(self.replay(outcome, trail)).await,
            Err(stop) => Box::pin(self.refuse(stop, trail)).await,
        }
    }

    /// Everything before the tool. What it gives back is permission, and a claim to settle.
    async fn admit_call(&self, call: &Call, trail: &mut Trail, batch: Option<&State>) -> Result<Admitted, Stop> {
        trail.at(Gate::Admit);
        let agent = self.let_in(call, trail).await?;
        trail.at(Gate::Resolve);
        let tool = self.resolve(&agent, call)?;
        let resumed = self.resume(call, &tool, trail).await?;
        trail.at(Gate::Validate);
        let mut arguments = self.validate(&agent, &tool, call, resumed.as_deref(), trail)?;
        trail.at(Gate::Recall);
        // What ended before it comes before it, also where that could not be written down yet.
        self.take_in_spooled().await?;
        // From here to the settling, a tool with effects has the session to itself.
        let entered = self.enter(call, &tool, &arguments, resumed.is_some(), batch.is_some(), trail).await?;
        trail.stamp = entered.state.stamp;
        if let Some(replay) = self.recall(&agent, call, &tool, &arguments, &entered, trail).await? {
            return Ok(Admitted::Replay(replay));
        }
        trail.at(Gate::Progress);
        self.progress(call, &tool, &entered, resumed.as_deref(), trail).await?;
        trail.at(Gate::Limits);
        let (budget, remaining) = self.limits(&agent, call, &tool, &entered, trail).await?;
        trail.at(Gate::Hooks);
        // Boxed, as is what else few calls need, so that what carries every call through these gates is small.
        let asked = if tool.hooks.is_empty() {
            Vec::new()
        } else {
            Box::pin(self.before_hooks(&agent, call, &tool, &mut arguments, resumed.is_some(), trail)).await?
        };
        trail.at(Gate::Policy);
        let state = batch.unwrap_or(&entered.state);
        self.load_facts(&agent, call, &tool, &arguments, state, trail).await?;
        let judgement = match authorize::authorize(trail.id, &call.key, &tool, arguments, &trail.facts, asked) {
            Ok((judgement, observed)) => {
                trail.facts.observed = observed;
                judgement
            }
            Err(denied) => return Err(Box::pin(self.denied(*denied, &agent, &tool, state, trail)).await),
        };
        trail.at(Gate::Approval);
        let (permit, approval) = match judgement.permit(resumed.as_deref()) {
            Ok(permit) => (permit, resumed.map(|approval| (approval.id, approval.expires))),
            Err(asked) => Box::pin(self.approve(asked, call, trail)).await?,
        };
        trail.at(Gate::Claim);
        let recall = judge::all_keys(call, &tool, trail.asked, &permit);
        let recallable = !recall.is_empty();
        match self.claim(call, &permit, budget, recall, approval, trail).await {
            Ok(pass::Claim::Held) => {}
            Ok(pass::Claim::Replay(outcome)) => return Ok(Admitted::Replay(outcome)),
            Err(stop) => return Err(Box::pin(self.not_claimed(stop, &permit, &agent, state, trail)).await),
        }
        Ok(Admitted::Pass(Box::new(Passed {
            agent,
            permit: authorize::Granted::ToRun(permit),
            version: entered.version,
            state: Some(entered.state),
            hold: entered.hold,
            remaining,
            recallable,
            key: call.key.clone(),
            reported: false,
            ran: None,
        })))
    }

    /// The call's own task died, which nothing that input can reach should do. It is recorded all the same.
    async fn lost(&self, call: &Call, id: CallId) -> Answer {
        let trail = Trail::open(self, call, Some(id));
        let error = ToolError::of(code::INTERNAL_FAULT, "toolgate failed while it handled this call; do not repeat it")
            .with_effects(Effects::Unknown);
        let tool = self.0.agents.get(&call.key.agent).and_then(|agent| agent.tools.get(call.tool.as_str()));
        let revoked = tool.map(|tool| tool.takes_away(&trail.arguments, None)).unwrap_or_default();
        self.refuse_with(Stop::new(error), None, revoked, trail).await
    }
}

/// A "no".
#[derive(Debug)]
pub(crate) struct Stop {
    error: Box<ToolError>,
    /// Where the gate that says it is not the one the call stands at.
    gate: Option<Gate>,
}

impl Stop {
    fn new(error: ToolError) -> Self {
        Self { error: Box::new(error), gate: None }
    }

    fn at(gate: Gate, error: ToolError) -> Self {
        Self { error: Box::new(error), gate: Some(gate) }
    }
}

impl From<ToolError> for Stop {
    fn from(error: ToolError) -> Self {
        Self::new(error)
    }
}

/// Before anything ran, a store that is away means: not now.
impl From<StoreError> for Stop {
    fn from(error: StoreError) -> Self {
        // What a store says is for the operator: it may name hosts and users.
        tracing::error!(%error, "the store is not available");
        Self::new(ToolError::of(code::STORE_UNAVAILABLE, "the store is not available; nothing was done").retry_after_ms(1_000))
    }
}

/// Puts a runtime together.
pub struct ToolgateBuilder {
    agents: HashMap<Arc<str>, Arc<Agent>>,
    store: Option<Arc<dyn Store>>,
    clock: Arc<dyn Clock>,
    listeners: Vec<Listener>,
    redact: Vec<regex::Regex>,
    spool: Option<PathBuf>,
    busy_wait: Duration,
    approval_life: Duration,
}

impl Toolgate {
    /// Starts a runtime on embedded defaults: a store in memory and the machine's clock.
    #[must_use]
    pub fn builder() -> ToolgateBuilder {
        ToolgateBuilder {
            agents: HashMap::default(),
            store: None,
            clock: Arc::new(SystemClock),
            listeners: Vec::new(),
            redact: Vec::new(),
            spool: None,
            busy_wait: Duration::from_secs(5),
            approval_life: Duration::from_secs(15 * 60),
        }
    }

    /// A conversation.
    pub fn session(&self, agent: &str, principal: &str, session: &str) -> Session {
        // The agent's own name is shared, so that keys are cheap to compare and clone.
        let agent = self.0.agents.get(agent).map_or_else(|| Arc::from(agent), |agent| Arc::clone(&agent.name));
        Session::new(self.clone(), SessionKey::new(agent, principal, session))
    }

    /// An agent by name.
    #[must_use]
    pub fn agent(&self, name: &str) -> Option<&Agent> {
        self.0.agents.get(name).map(AsRef::as_ref)
    }

    /// Stops an agent, tool, principal or session at once.
    ///
    /// # Errors
    /// The store cannot take it.
    pub async fn pause(&self, target: Target, reason: &str) -> Result<(), StoreError> {
        self.0.store.set_pause(target, Some(reason.to_owned())).await
    }

    /// Lets it go on.
    ///
    /// # Errors
    /// The store cannot take it.
    pub async fn unpause(&self, target: Target) -> Result<(), StoreError> {
        self.0.store.set_pause(target, None).await
    }

    /// What somebody is told who wants something that is no call, where the agent, the principal or the session is paused: as a call of a
    /// tool that nobody has paused would be. So is who asks where the store cannot be.
    pub async fn stopped(&self, key: &SessionKey) -> Option<ToolError> {
        if !self.0.store.may_be_paused() {
            return None;
        }
        match self.0.store.paused(key, &Arc::from("")).await {
            Ok(stopped) => stopped.map(|(target, why)| admit::paused(&target, &why)),
            Err(error) => Some(*Stop::from(error).error),
        }
    }

    /// An approval by name.
    ///
    /// # Errors
    /// The store cannot be asked.
    pub async fn approval(&self, id: &str) -> Result<Option<Approval>, StoreError> {
        self.0.store.approval(id).await
    }

    /// Answers a call that waits for a person; false if it does not wait any more.
    ///
    /// # Errors
    /// The store cannot take it.
    pub async fn answer_approval(&self, id: &str, approved: bool, by: &str) -> Result<bool, StoreError> {
        self.0.store.answer(id, approved, by, self.now()).await
    }

    /// Calls of which nobody knows whether they took effect.
    ///
    /// # Errors
    /// The store cannot be asked.
    pub async fn pending(&self) -> Result<Vec<Intent>, StoreError> {
        // What waits in a file may say what became of some.
        if self.0.spool.is_waiting() {
            self.recover().await?;
        }
        self.0.store.pending(self.now()).await
    }

    /// Settles such a call by hand: what it came to, or that it never happened. The ledger says who said so. False if it
    /// is not pending.
    ///
    /// # Errors
    /// The store cannot take it.
    pub async fn settle_pending(&self, call: CallId, happened: Option<Outcome>, by: &str) -> Result<bool, StoreError> {
        let Some(intent) = self.pending().await?.into_iter().find(|intent| intent.call == call) else { return Ok(false) };
        let (settle, outcome) = match happened {
            Some(outcome) => (Settle::Done, outcome),
            None => (Settle::Released, Settle::never_happened()),
        };
        let tool = self.0.agents.get(&intent.key.agent).and_then(|agent| agent.tools.get(&intent.tool));
        let shown = self.0.redactor.outcome(outcome.clone(), tool.map(|tool| tool.secrets.as_slice()));
        self.0.store.settle(call, settle, outcome, shown, by, self.now()).await
    }

    fn now(&self) -> jiff::Timestamp {
        self.0.clock.now()
    }

    fn publish(&self, event: &Event) {
        for listener in &self.0.listeners {
            // A listener's fault is its own.
            let heard = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| listener(event)));
            if heard.is_err() {
                tracing::error!("a listener panicked");
            }
        }
    }
}

impl ToolgateBuilder {
    /// Adds an agent. A later one of the same name replaces it.
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

    /// Sets the clock.
    #[must_use]
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Adds a listener.
    #[must_use]
    pub fn on_event(mut self, listener: impl Fn(&Event) + Send + Sync + 'static) -> Self {
        self.listeners.push(Arc::new(listener));
        self
    }

    /// Redacts what matches a pattern, wherever it stands in a row of the ledger. The model still sees it: what a model must
    /// not see is declared with the tool.
    ///
    /// # Errors
    /// It is no regular expression.
    pub fn redact(mut self, pattern: &str) -> Result<Self, regex::Error> {
        self.redact.push(regex::Regex::new(pattern)?);
        Ok(self)
    }

    /// Where rows wait while the store is away: a file of its own beside the store, else in the temporary directory,
    /// unless said.
    #[must_use]
    pub fn spool(mut self, path: impl Into<PathBuf>) -> Self {
        self.spool = Some(path.into());
        self
    }

    /// How long a call waits for a session that another call holds: 5 s unless said.
    #[must_use]
    pub const fn busy_wait(mut self, wait: Duration) -> Self {
        self.busy_wait = wait;
        self
    }

    /// How long an approval can be answered and used: 15 min unless said.
    #[must_use]
    pub const fn approval_life(mut self, life: Duration) -> Self {
        self.approval_life = life;
        self
    }

    /// Builds the runtime.
    ///
    /// # Errors
    /// The machine gives no random numbers, without which redaction has no key, or there is no place for a spool.
    pub fn build(self) -> Result<Toolgate, std::io::Error> {
        let store = self.store.unwrap_or_else(|| Arc::new(MemoryStore::new()));
        let owner = store.owner().unwrap_or_else(|| CallId::fresh().to_string().into());
        let spool = match (self.spool, store.home()) {
            (Some(path), _) => Arc::new(Spool::new(path)),
            (None, Some(home)) => Spool::among(&home.join("spool"), &owner)?,
            (None, None) => Arc::new(Spool::new(std::env::temp_dir().join(format!("toolgate-spool-{owner}.jsonl")))),
        };
        for agent in self.agents.values() {
            store.introduce(agent.config, &agent.definition);
        }
        Ok(Toolgate(Arc::new(Inner {
            agents: self.agents,
            clock: self.clock,
            listeners: self.listeners,
            redactor: Redactor::new(store.redaction_key(), self.redact).map_err(std::io::Error::other)?,
            store,
            spool,
            owner,
            busy_wait: self.busy_wait,
            approval_life: self.approval_life,
        })))
    }
}

/// The nearer of two moments.
fn nearest(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}
