//! From an event to a call, and from what became of it to an answer. What is decided is decided by the gate.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hmac::{Hmac, KeyInit, Mac};
use serde_json::Value;
use sha2::Sha256;
use toolgate::config::{Client as Settings, Otherwise};
use toolgate::json::Digest;
use toolgate::names::of_client;
use toolgate::store::Store;
use toolgate::{Answer as Outcome, Call, Dialect, Effect, Effects, Failure, ToolError, Toolgate, code};
use toolgate_store::SqliteStore;

use super::Args;
use super::answer::{Answer, Decision};
use super::compiled::{Beside, Compiled};
use super::event::{Client, Event, Kind};
use crate::place::{self, InForce, State};
use crate::protected::Protected;

/// How long a call waits for its session.
const WAIT: Duration = Duration::from_secs(3);

/// The gate, opened for one event.
pub(crate) struct Door {
    gate: Result<Toolgate, String>,
    agent: String,
    granted: Vec<String>,
    settings: Settings,
    notice: Option<String>,
    has_hooks: bool,
    dialect: Dialect,
    /// What calls without a name are named with: the ledger's own, so that every process gives one call one name.
    key: Option<[u8; 32]>,
    /// What could be kept ready for the next call, and in which ledger it stands.
    beside: Option<(Beside, String)>,
}

/// Opens the ledger of a configuration. One that was there and is not any more is not begun anew: limits and evidence are gone
/// with it.
pub(crate) fn open_store(path: &Path, state: &State) -> io::Result<SqliteStore> {
    let known = state.known_ledger(path)?;
    let gone = |what: &str| {
        let beside = toolgate_store::beside(path);
        let also = if beside.exists() { format!(", once {} is moved away too", beside.display()) } else { String::new() };
        io::Error::other(format!(
            "the ledger {} {what}; put it back, or begin a new one with `toolgate trust --new-ledger`{also}",
            path.display()
        ))
    };
    if known.is_some() && !path.exists() {
        return Err(gone("is gone"));
    }
    let brief = SqliteStore::open_briefly(path).map_err(io::Error::other)?;
    let store = match brief {
        Some(store) => store,
        None => SqliteStore::open(path).map_err(io::Error::other)?,
    };
    match known {
        Some(known) if known != store.id() => Err(gone("is another one than before")),
        Some(_) => Ok(store),
        None => {
            state.know_ledger(path, store.id())?;
            Ok(store)
        }
    }
}

impl Door {
    pub(super) fn open(args: &Args, event: &Event) -> Result<Self, String> {
        let plain = |error: io::Error| error.to_string();
        let (state, project) = (State::open().map_err(plain)?, place::project().map_err(plain)?);
        let tool = of_client(&event.tool);
        let ready = |kept: Compiled| {
            let store = SqliteStore::open_briefly(&kept.store).ok()??;
            Self::ready(&kept, &tool, Arc::new(store))
        };
        if let Some(ready) = Compiled::find(args, &project, &state, &tool).and_then(ready) {
            return Ok(ready);
        }
        let found = InForce::find(args.config.as_deref(), &project, &state).map_err(plain)?;
        let mut ledger = None;
        let mut door = Self::of(found, args.agent.as_ref(), Some(&tool), &state, |path| {
            let store = open_store(path, &state)?;
            ledger = Some(store.id().to_owned());
            Ok(Arc::new(store))
        })?;
        door.beside = door.beside.and_then(|(beside, _)| Some((beside, ledger?)));
        Ok(door)
    }

    /// The gate from what was kept ready; `None` where that is not what is there any more.
    pub(super) fn ready(kept: &Compiled, tool: &str, store: Arc<SqliteStore>) -> Option<Self> {
        if store.id() != kept.ledger {
            return None;
        }
        let (agent, key) = (kept.excerpt.clone().build().ok()?, store.redaction_key());
        let mut builder = Toolgate::builder().store(store).busy_wait(WAIT).agent(agent);
        for pattern in &kept.redact {
            builder = builder.redact(pattern).ok()?;
        }
        let otherwise = |ask| if ask { Otherwise::Ask } else { Otherwise::Deny };
        Some(Self {
            gate: builder.build().map_err(|error| error.to_string()),
            agent: kept.agent.clone(),
            granted: kept.granted.then(|| tool.to_owned()).into_iter().collect(),
            settings: Settings { on_failure: otherwise(kept.asks.0), undeclared: otherwise(kept.asks.1) },
            notice: kept.notice.clone(),
            has_hooks: false,
            dialect: kept.dialect,
            key,
            beside: None,
        })
    }

