#![doc = include_str!("../README.md")]

pub mod home_dir;
pub mod nofile_limit;
pub mod process_group;
pub mod sandbox;
mod seccomp;
pub mod supervisor;
