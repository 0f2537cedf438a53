//! Measures the ledger, compared with floors in the same run.
//!
//! Measures durable rows per second, the cost of a claim, a query for one customer among a million
//! rows, and opening a store with 100,000 sessions.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a benchmark may fail loudly"
)]

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use serde_json::json;
use toolgate::limits::{Charge, ChargeUnit};
use toolgate::policy::DecisionFacts;
use toolgate::policy::Require;
use toolgate::store::{
    ClaimOwner, ClaimRecord, ClaimRequest, ClaimResolution, CommitRequest, LeaseRequest,
    SessionRequest, Store,
};
use toolgate::{
    Agent, CallEffects, CallId, CallOutput, Decision, Gate, Latency, Outcome, Row, Session,
    SessionKey, Tool, Toolgate,
};
use toolgate_json::Digest;
use toolgate_store::{Ledger, RowFilter, SqliteStore};
use toolgate_testkit::bench_report::{BenchLine, median, write_lines};

static NEXT_CALL_NUMBER: AtomicU64 = AtomicU64::new(1);

/// Returns increasing ids, like those of real calls.
fn call_id() -> CallId {
    let n = u128::from(NEXT_CALL_NUMBER.fetch_add(1, Ordering::Relaxed));
    CallId::from_bytes((0x01a1_0000_0000_7000_8000_0000_0000_0000 + (n << 20)).to_be_bytes())
}

fn row(session: usize, customer: usize) -> Arc<Row> {
    let customer = format!("C-{customer}");
    let value =
        json!({"refund_id": "R-1", "status": "paid", "customer_id": customer, "amount": 120});
    Arc::new(Row {
        call: call_id(),
        client_id: None,
        at: Timestamp::now(),
        key: SessionKey::new("desk", "alice", format!("conversation-{session}")),
        turn: Some(3),
        stop_reason: Some("tool_use".to_owned()),
        tool: "issue_refund".into(),
        arguments: Arc::new(
            json!({"customer_id": customer, "order_id": "A-7", "amount_usd": 120, "reason": "the goods arrived broken"}),
        ),
        entities: vec![("customer_id".into(), customer.into())],
        digest: Some(Digest::of(b"call")),
        decision: Decision::Succeeded,
        gate: Gate::Run,
        rule: None,
        facts: Box::new(DecisionFacts::at(Timestamp::now())),
        outcome: Outcome::Success(CallOutput::from_value(value)),
        effects: CallEffects::Done,
        latency: Latency::default(),
        retries: 0,
        spent: None,
        config: Digest::default(),
        settles: None,
    })
}

fn commit_request(row: Arc<Row>, durable: bool) -> Box<CommitRequest> {
    Box::new(CommitRequest {
        row,
        version: 0,
        changes: None,
        revoked: Vec::new(),
        provenance: None,
        logs: Vec::new(),
        resolution: ClaimResolution::Done,
        outcome: None,
        spent: None,
        outputs: Vec::new(),
        ended: None,
        items: Vec::new(),
        is_durable: durable,
    })
}

fn intent() -> (Box<ClaimRecord>, Vec<Charge>) {
    let draft = row(NEXT_CALL_NUMBER.load(Ordering::Relaxed) as usize % 64, 7);
    let charge = Charge {
        counter: format!("limit daily {}", draft.key.session),
        amount: 1.into(),
        cap: 1_000_000_000.into(),
        window: Some(SignedDuration::from_hours(24)),
        unit: ChargeUnit::Fixed,
    };
    let intent = ClaimRecord {
        call: draft.call,
        key: draft.key.clone(),
        tool: Arc::clone(&draft.tool),
        digest: Digest::of(b"call"),
        asked: Digest::of(b"call"),
        recall: Vec::new(),
        owner: ClaimOwner::Term("process:bench".into()),
        lease: Timestamp::MAX,
        effect: true,
        row: Some(draft),
        pass: None,
        carriers: Vec::new(),
        seen: None,
        revokes: Vec::new(),
    };
    (Box::new(intent), vec![charge])
}

/// Runs an operation many times in parallel tasks, and returns each duration in nanoseconds.
async fn time_in_parallel<F: Future<Output = ()> + Send + 'static>(
    store: &Arc<SqliteStore>,
    times: usize,
    tasks: usize,
    operation: fn(Arc<SqliteStore>) -> F,
) -> Vec<f64> {
    let mut handles = Vec::new();
    for _ in 0..tasks {
        let store = Arc::clone(store);
        handles.push(tokio::spawn(async move {
            let mut durations = Vec::with_capacity(times / tasks);
            for _ in 0..times / tasks {
                let started_at = Instant::now();
                operation(Arc::clone(&store)).await;
                durations.push(started_at.elapsed().as_nanos() as f64);
            }
            durations
        }));
    }
    let mut all_durations = Vec::new();
    for handle in handles {
        all_durations.extend(handle.await.unwrap());
    }
    all_durations
}

