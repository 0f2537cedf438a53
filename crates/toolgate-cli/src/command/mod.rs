//! Implements the commands, one module for each.

pub(crate) mod approvals;
pub(crate) mod audit;
pub(crate) mod backtest;
pub(crate) mod check;
pub(crate) mod common;
pub(crate) mod demo;
pub(crate) mod doctor;
pub(crate) mod explain;
pub(crate) mod init;
pub(crate) mod lint;
pub(crate) mod pause;
pub(crate) mod replay;
pub(crate) mod serve;
pub(crate) mod token;
pub(crate) mod upstream;
