//! A server of the Model Context Protocol to try a gateway on.
//!
//! It offers what the package `@modelcontextprotocol/conformance` asks of a server: its tools, prompts, resources, completions,
//! subscriptions and log messages, for clients of 2026-07-28 and of the revisions before it. The suite passes against it bare, so
//! what the suite finds behind a gateway is the gateway's doing.
//!
//! Besides these it has tools that other tests need: `echo`, `add`, `count`, `sleep`, `big`, `crash`, `fail` and `env`. `count` adds
//! one to a number that the whole process shares, appends it as a line to the file that the environment variable `FIXTURE_COUNTER`
//! names, and thereby changes the resource `test://watched-resource`, which its subscribers are told. `sleep` appends a line there when
//! it begins.
//!
//! `fixture --listen 127.0.0.1:0` serves HTTP and prints its address as soon as it listens. `fixture --stdio` serves its standard
//! streams; when it ends by itself, it leaves the file that `FIXTURE_GOODBYE` names. `--version-two` plays a later version of the same
//! server: `echo` is described otherwise, `add` is gone and `extra` has come. `--tools 500` adds that many tools, `tool_000` and on.
//! `fixture --ill` is another server altogether, for trouble: see `ill.rs`.

#![expect(deprecated, reason = "the suite asks for sampling, roots and log messages, which the protocol is to drop")]

#[path = "fixture/ill.rs"]
mod ill;

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::error::Error;
use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::Write;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use hmac::{Hmac, KeyInit, Mac};
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, BodyStream, Full, StreamBody};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use rmcp::model::{
    CacheScope, CallToolRequestParams, CallToolResponse, CallToolResult, ClientCapabilities, CompleteRequestParams, CompleteResult,
    CompletionInfo, ContentBlock, CreateMessageRequest, CreateMessageRequestParams, ElicitRequest, ElicitRequestParams,
    ElicitationCapability, ElicitationSchema, GetPromptRequestParams, GetPromptResponse, GetPromptResult, Implementation, InputRequest,
    InputRequests, InputRequiredResult, InputResponses, JsonObject, ListPromptsResult, ListResourceTemplatesResult, ListResourcesResult,
    ListRootsRequest, ListToolsResult, LoggingLevel, LoggingMessageNotificationParam, PaginatedRequestParams, ProgressNotificationParam,
    Prompt, PromptArgument, PromptMessage, ProtocolVersion, ReadResourceRequestParams, ReadResourceResponse, ReadResourceResult, Resource,
    ResourceContents, ResourceTemplate, ResourceUpdatedNotificationParam, Role, RootsCapabilities, SamplingCapability, SamplingMessage,
    ServerCapabilities, ServerConfig, SetLevelRequestMethod, SetLevelRequestParams, SubscribeRequestParams, SubscriptionFilter, Tool,
    ToolAnnotations, UnsubscribeRequestParams, object,
};
use rmcp::service::{NotificationContext, RequestContext, SubscriptionContext, SubscriptionSendError, SubscriptionSink};
use rmcp::transport::stdio;
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use rmcp::{ErrorData, Peer, RoleServer, ServerHandler, serve_server};
use serde_json::{Value, json};
use sha2::Sha256;
use tokio::net::TcpListener;
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;

/// A picture of one red dot.
const PNG: &str = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR42mP4z8AAAAMBAQD3A0FDAAAAAElFTkSuQmCC";
/// A millisecond of silence.
const WAV: &str = "UklGRiwAAABXQVZFZm10IBAAAAABAAEAQB8AAEAfAAABAAgAZGF0YQgAAACAgICAgICAgA==";
/// What the request states are signed with. There is nothing to keep secret here.
const KEY: &[u8] = b"the key of a fixture is known to everyone";
/// The resource that `count` changes.
const WATCHED: &str = "test://watched-resource";
/// How long a client may keep what it was told, in milliseconds.
const FRESH: u64 = 1_000;
/// When a client whose stream has ended should come back.
const RETRY: Duration = Duration::from_millis(300);
/// How long a client whose stream has ended is waited for.
const AWAY: Duration = Duration::from_millis(1_500);
/// Most bytes that `big` returns.
const BIGGEST: u64 = 256 << 20;
/// The tools that give their client a state to bring back.
const SEALED: [&str; 3] =
    ["test_input_required_result_request_state", "test_input_required_result_tampered_state", "test_input_required_result_multiple_inputs"];

/// How the program is to run.
#[derive(Default)]
struct Options {
    listen: Option<SocketAddr>,
    stdio: bool,
    ill: bool,
    version_two: bool,
    tools: usize,
}

impl Options {
    fn read(mut arguments: impl Iterator<Item = String>) -> Result<Self, Box<dyn Error>> {
        let mut options = Self::default();
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or_else(|| format!("{argument} wants a value"));
            match argument.as_str() {
                "--listen" => options.listen = Some(value()?.parse()?),
                "--stdio" => options.stdio = true,
                "--ill" => options.ill = true,
                "--version-two" => options.version_two = true,
                "--tools" => options.tools = value()?.parse()?,
                _ => return Err(format!("unknown option {argument}").into()),
            }
        }
        let ways = [options.stdio, options.ill, options.listen.is_some()];
        if ways.into_iter().filter(|way| *way).count() != 1 {
            return Err("usage: fixture (--listen ADDRESS | --stdio | --ill) [--version-two] [--tools N]".into());
        }
        Ok(options)
    }
}

/// What all sessions of the process share.
struct Shared {
    version_two: bool,
    tools: Vec<Tool>,
    count: AtomicU64,
    ids: AtomicU64,
    /// The streams that clients of 2026-07-28 listen to.
    listeners: Mutex<BTreeMap<u64, SubscriptionSink>>,
    /// The sessions of older clients.
    sessions: Mutex<BTreeMap<u64, Session>>,
}

