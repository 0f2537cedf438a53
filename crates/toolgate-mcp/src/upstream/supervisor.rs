//! Supervises one upstream: starts it, watches it, restarts it, and publishes its status.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use rmcp::RoleClient;
use rmcp::model::{LoggingLevel, ProgressToken, ProtocolVersion, RequestId};
use rmcp::service::Peer;
use serde::Serialize;
use tokio::sync::{Notify, Semaphore, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use toolgate::Timestamp;
use toolgate_config::{Credentials, UpstreamConfig, UpstreamTransport};

use super::pins::{Pins, QuarantinedTool};
use crate::gateway::lock;
use crate::upstream::callbacks::{ClientSender, RequestRoutes};
use crate::upstream::catalog::UpstreamCatalog;
use crate::upstream::client_handler::UpstreamClientHandler;
use crate::upstream::notifications::SubscribedUris;
use crate::upstream::transport::direct_http::DirectClient;

pub(super) use crate::upstream::catalog::remote_tool_spec;
pub(super) use crate::upstream::connection_health::UpstreamFailure;

/// A token younger than this cannot have expired, so a 401 means that it is wrong.
const MIN_TOKEN_AGE_FOR_RENEWAL: Duration = Duration::from_secs(2);
/// The time for telling the upstream that its subscriptions end.
const UNSUBSCRIBE_TIMEOUT: Duration = Duration::from_millis(500);
/// The time for a process to exit after its input is closed.
const PROCESS_EXIT_TIMEOUT: Duration = Duration::from_secs(3);
/// The interval between health checks.
pub(crate) const HEALTH_CHECK_INTERVAL: Duration = Duration::from_secs(30);
/// The minimum time between two listings.
const MIN_RELIST_INTERVAL: Duration = Duration::from_millis(250);
/// A connection that lasted this long resets the backoff.
const MIN_STABLE_CONNECTION_AGE: Duration = Duration::from_secs(10);

/// The channel for resource updates of all upstreams.
pub(crate) type ResourceUpdateSender =
    tokio::sync::broadcast::Sender<crate::resources::ResourceKey>;

/// The status of an upstream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum UpstreamStatus {
    /// The upstream has not responded yet.
    Starting,
    /// The upstream is connected.
    Up {
        /// The time of the change.
        since: Timestamp,
    },
    /// The upstream is not connected.
    Down {
        /// The time of the change.
        since: Timestamp,
        /// The reason.
        why: String,
        /// The time of the next attempt.
        next: Timestamp,
    },
}

/// The status of an upstream and its quarantined tools.
#[derive(Debug, Clone, Serialize)]
pub struct UpstreamHealth {
    /// The name of the upstream.
    pub name: String,
    /// The status of the connection.
    #[serde(flatten)]
    pub status: UpstreamStatus,
    /// How often the upstream was started.
    pub starts: u32,
    /// The number of accepted tools.
    pub tools: usize,
    /// The quarantined tools.
    pub held: Vec<QuarantinedTool>,
}

/// The current connection.
pub(crate) struct ActiveConnection {
    /// The number of the connection, counted per upstream.
    pub(crate) generation: u64,
    pub(crate) peer: Peer<RoleClient>,
    /// The fast path for calls, if the upstream supports it.
    pub(crate) direct: Option<DirectClient>,
}

