//! When upstreams offer something else.

use std::sync::Arc;
use std::time::Duration;

use super::Gateway;
use crate::upstream::Link;

/// How long it waits before it reads a configuration again that did not load; twice as long each time.
const FIRST: Duration = Duration::from_secs(1);
/// But not longer than this.
const LONGEST: Duration = Duration::from_secs(30);

impl Gateway {
    /// Reads the configuration again when an upstream offers something else: rules are read for the tools that are there. Of one that only
    /// says so clients are told, and that is all.
    pub(super) async fn follow_upstreams(self) {
        let (mut heard, mut told, mut patience) = (0, String::new(), FIRST);
        loop {
            let mut replaced = self.0.changes.subscribe();
            let running = self.running();
            let both = |link: &Arc<Link>| [link.changed.subscribe(), link.claimed.subscribe()];
            let mut watches: Vec<_> = running.upstreams.links().flat_map(both).collect();
            let claimed: u64 = running.upstreams.links().map(|link| *link.claimed.borrow()).sum();
            // What has changed since these rules were read was not seen by them.
            let missed = running.upstreams.links().any(|link| running.seen.get(&link.upstream.name) != Some(&*link.changed.borrow()));
            drop(running);
            if !missed {
                (told, patience) = (String::new(), FIRST);
            }
            if !missed && claimed == heard {
                let changed = watches.iter_mut().map(|watch| Box::pin(async move { drop(watch.changed().await) }));
                let any = async {
                    match changed.len() {
                        0 => std::future::pending().await,
                        _ => drop(futures_util::future::select_all(changed).await),
                    }
                };
                tokio::select! {
                    () = any => {}
                    // Others are watched from now on.
                    _ = replaced.changed() => {}
                    () = self.0.stop.cancelled() => return,
                }
                continue;
            }
            if self.0.stop.is_cancelled() {
                return;
            }
            heard = claimed;
            if !missed {
                self.tell_changed().await;
            } else if let Err(error) = self.reload().await {
                if self.0.stop.is_cancelled() {
                    return;
                }
                // It is told once, however often it is tried.
                let error = error.to_string();
                if error != told {
                    tracing::error!(
                        error,
                        "an upstream offers something else, and the configuration does not load for it; it stays as it was"
                    );
                    told = error;
                }
                tokio::select! {
                    () = tokio::time::sleep(patience) => {}
                    // Somebody else has read it.
                    _ = replaced.changed() => {}
                    () = self.0.stop.cancelled() => return,
                }
                patience = (patience * 2).min(LONGEST);
            }
            // However often an upstream says that something has changed, it is looked at now and then.
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }
}
