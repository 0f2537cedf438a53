//! Tracks the owners of sessions of earlier revisions, and limits their number.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, StatusCode};
use http_body_util::Full;
use rmcp::transport::streamable_http_server::session::{SessionId, SessionManager as _};
use serde_json::Value;

use super::{HttpResponse, HttpServer, error_response};
use crate::gateway::{ActiveConfig, lock};
use crate::server::http::admission::SessionKeepAlive;
use crate::server::identity::Caller;

/// Maximum number of sessions: in total, and of a principal if there are several. Each takes tens
/// of kilobytes for its lifetime.
const MAX_SESSIONS: usize = 20_000;
const MAX_SESSIONS_PER_PRINCIPAL: usize = 1_000;
/// How long a session lives without a request.
pub(crate) const SESSION_IDLE_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// Caller and agent that opened a session, and when it was last used.
pub(crate) struct SessionOwner {
    caller: Caller,
    agent: Option<String>,
    last_used: Instant,
    keep_alive: SessionKeepAlive,
}

impl SessionOwner {
    fn new(caller: Caller, agent: Option<String>) -> Self {
        Self { caller, agent, last_used: Instant::now(), keep_alive: SessionKeepAlive::default() }
    }
}

impl HttpServer {
    /// Checks that a session belongs to the caller and the agent.
    ///
    /// The session does not expire while the returned value is kept.
    pub(crate) fn check_session(
        &self,
        headers: &HeaderMap,
        caller: &Caller,
        agent: Option<&str>,
    ) -> Result<Option<SessionKeepAlive>, Box<HttpResponse>> {
        let Some(id) = headers.get("mcp-session-id") else { return Ok(None) };
        let id = id.to_str().map_err(|_| {
            error_response(StatusCode::BAD_REQUEST, "the session ID is not valid text", None)
        })?;
        match lock(&self.sessions.owners).get_mut(id) {
            Some(owner)
                if owner.caller.has_same_rights(caller) && owner.agent.as_deref() == agent =>
            {
                owner.last_used = Instant::now();
                Ok(Some(owner.keep_alive.clone()))
            }
            // The error does not reveal that the session exists.
            _ => Err(unknown_session()),
        }
    }

    /// Returns the answer, or 404 if the session has ended by itself.
    pub(crate) fn replace_ended_session_error(
        &self,
        session: Option<&HeaderValue>,
        answer: HttpResponse,
    ) -> HttpResponse {
        let has_ended = |id: &HeaderValue| {
            id.to_str().is_ok_and(|id| !lock(&self.sessions.owners).contains_key(id))
        };
        match answer.status().is_server_error() && session.is_some_and(has_ended) {
            true => *unknown_session(),
            false => answer,
        }
    }

    /// Opens a session for a client of an earlier revision, if the limits permit.
    ///
    /// The task continues if the client disconnects, because a session without an owner would live
    /// on uncounted.
    pub(crate) async fn open_session(
        self: &Arc<Self>,
        running: &ActiveConfig,
        request: Request<Full<Bytes>>,
        caller: &Caller,
        agent: Option<&str>,
    ) -> Result<HttpResponse, Box<HttpResponse>> {
        let per_principal =
            (!running.authenticator.is_auth_disabled()).then_some(MAX_SESSIONS_PER_PRINCIPAL);
        if has_too_many_sessions(
            &lock(&self.sessions.owners),
            &caller.principal,
            MAX_SESSIONS,
            per_principal,
        ) {
            return Err(error_response(
                StatusCode::SERVICE_UNAVAILABLE,
                "too many sessions",
                Some(60),
            ));
        }
        let (http, caller, agent) = (Arc::clone(self), caller.clone(), agent.map(str::to_owned));
        let opened = tokio::spawn(async move {
            let answer = http.mcp.handle(request).await;
            http.register_owner(&answer, caller, agent).await;
            answer
        });
        opened.await.map_err(|_| {
            error_response(StatusCode::INTERNAL_SERVER_ERROR, "cannot open the session", None)
        })
    }

