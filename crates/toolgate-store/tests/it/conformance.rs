//! Runs one suite of rules over every store, so that all stores keep the same promises.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use rust_decimal::Decimal;
use serde_json::json;
use toolgate::limits::{Charge, ChargeUnit};
use toolgate::policy::DedupKeyKind;
use toolgate::session::state::SessionChanges;
use toolgate::store::{
    Approval, ApprovalState, ClaimError, ClaimOwner, ClaimRecord, ClaimRequest, ClaimResolution,
    CommitRequest, DedupKey, LeaseRequest, PauseTarget, PriorCall, SessionItem, SessionLease,
    SessionRequest, SessionSnapshot,
};
use toolgate::{
    CallEffects, CallId, CallOutput, Clock, Decision, Gate, ManualClock, MemoryStore, Outcome, Row,
    SessionKey, SignedDuration, Store, Timestamp,
};
use toolgate_json::Digest;
use toolgate_store::SqliteStore;

/// Runs every rule on the stores that a constructor opens.
///
/// A new backend adds one line below.
macro_rules! store_conformance {
    ($backend:ident, $open:expr) => {
        mod $backend {
            use super::*;

            store_conformance!(@rules $open,
                open_session_returns_time_of_store_and_one_start,
                exclusive_lease_excludes_others_until_release,
                shared_leases_exclude_only_exclusive_ones,
                charges_sum_up_to_their_cap,
                released_claim_frees_its_charges,
                claim_with_same_key_finds_prior_call,
                settled_claim_returns_its_outcome,
                approval_is_used_once_and_expires,
                claim_of_client_is_pending_after_its_lease,
                closed_client_session_ends_its_leases,
                deferred_claim_is_taken_once,
                items_commit_with_claim_and_row_in_order,
                pause_stops_claims,
                commit_with_old_version_conflicts,
                row_is_recorded_once_per_commit,
            );
        }
    };
    (@rules $open:expr, $($rule:ident,)*) => {
        $(#[tokio::test]
        async fn $rule() {
            let directory = tempfile::tempdir().unwrap();
            let clock = Arc::new(ManualClock::at(noon()));
            let open: fn(&Path, Arc<dyn Clock>) -> Arc<dyn Store> = $open;
            let store = open(directory.path(), clock.clone());
            super::$rule(&StoreUnderTest { store, clock }).await;
        })*
    };
}

store_conformance!(memory, |_, clock| Arc::new(MemoryStore::new().with_clock(clock)));
store_conformance!(sqlite, |directory, clock| {
    Arc::new(SqliteStore::open_with_clock(directory.join("ledger.db"), clock).unwrap())
});

/// A store, and the clock that gives its time.
struct StoreUnderTest {
    store: Arc<dyn Store>,
    clock: Arc<ManualClock>,
}

fn noon() -> Timestamp {
    Timestamp::from_second(1_800_000_000).unwrap()
}

fn next_call() -> CallId {
    static COUNT: AtomicU8 = AtomicU8::new(0);
    CallId::from_bytes([COUNT.fetch_add(1, Ordering::Relaxed); 16])
}

fn session_key() -> SessionKey {
    SessionKey::new("desk", "alice", "s")
}

fn charge(amount: i64, cap: i64) -> Charge {
    Charge {
        counter: "refunds".into(),
        amount: amount.into(),
        cap: cap.into(),
        window: Some(SignedDuration::from_hours(24)),
        unit: ChargeUnit::Fixed,
    }
}

fn row(call: CallId, at: Timestamp) -> Arc<Row> {
    let row = json!({
        "call": call, "at": at, "agent": "desk", "principal": "alice", "session": "s", "tool": "pay", "arguments": {},
        "decision": Decision::Succeeded, "gate": Gate::Run, "effects": CallEffects::Done,
        "facts": {"now": at}, "outcome": Outcome::Success(CallOutput::from_value(json!("paid"))),
        "latency": vec![0; 14], "retries": 0, "config": Digest::default(),
    });
    Arc::new(serde_json::from_value(row).unwrap())
}

fn dedup_key() -> DedupKey {
    let key = session_key();
    let SessionKey { principal, agent, .. } = key;
    DedupKey { principal, agent, tool: "pay".into(), key: "key:k".to_owned() }
}

impl StoreUnderTest {
    fn lease_request(is_exclusive: bool) -> LeaseRequest {
        let (timeout, term) = (Duration::from_millis(20), SignedDuration::from_mins(1));
        LeaseRequest { is_exclusive, timeout, term }
    }

