//! A call through the door: begun, accompanied while its upstream asks back, and answered.

mod client;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use opentelemetry::trace::FutureExt as _;
use rmcp::ErrorData;
use rmcp::model::*;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use toolgate::{Agent, Answer, Arguments, Call, SessionKey, Spec, code};

use self::client::lacking;
use crate::asking::{CLIENT, ask, can_answer, can_elicit, decline, elicit, is_left_to_client, question, reply};
use crate::door::Door;
use crate::gateway::{Running, lock};
use crate::identity;
use crate::misread;
use crate::parked::{Presence, Task, Underway, Waits};
use crate::render;
use crate::seat::Seat;
use crate::upstream::{FromUpstream, Line};

pub(crate) use client::{Client, Ear};

/// Two calls with the same key are one.
const KEY_META: &str = "toolgate/idempotencyKey";
/// An approval to use.
const APPROVAL_META: &str = "toolgate/approval";
/// The model's turn.
const TURN_META: &str = "toolgate/turn";
/// Why the model stopped to make the call.
const STOP_META: &str = "toolgate/stopReason";
/// What the question for approval is called.
const APPROVAL: &str = "toolgate_approval";
/// What a question is called that an upstream of an earlier revision asks.
const INPUT: &str = "input";
/// How many words of an upstream wait for its client.
pub(crate) const WORDS: usize = 256;
/// The longest key, which is kept for as long as what it stands for.
pub(crate) const LONGEST_KEY: usize = 1_024;
/// How long a client's user may think.
const PATIENCE: Duration = Duration::from_secs(15 * 60);

/// Whether a key is longer than it may be: in letters, as the description of the decision API counts them.
pub(crate) fn is_long(key: &str) -> bool {
    key.chars().count() > LONGEST_KEY
}

/// The call that a request asks for.
fn call_of(key: SessionKey, request: &CallToolRequestParams, client: &Client<'_>) -> Result<Call, ErrorData> {
    // A key that is not understood would be a key that does not hold.
    let text = |name: &str| match client.meta.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) if !text.is_empty() => Ok(Some(text.clone())),
        Some(_) => Err(ErrorData::invalid_params(format!("`{name}` must be text"), None)),
    };
    let short = |name: &str| match text(name)? {
        Some(text) if is_long(&text) => Err(ErrorData::invalid_params(format!("`{name}` has at most {LONGEST_KEY} letters"), None)),
        text => Ok(text),
    };
    let arguments = match client.raw {
        Some(raw) => Arguments::Text(raw.0.to_vec()),
        None => Arguments::Value(request.arguments.clone().map_or_else(|| json!({}), Value::Object)),
    };
    let mut call = Call::new(key, request.name.to_string(), arguments).client_id(client.id.clone());
    call.idempotency_key = short(KEY_META)?;
    call.approval = short(APPROVAL_META)?;
    call.stop_reason = text(STOP_META)?.map(|why| why.chars().take(256).collect());
    call.turn = match client.meta.get(TURN_META) {
        None | Some(Value::Null) => None,
        Some(turn) => Some(turn.as_u64().ok_or_else(|| ErrorData::invalid_params(format!("`{TURN_META}` must be a whole number"), None))?),
    };
    Ok(call)
}

/// Whether a call names an approval, and other arguments than that is for: what is approved would run, and nobody would be told.
pub(crate) async fn names_others(running: &Running, call: &Call) -> bool {
    let Some(id) = &call.approval else { return false };
    let given = match &call.arguments {
        Arguments::Value(given) => given,
        Arguments::Text(_) => &Value::Null,
    };
    if given.as_object().is_some_and(JsonObject::is_empty) {
        return false;
    }
    match running.gate.approval(id).await {
        Ok(Some(approval)) => approval.key == call.key && *approval.tool == *call.tool && running.gate.is_for_others(&approval, given),
        // Whatever else is wrong with it, the gate says.
        _ => false,
    }
}

/// What a client was shown: an edited call is another call.
fn digest(request: &CallToolRequestParams) -> String {
    let arguments = request.arguments.clone().map_or_else(|| json!({}), Value::Object);
    toolgate::json::Digest::of(&toolgate::json::canonical(&json!([request.name, arguments]))).to_string()
}

