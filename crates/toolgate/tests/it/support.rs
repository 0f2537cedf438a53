//! Provides the test world: one agent, a scripted tool and a store that can fail.

mod policies;
mod scripted_tools;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Once, OnceLock};
use std::task::{Context, Poll, Waker};

use async_trait::async_trait;
use jiff::{SignedDuration, Timestamp};
use rust_decimal::Decimal;
use tokio::sync::Semaphore;
use toolgate::limits::{Charge, ChargeError};
use toolgate::policy::{DecisionFacts, FactRequest};
use toolgate::session::state::{SessionEdit, SessionState};
use toolgate::store::{
    Approval, ClaimError, ClaimRecord, ClaimRequest, ClaimResolution, CommitConflictError,
    CommitRequest, LeaseRequest, PauseTarget, SessionItem, SessionLease, SessionRequest,
    SessionSnapshot, StoreError,
};
use toolgate::{
    AdmissionDecision, Agent, AgentBuilder, CallId, Clock, Event, LazyReceipt, ManualClock,
    MemoryFs, MemoryStore, Outcome, Replay, ReplayComparison, Row, Session, SessionKey, Store,
    SystemClock, Tool, Toolgate, ToolgateBuilder,
};
use toolgate_json::Digest;

use self::policies::MeterPolicy;
pub(crate) use self::policies::{closure_policy, meter_charge};
use self::scripted_tools::act_tool;
pub(crate) use self::scripted_tools::look_tool;

/// Selects the store operation that fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InjectedFault {
    Paused,
    Enter,
    Load,
    Claim,
    /// Makes `claim` panic.
    ClaimPanics,
    Commit,
    /// Makes the next `commit` panic.
    CommitPanics,
    /// Makes the next `commit` report a conflict.
    CommitConflicts,
    TakeDeferred,
    /// Makes `append_spooled` fail.
    AppendSpooled,
}

/// Opens the store of a test: in memory, or SQLite if `TOOLGATE_TEST_STORE=sqlite`.
pub(crate) fn test_store() -> Arc<dyn Store> {
    test_store_at(Arc::new(SystemClock))
}

/// Opens a store whose time is that of a clock.
pub(crate) fn test_store_at(clock: Arc<dyn Clock>) -> Arc<dyn Store> {
    static NEXT_STORE: AtomicU32 = AtomicU32::new(0);
    let kind = std::env::var("TOOLGATE_TEST_STORE").unwrap_or_default();
    assert!(matches!(kind.as_str(), "" | "memory" | "sqlite"), "unknown test store `{kind}`");
    if kind == "sqlite" {
        static CLEAN_UP_ONCE: Once = Once::new();
        let process_id = std::process::id().to_string();
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("stores-{process_id}"));
        CLEAN_UP_ONCE.call_once(|| {
            // Remove the stores of processes that ended, and of an earlier process with the same
            // id. A test may start this program again while the first process runs.
            for old in std::fs::read_dir(env!("CARGO_TARGET_TMPDIR")).unwrap().flatten() {
                let name = old.file_name();
                let owner = name.to_str().and_then(|name| name.strip_prefix("stores-"));
                if owner
                    .is_some_and(|pid| pid == process_id || !Path::new("/proc").join(pid).exists())
                {
                    let _ = std::fs::remove_dir_all(old.path());
                }
            }
            std::fs::create_dir_all(&directory).unwrap();
        });
        let path = directory.join(format!("{}.db", NEXT_STORE.fetch_add(1, Ordering::SeqCst)));
        return Arc::new(toolgate_store::SqliteStore::open_with_clock(path, clock).unwrap());
    }
    Arc::new(MemoryStore::new().with_clock(clock))
}

/// Starts a runtime builder with the test store.
pub(crate) fn runtime_builder() -> ToolgateBuilder {
    Toolgate::builder().store(test_store())
}

/// Starts a runtime builder with a test store whose time is that of a clock.
pub(crate) fn runtime_builder_at(clock: Arc<dyn Clock>) -> ToolgateBuilder {
    Toolgate::builder().store(test_store_at(clock))
}

/// Builds a runtime that replays each recorded call and aborts if the decisions differ.
pub(crate) trait BuildWithReplayCheck {
    fn build_checked(self) -> Toolgate;
}

impl BuildWithReplayCheck for ToolgateBuilder {
    fn build_checked(self) -> Toolgate {
        let replay: Arc<OnceLock<Replay>> = Arc::default();
        let listener_replay = Arc::clone(&replay);
        let gate =
            self.on_event(move |event| check_replay(listener_replay.get(), event)).build().unwrap();
        assert!(replay.set(Replay::from_toolgate(&gate).unwrap()).is_ok());
        gate
    }
}

