//! What is said beside calls: what an upstream is asked for, and that lists or resources have changed.

use std::sync::Arc;
use std::time::Duration;

use rmcp::model::{PaginatedRequestParams, ServerNotification, SubscribeRequestParams, SubscriptionFilter, UnsubscribeRequestParams};
use rmcp::service::Peer;
use rmcp::{ErrorData, RoleClient, ServiceError};
use serde::Serialize;

use super::link::{Link, is_modern};
use crate::gateway::lock;

/// The most that a list of an upstream may hold, in entries, pages and bytes.
const LONGEST_LIST: usize = 10_000;
const MOST_PAGES: usize = 1_000;
const MOST_BYTES: usize = 32 << 20;

/// A list that may come in pages, and whether that is all of it.
pub(super) async fn pages<T: Serialize, L, F: Future<Output = Result<L, ServiceError>>>(
    ask: impl Fn(Option<PaginatedRequestParams>) -> F,
    read: impl Fn(L) -> (Vec<T>, Option<String>),
) -> Result<(Vec<T>, bool), ServiceError> {
    let (mut all, mut cursor, mut bytes) = (Vec::new(), None, 0);
    for _ in 0..MOST_PAGES {
        let page = PaginatedRequestParams::default().with_cursor(cursor.clone());
        let (part, next) = read(ask(Some(page)).await?);
        for one in part {
            bytes += serde_json::to_vec(&one).map_or(0, |text| text.len());
            if all.len() >= LONGEST_LIST || bytes > MOST_BYTES {
                return Ok((all, false));
            }
            all.push(one);
        }
        match next {
            None => return Ok((all, true)),
            Some(next) if cursor.as_ref() == Some(&next) => break,
            Some(next) => cursor = Some(next),
        }
    }
    Ok((all, false))
}

impl Link {
    /// What was wanted of the connection before is wanted of this one.
    pub(super) async fn subscribe_again(&self, peer: &Peer<RoleClient>) {
        let modern = is_modern(peer);
        let wanted: Vec<String> = lock(&self.wanted).iter().cloned().collect();
        for uri in wanted.into_iter().filter(|_| !modern) {
            let _ = tokio::time::timeout(Duration::from_secs(5), peer.subscribe(SubscribeRequestParams::new(uri))).await;
        }
    }

    /// Hears of changes from one of 2026-07-28, until it is to end: those before say them unasked.
    pub(super) async fn hear_changes(&self, peer: &Peer<RoleClient>) {
        let modern = is_modern(peer);
        if !modern {
            return self.stop.cancelled().await;
        }
        let mut patience = Duration::from_secs(1);
        while !self.stop.is_cancelled() {
            let mut filter = SubscriptionFilter::builder().tools_list_changed().prompts_list_changed().resources_list_changed().build();
            let wanted: Vec<String> = lock(&self.wanted).iter().cloned().collect();
            filter.resource_subscriptions = (!wanted.is_empty()).then_some(wanted);
            let wants = filter.resource_subscriptions.is_some();
            let Ok(Ok(mut subscription)) = tokio::time::timeout(Duration::from_secs(10), peer.listen(filter)).await else {
                // It may not know this at all; then there is nothing to hear, and it is not asked often.
                let pause = if wants { patience } else { Duration::from_secs(600) };
                patience = (patience * 2).min(Duration::from_secs(60));
                tokio::select! {
                    () = tokio::time::sleep(pause) => {}
                    () = self.resubscribe.notified() => {}
                    () = self.stop.cancelled() => {}
                }
                continue;
            };
            patience = Duration::from_secs(1);
            loop {
                let said = tokio::select! {
                    said = subscription.next() => said,
                    () = self.resubscribe.notified() => break,
                    () = self.stop.cancelled() => {
                        // Many do not end while somebody listens.
                        let _ = subscription.cancel().await;
                        return;
                    }
                };
                match said {
                    Ok(Some(ServerNotification::ResourceUpdatedNotification(updated))) => self.updated(updated.params.uri),
                    Ok(Some(_)) => self.lists_changed(),
                    Ok(None) | Err(_) => {
                        tokio::select! {
                            () = tokio::time::sleep(Duration::from_secs(1)) => {}
                            () = self.stop.cancelled() => {}
                        }
                        break;
                    }
                }
            }
        }
    }

    /// What it answers to a question that is no call, when a seat is free and within its time; whether it does is noted. That others
    /// have all seats is not its fault.
    pub(crate) async fn asked<T>(&self, question: impl Future<Output = Result<T, ServiceError>>) -> Result<T, ServiceError> {
        let timeout = self.upstream.timeout;
        let full = || ErrorData::internal_error("the upstream has as many calls as it takes; try again later", None);
        let seat = tokio::time::timeout(timeout, self.seats.acquire()).await;
        let _seat = seat.map_err(|_| ServiceError::McpError(full()))?.map_err(|_| ServiceError::TransportClosed)?;
        let said = tokio::time::timeout(timeout, question).await.unwrap_or(Err(ServiceError::Timeout { timeout }));
        match &said {
            Err(ServiceError::TransportSend(_) | ServiceError::TransportClosed | ServiceError::Timeout { .. }) => self.failed(),
            _ => self.answered(),
        }
        said
    }

    /// A resource of it has changed. What nobody wants to hear of is not passed on.
    pub(crate) fn updated(&self, uri: String) {
        if lock(&self.wanted).contains(&uri) {
            let _ = self.updates.send((self.upstream.name.clone(), uri));
        }
    }

    /// Tells it whether anybody wants to hear of a resource, as that is when its turn comes. Goes on whoever waits for it. What is
    /// promised stays wanted where it is away.
    pub(crate) async fn heed(
        self: &Arc<Self>,
        uri: String,
        promised: bool,
        wanted: impl Fn() -> bool + Send + 'static,
    ) -> Result<(), ServiceError> {
        let own = Arc::clone(self);
        let told = tokio::spawn(async move {
            let _one = own.heeding.lock().await;
            own.tell(&uri, wanted(), promised).await
        });
        told.await.unwrap_or(Err(ServiceError::TransportClosed))
    }

    async fn tell(&self, uri: &str, wants: bool, promised: bool) -> Result<(), ServiceError> {
        let news = match wants {
            true => lock(&self.wanted).insert(uri.to_owned()),
            false => lock(&self.wanted).remove(uri),
        };
        if !news {
            return Ok(());
        }
        let timeout = self.upstream.timeout;
        let told = async {
            let peer = self.peer().ok_or(ServiceError::TransportClosed)?;
            match (is_modern(&peer), wants) {
                (true, _) => {
                    self.resubscribe.notify_one();
                    Ok(())
                }
                (false, true) => peer.subscribe(SubscribeRequestParams::new(uri)).await,
                (false, false) => peer.unsubscribe(UnsubscribeRequestParams::new(uri)).await,
            }
        };
        let told = tokio::time::timeout(timeout, told).await.unwrap_or(Err(ServiceError::Timeout { timeout }));
        match told {
            // It is told when it is connected to again.
            Err(ServiceError::TransportClosed) if wants && promised => Ok(()),
            Err(error) => {
                if wants {
                    lock(&self.wanted).remove(uri);
                }
                Err(error)
            }
            Ok(()) => Ok(()),
        }
    }
}
