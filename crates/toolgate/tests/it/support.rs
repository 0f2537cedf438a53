//! A small world to make calls in: one agent, one tool that does as it is told, a store that can fail.

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Once, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use async_trait::async_trait;
use jiff::{SignedDuration, Timestamp};
use rust_decimal::Decimal;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use toolgate::limits::{Charge, Over, Unit};
use toolgate::policy::{Ask, Facts, Fault, Needs, Policy, Terms, Verdict};
use toolgate::session::state::{Alter, State};
use toolgate::store::{Approval, Conflict, Enter, Entered, Finish, Hold, Intent, NotClaimed, Settle, StoreError, Target};
use toolgate::{
    Agent, AgentBuilder, CallId, Category, Compared, Ctx, Effect, Effects, Event, Failure, ManualClock, MemoryFs, MemoryStore, Outcome,
    Recorded, Replay, Row, Ruling, Session, SessionKey, Signal, Store, Tool, ToolError, Toolgate, ToolgateBuilder,
};
use toolgate_json::Digest;

/// Which operation of the store fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fails {
    Paused,
    Enter,
    Load,
    Begin,
    /// Beginning dies.
    BeginDies,
    Finish,
    /// Finishing dies, once.
    FinishDies,
    /// Somebody else has changed the session by then, once.
    FinishConflicts,
    TakePass,
    /// Spooled rows are not taken in.
    TakeIn,
}

/// The store that all tests run on: in memory, or with `TOOLGATE_TEST_STORE=sqlite` in a file.
pub(crate) fn store() -> Arc<dyn Store> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let wanted = std::env::var("TOOLGATE_TEST_STORE").unwrap_or_default();
    assert!(matches!(wanted.as_str(), "" | "memory" | "sqlite"), "there is no store `{wanted}` to test");
    if wanted == "sqlite" {
        static FIRST: Once = Once::new();
        let own = std::process::id().to_string();
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("stores-{own}"));
        FIRST.call_once(|| {
            // What earlier runs left behind, one with the same number among them. A test may start this program again while the first
            // still runs.
            for old in std::fs::read_dir(env!("CARGO_TARGET_TMPDIR")).unwrap().flatten() {
                let name = old.file_name();
                let owner = name.to_str().and_then(|name| name.strip_prefix("stores-"));
                if owner.is_some_and(|pid| pid == own || !Path::new("/proc").join(pid).exists()) {
                    let _ = std::fs::remove_dir_all(old.path());
                }
            }
            std::fs::create_dir_all(&directory).unwrap();
        });
        let path = directory.join(format!("{}.db", NEXT.fetch_add(1, Ordering::SeqCst)));
        return Arc::new(toolgate_store::SqliteStore::open(path).unwrap());
    }
    Arc::new(MemoryStore::new())
}

/// A runtime on that store.
pub(crate) fn gate() -> ToolgateBuilder {
    Toolgate::builder().store(store())
}

/// Builds a runtime that looks back at each of its calls: decided again on what was recorded, it must come out the same.
pub(crate) trait Built {
    fn built(self) -> Toolgate;
}

impl Built for ToolgateBuilder {
    fn built(self) -> Toolgate {
        let replay: Arc<OnceLock<Replay>> = Arc::default();
        let look_back = Arc::clone(&replay);
        let gate = self.on_event(move |event| look_back_at(look_back.get(), event)).build().unwrap();
        assert!(replay.set(Replay::of(&gate).unwrap()).is_ok());
        gate
    }
}

fn look_back_at(replay: Option<&Replay>, event: &Event) {
    let (Some(replay), Event::CallEnded(row)) = (replay, event) else { return };
    // As it is read back from a ledger.
    let row: Row = serde_json::from_slice(&row.canonical().unwrap()).unwrap();
    // Whoever has done much without a pause would wait for one.
    let mut decided = std::pin::pin!(tokio::task::unconstrained(replay.decide(&row)));
    // Another call may be looked back at: that takes no time.
    let compared = loop {
        match decided.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(compared) => break compared,
            Poll::Pending => std::thread::yield_now(),
        }
    };
    if let Compared::Differs(now) = compared {
        // A listener that panics is caught.
        let told = format!("decided again, this call comes out as {now:?}, and was {:?}:\n{row:#?}\n", Ruling::of_row(&row));
        std::io::Write::write_all(&mut std::io::stderr(), told.as_bytes()).unwrap();
        std::process::abort();
    }
}

