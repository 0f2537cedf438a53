//! Resolves calls with an unknown outcome by calling the tool's `reconcile` tool.

use std::sync::Arc;

use serde::Serialize;
use serde_json::Value;

use super::Toolgate;
use crate::call::outcome::{CallOutput, Outcome};
use crate::call::{Call, CallId, SessionKey};
use crate::store::{ClaimRecord, StoreError};

/// Result of reconciling one call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ReconcileOutcome {
    /// The call took effect. Repeating it under its key returns what was found out.
    Happened,
    /// The call never took effect. Its reservations are released, and it may be repeated.
    Never,
    /// The outcome is still unknown, for this reason. A person must settle the call.
    Unknown(String),
}

impl Toolgate {
    /// Reconciles every pending call with the read tool that its own tool declares for this.
    ///
    /// The query is a normal call of the same principal and agent, in a separate session, with its
    /// own row. A call without such a tool, or without a clear answer, stays pending for a person.
    /// No call is repeated.
    ///
    /// # Errors
    /// The store is unavailable.
    pub async fn reconcile(&self) -> Result<Vec<(CallId, ReconcileOutcome)>, StoreError> {
        self.reconcile_matching(|_| true).await
    }

    /// Reconciles the pending calls for which `filter` returns true.
    ///
    /// # Errors
    /// As for [`Toolgate::reconcile`].
    pub async fn reconcile_matching(
        &self,
        mut filter: impl FnMut(&ClaimRecord) -> bool,
    ) -> Result<Vec<(CallId, ReconcileOutcome)>, StoreError> {
        let mut found = Vec::new();
        for claim in self.pending_calls().await?.into_iter().filter(|claim| filter(claim)) {
            let call = claim.call;
            found.push((call, self.reconcile_one(claim).await?));
        }
        Ok(found)
    }

    async fn reconcile_one(&self, claim: ClaimRecord) -> Result<ReconcileOutcome, StoreError> {
        let tool =
            self.0.agents.get(&claim.key.agent).and_then(|agent| agent.tools.get(&claim.tool));
        let Some(reconcile) = tool.and_then(|tool| tool.spec.reconcile.as_ref()) else {
            return Ok(ReconcileOutcome::Unknown(format!(
                "`{}` declares no `reconcile` tool",
                claim.tool
            )));
        };
        let Some(arguments) = self.recorded_arguments(&claim).await? else {
            return Ok(ReconcileOutcome::Unknown(
                "the arguments of the call are not recorded".to_owned(),
            ));
        };
        let question = match reconcile.build_arguments(&arguments) {
            Ok(question) => question,
            Err(why) => return Ok(ReconcileOutcome::Unknown(why)),
        };
        // A separate session, because the model does not make this call and it must not count as a
        // loop.
        let key = SessionKey {
            session: format!("reconcile-{}", CallId::generate()).into(),
            ..claim.key.clone()
        };
        let answer = self.call(Call::new(key, reconcile.tool.to_string(), question)).await;
        let result = match answer.outcome {
            Outcome::Success(output) => output.value,
            Outcome::Error(error) => {
                return Ok(ReconcileOutcome::Unknown(format!(
                    "`{}` did not answer: {}",
                    reconcile.tool, error.message
                )));
            }
            Outcome::Signal(_) => {
                return Ok(ReconcileOutcome::Unknown(format!(
                    "`{}` did not answer",
                    reconcile.tool
                )));
            }
        };
        let by = format!("`{}` ({})", reconcile.tool, answer.call);
        let (happened, outcome) = match reconcile.interpret_result(&result) {
            Some(true) => {
                let message = format!(
                    "The call had already taken effect, according to `{}`.",
                    reconcile.tool
                );
                (
                    Some(Outcome::Success(CallOutput {
                        message: Some(message),
                        ..CallOutput::from_value(result)
                    })),
                    ReconcileOutcome::Happened,
                )
            }
            Some(false) => (None, ReconcileOutcome::Never),
            None => {
                return Ok(ReconcileOutcome::Unknown(format!(
                    "`{}` answered {result}, which is inconclusive",
                    reconcile.tool
                )));
            }
        };
        match self.settle_pending(claim.call, happened, &by).await? {
            true => Ok(outcome),
            false => Ok(ReconcileOutcome::Unknown(
                "the call was settled by another process in the meantime".to_owned(),
            )),
        }
    }

    /// Returns the arguments of the call, without its secrets.
    async fn recorded_arguments(
        &self,
        claim: &ClaimRecord,
    ) -> Result<Option<Arc<Value>>, StoreError> {
        if let Some(row) = &claim.row {
            return Ok(Some(Arc::clone(&row.arguments)));
        }
        let rows = self.0.store.rows(&claim.key).await?;
        Ok(rows.iter().find(|row| row.call == claim.call).map(|row| Arc::clone(&row.arguments)))
    }
}
