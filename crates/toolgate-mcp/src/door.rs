//! The door for MCP: a request becomes a call, and what it came to becomes an answer. What is decided is decided by the gate.

use std::sync::Arc;
use std::sync::Mutex;

use rmcp::model::*;
use rmcp::service::{NotificationContext, RequestContext, SubscriptionContext};
use rmcp::{ErrorData, RoleServer, ServerHandler};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use toolgate::{Answer, Call, SessionKey};

use crate::gateway::{Gateway, Running, lock};
use crate::identity::{self, Fixed};
use crate::parked::{Underway, Waits};
use crate::render;
use crate::upstream::{FromUpstream, Line};

/// Two calls with the same key are one.
const KEY_META: &str = "toolgate/idempotencyKey";
/// An approval to use.
const APPROVAL_META: &str = "toolgate/approval";
/// The model's turn.
const TURN_META: &str = "toolgate/turn";
/// How many entries a list has before it goes on elsewhere.
const PAGE: usize = 200;
/// What the question for approval is called.
const APPROVAL: &str = "toolgate_approval";

/// One connection.
pub(crate) struct Door {
    pub(crate) gateway: Gateway,
    pub(crate) fixed: Option<Fixed>,
    level: Mutex<Option<LoggingLevel>>,
}

impl Door {
    pub(crate) const fn new(gateway: Gateway, fixed: Option<Fixed>) -> Self {
        Self { gateway, fixed, level: Mutex::new(None) }
    }

    fn agent(&self, running: &Running, context: &RequestContext<RoleServer>) -> Result<(String, String), ErrorData> {
        identity::caller(running, self.fixed.as_ref(), context).map(|(caller, agent)| (caller.principal, agent))
    }

    /// What it can do, for an agent or for any.
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
            // Words of upstreams are for the model only where somebody lets them through as a whole.
            if link.upstream.undeclared == toolgate::config::Undeclared::Open {
                instructions.extend(offer.instructions);
            }
        }
        let mut info = ServerConfig::new(capabilities).with_server_info(Implementation::new("toolgate", env!("CARGO_PKG_VERSION")));
        info.instructions = (!instructions.is_empty()).then(|| instructions.join("\n\n"));
        info
    }
}

/// A capability whose list may change.
fn changing<T>(mut capability: T, list_changed: impl FnOnce(&mut T) -> &mut Option<bool>) -> T {
    *list_changed(&mut capability) = Some(true);
    capability
}

/// One part of a list, and where it goes on.
fn page<T: Clone>(all: &[T], request: Option<&PaginatedRequestParams>) -> Result<(Vec<T>, Option<String>), ErrorData> {
    let begin = match request.and_then(|request| request.cursor.as_deref()) {
        None => 0,
        Some(cursor) => cursor
            .parse::<usize>()
            .ok()
            .filter(|at| *at <= all.len())
            .ok_or_else(|| ErrorData::invalid_params("this cursor is not known", None))?,
    };
    let part: Vec<T> = all.iter().skip(begin).take(PAGE).cloned().collect();
    let next = begin + part.len();
    Ok((part, (next < all.len()).then(|| next.to_string())))
}

