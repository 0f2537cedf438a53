//! Generates a JSON Schema of the configuration file for editors.

use serde_json::{Value, json};

/// Returns the JSON Schema of `toolgate.toml`.
#[must_use]
pub fn config_schema() -> Value {
    let mut top = agent_schema();
    let included = json!({
        "name": {"type": "string", "description": "Name of the agent [default: default]"},
        "store": {"type": "string", "pattern": "\\S", "description": "Path of the ledger, relative to this file"},
        "retention": ref_schema("duration", "How long the ledger keeps rows [default: forever]. `toolgate serve` and the service of `toolgate hook` delete older rows."),
        "redact": {"$ref": "#/$defs/names", "description": "Regular expressions whose matches are redacted in every row"},
        "client": {"$ref": "#/$defs/client"},
        "gateway": {"$ref": "#/$defs/gateway"},
        "upstreams": {"type": "object", "additionalProperties": {"$ref": "#/$defs/upstream"}, "propertyNames": {"pattern": "^[a-z0-9_-]{1,32}$"}, "description": "MCP servers that provide tools, by name"},
        "mcp_servers": {"$ref": "#/$defs/names", "description": "JSON files with `mcpServers`, as clients use them, relative to this file"},
        "lint": {"type": "array", "items": {"$ref": "#/$defs/lint"}},
        "agents": {"type": "object", "additionalProperties": {"$ref": "#/$defs/agent"}, "description": "Several agents, by name"},
    });
    if let (Some(top), Value::Object(included)) =
        (top.get_mut("properties").and_then(Value::as_object_mut), included)
    {
        top.extend(included);
    }
    let mut schema = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "toolgate.toml",
        "description": "Agents with their tools, rules and limits",
        "$defs": {
            "names": {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
            "some": {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}], "description": "At least one name"},
            "bytes": {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": "^[0-9]+ *(B|KB|MB|GB)$"}]},
            "path": {"type": "string", "minLength": 1, "description": "Path into the arguments or the result, such as `/customer_id`"},
            "duration": {"type": "string", "pattern": "^\\s*[0-9Pp]", "examples": ["30s", "15m", "24h", "7d"]},
            "agent": agent_schema(),
            "tool": tool_schema(),
            "policy": policy_schema(),
            "condition": condition_schema(),
            "hook": hook_schema(),
            "budget": budget_schema(),
            "limits": limits_schema(),
            "client": client_schema(),
            "lint": lint_schema(),
            "normalization": normalization_schema(),
            "sandbox": sandbox_schema(),
            "upstream": upstream_schema(),
            "gateway": gateway_schema(),
            "reference": {"description": "Text in which `${NAME}` is an environment variable, or a file", "oneOf": [{"type": "string"}, object_schema(json!({"file": {"type": "string"}}), &["file"])]},
        },
    });
    if let (Some(schema), Value::Object(top)) = (schema.as_object_mut(), top) {
        schema.extend(top);
    }
    schema
}

fn object_schema(properties: Value, required: &[&str]) -> Value {
    json!({"type": "object", "additionalProperties": false, "properties": properties, "required": required})
}

fn ref_schema(name: &str, description: &str) -> Value {
    json!({"$ref": format!("#/$defs/{name}"), "description": description})
}

fn agent_schema() -> Value {
    object_schema(
        json!({
            "principals": ref_schema("names", "Principals that may use this agent [default: all]"),
            "max_output": {"type": "integer", "minimum": 0, "description": "Maximum size of a result in the context, in bytes"},
            "dialect": {"enum": ["standard", "bucket"], "description": "Format of errors for the model"},
            "files": {"type": "string", "minLength": 1, "description": "Directory that the tools work on, relative to this file"},
            "limits": {"$ref": "#/$defs/limits"},
            "include": ref_schema("names", "Policy files, relative to this file"),
            "tools": {"type": "object", "additionalProperties": {"$ref": "#/$defs/tool"}, "propertyNames": {"pattern": "^[a-z0-9_-]{1,64}$"}},
            "policy": {"type": "array", "items": {"$ref": "#/$defs/policy"}},
            "hooks": {"type": "array", "items": {"$ref": "#/$defs/hook"}},
            "upstreams": ref_schema("names", "Upstreams whose undeclared tools are offered [default: all, if this is the only agent]"),
        }),
        &[],
    )
}

