//! Implements the decision API for agents that run their tools themselves.
//!
//! `check` admits a call, `report` records its result.

use http::StatusCode;
use http::request::Parts;
use serde::Deserialize;
use serde_json::{Value, json};
use toolgate::{Answer, Arguments, Call, CallEffects, Failure, SessionKey};

use crate::gateway::ActiveConfig;
use crate::server::identity;
use crate::server::identity::Caller;
use crate::server::malformed_call;
use crate::server::parse_message;
use crate::server::parse_message::RawArguments;
use crate::server::stdio::message_bounds;
use crate::server::tool_call::{
    MAX_IDEMPOTENCY_KEY_CHARS, has_unapproved_arguments, is_key_too_long,
};

/// Body of a `check` or `report` request.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct DecisionRequest {
    /// ID of the call, chosen by the client; a report repeats it.
    id: String,
    agent: Option<String>,
    session: Option<String>,
    tool: String,
    #[serde(default = "empty_object")]
    arguments: Value,
    turn: Option<u64>,
    stop_reason: Option<String>,
    idempotency_key: Option<String>,
    approval: Option<String>,
    /// Report only: the result of the tool. `null` is a valid result.
    #[serde(default, deserialize_with = "deserialize_nullable")]
    result: Option<Value>,
    /// Report only: the error, if the tool failed.
    error: Option<ReportedFailure>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ReportedFailure {
    message: String,
    #[serde(default)]
    effects: Option<CallEffects>,
}

/// Deserializes `null` as `Some(Value::Null)`, to distinguish it from a missing field.
fn deserialize_nullable<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Value>, D::Error> {
    Value::deserialize(deserializer).map(Some)
}

fn empty_object() -> Value {
    json!({})
}

type ApiErrorResponse = (StatusCode, Value);

/// Handles `POST /v1/calls/check` and `POST /v1/calls/report`.
pub(crate) async fn handle_decision_request(
    running: &ActiveConfig,
    verb: &str,
    caller: &Caller,
    parts: &Parts,
    text: &[u8],
) -> Result<Value, ApiErrorResponse> {
    if !matches!(verb, "check" | "report") {
        return Err((
            StatusCode::NOT_FOUND,
            json!({"error": "unknown path; use /v1/calls/check or /v1/calls/report"}),
        ));
    }
    let (request, raw) =
        DecisionRequest::parse(text, running).map_err(|error| error.response(None))?;
    let names = request.call_names();
    let parsed = request.into_call(raw, running, verb, caller, parts);
    // Only a check must repeat the approved arguments. If a report has other arguments, the
    // difference is recorded.
    let parsed = match parsed {
        Ok((call, None)) if call.approval.is_some() => {
            match has_unapproved_arguments(running, &call).await {
                true => Err(ApiError::invalid(
                    "the approval is for other arguments; send the approved arguments, or none",
                )),
                false => Ok((call, None)),
            }
        }
        parsed => parsed,
    };
    match parsed {
        Ok((call, None)) => Ok(match running.runtime.admit(call).await {
            Ok(admitted) => {
                json!({"decision": "allow", "callId": admitted.call.to_string(), "arguments": admitted.arguments.value()})
            }
            Err(answer) => denial_response(&answer),
        }),
        Ok((call, Some(result))) => {
            let answer = running.runtime.report(call, result).await;
            Ok(
                json!({"callId": answer.call.to_string(), "outcome": answer.outcome.to_json(), "receipt": answer.receipt()}),
            )
        }
        Err(error) => Err(error.record(running, caller, names).await),
    }
}

/// Reason why a request is rejected.
struct ApiError {
    status: StatusCode,
    reason: String,
    /// Whether the request is invalid, rather than forbidden for the caller.
    is_invalid: bool,
}

impl ApiError {
    fn invalid(why: impl Into<String>) -> Self {
        Self { status: StatusCode::BAD_REQUEST, reason: why.into(), is_invalid: true }
    }

