//! Serves a client on standard streams: one message a line, checked before it is parsed.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rmcp::model::{
    ClientJsonRpcMessage, ClientRequest, ErrorCode, JsonRpcMessage, ServerJsonRpcMessage,
};
use rmcp::transport::Transport;
use rmcp::{RoleServer, ServiceExt};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::sync::{Mutex, Semaphore};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use toolgate_json::JsonBounds;

use crate::gateway::Gateway;
use crate::resources;
use crate::server::handler::McpServer;
use crate::server::identity::{AuthMethod, Caller, StdioIdentity};
use crate::server::malformed_call;
use crate::server::parse_message;
use crate::server::parse_message::ParsedMessage;

/// Returns the limits of a message: larger than for arguments, because it contains more.
pub(crate) const fn message_bounds(bytes: usize) -> JsonBounds {
    JsonBounds { bytes, depth: 96, nodes: 400_000 }
}

/// Maximum number of unsent rejections before reading stops.
const MAX_UNSENT_REJECTIONS: usize = 256;
/// Delay before the end of the input is reported. A subscription that has just started would miss
/// an earlier end.
const END_OF_INPUT_DELAY: Duration = Duration::from_millis(50);

/// Transport over lines of text.
struct LineTransport<R, W> {
    input: BufReader<R>,
    output: Arc<Mutex<W>>,
    /// The line so far. It is a field, because reading may be interrupted at any time.
    line: Vec<u8>,
    /// Whether the line is too long. Such a line is read to its end and dropped.
    is_oversized: bool,
    max_line_bytes: usize,
    /// Tasks that send rejections.
    rejections: TaskTracker,
    /// Limits the number of rejections in progress.
    rejection_permits: Arc<Semaphore>,
    /// Cancelled when the client disconnects, and the time of that.
    disconnected: CancellationToken,
    ended_at: Option<Instant>,
    gateway: Gateway,
}

/// A line that is not a valid request: its request ID and the error.
struct LineRejection {
    id: Value,
    code: ErrorCode,
    reason: String,
}

impl<R: AsyncRead + Unpin + Send, W: AsyncWrite + Unpin + Send + 'static> LineTransport<R, W> {
    /// Reads the next line; `None` at the end of the input.
    async fn read_line(&mut self) -> Option<Result<Vec<u8>, &'static str>> {
        loop {
            let chunk = self.input.fill_buf().await.ok()?;
            if chunk.is_empty() {
                return None;
            }
            let end = chunk.iter().position(|byte| *byte == b'\n');
            let consumed = end.map_or(chunk.len(), |end| end + 1);
            if !self.is_oversized {
                self.line.extend(chunk.iter().take(end.unwrap_or(chunk.len())));
            }
            self.input.consume(consumed);
            if self.line.len() > self.max_line_bytes {
                self.is_oversized = true;
                self.line = Vec::new();
            }
            if end.is_some() {
                if std::mem::take(&mut self.is_oversized) {
                    return Some(Err("the message is too large"));
                }
                return Some(Ok(std::mem::take(&mut self.line)));
            }
        }
    }

    /// Parses the next line that is not empty; `None` at the end of the input.
    async fn parse_line(&mut self) -> Option<Result<ParsedMessage, LineRejection>> {
        loop {
            let line = match self.read_line().await? {
                Ok(line) => Bytes::from(line),
                Err(why) => {
                    return Some(Err(LineRejection {
                        id: Value::Null,
                        code: ErrorCode::INVALID_REQUEST,
                        reason: why.to_owned(),
                    }));
                }
            };
            if line.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let to_rejection = |error: parse_message::MessageReadError| LineRejection {
                id: parse_message::find_request_id(&line),
                code: error.code(),
                reason: error.message().to_owned(),
            };
            return Some(
                parse_message::parse_message(line.clone(), &message_bounds(self.max_line_bytes))
                    .map_err(to_rejection),
            );
        }
    }

    /// Rejects a line in a separate task, because reading may be interrupted.
    fn reject(&self, rejection: LineRejection) {
        let output = Arc::clone(&self.output);
        let LineRejection { id, code, reason: why } = rejection;
        self.gateway.0.metrics.count_rejection();
        tracing::debug!(code = code.0, "line rejected");
        let permit = Arc::clone(&self.rejection_permits).try_acquire_owned();
        self.rejections.spawn(async move {
            drop(
                write_line(
                    &output,
                    malformed_call::rejection_message(code, id, &why).to_string().into_bytes(),
                )
                .await,
            );
            drop(permit);
        });
    }
}

async fn write_line<W: AsyncWrite + Unpin>(output: &Mutex<W>, mut text: Vec<u8>) -> io::Result<()> {
    text.push(b'\n');
    let mut output = output.lock().await;
    output.write_all(&text).await?;
    output.flush().await
}

