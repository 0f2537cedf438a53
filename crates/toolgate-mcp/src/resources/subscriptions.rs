//! Manages the subscriptions of clients to resources: limits, synchronization with upstreams, and
//! notifications.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rmcp::model::{ErrorData, ResourceUpdatedNotificationParam};
use rmcp::service::Peer;
use rmcp::{RoleServer, ServiceError};
use toolgate::SessionKey;

use crate::gateway::{ActiveConfig, Gateway, lock};
use crate::resources::{MAX_RESOURCE_URI_BYTES, ResourceLocation};
use crate::server::identity;
use crate::server::identity::Caller;
use crate::upstream::{MAX_SUBSCRIBED_URI_BYTES, UpstreamSupervisor};

/// Maximum number of subscriptions: of a client, in total, and of a principal if there are several.
pub(crate) const MAX_SUBSCRIPTIONS_PER_CLIENT: usize = 1_000;
const MAX_SUBSCRIPTIONS: usize = 50_000;
const MAX_SUBSCRIPTIONS_PER_PRINCIPAL: usize = MAX_SUBSCRIPTIONS / 10;

/// Maximum bytes of subscribed URIs of a principal at one upstream, if there are several
/// principals.
const MAX_URI_BYTES_PER_PRINCIPAL: usize = MAX_SUBSCRIBED_URI_BYTES / 10;

/// Name of an upstream, and URI of a resource there.
pub(crate) type ResourceKey = (String, String);

/// A client that is notified of changes.
pub(crate) struct ChangeListener {
    pub(crate) caller: Caller,
    pub(crate) agent: String,
    /// Session in which the client started to listen.
    pub(crate) key: SessionKey,
    /// Whether the client uses standard streams, where no token is required.
    pub(crate) is_local: bool,
    /// Whether the client has a session, which may continue with another token of the same rights.
    pub(crate) has_session: bool,
}

impl ChangeListener {
    /// Returns whether the current configuration still admits the listener.
    pub(crate) fn is_admitted(&self, active: &ActiveConfig) -> bool {
        (self.is_local || active.authenticator.can_reauthenticate(&self.caller, self.has_session))
            && identity::resolve_agent(active, &self.caller, Some(&self.agent)).is_ok()
    }

    /// Returns whether the listener may still see the resources of an upstream.
    pub(crate) fn can_see(&self, active: &ActiveConfig, upstream: &str) -> bool {
        let mut supervisors = active.upstreams_by_agent.get(&self.agent).into_iter().flatten();
        supervisors.any(|supervisor| {
            supervisor.upstream.name == upstream && supervisor.upstream.exposes_resources
        }) && self.is_admitted(active)
    }
}

/// A subscription of one connection to a resource.
#[derive(Clone)]
struct ResourceSubscriber {
    connection_id: u64,
    listener: Arc<ChangeListener>,
    /// Receives notifications; `None` if the connection filters all updates itself and is only
    /// counted.
    peer: Option<Peer<RoleServer>>,
    address: String,
    /// Whether a notification is being sent, and whether the resource has changed since.
    notify_state: Arc<AtomicU8>,
}

const NOTIFY_IDLE: u8 = 0;
const NOTIFY_SENDING: u8 = 1;
const NOTIFY_PENDING: u8 = 2;

/// All subscriptions and their numbers.
#[derive(Default)]
pub(crate) struct ResourceSubscriptions(Mutex<SubscriptionIndex>);

#[derive(Default)]
struct SubscriptionIndex {
    by_key: HashMap<ResourceKey, Vec<ResourceSubscriber>>,
    by_connection: HashMap<u64, usize>,
    by_principal: HashMap<String, usize>,
    /// Bytes of subscribed URIs, by principal and upstream.
    uri_bytes: HashMap<(String, String), usize>,
}

impl SubscriptionIndex {
    /// Returns how many more subscriptions are possible, also for a principal with its own limit.
    fn remaining(&self, principal: Option<&str>) -> usize {
        let used = principal
            .map_or(0, |principal| self.by_principal.get(principal).copied().unwrap_or_default());
        MAX_SUBSCRIPTIONS.saturating_sub(self.by_connection.values().sum()).min(
            if principal.is_some() {
                MAX_SUBSCRIPTIONS_PER_PRINCIPAL.saturating_sub(used)
            } else {
                MAX_SUBSCRIPTIONS
            },
        )
    }

    /// Returns how many more bytes of URIs a principal may subscribe to at an upstream.
    fn remaining_bytes(&self, principal: Option<&str>, upstream: &str) -> usize {
        let used_bytes = |principal: &str| {
            self.uri_bytes
                .get(&(principal.to_owned(), upstream.to_owned()))
                .copied()
                .unwrap_or_default()
        };
        principal.map_or(usize::MAX, |principal| {
            MAX_URI_BYTES_PER_PRINCIPAL.saturating_sub(used_bytes(principal))
        })
    }
}

