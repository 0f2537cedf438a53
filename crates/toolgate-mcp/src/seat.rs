//! What a request takes of what all requests share.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use hyper::body::{Body, Frame, SizeHint};
use tokio::sync::OwnedSemaphorePermit;

/// Most bytes of requests that are still arriving.
const ARRIVING: usize = 512 << 20;

/// Bytes of requests that are still arriving: those who send take no seat, and must not fill the memory either.
pub(crate) struct Held<'h>(&'h AtomicUsize, usize);

impl<'h> Held<'h> {
    /// Nothing yet.
    pub(crate) fn new(all: &'h AtomicUsize) -> Self {
        Self(all, 0)
    }

    /// Whether there is room for so much more.
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

/// An answer with the seat that it takes.
pub(crate) struct Seated {
    pub(crate) body: BoxBody<Bytes, Infallible>,
    pub(crate) _seat: OwnedSemaphorePermit,
}

impl Body for Seated {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