fn tool_schema() -> Value {
    let mut tool = object_schema(
        json!({
            "kind": {"enum": ["client", "builtin", "command", "http", "mcp"], "description": "What runs the tool; without it, the tool is only declared"},
            "description": {"type": "string", "minLength": 1, "maxLength": 1024, "description": "Description for the model [default: the name]"},
            "input": {"type": "object", "description": "JSON Schema of the arguments"},
            "output": {"type": "object", "description": "JSON Schema of the result"},
            "effect": {"enum": ["read", "write", "destructive"], "description": "Effect on the world [default: destructive]"},
            "extra": {"enum": ["refuse", "drop", "pass"], "description": "Treatment of arguments that the schema does not declare"},
            "policy": {"const": "open", "description": "`open`: the tool has effects, and no rule needs to govern it"},
            "skip_client_prompt": {"type": "boolean", "description": "An allowed call also grants the client's permission"},
            "shell": ref_schema("path", "Argument that contains a shell command"),
            "once": {"type": "boolean", "description": "Equal arguments mean the same action, so a repeated call gets the recorded result"},
            "idempotent": {"type": "boolean", "description": "A second run changes nothing more"},
            "untrusted": {"type": "boolean", "description": "Results contain text of strangers"},
            "timeout": {"$ref": "#/$defs/duration"},
            "entities": {"type": "object", "additionalProperties": {"$ref": "#/$defs/path"}, "description": "Entities that a call is about, with their paths"},
            "proves": ref_schema("names", "Paths of the result that become evidence"),
            "secrets": ref_schema("names", "Paths that are never shown or recorded"),
            "revokes": ref_schema("names", "Tools whose evidence a call revokes"),
            "writes_to": ref_schema("names", "Entities under which the tool stores what it writes"),
            "visible_to": ref_schema("names", "Principals that see the tool [default: all]"),
            "reconcile": object_schema(
                json!({
                    "tool": {"type": "string", "description": "Tool that only reads"},
                    "arguments": {"type": "object", "description": "Arguments of that tool: name = path into the arguments of the call"},
                    "happened": {"type": "object", "minProperties": 1, "description": "Fields of the result (path = value) that mean that the call took effect"},
                    "never": {"type": "object", "description": "Fields of the result (path = value) that mean that the call did not take effect"},
                }),
                &["tool", "happened"],
            ),
            "polling": object_schema(json!({"interval": {"$ref": "#/$defs/duration"}, "max_unchanged": {"type": "integer", "minimum": 1}}), &[]),
            "max_output": {"type": "integer", "minimum": 0},
            "command": {"type": "string", "description": "`command`: program; a path is relative to this file. No shell is involved."},
            "args": ref_schema("names", "`command`: arguments; `{/path}` is replaced by that argument of the call"),
            "env": {"type": "object", "additionalProperties": {"$ref": "#/$defs/reference"}, "description": "`command`: environment variables to set"},
            "inherit_env": ref_schema("names", "`command`: environment variables to inherit in addition to the defaults"),
            "sandbox": {"$ref": "#/$defs/sandbox"},
            "normalize": {"type": "array", "items": {"$ref": "#/$defs/normalization"}, "description": "Rules that normalize results"},
            "cost": object_schema(json!({"tokens": {"type": "integer", "minimum": 0}, "money": {"type": "number", "minimum": 0}}), &[]),
            "examples": {
                "type": "array", "description": "Example calls for the model, checked against the schemas",
                "items": object_schema(
                    json!({
                        "description": {"type": "string", "maxLength": 200}, "input": {"description": "Arguments."},
                        "output": {"description": "Result; required if there is an output schema"},
                    }),
                    &["description", "input"],
                ),
            },
        }),
        &[],
    );
    let backend_keys = json!({
        "section": {"type": "string", "description": "Section of the prompt that the tool belongs to"},
        "upstream": {"type": "string", "description": "`mcp`: upstream that provides the tool"},
        "tool": {"type": "string", "description": "`mcp`: name at the upstream [default: the name here, with or without the upstream's name as prefix]"},
        "method": {"enum": ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "get", "head", "post", "put", "patch", "delete"], "description": "`http`: method [default: GET]"},
        "url": {"type": "string", "description": "`http`: URL; `{/path}` in its path or query is replaced by that argument. The host is fixed."},
        "query": {"type": "object", "additionalProperties": {"type": "string"}, "description": "`http`: query parameters; a parameter whose argument is absent is left out"},
        "headers": {"type": "object", "additionalProperties": {"$ref": "#/$defs/reference"}, "description": "`http`: headers of the request"},
        "body": {"description": "`http`: JSON body in which `\"{/path}\"` is replaced by that argument [default for POST, PUT and PATCH: the arguments]"},
        "form": {"type": "object", "additionalProperties": {"type": "string"}, "description": "`http`: form to send instead of a body"},
        "hosts": ref_schema("names", "`http`: allowed hosts, also after a redirect [default: the host of the URL]"),
        "networks": ref_schema("names", "`http`: allowed private or local networks, such as `10.0.0.0/8`"),
        "max_response": {"$ref": "#/$defs/bytes"},
        "empty_on": {"type": "array", "items": {"type": "integer", "minimum": 100, "maximum": 599}, "description": "`http`: statuses that mean an empty result"},
        "retry": object_schema(json!({"times": {"type": "integer", "minimum": 0}, "delay": {"$ref": "#/$defs/duration"}}), &[]),
    });
    if let (Some(tool), Value::Object(included)) =
        (tool.get_mut("properties").and_then(Value::as_object_mut), backend_keys)
    {
        tool.extend(included);
    }
    tool
}

