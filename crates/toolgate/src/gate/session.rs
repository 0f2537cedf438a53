//! A conversation in hand.

use std::sync::Arc;

use serde_json::Value;

use super::{Explanation, Pass, Toolgate};
use crate::call::{Arguments, Call, SessionKey};
use crate::ledger::Row;
use crate::limits::Spend;
use crate::outcome::Answer;
use crate::session::{Alter, State};
use crate::store::StoreError;

/// One conversation of one principal with one agent.
#[derive(Clone)]
pub struct Session {
    gate: Toolgate,
    key: SessionKey,
}

/// What a session held at one moment. In memory, taking one costs the same whatever the session's size; from a database, the
/// whole of it is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    key: SessionKey,
    state: Arc<State>,
}

impl Session {
    pub(super) const fn new(gate: Toolgate, key: SessionKey) -> Self {
        Self { gate, key }
    }

    /// Its key.
    #[must_use]
    pub const fn key(&self) -> &SessionKey {
        &self.key
    }

    /// The runtime it belongs to.
    #[must_use]
    pub const fn gate(&self) -> &Toolgate {
        &self.gate
    }

    /// A call that can be given a turn, a key, a deadline, before it is made with [`Toolgate::call`].
    pub fn prepare(&self, tool: &str, arguments: impl Into<Arguments>) -> Call {
        Call::new(self.key.clone(), tool, arguments)
    }

    /// Makes a call. Not from a handler of the same session, which would wait for itself until it is told `busy`: what a handler
    /// calls belongs into a session of its own.
    pub async fn call(&self, tool: &str, arguments: impl Into<Arguments>) -> Answer {
        self.gate.call(self.prepare(tool, arguments)).await
    }

    /// Asks for a call that the client will run itself; see [`Toolgate::admit`].
    ///
    /// # Errors
    /// The answer, where the call was refused or replayed.
    pub async fn admit(&self, tool: &str, arguments: impl Into<Arguments>) -> Result<Pass, Answer> {
        self.gate.admit(self.prepare(tool, arguments)).await
    }

    /// Makes the calls of one turn as one ordered plan: all are judged against the session as it is
    /// now, reserving in order; then neighbouring reads run together and effects one by one.
    pub async fn batch<T: Into<Arguments>>(&self, calls: impl IntoIterator<Item = (String, T)>) -> Vec<Answer> {
        let calls = calls.into_iter().map(|(tool, arguments)| self.prepare(&tool, arguments)).collect();
        self.gate.batch(&self.key, calls).await
    }

    /// What it holds now.
    ///
    /// # Errors
    /// The store cannot be asked.
    pub async fn state(&self) -> Result<Arc<State>, StoreError> {
        Ok(self.gate.0.store.session(&self.key).await?.unwrap_or_default())
    }

    /// A state slice.
    ///
    /// # Errors
    /// The store cannot be asked.
    pub async fn slice(&self, name: &str) -> Result<Option<Value>, StoreError> {
        Ok(self.state().await?.slice(name).cloned())
    }

    /// Remembers what it holds now.
    ///
    /// # Errors
    /// The store cannot be asked.
    pub async fn snapshot(&self) -> Result<Snapshot, StoreError> {
        Ok(Snapshot { key: self.key.clone(), state: self.state().await? })
    }

    /// Puts it back to an earlier moment. Logs, limits and claims stay.
    ///
    /// # Errors
    /// The store cannot take it, the session is busy, or the snapshot is of another session.
    pub async fn restore(&self, snapshot: &Snapshot) -> Result<(), StoreError> {
        if snapshot.key != self.key {
            return Err(StoreError("the snapshot is of another session".to_owned()));
        }
        self.alter(Alter::Restore(Arc::clone(&snapshot.state))).await
    }

    /// Clears slices, evidence and what policies remember. Limits and claims stay, and so does where values were seen: what
    /// a model has read, it has read.
    ///
    /// # Errors
    /// The store cannot take it, or the session is busy.
    pub async fn reset(&self) -> Result<(), StoreError> {
        self.alter(Alter::Reset).await
    }

    /// Tells what the user said, word for word, so that rules can tell the user's values from a stranger's.
    ///
    /// # Errors
    /// The store cannot take it, or the session is busy.
    pub async fn user_said(&self, text: &str) -> Result<(), StoreError> {
        self.alter(Alter::Heard(text.to_owned())).await
    }

    /// What would become of a call, and why: every gate, every rule, and the values that decide. Changes nothing.
    pub async fn explain(&self, tool: &str, arguments: impl Into<Arguments>) -> Explanation {
        self.gate.explain(&self.prepare(tool, arguments)).await
    }

    async fn alter(&self, alter: Alter) -> Result<(), StoreError> {
        let store = &self.gate.0.store;
        let busy = || StoreError("the session is busy; try again when its calls have ended".to_owned());
        let _hold = store.hold(&self.key, true, self.gate.0.busy_wait).await?.ok_or_else(busy)?;
        store.alter(&self.key, alter).await
    }

    /// Adds to the budgets from outside a call, as an agent loop does for the model's own tokens.
    ///
    /// # Errors
    /// The store cannot take it.
    pub async fn spend(&self, spend: Spend) -> Result<(), StoreError> {
        let Some(agent) = self.gate.0.agents.get(&self.key.agent) else { return Ok(()) };
        let spend = Spend::default().plus(spend);
        let charges: Vec<_> =
            agent.limits.charges(&self.key, spend).into_iter().map(|(charge, _)| charge).filter(|c| c.unit.is_spent()).collect();
        self.gate.0.store.spend(&charges, self.gate.now()).await
    }

    /// Its rows in the ledger, in order.
    ///
    /// # Errors
    /// The store cannot be asked.
    pub async fn rows(&self) -> Result<Vec<Arc<Row>>, StoreError> {
        self.gate.0.store.rows(&self.key).await
    }
}