    async fn register_owner(&self, answer: &HttpResponse, caller: Caller, agent: Option<String>) {
        let Some(id) = answer.headers().get("mcp-session-id").and_then(|id| id.to_str().ok())
        else {
            return;
        };
        // A session that has already ended would be counted for a whole lifetime.
        let sessions = self.sessions.local.sessions.read().await;
        if sessions.contains_key(id) {
            lock(&self.sessions.owners).insert(id.into(), SessionOwner::new(caller, agent));
        }
    }

    /// Ends sessions that were idle for `life`, without running requests or listeners.
    pub(crate) async fn close_idle_sessions(&self, max_idle: Duration) {
        let mut idle = Vec::new();
        lock(&self.sessions.owners).retain(|id, owner| {
            let is_in_use = owner.keep_alive.is_shared();
            if is_in_use {
                owner.last_used = Instant::now();
            }
            let is_kept = is_in_use || owner.last_used.elapsed() < max_idle;
            if !is_kept {
                idle.push(id.clone());
            }
            is_kept
        });
        let ending =
            futures_util::future::join_all(idle.iter().map(|id| self.sessions.close_session(id)));
        drop(ending.await);
    }
}

fn unknown_session() -> Box<HttpResponse> {
    error_response(StatusCode::NOT_FOUND, "unknown session", None)
}

/// Returns whether a principal can open no more sessions, by the total or by its own limit.
fn has_too_many_sessions(
    owners: &HashMap<SessionId, SessionOwner>,
    principal: &str,
    total: usize,
    per_principal: Option<usize>,
) -> bool {
    // One principal must not use up the sessions of all others.
    let owned = || owners.values().filter(|owner| owner.caller.principal == principal).count();
    owners.len() >= total
        || per_principal.is_some_and(|limit| owners.len() >= limit && owned() >= limit)
}

/// Returns whether a request opens a session. The method decides, not the revision that it names.
pub(crate) fn is_session_start(headers: &HeaderMap, message: &Value) -> bool {
    !headers.contains_key("mcp-session-id")
        && message.get("method").is_some_and(|method| method == "initialize")
}

#[cfg(test)]
pub(crate) mod tests {
    use futures_util::FutureExt as _;
    use http::header::{CONTENT_TYPE, HOST, RETRY_AFTER};
    use serde_json::json;
    use toolgate_config::Config;

    use super::*;
    use crate::gateway::{Gateway, GatewayOptions};
    use crate::server::identity::PathSelector;

    pub(crate) fn test_caller(principal: &str) -> Caller {
        Caller {
            principal: principal.to_owned(),
            agents: None,
            session: None,
            auth_method: crate::server::identity::AuthMethod::Anonymous,
        }
    }

    /// Opens a gateway with one tool, which does not listen.
    pub(crate) async fn test_server() -> Arc<HttpServer> {
        Arc::new(test_server_with("").await)
    }

    /// Opens a gateway with one tool and additional configuration.
    pub(crate) async fn test_server_with(extra_config: &str) -> HttpServer {
        let options = GatewayOptions {
            store: Arc::new(toolgate::MemoryStore::default()),
            upstreams: crate::UpstreamOptions::default(),
            upstream_start_timeout: Duration::from_secs(5),
            launcher: None,
            built_in_rules: None,
            principal: "ann".to_owned(),
            own_paths: Vec::new(),
        };
        let text = format!("[tools.calc]\nkind = \"builtin\"\n{extra_config}");
        let config = move || Ok(Config::parse("toolgate.toml", &text));
        let gateway = Gateway::open(config, options).await.unwrap();
        let running = gateway.active_config();
        HttpServer::new(gateway, &running, "127.0.0.1:7070".parse().unwrap())
    }

    /// Builds a request of a client of an earlier revision.
    pub(crate) fn legacy_request(message: &Value) -> Request<Full<Bytes>> {
        let request = Request::post("/mcp")
            .header(HOST, "127.0.0.1")
            .header(http::header::ACCEPT, "application/json, text/event-stream")
            .header(CONTENT_TYPE, "application/json");
        let mut request = request.body(Full::new(Bytes::from(message.to_string()))).unwrap();
        request.extensions_mut().insert(test_caller("ann"));
        request
    }