impl Door {
    /// A request for a call.
    pub(crate) async fn call(&self, request: CallToolRequestParams, client: &Client<'_>) -> Result<CallToolResponse, ErrorData> {
        // In this order: what is counted when it ends has its time.
        let _counted = self.gateway.count();
        if self.gateway.0.stop.is_cancelled() {
            return Err(ErrorData::internal_error("this is ending", None));
        }
        let running = self.gateway.running();
        let key = match identity::of_call(&self.gateway, &running, self.fixed.as_ref(), client)? {
            Ok(key) => key,
            Err((key, error)) if identity::is_misread(&error) => return Err(self.misread(key, &request, client, error).await),
            // Nobody is let in who is turned away here, and it is written down.
            Err((key, refused)) => {
                return match call_of(key.clone(), &request, client) {
                    Ok(call) => self.begin(&running, call.turned_away(refused.message), &request, client).await,
                    Err(error) => Err(self.misread(key, &request, client, error).await),
                };
            }
        };
        let parked = &self.gateway.0.parked;
        let unasked = || ErrorData::invalid_params("this answer was not asked for, or was given before", None);
        let waits = match (&request.request_state, &request.input_responses) {
            (Some(state), _) => parked.take(&key, state).map(Some).ok_or_else(unasked),
            // An approval that nobody asked for is none.
            (None, Some(said)) if said.contains_key(APPROVAL) => Err(unasked()),
            // Some clients forget the state of what they were asked. What nobody asked is not heard, and is asked again.
            (None, Some(_)) => Ok(parked.take_unstated(&key, &digest(&request))),
            (None, None) => Ok(None),
        };
        match waits {
            Ok(Some(waits)) => self.resume(key, request, waits, client).await,
            Ok(None) => self.anew(&running, key, &request, client).await,
            Err(error) => Err(self.misread(key, &request, client, error).await),
        }
    }

    /// Begins a call as a request asks for it.
    async fn anew(
        &self,
        running: &Running,
        key: SessionKey,
        request: &CallToolRequestParams,
        client: &Client<'_>,
    ) -> Result<CallToolResponse, ErrorData> {
        let call = match call_of(key.clone(), request, client) {
            Ok(call) => call,
            Err(error) => return Err(self.misread(key, request, client, error).await),
        };
        if names_others(running, &call).await {
            let error = ErrorData::invalid_params("the approval is for other arguments; send the same along with it, or none", None);
            return Err(self.misread(key, request, client, error).await);
        }
        self.begin(running, call, request, client).await
    }

    /// A request for a call that is none of the protocol's: it is refused as such, and the call has its row.
    async fn misread(&self, key: SessionKey, request: &CallToolRequestParams, client: &Client<'_>, mut error: ErrorData) -> ErrorData {
        let _counted = self.gateway.count();
        let call = Call::new(key, request.name.to_string(), json!({})).client_id(client.id.clone());
        let answer = misread::refuse(&self.gateway.gate(), call, &error.message).await;
        error.data = Some(misread::contract(&error.message, Some(&answer)));
        error
    }

    /// A request that calls itself a call, and has the shape of something else.
    pub(crate) async fn misshapen(&self, tool: &str, client: &Client<'_>) -> ErrorData {
        let error = ErrorData::invalid_params("the parameters of this call cannot be read", None);
        let running = self.gateway.running();
        match identity::of_call(&self.gateway, &running, self.fixed.as_ref(), client) {
            Ok(Ok(key) | Err((key, _))) => self.misread(key, &CallToolRequestParams::new(tool.to_owned()), client, error).await,
            Err(refused) => refused,
        }
    }

    /// From which level on a client wants to hear of what goes on; `None` is nothing, which is what a newer one wants unless it says so.
    pub(crate) fn level(&self, client: &Client<'_>) -> Option<LoggingLevel> {
        match client.modern {
            true => client.meta.log_level(),
            false => Some(lock(&self.level).unwrap_or(LoggingLevel::Info)),
        }
    }

    /// The line from a client to the upstream of its call.
    fn line(&self, to_client: mpsc::Sender<FromUpstream>, client: &Client<'_>) -> Line {
        let capabilities = client.capabilities.clone().unwrap_or_default();
        Line { to_client, meta: client.meta.clone(), capabilities, level: self.level(client), answered: Mutex::default() }
    }

    /// What a call of a client takes while somebody works for it.
    fn presence(&self, client: &Client<'_>) -> Presence {
        let seat = client.parts.and_then(|parts| parts.extensions.get::<Arc<Seat>>()).cloned();
        Presence::new(self.gateway.count(), seat)
    }

