//! Provides the library handle for one session.

use std::sync::Arc;

use serde_json::Value;

use crate::call::outcome::Answer;
use crate::call::{Arguments, Call, CallId, SessionKey};
use crate::ledger::row::Row;
use crate::limits::Cost;
use crate::pipeline::session_hold::SessionHold;
use crate::pipeline::{DeferredCall, Explanation, Toolgate};
use crate::session::state::{SessionEdit, SessionState};
use crate::store::{LeaseRequest, StoreError};
use crate::tool::Failure;

/// A session of one principal with one agent.
#[derive(Clone)]
pub struct Session {
    toolgate: Toolgate,
    key: SessionKey,
}

/// The state of a session at one moment.
///
/// With the in-memory store, a snapshot has constant cost. With a database, the whole state is
/// read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateSnapshot {
    key: SessionKey,
    state: Arc<SessionState>,
}

impl Session {
    pub(crate) const fn new(gate: Toolgate, key: SessionKey) -> Self {
        Self { toolgate: gate, key }
    }

    /// Returns the key of the session.
    #[must_use]
    pub const fn key(&self) -> &SessionKey {
        &self.key
    }

    /// Returns the runtime of the session.
    #[must_use]
    pub const fn toolgate(&self) -> &Toolgate {
        &self.toolgate
    }

    /// Prepares a call. Set a turn, a key or a deadline on it, then pass it to [`Toolgate::call`].
    pub fn prepare(&self, tool: &str, arguments: impl Into<Arguments>) -> Call {
        Call::new(self.key.clone(), tool, arguments)
    }

    /// Makes a call.
    ///
    /// Do not use this in a handler of the same session: the call would wait for its own session
    /// lock and fail with `busy`. Use a separate session for nested calls.
    pub async fn call(&self, tool: &str, arguments: impl Into<Arguments>) -> Answer {
        self.toolgate.call(self.prepare(tool, arguments)).await
    }

    /// Admits a call that the caller runs itself. Pass its result to [`Session::report`].
    ///
    /// # Errors
    /// The final answer, if the call was rejected or replayed.
    pub async fn admit(
        &self,
        tool: &str,
        arguments: impl Into<Arguments>,
    ) -> Result<DeferredCall, Answer> {
        self.toolgate
            .admit(self.prepare(tool, arguments).client_id(CallId::generate().to_string()))
            .await
    }

    /// Reports the result of a call that the caller ran with the admitted arguments.
    pub async fn report(&self, deferred: &DeferredCall, result: Result<Value, Failure>) -> Answer {
        let call = self.prepare(&deferred.tool, deferred.arguments.value().clone());
        self.toolgate.report(call.client_id(deferred.client_id.clone()), result).await
    }

    /// Makes the calls of one turn as one ordered plan.
    ///
    /// All calls are checked against the current session, and limits are reserved in order. Then
    /// adjacent reads run in parallel, and calls with effects run one by one.
    pub async fn batch<T: Into<Arguments>>(
        &self,
        calls: impl IntoIterator<Item = (String, T)>,
    ) -> Vec<Answer> {
        let calls =
            calls.into_iter().map(|(tool, arguments)| self.prepare(&tool, arguments)).collect();
        self.toolgate.batch(&self.key, calls).await
    }

    /// Returns the current state.
    ///
    /// # Errors
    /// The store is unavailable.
    pub async fn state(&self) -> Result<Arc<SessionState>, StoreError> {
        Ok(self.toolgate.0.store.load_session(&self.key).await?.unwrap_or_default())
    }

    /// Returns a state slice.
    ///
    /// # Errors
    /// The store is unavailable.
    pub async fn slice(&self, name: &str) -> Result<Option<Value>, StoreError> {
        Ok(self.state().await?.slice(name).cloned())
    }

    /// Takes a snapshot of the current state.
    ///
    /// # Errors
    /// The store is unavailable.
    pub async fn snapshot(&self) -> Result<StateSnapshot, StoreError> {
        Ok(StateSnapshot { key: self.key.clone(), state: self.state().await? })
    }

    /// Restores the state of a snapshot. Logs, limits and claims stay.
    ///
    /// # Errors
    /// The store cannot record the change, the session is busy, or the snapshot belongs to another
    /// session.
    pub async fn restore(&self, snapshot: &StateSnapshot) -> Result<(), StoreError> {
        if snapshot.key != self.key {
            return Err(StoreError::unavailable(
                "the snapshot belongs to another session".to_owned(),
            ));
        }
        self.edit_state(SessionEdit::Restore(Arc::clone(&snapshot.state))).await
    }

    /// Clears slices, evidence and policy marks.
    ///
    /// Limits, claims and provenance stay: the model keeps the values that it has read.
    ///
    /// # Errors
    /// The store cannot record the change, or the session is busy.
    pub async fn reset(&self) -> Result<(), StoreError> {
        self.edit_state(SessionEdit::Reset).await
    }

    /// Records the user's exact words, so that rules can distinguish values of the user from
    /// others.
    ///
    /// # Errors
    /// The store cannot record the change, or the session is busy.
    pub async fn add_user_text(&self, text: &str) -> Result<(), StoreError> {
        self.edit_state(SessionEdit::UserText(text.to_owned())).await
    }

    /// Explains what would happen to a call, with every gate, every rule and the values that
    /// decide.
    ///
    /// Changes nothing.
    pub async fn explain(&self, tool: &str, arguments: impl Into<Arguments>) -> Explanation {
        self.toolgate.explain(&self.prepare(tool, arguments)).await
    }

    async fn edit_state(&self, edit: SessionEdit) -> Result<(), StoreError> {
        let store = &self.toolgate.0.store;
        let busy = || {
            StoreError::unavailable(
                "the session is busy; retry after its calls have ended".to_owned(),
            )
        };
        let timeout = self.toolgate.0.busy_timeout;
        let term = jiff::SignedDuration::from_secs(60);
        let request = LeaseRequest { is_exclusive: true, timeout, term };
        let lease = store.lease_session(&self.key, request).await?.ok_or_else(busy)?;
        let _hold = SessionHold::new(store, lease);
        store.edit_session(&self.key, edit).await
    }

    /// Charges the budgets from outside a call, for example with the model's own tokens.
    ///
    /// # Errors
    /// The store cannot record the change.
    pub async fn spend(&self, spend: Cost) -> Result<(), StoreError> {
        let Some(agent) = self.toolgate.0.agents.get(&self.key.agent) else { return Ok(()) };
        let spend = Cost::default().plus(spend);
        let charges: Vec<_> = agent
            .limits
            .charges(&self.key, spend)
            .into_iter()
            .map(|(charge, _)| charge)
            .filter(|c| c.unit.is_known_after_call())
            .collect();
        self.toolgate.0.store.add_cost(&charges).await
    }

    /// Returns the ledger rows of the session, in order.
    ///
    /// # Errors
    /// The store is unavailable.
    pub async fn rows(&self) -> Result<Vec<Arc<Row>>, StoreError> {
        self.toolgate.0.store.rows(&self.key).await
    }
}
