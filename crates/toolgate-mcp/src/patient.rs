//! A connection whose other side has to take what it is told. Who reads nothing for a while is hung up on: until then it holds a place
//! that others wait for.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// A connection, and how long it may take nothing.
pub(crate) struct Patient<S> {
    inner: S,
    patience: Duration,
    /// When that is over, while something is to be taken.
    over: Option<Pin<Box<Sleep>>>,
}

impl<S> Patient<S> {
    pub(crate) const fn new(inner: S, patience: Duration) -> Self {
        Self { inner, patience, over: None }
    }

    /// What came of an attempt; one that has to wait does so for a while only.
    fn waited<T>(&mut self, tried: Poll<io::Result<T>>, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        if tried.is_ready() {
            self.over = None;
            return tried;
        }
        let patience = self.patience;
        let over = self.over.get_or_insert_with(|| Box::pin(sleep(patience)));
        over.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let own = self.get_mut();
        let tried = Pin::new(&mut own.inner).poll_write(context, bytes);
        own.waited(tried, context)
    }

    fn poll_write_vectored(self: Pin<&mut Self>, context: &mut Context<'_>, parts: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let own = self.get_mut();
        let tried = Pin::new(&mut own.inner).poll_write_vectored(context, parts);
        own.waited(tried, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let own = self.get_mut();
        let tried = Pin::new(&mut own.inner).poll_flush(context);
        own.waited(tried, context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let own = self.get_mut();
        let tried = Pin::new(&mut own.inner).poll_shutdown(context);
        own.waited(tried, context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn who_takes_nothing_is_hung_up_on() {
        let (near, mut far) = tokio::io::duplex(8);
        let mut near = Patient::new(near, Duration::from_millis(200));
        // Slowly is fine, however long all of it takes.
        let reading = tokio::spawn(async move {
            let mut chunk = [0; 8];
            for _ in 0..8 {
                tokio::time::sleep(Duration::from_millis(50)).await;
                far.read_exact(&mut chunk).await.unwrap();
            }
            far
        });
        near.write_all(&[1; 64]).await.unwrap();
        let _far = reading.await.unwrap();
        let error = tokio::time::timeout(Duration::from_secs(10), near.write_all(&[1; 64])).await.unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
