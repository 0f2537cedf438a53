//! Reads paged lists, dispatches notifications, and keeps resource subscriptions open.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::FutureExt as _;
use rmcp::model::{
    PaginatedRequestParams, ServerNotification, SetLevelRequestParams, SubscribeRequestParams,
    SubscriptionFilter, UnsubscribeRequestParams,
};
use rmcp::service::{Peer, Subscription};
use rmcp::{ErrorData, RoleClient, ServiceError};
use serde::Serialize;
use tokio::time::Instant;

use crate::gateway::lock;
use crate::upstream::remote_tool::TransportErrorKind;
use crate::upstream::supervisor::{UpstreamFailure, UpstreamSupervisor, is_modern};

/// The limits on a list of an upstream, in entries, pages and bytes.
const MAX_LIST_ENTRIES: usize = 10_000;
const MAX_LIST_PAGES: usize = 1_000;
const MAX_LIST_BYTES: usize = 32 << 20;
/// The maximum total length of subscribed URIs. They are sent in one message.
pub(crate) const MAX_SUBSCRIBED_URI_BYTES: usize = 1 << 20;
/// The shortest and longest retry delay of a subscription request, and the delay for servers that
/// seem not to support subscriptions.
const MIN_RESUBSCRIBE_DELAY: Duration = Duration::from_secs(1);
const MAX_RESUBSCRIBE_DELAY: Duration = Duration::from_secs(60);
const SUBSCRIPTION_PROBE_INTERVAL: Duration = Duration::from_secs(600);
/// A subscription that lasted this long resets the retry delay.
const MIN_STABLE_SUBSCRIPTION_AGE: Duration = Duration::from_secs(10);
/// The minimum age of a subscription before it is closed.
///
/// Many servers, including rmcp's, hang for seconds if the stream closes right after the
/// subscription was confirmed.
const MIN_SUBSCRIPTION_AGE: Duration = Duration::from_millis(50);

/// The URIs of subscribed resources, and their total length.
#[derive(Clone, Default)]
pub(crate) struct SubscribedUris {
    uris: BTreeSet<String>,
    bytes: usize,
}

impl SubscribedUris {
    pub(crate) fn contains(&self, uri: &str) -> bool {
        self.uris.contains(uri)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &String> {
        self.uris.iter()
    }

    /// Returns the total length of the URIs.
    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Adds a URI, and returns whether it is new.
    fn insert(&mut self, uri: &str) -> bool {
        let is_new = self.uris.insert(uri.to_owned());
        self.bytes += if is_new { uri.len() } else { 0 };
        is_new
    }

    /// Removes a URI, and returns whether it was present.
    fn remove(&mut self, uri: &str) -> bool {
        let was_present = self.uris.remove(uri);
        self.bytes -= if was_present { uri.len() } else { 0 };
        was_present
    }
}

/// Builds the filter of a subscription: the given resources, or the lists if none is given.
fn subscription_filter(uris: &[String]) -> SubscriptionFilter {
    if uris.is_empty() {
        return SubscriptionFilter::builder()
            .tools_list_changed()
            .prompts_list_changed()
            .resources_list_changed()
            .build();
    }
    let mut filter = SubscriptionFilter::new();
    filter.resource_subscriptions = Some(uris.to_vec());
    filter
}

/// Waits for the next notification, or forever without a subscription.
async fn next_notification(
    subscription: &mut Option<Subscription>,
) -> Result<Option<ServerNotification>, ServiceError> {
    match subscription {
        Some(subscription) => subscription.next().await,
        None => std::future::pending().await,
    }
}

/// Waits until a time, or forever without one.
async fn sleep_until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}

/// Reads all pages of a list, and returns whether the list is complete.
pub(crate) async fn read_pages<T: Serialize, L, F: Future<Output = Result<L, ServiceError>>>(
    request_page: impl Fn(Option<PaginatedRequestParams>) -> F,
    read: impl Fn(L) -> (Vec<T>, Option<String>),
) -> Result<(Vec<T>, bool), ServiceError> {
    let (mut all, mut cursor, mut bytes) = (Vec::new(), None, 0);
    for _ in 0..MAX_LIST_PAGES {
        let page = PaginatedRequestParams::default().with_cursor(cursor.clone());
        let (entries, next) = read(request_page(Some(page)).await?);
        for entry in entries {
            bytes += serde_json::to_vec(&entry).map_or(0, |text| text.len());
            if all.len() >= MAX_LIST_ENTRIES || bytes > MAX_LIST_BYTES {
                return Ok((all, false));
            }
            all.push(entry);
        }
        // Some servers mark the last page with an empty cursor.
        match next.filter(|next| !next.is_empty()) {
            None => return Ok((all, true)),
            Some(next) if cursor.as_ref() == Some(&next) => break,
            Some(next) => cursor = Some(next),
        }
    }
    Ok((all, false))
}

