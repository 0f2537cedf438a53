//! Opens connections to upstreams: child processes, streamable HTTP, and the 2024-11-05 transport.

use std::collections::HashMap;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use crate::upstream::client_handler::UpstreamClientHandler;
use crate::upstream::oauth::AccessTokenRequest;
use crate::upstream::supervisor::is_modern;
use crate::upstream::transport::bounded_http::{BoundedHttpClient, MAX_RESPONSE_BYTES};
use crate::upstream::transport::child_process::{UpstreamProcess, read_stderr};
use crate::upstream::transport::direct_http::DirectClient;
use crate::upstream::transport::legacy_sse::SseTransport;
use reqwest::header::{HeaderName, HeaderValue};
use rmcp::RoleClient;
use rmcp::model::ProtocolVersion;
use rmcp::service::{
    ClientInitializeError, ClientLifecycleMode, RunningService, serve_client_with_lifecycle,
};
use rmcp::transport::streamable_http_client::{
    StreamableHttpClientTransport, StreamableHttpClientTransportConfig,
};
use rustix::process::Pid;
use tokio::process::Command;
use tokio_util::sync::CancellationToken;
use toolgate_config::{
    Credentials, SecretRef, UPSTREAM_ENVIRONMENT, UpstreamConfig, UpstreamTransport,
};

/// Extra concurrent requests for lists, resources and subscriptions, so that these never wait
/// behind calls.
const EXTRA_REQUEST_SLOTS: usize = 4;

/// The timeout for probing the 2024-11-05 transport if no transport is configured.
const SSE_PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// An open connection after a successful handshake.
pub(crate) struct UpstreamConnection {
    pub(crate) service: RunningService<RoleClient, UpstreamClientHandler>,
    /// The child process. Dropping it kills the process and its descendants.
    pub(crate) child: Option<UpstreamProcess>,
    /// The fast path for calls, if the server supports revision 2026-07-28.
    pub(crate) direct: Option<DirectClient>,
    /// Cancelled when the server closed the connection.
    pub(crate) closed: CancellationToken,
}

/// The protocol era of the handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HandshakeMode {
    /// `server/discover`, then `initialize` if the server rejects it or does not respond for a
    /// while.
    Auto,
    /// Only `server/discover`.
    Discover,
    /// Only `initialize`.
    Initialize,
}

impl HandshakeMode {
    /// Returns the next handshake to try after a failed one. Some servers exit on a request of the
    /// other era.
    pub(crate) const fn next_after(self, error: &UpstreamConnectError) -> Option<Self> {
        match self {
            Self::Auto if error.is_late_response => Some(Self::Discover),
            Self::Auto | Self::Discover => Some(Self::Initialize),
            Self::Initialize => None,
        }
    }

    fn lifecycle(self) -> ClientLifecycleMode {
        let preferred_versions = vec![ProtocolVersion::V_2026_07_28];
        match self {
            Self::Auto => ClientLifecycleMode::Auto { preferred_versions, legacy_version: None },
            Self::Discover => ClientLifecycleMode::Discover { preferred_versions },
            Self::Initialize => ClientLifecycleMode::Initialize,
        }
    }
}

/// Why a connection failed.
#[derive(Debug)]
pub(crate) struct UpstreamConnectError {
    pub(crate) reason: String,
    /// The HTTP status of the rejection, if there was one.
    status: Option<u16>,
    /// A response to another request came instead of the one to `initialize`, perhaps a late one to
    /// `server/discover`.
    is_late_response: bool,
}

impl From<String> for UpstreamConnectError {
    fn from(why: String) -> Self {
        Self { reason: why, status: None, is_late_response: false }
    }
}

impl From<ClientInitializeError> for UpstreamConnectError {
    fn from(error: ClientInitializeError) -> Self {
        let late = matches!(error, ClientInitializeError::ConflictInitResponseId(..));
        Self {
            reason: crate::upstream::error_text::describe_handshake_error(&error),
            status: crate::upstream::error_text::handshake_status(&error),
            is_late_response: late,
        }
    }
}

