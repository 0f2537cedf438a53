//! Maps events to calls of the gate, and results of the gate to answers.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hmac::{Hmac, KeyInit, Mac};
use serde_json::Value;
use sha2::Sha256;
use toolgate::call::error_code;
use toolgate::store::Store;
use toolgate::tool::name::tool_name_from_client;
use toolgate::{Answer, Call, CallEffects, Effect, ErrorDialect, Failure, ToolError, Toolgate};
use toolgate_config::{ClientFallbacks, FallbackDecision};
use toolgate_json::Digest;
use toolgate_store::SqliteStore;

use super::Args;
use super::event::{HookClient, HookEvent, HookEventKind};
use crate::builtin_rules::ProtectedPaths;
use crate::config_cache::{HookCacheEntry, HookCacheMetadata};
use crate::effective_config;
use crate::effective_config::{EffectiveConfig, UserStateDir};
use crate::response::{HookReply, ReplyDecision};

/// Longest time to wait for the lock of a session.
const SESSION_LOCK_TIMEOUT: Duration = Duration::from_secs(3);

/// The gate as a hook uses it.
pub(crate) struct HookGate {
    gate: Result<Toolgate, String>,
    agent: String,
    granted: Vec<String>,
    fallbacks: ClientFallbacks,
    notice: Option<String>,
    has_hooks: bool,
    dialect: ErrorDialect,
    /// Key of the ledger for naming calls without an id, so that every process gives a call the
    /// same name.
    call_id_key: Option<[u8; 32]>,
    /// Metadata to cache for the next call, with the id of the ledger.
    cache_metadata: Option<(HookCacheMetadata, String)>,
}

/// Opens the ledger of a configuration.
///
/// A known ledger that is missing is not replaced by a new one, because its limits and evidence
/// would be lost.
pub fn open_store(path: &Path, state: &UserStateDir) -> io::Result<SqliteStore> {
    let known_id = state.known_ledger_id(path)?;
    let lost_ledger_error = |problem: &str| {
        let state_dir = toolgate_store::state_dir_for(path);
        let hint = if state_dir.exists() {
            format!(" (first move away {} too)", state_dir.display())
        } else {
            String::new()
        };
        io::Error::other(format!(
            "the ledger {} {problem}; restore it, or start a new one with `toolgate trust --new-ledger`{hint}",
            path.display()
        ))
    };
    if known_id.is_some() && !path.exists() {
        return Err(lost_ledger_error("is missing"));
    }
    let existing = SqliteStore::open_for_one_call(path).map_err(io::Error::other)?;
    let store = match existing {
        Some(store) => store,
        None => SqliteStore::open(path).map_err(io::Error::other)?,
    };
    match known_id {
        Some(known_id) if known_id != store.id() => {
            Err(lost_ledger_error("was replaced by another one"))
        }
        Some(_) => Ok(store),
        None => {
            state.record_ledger_id(path, store.id())?;
            Ok(store)
        }
    }
}

impl HookGate {
    pub(crate) fn open(args: &Args, event: &HookEvent) -> Result<Self, String> {
        let to_text = |error: io::Error| error.to_string();
        let (state, project) = (
            UserStateDir::open().map_err(to_text)?,
            effective_config::project_dir().map_err(to_text)?,
        );
        let tool = tool_name_from_client(&event.tool);
        let from_entry = |entry: HookCacheEntry| {
            let store = SqliteStore::open_for_one_call(&entry.store).ok()??;
            Self::from_cache(&entry, &tool, Arc::new(store))
        };
        if let Some(gate) = HookCacheEntry::find(args, &project, &state, &tool).and_then(from_entry)
        {
            return Ok(gate);
        }
        let found =
            EffectiveConfig::find(args.config.as_deref(), &project, &state).map_err(to_text)?;
        let mut ledger = None;
        let mut gate =
            Self::from_config(found, args.agent.as_ref(), Some(&tool), &state, |path| {
                let store = open_store(path, &state)?;
                ledger = Some(store.id().to_owned());
                Ok(Arc::new(store))
            })?;
        gate.cache_metadata =
            gate.cache_metadata.and_then(|(metadata, _)| Some((metadata, ledger?)));
        Ok(gate)
    }

