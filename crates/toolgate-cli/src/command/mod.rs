//! One file a verb.

pub(crate) mod audit;
pub(crate) mod backtest;
pub(crate) mod demo;
pub(crate) mod ledger;
pub(crate) mod replay;
