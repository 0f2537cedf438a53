//! Runs the parallel calls of one model turn as one ordered plan.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures_util::FutureExt;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use crate::call::outcome::Answer;
use crate::call::{Call, CallId, SessionKey};
use crate::pipeline::Toolgate;
use crate::pipeline::admission::{Admission, AdmittedCall};
use crate::pipeline::call_state::CallState;
use crate::pipeline::gates;
use crate::pipeline::gates::claim::lease_duration;
use crate::pipeline::gates::run::RunResult;
use crate::pipeline::rejection::{
    Rejection, busy_rejection, forbidden_rejection, paused_target_error,
};
use crate::pipeline::session_hold::SessionHold;
use crate::session::state::SessionState;
use crate::store::LeaseRequest;
use crate::tool::Effect;

/// State of one call of the plan.
enum BatchSlot {
    Ready(Box<AdmittedCall>, Box<CallState>),
    Running(CallId, JoinHandle<Answer>),
    Done(Answer),
}

impl Toolgate {
    /// Makes the calls of one session as one plan.
    ///
    /// Returns one answer for each call, in order. A failure does not stop the other calls.
    pub async fn batch(&self, key: &SessionKey, mut calls: Vec<Call>) -> Vec<Answer> {
        let cancel = CancellationToken::new();
        for call in &mut calls {
            call.key = key.clone();
            call.cancel.get_or_insert_with(|| cancel.clone());
        }
        let cancel = cancel.drop_guard();
        let calls = Arc::new(calls);
        let (gate, plan, key) = (self.clone(), Arc::clone(&calls), key.clone());
        match tokio::spawn(async move { gate.run_plan(&key, &plan).await }).await {
            Ok(answers) => {
                cancel.disarm();
                answers
            }
            Err(_) => {
                let mut answers = Vec::new();
                for call in calls.iter() {
                    answers.push(self.record_internal_error(call, CallId::generate()).await);
                }
                answers
            }
        }
    }

    async fn run_plan(&self, key: &SessionKey, calls: &[Call]) -> Vec<Answer> {
        let agent = self.0.agents.get(&key.agent).filter(|agent| {
            agent.principals.as_ref().is_none_or(|allowed| allowed.contains(&*key.principal))
        });
        if agent.is_none() {
            // A principal without access must not lock a session.
            return self.reject_all(calls, || forbidden_rejection(key)).await;
        }
        let has_effect = |call: &Call| {
            agent
                .and_then(|a| a.tools.get(call.tool.as_str()))
                .is_some_and(|t| t.spec.effect != Effect::Read)
        };
        // The last call may have to wait for all the others, so its claim and the lease must last
        // longer.
        let slack = calls
            .iter()
            .filter_map(|call| agent?.tools.get(call.tool.as_str()))
            .map(|tool| tool.spec.timeout)
            .fold(std::time::Duration::ZERO, |sum, t| sum.saturating_add(t));
        let request = LeaseRequest {
            is_exclusive: calls.iter().any(has_effect),
            timeout: self.0.busy_timeout,
            term: lease_duration(slack),
        };
        let lease = self.0.store.lease_session(key, request).await;
        let hold = lease.map(|lease| lease.map(|lease| SessionHold::new(&self.0.store, lease)));
        let base = self.0.store.snapshot(key).await;
        let (_hold, base): (SessionHold, _) = match (hold, base) {
            (Ok(Some(hold)), Ok((_, base))) => (hold, base),
            (Ok(None), _) => return self.reject_all(calls, busy_rejection).await,
            (Err(error), _) | (_, Err(error)) => {
                return self.reject_all(calls, || Rejection::from(error.clone())).await;
            }
        };
        // All calls are checked before any of them runs. No call may rely on evidence that another
        // call has not produced yet, or that an earlier call revokes.
        let (mut slots, mut base) = (Vec::new(), (*base).clone());
        for call in calls {
            let mut call_state = CallState::start(self, call, None);
            call_state.lease_slack = slack;
            let id = call_state.id;
            // A panic in one call must not affect the others, and the call keeps its id.
            slots.push(
                match AssertUnwindSafe(self.admit_in_batch(call, call_state, &base))
                    .catch_unwind()
                    .await
                {
                    Ok(slot) => slot,
                    Err(_) => BatchSlot::Done(self.record_internal_error(call, id).await),
                },
            );
            // A tool that the client runs does not run here, so it revokes nothing.
            if let Some(BatchSlot::Ready(admitted, call_state)) = slots.last()
                && !admitted.authorization.tool().spec.external
            {
                admitted
                    .authorization
                    .tool()
                    .revoked_evidence(&call_state.arguments, None)
                    .into_iter()
                    .for_each(|revoked| base.revoke(revoked));
            }
        }
        self.run_slots(slots, calls).await
    }

