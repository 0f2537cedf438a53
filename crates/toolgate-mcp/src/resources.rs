//! Maps the resources of all upstreams into one address space, and manages subscriptions.
//!
//! Clients see `toolgate://UPSTREAM/` before the URI of the upstream, unless its `prefix` is empty.
//! Equal URIs of two upstreams are therefore different resources.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rmcp::model::{
    ErrorData, ResourceContents, ResourceUpdatedNotificationParam, SubscriptionFilter,
};
use rmcp::service::Peer;
use rmcp::{RoleServer, ServiceError};
use serde_json::json;
use toolgate::SessionKey;

use crate::gateway::{ActiveConfig, Gateway, lock};
use crate::server::identity;
use crate::server::identity::Caller;
use crate::upstream::{MAX_SUBSCRIBED_URI_BYTES, UpstreamSupervisor};

/// Prefix of the addresses that toolgate creates.
const TOOLGATE_URI_PREFIX: &str = "toolgate://";
/// Maximum number of subscriptions: of a client, in total, and of a principal if there are several.
pub(crate) const MAX_SUBSCRIPTIONS_PER_CLIENT: usize = 1_000;
const MAX_SUBSCRIPTIONS: usize = 50_000;
const MAX_SUBSCRIPTIONS_PER_PRINCIPAL: usize = MAX_SUBSCRIPTIONS / 10;
/// Maximum bytes of subscribed URIs of a principal at one upstream, if there are several
/// principals.
const MAX_URI_BYTES_PER_PRINCIPAL: usize = MAX_SUBSCRIBED_URI_BYTES / 10;
/// Maximum length of a subscribed URI, in bytes.
const MAX_RESOURCE_URI_BYTES: usize = 2_048;

/// Returns the address that clients use for a URI of an upstream.
pub(crate) fn client_address(link: &UpstreamSupervisor, uri: &str) -> String {
    if link.upstream.prefix.is_empty() {
        uri.to_owned()
    } else {
        format!("{TOOLGATE_URI_PREFIX}{}/{uri}", link.upstream.name)
    }
}

/// Returns whether an upstream may use a URI: without a prefix, `toolgate://` is reserved.
pub(crate) fn is_allowed_uri(link: &UpstreamSupervisor, uri: &str) -> bool {
    !link.upstream.prefix.is_empty() || !uri.starts_with(TOOLGATE_URI_PREFIX)
}

/// An address of a client, resolved to an upstream and its URI. The resource need not exist.
pub(crate) struct ResourceLocation {
    pub(crate) link: Arc<UpstreamSupervisor>,
    /// URI at the upstream.
    pub(crate) uri: String,
    /// Address that the client uses.
    pub(crate) address: String,
}

impl ResourceLocation {
    /// Resolves an address for an agent.
    ///
    /// An address with `toolgate://` names its upstream. For any other, the upstream is the only
    /// one that lists it, that has a matching template, or that has resources at all.
    pub(crate) fn resolve(
        running: &ActiveConfig,
        agent: &str,
        address: &str,
    ) -> Result<Self, ErrorData> {
        let lists = |link: &UpstreamSupervisor| {
            link.catalog().resources.iter().any(|resource| resource.uri == address)
        };
        Self::resolve_among(&upstreams_with_resources(running, agent), address, &lists)
    }

