#![doc = include_str!("../README.md")]

mod display;
mod glob;
pub mod suggest;

pub use display::{escaped, shown};
pub use glob::glob;