/// A session of an older client, and the resources that it watches.
struct Session {
    peer: Peer<RoleServer>,
    watched: BTreeSet<String>,
}

/// Something that clients want to be told.
#[derive(Clone, Copy)]
enum Change {
    Tools,
    Prompts,
    Resource(&'static str),
}

impl Shared {
    fn new(options: &Options) -> Self {
        let mut tools = suite_tools();
        tools.extend(own_tools(options.version_two));
        tools.extend((0..options.tools).map(generated_tool));
        Self {
            version_two: options.version_two,
            tools,
            count: AtomicU64::new(0),
            ids: AtomicU64::new(0),
            listeners: Mutex::default(),
            sessions: Mutex::default(),
        }
    }

    fn next_id(&self) -> u64 {
        self.ids.fetch_add(1, Ordering::Relaxed)
    }

    /// Tells everyone who wants to know, and forgets who has gone.
    async fn announce(&self, change: Change) {
        let listeners: Vec<_> = self.listeners.lock().await.iter().map(|(id, sink)| (*id, sink.clone())).collect();
        for (id, sink) in listeners {
            let sent = match change {
                Change::Tools => sink.notify_tool_list_changed().await,
                Change::Prompts => sink.notify_prompt_list_changed().await,
                Change::Resource(uri) => sink.notify_resource_updated(uri).await,
            };
            if matches!(sent, Err(SubscriptionSendError::SubscriptionClosed | SubscriptionSendError::Service(_))) {
                self.listeners.lock().await.remove(&id);
            }
        }
        let wants = |session: &Session| match change {
            Change::Tools | Change::Prompts => true,
            Change::Resource(uri) => session.watched.contains(uri),
        };
        let sessions: Vec<_> = self
            .sessions
            .lock()
            .await
            .iter()
            .filter(|(_, session)| wants(session))
            .map(|(id, session)| (*id, session.peer.clone()))
            .collect();
        for (id, peer) in sessions {
            let sent = match change {
                Change::Tools => peer.notify_tool_list_changed().await,
                Change::Prompts => peer.notify_prompt_list_changed().await,
                Change::Resource(uri) => peer.notify_resource_updated(ResourceUpdatedNotificationParam::new(uri)).await,
            };
            if sent.is_err() {
                self.sessions.lock().await.remove(&id);
            }
        }
    }
}

/// The server as one session sees it.
struct Fixture {
    shared: Arc<Shared>,
    id: u64,
    level: Mutex<LoggingLevel>,
}

impl Fixture {
    fn new(shared: &Arc<Shared>) -> Self {
        Self { shared: Arc::clone(shared), id: shared.next_id(), level: Mutex::new(LoggingLevel::Debug) }
    }

    /// Sends a log message to a client that wants it: since 2026-07-28 each request says so itself.
    async fn log(&self, cx: &RequestContext<RoleServer>, level: LoggingLevel, message: &str) {
        let least = if is_modern(cx) { cx.meta.log_level() } else { Some(*self.level.lock().await) };
        if least.is_some_and(|least| level as u8 >= least as u8) {
            let message = LoggingMessageNotificationParam::new(level, json!(message)).with_logger("fixture");
            if let Err(error) = cx.peer.notify_logging_message(message).await {
                eprintln!("log message: {error}");
            }
        }
    }

    /// The tools that ask their client for something. Others are `None`.
    async fn asking_tool(
        &self,
        request: &CallToolRequestParams,
        cx: &RequestContext<RoleServer>,
    ) -> Result<Option<CallToolResponse>, ErrorData> {
        let name: &str = &request.name;
        if name == "test_input_required_result_multi_round" {
            return multi_round(request, cx).await.map(Some);
        }
        let Some(questions) = questions(request, cx)? else { return Ok(None) };
        if questions.is_empty() {
            return Ok(Some(CallToolResponse::from(text("The client can be asked for nothing."))));
        }
        let sealed = SEALED.contains(&name);
        let stage = stage(request)?;
        let given = request.input_responses.as_ref().filter(|_| !sealed || stage.is_some());
        let response = match ask(cx, given, questions).await? {
            Asked::Answers(answers) => CallToolResponse::from(text(conclusion(name, &answers))),
            Asked::Open(questions) if sealed => required(questions, Some(seal(name, "asked")?)),
            Asked::Open(questions) => required(questions, None),
        };
        Ok(Some(response))
    }

    /// The tools that the suite does not know. Others are `None`.
    async fn own_tool(
        &self,
        name: &str,
        arguments: &JsonObject,
        cx: &RequestContext<RoleServer>,
    ) -> Result<Option<CallToolResult>, ErrorData> {
        let result = match name {
            "echo" => CallToolResult::structured(json!({ "text": string(arguments, "text")? })),
            "add" => CallToolResult::structured(json!({ "sum": sum(arguments)? })),
            "count" => {
                let count = self.shared.count.fetch_add(1, Ordering::SeqCst) + 1;
                record(count).map_err(internal)?;
                self.shared.announce(Change::Resource(WATCHED)).await;
                CallToolResult::structured(json!({ "count": count }))
            }
            "sleep" => {
                let ms = whole(arguments, "ms")?;
                record(format!("sleep {ms}")).map_err(internal)?;
                tokio::select! {
                    () = tokio::time::sleep(Duration::from_millis(ms)) => text(format!("Slept for {ms} milliseconds.")),
                    () = cx.ct.cancelled() => failed("Woken before its time."),
                }
            }
            "big" => {
                let bytes = whole(arguments, "bytes")?;
                if bytes > BIGGEST {
                    return Err(wrong("bytes", "less"));
                }
                text("x".repeat(usize::try_from(bytes).map_err(internal)?))
            }
            "crash" => std::process::exit(3),
            "fail" => failed(string(arguments, "message")?),
            "env" => {
                let variable = string(arguments, "name")?;
                match std::env::var(variable) {
                    Ok(value) => text(value),
                    Err(error) => failed(format!("{variable}: {error}")),
                }
            }
            "extra" => text("This tool came with version two."),
            generated if generated.starts_with("tool_") => text(format!("{generated} looked for {}", string(arguments, "query")?)),
            _ => return Ok(None),
        };
        Ok(Some(result))
    }

