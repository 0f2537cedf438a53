//! Reads and writes the tables of the database.

pub(crate) mod claim_settlement;
pub(crate) mod claims;
pub(crate) mod counters;
pub(crate) mod inline_claims;
pub(crate) mod ledger;
pub(crate) mod provenance;
pub(crate) mod record_pruning;
mod session_changes;
pub(crate) mod session_items;
pub(crate) mod sessions;
