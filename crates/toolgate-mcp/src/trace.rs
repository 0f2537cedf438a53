//! The trace that a call belongs to: a client says so in `_meta`, or in the headers of its request; an upstream is told.

use http::request::Parts;
use opentelemetry::Context;
use opentelemetry::propagation::{Extractor, Injector};
use rmcp::RoleServer;
use rmcp::model::RequestMetaObject;
use rmcp::service::RequestContext;
use serde_json::Value;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

/// What carries a trace from one to the next.
const FIELDS: [&str; 2] = ["traceparent", "tracestate"];

struct From<'r>(&'r RequestContext<RoleServer>);

impl Extractor for From<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        let parts = self.0.extensions.get::<Parts>();
        self.0.meta.get(key).and_then(Value::as_str).or_else(|| parts.and_then(|parts| parts.headers.get(key)?.to_str().ok()))
    }

    fn keys(&self) -> Vec<&str> {
        FIELDS.to_vec()
    }
}

struct Headers<'r>(&'r Parts);

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.headers.get(key).and_then(|value| value.to_str().ok())
    }

    fn keys(&self) -> Vec<&str> {
        FIELDS.to_vec()
    }
}

struct To<'m>(&'m mut RequestMetaObject);

impl Injector for To<'_> {
    fn set(&mut self, key: &str, value: String) {
        self.0.insert(key.to_owned(), Value::String(value));
    }
}

/// The trace that a request without metadata belongs to.
pub(crate) fn of_headers(parts: &Parts) -> Context {
    opentelemetry::global::get_text_map_propagator(|propagator| propagator.extract(&Headers(parts)))
}

/// The trace that a request belongs to.
pub(crate) fn of(request: &RequestContext<RoleServer>) -> Context {
    opentelemetry::global::get_text_map_propagator(|propagator| propagator.extract(&From(request)))
}

/// Tells an upstream of the trace that the call under way belongs to. Where nobody traces, what the client said stays.
pub(crate) fn tell(meta: &mut RequestMetaObject) {
    let context = tracing::Span::current().context();
    opentelemetry::global::get_text_map_propagator(|propagator| propagator.inject_context(&context, &mut To(meta)));
}
