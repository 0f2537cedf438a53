//! Defines the built-in tools.

mod calc;
mod files;
mod output;
mod query;

pub use calc::calc;
pub use files::{files, list_files, read_file, write_file};
pub use output::read_output;
pub use query::json_query;
