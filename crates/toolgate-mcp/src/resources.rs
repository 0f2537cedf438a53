//! Resources of upstreams. What two upstreams call by the same address is not the same: each has a room of its own,
//! `toolgate://UPSTREAM/` before what it calls the thing itself, unless its `prefix` is empty.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rmcp::model::{ErrorData, ResourceContents, ResourceUpdatedNotificationParam, SubscriptionFilter};
use rmcp::service::Peer;
use rmcp::{RoleServer, ServiceError};
use serde_json::json;
use toolgate::SessionKey;

use crate::gateway::{Gateway, Running, lock};
use crate::identity::{self, Caller};
use crate::upstream::{Link, MOST_WANTED};

/// What an address of ours begins with.
const OURS: &str = "toolgate://";
/// Most resources that one client may want to hear of, all together, and all of one principal where there are several.
pub(crate) const SUBSCRIPTIONS: usize = 1_000;
const MOST: usize = 50_000;
const OWN: usize = MOST / 10;
/// How many bytes of addresses one principal may want to hear of one upstream, where there are several.
const OWN_BYTES: usize = MOST_WANTED / 10;
/// The longest address that is subscribed to.
const LONGEST: usize = 2_048;

/// How clients call what an upstream calls so.
pub(crate) fn address(link: &Link, uri: &str) -> String {
    if link.upstream.prefix.is_empty() { uri.to_owned() } else { format!("{OURS}{}/{uri}", link.upstream.name) }
}

/// Whether an upstream may call something so: rooms are not its to name.
pub(crate) fn may_be_called(link: &Link, uri: &str) -> bool {
    !link.upstream.prefix.is_empty() || !uri.starts_with(OURS)
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
        let lists = |link: &Link| link.offer().resources.iter().any(|resource| resource.uri == address);
        Self::among(&having(running, agent), address, &lists)
    }

    /// The same for many addresses: what upstreams list is gone through once for all.
    pub(crate) fn find_each<'a>(
        running: &Running,
        agent: &str,
        addresses: impl Iterator<Item = &'a String>,
    ) -> Vec<Result<Self, ErrorData>> {
        let links = having(running, agent);
        let offers: Vec<_> = links.iter().map(|link| link.offer()).collect();
        let listed: HashMap<&str, HashSet<&str>> = links
            .iter()
            .zip(&offers)
            .map(|(link, offer)| (link.upstream.name.as_str(), offer.resources.iter().map(|resource| resource.uri.as_str()).collect()))
            .collect();
        let find = |address: &String| {
            let lists = |link: &Link| listed.get(link.upstream.name.as_str()).is_some_and(|uris| uris.contains(address.as_str()));
            Self::among(&links, address, &lists)
        };
        addresses.map(find).collect()
    }

    /// The same of these upstreams, where it is known which of them lists the address.
    fn among(links: &[&Arc<Link>], address: &str, lists: &dyn Fn(&Link) -> bool) -> Result<Self, ErrorData> {
        let found = |link: &Arc<Link>, uri: &str| Self { link: Arc::clone(link), uri: uri.to_owned(), address: address.to_owned() };
        if let Some((name, uri)) = address.strip_prefix(OURS).and_then(|rest| rest.split_once('/')) {
            let link = links.iter().find(|link| link.upstream.name == name && !link.upstream.prefix.is_empty());
            return link.map(|link| found(link, uri)).ok_or_else(|| nothing(address));
        }
        let fits = |template: &str| {
            let head = template.split('{').next().unwrap_or_default();
            address == template || (!head.is_empty() && address.starts_with(head))
        };
        let matches = |link: &Link| link.offer().templates.iter().any(|template| fits(&template.uri_template));
        let of = |has: &dyn Fn(&Link) -> bool| links.iter().copied().filter(|link| has(link)).collect::<Vec<_>>();
        let having = [of(lists), of(&matches), links.to_vec()].into_iter().find(|having| !having.is_empty()).unwrap_or_default();
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

    /// Whether its upstream says that it tells of changes, and can be asked to.
    pub(crate) fn is_told_of(&self) -> bool {
        let tells = self.link.offer().capabilities.resources.as_ref().is_some_and(|resources| resources.subscribe == Some(true));
        tells && self.uri.len() <= LONGEST
    }
}

/// The upstreams with resources that an agent has.
fn having<'r>(running: &'r Running, agent: &str) -> Vec<&'r Arc<Link>> {
    let shared = running.shared.get(agent).into_iter().flatten();
    shared.filter(|link| link.upstream.resources && link.offer().capabilities.resources.is_some()).collect()
}