    /// Keeps what was read ready for the next call.
    pub(super) fn keep(&self, args: &Args) -> io::Result<()> {
        let (Some((beside, ledger)), Ok(gate)) = (&self.beside, &self.gate) else { return Ok(()) };
        match gate.agent(&self.agent) {
            Some(agent) => Compiled::keep(args, &place::project()?, &State::open()?, agent, ledger, beside),
            None => Ok(()),
        }
    }

    /// The gate of a configuration, on the ledger that `store` opens; if the configuration has it so, with a tool that it does not
    /// declare.
    pub(super) fn of(
        found: InForce,
        agent: Option<&String>,
        tool: Option<&str>,
        state: &State,
        store: impl FnOnce(&Path) -> io::Result<Arc<SqliteStore>>,
    ) -> Result<Self, String> {
        let plain = |error: io::Error| error.to_string();
        let (settings, redact, notice) = (found.config.client, found.config.redact.clone(), found.notice.clone());
        let names: Vec<String> = found.config.names().map(str::to_owned).collect();
        if !found.config.problems().is_empty() {
            let problems = found.config.agents(None).err().map(|error| error.render(false)).unwrap_or_default();
            return Err(format!("the configuration does not load\n{problems}"));
        }
        let agent = match (agent, names.as_slice()) {
            (Some(agent), names) if names.contains(agent) => agent.clone(),
            (Some(agent), names) => return Err(format!("there is no agent `{agent}`; {}", place::there_are(names))),
            (None, [one]) => one.clone(),
            (None, names) => return Err(format!("there are several agents ({}); say which with `--agent`", names.join(", "))),
        };
        let has_hooks = found.config.has_hooks();
        let granted = found.config.granted(&agent).map(str::to_owned).collect();
        let protected = Protected::of(&found, state, &place::project().map_err(plain)?);
        let beside = Some((Beside::of(&found, &agent, &protected), String::new()));
        let config = match tool.filter(|tool| settings.undeclared == Otherwise::Ask && !tool.is_empty()) {
            Some(tool) => found.config.with_undeclared(&agent, &[tool]),
            None => found.config,
        };
        let config = config.for_client().with_policies("(built in)", |tools| protected.rules(tools, None));
        let agents = config.agents(None).map_err(|error| format!("the configuration does not load\n{}", error.render(false)))?;
        let open = || -> Result<(Toolgate, Option<[u8; 32]>), String> {
            let store = store(&found.store).map_err(plain)?;
            let key = store.redaction_key();
            let mut builder = Toolgate::builder().store(store).busy_wait(WAIT);
            for pattern in &redact {
                builder = builder.redact(pattern).map_err(|error| error.to_string())?;
            }
            let gate = agents.into_iter().fold(builder, toolgate::ToolgateBuilder::agent).build().map_err(plain)?;
            Ok((gate, key))
        };
        let (gate, key) = match open() {
            Ok((gate, key)) => (Ok(gate), key),
            Err(reason) => (Err(reason), None),
        };
        let dialect = gate.as_ref().ok().and_then(|gate| gate.agent(&agent)).map(toolgate::Agent::dialect).unwrap_or_default();
        Ok(Self { gate, agent, granted, settings, notice, has_hooks, dialect, key, beside })
    }

    /// Whether what it protects is where it was when the gate was opened.
    pub(super) fn links_hold(&self) -> bool {
        self.beside.as_ref().is_none_or(|(beside, _)| beside.links_hold())
    }

    pub(super) const fn has_hooks(&self) -> bool {
        self.has_hooks
    }