    /// Begins a call, and sees it through.
    async fn begin(
        &self,
        running: &Running,
        call: Call,
        request: &CallToolRequestParams,
        client: &Client<'_>,
    ) -> Result<CallToolResponse, ErrorData> {
        let (to_client, heard) = mpsc::channel(WORDS);
        let line = Arc::new(self.line(to_client, client));
        let gate = running.gate.clone();
        let key = call.key.clone();
        let cancel = CancellationToken::new();
        let call = call.carrying(Arc::clone(&line)).cancelled_by(cancel.clone());
        // Its request is counted already: whoever is counted beside that is somebody else.
        let among_others = *self.gateway.0.underway.borrow() > 1;
        // Counted until it is over, however long its client waits.
        let counted = Arc::new(Mutex::new(Some(self.presence(client))));
        let (counts, busy) = (Arc::clone(&counted), self.gateway.0.idle.busy(&key));
        let path = async move {
            let answer = gate.call(call).await;
            drop((counts, busy));
            answer
        };
        let task = Task::new(path.with_context(crate::trace::of(client)));
        // Who has to wait until its client has heard something goes on by itself; so does who is among others, with whom it takes turns
        // at the ledger: to wake it is less than to wake its connection.
        let task = if among_others || matches!(client.ear, Ear::Peer(_)) { task.apart() } else { task };
        let underway = Underway { task, heard, line, cancel, asked: None, digest: String::new(), counted };
        self.accompany(key, request, underway, client).await
    }

    /// Stays with a call until it has ended, or its client has to be asked.
    async fn accompany(
        &self,
        key: SessionKey,
        request: &CallToolRequestParams,
        mut underway: Underway,
        client: &Client<'_>,
    ) -> Result<CallToolResponse, ErrorData> {
        let modern = client.modern;
        // Whoever hangs up cancels the call; whoever is asked something does not.
        let hang_up = underway.cancel.clone().drop_guard();
        let mut asking = None;
        loop {
            let busy = asking.is_some();
            tokio::select! {
                biased;
                () = client.gone.cancelled(), if !underway.cancel.is_cancelled() => underway.cancel.cancel(),
                () = poll(&mut asking), if busy => asking = None,
                Some(said) = underway.heard.recv(), if !busy => match said {
                    FromUpstream::Progress(progress) => self.progress(progress, client).await,
                    FromUpstream::Log(message) => self.log(message, client).await,
                    question if !can_answer(&question, &underway.line.capabilities) => decline(question),
                    // Who cannot be waited for is not asked, and the upstream says what becomes of that.
                    question if modern && !self.gateway.0.parked.has_room(&key) => decline(question),
                    question if modern => match self.park(&key, question, underway, digest(request)) {
                        Some(asked) => {
                            hang_up.disarm();
                            return Ok(asked);
                        }
                        None => return Err(ErrorData::internal_error("too many calls wait for their clients", None)),
                    },
                    question => match client.ear {
                        Ear::Peer(peer) => asking = Some(Box::pin(ask(question, peer, &self.questions))),
                        Ear::Answer(_) => decline(question),
                    },
                },
                answer = &mut underway.task => {
                    drop(asking);
                    hang_up.disarm();
                    let answer = answer.ok_or_else(|| ErrorData::internal_error("the call did not come to an end", None))?;
                    // What was said in the same breath as the answer was said before it.
                    while let Ok(said) = underway.heard.try_recv() {
                        self.hear(said, client).await;
                    }
                    return self.answered(key, request, answer, &underway.line, client).await;
                }
            }
        }
    }

