//! Lists the tools, prompts and resources of an upstream, and quarantines changed tools.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rmcp::model::{ErrorCode, Prompt, Resource, ResourceTemplate, ServerCapabilities, Tool};
use rmcp::service::Peer;
use rmcp::{RoleClient, ServiceError};
use toolgate_config::RemoteToolSpec;

use crate::gateway::lock;
use crate::upstream::notifications::read_pages;
use crate::upstream::remote_tool::{TransportErrorKind, is_revision_mismatch};
use crate::upstream::scan_shadowing::ToolNameIndex;
use crate::upstream::supervisor::{UpstreamStatus, UpstreamSupervisor, is_modern};

/// The tools, prompts and resources that an upstream offers.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct UpstreamCatalog {
    /// The accepted tools.
    pub(crate) tools: Vec<Tool>,
    /// The prompts.
    pub(crate) prompts: Vec<Prompt>,
    /// The resources.
    pub(crate) resources: Vec<Resource>,
    /// The resource templates.
    pub(crate) templates: Vec<ResourceTemplate>,
    /// The server capabilities.
    pub(crate) capabilities: ServerCapabilities,
    /// The server instructions.
    pub(crate) instructions: Option<String>,
}

/// Reason why a listing failed.
pub(crate) enum ListError {
    /// The upstream responded with an error, so the connection works.
    Refused(String),
    /// The upstream did not respond.
    NoResponse(String),
    /// The connection is unusable, or the lists exceed the limits.
    Fatal(String),
    /// The upstream rejects a request that its protocol revision requires.
    RevisionMismatch(String),
}

impl ListError {
    pub(crate) fn into_reason(self) -> String {
        let (Self::Refused(why)
        | Self::NoResponse(why)
        | Self::Fatal(why)
        | Self::RevisionMismatch(why)) = self;
        why
    }
}

impl UpstreamSupervisor {
    /// Lists tools, prompts and resources, and publishes the changes.
    pub(crate) async fn refresh_catalog(&self, peer: &Peer<RoleClient>) -> Result<(), ListError> {
        let timeout = Duration::from_secs(30);
        let listing = tokio::time::timeout(timeout, async {
            let info = peer.peer_info();
            let capabilities =
                info.as_ref().map(|info| info.capabilities.clone()).unwrap_or_default();
            let tools = if capabilities.tools.is_some() {
                let found = read_pages(
                    |page| peer.list_tools(page),
                    |listed| (listed.tools, listed.next_cursor),
                )
                .await;
                complete_list(
                    found.map_err(|error| self.classify_list_error(&error, is_modern(peer)))?,
                )?
            } else {
                Vec::new()
            };
            let known = self.catalog();
            let mut prompts = Vec::new();
            if capabilities.prompts.is_some() && self.upstream.exposes_prompts {
                let listed = read_pages(
                    |page| peer.list_prompts(page),
                    |listed| (listed.prompts, listed.next_cursor),
                );
                prompts = self.list_with_fallback(listed, &known.prompts).await;
            }
            let (mut resources, mut templates) = (Vec::new(), Vec::new());
            if capabilities.resources.is_some() && self.upstream.exposes_resources {
                let listed = read_pages(
                    |page| peer.list_resources(page),
                    |listed| (listed.resources, listed.next_cursor),
                );
                resources = self.list_with_fallback(listed, &known.resources).await;
                let listed = read_pages(
                    |page| peer.list_resource_templates(page),
                    |listed| (listed.resource_templates, listed.next_cursor),
                );
                templates = self.list_with_fallback(listed, &known.templates).await;
            }
            let instructions = info.as_ref().and_then(|info| info.instructions.clone());
            Ok::<_, ListError>((
                tools,
                UpstreamCatalog {
                    tools: Vec::new(),
                    prompts,
                    resources,
                    templates,
                    capabilities,
                    instructions,
                },
            ))
        });
        let (tools, catalog) = listing
            .await
            .map_err(|_| ListError::NoResponse(format!("no response within {timeout:?}")))??;
        let has_quarantine_changed = self.pins.record_offered(&tools).map_err(ListError::Fatal)?;
        let catalog = Arc::new(UpstreamCatalog {
            tools: self.pins.accepted().unwrap_or_default(),
            ..catalog
        });
        let before = std::mem::replace(&mut *lock(&self.catalog), Arc::clone(&catalog));
        let was_announced = self.is_change_announced.swap(false, Ordering::Relaxed);
        if has_quarantine_changed || before != catalog {
            self.list_changes.send_modify(|times| *times += 1);
        } else if was_announced && self.announcement_limiter.is_allowed() {
            self.announced_changes.send_modify(|times| *times += 1);
        }
        Ok(())
    }

    fn classify_list_error(&self, error: &ServiceError, is_modern_peer: bool) -> ListError {
        let why = crate::upstream::error_text::describe_request_error(error);
        match error {
            ServiceError::TransportClosed => ListError::Fatal(why),
            ServiceError::TransportSend(cause) => match TransportErrorKind::classify(cause) {
                // The supervisor reconnects.
                TransportErrorKind::SessionLost => ListError::Fatal(why),
                TransportErrorKind::Rejected(401, _) if self.can_renew_token() => {
                    ListError::Fatal(why)
                }
                // Some server responds, but not one of this protocol revision.
                TransportErrorKind::Rejected(status, _)
                    if is_modern_peer && is_revision_mismatch(status) =>
                {
                    ListError::RevisionMismatch(why)
                }
                _ => ListError::NoResponse(why),
            },
            ServiceError::Timeout { .. } | ServiceError::Cancelled { .. } => {
                ListError::NoResponse(why)
            }
            _ => ListError::Refused(why),
        }
    }

