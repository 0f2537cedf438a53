#![doc = include_str!("../README.md")]

mod audit;
pub mod chain;
mod claims;
mod counters;
mod fault;
mod flaw;
mod home;
mod keys;
mod ledger;
mod open;
mod pen;
mod prints;
mod session;
mod sqlite;
mod stats;
mod tx;
mod under_way;
mod verify;
mod writer;

pub use audit::{Entry, Filter, Ledger};
pub use flaw::{Anchor, Flaw, Trust, Verified};
pub use home::state_dir_for;
pub use sqlite::{Gone, SqliteStore};
pub use stats::{Stats, Times};
pub use verify::check_receipt;