/// A store that can be told to fail.
pub(crate) struct FaultyStore {
    inner: Arc<dyn Store>,
    failing: Mutex<Vec<Fails>>,
    /// How many spooled rows have come to be taken in.
    pub(crate) offered: AtomicU32,
    /// Whoever has it keeps them waiting.
    pub(crate) takes_in: tokio::sync::Mutex<()>,
}

impl Default for FaultyStore {
    fn default() -> Self {
        Self { inner: store(), failing: Mutex::default(), offered: AtomicU32::new(0), takes_in: tokio::sync::Mutex::default() }
    }
}

impl FaultyStore {
    pub(crate) fn fail(&self, what: &[Fails]) {
        *self.failing.lock().unwrap() = what.to_vec();
    }

    fn check(&self, what: Fails) -> Result<(), StoreError> {
        if self.failing.lock().unwrap().contains(&what) { Err(StoreError(format!("injected fault at {what:?}"))) } else { Ok(()) }
    }
}

#[async_trait]
impl Store for FaultyStore {
    async fn paused(&self, key: &SessionKey, tool: &Arc<str>) -> Result<Option<(Target, String)>, StoreError> {
        self.check(Fails::Paused)?;
        self.inner.paused(key, tool).await
    }
    async fn set_pause(&self, target: Target, reason: Option<String>) -> Result<(), StoreError> {
        self.inner.set_pause(target, reason).await
    }
    async fn hold(&self, key: &SessionKey, alone: bool, wait: Duration) -> Result<Option<Hold>, StoreError> {
        self.inner.hold(key, alone, wait).await
    }
    async fn enter(&self, enter: Enter<'_>) -> Result<Option<Box<Entered>>, StoreError> {
        self.check(Fails::Enter)?;
        self.inner.enter(enter).await
    }
    async fn look(&self, enter: Enter<'_>) -> Result<Box<Entered>, StoreError> {
        self.inner.look(enter).await
    }
    fn may_be_paused(&self) -> bool {
        self.failing.lock().unwrap().contains(&Fails::Paused) || self.inner.may_be_paused()
    }
    fn snapshots_are_complete(&self) -> bool {
        !self.failing.lock().unwrap().contains(&Fails::Load) && self.inner.snapshots_are_complete()
    }
    async fn load(&self, key: &SessionKey, needs: &Needs, at: &State, facts: &mut Facts) -> Result<(), StoreError> {
        self.check(Fails::Load)?;
        self.inner.load(key, needs, at, facts).await
    }
    async fn room(&self, charges: &[Charge], now: Timestamp) -> Result<Vec<Result<Decimal, Over>>, StoreError> {
        self.inner.room(charges, now).await
    }
    async fn begin(
        &self,
        intent: Box<Intent>,
        charges: &[Charge],
        approval: Option<&str>,
        now: Timestamp,
    ) -> Result<Result<Vec<Decimal>, NotClaimed>, StoreError> {
        self.check(Fails::Begin)?;
        let dies = self.failing.lock().unwrap().contains(&Fails::BeginDies);
        assert!(!dies, "injected death");
        self.inner.begin(intent, charges, approval, now).await
    }
    async fn finish(&self, finish: Box<Finish>) -> Result<Result<Option<Recorded>, Conflict>, StoreError> {
        self.check(Fails::Finish)?;
        let once = std::mem::take(&mut *self.failing.lock().unwrap());
        assert!(!once.contains(&Fails::FinishDies), "injected death");
        if once.contains(&Fails::FinishConflicts) {
            return Ok(Err(Conflict));
        }
        *self.failing.lock().unwrap() = once;
        self.inner.finish(finish).await
    }
    async fn take_pass(&self, key: &SessionKey, client: &str, tool: &str) -> Result<Option<toolgate::store::Taken>, StoreError> {
        self.check(Fails::TakePass)?;
        self.inner.take_pass(key, client, tool).await
    }
    async fn leave(&self, key: &SessionKey, now: Timestamp) -> Result<(), StoreError> {
        self.inner.leave(key, now).await
    }
    async fn snapshot(&self, key: &SessionKey) -> Result<(u64, Arc<State>), StoreError> {
        self.inner.snapshot(key).await
    }
    async fn session(&self, key: &SessionKey) -> Result<Option<Arc<State>>, StoreError> {
        self.inner.session(key).await
    }
    async fn alter(&self, key: &SessionKey, alter: Alter) -> Result<(), StoreError> {
        self.inner.alter(key, alter).await
    }
    async fn spend(&self, charges: &[Charge], now: Timestamp) -> Result<(), StoreError> {
        self.inner.spend(charges, now).await
    }
    async fn ask(&self, approval: Approval) -> Result<(), StoreError> {
        self.inner.ask(approval).await
    }
    async fn approval_for(&self, key: &SessionKey, digest: Digest) -> Result<Option<Approval>, StoreError> {
        self.inner.approval_for(key, digest).await
    }
    async fn approval(&self, id: &str) -> Result<Option<Approval>, StoreError> {
        self.inner.approval(id).await
    }
    async fn answer(&self, id: &str, approved: bool, by: &str, now: Timestamp) -> Result<bool, StoreError> {
        self.inner.answer(id, approved, by, now).await
    }
    async fn pending(&self, now: Timestamp) -> Result<Vec<Intent>, StoreError> {
        self.inner.pending(now).await
    }
    async fn settle(
        &self,
        call: CallId,
        settle: Settle,
        outcome: Outcome,
        shown: Outcome,
        by: &str,
        now: Timestamp,
    ) -> Result<bool, StoreError> {
        self.inner.settle(call, settle, outcome, shown, by, now).await
    }
    async fn output(&self, key: &SessionKey, handle: &str) -> Result<Option<Arc<str>>, StoreError> {
        self.inner.output(key, handle).await
    }
    async fn rows(&self, key: &SessionKey) -> Result<Vec<Arc<Row>>, StoreError> {
        self.inner.rows(key).await
    }
    async fn has_succeeded(&self, call: CallId) -> Result<bool, StoreError> {
        self.inner.has_succeeded(call).await
    }
    async fn take_in(&self, row: Arc<Row>) -> Result<(), StoreError> {
        self.offered.fetch_add(1, Ordering::SeqCst);
        drop(self.takes_in.lock().await);
        self.check(Fails::Finish)?;
        self.check(Fails::TakeIn)?;
        self.inner.take_in(row).await
    }
    fn introduce(&self, config: Digest, definition: &Arc<str>) {
        self.inner.introduce(config, definition);
    }
    fn redaction_key(&self) -> Option<[u8; 32]> {
        self.inner.redaction_key()
    }
    fn home(&self) -> Option<&Path> {
        self.inner.home()
    }
    fn owner(&self) -> Option<Arc<str>> {
        self.inner.owner()
    }
}

