//! A small world to make calls in: one agent, one tool that does as it is told, a store that can
//! fail.

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
use toolgate::limits::{Charge, ChargeError, ChargeUnit};
use toolgate::policy::{
    DecisionFacts, FactRequest, Obligations, Policy, PolicyError, PolicyInput, Verdict,
};
use toolgate::session::state::{SessionEdit, SessionState};
use toolgate::store::{
    Approval, ClaimError, ClaimRecord, ClaimResolution, CommitConflictError, CommitRequest,
    PauseTarget, SessionLock, SessionRequest, SessionSnapshot, StoreError,
};
use toolgate::{
    AdmissionDecision, Agent, AgentBuilder, CallEffects, CallId, Effect, ErrorCategory, Event,
    Failure, LazyReceipt, ManualClock, MemoryFs, MemoryStore, Outcome, PromptSignal, Replay,
    ReplayComparison, Row, Session, SessionKey, Store, Tool, ToolContext, ToolError, Toolgate,
    ToolgateBuilder,
};
use toolgate_json::Digest;

/// Which operation of the store fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InjectedFault {
    Paused,
    Enter,
    Load,
    Claim,
    /// Beginning dies.
    ClaimPanics,
    Commit,
    /// Finishing dies, once.
    CommitPanics,
    /// Somebody else has changed the session by then, once.
    CommitConflicts,
    TakeDeferred,
    /// Spooled rows are not taken in.
    AppendSpooled,
}

/// The store that all tests run on: in memory, or with `TOOLGATE_TEST_STORE=sqlite` in a file.
pub(crate) fn test_store() -> Arc<dyn Store> {
    static NEXT_STORE: AtomicU32 = AtomicU32::new(0);
    let wanted = std::env::var("TOOLGATE_TEST_STORE").unwrap_or_default();
    assert!(
        matches!(wanted.as_str(), "" | "memory" | "sqlite"),
        "there is no store `{wanted}` to test"
    );
    if wanted == "sqlite" {
        static CLEAN_UP_ONCE: Once = Once::new();
        let own = std::process::id().to_string();
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("stores-{own}"));
        CLEAN_UP_ONCE.call_once(|| {
            // What earlier runs left behind, one with the same number among them. A test may start
            // this program again while the first still runs.
            for old in std::fs::read_dir(env!("CARGO_TARGET_TMPDIR")).unwrap().flatten() {
                let name = old.file_name();
                let owner = name.to_str().and_then(|name| name.strip_prefix("stores-"));
                if owner.is_some_and(|pid| pid == own || !Path::new("/proc").join(pid).exists()) {
                    let _ = std::fs::remove_dir_all(old.path());
                }
            }
            std::fs::create_dir_all(&directory).unwrap();
        });
        let path = directory.join(format!("{}.db", NEXT_STORE.fetch_add(1, Ordering::SeqCst)));
        return Arc::new(toolgate_store::SqliteStore::open(path).unwrap());
    }
    Arc::new(MemoryStore::new())
}

/// A runtime on that store.
pub(crate) fn runtime_builder() -> ToolgateBuilder {
    Toolgate::builder().store(test_store())
}

/// Builds a runtime that looks back at each of its calls: decided again on what was recorded, it
/// must come out the same.
pub(crate) trait BuildWithReplayCheck {
    fn build_checked(self) -> Toolgate;
}

impl BuildWithReplayCheck for ToolgateBuilder {
    fn build_checked(self) -> Toolgate {
        let replay: Arc<OnceLock<Replay>> = Arc::default();
        let look_back = Arc::clone(&replay);
        let gate =
            self.on_event(move |event| check_replay(look_back.get(), event)).build().unwrap();
        assert!(replay.set(Replay::from_toolgate(&gate).unwrap()).is_ok());
        gate
    }
}

