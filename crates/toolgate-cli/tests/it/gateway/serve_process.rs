//! Runs `toolgate serve` for tests, and sends requests to it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use assert_cmd::cargo::CommandCargoExt;
use serde_json::{Value, json};

use super::tools_call_request;
use crate::hook::TestProject;

/// A gateway process that ends when this value is dropped.
pub(crate) struct ServeProcess {
    pub(crate) child: Child,
    pub(crate) url: String,
    pub(crate) stderr_text: Arc<Mutex<String>>,
}

impl ServeProcess {
    pub(crate) fn start(project: &TestProject) -> Self {
        Self::start_with(project, &[], &[])
    }

    pub(crate) fn start_with(
        project: &TestProject,
        variables: &[(&str, &str)],
        extra_args: &[&str],
    ) -> Self {
        let mut command = Command::cargo_bin("toolgate").unwrap();
        project.set_environment(&mut command);
        command
            .args(["serve", "--config", "toolgate.toml", "--listen", "127.0.0.1:0"])
            .args(extra_args)
            .envs(variables.iter().copied());
        Self::spawn(command.stderr(Stdio::piped()))
    }

    /// Starts a command, and reads the address from its first line.
    pub(crate) fn spawn(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let stderr_text = Arc::<Mutex<String>>::default();
        let (log, errors) = (Arc::clone(&stderr_text), child.stderr.take());
        std::thread::spawn(move || {
            for line in errors
                .into_iter()
                .flat_map(|errors| BufReader::new(errors).lines())
                .map_while(Result::ok)
            {
                log.lock().unwrap().push_str(&(line + "\n"));
            }
        });
        let address = line
            .split("http://")
            .nth(1)
            .unwrap_or_else(|| panic!("{line}"))
            .split(['/', ' ', '\n'])
            .next()
            .unwrap();
        Self { child, url: address.to_owned(), stderr_text }
    }

    pub(crate) fn signal(&self, name: &str) {
        assert!(
            Command::new("kill")
                .args([name, &self.child.id().to_string()])
                .status()
                .unwrap()
                .success()
        );
    }

    /// Sends a request, and returns the stream of the response.
    fn send(&self, path: &str, headers: &str, body: &Value) -> TcpStream {
        let body = body.to_string();
        let mut stream = TcpStream::connect(&self.url).unwrap();
        let kinds =
            "content-type: application/json\r\naccept: application/json, text/event-stream\r\n";
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n{kinds}{headers}",
            self.url
        );
        stream
            .write_all(format!("{head}content-length: {}\r\n\r\n{body}", body.len()).as_bytes())
            .unwrap();
        stream
    }

    /// Sends a request, and returns the body of the response.
    pub(crate) fn post(&self, path: &str, headers: &str, body: &Value) -> String {
        let mut response = String::new();
        self.send(path, headers, body).read_to_string(&mut response).unwrap();
        response.split_once("\r\n\r\n").unwrap().1.to_owned()
    }

    /// Starts a call of a tool without arguments.
    pub(crate) fn start_call(&self, tool: &str) -> TcpStream {
        let headers = format!(
            "mcp-protocol-version: 2026-07-28\r\nmcp-method: tools/call\r\nmcp-name: {tool}\r\n"
        );
        let mut body = tools_call_request(1, tool, json!({}));
        body["params"]["_meta"] = json!({"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {}});
        self.send("/mcp/default/s", &headers, &body)
    }

    /// Returns the decision of `/v1/calls/check` for a call without arguments.
    pub(crate) fn check_call(&self, tool: &str, id: &str) -> String {
        let body = self.post(
            "/v1/calls/check",
            "",
            &json!({"id": id, "session": id, "tool": tool, "arguments": {}}),
        );
        serde_json::from_str::<Value>(&body).unwrap_or_else(|_| panic!("{body}"))["decision"]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    }
}

impl Drop for ServeProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn wait_until(condition: &str, mut is_met: impl FnMut() -> bool) {
    for _ in 0..900 {
        if is_met() {
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    panic!("timeout while waiting until {condition}");
}
