//! The decision API: for agents that run their tools themselves, the two halves of the path.

use http::StatusCode;
use http::request::Parts;
use serde::Deserialize;
use serde_json::{Value, json};
use toolgate::{Answer, Call, Effects, Failure, SessionKey};

use crate::gateway::Running;
use crate::identity::{self, Caller};

/// A call that a client wants to make, or has made.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Asked {
    /// What the client calls it; a report names the same one.
    id: String,
    agent: Option<String>,
    session: Option<String>,
    tool: String,
    #[serde(default = "nothing")]
    arguments: Value,
    turn: Option<u64>,
    stop_reason: Option<String>,
    idempotency_key: Option<String>,
    approval: Option<String>,
    /// A report: what the tool gave. Nothing is something, too.
    #[serde(default, deserialize_with = "given")]
    result: Option<Value>,
    /// A report: what went wrong instead.
    error: Option<Failed>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Failed {
    message: String,
    #[serde(default)]
    effects: Option<Effects>,
}

/// What is `null` was given all the same.
fn given<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(deserializer).map(Some)
}

fn nothing() -> Value {
    json!({})
}

type Refused = (StatusCode, String);

/// `POST /v1/calls/check` and `POST /v1/calls/report`.
pub(crate) async fn call(running: &Running, verb: &str, caller: &Caller, parts: &Parts, body: Value) -> Result<Value, Refused> {
    let wrong = |why: String| (StatusCode::BAD_REQUEST, why);
    if !matches!(verb, "check" | "report") {
        return Err((StatusCode::NOT_FOUND, "there are /v1/calls/check and /v1/calls/report".to_owned()));
    }
    let asked: Asked = serde_json::from_value(body).map_err(|error| wrong(format!("the body cannot be read: {error}")))?;
    if asked.id.is_empty() || asked.id.len() > 200 {
        return Err(wrong("`id` has 1 to 200 letters".to_owned()));
    }
    let agent = identity::agent(running, caller, asked.agent.as_deref()).map_err(|why| (StatusCode::FORBIDDEN, why));
    let named = identity::named(caller, asked.session.as_deref(), Some(parts)).map_err(wrong);
    let (agent, session) = match agent.and_then(|agent| Ok((agent, named?))) {
        Ok((agent, session)) => (agent, session.ok_or_else(|| wrong("`session` names the conversation".to_owned()))?),
        // Nobody is let in who is turned away here, and it is written down.
        Err((status, why)) => {
            let key = identity::turned_away(running, caller, asked.agent.as_deref());
            running.gate.call(Call::new(key, asked.tool, json!({})).client_id(asked.id).turned_away(why.clone())).await;
            return Err((status, why));
        }
    };
    let mut call = Call::new(SessionKey::new(agent, caller.principal.clone(), session), asked.tool, asked.arguments).client_id(asked.id);
    (call.turn, call.stop_reason) =
        (asked.turn, asked.stop_reason.map(|why| why.chars().take(256).collect::<String>()).filter(|why| !why.is_empty()));
    (call.idempotency_key, call.approval) = (asked.idempotency_key, asked.approval);
    match verb {
        "check" => {
            if asked.result.is_some_and(|result| !result.is_null()) || asked.error.is_some() {
                return Err(wrong("`result` and `error` are for a report".to_owned()));
            }
            Ok(match running.gate.admit_kept(call).await {
                Ok(kept) => json!({"decision": "allow", "callId": kept.call.to_string(), "arguments": kept.arguments.value()}),
                Err(answer) => refused(&answer),
            })
        }
        _ => {
            let result = match (asked.result, asked.error) {
                (Some(result), None) => Ok(result),
                (None | Some(Value::Null), Some(failed)) => {
                    let failure = Failure::business("client_tool_failed", failed.message);
                    Err(match failed.effects {
                        Some(effects) => failure.effects(effects),
                        None => failure,
                    })
                }
                _ => return Err(wrong("a report has a `result` or an `error`".to_owned())),
            };
            let answer = running.gate.report_kept(call, result).await;
            Ok(json!({"callId": answer.call.to_string(), "outcome": answer.outcome.to_json(), "receipt": answer.receipt()}))
        }
    }
}

