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

#[path = "../../toolgate/benches/report/mod.rs"]
mod report;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use report::{BenchLine, write_lines};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// A process that ends when this value is dropped.
struct BenchServer {
    child: Child,
    address: String,
}

impl Drop for BenchServer {
    fn drop(&mut self) {
        let _ = Command::new("kill").arg(self.child.id().to_string()).status();
        let _ = self.child.wait();
    }
}

impl BenchServer {
    /// Starts a program, and reads its address from its first line with a URL.
    fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains("http://") {
            line.clear();
            assert!(
                lines.read_line(&mut line).unwrap() > 0,
                "the program ended before it listened"
            );
        }
        std::thread::spawn(move || std::io::copy(&mut lines, &mut std::io::sink()));
        let address = line.split("http://").nth(1).unwrap().split('/').next().unwrap().to_owned();
        Self { child, address }
    }

    /// Returns the CPU time in milliseconds and the resident memory in MB.
    fn resource_usage(&self) -> (f64, f64) {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split_whitespace().collect();
        let ticks: f64 = fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap();
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let rss = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        (ticks * 10.0, rss.split_whitespace().next().unwrap().parse::<f64>().unwrap() / 1024.0)
    }
}

/// A persistent connection.
struct BenchConnection {
    stream: TcpStream,
    host: String,
    buffer: Vec<u8>,
}

static NEXT_CALL_NUMBER: AtomicU64 = AtomicU64::new(0);

impl BenchConnection {
    async fn open(address: &str) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Self { stream, host: address.to_owned(), buffer: Vec::with_capacity(16 << 10) }
    }

    async fn post(&mut self, headers: &str, body: &str) -> String {
        let request = format!(
            "POST /mcp HTTP/1.1\r\nhost: {}\r\naccept: application/json, text/event-stream\r\ncontent-type: application/json\r\n{headers}content-length: {}\r\n\r\n{body}",
            self.host,
            body.len()
        );
        self.stream.write_all(request.as_bytes()).await.unwrap();
        self.buffer.clear();
        let mut chunk = [0; 16 << 10];
        loop {
            let read = self.stream.read(&mut chunk).await.unwrap();
            assert!(
                read > 0,
                "the connection was closed: {}",
                String::from_utf8_lossy(&self.buffer)
            );
            self.buffer.extend_from_slice(&chunk[..read]);
            let Some(head) = self.buffer.windows(4).position(|window| window == b"\r\n\r\n") else {
                continue;
            };
            let text = String::from_utf8_lossy(&self.buffer[..head]).to_ascii_lowercase();
            let body = &self.buffer[head + 4..];
            let is_complete = match text.lines().find_map(|line| line.strip_prefix("content-length: ")) {
                Some(length) => body.len() >= length.trim().parse::<usize>().unwrap(),
                None => body.ends_with(b"0\r\n\r\n"),
            };
            if is_complete {
                return String::from_utf8_lossy(&self.buffer).into_owned();
            }
        }
    }

    /// Makes a call, and returns its duration in microseconds.
    async fn call(&mut self, tool: &str, session: &str) -> f64 {
        let arguments =
            json!({"text": format!("n{}", NEXT_CALL_NUMBER.fetch_add(1, Ordering::Relaxed))});
        let meta = json!({
            "io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientInfo": {"name": "bench", "version": "1"},
            "io.modelcontextprotocol/clientCapabilities": {},
        });
        let body =
            json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": tool, "arguments": arguments, "_meta": meta}})
                .to_string();
        let headers = format!(
            "mcp-protocol-version: 2026-07-28\r\nmcp-method: tools/call\r\nmcp-name: {tool}\r\ntoolgate-session: {session}\r\n"
        );
        let started_at = Instant::now();
        let response = self.post(&headers, &body).await;
        let duration = started_at.elapsed().as_secs_f64() * 1e6;
        assert!(
            response.starts_with("HTTP/1.1 200")
                && response.contains("\"result\"")
                && !response.contains("\"isError\":true"),
            "{response}"
        );
        duration
    }

    /// Opens a session of revision 2025-06-18, which a FastMCP proxy needs.
    async fn open_legacy_session(&mut self) -> String {
        let hello = json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "bench", "version": "1"}}});
        let response = self.post("", &hello.to_string()).await;
        let id = response
            .lines()
            .find_map(|line| {
                line.to_ascii_lowercase().strip_prefix("mcp-session-id: ").map(str::to_owned)
            })
            .unwrap_or_else(|| panic!("{response}"));
        id.trim().to_owned()
    }

    async fn call_in_session(&mut self, session: &str) -> f64 {
        let body = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "echo", "arguments": {"text": format!("n{}", NEXT_CALL_NUMBER.fetch_add(1, Ordering::Relaxed))}}}).to_string();
        let started_at = Instant::now();
        // No revision header: the proxy would forward it to an upstream with which it uses another
        // revision, and be rejected.
        let response = self.post(&format!("mcp-session-id: {session}\r\n"), &body).await;
        let duration = started_at.elapsed().as_secs_f64() * 1e6;
        assert!(
            response.starts_with("HTTP/1.1 200")
                && response.contains("\"result\"")
                && !response.contains("\"isError\":true"),
            "{response}"
        );
        duration
    }
}

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