    /// Builds a handshake request that names a newer revision.
    pub(crate) fn initialize_request() -> Request<Full<Bytes>> {
        let about = json!({"protocolVersion": crate::REVISION_2026_07_28, "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}});
        let mut request = legacy_request(
            &json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": about}),
        );
        request
            .headers_mut()
            .insert("mcp-protocol-version", HeaderValue::from_static(crate::REVISION_2026_07_28));
        request
    }

    /// Returns the headers of a request in the session that a response has opened.
    pub(crate) fn session_headers(opened: &HttpResponse) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert("mcp-session-id", opened.headers()["mcp-session-id"].clone());
        headers
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn session_counts_for_any_revision_and_after_disconnect() {
        let http = test_server().await;
        let (running, ann) = (http.gateway.active_config(), test_caller("ann"));
        // The client disconnects at once.
        drop(http.open_session(&running, initialize_request(), &ann, None).now_or_never());
        let counted = async {
            while lock(&http.sessions.owners).is_empty() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), counted)
            .await
            .expect("the session has no owner");
        assert_eq!(http.sessions.local.sessions.read().await.len(), 1);
        let (parts, _) = initialize_request().into_parts();
        assert!(is_session_start(&parts.headers, &json!({"method": "initialize"})));
        lock(&http.sessions.owners).extend(
            (0..MAX_SESSIONS).map(|n| (n.to_string().into(), SessionOwner::new(ann.clone(), None))),
        );
        let response = http.open_session(&running, initialize_request(), &ann, None).await.err();
        let rejection =
            response.map(|answer| (answer.status(), answer.headers().contains_key(RETRY_AFTER)));
        assert_eq!(rejection, Some((StatusCode::SERVICE_UNAVAILABLE, true)));
        // All sessions fit into two gigabytes, at 80 KB each.
        const { assert!(MAX_SESSIONS * 80_000 < 2 << 30) };
        http.gateway.shut_down().await;
    }

    #[test]
    fn sessions_are_limited_per_principal() {
        let owners: HashMap<SessionId, SessionOwner> = ["ann", "ann", "bob"]
            .iter()
            .enumerate()
            .map(|(n, principal)| {
                (n.to_string().into(), SessionOwner::new(test_caller(principal), None))
            })
            .collect();
        for (principal, total, per_principal, full) in [
            ("ann", 10, Some(2), true),
            ("ann", 10, None, false),
            ("bob", 10, Some(2), false),
            ("bob", 3, Some(2), true),
            ("ann", 10, Some(3), false),
        ] {
            assert_eq!(
                has_too_many_sessions(&owners, principal, total, per_principal),
                full,
                "{principal} {total} {per_principal:?}"
            );
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn ended_or_rejected_session_does_not_count() {
        let http = test_server().await;
        let (running, ann) = (http.gateway.active_config(), test_caller("ann"));
        let mut refused = initialize_request();
        refused
            .extensions_mut()
            .insert(PathSelector { agent: Some("unknown_agent".to_owned()), session: None });
        assert!(
            http.open_session(&running, refused, &ann, Some("unknown_agent")).await.is_ok(),
            "the stream contains the error"
        );
        assert!(lock(&http.sessions.owners).is_empty());
        assert!(http.sessions.local.sessions.read().await.is_empty());
        let opened =
            http.open_session(&running, initialize_request(), &ann, None).await.ok().unwrap();
        assert!(http.check_session(&session_headers(&opened), &ann, None).is_ok());
        // The session ends for any reason.
        let id = lock(&http.sessions.owners).keys().next().cloned().unwrap();
        http.sessions.close_session(&id).await.unwrap();
        assert!(lock(&http.sessions.owners).is_empty());
        assert!(http.check_session(&session_headers(&opened), &ann, None).is_err());
        http.gateway.shut_down().await;
    }
}
