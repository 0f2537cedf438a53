//! A scripted agent that works through the gateway like any MCP client.
//!
//! It checks the gateway's health, does its work, and then tries to break the rules.
//!
//! `refund-agent TOOLGATE CONFIG [--once]` starts the gateway, works, and leaves the gateway
//! running for you.

use std::error::Error;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anstyle::{AnsiColor, Style};
use rmcp::ServiceExt;
use rmcp::model::{CallToolRequestParams, CallToolResult, ClientConfig};
use rmcp::transport::StreamableHttpClientTransport;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::ChildStdout;
use tokio::signal::unix::{Signal, SignalKind, signal};

const BOLD: Style = Style::new().bold();
const DIM: Style = Style::new().dimmed();
const GREEN: Style = AnsiColor::Green.on_default();
const RED: Style = AnsiColor::Red.on_default();

/// The timeout for the status pages of the gateway.
const STATUS_READ_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns the thoughts and calls of the agent.
fn scripted_calls() -> Vec<(&'static str, &'static str, Value)> {
    let refund = |order: &str, customer: &str, amount: &str| -> Value {
        let amount: Value = amount.parse().map_or(Value::Null, Value::Number);
        json!({"order_id": order, "customer_id": customer, "amount_usd": amount})
    };
    vec![
        (
            "Ada's lamp arrived broken. I'll just refund it.",
            "issue_refund",
            refund("A-1", "C-1", "120.00"),
        ),
        ("Then I'll verify her first.", "verify_customer", json!({"customer_id": "C-1"})),
        ("And look up her order.", "lookup_order", json!({"order_id": "A-1"})),
        ("That should do it.", "issue_refund", refund("A-1", "C-1", "120.00")),
        ("She's asking again. Why not?", "issue_refund", refund("A-1", "C-1", "120.00")),
        ("The rug, too: a cent more than was paid.", "lookup_order", json!({"order_id": "A-2"})),
        ("A cent will not matter.", "issue_refund", refund("A-2", "C-1", "80.51")),
        ("Ben's order on Ada's account.", "lookup_order", json!({"order_id": "B-1"})),
        ("She is verified, after all.", "issue_refund", refund("B-1", "C-1", "499")),
        ("The sofa was 900. All of it, at once.", "lookup_order", json!({"order_id": "A-3"})),
        ("Go big.", "issue_refund", refund("A-3", "C-1", "900")),
        ("Just below, then.", "issue_refund", refund("A-3", "C-1", "499.99")),
        ("Maybe another tool will do it.", "refund_now", json!({"order_id": "A-3"})),
        (
            "I'll hand it over.",
            "escalate_to_human",
            json!({"order_id": "A-3", "why": "the sofa is broken, too"}),
        ),
    ]
}

/// The gateway process, stopped on drop.
struct GatewayProcess(Child);

impl Drop for GatewayProcess {
    fn drop(&mut self) {
        // Send `SIGTERM`, so that calls in progress can finish.
        let _ = Command::new("kill").arg(self.0.id().to_string()).status();
        let _ = self.0.wait();
    }
}

/// The signals that stop the agent: Ctrl-C, `kill`, and closing the terminal.
struct StopSignals([Signal; 3]);

impl StopSignals {
    fn new() -> io::Result<Self> {
        Ok(Self([
            signal(SignalKind::interrupt())?,
            signal(SignalKind::terminate())?,
            signal(SignalKind::hangup())?,
        ]))
    }

