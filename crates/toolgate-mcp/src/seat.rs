//! Limits concurrent requests, and the bytes of requests that are arriving.

use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use hyper::body::{Body, Frame, SizeHint};
use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::batch::asks;
use crate::gateway::lock;

/// Maximum bytes of requests that are still arriving, in total.
const ARRIVING: usize = 512 << 20;
/// How much of an event says what it is.
const HEAD: usize = 1 << 10;

/// Counts the bytes of an arriving request. It has no permit yet, and must not exhaust memory.
pub(crate) struct Held<'h>(&'h AtomicUsize, usize);

impl<'h> Held<'h> {
    /// Starts with no bytes.
    pub(crate) fn new(all: &'h AtomicUsize) -> Self {
        Self(all, 0)
    }

    /// Adds bytes, and returns whether the total is within the limit.
    pub(crate) fn takes(&mut self, more: usize) -> bool {
        self.1 += more;
        self.0.fetch_add(more, Ordering::Relaxed) + more <= ARRIVING
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Ordering::Relaxed);
    }
}

/// Limits concurrent requests.
///
/// If there are several principals, each gets at most half of the permits. Slow requests of one
/// principal then do not block the others.
pub(crate) struct Seats {
    free: Arc<Semaphore>,
    all: usize,
    /// Number of permits of each principal that has any.
    own: Arc<Mutex<HashMap<String, usize>>>,
}

impl Seats {
    pub(crate) fn new(all: usize) -> Self {
        let all = all.min(Semaphore::MAX_PERMITS);
        Self { free: Arc::new(Semaphore::new(all)), all, own: Arc::default() }
    }

    /// Returns the maximum number of permits of one principal.
    pub(crate) fn most(&self, is_shared: bool) -> usize {
        if is_shared { (self.all / 2).max(1) } else { self.all }
    }

    /// Takes permits for a principal: all of them, or none.
    pub(crate) fn take(&self, principal: &str, many: u32, is_shared: bool) -> Option<Seat> {
        let mut own = lock(&self.own);
        let taken = own.get(principal).copied().unwrap_or_default() + many as usize;
        if taken > self.most(is_shared) {
            return None;
        }
        let free = Arc::clone(&self.free).try_acquire_many_owned(many).ok()?;
        own.insert(principal.to_owned(), taken);
        Some(Seat { _free: free, own: Arc::clone(&self.own), principal: principal.to_owned(), many: many as usize })
    }
}

/// Permits of one request, until this is dropped.
pub(crate) struct Seat {
    _free: OwnedSemaphorePermit,
    own: Arc<Mutex<HashMap<String, usize>>>,
    principal: String,
    many: usize,
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut own = lock(&self.own);
        if let Some(taken) = own.get_mut(&self.principal) {
            *taken = taken.saturating_sub(self.many);
            if *taken == 0 {
                own.remove(&self.principal);
            }
        }
    }
}

/// Requests in sessions of older clients that are not answered yet, each by its session and its name there.
#[derive(Clone, Default)]
pub(crate) struct Open(Arc<Mutex<HashSet<(String, String)>>>);

impl Open {
    /// Counts requests as not answered for as long as what is given back, or a copy of it, is kept; `None` where one of their names is
    /// taken. Whose requests are in no session stand for themselves.
    pub(crate) fn begin<'v>(&self, session: Option<&str>, messages: impl IntoIterator<Item = &'v Value>) -> Option<Unanswered> {
        let unanswered = Unanswered(Arc::new(Names { open: self.clone(), taken: Mutex::default() }));
        let Some(session) = session else { return Some(unanswered) };
        for id in messages.into_iter().filter(|message| asks(message)).filter_map(|message| message.get("id")) {
            let name = (session.to_owned(), id.to_string());
            if !lock(&self.0).insert(name.clone()) {
                return None;
            }
            lock(&unanswered.0.taken).push(name);
        }
        Some(unanswered)
    }
}

/// Requests that are not answered yet. Whoever works for them keeps a copy: their client may have hung up long before they are over.
#[derive(Clone)]
pub(crate) struct Unanswered(Arc<Names>);

/// The names of requests, taken until this is dropped.
struct Names {
    open: Open,
    taken: Mutex<Vec<(String, String)>>,
}

impl Unanswered {
    /// Whether this is what one waits for. Who hears it may use the name again before the stream has ended.
    fn is_answered_by(&self, said: &[u8]) -> bool {
        let head = said.get(..HEAD).unwrap_or(said);
        let first = |word: &[u8]| head.windows(word.len()).position(|part| part == word);
        // What is told on the way to it has a method before everything else.
        let told = first(b"\"method\":").unwrap_or(head.len());
        let answers = [first(b"\"result\":"), first(b"\"error\":")].into_iter().flatten().any(|at| at < told);
        answers && lock(&self.0.taken).len() == 1
    }
}

impl Names {
    fn release(&self) {
        let names = std::mem::take(&mut *lock(&self.taken));
        if !names.is_empty() {
            let mut open = lock(&self.open.0);
            for name in &names {
                open.remove(name);
            }
        }
    }
}

impl Drop for Names {
    fn drop(&mut self) {
        self.release();
    }
}

/// Keeps a session alive: each running request and each listener has a copy.
#[derive(Clone, Default)]
pub(crate) struct Hold(Arc<()>);

impl Hold {
    /// Returns whether there is another copy.
    pub(crate) fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}

/// A response body that holds the permit and the session of its request until it ends.
pub(crate) struct Seated {
    pub(crate) body: BoxBody<Bytes, Infallible>,
    pub(crate) _seat: Arc<Seat>,
    pub(crate) unanswered: Option<Unanswered>,
    pub(crate) _hold: Option<Hold>,
}

impl Body for Seated {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        if let Poll::Ready(Some(Ok(frame))) = &polled
            && let Some(said) = frame.data_ref()
            && let Some(unanswered) = self.unanswered.take_if(|unanswered| unanswered.is_answered_by(said))
        {
            unanswered.0.release();
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_several_takes_half_of_the_seats_and_who_has_none_is_forgotten() {
        let seats = Seats::new(5);
        let has = |who: &str| lock(&seats.own).get(who).copied();
        assert_eq!((seats.most(true), seats.most(false), Seats::new(1).most(true)), (2, 5, 1));
        let (one, two) = (seats.take("ann", 1, true).unwrap(), seats.take("ann", 1, true).unwrap());
        assert!(seats.take("ann", 1, true).is_none() && seats.take("bob", 3, true).is_none());
        let both = seats.take("bob", 2, true).unwrap();
        assert_eq!((has("ann"), has("bob")), (Some(2), Some(2)));
        // Only one permit is left.
        assert!(seats.take("cat", 2, true).is_none() && has("cat").is_none());
        let last = seats.take("cat", 1, true).unwrap();
        drop((one, both));
        assert_eq!((has("ann"), has("bob"), seats.free.available_permits()), (Some(1), None, 3));
        drop((two, last));
        assert!(lock(&seats.own).is_empty());
        // Without tokens there is one principal, which may have all permits.
        assert!(seats.take("local", 5, false).is_some());
    }
}
