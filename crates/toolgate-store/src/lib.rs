#![doc = include_str!("../README.md")]

mod audit;
pub mod chain;
mod claims;
mod fault;
mod home;
mod keys;
mod ledger;
mod open;
mod session;
mod sqlite;
mod verify;
mod writer;

pub use audit::{Entry, Filter, Ledger, Stats};
pub use home::Mark;
pub use sqlite::{Gone, SqliteStore};
pub use verify::{Anchor, Flaw, Trust, Verified, check_receipt};