impl UpstreamSupervisor {
    /// Restores the log level on a new connection. Since 2026-07-28 each request carries the level.
    pub(crate) async fn restore_log_level(&self, peer: &Peer<RoleClient>) {
        let level = *lock(&self.log_level);
        let Some(level) =
            level.filter(|_| !is_modern(peer) && self.catalog().capabilities.logging.is_some())
        else {
            return;
        };
        let _ = tokio::time::timeout(
            Duration::from_secs(5),
            peer.set_level(SetLevelRequestParams::new(level)),
        )
        .await;
    }

    /// Restores resource subscriptions on a new connection.
    pub(crate) async fn restore_subscriptions(&self, peer: &Peer<RoleClient>) {
        let is_modern_peer = is_modern(peer);
        let uris: Vec<String> = lock(&self.subscribed_uris).iter().cloned().collect();
        for uri in uris.into_iter().filter(|_| !is_modern_peer) {
            let _ = tokio::time::timeout(
                Duration::from_secs(5),
                peer.subscribe(SubscribeRequestParams::new(uri.clone())),
            )
            .await;
            // The resource may have changed while the upstream was not connected.
            self.publish_resource_update(uri);
        }
    }

    /// Subscribes to changes until the upstream stops. Older revisions notify without a
    /// subscription.
    ///
    /// Lists and resources have separate subscriptions: clients choose the resources, and a
    /// rejected one must not disable list notifications.
    pub(crate) async fn listen_for_changes(&self, peer: &Peer<RoleClient>) {
        if !is_modern(peer) {
            return self.stop_requested.cancelled().await;
        }
        tokio::join!(
            self.keep_subscription_open(peer, false),
            self.keep_subscription_open(peer, true)
        );
    }

    /// Keeps one subscription open: for lists, or for subscribed resources.
    async fn keep_subscription_open(&self, peer: &Peer<RoleClient>, resources: bool) {
        let mut subscription: Option<Subscription> = None;
        let (mut delay, mut opened_at) = (MIN_RESUBSCRIBE_DELAY, Instant::now());
        // When to subscribe next, and whether a notification may have been missed meanwhile.
        let (mut due, mut has_gap) =
            (Some(Instant::now()), self.start_count.load(Ordering::Relaxed) > 1);
        // Whether a subscription ever succeeded.
        let mut has_succeeded = false;
        loop {
            if !self.stop_requested.is_cancelled() && due.is_some_and(|due| due <= Instant::now()) {
                let uris: Vec<String> = if resources {
                    lock(&self.subscribed_uris).iter().cloned().collect()
                } else {
                    Vec::new()
                };
                let had_subscription = subscription.is_some();
                due = None;
                if resources && uris.is_empty() {
                    (subscription, has_gap) = (None, false);
                } else if let Some(opened) = self
                    .open_subscription(peer, subscription_filter(&uris), &mut subscription)
                    .await
                {
                    has_gap |= had_subscription && subscription.is_none();
                    // Handle what is left of the old subscription before the new one.
                    while let Some(notification) =
                        subscription.as_mut().and_then(|previous| previous.next().now_or_never())
                    {
                        if !self.dispatch_notification(notification) {
                            break;
                        }
                    }
                    (subscription, opened_at, has_succeeded) = (Some(opened), Instant::now(), true);
                    if std::mem::take(&mut has_gap) {
                        self.relist_requested.notify_one();
                        uris.into_iter().for_each(|uri| self.publish_resource_update(uri));
                    }
                } else {
                    // The server may not support subscriptions, so try rarely.
                    due = Instant::now().checked_add(if resources || has_succeeded {
                        delay
                    } else {
                        SUBSCRIPTION_PROBE_INTERVAL
                    });
                    delay = (delay * 2).min(MAX_RESUBSCRIBE_DELAY);
                    has_gap |= subscription.is_none();
                }
            }
            tokio::select! {
                biased;
                () = self.stop_requested.cancelled() => {
                    // Many servers do not exit while a subscription is open.
                    if let Some(mut subscription) = subscription {
                        let _ = subscription.cancel().await;
                        tokio::time::sleep(MIN_SUBSCRIPTION_AGE.saturating_sub(opened_at.elapsed())).await;
                    }
                    return;
                }
                () = self.resubscribe_requested.notified(), if resources => due = Some(Instant::now()),
                () = sleep_until(due) => {}
                notification = next_notification(&mut subscription) => {
                    if !self.dispatch_notification(notification) {
                        (subscription, has_gap) = (None, true);
                        // Back off if the subscription keeps ending early.
                        delay = if opened_at.elapsed() > MIN_STABLE_SUBSCRIPTION_AGE { MIN_RESUBSCRIBE_DELAY } else { delay };
                        due = Instant::now().checked_add(delay);
                        delay = (delay * 2).min(MAX_RESUBSCRIBE_DELAY);
                    }
                }
            }
        }
    }

