//! What a handler is given: the session, resources, limits, and ways to say things. Everything it
//! does through its context is recorded in a [`Txn`] and kept only if the call succeeds.

use std::any::Any;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::call::{CallId, Carried, SessionKey};
use crate::code;
use crate::json::Digest;
use crate::limits::Spend;
use crate::policy::Observation;
use crate::resource::{Expect, FileError, FileTxn, Resources, normal_path};
use crate::session::{Change, State};
use crate::store::Store;
use crate::tool::{Effect, Failure};

/// What a run has recorded. Dropping it undoes all of it.
#[derive(Default)]
pub struct Txn {
    pub(crate) slices: Vec<Change>,
    pub(crate) logs: Vec<(Arc<str>, Value)>,
    pub(crate) events: Vec<(Arc<str>, Value)>,
    pub(crate) observed: Vec<Observation>,
    pub(crate) spent: Option<Spend>,
    pub(crate) message: Option<String>,
    pub(crate) hidden: bool,
    pub(crate) files: Option<Box<dyn FileTxn>>,
}

/// What is left of the budgets when the call begins; `None` is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Remaining {
    /// Tokens.
    pub tokens: Option<u64>,
    /// Money.
    pub money: Option<rust_decimal::Decimal>,
}

/// A handler's context. Cheap to clone; dead once the call has ended.
#[derive(Clone)]
pub struct Ctx(Arc<Inner>);

struct Inner {
    call: CallId,
    key: SessionKey,
    effect: Effect,
    state: Arc<State>,
    resources: Arc<Resources>,
    store: Arc<dyn Store>,
    expects: Vec<Expect>,
    deadline: Option<Instant>,
    remaining: Remaining,
    cancel: CancellationToken,
    /// What the handler may wait for: ends with the call, or with a run that was ended. Made once somebody looks at it.
    over: OnceLock<CancellationToken>,
    carried: Option<Carried>,
    beat: Mutex<Instant>,
    /// `None` once the call has ended.
    txn: Mutex<Option<Txn>>,
}

/// What a context is made of.
pub(crate) struct Parts {
    pub(crate) call: CallId,
    pub(crate) key: SessionKey,
    pub(crate) effect: Effect,
    pub(crate) state: Arc<State>,
    pub(crate) resources: Arc<Resources>,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) expects: Vec<Expect>,
    pub(crate) deadline: Option<Instant>,
    pub(crate) remaining: Remaining,
    pub(crate) cancel: CancellationToken,
    pub(crate) carried: Option<Carried>,
}

impl Ctx {
    pub(crate) fn new(parts: Parts) -> Self {
        Self(Arc::new(Inner {
            call: parts.call,
            key: parts.key,
            effect: parts.effect,
            state: parts.state,
            resources: parts.resources,
            store: parts.store,
            expects: parts.expects,
            deadline: parts.deadline,
            remaining: parts.remaining,
            cancel: parts.cancel,
            over: OnceLock::new(),
            carried: parts.carried,
            beat: Mutex::new(Instant::now()),
            txn: Mutex::new(Some(Txn::default())),
        }))
    }

    /// Ends the run: what comes later, from a task that was left behind, goes nowhere.
    pub(crate) fn end(&self) -> Txn {
        crate::lock(&self.0.txn).take().unwrap_or_default()
    }

    pub(crate) fn last_beat(&self) -> Instant {
        *crate::lock(&self.0.beat)
    }

    fn record<T>(&self, f: impl FnOnce(&mut Txn) -> T) -> Option<T> {
        crate::lock(&self.0.txn).as_mut().map(f)
    }

    /// The call's name in the ledger.
    #[must_use]
    pub fn call_id(&self) -> CallId {
        self.0.call
    }

    /// Whose conversation it is.
    #[must_use]
    pub fn key(&self) -> &SessionKey {
        &self.0.key
    }

    /// A state slice, with what this call has set.
    ///
    /// # Errors
    /// The slice holds something of another shape.
    pub fn slice<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, serde_json::Error> {
        let own = self.record(|txn| txn.slices.iter().rev().find(|(n, _)| &**n == name).map(|(_, value)| value.clone())).flatten();
        match own {
            Some(value) => value.map(serde_json::from_value).transpose(),
            None => self.0.state.slice(name).map(T::deserialize).transpose(),
        }
    }

    /// Sets a state slice. Kept only if the call succeeds.
    ///
    /// # Errors
    /// The value cannot be written as JSON.
    pub fn set_slice<T: Serialize>(&self, name: &str, value: &T) -> Result<(), serde_json::Error> {
        let value = kept(value)?;
        self.record(|txn| txn.slices.push((name.into(), Some(value))));
        Ok(())
    }

    /// Removes a state slice. Kept only if the call succeeds.
    pub fn remove_slice(&self, name: &str) {
        self.record(|txn| txn.slices.push((name.into(), None)));
    }

    /// Appends to a log slice. Kept whatever becomes of the call.
    ///
    /// # Errors
    /// The entry cannot be written as JSON.
    pub fn log<T: Serialize>(&self, name: &str, entry: &T) -> Result<(), serde_json::Error> {
        let entry = kept(entry)?;
        self.record(|txn| txn.logs.push((name.into(), entry)));
        Ok(())
    }