    /// Builds the gate from the cache; `None` if the ledger is a different one.
    pub(crate) fn from_cache(
        entry: &HookCacheEntry,
        tool: &str,
        store: Arc<SqliteStore>,
    ) -> Option<Self> {
        if store.id() != entry.ledger {
            return None;
        }
        let (agent, key) = (entry.excerpt.clone().build().ok()?, store.redaction_key());
        let mut builder =
            Toolgate::builder().store(store).busy_timeout(SESSION_LOCK_TIMEOUT).agent(agent);
        for pattern in &entry.redact {
            builder = builder.redact_pattern(pattern).ok()?;
        }
        let to_fallback = |ask| if ask { FallbackDecision::Ask } else { FallbackDecision::Deny };
        Some(Self {
            gate: builder.build().map_err(|error| error.to_string()),
            agent: entry.agent.clone(),
            granted: entry.granted.then(|| tool.to_owned()).into_iter().collect(),
            fallbacks: ClientFallbacks {
                on_failure: to_fallback(entry.asks.0),
                undeclared: to_fallback(entry.asks.1),
            },
            notice: entry.notice.clone(),
            has_hooks: false,
            dialect: entry.dialect,
            call_id_key: key,
            cache_metadata: None,
        })
    }

    /// Writes the cache for the next call.
    pub(crate) fn write_cache(&self, args: &Args) -> io::Result<()> {
        let (Some((metadata, ledger)), Ok(gate)) = (&self.cache_metadata, &self.gate) else {
            return Ok(());
        };
        match gate.agent(&self.agent) {
            Some(agent) => HookCacheEntry::write(
                args,
                &effective_config::project_dir()?,
                &UserStateDir::open()?,
                agent,
                ledger,
                metadata,
            ),
            None => Ok(()),
        }
    }

    /// Builds the gate of a configuration on the ledger that `store` opens.
    ///
    /// Adds the undeclared tool if the configuration asks about such tools.
    pub(crate) fn from_config(
        found: EffectiveConfig,
        agent: Option<&String>,
        tool: Option<&str>,
        state: &UserStateDir,
        store: impl FnOnce(&Path) -> io::Result<Arc<SqliteStore>>,
    ) -> Result<Self, String> {
        let to_text = |error: io::Error| error.to_string();
        let (settings, redact, notice) =
            (found.config.client, found.config.redact.clone(), found.notice.clone());
        let names: Vec<String> = found.config.agent_names().map(str::to_owned).collect();
        if !found.config.problems().is_empty() {
            let problems = found
                .config
                .build_agents(None)
                .err()
                .map(|error| error.render(false))
                .unwrap_or_default();
            return Err(format!("invalid configuration\n{problems}"));
        }
        let agent = match (agent, names.as_slice()) {
            (Some(agent), names) if names.contains(agent) => agent.clone(),
            (Some(agent), names) => {
                return Err(format!(
                    "unknown agent `{agent}`; {}",
                    effective_config::list_known_names(names)
                ));
            }
            (None, [only_name]) => only_name.clone(),
            (None, names) => {
                return Err(format!(
                    "the configuration has several agents ({}); choose one with `--agent`",
                    names.join(", ")
                ));
            }
        };
        let has_hooks = found.config.has_hooks();
        let granted = found.config.granted_tools(&agent).map(str::to_owned).collect();
        let protected = ProtectedPaths::collect(
            &found,
            state,
            &effective_config::project_dir().map_err(to_text)?,
        );
        let cache_metadata =
            Some((HookCacheMetadata::from_config(&found, &agent, &protected), String::new()));
        let config = match tool
            .filter(|tool| settings.undeclared == FallbackDecision::Ask && !tool.is_empty())
        {
            Some(tool) => found.config.with_undeclared_tools(&agent, &[tool]),
            None => found.config,
        };
        let config = config
            .for_client()
            .with_policies("(built in)", |tools| protected.render_rules(tools, None));
        let agents = config
            .build_agents(None)
            .map_err(|error| format!("invalid configuration\n{}", error.render(false)))?;
        let open = || -> Result<(Toolgate, Option<[u8; 32]>), String> {
            let store = store(&found.store).map_err(to_text)?;
            let key = store.redaction_key();
            let mut builder = Toolgate::builder().store(store).busy_timeout(SESSION_LOCK_TIMEOUT);
            for pattern in &redact {
                builder = builder.redact_pattern(pattern).map_err(|error| error.to_string())?;
            }
            let gate = agents
                .into_iter()
                .fold(builder, toolgate::ToolgateBuilder::agent)
                .build()
                .map_err(to_text)?;
            Ok((gate, key))
        };
        let (gate, key) = match open() {
            Ok((gate, key)) => (Ok(gate), key),
            Err(reason) => (Err(reason), None),
        };
        let dialect = gate
            .as_ref()
            .ok()
            .and_then(|gate| gate.agent(&agent))
            .map(toolgate::Agent::dialect)
            .unwrap_or_default();
        Ok(Self {
            gate,
            agent,
            granted,
            fallbacks: settings,
            notice,
            has_hooks,
            dialect,
            call_id_key: key,
            cache_metadata,
        })
    }

    /// Returns whether the protected paths are unchanged since the gate was built.
    pub(crate) fn has_current_links(&self) -> bool {
        self.cache_metadata.as_ref().is_none_or(|(metadata, _)| metadata.has_current_links())
    }

