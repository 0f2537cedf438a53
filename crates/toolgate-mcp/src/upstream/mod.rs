//! Connects to upstream MCP servers and supervises each one separately, so that a failing upstream
//! does not affect the others.

mod callbacks;
pub(crate) mod catalog;
pub(crate) mod classify_error;
pub(crate) mod client_handler;
pub(crate) mod connection_health;
mod error_text;
pub(crate) mod handshake;
mod notifications;
mod oauth;
mod pins;
mod remote_tool;
mod request_guards;
mod result_value;
mod scan_poisoning;
mod scan_shadowing;
mod supervisor;
pub(crate) mod transport;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use toolgate::Handler;
use toolgate_config::{Backend, Config, HttpTool, RemoteToolSpec, UnusableTool, UpstreamConfig};

pub(crate) use crate::upstream::callbacks::{
    CallChannel, ClientSender, QuestionOrigin, ReplySender, UpstreamEvent,
    is_within_notification_limit,
};
pub(crate) use crate::upstream::notifications::MAX_SUBSCRIBED_URI_BYTES;
pub use crate::upstream::scan_poisoning::QuarantineReason;
pub(crate) use crate::upstream::scan_poisoning::{is_harmless_text, is_invisible};
pub use crate::upstream::scan_shadowing::quarantine_shadowing_tools;
pub(crate) use crate::upstream::supervisor::{ResourceUpdateSender, UpstreamSupervisor};
pub use crate::upstream::supervisor::{UpstreamHealth, UpstreamStatus};
pub use pins::{PinAcceptResult, Pins, QuarantinedTool};

impl UpstreamHealth {
    /// Returns why new tools cannot be pinned. Such tools are quarantined and cannot be accepted.
    #[must_use]
    pub fn pin_write_error(&self) -> Option<&str> {
        self.held.iter().flat_map(|change| &change.why).find_map(|why| match why {
            QuarantineReason::Unwritten { why } => Some(why.as_str()),
            _ => None,
        })
    }

    /// Returns the tools that do not fit the configuration, each with the reason.
    ///
    /// These tools cannot be accepted until the configuration or the upstream is fixed.
    pub fn unusable_tools(&self) -> impl Iterator<Item = (&str, &str)> {
        self.held.iter().filter_map(|change| {
            let why = change.why.iter().find_map(|why| {
                if let QuarantineReason::Unfit { why } = why { Some(why.as_str()) } else { None }
            })?;
            Some((change.tool.as_str(), why))
        })
    }
}

/// The upstreams of a configuration.
#[derive(Clone)]
pub struct Upstreams {
    supervisors: Arc<BTreeMap<String, Arc<UpstreamSupervisor>>>,
    resource_updates: ResourceUpdateSender,
}

/// Options for starting upstreams.
#[derive(Debug, Clone, Default)]
pub struct UpstreamOptions {
    /// The directory of the pin files [default: keep pins in memory].
    pub pin_dir: Option<PathBuf>,
    /// A program that kills child processes when this process ends; see
    /// [`run_as_helper_if_requested`](crate::run_as_helper_if_requested).
    pub launcher: Option<PathBuf>,
}

impl Upstreams {
    /// Starts all upstreams, and waits until each one answered or failed once, at most for `wait`.
    pub async fn start(
        config: &Config,
        options: &UpstreamOptions,
        wait: Duration,
    ) -> std::io::Result<Self> {
        let updates = ResourceUpdateSender::new(256);
        let mut opened = Vec::new();
        for upstream in &config.upstreams {
            opened.push((upstream, Pins::open(options.pin_dir.as_deref(), upstream)?));
        }
        let mut supervisors = BTreeMap::new();
        // Do everything that can fail before starting a process.
        for (upstream, pins) in opened {
            supervisors.insert(
                upstream.name.clone(),
                UpstreamSupervisor::start(
                    upstream.clone(),
                    pins,
                    options.launcher.clone(),
                    updates.clone(),
                ),
            );
        }
        let all = Self { supervisors: Arc::new(supervisors), resource_updates: updates };
        let settled = futures_util::future::join_all(
            all.supervisors.values().map(|supervisor| supervisor.wait_for_first_attempt()),
        );
        let _ = tokio::time::timeout(wait, settled).await;
        all.quarantine_shadowing_tools(config);
        Ok(all)
    }