    async fn admit_in_batch(
        &self,
        call: &Call,
        mut call_state: Box<CallState>,
        base: &SessionState,
    ) -> BatchSlot {
        match self.run_admission_gates(call, &mut call_state, Some(base)).await {
            Ok(Admission::Admitted(admitted)) => BatchSlot::Ready(admitted, call_state),
            Ok(Admission::Replay(outcome)) => {
                BatchSlot::Done(self.end_replayed(outcome, call_state).await)
            }
            Err(stop) => BatchSlot::Done(self.end_rejected(stop, call_state).await),
        }
    }

    /// Runs adjacent reads in parallel. A call with effects waits for all earlier calls.
    async fn run_slots(&self, slots: Vec<BatchSlot>, calls: &[Call]) -> Vec<Answer> {
        let mut running: Vec<BatchSlot> = Vec::new();
        for slot in slots {
            let BatchSlot::Ready(admitted, call_state) = slot else {
                running.push(slot);
                continue;
            };
            let effect = admitted.authorization.tool().spec.effect != Effect::Read;
            if effect {
                self.await_running(&mut running, calls).await;
            }
            running.push(BatchSlot::Running(call_state.id, self.spawn_call(admitted, call_state)));
            if effect {
                self.await_running(&mut running, calls).await;
            }
        }
        self.await_running(&mut running, calls).await;
        running
            .into_iter()
            .filter_map(|slot| match slot {
                BatchSlot::Done(answer) => Some(answer),
                BatchSlot::Ready(..) | BatchSlot::Running(..) => None,
            })
            .collect()
    }

    fn spawn_call(
        &self,
        mut admitted: Box<AdmittedCall>,
        mut call_state: Box<CallState>,
    ) -> JoinHandle<Answer> {
        let gate = self.clone();
        let span = call_state.span.clone();
        let work = async move {
            // The tool must see the changes of the calls before it.
            match gate.0.store.snapshot(&admitted.key).await {
                Ok((version, state)) => {
                    admitted.version = version;
                    admitted.state = Some(state);
                }
                Err(error) => {
                    let ran = RunResult::not_started((*Rejection::from(error).error).into());
                    return gate.run_settlement_gates(admitted, ran, call_state).await;
                }
            }
            // An operator may have paused the tool while the call waited.
            let ran = match gate.0.store.find_pause(&admitted.key, &call_state.tool).await {
                Ok(None) => gates::run::run(&gate, &admitted, &mut call_state).await,
                Ok(Some((target, why))) => {
                    RunResult::not_started(paused_target_error(&target, &why).into())
                }
                Err(error) => RunResult::not_started((*Rejection::from(error).error).into()),
            };
            gate.run_settlement_gates(admitted, ran, call_state).await
        };
        tokio::spawn(work.instrument(span))
    }

    async fn await_running(&self, slots: &mut [BatchSlot], calls: &[Call]) {
        for (slot, call) in slots.iter_mut().zip(calls) {
            if let BatchSlot::Running(id, handle) = slot {
                let answer = match handle.await {
                    Ok(answer) => answer,
                    Err(_) => self.record_internal_error(call, *id).await,
                };
                *slot = BatchSlot::Done(answer);
            }
        }
    }

    async fn reject_all(&self, calls: &[Call], stop: impl Fn() -> Rejection) -> Vec<Answer> {
        let mut answers = Vec::new();
        for call in calls {
            let call_state = CallState::start(self, call, None);
            let id = call_state.id;
            answers.push(
                match AssertUnwindSafe(self.end_rejected(stop(), call_state)).catch_unwind().await {
                    Ok(answer) => answer,
                    Err(_) => self.record_internal_error(call, id).await,
                },
            );
        }
        answers
    }
}