    /// Lists what the upstream offers, and returns an error if the upstream must be restarted.
    ///
    /// An error response proves that the upstream is running, so the known lists stay valid.
    /// Repeated error responses mean a restart. If calls are answered meanwhile, or calls are still
    /// in progress, a missing response may only be late. A busy upstream that stays silent for
    /// longer than any of its calls may take is restarted, even if the callers gave up. An idle
    /// upstream that misses two requests is restarted.
    pub(crate) async fn check_health(
        &self,
        peer: &Peer<RoleClient>,
        problem: &str,
    ) -> Result<(), String> {
        let before = self.response_count.load(Ordering::Relaxed);
        let mut reason = String::new();
        for is_last_try in [false, true] {
            let behind_calls = is_last_try && self.is_busy();
            reason = match self.refresh_catalog(peer).await {
                Ok(()) => {
                    self.on_listing();
                    return Ok(());
                }
                Err(ListError::Refused(why)) => {
                    if self.on_listing_refused() {
                        return Err(format!("{problem}: {why}"));
                    }
                    let why = self.upstream.redact_secrets(&why);
                    tracing::warn!(upstream = self.upstream.name, why, "cannot list an upstream");
                    return Ok(());
                }
                Err(ListError::Fatal(why)) => return Err(format!("{problem}: {why}")),
                Err(ListError::RevisionMismatch(why))
                    if is_last_try && self.on_revision_rejection() =>
                {
                    return Err(format!("{problem}: {why}"));
                }
                Err(ListError::RevisionMismatch(why)) => why,
                Err(ListError::NoResponse(why)) => why,
            };
            let may_be_late = behind_calls
                && !self.is_suspect.load(Ordering::Relaxed)
                && !self.idle_watch.is_too_long();
            if may_be_late || self.response_count.load(Ordering::Relaxed) != before {
                // The announced change was not read yet.
                if self.is_change_announced.load(Ordering::Relaxed) {
                    self.relist_requested.notify_one();
                }
                return Ok(());
            }
        }
        Err(format!("{problem}: {reason}"))
    }

    /// Returns a list if it arrives soon, else the known list.
    async fn list_with_fallback<T: Clone>(
        &self,
        listed: impl Future<Output = Result<(Vec<T>, bool), ServiceError>>,
        known: &[T],
    ) -> Vec<T> {
        let (listed, is_complete) = match tokio::time::timeout(Duration::from_secs(8), listed).await
        {
            Ok(Ok(listed)) => listed,
            // Some servers declare prompts and resources without having them.
            Ok(Err(ServiceError::McpError(error))) if error.code == ErrorCode::METHOD_NOT_FOUND => {
                return Vec::new();
            }
            // A failed request does not mean that the list is empty.
            _ => return known.to_vec(),
        };
        if !is_complete {
            tracing::warn!(
                upstream = self.upstream.name,
                kept = listed.len(),
                "a list of an upstream exceeds the limits; the rest is dropped"
            );
        }
        listed
    }

    /// Handles the notification that a list has changed.
    pub(crate) fn on_lists_changed(&self) {
        self.is_change_announced.store(true, Ordering::Relaxed);
        self.relist_requested.notify_one();
    }

    /// Re-reads the pins and missing references, which a person may have fixed meanwhile.
    pub(crate) fn recheck_pins_and_references(&self) {
        self.pins.retry_recording();
        Arc::make_mut(&mut lock(&self.catalog)).tools = self.pins.accepted().unwrap_or_default();
        if self.has_missing_references.load(Ordering::Relaxed)
            && self.upstream.missing_references().is_empty()
        {
            self.retry_requested.notify_one();
        }
    }

    /// Returns the accepted tools; `None` if the upstream never connected.
    pub(crate) fn accepted_tools(&self) -> Option<Vec<RemoteToolSpec>> {
        let tools = self
            .pins
            .accepted()
            .or_else(|| matches!(self.status(), UpstreamStatus::Up { .. }).then(Vec::new))?;
        Some(tools.into_iter().map(remote_tool_spec).collect())
    }

    /// Quarantines tools that mention an older or simultaneous tool of another upstream.
    pub(crate) fn quarantine_shadowing(&self, names: &ToolNameIndex<'_>) {
        self.pins.quarantine_shadowing(&self.upstream, names);
        Arc::make_mut(&mut lock(&self.catalog)).tools = self.pins.accepted().unwrap_or_default();
    }
}

/// Converts a tool to the form that rules use.
pub(crate) fn remote_tool_spec(tool: Tool) -> RemoteToolSpec {
    RemoteToolSpec {
        name: tool.name.to_string(),
        description: tool
            .description
            .as_deref()
            .or(tool.title.as_deref())
            .unwrap_or_default()
            .to_owned(),
        input: serde_json::Value::Object((*tool.input_schema).clone()),
        output: tool
            .output_schema
            .as_ref()
            .map(|schema| serde_json::Value::Object((**schema).clone())),
    }
}

/// Returns the tools of a complete list. A truncated list is an error, because a missing tool would
/// look removed.
fn complete_list<T>((listed, is_complete): (Vec<T>, bool)) -> Result<Vec<T>, ListError> {
    if is_complete {
        Ok(listed)
    } else {
        Err(ListError::Fatal("the list of tools exceeds the limits".to_owned()))
    }
}
