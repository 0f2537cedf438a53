//! Sessions of older clients: whose they are, and how many there may be.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::Full;
use serde_json::Value;

use super::{Answer, Http, refusal};
use crate::gateway::{Running, lock};
use crate::identity::Caller;

/// Most sessions of older clients, and most of one principal where there are several. Each takes tens of kilobytes for as long as it lives.
const SESSIONS: usize = 20_000;
const OWN_SESSIONS: usize = 1_000;
/// How long a session of an older client lives without a word.
pub(super) const SESSION_LIFE: Duration = Duration::from_secs(30 * 60);

/// Who opened a session, as which agent, and when it was last heard of.
pub(super) type Owner = (Caller, Option<String>, Instant);

impl Http {
    /// The session of an older client belongs to the one who opened it, as the agent that it was opened for.
    pub(super) fn hold_session(&self, headers: &HeaderMap, caller: &Caller, agent: Option<&str>) -> Result<(), Box<Answer>> {
        let Some(id) = headers.get("mcp-session-id") else { return Ok(()) };
        let id = id.to_str().map_err(|_| refusal(StatusCode::BAD_REQUEST, "the session's name is no text", None))?;
        let mut owners = lock(&self.owners);
        match owners.get_mut(id) {
            Some((owner, of, last)) if owner.is_same(caller) && of.as_deref() == agent => {
                *last = Instant::now();
                Ok(())
            }
            // Whose it is, nobody else learns.
            _ => Err(refusal(StatusCode::NOT_FOUND, "there is no such session", None)),
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
        if is_full(&mut lock(&self.owners), &caller.principal, SESSIONS, bound, SESSION_LIFE) {
            return Err(refusal(StatusCode::SERVICE_UNAVAILABLE, "there are too many sessions", Some(60)));
        }
        let (http, caller, agent) = (Arc::clone(self), caller.clone(), agent.map(str::to_owned));
        let opened = tokio::spawn(async move {
            let answer = http.mcp.handle(request).await;
            http.own_session(&answer, caller, agent);
            answer
        });
        opened.await.map_err(|_| refusal(StatusCode::INTERNAL_SERVER_ERROR, "the session cannot be opened", None))
    }

    fn own_session(&self, answer: &Answer, caller: Caller, agent: Option<String>) {
        let Some(id) = answer.headers().get("mcp-session-id").and_then(|id| id.to_str().ok()) else { return };
        let mut owners = lock(&self.owners);
        if owners.len() % 1024 == 1023 {
            owners.retain(|_, (_, _, last)| last.elapsed() < SESSION_LIFE);
        }
        owners.insert(id.to_owned(), (caller, agent, Instant::now()));
    }
}

/// Whether there are too many sessions for one more of a principal: of all, or of its own. Those that have ended do not count.
fn is_full(owners: &mut HashMap<String, Owner>, principal: &str, most: usize, own: Option<usize>, life: Duration) -> bool {
    // Nobody takes the places of all others.
    let over = |owners: &HashMap<String, Owner>| {
        let owned = || owners.values().filter(|(owner, ..)| owner.principal == principal).count();
        owners.len() >= most || own.is_some_and(|own| owners.len() >= own && owned() >= own)
    };
    if !over(owners) {
        return false;
    }
    owners.retain(|_, (_, _, last)| last.elapsed() < life);
    over(owners)
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

    /// A greeting of an older client that calls itself a newer one.
    fn hello() -> Request<Full<Bytes>> {
        let about = json!({"protocolVersion": crate::MODERN, "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}});
        let body = json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": about});
        let request = Request::post("/mcp")
            .header(HOST, "127.0.0.1")
            .header(http::header::ACCEPT, "application/json, text/event-stream")
            .header(CONTENT_TYPE, "application/json")
            .header("mcp-protocol-version", crate::MODERN);
        let mut request = request.body(Full::new(Bytes::from(body.to_string()))).unwrap();
        request.extensions_mut().insert(caller("ann"));
        request
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_session_counts_whatever_it_calls_itself_and_whoever_waits_for_it() {
        let http = served().await;
        let (running, ann) = (http.gateway.running(), caller("ann"));
        // Its client hangs up at once.
        drop(http.open_session(&running, hello(), &ann, None).now_or_never());
        let counted = async {
            while lock(&http.owners).is_empty() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), counted).await.expect("it is nobody's");
        assert_eq!(http.sessions.local.sessions.read().await.len(), 1);
        let (parts, _) = hello().into_parts();
        assert!(opens_session(&parts.headers, &json!({"method": "initialize"})));
        lock(&http.owners).extend((0..SESSIONS).map(|n| (n.to_string(), (ann.clone(), None, Instant::now()))));
        let refused = http.open_session(&running, hello(), &ann, None).await.err();
        let told = refused.map(|answer| (answer.status(), answer.headers().contains_key(RETRY_AFTER)));
        assert_eq!(told, Some((StatusCode::SERVICE_UNAVAILABLE, true)));
        // All of them fit into two gigabytes, where one takes 80 KB.
        const { assert!(SESSIONS * 80_000 < 2 << 30) };
        http.gateway.end().await;
    }

    #[test]
    fn a_session_that_has_ended_takes_no_place() {
        let owners = || -> HashMap<String, Owner> {
            ["ann", "ann", "bob"].iter().enumerate().map(|(n, who)| (n.to_string(), (caller(who), None, Instant::now()))).collect()
        };
        let hour = Duration::from_secs(3_600);
        for (who, most, own, life, full) in [
            ("ann", 10, Some(2), hour, true),
            ("ann", 10, Some(2), Duration::ZERO, false),
            ("ann", 10, None, hour, false),
            ("bob", 10, Some(2), hour, false),
            ("bob", 3, Some(2), hour, true),
            ("bob", 3, Some(2), Duration::ZERO, false),
        ] {
            assert_eq!(is_full(&mut owners(), who, most, own, life), full, "{who} {most} {own:?} {life:?}");
        }
    }
}
