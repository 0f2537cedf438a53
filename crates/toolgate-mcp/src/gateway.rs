//! What the gateway holds: one reading of the configuration at a time, and what outlives it.

mod follow;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant};

use rmcp::RoleServer;
use rmcp::service::Peer;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use toolgate::config::{CANARY_PRINCIPAL, Config, ConfigError, Exposed, Gateway as Settings, Unfit};
use toolgate::{Agent, CallId, Spec, Store, Timestamp, Toolgate};

use crate::auth::Keys;
use crate::canary::{CANARY, canary};
use crate::idle::Idle;
use crate::metrics::Metrics;
use crate::parked::{Parked, Presence};
use crate::resources::Subscriptions;
use crate::upstream::{Link, Starting, Upstreams};
use crate::workspaces::Workspaces;

/// How often a read is asked what became of a call.
const TRIES: u8 = 5;
/// How long what is under way has when the gateway ends.
pub(crate) const LAST: Duration = Duration::from_secs(10);
/// How long somebody who reads the configuration has to give up then.
const GIVEN_UP: Duration = Duration::from_secs(5);

/// How a gateway is opened.
#[derive(Clone)]
pub struct Options {
    /// The ledger. Beside one on disk are the journals of what agents do to their files; with any other, files are only looked at.
    pub store: Arc<dyn Store>,
    /// How upstreams are started.
    pub upstreams: Starting,
    /// How long upstreams may take before the gateway is ready without them.
    pub patience: Duration,
    /// The program that leads command tools into their rooms, and into hooks; see [`toolgate::sandbox::enter_if_asked`].
    pub launcher: Option<PathBuf>,
    /// Who calls over standard streams, or over HTTP where nobody needs a token.
    pub principal: String,
    /// Rules that hold beside those of the configuration.
    pub built_in: Option<BuiltIn>,
    /// Where toolgate has what it goes by, beside the configuration and the ledger: no agent's files lie there, or around it.
    pub own: Vec<PathBuf>,
}

/// A policy file for the tools of an agent.
pub type BuiltIn = Arc<dyn Fn(&[&Spec]) -> String + Send + Sync>;

/// A gateway: agents, their upstreams, and the doors to them. Cheap to clone.
#[derive(Clone)]
pub struct Gateway(pub(crate) Arc<Inner>);

/// What reads the configuration.
type Reader = Arc<dyn Fn() -> io::Result<Config> + Send + Sync>;

pub(crate) struct Inner {
    config: Reader,
    options: Options,
    workspaces: Arc<Workspaces>,
    running: RwLock<Arc<Running>>,
    /// One reading at a time.
    reading: tokio::sync::Mutex<()>,
    /// Clients that want to hear of changes.
    peers: Mutex<Vec<Peer<RoleServer>>>,
    pub(crate) changes: tokio::sync::watch::Sender<u64>,
    pub(crate) parked: Parked,
    pub(crate) idle: Idle,
    pub(crate) metrics: Metrics,
    /// Where it is listened at.
    pub(crate) addresses: Mutex<Vec<std::net::SocketAddr>>,
    /// Who wants to hear of which resource.
    pub(crate) subscriptions: Subscriptions,
    /// When the canary was tried last, and what came of it.
    pub(crate) canary: Mutex<Option<(Instant, Result<(), String>)>>,
    /// How often it was asked what became of a call.
    tries: Mutex<HashMap<CallId, u8>>,
    /// Nothing new is begun.
    pub(crate) stop: CancellationToken,
    /// Nobody is heard any more.
    pub(crate) closed: CancellationToken,
    /// Those who listen.
    pub(crate) listeners: TaskTracker,
    /// How many calls are under way.
    pub(crate) underway: tokio::sync::watch::Sender<usize>,
}

/// A call that is under way, for as long as it is.
pub(crate) struct Counted(Gateway);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.0.underway.send_modify(|count| *count = count.saturating_sub(1));
    }
}

/// One reading of the configuration.
pub(crate) struct Running {
    pub(crate) gate: Toolgate,
    pub(crate) settings: Settings,
    pub(crate) keys: Keys,
    pub(crate) upstreams: Upstreams,
    pub(crate) exposed: BTreeMap<(String, String), Exposed>,
    /// The upstreams that an agent hears of.
    pub(crate) shared: BTreeMap<String, Vec<Arc<Link>>>,
    pub(crate) agents: Vec<String>,
    /// Tools of which arguments are said in headers as well.
    pub(crate) in_headers: BTreeSet<String>,
    /// How often each upstream had changed what it offers when the rules were read.
    seen: BTreeMap<String, u64>,
    /// What of them does not fit, or is not there.
    unfit: Vec<Unfit>,
}

