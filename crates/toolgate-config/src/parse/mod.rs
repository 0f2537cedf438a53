//! Reads the tables of a configuration file, one module for each kind.

pub(crate) mod agent;
pub(crate) mod command;
pub(crate) mod gateway;
pub(crate) mod http_tool;
pub(crate) mod tool;
pub(crate) mod upstream;
pub(crate) mod upstream_secrets;
pub(crate) mod workspace;
