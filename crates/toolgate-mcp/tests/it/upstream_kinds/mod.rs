//! Kinds of upstreams, and of what they have: long lists, lists that change, prompts and resources.

mod legacy_sse;
mod openapi;

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rmcp::model::*;
use rmcp::service::{
    NotificationContext, Peer, RequestContext, SubscriptionContext, SubscriptionSink,
};
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use rmcp::{ErrorData, RoleServer, ServerHandler};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use toolgate_mcp::{UpstreamOptions, UpstreamStatus, Upstreams};

use crate::legacy_upstreams::{
    http_response, initialize_result, json_rpc_result, read_request, serve_connections,
};
use crate::support::{McpTestClient, TestGateway, start_mcp_server, wait_until};
use crate::tls_and_authentication::{
    ACCEPT_JSON_OR_EVENTS, LegacyHttpClient, MessageInbox, http_client,
};

type ServerRequestContext = RequestContext<RoleServer>;
type PageParams = Option<PaginatedRequestParams>;

/// A server that has so many of everything, and says so seventy at a time.
struct PagedServer {
    label: &'static str,
    modern: bool,
    entry_count: AtomicUsize,
    /// This list has no end.
    endless_list: &'static str,
    /// It says that it tells of its resources, and does not.
    rejects_subscriptions: bool,
    /// How often something of it was wanted.
    request_count: AtomicUsize,
    peers: Mutex<Vec<Peer<RoleServer>>>,
    sinks: Mutex<Vec<SubscriptionSink>>,
}

impl PagedServer {
    fn new(word: &'static str, many: usize) -> Self {
        let (many, wanted) = (AtomicUsize::new(many), AtomicUsize::new(0));
        Self {
            label: word,
            modern: true,
            entry_count: many,
            endless_list: "",
            rejects_subscriptions: false,
            request_count: wanted,
            peers: Mutex::default(),
            sinks: Mutex::default(),
        }
    }

    /// Serves it, as an upstream of this configuration.
    async fn start(self, more: &str) -> (Arc<Self>, String) {
        let shelf = Arc::new(self);
        let each = Arc::clone(&shelf);
        let sessions = Arc::new(LocalSessionManager::default());
        let service = StreamableHttpService::new(
            move || Ok(Arc::clone(&each)),
            sessions,
            StreamableHttpServerConfig::default(),
        );
        let url = start_mcp_server(service).await;
        let config = format!(
            "[upstreams.{}]\nurl = \"{url}\"\nundeclared = \"read\"\n{more}\n",
            shelf.label
        );
        (shelf, config)
    }

    /// A part of a list, and where it goes on.
    async fn page<T>(
        &self,
        list: &str,
        asked: PageParams,
        one: impl Fn(usize) -> T,
    ) -> (Vec<T>, Option<String>) {
        let begin: usize =
            asked.and_then(|asked| asked.cursor).map_or(0, |cursor| cursor.parse().unwrap());
        if self.endless_list == list {
            tokio::time::sleep(Duration::from_millis(20)).await;
            return (vec![one(begin)], Some((begin + 1).to_string()));
        }
        let many = self.entry_count.load(Ordering::SeqCst);
        let end = many.min(begin + 70);
        ((begin..end).map(one).collect(), (end < many).then(|| end.to_string()))
    }

    /// Says that its tools have changed.
    async fn notify_list_changed(&self) {
        let (peers, sinks) =
            (self.peers.lock().unwrap().clone(), self.sinks.lock().unwrap().clone());
        for peer in peers {
            let _ = peer.notify_tool_list_changed().await;
        }
        for sink in sinks {
            let _ = sink.notify_tool_list_changed().await;
        }
    }
}

impl ServerHandler for PagedServer {
    fn get_info(&self) -> ServerConfig {
        let capabilities = ServerCapabilities::builder()
            .enable_prompts()
            .enable_resources()
            .enable_tools()
            .enable_tool_list_changed();
        let mut capabilities = capabilities.build();
        if let Some(resources) =
            capabilities.resources.as_mut().filter(|_| self.rejects_subscriptions)
        {
            resources.subscribe = Some(true);
        }
        ServerConfig::new(capabilities)
    }