    /// Resolves several addresses, and searches the lists of the upstreams only once.
    pub(crate) fn resolve_all<'a>(
        running: &ActiveConfig,
        agent: &str,
        addresses: impl Iterator<Item = &'a String>,
    ) -> Vec<Result<Self, ErrorData>> {
        let links = upstreams_with_resources(running, agent);
        let offers: Vec<_> = links.iter().map(|link| link.catalog()).collect();
        let listed: HashMap<&str, HashSet<&str>> = links
            .iter()
            .zip(&offers)
            .map(|(link, offer)| {
                (
                    link.upstream.name.as_str(),
                    offer.resources.iter().map(|resource| resource.uri.as_str()).collect(),
                )
            })
            .collect();
        let find = |address: &String| {
            let lists = |link: &UpstreamSupervisor| {
                listed
                    .get(link.upstream.name.as_str())
                    .is_some_and(|uris| uris.contains(address.as_str()))
            };
            Self::resolve_among(&links, address, &lists)
        };
        addresses.map(find).collect()
    }

    /// Resolves an address among these upstreams; `lists` returns whether an upstream lists it.
    fn resolve_among(
        links: &[&Arc<UpstreamSupervisor>],
        address: &str,
        lists: &dyn Fn(&UpstreamSupervisor) -> bool,
    ) -> Result<Self, ErrorData> {
        let found = |link: &Arc<UpstreamSupervisor>, uri: &str| Self {
            link: Arc::clone(link),
            uri: uri.to_owned(),
            address: address.to_owned(),
        };
        if let Some((name, uri)) =
            address.strip_prefix(TOOLGATE_URI_PREFIX).and_then(|rest| rest.split_once('/'))
        {
            let link = links
                .iter()
                .find(|link| link.upstream.name == name && !link.upstream.prefix.is_empty());
            return link.map(|link| found(link, uri)).ok_or_else(|| not_found_error(address));
        }
        let fits = |template: &str| {
            let head = template.split('{').next().unwrap_or_default();
            address == template || (!head.is_empty() && address.starts_with(head))
        };
        let matches = |link: &UpstreamSupervisor| {
            link.catalog().templates.iter().any(|template| fits(&template.uri_template))
        };
        let of = |has: &dyn Fn(&UpstreamSupervisor) -> bool| {
            links.iter().copied().filter(|link| has(link)).collect::<Vec<_>>()
        };
        let having = [of(lists), of(&matches), links.to_vec()]
            .into_iter()
            .find(|having| !having.is_empty())
            .unwrap_or_default();
        // Of several upstreams, the one without a prefix has the bare URI.
        match (having.as_slice(), having.iter().find(|link| link.upstream.prefix.is_empty())) {
            ([one], _) => Ok(found(one, address)),
            (_, Some(bare)) if lists(bare) || matches(bare) => Ok(found(bare, address)),
            (several, _) if several.iter().any(|link| lists(link) || matches(link)) => {
                Err(ambiguous_error(address, several))
            }
            _ => Err(not_found_error(address)),
        }
    }

    /// Replaces the URIs in contents by the addresses that the client uses.
    pub(crate) fn rewrite_uris(&self, contents: &mut [ResourceContents]) {
        if self.address == self.uri {
            return;
        }
        for content in contents {
            match content {
                ResourceContents::TextResourceContents { uri, .. }
                | ResourceContents::BlobResourceContents { uri, .. } => {
                    *uri = client_address(&self.link, uri);
                }
                _ => {}
            }
        }
    }

    fn key(&self) -> ResourceKey {
        (self.link.upstream.name.clone(), self.uri.clone())
    }

    /// Returns whether the upstream supports subscriptions and the URI is short enough.
    pub(crate) fn can_subscribe(&self) -> bool {
        let tells = self
            .link
            .catalog()
            .capabilities
            .resources
            .as_ref()
            .is_some_and(|resources| resources.subscribe == Some(true));
        tells && self.uri.len() <= MAX_RESOURCE_URI_BYTES
    }
}

/// Returns the upstreams of an agent that have resources.
fn upstreams_with_resources<'r>(
    running: &'r ActiveConfig,
    agent: &str,
) -> Vec<&'r Arc<UpstreamSupervisor>> {
    let shared = running.upstreams_by_agent.get(agent).into_iter().flatten();
    shared
        .filter(|link| {
            link.upstream.exposes_resources && link.catalog().capabilities.resources.is_some()
        })
        .collect()
}

/// Removes duplicate addresses, and those above the limit of a client.
pub(crate) fn limit_addresses(wanted: &mut SubscriptionFilter) {
    if let Some(addresses) = &mut wanted.resource_subscriptions {
        let mut seen = HashSet::new();
        addresses.retain(|address| {
            seen.len() < MAX_SUBSCRIPTIONS_PER_CLIENT && seen.insert(address.clone())
        });
    }
}

fn not_found_error(address: &str) -> ErrorData {
    ErrorData::resource_not_found(
        format!("there is no resource `{address}`"),
        Some(json!({"uri": address})),
    )
}

fn ambiguous_error(uri: &str, links: &[&Arc<UpstreamSupervisor>]) -> ErrorData {
    let names: Vec<String> =
        links.iter().map(|link| format!("`{}`", client_address(link, uri))).collect();
    let why = format!("several upstreams have `{uri}`; ask for one of them: {}", names.join(", "));
    ErrorData::resource_not_found(why, Some(json!({"uri": uri})))
}

/// Name of an upstream, and URI of a resource there.
pub(crate) type ResourceKey = (String, String);

/// A client that is notified of changes.
pub(crate) struct ChangeListener {
    pub(crate) caller: Caller,
    pub(crate) agent: String,
    /// Session in which it started to listen.
    pub(crate) key: SessionKey,
    /// Whether it uses standard streams, where no token is required.
    pub(crate) is_local: bool,
    /// Whether it has a session, which may continue with another token of the same rights.
    pub(crate) has_session: bool,
}