    /// Opens a subscription while still receiving from the old one.
    async fn open_subscription(
        &self,
        peer: &Peer<RoleClient>,
        filter: SubscriptionFilter,
        before: &mut Option<Subscription>,
    ) -> Option<Subscription> {
        let mut opening =
            std::pin::pin!(tokio::time::timeout(Duration::from_secs(10), peer.listen(filter)));
        loop {
            tokio::select! {
                opened = &mut opening => return opened.ok()?.ok(),
                notification = next_notification(before) => {
                    if !self.dispatch_notification(notification) {
                        *before = None;
                    }
                }
            }
        }
    }

    /// Dispatches a notification, and returns whether the subscription is still open.
    fn dispatch_notification(
        &self,
        notification: Result<Option<ServerNotification>, ServiceError>,
    ) -> bool {
        match notification {
            Ok(Some(ServerNotification::ResourceUpdatedNotification(updated))) => {
                self.publish_resource_update(updated.params.uri)
            }
            Ok(Some(_)) => self.on_lists_changed(),
            Ok(None) | Err(_) => return false,
        }
        true
    }

    /// Sends a request that is not a call, within the concurrency limit and the timeout.
    ///
    /// The result counts for the circuit breaker, but waiting for a slot does not. If the breaker
    /// is open, the request is not sent.
    pub(crate) async fn send_request<T>(
        &self,
        request: impl Future<Output = Result<T, ServiceError>>,
    ) -> Result<T, ServiceError> {
        if self.circuit_open().is_some() {
            let message =
                "the upstream failed repeatedly and its circuit breaker is open; try again later";
            return Err(ServiceError::McpError(ErrorData::internal_error(message, None)));
        }
        let (timeout, generation) =
            (self.upstream.timeout, self.connection().map(|connection| connection.generation));
        let full = || {
            ErrorData::internal_error(
                "the upstream is at its concurrency limit; try again later",
                None,
            )
        };
        let permit = tokio::time::timeout(timeout, self.slots.acquire()).await;
        let _permit = permit
            .map_err(|_| ServiceError::McpError(full()))?
            .map_err(|_| ServiceError::TransportClosed)?;
        // A request of the upstream may now belong to this request instead of to the only call.
        let _unrouted = self.routes.add_unrouted();
        let result = tokio::time::timeout(timeout, request)
            .await
            .unwrap_or(Err(ServiceError::Timeout { timeout }));
        let kind = match &result {
            Err(ServiceError::TransportSend(why)) => Some(TransportErrorKind::classify(why)),
            _ => None,
        };
        match (&result, kind, generation) {
            // Reconnect with a new access token.
            (_, Some(TransportErrorKind::Rejected(401, _)), Some(generation))
                if self.can_renew_token() =>
            {
                self.report_session_lost(generation)
            }
            // Reconnect, because the server lost the session.
            (_, Some(TransportErrorKind::SessionLost), Some(generation)) => {
                self.report_session_lost(generation)
            }
            // A rejected request does not count against the upstream.
            (_, Some(TransportErrorKind::Rejected(..)), _) => {}
            (Err(ServiceError::Timeout { .. }), _, Some(generation)) => {
                self.on_failure(generation, UpstreamFailure::Timeout)
            }
            // The supervisor notices the end of the only stream.
            (Err(ServiceError::TransportClosed), ..) if self.has_one_stream() => {}
            (
                Err(ServiceError::TransportSend(_) | ServiceError::TransportClosed),
                _,
                Some(generation),
            ) => {
                self.on_failure(generation, UpstreamFailure::Disconnected);
            }
            // The upstream was not connected in the first place.
            (
                Err(
                    ServiceError::TransportSend(_)
                    | ServiceError::TransportClosed
                    | ServiceError::Timeout { .. },
                ),
                ..,
            ) => {}
            (Ok(_), ..) => self.on_success(),
            _ => self.on_response(),
        }
        result
    }

