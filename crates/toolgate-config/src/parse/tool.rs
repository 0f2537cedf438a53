//! Reads a `[tools.NAME]` table.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::config::ConfigReader;
use crate::tool_backend::ToolBackend;
use toolgate::builtin;
use toolgate::limits::Cost;
use toolgate::normalize::NormalizationRule;
use toolgate::policy::Diagnostic;
use toolgate::policy::source::table_reader::TomlTable;
use toolgate::tool::{CommandTool, Effect, ExtraArguments, ReconcileSpec, Tool};
use toolgate_process::sandbox::Sandbox;

const EFFECTS: [(&str, Effect); 3] =
    [("read", Effect::Read), ("write", Effect::Write), ("destructive", Effect::Destructive)];
const EXTRA_MEMBER_MODES: [(&str, ExtraArguments); 3] = [
    ("refuse", ExtraArguments::Refuse),
    ("drop", ExtraArguments::Drop),
    ("pass", ExtraArguments::Pass),
];

/// What runs a tool.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ToolBackendKind {
    Client,
    Builtin,
    Command,
    Http,
    Mcp,
}

const TOOL_BACKEND_KINDS: [(&str, ToolBackendKind); 5] = [
    ("client", ToolBackendKind::Client),
    ("builtin", ToolBackendKind::Builtin),
    ("command", ToolBackendKind::Command),
    ("http", ToolBackendKind::Http),
    ("mcp", ToolBackendKind::Mcp),
];

