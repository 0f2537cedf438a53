//! Edits the MCP server lists of clients: adds toolgate in front of the servers, or removes
//! toolgate.

use jsonc_parser::cst::{CstInputValue, CstObject};
use serde_json::Value;

use toolgate_hook::client_hooks::{parse_settings, serialize_settings};

/// Key of the servers that run behind toolgate.
pub(crate) const UPSTREAM_SERVERS_KEY: &str = toolgate_config::PROXIED_SERVERS_KEY;
/// Name of toolgate in the server list.
const TOOLGATE_SERVER_NAME: &str = "toolgate";

/// Returns the file with toolgate as its only server, and the other servers under their own key.
pub(crate) fn add_toolgate_server(
    text: &str,
    program: &str,
    config: &str,
) -> Result<String, String> {
    let root = parse_settings(text)?;
    let root_object = root
        .object_value_or_create()
        .ok_or("not a JSON object; replace it with `{}` or move it away")?;
    let servers =
        root_object.object_value_or_create("mcpServers").ok_or("`mcpServers` is not an object")?;
    let other_servers: Vec<(String, Value)> = object_members(&servers)
        .into_iter()
        .filter(|(name, _)| name != TOOLGATE_SERVER_NAME)
        .collect();
    if !other_servers.is_empty() {
        let upstream_servers = root_object
            .object_value_or_create(UPSTREAM_SERVERS_KEY)
            .ok_or_else(|| format!("`{UPSTREAM_SERVERS_KEY}` is not an object"))?;
        for (name, server) in &other_servers {
            if upstream_servers.get(name).is_some() {
                return Err(format!(
                    "`{name}` is in both `mcpServers` and `{UPSTREAM_SERVERS_KEY}`; remove one of them"
                ));
            }
            upstream_servers.append(name, to_cst_value(server));
        }
        upstream_servers.ensure_multiline();
    }
    for property in servers.properties() {
        property.remove();
    }
    let arguments = ["serve", "--stdio", "--config", config];
    let args = CstInputValue::Array(
        arguments.into_iter().map(|argument| CstInputValue::String(argument.to_owned())).collect(),
    );
    servers.append(
        TOOLGATE_SERVER_NAME,
        CstInputValue::Object(vec![
            ("command".to_owned(), CstInputValue::String(program.to_owned())),
            ("args".to_owned(), args),
        ]),
    );
    servers.ensure_multiline();
    Ok(serialize_settings(&root, text))
}

/// Returns the file without toolgate, and with the servers back in their place.
pub(crate) fn remove_toolgate_server(text: &str) -> Result<String, String> {
    let root = parse_settings(text)?;
    let Some(root_object) = root.object_value() else { return Ok(serialize_settings(&root, text)) };
    if let Some(servers) = root_object.object_value("mcpServers") {
        if let Some(entry) = servers.get(TOOLGATE_SERVER_NAME) {
            entry.remove();
        }
        if let Some(upstream_servers) = root_object.object_value(UPSTREAM_SERVERS_KEY) {
            for (name, server) in object_members(&upstream_servers) {
                if servers.get(&name).is_none() {
                    servers.append(&name, to_cst_value(&server));
                }
            }
            servers.ensure_multiline();
        }
    }
    if let Some(upstream_servers) = root_object.get(UPSTREAM_SERVERS_KEY) {
        upstream_servers.remove();
    }
    Ok(serialize_settings(&root, text))
}

/// Returns the program and the configuration path of the toolgate server in a file.
pub(crate) fn find_toolgate_server(text: &str) -> Result<Option<(String, Option<String>)>, String> {
    let file = toolgate_hook::client_hooks::parse_settings_json(text)?;
    let Some(entry) = file.pointer(&format!("/mcpServers/{TOOLGATE_SERVER_NAME}")) else {
        return Ok(None);
    };
    let program = entry.get("command").and_then(Value::as_str).unwrap_or_default().to_owned();
    let args: Vec<&str> = entry
        .get("args")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let config = args
        .iter()
        .position(|argument| *argument == "--config")
        .and_then(|index| args.get(index + 1))
        .map(|path| (*path).to_owned());
    Ok(Some((program, config)))
}

/// Returns whether a file has servers behind toolgate.
pub(crate) fn has_upstream_servers(text: &str) -> bool {
    let file = toolgate_hook::client_hooks::parse_settings_json(text).unwrap_or_default();
    file.get(UPSTREAM_SERVERS_KEY)
        .and_then(Value::as_object)
        .is_some_and(|servers| !servers.is_empty())
}

fn object_members(object: &CstObject) -> Vec<(String, Value)> {
    let to_member = |property: &jsonc_parser::cst::CstObjectProp| {
        Some((property.decoded_name()?, property.to_serde_value().unwrap_or_default()))
    };
    object.properties().iter().filter_map(to_member).collect()
}

fn to_cst_value(value: &Value) -> CstInputValue {
    match value {
        Value::Null => CstInputValue::Null,
        Value::Bool(value) => CstInputValue::Bool(*value),
        Value::Number(number) => CstInputValue::Number(number.to_string()),
        Value::String(text) => CstInputValue::String(text.clone()),
        Value::Array(items) => CstInputValue::Array(items.iter().map(to_cst_value).collect()),
        Value::Object(map) => CstInputValue::Object(
            map.iter().map(|(key, value)| (key.clone(), to_cst_value(value))).collect(),
        ),
    }
}