    /// The tools of the suite that ask for nothing.
    async fn suite_tool(&self, name: &str, arguments: &JsonObject, cx: &RequestContext<RoleServer>) -> Result<CallToolResult, ErrorData> {
        let result = match name {
            "test_simple_text" => text("This is a simple text response for testing."),
            "test_image_content" => CallToolResult::success(vec![ContentBlock::image(PNG, "image/png")]),
            "test_audio_content" => CallToolResult::success(vec![ContentBlock::audio(WAV, "audio/wav")]),
            "test_embedded_resource" => CallToolResult::success(vec![ContentBlock::resource(ResourceContents::text(
                "This is an embedded resource content.",
                "test://embedded-resource",
            ))]),
            "test_multiple_content_types" => CallToolResult::success(vec![
                ContentBlock::text("Multiple content types test:"),
                ContentBlock::image(PNG, "image/png"),
                ContentBlock::resource(
                    ResourceContents::text(json!({ "test": "data", "value": 123 }).to_string(), "test://mixed-content-resource")
                        .with_mime_type("application/json"),
                ),
            ]),
            "test_tool_with_logging" => {
                for message in ["Tool execution started", "Tool processing data", "Tool execution completed"] {
                    self.log(cx, LoggingLevel::Info, message).await;
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                text("The log messages were sent.")
            }
            "test_logging_tool" => {
                self.log(cx, LoggingLevel::Emergency, "This request asked for log messages").await;
                text("A log message was sent if the request asked for it.")
            }
            "test_error_handling" => failed("This tool intentionally returns an error for testing"),
            "test_tool_with_progress" => {
                let token = cx.meta.get_progress_token();
                for (progress, message) in [(0.0, "Started"), (50.0, "Halfway"), (100.0, "Done")] {
                    if let Some(token) = token.clone() {
                        let progress = ProgressNotificationParam::new(token, progress).with_total(100.0).with_message(message);
                        cx.peer.notify_progress(progress).await.map_err(internal)?;
                    }
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                text("The progress was reported.")
            }
            "test_reconnection" => {
                reconnect(cx).await;
                text("The client came back for this.")
            }
            "test_custom_header" => text(string(arguments, "value")?),
            "json_schema_2020_12_tool" => text(Value::Object(arguments.clone()).to_string()),
            "test_missing_capability" => {
                if cx.client_capabilities().unwrap_or_default().sampling.is_none() {
                    let needed = ClientCapabilities::builder().enable_sampling().build();
                    return Err(ErrorData::missing_required_client_capability(needed));
                }
                text("The client can be asked for samples.")
            }
            "test_trigger_tool_change" => {
                self.shared.announce(Change::Tools).await;
                text("The clients were told that the tools changed.")
            }
            "test_trigger_prompt_change" => {
                self.shared.announce(Change::Prompts).await;
                text("The clients were told that the prompts changed.")
            }
            _ => return Err(ErrorData::invalid_params(format!("Unknown tool: {name}"), None)),
        };
        Ok(result)
    }
}

impl ServerHandler for Fixture {
    fn get_info(&self) -> ServerConfig {
        let capabilities = ServerCapabilities::builder()
            .enable_logging()
            .enable_completions()
            .enable_prompts()
            .enable_prompts_list_changed()
            .enable_resources()
            .enable_resources_subscribe()
            .enable_resources_list_changed()
            .enable_tools()
            .enable_tool_list_changed()
            .build();
        let version = if self.shared.version_two { "2.0.0" } else { "1.0.0" };
        ServerConfig::new(capabilities)
            .with_server_info(Implementation::new("fixture", version))
            .with_instructions("This server is for tests. Its tools do nothing that matters.")
    }

    async fn on_initialized(&self, context: NotificationContext<RoleServer>) {
        let mut sessions = self.shared.sessions.lock().await;
        sessions.entry(self.id).or_insert_with(|| Session { peer: context.peer, watched: BTreeSet::new() });
    }

    async fn set_level(&self, request: SetLevelRequestParams, cx: RequestContext<RoleServer>) -> Result<(), ErrorData> {
        if is_modern(&cx) {
            return Err(ErrorData::method_not_found::<SetLevelRequestMethod>());
        }
        *self.level.lock().await = request.level;
        Ok(())
    }

    async fn list_tools(
        &self,
        _request: Option<PaginatedRequestParams>,
        _cx: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult::with_all_items(self.shared.tools.clone()).with_ttl_ms(FRESH).with_cache_scope(CacheScope::Public))
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        self.shared.tools.iter().find(|tool| tool.name == name).cloned()
    }

    async fn call_tool(&self, request: CallToolRequestParams, cx: RequestContext<RoleServer>) -> Result<CallToolResponse, ErrorData> {
        if !self.shared.tools.iter().any(|tool| tool.name == request.name) {
            return Err(ErrorData::invalid_params(format!("Unknown tool: {}", request.name), None));
        }
        if let Some(response) = self.asking_tool(&request, &cx).await? {
            return Ok(response);
        }
        let arguments = request.arguments.unwrap_or_default();
        if let Some(result) = self.own_tool(&request.name, &arguments, &cx).await? {
            return Ok(result.into());
        }
        self.suite_tool(&request.name, &arguments, &cx).await.map(CallToolResponse::from)
    }

    async fn list_prompts(
        &self,
        _request: Option<PaginatedRequestParams>,
        _cx: RequestContext<RoleServer>,
    ) -> Result<ListPromptsResult, ErrorData> {
        let needs = |name: &str, description: &str| PromptArgument::new(name).with_description(description).with_required(true);
        let prompts = vec![
            Prompt::new("test_simple_prompt", Some("A prompt without arguments."), None),
            Prompt::new(
                "test_prompt_with_arguments",
                Some("A prompt that repeats its arguments."),
                Some(vec![needs("arg1", "The first argument."), needs("arg2", "The second argument.")]),
            ),
            Prompt::new(
                "test_prompt_with_embedded_resource",
                Some("A prompt with a resource in it."),
                Some(vec![needs("resourceUri", "The URI of the resource.")]),
            ),
            Prompt::new("test_prompt_with_image", Some("A prompt with an image in it."), None),
            Prompt::new("test_input_required_result_prompt", Some("A prompt that asks for its context."), None),
        ];
        Ok(ListPromptsResult::with_all_items(prompts).with_ttl_ms(FRESH).with_cache_scope(CacheScope::Public))
    }

    async fn get_prompt(&self, request: GetPromptRequestParams, cx: RequestContext<RoleServer>) -> Result<GetPromptResponse, ErrorData> {
        let arguments = request.arguments.unwrap_or_default();
        let messages = match request.name.as_str() {
            "test_simple_prompt" => vec![PromptMessage::new_text(Role::User, "This is a simple prompt for testing.")],
            "test_prompt_with_arguments" => {
                let (first, second) = (string(&arguments, "arg1")?, string(&arguments, "arg2")?);
                vec![PromptMessage::new_text(Role::User, format!("Prompt with arguments: arg1='{first}', arg2='{second}'"))]
            }
            "test_prompt_with_embedded_resource" => {
                let resource = ResourceContents::text("Embedded resource content for testing.", string(&arguments, "resourceUri")?);
                vec![
                    PromptMessage::new(Role::User, ContentBlock::resource(resource)),
                    PromptMessage::new_text(Role::User, "Please process the embedded resource above."),
                ]
            }
            "test_prompt_with_image" => vec![
                PromptMessage::new(Role::User, ContentBlock::image(PNG, "image/png")),
                PromptMessage::new_text(Role::User, "Please analyze the image above."),
            ],
            "test_input_required_result_prompt" => {
                let question = field("What context should the prompt use?", "context", "string")?;
                let questions = InputRequests::from([("user_context".to_owned(), question)]);
                match ask(&cx, request.input_responses.as_ref(), questions).await? {
                    Asked::Open(questions) => return Ok(InputRequiredResult::from_input_requests(questions).into()),
                    Asked::Answers(answers) => {
                        let context = said(&answers, "user_context", "/content/context");
                        vec![PromptMessage::new_text(Role::User, format!("Please keep this in mind: {context}"))]
                    }
                }
            }
            other => return Err(ErrorData::invalid_params(format!("Unknown prompt: {other}"), None)),
        };
        Ok(GetPromptResult::new(messages).into())
    }

    async fn complete(&self, request: CompleteRequestParams, _cx: RequestContext<RoleServer>) -> Result<CompleteResult, ErrorData> {
        let known = ["123", "456", "paris", "park", "party", "test", "test://example-resource", "test://static-text", "testing"];
        let values = known.into_iter().filter(|value| value.starts_with(&request.argument.value)).map(str::to_owned).collect();
        Ok(CompleteResult::new(CompletionInfo::with_all_values(values).map_err(internal)?))
    }

    async fn list_resources(
        &self,
        _request: Option<PaginatedRequestParams>,
        _cx: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        let resources = vec![
            Resource::new("test://static-text", "static-text").with_description("A text.").with_mime_type("text/plain"),
            Resource::new("test://static-binary", "static-binary").with_description("An image.").with_mime_type("image/png"),
            Resource::new(WATCHED, "watched-resource").with_description("How often `count` was called.").with_mime_type("text/plain"),
        ];
        Ok(ListResourcesResult::with_all_items(resources).with_ttl_ms(FRESH).with_cache_scope(CacheScope::Public))
    }

    async fn list_resource_templates(
        &self,
        _request: Option<PaginatedRequestParams>,
        _cx: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        let template = ResourceTemplate::new("test://template/{id}/data", "template")
            .with_description("The data of an identifier.")
            .with_mime_type("application/json");
        Ok(ListResourceTemplatesResult::with_all_items(vec![template]).with_ttl_ms(FRESH).with_cache_scope(CacheScope::Public))
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        _cx: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        let uri = request.uri.as_str();
        let id = uri.strip_prefix("test://template/").and_then(|rest| rest.strip_suffix("/data"));
        let (contents, fresh) = match (uri, id) {
            ("test://static-text", _) => (ResourceContents::text("This is the content of the static text resource.", uri), FRESH),
            ("test://static-binary", _) => (ResourceContents::blob(PNG, uri).with_mime_type("image/png"), FRESH),
            (WATCHED, _) => (ResourceContents::text(self.shared.count.load(Ordering::SeqCst).to_string(), uri), 0),
            (_, Some(id)) if !id.is_empty() && !id.contains('/') => {
                let data = json!({ "id": id, "templateTest": true, "data": format!("Data for ID: {id}") });
                (ResourceContents::text(data.to_string(), uri).with_mime_type("application/json"), FRESH)
            }
            _ => return Err(ErrorData::resource_not_found("Resource not found", Some(json!({ "uri": uri })))),
        };
        Ok(ReadResourceResult::new(vec![contents]).with_ttl_ms(fresh).with_cache_scope(CacheScope::Public).into())
    }

    async fn subscribe(&self, request: SubscribeRequestParams, cx: RequestContext<RoleServer>) -> Result<(), ErrorData> {
        let mut sessions = self.shared.sessions.lock().await;
        let session = sessions.entry(self.id).or_insert_with(|| Session { peer: cx.peer, watched: BTreeSet::new() });
        session.watched.insert(request.uri);
        Ok(())
    }

    async fn unsubscribe(&self, request: UnsubscribeRequestParams, _cx: RequestContext<RoleServer>) -> Result<(), ErrorData> {
        if let Some(session) = self.shared.sessions.lock().await.get_mut(&self.id) {
            session.watched.remove(&request.uri);
        }
        Ok(())
    }

    fn accepted_subscription_filter(&self, requested: &SubscriptionFilter) -> Option<SubscriptionFilter> {
        Some(requested.supported_by(&self.get_info().capabilities))
    }

    async fn listen(&self, context: SubscriptionContext) -> Result<(), ErrorData> {
        let id = self.shared.next_id();
        self.shared.listeners.lock().await.insert(id, context.sink().clone());
        context.cancelled().await;
        self.shared.listeners.lock().await.remove(&id);
        Ok(())
    }
}

/// What came of asking the client.
enum Asked {
    /// It has answered everything.
    Answers(InputResponses),
    /// It has yet to be asked this, in the answer to its request.
    Open(InputRequests),
}

/// Whether the request is of 2026-07-28 or later. Its client is asked by the answer to it, an older one by requests of our own.
fn is_modern(cx: &RequestContext<RoleServer>) -> bool {
    cx.protocol_version().is_some_and(|version| version.as_str() >= ProtocolVersion::V_2026_07_28.as_str())
}

/// Asks the client, in the way of its revision, for what it has not given yet.
async fn ask(cx: &RequestContext<RoleServer>, given: Option<&InputResponses>, questions: InputRequests) -> Result<Asked, ErrorData> {
    let able = cx.client_capabilities().unwrap_or_default();
    let mut lacking = ClientCapabilities::default();
    for question in questions.values() {
        match question {
            InputRequest::Elicitation(_) if able.elicitation.is_none() => lacking.elicitation = Some(ElicitationCapability::default()),
            InputRequest::CreateMessage(_) if able.sampling.is_none() => lacking.sampling = Some(SamplingCapability::default()),
            InputRequest::ListRoots(_) if able.roots.is_none() => lacking.roots = Some(RootsCapabilities::default()),
            _ => {}
        }
    }
    if lacking != ClientCapabilities::default() {
        return Err(ErrorData::missing_required_client_capability(lacking));
    }
    let mut answers = InputResponses::new();
    if is_modern(cx) {
        for key in questions.keys() {
            if let Some(answer) = given.and_then(|given| given.get(key)).filter(|answer| answer.is_object()) {
                answers.insert(key.clone(), answer.clone());
            }
        }
        return Ok(if answers.len() == questions.len() { Asked::Answers(answers) } else { Asked::Open(questions) });
    }
    for (key, question) in questions {
        let answer = match question {
            InputRequest::Elicitation(request) => serde_json::to_value(cx.peer.create_elicitation(request.params).await.map_err(internal)?),
            InputRequest::CreateMessage(request) => serde_json::to_value(cx.peer.create_message(request.params).await.map_err(internal)?),
            InputRequest::ListRoots(_) => serde_json::to_value(cx.peer.list_roots().await.map_err(internal)?),
            _ => return Err(internal("a question of an unknown kind")),
        };
        answers.insert(key, answer.map_err(internal)?);
    }
    Ok(Asked::Answers(answers))
}

/// What a tool asks its client for. Tools that ask for nothing are `None`.
fn questions(request: &CallToolRequestParams, cx: &RequestContext<RoleServer>) -> Result<Option<InputRequests>, ErrorData> {
    let none = JsonObject::new();
    let arguments = request.arguments.as_ref().unwrap_or(&none);
    let asked = match &*request.name {
        "test_sampling" => vec![("sample", sample(string(arguments, "prompt")?, 100))],
        "test_elicitation" => vec![("form", form(string(arguments, "message")?, user_schema())?)],
        "test_elicitation_sep1034_defaults" => vec![("form", form("Please look through these values.", defaults_schema())?)],
        "test_elicitation_sep1330_enums" => vec![("form", form("Please choose.", enums_schema())?)],
        "test_streaming_elicitation" => vec![("value", field("Please give a value.", "value", "string")?)],
        "test_input_required_result_elicitation" => vec![("user_name", field("What is your name?", "name", "string")?)],
        "test_input_required_result_sampling" => vec![("capital_question", sample("What is the capital of France?", 100))],
        "test_input_required_result_list_roots" => vec![("client_roots", roots())],
        "test_input_required_result_request_state" | "test_input_required_result_tampered_state" => {
            vec![("confirm", field("Please confirm", "ok", "boolean")?)]
        }
        "test_input_required_result_multiple_inputs" => vec![
            ("user_name", field("What is your name?", "name", "string")?),
            ("greeting", sample("Generate a greeting", 50)),
            ("client_roots", roots()),
        ],
        "test_input_required_result_capabilities" => {
            let able = cx.client_capabilities().unwrap_or_default();
            let mut asked = Vec::new();
            if able.elicitation.is_some() {
                asked.push(("user_name", field("What is your name?", "name", "string")?));
            }
            if able.sampling.is_some() {
                asked.push(("greeting", sample("Generate a greeting", 50)));
            }
            if able.roots.is_some() {
                asked.push(("client_roots", roots()));
            }
            asked
        }
        _ => return Ok(None),
    };
    Ok(Some(asked.into_iter().map(|(key, question)| (key.to_owned(), question)).collect()))
}

/// What a tool makes of the answers.
fn conclusion(name: &str, answers: &InputResponses) -> String {
    match name {
        "test_sampling" => format!("LLM response: {}", said(answers, "sample", "/content/text")),
        "test_elicitation" => format!("User response: {}", decided(answers, "form")),
        "test_elicitation_sep1034_defaults" | "test_elicitation_sep1330_enums" => {
            format!("Elicitation completed: {}", decided(answers, "form"))
        }
        "test_streaming_elicitation" => format!("User response: {}", decided(answers, "value")),
        "test_input_required_result_elicitation" => format!("Hello, {}!", said(answers, "user_name", "/content/name")),
        "test_input_required_result_sampling" => said(answers, "capital_question", "/content/text").to_owned(),
        "test_input_required_result_list_roots" => format!("The first root is {}.", said(answers, "client_roots", "/roots/0/uri")),
        "test_input_required_result_request_state" | "test_input_required_result_tampered_state" => {
            format!("state-ok: {}", decided(answers, "confirm"))
        }
        _ => format!("The client has answered {}.", answers.keys().map(String::as_str).collect::<Vec<_>>().join(", ")),
    }
}

/// Asks twice, and remembers in the state how far it has come.
async fn multi_round(request: &CallToolRequestParams, cx: &RequestContext<RoleServer>) -> Result<CallToolResponse, ErrorData> {
    let name: &str = &request.name;
    let stage = stage(request)?.unwrap_or_default();
    let given = request.input_responses.as_ref();
    if stage != "second" {
        let question = field("Step 1: What is your name?", "name", "string")?;
        let questions = InputRequests::from([("step1".to_owned(), question)]);
        if let Asked::Open(questions) = ask(cx, given.filter(|_| stage == "first"), questions).await? {
            return Ok(required(questions, Some(seal(name, "first")?)));
        }
    }
    let question = field("Step 2: What is your favorite color?", "color", "string")?;
    let questions = InputRequests::from([("step2".to_owned(), question)]);
    match ask(cx, given.filter(|_| stage == "second"), questions).await? {
        Asked::Open(questions) => Ok(required(questions, Some(seal(name, "second")?))),
        Asked::Answers(answers) => Ok(text(format!("The color is {}.", said(&answers, "step2", "/content/color"))).into()),
    }
}

/// Ends the stream that the client waits at, and gives it the time to come back. Only clients of 2025-11-25 know to.
async fn reconnect(cx: &RequestContext<RoleServer>) {
    tokio::time::sleep(Duration::from_millis(100)).await;
    let end = cx.extensions.get::<Parts>().and_then(|parts| parts.extensions.get::<StreamEnd>());
    if cx.protocol_version() == Some(ProtocolVersion::V_2025_11_25)
        && let Some(StreamEnd(end)) = end
    {
        end.cancel();
        tokio::time::sleep(AWAY).await;
    }
}

fn required(questions: InputRequests, state: Option<String>) -> CallToolResponse {
    InputRequiredResult::new(Some(questions), state).into()
}

/// A state that no one else can make.
fn seal(tool: &str, stage: &str) -> Result<String, ErrorData> {
    let mut mac = Hmac::<Sha256>::new_from_slice(KEY).map_err(internal)?;
    mac.update(tool.as_bytes());
    mac.update(b":");
    mac.update(stage.as_bytes());
    let signature: String = mac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(format!("{stage}.{signature}"))
}

/// The stage in the state that the client brought back, if it is ours and of this tool.
fn stage(request: &CallToolRequestParams) -> Result<Option<String>, ErrorData> {
    let Some(state) = &request.request_state else { return Ok(None) };
    let stage = state.split_once('.').map_or("", |(stage, _)| stage);
    if *state == seal(&request.name, stage)? {
        Ok(Some(stage.to_owned()))
    } else {
        Err(ErrorData::invalid_params("requestState is not what this server gave out", None))
    }
}

fn sample(prompt: &str, most: u32) -> InputRequest {
    let params = CreateMessageRequestParams::new(vec![SamplingMessage::user_text(prompt)], most);
    InputRequest::CreateMessage(CreateMessageRequest::new(params))
}

fn roots() -> InputRequest {
    InputRequest::ListRoots(ListRootsRequest::default())
}

/// A form with one field that has to be filled in.
fn field(message: &str, name: &str, kind: &str) -> Result<InputRequest, ErrorData> {
    form(message, json!({ "type": "object", "properties": { name: { "type": kind } }, "required": [name] }))
}

fn form(message: &str, schema: Value) -> Result<InputRequest, ErrorData> {
    let requested_schema: ElicitationSchema = serde_json::from_value(schema).map_err(internal)?;
    let params = ElicitRequestParams::FormElicitationParams { meta: None, message: message.to_owned(), requested_schema };
    Ok(InputRequest::Elicitation(ElicitRequest::new(params)))
}

fn user_schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "username": { "type": "string", "description": "User's response" },
            "email": { "type": "string", "description": "User's email address" },
        },
        "required": ["username", "email"],
    })
}

