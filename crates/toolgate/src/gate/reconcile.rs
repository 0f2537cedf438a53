//! What nobody knows the end of, somebody is asked about.

use std::sync::Arc;

use serde::Serialize;
use serde_json::Value;

use super::Toolgate;
use crate::call::{Call, CallId, SessionKey};
use crate::outcome::{Outcome, Output};
use crate::store::{Intent, StoreError};

/// What was found out about a call of which nobody knew whether it took effect.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reconciled {
    /// It happened: whoever repeats it under its key gets what was found out.
    Happened,
    /// It never happened: what it had reserved is free, and it may be made again.
    Never,
    /// Nobody knows still; why. A person must settle it.
    Unknown(String),
}

impl Toolgate {
    /// Asks, for each call of which nobody knows whether it took effect, the read tool that its own tool declares for
    /// this, and settles it by what that says. The question is a call like any other, of the same principal and agent in a
    /// session of its own, with its own row. What is not declared, not answered or not clear is left to a person. Never is a call made
    /// again.
    ///
    /// # Errors
    /// The store cannot be asked.
    pub async fn reconcile(&self) -> Result<Vec<(CallId, Reconciled)>, StoreError> {
        self.reconcile_those(|_| true).await
    }

    /// The same for some of them: those that `wanted` says.
    ///
    /// # Errors
    /// As for [`Toolgate::reconcile`].
    pub async fn reconcile_those(&self, mut wanted: impl FnMut(&Intent) -> bool) -> Result<Vec<(CallId, Reconciled)>, StoreError> {
        let mut found = Vec::new();
        for intent in self.pending().await?.into_iter().filter(|intent| wanted(intent)) {
            let call = intent.call;
            found.push((call, self.reconcile_one(intent).await?));
        }
        Ok(found)
    }

    async fn reconcile_one(&self, intent: Intent) -> Result<Reconciled, StoreError> {
        let tool = self.0.agents.get(&intent.key.agent).and_then(|agent| agent.tools.get(&intent.tool));
        let Some(reconcile) = tool.and_then(|tool| tool.spec.reconcile.as_ref()) else {
            return Ok(Reconciled::Unknown(format!("`{}` declares no tool to ask", intent.tool)));
        };
        let Some(arguments) = self.asked(&intent).await? else {
            return Ok(Reconciled::Unknown("what was asked for is not kept".to_owned()));
        };
        let question = match reconcile.ask(&arguments) {
            Ok(question) => question,
            Err(why) => return Ok(Reconciled::Unknown(why)),
        };
        // In a session of its own: it is not the model that asks, and nothing that it does is a loop.
        let key = SessionKey { session: format!("reconcile-{}", CallId::fresh()).into(), ..intent.key.clone() };
        let answer = self.call(Call::new(key, reconcile.tool.to_string(), question)).await;
        let result = match answer.outcome {
            Outcome::Success(output) => output.value,
            Outcome::Error(error) => return Ok(Reconciled::Unknown(format!("`{}` did not answer: {}", reconcile.tool, error.message))),
            Outcome::Signal(_) => return Ok(Reconciled::Unknown(format!("`{}` did not answer", reconcile.tool))),
        };
        let by = format!("`{}` ({})", reconcile.tool, answer.call);
        let (happened, said) = match reconcile.says(&result) {
            Some(true) => {
                let message = format!("It had happened already, as `{}` says.", reconcile.tool);
                (Some(Outcome::Success(Output { message: Some(message), ..Output::of(result) })), Reconciled::Happened)
            }
            Some(false) => (None, Reconciled::Never),
            None => return Ok(Reconciled::Unknown(format!("`{}` answers {result}, which says neither", reconcile.tool))),
        };
        match self.settle_pending(intent.call, happened, &by).await? {
            true => Ok(said),
            false => Ok(Reconciled::Unknown("somebody else has settled it meanwhile".to_owned())),
        }
    }

    /// What was asked for, without its secrets.
    async fn asked(&self, intent: &Intent) -> Result<Option<Arc<Value>>, StoreError> {
        if let Some(row) = &intent.row {
            return Ok(Some(Arc::clone(&row.arguments)));
        }
        let rows = self.0.store.rows(&intent.key).await?;
        Ok(rows.iter().find(|row| row.call == intent.call).map(|row| Arc::clone(&row.arguments)))
    }
}