pub(crate) struct UpstreamSupervisor {
    pub(crate) upstream: UpstreamConfig,
    pub(crate) pins: Pins,
    pub(crate) routes: RequestRoutes,
    pub(crate) slots: Semaphore,
    /// Suspended calls, which wait for client input and hold no slot.
    pub(crate) suspended_calls: TaskTracker,
    pub(crate) launcher: Option<PathBuf>,
    status: watch::Sender<UpstreamStatus>,
    /// The current connection.
    connection: Mutex<Option<Arc<ActiveConnection>>>,
    /// Since when the upstream is not connected, if it is not.
    down_since: Mutex<Timestamp>,
    pub(crate) catalog: Mutex<Arc<UpstreamCatalog>>,
    /// Counts changes of the lists.
    pub(crate) list_changes: watch::Sender<u64>,
    /// Counts announced changes that changed nothing.
    pub(crate) announced_changes: watch::Sender<u64>,
    pub(crate) announcement_limiter: crate::upstream::connection_health::ListChangedLimiter,
    /// Resource updates of all upstreams.
    pub(crate) resource_updates: ResourceUpdateSender,
    /// Resources that clients are subscribed to.
    pub(crate) subscribed_uris: Mutex<SubscribedUris>,
    pub(crate) resubscribe_requested: Notify,
    /// The log level that was requested last.
    pub(crate) log_level: Mutex<Option<LoggingLevel>>,
    /// Serializes subscription requests to the upstream.
    pub(crate) subscription_lock: tokio::sync::Mutex<()>,
    /// The upstream announced a change that was not read yet.
    pub(crate) is_change_announced: AtomicBool,
    pub(crate) relist_requested: Notify,
    /// The generation of the last connection whose session was lost.
    lost_generation: watch::Sender<u64>,
    pub(crate) start_count: AtomicU32,
    pub(crate) breaker: crate::upstream::connection_health::CircuitBreaker,
    /// Set while the upstream may have changed its protocol revision.
    pub(crate) revision_suspicion:
        Mutex<Option<crate::upstream::connection_health::RevisionSuspicion>>,
    /// Counts responses.
    pub(crate) response_count: AtomicU64,
    /// The circuit breaker opened, and the upstream has not responded since.
    pub(crate) is_suspect: AtomicBool,
    /// Consecutive error responses to listings, reset by any successful request.
    pub(crate) listing_refusals: AtomicU32,
    /// Consecutive listings that the upstream rejected as one of another revision would.
    pub(crate) revision_rejections: AtomicU32,
    pub(crate) idle_watch: crate::upstream::connection_health::IdleWatch,
    /// The last handshake got no response, or the process exited right after a modern handshake.
    pub(crate) is_legacy_handshake_due: AtomicBool,
    /// A secret or variable that the configuration refers to is missing.
    pub(crate) has_missing_references: AtomicBool,
    /// Notified when the missing references exist.
    pub(crate) retry_requested: Notify,
    stderr_tail: Mutex<std::collections::VecDeque<String>>,
    pub(crate) stop_requested: CancellationToken,
    stopped: watch::Sender<bool>,
}

impl UpstreamSupervisor {
    pub(crate) fn start(
        upstream: UpstreamConfig,
        pins: Pins,
        launcher: Option<PathBuf>,
        updates: ResourceUpdateSender,
    ) -> Arc<Self> {
        let catalog = UpstreamCatalog {
            tools: pins.accepted().unwrap_or_default(),
            ..UpstreamCatalog::default()
        };
        let supervisor = Arc::new(Self {
            slots: Semaphore::new(upstream.max_concurrency),
            suspended_calls: TaskTracker::new(),
            idle_watch: crate::upstream::connection_health::IdleWatch::new(upstream.timeout),
            upstream,
            pins,
            routes: RequestRoutes::default(),
            launcher,
            status: watch::Sender::new(UpstreamStatus::Starting),
            connection: Mutex::default(),
            down_since: Mutex::new(Timestamp::now()),
            catalog: Mutex::new(Arc::new(catalog)),
            list_changes: watch::Sender::new(0),
            announced_changes: watch::Sender::new(0),
            announcement_limiter: crate::upstream::connection_health::ListChangedLimiter::default(),
            resource_updates: updates,
            subscribed_uris: Mutex::default(),
            resubscribe_requested: Notify::new(),
            log_level: Mutex::default(),
            subscription_lock: tokio::sync::Mutex::default(),
            is_change_announced: AtomicBool::new(false),
            relist_requested: Notify::new(),
            lost_generation: watch::Sender::new(0),
            start_count: AtomicU32::new(0),
            breaker: crate::upstream::connection_health::CircuitBreaker::default(),
            revision_suspicion: Mutex::default(),
            response_count: AtomicU64::new(0),
            is_suspect: AtomicBool::new(false),
            listing_refusals: AtomicU32::new(0),
            revision_rejections: AtomicU32::new(0),
            is_legacy_handshake_due: AtomicBool::new(false),
            has_missing_references: AtomicBool::new(false),
            retry_requested: Notify::new(),
            stderr_tail: Mutex::default(),
            stop_requested: CancellationToken::new(),
            stopped: watch::Sender::new(false),
        });
        tokio::spawn(Arc::clone(&supervisor).supervise());
        supervisor
    }