fn defaults_schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": { "type": "string", "description": "A name", "default": "John Doe" },
            "age": { "type": "integer", "description": "An age", "default": 30 },
            "score": { "type": "number", "description": "A score", "default": 95.5 },
            "status": { "type": "string", "description": "A status", "enum": ["active", "inactive", "pending"], "default": "active" },
            "verified": { "type": "boolean", "description": "Whether it was verified", "default": true },
        },
        "required": [],
    })
}

fn enums_schema() -> Value {
    let titled = |word: &str| {
        json!([
            { "const": "value1", "title": format!("First {word}") },
            { "const": "value2", "title": format!("Second {word}") },
            { "const": "value3", "title": format!("Third {word}") },
        ])
    };
    json!({
        "type": "object",
        "properties": {
            "untitledSingle": { "type": "string", "enum": ["option1", "option2", "option3"] },
            "titledSingle": { "type": "string", "oneOf": titled("Option") },
            "legacyEnum": {
                "type": "string",
                "enum": ["opt1", "opt2", "opt3"],
                "enumNames": ["Option One", "Option Two", "Option Three"],
            },
            "untitledMulti": { "type": "array", "items": { "type": "string", "enum": ["option1", "option2", "option3"] } },
            "titledMulti": { "type": "array", "items": { "anyOf": titled("Choice") } },
        },
        "required": [],
    })
}

