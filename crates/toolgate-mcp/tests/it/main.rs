//! The gateway, tried from outside.

#![expect(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests fail loudly")]

mod batch;
mod bombs;
mod crowd;
mod door;
mod faults;
mod http;
mod old;
mod resources;
mod security;
mod straight;
mod support;
mod tricks;
