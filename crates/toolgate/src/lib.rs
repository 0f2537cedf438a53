#![doc = include_str!("../README.md")]

pub mod builtin;
mod call;
mod child;
pub mod clock;
pub mod code;
pub mod config;
mod context;
mod error;
mod event;
mod gate;
pub mod home;
pub mod hook;
pub mod json;
pub mod lead;
mod ledger;
pub mod limits;
pub mod names;
pub mod normalize;
mod outcome;
pub mod policy;
pub mod progress;
pub mod redact;
mod registry;
pub mod resource;
pub mod sandbox;
mod schema;
pub mod session;
mod shell;
mod spool;
pub mod store;
pub mod suggest;
mod tool;
pub mod values;

pub use call::{Arguments, Call, CallId, Carried, Judged, SessionKey};
pub use clock::{Clock, ManualClock, SystemClock};
pub use context::{Ctx, Files, Remaining, Txn};
pub use error::{ApprovalRef, Category, Dialect, Effects, FieldError, NextStep, ToolError};
pub use event::{Event, Listener};
pub use gate::{
    Backtest, BacktestPlace, Change, Compared, Explanation, GateNote, Kept, Permit, PolicyEngine, Reconciled, Replay, RuleNote, Ruling,
    Said, Session, Snapshot, Toolgate, ToolgateBuilder, Would,
};
pub use jiff::{SignedDuration, Timestamp};
pub use ledger::{Decision, Gate, Latency, Receipt, Recorded, Row, Settlement, Signer};
pub use outcome::{Answer, Outcome, Output, Signal, Stored};
pub use registry::{Agent, AgentBuilder, BuildError, Definition, Excerpt, Section};
pub use resource::{HostFs, MemoryFs};
pub use rust_decimal::Decimal;
pub use store::{MemoryStore, Store};
pub use tool::{
    CommandTool, Effect, Example, Extra, Failure, FilledPart, Handler, Polling, Reconcile, Retry, Spec, Template, Tool, classify_status,
    without_contract,
};

/// Locks a mutex and ignores poisoning, because guarded values are only replaced as a whole.
pub(crate) fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Runs the code in the repository's README as doctests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct RepositoryReadme;
