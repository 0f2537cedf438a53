//! Provides the context of a handler: session, resources, limits and messages.
//!
//! Everything that a handler does through its context is recorded in a [`CallTransaction`], and
//! committed only if the call succeeds.

use std::any::Any;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::call::error_code;
use crate::call::{CallExtension, CallId, SessionKey};
use crate::files::{FileError, FileExpectation, FileTransaction, Resources, normalize_path};
use crate::limits::Cost;
use crate::policy::FileAccess;
use crate::session::state::{NamedChange, SessionState};
use crate::store::Store;
use crate::tool::{Effect, Failure};
use toolgate_json::Digest;

/// Recorded changes of a run. Dropping the value discards all of them.
#[derive(Default)]
pub struct CallTransaction {
    pub(crate) slices: Vec<NamedChange>,
    pub(crate) logs: Vec<(Arc<str>, Value)>,
    pub(crate) events: Vec<(Arc<str>, Value)>,
    pub(crate) observations: Vec<FileAccess>,
    pub(crate) cost: Option<Cost>,
    pub(crate) message: Option<String>,
    pub(crate) is_value_hidden: bool,
    pub(crate) files: Option<Box<dyn FileTransaction>>,
}

/// Remaining budgets at the start of the call. `None` means no limit.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct RemainingBudget {
    /// Remaining tokens.
    pub tokens: Option<u64>,
    /// Remaining money.
    pub money: Option<rust_decimal::Decimal>,
}

/// Context of a handler. Cheap to clone, and without effect after the call has ended.
#[derive(Clone)]
pub struct ToolContext(Arc<Inner>);

struct Inner {
    call: CallId,
    key: SessionKey,
    effect: Effect,
    state: Arc<SessionState>,
    resources: Arc<Resources>,
    pub(crate) store: Arc<dyn Store>,
    file_expectations: Vec<FileExpectation>,
    deadline: Option<Instant>,
    remaining: RemainingBudget,
    cancel: CancellationToken,
    /// Cancelled when the call is cancelled or the run is stopped. Created on first use.
    stop_token: OnceLock<CancellationToken>,
    extension: Option<CallExtension>,
    last_heartbeat: Mutex<Instant>,
    /// `None` once the call has ended.
    txn: Mutex<Option<CallTransaction>>,
}

/// Parts of a context.
pub(crate) struct ToolContextParts {
    pub(crate) call: CallId,
    pub(crate) key: SessionKey,
    pub(crate) effect: Effect,
    pub(crate) state: Arc<SessionState>,
    pub(crate) resources: Arc<Resources>,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) file_expectations: Vec<FileExpectation>,
    pub(crate) deadline: Option<Instant>,
    pub(crate) remaining: RemainingBudget,
    pub(crate) cancel: CancellationToken,
    pub(crate) extension: Option<CallExtension>,
}

impl ToolContext {
    pub(crate) fn new(parts: ToolContextParts) -> Self {
        Self(Arc::new(Inner {
            call: parts.call,
            key: parts.key,
            effect: parts.effect,
            state: parts.state,
            resources: parts.resources,
            store: parts.store,
            file_expectations: parts.file_expectations,
            deadline: parts.deadline,
            remaining: parts.remaining,
            cancel: parts.cancel,
            stop_token: OnceLock::new(),
            extension: parts.extension,
            last_heartbeat: Mutex::new(Instant::now()),
            txn: Mutex::new(Some(CallTransaction::default())),
        }))
    }

    /// Ends the run. Later changes, from tasks that are still running, are ignored.
    pub(crate) fn finish(&self) -> CallTransaction {
        crate::lock(&self.0.txn).take().unwrap_or_default()
    }

    pub(crate) fn last_heartbeat(&self) -> Instant {
        *crate::lock(&self.0.last_heartbeat)
    }

    fn record_change<T>(&self, f: impl FnOnce(&mut CallTransaction) -> T) -> Option<T> {
        crate::lock(&self.0.txn).as_mut().map(f)
    }

    /// Returns the id of the call in the ledger.
    #[must_use]
    pub fn call_id(&self) -> CallId {
        self.0.call
    }

    /// Returns the session of the call.
    #[must_use]
    pub fn key(&self) -> &SessionKey {
        &self.0.key
    }

    /// Returns a state slice, including the changes of this call.
    ///
    /// # Errors
    /// The slice has another type.
    pub fn slice<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, serde_json::Error> {
        let changed = self
            .record_change(|txn| {
                txn.slices.iter().rev().find(|(n, _)| &**n == name).map(|(_, value)| value.clone())
            })
            .flatten();
        match changed {
            Some(value) => value.map(serde_json::from_value).transpose(),
            None => self.0.state.slice(name).map(T::deserialize).transpose(),
        }
    }

    /// Sets a state slice. The change is committed only if the call succeeds.
    ///
    /// # Errors
    /// The value cannot be serialized as JSON.
    pub fn set_slice<T: Serialize>(&self, name: &str, value: &T) -> Result<(), serde_json::Error> {
        let value = to_storable_json(value)?;
        self.record_change(|txn| txn.slices.push((name.into(), Some(value))));
        Ok(())
    }

    /// Removes a state slice. The change is committed only if the call succeeds.
    pub fn remove_slice(&self, name: &str) {
        self.record_change(|txn| txn.slices.push((name.into(), None)));
    }

    /// Appends to a log slice. The entry is kept even if the call fails.
    ///
    /// # Errors
    /// The entry cannot be serialized as JSON.
    pub fn log<T: Serialize>(&self, name: &str, entry: &T) -> Result<(), serde_json::Error> {
        let entry = to_storable_json(entry)?;
        self.record_change(|txn| txn.logs.push((name.into(), entry)));
        Ok(())
    }

