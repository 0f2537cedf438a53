//! A JSON Schema of the configuration file, for editors.

use serde_json::{Value, json};

/// A JSON Schema of `toolgate.toml`.
#[must_use]
pub fn schema() -> Value {
    let mut top = agent();
    let more = json!({
        "name": {"type": "string", "description": "The agent's name; `default` unless said."},
        "store": {"type": "string", "pattern": "\\S", "description": "Where the ledger is kept, relative to this file."},
        "retention": of("duration", "How long rows stay in that ledger: `toolgate serve` and the service of `toolgate hook` take out what is older. For good unless said."),
        "redact": {"$ref": "#/$defs/names", "description": "Regular expressions: what matches is redacted wherever it stands in a row."},
        "client": {"$ref": "#/$defs/client"},
        "gateway": {"$ref": "#/$defs/gateway"},
        "upstreams": {"type": "object", "additionalProperties": {"$ref": "#/$defs/upstream"}, "propertyNames": {"pattern": "^[a-z0-9_-]{1,32}$"}, "description": "MCP servers that tools come from, each by its name."},
        "mcp_servers": {"$ref": "#/$defs/names", "description": "JSON files with `mcpServers`, as clients have them; relative to this file."},
        "lint": {"type": "array", "items": {"$ref": "#/$defs/lint"}},
        "agents": {"type": "object", "additionalProperties": {"$ref": "#/$defs/agent"}, "description": "Several agents, each by its name."},
    });
    if let (Some(top), Value::Object(more)) = (top.get_mut("properties").and_then(Value::as_object_mut), more) {
        top.extend(more);
    }
    let mut schema = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "toolgate.toml",
        "description": "Agents, their tools, rules and limits.",
        "$defs": {
            "names": {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
            "some": {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}], "description": "One name at least."},
            "bytes": {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": "^[0-9]+ *(B|KB|MB|GB)$"}]},
            "path": {"type": "string", "minLength": 1, "description": "Where something stands, as in `/customer_id`."},
            "duration": {"type": "string", "pattern": "^\\s*[0-9Pp]", "examples": ["30s", "15m", "24h", "7d"]},
            "agent": agent(),
            "tool": tool(),
            "policy": policy(),
            "condition": condition(),
            "hook": hook(),
            "budget": budget(),
            "limits": limits(),
            "client": client(),
            "lint": lint(),
            "normalization": normalization(),
            "sandbox": sandbox(),
            "upstream": upstream(),
            "gateway": gateway(),
            "reference": {"description": "Text with `${NAME}` from the environment, or a file.", "oneOf": [{"type": "string"}, object(json!({"file": {"type": "string"}}), &["file"])]},
        },
    });
    if let (Some(schema), Value::Object(top)) = (schema.as_object_mut(), top) {
        schema.extend(top);
    }
    schema
}

fn object(properties: Value, required: &[&str]) -> Value {
    json!({"type": "object", "additionalProperties": false, "properties": properties, "required": required})
}

fn of(name: &str, description: &str) -> Value {
    json!({"$ref": format!("#/$defs/{name}"), "description": description})
}

fn agent() -> Value {
    object(
        json!({
            "principals": of("names", "Who may act as it; everyone unless said."),
            "max_output": {"type": "integer", "minimum": 0, "description": "Bytes of a result that go into the context."},
            "dialect": {"enum": ["standard", "bucket"], "description": "How errors are written for its model."},
            "files": {"type": "string", "minLength": 1, "description": "The directory whose files its tools have, relative to this file."},
            "limits": {"$ref": "#/$defs/limits"},
            "include": of("names", "Policy files, relative to this file."),
            "tools": {"type": "object", "additionalProperties": {"$ref": "#/$defs/tool"}, "propertyNames": {"pattern": "^[a-z0-9_-]{1,64}$"}},
            "policy": {"type": "array", "items": {"$ref": "#/$defs/policy"}},
            "hooks": {"type": "array", "items": {"$ref": "#/$defs/hook"}},
            "upstreams": of("names", "Whose undeclared tools it is offered; those of all where it is the only agent."),
        }),
        &[],
    )
}

