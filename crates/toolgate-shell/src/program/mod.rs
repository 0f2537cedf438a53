//! Tables of known programs, and their effects on files.

pub(crate) mod awk;
pub(crate) mod file_effects;
pub(crate) mod filled_directories;
pub(crate) mod implicit_reads;
pub(crate) mod implicit_writes;
pub(crate) mod options;
pub(crate) mod sed;
pub(crate) mod tables;