    /// What a call came to. Where it waits for a person and the client has one, that person is asked.
    async fn answered(
        &self,
        key: SessionKey,
        request: &CallToolRequestParams,
        answer: Answer,
        line: &Line,
        client: &Client<'_>,
    ) -> Result<CallToolResponse, ErrorData> {
        if let Some(error) = lacking(&answer, client) {
            return Err(error);
        }
        let running = self.gateway.running();
        let agent = running.gate.agent(&key.agent);
        // What is kept from whoever calls is answered as what is not there.
        let spec = agent.and_then(|agent| agent.tool_for(&key.principal, &request.name));
        // Who may not act as the agent does not learn what its tools look like.
        let forbidden = answer.outcome.error().is_some_and(|error| error.code == code::FORBIDDEN);
        let has_schema = spec.is_some_and(|spec| spec.output_schema().is_some()) && !forbidden;
        let refused = render::result(&answer, line, has_schema, agent.map(Agent::dialect).unwrap_or_default());
        let waits = answer.outcome.error().filter(|error| error.code == code::APPROVAL_REQUIRED).and_then(|error| error.approval.clone());
        let Some(waits) = waits else { return Ok(refused.into()) };
        let Ok(Some(approval)) = running.gate.approval(&waits.id).await else { return Ok(refused.into()) };
        let effect = spec.map(Spec::effect);
        let can_ask = |params: &ElicitRequestParams| client.capabilities.as_ref().is_some_and(|can| can_elicit(params, can));
        let Some(params) = question(&approval).filter(|params| can_ask(params) && is_left_to_client(&approval, effect)) else {
            return Ok(refused.into());
        };
        if client.modern {
            let parked = self
                .gateway
                .0
                .parked
                .park(&key, Waits::Approval { id: waits.id, digest: digest(request), refused: Box::new(refused.clone()) });
            let Some(state) = parked else { return Ok(refused.into()) };
            let requests = InputRequests::from([(APPROVAL.to_owned(), InputRequest::Elicitation(ElicitRequest::new(params)))]);
            // It is refused until somebody has said yes, and that is written down.
            let mut meta = MetaObject::default();
            render::sign(&mut meta, &answer);
            return Ok(CallToolResponse::InputRequired(InputRequiredResult::new(Some(requests), Some(state)).with_meta(meta)));
        }
        let Ear::Peer(peer) = client.ear else { return Ok(refused.into()) };
        let said = tokio::select! {
            biased;
            // It is refused until somebody has answered, and nobody waits for that when the gateway ends: nothing new would be begun.
            () = self.gateway.0.stop.cancelled() => return Ok(refused.into()),
            () = client.gone.cancelled() => return Ok(refused.into()),
            said = tokio::time::timeout(PATIENCE, Box::pin(elicit(params, peer, &self.questions))) => said,
        };
        let Ok(Ok(said)) = said else { return Ok(refused.into()) };
        self.decide(key, request, &waits.id, &said, refused, client).await
    }

    /// A client's user has answered. What runs then is judged by what holds now.
    async fn decide(
        &self,
        key: SessionKey,
        request: &CallToolRequestParams,
        id: &str,
        said: &ElicitResult,
        refused: CallToolResult,
        client: &Client<'_>,
    ) -> Result<CallToolResponse, ErrorData> {
        let running = self.gateway.running();
        match identity::session(&self.gateway, &running, self.fixed.as_ref(), client) {
            Ok(now) if now == key => {}
            // Who is not let in any more has lost it; so has who speaks from somewhere else now.
            other => {
                let error = ErrorData::invalid_request("this is another conversation than the one that was asked", None);
                return Err(self.misread(key, request, client, other.err().unwrap_or(error)).await);
            }
        }
        let yes = said.action == ElicitationAction::Accept
            && said.content.as_ref().and_then(|content| content.get("approve")) == Some(&json!(true));
        let no = said.action == ElicitationAction::Decline || (said.action == ElicitationAction::Accept && !yes);
        let approval = running.gate.approval(id).await.ok().flatten();
        let effect = running.gate.agent(&key.agent).and_then(|agent| agent.tool(&request.name)).map(Spec::effect);
        // Who may answer goes by what the tool is by now.
        let Some(approval) = approval.filter(|approval| is_left_to_client(approval, effect)) else { return Ok(refused.into()) };
        let by = if approval.approvers.is_empty() { format!("the client of {}", key.principal) } else { CLIENT.to_owned() };
        // Whoever closes the question has not refused: it can still be answered elsewhere, and the call stands as it stood.
        let counts = (yes || no) && matches!(running.gate.answer_approval(id, yes, &by).await, Ok(true));
        if !counts {
            return Ok(refused.into());
        }
        // It is the same call that goes on, whatever was said. One that was refused is refused by the gate, and has its row.
        match call_of(key.clone(), request, client) {
            Ok(call) => Box::pin(self.begin(&running, call.approval(id), request, client)).await,
            Err(error) => Err(self.misread(key, request, client, error).await),
        }
    }