/// Returns the principal if it has its own limit: only if tokens are required.
fn limited_principal<'c>(
    active: &ActiveConfig,
    caller: &'c Caller,
    is_local: bool,
) -> Option<&'c str> {
    (!is_local && !active.authenticator.is_auth_disabled()).then_some(caller.principal.as_str())
}

impl Gateway {
    /// Returns how many more resources a caller may subscribe to.
    pub(crate) fn remaining_subscriptions(
        &self,
        active: &ActiveConfig,
        caller: &Caller,
        is_local: bool,
    ) -> usize {
        lock(&self.0.subscriptions.0).remaining(limited_principal(active, caller, is_local))
    }

    /// Returns those resources that fit into the limits of the caller and of their upstreams.
    pub(crate) fn filter_by_limits(
        &self,
        active: &ActiveConfig,
        caller: &Caller,
        is_local: bool,
        locations: impl Iterator<Item = ResourceLocation>,
    ) -> Vec<ResourceLocation> {
        let principal = limited_principal(active, caller, is_local);
        let index = lock(&self.0.subscriptions.0);
        let mut remaining: HashMap<String, (usize, usize)> = HashMap::new();
        let fits = |location: &ResourceLocation| {
            let name = &location.link.upstream.name;
            let subscribed = lock(&location.link.subscribed_uris);
            let initial = || {
                (
                    index.remaining_bytes(principal, name),
                    MAX_SUBSCRIBED_URI_BYTES.saturating_sub(subscribed.bytes()),
                )
            };
            let (own_bytes, upstream_bytes) = remaining.entry(name.clone()).or_insert_with(initial);
            let new_bytes = if subscribed.contains(&location.uri) { 0 } else { location.uri.len() };
            let reduced = own_bytes
                .checked_sub(location.uri.len())
                .zip(upstream_bytes.checked_sub(new_bytes));
            reduced.map(|reduced| (*own_bytes, *upstream_bytes) = reduced).is_some()
        };
        locations.filter(fits).collect()
    }

    /// Subscribes a client to a resource.
    ///
    /// With a `peer`, the gateway notifies the client. Without one, the client filters all updates.
    /// Such a subscription is already acknowledged, so a disconnected upstream is subscribed when
    /// it connects again.
    pub(crate) async fn subscribe(
        &self,
        location: &ResourceLocation,
        connection_id: u64,
        listener: &Arc<ChangeListener>,
        peer: Option<Peer<RoleServer>>,
    ) -> Result<(), ErrorData> {
        let is_acknowledged = peer.is_none();
        if location.uri.len() > MAX_RESOURCE_URI_BYTES {
            return Err(ErrorData::invalid_params(
                format!("a resource URI may have at most {MAX_RESOURCE_URI_BYTES} bytes"),
                None,
            ));
        }
        let active = self.active_config();
        {
            let mut index = lock(&self.0.subscriptions.0);
            let subscription_count =
                index.by_connection.get(&connection_id).copied().unwrap_or_default();
            let principal = limited_principal(&active, &listener.caller, listener.is_local);
            let is_full =
                index.remaining_bytes(principal, &location.link.upstream.name) < location.uri.len();
            if subscription_count >= MAX_SUBSCRIPTIONS_PER_CLIENT
                || is_full
                || index.remaining(principal) == 0
            {
                let message = format!(
                    "too many subscriptions: the limit is {MAX_SUBSCRIPTIONS_PER_CLIENT} resources of a client, {MAX_SUBSCRIPTIONS_PER_PRINCIPAL} of a principal (with {MAX_URI_BYTES_PER_PRINCIPAL} bytes of URIs at one upstream), and {MAX_SUBSCRIPTIONS} in total"
                );
                return Err(ErrorData::invalid_request(message, None));
            }
            let subscribers = index.by_key.entry(location.key()).or_default();
            if subscribers.iter().all(|subscriber| subscriber.connection_id != connection_id) {
                subscribers.push(ResourceSubscriber {
                    connection_id,
                    listener: Arc::clone(listener),
                    peer,
                    address: location.address.clone(),
                    notify_state: Arc::default(),
                });
                *index.by_connection.entry(connection_id).or_default() += 1;
                *index.by_principal.entry(listener.caller.principal.clone()).or_default() += 1;
                let principal_and_upstream =
                    (listener.caller.principal.clone(), location.link.upstream.name.clone());
                *index.uri_bytes.entry(principal_and_upstream).or_default() += location.uri.len();
            }
        }
        drop(active);
        let subscribed =
            self.sync_subscription(&location.link, &location.uri, is_acknowledged).await;
        if subscribed.is_err() {
            self.spawn_sync(
                self.remove_subscriptions_of(connection_id, |key, _| *key == location.key()),
                false,
            );
        }
        subscribed.map_err(crate::server::handler::client_error)
    }

