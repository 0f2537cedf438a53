//! Tests upstreams with long or changing lists, prompts and resources.

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

use crate::legacy_http_client::{LegacyHttpClient, MessageInbox};
use crate::legacy_upstreams::{
    http_response, initialize_result, json_rpc_result, read_request, serve_connections,
};
use crate::support::{
    ACCEPT_JSON_OR_EVENTS, McpTestClient, TestGateway, http_client, start_mcp_server, wait_until,
};

type ServerRequestContext = RequestContext<RoleServer>;
type PageParams = Option<PaginatedRequestParams>;

/// A server with many list entries, in pages of 70.
struct PagedServer {
    label: &'static str,
    modern: bool,
    entry_count: AtomicUsize,
    /// The name of the list that never ends.
    endless_list: &'static str,
    /// Whether the server announces subscriptions but rejects them.
    rejects_subscriptions: bool,
    /// The number of requests for prompts, resources and subscriptions.
    request_count: AtomicUsize,
    peers: Mutex<Vec<Peer<RoleServer>>>,
    sinks: Mutex<Vec<SubscriptionSink>>,
}

impl PagedServer {
    fn new(label: &'static str, entry_count: usize) -> Self {
        Self {
            label,
            modern: true,
            entry_count: AtomicUsize::new(entry_count),
            endless_list: "",
            rejects_subscriptions: false,
            request_count: AtomicUsize::new(0),
            peers: Mutex::default(),
            sinks: Mutex::default(),
        }
    }

    /// Starts the server. Returns the server and its configuration.
    async fn start(self, extra: &str) -> (Arc<Self>, String) {
        let server = Arc::new(self);
        let shared = Arc::clone(&server);
        let sessions = Arc::new(LocalSessionManager::default());
        let service = StreamableHttpService::new(
            move || Ok(Arc::clone(&shared)),
            sessions,
            StreamableHttpServerConfig::default(),
        );
        let url = start_mcp_server(service).await;
        let config = format!(
            "[upstreams.{}]\nurl = \"{url}\"\nundeclared = \"read\"\n{extra}\n",
            server.label
        );
        (server, config)
    }

    /// Returns a page of a list and the next cursor.
    async fn page<T>(
        &self,
        list: &str,
        params: PageParams,
        entry: impl Fn(usize) -> T,
    ) -> (Vec<T>, Option<String>) {
        let start: usize =
            params.and_then(|params| params.cursor).map_or(0, |cursor| cursor.parse().unwrap());
        if self.endless_list == list {
            tokio::time::sleep(Duration::from_millis(20)).await;
            return (vec![entry(start)], Some((start + 1).to_string()));
        }
        let entry_count = self.entry_count.load(Ordering::SeqCst);
        let end = entry_count.min(start + 70);
        ((start..end).map(entry).collect(), (end < entry_count).then(|| end.to_string()))
    }

    /// Notifies all clients that the tools changed.
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
        params: PageParams,
        _: ServerRequestContext,
    ) -> Result<ListToolsResult, ErrorData> {
        let tool = |n: usize| {
            Tool::new(
                format!("t{n:03}"),
                "Does.",
                object(json!({"type": "object", "properties": {}})),
            )
        };
        let (tools, next) = self.page("tools", params, tool).await;
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
        params: PageParams,
        _: ServerRequestContext,
    ) -> Result<ListPromptsResult, ErrorData> {
        let (prompts, next) = self
            .page("prompts", params, |n| Prompt::new(format!("p{n:03}"), Some("Asks."), None))
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
        params: PageParams,
        _: ServerRequestContext,
    ) -> Result<ListResourcesResult, ErrorData> {
        let (resources, next) = self
            .page("resources", params, |n| Resource::new(format!("{}://{n}", self.label), "r"))
            .await;
        Ok(ListResourcesResult {
            next_cursor: next,
            ..ListResourcesResult::with_all_items(resources)
        })
    }

    async fn read_resource(
        &self,
        params: ReadResourceRequestParams,
        _: ServerRequestContext,
    ) -> Result<ReadResourceResponse, ErrorData> {
        self.request_count.fetch_add(1, Ordering::SeqCst);
        if !params.uri.starts_with(&format!("{}://", self.label)) {
            return Err(ErrorData::resource_not_found("not here", None));
        }
        let result = ReadResourceResult::new(vec![ResourceContents::text(self.label, params.uri)]);
        Ok(result.with_ttl_ms(60_000).with_cache_scope(CacheScope::Public).into())
    }
}

