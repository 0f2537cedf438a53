//! Renders the configuration templates of clients.

use std::path::Path;

use toolgate_hook::client_hooks::SupportedClient;

/// Returns the configuration template of a client.
pub(super) const fn client_template(client: SupportedClient) -> &'static str {
    match client {
        SupportedClient::ClaudeDesktop => include_str!("server.toml"),
        SupportedClient::ClaudeCode => include_str!("claude-code.toml"),
        SupportedClient::Codex => include_str!("codex.toml"),
        SupportedClient::Cursor => include_str!("cursor.toml"),
        SupportedClient::Vscode => include_str!("vscode.toml"),
    }
}

/// Renders a new configuration for a project, or for the user if `is_user_config`.
pub(super) fn render_template(
    client: Option<SupportedClient>,
    is_user_config: bool,
    store: Option<&Path>,
    import: Option<&Path>,
) -> String {
    let text = match client {
        Some(client) => client_template(client),
        None if import.is_some() => client_template(SupportedClient::ClaudeDesktop),
        None => include_str!("bare.toml"),
    };
    // The user's own configuration needs no `toolgate trust`.
    let audience = match is_user_config {
        false => "the agent in this project. Run `toolgate trust` after every change.",
        true => "your agents in all projects. Every change is in force at once.",
    };
    let text = text.replace("#WHOM#", audience);
    let line = import.map_or_else(
        || "# mcp_servers = [\".mcp.json\"]".to_owned(),
        |path| format!("mcp_servers = [{}]", serde_json::json!(path)),
    );
    // A template for hooks has no line for servers, so one is added after `name` if there are any.
    let text = match (text.contains("#IMPORT#"), import) {
        (false, Some(_)) => {
            text.replacen("\n# store", &format!("\n{line}  # for `toolgate serve`\n# store"), 1)
        }
        _ => text.replace("#IMPORT#", &line),
    };
    let Some(store) = store else { return text };
    // The `store` line, even if it is commented out.
    let line = |line: &str| match line.trim_start_matches("# ").starts_with("store = ") {
        true => format!("store = {}\n", serde_json::json!(store)),
        false => format!("{line}\n"),
    };
    text.lines().map(line).collect()
}
