//! Stores suspended calls, which wait until their client answers a question.
//!
//! A client of 2026-07-28 gets the question as a result, and repeats its request with the answer.

use std::collections::HashMap;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use toolgate::{Answer, SessionKey};
use toolgate_json::hex;

use crate::gateway::{InflightCount, lock};
use crate::server::http::admission::ConcurrencyPermit;
use crate::upstream::UpstreamEvent;

/// Maximum time that a suspended call waits for its client.
pub(crate) const SUSPENDED_CALL_TTL: Duration = Duration::from_secs(15 * 60);
/// Maximum number of suspended calls: in total, and of one principal.
const MAX_SUSPENDED_CALLS: (usize, usize) = (10_000, 200);

/// Reason why a call is suspended.
pub(crate) enum SuspendReason {
    /// The decision of a person about an approval.
    Approval { id: String, digest: String, refused: Box<rmcp::model::CallToolResult> },
    /// An answer to a question of its upstream.
    Upstream(Box<RunningCall>),
}

/// A running call.
pub(crate) enum CallTask {
    /// Polled by its owner. If the owner drops it, the call continues in a separate task.
    Inline(Option<Pin<Box<dyn Future<Output = Answer> + Send>>>),
    /// Runs in a separate task.
    Spawned(JoinHandle<Answer>),
}

impl CallTask {
    pub(crate) fn new(call: impl Future<Output = Answer> + Send + 'static) -> Self {
        Self::Inline(Some(Box::pin(call)))
    }

    pub(crate) fn spawn(mut self) -> Self {
        let call = match &mut self {
            Self::Inline(call) => call.take(),
            Self::Spawned(_) => None,
        };
        call.map_or(self, |call| Self::Spawned(tokio::spawn(call)))
    }

    fn is_finished(&self) -> bool {
        matches!(self, Self::Spawned(task) if task.is_finished())
    }
}

impl Future for CallTask {
    /// `None` if the call ended without an answer.
    type Output = Option<Answer>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut *self {
            Self::Spawned(task) => Pin::new(task).poll(context).map(Result::ok),
            Self::Inline(slot) => {
                // Taken out while it is polled, so that a call that panicked is not polled again.
                let Some(mut call) = slot.take() else { return Poll::Ready(None) };
                match call.as_mut().poll(context) {
                    Poll::Ready(answer) => Poll::Ready(Some(answer)),
                    Poll::Pending => {
                        *slot = Some(call);
                        Poll::Pending
                    }
                }
            }
        }
    }
}

/// Completes a started call in the background, where it still counts as running.
impl Drop for CallTask {
    fn drop(&mut self) {
        if let Self::Inline(call) = self
            && let Some(call) = call.take()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(call);
        }
    }
}

/// A running call, and its channels to the client and the upstream.
pub(crate) struct RunningCall {
    pub(crate) task: CallTask,
    pub(crate) events: mpsc::Receiver<UpstreamEvent>,
    pub(crate) channel: Arc<crate::upstream::CallChannel>,
    pub(crate) cancel: CancellationToken,
    pub(crate) question: Option<UpstreamEvent>,
    pub(crate) digest: String,
    pub(crate) guard: Arc<Mutex<Option<InflightGuard>>>,
}

/// Share of the global limits that a call holds while it runs, even if its client disconnects.
pub(crate) struct InflightGuard {
    _counted: InflightCount,
    _permit: Option<Arc<ConcurrencyPermit>>,
}

impl InflightGuard {
    pub(crate) const fn new(
        counted: InflightCount,
        permit: Option<Arc<ConcurrencyPermit>>,
    ) -> Self {
        Self { _counted: counted, _permit: permit }
    }
}

impl RunningCall {
    /// Abandons the call and waits for its end. The question of its upstream stays open until then.
    pub(crate) async fn abandon(self) {
        self.cancel.cancel();
        drop(self.task.await);
    }
}

impl SuspendedCall {
    /// Returns whether the call has ended.
    fn has_ended(&self) -> bool {
        matches!(&self.reason, Some(SuspendReason::Upstream(running)) if running.task.is_finished())
    }
}

/// Cancels a call that cannot be resumed any more.
impl Drop for SuspendedCall {
    fn drop(&mut self) {
        if let Some(SuspendReason::Upstream(running)) = &self.reason {
            running.cancel.cancel();
        }
    }
}

struct SuspendedCall {
    key: SessionKey,
    suspended_at: Instant,
    reason: Option<SuspendReason>,
}

/// Suspended calls of all sessions.
pub(crate) struct SuspendedCalls {
    secret: [u8; 32],
    /// Cancelled when shutdown starts: no call can be resumed any more.
    stop: CancellationToken,
    calls: Mutex<HashMap<String, SuspendedCall>>,
}

impl SuspendedCalls {
    /// Creates an empty collection that is valid until `stop` is cancelled.
    pub(crate) fn new(stop: CancellationToken) -> io::Result<Self> {
        let mut secret = [0; 32];
        getrandom::fill(&mut secret).map_err(io::Error::other)?;
        Ok(Self { secret, stop, calls: Mutex::default() })
    }