pub(crate) fn read_tool(
    name: &str,
    table: &TomlTable<'_>,
    reader: &ConfigReader<'_>,
) -> Option<(Tool, Option<ToolBackend>)> {
    let kind = table.keyword("kind", &TOOL_BACKEND_KINDS);
    let description = table.text("description").unwrap_or(name);
    let (input, output) = (read_schema(name, table, "input"), read_schema(name, table, "output"));
    let mut backend = None;
    let mut tool = match kind {
        Some(ToolBackendKind::Builtin) => read_builtin(name, table)?,
        Some(ToolBackendKind::Client) => Tool::external(name, description, input),
        Some(ToolBackendKind::Command) => {
            let input = input.unwrap_or_else(|| serde_json::json!({"type": "object"}));
            let program = read_command(table, &input, reader)?;
            Tool::command(name, description, input, program)
        }
        Some(ToolBackendKind::Http) => {
            let input = input.unwrap_or_else(|| serde_json::json!({"type": "object"}));
            let (http, empty, retry) = reader.read_http_tool(table, &input)?;
            backend = Some(ToolBackend::Http(Box::new(http)));
            let tool = empty
                .into_iter()
                .fold(Tool::declare(name, description, input), Tool::empty_on_status);
            retry.into_iter().fold(tool, |tool, retry| tool.retry(retry.times, retry.delay))
        }
        Some(ToolBackendKind::Mcp) => {
            backend = Some(read_remote(name, table)?);
            Tool::declare(name, description, serde_json::json!({"type": "object"}))
        }
        None => Tool::declare(
            name,
            description,
            input.unwrap_or_else(|| serde_json::json!({"type": "object"})),
        ),
    };
    if kind == Some(ToolBackendKind::Builtin) && (table.has_key("input") || table.has_key("output"))
    {
        let problem = Diagnostic::new(format!(
            "the built-in tool `{}` has its own schemas",
            toolgate_text::escape_for_display(name)
        ));
        table.report("kind", problem.with_help("remove `input` and `output`"));
    }
    if kind == Some(ToolBackendKind::Mcp) && (table.has_key("input") || table.has_key("output")) {
        table.report(
            "kind",
            Diagnostic::new("the upstream defines the schemas of its tool")
                .with_help("remove `input` and `output`"),
        );
    }
    if let Some(schema) = output {
        tool = tool.output_schema(schema);
    }
    if let Some(effect) = table.keyword("effect", &EFFECTS) {
        tool = tool.effect(effect);
    }
    if let Some(extra) = table.keyword("extra", &EXTRA_MEMBER_MODES) {
        tool = tool.extra(extra);
    }
    if table.keyword("policy", &[("open", true)]) == Some(true) {
        tool = tool.open();
    }
    for (key, set) in [
        ("once", Tool::once as fn(Tool) -> Tool),
        ("idempotent", Tool::idempotent),
        ("untrusted", Tool::untrusted),
    ] {
        if table.bool(key) == Some(true) {
            tool = set(tool);
        }
    }
    match table.positive_std_duration("timeout") {
        Some(timeout) => tool = tool.timeout(timeout),
        // A client may ask its user before it runs the tool, so it gets more time.
        None if kind == Some(ToolBackendKind::Client) => {
            tool = tool.timeout(Duration::from_secs(600))
        }
        None => {}
    }
    for rule in table.tables("normalize") {
        if let Some(rule) = read_normalization(&rule) {
            tool = tool.normalize(rule);
        }
    }
    for example in table.tables("examples") {
        let (description, input, output) =
            (example.text("description"), example.value("input"), example.value("output"));
        for (key, has_example, example_text) in [
            ("description", description.is_some(), "description = \"half of an order\""),
            ("input", input.is_some(), "input = { order_id = \"A-1\" }"),
        ] {
            if !has_example && !example.has_key(key) {
                example.report(
                    key,
                    Diagnostic::new(format!("an example needs `{key}`"))
                        .with_help(format!("like `{example_text}`")),
                );
            }
        }
        example.reject_unknown_keys("an example");
        if let (Some(description), Some(input)) = (description, input) {
            tool = tool.example(description, input, output.unwrap_or_default());
        }
    }
    if let Some(cost) = table.table("cost") {
        let spend = Cost {
            tokens: cost.count("tokens").unwrap_or_default(),
            money: cost.non_negative("money").unwrap_or_default(),
        };
        cost.reject_unknown_keys("`cost`");
        tool = tool.cost(spend);
    }
    if let Some(path) = table.pointer("shell") {
        tool = tool.shell(path);
    }
    if let Some(entities) = table.table("entities") {
        for entity in entities.keys() {
            if let Some(path) = entities.pointer(&entity) {
                tool = tool.entity(&entity, path);
            }
        }
    }
    tool = table
        .names("proves")
        .unwrap_or_default()
        .into_iter()
        .fold(tool, |tool, path| tool.proves(path));
    tool = table
        .names("secrets")
        .unwrap_or_default()
        .into_iter()
        .fold(tool, |tool, path| tool.secret(path));
    tool = table.names("revokes").unwrap_or_default().into_iter().fold(tool, Tool::revokes);
    tool = table.names("writes_to").unwrap_or_default().into_iter().fold(tool, Tool::keeps);
    if let Some(principals) = table.names("visible_to") {
        tool = tool.visible_to(principals);
    }
    if let Some(reconcile) =
        table.table("reconcile").and_then(|reconcile| read_reconcile(&reconcile))
    {
        tool = tool.reconcile(reconcile);
    }
    if let Some(polling) = table.table("polling") {
        // Without an interval, the tool may be polled immediately.
        let (interval, most) =
            (polling.duration("interval").unwrap_or_default(), polling.count("max_unchanged"));
        polling.reject_unknown_keys("`polling`");
        tool = tool.polling(
            Duration::try_from(interval).unwrap_or_default(),
            most.and_then(|most| u32::try_from(most).ok()).unwrap_or(10),
        );
    }
    if let Some(bytes) = table.count("max_output").and_then(|bytes| usize::try_from(bytes).ok()) {
        tool = tool.max_output(bytes);
    }
    Some((tool, backend))
}

