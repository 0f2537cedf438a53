//! Lists the tools, prompts and resources of an upstream, and quarantines changed tools.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rmcp::model::{ErrorCode, Tool};
use rmcp::service::Peer;
use rmcp::{RoleClient, ServiceError};
use toolgate::config::Remote;

use super::{Link, Offer, Status, is_modern};
use crate::gateway::lock;
use crate::upstream::handler::{Trouble, is_strange};
use crate::upstream::listen::pages;
use crate::upstream::shadows::Names;

/// Why listing failed.
pub(super) enum Unlisted {
    /// The upstream responded with an error, so the connection works.
    Refused(String),
    /// The upstream did not respond.
    Unheard(String),
    /// The connection is unusable, or the lists exceed the limits.
    Over(String),
    /// The upstream rejects a request that its protocol revision requires.
    Strange(String),
}

impl Unlisted {
    pub(super) fn why(self) -> String {
        let (Self::Refused(why) | Self::Unheard(why) | Self::Over(why) | Self::Strange(why)) = self;
        why
    }
}

impl Link {
    /// Lists tools, prompts and resources, and publishes the changes.
    pub(super) async fn list(&self, peer: &Peer<RoleClient>) -> Result<(), Unlisted> {
        let limit = Duration::from_secs(30);
        let asked = tokio::time::timeout(limit, async {
            let info = peer.peer_info();
            let capabilities = info.as_ref().map(|info| info.capabilities.clone()).unwrap_or_default();
            let tools = if capabilities.tools.is_some() {
                let found = pages(|page| peer.list_tools(page), |listed| (listed.tools, listed.next_cursor)).await;
                listed(found.map_err(|error| self.unlisted(&error, is_modern(peer)))?)?
            } else {
                Vec::new()
            };
            let known = self.offer();
            let mut prompts = Vec::new();
            if capabilities.prompts.is_some() && self.upstream.prompts {
                let listed = pages(|page| peer.list_prompts(page), |listed| (listed.prompts, listed.next_cursor));
                prompts = self.shortly(listed, &known.prompts).await;
            }
            let (mut resources, mut templates) = (Vec::new(), Vec::new());
            if capabilities.resources.is_some() && self.upstream.resources {
                let listed = pages(|page| peer.list_resources(page), |listed| (listed.resources, listed.next_cursor));
                resources = self.shortly(listed, &known.resources).await;
                let listed = pages(|page| peer.list_resource_templates(page), |listed| (listed.resource_templates, listed.next_cursor));
                templates = self.shortly(listed, &known.templates).await;
            }
            let instructions = info.as_ref().and_then(|info| info.instructions.clone());
            Ok::<_, Unlisted>((tools, Offer { tools: Vec::new(), prompts, resources, templates, capabilities, instructions }))
        });
        let (tools, offer) = asked.await.map_err(|_| Unlisted::Unheard(format!("no response within {limit:?}")))??;
        let held = self.pins.note(&tools).map_err(Unlisted::Over)?;
        let offer = Arc::new(Offer { tools: self.pins.accepted().unwrap_or_default(), ..offer });
        let before = std::mem::replace(&mut *lock(&self.offer), Arc::clone(&offer));
        let told = self.told.swap(false, Ordering::Relaxed);
        if held || before != offer {
            self.changed.send_modify(|times| *times += 1);
        } else if told && self.claims.may_pass() {
            self.claimed.send_modify(|times| *times += 1);
        }
        Ok(())
    }

    fn unlisted(&self, error: &ServiceError, modern: bool) -> Unlisted {
        let why = crate::upstream::plain::question(error);
        match error {
            ServiceError::TransportClosed => Unlisted::Over(why),
            ServiceError::TransportSend(cause) => match Trouble::of(cause) {
                // The supervisor reconnects.
                Trouble::Lost => Unlisted::Over(why),
                Trouble::Status(401, _) if self.may_renew() => Unlisted::Over(why),
                // Some server responds, but not one of this protocol revision.
                Trouble::Status(status, _) if modern && is_strange(status) => Unlisted::Strange(why),
                _ => Unlisted::Unheard(why),
            },
            ServiceError::Timeout { .. } | ServiceError::Cancelled { .. } => Unlisted::Unheard(why),
            _ => Unlisted::Refused(why),
        }
    }

