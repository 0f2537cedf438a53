//! The toolgate gateway: MCP in, MCP out, every call through the gates. Also tools that are requests to web services.
//!
//! A [`Gateway`] is opened for a configuration and a store. It starts the [`Upstreams`], builds the agents, refuses its canary,
//! and then serves clients over standard streams ([`Gateway::serve_stdio`]) and HTTP ([`Gateway::listen`]).
#![expect(deprecated, reason = "clients and servers of earlier revisions still sample, log and ask for roots")]

mod api;
mod asking;
mod auth;
mod calls;
mod child;
mod client;
mod door;
mod gateway;
mod http;
mod identity;
mod lines;
mod metrics;
mod parked;
mod render;
mod serve;
mod sse;
mod upstream;

pub use child::enter_if_asked;
pub use gateway::{Gateway, Options};
pub use serve::Listening;
pub use upstream::{Change, Health, Known, Offer, Pins, Starting, Status, Suspicion, Upstreams, scan};
