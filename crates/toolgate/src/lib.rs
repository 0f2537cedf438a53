#![doc = include_str!("../README.md")]

pub mod agent;
pub mod builtin;
pub mod call;
pub mod clock;
pub mod diagnostic;
pub mod files;
pub mod hook;
pub mod ledger;
pub mod limits;
pub mod normalize;
pub mod pipeline;
pub mod policy;
pub mod provenance;
pub mod redact;
pub mod replay;
pub mod schema;
pub mod session;
pub mod store;
pub mod tool;

pub use agent::{Agent, AgentBuilder, BuildError, Definition, Excerpt, Section};
pub use call::error::{ApprovalRef, Category, Dialect, Effects, FieldError, NextStep, ToolError};
pub use call::event::{Event, Listener};
pub use call::outcome::{Answer, Outcome, Output, Signal, Stored};
pub use call::{Arguments, Call, CallId, Carried, Judged, SessionKey};
pub use clock::{Clock, ManualClock, SystemClock};
pub use files::{HostFs, MemoryFs};
pub use jiff::{SignedDuration, Timestamp};
pub use ledger::row::{Decision, Gate, Latency, Receipt, Recorded, Row, Settlement, Signer};
pub use pipeline::{
    Backtest, BacktestPlace, Change, Compared, Explanation, GateNote, Kept, Permit, PolicyEngine, Reconciled, Replay, RuleNote, Ruling,
    Said, Session, Snapshot, Toolgate, ToolgateBuilder, Would,
};
pub use rust_decimal::Decimal;
pub use store::{MemoryStore, Store};
pub use tool::context::{Ctx, Files, Remaining, Txn};
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
