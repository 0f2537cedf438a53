//! Calls that wait for their client to answer something. A client of 2026-07-28 is asked by an answer of its own, and comes back
//! with what it was asked for.

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
use toolgate::json::hex;
use toolgate::{Answer, SessionKey};

use crate::gateway::{Counted, lock};
use crate::seat::Seat;
use crate::upstream::FromUpstream;

/// How long a client may take.
pub(crate) const LIFE: Duration = Duration::from_secs(15 * 60);
/// Most calls that wait, and most of one principal.
const MOST: (usize, usize) = (10_000, 200);

/// A call that waits.
pub(crate) enum Waits {
    /// For a person to approve it.
    Approval { id: String, digest: String, refused: Box<rmcp::model::CallToolResult> },
    /// For something that its upstream wants to know.
    Upstream(Box<Underway>),
}

/// A call on its way to its answer.
pub(crate) enum Task {
    /// Whoever waits for it runs it; where nobody waits any more, it goes on by itself.
    Here(Option<Pin<Box<dyn Future<Output = Answer> + Send>>>),
    /// It goes on whether somebody waits or not.
    Apart(JoinHandle<Answer>),
}

impl Task {
    pub(crate) fn new(call: impl Future<Output = Answer> + Send + 'static) -> Self {
        Self::Here(Some(Box::pin(call)))
    }

    pub(crate) fn apart(mut self) -> Self {
        let call = match &mut self {
            Self::Here(call) => call.take(),
            Self::Apart(_) => None,
        };
        call.map_or(self, |call| Self::Apart(tokio::spawn(call)))
    }

    fn is_finished(&self) -> bool {
        matches!(self, Self::Apart(task) if task.is_finished())
    }
}

impl Future for Task {
    /// `None` where it did not come to an end.
    type Output = Option<Answer>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut *self {
            Self::Apart(task) => Pin::new(task).poll(context).map(Result::ok),
            Self::Here(waits) => {
                // Taken out meanwhile: what has panicked is not run again.
                let Some(mut call) = waits.take() else { return Poll::Ready(None) };
                match call.as_mut().poll(context) {
                    Poll::Ready(answer) => Poll::Ready(Some(answer)),
                    Poll::Pending => {
                        *waits = Some(call);
                        Poll::Pending
                    }
                }
            }
        }
    }
}

/// What has begun is seen through, and counted until then.
impl Drop for Task {
    fn drop(&mut self) {
        if let Self::Here(call) = self
            && let Some(call) = call.take()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(call);
        }
    }
}

/// A call in the middle of its run.
pub(crate) struct Underway {
    pub(crate) task: Task,
    pub(crate) heard: mpsc::Receiver<FromUpstream>,
    pub(crate) line: Arc<crate::upstream::Line>,
    pub(crate) cancel: CancellationToken,
    pub(crate) asked: Option<FromUpstream>,
    pub(crate) digest: String,
    pub(crate) counted: Arc<Mutex<Option<Presence>>>,
}

/// What a call takes of what all share while somebody works for it: also where its client has hung up.
pub(crate) struct Presence {
    _counted: Counted,
    _seat: Option<Arc<Seat>>,
}

impl Presence {
    pub(crate) const fn new(counted: Counted, seat: Option<Arc<Seat>>) -> Self {
        Self { _counted: counted, _seat: seat }
    }
}

impl Underway {
    /// Takes it back, and waits until it is over: until then whoever has asked for something is not told anything else.
    pub(crate) async fn take_back(self) {
        self.cancel.cancel();
        drop(self.task.await);
    }
}

impl Entry {
    /// Whether nothing waits any more.
    fn is_over(&self) -> bool {
        matches!(&self.waits, Some(Waits::Upstream(underway)) if underway.task.is_finished())
    }
}

/// Nobody comes back for it.
impl Drop for Entry {
    fn drop(&mut self) {
        if let Some(Waits::Upstream(underway)) = &self.waits {
            underway.cancel.cancel();
        }
    }
}

struct Entry {
    key: SessionKey,
    since: Instant,
    waits: Option<Waits>,
}

pub(crate) struct Parked {
    secret: [u8; 32],
    /// Nobody comes back any more.
    stop: CancellationToken,
    calls: Mutex<HashMap<String, Entry>>,
}

impl Parked {
    /// For as long as somebody comes back.
    pub(crate) fn new(stop: CancellationToken) -> io::Result<Self> {
        let mut secret = [0; 32];
        getrandom::fill(&mut secret).map_err(io::Error::other)?;
        Ok(Self { secret, stop, calls: Mutex::default() })
    }

