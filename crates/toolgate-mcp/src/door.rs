//! Implements the MCP server: turns requests into calls and outcomes into responses.
//!
//! The pipeline makes all decisions.

mod hearing;
mod wanted;

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use rmcp::model::*;
use rmcp::service::{NotificationContext, RequestContext, SubscriptionContext};
use rmcp::{ErrorData, RoleServer, ServerHandler, ServiceError};
use serde_json::Value;
use tokio_util::sync::CancellationToken;
use toolgate::ToolError;

use crate::asking::Questions;
use crate::calls::Client;
use crate::gateway::{Gateway, Running, lock};
use crate::identity::{self, Fixed};
use crate::render;
use crate::resources::{self, Place};

/// Maximum number of entries on a page of a list.
const PAGE: usize = 200;

/// MCP server handler of one connection.
pub(crate) struct Door {
    pub(crate) gateway: Gateway,
    pub(crate) fixed: Option<Fixed>,
    pub(crate) level: Mutex<Option<LoggingLevel>>,
    /// Unique number of this connection.
    number: u64,
    greeted: AtomicBool,
    /// Whether the connection has subscribed to a resource.
    subscribes: AtomicBool,
    /// Cancelled when the client disconnects.
    pub(crate) gone: CancellationToken,
    pub(crate) questions: Questions,
}

tokio::task_local! {
    /// Agent and principal of the current HTTP request, if the caller may act as the agent.
    ///
    /// rmcp calls `get_tool` without the context of the request.
    pub(crate) static AGENT: Option<(String, String)>;
}

static DOORS: AtomicU64 = AtomicU64::new(0);

/// Ends the subscriptions of the connection.
impl Drop for Door {
    fn drop(&mut self) {
        // Most connections serve one request without subscriptions and need not take the shared
        // lock.
        if self.subscribes.load(Ordering::Relaxed) {
            self.gateway.unsubscribe_all(self.number);
        }
    }
}

impl Door {
    pub(crate) fn new(gateway: Gateway, fixed: Option<Fixed>) -> Self {
        let number = DOORS.fetch_add(1, Ordering::Relaxed);
        Self {
            gateway,
            fixed,
            level: Mutex::new(None),
            number,
            greeted: AtomicBool::new(false),
            subscribes: AtomicBool::new(false),
            gone: CancellationToken::new(),
            questions: Questions::default(),
        }
    }

    fn agent(&self, running: &Running, context: &RequestContext<RoleServer>) -> Result<(String, String), ErrorData> {
        identity::caller(running, self.fixed.as_ref(), context.extensions.get()).map(|(caller, agent)| (caller.principal, agent))
    }

    /// Returns the agent of a request that is not a call.
    ///
    /// A pause that stops calls also stops these requests.
    async fn reader(&self, running: &Running, context: &RequestContext<RoleServer>) -> Result<String, ErrorData> {
        let key = identity::session(&self.gateway, running, self.fixed.as_ref(), &Client::of(context))?;
        match running.gate.stopped(&key).await {
            None => Ok(key.agent.to_string()),
            Some(error) => Err(stopped(&error)),
        }
    }

    /// Returns the server information for one agent, or for all agents.
    fn info(&self, running: &Running, agent: Option<&str>) -> ServerConfig {
        let mut capabilities = ServerCapabilities::default();
        capabilities.tools = Some(changing(ToolsCapability::default(), |tools| &mut tools.list_changed));
        let links = || running.shared.iter().filter(|(name, _)| agent.is_none_or(|agent| agent == *name)).flat_map(|(_, links)| links);
        let mut instructions = Vec::new();
        for link in links() {
            let offer = link.offer();
            if link.upstream.prompts && offer.capabilities.prompts.is_some() {
                capabilities.prompts = Some(changing(PromptsCapability::default(), |prompts| &mut prompts.list_changed));
            }
            if link.upstream.resources
                && let Some(theirs) = &offer.capabilities.resources
            {
                let subscribe =
                    theirs.subscribe == Some(true) || capabilities.resources.as_ref().is_some_and(|ours| ours.subscribe == Some(true));
                let mut ours = changing(ResourcesCapability::default(), |resources| &mut resources.list_changed);
                ours.subscribe = Some(subscribe);
                capabilities.resources = Some(ours);
            }
            if (link.upstream.prompts || link.upstream.resources) && offer.capabilities.completions.is_some() {
                capabilities.completions = Some(JsonObject::new());
            }
            if offer.capabilities.logging.is_some() {
                capabilities.logging = Some(JsonObject::new());
            }
            // The model may read the instructions of an upstream only if the configuration opens
            // the upstream as a whole.
            if link.upstream.undeclared == toolgate::config::Undeclared::Open {
                instructions.extend(offer.instructions.clone().filter(|words| crate::upstream::is_plain(words)));
            }
        }
        let mut info = ServerConfig::new(capabilities).with_server_info(Implementation::new("toolgate", env!("CARGO_PKG_VERSION")));
        info.instructions = (!instructions.is_empty()).then(|| instructions.join("\n\n"));
        info
    }
}