/// Connects to an upstream. Lines of standard error go to `on_line`.
pub(crate) async fn connect(
    upstream: &UpstreamConfig,
    handler: UpstreamClientHandler,
    launcher: Option<&Path>,
    mode: HandshakeMode,
    on_line: Arc<dyn Fn(String) + Send + Sync>,
) -> Result<UpstreamConnection, UpstreamConnectError> {
    match &upstream.transport {
        UpstreamTransport::Command { program, args, env, inherit, directory } => {
            let arguments =
                args.iter().map(SecretRef::resolve_and_remember).collect::<Result<Vec<_>, _>>()?;
            // A bare name is searched in `PATH`. A path must not depend on the working directory.
            let program = if program.components().count() > 1 {
                std::path::absolute(program).unwrap_or_else(|_| program.clone())
            } else {
                program.clone()
            };
            let mut command = match launcher {
                Some(launcher) => {
                    let mut command = Command::new(launcher);
                    command
                        .arg(toolgate_process::supervisor::SUPERVISE_ARG)
                        .arg(std::process::id().to_string())
                        .arg(&program);
                    command
                }
                None => Command::new(&program),
            };
            command
                .args(arguments)
                .env_clear()
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            let inherited =
                UPSTREAM_ENVIRONMENT.iter().copied().chain(inherit.iter().map(String::as_str));
            command.envs(
                inherited.filter_map(|name| std::env::var_os(name).map(|value| (name, value))),
            );
            for (name, value) in env {
                command.env(name, value.resolve_and_remember()?);
            }
            // The supervisor process restores the file limit that toolgate raised for its clients.
            let file_limit =
                launcher.and_then(|_| toolgate_process::nofile_limit::previous_limit());
            command.envs(
                file_limit
                    .map(|before| (toolgate_process::supervisor::NOFILE_ENV, before.to_string())),
            );
            if let Some(directory) = directory {
                command.current_dir(directory);
            }
            // The supervisor process must survive long enough to kill everything.
            command.process_group(0).kill_on_drop(launcher.is_none());
            let mut child = command
                .spawn()
                .map_err(|error| format!("`{}` cannot be started: {error}", program.display()))?;
            let (stdin, stdout, stderr) =
                (child.stdin.take(), child.stdout.take(), child.stderr.take());
            let id = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
            let mut process = UpstreamProcess { child, id, is_supervised: launcher.is_some() };
            let (Some(stdin), Some(stdout)) = (stdin, stdout) else {
                return Err("cannot open the standard streams of the process".to_owned().into());
            };
            let stderr_task =
                stderr.map(|stderr| tokio::spawn(read_stderr(stderr, upstream.clone(), on_line)));
            let transport = rmcp::transport::async_rw::AsyncRwTransport::new_client(stdout, stdin)
                .with_max_line_length(MAX_RESPONSE_BYTES);
            let transport = handler.wrap_transport(transport);
            let closed = transport.closed();
            match serve_client_with_lifecycle(handler, transport, mode.lifecycle()).await {
                Ok(service) => {
                    Ok(UpstreamConnection { service, child: Some(process), direct: None, closed })
                }
                Err(error) => {
                    let never_started =
                        closed.is_cancelled() && process.has_failed_to_start().await;
                    drop(process);
                    // The last line of standard error may name the reason. The process has exited,
                    // so wait only briefly for descendants that still hold the stream.
                    if let Some(stderr_task) = stderr_task
                        && let Ok(Ok(last)) =
                            tokio::time::timeout(Duration::from_secs(1), stderr_task).await
                        && never_started
                    {
                        return Err(upstream.redact_secrets(&last).into());
                    }
                    Err(error.into())
                }
            }
        }
        UpstreamTransport::Http { url, headers, credentials, sse } => {
            let address = HttpUpstreamAddress::resolve(upstream, url, headers, credentials).await?;
            if *sse == Some(true) {
                return connect_sse(handler, address.open_sse().await?).await;
            }
            let max_requests = upstream.max_concurrency.saturating_add(EXTRA_REQUEST_SLOTS);
            let rejection =
                match address.clone().connect_http(handler.clone(), max_requests, mode).await {
                    Ok(connection) => return Ok(connection),
                    Err(rejection) => rejection,
                };
            match (sse, rejection.status) {
                // As the specification asks of clients: a server that rejects `POST` may use the
                // older transport, so probe it.
                (None, Some(400 | 404 | 405)) if mode == HandshakeMode::Initialize => {
                    match tokio::time::timeout(SSE_PROBE_TIMEOUT, address.open_sse()).await {
                        Ok(Ok(events)) => connect_sse(handler, events).await,
                        Ok(Err(_)) | Err(_) => Err(rejection),
                    }
                }
                (Some(_), Some(404 | 405)) => Err(format!(
                    "{}; for a server of the 2024-11-05 transport, set `transport = \"sse\"` (`type` in client files)",
                    rejection.reason
                )
                .into()),
                _ => Err(rejection),
            }
        }
    }
}