    /// Returns the health of each upstream.
    #[must_use]
    pub fn health(&self) -> Vec<UpstreamHealth> {
        self.supervisors.values().map(|supervisor| supervisor.health()).collect()
    }

    /// Returns the health of each upstream, including tools that do not fit the configuration.
    #[must_use]
    pub fn health_with_unusable(&self, unusable: &[UnusableTool]) -> Vec<UpstreamHealth> {
        let mut all = self.health();
        // Skip awaited tools: their upstream is down or already lists the tool as quarantined.
        for unusable_tool in unusable.iter().filter(|unusable_tool| !unusable_tool.is_awaited) {
            let Some(health) = all.iter_mut().find(|health| health.name == unusable_tool.upstream)
            else {
                continue;
            };
            let why = QuarantineReason::Unfit { why: unusable_tool.reason.clone() };
            match health.held.iter_mut().find(|change| change.tool == unusable_tool.tool) {
                Some(change) if change.why.contains(&why) => {}
                Some(change) => change.why.push(why),
                None => health.held.push(self.describe_unusable(unusable_tool, why)),
            }
        }
        all
    }

    /// Describes an unchanged tool that is quarantined.
    fn describe_unusable(&self, unusable: &UnusableTool, why: QuarantineReason) -> QuarantinedTool {
        let catalogs =
            self.supervisors.get(&unusable.upstream).map(|supervisor| supervisor.catalog());
        let now = catalogs
            .iter()
            .flat_map(|catalog| &catalog.tools)
            .find(|tool| tool.name == unusable.tool);
        let now = now.and_then(|tool| serde_json::to_value(tool).ok()).unwrap_or_default();
        QuarantinedTool {
            upstream: unusable.upstream.clone(),
            tool: unusable.tool.clone(),
            before: Some(now.clone()),
            now,
            why: vec![why],
        }
    }

    /// Returns the channel for resource updates.
    pub(crate) const fn resource_updates(&self) -> &ResourceUpdateSender {
        &self.resource_updates
    }

    /// Returns an upstream by name.
    pub(crate) fn supervisor(&self, name: &str) -> Option<&Arc<UpstreamSupervisor>> {
        self.supervisors.get(name)
    }

    pub(crate) fn supervisors(&self) -> impl Iterator<Item = &Arc<UpstreamSupervisor>> {
        self.supervisors.values()
    }

    /// Builds the upstreams of a new configuration, reusing unchanged ones so that their calls go
    /// on.
    ///
    /// New upstreams are awaited until `start_deadline` completes.
    pub(crate) async fn reload(
        &self,
        config: &Config,
        options: &UpstreamOptions,
        start_deadline: impl Future<Output = ()>,
    ) -> std::io::Result<Self> {
        let mut opened = Vec::new();
        for upstream in &config.upstreams {
            let unchanged = self
                .supervisors
                .get(&upstream.name)
                .filter(|supervisor| supervisor.has_config(upstream));
            let pins = if unchanged.is_some() {
                None
            } else {
                Some(Pins::open(options.pin_dir.as_deref(), upstream)?)
            };
            opened.push((upstream, unchanged, pins));
        }
        let (mut supervisors, mut started) = (BTreeMap::new(), Vec::new());
        for (upstream, unchanged, pins) in opened {
            let supervisor = match (unchanged, pins) {
                (Some(supervisor), _) => {
                    supervisor.recheck_pins_and_references();
                    Arc::clone(supervisor)
                }
                (None, Some(pins)) => {
                    let supervisor = UpstreamSupervisor::start(
                        upstream.clone(),
                        pins,
                        options.launcher.clone(),
                        self.resource_updates.clone(),
                    );
                    // Carry over subscriptions and the log level.
                    if let Some(before) = self.supervisors.get(&upstream.name) {
                        let uris = crate::gateway::lock(&before.subscribed_uris).clone();
                        *crate::gateway::lock(&supervisor.subscribed_uris) = uris;
                        let level = *crate::gateway::lock(&before.log_level);
                        *crate::gateway::lock(&supervisor.log_level) = level;
                    }
                    started.push(Arc::clone(&supervisor));
                    supervisor
                }
                (None, None) => continue,
            };
            supervisors.insert(upstream.name.clone(), supervisor);
        }
        tokio::select! {
            _ = futures_util::future::join_all(started.iter().map(|supervisor| supervisor.wait_for_first_attempt())) => {}
            () = start_deadline => {}
        }
        Ok(Self {
            supervisors: Arc::new(supervisors),
            resource_updates: self.resource_updates.clone(),
        })
    }

