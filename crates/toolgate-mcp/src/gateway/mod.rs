//! Holds the state of the gateway: the active configuration, and the state that outlives a reload.

mod active_config;
pub(crate) mod canary;
pub(crate) mod metrics;
mod reload_on_change;
pub(crate) mod workspaces;

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant};

use rmcp::RoleServer;
use rmcp::service::Peer;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use toolgate::policy::source::CANARY_PRINCIPAL;
use toolgate::{Agent, CallId, Store, Timestamp, ToolSpec, Toolgate};
use toolgate_config::Config;

pub(crate) use crate::gateway::active_config::ActiveConfig;
use crate::gateway::active_config::load_error;
use crate::gateway::metrics::Metrics;
use crate::gateway::workspaces::Workspaces;
use crate::resources::ResourceSubscriptions;
use crate::server::default_session::DefaultSessions;
use crate::server::suspended_calls::{InflightGuard, SuspendedCalls};
use crate::upstream::{UpstreamOptions, Upstreams};

/// Maximum number of attempts to reconcile a call.
const MAX_RECONCILE_ATTEMPTS: u8 = 5;
/// Timeout for running calls during shutdown.
pub(crate) const CALL_SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout for a running reload during shutdown.
const RELOAD_SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// Options to open a gateway.
#[derive(Clone)]
pub struct GatewayOptions {
    /// The ledger.
    ///
    /// A ledger on disk also keeps the journals of changes to files of agents. With any other
    /// store, files are read-only.
    pub store: Arc<dyn Store>,
    /// How upstreams are started.
    pub upstreams: UpstreamOptions,
    /// Maximum time to wait for upstreams before the gateway starts without them.
    pub upstream_start_timeout: Duration,
    /// Program that starts command tools and command hooks in their sandboxes; see
    /// [`toolgate_process::sandbox::run_as_helper_if_requested`].
    pub launcher: Option<PathBuf>,
    /// Principal of calls over standard streams, and over HTTP if no token is required.
    pub principal: String,
    /// Rules in addition to those of the configuration.
    pub built_in_rules: Option<BuiltInRulesFn>,
    /// Toolgate's own files besides the configuration and the ledger.
    ///
    /// A workspace of an agent may neither contain them nor be inside them.
    pub own_paths: Vec<PathBuf>,
}

/// Builds a policy file for the tools of an agent.
pub type BuiltInRulesFn = Arc<dyn Fn(&[&ToolSpec]) -> String + Send + Sync>;

/// A gateway: agents, their upstreams, and its listeners. Cheap to clone.
#[derive(Clone)]
pub struct Gateway(pub(crate) Arc<Inner>);

/// Reads the configuration.
type GatewayConfigLoader = Arc<dyn Fn() -> io::Result<Config> + Send + Sync>;

pub(crate) struct Inner {
    read_config: GatewayConfigLoader,
    options: GatewayOptions,
    workspaces: Arc<Workspaces>,
    active: RwLock<Arc<ActiveConfig>>,
    /// Allows one reload at a time.
    reload_lock: tokio::sync::Mutex<()>,
    /// Clients to notify of changed lists.
    peers: Mutex<Vec<Peer<RoleServer>>>,
    pub(crate) changes: tokio::sync::watch::Sender<u64>,
    pub(crate) suspended: SuspendedCalls,
    pub(crate) default_sessions: DefaultSessions,
    pub(crate) metrics: Metrics,
    /// Addresses that the gateway listens on.
    pub(crate) addresses: Mutex<Vec<std::net::SocketAddr>>,
    /// Subscriptions of clients to resources.
    pub(crate) subscriptions: ResourceSubscriptions,
    /// Time and result of the last canary run.
    pub(crate) canary_result: Mutex<Option<(Instant, Result<(), String>)>>,
    /// Number of attempts to reconcile each call.
    reconcile_attempts: Mutex<HashMap<CallId, u8>>,
    /// Cancelled when shutdown starts: no new work is accepted.
    pub(crate) stop: CancellationToken,
    /// Cancelled when all connections are closed.
    pub(crate) closed: CancellationToken,
    /// Tasks that shutdown waits for: listeners, and upstreams that are being stopped.
    pub(crate) listeners: TaskTracker,
    /// Number of running calls.
    pub(crate) inflight: tokio::sync::watch::Sender<usize>,
}