/// The text at some place of an answer.
fn said<'a>(answers: &'a InputResponses, key: &str, pointer: &str) -> &'a str {
    answers.get(key).and_then(|answer| answer.pointer(pointer)).and_then(Value::as_str).unwrap_or("nothing")
}

/// What became of a form.
fn decided(answers: &InputResponses, key: &str) -> String {
    let content = answers.get(key).and_then(|answer| answer.get("content")).cloned().unwrap_or_default();
    format!("action={}, content={content}", said(answers, key, "/action"))
}

fn text(text: impl Into<String>) -> CallToolResult {
    CallToolResult::success(vec![ContentBlock::text(text)])
}

fn failed(text: impl Into<String>) -> CallToolResult {
    CallToolResult::error(vec![ContentBlock::text(text)])
}

fn internal(error: impl Display) -> ErrorData {
    ErrorData::internal_error(error.to_string(), None)
}

fn wrong(name: &str, wanted: &str) -> ErrorData {
    ErrorData::invalid_params(format!("`{name}` must be {wanted}"), None)
}

fn string<'a>(arguments: &'a JsonObject, name: &str) -> Result<&'a str, ErrorData> {
    arguments.get(name).and_then(Value::as_str).ok_or_else(|| wrong(name, "a string"))
}

fn whole(arguments: &JsonObject, name: &str) -> Result<u64, ErrorData> {
    arguments.get(name).and_then(Value::as_u64).ok_or_else(|| wrong(name, "a whole number of at least zero"))
}