fn check_replay(replay: Option<&Replay>, event: &Event) {
    let (Some(replay), Event::CallEnded(row)) = (replay, event) else { return };
    // As it is read back from a ledger.
    let row: Row = serde_json::from_slice(&row.to_canonical_bytes().unwrap()).unwrap();
    // Whoever has done much without a pause would wait for one.
    let mut decided = std::pin::pin!(tokio::task::unconstrained(replay.decide(&row)));
    // Another call may be looked back at: that takes no time.
    let compared = loop {
        match decided.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(compared) => break compared,
            Poll::Pending => std::thread::yield_now(),
        }
    };
    if let ReplayComparison::Differs(now) = compared {
        // A listener that panics is caught.
        let told = format!(
            "decided again, this call comes out as {now:?}, and was {:?}:\n{row:#?}\n",
            AdmissionDecision::from_row(&row)
        );
        std::io::Write::write_all(&mut std::io::stderr(), told.as_bytes()).unwrap();
        std::process::abort();
    }
}

/// A store that can be told to fail.
pub(crate) struct FaultyStore {
    inner: Arc<dyn Store>,
    failing: Mutex<Vec<InjectedFault>>,
    /// How many spooled rows have come to be taken in.
    pub(crate) append_attempts: AtomicU32,
    /// Whoever has it keeps them waiting.
    pub(crate) append_lock: tokio::sync::Mutex<()>,
}

impl Default for FaultyStore {
    fn default() -> Self {
        Self {
            inner: test_store(),
            failing: Mutex::default(),
            append_attempts: AtomicU32::new(0),
            append_lock: tokio::sync::Mutex::default(),
        }
    }
}

impl FaultyStore {
    pub(crate) fn inject_faults(&self, what: &[InjectedFault]) {
        *self.failing.lock().unwrap() = what.to_vec();
    }

    fn check(&self, what: InjectedFault) -> Result<(), StoreError> {
        if self.failing.lock().unwrap().contains(&what) {
            Err(StoreError(format!("injected fault at {what:?}")))
        } else {
            Ok(())
        }
    }
}