/// What the other side of an upstream said, as our client hears it.
fn passed(error: rmcp::ServiceError) -> ErrorData {
    match error {
        rmcp::ServiceError::McpError(error) => error,
        _ => ErrorData::internal_error("the upstream cannot be reached", None),
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
        self.gateway.remember(context.peer);
    }

    async fn list_tools(
        &self,
        request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let running = self.gateway.running();
        let (principal, name) = self.agent(&running, &context)?;
        let agent = running.gate.agent(&name).ok_or_else(|| ErrorData::invalid_request("there is no such agent", None))?;
        let specs: Vec<_> = agent.tools_for(&principal).filter(|spec| !spec.is_run_by_client()).collect();
        let (specs, next) = page(&specs, request.as_ref())?;
        let tools = specs.into_iter().map(|spec| {
            let remote = running.exposed.get(&(name.clone(), spec.name().to_owned())).and_then(|one| {
                let link = running.upstreams.link(&one.upstream)?;
                link.offer().tools.into_iter().find(|tool| tool.name == one.tool)
            });
            render::tool(spec, remote.as_ref())
        });
        let mut result = ListToolsResult::with_all_items(tools.collect());
        result.next_cursor = next;
        Ok(result)
    }

    async fn call_tool(&self, request: CallToolRequestParams, context: RequestContext<RoleServer>) -> Result<CallToolResponse, ErrorData> {
        let _counted = self.gateway.count();
        let running = self.gateway.running();
        let key = identity::session(&self.gateway, &running, self.fixed.as_ref(), &context)?;
        if let Some(state) = &request.request_state {
            // Whoever comes back with an answer that was not asked for, or was given before, asks anew.
            if let Some(waits) = self.gateway.0.parked.take(&key, state) {
                return self.resume(&running, key, request, waits, &context).await;
            }
            return Err(ErrorData::invalid_params("this answer was not asked for, or was given before", None));
        }
        let call = call_of(key, &request, &context);
        self.begin(&running, call, &request, &context).await
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        // Which agent is meant is not known here; a name is the same tool wherever it is offered.
        let running = self.gateway.running();
        let spec =
            |agent: &String| running.gate.agent(agent)?.tools().find(|spec| spec.name() == name).map(|spec| render::tool(spec, None));
        running.agents.iter().find_map(spec)
    }

    async fn list_prompts(
        &self,
        request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListPromptsResult, ErrorData> {
        let running = self.gateway.running();
        let (_, agent) = self.agent(&running, &context)?;
        let mut prompts: Vec<Prompt> = Vec::new();
        for link in running.shared.get(&agent).into_iter().flatten().filter(|link| link.upstream.prompts) {
            for mut prompt in link.offer().prompts {
                prompt.name = format!("{}{}", link.upstream.prefix, prompt.name);
                prompts.push(prompt);
            }
        }
        let (prompts, next) = page(&prompts, request.as_ref())?;
        let mut result = ListPromptsResult::with_all_items(prompts);
        result.next_cursor = next;
        Ok(result)
    }

    async fn get_prompt(
        &self,
        mut request: GetPromptRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<GetPromptResponse, ErrorData> {
        let running = self.gateway.running();
        let (_, agent) = self.agent(&running, &context)?;
        let (link, name) = prompt_of(&running, &agent, &request.name)
            .ok_or_else(|| ErrorData::invalid_params(format!("there is no prompt `{}`", request.name), None))?;
        request.name = name;
        let peer = link.peer().ok_or_else(away)?;
        peer.get_prompt_once(request).await.map_err(passed)
    }

    async fn list_resources(
        &self,
        request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        let running = self.gateway.running();
        let (_, agent) = self.agent(&running, &context)?;
        let links = running.shared.get(&agent).into_iter().flatten().filter(|link| link.upstream.resources);
        let resources: Vec<_> = links.flat_map(|link| link.offer().resources).collect();
        let (resources, next) = page(&resources, request.as_ref())?;
        let mut result = ListResourcesResult::with_all_items(resources);
        result.next_cursor = next;
        Ok(result)
    }

    async fn list_resource_templates(
        &self,
        request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        let running = self.gateway.running();
        let (_, agent) = self.agent(&running, &context)?;
        let links = running.shared.get(&agent).into_iter().flatten().filter(|link| link.upstream.resources);
        let templates: Vec<_> = links.flat_map(|link| link.offer().templates).collect();
        let (templates, next) = page(&templates, request.as_ref())?;
        let mut result = ListResourceTemplatesResult::with_all_items(templates);
        result.next_cursor = next;
        Ok(result)
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        let running = self.gateway.running();
        let (_, agent) = self.agent(&running, &context)?;
        let link = resource_of(&running, &agent, &request.uri).ok_or_else(|| {
            ErrorData::resource_not_found(format!("there is no resource `{}`", request.uri), Some(json!({"uri": request.uri})))
        })?;
        link.peer().ok_or_else(away)?.read_resource_once(request).await.map_err(passed)
    }

    async fn complete(&self, mut request: CompleteRequestParams, context: RequestContext<RoleServer>) -> Result<CompleteResult, ErrorData> {
        let running = self.gateway.running();
        let (_, agent) = self.agent(&running, &context)?;
        let link = match &mut request.r#ref {
            Reference::Prompt(prompt) => prompt_of(&running, &agent, &prompt.name).map(|(link, name)| {
                prompt.name = name;
                link
            }),
            Reference::Resource(resource) => resource_of(&running, &agent, &resource.uri),
            _ => None,
        };
        let link = link.ok_or_else(|| ErrorData::invalid_params("there is nothing of this name", None))?;
        link.peer().ok_or_else(away)?.complete(request).await.map_err(passed)
    }

    async fn set_level(&self, request: SetLevelRequestParams, context: RequestContext<RoleServer>) -> Result<(), ErrorData> {
        let running = self.gateway.running();
        let (_, agent) = self.agent(&running, &context)?;
        *lock(&self.level) = Some(request.level);
        for link in running.shared.get(&agent).into_iter().flatten() {
            if link.offer().capabilities.logging.is_some()
                && let Some(peer) = link.peer()
            {
                let _ = peer.set_level(request.clone()).await;
            }
        }
        Ok(())
    }

    async fn subscribe(&self, request: SubscribeRequestParams, context: RequestContext<RoleServer>) -> Result<(), ErrorData> {
        let running = self.gateway.running();
        let (_, agent) = self.agent(&running, &context)?;
        let link = resource_of(&running, &agent, &request.uri)
            .ok_or_else(|| ErrorData::resource_not_found(format!("there is no resource `{}`", request.uri), None))?;
        {
            let mut subscriptions = self.gateway.0.subscriptions.lock().await;
            let peers = subscriptions.entry(request.uri.clone()).or_default();
            peers.retain(|peer| !peer.is_transport_closed());
            peers.push(context.peer.clone());
        }
        link.subscribe(&request.uri, true).await.map_err(passed)
    }

    async fn unsubscribe(&self, request: UnsubscribeRequestParams, context: RequestContext<RoleServer>) -> Result<(), ErrorData> {
        let running = self.gateway.running();
        let (_, agent) = self.agent(&running, &context)?;
        let link = resource_of(&running, &agent, &request.uri)
            .ok_or_else(|| ErrorData::resource_not_found(format!("there is no resource `{}`", request.uri), None))?;
        let last = {
            let mut subscriptions = self.gateway.0.subscriptions.lock().await;
            let Some(peers) = subscriptions.get_mut(&request.uri) else { return Ok(()) };
            peers.pop();
            peers.is_empty()
        };
        if last { link.subscribe(&request.uri, false).await.map_err(passed) } else { Ok(()) }
    }

    fn accepted_subscription_filter(&self, requested: &SubscriptionFilter) -> Option<SubscriptionFilter> {
        Some(requested.clone())
    }

    async fn listen(&self, context: SubscriptionContext) -> Result<(), ErrorData> {
        let running = self.gateway.running();
        let mut changes = self.gateway.0.changes.subscribe();
        let mut updates = running.upstreams.updates().subscribe();
        let accepted = context.accepted().clone();
        let wanted: Vec<String> = accepted.resource_subscriptions.clone().unwrap_or_default();
        for uri in &wanted {
            let (_, agent) = self.agent(&running, context.request_context())?;
            if let Some(link) = resource_of(&running, &agent, uri) {
                let _ = link.subscribe(uri, true).await;
            }
        }
        loop {
            tokio::select! {
                () = context.cancelled() => return Ok(()),
                () = self.gateway.0.stop.cancelled() => return Ok(()),
                changed = changes.changed() => {
                    if changed.is_err() {
                        return Ok(());
                    }
                    let sink = context.sink();
                    let _ = sink.notify_tool_list_changed().await;
                    let _ = sink.notify_prompt_list_changed().await;
                    let _ = sink.notify_resource_list_changed().await;
                }
                Ok(uri) = updates.recv() => {
                    if wanted.contains(&uri) {
                        let _ = context.sink().notify_resource_updated(uri).await;
                    }
                }
            }
        }
    }
}

fn away() -> ErrorData {
    ErrorData::internal_error("the upstream is away", None)
}

/// The upstream that has a prompt, and what it is called there.
fn prompt_of(running: &Running, agent: &str, name: &str) -> Option<(Arc<crate::upstream::Link>, String)> {
    running.shared.get(agent)?.iter().filter(|link| link.upstream.prompts).find_map(|link| {
        let bare = name.strip_prefix(&link.upstream.prefix)?;
        link.offer().prompts.iter().any(|prompt| prompt.name == bare).then(|| (Arc::clone(link), bare.to_owned()))
    })
}

/// The upstream that has a resource: by its name, by a pattern, or because there is no other.
fn resource_of(running: &Running, agent: &str, uri: &str) -> Option<Arc<crate::upstream::Link>> {
    let links: Vec<_> =
        running.shared.get(agent)?.iter().filter(|link| link.upstream.resources && link.offer().capabilities.resources.is_some()).collect();
    let named = links.iter().find(|link| link.offer().resources.iter().any(|resource| resource.uri == uri));
    let fits = |template: &str| {
        let head = template.split('{').next().unwrap_or_default();
        uri == template || (!head.is_empty() && uri.starts_with(head))
    };
    let by_pattern = || links.iter().find(|link| link.offer().templates.iter().any(|template| fits(&template.uri_template)));
    let only = || links.first().filter(|_| links.len() == 1);
    named.or_else(by_pattern).or_else(only).map(|link| Arc::clone(link))
}

/// The call that a request asks for.
fn call_of(key: SessionKey, request: &CallToolRequestParams, context: &RequestContext<RoleServer>) -> Call {
    let text = |name: &str| context.meta.get(name).and_then(Value::as_str).map(str::to_owned);
    let arguments = request.arguments.clone().map_or_else(|| json!({}), Value::Object);
    let mut call = Call::new(key, request.name.to_string(), arguments).client_id(context.id.to_string());
    call.idempotency_key = text(KEY_META);
    call.approval = text(APPROVAL_META);
    call.turn = context.meta.get(TURN_META).and_then(Value::as_u64);
    call
}

/// What a client was shown: an edited call is another call.
fn digest(request: &CallToolRequestParams) -> String {
    let arguments = request.arguments.clone().map_or_else(|| json!({}), Value::Object);
    toolgate::json::Digest::of(&toolgate::json::canonical(&json!([request.name, arguments]))).to_string()
}

/// Whether a client is of 2026-07-28 or later.
fn is_modern(context: &RequestContext<RoleServer>) -> bool {
    context.protocol_version().is_some_and(|version| version.as_str() >= ProtocolVersion::V_2026_07_28.as_str())
}

impl Door {
    /// The line from a client to the upstream of its call.
    fn line(
        &self,
        to_client: mpsc::UnboundedSender<FromUpstream>,
        inputs: Option<InputResponses>,
        context: &RequestContext<RoleServer>,
    ) -> Line {
        let level = match is_modern(context) {
            true => context.meta.log_level(),
            false => Some(lock(&self.level).unwrap_or(LoggingLevel::Info)),
        };
        let capabilities = context.client_capabilities().unwrap_or_default();
        Line { to_client, meta: context.meta.clone(), capabilities, level, inputs, answered: Mutex::default() }
    }

    /// Begins a call, and sees it through.
    async fn begin(
        &self,
        running: &Running,
        call: Call,
        request: &CallToolRequestParams,
        context: &RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let (to_client, heard) = mpsc::unbounded_channel();
        // What it answers to a question of ours was for us.
        let inputs = request.input_responses.clone().filter(|_| request.request_state.is_none());
        let line = Arc::new(self.line(to_client, inputs, context));
        let gate = running.gate.clone();
        let key = call.key.clone();
        let cancel = CancellationToken::new();
        let call = call.carrying(Arc::clone(&line)).cancelled_by(cancel.clone());
        let task = tokio::spawn(async move { gate.call(call).await });
        let underway = Underway { task, heard, line, cancel, asked: None, digest: digest(request) };
        self.accompany(running, key, request, underway, context).await
    }

    /// Stays with a call until it has ended, or its client has to be asked.
    async fn accompany(
        &self,
        running: &Running,
        key: SessionKey,
        request: &CallToolRequestParams,
        mut underway: Underway,
        context: &RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let modern = is_modern(context);
        // Whoever hangs up cancels the call; whoever is asked something does not.
        let hang_up = underway.cancel.clone().drop_guard();
        loop {
            tokio::select! {
                biased;
                () = context.ct.cancelled(), if !underway.cancel.is_cancelled() => underway.cancel.cancel(),
                Some(said) = underway.heard.recv() => match said {
                    FromUpstream::Progress(progress) => self.progress(progress, context).await,
                    FromUpstream::Log(message) => self.log(message, context).await,
                    question if !can_answer(&question, &underway.line.capabilities) => decline(question),
                    question if modern => match self.park(&key, question, underway) {
                        Some(asked) => {
                            hang_up.disarm();
                            return Ok(asked);
                        }
                        None => return Err(ErrorData::internal_error("too many calls wait for their clients", None)),
                    },
                    question => ask(question, context).await,
                },
                answer = &mut underway.task => {
                    hang_up.disarm();
                    let answer = answer.map_err(|_| ErrorData::internal_error("the call did not come to an end", None))?;
                    return self.answered(running, key, request, answer, &underway.line, modern, context).await;
                }
            }
        }
    }

    /// What a call came to. Where it waits for a person and the client has one, that person is asked.
    #[expect(clippy::too_many_arguments, reason = "all of it is one call")]
    async fn answered(
        &self,
        running: &Running,
        key: SessionKey,
        request: &CallToolRequestParams,
        answer: Answer,
        line: &Line,
        modern: bool,
        context: &RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        // What the protocol has a word for is not the tool's failure.
        if let Some(said) = answer.outcome.error().and_then(|error| error.upstream.as_ref())
            && let Some(code) = said.get("code").and_then(Value::as_i64).and_then(|code| i32::try_from(code).ok()).map(ErrorCode)
            && (code == ErrorCode::MISSING_REQUIRED_CLIENT_CAPABILITY
                || (code == ErrorCode::INVALID_PARAMS && request.input_responses.is_some()))
        {
            let message = said.get("message").and_then(Value::as_str).unwrap_or_default().to_owned();
            return Err(ErrorData::new(code, message, said.get("data").filter(|data| !data.is_null()).cloned()));
        }
        let plain = || Ok(render::result(&answer, line).into());
        let Some(waits) = answer.outcome.error().filter(|error| error.code == "approval_required").and_then(|error| error.approval.clone())
        else {
            return plain();
        };
        let can_ask = context.client_capabilities().is_some_and(|capabilities| capabilities.elicitation.is_some());
        let Ok(Some(approval)) = running.gate.approval(&waits.id).await else { return plain() };
        let effect = running
            .gate
            .agent(&key.agent)
            .and_then(|agent| agent.tools().find(|spec| spec.name() == &*approval.tool))
            .map(toolgate::Spec::effect);
        let named = approval.approvers.iter().all(|people| people.iter().any(|who| who == CLIENT));
        let left_to_client = if approval.approvers.is_empty() { effect != Some(toolgate::Effect::Destructive) } else { named };
        if !can_ask || !left_to_client {
            return plain();
        }
        let params = question(&approval);
        if modern {
            let parked = self.gateway.0.parked.park(&key, Waits::Approval { id: waits.id, digest: digest(request) });
            let Some(state) = parked else { return plain() };
            let requests = InputRequests::from([(APPROVAL.to_owned(), InputRequest::Elicitation(ElicitRequest::new(params)))]);
            return Ok(CallToolResponse::InputRequired(InputRequiredResult::new(Some(requests), Some(state))));
        }
        let Ok(said) = context.peer.create_elicitation(params).await else { return plain() };
        self.decide(running, key, request, &waits.id, &said, context).await
    }

    /// A client's user has answered.
    async fn decide(
        &self,
        running: &Running,
        key: SessionKey,
        request: &CallToolRequestParams,
        id: &str,
        said: &ElicitResult,
        context: &RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let yes = said.action == ElicitationAction::Accept
            && said.content.as_ref().and_then(|content| content.get("approve")) == Some(&json!(true));
        // Whoever closes the question has not refused: it can still be answered elsewhere.
        if yes || said.action == ElicitationAction::Decline || said.action == ElicitationAction::Accept {
            let approval = running.gate.approval(id).await.ok().flatten();
            let by = if approval.is_some_and(|approval| approval.approvers.is_empty()) {
                format!("the client of {}", key.principal)
            } else {
                CLIENT.to_owned()
            };
            if let Err(error) = running.gate.answer_approval(id, yes, &by).await {
                tracing::error!(%error, "an answer cannot be written down");
            }
        }
        let mut call = call_of(key, request, context);
        if yes {
            call = call.approval(id);
        }
        let line = self.line(mpsc::unbounded_channel().0, None, context);
        Box::pin(async move {
            if yes {
                return self.begin(running, call, request, context).await;
            }
            let answer = running.gate.call(call).await;
            Ok(render::result(&answer, &line).into())
        })
        .await
    }

    /// A client comes back with what it was asked for.
    async fn resume(
        &self,
        running: &Running,
        key: SessionKey,
        request: CallToolRequestParams,
        waits: Waits,
        context: &RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let mut responses = request.input_responses.clone().unwrap_or_default();
        match waits {
            Waits::Approval { id, digest: shown } => {
                if shown != digest(&request) {
                    // It was edited: it is judged as any other.
                    let call = call_of(key, &request, context);
                    return self.begin(running, call, &request, context).await;
                }
                let said: ElicitResult = responses
                    .remove(APPROVAL)
                    .and_then(|said| serde_json::from_value(said).ok())
                    .ok_or_else(|| ErrorData::invalid_params("the answer to the question for approval is missing", None))?;
                self.decide(running, key, &request, &id, &said, context).await
            }
            Waits::Upstream(mut underway) => {
                if underway.digest != digest(&request) {
                    return Err(ErrorData::invalid_params("this is another call than the one that was asked about", None));
                }
                match underway.asked.take() {
                    // What is missing in it, whoever asked knows best.
                    Some(FromUpstream::Inputs(_, reply)) => {
                        let _ = reply.send(Ok(responses));
                    }
                    Some(asked) => {
                        let said = responses.remove("input").ok_or_else(|| ErrorData::invalid_params("the answer is missing", None))?;
                        reply(asked, said);
                    }
                    None => {}
                }
                self.accompany(running, key, &request, *underway, context).await
            }
        }
    }

    /// Parks a call whose upstream wants to know something.
    fn park(&self, key: &SessionKey, question: FromUpstream, underway: Underway) -> Option<CallToolResponse> {
        let one = |request| InputRequests::from([("input".to_owned(), request)]);
        let requests = match &question {
            FromUpstream::Elicit(params, _) => one(InputRequest::Elicitation(ElicitRequest::new((**params).clone()))),
            FromUpstream::Sample(params, _) => one(InputRequest::CreateMessage(CreateMessageRequest::new((**params).clone()))),
            FromUpstream::Roots(_) => one(InputRequest::ListRoots(ListRootsRequest::default())),
            FromUpstream::Inputs(requests, _) => requests.clone(),
            FromUpstream::Progress(_) | FromUpstream::Log(_) => return None,
        };
        let waits = Waits::Upstream(Box::new(Underway { asked: Some(question), ..underway }));
        let state = self.gateway.0.parked.park(key, waits)?;
        Some(CallToolResponse::InputRequired(InputRequiredResult::new(Some(requests), Some(state))))
    }

    async fn progress(&self, mut progress: ProgressNotificationParam, context: &RequestContext<RoleServer>) {
        if let Some(token) = context.meta.get_progress_token() {
            progress.progress_token = token;
            let _ = context.peer.notify_progress(progress).await;
        }
    }

    async fn log(&self, message: LoggingMessageNotificationParam, context: &RequestContext<RoleServer>) {
        let wanted = context.meta.log_level().or(*lock(&self.level)).unwrap_or(LoggingLevel::Info);
        if rank(message.level) >= rank(wanted) {
            let _ = context.peer.notify_logging_message(message).await;
        }
    }
}

/// The approver who is whoever sits before the client.
const CLIENT: &str = "client";

const fn rank(level: LoggingLevel) -> u8 {
    match level {
        LoggingLevel::Debug => 0,
        LoggingLevel::Info => 1,
        LoggingLevel::Notice => 2,
        LoggingLevel::Warning => 3,
        LoggingLevel::Error => 4,
        LoggingLevel::Critical => 5,
        LoggingLevel::Alert => 6,
        LoggingLevel::Emergency => 7,
    }
}

/// What a person is asked.
fn question(approval: &toolgate::store::Approval) -> ElicitRequestParams {
    let shown = serde_json::to_string_pretty(&approval.shown).unwrap_or_default();
    let shown: String = shown.chars().take(2_000).collect();
    let message = format!("{}\n\nThe agent wants to call `{}` with\n{shown}", approval.reason, approval.tool);
    let schema = ElicitationSchema::builder().required_bool("approve").build();
    ElicitRequestParams::FormElicitationParams {
        meta: None,
        message,
        requested_schema: schema.unwrap_or_else(|_| ElicitationSchema::new(Default::default())),
    }
}

/// Asks a client of an earlier revision, in the middle of its request.
async fn ask(question: FromUpstream, context: &RequestContext<RoleServer>) {
    let cannot = |error: rmcp::ServiceError| passed(error);
    match question {
        FromUpstream::Elicit(params, reply) => {
            let _ = reply.send(context.peer.create_elicitation(*params).await.map_err(cannot));
        }
        FromUpstream::Sample(params, reply) => {
            let _ = reply.send(context.peer.create_message(*params).await.map_err(cannot));
        }
        FromUpstream::Roots(reply) => {
            let _ = reply.send(context.peer.list_roots().await.map_err(cannot));
        }
        FromUpstream::Inputs(requests, reply) => {
            let _ = reply.send(ask_all(requests, context).await);
        }
        FromUpstream::Progress(_) | FromUpstream::Log(_) => {}
    }
}

/// Asks a client of an earlier revision one thing after the other.
async fn ask_all(requests: InputRequests, context: &RequestContext<RoleServer>) -> Result<InputResponses, ErrorData> {
    let unread = |_| ErrorData::internal_error("the client's answer cannot be passed on", None);
    let mut responses = InputResponses::new();
    for (key, request) in requests {
        let said = match request {
            InputRequest::Elicitation(request) => {
                serde_json::to_value(context.peer.create_elicitation(request.params).await.map_err(passed)?)
            }
            InputRequest::CreateMessage(request) => {
                serde_json::to_value(context.peer.create_message(request.params).await.map_err(passed)?)
            }
            InputRequest::ListRoots(_) => serde_json::to_value(context.peer.list_roots().await.map_err(passed)?),
            _ => return Err(ErrorData::invalid_request("this is not known here", None)),
        };
        responses.insert(key, said.map_err(unread)?);
    }
    Ok(responses)
}

/// Whether a client can be asked this.
fn can_answer(question: &FromUpstream, capabilities: &ClientCapabilities) -> bool {
    let can = |request: &InputRequest| match request {
        InputRequest::Elicitation(_) => capabilities.elicitation.is_some(),
        InputRequest::CreateMessage(_) => capabilities.sampling.is_some(),
        InputRequest::ListRoots(_) => capabilities.roots.is_some(),
        _ => false,
    };
    match question {
        FromUpstream::Elicit(..) => capabilities.elicitation.is_some(),
        FromUpstream::Sample(..) => capabilities.sampling.is_some(),
        FromUpstream::Roots(_) => capabilities.roots.is_some(),
        FromUpstream::Inputs(requests, _) => requests.values().all(can),
        FromUpstream::Progress(_) | FromUpstream::Log(_) => true,
    }
}

/// The client cannot be asked.
fn decline(question: FromUpstream) {
    let cannot = || ErrorData::invalid_request("the client cannot be asked this", None);
    match question {
        FromUpstream::Elicit(_, reply) => drop(reply.send(Err(cannot()))),
        FromUpstream::Sample(_, reply) => drop(reply.send(Err(cannot()))),
        FromUpstream::Roots(reply) => drop(reply.send(Err(cannot()))),
        FromUpstream::Inputs(_, reply) => drop(reply.send(Err(cannot()))),
        FromUpstream::Progress(_) | FromUpstream::Log(_) => {}
    }
}

/// Gives an upstream what a client has said.
fn reply(asked: FromUpstream, said: Value) {
    let unread = || ErrorData::invalid_params("the client's answer cannot be read", None);
    match asked {
        FromUpstream::Elicit(_, reply) => {
            let _ = reply.send(serde_json::from_value(said).map_err(|_| unread()));
        }
        FromUpstream::Sample(_, reply) => {
            let _ = reply.send(serde_json::from_value(said).map_err(|_| unread()));
        }
        FromUpstream::Roots(reply) => {
            let _ = reply.send(serde_json::from_value(said).map_err(|_| unread()));
        }
        FromUpstream::Inputs(..) | FromUpstream::Progress(_) | FromUpstream::Log(_) => {}
    }
}