    async fn lease(&self, is_exclusive: bool) -> Option<SessionLease> {
        self.store.lease_session(&session_key(), Self::lease_request(is_exclusive)).await.unwrap()
    }

    async fn open(&self, lease: Option<LeaseRequest>) -> Box<SessionSnapshot> {
        let request = SessionRequest {
            key: &session_key(),
            digest: Digest::of(b"call"),
            dedup_keys: &[dedup_key()],
            counts_repetition: true,
            polling: None,
            lease,
        };
        self.store.open_session(request).await.unwrap().unwrap()
    }

    fn record(&self, owner: ClaimOwner) -> Box<ClaimRecord> {
        Box::new(ClaimRecord {
            call: next_call(),
            key: session_key(),
            tool: "pay".into(),
            digest: Digest::of(b"call"),
            asked: Digest::of(b"call"),
            recall: Vec::new(),
            owner,
            lease: Timestamp::MAX,
            effect: true,
            row: None,
            pass: None,
            carriers: Vec::new(),
            seen: None,
            revokes: Vec::new(),
        })
    }

    fn own_record(&self) -> Box<ClaimRecord> {
        self.record(ClaimOwner::Term(self.store.term().unwrap_or_else(|| "this process".into())))
    }

    fn client_record(&self) -> Box<ClaimRecord> {
        self.record(ClaimOwner::ClientSession("s".into()))
    }

    async fn claim(
        &self,
        record: Box<ClaimRecord>,
        charges: &[Charge],
    ) -> Result<Vec<Decimal>, ClaimError> {
        self.claim_with(record, charges, None, Vec::new()).await
    }

    async fn claim_with(
        &self,
        record: Box<ClaimRecord>,
        charges: &[Charge],
        approval: Option<&str>,
        items: Vec<SessionItem>,
    ) -> Result<Vec<Decimal>, ClaimError> {
        let lease_ttl = SignedDuration::from_mins(10);
        let request = ClaimRequest { record, lease_ttl, charges, approval, items };
        self.store.claim(request).await.unwrap()
    }

    fn commit_request(&self, call: CallId, resolution: ClaimResolution) -> Box<CommitRequest> {
        Box::new(CommitRequest {
            row: row(call, self.store.now()),
            version: 0,
            changes: None,
            revoked: Vec::new(),
            provenance: None,
            logs: Vec::new(),
            resolution,
            outcome: Some(Outcome::Success(CallOutput::from_value(json!("paid")))),
            spent: None,
            outputs: Vec::new(),
            ended: None,
            items: Vec::new(),
            is_durable: true,
        })
    }

    async fn commit(&self, call: CallId, resolution: ClaimResolution) {
        self.store.commit(self.commit_request(call, resolution)).await.unwrap().unwrap();
    }

    async fn pending(&self) -> Vec<CallId> {
        self.store.pending_claims().await.unwrap().into_iter().map(|claim| claim.call).collect()
    }
}

async fn open_session_returns_time_of_store_and_one_start(under_test: &StoreUnderTest) {
    let first = under_test.open(None).await;
    assert_eq!((first.now, first.started_at, first.row_count), (noon(), noon(), 0));
    under_test.clock.advance(SignedDuration::from_mins(5));
    let second = under_test.open(None).await;
    assert_eq!(second.now, noon() + SignedDuration::from_mins(5));
    assert_eq!(second.started_at, noon());
}

async fn exclusive_lease_excludes_others_until_release(under_test: &StoreUnderTest) {
    let lease = under_test.lease(true).await.unwrap();
    assert!(lease.is_exclusive && lease.expires == noon() + SignedDuration::from_mins(1));
    assert_eq!(under_test.lease(true).await, None);
    assert_eq!(under_test.lease(false).await, None);
    under_test.store.release_session(lease);
    let snapshot = under_test.open(Some(StoreUnderTest::lease_request(true))).await;
    assert_eq!(under_test.lease(false).await, None);
    under_test.store.release_session(snapshot.lease.unwrap());
    assert!(under_test.lease(true).await.is_some());
}

async fn shared_leases_exclude_only_exclusive_ones(under_test: &StoreUnderTest) {
    let (first, second) = (under_test.lease(false).await, under_test.lease(false).await);
    assert_eq!(under_test.lease(true).await, None);
    for lease in [first, second].into_iter().flatten() {
        under_test.store.release_session(lease);
    }
    assert!(under_test.lease(true).await.is_some());
}

