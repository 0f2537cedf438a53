//! What is said beside calls: what an upstream is asked for, and that lists or resources have changed.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::FutureExt as _;
use rmcp::model::{
    PaginatedRequestParams, ServerNotification, SetLevelRequestParams, SubscribeRequestParams, SubscriptionFilter, UnsubscribeRequestParams,
};
use rmcp::service::{Peer, Subscription};
use rmcp::{ErrorData, RoleClient, ServiceError};
use serde::Serialize;
use tokio::time::Instant;

use super::handler::Trouble;
use super::link::{Fault, Link, is_modern};
use crate::gateway::lock;

/// The most that a list of an upstream may hold, in entries, pages and bytes.
const LONGEST_LIST: usize = 10_000;
const MOST_PAGES: usize = 1_000;
const MOST_BYTES: usize = 32 << 20;
/// How many bytes all addresses have together that it is asked to tell of: it is asked in one message.
pub(crate) const MOST_WANTED: usize = 1 << 20;
/// How soon it is asked again to tell of changes, at first and at last; and where it does not seem to know that.
const SOON: Duration = Duration::from_secs(1);
const LATE: Duration = Duration::from_secs(60);
const SELDOM: Duration = Duration::from_secs(600);
/// Who was listened to for so long can be.
const STEADY: Duration = Duration::from_secs(10);
/// Many servers, rmcp's among them, do not end for seconds when they are hung up on in the very moment after they have said that they
/// will tell.
const SETTLED: Duration = Duration::from_millis(50);

/// What somebody wants to hear of, and how much that is to ask for.
#[derive(Clone, Default)]
pub(crate) struct Wanted {
    uris: BTreeSet<String>,
    bytes: usize,
}

impl Wanted {
    pub(crate) fn contains(&self, uri: &str) -> bool {
        self.uris.contains(uri)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &String> {
        self.uris.iter()
    }

    /// How many bytes the addresses have.
    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether it was not there.
    fn insert(&mut self, uri: &str) -> bool {
        let is_new = self.uris.insert(uri.to_owned());
        self.bytes += if is_new { uri.len() } else { 0 };
        is_new
    }

    /// Whether it was there.
    fn remove(&mut self, uri: &str) -> bool {
        let was_there = self.uris.remove(uri);
        self.bytes -= if was_there { uri.len() } else { 0 };
        was_there
    }
}

/// What it is asked to tell of: resources, or its lists.
fn filter(wanted: &[String]) -> SubscriptionFilter {
    if wanted.is_empty() {
        return SubscriptionFilter::builder().tools_list_changed().prompts_list_changed().resources_list_changed().build();
    }
    let mut filter = SubscriptionFilter::new();
    filter.resource_subscriptions = Some(wanted.to_vec());
    filter
}

/// What is said next over a subscription, if there is one.
async fn next(heard: &mut Option<Subscription>) -> Result<Option<ServerNotification>, ServiceError> {
    match heard {
        Some(heard) => heard.next().await,
        None => std::future::pending().await,
    }
}

/// At a moment, if there is one.
async fn at(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}

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
        // Some say with a cursor without a letter that there is no more.
        match next.filter(|next| !next.is_empty()) {
            None => return Ok((all, true)),
            Some(next) if cursor.as_ref() == Some(&next) => break,
            Some(next) => cursor = Some(next),
        }
    }
    Ok((all, false))
}

impl Link {
    /// Who knew from which level on log messages are wanted is told so again. One of 2026-07-28 is told with each request.
    pub(super) async fn say_level(&self, peer: &Peer<RoleClient>) {
        let level = *lock(&self.level);
        let Some(level) = level.filter(|_| !is_modern(peer) && self.offer().capabilities.logging.is_some()) else { return };
        let _ = tokio::time::timeout(Duration::from_secs(5), peer.set_level(SetLevelRequestParams::new(level))).await;
    }

    /// What was wanted of the connection before is wanted of this one.
    pub(super) async fn subscribe_again(&self, peer: &Peer<RoleClient>) {
        let modern = is_modern(peer);
        let wanted: Vec<String> = lock(&self.wanted).iter().cloned().collect();
        for uri in wanted.into_iter().filter(|_| !modern) {
            let _ = tokio::time::timeout(Duration::from_secs(5), peer.subscribe(SubscribeRequestParams::new(uri.clone()))).await;
            // It may have changed while nobody heard.
            self.updated(uri);
        }
    }

