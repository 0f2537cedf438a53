//! Starts the servers of the gateway benchmark, and sends calls to them.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// A process that ends when this value is dropped.
pub(crate) struct BenchServer {
    child: Child,
    pub(crate) address: String,
}

impl Drop for BenchServer {
    fn drop(&mut self) {
        let _ = Command::new("kill").arg(self.child.id().to_string()).status();
        let _ = self.child.wait();
    }
}

impl BenchServer {
    /// Starts a program, and reads its address from its first line with a URL.
    pub(crate) fn start(command: &mut Command) -> Self {
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
    pub(crate) fn resource_usage(&self) -> (f64, f64) {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split_whitespace().collect();
        let ticks: f64 = fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap();
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let rss = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        (ticks * 10.0, rss.split_whitespace().next().unwrap().parse::<f64>().unwrap() / 1024.0)
    }
}

/// A persistent connection.
pub(crate) struct BenchConnection {
    stream: TcpStream,
    host: String,
    buffer: Vec<u8>,
}

static NEXT_CALL_NUMBER: AtomicU64 = AtomicU64::new(0);

impl BenchConnection {
    pub(crate) async fn open(address: &str) -> Self {
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
            let is_complete =
                match text.lines().find_map(|line| line.strip_prefix("content-length: ")) {
                    Some(length) => body.len() >= length.trim().parse::<usize>().unwrap(),
                    None => body.ends_with(b"0\r\n\r\n"),
                };
            if is_complete {
                return String::from_utf8_lossy(&self.buffer).into_owned();
            }
        }
    }

    /// Makes a call, and returns its duration in microseconds.
    pub(crate) async fn call(&mut self, tool: &str, session: &str) -> f64 {
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
    pub(crate) async fn open_legacy_session(&mut self) -> String {
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

    pub(crate) async fn call_in_session(&mut self, session: &str) -> f64 {
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

pub(crate) fn start_gateway(home: &Path, upstream: &BenchServer) -> BenchServer {
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

/// Returns the FastMCP release that the client tests pin.
pub(crate) fn fastmcp_release() -> &'static str {
    let tests = include_str!("../../../../tests/clients/gateway.py");
    tests.split('"').find(|word| word.starts_with("fastmcp==")).expect("the tests pin FastMCP")
}

/// Returns a Python with FastMCP, or `None` if it cannot be installed.
pub(crate) fn install_fastmcp() -> Option<PathBuf> {
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
pub(crate) fn start_proxy(python: &Path, upstream: &BenchServer, sessions: &str) -> BenchServer {
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