/// No more addresses than one client may want to hear of, and each once.
pub(crate) fn trim(wanted: &mut SubscriptionFilter) {
    if let Some(addresses) = &mut wanted.resource_subscriptions {
        let mut seen = HashSet::new();
        addresses.retain(|address| seen.len() < SUBSCRIPTIONS && seen.insert(address.clone()));
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

/// Who listens, and as which agent.
pub(crate) struct Listener {
    pub(crate) caller: Caller,
    pub(crate) agent: String,
    /// In which conversation it began to.
    pub(crate) key: SessionKey,
    /// Over streams, where nobody needs a token.
    pub(crate) local: bool,
    /// In a session of an earlier revision, which goes on with another token that allows the same.
    pub(crate) lasting: bool,
}

impl Listener {
    /// Whether it would still be let in, by what holds now.
    pub(crate) fn is_let_in(&self, running: &Running) -> bool {
        (self.local || running.keys.may_know(&self.caller, self.lasting))
            && identity::agent(running, &self.caller, Some(&self.agent)).is_ok()
    }

    /// Whether it may still hear of what an upstream has.
    pub(crate) fn hears_of(&self, running: &Running, upstream: &str) -> bool {
        let mut links = running.shared.get(&self.agent).into_iter().flatten();
        links.any(|link| link.upstream.name == upstream && link.upstream.resources) && self.is_let_in(running)
    }
}

/// Somebody who wants to hear of a resource.
#[derive(Clone)]
struct Subscriber {
    door: u64,
    listener: Arc<Listener>,
    /// How it is told; one that hears everything for itself is only counted.
    peer: Option<Peer<RoleServer>>,
    address: String,
    /// Whether it is just being told, and of something that has changed since.
    telling: Arc<AtomicU8>,
}

const IDLE: u8 = 0;
const TELLING: u8 = 1;
const CHANGED: u8 = 2;

/// Who wants to hear of which resource, and of how many each.
#[derive(Default)]
pub(crate) struct Subscriptions(Mutex<Known>);

#[derive(Default)]
struct Known {
    by_key: HashMap<Key, Vec<Subscriber>>,
    by_door: HashMap<u64, usize>,
    by_principal: HashMap<String, usize>,
    /// Bytes that a principal's addresses have, of each upstream.
    bytes: HashMap<(String, String), usize>,
}

impl Known {
    /// How many more there may be, of a principal where that has a bound of its own.
    fn room(&self, principal: Option<&str>) -> usize {
        let own = principal.map_or(0, |principal| self.by_principal.get(principal).copied().unwrap_or_default());
        MOST.saturating_sub(self.by_door.values().sum()).min(if principal.is_some() { OWN.saturating_sub(own) } else { MOST })
    }

    /// How many more bytes of addresses a principal may want to hear of an upstream.
    fn bytes_left(&self, principal: Option<&str>, upstream: &str) -> usize {
        let own = |principal: &str| self.bytes.get(&(principal.to_owned(), upstream.to_owned())).copied().unwrap_or_default();
        principal.map_or(usize::MAX, |principal| OWN_BYTES.saturating_sub(own(principal)))
    }
}

/// The principal who may not take the places of all others; none where everybody is one, or somebody is here by itself.
fn bounded<'c>(running: &Running, caller: &'c Caller, local: bool) -> Option<&'c str> {
    (!local && !running.keys.is_open()).then_some(caller.principal.as_str())
}

impl Gateway {
    /// How many more resources somebody may want to hear of.
    pub(crate) fn room_to_subscribe(&self, running: &Running, caller: &Caller, local: bool) -> usize {
        lock(&self.0.subscriptions.0).room(bounded(running, caller, local))
    }

    /// Those of some resources that somebody may want to hear of, and that their upstreams can be asked for.
    pub(crate) fn fitting(&self, running: &Running, caller: &Caller, local: bool, places: impl Iterator<Item = Place>) -> Vec<Place> {
        let principal = bounded(running, caller, local);
        let known = lock(&self.0.subscriptions.0);
        let mut left: HashMap<String, (usize, usize)> = HashMap::new();
        let fits = |place: &Place| {
            let name = &place.link.upstream.name;
            let wanted = lock(&place.link.wanted);
            let first = || (known.bytes_left(principal, name), MOST_WANTED.saturating_sub(wanted.bytes()));
            let (own, all) = left.entry(name.clone()).or_insert_with(first);
            let new = if wanted.contains(&place.uri) { 0 } else { place.uri.len() };
            let rest = own.checked_sub(place.uri.len()).zip(all.checked_sub(new));
            rest.map(|rest| (*own, *all) = rest).is_some()
        };
        places.filter(fits).collect()
    }

