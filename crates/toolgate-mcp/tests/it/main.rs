//! The gateway, tried from outside.

mod door;
mod faults;
mod http;
mod security;
mod support;
