//! Spans of calls, sent to a collector over OTLP.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::{SpanExporter, WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider, SpanData};
use toolgate::config::Otlp;
use tracing_opentelemetry::OpenTelemetryLayer;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::registry::LookupSpan;

/// The variables that name a collector.
const VARIABLES: [&str; 2] = ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"];

/// An address without what may be secret in it: who asks there, with which password, and for what.
fn told(address: &str) -> String {
    let Some((scheme, rest)) = address.split_once("://") else { return "the collector".to_owned() };
    let host = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
    format!("{scheme}://{}", host.split(['?', '#']).next().unwrap_or_default())
}

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
            None if VARIABLES.into_iter().any(named) => {}
            None => return Ok(None),
        }
        // Who wants none says so in the usual way.
        let says = |name: &str, value: &str| std::env::var(name).is_ok_and(|said| said.eq_ignore_ascii_case(value));
        if says("OTEL_SDK_DISABLED", "true") || says("OTEL_TRACES_EXPORTER", "none") {
            return Ok(None);
        }
        let exporter = exporter.build().map_err(|error| {
            let variables = VARIABLES.into_iter().filter_map(|name| std::env::var(name).ok()).map(|value| value.trim().to_owned());
            let named = otlp.map(|otlp| otlp.endpoint.clone()).into_iter().chain(variables).filter(|named| !named.is_empty());
            let why = named.fold(error.to_string(), |why, named| why.replace(&named, &told(&named)));
            io::Error::other(format!("spans cannot be sent over OTLP: {why}"))
        })?;
        let mut resource = Resource::builder();
        if !named("OTEL_SERVICE_NAME") {
            resource = resource.with_service_name("toolgate");
        }
        let place = otlp.map(|otlp| format!("{}/v1/traces", told(&otlp.endpoint))).unwrap_or_else(|| "the collector".to_owned());
        let exporter = Sending { exporter, place, away: AtomicBool::new(false) };
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
        // What could not be sent was told.
        let _ = self.0.shutdown();
    }
}

/// Sends spans, and says when that begins and ceases to fail.
#[derive(Debug)]
struct Sending {
    exporter: SpanExporter,
    place: String,
    away: AtomicBool,
}

impl opentelemetry_sdk::trace::SpanExporter for Sending {
    async fn export(&self, mut batch: Vec<SpanData>) -> OTelSdkResult {
        // The canary is nobody's call.
        let canary = |span: &SpanData| {
            span.attributes.iter().any(|about| about.key.as_str() == "gen_ai.agent.name" && about.value.as_str() == toolgate_mcp::CANARY)
        };
        batch.retain(|span| !canary(span));
        if batch.is_empty() {
            return Ok(());
        }
        let sent = self.exporter.export(batch).await;
        if self.away.swap(sent.is_err(), Ordering::Relaxed) != sent.is_err() {
            match sent {
                Err(_) => tracing::warn!("spans cannot be sent to {}; they are dropped, calls go on", self.place),
                Ok(()) => tracing::warn!("spans are sent to {} again", self.place),
            }
        }
        sent
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}
