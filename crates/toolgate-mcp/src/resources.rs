//! Resources of upstreams. What two upstreams call by the same address is not the same: each has a room of its own,
//! `toolgate://UPSTREAM/` before what it calls the thing itself, unless its `prefix` is empty.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rmcp::model::{ErrorData, ResourceContents, ResourceUpdatedNotificationParam};
use rmcp::service::Peer;
use rmcp::{RoleServer, ServiceError};
use serde_json::json;

use crate::gateway::{Gateway, Running, lock};
use crate::upstream::Link;

/// What an address of ours begins with.
const OURS: &str = "toolgate://";
/// Most resources that one client may want to hear of.
pub(crate) const SUBSCRIPTIONS: usize = 1_000;

/// How clients call what an upstream calls so.
pub(crate) fn address(link: &Link, uri: &str) -> String {
    if link.upstream.prefix.is_empty() { uri.to_owned() } else { format!("{OURS}{}/{uri}", link.upstream.name) }
}

/// A resource, or what would be one.
pub(crate) struct Place {
    pub(crate) link: Arc<Link>,
    /// What its upstream calls it.
    pub(crate) uri: String,
    /// What the client does.
    pub(crate) address: String,
}

impl Place {
    /// Where an agent finds what is called so: in the room that the address names; else with the only one who has it, who has a
    /// pattern for it, or who is there at all.
    pub(crate) fn find(running: &Running, agent: &str, address: &str) -> Result<Self, ErrorData> {
        let shared = running.shared.get(agent).into_iter().flatten();
        let links: Vec<&Arc<Link>> =
            shared.filter(|link| link.upstream.resources && link.offer().capabilities.resources.is_some()).collect();
        let found = |link: &Arc<Link>, uri: &str| Self { link: Arc::clone(link), uri: uri.to_owned(), address: address.to_owned() };
        if let Some((name, uri)) = address.strip_prefix(OURS).and_then(|rest| rest.split_once('/')) {
            let link = links.iter().find(|link| link.upstream.name == name && !link.upstream.prefix.is_empty());
            return link.map(|link| found(link, uri)).ok_or_else(|| nothing(address));
        }
        let fits = |template: &str| {
            let head = template.split('{').next().unwrap_or_default();
            address == template || (!head.is_empty() && address.starts_with(head))
        };
        let lists = |link: &Link| link.offer().resources.iter().any(|resource| resource.uri == address);
        let matches = |link: &Link| link.offer().templates.iter().any(|template| fits(&template.uri_template));
        let of = |has: &dyn Fn(&Link) -> bool| links.iter().copied().filter(|link| has(link)).collect::<Vec<_>>();
        let having = [of(&lists), of(&matches), links.clone()].into_iter().find(|having| !having.is_empty()).unwrap_or_default();
        // Whoever has no room of its own has the bare address.
        match (having.as_slice(), having.iter().find(|link| link.upstream.prefix.is_empty())) {
            ([one], _) => Ok(found(one, address)),
            (_, Some(bare)) if lists(bare) || matches(bare) => Ok(found(bare, address)),
            (several, _) if several.iter().any(|link| lists(link) || matches(link)) => Err(ambiguous(address, several)),
            _ => Err(nothing(address)),
        }
    }

    /// What was read, under the name that it was asked for by.
    pub(crate) fn named(&self, contents: &mut [ResourceContents]) {
        if self.address == self.uri {
            return;
        }
        for content in contents {
            match content {
                ResourceContents::TextResourceContents { uri, .. } | ResourceContents::BlobResourceContents { uri, .. } => {
                    *uri = address(&self.link, uri);
                }
                _ => {}
            }
        }
    }

    fn key(&self) -> Key {
        (self.link.upstream.name.clone(), self.uri.clone())
    }
}

fn nothing(address: &str) -> ErrorData {
    ErrorData::resource_not_found(format!("there is no resource `{address}`"), Some(json!({"uri": address})))
}