    /// Hears of changes from one of 2026-07-28, until it is to end: those before say them unasked. Of lists and of resources apart: which
    /// resources there are, clients say, and one that it does not like is not to silence the rest.
    pub(super) async fn hear_changes(&self, peer: &Peer<RoleClient>) {
        if !is_modern(peer) {
            return self.stop.cancelled().await;
        }
        tokio::join!(self.hear_of(peer, false), self.hear_of(peer, true));
    }

    /// Hears of changes of lists, or of resources that somebody wants to hear of.
    async fn hear_of(&self, peer: &Peer<RoleClient>, resources: bool) {
        let mut heard: Option<Subscription> = None;
        let (mut patience, mut begun) = (SOON, Instant::now());
        // When to ask; and whether something may have been said that nobody heard, as while it was away.
        let (mut due, mut deaf) = (Some(Instant::now()), self.starts.load(Ordering::Relaxed) > 1);
        // Whether it has ever let itself be listened to.
        let mut knows = false;
        loop {
            if !self.stop.is_cancelled() && due.is_some_and(|due| due <= Instant::now()) {
                let wanted: Vec<String> = if resources { lock(&self.wanted).iter().cloned().collect() } else { Vec::new() };
                let before = heard.is_some();
                due = None;
                if resources && wanted.is_empty() {
                    (heard, deaf) = (None, false);
                } else if let Some(opened) = self.listen_anew(peer, filter(&wanted), &mut heard).await {
                    deaf |= before && heard.is_none();
                    // What was said over the one before has come before this.
                    while let Some(said) = heard.as_mut().and_then(|before| before.next().now_or_never()) {
                        if !self.pass_on(said) {
                            break;
                        }
                    }
                    (heard, begun, knows) = (Some(opened), Instant::now(), true);
                    if std::mem::take(&mut deaf) {
                        self.relist.notify_one();
                        wanted.into_iter().for_each(|uri| self.updated(uri));
                    }
                } else {
                    // It may not know this at all; then there is nothing to hear, and it is not asked often.
                    due = Instant::now().checked_add(if resources || knows { patience } else { SELDOM });
                    patience = (patience * 2).min(LATE);
                    deaf |= heard.is_none();
                }
            }
            tokio::select! {
                biased;
                () = self.stop.cancelled() => {
                    // Many do not end while somebody listens.
                    if let Some(mut heard) = heard {
                        let _ = heard.cancel().await;
                        tokio::time::sleep(SETTLED.saturating_sub(begun.elapsed())).await;
                    }
                    return;
                }
                () = self.resubscribe.notified(), if resources => due = Some(Instant::now()),
                () = at(due) => {}
                said = next(&mut heard) => {
                    if !self.pass_on(said) {
                        (heard, deaf) = (None, true);
                        // One that ends again and again is not asked all the time.
                        patience = if begun.elapsed() > STEADY { SOON } else { patience };
                        due = Instant::now().checked_add(patience);
                        patience = (patience * 2).min(LATE);
                    }
                }
            }
        }
    }

    /// Asks to be told of changes, and hears meanwhile what is said to whoever asked before.
    async fn listen_anew(
        &self,
        peer: &Peer<RoleClient>,
        filter: SubscriptionFilter,
        before: &mut Option<Subscription>,
    ) -> Option<Subscription> {
        let mut opening = std::pin::pin!(tokio::time::timeout(Duration::from_secs(10), peer.listen(filter)));
        loop {
            tokio::select! {
                opened = &mut opening => return opened.ok()?.ok(),
                said = next(before) => {
                    if !self.pass_on(said) {
                        *before = None;
                    }
                }
            }
        }
    }

    /// Passes on what was said; whether more may be.
    fn pass_on(&self, said: Result<Option<ServerNotification>, ServiceError>) -> bool {
        match said {
            Ok(Some(ServerNotification::ResourceUpdatedNotification(updated))) => self.updated(updated.params.uri),
            Ok(Some(_)) => self.lists_changed(),
            Ok(None) | Err(_) => return false,
        }
        true
    }