    /// Returns whether the supervisor runs this configuration.
    pub(crate) fn has_config(&self, upstream: &UpstreamConfig) -> bool {
        // References are compared by their current value and by the value used for the connection.
        self.upstream.is_unchanged(upstream)
    }

    /// Waits until the first attempt to connect succeeded or failed.
    pub(crate) async fn wait_for_first_attempt(&self) {
        let mut status = self.status.subscribe();
        let _ = status.wait_for(|status| *status != UpstreamStatus::Starting).await;
    }

    /// Stops the supervisor and its child process.
    pub(crate) async fn stop(&self) {
        self.stop_requested.cancel();
        let mut stopped = self.stopped.subscribe();
        let _ = tokio::time::timeout(Duration::from_secs(10), stopped.wait_for(|stopped| *stopped))
            .await;
    }

    /// Connects, watches the connection, and reconnects with backoff.
    async fn supervise(self: Arc<Self>) {
        let mut attempts: u32 = 0;
        while !self.stop_requested.is_cancelled() {
            self.start_count.fetch_add(1, Ordering::Relaxed);
            let why = self.run_connection(&mut attempts).await;
            *lock(&self.connection) = None;
            if self.stop_requested.is_cancelled() {
                break;
            }
            let wait = crate::upstream::connection_health::reconnect_backoff(attempts);
            attempts = attempts.saturating_add(1);
            let now = Timestamp::now();
            let next = now.checked_add(wait).unwrap_or(now);
            let why = self.with_stderr_tail(why);
            self.status.send_modify(|status| {
                let (since, is_new) = match status {
                    UpstreamStatus::Down { since, why: before, .. } => (*since, *before != why),
                    _ => (now, true),
                };
                // Log each reason once.
                if is_new {
                    tracing::warn!(upstream = self.upstream.name, why, "upstream is down");
                }
                *status = UpstreamStatus::Down { since, why, next };
            });
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = self.retry_requested.notified() => {}
                () = self.stop_requested.cancelled() => {}
            }
        }
        self.stopped.send_replace(true);
    }

    /// Runs one connection, and returns why it ended.
    async fn run_connection(self: &Arc<Self>, attempts: &mut u32) -> String {
        // Do not connect while a reference is missing.
        let missing = self.upstream.missing_references();
        self.has_missing_references.store(!missing.is_empty(), Ordering::Relaxed);
        if !missing.is_empty() {
            return missing.join("; ");
        }
        let mut connection = match self.connect().await {
            Ok(connection) => connection,
            Err(why) => return why,
        };
        let peer = connection.service.peer().clone();
        // Cached responses could be outdated.
        peer.set_response_cache_config(rmcp::service::ClientCacheConfig::disabled()).await;
        let listed = tokio::select! {
            listed = self.refresh_catalog(&peer) => listed.map_err(crate::upstream::catalog::ListError::into_reason),
            () = self.stop_requested.cancelled() => Err("toolgate is stopping".to_owned()),
        };
        if let Err(why) = listed {
            // A program that exits right after a modern handshake may work with the older protocol.
            let has_exited = connection.child.is_some() && connection.closed.is_cancelled();
            self.is_legacy_handshake_due.store(has_exited && is_modern(&peer), Ordering::Relaxed);
            let _ = connection.service.close_with_timeout(Duration::from_secs(2)).await;
            return format!("cannot list its tools: {why}");
        }
        self.on_connected();
        let generation = u64::from(self.start_count.load(Ordering::Relaxed));
        let direct = connection.direct.take();
        *lock(&self.connection) =
            Some(Arc::new(ActiveConnection { generation, peer: peer.clone(), direct }));
        let connected_at = tokio::time::Instant::now();
        self.status.send_replace(UpstreamStatus::Up { since: Timestamp::now() });
        tracing::info!(upstream = self.upstream.name, "upstream is up");
        let why =
            self.watch_connection(&connection.service, &connection.closed, &peer, generation).await;
        // Connections that keep failing early increase the backoff.
        if connected_at.elapsed() > MIN_STABLE_CONNECTION_AGE {
            *attempts = 0;
        }
        *lock(&self.down_since) = Timestamp::now();
        *lock(&self.connection) = None;
        let _ = connection.service.close_with_timeout(Duration::from_secs(2)).await;
        if let Some(child) = connection.child.take() {
            child
                .stop(if self.stop_requested.is_cancelled() {
                    PROCESS_EXIT_TIMEOUT
                } else {
                    Duration::ZERO
                })
                .await;
        }
        why
    }

    /// Watches a connection until it fails, and returns the reason.
    async fn watch_connection(
        self: &Arc<Self>,
        service: &rmcp::service::RunningService<RoleClient, UpstreamClientHandler>,
        closed: &CancellationToken,
        peer: &Peer<RoleClient>,
        generation: u64,
    ) -> String {
        let mut lost_sessions = self.lost_generation.subscribe();
        let mut health_ticks = tokio::time::interval(HEALTH_CHECK_INTERVAL);
        health_ticks.tick().await;
        let mut poll = tokio::time::interval(Duration::from_millis(50));
        let mut last_listing: Option<tokio::time::Instant> = None;
        let mut skipped = 0;
        // Listings run concurrently with the other branches.
        let mut listing: PendingListing<'_> = None;
        let mut changes = Box::pin(async {
            self.restore_log_level(peer).await;
            self.restore_subscriptions(peer).await;
            self.listen_for_changes(peer).await;
        });
        loop {
            tokio::select! {
                () = &mut changes => return "the server closed the connection".to_owned(),
                () = closed.cancelled() => return "the server closed the connection".to_owned(),
                () = self.stop_requested.cancelled() => {
                    // Close the subscriptions first: many servers do not exit while a client
                    // listens.
                    let _ = tokio::time::timeout(UNSUBSCRIBE_TIMEOUT, &mut changes).await;
                    return "toolgate is stopping".to_owned();
                }
                () = async { drop(lost_sessions.wait_for(|lost| *lost >= generation).await) } => return "the server lost the session".to_owned(),
                result = wait_for_listing(&mut listing) => {
                    listing = None;
                    if let Err(why) = result {
                        return why;
                    }
                }
                // Limit the rate of listings, however often changes are announced.
                () = self.relist_requested.notified(), if listing.is_none() && last_listing.is_none_or(|at| at.elapsed() > MIN_RELIST_INTERVAL) => {
                    last_listing = Some(tokio::time::Instant::now());
                    listing = Some(self.check_health(peer, "cannot list its tools").boxed());
                }
                _ = poll.tick() => {
                    if service.is_closed() || peer.is_transport_closed() {
                        return "the server closed the connection".to_owned();
                    }
                }
                _ = health_ticks.tick() => {
                    if let Some(direct) = self.connection().as_ref().and_then(|connection| connection.direct.as_ref()) {
                        direct.close_idle();
                    }
                    // List again even without a notification: it also is the health check.
                    if listing.is_none() && crate::upstream::connection_health::is_health_check_due(&mut skipped, self.is_busy()) {
                        listing = Some(self.check_health(peer, "health check failed").boxed());
                    }
                }
            }
        }
    }

    /// Ends a connection whose session was lost.
    pub(crate) fn report_session_lost(&self, generation: u64) {
        self.lost_generation.send_if_modified(|lost| {
            let is_new = generation > *lost;
            *lost = generation.max(*lost);
            is_new
        });
    }

    /// Returns whether the access token may have expired and can be fetched again.
    pub(crate) fn can_renew_token(&self) -> bool {
        let has_token_grant = matches!(
            &self.upstream.transport,
            UpstreamTransport::Http { credentials: Credentials::ClientCredentials { .. }, .. }
        );
        let is_fresh = |since: &Timestamp| {
            Duration::try_from(Timestamp::now().duration_since(*since))
                .is_ok_and(|age| age < MIN_TOKEN_AGE_FOR_RENEWAL)
        };
        let is_fresh =
            matches!(&*self.status.borrow(), UpstreamStatus::Up { since } if is_fresh(since));
        has_token_grant && !is_fresh
    }

    pub(crate) fn record_stderr_line(&self, line: String) {
        let line = self.upstream.redact_secrets(&line);
        tracing::info!(upstream = self.upstream.name, "{line}");
        let mut lines = lock(&self.stderr_tail);
        lines.push_back(line);
        while lines.len() > 5 {
            lines.pop_front();
        }
    }

    /// Adds the last line of standard error to a reason.
    fn with_stderr_tail(&self, why: String) -> String {
        let lines: Vec<String> = std::mem::take(&mut *lock(&self.stderr_tail)).into();
        let why = self.upstream.redact_secrets(&why);
        match lines.last().filter(|line| !line.is_empty()) {
            Some(line) if *line == why => why,
            Some(line) => format!("{why} (stderr: {})", line.chars().take(200).collect::<String>()),
            None => why,
        }
    }

    /// Returns the peer of the current connection.
    pub(crate) fn peer(&self) -> Option<Peer<RoleClient>> {
        self.connection().map(|connection| connection.peer.clone())
    }

    /// Returns the current connection.
    pub(crate) fn connection(&self) -> Option<Arc<ActiveConnection>> {
        lock(&self.connection).clone()
    }

    /// Returns since when the upstream is not connected.
    pub(crate) fn down_since(&self) -> Timestamp {
        *lock(&self.down_since)
    }

    pub(crate) fn status(&self) -> UpstreamStatus {
        self.status.borrow().clone()
    }

    pub(crate) fn catalog(&self) -> Arc<UpstreamCatalog> {
        Arc::clone(&lock(&self.catalog))
    }

    pub(crate) fn pin_file(&self) -> Option<&std::path::Path> {
        self.pins.file()
    }

    pub(crate) fn health(&self) -> UpstreamHealth {
        UpstreamHealth {
            name: self.upstream.name.clone(),
            status: self.status(),
            starts: self.start_count.load(Ordering::Relaxed),
            tools: self.pins.accepted().map_or(0, |tools| tools.len()),
            held: self.pins.quarantined(),
        }
    }

    /// Returns the client channel that a request or message of the upstream belongs to.
    pub(crate) async fn client_for(&self, origin: Option<&RequestId>) -> Option<ClientSender> {
        self.routes.find(origin).await
    }

    /// Returns the client channel that a progress token belongs to.
    pub(crate) async fn client_by_token(&self, token: &ProgressToken) -> Option<ClientSender> {
        self.routes.find_by_token(token).await
    }
}

/// A listing in progress.
type PendingListing<'q> = Option<BoxFuture<'q, Result<(), String>>>;

/// Waits for the listing in progress, or forever if there is none.
async fn wait_for_listing(listing: &mut PendingListing<'_>) -> Result<(), String> {
    match listing {
        Some(listing) => listing.await,
        None => std::future::pending().await,
    }
}

/// Returns whether the connection uses revision 2026-07-28 or later.
pub(crate) fn is_modern(peer: &Peer<RoleClient>) -> bool {
    peer.peer_info().is_some_and(|info| {
        info.protocol_version.as_str() >= ProtocolVersion::V_2026_07_28.as_str()
    })
}