/// A call that is not to be made.
fn refused(answer: &Answer) -> Value {
    let decision = match answer.outcome.error() {
        Some(error) if error.code == "approval_required" => "ask",
        Some(_) => "deny",
        // It was made before: what it came to is here.
        None => "replay",
    };
    json!({
        "decision": decision, "callId": answer.call.to_string(), "gate": answer.gate.name(), "rule": answer.rule,
        "error": answer.outcome.error(), "outcome": answer.outcome.success().map(|_| answer.outcome.to_json()), "receipt": answer.receipt(),
    })
}

/// The description of all this, for programs.
pub(crate) fn description() -> Value {
    let call = json!({
        "id": {"type": "string", "minLength": 1, "maxLength": 200, "description": "What the client calls the call; a report names the same one."},
        "agent": {"type": "string", "description": "The default agent unless said."},
        "session": {"type": "string", "minLength": 1, "maxLength": 128, "description": "The conversation; also as the header Toolgate-Session."},
        "tool": {"type": "string"},
        "arguments": {"type": "object"},
        "turn": {"type": "integer", "minimum": 0},
        "stopReason": {"type": "string", "description": "Why the model stopped to make the call."},
        "idempotencyKey": {"type": "string"},
        "approval": {"type": "string", "description": "An approval to use."},
    });
    let mut report = call.clone();
    if let Some(fields) = report.as_object_mut() {
        fields.insert("result".to_owned(), json!({"description": "What the tool gave."}));
        fields.insert(
            "error".to_owned(),
            json!({"type": "object", "required": ["message"], "properties": {"message": {"type": "string"}, "effects": {"enum": ["none", "rolled_back", "done", "unknown"]}}}),
        );
    }
    let body = |properties: Value| json!({"required": true, "content": {"application/json": {"schema": {"type": "object", "additionalProperties": false, "required": ["id", "tool"], "properties": properties}}}});
    let refusals = json!({
        "400": {"description": "The request cannot be read."}, "401": {"description": "A token is needed."},
        "403": {"description": "Not as this agent."}, "429": {"description": "Too many requests."},
    });
    let answers = |description: &str, schema: Value| {
        let mut answers = refusals.clone();
        if let Some(answers) = answers.as_object_mut() {
            answers.insert("200".to_owned(), json!({"description": description, "content": {"application/json": {"schema": schema}}}));
        }
        answers
    };
    let page = |summary: &str, id: &str| json!({"get": {"operationId": id, "summary": summary, "security": [], "responses": {"200": {"description": "As it should be."}, "503": {"description": "Not as it should be."}}}});
    json!({
        "openapi": "3.1.0",
        "info": {"title": "toolgate", "version": env!("CARGO_PKG_VERSION"), "description": "Decisions for agents that run their tools themselves. MCP is at /mcp."},
        "security": [{"bearer": []}, {}],
        "components": {"securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
        "paths": {
            "/v1/calls/check": {"post": {
                "operationId": "check", "summary": "May this call be made? An allowed one must be reported.", "requestBody": body(call),
                "responses": answers("The decision.", json!({"type": "object", "required": ["decision", "callId"], "properties": {
                    "decision": {"enum": ["allow", "deny", "ask", "replay"]}, "callId": {"type": "string"},
                    "arguments": {"type": "object", "description": "allow: what to run with."},
                    "gate": {"type": "string"}, "rule": {"type": ["string", "null"]}, "error": {"type": ["object", "null"]}, "outcome": {"type": ["object", "null"]}, "receipt": {},
                }})),
            }},
            "/v1/calls/report": {"post": {
                "operationId": "report", "summary": "What came of a call that was allowed.", "requestBody": body(report),
                "responses": answers("What is recorded.", json!({"type": "object", "required": ["callId", "outcome"], "properties": {"callId": {"type": "string"}, "outcome": {"type": "object"}, "receipt": {}}})),
            }},
            "/healthz": page("The process is there.", "healthz"),
            "/readyz": page("Calls can be taken, and a call that must be refused is refused.", "readyz"),
        },
    })
}
