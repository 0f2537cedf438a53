//! Spans of calls, sent to a collector over OTLP.

use std::io;

use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::{WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider};
use toolgate::config::Otlp;
use tracing_opentelemetry::OpenTelemetryLayer;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::registry::LookupSpan;

/// What is told of calls, on its way to a collector. What has not been sent yet is sent when it is dropped.
pub(crate) struct Telemetry(SdkTracerProvider);

impl Telemetry {
    /// To the collector of a configuration; else to the one that the usual variables name; else nowhere.
    pub(crate) fn start(otlp: Option<&Otlp>) -> io::Result<Option<Self>> {
        let named = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let mut exporter = opentelemetry_otlp::SpanExporter::builder().with_http();
        match otlp {
            Some(otlp) => {
                let headers = otlp.headers.iter().map(|(name, value)| Ok((name.clone(), value.resolve()?)));
                let headers: Result<_, String> = headers.collect();
                exporter = exporter.with_endpoint(format!("{}/v1/traces", otlp.endpoint)).with_headers(headers.map_err(io::Error::other)?);
            }
            None if named("OTEL_EXPORTER_OTLP_ENDPOINT") || named("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") => {}
            None => return Ok(None),
        }
        let exporter = exporter.build().map_err(|error| io::Error::other(format!("spans cannot be sent over OTLP: {error}")))?;
        let mut resource = Resource::builder();
        if !named("OTEL_SERVICE_NAME") {
            resource = resource.with_service_name("toolgate");
        }
        let provider = SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource.build()).build();
        opentelemetry::global::set_text_map_propagator(TraceContextPropagator::new());
        Ok(Some(Self(provider)))
    }

    /// What listens to calls. Libraries beneath are not heard.
    pub(crate) fn layer<S: tracing::Subscriber + for<'a> LookupSpan<'a>>(&self) -> impl Layer<S> + use<S> {
        let layer: OpenTelemetryLayer<S, SdkTracer> = tracing_opentelemetry::layer().with_tracer(self.0.tracer("toolgate"));
        let layer = layer.with_location(false).with_threads(false).with_tracked_inactivity(false);
        layer.with_filter(Targets::new().with_target("toolgate", tracing::Level::INFO))
    }
}

impl Drop for Telemetry {
    fn drop(&mut self) {
        if let Err(error) = self.0.shutdown() {
            tracing::warn!(%error, "the last spans could not be sent");
        }
    }
}