    async fn wait(&mut self) {
        let [interrupt, terminate, hang_up] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hang_up.recv() => {}
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (Some(program), Some(config)) = (args.first(), args.get(1)) else {
        return Err("refund-agent TOOLGATE CONFIG [--once]".into());
    };
    let once = args.iter().any(|word| word == "--once");
    let mut command = Command::new(program);
    command.args(["serve", "--config", config]).stdout(Stdio::piped());
    if once {
        command.args(["--listen", "127.0.0.1:0"]);
    }
    // Listen for signals before starting the gateway, so that the gateway never outlives the agent.
    let mut stop_signals = StopSignals::new()?;
    let mut gateway = GatewayProcess(command.spawn()?);
    tokio::select! {
        result = run_demo(&mut gateway, program) => result?,
        () = stop_signals.wait() => return Ok(()),
    }
    if !once {
        stop_signals.wait().await;
    }
    Ok(())
}

/// Runs the script, and prints how to connect other clients.
async fn run_demo(gateway: &mut GatewayProcess, program: &str) -> Result<(), Box<dyn Error>> {
    let mut ready = String::new();
    let stdout = ChildStdout::from_std(
        gateway.0.stdout.take().ok_or("the gateway has no standard output")?,
    )?;
    BufReader::new(stdout).read_line(&mut ready).await?;
    // The line contains colors if they are forced.
    let (_, location) = ready.split_once("http://").ok_or("the gateway did not start")?;
    let location: String =
        location.chars().take_while(|c| !c.is_whitespace() && !c.is_control()).collect();
    let (url, address) =
        (format!("http://{location}"), location.split('/').next().unwrap_or_default().to_owned());
    tokio::task::spawn_blocking(move || check_health(&address)).await??;
    run_calls(&url).await?;
    let mut out = anstream::stdout();
    writeln!(
        out,
        "\n{BOLD}The gateway is at {url}{BOLD:#}; end it with Ctrl-C. Connect a client:"
    )?;
    writeln!(out, "  claude mcp add --transport http desk {url}")?;
    writeln!(out, "  npx @modelcontextprotocol/inspector --cli {url} --method tools/list")?;
    writeln!(out, "Look at what happened:")?;
    let state = std::env::var("TOOLGATE_STATE")
        .map(|state| format!("TOOLGATE_STATE={state} "))
        .unwrap_or_default();
    writeln!(out, "  {state}{program} audit query --store target/refund-desk/ledger.db")?;
    Ok(())
}

/// Checks that the gateway and its upstreams are healthy before any work starts.
fn check_health(address: &str) -> Result<(), String> {
    let read_page = |path: &str| {
        fetch_page(address, path)
            .map_err(|error| format!("cannot read the status of the gateway: {error}"))
    };
    let (ready, page) = read_page("/readyz")?;
    if !ready {
        return Err(format!("the gateway is not ready: {}", page.trim()));
    }
    let (has_metrics, numbers) = read_page("/metrics")?;
    if !has_metrics {
        return Err(format!("cannot read the metrics of the gateway: {}", numbers.trim()));
    }
    let samples = |name: &'static str| {
        numbers.lines().filter_map(move |line| {
            line.strip_prefix(name)?.strip_prefix("{upstream=\"")?.split_once("\"} ")
        })
    };
    if let Some((upstream, _)) = samples("toolgate_upstream_up").find(|(_, up)| *up != "1") {
        return Err(format!("the upstream `{upstream}` is down; no work was started"));
    }
    if let Some((upstream, _)) =
        samples("toolgate_upstream_held_tools").find(|(_, count)| *count != "0")
    {
        return Err(format!(
            "tools of the upstream `{upstream}` are quarantined (see `toolgate upstream diff`); no work was started"
        ));
    }
    Ok(())
}

/// Reads a page of the gateway, and returns whether its status is 200.
fn fetch_page(address: &str, path: &str) -> io::Result<(bool, String)> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(STATUS_READ_TIMEOUT))?;
    stream.write_all(
        format!("GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n").as_bytes(),
    )?;
    let mut response = String::new();
    stream.read_to_string(&mut response)?;
    let (head, body) = response.split_once("\r\n\r\n").ok_or(io::ErrorKind::InvalidData)?;
    Ok((head.starts_with("HTTP/1.1 200 "), body.to_owned()))
}

async fn run_calls(url: &str) -> Result<(), Box<dyn Error>> {
    let client =
        ClientConfig::default().serve(StreamableHttpClientTransport::from_uri(url)).await?;
    let mut out = anstream::stdout();
    let (mut ran, mut refused) = (0, 0);
    writeln!(out, "\n{BOLD}An agent at the refund desk{BOLD:#}, through {url}")?;
    for (thought, tool, arguments) in scripted_calls() {
        let mut call = CallToolRequestParams::new(tool);
        call.arguments = arguments.as_object().cloned();
        let result = client.call_tool(call).await?;
        writeln!(out, "\n{DIM}“{thought}”{DIM:#}\n  {tool} {arguments}")?;
        match parse_result(&result) {
            Ok(value) => {
                ran += 1;
                writeln!(out, "  {GREEN}✓{GREEN:#} {value}")?;
            }
            Err((code, message)) => {
                refused += 1;
                writeln!(out, "  {RED}✗ {code}{RED:#} {message}")?;
            }
        }
    }
    writeln!(
        out,
        "\n{BOLD}{ran} calls ran, {refused} were refused.{BOLD:#} The ledger has a row for each."
    )?;
    client.cancel().await?;
    Ok(())
}

fn parse_result(result: &CallToolResult) -> Result<String, (String, String)> {
    let content = result.structured_content.clone().unwrap_or_default();
    let text = |key: &str| content.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    if result.is_error == Some(true) {
        Err((text("code"), text("message")))
    } else {
        Ok(content.to_string())
    }
}