    fn supported_protocol_versions(&self) -> Cow<'static, [ProtocolVersion]> {
        let newest =
            if self.modern { ProtocolVersion::V_2026_07_28 } else { ProtocolVersion::V_2025_06_18 };
        Cow::Borrowed(ProtocolVersion::known_up_to(&newest))
    }

    async fn discover(&self, _: ServerRequestContext) -> Result<DiscoverResult, ErrorData> {
        if !self.modern {
            return Err(ErrorData::method_not_found::<DiscoverRequestMethod>());
        }
        Ok(DiscoverResult::from_server_info(
            self.supported_protocol_versions().into_owned(),
            self.get_info(),
        ))
    }

    async fn on_initialized(&self, context: NotificationContext<RoleServer>) {
        self.peers.lock().unwrap().push(context.peer);
    }

    fn accepted_subscription_filter(
        &self,
        requested: &SubscriptionFilter,
    ) -> Option<SubscriptionFilter> {
        if self.rejects_subscriptions && requested.resource_subscriptions.is_some() {
            self.request_count.fetch_add(1, Ordering::SeqCst);
            return None;
        }
        Some(requested.clone())
    }

    async fn listen(&self, context: SubscriptionContext) -> Result<(), ErrorData> {
        self.sinks.lock().unwrap().push(context.sink().clone());
        context.cancelled().await;
        Ok(())
    }

    async fn list_tools(
        &self,
        asked: PageParams,
        _: ServerRequestContext,
    ) -> Result<ListToolsResult, ErrorData> {
        let tool = |n: usize| {
            Tool::new(
                format!("t{n:03}"),
                "Does.",
                object(json!({"type": "object", "properties": {}})),
            )
        };
        let (tools, next) = self.page("tools", asked, tool).await;
        Ok(ListToolsResult { next_cursor: next, ..ListToolsResult::with_all_items(tools) })
    }

    async fn call_tool(
        &self,
        _: CallToolRequestParams,
        _: ServerRequestContext,
    ) -> Result<CallToolResponse, ErrorData> {
        Ok(CallToolResult::success(vec![ContentBlock::text(self.label)]).into())
    }

    async fn list_prompts(
        &self,
        asked: PageParams,
        _: ServerRequestContext,
    ) -> Result<ListPromptsResult, ErrorData> {
        let (prompts, next) = self
            .page("prompts", asked, |n| Prompt::new(format!("p{n:03}"), Some("Asks."), None))
            .await;
        Ok(ListPromptsResult { next_cursor: next, ..ListPromptsResult::with_all_items(prompts) })
    }

    async fn get_prompt(
        &self,
        _: GetPromptRequestParams,
        _: ServerRequestContext,
    ) -> Result<GetPromptResponse, ErrorData> {
        self.request_count.fetch_add(1, Ordering::SeqCst);
        Ok(GetPromptResult::new(vec![PromptMessage::new_text(Role::User, self.label)]).into())
    }

    async fn list_resources(
        &self,
        asked: PageParams,
        _: ServerRequestContext,
    ) -> Result<ListResourcesResult, ErrorData> {
        let (resources, next) = self
            .page("resources", asked, |n| Resource::new(format!("{}://{n}", self.label), "r"))
            .await;
        Ok(ListResourcesResult {
            next_cursor: next,
            ..ListResourcesResult::with_all_items(resources)
        })
    }

    async fn read_resource(
        &self,
        asked: ReadResourceRequestParams,
        _: ServerRequestContext,
    ) -> Result<ReadResourceResponse, ErrorData> {
        self.request_count.fetch_add(1, Ordering::SeqCst);
        if !asked.uri.starts_with(&format!("{}://", self.label)) {
            return Err(ErrorData::resource_not_found("not here", None));
        }
        let result = ReadResourceResult::new(vec![ResourceContents::text(self.label, asked.uri)]);
        Ok(result.with_ttl_ms(60_000).with_cache_scope(CacheScope::Public).into())
    }
}