    /// A typed resource of the agent.
    #[must_use]
    pub fn resource<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        self.0.resources.get()
    }

    /// What the door gave the call to carry, if it is of this type; see [`crate::Call::carrying`].
    #[must_use]
    pub fn carried<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        self.0.carried.as_ref().and_then(|carried| Arc::clone(&carried.0).downcast().ok())
    }

    /// The agent's file system, rolled back with the call.
    ///
    /// # Errors
    /// The agent has none.
    pub fn files(&self) -> Result<Files, Failure> {
        match self.0.resources.files() {
            Some(_) => Ok(Files(self.clone())),
            None => Err(Failure::of(code::NO_FILE_SYSTEM, "this agent has no file system").effects(crate::Effects::None)),
        }
    }

    /// When the run will be ended.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.0.deadline
    }

    /// How long the run still has.
    #[must_use]
    pub fn time_left(&self) -> Option<Duration> {
        self.0.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()))
    }

    /// What was left of the budgets when the call began.
    #[must_use]
    pub fn budget(&self) -> Remaining {
        self.0.remaining
    }

    /// Reports what the run has cost. A tool that reports nothing has cost what it declares.
    pub fn spend(&self, spend: Spend) {
        self.record(|txn| txn.spent = Some(txn.spent.unwrap_or_default().plus(spend)));
    }

    /// Ends when the call is cancelled, or its time is up. The run is dropped at its next `await` anyway; this is for
    /// what it has started elsewhere, which goes on where the run has come to its own end.
    #[must_use]
    pub fn cancelled(&self) -> &CancellationToken {
        self.0.over.get_or_init(|| self.0.cancel.child_token())
    }

    /// A sign of life.
    pub fn beat(&self) {
        *crate::lock(&self.0.beat) = Instant::now();
    }

    /// Publishes an event of the tool's own. Heard when the call has succeeded.
    pub fn publish(&self, name: &str, payload: Value) {
        self.record(|txn| txn.events.push((name.into(), payload)));
    }

    /// Words for the model, beside the value.
    pub fn say(&self, message: impl Into<String>) {
        let message = message.into();
        self.record(|txn| txn.message = Some(message));
    }

    /// Keeps the value out of the model's context.
    pub fn hide_value(&self) {
        self.record(|txn| txn.hidden = true);
    }

    /// A stored output of this session.
    pub(crate) async fn stored_output(&self, handle: &str) -> Result<Option<Arc<str>>, crate::store::StoreError> {
        self.0.store.output(&self.0.key, handle).await
    }
}

/// What a session can keep: JSON that can be read back.
fn kept(value: &impl Serialize) -> Result<Value, serde_json::Error> {
    let value = serde_json::to_value(value)?;
    match crate::json::value_over_bounds(&value, &crate::gate::OUTPUT_BOUNDS) {
        Some(why) => Err(serde::ser::Error::custom(format!("a session cannot keep it: {why}"))),
        None => Ok(value),
    }
}

/// The agent's file system as one call sees it.
#[derive(Clone)]
pub struct Files(Ctx);

impl Files {
    fn with<T>(&self, f: impl FnOnce(&mut dyn FileTxn) -> Result<T, FileError>) -> Result<T, FileError> {
        let inner = &self.0.0;
        let files = inner.resources.files().ok_or(FileError::Closed)?;
        let mut guard = crate::lock(&inner.txn);
        let txn = guard.as_mut().ok_or(FileError::Closed)?;
        f(txn.files.get_or_insert_with(|| files.begin(inner.call, inner.expects.clone())).as_mut())
    }

    fn may_write(&self) -> Result<(), FileError> {
        if self.0.0.effect == Effect::Read { Err(FileError::ReadOnly) } else { Ok(()) }
    }

    fn observe(&self, seen: Observation) {
        self.0.record(|txn| txn.observed.push(seen));
    }

    /// The whole of a file.
    ///
    /// # Errors
    /// Why not.
    pub fn read(&self, path: &str) -> Result<Vec<u8>, FileError> {
        let path = normal_path(path)?;
        let content = self.with(|txn| txn.read(&path))?;
        self.observe(Observation::Read(path, Digest::of(&content)));
        Ok(content)
    }

    /// Creates or overwrites a file.
    ///
    /// # Errors
    /// Why not; then nothing has changed.
    pub fn write(&self, path: &str, content: &[u8]) -> Result<(), FileError> {
        self.may_write()?;
        let path = normal_path(path)?;
        self.with(|txn| txn.write(&path, content))?;
        self.observe(Observation::Wrote(path, Digest::of(content)));
        Ok(())
    }

    /// Removes a file.
    ///
    /// # Errors
    /// Why not; then nothing has changed.
    pub fn remove(&self, path: &str) -> Result<(), FileError> {
        self.may_write()?;
        let path = normal_path(path)?;
        self.with(|txn| txn.remove(&path))?;
        self.observe(Observation::Removed(path));
        Ok(())
    }

    /// The files below a directory (`""` for all), sorted; at most this many.
    ///
    /// # Errors
    /// Why not.
    pub fn list(&self, below: &str, most: usize) -> Result<Vec<String>, FileError> {
        let names = self.with(|txn| txn.list(below, most))?;
        for name in &names {
            self.observe(Observation::Listed(name.clone()));
        }
        Ok(names)
    }
}
