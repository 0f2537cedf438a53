//! Implements an upstream of revision 2026-07-28 whose tools each have a fault.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Starts a server on which each tool has the fault in its name. Returns its URL and the call
/// count.
pub(crate) async fn start_scripted_server() -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let calls = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&calls);
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            tokio::spawn(serve_script(stream, Arc::clone(&counter)));
        }
    });
    (format!("http://{address}/mcp"), calls)
}

pub(crate) const SCRIPTED_TOOLS: [&str; 19] = [
    "plain", "leaves", "breaks", "endless", "stays", "ends", "junk", "other", "stranger",
    "chatters", "nameless", "lost", "ill", "blank", "texts", "long", "page", "logs", "failing",
];

async fn serve_script(mut stream: TcpStream, calls: Arc<AtomicUsize>) {
    let mut text = Vec::new();
    loop {
        let mut chunk = [0; 4096];
        let head = loop {
            if let Some(end) = text.windows(4).position(|window| window == b"\r\n\r\n") {
                break end + 4;
            }
            match stream.read(&mut chunk).await {
                Ok(n) if n > 0 => text.extend_from_slice(&chunk[..n]),
                _ => return,
            }
        };
        let lower = String::from_utf8_lossy(&text[..head]).to_ascii_lowercase();
        let length: usize = lower
            .lines()
            .find_map(|line| line.strip_prefix("content-length: "))
            .map_or(0, |n| n.trim().parse().unwrap());
        while text.len() < head + length {
            let Ok(n @ 1..) = stream.read(&mut chunk).await else { return };
            text.extend_from_slice(&chunk[..n]);
        }
        let request: Value = serde_json::from_slice(&text[head..head + length]).unwrap_or_default();
        text.drain(..head + length);
        let result = |result: Value| {
            json!({"jsonrpc": "2.0", "id": request["id"], "result": result}).to_string()
        };
        let json = |body: &str| {
            format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
        };
        let stream_of = |body: &str| {
            let chunk = format!("data: {body}\n\n");
            format!(
                "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n{:x}\r\n{chunk}\r\n",
                chunk.len()
            )
        };
        let done = result(
            json!({"resultType": "complete", "content": [{"type": "text", "text": "done"}]}),
        );
        let tool = request.pointer("/params/name").and_then(Value::as_str).unwrap_or_default();
        calls.fetch_add(usize::from(!tool.is_empty()), Ordering::SeqCst);
        let answer = match (request["method"].as_str().unwrap_or_default(), tool) {
            ("server/discover", _) => {
                let server_info = json!({"name": "scripted", "version": "1"});
                json(&result(json!({
                    "resultType": "complete", "supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}, "serverInfo": server_info,
                    "ttlMs": 1000, "cacheScope": "private", "_meta": {"io.modelcontextprotocol/serverInfo": server_info},
                })))
            }
            ("tools/list", _) => {
                let tool_definition = |name: &&str| json!({"name": name, "description": "Does so.", "inputSchema": {"type": "object"}});
                let tools: Vec<Value> = SCRIPTED_TOOLS.iter().map(tool_definition).collect();
                json(&result(json!({"resultType": "complete", "tools": tools, "ttlMs": 1000, "cacheScope": "private"})))
            }
            ("tools/call", "plain") => json(&done),
            // The server answers, and then closes the connection without a notice.
            ("tools/call", "leaves") => {
                let _ = stream.write_all(&json(&done)).await;
                return;
            }
            // The server runs the call, and closes the connection without an answer.
            ("tools/call", "breaks") => return,
            // The answer never ends.
            ("tools/call", "endless") => {
                let _ =
                    stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{\"jsonrpc\": \"2.0\", \"x\": \"").await;
                while stream.write_all(&[b'a'; 1 << 16]).await.is_ok() {}
                return;
            }
            // The server answers, and keeps the stream open.
            ("tools/call", "stays") => stream_of(&done).into_bytes(),
            // Notifications and the answer are in one chunk.
            ("tools/call", "chatters") => {
                let token = request.pointer("/params/_meta/progressToken").cloned().unwrap_or_default();
                let notification = |n: u8| {
                    json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progressToken": token, "progress": n}})
                        .to_string()
                };
                let body = format!("data: {}\n\ndata: {}\n\ndata: {done}\n\n", notification(1), notification(2));
                format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
            }
            // The server sends a log message to every client.
            ("tools/call", "logs") => {
                let notification = json!({"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "error", "data": "oh"}});
                let body = format!("data: {notification}\n\ndata: {done}\n\n");
                format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
            }
            // The stream ends before the answer.
            ("tools/call", "ends") => b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 8\r\n\r\n: hello\n".to_vec(),
            ("tools/call", "junk") => json("{\"jsonrpc\": \"2.0\", "),
            // The answer has the id of another request.
            ("tools/call", "other") => json(&done.replacen("\"id\":", "\"id\":1000", 1)),
            // The rejection has an error without an id.
            ("tools/call", "nameless" | "lost" | "ill") => {
                let status = match tool {
                    "nameless" => "400 Bad Request",
                    "lost" => "404 Not Found",
                    _ => "503 Service Unavailable",
                };
                let body = r#"{"jsonrpc": "2.0", "id": null, "error": {"code": -32000, "message": "no"}}"#;
                format!("HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
            }
            // The call has an effect, and the result and the status report a failure.
            ("tools/call", "failing") => {
                let mut message: Value = serde_json::from_str(&done).unwrap();
                message["result"]["isError"] = json!(true);
                let body = message.to_string();
                format!("HTTP/1.1 400 No\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
            }
            // The stream has an event without data, and an event without a type.
            ("tools/call", "blank") => {
                let body = format!("id: 0\ndata: \n\nevent:\ndata: {done}\n\n");
                format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
            }
            // The answer has the id of the request as text.
            ("tools/call", "texts") => {
                let mut message: Value = serde_json::from_str(&done).unwrap();
                message["id"] = json!(request["id"].to_string());
                json(&message.to_string())
            }
            // Each event is within the size limit, but all events together exceed the limit.
            ("tools/call", "long") => {
                let pad = "a".repeat(6 << 20);
                let notification = format!(r#"data: {{"jsonrpc": "2.0", "method": "notifications/other", "params": {{"pad": "{pad}"}}}}"#);
                let body = format!("{notification}\n\n{notification}\n\n{notification}\n\ndata: {done}\n\n");
                format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
            }
            // The server answers with an HTML page.
            ("tools/call", "page") => b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 2\r\n\r\nhi".to_vec(),
            ("tools/call", "stranger") => b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n".to_vec(),
            _ => b"HTTP/1.1 202 Accepted\r\ncontent-length: 0\r\n\r\n".to_vec(),
        };
        if stream.write_all(&answer).await.is_err() {
            return;
        }
    }
}
