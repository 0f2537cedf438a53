//! Serves clients: the MCP handler, its transports, authentication and the decision API.

pub(crate) mod auth;
pub(crate) mod client_capabilities;
mod client_notifications;
pub(crate) mod decision_api;
pub(crate) mod default_session;
pub(crate) mod elicitation;
pub(crate) mod handler;
pub(crate) mod http;
pub(crate) mod identity;
mod lists;
pub(crate) mod malformed_call;
pub(crate) mod parse_message;
pub(crate) mod passthrough;
mod resume_call;
pub(crate) mod stdio;
pub(crate) mod subscriptions;
pub(crate) mod suspended_calls;
pub(crate) mod tool_call;