/// Counts a call as running until it is dropped.
pub(crate) struct InflightCount(Gateway);

impl Drop for InflightCount {
    fn drop(&mut self) {
        self.0.0.inflight.send_modify(|count| *count = count.saturating_sub(1));
    }
}

impl Gateway {
    /// Opens a gateway: starts the upstreams, builds the agents and runs the canary.
    ///
    /// # Errors
    /// The configuration does not load, or the canary call is not denied.
    pub async fn open(
        config: impl Fn() -> io::Result<Config> + Send + Sync + 'static,
        options: GatewayOptions,
    ) -> io::Result<Self> {
        if options.principal == CANARY_PRINCIPAL {
            return Err(io::Error::other(format!(
                "principal name `{CANARY_PRINCIPAL}` is reserved for the self-test"
            )));
        }
        let config: GatewayConfigLoader = Arc::new(config);
        let stop = CancellationToken::new();
        let (metrics, suspended) = (Metrics::new(), SuspendedCalls::new(stop.clone())?);
        let loaded = config()?;
        let upstreams =
            Upstreams::start(&loaded, &options.upstreams, options.upstream_start_timeout).await?;
        let workspaces = Arc::<Workspaces>::default();
        let active = match ActiveConfig::build(
            loaded,
            &options,
            &workspaces,
            upstreams.clone(),
            &metrics,
            None,
        )
        .await
        {
            Ok(active) => active,
            Err(error) => {
                upstreams.stop_all().await;
                return Err(error);
            }
        };
        let gateway = Self(Arc::new(Inner {
            read_config: config,
            options,
            workspaces,
            active: RwLock::new(Arc::new(active)),
            reload_lock: tokio::sync::Mutex::default(),
            peers: Mutex::default(),
            changes: tokio::sync::watch::Sender::new(0),
            suspended,
            default_sessions: DefaultSessions::default(),
            metrics,
            addresses: Mutex::default(),
            subscriptions: ResourceSubscriptions::default(),
            canary_result: Mutex::default(),
            reconcile_attempts: Mutex::default(),
            stop,
            closed: CancellationToken::new(),
            listeners: TaskTracker::new(),
            inflight: tokio::sync::watch::Sender::new(0),
        }));
        gateway.0.metrics.register_gauges(Arc::downgrade(&gateway.0));
        tokio::spawn(gateway.clone().forward_updates());
        tokio::spawn(gateway.clone().reload_on_upstream_change());
        if let Err(why) = gateway.run_canary().await {
            gateway.shut_down().await;
            return Err(io::Error::other(format!("the canary check failed: {why}")));
        }
        Ok(gateway)
    }

