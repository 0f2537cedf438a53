//! Listens for connections and serves them.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use http::Request;
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use rmcp::transport::streamable_http_server::session::SessionManager as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_io_timeout::TimeoutStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig as TlsConfig;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::{HttpServer, REQUEST_READ_TIMEOUT};
use crate::gateway::{CALL_SHUTDOWN_TIMEOUT, Gateway, lock};
use crate::server::http::legacy_sessions::SESSION_IDLE_TIMEOUT;
use crate::server::http::self_wake::SelfWakingTask;

/// Write timeout: how long a client may read nothing of its response.
const CLIENT_WRITE_TIMEOUT: Duration = Duration::from_secs(60);
/// Size of the send buffer of a socket. With a larger one, the system reports progress too rarely.
const SEND_BUFFER_BYTES: usize = 256 << 10;
/// Interval of the check for expired sessions.
const SESSION_SWEEP_INTERVAL: Duration = Duration::from_secs(60);
/// Maximum number of connections; fewer if the limit of open files is lower.
pub(crate) const MAX_CONNECTIONS: usize = 16_384;

/// A gateway that listens on an address.
pub struct HttpListener {
    /// The address that it listens on.
    pub address: SocketAddr,
    task: tokio::task::JoinHandle<()>,
}

impl HttpListener {
    /// Waits until it stops listening and all requests are answered.
    pub async fn wait_stopped(self) {
        let _ = self.task.await;
    }
}

impl Gateway {
    /// Listens for clients over HTTP: `/mcp`, the decision API under `/v1`, and operational
    /// endpoints.
    ///
    /// # Errors
    /// The address cannot be bound, or is not local although no token is required.
    pub async fn listen(&self, address: SocketAddr) -> io::Result<HttpListener> {
        let running = self.active_config();
        if running.authenticator.is_auth_disabled() && !address.ip().is_loopback() {
            return Err(io::Error::other(format!(
                "{address} is reachable from other hosts, and no token is required; add `[[gateway.tokens]]` or `[gateway.jwt]`, or listen on 127.0.0.1"
            )));
        }
        let tls = running
            .settings
            .tls
            .as_ref()
            .map(|(certificate, key)| tls_acceptor(certificate, key))
            .transpose()?;
        let listener = TcpListener::bind(address).await.map_err(|error| {
            io::Error::new(
                error.kind(),
                format!(
                    "cannot listen on {address}: {error}; choose another address with `--listen`"
                ),
            )
        })?;
        let address = listener.local_addr()?;
        lock(&self.0.addresses).push(address);
        let http = Arc::new(HttpServer::new(self.clone(), &running, address));
        let gateway = self.clone();
        let task = self
            .0
            .listeners
            .spawn(async move { accept_connections(listener, http, tls, gateway).await });
        Ok(HttpListener { address, task })
    }
}

