//! Keeps the state of a session, and provides the handle for library users.

pub mod handle;
pub mod repetition;
pub mod state;