/// Converts a pause into an MCP error with the same error data as for a call.
pub(crate) fn stopped(error: &ToolError) -> ErrorData {
    ErrorData::invalid_request(error.message.clone(), serde_json::to_value(error).ok())
}

/// Sets `list_changed` of a capability.
fn changing<T>(mut capability: T, list_changed: impl FnOnce(&mut T) -> &mut Option<bool>) -> T {
    *list_changed(&mut capability) = Some(true);
    capability
}

/// Returns one page of a list and the cursor of the next page.
fn page<T: Clone>(all: &[T], request: Option<&PaginatedRequestParams>) -> Result<(Vec<T>, Option<String>), ErrorData> {
    let begin = match request.and_then(|request| request.cursor.as_deref()) {
        None => 0,
        Some(cursor) => cursor
            .parse::<usize>()
            .ok()
            .filter(|at| *at <= all.len())
            .ok_or_else(|| ErrorData::invalid_params("unknown cursor", None))?,
    };
    let part: Vec<T> = all.iter().skip(begin).take(PAGE).cloned().collect();
    let next = begin + part.len();
    Ok((part, (next < all.len()).then(|| next.to_string())))
}

/// Converts an error of an upstream for the client.
pub(crate) fn passed(error: rmcp::ServiceError) -> ErrorData {
    match error {
        rmcp::ServiceError::McpError(error) => error,
        rmcp::ServiceError::Timeout { timeout } => {
            ErrorData::internal_error(format!("the upstream did not answer within {timeout:?}"), None)
        }
        _ => ErrorData::internal_error("cannot reach the upstream", None),
    }
}

impl ServerHandler for Door {
    fn get_info(&self) -> ServerConfig {
        self.info(&self.gateway.running(), self.fixed.as_ref().and_then(|fixed| fixed.agent.as_deref()))
    }

