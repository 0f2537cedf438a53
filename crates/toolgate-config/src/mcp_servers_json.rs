//! Reads MCP servers from configuration files of clients.

use std::path::{Path, PathBuf};

use crate::parse::upstream::{Credentials, LONGEST, Reach, Undeclared, Upstream};
use crate::secret_ref::Reference;

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
/// assert_eq!(toolgate::policy::source::mcp_servers(text).unwrap()[0].name, "git");
/// ```
pub fn parse_mcp_servers(text: &str) -> Result<Vec<Upstream>, String> {
    // Some programs write a byte order mark, and some clients allow comments.
    let text = text.trim_start_matches('\u{feff}');
    let parsed: Result<serde_json::Value, _> = jsonc_parser::parse_to_serde_value(text, &jsonc_parser::ParseOptions::default());
    let document = parsed.map_err(|error| format!("not valid JSON: {error}"))?;
    // `toolgate init` moves the servers of a client under its own key; VS Code uses `servers`.
    let servers = [BEHIND_TOOLGATE, "mcpServers", "servers"].into_iter().find_map(|key| document.get(key));
    let servers = servers.and_then(serde_json::Value::as_object).ok_or("missing `mcpServers`")?;
    let mapped = toolgate::tool::name::map_foreign(servers.keys().map(String::as_str));
    let clash = |name: &str| format!("`{}` has the same name as another server after mapping", toolgate_text::shown(name));
    if let Some(name) = mapped.excluded.iter().next() {
        return Err(clash(name));
    }
    let mut found: Vec<Upstream> = Vec::new();
    for (legal, name) in &mapped.names {
        let Some(server) = servers.get(name).filter(|server| !is_toolgate(server)) else { continue };
        let named = |why: String| format!("`{}`: {why}", toolgate_text::shown(name));
        if server.get("disabled").and_then(serde_json::Value::as_bool) == Some(true) {
            continue;
        }
        let legal: String = legal.chars().take(LONGEST).collect();
        // Shortened names may be equal.
        if found.iter().any(|known| known.name == legal) {
            return Err(clash(name));
        }
        let (reach, places) = read_server(server).map_err(named)?;
        let upstream = Upstream::new(&legal, reach);
        found.push(Upstream { undeclared: Undeclared::Ask, exposes_prompts: true, exposes_resources: true, path_refs: places, ..upstream });
    }
    Ok(found)
}

/// Checks whether a server is toolgate itself, which must not be its own upstream.
fn is_toolgate(server: &serde_json::Value) -> bool {
    let command = server.get("command").and_then(serde_json::Value::as_str);
    let named = |program: &str| Path::new(program).file_name().is_some_and(|name| name == "toolgate");
    let found = command.and_then(|command| Reference::parse_client_value(command).ok()?.resolve().ok());
    command.is_some_and(named) || found.is_some_and(|program| named(&program))
}

/// Key under which a client's file keeps the servers that toolgate proxies.
pub const BEHIND_TOOLGATE: &str = "mcpServersBehindToolgate";

/// Reads the transport of a server, and the program and directory as written.
fn read_server(server: &serde_json::Value) -> Result<(Reach, Vec<Reference>), String> {
    let text = |key: &str| server.get(key).and_then(serde_json::Value::as_str);
    // Some clients write `null` for absent keys, and accept numbers.
    let given = |key: &str| server.get(key).filter(|value| !value.is_null());
    let pairs = |key: &str| -> Result<Vec<(String, Reference)>, String> {
        let Some(found) = given(key) else { return Ok(Vec::new()) };
        let found = found.as_object().ok_or_else(|| format!("`{key}` must be an object"))?;
        let one = |(name, value): (&String, &serde_json::Value)| {
            let value = match value {
                serde_json::Value::String(text) => Reference::parse_client_value(text)?,
                serde_json::Value::Number(number) => Reference::parse_client_value(&number.to_string())?,
                _ => return Err(format!("`{key}.{name}` must be a string")),
            };
            Ok((name.clone(), value))
        };
        found.iter().filter(|(_, value)| !value.is_null()).map(one).collect()
    };
    if let Some(command) = text("command") {
        let args = given("args").map(|args| args.as_array().ok_or("`args` must be a list")).transpose()?.cloned().unwrap_or_default();
        let word = |word: &serde_json::Value| {
            word.as_str().ok_or_else(|| "`args` must contain only strings".to_owned()).and_then(Reference::parse_client_value)
        };
        let args: Vec<Reference> = args.iter().map(word).collect::<Result<_, _>>()?;
        // An unset variable keeps only this upstream offline, as in every other place.
        let mut places = Vec::new();
        let mut place = |written: &str| -> Result<PathBuf, String> {
            let reference = Reference::parse_client_value(written)?;
            let path = reference.resolve().unwrap_or_else(|_| written.to_owned());
            places.push(reference);
            Ok(PathBuf::from(path))
        };
        let program = place(command)?;
        let directory = text("cwd").map(place).transpose()?;
        return Ok((Reach::Command { program, args, env: pairs("env")?, inherit: Vec::new(), directory }, places));
    }
    let url = text("url").or_else(|| text("serverUrl")).or_else(|| text("httpUrl")).ok_or("missing `command` or `url`")?;
    let sse = text("type").or_else(|| text("transport")).map(|transport| transport == "sse");
    let url = Reference::parse_client_value(url)?;
    Ok((Reach::Http { url, headers: pairs("headers")?, credentials: Credentials::None, sse }, Vec::new()))
}