    /// Subscribes at an upstream, or unsubscribes if no client is subscribed.
    async fn sync_subscription(
        &self,
        supervisor: &Arc<UpstreamSupervisor>,
        uri: &str,
        is_acknowledged: bool,
    ) -> Result<(), ServiceError> {
        // A reload may have replaced the upstream of this name.
        let supervisor = self
            .active_config()
            .upstreams
            .supervisor(&supervisor.upstream.name)
            .cloned()
            .unwrap_or_else(|| Arc::clone(supervisor));
        let (gateway, key) = (self.clone(), (supervisor.upstream.name.clone(), uri.to_owned()));
        supervisor
            .update_subscription(uri.to_owned(), is_acknowledged, move || {
                lock(&gateway.0.subscriptions.0).by_key.contains_key(&key)
            })
            .await
    }

    /// Ends a subscription of a client.
    pub(crate) async fn unsubscribe(
        &self,
        connection_id: u64,
        address: &str,
    ) -> Result<(), ErrorData> {
        for (supervisor, uri) in self
            .remove_subscriptions_of(connection_id, |_, subscriber| subscriber.address == address)
        {
            self.sync_subscription(&supervisor, &uri, false)
                .await
                .map_err(crate::server::handler::client_error)?;
        }
        Ok(())
    }

    /// Ends all subscriptions of a connection, and unsubscribes at upstreams where none is left.
    pub(crate) fn unsubscribe_all(&self, connection_id: u64) {
        self.spawn_sync(self.remove_subscriptions_of(connection_id, |_, _| true), false);
    }

    /// Ends subscriptions that the configuration does not permit any more, after a reload.
    pub(crate) fn drop_revoked_subscriptions(&self) {
        let active = self.active_config();
        self.spawn_sync(
            self.remove_subscriptions(|key, subscriber| {
                !subscriber.listener.can_see(&active, &key.0)
            }),
            false,
        );
    }

    /// Synchronizes the subscriptions of upstreams that a reload has started.
    pub(crate) fn sync_subscriptions(&self) {
        let active = self.active_config();
        let subscribed: HashSet<ResourceKey> =
            lock(&self.0.subscriptions.0).by_key.keys().cloned().collect();
        let mut outdated = Vec::new();
        for (name, uri) in &subscribed {
            if let Some(supervisor) = active
                .upstreams
                .supervisor(name)
                .filter(|supervisor| !lock(&supervisor.subscribed_uris).contains(uri))
            {
                outdated.push((Arc::clone(supervisor), uri.clone()));
            }
        }
        for supervisor in active.upstreams.supervisors() {
            let is_unwanted = |uri: &&String| {
                !subscribed.contains(&(supervisor.upstream.name.clone(), (*uri).clone()))
            };
            outdated.extend(
                lock(&supervisor.subscribed_uris)
                    .iter()
                    .filter(is_unwanted)
                    .map(|uri| (Arc::clone(supervisor), uri.clone())),
            );
        }
        self.spawn_sync(outdated, true);
    }