/// Measures the disk: the durations of a write with `fdatasync`, in nanoseconds.
fn time_raw_writes(directory: &Path, bytes: usize, times: usize) -> Vec<f64> {
    let mut file = std::fs::File::create(directory.join("floor")).unwrap();
    let block = vec![7u8; bytes];
    let mut durations = Vec::new();
    for _ in 0..times {
        let started_at = Instant::now();
        file.write_all(&block).unwrap();
        file.sync_data().unwrap();
        durations.push(started_at.elapsed().as_nanos() as f64);
    }
    durations
}

/// Measures SQLite alone: rows per second in one table without an index, with the same batches.
fn bare_sqlite_rate(
    sql: &rusqlite::Connection,
    bytes: usize,
    rows: usize,
    transactions: usize,
) -> f64 {
    sql.execute_batch(
        "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA wal_autocheckpoint = 16000;
         CREATE TABLE IF NOT EXISTS ledger (seq INTEGER PRIMARY KEY, body TEXT NOT NULL) STRICT",
    )
    .unwrap();
    let body = "x".repeat(bytes);
    let mut insert = sql.prepare("INSERT INTO ledger (body) VALUES (?1)").unwrap();
    let started_at = Instant::now();
    for n in 0..transactions {
        sql.execute_batch("BEGIN IMMEDIATE").unwrap();
        // Distribute all rows evenly over the transactions.
        for _ in rows * n / transactions..rows * (n + 1) / transactions {
            insert.execute([&body]).unwrap();
        }
        sql.execute_batch("COMMIT").unwrap();
    }
    rows as f64 / started_at.elapsed().as_secs_f64()
}

async fn commit_one_row(store: Arc<SqliteStore>) {
    let n = NEXT_CALL_NUMBER.load(Ordering::Relaxed) as usize;
    store.commit(commit_request(row(n % 512, n % 10_000), true)).await.unwrap().unwrap();
}

async fn begin_one_claim(store: Arc<SqliteStore>) {
    let (record, charges) = intent();
    let lease_ttl = SignedDuration::MAX;
    let items = Vec::new();
    let request = ClaimRequest { record, lease_ttl, charges: &charges, approval: None, items };
    store.claim(request).await.unwrap().unwrap();
}

async fn measure_rows(directory: &Path, name: &str, tasks: usize, rows: usize) -> [BenchLine; 2] {
    let store = Arc::new(SqliteStore::open(directory.join(format!("rows-{tasks}.db"))).unwrap());
    time_in_parallel(&store, tasks * 4, tasks, commit_one_row).await;
    let (mut values, mut bares, mut floors, mut batch) = (Vec::new(), Vec::new(), Vec::new(), 0.0);
    let bytes = row(1, 1).to_canonical_bytes().unwrap().len();
    let bare_sqlite =
        rusqlite::Connection::open(directory.join(format!("bare-{tasks}.db"))).unwrap();
    bare_sqlite_rate(&bare_sqlite, bytes, tasks * 4, 4);
    for _ in 0..3 {
        // Only the store is measured, so the rows are prepared before.
        let mut ready: Vec<Vec<Box<CommitRequest>>> = (0..tasks).map(|_| Vec::new()).collect();
        (0..rows)
            .for_each(|n| ready[n % tasks].push(commit_request(row(n % tasks, n % 10_000), true)));
        let before = store.transaction_count();
        let started_at = Instant::now();
        let callers = ready.into_iter().map(|rows| {
            let store = Arc::clone(&store);
            tokio::spawn(async move {
                for row in rows {
                    store.commit(row).await.unwrap().unwrap();
                }
            })
        });
        for caller in callers.collect::<Vec<_>>() {
            caller.await.unwrap();
        }
        values.push(rows as f64 / started_at.elapsed().as_secs_f64());
        let transactions = (store.transaction_count() - before) as usize;
        batch = rows as f64 / transactions as f64;
        let floor: f64 =
            time_raw_writes(directory, bytes * rows / transactions, transactions).iter().sum();
        floors.push(rows as f64 / (floor / 1e9));
        bares.push(bare_sqlite_rate(&bare_sqlite, bytes, rows, transactions));
    }
    let note = format!(
        "durable rows of {bytes} bytes, {batch:.1} per transaction, {tasks} callers; floor: write and fdatasync of the same batches"
    );
    let (value, bare, floor) = (median(values), median(bares), median(floors));
    let bare_note = format!(
        "SQLite alone: one table without an index, {batch:.1} rows per transaction; same floor"
    );
    [
        line(name, "rows/s", value, floor, &note),
        line(&format!("{name}_bare"), "rows/s", bare, floor, &bare_note),
    ]
}

