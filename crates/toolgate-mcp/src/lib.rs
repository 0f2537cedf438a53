//! MCP gateway: passes every call of a client through the gates before it reaches an upstream.
//!
//! A [`Gateway`] is opened for a configuration and a store. It starts the [`Upstreams`], builds the
//! agents and checks that the canary call is denied. Then it serves clients over standard streams
//! ([`Gateway::serve_stdio`]) and HTTP ([`Gateway::listen`]). The crate also implements HTTP tools.
//!
//! ```
//! # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use std::{sync::Arc, time::Duration};
//! use toolgate::{MemoryStore, config::Config};
//! use toolgate_mcp::{Gateway, GatewayOptions, UpstreamOptions};
//!
//! let options = GatewayOptions {
//!     store: Arc::new(MemoryStore::default()),
//!     upstreams: UpstreamOptions::default(),
//!     patience: Duration::from_secs(5),
//!     launcher: None,
//!     built_in: None,
//!     principal: "alice".to_owned(),
//!     own: Vec::new(),
//! };
//! let config = || Ok(Config::parse("toolgate.toml", "[tools.calc]\nkind = \"builtin\"\n"));
//! let gateway = Gateway::open(config, options).await?;
//! let listening = gateway.listen("127.0.0.1:0".parse()?).await?;
//! assert_eq!(gateway.offers(), [("default".to_owned(), 1)]);
//! println!("connect a client to http://{}/mcp", listening.address);
//! gateway.end().await;
//! # Ok(()) }
//! ```
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