/// The address of an HTTP upstream, and what is sent with each request.
#[derive(Clone)]
struct HttpUpstreamAddress {
    client: reqwest::Client,
    url: String,
    headers: HashMap<HeaderName, HeaderValue>,
    token: Option<String>,
}

impl HttpUpstreamAddress {
    async fn resolve(
        upstream: &UpstreamConfig,
        url: &SecretRef,
        headers: &[(String, SecretRef)],
        credentials: &Credentials,
    ) -> Result<Self, String> {
        let url = url.resolve_and_remember()?;
        let client = crate::http_tool::upstream_client().map_err(|error| error.to_string())?;
        let mut custom = HashMap::new();
        for (name, value) in headers {
            let name: HeaderName =
                name.parse().map_err(|_| format!("`{name}` is not a header name"))?;
            let mut value = HeaderValue::from_str(&value.resolve_and_remember()?)
                .map_err(|_| format!("the header `{name}` has an invalid value"))?;
            value.set_sensitive(true);
            custom.insert(name, value);
        }
        let token = match credentials {
            Credentials::None => None,
            Credentials::Bearer(token) => Some(token.resolve_and_remember()?),
            Credentials::ClientCredentials { source, client_id, client_secret, scope } => {
                let token = AccessTokenRequest {
                    source,
                    client_id,
                    client_secret,
                    scope: scope.as_deref(),
                }
                .fetch_token(&client, &url)
                .await?;
                upstream.remember_token(&token);
                Some(token)
            }
        };
        Ok(Self { client, url, headers: custom, token })
    }

    /// Performs the handshake over streamable HTTP.
    async fn connect_http(
        self,
        handler: UpstreamClientHandler,
        max_requests: usize,
        mode: HandshakeMode,
    ) -> Result<UpstreamConnection, UpstreamConnectError> {
        let direct = DirectClient::new(&self.url, self.headers.clone(), self.token.as_deref());
        let mut config = StreamableHttpClientTransportConfig::with_uri(self.url)
            .custom_headers(self.headers)
            .max_concurrent_requests(max_requests)
            // The supervisor replaces a lost session: it knows which requests may be repeated.
            .reinit_on_expired_session(false);
        if let Some(token) = self.token {
            config = config.auth_header(token);
        }
        let transport = handler.wrap_transport(StreamableHttpClientTransport::with_client(
            BoundedHttpClient(self.client),
            config,
        ));
        let closed = transport.closed();
        let service = serve_client_with_lifecycle(handler, transport, mode.lifecycle()).await?;
        let direct = direct.filter(|_| is_modern(service.peer()));
        Ok(UpstreamConnection { service, child: None, direct, closed })
    }

    /// Opens the event stream of the 2024-11-05 transport.
    async fn open_sse(self) -> Result<SseTransport, String> {
        SseTransport::open(self.client, &self.url, self.headers, self.token).await
    }
}

