//! Passes the trace context of a client (from `_meta` or HTTP headers) on to upstreams.

use http::request::Parts;
use opentelemetry::Context;
use opentelemetry::propagation::{Extractor, Injector};
use rmcp::model::RequestMetaObject;
use serde_json::Value;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use crate::server::tool_call::CallClient;

/// Names of the fields of a trace context.
const TRACE_CONTEXT_FIELDS: [&str; 2] = ["traceparent", "tracestate"];

/// Reads a trace context from metadata, or else from headers.
struct TraceContextExtractor<'r>(Option<&'r RequestMetaObject>, Option<&'r Parts>);

impl Extractor for TraceContextExtractor<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        let header = || self.1?.headers.get(key)?.to_str().ok();
        self.0.and_then(|meta| meta.get(key)?.as_str()).or_else(header)
    }

    fn keys(&self) -> Vec<&str> {
        TRACE_CONTEXT_FIELDS.to_vec()
    }
}

struct TraceContextInjector<'m>(&'m mut RequestMetaObject);

impl Injector for TraceContextInjector<'_> {
    fn set(&mut self, key: &str, value: String) {
        self.0.insert(key.to_owned(), Value::String(value));
    }
}

/// Returns the trace context in the headers of a request.
pub(crate) fn context_from_headers(parts: &Parts) -> Context {
    opentelemetry::global::get_text_map_propagator(|propagator| {
        propagator.extract(&TraceContextExtractor(None, Some(parts)))
    })
}

/// Returns the trace context of a request.
pub(crate) fn context_of_request(client: &CallClient<'_>) -> Context {
    opentelemetry::global::get_text_map_propagator(|propagator| {
        propagator.extract(&TraceContextExtractor(Some(client.meta), client.parts))
    })
}

/// Writes the current trace context into metadata for an upstream.
///
/// Without a tracer, the values of the client stay.
pub(crate) fn inject_trace_context(meta: &mut RequestMetaObject) {
    let context = tracing::Span::current().context();
    opentelemetry::global::get_text_map_propagator(|propagator| {
        propagator.inject_context(&context, &mut TraceContextInjector(meta))
    });
}