    pub(super) async fn answer(&self, event: &Event, client: Client, user: &str) -> Answer {
        let gate = match &self.gate {
            Ok(gate) => gate,
            Err(reason) => return self.failed(event, reason),
        };
        let session = gate.session(&self.agent, user, &event.session);
        match &event.kind {
            Kind::Begins => Answer { notice: self.notice.clone(), context: self.notice.clone(), ..Answer::default() },
            Kind::Ends => match gate.leave(session.key()).await {
                Ok(()) => Answer::default(),
                Err(error) => self.failed(event, &error.to_string()),
            },
            Kind::Says(text) => match session.user_said(text).await {
                Ok(()) => Answer::default(),
                Err(error) => self.failed(event, &error.to_string()),
            },
            Kind::Before => {
                let call = self.call(&session, event);
                // Who only looks at the exit code cannot ask.
                let cannot_ask = client == Client::Codex || client == Client::Cursor || event.name.is_none();
                let call = if cannot_ask { call } else { call.client_asks() };
                match gate.admit_kept(call).await {
                    Ok(kept) => self.admitted(event, &kept),
                    Err(refused) => self.refused(&refused),
                }
            }
            Kind::Misread(why, _) => {
                let refused = gate.call(self.call(&session, event).misread(why)).await;
                Answer::refusal(event, refused.outcome.error().map_or_else(|| why.clone(), |error| error.for_model_in(self.dialect)))
            }
            Kind::After(result) => self.settled(event, result, &gate.report_kept(self.call(&session, event), Ok(result.clone())).await),
            Kind::Unread => {
                let failure = Failure::business("unreadable_result", "what the tool gave cannot be read").effects(Effects::Done);
                gate.report_kept(self.call(&session, event), Err(failure)).await;
                Answer::withhold(event, "toolgate cannot read this result, so it is withheld")
            }
            Kind::Failed { error, interrupted } => {
                // It ran and is over: what it changed before it failed, it changed. What was cut off, nobody knows.
                let effects = if *interrupted { Effects::Unknown } else { Effects::Done };
                let effects = if self.reads(gate, &event.tool) { Effects::None } else { effects };
                let failure = Failure::business("client_tool_failed", error.clone()).effects(effects);
                let answer = gate.report_kept(self.call(&session, event), Err(failure)).await;
                match answer.outcome.error().filter(|error| error.code != "client_tool_failed") {
                    Some(error) => Answer::block(error.for_model_in(self.dialect)),
                    None => Answer::default(),
                }
            }
        }
    }

    /// A call was let through, and whoever asked has not heard it: it never runs.
    pub(super) async fn take_back(&self, event: &Event, user: &str) {
        if let Ok(gate) = &self.gate {
            let session = gate.session(&self.agent, user, &event.session);
            let failure = Failure::business("unheard", "its client did not wait for the answer, and was refused").effects(Effects::None);
            gate.report_kept(self.call(&session, event), Err(failure)).await;
        }
    }

    fn call(&self, session: &toolgate::Session, event: &Event) -> Call {
        let id = event.id.clone().or_else(|| self.unnamed(event)).unwrap_or_default();
        session.prepare(&of_client(&event.tool), event.input.as_str()).client_id(id)
    }