fn tool() -> Value {
    let mut tool = object(
        json!({
            "kind": {"enum": ["client", "builtin", "command", "http", "mcp"], "description": "Who runs it; without it the tool is only declared."},
            "description": {"type": "string", "minLength": 1, "maxLength": 1024, "description": "For the model; the name unless said."},
            "input": {"type": "object", "description": "JSON Schema of the arguments."},
            "output": {"type": "object", "description": "JSON Schema of the result."},
            "effect": {"enum": ["read", "write", "destructive"], "description": "What it does to the world; what is not said is destructive."},
            "extra": {"enum": ["refuse", "drop", "pass"], "description": "Arguments that the schema does not know."},
            "policy": {"const": "open", "description": "It has effects, and no rule needs to govern it."},
            "grant": {"type": "boolean", "description": "A pass is also the client's permission."},
            "shell": of("path", "Where a shell command stands in the arguments."),
            "once": {"type": "boolean", "description": "The same arguments are the same act."},
            "idempotent": {"type": "boolean", "description": "A second run changes nothing more."},
            "untrusted": {"type": "boolean", "description": "Its results hold what strangers wrote."},
            "timeout": {"$ref": "#/$defs/duration"},
            "entities": {"type": "object", "additionalProperties": {"$ref": "#/$defs/path"}, "description": "What a call is about, and where that stands."},
            "proves": of("names", "Paths of the result that become evidence."),
            "secrets": of("names", "Paths that are never shown or recorded."),
            "revokes": of("names", "Tools whose evidence it takes away."),
            "keeps": of("names", "Entities that keep what is written to them."),
            "visible_to": of("names", "Principals who see it."),
            "reconcile": object(
                json!({
                    "tool": {"type": "string", "description": "A read."},
                    "arguments": {"type": "object", "description": "Its arguments: name = path into the arguments of the call."},
                    "happened": {"type": "object", "minProperties": 1, "description": "Path into its result = value: then the call took effect."},
                    "never": {"type": "object", "description": "Path into its result = value: then it never did."},
                }),
                &["tool", "happened"],
            ),
            "polling": object(json!({"interval": {"$ref": "#/$defs/duration"}, "max_unchanged": {"type": "integer", "minimum": 1}}), &[]),
            "max_output": {"type": "integer", "minimum": 0},
            "command": {"type": "string", "description": "`command`: the program; with a path, relative to this file. No shell is involved."},
            "args": of("names", "`command`: its words; `{/path}` in one is the text of that argument."),
            "env": {"type": "object", "additionalProperties": {"$ref": "#/$defs/reference"}, "description": "`command`: variables that are set for it, as for a hook."},
            "inherit": of("names", "`command`: variables of the environment that it sees beside the usual ones."),
            "sandbox": {"$ref": "#/$defs/sandbox"},
            "normalize": {"type": "array", "items": {"$ref": "#/$defs/normalization"}, "description": "Brings results into a stable shape."},
            "cost": object(json!({"tokens": {"type": "integer", "minimum": 0}, "money": {"type": "number", "minimum": 0}}), &[]),
            "examples": {
                "type": "array", "description": "Worked calls for the model, checked against the schemas.",
                "items": object(
                    json!({
                        "description": {"type": "string", "maxLength": 200}, "input": {"description": "Arguments."},
                        "output": {"description": "Result; needed where there is an output schema."},
                    }),
                    &["description", "input"],
                ),
            },
        }),
        &[],
    );
    let elsewhere = json!({
        "section": {"type": "string", "description": "The part of the prompt that it belongs to."},
        "upstream": {"type": "string", "description": "`mcp`: the server that it comes from."},
        "tool": {"type": "string", "description": "`mcp`: what the server calls it; its own name without the server's unless said."},
        "method": {"enum": ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "get", "head", "post", "put", "patch", "delete"], "description": "`http`: GET unless said."},
        "url": {"type": "string", "description": "`http`: where to; `{/path}` in its path or query is that argument. The host is fixed."},
        "query": {"type": "object", "additionalProperties": {"type": "string"}, "description": "`http`: parts of the query; one whose argument is absent is left out."},
        "headers": {"type": "object", "additionalProperties": {"$ref": "#/$defs/reference"}, "description": "`http`: headers of the request."},
        "body": {"description": "`http`: JSON in which `\"{/path}\"` is that argument; without it, POST, PUT and PATCH send the arguments."},
        "form": {"type": "object", "additionalProperties": {"type": "string"}, "description": "`http`: a form instead of a body."},
        "hosts": of("names", "`http`: hosts that it may talk to, also after a redirect; that of its address unless said."),
        "networks": of("names", "`http`: private or local networks that it may reach, as in `10.0.0.0/8`."),
        "max_response": {"$ref": "#/$defs/bytes"},
        "empty_on": {"type": "array", "items": {"type": "integer", "minimum": 100, "maximum": 599}, "description": "`http`: statuses that mean that there is nothing of the kind."},
        "retry": object(json!({"times": {"type": "integer", "minimum": 0}, "delay": {"$ref": "#/$defs/duration"}}), &[]),
    });
    if let (Some(tool), Value::Object(more)) = (tool.get_mut("properties").and_then(Value::as_object_mut), elsewhere) {
        tool.extend(more);
    }
    tool
}