    /// Returns a typed resource of the agent.
    #[must_use]
    pub fn resource<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        self.0.resources.get()
    }

    /// Returns the value that the entry point attached, if it has this type; see
    /// [`crate::Call::with_extension`].
    #[must_use]
    pub fn extension<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        self.0.extension.as_ref().and_then(|extension| Arc::clone(&extension.0).downcast().ok())
    }

    /// Returns the agent's file system. Changes are rolled back if the call fails.
    ///
    /// # Errors
    /// The agent has no file system.
    pub fn files(&self) -> Result<CallFiles, Failure> {
        match self.0.resources.files() {
            Some(_) => Ok(CallFiles(self.clone())),
            None => {
                Err(Failure::from_code(error_code::NO_FILE_SYSTEM, "this agent has no file system")
                    .effects(crate::CallEffects::None))
            }
        }
    }

    /// Returns the time at which the run is stopped.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.0.deadline
    }

    /// Returns the time until the run is stopped.
    #[must_use]
    pub fn time_left(&self) -> Option<Duration> {
        self.0.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()))
    }

    /// Returns the remaining budgets at the start of the call.
    #[must_use]
    pub fn remaining_budget(&self) -> RemainingBudget {
        self.0.remaining
    }

    /// Reports the cost of the run. Without a report, the declared cost of the tool counts.
    pub fn spend(&self, spend: Cost) {
        self.record_change(|txn| txn.cost = Some(txn.cost.unwrap_or_default().plus(spend)));
    }

    /// Returns a token that is cancelled when the call is cancelled or its time is up.
    ///
    /// The run itself is dropped at its next `await`. Use this token for background tasks. They may
    /// continue if the run ends by itself.
    #[must_use]
    pub fn cancellation_token(&self) -> &CancellationToken {
        self.0.stop_token.get_or_init(|| self.0.cancel.child_token())
    }

    /// Sends a heartbeat.
    pub fn send_heartbeat(&self) {
        *crate::lock(&self.0.last_heartbeat) = Instant::now();
    }

    /// Publishes an event of the tool. Listeners receive it after the call has succeeded.
    pub fn publish(&self, name: &str, payload: Value) {
        self.record_change(|txn| txn.events.push((name.into(), payload)));
    }

    /// Sets a message for the model, in addition to the value.
    pub fn set_message(&self, message: impl Into<String>) {
        let message = message.into();
        self.record_change(|txn| txn.message = Some(message));
    }

    /// Hides the value from the model.
    pub fn hide_value(&self) {
        self.record_change(|txn| txn.is_value_hidden = true);
    }

    /// Returns a stored output of this session.
    pub(crate) async fn stored_output(
        &self,
        handle: &str,
    ) -> Result<Option<Arc<str>>, crate::store::StoreError> {
        self.0.store.load_output(&self.0.key, handle).await
    }
}

/// Converts a value to JSON that a session can store and read back.
fn to_storable_json(value: &impl Serialize) -> Result<Value, serde_json::Error> {
    let value = serde_json::to_value(value)?;
    match toolgate_json::find_exceeded_bound_of_value(&value, &crate::pipeline::OUTPUT_BOUNDS) {
        Some(why) => {
            Err(serde::ser::Error::custom(format!("cannot store the value in a session: {why}")))
        }
        None => Ok(value),
    }
}

/// The agent's file system, as one call sees it.
#[derive(Clone)]
pub struct CallFiles(ToolContext);

impl CallFiles {
    fn with_transaction<T>(
        &self,
        f: impl FnOnce(&mut dyn FileTransaction) -> Result<T, FileError>,
    ) -> Result<T, FileError> {
        let inner = &self.0.0;
        let files = inner.resources.files().ok_or(FileError::Closed)?;
        let mut guard = crate::lock(&inner.txn);
        let txn = guard.as_mut().ok_or(FileError::Closed)?;
        f(txn
            .files
            .get_or_insert_with(|| files.begin(inner.call, inner.file_expectations.clone()))
            .as_mut())
    }

    fn check_writable(&self) -> Result<(), FileError> {
        if self.0.0.effect == Effect::Read { Err(FileError::ReadOnly) } else { Ok(()) }
    }

    fn record_observation(&self, seen: FileAccess) {
        self.0.record_change(|txn| txn.observations.push(seen));
    }

    /// Reads a whole file.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(&self, path: &str) -> Result<Vec<u8>, FileError> {
        let path = normalize_path(path)?;
        let content = self.with_transaction(|txn| txn.read(&path))?;
        self.record_observation(FileAccess::Read(path, Digest::of(&content)));
        Ok(content)
    }

    /// Creates or overwrites a file.
    ///
    /// # Errors
    /// The file cannot be changed. In this case, nothing has changed.
    pub fn write(&self, path: &str, content: &[u8]) -> Result<(), FileError> {
        self.check_writable()?;
        let path = normalize_path(path)?;
        self.with_transaction(|txn| txn.write(&path, content))?;
        self.record_observation(FileAccess::Wrote(path, Digest::of(content)));
        Ok(())
    }

    /// Removes a file.
    ///
    /// # Errors
    /// The file cannot be changed. In this case, nothing has changed.
    pub fn remove(&self, path: &str) -> Result<(), FileError> {
        self.check_writable()?;
        let path = normalize_path(path)?;
        self.with_transaction(|txn| txn.remove(&path))?;
        self.record_observation(FileAccess::Removed(path));
        Ok(())
    }

    /// Lists at most `max_files` files below a directory (`""` for all), sorted.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn list(&self, below: &str, max_files: usize) -> Result<Vec<String>, FileError> {
        let names = self.with_transaction(|txn| txn.list(below, max_files))?;
        for name in &names {
            self.record_observation(FileAccess::Listed(name.clone()));
        }
        Ok(names)
    }
}
