//! Collects metrics for Prometheus and OpenTelemetry.

use std::collections::HashSet;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};

use opentelemetry::metrics::{Counter as OtelCounter, Histogram as OtelHistogram, Meter};
use opentelemetry::{KeyValue, Value};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use toolgate::{Event, Row};

use crate::gateway::{Gateway, Inner, lock};
use crate::upstream::{UpstreamHealth, UpstreamStatus};

/// Returns the upper bounds of the duration buckets, in seconds.
fn duration_buckets() -> impl Iterator<Item = f64> {
    exponential_buckets(0.0005, 2.0, 16)
}

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

/// Metrics of the gateway.
#[derive(Clone)]
pub(crate) struct Metrics {
    registry: Arc<Registry>,
    /// Known tools. Other names share one label, because each name would create a time series.
    known_tools: Arc<RwLock<HashSet<(String, String)>>>,
    calls: Family<CallLabels, Counter>,
    durations: Family<AgentLabels, Histogram>,
    upstreams: Family<UpstreamLabels, Gauge>,
    quarantined: Family<UpstreamLabels, Gauge>,
    /// Allows one export at a time.
    export_lock: Arc<Mutex<()>>,
    canary: Gauge,
    rejected: Counter<u64, AtomicU64>,
    otel: OtelInstruments,
}

/// The same metrics for OpenTelemetry.
#[derive(Clone)]
struct OtelInstruments {
    calls: OtelCounter<u64>,
    durations: OtelHistogram<f64>,
    rejected: OtelCounter<u64>,
}

