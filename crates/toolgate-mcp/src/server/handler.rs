//! Implements the MCP server: turns requests into calls and outcomes into responses.
//!
//! The pipeline makes all decisions.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use rmcp::model::*;
use rmcp::service::{NotificationContext, RequestContext, SubscriptionContext};
use rmcp::{ErrorData, RoleServer, ServerHandler, ServiceError};
use serde_json::Value;
use tokio_util::sync::CancellationToken;
use toolgate::ToolError;

use crate::gateway::{ActiveConfig, Gateway, lock};
use crate::mcp_convert;
use crate::resources::ResourceLocation;
use crate::server::elicitation::ClientQuestions;
use crate::server::identity;
use crate::server::identity::StdioIdentity;
use crate::server::tool_call::CallClient;

/// MCP server handler of one connection.
pub(crate) struct McpServer {
    pub(crate) gateway: Gateway,
    pub(crate) stdio_identity: Option<StdioIdentity>,
    pub(crate) level: Mutex<Option<LoggingLevel>>,
    /// Unique number of this connection.
    pub(crate) connection_id: u64,
    is_initialized: AtomicBool,
    /// Whether the connection has subscribed to a resource.
    pub(crate) has_subscriptions: AtomicBool,
    /// Cancelled when the client disconnects.
    pub(crate) disconnected: CancellationToken,
    pub(crate) questions: ClientQuestions,
}

tokio::task_local! {
    /// Agent and principal of the current HTTP request, if the caller may act as the agent.
    ///
    /// rmcp calls `get_tool` without the context of the request.
    pub(crate) static CURRENT_AGENT: Option<(String, String)>;
}

static NEXT_CONNECTION_ID: AtomicU64 = AtomicU64::new(0);

/// Ends the subscriptions of the connection.
impl Drop for McpServer {
    fn drop(&mut self) {
        // Most connections serve one request without subscriptions and need not take the shared
        // lock.
        if self.has_subscriptions.load(Ordering::Relaxed) {
            self.gateway.unsubscribe_all(self.connection_id);
        }
    }
}

impl McpServer {
    pub(crate) fn new(gateway: Gateway, fixed: Option<StdioIdentity>) -> Self {
        let number = NEXT_CONNECTION_ID.fetch_add(1, Ordering::Relaxed);
        Self {
            gateway,
            stdio_identity: fixed,
            level: Mutex::new(None),
            connection_id: number,
            is_initialized: AtomicBool::new(false),
            has_subscriptions: AtomicBool::new(false),
            disconnected: CancellationToken::new(),
            questions: ClientQuestions::default(),
        }
    }

    pub(super) fn principal_and_agent(
        &self,
        running: &ActiveConfig,
        context: &RequestContext<RoleServer>,
    ) -> Result<(String, String), ErrorData> {
        identity::resolve_caller(running, self.stdio_identity.as_ref(), context.extensions.get())
            .map(|(caller, agent)| (caller.principal, agent))
    }

    /// Returns the agent of a request that is not a call.
    ///
    /// A pause that stops calls also stops these requests.
    pub(super) async fn authorize_read(
        &self,
        running: &ActiveConfig,
        context: &RequestContext<RoleServer>,
    ) -> Result<String, ErrorData> {
        let key = identity::resolve_session(
            &self.gateway,
            running,
            self.stdio_identity.as_ref(),
            &CallClient::from_context(context),
        )?;
        match running.runtime.paused_error(&key).await {
            None => Ok(key.agent.to_string()),
            Some(error) => Err(pause_error(&error)),
        }
    }