/// Performs the handshake over the 2024-11-05 transport.
async fn connect_sse(
    handler: UpstreamClientHandler,
    events: SseTransport,
) -> Result<UpstreamConnection, UpstreamConnectError> {
    let transport = handler.wrap_transport(events);
    let closed = transport.closed();
    let service =
        serve_client_with_lifecycle(handler, transport, HandshakeMode::Initialize.lifecycle())
            .await?;
    Ok(UpstreamConnection { service, child: None, direct: None, closed })
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;

    use rmcp::transport::async_rw::AsyncRwTransport;
    use serde_json::{Value, json};
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};

    use super::*;

    /// Connects to a program that starts after 12 s and then answers all pending requests.
    async fn connect_slow_server(
        supports_discover: bool,
        supports_initialize: bool,
        mode: HandshakeMode,
    ) -> Result<RunningService<RoleClient, UpstreamClientHandler>, UpstreamConnectError> {
        connect_scripted_server(
            if supports_discover { json!(["2026-07-28"]) } else { Value::Bool(false) },
            supports_initialize,
            mode,
        )
        .await
    }

    /// The same with a list of supported revisions.
    ///
    /// `false` means that the program does not know `server/discover`, and `null` that its result
    /// is empty.
    async fn connect_scripted_server(
        revisions: Value,
        supports_initialize: bool,
        mode: HandshakeMode,
    ) -> Result<RunningService<RoleClient, UpstreamClientHandler>, UpstreamConnectError> {
        let (ours, theirs) = tokio::io::duplex(1 << 16);
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_secs(12)).await;
            let (requests, mut answers) = tokio::io::split(theirs);
            let mut requests = BufReader::new(requests).lines();
            while let Ok(Some(line)) = requests.next_line().await {
                let request: Value = serde_json::from_str(&line).unwrap();
                let info = json!({"name": "late", "version": "1"});
                let answer = match request["method"].as_str().unwrap() {
                    "server/discover" if revisions.is_null() => json!({}),
                    "server/discover" if revisions.is_array() => json!({
                        "resultType": "complete", "supportedVersions": revisions, "capabilities": {}, "serverInfo": info,
                        "ttlMs": 1000, "cacheScope": "private", "_meta": {"io.modelcontextprotocol/serverInfo": info},
                    }),
                    "initialize" if supports_initialize => {
                        json!({"protocolVersion": "2025-11-25", "capabilities": {}, "serverInfo": info})
                    }
                    _ => Value::Null,
                };
                let answer = match (request.get("id"), answer) {
                    (None, _) => continue,
                    (Some(id), Value::Null) => {
                        json!({"jsonrpc": "2.0", "id": id, "error": {"code": -32601, "message": "unknown"}})
                    }
                    (Some(id), answer) => json!({"jsonrpc": "2.0", "id": id, "result": answer}),
                };
                if answers.write_all(format!("{answer}\n").as_bytes()).await.is_err() {
                    return;
                }
            }
        });
        let (input, output) = tokio::io::split(ours);
        let handler = UpstreamClientHandler::new(Weak::new());
        let transport = handler.wrap_transport(AsyncRwTransport::new_client(input, output));
        Ok(serve_client_with_lifecycle(handler, transport, mode.lifecycle()).await?)
    }

    #[tokio::test(start_paused = true)]
    async fn the_handshake_with_a_slow_server_succeeds() {
        // A late error to `server/discover` must not count as the response to `initialize`.
        let service = connect_slow_server(false, true, HandshakeMode::Auto)
            .await
            .unwrap_or_else(|error| panic!("{error:?}"));
        assert!(!is_modern(service.peer()));
        for supports_initialize in [false, true] {
            let error = connect_slow_server(true, supports_initialize, HandshakeMode::Auto)
                .await
                .err()
                .unwrap();
            assert_eq!(
                HandshakeMode::Auto.next_after(&error),
                Some(HandshakeMode::Discover),
                "{error:?}"
            );
            let service = connect_slow_server(true, supports_initialize, HandshakeMode::Discover)
                .await
                .unwrap_or_else(|error| panic!("{error:?}"));
            assert!(is_modern(service.peer()));
        }
        // A server that supports both requests, but not the newest revision, connects in the end.
        for newest in [json!(["2025-11-25"]), Value::Null] {
            let error = connect_scripted_server(newest.clone(), true, HandshakeMode::Auto)
                .await
                .err()
                .unwrap();
            assert_eq!(
                HandshakeMode::Auto.next_after(&error),
                Some(HandshakeMode::Discover),
                "{error:?}"
            );
            let error = connect_scripted_server(newest.clone(), true, HandshakeMode::Discover)
                .await
                .err()
                .unwrap();
            assert_eq!(
                HandshakeMode::Discover.next_after(&error),
                Some(HandshakeMode::Initialize),
                "{error:?}"
            );
            assert!(connect_scripted_server(newest, true, HandshakeMode::Initialize).await.is_ok());
        }
        // The number of attempts is limited.
        let error = connect_slow_server(false, false, HandshakeMode::Auto).await.err().unwrap();
        let next = HandshakeMode::Auto.next_after(&error);
        assert_eq!(next, Some(HandshakeMode::Initialize));
        let error =
            connect_slow_server(false, false, HandshakeMode::Initialize).await.err().unwrap();
        assert_eq!(HandshakeMode::Initialize.next_after(&error), None);
        assert!(error.reason.contains("unknown"), "{error:?}");
    }
}