/// Measures the maximum throughput, and the throughput with few parallel writers.
async fn measure_all_rows(directory: &Path) -> Vec<BenchLine> {
    let mut lines = Vec::new();
    for (name, tasks, rows) in
        [("", 512, 40_960), ("_c1", 1, 1_000), ("_c8", 8, 8_000), ("_c64", 64, 32_000)]
    {
        lines.extend(
            measure_rows(directory, &format!("ledger_rows_per_s{name}"), tasks, rows).await,
        );
    }
    lines
}

async fn measure_claims(directory: &Path, tasks: usize, times: usize) -> BenchLine {
    let store = Arc::new(SqliteStore::open(directory.join(format!("claims-{tasks}.db"))).unwrap());
    time_in_parallel(&store, tasks * 20, tasks, begin_one_claim).await;
    let durations = time_in_parallel(&store, times, tasks, begin_one_claim).await;
    let bytes = row(1, 1).to_canonical_bytes().unwrap().len() + 500;
    let floor = time_raw_writes(directory, bytes, 500);
    let note = format!(
        "a durable claim with one limit, {tasks} in parallel; floor: write and fdatasync of one claim"
    );
    line(
        &format!("claim_latency_c{tasks}"),
        "µs",
        median(durations) / 1e3,
        median(floor) / 1e3,
        &note,
    )
}

fn line(name: &str, unit: &str, value: f64, floor: f64, note: &str) -> BenchLine {
    let round = |x: f64| (x * 1_000.0).round() / 1_000.0;
    BenchLine {
        name: name.to_owned(),
        value: round(value),
        unit: unit.to_owned(),
        floor: round(floor),
        ratio: round(value / floor),
        note: note.to_owned(),
    }
}

/// Fills a ledger with rows of 100,000 sessions and 10,000 customers.
async fn fill_ledger(path: &Path, rows: usize) {
    let store = Arc::new(SqliteStore::open(path).unwrap());
    let mut handles = Vec::new();
    for task in 0..1_024 {
        let store = Arc::clone(&store);
        handles.push(tokio::spawn(async move {
            for n in (task..rows).step_by(1_024) {
                store
                    .commit(commit_request(row(n % 100_000, (n * 7_919) % 10_000), false))
                    .await
                    .unwrap()
                    .unwrap();
            }
        }));
    }
    for handle in handles {
        handle.await.unwrap();
    }
}

fn measure_query(path: &Path) -> BenchLine {
    let ledger = Ledger::open(path).unwrap();
    let (mut values, mut floors) = (Vec::new(), Vec::new());
    let sql = rusqlite::Connection::open(path).unwrap();
    for n in 0..200 {
        let customer = format!("C-{}", (n * 37) % 10_000);
        let filter = RowFilter {
            entity: Some(("customer_id".to_owned(), customer.into())),
            limit: Some(100),
            newest_first: true,
            ..RowFilter::default()
        };
        let started_at = Instant::now();
        let found = ledger.find(&filter).unwrap();
        values.push(started_at.elapsed().as_nanos() as f64);
        assert_eq!(found.len(), 100);
        let seqs: Vec<i64> = found.iter().map(|entry| entry.seq as i64).collect();
        let started_at = Instant::now();
        for seq in seqs {
            let body: String = sql
                .prepare_cached("SELECT body FROM ledger WHERE seq = ?1")
                .unwrap()
                .query_row([seq], |row| row.get(0))
                .unwrap();
            std::hint::black_box(body);
        }
        floors.push(started_at.elapsed().as_nanos() as f64);
    }
    let note = "the newest 100 rows of one customer among 1,000,000, parsed; floor: the same rows by number, not parsed";
    line("query_by_customer_1m", "ms", median(values) / 1e6, median(floors) / 1e6, note)
}

fn resident_megabytes() -> f64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: f64 = text.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0.0);
    pages * 4096.0 / 1e6
}

/// Opens a store and enters a session.
async fn open_and_enter(path: &Path, n: usize) -> SqliteStore {
    let store = SqliteStore::open(path).unwrap();
    let key = SessionKey::new("desk", "alice", format!("conversation-{}", n * 9_001));
    let enter = SessionRequest {
        key: &key,
        digest: Digest::of(b"call"),
        dedup_keys: &[],
        counts_repetition: true,
        polling: None,
        lease: Some(LeaseRequest {
            is_exclusive: true,
            timeout: Duration::from_secs(5),
            term: SignedDuration::from_mins(1),
        }),
    };
    assert!(store.open_session(enter).await.unwrap().is_some());
    store
}