fn policy() -> Value {
    let path = || json!({"$ref": "#/$defs/path"});
    let same = json!({"type": "object", "additionalProperties": path(), "minProperties": 1, "maxProperties": 1});
    let proved = object(
        json!({"proved_by": {"type": "string"}, "same": same, "field": path(), "argument": path()}),
        &["proved_by", "same", "field"],
    );
    object(
        json!({
            "name": {"type": "string", "pattern": "\\S"},
            "rule": {"enum": ["require", "deny", "ask", "limit", "sequence", "read_before_write", "flow", "only_from"]},
            "tools": of("some", "The tools that it governs."),
            "mode": {"enum": ["enforce", "observe"]},
            "section": {"type": "string"},
            "level": {"enum": ["agent", "prompt", "tool"]},
            "reason": {"type": "string", "description": "What the model reads: what to do instead."},
            "category": {"enum": ["BUSINESS", "PERMISSION", "VALIDATION", "TRANSIENT"]},
            "code": {"type": "string"},
            "redirect": {"type": "string", "description": "The tool that handles such requests instead."},
            "any_of": of("some", "`require`: one of these must have succeeded."),
            "same": {"type": "object", "additionalProperties": {"$ref": "#/$defs/path"}, "minProperties": 1, "maxProperties": 1, "description": "`require`: about the same entity."},
            "fields": {"type": "object", "description": "`require`: with these fields of the result."},
            "within": {"$ref": "#/$defs/duration"},
            "reported": {"type": "boolean", "description": "What a client reports counts, too."},
            "when": {"type": "string", "description": "An expression in CEL."},
            "where": {"type": "array", "items": {"$ref": "#/$defs/condition"}, "description": "`deny`, `ask`: when all of these hold. `require`: of calls of which all of these hold."},
            "approvers": of("some", "`ask`: who may answer; anybody unless said."),
            "calls": {"type": "integer", "minimum": 0, "description": "`limit`: at most so many calls."},
            "sum": of("path", "`limit`: the argument that is added up."),
            "most": {"type": "number", "minimum": 0, "description": "`limit`: what the sum may come to."},
            "currency": of("path", "`limit`: what keeps sums apart."),
            "per": {"anyOf": [{"enum": ["session", "principal"]}, {"type": "string", "pattern": "^/"}, proved], "description": "`limit`: `session`, `principal`, a path, or an entity from evidence."},
            "after": {"type": "object", "additionalProperties": {"$ref": "#/$defs/some"}, "minProperties": 1, "description": "`sequence`: what comes after what."},
            "guard": {"type": "object", "additionalProperties": {"$ref": "#/$defs/path"}, "minProperties": 1, "description": "`read_before_write`: tools, and where their path stands."},
            "read_with": {"type": "string", "description": "`read_before_write`: the tool that reads."},
            "arguments": of("some", "`flow`, `only_from`: the arguments that it guards."),
            "trusted": of("names", "`flow`, `only_from`: tools whose values may pass."),
            "user": {"type": "boolean", "description": "`flow`, `only_from`: what the user said may pass."},
            "values": {"type": "array", "description": "`flow`, `only_from`: values that may always pass."},
        }),
        &["name", "rule"],
    )
}

