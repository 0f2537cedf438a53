//! Exports spans and metrics of calls to a collector over OTLP.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::{MetricExporter, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::metrics::data::ResourceMetrics;
use opentelemetry_sdk::metrics::exporter::PushMetricExporter;
use opentelemetry_sdk::metrics::{SdkMeterProvider, Temporality};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider, SpanData};
use toolgate_config::OtlpConfig;
use tracing::{Level, Metadata};
use tracing_opentelemetry::OpenTelemetryLayer;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::registry::LookupSpan;

/// A kind of telemetry, with its path at the collector and its environment variables.
///
/// `endpoint_variable` names the collector for this kind alone. `exporter_variable` can disable
/// this kind.
struct TelemetryKind {
    name: &'static str,
    path: &'static str,
    endpoint_variable: &'static str,
    exporter_variable: &'static str,
}

const SPANS: TelemetryKind = TelemetryKind {
    name: "spans",
    path: "v1/traces",
    endpoint_variable: "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    exporter_variable: "OTEL_TRACES_EXPORTER",
};
const METRICS: TelemetryKind = TelemetryKind {
    name: "metrics",
    path: "v1/metrics",
    endpoint_variable: "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
    exporter_variable: "OTEL_METRICS_EXPORTER",
};
/// Environment variable with the collector for all kinds.
const ENDPOINT_VARIABLE: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";

/// Returns an address without user name, password and query, which may be secret.
fn redact_address(address: &str) -> String {
    let Some((scheme, rest)) = address.split_once("://") else { return "the collector".to_owned() };
    let host = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
    format!("{scheme}://{}", host.split(['?', '#']).next().unwrap_or_default())
}

fn is_variable_set(variable: &str) -> bool {
    std::env::var_os(variable).is_some_and(|value| !value.is_empty())
}

impl TelemetryKind {
    /// Returns whether the configuration or the environment names a collector and does not disable
    /// it.
    fn is_enabled(&self, otlp: Option<&OtlpConfig>) -> bool {
        let is_set_to = |name: &str, value: &str| {
            std::env::var(name).is_ok_and(|actual| actual.eq_ignore_ascii_case(value))
        };
        let has_collector = otlp.is_some()
            || is_variable_set(ENDPOINT_VARIABLE)
            || is_variable_set(self.endpoint_variable);
        has_collector
            && !is_set_to("OTEL_SDK_DISABLED", "true")
            && !is_set_to(self.exporter_variable, "none")
    }

    /// Sets the endpoint and the headers of the configuration.
    fn configure_endpoint<B: WithExportConfig + WithHttpConfig>(
        &self,
        builder: B,
        otlp: Option<&OtlpConfig>,
    ) -> io::Result<B> {
        let Some(otlp) = otlp else { return Ok(builder) };
        let headers = otlp.headers.iter().map(|(name, value)| Ok((name.clone(), value.resolve()?)));
        let headers: Result<_, String> = headers.collect();
        Ok(builder
            .with_endpoint(format!("{}/{}", otlp.endpoint, self.path))
            .with_headers(headers.map_err(io::Error::other)?))
    }

    /// Builds an error message without the secret parts of addresses.
    fn export_error(&self, error: &impl std::fmt::Display, otlp: Option<&OtlpConfig>) -> io::Error {
        let variables = [ENDPOINT_VARIABLE, self.endpoint_variable]
            .into_iter()
            .filter_map(|name| std::env::var(name).ok())
            .map(|value| value.trim().to_owned());
        let addresses = otlp
            .map(|otlp| otlp.endpoint.clone())
            .into_iter()
            .chain(variables)
            .filter(|address| !address.is_empty());
        let why = addresses.fold(error.to_string(), |why, address| {
            why.replace(&address, &redact_address(&address))
        });
        io::Error::other(format!("cannot send {} over OTLP: {why}", self.name))
    }

    fn wrap_exporter<E>(
        &self,
        exporter: E,
        otlp: Option<&OtlpConfig>,
    ) -> FailureLoggingExporter<E> {
        let destination = otlp
            .map(|otlp| format!("{}/{}", redact_address(&otlp.endpoint), self.path))
            .unwrap_or_else(|| "the collector".to_owned());
        FailureLoggingExporter {
            exporter,
            name: self.name,
            destination,
            is_failing: AtomicBool::new(false),
        }
    }
}

/// The exporters of spans and metrics. Dropping them sends what is still buffered.
pub(crate) struct Telemetry {
    spans: Option<SdkTracerProvider>,
    metrics: Option<SdkMeterProvider>,
}

