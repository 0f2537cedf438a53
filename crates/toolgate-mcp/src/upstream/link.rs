//! One upstream, supervised: started, watched, started again, and known to be away while it is.

mod hello;
mod offer;
mod patience;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use rmcp::RoleClient;
use rmcp::model::{LoggingLevel, ProgressToken, Prompt, ProtocolVersion, RequestId, Resource, ResourceTemplate, ServerCapabilities, Tool};
use rmcp::service::Peer;
use serde::Serialize;
use tokio::sync::{Notify, Semaphore, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use toolgate::Timestamp;
use toolgate::config::{Credentials, Reach, Upstream};

use super::listen::Wanted;
use super::pins::{Change, Pins};
use super::route::{Routes, ToClient};
use super::straight::Straight;
use crate::client::Ears;
use crate::gateway::lock;

pub(super) use offer::remote;
pub(super) use patience::Fault;

/// A token that was fetched within this time has not run out: who does not take it does not want it.
const TOKEN: Duration = Duration::from_secs(2);
/// How long it may take to hear that nobody listens to it any more.
const GOODBYE: Duration = Duration::from_millis(500);
/// How long it may take to end by itself then.
const ENDING: Duration = Duration::from_secs(3);
/// How often it is asked whether it is there.
const PULSE: Duration = Duration::from_secs(30);
/// How soon it is asked again what it offers.
const SOONEST: Duration = Duration::from_millis(250);
/// Who was there for so long is steady.
const STEADY: Duration = Duration::from_secs(10);

/// Where it is told that a resource has changed.
pub(crate) type Updates = tokio::sync::broadcast::Sender<crate::resources::Key>;

/// How an upstream is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Status {
    /// It has not answered yet.
    Starting,
    /// It is there.
    Up {
        /// Since when.
        since: Timestamp,
    },
    /// It is away.
    Down {
        /// Since when.
        since: Timestamp,
        /// Why.
        why: String,
        /// When it is tried again.
        next: Timestamp,
    },
}

/// How an upstream is, and what of it is held back.
#[derive(Debug, Clone, Serialize)]
pub struct Health {
    /// Its name.
    pub name: String,
    /// How it is.
    #[serde(flatten)]
    pub status: Status,
    /// How often it was started.
    pub starts: u32,
    /// How many tools of it were accepted.
    pub tools: usize,
    /// Tools that have changed, or that are odd.
    pub held: Vec<Change>,
}

/// What an upstream offers.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Offer {
    /// Tools, as they were accepted.
    pub(crate) tools: Vec<Tool>,
    /// Prompts.
    pub(crate) prompts: Vec<Prompt>,
    /// Resources.
    pub(crate) resources: Vec<Resource>,
    /// Resources by pattern.
    pub(crate) templates: Vec<ResourceTemplate>,
    /// What it can do beside.
    pub(crate) capabilities: ServerCapabilities,
    /// What it says about its use.
    pub(crate) instructions: Option<String>,
}

/// A connection that stands.
pub(super) struct Standing {
    /// Which one it is.
    pub(super) generation: u64,
    pub(super) peer: Peer<RoleClient>,
    /// The way for calls, where there is one beside.
    pub(super) straight: Option<Straight>,
}