fn tls_acceptor(certificate: &Path, key: &Path) -> io::Result<TlsAcceptor> {
    let named =
        |path: &Path, error: String| io::Error::other(format!("{}: {error}", path.display()));
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_file_iter(certificate)
        .and_then(Iterator::collect)
        .map_err(|error| named(certificate, error.to_string()))?;
    let private_key =
        PrivateKeyDer::from_pem_file(key).map_err(|error| named(key, error.to_string()))?;
    let provider = Arc::new(tokio_rustls::rustls::crypto::aws_lc_rs::default_provider());
    let config = TlsConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_no_client_auth()
        .with_single_cert(chain, private_key)
        .map_err(|error| named(certificate, error.to_string()))?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

async fn accept_connections(
    listener: TcpListener,
    http: Arc<HttpServer>,
    tls: Option<TlsAcceptor>,
    gateway: Gateway,
) {
    let permits =
        Arc::new(Semaphore::new(toolgate_process::nofile_limit::max_connections(MAX_CONNECTIONS)));
    let graceful = hyper_util::server::graceful::GracefulShutdown::new();
    let mut sweep = tokio::time::interval(SESSION_SWEEP_INTERVAL);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = sweep.tick() => {
                let http = Arc::clone(&http);
                tokio::spawn(async move { http.close_idle_sessions(SESSION_IDLE_TIMEOUT).await });
                continue;
            }
            () = gateway.0.stop.cancelled() => break,
        };
        let Ok((stream, _)) = accepted else {
            // No file descriptor is free: other connections have to close first.
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let Ok(permit) = Arc::clone(&permits).try_acquire_owned() else { continue };
        let _ = stream.set_nodelay(true);
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(&stream, SEND_BUFFER_BYTES);
        let (http, tls, watcher) = (Arc::clone(&http), tls.clone(), graceful.watcher());
        tokio::spawn(SelfWakingTask::new(async move {
            let _permit = permit;
            serve_connection(stream, http, tls, watcher).await;
        }));
    }
    drop(listener);
    // Running requests finish, up to a timeout. Then streams that only listen are closed.
    gateway.wait_idle(CALL_SHUTDOWN_TIMEOUT).await;
    let mut shutdown = std::pin::pin!(graceful.shutdown());
    if tokio::time::timeout(Duration::from_millis(500), &mut shutdown).await.is_err() {
        gateway.0.closed.cancel();
        let _ = tokio::time::timeout(Duration::from_secs(2), shutdown).await;
    }
    // An open session would keep the gateway and its resources for the rest of its lifetime.
    let open_sessions: Vec<_> = http.sessions.local.sessions.read().await.keys().cloned().collect();
    let closing = futures_util::future::join_all(
        open_sessions.iter().map(|id| http.sessions.close_session(id)),
    );
    // A client that does not read could delay this, so there is a timeout.
    let _ = tokio::time::timeout(Duration::from_secs(2), closing).await;
    lock(&http.sessions.owners).clear();
}