/// A list, page by page.
async fn fetch_pages(client: &McpTestClient, list: &str) -> Vec<Vec<String>> {
    let (mut pages, mut params) = (Vec::new(), json!({}));
    loop {
        let (_, answer) = client.call_method(&format!("{list}/list"), params).await;
        let entries = answer["result"][list].as_array().unwrap_or_else(|| panic!("{answer}"));
        pages.push(
            entries
                .iter()
                .map(|one| one.get("uri").unwrap_or(&one["name"]).as_str().unwrap().to_owned())
                .collect(),
        );
        let Some(next) = answer["result"]["nextCursor"].as_str() else { return pages };
        assert!(pages.len() < 10, "{list} has no end");
        params = json!({"cursor": next});
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn long_lists_are_read_and_served_in_pages() {
    let (_shelf, config) = PagedServer::new("s", 401).start("prefix = \"\"").await;
    let gate = TestGateway::open(&config).await;
    let client = gate.client();
    for (list, first, last) in
        [("tools", "t000", "t400"), ("prompts", "p000", "p400"), ("resources", "s://0", "s://400")]
    {
        let there = async || {
            client.call_method(&format!("{list}/list"), json!({})).await.1["result"]["nextCursor"]
                .is_string()
        };
        wait_until(&format!("there are {list}"), there).await;
        let pages = fetch_pages(&client, list).await;
        assert_eq!(pages.iter().map(Vec::len).collect::<Vec<_>>(), [200, 200, 1], "{list}");
        let all: BTreeSet<String> = pages.concat().into_iter().collect();
        assert!(all.len() == 401 && all.contains(first) && all.contains(last), "{all:?}");
        for cursor in ["", "-1", "402", "1e2", "next", "99999999999999999999"] {
            let (_, answer) =
                client.call_method(&format!("{list}/list"), json!({"cursor": cursor})).await;
            assert_eq!(answer["error"]["code"], -32602, "{list} {cursor:?}: {answer:.200}");
        }
    }
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn endless_list_does_not_block_other_upstreams() {
    let (_a, tools) =
        PagedServer { endless_list: "tools", ..PagedServer::new("a", 1) }.start("").await;
    let (_b, prompts) =
        PagedServer { endless_list: "prompts", ..PagedServer::new("b", 1) }.start("").await;
    let gate = TestGateway::open_with_short_timeout(&format!(
        "{tools}{prompts}[tools.calc]\nkind = \"builtin\"\n"
    ))
    .await;
    let client = gate.client();
    assert_eq!(client.call_code("calc", json!({"expression": "1"})).await, "ok");
    // Whose prompts have no end has tools all the same.
    wait_until("it is there", async || client.tool_names().await.contains(&"b_t000".to_owned()))
        .await;
    assert_eq!(client.call_code("b_t000", json!({})).await, "ok");
    assert!(fetch_pages(&client, "prompts").await.concat().len() < 1_000);
    // Whose tools have no end has said nothing that counts.
    assert!(client.tool_names().await.iter().all(|tool| !tool.starts_with("a_")));
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ever_changing_tool_list_uses_bounded_memory() {
    let turn = Arc::new(AtomicUsize::new(0));
    let now = Arc::clone(&turn);
    let address = serve_connections(move |mut stream| {
        let turn = now.load(Ordering::SeqCst);
        async move {
            let Some((head, request)) = read_request(&mut stream).await else { return };
            let tool = |n: usize| json!({"name": format!("t{turn}-{n}"), "inputSchema": {"type": "object"}});
            let response = match request["method"].as_str().unwrap_or_default() {
                "server/discover" => http_response("404 No", "text/html", "<p>"),
                "" if head.starts_with("get ") => http_response("405 No", "text/plain", ""),
                "initialize" => json_rpc_result(&request, initialize_result()),
                "ping" => json_rpc_result(&request, json!({})),
                "tools/list" => json_rpc_result(&request, json!({"tools": (0..9_000).map(tool).collect::<Vec<_>>()})),
                _ => http_response("202 Accepted", "text/plain", ""),
            };
            let _ = stream.write_all(response.as_bytes()).await;
        }
    })
    .await;
    let home = tempfile::tempdir().unwrap();
    let config = toolgate_config::Config::parse(
        "toolgate.toml",
        &format!("[upstreams.many]\nurl = \"http://{address}/mcp\"\n"),
    );
    let starting = UpstreamOptions { pin_dir: Some(home.path().to_owned()), launcher: None };
    for (many, there) in [(9_000, true), (18_000, true), (18_000, false)] {
        turn.fetch_add(1, Ordering::SeqCst);
        let upstreams =
            Upstreams::start(&config, &starting, Duration::from_secs(60)).await.unwrap();
        let health = upstreams.health().remove(0);
        assert_eq!(
            (health.tools, matches!(health.status, UpstreamStatus::Up { .. })),
            (many, there),
            "{:?}",
            health.status
        );
        upstreams.stop_all().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_are_notified_of_changed_tool_list() {
    for modern in [false, true] {
        let (shelf, config) =
            PagedServer { modern, ..PagedServer::new("s", 2) }.start("prefix = \"\"").await;
        let gate = TestGateway::open(&config).await;
        let client = gate.client();
        wait_until("two are offered", async || client.tool_names().await == ["t000", "t001"]).await;
        let mut older = LegacyHttpClient::connect(&http_client(), &gate.url, json!({})).await;
        let mut newer = MessageInbox::new();
        let meta = json!({"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {},
            "io.modelcontextprotocol/clientInfo": {"name": "t", "version": "1"}});
        let listen = json!({"jsonrpc": "2.0", "id": 1, "method": "subscriptions/listen",
            "params": {"_meta": meta, "notifications": {"toolsListChanged": true}}});
        let request = http_client()
            .post(&client.url)
            .header("accept", ACCEPT_JSON_OR_EVENTS)
            .header("mcp-protocol-version", "2026-07-28");
        newer.send(request.header("mcp-method", "subscriptions/listen").json(&listen));
        newer
            .wait_for(|message| message["method"] == "notifications/subscriptions/acknowledged")
            .await;
        shelf.entry_count.store(3, Ordering::SeqCst);
        // Said again and again: nobody may be listening yet.
        wait_until("it is offered", async || {
            shelf.notify_list_changed().await;
            client.tool_names().await.len() == 3
        })
        .await;
        let changed = |said: &Value| said["method"] == "notifications/tools/list_changed";
        older.inbox.wait_for(changed).await;
        newer.wait_for(changed).await;
        let listed = older.call_method("tools/list", json!({})).await;
        assert_eq!(listed["result"]["tools"].as_array().map(Vec::len), Some(3), "{listed}");
        drop((older, newer));
        gate.shut_down().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rejected_subscription_does_not_stop_list_notifications() {
    let (shelf, config) = PagedServer { rejects_subscriptions: true, ..PagedServer::new("s", 2) }
        .start("prefix = \"\"")
        .await;
    let gate = TestGateway::open(&config).await;
    let client = gate.client();
    wait_until("two are offered", async || client.tool_names().await == ["t000", "t001"]).await;
    let mut newer = MessageInbox::new();
    let meta = json!({"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {},
        "io.modelcontextprotocol/clientInfo": {"name": "t", "version": "1"}});
    let listen = json!({"jsonrpc": "2.0", "id": 1, "method": "subscriptions/listen",
        "params": {"_meta": meta, "notifications": {"resourceSubscriptions": ["s://0"]}}});
    let request = http_client()
        .post(&client.url)
        .header("accept", ACCEPT_JSON_OR_EVENTS)
        .header("mcp-protocol-version", "2026-07-28");
    newer.send(request.header("mcp-method", "subscriptions/listen").json(&listen));
    newer.wait_for(|message| message["method"] == "notifications/subscriptions/acknowledged").await;
    wait_until("it is asked to tell of that one, and does not want to", async || {
        shelf.request_count.load(Ordering::SeqCst) > 0
    })
    .await;
    shelf.entry_count.store(3, Ordering::SeqCst);
    let seen = wait_until("it is offered", async || {
        shelf.notify_list_changed().await;
        client.tool_names().await.len() == 3
    });
    // Sooner than its lists are looked at without a word of it.
    tokio::time::timeout(Duration::from_secs(20), seen).await.unwrap();
    drop(newer);
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn agent_sees_only_prompts_and_resources_of_its_upstreams() {
    let ((_, a), (shelf, b)) =
        (PagedServer::new("a", 2).start("").await, PagedServer::new("b", 2).start("").await);
    let gate = TestGateway::open(&format!(
        "{a}{b}[agents.ann]\nupstreams = \"a\"\n[agents.ben]\nupstreams = \"b\"\n[agents.both]\nupstreams = [\"a\", \"b\"]\n"
    ))
    .await;
    let client = gate.client();
    let at = |agent: &str| {
        let mut client = client.clone();
        client.url = format!("{}/mcp/{agent}", gate.url);
        client
    };
    let prompt = async |agent: &str, name: &str| {
        at(agent).call_method("prompts/get", json!({"name": name})).await.1
    };
    let read = async |agent: &str, uri: &str| {
        at(agent).call_method("resources/read", json!({"uri": uri})).await.1
    };
    for (agent, words) in [("ann", vec!["a"]), ("ben", vec!["b"]), ("both", vec!["a", "b"])] {
        let of = |one: fn(&str, usize) -> String| {
            words.iter().flat_map(|word| [one(word, 0), one(word, 1)]).collect::<Vec<_>>()
        };
        assert_eq!(
            fetch_pages(&at(agent), "prompts").await.concat(),
            of(|word, n| format!("{word}_p00{n}"))
        );
        assert_eq!(
            fetch_pages(&at(agent), "resources").await.concat(),
            of(|word, n| format!("toolgate://{word}/{word}://{n}"))
        );
        for word in &words {
            assert_eq!(
                prompt(agent, &format!("{word}_p000")).await["result"]["messages"][0]["content"]["text"],
                *word
            );
            let said =
                read(agent, &format!("toolgate://{word}/{word}://0")).await["result"].clone();
            // Nobody keeps it for others, who may be somebody else's.
            assert_eq!(
                (&said["contents"][0]["text"], &said["ttlMs"], &said["cacheScope"]),
                (&json!(word), &json!(60_000), &json!("private"))
            );
        }
    }
    // What is somebody else's is told from what is nowhere by nobody.
    let before = shelf.request_count.load(Ordering::SeqCst);
    let (theirs, nowhere) = (prompt("ann", "b_p000").await, prompt("ann", "c_p000").await);
    assert_eq!(theirs["error"]["code"], -32602, "{theirs}");
    assert_eq!(theirs.to_string(), nowhere.to_string().replace("c_p000", "b_p000"));
    let (theirs, nowhere) =
        (read("ann", "toolgate://b/b://0").await, read("ann", "toolgate://c/b://0").await);
    assert!(theirs["error"].is_object(), "{theirs}");
    assert_eq!(theirs.to_string(), nowhere.to_string().replace("toolgate://c/", "toolgate://b/"));
    assert!(read("ann", "b://0").await["error"].is_object());
    for named in [
        json!({"type": "ref/prompt", "name": "b_p000"}),
        json!({"type": "ref/resource", "uri": "toolgate://b/b://0"}),
    ] {
        let asked = json!({"ref": named, "argument": {"name": "x", "value": ""}});
        assert!(
            at("ann").call_method("completion/complete", asked).await.1["error"].is_object(),
            "{named}"
        );
    }
    assert_eq!(shelf.request_count.load(Ordering::SeqCst), before);
    gate.shut_down().await;
}