fn policy_schema() -> Value {
    let path = || json!({"$ref": "#/$defs/path"});
    let same = json!({"type": "object", "additionalProperties": path(), "minProperties": 1, "maxProperties": 1});
    let proved = object_schema(
        json!({"proved_by": {"type": "string"}, "same": same, "field": path(), "argument": path()}),
        &["proved_by", "same", "field"],
    );
    object_schema(
        json!({
            "name": {"type": "string", "pattern": "\\S"},
            "rule": {"enum": ["require", "deny", "ask", "limit", "sequence", "read_before_write", "flow", "only_from"]},
            "tools": ref_schema("some", "Tools that the rule governs"),
            "mode": {"enum": ["enforce", "observe"]},
            "section": {"type": "string"},
            "level": {"enum": ["agent", "prompt", "tool"]},
            "reason": {"type": "string", "description": "Text for the model: what to do instead"},
            "category": {"enum": ["BUSINESS", "PERMISSION", "VALIDATION", "TRANSIENT"]},
            "code": {"type": "string"},
            "redirect": {"type": "string", "description": "Tool that handles such requests instead"},
            "any_of": ref_schema("some", "`require`: tools of which one must have succeeded"),
            "same": {"type": "object", "additionalProperties": {"$ref": "#/$defs/path"}, "minProperties": 1, "maxProperties": 1, "description": "`require`: the evidence must be about the same entity"},
            "fields": {"type": "object", "description": "`require`: required fields of the result"},
            "within": {"$ref": "#/$defs/duration"},
            "reported": {"type": "boolean", "description": "Also count what a client reports"},
            "when": {"type": "string", "description": "Expression in CEL"},
            "where": {"type": "array", "items": {"$ref": "#/$defs/condition"}, "description": "`deny`, `ask`: conditions that must all be met. `require`: governs only calls that meet all of them."},
            "approvers": ref_schema("some", "`ask`: principals that may answer [default: all]"),
            "calls": {"type": "integer", "minimum": 0, "description": "`limit`: maximum number of calls"},
            "sum": ref_schema("path", "`limit`: argument that is summed up"),
            "max": {"type": "number", "minimum": 0, "description": "`limit`: maximum of the sum"},
            "currency": ref_schema("path", "`limit`: argument whose values have separate sums"),
            "per": {"anyOf": [{"enum": ["session", "principal"]}, {"type": "string", "pattern": "^/"}, proved], "description": "`limit`: `session`, `principal`, a path, or an entity from evidence"},
            "after": {"type": "object", "additionalProperties": {"$ref": "#/$defs/some"}, "minProperties": 1, "description": "`sequence`: each tool with the tools that must come before it"},
            "guard": {"type": "object", "additionalProperties": {"$ref": "#/$defs/path"}, "minProperties": 1, "description": "`read_before_write`: tools, with the argument that contains the path"},
            "read_tool": {"type": "string", "description": "`read_before_write`: tool that reads"},
            "arguments": ref_schema("some", "`flow`, `only_from`: arguments to guard"),
            "trusted": ref_schema("names", "`flow`, `only_from`: tools whose values are allowed"),
            "user": {"type": "boolean", "description": "`flow`, `only_from`: allow values from the user"},
            "values": {"type": "array", "description": "`flow`, `only_from`: values that are always allowed"},
        }),
        &["name", "rule"],
    )
}

