//! Provides a gateway for tests, its fixture upstream and a small client.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hyper::service::service_fn;
use rmcp::ServerHandler;
use rmcp::transport::streamable_http_server::StreamableHttpService;
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::io::{AsyncBufReadExt, BufReader, DuplexStream, Lines, ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpSocket};
use tokio::task::JoinHandle;
use toolgate::Store;
use toolgate_config::Config;
use toolgate_mcp::{Gateway, GatewayOptions, HttpListener, UpstreamOptions};
use toolgate_store::{Ledger, LedgerEntry, RowFilter, SqliteStore};

/// The lines that a client on streams receives.
pub(crate) type ClientLines = Lines<BufReader<ReadHalf<DuplexStream>>>;

/// Returns the path of the fixture, an MCP server for tests.
pub(crate) fn fixture_path() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    let path = exe.parent().unwrap().parent().unwrap().join("examples/fixture");
    assert!(path.exists(), "build it with `cargo build --example fixture`: {}", path.display());
    path
}

pub(crate) const CALC_TOOL_CONFIG: &str = "[tools.calc]\nkind = \"builtin\"\n";

pub(crate) const ACCEPT_JSON_OR_EVENTS: &str = "application/json, text/event-stream";

/// Builds a configuration with the fixture as an upstream over standard streams.
pub(crate) fn fixture_config(extra: &str) -> String {
    format!(
        "[upstreams.fix]\ncommand = {}\nargs = [\"--stdio\"]\nprefix = \"\"\n{extra}\n",
        json!(fixture_path())
    )
}

pub(crate) struct TestGateway {
    pub(crate) gateway: Gateway,
    pub(crate) url: String,
    pub(crate) home: tempfile::TempDir,
    pub(crate) store: Arc<SqliteStore>,
    listening: Option<HttpListener>,
}

impl TestGateway {
    pub(crate) async fn open(config: &str) -> Self {
        Self::try_open(config).await.unwrap_or_else(|error| panic!("{error}"))
    }

    /// Opens a gateway that waits only 3 s for upstreams that do not respond.
    ///
    /// A test that needs the other upstreams waits for them itself.
    pub(crate) async fn open_with_short_timeout(config: &str) -> Self {
        Self::open_with_timeout(config, None, Duration::from_secs(3))
            .await
            .unwrap_or_else(|error| panic!("{error}"))
    }

    pub(crate) async fn try_open(config: &str) -> std::io::Result<Self> {
        Self::open_with_timeout(config, None, Duration::from_secs(20)).await
    }

    /// Opens another gateway with the same pins, like a second process with the same configuration.
    pub(crate) async fn open_with_same_pins(&self, config: &str) -> Self {
        Self::open_with_timeout(config, Some(self.pins_dir()), Duration::from_secs(20))
            .await
            .unwrap_or_else(|error| panic!("{error}"))
    }

    async fn open_with_timeout(
        config: &str,
        pins: Option<PathBuf>,
        start_timeout: Duration,
    ) -> std::io::Result<Self> {
        let home = tempfile::tempdir()?;
        std::fs::write(home.path().join("toolgate.toml"), config)?;
        let store = Arc::new(
            SqliteStore::open(home.path().join("ledger.db")).map_err(std::io::Error::other)?,
        );
        let options = GatewayOptions {
            store: Arc::clone(&store) as Arc<dyn Store>,
            upstreams: UpstreamOptions {
                pin_dir: Some(pins.unwrap_or_else(|| home.path().join("pins"))),
                launcher: None,
            },
            upstream_start_timeout: start_timeout,
            launcher: None,
            built_in_rules: None,
            principal: "local".to_owned(),
            own_paths: Vec::new(),
        };
        let path = home.path().join("toolgate.toml");
        let gateway = Gateway::open(move || Config::load(&path), options).await?;
        let listening = gateway.listen("127.0.0.1:0".parse().unwrap()).await?;
        let url = format!("http://{}", listening.address);
        Ok(Self { gateway, url, home, store, listening: Some(listening) })
    }

    pub(crate) async fn reload(&self, config: &str) -> std::io::Result<()> {
        let path = self.home.path().join("toolgate.toml");
        std::fs::write(&path, config)?;
        self.gateway.reload().await
    }

    pub(crate) fn client(&self) -> McpTestClient {
        McpTestClient::new(&self.url)
    }

    /// Connects a client on streams, without a handshake.
    ///
    /// Returns the task of the server, the writer and the received lines.
    pub(crate) fn connect_streams(
        &self,
        agent: Option<&str>,
    ) -> (JoinHandle<()>, WriteHalf<DuplexStream>, ClientLines) {
        let (ours, theirs) = tokio::io::duplex(1 << 20);
        let (input, output) = tokio::io::split(theirs);
        let (gateway, agent) = (self.gateway.clone(), agent.map(str::to_owned));
        let serving =
            tokio::spawn(async move { drop(gateway.serve_streams(input, output, agent).await) });
        let (answers, writer) = tokio::io::split(ours);
        (serving, writer, BufReader::new(answers).lines())
    }