    pub(crate) const fn has_hooks(&self) -> bool {
        self.has_hooks
    }

    pub(crate) async fn handle_event(
        &self,
        event: &HookEvent,
        client: HookClient,
        user: &str,
    ) -> HookReply {
        let gate = match &self.gate {
            Ok(gate) => gate,
            Err(reason) => return self.gate_failure_reply(event, reason),
        };
        let session = gate.session(&self.agent, user, &event.session);
        match &event.kind {
            HookEventKind::SessionStart => HookReply {
                notice: self.notice.clone(),
                context: self.notice.clone(),
                ..HookReply::default()
            },
            HookEventKind::SessionEnd => match gate.close_client_session(session.key()).await {
                Ok(()) => HookReply::default(),
                Err(error) => self.gate_failure_reply(event, &error.to_string()),
            },
            HookEventKind::UserPrompt(text) => match session.add_user_text(text).await {
                Ok(()) => HookReply::default(),
                Err(error) => self.gate_failure_reply(event, &error.to_string()),
            },
            HookEventKind::BeforeTool => {
                let call = self.build_call(&session, event);
                // A client that checks only the exit code cannot ask its user.
                let cannot_ask = client == HookClient::Codex
                    || client == HookClient::Cursor
                    || event.name.is_none();
                let call = if cannot_ask { call } else { call.allow_user_prompt() };
                match gate.admit(call).await {
                    Ok(deferred) => self.admitted_reply(event, &deferred),
                    Err(denied) => self.denied_reply(&denied),
                }
            }
            HookEventKind::Malformed(why, _) => {
                let denied =
                    gate.call(self.build_call(&session, event).with_parse_error(why)).await;
                HookReply::gate_error(
                    event,
                    denied
                        .outcome
                        .error()
                        .map_or_else(|| why.clone(), |error| error.for_model_in(self.dialect)),
                )
            }
            HookEventKind::AfterTool(result) => self.result_reply(
                event,
                result,
                &gate.report(self.build_call(&session, event), Ok(result.clone())).await,
            ),
            HookEventKind::UnreadableResult => {
                let failure = Failure::business(
                    "unreadable_result",
                    "the result of the tool cannot be parsed",
                )
                .effects(CallEffects::Done);
                gate.report(self.build_call(&session, event), Err(failure)).await;
                HookReply::withhold(event, "toolgate cannot parse this result, so it is withheld")
            }
            HookEventKind::ToolFailed { error, interrupted } => {
                // A failed tool has finished, so its changes are done. After an interruption, they
                // are unknown.
                let effects = if *interrupted { CallEffects::Unknown } else { CallEffects::Done };
                let effects =
                    if self.is_read_tool(gate, &event.tool) { CallEffects::None } else { effects };
                let failure =
                    Failure::business("client_tool_failed", error.clone()).effects(effects);
                let answer = gate.report(self.build_call(&session, event), Err(failure)).await;
                match answer.outcome.error().filter(|error| error.code != "client_tool_failed") {
                    Some(error) => HookReply::block(error.for_model_in(self.dialect)),
                    None => HookReply::default(),
                }
            }
        }
    }

    /// Withdraws the permission of a call whose client did not read the answer.
    pub(crate) async fn withdraw_permission(&self, event: &HookEvent, user: &str) {
        if let Ok(gate) = &self.gate {
            let session = gate.session(&self.agent, user, &event.session);
            let failure = Failure::business(
                "unheard",
                "the client did not wait for the answer, so the permission was withdrawn",
            )
            .effects(CallEffects::None);
            gate.report(self.build_call(&session, event), Err(failure)).await;
        }
    }

    fn build_call(&self, session: &toolgate::Session, event: &HookEvent) -> Call {
        let id = event.id.clone().or_else(|| self.derive_call_id(event)).unwrap_or_default();
        session.prepare(&tool_name_from_client(&event.tool), event.input.as_str()).client_id(id)
    }