    /// Returns the server information for one agent, or for all agents.
    pub(crate) fn server_config(
        &self,
        running: &ActiveConfig,
        agent: Option<&str>,
    ) -> ServerConfig {
        let mut capabilities = ServerCapabilities::default();
        capabilities.tools =
            Some(with_list_changed(ToolsCapability::default(), |tools| &mut tools.list_changed));
        let links = || {
            running
                .upstreams_by_agent
                .iter()
                .filter(|(name, _)| agent.is_none_or(|agent| agent == *name))
                .flat_map(|(_, links)| links)
        };
        let mut instructions = Vec::new();
        for link in links() {
            let catalog = link.catalog();
            if link.upstream.exposes_prompts && catalog.capabilities.prompts.is_some() {
                capabilities.prompts =
                    Some(with_list_changed(PromptsCapability::default(), |prompts| {
                        &mut prompts.list_changed
                    }));
            }
            if link.upstream.exposes_resources
                && let Some(theirs) = &catalog.capabilities.resources
            {
                let subscribe = theirs.subscribe == Some(true)
                    || capabilities
                        .resources
                        .as_ref()
                        .is_some_and(|ours| ours.subscribe == Some(true));
                let mut ours = with_list_changed(ResourcesCapability::default(), |resources| {
                    &mut resources.list_changed
                });
                ours.subscribe = Some(subscribe);
                capabilities.resources = Some(ours);
            }
            if (link.upstream.exposes_prompts || link.upstream.exposes_resources)
                && catalog.capabilities.completions.is_some()
            {
                capabilities.completions = Some(JsonObject::new());
            }
            if catalog.capabilities.logging.is_some() {
                capabilities.logging = Some(JsonObject::new());
            }
            // The model may read the instructions of an upstream only if the configuration opens
            // the upstream as a whole.
            if link.upstream.undeclared == toolgate_config::UndeclaredToolPolicy::Open {
                instructions.extend(
                    catalog
                        .instructions
                        .clone()
                        .filter(|text| crate::upstream::is_harmless_text(text)),
                );
            }
        }
        let mut info = ServerConfig::new(capabilities)
            .with_server_info(Implementation::new("toolgate", env!("CARGO_PKG_VERSION")));
        info.instructions = (!instructions.is_empty()).then(|| instructions.join("\n\n"));
        info
    }
}

/// Converts a pause into an MCP error with the same error data as for a call.
pub(crate) fn pause_error(error: &ToolError) -> ErrorData {
    ErrorData::invalid_request(error.message.clone(), serde_json::to_value(error).ok())
}

/// Sets `list_changed` of a capability.
fn with_list_changed<T>(
    mut capability: T,
    list_changed: impl FnOnce(&mut T) -> &mut Option<bool>,
) -> T {
    *list_changed(&mut capability) = Some(true);
    capability
}

/// Converts an error of an upstream for the client.
pub(crate) fn client_error(error: rmcp::ServiceError) -> ErrorData {
    match error {
        rmcp::ServiceError::McpError(error) => error,
        rmcp::ServiceError::Timeout { timeout } => ErrorData::internal_error(
            format!("the upstream did not answer within {timeout:?}"),
            None,
        ),
        _ => ErrorData::internal_error("cannot reach the upstream", None),
    }
}

impl ServerHandler for McpServer {
    fn get_info(&self) -> ServerConfig {
        self.server_config(
            &self.gateway.active_config(),
            self.stdio_identity.as_ref().and_then(|fixed| fixed.agent.as_deref()),
        )
    }