    /// A client wants to hear of a resource: it is told by itself, or listens to everything. Who listens has been promised to hear of it,
    /// and its upstream is told when it is back, where it is away.
    pub(crate) async fn subscribe(
        &self,
        place: &Place,
        door: u64,
        listener: &Arc<Listener>,
        peer: Option<Peer<RoleServer>>,
    ) -> Result<(), ErrorData> {
        let promised = peer.is_none();
        if place.uri.len() > LONGEST {
            return Err(ErrorData::invalid_params(format!("an address has at most {LONGEST} bytes"), None));
        }
        let running = self.running();
        {
            let mut known = lock(&self.0.subscriptions.0);
            let own = known.by_door.get(&door).copied().unwrap_or_default();
            let principal = bounded(&running, &listener.caller, listener.local);
            let full = known.bytes_left(principal, &place.link.upstream.name) < place.uri.len();
            if own >= SUBSCRIPTIONS || full || known.room(principal) == 0 {
                let why = format!(
                    "a client may subscribe to {SUBSCRIPTIONS} resources, a principal to {OWN}, by {OWN_BYTES} bytes of addresses of one upstream, and all to {MOST}"
                );
                return Err(ErrorData::invalid_request(why, None));
            }
            let subscribers = known.by_key.entry(place.key()).or_default();
            if subscribers.iter().all(|one| one.door != door) {
                subscribers.push(Subscriber {
                    door,
                    listener: Arc::clone(listener),
                    peer,
                    address: place.address.clone(),
                    telling: Arc::default(),
                });
                *known.by_door.entry(door).or_default() += 1;
                *known.by_principal.entry(listener.caller.principal.clone()).or_default() += 1;
                let of_both = (listener.caller.principal.clone(), place.link.upstream.name.clone());
                *known.bytes.entry(of_both).or_default() += place.uri.len();
            }
        }
        drop(running);
        let subscribed = self.heed(&place.link, &place.uri, promised).await;
        if subscribed.is_err() {
            self.tell_all(self.leave(door, |key, _| *key == place.key()), false);
        }
        subscribed.map_err(crate::door::passed)
    }

    /// An upstream hears whether anybody wants to know of a resource.
    async fn heed(&self, link: &Arc<Link>, uri: &str, promised: bool) -> Result<(), ServiceError> {
        // Whoever has the name now: the configuration may have been read again since.
        let link = self.running().upstreams.link(&link.upstream.name).cloned().unwrap_or_else(|| Arc::clone(link));
        let (gateway, key) = (self.clone(), (link.upstream.name.clone(), uri.to_owned()));
        link.heed(uri.to_owned(), promised, move || lock(&gateway.0.subscriptions.0).by_key.contains_key(&key)).await
    }

    /// A client does not want to hear of a resource any more.
    pub(crate) async fn unsubscribe(&self, door: u64, address: &str) -> Result<(), ErrorData> {
        for (link, uri) in self.leave(door, |_, one| one.address == address) {
            self.heed(&link, &uri, false).await.map_err(crate::door::passed)?;
        }
        Ok(())
    }

    /// A client is gone, and its upstreams hear of it where nobody else wants to know.
    pub(crate) fn unsubscribe_all(&self, door: u64) {
        self.tell_all(self.leave(door, |_, _| true), false);
    }

    /// Whoever may not hear of a resource any more does not want to: after another reading of the configuration.
    pub(crate) fn forget_unseen(&self) {
        let running = self.running();
        self.tell_all(self.leave_where(|key, one| !one.listener.hears_of(&running, &key.0)), false);
    }

    /// Upstreams that another reading of the configuration has begun hear of what was wanted, or not any more, meanwhile.
    pub(crate) fn heed_anew(&self) {
        let running = self.running();
        let wanted: HashSet<Key> = lock(&self.0.subscriptions.0).by_key.keys().cloned().collect();
        let mut missed = Vec::new();
        for (name, uri) in &wanted {
            if let Some(link) = running.upstreams.link(name).filter(|link| !lock(&link.wanted).contains(uri)) {
                missed.push((Arc::clone(link), uri.clone()));
            }
        }
        for link in running.upstreams.links() {
            let unwanted = |uri: &&String| !wanted.contains(&(link.upstream.name.clone(), (*uri).clone()));
            missed.extend(lock(&link.wanted).iter().filter(unwanted).map(|uri| (Arc::clone(link), uri.clone())));
        }
        self.tell_all(missed, true);
    }