/// The sum of `a` and `b`, exactly if they are whole.
fn sum(arguments: &JsonObject) -> Result<Value, ErrorData> {
    let number = |name: &str| arguments.get(name).and_then(Value::as_f64).ok_or_else(|| wrong(name, "a number"));
    let exact = |name: &str| arguments.get(name).and_then(Value::as_i64);
    match exact("a").zip(exact("b")).and_then(|(a, b)| a.checked_add(b)) {
        Some(sum) => Ok(json!(sum)),
        None => Ok(json!(number("a")? + number("b")?)),
    }
}

/// Appends a line to the file that the environment names, in one piece: others do so at the same time.
fn record(line: impl Display) -> std::io::Result<()> {
    if let Some(path) = std::env::var_os("FIXTURE_COUNTER") {
        let mut file = OpenOptions::new().create(true).append(true).open(path)?;
        file.write_all(format!("{line}\n").as_bytes())?;
    }
    Ok(())
}

fn tool(name: &'static str, description: &'static str, schema: Value) -> Tool {
    Tool::new(name, description, object(schema))
}

fn reads(tool: Tool) -> Tool {
    tool.with_annotations(ToolAnnotations::new().read_only(true))
}

fn returns(tool: Tool, schema: Value) -> Tool {
    tool.with_raw_output_schema(Arc::new(object(schema)))
}

