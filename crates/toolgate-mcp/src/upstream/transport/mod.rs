//! Connects to upstreams: programs, streamable HTTP and legacy SSE.

pub(crate) mod bounded_http;
pub(crate) mod connect;
pub(crate) mod direct_http;
pub(crate) mod legacy_sse;
