//! Numbers for those who watch.

use std::collections::HashSet;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, PoisonError, RwLock};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use toolgate::{Event, Row};

use crate::upstream::{Health, Status};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CallLabels {
    agent: String,
    tool: String,
    decision: &'static str,
    gate: &'static str,
    code: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AgentLabels {
    agent: String,
    tool: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct UpstreamLabels {
    upstream: String,
}

/// What is counted.
#[derive(Clone)]
pub(crate) struct Metrics {
    registry: Arc<Registry>,
    /// Tools that there are: names that somebody made up would each be a series of their own.
    known: Arc<RwLock<HashSet<(String, String)>>>,
    calls: Family<CallLabels, Counter>,
    seconds: Family<AgentLabels, Histogram>,
    upstreams: Family<UpstreamLabels, Gauge>,
    held: Family<UpstreamLabels, Gauge>,
    canary: Gauge,
    refused: Counter<u64, AtomicU64>,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let calls = Family::<CallLabels, Counter>::default();
        let seconds = Family::<AgentLabels, Histogram>::new_with_constructor(|| Histogram::new(exponential_buckets(0.0005, 2.0, 16)));
        let (upstreams, held) = (Family::<UpstreamLabels, Gauge>::default(), Family::<UpstreamLabels, Gauge>::default());
        let (canary, refused) = (Gauge::default(), Counter::default());
        let mut registry = Registry::with_prefix("toolgate");
        registry.register("calls", "Calls, by what became of them", calls.clone());
        registry.register("call_seconds", "How long calls took, from door to record", seconds.clone());
        registry.register("upstream_up", "Whether an upstream is there", upstreams.clone());
        registry.register("upstream_held_tools", "Tools that are held back until somebody has looked at them", held.clone());
        registry.register("canary_refused", "Whether the call that must be refused was refused", canary.clone());
        registry.register("requests_turned_away", "Requests that were turned away before they became calls", refused.clone());
        Self { registry: Arc::new(registry), known: Arc::default(), calls, seconds, upstreams, held, canary, refused }
    }

    /// The tools that there are now.
    pub(crate) fn know(&self, tools: HashSet<(String, String)>) {
        *self.known.write().unwrap_or_else(PoisonError::into_inner) = tools;
    }

    pub(crate) fn hear(&self, event: &Event) {
        if let Event::ToolInvoked(row) = event {
            self.count(row);
        }
    }

    fn count(&self, row: &Row) {
        let (agent, code) = (row.key.agent.to_string(), row.code().unwrap_or_default().to_owned());
        let mut named = (agent, row.tool.to_string());
        if !self.known.read().unwrap_or_else(PoisonError::into_inner).contains(&named) {
            named = ("(unknown)".to_owned(), "(unknown)".to_owned());
        }
        let (agent, tool) = named;
        let gate = row.gate.name();
        self.calls.get_or_create(&CallLabels { agent: agent.clone(), tool: tool.clone(), decision: row.decision.name(), gate, code }).inc();
        self.seconds
            .get_or_create(&AgentLabels { agent, tool })
            .observe(std::time::Duration::from_nanos(row.latency.total()).as_secs_f64());
    }

    pub(crate) fn canary(&self, held: bool) {
        self.canary.set(i64::from(held));
    }

    pub(crate) fn turned_away(&self) {
        self.refused.inc();
    }

    /// All of it, as Prometheus reads it.
    pub(crate) fn text(&self, health: &[Health]) -> String {
        for one in health {
            let labels = UpstreamLabels { upstream: one.name.clone() };
            self.upstreams.get_or_create(&labels).set(i64::from(matches!(one.status, Status::Up { .. })));
            self.held.get_or_create(&labels).set(i64::try_from(one.held.len()).unwrap_or(i64::MAX));
        }
        let mut text = String::new();
        match encode(&mut text, &self.registry) {
            Ok(()) => text,
            Err(_) => "# the numbers cannot be written\n# EOF\n".to_owned(),
        }
    }
}