async fn serve_connection(
    stream: TcpStream,
    http: Arc<HttpServer>,
    tls: Option<TlsAcceptor>,
    watcher: hyper_util::server::graceful::Watcher,
) {
    let service = hyper::service::service_fn(move |request: Request<Incoming>| {
        let http = Arc::clone(&http);
        async move { Ok::<_, Infallible>(http.respond(request).await) }
    });
    // A client that stops reading would occupy one of the limited connections.
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(CLIENT_WRITE_TIMEOUT));
    let stream = Box::pin(stream);
    let mut builder = hyper::server::conn::http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_READ_TIMEOUT)
        .max_buf_size(64 << 10);
    match tls {
        None => {
            let _ = watcher.watch(builder.serve_connection(TokioIo::new(stream), service)).await;
        }
        Some(tls) => {
            let Ok(Ok(stream)) =
                tokio::time::timeout(REQUEST_READ_TIMEOUT, tls.accept(stream)).await
            else {
                return;
            };
            let _ = watcher.watch(builder.serve_connection(TokioIo::new(stream), service)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use http::header::RETRY_AFTER;
    use reqwest::RequestBuilder;
    use serde_json::{Value, json};
    use sha2::{Digest as _, Sha256};
    use tokio::io::AsyncWriteExt as _;

    use super::*;
    use crate::server::http::admission::PrincipalLimiter;
    use crate::server::http::legacy_sessions::tests::test_server_with;

    fn token_config(principal: &str) -> String {
        let digest: String =
            Sha256::digest(principal.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
        format!("[[gateway.tokens]]\nprincipal = \"{principal}\"\nsha256 = \"{digest}\"\n")
    }

    /// Listens for clients, and returns the URL.
    async fn listen_on_free_port(http: HttpServer) -> (Arc<HttpServer>, String) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/mcp", listener.local_addr().unwrap());
        let (gateway, http) = (http.gateway.clone(), Arc::new(http));
        tokio::spawn(accept_connections(listener, Arc::clone(&http), None, gateway));
        (http, url)
    }

    /// Waits until a condition holds.
    async fn wait_until(condition_name: &str, mut condition: impl AsyncFnMut() -> bool) {
        let polling = async {
            while !condition().await {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), polling)
            .await
            .unwrap_or_else(|_| panic!("timeout: {condition_name}"));
    }

    /// Builds a request of a client of 2026-07-28.
    fn modern_request(
        http: &reqwest::Client,
        url: &str,
        method: &str,
        name: Option<&str>,
        mut params: Value,
    ) -> RequestBuilder {
        params["_meta"] = json!({"io.modelcontextprotocol/protocolVersion": crate::REVISION_2026_07_28, "io.modelcontextprotocol/clientCapabilities": {},
            "io.modelcontextprotocol/clientInfo": {"name": "t", "version": "1"}});
        let request = http
            .post(url)
            .header("accept", "application/json, text/event-stream")
            .header("mcp-method", method);
        let request =
            name.into_iter().fold(request, |request, name| request.header("mcp-name", name));
        let body = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params});
        request.header("mcp-protocol-version", crate::REVISION_2026_07_28).json(&body)
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn one_principal_gets_at_most_half_of_the_streams() {
        let mut http = test_server_with(&(token_config("ann") + &token_config("bob"))).await;
        http.stream_permits = PrincipalLimiter::new(4);
        let (http, url) = listen_on_free_port(http).await;
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let listen = async |principal: &str| {
            let filter = json!({"notifications": {"toolsListChanged": true}});
            modern_request(&client, &url, "subscriptions/listen", None, filter)
                .bearer_auth(principal)
                .send()
                .await
                .unwrap()
        };
        let streams = [listen("ann").await, listen("ann").await];
        assert!(streams.iter().all(|stream| stream.status() == 200), "{streams:?}");
        let refused = listen("ann").await;
        assert!(
            refused.status() == 503 && refused.headers().contains_key(RETRY_AFTER),
            "{refused:?}"
        );
        // Another principal still gets a stream, and calls are still possible.
        let other = listen("bob").await;
        assert_eq!(other.status(), 200);
        let calc = modern_request(
            &client,
            &url,
            "tools/call",
            Some("calc"),
            json!({"name": "calc", "arguments": {"expression": "1"}}),
        );
        assert_eq!(calc.bearer_auth("ann").send().await.unwrap().status(), 200);
        // A disconnect releases the permits.
        drop(streams);
        wait_until("a stream is free again", async || listen("ann").await.status() == 200).await;
        http.gateway.shut_down().await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn busy_session_does_not_expire() {
        let service = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let slow = format!(
            "[tools.slow]\nkind = \"http\"\neffect = \"read\"\nnetworks = [\"127.0.0.0/8\"]\nurl = \"http://{}/\"\nretry = {{ times = 0 }}\n",
            service.local_addr().unwrap()
        );
        let (http, url) = listen_on_free_port(test_server_with(&slow).await).await;
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let is_open = async || !http.sessions.local.sessions.read().await.is_empty();
        let params = json!({"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}});
        let initialize =
            json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params});
        let accept = "application/json, text/event-stream";
        let opened =
            client.post(&url).header("accept", accept).json(&initialize).send().await.unwrap();
        let session = opened.headers()["mcp-session-id"].clone();
        opened.text().await.unwrap();
        let request = |method: reqwest::Method| {
            client.request(method, &url).header("accept", accept).header("mcp-session-id", &session)
        };
        let listening = request(reqwest::Method::GET).send().await.unwrap();
        assert_eq!(listening.status(), 200);
        http.close_idle_sessions(Duration::ZERO).await;
        assert!(is_open().await, "a client listens");
        // A slow call whose client has disconnected.
        let call = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "slow", "arguments": {}}});
        let calling = request(reqwest::Method::POST).json(&call).send().await.unwrap();
        let (mut connection, _) =
            tokio::time::timeout(Duration::from_secs(60), service.accept()).await.unwrap().unwrap();
        drop((listening, calling));
        tokio::time::sleep(Duration::from_millis(300)).await;
        http.close_idle_sessions(Duration::ZERO).await;
        assert!(is_open().await, "a call is running");
        assert_eq!(
            http.sessions.local.session_config.keep_alive, None,
            "the library must not end the session"
        );
        connection
            .write_all(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}",
            )
            .await
            .unwrap();
        wait_until("the session has ended", async || {
            http.close_idle_sessions(Duration::ZERO).await;
            !is_open().await
        })
        .await;
        assert_eq!(request(reqwest::Method::GET).send().await.unwrap().status(), 404);
        http.gateway.shut_down().await;
    }
}