impl ChangeListener {
    /// Returns whether the current configuration still admits the listener.
    pub(crate) fn is_admitted(&self, running: &ActiveConfig) -> bool {
        (self.is_local || running.authenticator.can_reauthenticate(&self.caller, self.has_session))
            && identity::resolve_agent(running, &self.caller, Some(&self.agent)).is_ok()
    }

    /// Returns whether the listener may still see the resources of an upstream.
    pub(crate) fn can_see(&self, running: &ActiveConfig, upstream: &str) -> bool {
        let mut links = running.upstreams_by_agent.get(&self.agent).into_iter().flatten();
        links.any(|link| link.upstream.name == upstream && link.upstream.exposes_resources)
            && self.is_admitted(running)
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
        let own = principal
            .map_or(0, |principal| self.by_principal.get(principal).copied().unwrap_or_default());
        MAX_SUBSCRIPTIONS.saturating_sub(self.by_connection.values().sum()).min(
            if principal.is_some() {
                MAX_SUBSCRIPTIONS_PER_PRINCIPAL.saturating_sub(own)
            } else {
                MAX_SUBSCRIPTIONS
            },
        )
    }

    /// Returns how many more bytes of URIs a principal may subscribe to at an upstream.
    fn remaining_bytes(&self, principal: Option<&str>, upstream: &str) -> usize {
        let own = |principal: &str| {
            self.uri_bytes
                .get(&(principal.to_owned(), upstream.to_owned()))
                .copied()
                .unwrap_or_default()
        };
        principal.map_or(usize::MAX, |principal| {
            MAX_URI_BYTES_PER_PRINCIPAL.saturating_sub(own(principal))
        })
    }
}

/// Returns the principal if it has its own limit: only if tokens are required.
fn limited_principal<'c>(
    running: &ActiveConfig,
    caller: &'c Caller,
    local: bool,
) -> Option<&'c str> {
    (!local && !running.authenticator.is_auth_disabled()).then_some(caller.principal.as_str())
}

impl Gateway {
    /// Returns how many more resources a caller may subscribe to.
    pub(crate) fn remaining_subscriptions(
        &self,
        running: &ActiveConfig,
        caller: &Caller,
        local: bool,
    ) -> usize {
        lock(&self.0.subscriptions.0).remaining(limited_principal(running, caller, local))
    }

    /// Returns those resources that fit into the limits of the caller and of their upstreams.
    pub(crate) fn filter_by_limits(
        &self,
        running: &ActiveConfig,
        caller: &Caller,
        local: bool,
        places: impl Iterator<Item = ResourceLocation>,
    ) -> Vec<ResourceLocation> {
        let principal = limited_principal(running, caller, local);
        let known = lock(&self.0.subscriptions.0);
        let mut left: HashMap<String, (usize, usize)> = HashMap::new();
        let fits = |place: &ResourceLocation| {
            let name = &place.link.upstream.name;
            let wanted = lock(&place.link.subscribed_uris);
            let first = || {
                (
                    known.remaining_bytes(principal, name),
                    MAX_SUBSCRIBED_URI_BYTES.saturating_sub(wanted.bytes()),
                )
            };
            let (own, all) = left.entry(name.clone()).or_insert_with(first);
            let new = if wanted.contains(&place.uri) { 0 } else { place.uri.len() };
            let rest = own.checked_sub(place.uri.len()).zip(all.checked_sub(new));
            rest.map(|rest| (*own, *all) = rest).is_some()
        };
        places.filter(fits).collect()
    }