    /// Updates subscriptions at upstreams in the background.
    fn spawn_sync(&self, changes: Vec<(Arc<UpstreamSupervisor>, String)>, is_acknowledged: bool) {
        if changes.is_empty() {
            return;
        }
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let gateway = self.clone();
            runtime.spawn(async move {
                for (supervisor, uri) in changes {
                    let _: Result<(), ServiceError> =
                        gateway.sync_subscription(&supervisor, &uri, is_acknowledged).await;
                }
            });
        }
    }

    /// Removes subscriptions of a connection; returns the resources without any other.
    fn remove_subscriptions_of(
        &self,
        connection_id: u64,
        matches: impl Fn(&ResourceKey, &ResourceSubscriber) -> bool,
    ) -> Vec<(Arc<UpstreamSupervisor>, String)> {
        self.remove_subscriptions(|key, subscriber| {
            subscriber.connection_id == connection_id && matches(key, subscriber)
        })
    }

    /// Removes subscriptions; returns the resources without any other.
    fn remove_subscriptions(
        &self,
        is_removed: impl Fn(&ResourceKey, &ResourceSubscriber) -> bool,
    ) -> Vec<(Arc<UpstreamSupervisor>, String)> {
        let mut unused = Vec::new();
        {
            let mut index = lock(&self.0.subscriptions.0);
            let SubscriptionIndex { by_key, by_connection, by_principal, uri_bytes } = &mut *index;
            by_key.retain(|key, subscribers| {
                subscribers.retain(|subscriber| {
                    if !is_removed(key, subscriber) {
                        return true;
                    }
                    let principal = &subscriber.listener.caller.principal;
                    for count in [
                        by_connection.get_mut(&subscriber.connection_id),
                        by_principal.get_mut(principal),
                    ]
                    .into_iter()
                    .flatten()
                    {
                        *count = count.saturating_sub(1);
                    }
                    if let Some(count) = uri_bytes.get_mut(&(principal.clone(), key.0.clone())) {
                        *count = count.saturating_sub(key.1.len());
                    }
                    false
                });
                if subscribers.is_empty() {
                    unused.push(key.clone());
                }
                !subscribers.is_empty()
            });
            by_connection.retain(|_, count| *count > 0);
            by_principal.retain(|_, count| *count > 0);
            uri_bytes.retain(|_, count| *count > 0);
        }
        let active = self.active_config();
        unused
            .into_iter()
            .filter_map(|(name, uri)| {
                active.upstreams.supervisor(&name).map(|supervisor| (Arc::clone(supervisor), uri))
            })
            .collect()
    }

    /// Forwards updates of upstreams to subscribers, until shutdown.
    pub(crate) async fn forward_updates(self) {
        let mut updates = self.active_config().upstreams.resource_updates().subscribe();
        loop {
            let key = tokio::select! {
                key = updates.recv() => key,
                () = self.0.stop.cancelled() => return,
            };
            match key {
                Ok(key) => self.notify_subscribers(&key),
                // Some updates were lost, so any resource may have changed.
                Err(tokio::sync::broadcast::error::RecvError::Lagged(_)) => {
                    let all: Vec<ResourceKey> =
                        lock(&self.0.subscriptions.0).by_key.keys().cloned().collect();
                    all.iter().for_each(|key| self.notify_subscribers(key));
                }
                Err(tokio::sync::broadcast::error::RecvError::Closed) => return,
            }
        }
    }

    /// Notifies the subscribers of one resource.
    fn notify_subscribers(&self, key: &ResourceKey) {
        let mut subscribers =
            lock(&self.0.subscriptions.0).by_key.get(key).cloned().unwrap_or_default();
        // The current configuration decides: a reload may have withdrawn access.
        let active = self.active_config();
        subscribers.retain(|subscriber| subscriber.listener.can_see(&active, &key.0));
        let gate = active.runtime.clone();
        drop(active);
        for ResourceSubscriber { listener, peer, address, notify_state, .. } in subscribers {
            // A subscriber that is still being notified may have read the old state, so it is
            // notified again. It does not delay other subscribers.
            let Some(peer) =
                peer.filter(|_| notify_state.swap(NOTIFY_PENDING, Ordering::AcqRel) == NOTIFY_IDLE)
            else {
                continue;
            };
            let gate = gate.clone();
            tokio::spawn(async move {
                loop {
                    notify_state.store(NOTIFY_SENDING, Ordering::Release);
                    // A paused session gets no notifications.
                    if gate.paused_error(&listener.key).await.is_none() {
                        let notification = peer.notify_resource_updated(
                            ResourceUpdatedNotificationParam::new(address.clone()),
                        );
                        let _ = tokio::time::timeout(Duration::from_secs(1), notification).await;
                    }
                    if notify_state
                        .compare_exchange(
                            NOTIFY_SENDING,
                            NOTIFY_IDLE,
                            Ordering::AcqRel,
                            Ordering::Acquire,
                        )
                        .is_ok()
                    {
                        break;
                    }
                }
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subscriptions_are_limited_per_principal() {
        let mut index = SubscriptionIndex::default();
        index.by_connection.insert(1, MAX_SUBSCRIPTIONS_PER_PRINCIPAL);
        index.by_principal.insert("ann".to_owned(), MAX_SUBSCRIPTIONS_PER_PRINCIPAL);
        assert_eq!(
            (index.remaining(Some("ann")), index.remaining(Some("bob")), index.remaining(None)),
            (
                0,
                MAX_SUBSCRIPTIONS_PER_PRINCIPAL,
                MAX_SUBSCRIPTIONS - MAX_SUBSCRIPTIONS_PER_PRINCIPAL
            )
        );
        assert_eq!(
            (index.remaining_bytes(Some("ann"), "x"), index.remaining_bytes(None, "x")),
            (MAX_URI_BYTES_PER_PRINCIPAL, usize::MAX)
        );
        index.uri_bytes.insert(("ann".to_owned(), "x".to_owned()), MAX_URI_BYTES_PER_PRINCIPAL - 5);
        assert_eq!(
            (index.remaining_bytes(Some("ann"), "x"), index.remaining_bytes(Some("ann"), "y")),
            (5, MAX_URI_BYTES_PER_PRINCIPAL)
        );
        index.by_connection.insert(2, MAX_SUBSCRIPTIONS - MAX_SUBSCRIPTIONS_PER_PRINCIPAL);
        assert_eq!((index.remaining(Some("bob")), index.remaining(None)), (0, 0));
    }
}