pub(crate) struct Link {
    pub(crate) upstream: Upstream,
    pub(super) pins: Pins,
    pub(super) routes: Routes,
    pub(super) seats: Semaphore,
    /// Calls whose clients it wants to know something of. They have no seat meanwhile.
    pub(super) parked: TaskTracker,
    launcher: Option<PathBuf>,
    status: watch::Sender<Status>,
    /// The connection that stands.
    standing: Mutex<Option<Arc<Standing>>>,
    /// Since when there is none, where there is none.
    away_since: Mutex<Timestamp>,
    offer: Mutex<Arc<Offer>>,
    /// Something that it offers has changed.
    pub(crate) changed: watch::Sender<u64>,
    /// It says that something has, and nothing has.
    pub(crate) claimed: watch::Sender<u64>,
    claims: patience::Claims,
    /// Resources that have changed, of whatever upstream.
    pub(super) updates: Updates,
    /// Resources that somebody wants to hear of.
    pub(crate) wanted: Mutex<Wanted>,
    pub(super) resubscribe: Notify,
    /// From which level on log messages were wanted last.
    pub(crate) level: Mutex<Option<LoggingLevel>>,
    /// One after the other tells it so.
    pub(super) heeding: tokio::sync::Mutex<()>,
    /// It says itself that something has changed.
    told: AtomicBool,
    pub(super) relist: Notify,
    /// The last connection that has lost the thread.
    again: watch::Sender<u64>,
    pub(super) starts: AtomicU32,
    breaker: patience::Breaker,
    /// Whether it may be of another revision by now.
    doubt: Mutex<Option<patience::Doubt>>,
    /// How often it has answered.
    answers: AtomicU64,
    /// It has failed again and again, and has not answered since.
    doubted: AtomicBool,
    /// How often in a row it has refused to say what it offers, and has done nothing else that it was asked.
    refusals: AtomicU32,
    /// How often in a row it was of another revision, as it seemed, when it was asked that.
    strange: AtomicU32,
    silence: patience::Silence,
    /// It has not answered a greeting at all, or did not live long after one of the newest revision.
    mute: AtomicBool,
    /// Something that it refers to is not there.
    lacks: AtomicBool,
    /// What it lacked is there.
    retry: Notify,
    last_words: Mutex<std::collections::VecDeque<String>>,
    pub(super) stop: CancellationToken,
    ended: watch::Sender<bool>,
}

impl Link {
    pub(super) fn start(upstream: Upstream, pins: Pins, launcher: Option<PathBuf>, updates: Updates) -> Arc<Self> {
        let offer = Offer { tools: pins.accepted().unwrap_or_default(), ..Offer::default() };
        let link = Arc::new(Self {
            seats: Semaphore::new(upstream.concurrency),
            parked: TaskTracker::new(),
            silence: patience::Silence::new(upstream.timeout),
            upstream,
            pins,
            routes: Routes::default(),
            launcher,
            status: watch::Sender::new(Status::Starting),
            standing: Mutex::default(),
            away_since: Mutex::new(Timestamp::now()),
            offer: Mutex::new(Arc::new(offer)),
            changed: watch::Sender::new(0),
            claimed: watch::Sender::new(0),
            claims: patience::Claims::default(),
            updates,
            wanted: Mutex::default(),
            resubscribe: Notify::new(),
            level: Mutex::default(),
            heeding: tokio::sync::Mutex::default(),
            told: AtomicBool::new(false),
            relist: Notify::new(),
            again: watch::Sender::new(0),
            starts: AtomicU32::new(0),
            breaker: patience::Breaker::default(),
            doubt: Mutex::default(),
            answers: AtomicU64::new(0),
            doubted: AtomicBool::new(false),
            refusals: AtomicU32::new(0),
            strange: AtomicU32::new(0),
            mute: AtomicBool::new(false),
            lacks: AtomicBool::new(false),
            retry: Notify::new(),
            last_words: Mutex::default(),
            stop: CancellationToken::new(),
            ended: watch::Sender::new(false),
        });
        tokio::spawn(Arc::clone(&link).supervise());
        link
    }

    /// Whether it is the one that a configuration speaks of.
    pub(super) fn is_for(&self, upstream: &Upstream) -> bool {
        // References are compared by what they come to, and by what was taken of them when it was connected to.
        self.upstream.is_same(upstream)
    }

    /// Waits until it has answered or failed.
    pub(super) async fn settled(&self) {
        let mut status = self.status.subscribe();
        let _ = status.wait_for(|status| *status != Status::Starting).await;
    }

    /// Ends it, and what was started for it.
    pub(crate) async fn end(&self) {
        self.stop.cancel();
        let mut ended = self.ended.subscribe();
        let _ = tokio::time::timeout(Duration::from_secs(10), ended.wait_for(|ended| *ended)).await;
    }

