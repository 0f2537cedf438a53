//! Reloads the configuration when the tools of an upstream change.

use std::sync::Arc;
use std::time::Duration;

use super::Gateway;
use crate::upstream::UpstreamSupervisor;

/// First delay before a failed reload is tried again; it doubles with each failure.
const MIN_RELOAD_DELAY: Duration = Duration::from_secs(1);
/// Maximum delay between failed reloads.
const MAX_RELOAD_DELAY: Duration = Duration::from_secs(30);

impl Gateway {
    /// Reloads the configuration when the tools of an upstream change, because rules depend on the
    /// tools.
    ///
    /// If an upstream announces a change but its tools are the same, clients are notified without a
    /// reload.
    pub(crate) async fn reload_on_upstream_change(self) {
        let (mut heard, mut told, mut patience) = (0, String::new(), MIN_RELOAD_DELAY);
        loop {
            let mut replaced = self.0.changes.subscribe();
            let running = self.active_config();
            let both = |link: &Arc<UpstreamSupervisor>| {
                [link.list_changes.subscribe(), link.announced_changes.subscribe()]
            };
            let mut watches: Vec<_> = running.upstreams.supervisors().flat_map(both).collect();
            let claimed: u64 =
                running.upstreams.supervisors().map(|link| *link.announced_changes.borrow()).sum();
            // The active rules do not cover changes that came after they were built.
            let missed = running.upstreams.supervisors().any(|link| {
                running.upstream_versions.get(&link.upstream.name)
                    != Some(&*link.list_changes.borrow())
            });
            drop(running);
            if !missed {
                (told, patience) = (String::new(), MIN_RELOAD_DELAY);
            }
            if !missed && claimed == heard {
                let changed = watches
                    .iter_mut()
                    .map(|watch| Box::pin(async move { drop(watch.changed().await) }));
                let any = async {
                    match changed.len() {
                        0 => std::future::pending().await,
                        _ => drop(futures_util::future::select_all(changed).await),
                    }
                };
                tokio::select! {
                    () = any => {}
                    // A reload has replaced the upstreams to watch.
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
                self.notify_changed().await;
            } else if let Err(error) = self.reload().await {
                if self.0.stop.is_cancelled() {
                    return;
                }
                // An error is logged once, not for each attempt.
                let error = error.to_string();
                if error != told {
                    tracing::error!(
                        error,
                        "the tools of an upstream changed and the configuration does not load with them; keeping the previous configuration"
                    );
                    told = error;
                }
                tokio::select! {
                    () = tokio::time::sleep(patience) => {}
                    // Another reload succeeded.
                    _ = replaced.changed() => {}
                    () = self.0.stop.cancelled() => return,
                }
                patience = (patience * 2).min(MAX_RELOAD_DELAY);
            }
            // Limits the rate of reloads if an upstream announces changes all the time.
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }
}