impl<R, W> Transport<RoleServer> for LineTransport<R, W>
where
    R: AsyncRead + Unpin + Send + 'static,
    W: AsyncWrite + Unpin + Send + 'static,
{
    type Error = io::Error;

    fn send(
        &mut self,
        item: ServerJsonRpcMessage,
    ) -> impl Future<Output = io::Result<()>> + Send + 'static {
        let output = Arc::clone(&self.output);
        async move { write_line(&output, serde_json::to_vec(&item)?).await }
    }

    async fn receive(&mut self) -> Option<ClientJsonRpcMessage> {
        loop {
            // Reading stops while the client does not read its rejections.
            drop(self.rejection_permits.acquire().await);
            let ParsedMessage { text, value, raw_arguments: raw } = match self.parse_line().await {
                None => {
                    self.disconnected.cancel();
                    let ended = *self.ended_at.get_or_insert_with(Instant::now);
                    tokio::time::sleep(END_OF_INPUT_DELAY.saturating_sub(ended.elapsed())).await;
                    return None;
                }
                Some(Ok(message)) => message,
                Some(Err(rejection)) => {
                    self.reject(rejection);
                    continue;
                }
            };
            match serde_json::from_slice::<ClientJsonRpcMessage>(&text) {
                Ok(mut message) => {
                    if let JsonRpcMessage::Request(request) = &mut message {
                        match (&mut request.request, raw) {
                            (ClientRequest::CallToolRequest(call), Some(raw)) => {
                                drop(call.extensions.insert(raw))
                            }
                            (ClientRequest::SubscriptionsListenRequest(listen), _) => {
                                resources::limit_addresses(&mut listen.params.notifications)
                            }
                            _ => {}
                        }
                    }
                    return Some(message);
                }
                Err(_) => {
                    // An invalid notification gets no answer.
                    if value.get("id").is_some() || value.get("method").is_none() {
                        let id = value.get("id").cloned().unwrap_or_default();
                        let why = "not a valid message of the protocol".to_owned();
                        self.reject(LineRejection {
                            id,
                            code: ErrorCode::INVALID_REQUEST,
                            reason: why,
                        });
                    }
                }
            }
        }
    }

    async fn close(&mut self) -> io::Result<()> {
        self.rejections.close();
        let _ = tokio::time::timeout(Duration::from_secs(5), self.rejections.wait()).await;
        self.output.lock().await.shutdown().await
    }
}

impl Gateway {
    /// Serves one client over standard streams until it disconnects.
    ///
    /// # Errors
    /// Reading or writing a stream fails.
    pub async fn serve_stdio(&self, agent: Option<String>) -> io::Result<()> {
        self.serve_streams(tokio::io::stdin(), tokio::io::stdout(), agent).await
    }

    /// Serves one client over any two streams.
    ///
    /// # Errors
    /// Reading or writing a stream fails.
    pub async fn serve_streams(
        &self,
        input: impl AsyncRead + Send + Unpin + 'static,
        output: impl AsyncWrite + Send + Unpin + 'static,
        agent: Option<String>,
    ) -> io::Result<()> {
        let caller = Caller {
            principal: self.default_principal().to_owned(),
            agents: None,
            session: None,
            auth_method: AuthMethod::Anonymous,
        };
        // The session lasts as long as the process.
        let session =
            format!("stdio-{}-{}", std::process::id(), toolgate::Timestamp::now().as_millisecond());
        let max_bytes = self.active_config().settings.max_request_bytes;
        let fixed = StdioIdentity { caller, agent, session };
        let server = McpServer::new(self.clone(), Some(fixed.clone()));
        let transport = LineTransport {
            input: BufReader::new(input),
            output: Arc::new(Mutex::new(output)),
            line: Vec::new(),
            is_oversized: false,
            max_line_bytes: max_bytes,
            rejections: TaskTracker::new(),
            rejection_permits: Arc::new(Semaphore::new(MAX_UNSENT_REJECTIONS)),
            disconnected: server.disconnected.clone(),
            ended_at: None,
            gateway: self.clone(),
        };
        let service = tokio::select! {
            served = server.serve(transport) => match served {
                Ok(service) => service,
                // A disconnect before the handshake is not an error.
                Err(rmcp::service::ServerInitializeError::ConnectionClosed(_)) => return Ok(()),
                Err(error) => return Err(io::Error::other(error.to_string())),
            },
            () = self.0.stop.cancelled() => return Ok(()),
        };
        let end = service.cancellation_token();
        let mut waiting = Box::pin(service.waiting());
        tokio::select! {
            ended = &mut waiting => ended.map(|_| ()).map_err(io::Error::other),
            () = self.0.stop.cancelled() => {
                self.wait_idle(Duration::from_secs(10)).await;
                end.cancel();
                let _ = tokio::time::timeout(Duration::from_secs(10), waiting).await;
                Ok(())
            }
        }
    }
}
