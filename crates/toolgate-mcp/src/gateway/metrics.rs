//! Collects metrics for Prometheus and OpenTelemetry.

use std::collections::HashSet;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};

use opentelemetry::metrics::{Counter as Told, Histogram as TimesTold, Meter};
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
    calls: Told<u64>,
    durations: TimesTold<f64>,
    rejected: Told<u64>,
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
        let refused = meter.u64_counter("toolgate.requests.turned_away").with_unit("{request}");
        Self {
            calls: calls.build(),
            durations: seconds
                .with_description("Duration of calls, from the request to the ledger row")
                .build(),
            rejected: refused
                .with_description("Requests that were rejected before they became calls")
                .build(),
        }
    }
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let calls = Family::<CallLabels, Counter>::default();
        let seconds = Family::<AgentLabels, Histogram>::new_with_constructor(|| {
            Histogram::new(duration_buckets())
        });
        let (upstreams, held) = (
            Family::<UpstreamLabels, Gauge>::default(),
            Family::<UpstreamLabels, Gauge>::default(),
        );
        let (canary, refused) = (Gauge::default(), Counter::default());
        let mut registry = Registry::with_prefix("toolgate");
        registry.register("calls", "Calls by outcome", calls.clone());
        registry.register(
            "call_seconds",
            "Duration of calls, from the request to the ledger row",
            seconds.clone(),
        );
        registry.register("upstream_up", "Whether an upstream is connected", upstreams.clone());
        registry.register(
            "upstream_held_tools",
            "Tools in quarantine until a person accepts them",
            held.clone(),
        );
        registry.register("canary_refused", "Whether the canary call was denied", canary.clone());
        registry.register(
            "requests_turned_away",
            "Requests that were rejected before they became calls",
            refused.clone(),
        );
        let told = OtelInstruments::new(&opentelemetry::global::meter("toolgate"));
        let (known, telling) = (Arc::default(), Arc::default());
        Self {
            registry: Arc::new(registry),
            known_tools: known,
            calls,
            durations: seconds,
            upstreams,
            quarantined: held,
            export_lock: telling,
            canary,
            rejected: refused,
            otel: told,
        }
    }

    /// Registers gauges that are read on demand, as long as the gateway exists.
    pub(crate) fn register_gauges(&self, gateway: Weak<Inner>) {
        let (meter, canary, there) =
            (opentelemetry::global::meter("toolgate"), self.canary.clone(), gateway.clone());
        let health = Arc::new(move || {
            gateway.upgrade().map(|inner| Gateway(inner).health()).unwrap_or_default()
        });
        let up = |one: &UpstreamHealth| i64::from(matches!(one.status, UpstreamStatus::Up { .. }));
        let held = |one: &UpstreamHealth| i64::try_from(one.held.len()).unwrap_or(i64::MAX);
        for (name, about, of) in [
            (
                "toolgate.upstream.up",
                "Whether an upstream is connected",
                up as fn(&UpstreamHealth) -> i64,
            ),
            (
                "toolgate.upstream.held_tools",
                "Tools in quarantine until a person accepts them",
                held,
            ),
        ] {
            let health = Arc::clone(&health);
            let tell = meter.i64_observable_gauge(name).with_description(about).with_callback(
                move |told| {
                    for one in health() {
                        told.observe(
                            of(&one),
                            &[KeyValue::new("toolgate.upstream.name", one.name.clone())],
                        );
                    }
                },
            );
            tell.build();
        }
        let tell = meter.i64_observable_gauge("toolgate.canary.refused");
        tell.with_description("Whether the canary call was denied")
            .with_callback(move |told| {
                if there.strong_count() > 0 {
                    told.observe(canary.get(), &[]);
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
        let mut named = (agent, row.tool.to_string());
        if !self.known_tools.read().unwrap_or_else(PoisonError::into_inner).contains(&named) {
            named = ("(unknown)".to_owned(), "(unknown)".to_owned());
        }
        let (agent, tool) = named;
        let (gate, seconds) =
            (row.gate.name(), std::time::Duration::from_nanos(row.latency.total()).as_secs_f64());
        let named = |name: &'static str, of: &str| KeyValue::new(name, Value::from(of.to_owned()));
        let about = [
            named("gen_ai.agent.name", &agent),
            named("gen_ai.tool.name", &tool),
            KeyValue::new("toolgate.decision", row.decision.name()),
            KeyValue::new("toolgate.gate", gate),
            named("error.type", &code),
        ];
        // A successful call has no `error.type`.
        let all = if code.is_empty() { about.len() - 1 } else { about.len() };
        self.otel.calls.add(1, about.get(..all).unwrap_or_default());
        self.otel.durations.record(seconds, about.get(..2).unwrap_or_default());
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

    pub(crate) fn record_canary(&self, held: bool) {
        self.canary.set(i64::from(held));
    }

    pub(crate) fn count_rejection(&self) {
        self.rejected.inc();
        self.otel.rejected.add(1, &[]);
    }

    /// Exports all metrics in the text format of Prometheus.
    pub(crate) fn export(&self, health: &[UpstreamHealth]) -> String {
        let _one = lock(&self.export_lock);
        // Upstreams that do not exist any more are not exported.
        self.upstreams.clear();
        self.quarantined.clear();
        for one in health {
            let labels = UpstreamLabels { upstream: one.name.clone() };
            self.upstreams
                .get_or_create(&labels)
                .set(i64::from(matches!(one.status, UpstreamStatus::Up { .. })));
            self.quarantined
                .get_or_create(&labels)
                .set(i64::try_from(one.held.len()).unwrap_or(i64::MAX));
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
        let one = metrics.export(&[health("far")]);
        assert!(
            !one.contains("upstream=\"near\"")
                && one.contains("toolgate_upstream_up{upstream=\"far\"} 0"),
            "{one}"
        );
    }
}
