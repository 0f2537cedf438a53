//! Reads MCP servers from configuration files of clients.

use std::path::{Path, PathBuf};

use crate::parse::upstream::MAX_UPSTREAM_NAME_CHARS;
use crate::secret_ref::SecretRef;
use crate::upstream_config::{
    Credentials, UndeclaredToolPolicy, UpstreamConfig, UpstreamTransport,
};

/// Reads the servers of a client's configuration file.
///
/// The format is `{"mcpServers": {"name": {"command", "args", "env"} or {"url", "headers"}}}`.
/// `${NAME}` and `${env:NAME}` are replaced by environment variables. The tools of these servers
/// are offered, and a person is asked before each call.
///
/// # Errors
/// The text is not valid. The message says why.
///
/// ```
/// let text = r#"{"mcpServers": {"git": {"command": "uvx", "args": ["mcp-server-git"]}}}"#;
/// assert_eq!(toolgate_config::parse_mcp_servers(text).unwrap()[0].name, "git");
/// ```
pub fn parse_mcp_servers(text: &str) -> Result<Vec<UpstreamConfig>, String> {
    // Some programs write a byte order mark, and some clients allow comments.
    let text = text.trim_start_matches('\u{feff}');
    let parsed: Result<serde_json::Value, _> =
        jsonc_parser::parse_to_serde_value(text, &jsonc_parser::ParseOptions::default());
    let document = parsed.map_err(|error| format!("not valid JSON: {error}"))?;
    // `toolgate init` moves the servers of a client under its own key; VS Code uses `servers`.
    let servers = [PROXIED_SERVERS_KEY, "mcpServers", "servers"]
        .into_iter()
        .find_map(|key| document.get(key));
    let servers = servers.and_then(serde_json::Value::as_object).ok_or("missing `mcpServers`")?;
    let mapped = toolgate::tool::name::map_foreign_names(servers.keys().map(String::as_str));
    let name_conflict = |name: &str| {
        format!(
            "`{}` has the same name as another server after mapping",
            toolgate_text::escape_for_display(name)
        )
    };
    if let Some(name) = mapped.excluded.iter().next() {
        return Err(name_conflict(name));
    }
    let mut found: Vec<UpstreamConfig> = Vec::new();
    for (valid_name, name) in &mapped.names {
        let Some(server) = servers.get(name).filter(|server| !is_toolgate(server)) else {
            continue;
        };
        let with_server_name =
            |reason: String| format!("`{}`: {reason}", toolgate_text::escape_for_display(name));
        if server.get("disabled").and_then(serde_json::Value::as_bool) == Some(true) {
            continue;
        }
        let valid_name: String = valid_name.chars().take(MAX_UPSTREAM_NAME_CHARS).collect();
        // Shortened names may be equal.
        if found.iter().any(|known| known.name == valid_name) {
            return Err(name_conflict(name));
        }
        let (transport, places) = read_server(server).map_err(with_server_name)?;
        let upstream = UpstreamConfig::new(&valid_name, transport);
        found.push(UpstreamConfig {
            undeclared: UndeclaredToolPolicy::Ask,
            exposes_prompts: true,
            exposes_resources: true,
            path_refs: places,
            ..upstream
        });
    }
    Ok(found)
}

/// Checks whether a server is toolgate itself, which must not be its own upstream.
fn is_toolgate(server: &serde_json::Value) -> bool {
    let command = server.get("command").and_then(serde_json::Value::as_str);
    let named =
        |program: &str| Path::new(program).file_name().is_some_and(|name| name == "toolgate");
    let found =
        command.and_then(|command| SecretRef::parse_client_value(command).ok()?.resolve().ok());
    command.is_some_and(named) || found.is_some_and(|program| named(&program))
}

/// Key under which a client's file keeps the servers that toolgate proxies.
pub const PROXIED_SERVERS_KEY: &str = "mcpServersBehindToolgate";

/// Reads the transport of a server, and the program and directory as written.
fn read_server(server: &serde_json::Value) -> Result<(UpstreamTransport, Vec<SecretRef>), String> {
    let text = |key: &str| server.get(key).and_then(serde_json::Value::as_str);
    // Some clients write `null` for absent keys, and accept numbers.
    let value_of = |key: &str| server.get(key).filter(|value| !value.is_null());
    let pairs = |key: &str| -> Result<Vec<(String, SecretRef)>, String> {
        let Some(found) = value_of(key) else { return Ok(Vec::new()) };
        let found = found.as_object().ok_or_else(|| format!("`{key}` must be an object"))?;
        let read_entry = |(name, value): (&String, &serde_json::Value)| {
            let value = match value {
                serde_json::Value::String(text) => SecretRef::parse_client_value(text)?,
                serde_json::Value::Number(number) => {
                    SecretRef::parse_client_value(&number.to_string())?
                }
                _ => return Err(format!("`{key}.{name}` must be a string")),
            };
            Ok((name.clone(), value))
        };
        found.iter().filter(|(_, value)| !value.is_null()).map(read_entry).collect()
    };
    if let Some(command) = text("command") {
        let args = value_of("args")
            .map(|args| args.as_array().ok_or("`args` must be a list"))
            .transpose()?
            .cloned()
            .unwrap_or_default();
        let word = |word: &serde_json::Value| {
            word.as_str()
                .ok_or_else(|| "`args` must contain only strings".to_owned())
                .and_then(SecretRef::parse_client_value)
        };
        let args: Vec<SecretRef> = args.iter().map(word).collect::<Result<_, _>>()?;
        // An unset variable keeps only this upstream offline, as in every other place.
        let mut places = Vec::new();
        let mut place = |written: &str| -> Result<PathBuf, String> {
            let reference = SecretRef::parse_client_value(written)?;
            let path = reference.resolve().unwrap_or_else(|_| written.to_owned());
            places.push(reference);
            Ok(PathBuf::from(path))
        };
        let program = place(command)?;
        let directory = text("cwd").map(place).transpose()?;
        return Ok((
            UpstreamTransport::Command {
                program,
                args,
                env: pairs("env")?,
                inherit: Vec::new(),
                directory,
            },
            places,
        ));
    }
    let url = text("url")
        .or_else(|| text("serverUrl"))
        .or_else(|| text("httpUrl"))
        .ok_or("missing `command` or `url`")?;
    let sse = text("type").or_else(|| text("transport")).map(|transport| transport == "sse");
    let url = SecretRef::parse_client_value(url)?;
    Ok((
        UpstreamTransport::Http {
            url,
            headers: pairs("headers")?,
            credentials: Credentials::None,
            sse,
        },
        Vec::new(),
    ))
}