    /// Who gives no name to a call has it known by what it is. The name is written down, so nothing can be guessed from it.
    fn unnamed(&self, event: &Event) -> Option<String> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.key?).ok()?;
        mac.update(b"toolgate-unnamed-v1\0");
        mac.update(format!("{} {}", event.tool, canonical(&event.input)).as_bytes());
        Some(format!("unnamed:{}", Digest::from_bytes(mac.finalize().into_bytes().into())))
    }

    fn reads(&self, gate: &Toolgate, tool: &str) -> bool {
        let tool = of_client(tool);
        gate.agent(&self.agent).is_some_and(|agent| agent.tools().any(|spec| spec.name() == tool && spec.effect() == Effect::Read))
    }

    /// The tool of an event, where it has to be asked about because the configuration does not declare it, and this door does not
    /// know it yet.
    pub(super) fn lacks(&self, event: &Event) -> Option<(String, String)> {
        let (tool, gate) = (of_client(&event.tool), self.gate.as_ref().ok()?);
        let asks = self.settings.undeclared == Otherwise::Ask && !event.tool.is_empty();
        let lacks = asks && gate.agent(&self.agent)?.tools().all(|spec| spec.name() != tool);
        lacks.then(|| (self.agent.clone(), tool))
    }

    /// The gate could not do its work.
    fn failed(&self, event: &Event, reason: &str) -> Answer {
        let reason = format!("toolgate cannot do its work: {reason}");
        match event.kind {
            Kind::Before if self.settings.on_failure == Otherwise::Ask => Answer::ask(reason),
            Kind::Before | Kind::Misread(_, None) => Answer::deny(reason),
            Kind::After(_) | Kind::Unread | Kind::Misread(_, Some(_)) => Answer::withhold(event, reason),
            Kind::Ends => Answer { notice: Some(reason), ..Answer::default() },
            _ => Answer::block(reason),
        }
    }

    fn admitted(&self, event: &Event, kept: &toolgate::Kept) -> Answer {
        let given: Value = serde_json::from_str(&event.input).unwrap_or_default();
        let decision = match &kept.asks {
            Some(reason) => Some(Decision::Ask(reason.clone())),
            None => self.granted.contains(&of_client(&event.tool)).then_some(Decision::Allow),
        };
        // Numbers may be spelled otherwise and be the same.
        let input = (canonical_value(&given) != canonical_value(kept.arguments.value())).then(|| kept.arguments.value().clone());
        Answer { decision, input, notice: self.notice.clone(), ..Answer::default() }
    }

    fn refused(&self, refused: &Outcome) -> Answer {
        let Some(error) = refused.outcome.error() else { return Answer::deny(made_before(refused).for_model_in(self.dialect)) };
        match error.code.as_ref() {
            "store_unavailable" if self.settings.on_failure == Otherwise::Ask => Answer::ask(error.for_model_in(self.dialect)),
            "approval_required" => Answer::deny(waits(error).for_model_in(self.dialect)),
            _ => Answer::deny(error.for_model_in(self.dialect)),
        }
    }

    fn settled(&self, event: &Event, given: &Value, answer: &Outcome) -> Answer {
        if let Some(output) = answer.outcome.success() {
            let mut value = output.value.clone();
            let changed = canonical_value(given) != canonical_value(&value);
            if changed && let Some(fields) = value.as_object_mut() {
                // A file with the whole of the original would be read instead.
                fields.remove("persistedOutputPath");
                fields.remove("persistedOutputSize");
            }
            return Answer { output: changed.then_some(value), context: output.message.clone(), ..Answer::default() };
        }
        let Some(error) = answer.outcome.error() else { return Answer::default() };
        Answer::withhold(event, error.for_model_in(self.dialect))
    }
}

/// A call that was made before: there is no way to hand its result to a client that wants to run it.
fn made_before(answer: &Outcome) -> ToolError {
    let told = "the same call was made before and is not made again; what it came to stands under `upstream`";
    let mut error = ToolError::of(code::DUPLICATE_CALL, told).with_effects(Effects::Done);
    error.upstream = answer.outcome.success().filter(|output| !output.hidden).map(|output| output.value.clone());
    (error.replayed, error.call_id) = (true, Some(answer.call));
    error
}

/// A call that waits for a person, and where that person answers: the client has no place for it.
fn waits(error: &ToolError) -> ToolError {
    let mut error = error.clone();
    if let Some(approval) = &error.approval {
        error.message = format!("{}, with `toolgate approvals approve {}` in a terminal", error.message, approval.id);
    }
    error
}

fn canonical(text: &str) -> String {
    serde_json::from_str::<Value>(text).map_or_else(|_| text.to_owned(), |value| canonical_value(&value))
}

fn canonical_value(value: &Value) -> String {
    String::from_utf8_lossy(&toolgate::json::canonical(value)).into_owned()
}
