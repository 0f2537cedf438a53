//! Builds the agents and rules of one version of the configuration.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use toolgate::{Agent, Toolgate};
use toolgate_config::{Config, ConfigError, ExposedTool, GatewayConfig, UnusableTool};

use crate::gateway::GatewayOptions;
use crate::gateway::canary::{CANARY, build_canary_agent};
use crate::gateway::metrics::Metrics;
use crate::gateway::workspaces::Workspaces;
use crate::server::auth::Authenticator;
use crate::upstream::{UpstreamSupervisor, Upstreams};

/// One version of the configuration, and what was built from it.
pub(crate) struct ActiveConfig {
    pub(crate) runtime: Toolgate,
    pub(crate) settings: GatewayConfig,
    pub(crate) authenticator: Authenticator,
    pub(crate) upstreams: Upstreams,
    pub(crate) exposed: BTreeMap<(String, String), ExposedTool>,
    /// The upstreams of each agent, for prompts, resources and notifications.
    pub(crate) upstreams_by_agent: BTreeMap<String, Vec<Arc<UpstreamSupervisor>>>,
    pub(crate) agents: Vec<String>,
    /// Tools whose arguments may be repeated in HTTP headers.
    pub(crate) header_tools: BTreeSet<String>,
    /// Change counter of each upstream when the rules were built.
    pub(super) upstream_versions: BTreeMap<String, u64>,
    /// Configured tools that do not match the upstream, or are missing there.
    pub(super) mismatches: Vec<UnusableTool>,
}

impl ActiveConfig {
    pub(super) async fn build(
        config: Config,
        options: &GatewayOptions,
        workspaces: &Arc<Workspaces>,
        upstreams: Upstreams,
        metrics: &Metrics,
        before: Option<&Self>,
    ) -> io::Result<Self> {
        let authenticator =
            Authenticator::new(&config.gateway, before.map(|before| &before.authenticator)).await?;
        let own_paths: Vec<PathBuf> =
            config.dependencies().chain(options.own_paths.iter().cloned()).collect();
        let config = workspaces.open(config, &options.store, &own_paths).await?;
        let config = match &options.launcher {
            Some(launcher) => config.with_launcher(launcher),
            None => config,
        };
        let upstream_versions = upstreams
            .supervisors()
            .map(|supervisor| (supervisor.upstream.name.clone(), *supervisor.list_changes.borrow()))
            .collect();
        // Tools that appeared since the upstreams started are checked before they are offered.
        upstreams.quarantine_shadowing_tools(&config);
        let agent_upstreams: BTreeMap<String, Option<Vec<String>>> = config.agent_upstreams();
        let config = config.with_backend(&upstreams);
        let config = match &options.built_in_rules {
            Some(rules) => config.with_policies("(built in)", |tools| rules(tools)),
            None => config,
        };
        let exposed: BTreeMap<_, _> = config
            .exposed_tools()
            .iter()
            .map(|tool| ((tool.agent.clone(), tool.name.clone()), tool.clone()))
            .collect();
        let (settings, redact) = (config.gateway.clone(), config.redact.clone());
        let agent_names: Vec<String> = config.agent_names().map(str::to_owned).collect();
        let (agents, mismatches) =
            config.build_with_upstreams(None).map_err(|error| load_error(&error))?;
        log_mismatches(
            &mismatches,
            before.map(|before| before.mismatches.as_slice()).unwrap_or_default(),
        );
        let mut builder =
            Toolgate::builder().store(Arc::clone(&options.store)).agent(build_canary_agent()?);
        for pattern in &redact {
            builder = builder.redact_pattern(pattern).map_err(io::Error::other)?;
        }
        let known = agents.iter().flat_map(|agent| {
            agent.tools().map(|spec| (agent.name().to_owned(), spec.name().to_owned()))
        });
        metrics.set_known_tools(known.chain([(CANARY.to_owned(), CANARY.to_owned())]).collect());
        let event_metrics = metrics.clone();
        builder = builder.on_event(move |event| event_metrics.on_event(event));
        let runtime = agents.into_iter().fold(builder, toolgate::ToolgateBuilder::agent).build()?;
        let upstreams_by_agent = agent_names
            .iter()
            .map(|name| {
                let declared = exposed
                    .values()
                    .filter(|tool| tool.agent == *name)
                    .map(|tool| tool.upstream.clone());
                let names: Vec<String> = match agent_upstreams.get(name) {
                    Some(Some(named)) => named.clone(),
                    _ if agent_names.len() == 1 => upstreams
                        .supervisors()
                        .map(|supervisor| supervisor.upstream.name.clone())
                        .collect(),
                    _ => declared.collect(),
                };
                let supervisors = upstreams
                    .supervisors()
                    .filter(|supervisor| names.contains(&supervisor.upstream.name))
                    .cloned()
                    .collect();
                (name.clone(), supervisors)
            })
            .collect();
        let header_tools =
            agent_names.iter().filter_map(|name| runtime.agent(name)).flat_map(Agent::tools);
        let header_tools = header_tools
            .filter(|spec| spec.input_schema().is_some_and(crate::has_header_arguments));
        let header_tools = header_tools.map(|spec| spec.name().to_owned()).collect();
        Ok(Self {
            runtime,
            settings,
            upstreams,
            exposed,
            upstreams_by_agent,
            agents: agent_names,
            header_tools,
            upstream_versions,
            mismatches,
            authenticator,
        })
    }

    /// Returns the agent of requests that name none.
    pub(crate) fn default_agent(&self) -> Option<&str> {
        self.settings
            .agent
            .as_deref()
            .or_else(|| self.agents.first().map(String::as_str).filter(|_| self.agents.len() == 1))
    }
}

/// Logs each mismatch once while it persists.
fn log_mismatches(mismatches: &[UnusableTool], before: &[UnusableTool]) {
    let before: BTreeSet<&UnusableTool> = before.iter().collect();
    for UnusableTool { agent, upstream, tool, reason: why, is_awaited, .. } in
        mismatches.iter().filter(|mismatch| !before.contains(mismatch))
    {
        let what = if *is_awaited {
            "is missing and will be used when it appears"
        } else {
            "is quarantined until the mismatch is fixed"
        };
        tracing::warn!(agent, upstream, tool, why, "an upstream tool {what}");
    }
}

pub(super) fn load_error(error: &ConfigError) -> io::Error {
    io::Error::other(format!("the configuration does not load\n\n{}", error.render(false)))
}