async fn charges_sum_up_to_their_cap(under_test: &StoreUnderTest) {
    assert_eq!(
        under_test.claim(under_test.own_record(), &[charge(300, 500)]).await,
        Ok(vec![0.into()])
    );
    let over = under_test.claim(under_test.own_record(), &[charge(300, 500)]).await;
    assert!(
        matches!(&over, Err(ClaimError::LimitExceeded { index: 0, error, .. }) if error.used == 300.into()),
        "{over:?}"
    );
    assert_eq!(
        under_test.claim(under_test.own_record(), &[charge(200, 500)]).await,
        Ok(vec![300.into()])
    );
    under_test.clock.advance(SignedDuration::from_hours(48));
    let rooms = under_test.store.check_charges(&[charge(1, 500)]).await.unwrap();
    // Open claims hold their charges beyond the window.
    assert_eq!(rooms, [Err(toolgate::limits::ChargeError { used: 500.into(), retry_after: None })]);
}

async fn released_claim_frees_its_charges(under_test: &StoreUnderTest) {
    let record = under_test.own_record();
    let call = record.call;
    under_test.claim(record, &[charge(500, 500)]).await.unwrap();
    under_test.commit(call, ClaimResolution::Released).await;
    assert!(under_test.claim(under_test.own_record(), &[charge(500, 500)]).await.is_ok());
}

async fn claim_with_same_key_finds_prior_call(under_test: &StoreUnderTest) {
    let keyed = || Box::new(ClaimRecord { recall: vec![dedup_key()], ..*under_test.own_record() });
    under_test.claim(keyed(), &[]).await.unwrap();
    assert_eq!(
        under_test.claim(keyed(), &[]).await,
        Err(ClaimError::PriorCall(PriorCall::InProgress, DedupKeyKind::Key))
    );
    let other = Box::new(ClaimRecord { asked: Digest::of(b"other"), ..*keyed() });
    assert_eq!(
        under_test.claim(other, &[]).await,
        Err(ClaimError::PriorCall(PriorCall::KeyReused, DedupKeyKind::Key))
    );
}

async fn settled_claim_returns_its_outcome(under_test: &StoreUnderTest) {
    let record = Box::new(ClaimRecord { recall: vec![dedup_key()], ..*under_test.own_record() });
    let call = record.call;
    under_test.claim(record, &[]).await.unwrap();
    under_test.commit(call, ClaimResolution::Done).await;
    let prior = under_test.open(None).await.prior_call;
    let expected = Outcome::Success(CallOutput::from_value(json!("paid")));
    assert_eq!(prior, Some(PriorCall::Settled(Some(expected))));
}

async fn approval_is_used_once_and_expires(under_test: &StoreUnderTest) {
    let approval = |id: &str| Approval {
        id: id.to_owned(),
        key: session_key(),
        tool: "pay".into(),
        digest: Digest::of(b"call"),
        arguments: json!({}),
        shown: json!({}),
        asked_by: vec!["big".to_owned()],
        approvers: Vec::new(),
        reason: "big".to_owned(),
        asked_at: noon(),
        expires: noon() + SignedDuration::from_mins(15),
        state: ApprovalState::Waiting,
        answered_by: None,
    };
    for id in ["one", "two", "late"] {
        under_test.store.create_approval(approval(id)).await.unwrap();
    }
    assert!(under_test.store.answer_approval("one", true, "bob").await.unwrap());
    assert!(!under_test.store.answer_approval("one", false, "bob").await.unwrap());
    assert!(under_test.store.answer_approval("two", true, "bob").await.unwrap());
    let claim = async |id| {
        under_test.claim_with(under_test.own_record(), &[], Some(id), Vec::new()).await.map(drop)
    };
    assert_eq!(claim("one").await, Ok(()));
    assert_eq!(claim("one").await, Err(ClaimError::ApprovalUnavailable));
    under_test.clock.advance(SignedDuration::from_mins(16));
    assert_eq!(claim("two").await, Err(ClaimError::ApprovalUnavailable));
    assert!(!under_test.store.answer_approval("late", true, "bob").await.unwrap());
}

