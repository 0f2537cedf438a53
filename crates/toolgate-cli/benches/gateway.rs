//! Measures what the gateway adds to a call, compared with a direct connection and with a FastMCP
//! proxy in the same run.
//!
//! Validation, five rules and the durable ledger are on. The client is minimal, because an SDK
//! client would dominate the result.
//!
//! The upstream is the fixture of `toolgate-mcp` over HTTP: `cargo build --release --package
//! toolgate-mcp --example fixture`.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "a benchmark may fail loudly"
)]

mod servers;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use servers::{
    BenchConnection, BenchServer, fastmcp_release, install_fastmcp, start_gateway, start_proxy,
};
use toolgate_testkit::bench_report::{BenchLine, write_lines};

fn quantile(sorted: &[f64], q: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * q) as usize]
}

/// Measures the latencies of several servers, and of the disk if given.
///
/// The calls alternate, so that noise of the machine affects all of them.
async fn measure_latencies(
    servers: &[(&BenchServer, &str)],
    mut disk: Option<&mut DiskBenchmark>,
    times: usize,
) -> Vec<Vec<f64>> {
    let mut connections = Vec::new();
    for (server, tool) in servers {
        connections.push((BenchConnection::open(&server.address).await, *tool));
    }
    let mut durations: Vec<Vec<f64>> = servers.iter().map(|_| Vec::new()).collect();
    for n in 0..times + 200 {
        // Each server is first equally often.
        for turn in 0..servers.len() {
            let at = (n + turn) % servers.len();
            let (connection, tool) = &mut connections[at];
            let duration = connection.call(tool, "latency").await;
            if n >= 200 {
                durations[at].push(duration);
            }
        }
        if let Some(disk) = &mut disk {
            disk.sync(n >= 200);
        }
    }
    for durations in &mut durations {
        durations.sort_by(f64::total_cmp);
    }
    durations
}

