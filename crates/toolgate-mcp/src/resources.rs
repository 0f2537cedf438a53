//! Maps the resources of all upstreams into one address space.
//!
//! Clients see `toolgate://UPSTREAM/` before the URI of the upstream, unless its `prefix` is empty.
//! Equal URIs of two upstreams are therefore different resources.

mod subscriptions;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use rmcp::model::{ErrorData, ResourceContents, SubscriptionFilter};
use serde_json::json;

use crate::gateway::ActiveConfig;
use crate::upstream::UpstreamSupervisor;

pub(crate) use crate::resources::subscriptions::{
    ChangeListener, MAX_SUBSCRIPTIONS_PER_CLIENT, ResourceKey, ResourceSubscriptions,
};

/// Prefix of the addresses that toolgate creates.
const TOOLGATE_URI_PREFIX: &str = "toolgate://";
/// Maximum length of a subscribed URI, in bytes.
const MAX_RESOURCE_URI_BYTES: usize = 2_048;

/// Returns the address that clients use for a URI of an upstream.
pub(crate) fn client_address(supervisor: &UpstreamSupervisor, uri: &str) -> String {
    if supervisor.upstream.prefix.is_empty() {
        uri.to_owned()
    } else {
        format!("{TOOLGATE_URI_PREFIX}{}/{uri}", supervisor.upstream.name)
    }
}

/// Returns whether an upstream may use a URI: without a prefix, `toolgate://` is reserved.
pub(crate) fn is_allowed_uri(supervisor: &UpstreamSupervisor, uri: &str) -> bool {
    !supervisor.upstream.prefix.is_empty() || !uri.starts_with(TOOLGATE_URI_PREFIX)
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
        active: &ActiveConfig,
        agent: &str,
        address: &str,
    ) -> Result<Self, ErrorData> {
        let lists = |supervisor: &UpstreamSupervisor| {
            supervisor.catalog().resources.iter().any(|resource| resource.uri == address)
        };
        Self::resolve_among(&upstreams_with_resources(active, agent), address, &lists)
    }

    /// Resolves several addresses, and searches the lists of the upstreams only once.
    pub(crate) fn resolve_all<'a>(
        active: &ActiveConfig,
        agent: &str,
        addresses: impl Iterator<Item = &'a String>,
    ) -> Vec<Result<Self, ErrorData>> {
        let supervisors = upstreams_with_resources(active, agent);
        let catalogs: Vec<_> = supervisors.iter().map(|supervisor| supervisor.catalog()).collect();
        let listed: HashMap<&str, HashSet<&str>> = supervisors
            .iter()
            .zip(&catalogs)
            .map(|(supervisor, catalog)| {
                (
                    supervisor.upstream.name.as_str(),
                    catalog.resources.iter().map(|resource| resource.uri.as_str()).collect(),
                )
            })
            .collect();
        let find = |address: &String| {
            let lists = |supervisor: &UpstreamSupervisor| {
                listed
                    .get(supervisor.upstream.name.as_str())
                    .is_some_and(|uris| uris.contains(address.as_str()))
            };
            Self::resolve_among(&supervisors, address, &lists)
        };
        addresses.map(find).collect()
    }

    /// Resolves an address among these upstreams; `lists` returns whether an upstream lists it.
    fn resolve_among(
        supervisors: &[&Arc<UpstreamSupervisor>],
        address: &str,
        lists: &dyn Fn(&UpstreamSupervisor) -> bool,
    ) -> Result<Self, ErrorData> {
        let found = |supervisor: &Arc<UpstreamSupervisor>, uri: &str| Self {
            link: Arc::clone(supervisor),
            uri: uri.to_owned(),
            address: address.to_owned(),
        };
        if let Some((name, uri)) =
            address.strip_prefix(TOOLGATE_URI_PREFIX).and_then(|rest| rest.split_once('/'))
        {
            let supervisor = supervisors.iter().find(|supervisor| {
                supervisor.upstream.name == name && !supervisor.upstream.prefix.is_empty()
            });
            return supervisor
                .map(|supervisor| found(supervisor, uri))
                .ok_or_else(|| not_found_error(address));
        }
        let fits = |template: &str| {
            let head = template.split('{').next().unwrap_or_default();
            address == template || (!head.is_empty() && address.starts_with(head))
        };
        let matches = |supervisor: &UpstreamSupervisor| {
            supervisor.catalog().templates.iter().any(|template| fits(&template.uri_template))
        };
        let upstreams_that = |has: &dyn Fn(&UpstreamSupervisor) -> bool| {
            supervisors.iter().copied().filter(|supervisor| has(supervisor)).collect::<Vec<_>>()
        };
        let candidates = [upstreams_that(lists), upstreams_that(&matches), supervisors.to_vec()]
            .into_iter()
            .find(|candidates| !candidates.is_empty())
            .unwrap_or_default();
        // Of several upstreams, the one without a prefix has the bare URI.
        match (
            candidates.as_slice(),
            candidates.iter().find(|supervisor| supervisor.upstream.prefix.is_empty()),
        ) {
            ([only], _) => Ok(found(only, address)),
            (_, Some(unprefixed)) if lists(unprefixed) || matches(unprefixed) => {
                Ok(found(unprefixed, address))
            }
            (several, _)
                if several.iter().any(|supervisor| lists(supervisor) || matches(supervisor)) =>
            {
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
        let supports_subscriptions = self
            .link
            .catalog()
            .capabilities
            .resources
            .as_ref()
            .is_some_and(|resources| resources.subscribe == Some(true));
        supports_subscriptions && self.uri.len() <= MAX_RESOURCE_URI_BYTES
    }
}

/// Returns the upstreams of an agent that have resources.
fn upstreams_with_resources<'r>(
    active: &'r ActiveConfig,
    agent: &str,
) -> Vec<&'r Arc<UpstreamSupervisor>> {
    let supervisors = active.upstreams_by_agent.get(agent).into_iter().flatten();
    supervisors
        .filter(|supervisor| {
            supervisor.upstream.exposes_resources
                && supervisor.catalog().capabilities.resources.is_some()
        })
        .collect()
}

/// Removes duplicate addresses, and those above the limit of a client.
pub(crate) fn limit_addresses(filter: &mut SubscriptionFilter) {
    if let Some(addresses) = &mut filter.resource_subscriptions {
        let mut seen = HashSet::new();
        addresses.retain(|address| {
            seen.len() < MAX_SUBSCRIPTIONS_PER_CLIENT && seen.insert(address.clone())
        });
    }
}

fn not_found_error(address: &str) -> ErrorData {
    ErrorData::resource_not_found(
        format!("unknown resource `{address}`"),
        Some(json!({"uri": address})),
    )
}

fn ambiguous_error(uri: &str, supervisors: &[&Arc<UpstreamSupervisor>]) -> ErrorData {
    let names: Vec<String> = supervisors
        .iter()
        .map(|supervisor| format!("`{}`", client_address(supervisor, uri)))
        .collect();
    let message =
        format!("several upstreams have `{uri}`; ask for one of them: {}", names.join(", "));
    ErrorData::resource_not_found(message, Some(json!({"uri": uri})))
}