    fn rejected(status: StatusCode, why: String) -> Self {
        Self { status, reason: why, is_invalid: false }
    }

    /// Records the rejected call, and builds the error response.
    async fn record(
        self,
        running: &ActiveConfig,
        caller: &Caller,
        named: CallNames,
    ) -> ApiErrorResponse {
        let key = identity::rejection_session(running, caller, named.agent.as_deref());
        let call = Call::new(key, named.tool, json!({})).client_id(named.id);
        let why = malformed_call::truncate_reason(&self.reason);
        let call = if self.is_invalid {
            call.with_parse_error(why)
        } else {
            call.with_transport_rejection(why)
        };
        let answer = running.runtime.call(call).await;
        self.response(Some(&answer))
    }

    /// Builds the error response.
    fn response(self, answer: Option<&Answer>) -> ApiErrorResponse {
        let why = malformed_call::truncate_reason(&self.reason);
        let mut body = malformed_call::error_contract(&why, answer);
        if let Some(fields) = body.as_object_mut() {
            fields.insert("error".to_owned(), why.into());
        }
        (self.status, body)
    }
}

/// Names in a readable request body, for the row of a rejected call.
struct CallNames {
    id: String,
    tool: String,
    agent: Option<String>,
}

/// Maximum length of a name in the row of a rejected call.
const MAX_RECORDED_NAME_CHARS: usize = 200;

/// Fields of a request body, for error messages.
const REQUEST_FIELDS: &str = "`id`, `tool`, `arguments`, `agent`, `session`, `turn`, `stopReason`, `idempotencyKey`, `approval`; in a report `result` or `error`";

/// Returns the first invalid field and its expected type.
///
/// The message omits the value, because it may be a secret.
fn find_invalid_field(body: &Value) -> Option<String> {
    let Some(fields) = body.as_object() else { return Some("not a JSON object".to_owned()) };
    if let Some(missing) = ["id", "tool"].into_iter().find(|key| !fields.contains_key(*key)) {
        return Some(format!("`{missing}` is required"));
    }
    let (null, effects) = (Value::Null, ["none", "rolled_back", "done", "unknown"]);
    fields.iter().find_map(|(key, value)| {
        let must_be = match key.as_str() {
            "id" | "tool" => (!value.is_string()).then_some("text"),
            "agent" | "session" | "stopReason" | "idempotencyKey" | "approval" => {
                (!value.is_string() && !value.is_null()).then_some("text")
            }
            "turn" => (!value.is_u64() && !value.is_null()).then_some("a whole number"),
            "arguments" | "result" => None,
            "error" => {
                let part = |name: &str| value.get(name).unwrap_or(&null);
                let known = part("effects").as_str().is_some_and(|effect| effects.contains(&effect));
                let fits = part("message").is_string() && (known || part("effects").is_null());
                let only = value.as_object().is_some_and(|parts| parts.keys().all(|name| matches!(name.as_str(), "message" | "effects")));
                let wrong = !(value.is_null() || (fits && only));
                wrong.then_some("an object with `message` (text) and `effects` (none, rolled_back, done or unknown)")
            }
            _ => {
                let key: String = key.chars().filter(|c| !c.is_control()).take(64).collect();
                return Some(format!("unknown field `{key}`; known fields: {REQUEST_FIELDS}"));
            }
        };
        must_be.map(|kind| format!("`{key}` must be {kind}"))
    })
}

/// A call to check (`None`), or a call to report with its result.
type CheckOrReport = (Call, Option<Result<Value, Failure>>);

