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

pub use agent::{
    Agent, AgentBuildError, AgentBuilder, AgentDefinition, AgentSubset, PromptSection,
};
pub use call::error::{
    ApprovalRef, CallEffects, ErrorCategory, ErrorDialect, FieldError, NextStep, ToolError,
};
pub use call::event::{Event, EventListener};
pub use call::outcome::{Answer, CallOutput, Outcome, PromptSignal, StoredOutputRef};
pub use call::{Arguments, Call, CallExtension, CallId, CheckedArguments, SessionKey};
pub use clock::{Clock, ManualClock, SystemClock};
pub use files::{HostFs, MemoryFs};
pub use jiff::{SignedDuration, Timestamp};
pub use ledger::row::{
    Decision, Gate, Latency, LazyReceipt, Receipt, ReceiptSigner, Row, Settlement,
};
pub use pipeline::{
    DeferredCall, Explanation, GateExplanation, GateResult, Permit, PolicyEngine, PredictedOutcome,
    ReconcileOutcome, RuleExplanation, Toolgate, ToolgateBuilder,
};
pub use replay::{
    AdmissionDecision, Backtest, BacktestPlace, DecisionChange, Replay, ReplayComparison,
};
pub use rust_decimal::Decimal;
pub use session::handle::{Session, StateSnapshot};
pub use store::{MemoryStore, Store};
pub use tool::context::{CallFiles, CallTransaction, RemainingBudget, ToolContext};
pub use tool::{
    CommandTool, Effect, ExtraArguments, Failure, FilledPart, Handler, PollingSettings,
    ReconcileSpec, RetrySettings, Template, Tool, ToolExample, ToolSpec, classify_status,
    strip_reserved_fields,
};

/// Locks a mutex and ignores poisoning, because guarded values are only replaced as a whole.
pub(crate) fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Runs the code in the repository's README as doctests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct RepositoryReadme;