fn ambiguous(uri: &str, links: &[&Arc<Link>]) -> ErrorData {
    let names: Vec<String> = links.iter().map(|link| format!("`{}`", address(link, uri))).collect();
    let why = format!("several upstreams have `{uri}`; ask for one of them: {}", names.join(", "));
    ErrorData::resource_not_found(why, Some(json!({"uri": uri})))
}

/// The name of an upstream, and what it calls a resource.
pub(crate) type Key = (String, String);

/// Somebody who wants to hear of a resource.
#[derive(Clone)]
struct Subscriber {
    door: u64,
    /// How it is told; one that hears everything for itself is only counted.
    peer: Option<Peer<RoleServer>>,
    address: String,
}

/// Who wants to hear of which resource.
#[derive(Default)]
pub(crate) struct Subscriptions(Mutex<HashMap<Key, Vec<Subscriber>>>);

impl Gateway {
    /// A client wants to hear of a resource.
    pub(crate) async fn subscribe(&self, place: &Place, door: u64, peer: Option<Peer<RoleServer>>) -> Result<(), ErrorData> {
        {
            let mut all = lock(&self.0.subscriptions.0);
            let own = all.values().flatten().filter(|one| one.door == door).count();
            if own >= SUBSCRIPTIONS {
                return Err(ErrorData::invalid_request(format!("a client may subscribe to {SUBSCRIPTIONS} resources"), None));
            }
            let subscribers = all.entry(place.key()).or_default();
            if subscribers.iter().all(|one| one.door != door) {
                subscribers.push(Subscriber { door, peer, address: place.address.clone() });
            }
        }
        let subscribed = place.link.subscribe(&place.uri, true).await;
        if subscribed.is_err() {
            self.leave(door, |key, _| *key == place.key());
        }
        subscribed.map_err(crate::door::passed)
    }

    /// A client does not want to hear of a resource any more.
    pub(crate) async fn unsubscribe(&self, door: u64, address: &str) -> Result<(), ErrorData> {
        for (link, uri) in self.leave(door, |_, one| one.address == address) {
            link.subscribe(&uri, false).await.map_err(crate::door::passed)?;
        }
        Ok(())
    }

    /// A client is gone, and its upstreams hear of it where nobody else wants to know.
    pub(crate) fn unsubscribe_all(&self, door: u64) {
        let left = self.leave(door, |_, _| true);
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                for (link, uri) in left {
                    let _: Result<(), ServiceError> = link.subscribe(&uri, false).await;
                }
            });
        }
    }

    /// Takes a client from those who want to hear; what nobody wants to hear of then.
    fn leave(&self, door: u64, which: impl Fn(&Key, &Subscriber) -> bool) -> Vec<(Arc<Link>, String)> {
        let mut left = Vec::new();
        lock(&self.0.subscriptions.0).retain(|key, subscribers| {
            let before = subscribers.len();
            subscribers.retain(|one| one.door != door || !which(key, one));
            if subscribers.is_empty() && before > 0 {
                left.push(key.clone());
            }
            !subscribers.is_empty()
        });
        let running = self.running();
        left.into_iter().filter_map(|(name, uri)| running.upstreams.link(&name).map(|link| (Arc::clone(link), uri))).collect()
    }

    /// Tells those who want to know that a resource has changed.
    pub(crate) async fn forward_updates(self) {
        let mut updates = self.running().upstreams.updates().subscribe();
        loop {
            let key = tokio::select! {
                key = updates.recv() => key,
                () = self.0.stop.cancelled() => return,
            };
            let key = match key {
                Ok(key) => key,
                // So many at once: those who listen look again at the next.
                Err(tokio::sync::broadcast::error::RecvError::Lagged(_)) => continue,
                Err(tokio::sync::broadcast::error::RecvError::Closed) => return,
            };
            let subscribers = lock(&self.0.subscriptions.0).get(&key).cloned().unwrap_or_default();
            for Subscriber { peer, address, .. } in subscribers {
                let Some(peer) = peer else { continue };
                let told = peer.notify_resource_updated(ResourceUpdatedNotificationParam::new(address));
                let _ = tokio::time::timeout(Duration::from_secs(1), told).await;
            }
        }
    }
}