impl Gateway {
    /// Opens a gateway for a configuration: upstreams are started, agents are built, and the canary is refused.
    ///
    /// # Errors
    /// The configuration does not load, or the gate does not hold.
    pub async fn open(config: impl Fn() -> io::Result<Config> + Send + Sync + 'static, options: Options) -> io::Result<Self> {
        if options.principal == CANARY_PRINCIPAL {
            return Err(io::Error::other(format!("nobody is called `{CANARY_PRINCIPAL}` but who tries whether the gate holds")));
        }
        let config: Reader = Arc::new(config);
        let stop = CancellationToken::new();
        let (metrics, parked) = (Metrics::new(), Parked::new(stop.clone())?);
        let read = config()?;
        let upstreams = Upstreams::start(&read, &options.upstreams, options.patience).await?;
        let workspaces = Arc::<Workspaces>::default();
        let running = match Running::build(read, &options, &workspaces, upstreams.clone(), &metrics, None).await {
            Ok(running) => running,
            Err(error) => {
                upstreams.end().await;
                return Err(error);
            }
        };
        let gateway = Self(Arc::new(Inner {
            config,
            options,
            workspaces,
            running: RwLock::new(Arc::new(running)),
            reading: tokio::sync::Mutex::default(),
            peers: Mutex::default(),
            changes: tokio::sync::watch::Sender::new(0),
            parked,
            idle: Idle::default(),
            metrics,
            addresses: Mutex::default(),
            subscriptions: Subscriptions::default(),
            canary: Mutex::default(),
            tries: Mutex::default(),
            stop,
            closed: CancellationToken::new(),
            listeners: TaskTracker::new(),
            underway: tokio::sync::watch::Sender::new(0),
        }));
        gateway.0.metrics.watch(Arc::downgrade(&gateway.0));
        tokio::spawn(gateway.clone().forward_updates());
        tokio::spawn(gateway.clone().follow_upstreams());
        if let Err(why) = gateway.try_canary().await {
            gateway.end().await;
            return Err(io::Error::other(format!("the gate does not hold: {why}")));
        }
        Ok(gateway)
    }