fn no_arguments() -> Value {
    json!({ "type": "object", "properties": {} })
}

/// A schema of one property that has to be there.
fn one_argument(name: &str, kind: &str, description: &str) -> Value {
    json!({ "type": "object", "properties": { name: { "type": kind, "description": description } }, "required": [name] })
}

/// The tools that the suite asks for. The suite calls the first of them without arguments.
fn suite_tools() -> Vec<Tool> {
    let plain = [
        ("test_simple_text", "Returns a text."),
        ("test_image_content", "Returns an image."),
        ("test_audio_content", "Returns a sound."),
        ("test_embedded_resource", "Returns a resource."),
        ("test_multiple_content_types", "Returns a text, an image and a resource."),
        ("test_tool_with_logging", "Sends log messages while it runs."),
        ("test_logging_tool", "Sends a log message if the request asks for it."),
        ("test_error_handling", "Returns an error."),
        ("test_tool_with_progress", "Reports its progress."),
        ("test_reconnection", "Ends its stream before it answers."),
        ("test_missing_capability", "Needs a client that can be asked for samples."),
        ("test_trigger_tool_change", "Tells the clients that the tools changed."),
        ("test_trigger_prompt_change", "Tells the clients that the prompts changed."),
        ("test_elicitation_sep1034_defaults", "Asks the user for values that have defaults."),
        ("test_elicitation_sep1330_enums", "Asks the user to choose."),
        ("test_streaming_elicitation", "Asks the user for a value."),
        ("test_input_required_result_elicitation", "Asks the user for a name."),
        ("test_input_required_result_sampling", "Asks the client for a sample."),
        ("test_input_required_result_list_roots", "Asks the client for its roots."),
        ("test_input_required_result_request_state", "Asks the user to confirm, and keeps a state."),
        ("test_input_required_result_tampered_state", "Asks the user to confirm, and trusts only its own state."),
        ("test_input_required_result_multiple_inputs", "Asks for a name, a sample and the roots at once."),
        ("test_input_required_result_multi_round", "Asks the user twice."),
        ("test_input_required_result_capabilities", "Asks for what the client can give."),
    ];
    let mut tools: Vec<_> = plain.into_iter().map(|(name, description)| tool(name, description, no_arguments())).collect();
    tools.push(tool("test_sampling", "Asks the client for a sample.", one_argument("prompt", "string", "What to ask the model.")));
    tools.push(tool(
        "test_elicitation",
        "Asks the user for a name and an address.",
        one_argument("message", "string", "What to tell the user."),
    ));
    let header =
        json!({ "type": "object", "properties": { "value": { "type": "string", "x-mcp-header": "Value" } }, "required": ["value"] });
    tools.push(tool("test_custom_header", "Returns the value that a header repeats.", header));
    tools.push(tool("json_schema_2020_12_tool", "Tool with JSON Schema 2020-12 features", schema_2020_12()));
    tools.into_iter().map(reads).collect()
}