    /// A client comes back with what it was asked for.
    async fn resume(
        &self,
        key: SessionKey,
        request: CallToolRequestParams,
        waits: Waits,
        client: &Client<'_>,
    ) -> Result<CallToolResponse, ErrorData> {
        let mut responses = request.input_responses.clone().unwrap_or_default();
        match waits {
            Waits::Approval { id, digest: shown, refused } => {
                if shown != digest(&request) {
                    // It was edited: it is judged as any other.
                    return self.anew(&self.gateway.running(), key, &request, client).await;
                }
                let said: Option<ElicitResult> = responses.remove(APPROVAL).and_then(|said| serde_json::from_value(said).ok());
                match said {
                    Some(said) => self.decide(key, &request, &id, &said, *refused, client).await,
                    None => {
                        let error = ErrorData::invalid_params("the answer to the question for approval is missing", None);
                        Err(self.misread(key, &request, client, error).await)
                    }
                }
            }
            Waits::Upstream(mut underway) => {
                let all_at_once = matches!(underway.asked, None | Some(FromUpstream::Inputs(..)));
                let wrong = match underway.digest == digest(&request) {
                    false => Some("this is another call than the one that was asked about"),
                    true if !all_at_once && !responses.contains_key(INPUT) => Some("the answer is missing"),
                    true => None,
                };
                if let Some(why) = wrong {
                    // Nobody comes back for the one that was asked about.
                    underway.cancel.cancel();
                    return Err(self.misread(key, &request, client, ErrorData::invalid_params(why, None)).await);
                }
                *lock(&underway.counted) = Some(self.presence(client));
                match underway.asked.take() {
                    // What is missing in it, whoever asked knows best.
                    Some(FromUpstream::Inputs(asked, reply)) => {
                        responses.retain(|name, _| asked.contains_key(name));
                        reply.send(Ok(responses));
                    }
                    Some(asked) => reply(asked, responses.remove(INPUT).unwrap_or_default()),
                    None => {}
                }
                self.accompany(key, &request, *underway, client).await
            }
        }
    }

    /// Parks a call whose upstream wants to know something.
    fn park(&self, key: &SessionKey, question: FromUpstream, underway: Underway, digest: String) -> Option<CallToolResponse> {
        let one = |request| InputRequests::from([(INPUT.to_owned(), request)]);
        let requests = match &question {
            FromUpstream::Elicit(params, _) => one(InputRequest::Elicitation(ElicitRequest::new((**params).clone()))),
            FromUpstream::Sample(params, _) => one(InputRequest::CreateMessage(CreateMessageRequest::new((**params).clone()))),
            FromUpstream::Roots(_) => one(InputRequest::ListRoots(ListRootsRequest::default())),
            FromUpstream::Inputs(requests, _) => requests.clone(),
            FromUpstream::Progress(_) | FromUpstream::Log(_) => return None,
        };
        let task = underway.task.apart();
        let waits = Waits::Upstream(Box::new(Underway { asked: Some(question), digest, task, ..underway }));
        let state = self.gateway.0.parked.park(key, waits)?;
        Some(CallToolResponse::InputRequired(InputRequiredResult::new(Some(requests), Some(state))))
    }

    /// What an upstream says where it is not answered.
    pub(crate) async fn hear(&self, said: FromUpstream, client: &Client<'_>) {
        match said {
            FromUpstream::Progress(progress) => self.progress(progress, client).await,
            FromUpstream::Log(message) => self.log(message, client).await,
            question => decline(question),
        }
    }

    async fn progress(&self, mut progress: ProgressNotificationParam, client: &Client<'_>) {
        if let Some(token) = client.meta.get_progress_token() {
            progress.progress_token = token;
            progress.meta = progress.meta.map(render::of_word);
            client.tell(ProgressNotification::new(progress).into()).await;
        }
    }

    async fn log(&self, mut message: LoggingMessageNotificationParam, client: &Client<'_>) {
        if self.level(client).is_some_and(|wanted| rank(message.level) >= rank(wanted)) {
            message.meta = message.meta.map(render::of_word);
            client.tell(LoggingMessageNotification::new(message).into()).await;
        }
    }
}

/// What is asked now, if anything.
pub(crate) async fn poll<F: Future<Output = ()> + Unpin>(asking: &mut Option<F>) {
    match asking {
        Some(asking) => asking.await,
        None => std::future::pending().await,
    }
}

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