impl DecisionRequest {
    /// Parses a body strictly.
    ///
    /// Invalid arguments are kept as text: the argument gate rejects them and records a row.
    fn parse(
        text: &[u8],
        running: &ActiveConfig,
    ) -> Result<(Self, Option<RawArguments>), ApiError> {
        let (bounds, read_error) =
            (message_bounds(running.settings.max_request_bytes), |why: String| {
                ApiError::invalid(format!("cannot read the body: {why}"))
            });
        let (value, raw) = match toolgate_json::parse(text, &bounds) {
            Ok(value) => (value, None),
            Err(error) => {
                let split = parse_message::split_arguments(text);
                let split = split.and_then(|(rest, raw)| {
                    Some((toolgate_json::parse(&rest, &bounds).ok()?, Some(raw)))
                });
                split.ok_or_else(|| read_error(error.message))?
            }
        };
        if let Some(why) = find_invalid_field(&value) {
            return Err(read_error(why));
        }
        // The message of serde would quote the value, which may be a secret.
        let request = serde_json::from_value(value)
            .map_err(|_| read_error("a field has an invalid value".to_owned()))?;
        Ok((request, raw))
    }

    fn call_names(&self) -> CallNames {
        let short = |name: &str| name.chars().take(MAX_RECORDED_NAME_CHARS).collect();
        CallNames {
            id: short(&self.id),
            tool: short(&self.tool),
            agent: self.agent.as_deref().map(short),
        }
    }

    fn into_call(
        self,
        raw: Option<RawArguments>,
        running: &ActiveConfig,
        verb: &str,
        caller: &Caller,
        parts: &Parts,
    ) -> Result<CheckOrReport, ApiError> {
        if self.id.is_empty() || self.id.chars().count() > 200 {
            return Err(ApiError::invalid("`id` must have 1 to 200 characters"));
        }
        for (name, key) in [("idempotencyKey", &self.idempotency_key), ("approval", &self.approval)]
        {
            if key.as_ref().is_some_and(|key| is_key_too_long(key)) {
                return Err(ApiError::invalid(format!(
                    "`{name}` may have at most {MAX_IDEMPOTENCY_KEY_CHARS} characters"
                )));
            }
        }
        let forbidden = |why| ApiError::rejected(StatusCode::FORBIDDEN, why);
        let agent =
            identity::resolve_agent(running, caller, self.agent.as_deref()).map_err(forbidden)?;
        let named = identity::resolve_session_name(caller, self.session.as_deref(), Some(parts));
        let named = named.map_err(|error| match identity::is_invalid_error(&error) {
            true => ApiError::invalid(error.message),
            false => ApiError::rejected(StatusCode::BAD_REQUEST, error.message.into_owned()),
        })?;
        let session = named.ok_or_else(|| ApiError::invalid("`session` is required"))?;
        let result = match (verb, self.result, self.error) {
            ("check", None | Some(Value::Null), None) => None,
            ("check", ..) => {
                return Err(ApiError::invalid("`result` and `error` are only allowed in a report"));
            }
            (_, Some(result), None) => Some(Ok(result)),
            (_, None | Some(Value::Null), Some(failed)) => {
                let failure = Failure::business("client_tool_failed", failed.message);
                Some(Err(match failed.effects {
                    Some(effects) => failure.effects(effects),
                    None => failure,
                }))
            }
            _ => return Err(ApiError::invalid("a report must have either `result` or `error`")),
        };
        let arguments =
            raw.map_or(Arguments::Value(self.arguments), |raw| Arguments::Text(raw.0.to_vec()));
        let mut call = Call::new(
            SessionKey::new(agent, caller.principal.clone(), session),
            self.tool,
            arguments,
        )
        .client_id(self.id);
        (call.turn, call.stop_reason) = (
            self.turn,
            self.stop_reason
                .map(|why| why.chars().take(256).collect::<String>())
                .filter(|why| !why.is_empty()),
        );
        (call.idempotency_key, call.approval) = (self.idempotency_key, self.approval);
        Ok((call, result))
    }
}

/// Builds the response for a call that must not run.
fn denial_response(answer: &Answer) -> Value {
    let error = answer.outcome.error();
    // A replayed call returns its recorded outcome, success or error.
    let replayed = error.is_none_or(|error| error.replayed);
    let decision = match error {
        _ if replayed => "replay",
        Some(error) if error.code == "approval_required" => "ask",
        _ => "deny",
    };
    json!({
        "decision": decision, "callId": answer.call.to_string(), "gate": answer.gate.name(), "rule": answer.rule,
        "error": error, "outcome": replayed.then(|| answer.outcome.to_json()), "receipt": answer.receipt(),
    })
}