    /// Whether one more call of a principal can wait.
    pub(crate) fn has_room(&self, key: &SessionKey) -> bool {
        !self.stop.is_cancelled() && make_room(&mut lock(&self.calls), key)
    }

    /// Whether a call of a conversation waits for its client.
    pub(crate) fn waits_in(&self, key: &SessionKey) -> bool {
        lock(&self.calls).values().any(|entry| entry.key == *key && entry.since.elapsed() < LIFE && !entry.is_over())
    }

    /// Parks a call. What comes back is for its client only, and is good for one answer.
    pub(crate) fn park(&self, key: &SessionKey, waits: Waits) -> Option<String> {
        let mut nonce = [0; 16];
        getrandom::fill(&mut nonce).ok()?;
        let nonce = hex(&nonce);
        let mut calls = lock(&self.calls);
        // Looked at while it is held: what is put there after that would be found by nobody.
        if self.stop.is_cancelled() || !make_room(&mut calls, key) {
            return None;
        }
        // Nobody waits for its client when the gateway ends.
        if let Waits::Upstream(underway) = &waits {
            drop(lock(&underway.counted).take());
        }
        let signed = format!("{nonce}.{}", hex(&self.sign(&nonce, key)));
        calls.insert(nonce, Entry { key: key.clone(), since: Instant::now(), waits: Some(waits) });
        Some(signed)
    }

    /// Takes a call back, once.
    pub(crate) fn take(&self, key: &SessionKey, state: &str) -> Option<Waits> {
        let (nonce, sign) = state.split_once('.')?;
        let sign = unhex(sign)?;
        self.mac(nonce, key)?.verify_slice(&sign).ok()?;
        let mut calls = lock(&self.calls);
        let mut entry = calls.remove(nonce)?;
        if entry.key == *key && entry.since.elapsed() < LIFE { entry.waits.take() } else { None }
    }

    /// Takes back the call of which something was asked, where the client has forgotten how to name it. An approval is not given so.
    pub(crate) fn take_unstated(&self, key: &SessionKey, digest: &str) -> Option<Waits> {
        let mut calls = lock(&self.calls);
        let fits =
            |entry: &Entry| matches!(&entry.waits, Some(Waits::Upstream(underway)) if underway.digest == digest) && entry.key == *key;
        let found = calls.iter().filter(|(_, entry)| fits(entry) && entry.since.elapsed() < LIFE).max_by_key(|(_, entry)| entry.since);
        let nonce = found.map(|(nonce, _)| nonce.clone())?;
        calls.remove(&nonce)?.waits.take()
    }

    /// Takes all calls back of which something was asked, once nobody comes back for them.
    pub(crate) fn take_all(&self) -> Vec<Underway> {
        let calls = std::mem::take(&mut *lock(&self.calls));
        let underway = |mut entry: Entry| match entry.waits.take() {
            Some(Waits::Upstream(underway)) => Some(*underway),
            Some(Waits::Approval { .. }) | None => None,
        };
        calls.into_values().filter_map(underway).collect()
    }

    fn mac(&self, nonce: &str, key: &SessionKey) -> Option<Hmac<Sha256>> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.secret).ok()?;
        for part in [nonce, &key.agent, &key.principal, &key.session] {
            mac.update(&(part.len() as u64).to_be_bytes());
            mac.update(part.as_bytes());
        }
        Some(mac)
    }

    fn sign(&self, nonce: &str, key: &SessionKey) -> Vec<u8> {
        self.mac(nonce, key).map(|mac| mac.finalize().into_bytes().to_vec()).unwrap_or_default()
    }
}

/// Whether there is room for one more of a principal, perhaps where nobody waits any more.
fn make_room(calls: &mut HashMap<String, Entry>, key: &SessionKey) -> bool {
    let full = |calls: &HashMap<String, Entry>| {
        calls.len() >= MOST.0 || calls.values().filter(|entry| entry.key.principal == key.principal).count() >= MOST.1
    };
    if full(calls) {
        calls.retain(|_, entry| entry.since.elapsed() < LIFE && !entry.is_over());
    }
    !full(calls)
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits: Vec<u8> = text.chars().map(|c| c.to_digit(16).and_then(|digit| u8::try_from(digit).ok())).collect::<Option<_>>()?;
    let (pairs, rest) = digits.as_chunks::<2>();
    rest.is_empty().then(|| pairs.iter().map(|[high, low]| high << 4 | low).collect())
}