/// Reads how to find out whether a call with unknown outcome took effect.
fn read_reconcile(table: &TomlTable<'_>) -> Option<ReconcileSpec> {
    if !table.has_key("tool") {
        table.report(
            "tool",
            Diagnostic::new("`reconcile` needs a `tool`")
                .with_help("like `tool = \"find_refund\"`"),
        );
    }
    let has_condition = table.is_table("happened")
        && table.table("happened").is_some_and(|fields| !fields.keys().is_empty());
    if !has_condition && (table.is_table("happened") || !table.has_key("happened")) {
        let problem = Diagnostic::new(
            "`reconcile` needs `happened`: the result that means that the call took effect",
        );
        table.report("happened", problem.with_help("like `happened = { \"/status\" = \"paid\" }`"));
    }
    let mut is_valid = table.has_key("tool") && has_condition;
    let mut reconcile = ReconcileSpec::new(table.text("tool").unwrap_or_default());
    if let Some(arguments) = table.table("arguments") {
        for name in arguments.keys() {
            if let Some(from) = arguments.pointer(&name) {
                reconcile = reconcile.argument(&name, from);
            }
        }
    }
    type ReconcileSetter = fn(ReconcileSpec, &str, serde_json::Value) -> ReconcileSpec;
    let setters: [(&str, ReconcileSetter); 2] = [
        ("happened", |reconcile, field, expected| reconcile.happened_if(field, expected)),
        ("never", |reconcile, field, expected| reconcile.never_if(field, expected)),
    ];
    for (key, set) in setters {
        if let Some(fields) = table.table(key) {
            for field in fields.keys() {
                match fields.value(&field) {
                    Some(expected) if field.starts_with('/') => {
                        reconcile = set(reconcile, &field, expected)
                    }
                    _ => {
                        is_valid = false;
                        fields.report(
                            &field,
                            Diagnostic::new("a path into a result begins with `/`")
                                .with_help("like `{ \"/status\" = \"paid\" }`"),
                        );
                    }
                }
            }
        }
    }
    table.reject_unknown_keys("`reconcile`");
    is_valid.then_some(reconcile)
}

/// Reads a JSON Schema.
///
/// An invalid schema is reported and replaced by one that accepts everything, so the rest of the
/// tool is still checked.
fn read_schema(name: &str, table: &TomlTable<'_>, key: &str) -> Option<serde_json::Value> {
    let schema = table.value(key)?;
    let faults = toolgate::schema::find_schema_faults(&schema);
    for fault in &faults {
        let problem = Diagnostic::new(format!("{key} schema of `{name}`: {}", fault.reason));
        table.report_inside(
            key,
            &fault.pointer,
            match fault.suggestion {
                Some(suggestion) => problem.did_you_mean(suggestion),
                None => problem
                    .with_help("a JSON Schema, written as TOML: `{ type = \"object\", properties = { id = { type = \"string\" } } }`"),
            },
        );
    }
    Some(if faults.is_empty() { schema } else { serde_json::json!({}) })
}

/// Reads which tool of which upstream runs the call.
fn read_remote(name: &str, table: &TomlTable<'_>) -> Option<ToolBackend> {
    if !table.has_key("upstream") {
        table.report(
            "kind",
            Diagnostic::new("a tool of an MCP server needs its `upstream`")
                .with_help("like `upstream = \"git\"`"),
        );
    }
    let upstream = table.text("upstream")?.to_owned();
    let tools = match table.text("tool") {
        Some(tool) => vec![tool.to_owned()],
        // By default, the upstream's tool has the name it would have if it were undeclared.
        None => [name]
            .into_iter()
            .chain(name.strip_prefix(&format!("{upstream}_")))
            .map(str::to_owned)
            .collect(),
    };
    Some(ToolBackend::Mcp {
        upstream,
        tools,
        has_description: table.has_key("description"),
        has_timeout: table.has_key("timeout"),
    })
}

/// Returns a built-in tool.
fn read_builtin(name: &str, table: &TomlTable<'_>) -> Option<Tool> {
    let known: BTreeMap<&str, fn() -> Tool> = BTreeMap::from([
        ("calc", toolgate::builtin::calc as fn() -> Tool),
        ("json_query", toolgate::builtin::json_query),
        ("list_files", builtin::list_files),
        ("read_file", builtin::read_file),
        ("read_output", toolgate::builtin::read_output),
        ("write_file", builtin::write_file),
    ]);
    let found = known.get(name).map(|make| make());
    let names = known.keys().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    if found.is_none() {
        let problem = Diagnostic::new(format!(
            "unknown built-in tool `{}`",
            toolgate_text::escape_for_display(name)
        ));
        table.report(
            "kind",
            problem
                .with_help(format!("expected one of {names}"))
                .with_suggestion(name, known.keys()),
        );
    }
    found
}