    pub(crate) async fn shut_down(mut self) {
        self.gateway.shut_down().await;
        if let Some(listening) = self.listening.take() {
            listening.wait_stopped().await;
        }
    }

    pub(crate) fn pins_dir(&self) -> PathBuf {
        self.home.path().join("pins")
    }

    pub(crate) fn ledger_path(&self) -> PathBuf {
        self.home.path().join("ledger.db")
    }
}

/// Replays the recorded decisions of the gateway when the test ends.
impl Drop for TestGateway {
    fn drop(&mut self) {
        toolgate_testkit::replay_check::assert_replay_unchanged(&self.ledger_path());
    }
}

/// A minimal client of revision 2026-07-28.
#[derive(Clone)]
pub(crate) struct McpTestClient {
    http: reqwest::Client,
    pub(crate) url: String,
    pub(crate) token: Option<String>,
    pub(crate) session: Option<String>,
    pub(crate) capabilities: Value,
}

impl McpTestClient {
    pub(crate) fn new(base: &str) -> Self {
        Self {
            http: http_client(),
            url: format!("{base}/mcp"),
            token: None,
            session: None,
            capabilities: json!({}),
        }
    }

    pub(crate) fn in_session(&self, session: &str) -> Self {
        Self { session: Some(session.to_owned()), ..self.clone() }
    }

    pub(crate) fn with_token(&self, token: &str) -> Self {
        Self { token: Some(token.to_owned()), ..self.clone() }
    }

    pub(crate) fn with_capabilities(&self, capabilities: Value) -> Self {
        Self { capabilities, ..self.clone() }
    }

    /// Sends a request. Returns the status and the message in the body.
    pub(crate) async fn call_method(&self, method: &str, mut params: Value) -> (u16, Value) {
        let meta = params
            .as_object_mut()
            .unwrap()
            .entry("_meta")
            .or_insert_with(|| json!({}))
            .as_object_mut()
            .unwrap();
        meta.insert("io.modelcontextprotocol/protocolVersion".to_owned(), json!("2026-07-28"));
        meta.insert(
            "io.modelcontextprotocol/clientInfo".to_owned(),
            json!({"name": "test", "version": "1"}),
        );
        meta.insert(
            "io.modelcontextprotocol/clientCapabilities".to_owned(),
            self.capabilities.clone(),
        );
        let mut request = self
            .http
            .post(&self.url)
            .header("accept", ACCEPT_JSON_OR_EVENTS)
            .header("mcp-protocol-version", "2026-07-28")
            .header("mcp-method", method);
        if let Some(name) = params.get("name").or_else(|| params.get("uri")).and_then(Value::as_str)
        {
            request = request.header("mcp-name", name);
        }
        if let Some(token) = &self.token {
            request = request.bearer_auth(token);
        }
        if let Some(session) = &self.session {
            request = request.header("toolgate-session", session);
        }
        let body = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params});
        let answer = request.json(&body).send().await.unwrap();
        let status = answer.status().as_u16();
        (status, last_message(&answer.text().await.unwrap()))
    }

    /// Calls a tool, and returns its result.
    pub(crate) async fn call(&self, tool: &str, arguments: Value) -> Value {
        let (status, answer) =
            self.call_method("tools/call", json!({"name": tool, "arguments": arguments})).await;
        assert_eq!(status, 200, "{answer}");
        assert!(answer.get("result").is_some(), "{answer}");
        answer["result"].clone()
    }

    /// Calls a tool, and returns the error code, or `ok`.
    pub(crate) async fn call_code(&self, tool: &str, arguments: Value) -> String {
        let result = self.call(tool, arguments).await;
        result["_meta"]["toolgate/error"]["code"].as_str().unwrap_or("ok").to_owned()
    }

    pub(crate) async fn tool_names(&self) -> Vec<String> {
        let (_, answer) = self.call_method("tools/list", json!({})).await;
        answer["result"]["tools"]
            .as_array()
            .unwrap_or_else(|| panic!("{answer}"))
            .iter()
            .map(|tool| tool["name"].as_str().unwrap().to_owned())
            .collect()
    }
}

pub(crate) fn http_client() -> reqwest::Client {
    reqwest::Client::builder().no_proxy().build().unwrap()
}

