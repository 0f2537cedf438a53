//! Connects to upstreams: programs, streamable HTTP and legacy SSE.

pub(crate) mod bounded_http;
mod child_process;
pub(crate) mod connect;
pub(crate) mod direct_http;
mod direct_response;
pub(crate) mod legacy_sse;