async fn claim_of_client_is_pending_after_its_lease(under_test: &StoreUnderTest) {
    let record = under_test.client_record();
    let call = record.call;
    under_test.claim(record, &[charge(1, 1)]).await.unwrap();
    under_test.clock.advance(SignedDuration::from_mins(9));
    assert_eq!(under_test.pending().await, []);
    under_test.clock.advance(SignedDuration::from_mins(2));
    assert_eq!(under_test.pending().await, [call]);
    let done = Outcome::Success(CallOutput::from_value(json!("paid")));
    let settle = async || {
        let (outcome, shown) = (done.clone(), done.clone());
        let released = ClaimResolution::Released;
        under_test.store.settle_claim(call, released, outcome, shown, "eve").await.unwrap()
    };
    assert!(settle().await);
    assert!(!settle().await);
    assert!(under_test.claim(under_test.own_record(), &[charge(1, 1)]).await.is_ok());
}

async fn closed_client_session_ends_its_leases(under_test: &StoreUnderTest) {
    let record = under_test.client_record();
    let call = record.call;
    under_test.claim(record, &[]).await.unwrap();
    under_test.store.close_client_session(&session_key()).await.unwrap();
    assert_eq!(under_test.pending().await, [call]);
}

async fn deferred_claim_is_taken_once(under_test: &StoreUnderTest) {
    let pass = Some(("c".to_owned(), b"state".to_vec()));
    let record = Box::new(ClaimRecord { pass, ..*under_test.client_record() });
    let call = record.call;
    under_test.claim(record, &[charge(2, 9)]).await.unwrap();
    let take = async || under_test.store.take_deferred_claim(&session_key(), "c", "pay").await;
    let taken = take().await.unwrap().unwrap();
    assert_eq!((taken.claim.call, taken.state.as_slice()), (call, b"state".as_slice()));
    assert_eq!(taken.counters_before.len(), 1);
    assert_eq!(take().await.unwrap(), None);
}

async fn items_commit_with_claim_and_row_in_order(under_test: &StoreUnderTest) {
    let item = |text: &str| SessionItem(text.as_bytes().to_vec());
    let record = under_test.own_record();
    let call = record.call;
    let items = vec![item("turn"), item("call")];
    under_test.claim_with(record, &[charge(1, 1)], None, items).await.unwrap();
    // A claim that fails appends nothing.
    let lost = vec![item("lost")];
    assert!(
        under_test.claim_with(under_test.own_record(), &[charge(1, 1)], None, lost).await.is_err()
    );
    let mut request = under_test.commit_request(call, ClaimResolution::Done);
    request.items = vec![item("result")];
    under_test.store.commit(request).await.unwrap().unwrap();
    let items = async |after| under_test.store.items(&session_key(), after).await.unwrap();
    let expected = [(1, item("turn")), (2, item("call")), (3, item("result"))];
    assert_eq!(items(0).await, expected);
    assert_eq!(items(2).await, expected[2..]);
    assert_eq!(items(3).await, []);
}

async fn pause_stops_claims(under_test: &StoreUnderTest) {
    let target = PauseTarget::Tool("pay".into());
    let why = Some("incident".to_owned());
    under_test.store.set_pause(target.clone(), why).await.unwrap();
    let paused = under_test.claim(under_test.own_record(), &[]).await;
    assert_eq!(paused, Err(ClaimError::Paused(target.clone(), "incident".to_owned())));
    under_test.store.set_pause(target, None).await.unwrap();
    assert!(under_test.claim(under_test.own_record(), &[]).await.is_ok());
}

async fn commit_with_old_version_conflicts(under_test: &StoreUnderTest) {
    let change = |value: u8| {
        let slices = vec![("plan".into(), Some(json!(value)))];
        Some(SessionChanges { slices, ..SessionChanges::default() })
    };
    let commit = async |value| {
        let mut request = under_test.commit_request(next_call(), ClaimResolution::Released);
        request.changes = change(value);
        under_test.store.commit(request).await.unwrap().map(drop)
    };
    assert!(commit(1).await.is_ok());
    assert!(commit(2).await.is_err());
    let (version, state) = under_test.store.snapshot(&session_key()).await.unwrap();
    assert_eq!((version, state.slice("plan")), (1, Some(&json!(1))));
    assert_eq!(under_test.store.rows(&session_key()).await.unwrap().len(), 1);
}

async fn row_is_recorded_once_per_commit(under_test: &StoreUnderTest) {
    let record = under_test.own_record();
    let call = record.call;
    under_test.claim(record, &[]).await.unwrap();
    under_test.commit(call, ClaimResolution::Done).await;
    let row = under_test.store.rows(&session_key()).await.unwrap().remove(0);
    under_test.store.append_spooled(row).await.unwrap();
    assert_eq!(under_test.store.rows(&session_key()).await.unwrap().len(), 1);
    assert!(under_test.store.has_succeeded(call).await.unwrap());
}
