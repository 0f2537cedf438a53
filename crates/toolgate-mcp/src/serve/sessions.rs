//! Sessions of older clients: whose they are, and how many there may be.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, StatusCode};
use http_body_util::Full;
use rmcp::transport::streamable_http_server::session::{SessionId, SessionManager as _};
use serde_json::Value;

use super::{Answer, Http, refusal};
use crate::gateway::{Running, lock};
use crate::identity::Caller;
use crate::seat::Hold;

/// Most sessions of older clients, and most of one principal where there are several. Each takes tens of kilobytes for as long as it lives.
const SESSIONS: usize = 20_000;
const OWN_SESSIONS: usize = 1_000;
/// How long a session of an older client lives without a word.
pub(super) const SESSION_LIFE: Duration = Duration::from_secs(30 * 60);

/// Who opened a session, as which agent, and when it was last heard of or held.
pub(super) struct Owner {
    caller: Caller,
    agent: Option<String>,
    last: Instant,
    hold: Hold,
}

impl Owner {
    fn new(caller: Caller, agent: Option<String>) -> Self {
        Self { caller, agent, last: Instant::now(), hold: Hold::default() }
    }
}

impl Http {
    /// The session of an older client belongs to the one who opened it, as the agent that it was opened for. It does not end by its age
    /// while what is given back is kept.
    pub(super) fn hold_session(&self, headers: &HeaderMap, caller: &Caller, agent: Option<&str>) -> Result<Option<Hold>, Box<Answer>> {
        let Some(id) = headers.get("mcp-session-id") else { return Ok(None) };
        let id = id.to_str().map_err(|_| refusal(StatusCode::BAD_REQUEST, "the session's name is no text", None))?;
        match lock(&self.sessions.owners).get_mut(id) {
            Some(owner) if owner.caller.is_same(caller) && owner.agent.as_deref() == agent => {
                owner.last = Instant::now();
                Ok(Some(owner.hold.clone()))
            }
            // Whose it is, nobody else learns.
            _ => Err(unknown()),
        }
    }

    /// What is answered in a session. One that has ended by itself is told of as one that never was.
    pub(super) fn said_in(&self, session: Option<&HeaderValue>, answer: Answer) -> Answer {
        let gone = |id: &HeaderValue| id.to_str().is_ok_and(|id| !lock(&self.sessions.owners).contains_key(id));
        match answer.status().is_server_error() && session.is_some_and(gone) {
            true => *unknown(),
            false => answer,
        }
    }

    /// Opens a session for an older client, where there is room for one more. It goes on whoever waits for it: one that nobody owns would
    /// live on and not be counted.
    pub(super) async fn open_session(
        self: &Arc<Self>,
        running: &Running,
        request: Request<Full<Bytes>>,
        caller: &Caller,
        agent: Option<&str>,
    ) -> Result<Answer, Box<Answer>> {
        let bound = (!running.keys.is_open()).then_some(OWN_SESSIONS);
        if is_full(&lock(&self.sessions.owners), &caller.principal, SESSIONS, bound) {
            return Err(refusal(StatusCode::SERVICE_UNAVAILABLE, "there are too many sessions", Some(60)));
        }
        let (http, caller, agent) = (Arc::clone(self), caller.clone(), agent.map(str::to_owned));
        let opened = tokio::spawn(async move {
            let answer = http.mcp.handle(request).await;
            http.own_session(&answer, caller, agent).await;
            answer
        });
        opened.await.map_err(|_| refusal(StatusCode::INTERNAL_SERVER_ERROR, "the session cannot be opened", None))
    }

    async fn own_session(&self, answer: &Answer, caller: Caller, agent: Option<String>) {
        let Some(id) = answer.headers().get("mcp-session-id").and_then(|id| id.to_str().ok()) else { return };
        // One that has ended by now would be counted for as long as it might have lived.
        let sessions = self.sessions.local.sessions.read().await;
        if sessions.contains_key(id) {
            lock(&self.sessions.owners).insert(id.into(), Owner::new(caller, agent));
        }
    }

    /// Ends sessions in which nothing was said for so long, where nothing is under way and nobody listens.
    pub(super) async fn end_idle(&self, life: Duration) {
        let mut idle = Vec::new();
        lock(&self.sessions.owners).retain(|id, owner| {
            let held = owner.hold.is_shared();
            if held {
                owner.last = Instant::now();
            }
            let stays = held || owner.last.elapsed() < life;
            if !stays {
                idle.push(id.clone());
            }
            stays
        });
        let ending = futures_util::future::join_all(idle.iter().map(|id| self.sessions.close_session(id)));
        drop(ending.await);
    }
}

fn unknown() -> Box<Answer> {
    refusal(StatusCode::NOT_FOUND, "there is no such session", None)
}

/// Whether there are too many sessions for one more of a principal: of all, or of its own.
fn is_full(owners: &HashMap<SessionId, Owner>, principal: &str, most: usize, own: Option<usize>) -> bool {
    // Nobody takes the places of all others.
    let owned = || owners.values().filter(|owner| owner.caller.principal == principal).count();
    owners.len() >= most || own.is_some_and(|own| owners.len() >= own && owned() >= own)
}

/// Whether a request opens a session: by what it asks for, whatever revision it calls itself.
pub(super) fn opens_session(headers: &HeaderMap, message: &Value) -> bool {
    !headers.contains_key("mcp-session-id") && message.get("method").is_some_and(|method| method == "initialize")
}