const RULES: &str = r#"
[[policy]]
name = "short"
rule = "deny"
tools = ["echo", "write"]
when = 'size(input.text) > 100'
[[policy]]
name = "no_shouting"
rule = "deny"
tools = ["echo", "write"]
where = [{ argument = "/text", matches = '^[A-Z]+$' }]
[[policy]]
name = "not_these"
rule = "deny"
tools = ["echo", "write"]
where = [{ argument = "/text", in = ["a", "b"] }]
[[policy]]
name = "not_such"
rule = "deny"
tools = ["echo", "write"]
where = [{ argument = "/text", glob = "*secret*" }]
[[policy]]
name = "often"
rule = "limit"
tools = ["echo", "write"]
calls = 100000000
per = "session"
within = "1h"
"#;

fn start_gateway(home: &Path, upstream: &BenchServer) -> BenchServer {
    let config = home.join("toolgate.toml");
    let text = format!(
        "store = \"ledger.db\"\n[upstreams.fix]\nurl = \"http://{}/mcp\"\nprefix = \"\"\nconcurrency = 64\n[tools.echo]\nkind = \"mcp\"\nupstream = \"fix\"\neffect = \"read\"\n\
         [tools.write]\nkind = \"mcp\"\nupstream = \"fix\"\ntool = \"echo\"\neffect = \"write\"\n{RULES}",
        upstream.address
    );
    std::fs::write(&config, text).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_toolgate"));
    command
        .args(["serve", "--listen", "127.0.0.1:0", "--config"])
        .arg(config)
        .env("TOOLGATE_STATE", home.join("state"));
    BenchServer::start(&mut command)
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

/// Returns the FastMCP release that the client tests pin.
fn fastmcp_release() -> &'static str {
    let tests = include_str!("../../../tests/clients/gateway.py");
    tests.split('"').find(|word| word.starts_with("fastmcp==")).expect("the tests pin FastMCP")
}

/// Returns a Python with FastMCP, or `None` if it cannot be installed.
fn install_fastmcp() -> Option<PathBuf> {
    let venv = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../target/clients")
        .join(format!("bench-{}", fastmcp_release()));
    let python = venv.join("bin/python");
    if !python.exists() {
        let is_installed = Command::new("python3")
            .args(["-m", "venv"])
            .arg(&venv)
            .status()
            .is_ok_and(|status| status.success())
            && Command::new(&python)
                .args(["-m", "pip", "install", "-q", fastmcp_release()])
                .status()
                .is_ok_and(|status| status.success());
        if !is_installed {
            let _ = std::fs::remove_dir_all(&venv);
            let required = std::env::var("TOOLGATE_REQUIRE_CLIENTS")
                .is_ok_and(|value| !matches!(value.as_str(), "" | "0"));
            assert!(!required, "FastMCP is required and cannot be installed");
            eprintln!("SKIPPED: FastMCP cannot be installed");
            return None;
        }
    }
    Some(python)
}

/// Starts a FastMCP proxy with one upstream session for each request (`fresh`) or one for all
/// (`shared`).
fn start_proxy(python: &Path, upstream: &BenchServer, sessions: &str) -> BenchServer {
    let mut command = Command::new(python);
    command
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/benches/proxy.py"))
        .arg(format!("http://{}/mcp", upstream.address))
        .arg(sessions);
    let server = BenchServer::start(&mut command);
    for _ in 0..300 {
        if std::net::TcpStream::connect(&server.address).is_ok() {
            return server;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    panic!("the FastMCP proxy does not listen");
}

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
        FASTMCP_LINES.into_iter().for_each(report::remove_line);
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
    let (peer, sessions) = if shared >= fresh { (shared, shared_session) } else { (fresh, fresh_session) };
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
