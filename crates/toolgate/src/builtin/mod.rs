//! Defines the built-in tools.

mod calc;
mod files;
mod json_query;
mod read_output;

pub use crate::builtin::json_query::json_query;
pub use crate::builtin::read_output::read_output;
pub use calc::calc;
pub use files::{files, list_files, read_file, write_file};
