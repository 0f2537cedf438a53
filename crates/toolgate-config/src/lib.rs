#![doc = include_str!("../README.md")]

mod build_agents;
mod config;
mod json_schema;
mod lint;
mod match_upstreams;
mod mcp_servers_json;
mod parse;
mod policy_tests;
mod schema_keywords;
mod secret_ref;
mod tool_backend;
mod unusable_tool;

pub use config::{Client, Config, ConfigError, Otherwise};
pub use json_schema::config_schema;
pub use lint::{Finding, LINTS, Usage};
pub use parse::gateway::{Gateway, Jwt, Otlp, Token};
pub use parse::http_tool::{Body, HttpTool};
pub use parse::upstream::{
    BEHIND_TOOLGATE, Credentials, ErrorPattern, Reach, TokenSource, UPSTREAM_ENVIRONMENT, Undeclared, Upstream, parse_mcp_servers,
};
pub use policy_tests::{Expected, PolicyTest, TestCall, read_policy_tests};
pub use secret_ref::Reference;
pub use tool_backend::{Backend, Exposed, Remote};
pub use unusable_tool::Unfit;