/// Measures the calls per second with a number of connections.
async fn measure_throughput(
    server: &BenchServer,
    connections: usize,
    tool: &'static str,
    legacy: bool,
    seconds: f64,
) -> f64 {
    let deadline = Instant::now() + Duration::from_secs_f64(seconds + 0.5);
    let warm_up_end = Instant::now() + Duration::from_secs_f64(0.5);
    let call_count = Arc::new(AtomicU64::new(0));
    let mut tasks = Vec::new();
    for number in 0..connections {
        let (address, call_count) = (server.address.clone(), Arc::clone(&call_count));
        tasks.push(tokio::spawn(async move {
            let mut connection = BenchConnection::open(&address).await;
            let session = if legacy {
                connection.open_legacy_session().await
            } else {
                format!("c{connections}-{number}")
            };
            while Instant::now() < deadline {
                match legacy {
                    true => connection.call_in_session(&session).await,
                    false => connection.call(tool, &session).await,
                };
                // Calls that end after the interval do not count.
                let now = Instant::now();
                if now > warm_up_end && now <= deadline {
                    call_count.fetch_add(1, Ordering::Relaxed);
                }
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    call_count.load(Ordering::Relaxed) as f64 / seconds
}

/// Rounds of the latency measurement.
const ROUNDS: usize = 8;

/// Lines that `target/bench.json` must have after a whole run, because other programs read them.
const REQUIRED_LINES: [&str; 7] = [
    "gateway_added_p50",
    "gateway_added_p99",
    "gateway_calls_c1",
    "gateway_calls_c8",
    "gateway_calls_c32",
    "gateway_vs_fastmcp",
    "gateway_rss_10k_sessions",
];
/// Lines that need FastMCP.
const FASTMCP_LINES: [&str; 2] = ["gateway_vs_fastmcp", "gateway_vs_fastmcp_fresh"];

/// Returns the number of frames in the write-ahead log of the ledger, and the bytes of each.
fn wal_frames(home: &Path) -> (u32, usize) {
    let index = std::fs::read(home.join("ledger.db-shm")).unwrap();
    let page = u16::from_ne_bytes(index[14..16].try_into().unwrap());
    (u32::from_ne_bytes(index[16..20].try_into().unwrap()), usize::from(page) + 24)
}

/// Measures how many bytes the ledger writes for a call with effects between two syncs.
async fn bytes_per_effect(home: &Path, gateway: &BenchServer) -> usize {
    let mut connection = BenchConnection::open(&gateway.address).await;
    let mut frames = Vec::new();
    for n in 0..1_000 {
        let before = wal_frames(home).0;
        connection.call("write", "latency").await;
        // A checkpoint restarts the log, so the difference may be negative. A new ledger writes
        // less.
        frames.extend(wal_frames(home).0.checked_sub(before).filter(|_| n >= 500));
    }
    frames.sort_unstable();
    let bytes = frames[frames.len() / 2] as usize * wal_frames(home).1 / 2;
    assert!(bytes > 0, "a call with effects writes to the log");
    bytes
}

/// Measures the disk: the time to write and sync a block, in microseconds.
///
/// The file is overwritten, like the log of the ledger.
struct DiskBenchmark {
    file: std::fs::File,
    bytes: Vec<u8>,
    sync_count: usize,
    durations: Vec<f64>,
}

impl DiskBenchmark {
    /// Number of blocks in the file.
    const BLOCK_COUNT: usize = 128;

    fn new(home: &Path, bytes: usize) -> Self {
        let file = std::fs::File::create(home.join("sync")).unwrap();
        let mut disk = Self { file, bytes: vec![7; bytes], sync_count: 0, durations: Vec::new() };
        (0..Self::BLOCK_COUNT).for_each(|_| disk.sync(false));
        disk
    }

    fn sync(&mut self, counts: bool) {
        use std::os::unix::fs::FileExt;
        let at = self.sync_count % Self::BLOCK_COUNT * self.bytes.len();
        self.sync_count += 1;
        let started_at = Instant::now();
        self.file.write_all_at(&self.bytes, at as u64).unwrap();
        self.file.sync_data().unwrap();
        if counts {
            self.durations.push(started_at.elapsed().as_secs_f64() * 1e6);
        }
    }

    fn median(mut self) -> f64 {
        self.durations.sort_by(f64::total_cmp);
        quantile(&self.durations, 0.5)
    }
}

fn line(name: &str, value: f64, unit: &str, floor: f64, note: &str) -> BenchLine {
    let round = |x: f64| (x * 1_000.0).round() / 1_000.0;
    BenchLine {
        name: name.into(),
        value: round(value),
        unit: unit.into(),
        floor: round(floor),
        ratio: round(value / floor),
        note: note.into(),
    }
}

fn main() {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let home = tempfile::tempdir().unwrap();
    let fixture =
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../target/release/examples/fixture");
    assert!(fixture.exists(), "cargo build --release --package toolgate-mcp --example fixture");
    let direct = BenchServer::start(Command::new(&fixture).args(["--listen", "127.0.0.1:0"]));
    let gateway = start_gateway(home.path(), &direct);
    // `cargo bench --bench gateway -- added` measures just that.
    if std::env::args().nth(1).as_deref() == Some("added") {
        write_lines(runtime.block_on(measure_added_latency(home.path(), &direct, &gateway)));
        return;
    }
    let python = install_fastmcp();
    let lines = runtime.block_on(measure(home.path(), &direct, &gateway, python.as_deref()));
    let measured: Vec<String> = lines.iter().map(|line| line.name.clone()).collect();
    write_lines(lines);
    if python.is_none() {
        FASTMCP_LINES.into_iter().for_each(toolgate_testkit::bench_report::remove_line);
    }
    check_lines(&measured, python.is_some());
}

/// Checks that every line that other programs read exists, is a number, and is from this run.
fn check_lines(measured: &[String], with_fastmcp: bool) {
    let text =
        std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/bench.json")).unwrap();
    let all: Vec<serde_json::Value> = serde_json::from_slice(&text).unwrap();
    for name in
        REQUIRED_LINES.into_iter().filter(|name| with_fastmcp || !FASTMCP_LINES.contains(name))
    {
        assert!(measured.iter().any(|measured| measured == name), "`{name}` was not measured");
        let value =
            all.iter().find(|line| line["name"] == name).and_then(|line| line["value"].as_f64());
        assert!(value.is_some(), "target/bench.json has no `{name}`");
    }
}

/// Measures the added latency of single calls, alternating reads and calls with effects.
async fn measure_added_latency(
    home: &Path,
    direct: &BenchServer,
    gateway: &BenchServer,
) -> Vec<BenchLine> {
    let bytes = bytes_per_effect(home, gateway).await;
    let mut disk = DiskBenchmark::new(home, bytes);
    let (mut reads, mut effects) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    for _ in 0..ROUNDS {
        let durations = measure_latencies(&[(direct, "echo"), (gateway, "echo")], None, 600).await;
        reads.iter_mut().zip(durations).for_each(|(all, durations)| all.extend(durations));
        let durations =
            measure_latencies(&[(direct, "echo"), (gateway, "write")], Some(&mut disk), 300).await;
        effects.iter_mut().zip(durations).for_each(|(all, durations)| all.extend(durations));
    }
    reads.iter_mut().chain(&mut effects).for_each(|durations| durations.sort_by(f64::total_cmp));
    let added = |[direct, gateway]: &[Vec<f64>; 2], q| {
        (quantile(gateway, q) - quantile(direct, q), quantile(direct, q))
    };
    let read_line = |name: &str, (added, floor)| {
        line(name, added, "µs", floor, "a read; floor: the direct connection")
    };
    let ((effect, direct), syncs) = (added(&effects, 0.5), 2.0 * disk.median());
    let size = bytes as f64 / 1024.0;
    vec![
        read_line("gateway_added_p50", added(&reads, 0.5)),
        read_line("gateway_added_p99", added(&reads, 0.99)),
        line(
            "gateway_added_effect_p50",
            effect,
            "µs",
            syncs,
            &format!(
                "a call with effects; floor: its two syncs, {size:.0} KiB each, measured in turn"
            ),
        ),
        line(
            "gateway_added_effect_beyond_syncs",
            effect - syncs,
            "µs",
            direct,
            "a call with effects, without its two syncs; floor: the direct connection",
        ),
    ]
}

/// Compares the throughput with that of a FastMCP proxy before the same upstream.
async fn compare_with_fastmcp(
    python: &Path,
    direct: &BenchServer,
    gateway: &BenchServer,
) -> Vec<BenchLine> {
    // With one session for each request and 32 connections, each call takes seconds.
    let fresh =
        measure_throughput(&start_proxy(python, direct, "fresh"), 32, "echo", true, 30.0).await;
    let shared =
        measure_throughput(&start_proxy(python, direct, "shared"), 32, "echo", true, 10.0).await;
    let gateway_rate = measure_throughput(gateway, 32, "echo", true, 5.0).await;
    let versus = |name: &str, peer: f64, sessions: &str| {
        assert!(peer > 0.0, "no call went through the FastMCP proxy");
        let note = format!(
            "{gateway_rate:.0} calls/s, 32 connections, revision 2025-06-18; floor: calls/s of a {} proxy, {sessions}",
            fastmcp_release()
        );
        let line = line(name, gateway_rate / peer, "×", peer, &note);
        BenchLine { ratio: line.value, ..line }
    };
    let shared_session = "one upstream session for all requests";
    let fresh_session = "an upstream session for each request";
    let (peer, sessions) =
        if shared >= fresh { (shared, shared_session) } else { (fresh, fresh_session) };
    vec![
        versus("gateway_vs_fastmcp", peer, sessions),
        versus("gateway_vs_fastmcp_fresh", fresh, fresh_session),
    ]
}

async fn measure(
    home: &Path,
    direct: &BenchServer,
    gateway: &BenchServer,
    python: Option<&Path>,
) -> Vec<BenchLine> {
    let mut lines = measure_added_latency(home, direct, gateway).await;
    for connections in [1, 8, 32] {
        let floor = measure_throughput(direct, connections, "echo", false, 3.0).await;
        let before = gateway.resource_usage().0;
        let calls = measure_throughput(gateway, connections, "echo", false, 3.0).await;
        let cpu = (gateway.resource_usage().0 - before) * 1e3 / (calls * 3.5);
        lines.push(line(
            &format!("gateway_calls_c{connections}"),
            calls,
            "calls/s",
            floor,
            &format!("reads, {cpu:.0} µs of CPU per call; floor: the direct connection"),
        ));
    }
    if let Some(python) = python {
        lines.extend(compare_with_fastmcp(python, direct, gateway).await);
    }
    let before = gateway.resource_usage().1;
    let mut connection = BenchConnection::open(&gateway.address).await;
    for number in 0..10_000 {
        connection.call("echo", &format!("s{number}")).await;
    }
    let stateless_memory = gateway.resource_usage().1;
    for _ in 0..10_000 {
        connection.open_legacy_session().await;
    }
    let (_, total_memory) = gateway.resource_usage();
    lines.push(line(
        "gateway_rss_10k_sessions",
        total_memory,
        "MB",
        before,
        &format!("10,000 sessions of 2026-07-28 ({stateless_memory:.0} MB), then 10,000 open ones of 2025-06-18; floor: memory before"),
    ));
    lines
}