fn condition_schema() -> Value {
    object_schema(
        json!({
            "argument": ref_schema("path", "Argument to check [default with `touches`: all arguments]"),
            "above": {"type": "number"},
            "below": {"type": "number"},
            "in": {"type": "array", "minItems": 1},
            "not_in": {"type": "array"},
            "glob": {"type": "string"},
            "matches": {"type": "string", "format": "regex"},
            "runs": ref_schema("some", "Programs; a shell command that runs one of them matches, however it is written"),
            "touches": ref_schema("some", "Files: a path and everything under it, or a bare name in any directory"),
            "from": {"type": "string", "description": "With `touches`: directory where searches begin. Directories above a named path count as well."},
            "lenient": {"type": "boolean", "description": "With `touches`: ignore words that only the running shell can resolve, unless the command changes something with them"},
            "recursive": {"type": "boolean", "description": "With `touches`: whether a command counts that reads a whole tree around a path, such as `grep -r` [default: true; with `from`, always true]"},
            "qualified": {"type": "boolean", "description": "With `touches`: in texts that are not commands, only paths from the root or home, or with a directory, count"},
        }),
        &[],
    )
}

fn hook_schema() -> Value {
    object_schema(
        json!({
            "name": {"type": "string"},
            "command": {"type": "string", "description": "Program; a path is relative to this file. No shell is involved."},
            "args": ref_schema("names", "Command-line arguments"),
            "inherit_env": ref_schema("names", "Environment variables to inherit in addition to the defaults"),
            "env": {
                "type": "object", "description": "Environment variables to set: text in which `${NAME}` is an environment variable, or a file",
                "additionalProperties": {"oneOf": [{"type": "string"}, object_schema(json!({"file": {"type": "string"}}), &["file"])]},
            },
            "tools": ref_schema("names", "Tools that the hook applies to; `*` matches any text"),
            "timeout": {"$ref": "#/$defs/duration"},
            "when": {"enum": ["before", "after", "both"]},
        }),
        &["name", "command"],
    )
}

fn budget_schema() -> Value {
    object_schema(
        json!({
            "calls": {"type": "integer", "minimum": 0},
            "tokens": {"type": "integer", "minimum": 0},
            "money": {"type": "number", "minimum": 0},
            "wall_time": {"$ref": "#/$defs/duration"},
        }),
        &[],
    )
}

fn limits_schema() -> Value {
    let rate = object_schema(
        json!({"calls": {"type": "integer", "minimum": 0}, "per": {"$ref": "#/$defs/duration"}}),
        &["calls", "per"],
    );
    object_schema(
        json!({"session": {"$ref": "#/$defs/budget"}, "principal": {"$ref": "#/$defs/budget"}, "rate": rate}),
        &[],
    )
}

fn client_schema() -> Value {
    object_schema(
        json!({
            "on_failure": {"enum": ["deny", "ask"], "description": "Decision if toolgate fails"},
            "undeclared": {"enum": ["deny", "ask"], "description": "Decision on a tool that this file does not declare"},
        }),
        &[],
    )
}

fn lint_schema() -> Value {
    let codes: Vec<&str> = crate::LINTS.iter().map(|(code, _)| *code).collect();
    object_schema(
        json!({
            "allow": {"enum": codes},
            "of": {"type": "string", "description": "Agent, tool, rule or upstream, or `gateway` [default: all]"},
            "reason": {"type": "string", "pattern": "\\S"},
        }),
        &["allow", "reason"],
    )
}

fn sandbox_schema() -> Value {
    let bytes = || json!({"$ref": "#/$defs/bytes"});
    object_schema(
        json!({
            "read": ref_schema("names", "Files and directories that may be read, in addition to those of the system"),
            "write": ref_schema("names", "Directories that may also be changed"),
            "network": {"type": "boolean"},
            "memory": bytes(),
            "file_size": bytes(),
            "processes": {"type": "integer", "minimum": 0},
            "files": {"type": "integer", "minimum": 0},
            "cpu": {"$ref": "#/$defs/duration"},
        }),
        &[],
    )
}