/// Charges one unit of the counter `meter` for every call of `act`.
pub(crate) struct Meter;

pub(crate) fn meter(amount: i64) -> Charge {
    Charge { counter: "meter".into(), amount: amount.into(), cap: 100.into(), window: None, unit: Unit::Fixed }
}

impl Policy for Meter {
    fn name(&self) -> &str {
        "meter"
    }
    fn governs(&self, tool: &toolgate::Spec) -> bool {
        tool.name() == "act"
    }
    fn check(&self, _: &Ask<'_>) -> Result<Verdict, Fault> {
        let error = ToolError::new(Category::Business, "meter_full", "the meter is full");
        Ok(Verdict::Allow(Terms { charges: vec![(meter(1), error)], ..Terms::default() }))
    }
}

/// The world of one test.
pub(crate) struct World {
    pub(crate) gate: Toolgate,
    pub(crate) session: Session,
    pub(crate) store: Arc<FaultyStore>,
    pub(crate) files: MemoryFs,
    pub(crate) clock: Arc<ManualClock>,
    pub(crate) ran: Arc<AtomicU32>,
    /// Lets go what `act` was told to wait for.
    pub(crate) go: Arc<Semaphore>,
    pub(crate) spool: tempfile::TempDir,
}

impl World {
    /// A world with the tools `act` (an effect, as it is told), `look` (a read) and what is added.
    pub(crate) fn new(more: impl FnOnce(AgentBuilder) -> AgentBuilder) -> Self {
        Self::with(more, |gate| gate)
    }