    /// Stops the upstreams that are not in `others`, each once it is idle.
    pub(crate) async fn stop_all_except(&self, others: &Self, timeout: Duration) {
        let removed = self.supervisors.values().filter(|supervisor| {
            !others.supervisors.values().any(|other| Arc::ptr_eq(supervisor, other))
        });
        futures_util::future::join_all(
            removed.map(|supervisor| supervisor.stop_when_idle(timeout)),
        )
        .await;
    }

    /// Stops all upstreams and their child processes.
    pub async fn stop_all(&self) {
        futures_util::future::join_all(
            self.supervisors.values().map(|supervisor| supervisor.stop()),
        )
        .await;
    }

    /// Quarantines tools that mention another upstream's tool.
    pub(crate) fn quarantine_shadowing_tools(&self, config: &Config) {
        let names = crate::upstream::scan_shadowing::ToolNameIndex::build(
            config,
            self.supervisors.values().map(|supervisor| (&supervisor.upstream, &supervisor.pins)),
        );
        self.supervisors.values().for_each(|supervisor| supervisor.quarantine_shadowing(&names));
    }
}

impl Backend for Upstreams {
    fn accepted_tools(&self, upstream: &str) -> Option<Vec<RemoteToolSpec>> {
        self.supervisors.get(upstream).and_then(|supervisor| supervisor.accepted_tools())
    }

    fn quarantined_tools(&self, upstream: &str) -> Vec<String> {
        self.supervisors
            .get(upstream)
            .map(|supervisor| new_quarantined_tools(&supervisor.pins))
            .unwrap_or_default()
    }

    fn remote_handler(&self, upstream: &UpstreamConfig, tool: &str) -> Arc<dyn Handler> {
        match self.supervisors.get(&upstream.name) {
            Some(supervisor) => Arc::new(crate::upstream::remote_tool::RemoteToolHandler::new(
                Arc::clone(supervisor),
                tool,
            )),
            None => {
                Arc::new(crate::upstream::remote_tool::DisconnectedHandler(upstream.name.clone()))
            }
        }
    }

    fn http_handler(&self, tool: &HttpTool) -> Arc<dyn Handler> {
        crate::http_tool::http_tool_handler(tool)
    }
}

/// Returns the tools that were never accepted.
fn new_quarantined_tools(pins: &Pins) -> Vec<String> {
    pins.quarantined()
        .into_iter()
        .filter(|change| change.before.is_none())
        .map(|change| change.tool)
        .collect()
}

/// The accepted tools of a configuration's upstreams, read from the pin files.
///
/// Serves to inspect a configuration without connecting. Calls cannot run.
pub struct PinnedTools(BTreeMap<String, (Vec<RemoteToolSpec>, Vec<String>)>);

impl PinnedTools {
    /// Reads the pin files.
    ///
    /// # Errors
    /// A pin file cannot be read.
    pub fn read(config: &Config, pins: &std::path::Path) -> std::io::Result<Self> {
        let mut known = BTreeMap::new();
        for upstream in &config.upstreams {
            let pins = Pins::open(Some(pins), upstream)?;
            if let Some(tools) = pins.accepted() {
                known.insert(
                    upstream.name.clone(),
                    (
                        tools
                            .into_iter()
                            .map(crate::upstream::supervisor::remote_tool_spec)
                            .collect(),
                        new_quarantined_tools(&pins),
                    ),
                );
            }
        }
        Ok(Self(known))
    }
}

impl Backend for PinnedTools {
    fn accepted_tools(&self, upstream: &str) -> Option<Vec<RemoteToolSpec>> {
        self.0.get(upstream).map(|(tools, _)| tools.clone())
    }

    fn quarantined_tools(&self, upstream: &str) -> Vec<String> {
        self.0.get(upstream).map(|(_, quarantined)| quarantined.clone()).unwrap_or_default()
    }

    fn remote_handler(&self, upstream: &UpstreamConfig, _: &str) -> Arc<dyn Handler> {
        Arc::new(crate::upstream::remote_tool::DisconnectedHandler(upstream.name.clone()))
    }

    fn http_handler(&self, tool: &HttpTool) -> Arc<dyn Handler> {
        crate::http_tool::http_tool_handler(tool)
    }

    fn is_live(&self) -> bool {
        false
    }
}
