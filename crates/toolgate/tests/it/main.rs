//! All integration tests of the crate in one binary.

#![expect(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests may fail loudly")]

mod advice;
mod approvals;
mod batch;
mod broken;
mod cel;
mod codes;
mod command_hooks;
mod concurrency;
mod difflib;
mod errors;
mod examples;
mod excerpt;
mod explained;
mod files;
mod fitting;
mod flow;
mod fuzzed;
mod hooks;
mod hostile;
mod kept;
mod launder;
mod limits;
mod loading;
mod patterns;
mod policies;
mod proofs;
mod properties;
mod reach;
mod recall;
mod records;
mod reference;
mod results;
mod rules;
mod schema;
mod seeds;
mod servers;
mod sessions;
mod shell;
mod spelled;
mod stops;
mod support;
mod telemetry;
mod tools;