    /// Publishes a change of a resource if a client is subscribed to it.
    pub(crate) fn publish_resource_update(&self, uri: String) {
        if lock(&self.subscribed_uris).contains(&uri) {
            let _ = self.resource_updates.send((self.upstream.name.clone(), uri));
        }
    }

    /// Subscribes to a resource, or unsubscribes if `is_wanted` returns false.
    ///
    /// `is_wanted` is called when the subscription lock is free. The request continues if the
    /// caller stops waiting. If `is_acknowledged`, the client already has the confirmation, so the
    /// subscription is kept while the upstream is down.
    pub(crate) async fn update_subscription(
        self: &Arc<Self>,
        uri: String,
        is_acknowledged: bool,
        is_wanted: impl Fn() -> bool + Send + 'static,
    ) -> Result<(), ServiceError> {
        let supervisor = Arc::clone(self);
        let task = tokio::spawn(async move {
            let _turn = supervisor.subscription_lock.lock().await;
            supervisor.send_subscription(&uri, is_wanted(), is_acknowledged).await
        });
        task.await.unwrap_or(Err(ServiceError::TransportClosed))
    }

    async fn send_subscription(
        &self,
        uri: &str,
        subscribes: bool,
        is_acknowledged: bool,
    ) -> Result<(), ServiceError> {
        let is_new = {
            let mut uris = lock(&self.subscribed_uris);
            if subscribes
                && !uris.contains(uri)
                && uris.bytes() + uri.len() > MAX_SUBSCRIBED_URI_BYTES
            {
                let full = ErrorData::internal_error(
                    "too many resource subscriptions for this upstream; try again later",
                    None,
                );
                return Err(ServiceError::McpError(full));
            }
            if subscribes { uris.insert(uri) } else { uris.remove(uri) }
        };
        if !is_new {
            return Ok(());
        }
        let timeout = self.upstream.timeout;
        let result = async {
            let connection = self.connection().ok_or(ServiceError::TransportClosed)?;
            let peer = &connection.peer;
            let result = match (is_modern(peer), subscribes) {
                (true, _) => {
                    self.resubscribe_requested.notify_one();
                    Ok(())
                }
                (false, true) => peer.subscribe(SubscribeRequestParams::new(uri)).await,
                (false, false) => peer.unsubscribe(UnsubscribeRequestParams::new(uri)).await,
            };
            match result {
                // The supervisor reconnects.
                Err(ServiceError::TransportSend(why))
                    if matches!(
                        TransportErrorKind::classify(&why),
                        TransportErrorKind::SessionLost
                    ) =>
                {
                    self.report_session_lost(connection.generation);
                    Err(ServiceError::TransportClosed)
                }
                result => result,
            }
        };
        let result = tokio::time::timeout(timeout, result)
            .await
            .unwrap_or(Err(ServiceError::Timeout { timeout }));
        match result {
            // The subscription is restored after reconnecting.
            Err(ServiceError::TransportClosed) if subscribes && is_acknowledged => Ok(()),
            Err(error) => {
                if subscribes {
                    lock(&self.subscribed_uris).remove(uri);
                }
                Err(error)
            }
            Ok(()) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_empty_cursor_marks_the_last_page() {
        let pages_of = async |cursors: [&str; 2]| {
            let request_page = |page: Option<PaginatedRequestParams>| async move {
                Ok::<_, ServiceError>(page.and_then(|page| page.cursor).is_some())
            };
            read_pages(request_page, |is_last: bool| {
                (vec![is_last], Some(cursors[usize::from(is_last)].to_owned()))
            })
            .await
            .unwrap()
        };
        assert_eq!(pages_of(["", "b"]).await, (vec![false], true));
        assert_eq!(pages_of(["a", ""]).await, (vec![false, true], true));
        // A repeated cursor means that the list is not complete.
        assert!(!pages_of(["a", "a"]).await.1);
    }
}
