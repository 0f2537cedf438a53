#![doc = include_str!("../README.md")]
#![expect(
    deprecated,
    reason = "clients and servers of earlier revisions still use sampling, logging and roots"
)]

mod gateway;
mod http_tool;
mod mcp_convert;
mod resources;
mod server;
mod trace_context;
mod upstream;

/// First protocol revision with stateless requests: each request carries its own context.
pub(crate) const REVISION_2026_07_28: &str = "2026-07-28";

/// Returns whether a tool name can be sent in an HTTP header without encoding.
pub(crate) fn is_header_safe_name(name: &str) -> bool {
    name.bytes().all(|byte| byte.is_ascii_graphic()) && !name.starts_with("=?")
}

/// Returns whether a schema may require arguments to be repeated in HTTP headers.
pub(crate) fn has_header_arguments(schema: &impl serde::Serialize) -> bool {
    serde_json::to_string(schema).map_or(true, |text| text.contains("x-mcp-header"))
}

pub use crate::gateway::canary::CANARY;
pub use crate::server::http::HttpListener;
pub use gateway::{BuiltInRulesFn, Gateway, GatewayOptions};
pub use toolgate_process::nofile_limit::raise_open_file_limit;
pub use toolgate_process::sandbox::run_as_helper_if_requested;
pub use upstream::{
    PinAcceptResult, PinnedTools, Pins, QuarantineReason, QuarantinedTool, UpstreamHealth,
    UpstreamOptions, UpstreamStatus, Upstreams, quarantine_shadowing_tools,
};