fn upstream_schema() -> Value {
    let oauth = object_schema(
        json!({
            "issuer": {"type": "string"}, "token_url": {"type": "string"}, "client_id": {"$ref": "#/$defs/reference"},
            "client_secret": {"$ref": "#/$defs/reference"}, "scope": {"type": "string"},
        }),
        &["client_id", "client_secret"],
    );
    let error = object_schema(
        json!({
            "matches": {"type": "string", "format": "regex"}, "category": {"enum": ["BUSINESS", "PERMISSION", "VALIDATION", "TRANSIENT"]},
            "code": {"type": "string"}, "effects": {"enum": ["none", "done", "unknown"]},
        }),
        &["matches", "category", "code"],
    );
    object_schema(
        json!({
            "command": {"type": "string", "description": "Program of a server that speaks MCP over its standard streams"},
            "args": ref_schema("names", "Command-line arguments; `${NAME}` is an environment variable"),
            "env": {"type": "object", "additionalProperties": {"$ref": "#/$defs/reference"}},
            "inherit_env": ref_schema("names", "Environment variables to inherit in addition to the defaults"),
            "directory": {"type": "string", "description": "Working directory, relative to this file"},
            "url": ref_schema("reference", "URL of a server that speaks HTTP"),
            "headers": {"type": "object", "additionalProperties": {"$ref": "#/$defs/reference"}},
            "bearer": ref_schema("reference", "Bearer token for the server"),
            "oauth": oauth,
            "transport": {"enum": ["http", "sse"], "description": "Transport; `sse` is the transport of 2024-11-05"},
            "prefix": {"type": "string", "pattern": "^[a-z0-9_-]{0,32}$", "description": "Prefix of tool names [default: the name of the upstream and `_`]"},
            "undeclared": {"enum": ["deny", "ask", "open", "read"], "description": "Treatment of tools that no table declares: not offered, offered with approval, offered, or offered as reads [default: deny]"},
            "prompts": {"type": "boolean", "description": "Whether clients see the prompts [default: true if undeclared tools are offered]"},
            "resources": {"type": "boolean", "description": "Whether clients see the resources [default: true if undeclared tools are offered]"},
            "timeout": {"$ref": "#/$defs/duration"},
            "concurrency": {"type": "integer", "minimum": 1},
            "errors": {"type": "array", "items": error, "description": "Patterns that classify error messages. Without them, a success whose whole text is `Error: …` is an error."},
        }),
        &[],
    )
}

fn gateway_schema() -> Value {
    let token = object_schema(
        json!({"principal": {"type": "string"}, "sha256": {"type": "string", "pattern": "^[0-9a-fA-F]{64}$"}, "agents": {"$ref": "#/$defs/names"}}),
        &["principal", "sha256"],
    );
    let jwt = object_schema(
        json!({
            "issuer": {"type": "string"}, "audience": {"type": "string"}, "keys": {"type": "string", "description": "URL or file of the keys"},
            "resource": {"type": "string", "pattern": "^https?://[A-Za-z0-9\\[][A-Za-z0-9\\[\\]:./_~%-]*$", "examples": ["https://gate.example.com/mcp"], "description": "URL of `/mcp` for clients [default: the audience, if it is a URL]"},
            "principal": {"type": "string", "description": "Claim that contains the principal [default: sub]"},
            "session": {"type": "string", "description": "Claim that contains the session"},
            "agents": {"type": "string", "description": "Claim that lists the agents"},
        }),
        &["issuer", "audience", "keys"],
    );
    let rate = object_schema(
        json!({"calls": {"type": "integer", "minimum": 0}, "per": {"$ref": "#/$defs/duration"}}),
        &["calls", "per"],
    );
    object_schema(
        json!({
            "listen": {"type": "string", "examples": ["127.0.0.1:7070"]},
            "agent": {"type": "string", "description": "Agent of clients that name none"},
            "hosts": ref_schema("names", "Accepted `Host` names, in addition to those of this machine"),
            "origins": ref_schema("names", "Accepted origins of web pages, such as `https://app.example.com:443`"),
            "max_request": {"$ref": "#/$defs/bytes"},
            "concurrency": {"type": "integer", "minimum": 1},
            "rate": rate,
            "session_idle_timeout": ref_schema("duration", "How long a client that names no session keeps its default session"),
            "stream_timeout": ref_schema("duration", "Maximum duration of a response stream that the client can resume"),
            "tokens": {"type": "array", "items": token},
            "jwt": jwt,
            "tls": object_schema(json!({"certificate": {"type": "string"}, "key": {"type": "string"}}), &["certificate", "key"]),
            "otlp": object_schema(
                json!({
                    "endpoint": {"type": "string", "pattern": "^https?://", "examples": ["http://127.0.0.1:4318"], "description": "URL of a collector for OTLP over HTTP; `/v1/traces` and `/v1/metrics` are added"},
                    "headers": {"type": "object", "additionalProperties": {"$ref": "#/$defs/reference"}},
                }),
                &["endpoint"],
            ),
        }),
        &[],
    )
}

fn normalization_schema() -> Value {
    json!({
        "type": "object",
        "required": ["op"],
        "properties": {"op": {"enum": ["timestamp", "codes", "rename", "first_of", "bool", "case", "scale", "default", "keep"]},
            "unit": {"enum": ["s", "ms", "us", "ns"], "description": "`timestamp`: unit of a number since 1970"}},
    })
}