#[async_trait]
impl Store for FaultyStore {
    async fn find_pause(
        &self,
        key: &SessionKey,
        tool: &Arc<str>,
    ) -> Result<Option<(PauseTarget, String)>, StoreError> {
        self.check(InjectedFault::Paused)?;
        self.inner.find_pause(key, tool).await
    }
    async fn set_pause(
        &self,
        target: PauseTarget,
        reason: Option<String>,
    ) -> Result<(), StoreError> {
        self.inner.set_pause(target, reason).await
    }
    async fn lock_session(
        &self,
        key: &SessionKey,
        alone: bool,
        wait: Duration,
    ) -> Result<Option<SessionLock>, StoreError> {
        self.inner.lock_session(key, alone, wait).await
    }
    async fn open_session(
        &self,
        enter: SessionRequest<'_>,
    ) -> Result<Option<Box<SessionSnapshot>>, StoreError> {
        self.check(InjectedFault::Enter)?;
        self.inner.open_session(enter).await
    }
    async fn inspect_session(
        &self,
        enter: SessionRequest<'_>,
    ) -> Result<Box<SessionSnapshot>, StoreError> {
        self.inner.inspect_session(enter).await
    }
    fn may_be_paused(&self) -> bool {
        self.failing.lock().unwrap().contains(&InjectedFault::Paused) || self.inner.may_be_paused()
    }
    fn has_complete_snapshots(&self) -> bool {
        !self.failing.lock().unwrap().contains(&InjectedFault::Load)
            && self.inner.has_complete_snapshots()
    }
    async fn load_facts(
        &self,
        key: &SessionKey,
        needs: &FactRequest,
        at: &SessionState,
        facts: &mut DecisionFacts,
    ) -> Result<(), StoreError> {
        self.check(InjectedFault::Load)?;
        self.inner.load_facts(key, needs, at, facts).await
    }
    async fn check_charges(
        &self,
        charges: &[Charge],
        now: Timestamp,
    ) -> Result<Vec<Result<Decimal, ChargeError>>, StoreError> {
        self.inner.check_charges(charges, now).await
    }
    async fn claim(
        &self,
        intent: Box<ClaimRecord>,
        charges: &[Charge],
        approval: Option<&str>,
        now: Timestamp,
    ) -> Result<Result<Vec<Decimal>, ClaimError>, StoreError> {
        self.check(InjectedFault::Claim)?;
        let dies = self.failing.lock().unwrap().contains(&InjectedFault::ClaimPanics);
        assert!(!dies, "injected death");
        self.inner.claim(intent, charges, approval, now).await
    }
    async fn commit(
        &self,
        finish: Box<CommitRequest>,
    ) -> Result<Result<Option<LazyReceipt>, CommitConflictError>, StoreError> {
        self.check(InjectedFault::Commit)?;
        let once = std::mem::take(&mut *self.failing.lock().unwrap());
        assert!(!once.contains(&InjectedFault::CommitPanics), "injected death");
        if once.contains(&InjectedFault::CommitConflicts) {
            return Ok(Err(CommitConflictError));
        }
        *self.failing.lock().unwrap() = once;
        self.inner.commit(finish).await
    }
    async fn take_deferred_claim(
        &self,
        key: &SessionKey,
        client: &str,
        tool: &str,
    ) -> Result<Option<toolgate::store::DeferredClaim>, StoreError> {
        self.check(InjectedFault::TakeDeferred)?;
        self.inner.take_deferred_claim(key, client, tool).await
    }
    async fn close_client_session(
        &self,
        key: &SessionKey,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        self.inner.close_client_session(key, now).await
    }
    async fn snapshot(&self, key: &SessionKey) -> Result<(u64, Arc<SessionState>), StoreError> {
        self.inner.snapshot(key).await
    }
    async fn load_session(
        &self,
        key: &SessionKey,
    ) -> Result<Option<Arc<SessionState>>, StoreError> {
        self.inner.load_session(key).await
    }
    async fn edit_session(&self, key: &SessionKey, alter: SessionEdit) -> Result<(), StoreError> {
        self.inner.edit_session(key, alter).await
    }
    async fn add_cost(&self, charges: &[Charge], now: Timestamp) -> Result<(), StoreError> {
        self.inner.add_cost(charges, now).await
    }
    async fn create_approval(&self, approval: Approval) -> Result<(), StoreError> {
        self.inner.create_approval(approval).await
    }
    async fn approval_for(
        &self,
        key: &SessionKey,
        digest: Digest,
    ) -> Result<Option<Approval>, StoreError> {
        self.inner.approval_for(key, digest).await
    }
    async fn approval(&self, id: &str) -> Result<Option<Approval>, StoreError> {
        self.inner.approval(id).await
    }
    async fn answer_approval(
        &self,
        id: &str,
        approved: bool,
        by: &str,
        now: Timestamp,
    ) -> Result<bool, StoreError> {
        self.inner.answer_approval(id, approved, by, now).await
    }
    async fn pending_claims(&self, now: Timestamp) -> Result<Vec<ClaimRecord>, StoreError> {
        self.inner.pending_claims(now).await
    }
    async fn settle_claim(
        &self,
        call: CallId,
        settle: ClaimResolution,
        outcome: Outcome,
        shown: Outcome,
        by: &str,
        now: Timestamp,
    ) -> Result<bool, StoreError> {
        self.inner.settle_claim(call, settle, outcome, shown, by, now).await
    }
    async fn load_output(
        &self,
        key: &SessionKey,
        handle: &str,
    ) -> Result<Option<Arc<str>>, StoreError> {
        self.inner.load_output(key, handle).await
    }
    async fn rows(&self, key: &SessionKey) -> Result<Vec<Arc<Row>>, StoreError> {
        self.inner.rows(key).await
    }
    async fn has_succeeded(&self, call: CallId) -> Result<bool, StoreError> {
        self.inner.has_succeeded(call).await
    }
    async fn append_spooled(&self, row: Arc<Row>) -> Result<(), StoreError> {
        self.append_attempts.fetch_add(1, Ordering::SeqCst);
        drop(self.append_lock.lock().await);
        self.check(InjectedFault::Commit)?;
        self.check(InjectedFault::AppendSpooled)?;
        self.inner.append_spooled(row).await
    }
    fn register_definition(&self, config: Digest, definition: &Arc<str>) {
        self.inner.register_definition(config, definition);
    }
    fn redaction_key(&self) -> Option<[u8; 32]> {
        self.inner.redaction_key()
    }
    fn state_dir(&self) -> Option<&Path> {
        self.inner.state_dir()
    }
    fn owner(&self) -> Option<Arc<str>> {
        self.inner.owner()
    }
}

