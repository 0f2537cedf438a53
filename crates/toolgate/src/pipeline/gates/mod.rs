//! Implements the fourteen gates, one module for each.

pub(crate) mod admit;
pub(crate) mod approval;
pub(crate) mod hooks;
pub(crate) mod policy;
pub(crate) mod run;
pub(crate) mod settle;
pub(crate) mod shape;