/// Returns the OpenAPI description of the HTTP API.
pub(crate) fn openapi_description() -> Value {
    let call = json!({
        "id": {"type": "string", "minLength": 1, "maxLength": 200, "description": "ID of the call, chosen by the client; a report repeats it."},
        "agent": {"type": "string", "description": "The agent that makes the call [default: the default agent]."},
        "session": {"type": "string", "minLength": 1, "maxLength": 128, "description": "Name of the session; also accepted as the header Toolgate-Session."},
        "tool": {"type": "string"},
        "arguments": {"type": "object"},
        "turn": {"type": "integer", "minimum": 0},
        "stopReason": {"type": "string", "description": "Why the model stopped to make the call."},
        "idempotencyKey": {"type": "string", "maxLength": MAX_IDEMPOTENCY_KEY_CHARS},
        "approval": {"type": "string", "maxLength": MAX_IDEMPOTENCY_KEY_CHARS, "description": "ID of an approval to use; send the approved arguments, or none."},
    });
    let mut report = call.clone();
    if let Some(fields) = report.as_object_mut() {
        fields.insert("result".to_owned(), json!({"description": "Result of the tool."}));
        fields.insert(
            "error".to_owned(),
            json!({"type": "object", "required": ["message"], "properties": {"message": {"type": "string"}, "effects": {"enum": ["none", "rolled_back", "done", "unknown"]}}}),
        );
    }
    let body = |properties: Value| json!({"required": true, "content": {"application/json": {"schema": {"type": "object", "additionalProperties": false, "required": ["id", "tool"], "properties": properties}}}});
    let refusals = json!({
        "400": {"description": "The request is invalid."}, "401": {"description": "A token is required."},
        "403": {"description": "The caller may not act as this agent."}, "429": {"description": "Too many requests."},
    });
    let answers = |description: &str, schema: Value| {
        let mut answers = refusals.clone();
        if let Some(answers) = answers.as_object_mut() {
            answers.insert("200".to_owned(), json!({"description": description, "content": {"application/json": {"schema": schema}}}));
        }
        answers
    };
    let page = |summary: &str, id: &str| json!({"get": {"operationId": id, "summary": summary, "security": [], "responses": {"200": {"description": "Healthy."}, "503": {"description": "Not healthy."}}}});
    json!({
        "openapi": "3.1.0",
        "info": {"title": "toolgate", "version": env!("CARGO_PKG_VERSION"), "description": "Decisions for agents that run their tools themselves. MCP is at /mcp."},
        "security": [{"bearer": []}, {}],
        "components": {"securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
        "paths": {
            "/v1/calls/check": {"post": {
                "operationId": "check", "summary": "Check whether a call may run. An allowed call must be reported.", "requestBody": body(call),
                "responses": answers("The decision.", json!({"type": "object", "required": ["decision", "callId"], "properties": {
                    "decision": {"enum": ["allow", "deny", "ask", "replay"]}, "callId": {"type": "string"},
                    "arguments": {"type": "object", "description": "For `allow`: the arguments to run the tool with."},
                    "gate": {"type": "string"}, "rule": {"type": ["string", "null"]}, "error": {"type": ["object", "null"]}, "outcome": {"type": ["object", "null"]}, "receipt": {},
                }})),
            }},
            "/v1/calls/report": {"post": {
                "operationId": "report", "summary": "Report the result of an allowed call.", "requestBody": body(report),
                "responses": answers("The recorded outcome.", json!({"type": "object", "required": ["callId", "outcome"], "properties": {"callId": {"type": "string"}, "outcome": {"type": "object"}, "receipt": {}}})),
            }},
            "/healthz": page("The process is running.", "healthz"),
            "/readyz": page("The gateway accepts calls, and the canary call is denied.", "readyz"),
        },
    })
}