/// Builds the configuration of a gateway token.
pub(crate) fn token_config(principal: &str, token: &str) -> String {
    format!(
        "[[gateway.tokens]]\nprincipal = \"{principal}\"\nsha256 = \"{}\"\n",
        token_digest(token)
    )
}

pub(crate) fn token_digest(token: &str) -> String {
    Sha256::digest(token.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Counts the rows of a tool in the ledger.
pub(crate) fn count_rows(gate: &TestGateway, tool: &str) -> usize {
    find_rows(gate, tool).len()
}

/// Returns the rows of a tool in the ledger.
pub(crate) fn find_rows(gate: &TestGateway, tool: &str) -> Vec<LedgerEntry> {
    let filter = RowFilter { tool: Some(tool.to_owned()), ..Default::default() };
    Ledger::open(gate.ledger_path()).unwrap().find(&filter).unwrap()
}

/// Returns the last message of an answer: the body, or the last event of a stream.
pub(crate) fn last_message(text: &str) -> Value {
    if let Ok(value) = serde_json::from_str(text) {
        return value;
    }
    let last = text
        .lines()
        .filter_map(|line| line.strip_prefix("data:"))
        .filter_map(|data| serde_json::from_str(data.trim()).ok())
        .next_back();
    last.unwrap_or_else(|| json!({"text": text}))
}

/// Returns the running descendants of this process.
pub(crate) fn child_processes() -> Vec<(u32, String)> {
    let mut found = Vec::new();
    let mut parents = vec![std::process::id()];
    while let Some(parent) = parents.pop() {
        for entry in std::fs::read_dir("/proc").unwrap().flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok())
            else {
                continue;
            };
            let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
            let Some((_, rest)) = stat.rsplit_once(") ") else { continue };
            let mut fields = rest.split_whitespace();
            let (state, parent_pid) = (
                fields.next().unwrap_or_default().to_owned(),
                fields.next().and_then(|field| field.parse::<u32>().ok()),
            );
            if parent_pid == Some(parent) && state != "Z" {
                let command_line = std::fs::read_to_string(entry.path().join("cmdline"))
                    .unwrap_or_default()
                    .replace('\0', " ");
                found.push((pid, command_line));
                parents.push(pid);
            }
        }
    }
    found
}

/// Returns the child processes with the argument `--tools N`.
///
/// Each test that searches for processes has a number that no other test has.
pub(crate) fn processes_with_number(number: u8) -> Vec<Pid> {
    let argument = format!(" --tools {number} ");
    let found =
        child_processes().into_iter().filter(|(_, command_line)| command_line.contains(&argument));
    found.filter_map(|(pid, _)| Pid::from_raw(pid as i32)).collect()
}

/// Kills these processes, and returns how many were killed.
pub(crate) fn kill_processes_with_number(number: u8) -> usize {
    processes_with_number(number)
        .into_iter()
        .filter(|pid| kill_process(*pid, Signal::KILL).is_ok())
        .count()
}

/// Returns whether a process has ended and closed its files.
///
/// A process that is being killed has no command line any more, but its pipes are still open.
pub(crate) fn has_ended(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    // The name of the process before the state may contain any character.
    let state = stat.ok().and_then(|stat| stat.rsplit_once(") ")?.1.chars().next());
    state.is_none_or(|state| matches!(state, 'Z' | 'X'))
}

/// Runs an ignored test in a separate process.
pub(crate) fn run_in_own_process(test: &str) {
    let exe = std::env::current_exe().unwrap();
    let output = std::process::Command::new(exe)
        .args(["--exact", test, "--ignored", "--nocapture"])
        .output()
        .unwrap();
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

/// Waits until a condition is true.
pub(crate) async fn wait_until(condition: &str, mut is_true: impl AsyncFnMut() -> bool) {
    for _ in 0..900 {
        if is_true().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("timed out waiting until {condition}");
}

/// Returns an address without a listener. No process can use the address while the socket exists.
pub(crate) fn unused_address() -> (TcpSocket, SocketAddr) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = socket.local_addr().unwrap();
    (socket, address)
}

pub(crate) fn count_lines(path: &Path) -> usize {
    std::fs::read_to_string(path).unwrap_or_default().lines().count()
}

/// Serves MCP over HTTP, and returns the URL.
pub(crate) async fn start_mcp_server<S: ServerHandler>(
    service: StreamableHttpService<S, LocalSessionManager>,
) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/mcp", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let service = service.clone();
            let answer = service_fn(move |request| {
                let service = service.clone();
                async move { Ok::<_, std::convert::Infallible>(service.handle(request).await) }
            });
            let connection = hyper::server::conn::http1::Builder::new()
                .serve_connection(hyper_util::rt::TokioIo::new(stream), answer);
            tokio::spawn(async move { drop(connection.await) });
        }
    });
    url
}