impl Telemetry {
    /// Starts the exporters for the collector of the configuration, else of the environment.
    pub(crate) fn start(otlp: Option<&OtlpConfig>) -> io::Result<Self> {
        let mut resource = Resource::builder();
        if !is_variable_set("OTEL_SERVICE_NAME") {
            resource = resource.with_service_name("toolgate");
        }
        let resource = resource.build();
        let mut telemetry = Self { spans: None, metrics: None };
        if SPANS.is_enabled(otlp) {
            let exporter = SPANS
                .configure_endpoint(SpanExporter::builder().with_http(), otlp)?
                .build()
                .map_err(|error| SPANS.export_error(&error, otlp))?;
            let provider = SdkTracerProvider::builder()
                .with_batch_exporter(SPANS.wrap_exporter(exporter, otlp))
                .with_resource(resource.clone());
            telemetry.spans = Some(provider.build());
            opentelemetry::global::set_text_map_propagator(TraceContextPropagator::new());
        }
        if METRICS.is_enabled(otlp) {
            let exporter = METRICS
                .configure_endpoint(MetricExporter::builder().with_http(), otlp)?
                .build()
                .map_err(|error| METRICS.export_error(&error, otlp))?;
            let provider = SdkMeterProvider::builder()
                .with_periodic_exporter(METRICS.wrap_exporter(exporter, otlp))
                .with_resource(resource)
                .build();
            opentelemetry::global::set_meter_provider(provider.clone());
            telemetry.metrics = Some(provider);
        }
        Ok(telemetry)
    }

    /// Returns the subscriber layer that exports spans of toolgate, if spans are sent.
    pub(crate) fn layer<S: tracing::Subscriber + for<'a> LookupSpan<'a>>(
        &self,
    ) -> Option<impl Layer<S> + use<S>> {
        let tracer = self.spans.as_ref()?.tracer("toolgate");
        let layer: OpenTelemetryLayer<S, SdkTracer> =
            tracing_opentelemetry::layer().with_tracer(tracer);
        let layer = layer.with_location(false).with_threads(false).with_tracked_inactivity(false);
        Some(layer.with_filter(filter_fn(is_exported).with_max_level_hint(Level::INFO)))
    }
}

/// Returns whether a span is exported. Log events are not, because they may contain a whole row.
fn is_exported(metadata: &Metadata<'_>) -> bool {
    metadata.is_span()
        && *metadata.level() <= Level::INFO
        && metadata.target().starts_with("toolgate")
}

impl Drop for Telemetry {
    fn drop(&mut self) {
        // Export errors were logged already.
        if let Some(spans) = &self.spans {
            let _ = spans.shutdown();
        }
        if let Some(metrics) = &self.metrics {
            let _ = metrics.shutdown();
        }
    }
}

/// Wraps an exporter, and logs when exports start to fail and when they succeed again.
#[derive(Debug)]
struct FailureLoggingExporter<E> {
    exporter: E,
    name: &'static str,
    destination: String,
    is_failing: AtomicBool,
}

impl<E> FailureLoggingExporter<E> {
    fn report_change(&self, result: OTelSdkResult) -> OTelSdkResult {
        if self.is_failing.swap(result.is_err(), Ordering::Relaxed) != result.is_err() {
            match result {
                Err(_) => tracing::warn!(
                    "cannot send {} to {}; they are dropped and calls continue",
                    self.name,
                    self.destination
                ),
                Ok(()) => tracing::warn!("sending {} to {} again", self.name, self.destination),
            }
        }
        result
    }
}

impl opentelemetry_sdk::trace::SpanExporter for FailureLoggingExporter<SpanExporter> {
    async fn export(&self, mut batch: Vec<SpanData>) -> OTelSdkResult {
        // Calls of the canary are not exported.
        let is_canary = |span: &SpanData| {
            span.attributes.iter().any(|attribute| {
                attribute.key.as_str() == "gen_ai.agent.name"
                    && attribute.value.as_str() == toolgate_mcp::CANARY
            })
        };
        batch.retain(|span| !is_canary(span));
        if batch.is_empty() {
            return Ok(());
        }
        self.report_change(self.exporter.export(batch).await)
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

impl PushMetricExporter for FailureLoggingExporter<MetricExporter> {
    async fn export(&self, metrics: &ResourceMetrics) -> OTelSdkResult {
        self.report_change(self.exporter.export(metrics).await)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn temporality(&self) -> Temporality {
        self.exporter.temporality()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    /// Collects exported spans.
    #[derive(Debug, Clone, Default)]
    struct TestSpanExporter(Arc<Mutex<Vec<SpanData>>>);

    impl opentelemetry_sdk::trace::SpanExporter for TestSpanExporter {
        async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
            self.0.lock().unwrap().extend(batch);
            Ok(())
        }
    }

    #[test]
    fn log_events_of_a_call_are_not_exported() {
        let exporter = TestSpanExporter::default();
        let spans = SdkTracerProvider::builder().with_simple_exporter(exporter.clone()).build();
        let telemetry = Telemetry { spans: Some(spans), metrics: None };
        tracing::subscriber::with_default(
            tracing_subscriber::registry().with(telemetry.layer::<tracing_subscriber::Registry>()),
            || {
                let _call = tracing::info_span!(target: "toolgate::gate", "execute_tool").entered();
                // The message is the one for a row that was neither stored nor spooled.
                tracing::error!(target: "toolgate::gate", row = "arguments", "a row could be neither stored nor spooled");
                let _library = tracing::info_span!(target: "hyper", "beneath").entered();
            },
        );
        let exporter = exporter.0.lock().unwrap();
        let exported: Vec<_> =
            exporter.iter().map(|span| (&*span.name, span.events.len())).collect();
        assert_eq!(exported, [("execute_tool", 0)]);
    }
}