fn schema_2020_12() -> Value {
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "$defs": {
            "address": {
                "$anchor": "addressDef",
                "type": "object",
                "properties": { "street": { "type": "string" }, "city": { "type": "string" } },
            },
        },
        "properties": {
            "name": { "type": "string" },
            "address": { "$ref": "#/$defs/address" },
            "contactMethod": { "type": "string", "enum": ["phone", "email"] },
            "phone": { "type": "string" },
            "email": { "type": "string" },
        },
        "allOf": [{ "anyOf": [{ "required": ["phone"] }, { "required": ["email"] }] }],
        "if": { "properties": { "contactMethod": { "const": "phone" } }, "required": ["contactMethod"] },
        "then": { "required": ["phone"] },
        "else": { "required": ["email"] },
        "additionalProperties": false,
    })
}

/// The tools that other tests ask for.
fn own_tools(version_two: bool) -> Vec<Tool> {
    let told = if version_two { "Returns the text that it is given, as version two does." } else { "Returns the text that it is given." };
    let echo = tool("echo", told, one_argument("text", "string", "The text."));
    let count = tool("count", "Counts how often it was called.", no_arguments());
    let crash = tool("crash", "Ends the process.", no_arguments());
    let mut tools = vec![
        reads(returns(echo, one_argument("text", "string", "The text."))),
        returns(count, one_argument("count", "integer", "How often it was called."))
            .with_annotations(ToolAnnotations::new().read_only(false).destructive(false).idempotent(false)),
        reads(tool("sleep", "Waits before it answers.", one_argument("ms", "integer", "How many milliseconds."))),
        reads(tool("big", "Returns a long text.", one_argument("bytes", "integer", "How many bytes."))),
        crash.with_annotations(ToolAnnotations::new().read_only(false).destructive(true)),
        reads(tool("fail", "Returns an error.", one_argument("message", "string", "What the error says."))),
        reads(tool("env", "Returns a variable of the environment.", one_argument("name", "string", "The name of the variable."))),
    ];
    if version_two {
        tools.push(reads(tool("extra", "Has come with version two.", no_arguments())));
    } else {
        let numbers = json!({
            "type": "object",
            "properties": { "a": { "type": "number" }, "b": { "type": "number" } },
            "required": ["a", "b"],
        });
        let add = tool("add", "Adds two numbers.", numbers);
        tools.push(reads(returns(add, one_argument("sum", "number", "The sum."))));
    }
    tools
}

fn generated_tool(number: usize) -> Tool {
    let schema = one_argument("query", "string", "What to look for.");
    reads(Tool::new(format!("tool_{number:03}"), format!("Looks for something in place {number}."), object(schema)))
}

/// Ends the stream of a response, when it is cancelled.
#[derive(Clone)]
struct StreamEnd(CancellationToken);

type Endpoint = StreamableHttpService<Fixture, LocalSessionManager>;

async fn answer(endpoint: Endpoint, mut request: Request<Incoming>) -> Response<UnsyncBoxBody<Bytes, Infallible>> {
    let end = CancellationToken::new();
    request.extensions_mut().insert(StreamEnd(end.clone()));
    let known = matches!(request.uri().path(), "/mcp" | "/mcp/");
    let response = if known {
        endpoint.handle(request).await
    } else {
        let mut response = Response::new(Full::new(Bytes::from_static(b"Not Found")).boxed());
        *response.status_mut() = StatusCode::NOT_FOUND;
        response
    };
    let streams = response.headers().get(CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
    response.map(|body| {
        if streams { StreamBody::new(BodyStream::new(body).take_until(end.cancelled_owned())).boxed_unsync() } else { body.boxed_unsync() }
    })
}

async fn serve_http(address: SocketAddr, shared: Arc<Shared>) -> Result<(), Box<dyn Error>> {
    let listener = TcpListener::bind(address).await?;
    let mut sessions = LocalSessionManager::default();
    sessions.session_config.sse_retry = Some(RETRY);
    let config = StreamableHttpServerConfig::default()
        .with_allowed_origins(["http://localhost:*", "http://127.0.0.1:*", "http://[::1]:*"])
        .enforce_origin_validation()
        .with_sse_retry(Some(RETRY));
    let endpoint: Endpoint = StreamableHttpService::new(move || Ok(Fixture::new(&shared)), Arc::new(sessions), config);
    println!("listening at http://{}/mcp", listener.local_addr()?);
    loop {
        let (stream, _) = tokio::select! {
            accepted = listener.accept() => accepted?,
            stopped = tokio::signal::ctrl_c() => {
                stopped?;
                return Ok(());
            }
        };
        let _ = stream.set_nodelay(true);
        let endpoint = endpoint.clone();
        tokio::spawn(async move {
            let service = service_fn(move |request: Request<Incoming>| {
                let endpoint = endpoint.clone();
                async move { Ok::<_, Infallible>(answer(endpoint, request).await) }
            });
            if let Err(error) = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await {
                eprintln!("connection: {error}");
            }
        });
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::read(std::env::args().skip(1))?;
    if options.ill {
        ill::serve()?;
        return Ok(());
    }
    let shared = Arc::new(Shared::new(&options));
    match options.listen {
        Some(address) => serve_http(address, shared).await,
        None => {
            serve_server(Fixture::new(&shared), stdio()).await?.waiting().await?;
            // Who is killed does not come to this.
            if let Some(path) = std::env::var_os("FIXTURE_GOODBYE") {
                std::fs::write(path, "goodbye\n")?;
            }
            Ok(())
        }
    }
}