    /// Upstreams hear of what somebody wants to know, or nobody any more.
    fn tell_all(&self, news: Vec<(Arc<Link>, String)>, promised: bool) {
        if news.is_empty() {
            return;
        }
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let gateway = self.clone();
            runtime.spawn(async move {
                for (link, uri) in news {
                    let _: Result<(), ServiceError> = gateway.heed(&link, &uri, promised).await;
                }
            });
        }
    }

    /// Takes a client from those who want to hear; what nobody wants to hear of then.
    fn leave(&self, door: u64, which: impl Fn(&Key, &Subscriber) -> bool) -> Vec<(Arc<Link>, String)> {
        self.leave_where(|key, one| one.door == door && which(key, one))
    }

    /// Takes some from those who want to hear; what nobody wants to hear of then.
    fn leave_where(&self, goes: impl Fn(&Key, &Subscriber) -> bool) -> Vec<(Arc<Link>, String)> {
        let mut left = Vec::new();
        {
            let mut known = lock(&self.0.subscriptions.0);
            let Known { by_key, by_door, by_principal, bytes } = &mut *known;
            by_key.retain(|key, subscribers| {
                subscribers.retain(|one| {
                    if !goes(key, one) {
                        return true;
                    }
                    let principal = &one.listener.caller.principal;
                    for own in [by_door.get_mut(&one.door), by_principal.get_mut(principal)].into_iter().flatten() {
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
            match key {
                Ok(key) => self.tell_of(&key),
                // So many at once that some were missed: any may have changed.
                Err(tokio::sync::broadcast::error::RecvError::Lagged(_)) => {
                    let all: Vec<Key> = lock(&self.0.subscriptions.0).by_key.keys().cloned().collect();
                    all.iter().for_each(|key| self.tell_of(key));
                }
                Err(tokio::sync::broadcast::error::RecvError::Closed) => return,
            }
        }
    }

    /// Tells those who want to know that one resource has changed.
    fn tell_of(&self, key: &Key) {
        let mut subscribers = lock(&self.0.subscriptions.0).by_key.get(key).cloned().unwrap_or_default();
        // By what holds now: the configuration may just have been read again.
        let running = self.running();
        subscribers.retain(|one| one.listener.hears_of(&running, &key.0));
        let gate = running.gate.clone();
        drop(running);
        for Subscriber { listener, peer, address, telling, .. } in subscribers {
            // Who is still being told of it may have looked already, and is told once more; and keeps nobody else waiting.
            let Some(peer) = peer.filter(|_| telling.swap(CHANGED, Ordering::AcqRel) == IDLE) else { continue };
            let gate = gate.clone();
            tokio::spawn(async move {
                loop {
                    telling.store(TELLING, Ordering::Release);
                    // Whom an operator has stopped hears of nothing.
                    if gate.stopped(&listener.key).await.is_none() {
                        let told = peer.notify_resource_updated(ResourceUpdatedNotificationParam::new(address.clone()));
                        let _ = tokio::time::timeout(Duration::from_secs(1), told).await;
                    }
                    if telling.compare_exchange(TELLING, IDLE, Ordering::AcqRel, Ordering::Acquire).is_ok() {
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
    fn nobody_takes_the_places_of_all_others() {
        let mut known = Known::default();
        known.by_door.insert(1, OWN);
        known.by_principal.insert("ann".to_owned(), OWN);
        assert_eq!((known.room(Some("ann")), known.room(Some("bob")), known.room(None)), (0, OWN, MOST - OWN));
        assert_eq!((known.bytes_left(Some("ann"), "x"), known.bytes_left(None, "x")), (OWN_BYTES, usize::MAX));
        known.bytes.insert(("ann".to_owned(), "x".to_owned()), OWN_BYTES - 5);
        assert_eq!((known.bytes_left(Some("ann"), "x"), known.bytes_left(Some("ann"), "y")), (5, OWN_BYTES));
        known.by_door.insert(2, MOST - OWN);
        assert_eq!((known.room(Some("bob")), known.room(None)), (0, 0));
    }
}