/// Reads a rule that normalizes results.
fn read_normalization(table: &TomlTable<'_>) -> Option<NormalizationRule> {
    let known = [
        ("timestamp", ""),
        ("codes", ""),
        ("rename", ""),
        ("first_of", ""),
        ("bool", ""),
        ("case", ""),
        ("scale", ""),
        ("default", ""),
        ("keep", ""),
    ];
    if !table.has_key("op") {
        let all = known.iter().map(|(op, _)| format!("`{op}`")).collect::<Vec<_>>().join(", ");
        table.report(
            "op",
            Diagnostic::new("a normalization rule needs an `op`")
                .with_help(format!("one of {all}")),
        );
    }
    table.keyword("op", &known)?;
    let fields: serde_json::Map<String, serde_json::Value> = table
        .keys()
        .into_iter()
        .filter_map(|key| table.value(&key).map(|value| (key, value)))
        .collect();
    match serde_json::from_value::<NormalizationRule>(serde_json::Value::Object(fields.clone())) {
        Ok(rule) => {
            let written = serde_json::to_value(&rule).unwrap_or_default();
            for key in fields.keys().filter(|key| written.get(key).is_none()) {
                let known = written
                    .as_object()
                    .map(|fields| {
                        fields.keys().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ")
                    })
                    .unwrap_or_default();
                table.report(
                    key,
                    Diagnostic::new(format!(
                        "unknown key `{}` in a rule with this `op`",
                        toolgate_text::escape_for_display(key)
                    ))
                    .with_help(format!("expected {known}")),
                );
            }
            Some(rule)
        }
        Err(error) => {
            let problem = Diagnostic::new(format!("cannot read the normalization rule: {error}"));
            table.report(
                "op",
                problem.with_help("like `{ op = \"timestamp\", path = \"/created\" }`"),
            );
            None
        }
    }
}

/// Reads the program of a command tool, and its sandbox.
fn read_command(
    table: &TomlTable<'_>,
    input: &serde_json::Value,
    reader: &ConfigReader<'_>,
) -> Option<CommandTool> {
    let Some(program) = table.text("command") else {
        if !table.has_key("command") {
            table.report(
                "kind",
                Diagnostic::new("a command tool needs a `command`")
                    .with_help("like `command = \"./lookup-order\"`; toolgate starts the program without a shell"),
            );
        }
        return None;
    };
    let mut tool = CommandTool::new(reader.resolve_program(program));
    let words = table.names("args").unwrap_or_default();
    reader.record_files_in_args(&words);
    tool = words.into_iter().fold(tool, CommandTool::arg);
    tool = table
        .names("inherit_env")
        .unwrap_or_default()
        .into_iter()
        .fold(tool, |tool, name| tool.inherit(name));
    if let Some(env) = table.table("env") {
        for name in env.keys() {
            if let Some((value, hidden)) = reader.read_secret(&env, &name) {
                tool = hidden.into_iter().fold(tool.env(&name, value), CommandTool::redact_value);
            }
        }
    }
    let properties = input.get("properties").and_then(serde_json::Value::as_object);
    for path in tool.argument_paths() {
        let first = path.to_string().split('/').nth(1).unwrap_or_default().to_owned();
        if properties.is_none_or(|properties| !properties.contains_key(&first)) {
            let problem = Diagnostic::new(format!("`{path}` is not an argument of this tool"));
            let known = properties.into_iter().flat_map(|properties| properties.keys());
            table.report(
                "args",
                problem.with_suggestion(&first, known).with_default_help("declare it in `input`"),
            );
        }
    }
    let sandbox =
        table.table("sandbox").map(|sandbox| read_sandbox(&sandbox, reader)).unwrap_or_default();
    Some(tool.sandbox(sandbox))
}

fn read_sandbox(table: &TomlTable<'_>, reader: &ConfigReader<'_>) -> Sandbox {
    let mut sandbox = Sandbox::default();
    let paths = |key: &str| {
        table
            .names(key)
            .unwrap_or_default()
            .into_iter()
            .map(|path| reader.base_dir.join(path))
            .collect()
    };
    (sandbox.read, sandbox.write) = (paths("read"), paths("write"));
    sandbox.network = table.bool("network").unwrap_or(false);
    for (key, slot) in [("memory", &mut sandbox.memory), ("file_size", &mut sandbox.file_size)] {
        *slot = table.bytes(key).unwrap_or(*slot);
    }
    for (key, slot) in [("processes", &mut sandbox.processes), ("files", &mut sandbox.files)] {
        *slot = table.count(key).unwrap_or(*slot);
    }
    if let Some(cpu) = table.positive_std_duration("cpu") {
        sandbox.cpu = cpu.as_secs().max(1);
    }
    table.reject_unknown_keys("`sandbox`");
    sandbox
}