fn condition() -> Value {
    object(
        json!({
            "argument": of("path", "The argument that is looked at; with `touches`, all of them unless said."),
            "above": {"type": "number"},
            "below": {"type": "number"},
            "in": {"type": "array", "minItems": 1},
            "not_in": {"type": "array"},
            "glob": {"type": "string"},
            "matches": {"type": "string", "format": "regex"},
            "runs": of("some", "A shell command that runs one of these, however it is spelled."),
            "touches": of("some", "Files: a path with all under it, or a bare name wherever it stands."),
            "from": {"type": "string", "description": "With `touches`, for what is searched: the directory in which that begins. Directories above a place count as well."},
            "lenient": {"type": "boolean", "description": "With `touches`: words pass that only the running shell knows, unless something is changed by them."},
            "trees": {"type": "boolean", "description": "With `touches`: whether a command counts that reads a tree as a whole in which a place lies, as `grep -r` does. True unless said; with `from`, always."},
            "whole": {"type": "boolean", "description": "With `touches`: texts that are no commands name a place only from the root, from home, or with its directory."},
        }),
        &[],
    )
}

fn hook() -> Value {
    object(
        json!({
            "name": {"type": "string"},
            "command": {"type": "string", "description": "A program; with a path, relative to this file. No shell is involved."},
            "args": of("names", "Its words."),
            "inherit": of("names", "Variables of the environment that it sees beside the usual ones."),
            "env": {
                "type": "object", "description": "Variables that are set for it: text with `${NAME}` from the environment, or a file.",
                "additionalProperties": {"oneOf": [{"type": "string"}, object(json!({"file": {"type": "string"}}), &["file"])]},
            },
            "tools": of("names", "For which tools; `*` stands for any text."),
            "timeout": {"$ref": "#/$defs/duration"},
            "when": {"enum": ["before", "after", "both"]},
        }),
        &["name", "command"],
    )
}

fn budget() -> Value {
    object(
        json!({
            "calls": {"type": "integer", "minimum": 0},
            "tokens": {"type": "integer", "minimum": 0},
            "money": {"type": "number", "minimum": 0},
            "wall": {"$ref": "#/$defs/duration"},
        }),
        &[],
    )
}

fn limits() -> Value {
    let rate = object(json!({"calls": {"type": "integer", "minimum": 0}, "per": {"$ref": "#/$defs/duration"}}), &["calls", "per"]);
    object(json!({"session": {"$ref": "#/$defs/budget"}, "principal": {"$ref": "#/$defs/budget"}, "rate": rate}), &[])
}

fn client() -> Value {
    object(
        json!({
            "on_failure": {"enum": ["deny", "ask"], "description": "If toolgate cannot do its work."},
            "undeclared": {"enum": ["deny", "ask"], "description": "A tool that is not in this file."},
        }),
        &[],
    )
}

fn lint() -> Value {
    let codes: Vec<&str> = super::LINTS.iter().map(|(code, _)| *code).collect();
    object(
        json!({
            "allow": {"enum": codes},
            "of": {"type": "string", "description": "The agent, tool, rule or upstream, or `gateway`; all of them unless said."},
            "reason": {"type": "string", "pattern": "\\S"},
        }),
        &["allow", "reason"],
    )
}