    async fn initialize(
        &self,
        request: InitializeRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<InitializeResult, ErrorData> {
        let running = self.gateway.active_config();
        let (_, agent) = self.principal_and_agent(&running, &context)?;
        context.peer.set_peer_info(request.clone());
        let negotiated = self.negotiate_initialize(&request)?;
        let mut info = self.server_config(&running, Some(&agent));
        info.protocol_version = negotiated.protocol_version;
        Ok(info)
    }

    async fn discover(
        &self,
        context: RequestContext<RoleServer>,
    ) -> Result<DiscoverResult, ErrorData> {
        let running = self.gateway.active_config();
        let (_, agent) = self.principal_and_agent(&running, &context)?;
        Ok(DiscoverResult::from_server_info(
            self.supported_protocol_versions().into_owned(),
            self.server_config(&running, Some(&agent)),
        ))
    }

    async fn on_initialized(&self, context: NotificationContext<RoleServer>) {
        // A client may repeat the notification, but is registered once.
        if !self.is_initialized.swap(true, Ordering::Relaxed) {
            self.gateway.register_peer(context.peer);
        }
    }

    async fn list_tools(
        &self,
        request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        self.tools_page(request, &context).await
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        self.handle_call(request, &CallClient::from_context(&context)).await
    }

    async fn on_custom_request(
        &self,
        request: CustomRequest,
        context: RequestContext<RoleServer>,
    ) -> Result<CustomResult, ErrorData> {
        let tool =
            request.params.as_ref().and_then(|params| params.get("name")).and_then(Value::as_str);
        Err(match tool.filter(|_| request.method == "tools/call") {
            // The library could not parse these parameters as a call.
            Some(tool) => self.reject_malformed(tool, &CallClient::from_context(&context)).await,
            None => ErrorData::new(ErrorCode::METHOD_NOT_FOUND, request.method, None),
        })
    }

    async fn on_progress(
        &self,
        progress: ProgressNotificationParam,
        _: NotificationContext<RoleServer>,
    ) {
        self.questions.forward_progress(progress).await;
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        let (agent, principal) = CURRENT_AGENT.try_with(Option::clone).ok().flatten()?;
        self.gateway
            .active_config()
            .runtime
            .agent(&agent)?
            .tool_for(&principal, name)
            .map(|spec| mcp_convert::render_tool(spec, None))
    }

    async fn list_prompts(
        &self,
        request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListPromptsResult, ErrorData> {
        self.prompts_page(request, &context).await
    }

    async fn get_prompt(
        &self,
        mut request: GetPromptRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<GetPromptResponse, ErrorData> {
        let running = self.gateway.active_config();
        let agent = self.authorize_read(&running, &context).await?;
        let (link, name) = find_prompt(&running, &agent, &request.name).ok_or_else(|| {
            ErrorData::invalid_params(format!("unknown prompt `{}`", request.name), None)
        })?;
        request.name = name;
        request.meta = Some(mcp_convert::strip_request_meta(context.meta.clone()));
        request.input_responses =
            request.input_responses.map(mcp_convert::strip_reserved_keys_deep);
        let request = ClientRequest::GetPromptRequest(GetPromptRequest::new(request));
        match Box::pin(self.forward_request(&link, request, &context)).await? {
            ServerResult::GetPromptResult(result) => {
                let mut result = mcp_convert::strip_reserved_keys_deep(result);
                result.meta = result.meta.map(mcp_convert::strip_result_meta);
                Ok(GetPromptResponse::Complete(result))
            }
            ServerResult::InputRequiredResult(input_required) => Ok(
                GetPromptResponse::InputRequired(mcp_convert::check_input_request(input_required)?),
            ),
            _ => Err(client_error(ServiceError::UnexpectedResponse)),
        }
    }

    async fn list_resources(
        &self,
        request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        self.resources_page(request, &context).await
    }

    async fn list_resource_templates(
        &self,
        request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        self.resource_templates_page(request, &context).await
    }

    async fn read_resource(
        &self,
        mut request: ReadResourceRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        let running = self.gateway.active_config();
        let agent = self.authorize_read(&running, &context).await?;
        let location = ResourceLocation::resolve(&running, &agent, &request.uri)?;
        request.uri.clone_from(&location.uri);
        request.meta = Some(mcp_convert::strip_request_meta(context.meta.clone()));
        request.input_responses =
            request.input_responses.map(mcp_convert::strip_reserved_keys_deep);
        let request = ClientRequest::ReadResourceRequest(ReadResourceRequest::new(request));
        match Box::pin(self.forward_request(&location.link, request, &context)).await? {
            ServerResult::ReadResourceResult(result) => {
                let mut result = mcp_convert::strip_reserved_keys_deep(result);
                result.meta = result.meta.map(mcp_convert::strip_result_meta);
                // Access depends on the caller, so a shared cache must not store the result.
                result.cache_scope = result.cache_scope.map(|_| CacheScope::Private);
                location.rewrite_uris(&mut result.contents);
                Ok(ReadResourceResponse::Complete(result))
            }
            ServerResult::InputRequiredResult(input_required) => {
                Ok(ReadResourceResponse::InputRequired(mcp_convert::check_input_request(
                    input_required,
                )?))
            }
            _ => Err(client_error(ServiceError::UnexpectedResponse)),
        }
    }

    async fn complete(
        &self,
        mut request: CompleteRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CompleteResult, ErrorData> {
        let running = self.gateway.active_config();
        let agent = self.authorize_read(&running, &context).await?;
        request.meta = Some(mcp_convert::strip_request_meta(context.meta.clone()));
        let link = match &mut request.r#ref {
            Reference::Prompt(prompt) => {
                find_prompt(&running, &agent, &prompt.name).map(|(link, name)| {
                    prompt.name = name;
                    link
                })
            }
            Reference::Resource(resource) => {
                ResourceLocation::resolve(&running, &agent, &resource.uri).ok().map(|location| {
                    resource.uri = location.uri;
                    location.link
                })
            }
            _ => None,
        };
        let link =
            link.ok_or_else(|| ErrorData::invalid_params("unknown prompt or resource", None))?;
        let request = ClientRequest::CompleteRequest(CompleteRequest::new(request));
        match Box::pin(self.forward_request(&link, request, &context)).await? {
            ServerResult::CompleteResult(mut result) => {
                result.meta = result.meta.map(mcp_convert::strip_result_meta);
                Ok(result)
            }
            _ => Err(client_error(ServiceError::UnexpectedResponse)),
        }
    }

    async fn set_level(
        &self,
        request: SetLevelRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        let running = self.gateway.active_config();
        let agent = self.authorize_read(&running, &context).await?;
        *lock(&self.level) = Some(request.level);
        // A disconnected upstream gets the level when it connects again.
        let all = running
            .upstreams_by_agent
            .get(&agent)
            .into_iter()
            .flatten()
            .inspect(|link| *lock(&link.log_level) = Some(request.level));
        let links = all.filter(|link| link.catalog().capabilities.logging.is_some());
        let send_level = |link: &Arc<crate::upstream::UpstreamSupervisor>| {
            let (link, request) = (Arc::clone(link), request.clone());
            async move {
                if let Some(peer) = link.peer() {
                    let _ = link.send_request(peer.set_level(request)).await;
                }
            }
        };
        futures_util::future::join_all(links.map(send_level)).await;
        Ok(())
    }

    async fn subscribe(
        &self,
        request: SubscribeRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        let running = self.gateway.active_config();
        let listener = self.create_listener(&running, &context, true).await?;
        let location = ResourceLocation::resolve(&running, &listener.agent, &request.uri)?;
        self.has_subscriptions.store(true, Ordering::Relaxed);
        self.gateway
            .subscribe(&location, self.connection_id, &listener, Some(context.peer.clone()))
            .await
    }

    async fn unsubscribe(
        &self,
        request: UnsubscribeRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        self.gateway.unsubscribe(self.connection_id, &request.uri).await
    }

    fn accepted_subscription_filter(
        &self,
        requested: &SubscriptionFilter,
    ) -> Option<SubscriptionFilter> {
        // Over HTTP the caller is unknown here. Unsupported entries were removed from the request
        // before.
        let Some(fixed) = &self.stdio_identity else { return Some(requested.clone()) };
        let running = self.gateway.active_config();
        let agent = identity::resolve_agent(&running, &fixed.caller, fixed.agent.as_deref());
        Some(agent.map_or_else(
            |_| SubscriptionFilter::new(),
            |agent| self.supported_subset(&running, &fixed.caller, &agent, requested),
        ))
    }

    async fn listen(&self, context: SubscriptionContext) -> Result<(), ErrorData> {
        self.stream_changes(context).await
    }
}

/// Finds the upstream that has a prompt, and the name of the prompt there.
fn find_prompt(
    running: &ActiveConfig,
    agent: &str,
    name: &str,
) -> Option<(Arc<crate::upstream::UpstreamSupervisor>, String)> {
    running
        .upstreams_by_agent
        .get(agent)?
        .iter()
        .filter(|link| link.upstream.exposes_prompts)
        .find_map(|link| {
            let upstream_name = name.strip_prefix(&link.upstream.prefix)?;
            link.catalog()
                .prompts
                .iter()
                .any(|prompt| prompt.name == upstream_name)
                .then(|| (Arc::clone(link), upstream_name.to_owned()))
        })
}
