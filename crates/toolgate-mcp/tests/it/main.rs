//! Tests the gateway through its public interfaces.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "tests fail loudly"
)]

mod admission_limits;
mod approvals;
mod attack_cases;
mod cancellation;
mod elicitation;
mod fast_path_equivalence;
mod hostile_upstream;
mod http_endpoints_and_cors;
mod http_tools;
mod jwt_keys;
mod legacy_http_client;
mod legacy_upstreams;
mod load;
mod mid_call_messages;
mod oauth;
mod oversized_responses;
mod passthrough_fidelity;
mod protocol_edge_cases;
mod replay_check_failure;
mod request_smuggling;
mod resource_subscriptions;
mod resources;
mod resumable_sessions;
mod scripted_server;
mod secret_rotation;
mod security;
mod shutdown;
mod slow_clients;
mod stream_clients;
mod support;
mod tls_and_authentication;
mod tools_call;
mod two_gateways_one_config;
mod unpinnable_tools;
mod unusable_tools;
mod upstream_faults;
mod upstream_health;
mod upstream_kinds;
mod upstream_messages;
mod upstream_reconnect;