    pub(crate) fn with(more: impl FnOnce(AgentBuilder) -> AgentBuilder, also: impl FnOnce(ToolgateBuilder) -> ToolgateBuilder) -> Self {
        Self::made(|act| act, more, |gate| also(gate).built())
    }

    /// A world whose `act` is declared otherwise.
    pub(crate) fn whose_act(is: impl FnOnce(Tool) -> Tool) -> Self {
        Self::made(is, |agent| agent, Built::built)
    }

    /// A world that is not looked back at, for policies that take down when they are asked.
    pub(crate) fn unwatched(more: impl FnOnce(AgentBuilder) -> AgentBuilder) -> Self {
        Self::made(|act| act, more, |gate| gate.build().unwrap())
    }

    fn made(
        is: impl FnOnce(Tool) -> Tool,
        more: impl FnOnce(AgentBuilder) -> AgentBuilder,
        build: impl FnOnce(ToolgateBuilder) -> Toolgate,
    ) -> Self {
        let (ran, go) = (Arc::new(AtomicU32::new(0)), Arc::new(Semaphore::new(0)));
        let (files, store) = (MemoryFs::new([("kept.txt", "as it was")]), Arc::new(FaultyStore::default()));
        let agent = Agent::builder("agent").files(files.clone()).tool(is(act(&ran, &go))).tool(look()).policy(Meter);
        let agent = more(agent).build().unwrap();
        let spool = tempfile::tempdir().unwrap();
        let clock = Arc::new(ManualClock::at(Timestamp::from_second(1_800_000_000).unwrap()));
        let gate = Toolgate::builder()
            .agent(agent)
            .store(Arc::clone(&store) as Arc<dyn Store>)
            .clock(clock.clone())
            .spool(spool.path().join("rows.jsonl"));
        let gate = build(gate);
        let session = gate.session("agent", "alice", "s");
        Self { gate, session, store, files, clock, ran, go, spool }
    }

    pub(crate) fn ran(&self) -> u32 {
        self.ran.load(Ordering::SeqCst)
    }

    pub(crate) fn advance(&self, by: SignedDuration) {
        self.clock.advance(by);
    }

    pub(crate) async fn metered(&self) -> Decimal {
        self.store.inner.room(&[meter(0)], Timestamp::UNIX_EPOCH).await.unwrap()[0].unwrap()
    }

    /// Everything that a failed call must leave alone.
    pub(crate) async fn fingerprint(&self) -> (String, Digest) {
        let state = self.session.state().await.unwrap();
        let mut lines: Vec<String> = state.slices.iter().map(|(k, v)| format!("slice {k} {v}")).collect();
        lines.extend(state.marks.iter().map(|(k, v)| format!("mark {k} {v}")));
        lines.extend(state.evidence.iter().map(|(k, v)| format!("evidence {k:?} {v:?}")));
        lines.extend(state.revocations.iter().map(|(k, v)| format!("revoked {k:?} {v}")));
        lines.push(format!("values {:?}", state.values));
        lines.sort();
        (lines.join("\n"), self.files.digest())
    }

    /// Rows in the ledger, and how many wait in the spool.
    pub(crate) async fn rows(&self) -> (Vec<Arc<Row>>, usize) {
        let mut rows = self.session.rows().await.unwrap();
        rows.extend(self.store.rows(&SessionKey::new("nobody", "alice", "s")).await.unwrap());
        rows.extend(self.store.rows(&SessionKey::new("agent", "mallory", "s")).await.unwrap());
        (rows, self.spooled().len())
    }