    /// Starts it, watches it, and starts it again.
    async fn supervise(self: Arc<Self>) {
        let mut tries: u32 = 0;
        while !self.stop.is_cancelled() {
            self.starts.fetch_add(1, Ordering::Relaxed);
            let why = self.once(&mut tries).await;
            *lock(&self.standing) = None;
            if self.stop.is_cancelled() {
                break;
            }
            let wait = patience::wait(tries);
            tries = tries.saturating_add(1);
            let now = Timestamp::now();
            let next = now.checked_add(wait).unwrap_or(now);
            let why = self.with_last_words(why);
            self.status.send_modify(|status| {
                let (since, news) = match status {
                    Status::Down { since, why: before, .. } => (*since, *before != why),
                    _ => (now, true),
                };
                // Said once, and again when it is another reason.
                if news {
                    tracing::warn!(upstream = self.upstream.name, why, "an upstream is away");
                }
                *status = Status::Down { since, why, next };
            });
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = self.retry.notified() => {}
                () = self.stop.cancelled() => {}
            }
        }
        self.ended.send_replace(true);
    }

    /// One life of it. Says why it ended.
    async fn once(self: &Arc<Self>, tries: &mut u32) -> String {
        // Without what it refers to nothing is started.
        let missing = self.upstream.lacks();
        self.lacks.store(!missing.is_empty(), Ordering::Relaxed);
        if !missing.is_empty() {
            return missing.join("; ");
        }
        let mut connection = match self.greet().await {
            Ok(connection) => connection,
            Err(why) => return why,
        };
        let peer = connection.service.peer().clone();
        // What it says now is asked of it now.
        peer.set_response_cache_config(rmcp::service::ClientCacheConfig::disabled()).await;
        let listed = tokio::select! {
            listed = self.list(&peer) => listed.map_err(offer::Unlisted::why),
            () = self.stop.cancelled() => Err("toolgate ends it".to_owned()),
        };
        if let Err(why) = listed {
            // A program that has answered the greeting and ends at what comes next may do better in the words of the other era.
            let ended = connection.child.is_some() && connection.over.is_cancelled();
            self.mute.store(ended && is_modern(&peer), Ordering::Relaxed);
            let _ = connection.service.close_with_timeout(Duration::from_secs(2)).await;
            return format!("it does not say what it offers: {why}");
        }
        self.trust();
        let generation = u64::from(self.starts.load(Ordering::Relaxed));
        let straight = connection.straight.take();
        *lock(&self.standing) = Some(Arc::new(Standing { generation, peer: peer.clone(), straight }));
        let begun = tokio::time::Instant::now();
        self.status.send_replace(Status::Up { since: Timestamp::now() });
        tracing::info!(upstream = self.upstream.name, "an upstream is there");
        let why = self.watch(&connection.service, &connection.over, &peer, generation).await;
        // One that lives for a moment at a time is given more and more time.
        if begun.elapsed() > STEADY {
            *tries = 0;
        }
        *lock(&self.away_since) = Timestamp::now();
        *lock(&self.standing) = None;
        let _ = connection.service.close_with_timeout(Duration::from_secs(2)).await;
        if let Some(child) = connection.child.take() {
            child.end(if self.stop.is_cancelled() { ENDING } else { Duration::ZERO }).await;
        }
        why
    }

    /// Until something is wrong with it.
    async fn watch(
        self: &Arc<Self>,
        service: &rmcp::service::RunningService<RoleClient, Ears>,
        over: &CancellationToken,
        peer: &Peer<RoleClient>,
        generation: u64,
    ) -> String {
        let mut again = self.again.subscribe();
        let mut pulse = tokio::time::interval(PULSE);
        pulse.tick().await;
        let mut look = tokio::time::interval(Duration::from_millis(50));
        let mut listed: Option<tokio::time::Instant> = None;
        let mut passed_over = 0;
        // What is asked takes its time, and nothing else waits for it.
        let mut asking: Asking<'_> = None;
        let mut changes = Box::pin(async {
            self.say_level(peer).await;
            self.subscribe_again(peer).await;
            self.hear_changes(peer).await;
        });
        loop {
            tokio::select! {
                () = &mut changes => return "it has hung up".to_owned(),
                () = over.cancelled() => return "it has hung up".to_owned(),
                () = self.stop.cancelled() => {
                    // Who is listened to waits for us: it is told that nobody listens any more.
                    let _ = tokio::time::timeout(GOODBYE, &mut changes).await;
                    return "toolgate ends it".to_owned();
                }
                () = async { drop(again.wait_for(|lost| *lost >= generation).await) } => return "it has lost the thread".to_owned(),
                said = answer(&mut asking) => {
                    asking = None;
                    if let Err(why) = said {
                        return why;
                    }
                }
                // However often it says that something has changed.
                () = self.relist.notified(), if asking.is_none() && listed.is_none_or(|at| at.elapsed() > SOONEST) => {
                    listed = Some(tokio::time::Instant::now());
                    asking = Some(self.list_or_work(peer, "it does not say what it offers").boxed());
                }
                _ = look.tick() => {
                    if service.is_closed() || peer.is_transport_closed() {
                        return "it has hung up".to_owned();
                    }
                }
                _ = pulse.tick() => {
                    if let Some(straight) = self.standing().as_ref().and_then(|standing| standing.straight.as_ref()) {
                        straight.sweep();
                    }
                    // What it offers is looked at again, also where it says nothing of a change.
                    if asking.is_none() && patience::is_due(&mut passed_over, self.is_busy()) {
                        asking = Some(self.list_or_work(peer, "it does not answer").boxed());
                    }
                }
            }
        }
    }

    /// It is somebody else than it was: its session is lost.
    pub(super) fn lost(&self, generation: u64) {
        self.again.send_if_modified(|lost| {
            let news = generation > *lost;
            *lost = generation.max(*lost);
            news
        });
    }

    /// Whether its token may have run out, and another can be had: not one that was just fetched.
    pub(super) fn may_renew(&self) -> bool {
        let renews = matches!(&self.upstream.reach, Reach::Url { credentials: Credentials::Client { .. }, .. });
        let fresh = |since: &Timestamp| Duration::try_from(Timestamp::now().duration_since(*since)).is_ok_and(|age| age < TOKEN);
        let fresh = matches!(&*self.status.borrow(), Status::Up { since } if fresh(since));
        renews && !fresh
    }

    fn hear(&self, line: String) {
        let line = self.upstream.without_secrets(&line);
        tracing::info!(upstream = self.upstream.name, "{line}");
        let mut words = lock(&self.last_words);
        words.push_back(line);
        while words.len() > 5 {
            words.pop_front();
        }
    }

    /// Why, with the last that it said itself.
    fn with_last_words(&self, why: String) -> String {
        let words: Vec<String> = std::mem::take(&mut *lock(&self.last_words)).into();
        let why = self.upstream.without_secrets(&why);
        match words.last().filter(|word| !word.is_empty()) {
            // It never was: whoever was to start it says so.
            Some(word) if word.starts_with('`') && word.contains("` cannot be started: ") => word.clone(),
            Some(word) => format!("{why} (it said: {})", word.chars().take(200).collect::<String>()),
            None => why,
        }
    }

    /// Whom to talk to.
    pub(crate) fn peer(&self) -> Option<Peer<RoleClient>> {
        self.standing().map(|standing| standing.peer.clone())
    }

    /// The connection that stands.
    pub(super) fn standing(&self) -> Option<Arc<Standing>> {
        lock(&self.standing).clone()
    }

    /// Since when nobody can be talked to, where that is so.
    pub(super) fn away_since(&self) -> Timestamp {
        *lock(&self.away_since)
    }

    pub(crate) fn status(&self) -> Status {
        self.status.borrow().clone()
    }

    pub(crate) fn offer(&self) -> Arc<Offer> {
        Arc::clone(&lock(&self.offer))
    }

    pub(crate) fn file(&self) -> Option<&std::path::Path> {
        self.pins.file()
    }

    pub(super) fn health(&self) -> Health {
        Health {
            name: self.upstream.name.clone(),
            status: self.status(),
            starts: self.starts.load(Ordering::Relaxed),
            tools: self.pins.accepted().map_or(0, |tools| tools.len()),
            held: self.pins.changes(),
        }
    }

    /// Whom a request of the upstream is for.
    pub(crate) async fn line_of(&self, origin: Option<&RequestId>) -> Option<ToClient> {
        self.routes.of(origin).await
    }

    /// Whose progress it is.
    pub(crate) async fn line_by_token(&self, token: &ProgressToken) -> Option<ToClient> {
        self.routes.by_token(token).await
    }
}

/// A question that is not answered yet.
type Asking<'q> = Option<BoxFuture<'q, Result<(), String>>>;

/// What comes of a question, where there is one.
async fn answer(asking: &mut Asking<'_>) -> Result<(), String> {
    match asking {
        Some(asking) => asking.await,
        None => std::future::pending().await,
    }
}

/// Whether it is of 2026-07-28 or later.
pub(super) fn is_modern(peer: &Peer<RoleClient>) -> bool {
    peer.peer_info().is_some_and(|info| info.protocol_version.as_str() >= ProtocolVersion::V_2026_07_28.as_str())
}