fn check_replay(replay: Option<&Replay>, event: &Event) {
    let (Some(replay), Event::CallEnded(row)) = (replay, event) else { return };
    // Parse the row again, because a replay reads rows from a ledger.
    let row: Row = serde_json::from_slice(&row.to_canonical_bytes().unwrap()).unwrap();
    // A task that used up its cooperative budget would never be ready here.
    let mut decided = std::pin::pin!(tokio::task::unconstrained(replay.decide(&row)));
    // The replay can be busy with another call for a short time.
    let comparison = loop {
        match decided.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(comparison) => break comparison,
            Poll::Pending => std::thread::yield_now(),
        }
    };
    if let ReplayComparison::Differs(now) = comparison {
        // A panic in a listener is caught, so abort the process.
        let report = format!(
            "the replay decides {now:?}, but the call was decided {:?}:\n{row:#?}\n",
            AdmissionDecision::from_row(&row)
        );
        std::io::Write::write_all(&mut std::io::stderr(), report.as_bytes()).unwrap();
        std::process::abort();
    }
}

/// Wraps the test store and injects faults.
pub(crate) struct FaultyStore {
    inner: Arc<dyn Store>,
    failing: Mutex<Vec<InjectedFault>>,
    /// Number of calls of `append_spooled`.
    pub(crate) append_attempts: AtomicU32,
    /// Blocks `append_spooled` while a test holds the lock.
    pub(crate) append_lock: tokio::sync::Mutex<()>,
}

impl FaultyStore {
    pub(crate) fn with_clock(clock: Arc<dyn Clock>) -> Self {
        Self {
            inner: test_store_at(clock),
            failing: Mutex::default(),
            append_attempts: AtomicU32::new(0),
            append_lock: tokio::sync::Mutex::default(),
        }
    }
}

impl FaultyStore {
    pub(crate) fn inject_faults(&self, faults: &[InjectedFault]) {
        *self.failing.lock().unwrap() = faults.to_vec();
    }

    fn check(&self, fault: InjectedFault) -> Result<(), StoreError> {
        if self.failing.lock().unwrap().contains(&fault) {
            Err(StoreError::unavailable(format!("injected fault at {fault:?}")))
        } else {
            Ok(())
        }
    }
}