#[cfg(test)]
pub(super) mod tests {
    use futures_util::FutureExt as _;
    use http::header::{CONTENT_TYPE, HOST, RETRY_AFTER};
    use serde_json::json;
    use toolgate::config::Config;

    use super::*;
    use crate::gateway::{Gateway, Options};
    use crate::identity::Asked;

    pub(in crate::serve) fn caller(who: &str) -> Caller {
        Caller { principal: who.to_owned(), agents: None, session: None, proof: crate::identity::Proof::Nothing }
    }

    /// A gateway with one tool, as nobody reaches it.
    pub(in crate::serve) async fn served() -> Arc<Http> {
        Arc::new(served_by("").await)
    }

    /// The same, with more in its configuration.
    pub(in crate::serve) async fn served_by(more: &str) -> Http {
        let options = Options {
            store: Arc::new(toolgate::MemoryStore::default()),
            upstreams: crate::Starting::default(),
            patience: Duration::from_secs(5),
            launcher: None,
            built_in: None,
            principal: "ann".to_owned(),
            own: Vec::new(),
        };
        let text = format!("[tools.calc]\nkind = \"builtin\"\n{more}");
        let config = move || Ok(Config::parse("toolgate.toml", &text));
        let gateway = Gateway::open(config, options).await.unwrap();
        let running = gateway.running();
        Http::new(gateway, &running, "127.0.0.1:7070".parse().unwrap())
    }

    /// What an older client says.
    pub(in crate::serve) fn post(message: &Value) -> Request<Full<Bytes>> {
        let request = Request::post("/mcp")
            .header(HOST, "127.0.0.1")
            .header(http::header::ACCEPT, "application/json, text/event-stream")
            .header(CONTENT_TYPE, "application/json");
        let mut request = request.body(Full::new(Bytes::from(message.to_string()))).unwrap();
        request.extensions_mut().insert(caller("ann"));
        request
    }

    /// A greeting of an older client that calls itself a newer one.
    pub(in crate::serve) fn hello() -> Request<Full<Bytes>> {
        let about = json!({"protocolVersion": crate::MODERN, "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}});
        let mut request = post(&json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": about}));
        request.headers_mut().insert("mcp-protocol-version", HeaderValue::from_static(crate::MODERN));
        request
    }

    /// The head of a request in the session that an answer has opened.
    pub(in crate::serve) fn named(opened: &Answer) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert("mcp-session-id", opened.headers()["mcp-session-id"].clone());
        headers
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_session_counts_whatever_it_calls_itself_and_whoever_waits_for_it() {
        let http = served().await;
        let (running, ann) = (http.gateway.running(), caller("ann"));
        // Its client hangs up at once.
        drop(http.open_session(&running, hello(), &ann, None).now_or_never());
        let counted = async {
            while lock(&http.sessions.owners).is_empty() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), counted).await.expect("it is nobody's");
        assert_eq!(http.sessions.local.sessions.read().await.len(), 1);
        let (parts, _) = hello().into_parts();
        assert!(opens_session(&parts.headers, &json!({"method": "initialize"})));
        lock(&http.sessions.owners).extend((0..SESSIONS).map(|n| (n.to_string().into(), Owner::new(ann.clone(), None))));
        let refused = http.open_session(&running, hello(), &ann, None).await.err();
        let told = refused.map(|answer| (answer.status(), answer.headers().contains_key(RETRY_AFTER)));
        assert_eq!(told, Some((StatusCode::SERVICE_UNAVAILABLE, true)));
        // All of them fit into two gigabytes, where one takes 80 KB.
        const { assert!(SESSIONS * 80_000 < 2 << 30) };
        http.gateway.end().await;
    }

    #[test]
    fn who_has_as_many_sessions_as_one_may_have_leaves_the_others_to_others() {
        let owners: HashMap<SessionId, Owner> =
            ["ann", "ann", "bob"].iter().enumerate().map(|(n, who)| (n.to_string().into(), Owner::new(caller(who), None))).collect();
        for (who, most, own, full) in [
            ("ann", 10, Some(2), true),
            ("ann", 10, None, false),
            ("bob", 10, Some(2), false),
            ("bob", 3, Some(2), true),
            ("ann", 10, Some(3), false),
        ] {
            assert_eq!(is_full(&owners, who, most, own), full, "{who} {most} {own:?}");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_session_that_has_ended_or_was_refused_takes_no_place() {
        let http = served().await;
        let (running, ann) = (http.gateway.running(), caller("ann"));
        let mut refused = hello();
        refused.extensions_mut().insert(Asked { agent: Some("nobody".to_owned()), session: None });
        assert!(http.open_session(&running, refused, &ann, Some("nobody")).await.is_ok(), "it is told so in the stream");
        assert!(lock(&http.sessions.owners).is_empty());
        assert!(http.sessions.local.sessions.read().await.is_empty());
        let opened = http.open_session(&running, hello(), &ann, None).await.ok().unwrap();
        assert!(http.hold_session(&named(&opened), &ann, None).is_ok());
        // Whatever ends it.
        let id = lock(&http.sessions.owners).keys().next().cloned().unwrap();
        http.sessions.close_session(&id).await.unwrap();
        assert!(lock(&http.sessions.owners).is_empty());
        assert!(http.hold_session(&named(&opened), &ann, None).is_err());
        http.gateway.end().await;
    }
}