    /// Subscribes a client to a resource.
    ///
    /// With a `peer` the client is notified directly. Without one it filters all updates itself.
    /// Such a subscription is already acknowledged, so a disconnected upstream is subscribed when
    /// it connects again.
    pub(crate) async fn subscribe(
        &self,
        place: &ResourceLocation,
        door: u64,
        listener: &Arc<ChangeListener>,
        peer: Option<Peer<RoleServer>>,
    ) -> Result<(), ErrorData> {
        let promised = peer.is_none();
        if place.uri.len() > MAX_RESOURCE_URI_BYTES {
            return Err(ErrorData::invalid_params(
                format!("a resource URI may have at most {MAX_RESOURCE_URI_BYTES} bytes"),
                None,
            ));
        }
        let running = self.active_config();
        {
            let mut known = lock(&self.0.subscriptions.0);
            let own = known.by_connection.get(&door).copied().unwrap_or_default();
            let principal = limited_principal(&running, &listener.caller, listener.is_local);
            let full =
                known.remaining_bytes(principal, &place.link.upstream.name) < place.uri.len();
            if own >= MAX_SUBSCRIPTIONS_PER_CLIENT || full || known.remaining(principal) == 0 {
                let why = format!(
                    "too many subscriptions: the limit is {MAX_SUBSCRIPTIONS_PER_CLIENT} resources of a client, {MAX_SUBSCRIPTIONS_PER_PRINCIPAL} of a principal (with {MAX_URI_BYTES_PER_PRINCIPAL} bytes of URIs at one upstream), and {MAX_SUBSCRIPTIONS} in total"
                );
                return Err(ErrorData::invalid_request(why, None));
            }
            let subscribers = known.by_key.entry(place.key()).or_default();
            if subscribers.iter().all(|one| one.connection_id != door) {
                subscribers.push(ResourceSubscriber {
                    connection_id: door,
                    listener: Arc::clone(listener),
                    peer,
                    address: place.address.clone(),
                    notify_state: Arc::default(),
                });
                *known.by_connection.entry(door).or_default() += 1;
                *known.by_principal.entry(listener.caller.principal.clone()).or_default() += 1;
                let of_both = (listener.caller.principal.clone(), place.link.upstream.name.clone());
                *known.uri_bytes.entry(of_both).or_default() += place.uri.len();
            }
        }
        drop(running);
        let subscribed = self.sync_subscription(&place.link, &place.uri, promised).await;
        if subscribed.is_err() {
            self.spawn_sync(
                self.remove_subscriptions_of(door, |key, _| *key == place.key()),
                false,
            );
        }
        subscribed.map_err(crate::server::handler::client_error)
    }

    /// Subscribes at an upstream, or unsubscribes if no client is subscribed.
    async fn sync_subscription(
        &self,
        link: &Arc<UpstreamSupervisor>,
        uri: &str,
        promised: bool,
    ) -> Result<(), ServiceError> {
        // A reload may have replaced the upstream of this name.
        let link = self
            .active_config()
            .upstreams
            .supervisor(&link.upstream.name)
            .cloned()
            .unwrap_or_else(|| Arc::clone(link));
        let (gateway, key) = (self.clone(), (link.upstream.name.clone(), uri.to_owned()));
        link.update_subscription(uri.to_owned(), promised, move || {
            lock(&gateway.0.subscriptions.0).by_key.contains_key(&key)
        })
        .await
    }

    /// Ends a subscription of a client.
    pub(crate) async fn unsubscribe(&self, door: u64, address: &str) -> Result<(), ErrorData> {
        for (link, uri) in self.remove_subscriptions_of(door, |_, one| one.address == address) {
            self.sync_subscription(&link, &uri, false)
                .await
                .map_err(crate::server::handler::client_error)?;
        }
        Ok(())
    }

    /// Ends all subscriptions of a connection, and unsubscribes at upstreams where none is left.
    pub(crate) fn unsubscribe_all(&self, door: u64) {
        self.spawn_sync(self.remove_subscriptions_of(door, |_, _| true), false);
    }

    /// Ends subscriptions that the configuration does not permit any more, after a reload.
    pub(crate) fn drop_revoked_subscriptions(&self) {
        let running = self.active_config();
        self.spawn_sync(
            self.remove_subscriptions(|key, one| !one.listener.can_see(&running, &key.0)),
            false,
        );
    }

    /// Synchronizes the subscriptions of upstreams that a reload has started.
    pub(crate) fn sync_subscriptions(&self) {
        let running = self.active_config();
        let wanted: HashSet<ResourceKey> =
            lock(&self.0.subscriptions.0).by_key.keys().cloned().collect();
        let mut missed = Vec::new();
        for (name, uri) in &wanted {
            if let Some(link) = running
                .upstreams
                .supervisor(name)
                .filter(|link| !lock(&link.subscribed_uris).contains(uri))
            {
                missed.push((Arc::clone(link), uri.clone()));
            }
        }
        for link in running.upstreams.supervisors() {
            let unwanted =
                |uri: &&String| !wanted.contains(&(link.upstream.name.clone(), (*uri).clone()));
            missed.extend(
                lock(&link.subscribed_uris)
                    .iter()
                    .filter(unwanted)
                    .map(|uri| (Arc::clone(link), uri.clone())),
            );
        }
        self.spawn_sync(missed, true);
    }

