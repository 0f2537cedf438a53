#![doc = include_str!("../README.md")]

mod error;
mod group_commit;
pub mod hash_chain;
mod keys;
mod open;
mod reader;
mod state_dir;
mod stats;
mod store;
mod tables;
mod transaction;
mod verify;
mod write_connection;

pub use crate::reader::{Entry, Filter, Ledger};
pub use crate::state_dir::state_dir_for;
pub use crate::store::{Gone, SqliteStore};
pub use crate::verify::report::{Anchor, Flaw, Trust, Verified};
pub use stats::{Stats, Times};
pub use verify::check_receipt;
