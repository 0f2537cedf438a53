//! Holds the state of one call while the gates run: everything that its ledger row needs.

use std::sync::Arc;

use jiff::Timestamp;
use serde_json::Value;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::Span;
use tracing::field::Empty;

use crate::call::{Call, CallId, SessionKey};
use crate::ledger::row::{Gate, Latency};
use crate::limits::Cost;
use crate::pipeline::Toolgate;
use crate::pipeline::explain::ExplainState;
use crate::pipeline::session_hold::SessionHold;
use crate::policy::DecisionFacts;
use toolgate_json::Digest;

pub(crate) struct CallState {
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
    /// Digest of the call before hooks.
    pub(crate) requested_digest: Option<Digest>,
    /// Extra time that the claim must stay valid, because calls of the same batch run first.
    pub(crate) lease_slack: std::time::Duration,
    pub(crate) rule: Option<String>,
    pub(crate) facts: Box<DecisionFacts>,
    pub(crate) config: Digest,
    pub(crate) retries: u32,
    pub(crate) spent: Option<Cost>,
    pub(crate) deadline: Option<Instant>,
    pub(crate) cancel: CancellationToken,
    /// A value that the entry point shares with the handler.
    pub(crate) extension: Option<crate::call::CallExtension>,
    pub(crate) span: Span,
    /// The client's id for a deferred call.
    pub(crate) deferred_id: Option<String>,
    /// The client runs the tool, not this process.
    pub(crate) is_run_by_client: bool,
    /// The entities of the call, if only the claim still knows them.
    pub(crate) entities: Vec<(Arc<str>, Value)>,
    /// The evidence stamp of the session at admission, or 0 if unknown.
    pub(crate) evidence_stamp: u64,
    /// Why the client must ask its user, if it must.
    pub(crate) approval_reason: Option<String>,
    /// Collects the explanation, if the call is only explained. Then every gate only reads.
    pub(crate) explain: Option<Box<ExplainState>>,
    /// The lease of the session, until the call has ended.
    pub(crate) session_hold: Option<SessionHold>,
    gate: Gate,
    gate_entered_at: std::time::Instant,
    latency: Latency,
}

impl CallState {
    /// Starts the state of a call, with a tracing span.
    pub(crate) fn start(gate: &Toolgate, call: &Call, id: Option<CallId>) -> Box<Self> {
        let mut call_state = Self::without_span(gate, call, id);
        let (tool, id) = (Arc::clone(&call_state.tool), call_state.id);
        call_state.span = tracing::info_span!(
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
        call_state
    }

    /// Starts the state of a call that is only explained, without a tracing span.
    pub(crate) fn for_explain(gate: &Toolgate, call: &Call) -> Box<Self> {
        let mut call_state = Self::without_span(gate, call, None);
        call_state.explain = Some(Box::default());
        call_state
    }

    /// Starts the state of a call without a tracing span.
    pub(crate) fn without_span(gate: &Toolgate, call: &Call, id: Option<CallId>) -> Box<Self> {
        let id = id.unwrap_or_else(CallId::generate);
        let started = gate.now();
        let cancel = call
            .cancel
            .as_ref()
            .map_or_else(CancellationToken::new, CancellationToken::child_token);
        // The name of an unknown tool is untrusted text.
        let tool: Arc<str> = match gate
            .0
            .agents
            .get(&call.key.agent)
            .and_then(|agent| agent.tools.get(call.tool.as_str()))
        {
            Some(tool) => Arc::clone(&tool.spec.name),
            None => gate
                .0
                .redactor
                .scrub_to_string(&toolgate_text::escape_for_display(&call.tool))
                .into(),
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
            requested_digest: None,
            lease_slack: std::time::Duration::ZERO,
            rule: None,
            facts: Box::new(DecisionFacts::at(started)),
            config: Digest::default(),
            retries: 0,
            spent: None,
            deadline: call.timeout.and_then(|within| Instant::now().checked_add(within)),
            cancel,
            extension: call.extension.clone(),
            span: Span::none(),
            deferred_id: None,
            entities: Vec::new(),
            is_run_by_client: false,
            evidence_stamp: 0,
            approval_reason: None,
            explain: None,
            session_hold: None,
            gate: Gate::Admit,
            gate_entered_at: std::time::Instant::now(),
            latency: Latency::default(),
        })
    }

    /// Enters a gate and adds the elapsed time to the previous one.
    pub(crate) fn enter_gate(&mut self, gate: Gate) {
        let now = std::time::Instant::now();
        let nanos =
            u64::try_from(now.duration_since(self.gate_entered_at).as_nanos()).unwrap_or(u64::MAX);
        self.latency.add(self.gate, nanos);
        self.gate = gate;
        self.gate_entered_at = now;
    }

    /// Continues a call that another process admitted. The time in between counts as run time.
    pub(crate) fn resume_deferred(&mut self, before: Latency, away: u64) {
        self.latency = before;
        self.latency.add(Gate::Run, away);
        self.gate = Gate::Run;
        self.gate_entered_at = std::time::Instant::now();
    }

    pub(crate) const fn gate(&self) -> Gate {
        self.gate
    }

    pub(crate) fn latency(&mut self) -> Latency {
        self.enter_gate(self.gate);
        self.latency
    }
}

/// Returns the earlier of two deadlines.
pub(crate) fn earlier_deadline(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}