#[async_trait]
impl Store for FaultyStore {
    fn now(&self) -> Timestamp {
        self.inner.now()
    }
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
    async fn lease_session(
        &self,
        key: &SessionKey,
        request: LeaseRequest,
    ) -> Result<Option<SessionLease>, StoreError> {
        self.inner.lease_session(key, request).await
    }
    fn release_session(&self, lease: SessionLease) {
        self.inner.release_session(lease);
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
    ) -> Result<Vec<Result<Decimal, ChargeError>>, StoreError> {
        self.inner.check_charges(charges).await
    }
    async fn claim(
        &self,
        request: ClaimRequest<'_>,
    ) -> Result<Result<Vec<Decimal>, ClaimError>, StoreError> {
        self.check(InjectedFault::Claim)?;
        let panics = self.failing.lock().unwrap().contains(&InjectedFault::ClaimPanics);
        assert!(!panics, "injected panic");
        self.inner.claim(request).await
    }
    async fn commit(
        &self,
        finish: Box<CommitRequest>,
    ) -> Result<Result<Option<LazyReceipt>, CommitConflictError>, StoreError> {
        self.check(InjectedFault::Commit)?;
        let faults = std::mem::take(&mut *self.failing.lock().unwrap());
        assert!(!faults.contains(&InjectedFault::CommitPanics), "injected panic");
        if faults.contains(&InjectedFault::CommitConflicts) {
            return Ok(Err(CommitConflictError));
        }
        *self.failing.lock().unwrap() = faults;
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
    async fn close_client_session(&self, key: &SessionKey) -> Result<(), StoreError> {
        self.inner.close_client_session(key).await
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
    async fn add_cost(&self, charges: &[Charge]) -> Result<(), StoreError> {
        self.inner.add_cost(charges).await
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
    ) -> Result<bool, StoreError> {
        self.inner.answer_approval(id, approved, by).await
    }
    async fn pending_claims(&self) -> Result<Vec<ClaimRecord>, StoreError> {
        self.inner.pending_claims().await
    }
    async fn settle_claim(
        &self,
        call: CallId,
        settle: ClaimResolution,
        outcome: Outcome,
        shown: Outcome,
        by: &str,
    ) -> Result<bool, StoreError> {
        self.inner.settle_claim(call, settle, outcome, shown, by).await
    }
    async fn load_output(
        &self,
        key: &SessionKey,
        handle: &str,
    ) -> Result<Option<Arc<str>>, StoreError> {
        self.inner.load_output(key, handle).await
    }
    async fn items(
        &self,
        key: &SessionKey,
        after: u64,
    ) -> Result<Vec<(u64, SessionItem)>, StoreError> {
        self.inner.items(key, after).await
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
    fn outlives_process(&self) -> bool {
        self.inner.outlives_process()
    }
    fn spool_dir(&self) -> Option<PathBuf> {
        self.inner.spool_dir()
    }
    fn undo_dir(&self) -> Option<PathBuf> {
        self.inner.undo_dir()
    }
    fn term(&self) -> Option<Arc<str>> {
        self.inner.term()
    }
}

/// Holds a runtime, a session and the collaborators of one test.
pub(crate) struct TestWorld {
    pub(crate) gate: Toolgate,
    pub(crate) session: Session,
    pub(crate) store: Arc<FaultyStore>,
    pub(crate) files: MemoryFs,
    pub(crate) clock: Arc<ManualClock>,
    pub(crate) runs: Arc<AtomicU32>,
    /// Releases a call of `act` with `how` = `read and wait`.
    pub(crate) go: Arc<Semaphore>,
    pub(crate) spool: tempfile::TempDir,
}

impl TestWorld {
    /// Builds a world with the tools `act` (a scripted write) and `look` (a read).
    pub(crate) fn new(configure_agent: impl FnOnce(AgentBuilder) -> AgentBuilder) -> Self {
        Self::with_builder(configure_agent, |gate| gate)
    }

    pub(crate) fn with_builder(
        configure_agent: impl FnOnce(AgentBuilder) -> AgentBuilder,
        configure_gate: impl FnOnce(ToolgateBuilder) -> ToolgateBuilder,
    ) -> Self {
        Self::build_world(|act| act, configure_agent, |gate| configure_gate(gate).build_checked())
    }

    /// Builds a world with a changed declaration of `act`.
    pub(crate) fn with_act(configure_act: impl FnOnce(Tool) -> Tool) -> Self {
        Self::build_world(configure_act, |agent| agent, BuildWithReplayCheck::build_checked)
    }

    /// Builds a world without the replay check, for policies that record their inputs.
    pub(crate) fn without_replay_check(
        configure_agent: impl FnOnce(AgentBuilder) -> AgentBuilder,
    ) -> Self {
        Self::build_world(|act| act, configure_agent, |gate| gate.build().unwrap())
    }

    fn build_world(
        configure_act: impl FnOnce(Tool) -> Tool,
        configure_agent: impl FnOnce(AgentBuilder) -> AgentBuilder,
        build: impl FnOnce(ToolgateBuilder) -> Toolgate,
    ) -> Self {
        let (ran, go) = (Arc::new(AtomicU32::new(0)), Arc::new(Semaphore::new(0)));
        let clock = Arc::new(ManualClock::at(Timestamp::from_second(1_800_000_000).unwrap()));
        let files = MemoryFs::new([("kept.txt", "as it was")]);
        let store = Arc::new(FaultyStore::with_clock(clock.clone()));
        let agent = Agent::builder("agent")
            .files(files.clone())
            .tool(configure_act(act_tool(&ran, &go)))
            .tool(look_tool())
            .policy(MeterPolicy);
        let agent = configure_agent(agent).build().unwrap();
        let spool = tempfile::tempdir().unwrap();
        let gate = Toolgate::builder()
            .agent(agent)
            .store(Arc::clone(&store) as Arc<dyn Store>)
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
        self.store.inner.check_charges(&[meter_charge(0)]).await.unwrap()[0].unwrap()
    }

    /// Describes the state that a failed call must not change.
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

    /// Returns the rows in the ledger and the number of spooled rows.
    pub(crate) async fn rows(&self) -> (Vec<Arc<Row>>, usize) {
        let mut rows = self.session.rows().await.unwrap();
        rows.extend(
            self.store.rows(&SessionKey::new("unknown_agent", "alice", "s")).await.unwrap(),
        );
        rows.extend(self.store.rows(&SessionKey::new("agent", "mallory", "s")).await.unwrap());
        (rows, self.spooled_lines().len())
    }

    /// Returns the spooled rows as JSON lines.
    pub(crate) fn spooled_lines(&self) -> Vec<String> {
        let text =
            std::fs::read_to_string(self.spool.path().join("rows.jsonl")).unwrap_or_default();
        text.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
    }
}
