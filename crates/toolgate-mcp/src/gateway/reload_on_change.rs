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
        let (mut seen_announcements, mut reported_error, mut delay) =
            (0, String::new(), MIN_RELOAD_DELAY);
        loop {
            let mut replaced = self.0.changes.subscribe();
            let active = self.active_config();
            let change_counters = |supervisor: &Arc<UpstreamSupervisor>| {
                [supervisor.list_changes.subscribe(), supervisor.announced_changes.subscribe()]
            };
            let mut watches: Vec<_> =
                active.upstreams.supervisors().flat_map(change_counters).collect();
            let announcements: u64 = active
                .upstreams
                .supervisors()
                .map(|supervisor| *supervisor.announced_changes.borrow())
                .sum();
            // The active rules do not cover changes that came after they were built.
            let is_outdated = active.upstreams.supervisors().any(|supervisor| {
                active.upstream_versions.get(&supervisor.upstream.name)
                    != Some(&*supervisor.list_changes.borrow())
            });
            drop(active);
            if !is_outdated {
                (reported_error, delay) = (String::new(), MIN_RELOAD_DELAY);
            }
            if !is_outdated && announcements == seen_announcements {
                let changed = watches
                    .iter_mut()
                    .map(|watch| Box::pin(async move { drop(watch.changed().await) }));
                let any_change = async {
                    match changed.len() {
                        0 => std::future::pending().await,
                        _ => drop(futures_util::future::select_all(changed).await),
                    }
                };
                tokio::select! {
                    () = any_change => {}
                    // A reload has replaced the upstreams to watch.
                    _ = replaced.changed() => {}
                    () = self.0.stop.cancelled() => return,
                }
                continue;
            }
            if self.0.stop.is_cancelled() {
                return;
            }
            seen_announcements = announcements;
            if !is_outdated {
                self.notify_changed().await;
            } else if let Err(error) = self.reload().await {
                if self.0.stop.is_cancelled() {
                    return;
                }
                // An error is logged once, not for each attempt.
                let error = error.to_string();
                if error != reported_error {
                    tracing::error!(
                        error,
                        "the tools of an upstream changed and the configuration does not load with them; keeping the previous configuration"
                    );
                    reported_error = error;
                }
                tokio::select! {
                    () = tokio::time::sleep(delay) => {}
                    // Another reload succeeded.
                    _ = replaced.changed() => {}
                    () = self.0.stop.cancelled() => return,
                }
                delay = (delay * 2).min(MAX_RELOAD_DELAY);
            }
            // Limits the rate of reloads if an upstream announces changes all the time.
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }
}