    /// What it answers to a question that is no call, when a seat is free and within its time; whether it does is noted. That others
    /// have all seats is not its fault. Who is left alone is not asked.
    pub(crate) async fn asked<T>(&self, question: impl Future<Output = Result<T, ServiceError>>) -> Result<T, ServiceError> {
        if self.rests().is_some() {
            let message = "the upstream has failed again and again, and is left alone for a while; try again later";
            return Err(ServiceError::McpError(ErrorData::internal_error(message, None)));
        }
        let (timeout, generation) = (self.upstream.timeout, self.standing().map(|standing| standing.generation));
        let full = || ErrorData::internal_error("the upstream has as many calls as it takes; try again later", None);
        let seat = tokio::time::timeout(timeout, self.seats.acquire()).await;
        let _seat = seat.map_err(|_| ServiceError::McpError(full()))?.map_err(|_| ServiceError::TransportClosed)?;
        // What it asks back now may be about this, and is for no client of a call.
        let _other = self.routes.other();
        let said = tokio::time::timeout(timeout, question).await.unwrap_or(Err(ServiceError::Timeout { timeout }));
        let trouble = match &said {
            Err(ServiceError::TransportSend(why)) => Some(Trouble::of(why)),
            _ => None,
        };
        match (&said, trouble, generation) {
            // It is connected to anew, with a new token.
            (_, Some(Trouble::Status(401, _)), Some(generation)) if self.may_renew() => self.lost(generation),
            // Or anew, because it does not know its session any more.
            (_, Some(Trouble::Lost), Some(generation)) => self.lost(generation),
            // Who is turned away does not keep all others from it.
            (_, Some(Trouble::Status(..)), _) => {}
            (Err(ServiceError::Timeout { .. }), _, Some(generation)) => self.failed(generation, Fault::Late),
            // Whose only stream is over is started again by whoever watches it.
            (Err(ServiceError::TransportClosed), ..) if self.has_one_stream() => {}
            (Err(ServiceError::TransportSend(_) | ServiceError::TransportClosed), _, Some(generation)) => {
                self.failed(generation, Fault::Broken);
            }
            // Nobody was there to begin with.
            (Err(ServiceError::TransportSend(_) | ServiceError::TransportClosed | ServiceError::Timeout { .. }), ..) => {}
            (Ok(_), ..) => self.served(),
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
        let news = {
            let mut wanted = lock(&self.wanted);
            if wants && !wanted.contains(uri) && wanted.bytes() + uri.len() > MOST_WANTED {
                let full = ErrorData::internal_error("too much is wanted of the upstream already; try again later", None);
                return Err(ServiceError::McpError(full));
            }
            if wants { wanted.insert(uri) } else { wanted.remove(uri) }
        };
        if !news {
            return Ok(());
        }
        let timeout = self.upstream.timeout;
        let told = async {
            let standing = self.standing().ok_or(ServiceError::TransportClosed)?;
            let peer = &standing.peer;
            let told = match (is_modern(peer), wants) {
                (true, _) => {
                    self.resubscribe.notify_one();
                    Ok(())
                }
                (false, true) => peer.subscribe(SubscribeRequestParams::new(uri)).await,
                (false, false) => peer.unsubscribe(UnsubscribeRequestParams::new(uri)).await,
            };
            match told {
                // It is connected to anew.
                Err(ServiceError::TransportSend(why)) if matches!(Trouble::of(&why), Trouble::Lost) => {
                    self.lost(standing.generation);
                    Err(ServiceError::TransportClosed)
                }
                told => told,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_cursor_without_a_letter_is_the_end() {
        let pages_of = async |cursors: [&str; 2]| {
            let ask =
                |page: Option<PaginatedRequestParams>| async move { Ok::<_, ServiceError>(page.and_then(|page| page.cursor).is_some()) };
            pages(ask, |later: bool| (vec![later], Some(cursors[usize::from(later)].to_owned()))).await.unwrap()
        };
        assert_eq!(pages_of(["", "b"]).await, (vec![false], true));
        assert_eq!(pages_of(["a", ""]).await, (vec![false, true], true));
        // Who goes round in circles has no end.
        assert!(!pages_of(["a", "a"]).await.1);
    }
}
