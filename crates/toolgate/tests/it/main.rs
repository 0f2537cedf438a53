//! All integration tests of the crate in one binary.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "tests may fail loudly"
)]

mod agent_subset;
mod approvals;
mod batch;
mod call_outcomes;
mod cel;
mod command_hooks;
mod concurrency;
mod config_loading;
mod deferred_calls;
mod error_codes_in_spec;
mod errors;
mod evidence;
mod examples;
mod files;
mod flow;
mod fuzz_corpus;
mod hooks;
mod hostile_input;
mod ledger_rows;
mod limits;
mod match_upstreams;
mod mcp_servers_json;
mod next_step;
mod pinned_formats;
mod policies;
mod properties;
mod provenance_laundering;
mod recall;
mod registry_contract;
mod result_truncation;
mod rule_diagnostics;
mod rule_loading;
mod rules;
mod schema;
mod schema_messages;
mod secrets;
mod sessions;
mod shell;
mod suggest_vs_difflib;
mod support;
mod telemetry;
mod tools;
mod value_normalization;