    /// Derives an id for a call without one from its tool and arguments.
    ///
    /// The id is recorded, so it is keyed: the arguments cannot be guessed from it.
    fn derive_call_id(&self, event: &HookEvent) -> Option<String> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.call_id_key?).ok()?;
        mac.update(b"toolgate-unnamed-v1\0");
        mac.update(format!("{} {}", event.tool, canonical_text(&event.input)).as_bytes());
        Some(format!("unnamed:{}", Digest::from_bytes(mac.finalize().into_bytes().into())))
    }

    fn is_read_tool(&self, gate: &Toolgate, tool: &str) -> bool {
        let tool = tool_name_from_client(tool);
        gate.agent(&self.agent).is_some_and(|agent| {
            agent.tools().any(|spec| spec.name() == tool && spec.effect() == Effect::Read)
        })
    }

    /// Returns the agent and the undeclared tool of an event if this gate does not have the tool.
    pub(crate) fn undeclared_tool(&self, event: &HookEvent) -> Option<(String, String)> {
        let (tool, gate) = (tool_name_from_client(&event.tool), self.gate.as_ref().ok()?);
        let asks = self.fallbacks.undeclared == FallbackDecision::Ask && !event.tool.is_empty();
        let is_undeclared =
            asks && gate.agent(&self.agent)?.tools().all(|spec| spec.name() != tool);
        is_undeclared.then(|| (self.agent.clone(), tool))
    }

    /// Builds the answer for an error of the gate.
    fn gate_failure_reply(&self, event: &HookEvent, reason: &str) -> HookReply {
        let reason = format!("toolgate failed: {reason}");
        match event.kind {
            HookEventKind::BeforeTool if self.fallbacks.on_failure == FallbackDecision::Ask => {
                HookReply::ask(reason)
            }
            HookEventKind::BeforeTool | HookEventKind::Malformed(_, None) => {
                HookReply::deny(reason)
            }
            HookEventKind::AfterTool(_)
            | HookEventKind::UnreadableResult
            | HookEventKind::Malformed(_, Some(_)) => HookReply::withhold(event, reason),
            HookEventKind::SessionEnd => HookReply { notice: Some(reason), ..HookReply::default() },
            _ => HookReply::block(reason),
        }
    }

    fn admitted_reply(&self, event: &HookEvent, deferred: &toolgate::DeferredCall) -> HookReply {
        let original: Value = serde_json::from_str(&event.input).unwrap_or_default();
        let decision = match &deferred.approval_reason {
            Some(reason) => Some(ReplyDecision::Ask(reason.clone())),
            None => self
                .granted
                .contains(&tool_name_from_client(&event.tool))
                .then_some(ReplyDecision::Allow),
        };
        // Canonical forms are compared, because one number has several spellings.
        let input = (canonical_value(&original) != canonical_value(deferred.arguments.value()))
            .then(|| deferred.arguments.value().clone());
        HookReply {
            decision,
            updated_input: input,
            notice: self.notice.clone(),
            ..HookReply::default()
        }
    }

    fn denied_reply(&self, denied: &Answer) -> HookReply {
        let Some(error) = denied.outcome.error() else {
            return HookReply::deny(duplicate_call_error(denied).for_model_in(self.dialect));
        };
        match error.code.as_ref() {
            "store_unavailable" if self.fallbacks.on_failure == FallbackDecision::Ask => {
                HookReply::ask(error.for_model_in(self.dialect))
            }
            "approval_required" => {
                HookReply::deny(with_approval_command(error).for_model_in(self.dialect))
            }
            _ => HookReply::deny(error.for_model_in(self.dialect)),
        }
    }

    fn result_reply(&self, event: &HookEvent, original: &Value, answer: &Answer) -> HookReply {
        if let Some(output) = answer.outcome.success() {
            let mut value = output.value.clone();
            let changed = canonical_value(original) != canonical_value(&value);
            if changed && let Some(fields) = value.as_object_mut() {
                // The file has the whole original result, and the model would read it instead.
                fields.remove("persistedOutputPath");
                fields.remove("persistedOutputSize");
            }
            return HookReply {
                replaced_output: changed.then_some(value),
                context: output.message.clone(),
                ..HookReply::default()
            };
        }
        let Some(error) = answer.outcome.error() else { return HookReply::default() };
        HookReply::withhold(event, error.for_model_in(self.dialect))
    }
}

/// Builds the error for a repeated call, because a hook cannot hand over the recorded result.
fn duplicate_call_error(answer: &Answer) -> ToolError {
    let message = "the same call was made before and is not repeated; its result is in `upstream`";
    let mut error =
        ToolError::from_code(error_code::DUPLICATE_CALL, message).with_effects(CallEffects::Done);
    error.upstream =
        answer.outcome.success().filter(|output| !output.hidden).map(|output| output.value.clone());
    (error.replayed, error.call_id) = (true, Some(answer.call));
    error
}

/// Adds the approval command to the error, because the client cannot show the approval.
fn with_approval_command(error: &ToolError) -> ToolError {
    let mut error = error.clone();
    if let Some(approval) = &error.approval {
        error.message = format!(
            "{}, with `toolgate approvals approve {}` in a terminal",
            error.message, approval.id
        );
    }
    error
}

fn canonical_text(text: &str) -> String {
    serde_json::from_str::<Value>(text)
        .map_or_else(|_| text.to_owned(), |value| canonical_value(&value))
}

fn canonical_value(value: &Value) -> String {
    String::from_utf8_lossy(&toolgate_json::to_canonical_bytes(value)).into_owned()
}