    pub(crate) fn active_config(&self) -> Arc<ActiveConfig> {
        Arc::clone(&self.0.active.read().unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    /// Returns the health of the upstreams.
    #[must_use]
    pub fn health(&self) -> Vec<crate::UpstreamHealth> {
        let active = self.active_config();
        active.upstreams.health_with_unusable(&active.mismatches)
    }

    /// Returns the pin files, in which quarantined tools can be accepted.
    #[must_use]
    pub fn pin_files(&self) -> Vec<PathBuf> {
        self.active_config()
            .upstreams
            .supervisors()
            .filter_map(|supervisor| supervisor.pin_file().map(std::path::Path::to_owned))
            .collect()
    }

    /// Returns the number of tools of each agent.
    #[must_use]
    pub fn tool_counts(&self) -> Vec<(String, usize)> {
        let active = self.active_config();
        let count = |name: &String| {
            (name.clone(), active.runtime.agent(name).map_or(0, |agent| agent.tools().count()))
        };
        active.agents.iter().map(count).collect()
    }

    /// Returns the current runtime.
    #[must_use]
    pub fn runtime(&self) -> Toolgate {
        self.active_config().runtime.clone()
    }

    /// Reads the configuration again.
    ///
    /// Running calls continue under the previous configuration. If the new one does not load,
    /// nothing changes.
    ///
    /// # Errors
    /// The configuration does not load, or the gateway is shutting down.
    pub async fn reload(&self) -> io::Result<()> {
        let (config, stop) = (&self.0.read_config, &self.0.stop);
        let shutdown_error = || io::Error::other("the gateway is shutting down");
        let _guard = self.0.reload_lock.lock().await;
        if stop.is_cancelled() {
            return Err(shutdown_error());
        }
        let before = self.active_config();
        let loaded = config()?;
        // Upstreams are not started for a configuration that cannot load. All errors are reported
        // at once, with the tools that are known now.
        if let Err(error) = loaded.check() {
            return Err(load_error(
                &loaded.with_backend(&before.upstreams).build_agents(None).err().unwrap_or(error),
            ));
        }
        let start_deadline = async {
            drop(
                tokio::time::timeout(self.0.options.upstream_start_timeout, stop.cancelled()).await,
            )
        };
        let upstreams =
            before.upstreams.reload(&loaded, &self.0.options.upstreams, start_deadline).await?;
        let (options, workspaces) = (&self.0.options, &self.0.workspaces);
        let built = tokio::select! {
            biased;
            () = stop.cancelled() => Err(shutdown_error()),
            built = ActiveConfig::build(loaded, options, workspaces, upstreams.clone(), &self.0.metrics, Some(&before)) => built,
        };
        let public_address =
            lock(&self.0.addresses).iter().find(|address| !address.ip().is_loopback()).copied();
        let built = built.and_then(|active| match public_address {
            Some(address) if active.authenticator.is_auth_disabled() => {
                Err(io::Error::other(format!("{address} is reachable from other hosts, and the new configuration requires no token")))
            }
            // Shutdown would not stop upstreams of a configuration that takes effect now.
            _ if stop.is_cancelled() => Err(shutdown_error()),
            _ => Ok(active),
        });
        match built {
            Ok(active) => {
                *self.0.active.write().unwrap_or_else(std::sync::PoisonError::into_inner) =
                    Arc::new(active);
                self.drop_revoked_subscriptions();
                self.sync_subscriptions();
                self.notify_changed().await;
                let stop = self.0.stop.clone();
                // Calls to removed upstreams may finish. During shutdown they get as much time as
                // other calls.
                self.0.listeners.spawn(async move {
                    tokio::select! {
                        () = before.upstreams.stop_all_except(&upstreams, Duration::from_secs(10 * 60)) => {}
                        () = stop.cancelled() => before.upstreams.stop_all_except(&upstreams, CALL_SHUTDOWN_TIMEOUT).await,
                    }
                });
                Ok(())
            }
            Err(error) => {
                upstreams.stop_all_except(&before.upstreams, Duration::ZERO).await;
                Err(error)
            }
        }
    }

    /// Runs the canary and reconciles calls with an unknown outcome, at an interval.
    pub async fn run_periodic_checks(&self, interval: Duration) {
        tokio::join!(self.run_canary_periodically(interval), self.reconcile_periodically(interval));
    }

    async fn reconcile_periodically(&self, interval: Duration) {
        loop {
            tokio::select! {
                () = async {
                    self.reconcile().await;
                    tokio::time::sleep(interval).await;
                } => {}
                () = self.0.stop.cancelled() => return,
            }
        }
    }

    /// Reconciles calls with an unknown outcome through the `reconcile` tool of their tool.
    ///
    /// A call is reconciled only after its lease, because it may be running until then and would be
    /// reported as not made. After some failed attempts, a person must settle the call.
    async fn reconcile(&self) {
        let can_reconcile = |agent: &Agent| agent.tools().any(ToolSpec::can_be_reconciled);
        if !self
            .tool_counts()
            .iter()
            .filter_map(|(name, _)| self.runtime().agent(name).map(can_reconcile))
            .any(|can| can)
        {
            return;
        }
        let (before, mut attempts) =
            (std::mem::take(&mut *lock(&self.0.reconcile_attempts)), HashMap::new());
        let gate = self.runtime();
        let is_due = |intent: &toolgate::store::ClaimRecord| {
            let is_reconcilable = gate
                .agent(&intent.key.agent)
                .and_then(|agent| agent.tool(&intent.tool))
                .is_some_and(ToolSpec::can_be_reconciled);
            if Timestamp::now() <= intent.lease {
                return false;
            }
            let count = before.get(&intent.call).copied().unwrap_or_default();
            attempts.insert(intent.call, count.saturating_add(1));
            is_reconcilable && count < MAX_RECONCILE_ATTEMPTS
        };
        match gate.reconcile_matching(is_due).await {
            Err(error) => tracing::warn!(%error, "cannot reconcile calls with an unknown outcome"),
            Ok(found) => {
                for (call, outcome) in found {
                    tracing::info!(%call, outcome = ?outcome, "reconciled a call");
                }
            }
        }
        *lock(&self.0.reconcile_attempts) = attempts;
    }

    /// Registers a client for notifications of changed lists.
    pub(crate) fn register_peer(&self, peer: Peer<RoleServer>) {
        let mut peers = lock(&self.0.peers);
        if peers.len() % 64 == 63 {
            peers.retain(|peer| !peer.is_transport_closed());
        }
        peers.push(peer);
    }

    /// Notifies clients that lists have changed.
    pub(crate) async fn notify_changed(&self) {
        self.0.changes.send_modify(|count| *count += 1);
        let peers = {
            let mut peers = lock(&self.0.peers);
            peers.retain(|peer| !peer.is_transport_closed());
            peers.clone()
        };
        // In parallel, so that a slow client does not delay the others.
        let notify = |peer: Peer<RoleServer>| async move {
            let _ = tokio::time::timeout(Duration::from_secs(1), async {
                let _ = peer.notify_tool_list_changed().await;
                let _ = peer.notify_prompt_list_changed().await;
                let _ = peer.notify_resource_list_changed().await;
            })
            .await;
        };
        futures_util::future::join_all(peers.into_iter().map(notify)).await;
    }

    /// Returns whether shutdown has started.
    #[must_use]
    pub fn is_shutting_down(&self) -> bool {
        self.0.stop.is_cancelled()
    }

    /// Starts the shutdown: rejects new calls, while running calls continue.
    pub fn start_shutdown(&self) {
        self.0.stop.cancel();
    }

    /// Counts a call as running.
    pub(crate) fn count_call(&self) -> InflightCount {
        self.0.inflight.send_modify(|count| *count += 1);
        InflightCount(self.clone())
    }

    /// Waits until no call is running, up to a timeout.
    pub(crate) async fn wait_idle(&self, timeout: Duration) {
        let mut inflight = self.0.inflight.subscribe();
        let _ = tokio::time::timeout(timeout, inflight.wait_for(|count| *count == 0)).await;
    }

    /// Shuts the gateway down and stops what it started.
    pub async fn shut_down(&self) {
        self.0.stop.cancel();
        // Abandons suspended calls. Each counts as running until it is settled and recorded.
        for call in self.0.suspended.take_all() {
            *lock(&call.guard) = Some(InflightGuard::new(self.count_call(), None));
            tokio::spawn(call.abandon());
        }
        self.wait_idle(CALL_SHUTDOWN_TIMEOUT).await;
        // A running reload stops what it has started. Only then the list of upstreams is final.
        let _reading =
            tokio::time::timeout(RELOAD_SHUTDOWN_TIMEOUT, self.0.reload_lock.lock()).await;
        // Listeners send their last messages before their connections close.
        self.0.listeners.close();
        let _ = tokio::time::timeout(Duration::from_secs(4), self.0.listeners.wait()).await;
        self.0.closed.cancel();
        self.active_config().upstreams.stop_all().await;
    }

    pub(crate) fn default_principal(&self) -> &str {
        &self.0.options.principal
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
