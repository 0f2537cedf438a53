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
mod write_queue;

pub use crate::reader::{Ledger, LedgerEntry, LedgerReader, RowFilter};
pub use crate::state_dir::state_dir_for;
pub use crate::store::{PruneStats, SqliteStore};
pub use crate::verify::report::{LedgerAnchor, TrustRoots, VerificationReport, VerifyError};
pub use stats::{LatencyPercentiles, LedgerStats};
pub use verify::check_receipt;
