//! Path patterns of rules, working directories, and file names that commands derive.

pub(crate) mod cd_chain;
pub(crate) mod derived;
mod parent;
pub(crate) mod pattern;
pub(crate) mod working_dir;