/// Charges one unit of the counter `meter` for every call of `act`.
pub(crate) struct MeterPolicy;

pub(crate) fn meter_charge(amount: i64) -> Charge {
    Charge {
        counter: "meter".into(),
        amount: amount.into(),
        cap: 100.into(),
        window: None,
        unit: ChargeUnit::Fixed,
    }
}

impl Policy for MeterPolicy {
    fn name(&self) -> &str {
        "meter"
    }
    fn governs(&self, tool: &toolgate::ToolSpec) -> bool {
        tool.name() == "act"
    }
    fn check(&self, _: &PolicyInput<'_>) -> Result<Verdict, PolicyError> {
        let error = ToolError::new(ErrorCategory::Business, "meter_full", "the meter is full");
        Ok(Verdict::Allow(Obligations {
            charges: vec![(meter_charge(1), error)],
            ..Obligations::default()
        }))
    }
}

/// The world of one test.
pub(crate) struct TestWorld {
    pub(crate) gate: Toolgate,
    pub(crate) session: Session,
    pub(crate) store: Arc<FaultyStore>,
    pub(crate) files: MemoryFs,
    pub(crate) clock: Arc<ManualClock>,
    pub(crate) runs: Arc<AtomicU32>,
    /// Lets go what `act` was told to wait for.
    pub(crate) go: Arc<Semaphore>,
    pub(crate) spool: tempfile::TempDir,
}

impl TestWorld {
    /// A world with the tools `act` (an effect, as it is told), `look` (a read) and what is added.
    pub(crate) fn new(more: impl FnOnce(AgentBuilder) -> AgentBuilder) -> Self {
        Self::with_builder(more, |gate| gate)
    }

    pub(crate) fn with_builder(
        more: impl FnOnce(AgentBuilder) -> AgentBuilder,
        also: impl FnOnce(ToolgateBuilder) -> ToolgateBuilder,
    ) -> Self {
        Self::build_world(|act| act, more, |gate| also(gate).build_checked())
    }

    /// A world whose `act` is declared otherwise.
    pub(crate) fn with_act(is: impl FnOnce(Tool) -> Tool) -> Self {
        Self::build_world(is, |agent| agent, BuildWithReplayCheck::build_checked)
    }

    /// A world that is not looked back at, for policies that take down when they are asked.
    pub(crate) fn without_replay_check(more: impl FnOnce(AgentBuilder) -> AgentBuilder) -> Self {
        Self::build_world(|act| act, more, |gate| gate.build().unwrap())
    }

    fn build_world(
        is: impl FnOnce(Tool) -> Tool,
        more: impl FnOnce(AgentBuilder) -> AgentBuilder,
        build: impl FnOnce(ToolgateBuilder) -> Toolgate,
    ) -> Self {
        let (ran, go) = (Arc::new(AtomicU32::new(0)), Arc::new(Semaphore::new(0)));
        let (files, store) =
            (MemoryFs::new([("kept.txt", "as it was")]), Arc::new(FaultyStore::default()));
        let agent = Agent::builder("agent")
            .files(files.clone())
            .tool(is(act_tool(&ran, &go)))
            .tool(look_tool())
            .policy(MeterPolicy);
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
        Self { gate, session, store, files, clock, runs: ran, go, spool }
    }

    pub(crate) fn run_count(&self) -> u32 {
        self.runs.load(Ordering::SeqCst)
    }

    pub(crate) fn advance(&self, by: SignedDuration) {
        self.clock.advance(by);
    }

    pub(crate) async fn meter_value(&self) -> Decimal {
        self.store.inner.check_charges(&[meter_charge(0)], Timestamp::UNIX_EPOCH).await.unwrap()[0]
            .unwrap()
    }

