//! The trace that a call belongs to: a client says so in `_meta`, or in the headers of its request; an upstream is told.

use http::request::Parts;
use opentelemetry::Context;
use opentelemetry::propagation::{Extractor, Injector};
use rmcp::model::RequestMetaObject;
use serde_json::Value;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use crate::calls::Client;

/// What carries a trace from one to the next.
const FIELDS: [&str; 2] = ["traceparent", "tracestate"];

/// What a request says of its trace: its metadata first, where it has some.
struct From<'r>(Option<&'r RequestMetaObject>, Option<&'r Parts>);

impl Extractor for From<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        let header = || self.1?.headers.get(key)?.to_str().ok();
        self.0.and_then(|meta| meta.get(key)?.as_str()).or_else(header)
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
    opentelemetry::global::get_text_map_propagator(|propagator| propagator.extract(&From(None, Some(parts))))
}

/// The trace that a request belongs to.
pub(crate) fn of(client: &Client<'_>) -> Context {
    opentelemetry::global::get_text_map_propagator(|propagator| propagator.extract(&From(Some(client.meta), client.parts)))
}

/// Tells an upstream of the trace that the call under way belongs to. Where nobody traces, what the client said stays.
pub(crate) fn tell(meta: &mut RequestMetaObject) {
    let context = tracing::Span::current().context();
    opentelemetry::global::get_text_map_propagator(|propagator| propagator.inject_context(&context, &mut To(meta)));
}
