//! Defines ledger rows and the spool of rows that the store could not take.

pub mod row;
pub(crate) mod spool;