fn sandbox() -> Value {
    let bytes = || json!({"$ref": "#/$defs/bytes"});
    object(
        json!({
            "read": of("names", "Files and directories that it may read, beside the system's own."),
            "write": of("names", "Directories that it may also change."),
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

fn upstream() -> Value {
    let oauth = object(
        json!({
            "issuer": {"type": "string"}, "token_url": {"type": "string"}, "client_id": {"$ref": "#/$defs/reference"},
            "client_secret": {"$ref": "#/$defs/reference"}, "scope": {"type": "string"},
        }),
        &["client_id", "client_secret"],
    );
    let error = object(
        json!({
            "matches": {"type": "string", "format": "regex"}, "category": {"enum": ["BUSINESS", "PERMISSION", "VALIDATION", "TRANSIENT"]},
            "code": {"type": "string"}, "effects": {"enum": ["none", "done", "unknown"]},
        }),
        &["matches", "category", "code"],
    );
    object(
        json!({
            "command": {"type": "string", "description": "The program of a server that speaks over its standard streams."},
            "args": of("names", "Its words; `${NAME}` is what the environment has."),
            "env": {"type": "object", "additionalProperties": {"$ref": "#/$defs/reference"}},
            "inherit": of("names", "Variables of the environment that it sees beside the usual ones."),
            "directory": {"type": "string", "description": "Where it is started, relative to this file."},
            "url": of("reference", "Where a server is that speaks HTTP."),
            "headers": {"type": "object", "additionalProperties": {"$ref": "#/$defs/reference"}},
            "bearer": of("reference", "A token that is shown to it."),
            "oauth": oauth,
            "transport": {"enum": ["http", "sse"], "description": "`sse` is the transport of 2024-11-05."},
            "prefix": {"type": "string", "pattern": "^[a-z0-9_-]{0,32}$", "description": "What the names of its tools begin with; its own name and `_` unless said."},
            "undeclared": {"enum": ["deny", "ask", "open", "read"], "description": "Tools that no table declares: not offered (unless said), asked about, let through, or let through as reads."},
            "prompts": {"type": "boolean", "description": "Whether its prompts are passed on; unless said, where undeclared tools are offered."},
            "resources": {"type": "boolean", "description": "Whether its resources are passed on; unless said, where undeclared tools are offered."},
            "timeout": {"$ref": "#/$defs/duration"},
            "concurrency": {"type": "integer", "minimum": 1},
            "errors": {"type": "array", "items": error, "description": "What its words mean. Without it, a success whose whole text is `Error: …` is an error."},
        }),
        &[],
    )
}

fn gateway() -> Value {
    let token = object(
        json!({"principal": {"type": "string"}, "sha256": {"type": "string", "pattern": "^[0-9a-fA-F]{64}$"}, "agents": {"$ref": "#/$defs/names"}}),
        &["principal", "sha256"],
    );
    let jwt = object(
        json!({
            "issuer": {"type": "string"}, "audience": {"type": "string"}, "keys": {"type": "string", "description": "Where the keys are: an address, or a file."},
            "resource": {"type": "string", "pattern": "^https?://[A-Za-z0-9\\[][A-Za-z0-9\\[\\]:./_~%-]*$", "examples": ["https://gate.example.com/mcp"], "description": "The address by which clients call `/mcp`; the audience unless said, where that is one."},
            "principal": {"type": "string", "description": "The claim that says who comes; `sub` unless said."},
            "session": {"type": "string", "description": "The claim that names the conversation."},
            "agents": {"type": "string", "description": "The claim that lists the agents."},
        }),
        &["issuer", "audience", "keys"],
    );
    let rate = object(json!({"calls": {"type": "integer", "minimum": 0}, "per": {"$ref": "#/$defs/duration"}}), &["calls", "per"]);
    object(
        json!({
            "listen": {"type": "string", "examples": ["127.0.0.1:7070"]},
            "agent": {"type": "string", "description": "The agent of those who name none."},
            "hosts": of("names", "Names that it is called by, beside those of this machine."),
            "origins": of("names", "Web pages that may talk to it, as in `https://app.example.com:443`."),
            "max_request": {"$ref": "#/$defs/bytes"},
            "concurrency": {"type": "integer", "minimum": 1},
            "rate": rate,
            "idle": of("duration", "How long the conversation of a client that names none stays the same one."),
            "stream": of("duration", "How long the stream of an answer lasts, where its client comes back for the rest."),
            "tokens": {"type": "array", "items": token},
            "jwt": jwt,
            "tls": object(json!({"certificate": {"type": "string"}, "key": {"type": "string"}}), &["certificate", "key"]),
            "otlp": object(
                json!({
                    "endpoint": {"type": "string", "pattern": "^https?://", "examples": ["http://127.0.0.1:4318"], "description": "A collector that speaks OTLP over HTTP; `/v1/traces` and `/v1/metrics` are added."},
                    "headers": {"type": "object", "additionalProperties": {"$ref": "#/$defs/reference"}},
                }),
                &["endpoint"],
            ),
        }),
        &[],
    )
}

fn normalization() -> Value {
    json!({
        "type": "object",
        "required": ["op"],
        "properties": {"op": {"enum": ["timestamp", "codes", "rename", "first_of", "bool", "case", "scale", "default", "keep"]},
            "unit": {"enum": ["s", "ms", "us", "ns"], "description": "Of `timestamp`: what a number counts since 1970."}},
    })
}