    /// Rows that wait in the spool, as they are written there.
    pub(crate) fn spooled(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.spool.path().join("rows.jsonl")).unwrap_or_default();
        text.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
    }
}

/// A tool that changes a slice and a file, and then does as it is told.
fn act(ran: &Arc<AtomicU32>, go: &Arc<Semaphore>) -> Tool {
    let (ran, go) = (Arc::clone(ran), Arc::clone(go));
    let schema = json!({
        "type": "object",
        "properties": {"how": {"type": "string"}, "n": {"type": "integer"}, "password": {"type": "string", "writeOnly": true}},
        "required": ["how"],
    });
    Tool::dynamic("act", "Does as it is told.", schema, move |ctx: Ctx, args: Value| {
        let (ran, go) = (Arc::clone(&ran), Arc::clone(&go));
        async move {
            ran.fetch_add(1, Ordering::SeqCst);
            let how = args["how"].as_str().unwrap_or_default();
            ctx.set_slice("touched", &args)?;
            ctx.log("attempts", &args)?;
            // Where it is declared a read, it may not change files.
            if !how.starts_with("read") {
                ctx.files()?.write("kept.txt", b"changed")?;
                ctx.files()?.write("new/file.txt", b"made")?;
            }
            do_as_told(&ctx, how, &go).await
        }
    })
    .effect(Effect::Write)
    .timeout(Duration::from_millis(300))
    .output_schema(json!({"type": "object", "properties": {"done": {"type": "boolean"}}, "required": ["done"]}))
}

async fn do_as_told(ctx: &Ctx, how: &str, go: &Semaphore) -> Result<Value, Failure> {
    match how {
        "ok" | "read" => Ok(json!({"done": true})),
        "fail" => Err(Failure::business("no_stock", "there is none left")),
        "refuse" => Err(Failure::business("no_stock", "there is none left").effects(Effects::None)),
        "io" => Err(std::io::Error::from(std::io::ErrorKind::ConnectionReset).into()),
        "http" => Err(Failure::http(503, "try later")),
        "panic" => panic!("the handler has a fault"),
        "hang" => std::future::pending().await,
        "beat" => {
            for _ in 0..20 {
                tokio::time::sleep(Duration::from_millis(20)).await;
                ctx.send_heartbeat();
            }
            Ok(json!({"done": true}))
        }
        "beat, then stop" => {
            // For longer than any heartbeat here.
            for _ in 0..120 {
                tokio::time::sleep(Duration::from_millis(10)).await;
                ctx.send_heartbeat();
            }
            ctx.log("beats", &"stopped")?;
            std::future::pending().await
        }
        "read and wait" => {
            let _let_go = go.acquire().await?;
            Ok(json!({"done": true}))
        }
        "junk" => Ok(json!({"undone": "yes"})),
        "dated" => Ok(json!({"done": true, "at": "soon"})),
        "nothing" => Ok(Value::Null),
        "expand" => Err(Failure::signal(Signal::ExpandSection { section: "refunds".into(), reason: "needed".into() })),
        other => Err(Failure::validation("unknown_way", format!("no such way: {other}"))),
    }
}

pub(crate) fn look() -> Tool {
    let schema = json!({"type": "object", "properties": {"at": {"type": "string"}}});
    Tool::dynamic("look", "Looks at something.", schema, |_, args| async move { Ok(args) }).effect(Effect::Read)
}

/// A policy from a closure.
pub(crate) struct Rule<F>(&'static str, F);

pub(crate) fn rule<F: Fn(&Ask<'_>) -> Result<Verdict, Fault> + Send + Sync>(name: &'static str, check: F) -> Rule<F> {
    Rule(name, check)
}

impl<F: Fn(&Ask<'_>) -> Result<Verdict, Fault> + Send + Sync> Policy for Rule<F> {
    fn name(&self) -> &str {
        self.0
    }
    fn check(&self, ask: &Ask<'_>) -> Result<Verdict, Fault> {
        (self.1)(ask)
    }
}