    /// Lists what the upstream offers, and returns an error if the upstream must be restarted.
    ///
    /// An error response proves that the upstream is running, so the known lists stay valid.
    /// Repeated error responses mean a restart. If calls are answered meanwhile, or calls are still
    /// in progress, a missing response may only be late. A busy upstream that stays silent for
    /// longer than any of its calls may take is restarted, even if the callers gave up. An idle
    /// upstream that misses two requests is restarted.
    pub(super) async fn list_or_work(&self, peer: &Peer<RoleClient>, ill: &str) -> Result<(), String> {
        let before = self.answers.load(Ordering::Relaxed);
        let mut unheard = String::new();
        for last in [false, true] {
            let behind_calls = last && self.is_busy();
            unheard = match self.list(peer).await {
                Ok(()) => {
                    self.told_all();
                    return Ok(());
                }
                Err(Unlisted::Refused(why)) => {
                    if self.refused() {
                        return Err(format!("{ill}: {why}"));
                    }
                    let why = self.upstream.without_secrets(&why);
                    tracing::warn!(upstream = self.upstream.name, why, "cannot list an upstream");
                    return Ok(());
                }
                Err(Unlisted::Over(why)) => return Err(format!("{ill}: {why}")),
                Err(Unlisted::Strange(why)) if last && self.is_estranged() => return Err(format!("{ill}: {why}")),
                Err(Unlisted::Strange(why)) => why,
                Err(Unlisted::Unheard(why)) => why,
            };
            let waits = behind_calls && !self.doubted.load(Ordering::Relaxed) && !self.silence.is_too_long();
            if waits || self.answers.load(Ordering::Relaxed) != before {
                // The announced change was not read yet.
                if self.told.load(Ordering::Relaxed) {
                    self.relist.notify_one();
                }
                return Ok(());
            }
        }
        Err(format!("{ill}: {unheard}"))
    }

    /// Returns a list if it arrives soon, else the known list.
    async fn shortly<T: Clone>(&self, listed: impl Future<Output = Result<(Vec<T>, bool), ServiceError>>, known: &[T]) -> Vec<T> {
        let (listed, whole) = match tokio::time::timeout(Duration::from_secs(8), listed).await {
            Ok(Ok(listed)) => listed,
            // Some servers declare prompts and resources without having them.
            Ok(Err(ServiceError::McpError(error))) if error.code == ErrorCode::METHOD_NOT_FOUND => return Vec::new(),
            // A failed request does not mean that the list is empty.
            _ => return known.to_vec(),
        };
        if !whole {
            tracing::warn!(
                upstream = self.upstream.name,
                kept = listed.len(),
                "a list of an upstream exceeds the limits; the rest is dropped"
            );
        }
        listed
    }

    /// Handles the notification that a list has changed.
    pub(crate) fn lists_changed(&self) {
        self.told.store(true, Ordering::Relaxed);
        self.relist.notify_one();
    }

    /// Re-reads the pins and missing references, which a person may have fixed meanwhile.
    pub(in crate::upstream) fn look_again(&self) {
        self.pins.note_again();
        Arc::make_mut(&mut lock(&self.offer)).tools = self.pins.accepted().unwrap_or_default();
        if self.lacks.load(Ordering::Relaxed) && self.upstream.lacks().is_empty() {
            self.retry.notify_one();
        }
    }

    /// Returns the accepted tools; `None` if the upstream never connected.
    pub(in crate::upstream) fn remotes(&self) -> Option<Vec<Remote>> {
        let tools = self.pins.accepted().or_else(|| matches!(self.status(), Status::Up { .. }).then(Vec::new))?;
        Some(tools.into_iter().map(remote).collect())
    }

    /// Quarantines tools that mention an older or simultaneous tool of another upstream.
    pub(in crate::upstream) fn hold_shadows(&self, names: &Names<'_>) {
        self.pins.hold_shadows(&self.upstream, names);
        Arc::make_mut(&mut lock(&self.offer)).tools = self.pins.accepted().unwrap_or_default();
    }
}

/// Converts a tool to the form that rules use.
pub(in crate::upstream) fn remote(tool: Tool) -> Remote {
    Remote {
        name: tool.name.to_string(),
        description: tool.description.as_deref().or(tool.title.as_deref()).unwrap_or_default().to_owned(),
        input: serde_json::Value::Object((*tool.input_schema).clone()),
        output: tool.output_schema.as_ref().map(|schema| serde_json::Value::Object((**schema).clone())),
    }
}

/// Returns the tools of a complete list. A truncated list is an error, because a missing tool would
/// look removed.
fn listed<T>((listed, whole): (Vec<T>, bool)) -> Result<Vec<T>, Unlisted> {
    if whole { Ok(listed) } else { Err(Unlisted::Over("the list of tools exceeds the limits".to_owned())) }
}
