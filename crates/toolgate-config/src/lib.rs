#![doc = include_str!("../README.md")]

mod agent_config;
mod build_agents;
mod config;
mod json_schema;
mod lint;
mod lint_descriptions;
mod lint_schemas;
mod match_upstreams;
mod mcp_servers_json;
mod merge_configs;
mod parse;
mod policy_tests;
mod schema_keywords;
mod secret_ref;
mod tool_backend;
mod unusable_tool;
mod upstream_config;

pub use config::{ClientFallbacks, Config, ConfigError, FallbackDecision};
pub use json_schema::config_schema;
pub use lint::{LINTS, LintFinding, ToolUsage};
pub use mcp_servers_json::{PROXIED_SERVERS_KEY, parse_mcp_servers};
pub use parse::gateway::{GatewayConfig, GatewayToken, JwtConfig, OtlpConfig};
pub use parse::http_tool::{HttpTool, HttpToolBody};
pub use policy_tests::{ExpectedDecision, PolicyTest, PolicyTestCall, read_policy_tests};
pub use secret_ref::SecretRef;
pub use tool_backend::{Backend, ExposedTool, RemoteToolSpec};
pub use unusable_tool::UnusableTool;
pub use upstream_config::{
    Credentials, ErrorPattern, TokenSource, UPSTREAM_ENVIRONMENT, UndeclaredToolPolicy,
    UpstreamConfig, UpstreamTransport,
};
