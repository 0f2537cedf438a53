#![doc = include_str!("../README.md")]
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "helpers of tests and benchmarks may fail loudly"
)]

pub mod bench_report;
pub mod jwt_keys;
pub mod replay_check;
pub mod script;