    async fn initialize(
        &self,
        request: InitializeRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<InitializeResult, ErrorData> {
        let running = self.gateway.running();
        let (_, agent) = self.agent(&running, &context)?;
        context.peer.set_peer_info(request.clone());
        let negotiated = self.negotiate_initialize(&request)?;
        let mut info = self.info(&running, Some(&agent));
        info.protocol_version = negotiated.protocol_version;
        Ok(info)
    }

    async fn discover(&self, context: RequestContext<RoleServer>) -> Result<DiscoverResult, ErrorData> {
        let running = self.gateway.running();
        let (_, agent) = self.agent(&running, &context)?;
        Ok(DiscoverResult::from_server_info(self.supported_protocol_versions().into_owned(), self.info(&running, Some(&agent))))
    }

    async fn on_initialized(&self, context: NotificationContext<RoleServer>) {
        // A client may repeat the notification, but is registered once.
        if !self.greeted.swap(true, Ordering::Relaxed) {
            self.gateway.remember(context.peer);
        }
    }

    async fn list_tools(
        &self,
        request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let running = self.gateway.running();
        let (principal, name) = self.agent(&running, &context)?;
        let agent = running.gate.agent(&name).ok_or_else(|| ErrorData::invalid_request("unknown agent", None))?;
        let specs: Vec<_> = agent.tools_for(&principal).filter(|spec| !spec.is_run_by_client()).collect();
        let (specs, next) = page(&specs, request.as_ref())?;
        let tools = specs.into_iter().map(|spec| {
            let remote = running.exposed.get(&(name.clone(), spec.name().to_owned())).and_then(|one| {
                let link = running.upstreams.link(&one.upstream)?;
                link.offer().tools.iter().find(|tool| tool.name == one.tool).cloned()
            });
            render::tool(spec, remote.as_ref())
        });
        let mut result = ListToolsResult::with_all_items(tools.collect());
        result.next_cursor = next;
        Ok(result)
    }

    async fn call_tool(&self, request: CallToolRequestParams, context: RequestContext<RoleServer>) -> Result<CallToolResponse, ErrorData> {
        self.call(request, &Client::of(&context)).await
    }

    async fn on_custom_request(&self, request: CustomRequest, context: RequestContext<RoleServer>) -> Result<CustomResult, ErrorData> {
        let tool = request.params.as_ref().and_then(|params| params.get("name")).and_then(Value::as_str);
        Err(match tool.filter(|_| request.method == "tools/call") {
            // The library could not parse these parameters as a call.
            Some(tool) => self.misshapen(tool, &Client::of(&context)).await,
            None => ErrorData::new(ErrorCode::METHOD_NOT_FOUND, request.method, None),
        })
    }

    async fn on_progress(&self, said: ProgressNotificationParam, _: NotificationContext<RoleServer>) {
        self.questions.progress(said).await;
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        let (agent, principal) = AGENT.try_with(Option::clone).ok().flatten()?;
        self.gateway.running().gate.agent(&agent)?.tool_for(&principal, name).map(|spec| render::tool(spec, None))
    }

    async fn list_prompts(
        &self,
        request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListPromptsResult, ErrorData> {
        let running = self.gateway.running();
        let agent = self.reader(&running, &context).await?;
        let links = running.shared.get(&agent).into_iter().flatten().filter(|link| link.upstream.prompts);
        let offers: Vec<_> = links.map(|link| (link, link.offer())).collect();
        let (mut names, mut found) = (HashSet::new(), Vec::new());
        for (link, offer) in &offers {
            for prompt in &offer.prompts {
                let name = format!("{}{}", link.upstream.prefix, prompt.name);
                // Of several prompts with one name, `get_prompt` uses the first.
                if names.insert(name.clone()) {
                    found.push((name, prompt));
                }
            }
        }
        let (found, next) = page(&found, request.as_ref())?;
        let named = found.into_iter().map(|(name, prompt)| {
            let mut prompt = prompt.clone();
            prompt.name = name;
            prompt.meta = prompt.meta.map(render::clean);
            prompt
        });
        let mut result = ListPromptsResult::with_all_items(named.collect());
        result.next_cursor = next;
        Ok(result)
    }

    async fn get_prompt(
        &self,
        mut request: GetPromptRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<GetPromptResponse, ErrorData> {
        let running = self.gateway.running();
        let agent = self.reader(&running, &context).await?;
        let (link, name) = prompt_of(&running, &agent, &request.name)
            .ok_or_else(|| ErrorData::invalid_params(format!("there is no prompt `{}`", request.name), None))?;
        request.name = name;
        request.meta = Some(render::own_words(context.meta.clone()));
        request.input_responses = request.input_responses.map(render::unspoofed);
        let request = ClientRequest::GetPromptRequest(GetPromptRequest::new(request));
        match Box::pin(self.wanted(&link, request, &context)).await? {
            ServerResult::GetPromptResult(result) => {
                let mut result = render::unspoofed(result);
                result.meta = result.meta.map(render::of_result);
                Ok(GetPromptResponse::Complete(result))
            }
            ServerResult::InputRequiredResult(asked) => Ok(GetPromptResponse::InputRequired(render::asked_back(asked)?)),
            _ => Err(passed(ServiceError::UnexpectedResponse)),
        }
    }

    async fn list_resources(
        &self,
        request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        let running = self.gateway.running();
        let agent = self.reader(&running, &context).await?;
        let links = running.shared.get(&agent).into_iter().flatten().filter(|link| link.upstream.resources);
        let offers: Vec<_> = links.map(|link| (link, link.offer())).collect();
        let mut found = Vec::new();
        for (link, offer) in &offers {
            found.extend(offer.resources.iter().filter(|one| resources::may_be_called(link, &one.uri)).map(|one| (*link, one)));
        }
        let (found, next) = page(&found, request.as_ref())?;
        let named = found.into_iter().map(|(link, resource)| {
            let mut resource = resource.clone();
            resource.uri = resources::address(link, &resource.uri);
            resource.meta = resource.meta.map(render::clean);
            resource
        });
        let mut result = ListResourcesResult::with_all_items(named.collect());
        result.next_cursor = next;
        Ok(result)
    }

    async fn list_resource_templates(
        &self,
        request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        let running = self.gateway.running();
        let agent = self.reader(&running, &context).await?;
        let links = running.shared.get(&agent).into_iter().flatten().filter(|link| link.upstream.resources);
        let offers: Vec<_> = links.map(|link| (link, link.offer())).collect();
        let mut found = Vec::new();
        for (link, offer) in &offers {
            found.extend(offer.templates.iter().filter(|one| resources::may_be_called(link, &one.uri_template)).map(|one| (*link, one)));
        }
        let (found, next) = page(&found, request.as_ref())?;
        let named = found.into_iter().map(|(link, template)| {
            let mut template = template.clone();
            template.uri_template = resources::address(link, &template.uri_template);
            template.meta = template.meta.map(render::clean);
            template
        });
        let mut result = ListResourceTemplatesResult::with_all_items(named.collect());
        result.next_cursor = next;
        Ok(result)
    }

    async fn read_resource(
        &self,
        mut request: ReadResourceRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        let running = self.gateway.running();
        let agent = self.reader(&running, &context).await?;
        let place = Place::find(&running, &agent, &request.uri)?;
        request.uri.clone_from(&place.uri);
        request.meta = Some(render::own_words(context.meta.clone()));
        request.input_responses = request.input_responses.map(render::unspoofed);
        let request = ClientRequest::ReadResourceRequest(ReadResourceRequest::new(request));
        match Box::pin(self.wanted(&place.link, request, &context)).await? {
            ServerResult::ReadResourceResult(result) => {
                let mut result = render::unspoofed(result);
                result.meta = result.meta.map(render::of_result);
                // Access depends on the caller, so a shared cache must not store the result.
                result.cache_scope = result.cache_scope.map(|_| CacheScope::Private);
                place.named(&mut result.contents);
                Ok(ReadResourceResponse::Complete(result))
            }
            ServerResult::InputRequiredResult(asked) => Ok(ReadResourceResponse::InputRequired(render::asked_back(asked)?)),
            _ => Err(passed(ServiceError::UnexpectedResponse)),
        }
    }

    async fn complete(&self, mut request: CompleteRequestParams, context: RequestContext<RoleServer>) -> Result<CompleteResult, ErrorData> {
        let running = self.gateway.running();
        let agent = self.reader(&running, &context).await?;
        request.meta = Some(render::own_words(context.meta.clone()));
        let link = match &mut request.r#ref {
            Reference::Prompt(prompt) => prompt_of(&running, &agent, &prompt.name).map(|(link, name)| {
                prompt.name = name;
                link
            }),
            Reference::Resource(resource) => Place::find(&running, &agent, &resource.uri).ok().map(|place| {
                resource.uri = place.uri;
                place.link
            }),
            _ => None,
        };
        let link = link.ok_or_else(|| ErrorData::invalid_params("unknown prompt or resource", None))?;
        let request = ClientRequest::CompleteRequest(CompleteRequest::new(request));
        match Box::pin(self.wanted(&link, request, &context)).await? {
            ServerResult::CompleteResult(mut result) => {
                result.meta = result.meta.map(render::of_result);
                Ok(result)
            }
            _ => Err(passed(ServiceError::UnexpectedResponse)),
        }
    }

    async fn set_level(&self, request: SetLevelRequestParams, context: RequestContext<RoleServer>) -> Result<(), ErrorData> {
        let running = self.gateway.running();
        let agent = self.reader(&running, &context).await?;
        *lock(&self.level) = Some(request.level);
        // A disconnected upstream gets the level when it connects again.
        let all = running.shared.get(&agent).into_iter().flatten().inspect(|link| *lock(&link.level) = Some(request.level));
        let links = all.filter(|link| link.offer().capabilities.logging.is_some());
        let tell = |link: &Arc<crate::upstream::Link>| {
            let (link, request) = (Arc::clone(link), request.clone());
            async move {
                if let Some(peer) = link.peer() {
                    let _ = link.asked(peer.set_level(request)).await;
                }
            }
        };
        futures_util::future::join_all(links.map(tell)).await;
        Ok(())
    }

    async fn subscribe(&self, request: SubscribeRequestParams, context: RequestContext<RoleServer>) -> Result<(), ErrorData> {
        let running = self.gateway.running();
        let listener = self.listener(&running, &context, true).await?;
        let place = Place::find(&running, &listener.agent, &request.uri)?;
        self.subscribes.store(true, Ordering::Relaxed);
        self.gateway.subscribe(&place, self.number, &listener, Some(context.peer.clone())).await
    }

    async fn unsubscribe(&self, request: UnsubscribeRequestParams, _: RequestContext<RoleServer>) -> Result<(), ErrorData> {
        self.gateway.unsubscribe(self.number, &request.uri).await
    }

    fn accepted_subscription_filter(&self, requested: &SubscriptionFilter) -> Option<SubscriptionFilter> {
        // Over HTTP the caller is unknown here. Unsupported entries were removed from the request
        // before.
        let Some(fixed) = &self.fixed else { return Some(requested.clone()) };
        let running = self.gateway.running();
        let agent = identity::agent(&running, &fixed.caller, fixed.agent.as_deref());
        Some(agent.map_or_else(|_| SubscriptionFilter::new(), |agent| self.honoured(&running, &fixed.caller, &agent, requested)))
    }

    async fn listen(&self, context: SubscriptionContext) -> Result<(), ErrorData> {
        self.tell(context).await
    }
}

/// Finds the upstream that has a prompt, and the name of the prompt there.
fn prompt_of(running: &Running, agent: &str, name: &str) -> Option<(Arc<crate::upstream::Link>, String)> {
    running.shared.get(agent)?.iter().filter(|link| link.upstream.prompts).find_map(|link| {
        let bare = name.strip_prefix(&link.upstream.prefix)?;
        link.offer().prompts.iter().any(|prompt| prompt.name == bare).then(|| (Arc::clone(link), bare.to_owned()))
    })
}
