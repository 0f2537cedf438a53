//! What is said beside calls: what an upstream is asked for, and that lists or resources have changed.

use std::time::Duration;

use rmcp::model::{PaginatedRequestParams, ServerNotification, SubscribeRequestParams, SubscriptionFilter, UnsubscribeRequestParams};
use rmcp::service::Peer;
use rmcp::{ErrorData, RoleClient, ServiceError};

use super::link::{Link, is_modern};
use crate::gateway::lock;

/// The most that a list of an upstream may hold, and the most pages.
const LONGEST_LIST: usize = 10_000;
const MOST_PAGES: usize = 1_000;

/// All of a list that may come in pages.
pub(super) async fn pages<T, L, F: Future<Output = Result<L, ServiceError>>>(
    ask: impl Fn(Option<PaginatedRequestParams>) -> F,
    read: impl Fn(L) -> (Vec<T>, Option<String>),
) -> Result<Vec<T>, ServiceError> {
    let (mut all, mut cursor) = (Vec::new(), None);
    for _ in 0..MOST_PAGES {
        let page = PaginatedRequestParams::default().with_cursor(cursor.clone());
        let (part, next) = read(ask(Some(page)).await?);
        all.extend(part);
        match next {
            None if all.len() <= LONGEST_LIST => return Ok(all),
            Some(next) if all.len() <= LONGEST_LIST && cursor.as_ref() != Some(&next) => cursor = Some(next),
            _ => break,
        }
    }
    Err(ServiceError::McpError(ErrorData::internal_error("its list has no end", None)))
}

/// What somebody tells soon; else nothing.
pub(super) async fn shortly<T>(listed: impl Future<Output = Result<Vec<T>, ServiceError>>) -> Vec<T> {
    tokio::time::timeout(Duration::from_secs(8), listed).await.ok().and_then(Result::ok).unwrap_or_default()
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

    /// Hears of changes from one of 2026-07-28: those before say them unasked.
    pub(super) async fn hear_changes(&self, peer: &Peer<RoleClient>) {
        let modern = is_modern(peer);
        if !modern {
            return std::future::pending().await;
        }
        loop {
            let mut filter = SubscriptionFilter::builder().tools_list_changed().prompts_list_changed().resources_list_changed().build();
            let wanted: Vec<String> = lock(&self.wanted).iter().cloned().collect();
            filter.resource_subscriptions = (!wanted.is_empty()).then_some(wanted);
            let Ok(Ok(mut subscription)) = tokio::time::timeout(Duration::from_secs(10), peer.listen(filter)).await else { break };
            loop {
                let said = tokio::select! {
                    said = subscription.next() => said,
                    () = self.resubscribe.notified() => break,
                };
                match said {
                    Ok(Some(ServerNotification::ResourceUpdatedNotification(updated))) => self.updated(updated.params.uri),
                    Ok(Some(_)) => self.lists_changed(),
                    Ok(None) | Err(_) => {
                        tokio::time::sleep(Duration::from_secs(1)).await;
                        break;
                    }
                }
            }
        }
        std::future::pending().await
    }

    /// What it answers to a question that is no call, when a seat is free and within its time; whether it does is noted.
    pub(crate) async fn asked<T>(&self, question: impl Future<Output = Result<T, ServiceError>>) -> Result<T, ServiceError> {
        let timeout = self.upstream.timeout;
        let answered = async {
            let _seat = self.seats.acquire().await;
            question.await
        };
        let said = tokio::time::timeout(timeout, answered).await.unwrap_or(Err(ServiceError::Timeout { timeout }));
        match &said {
            Err(ServiceError::TransportSend(_) | ServiceError::TransportClosed | ServiceError::Timeout { .. }) => self.failed(),
            _ => self.answered(),
        }
        said
    }

    /// A resource of it has changed.
    pub(crate) fn updated(&self, uri: String) {
        let _ = self.updates.send((self.upstream.name.clone(), uri));
    }

    /// Somebody wants to hear of a resource, or nobody does any more.
    pub(crate) async fn subscribe(&self, uri: &str, wants: bool) -> Result<(), ServiceError> {
        let peer = self.peer().ok_or(ServiceError::TransportClosed)?;
        let news = match wants {
            true => lock(&self.wanted).insert(uri.to_owned()),
            false => lock(&self.wanted).remove(uri),
        };
        if !news {
            return Ok(());
        }
        let modern = is_modern(&peer);
        match (modern, wants) {
            (true, _) => {
                self.resubscribe.notify_one();
                Ok(())
            }
            (false, true) => peer.subscribe(SubscribeRequestParams::new(uri)).await.inspect_err(|_| {
                lock(&self.wanted).remove(uri);
            }),
            (false, false) => peer.unsubscribe(UnsubscribeRequestParams::new(uri)).await,
        }
    }
}