    /// Updates subscriptions at upstreams in the background.
    fn spawn_sync(&self, news: Vec<(Arc<UpstreamSupervisor>, String)>, promised: bool) {
        if news.is_empty() {
            return;
        }
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let gateway = self.clone();
            runtime.spawn(async move {
                for (link, uri) in news {
                    let _: Result<(), ServiceError> =
                        gateway.sync_subscription(&link, &uri, promised).await;
                }
            });
        }
    }

    /// Removes subscriptions of a connection; returns the resources without any other.
    fn remove_subscriptions_of(
        &self,
        door: u64,
        which: impl Fn(&ResourceKey, &ResourceSubscriber) -> bool,
    ) -> Vec<(Arc<UpstreamSupervisor>, String)> {
        self.remove_subscriptions(|key, one| one.connection_id == door && which(key, one))
    }

    /// Removes subscriptions; returns the resources without any other.
    fn remove_subscriptions(
        &self,
        goes: impl Fn(&ResourceKey, &ResourceSubscriber) -> bool,
    ) -> Vec<(Arc<UpstreamSupervisor>, String)> {
        let mut left = Vec::new();
        {
            let mut known = lock(&self.0.subscriptions.0);
            let SubscriptionIndex {
                by_key,
                by_connection: by_door,
                by_principal,
                uri_bytes: bytes,
            } = &mut *known;
            by_key.retain(|key, subscribers| {
                subscribers.retain(|one| {
                    if !goes(key, one) {
                        return true;
                    }
                    let principal = &one.listener.caller.principal;
                    for own in
                        [by_door.get_mut(&one.connection_id), by_principal.get_mut(principal)]
                            .into_iter()
                            .flatten()
                    {
                        *own = own.saturating_sub(1);
                    }
                    if let Some(own) = bytes.get_mut(&(principal.clone(), key.0.clone())) {
                        *own = own.saturating_sub(key.1.len());
                    }
                    false
                });
                if subscribers.is_empty() {
                    left.push(key.clone());
                }
                !subscribers.is_empty()
            });
            by_door.retain(|_, own| *own > 0);
            by_principal.retain(|_, own| *own > 0);
            bytes.retain(|_, own| *own > 0);
        }
        let running = self.active_config();
        left.into_iter()
            .filter_map(|(name, uri)| {
                running.upstreams.supervisor(&name).map(|link| (Arc::clone(link), uri))
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
        let running = self.active_config();
        subscribers.retain(|one| one.listener.can_see(&running, &key.0));
        let gate = running.runtime.clone();
        drop(running);
        for ResourceSubscriber { listener, peer, address, notify_state: telling, .. } in subscribers
        {
            // A subscriber that is still being notified may have read the old state, so it is
            // notified again. It does not delay other subscribers.
            let Some(peer) =
                peer.filter(|_| telling.swap(NOTIFY_PENDING, Ordering::AcqRel) == NOTIFY_IDLE)
            else {
                continue;
            };
            let gate = gate.clone();
            tokio::spawn(async move {
                loop {
                    telling.store(NOTIFY_SENDING, Ordering::Release);
                    // A paused session gets no notifications.
                    if gate.paused_error(&listener.key).await.is_none() {
                        let told = peer.notify_resource_updated(
                            ResourceUpdatedNotificationParam::new(address.clone()),
                        );
                        let _ = tokio::time::timeout(Duration::from_secs(1), told).await;
                    }
                    if telling
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
        let mut known = SubscriptionIndex::default();
        known.by_connection.insert(1, MAX_SUBSCRIPTIONS_PER_PRINCIPAL);
        known.by_principal.insert("ann".to_owned(), MAX_SUBSCRIPTIONS_PER_PRINCIPAL);
        assert_eq!(
            (known.remaining(Some("ann")), known.remaining(Some("bob")), known.remaining(None)),
            (
                0,
                MAX_SUBSCRIPTIONS_PER_PRINCIPAL,
                MAX_SUBSCRIPTIONS - MAX_SUBSCRIPTIONS_PER_PRINCIPAL
            )
        );
        assert_eq!(
            (known.remaining_bytes(Some("ann"), "x"), known.remaining_bytes(None, "x")),
            (MAX_URI_BYTES_PER_PRINCIPAL, usize::MAX)
        );
        known.uri_bytes.insert(("ann".to_owned(), "x".to_owned()), MAX_URI_BYTES_PER_PRINCIPAL - 5);
        assert_eq!(
            (known.remaining_bytes(Some("ann"), "x"), known.remaining_bytes(Some("ann"), "y")),
            (5, MAX_URI_BYTES_PER_PRINCIPAL)
        );
        known.by_connection.insert(2, MAX_SUBSCRIPTIONS - MAX_SUBSCRIPTIONS_PER_PRINCIPAL);
        assert_eq!((known.remaining(Some("bob")), known.remaining(None)), (0, 0));
    }
}
