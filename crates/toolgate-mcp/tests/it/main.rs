//! The gateway, tried from outside.

mod door;
mod http;
mod security;
mod support;