/// Measures the memory of opening a store in a new process, in MB.
fn measure_open_memory(path: &Path) -> f64 {
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .env("LEDGER_OPEN", path)
        .output()
        .unwrap();
    String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
}

async fn measure_open(path: &Path) -> BenchLine {
    let (mut values, mut floors, mut grown) = (Vec::new(), Vec::new(), Vec::new());
    for n in 0..11 {
        let started_at = Instant::now();
        let store = open_and_enter(path, n).await;
        values.push(started_at.elapsed().as_nanos() as f64);
        drop(store);
        grown.push(measure_open_memory(path));
        let session = format!("conversation-{}", n * 9_001);
        let started_at = Instant::now();
        let sql = rusqlite::Connection::open(path).unwrap();
        let _: i64 = sql
            .query_row("SELECT id FROM sessions WHERE session = ?1", [&*session], |row| row.get(0))
            .unwrap();
        floors.push(started_at.elapsed().as_nanos() as f64);
    }
    let note = format!(
        "open a store of 100,000 sessions and 1,000,000 rows, and enter a session; {:.1} MB of memory; floor: open SQLite, and find a session",
        median(grown)
    );
    line("open_100k_sessions", "ms", median(values) / 1e6, median(floors) / 1e6, &note)
}

/// Measures a whole call of a read tool, in a new session and after many calls.
async fn measure_calls(directory: std::path::PathBuf) -> BenchLine {
    let schema = json!({"type": "object", "properties": {"customer": {"type": "string"}}, "required": ["customer"]});
    let look =
        Tool::dynamic("look", "Looks.", schema, |_, _| async { Ok(json!({"active": true})) })
            .effect(toolgate::Effect::Read)
            .entity("customer", "/customer")
            .proves("/active");
    let rule = Require::new("seen", ["look"], ["look"])
        .same("customer", "/customer")
        .within(SignedDuration::from_hours(1));
    let agent =
        Agent::builder("desk").tool(look).policy(toolgate::policy::observe(rule)).build().unwrap();
    let store = Arc::new(SqliteStore::open(directory.join("calls.db")).unwrap());
    let gate = Toolgate::builder().agent(agent).store(store).build().unwrap();
    let measure = async |session: &Session, from: usize| {
        let mut durations = Vec::new();
        for n in from..from + 500 {
            let started_at = Instant::now();
            session.call("look", json!({"customer": format!("C-{n}")})).await;
            durations.push(started_at.elapsed().as_nanos() as f64);
        }
        median(durations)
    };
    let session = gate.session("desk", "alice", "one");
    let fresh = measure(&session, 0).await;
    for n in 1_000..20_000 {
        session.call("look", json!({"customer": format!("C-{n}")})).await;
    }
    let old = measure(&session, 30_000).await;
    let note = "a call of a read tool with evidence and a rule, after 20,000 calls in the session; floor: the first 500";
    line("ledger_call_old_session", "µs", old / 1e3, fresh / 1e3, note)
}

fn main() {
    if let Some(path) = std::env::var_os("LEDGER_OPEN") {
        let before = resident_megabytes();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let store = runtime.block_on(open_and_enter(Path::new(&path), 3));
        println!("{:.3}", resident_megabytes() - before);
        drop(store);
        return;
    }
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))
        .expect("a temporary directory can be created");
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        // `cargo bench --bench ledger -- rows` measures one thing.
        match std::env::args().nth(1).as_deref() {
            Some("rows") => return write_lines(measure_all_rows(directory.path()).await),
            Some("calls") => {
                return write_lines(vec![
                    tokio::spawn(measure_calls(directory.path().to_owned())).await.unwrap(),
                ]);
            }
            _ => {}
        }
        let mut lines = measure_all_rows(directory.path()).await;
        lines.push(measure_claims(directory.path(), 1, 1_000).await);
        lines.push(measure_claims(directory.path(), 64, 12_800).await);
        lines.push(tokio::spawn(measure_calls(directory.path().to_owned())).await.unwrap());
        let path = directory.path().join("million.db");
        let started_at = Instant::now();
        fill_ledger(&path, 1_000_000).await;
        println!(
            "wrote a million rows in {:.0} s, {:.0} MB",
            started_at.elapsed().as_secs_f64(),
            std::fs::metadata(&path).unwrap().len() as f64 / 1e6
        );
        lines.push(measure_query(&path));
        lines.push(measure_open(&path).await);
        write_lines(lines);
    });
}
