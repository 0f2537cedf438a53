#![doc = include_str!("../README.md")]

mod display;
mod glob;
pub mod suggest;

pub use display::{escape_for_display, escape_text};
pub use glob::matches_glob;