    pub(crate) fn running(&self) -> Arc<Running> {
        Arc::clone(&self.0.running.read().unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    /// How the upstreams are.
    #[must_use]
    pub fn health(&self) -> Vec<crate::Health> {
        let running = self.running();
        running.upstreams.health_with(&running.unfit)
    }

    /// Files in which somebody may accept what is held back.
    #[must_use]
    pub fn files(&self) -> Vec<PathBuf> {
        self.running().upstreams.links().filter_map(|link| link.file().map(std::path::Path::to_owned)).collect()
    }

    /// How many tools each agent offers.
    #[must_use]
    pub fn offers(&self) -> Vec<(String, usize)> {
        let running = self.running();
        let count = |name: &String| (name.clone(), running.gate.agent(name).map_or(0, |agent| agent.tools().count()));
        running.agents.iter().map(count).collect()
    }

    /// The runtime behind it, as it is now.
    #[must_use]
    pub fn gate(&self) -> Toolgate {
        self.running().gate.clone()
    }

    /// Reads the configuration again. Calls that are under way go on as they began; where it does not load, nothing changes.
    ///
    /// # Errors
    /// Why it does not load; or the gateway ends, and nothing is begun any more.
    pub async fn reload(&self) -> io::Result<()> {
        let (config, stop) = (&self.0.config, &self.0.stop);
        let ending = || io::Error::other("the gateway is ending");
        let _one = self.0.reading.lock().await;
        if stop.is_cancelled() {
            return Err(ending());
        }
        let before = self.running();
        let read = config()?;
        // Nothing is begun for what cannot come to be. All that is wrong is told, with the tools that are there.
        if let Err(error) = read.sound() {
            return Err(unloadable(&read.behind(&before.upstreams).agents(None).err().unwrap_or(error)));
        }
        let enough = async { drop(tokio::time::timeout(self.0.options.patience, stop.cancelled()).await) };
        let upstreams = before.upstreams.renewed(&read, &self.0.options.upstreams, enough).await?;
        let (options, workspaces) = (&self.0.options, &self.0.workspaces);
        let built = tokio::select! {
            biased;
            () = stop.cancelled() => Err(ending()),
            built = Running::build(read, options, workspaces, upstreams.clone(), &self.0.metrics, Some(&before)) => built,
        };
        let world = lock(&self.0.addresses).iter().find(|address| !address.ip().is_loopback()).copied();
        let built = built.and_then(|running| match world {
            Some(address) if running.keys.is_open() => {
                Err(io::Error::other(format!("{address} can be reached from elsewhere, and nobody would need a token any more")))
            }
            // What is put in place now, nobody would end.
            _ if stop.is_cancelled() => Err(ending()),
            _ => Ok(running),
        });
        match built {
            Ok(running) => {
                *self.0.running.write().unwrap_or_else(std::sync::PoisonError::into_inner) = Arc::new(running);
                self.forget_unseen();
                self.heed_anew();
                self.tell_changed().await;
                let stop = self.0.stop.clone();
                // Whoever still talks to those that are gone has time to finish; when the gateway ends, as much as anybody.
                self.0.listeners.spawn(async move {
                    tokio::select! {
                        () = before.upstreams.end_but(&upstreams, Duration::from_secs(10 * 60)) => {}
                        () = stop.cancelled() => before.upstreams.end_but(&upstreams, LAST).await,
                    }
                });
                Ok(())
            }
            Err(error) => {
                upstreams.end_but(&before.upstreams, Duration::ZERO).await;
                Err(error)
            }
        }
    }

    /// Makes the call that must be refused every minute, for as long as the gateway is there; and asks what became of calls of which
    /// nobody knows.
    pub async fn watch(&self, every: Duration) {
        tokio::join!(self.watch_canary(every), self.watch_pending(every));
    }

    async fn watch_pending(&self, every: Duration) {
        loop {
            tokio::select! {
                () = async {
                    self.reconcile().await;
                    tokio::time::sleep(every).await;
                } => {}
                () = self.0.stop.cancelled() => return,
            }
        }
    }

    /// Asks, where a tool says which read tells whether it took effect, and not before its lease is over: until then it may still be
    /// under way, and who is asked too early says that it never happened. Who cannot tell in some minutes leaves it to a person.
    async fn reconcile(&self) {
        let can_ask = |agent: &Agent| agent.tools().any(Spec::can_be_reconciled);
        if !self.offers().iter().filter_map(|(name, _)| self.gate().agent(name).map(can_ask)).any(|can| can) {
            return;
        }
        let (before, mut tries) = (std::mem::take(&mut *lock(&self.0.tries)), HashMap::new());
        let gate = self.gate();
        let asks = |intent: &toolgate::store::Intent| {
            let declared = gate.agent(&intent.key.agent).and_then(|agent| agent.tool(&intent.tool)).is_some_and(Spec::can_be_reconciled);
            if Timestamp::now() <= intent.lease {
                return false;
            }
            let times = before.get(&intent.call).copied().unwrap_or_default();
            tries.insert(intent.call, times.saturating_add(1));
            declared && times < TRIES
        };
        match gate.reconcile_those(asks).await {
            Err(error) => tracing::warn!(%error, "what became of calls cannot be found out"),
            Ok(found) => {
                for (call, said) in found {
                    tracing::info!(%call, ?said, "a read was asked what became of a call");
                }
            }
        }
        *lock(&self.0.tries) = tries;
    }

    /// Remembers a client that wants to hear of changes.
    pub(crate) fn remember(&self, peer: Peer<RoleServer>) {
        let mut peers = lock(&self.0.peers);
        if peers.len() % 64 == 63 {
            peers.retain(|peer| !peer.is_transport_closed());
        }
        peers.push(peer);
    }

    /// Tells clients that there is something else to see.
    pub(crate) async fn tell_changed(&self) {
        self.0.changes.send_modify(|times| *times += 1);
        let peers = {
            let mut peers = lock(&self.0.peers);
            peers.retain(|peer| !peer.is_transport_closed());
            peers.clone()
        };
        // All at once: one who does not listen keeps nobody else waiting.
        let tell = |peer: Peer<RoleServer>| async move {
            let _ = tokio::time::timeout(Duration::from_secs(1), async {
                let _ = peer.notify_tool_list_changed().await;
                let _ = peer.notify_prompt_list_changed().await;
                let _ = peer.notify_resource_list_changed().await;
            })
            .await;
        };
        futures_util::future::join_all(peers.into_iter().map(tell)).await;
    }

    /// Whether it takes no more calls.
    #[must_use]
    pub fn is_ending(&self) -> bool {
        self.0.stop.is_cancelled()
    }

    /// Takes no more calls; those that are under way go on.
    pub fn begin_to_end(&self) {
        self.0.stop.cancel();
    }

    /// Counts a call as under way.
    pub(crate) fn count(&self) -> Counted {
        self.0.underway.send_modify(|count| *count += 1);
        Counted(self.clone())
    }

    /// Waits until nothing is under way any more, within reason.
    pub(crate) async fn quiet(&self, patience: Duration) {
        let mut underway = self.0.underway.subscribe();
        let _ = tokio::time::timeout(patience, underway.wait_for(|count| *count == 0)).await;
    }

    /// Ends it: nothing new is begun, and what was started for it is gone.
    pub async fn end(&self) {
        self.0.stop.cancel();
        // Who waits for a client waits in vain by now. Each is under way again until it is settled, and written down.
        for underway in self.0.parked.take_all() {
            *lock(&underway.counted) = Some(Presence::new(self.count(), None));
            tokio::spawn(underway.take_back());
        }
        self.quiet(LAST).await;
        // Who reads the configuration gives up by now, and ends what it has started; which upstreams there are is known after that.
        let _reading = tokio::time::timeout(GIVEN_UP, self.0.reading.lock()).await;
        // What is said is heard before the line is cut.
        self.0.listeners.close();
        let _ = tokio::time::timeout(Duration::from_secs(4), self.0.listeners.wait()).await;
        self.0.closed.cancel();
        self.running().upstreams.end().await;
    }

    pub(crate) fn principal(&self) -> &str {
        &self.0.options.principal
    }
}

impl Running {
    async fn build(
        config: Config,
        options: &Options,
        workspaces: &Arc<Workspaces>,
        upstreams: Upstreams,
        metrics: &Metrics,
        before: Option<&Self>,
    ) -> io::Result<Self> {
        let keys = Keys::new(&config.gateway, before.map(|before| &before.keys)).await?;
        let own: Vec<PathBuf> = config.goes_by().chain(options.own.iter().cloned()).collect();
        let config = workspaces.open(config, &options.store, &own).await?;
        let config = match &options.launcher {
            Some(launcher) => config.launcher(launcher),
            None => config,
        };
        let seen = upstreams.links().map(|link| (link.upstream.name.clone(), *link.changed.borrow())).collect();
        // What has come since they were started is looked at, too, before it is offered.
        upstreams.look_for_shadows(&config);
        let takes: BTreeMap<String, Option<Vec<String>>> = config.upstreams_of_agents();
        let config = config.behind(&upstreams);
        let config = match &options.built_in {
            Some(rules) => config.with_policies("(built in)", |tools| rules(tools)),
            None => config,
        };
        let exposed: BTreeMap<_, _> = config.exposed().iter().map(|one| ((one.agent.clone(), one.name.clone()), one.clone())).collect();
        let (settings, redact) = (config.gateway.clone(), config.redact.clone());
        let names: Vec<String> = config.names().map(str::to_owned).collect();
        let (agents, unfit) = config.fitted(None).map_err(|error| unloadable(&error))?;
        tell(&unfit, before.map(|before| before.unfit.as_slice()).unwrap_or_default());
        let mut builder = Toolgate::builder().store(Arc::clone(&options.store)).agent(canary()?);
        for pattern in &redact {
            builder = builder.redact(pattern).map_err(io::Error::other)?;
        }
        let known = agents.iter().flat_map(|agent| agent.tools().map(|spec| (agent.name().to_owned(), spec.name().to_owned())));
        metrics.know(known.chain([(CANARY.to_owned(), CANARY.to_owned())]).collect());
        let heard = metrics.clone();
        builder = builder.on_event(move |event| heard.hear(event));
        let gate = agents.into_iter().fold(builder, toolgate::ToolgateBuilder::agent).build()?;
        let shared = names
            .iter()
            .map(|name| {
                let declared = exposed.values().filter(|one| one.agent == *name).map(|one| one.upstream.clone());
                let taken: Vec<String> = match takes.get(name) {
                    Some(Some(named)) => named.clone(),
                    _ if names.len() == 1 => upstreams.links().map(|link| link.upstream.name.clone()).collect(),
                    _ => declared.collect(),
                };
                let links = upstreams.links().filter(|link| taken.contains(&link.upstream.name)).cloned().collect();
                (name.clone(), links)
            })
            .collect();
        let in_headers = names.iter().filter_map(|name| gate.agent(name)).flat_map(Agent::tools);
        let in_headers = in_headers.filter(|spec| spec.input_schema().is_some_and(crate::speaks_in_headers));
        let in_headers = in_headers.map(|spec| spec.name().to_owned()).collect();
        Ok(Self { gate, settings, upstreams, exposed, shared, agents: names, in_headers, seen, unfit, keys })
    }

    /// The agent of those who name none.
    pub(crate) fn default_agent(&self) -> Option<&str> {
        self.settings.agent.as_deref().or_else(|| self.agents.first().map(String::as_str).filter(|_| self.agents.len() == 1))
    }
}

/// Tells what does not fit, once for as long as it is so.
fn tell(unfit: &[Unfit], before: &[Unfit]) {
    let before: BTreeSet<&Unfit> = before.iter().collect();
    for Unfit { agent, upstream, tool, why, awaited, .. } in unfit.iter().filter(|one| !before.contains(one)) {
        let what = if *awaited { "is not there, and is taken when it comes" } else { "is held back until that is mended" };
        tracing::warn!(agent, upstream, tool, why, "a tool of an upstream {what}");
    }
}

fn unloadable(error: &ConfigError) -> io::Error {
    io::Error::other(format!("the configuration does not load\n\n{}", error.render(false)))
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
