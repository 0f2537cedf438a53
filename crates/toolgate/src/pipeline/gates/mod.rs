//! Implements the fourteen gates, one module for each. The list in [`super`] gives their order.

pub(crate) mod admit;
pub(crate) mod approval;
pub(crate) mod claim;
pub(crate) mod hooks;
pub(crate) mod limits;
pub(crate) mod policy;
pub(crate) mod progress;
pub(crate) mod recall;
pub(crate) mod record;
pub(crate) mod resolve;
pub(crate) mod run;
pub(crate) mod settle;
pub(crate) mod shape;
pub(crate) mod validate;