/// Returns the pages of a list.
async fn fetch_pages(client: &McpTestClient, list: &str) -> Vec<Vec<String>> {
    let (mut pages, mut params) = (Vec::new(), json!({}));
    loop {
        let (_, answer) = client.call_method(&format!("{list}/list"), params).await;
        let entries = answer["result"][list].as_array().unwrap_or_else(|| panic!("{answer}"));
        pages.push(
            entries
                .iter()
                .map(|entry| {
                    entry.get("uri").unwrap_or(&entry["name"]).as_str().unwrap().to_owned()
                })
                .collect(),
        );
        let Some(next) = answer["result"]["nextCursor"].as_str() else { return pages };
        assert!(pages.len() < 10, "{list} has no end");
        params = json!({"cursor": next});
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn long_lists_are_read_and_served_in_pages() {
    let (_server, config) = PagedServer::new("s", 401).start("prefix = \"\"").await;
    let gate = TestGateway::open(&config).await;
    let client = gate.client();
    for (list, first, last) in
        [("tools", "t000", "t400"), ("prompts", "p000", "p400"), ("resources", "s://0", "s://400")]
    {
        let has_pages = async || {
            client.call_method(&format!("{list}/list"), json!({})).await.1["result"]["nextCursor"]
                .is_string()
        };
        wait_until(&format!("{list} are listed"), has_pages).await;
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
    // An upstream with an endless prompt list still has tools.
    wait_until("the upstream is up", async || {
        client.tool_names().await.contains(&"b_t000".to_owned())
    })
    .await;
    assert_eq!(client.call_code("b_t000", json!({})).await, "ok");
    assert!(fetch_pages(&client, "prompts").await.concat().len() < 1_000);
    // An upstream with an endless tool list has no tools.
    assert!(client.tool_names().await.iter().all(|tool| !tool.starts_with("a_")));
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ever_changing_tool_list_uses_bounded_memory() {
    let turn = Arc::new(AtomicUsize::new(0));
    let shared_turn = Arc::clone(&turn);
    let address = serve_connections(move |mut stream| {
        let turn = shared_turn.load(Ordering::SeqCst);
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
    let options = UpstreamOptions { pin_dir: Some(home.path().to_owned()), launcher: None };
    for (tool_count, is_up) in [(9_000, true), (18_000, true), (18_000, false)] {
        turn.fetch_add(1, Ordering::SeqCst);
        let upstreams = Upstreams::start(&config, &options, Duration::from_secs(60)).await.unwrap();
        let health = upstreams.health().remove(0);
        assert_eq!(
            (health.tools, matches!(health.status, UpstreamStatus::Up { .. })),
            (tool_count, is_up),
            "{:?}",
            health.status
        );
        upstreams.stop_all().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_are_notified_of_changed_tool_list() {
    for modern in [false, true] {
        let (server, config) =
            PagedServer { modern, ..PagedServer::new("s", 2) }.start("prefix = \"\"").await;
        let gate = TestGateway::open(&config).await;
        let client = gate.client();
        wait_until("two tools are listed", async || client.tool_names().await == ["t000", "t001"])
            .await;
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
        server.entry_count.store(3, Ordering::SeqCst);
        // The notification is repeated, because the gateway may not be subscribed yet.
        wait_until("the new tool is listed", async || {
            server.notify_list_changed().await;
            client.tool_names().await.len() == 3
        })
        .await;
        let changed = |message: &Value| message["method"] == "notifications/tools/list_changed";
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
    let (server, config) = PagedServer { rejects_subscriptions: true, ..PagedServer::new("s", 2) }
        .start("prefix = \"\"")
        .await;
    let gate = TestGateway::open(&config).await;
    let client = gate.client();
    wait_until("two tools are listed", async || client.tool_names().await == ["t000", "t001"])
        .await;
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
    wait_until("the subscription is rejected", async || {
        server.request_count.load(Ordering::SeqCst) > 0
    })
    .await;
    server.entry_count.store(3, Ordering::SeqCst);
    let seen = wait_until("the new tool is listed", async || {
        server.notify_list_changed().await;
        client.tool_names().await.len() == 3
    });
    // The gateway reads the lists before its periodic check.
    tokio::time::timeout(Duration::from_secs(20), seen).await.unwrap();
    drop(newer);
    gate.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn agent_sees_only_prompts_and_resources_of_its_upstreams() {
    let ((_, a), (server, b)) =
        (PagedServer::new("a", 2).start("").await, PagedServer::new("b", 2).start("").await);
    let gate = TestGateway::open(&format!(
        "{a}{b}[agents.ann]\nupstreams = \"a\"\n[agents.ben]\nupstreams = \"b\"\n[agents.both]\nupstreams = [\"a\", \"b\"]\n"
    ))
    .await;
    let client = gate.client();
    let client_at = |agent: &str| {
        let mut client = client.clone();
        client.url = format!("{}/mcp/{agent}", gate.url);
        client
    };
    let prompt = async |agent: &str, name: &str| {
        client_at(agent).call_method("prompts/get", json!({"name": name})).await.1
    };
    let read = async |agent: &str, uri: &str| {
        client_at(agent).call_method("resources/read", json!({"uri": uri})).await.1
    };
    for (agent, labels) in [("ann", vec!["a"]), ("ben", vec!["b"]), ("both", vec!["a", "b"])] {
        let entries = |entry: fn(&str, usize) -> String| {
            labels.iter().flat_map(|label| [entry(label, 0), entry(label, 1)]).collect::<Vec<_>>()
        };
        assert_eq!(
            fetch_pages(&client_at(agent), "prompts").await.concat(),
            entries(|label, n| format!("{label}_p00{n}"))
        );
        assert_eq!(
            fetch_pages(&client_at(agent), "resources").await.concat(),
            entries(|label, n| format!("toolgate://{label}/{label}://{n}"))
        );
        for label in &labels {
            assert_eq!(
                prompt(agent, &format!("{label}_p000")).await["result"]["messages"][0]["content"]["text"],
                *label
            );
            let result =
                read(agent, &format!("toolgate://{label}/{label}://0")).await["result"].clone();
            // The result is private, because other callers may not see it.
            assert_eq!(
                (&result["contents"][0]["text"], &result["ttlMs"], &result["cacheScope"]),
                (&json!(label), &json!(60_000), &json!("private"))
            );
        }
    }
    // An entry of another agent gives the same error as an unknown entry.
    let before = server.request_count.load(Ordering::SeqCst);
    let (forbidden, unknown) = (prompt("ann", "b_p000").await, prompt("ann", "c_p000").await);
    assert_eq!(forbidden["error"]["code"], -32602, "{forbidden}");
    assert_eq!(forbidden.to_string(), unknown.to_string().replace("c_p000", "b_p000"));
    let (forbidden, unknown) =
        (read("ann", "toolgate://b/b://0").await, read("ann", "toolgate://c/b://0").await);
    assert!(forbidden["error"].is_object(), "{forbidden}");
    assert_eq!(
        forbidden.to_string(),
        unknown.to_string().replace("toolgate://c/", "toolgate://b/")
    );
    assert!(read("ann", "b://0").await["error"].is_object());
    for reference in [
        json!({"type": "ref/prompt", "name": "b_p000"}),
        json!({"type": "ref/resource", "uri": "toolgate://b/b://0"}),
    ] {
        let params = json!({"ref": reference, "argument": {"name": "x", "value": ""}});
        assert!(
            client_at("ann").call_method("completion/complete", params).await.1["error"]
                .is_object(),
            "{reference}"
        );
    }
    assert_eq!(server.request_count.load(Ordering::SeqCst), before);
    gate.shut_down().await;
}