    /// Returns whether one more call of a principal can be suspended.
    pub(crate) fn has_room(&self, key: &SessionKey) -> bool {
        !self.stop.is_cancelled() && make_room(&mut lock(&self.calls), key)
    }

    /// Returns whether a call of the session is suspended.
    pub(crate) fn has_suspended_in(&self, key: &SessionKey) -> bool {
        lock(&self.calls).values().any(|entry| {
            entry.key == *key
                && entry.suspended_at.elapsed() < SUSPENDED_CALL_TTL
                && !entry.has_ended()
        })
    }

    /// Suspends a call and returns its state, which is signed for the session and valid once.
    pub(crate) fn suspend(&self, key: &SessionKey, reason: SuspendReason) -> Option<String> {
        let mut nonce = [0; 16];
        getrandom::fill(&mut nonce).ok()?;
        let nonce = hex(&nonce);
        let mut calls = lock(&self.calls);
        // Checked under the lock, because shutdown would not find a call that is added later.
        if self.stop.is_cancelled() || !make_room(&mut calls, key) {
            return None;
        }
        // Shutdown does not wait for a suspended call.
        if let SuspendReason::Upstream(running) = &reason {
            drop(lock(&running.guard).take());
        }
        let signed = format!("{nonce}.{}", hex(&self.compute_signature(&nonce, key)));
        calls.insert(
            nonce,
            SuspendedCall { key: key.clone(), suspended_at: Instant::now(), reason: Some(reason) },
        );
        Some(signed)
    }

    /// Removes the suspended call with this state and returns what it waits for.
    pub(crate) fn resume(&self, key: &SessionKey, state: &str) -> Option<SuspendReason> {
        let (nonce, sign) = state.split_once('.')?;
        let sign = decode_hex(sign)?;
        self.session_mac(nonce, key)?.verify_slice(&sign).ok()?;
        let mut calls = lock(&self.calls);
        let mut entry = calls.remove(nonce)?;
        if entry.key == *key && entry.suspended_at.elapsed() < SUSPENDED_CALL_TTL {
            entry.reason.take()
        } else {
            None
        }
    }

    /// Removes the suspended call with this digest, for a client that omits the state.
    ///
    /// An approval always requires the state.
    pub(crate) fn resume_without_state(
        &self,
        key: &SessionKey,
        digest: &str,
    ) -> Option<SuspendReason> {
        let mut calls = lock(&self.calls);
        let fits = |entry: &SuspendedCall| {
            matches!(&entry.reason, Some(SuspendReason::Upstream(running)) if running.digest == digest)
                && entry.key == *key
        };
        let found = calls
            .iter()
            .filter(|(_, entry)| fits(entry) && entry.suspended_at.elapsed() < SUSPENDED_CALL_TTL)
            .max_by_key(|(_, entry)| entry.suspended_at);
        let nonce = found.map(|(nonce, _)| nonce.clone())?;
        calls.remove(&nonce)?.reason.take()
    }

    /// Removes all calls that wait for an answer to their upstream, for shutdown.
    pub(crate) fn take_all(&self) -> Vec<RunningCall> {
        let calls = std::mem::take(&mut *lock(&self.calls));
        let running_call = |mut entry: SuspendedCall| match entry.reason.take() {
            Some(SuspendReason::Upstream(running_call)) => Some(*running_call),
            Some(SuspendReason::Approval { .. }) | None => None,
        };
        calls.into_values().filter_map(running_call).collect()
    }

    fn session_mac(&self, nonce: &str, key: &SessionKey) -> Option<Hmac<Sha256>> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.secret).ok()?;
        for part in [nonce, &key.agent, &key.principal, &key.session] {
            mac.update(&(part.len() as u64).to_be_bytes());
            mac.update(part.as_bytes());
        }
        Some(mac)
    }

    fn compute_signature(&self, nonce: &str, key: &SessionKey) -> Vec<u8> {
        self.session_mac(nonce, key)
            .map(|mac| mac.finalize().into_bytes().to_vec())
            .unwrap_or_default()
    }
}

/// Returns whether one more call of a principal fits, after expired ones are removed.
fn make_room(calls: &mut HashMap<String, SuspendedCall>, key: &SessionKey) -> bool {
    let full = |calls: &HashMap<String, SuspendedCall>| {
        calls.len() >= MAX_SUSPENDED_CALLS.0
            || calls.values().filter(|entry| entry.key.principal == key.principal).count()
                >= MAX_SUSPENDED_CALLS.1
    };
    if full(calls) {
        calls.retain(|_, entry| {
            entry.suspended_at.elapsed() < SUSPENDED_CALL_TTL && !entry.has_ended()
        });
    }
    !full(calls)
}

fn decode_hex(text: &str) -> Option<Vec<u8>> {
    let digits: Vec<u8> = text
        .chars()
        .map(|c| c.to_digit(16).and_then(|digit| u8::try_from(digit).ok()))
        .collect::<Option<_>>()?;
    let (pairs, rest) = digits.as_chunks::<2>();
    rest.is_empty().then(|| pairs.iter().map(|[high, low]| high << 4 | low).collect())
}