    /// Everything that a failed call must leave alone.
    pub(crate) async fn fingerprint(&self) -> (String, Digest) {
        let state = self.session.state().await.unwrap();
        let mut lines: Vec<String> =
            state.slices.iter().map(|(k, v)| format!("slice {k} {v}")).collect();
        lines.extend(state.marks.iter().map(|(k, v)| format!("mark {k} {v}")));
        lines.extend(state.evidence.iter().map(|(k, v)| format!("evidence {k:?} {v:?}")));
        lines.extend(state.revocations.iter().map(|(k, v)| format!("revoked {k:?} {v}")));
        lines.push(format!("values {:?}", state.provenance));
        lines.sort();
        (lines.join("\n"), self.files.digest())
    }

    /// Rows in the ledger, and how many wait in the spool.
    pub(crate) async fn rows(&self) -> (Vec<Arc<Row>>, usize) {
        let mut rows = self.session.rows().await.unwrap();
        rows.extend(self.store.rows(&SessionKey::new("nobody", "alice", "s")).await.unwrap());
        rows.extend(self.store.rows(&SessionKey::new("agent", "mallory", "s")).await.unwrap());
        (rows, self.spooled_lines().len())
    }

    /// Rows that wait in the spool, as they are written there.
    pub(crate) fn spooled_lines(&self) -> Vec<String> {
        let text =
            std::fs::read_to_string(self.spool.path().join("rows.jsonl")).unwrap_or_default();
        text.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
    }
}

/// A tool that changes a slice and a file, and then does as it is told.
fn act_tool(ran: &Arc<AtomicU32>, go: &Arc<Semaphore>) -> Tool {
    let (ran, go) = (Arc::clone(ran), Arc::clone(go));
    let schema = json!({
        "type": "object",
        "properties": {"how": {"type": "string"}, "n": {"type": "integer"}, "password": {"type": "string", "writeOnly": true}},
        "required": ["how"],
    });
    Tool::dynamic("act", "Does as it is told.", schema, move |ctx: ToolContext, args: Value| {
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
            run_scripted(&ctx, how, &go).await
        }
    })
    .effect(Effect::Write)
    .timeout(Duration::from_millis(300))
    .output_schema(json!({"type": "object", "properties": {"done": {"type": "boolean"}}, "required": ["done"]}))
}

async fn run_scripted(ctx: &ToolContext, how: &str, go: &Semaphore) -> Result<Value, Failure> {
    match how {
        "ok" | "read" => Ok(json!({"done": true})),
        "fail" => Err(Failure::business("no_stock", "there is none left")),
        "refuse" => {
            Err(Failure::business("no_stock", "there is none left").effects(CallEffects::None))
        }
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
        "expand" => Err(Failure::signal(PromptSignal::ExpandSection {
            section: "refunds".into(),
            reason: "needed".into(),
        })),
        other => Err(Failure::validation("unknown_way", format!("no such way: {other}"))),
    }
}

pub(crate) fn look_tool() -> Tool {
    let schema = json!({"type": "object", "properties": {"at": {"type": "string"}}});
    Tool::dynamic("look", "Looks at something.", schema, |_, args| async move { Ok(args) })
        .effect(Effect::Read)
}

/// A policy from a closure.
pub(crate) struct ClosurePolicy<F>(&'static str, F);

pub(crate) fn closure_policy<
    F: Fn(&PolicyInput<'_>) -> Result<Verdict, PolicyError> + Send + Sync,
>(
    name: &'static str,
    check: F,
) -> ClosurePolicy<F> {
    ClosurePolicy(name, check)
}

impl<F: Fn(&PolicyInput<'_>) -> Result<Verdict, PolicyError> + Send + Sync> Policy
    for ClosurePolicy<F>
{
    fn name(&self) -> &str {
        self.0
    }
    fn check(&self, ask: &PolicyInput<'_>) -> Result<Verdict, PolicyError> {
        (self.1)(ask)
    }
}
