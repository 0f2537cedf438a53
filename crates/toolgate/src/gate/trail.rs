//! What is known of a call while it is on its way: everything the row will say.

use std::sync::Arc;

use jiff::Timestamp;
use serde_json::Value;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::Span;
use tracing::field::Empty;

use super::Toolgate;
use crate::call::{Call, CallId, SessionKey};
use crate::json::Digest;
use crate::ledger::{Gate, Latency};
use crate::limits::Spend;
use crate::policy::Facts;

pub(crate) struct Trail {
    pub(crate) id: CallId,
    pub(crate) started: Timestamp,
    pub(crate) key: SessionKey,
    pub(crate) turn: Option<u64>,
    pub(crate) client_id: Option<String>,
    pub(crate) stop_reason: Option<String>,
    pub(crate) tool: Arc<str>,
    /// Redacted.
    pub(crate) arguments: Arc<Value>,
    pub(crate) digest: Option<Digest>,
    /// The call as it was asked for, before hooks.
    pub(crate) asked: Option<Digest>,
    /// How much longer than its own time-out a claim may have to wait.
    pub(crate) slack: std::time::Duration,
    pub(crate) rule: Option<String>,
    pub(crate) facts: Box<Facts>,
    pub(crate) config: Digest,
    pub(crate) retries: u32,
    pub(crate) spent: Option<Spend>,
    pub(crate) deadline: Option<Instant>,
    pub(crate) cancel: CancellationToken,
    /// What the door shares with the handler.
    pub(crate) carried: Option<crate::call::Carried>,
    pub(crate) span: Span,
    /// What the client calls it, where its pass is kept for another process.
    pub(crate) kept: Option<String>,
    /// A client runs it, not this process.
    pub(crate) apart: bool,
    /// What it is about, where only its claim still knows.
    pub(crate) about: Vec<(Arc<str>, Value)>,
    /// How far its session had come when it was admitted; where nobody knows, at its beginning.
    pub(crate) stamp: u64,
    /// Where the client asks its user: why.
    pub(crate) asks: Option<String>,
    gate: Gate,
    since: std::time::Instant,
    latency: Latency,
}

impl Trail {
    /// The trail of a call, under a span of its own.
    pub(super) fn open(gate: &Toolgate, call: &Call, id: Option<CallId>) -> Box<Self> {
        let mut trail = Self::unseen(gate, call, id);
        let (tool, id) = (Arc::clone(&trail.tool), trail.id);
        trail.span = tracing::info_span!(
            "execute_tool",
            otel.name = %format_args!("execute_tool {tool}"),
            gen_ai.operation.name = "execute_tool",
            gen_ai.tool.name = &*tool,
            gen_ai.tool.call.id = %id,
            gen_ai.tool.type = "function",
            gen_ai.agent.name = &*call.key.agent,
            gen_ai.conversation.id = &*call.key.session,
            toolgate.gate = Empty,
            toolgate.decision = Empty,
            error.r#type = Empty,
            otel.status_code = Empty,
        );
        trail
    }

    /// The trail of a call that is only looked at: nothing is executed, so no span says so.
    pub(super) fn unseen(gate: &Toolgate, call: &Call, id: Option<CallId>) -> Box<Self> {
        let id = id.unwrap_or_else(CallId::fresh);
        let started = gate.now();
        let cancel = call.cancel.as_ref().map_or_else(CancellationToken::new, CancellationToken::child_token);
        // The name of a tool that does not exist is somebody else's text, and may be anything.
        let tool: Arc<str> = match gate.0.agents.get(&call.key.agent).and_then(|agent| agent.tools.get(call.tool.as_str())) {
            Some(tool) => Arc::clone(&tool.spec.name),
            None => gate.0.redactor.text(&crate::names::shown(&call.tool)).into(),
        };
        Box::new(Self {
            id,
            started,
            key: call.key.clone(),
            turn: call.turn,
            client_id: call.client_id.clone(),
            stop_reason: call.stop_reason.clone(),
            tool,
            arguments: Arc::default(),
            digest: None,
            asked: None,
            slack: std::time::Duration::ZERO,
            rule: None,
            facts: Box::new(Facts::at(started)),
            config: Digest::default(),
            retries: 0,
            spent: None,
            deadline: call.within.and_then(|within| Instant::now().checked_add(within)),
            cancel,
            carried: call.carried.clone(),
            span: Span::none(),
            kept: None,
            about: Vec::new(),
            apart: false,
            stamp: 0,
            asks: None,
            gate: Gate::Admit,
            since: std::time::Instant::now(),
            latency: Latency::default(),
        })
    }

    /// The call comes to the next gate.
    pub(super) fn at(&mut self, gate: Gate) {
        let now = std::time::Instant::now();
        let nanos = u64::try_from(now.duration_since(self.since).as_nanos()).unwrap_or(u64::MAX);
        self.latency.add(self.gate, nanos);
        self.gate = gate;
        self.since = now;
    }

    /// It goes on where another process left it; the time in between was the client's.
    pub(super) fn resume(&mut self, before: Latency, away: u64) {
        self.latency = before;
        self.latency.add(Gate::Run, away);
        self.gate = Gate::Run;
        self.since = std::time::Instant::now();
    }

    pub(super) const fn gate(&self) -> Gate {
        self.gate
    }

    pub(super) fn latency(&mut self) -> Latency {
        self.at(self.gate);
        self.latency
    }
}
