//! Lists the fourteen gates in their order, which is a security property.
//!
//! Every entry point runs this list. `explain` runs it too, with `CallState::explain` set: then
//! each gate only reads. A replay and a backtest run it on a store that answers from recorded rows.

pub(crate) mod admission;
mod batch;
pub(crate) mod call_state;
mod deferred;
mod early_end;
pub(crate) mod explain;
mod facts;
mod flush_spool;
pub(crate) mod gates;
mod mask_secrets;
mod next_step;
pub(crate) mod provenance;
mod reconcile;
pub(crate) mod rejection;
mod row_builder;
mod runtime;
pub(crate) mod session_hold;
mod spawn_on_drop;

pub use deferred::DeferredCall;
pub use explain::{Explanation, GateExplanation, GateResult, PredictedOutcome, RuleExplanation};
pub use gates::policy::{Permit, PolicyEngine};
pub(crate) use gates::shape::OUTPUT_BOUNDS;
pub use reconcile::ReconcileOutcome;
pub use runtime::{Toolgate, ToolgateBuilder};

use crate::call::Call;
use crate::call::outcome::Answer;
use crate::pipeline::admission::{Admission, AdmittedCall};
use crate::pipeline::call_state::CallState;
use crate::pipeline::gates::recall::RecallOutcome;
use crate::pipeline::gates::run::RunResult;
use crate::pipeline::rejection::Rejection;
use crate::session::state::SessionState;

impl Toolgate {
    /// Takes a call through all gates. The first rejection ends it, and every end writes a row.
    pub(crate) async fn run_pipeline(&self, call: &Call, mut call_state: Box<CallState>) -> Answer {
        // Each part is boxed to keep the task that drives them small.
        match Box::pin(self.run_admission_gates(call, &mut call_state, None)).await {
            Ok(Admission::Admitted(admitted)) => {
                let ran = Box::pin(gates::run::run(self, &admitted, &mut call_state)).await; // 11
                Box::pin(self.run_settlement_gates(admitted, ran, call_state)).await
            }
            Ok(Admission::Replay(outcome)) => {
                Box::pin(self.end_replayed(outcome, call_state)).await
            }
            Err(rejection) => Box::pin(self.end_rejected(rejection, call_state)).await,
        }
    }

    /// Runs gates 1 to 10. On success, returns a permit and an open claim.
    pub(crate) async fn run_admission_gates(
        &self,
        call: &Call,
        call_state: &mut CallState,
        batch: Option<&SessionState>,
    ) -> Result<Admission, Rejection> {
        let agent = gates::admit::run(self, call, call_state).await?; // 1
        let call = gates::resolve::run(self, agent, call, batch, call_state).await?; // 2
        let arguments = gates::validate::run(self, &call, call_state)?; // 3
        let session = match gates::recall::run(self, &call, &arguments, call_state).await? {
            RecallOutcome::New(session) => session, // 4
            RecallOutcome::Replay(outcome) => return Ok(Admission::Replay(outcome)),
        };
        gates::progress::run(self, &call, &session, call_state).await?; // 5
        let budget = gates::limits::run(self, &call, &session, call_state).await?; // 6
        let (arguments, requests) = gates::hooks::run(self, &call, arguments, call_state).await?; // 7
        let facts_at = batch.unwrap_or(&session.state);
        let decision =
            gates::policy::run(self, &call, arguments, requests, facts_at, call_state).await?; // 8
        let (permit, approval) = gates::approval::run(self, &call, decision, call_state).await?; // 9
        gates::claim::run(self, call, permit, approval, budget, session, call_state).await // 10
    }

    /// Runs gates 12 to 14 after a run here, or after the report of a client.
    pub(crate) async fn run_settlement_gates(
        &self,
        admitted: Box<AdmittedCall>,
        ran: RunResult,
        mut call_state: Box<CallState>,
    ) -> Answer {
        let shaped = gates::shape::run(self, ran, &admitted, &mut call_state).await; // 12
        let (completion, txn) = gates::settle::run(self, shaped, &admitted, &mut call_state).await; // 13
        Box::pin(gates::record::run(self, admitted, completion, txn, call_state)).await // 14
    }
}