impl OtelInstruments {
    fn new(meter: &Meter) -> Self {
        let calls = meter
            .u64_counter("toolgate.calls")
            .with_unit("{call}")
            .with_description("Calls by outcome");
        let seconds = meter
            .f64_histogram("toolgate.call.duration")
            .with_unit("s")
            .with_boundaries(duration_buckets().collect());
        let rejected = meter.u64_counter("toolgate.requests.turned_away").with_unit("{request}");
        Self {
            calls: calls.build(),
            durations: seconds
                .with_description("Duration of calls, from the request to the ledger row")
                .build(),
            rejected: rejected
                .with_description("Requests that were rejected before they became calls")
                .build(),
        }
    }
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let calls = Family::<CallLabels, Counter>::default();
        let durations = Family::<AgentLabels, Histogram>::new_with_constructor(|| {
            Histogram::new(duration_buckets())
        });
        let (upstreams, quarantined) = (
            Family::<UpstreamLabels, Gauge>::default(),
            Family::<UpstreamLabels, Gauge>::default(),
        );
        let (canary, rejected) = (Gauge::default(), Counter::default());
        let mut registry = Registry::with_prefix("toolgate");
        registry.register("calls", "Calls by outcome", calls.clone());
        registry.register(
            "call_seconds",
            "Duration of calls, from the request to the ledger row",
            durations.clone(),
        );
        registry.register("upstream_up", "Whether an upstream is connected", upstreams.clone());
        registry.register(
            "upstream_held_tools",
            "Tools in quarantine until a person accepts them",
            quarantined.clone(),
        );
        registry.register("canary_refused", "Whether the canary call was denied", canary.clone());
        registry.register(
            "requests_turned_away",
            "Requests that were rejected before they became calls",
            rejected.clone(),
        );
        let otel = OtelInstruments::new(&opentelemetry::global::meter("toolgate"));
        let (known_tools, export_lock) = (Arc::default(), Arc::default());
        Self {
            registry: Arc::new(registry),
            known_tools,
            calls,
            durations,
            upstreams,
            quarantined,
            export_lock,
            canary,
            rejected,
            otel,
        }
    }

    /// Registers gauges that are read on demand, as long as the gateway exists.
    pub(crate) fn register_gauges(&self, gateway: Weak<Inner>) {
        let (meter, canary, owner) =
            (opentelemetry::global::meter("toolgate"), self.canary.clone(), gateway.clone());
        let health = Arc::new(move || {
            gateway.upgrade().map(|inner| Gateway(inner).health()).unwrap_or_default()
        });
        let is_up = |upstream: &UpstreamHealth| {
            i64::from(matches!(upstream.status, UpstreamStatus::Up { .. }))
        };
        let quarantined =
            |upstream: &UpstreamHealth| i64::try_from(upstream.held.len()).unwrap_or(i64::MAX);
        for (name, description, value_of) in [
            (
                "toolgate.upstream.up",
                "Whether an upstream is connected",
                is_up as fn(&UpstreamHealth) -> i64,
            ),
            (
                "toolgate.upstream.held_tools",
                "Tools in quarantine until a person accepts them",
                quarantined,
            ),
        ] {
            let health = Arc::clone(&health);
            let gauge = meter
                .i64_observable_gauge(name)
                .with_description(description)
                .with_callback(move |observer| {
                    for upstream in health() {
                        observer.observe(
                            value_of(&upstream),
                            &[KeyValue::new("toolgate.upstream.name", upstream.name.clone())],
                        );
                    }
                });
            gauge.build();
        }
        let gauge = meter.i64_observable_gauge("toolgate.canary.refused");
        gauge
            .with_description("Whether the canary call was denied")
            .with_callback(move |observer| {
                if owner.strong_count() > 0 {
                    observer.observe(canary.get(), &[]);
                }
            })
            .build();
    }

    /// Sets the known tools.
    pub(crate) fn set_known_tools(&self, tools: HashSet<(String, String)>) {
        *self.known_tools.write().unwrap_or_else(PoisonError::into_inner) = tools;
    }

    pub(crate) fn on_event(&self, event: &Event) {
        if let Event::CallEnded(row) = event {
            self.count_row(row);
        }
    }

    fn count_row(&self, row: &Row) {
        let (agent, code) = (row.key.agent.to_string(), row.code().unwrap_or_default().to_owned());
        let mut agent_and_tool = (agent, row.tool.to_string());
        let known_tools = self.known_tools.read().unwrap_or_else(PoisonError::into_inner);
        if !known_tools.contains(&agent_and_tool) {
            agent_and_tool = ("(unknown)".to_owned(), "(unknown)".to_owned());
        }
        drop(known_tools);
        let (agent, tool) = agent_and_tool;
        let (gate, seconds) =
            (row.gate.name(), std::time::Duration::from_nanos(row.latency.total()).as_secs_f64());
        let attribute =
            |name: &'static str, value: &str| KeyValue::new(name, Value::from(value.to_owned()));
        let attributes = [
            attribute("gen_ai.agent.name", &agent),
            attribute("gen_ai.tool.name", &tool),
            KeyValue::new("toolgate.decision", row.decision.name()),
            KeyValue::new("toolgate.gate", gate),
            attribute("error.type", &code),
        ];
        // A successful call has no `error.type`.
        let attribute_count = if code.is_empty() { attributes.len() - 1 } else { attributes.len() };
        self.otel.calls.add(1, attributes.get(..attribute_count).unwrap_or_default());
        self.otel.durations.record(seconds, attributes.get(..2).unwrap_or_default());
        self.calls
            .get_or_create(&CallLabels {
                agent: agent.clone(),
                tool: tool.clone(),
                decision: row.decision.name(),
                gate,
                code,
            })
            .inc();
        self.durations.get_or_create(&AgentLabels { agent, tool }).observe(seconds);
    }

    pub(crate) fn record_canary(&self, is_denied: bool) {
        self.canary.set(i64::from(is_denied));
    }

    pub(crate) fn count_rejection(&self) {
        self.rejected.inc();
        self.otel.rejected.add(1, &[]);
    }

    /// Exports all metrics in the text format of Prometheus.
    pub(crate) fn export(&self, health: &[UpstreamHealth]) -> String {
        let _guard = lock(&self.export_lock);
        // Upstreams that do not exist any more are not exported.
        self.upstreams.clear();
        self.quarantined.clear();
        for upstream in health {
            let labels = UpstreamLabels { upstream: upstream.name.clone() };
            self.upstreams
                .get_or_create(&labels)
                .set(i64::from(matches!(upstream.status, UpstreamStatus::Up { .. })));
            self.quarantined
                .get_or_create(&labels)
                .set(i64::try_from(upstream.held.len()).unwrap_or(i64::MAX));
        }
        let mut text = String::new();
        match encode(&mut text, &self.registry) {
            Ok(()) => text,
            Err(_) => "# cannot export the metrics\n# EOF\n".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removed_upstream_is_not_exported() {
        let metrics = Metrics::new();
        let health = |name: &str| UpstreamHealth {
            name: name.to_owned(),
            status: UpstreamStatus::Starting,
            starts: 1,
            tools: 0,
            held: Vec::new(),
        };
        let both = metrics.export(&[health("near"), health("far")]);
        assert!(both.contains("upstream=\"near\"") && both.contains("upstream=\"far\""), "{both}");
        let remaining = metrics.export(&[health("far")]);
        assert!(
            !remaining.contains("upstream=\"near\"")
                && remaining.contains("toolgate_upstream_up{upstream=\"far\"} 0"),
            "{remaining}"
        );
    }
}
